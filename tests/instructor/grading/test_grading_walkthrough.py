"""Each lab from `labs release` to the exported CSV, by the commands that an instructor types; the class comes in a platform's zip.

The slow set has the same path with a small lab (`test_grading_class.py`), and grades the answers of every lab
(`test_grading_honest.py`).
"""

from __future__ import annotations

import csv
import html
import json
import re
import zipfile
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from instructor.build import Built, build_lab
from instructor.course import Course
from instructor.grading.class_ import gradebook
from instructor.grading.submission.plan import question_of
from instructor.points import lab_path
from tests.instructor import lab1_wrong_answers, lab2_wrong_answers, lab3_wrong_answers, lab4_wrong_answers
from tests.instructor.lab_cases import WrongAnswer, has_role, source_of
from utils.cli import app, mount_plugins

# Students by what they hand in; platforms make such names.
COMPLETE, PARTIAL, UNTOUCHED = "Ada Lovelace_4711", "Grace Hopper_4712", "Nobody_4713"
# (lab, what PARTIAL answers, the catalogue of the mistake in one of these answers, its name)
LABS = [
    ("lab1", ("q1_1", "q2_3"), lab1_wrong_answers, "latency taken as seconds"),
    ("lab2_flexattention", ("q1_1", "q2_1"), lab2_wrong_answers, "window one too wide"),
    ("lab3_gluon", ("q2_1", "q2_2"), lab3_wrong_answers, "no mask on the store"),
    ("lab4_sdpa", ("q1_1", "q2_1"), lab4_wrong_answers, "causal costs as much as full"),
]


def labs(*arguments: object) -> str:
    """Run `labs ARGUMENTS` and return its output."""
    if "grade" not in {command.name or command.callback.__name__ for command in app.registered_commands}:
        mount_plugins()
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"labs {' '.join(map(str, arguments))}: {result.output}"
    return result.output


def handed_in(built: Built, released: str, partly: tuple[str, ...], mistake: WrongAnswer) -> dict[str, tuple]:
    """Return {student: (notebook, automatic points)}."""
    cells = {cell.id: cell for cell in nbformat.reads(built.instructor, as_version=4).cells}
    answers = {name: cell.source for name, cell in cells.items() if has_role(cell, "solution")}
    points = {
        name: cell.metadata.nbgrader["points"]
        for name, cell in cells.items()
        if has_role(cell, "grade") and cell.cell_type == "code"
    }
    some = {name: answers[name] for name in partly} | {mistake.cell: source_of(answers, mistake)}
    due = [name for name in points if question_of(name) in map(question_of, partly) and name not in mistake.lost]

    def filled(texts: dict[str, str]) -> str:
        notebook = nbformat.reads(released, as_version=4)
        for cell in notebook.cells:
            cell.source = texts.get(cell.id, cell.source)
        return nbformat.writes(notebook, version=4)

    return {
        COMPLETE: (filled(answers), sum(points.values())),
        PARTIAL: (filled(some), sum(points[name] for name in due)),
        UNTOUCHED: (released, 0.0),
    }


@pytest.mark.overnight
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "partly", "catalogue", "mistake"), LABS, ids=[lab[0] for lab in LABS])
def test_a_lab(tmp_path: Path, name, partly, catalogue, mistake):
    built, course = build_lab(lab_path(name)), tmp_path / "course"
    assert "no secret line" in labs("release", name, "--to", tmp_path / "release")
    with zipfile.ZipFile(tmp_path / "release" / f"{name}.zip") as bundle:
        released = bundle.read(f"{name}/{name}.ipynb").decode()
    (wrong,) = (wrong for wrong in catalogue.WRONG_ANSWERS if wrong.mistake == mistake)
    submissions = handed_in(built, released, partly, wrong)
    with zipfile.ZipFile(tmp_path / "platform.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for student, (notebook, _) in submissions.items():
            archive.writestr(f"{student}_assignsubmission_file_/my {name}.ipynb", notebook)

    output = labs("grade", name, "--course", course, "--jobs", 1, "--zip", tmp_path / "platform.zip")
    assert re.search(r"3 graded in \d+ s, 0 flagged, \d+ answers wait for a person", output), output
    assert "3 pages" in labs("feedback", name, "--course", course)
    pages = {s: (course / "feedback" / s / name / f"{name}.html").read_text(encoding="utf-8") for s in submissions}
    assert not [s for s, page in pages.items() if "HIDDEN TESTS" in page or "instructor.checks" in page]
    record = json.loads(gradebook.record_path(Course(course), name, PARTIAL).read_text(encoding="utf-8"))
    for cell in wrong.lost:  # the page says what is wrong
        assert record["cells"][cell]["message"].splitlines()[0] in html.unescape(pages[PARTIAL])
    labs("export", "--course", course, "--to", tmp_path / "grades.csv")
    with (tmp_path / "grades.csv").open(encoding="utf-8", newline="") as file:
        exported = {row["student_id"]: float(row["raw_score"]) for row in csv.DictReader(file)}
    assert exported == {student: points for student, (_, points) in submissions.items()}
