"""What grading a submission comes to, and its form as JSON, which is checked when it is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

STATUSES = ("passed", "failed", "error", "timeout", "killed", "missing", "flagged", "by_hand")


class GradingError(RuntimeError):
    """Grading itself failed, not the submission; says what to do."""


@dataclass(frozen=True)
class CellResult:
    """One graded cell: its points, how it ended (one of `STATUSES`), what the student reads, and seconds."""

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
    seconds: float = 0.0  # of everything
    cell_seconds: float = 0.0  # of the cells alone
    skipped: tuple[str, ...] = ()  # cells of the instructor's that nothing graded uses

    @property
    def score(self) -> float:
        """The sum of the automatic points."""
        return sum(cell.points for cell in self.cells.values())

    def as_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, said: dict) -> SubmissionResult:
        """Rebuild a result; `GradingError` if it is not exactly one."""
        try:
            cells = {_text(name): CellResult(**cell) for name, cell in said["cells"].items()}
            flags = tuple(Flag(**{k: _text(v) for k, v in flag.items()}) for flag in said["flags"])
            for name, cell in cells.items():
                if cell.status not in STATUSES or not 0 <= cell.points <= cell.max_points:
                    raise ValueError(f"cell {name} has status {cell.status!r} and {cell.points} points")
                _text(cell.message)
            walls = {_text(k): _text(v) for k, v in said["walls"].items()}
            return cls(
                _text(said["student"]),
                _text(said["lab"]),
                cells,
                flags,
                walls,
                _text(said["notebook"]),
                float(said["seconds"]),
                float(said["cell_seconds"]),
                tuple(map(_text, said["skipped"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise GradingError(f"a result is not well formed: {error}") from None


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} should be text")
    return value
