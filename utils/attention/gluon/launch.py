"""Run a step of the ladder on tensors (B, H, S, D) of a Hopper GPU, and register it with torch as one operator."""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import asdict

import torch

from utils.attention.gluon.plan import BLOCK_M, Plan, aligned, deal_causal_tiles, plan_for, tail_as_window, variant_for

LOG2_E = math.log2(math.e)
MODULES = {
    1: "step1_synchronous",
    2: "step2_async_copy",
    3: "step3_tma",
    4: "step4_warp_specialized",
    5: "step5_overlapped",
}


def kernel_of(step: int):
    """The Gluon kernel of a step (imports Triton)."""
    module = importlib.import_module(f"{__package__}.{MODULES[step]}")
    return getattr(module, f"attention_step{step}")


@torch.library.custom_op("labs::attention_gluon", mutates_args=(), device_types="cuda")
def attention_gluon(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    window: int,
    return_lse: bool,
    step: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention forward: (output like q, log-sum-exp (B, H, Sq) fp32 or empty). window 0: none."""
    if scale <= 0:
        # The kernels take the maximum before they scale. Turned queries give the same scores with a scale they take.
        turned = torch.zeros_like(q) if scale == 0 else -q
        return attention_gluon(turned, k, v, causal, -scale or 1.0, window, return_lse, step)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:3] if return_lse else (0,), dtype=torch.float32)
    if q.numel():
        q, k, v = _copyable(q), _copyable(k), _copyable(v)
        with torch.cuda.device(q.device):
            _launch(step, q, k, v, out, lse, causal, scale * LOG2_E, window, return_lse)
    return out, lse


@attention_gluon.register_fake
def _(q, k, v, causal, scale, window, return_lse, step):
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:3] if return_lse else (0,), dtype=torch.float32)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    return_lse: bool = False,
    step: int = 5,
):
    """Attention of q (B, H, Sq, D) over k, v (B, Hkv, Sk, D), fp16 or bf16: output, or (output, log-sum-exp).

    The last query stands at the last key. scale: of the scores, 1/sqrt(D) by default. window: keys fewer than this
    many positions away. The log-sum-exp (B, H, Sq), fp32, natural logarithm, is what a backward pass needs.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    out, lse = attention_gluon(q, k, v, causal, scale, window or 0, return_lse, step)
    return (out, lse) if return_lse else out


def _copyable(x: torch.Tensor) -> torch.Tensor:
    """X itself where TMA can address it: head dimension contiguous, rows at multiples of 16 bytes; else a copy."""
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    aligned = x.data_ptr() % 16 == 0 and all(stride % 8 == 0 and stride > 0 for stride in strides)
    if x.stride(-1) == 1 and aligned:
        return x
    return x.contiguous() if not x.is_contiguous() else x.clone()


def plan_of(step: int, q: torch.Tensor, k: torch.Tensor, causal: bool, window: bool) -> Plan:
    """The plan that a step takes for these tensors on their GPU."""
    batch, heads, sq, head_dim = q.shape
    if step < 5:
        return plan_for(step, head_dim)
    programs = _multiprocessors(q.device)
    return plan_for(step, head_dim, variant_for(head_dim, causal, window, sq, k.shape[2], batch * heads, programs))


def _launch(step: int, q, k, v, out, lse, causal, c, window, return_lse) -> None:
    batch, heads, sq, head_dim = q.shape
    kv_heads, sk = k.shape[1], k.shape[2]
    plan = plan_of(step, q, k, causal, window > 0)
    kernel = kernel_of(step)
    flags = dict(
        BLOCK_M=BLOCK_M,
        BLOCK_N=plan.block_n,
        BLOCK_D=plan.block_d,
        CAUSAL=causal,
        WINDOW=window > 0,
        LSE=return_lse,
        num_warps=4,
    )
    lse_pointer = lse if return_lse else _unused(q.device)
    group = heads // kv_heads
    tiles_m = -(-sq // plan.rows)
    if step < 5 and batch * heads > 65535:
        raise ValueError(
            f"Steps 1 to 4 launch a row of blocks for each head, at most 65535, not {batch} x {heads}. "
            "Step 5 takes any number."
        )
    if step in (1, 2):
        strides = [stride for x in (q, k, v, out) for stride in x.stride()[:3]]
        kernel[(tiles_m, batch * heads)](
            q, k, v, out, lse_pointer, *strides, sq, sk, window, heads, group, c, HEAD_DIM=head_dim, **flags
        )
        return
    descriptors = [
        _descriptor(q, BLOCK_M, plan.block_d),
        _descriptor(k, plan.block_n, plan.block_d),
        _descriptor(v, plan.block_n, plan.block_d),
        _descriptor(out, BLOCK_M, plan.block_d),
    ]
    if step == 3:
        kernel[(tiles_m, batch * heads)](*descriptors, lse_pointer, sq, sk, window, heads, group, c, **flags)
        return
    flags |= dict(CONSUMERS=plan.consumers, STAGES=plan.stages, REGISTERS=plan.registers)
    if step == 4:
        kernel[(tiles_m, batch * heads)](*descriptors, lse_pointer, sq, sk, window, heads, group, c, **flags)
        return
    tail = sk % plan.block_n != 0
    if tail_as_window(plan, causal, window > 0, tail):
        window = sq + sk
        flags["WINDOW"] = True
    programs = min(_multiprocessors(q.device), tiles_m * batch * heads)
    schedule, stride = None, 0
    if causal and not window:
        schedule, stride = _schedule(sq, sk, batch * heads, group, plan, programs, q.device)
    dealt = schedule is not None
    if not dealt:
        schedule = _unused(q.device, torch.int32)
    kernel[(programs,)](
        *descriptors,
        lse_pointer,
        schedule,
        sq,
        sk,
        window,
        tiles_m,
        batch * heads,
        heads,
        group,
        stride,
        c,
        TAIL=tail,
        DEALT=dealt,
        HALVES=plan.halves,
        O_IN_Q=plan.o_in_q,
        OWN_KEYS=plan.own_keys,
        SPLIT=plan.split,
        Q_SLOTS=plan.q_slots,
        V_STAGES=plan.v_stages,
        ALIGNED=aligned(plan, causal, window > 0, sk - sq),
        **flags,
    )


def _descriptor(x: torch.Tensor, rows: int, columns: int):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # Dimensions of size one may have any stride; TMA wants multiples of 16 bytes.
    strides = [stride if size > 1 else 8 for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)] + [1]
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, columns], gl.NVMMASharedLayout(128, 16, rank=4))


@functools.lru_cache(maxsize=64)
def _schedule(sq: int, sk: int, heads_total: int, group: int, plan: Plan, programs: int, device: torch.device):
    head_bytes = sk * plan.block_d * 4
    dealt = deal_causal_tiles(sq, sk, heads_total, group, plan.rows, plan.block_n, head_bytes, programs)
    if dealt is None:
        return None, 0
    # A row for each program: how many tiles, the tiles, and one more to read ahead.
    stride = max(map(len, dealt)) + 2
    table = [[len(tiles), *tiles, *[0] * (stride - 1 - len(tiles))] for tiles in dealt]
    return torch.tensor(table, dtype=torch.int32, device=device), stride


@functools.lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(maxsize=16)
def _unused(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A pointer for an argument that the kernel does not touch."""
    return torch.zeros(4, dtype=dtype, device=device)


def describe(step: int, q: torch.Tensor, k: torch.Tensor, causal: bool, window: bool = False) -> dict:
    """The plan that a step takes for these tensors as a dictionary, for reports."""
    return {"step": step, **asdict(plan_of(step, q, k, causal, window))}
