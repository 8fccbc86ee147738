"""One thread block: its partitions, its clock in model cycles, and who runs next.

Partitions are threads, but one baton goes around: only its holder runs, and it is handed on only where the kernel
synchronizes (barriers, copies, products). The next to run is the partition or pending copy that is furthest behind in
model cycles, so a run is a discrete-event simulation and the same seed gives the same run.
"""

from __future__ import annotations

import heapq
import random
import threading
import time as wall
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import context
from .clocks import Clock, join
from .reports import NOWHERE, DeadlockError, Report, Site
from .timeline import CostModel, Event

if TYPE_CHECKING:
    from .barriers import MBarrier


class _AbandonError(BaseException):
    """Unwinds a partition's thread after another one has failed."""


class Partition:
    """A group of warps that runs one function: the default partition or a worker of warp_specialize."""

    def __init__(self, index: int, name: str, num_warps: int):
        self.index = index
        self.name = name
        self.num_warps = num_warps
        self.time = 0.0  # model cycles
        self.me = ("partition", index)
        self.clock: Clock = {self.me: 1}  # what this partition knows to be over
        self.fenced: Clock = {}  # what it knows to be visible to the async proxy
        self.blocked: tuple[MBarrier, int] | None = None  # barrier and parity it waits for
        self.blocked_at: Site = NOWHERE
        self.finished = False
        self.baton = threading.Lock()
        self.baton.acquire()
        self.last_wait: dict[Any, tuple[int, int, Site]] = {}  # barrier -> parity, phase that was over, line
        # In-order queues: operations issued, oldest first, and how many there have been.
        self.wgmmas: list = []
        self.wgmma_count = 0
        self.stores: list = []
        self.store_count = 0
        self.copies: list = []  # cp.asyncs
        self.copy_count = 0
        self.copy_groups: list[int] = []  # for each committed group, the number of its last cp.async

    def tick(self) -> int:
        """Count one ordinary access; the new count."""
        self.clock[self.me] += 1
        return self.clock[self.me]


class Program:
    """One program instance: shared memory, barriers, partitions and pending operations."""

    def __init__(
        self,
        ids: tuple[int, int, int],
        grid: tuple[int, int, int],
        num_warps: int,
        *,
        call: Callable,
        seed: int | None,
        model: CostModel,
        limits: dict,
        reports: list[Report],
        collecting: bool,
        events: list[Event] | None,
    ):
        self.ids, self.grid, self.num_warps = ids, grid, num_warps
        self.call = call  # runs a call in kernel code
        self.random = random.Random(f"{seed}/{ids}") if seed is not None else None
        self.model = model
        self.partition = Partition(0, "default", num_warps)
        self.partitions = [self.partition]
        self.reports, self.collecting, self.events = reports, collecting, events
        self.max_steps, self.deadline = limits["max_steps"], limits["deadline"]
        self.steps = 0
        self.pending: list = []  # heap of (end, order, operation)
        self.issued = 0
        self.tma_free = self.tensor_cores_free = 0.0
        self.allocations: list = []
        self.failure: BaseException | None = None
        self.abandoned = False  # the default partition knows of the failure
        self.unwritten_reads: list = []

    # ---- findings -------------------------------------------------------------------------------------------------

    def collect(self, finding: Report) -> bool:
        """Keep a finding; whether the kernel may go on."""
        same = any(r.kind == finding.kind and r.site == finding.site for r in self.reports)
        if not same:
            self.reports.append(finding)
        return self.collecting

    def step(self) -> None:
        """Count one step of kernel code; ends endless loops."""
        self.steps += 1
        if self.steps > self.max_steps:
            context.refuse(
                "endless loop", f"More than {self.max_steps} steps in one program. Look for a loop that never ends."
            )
        if not self.steps & 1023:
            if self.failure is not None:
                raise _AbandonError
            if wall.monotonic() > self.deadline:
                context.refuse("endless loop", "The launch takes longer than simulate(max_seconds=...) allows.")

    # ---- model time -----------------------------------------------------------------------------------------------

    def jitter(self, cycles: float) -> float:
        """The cycles something takes; with a seed anything from a tenth to five times as long."""
        return cycles * self.random.choice((0.1, 0.5, 1.0, 2.0, 5.0)) if self.random else cycles

    def spend(self, cycles: float, kind: str, buffer: str = "") -> None:
        """Let the running partition work for some cycles."""
        p = self.partition
        start, p.time = p.time, p.time + self.jitter(cycles)
        if self.events is not None:
            last = self.events[-1] if self.events else None
            if (
                last is not None
                and kind == "compute"
                and last.kind == kind
                and last.partition == p.name
                and last.end == start
            ):
                last.end = p.time
                return
            self.events.append(Event(p.name, kind, buffer, None, start, p.time, context.site().line, "partition"))

    def record(self, unit: str, kind: str, buffer: str, phase: int | None, start: float, end: float) -> None:
        """Put an asynchronous operation or a wait on the timeline."""
        if self.events is not None:
            line = context.site().line
            self.events.append(Event(self.partition.name, kind, buffer, phase, start, end, line, unit))

    def later(self, end: float, operation) -> None:
        """Let `operation()` happen at model time `end`."""
        self.issued += 1
        heapq.heappush(self.pending, (end, self.random.random() if self.random else 0, self.issued, operation))

    # ---- who runs -------------------------------------------------------------------------------------------------

    def reschedule(self) -> None:
        """A synchronization point: hand the baton to whoever is furthest behind."""
        if self.failure is not None:
            raise _AbandonError
        me = self.partition
        chosen = self._pick()
        if chosen is not me:
            self._hand_over(me, chosen)

    def _pick(self) -> Partition:
        while True:
            ready = [p for p in self.partitions if p.blocked is None and not p.finished]
            chosen = min(ready, key=lambda p: (p.time, p.index)) if ready else None
            if self.pending and (chosen is None or self.pending[0][0] <= chosen.time):
                heapq.heappop(self.pending)[-1]()
                continue
            if chosen is None:
                self._deadlock()
            return chosen

    def _hand_over(self, me: Partition, chosen: Partition) -> None:
        self.partition = chosen
        chosen.baton.release()
        me.baton.acquire()
        if self.failure is not None:
            raise _AbandonError

    def wait_for(self, barrier: MBarrier, parity: int) -> None:
        """Block the running partition until the barrier's phase of that parity is over."""
        p = self.partition
        p.blocked, p.blocked_at = (barrier, parity), context.site()
        start = p.time
        self.reschedule()
        self.record("partition", "wait", barrier.name, parity, start, p.time)

    def wake(self, barrier: MBarrier, now: float) -> None:
        """A phase is over: partitions that waited for it may run."""
        for p in self.partitions:
            if p.blocked is not None and p.blocked[0] is barrier and barrier.is_over(p.blocked[1]):
                p.blocked, p.time = None, max(p.time, now)

    def _deadlock(self) -> None:
        waiting = [p for p in self.partitions if p.blocked is not None]
        lines = []
        for p in waiting:
            barrier, parity = p.blocked
            if isinstance(barrier, _Join):
                lines.append(f"{p.name} has done its part and waits for the other partitions to end")
                continue
            lines.append(f"{p.name} waits for {barrier.name}, phase parity {parity}, at {p.blocked_at}")
            lines += [f"    {line}" for line in barrier.explain(parity)]
        lines += [f"{p.name} has returned" for p in self.partitions if p.finished]
        for read in self.unwritten_reads:
            lines.append(f"also: {read.what} was read before anything was written to it, at {read.site}")
        waiting = [p for p in waiting if not isinstance(p.blocked[0], _Join)]
        first = waiting[0] if waiting else self.partition
        report = Report(
            "deadlock",
            "Nobody can go on and nothing is under way.\n    " + "\n    ".join(lines),
            first.blocked_at,
            first.name,
            self.ids,
            (),
            tuple(p.blocked_at for p in waiting[1:]),
        )
        self.collect(report)
        raise DeadlockError(report)

    # ---- warp specialization --------------------------------------------------------------------------------------

    def warp_specialize(self, functions: list[tuple[str, Any]], worker_warps: list[int]):
        """Run [(name, call)] as concurrent partitions; the first is the default one. Returns its result."""
        main = self.partition
        if len(self.partitions) > 1 and any(not p.finished for p in self.partitions[1:]):
            context.refuse("kernel", "warp_specialize inside of a partition of warp_specialize is not supported.")
        base = len(self.partitions)
        workers, before = [], main.name
        main.name = functions[0][0]
        for i, ((name, _), warps) in enumerate(zip(functions[1:], worker_warps, strict=True)):
            worker = Partition(base + i, name, warps)
            worker.time = main.time
            join(worker.clock, main.clock)
            join(worker.fenced, main.fenced)
            workers.append(worker)
        self.partitions += workers
        threads = [
            threading.Thread(target=self._run_worker, args=(worker, call), daemon=True, name=worker.name)
            for worker, (_, call) in zip(workers, functions[1:], strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            result = functions[0][1]()
            while not all(w.finished for w in workers):
                main.blocked, main.blocked_at = (_Join(workers), 0), context.site()
                self.reschedule()
        except BaseException as error:
            caused = self._abandon(workers, threads, error)
            raise caused from None
        for thread in threads:
            thread.join()
        for worker in workers:
            main.time = max(main.time, worker.time)
            join(main.clock, worker.clock)
            join(main.fenced, worker.fenced)
        main.name = before
        return result

    def _run_worker(self, worker: Partition, call) -> None:
        worker.baton.acquire()
        try:
            if self.failure is None:
                call()
        except _AbandonError:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        worker.finished = True
        main = self.partitions[0]
        if self.failure is not None:
            if not self.abandoned:
                self.abandoned = True
                main.baton.release()
            return
        if main.blocked is not None and isinstance(main.blocked[0], _Join) and main.blocked[0].is_over(0):
            main.blocked, main.time = None, max(main.time, worker.time)
        try:
            chosen = self._pick()
        except BaseException as error:
            self.failure = error
            chosen = main
        self.partition = chosen
        chosen.baton.release()

    def _abandon(self, workers, threads, error: BaseException) -> BaseException:
        cause = self.failure if isinstance(error, _AbandonError) and self.failure is not None else error
        self.failure, self.abandoned = cause, True
        for worker, thread in zip(workers, threads, strict=True):
            if not worker.finished:
                worker.baton.release()
            thread.join(timeout=5)
        return cause


class _Join:
    """What the default partition waits for after its own function: the workers' returns."""

    name = "the workers"

    def __init__(self, workers: list[Partition]):
        self.workers = workers

    def is_over(self, parity: int) -> bool:
        return all(w.finished for w in self.workers)

    def explain(self, parity: int) -> list[str]:
        return []
