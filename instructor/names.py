"""The names that a piece of a notebook uses, and the names that it defines."""

from __future__ import annotations

import ast
import builtins
import re
import symtable

MAX_SOURCE = 200_000  # longest cell whose names are read, in characters
MAX_WORK = 1_000_000  # the largest product of a cell's characters and magics; it takes seconds
FILE_CELL = re.compile(r"%%(?:writefile|file)\s+(?:-a\s+)?(\S+)")


def python_of(source: str) -> str | None:
    """Return a code cell as plain Python, or None if it is not Python."""
    from IPython.core.inputtransformer2 import TransformerManager

    if is_too_much(source) or FILE_CELL.match(source.lstrip()):
        return None
    try:
        try:
            ast.parse(source)
            return source  # most cells are plain Python, and the transformer is slow
        except SyntaxError:
            text = TransformerManager().transform_cell(source)
            ast.parse(text)
            return text
    except (SyntaxError, ValueError, RuntimeError, MemoryError):  # IPython raises a RuntimeError for too many magics
        return None


def is_too_much(source: str) -> bool:
    """Return whether a cell takes long to read: IPython reads all of it again for each magic and each `!`."""
    magics = sum(source.count(sign) for sign in "!%?")
    return len(source) > MAX_SOURCE or magics * len(source) > MAX_WORK


def used_names(source: str) -> set[str]:
    """Return the names that the code takes from the notebook: names read at the top level, and globals in functions."""
    text = python_of(source)
    if text is None:
        return set()
    found: set[str] = set()

    def visit(table: symtable.SymbolTable) -> None:
        for symbol in table.get_symbols():
            outer = table.get_type() == "module" or symbol.is_global()
            if outer and symbol.is_referenced():
                found.add(symbol.get_name())
        for child in table.get_children():
            visit(child)

    try:
        visit(symtable.symtable(text, "cell", "exec"))
    except (SyntaxError, ValueError, RecursionError):
        return set()
    return found - set(vars(builtins))


def bound_names(node: ast.AST) -> set[str]:
    """Return the names that a statement, or a whole cell, defines in the notebook."""
    found: set[str] = set()
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)

    def visit(part: ast.AST) -> None:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(part.name)
        elif isinstance(part, ast.Import | ast.ImportFrom):
            found.update((alias.asname or alias.name).split(".")[0] for alias in part.names)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            found.add(part.id)
        if not isinstance(part, inner):
            for child in ast.iter_child_nodes(part):
                visit(child)

    visit(node)
    return found


def names_taken(source: str) -> set[str]:
    """Return the names whose values may come from other cells, because the code may read them before it binds them.

    Names that a function reads count, too: another cell may bind them before the call. Names of modules that the code
    imports do not count: after `import time`, `time` is the module, and no variable of another cell.
    """
    text = python_of(source)
    if text is None:
        return set()
    taken: set[str] = set()
    bound: set[str] = set()  # names that the statements so far bind in any case
    modules: set[str] = set()
    try:
        for node in ast.parse(text).body:
            read, parts = used_names(ast.unparse(node)), list(ast.walk(node))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                taken |= read - modules
            else:
                looped = {name for part in parts if isinstance(part, ast.For) for name in bound_names(part.target)}
                changed = {name for p in parts if isinstance(p, ast.AugAssign) for name in bound_names(p.target)}
                later = [part for part in parts if isinstance(part, ast.Lambda | ast.GeneratorExp)]
                taken |= (read - looped | changed) - bound
                taken |= set().union(*(used_names(ast.unparse(part)) for part in later)) - modules
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules |= bound_names(node)
            if isinstance(node, ast.Assign | ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
                bound |= set().union(*map(bound_names, getattr(node, "targets", [node])))
    except RecursionError:
        return used_names(source)
    return taken
