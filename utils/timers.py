"""How a sample is taken: the monotonic clock on a CPU, pairs of device events on a GPU. `measure` decides how many.

A sample is the time of `calls_per_sample` calls, divided by that number. Both timers answer the same four questions:
`warm_up`, `calibrate` (how many calls make a sample long enough to read), `sample` and `floor_ms` (an empty call).

On a GPU the interval between two events holds whatever the stream did in between, waiting for the CPU included. A
kernel of 5 us whose launch takes 8 us would read 8 us or more. So a spin kernel first keeps the stream busy while the
CPU queues a whole burst of samples behind it, and the first start event is asked, once all are queued, whether it has
already passed. If it has, the CPU was too slow: the burst is thrown away and repeated behind a longer spin.
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import length_hint

import torch

from utils.environment import available_memory_bytes, last_level_cache_bytes

CPU_SAMPLE_MS = 0.020         # a CPU sample is at least this much longer than reading the clock
GPU_SAMPLE_MS = 0.200         # events resolve about 0.5 us: 0.25% of a sample this long
GPU_SHORT_MS = 0.100          # shorter kernels share one pair of events
MAX_CPU_CALLS = 100_000       # calls in one sample
MAX_GPU_CALLS = 200
BURST_ISSUE_MS = 3.0          # a stream takes about 1000 launches before the CPU has to wait: stay well below
MAX_SPIN_MS = 50.0
BURST_TRIES = 4
LEAST_MARGIN, MOST_MARGIN = 1.5, 100.0  # the spin lasts this many times what issuing the burst should take
UNKNOWN_CACHE_FLUSH = 64 * 1024**2
FEWEST_GPU_FLUSH = 256 * 1024**2


class Call:
    """A function with its arguments, called round robin over `inputs`, and what is known of its cost."""

    def __init__(self, fn: Callable, inputs: Sequence[tuple], kwargs: dict, label: str):
        self.fn, self.inputs, self.kwargs, self.label = fn, list(inputs), dict(kwargs), label
        self.calls_per_run = 1        # calls of the user's function behind one `fn`: more in an unrolled graph
        self.runs_per_sample = 1
        self.position = 0
        self.run_ms: float | None = None     # one run, from the last warm-up chunk
        self.issue_ms: float | None = None   # what the CPU needs to issue it
        self.calibration_calls = 0
        self.timed_runs = 0
        self.played: Counter[str] = Counter()  # runs begun in each phase

    @property
    def calls_per_sample(self) -> int:
        return self.calls_per_run * self.runs_per_sample

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

    def most_runs(self, call: Call) -> int:
        """The most runs that one sample may hold."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait for queued work; on a CPU there is none."""

    def warm_up(self, call: Call, runs: int, deadline: float | None) -> int:
        """Run `runs` times, fewer if the deadline (perf_counter seconds) passes; how many were run."""
        done, chunk = 0, 1
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

    def describe(self) -> dict:
        return {"clock": self.clock}


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
        cache = last_level_cache_bytes()
        if cache is None:
            self.notes.append("the size of the last-level cache is not known here: 64 MB are streamed to flush it")
        self.flush_bytes = max(2 * (cache or 0), UNKNOWN_CACHE_FLUSH)
        free = available_memory_bytes()
        if free is not None and self.flush_bytes > free // 2:
            raise MemoryError(f"l2=\"cold\" streams {self.flush_bytes / 1e6:.0f} MB, twice the last-level cache, "
                              f"between samples, and only {free / 1e6:.0f} MB are free; free some or use l2=\"warm\".")
        self._buffer = torch.zeros(self.flush_bytes // 8, dtype=torch.int64)

    def sample(self, sequence, runs=None, phase="timed"):
        out = []
        with no_collection():
            for call in sequence:
                if self.flush_bytes:
                    self._buffer.add_(1)  # reads and writes every line
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

    def describe(self):
        return {"clock": self.clock, "clock_cost_ms": self.clock_ms, "l2_flush_bytes": self.flush_bytes or None}


@functools.cache
def _spin_cycles_per_ms(index: int) -> float:
    """How far `torch.cuda._sleep` has to count for one millisecond on this GPU."""
    cycles = 5_000_000
    with torch.cuda.device(index):
        torch.cuda._sleep(1000)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return cycles / begin.elapsed_time(end)


class CudaTimer(Timer):
    """Device time between two events around each sample, queued in bursts, one synchronization a burst."""

    clock = "CUDA events"
    shortest_sample_ms = GPU_SAMPLE_MS

    def most_runs(self, call):
        return max(1, min(MAX_GPU_CALLS, int(BURST_ISSUE_MS / max(call.issue_ms or 0.05, 1e-3))))

    def __init__(self, device: torch.device, cold: bool, graph: bool, queue_ahead: bool):
        self.device, self.graph, self.queue_ahead = device, graph, queue_ahead
        self.notes: list[str] = []
        self.bursts = self.bursts_ahead = self.bursts_repeated = 0
        self.margin = LEAST_MARGIN
        self.flush_bytes = 0
        self.cycles_per_ms = _spin_cycles_per_ms(device.index) if queue_ahead else 0.0
        if cold:
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self.flush_bytes = max(2 * cache, FEWEST_GPU_FLUSH)
            self._buffer = torch.empty(self.flush_bytes // 4, dtype=torch.int32, device=device)

    def synchronize(self):
        torch.cuda.synchronize(self.device)

    def long_enough(self, sample_ms, runs):
        return sample_ms >= (GPU_SHORT_MS if runs == 1 else GPU_SAMPLE_MS)

    def capture(self, call: Call, calls_per_graph: int | None) -> Call:
        """`call` as CUDA graphs: one for each inputs when cold or asked for, else one with many calls unrolled."""
        if self.flush_bytes or calls_per_graph == 1:
            groups = [[args] for args in call.inputs]
        else:
            count = len(call.inputs)
            if calls_per_graph is None:
                runs = min(10, self.most_runs(call))
                run_ms = min(self.sample([call] * 2, runs=runs, phase="calibration"))
                call.calibration_calls += 2 * runs
                calls_per_graph = 1
                if run_ms < GPU_SHORT_MS:
                    calls_per_graph = min(MAX_GPU_CALLS, int(GPU_SAMPLE_MS / max(run_ms, 1e-3)) + 1)
            unrolled = -(-calls_per_graph // count) * count  # each input as often as the others
            groups = [[call.inputs[i % count] for i in range(unrolled)]]
        graphs = []
        self.synchronize()
        # A capture that fails leaves the random generator believing that it is still captured, and every later
        # torch.randn on the GPU raises: a failure puts this copy of its state back.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        random_state = generator.clone_state()
        for group in groups:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    for args in group:
                        call.fn(*args, **call.kwargs)
            except Exception as error:
                generator.graphsafe_set_state(random_state)
                error.add_note(f"raised while {call.label!r} was captured into a CUDA graph: a captured function must "
                               "not synchronize, copy to the CPU or choose shapes from data. graph=False runs it.")
                raise
            graphs.append((graph,))
        captured = Call(torch.cuda.CUDAGraph.replay, graphs, {}, call.label)
        captured.calls_per_run = len(groups[0])
        captured.calibration_calls = call.calibration_calls
        return captured

    def _burst_length(self, sequence: Sequence[Call], runs: int | None) -> int:
        """How many samples of the sequence can be issued within BURST_ISSUE_MS; at least one."""
        total = 0.0
        for length, call in enumerate(sequence):
            total += (call.issue_ms or 0.05) * (runs or call.runs_per_sample) + 0.03  # events, and the flush
            if total > BURST_ISSUE_MS and length:
                return length
        return len(sequence)

    def _burst(self, burst: Sequence[Call], runs: int | None, phase: str) -> tuple[list[float], bool]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in burst]
        if self.queue_ahead:
            issue = sum((call.issue_ms or 0.05) * (runs or call.runs_per_sample) + 0.03 for call in burst)
            spin_ms = min(MAX_SPIN_MS, self.margin * issue + 0.2)
            torch.cuda._sleep(int(spin_ms * self.cycles_per_ms))
        for call, (begin, end) in zip(burst, events, strict=True):
            if self.flush_bytes:
                self._buffer.zero_()
            begin.record()
            call.play(runs or call.runs_per_sample, phase)
            end.record()
        ahead = self.queue_ahead and not events[0][0].query()
        try:
            self.synchronize()
        except Exception as error:
            labels = " and ".join(sorted({call.label for call in burst}))
            error.add_note(f"raised by the GPU while {len(burst)} {phase} samples of {labels} were running")
            raise
        return [begin.elapsed_time(end) for begin, end in events], ahead

    def sample(self, sequence, runs=None, phase="timed"):
        out: list[float] = []
        with torch.cuda.device(self.device), no_collection():
            while len(out) < len(sequence):
                rest = sequence[len(out):]
                burst = rest[:self._burst_length(rest, runs)]
                times, ahead = self._burst(burst, runs, phase)
                tries = 1
                while self.queue_ahead and not ahead and tries < BURST_TRIES and self.margin < MOST_MARGIN:
                    self.margin *= 2.0
                    self.bursts_repeated += 1
                    for call in burst:
                        call.calibration_calls += (runs or call.runs_per_sample) * call.calls_per_run
                    times, ahead = self._burst(burst, runs, phase)
                    tries += 1
                if self.queue_ahead and not ahead:
                    self.queue_ahead = False
                    self.notes.append("the queue could not be kept ahead of the GPU (the function waits for the GPU, "
                                      "or its launches outrun the queue): launch gaps are included")
                self.margin = max(LEAST_MARGIN, 0.8 * self.margin)
                self.bursts += 1
                self.bursts_ahead += ahead
                for call, took in zip(burst, times, strict=True):
                    count = runs or call.runs_per_sample
                    out.append(took / (count * call.calls_per_run))
                    if phase == "timed":
                        call.timed_runs += count
        return out

    def floor_ms(self, like):
        key = (self.device.index, self.graph, self.queue_ahead, like.calls_per_run, like.runs_per_sample)
        if key not in _GPU_FLOORS:
            empty = Call(torch.cuda._sleep, [(0,)], {}, "empty kernel")
            quiet = CudaTimer(self.device, False, self.graph, self.queue_ahead)
            quiet.warm_up(empty, 10, None)
            if self.graph:
                empty = quiet.capture(empty, like.calls_per_run)
            _GPU_FLOORS[key] = statistics.median(quiet.sample([empty] * 51, runs=like.runs_per_sample, phase="floor"))
        return _GPU_FLOORS[key]

    def describe(self):
        if not self.bursts_ahead and not self.queue_ahead:
            queue = "as issued: launch gaps are included"
        else:
            queue = (f"kept ahead by a spin kernel in {self.bursts_ahead} of {self.bursts} bursts: "
                     "device work only, no launch gaps")
        return {"clock": self.clock, "l2_flush_bytes": self.flush_bytes or None, "queue": queue,
                "bursts_repeated": self.bursts_repeated}


_GPU_FLOORS: dict[tuple, float] = {}
