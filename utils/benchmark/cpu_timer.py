"""Take samples by the CPU's clock. `cuda_timer` builds on this file and takes samples by the GPU's clock.

A sample is the time of `calls_per_sample` calls, divided by this number. Each timer has the same four steps: `warm_up`
calls the function untimed, `calibrate` finds how many calls make a sample long enough for the clock, `sample` takes the
times, and `floor_ms` times an empty call. `sampling` decides how many samples there are.

When two functions A and B take turns, B finds the data of A in the cache. So with a warm cache, a function of up to 1 ms
is called once, untimed, before each of its samples that follows a sample of another function.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from utils.machine.environment import last_level_cache_bytes

CPU_SAMPLE_MS = 0.020  # a CPU sample is at least this much longer than one reading of the clock
CALIBRATE_BELOW_MS = 1.0  # a longer call is a sample by itself, on both clocks
MAX_CPU_CALLS = 100_000  # calls in one sample
PRIMED_BELOW_MS = 1.0  # for a longer call, the contents of the cache at its start hardly matter
LEAST_FLUSH = {"cpu": 64 * 1024**2, "cuda": 256 * 1024**2}  # bytes; triton.testing.do_bench also writes 256 MiB


class Call:
    """A function with its arguments, and measurements of its cost."""

    def __init__(self, fn: Callable, args: tuple, kwargs: dict, label: str):
        self.fn, self.args, self.kwargs, self.label = fn, args, kwargs, label
        self.calls_per_run = 1  # calls of the user's function in one call of `fn`; more than 1 in a CUDA graph
        self.runs_per_sample = 1
        self.warmed_up = 0  # warm-up calls that were made
        # A pause of the host makes a chunk of the warm-up too long, so these two come from the fastest chunk.
        self.run_ms: float | None = None  # time of one run
        self.issue_ms: float | None = None  # CPU time to issue one run
        self.gpu_ms: float | None = None  # shortest time of one run between two events
        self.queueable = True  # False: the function waits for the GPU, so nothing can be queued behind it
        self.timed: list[tuple[bool, bool]] = []  # of each GPU sample: queued in time, clocks held back
        self.notes: list[str] = []

    def prime(self, previous: Call | None) -> None:
        """Call once, untimed, if another function has just used the cache and this function is short."""
        if previous is not None and previous is not self and (self.run_ms or 0.0) <= PRIMED_BELOW_MS:
            self.play(1, "untimed")

    def play(self, runs: int, phase: str) -> int:
        """Call the function `runs` times; return the host time in ns. An exception gets a note with label and phase."""
        fn, args, kwargs, clock = self.fn, self.args, self.kwargs, time.perf_counter_ns
        try:
            begin = clock()
            for _ in itertools.repeat(None, runs):
                fn(*args, **kwargs)
            return clock() - begin
        except BaseException as error:
            error.add_note(f"raised by {self.label!r} in {phase} calls")
            raise


@contextmanager
def pause_collector() -> Iterator[None]:
    """Pause the garbage collector: the time of a collection inside a sample would count as the function's."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def flush_buffer(device: torch.device) -> torch.Tensor:
    """Return a buffer of twice the cache (GPU: L2, CPU: last level). Writing the buffer removes all other data from the cache."""
    on_gpu = device.type == "cuda"
    cache = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else last_level_cache_bytes() or 0
    return torch.zeros(max(2 * cache, LEAST_FLUSH[device.type]) // 4, dtype=torch.int32, device=device)


class CpuTimer:
    """Measures the host time of calls by `time.perf_counter_ns`, while the garbage collector is paused."""

    clock = "time.perf_counter_ns"
    previous: Call | None = None  # the call that used the cache last

    def __init__(self, cold: bool):
        self.flush = flush_buffer(torch.device("cpu")) if cold else None  # before every sample
        readings = [time.perf_counter_ns() for _ in range(101)]
        self.clock_ms = statistics.median(b - a for a, b in itertools.pairwise(readings)) / 1e6
        self.shortest_sample_ms = self.shortest_call_ms = CPU_SAMPLE_MS + self.clock_ms

    def prepare(self, call: Call, warmup: int, calls_per_sample: int | None, deadline: float = math.inf) -> Call:
        """Warm up, set the number of calls per sample, and return the call to time.

        calls_per_sample: None lets `calibrate` find the number. deadline: end of the preparation, by `time.perf_counter`.
        """
        self.warm_up(call, warmup, deadline)
        if calls_per_sample is not None or self.flush is not None:
            call.runs_per_sample = calls_per_sample or 1
        elif call.run_ms is None or call.run_ms <= CALIBRATE_BELOW_MS:
            self.calibrate(call, deadline)
        return call

    def warm_up(self, call: Call, runs: int, deadline: float = math.inf) -> None:
        """Run `runs` times in chunks that double in size; stop earlier if the next chunk would pass the deadline."""
        self.previous = call if runs else self.previous
        chunk = 1
        while call.warmed_up < runs:
            begin = time.perf_counter()
            issued = call.play(chunk, "warm-up")
            self.synchronize()
            now = time.perf_counter()
            call.warmed_up += chunk
            call.run_ms = min((now - begin) * 1e3 / chunk, call.run_ms or math.inf)
            call.issue_ms = min(issued / 1e6 / chunk, call.issue_ms or math.inf)
            chunk = min(call.warmed_up, runs - call.warmed_up)
            if now + chunk * call.run_ms / 1e3 > deadline:
                break

    def calibrate(self, call: Call, deadline: float = math.inf) -> None:
        """Set `runs_per_sample` so that a sample is long enough for this clock."""
        limit = self.max_runs(call)
        while True:
            runs = call.runs_per_sample
            sample_ms = min(self.sample([call] * 2, phase="calibration")) * runs
            enough = self.shortest_call_ms if runs == 1 else self.shortest_sample_ms
            if sample_ms >= enough or runs >= limit or time.perf_counter() > deadline:
                return
            needed = 1.1 * self.shortest_sample_ms / max(sample_ms / runs, 1e-6)
            call.runs_per_sample = min(limit, max(runs + 1, min(runs * 10, int(needed) + 1)))

    def synchronize(self) -> None:
        """Wait for queued work; on a CPU there is none."""

    def max_runs(self, call: Call) -> int:
        """Return the largest number of runs in one sample."""
        return MAX_CPU_CALLS

    def sample(self, sequence: Sequence[Call], phase: str = "timed") -> list[float]:
        """Take one sample of each call in the sequence; return the ms of one call of the user's function."""
        times_ms = []
        with pause_collector():
            for call in sequence:
                if self.flush is not None:
                    self.flush.add_(1)  # reads and writes every line
                else:
                    call.prime(self.previous)
                self.previous = call
                times_ms.append(call.play(call.runs_per_sample, phase) / 1e6 / call.runs_per_sample)
        return times_ms

    def floor_ms(self, like: Call) -> float:
        """Return the median time of an empty Python call, sampled in the same way as `like`."""
        empty = Call(lambda: None, (), {}, "empty call")
        empty.runs_per_sample = like.runs_per_sample
        return statistics.median(CpuTimer(False).sample([empty] * 21, phase="floor"))

    def describe(self, call: Call) -> dict:
        """Describe the clock and the flush."""
        return {
            "clock": self.clock,
            "clock_cost_ms": self.clock_ms,
            "l2_flush_bytes": getattr(self.flush, "nbytes", None),
        }
