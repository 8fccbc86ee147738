"""A notebook's cell that uses an answer which is not there yet says so before it runs, and does not fail deep inside."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping

from utils.checking.verdicts import is_answered, label_of


def missing_answer(cell: ast.Module, names: Mapping[str, object]) -> str | None:
    """Say which answer a cell uses that is not there yet; None if the cell may run.

    The parameters of a lab's checks have the names of its answers. A check says by itself that its answer is not written,
    a cell that asks `is_answered` goes on without the answer, and an answer may call one that is written later.

    Args:
        cell: the parsed cell.
        names: the names of the notebook.
    """
    checks = {name: value for name, value in names.items() if name.startswith("check_") and hasattr(value, "question")}
    questions = {answer: check.question for check in checks.values() for answer in inspect.signature(check).parameters}
    nodes = list(ast.walk(cell))
    used = [node.id for node in nodes if isinstance(node, ast.Name) and node.id in questions]
    bound = {getattr(node, "name", getattr(node, "arg", None)) for node in nodes}  # functions, classes, arguments
    bound |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    if bound & questions.keys():
        return None
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("is_answered", *checks)
    ]
    may_wait = {part.id for call in calls for part in ast.walk(call) if isinstance(part, ast.Name)}
    for name in used:
        what = f"This cell needs {label_of(questions[name])} ({name})"
        if name not in names:
            above = "Run the cells above this one first (menu Run, Run All Above Selected Cell)"
            return f"{what}, and there is no {name}. {above}, mend what ends in an error there, and name your answer {name}."
        if name not in may_wait and not is_answered(names[name]):
            return f"{what}: answer it first."
    return None


class Watch:
    """IPython hands each cell to `visit` before the cell runs."""

    def __init__(self, names: Mapping[str, object]):
        self._names = names

    def visit(self, cell: ast.Module) -> ast.Module:
        """Return the cell, or one that only says what is missing."""
        if message := missing_answer(cell, self._names):
            cell.body = ast.parse(f"raise __import__('utils.checking').checking.AnswerNeeded({message!r})").body
        return cell


def watch_cells() -> None:
    """Look at each cell of this notebook before it runs; do nothing outside of one."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        shell.ast_transformers.append(Watch(shell.user_ns))
