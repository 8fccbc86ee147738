"""A lab from top to bottom, with the time of each cell and every error."""

import nbformat
import pytest

from instructor.execute import execute


@pytest.mark.slow
def test_an_untouched_lab_runs_to_its_end(small_lab):
    """The solved labs are executed by the tests of the labs."""
    execution = execute(small_lab.student)
    code = [cell.id for cell in nbformat.reads(small_lab.student, as_version=4).cells if cell.cell_type == "code"]
    assert list(execution.seconds) == code
    assert any("not answered" in text for text in execution.errors.values()), execution.errors
    record = execution.record()
    assert record["environment"]["torch"] and record["total_seconds"] >= 0


def test_an_endless_cell_is_ended():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import time; time.sleep(60)")])
    with pytest.raises(Exception, match="timed out"):
        execute(nbformat.writes(notebook), timeout=1)
