"""Lab 1: the model answers pass every check, each wrong answer loses its question, and the notebook runs."""

import importlib.util

import nbformat
import pytest
import torch

from instructor.checks.common import Draw
from instructor.course import answered_notebook
from tests.instructor import lab_cases
from tests.instructor.every_lab import EveryLab, slow
from tests.instructor.lab1_right_answers import RIGHT_ANSWERS
from tests.instructor.lab1_wrong_answers import FILE, WRONG_ANSWERS

LAB = "lab1"
BY_HAND = {"q1_3_explain": 3, "q2_4": 5, "q3_5": 5, "q4_5": 5, "q5_5": 4}
TRITON = "q1_5_tests"  # takes the file's text instead of a function
SETUP = """
import json, math, time
import torch
import torch.nn.functional as F
from utils import *
"""  # the part of the notebook's setup cell that answers use


class TestLab(EveryLab):
    points = (100, 20)
    by_hand = BY_HAND
    wrong_answers, least_mistakes = WRONG_ANSWERS, 25
    least_figures, least_predictions = 6, 10


def _verdicts(calls, checks, names, file_text=None):
    """Run the checks: {id of a test cell: Verdict}. The Triton file is judged only if its text is given."""
    verdicts = lab_cases.verdicts_on({cell: call for cell, call in calls.items() if cell != TRITON}, names, checks)
    return verdicts if file_text is None else {**verdicts, TRITON: checks.gemm_triton(file_text)}


def _file_text(answers):
    first, text = answers["q1_5"].split("\n", 1)
    assert first == f"%%writefile {FILE}"
    return text


@pytest.mark.parametrize("seed", range(3))
def test_model_answers_pass_with_fresh_inputs(calls, checks, answers, names, seed):
    verdicts = _verdicts(calls, checks, names, _file_text(answers) if seed == 0 else None)
    assert lab_cases.refusals(verdicts) == []


def test_inputs_are_repeatable():
    """The same file gets the same grade each time; other seeds draw other inputs."""
    assert torch.equal(Draw(None).normal(9), Draw(None).normal(9))
    assert not torch.equal(Draw(None).normal(9), Draw(5).normal(9))


@pytest.mark.parametrize("wrong", WRONG_ANSWERS, ids=lambda wrong: wrong.mistake)
def test_wrong_answer_loses_its_question_alone(calls, checks, answers, names, wrong):
    exec(compile(wrong.code, wrong.cell, "exec"), names)
    file_text = None
    if wrong.replaces:
        file_text = _file_text(answers)
        for old, new in wrong.replaces:
            file_text = lab_cases.replaced_once(file_text, old, new)
    verdicts = _verdicts(calls, checks, names, file_text)
    lab_cases.assert_loses_alone(verdicts, wrong, every_message=False)


@pytest.mark.parametrize("right", RIGHT_ANSWERS, ids=lambda right: right[0])
def test_another_right_answer_passes(calls, checks, names, right):
    _, cell, code = right
    exec(compile(code, cell, "exec"), names)
    assert lab_cases.refusals(_verdicts(lab_cases.calls_of(cell, calls), checks, names)) == []


@pytest.mark.gpu
def test_model_answers_run_on_a_gpu(answers, names, tmp_path):
    """The checks feed CPU tensors; here the same functions get tensors on the GPU, and the Triton file is compiled."""

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


WRONG = {wrong.mistake: wrong for wrong in WRONG_ANSWERS}
MISTAKES = [WRONG["F.linear"], WRONG["forgets GQA"], WRONG["K not masked"]]


@pytest.fixture(scope="module")
def graded(lab, answers, grade_notebooks):
    """Stock nbgrader on the solved and the untouched notebook, and on one with three mistakes.

    The student with the mistakes deleted all plain code cells: grading needs none of them, and they take the most time.
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


@slow
def test_mistakes_lose_their_points_alone(graded):
    assert graded.not_full("mistaken").keys() == set().union(*(wrong.lost for wrong in MISTAKES))
