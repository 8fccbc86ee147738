"""Lab 4: the model answers pass every check, each wrong answer loses its question, and the notebook runs."""

import ast
import functools
import json
import math
import re
import warnings
from pathlib import Path

import nbformat
import pytest
import torch

from instructor.build import ROOT, build_lab
from instructor.checks import lab4_sdpa as checks
from instructor.checks.lab4_sdpa.common import sdpa_switches
from instructor.course import answered_notebook
from tests.instructor.lab4_right_answers import RIGHT_ANSWERS
from tests.instructor.lab4_wrong_answers import WRONG_ANSWERS
from tests.instructor.test_lab1 import _defined, _errors, _has, _label, _required, _seconds

SOURCE = ROOT / "instructor" / "labs" / "lab4_sdpa.py"
BY_HAND = {"q2_3": 5, "q3_4": 4, "q5_4": 5, "q6_3": 5}


@pytest.fixture(scope="module")
def lab4():
    return build_lab(SOURCE)


@pytest.fixture(scope="module")
def cells(lab4):
    return nbformat.reads(lab4.instructor, as_version=4).cells


@pytest.fixture(scope="module")
def answers(cells):
    """{id of an answer cell: its source}"""
    return {c.metadata.nbgrader["grade_id"]: c.source for c in cells if c.cell_type == "code" and _has(c, "solution")}


@pytest.fixture(scope="module")
def hidden_tests(cells):
    """{id of a test cell: (name of its hidden check, names of its arguments)}, read off the cells themselves."""
    found = {}
    for cell in cells:
        if cell.cell_type == "code" and _has(cell, "grade"):
            (call,) = re.findall(r"^hidden\.(\w+)\((.*)\)\.raise_if_wrong\(\)$", cell.source, flags=re.MULTILINE)
            found[cell.metadata.nbgrader["grade_id"]] = call[0], [name.strip() for name in call[1].split(",")]
    return found


def _namespace(answers):
    """The names that answers use, from the setup cell and the cells given, and the student's functions."""
    import pandas as pd
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from utils import GPU_SPECS
    from utils.checking import require_answer

    names = {"torch": torch, "F": F, "math": math, "json": json, "warnings": warnings, "functools": functools, "pd": pd,
             "Path": Path, "SDPBackend": SDPBackend, "sdpa_kernel": sdpa_kernel, "GPU_SPECS": GPU_SPECS,
             "require_answer": require_answer}  # fmt: skip
    setup = """
BACKENDS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
class BackendRefused(RuntimeError): pass
def to_bf16(x): return x.to(torch.bfloat16).double()
"""
    exec(setup, names)
    for cell, source in answers.items():
        exec(compile(source, cell, "exec"), names)
    return names


def _verdicts(hidden_tests, names):
    """{id of a test cell: Verdict}"""
    return {
        cell: getattr(checks, check)(*(names[name] for name in arguments))
        for cell, (check, arguments) in hidden_tests.items()
    }


def test_hundred_points_and_twenty(lab4):
    regular = sum(q.points for q in lab4.questions if not q.bonus)
    bonus = sum(q.points for q in lab4.questions if q.bonus)
    assert (regular, bonus) == (100, 20)


def test_every_check_is_used_by_one_cell(hidden_tests):
    assert sorted(check for check, _ in hidden_tests.values()) == sorted(checks.__all__)


def test_verdicts_name_their_question(hidden_tests):
    for cell, (check, _) in hidden_tests.items():
        kind, part, number = cell.split("_")[:3]
        expected = f"Bonus {part}.{number}" if kind == "bonus" else f"{kind[1:]}.{part}"
        assert getattr(checks, check).question == expected, cell


@pytest.mark.parametrize("seed", range(3))
def test_model_answers_pass_with_fresh_inputs(hidden_tests, answers, seed):
    switches, filters = sdpa_switches(), list(warnings.filters)
    verdicts = _verdicts(hidden_tests, _namespace(answers))
    assert [str(v) for v in verdicts.values() if not v.passed] == []
    assert (sdpa_switches(), list(warnings.filters)) == (switches, filters)  # grading leaves nothing behind


def test_there_are_enough_mistakes(hidden_tests):
    assert len(WRONG_ANSWERS) >= 35
    assert len({wrong.mistake for wrong in WRONG_ANSWERS}) == len(WRONG_ANSWERS)
    assert set().union(*(wrong.lost for wrong in WRONG_ANSWERS)) == set(hidden_tests)


@pytest.mark.parametrize("wrong", WRONG_ANSWERS, ids=lambda wrong: wrong.mistake)
def test_wrong_answer_loses_its_question_alone(hidden_tests, answers, wrong):
    names, switches = _namespace(answers), sdpa_switches()
    exec(compile(wrong.code, wrong.cell, "exec"), names)
    try:
        verdicts = _verdicts(hidden_tests, names)
    finally:
        for name, enabled in zip(("flash", "mem_efficient", "math", "cudnn"), switches, strict=False):
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)
    assert {cell for cell, verdict in verdicts.items() if not verdict.passed} == wrong.lost
    for cell in wrong.lost:
        verdict = verdicts[cell]
        assert str(verdict).startswith(f"✗ {_label(verdict.question)}")
        phrases = (wrong.phrase,) if isinstance(wrong.phrase, str) else wrong.phrase
        assert any(phrase in verdict.message for phrase in phrases), verdict.message


@pytest.mark.parametrize("right", RIGHT_ANSWERS, ids=lambda right: right[0])
def test_another_right_answer_passes(hidden_tests, answers, right):
    _, cell, code = right
    names = _namespace(answers)
    exec(compile(code, cell, "exec"), names)
    own = {test: check for test, check in hidden_tests.items() if test.startswith(cell)}
    assert own and [str(v) for v in _verdicts(own, names).values() if not v.passed] == []


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


def test_a_missing_answer_stops_only_cells_that_say_so(cells):
    """What a cell uses comes from cells that run at least whenever it runs itself."""
    needs, problems = {}, []  # needs: name -> answers without which it is not there
    for cell in cells:
        if cell.cell_type != "code":
            continue
        tree = ast.parse(cell.source)
        if _has(cell, "solution"):
            needs |= {node.name: {node.name} for node in tree.body if isinstance(node, ast.FunctionDef)}
            continue
        if _has(cell, "grade"):
            continue  # a check reports a missing answer by itself
        required = _required(tree)
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        own = _defined(tree)
        arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        for name in used - own - arguments:
            missing = needs.get(name, set()) - required
            if missing:
                problems.append(f"{cell.source.splitlines()[0]}: {name} needs {missing}")
        needs |= {name: required for name in own}
    assert not problems, "\n".join(problems)


def test_the_lab_reads_well(lab4):
    """Figures are there and described; a prediction comes before the measurements."""
    text = "\n".join(c.source for c in nbformat.reads(lab4.student, as_version=4).cells if c.cell_type == "markdown")
    figures = re.findall(r"!\[(.*?)\]\((.*?)\)", text)
    assert len(figures) >= 2
    for alt, path in figures:
        assert len(alt) > 30 and (ROOT / path).is_file(), path
    assert text.count("**Before you run.**") >= 10


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


@pytest.fixture(scope="module")
def graded(lab4, grade_notebooks):
    """Stock nbgrader's scores and executed notebooks: solved and untouched."""
    course, scores = grade_notebooks(lab4, {"solved": answered_notebook(lab4), "untouched": lab4.student})
    executed = {
        student: nbformat.read(course.root / "autograded" / student / "lab4_sdpa" / "lab4_sdpa.ipynb", as_version=4)
        for student in scores
    }
    return scores, executed


@pytest.mark.slow
def test_solved_lab_gets_every_point(graded):
    scores, executed = graded
    assert [(n, s) for n, s in scores["solved"].items() if not s.needs_manual_grade and s.auto != s.points] == []
    assert {name: s.points for name, s in scores["solved"].items() if s.needs_manual_grade} == BY_HAND
    assert sum(s.points for s in scores["solved"].values()) == 120
    assert [(cell.source[:60], error.evalue) for cell, error in _errors(executed["solved"])] == []


@pytest.mark.slow
def test_solved_lab_is_quick(graded):
    _, executed = graded
    seconds = [_seconds(cell) for cell in executed["solved"].cells if cell.cell_type == "code"]
    assert sum(seconds) > 5  # the times were recorded
    assert max(seconds) < 60
    assert sum(seconds) < 6 * 60


@pytest.mark.slow
def test_untouched_lab_gets_nothing_and_says_what_is_missing(graded):
    scores, executed = graded
    assert sum(s.auto or 0 for s in scores["untouched"].values()) == 0
    for cell, error in _errors(executed["untouched"]):
        assert error.ename in ("WrongAnswer", "AnswerNeeded", "NotImplementedError"), (cell.source[:60], error.evalue)
        if error.ename != "NotImplementedError":  # the stub of an answer at the top level of its cell
            assert re.search(r"(Question|Bonus|bonus) \d\.\d", error.evalue), error.evalue
