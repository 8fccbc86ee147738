"""The code of a submission as text: its statements, and the names by which they reach each other. Nothing is run."""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from instructor.grading.submission.plan import Step
from instructor.grading.submission.statements import (
    DEFINITIONS,
    called_names,
    changed_names,
    handed_names,
    own_attributes,
    taken_names,
)
from instructor.grading.submission.text_numbers import name_of
from instructor.names import FILE_CELL, bound_names, python_of

# What a student could give a class of theirs to make a library's name look like their own.
_LIBRARY = frozenset(
    {*dir(torch), *dir(torch.Tensor), *dir(torch.nn.functional), *dir(torch.nn), *dir(torch.nn.Module)}
)


@dataclass
class Statement:
    """A statement at the top of a student's cell or file."""

    node: ast.stmt
    number: int  # in running order
    names: set[str]  # that it takes from elsewhere


class SubmittedCode:
    """The statements of a submission.

    Args:
        steps: the plan of the submission.
        base: the notebook's names after its setup.
    """

    def __init__(self, steps: Iterable[Step], base: Mapping[str, object]):
        self.lab_names: set[str] = set()  # that the lab's own cells define
        self.bindings: dict[str, list[Statement]] = {}  # name -> statements that define or change it
        self.handed: dict[str, list[Statement]] = {}  # name -> statements that hand it to a call, which may change it
        self.called: set[str] = set()  # names of functions, by whatever statement they come: somebody calls them
        self.files: dict[str, list[Statement]] = {}  # module of the student's -> its statements
        self.attributes: set[str] = set()  # of the student's own classes
        self._base, self._count = base, 0
        # What `statements_of` returned: always the same list for a name, so that readers know which lists they have followed.
        self._statements: dict[str, list[Statement]] = {}
        for step in steps:
            if step.kind == "tests":
                self.called |= set(step.needs.names)
            if step.cell.cell_type != "code":
                continue
            if step.untouched and not step.answer:
                for node in ast.parse(python_of(step.source) or "").body:
                    self.lab_names |= set() if isinstance(node, ast.Import | ast.ImportFrom) else bound_names(node)
            elif step.kind == "student" and not step.untouched:
                self._add(step.source)

    def _add(self, source: str) -> None:
        """Add the statements of a cell; one that is no Python has none."""
        match = FILE_CELL.match(source.lstrip())
        text = source.lstrip().partition("\n")[2] if match else python_of(source)
        try:
            tree = ast.parse(text or "")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return
        self.attributes |= (own_attributes(tree) | _fields_by_call(tree)) - _LIBRARY
        statements = []
        for node in tree.body:
            self._count += 1
            statements.append(Statement(node, self._count, taken_names(node)))
        if match:
            path = Path(match[1])
            self.files.setdefault(path.stem if path.stem != "__init__" else path.parent.name, []).extend(statements)
        for statement in statements:
            for name in changed_names(statement.node):
                # Whoever changes a module for others is found by other signs; their answers are not to blame.
                # `import torch.fft` gives the module that is there.
                is_module = isinstance(self._base.get(name), types.ModuleType)
                imported = isinstance(statement.node, ast.Import)
                if not is_module or (name in bound_names(statement.node) and not imported):
                    self.bindings.setdefault(name, []).append(statement)
            self.called |= called_names(statement.node)
            for name in handed_names(statement.node):
                self.handed.setdefault(name, []).append(statement)

    def statements_of(self, name: str) -> list[Statement]:
        """The statements that a name's value comes from; a function or a class is what its definition says."""
        if name not in self._statements:
            own = self.bindings.get(name, [])
            defined = any(isinstance(statement.node, (*DEFINITIONS, ast.Import, ast.ImportFrom)) for statement in own)
            is_data = own and not defined and name not in self.called and name in self.handed
            self._statements[name] = own + self.handed[name] if is_data else own
        return self._statements[name]


def _fields_by_call(tree: ast.AST) -> set[str]:
    """The fields that `namedtuple` takes as texts, and `SimpleNamespace` as keywords."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    tuples = [n for n in calls if name_of(n.func) == "namedtuple"]
    texts = [c.value for n in tuples for c in ast.walk(n) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
    spaces = [n for n in calls if name_of(n.func) == "SimpleNamespace"]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    return words | {keyword.arg for n in spaces for keyword in n.keywords if keyword.arg}
