"""Lab 2: the model answers pass every check, each wrong answer loses its question, and the notebook runs."""

import ast
import functools
import json
import math
import re
import warnings
from datetime import datetime

import nbformat
import pytest
import torch

from instructor.build import ROOT, build_lab
from instructor.checks import lab2_flexattention as checks
from instructor.course import answered_notebook
from tests.instructor.lab2_right_answers import RIGHT_ANSWERS
from tests.instructor.lab2_wrong_answers import WRONG_ANSWERS

NAME = "lab2_flexattention"
SOURCE = ROOT / "instructor" / "labs" / f"{NAME}.py"
BY_HAND = {"q1_3": 4, "q5_2": 5, "q5_3": 4, "q6_2": 4, "q7_2": 4}


@pytest.fixture(scope="module")
def lab2():
    return build_lab(SOURCE)


@pytest.fixture(scope="module")
def cells(lab2):
    return nbformat.reads(lab2.instructor, as_version=4).cells


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


@pytest.fixture(scope="module")
def own(hidden_tests):
    """{id of an answer cell: the test cells that judge it}"""
    return lambda cell: {test: check for test, check in hidden_tests.items() if test.startswith(f"{cell}_")}


def _has(cell, role):
    return cell.metadata.get("nbgrader", {}).get(role, False)


def _namespace(answers):
    """The names of the setup cell that answers use, and the student's functions."""
    import torch.nn.functional as F
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    names = {"torch": torch, "F": F, "math": math, "functools": functools, "warnings": warnings, "BlockMask": BlockMask,
             "create_block_mask": create_block_mask, "flex_attention": flex_attention}  # fmt: skip
    for cell, source in answers.items():
        exec(compile(source, cell, "exec"), names)
    return names


def _verdicts(hidden_tests, names):
    """{id of a test cell: Verdict}"""
    return {
        cell: getattr(checks, check)(*(names[name] for name in arguments))
        for cell, (check, arguments) in hidden_tests.items()
    }


def test_hundred_points_and_eighteen(lab2):
    regular = sum(q.points for q in lab2.questions if not q.bonus)
    bonus = sum(q.points for q in lab2.questions if q.bonus)
    assert (regular, bonus) == (100, 18)


def test_the_students_notebook_is_the_built_one(lab2):
    assert (ROOT / f"{NAME}.ipynb").read_text(encoding="utf-8") == lab2.student, f"run: labs build {NAME}"


def test_every_check_is_used_by_one_cell(hidden_tests):
    assert sorted(check for check, _ in hidden_tests.values()) == sorted(checks.__all__)


def test_verdicts_name_their_question(hidden_tests):
    for cell, (check, _) in hidden_tests.items():
        kind, part, number = cell.split("_")[:3]
        expected = f"Bonus {part}.{number}" if kind == "bonus" else f"{kind[1:]}.{part}"
        assert getattr(checks, check).question == expected, cell


@pytest.mark.parametrize("seed", range(4))
def test_model_answers_pass_with_fresh_inputs(hidden_tests, answers, seed):
    verdicts = _verdicts(hidden_tests, _namespace(answers))
    assert [str(v) for v in verdicts.values() if not v.passed] == []


def test_there_are_enough_mistakes(hidden_tests):
    assert len(WRONG_ANSWERS) >= 60
    assert len({wrong.mistake for wrong in WRONG_ANSWERS}) == len(WRONG_ANSWERS)
    assert set().union(*(wrong.lost for wrong in WRONG_ANSWERS)) == set(hidden_tests)


@pytest.mark.parametrize("wrong", WRONG_ANSWERS, ids=lambda wrong: wrong.mistake)
def test_wrong_answer_loses_its_question_alone(hidden_tests, answers, wrong):
    names = _namespace(answers)
    exec(compile(wrong.code, wrong.cell, "exec"), names)
    verdicts = _verdicts(hidden_tests, names)
    assert {cell: str(v) for cell, v in verdicts.items() if not v.passed}.keys() == wrong.lost
    for cell in wrong.lost:
        verdict = verdicts[cell]
        assert str(verdict).startswith(f"✗ {_label(verdict.question)}")
        phrases = (wrong.phrase,) if isinstance(wrong.phrase, str) else wrong.phrase
        if cell == sorted(wrong.lost)[-1]:
            assert any(phrase in verdict.message for phrase in phrases), verdict.message


@pytest.mark.parametrize("right", RIGHT_ANSWERS, ids=lambda right: right[0])
def test_another_right_answer_passes(own, answers, right):
    _, cell, code = right
    names = _namespace(answers)
    exec(compile(code, cell, "exec"), names)
    assert own(cell)
    assert [str(v) for v in _verdicts(own(cell), names).values() if not v.passed] == []


def _visible(cells, test, names):
    """Run a test cell's visible part with the setup cell's helpers; the message it raises, or None."""
    setup = next(c.source for c in cells if c.metadata.get("nbgrader", {}).get("grade_id") == "setup")
    helpers = [
        node for node in ast.parse(setup).body
        if isinstance(node, ast.Import | ast.ImportFrom) or getattr(node, "name", "") in ("rows_of", "arrivals")
    ]  # fmt: skip
    scope = {}
    exec(compile(ast.Module(helpers, []), "setup", "exec"), scope)
    cell = next(c.source for c in cells if c.metadata.get("nbgrader", {}).get("grade_id") == test)
    try:
        exec(compile(cell.split("### BEGIN HIDDEN TESTS")[0], test, "exec"), {**names, **scope})
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("mistake", "test", "phrase"), [
    ("no NaN guard", "q1_1_tests", "sees no key"),
    ("heads forgotten", "q1_2_tests", None),
    ("Python's and", "q2_1_tests", "Put each comparison in parentheses"),
    ("arguments of a mask not named", "q2_3_tests", "exactly four"),
    ("short documents share a block", "q3_2_tests", "document_blocks(8, 2, 4)"),
    ("full blocks missing", "q3_3_tests", "are full blocks visited?"),
    ("ALiBi rewards distance", "q4_1_tests", "q - k = 3"),
    ("block mask at every call", "q5_1_tests", "calls mask_mod again"),
    ("order turned round", "q7_1_tests", "of five tokens"),
    ("all sequences at one position", "bonus_8_1_tests", "two queries"),
])  # fmt: skip
def test_the_first_check_finds_a_plain_mistake(cells, answers, mistake, test, phrase):
    names = _namespace(answers)
    assert _visible(cells, test, names) is None
    (wrong,) = (wrong for wrong in WRONG_ANSWERS if wrong.mistake == mistake)
    exec(compile(wrong.code, wrong.cell, "exec"), names)
    message = _visible(cells, test, names)
    if phrase is None:  # the light test has one head: grading finds it
        assert message is None
    else:
        assert phrase.lower() in message.lower()
        assert message.count("Question") + message.count("Bonus") == 1, message


def test_python_max_in_a_bias_is_named(cells, answers):
    names = _namespace(answers)
    exec("def relative_bias(table):\n    return lambda s, b, h, q, k: s + table[h, max(0, min(q - k + 1, 2))]", names)
    assert "clamp" in _visible(cells, "q4_2_tests", names)


def test_arguments_are_counted_as_flex_attention_counts_them():
    """The checks refuse exactly the masks that create_block_mask refuses."""
    from torch.nn.attention.flex_attention import create_block_mask

    from instructor.checks.lab2_flexattention.common import arguments_counted

    class Mask:
        def __call__(self, b, h, q, k):
            return k <= q

    def shifted(by, b, h, q, k):
        return k <= q + by

    for mod, accepted in (
        (lambda b, h, q, k: k <= q, True), (lambda b, h, q, k, by=1: k <= q + by, True), (Mask(), True),
        (functools.partial(shifted, 1), True), (lambda b, h, q, k, *more: k <= q, True),
        (lambda *where: where[3] <= where[2], False), (lambda b, h, *where: where[1] <= where[0], False),
    ):  # fmt: skip
        assert (arguments_counted(mod) == 4) is accepted
        if accepted:
            create_block_mask(mod, None, None, 4, 4, device="cpu", BLOCK_SIZE=2)
        else:
            with pytest.raises(AssertionError):
                create_block_mask(mod, None, None, 4, 4, device="cpu", BLOCK_SIZE=2)


def test_unanswered_questions_say_so(hidden_tests):
    def stub(*args, **kwargs):
        raise NotImplementedError()

    for cell, (check, arguments) in hidden_tests.items():
        verdict = getattr(checks, check)(*(stub for _ in arguments))
        assert not verdict.passed and "not answered yet" in verdict.message, cell


@pytest.mark.gpu
def test_model_answers_run_on_a_gpu(answers):
    """The checks feed CPU tensors; here the same functions get tensors on the GPU, and FlexAttention compiles them."""
    from utils.kernels.attention.flex_dense import flex_reference

    names, cuda = _namespace(answers), torch.device("cuda")
    length = 512
    q, k, v = (torch.randn(2, 4, length, 64, device=cuda, dtype=torch.bfloat16) for _ in range(3))
    numbers = names["document_numbers"]([200, 150, 100], length, cuda)
    windows = torch.tensor([64, 100, 200, 300], device=cuda)
    compiled = torch.compile(names["flex_attention"], dynamic=False)
    score = names["in_turn"](names["soft_cap"](5.0), names["alibi"](torch.rand(4, device=cuda)))
    for mask in (
        names["causal"], names["sliding_window"](100), names["prefix_lm"](70), names["sinks_and_window"](4, 64),
        names["packed_documents"](numbers.expand(2, -1)),
    ):  # fmt: skip
        attend = names["prepare_flex"](compiled, mask, score, length, cuda)
        expected = flex_reference(q, k, v, mask, score)
        torch.testing.assert_close(attend(q, k, v).double(), expected, rtol=3e-2, atol=3e-2)
    block_mask = names["create_block_mask"](
        names["window_per_head"](windows), None, 4, length, length, device="cuda", BLOCK_SIZE=128
    )
    got = compiled(q, k, v, block_mask=block_mask)
    expected = flex_reference(q, k, v, names["window_per_head"](windows))
    torch.testing.assert_close(got.double(), expected, rtol=3e-2, atol=3e-2)
    shared = names["create_block_mask"](names["causal"], None, None, length, length, device="cuda", BLOCK_SIZE=128)
    got = names["block_sparse_attention"](q, k, v, shared)
    torch.testing.assert_close(got.double(), flex_reference(q, k, v, names["causal"]), rtol=3e-2, atol=3e-2)


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
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


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
        mine = _defined(tree)
        arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        for name in used - mine - arguments:
            missing = needs.get(name, set()) - required
            if missing:
                problems.append(f"{cell.source.splitlines()[0]}: {name} needs {missing}")
        needs |= {name: required for name in mine}
    assert not problems, "\n".join(problems)


def test_cells_bring_the_names_they_measure_with(cells):
    """A cell run again, or out of order, does not take another cell's tensors."""
    shared = {"q", "k", "v", "span", "block", "rows"}
    for cell in cells:
        if cell.cell_type != "code" or _has(cell, "solution") or _has(cell, "grade"):
            continue
        tree = ast.parse(cell.source)
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} & shared
        arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        assert used <= _defined(tree) | arguments, cell.source.splitlines()[0]


def test_the_lab_reads_well(lab2):
    """Figures are there and described; a prediction comes before the measurements."""
    text = "\n".join(c.source for c in nbformat.reads(lab2.student, as_version=4).cells if c.cell_type == "markdown")
    figures = re.findall(r"!\[(.*?)\]\((.*?)\)", text)
    assert len(figures) >= 4
    for alt, path in figures:
        assert len(alt) > 30 and (ROOT / path).is_file(), path
    assert len(re.findall(r"\*\*Before you (?:run|look)\.\*\*", text)) >= 9


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
def graded(lab2, grade_notebooks):
    """Stock nbgrader's scores and executed notebooks: solved, and untouched."""
    course, scores = grade_notebooks(lab2, {"solved": answered_notebook(lab2), "untouched": lab2.student})
    executed = {
        student: nbformat.read(course.root / "autograded" / student / NAME / f"{NAME}.ipynb", as_version=4)
        for student in scores
    }
    return scores, executed


@pytest.mark.slow
@pytest.mark.timeout(1500)  # two notebooks, on a machine that may be busy
def test_solved_lab_gets_every_point(graded):
    scores, executed = graded
    automatic = {name: s for name, s in scores["solved"].items() if not s.needs_manual_grade}
    assert {name: s for name, s in automatic.items() if s.auto != s.points} == {}
    assert {name: s.points for name, s in scores["solved"].items() if s.needs_manual_grade} == BY_HAND
    assert sum(s.points for s in scores["solved"].values()) == 118
    assert [(cell.source[:60], error.evalue) for cell, error in _errors(executed["solved"])] == []


@pytest.mark.slow
@pytest.mark.timeout(1500)  # two notebooks, on a machine that may be busy
def test_solved_lab_is_quick_and_keeps_its_tables(graded):
    _, executed = graded
    seconds = [_seconds(cell) for cell in executed["solved"].cells if cell.cell_type == "code"]
    assert sum(seconds) > 5  # the times were recorded
    assert sum(seconds) < 8 * 60
    text = json.dumps(executed["solved"].cells[-2])
    for table in ("mask_as_data", "promises", "race", "traces", "cliff", "buckets", "sweep", "layout"):
        assert table in text


@pytest.mark.slow
@pytest.mark.timeout(1500)  # two notebooks, on a machine that may be busy
def test_untouched_lab_gets_nothing_and_says_what_is_missing(graded):
    scores, executed = graded
    assert sum(s.auto or 0 for s in scores["untouched"].values()) == 0
    for cell, error in _errors(executed["untouched"]):
        assert error.ename in ("WrongAnswer", "AnswerNeeded"), (cell.source[:60], error.evalue)
        assert re.search(r"(Question|Bonus) \d\.\d", error.evalue), error.evalue
