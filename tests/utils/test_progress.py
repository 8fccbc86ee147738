"""`labs progress`, `labs check` and `labs reset`: the saved notebook is the memory, and no work is lost."""

import json
import shutil
from pathlib import Path

import pytest

from utils import progress
from utils.files import ROOT


def cell(grade_id: str, source: str = "x", *, run: bool = False, error: str = "", **meta) -> dict:
    outputs = [{"output_type": "error", "ename": "WrongAnswer", "evalue": error, "traceback": []}] if error else []
    made = {
        "cell_type": "code",
        "id": grade_id or "plain",
        "metadata": {"nbgrader": {"grade_id": grade_id, **meta}} if grade_id else {},
        "source": [source],
        "execution_count": 1 if run else None,
        "outputs": outputs,
    }
    return made


def heading(text: str) -> dict:
    return {"cell_type": "markdown", "id": "h", "metadata": {}, "source": [text]}


def test_states_points_and_titles_of_a_lab():
    notebook = {
        "cells": [
            heading("### Question 1.1: Naive GEMM (3 points)"),
            cell("q1_1_tests", run=True, grade=True, points=3),
            heading("### Bonus Question 1.1: More (5 bonus points)"),
            cell("bonus_1_1_tests", run=True, error="wrong by half\nsecond line", grade=True, points=5),
            cell("q1_2_tests", grade=True, points=7),
            cell("q1_3", grade=True, solution=True, points=4),
        ]
    }
    found = progress.parts(notebook)
    assert [(p.title, p.state, p.bonus) for p in found] == [
        ("Naive GEMM", progress.PASSED, False),
        ("More", progress.FAILED, True),
        ("", progress.NOT_RUN, False),
        ("", progress.BY_HAND, False),
    ]
    assert found[1].message == "wrong by half"
    assert progress.summary(found) == "3 of 10 points by visible checks, 0 of 5 bonus; 4 points are graded by hand."


@pytest.mark.parametrize("lab", sorted(path.name for path in ROOT.glob("lab*.ipynb")))
def test_every_point_of_every_lab_is_counted_and_has_a_title(lab):
    found = progress.parts(json.loads((ROOT / lab).read_text()))
    states = (progress.PASSED, progress.FAILED, progress.NOT_RUN, progress.BY_HAND)
    assert progress.points(found, states, False) == 100
    assert all(part.title for part in found)


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(progress, "OUT", tmp_path / "out")
    shutil.copy(ROOT / "lab3_gluon.ipynb", tmp_path)
    return tmp_path / "lab3_gluon.ipynb"


def test_reset_brings_the_untouched_lab_back_and_keeps_the_work(course):
    untouched = course.read_bytes()
    progress.keep_original(course)
    work = untouched.replace(b"YOUR ANSWER HERE", b"my answer")
    course.write_bytes(work)
    progress.keep_original(course)  # opening the lab again must not replace the original by work
    first = progress.reset(course)
    assert course.read_bytes() == untouched and first.read_bytes() == work
    course.write_bytes(b"half a noteb")
    second = progress.reset(course)
    assert second != first and second.read_bytes() == b"half a noteb" and course.read_bytes() == untouched


def test_reset_without_an_original_changes_nothing(course):
    work = course.read_bytes().replace(b"YOUR ANSWER HERE", b"my answer")
    course.write_bytes(work)
    with pytest.raises(progress.ProgressError, match=r"no untouched lab3_gluon\.ipynb was found"):
        progress.reset(course)
    assert course.read_bytes() == work


def test_a_file_that_is_no_notebook_is_one_sentence(course):
    course.write_text("{")
    with pytest.raises(progress.ProgressError, match="is no notebook"):
        progress.read_notebook(course)


SMALL = {
    "nbformat": 4,
    "nbformat_minor": 5,
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    "cells": [
        cell("", "from utils.checking import Verdict"),
        cell("q1_1_tests", "Verdict('1.1', True).raise_if_wrong()", grade=True, points=3),
        cell("q1_2_tests", "Verdict('1.2', False, 'off by one').raise_if_wrong()", grade=True, points=7),
    ],
}


@pytest.mark.slow
def test_checks_run_in_a_copy(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(progress, "OUT", tmp_path / "out")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path, steps = tmp_path / "lab9.ipynb", []
    path.write_text(json.dumps(SMALL))
    found = progress.parts(progress.run_checks(path, 60, lambda done, total: steps.append((done, total))))
    assert [(part.state, part.message) for part in found] == [
        (progress.PASSED, "✓ Question 1.1: passed."),
        (progress.FAILED, "Question 1.2: off by one"),
    ]
    assert json.loads(path.read_text()) == SMALL and steps[-1] == (3, 3)
    assert capfd.readouterr().err == "", "a kernel has nothing to say on the terminal"


@pytest.mark.slow
def test_a_cell_without_end_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "OUT", tmp_path / "out")
    path = tmp_path / "lab9.ipynb"
    path.write_text(json.dumps({**SMALL, "cells": [cell("", "while True: pass")]}))
    with pytest.raises(progress.ProgressError, match="took longer than 2 s"):
        progress.run_checks(path, 2)
