"""How a sample is taken: what both clocks share, and the CPU's. `cuda_timer` has the GPU's; `measure` decides how many.

A sample is the time of `calls_per_sample` calls, divided by that number. Both timers answer the same four questions:
`warm_up`, `calibrate` (how many calls make a sample long enough to read), `sample` and `floor_ms` (an empty call).

Where two functions take turns, each finds the cache as the other left it. With a warm cache a function of up to 1 ms
is therefore called once, untimed, before a sample that follows one of the other.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import length_hint

import torch

from utils.machine.environment import available_memory_bytes, last_level_cache_bytes

CPU_SAMPLE_MS = 0.020  # a CPU sample is at least this much longer than reading the clock
MAX_CPU_CALLS = 100_000  # calls in one sample
PRIMED_BELOW_MS = 1.0  # a longer call does not care what the cache held when it began
UNKNOWN_CACHE_FLUSH = 64 * 1024**2


class Call:
    """A function with its arguments, called round robin over `inputs`, and what is known of its cost."""

    def __init__(self, fn: Callable, inputs: Sequence[tuple], kwargs: dict, label: str):
        self.fn, self.inputs, self.kwargs, self.label = fn, list(inputs), dict(kwargs), label
        self.calls_per_run = 1  # calls of the user's function behind one `fn`: more in an unrolled graph
        self.runs_per_sample = 1
        self.position = 0
        self.run_ms: float | None = None  # one run, from the last warm-up chunk
        self.issue_ms: float | None = None  # what the CPU needs to issue it
        self.gpu_ms: float | None = None  # the shortest time of one run seen between two events
        self.queueable = True  # False: it waits for the GPU, so that nothing can be queued behind it
        self.bursts = self.bursts_ahead = 0
        self.calibration_calls = 0
        self.timed_runs = 0
        self.notes: list[str] = []
        self.played: Counter[str] = Counter()  # runs begun in each phase

    @property
    def calls_per_sample(self) -> int:
        return self.calls_per_run * self.runs_per_sample

    def prime(self, before: Call | None) -> None:
        """Call once, untimed, if another function has just used the cache and this one is short enough to notice."""
        if before is not None and before is not self and (self.run_ms or 0.0) <= PRIMED_BELOW_MS:
            self.play(1, "untimed")
            self.calibration_calls += self.calls_per_run

    def play(self, runs: int, phase: str) -> int:
        """Call `runs` times on the next inputs; host time in ns. An exception is noted with label and iteration."""
        count = len(self.inputs)
        batch = [self.inputs[(self.position + i) % count] for i in range(runs)]
        self.position = (self.position + runs) % count
        fn, kwargs, clock = self.fn, self.kwargs, time.perf_counter_ns
        left = iter(batch)
        begin = clock()
        try:
            for args in left:
                fn(*args, **kwargs)
            elapsed = clock() - begin
        except BaseException as error:
            iteration = self.played[phase] + runs - length_hint(left) - 1
            error.add_note(f"raised by {self.label!r} in {phase} call {iteration} (counted from 0)")
            raise
        self.played[phase] += runs
        return elapsed


class Timer:
    """What both clocks share: warming up in growing chunks and finding the calls per sample."""

    clock = ""
    shortest_sample_ms = 0.0
    before: Call | None = None  # who used the cache last

    def most_runs(self, call: Call) -> int:
        """The most runs that one sample may hold."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait for queued work; on a CPU there is none."""

    def warm_up(self, call: Call, runs: int, deadline: float | None) -> int:
        """Run `runs` times, fewer if the deadline (perf_counter seconds) passes; how many were run."""
        done, chunk = 0, 1
        self.before = call if runs else self.before
        while done < runs:
            chunk = min(chunk, runs - done)
            begin = time.perf_counter()
            issued = call.play(chunk, "warm-up")
            self.synchronize()
            took = time.perf_counter() - begin
            done += chunk
            call.run_ms, call.issue_ms = took * 1e3 / chunk, issued / 1e6 / chunk
            chunk *= 2
            if deadline is not None:
                left = deadline - time.perf_counter()
                if left <= took / max(1, chunk // 2):
                    break
                chunk = max(1, min(chunk, int(left * 1e3 / max(call.run_ms, 1e-6))))
        return done

    def calibrate(self, call: Call, deadline: float | None) -> None:
        """Set `runs_per_sample` so that a sample is long enough for this clock."""
        runs, most = 1, self.most_runs(call)
        while True:
            per_run = self.sample([call] * 2, runs=runs, phase="calibration")
            call.calibration_calls += 2 * runs * call.calls_per_run
            sample_ms = min(per_run) * call.calls_per_run * runs
            if self.long_enough(sample_ms, runs) or runs >= most:
                break
            if deadline is not None and time.perf_counter() > deadline:
                break
            wanted = 1.1 * self.shortest_sample_ms / max(sample_ms / runs, 1e-6)
            runs = min(most, max(runs + 1, min(runs * 10, int(wanted) + 1)))
        call.runs_per_sample = runs

    def long_enough(self, sample_ms: float, runs: int) -> bool:
        return sample_ms >= self.shortest_sample_ms

    def sample(self, sequence: Sequence[Call], runs: int | None = None, phase: str = "timed") -> list[float]:
        raise NotImplementedError

    def floor_ms(self, like: Call) -> float:
        """Median time of an empty call sampled in the same way as `like`: nothing shorter can be told apart."""
        raise NotImplementedError

    def describe(self, call: Call) -> dict:
        """How the samples of a call were taken."""
        raise NotImplementedError


@contextmanager
def no_collection() -> Iterator[None]:
    """Hold the garbage collector back: a collection inside a sample would be charged to the function."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _nothing() -> None:
    """The empty call whose time is the CPU's floor."""


def cpu_flush_bytes() -> int:
    """Bytes to stream so that nothing else is left in the last-level cache: twice its size."""
    return max(2 * (last_level_cache_bytes() or 0), UNKNOWN_CACHE_FLUSH)


class CpuTimer(Timer):
    """Host time of calls by `time.perf_counter_ns`, the garbage collector held back meanwhile."""

    clock = "time.perf_counter_ns"

    def most_runs(self, call):
        return MAX_CPU_CALLS

    def __init__(self, cold: bool):
        self.flush_bytes = 0
        self.notes: list[str] = []
        reads = [time.perf_counter_ns() for _ in range(101)]
        self.clock_ms = statistics.median(b - a for a, b in itertools.pairwise(reads)) / 1e6
        self.shortest_sample_ms = CPU_SAMPLE_MS + self.clock_ms
        if cold:
            self._allocate_flush()

    def _allocate_flush(self) -> None:
        if last_level_cache_bytes() is None:
            self.notes.append("the size of the last-level cache is not known here: 64 MB are streamed to flush it")
        self.flush_bytes = cpu_flush_bytes()
        free = available_memory_bytes()
        if free is not None and self.flush_bytes > free // 2:
            raise MemoryError(
                f'l2="cold" streams {self.flush_bytes / 1e6:.0f} MB, twice the last-level cache, '
                f'between samples, and only {free / 1e6:.0f} MB are free; free some or use l2="warm".'
            )
        self._buffer = torch.zeros(self.flush_bytes // 8, dtype=torch.int64)

    def sample(self, sequence, runs=None, phase="timed"):
        out = []
        with no_collection():
            for call in sequence:
                if self.flush_bytes:
                    self._buffer.add_(1)  # reads and writes every line
                else:
                    call.prime(self.before)
                self.before = call
                count = runs or call.runs_per_sample
                out.append(call.play(count, phase) / 1e6 / (count * call.calls_per_run))
                if phase == "timed":
                    call.timed_runs += count
        return out

    def floor_ms(self, like):
        empty = Call(_nothing, [()], {}, "empty call")
        flush, self.flush_bytes = self.flush_bytes, 0
        try:
            samples = self.sample([empty] * 21, runs=like.runs_per_sample, phase="floor")
        finally:
            self.flush_bytes = flush
        return statistics.median(samples)

    def describe(self, call):
        return {"clock": self.clock, "clock_cost_ms": self.clock_ms, "l2_flush_bytes": self.flush_bytes or None}
