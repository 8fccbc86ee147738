"""How samples are taken: what both clocks share, and the CPU's clock. `cuda_timer` has the GPU's clock.

A sample is the time of `calls_per_sample` calls, divided by that number. Each timer has the same four steps: `warm_up`,
`calibrate` (how many calls make a sample long enough for the clock), `sample`, and `floor_ms` (the time of an empty
call). `sampling` decides how many samples there are.

When two functions take turns, each finds the cache as the other left it. With a warm cache, a function of up to 1 ms is
therefore called once, untimed, before a sample that follows a sample of the other function.
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

CPU_SAMPLE_MS = 0.020  # a CPU sample is at least this much longer than one reading of the clock
CALIBRATE_BELOW_MS = 1.0  # a longer call is a sample by itself, on either clock
MAX_CPU_CALLS = 100_000  # calls in one sample
PRIMED_BELOW_MS = 1.0  # for a longer call, the contents of the cache at its start hardly matter
UNKNOWN_CACHE_FLUSH = 64 * 1024**2  # bytes


class Call:
    """A function with its arguments, and what is known about its cost."""

    def __init__(self, fn: Callable, args: tuple, kwargs: dict, label: str):
        self.fn, self.args, self.kwargs, self.label = fn, args, kwargs, label
        self.calls_per_run = 1  # calls of the user's function in one call of `fn`: more in an unrolled graph
        self.runs_per_sample = 1
        self.run_ms: float | None = None  # one run, from the last chunk of the warm-up
        self.issue_ms: float | None = None  # CPU time to issue one run
        self.gpu_ms: float | None = None  # shortest time of one run between two events
        self.queueable = True  # False: the function waits for the GPU, so nothing can be queued behind it
        self.bursts = self.bursts_ahead = 0
        self.calls_before_capture = 0
        self.notes: list[str] = []
        self.runs_begun: Counter[str] = Counter()  # by phase

    @property
    def calls_per_sample(self) -> int:
        """Calls of the user's function in one sample."""
        return self.calls_per_run * self.runs_per_sample

    @property
    def calls(self) -> int:
        """Calls of the user's function in all: warm-up, calibration, samples, and those of bursts that were repeated."""
        return self.calls_before_capture + self.runs_begun.total() * self.calls_per_run

    def prime(self, previous: Call | None) -> None:
        """Call once, untimed, if another function has just used the cache and this function is short enough to care."""
        if previous is not None and previous is not self and (self.run_ms or 0.0) <= PRIMED_BELOW_MS:
            self.play(1, "untimed")

    def play(self, runs: int, phase: str) -> int:
        """Call the function `runs` times; return the host time in ns.

        An exception of the function gets a note with its label, the phase and the number of the call.
        """
        fn, args, kwargs, clock = self.fn, self.args, self.kwargs, time.perf_counter_ns
        remaining = itertools.repeat(None, runs)
        begin = clock()
        try:
            for _ in remaining:
                fn(*args, **kwargs)
            elapsed = clock() - begin
        except BaseException as error:
            iteration = self.runs_begun[phase] + runs - length_hint(remaining) - 1
            error.add_note(f"raised by {self.label!r} in {phase} call {iteration} (counted from 0)")
            raise
        self.runs_begun[phase] += runs
        return elapsed


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector: the time of a collection inside a sample would count as the function's."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def cpu_flush_bytes() -> int:
    """Return the bytes to stream so that the last-level cache holds nothing else: twice its size."""
    return max(2 * (last_level_cache_bytes() or 0), UNKNOWN_CACHE_FLUSH)


class CpuTimer:
    """Host time of calls by `time.perf_counter_ns`, with the garbage collector paused; the GPU's timer builds on it."""

    clock = "time.perf_counter_ns"
    previous: Call | None = None  # the call that used the cache last

    def __init__(self, cold: bool):
        self.cold = cold  # the cache is flushed before every sample
        self.flush_bytes = 0
        self.notes: list[str] = []
        readings = [time.perf_counter_ns() for _ in range(101)]
        self.clock_ms = statistics.median(b - a for a, b in itertools.pairwise(readings)) / 1e6
        self.shortest_sample_ms = CPU_SAMPLE_MS + self.clock_ms
        if not cold:
            return
        if last_level_cache_bytes() is None:
            self.notes.append("the size of the last-level cache is not known here: 64 MB are streamed to flush it")
        self.flush_bytes = cpu_flush_bytes()
        free = available_memory_bytes()
        if self.flush_bytes > free // 2:
            raise MemoryError(
                f'l2="cold" streams {self.flush_bytes / 1e6:.0f} MB, twice the last-level cache, '
                f'between samples, and only {free / 1e6:.0f} MB are free; free some or use l2="warm".'
            )
        self._buffer = torch.zeros(self.flush_bytes // 8, dtype=torch.int64)

    def prepare(
        self, call: Call, warmup: int, calls_per_sample: int | None, deadline: float | None
    ) -> tuple[Call, int]:
        """Warm up and set the calls per sample: None finds the number for this clock.

        The preparation ends at the deadline, in `time.perf_counter` seconds. Return the call to time, and the number of
        warm-up calls that were made.
        """
        done = self.warm_up(call, warmup, deadline)
        if calls_per_sample is not None or self.cold:
            call.runs_per_sample = calls_per_sample or 1
        elif call.run_ms is None or call.run_ms <= CALIBRATE_BELOW_MS:
            self.calibrate(call, deadline)
        return call, done

    def warm_up(self, call: Call, runs: int, deadline: float | None) -> int:
        """Run `runs` times, or fewer if the deadline (perf_counter seconds) comes first; return how many were run."""
        done, chunk = 0, 1
        self.previous = call if runs else self.previous
        while done < runs:
            chunk = min(chunk, runs - done)
            begin = time.perf_counter()
            issued = call.play(chunk, "warm-up")
            self.synchronize()
            seconds = time.perf_counter() - begin
            done += chunk
            call.run_ms, call.issue_ms = seconds * 1e3 / chunk, issued / 1e6 / chunk
            chunk *= 2
            if deadline is not None:
                remaining = deadline - time.perf_counter()
                if remaining <= seconds / max(1, chunk // 2):
                    break
                chunk = max(1, min(chunk, int(remaining * 1e3 / max(call.run_ms, 1e-6))))
        return done

    def calibrate(self, call: Call, deadline: float | None) -> None:
        """Set `runs_per_sample` so that a sample is long enough for this clock."""
        runs, limit = 1, self.max_runs(call)
        while True:
            per_call = self.sample([call] * 2, runs=runs, phase="calibration")
            sample_ms = min(per_call) * call.calls_per_run * runs
            if self.long_enough(sample_ms, runs) or runs >= limit:
                break
            if deadline is not None and time.perf_counter() > deadline:
                break
            needed = 1.1 * self.shortest_sample_ms / max(sample_ms / runs, 1e-6)
            runs = min(limit, max(runs + 1, min(runs * 10, int(needed) + 1)))
        call.runs_per_sample = runs

    def long_enough(self, sample_ms: float, runs: int) -> bool:
        """Whether this clock resolves a sample of `runs` runs and this length."""
        return sample_ms >= self.shortest_sample_ms

    def synchronize(self) -> None:
        """Wait for queued work; on a CPU there is none."""

    def max_runs(self, call: Call) -> int:
        """Return the most runs that one sample may hold."""
        return MAX_CPU_CALLS

    def sample(self, sequence: Sequence[Call], runs: int | None = None, phase: str = "timed") -> list[float]:
        """Take one sample of each call in the sequence; return the ms of one call of the user's function."""
        times_ms = []
        with collector_paused():
            for call in sequence:
                if self.flush_bytes:
                    self._buffer.add_(1)  # reads and writes every line
                else:
                    call.prime(self.previous)
                self.previous = call
                count = runs or call.runs_per_sample
                times_ms.append(call.play(count, phase) / 1e6 / (count * call.calls_per_run))
        return times_ms

    def floor_ms(self, like: Call) -> float:
        """Return the median time of an empty Python call, sampled in the same way as `like`."""
        empty = Call(lambda: None, (), {}, "empty call")
        return statistics.median(CpuTimer(False).sample([empty] * 21, runs=like.runs_per_sample, phase="floor"))

    def describe(self, call: Call) -> dict:
        """Describe the clock and the flush."""
        return {"clock": self.clock, "clock_cost_ms": self.clock_ms, "l2_flush_bytes": self.flush_bytes or None}
