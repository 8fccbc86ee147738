"""mbarriers: phases, arrivals and transaction bytes.

A phase ends when all arrivals have come and no announced byte is missing; the next phase begins at once. A fresh barrier
counts as if a phase of parity 1 had ended before its first phase. `wait(parity)` passes when the phase of that parity has
ended, so a wait for the wrong parity may pass at once or never.

In a cluster a descriptor stands for a barrier in each block, or for a barrier in the first block of each group: bases of zero
in the layout say which blocks share a barrier. All blocks of a group arrive at it, and the first block waits for it.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language.nvidia import ampere, hopper

from utils.machine import versions

from . import context, layouts
from .context import Block, Clock, Knowledge, join, refuse, report
from .known import constant, known
from .memory import MemDesc
from .reports import Site
from .tensors import to_tensor

MODULES = (ampere.mbarrier, hopper.mbarrier)


class MBarrier:
    """One 64-bit mbarrier in shared memory.

    Attributes:
        block: the block of the cluster that has it in its memory.
        shared: whether several blocks of the cluster share it.
        visible: (component, count) of a clock that knows its initialization.
    """

    def __init__(self, desc: MemDesc, count: int, site: Site, block: Block, shared: bool):
        self.desc, self.count, self.site, self.block, self.shared = desc, count, site, block.index, shared
        kind = ("init", *block.me[1:])
        block.clock[kind] = block.clock.get(kind, 0) + 1
        self.visible = kind, block.clock[kind]
        self._start(("barrier", desc.allocation.index, desc.key[0], block.index), count)

    def _start(self, component: tuple, count: int) -> None:
        """Begin the first phase; component: the barrier's component in a clock."""
        self.component = component
        self.phase = 0  # number of phases that have ended
        self.pending = count  # arrivals still to come in this phase
        self.bytes = 0  # bytes that are announced and have not arrived
        self.announced = 0
        self.in_flight: list = []  # copies that will report to this phase
        self.arrivals: list[str] = []  # arrivals in this phase, for reports
        self.last_arrivals: list[str] = []  # arrivals in the last phase
        self.arrived = Knowledge({}, {})  # the knowledge of all arrivals in this phase
        self.over = Knowledge({}, {})  # the knowledge of all arrivals in phases that have ended
        self.waited: set[int] = set()  # phases for which some partition has waited
        self.doubts: dict[int, tuple] = {}  # {phase: (what, where, who)} of arrivals that might count for it
        self.users: Clock = {}  # the last arrival or wait of each partition

    @property
    def name(self) -> str:
        """The name of the barrier in the kernel, such as `full[1]`."""
        return self.desc.label + (f" of block {self.block}" if context.program().num_ctas > 1 else "")

    def check_visible(self, block: Block) -> None:
        """Report a use of the barrier if its initialization may not be visible to the block yet."""
        component, count = self.visible
        if block.clock.get(component, 0) >= count:
            return
        own = block.index == self.block
        if not own and versions.clusters_are_complete():  # the compiler lets the blocks meet before the first use
            for other in context.partition().blocks:
                other.clock[component] = max(other.clock.get(component, 0), count)
            return
        text = (
            f"{context.partition().label(block)} uses {self.name} without knowing that it is initialized ({self.site})"
        )
        hint = (
            "initialize it before gl.warp_specialize"
            if own
            else "mbarrier.sync_cluster_init() comes after the last init"
        )
        report("barrier", f"{text}: {hint}.", others=(self.site,))

    def is_over(self, parity: int) -> bool:
        """Return whether a wait for this parity passes."""
        return (self.phase & 1) != parity

    def phases_unknown_to(self, block: Block) -> int:
        """Return the number of ended phases that a block may not know. Whoever knows all arrivals knows all phases."""
        unknown = self.phase - block.clock.get(self.component, 0)
        arrivals = self.over.clock.items()
        if unknown and all(block.clock.get(c, 0) >= time for c, time in arrivals if c != self.component):
            return 0
        return unknown

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

    def learn_end_of_copy(self, known: Knowledge) -> None:
        """Add to this phase the knowledge of a copy's issuer, and the end of the copy, which only a wait can show."""
        self.arrived.learn(known)
        self.arrived.clock["end of a copy", *self.component[1:]] = self.phase + 1

    def arrive(self, n: int, what: str, block: Block) -> None:
        """Let a block of the running partition arrive n times."""
        p = context.partition()
        self.check_visible(block)
        self.doubt(what, block)
        self.users[block.me] = block.tick()  # so that this arrival is an event of its own in a clock
        self.arrived.learn(block)
        self.count_arrivals(n, what, p.label(block), context.site(), p.time)

    def doubt(self, what: str, block: Block) -> None:
        """Note an arrival if its block does not know the end of the last phase: the arrival might count for that phase."""
        if self.phases_unknown_to(block):
            self.doubts[self.phase - 1] = what, context.site(), context.partition().label(block)
            self.report_doubts()

    def report_doubts(self) -> None:
        """Report the doubtful arrivals of phases for which some partition has waited."""
        for phase in self.doubts.keys() & self.waited:
            what, site, who = self.doubts.pop(phase)
            text = f"{what} counts for phase {phase + 1} of {self.name}, but {who} does not know that phase {phase} has ended"
            text += ". A little earlier it would have counted for that one, which is waited for, in place of another's. First wait "
            report("barrier", f"{text}for what follows its end: for a slot's next tile.", site, partition=who)

    def count_arrivals(self, n: int, what: str, who: str, site: Site, now: float) -> None:
        """Count n arrivals by an instruction (`what`) of a partition (`who`), at the model time `now`."""
        if n > self.pending:
            coming = f", {self.bytes} bytes still to come" if self.bytes > 0 else ""
            before = f" Before: {self.arrivals[-1]}." if self.arrivals else ""
            if self.bytes > 0 and "expect" in what:
                before += (
                    f" {who} came round again before the last round's copy had arrived: first wait for a free slot."
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

    def count_copy(self, copy: Any, now: float) -> None:
        """Count the bytes of a TMA copy that has just ended."""
        if copy in self.in_flight:
            self.in_flight.remove(copy)
        self.bytes -= copy.bytes
        self.learn_end_of_copy(copy.known)
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
        self.last_arrivals, self.arrivals = self.arrivals, []
        self.over.learn(self.arrived)
        self.arrived = Knowledge({}, {})
        self.over.clock[self.component] = self.phase
        context.program().wake(self, now)


def wait(barrier: MBarrier, parity: int, block: Block) -> None:
    """Stop the running partition until the phase of `parity` has ended; its block `block` then knows the end."""
    program = context.program()
    p = program.partition
    program.reschedule()
    barrier.check_visible(block)
    unknown = barrier.phases_unknown_to(block)
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
    barrier.users[block.me] = block.tick()
    block.learn(barrier.over)
    barrier.waited.add(barrier.phase - 1)
    barrier.report_doubts()
    p.last_wait.pop(barrier, None)  # the newest wait must be the last entry
    p.last_wait[barrier] = (parity, barrier.phase, context.site())


# ---- functions for kernels ---------------------------------------------------------------------------------------


def is_true(pred: Any) -> bool:
    """Return the truth of a predicate, constant or not."""
    return pred if isinstance(pred, bool) else bool(to_tensor(pred).data)


def barriers_of(desc: Any, what: str) -> list[MBarrier]:
    """Return the barrier of each block at a place of shared memory; refuse a place without barriers."""
    if not isinstance(desc, MemDesc):
        refuse("kernel", f"{what} needs an mbarrier in shared memory, got {desc!r}.")
    blocks = context.program().num_ctas
    owners = {owner for owner, _ in layouts.block_groups(desc.layout, blocks)}
    if desc.dtype.name != "int64" or desc.view.size != len(owners):
        kind = f"{desc.label} is {desc.dtype}{list(desc.shape)}"
        one = "one 64-bit mbarrier" if blocks == 1 else f"a 64-bit mbarrier for each of {len(owners)} blocks"
        refuse("layout", f"{what} needs {one}; {kind}. .index(i) takes one out of many.")
    desc.check_inside()
    barriers = desc.allocation.barriers.get(desc.key[0])
    if barriers is None:
        refuse("barrier", f"{what}: {desc.label} was not initialized by mbarrier.init.")
    desc.allocation.last = context.program().steps
    return barriers


def own_barriers(desc: Any, what: str, pairs: bool = False) -> list[MBarrier]:
    """Return the barrier of each block for a copy, which can only signal a barrier in its target block.

    With `pairs` the barrier may lie in the first block of a pair, for Blackwell's products in pairs.
    """
    barriers = barriers_of(desc, what)
    in_pairs = pairs and all(barrier.block == index & ~1 for index, barrier in enumerate(barriers))
    if in_pairs and len(barriers) > 1:
        context.program().pair_signals.append((context.site(), desc.label))
    elif any(barrier.shared for barrier in barriers):
        text = f"{what} signals an mbarrier of the block that it writes to, and several blocks share {desc.label}"
        refuse("layout", f"{text}. mbarrier.allocate_mbarrier() gives each block one.")
    return barriers


@known(of=MODULES)
def init(mbarrier, count) -> None:
    """Initialize an mbarrier: a phase waits for `count` arrivals from each block that shares it."""
    count = constant(count, "mbarrier.init's count")
    mbarrier.check_inside()
    old = mbarrier.allocation.barriers.get(mbarrier.key[0])
    if old is not None:
        text = f"{mbarrier.label} is initialized already ({old[0].site}). mbarrier.invalidate comes first."
        report("barrier", f"mbarrier.init: {text}", others=(old[0].site,))
    if count < 1:
        refuse("barrier", f"mbarrier.init: count must be 1 or more, got {count}.")
    mbarrier.written[...] = True
    mbarrier.allocation.touch()
    blocks, made = context.partition().blocks, {}
    groups = layouts.block_groups(mbarrier.layout, len(blocks))
    if any(size > 1 for _, size in groups) and not versions.clusters_are_complete():
        text = "An mbarrier that several blocks of a cluster share is in Triton from 3.8 on; before, each block gets its own"
        refuse("unknown operation", f"{text}. Let the blocks meet: gl.barrier(cluster=True).")
    for owner, size in groups:
        if owner not in made:
            made[owner] = MBarrier(mbarrier, count * size, context.site(), blocks[owner], size > 1)
    mbarrier.allocation.barriers[mbarrier.key[0]] = [made[owner] for owner, _ in groups]


@known(of=MODULES)
def invalidate(mbarrier) -> None:
    """End the life of an mbarrier."""
    for barrier in barriers_of(mbarrier, "mbarrier.invalidate"):
        if barrier.in_flight:
            copies = f"{len(barrier.in_flight)} copies will still report to {barrier.name}"
            report("barrier", f"mbarrier.invalidate: {copies}.")
        clock = context.partition().blocks[barrier.block].clock
        if any(clock.get(user, 0) < time for user, time in barrier.users.items()):
            report(
                "barrier",
                f"mbarrier.invalidate: nothing puts it behind the last use of {barrier.name} by another partition.",
            )
    del mbarrier.allocation.barriers[mbarrier.key[0]]


def _senders(from_cta) -> list[Block]:
    """Return for each block the block that arrives at its barrier: the block's number under the bit mask `from_cta`."""
    blocks = context.partition().blocks
    kept = len(blocks) - 1 if from_cta is None else constant(from_cta, "from_cta")
    if not 0 <= kept < len(blocks):
        refuse("barrier", f"from_cta is from 0 to {len(blocks) - 1} in a cluster of {len(blocks)} blocks; got {kept}.")
    return [blocks[block.index & kept] for block in blocks]


@known(of=MODULES)
def expect(mbarrier, bytes=None, pred=True, bytes_per_cta=None, from_cta=None) -> None:
    """Announce bytes, counted for one block, and arrive."""
    n = int(constant(bytes if bytes is not None else bytes_per_cta, "mbarrier.expect's bytes"))
    if is_true(pred):
        context.program().reschedule()
        for barrier, block in zip(barriers_of(mbarrier, "mbarrier.expect"), _senders(from_cta), strict=True):
            barrier.bytes += n
            barrier.announced += n
            barrier.arrive(1, f"mbarrier.expect of {n} bytes", block)
        spend_barrier(mbarrier.label)


@known(of=MODULES)
def arrive(mbarrier, *, count=1, pred=True, from_cta=None) -> None:
    """Arrive `count` times."""
    count = constant(count, "mbarrier.arrive's count")
    if count < 1:
        refuse("barrier", f"mbarrier.arrive: count must be 1 or more, got {count}.")
    if is_true(pred):
        context.program().reschedule()
        for barrier, block in zip(barriers_of(mbarrier, "mbarrier.arrive"), _senders(from_cta), strict=True):
            barrier.arrive(count, "mbarrier.arrive", block)
        spend_barrier(mbarrier.label)


@known("wait", of=MODULES)
def wait_barrier(mbarrier, phase, pred=True, deps=()) -> None:
    """Wait until the phase of this parity has ended."""
    parity = to_tensor(phase).data
    for dep in deps:
        if isinstance(dep, MemDesc):
            dep._keep_alive()
    if is_true(pred):
        if isinstance(parity, float) or int(parity) not in (0, 1):
            refuse("barrier", f"mbarrier.wait: the phase is a parity, 0 or 1; got {parity}. Take it `& 1`.")
        for barrier, block in zip(barriers_of(mbarrier, "mbarrier.wait"), context.partition().blocks, strict=True):
            if barrier.block == block.index:  # the other blocks of a group go on
                wait(barrier, int(parity), block)


def spend_barrier(label: str) -> None:
    """Spend the model's time of an instruction on a barrier."""
    program = context.program()
    program.spend(program.model.barrier, "barrier", label)


@known(of=(hopper,))
def fence_async_shared(cluster=False) -> None:
    """Make all ordinary accesses in this partition's knowledge visible to the async proxy."""
    for block in context.partition().blocks:
        join(block.fenced, block.clock)
    spend_barrier("fence")
