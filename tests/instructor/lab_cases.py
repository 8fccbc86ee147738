"""Helpers for the tests of labs.

They read the answers and the hidden checks from a lab's cells, judge changed answers, and read the grades that stock
nbgrader gives to whole notebooks. What concerns one lab only is in the test file of that lab.
"""

import ast
import contextlib
import functools
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from instructor.build import Built, build_lab
from instructor.course import Score
from instructor.names import FILE_CELL, bound_names, python_of, used_names
from instructor.points import lab_path
from utils.checking import Verdict, is_answered
from utils.checking.verdicts import missing_answer


@dataclass(frozen=True)
class WrongAnswer:
    """A typical mistake in one answer cell: the model answer changed, and code that runs after it."""

    mistake: str
    cell: str
    code: str  # replaces one of the functions of the model answer
    phrases: tuple[str, ...]  # the messages of both checks contain one of them
    loses: tuple[str, ...] = ()  # test cells that lose their points; empty: the answer's own
    replaces: tuple[tuple[str, str], ...] = ()  # pairs (old text, new text)

    @property
    def lost(self) -> set[str]:
        """Ids of the test cells that lose their points."""
        return set(self.loses or (f"{self.cell}_tests",))


def mistakes(cell: str, *rows: tuple, loses: tuple[str, ...] = ()) -> list[WrongAnswer]:
    """List the wrong answers of one cell.

    Args:
        cell: id of the answer cell.
        rows: (what is wrong, change, words of the messages). A change is a pair (old text of the model answer, new text),
            several such pairs, or code that runs after the model answer. Of several words, a message contains one.
        loses: test cells that lose their points, if not the answer's own.
    """
    found = []
    for mistake, change, words in rows:
        phrases = (words,) if isinstance(words, str) else words
        code, replaces = (change, ()) if isinstance(change, str) else ("", pairs_of(change))
        found.append(WrongAnswer(mistake, cell, code, phrases, loses, replaces))
    return found


def pairs_of(change: tuple) -> tuple[tuple[str, str], ...]:
    """Return a change as pairs: it is a pair of texts itself, or several."""
    return (change,) if isinstance(change[0], str) else change


def answers_in_text(text: str) -> list[tuple[str, str, str | tuple]]:
    """List answers that stand in a text like cells of a notebook: [(what differs, answer cell, code or change)].

    `# %% q1_1: what differs` opens an answer to 1.1. It is code that runs after the model answer; or, if its first line is
    indented, what replaces the lines between the model answer's markers; or a diff against the model answer, of whole lines,
    with a blank line between two changes.
    """
    found: list = []
    for entry in text.split("# %% ")[1:]:
        head, code = entry.strip("\n").split("\n", 1)
        cell, difference = head.split(": ", 1)
        if code.startswith("-"):
            found.append((difference, cell, tuple(_pair_of(change.split("\n")) for change in code.split("\n\n"))))
        else:
            found.append((difference, cell, ((BODY, code),) if code.startswith(" ") else code))
    return found


def mistakes_in_text(text: str) -> list[WrongAnswer]:
    """List wrong answers that stand in such a text, mostly those that change several lines.

    `# %% q1_1: what is wrong => words | other words` opens one; `# %% q1_1 loses q1_2_tests: ...` one that loses others' tests.
    """
    found = []
    for head, where, change in answers_in_text(text):
        mistake, words = head.split(" => ")
        cell, _, loses = where.partition(" loses ")
        found += mistakes(cell, (mistake, change, tuple(words.split(" | "))), loses=tuple(loses.split()))
    return found


def _pair_of(diff: list[str]) -> tuple[str, ...]:
    return tuple("".join(f"{line[1:]}\n" for line in diff if line[0] == sign) for sign in "-+")


@functools.cache
def built(name: str) -> Built:
    """Build a lab, once for all test files of this process."""
    return build_lab(lab_path(name))


# ---- a lab's cells -----------------------------------------------------------------------------------------------


def has_role(cell, role: str) -> bool:
    """True if nbgrader's metadata give the cell this role ("solution" or "grade")."""
    return cell.metadata.get("nbgrader", {}).get(role, False)


def answers_in(cells) -> dict[str, str]:
    """Read the answers: {id of an answer cell: its source}."""
    return {
        cell.metadata.nbgrader["grade_id"]: cell.source
        for cell in cells
        if cell.cell_type == "code" and has_role(cell, "solution")
    }


def hidden_calls(cells) -> dict[str, str]:
    """Read the calls of the hidden checks: {id of a test cell: the text `hidden.name(arguments)`}."""
    found = {}
    for cell in cells:
        if cell.cell_type == "code" and has_role(cell, "grade"):
            (call,) = re.findall(r"^(hidden\.\w+\(.*\))\.raise_if_wrong\(\)$", cell.source, flags=re.MULTILINE)
            found[cell.metadata.nbgrader["grade_id"]] = call
    return found


def check_in(call: str) -> str:
    """Return the name of the check in the text of a call."""
    return re.match(r"hidden\.(\w+)", call)[1]


def calls_of(answer: str, calls: dict[str, str]) -> dict[str, str]:
    """Select the calls that judge one answer cell."""
    own = {test: call for test, call in calls.items() if test.startswith(f"{answer}_")}
    assert own, f"no test cell judges {answer}"
    return own


def calls_reached_by(source: str, calls: dict[str, str], answers: dict[str, str]) -> dict[str, str]:
    """Select the calls that use a file or a name of this cell, themselves or through answers: no other verdict can change."""
    if file := FILE_CELL.match(source):
        return {test: call for test, call in calls.items() if file[1] in call}
    names = bound_names(ast.parse(source))
    sources = [ast.parse(text) for text in answers.values() if not text.startswith("%%")]
    functions = {
        node.name: used_names(ast.unparse(node)) for tree in sources for node in tree.body if hasattr(node, "name")
    }
    while more := {name for name, used in functions.items() if used & names} - names:
        names |= more
    return {test: call for test, call in calls.items() if used_names(call) & names}


def drawn(calls: dict[str, str], seed: int) -> dict[str, str]:
    """Return the same calls with other inputs than those of the grading."""
    return {test: f"{call[:-1]}, seed={seed})" for test, call in calls.items()}


def checks_of(lab: str) -> ModuleType:
    """Import the hidden checks of a lab."""
    return importlib.import_module(f"instructor.checks.{lab}")


def three_digits(value):
    """Round the numbers in what an answer returns."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return type(value)(float(f"{value:.2e}"))
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().apply_(three_digits).to(value.dtype)
    return type(value)(map(three_digits, value)) if isinstance(value, tuple | list) else value


def rounded(function):
    """Return an answer that rounds what it returns; no watch of a check sees it."""

    @functools.wraps(function)
    def answer(*args, **kwargs):
        result = function(*args, **kwargs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return three_digits(result)

    return answer


# ---- answers and verdicts ----------------------------------------------------------------------------------------


def run_answers(answers: dict[str, str], names: dict) -> dict:
    """Run answer cells with these global names, in the current folder, and return the names."""
    for cell, source in answers.items():
        if source.startswith("%%writefile"):
            head, text = source.split("\n", 1)
            Path(head.split()[1]).write_text(text)
        else:
            exec(compile(source, cell, "exec"), names)
    return names


BODY = "between the first solution markers"  # stands for what the model answer has there


def changed_text(text: str, replaces: tuple[tuple[str, str], ...]) -> str:
    """Change the text of an answer by pairs (old text, new text); `BODY` is all between its first markers."""
    for old, new in replaces:
        if old == BODY:
            start, end = text.index("### BEGIN SOLUTION") + len("### BEGIN SOLUTION"), text.index("### END SOLUTION")
            text = f"{text[:start]}\n{new.strip(chr(10))}\n    {text[end:]}"
        else:
            assert old in text, old
            text = text.replace(old, new)
    return text


def source_of(answers: dict[str, str], wrong: WrongAnswer) -> str:
    """Return the source of a cell with this mistake."""
    return changed_text(answers[wrong.cell], wrong.replaces) + (f"\n\n{wrong.code}" if wrong.code else "")


def right_source(answers: dict[str, str], right: tuple) -> str:
    """Return the code of another right answer, which runs after the model answer or in its place."""
    _, cell, change = right
    return change if isinstance(change, str) else changed_text(answers[cell], change)


def first_of_each_cell(cases: list, count: int, others=pytest.mark.slow) -> list:
    """List wrong or right answers as parameters; all but the first `count` of each answer cell get the mark `others`."""
    seen, parameters = Counter(), []
    for case in cases:
        name, cell = (case.mistake, case.cell) if isinstance(case, WrongAnswer) else case[:2]
        seen[cell] += 1
        parameters.append(pytest.param(case, id=name, marks=[others] if seen[cell] > count else []))
    return parameters


def verdicts_on(calls: dict[str, str], names: dict, checks: ModuleType) -> dict[str, Verdict]:
    """Run the hidden checks on the answers among `names`: {id of a test cell: Verdict}."""
    return {cell: eval(call, {**names, "hidden": checks}) for cell, call in calls.items()}


def refusals(verdicts: dict[str, Verdict]) -> list[str]:
    """Return the messages of the checks that did not pass."""
    return [str(verdict) for verdict in verdicts.values() if not verdict.passed]


def assert_loses_alone(verdicts: dict[str, Verdict], wrong: WrongAnswer, or_says: tuple[str, ...] = ()) -> None:
    """Check that the mistake loses its own tests and no others, and that the last message names it, or has other words."""
    assert {cell for cell, verdict in verdicts.items() if not verdict.passed} == wrong.lost, refusals(verdicts)
    for cell in wrong.lost:
        question, message = verdicts[cell].question, verdicts[cell].message
        assert str(verdicts[cell]).startswith(
            f"✗ {question if question.startswith('Bonus') else f'Question {question}'}"
        )
        assert "Traceback" not in message and "/tmp/" not in message
        assert "the simulator stopped" not in message or re.search(r"line \d+ in \w+: ", message), message
    message = verdicts[max(wrong.lost)].message
    assert any(phrase in message for phrase in wrong.phrases + or_says), message


def said_by_untouched_cells(cells, visible, names: dict) -> dict[str, str | None]:
    """Return what a student reads who runs a notebook without answering: {id of a cell that needs an answer: message}.

    Args:
        cells: the student's notebook; its answer cells are run as they are, in the current folder.
        visible: VisibleChecks of the lab.
        names: the notebook's names after its setup.
    """
    for cell in cells:
        if cell.cell_type != "code" or not has_role(cell, "solution"):
            continue
        with contextlib.suppress(NotImplementedError):  # a stub at the top level of its cell
            run_answers({cell.id: cell.source}, names)
    found: dict[str, str | None] = {}
    scope = visible.scope(names)
    answers = set().union(
        *(bound_names(ast.parse(text)) for text in answers_in(cells).values() if not text.startswith("%%"))
    )
    for cell, used, _ in names_by_cell(cells):
        missing = [
            n for n in used & answers if not is_answered(scope.get(n)) and f"is_answered({n})" not in cell.source
        ]
        if has_role(cell, "grade"):
            found[cell.id] = visible.message(cell.metadata.nbgrader["grade_id"], scope)
        elif missing and not has_role(cell, "solution"):
            found[cell.id] = missing_answer(ast.parse(python_of(cell.source)), scope)
    return found


# ---- what a notebook's cells use and give ------------------------------------------------------------------------


def names_by_cell(cells) -> Iterator[tuple]:
    """Yield of each Python cell (the cell, the names that it takes from the notebook, the names that it defines)."""
    for cell in cells:
        text = python_of(cell.source) if cell.cell_type == "code" else None
        if text is not None and not cell.source.startswith("%%"):
            given = bound_names(ast.parse(text))
            yield cell, used_names(text) - given, given


def prose_of(notebook: str) -> str:
    """Join the markdown cells of a notebook."""
    return "\n".join(c.source for c in nbformat.reads(notebook, as_version=4).cells if c.cell_type == "markdown")


# ---- whole notebooks, graded by stock nbgrader -------------------------------------------------------------------


@dataclass(frozen=True)
class Graded:
    """Scores {student: {cell id: Score}} and executed notebooks by student."""

    scores: dict[str, dict[str, Score]]
    notebooks: dict[str, nbformat.NotebookNode]


def errors_in(notebook: nbformat.NotebookNode) -> list[tuple]:
    """List the errors in an executed notebook: [(cell, error output)]."""
    return [(c, output) for c in notebook.cells for output in c.get("outputs", []) if output.output_type == "error"]


def graded_by_nbgrader(lab: Built, grade_notebooks, **notebooks: str) -> Graded:
    """Grade notebooks, by student, with stock nbgrader."""
    course, scores = grade_notebooks(lab, notebooks)
    return Graded(
        scores,
        {
            student: nbformat.read(course.root / "autograded" / student / lab.name / f"{lab.name}.ipynb", as_version=4)
            for student in scores
        },
    )
