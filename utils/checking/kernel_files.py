"""Whether a student's file is a file of kernels: read as text, before any of it runs.

A process that runs a student's file reports what its kernels did, and is believed. So the file may hold only what a
kernel needs: it may import the kernel languages, define functions, aggregates and constants, and compute with them. It
may not reach the rest of Python: no other module, no name with a leading underscore, no `exec`, no `open`. The compiler
for a GPU refuses nearly all of that as well.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import types
from typing import NoReturn

from utils.checking.watching import words

LANGUAGES = ("triton.language", "triton.experimental.gluon")  # and every module below them
# The course's own kernels are answers to questions, so of these only the parts that the labs hand out may be imported.
HELPERS = {
    "utils.attention.gluon.shared": frozenset(
        ["aggregate", "inverse_and_lse", "mask_scores", "online_softmax", "thread_barrier", "tma_load", "tma_store"]
    ),
    "utils.attention.gluon.blackwell.attention": frozenset(
        ["Barriers", "load", "make_barriers", "matrix", "probabilities", "products", "rescale", "store", "work"]
    ),
    "utils.attention.gluon.step4_warp_specialized": frozenset({"producer"}),
}
# What is asked for in a file, and handed out for later ones.
ASKED_FOR = {
    "lab3_softmax.py": frozenset({"inverse_and_lse", "mask_scores", "online_softmax", "producer"}),
    "lab3_specialized.py": frozenset({"producer"}),
}
PARENTS = ("triton", "triton.experimental")  # may be named on the way to what they hold
PLAIN = ("math", "__future__")
# Parts of the languages that are no language: what compiles, and what builds a compiler's representation.
_INSIDES = ("_runtime", "_compiler", "semantic", "_semantic")
_BUILTINS = words("""
    abs all any bool dict divmod enumerate False float frozenset getattr hasattr int isinstance len list map max min None
    NotImplementedError pow print range repr reversed round set slice sorted str sum True tuple type zip AssertionError
    ValueError TypeError __name__
    """)
_STATEMENTS = (
    *(ast.Try, ast.TryStar, ast.With, ast.AsyncWith, ast.AsyncFor, ast.AsyncFunctionDef, ast.Await, ast.Yield),
    *(ast.YieldFrom, ast.Global, ast.Nonlocal, ast.Delete, ast.Match),
)
_DECORATORS = ("jit", "constexpr_function", "aggregate", "_aggregate", "builtin", "noinline")
_OF_TRITON = ("jit", "cdiv", "next_power_of_2", "constexpr_function", "language", "experimental")
# Attributes without an underscore that lead from a value to frames, code, memory, or a kernel's Python function.
_DEEP = ("gi_", "cr_", "ag_", "tb_", "f_", "co_", "func_")
_DEEP_NAMES = frozenset(
    ["ctypes", "storage", "data_ptr", "fn", "run", "add_pre_run_hook", "pre_run_hooks", "used_global_vals", "format"]
)


def expect_kernel_file(source: str, file: str) -> None:
    """Assert that a file holds kernels and what they need, and nothing else; the message names the line and what it holds."""
    reader, tree = _Reader(file), parse_file(source, file)
    for node in tree.body:
        reader.read(node)


def kernels_of(source: str, file: str, kernel: str) -> str:
    """Return a file's kernels and what they need, without the Python functions that launch them; lines keep their numbers.

    Args:
        source: the text of the file.
        file: its name, for messages.
        kernel: a `@triton.jit` function that the file has to define.
    """
    tree = parse_file(source, file)
    lines = source.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # the lines that Python counts, and no others
    reader, found = _Reader(file), False
    for node in tree.body:
        try:
            reader.read(node)
            found |= isinstance(node, ast.FunctionDef) and bool(node.decorator_list) and node.name == kernel
        except AssertionError:
            if isinstance(node, ast.FunctionDef) and any(map(reader.is_jit, node.decorator_list)):
                raise
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            lines[first - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - first + 1)
    if not found:
        raise AssertionError(f"{file} defines no @triton.jit function {kernel}: keep the kernel's name and arguments.")
    kept = "\n".join(lines) + "\n"
    expect_kernel_file(kept, file)  # two statements may have shared a line
    return kept


def parse_file(source: str, file: str) -> ast.Module:
    """Parse a file; the message of an error names the file and the line."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line, text = getattr(error, "lineno", None), (getattr(error, "text", None) or "").strip()
        words = getattr(error, "msg", None) or str(error)
        raise AssertionError(f"{file} is no Python: {words}" + (f", line {line}: {text}" if line else "")) from None


def _known(name: str) -> bool:
    """Return whether a file may name this module."""
    language = any(name == root or name.startswith(f"{root}.") for root in LANGUAGES)
    return (language and not set(_INSIDES) & {*name.split(".")}) or name in (*HELPERS, *PARENTS, *PLAIN)


def _may_use(owner: str, name: str, value: object) -> bool:
    """Return whether a file may use a name of a module: a language's own, and of triton itself the few that a kernel needs."""
    if isinstance(value, types.ModuleType):
        return _known(value.__name__)
    if owner in HELPERS:
        return name in HELPERS[owner]
    if owner in PARENTS:
        return name in _OF_TRITON
    origin = getattr(value, "__module__", None) or type(value).__module__
    return owner == "math" or origin == "builtins" or _known(str(origin)) or name in (*_DECORATORS, "PropagateNan")


class _Reader:
    """Reads a file statement by statement, and stops at the first thing that it may not hold."""

    def __init__(self, file: str):
        self.file = file
        self.names: dict[str, object] = {"triton": _import("triton"), "tl": _import("triton.language")}

    def read(self, statement: ast.stmt) -> None:
        """Read a statement of the file itself: only there it may import."""
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                if what := self._import(statement, alias):
                    self._refuse(statement, what)
            return
        owners = {id(node.value) for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
        for node in ast.walk(statement):
            if what := self._objection(node, id(node) in owners):
                self._refuse(node, what)

    def _refuse(self, node: ast.AST, what: str) -> NoReturn:
        raise AssertionError(
            f"{self.file}, line {getattr(node, 'lineno', '?')}: {what} may not stand in a file of kernels. It may import "
            "triton and its languages, and define kernels, helpers, aggregates and constants; put anything else into a "
            "cell of the notebook."
        )

    def _import(self, statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
        """Note what a name means from here on; return what may not stand there, "" if it may."""
        if isinstance(statement, ast.Import):
            if not _known(alias.name) or alias.name in HELPERS:
                return f"`import {alias.name}`"
            top = alias.name if alias.asname else alias.name.partition(".")[0]
            self.names[alias.asname or top] = _import(top)
            return ""
        module = statement.module or ""
        if statement.level or not _known(module):
            return f"`from {'.' * statement.level}{module} import ...`"
        if module == "__future__":
            return ""
        value = getattr(_import(module), alias.name, None)
        value = _import(f"{module}.{alias.name}") if value is None else value
        if module in HELPERS and alias.name in ASKED_FOR.get(self.file, ()):
            return f"{alias.name} of the course, which this file is asked to write,"
        if alias.name.startswith(("_", "*")) or not _may_use(module, alias.name, value):
            return f"`from {module} import {alias.name}`"
        self.names[alias.asname or alias.name] = value
        return ""

    def _objection(self, node: ast.AST, owner: bool) -> str:
        """Return what may not stand in a file, "" if the node may; `owner` says that an attribute of it is taken."""
        match node:
            case ast.Import() | ast.ImportFrom():
                return "an import in a function"
            case ast.Name(id=name):
                builtin = hasattr(builtins, name) and name not in self.names
                if (builtin or name == "torch" or name.startswith("__")) and name not in _BUILTINS:
                    return f"`{name}`"
                if name in self.names and not isinstance(node.ctx, ast.Load):
                    return f"another meaning of the imported name {name}"
                if isinstance(self.names.get(name), types.ModuleType) and not owner:
                    return f"the module `{name}` by itself"
            case ast.Attribute(attr=name):
                if _is_deep(name):
                    return f"`.{name}`"
                if not isinstance(node.ctx, ast.Load) and ast.unparse(node.value) != "self":
                    return f"an assignment to `.{name}`"
                module = self._module(node.value)
                if module and not _may_use(module.__name__, name, getattr(module, name, None)):
                    return f"`{ast.unparse(node)}`"
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=args):
                plain = len(args) > 1 and isinstance(args[1], ast.Constant) and not _is_deep(str(args[1].value))
                return "" if plain else f"this use of `{ast.unparse(node.func)}`"
            case ast.Call(func=ast.Name(id="type"), args=args) if len(args) != 1:
                return "this use of `type`"
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                if isinstance(node, ast.ClassDef) and (node.bases or node.keywords or not node.decorator_list):
                    return "a class other than an aggregate"
                special = name.startswith("__") and name not in ("__init__", "__post_init__")
                if special or name in self.names:
                    return f"a definition of {name}"
                strange = [decorator for decorator in node.decorator_list if not self.is_jit(decorator)]
                return f"the decorator `@{ast.unparse(strange[0])}`" if strange else ""
            case ast.arg(arg=name) if name.startswith("__") or name in self.names:
                return f"the argument {name}"
        return f"`{type(node).__name__}`" if isinstance(node, _STATEMENTS) else ""

    def _module(self, node: ast.expr) -> types.ModuleType | None:
        """Return the module that an expression names; None for anything else."""
        value: object = None
        if isinstance(node, ast.Name):
            value = self.names.get(node.id)
        elif isinstance(node, ast.Attribute) and (owner := self._module(node.value)) is not None:
            value = getattr(owner, node.attr, None)
        if isinstance(value, types.ModuleType) and not _known(value.__name__):
            self._refuse(node, f"`{ast.unparse(node)}`")
        return value if isinstance(value, types.ModuleType) else None

    def is_jit(self, node: ast.expr) -> bool:
        """Return whether a decorator is `@triton.jit`, `@gluon.jit` or the like, also one that is called with options."""
        function = node.func if isinstance(node, ast.Call) else node
        if isinstance(function, ast.Attribute):
            return self._module(function.value) is not None and function.attr in _DECORATORS
        value = self.names.get(function.id) if isinstance(function, ast.Name) else None
        return getattr(value, "__name__", "") in _DECORATORS


def _is_deep(name: str) -> bool:
    """Return whether an attribute leads from a value to what is inside of Python."""
    return name.startswith(("_", *_DEEP)) or name in _DEEP_NAMES


def _import(name: str) -> object:
    """Return the module of a name that is allowed; None where it is not installed."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    return None
