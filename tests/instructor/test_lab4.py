"""Lab 4: the model answers pass every check, each wrong answer loses its question, and the notebook runs."""

import functools
import json
import math
import warnings
from pathlib import Path

import pytest
import torch

from instructor.build import ROOT
from instructor.checks.lab4_sdpa.common import sdpa_switches
from tests.instructor import lab_cases
from tests.instructor.every_lab import *  # noqa: F403
from tests.instructor.lab4_right_answers import RIGHT_ANSWERS
from tests.instructor.lab4_wrong_answers import WRONG_ANSWERS

LAB = "lab4_sdpa"
BY_HAND = {"q2_3": 5, "q3_4": 4, "q5_4": 5, "q6_3": 5}


def _namespace(answers):
    """The names that answers use, from the setup cell and the cells given, and the student's functions."""
    import pandas as pd
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from utils import GPU_SPECS
    from utils.checking import require_answer

    names = {
        "torch": torch,
        "F": F,
        "math": math,
        "json": json,
        "warnings": warnings,
        "functools": functools,
        "pd": pd,
        "Path": Path,
        "SDPBackend": SDPBackend,
        "sdpa_kernel": sdpa_kernel,
        "GPU_SPECS": GPU_SPECS,
        "require_answer": require_answer,
    }
    setup = """
BACKENDS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
class BackendRefused(RuntimeError): pass
def to_bf16(x): return x.to(torch.bfloat16).double()
"""
    exec(setup, names)
    return lab_cases.run_answers(answers, names)


def test_hundred_points_and_twenty(lab):
    assert lab_cases.points_of(lab) == (100, 20)


@pytest.mark.parametrize("seed", range(3))
def test_model_answers_pass_with_fresh_inputs(calls, checks, answers, seed):
    switches, filters = sdpa_switches(), list(warnings.filters)
    assert lab_cases.refusals(lab_cases.verdicts_on(calls, _namespace(answers), checks)) == []
    assert (sdpa_switches(), list(warnings.filters)) == (switches, filters)  # grading leaves nothing behind


def test_there_are_enough_mistakes(calls):
    lab_cases.assert_mistakes_cover(WRONG_ANSWERS, calls, at_least=35)


@pytest.mark.parametrize("wrong", WRONG_ANSWERS, ids=lambda wrong: wrong.mistake)
def test_wrong_answer_loses_its_question_alone(calls, checks, answers, wrong):
    names, switches = _namespace(answers), sdpa_switches()
    exec(compile(wrong.code, wrong.cell, "exec"), names)
    try:
        verdicts = lab_cases.verdicts_on(calls, names, checks)
    finally:
        for name, enabled in zip(("flash", "mem_efficient", "math", "cudnn"), switches, strict=False):
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)
    lab_cases.assert_loses_alone(verdicts, wrong)


@pytest.mark.parametrize("right", RIGHT_ANSWERS, ids=lambda right: right[0])
def test_another_right_answer_passes(calls, checks, answers, right):
    _, cell, code = right
    names = _namespace(answers)
    exec(compile(code, cell, "exec"), names)
    assert lab_cases.refusals(lab_cases.verdicts_on(lab_cases.calls_of(cell, calls), names, checks)) == []


@pytest.mark.gpu
def test_model_answers_run_on_a_gpu(answers):
    """The checks feed CPU tensors; here the same functions get tensors on the GPU, and all four backends run."""
    names = _namespace(answers)
    q, k, v = (torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for backend in ("math", "flash", "efficient", "cudnn"):
        assert names["why_not"](backend, q, k, v) == []
        out = names["pinned_sdpa"](backend, q, k, v)
        _, rms = names["errors"](out, q, k, v)
        assert 0 < rms < 0.01
    assert names["why_not"]("flash", q.float(), k.float(), v.float())
    with pytest.raises(names["BackendRefused"], match=r"dtype|Float|float"):
        names["pinned_sdpa"]("flash", q.float(), k.float(), v.float())
    expected = torch.nn.functional.scaled_dot_product_attention(q[:, :, :1], k, v)
    torch.testing.assert_close(names["split_kv_attention"](q[:, :, :1], k, v, 5), expected, rtol=2e-2, atol=2e-2)
    assert names["distinct_results"](lambda: (q + 1, k), 3) == 1
    assert int(names["ulps_apart"](q, q.clone()).max()) == 0
    x8, scale = names["quantize_fp8"](q, 16)
    torch.testing.assert_close(names["dequantize_fp8"](x8, scale, 16), q.float(), rtol=0.07, atol=1e-2)


# ---- the notebook ------------------------------------------------------------------------------------------------


def test_the_lab_reads_well(lab):
    """Figures are there and described; a prediction comes before the measurements."""
    prose = lab_cases.prose_of(lab.student)
    lab_cases.assert_figures_are_described(prose, at_least=2)
    assert prose.count("**Before you run.**") >= 10


def test_recorded_results_answer_the_questions(cells, answers):
    """The grid that the notebook loads has what Part 6 asks of it, and says where it was measured."""
    import pandas as pd

    names = _namespace(answers)
    (loader,) = [c.source for c in cells if c.cell_type == "code" and "def load_grid" in c.source]
    names |= {"display": lambda _: None, "show": lambda rows, index: None, "pd": pd}
    exec(compile(loader.replace('Path("assets/', f'Path("{ROOT}/assets/'), "loader", "exec"), names)
    grid = names["grid"]
    assert grid["shape"].nunique() >= 60 and set(grid["kind"]) == {"training", "prefill", "decode"}
    assert set(grid["head_dim"]) == {64, 128, 256} and (grid["kv_heads"] < grid["heads"]).any()
    assert not grid.duplicated(["shape", "backend"]).any()
    assert names["grid_answers"](grid).keys() >= {"default_loss", "decode_winner"}
    assert 1.0 <= names["geometric_mean"](names["default_slowdown"](grid)) < 10


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_solved_lab_is_quick(graded):
    lab_cases.assert_solved_is_quick(graded, minutes=6)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_untouched_lab_gets_nothing_and_says_what_is_missing(graded):
    lab_cases.assert_untouched_says_what_is_missing(graded, bare_stubs=True)
