"""Right answers, however they are written: every point, no flag, none waits."""

import os
import random
import types

import nbformat
import pytest

from instructor.build import build_lab
from instructor.course import answered_notebook
from instructor.grading.submission import engine
from instructor.grading.submission.engine import grade_notebook
from instructor.points import lab_path
from tests.instructor import lab_cases
from tests.instructor.grading.honest import ANSWERS, HABITS, NOTEBOOKS

LABS = ("lab1", "lab2_flexattention", "lab3_gluon", "lab4_sdpa")
SEED = int(os.environ.get("HONEST_SEED", "20261129"))  # with this one each habit is drawn for some answer
PACKS = max(map(len, ANSWERS.values()))  # notebooks that hold each answer once


def model_answers(lab) -> dict[str, str]:
    """{answer cell: the model answer}."""
    return lab_cases.answers_in(nbformat.reads(lab.instructor, as_version=4).cells)


def losses(lab, answers: dict[str, str], around=(), timeout: int = 120) -> dict:
    """Grade these answers; {test cell: (status, message)} of those that lack points, and the flags if there are any."""
    notebook = nbformat.reads(answered_notebook(lab, answers), as_version=4)
    for name in around:
        NOTEBOOKS[name](notebook)
    result = grade_notebook(lab, nbformat.writes(notebook, version=4), timeout=timeout)
    lost = {
        name: (cell.status, cell.message)
        for name, cell in result.cells.items()
        if cell.status not in ("passed", "by_hand")
    }
    return lost | ({"flags": result.flags} if result.flags else {})


def test_no_habit_changes_an_answer_into_nonsense(suite_lab):
    for cell, answer in model_answers(suite_lab).items():
        written = {name: habit(answer) for name, habit in HABITS.items()}
        if not answer.startswith("%%"):
            assert len(set(written.values())) >= 6, cell  # a cell with a number alone has few places for a habit
            for text in written.values():
                compile(text, cell, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("pack", range(PACKS))
def test_right_answers_in_many_hands_get_every_point(suite_lab, pack):
    answers = {cell: list(texts.values())[pack % len(texts)] for cell, texts in ANSWERS.items()}
    assert losses(suite_lab, answers, list(NOTEBOOKS)[pack::PACKS], timeout=20) == {}


@pytest.mark.slow
@pytest.mark.parametrize("lab", LABS)
def test_drawn_habits_lose_nothing_in_a_lab(lab, monkeypatch):
    """A habit is drawn for every answer; HONEST_SEED draws others. To grade the model answers first would take as long again."""
    monkeypatch.setattr(engine, "calibrate", lambda built, limits: types.SimpleNamespace(seconds=60.0))
    built, draw = build_lab(lab_path(lab)), random.Random(f"{lab} {SEED}")
    drawn = {cell: draw.choice(list(HABITS)) for cell in model_answers(built)}
    answers = {cell: HABITS[drawn[cell]](text) for cell, text in model_answers(built).items()}
    lost = losses(built, answers)
    assert lost == {}, {name: drawn.get(name.rpartition("_tests")[0]) for name in lost}


@pytest.mark.overnight
@pytest.mark.parametrize("lab", LABS)
@pytest.mark.parametrize("habit", HABITS)
def test_every_habit_loses_nothing_in_any_lab(lab, habit):
    built = build_lab(lab_path(lab))
    assert losses(built, {cell: HABITS[habit](text) for cell, text in model_answers(built).items()}) == {}
