"""Run a step of the backward ladder on tensors (B, H, S, D) of a Hopper GPU.

    out, lse = forward(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = backward(dout, q, k, v, out, lse, causal=True)

Three kernels: `start_backward` (delta, and zeros for the sums of dQ), the step's own, and `finish_dq`. In deterministic
mode the step's kernel leaves dQ to the one of `dq.py`, which needs no sums.
"""

from __future__ import annotations

import functools
import importlib

import torch

from utils.attention.gluon.arguments import addressable
from utils.attention.gluon.backward.arguments import Gradients, processors
from utils.attention.gluon.backward.balance import choose_plan
from utils.attention.gluon.backward.plan import BackwardPlan, dq_apart, plan_for

MODULES = {
    1: "step1_atomics",
    2: "step2_tma",
    3: "step3_warp_specialized",
    4: "step4_overlapped",
    5: "step5_storing_warp",
    6: "step6_one_consumer",
}
NAMES = {name: f"attention_backward_step{step}" for step, name in MODULES.items()} | {
    "wide_heads": "attention_backward_wide"
}


# Steps that know a field of a plan; head dimension 256 knows none of them.
FIELDS = {
    (5,): ("stagger",),
    (5, 6): ("producer_first", "v_left"),
    (6,): ("queue", "split", "even", "named", "storer_fences", "by_polynomial", "divided"),
}


def module_name(step: int, plan: BackwardPlan) -> str:
    """Name the module of a step; steps 3 to 6 have one in common for head dimension 256."""
    return "wide_heads" if step >= 3 and plan.block_d == 256 else MODULES[step]


@functools.cache
def module_of(step: int, plan: BackwardPlan):
    """Import the module of a step, with its kernel and its `launch` (imports Triton)."""
    return importlib.import_module(f"{__package__}.{module_name(step, plan)}")


def kernel_of(step: int, plan: BackwardPlan):
    """Return the Gluon kernel of a step (imports Triton)."""
    return getattr(module_of(step, plan), NAMES[module_name(step, plan)])


def check_plan(step: int, plan: BackwardPlan) -> None:
    """Refuse a plan with fields that the step's kernel does not know: its results could be wrong."""
    module = module_name(step, plan)
    for steps, names in FIELDS.items():
        fields = [name for name in names if getattr(plan, name)]
        if fields and module not in [MODULES[n] for n in steps]:
            raise ValueError(
                f"Only step {' and '.join(map(str, steps))}, at head dimensions up to 128, know {', '.join(fields)}; got step "
                f"{step} with tiles of width {plan.block_d}. Set these fields to False, or take another step."
            )


def shape_of(q: torch.Tensor, k: torch.Tensor) -> tuple[int, int, int, int, int, int]:
    """Return what a plan is chosen by: head dimension, queries, keys, heads of keys, query heads of each, and SMs."""
    batch, heads, sq, head_dim = q.shape
    kv_heads, sk = k.shape[1:3]
    return head_dim, sq, sk, batch * kv_heads, heads // kv_heads, processors(q.device)


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
    dlse: torch.Tensor | None = None,
    deterministic: bool = False,
    step: int | None = None,
    plan: BackwardPlan | None = None,
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
        dlse: Gradient of the log-sum-exp, if that was used too.
        deterministic: Whether the same inputs must give the same bits; dQ then has a kernel of its own (`dq.py`).
            Not in steps 1 and 2.
        step: Which kernel of the ladder, 1 to 6; None: the fastest way for the head dimension, which at 256 is the
            deterministic one.
        plan: Tile and pipeline; the step's own by default.
    """
    if not q.numel():
        # Contiguous like all other results: torch.compile checks that the layout is the promised one.
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        return dq, *(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    if step is None:
        step, chosen = choose_plan(*shape_of(q, k), causal, window or 0, deterministic)
        plan = plan or chosen
        deterministic = deterministic or dq_apart(q.shape[-1])
    if deterministic and step < 3:
        raise ValueError(
            f"Step {step} of the backward ladder adds to dQ by atomics, in any order; deterministic=True needs step 3 or a later one."
        )
    plan = plan or plan_for(step, q.shape[-1], causal)
    check_plan(step, plan)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    dout, q, k, v = (addressable(x) for x in (dout, q, k, v))
    out = out if out.stride(-1) == 1 else out.contiguous()  # `start_backward` reads rows, TMA does not read it
    dlse = None if dlse is None else dlse.float().contiguous()
    g = Gradients(dout, q, k, v, out, lse.float().contiguous(), dlse, causal, window or 0, scale, plan, deterministic)
    launch(step, g)
    return g.dq, g.dk, g.dv


def launch(step: int, g: Gradients) -> None:
    """Run the kernels of one backward pass."""
    from utils.attention.gluon.backward.fragments import finish_dq, start_backward

    sizes = {"HEAD_DIM": g.head_dim, "BLOCK_D": g.plan.block_d, "num_warps": 4}
    start_backward[(g.rows // 64, g.heads_total)](
        g.out,
        g.dout,
        g.lse,
        g.lse if g.dlse is None else g.dlse,
        g.lse2,
        g.delta,
        g.dq_sums,
        g.counter,
        *g.out.stride()[:3],
        *g.dout.stride()[:3],
        g.sq,
        g.heads,
        g.rows,
        CLEAR=not g.deterministic,
        DLSE=g.dlse is not None,
        COUNT=g.plan.queue,
        **sizes,
    )
    module_of(step, g.plan).launch(g)
    if g.deterministic:
        importlib.import_module(f"{__package__}.dq").launch(g)
        return
    finish_dq[(g.plan.block_d // 64, g.rows // 64, g.heads_total)](
        g.dq_sums, g.dq, *g.dq.stride()[:3], g.sq, g.heads, g.rows, g.scale, FRAGMENTS=step >= 3, **sizes
    )


def launch_blocks(kernel, g: Gradients, *sums, programs: int | None = None, num_warps: int = 4, keys: int = 64) -> None:
    """Run the kernel of steps 3 and on.

    Args:
        kernel: The kernel of the step.
        g: The backward pass.
        *sums: The kernel's own arguments behind the descriptors.
        programs: Number of programs; by default one for each block of keys.
        num_warps: Warps of the kernel's default partition.
        keys: Rows of V, dK and dV that a consumer loads or stores at once.
    """
    kernel[(programs or g.blocks_n * g.kv_heads_total,)](
        *g.descriptors(keys),
        *sums,
        *g.sizes(),
        g.blocks_n,
        g.order.section,
        g.kv_heads_total,
        g.c,
        g.scale,
        PLAN=g.plan,
        CASE=g.case(),
        num_warps=num_warps,
    )
