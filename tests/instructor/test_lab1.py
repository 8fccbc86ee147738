"""Lab 1: the model answers pass every check, each wrong answer loses its question, and the notebook runs."""

import ast
import json
import time
from importlib import import_module

import pytest
import torch

from instructor.checks.common import Draw
from instructor.names import bound_names
from tests.instructor import lab_cases
from tests.instructor.every_lab import EveryAnswer, EveryLab
from tests.instructor.lab1_right_answers import RIGHT_ANSWERS
from tests.instructor.lab1_wrong_answers import WRONG_ANSWERS

LAB = "lab1"
BY_HAND = {"q1_3_explain": 3, "q2_4": 5, "q3_4": 5, "q4_4": 5, "q5_5": 4}
SETUP = """
import functools, json, math, time
from types import SimpleNamespace
import torch
import torch.nn.functional as F
from utils import *
from utils.checking import *
from utils.labs.lab1 import *
device, on_gpu = torch.device("cpu"), False
def synchronize(): pass
"""  # the part of the notebook's setup cell that answers and their tests use


class TestLab(EveryLab):
    points = (100, 15)
    by_hand = BY_HAND
    hinted = True
    wrong_answers, least_mistakes = WRONG_ANSWERS, 25
    least_figures, least_predictions = 13, 14

    def test_cells_may_run_again_in_any_order(self, cells):
        """A name that one cell leaves for another is given by one cell only."""
        given_by: dict[str, set[str]] = {}
        read: dict[str, str] = {}
        for cell, used, given in lab_cases.names_by_cell(cells):
            if not lab_cases.has_role(cell, "grade"):
                read |= {name: cell.source.partition("\n")[0] for name in used if name not in read}
                imports = "\n".join(line for line in cell.source.splitlines() if line.startswith(("import ", "from ")))
                for name in given - bound_names(ast.parse(imports)):
                    given_by.setdefault(name, set()).add(cell.id)
        assert {name: first for name, first in read.items() if len(given_by.get(name, ())) > 1} == {}


class TestAnswers(EveryAnswer):
    right_answers, wrong_answers = RIGHT_ANSWERS, WRONG_ANSWERS
    or_says = ("expected", "Expected", "is wrong in", "should", "raised")
    goes_along = ("q3_1_cost_tests",)
    many_draws = pytest.mark.overnight


def test_inputs_are_repeatable():
    """The same file gets the same grade each time; other seeds draw other inputs."""
    assert torch.equal(Draw(None).normal(9), Draw(None).normal(9))
    assert not torch.equal(Draw(None).normal(9), Draw(5).normal(9))


@pytest.fixture(scope="module")
def helpers():
    """The lab's module; it loads transformers, which every process that collects this file would do."""
    from utils.labs import lab1

    return lab1


def test_the_first_try_says_what_was_timed(helpers, capsys):
    for waits, said in ((False, "the clock stopped when the call returned"), (True, "you timed the work")):

        def time_work(device, waits=waits):
            began = time.perf_counter()
            device.launch(work_ms=50)
            if waits:
                device.synchronize()
            return (time.perf_counter() - began) * 1e3

        helpers.first_try(time_work)
        assert said in capsys.readouterr().out


def test_the_timeline_gives_a_product_the_time_of_what_it_calls(helpers, monkeypatch, tmp_path):
    names = [("ProfilerStep#9", 0, 100), ("aten::linear", 10, 60), ("aten::as_strided", 60, 5), ("aten::mul", 80, 10)]
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": took, "pid": 1, "tid": 1}
        for name, start, took in names
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    drawn = []
    monkeypatch.setattr(helpers, "plot_timeline", lambda bars, title: drawn.extend(bars))
    helpers.plot_last_step(str(tmp_path / "trace.json"))
    shares = {(bar["lane"], bar["duration_us"]) for bar in drawn}
    assert shares == {("gemm", 60), ("elementwise", 10)}


def test_the_scoreboard_has_the_record_and_what_was_computed(helpers):
    helpers.scores.clear()
    helpers.scoreboard(memory=2.44, graph=184.4)
    shown = [text.get_text() for text in helpers.plt.gcf().axes[0].texts]
    helpers.plt.close()
    assert shown == ["1,608 µs", "184 µs", "168 µs", "158 µs", "2.4 µs"]


def test_a_measured_point_has_a_unit_that_fits(helpers, monkeypatch, capsys):
    roofs = helpers.Roofs("a GPU", "datasheet", {"fp32": 67.0, "bf16": 67.0}, 4.8)
    monkeypatch.setattr(helpers, "this_roof", lambda: roofs)
    monkeypatch.setattr(helpers, "plot_measured", lambda name, measured: None)
    helpers.report_measured("points", {"large": (1e3, 65.0), "small": (1.0, 0.002)})
    assert " 65 TFLOP/s" in (said := capsys.readouterr().out) and " 2 GFLOP/s" in said


# ---- what the visible checks say -------------------------------------------------------------------------------------


def test_visible_messages_hold_no_solution(answers, visible, names):
    """A visible complaint does not say the right number of a count."""
    wrong = lab_cases.changed_text(answers["q1_4"], (("* dtype.itemsize", "* 3"),))
    said = visible.message("q1_4_tests", visible.scope(lab_cases.run_answers({"q1_4": wrong}, names)))
    assert said and "2,398" not in said and "4,796" not in said


def test_a_right_cost_stays_right_beside_wrong_pairs(names):
    names["check_attention_cost"](names["attention_macs_flops_bytes"], lambda *place: 0)


@pytest.mark.gpu
def test_model_answers_run_on_a_gpu(names, tmp_path, monkeypatch):
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

    monkeypatch.syspath_prepend(tmp_path)
    gemm, flash = import_module("gemm_triton").gemm, import_module("flash_triton").flash
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(200, 130, device="cuda", dtype=dtype), torch.randn(130, 90, device="cuda", dtype=dtype)
        expected = (a.double() @ b.double()).to(dtype)
        torch.testing.assert_close(gemm(a, b), expected, rtol=2e-2, atol=2e-2)
        q, k, v = (torch.randn(3, n, 64, device="cuda", dtype=dtype) for n in (150, 321, 321))
        got, expected = flash(q, k, v), attend(q.double(), k.double(), v.double()).to(dtype)
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
