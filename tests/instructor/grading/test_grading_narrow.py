"""Lists of words for single questions of labs 1 and 2: what is outside of them waits, and right answers of any style do not."""

import contextlib
import io

import nbformat
import pytest

from instructor.build import build_lab
from instructor.checks.common import to_look_at
from instructor.course import answered_notebook
from instructor.grading.submission.engine import setup_cells
from instructor.grading.submission.plan import make_plan, plan_tests
from instructor.grading.submission.reading import Reading, unusual_file
from instructor.grading.submission.usual_operators import unusual_calls
from instructor.grading.submission.usual_words import MOST_OPERATORS, NARROW, NARROW_OPERATORS, OPERATORS, usual_in
from instructor.names import FILE_CELL, python_of
from instructor.points import lab_path
from tests.instructor import lab1_right_answers, lab2_right_answers, lab_cases, test_lab1, test_lab2
from tests.instructor.grading import (
    honest_cold,
    honest_fourth,
    honest_own_names,
    honest_styles,
    honest_third,
    honest_unusual,
)
from tests.instructor.grading.attacks_late_rounds import LATE_BY_TEXT
from tests.instructor.grading.attacks_narrow import BY_TEXT
from tests.instructor.grading.attacks_shortcuts import answer_of
from tests.instructor.grading.attacks_tenth import TENTH_BY_TEXT
from utils.checking import watching

LABS = {"lab1": (test_lab1, lab1_right_answers), "lab2_flexattention": (test_lab2, lab2_right_answers)}
# Test cells that forbid something, beside those with a list of their own.
STRICT = {"lab1": ("q1_1_tests",), "lab2_flexattention": ("q3_1_tests",)}
# A module that a cell writes by a function of Python's cannot be read; and the question asks for float32 inside.
WAITS = {
    ("compiled, cached, in a module of one's own", "q4_2_tests"),
    ("weights in the dtype of v, as the library's kernels do", "q5_3_flash_tests"),
}


class Lab:
    """A lab's notebooks and right answers, and what is unusual in them."""

    def __init__(self, name: str):
        self.name, self.built = name, build_lab(lab_path(name))
        cells = nbformat.reads(self.built.instructor, as_version=4).cells
        lines = {c.id: [line for line in c.source.split("\n") if line.strip()[:3] != "###"] for c in cells}
        self.model = {cell: "\n".join(text) for cell, text in lines.items()}
        self.answers, self.calls = lab_cases.answers_in(cells), lab_cases.hidden_calls(cells)
        self.setup, self.checks = LABS[name][0].SETUP, lab_cases.checks_of(name)
        base: dict = {"__name__": "__main__"}
        with contextlib.redirect_stdout(io.StringIO()):
            for cell, source in setup_cells(self.built):
                exec(compile(python_of(source), cell, "exec"), base)
        self.usual = usual_in(name, self.built.instructor, base)

    def right_answers(self) -> list[tuple[str, dict[str, str]]]:
        """[(name, {answer cell: its text})] of the catalogue and of the honest students."""
        found: list[tuple[str, dict[str, str]]] = [("model", {})]
        for name, cell, code in LABS[self.name][1].RIGHT_ANSWERS:
            if isinstance(code, str):  # no change of a file
                found.append((name, {cell: f"{self.model[cell]}\n{code}"}))
        for suite in (honest_unusual, honest_cold, honest_third, honest_fourth, honest_styles, honest_own_names):
            for name, (lab, cells) in suite.STUDENTS.items():
                if lab == self.name:
                    found.append((name, {cell: self._text(cell, code) for cell, code in cells.items()}))
        return found

    def _text(self, cell: str, code: str | dict[str, str]) -> str:
        text = self.model[cell] if isinstance(code, dict) else code.lstrip("\n")
        for old, new in code.items() if isinstance(code, dict) else ():
            text = lab_cases.replaced_once(text, old, new)
        return text

    def read(self, answers: dict[str, str]) -> dict[str, list[str]]:
        """{test cell: what is unusual in the text of its answer}."""
        notebook = answered_notebook(self.built, answers or None)
        plan = make_plan(self.built.instructor, self.built.student, notebook, plan_tests(self.built.instructor))
        reading = Reading(plan.steps, self.usual)
        tests = [step for step in plan.steps if step.kind == "tests"]
        return {step.name: reading.unusual(step, step.name in STRICT[self.name]) for step in tests}

    def run(self, answers: dict[str, str]) -> dict[str, list[str]]:
        """{test cell: what is unusual in what its answer does}; every hidden check has to pass."""
        names: dict = {}
        own = {t: c for t, c in self.calls.items() if not answers or any(t.startswith(f"{cell}_") for cell in answers)}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(self.setup, names)
            lab_cases.run_answers({**self.answers, **answers}, names)
        found = {}
        for test, call in own.items():
            if FILE_CELL.match(
                answers.get(test.removesuffix("_tests"), self.answers.get(test.removesuffix("_tests"), ""))
            ):
                continue  # a kernel's file, which is read alone
            to_look_at()
            with _recorded() as watches:
                verdict = lab_cases.verdicts_on({test: call}, names, self.checks)[test]
            assert verdict.passed, str(verdict)
            found[test] = to_look_at()
            if any(watch.rules for watch in watches):
                tables = [table.get(self.name, {}) for table in (OPERATORS, MOST_OPERATORS, NARROW_OPERATORS)]
                known, most, narrow = (table.get(test) for table in tables)
                found[test] += unusual_calls(watches, (known or "").split(), most, None, narrow)
        return found


@contextlib.contextmanager
def _recorded():
    """The records of `watch_operations` in the code inside."""
    watches, enter = [], watching.watch_operations.__enter__

    def entered(self):
        watches.append(enter(self))
        return watches[-1]

    watching.watch_operations.__enter__ = entered
    try:
        yield watches
    finally:
        watching.watch_operations.__enter__ = enter


@pytest.fixture(scope="module")
def labs():
    return {name: Lab(name) for name in LABS}


def test_single_questions_have_lists_that_are_shorter_than_the_general_ones():
    from instructor.grading.submission import vocabulary

    for lab in LABS:
        for words in NARROW[lab].values():
            assert len(frozenset(words.split()) & vocabulary.ATTRIBUTES) < 0.7 * len(vocabulary.ATTRIBUTES)
        for operators in NARROW_OPERATORS[lab].values():
            assert len(operators) < 0.55 * len(vocabulary.OPERATORS) and not operators & {"set", "resize"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "shortcut", [*BY_TEXT, *(s for s in (*TENTH_BY_TEXT, *LATE_BY_TEXT) if s.lab in LABS)], ids=lambda s: s.name
)
def test_a_way_that_no_input_of_a_check_meets_waits(labs, shortcut):
    lab = labs[shortcut.lab]
    text = answer_of(shortcut, lab.model)
    if FILE_CELL.match(text):
        found = unusual_file(text.partition("\n")[2], lab.usual, "q1_5")
    else:
        found = lab.read({shortcut.cell: text})[shortcut.tests]
    assert shortcut.words in "; ".join(found)


@pytest.mark.overnight
@pytest.mark.slow
@pytest.mark.parametrize("lab", LABS)
def test_right_answers_of_any_style_do_not_wait(labs, lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    waits = set()
    for name, answers in labs[lab].right_answers():
        for found in (labs[lab].read(answers), labs[lab].run(answers)):
            waits |= {(name, test) for test, words in found.items() if words}
    assert waits <= WAITS, waits - WAITS
