"""Whether the text of an answer keeps to what right answers use (`usual`). What it uses beside that waits for a person.

The code of an answer is read as text: the functions that a check calls, and whatever of the student's cells and files they reach by name.
"""

from __future__ import annotations

import ast
import builtins
import re
import types
from collections import Counter
from collections.abc import Iterable

import torch

from instructor.grading.submission import vocabulary
from instructor.grading.submission.plan import Step
from instructor.grading.submission.statements import (
    DEFINITIONS,
    annotating_names,
    computing_nodes,
    imports_by_text,
    own_attributes,
)
from instructor.grading.submission.submitted_code import Statement, SubmittedCode
from instructor.grading.submission.text_numbers import name_of
from instructor.grading.submission.text_words import lines_of_code, loops, read_arguments, sign_of, words_in
from instructor.grading.submission.usual import Usual, told

_DUNDER = re.compile(r"__\w+__")


class Reading:
    """The code of a submission, read against what right answers use."""

    def __init__(self, steps: Iterable[Step], usual: Usual):
        self.usual, self.code = usual, SubmittedCode(steps, usual.base)

    def unusual(self, step: Step, strict: bool) -> list[str]:
        """What the code that a test cell calls reaches for, in words, beside what right answers need.

        Args:
            step: the test cell.
            strict: the question forbids something. Where none does, any library that computes may be used; what the course has
                beside the model answer's words, and what leads to the insides of Python, may not.
        """
        return told(_Answer(self.usual, self.code, step, strict).read())


class _Answer:
    """The code that one test cell calls, and what is unusual in it: `found`, {what is said: words of the text}."""

    def __init__(self, usual: Usual, code: SubmittedCode, step: Step, strict: bool):
        narrow = usual.narrow.get(step.name) or usual.narrow.get(step.question)
        self.usual, self.code, self.step, self.words = usual, code, step, usual.words(step.question)
        self.strict = strict or bool(narrow)
        self.forbidden = frozenset(usual.forbidden.get(step.name, "").split())
        # All words of a question that has a list of its own.
        self.narrow = frozenset(narrow.split()) | self.words.names | self.words.attributes if narrow else None
        self.found: dict[str, list[str]] = {}

    def note(self, what: str, word: str) -> None:
        self.found.setdefault(what, []).append(word)

    def read(self) -> dict[str, list[str]]:
        """Read every statement that the test cell's names reach, once."""
        todo: list[Statement] = []
        for name in self.step.needs.names:
            if name in self.code.bindings:
                todo += self.code.bindings[name]
            elif name in self.code.lab_names or name in self.usual.base:
                continue  # an answer left as it was
            elif self.strict:
                self.note("defines out of sight", name)
        missing = set(self.usual.needed.get(self.step.question, "").split()) if todo else set()
        read: dict[int, ast.stmt] = {}
        # Lists of statements: without it, a cell of n assignments to one name takes n * n steps.
        followed: set[int] = set()
        while todo:
            statement = todo.pop()
            if statement.number in read:
                continue
            read[statement.number] = statement.node
            if missing:
                missing -= words_in(statement.node).names | words_in(statement.node).attributes
            for statements in self._read_statement(statement):
                if id(statements) not in followed:
                    followed.add(id(statements))
                    todo += statements
        if self.strict:
            self.found |= self.usual.other_ways(self.step.question, [read[number] for number in sorted(read)])
        self.found["does without"] = sorted(missing)
        if self.strict:  # elsewhere the values tell, and an argument may cancel
            names = sorted(self.step.needs.names)
            self.found["does not read"] = [word for name in names for word in self._unread_arguments(name)]
        return self.found

    def _unread_arguments(self, name: str) -> list[str]:
        """The arguments that the model answer's function of this name reads, and the student's does not."""
        own = self.code.bindings.get(name, [])
        last = max(own, key=lambda statement: statement.number, default=None)
        if last is None or not isinstance(last.node, ast.FunctionDef) or last.node.args.vararg or last.node.args.kwarg:
            return []
        places = {place for place, _ in read_arguments(last.node)}
        count = len(last.node.args.posonlyargs) + len(last.node.args.args)
        return [f"{name}'s {arg}" for at, arg in self.usual.reads.get(name, []) if at < count and at not in places]

    def _read_statement(self, statement: Statement) -> list[list[Statement]]:
        """Note what is unusual in a statement; returns the lists of statements that it reaches."""
        reached: list[list[Statement]] = []
        for name in sorted(statement.names):
            own = self.code.bindings.get(name, [])
            before = isinstance(statement.node, DEFINITIONS) or any(other.number < statement.number for other in own)
            written = bool(own) and before and (name in vocabulary.BUILTINS or not hasattr(builtins, name))
            if written or name in self.code.lab_names or name in self.words.names:
                reached.append(self.code.statements_of(name))
            elif name in self.usual.base:
                value = self.usual.base[name]
                if isinstance(value, types.ModuleType):
                    self._module(value.__name__)
                elif not _is_plain(name, value):
                    self.note("calls", name)
            elif hasattr(builtins, name):
                known = name in vocabulary.BUILTINS or (not self.strict and name in vocabulary.BUILTINS_ELSEWHERE)
                known &= self.narrow is None or name in self.narrow or name in vocabulary.ERRORS
                if not known and not (name == "__import__" and imports_by_text(statement.node)):
                    self.note("calls", name)
            elif name not in vocabulary.DUNDERS and not own and name not in annotating_names(statement.node):
                self.note("takes from out of sight", name)
        for node in computing_nodes(statement.node):
            reached += self._read_node(node)
        return reached

    def _read_node(self, node: ast.AST) -> list[list[Statement]]:
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult) and "@" in self.forbidden:
            self.note("has a way with what the question forbids:", "@")
        if "loop" in self.forbidden and loops(node):
            self.note("has a way with what the question forbids:", "a loop")
        if isinstance(node, ast.Attribute):
            self._attribute(node.attr)
        elif isinstance(node, ast.BinOp | ast.AugAssign) and self.narrow is not None:
            if not isinstance(node.op, ast.Add | ast.Sub | ast.Mult) and sign_of(node.op) not in self.narrow:
                self.note("computes by", type(node.op).__name__)
        elif isinstance(node, ast.Import):
            return [self._module(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            reached = self._module(node.module or "")
            if not reached:
                for alias in node.names:
                    if f"{node.module}.{alias.name}" not in vocabulary.MODULES and alias.name != "*":
                        self._attribute(alias.name)
            return [reached]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _DUNDER.fullmatch(node.value) and node.value not in vocabulary.DUNDERS:
                self.note("names", node.value)
        elif isinstance(node, ast.ClassDef):
            if any(name_of(base) == "Tensor" for base in node.bases) or node.keywords:
                self.note("makes a class of a kind of its own,", node.name)
        elif isinstance(node, ast.FunctionDef) and _DUNDER.fullmatch(node.name):
            if node.name not in vocabulary.DUNDERS:
                self.note("defines", node.name)
        elif isinstance(node, ast.Call):
            called = name_of(node.func)
            if called == "type" and len(node.args) > 1:
                self.note("calls", "type with three arguments")
            elif called == "__import__" and node.args and isinstance(node.args[0], ast.Constant):
                return [self._module(str(node.args[0].value))]
            elif called in vocabulary.BY_NAME:
                self._by_name(called, node)
        return []

    def _by_name(self, called: str, node: ast.Call) -> None:
        """Note attributes that `attrgetter`, `methodcaller` or `getattr` name by a text."""
        named = node.args[1:2] if called == "getattr" else node.args[:1] if called == "methodcaller" else node.args
        for part in named:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                for name in part.value.split("."):
                    self._attribute(name)
            elif self.strict and (self.narrow is None or called not in self.narrow):
                self.note("asks for an attribute whose name it computes, by", called)

    def _attribute(self, name: str) -> None:
        if name.startswith("__"):
            known = name in vocabulary.DUNDERS
        else:
            known = (
                name in (vocabulary.ATTRIBUTES if self.narrow is None else self.narrow) or name in self.code.attributes
            )
            if not self.strict:
                inside = name in vocabulary.INSIDE_TORCH or name.startswith(vocabulary.INSIDE)
                known |= not inside and name not in self.usual.methods_of_course
        if name in self.forbidden and name not in self.code.attributes:
            self.note("has a way with what the question forbids:", f".{name}")
        elif not known and name not in self.words.attributes and name not in self.words.names:
            self.note("uses", f".{name}")

    def _module(self, name: str) -> list[Statement]:
        """Note a module that right answers do not import; returns the statements of one of the student's own."""
        if (own := name.partition(".")[0]) in self.code.files:
            return self.code.files[own]
        known = name in vocabulary.MODULES or name in self.words.modules
        if not self.strict:
            known |= name.partition(".")[0] in vocabulary.LIBRARIES or name in vocabulary.OF_TORCH
        if not known:
            self.note("imports", name)
        return []


def unusual_file(text: str, usual: Usual, question: str) -> list[str]:
    """What a file of kernels uses beside what the lab's own files of kernels do, in words."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # a file that is no Python
    used, model = words_in(tree), usual.words(question)
    own = own_attributes(tree) - vocabulary.kernel_language_names()
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}  # without words in texts
    if narrow := usual.narrow.get(question):
        known = frozenset(narrow.split()) | model.attributes | model.names
        attributes |= {n.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for n in node.names}
    else:
        known = vocabulary.ATTRIBUTES | vocabulary.KERNELS | usual.kernels.attributes | model.attributes
    needed = set(usual.needed.get(question, "").split())
    return told(
        {
            "uses": [f".{name}" for name in sorted(attributes - known - own)],
            "does without": sorted(needed - used.attributes - used.names),
            "changes lines that stood there:": sorted(
                (usual.given_lines.get(question, Counter()) - lines_of_code(text)).elements()
            ),
            **usual.other_ways(question, [tree], in_kernel=True),
        }
    )


def _is_plain(name: str, value: object) -> bool:
    """Whether right answers may name a value of the setup: numbers, objects, the lab's own functions, usual ones of torch."""
    if not callable(value) or isinstance(value, torch.dtype | torch.device):
        return True
    origin = str(getattr(value, "__module__", None) or "").partition(".")[0]
    if origin in ("__main__", ""):
        return True
    usual = name in vocabulary.ATTRIBUTES or origin in vocabulary.MODULES - {"torch"}
    return origin != "utils" and usual
