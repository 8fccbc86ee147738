"""Tests that each lab must pass. A lab's test file takes them in by `from tests.instructor.every_lab import *`; they go
by its LAB (the lab's name) and BY_HAND ({id of an answer graded by hand: points}).
"""

import pytest

from tests.instructor import lab_cases

__all__ = [
    "test_a_missing_answer_stops_only_cells_that_say_so",
    "test_every_check_is_used_by_one_cell",
    "test_graded_cells_need_no_plain_cell",
    "test_solved_lab_gets_every_point",
    "test_untouched_lab_gets_nothing_and_says_what_is_missing",
    "test_verdicts_name_their_question",
]


def test_every_check_is_used_by_one_cell(calls, checks):
    lab_cases.assert_each_check_has_its_cell(calls, checks)


def test_verdicts_name_their_question(calls, checks):
    lab_cases.assert_verdicts_name_their_question(calls, checks)


def test_a_missing_answer_stops_only_cells_that_say_so(cells):
    lab_cases.assert_missing_answers_stop_only_cells_that_say_so(cells)


def test_graded_cells_need_no_plain_cell(cells):
    lab_cases.assert_graded_cells_need_no_plain_cell(cells)


@pytest.mark.slow
@pytest.mark.timeout(1500)  # whole notebooks, on a machine that may be busy
def test_solved_lab_gets_every_point(graded, lab, request):
    lab_cases.assert_solved_gets_every_point(graded, request.module.BY_HAND, points=sum(lab_cases.points_of(lab)))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_untouched_lab_gets_nothing_and_says_what_is_missing(graded):
    lab_cases.assert_untouched_says_what_is_missing(graded)
