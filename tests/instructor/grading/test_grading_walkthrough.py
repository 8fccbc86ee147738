"""From the bundle to the exported CSV: labs 2 and 4 in one course, one of them handed in through a platform's zip."""

import pytest

from tests.instructor import lab2_wrong_answers, lab4_wrong_answers
from tests.instructor.grading.walkthrough import exported, mistake, released, walk


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_labs_2_and_4(tmp_path):
    course = tmp_path / "course"
    window = mistake(lab2_wrong_answers, "window one too wide")
    lab2 = released("lab2_flexattention", tmp_path / "release", ("q1_1", "q2_1"), window)
    due = walk(lab2, course, zipped=True, whole=False)
    causal = mistake(lab4_wrong_answers, "causal costs as much as full")
    lab4 = released("lab4_sdpa", tmp_path / "release", ("q1_1", "q2_1"), causal)
    due |= walk(lab4, course, whole=False)
    assert exported(course) == due
