"""Tests that each lab must pass. The test file of a lab subclasses `EveryLab` as `TestLab`, with the facts of its lab."""

import ast
import contextlib
import importlib
import os
import re
import warnings
from datetime import datetime

import nbformat
import pytest
import torch

from instructor.build import ROOT
from instructor.names import used_names
from tests.instructor import lab_cases
from tests.instructor.visible import VisibleChecks
from utils.checking.labs.lab4_sdpa.common import sdpa_switches

HONEST_DRAWS = int(os.environ.get("HONEST_DRAWS", "3"))  # of each right answer, in the slow set
NAMES_A_QUESTION = r"(?:(?:Question|[Bb]onus) \d\.\d|\w+\.py)"


def slow(test):
    """Mark a test that executes whole notebooks, on a machine that may be busy."""
    return pytest.mark.slow(pytest.mark.timeout(1500)(test))


def _seconds(cell) -> float:
    times = cell.metadata.get("execution", {})
    begin, end = (times.get(key) for key in ("iopub.execute_input", "shell.execute_reply"))
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds() if begin and end else 0.0


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


class EveryLab:
    """The tests that all labs share. `lab`, `checks`, `cells`, `calls` and `solved` are fixtures of conftest.py."""

    points: tuple[float, float]  # regular, bonus
    by_hand: dict[str, float]  # {id of an answer cell graded by hand: points}
    wrong_answers: list[lab_cases.WrongAnswer]
    least_mistakes: int
    least_figures: int
    least_predictions: int
    prediction = r"\*\*Before you run\.\*\*"  # how the notebook asks for one
    # A quiet machine needs a tenth of these; a busy one may take long. `labs demo` says what a lab takes.
    minutes = 25.0  # that all cells of the solved notebook may take together
    longest_cell_s = 300.0
    hinted = False  # every question has its three hints
    bare_stubs = False  # answers at the top level of their cell raise NotImplementedError by themselves

    def test_points_add_up(self, lab):
        regular, bonus = (sum(q.points for q in lab.questions if q.bonus == which) for which in (False, True))
        assert (regular, bonus) == self.points
        cells = [cell for question in lab.questions for cell in question.cells]
        assert {c.grade_id: c.points for c in cells if c.role in ("manual", "task")} == self.by_hand

    def test_every_check_is_used_by_one_cell(self, calls, checks):
        assert sorted(lab_cases.check_in(call) for call in calls.values()) == sorted(checks.__all__)

    def test_verdicts_name_their_question(self, calls, checks):
        for cell, call in calls.items():
            kind, part, number = cell.split("_")[:3]
            expected = f"Bonus {part}.{number}" if kind == "bonus" else f"{kind[1:]}.{part}"
            assert getattr(checks, lab_cases.check_in(call)).question == expected, cell

    def test_every_test_cell_has_its_mistake(self, calls):
        """There are enough mistakes, all different, and each test cell is lost by one of them."""
        assert len(self.wrong_answers) >= self.least_mistakes
        assert len({wrong.mistake for wrong in self.wrong_answers}) == len(self.wrong_answers)
        assert set().union(*(wrong.lost for wrong in self.wrong_answers)) == set(calls)

    def test_graded_cells_need_no_plain_cell(self, cells):
        """Answers and tests use only names of answers and of locked cells: a student may delete the others."""
        plain, needed = {}, []  # plain: {name: first line of the plain cell that defines it}
        for cell, used, given in lab_cases.names_by_cell(cells):
            if "nbgrader" not in cell.metadata:
                plain |= dict.fromkeys(given, cell.source.partition("\n")[0])
            elif lab_cases.has_role(cell, "grade") or lab_cases.has_role(cell, "solution"):
                needed += [f"{cell.id} needs {name} of {plain[name]!r}" for name in used & plain.keys()]
        assert needed == [], "lock what graded cells need"

    def test_locked_cells_run_without_cells_above(self, cells):
        """A student may delete cells above them, but for the setup."""
        above, problems = set(), []
        for cell, _, given in lab_cases.names_by_cell(cells):
            if cell.id == "setup":
                continue
            if cell.metadata.get("nbgrader", {}).get("locked") and not lab_cases.has_role(cell, "grade"):
                tree = ast.parse(cell.source)
                tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
                used = used_names(ast.unparse(tree)) - given
                problems += [f"{cell.id} uses {name}" for name in sorted(used & above)]
            above |= given
        assert problems == [], "unlock these cells, or bring what they use"

    def test_an_untouched_lab_says_which_answer_is_missing(self, lab, cells, request, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        names: dict = {}
        exec(getattr(request.module, "SETUP", "import math, torch"), names)
        student = nbformat.reads(lab.student, as_version=4).cells
        said = lab_cases.said_by_untouched_cells(student, VisibleChecks(cells), names)
        assert len(said) > len(self.by_hand)
        silent = {cell: message for cell, message in said.items() if not re.search(NAMES_A_QUESTION, message or "")}
        assert silent == {}

    def test_every_question_has_its_hints(self, lab):
        without = [number for number, kinds in lab.hints.items() if not kinds]
        assert without == [] or not self.hinted

    def test_the_lab_reads_well(self, lab):
        """Figures exist and are described; predictions come before the measurements."""
        prose = lab_cases.prose_of(lab.student)
        figures = re.findall(r"!\[(.*?)\]\((.*?)\)", prose)
        assert len(figures) >= self.least_figures
        for description, path in figures:
            assert len(description) > 30 and (ROOT / path).is_file(), path
        assert len(re.findall(self.prediction, prose)) >= self.least_predictions

    def test_every_prediction_has_its_place_and_meets_what_came_out(self, lab):
        """Where the text asks for a guess, the next code cell has a line for it; each is shown beside what was measured."""
        cells = nbformat.reads(lab.student, as_version=4).cells
        without = []
        for i, cell in enumerate(cells):
            if cell.cell_type == "markdown" and re.search(r"\*\*Before you (run|look)", cell.source):
                following = next((other.source for other in cells[i:] if other.cell_type == "code"), "")
                if "guesses" not in following:
                    without.append(cell.source[-200:])
        assert without == []
        code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        names = re.findall(r'guesses\["([^"]+)"\] = None', code)
        assert len(names) == len(set(names)) >= self.least_predictions
        sources = [(ROOT / f"utils/labs/{lab.name}.py").read_text(), *(cell.source for cell in cells)]
        shown = "\n".join(text for text in sources if "beside_guess(" in text or "break_it(" in text)
        texts = re.findall(r'"([^"\n]*\w[^"\n]*)"', re.sub(r'guesses\["[^"]+"\]', "", shown))
        parts = [re.split(r"{.*?}", text) for text in texts]  # of an f-string, whose braces may hold anything
        patterns = [".+".join(map(re.escape, part)) for part in parts if re.search(r"\w", "".join(part))]
        assert [name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)] == []

    # ---- whole notebooks ----

    @slow
    def test_solved_lab_passes_every_check(self, solved):
        """The hidden checks are in its test cells."""
        assert [(cell.source[:60], error.evalue) for cell, error in lab_cases.errors_in(solved)] == []

    @slow
    def test_solved_lab_is_quick(self, solved):
        seconds = [_seconds(cell) for cell in solved.cells if cell.cell_type == "code"]
        assert sum(seconds) > 5  # the times were recorded
        assert max(seconds) < self.longest_cell_s
        assert sum(seconds) < 60 * self.minutes

    @pytest.mark.overnight
    @pytest.mark.timeout(1500)
    def test_untouched_lab_gets_nothing_and_says_what_is_missing(self, graded_untouched):
        assert sum(score.auto or 0 for score in graded_untouched.scores["untouched"].values()) == 0
        for cell, error in lab_cases.errors_in(graded_untouched.notebooks["untouched"]):
            if self.bare_stubs and error.ename == "NotImplementedError":
                continue
            if error.ename != "NameError":  # of a name that a cell above would have defined
                assert error.ename in ("WrongAnswer", "AnswerNeeded"), (cell.source[:60], error.evalue)
                assert re.search(NAMES_A_QUESTION, error.evalue), error.evalue
            assert "raises-exception" in cell.metadata.get("tags", []), f"Run All stops here: {cell.source[:60]}"


class EveryAnswer:
    """Right answers, as different people write them, pass both checks, and each wrong answer is named by both."""

    right_answers: list[tuple[str, str, str | tuple]]  # name, id of the answer cell, code or change
    wrong_answers: list[lab_cases.WrongAnswer]
    or_says: tuple[str, ...] = ()  # words of a hidden check that do as well as those of the row
    goes_along: tuple[str, ...] = ()  # tests whose visible part does not see a mistake of an answer that they use
    quick = 3  # wrong answers of each cell in the quick set
    many_draws = pytest.mark.slow

    def pytest_generate_tests(self, metafunc):
        lab, name = metafunc.cls, metafunc.function.__name__
        if "right" in metafunc.fixturenames:
            many = name.endswith("_draws")
            count, others = (0, lab.many_draws) if many else (2, pytest.mark.slow)
            metafunc.parametrize("right", lab_cases.first_of_each_cell(lab.right_answers, count, others))
        if "wrong" in metafunc.fixturenames:
            count, others = (1, pytest.mark.overnight) if name.endswith("_alone") else (lab.quick, pytest.mark.slow)
            metafunc.parametrize("wrong", lab_cases.first_of_each_cell(lab.wrong_answers, count, others))

    def test_there_are_many_right_answers(self, calls, checks):
        """At least 25 idioms, different ones, and each answer whose run is watched has one.

        No row returns, without a watch, what the model answer returns: such a row can fail only where the model answer does.
        """
        assert len({name for name, _, _ in self.right_answers}) == len(self.right_answers) >= 25
        cells = {cell for _, cell, _ in self.right_answers}
        watched = [test for test, call in calls.items() if getattr(checks, lab_cases.check_in(call)).rule]
        assert [test for test in watched if not any(test.startswith(f"{cell}_") for cell in cells)] == []

    def test_model_answers_pass_the_visible_checks(self, names, visible):
        scope = visible.scope(names)
        assert {test: message for test in visible.tests if (message := visible.message(test, scope))} == {}

    def test_three_digits_are_not_green_if_grading_refuses_them(self, answers, calls, checks, names, visible):
        green = []
        for cell, source in answers.items():
            own = {test: call for test, call in calls.items() if test.startswith(f"{cell}_")}
            for name in names.keys() & set(re.findall(r"^def (\w+)", source, flags=re.MULTILINE)):
                scope = visible.scope(names | {name: lab_cases.rounded(names[name])})
                with kept_conditions():
                    verdicts = lab_cases.verdicts_on(own, scope, checks)
                    lost = [test for test in own if not verdicts[test].passed]
                    green += [(name, test) for test in lost if visible.message(test, scope) is None]
        assert green == []

    def test_model_answers_pass_with_fresh_inputs(self, calls, checks, names):
        importlib.import_module("sympy")  # adds a filter of warnings, whenever torch imports it first
        conditions = sdpa_switches(), list(warnings.filters)
        assert lab_cases.refusals(lab_cases.verdicts_on(lab_cases.drawn(calls, 1), names, checks)) == []
        assert (sdpa_switches(), list(warnings.filters)) == conditions  # grading leaves nothing behind

    @pytest.mark.slow
    def test_model_answers_pass_in_many_draws(self, calls, checks, names):
        for seed in range(HONEST_DRAWS):
            assert lab_cases.refusals(lab_cases.verdicts_on(lab_cases.drawn(calls, seed), names, checks)) == [], seed

    def test_right_answer_passes(self, answers, calls, checks, names, visible, right):
        cell = right[1]
        lab_cases.run_answers({cell: lab_cases.right_source(answers, right)}, names)
        assert lab_cases.refusals(lab_cases.verdicts_on(lab_cases.calls_of(cell, calls), names, checks)) == []
        scope = visible.scope(names)
        assert [visible.message(test, scope) for test in visible.of(cell)] == [None] * len(visible.of(cell))

    def test_right_answer_passes_in_many_draws(self, answers, calls, checks, names, right):
        """Other inputs than those of the grading; HONEST_DRAWS=200 draws as many of them as you like."""
        cell = right[1]
        lab_cases.run_answers({cell: lab_cases.right_source(answers, right)}, names)
        for seed in range(HONEST_DRAWS):
            own = lab_cases.drawn(lab_cases.calls_of(cell, calls), seed)
            assert lab_cases.refusals(lab_cases.verdicts_on(own, names, checks)) == [], seed

    def test_wrong_answer_is_refused_twice_and_named(self, answers, calls, checks, names, visible, wrong):
        """The visible check and the hidden one refuse a wrong answer, each with words that name the mistake."""
        lab_cases.run_answers({wrong.cell: lab_cases.source_of(answers, wrong)}, names)
        with kept_conditions():
            verdicts = lab_cases.verdicts_on(lab_cases.calls_of(wrong.cell, calls), names, checks)
        lab_cases.assert_loses_alone(verdicts, wrong, self.or_says)
        scope, said = visible.scope(names), {}
        for test in wrong.lost:
            with kept_conditions():
                said[test] = visible.message(test, scope) or ""
        accepted = {test for test, message in said.items() if not message}
        assert accepted <= set(self.goes_along), f"the visible check accepts {wrong.mistake!r}"
        assert not any(re.match(rf"({NAMES_A_QUESTION}: ){{2}}", message) for message in said.values()), said
        assert any(phrase.lower() in message.lower() for phrase in wrong.phrases for message in said.values()), said

    @pytest.mark.slow
    def test_wrong_answer_loses_its_question_alone(self, answers, calls, checks, names, wrong):
        """All checks that it reaches run. A mistake of each answer does in the slow set: the others bind the same names."""
        source = lab_cases.source_of(answers, wrong)
        lab_cases.run_answers({wrong.cell: source}, names)
        reached = lab_cases.calls_reached_by(source, calls, answers) | lab_cases.calls_of(wrong.cell, calls)
        with kept_conditions():
            verdicts = lab_cases.verdicts_on(reached, names, checks)
        lab_cases.assert_loses_alone(verdicts, wrong, self.or_says)
