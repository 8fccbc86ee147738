"""Ways of an answer that no input of a check may take: by a size, compared with a large number, or by the device. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Collection

_SMALL = (
    8  # a number of dimensions, of heads in a group or of parts; larger ones stand for many tokens, rows or numbers
)
_SIZES = frozenset(("shape", "size", "numel", "nelement", "nbytes", "stride", "BLOCK_SIZE"))
_OF_SIZES = frozenset(
    ("min", "max", "sum", "int", "float", "prod", "sqrt", "log2", "log", "abs", "round", "sorted", "range", "divmod")
)
_DEVICES = frozenset(("is_cuda", "is_cpu"))


def large_constants(tree: ast.AST) -> set[str]:
    """Return the names that a piece of code gives to large numbers."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        computed = any(isinstance(part, ast.Name | ast.Call) for part in ast.walk(node.value))
        if not computed and _is_large(node.value, set()):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return found


def branches_by_size(tree: ast.AST, large: Collection[str] = (), of_all: bool = False) -> list[str]:
    """Return what compares a size with a large number, or cuts it there, or asks for a device.

    A name that is made of sizes is one, and so is an argument with a large default, such as a tile. Comparisons of two sizes, or of
    a size and a tile, are none.

    Args:
        tree: the code.
        large: names of large numbers.
        of_all: whatever is compared may be a size, as in a kernel, whose sizes are arguments.
    """
    large, sizes = {*large, *large_constants(tree)}, _tiles(tree)
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
        by_size = of_all or any(_tells_size(part, sizes) for part in parts)
        if (
            (by_size and any(_is_large(part, large) for part in parts))
            or (isinstance(node, ast.Attribute) and node.attr in _DEVICES)
            or (isinstance(node, ast.Compare) and any(_names_device(part) for part in parts))
        ):
            found.append(ast.unparse(node)[:60])
    return found


def _tiles(tree: ast.AST) -> set[str]:
    """The arguments of functions that have a large number as a default."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            given = node.args.posonlyargs + node.args.args
            pairs: list[tuple[ast.arg, ast.expr | None]] = []
            pairs += zip(given[len(given) - len(node.args.defaults) :], node.args.defaults, strict=True)
            pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            found |= {arg.arg for arg, default in pairs if default is not None and _is_large(default, set())}
    return found


def _names_device(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and str(node.value).partition(":")[0] in ("cuda", "cpu")


def _tells_size(node: ast.AST, sizes: set[str]) -> bool:
    """Whether an expression is made of sizes of tensors or lists."""
    if isinstance(node, ast.Attribute):
        return node.attr in _SIZES
    if isinstance(node, ast.Name):
        return node.id in sizes
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        of_size = isinstance(node.func, ast.Attribute) and _tells_size(node.func.value, sizes)  # such as n.bit_length()
        numbers = name in _OF_SIZES and any(_tells_size(a, sizes) for a in node.args)
        return name == "len" or name in _SIZES or numbers or of_size
    if isinstance(node, ast.Subscript):
        return _tells_size(node.value, sizes)
    if isinstance(node, ast.BinOp):
        return _tells_size(node.left, sizes) or _tells_size(node.right, sizes)
    if isinstance(node, ast.Tuple | ast.List):
        return any(_tells_size(part, sizes) for part in node.elts)
    return isinstance(node, ast.Starred) and _tells_size(node.value, sizes)


def _is_large(node: ast.AST, large: set[str]) -> bool:
    """Whether a large number stands in an expression, written out or by its name; negative ones stand for no size."""
    if isinstance(node, ast.UnaryOp | ast.Subscript | ast.Attribute | ast.Compare | ast.IfExp):
        return False
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and node.value > _SMALL
    named = isinstance(node, ast.Name) and node.id in large
    return named or any(_is_large(part, large) for part in ast.iter_child_nodes(node))
