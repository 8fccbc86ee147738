"""The numbers and sizes that the names and expressions of a student's text stand for. Nothing is run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, takewhile
from typing import NamedTuple, TypeGuard

from utils.checking.sizes import words

_OPERATIONS = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv},
    **{ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.Pow: operator.pow},
}
_INFINITE = 2.0**62  # larger numbers with a point stand for infinity
_BITS = 4096  # of the longest number that is computed
_SIZES = words("shape size numel nelement nbytes stride BLOCK_SIZE")
_OF_SIZES = words("min max sum int float prod sqrt log2 log abs round sorted range divmod enumerate zip")


class Given(NamedTuple):
    """A value that a text gives to a name, a field or an argument."""

    target: ast.expr
    value: ast.expr
    by_default: bool = False  # to an argument


def given_values(nodes: Collection[ast.AST]) -> list[Given]:
    """Return what the nodes of a text give to names; of a loop, what it goes through."""
    functions = {node.name: node.args for node in nodes if isinstance(node, ast.FunctionDef)}
    return [given for node in nodes for given in (*_given_by(node), *_handed_by(node, functions))]


def _given_by(node: ast.AST) -> Iterator[Given]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple | ast.List) and isinstance(node.value, ast.Tuple | ast.List):
                yield from map(Given, target.elts, node.value.elts)
            else:
                yield Given(target, node.value)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield Given(node.target, node.value)
    elif isinstance(node, ast.AugAssign):
        yield Given(node.target, ast.Tuple([node.target, node.value], ast.Load()))  # made of both
    elif isinstance(node, ast.For | ast.comprehension):
        yield Given(node.target, node.iter)
    elif isinstance(node, ast.arguments):
        names = [*node.posonlyargs, *node.args]
        defaults = zip(names[len(names) - len(node.defaults) :], node.defaults, strict=True)
        for argument, default in chain(defaults, zip(node.kwonlyargs, node.kw_defaults, strict=True)):
            if default is not None:
                yield Given(ast.Name(argument.arg, ast.Store()), default, by_default=True)


def _handed_by(node: ast.AST, functions: Mapping[str, ast.arguments]) -> Iterator[Given]:
    """What a call hands to the arguments of one of the text's own functions or methods."""
    if isinstance(node, ast.Call) and (own := functions.get(name_of(node.func))):
        names = [argument.arg for argument in (*own.posonlyargs, *own.args)]
        if isinstance(node.func, ast.Attribute) and names[:1] == ["self"]:
            del names[0]
        placed = takewhile(lambda value: not isinstance(value, ast.Starred), node.args)
        for name, value in (*zip(names, placed, strict=False), *((word.arg, word.value) for word in node.keywords)):
            if name:
                yield Given(ast.Name(name, ast.Store()), value)


def name_of(node: ast.AST) -> str:
    """The name or the attribute that a node is; "" for other nodes."""
    return getattr(node, "id", getattr(node, "attr", ""))


# ---- numbers -----------------------------------------------------------------------------------------------------


class Numbers:
    """The numbers that the expressions of a text stand for. Each node is looked at once, however many expressions hold it.

    Args:
        named: {name or field: the number that it stands for}.
    """

    def __init__(self, named: Mapping[str, float]):
        self._named = named
        self._of: dict[ast.AST, float | None] = {}
        self._inside: dict[ast.AST, float] = {}

    def of(self, node: ast.AST) -> float | None:
        """Return the number that an expression of numbers of the text has; None if it has others in it."""
        if node not in self._of:
            self._of[node] = self._evaluate(node)
        return self._of[node]

    def largest_in(self, node: ast.AST) -> float:
        """Return the largest `magnitude` of the numbers in an expression, 0 without any: 4096 of `n + 4 * 1024`."""
        if node not in self._inside:
            number = self.of(node)
            if number is not None:
                self._inside[node] = magnitude(number)
            elif isinstance(node, ast.Attribute | ast.Compare):
                self._inside[node] = 0
            else:  # of `x[i]` without the place
                parts = [node.value] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)
                self._inside[node] = max(map(self.largest_in, parts), default=0)
        return self._inside[node]

    def _evaluate(self, node: ast.AST) -> float | None:
        if isinstance(node, ast.Constant):
            return node.value if _is_number(node.value) else None
        if isinstance(node, ast.Name | ast.Attribute):
            return self._named.get(name_of(node))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self.of(node.operand)
            return None if number is None else -number
        if isinstance(node, ast.BinOp):
            left, right = self.of(node.left), self.of(node.right)
            return None if left is None or right is None else _computed(node.op, left, right)
        if isinstance(node, ast.Call) and name_of(node.func) in ("int", "round", "constexpr") and node.args:
            return self.of(node.args[0])
        return None


def numbers_of(given: Iterable[Given], tiles: Collection[str] = ()) -> Numbers:
    """Return the numbers of a text; a name stands for the largest that is given to it, without the defaults of tiles."""
    named: dict[str, float] = {}
    own = [
        (name_of(target), value) for target, value, by_default in given if not (by_default and name_of(target) in tiles)
    ]
    # What is made of itself (i = i + 64) counts something, and is no number of the text.
    own = [(name, value) for name, value in own if name and name not in map(name_of, ast.walk(value))]
    for _ in range(3):  # names of names
        for name, value in own:
            if (number := Numbers(named).of(value)) is not None:
                named[name] = max(number, named.get(name, number), key=magnitude)
    return Numbers(named)


def magnitude(number: float) -> float:
    """Return by how much a number counts: a negative one by its size if it is whole; -1e9 stands for minus infinity."""
    return abs(number) if isinstance(number, int) else number


def _computed(operation: ast.operator, left: float, right: float) -> float | None:
    """The result of an operation on two numbers; None where it is none, is infinite or would take long."""
    compute, allowed = _OPERATIONS.get(type(operation)), True
    if isinstance(operation, ast.Pow) and isinstance(left, int) and isinstance(right, int):
        allowed = 0 <= right * left.bit_length() <= _BITS
    elif isinstance(operation, ast.Pow):
        allowed = 0 <= right < 64 and 1 <= abs(left) <= 1024
    elif isinstance(operation, ast.LShift | ast.RShift):
        allowed = isinstance(left, int) and isinstance(right, int) and 0 <= right <= _BITS
    elif isinstance(operation, ast.FloorDiv):
        allowed = right != 0
    try:
        number = compute(left, right) if compute and allowed else None
    except OverflowError:  # of a long whole number and one with a point
        return None
    return number if _is_number(number) else None


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, int):
        return not isinstance(value, bool) and value.bit_length() <= _BITS
    return isinstance(value, float) and abs(value) < _INFINITE


# ---- sizes -------------------------------------------------------------------------------------------------------


class Sizes:
    """The expressions of a text that are made of sizes of tensors or lists. Each node is looked at once.

    Args:
        named: names and fields that are given sizes.
    """

    def __init__(self, named: Collection[str]):
        self._named = named
        self._known: dict[ast.AST, bool] = {}

    def __contains__(self, node: ast.AST) -> bool:
        if node not in self._known:
            self._known[node] = self._is_size(node)
        return self._known[node]

    def _is_size(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr in _SIZES or node.attr in self._named
        if isinstance(node, ast.Name):
            return node.id in self._named
        if isinstance(node, ast.Call):
            name = name_of(node.func)
            of_size = isinstance(node.func, ast.Attribute) and node.func.value in self  # such as n.bit_length()
            numbers = name in _OF_SIZES and any(argument in self for argument in node.args)
            return name == "len" or name in _SIZES or numbers or of_size
        if isinstance(node, ast.BinOp):
            return node.left in self or node.right in self
        if isinstance(node, ast.Tuple | ast.List):
            return any(part in self for part in node.elts)
        if isinstance(node, ast.Subscript | ast.Starred):
            return node.value in self
        return isinstance(node, ast.UnaryOp) and node.operand in self


def sizes_of(given: Iterable[Given], tiles: Collection[str] = ()) -> Sizes:
    """Return the sizes of a text, tiles among them."""
    named = set(tiles)
    for _ in range(3):  # names of names
        for target, value, _ in given:
            if value in Sizes(named):
                parts = (n for n in ast.walk(target) if isinstance(n, ast.Name | ast.Attribute))
                named |= {name_of(part) for part in parts if isinstance(part.ctx, ast.Store)}
    return Sizes(named)
