"""The result of grading a submission, and its form as JSON, which is checked when it is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

STATUSES = ("passed", "failed", "error", "timeout", "killed", "missing", "flagged", "by_hand")


class GradingError(RuntimeError):
    """Grading itself failed, and not the submission; the message says what to do."""


@dataclass(frozen=True)
class CellResult:
    """One graded cell.

    Attributes:
        points: that it got.
        max_points: that it could get.
        status: how it ended, one of `STATUSES`.
        message: what the student reads.
        seconds: that it took.
        on_gpu: True if its verdict rests on numbers that a GPU computed.
    """

    points: float
    max_points: float
    status: str
    message: str
    seconds: float
    on_gpu: bool = False


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
    cell_seconds: float = 0.0  # that the cells took of these
    skipped: tuple[str, ...] = ()  # cells of the instructor's that were not run, since nothing graded uses them

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
            cells = {_text(name): CellResult(**cell) for name, cell in fields["cells"].items()}
            flags = tuple(Flag(**{k: _text(v) for k, v in flag.items()}) for flag in fields["flags"])
            for name, cell in cells.items():
                if cell.status not in STATUSES or not 0 <= cell.points <= cell.max_points:
                    raise ValueError(f"cell {name} has status {cell.status!r} and {cell.points} points")
                _text(cell.message)
            walls = {_text(k): _text(v) for k, v in fields["walls"].items()}
            return cls(
                _text(fields["student"]),
                _text(fields["lab"]),
                cells,
                flags,
                walls,
                _text(fields["notebook"]),
                float(fields["seconds"]),
                float(fields["cell_seconds"]),
                tuple(map(_text, fields["skipped"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise GradingError(f"a result is not well formed: {error}") from None


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} should be text")
    return value
