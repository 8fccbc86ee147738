"""Attacks of many kinds on notebooks without one right answer: no point, no leak, nothing left behind, nobody else harmed."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell

from instructor.course import answered_notebook
from instructor.grading import grade_notebook
from tests.instructor.grading.attacks import COST, NUMBER, WRONG
from tests.instructor.grading.attacks_night import VALUES, night_attacks
from tests.instructor.grading.test_grading_attacks import TOKEN, _changes, _sleepers, hidden_lines, surroundings

__all__ = ["hidden_lines", "surroundings"]  # fixtures
pytestmark = [pytest.mark.overnight, pytest.mark.slow]


def test_there_are_sixty_kinds():
    assert len(night_attacks()) >= 60


@pytest.mark.parametrize("name", night_attacks())
def test_an_attack_on_wrong_answers_gets_nothing(suite_lab, surroundings, hidden_lines, name):
    code = surroundings.fill_in(night_attacks()[name])
    answers = dict(WRONG)
    if name in VALUES:
        answers |= {NUMBER: code, COST: code}
    notebook = nbformat.reads(answered_notebook(suite_lab, answers), as_version=4)
    if name not in VALUES:
        place = next(
            i for i, c in enumerate(notebook.cells) if c.metadata.get("nbgrader", {}).get("grade_id") == "q1_1"
        )
        notebook.cells.insert(place, new_code_cell(code))
    result = grade_notebook(suite_lab, nbformat.writes(notebook, version=4), timeout=2)
    assert result.score == 0, {n: (c.status, c.points, c.message) for n, c in result.cells.items() if c.points}
    shown = result.notebook + "".join(cell.message for cell in result.cells.values())
    assert TOKEN not in shown and not [line for line in hidden_lines if line in shown]
    assert not _changes(surroundings) and not _sleepers() and surroundings.connections() == 0


def test_the_next_submission_gets_every_point(suite_lab, full_points):
    result = grade_notebook(suite_lab, answered_notebook(suite_lab), timeout=20)
    assert result.score == sum(full_points.values()) and not result.flags
