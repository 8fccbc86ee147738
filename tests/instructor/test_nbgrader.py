"""Stock nbgrader on a built lab: generate, validate, autograde."""

import nbformat
import pytest
from nbclient import NotebookClient

from instructor.build import ROOT
from instructor.course import answered_notebook

# A right answer that writes to stderr in every way: nbgrader gives no points to a test cell with any stderr output.
NOISY = """\
import logging, os, warnings
handler = logging.StreamHandler()
logging.getLogger("noisy").addHandler(handler)

def gemm_broadcast(a, b):
    warnings.warn("loud")
    logging.getLogger("noisy").warning("louder")
    os.write(2, b"loudest\\n")
    return (a[:, :, None] * b[None]).sum(dim=1)
"""
FORBIDDEN = """\
def helper(a, b):
    return getattr(torch, "mat" + "mul")(a, b)

def gemm_broadcast(a, b):
    return helper(a, b)
"""


@pytest.fixture(scope="module")
def graded(small_lab, grade_notebooks):
    return grade_notebooks(
        small_lab,
        {
            "untouched": small_lab.student,
            "solved": answered_notebook(small_lab, {"q1_1": NOISY}),
            "wrong": answered_notebook(small_lab, {"q1_1": FORBIDDEN, "q1_3": "macs = = 3"}),
        },
    )


def automatic(scores):
    return {name: score.auto for name, score in scores.items()}


@pytest.mark.slow
def test_release_is_the_students_notebook(small_lab, graded):
    course, _ = graded
    released = course.root / "release" / small_lab.name
    assert [p.name for p in released.iterdir()] == [f"{small_lab.name}.ipynb"]
    assert (released / f"{small_lab.name}.ipynb").read_text() == small_lab.student


@pytest.mark.slow
def test_untouched_notebook_gets_nothing_and_no_crash(graded):
    scores = graded[1]["untouched"]
    assert automatic(scores) == {"q1_1_tests": 0, "q1_2": 0, "q1_3_tests": 0, "bonus_1_4_tests": 0}
    assert not any(score.needs_manual_grade for score in scores.values())


@pytest.mark.slow
def test_solved_notebook_gets_every_automatic_point(graded):
    scores = graded[1]["solved"]
    assert automatic(scores) == {"q1_1_tests": 6, "q1_2": None, "q1_3_tests": 2.5, "bonus_1_4_tests": 3}
    assert [name for name, score in scores.items() if score.needs_manual_grade] == ["q1_2"]
    assert sum(score.points for score in scores.values()) == 15.5


@pytest.mark.slow
def test_wrong_answers_lose_their_questions_alone(graded):
    assert automatic(graded[1]["wrong"]) == {"q1_1_tests": 0, "q1_2": None, "q1_3_tests": 0, "bonus_1_4_tests": 3}


@pytest.mark.slow
def test_autograded_cells_say_what_was_wrong(small_lab, graded):
    course, _ = graded

    def error_of(student, cell_id):
        path = course.root / "autograded" / student / small_lab.name / f"{small_lab.name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        (cell,) = (c for c in notebook.cells if c.metadata.get("nbgrader", {}).get("grade_id") == cell_id)
        (error,) = (o for o in cell.outputs if o.output_type == "error")
        return error

    assert error_of("untouched", "q1_1_tests").evalue == "Question 1.1 is not answered yet."
    forbidden = error_of("wrong", "q1_1_tests")
    assert "matmul" in forbidden.evalue and "in helper, line 2" in forbidden.evalue
    assert "multiply and sum" in forbidden.evalue.lower()
    assert len(forbidden.traceback) == 1  # the message alone, without the frames of the checks


@pytest.mark.slow
def test_validate(small_lab, graded):
    course, _ = graded
    (course.root / "mine").mkdir()
    (course.root / "mine" / "untouched.ipynb").write_text(small_lab.student)
    output = course.nbgrader("validate", "mine/untouched.ipynb")
    assert "VALIDATION FAILED ON 4 CELL(S)" in output.replace("\n", " ")
    assert "Question 1.1 is not answered yet." in output


def test_run_all_on_the_untouched_notebook_reaches_its_end(small_lab, tmp_path, monkeypatch):
    """Nbclient stops at an error, as JupyterLab does, unless the cell has the tag `raises-exception`."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.reads(small_lab.student, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert notebook.cells[-1].outputs[0].text == "the end\n"
    (needing,) = (c for c in notebook.cells if c.source.startswith("later = gemm_broadcast("))
    assert needing.outputs[0].ename == "NotImplementedError"
