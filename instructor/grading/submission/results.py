"""The result of grading a submission, and its form as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


class GradingError(RuntimeError):
    """Grading itself failed, and not the submission; the message says what to do."""


@dataclass(frozen=True)
class CellResult:
    """One graded cell.

    Attributes:
        points: that it got.
        max_points: that it could get.
        status: how it ended: passed, failed, error, timeout, killed, missing, flagged or by_hand.
        message: what the student reads.
        seconds: that it took.
    """

    points: float
    max_points: float
    status: str
    message: str
    seconds: float


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

    def as_json(self) -> dict:
        """The result as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict) -> SubmissionResult:
        """Rebuild a result; `GradingError` if it is not well formed."""
        try:
            cells = {name: CellResult(**cell) for name, cell in fields["cells"].items()}
            flags = tuple(Flag(**flag) for flag in fields["flags"])
            return cls(**{**fields, "cells": cells, "flags": flags})
        except (KeyError, TypeError, AttributeError) as error:  # of another version of this package
            raise GradingError(f"a result is not well formed: {error}") from None
