"""What the engine, the warm process and the checker tell each other, each record with its form as JSON.

A warm process gets one `WarmUp`. After that it gets a `Job` for every submission, and answers with a `Report`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from instructor.grading.sandbox.walls import Limits
from instructor.grading.submission.plan import Needs
from instructor.grading.submission.results import SubmissionResult


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
    modes: dict[str, str]  # test cell -> "distance" or "inside"; for other cells the checker finds out
    no_control: list[str]  # test cells inside whose checks accept corrupted answers, too
    watching: list[str]  # test cells that forbid something: every call of a student's function is recorded in them
    proving: dict[str, str]  # of these, the ones in which the record of a model answer computes its result: how far
    gpu: bool

    def as_frame(self) -> tuple[dict, list[bytes]]:
        """The job as a JSON object, and the submission's bytes, which need not be text."""
        return {**vars(self), "submission": None}, [self.submission]

    @classmethod
    def from_frame(cls, fields: dict, blobs: list) -> Job:
        """Rebuild the job from what `as_frame` made."""
        tests = {name: Needs(*needs) for name, needs in fields["tests"].items()}
        return cls(**{**fields, "submission": bytes(blobs[0]), "tests": tests})


@dataclass(frozen=True)
class Report:
    """A checker's answer: the result, and where each test cell ran."""

    result: SubmissionResult
    modes: dict[str, str]  # test cell -> "distance" or "inside"
    why: dict[str, str]  # test cell -> why it could not run at a distance
    watching: list[str]  # test cells that record what runs in the student's functions
    proving: dict[str, str]  # of these, the ones whose records compute the results: "whole" or "in part"

    def as_json(self) -> dict:
        """The record as a JSON object."""
        return {**vars(self), "result": self.result.as_json()}

    def as_frame(self) -> tuple[dict, list[bytes]]:
        """The record as a frame: a notebook with its pictures may be longer than the header of one may be."""
        return {"op": "graded"}, [json.dumps(self.as_json()).encode()]

    @classmethod
    def from_json(cls, fields: dict) -> Self:
        """Rebuild the record; `GradingError` if its result is not well formed."""
        return cls(**{**fields, "result": SubmissionResult.from_json(fields["result"])})


@dataclass(frozen=True)
class Calibration(Report):
    """How the questions of a lab are tested on one kind of machine: the report on the model answers, and more."""

    no_control: list[str]  # test cells inside whose checks accept corrupted answers, too
