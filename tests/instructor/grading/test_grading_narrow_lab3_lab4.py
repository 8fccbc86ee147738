"""Labs 3 and 4: an answer is held against the words of its own question; what is measured beside them, at a distance too."""

import contextlib
import io
import re

import nbformat
import pytest
import torch

from instructor.build import build_lab
from instructor.checks.lab4_sdpa.products import Meetings, NarrowProducts
from instructor.course import answered_notebook
from instructor.grading import grade_notebook
from instructor.grading.submission.engine import setup_cells
from instructor.grading.submission.plan import make_plan, plan_tests, question_of
from instructor.grading.submission.reading import Reading, unusual_file
from instructor.grading.submission.usual_operators import unusual_calls
from instructor.grading.submission.usual_words import NARROW_OPERATORS, usual_in
from instructor.names import python_of
from instructor.points import lab_path
from tests.instructor.grading import honest_own_names, honest_styles_lab3, honest_styles_lab4
from tests.instructor.grading.attacks_blind_again import BLIND_AGAIN
from tests.instructor.grading.attacks_other_inputs import OTHER_INPUTS
from tests.instructor.grading.attacks_tenth import TENTH_BY_TEXT
from utils.checking.watching import watch_operations

pytestmark = pytest.mark.slow  # the setups of two labs
FORBIDDING = ("q2_2_tests", "q3_2_part_tests", "q3_2_tests", "bonus_2_4_tests")


def _usual(lab: str) -> tuple:
    """(the lab, {cell: model answer}, what is usual in it)."""
    built, base = build_lab(lab_path(lab)), {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        for name, source in setup_cells(built):
            exec(compile(python_of(source), name, "exec"), base)
    cells = nbformat.reads(built.instructor, as_version=4).cells
    model = {c.id: "\n".join(line for line in c.source.split("\n") if line.strip()[:3] != "###") for c in cells}
    return built, model, usual_in(lab, built.instructor, base)


@pytest.fixture(scope="module")
def lab4():
    return _usual("lab4_sdpa")


@pytest.fixture(scope="module")
def lab3():
    return _usual("lab3_gluon")


def _found(lab, answers: dict[str, str]) -> dict[str, list[str]]:
    """{test cell: what is unusual in the text of the answers}."""
    built, _, usual = lab
    notebook = answered_notebook(built, answers)
    plan = make_plan(built.instructor, built.student, notebook, plan_tests(built.instructor))
    reading, asked = Reading(plan.steps, usual), {question_of(cell) for cell in answers}
    steps = [step for step in plan.steps if step.kind == "tests" and step.question in asked]
    found = {step.name: reading.unusual(step, step.name in FORBIDDING) for step in steps}
    return {name: words for name, words in found.items() if words}


OF_LAB_4 = honest_styles_lab4.STUDENTS | {
    name: student for name, student in honest_own_names.STUDENTS.items() if student[0] == "lab4_sdpa"
}


@pytest.mark.parametrize("name", OF_LAB_4)
def test_an_honest_text_of_lab_4_does_not_wait(lab4, name):
    answers = {cell: text.lstrip("\n") for cell, text in OF_LAB_4[name][1].items()}
    assert not _found(lab4, answers)


@pytest.mark.parametrize("name", honest_styles_lab3.STUDENTS)
def test_an_honest_file_of_lab_3_does_not_wait(lab3, name):
    for cell, changes in honest_styles_lab3.STUDENTS[name][1].items():
        text = lab3[1][cell]
        for old, new in changes.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        assert not unusual_file(text.partition("\n")[2], lab3[2], question_of(cell))


WAITS = {
    "sorting in a function that attends": (
        "q3_2",
        "def attend_part(q, k, v):\n    return q.sort()\ndef split_kv_attention(q, k, v, splits):\n    return q",
        ".sort",
    ),
    "memory put under an input": ("q4_3", "def ready_for_flash(x):\n    x.data = x.clone()\n    return x", ".data"),
    "memory set": ("q4_3", "def ready_for_flash(x):\n    return x.set_(x.clone())", ".set_"),
    "signs and places": (
        "bonus_2_4",
        "def attention_backward(q, k, v, *a):\n    return torch.where(q > 0, q, v)",
        ".where",
    ),
    "copies where a pin is": ("q1_3", "def pinned_sdpa(backend, q, k, v, **o):\n    return q.clone()", ".clone"),
    "a limit of one's own": ("q4_3", "def ready_for_flash(x):\n    return x if x.shape[2] < 5000 else x + 0", "5000"),
    "a GPU": ("q4_3", "def ready_for_flash(x):\n    return x if x.device.type == 'cuda' else x", "cuda"),
    "a sum of hundreds": (
        "q4_3",
        f"def ready_for_flash(x):\n    return x if x.ndim < {'1 + ' * 600}1 else x",
        "too many parts",
    ),
    "an operator of Python's": ("q1_3", "def pinned_sdpa(backend, q, k, v, **o):\n    return q @ k", "MatMult"),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_the_question_does_not_need_waits(lab4, name):
    cell, text, word = WAITS[name]
    assert word in str(_found(lab4, {cell: text}))


@pytest.mark.parametrize("shortcut", [s for s in TENTH_BY_TEXT if s.lab == "lab4_sdpa"], ids=lambda s: s.name)
def test_what_changes_a_value_by_a_call_is_read(lab4, shortcut):
    assert shortcut.words in "; ".join(_found(lab4, {shortcut.cell: shortcut.code})[shortcut.tests])


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("    tile = gl.gather(tile, rows, 0)\n", ".gather"),
        ("    if m > 4096:\n        return\n", "m > 4096"),
        ("    if row > 0:\n        return\n", "row > 0"),
        ("    if gl.program_id(0) == 3:\n        return\n", "gl.program_id(0) == 3"),
    ],
)
def test_what_no_kernel_of_the_question_needs_waits(lab3, line, word):
    text = lab3[1]["q2_2"].partition("\n")[2]
    place = "    tile = gl.convert_layout(tile, writing)\n"
    assert word in str(unusual_file(text.replace(place, line + place), lab3[2], "q2_2"))
    imported = text.replace("@gluon.jit", "from triton.language import histogram\n\n\n@gluon.jit", 1)
    assert ".histogram" in str(unusual_file(imported, lab3[2], "q2_2"))


@pytest.mark.parametrize("own", ['NAME = "gather"', "class Own:\n    gather: int = 0"])
def test_a_word_of_the_language_stays_one_whatever_the_file_calls_its_own(lab3, own):
    text = lab3[1]["q2_2"].partition("\n")[2]
    place = "    tile = gl.convert_layout(tile, writing)\n"
    changed = text.replace(place, "    tile = gl.gather(tile, rows, 0)\n" + place)
    assert changed != text and ".gather" in str(unusual_file(f"{changed}\n\n{own}\n", lab3[2], "q2_2"))


def test_operators_are_held_against_the_list_of_the_question():
    x = torch.rand(3, 4) + 1
    with watch_operations() as watch:
        (x @ x.T).exp().sum()
    narrow = NARROW_OPERATORS["lab4_sdpa"]["bonus_2_4_tests"]
    assert not unusual_calls([watch], narrow=narrow)
    with watch_operations() as watch:
        x.log().cumsum(0).sort()
    assert "cumsum, log, sort" in unusual_calls([watch], narrow=narrow)[0]
    assert not unusual_calls([watch])


def test_keys_that_meet_queries_twice_are_counted():
    q, k = torch.randn(2, 30, 8), torch.randn(2, 50, 8)
    product = q.numel() * 50
    for write in (
        lambda: q @ k.mT,
        lambda: (q[:, :, None] * k[:, None]).sum(-1),
        lambda: [(q * k[:, j : j + 1]).sum(-1) for j in range(50)],
        lambda: torch.einsum("bid,bjd->bij", q, k * 2.0 + torch.zeros(8)),
        lambda: [(q[:, i : i + 1] * k).sum(-1) for i in range(30)],
    ):
        with Meetings(k.shape) as once:
            write()
        with Meetings(k.shape) as twice:
            copied = torch.zeros_like(k).copy_(k)
            write()
            q @ copied.mT
        assert 0.9 * product < max(once.pairs.values()) < 1.1 * product
        assert sum(twice.pairs.values()) > 1.9 * product
        once.expect_once(product, 0, "this")
        with pytest.raises(AssertionError, match="meet other numbers"):
            twice.expect_once(product, 0, "this")


def test_products_in_fewer_bits_are_noted():
    x = torch.randn(3, 4)
    with NarrowProducts() as wide:
        torch.softmax(x.double() @ x.double().T, -1).mul_(2.0)
        torch.ones(4, 4).triu(1).masked_fill(torch.ones(4, 4).bool(), 0.0)
    with NarrowProducts() as narrow:
        torch.softmax((x @ x.T).double(), -1)
    with NarrowProducts() as rounded:
        (x.double() @ x.double().T).float().double()
    assert not wide.found and list(narrow.found) == ["mm in float32"] and list(rounded.found) == ["_to_copy in float32"]


_WITHOUT_A_FILTER = '''
def why_not(backend, q, k, v, **options):
    """Its caller may have silenced warnings, and it sets no filter of its own."""
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings(record=True) as said:
        try:
            F.scaled_dot_product_attention(q, k, v, **options)
            return []
        except RuntimeError as error:
            first_line = str(error).splitlines()[0]
    reasons = [str(warning.message).split(" (Triggered internally")[0] for warning in said]
    reasons = [text for text in reasons if "not used because" not in text and "runtime disabled" not in text]
    return list(dict.fromkeys(reasons)) or [first_line]
'''
_LEAVES_A_FILTER = next(s.code for s in OTHER_INPUTS if s.name.startswith("1.2 filter"))


@pytest.mark.slow
@pytest.mark.parametrize("text", [_WITHOUT_A_FILTER, _LEAVES_A_FILTER], ids=["none of its own", "one is left"])
def test_filters_of_warnings_are_those_of_the_caller_at_a_distance(lab4, text):
    result = grade_notebook(lab4[0], answered_notebook(lab4[0], {"q1_2": text.lstrip("\n")}), timeout=120)
    assert result.cells["q1_2_tests"].status == "failed" and not result.flags


def test_the_last_blind_round_would_wait_by_its_words(lab4):
    """Two of its answers, whatever the checks measure now."""
    for name, word in (("2.4", ".where"), ("4.3", ".set_")):
        shortcut = next(s for s in BLIND_AGAIN if s.name.startswith(name))
        assert word in str(_found(lab4, {shortcut.cell: re.sub(r"^\n", "", shortcut.code)}))
