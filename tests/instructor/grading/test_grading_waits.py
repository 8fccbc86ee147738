"""An answer that passes by what no right answer needs waits for a person; honest ones do not."""

import contextlib
import copy
import io
import time

import nbformat
import pytest

from instructor.build import build_lab
from instructor.course import answered_notebook
from instructor.grading import grade_notebook
from instructor.grading.submission.engine import setup_cells
from instructor.grading.submission.plan import make_plan, plan_tests
from instructor.grading.submission.reading import Reading
from instructor.grading.submission.usual import Usual
from instructor.grading.submission.usual_operators import unusual_calls
from instructor.names import python_of
from instructor.points import lab_path
from tests.instructor.grading.attacks_blind import BLIND
from tests.instructor.grading.attacks_fourth import FIFTH, FOURTH
from tests.instructor.grading.attacks_fourth import KIN as MORE_KIN
from tests.instructor.grading.attacks_other_inputs import OTHER_INPUTS
from tests.instructor.grading.attacks_shortcuts import Shortcut, answer_of
from tests.instructor.grading.attacks_third import KIN, THIRD
from tests.instructor.grading.attacks_wait import WAITING
from tests.instructor.grading.attacks_words_lab1_lab2 import WORDS as WORDS_1_2
from tests.instructor.grading.attacks_words_lab3_lab4 import WORDS as WORDS_3_4
from tests.instructor.grading.honest_class import honest_notebook
from tests.instructor.grading.honest_variants import packs
from utils.checking.sizes import SizeWatch
from utils.checking.watching import OperationWatch

FORBIDDING = ("q1_1_tests", "q2_3_tests")  # of the suite's lab


@pytest.fixture(scope="module")
def usual(suite_lab):
    base: dict = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        for name, source in setup_cells(suite_lab):
            exec(compile(python_of(source), name, "exec"), base)
    return Usual(suite_lab.instructor, base)


def _unusual(suite_lab, usual, notebook: str) -> dict[str, list[str]]:
    """{test cell: what is unusual in its answer}, by reading alone."""
    plan = make_plan(suite_lab.instructor, suite_lab.student, notebook, plan_tests(suite_lab.instructor))
    reading = Reading(plan.steps, usual)
    tests = [step for step in plan.steps if step.kind == "tests"]
    found = {step.name: reading.unusual(step, step.name in FORBIDDING) for step in tests}
    return {name: words for name, words in found.items() if words}


PRODUCTS = {
    "a library": ("import numpy as np\ndef gemm_broadcast(a, b):\n    return torch.from_numpy(np.dot(a, b))", "numpy"),
    "insides": ("def gemm_broadcast(a, b):\n    return expect_close.__globals__['x'](a, b)", "__globals__"),
    "an attribute by its name": (
        "import operator\ndef gemm_broadcast(a, b):\n    return operator.methodcaller('numpy')(a)",
        ".numpy",
    ),
    "a helper of the course": ("def gemm_broadcast(a, b):\n    return dense_mask(a, b)", "dense_mask"),
    "text that is run": ("exec('def gemm_broadcast(a, b): return a @ b')", "out of sight"),
    "a table that torch's own module made": (
        "TABLE = torch.nn.GELU()(torch.zeros(3))\ndef gemm_broadcast(a, b):\n    return TABLE",
        ".GELU",
    ),
    "a class between": (
        "class Own(torch.Tensor):\n    pass\ndef gemm_broadcast(a, b):\n    return Own(a)",
        "class of a kind of its own",
    ),
    "a name that is changed": (
        "import ctypes\nhelper = [0]\nhelper[0] = ctypes.CDLL\ndef gemm_broadcast(a, b):\n    return helper[0](a)",
        "ctypes",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_what_no_right_answer_needs_is_seen_in_the_text(suite_lab, usual, name):
    code, words = PRODUCTS[name]
    found = _unusual(suite_lab, usual, answered_notebook(suite_lab, {"q1_1": code}))
    assert words in " ".join(found["q1_1_tests"])
    assert set(found) <= {"q1_1_tests", "q2_3_tests"}  # the MLP calls the product


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "words"),
    [('"itertools"', ""), ('"ctypes"', "imports ctypes"), ('"iter" "tools", *a', ""), ("a", "calls __import__")],
)
def test_a_module_that_is_imported_by_a_call_is_an_import(suite_lab, usual, module, words):
    code = f"def gemm_broadcast(a, b):\n    return __import__({module}).chain(a, b)"
    found = _unusual(suite_lab, usual, answered_notebook(suite_lab, {"q1_1": code}))
    assert words in " ".join(found["q1_1_tests"]) if words else not found


@pytest.mark.slow
@pytest.mark.parametrize("code", ["return wait(a, b)", "return a.wait(b)", "return helper(a, b)", "return a @ b"])
def test_what_every_right_answer_uses_is_missed(suite_lab, usual, code):
    """As `synchronize` in a profile, which has no effect on a CPU; a helper of the student's may use it."""
    needing = copy.copy(usual)
    needing.needed, needing.more = {"q1_1": "wait"}, {"q1_1": "wait"}
    code = (
        f"def helper(a, b):\n    return a.wait(b)\ndef wait(a, b):\n    return a\ndef gemm_broadcast(a, b):\n    {code}"
    )
    found = _unusual(suite_lab, needing, answered_notebook(suite_lab, {"q1_1": code}))
    assert ("does without wait" in " ".join(found.get("q1_1_tests", []))) == ("@" in code)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "word"), [("a @ b", "@"), ("torch.matmul(a, b)", ".matmul"), ("a * b", "")])
def test_a_way_that_no_input_reaches_and_the_question_forbids(suite_lab, usual, way, word):
    forbidding = copy.copy(usual)
    forbidding.forbidden = {"q1_1_tests": "@ matmul"}
    code = f"def gemm_broadcast(a, b):\n    if a.numel() > 10**9:\n        return {way}\n    return a * b"
    found = _unusual(suite_lab, forbidding, answered_notebook(suite_lab, {"q1_1": code})).get("q1_1_tests", [])
    by_size = ["may go another way for some inputs: a.numel() > 10 ** 9"]  # which waits whatever it is
    assert sorted(found) == ([f"has a way with what the question forbids: {word}"] if word else []) + by_size


@pytest.mark.slow
def test_a_cell_that_no_answer_reaches_is_the_authors_own(suite_lab, usual):
    notebook = nbformat.reads(answered_notebook(suite_lab), as_version=4)
    place = next(i for i, c in enumerate(notebook.cells) if c.id == "q1_1")
    notebook.cells.insert(place, nbformat.v4.new_code_cell("import gc, sys, ctypes\nprint(sys._getframe().f_globals)"))
    assert not _unusual(suite_lab, usual, nbformat.writes(notebook, version=4))


@pytest.mark.slow
def test_reading_follows_each_name_once(suite_lab, usual):
    """Each of n statements that bind a name leads to all n: this took n * n steps, half a minute for these."""
    code = "x = 0\n" + "x = x\n" * 20_000 + "def gemm_broadcast(a, b):\n    return x\n"
    notebook = answered_notebook(suite_lab, {"q1_1": code})
    plan = make_plan(suite_lab.instructor, suite_lab.student, notebook, plan_tests(suite_lab.instructor))
    reading = Reading(plan.steps, usual)
    began = time.process_time()
    for step in plan.steps:
        if step.kind == "tests":
            reading.unusual(step, step.name in FORBIDDING)
    assert time.process_time() - began < 5


def test_what_runs_is_held_against_the_same_lists():
    watch = OperationWatch()
    watch.operations.update(mul=3, sum=1)
    assert not unusual_calls([watch])
    assert "4 operators" in unusual_calls([watch], most=3)[0]
    watch.operations.update(fft_rfft=1)
    watch.exits.update({".numpy()": 1, ".item()": 1})
    assert [line.split()[-1] for line in unusual_calls([watch])] == ["fft_rfft", ".numpy()"]
    assert not unusual_calls([watch], ["fft_rfft", ".numpy()"])


def test_numbers_that_are_kept_are_counted():
    """What is used up before the next comes is held once; what is kept in a list is held as often."""
    import torch

    x = torch.randn(6, 10)
    with SizeWatch() as one:
        sum(torch.exp(row).sum() for row in x)
    with SizeWatch() as all_rows:
        kept = [torch.exp(row) for row in x]
        sum(row.sum() for row in kept)
    assert one.held < 15 and 60 <= all_rows.held < 70


@pytest.mark.slow
def test_honest_notebooks_do_not_wait(suite_lab, usual):
    texts = [answered_notebook(suite_lab, {cell: text for cell, (_, text) in pack.items()}) for pack in packs()]
    texts += [honest_notebook(suite_lab, seed)[0] for seed in range(100)]
    assert not [found for text in texts if (found := _unusual(suite_lab, usual, text))]


def _packs() -> list[list[Shortcut]]:
    found: list[list[Shortcut]] = []
    for shortcut in (*WAITING, *THIRD, *KIN, *FOURTH, *FIFTH, *MORE_KIN, *WORDS_1_2, *WORDS_3_4, *BLIND, *OTHER_INPUTS):
        room = (p for p in found if p[0].lab == shortcut.lab and all(o.cell != shortcut.cell for o in p))
        if (pack := next(room, None)) is None:
            found.append(pack := [])
        pack.append(shortcut)
    return found


@pytest.mark.overnight
@pytest.mark.slow
@pytest.mark.parametrize("pack", _packs(), ids=lambda p: f"{p[0].lab}, {p[0].name}")
def test_a_shortcut_is_refused_or_waits(pack):
    built = build_lab(lab_path(pack[0].lab))
    cells = nbformat.reads(built.instructor, as_version=4).cells
    lines = {c.id: [line for line in c.source.split("\n") if line.strip()[:3] != "###"] for c in cells}
    model = {name: "\n".join(text) for name, text in lines.items()}
    result = grade_notebook(built, answered_notebook(built, {s.cell: answer_of(s, model) for s in pack}), timeout=150)
    got = {s.name: (result.cells[s.tests].points, result.cells[s.tests].status) for s in pack}
    assert not [name for name, (points, _) in got.items() if points], got
    waiting = [s for s in pack if result.cells[s.tests].status == "flagged"]
    assert {f.question for f in result.flags if f.kind == "unusual"} >= {
        s.tests.split("_tests")[0][:4] for s in waiting
    } - {"bonu"}
