"""Numbers of an answer's own by which it may go another way: for inputs larger than a check draws, or for one number of slots."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Mapping

_COMPUTED = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv},
    **{ast.LShift: operator.lshift, ast.RShift: operator.rshift},
}
_CHOOSING = (
    "min",
    "max",
    "minimum",
    "maximum",
    "clamp",
    "clip",
    "clamp_max",
    "clamp_min",
    "divmod",
    "islice",
    "floordiv",
)
_COMPARING = ("gt", "ge", "lt", "le", "eq", "ne", "greater", "less", "index")
_DIVIDING = (ast.FloorDiv, ast.RShift, ast.Mod)
MOST = 2**62


def named_numbers(trees: Iterable[ast.AST]) -> dict[str, float]:
    """{name or field: number} of what is assigned, or given by default, as a number that stands in the text."""
    found: dict[str, float] = {}
    for tree in trees:
        for node in ast.walk(tree):
            pairs: list[tuple[ast.expr, ast.expr | None]] = []
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Tuple | ast.List) and isinstance(node.value, ast.Tuple | ast.List):
                        pairs += zip(target.elts, node.value.elts, strict=False)
                    else:
                        pairs.append((target, node.value))
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
                pairs.append((node.target, node.value))
            elif isinstance(node, ast.arguments):
                names = [*node.posonlyargs, *node.args]
                defaults = zip(names[len(names) - len(node.defaults) :], node.defaults, strict=True)
                for argument, default in (*defaults, *zip(node.kwonlyargs, node.kw_defaults, strict=True)):
                    pairs.append((ast.Name(argument.arg), default))
            for target, value in pairs:
                name = getattr(target, "id", getattr(target, "attr", ""))
                if name and value is not None and (number := number_of(value, found)) is not None:
                    found[name] = max(number, found.get(name, number), key=abs)
    return found


def number_of(node: ast.expr, named: Mapping[str, float]) -> float | None:
    """The number that an expression of numbers of the text has; None if it has others in it."""
    if isinstance(node, ast.Constant):
        value = node.value
        return value if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST else None
    if isinstance(node, ast.Name | ast.Attribute):
        return named.get(getattr(node, "id", getattr(node, "attr", "")))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = number_of(node.operand, named)
        return None if number is None else -number
    if isinstance(node, ast.BinOp):
        left, right = number_of(node.left, named), number_of(node.right, named)
        if left is None or right is None:
            return None
        if isinstance(node.op, ast.Pow):
            return left**right if 0 <= right < 64 and 1 <= abs(left) <= 1024 else None
        compute = _COMPUTED.get(type(node.op))
        shifts = isinstance(node.op, ast.LShift | ast.RShift | ast.FloorDiv)
        if compute is None or (shifts and not (type(left) is type(right) is int and 0 < right < 64)):
            return None
        number = compute(left, right)
        return number if abs(number) < MOST else None
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("int", "round", "constexpr") and node.args:
        return number_of(node.args[0], named)
    return None


def own_limits(tree: ast.AST, named: Mapping[str, float], least: int) -> list[str]:
    """The whole numbers, `least` or more, with which a text compares, or by which it divides without a rest, as it stands there.

    Args:
        tree: the text.
        named: numbers that names stand for.
        least: smaller ones do not count: dimensions, and bytes of an element.
    """
    found: list[str] = []

    def look(parts: Iterable[ast.expr], where: ast.AST) -> None:
        for part in parts:
            number = number_of(part, named)
            inside = (
                [number]
                if number is not None
                else [_factor(n, named) for n in ast.walk(part) if isinstance(n, ast.BinOp)]
            )
            if any(n is not None and n >= least and n == int(n) for n in inside):
                found.append(ast.unparse(where)[:80])

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            look((node.left, *node.comparators), node)
        elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, _DIVIDING):
            divisor = node.right if isinstance(node, ast.BinOp) else node.value
            if number_of(node, named) is None if isinstance(node, ast.BinOp) else True:  # of numbers alone it is one
                look([divisor], node)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in _CHOOSING or name.strip("_") in _COMPARING:
                look([a for a in node.args if not isinstance(a, ast.Starred)], node)
        elif isinstance(node, ast.Match):
            look(
                [p.value for case in node.cases for p in ast.walk(case.pattern) if isinstance(p, ast.MatchValue)],
                node.subject,
            )
    return list(dict.fromkeys(found))


def _factor(node: ast.BinOp, named: Mapping[str, float]) -> float | None:
    """A number with which something is computed that is not known: n + 1000, 4096 * n."""
    numbers = [n for n in (number_of(node.left, named), number_of(node.right, named)) if n is not None]
    return max(numbers, key=abs) if len(numbers) == 1 else None


def devices_named(tree: ast.AST) -> list[str]:
    """The texts that name a device and are compared: what runs on a GPU alone is seen by no check on a CPU."""
    compared = [n for n in ast.walk(tree) if isinstance(n, ast.Compare | ast.MatchValue)]
    texts = [c.value for n in compared for c in ast.walk(n) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
    return list(dict.fromkeys(t for t in texts if t.partition(":")[0] in ("cuda", "cpu", "meta", "mps")))


def program_branches(tree: ast.AST) -> list[str]:
    """The comparisons of a kernel's program with a number: by such a one a program does what others do not.

    Names that are computed from `program_id` count, those of whole rows and columns (`arange`) do not.
    """
    of_programs: set[str] = set()
    several: set[str] = set()  # names of tensors
    assigned = [
        (target.id, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]

    def mentions(node: ast.AST, names: set[str], called: str) -> bool:
        return any(
            (isinstance(n, ast.Name) and n.id in names) or (isinstance(n, ast.Attribute) and n.attr == called)
            for n in ast.walk(node)
        )

    for _ in range(4):  # names of names
        several |= {name for name, value in assigned if mentions(value, several, "arange")}
        of_programs |= {name for name, value in assigned if mentions(value, of_programs, "program_id")}
    of_programs -= several
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            own = [p for p in parts if mentions(p, of_programs, "program_id") and not mentions(p, several, "arange")]
            if own and any(number_of(p, {}) is not None for p in parts):
                found.append(ast.unparse(node)[:80])
    return list(dict.fromkeys(found))
