"""The notebooks ask three questions about a function: its time, its memory and its number of kernels.

`benchmark_latency` calls `measure` once. `measure` itself also returns samples and intervals.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections import Counter
from collections.abc import Callable

import torch
from torch.autograd import DeviceType

from utils.benchmark.kernel_names import (
    DOCUMENTED_KEY,
    FREE_OPERATORS,
    MEMORY,
    WRAPPER_OPERATORS,
    bare_operator,
    classify,
)
from utils.benchmark.measuring import measure, pick_device
from utils.benchmark.profiling import GPU_WORK, sole_profiler
from utils.validation import check_callable, whole_number

KERNEL_KEYS = ("gemm", "elementwise", "softmax", "layernorm", "memory", "other")

# For torch.profiler.profile(schedule=...).
default_schedule = torch.profiler.schedule(wait=1, warmup=3, active=6)
default_schedule.__doc__ = "Profiler schedule: wait 1 step, warm up 3, record 6; call prof.step() after each step."


def _check_arguments(caller: str, fn: Callable, n_warmup: int, n_repeat: int, *arguments: object) -> None:
    whole_number("n_warmup", n_warmup, 0)
    whole_number("n_repeat", n_repeat)
    check_callable(caller, fn, *arguments)


def benchmark_latency(fn: Callable, *args, n_warmup: int = 10, n_repeat: int = 100, **kwargs) -> float:
    """Mean latency of `fn(*args, **kwargs)` in milliseconds, over n_repeat calls after n_warmup warm-up calls.

    The calls follow each other with no synchronization in between, and the whole run is timed: by device events on a
    GPU, by the host's clock on a CPU. On a GPU this is the time that a caller waits, so for kernels shorter than their
    launch it is the time of the launch. `measure` can time the kernel alone, and with a cold cache.

    Args:
        fn: called exactly n_warmup + n_repeat times.
        *args: its arguments.
        n_warmup: warm-up calls, not timed.
        n_repeat: timed calls.
        **kwargs: its keyword arguments.
    """
    _check_arguments("benchmark_latency", fn, n_warmup, n_repeat, *args, *kwargs.values())
    call = functools.partial(fn, *args, **kwargs)
    return measure(call, warmup=n_warmup, iterations=1, calls_per_sample=n_repeat, queue_ahead=False).mean_ms


def benchmark_memory(fn: Callable, *args, n_warmup: int = 10, n_repeat: int = 100, **kwargs) -> tuple[float, float]:
    """Tensor memory of `fn(*args, **kwargs)`: (peak_memory_gb, allocated_memory_gb) in GB (1e9 bytes).

    `peak_memory_gb` is absolute: all tensor memory at the worst moment of the n_repeat calls, including the inputs and
    all other live tensors. `allocated_memory_gb` is the memory that the call adds at that moment to the memory in use
    before the calls, including its result. Use this number to compare two functions.

    On a GPU both numbers come from torch's allocator. On a CPU the addition comes from torch's allocation events, and
    the peak is the addition plus the storages of the tensors alive before the call. Both leave out memory of
    other threads, and memory that libraries such as oneDNN take without torch's allocator.

    Args:
        fn: called exactly n_warmup + n_repeat times; its results are dropped.
        *args: its arguments.
        n_warmup: warm-up calls, not measured.
        n_repeat: measured calls.
        **kwargs: its keyword arguments.
    """
    _check_arguments("benchmark_memory", fn, n_warmup, n_repeat, *args, *kwargs.values())
    device, call = pick_device(None, args, kwargs, fn), functools.partial(fn, *args, **kwargs)
    for _ in range(n_warmup):
        call()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(n_repeat):
            call()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        return peak / 1e9, (peak - before) / 1e9
    before = live_cpu_tensor_bytes()
    added = _cpu_peak_bytes(call, n_repeat)
    return (before + added) / 1e9, added / 1e9


def live_cpu_tensor_bytes() -> int:
    """Return the bytes of the CPU storages of all live Python tensors, each storage counted once."""
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):  # isinstance would run the properties of lazy modules
            continue
        for tensor in (thing, thing.grad if thing.is_leaf else None):
            if tensor is None or tensor.device.type != "cpu" or tensor.layout != torch.strided:
                continue
            try:
                storage = tensor.untyped_storage()
                if storage.device.type == "cpu":  # the storage of torch.compile's fake tensors is on "meta"
                    storages[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):
                continue  # functional tensors have no storage
    return sum(storages.values())


@sole_profiler()  # the profiler records the allocations
def _cpu_peak_bytes(call: Callable[[], None], runs: int) -> int:
    """Return by how many bytes the memory of torch's CPU allocator grows during calls, at most."""
    with torch.autograd.profiler.profile(profile_memory=True) as recorded:
        for _ in range(runs):
            call()
    events = (event for event in recorded.kineto_results.events() if event.name() == "[memory]")
    on_cpu = sorted((e for e in events if e.device_type() == DeviceType.CPU), key=lambda e: e.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in on_cpu), initial=0))


def count_cuda_kernels(prof) -> dict[str, int]:
    """CUDA kernels per profiled step by category: gemm, elementwise, softmax, layernorm, memory, other, total.

    `prof` is a finished torch.profiler.profile. With a schedule, the counts are for one active step. Annotations
    (`ProfilerStep#3`, `record_function`, NVTX ranges) are not kernels. Copies and fills count as "memory", whether a
    kernel or the copy engine does them. Fused attention kernels and reductions count as "other".

    If the trace has no GPU work, CPU leaf operators are counted instead: operators that contain no other working
    operator. Views, metadata and bare allocations do no work and are left out. Code that torch.compile generates for a
    CPU is left out too, because it is a C++ function and no operator.
    """
    try:
        events = list(prof.events())
    except (AttributeError, AssertionError, RuntimeError, TypeError) as error:
        raise ValueError(
            "count_cuda_kernels() needs a torch.profiler.profile whose `with` block (or stop()) has ended "
            f"and whose schedule reached its active steps; got {type(prof).__name__}."
        ) from error
    steps = [event for event in events if _is_step(event) and event.device_type == DeviceType.CPU]
    if getattr(prof, "record_steps", False) and (not steps or all(map(_is_step, events))):
        raise ValueError(
            "count_cuda_kernels() was given a profile whose schedule kept no step: record CPU activity too, and call "
            "prof.step() once for each step, ten times with default_schedule (eleven begin anew and drop them)."
        )
    # If the calls end before the schedule does, the last prof.step() has opened a step without work.
    count = len([step for step in steps if step.cpu_children] or steps) or 1
    roots = [event for event in events if event.device_type == DeviceType.CPU and event.cpu_parent is None]
    names = _cuda_kernel_names(events) or [name for event in roots for name in _working_operators(event)]
    totals = Counter(DOCUMENTED_KEY[classify(name)] for name in names)
    counts = {key: round(totals[key] / count) for key in KERNEL_KEYS}
    return counts | {"total": sum(counts.values())}


def _is_step(event) -> bool:
    return event.name.startswith("ProfilerStep")


def _cuda_kernel_names(events: list) -> list[str]:
    """Return the names of kernels, copies and fills, without the annotations that are mirrored on the GPU's lanes."""
    annotations = {event.name for event in events if event.device_type == DeviceType.CPU and event.is_user_annotation}

    def works(event) -> bool:
        if event.device_type != DeviceType.CUDA or _is_step(event) or event.is_user_annotation:
            return False
        activity = getattr(event, "activity_type", None)  # torch 2.11 has no activity types
        return event.name not in annotations if activity is None else activity in GPU_WORK

    return [event.name for event in events if works(event)]


def _working_operators(event) -> list[str]:
    """Return the working operators: this event itself, or the operators inside it if it is only a wrapper."""
    name = event.name
    if name.startswith("aten::") and bare_operator(name) in FREE_OPERATORS:
        return []
    working = [(child.name, _working_operators(child)) for child in event.cpu_children]
    inside = [inner for _, names in working for inner in names]
    # Annotations, modules and nodes of autograd are no operators.
    if "::" not in name or name.startswith(("autograd::", "torch::", "profiler::")):
        return inside
    if name in WRAPPER_OPERATORS or any(classify(inner) != MEMORY for inner in inside):
        return inside
    if classify(name) == MEMORY:
        return inside or [name]
    # This operator does work. Inside `x + 1`, an `aten::to` only wraps the number 1, and a fill prepares the result:
    # both are part of the operator. A copy counts as a separate operator.
    parts = ("aten::to", "aten::fill_", "aten::zero_")
    return [inner for child, names in working if child not in parts for inner in names] + [name]
