"""A notebook's cell that uses an answer which is not there yet says so before it runs, and does not fail deep inside."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from types import SimpleNamespace

from utils.checking.verdicts import is_answered, label_of


def missing_answer(cell: ast.Module, names: Mapping[str, object]) -> str | None:
    """Say which answer a cell uses that is not there yet; None if the cell may run.

    The parameters of the checks among a notebook's `names` have the names of its answers, but for texts of files. A check says
    by itself that its answer is not written, a cell that asks `is_answered` goes on without the answer, and an answer may call
    one that is written later.
    """
    checks = {name: check for name, check in names.items() if name.startswith("check_") and hasattr(check, "question")}
    asked = [(check.question, inspect.signature(check).parameters.values()) for check in checks.values()]
    questions = {p.name: question for question, answers in asked for p in answers if p.annotation is p.empty}
    nodes = list(ast.walk(cell))
    bound = {getattr(node, "name", getattr(node, "arg", None)) for node in nodes}  # functions, classes, arguments
    bound |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    if bound & questions.keys():
        return None
    calls = [n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") in ("is_answered", *checks)]
    may_wait = {part.id for call in calls for part in ast.walk(call) if isinstance(part, ast.Name)}
    for name in (node.id for node in nodes if isinstance(node, ast.Name) and node.id in questions):
        what = f"This cell needs {label_of(questions[name])} ({name})"
        if name not in names:
            above = "Run the cells above this one first (menu Run, Run All Above Selected Cell)"
            return f"{what}, and there is no {name}. {above}, mend what ends in an error there, and name your answer {name}."
        if name not in may_wait and not is_answered(names[name]):
            return f"{what}: answer it first."
    return None


def watch_cells() -> None:
    """Let each cell of this notebook say what it lacks before it runs; do nothing outside of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()

    def visit(cell: ast.Module) -> ast.Module:
        if message := missing_answer(cell, shell.user_ns):
            cell.body = ast.parse(f"raise __import__('utils.checking').checking.AnswerNeeded({message!r})").body
        return cell

    if shell is not None:
        shell.ast_transformers.append(SimpleNamespace(visit=visit))
