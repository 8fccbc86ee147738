"""What the tests of all labs do: read answers and hidden checks off a lab's cells, judge a changed answer, and look at
what stock nbgrader makes of whole notebooks. What is one lab's own stands in its test file.
"""

import ast
import importlib
import re
from dataclasses import dataclass
from datetime import datetime
from types import ModuleType

import nbformat

from instructor.build import ROOT, Built
from instructor.course import Score, answered_notebook
from utils.checking import Verdict


@dataclass(frozen=True)
class WrongAnswer:
    """A mistake, the answer cell it stands in, what the student reads, and the test cells it loses."""

    mistake: str
    cell: str
    code: str = ""  # stands after the model answer, so that it replaces a function of it
    phrase: str | tuple[str, ...] = ""  # in the message; of several, any one
    loses: tuple[str, ...] = ()
    replaces: tuple[tuple[str, str], ...] = ()  # in a file cell: pairs (text that stands there once, instead)

    @property
    def lost(self) -> set[str]:
        return set(self.loses or (f"{self.cell}_tests",))


# ---- a lab's cells -----------------------------------------------------------------------------------------------


def has_role(cell, role: str) -> bool:
    """Whether nbgrader's metadata give a cell this role: "solution", "grade"."""
    return cell.metadata.get("nbgrader", {}).get(role, False)


def answers_in(cells) -> dict[str, str]:
    """{id of an answer cell: its source}"""
    return {
        cell.metadata.nbgrader["grade_id"]: cell.source
        for cell in cells
        if cell.cell_type == "code" and has_role(cell, "solution")
    }


def hidden_calls(cells) -> dict[str, str]:
    """{id of a test cell: the call of its hidden check, `hidden.name(arguments)`, as the cell writes it}"""
    found = {}
    for cell in cells:
        if cell.cell_type == "code" and has_role(cell, "grade"):
            (call,) = re.findall(r"^(hidden\.\w+\(.*\))\.raise_if_wrong\(\)$", cell.source, flags=re.MULTILINE)
            found[cell.metadata.nbgrader["grade_id"]] = call
    return found


def check_in(call: str) -> str:
    """The name of the check that a call calls."""
    return re.match(r"hidden\.(\w+)", call)[1]


def calls_of(answer: str, calls: dict[str, str]) -> dict[str, str]:
    """The calls that judge one answer cell."""
    own = {test: call for test, call in calls.items() if test.startswith(f"{answer}_")}
    assert own, f"no test cell judges {answer}"
    return own


def checks_of(lab: str) -> ModuleType:
    """The hidden checks of a lab."""
    return importlib.import_module(f"instructor.checks.{lab}")


# ---- answers and verdicts ----------------------------------------------------------------------------------------


def run_answers(answers: dict[str, str], names: dict) -> dict:
    """Run the answer cells in `names`, which it returns; a cell that writes a file is left out."""
    for cell, source in answers.items():
        if not source.startswith("%%writefile"):
            exec(compile(source, cell, "exec"), names)
    return names


def replaced_once(text: str, old: str, new: str) -> str:
    """The text with `old`, which must stand there once, replaced."""
    assert text.count(old) == 1, (text.count(old), old)
    return text.replace(old, new)


def verdicts_on(calls: dict[str, str], names: dict, checks: ModuleType) -> dict[str, Verdict]:
    """{id of a test cell: Verdict} of the hidden checks on the answers among `names`."""
    return {cell: eval(call, {**names, "hidden": checks}) for cell, call in calls.items()}


def refusals(verdicts: dict[str, Verdict]) -> list[str]:
    """What a student reads who did not pass."""
    return [str(verdict) for verdict in verdicts.values() if not verdict.passed]


def assert_loses_alone(verdicts: dict[str, Verdict], wrong: WrongAnswer, every_message: bool = True) -> None:
    """The mistake loses the tests it should and no others, and is named: in the last message at least."""
    assert {cell for cell, verdict in verdicts.items() if not verdict.passed} == wrong.lost, refusals(verdicts)
    phrases = (wrong.phrase,) if isinstance(wrong.phrase, str) else wrong.phrase
    for cell in wrong.lost:
        verdict = verdicts[cell]
        question = verdict.question if verdict.question.startswith("Bonus") else f"Question {verdict.question}"
        assert str(verdict).startswith(f"✗ {question}")
        if every_message or cell == max(wrong.lost):
            assert any(phrase in verdict.message for phrase in phrases), verdict.message


# ---- all checks of a lab -----------------------------------------------------------------------------------------


def points_of(lab: Built) -> tuple[float, float]:
    """(points, bonus points)"""
    regular, bonus = (sum(q.points for q in lab.questions if q.bonus == which) for which in (False, True))
    return regular, bonus


def assert_each_check_has_its_cell(calls: dict[str, str], checks: ModuleType) -> None:
    assert sorted(check_in(call) for call in calls.values()) == sorted(checks.__all__)


def assert_verdicts_name_their_question(calls: dict[str, str], checks: ModuleType) -> None:
    for cell, call in calls.items():
        kind, part, number = cell.split("_")[:3]
        expected = f"Bonus {part}.{number}" if kind == "bonus" else f"{kind[1:]}.{part}"
        assert getattr(checks, check_in(call)).question == expected, cell


def assert_mistakes_cover(wrong_answers: list[WrongAnswer], calls: dict[str, str], at_least: int) -> None:
    """There are so many mistakes, each once, and every test cell is lost by one."""
    assert len(wrong_answers) >= at_least
    assert len({wrong.mistake for wrong in wrong_answers}) == len(wrong_answers)
    assert set().union(*(wrong.lost for wrong in wrong_answers)) == set(calls)


# ---- what a notebook's cells use and give ------------------------------------------------------------------------


def names_used(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def names_given(tree: ast.AST) -> set[str]:
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


def arguments_named(tree: ast.AST) -> set[str]:
    return {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def answers_required(tree: ast.AST) -> set[str]:
    """Names of the answers that a cell asks for with require_answer."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {call.args[0].value for call in calls if getattr(call.func, "id", "") == "require_answer"}


def assert_missing_answers_stop_only_cells_that_say_so(cells) -> None:
    """What a cell uses comes from cells that run at least whenever it runs itself."""
    needs, problems = {}, []  # needs: name -> answers without which it is not there
    for cell in cells:
        if cell.cell_type != "code" or cell.source.startswith("%%writefile"):
            continue
        tree = ast.parse(cell.source)
        if has_role(cell, "solution"):
            needs |= {node.name: {node.name} for node in tree.body if isinstance(node, ast.FunctionDef)}
            continue
        if has_role(cell, "grade"):
            continue  # a check reports a missing answer by itself
        required, given = answers_required(tree), names_given(tree)
        for name in names_used(tree) - given - arguments_named(tree):
            missing = needs.get(name, set()) - required
            if missing:
                problems.append(f"{cell.source.splitlines()[0]}: {name} needs {missing}")
        needs |= {name: required for name in given}
    assert not problems, "\n".join(problems)


def assert_graded_cells_need_no_plain_cell(cells) -> None:
    """Answers and tests use nothing that a student may delete: all they need is given by answers and locked cells."""
    plain, needed = {}, []  # plain: name -> the first line of the plain cell that gives it
    for cell in cells:
        if cell.cell_type != "code" or cell.source.startswith("%%writefile"):
            continue
        tree = ast.parse(cell.source)
        given = names_given(tree)
        if "nbgrader" not in cell.metadata:
            plain |= dict.fromkeys(given, cell.source.splitlines()[0])
        elif has_role(cell, "grade") or has_role(cell, "solution"):
            missing = (names_used(tree) - given - arguments_named(tree)) & plain.keys()
            needed += [f"{cell.metadata.nbgrader['grade_id']} needs {name} of {plain[name]!r}" for name in missing]
    assert not needed, "lock what graded cells need:\n" + "\n".join(needed)


def prose_of(notebook: str) -> str:
    """The markdown cells of a notebook."""
    return "\n".join(c.source for c in nbformat.reads(notebook, as_version=4).cells if c.cell_type == "markdown")


def assert_figures_are_described(prose: str, at_least: int) -> None:
    figures = re.findall(r"!\[(.*?)\]\((.*?)\)", prose)
    assert len(figures) >= at_least
    for alt, path in figures:
        assert len(alt) > 30 and (ROOT / path).is_file(), path


# ---- whole notebooks, graded by stock nbgrader -------------------------------------------------------------------


@dataclass(frozen=True)
class Graded:
    """Scores {student: {cell id: Score}} and executed notebooks of the students "solved", "untouched" and more."""

    scores: dict[str, dict[str, Score]]
    notebooks: dict[str, nbformat.NotebookNode]

    def errors(self, student: str) -> list[tuple]:
        """[(cell, the error that stands below it)]"""
        return [
            (cell, output)
            for cell in self.notebooks[student].cells
            for output in cell.get("outputs", [])
            if output.output_type == "error"
        ]

    def seconds(self, student: str) -> list[float]:
        """How long each code cell took."""
        return [_seconds(cell) for cell in self.notebooks[student].cells if cell.cell_type == "code"]

    def not_full(self, student: str) -> dict[str, Score]:
        """The automatic tests without all their points."""
        return {
            name: score
            for name, score in self.scores[student].items()
            if not score.needs_manual_grade and score.auto != score.points
        }


def _seconds(cell) -> float:
    times = cell.metadata.get("execution", {})
    begin, end = (times.get(key) for key in ("iopub.execute_input", "shell.execute_reply"))
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds() if begin and end else 0.0


def graded_by_nbgrader(lab: Built, grade_notebooks, **more: str) -> Graded:
    """Stock nbgrader on the solved and the untouched notebook, and on more: {student: notebook}."""
    course, scores = grade_notebooks(lab, {"solved": answered_notebook(lab), "untouched": lab.student, **more})
    return Graded(
        scores,
        {
            student: nbformat.read(course.root / "autograded" / student / lab.name / f"{lab.name}.ipynb", as_version=4)
            for student in scores
        },
    )


def assert_solved_gets_every_point(graded: Graded, by_hand: dict[str, float], points: float) -> None:
    assert graded.not_full("solved") == {}
    scores = graded.scores["solved"]
    assert {name: score.points for name, score in scores.items() if score.needs_manual_grade} == by_hand
    assert sum(score.points for score in scores.values()) == points
    assert [(cell.source[:60], error.evalue) for cell, error in graded.errors("solved")] == []


def assert_solved_is_quick(graded: Graded, minutes: float = 8, longest_cell: float = 60) -> None:
    seconds = graded.seconds("solved")
    assert sum(seconds) > 5  # the times were recorded
    assert max(seconds) < longest_cell
    assert sum(seconds) < 60 * minutes


def assert_untouched_says_what_is_missing(graded: Graded, bare_stubs: bool = False) -> None:
    """No point, and each error names a question. bare_stubs: answers at the top level of their cell raise by
    themselves.
    """
    assert sum(score.auto or 0 for score in graded.scores["untouched"].values()) == 0
    for cell, error in graded.errors("untouched"):
        if bare_stubs and error.ename == "NotImplementedError":
            continue
        assert error.ename in ("WrongAnswer", "AnswerNeeded"), (cell.source[:60], error.evalue)
        assert re.search(r"(Question|[Bb]onus) \d\.\d", error.evalue), error.evalue
