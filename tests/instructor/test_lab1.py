"""Lab 1: the model answers pass every check, each wrong answer loses its question, and the notebook runs."""

import importlib.util
import json
import time
from pathlib import Path

import pytest
import torch

from instructor.checks.common import Draw
from tests.instructor import lab_cases
from tests.instructor.every_lab import EveryLab
from tests.instructor.lab1_right_answers import RIGHT_ANSWERS
from tests.instructor.lab1_wrong_answers import WRONG_ANSWERS

LAB = "lab1"
BY_HAND = {"q1_3_explain": 3, "q2_4": 5, "q3_4": 5, "q4_4": 5, "q5_5": 4}
TRITON = {"q1_5": "gemm_triton", "bonus_5_6": "flash_triton"}  # {answer cell that writes a file: its check}
SETUP = """
import functools, json, math, time
from pathlib import Path
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
        lab_cases.assert_no_cell_reads_a_name_of_two_cells(cells)


def _verdicts(calls, checks, names, files=None):
    """Run the checks: {id of a test cell: Verdict}. A Triton file is judged only if `files` has its text by its answer cell."""
    plain = {test: call for test, call in calls.items() if test.removesuffix("_tests") not in TRITON}
    verdicts = lab_cases.verdicts_on(plain, names, checks)
    for cell, text in (files or {}).items():
        verdicts[f"{cell}_tests"] = getattr(checks, TRITON[cell])(text)
    return verdicts


def _file_text(answers, cell):
    first, text = answers[cell].split("\n", 1)
    assert first == f"%%writefile {TRITON[cell]}.py"
    return text


def test_model_answers_pass_with_fresh_inputs(calls, checks, answers, names):
    files = {cell: _file_text(answers, cell) for cell in TRITON}
    verdicts = _verdicts(lab_cases.drawn(calls, 1), checks, names, files)
    assert lab_cases.refusals(verdicts) == []


def test_inputs_are_repeatable():
    """The same file gets the same grade each time; other seeds draw other inputs."""
    assert torch.equal(Draw(None).normal(9), Draw(None).normal(9))
    assert not torch.equal(Draw(None).normal(9), Draw(5).normal(9))


@pytest.mark.slow
def test_wrong_answers_lose_no_others(answers, calls, checks, names):
    """One wrong answer of each answer cell at a time: the questions that use its functions keep their points."""
    for wrong in {wrong.cell: wrong for wrong in WRONG_ANSWERS if wrong.cell not in TRITON}.values():
        source = lab_cases.source_of(answers, wrong)
        reached = lab_cases.calls_reached_by(source, calls, answers)
        others = {cell: call for cell, call in reached.items() if not cell.startswith(f"{wrong.cell}_")}
        kept = dict(names)
        exec(compile(source, wrong.cell, "exec"), names)
        assert lab_cases.refusals(_verdicts(others, checks, names)) == [], wrong.mistake
        names.clear()
        names.update(kept)


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


# ---- visible checks: a green tick means right ------------------------------------------------------------------------


@pytest.fixture
def notebook(model_names, tmp_path, monkeypatch):
    """The notebook's names, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return dict(model_names)


def _complaints(cell: str, source: str, visible, notebook) -> list[str]:
    first, _, text = source.partition("\n")
    if first.startswith("%%writefile"):
        Path(first.split()[1]).write_text(text)
    else:
        exec(compile(source, cell, "exec"), notebook)
    scope = visible.scope(notebook)
    return [said for test in visible.of(cell) if (said := visible.message(test, scope)) is not None]


def test_visible_checks_pass_model_answers(answers, visible, notebook):
    complaints = {cell: _complaints(cell, source, visible, notebook) for cell, source in answers.items()}
    assert {cell: said for cell, said in complaints.items() if said} == {}


@pytest.mark.parametrize("wrong", lab_cases.first_of_each_cell(WRONG_ANSWERS, 3))
def test_wrong_answer_is_refused_twice_and_named(answers, calls, checks, visible, notebook, wrong):
    """The visible check and the hidden one refuse a wrong answer, the visible one with words that name the mistake."""
    source = lab_cases.source_of(answers, wrong)
    said = " ".join(_complaints(wrong.cell, source, visible, notebook))
    assert any(phrase.lower() in said.lower() for phrase in wrong.phrases), said or "the visible check accepts it"
    files = {wrong.cell: source.split("\n", 1)[1]} if wrong.cell in TRITON else None
    verdicts = _verdicts(lab_cases.calls_of(wrong.cell, calls), checks, notebook, files)
    expects = ("expected", "Expected", "is wrong in", "should", "raised")
    lab_cases.assert_loses_alone(verdicts, wrong, every_message=False, or_says=expects)


def test_a_profile_without_the_kernels_of_a_gpu_is_refused(answers, visible, notebook):
    """Also on a machine without a GPU, where such a profile looks like any other."""
    kept = ("    if torch.cuda.is_available():\n        activities.append(torch.profiler.ProfilerActivity.CUDA)\n", "")
    (said,) = _complaints("q4_1", lab_cases.changed_text(answers["q4_1"], (kept,)), visible, notebook)
    assert "CUDA activity" in said


def test_visible_messages_hold_no_solution(answers, visible, notebook, lab):
    """A visible complaint does not say the right number of a count."""
    said = _complaints(
        "q1_4", lab_cases.changed_text(answers["q1_4"], (("* dtype.itemsize", "* 3"),)), visible, notebook
    )
    assert said and not any("334" in text or "668" in text for text in said)


# ---- right answers -----------------------------------------------------------------------------------------------------


def _refused(right, answers, calls, checks, names, seeds) -> list[str]:
    _, cell, code = right
    text = code if isinstance(code, str) else lab_cases.changed_text(answers[cell], code)
    found, own = [], lab_cases.calls_of(cell, calls)
    if cell in TRITON:
        own = {test: f"hidden.{TRITON[cell]}(text)" for test in own}
        names = {**names, "text": text.split("\n", 1)[1]}
    else:
        exec(compile(text, cell, "exec"), names)
    for seed in seeds:
        verdicts = lab_cases.verdicts_on(lab_cases.drawn(own, seed), names, checks)
        found += [f"seed {seed}: {text}" for text in lab_cases.refusals(verdicts)]
    return found


def test_there_are_many_right_answers():
    assert len(RIGHT_ANSWERS) >= 40 and len({right[0] for right in RIGHT_ANSWERS}) == len(RIGHT_ANSWERS)


@pytest.mark.parametrize("right", lab_cases.first_of_each_cell(RIGHT_ANSWERS, 2))
def test_another_right_answer_passes(answers, calls, checks, notebook, visible, right):
    """A draw of the hidden check, and the visible one. Other draws are the overnight test's."""
    assert _refused(right, answers, calls, checks, notebook, (1,)) == []
    text = right[2] if isinstance(right[2], str) else lab_cases.changed_text(answers[right[1]], right[2])
    assert _complaints(right[1], text, visible, notebook) == []


@pytest.mark.overnight
@pytest.mark.parametrize("right", RIGHT_ANSWERS, ids=lambda right: right[0])
def test_another_right_answer_passes_in_200_draws(answers, calls, checks, names, right):
    slow_ones = ("q1_3", "q3_3", "q4_1")  # their checks wait, or run a model
    assert _refused(right, answers, calls, checks, names, range(20 if right[1] in slow_ones else 200)) == []


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

    modules = {}
    for cell, name in TRITON.items():
        path = tmp_path / f"{name}.py"
        path.write_text(_file_text(answers, cell))
        spec = importlib.util.spec_from_file_location(name, path)
        modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(200, 130, device="cuda", dtype=dtype), torch.randn(130, 90, device="cuda", dtype=dtype)
        expected = (a.double() @ b.double()).to(dtype)
        torch.testing.assert_close(modules["gemm_triton"].gemm(a, b), expected, rtol=2e-2, atol=2e-2)
        q, k, v = (torch.randn(3, n, 64, device="cuda", dtype=dtype) for n in (150, 321, 321))
        got, expected = modules["flash_triton"].flash(q, k, v), attend(q.double(), k.double(), v.double()).to(dtype)
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
