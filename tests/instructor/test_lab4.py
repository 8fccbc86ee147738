"""Lab 4: the model answers pass every check, each wrong answer loses its question, and the notebook runs."""

import contextlib
import warnings

import pytest
import torch

from instructor.build import ROOT
from instructor.checks.lab4_sdpa.common import sdpa_switches
from tests.instructor import lab_cases
from tests.instructor.every_lab import EveryLab
from tests.instructor.lab4_right_answers import RIGHT_ANSWERS
from tests.instructor.lab4_wrong_answers import WRONG_ANSWERS
from tests.instructor.visible import VisibleChecks, assert_names_the_mistake

LAB = "lab4_sdpa"
BY_HAND = {"q2_3": 5, "q3_4": 4, "q5_4": 5, "q6_3": 5}
SETUP = """
import functools, json, math, warnings
from pathlib import Path
import pandas as pd
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from utils import GPU_SPECS
from utils.checking import require_answer

BACKENDS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
class BackendRefused(RuntimeError): pass
def to_bf16(x): return x.to(torch.bfloat16).double()
"""  # the part of the notebook's setup cell and of its other given cells that answers use


class TestLab(EveryLab):
    points = (100, 20)
    by_hand = BY_HAND
    wrong_answers, least_mistakes = WRONG_ANSWERS, 35
    least_figures, least_predictions = 2, 10
    minutes = 6.0
    bare_stubs = True


@pytest.fixture(scope="module")
def visible(cells):
    return VisibleChecks(cells)


@pytest.mark.parametrize("seed", range(3))
def test_model_answers_pass_with_fresh_inputs(calls, checks, names, seed):
    switches, filters = sdpa_switches(), list(warnings.filters)
    assert lab_cases.refusals(lab_cases.verdicts_on(calls, names, checks)) == []
    assert (sdpa_switches(), list(warnings.filters)) == (switches, filters)  # grading leaves nothing behind


@contextlib.contextmanager
def kept_conditions():
    """Undo what a wrong answer leaves behind: SDPA's switches and the warning filters."""
    switches = sdpa_switches()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name, enabled in zip(("flash", "mem_efficient", "math", "cudnn"), switches, strict=False):
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)


@pytest.mark.parametrize("wrong", WRONG_ANSWERS, ids=lambda wrong: wrong.mistake)
def test_wrong_answer_is_refused_twice_and_named(calls, checks, names, visible, wrong):
    """The visible check and the hidden one refuse a wrong answer, each with words that name the mistake."""
    exec(compile(wrong.code, wrong.cell, "exec"), names)
    with kept_conditions():
        lab_cases.assert_loses_alone(lab_cases.verdicts_on(lab_cases.calls_of(wrong.cell, calls), names, checks), wrong)
    scope = visible.scope(names)
    for test in wrong.lost:
        with kept_conditions():
            message = visible.message(test, scope)
        assert_names_the_mistake(message, wrong)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG_ANSWERS, ids=lambda wrong: wrong.mistake)
def test_wrong_answer_loses_its_question_alone(calls, checks, names, wrong):
    exec(compile(wrong.code, wrong.cell, "exec"), names)
    with kept_conditions():
        verdicts = lab_cases.verdicts_on(calls, names, checks)
    lab_cases.assert_loses_alone(verdicts, wrong)


@pytest.mark.parametrize("right", RIGHT_ANSWERS, ids=lambda right: right[0])
def test_another_right_answer_passes(calls, checks, names, visible, right):
    _, cell, code = right
    exec(compile(code, cell, "exec"), names)
    assert lab_cases.refusals(lab_cases.verdicts_on(lab_cases.calls_of(cell, calls), names, checks)) == []
    scope = visible.scope(names)
    assert [visible.message(test, scope) for test in visible.of(cell)] == [None] * len(visible.of(cell))


def test_model_answers_pass_the_visible_checks(names, visible):
    scope = visible.scope(names)
    assert {test: message for test in visible.tests if (message := visible.message(test, scope))} == {}


@pytest.mark.gpu
def test_model_answers_run_on_a_gpu(names):
    """The checks feed CPU tensors; here the same functions get tensors on the GPU, and all four backends run."""
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


def test_recorded_results_answer_the_questions(cells, names):
    """The grid that the notebook loads has the rows and columns that Part 6 uses."""
    (loader,) = [c.source for c in cells if c.cell_type == "code" and "def load_grid" in c.source]
    names |= {"display": lambda _: None, "show": lambda rows, index: None}
    exec(compile(loader.replace('Path("assets/', f'Path("{ROOT}/assets/'), "loader", "exec"), names)
    grid = names["grid"]
    assert grid["shape"].nunique() >= 60 and set(grid["kind"]) == {"training", "prefill", "decode"}
    assert set(grid["head_dim"]) == {64, 128, 256} and (grid["kv_heads"] < grid["heads"]).any()
    assert not grid.duplicated(["shape", "backend"]).any()
    assert names["grid_answers"](grid).keys() >= {"default_loss", "decode_winner"}
    assert 1.0 <= names["geometric_mean"](names["default_slowdown"](grid)) < 10
