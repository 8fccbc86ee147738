"""Start the Gluon GEMM's kernels: describe the operands for TMA, choose a plan, compile, adapt the PTX, launch.

`prepare` decides all of that once, so that a call of `utils.kernels.gemm` is cheap when it comes again.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from utils.kernels.assembling import reassemble
from utils.kernels.gemm_gluon import gemm_kernel, short_kernel
from utils.kernels.gemm_plan import BLOCK_K, Plan, ceil_div, choose, clusters_at_once, items_of
from utils.kernels.gemm_work import OWN, SHARED, add_kernel
from utils.kernels.handle import Handle, start

# Options of the second launch: with 64 registers a thread reads ten parts at once.
ADDING = {"num_warps": 2, "maxnreg": 64, "launch_pdl": True}


def allocate_output(shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """Return a matrix for TMA to write: rows start at multiples of 16 bytes, and TMA may write the bytes between the rows."""
    rows, columns = shape
    return torch.empty((rows, ceil_div(columns, 8) * 8), dtype=like.dtype, device=like.device)[:, :columns]


def prepare(a: torch.Tensor, b: torch.Tensor, plan: Plan | None = None, split: int = 1) -> Callable[..., torch.Tensor]:
    """Return a function of A, B and perhaps C that launches the kernel of a plan. C comes from `allocate_output`.

    The caller has checked the operands, and none is empty. The function takes operands of the same shapes, strides and alignment.
    Without a plan, `choose` estimates the fastest. With a plan, the tiles that do not fill a round are cut into `split` parts.
    """
    shape, k = (a.shape[0], b.shape[1]), a.shape[1]
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    (m, n), (a_columns, *a_rows), (b_columns, *b_rows) = shape, rows_in_memory("A", a), rows_in_memory("B", b)
    if plan is None:
        plan, split = choose(*shape, k, a_columns, b_columns, sms)
    plan = plan.with_order(a_columns, b_columns)
    if plan.transposed:
        a, b, m, n, a_rows, b_rows = b, a, n, m, b_rows, a_rows
    if split > max(1, ceil_div(k, BLOCK_K)):
        raise ValueError(f"{split} parts of K = {k} would be shorter than one step of {BLOCK_K}.")
    compiled_for = plan.kernel
    if not a.is_cuda:  # the simulator has no clusters, and products as wide as tensors
        plan = compiled_for = replace(plan, cluster=1, block_n=plan.columns)
    items = items_of(m, n, plan, split, sms)
    # The size is at least one: an empty tensor would have other argument types, and one more kernel would be compiled.
    partial_sums = max(1, plan.cluster * items.rest * items.split * plan.block_m * plan.block_n)
    # The short kernel has a block for each item; the persistent kernel has a block for each SM, if there are enough items.
    groups = items.number if plan.short else min(clusters_at_once(plan.cluster, sms), items.number)
    kernel, blocks = short_kernel if plan.short else gemm_kernel, groups * plan.cluster
    rows, columns, steps = ceil_div(m, plan.block_m * plan.cluster), ceil_div(n, plan.block_n), ceil_div(k, BLOCK_K)
    if rows * columns >= 2**21:  # more than `quotient` divides
        raise ValueError(
            f"C {shape} has {rows * columns} tiles of {plan.name}; the kernel takes up to 2**21. Compute C in pieces."
        )
    sizes: tuple = (rows, columns, steps, items.number, items.whole, items.split)
    sizes += (compiled_for,) if plan.short else (plan.slots, plan.block_n // 8, compiled_for)
    options = {"num_warps": plan.warps, "launch_pdl": True}
    adding = [rows, columns, items.whole, items.split, plan.cluster, plan.block_m, plan.block_n // 8]
    adding += [int(plan.transposed), shape[0], ceil_div(shape[1], 8)]
    pieces = items.rest * plan.cluster, plan.block_m * plan.block_n // 256

    def describe(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[TensorDescriptor, ...]:
        c_rows = [*shape], [c.stride(0), 1]
        given = zip((a, b, c, c), (a_rows, b_rows, c_rows, c_rows), compiled_for.compiled_boxes, strict=False)
        return tuple(TensorDescriptor(x, *rows, box, box_layout(box)) for x, rows, box in given)

    def launch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
        c = allocate_output(shape, a) if c is None else c
        a, b = (b, a) if plan.transposed else (a, b)
        # If no tile has parts, the kernel does not touch this address.
        sums = c if a.is_cuda and not items.rest else torch.empty(partial_sums, dtype=torch.float32, device=c.device)
        if a.is_cuda:
            start(handles, tuple([x.data_ptr() for x in (sums, a, b, c)]))
            return c.contiguous()
        kernel[(blocks,)](sums, *describe(a, b, c), *sizes, **options)
        if items.rest:
            add_kernel[pieces](sums, c._base, *adding, **ADDING)
        return c.contiguous()

    if not a.is_cuda:
        return launch
    c = allocate_output(shape, a)
    with torch.cuda.device(a.device):
        sums = torch.empty(partial_sums, dtype=torch.float32, device=a.device)
        tensors = (sums, *describe(a, b, c))
        compiled = adapt(kernel.warmup(*tensors, *sizes, grid=(blocks,), **options), plan)
        _ = compiled.run  # Triton loads the kernel once for tiles of all widths
        if not plan.short:
            boxes = zip(compiled.metadata.tensordesc_meta, plan.boxes, strict=True)
            # A row of shared memory has 64 columns, and a wider box takes several copies.
            meta = [{**x, "block_size": [rows, min(64, columns)]} for x, (rows, columns) in boxes]
            compiled = copy.copy(compiled)
            compiled.metadata = compiled.metadata._replace(tensordesc_meta=meta)
        handles: tuple[Handle, ...] = ()
        if items.rest:
            added = add_kernel.warmup(sums, c, *adding, grid=pieces, **ADDING)
            handles = (Handle(added, pieces, (sums, c), adding, a.device.index, places=[(0, 0), (3, 0)]),)
        places = [(i, 0) for i in (0, 1, 2, 3, 3)][: len(tensors)]  # both descriptors of C have its address
        handles = (Handle(compiled, (groups,), tensors, sizes, a.device.index, plan.cluster, places), *handles)
    return launch


def box_layout(shape: list[int]) -> gl.NVMMASharedLayout:
    """Return the shared layout of a TMA box, swizzled for wgmma; it is the same for fp16 and bf16."""
    return gl.NVMMASharedLayout.get_default_for(shape, gl.float16)


def rows_in_memory(label: str, x: torch.Tensor) -> tuple[bool, list[int], list[int]]:
    """Return whether a matrix is column-major, and its shape and strides in memory; raise a ValueError if TMA cannot copy it."""
    for column_major, y in ((False, x), (True, x.T)):
        (outer, inner), pitch = y.shape, y.stride(0)
        if outer == 1:
            pitch = ceil_div(inner, 8) * 8  # there is no second row, so any pitch will do
        if (y.stride(1) == 1 or inner == 1) and pitch % 8 == 0 and pitch >= inner and x.data_ptr() % 16 == 0:
            return column_major, [outer, inner], [pitch, 1]
    raise ValueError(
        f"gemm_warp_specialized copies {label} by TMA, which needs rows (or columns) of neighbouring elements that "
        f"start at multiples of 16 bytes; got {label} {tuple(x.shape)} with strides {x.stride()} elements, "
        f"{x.data_ptr() % 16} bytes past a multiple of 16. Pad its rows to a multiple of 8 elements, copy it with "
        ".contiguous() or .clone(), or use gemm_autotuned."
    )


_SHARED = re.compile(rf"// {SHARED}.*?// {OWN}", re.DOTALL)
_COPY = re.compile(r"([^;\n]*cp\.async\.bulk\.tensor\.\dd\.shared::)\w+(\.global\.mbarrier::[\w:]*)([^;]*);")
_ARRIVAL = re.compile(r"(@%\w+ )?mbarrier\.arrive\.shared(?:::cta)?\.b64 _, \[(%\w+)\];")


def multicast(ptx: str, plan: Plan) -> str:
    """Rewrite the PTX for a cluster: marked copies go to all blocks, and arrivals count in all blocks."""
    # The first role sets up barriers before it waits for the registers of other warps. Four warps have enough from the start.
    ptx = re.sub(r"setmaxnreg[^;]*;", "", ptx, count=plan.warps // 8)
    ptx = re.sub(r"setmaxnreg\.inc\S*\s+24;", "", ptx)  # the threads have 24 registers already
    # With a fixed cluster size the assembler writes no code for launches without clusters.
    ptx = ptx.replace("\n.reqntid", f"\n.explicitcluster\n.reqnctapercluster {plan.cluster}, 1, 1\n.reqntid", 1)
    # A copy names a place and a barrier of this block; in the other blocks they have the same offset.
    blocks = f"{{ .reg .b16 all; mov.b16 all, {(1 << plan.cluster) - 1};"
    ptx = _SHARED.sub(lambda part: _COPY.sub(rf"{blocks}\1cluster\2.multicast::cluster\3, all; }}", part[0]), ptx)

    def arrive_in_all(found: re.Match) -> str:
        # One thread would arrive. Here its whole warp arrives by one instruction, each lane at the barrier of another block.
        # The arrival has the plain form, as within a block: with `.release.cluster` ptxas puts a fence of the whole GPU before it,
        # over a microsecond. There is nothing to release: the threads have stored nothing, and their reads are over.
        condition, barrier = found[1], found[2]
        if condition is None or condition.startswith("@!"):
            raise ValueError(f"An arrival of one thread has a condition that says which: {found[0]}")
        return (
            f"{{ .reg .b32 lane, there; .reg .pred arrives; vote.sync.any.pred arrives, {condition.strip()[1:]}, -1; "
            f"mov.u32 lane, %laneid; setp.lt.and.u32 arrives, lane, {plan.cluster}, arrives; "
            f"mapa.shared::cluster.u32 there, {barrier}, lane; "
            f"@arrives mbarrier.arrive.shared::cluster.b64 _, [there]; }}"
        )

    ptx, arrivals = _ARRIVAL.subn(arrive_in_all, ptx)
    copies = ptx.count(".multicast::cluster")
    if not arrivals or not copies:
        raise ValueError(f"the kernel has {copies} shared copies and {arrivals} arrivals: no cluster.")
    # The kernel announces the bytes of its widest tile. The bytes of the launch's tile follow from the last number, its eighths.
    eighths, unit = re.findall(r"\.param \.u32 (\w+)", ptx)[-1], plan.cluster if plan.b_column_major else 8
    count = f"{{ .reg .b32 bytes; ld.param.b32 bytes, [{eighths}]; add.u32 bytes, bytes, {unit - 1}; and.b32 bytes, bytes, {-unit}; "
    count += f"mad.lo.u32 bytes, bytes, 1024, {128 * plan.block_m};"
    return re.sub(r"([^;\n]*expect_tx[^;]*), \d+;", rf"{count} \1, bytes; }}", ptx)


_PRODUCT = re.compile(
    r"// width (\d+) at (%\w+)|^\$L__BB\w+:|(wgmma\S+m64n)\d+(k16\S*) *\{([^{}]*)\}(, %\w+), (%\w+)([^;]*;)", re.M
)


def narrow(ptx: str) -> str:
    """Give products the width and the place of B in the mark before them. The sums of all further columns stay zero."""
    width, place = "", ""  # empty until the first mark; a mark ends with its basic block

    def product(found: re.Match) -> str:
        nonlocal width, place
        _, _, head, kind, sums, a, b, rest = found.groups()
        if head is None:
            width, place = found[1], found[2]
            return found[0]
        if not width:
            raise ValueError(f"No mark says how wide a product is: {found[0][:80]}")
        sums = ",".join(sums.split(",")[: int(width) // 2])
        return (
            f"{{ .reg .b64 b; cvt.u64.u32 b, {place}; add.s64 b, b, {b}; {head}{width}{kind} {{{sums}}}{a}, b{rest} }}"
        )

    return _PRODUCT.sub(product, ptx)


_MEETING = re.compile(r"\s*bar\.sync\s+\d+(, \d+)?;")
_SYNCHRONIZED = re.compile(r"mbarrier\.|wgmma|matrix|cp\.async|\bbar\.|\bbra\b|_tx")


def fewer_meetings(ptx: str) -> str:
    """Remove barriers of all warps between set-ups of mbarriers; between an announcement and its copies one warp is enough.

    Triton puts a barrier of all warps between any two operations on the same shared memory.
    """
    lines, before = ptx.splitlines(), ""
    operations = [(i, line) for i, line in enumerate(lines) if _SYNCHRONIZED.search(line)]
    for (i, line), (_, behind) in itertools.pairwise([*operations, (0, "")]):
        if not _MEETING.fullmatch(line):
            before = line
        elif "mbarrier.init" in before and "mbarrier.init" in behind:
            lines[i] = ""
        elif "_tx" in before and "_tx" in behind:
            lines[i] = "bar.warp.sync -1;"
    return "\n".join(lines) + "\n"


def prefetch_descriptors(ptx: str) -> str:
    """Let the fourth warp fetch the TMA descriptors first. They are arguments, so they do not depend on the launch before."""
    fetch = (
        "{ .reg .b64 map; .reg .b32 thread; .reg .pred first; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 96; "
    )
    for name in re.findall(r"\.param \.align 64 \.b8 (\w+)\[128\]", ptx):
        fetch += f"mov.b64 map, {name}; cvta.param.u64 map, map; @first prefetch.tensormap [map]; "
    return ptx.replace("// %bb.0:", f"// %bb.0:\n{fetch}}}", 1)


def adapt(compiled: Any, plan: Plan) -> Any:
    """Return a copy of a compiled kernel, not yet loaded, whose PTX has the instructions that Triton cannot express."""
    return reassemble(
        compiled, lambda x: fewer_meetings(prefetch_descriptors(narrow(x if plan.short else multicast(x, plan))))
    )


def compile_for_hopper(plan: Plan, dtype: str = "bf16"):
    """Compile a plan's kernel for sm_90a, on any machine; the result has `.asm["ptx"]`, `.asm["cubin"]`, `.metadata.shared`."""
    from utils.kernels.offline import compile_gluon

    plan = plan.kernel
    descriptors = zip(("a_desc", "b_desc", "c", "tail"), plan.compiled_boxes, strict=False)
    signature = {name: f"tensordesc<{dtype}{box},{box_layout(box)!r}>" for name, box in descriptors}
    signature |= {"sums": "*fp32"}
    signature |= dict.fromkeys(("rows", "columns", "steps", "items", "whole", "split", "slots", "eighths"), "i32")
    kernel = short_kernel if plan.short else gemm_kernel
    return adapt(compile_gluon(kernel, signature, {"PLAN": plan}, ["sums"], plan.warps), plan)
