"""The loop between `measure` and the timers: it decides the number of samples, their order, and when to stop."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch

from utils.benchmark import intervals as stats
from utils.benchmark.cpu_timer import Call, CpuTimer
from utils.benchmark.cuda_timer import CudaTimer
from utils.benchmark.result import Measurement
from utils.machine.environment import environment, gpu_state, slowdown_reasons
from utils.validation import whole_number

MIN_SAMPLES = 3  # taken even if the time budget is used up, unless a single call exceeds the budget
# Timing of one function on a GPU lasts at least this long. At the power limit the clocks swing within about a second. Over
# two seconds, medians of a matmul of 2560 on an H200 differed by up to 1.8%; over half a second, by up to 7%.
STEADY_S = 0.5
MOVING_S = 2.0  # instead of STEADY_S, if the clocks move
BURST = 3  # samples in a burst of one function; only the last sample counts
# Smallest half width of the interval of one function, because seconds of timing cannot show changes over minutes.
STEADY_HALF_WIDTH = 0.01
# Above this share of the power limit the clocks move even if NVML gives no reason yet: a matmul of 2304 at a share of
# 0.61 was steady within 0.4%, a matmul of 2560 at 0.70 was not.
MOVING_POWER = 0.65
FLOOR_MARGIN = 1.1  # a time up to 10% above the time of an empty call cannot be distinguished from it


@dataclass(frozen=True)
class Timing:
    """The options of `measure`, `compare` and `measure_together`.

    Args:
        device: "cuda" times by device events, "cpu" by the host's clock. Default: where the call's tensors are.
        warmup: calls before the timing.
        iterations: number of samples. On a GPU, ten or more samples of one function are spread over half a second, or over
            two seconds if the clocks move, as at the power limit. The GPU calls the function between the samples, too.
            So the samples see all levels of the clocks.
        l2: "warm": the function's previous call leaves its data in the cache. "cold": before every sample, outside of the
            timed region, a buffer of at least twice the cache (GPU: L2, CPU: last-level cache) is written.
        graph: capture the call in a CUDA graph once and time its replays.
        max_seconds: time budget, warm-up included; at least 3 samples are taken unless one call exceeds the budget.
        calls_per_sample: calls between two readings of the clock. Default: as many as the clock needs.
        queue_ahead: on a GPU, queue the calls behind a spin kernel, so that the time contains only device work. False: time
            the calls without a queue, with the gaps between launches.
        flops: FLOPs of one call, for `tflops` and `roof_share`.
        bytes: bytes read and written by one call, for `gb_s` and `roof_share`.
        roofs: a `Roofs`, such as `machine_roofs()`; a measured roof that a result exceeds is measured again.
        dtype: "fp16", "bf16", "fp32", "tf32" or "fp8", which selects the peak. Default: the dtype of the tensors.
        discard: leave out "outliers" (see `intervals.outliers`), "throttled" samples (the GPU's clocks were held back), or
            both. The result always counts them.
    """

    device: Any = None
    warmup: int = 10
    iterations: int = 100
    l2: str = "warm"
    graph: bool = False
    max_seconds: float | None = None
    calls_per_sample: int | None = None
    queue_ahead: bool = True
    flops: float | None = None
    bytes: float | None = None
    roofs: Any = None
    dtype: Any = None
    discard: Sequence[str] = ()

    def __post_init__(self) -> None:
        whole_number("warmup", self.warmup, 0)
        whole_number("iterations", self.iterations)
        if self.l2 not in ("warm", "cold"):
            raise ValueError(f'l2 must be "warm" or "cold", got {self.l2!r}.')
        if self.calls_per_sample is not None:
            whole_number("calls_per_sample", self.calls_per_sample)
        if self.l2 == "cold" and (self.calls_per_sample or 1) > 1:
            raise ValueError(
                f'l2="cold" flushes the cache before every sample, so only the first of calls_per_sample='
                f'{self.calls_per_sample} calls would be cold; use calls_per_sample=1 or l2="warm".'
            )
        if self.graph and not self.on_gpu:
            raise ValueError("graph=True captures a CUDA graph and needs a CUDA GPU; leave it out on a CPU.")
        if self.roofs is not None and not hasattr(self.roofs, "peak_tflops"):
            raise ValueError(f"roofs is {self.roofs!r}; give machine_roofs(), or datasheet_roofs of a GPU's name.")
        for name in ("max_seconds", "flops", "bytes"):
            x = getattr(self, name)
            if x is not None and (not isinstance(x, Real) or x is True or x <= 0 or not x < math.inf):
                raise ValueError(f"{name} must be a finite number above 0, got {x!r}; None leaves it out.")
        if not isinstance(self.discard, Collection) or any(x not in ("outliers", "throttled") for x in self.discard):
            raise ValueError(f"discard is {self.discard!r}; it is a list of 'outliers' and 'throttled'.")

    @property
    def on_gpu(self) -> bool:
        """Whether device events are the clock."""
        return self.device.type == "cuda"


def time_calls(timing: Timing, calls: list[Call], turns: Iterator[Sequence[int]]) -> list[Measurement]:
    """Time the calls in turns with one timer; return a Measurement of each call, without FLOPs, bytes and roof.

    `turns` yields an order of the calls for each round, without end.
    """
    begin = time.perf_counter()
    on_cpu, cold = not timing.on_gpu, timing.l2 == "cold"
    timer = CpuTimer(cold) if on_cpu else CudaTimer(timing.device, cold, timing.graph, timing.queue_ahead)
    gpu_before = gpu_state(timing.device) if timing.on_gpu else None
    with torch.cuda.device(timing.device if timing.on_gpu else -1):
        prepared = []
        for call in calls:
            deadline = time.perf_counter() + 0.5 * (timing.max_seconds or math.inf) / len(calls)
            prepared.append(timer.prepare(call, timing.warmup, timing.calls_per_sample, deadline))
        alone = timing.on_gpu and len(calls) == 1
        spread = None
        if alone and isinstance(timer, CudaTimer) and timing.iterations >= stats.BLOCKS:
            spread = spread_samples(timer, prepared[0], timing)
        samples = _collect(timer, prepared, turns, timing, begin, spread)
        gpu_after = gpu_state(timing.device) if timing.on_gpu else None
        floors = [timer.floor_ms(call) for call in prepared]
    seconds = time.perf_counter() - begin
    stopped = f"all {timing.iterations} iterations done"
    if len(samples[0]) < timing.iterations:
        stopped = f"time budget of {timing.max_seconds:g} s used after {len(samples[0])} of {timing.iterations} samples"
    throttled = [[index for index, (_, held) in enumerate(call.timed) if held] for call in prepared]
    known = (gpu_before or {}).get("throttle_reasons") is not None  # an old driver and a CPU give no reasons
    samples, counts, remarks = discard_rounds(samples, throttled if known else [], timing.discard)
    measurements, facts = [], environment(timing.device)
    for call, times, floor_ms, counted in zip(prepared, samples, floors, counts, strict=True):
        notes = [*call.notes, *remarks]
        if call.warmed_up < timing.warmup:
            notes.append(f"the time budget cut the warm-up to {call.warmed_up} of {timing.warmup} calls")
        median_ms = float(np.median(times))
        low, high = stats.repeat_interval(times)
        if alone:  # functions in turns are compared in pairs, which share the clocks
            low, high = min(low, median_ms * (1 - STEADY_HALF_WIDTH)), max(high, median_ms * (1 + STEADY_HALF_WIDTH))
        method = {
            **timer.describe(call),
            "device": str(timing.device),
            "warmup": call.warmed_up,
            "samples": len(times),
            "calls_per_sample": call.calls_per_run * call.runs_per_sample,
            "l2": timing.l2,
            "graph": timing.graph,
            "stopped": stopped,
            "floor_ms": floor_ms,
            "below_floor": median_ms <= FLOOR_MARGIN * floor_ms,
            "seconds": seconds,
            **counted,
            "gpu_before": gpu_before,
            "gpu_after": gpu_after,
            "notes": notes,
        }
        measurements.append(Measurement(tuple(times), (low, high), call.label, method=method, environment=facts))
    return measurements


def discard_rounds(
    samples: list[list[float]], throttled: list[list[int]], discard: Sequence[str]
) -> tuple[list[list[float]], list[dict], list[str]]:
    """Drop the rounds that `discard` names; return the other samples, the counts of each function, and notes.

    A round is dropped for all functions, so that pairs stay pairs. throttled: empty if the GPU does not tell.
    """
    notes, taken = [], len(samples[0])
    odd = [{"outliers": stats.outliers(times)} for times in samples]
    for rounds, held in zip(odd, throttled, strict=False):
        rounds["throttled"] = held
    if not throttled and "throttled" in discard:
        notes.append("whether clocks were held back is not known here: no sample is left out as throttled")
    dropped = {index for rounds in odd for name in discard for index in rounds.get(name, ())}
    if 2 * len(dropped) > taken:
        notes.append(f"{len(dropped)} of {taken} samples were to be left out: they are no exception, and all are kept")
        dropped = set()
    kept = [[ms for index, ms in enumerate(times) if index not in dropped] for times in samples]
    return kept, [{name: len(of) for name, of in rounds.items()} | {"discarded": len(dropped)} for rounds in odd], notes


def clocks_move(state: dict) -> bool:
    """Whether a GPU in this state is held back, below its highest clock, or near its power limit."""
    if state.get("throttle_reasons"):
        return bool(slowdown_reasons(state))
    clock, highest = state.get("sm_clock_mhz"), state.get("sm_clock_max_mhz")
    if clock and highest and clock < highest:
        return True
    power, limit = state.get("power_w"), state.get("power_limit_w")
    return bool(power and limit and power >= MOVING_POWER * limit)


def spread_samples(timer: CudaTimer, call: Call, timing: Timing) -> Iterator[float]:
    """Yield samples of one function, spread over time. Between the samples the GPU does the same work."""
    moving, last = False, time.perf_counter()
    while True:
        if not moving and (moving := clocks_move(timer.state)):
            call.notes.append("the GPU's clocks moved; `compare` times two functions at the same clocks")
        seconds = min(MOVING_S if moving else STEADY_S, 0.25 * (timing.max_seconds or math.inf))
        # The GPU rests during the spin before a burst, longer on a slow host. At its power limit it is up to 10% faster
        # afterwards. So `work` has no spin, and only the last sample of a burst counts.
        sample_s = (call.run_ms or 0.0) * call.runs_per_sample / 1e3
        if (rest := last + seconds / timing.iterations - BURST * sample_s - time.perf_counter()) > 0:
            timer.work(call, rest)
        sample_ms = timer.sample([call] * BURST)[-1]
        del call.timed[-BURST:-1]
        last = time.perf_counter()
        yield sample_ms


def _collect(
    timer: CpuTimer,
    calls: list[Call],
    turns: Iterator[Sequence[int]],
    timing: Timing,
    begin: float,
    spread: Iterator[float] | None,
) -> list[list[float]]:
    """Take the samples of all calls. Stop early if the time budget, which starts at `begin`, is used up."""
    samples: list[list[float]] = [[] for _ in calls]
    round_s = 0.0
    while (wanted := timing.iterations - (taken := len(samples[0]))) > 0:
        rounds = wanted
        if timing.max_seconds is not None:
            fitting = int((timing.max_seconds - (time.perf_counter() - begin)) / round_s) if taken else 1
            fitting = max(min(fitting, 1), fitting // 2)  # take half of them: the next rounds may take longer
            least = MIN_SAMPLES - taken if taken and round_s <= timing.max_seconds else 0
            rounds = min(wanted, max(fitting, least))
        if rounds <= 0:
            break
        began = time.perf_counter()
        if spread is not None:
            samples[0] += itertools.islice(spread, rounds)
        else:
            order = [index for turn in itertools.islice(turns, rounds) for index in turn]
            for index, ms in zip(order, timer.sample([calls[index] for index in order]), strict=True):
                samples[index].append(ms)
        round_s = max((time.perf_counter() - began) / rounds, 1e-9)  # wall time, with flush and synchronization
    return samples
