"""One thread block or one cluster: its partitions, its clock in model cycles, and the choice of the next partition.

Each partition is a thread, but only the thread with the baton runs. It passes the baton on when the kernel synchronizes
(barriers, copies, products), to the partition that is furthest behind in model cycles. So a run is a discrete-event simulation,
and the same seed gives the same run.

A kernel for a cluster is one program with tensors of the whole cluster. Its blocks take the same steps at the same time here,
but each block has its own knowledge: so an access that relies on the pace of another block is found.
"""

from __future__ import annotations

import heapq
import random
import threading
import time as wall
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from utils.machine import versions

from . import context
from .context import Block, Knowledge, join, refuse
from .known import constant
from .reports import NOWHERE, DeadlockError, Report, Site
from .timeline import CostModel, Event

if TYPE_CHECKING:
    from .barriers import MBarrier
    from .simulation import Run


class _AbandonError(BaseException):
    """Ends a partition's thread after another partition has failed."""


class Partition:
    """A group of warps that runs one function: the default partition, or a worker of warp_specialize."""

    def __init__(self, index: int, name: str, num_warps: int, num_ctas: int, model: CostModel):
        self.index = index
        self.name = self.row = name  # row: its name on the timeline
        self.num_warps = num_warps
        busy = num_ctas * min(num_warps, 4)
        self.rate, self.special_rate = busy * model.lanes_per_warp, busy * model.special_per_warp  # results a cycle
        self.time = 0.0  # model cycles
        self.blocks = [Block(index, block) for block in range(num_ctas)]
        # The barrier and parity for which it waits; a barrier None: it waits for the end of all other partitions.
        self.blocked: tuple[MBarrier | None, int] | None = None
        self.blocked_at: Site = NOWHERE
        self.finished = False
        self.baton = threading.Lock()
        self.baton.acquire()
        self.last_wait: dict[Any, tuple[int, int, Site]] = {}  # {barrier: (parity, ended phases, line)}
        # In-order queues: the issued operations, oldest first, and their total number.
        self.wgmmas: list = []
        self.wgmma_count = 0
        self.stores: list = []
        self.store_count = 0
        self.copies: list = []  # cp.asyncs
        self.copy_count = 0
        self.copy_groups: list[int] = []  # for each committed group, the number of its last cp.async
        self.tensor_count, self.tensor_end = 0, 0.0  # number of tcgen05 operations, and the end of the last
        self.tensor_site: Site = NOWHERE

    def copy_knowledge(self, other: Partition) -> None:
        """Add to each block its knowledge in another partition."""
        for mine, its in zip(self.blocks, other.blocks, strict=True):
            mine.learn(its)

    def label(self, block: Block) -> str:
        """Return the name of the partition, and in a cluster also the number of the block."""
        return f"{self.name}, block {block.index} of the cluster" if len(self.blocks) > 1 else self.name


class Program:
    """One program instance, a block or a cluster of blocks: shared memory, barriers, partitions and pending operations.

    Args:
        run: the simulation: its seed, cost model, limits and reports.
        call: the interpreter's function for a call in kernel code.
        ids: the program's index in the grid.
        grid: the grid's size.
        num_warps: warps of the default partition, in each block.
        num_ctas: blocks of the cluster.
        deadline: when the launch must be over, on the monotonic clock.
        events: where to record the timeline; None records nothing.
    """

    def __init__(
        self,
        run: Run,
        call: Callable,
        ids: tuple[int, int, int],
        grid: tuple[int, int, int],
        num_warps: int,
        num_ctas: int,
        deadline: float,
        events: list[Event] | None,
    ):
        self.run, self.call, self.ids, self.grid, self.num_warps = run, call, ids, grid, num_warps
        self.num_ctas = num_ctas
        self.deadline, self.events, self.model = deadline, events, run.model
        self.random = random.Random(f"{run.seed}/{ids}") if run.seed is not None else None
        self.partition = Partition(0, "default", num_warps, num_ctas, run.model)
        self.partitions = [self.partition]
        self.steps = 0
        self.effects = 0  # number of accesses that change something, and of changes of partition
        self.pending: list = []  # heap of (end, order, operation)
        self.issued = 0
        self.tma_free = self.tensor_cores_free = 0.0
        self.allocations: list = []
        self.labels: dict[Any, str] = {}  # names of the allocations; cleared when an allocation gets a name
        self.tensor_memory: list = []  # allocations in Blackwell's tensor memory
        self.pair_signals: list = []  # lines and names of mbarriers that get signals from both blocks of a pair
        self.named_barriers: dict = {}  # {number: barrier}
        self.failure: BaseException | None = None
        self.abandoned = False  # whether the default partition knows the failure
        self.unwritten_reads: list = []
        self.cluster_arrival: list[Knowledge] | None = None  # each block's knowledge at a cluster.arrive

    # ---- findings -------------------------------------------------------------------------------------------------

    def collect(self, finding: Report, kept: list[Report]) -> None:
        """Keep a report, unless there is a report of the same kind and line."""
        if not any(r.kind == finding.kind and r.site == finding.site for r in kept):
            kept.append(finding)

    def step(self) -> None:
        """Count a step of kernel code, and end endless loops."""
        self.steps += 1
        if self.steps > self.run.max_steps:
            limit = f"More than {self.run.max_steps} steps in one program."
            refuse("endless loop", f"{limit} Look for a loop that never ends.")
        if not self.steps & 1023:
            if self.failure is not None:
                raise _AbandonError
            if wall.monotonic() > self.deadline:
                refuse("endless loop", "The launch takes longer than simulate(max_seconds=...) allows.")

    def spin(self) -> None:
        """Let other partitions go on after a turn of a loop that changed nothing; end the loop if no other can go on."""
        me = self.partition
        if not self.pending and all(p is me or p.blocked or p.finished for p in self.partitions):
            text = "This loop waits for what nobody can change: a turn of it has left everything as it was"
            why = "and the programs of a grid run one after another here"
            refuse("endless loop", f"{text}, {why}. Split the kernel into two launches, or use an mbarrier.")
        self.spend(self.model.global_latency, "load")
        self.reschedule()

    # ---- model time -----------------------------------------------------------------------------------------------

    def jitter(self, cycles: float) -> float:
        """Return the cycles of an operation; with a seed, between a tenth and five times as many."""
        return cycles * self.random.choice((0.1, 0.5, 1.0, 2.0, 5.0)) if self.random else cycles

    def spend(self, cycles: float, kind: str, buffer: str = "") -> None:
        """Let the running partition work for some cycles."""
        p = self.partition
        start, p.time = p.time, p.time + (self.jitter(cycles) if self.random else cycles)
        if self.events is not None:
            last = self.events[-1] if self.events and kind == "compute" else None
            if last is not None and (last.kind, last.partition, last.end) == (kind, p.row, start):
                last.end = p.time
                return
            self.events.append(Event(p.row, kind, buffer, None, start, p.time, context.site().line, "partition"))

    def record(self, unit: str, kind: str, buffer: str, phase: int | None, start: float, end: float) -> None:
        """Put an asynchronous operation or a wait on the timeline."""
        if self.events is not None:
            line = context.site().line
            self.events.append(Event(self.partition.row, kind, buffer, phase, start, end, line, unit))

    def mark(self, finding: Report) -> None:
        """Put a finding on the timeline, at the present time of its partition."""
        if self.events is not None:
            p = next((p for p in self.partitions if p.name == finding.partition), self.partition)
            self.events.append(Event(p.row, "finding", finding.kind, None, p.time, p.time, finding.line))

    def later(self, end: float, operation) -> None:
        """Schedule `operation()` for the model time `end`."""
        self.issued += 1
        heapq.heappush(self.pending, (end, self.random.random() if self.random else 0, self.issued, operation))

    def wait_in_order(self, name: str, queue: list, pending, finish: Callable) -> None:
        """Wait until `pending` operations of a queue are left; finish(operation) completes it, and returns its count and end."""
        if constant(pending, f"how many a wait for {name} leaves under way") < 0:
            refuse("kernel", f"A wait for {name} leaves 0 operations or more under way; got {pending}.")
        p = self.partition
        start = p.time
        while len(queue) > pending:
            count, end = finish(queue.pop(0))
            p.time = max(p.time, end)
            for block in p.blocks:
                join(block.clock, {(name, p.index, block.index): count})
        if p.time > start:
            self.record("partition", "wgmma wait" if name == "wgmma" else "copy wait", "", None, start, p.time)

    # ---- the cluster ----------------------------------------------------------------------------------------------

    def check_outside_of_partitions(self, what: str) -> None:
        """Refuse an operation of all the cluster's warps inside of warp_specialize; Triton 3.8 and later allow it."""
        if not versions.clusters_are_complete() and any(not p.finished for p in self.partitions[1:]):
            text = f"{what} lets all warps of the cluster meet, so it cannot stand inside of warp_specialize"
            refuse("kernel", f"{text}. Partitions of several blocks meet at an mbarrier.")

    def meet(self, what: str) -> None:
        """Let the blocks of the cluster meet: afterwards each block has the knowledge of all blocks."""
        if self.num_ctas > 1:
            self.check_outside_of_partitions(what)
            for block in self.partition.blocks:
                for other in self.partition.blocks:
                    block.learn(other)

    # ---- who runs -------------------------------------------------------------------------------------------------

    def reschedule(self) -> None:
        """Pass the baton to the partition that is furthest behind, because the kernel synchronizes here."""
        if self.failure is not None:
            raise _AbandonError
        self.effects += 1
        me = self.partition
        self.partition = self._pick()
        if self.partition is not me:
            self.partition.baton.release()
            me.baton.acquire()
            if self.failure is not None:
                raise _AbandonError

    def _pick(self) -> Partition:
        while True:
            chosen = None
            for p in self.partitions:
                if p.blocked is None and not p.finished and (chosen is None or p.time < chosen.time):
                    chosen = p
            if self.pending and (chosen is None or self.pending[0][0] <= chosen.time):
                heapq.heappop(self.pending)[-1]()
                continue
            if chosen is None:
                self._report_deadlock()
            return chosen

    def wait_for(self, barrier: MBarrier, parity: int) -> None:
        """Block the running partition until the barrier's phase of that parity is over."""
        p = self.partition
        p.blocked, p.blocked_at = (barrier, parity), context.site()
        start = p.time
        self.reschedule()
        self.record("partition", "wait", barrier.name, parity, start, p.time)

    def wake(self, barrier: MBarrier, now: float) -> None:
        """Wake the partitions that wait for the phase that has just ended."""
        for p in self.partitions:
            if p.blocked is not None and p.blocked[0] is barrier and barrier.is_over(p.blocked[1]):
                p.blocked, p.time = None, max(p.time, now)

    def _report_deadlock(self) -> NoReturn:
        lines, waiting = [], []
        for p in self.partitions:
            if p.blocked is None:
                continue
            barrier, parity = p.blocked
            if barrier is None:
                lines.append(f"{p.name} has done its part and waits for the other partitions to end")
                continue
            waiting.append(p)
            lines.append(f"{p.name} waits for {barrier.name}, phase parity {parity}, at {p.blocked_at}")
            lines += [f"    {line}" for line in barrier.explain(parity)]
        lines += [f"{p.name} has returned" for p in self.partitions if p.finished]
        for read in self.unwritten_reads:
            lines.append(f"also: {read.what} was read before anything was written to it, at {read.site}")
        if self.events is not None:  # draw the endless waits as long as a tenth of the run
            now = max([p.time for p in self.partitions] + [e.end for e in self.events])
            for p in waiting:
                barrier, parity = p.blocked  # type: ignore[misc]
                name = f"waits for {barrier.name}"  # type: ignore[union-attr]
                end, line = 1.1 * now + 50, p.blocked_at.line
                self.events.append(Event(p.row, "blocked", name, parity, p.time, end, line))
        first = waiting[0] if waiting else self.partition
        text = "Nobody can go on and nothing is under way.\n    " + "\n    ".join(lines)
        others = tuple(p.blocked_at for p in waiting[1:])
        report = Report("deadlock", text, first.blocked_at, first.name, self.ids, (), others)
        self.collect(report, self.run.reports)
        raise DeadlockError(report)

    # ---- warp specialization --------------------------------------------------------------------------------------

    def warp_specialize(self, functions: list[tuple[str, Any]], worker_warps: list[int]):
        """Run functions as concurrent partitions, and return the result of the first.

        Args:
            functions: [(name, function without arguments)]; the first is for the default partition.
            worker_warps: the number of warps of every other partition.
        """
        main = self.partition
        if len(self.partitions) > 1 and any(not p.finished for p in self.partitions[1:]):
            refuse("kernel", "warp_specialize inside of a partition of warp_specialize is not supported.")
        workers: list[Partition] = []
        before = main.name
        main.name = functions[0][0]
        if self.events is not None and main.row == before:
            main.row = main.name  # all its events, earlier and later, go to the row of its function
            for event in self.events[self.run.ends[-1] if self.run.ends else 0 :]:
                event.partition = main.row
        for (name, _), warps in zip(functions[1:], worker_warps, strict=True):
            worker = Partition(len(self.partitions) + len(workers), name, warps, self.num_ctas, self.model)
            worker.time = main.time
            worker.copy_knowledge(main)
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
                main.blocked, main.blocked_at = (None, 0), context.site()
                self.reschedule()
        except BaseException as error:
            raise self._abandon(workers, threads, error) from None
        for thread in threads:
            thread.join()
        for worker in workers:
            main.time = max(main.time, worker.time)
            main.copy_knowledge(worker)
        main.name = before
        return result

    def _run_worker(self, worker: Partition, call) -> None:
        worker.baton.acquire()
        try:
            if self.failure is None:
                with np.errstate(all="ignore"):  # each thread has its own setting
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
        if main.blocked == (None, 0) and all(p.finished for p in self.partitions[1:]):
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
