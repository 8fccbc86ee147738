"""Write results into nbgrader's gradebook and folders, with one transaction for each submission.

What is written is what `nbgrader autograde` writes: `autograded/<student>/<lab>/<lab>.ipynb` and scores in the
database. So the formgrader, `nbgrader generate_feedback` and `nbgrader export` go on from here.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from instructor.build import Built
from instructor.course import Course
from instructor.grading.submission.results import GradingError, SubmissionResult
from utils.files import write_whole


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


def prepare(course: Course, built: Built) -> None:
    """Add the lab's present version to the gradebook, by nbgrader's own `generate_assignment`."""
    marker = course.root / "grading" / built.name / "assignment.ipynb"
    if marker.is_file() and marker.read_bytes() == built.instructor.encode() and _is_known(course, built.name):
        return
    course.release(built)
    write_whole(marker, built.instructor)


def _is_known(course: Course, lab: str) -> bool:
    from nbgrader.api import MissingEntry

    with course.gradebook() as gradebook:
        try:
            return bool(gradebook.find_assignment(lab).notebooks)
        except MissingEntry:
            return False


def merge(course: Course, results: Iterable[SubmissionResult]) -> None:
    """Write results into the gradebook and the folder `autograded`; manual grades are kept.

    Each submission is one transaction: after an interruption the gradebook has all of it or nothing.
    """
    from nbgrader.api import MissingEntry

    with course.gradebook() as gradebook:
        for result in results:
            lab, student = result.lab, result.student
            _write_notebook(course, result)
            person = gradebook.update_or_create_student(student)
            if person.last_name is None:  # until a roster says more; the formgrader would call everybody None
                person.last_name, person.first_name = student, ""
            gradebook.update_or_create_submission(lab, student, **_timestamp(course, student, lab))
            submitted = gradebook.find_submission_notebook(lab, lab, student)
            commented = {comment.name for comment in submitted.comments}
            try:
                for name, cell in result.cells.items():
                    grade = gradebook.find_grade(name, lab, lab, student)
                    waits = cell.status == "by_hand"
                    grade.auto_score = None if waits else cell.points
                    grade.needs_manual_grade = waits or grade.manual_score is not None
                    if name in commented:
                        comment = gradebook.find_comment(name, lab, lab, student)
                        comment.auto_comment = "No response." if cell.status == "missing" else None
                gradebook.db.commit()
            except MissingEntry as error:
                raise GradingError(
                    f"the gradebook has another version of {lab} ({error}): run `labs grade {lab}` again, which "
                    "brings it up to date."
                ) from None


def _timestamp(course: Course, student: str, lab: str) -> dict:
    from nbgrader.utils import parse_utc

    path = course.root / "submitted" / student / lab / "timestamp.txt"
    if not path.is_file():
        return {}
    try:
        return {"timestamp": parse_utc(path.read_text(encoding="utf-8").strip())}
    except (ValueError, OverflowError):
        return {}


def _write_notebook(course: Course, result: SubmissionResult) -> None:
    folder = course.root / "autograded" / result.student / result.lab
    write_whole(folder / f"{result.lab}.ipynb", result.notebook)
    stamp = course.root / "submitted" / result.student / result.lab / "timestamp.txt"
    if stamp.is_file():
        shutil.copyfile(stamp, folder / "timestamp.txt")


# ---- records, by which grading resumes ---------------------------------------------------------------------------


def record_path(course: Course, lab: str, student: str) -> Path:
    """Where the record of a submission is kept."""
    return course.root / "grading" / lab / "results" / f"{student}.json"


def save_record(course: Course, result: SubmissionResult, key: str) -> None:
    """Keep a result with the key of what it was made from."""
    path = record_path(course, result.lab, result.student)
    write_whole(path, json.dumps({"key": key, **asdict(result)}, indent=1))


def load_record(course: Course, lab: str, student: str, key: str | None) -> SubmissionResult | None:
    """The record of a submission if it was made from the same sources and file (`key`; None takes any), or None."""
    path = record_path(course, lab, student)
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        made_from = fields.pop("key")
        return SubmissionResult.from_json(fields) if key in (made_from, None) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


# ---- tables ------------------------------------------------------------------------------------------------------


def as_csv(rows: list[dict]) -> str:
    """Rows as CSV, with a column for each name in any of them; text that a spreadsheet would run is quoted."""
    buffer = io.StringIO()
    if names := list(dict.fromkeys(name for row in rows for name in row)):
        writer = csv.DictWriter(buffer, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: harmless_cell(v) for k, v in row.items()} for row in rows)
    return buffer.getvalue()


def harmless_cell(value: object) -> object:
    """A cell that no spreadsheet takes for a formula; a number, also a negative one, stays as it is."""
    if not isinstance(value, str) or value[:1] not in ("=", "+", "-", "@", "\t", "\r"):
        return value
    return value if re.fullmatch(r"[+-]?\d+(\.\d+)?", value) else f"'{value}"
