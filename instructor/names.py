"""The names that a piece of a notebook uses, and those that it defines."""

from __future__ import annotations

import ast
import builtins
import re
import symtable

MAX_SOURCE = 200_000  # characters of a cell whose names are looked at
MAX_WORK = 1_000_000  # characters times magics of such a cell: seconds
FILE_CELL = re.compile(r"%%(?:writefile|file)\s+(?:-a\s+)?(\S+)")


def python_of(source: str) -> str | None:
    """A code cell as plain Python, or None if it is not."""
    from IPython.core.inputtransformer2 import TransformerManager

    if is_too_much(source) or FILE_CELL.match(source.lstrip()):
        return None
    try:
        try:
            ast.parse(source)
            return source  # as most cells are; the transformer is slow
        except SyntaxError:
            text = TransformerManager().transform_cell(source)
            ast.parse(text)
            return text
    except (SyntaxError, ValueError, RuntimeError, MemoryError):  # RuntimeError: too many magics for IPython
        return None


def is_too_much(source: str) -> bool:
    """True for a cell that takes long to read: IPython goes through all of it again for each magic and each `!`."""
    magics = sum(source.count(sign) for sign in "!%?")
    return len(source) > MAX_SOURCE or magics * len(source) > MAX_WORK


def used_names(source: str) -> set[str]:
    """Names that the code takes from the notebook: those read at the top level, and globals in functions."""
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
    """Names that a statement, or a whole cell, defines in the notebook."""
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
    """Names whose values the code may take from other cells: those that it does not surely bind itself before it reads them.

    What a function reads counts, too: until it is called, another cell may bind the name. A module that the code imports does
    not: after `import time` it means the module, and no variable `time` of another cell.
    """
    text = python_of(source)
    if text is None:
        return set()
    taken: set[str] = set()
    bound: set[str] = set()  # surely, by the statements so far
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
