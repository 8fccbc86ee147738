"""Lab 1: the model answers pass every check, each wrong answer loses its question, and the notebook runs."""

import ast
import importlib.util
import json
import math
import re
import time
from datetime import datetime

import nbformat
import pytest
import torch

from instructor.build import ROOT, build_lab
from instructor.checks import lab1 as checks
from instructor.checks.lab1.common import Draw
from instructor.course import answered_notebook
from tests.instructor.lab1_right_answers import RIGHT_ANSWERS
from tests.instructor.lab1_wrong_answers import FILE, WRONG_ANSWERS

SOURCE = ROOT / "instructor" / "labs" / "lab1.py"
TRITON = "q1_5_tests"  # takes the file's text instead of a function


@pytest.fixture(scope="module")
def lab1():
    return build_lab(SOURCE)


@pytest.fixture(scope="module")
def cells(lab1):
    return nbformat.reads(lab1.instructor, as_version=4).cells


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


def _has(cell, role):
    return cell.metadata.get("nbgrader", {}).get(role, False)


def _namespace(answers):
    """The names of the setup cell, and the student's functions."""
    import torch.nn.functional as F

    import utils

    names = {name: getattr(utils, name) for name in utils.__all__ if not name.startswith(("plot_", "measure_"))}
    names |= {"torch": torch, "F": F, "math": math, "time": time, "json": json}
    for cell, source in answers.items():
        if not source.startswith("%%writefile"):
            exec(compile(source, cell, "exec"), names)
    return names


def _verdicts(hidden_tests, names, file_text=None):
    """{id of a test cell: Verdict}; the Triton file is judged only if its text is given."""
    verdicts = {}
    for cell, (check, arguments) in hidden_tests.items():
        if cell == TRITON:
            if file_text is not None:
                verdicts[cell] = checks.gemm_triton(file_text)
        else:
            verdicts[cell] = getattr(checks, check)(*(names[name] for name in arguments))
    return verdicts


def _file_text(answers):
    first, text = answers["q1_5"].split("\n", 1)
    assert first == f"%%writefile {FILE}"
    return text


def test_hundred_points_and_twenty(lab1):
    regular = sum(q.points for q in lab1.questions if not q.bonus)
    bonus = sum(q.points for q in lab1.questions if q.bonus)
    assert (regular, bonus) == (100, 20)


def test_every_check_is_used_by_one_cell(hidden_tests):
    assert sorted(check for check, _ in hidden_tests.values()) == sorted(checks.__all__)


def test_verdicts_name_their_question(hidden_tests):
    for cell, (check, _) in hidden_tests.items():
        kind, part, number = cell.split("_")[:3]
        expected = f"Bonus {part}.{number}" if kind == "bonus" else f"{part[:0] or kind[1:]}.{part}"
        assert getattr(checks, check).question == expected, cell


@pytest.mark.parametrize("seed", range(3))
def test_model_answers_pass_with_fresh_inputs(hidden_tests, answers, seed):
    verdicts = _verdicts(hidden_tests, _namespace(answers), _file_text(answers) if seed == 0 else None)
    assert [str(v) for v in verdicts.values() if not v.passed] == []


def test_inputs_are_fresh_and_repeatable():
    assert not torch.equal(Draw(None).normal(9), Draw(None).normal(9))
    assert torch.equal(Draw(5).normal(9), Draw(5).normal(9))


def test_there_are_enough_mistakes(hidden_tests):
    assert len(WRONG_ANSWERS) >= 25
    assert len({wrong.mistake for wrong in WRONG_ANSWERS}) == len(WRONG_ANSWERS)
    assert set().union(*(wrong.lost for wrong in WRONG_ANSWERS)) == set(hidden_tests)


@pytest.mark.parametrize("wrong", WRONG_ANSWERS, ids=lambda wrong: wrong.mistake)
def test_wrong_answer_loses_its_question_alone(hidden_tests, answers, wrong):
    names, file_text = _namespace(answers), None
    if wrong.replaces:
        old, new = wrong.replaces
        file_text = _file_text(answers)
        assert file_text.count(old) == 1
        file_text = file_text.replace(old, new)
    else:
        exec(compile(wrong.code, wrong.cell, "exec"), names)
    verdicts = _verdicts(hidden_tests, names, file_text)
    assert {cell for cell, verdict in verdicts.items() if not verdict.passed} == wrong.lost
    for cell in wrong.lost:
        verdict = verdicts[cell]
        assert str(verdict).startswith(f"✗ {_label(verdict.question)}")
        if cell == sorted(wrong.lost)[-1] or len(wrong.lost) == 1:
            phrases = (wrong.phrase,) if isinstance(wrong.phrase, str) else wrong.phrase
            assert any(phrase in verdict.message for phrase in phrases), verdict.message


@pytest.mark.parametrize("right", RIGHT_ANSWERS, ids=lambda right: right[0])
def test_another_right_answer_passes(hidden_tests, answers, right):
    _, cell, code = right
    names = _namespace(answers)
    exec(compile(code, cell, "exec"), names)
    own = {test: check for test, check in hidden_tests.items() if test.startswith(cell)}
    assert [str(v) for v in _verdicts(own, names).values() if not v.passed] == []


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


def _label(question):
    return question if question.startswith("Bonus") else f"Question {question}"


# ---- the notebook ------------------------------------------------------------------------------------------------


def _required(tree):
    """Names of the answers that a cell asks for with require_answer."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {call.args[0].value for call in calls if getattr(call.func, "id", "") == "require_answer"}


def _defined(tree):
    """Names that a cell gives to the notebook."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


def test_a_missing_answer_stops_only_cells_that_say_so(cells):
    """What a cell uses comes from cells that run at least whenever it runs itself."""
    needs, problems = {}, []  # needs: name -> answers without which it is not there
    for cell in cells:
        if cell.cell_type != "code" or cell.source.startswith("%%writefile"):
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


def test_the_lab_reads_well(lab1):
    """Figures are there and described; a prediction comes before the measurements."""
    text = "\n".join(c.source for c in nbformat.reads(lab1.student, as_version=4).cells if c.cell_type == "markdown")
    figures = re.findall(r"!\[(.*?)\]\((.*?)\)", text)
    assert len(figures) >= 6
    for alt, path in figures:
        assert len(alt) > 30 and (ROOT / path).is_file(), path
    assert text.count("**Before you run.**") >= 10


def _errors(notebook):
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                yield cell, output


def _seconds(cell):
    times = cell.metadata.get("execution", {})
    begin, end = (times.get(key) for key in ("iopub.execute_input", "shell.execute_reply"))
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds() if begin and end else 0.0


@pytest.fixture(scope="module")
def graded(lab1, grade_notebooks):
    """Stock nbgrader's scores and executed notebooks: solved, untouched, and two mistakes at once."""
    wrong = {w.mistake: w for w in WRONG_ANSWERS}
    mistakes = [wrong["F.linear"], wrong["forgets GQA"], wrong["K not masked"]]
    answers = {c.id: c.source for c in nbformat.reads(lab1.instructor, as_version=4).cells}
    broken = {
        w.cell: answers[w.cell].replace(*w.replaces) if w.replaces else f"{answers[w.cell]}\n\n{w.code}"
        for w in mistakes
    }
    course, scores = grade_notebooks(
        lab1,
        {"solved": answered_notebook(lab1), "untouched": lab1.student, "mistaken": answered_notebook(lab1, broken)},
    )
    executed = {
        student: nbformat.read(course.root / "autograded" / student / "lab1" / "lab1.ipynb", as_version=4)
        for student in scores
    }
    lost = set().union(*(w.lost for w in mistakes))
    return scores, executed, lost


@pytest.mark.slow
def test_solved_lab_gets_every_point(graded):
    scores, executed, _ = graded
    assert [
        (name, s) for name, s in scores["solved"].items() if not s.needs_manual_grade and s.auto != s.points
    ] == []
    by_hand = {name: s.points for name, s in scores["solved"].items() if s.needs_manual_grade}
    assert by_hand == {"q1_3_explain": 3, "q2_4": 5, "q3_5": 5, "q4_5": 5, "q5_5": 4}
    assert sum(s.points for s in scores["solved"].values()) == 120
    assert [(cell.source[:60], error.evalue) for cell, error in _errors(executed["solved"])] == []


@pytest.mark.slow
def test_solved_lab_is_quick(graded):
    _, executed, _ = graded
    seconds = [_seconds(cell) for cell in executed["solved"].cells if cell.cell_type == "code"]
    assert sum(seconds) > 5  # the times were recorded
    assert max(seconds) < 60
    assert sum(seconds) < 8 * 60


@pytest.mark.slow
def test_untouched_lab_gets_nothing_and_says_what_is_missing(graded):
    scores, executed, _ = graded
    assert sum(s.auto or 0 for s in scores["untouched"].values()) == 0
    for cell, error in _errors(executed["untouched"]):
        assert error.ename in ("WrongAnswer", "AnswerNeeded"), (cell.source[:60], error.evalue)
        assert re.search(r"(Question|Bonus) \d\.\d", error.evalue), error.evalue


@pytest.mark.slow
def test_mistakes_lose_their_points_alone(graded):
    scores, _, lost = graded
    assert {name for name, s in scores["mistaken"].items() if not s.needs_manual_grade and s.auto != s.points} == lost
