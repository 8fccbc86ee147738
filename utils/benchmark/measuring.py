"""The one timer: `measure` times a function, `compare` times two of them interleaved. All else goes through these.

    >>> measure(torch.matmul, a, b, flops=2 * n**3, dtype="bf16", roofs=machine_roofs(), l2="cold")
    >>> compare(naive, fused, x)                       # "fused is 1.83x as fast as naive [1.81, 1.84]: faster"

Every raw sample is kept, and `method` says how the samples came about. A keyword that is none of `measure`'s own goes
to the function; where the function's own keyword has the name of an option (`label`, `bytes`, ...), bind it first with
`functools.partial`.
"""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from utils.benchmark import intervals as stats
from utils.benchmark.call_tensors import pick_device, tensors_of
from utils.benchmark.cuda_timer import CudaTimer
from utils.benchmark.result import Comparison, Measurement
from utils.benchmark.timers import Call, CpuTimer, Timer
from utils.config import dtype_name
from utils.machine.environment import environment, float32_matmul_precision, gpu_state

FEWEST_SAMPLES = 3  # a time budget cuts no run below this, unless one call is over the budget
FEWEST_ADAPTIVE = 20  # no early stop on an interval from fewer
MOST_ADAPTIVE = 50  # adaptive runs stop at this many times `iterations`
CALIBRATE_BELOW_MS = 1.0  # a call this long is a sample by itself, on either clock
FLOOR_MARGIN = 1.1  # within 10% of an empty call: not told apart from it


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_options(*, warmup, iterations, l2, graph, device, target_interval, max_seconds, calls_per_sample) -> None:
    if not _is_count(warmup, 0):
        raise ValueError(f"warmup must be a whole number, 0 or more, got {warmup!r}.")
    if not _is_count(iterations, 1):
        raise ValueError(f"iterations must be a whole number, 1 or more, got {iterations!r}.")
    if l2 not in ("warm", "cold"):
        raise ValueError(f'l2 must be "warm" or "cold", got {l2!r}.')
    if calls_per_sample is not None and not _is_count(calls_per_sample, 1):
        raise ValueError(f"calls_per_sample must be a whole number, 1 or more, or None, got {calls_per_sample!r}.")
    if l2 == "cold" and (calls_per_sample or 1) > 1:
        raise ValueError(
            f'l2="cold" flushes the cache before every sample, so only the first of calls_per_sample='
            f'{calls_per_sample} calls would be cold; use calls_per_sample=1 or l2="warm".'
        )
    if graph and device.type != "cuda":
        raise ValueError("graph=True captures a CUDA graph and needs a CUDA GPU; leave it out on a CPU.")
    if target_interval is not None and not 0.0 < target_interval < 1.0:
        raise ValueError(
            f"target_interval is the interval's relative half-width, between 0 and 1, got "
            f"{target_interval!r}; 0.01 asks for plus or minus 1%."
        )
    if max_seconds is not None and not (max_seconds > 0.0 and math.isfinite(max_seconds)):
        raise ValueError(f"max_seconds must be a finite number above 0, got {max_seconds!r}.")


def _input_list(args: tuple, inputs) -> list[tuple]:
    if inputs is None:
        return [args]
    if args:
        raise ValueError("give the arguments either one by one or as inputs=[(...), (...)], not both.")
    inputs = list(inputs)
    wrong = [type(item).__name__ for item in inputs if not isinstance(item, (tuple, list))]
    if not inputs or wrong:
        raise ValueError(
            "inputs must be a list of argument tuples, one tuple a call, such as [(a0, b0), (a1, b1)]"
            + (f"; got an item of type {wrong[0]}." if wrong else "; got an empty list.")
        )
    return [tuple(item) for item in inputs]


def _label(fn: Callable, label: str | None) -> str:
    if label is not None:
        return str(label)
    inner = fn.func if isinstance(fn, functools.partial) else fn
    return getattr(inner, "__name__", None) or type(inner).__name__


def _name_of(dtype) -> str:
    """The dtype's name in the roofs, or torch's own where no roof can have one (float64)."""
    try:
        return dtype_name(dtype)
    except ValueError:
        return str(dtype).removeprefix("torch.")


def _time_at_roof(calls: list[Call], device: torch.device, flops, bytes, roofs, dtype):
    """(ms the nearer of compute and memory roof would take, the roof used, dtype name); None where not known."""
    for name, value in (("flops", flops), ("bytes", bytes)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} is the count of one call and must be above 0, got {value!r}; None leaves it out.")
    if dtype is not None:
        dtype = _name_of(dtype)
    else:
        floating = [
            tensor.dtype
            for call in calls
            for tensor in tensors_of([call.inputs, call.kwargs, call.fn])
            if tensor.is_floating_point()
        ]
        dtype = _name_of(floating[0]) if floating else None
        if dtype == "fp32" and device.type == "cuda" and float32_matmul_precision() != "highest":
            dtype = "tf32"  # what fp32 matrix products then run in
    if roofs is None or (flops is None and bytes is None):
        return None, None, dtype
    at_roof_ms = []
    if flops is not None:
        peak = roofs.tflops.get(dtype)
        if not peak:
            known = ", ".join(sorted(name for name, value in roofs.tflops.items() if value))
            raise ValueError(f"the roofs of {roofs.name} have no {dtype!r} peak; pass dtype= one of {known}.")
        at_roof_ms.append(flops / (peak * 1e9))
    if bytes is not None:
        at_roof_ms.append(bytes / (roofs.memory_bandwidth_tb_s * 1e9))
    roof = {
        "name": roofs.name,
        "origin": roofs.origin,
        "dtype": dtype,
        "tflops": roofs.tflops.get(dtype),
        "memory_bandwidth_tb_s": roofs.memory_bandwidth_tb_s,
    }
    return max(at_roof_ms), roof, dtype


def _collect(
    timer: Timer,
    calls: list[Call],
    rounds: Callable[[int], list[int]],
    *,
    iterations: int,
    width: Callable[[list[list[float]]], float],
    target: float | None,
    deadline: float | None,
    budget_s: float | None,
) -> tuple[list[list[float]], str]:
    """Take samples of all calls in the order `rounds` gives until enough, precise enough, or out of time."""
    samples: list[list[float]] = [[] for _ in calls]
    round_s = None  # wall time of one sample of each call, flush and synchronization included
    wanted = max(iterations, FEWEST_ADAPTIVE) if target is not None else iterations
    most = wanted if target is None else MOST_ADAPTIVE * wanted
    while True:
        done = len(samples[0])
        step = wanted - done
        if deadline is not None:
            if round_s is None:
                known = [call.run_ms for call in calls]
                over = None not in known and sum(known) / 1e3 > budget_s
                step = min(step, 1 if over or None in known else FEWEST_SAMPLES)
            else:
                fits = int((deadline - time.perf_counter()) / round_s)
                fits = max(1, fits // 2) if fits > 0 else 0  # half at a time: the next ones may take longer
                step = min(step, max(fits, FEWEST_SAMPLES - done if round_s <= budget_s else 0))
                if step <= 0:
                    return samples, f"time budget of {budget_s:g} s used after {done} of {wanted} samples"
        begin = time.perf_counter()
        order = rounds(step)
        for index, value in zip(order, timer.sample([calls[i] for i in order]), strict=True):
            samples[index].append(value)
        round_s = max((time.perf_counter() - begin) / step, 1e-9)
        done += step
        if done < wanted:
            continue
        if target is None:
            return samples, f"all {iterations} iterations done"
        reached = width(samples)
        if reached <= target:
            return samples, f"interval half-width {reached:.2%} reached the target of {target:.2%}"
        if done >= most:
            return samples, f"gave up at {done} samples: interval half-width {reached:.2%}, target {target:.2%}"
        wanted = min(most, done + max(10, done // 2))


def _prepare(
    timer: Timer, call: Call, warmup: int, graph: bool, calls_per_sample: int | None, cold: bool, deadline: float | None
) -> tuple[Call, int]:
    """Warm up, capture if asked, and settle the calls per sample; the call to be timed and the warm-up calls done."""
    done = timer.warm_up(call, max(warmup, 1) if graph else warmup, deadline)
    if graph:
        call = timer.capture(call, calls_per_sample)
        call.calibration_calls += timer.warm_up(call, 2, deadline) * call.calls_per_run
    elif calls_per_sample is not None or cold:
        call.runs_per_sample = calls_per_sample or 1
    elif call.run_ms is None or call.run_ms <= CALIBRATE_BELOW_MS:
        timer.calibrate(call, deadline)
    return call, done


def _run(
    contenders: list[Call],
    rounds,
    width,
    *,
    device,
    warmup,
    iterations,
    l2,
    graph,
    target_interval,
    max_seconds,
    calls_per_sample,
    queue_ahead,
    floor,
) -> tuple[list[list[float]], list[dict]]:
    """Time the contenders on one timer: (samples of each, method of each)."""
    begin = time.perf_counter()
    deadline = None if max_seconds is None else begin + max_seconds
    # Warming up may take half of the budget, shared by the contenders.
    share = None if max_seconds is None else 0.5 * max_seconds / len(contenders)
    cold = l2 == "cold"
    on_gpu = device.type == "cuda"
    timer = CudaTimer(device, cold, graph, queue_ahead) if on_gpu else CpuTimer(cold)
    before = gpu_state(device) if on_gpu else None
    with torch.cuda.device(device if on_gpu else -1):
        prepared, warmed = [], []
        for call in contenders:
            call, done = _prepare(
                timer,
                call,
                warmup,
                graph,
                calls_per_sample,
                cold,
                None if share is None else time.perf_counter() + share,
            )
            prepared.append(call)
            warmed.append(done)
        samples, stopped = _collect(
            timer,
            prepared,
            rounds,
            iterations=iterations,
            width=width,
            target=target_interval,
            deadline=deadline,
            budget_s=max_seconds,
        )
        after = gpu_state(device) if on_gpu else None
        floors = [timer.floor_ms(call) if floor else None for call in prepared]
    seconds = time.perf_counter() - begin
    methods = []
    for call, done, times, floor_ms in zip(prepared, warmed, samples, floors, strict=True):
        notes = [*timer.notes, *call.notes]
        if done < warmup:
            notes.append(f"the time budget cut the warm-up to {done} of {warmup} calls")
        methods.append(
            {
                **timer.describe(call),
                "device": str(device),
                "warmup": done,
                "samples": len(times),
                "calls_per_sample": call.calls_per_sample,
                "timed_calls": call.timed_runs * call.calls_per_run,
                "calibration_calls": call.calibration_calls,
                "inputs": len(contenders[0].inputs),
                "l2": l2,
                "graph": graph,
                "calls_per_graph": call.calls_per_run if graph else None,
                "stopped": stopped,
                "cut_by_time_budget": stopped.startswith("time budget"),
                "floor_ms": floor_ms,
                "below_floor": None if floor_ms is None else float(np.median(times)) <= FLOOR_MARGIN * floor_ms,
                "seconds": seconds,
                "gpu_before": before,
                "gpu_after": after,
                "notes": notes,
            }
        )
    return samples, methods


def _measurement(call: Call, samples, method, device, flops, bytes, at_roof, confidence) -> Measurement:
    roof_ms, roof, dtype = at_roof
    median_ms = float(np.median(samples))
    share = None if roof_ms is None or median_ms <= 0 else roof_ms / median_ms
    method["over_roof"] = share is not None and share > 1.0
    return Measurement(
        samples_ms=tuple(samples),
        interval_ms=stats.median_interval(samples, confidence),
        label=call.label,
        confidence=confidence,
        flops=flops,
        bytes=bytes,
        dtype=dtype,
        roof_share=share,
        roof=roof,
        method=method,
        environment=environment(device),
    )


def measure(
    fn: Callable,
    *args,
    warmup: int = 10,
    iterations: int = 100,
    device=None,
    flops: float | None = None,
    bytes: float | None = None,
    roofs=None,
    dtype=None,
    l2: str = "warm",
    graph: bool = False,
    target_interval: float | None = None,
    max_seconds: float | None = None,
    inputs: Sequence[tuple] | None = None,
    label: str | None = None,
    calls_per_sample: int | None = None,
    queue_ahead: bool = True,
    floor: bool = True,
    confidence: float = 0.95,
    **kwargs,
) -> Measurement:
    """Time `fn(*args, **kwargs)`: a Measurement with every sample, its statistics and how it was taken.

    Args:
        fn: what is timed; its result is dropped.
        warmup: calls before the timing.
        iterations: samples; with `target_interval` the fewest samples.
        device: "cuda" times by device events, "cpu" by the host's clock. Default: where the call's tensors are.
        flops, bytes: FLOPs, and bytes read and written, of one call; for `tflops`, `gb_s` and `roof_share`.
        roofs: a `Roofs`; `dtype` ("fp16", "bf16", "fp32", "tf32", "fp8") picks its peak, by default the tensors'.
        l2: "warm" as its own calls leave it, or "cold": a buffer of at least twice the cache (L2 of the GPU, last-level
            cache of the CPU) is written before every sample, outside the timed region.
        graph: capture the call into a CUDA graph once and time its replays.
        target_interval: go on until the median's interval is within plus or minus this share (0.01: 1%).
        max_seconds: time budget, warm-up included; at least 3 samples are taken unless one call exceeds it.
        inputs: list of argument tuples used in turn, instead of `args`.
        calls_per_sample: calls between two readings of the clock, divided out. Default: as many as the clock needs.
        queue_ahead: on a GPU, queue the calls behind a spin kernel so that the time holds device work alone; False
            times the calls as they are issued, launch gaps included.
        floor: also time an empty call, so that a result as short as that is marked.
        kwargs: passed to `fn`. For a keyword of `fn` that is also named here, use `functools.partial`.
    """
    if not callable(fn):
        raise TypeError(
            f"measure() times a function: its first argument must be callable, got {type(fn).__name__}. "
            "Pass fn and its arguments apart: measure(fn, x), not measure(fn(x))."
        )
    call = Call(fn, _input_list(args, inputs), kwargs, _label(fn, label))
    device = pick_device(device, call.inputs, kwargs, fn)
    options = dict(
        warmup=warmup,
        iterations=iterations,
        l2=l2,
        graph=graph,
        target_interval=target_interval,
        max_seconds=max_seconds,
        calls_per_sample=calls_per_sample,
        device=device,
    )
    _check_options(**options)
    stats.check_confidence(confidence)
    at_roof = _time_at_roof([call], device, flops, bytes, roofs, dtype)

    def width(samples: list[list[float]]) -> float:
        times = samples[0]
        return stats.relative_half_width(stats.median_interval(times, confidence), float(np.median(times)))

    samples, methods = _run([call], lambda count: [0] * count, width, queue_ahead=queue_ahead, floor=floor, **options)
    return _measurement(call, samples[0], methods[0], device, flops, bytes, at_roof, confidence)


def compare(
    a: Callable,
    b: Callable,
    *args,
    warmup: int = 10,
    iterations: int = 100,
    device=None,
    flops: float | None = None,
    bytes: float | None = None,
    roofs=None,
    dtype=None,
    l2: str = "warm",
    graph: bool = False,
    target_interval: float | None = None,
    max_seconds: float | None = None,
    inputs: Sequence[tuple] | None = None,
    labels: tuple[str, str] | None = None,
    calls_per_sample: int | None = None,
    queue_ahead: bool = True,
    confidence: float = 0.95,
    same_within: float = 0.01,
    order: str = "abba",
    seed: int = 0,
    **kwargs,
) -> Comparison:
    """Time a and b on the same arguments, interleaved, and say whether b is faster, slower or the same.

    `speedup` (alias `ratio`) is time of a / time of b, the median over pairs of neighbouring samples, which share the
    machine's clocks; its interval comes from resampling the pairs. It is close to the ratio of the two medians, and
    holds where clocks move. "same" means the whole interval lies within `same_within` of 1.

    Args:
        iterations: pairs of samples; with `target_interval` the fewest pairs.
        order: "abba" (a b b a a b b a ...) cancels a steady drift; "random" draws each pair's order with `seed`.
        labels: names of a and b in the result.
        others: as in `measure`; options and counts hold for both.
    """
    for name, fn in (("a", a), ("b", b)):
        if not callable(fn):
            raise TypeError(f"compare() times two functions: {name} must be callable, got {type(fn).__name__}.")
    if order not in ("abba", "random"):
        raise ValueError(f'order must be "abba" or "random", got {order!r}.')
    if same_within < 0:
        raise ValueError(f"same_within must not be negative, got {same_within!r}; 0.01 means 1%.")
    names = labels or (_label(a, None), _label(b, None))
    if labels is None and names[0] == names[1]:
        names = ("a", "b")
    input_list = _input_list(args, inputs)
    calls = [Call(a, input_list, kwargs, names[0]), Call(b, input_list, kwargs, names[1])]
    device = pick_device(device, input_list, kwargs, a, b)
    options = dict(
        warmup=warmup,
        iterations=iterations,
        l2=l2,
        graph=graph,
        target_interval=target_interval,
        max_seconds=max_seconds,
        calls_per_sample=calls_per_sample,
        device=device,
    )
    _check_options(**options)
    stats.check_confidence(confidence)
    at_roof = _time_at_roof(calls, device, flops, bytes, roofs, dtype)
    draw = random.Random(seed)
    flip = False

    def rounds(count: int) -> list[int]:
        nonlocal flip
        sequence = []
        for _ in range(count):
            first = draw.randrange(2) if order == "random" else int(flip)
            flip = not flip
            sequence += [first, 1 - first]
        return sequence

    def interval(samples: list[list[float]]) -> tuple[float, float]:
        return stats.speedup_interval(samples[0], samples[1], confidence)

    def width(samples: list[list[float]]) -> float:
        return stats.relative_half_width(interval(samples), stats.speedup(*samples))

    samples, methods = _run(calls, rounds, width, queue_ahead=queue_ahead, floor=True, **options)
    sides = [
        _measurement(call, times, method, device, flops, bytes, at_roof, confidence)
        for call, times, method in zip(calls, samples, methods, strict=True)
    ]
    bounds = interval(samples)
    return Comparison(
        speedup=stats.speedup(*samples),
        interval=bounds,
        verdict=stats.verdict(bounds, same_within=same_within, pairs=len(samples[0])),
        a=sides[0],
        b=sides[1],
        same_within=same_within,
        method={"order": order, "seed": seed if order == "random" else None, "pairs": len(samples[0])},
    )


def measure_together(
    fns: Sequence[Callable],
    *,
    labels: Sequence[str],
    warmup: int = 10,
    iterations: int = 100,
    device=None,
    flops: float | None = None,
    bytes: float | None = None,
    l2: str = "warm",
    graph: bool = False,
    max_seconds: float | None = None,
    queue_ahead: bool = True,
    confidence: float = 0.95,
) -> list[Measurement]:
    """Time several functions without arguments, interleaved (a b c c b a ...): a Measurement of each.

    All meet the same clocks, so their times may be divided by each other; `compare` gives two of them an interval.

    Args:
        iterations: samples of each.
        others: as in `measure`; options and counts hold for all.
    """
    if len(fns) != len(labels) or not fns:
        raise ValueError(f"measure_together() needs a label for each function: {len(fns)} and {len(labels)} given.")
    calls = [Call(fn, [()], {}, str(label)) for fn, label in zip(fns, labels, strict=True)]
    device = pick_device(device, *fns)
    options = dict(
        warmup=warmup,
        iterations=iterations,
        l2=l2,
        graph=graph,
        target_interval=None,
        max_seconds=max_seconds,
        calls_per_sample=None,
        device=device,
    )
    _check_options(**options)
    stats.check_confidence(confidence)
    at_roof = _time_at_roof(calls, device, flops, bytes, None, None)
    forward = True

    def rounds(count: int) -> list[int]:
        nonlocal forward
        sequence = []
        for _ in range(count):
            sequence += range(len(calls)) if forward else reversed(range(len(calls)))
            forward = not forward
        return sequence

    samples, methods = _run(calls, rounds, lambda _: 0.0, queue_ahead=queue_ahead, floor=True, **options)
    return [
        _measurement(call, times, method, device, flops, bytes, at_roof, confidence)
        for call, times, method in zip(calls, samples, methods, strict=True)
    ]
