"""What breaks costs its own question: earlier and later ones keep their points, and the verdict comes in time."""

import json
import time
from dataclasses import asdict

import nbformat
import pytest

from instructor.course import answered_notebook
from instructor.grading.sandbox.walls import Limits
from instructor.grading.submission import engine
from instructor.grading.submission.engine import calibrate, grade_notebook
from instructor.grading.submission.outputs import clean_outputs
from instructor.grading.submission.plan import Unreadable, make_plan
from instructor.names import python_of
from tests.instructor.grading.attacks import packed
from tests.instructor.grading.faults import BROKEN_FILES, FAULTS, ODD_FILES

TIMEOUT = 4  # seconds
LIMITS = Limits(memory_gb=1.0, processes=32, scratch_mb=64, file_mb=32)  # no fault harms the machine of the test
QUICK = {"timeout": TIMEOUT, "limits": LIMITS}


def _points(result) -> dict[str, float]:
    """Return the points of each test cell."""
    return {name: cell.points for name, cell in result.cells.items() if name.endswith("_tests")}


@pytest.fixture(scope="module")
def untouched(suite_lab):
    return grade_notebook(suite_lab, suite_lab.student, **QUICK)


@pytest.fixture(scope="module")
def walls(untouched):
    """The walls that this machine allows."""
    return untouched.walls


@pytest.mark.slow
@pytest.mark.parametrize("faults", packed(FAULTS, 4), ids=lambda faults: f"{faults[0].name}, {len(faults)} in all")
def test_faults_cost_their_questions_alone(suite_lab, full_points, walls, faults):
    for wall in {wall for fault in faults for wall in fault.walls}:
        if walls.get(wall, "none").startswith("none"):
            pytest.skip(f"without a wall around {wall} this would harm the machine: {walls}")
    notebook = answered_notebook(suite_lab, {fault.question: fault.source for fault in faults})
    began = time.monotonic()
    result = grade_notebook(suite_lab, notebook, **QUICK)
    took = time.monotonic() - began

    loses = set().union(*(fault.loses for fault in faults))
    expected = {name: 0 if name in loses else most for name, most in full_points.items()}
    assert _points(result) == expected, ([result.cells[name] for name in loses], result.flags)
    for fault in faults:
        lost = result.cells[f"{fault.question}_tests"]
        assert lost.status in fault.statuses, (fault.name, lost)
        assert fault.says.lower() in (lost.message + result.notebook).lower(), (fault.name, lost)
    assert took < 20 * TIMEOUT  # it never hangs
    assert len(result.notebook) < 4_000_000 + len(notebook)


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_a_file_that_is_no_notebook_of_the_lab(suite_lab, name):
    """It is refused in a sentence, or has no answer in it."""
    try:
        plan = make_plan(suite_lab, BROKEN_FILES[name](answered_notebook(suite_lab)))
    except Unreadable as error:
        assert str(error).startswith(("The submitted file ", "The submitted notebook "))
    else:
        assert all(step.untouched for step in plan.steps if step.answer)


@pytest.mark.parametrize("name", ODD_FILES)
def test_a_file_that_only_looks_broken(suite_lab, name):
    """The code of every answer arrives as it was written, and its notebook can be written."""
    right = answered_notebook(suite_lab)
    plan = make_plan(suite_lab, ODD_FILES[name](right))
    for step in plan.steps:
        step.cell.outputs = [nbformat.from_dict(output) for output in clean_outputs(step.submitted)]
    written = nbformat.writes(plan.notebook, version=4).encode()
    assert len(written) < 60_000_000
    wanted = make_plan(suite_lab, right)
    answers, expected = (
        {s.name: s.source.strip() for s in p.steps if s.answer and not s.by_hand} for p in (plan, wanted)
    )
    assert answers == expected


@pytest.mark.slow
def test_another_labs_notebook_is_flagged(suite_lab, small_lab):
    (flag,) = grade_notebook(suite_lab, small_lab.student, **QUICK).flags
    assert flag.kind == "another lab"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["half characters in the outputs", "cells of 8 MB"])
def test_an_odd_file_gets_its_points_whatever_its_student_is_called(suite_lab, full_points, name):
    student = "../o'neil; rm -rf ~\n李小龍" + "a" * 200
    result = grade_notebook(suite_lab, ODD_FILES[name](answered_notebook(suite_lab)), **QUICK, student=student)
    assert _points(result) == full_points and not result.flags
    json.dumps(asdict(result), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "text",
    [
        "![x](attachment:gone.png)",
        "![x](attachment\\:gone.png)",
        "![x][y]\n\n[y]: attachment:gone.png",
        "![x](attachment:)",
        "![x](<attachment:a b.png>)",
    ],
)
def test_a_picture_that_is_missing_stops_no_page(suite_lab, text):
    """Nbconvert makes no page of such a notebook, and `labs feedback` ended without any student's."""
    from nbconvert import HTMLExporter

    notebook = nbformat.reads(answered_notebook(suite_lab), as_version=4)
    notebook.cells = [nbformat.v4.new_markdown_cell(text)]
    plan = make_plan(suite_lab, nbformat.writes(notebook, version=4))
    plan.notebook.cells = [cell for cell in plan.notebook.cells if "attachment" in cell.source]
    assert plan.notebook.cells
    HTMLExporter().from_notebook_node(plan.notebook)


@pytest.mark.slow
def test_the_untouched_notebook(untouched, full_points):
    assert _points(untouched) == dict.fromkeys(full_points, 0) and not untouched.flags
    assert all(cell.message for cell in untouched.cells.values())
    assert untouched.cells["q1_1_tests"].message == "Question 1.1 is not answered yet."


@pytest.mark.slow
def test_a_submission_has_a_time_in_all_and_is_not_tried_again(suite_lab, full_points, monkeypatch):
    calibrate(suite_lab, LIMITS)
    monkeypatch.setattr(engine, "total_seconds", lambda model, timeout: 5.0)
    notebook = nbformat.reads(answered_notebook(suite_lab), as_version=4)
    place = next(i for i, cell in enumerate(notebook.cells) if cell.id == "q2_1")
    notebook.cells[place:place] = [nbformat.v4.new_code_cell("import time\ntime.sleep(1.5)") for _ in range(40)]
    began = time.monotonic()
    result = grade_notebook(suite_lab, nbformat.writes(notebook, version=4), **QUICK)
    assert time.monotonic() - began < 30
    points = _points(result)
    assert points["q1_1_tests"] == full_points["q1_1_tests"] and points["q2_1_tests"] == 0
    assert result.cells["q2_1_tests"].status == "timeout" and "in all" in result.cells["q2_1_tests"].message


@pytest.mark.slow
def test_the_memory_of_children_counts(suite_lab, full_points, walls):
    if walls.get("processes") != "namespace":
        pytest.skip(f"without a namespace of processes their memory cannot be seen: {walls}")
    code = (
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        held = bytearray(400_000_000)\n"
        "        held[::4096] = bytes([1]) * len(held[::4096])\n        time.sleep(90)\ntime.sleep(60)\n"
    )
    # A machine short of memory takes seconds to hand out 2.4 GB: the cell's time must not be what ends it.
    result = grade_notebook(suite_lab, answered_notebook(suite_lab, {"q1_2": code}), timeout=90, limits=LIMITS)
    assert result.cells["q1_2_tests"].status == "killed"
    assert "ended" in str(result.cells["q1_2_tests"]) + result.notebook
    assert _points(result)["q3_1_tests"] == full_points["q3_1_tests"]


@pytest.mark.slow
def test_many_large_pictures_cost_no_points(suite_lab, full_points):
    """Together they are longer than the header of a frame may be."""
    code = (
        "import io, os, PIL.Image\nfrom IPython.display import Image, display\n"
        "file = io.BytesIO()\n"
        "PIL.Image.frombytes('RGB', (800, 541), os.urandom(800 * 541 * 3)).save(file, 'png')\n"
        "for _ in range(6):\n    display(Image(data=file.getvalue(), format='png'))\n"
    )
    notebook = nbformat.reads(answered_notebook(suite_lab), as_version=4)
    notebook.cells[2:2] = [nbformat.v4.new_code_cell(code) for _ in range(5)]
    result = grade_notebook(suite_lab, nbformat.writes(notebook, version=4), **QUICK)
    assert _points(result) == full_points and result.flags == ()
    assert 20_000_000 < len(result.notebook) < 25_000_000
    assert "a picture of 1.3 MB is left out" in result.notebook and "a notebook may show 24 MB" in result.notebook


@pytest.mark.parametrize("source", ["\n".join(["x = !true"] * 480) + "\n" + "# " * 90_000, "%timeit 1\n" * 600])
def test_a_cell_that_ipython_reads_for_minutes_is_read_in_seconds(source):
    began = time.process_time()
    assert python_of(source) is None
    assert time.process_time() - began < 3
