"""Right answers, however they are written: every point, no flag."""

import nbformat
import pytest

from instructor.course import answered_notebook
from instructor.grading import grade_notebook
from tests.instructor.grading.honest_variants import ANSWERS, NOTEBOOKS, packs

TIMEOUT = 20  # seconds


def test_there_are_enough_variants():
    texts = [text for variants in ANSWERS.values() for text in variants.values()]
    assert len(texts) >= 100 and len(set(texts)) == len(texts)
    assert len(NOTEBOOKS) >= 30


def _submissions():
    """Each pack of answers in a notebook with its share of the changes around them."""
    packed, names = list(packs()), list(NOTEBOOKS)
    for number, pack in enumerate(packed):
        around, name = names[number :: len(packed)], next(iter(pack.values()))[0]
        yield pytest.param(pack, around, id=f"{name}, {number}", marks=[pytest.mark.slow] if number else [])


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
