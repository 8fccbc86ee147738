"""A pretended GPU for answers that profile: on a CPU nothing has to be waited for, and no kernel is launched."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from utils.checking.answers import run_beside
from utils.checking.authors import is_students

_MARK = "aten::lgamma"
_real_profile, _real_available, _real_wait = torch.profiler.profile, torch.cuda.is_available, torch.cuda.synchronize
_KINDS = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
_asked: list[bool] = []  # of each profile since the pretence began: whether a GPU's kernels were asked for
_pretence = contextlib.ExitStack()


def leave_mark() -> None:
    """Leave the mark in a profile that `steps_that_wait` looks for."""
    torch.lgamma(torch.ones(2))


class _Profile(torch.profiler.profile):
    """A profiler that remembers whether it was asked for a GPU's kernels; without a GPU it records the CPU alone."""

    def __init__(self, *, activities=None, **options) -> None:
        _asked.append(activities is None or _KINDS[1] in activities)
        super().__init__(activities=activities if _real_available() else [_KINDS[0]], **options)


_Profile.__name__ = "profile"  # by which the grader knows the one that an answer returns


def begin_pretence(function: Callable, wait: Callable[[], None]) -> None:
    """From now on, in this process, students' code is told that there is a GPU, and each way to wait for it calls `wait`."""

    def synchronize(device=None) -> None:
        if _real_available():
            _real_wait()
        wait()

    def is_available() -> bool:
        return is_students(sys._getframe(1).f_code) or _real_available()

    _asked.clear()
    for owner, name, value in (
        (torch.cuda, "is_available", is_available),
        (torch.cuda, "synchronize", synchronize),
        (torch.accelerator, "synchronize", synchronize),
        (torch.profiler, "supported_activities", lambda: {*_KINDS}),
        (torch.profiler.profiler, "supported_activities", lambda: {*_KINDS}),
        (torch.profiler, "profile", _Profile),
    ):
        _pretence.enter_context(mock.patch.object(owner, name, value))
    names: dict[str, Any] = getattr(function, "__globals__", {})
    course = {"synchronize": synchronize, "on_gpu": True, "device": torch.device("cuda")}
    found = {name: value for name, value in course.items() if name in names}
    for real, pretended in ((_real_profile, _Profile), (_real_available, is_available), (_real_wait, synchronize)):
        found |= {name: pretended for name, value in names.items() if value is real}
    _pretence.enter_context(mock.patch.dict(names, found))


def end_pretence() -> bool:
    """Take the pretended GPU away; return whether a profile asked for its kernels."""
    _pretence.close()
    return any(_asked)


@contextlib.contextmanager
def pretended_gpu(function: Callable, wait: Callable[[], None]) -> Iterator[dict[str, bool]]:
    """Let an answer believe that there is a GPU to profile and to wait for, in the process where it runs.

    Args:
        function: the answer.
        wait: what happens whenever it waits for the GPU, by the course's `synchronize` or by torch's.

    Yields:
        A dict that says after the block whether the answer asked for a GPU's `kernels`.
    """
    there = run_beside(function)
    seen: dict[str, bool] = {}
    try:
        there(begin_pretence, function, wait)
        yield seen
    finally:
        seen["kernels"] = there(end_pretence)


def steps_that_wait(events: list[dict], operator: str) -> int:
    """Count the recorded steps of a trace in which a wait follows the last `operator`, which the profiled function runs."""
    timed = [e for e in events if "ts" in e and "dur" in e]
    found = 0
    for step in (e for e in timed if str(e.get("name", "")).startswith("ProfilerStep#")):
        inside = [e for e in timed if step["ts"] <= e["ts"] <= step["ts"] + step["dur"]]
        ran, waited = ([e["ts"] for e in inside if e.get("name") == name] for name in (operator, _MARK))
        found += bool(ran and waited and max(waited) > max(ran))
    return found
