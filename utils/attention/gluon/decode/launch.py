"""Run the decode kernel on tensors of a Hopper GPU."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch

from utils.attention.gluon.decode.plan import Case, Plan, make_plan, power_of_two

LOG2_E = math.log2(math.e)


def descriptors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> tuple:
    """TMA descriptors of q (B, Hkv, group, Sq, D) and of k and v, (B or pages, Hkv, keys, D)."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    batch, heads, sq, d = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    q_shape = [batch, kv_heads, group, sq, d]
    q_strides = [q.stride(0), q.stride(1) * group, q.stride(1), q.stride(2), 1]

    def descriptor(x, shape, strides, box):
        # Dimensions of size one may have any stride; TMA wants multiples of 16 bytes.
        strides = [stride if size > 1 else 8 for size, stride in zip(shape[:-1], strides[:-1], strict=True)] + [1]
        return TensorDescriptor(x, shape, strides, box, gl.NVMMASharedLayout(128, 16, rank=len(shape)))

    q_box = [1, 1, plan.heads, plan.queries, plan.block_d]
    kv_box = [1, 1, plan.box, plan.block_d]
    return (
        descriptor(q, q_shape, q_strides, q_box),
        descriptor(k, list(k.shape), list(k.stride()), kv_box),
        descriptor(v, list(v.shape), list(v.stride()), kv_box),
    )


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    window: int = 0,
    lengths: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    programs: int = 132,
    plan: Plan | None = None,
    aligned: bool = False,
    scratch: tuple | None = None,
    merge_blocks: int = 4,
    cooperative: bool = True,
) -> None:
    """Launch; see `decode`."""
    from utils.attention.gluon.decode.kernel import attention_decode, attention_decode_merge

    batch, heads, sq, d = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    page = k.shape[2] if table is not None else 0
    plan = plan or make_plan(d, group, sq, page or None)
    tiles = -(-sq // plan.queries)
    case = Case(
        causal and sq > 1,
        window > 0,
        lengths is not None,
        power_of_two(batch) if lengths is not None else 1,
        table is not None,
        aligned,
        lengths is not None or table is not None,
    )
    parts, sums, counters = scratch or make_scratch(plan, programs, batch * kv_heads * tiles, q.device)
    sizes = (
        lengths if lengths is not None else counters,
        table if table is not None else counters,
        table.stride(0) if table is not None else 0,
        batch,
        kv_heads,
        group,
        sq,
        k.shape[2],
        window,
        tiles,
        page,
        table.shape[1] if table is not None else 0,
        d,
        scale * LOG2_E,
    )
    options = {"PLAN": plan, "CASE": case, "num_warps": plan.warps}
    extra = {"launch_cooperative_grid": True} if plan.merge == "together" and cooperative else {}
    attention_decode[(programs,)](*descriptors(q, k, v, plan), out, parts, sums, counters, *sizes, **options, **extra)
    if plan.merge == "launch" and not aligned:
        grid = (batch * kv_heads * tiles, merge_blocks)
        attention_decode_merge[grid](out, parts, sums, counters, *sizes, programs, PLAN=plan, CASE=case, num_warps=4)


def make_scratch(plan: Plan, programs: int, heads: int, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parts, their maxima and sums, and the counters."""
    parts = torch.empty(2 * programs * plan.columns * plan.block_d, dtype=torch.float32, device=device)
    sums = torch.empty(4 * programs * plan.columns, dtype=torch.float32, device=device)
    return parts, sums, torch.zeros(2 * heads, dtype=torch.int32, device=device)
