"""What `labs build` refuses beside the form of a source."""

import json
from types import SimpleNamespace

import pytest

from instructor.points import Question
from instructor.refusals import refusals
from instructor.source import Cell


def a_lab(*questions, hidden="hidden.gemm(gemm)"):
    """A lab of questions (number, points, bonus), whose one test cell calls a hidden check."""
    cell = {"id": "q1_1_tests", "cell_type": "code", "metadata": {"nbgrader": {"grade": True}}, "source": [hidden]}
    found = [
        Question("q", number, "", bonus, 1, [Cell("code", "", 1, nbgrader={"points": points})])
        for number, points, bonus in questions
    ]
    return SimpleNamespace(name="lab1", instructor=json.dumps({"cells": [cell]}), questions=found)


@pytest.mark.parametrize(
    ("lab", "words"),
    [
        (a_lab(("1.1", 60, False), ("2.1", 42, False)), "102 points"),
        (a_lab(("1.1", 60, False), ("1.2", 20, True), ("1.4", 40, False)), "Question 1.4 follows Question 1.2"),
        (a_lab(("1.2", 100, False)), "should be 0.1 or 1.1"),
        (a_lab(("1.1", 100, False), hidden="hidden.every_other(mask)"), "no hidden check every_other"),
        (a_lab(("1.1", 100, False), ("1.2", 5, True)), None),
    ],
)
def test_what_does_not_fit_together_is_one_sentence(tmp_path, lab, words):
    (tmp_path / "lab1").mkdir()
    (tmp_path / "lab1" / "__init__.py").write_text("from instructor.checks.lab1.gemm import gemm\n")
    found = refusals(lab, tmp_path)
    assert [words in sentence for sentence in found] == ([True] if words else []), found
