"""Time functions: `measure` times one function, `compare` times two in turns, `measure_together` times several in turns.

    >>> measure(torch.matmul, a, b, flops=2 * n**3, dtype="bf16", roofs=machine_roofs(), l2="cold")
    >>> compare(naive, fused, x)                       # "fused is 1.83x as fast as naive [1.81, 1.84]: faster"

Every raw sample is kept unless `discard` leaves it out, and `method` records how the samples were taken. A keyword that
is not an option of `measure` goes to the function. If a keyword of the function has the name of an option (`label`,
`bytes`, ...), bind it first with `functools.partial`.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from utils.benchmark import intervals as stats
from utils.benchmark.cpu_timer import Call
from utils.benchmark.result import Comparison, Measurement
from utils.benchmark.sampling import Timing, time_calls
from utils.config import dtype_name
from utils.machine.device import default_device, usable_device
from utils.machine.environment import float32_matmul_precision
from utils.reads import outside_values
from utils.validation import check_callable

# A GPU's events have an error that more pairs do not reduce. On two H200, all ratios of a matmul of 6 us to itself lay
# within 0.41% of 1. With this margin on both sides, 73% of 200 intervals contained 1 on the first GPU, and all 77 on the second.
PAIR_APART = 0.002


def measure(fn: Callable, *args, label: str | None = None, **options) -> Measurement:
    """Time `fn(*args, **kwargs)`; return a Measurement with all samples, statistics, and the method.

    Args:
        fn: the function to time; its result is dropped.
        *args: its arguments.
        label: name in the result. Default: the function's name.
        **options: the fields of `Timing`, whose docstring explains them: `warmup`, `iterations`, `device`, `flops`, `bytes`,
            `roofs`, `dtype`, `l2`, `graph`, `max_seconds`, `calls_per_sample`, `queue_ahead`, `discard`. Other keywords go to
            `fn`; for a keyword of `fn` that is also an option here, use `functools.partial`.
    """
    check_callable("measure", fn, *args, *options.values())
    timing, kwargs = _split_options(options, args, fn)
    call = Call(fn, args, kwargs, _label(fn) if label is None else str(label))
    return _measure_calls(timing, [call], itertools.repeat((0,)))[0]


def compare(
    a: Callable, b: Callable, *args, labels: tuple[str, str] | None = None, same_within: float = 0.01, **options
) -> Comparison:
    """Time a and b on the same arguments, interleaved, and say whether b is faster, slower or the same.

    `speedup` is the time of a divided by the time of b. It is the median over pairs of neighbouring samples, because
    neighbours share the machine's clocks: so it stays right when the clocks change. `intervals.speedup_interval` explains
    the interval. The verdict "same" means that the whole interval lies within `same_within` of 1.

    The options of `measure` hold for both functions, also `flops` and `bytes`. Two options differ: `iterations` counts
    pairs of samples, and `labels` names a and b in the result. The order a b b a a b b a cancels a steady drift.
    """
    for fn in (a, b):
        check_callable("compare", fn, *args, *options.values())
    names = labels or ((_label(a), _label(b)) if _label(a) != _label(b) else ("a", "b"))
    if not isinstance(names, (tuple, list)) or len(names) != 2:
        raise ValueError(f"labels must be two names, of a and of b, got {labels!r}; None takes the functions' names.")
    timing, kwargs = _split_options(options, args, a, b)

    calls = [Call(fn, args, kwargs, name) for fn, name in zip((a, b), names, strict=True)]
    side_a, side_b = _measure_calls(timing, calls, itertools.cycle(((0, 1), (1, 0))))
    low, high = stats.speedup_interval(side_a.samples_ms, side_b.samples_ms)
    apart = 1.0 + (PAIR_APART if timing.on_gpu else 0.0)
    interval = low / apart, high * apart
    return Comparison(
        speedup=stats.speedup(side_a.samples_ms, side_b.samples_ms),
        interval=interval,
        verdict=stats.verdict(interval, same_within=same_within, pairs=len(side_a.samples_ms)),
        a=side_a,
        b=side_b,
        same_within=same_within,
    )


def measure_together(fns: Sequence[Callable], *, labels: Sequence[str], **options) -> list[Measurement]:
    """Time several functions without arguments in turns; return a Measurement of each function.

    Each round takes one sample of every function, in a random order. In a fixed order, a function would always find the
    cache and clocks of the same predecessor. All functions run under the same clocks, so their times may be divided by
    each other; `compare` also gives an interval of the ratio. The options of `measure` hold for all functions, and all
    other keywords go to every function.
    """
    if len(fns) != len(labels) or not fns:
        raise ValueError(f"measure_together() needs a label for each function: {len(fns)} and {len(labels)} given.")
    timing, kwargs = _split_options(options, (), *fns)
    calls = [Call(fn, (), kwargs, str(label)) for fn, label in zip(fns, labels, strict=True)]
    draw, order = random.Random(0), range(len(calls))
    return _measure_calls(timing, calls, (draw.sample(order, len(order)) for _ in itertools.count()))


def _split_options(keywords: dict, args: tuple, *fns: Callable) -> tuple[Timing, dict]:
    """Split keywords into the options, with the device filled in, and the keywords of the functions."""
    fields = Timing.__dataclass_fields__
    options = {name: value for name, value in keywords.items() if name in fields}
    kwargs = {name: value for name, value in keywords.items() if name not in fields}
    device = pick_device(options.pop("device", None), args, kwargs, *fns)
    return Timing(device, **options), kwargs


def _measure_calls(timing: Timing, calls: list[Call], turns: Iterator[Sequence[int]]) -> list[Measurement]:
    """Time the calls. If a result exceeds a measured roof, the roof was too low: measure it again and keep the best."""
    work = _work(timing, calls)  # before the timing, because a dtype without a roof is an error
    results = [replace(result, **work) for result in time_calls(timing, calls, turns)]
    if any(result.over_roof for result in results):
        work["roof"] = timing.roofs.remeasure().record(work["dtype"])
        results = [replace(result, **work) for result in results]
    return results


def _label(fn: Callable) -> str:
    inner = fn.func if isinstance(fn, functools.partial) else fn
    return getattr(inner, "__name__", None) or type(inner).__name__


def _work(timing: Timing, calls: list[Call]) -> dict[str, Any]:
    """Return these fields of a Measurement: FLOPs and bytes of one call, the dtype of the peak, and the roofs if given."""
    dtype = timing.dtype
    if dtype is None:
        tensors = (tensor for call in calls for tensor in tensors_of([call.args, call.kwargs, call.fn]))
        dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
        if dtype == torch.float32 and timing.on_gpu and float32_matmul_precision() != "highest":
            dtype = "tf32"  # the format in which fp32 matrix products then run
    if dtype is not None:
        try:
            dtype = dtype_name(dtype)
        except ValueError:  # no roof has a peak for this dtype, such as float64
            dtype = str(dtype).removeprefix("torch.")
    roof = None
    if timing.roofs is not None and (timing.flops or timing.bytes):
        if timing.flops:
            timing.roofs.peak_tflops(dtype)  # raises without a peak
        roof = timing.roofs.record(dtype)
    return {"flops": timing.flops, "bytes": timing.bytes, "dtype": dtype, "roof": roof}


def tensors_of(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments, containers and modules, and in the closure and the globals of a function."""
    inner: Iterable = ()
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from itertools.chain(value.parameters(), value.buffers())
    elif isinstance(value, functools.partial):
        inner = (value.func, value.args, value.keywords)
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, (list, tuple)):
        inner = value[:256]
    elif callable(value) and not isinstance(value, type):
        inner = [getattr(value, "__self__", None), getattr(value, "__dict__", None), *outside_values(value)]
    for item in inner if depth < 4 else ():
        yield from tensors_of(item, depth + 1)


def pick_device(device: torch.device | str | None, *values) -> torch.device:
    """Return `device`. If it is None, return the device of the call's tensors, GPU before CPU, or the default device."""
    if device is not None:
        chosen = usable_device(device)
    else:
        devices = {tensor.device for value in values for tensor in tensors_of(value)}
        chosen = max(devices, key=lambda device: device.type == "cuda", default=default_device())
    if chosen.type not in ("cuda", "cpu"):
        raise ValueError(f'CUDA GPUs and CPUs are measured, not {str(chosen)!r}; pass device="cpu" or "cuda".')
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen
