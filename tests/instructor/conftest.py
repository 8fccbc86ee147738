"""Tools for tests of labs: build one from its source, and grade notebooks with stock nbgrader."""

from pathlib import Path

import pytest

from instructor.build import Built, build_lab
from instructor.course import Course, Score

FIXTURE_LAB = Path(__file__).parent / "fixture_lab.py"


@pytest.fixture(scope="session")
def small_lab() -> Built:
    """A lab of four small questions: two automatic, one by hand, one bonus."""
    return build_lab(FIXTURE_LAB)


@pytest.fixture(scope="session")
def grade_notebooks(tmp_path_factory):
    """`grade_notebooks(built, {student: notebook})` -> (course, {student: {cell id: Score}}), by stock nbgrader."""

    def grade(
        built: Built, notebooks: dict[str, str], timeout: int = 300
    ) -> tuple[Course, dict[str, dict[str, Score]]]:
        course = Course(tmp_path_factory.mktemp("course"), timeout=timeout)
        course.release(built)
        for student, notebook in notebooks.items():
            course.submit(built.name, student, notebook)
        return course, course.grade(built.name)

    return grade
