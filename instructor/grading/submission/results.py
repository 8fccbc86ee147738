"""What the engine tells the warm process and the checker, and the result that it gets back, with its form as JSON."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from utils.validation import UserError

if TYPE_CHECKING:
    from instructor.build import Built
    from instructor.grading.sandbox.walls import Limits


class GradingError(UserError):
    """Grading itself failed, and not the submission; the message says what to do."""


@dataclass(frozen=True)
class CellResult:
    """One graded cell."""

    points: float  # that it got
    status: str  # how it ended: passed, failed, error, timeout, killed, missing or by_hand
    message: str  # what the student reads


@dataclass(frozen=True)
class Flag:
    """Something that a person should look at: the question, the kind, and what was seen."""

    question: str
    kind: str
    detail: str


@dataclass(frozen=True)
class SubmissionResult:
    """One graded submission."""

    student: str
    lab: str
    cells: dict[str, CellResult]
    flags: tuple[Flag, ...]
    walls: dict[str, str]
    notebook: str = field(repr=False)  # as autograded, without hidden tests
    seconds: float = 0.0  # that grading took

    @property
    def score(self) -> float:
        """The sum of the automatic points."""
        return sum(cell.points for cell in self.cells.values())

    @classmethod
    def from_json(cls, fields: dict) -> SubmissionResult:
        """Rebuild a result; a KeyError, TypeError or AttributeError if it is of another version of this package."""
        cells = {name: CellResult(**cell) for name, cell in fields["cells"].items()}
        flags = tuple(Flag(**flag) for flag in fields["flags"])
        return cls(**{**fields, "cells": cells, "flags": flags})


@dataclass(frozen=True)
class WarmUp:
    """What a warm process needs before it can grade submissions of one lab."""

    lab: str  # its name
    setup: list[tuple[str, str]]  # (id, source) of the code cells before the first answer
    limits: Limits


@dataclass(frozen=True)
class Job:
    """One submission to grade, with all that its checker has to know."""

    built: Built
    student: str  # the person
    submission: bytes  # the file as it was handed in
    timeout: float  # seconds for one cell, or for the tests of one question
    total: float  # seconds for the whole submission


def how_it_ended(code: int) -> str:
    """What a process did that ended without an answer, by its exit code."""
    if code == -signal.SIGKILL:
        return "was ended by the machine, as when memory runs out: grade with fewer --jobs"
    return f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
