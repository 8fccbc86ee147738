"""The words and lines of a student's text: names, attributes and modules that it uses, arguments that it reads. Nothing is run."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Words:
    """The names, attributes and modules that a piece of code uses."""

    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)

    def add(self, other: Words) -> None:
        """Add the words of another piece of code."""
        self.names |= other.names
        self.attributes |= other.attributes
        self.modules |= other.modules


def words_of(text: str) -> Words:
    """The words of an answer of the lab's own."""
    return words_in(ast.parse(text))


def words_in(tree: ast.AST) -> Words:
    """The words of a piece of code."""
    found = Words()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.names.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.attributes.add(node.attr)
        elif isinstance(node, ast.Import):
            found.modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.modules.add(node.module or "")
            found.names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.attributes.add(node.value)
    return found


_SIGNS = {
    **{ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.MatMult: "@"},
    **{ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>"},
}


def sign_of(operator: ast.operator) -> str:
    """Return how an operator is written; "" for +, - and *."""
    return _SIGNS.get(type(operator), "")


def loops(node: ast.AST) -> bool:
    """Whether a node of a text is a loop: a statement, or an expression over a range."""
    over = [node.iter] if isinstance(node, ast.comprehension) else []
    ranges = any(
        isinstance(n, ast.Call) and getattr(n.func, "id", "") == "range" for part in over for n in ast.walk(part)
    )
    return ranges or isinstance(node, ast.For | ast.While)


def read_arguments(function: ast.FunctionDef) -> list[tuple[int, str]]:
    """The places and names of a function's arguments that its body reads."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    read = {n.id for part in function.body for n in ast.walk(part) if isinstance(n, ast.Name)}
    return [(place, name) for place, name in enumerate(names) if name in read]


def lines_given(text: str) -> Counter[str]:
    """The lines of code of a file of kernels that stand outside of its solutions, without comments, texts and indentation."""
    given = re.sub(r"### BEGIN SOLUTION.*?### END SOLUTION", "", text, flags=re.DOTALL)
    return lines_of_code(given)


def lines_of_code(text: str) -> Counter[str]:
    """The lines of a file, without comments, texts that stand alone, and spaces."""
    bare = re.sub(r'^\s*""".*?"""', "", text, flags=re.DOTALL | re.MULTILINE)
    lines = ("".join(line.partition("#")[0].split()) for line in bare.split("\n"))
    return Counter(line for line in lines if len(line) > 2)
