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


_SMALL = (
    8  # a number of dimensions, of heads in a group or of parts; larger ones stand for many tokens, rows or numbers
)
_SIZES = frozenset(("shape", "size", "numel", "nelement", "nbytes"))


def loops(node: ast.AST) -> bool:
    """Whether a node of a text is a loop: a statement, or an expression over a range."""
    over = [node.iter] if isinstance(node, ast.comprehension) else []
    ranges = any(
        isinstance(n, ast.Call) and getattr(n.func, "id", "") == "range" for part in over for n in ast.walk(part)
    )
    return ranges or isinstance(node, ast.For | ast.While)


def branches_by_size(tree: ast.AST, of_all: bool = False) -> list[str]:
    """Return what compares the size of something with a large number, or cuts it there: such an answer has another way for many.

    A name that is made of sizes is one. Comparisons of two sizes, or of a size and a tile, are none.

    Args:
        tree: the code.
        of_all: whatever is compared may be a size, as in a kernel, whose sizes are arguments.
    """
    sizes: set[str] = set()
    assigned = [
        (target, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    for _ in range(3):  # names of names of sizes
        for target, value in assigned:
            if _tells_size(value, sizes):
                sizes |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    found = []
    for node in ast.walk(tree):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod | ast.RShift):
            parts = [node.left, node.right]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("min", "max", "divmod"):
            parts = list(node.args)
        if any(_is_large(part) for part in parts) and (of_all or any(_tells_size(part, sizes) for part in parts)):
            found.append(ast.unparse(node)[:60])
    return found


def _tells_size(node: ast.AST, sizes: set[str]) -> bool:
    """Whether an expression is made of sizes of tensors or lists."""
    if isinstance(node, ast.Attribute):
        return node.attr in _SIZES
    if isinstance(node, ast.Name):
        return node.id in sizes
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        numbers = name in ("len", "min", "max", "sum", "int", "prod", "sqrt", "log2", "abs", "round")
        return name == "len" or name in _SIZES or (numbers and any(_tells_size(a, sizes) for a in node.args))
    if isinstance(node, ast.Subscript):
        return _tells_size(node.value, sizes)
    if isinstance(node, ast.BinOp):
        return _tells_size(node.left, sizes) or _tells_size(node.right, sizes)
    if isinstance(node, ast.Tuple | ast.List):
        return any(_tells_size(part, sizes) for part in node.elts)
    return isinstance(node, ast.Starred) and _tells_size(node.value, sizes)


def _is_large(node: ast.AST) -> bool:
    """Whether an expression is a large number, written as one or computed from constants."""
    if not all(isinstance(n, ast.Constant | ast.BinOp | ast.operator) for n in ast.walk(node)):
        return False
    return any(
        isinstance(n, ast.Constant) and type(n.value) in (int, float) and n.value > _SMALL for n in ast.walk(node)
    )


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
