"""What the engine tells the warm process and the checker: a `WarmUp` once, and a `Job` for each submission."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from instructor.build import Built
from instructor.grading.sandbox.walls import Limits
from instructor.grading.submission.plan import Needs


@dataclass(frozen=True)
class WarmUp:
    """What a warm process needs before it can grade submissions of one lab."""

    setup: list[tuple[str, str]]  # (id, source) of the code cells before the first answer
    folder: str  # the warm process's working folder
    visible: list[str]  # paths that a student's process may read
    course: dict[str, str]  # name in the scratch folder -> path, of what students have next to their notebook
    hidden: list[str]  # folders that an empty one covers wherever a visible path contains them
    limits: Limits
    answers: dict[str, list[str]]  # module of the course -> functions in it that a student may not call


@dataclass(frozen=True)
class Job:
    """One submission to grade, with all that its checker has to know."""

    built: Built
    student: str  # the person
    submission: bytes  # the file as it was handed in
    timeout: float  # seconds for one cell, or for the tests of one question
    total: float  # seconds for the whole submission
    tests: dict[str, Needs]  # test cell -> what it needs


def how_it_ended(code: int) -> str:
    """What a process did that ended without an answer, by its exit code."""
    if code == -signal.SIGKILL:
        return "was ended by the machine, as when memory runs out: grade with fewer --jobs"
    return f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
