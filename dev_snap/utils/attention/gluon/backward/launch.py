"""Run a step of the backward ladder on tensors (B, H, S, D) of a Hopper GPU.

    out, lse = forward(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = backward(dout, q, k, v, out, lse, causal=True)

Three kernels: `start_backward` (delta, zeros for the sums of dQ), the step's own, and `finish_dq`.
"""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import dataclass

import torch

from utils.attention.gluon.backward.plan import BackwardCase, BackwardPlan, plan_for

LOG2_E = math.log2(math.e)
L2_BYTES = 32 << 20  # what the heads in flight should fit in, of the H200's 60 MB
MODULES = {3: "step3_warp_specialized", 4: "step4_overlapped"}


@functools.cache
def kernel_of(step: int, plan: BackwardPlan):
    """Return the Gluon kernel of a step (imports Triton)."""
    if plan.block_d == 256:
        return importlib.import_module(f"{__package__}.wide_heads").attention_backward_wide
    return getattr(importlib.import_module(f"{__package__}.{MODULES[step]}"), f"attention_backward_step{step}")


@dataclass(slots=True)
class Gradients:
    """One backward pass to launch: tensors (B, H, S, D), not empty, and the plan of the step.

    lse: (B, H, Sq) fp32, natural logarithm. window: 0 for none.
    """

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    causal: bool
    window: int
    scale: float
    plan: BackwardPlan
    deterministic: bool = False


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    step: int = 3,
    plan: BackwardPlan | None = None,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v.

    Args:
        dout: Gradient of the output (B, H, Sq, D).
        q: Queries (B, H, Sq, D), fp16 or bf16.
        k: Keys (B, Hkv, Sk, D); H is a multiple of Hkv.
        v: Values (B, Hkv, Sk, D).
        out: The forward's output (B, H, Sq, D).
        lse: The forward's log-sum-exp (B, H, Sq), fp32, natural logarithm.
        causal: Whether a query sees keys up to its own position only.
        scale: Factor of the scores, 1/sqrt(D) by default.
        window: A query sees keys that are fewer positions away than this; None: all.
        step: Which kernel of the ladder.
        plan: Tile and pipeline; the step's own by default.
        deterministic: Whether the same inputs must give the same bits: dQ then has a kernel of its own (`dq.py`).
    """
    from utils.attention.gluon.launch import _addressable

    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    plan = plan or plan_for(step, q.shape[-1])
    dout, q, k, v = (_addressable(x) for x in (dout, q, k, v))
    launch(step, Gradients(dout, q, k, v, out, lse, dq, dk, dv, causal, window or 0, scale, plan, deterministic))
    return dq, dk, dv


def launch(step: int, g: Gradients) -> None:
    """Run the kernels of one backward pass."""
    from utils.attention.gluon.backward.fragments import finish_dq, start_backward

    batch, heads, sq, head_dim = g.q.shape
    kv_heads, sk = g.k.shape[1:3]
    plan, device = g.plan, g.q.device
    rows = -(-sq // 128) * 128  # whole tiles of every kernel here
    lse2 = torch.empty((batch * heads, rows), dtype=torch.float32, device=device)
    delta = torch.empty_like(lse2)
    # In deterministic mode nothing is summed in memory, and the kernels get a pointer that they do not use.
    sums = 4 if g.deterministic else batch * heads * rows * plan.block_d
    dq_sums = torch.empty(sums, dtype=torch.float32, device=device)
    start_backward[(rows // 64, batch * heads)](
        g.out,
        g.dout,
        g.lse,
        lse2,
        delta,
        dq_sums,
        *g.out.stride()[:3],
        *g.dout.stride()[:3],
        sq,
        heads,
        rows,
        HEAD_DIM=head_dim,
        BLOCK_D=plan.block_d,
        CLEAR=not g.deterministic,
        num_warps=4,
    )
    blocks_n = -(-sk // plan.block_n)
    section = max(1, L2_BYTES // (rows * plan.block_d * 8))
    kernel_of(step, plan)[(blocks_n * batch * kv_heads,)](
        _rows(g.q, plan.block_m, plan),
        _rows(g.dout, plan.block_m, plan),
        _rows(g.k, plan.block_n, plan),
        _rows(g.v, 64, plan),
        _rows(g.dk, 64, plan),
        _rows(g.dv, 64, plan),
        _numbers(lse2, plan),
        _numbers(delta, plan),
        dq_sums,
        sq,
        sk,
        g.window,
        heads,
        kv_heads,
        heads // kv_heads,
        rows // plan.block_m,
        blocks_n,
        section,
        batch * kv_heads,
        g.scale * LOG2_E,
        g.scale,
        PLAN=plan,
        CASE=BackwardCase(g.causal, g.window > 0, sk % plan.block_n != 0, not g.deterministic),
        num_warps=4,
    )
    if g.deterministic:
        _launch_dq(g, lse2, delta)
        return
    finish_dq[(rows // 64, plan.block_d // 64, batch * heads)](
        dq_sums,
        g.dq,
        *g.dq.stride()[:3],
        sq,
        heads,
        rows,
        g.scale,
        HEAD_DIM=head_dim,
        BLOCK_D=plan.block_d,
        num_warps=4,
    )


def _launch_dq(g: Gradients, lse2: torch.Tensor, delta: torch.Tensor) -> None:
    """Run the kernel that computes dQ alone; lse2, delta: (B * H, rows), rows a multiple of 128."""
    from utils.attention.gluon.backward.dq import attention_backward_dq

    batch, heads, sq, _ = g.q.shape
    kv_heads, sk = g.k.shape[1:3]
    block_n = 8192 // g.plan.block_d
    tiles = -(-sq // 128)
    attention_backward_dq[(tiles * batch * heads,)](
        _rows(g.q, 64, g.plan),
        _rows(g.dout, 64, g.plan),
        _rows(g.k, block_n, g.plan),
        _rows(g.v, block_n, g.plan),
        _rows(g.dq, 64, g.plan),
        lse2,
        delta,
        sq,
        sk,
        g.window,
        heads,
        heads // kv_heads,
        lse2.shape[1],
        tiles,
        batch * heads,
        g.scale * LOG2_E,
        g.scale,
        SLOTS=2,
        CASE=BackwardCase(g.causal, g.window > 0),
        num_warps=4,
    )


def _rows(x: torch.Tensor, rows: int, plan: BackwardPlan):
    from utils.attention.gluon.arguments import _descriptor

    return _descriptor(x, rows, plan.block_d)


def _numbers(x: torch.Tensor, plan: BackwardPlan):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, plan.block_m], gl.NVMMASharedLayout(0, 32, rank=2))
