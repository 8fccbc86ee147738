"""Fixtures for the suites of grading: the lab that is attacked, and its points."""

from pathlib import Path

import pytest

from instructor.build import Built, build_lab


@pytest.fixture(scope="session")
def suite_lab() -> Built:
    """A lab with one question of each kind that the labs have."""
    return build_lab(Path(__file__).parent / "suite_lab.py")


@pytest.fixture(scope="session")
def full_points(suite_lab) -> dict[str, float]:
    """{id of a test cell: its points}, for automatic ones."""
    import nbformat

    return {
        cell.id: cell.metadata.nbgrader["points"]
        for cell in nbformat.reads(suite_lab.instructor, as_version=4).cells
        if cell.cell_type == "code" and cell.metadata.get("nbgrader", {}).get("grade")
    }
