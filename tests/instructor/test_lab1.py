"""Lab 1: the model answers pass every check, each wrong answer loses its question, and the notebook runs."""

import importlib.util
import json
import math
import time

import nbformat
import pytest
import torch

from instructor.checks.common import Draw
from instructor.course import answered_notebook
from tests.instructor import lab_cases
from tests.instructor.every_lab import *  # noqa: F403
from tests.instructor.lab1_right_answers import RIGHT_ANSWERS
from tests.instructor.lab1_wrong_answers import FILE, WRONG_ANSWERS

LAB = "lab1"
TRITON = "q1_5_tests"  # takes the file's text instead of a function
BY_HAND = {"q1_3_explain": 3, "q2_4": 5, "q3_5": 5, "q4_5": 5, "q5_5": 4}


def _namespace(answers):
    """The names of the setup cell, and the student's functions."""
    import torch.nn.functional as F

    import utils

    names = {name: getattr(utils, name) for name in utils.__all__ if not name.startswith(("plot_", "measure_"))}
    names |= {"torch": torch, "F": F, "math": math, "time": time, "json": json}
    return lab_cases.run_answers(answers, names)


def _verdicts(calls, checks, names, file_text=None):
    """{id of a test cell: Verdict}; the Triton file is judged only if its text is given."""
    verdicts = lab_cases.verdicts_on({cell: call for cell, call in calls.items() if cell != TRITON}, names, checks)
    return verdicts if file_text is None else {**verdicts, TRITON: checks.gemm_triton(file_text)}


def _file_text(answers):
    first, text = answers["q1_5"].split("\n", 1)
    assert first == f"%%writefile {FILE}"
    return text


def test_hundred_points_and_twenty(lab):
    assert lab_cases.points_of(lab) == (100, 20)


@pytest.mark.parametrize("seed", range(3))
def test_model_answers_pass_with_fresh_inputs(calls, checks, answers, seed):
    verdicts = _verdicts(calls, checks, _namespace(answers), _file_text(answers) if seed == 0 else None)
    assert lab_cases.refusals(verdicts) == []


def test_inputs_are_fresh_and_repeatable():
    assert not torch.equal(Draw(None).normal(9), Draw(None).normal(9))
    assert torch.equal(Draw(5).normal(9), Draw(5).normal(9))


def test_there_are_enough_mistakes(calls):
    lab_cases.assert_mistakes_cover(WRONG_ANSWERS, calls, at_least=25)


@pytest.mark.parametrize("wrong", WRONG_ANSWERS, ids=lambda wrong: wrong.mistake)
def test_wrong_answer_loses_its_question_alone(calls, checks, answers, wrong):
    names, file_text = _namespace(answers), None
    exec(compile(wrong.code, wrong.cell, "exec"), names)
    if wrong.replaces:
        file_text = _file_text(answers)
        for old, new in wrong.replaces:
            file_text = lab_cases.replaced_once(file_text, old, new)
    verdicts = _verdicts(calls, checks, names, file_text)
    lab_cases.assert_loses_alone(verdicts, wrong, every_message=False)


@pytest.mark.parametrize("right", RIGHT_ANSWERS, ids=lambda right: right[0])
def test_another_right_answer_passes(calls, checks, answers, right):
    _, cell, code = right
    names = _namespace(answers)
    exec(compile(code, cell, "exec"), names)
    assert lab_cases.refusals(_verdicts(lab_cases.calls_of(cell, calls), checks, names)) == []


@pytest.mark.gpu
def test_model_answers_run_on_a_gpu(answers, tmp_path):
    """The checks feed CPU tensors; here the same functions get tensors on the GPU, and the Triton file is compiled."""
    names = _namespace(answers)

    def close(got, expected):
        assert got.device == expected.device
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)

    a, b = torch.randn(9, 11, device="cuda"), torch.randn(11, 7, device="cuda")
    product = (a.double() @ b.double()).float()
    close(names["gemm_naive"](a, b), product)
    close(names["gemm_tiled"](a, b, 4, 4, 4), product)
    x = torch.randn(100, device="cuda")
    close(names["gelu_by_hand"](x), torch.nn.functional.gelu(x, approximate="tanh"))
    q, k, v = (torch.randn(1, 2, 50, 16, device="cuda") for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    for function in ("standard_attention", "flash_attention_tiled"):
        close(names[function](q, k, v), attend(q, k, v))
    close(names["flash_attention_causal"](q, k, v, 16, 16), attend(q, k, v, is_causal=True))

    path = tmp_path / FILE
    path.write_text(_file_text(answers))
    spec = importlib.util.spec_from_file_location("gemm_triton", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(200, 130, device="cuda", dtype=dtype), torch.randn(130, 90, device="cuda", dtype=dtype)
        expected = (a.double() @ b.double()).to(dtype)
        torch.testing.assert_close(module.gemm(a, b), expected, rtol=2e-2, atol=2e-2)


# ---- the notebook ------------------------------------------------------------------------------------------------


def test_the_lab_reads_well(lab):
    """Figures are there and described; a prediction comes before the measurements."""
    prose = lab_cases.prose_of(lab.student)
    lab_cases.assert_figures_are_described(prose, at_least=6)
    assert prose.count("**Before you run.**") >= 10


WRONG = {wrong.mistake: wrong for wrong in WRONG_ANSWERS}
MISTAKES = [WRONG["F.linear"], WRONG["forgets GQA"], WRONG["K not masked"]]


@pytest.fixture(scope="module")
def graded(lab, answers, grade_notebooks):
    """Stock nbgrader on the solved and the untouched notebook, and on one with three mistakes, whose student deleted
    all plain code cells: grading needs none of them, and they take the most time.
    """
    changed = {}
    for wrong in MISTAKES:
        text = f"{answers[wrong.cell]}\n\n{wrong.code}" if wrong.code else answers[wrong.cell]
        for old, new in wrong.replaces:
            text = lab_cases.replaced_once(text, old, new)
        changed[wrong.cell] = text
    mistaken = nbformat.reads(answered_notebook(lab, changed), as_version=4)
    mistaken.cells = [c for c in mistaken.cells if c.cell_type != "code" or "nbgrader" in c.metadata]
    return lab_cases.graded_by_nbgrader(lab, grade_notebooks, mistaken=nbformat.writes(mistaken))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_solved_lab_is_quick(graded):
    lab_cases.assert_solved_is_quick(graded)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_mistakes_lose_their_points_alone(graded):
    assert graded.not_full("mistaken").keys() == set().union(*(wrong.lost for wrong in MISTAKES))
