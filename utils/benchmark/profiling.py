"""Profiles of a function: recordings, Chrome traces, tables made from them, and what one call launched.

prof = profile(fn, x)                        # a finished torch.profiler.profile
export_chrome_trace(prof, "traces/fn.json")  # open it at https://ui.perfetto.dev
summarize_trace(prof, top=10)                # where the time went
gpu_idle_share(prof)                         # how long the GPU had nothing to do
launched(lambda: fn(x)).kernels              # which kernels one call ran
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from utils.benchmark.kernel_names import classify
from utils.files import write_whole
from utils.validation import check_callable, whole_number

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_PROFILING = threading.Lock()
COMPLETE = "X"  # a Chrome event with a duration; the other kinds name lanes, draw arrows or mark moments


@dataclass(frozen=True)
class TraceEvent:
    """One bar of a timeline: an operator, a kernel, a launch, an annotation."""

    name: str
    category: str  # "cpu_op", "kernel", "gpu_memcpy", "cuda_runtime", "user_annotation", ...
    start_us: float  # time since the first event of the trace
    duration_us: float
    lane: str  # "GPU 0 stream 7" or "thread 4242"

    @property
    def end_us(self) -> float:
        """End of the event, in us since the first event of the trace."""
        return self.start_us + self.duration_us

    @property
    def on_gpu(self) -> bool:
        """Whether the GPU did this: a kernel, a copy or a fill."""
        return self.category in GPU_WORK

    @property
    def family(self) -> str:
        """What the event does, by its name: one of `kernel_names.FAMILIES`, such as "gemm"."""
        return classify(self.name)


@contextmanager
def sole_profiler() -> Iterator[None]:
    """Raise RuntimeError if a profiler is running. A second profiler would ruin the first recording or end the process."""
    if torch._C._autograd._profiler_enabled() or not _PROFILING.acquire(blocking=False):
        raise RuntimeError("a profiler is already running, and torch runs only one at a time; end it first.")
    try:
        yield
    finally:
        _PROFILING.release()


@sole_profiler()
def profile(
    fn: Callable, *args, steps: int = 6, warmup: int = 3, trace_path: str | os.PathLike | None = None, **kwargs
) -> torch.profiler.profile:
    """Profile `steps` calls of `fn(*args, **kwargs)`, each in one profiler step; return the finished profile.

    `count_cuda_kernels`, `summarize_trace`, `export_chrome_trace` and torch's own tables take the result.

    Args:
        fn: the function.
        *args: its arguments.
        steps: recorded calls.
        warmup: calls before them, so that compilation and first-use costs stay out of the profile.
        trace_path: also write a Chrome trace to this path (.json).
        **kwargs: keywords of `fn`. For a keyword with the name of an option here, use functools.partial.
    """
    check_callable("profile", fn)
    whole_number("steps", steps)
    whole_number("warmup", warmup, 0)
    on_gpu = torch.cuda.is_available()
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if on_gpu else [kinds.CPU]
    for _ in range(warmup):
        fn(*args, **kwargs)
    # One warm-up step inside the profiler as well: its first step costs more than the others.
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=schedule) as prof:
        for _ in range(1 + steps):
            fn(*args, **kwargs)
            if on_gpu:
                torch.cuda.synchronize()  # a step's kernels end within the step
            prof.step()
    if trace_path is not None:
        export_chrome_trace(prof, trace_path)
    return prof


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """Name a block of code in every profile: in torch's traces, and with a GPU as an NVTX range for Nsight."""
    nvtx = torch.cuda.nvtx.range("{}", name) if torch.cuda.is_available() else nullcontext()
    with torch.profiler.record_function(str(name)), nvtx:
        yield


def export_chrome_trace(prof: torch.profiler.profile, path: str | os.PathLike) -> Path:
    """Write a finished profile as a Chrome trace (.json) and return its path.

    Missing folders are created. An older file of that name is replaced in one step, so that a reader sees the old trace
    or the new one, never a part. The same profile can be written any number of times. The machine's name is left out.
    """
    path = Path(path)
    if path.suffix == ".gz":
        raise ValueError(f"{path} ends in .gz, and a trace is written as plain JSON; leave out .gz.")
    write_whole(path, _trace_text(prof))
    return path


def _trace_text(prof) -> bytes:
    if (trace := getattr(prof, "labs_trace", None)) is not None:  # Kineto writes a trace only once
        return zlib.decompress(trace)
    if not hasattr(prof, "export_chrome_trace"):
        raise TypeError(f"expected a torch.profiler.profile, got {type(prof).__name__}.")
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        try:
            prof.export_chrome_trace(str(raw))
        except AssertionError as error:
            raise ValueError(
                "this profile holds nothing yet: end its `with` block first, and give a profile with a "
                "schedule enough steps to reach its active ones."
            ) from error
        text = raw.read_bytes()
    text = re.sub(rb'"host_name":\s*"[^"]*",?', b"", text, count=1)
    text = re.sub(rb'"traceName":\s*"[^"]*"\s*}\s*$', b'"traceName": "trace.json" }', text)
    prof.labs_trace = zlib.compress(text, 1)
    return text


def _load(trace) -> dict:
    if not isinstance(trace, (str, os.PathLike)):
        return json.loads(_trace_text(trace))
    try:
        record = json.loads(Path(trace).read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{trace} is not valid JSON ({error}): it was cut off or is not a Chrome trace; write the trace again."
        ) from error
    if not isinstance(record, dict) or not isinstance(record.get("traceEvents"), list):
        raise ValueError(f'{trace} is JSON but not a Chrome trace: it has no list "traceEvents".')
    return record


def read_trace(trace) -> list[TraceEvent]:
    """Read the events of a Chrome trace file or of a finished profile, in order of their start."""
    if isinstance(trace, (list, tuple)) and all(isinstance(event, TraceEvent) for event in trace):
        return list(trace)
    events = []
    for raw in _load(trace)["traceEvents"]:
        if not isinstance(raw, dict) or raw.get("ph") != COMPLETE or raw.get("cat") in (None, "Trace"):
            continue
        args, thread, category = raw.get("args") or {}, raw.get("tid"), str(raw["cat"]).lower()
        lane = f"thread {thread}"
        if category in GPU_WORK or category == "gpu_user_annotation":
            lane = f"GPU {args.get('device', raw.get('pid'))} stream {args.get('stream', thread)}"
        events.append(
            TraceEvent(str(raw.get("name", "")), category, float(raw["ts"]), float(raw.get("dur", 0.0)), lane)
        )
    origin = min((event.start_us for event in events), default=0.0)
    events = [replace(event, start_us=event.start_us - origin) for event in events]
    return sorted(events, key=lambda event: (event.start_us, -event.duration_us))


@dataclass(frozen=True)
class Launched:
    """The operators and kernels of one call. Without a GPU there are no kernels."""

    operators: tuple[str, ...]  # each name once, in the order of the first start
    kernels: tuple[str, ...]  # kernels, copies and fills: each name once, in the same order
    launches: int = 0  # number of kernels, copies and fills, repeats included


def launched(call: Callable[[], object]) -> Launched:
    """Profile one call after two warm-up calls; return its operators and kernels."""
    events = read_trace(profile(call, steps=1, warmup=1))
    # torch.compile's C++ function for a CPU is not an operator of torch, but its name proves that it ran.
    operators = [event.name for event in events if event.category == "cpu_op" or "CompiledFxGraph" in event.name]
    kernels = [event.name for event in events if event.on_gpu]
    return Launched(tuple(dict.fromkeys(operators)), tuple(dict.fromkeys(kernels)), len(kernels))


def _self_times(events: Sequence[TraceEvent]) -> list[float]:
    """Return each event's time minus the time of the events directly inside it. `events` are sorted by start."""
    own = [event.duration_us for event in events]
    open_on: dict[str, list[int]] = {}
    for index, event in enumerate(events):
        stack = open_on.setdefault(event.lane, [])
        while stack and events[stack[-1]].end_us <= event.start_us:
            stack.pop()
        if stack:
            own[stack[-1]] -= min(event.duration_us, max(0.0, events[stack[-1]].end_us - event.start_us))
        stack.append(index)
    return [max(0.0, value) for value in own]


def summarize_trace(trace, *, top: int | None = None, dataframe: bool = False):
    """Show where the time went: one row for each kernel, or for each operator of a trace without GPU work.

    The largest self time comes first. A row is {"name", "family", "count", "total_us", "self_us", "mean_us", "share"}. An
    operator's `self_us` leaves out the operators inside it; a kernel's `self_us` is its total. The shares add up to 1.

    Args:
        trace: a finished profile, a trace file, or the list from `read_trace`.
        top: number of rows to return; None returns all.
        dataframe: return a pandas.DataFrame instead of a list of dicts.
    """
    events = read_trace(trace)
    if top is not None:
        whole_number("top", top)
    kernels = [event for event in events if event.on_gpu]
    chosen = kernels or [event for event in events if event.category == "cpu_op"]
    if not chosen:
        categories = sorted({event.category for event in events})
        raise ValueError(
            f"the trace holds neither kernels nor operators; it has events of the categories {categories}."
        )
    rows: dict[str, dict[str, Any]] = {}
    # Kernels on two streams may overlap, but no kernel is inside another kernel: each row keeps its whole time.
    self_times = [event.duration_us for event in chosen] if kernels else _self_times(chosen)
    for event, self_us in zip(chosen, self_times, strict=True):
        new_row = {"name": event.name, "family": event.family, "count": 0, "total_us": 0.0, "self_us": 0.0}
        row = rows.setdefault(event.name, new_row)
        row["count"] += 1
        row["total_us"] += event.duration_us
        row["self_us"] += self_us
    all_us = sum(row["self_us"] for row in rows.values())
    for row in rows.values():
        row["mean_us"] = row["total_us"] / row["count"]
        row["share"] = row["self_us"] / all_us if all_us else 0.0
    table = sorted(rows.values(), key=lambda row: -row["self_us"])[:top]
    if dataframe:
        import pandas as pd

        return pd.DataFrame(table)
    return table


def busy_us(events: Sequence[TraceEvent]) -> float:
    """Return how long at least one event ran. Events may overlap; they are sorted by start."""
    busy, end = 0.0, float("-inf")
    for event in events:
        busy += max(0.0, event.end_us - max(end, event.start_us))
        end = max(end, event.end_us)
    return busy


def gpu_idle_share(trace) -> float:
    """Return the share of idle GPU time between the start of the first kernel and the end of the last kernel."""
    work = [event for event in read_trace(trace) if event.on_gpu]
    if not work:
        raise ValueError("the trace holds no GPU kernels, so there are no gaps between them: profile on a GPU.")
    span = max(event.end_us for event in work) - work[0].start_us
    return 1.0 - busy_us(work) / span if span else 0.0
