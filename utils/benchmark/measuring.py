"""The one timer: `measure` times a function, `compare` times two functions interleaved, `measure_together` several.

    >>> measure(torch.matmul, a, b, flops=2 * n**3, dtype="bf16", roofs=machine_roofs(), l2="cold")
    >>> compare(naive, fused, x)                       # "fused is 1.83x as fast as naive [1.81, 1.84]: faster"

Every raw sample is kept, and `method` records how the samples were taken. A keyword that is not an option of `measure`
goes to the function. If a keyword of the function has the name of an option (`label`, `bytes`, ...), bind it first
with `functools.partial`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from utils.benchmark import intervals as stats
from utils.benchmark.cpu_timer import Call
from utils.benchmark.result import Comparison, Measurement
from utils.benchmark.sampling import Samples, Timing, Work, time_calls
from utils.config import dtype_name
from utils.machine.device import default_device, usable_device
from utils.machine.environment import float32_matmul_precision
from utils.validation import check_callable


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
        fn: the function to time; its result is dropped.
        *args: its arguments.
        warmup: calls before the timing.
        iterations: number of samples; with `target_interval` the smallest number. On a GPU ten samples and more are spread
            over half a second, and over two seconds where the clocks move, as at the power limit, with the function's own
            work in between, so that the samples meet the levels of the clocks.
        device: "cuda" times by device events, "cpu" by the host's clock. Default: where the call's tensors are.
        flops: FLOPs of one call, for `tflops` and `roof_share`.
        bytes: bytes read and written by one call, for `gb_s` and `roof_share`.
        roofs: a `Roofs`, such as `machine_roofs()`.
        dtype: "fp16", "bf16", "fp32", "tf32" or "fp8": the peak among the roofs. Default: the dtype of the tensors.
        l2: "warm": the cache as the function's own calls leave it. "cold": before every sample, outside of the timed
            region, a buffer of at least twice the cache (GPU: L2, CPU: last-level cache) is written.
        graph: capture the call in a CUDA graph once and time its replays.
        target_interval: continue until the median's interval is within plus or minus this share (0.01: 1%).
        max_seconds: time budget, warm-up included; at least 3 samples are taken unless one call exceeds the budget.
        inputs: list of argument tuples that are used in turn, instead of `args`.
        label: name in the result. Default: the function's name.
        calls_per_sample: calls between two readings of the clock, divided out. Default: as many as the clock needs.
        queue_ahead: on a GPU, queue the calls behind a spin kernel so that the time is device work alone. False times
            the calls as they are issued, launch gaps included.
        floor: also time an empty call, and mark a result that is as short as an empty call.
        confidence: of the interval, which is where the median of another measurement would lie.
        **kwargs: keywords of `fn`. For a keyword that is also an option here, use `functools.partial`.
    """
    check_callable("measure", fn)
    call = Call(fn, _input_list(args, inputs), kwargs, _label(fn, label))
    device = pick_device(device, call.inputs, kwargs, fn)
    timing = Timing(
        device, warmup, iterations, l2, graph, target_interval, max_seconds, calls_per_sample, queue_ahead, confidence
    )

    def width(samples: Samples) -> float:
        times = samples[0]
        return stats.relative_half_width(stats.repeat_interval(times, confidence), float(np.median(times)))

    work = _work([call], device, flops, bytes, roofs, dtype)
    result = time_calls(timing, [call], itertools.repeat((0,)), width, work, floor)[0]
    if result.over_roof and roofs is not None:
        # Nothing beats its roof: perhaps the machine was busy when its roof was measured.
        higher = roofs.measured_again()
        if higher is not roofs:
            work = _work([call], device, flops, bytes, higher, dtype)
            result = dataclasses.replace(result, roof=work.roof, roof_share=(work.roof_ms or 0.0) / result.median_ms)
    return result


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

    `speedup` (also `ratio`) is the time of a divided by the time of b: the median over pairs of neighbouring samples,
    because neighbours share the machine's clocks. The interval comes from resampling the pairs. The speed-up is close
    to the ratio of the two medians, and stays right when the clocks change. The verdict "same" means that the whole
    interval lies within `same_within` of 1.

    The options are those of `measure` and hold for both functions, and so do `flops` and `bytes`. These differ:
    `iterations` counts pairs of samples; `labels` names a and b in the result; `order` is "abba" (a b b a a b b a ...,
    which cancels a steady drift) or "random" (each pair's order is drawn with `seed`).
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
    timing = Timing(
        device, warmup, iterations, l2, graph, target_interval, max_seconds, calls_per_sample, queue_ahead, confidence
    )

    def width(samples: Samples) -> float:
        first, second = samples
        return stats.relative_half_width(stats.speedup_interval(first, second, confidence), stats.speedup(*samples))

    work = _work(calls, device, flops, bytes, roofs, dtype)
    side_a, side_b = time_calls(timing, calls, _pairs(order, seed), width, work)
    interval = stats.speedup_interval(side_a.samples_ms, side_b.samples_ms, confidence)
    pairs = len(side_a.samples_ms)
    return Comparison(
        speedup=stats.speedup(side_a.samples_ms, side_b.samples_ms),
        interval=interval,
        verdict=stats.verdict(interval, same_within=same_within, pairs=pairs),
        a=side_a,
        b=side_b,
        same_within=same_within,
        method={"order": order, "seed": seed if order == "random" else None, "pairs": pairs},
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
    seed: int = 0,
) -> list[Measurement]:
    """Time several functions without arguments, interleaved: a Measurement of each.

    Each round takes one sample of every function, in an order drawn with `seed`: in a fixed order a function would always
    follow the same one, and find its clocks and its cache. The functions run under the same clocks, so their times may
    be divided by each other; `compare` also gives the ratio of two functions an interval. The options are those of
    `measure`, and hold for all functions.
    """
    if len(fns) != len(labels) or not fns:
        raise ValueError(f"measure_together() needs a label for each function: {len(fns)} and {len(labels)} given.")
    calls = [Call(fn, [()], {}, str(label)) for fn, label in zip(fns, labels, strict=True)]
    device = pick_device(device, *fns)
    timing = Timing(device, warmup, iterations, l2, graph, None, max_seconds, None, queue_ahead, confidence)
    return time_calls(
        timing, calls, _rounds(len(calls), seed), lambda _: 0.0, _work(calls, device, flops, bytes, None, None)
    )


def _pairs(order: str, seed: int) -> Iterator[tuple[int, int]]:
    """Yield without end the order of two functions in a pair: the index of the first and of the second."""
    draw = random.Random(seed)
    for pair in itertools.count():
        first = draw.randrange(2) if order == "random" else pair % 2
        yield first, 1 - first


def _rounds(count: int, seed: int) -> Iterator[Sequence[int]]:
    """Yield without end the order of so many functions in a round."""
    draw = random.Random(seed)
    while True:
        yield draw.sample(range(count), count)


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


def _work(calls: list[Call], device: torch.device, flops, bytes, roofs, dtype) -> Work:
    """Return the work of one call and its time at the roofs, as far as counts and roofs are given."""
    for name, value in (("flops", flops), ("bytes", bytes)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} is the count of one call and must be above 0, got {value!r}; None leaves it out.")
    if dtype is None:
        tensors = (tensor for call in calls for tensor in tensors_of([call.inputs, call.kwargs, call.fn]))
        dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
        if dtype == torch.float32 and device.type == "cuda" and float32_matmul_precision() != "highest":
            dtype = "tf32"  # the format in which fp32 matrix products then run
    if dtype is not None:
        try:
            dtype = dtype_name(dtype)
        except ValueError:  # no roof has a peak for this dtype, such as float64
            dtype = str(dtype).removeprefix("torch.")
    if roofs is None or (flops is None and bytes is None):
        return Work(flops, bytes, dtype)
    roof_ms = 0.0
    if flops is not None:
        peak = roofs.tflops.get(dtype)
        if not peak:
            known = ", ".join(sorted(name for name, value in roofs.tflops.items() if value))
            raise ValueError(f"the roofs of {roofs.name} have no {dtype!r} peak; pass dtype= one of {known}.")
        roof_ms = flops / (peak * 1e9)
    if bytes is not None:
        roof_ms = max(roof_ms, bytes / (roofs.memory_bandwidth_tb_s * 1e9))
    roof = {
        "name": roofs.name,
        "origin": roofs.origin,
        "dtype": dtype,
        "tflops": roofs.tflops.get(dtype),
        "memory_bandwidth_tb_s": roofs.memory_bandwidth_tb_s,
    }
    return Work(flops, bytes, dtype, roof, roof_ms)


def tensors_of(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors of a call: in arguments, containers and modules, in a function's closure and its globals."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif depth < 4:
        if isinstance(value, functools.partial):
            value = [value.func, value.args, value.keywords]
        elif callable(value) and not isinstance(value, type):
            value = _captured_values(value)
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (list, tuple)):
            for item in value[:256]:
                yield from tensors_of(item, depth + 1)


def _captured_values(fn: Callable) -> list:
    """Return the values a function uses without taking them as arguments: its object, attributes, closure, globals."""
    values = [getattr(fn, "__self__", None), getattr(fn, "__dict__", None)]
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # a variable that is not yet bound
            continue
    names = getattr(getattr(fn, "__code__", None), "co_names", ())
    variables = getattr(fn, "__globals__", {})
    return values + [variables[name] for name in names if name in variables]


def pick_device(device: torch.device | str | None, *values) -> torch.device:
    """Return the device asked for; else the device of the call's tensors, GPU before CPU; else the default device."""
    if device is not None:
        chosen = usable_device(device)
    else:
        devices = {tensor.device for value in values for tensor in tensors_of(value)}
        gpus = [candidate for candidate in devices if candidate.type == "cuda"]
        chosen = (gpus or list(devices) or [default_device()])[0]
    if chosen.type not in ("cuda", "cpu"):
        raise ValueError(f'CUDA GPUs and CPUs are measured, not {str(chosen)!r}; pass device="cpu" or "cuda".')
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen
