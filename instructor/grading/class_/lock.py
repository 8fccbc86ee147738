"""One `labs grade` at a time for a lab of a course."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from instructor.grading.submission.results import GradingError


@contextlib.contextmanager
def only_grader(root: Path, lab: str) -> Iterator[None]:
    """Keep a second `labs grade` off the same lab of the same course; `GradingError` says that one is running."""
    path = root / "grading" / f"{lab}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            who = file.read().strip() or "of another machine"
            raise GradingError(
                f"{lab} of {root} is being graded already (process {who}). Wait until that has ended, and run "
                "the command again: it goes on from there."
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()} on {platform.node()}")
        file.flush()
        yield
