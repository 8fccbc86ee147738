"""From the bundle to the exported CSV: lab 3, whose answers are files."""

import pytest

from tests.instructor import lab3_wrong_answers
from tests.instructor.grading.walkthrough import exported, mistake, released, walk


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_lab_3(tmp_path):
    unmasked = mistake(lab3_wrong_answers, "no mask on the store")
    lab = released("lab3_gluon", tmp_path / "release", ("q2_1", "q2_2"), unmasked)
    due = walk(lab, tmp_path / "course", whole=False)  # grading all of its kernels once is dear enough
    assert exported(tmp_path / "course") == due
