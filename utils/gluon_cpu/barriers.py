"""mbarriers: phases, arrivals and transaction bytes.

A phase is over when all arrivals have come and no announced byte is missing; the next phase begins at once. A fresh
barrier counts as if the phase before the first, of parity 1, were over. `wait(parity)` goes on when the phase of that
parity is over, which is why a wait for the wrong parity may pass at once or never.
"""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia import ampere, hopper

from . import context
from .clocks import Clock, join
from .known import constant, known
from .memory import MemDesc
from .reports import Site
from .tensors import to_tensor


class MBarrier:
    """One 64-bit mbarrier in shared memory."""

    def __init__(self, desc: MemDesc, count: int, site: Site):
        self.desc, self.count, self.site = desc, count, site
        self.component = ("barrier", desc.allocation.index, desc.key[0])
        self.phase = 0  # phases that are over
        self.pending = count  # arrivals still to come in this phase
        self.bytes = 0  # announced and not yet arrived
        self.announced = 0
        self.in_flight: list = []  # copies that will report to this phase
        self.arrivals: list[str] = []  # of this phase, for explanations
        self.clock: Clock = {}  # gathered in this phase
        self.fenced: Clock = {}
        self.over_clock: Clock = {}  # of all phases that are over
        self.over_fenced: Clock = {}

    @property
    def name(self) -> str:
        """What the kernel calls the barrier, such as `full[1]`."""
        return self.desc.label

    def is_over(self, parity: int) -> bool:
        """Whether a wait for this parity passes."""
        return (self.phase & 1) != parity

    def explain(self, parity: int) -> list[str]:
        """State, for a deadlock report."""
        over = "1 phase is over" if self.phase == 1 else f"{self.phase} phases are over"
        text = (
            f"{self.name}: phase {self.phase} (parity {self.phase & 1}) is running, {over}; "
            f"{self.pending} of {self.count} arrivals missing"
        )
        if self.bytes > 0:
            text += f", {self.bytes} of {self.announced} announced bytes missing"
        elif self.bytes < 0:
            text += f", {-self.bytes} bytes arrived that no mbarrier.expect announced"
        lines = [text]
        lines += [f"arrived in this phase: {a}" for a in self.arrivals[-4:]]
        return lines

    def join_clock(self, clock: Clock, fenced: Clock) -> None:
        """What the arriver knew becomes known to whoever waits for this phase."""
        join(self.clock, clock)
        join(self.fenced, fenced)

    def arrive(self, n: int, what: str) -> None:
        """N arrivals of the running partition."""
        p = context.partition()
        self.join_clock(p.clock, p.fenced)
        self.arrived(n, what, p.name, context.site(), p.time)

    def arrived(self, n: int, what: str, who: str, site: Site, now: float) -> None:
        """N arrivals, counted."""
        if n > self.pending:
            context.report(
                "barrier",
                f"{what}: {n} arrival{'s' if n > 1 else ''} at {self.name}, but its phase "
                f"{self.phase} waits for {self.pending} more (count {self.count}"
                + (f", {self.bytes} bytes still to come" if self.bytes > 0 else "")
                + "). Too many arrivals in one phase are undefined."
                + (f" Before: {self.arrivals[-1]}." if self.arrivals else ""),
                at=site,
                partition=who,
            )
            n = self.pending
        self.pending -= n
        self.arrivals.append(f"{who}, {what}, {site}")
        self._complete(now)

    def expect(self, n: int) -> None:
        """Announce n bytes and arrive once."""
        self.bytes += n
        self.announced += n
        self.arrive(1, f"mbarrier.expect of {n} bytes")

    def copied(self, copy, now: float) -> None:
        """A TMA copy has written its last byte."""
        if copy in self.in_flight:
            self.in_flight.remove(copy)
        self.bytes -= copy.bytes
        self.join_clock(copy.clock, copy.fenced)
        if self.bytes < 0 and self.pending == 0:
            context.report(
                "barrier",
                f"{self.name}: the copy into {copy.buffer} brought {copy.bytes} bytes, "
                f"{-self.bytes} more than mbarrier.expect announced ({self.announced}): phase "
                f"{self.phase} can never be over.",
                at=copy.site,
                partition=copy.partition,
            )
        self._complete(now)

    def _complete(self, now: float) -> None:
        if self.pending or self.bytes:
            return
        if self.in_flight:
            late = self.in_flight[0]
            missing = sum(copy.bytes for copy in self.in_flight)
            context.report(
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
    """Block the running partition until the phase of `parity` is over."""
    program = context.program()
    p = program.partition
    program.reschedule()
    unknown = barrier.phase - p.clock.get(barrier.component, 0)
    if unknown > 1 or (unknown and not barrier.is_over(parity)):
        passes = (
            "It passes only because the phases in between were fast enough"
            if barrier.is_over(parity)
            else (f"It blocks now until phase {barrier.phase} is over; a little earlier it would have passed at once")
        )
        context.report(
            "barrier",
            f"{p.name} waits for parity {parity} of {barrier.name}, of which {barrier.phase} "
            f"phases are over, {unknown} of them without its knowledge. {passes}: a parity cannot tell "
            "phase k from phase k + 2. Is this the right parity?",
        )
    if barrier.is_over(parity):
        program.spend(program.model.barrier, "barrier", barrier.name)
    else:
        program.wait_for(barrier, parity)
    join(p.clock, barrier.over_clock)
    join(p.fenced, barrier.over_fenced)
    p.last_wait[barrier] = (parity, barrier.phase, context.site())


MODULES = (ampere.mbarrier, hopper.mbarrier)


# ---- what kernels call -------------------------------------------------------------------------------------------


def truth(pred) -> bool:
    return bool(to_tensor(pred).data) if not isinstance(pred, bool) else pred


def barrier_of(desc, what: str) -> MBarrier:
    if not isinstance(desc, MemDesc):
        context.refuse("kernel", f"{what} needs an mbarrier in shared memory, got {desc!r}.")
    if desc.dtype.name != "int64" or desc.view.size != 1:
        context.refuse(
            "layout",
            f"{what} needs one 64-bit mbarrier; {desc.label} is {desc.dtype}{list(desc.shape)}. "
            ".index(i) takes one out of many.",
        )
    if desc.outside:
        context.refuse("out of bounds", desc.outside)
    found = desc.allocation.barriers.get(desc.key[0])
    if found is None:
        context.refuse("barrier", f"{what}: {desc.label} was not initialized by mbarrier.init.")
    desc.allocation.last = context.program().steps
    return found


@known(of=MODULES)
def init(mbarrier, count) -> None:
    """mbarrier.init."""
    count = constant(count, "mbarrier.init's count")
    if mbarrier.outside:
        context.refuse("out of bounds", mbarrier.outside)
    old = mbarrier.allocation.barriers.get(mbarrier.key[0])
    if old is not None:
        context.report(
            "barrier",
            f"mbarrier.init: {mbarrier.label} is initialized already ({old.site}). mbarrier.invalidate comes first.",
            others=(old.site,),
        )
    if count < 1:
        context.refuse("barrier", f"mbarrier.init: count must be 1 or more, got {count}.")
    mbarrier.written[...] = True
    mbarrier.allocation.barriers[mbarrier.key[0]] = MBarrier(mbarrier, count, context.site())


@known(of=MODULES)
def invalidate(mbarrier) -> None:
    """mbarrier.invalidate."""
    found = barrier_of(mbarrier, "mbarrier.invalidate")
    if found.in_flight:
        context.report(
            "barrier", f"mbarrier.invalidate: {len(found.in_flight)} copies will still report to {found.name}."
        )
    del mbarrier.allocation.barriers[mbarrier.key[0]]


@known(of=MODULES)
def expect(mbarrier, bytes=None, pred=True, bytes_per_cta=None) -> None:
    """mbarrier.expect: announce bytes and arrive."""
    n = constant(bytes if bytes is not None else bytes_per_cta, "mbarrier.expect's bytes")
    if not truth(pred):
        return
    context.program().reschedule()
    barrier_of(mbarrier, "mbarrier.expect").expect(int(n))
    _spend_barrier(mbarrier.label)


@known(of=MODULES)
def arrive(mbarrier, *, count=1, pred=True) -> None:
    """mbarrier.arrive: `count` arrivals."""
    count = constant(count, "mbarrier.arrive's count")
    if not truth(pred):
        return
    context.program().reschedule()
    barrier_of(mbarrier, "mbarrier.arrive").arrive(count, "mbarrier.arrive")
    _spend_barrier(mbarrier.label)


@known("wait", of=MODULES)
def wait_barrier(mbarrier, phase, pred=True, deps=()) -> None:
    """mbarrier.wait: block until the phase of this parity is over."""
    parity = to_tensor(phase).data
    if not truth(pred):
        return
    if isinstance(parity, float) or int(parity) not in (0, 1):
        context.refuse("barrier", f"mbarrier.wait: the phase is a parity, 0 or 1; got {parity}. Take it `& 1`.")
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
