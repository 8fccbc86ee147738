"""Whether a student's file is a file of kernels: read as text, before any of it runs.

The simulator and the compiler run a file as it is, so it holds only what a kernel needs: it imports the kernel languages and
what the labs hand out, and defines kernels, helpers, aggregates and constants. Nothing here keeps a determined author from
the rest of Python: walls stand around the process, the judge sits in another one, and a teacher reads the file.
"""

from __future__ import annotations

import ast
import builtins

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
PLAIN = ("math", "__future__")
_OF_TRITON = words("jit cdiv next_power_of_2 constexpr_function language experimental")
_DECORATORS = words("jit constexpr_function aggregate builtin noinline")
_BUILTINS = words("""
    abs all any bool dict divmod enumerate False float frozenset hasattr int isinstance len list map max min None
    NotImplementedError pow print range repr reversed round set slice sorted str sum True tuple type zip AssertionError
    ValueError TypeError __name__
    """)


def expect_kernel_file(source: str, file: str) -> None:
    """Assert that a file holds kernels and what they need, and nothing else; the message names the line and what it holds."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line, text = getattr(error, "lineno", None), (getattr(error, "text", None) or "").strip()
        words = getattr(error, "msg", None) or str(error)
        raise AssertionError(f"{file} is no Python: {words}" + (f", line {line}: {text}" if line else "")) from None
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    imported = {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
    objections = [(n.lineno, _wrong_import(n, file)) for n in imports]
    for statement in (n for n in tree.body if n not in imports):  # the file itself alone may import
        objections += [(getattr(n, "lineno", 0), _objection(n, imported)) for n in ast.walk(statement)]
    for line, what in objections:
        if what:
            raise AssertionError(
                f"{file}, line {line}: {what} may not stand in a file of kernels. It may import "
                "triton and its languages, and define kernels, helpers, aggregates and constants; put anything else into a "
                "cell of the notebook."
            )


def _wrong_import(statement: ast.Import | ast.ImportFrom, file: str) -> str:
    """Return what an import may not bring, "" if all of it may come."""
    for name in (alias.name for alias in statement.names):
        if isinstance(statement, ast.Import):
            if not (_is_language(name) or name in ("triton", "triton.experimental", *PLAIN)):
                return f"`import {name}`"
            continue
        module = statement.module or ""
        if module in HELPERS and name in ASKED_FOR.get(file, ()):
            return f"{name} of the course, which this file is asked to write,"
        if module in HELPERS:
            allowed = name in HELPERS[module]
        elif module in ("triton", "triton.experimental"):
            allowed = name in _OF_TRITON or name == "gluon"
        else:
            allowed = (_is_language(module) or module in PLAIN) and not name.startswith(("_", "*"))
        if statement.level or not allowed:
            return f"`from {'.' * statement.level}{module} import {name}`"
    return ""


def _is_language(module: str) -> bool:
    """Return whether a module is one of the kernel languages, and no inside of theirs."""
    return any(f"{module}.".startswith(f"{root}.") for root in LANGUAGES) and "._" not in module


def _objection(node: ast.AST, imported: set[str]) -> str:
    """Return what may not stand in a file, "" if the node may."""
    match node:
        case ast.Import() | ast.ImportFrom():
            return "an import in a function"
        case ast.Name(id=name):
            builtin = hasattr(builtins, name) and name not in imported
            return (
                f"`{name}`" if (builtin or name == "torch" or name.startswith("__")) and name not in _BUILTINS else ""
            )
        case ast.Attribute(attr=name, value=owner):
            if name.startswith("_"):
                return f"`.{name}`"
            if not isinstance(node.ctx, ast.Load) and ast.unparse(owner) != "self":
                return f"an assignment to `.{name}`"
            return f"`triton.{name}`" if ast.unparse(owner) == "triton" and name not in _OF_TRITON else ""
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            if isinstance(node, ast.ClassDef) and (node.bases or node.keywords or not node.decorator_list):
                return "a class other than an aggregate"
            if name.startswith("__") and name not in ("__init__", "__post_init__"):
                return f"a definition of {name}"
            strange = [decorator for decorator in node.decorator_list if not _is_jit(decorator, imported)]
            return f"the decorator `@{ast.unparse(strange[0])}`" if strange else ""
    return ""


def _is_jit(node: ast.expr, imported: set[str]) -> bool:
    """Return whether a decorator is `@triton.jit`, `@gluon.jit` or the like, also one that is called with options."""
    function = node.func if isinstance(node, ast.Call) else node
    path = ast.unparse(function).split(".")
    return path[0] in imported and path[-1].lstrip("_") in _DECORATORS
