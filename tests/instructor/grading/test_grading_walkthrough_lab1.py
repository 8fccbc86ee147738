"""From the bundle to the exported CSV: lab 1."""

import pytest

from tests.instructor import lab1_wrong_answers
from tests.instructor.grading.walkthrough import exported, mistake, released, walk


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_lab_1(tmp_path):
    seconds = mistake(lab1_wrong_answers, "latency taken as seconds")
    lab = released("lab1", tmp_path / "release", ("q1_1", "q2_3"), seconds)
    due = walk(lab, tmp_path / "course")
    assert exported(tmp_path / "course") == due
