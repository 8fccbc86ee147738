"""Twenty honest students with unusual right answers to all labs: every point, and no flag."""

import types

import nbformat
import pytest

from instructor.build import build_lab
from instructor.course import answered_notebook
from instructor.grading import grade_notebook
from instructor.grading.sandbox.tampering import Sign
from instructor.grading.submission.checker import Checker
from instructor.grading.submission.plan import Step
from instructor.points import lab_path
from tests.instructor.grading import (
    honest_cold,
    honest_fourth,
    honest_own_names,
    honest_styles,
    honest_styles_lab3,
    honest_styles_lab4,
    honest_third,
    honest_unusual,
)

_SUITES = (
    honest_unusual,
    honest_cold,
    honest_third,
    honest_fourth,
    honest_styles,
    honest_styles_lab3,
    honest_styles_lab4,
    honest_own_names,
)
STUDENTS = {name: student for suite in _SUITES for name, student in suite.STUDENTS.items()}
# A module that a cell writes by a function of Python's cannot be read as text, so where something is forbidden it waits.
WAITS = {"compiled, cached, in a module of one's own": ["q4_2_tests"]}
LABS = ("lab1", "lab2_flexattention", "lab3_gluon", "lab4_sdpa")


@pytest.fixture(scope="module")
def labs():
    """{lab: (its notebooks, {answer cell: the model answer without its marks})}."""
    found = {}
    for name in LABS:
        built = build_lab(lab_path(name))
        cells = nbformat.reads(built.instructor, as_version=4).cells
        lines = {c.id: [line for line in c.source.split("\n") if line.strip()[:3] != "###"] for c in cells}
        found[name] = built, {name: "\n".join(text) for name, text in lines.items()}
    return found


def answers_of(name: str, labs) -> tuple[str, dict[str, str]]:
    """(lab, {answer cell: its text}) of a student."""
    lab, cells = STUDENTS[name]
    answers = {}
    for cell, code in cells.items():
        text = labs[lab][1][cell]
        for old, new in code.items() if isinstance(code, dict) else ():
            assert text.count(old) == 1, f"{name}: the model answer has other lines now: {old!r}"
            text = text.replace(old, new)
        answers[cell] = text if isinstance(code, dict) else code.lstrip("\n")
    return lab, answers


def test_there_are_twenty_and_they_are_of_all_labs():
    assert len(STUDENTS) >= 20 and {lab for lab, _ in STUDENTS.values()} == set(LABS)


def test_code_that_the_labs_own_cell_makes_is_nobodys_fault():
    empty = nbformat.writes(nbformat.v4.new_notebook())
    job = types.SimpleNamespace(modes={}, timeout=1.0, total=1.0, watching=[], lab="lab1", instructor_notebook=empty)
    checker = Checker(job, {}, lambda **options: None)
    cell = nbformat.v4.new_code_cell()
    steps = [Step("student", cell, f"c{n}", "q5_3", untouched=n == 0, answer=n == 2) for n in range(3)]
    checker.signs = [Sign(step.name, "hides its code", f"by {step.name}", step.name) for step in steps]
    checker._flag_signs(steps)
    assert [flag.detail for flag in checker.flags] == ["by c1", "by c2"]


@pytest.mark.overnight
@pytest.mark.slow
@pytest.mark.parametrize("name", STUDENTS)
def test_an_unusual_right_notebook_loses_nothing(labs, name):
    lab, answers = answers_of(name, labs)
    built = labs[lab][0]
    result = grade_notebook(built, answered_notebook(built, answers), timeout=120)
    lost = {
        n: (c.status, c.message) for n, c in result.cells.items() if c.points < c.max_points and c.status != "by_hand"
    }
    assert {n: status for n, (status, _) in lost.items()} == dict.fromkeys(WAITS.get(name, ()), "flagged"), lost
    assert all(flag.kind == "unusual" for flag in result.flags) and len(result.flags) == len(lost)
