"""`labs execute`: a lab from top to bottom, with the time of each cell and every error."""

import nbformat
import pytest

from instructor.execute import Execution, execute


@pytest.fixture(scope="module")
def solved(small_lab) -> Execution:
    return execute(small_lab.instructor)


def test_a_solved_lab_runs_without_errors(small_lab, solved):
    assert solved.errors == {}
    code = [cell.id for cell in nbformat.reads(small_lab.instructor, as_version=4).cells if cell.cell_type == "code"]
    assert list(solved.seconds) == code
    record = solved.record()
    assert record["environment"]["torch"] and record["total_seconds"] >= 0


def test_an_untouched_lab_runs_to_its_end(small_lab, solved):
    execution = execute(small_lab.student)
    assert list(execution.seconds) == list(solved.seconds)
    assert any("not answered" in text for text in execution.errors.values()), execution.errors


def test_an_endless_cell_is_ended():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("while True: pass")])
    with pytest.raises(Exception, match="timed out"):
        execute(nbformat.writes(notebook), timeout=3)
