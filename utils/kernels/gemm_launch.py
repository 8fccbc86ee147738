"""Start the Gluon GEMM's kernels: describe the operands for TMA, choose a plan, compile, adapt the PTX, launch.

`prepare` decides all of that once, so that a call of `utils.kernels.gemm` is cheap when it comes again.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from utils.kernels.assembling import reassembled
from utils.kernels.gemm_gluon import gemm_kernel, short_kernel
from utils.kernels.gemm_plan import BLOCK_K, Plan, ceil_div, choose, clusters_at_once, items_of
from utils.kernels.gemm_work import OWN, SHARED
from utils.kernels.handle import Handle
from utils.kernels.workspace import workspace


def padded(shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """Return a matrix whose rows start at multiples of 16 bytes, as TMA writes them; it may write the bytes between them, too."""
    rows, columns = shape
    if columns % 8 == 0:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return torch.empty((rows, ceil_div(columns, 8) * 8), dtype=like.dtype, device=like.device)[:, :columns]


def prepare(a: torch.Tensor, b: torch.Tensor, plan: Plan | None = None, split: int = 1) -> Callable[..., torch.Tensor]:
    """Return a function of A, B and, if it is there, C, a matrix as `padded` makes it, that launches the kernel of a plan.

    The function takes operands of the same shapes, strides and alignment, which the caller has checked; nothing is empty. Without a
    plan the one with the shortest estimated time is taken. With a plan, tiles that do not fill a round are cut into `split` parts.
    """
    shape, k = (a.shape[0], b.shape[1]), a.shape[1]
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    if plan is None:
        plan, split = choose(*shape, k, sms)
    (m, n), (a_columns, *a_rows), (b_columns, *b_rows) = shape, rows_in_memory("A", a), rows_in_memory("B", b)
    if plan.transposed:
        a, b, m, n, a_rows, b_rows, a_columns, b_columns = b, a, n, m, b_rows, a_rows, not b_columns, not a_columns
    if split > max(1, ceil_div(k, BLOCK_K)):
        raise ValueError(f"{split} parts of K = {k} would be shorter than one step of {BLOCK_K}.")
    plan = replace(plan, a_column_major=a_columns, b_column_major=b_columns)
    if not a.is_cuda:
        # The simulator has no clusters, and products as wide as tensors.
        plan = replace(plan, cluster=1, block_n=plan.columns)
    items = items_of(m, n, plan, split, sms)
    # Not by what `workspace` returns for nothing: a kernel with other types of arguments would be compiled once more.
    partial_sums = max(1, plan.cluster * items.rest * items.split * plan.block_m * plan.block_n)
    counters = max(1, plan.cluster * items.rest * plan.consumers)
    # The short kernel has a block for each item; the other a block an SM, or an item where there are fewer.
    groups = items.number if plan.short else min(clusters_at_once(plan.cluster, sms), items.number)
    kernel, blocks = short_kernel if plan.short else gemm_kernel, groups * plan.cluster
    sizes = (m, n, k, items.number, items.whole, items.split, plan)
    options = {"num_warps": 4, "launch_pdl": True}

    def described(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[TensorDescriptor, ...]:
        c_rows = [*shape], [c.stride(0), 1]
        given = zip((a, b, c), (a_rows, b_rows, c_rows), plan.boxes, strict=True)
        return tuple(TensorDescriptor(x, *rows, box, box_layout(box)) for x, rows, box in given)

    def launch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
        c = padded(shape, a) if c is None else c
        a, b = (b, a) if plan.transposed else (a, b)
        start(a, b, c, *workspace(c, partial_sums, counters))
        return c.contiguous()

    if not a.is_cuda:
        start = lambda a, b, c, *memory: kernel[(blocks,)](*described(a, b, c), *memory, *sizes, **options)  # noqa: E731
        return launch
    c = padded(shape, a)
    with torch.cuda.device(a.device):
        tensors = (*described(a, b, c), *workspace(c, partial_sums, counters))
        compiled = kernel.warmup(*tensors, *sizes, grid=(blocks,), **options)
        start = Handle(adapted(compiled, plan), (groups,), tensors, sizes, a.device.index, plan.cluster)
    return launch


def box_layout(shape: list[int]) -> gl.NVMMASharedLayout:
    """Return the layout in shared memory of a box that TMA copies, swizzled as wgmma reads it; the same for fp16 and bf16."""
    return gl.NVMMASharedLayout.get_default_for(shape, gl.float16)


def rows_in_memory(label: str, x: torch.Tensor) -> tuple[bool, list[int], list[int]]:
    """Return whether a matrix is column-major, and its shape and strides in memory; raise a ValueError if TMA cannot copy it."""
    for column_major, y in ((False, x), (True, x.T)):
        (outer, inner), pitch = y.shape, y.stride(0)
        if outer == 1:
            pitch = ceil_div(inner, 8) * 8  # there is no second row: any pitch will do
        if (y.stride(1) == 1 or inner == 1) and pitch % 8 == 0 and pitch >= inner and x.data_ptr() % 16 == 0:
            return column_major, [outer, inner], [pitch, 1]
    raise ValueError(
        f"gemm_warp_specialized copies {label} by TMA, which needs rows (or columns) of neighbouring elements that "
        f"start at multiples of 16 bytes; got {label} {tuple(x.shape)} with strides {x.stride()} elements, "
        f"{x.data_ptr() % 16} bytes past a multiple of 16. Pad its rows to a multiple of 8 elements, copy it with "
        ".contiguous() or .clone(), or use gemm_autotuned."
    )


_SHARED = re.compile(rf"// {SHARED}.*?// {OWN}", re.DOTALL)
_COPY = re.compile(
    r"([^;\n]*cp\.async\.bulk\.tensor\.\dd\.shared::)\w+(\.global\.mbarrier::complete_tx::bytes)([^;]*);"
)
_ARRIVAL = re.compile(r"(@%\w+ )?mbarrier\.arrive\.shared(?:::cta)?\.b64 _, \[(%\w+)\];")


def multicast(ptx: str, plan: Plan) -> str:
    """Make the marked copies go to all blocks, and arrivals count in all."""
    # Place and barrier of a copy are this block's: those of the others are as far from the beginning of their memory.
    blocks = f"{{ .reg .b16 all; mov.b16 all, {(1 << plan.cluster) - 1};"
    ptx = _SHARED.sub(lambda part: _COPY.sub(rf"{blocks}\1cluster\2.multicast::cluster\3, all; }}", part[0]), ptx)
    ptx, arrivals = _ARRIVAL.subn(functools.partial(_arrive_in_all, blocks=plan.cluster), ptx)
    copies = ptx.count(".multicast::cluster")
    if not arrivals or not copies:
        raise ValueError(f"the kernel has {copies} shared copies and {arrivals} arrivals: no cluster.")
    return ptx


def _arrive_in_all(found: re.Match, blocks: int) -> str:
    # One thread of the four warps would arrive. Its warp does so instead, each lane at a block of its own, in one instruction.
    # The plain form, as within a block: with `.release.cluster` ptxas puts a fence of the whole GPU before each arrival, which
    # takes over a microsecond. There is nothing to release: threads have stored nothing, and their reads are over.
    condition, barrier = found[1], found[2]
    if condition is None or condition.startswith("@!"):
        raise ValueError(f"An arrival of one thread has a condition that says which: {found[0]}")
    return (
        f"{{ .reg .b32 lane, there; .reg .pred arrives; vote.sync.any.pred arrives, {condition.strip()[1:]}, -1; "
        f"mov.u32 lane, %laneid; setp.lt.and.u32 arrives, lane, {blocks}, arrives; "
        f"mapa.shared::cluster.u32 there, {barrier}, lane; "
        f"@arrives mbarrier.arrive.shared::cluster.b64 _, [there]; }}"
    )


_PRODUCT = re.compile(r"(wgmma\.mma_async\.sync\.aligned\.m64n)\d+(k16[\w.]*) *\{([^{}]*)\}")


def narrow(ptx: str, columns: int) -> str:
    """Make products of all columns of a tile's tensors ones of the tile's columns; the sums of the others stay zero."""
    first = lambda found: ",".join(found[3].split(",")[: columns // 2])  # noqa: E731
    return _PRODUCT.sub(lambda found: f"{found[1]}{columns}{found[2]} {{{first(found)}}}", ptx)


_MEETING = re.compile(r"\s*bar\.sync\s+0;")
_SYNCHRONIZED = re.compile(r"mbarrier\.|wgmma|matrix|cp\.async|\bbar\.|\bbra\b|_tx")


def fewer_meetings(ptx: str) -> str:
    """Let only one warp's lanes wait for each other where that warp announces bytes and starts copies, one after the other.

    Triton lets all warps of the block meet between any two operations on the same shared memory.
    """
    lines, before = ptx.splitlines(), ""
    operations = [(i, line) for i, line in enumerate(lines) if _SYNCHRONIZED.search(line)]
    for (i, line), (_, behind) in itertools.pairwise([*operations, (0, "")]):
        if _MEETING.fullmatch(line) and "_tx" in before and "_tx" in behind:
            lines[i] = "bar.warp.sync -1;"
        before = line
    return "\n".join(lines) + "\n"


def prefetch_descriptors(ptx: str) -> str:
    """Fetch the TMA descriptors before each wait for the launch before: they are arguments, and there by then."""
    names = re.findall(r"\.param \.align 64 \.b8 (\w+)\[128\]", ptx)
    fetch = "".join(f"mov.b64 map, {name}; cvta.param.u64 map, map; prefetch.tensormap [map]; " for name in names)
    return ptx.replace("griddepcontrol.wait;", f"{{ .reg .b64 map; {fetch}}} griddepcontrol.wait;")


def adapted(compiled: Any, plan: Plan) -> Any:
    """Return a copy of a kernel that Triton compiled, with what Triton has no word for; not yet loaded when it is made."""

    def rewrite(ptx: str) -> str:
        ptx = prefetch_descriptors(multicast(ptx, plan) if plan.cluster > 1 else ptx)
        ptx = narrow(ptx, plan.block_n)
        return fewer_meetings(ptx) if plan.short else ptx

    return reassembled(compiled, rewrite)


def compile_for_hopper(plan: Plan, dtype: str = "bf16"):
    """The kernel compiled for sm_90a, on any machine: `.asm["ptx"]`, `.asm["cubin"]`, `.metadata.shared`."""
    from utils.kernels.offline import compile_gluon

    descriptors = zip(("a_desc", "b_desc", "c_desc"), plan.boxes, strict=True)
    signature = {name: f"tensordesc<{dtype}{box},{box_layout(box)!r}>" for name, box in descriptors}
    signature |= {"sums": "*fp32", "counters": "*i32"}
    signature |= dict.fromkeys(("M", "N", "K", "items", "whole", "split"), "i32")
    kernel = short_kernel if plan.short else gemm_kernel
    return adapted(compile_gluon(kernel, signature, {"PLAN": plan}, ["sums", "counters"]), plan)
