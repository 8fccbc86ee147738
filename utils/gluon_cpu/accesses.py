"""Accesses to shared memory, and the races and missing fences between them.

Every access leaves a record: its bytes, read or write, its proxy, and the event of a vector clock for its end. A new access
must come after every record that it overlaps, unless both read. If nothing puts the two in order, that is a race, whatever
their order in this run. An asynchronous access after an ordinary access needs a fence as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.machine import versions

from . import context
from .context import Clock, refuse, report
from .reports import Site

if TYPE_CHECKING:
    from .memory import MemDesc


@dataclass(slots=True, eq=False)
class Access:
    """One access to shared memory. A partition knows that it is over if its clock has `time` at `component`."""

    key: tuple
    view: np.ndarray
    write: bool
    asynchronous: bool  # through the async proxy: TMA and wgmma
    component: tuple
    time: int
    what: str  # "the TMA copy into ring[1]"
    site: Site
    partition: str
    block: int = 0  # the block of the cluster that has the shared memory
    barrier: Any = None  # the end of the access completes this phase of this MBarrier
    phase: int = 0
    covers: bool = True
    settled: bool = False  # whether a finished product has used the values of a read, so that the read is surely over


_overlaps: dict[tuple, bool] = {}


def _overlap(a: Access, key: tuple, view: np.ndarray) -> bool:
    if a.key == key:
        return True
    if not np.may_share_memory(a.view, view):
        return False
    pair = (a.key, key, a.view.itemsize)
    if pair not in _overlaps:
        if len(_overlaps) > 50000:
            _overlaps.clear()
        _overlaps[pair] = bool(np.shares_memory(a.view, view))
    return _overlaps[pair]


def is_over(access: Access, clock: Clock) -> bool:
    """Return whether an access is over by the knowledge in a clock."""
    return clock.get(access.component, 0) >= access.time


def access(
    desc: MemDesc,
    *,
    write: bool,
    what: str,
    asynchronous: bool = False,
    queue: str = "",
    time: int = 0,
    barriers: list | None = None,
    issuers: list[int] | None = None,
    covers: bool = True,
) -> tuple[Access, ...]:
    """Check an access against all earlier accesses, and record it; in a cluster, each block accesses its own memory.

    Args:
        desc: the view.
        write: whether it writes.
        what: words for reports, "the TMA copy into ring[1]".
        asynchronous: whether it goes through the async proxy, as TMA and wgmma do.
        queue: the partition's queue that counts its end; "" for an ordinary instruction.
        time: the count of the queue at its end.
        barriers: the mbarriers of the blocks, if the end of the access completes their running phases.
        issuers: for the memory of each block, the block that issues the instruction; by default the same block.
        covers: whether it touches every element of the view.

    Returns:
        The access of each block.
    """
    desc.check_inside()
    program = context.program()
    program.effects += 1
    p = program.partition
    allocation = desc.allocation
    allocation.touch()
    site = context.site()
    accesses = []
    for index, records in enumerate(allocation.records):
        block = p.blocks[index if issuers is None else issuers[index]]
        barrier = barriers[index] if barriers else None
        if barrier is not None:
            component, count = barrier.component, barrier.phase + 1
        elif queue:
            component, count = (queue, p.index, index), time
        else:
            component, count = block.me, block.tick()
        phase = barrier.phase if barrier is not None else 0
        who = what, site, p.label(block), index
        new = Access(desc.key, desc.view, write, asynchronous, component, count, *who, barrier, phase, covers)
        keep = []
        for old in records:
            if not _overlap(old, desc.key, desc.view):
                keep.append(old)
                continue
            if write or old.write:
                if not is_over(old, block.clock):
                    _report_race(old, new, p)
                elif (
                    asynchronous
                    and not (old.asynchronous or old.settled)
                    and block.fenced.get(old.component, 0) < old.time
                ):
                    _report_missing_fence(old, new, inside=old.component == block.me)
                if write and covers and (old.key == desc.key or _contains(new, old)):
                    continue  # the old access is ordered before the new access, which now stands for both
            elif old.key == desc.key and old.component == component:
                continue  # the same partition reads again: the later read stands for both
            keep.append(old)
        keep.append(new)
        allocation.records[index] = keep
        accesses.append(new)
    if write:
        if covers:
            desc.written[...] = desc.spread
    elif len(allocation.spreads) > 1 and ((desc.written != desc.spread) & (desc.written > 0)).any():
        text = f"{desc.label} was written through a layout that puts its elements in other places"
        refuse("layout", f"{capitalize(what)}: {text}. Read it through the layout that it was written through.")
    elif not desc.written.all():
        program.unwritten_reads.append(accesses[0])
    return tuple(accesses)


def _contains(outer: Access, inner: Access) -> bool:
    """Whether the view of `outer` is contiguous and covers the view of `inner`."""
    if not outer.view.flags.c_contiguous:
        return False
    low, shape, strides = inner.key
    high = low + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + inner.view.itemsize
    return outer.key[0] <= low and high <= outer.key[0] + outer.view.nbytes


def _hint(copy: Access, p) -> str:
    """Return a text for a report: the barrier phase that ends a copy, and the partition's last wait for that barrier."""
    if copy.barrier is None:
        return ""
    text = f" {copy.barrier.name} tells of its end, in phase {copy.phase} (parity {copy.phase & 1})"
    if copy.barrier not in p.last_wait:
        return f"{text}; {p.name} never waited for it."
    parity, phase, site = p.last_wait[copy.barrier]
    count = f"{phase} phase{'s were' if phase != 1 else ' was'} over"
    return f"{text}; {p.name} last waited there for parity {parity} at line {site.line}, when {count}."


def _passage(copy: Access, read: Access, p) -> str:
    """Return a text for a report of an early overwrite: the partition's last wait, and the arrivals at that barrier."""
    if copy.barrier is None or read.write or not p.last_wait:
        return ""
    barrier = next(reversed(p.last_wait))
    _, phase, site = p.last_wait[barrier]
    came = (
        f"phase {phase - 1} of {barrier.name}, a barrier for {barrier.count} arrivals"
        if phase
        else f"{barrier.name}, which was fresh"
    )
    arrived = f" ({'; '.join(barrier.last_arrivals)})" if phase and barrier.last_arrivals else ""
    return f" {p.name} came here after its wait of line {site.line} for {came}{arrived}."


_WAITS = {
    "wgmma": " warpgroup_mma_wait tells when a wgmma has read its operands.",
    "tcgen05": " An mbarrier that a tcgen05_commit arrives at tells when a tcgen05 operation is over.",
    "tma store": " tma.store_wait tells when a TMA store has read its buffer.",
    "cp.async": " async_copy.wait_group tells when a cp.async has written.",
}


def _report_race(old: Access, new: Access, p) -> None:
    program = context.program()
    own = f"; it is the memory of block {new.block}" if program.num_ctas > 1 else ""
    if any(read is old for read in program.unwritten_reads):
        program.unwritten_reads.remove(old)
        text = f"{capitalize(old.what)} comes before {new.what} ({new.partition}, {new.site}) has written there"
        hint = _hint(new, program.partitions[old.component[1]])
        text += f": nothing makes it wait for that.{hint}"
        report("race", text, at=old.site, others=(new.site,), partition=old.partition)
        return
    where = f"{old.what} ({old.partition}, {old.site})"
    if old.write and not new.write:
        text = f"{capitalize(new.what)} may come before {where} has written there: nothing orders them{own}."
    elif old.write:
        text = (
            f"{capitalize(new.what)} may mix with {where}: two writes to the same bytes, and nothing orders them{own}."
        )
    else:
        text = f"{capitalize(new.what)} may overwrite what {where} still reads: nothing orders them{own}."
    report("race", text + _WAITS.get(old.component[0], "") + _hint(old, p) + _passage(new, old, p), others=(old.site,))


def _report_missing_fence(old: Access, new: Access, inside: bool) -> None:
    """Report a missing fence between an ordinary and an asynchronous access, or note it if the compiler adds the fence."""
    unit = "the tensor cores" if "wgmma" in new.what else "the TMA"
    verb = "not see that" if old.write else "overwrite what is still being read"
    text = f"{capitalize(new.what)} goes through the async proxy; {old.what} ({old.partition}, {old.site}) was an ordinary access."
    text += f" They are in order, but without fence_async_shared() between them {unit} may {verb}."
    if inside and versions.compiler_adds_fences():
        context.note(
            "missing fence", f"{text} Inside one partition the compiler adds it, from Triton 3.7 on.", (old.site,)
        )
        return
    who = "Triton 3.6 adds it before a TMA load only." if inside else "Between partitions no compiler adds it."
    report("missing fence", f"{text} {who}", others=(old.site,))


def capitalize(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[0].upper() + text[1:]
