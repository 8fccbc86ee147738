"""What the statements of a student's text bind, change and take, by name. Nothing is run."""

from __future__ import annotations

import ast
import symtable

from instructor.names import bound_names
from utils.checking.sizes import words

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def changed_names(node: ast.stmt) -> set[str]:
    """The names that a statement defines or changes: also X of `X.y = ...`, `X[y] = ...`, `X.append(...)`, `setattr(X, ...)`."""
    found = bound_names(node)
    if isinstance(node, DEFINITIONS):
        return found
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute | ast.Subscript) and isinstance(part.ctx, ast.Store | ast.Del):
            found.add(_root(part))
        elif isinstance(part, ast.Call) and getattr(part.func, "id", "") in ("setattr", "delattr") and part.args:
            found.add(_root(part.args[0]))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        found.add(_root(node.value.func))
    return found - {""}


_ONLY_READ = words("""
    print len sum min max abs all any sorted list tuple set dict str repr int float bool isinstance type range enumerate zip display
    """)


def handed_names(node: ast.stmt) -> set[str]:
    """The names that a statement which runs hands to a call: `exec(text, X)` or `setitem(X, ...)` may change what X holds."""
    found: set[str] = set()
    for part in ast.walk(node) if not isinstance(node, DEFINITIONS) else ():
        if isinstance(part, ast.Call) and getattr(part.func, "id", "") not in _ONLY_READ:
            found |= {_root(argument) for argument in (*part.args, *(word.value for word in part.keywords))}
    return found - {""}


def called_names(node: ast.stmt) -> set[str]:
    """The names that stand as functions in a statement's calls."""
    return {n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


def annotating_names(node: ast.stmt) -> set[str]:
    """The names that stand in annotations and nowhere else: such a one may not exist, and nobody evaluates it."""
    inside = {id(part): part.id for note in _annotations(node) for part in ast.walk(note) if isinstance(part, ast.Name)}
    elsewhere = {p.id for p in ast.walk(node) if isinstance(p, ast.Name) and id(p) not in inside}
    return set(inside.values()) - elsewhere


def computing_nodes(node: ast.stmt) -> list[ast.AST]:
    """The parts of a statement without its annotations, as far as these only name types: `np.ndarray`, `list[torch.Tensor]`."""
    naming = [note for note in _annotations(node) if all(isinstance(part, _OF_TYPES) for part in ast.walk(note))]
    left_out = {id(part) for note in naming for part in ast.walk(note)}
    return [part for part in ast.walk(node) if id(part) not in left_out]


_OF_TYPES = (ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Constant, ast.BinOp, ast.BitOr, ast.Load)


def _annotations(node: ast.AST) -> list[ast.expr]:
    notes = [n.annotation for n in ast.walk(node) if isinstance(n, ast.arg | ast.AnnAssign) and n.annotation]
    return notes + [
        n.returns for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.returns
    ]


def imports_by_text(node: ast.stmt) -> bool:
    """Whether each `__import__` of a statement is called on a module that is written out: it is an import like others."""
    named = sum(isinstance(part, ast.Name) and part.id == "__import__" for part in ast.walk(node))
    calls = [p for p in ast.walk(node) if isinstance(p, ast.Call) and getattr(p.func, "id", "") == "__import__"]
    return named == sum(bool(call.args) and isinstance(call.args[0], ast.Constant) for call in calls)


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def own_attributes(tree: ast.AST) -> set[str]:
    """The fields and methods of a text's own classes, and what it sets on objects."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found |= set().union(*(bound_names(part) for part in node.body))
            found |= {p.target.id for p in node.body if isinstance(p, ast.AnnAssign) and isinstance(p.target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def taken_names(node: ast.stmt) -> set[str]:
    """The names that a statement takes from the notebook or from Python."""
    found: set[str] = set()

    def visit(table: symtable.SymbolTable) -> None:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
                found.add(symbol.get_name())
        for child in table.get_children():
            visit(child)

    try:
        visit(symtable.symtable(ast.unparse(node), "cell", "exec"))
    except (SyntaxError, ValueError, RecursionError):
        found |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found
