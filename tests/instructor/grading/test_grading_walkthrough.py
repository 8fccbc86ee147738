"""Each lab from `labs release` to the exported CSV, by the commands that an instructor types.

Submissions to labs 2 and 4 arrive in a platform's zip. A complete submission is graded in lab 4 only: `labs grade` itself grades
the complete model answers of each lab before it grades a class. The slow set walks through lab 4, and grades the answers of labs
1 to 3 in `test_grading_honest.py`; labs 1 to 3, and two labs in one course, are overnight tests.
"""

from __future__ import annotations

import csv
import html
import json
import re
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from typer.testing import CliRunner

from instructor.build import Built, build_lab
from instructor.course import Course
from instructor.grading.class_ import gradebook
from instructor.grading.submission.plan import question_of
from instructor.points import lab_path
from tests.instructor import lab1_wrong_answers, lab2_wrong_answers, lab3_wrong_answers, lab4_wrong_answers
from tests.instructor.lab_cases import WrongAnswer, has_role, replaced_once
from utils.cli import app, mount_plugins

# Students by what they hand in; platforms make such names.
COMPLETE, PARTIAL, UNTOUCHED = "Ada Lovelace_4711", "Grace Hopper_4712", "Nobody_4713"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.overnight
def test_lab_1(tmp_path):
    lab = release("lab1", tmp_path, ("q1_1", "q2_3"), lab1_wrong_answers, "latency taken as seconds")
    expected = grade(lab, tmp_path / "course")
    assert exported_scores(tmp_path / "course") == expected


def test_lab_4(tmp_path):
    """All answers come, in a platform's zip."""
    expected = grade(release_lab_4(tmp_path), tmp_path / "course", zipped=True, complete=True)
    assert exported_scores(tmp_path / "course") == expected


@pytest.mark.overnight
def test_labs_3_and_4(tmp_path):
    """The answers of lab 3 are files."""
    course = tmp_path / "course"
    lab3 = release("lab3_gluon", tmp_path, ("q2_1", "q2_2"), lab3_wrong_answers, "no mask on the store")
    expected = grade(lab3, course)
    expected |= grade(release_lab_4(tmp_path), course, zipped=True, complete=True)
    # The export has a row for each student and each lab, also where the student handed nothing in.
    expected[lab3.built.name, COMPLETE] = 0.0
    assert exported_scores(course) == expected


@pytest.mark.overnight
def test_lab_2(tmp_path):
    lab = release("lab2_flexattention", tmp_path, ("q1_1", "q2_1"), lab2_wrong_answers, "window one too wide")
    expected = grade(lab, tmp_path / "course", zipped=True)
    assert exported_scores(tmp_path / "course") == expected


# ---- submissions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReleasedLab:
    """A lab as built, its notebook in the bundle, and what the student PARTIAL answers: some cells, one with a mistake."""

    built: Built
    notebook: str
    answers: tuple[str, ...]
    mistake: WrongAnswer

    def __post_init__(self):
        assert self.mistake.cell in self.answers

    @cached_property
    def model_cells(self) -> dict[str, NotebookNode]:
        """The instructor's notebook: {id: cell}."""
        return {cell.id: cell for cell in nbformat.reads(self.built.instructor, as_version=4).cells}

    def graded_cells(self, kind: str) -> dict[str, NotebookNode]:
        """Select the cells with points: code is graded automatically, markdown by a person."""
        return {name: c for name, c in self.model_cells.items() if has_role(c, "grade") and c.cell_type == kind}

    def automatic_points(self, answers: tuple[str, ...] | None = None) -> float:
        """Sum the automatic points of all questions, or of the questions with these answer cells."""
        questions = None if answers is None else {question_of(name) for name in answers}
        return sum(
            cell.metadata.nbgrader["points"]
            for name, cell in self.graded_cells("code").items()
            if questions is None or question_of(name) in questions
        )

    def submissions(self, complete: bool) -> dict[str, tuple[str, float]]:
        """Write the class's submissions: {student: (notebook, automatic points)}."""
        lost = sum(self.model_cells[name].metadata.nbgrader["points"] for name in self.mistake.lost)
        sources = {name: self.model_cells[name].source for name in self.answers}
        sources[self.mistake.cell] = with_mistake(sources[self.mistake.cell], self.mistake)
        notebooks = {
            PARTIAL: (self._answered(sources), self.automatic_points(self.answers) - lost),
            UNTOUCHED: (self.notebook, 0.0),
        }
        if complete:
            sources = {name: cell.source for name, cell in self.model_cells.items() if has_role(cell, "solution")}
            notebooks[COMPLETE] = self._answered(sources), self.automatic_points()
        return notebooks

    def _answered(self, sources: dict[str, str]) -> str:
        """Fill these sources into the answer cells of the bundle's notebook."""
        notebook = nbformat.reads(self.notebook, as_version=4)
        cells = {cell.id: cell for cell in notebook.cells if has_role(cell, "solution")}
        for name, source in sources.items():
            cells[name].source = source
        return nbformat.writes(notebook, version=4)


def with_mistake(source: str, mistake: WrongAnswer) -> str:
    """Put a mistake into a model answer."""
    if mistake.code:
        return f"{source}\n\n{mistake.code}"
    for old, new in mistake.replaces:
        source = replaced_once(source, old, new)
    return source


# ---- commands ----------------------------------------------------------------------------------------------------


def labs(*arguments: object) -> str:
    """Run `labs ARGUMENTS` and return its output."""
    if "grade" not in {command.name or command.callback.__name__ for command in app.registered_commands}:
        mount_plugins()
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"labs {' '.join(map(str, arguments))}: {result.output}"
    return result.output


def release(name: str, folder: Path, answers: tuple[str, ...], catalogue, mistake: str) -> ReleasedLab:
    """Run `labs release` and take the notebook from its zip; the catalogue has the mistake by name."""
    output = labs("release", name, "--to", folder / "release")
    assert f"{name}.zip" in output and "no secret line" in output
    with zipfile.ZipFile(folder / "release" / f"{name}.zip") as bundle:
        notebook = bundle.read(f"{name}/{name}.ipynb").decode()
    (wrong,) = (wrong for wrong in catalogue.WRONG_ANSWERS if wrong.mistake == mistake)
    return ReleasedLab(build_lab(lab_path(name)), notebook, answers, wrong)


def release_lab_4(folder: Path) -> ReleasedLab:
    """Release lab 4, with a mistake that costs a question of it."""
    return release("lab4_sdpa", folder, ("q1_1", "q2_1"), lab4_wrong_answers, "causal costs as much as full")


def grade(lab: ReleasedLab, course: Path, zipped: bool = False, complete: bool = False) -> dict[tuple[str, str], float]:
    """Hand notebooks in, run `labs grade` and `labs feedback`, and check what they write.

    Args:
        lab: from `release`
        course: the course's folder
        zipped: hand in through a platform's zip
        complete: one student has answered everything

    Returns:
        {(lab, student): the automatic points that the export should have}
    """
    name = lab.built.name
    submissions = lab.submissions(complete)
    arguments = []
    if zipped:
        arguments = ["--zip", course.parent / "platform.zip"]
        with zipfile.ZipFile(arguments[1], "w", zipfile.ZIP_DEFLATED) as archive:
            for student, (notebook, _) in submissions.items():
                archive.writestr(f"{student}_assignsubmission_file_/my {name}.ipynb", notebook)
    else:
        for student, (notebook, _) in submissions.items():
            path = course / "submitted" / student / name / f"{name}.ipynb"
            path.parent.mkdir(parents=True)
            path.write_text(notebook, encoding="utf-8")
    output = labs("grade", name, "--course", course, "--jobs", 1, *arguments)
    by_hand = len(lab.graded_cells("markdown")) if complete else 0
    summary = rf"{len(submissions)} graded in \d+ s, 0 flagged, {by_hand} answers wait for a person"
    assert re.search(summary, output), output
    output = labs("feedback", name, "--course", course)
    assert f"{len(submissions)} pages in {course / 'feedback'}" in output
    pages = {s: (course / "feedback" / s / name / f"{name}.html").read_text(encoding="utf-8") for s in submissions}
    assert not [s for s, page in pages.items() if "HIDDEN TESTS" in page or "instructor.checks" in page]
    record = json.loads(gradebook.record_path(Course(course), name, PARTIAL).read_text(encoding="utf-8"))
    for cell in lab.mistake.lost:  # the page says what is wrong
        assert record["cells"][cell]["message"].splitlines()[0] in html.unescape(pages[PARTIAL])
    return {(name, student): points for student, (_, points) in submissions.items()}


def exported_scores(course: Path) -> dict[tuple[str, str], float]:
    """Run `labs export` and read the CSV: {(lab, student): score}."""
    target = course.parent / "grades.csv"
    labs("export", "--course", course, "--to", target)
    with target.open(encoding="utf-8", newline="") as file:
        return {(row["assignment"], row["student_id"]): float(row["raw_score"]) for row in csv.DictReader(file)}
