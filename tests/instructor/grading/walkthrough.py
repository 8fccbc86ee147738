"""The walk of a lab from `labs release` to the exported CSV, by the commands that an instructor types."""

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
from nbformat import NotebookNode
from typer.testing import CliRunner

from instructor.build import Built, build_lab
from instructor.course import Course
from instructor.grading import calibrate
from instructor.grading.class_ import gradebook
from instructor.grading.submission.plan import question_of
from instructor.points import lab_path
from utils.cli import app, mount_plugins

# Students by what they handed in; platforms make such names.
PARTLY, UNTOUCHED = "Grace Hopper_4712", "Nobody_4713"


def labs(*arguments: object) -> str:
    """Run `labs ARGUMENTS`; returns what it said."""
    if "grade" not in {command.name or command.callback.__name__ for command in app.registered_commands}:
        mount_plugins()
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, f"labs {' '.join(map(str, arguments))}: {done.output}"
    return done.output


@dataclass(frozen=True)
class Lab:
    """A lab as built and as in its bundle, with the answers that one student gave, and the mistake in one of them."""

    built: Built
    notebook: str
    answers: tuple[str, ...]
    mistake: object  # one of the lab's wrong answers

    def __post_init__(self):
        assert self.mistake.cell in self.answers

    @cached_property
    def model(self) -> dict[str, NotebookNode]:
        """{id: cell} of the instructor's notebook."""
        return {cell.id: cell for cell in nbformat.reads(self.built.instructor, as_version=4).cells}

    def worth(self, answers: tuple[str, ...] | None = None) -> float:
        """The automatic points of all questions, or of those with these answer cells."""
        questions = None if answers is None else {question_of(name) for name in answers}
        return sum(
            cell.metadata.nbgrader["points"]
            for name, cell in self.model.items()
            if _is(cell, "grade") and cell.cell_type == "code" and (answers is None or question_of(name) in questions)
        )

    @property
    def costs(self) -> float:
        """The points that the mistake loses."""
        return sum(self.model[name].metadata.nbgrader["points"] for name in self.mistake.lost)

    def partly_answered(self) -> str:
        """The bundle's notebook with some model answers filled in, one of them with the mistake."""
        sources = {name: self.model[name].source for name in self.answers}
        sources[self.mistake.cell] = with_mistake(sources[self.mistake.cell], self.mistake)
        notebook = nbformat.reads(self.notebook, as_version=4)
        for cell in notebook.cells:
            if _is(cell, "solution"):
                cell.source = sources.pop(cell.id, cell.source)
        assert not sources, f"no answer cell {', '.join(sources)} in the bundle's notebook"
        return nbformat.writes(notebook, version=4)


def _is(cell: NotebookNode, what: str) -> bool:
    return bool(cell.metadata.get("nbgrader", {}).get(what))


def mistake(answers, name: str):
    """The wrong answer of a lab that makes a mistake."""
    return next(wrong for wrong in answers.WRONG_ANSWERS if wrong.mistake == name)


def with_mistake(source: str, mistake) -> str:
    """A model answer with one of the lab's mistakes in it."""
    if mistake.code:
        return f"{source}\n\n{mistake.code}"
    for text, instead in mistake.replaces:
        assert source.count(text) == 1, f"{text!r} is {source.count(text)} times in the answer"
        source = source.replace(text, instead)
    return source


def released(name: str, folder: Path, answers: tuple[str, ...], mistake) -> Lab:
    """`labs release`, and the notebook out of its zip."""
    said = labs("release", name, "--to", folder)
    assert f"{name}.zip" in said and "no secret line" in said
    with zipfile.ZipFile(folder / f"{name}.zip") as bundle:
        notebook = bundle.read(f"{name}/{name}.ipynb").decode()
    return Lab(build_lab(lab_path(name)), notebook, answers, mistake)


def walk(lab: Lab, course: Path, zipped: bool = False) -> dict[tuple[str, str], float]:
    """Hand notebooks in, `labs grade`, `labs feedback`; returns {(lab, student): what the code is worth}.

    Nobody hands in all model answers: `labs grade` itself grades them, to calibrate, and its result is looked at here.

    Args:
        lab: from `released`.
        course: the course's folder.
        zipped: hand in through a platform's zip.
    """
    name = lab.built.name
    sent = {PARTLY: lab.partly_answered(), UNTOUCHED: lab.notebook}
    due = {PARTLY: lab.worth(lab.answers) - lab.costs, UNTOUCHED: 0.0}
    arguments = []
    if zipped:
        arguments = ["--zip", course.parent / "platform.zip"]
        with zipfile.ZipFile(arguments[1], "w", zipfile.ZIP_DEFLATED) as archive:
            for student, notebook in sent.items():
                archive.writestr(f"{student}_assignsubmission_file_/my {name}.ipynb", notebook)
    else:
        for student, notebook in sent.items():
            path = course / "submitted" / student / name / f"{name}.ipynb"
            path.parent.mkdir(parents=True)
            path.write_text(notebook, encoding="utf-8")
    said = labs("grade", name, "--course", course, "--jobs", 1, *arguments)
    assert re.search(rf"{len(sent)} graded in \d+ s, 0 flagged, 0 answers wait for a person", said), said
    solved = calibrate(lab.built).result
    assert (solved.score, solved.flags) == (lab.worth(), ())
    in_words = [name for name, cell in lab.model.items() if _is(cell, "grade") and cell.cell_type == "markdown"]
    assert sorted(name for name, cell in solved.cells.items() if cell.status == "by_hand") == sorted(in_words)
    said = labs("feedback", name, "--course", course)
    assert f"{len(sent)} pages in {course / 'feedback'}" in said
    pages = {s: (course / "feedback" / s / name / f"{name}.html").read_text(encoding="utf-8") for s in sent}
    assert not [student for student, page in pages.items() if "HIDDEN TESTS" in page or "instructor.checks" in page]
    record = json.loads(gradebook.record_path(Course(course), name, PARTLY).read_text(encoding="utf-8"))
    for cell in lab.mistake.lost:  # and says what is wrong
        assert record["cells"][cell]["message"].splitlines()[0] in html.unescape(pages[PARTLY])
    return {(name, student): points for student, points in due.items()}


def exported(course: Path) -> dict[tuple[str, str], float]:
    """`labs export`; returns {(lab, student): score} as the CSV has it."""
    target = course.parent / "grades.csv"
    labs("export", "--course", course, "--to", target)
    with target.open(encoding="utf-8", newline="") as file:
        return {(row["assignment"], row["student_id"]): float(row["raw_score"]) for row in csv.DictReader(file)}
