"""The visible checks of a lab, run on answers as a student runs them: "green means right" in numbers."""

import ast
import contextlib
import io
from collections.abc import Iterable

from utils.checking import AnswerNeeded


class VisibleChecks:
    """The visible parts of a lab's test cells, with the helpers that the notebook's locked cells define for them.

    Args:
        cells: the instructor's notebook.
    """

    def __init__(self, cells) -> None:
        sources = {}
        for cell in cells:
            facts = cell.metadata.get("nbgrader", {})
            if cell.cell_type == "code" and facts:
                sources[facts["grade_id"]] = cell.source
        self.tests = {
            name: compile(source.split("### BEGIN HIDDEN TESTS")[0], name, "exec")
            for name, source in sources.items()
            if name.endswith("_tests")
        }
        graded = {facts["grade_id"] for facts in (c.metadata.get("nbgrader", {}) for c in cells) if _is_graded(facts)}
        given = [
            ast.parse(source) for name, source in sources.items() if name not in graded and not source.startswith("%%")
        ]
        kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
        self.helpers = [node for tree in given for node in tree.body if isinstance(node, kinds)]

    def scope(self, names: dict) -> dict:
        """Return a copy of these names with the helpers among them; answers stay as they are."""
        scope = dict(names)
        for node in self.helpers:
            with contextlib.suppress(NameError):  # its defaults need sizes of the notebook: no check uses it
                exec(compile(ast.Module([node], []), "setup", "exec"), scope)
        return scope | names  # the test's own versions, as the answers use them

    def message(self, test: str, scope: dict) -> str | None:
        """Run one test cell; return what a student reads, or None if it passes."""
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(self.tests[test], scope)
        except (AssertionError, AnswerNeeded) as error:
            return str(error)
        return None

    def of(self, answer: str) -> Iterable[str]:
        """Return the ids of the test cells of one answer cell."""
        return [test for test in self.tests if test.startswith(f"{answer}_")]


def _is_graded(facts) -> bool:
    return bool(facts.get("grade") or facts.get("solution"))
