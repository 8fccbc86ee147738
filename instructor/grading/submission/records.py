"""What the engine tells the warm process and the checker, each record with its form as JSON.

A warm process gets one `WarmUp`. After that it gets a `Job` for every submission, and answers with a `SubmissionResult`.
"""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass

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

    def as_json(self) -> dict:
        """The record as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict) -> WarmUp:
        """Rebuild the record from a JSON object."""
        return cls(**{**fields, "limits": Limits(**fields["limits"])})


@dataclass(frozen=True)
class Job:
    """One submission to grade, with all that its checker has to know."""

    lab: str
    student: str  # the person
    instructor_notebook: str
    student_notebook: str
    submission: bytes  # the file as it was handed in
    timeout: float  # seconds for one cell, or for the tests of one question
    total: float  # seconds for the whole submission
    tests: dict[str, Needs]  # test cell -> what it needs
    gpu: bool

    def as_frame(self) -> tuple[dict, list[bytes]]:
        """The job as a JSON object, and the submission's bytes, which need not be text."""
        return {**vars(self), "submission": None}, [self.submission]

    @classmethod
    def from_frame(cls, fields: dict, blobs: list) -> Job:
        """Rebuild the job from what `as_frame` made."""
        tests = {name: Needs(*needs) for name, needs in fields["tests"].items()}
        return cls(**{**fields, "submission": bytes(blobs[0]), "tests": tests})


def how_it_ended(code: int) -> str:
    """What a process did that ended without an answer, by its exit code."""
    if code == -signal.SIGKILL:
        return "was ended by the machine, as when memory runs out: grade with fewer --jobs"
    return f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
