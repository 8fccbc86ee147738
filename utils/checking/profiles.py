"""Whether a profile's steps wait for the device: on a CPU nothing has to be waited for, so a wait leaves a mark in the trace."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from utils.checking.authors import is_students
from utils.checking.travel import by_value

_MARK = "aten::lgamma"


@by_value
def wait_with_mark() -> None:
    """Wait for the device, and leave the mark that `steps_that_wait` looks for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    torch.lgamma(torch.ones(2))


@contextlib.contextmanager
def marked_waits(function: Callable, wait: Callable[[], None] = wait_with_mark) -> Iterator[None]:
    """Let the `synchronize` of a function's notebook leave a mark, for the length of a `with` block.

    Args:
        function: the answer.
        wait: what `synchronize` does meanwhile; by default it leaves an operator in a profile.
    """
    names = getattr(function, "__globals__", {})
    if "synchronize" not in names:
        yield
        return
    before = {"synchronize": names["synchronize"]}
    names.update({"synchronize": wait})
    try:
        yield
    finally:
        names.update(before)


def steps_that_wait(events: list[dict], operator: str) -> int | None:
    """Count the recorded steps of a trace in which a wait follows the last `operator` of the step.

    Args:
        events: the trace's events.
        operator: what the profiled function runs.

    Returns:
        The number of steps; None if there is no mark, because nobody waited, or by another function.
    """
    timed = [e for e in events if "ts" in e and "dur" in e]
    if not any(e.get("name") == _MARK for e in timed):
        return None
    found = 0
    for ran, waited in _steps(timed, operator):
        found += bool(ran and waited and max(waited) > max(ran))
    return found


def _steps(timed: list[dict], operator: str) -> Iterator[tuple[list[float], list[float]]]:
    """Of each recorded step, in their order: when the operator ran, and when the marks were left."""
    steps = [e for e in timed if str(e.get("name", "")).startswith("ProfilerStep#")]
    for step in sorted(steps, key=lambda e: e["ts"]):
        inside = [e for e in timed if step["ts"] <= e["ts"] <= step["ts"] + step["dur"]]
        yield (
            [e["ts"] for e in inside if e.get("name") == operator],
            [e["ts"] for e in inside if e.get("name") == _MARK],
        )


class _Profile(torch.profiler.profile):
    """A profiler of the CPU, which remembers whether it was asked for a GPU's kernels as well."""

    def __init__(self, *, activities=None, **options) -> None:
        self.asked = {*_KINDS} if activities is None else {*activities}
        super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **options)


_KINDS = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA


@contextlib.contextmanager
def pretended_gpu(function: Callable) -> Iterator[bool]:
    """Let a student's function believe, on a machine without a GPU, that there is one to profile; only the CPU is.

    Args:
        function: the answer, of whose notebook `on_gpu` is true meanwhile.

    Yields:
        Whether the function runs here, so that its profile shows what it asked for.
    """
    names: dict[str, Any] = getattr(function, "__globals__", {})
    available = torch.cuda.is_available
    here = type(names) is dict  # while it is graded, the names are those of another process, in a class of their own
    if available() or not here:
        yield here
        return
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "is_available", lambda: is_students(sys._getframe(1).f_code) or available()),
            (torch.profiler, "supported_activities", lambda: {*_KINDS}),
            (torch.profiler.profiler, "supported_activities", lambda: {*_KINDS}),
            (torch.profiler, "profile", _Profile),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        if "on_gpu" in names:
            stack.enter_context(mock.patch.dict(names, {"on_gpu": True}))
        yield True


def records_kernels(prof: torch.profiler.profile) -> bool:
    """Return whether a profile was asked for a GPU's kernels; True for one of another process, of which that is not known."""
    asked: Any = getattr(prof, "asked", None) or getattr(prof, "activities", _KINDS)
    return torch.profiler.ProfilerActivity.CUDA in asked
