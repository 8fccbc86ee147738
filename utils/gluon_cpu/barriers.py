"""mbarriers: phases, arrivals and transaction bytes.

A phase ends when all arrivals have come and no announced byte is missing; the next phase begins at once. A fresh
barrier counts as if a phase of parity 1 had ended before its first one. `wait(parity)` passes when the phase of that
parity has ended, which is why a wait for the wrong parity may pass at once or never.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language.nvidia import ampere, hopper

from . import context
from .context import Clock, join, refuse, report
from .known import constant, known
from .memory import MemDesc
from .reports import Site
from .tensors import to_tensor

MODULES = (ampere.mbarrier, hopper.mbarrier)


class MBarrier:
    """One 64-bit mbarrier in shared memory."""

    def __init__(self, desc: MemDesc, count: int, site: Site):
        self.desc, self.count, self.site = desc, count, site
        self.component = ("barrier", desc.allocation.index, desc.key[0])
        self.phase = 0  # how many phases have ended
        self.pending = count  # arrivals still to come in this phase
        self.bytes = 0  # announced and not yet arrived
        self.announced = 0
        self.in_flight: list = []  # copies that will report to this phase
        self.arrivals: list[str] = []  # of this phase, for explanations
        self.clock: Clock = {}  # what those who arrived in this phase knew
        self.fenced: Clock = {}
        self.over_clock: Clock = {}  # the same for all phases that have ended
        self.over_fenced: Clock = {}

    @property
    def name(self) -> str:
        """What the kernel calls the barrier, such as `full[1]`."""
        return self.desc.label

    def is_over(self, parity: int) -> bool:
        """Return whether a wait for this parity passes."""
        return (self.phase & 1) != parity

    def explain(self, parity: int) -> list[str]:
        """Return the barrier's state as lines of a deadlock report."""
        over = "1 phase is over" if self.phase == 1 else f"{self.phase} phases are over"
        text = f"{self.name}: phase {self.phase} (parity {self.phase & 1}) is running, {over}; "
        text += f"{self.pending} of {self.count} arrivals missing"
        if self.bytes > 0:
            text += f", {self.bytes} of {self.announced} announced bytes missing"
        elif self.bytes < 0:
            text += f", {-self.bytes} bytes arrived that no mbarrier.expect announced"
        return [text, *(f"arrived in this phase: {a}" for a in self.arrivals[-4:])]

    def join_clock(self, clock: Clock, fenced: Clock) -> None:
        """Pass on what someone who arrives knows to whoever waits for this phase."""
        join(self.clock, clock)
        join(self.fenced, fenced)

    def arrive(self, n: int, what: str) -> None:
        """Let the running partition arrive n times."""
        p = context.partition()
        self.join_clock(p.clock, p.fenced)
        self.count_arrivals(n, what, p.name, context.site(), p.time)

    def count_arrivals(self, n: int, what: str, who: str, site: Site, now: float) -> None:
        """Count n arrivals.

        Args:
            n: how many.
            what: the instruction.
            who: the partition's name.
            site: its line.
            now: the model time.
        """
        if n > self.pending:
            coming = f", {self.bytes} bytes still to come" if self.bytes > 0 else ""
            before = f" Before: {self.arrivals[-1]}." if self.arrivals else ""
            if self.bytes > 0 and "expect" in what:
                before += (
                    f" {who} came round to this barrier again before the copy of the round before had arrived: wait until "
                    "the slot is free first."
                )
            report(
                "barrier",
                f"{what}: {n} arrival{'s' if n > 1 else ''} at {self.name}, but its phase {self.phase} waits for "
                f"{self.pending} more (count {self.count}{coming}). Too many arrivals in one phase are undefined.{before}",
                at=site,
                partition=who,
            )
            n = self.pending
        self.pending -= n
        self.arrivals.append(f"{who}, {what}, {site}")
        self._end_phase_if_complete(now)

    def expect(self, n: int) -> None:
        """Announce n bytes and arrive once."""
        self.bytes += n
        self.announced += n
        self.arrive(1, f"mbarrier.expect of {n} bytes")

    def count_copy(self, copy: Any, now: float) -> None:
        """Count the bytes of a TMA copy that has just ended."""
        if copy in self.in_flight:
            self.in_flight.remove(copy)
        self.bytes -= copy.bytes
        self.join_clock(copy.clock, copy.fenced)
        if self.bytes < 0 and self.pending == 0:
            report(
                "barrier",
                f"{self.name}: the copy into {copy.buffer} brought {copy.bytes} bytes, {-self.bytes} more than "
                f"mbarrier.expect announced ({self.announced}): phase {self.phase} can never be over.",
                at=copy.site,
                partition=copy.partition,
            )
        self._end_phase_if_complete(now)

    def _end_phase_if_complete(self, now: float) -> None:
        if self.pending or self.bytes:
            return
        if self.in_flight:
            late = self.in_flight[0]
            missing = sum(copy.bytes for copy in self.in_flight)
            report(
                "barrier",
                f"{self.name}: phase {self.phase} ends while copies are under way: "
                f"{missing} bytes more were copied than mbarrier.expect announced ({self.announced}).",
                at=late.site,
                partition=late.partition,
            )
            self.in_flight = []
        self.phase += 1
        self.pending, self.bytes, self.announced = self.count, 0, 0
        self.arrivals = []
        join(self.over_clock, self.clock)
        join(self.over_fenced, self.fenced)
        self.clock, self.fenced = {}, {}
        self.over_clock[self.component] = self.phase
        context.program().wake(self, now)


def wait(barrier: MBarrier, parity: int) -> None:
    """Block the running partition until the phase of `parity` has ended."""
    program = context.program()
    p = program.partition
    program.reschedule()
    unknown = barrier.phase - p.clock.get(barrier.component, 0)
    if unknown > 1 or (unknown and not barrier.is_over(parity)):
        known_phases = barrier.phase - unknown
        ended = f"Phase {known_phases}" if unknown == 1 else f"Phases {known_phases} to {barrier.phase - 1}"
        passes = (
            "The wait passes now, but only because those phases were fast enough"
            if barrier.is_over(parity)
            else f"So parity {parity} now means phase {barrier.phase}, and the wait blocks until that one has ended; "
            "a little earlier it would have passed at once"
        )
        report(
            "barrier",
            f"{p.name} waits for parity {parity} of {barrier.name}. {ended} of that barrier "
            f"{'has' if unknown == 1 else 'have'} ended, but {p.name} never waited for "
            f"{'it' if unknown == 1 else 'them'}. {passes}: a parity cannot tell phase k from phase k + 2. Is this the "
            "right parity? Use k of one barrier has the parity k & 1: for tile i of a ring, (i // STAGES) & 1.",
        )
    if barrier.is_over(parity):
        program.spend(program.model.barrier, "barrier", barrier.name)
    else:
        program.wait_for(barrier, parity)
    join(p.clock, barrier.over_clock)
    join(p.fenced, barrier.over_fenced)
    p.last_wait[barrier] = (parity, barrier.phase, context.site())


# ---- what kernels call -------------------------------------------------------------------------------------------


def is_true(pred: Any) -> bool:
    """Return the truth of a predicate, constant or not."""
    return pred if isinstance(pred, bool) else bool(to_tensor(pred).data)


def barrier_of(desc: Any, what: str) -> MBarrier:
    """Return the barrier at a place of shared memory; refuse a place that has none."""
    if not isinstance(desc, MemDesc):
        refuse("kernel", f"{what} needs an mbarrier in shared memory, got {desc!r}.")
    if desc.dtype.name != "int64" or desc.view.size != 1:
        kind = f"{desc.label} is {desc.dtype}{list(desc.shape)}"
        refuse("layout", f"{what} needs one 64-bit mbarrier; {kind}. .index(i) takes one out of many.")
    desc.check_inside()
    barrier = desc.allocation.barriers.get(desc.key[0])
    if barrier is None:
        refuse("barrier", f"{what}: {desc.label} was not initialized by mbarrier.init.")
    desc.allocation.last = context.program().steps
    return barrier


@known(of=MODULES)
def init(mbarrier, count) -> None:
    """Initialize an mbarrier whose phases wait for `count` arrivals."""
    count = constant(count, "mbarrier.init's count")
    mbarrier.check_inside()
    old = mbarrier.allocation.barriers.get(mbarrier.key[0])
    if old is not None:
        text = f"{mbarrier.label} is initialized already ({old.site}). mbarrier.invalidate comes first."
        report("barrier", f"mbarrier.init: {text}", others=(old.site,))
    if count < 1:
        refuse("barrier", f"mbarrier.init: count must be 1 or more, got {count}.")
    mbarrier.written[...] = True
    mbarrier.allocation.barriers[mbarrier.key[0]] = MBarrier(mbarrier, count, context.site())


@known(of=MODULES)
def invalidate(mbarrier) -> None:
    """End the life of an mbarrier."""
    barrier = barrier_of(mbarrier, "mbarrier.invalidate")
    if barrier.in_flight:
        copies = f"{len(barrier.in_flight)} copies will still report to {barrier.name}"
        report("barrier", f"mbarrier.invalidate: {copies}.")
    del mbarrier.allocation.barriers[mbarrier.key[0]]


@known(of=MODULES)
def expect(mbarrier, bytes=None, pred=True, bytes_per_cta=None) -> None:
    """Announce bytes and arrive."""
    n = constant(bytes if bytes is not None else bytes_per_cta, "mbarrier.expect's bytes")
    if is_true(pred):
        context.program().reschedule()
        barrier_of(mbarrier, "mbarrier.expect").expect(int(n))
        _spend_barrier(mbarrier.label)


@known(of=MODULES)
def arrive(mbarrier, *, count=1, pred=True) -> None:
    """Arrive `count` times."""
    count = constant(count, "mbarrier.arrive's count")
    if is_true(pred):
        context.program().reschedule()
        barrier_of(mbarrier, "mbarrier.arrive").arrive(count, "mbarrier.arrive")
        _spend_barrier(mbarrier.label)


@known("wait", of=MODULES)
def wait_barrier(mbarrier, phase, pred=True, deps=()) -> None:
    """Block until the phase of this parity has ended."""
    parity = to_tensor(phase).data
    if is_true(pred):
        if isinstance(parity, float) or int(parity) not in (0, 1):
            refuse("barrier", f"mbarrier.wait: the phase is a parity, 0 or 1; got {parity}. Take it `& 1`.")
        wait(barrier_of(mbarrier, "mbarrier.wait"), int(parity))


def _spend_barrier(label: str) -> None:
    program = context.program()
    program.spend(program.model.barrier, "barrier", label)


@known(of=(hopper,))
def fence_async_shared(cluster=False) -> None:
    """Make all ordinary accesses that this partition knows of visible to the async proxy."""
    p = context.partition()
    join(p.fenced, p.clock)
    _spend_barrier("fence")
