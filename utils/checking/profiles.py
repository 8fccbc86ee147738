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

_real_profile, _real_available, _real_wait = torch.profiler.profile, torch.cuda.is_available, torch.cuda.synchronize
_KINDS = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
_asked: list[bool] = []  # of each profile since the pretence began: whether a GPU's kernels were asked for
_pretence = contextlib.ExitStack()


class _Profile(torch.profiler.profile):
    """A profiler that notes its steps, and whether it was asked for a GPU's kernels; without a GPU it records the CPU alone."""

    note: Callable[[str], None]

    def __init__(self, *, activities=None, **options) -> None:
        _asked.append(activities is None or _KINDS[1] in activities)
        super().__init__(activities=activities if _real_available() else [_KINDS[0]], **options)

    def step(self) -> None:
        _Profile.note("step")
        super().step()


_Profile.__name__ = "profile"  # by which the grader knows the one that an answer returns


def begin_pretence(function: Callable, note: Callable[[str], None]) -> None:
    """From now on, in this process, students' code is told that there is a GPU; `note` hears of each wait for it and each step."""

    def synchronize(device=None) -> None:
        if _real_available():
            _real_wait()
        note("wait")

    def is_available() -> bool:
        return is_students(sys._getframe(1).f_code) or _real_available()

    _asked.clear()
    _Profile.note = staticmethod(note)
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
def pretended_gpu(function: Callable, note: Callable[[str], None]) -> Iterator[dict[str, bool]]:
    """Let an answer believe that there is a GPU to profile and to wait for, in the process where it runs.

    Args:
        function: the answer.
        note: hears "wait" whenever it waits for the GPU, by the course's `synchronize` or by torch's, and "step" from a profiler.

    Yields:
        A dict that says after the block whether the answer asked for a GPU's `kernels`.
    """
    there = run_beside(function)
    seen: dict[str, bool] = {}
    try:
        there(begin_pretence, function, note)
        yield seen
    finally:
        seen["kernels"] = there(end_pretence)
