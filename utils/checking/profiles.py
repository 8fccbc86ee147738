"""A pretended GPU for answers that profile: without a GPU, an answer need not wait, and launches no kernel."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from utils.checking.authors import is_students

_KINDS = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA


def profile_on_pretended_gpu(answer: Callable, operator: str, repeats: int) -> tuple[str, str, list[str], bool]:
    """Call `answer(fn, file)` in the answer's process, as if there were a GPU.

    `fn` calls a function of torch with one argument, `repeats` times. The answer profiles `fn`.

    Returns:
        The name of the type that the answer returned, "profile" for torch's profiler; the text of the file, or "" without a
        file; the order of its calls of `fn` ("fn"), of the profiler's steps ("step"), and of its waits for the GPU ("wait"),
        by the course's `synchronize` or by torch's; and whether the profiler was to record a GPU's kernels.
    """
    x, calls, asked = torch.rand(64), list[str](), list[bool]()
    real_profile, real_available, real_wait = torch.profiler.profile, torch.cuda.is_available, torch.cuda.synchronize

    def fn() -> None:
        calls.append("fn")
        for _ in range(repeats):
            getattr(torch, operator)(x)

    def synchronize(device=None) -> None:
        if real_available():
            real_wait()
        calls.append("wait")

    def is_available() -> bool:
        return is_students(sys._getframe(1).f_code) or real_available()

    class Profile(torch.profiler.profile):
        def __init__(self, *, activities=None, **options) -> None:
            asked.append(activities is None or _KINDS[1] in activities)
            super().__init__(activities=activities if real_available() else [_KINDS[0]], **options)

        def step(self) -> None:
            calls.append("step")
            super().step()

    # The names of a notebook, where torch's functions may have other names.
    names: dict[str, Any] = getattr(answer, "__globals__", {})
    course = {"synchronize": synchronize, "on_gpu": True, "device": torch.device("cuda")}
    found = {name: value for name, value in course.items() if name in names}
    for real, pretended in ((real_profile, Profile), (real_available, is_available), (real_wait, synchronize)):
        found |= {name: pretended for name, value in names.items() if value is real}
    with contextlib.ExitStack() as pretence:
        for owner, name, value in (
            (torch.cuda, "is_available", is_available),
            (torch.cuda, "synchronize", synchronize),
            (torch.accelerator, "synchronize", synchronize),
            (torch.profiler, "supported_activities", lambda: {*_KINDS}),
            (torch.profiler.profiler, "supported_activities", lambda: {*_KINDS}),
            (torch.profiler, "profile", Profile),
        ):
            pretence.enter_context(mock.patch.object(owner, name, value))
        pretence.enter_context(mock.patch.dict(names, found))
        file = Path(pretence.enter_context(tempfile.TemporaryDirectory()), "trace.json")
        result = answer(fn, str(file))
        text = file.read_text(errors="replace") if file.exists() else ""
    return "profile" if isinstance(result, real_profile) else type(result).__name__, text, calls, any(asked)
