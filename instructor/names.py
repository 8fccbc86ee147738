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

    What a function reads counts in any case: it reads when it is called, and until then another cell may bind the name.
    """
    text = python_of(source)
    if text is None:
        return set()
    reader = _Reader()
    try:
        reader.block(ast.parse(text).body, set())
    except RecursionError:
        return used_names(source)
    return reader.taken - set(vars(builtins))


class _Reader:
    """Walks statements in their order, and collects in `taken` the names that are read and not surely bound."""

    def __init__(self) -> None:
        self.taken: set[str] = set()

    def block(self, statements: list[ast.stmt], bound: set[str]) -> set[str]:
        """Read statements one after the other; returns the names that are surely bound after them."""
        bound = set(bound)
        for statement in statements:
            bound = self.statement(statement, bound)
        return bound

    def statement(self, node: ast.stmt, bound: set[str]) -> set[str]:
        """Read one statement; returns the names that are surely bound after it."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.later(node)
            return bound | {node.name}
        if isinstance(node, ast.Import | ast.ImportFrom):
            return bound | bound_names(node)
        if isinstance(node, ast.If):
            self.read(node.test, bound)
            return self.block(node.body, bound) & self.block(node.orelse, bound)
        if isinstance(node, ast.For | ast.AsyncFor):
            self.read(node.iter, bound)
            self.read(node.target, bound)
            self.block(node.body, bound | _targets(node.target))
            self.block(node.orelse, bound)
            return bound  # it may have no turn
        if isinstance(node, ast.While):
            self.read(node.test, bound)
            self.block(node.body, bound)
            self.block(node.orelse, bound)
            return bound
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self.read(item.context_expr, bound)
                if item.optional_vars is not None:
                    self.read(item.optional_vars, bound)
                    bound = bound | _targets(item.optional_vars)
            self.block(node.body, bound)
            return bound  # it may swallow an exception of its body
        if isinstance(node, ast.Try):
            after = self.block(node.body, bound)
            for handler in node.handlers:
                if handler.type is not None:
                    self.read(handler.type, bound)
                self.block(handler.body, bound | ({handler.name} if handler.name else set()))
            self.block(node.orelse, after)
            return self.block(node.finalbody, bound)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr):
            self.read(node, bound)
            if isinstance(node, ast.Expr) or node.value is None:
                return bound
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return bound.union(*map(_targets, targets))
        # Whatever else it is, such as `x += 1` or `del x`.
        self.taken |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        return bound

    def read(self, node: ast.AST, bound: set[str]) -> None:
        """Read an expression."""
        if isinstance(node, ast.Lambda | ast.GeneratorExp):
            self.later(node)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp):
            for loop in node.generators:
                self.read(loop.iter, bound)
                self.read(loop.target, bound)
                bound = bound | _targets(loop.target)
                for condition in loop.ifs:
                    self.read(condition, bound)
            for value in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
                self.read(value, bound)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load) and node.id not in bound:
                self.taken.add(node.id)
        else:
            for part in ast.iter_child_nodes(node):
                self.read(part, bound)

    def later(self, node: ast.AST) -> None:
        """Take all names that a piece reads when it is called."""
        self.taken |= used_names(ast.unparse(node))


def _targets(node: ast.AST) -> set[str]:
    """The names that an assignment to a target binds."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
