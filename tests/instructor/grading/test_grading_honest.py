"""Right answers, however they are written: every point, no flag."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell

from instructor.course import answered_notebook
from instructor.grading import grade_notebook
from instructor.grading.sandbox.walls import Limits
from tests.instructor.grading.honest_class import HABITS, honest_notebook
from tests.instructor.grading.honest_variants import ANSWERS, NOTEBOOKS, packs

TIMEOUT = 20  # seconds


def test_there_are_enough_variants():
    texts = [text for variants in ANSWERS.values() for text in variants.values()]
    assert len(texts) >= 100 and len(set(texts)) == len(texts)
    assert len(NOTEBOOKS) >= 30


def _submissions():
    """Yield submissions: each has one pack of answers, and some of the changes around them."""
    packed, names = list(packs()), list(NOTEBOOKS)
    for number, pack in enumerate(packed):
        around, name = names[number :: len(packed)], next(iter(pack.values()))[0]
        yield pytest.param(pack, around, id=f"{name}, {number}", marks=pytest.mark.slow)


@pytest.mark.parametrize(("pack", "around"), list(_submissions()))
def test_right_answers_get_every_point(suite_lab, full_points, pack, around):
    text = answered_notebook(suite_lab, {cell: text for cell, (_, text) in pack.items()})
    notebook = nbformat.reads(text, as_version=4)
    for name in around:
        NOTEBOOKS[name](notebook)
    result = grade_notebook(suite_lab, nbformat.writes(notebook, version=4), timeout=TIMEOUT)
    lost = {
        name: (cell.status, cell.message, pack.get(name.removesuffix("_tests"), [""])[0], around)
        for name, cell in result.cells.items()
        if name in full_points and cell.points != full_points[name]
    }
    assert not lost
    assert not result.flags, around
    assert result.score == sum(full_points.values())


def _check_class(lab, full_points, seeds, prove: bool) -> None:
    """Grade one notebook for each seed; report all that lost points or were flagged, with what was drawn for them."""
    wrong = {}
    for seed in seeds:
        text, drawn = honest_notebook(lab, seed)
        result = grade_notebook(lab, text, timeout=TIMEOUT, limits=Limits(prove=prove))
        lost = {n: (c.status, c.message) for n, c in result.cells.items() if c.points != full_points.get(n, c.points)}
        if lost or result.flags:
            wrong[seed] = (lost, result.flags, drawn)
    assert not wrong


@pytest.mark.overnight
@pytest.mark.slow
@pytest.mark.parametrize("prove", [False, True])
def test_a_hundred_honest_notebooks_lose_nothing(suite_lab, full_points, prove):
    assert len(HABITS) <= 100
    _check_class(suite_lab, full_points, range(100), prove)


UNUSUAL = (
    "%%writefile mine.py\nfactor = 2",
    "import mine\n\nassert mine.factor == 2",
    "import inspect\n\nprint(inspect.currentframe().f_lineno)",
    "import gc\n\nprint(len(gc.get_objects()) > 0)",
    "import atexit\n\natexit.register(print, 'done')",
    "import urllib.request\n\ntry:\n    urllib.request.urlopen('http://127.0.0.1:9', timeout=1)\n"
    "except OSError:\n    print('offline')",
    "torch.set_default_dtype(torch.float64)",
)


@pytest.mark.slow
def test_unusual_code_is_noted_at_most_and_keeps_its_points(suite_lab, full_points):
    notebook = nbformat.reads(answered_notebook(suite_lab), as_version=4)
    places = {cell.id: place for place, cell in enumerate(notebook.cells)}
    after = [new_code_cell("torch.set_default_dtype(torch.float32)")]
    notebook.cells[places["q1_1_tests"] + 1 : places["q1_1_tests"] + 1] = after
    notebook.cells[places["q1_1"] : places["q1_1"]] = [new_code_cell(text) for text in UNUSUAL]
    result = grade_notebook(suite_lab, nbformat.writes(notebook, version=4), timeout=TIMEOUT)
    assert {n: c.points for n, c in result.cells.items() if n in full_points} == full_points, result.flags
    assert {flag.kind for flag in result.flags} <= {"inspects frames or objects", "runs at the end", "network"}
