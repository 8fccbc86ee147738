"""Take samples by the GPU's clock: a pair of device events stands around each sample, and samples are queued in bursts.

The time between two events contains all work and all waiting of the stream, also the waiting for the CPU. A kernel of
5 us would seem to take 8 us or more if its launch takes 8 us. Therefore a spin kernel first keeps the stream busy while the CPU
queues a burst of samples behind it. Right after a sample is queued, its start event is queried. If the event has
already passed, the CPU was too slow: the burst is thrown away and repeated behind a longer spin. The spin is no longer
than the CPU needs. A longer spin lets the GPU rest and cool down, and at its power limit the GPU then runs faster
than under steady work (a bf16 matmul of 4096 on an H200: 175 us with rests, 182 to 197 us without).

A pair of events measures up to 1 us more than its kernel if many launches wait behind the pair. With a warm cache,
several short calls share a pair of events. Functions that take turns share long bursts, so both get the same error.

A function that waits for the GPU cannot be queued. Its samples then include the launch gaps, and a note says so. If a
second function takes turns with it, the second function is still queued, in separate bursts.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Sequence

import torch

from utils.benchmark.cpu_timer import Call, CpuTimer, flush_buffer, pause_collector
from utils.machine.environment import gpu_state, slowdown_reasons

GPU_SAMPLE_MS = 0.200  # events resolve about 0.5 us, which is 0.25% of such a sample
GPU_SHORT_MS = 0.100  # several calls of a shorter kernel share one pair of events
MAX_GPU_CALLS = 200  # calls in one sample
BURST_ISSUE_MS = 3.0  # a stream takes about 1000 launches, then the CPU must wait; a burst stays far below
MAX_SPIN_MS = 50.0
STATE_S = 0.1  # time between two readings of the clocks; the GPU rests during a reading that outlasts the burst
WORK_MS = 1.0  # length of a piece of work in `work`
LONGEST_BURST = 100  # samples
BURST_TRIES = 4
MIN_MARGIN, MAX_MARGIN = 1.5, 100.0  # the spin allows this many times the issue time that the warm-up measured
SURE_OF_GPU = 0.8  # share of a run's shortest time for which the GPU is assumed to be busy with that run
CAPTURE_FAILED = "captured into a CUDA graph"

_GPU_FLOORS: dict[tuple, float] = {}


@functools.cache
def _spin_cycles_per_ms(index: int) -> float:
    """Return the argument of `torch.cuda._sleep` that keeps this GPU busy for one millisecond."""
    cycles = 5_000_000
    with torch.cuda.device(index):
        torch.cuda._sleep(1000)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return cycles / begin.elapsed_time(end)


class CudaTimer(CpuTimer):
    """Measures the device time of samples between two events. Each burst of samples ends in one synchronization."""

    clock = "CUDA events"
    shortest_call_ms, shortest_sample_ms = GPU_SHORT_MS, GPU_SAMPLE_MS

    def __init__(self, device: torch.device, cold: bool, graph: bool, queue_ahead: bool):
        self.device, self.graph, self.queue_ahead = device, graph, queue_ahead
        self.separate = False  # True after a burst of several functions failed: then each function gets separate bursts
        self.margin = MIN_MARGIN
        self.state: dict = {}  # the last `gpu_state` of a timed burst
        self.read_s = -math.inf
        self.cycles_per_ms = _spin_cycles_per_ms(device.index) if queue_ahead else 0.0
        self.flush = flush_buffer(device) if cold else None

    def prepare(self, call: Call, warmup: int, calls_per_sample: int | None, deadline: float = math.inf) -> Call:
        """Prepare as the CPU's timer does; with `graph`, also capture the calls of a sample in a CUDA graph."""
        call = super().prepare(call, max(warmup, 1) if self.graph else warmup, calls_per_sample, deadline)
        return self.capture(call) if self.graph else call

    def max_runs(self, call: Call) -> int:
        """Return the largest number of runs in one sample: the CPU can issue so many within one burst."""
        return max(1, min(MAX_GPU_CALLS, int(BURST_ISSUE_MS / max(call.issue_ms or 0.05, 1e-3))))

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.device)

    def capture(self, call: Call) -> Call:
        """Capture the calls of one sample in a CUDA graph; return the graph's replay after its warm-up."""
        self.synchronize()
        # After a failed capture the random generator still believes that it is being captured, and every later
        # torch.randn on the GPU raises. Therefore a failure restores this copy of the generator's state.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        random_state = generator.clone_state()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(call.runs_per_sample):
                    call.fn(*call.args, **call.kwargs)
        except Exception as error:
            generator.graphsafe_set_state(random_state)
            error.add_note(
                f"raised while {call.label!r} was {CAPTURE_FAILED}: a captured function must "
                "not synchronize, copy to the CPU or choose shapes from data. graph=False runs it."
            )
            raise
        captured = Call(torch.cuda.CUDAGraph.replay, (graph,), {}, call.label)
        captured.calls_per_run = call.runs_per_sample
        self.warm_up(captured, 2)
        captured.warmed_up = call.warmed_up
        return captured

    def _issue_ms(self, call: Call) -> float:
        """Estimate the CPU time to queue one sample: its launches, two events, and the flush or an untimed call."""
        issue = call.issue_ms or 0.05
        return issue * call.runs_per_sample + 0.03 + (issue if self.flush is None else 0.0)

    def _burst_length(self, sequence: Sequence[Call]) -> int:
        """Return the number of samples of the next burst: as many as fit in BURST_ISSUE_MS, at least one.

        Calls that wait for the GPU and calls that do not are never in the same burst.
        """
        total = 0.0
        for length, call in enumerate(sequence):
            total += self._issue_ms(call)
            mixed = call is not sequence[0] and (self.separate or call.queueable != sequence[0].queueable)
            if length and (total > BURST_ISSUE_MS or mixed):
                return length
        return len(sequence)

    def _spin_ms(self, burst: Sequence[Call]) -> float:
        """Return how long the GPU must spin so that every sample of the burst is queued before the GPU reaches it."""
        issued = busy = spin = 0.0
        for call in burst:
            issued += self._issue_ms(call)
            spin = max(spin, self.margin * issued - busy)
            busy += SURE_OF_GPU * (call.gpu_ms or 0.0) * call.runs_per_sample
        return min(MAX_SPIN_MS, spin + 0.2)

    def _burst(self, burst: Sequence[Call], phase: str) -> tuple[list[float], bool]:
        """Queue one burst; return the ms of its samples, and whether the CPU queued every sample before the GPU reached it."""
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in burst]
        ahead = self.queue_ahead and burst[0].queueable
        if ahead:
            torch.cuda._sleep(int(self._spin_ms(burst) * self.cycles_per_ms))
        try:
            for call, (begin, end) in zip(burst, events, strict=True):
                if self.flush is not None:
                    self.flush.zero_()
                else:
                    call.prime(self.previous)
                self.previous = call
                begin.record()
                call.play(call.runs_per_sample, phase)
                end.record()
                ahead = ahead and not begin.query()
            if phase == "timed" and time.perf_counter() > self.read_s + STATE_S:  # the GPU still works at the burst
                self.state, self.read_s = gpu_state(self.device), time.perf_counter()
            self.synchronize()
        except Exception as error:  # CUDA reports an error of the GPU at some later call
            labels = " and ".join(sorted({call.label for call in burst}))
            error.add_note(f"raised while {len(burst)} {phase} samples of {labels} were on the GPU")
            raise
        return [begin.elapsed_time(end) for begin, end in events], ahead

    def sample(self, sequence: Sequence[Call], phase: str = "timed") -> list[float]:
        """Take one sample of each call in the sequence; return the ms of one call of the user's function."""
        times_ms: list[float] = []
        with torch.cuda.device(self.device), pause_collector():
            while len(times_ms) < len(sequence):
                rest = sequence[len(times_ms) : len(times_ms) + LONGEST_BURST]
                burst = rest[: self._burst_length(rest)]
                for _ in range(BURST_TRIES):
                    burst_ms, ahead = self._burst(burst, phase)
                    if ahead or not (self.queue_ahead and burst[0].queueable):
                        break
                    self.margin = min(2.0 * self.margin, MAX_MARGIN)
                else:
                    self._give_up(burst)
                    continue  # takes the samples again: separately, or without a queue
                self.margin = max(MIN_MARGIN, 0.8 * self.margin)
                for call, ms in zip(burst, burst_ms, strict=True):
                    run_ms = ms / call.runs_per_sample
                    if ahead:
                        call.gpu_ms = min(call.gpu_ms or run_ms, run_ms)
                    times_ms.append(run_ms / call.calls_per_run)
                    if phase == "timed":
                        call.timed.append((ahead, bool(slowdown_reasons(self.state))))
        return times_ms

    def work(self, call: Call, seconds: float) -> None:
        """Keep the GPU busy with a call for some time, without measuring. There is no spin: the GPU would rest in it."""
        runs, end, before = call.runs_per_sample, time.perf_counter() + seconds, None
        with torch.cuda.device(self.device), pause_collector():
            while time.perf_counter() < end:
                for _ in range(max(1, int(WORK_MS / max((call.run_ms or 0.0) * runs, 0.05)))):
                    call.play(runs, "untimed")
                # Queue a piece, then wait for the previous piece: in the other order the GPU would have no work in between.
                if before is not None:
                    before.synchronize()
                before = torch.cuda.Event()
                before.record()

    def _give_up(self, burst: Sequence[Call]) -> None:
        """After failed bursts, give each function separate bursts; if there is only one function, time it without a queue."""
        if any(call is not burst[0] for call in burst):
            self.separate, self.margin = True, MIN_MARGIN
            return
        burst[0].queueable = False
        burst[0].notes.append(
            "the queue could not be kept ahead of the GPU (the function waits for the GPU, or its "
            "launches outrun the queue): launch gaps are included"
        )

    def floor_ms(self, like: Call) -> float:
        """Return the median time of an empty kernel, sampled in the same way as `like`."""
        ahead = self.queue_ahead and like.queueable
        key = (self.device.index, self.graph, ahead, like.calls_per_run, like.runs_per_sample)
        if key not in _GPU_FLOORS:
            empty = Call(torch.cuda._sleep, (0,), {}, "empty kernel")
            timer = CudaTimer(self.device, False, self.graph, ahead)
            empty = timer.prepare(empty, 10, like.calls_per_run if self.graph else like.runs_per_sample)
            _GPU_FLOORS[key] = statistics.median(timer.sample([empty] * 51, phase="floor"))
        return _GPU_FLOORS[key]

    def describe(self, call: Call) -> dict:
        """Describe the clock, the flush and the queue."""
        ahead, taken = sum(ahead for ahead, _ in call.timed), len(call.timed)
        queue = "kept ahead by a spin kernel: device work only, no launch gaps"
        if not ahead:
            queue = "as issued: launch gaps are included"
        elif ahead < taken:
            queue = f"kept ahead by a spin kernel for {ahead} of {taken} samples; the others include launch gaps"
        return {"clock": self.clock, "l2_flush_bytes": getattr(self.flush, "nbytes", None), "queue": queue}
