"""The GPU's clock: pairs of device events around samples that are queued in bursts.

The interval between two events holds whatever the stream did in between, waiting for the CPU included. A kernel of 5 us
whose launch takes 8 us would read 8 us or more. So a spin kernel first keeps the stream busy while the CPU queues a
burst of samples behind it, and each sample's start event is asked, once the sample is queued, whether it has already
passed. If one has, the CPU was too slow: the burst is thrown away and repeated behind a longer spin. The spin is no
longer than the CPU needs: a GPU that rests between bursts cools down, and at its power limit it then runs faster than
under steady work (a bf16 matmul of 4096 on an H200: 175 us with rests, 182 to 197 us without).

A function that waits for the GPU cannot be queued. It is timed as it is issued, and says so; one that takes turns with
it is queued all the same, in bursts of its own.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from utils.benchmark.timers import Call, Timer, no_collection

GPU_SAMPLE_MS = 0.200  # events resolve about 0.5 us: 0.25% of a sample this long
GPU_SHORT_MS = 0.100  # shorter kernels share one pair of events
MAX_GPU_CALLS = 200  # calls in one sample
BURST_ISSUE_MS = 3.0  # a stream takes about 1000 launches before the CPU has to wait: stay well below
MAX_SPIN_MS = 50.0
BURST_TRIES = 4
LEAST_MARGIN, MOST_MARGIN = 1.5, 100.0  # issuing is taken to last this many times what it did in the warm-up
SURE_OF_GPU = 0.8  # share of the shortest time seen that the GPU will surely be busy with a run
FEWEST_GPU_FLUSH = 256 * 1024**2
CAPTURE_FAILED = "captured into a CUDA graph"

_GPU_FLOORS: dict[tuple, float] = {}


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


def gpu_flush_bytes(device: torch.device) -> int:
    """Bytes to write so that nothing else is left in the L2: twice its size, and no less than `do_bench` writes."""
    return max(2 * torch.cuda.get_device_properties(device).L2_cache_size, FEWEST_GPU_FLUSH)


@contextmanager
def _whose(burst: Sequence[Call], phase: str) -> Iterator[None]:
    """An error of the GPU comes up whenever it is next asked: say what was running."""
    try:
        yield
    except Exception as error:
        labels = " and ".join(sorted({call.label for call in burst}))
        error.add_note(f"raised by the GPU while {len(burst)} {phase} samples of {labels} were running")
        raise


class CudaTimer(Timer):
    """Device time between two events around each sample, queued in bursts, one synchronization a burst."""

    clock = "CUDA events"
    shortest_sample_ms = GPU_SAMPLE_MS

    def most_runs(self, call):
        return max(1, min(MAX_GPU_CALLS, int(BURST_ISSUE_MS / max(call.issue_ms or 0.05, 1e-3))))

    def __init__(self, device: torch.device, cold: bool, graph: bool, queue_ahead: bool):
        self.device, self.graph, self.queue_ahead = device, graph, queue_ahead
        self.notes: list[str] = []
        self.bursts_repeated = 0
        self.apart = False  # a burst of both functions failed: each gets bursts of its own, to see which one it was
        self.margin = LEAST_MARGIN
        self.flush_bytes = 0
        self.cycles_per_ms = _spin_cycles_per_ms(device.index) if queue_ahead else 0.0
        if cold:
            self.flush_bytes = gpu_flush_bytes(device)
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
                error.add_note(
                    f"raised while {call.label!r} was {CAPTURE_FAILED}: a captured function must "
                    "not synchronize, copy to the CPU or choose shapes from data. graph=False runs it."
                )
                raise
            graphs.append((graph,))
        captured = Call(torch.cuda.CUDAGraph.replay, graphs, {}, call.label)
        captured.calls_per_run = len(groups[0])
        captured.calibration_calls = call.calibration_calls
        return captured

    def _issue_ms(self, call: Call, runs: int | None) -> float:
        """What the CPU needs to queue one sample: its launches, two events, and the flush or an untimed call."""
        issue = call.issue_ms or 0.05
        return issue * (runs or call.runs_per_sample) + 0.03 + (0.0 if self.flush_bytes else issue)

    def _burst_length(self, sequence: Sequence[Call], runs: int | None) -> int:
        """How many samples of the sequence can be issued within BURST_ISSUE_MS, at least one; none waits for the GPU
        beside one that does not.
        """
        total = 0.0
        for length, call in enumerate(sequence):
            total += self._issue_ms(call, runs)
            other = call is not sequence[0] and (self.apart or call.queueable != sequence[0].queueable)
            if length and (total > BURST_ISSUE_MS or other):
                return length
        return len(sequence)

    def _spin_ms(self, burst: Sequence[Call], runs: int | None) -> float:
        """How long the GPU has to be kept busy for every sample of the burst to be queued before it begins."""
        issued = busy = spin = 0.0
        for call in burst:
            issued += self._issue_ms(call, runs)
            spin = max(spin, self.margin * issued - busy)
            busy += SURE_OF_GPU * (call.gpu_ms or 0.0) * (runs or call.runs_per_sample)
        return min(MAX_SPIN_MS, spin + 0.2)

    def _burst(self, burst: Sequence[Call], runs: int | None, phase: str) -> tuple[list[float], bool]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in burst]
        ahead = self.queue_ahead and burst[0].queueable
        if ahead:
            torch.cuda._sleep(int(self._spin_ms(burst, runs) * self.cycles_per_ms))
        for call, (begin, end) in zip(burst, events, strict=True):
            if self.flush_bytes:
                self._buffer.zero_()
            else:
                call.prime(self.before)
            self.before = call
            begin.record()
            call.play(runs or call.runs_per_sample, phase)
            end.record()
            with _whose(burst, phase):
                ahead = ahead and not begin.query()
        with _whose(burst, phase):
            self.synchronize()
        return [begin.elapsed_time(end) for begin, end in events], ahead

    def sample(self, sequence, runs=None, phase="timed"):
        out: list[float] = []
        with torch.cuda.device(self.device), no_collection():
            while len(out) < len(sequence):
                rest = sequence[len(out) :]
                burst = rest[: self._burst_length(rest, runs)]
                times, ahead = self._burst(burst, runs, phase)
                tries = 1
                while not ahead and self.queue_ahead and burst[0].queueable:
                    self.bursts_repeated += 1
                    for call in burst:
                        call.calibration_calls += (runs or call.runs_per_sample) * call.calls_per_run
                    if tries == BURST_TRIES or self.margin >= MOST_MARGIN:
                        self._give_up(burst)
                        burst = []  # taken again, in another way
                        break
                    self.margin *= 2.0
                    times, ahead = self._burst(burst, runs, phase)
                    tries += 1
                self.margin = max(LEAST_MARGIN, 0.8 * self.margin)
                for call in dict.fromkeys(burst):
                    call.bursts += 1
                    call.bursts_ahead += ahead
                for call, took in zip(burst, times[: len(burst)], strict=True):
                    count = runs or call.runs_per_sample
                    if ahead:
                        call.gpu_ms = min(call.gpu_ms or took / count, took / count)
                    out.append(took / (count * call.calls_per_run))
                    if phase == "timed":
                        call.timed_runs += count
        return out

    def _give_up(self, burst: Sequence[Call]) -> None:
        """The queue was not kept ahead of these calls: part them, or time the one there is as it is issued."""
        if any(call is not burst[0] for call in burst):
            self.apart, self.margin = True, LEAST_MARGIN
            return
        burst[0].queueable = False
        burst[0].notes.append(
            "the queue could not be kept ahead of the GPU (the function waits for the GPU, or its "
            "launches outrun the queue): launch gaps are included"
        )

    def floor_ms(self, like):
        ahead = self.queue_ahead and like.queueable
        key = (self.device.index, self.graph, ahead, like.calls_per_run, like.runs_per_sample)
        if key not in _GPU_FLOORS:
            empty = Call(torch.cuda._sleep, [(0,)], {}, "empty kernel")
            quiet = CudaTimer(self.device, False, self.graph, ahead)
            quiet.warm_up(empty, 10, None)
            if self.graph:
                empty = quiet.capture(empty, like.calls_per_run)
            _GPU_FLOORS[key] = statistics.median(quiet.sample([empty] * 51, runs=like.runs_per_sample, phase="floor"))
        return _GPU_FLOORS[key]

    def describe(self, call):
        if not call.bursts_ahead:
            queue = "as issued: launch gaps are included"
        else:
            queue = (
                f"kept ahead by a spin kernel in {call.bursts_ahead} of {call.bursts} bursts: "
                "device work only, no launch gaps"
            )
        return {
            "clock": self.clock,
            "l2_flush_bytes": self.flush_bytes or None,
            "queue": queue,
            "bursts_repeated": self.bursts_repeated,
        }
