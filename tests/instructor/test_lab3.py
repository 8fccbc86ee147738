"""Lab 3: the model answers pass every check, each wrong answer loses its question, and the notebook runs."""

import math
import re
from datetime import datetime

import nbformat
import pytest
import torch

pytest.importorskip("triton", reason="lab 3 needs Triton for Gluon itself; there are wheels for Linux only")

from instructor.build import ROOT, build_lab
from instructor.checks import lab3_gluon as checks
from instructor.course import answered_notebook
from tests.instructor.lab3_right_answers import BODY, RIGHT_ANSWERS
from tests.instructor.lab3_wrong_answers import WRONG_ANSWERS

SOURCE = ROOT / "instructor" / "labs" / "lab3_gluon.py"


def _has(cell, role):
    return cell.metadata.get("nbgrader", {}).get(role, False)


@pytest.fixture(scope="module")
def lab3():
    return build_lab(SOURCE)


@pytest.fixture(scope="module")
def cells(lab3):
    return nbformat.reads(lab3.instructor, as_version=4).cells


@pytest.fixture(scope="module")
def answers(cells):
    """{id of an answer cell: its source}"""
    return {c.metadata.nbgrader["grade_id"]: c.source for c in cells if c.cell_type == "code" and _has(c, "solution")}


@pytest.fixture(scope="module")
def hidden_tests(cells):
    """{id of a test cell: its hidden check, as the cell writes it}"""
    found = {}
    for cell in cells:
        if cell.cell_type == "code" and _has(cell, "grade"):
            (call,) = re.findall(r"^(hidden\.\w+\(.*\))\.raise_if_wrong\(\)$", cell.source, flags=re.MULTILINE)
            found[cell.metadata.nbgrader["grade_id"]] = call
    return found


@pytest.fixture(scope="module")
def files(cells):
    """{file: its text}, of every cell that writes one."""
    found = (re.match(r"%%writefile (\S+)\n(.*)", c.source, flags=re.DOTALL) for c in cells if c.cell_type == "code")
    return {m[1]: m[2] for m in found if m}


def _file_of(answers, cell):
    first = answers[cell].split("\n", 1)[0]
    return first.removeprefix("%%writefile ") if first.startswith("%%writefile ") else None


def _replaced(text, replaces):
    for old, new in replaces:
        if old == BODY:
            start, end = text.index("### BEGIN SOLUTION") + len("### BEGIN SOLUTION"), text.index("### END SOLUTION")
            text = f"{text[:start]}\n{new.strip(chr(10))}\n    {text[end:]}"
        else:
            assert text.count(old) == 1, (text.count(old), old)
            text = text.replace(old, new)
    return text


def _verdicts(hidden_tests, answers, files, cell=None, code="", replaces=()):
    """{id of a test cell: Verdict}, with one answer changed."""
    names = {"math": math, "torch": torch}
    for name, source in answers.items():
        if not source.startswith("%%writefile"):
            exec(compile(source, name, "exec"), names)
    if code:
        exec(compile(code, cell, "exec"), names)
    texts = dict(files)
    if replaces:
        file = _file_of(answers, cell)
        texts[file] = _replaced(texts[file], replaces)
    names |= {"hidden": checks, "text_of": texts.__getitem__}
    return {test: eval(call, names) for test, call in hidden_tests.items()}


def _of(hidden_tests, cell):
    """The tests of one answer, and of the question before and after it: what a mistake there could touch."""
    order = list(hidden_tests)
    own = [i for i, test in enumerate(order) if test.startswith(cell)]
    return {test: hidden_tests[test] for test in order[max(0, own[0] - 1) : own[-1] + 2]}


def test_hundred_points_and_sixteen(lab3):
    regular = sum(q.points for q in lab3.questions if not q.bonus)
    assert (regular, sum(q.points for q in lab3.questions if q.bonus)) == (100, 16)


def test_every_check_is_used_by_one_cell(hidden_tests):
    used = sorted(re.match(r"hidden\.(\w+)", call)[1] for call in hidden_tests.values())
    assert used == sorted(checks.__all__)


def test_verdicts_name_their_question(hidden_tests):
    for cell, call in hidden_tests.items():
        kind, part, number = (*cell.split("_"), "")[:3]
        expected = f"Bonus {part}.{number}" if kind == "bonus" else f"{kind[1:]}.{part}"
        assert getattr(checks, re.match(r"hidden\.(\w+)", call)[1]).question == expected, cell


@pytest.mark.parametrize("draw", range(2))
def test_model_answers_pass_with_fresh_inputs(hidden_tests, answers, files, draw):
    verdicts = _verdicts(hidden_tests, answers, files)
    assert [str(v) for v in verdicts.values() if not v.passed] == []


def test_there_are_enough_mistakes(hidden_tests):
    assert len(WRONG_ANSWERS) >= 30
    assert len({wrong.mistake for wrong in WRONG_ANSWERS}) == len(WRONG_ANSWERS)
    assert set().union(*(wrong.lost for wrong in WRONG_ANSWERS)) == set(hidden_tests)


@pytest.mark.parametrize("wrong", WRONG_ANSWERS, ids=lambda wrong: wrong.mistake)
def test_wrong_answer_loses_its_question_alone(hidden_tests, answers, files, wrong):
    near = _of(hidden_tests, wrong.cell)
    verdicts = _verdicts(near, answers, files, wrong.cell, wrong.code, wrong.replaces)
    assert {cell for cell, verdict in verdicts.items() if not verdict.passed} == wrong.lost
    for cell in wrong.lost:
        verdict = verdicts[cell]
        phrases = (wrong.phrase,) if isinstance(wrong.phrase, str) else wrong.phrase
        assert any(phrase in verdict.message for phrase in phrases), verdict.message
        assert "Traceback" not in verdict.message and "/tmp/" not in verdict.message
        if "the simulator stopped" in verdict.message:
            assert re.search(r"line \d+ in \w+: ", verdict.message), verdict.message


@pytest.mark.parametrize("right", RIGHT_ANSWERS, ids=lambda right: right[0])
def test_another_right_answer_passes(hidden_tests, answers, files, right):
    _, cell, change = right
    code, replaces = (change, ()) if isinstance(change, str) else ("", change)
    own = {test: call for test, call in hidden_tests.items() if test.startswith(cell)}
    verdicts = _verdicts(own, answers, files, cell, code, replaces)
    assert [str(v) for v in verdicts.values() if not v.passed] == []


VISIBLE = [  # mistakes that the check in the notebook itself must find: (question, words of the message)
    ("one slot of V, whatever the stages", "q1_1_budget_tests", "shared_bytes(1, 16, 10, 2)"),
    ("order read backwards", "q2_1_tests", "is held by"),
    ("repetitions counted along columns first", "q2_1_tests", "is held by"),
    ("written along the columns", "q2_2_tests", "sectors of 32 bytes"),
    ("more lines than six", "bonus_3_4_tests", "six at most"),
    ("repairs what is not there", "bonus_3_4_tests", "no line of the file reads"),
    ("factor in the scores' layout", "q5_1_tests", "layout"),
    ("all blocks computed", "bonus_5_5_tests", "needs 1 block"),
    ("mask in the output's layout", "bonus_5_5_tests", "layout"),
]


@pytest.fixture(scope="module")
def visible(lab3, answers):
    """(names of the notebook after setup and the model answers, {id of a test cell: its visible part})"""
    names, tests = {"__name__": "notebook"}, {}
    for cell in nbformat.reads(lab3.student, as_version=4).cells:
        name = cell.metadata.get("nbgrader", {}).get("grade_id")
        if name in ("setup", "launches"):
            exec(compile(cell.source, name, "exec"), names)
        elif cell.cell_type == "code" and _has(cell, "grade"):
            tests[name] = cell.source
    for name, source in answers.items():
        if not source.startswith("%%writefile"):
            exec(compile(source, name, "exec"), names)
    return names, tests


@pytest.mark.parametrize(("mistake", "cell", "phrase"), VISIBLE, ids=lambda value: str(value))
def test_the_notebooks_own_check_finds_it(visible, answers, files, monkeypatch, mistake, cell, phrase):
    monkeypatch.setattr("utils.device.offline_compile_support", lambda: False)  # slow, and not what is tried here
    names, tests = dict(visible[0]), visible[1]
    (wrong,) = (w for w in WRONG_ANSWERS if w.mistake == mistake)
    texts = dict(files)
    if wrong.replaces:
        file = _file_of(answers, wrong.cell)
        texts[file] = _replaced(texts[file], wrong.replaces)
    exec(compile(wrong.code, "answer", "exec"), names)
    names["text_of"] = texts.__getitem__
    with pytest.raises(AssertionError) as error:
        exec(compile(tests[cell], cell, "exec"), names)
    assert phrase in str(error.value), str(error.value)


def test_an_unanswered_or_broken_file_is_a_message(hidden_tests, answers, files):
    call = {"q3_2_tests": hidden_tests["q3_2_tests"]}
    for text, phrase in (
        ("def sum_of_squares(:\n", "is no Python"),
        ("import nowhere_to_be_found\ndef sum_of_squares(): pass\n", "cannot be imported"),
        ("x = 1\n", "defines no sum_of_squares"),
        ("def sum_of_squares(): pass\n", "should be a @gluon.jit function of"),
        (files["lab3_tma_ring.py"].replace("### BEGIN SOLUTION", "raise NotImplementedError()"), "write the kernel"),
    ):
        (verdict,) = _verdicts(call, answers, {**files, "lab3_tma_ring.py": text}).values()
        assert not verdict.passed and phrase in verdict.message, verdict.message


@pytest.mark.gpu
def test_model_answers_agree_on_a_gpu():
    """The lab's own check: simulated, compiled, and run on this machine's Hopper GPU."""
    from instructor.checks.lab1.common import Draw
    from instructor.checks.lab3_gluon import attention, pipelines
    from utils.gluon_cpu.exercises import expect_kernel

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("TMA, mbarriers and wgmma need a Hopper GPU (H100, H200)")
    texts = {m[1]: m[2] for m in re.finditer(r"^# %%writefile (\S+)\n(.*?)(?=^# %% )", SOURCE.read_text(), re.M | re.S)}
    draw = Draw(None)
    qkv = attention.inputs(2, 150, 230, 64, draw)
    for launch, expected in (
        pipelines.transpose_launch(45, 70, draw), pipelines.async_copy_launch(2000, 256, 4, 3, draw),
        pipelines.tma_ring_launch(40, 440, 3, torch.float16, draw),
        pipelines.wgmma_launch(100, 72, 200, 64, torch.bfloat16, draw),
        attention.attention_launch("lab3_softmax.py", 64, *qkv),
        attention.attention_launch("lab3_specialized.py", 128, *qkv, stages=2),
        attention.overlap_launch(*(x[None] for x in qkv), 2),
    ):  # fmt: skip
        expect_kernel(texts[launch.file], launch, expected, rtol=2e-2, atol=2e-2, compiles=True)


# ---- the notebook ------------------------------------------------------------------------------------------------


def test_the_lab_reads_well(lab3):
    """Figures are there and described; a prediction comes before the measurements; the checklist is the map."""
    text = "\n".join(c.source for c in nbformat.reads(lab3.student, as_version=4).cells if c.cell_type == "markdown")
    figures = re.findall(r"!\[(.*?)\]\((.*?)\)", text)
    assert len(figures) >= 3
    for alt, path in figures:
        assert len(alt) > 30 and (ROOT / path).is_file(), path
    assert text.count("**Before you run.**") >= 5
    for line in ("Pipeline", "Layouts", "Softmax", "Sync", "Memory", "Loads", "Critical path", "Schedule", "Masking"):
        assert f"| {line} |" in text


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
def graded(lab3, grade_notebooks):
    """Stock nbgrader's scores and executed notebooks: solved, and untouched."""
    course, scores = grade_notebooks(lab3, {"solved": answered_notebook(lab3), "untouched": lab3.student})
    executed = {
        student: nbformat.read(course.root / "autograded" / student / "lab3_gluon" / "lab3_gluon.ipynb", as_version=4)
        for student in scores
    }
    return scores, executed


@pytest.mark.slow
def test_solved_lab_gets_every_point(graded):
    scores, executed = graded
    assert [
        (name, s) for name, s in scores["solved"].items() if not s.needs_manual_grade and s.auto != s.points
    ] == []
    by_hand = {name: s.points for name, s in scores["solved"].items() if s.needs_manual_grade}
    assert by_hand == {"q1_2": 4, "q3_3": 4, "q4_2": 4, "q5_4": 6}
    assert sum(s.points for s in scores["solved"].values()) == 116
    assert [(cell.source[:60], error.evalue) for cell, error in _errors(executed["solved"])] == []


@pytest.mark.slow
def test_solved_lab_is_quick(graded):
    _, executed = graded
    seconds = [_seconds(cell) for cell in executed["solved"].cells if cell.cell_type == "code"]
    assert sum(seconds) > 5  # the times were recorded
    assert max(seconds) < 60
    assert sum(seconds) < 8 * 60


@pytest.mark.slow
def test_untouched_lab_gets_nothing_and_says_what_is_missing(graded):
    scores, executed = graded
    assert sum(s.auto or 0 for s in scores["untouched"].values()) == 0
    for cell, error in _errors(executed["untouched"]):
        assert error.ename in ("WrongAnswer", "AnswerNeeded"), (cell.source[:60], error.evalue)
        assert re.search(r"(Question|Bonus) \d\.\d", error.evalue), error.evalue
