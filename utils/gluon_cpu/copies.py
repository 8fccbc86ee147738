"""Asynchronous copies: TMA and cp.async.

A program knows the end of a copy only after a wait for it: a barrier phase, tma.store_wait or async_copy.wait_group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, blackwell, hopper

from . import context, layouts
from .accesses import access, is_over
from .barriers import is_true, own_barriers
from .context import Knowledge, refuse, report
from .global_memory import addresses, read_kept
from .known import constant, known, number
from .memory import MemDesc
from .reports import Site
from .tensors import Tensor


@dataclass(eq=False)
class _Copy:
    """A running TMA copy to shared memory."""

    buffer: str
    bytes: int
    site: Site
    partition: str
    known: Knowledge


def _transfer(
    unit: str, kind: str, buffer: str, nbytes: int, *, phase: int | None = None, instructions: int = 1
) -> float:
    """Spend the time to start a copy, put the copy on the timeline, and return its end.

    Copies share the memory's bandwidth. A copy into shared memory arrives after the memory's latency. A copy out of it ends
    when it has read its buffer.
    """
    program = context.program()
    model = program.model
    program.spend(model.issue * instructions, "issue", buffer)
    start = max(program.partition.time, program.tma_free)
    busy = program.jitter(nbytes / model.global_bytes)
    program.tma_free = start + busy
    end = start + busy + (program.jitter(model.global_latency) if kind == "copy in" else 0)
    program.record(unit, kind, buffer, phase, start, end)
    return end


# ---- TMA ---------------------------------------------------------------------------------------------------------


def _coordinates(coord) -> list[int]:
    return [number(c, "a TMA coordinate") for c in coord]


@known("async_copy_global_to_shared", "async_load", of=(hopper.tma,))
def tma_load(tensor_desc, coord, barrier, result, pred=True, multicast=False, cache_policy=None) -> None:
    """Start a TMA copy from global to shared memory; its end reports to a barrier.

    With `multicast`, the first block with a tile copies it for all blocks with this tile, and reports to each block's barrier.
    """
    layouts.check_tma(tensor_desc, coord, result, "A TMA copy")
    at = _coordinates(coord)
    if is_true(pred):
        together = constant(multicast, "multicast")
        what = f"the TMA {'multicast' if together else 'copy'} into {result.label}"
        _start_load(result, barrier, ("A TMA copy", what), together, lambda: tensor_desc.read(at))


def _start_load(result, barrier, names: tuple[str, str], multicast: bool, read) -> None:
    """Start a copy into shared memory that reports to a barrier; at its end `read()` returns the values."""
    program = context.program()
    program.reschedule()
    p, bars = program.partition, own_barriers(barrier, names[0], pairs=True)
    groups = layouts.block_groups(result.layout, program.num_ctas)
    issuers = [groups[block.index][0] if multicast else block.index for block in p.blocks]
    for bar, issuer in zip(bars, issuers, strict=True):
        bar.check_visible(p.blocks[issuer])
    access(result, write=True, asynchronous=True, barriers=bars, issuers=issuers, what=names[1])
    nbytes, site = result.nbytes_per_cta, context.site()
    copies = []
    for bar, issuer in zip(bars, issuers, strict=True):
        block = p.blocks[issuer]
        copies.append(_Copy(result.label, nbytes, site, p.label(block), block.copy()))
        bar.in_flight.append(copies[-1])
    end = _transfer("TMA", "copy in", result.label, nbytes, phase=bars[0].phase)

    def finish() -> None:
        result.view[...] = read()
        for bar, copy in zip(bars, copies, strict=True):
            bar.count_copy(copy, end)

    program.later(end, finish)


def _rows(tensor_desc, x_offsets, smem, what: str) -> list[int]:
    """Return the row numbers of a TMA gather or scatter; refuse memory or offsets that do not fit."""
    layouts.check_elements(smem, what)
    shape = [*x_offsets.shape, tensor_desc.block_shape[-1]]
    if len(shape) != 2 or list(tensor_desc.block_shape) != [1, shape[1]] or list(smem.shape) != shape:
        text = f"the descriptor moves boxes {list(tensor_desc.block_shape)}, {smem.label} has shape {list(smem.shape)}"
        refuse("layout", f"{what}: {text}; {list(x_offsets.shape)} rows need boxes of one row, and memory {shape}.")
    if smem.dtype.name != tensor_desc.dtype.name or smem.layout != tensor_desc.layout:
        text = f"the descriptor has {tensor_desc.dtype} and {tensor_desc.layout}"
        refuse("layout", f"{what}: {text}, {smem.label} has {smem.dtype} and {smem.layout}; they must be the same.")
    spread = layouts.linear(x_offsets.layout, list(x_offsets.shape))
    if any(map(any, spread.lane_bases)) or spread.reg_bases[:2] != [[1], [2]]:
        text = "each thread of a warp holds the same rows, four neighbours or more"
        advice = "SliceLayout(0, BlockedLayout([1, 4], [32, 1], [1, num_warps], [1, 0]))"
        refuse("layout", f"{what}: {text}: {advice}; got {x_offsets.layout}.")
    return x_offsets.data.tolist()


ROWS = (blackwell.tma,)


@known("async_gather", of=ROWS)
def tma_gather(
    tensor_desc, x_offsets, y_offset, barrier, result, pred=True, multicast=False, cache_policy=None
) -> None:
    """Start a TMA copy of rows by their numbers; a row outside of the tensor is zeros."""
    rows, column = _rows(tensor_desc, x_offsets, result, "tma.async_gather"), number(y_offset, "y_offset")
    if is_true(pred):
        names = ("tma.async_gather", f"the TMA gather into {result.label}")
        together = constant(multicast, "multicast")
        _start_load(
            result, barrier, names, together, lambda: np.concatenate([tensor_desc.read([row, column]) for row in rows])
        )


@known("async_scatter", of=ROWS)
def tma_scatter(tensor_desc, x_offsets, y_offset, src, cache_policy=None) -> None:
    """Start a TMA copy of rows to global memory by their numbers; a row outside of the tensor is dropped."""
    rows, column = _rows(tensor_desc, x_offsets, src, "tma.async_scatter"), number(y_offset, "y_offset")
    _send([min(rows), column], src, "A TMA scatter", src.nbytes_per_cta)
    for row, values in zip(rows, src.view, strict=True):
        tensor_desc.write([row, column], values[None])


CLC = (blackwell.clc,) if hasattr(blackwell, "clc") else ()


@known(of=CLC)
def try_cancel(result, barrier) -> None:
    """Take over a program that has not begun: 16 bytes in every block have its index, or say that there is none."""
    if result.dtype.name != "int64" or list(result.shape) != [2]:
        refuse("layout", f"clc.try_cancel writes int64[2]; {result.label} is {result.dtype}{list(result.shape)}.")
    waiting = context.program().run.waiting
    ids = (1, *waiting.popleft()) if waiting else (0, 0, 0, 0)
    words = [ids[0] | ids[1] << 32, ids[2] | ids[3] << 32]
    _start_load(
        result, barrier, ("clc.try_cancel", f"the answer to clc.try_cancel in {result.label}"), True, lambda: words
    )


class ClcResult:
    """The answer to a try_cancel, in registers."""

    def __init__(self, words: list[int]):
        self.ids = (words[0] >> 32, words[1] & 0xFFFFFFFF, words[1] >> 32)
        self.taken = bool(words[0] & 1)

    def is_canceled(self) -> Tensor:
        """Return whether a program was taken over."""
        return Tensor(self.taken, gl.int1)

    def program_id(self, dim) -> Tensor:
        """Return the program's index along an axis of the grid; 0 if there is none."""
        return Tensor(self.ids[constant(dim, "program_id's dim")], gl.int32)


@known(of=CLC)
def load_result(src) -> ClcResult:
    """Read the answer to a try_cancel."""
    access(src, write=False, what=f"the load of {src.label}")
    return ClcResult(src.view.tolist())


@known("async_copy_shared_to_global", "async_store", of=(hopper.tma,))
def tma_store(tensor_desc, coord, src, cache_policy=None) -> None:
    """Start a TMA copy from shared to global memory."""
    layouts.check_tma(tensor_desc, coord, src, "A TMA store")
    at = _send(_coordinates(coord), src, "A TMA store", tensor_desc.nbytes_per_cta)
    tensor_desc.write(at, src.view)


def _enter_reduction(name: str, update, floats: tuple[str, ...]) -> None:
    """Add tma.async_atomic_<name> to the table: it combines a tile of shared memory with global memory."""

    def reduce(tensor_desc, coord, src) -> None:
        dtype = tensor_desc.dtype
        allowed = (*floats, "int32", "uint32", "uint64", *(("int64",) if name != "add" else ()))
        if dtype.name not in allowed:
            refuse("layout", f"tma.async_atomic_{name} takes {', '.join(allowed)}; the descriptor is {dtype}.")
        if any(size > 1 for _, size in layouts.block_groups(src.layout, context.program().num_ctas)):
            text = f"tma.async_atomic_{name}: several blocks of the cluster hold the same part of {src.label}"
            refuse("unknown operation", f"{text}. Reduce a tile whose cga_layout gives each block its own part.")
        layouts.check_tma(tensor_desc, coord, src, "A TMA reduction")
        at = _send(_coordinates(coord), src, "A TMA reduction", tensor_desc.nbytes_per_cta)
        tensor_desc.update(at, src.view, update)

    known(f"async_atomic_{name}", of=(hopper.tma,))(reduce)


# The types of cp.reduce.async.bulk.tensor, from the table of PTX.
_enter_reduction("add", np.add, ("fp16", "bf16", "fp32"))
_enter_reduction("min", np.fmin, ("fp16", "bf16"))
_enter_reduction("max", np.fmax, ("fp16", "bf16"))
_enter_reduction("and", np.bitwise_and, ())
_enter_reduction("or", np.bitwise_or, ())
_enter_reduction("xor", np.bitwise_xor, ())


def _send(at: list[int], src, what: str, nbytes: int) -> list[int]:
    """Let TMA read a tile of shared memory; return the coordinates of the box."""
    if min(at) < 0:
        refuse(
            "out of bounds",
            f"{what} to the coordinates {at}: on the GPU an illegal instruction. A box that TMA reads may begin before the "
            "tensor, and what lies outside is zero; one that it writes may only end behind it. Store those elements with gl.store.",
        )
    program = context.program()
    program.reschedule()
    p = program.partition
    p.store_count += 1
    what = f"the {what.removeprefix('A ')} from {src.label}"
    access(src, write=False, asynchronous=True, queue="tma store", time=p.store_count, what=what)
    end = _transfer("TMA", "copy out", src.label, nbytes)
    p.stores.append((p.store_count, end, src.label, context.site()))
    return at


@known(of=(hopper.tma,))
def store_wait(pendings, read_only=True) -> None:
    """Wait until all but the last `pendings` stores of this partition have read their buffers.

    The writes of a store are visible at once here, so `read_only=False` waits for nothing more.
    """
    program = context.program()
    program.reschedule()
    program.wait_in_order("tma store", program.partition.stores, pendings, lambda store: store[:2])


# ---- cp.async ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _CpAsync:
    """A running cp.async; number: its number among the partition's cp.asyncs."""

    number: int
    target: MemDesc
    values: np.ndarray
    end: float
    site: Site
    signalled: bool = False  # whether its end reports to an mbarrier


@known("async_copy_global_to_shared", "async_load", of=(ampere.async_copy,))
def cp_async(
    smem, pointer, mask=None, cache_modifier=None, eviction_policy=None, volatile=False, cache_policy=None
) -> None:
    """Start a copy of elements by their addresses; masked elements become zeros."""
    offsets, keep, layout = addresses(pointer, mask, "cp.async")
    layouts.check_cp_async(smem, offsets.shape, pointer.dtype.element_ty, layout, offsets)
    program = context.program()
    program.reschedule()
    p = program.partition
    p.copy_count += 1
    access(smem, write=True, queue="cp.async", time=p.copy_count, what=f"the cp.async into {smem.label}")
    values = read_kept(pointer.buffer, offsets, keep)
    end = _transfer("cp.async", "copy in", smem.label, smem.nbytes // program.num_ctas, instructions=4)
    p.copies.append(_CpAsync(p.copy_count, smem, values, end, context.site()))


@known(of=(ampere.async_copy,))
def commit_group() -> None:
    """Close a group: it has all copies since the last group."""
    p = context.partition()
    p.copy_groups.append(p.copy_count)


@known(of=(ampere.async_copy,))
def wait_group(num_outstanding=0) -> None:
    """Wait until all but the last `num_outstanding` committed groups have written."""
    program = context.program()
    program.reschedule()
    p = program.partition
    program.wait_in_order("cp.async", p.copy_groups, num_outstanding, lambda last: (last, _finish_copies(p, last)))


def _finish_copies(p, last: int) -> float:
    """Finish the partition's copies up to number `last`: write their values, and return the latest end."""
    end = 0.0
    while p.copies and p.copies[0].number <= last:
        copy = p.copies.pop(0)
        copy.target.view[...] = copy.values
        end = max(end, copy.end)
    return end


@known("mbarrier_arrive", of=(ampere.async_copy,))
def cp_async_arrive(mbarrier, increment_count=True) -> None:
    """Let every thread arrive when its copies so far have written."""
    program = context.program()
    program.reschedule()
    p, bars = program.partition, own_barriers(mbarrier, "async_copy.mbarrier_arrive")
    threads, last = 32 * p.num_warps, p.copy_count
    for bar, block in zip(bars, p.blocks, strict=True):
        bar.doubt("async_copy.mbarrier_arrive", block)
    if increment_count:
        for bar in bars:
            bar.pending += threads
    end = max([p.time, *(copy.end for copy in p.copies)])
    told = [(block.copy({("cp.async", p.index, block.index): last}), p.label(block)) for block in p.blocks]
    site = context.site()
    for copy in p.copies:
        copy.signalled = True

    def finish() -> None:
        _finish_copies(p, last)
        for bar, (knowledge, who) in zip(bars, told, strict=True):
            bar.learn_end_of_copy(knowledge)
            bar.count_arrivals(threads, "async_copy.mbarrier_arrive", who, site, end)

    if p.copies:
        program.later(end, finish)
    else:
        finish()


def finish(program) -> None:
    """Report copies that are still under way when a program ends."""
    for p in program.partitions:
        program.partition = p
        while p.wgmmas:
            p.wgmmas.pop(0).finish()
        if p.stores:
            _, _, label, site = p.stores[0]
            text = f"The kernel ends while a TMA store may still read {label}"
            hint = "The memory may be given to the next block: tma.store_wait(0) comes last."
            report("unfinished", f"{text}. {hint}", at=site, partition=p.name)
        unfinished = [copy for copy in p.copies if not copy.signalled]
        if unfinished:
            text = f"The kernel ends while the cp.async into {unfinished[0].target.label} is under way"
            hint = "async_copy.wait_group(0) is missing."
            report("unfinished", f"{text}: {hint}", at=unfinished[0].site, partition=p.name)
    program.partition = program.partitions[0]
    for allocation in program.allocations:
        for block, records in zip(program.partition.blocks, allocation.records, strict=True):
            for copy in records:
                if copy.barrier is not None and not is_over(copy, block.clock):
                    phase = f"phase {copy.phase} of {copy.barrier.name} (parity {copy.phase & 1})"
                    text = f"The kernel ends, and nobody has waited for {copy.what}: {phase}."
                    report("unfinished", text, at=copy.site, partition=copy.partition)
