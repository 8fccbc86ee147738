"""The one timer: `measure` times a function, `compare` times two functions interleaved, `measure_together` several.

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

# What a GPU's events cannot tell apart in a pair of samples, whatever their number: all ratios of a matmul of 6 us to itself lay
# within 0.41% of 1 on two H200, and with half of this on both sides 73% of 200 intervals held 1 on the one, all of 77 on the other.
PAIR_APART = 0.002


def measure(fn: Callable, *args, label: str | None = None, **options) -> Measurement:
    """Time `fn(*args, **kwargs)`: a Measurement with every sample, its statistics and how it was taken.

    Args:
        fn: the function to time; its result is dropped.
        *args: its arguments.
        label: name in the result. Default: the function's name.
        **options: the fields of `Timing`, which says what they mean: `warmup`, `iterations`, `device`, `flops`, `bytes`,
            `roofs`, `dtype`, `l2`, `graph`, `max_seconds`, `calls_per_sample`, `queue_ahead`, `discard`. Other keywords go to
            `fn`; for a keyword of `fn` that is also an option here, use `functools.partial`.
    """
    check_callable("measure", fn, *args, *options.values())
    timing, kwargs = _timing(options, args, fn)
    call = Call(fn, args, kwargs, _label(fn) if label is None else str(label))
    return _timed(timing, [call], itertools.repeat((0,)))[0]


def compare(
    a: Callable, b: Callable, *args, labels: tuple[str, str] | None = None, same_within: float = 0.01, **options
) -> Comparison:
    """Time a and b on the same arguments, interleaved, and say whether b is faster, slower or the same.

    `speedup` is the time of a divided by the time of b: the median over pairs of neighbouring samples,
    because neighbours share the machine's clocks. The interval comes from the order of their ratios. The speed-up is close
    to the ratio of the two medians, and stays right when the clocks change. The verdict "same" means that the whole
    interval lies within `same_within` of 1.

    The options are those of `measure` and hold for both functions, and so do `flops` and `bytes`. These differ:
    `iterations` counts pairs of samples, in the order a b b a a b b a, which cancels a steady drift; `labels` names a
    and b in the result.
    """
    for fn in (a, b):
        check_callable("compare", fn, *args, *options.values())
    names = labels or ((_label(a), _label(b)) if _label(a) != _label(b) else ("a", "b"))
    if not isinstance(names, (tuple, list)) or len(names) != 2:
        raise ValueError(f"labels must be two names, of a and of b, got {labels!r}; None takes the functions' names.")
    timing, kwargs = _timing(options, args, a, b)

    calls = [Call(fn, args, kwargs, name) for fn, name in zip((a, b), names, strict=True)]
    side_a, side_b = _timed(timing, calls, itertools.cycle(((0, 1), (1, 0))))
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
    """Time several functions without arguments, interleaved: a Measurement of each.

    Each round takes one sample of every function, in a random order: in a fixed one a function would always follow the same
    one, and find its clocks and its cache. The functions run under the same clocks, so their times may
    be divided by each other; `compare` also gives the ratio of two functions an interval. The options are those of
    `measure`, and hold for all functions; other keywords go to every function.
    """
    if len(fns) != len(labels) or not fns:
        raise ValueError(f"measure_together() needs a label for each function: {len(fns)} and {len(labels)} given.")
    timing, kwargs = _timing(options, (), *fns)
    calls = [Call(fn, (), kwargs, str(label)) for fn, label in zip(fns, labels, strict=True)]
    draw, order = random.Random(0), range(len(calls))
    return _timed(timing, calls, (draw.sample(order, len(order)) for _ in itertools.count()))


def _timing(keywords: dict, args: tuple, *fns: Callable) -> tuple[Timing, dict]:
    """Return the options among the keywords, with the device settled, and the other keywords."""
    fields = Timing.__dataclass_fields__
    options = {name: value for name, value in keywords.items() if name in fields}
    kwargs = {name: value for name, value in keywords.items() if name not in fields}
    device = pick_device(options.pop("device", None), args, kwargs, *fns)
    return Timing(device, **options), kwargs


def _timed(timing: Timing, calls: list[Call], turns: Iterator[Sequence[int]]) -> list[Measurement]:
    """Time the calls. Nothing beats its roof: if a result does, a measured roof is measured again, and the best counts."""
    work = _work(timing, calls)  # before the timing, because it refuses a dtype without a roof
    results = [replace(result, **work) for result in time_calls(timing, calls, turns)]
    if any(result.over_roof for result in results):
        work["roof"] = timing.roofs.measured_again().record(work["dtype"])
        results = [replace(result, **work) for result in results]
    return results


def _label(fn: Callable) -> str:
    inner = fn.func if isinstance(fn, functools.partial) else fn
    return getattr(inner, "__name__", None) or type(inner).__name__


def _work(timing: Timing, calls: list[Call]) -> dict[str, Any]:
    """Return a measurement's fields of its work: FLOPs and bytes of one call, the name of the peak, and the roofs, if given."""
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
    """Yield the tensors of a call: in arguments, containers and modules, in a function's closure and its globals."""
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
    """Return the device asked for; else the device of the call's tensors, GPU before CPU; else the default device."""
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
