"""The last kinds of submissions that were tried: nothing stops a class, nothing forbidden counts, nothing right is lost."""

import enum
import json
import os
from collections import OrderedDict

import nbformat
import pytest
from nbformat.v4 import new_code_cell

from instructor.course import answered_notebook
from instructor.grading import grade_notebook
from instructor.grading.class_.intake import IntakeError, submissions, without_submission
from instructor.grading.submission.harmless import MAX_PICTURES
from instructor.grading.submission.outputs import clean_outputs
from instructor.grading.submission.plan import Unreadable, make_plan, plan_tests
from instructor.grading.submission.warmup import make_shell
from instructor.grading.wire.values import Decoder, Encoder
from tests.instructor.grading.attacks_last import FILES, HONEST, PRODUCTS, UNREADABLE, changed, forbidden_answers

TIMEOUT = 20  # seconds


@pytest.fixture(scope="module")
def needs(suite_lab):
    return plan_tests(suite_lab.instructor)


@pytest.mark.parametrize("name", FILES)
def test_an_odd_file_is_read_and_its_notebook_can_be_written(suite_lab, needs, name):
    text = changed(answered_notebook(suite_lab), FILES[name])
    plan = make_plan(suite_lab.instructor, suite_lab.student, text, needs)
    for step in plan.steps:
        step.cell.outputs = [nbformat.from_dict(output) for output in clean_outputs(step.submitted)]
    written = nbformat.writes(plan.notebook, version=4).encode()
    pictures = sum(len(kinds["image/png"]) for c in plan.notebook.cells for kinds in c.get("attachments", {}).values())
    assert pictures <= MAX_PICTURES and len(written) < MAX_PICTURES + 18_000_000
    assert ("Pictures are left out here" in written.decode()) == (name == "pictures of 40 MB")
    right = json.loads(answered_notebook(suite_lab))["cells"]
    answers = {c["id"]: "".join(c["source"]) for c in right if c["metadata"].get("nbgrader", {}).get("solution")}
    # Prose is cleaned; the code of every answer arrives as it was written.
    assert {s.name: s.source for s in plan.steps if s.answer and s.kind == "student"}.items() <= answers.items()


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
def test_a_picture_that_is_missing_stops_no_page(suite_lab, needs, text):
    """Nbconvert makes no page of such a notebook, and `labs feedback` ended without any student's."""
    from nbconvert import HTMLExporter

    notebook = nbformat.reads(answered_notebook(suite_lab), as_version=4)
    notebook.cells = [nbformat.v4.new_markdown_cell(text)]
    plan = make_plan(suite_lab.instructor, suite_lab.student, nbformat.writes(notebook, version=4), needs)
    plan.notebook.cells = [cell for cell in plan.notebook.cells if "gone" in cell.source or "attachment" in cell.source]
    assert plan.notebook.cells
    HTMLExporter().from_notebook_node(plan.notebook)


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_nbformat_cannot_convert_is_refused_in_words(suite_lab, needs, name):
    text = changed(answered_notebook(suite_lab), UNREADABLE[name])
    with pytest.raises(Unreadable, match="The submitted file is no notebook"):
        make_plan(suite_lab.instructor, suite_lab.student, text, needs)


def test_a_number_that_python_does_not_read_is_refused_in_words(suite_lab, needs):
    """An integer of more than 4,300 digits is a ValueError of its own, and not one of JSON."""
    text = answered_notebook(suite_lab)
    long = text.replace('"nbformat_minor"', f'"largest": {"9" * 5_000}, "nbformat_minor"', 1)
    assert len(long) > len(text) + 5_000
    with pytest.raises(Unreadable, match="The submitted file is no notebook"):
        make_plan(suite_lab.instructor, suite_lab.student, long, needs)


class _Dict(dict):
    __getattr__ = dict.get
    __iter__ = keys = items = None  # what the class says of itself is not asked


class _Number(float):
    __float__ = __mul__ = None


class _Text(str):
    __str__ = encode = None


VALUES = {
    "dict": (_Dict(a=1), {"a": 1}),
    "ordered": (type("Own", (OrderedDict,), {})(b=2), {"b": 2}),
    "float": (_Number(1.5), 1.5),
    "int": (type("Own", (int,), {"__int__": None, "__index__": None})(7), 7),
    "enumeration": (enum.IntEnum("Size", {"TILE": 64}).TILE, 64),
    "text": (_Text("x"), "x"),
    "list": (type("Own", (list,), {"__iter__": None, "__len__": lambda self: 9})([1, 2]), [1, 2]),
    "tuple": (type("Own", (tuple,), {"__iter__": None})((1, 2)), (1, 2)),
    "set": (type("Own", (set,), {"__iter__": None})({3}), {3}),
    "frozenset": (type("Own", (frozenset,), {})({3}), {3}),
    "complex": (type("Own", (complex,), {"__complex__": None})(1 + 2j), 1 + 2j),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_a_subclass_arrives_as_the_plain_value_in_it(name):
    given, expected = VALUES[name]
    encode = Encoder()
    made = Decoder([bytearray(b) for b in encode.blobs])(json.loads(json.dumps(encode(given))))
    assert made == expected and type(made) in (dict, float, int, str, list, tuple, set, complex)


def test_the_last_result_has_its_name_in_the_next_cell():
    shell = make_shell()
    try:
        for source in ("6 * 7", "kept = _", "8", "older = __"):
            assert shell.run_cell(source, store_history=False).success
        assert (shell.user_ns["kept"], shell.user_ns["older"]) == (42, 42)
        assert not shell.user_ns["_oh"]  # `Out` keeps nothing alive
    finally:
        type(shell).clear_instance()


def test_a_folder_whose_name_nothing_can_hold_is_named_and_stops_nobody(tmp_path):
    for name in (b"ada", b"\xff\xfebob", b"e" * 245, b"[a-c]da", b"two\nlines"):
        folder = bytes(tmp_path) + b"/submitted/" + name + b"/lab1"
        (tmp_path / "submitted").mkdir(exist_ok=True)

        os.makedirs(folder)
        with open(folder + b"/lab1.ipynb", "w") as file:
            file.write("{}")
    (tmp_path / "submitted" / "carl" / "lab1" / "lab1.ipynb").mkdir(parents=True)  # a folder of that name
    assert [s.student for s in submissions(tmp_path, "lab1")] == ["ada"]
    missing = without_submission(tmp_path, "lab1")
    assert set(missing) == {"??bob", "e" * 245, "carl", "[a-c]da", "two\nlines"} and "not UTF-8" in missing["??bob"]
    json.dumps(missing).encode()
    with pytest.raises(IntakeError, match="no submission of"):
        submissions(tmp_path, "lab1", ["e" * 245])


# ---- whole submissions -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_an_odd_file_gets_its_points(suite_lab, full_points, name):
    result = grade_notebook(suite_lab, changed(answered_notebook(suite_lab), FILES[name]), timeout=TIMEOUT)
    assert {n: c.points for n, c in result.cells.items() if n in full_points} == full_points
    assert not result.flags
    json.dumps(result.as_json(), ensure_ascii=False).encode()


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_by_an_operator_below_gets_nothing(suite_lab, name):
    result = grade_notebook(suite_lab, answered_notebook(suite_lab, forbidden_answers(name)), timeout=TIMEOUT)
    assert result.score == 0
    # The profiler sees what runs inside of an operator, and the record does not: such an answer is flagged as well.
    assert "may not use" in result.cells["q1_1_tests"].message or "q1_1" in {flag.question for flag in result.flags}


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_unusual_right_answers_get_every_point(suite_lab, full_points, name):
    answers, before = HONEST[name]
    notebook = nbformat.reads(answered_notebook(suite_lab, answers), as_version=4)
    place = next(i for i, c in enumerate(notebook.cells) if c.id == "q1_3")
    notebook.cells[place:place] = [new_code_cell(text) for text in before]
    result = grade_notebook(suite_lab, nbformat.writes(notebook, version=4), timeout=TIMEOUT)
    lost = {n: (c.status, c.message) for n, c in result.cells.items() if c.points != full_points.get(n, c.points)}
    assert not lost and not result.flags
