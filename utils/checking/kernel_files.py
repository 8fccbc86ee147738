"""Whether a student's file is a file of kernels: read as text, before any of it runs.

A process that runs a student's file reports what its kernels did, and is believed. So the file may hold only what a
kernel needs: it may import the kernel languages, define functions, aggregates and constants, and compute with them. It
may not reach the rest of Python, by which it could change the report: no other module, no name with a leading
underscore, no `exec`, no `open`. The compiler for a GPU refuses nearly all of that as well.

What a name of a module stands for is looked up. What an attribute of another value gives is not known before the file runs, so
only such attributes may stand there as the languages' own values, Python's plain ones and the file's aggregates have.
"""

from __future__ import annotations

import ast
import builtins
import codecs
import contextlib
import dis
import functools
import importlib
import io
import sys
import tokenize
import types
from typing import NoReturn

LANGUAGES = ("triton.language", "triton.experimental.gluon")  # and every module below them
# The course's own kernels are answers to questions, so of these only the parts that the labs hand out may be imported.
HELPERS = {
    "utils.attention.gluon.shared": frozenset(
        ["aggregate", "inverse_and_lse", "mask_scores", "online_softmax", "tma_load", "tma_store"]
    ),
    "utils.attention.gluon.step4_warp_specialized": frozenset({"producer"}),
}
# What is asked for in a file, and handed out for later ones.
ASKED_FOR = {
    "lab3_softmax.py": frozenset({"inverse_and_lse", "mask_scores", "online_softmax", "producer"}),
    "lab3_specialized.py": frozenset({"producer"}),
    "lab3_causal.py": frozenset({"mask_scores", "producer"}),
}
PARENTS = ("triton", "triton.experimental")  # may be named on the way to what they hold
PLAIN = ("math", "__future__")
MAX_FILE = 100_000  # characters: to read more takes minutes
# Parts of the languages that are no language: what compiles, and what builds a compiler's representation.
_INSIDES = ("_runtime", "_compiler", "semantic", "_semantic")
_BUILTINS = frozenset(
    [
        "abs",
        "all",
        "any",
        "bool",
        "dict",
        "divmod",
        "enumerate",
        "False",
        "float",
        "frozenset",
        "int",
        "isinstance",
        "len",
        "list",
        "map",
        "max",
        "min",
        "None",
        "NotImplementedError",
        "pow",
        "print",
        "range",
        "repr",
        "reversed",
        "round",
        "set",
        "slice",
        "sorted",
        "str",
        "sum",
        "True",
        "tuple",
        "zip",
        "AssertionError",
        "ValueError",
        "TypeError",
    ]
)
_WITH_CARE = ("getattr", "hasattr", "type")  # allowed in the forms that `visit_Call` describes
_REFUSED = {
    ast.Try: "try",
    ast.TryStar: "try",
    ast.With: "with",
    ast.AsyncWith: "async with",
    ast.AsyncFor: "async for",
    ast.AsyncFunctionDef: "async def",
    ast.Await: "await",
    ast.Yield: "yield",
    ast.YieldFrom: "yield from",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.Delete: "del",
    ast.Match: "match",
}
_DECORATORS = ("jit", "constexpr_function", "aggregate", "_aggregate", "builtin", "noinline")
_METHODS = ("__init__", "__post_init__")
_OF_TRITON = ("jit", "cdiv", "next_power_of_2", "constexpr_function", "language", "experimental")
# Attributes without an underscore that lead from a value to frames, code, memory or files.
_DEEP = ("gi_", "cr_", "ag_", "tb_", "f_", "co_", "func_")
_DEEP_NAMES = frozenset(
    (
        *("ctypes", "tofile", "dump", "mro", "storage", "untyped_storage", "data_ptr", "fn", "run", "add_pre_run_hook"),
        *("handle", "format", "format_map"),  # the last two take a text that names attributes
    )
)


def expect_kernel_file(source: str, file: str) -> None:
    """Assert that a file holds kernels and what they need, and nothing else.

    Args:
        source: the text of the file, which is Python.
        file: its name, for the message.

    Raises:
        AssertionError: the message names the line, what it holds, and what such a file may hold.
    """
    tree = _parse(source, file)
    reader = _Reader(file, _own_attributes(tree))
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            reader.take_import(node)
    for node in tree.body:
        reader.visit_top(node)


def kernels_of(source: str, file: str, kernel: str) -> str:
    """Return a file's kernels and what they need, without the Python functions that launch them.

    Lines keep their numbers.

    Args:
        source: the text of the file.
        file: its name, for messages.
        kernel: a `@triton.jit` function that the file has to define.

    Raises:
        AssertionError: the file has no such kernel, or a kernel holds what no kernel may hold.
    """
    tree = _parse(source, file)
    lines = source.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # the lines that Python counts, and no others
    reader = _Reader(file, _own_attributes(tree))
    found = False
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            with contextlib.suppress(AssertionError):  # it is left out below
                reader.take_import(node)
    for node in tree.body:
        own = isinstance(node, ast.FunctionDef) and any(reader.is_jit(d) for d in node.decorator_list)
        found |= own and getattr(node, "name", "") == kernel
        try:
            reader.visit_top(node)
        except AssertionError:
            if own:
                raise
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            for number in range(first - 1, node.end_lineno or node.lineno):
                lines[number] = ""
    if not found:
        raise AssertionError(f"{file} defines no @triton.jit function {kernel}: keep the kernel's name and arguments.")
    kept = "\n".join(lines) + "\n"
    # Where two statements share a line, one of them goes with the other, and the rest of a text that began there would
    # be code that nobody has read. So what is left is read as well.
    expect_kernel_file(kept, file)
    return kept


def _parse(source: str, file: str) -> ast.Module:
    if len(source) > MAX_FILE:
        raise AssertionError(f"{file} has {len(source):,} characters; a file of kernels may have {MAX_FILE:,}.")
    try:
        # Python obeys the declaration when it imports the file, and then reads another text than the one read here.
        declared = tokenize.detect_encoding(io.BytesIO(source.encode(errors="replace")).readline)[0]
        is_utf8 = codecs.lookup(declared).name in ("utf-8", "utf-8-sig")
    except SyntaxError:
        declared, is_utf8 = "unknown", False
    if not is_utf8:
        raise AssertionError(
            f"{file} declares the encoding {declared} in a comment of its first two lines: leave the declaration out. "
            "The file is UTF-8."
        )
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        words = getattr(error, "msg", None) or str(error)
        line, text = getattr(error, "lineno", None), (getattr(error, "text", None) or "").strip()
        raise AssertionError(f"{file} is no Python: {words}" + (f", line {line}: {text}" if line else "")) from None


def _is_language(name: str) -> bool:
    inside = any(part in _INSIDES for part in name.split("."))
    return not inside and any(name == root or name.startswith(root + ".") for root in LANGUAGES)


def _known(name: str) -> bool:
    return _is_language(name) or name in HELPERS or name in PARENTS or name in PLAIN


def _may_use(owner: object, name: str, value: object) -> bool:
    """Whether a file may use a name of a module: a language's own, and of triton itself the few that a kernel needs."""
    if isinstance(value, types.ModuleType):
        return _known(value.__name__)
    place = getattr(owner, "__name__", "")
    if place in HELPERS:
        return name in HELPERS[place]
    if place in PARENTS:
        return name in _OF_TRITON
    if value is None or isinstance(value, bool | int | float | str):
        return True
    origin = getattr(value, "__module__", None)  # a value has that of its class
    origin = origin if isinstance(origin, str) else type(value).__module__
    return _is_language(origin) or origin == place == "math" or name in (*_DECORATORS, "PropagateNan")


@functools.cache
def _value_attributes() -> frozenset[str]:
    """The attributes that values of the languages, of the course's helpers and of plain Python have."""
    for module_name in ("triton.experimental.gluon.nvidia.hopper", *LANGUAGES, *HELPERS):
        _import(module_name)
    kinds: list[type] = [bool, int, float, str, tuple, list, dict, set, slice, range]
    for name, module in list(sys.modules.items()):
        if _is_language(name) or name.startswith("utils.attention.gluon"):
            kinds += [v for v in list(vars(module).values()) if isinstance(v, type) and v.__module__ == name]
    found: set[str] = set()
    for kind in kinds:
        found |= set(dir(kind)) | set(vars(kind).get("__annotations__", ()))
        functions = [v for v in vars(kind).values() if isinstance(v, types.FunctionType)]
        found |= {i.argval for f in functions for i in dis.get_instructions(f) if i.opname == "STORE_ATTR"}
    return frozenset(name for name in found if _is_plain_attribute(name))


@functools.cache
def _kernel_attributes() -> frozenset[str]:
    """The attributes of a compiled function, some of which lead to the names of whole modules."""
    import triton.language

    kernel = triton.language.cdiv
    return frozenset({*dir(kernel), *vars(kernel)}) - _value_attributes()


def _own_attributes(tree: ast.AST) -> set[str]:
    """Fields and methods of a file's aggregates."""
    found: set[str] = set()
    for node in ast.walk(tree):
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
            found |= {t.id for t in targets if isinstance(t, ast.Name)}
            found |= {part.name} if isinstance(part, ast.FunctionDef) else set()
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):  # of self: others are refused
            found.add(node.attr)
    return found - _kernel_attributes()


def _is_plain_attribute(name: str) -> bool:
    return not name.startswith(("_", *_DEEP)) and name not in _DEEP_NAMES


class _Reader(ast.NodeVisitor):
    """Walks over a file, and stops at the first thing that it may not hold."""

    def __init__(self, file: str, own: set[str]):
        self.file = file
        self.own = own  # attributes of the file's aggregates
        self.names: dict[str, object] = {}  # what the file imports, by its name there
        for name, module in (("triton", "triton"), ("tl", "triton.language")):
            self.names[name] = _import(module)

    def refuse(self, node: ast.AST, what: str) -> NoReturn:
        raise AssertionError(
            f"{self.file}, line {getattr(node, 'lineno', '?')}: {what} may not stand in a file of kernels. It may import "
            "triton and its languages, and define kernels, helpers, aggregates and constants; put anything else into a "
            "cell of the notebook."
        )

    def generic_visit(self, node: ast.AST) -> None:
        if type(node) in _REFUSED:
            self.refuse(node, f"`{_REFUSED[type(node)]}`")
        super().generic_visit(node)

    # ---- imports -------------------------------------------------------------------------------------------------

    def visit_top(self, node: ast.stmt) -> None:
        """Visit a statement of the file itself: only there it may import."""
        if isinstance(node, ast.Import | ast.ImportFrom):
            self.take_import(node)
        else:
            self.visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.refuse(node, "an import inside a function")

    visit_ImportFrom = visit_Import  # type: ignore[assignment]

    def take_import(self, node: ast.Import | ast.ImportFrom) -> None:
        """Note what an import gives to which name."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                if not _known(alias.name) or alias.name in HELPERS:
                    self.refuse(node, f"`import {alias.name}`")
                top = alias.name if alias.asname else alias.name.partition(".")[0]
                self._bind(node, alias.asname or top, _import(top))
            return
        module = node.module or ""
        if node.level or not _known(module):
            self.refuse(node, f"`from {'.' * node.level}{module} import ...`")
        if module == "__future__":
            return
        owner = _import(module)
        for alias in node.names:
            value = getattr(owner, alias.name, None)
            if value is None:
                value = _import(f"{module}.{alias.name}")
            if module in HELPERS and alias.name in ASKED_FOR.get(self.file, ()):
                self.refuse(node, f"{alias.name} of the course, which this file is asked to write,")
            if alias.name == "*" or alias.name.startswith("_") or not _may_use(owner, alias.name, value):
                self.refuse(node, f"`from {module} import {alias.name}`")
            self._bind(node, alias.asname or alias.name, value)

    def _bind(self, node: ast.AST, name: str, value: object) -> None:
        if name.startswith("_") or self.names.get(name, value) is not value:
            self.refuse(node, f"another meaning of the name {name}")
        self.names[name] = value

    # ---- names and attributes --------------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> None:
        plain = node.id in self.names or not hasattr(builtins, node.id) or node.id in _BUILTINS
        if (node.id.startswith("__") and node.id != "__name__") or node.id == "torch" or not plain:
            self.refuse(node, f"`{node.id}`")
        if not isinstance(node.ctx, ast.Load):
            self._expect_free(node, node.id)
        elif isinstance(self.names.get(node.id), types.ModuleType):
            self.refuse(node, f"the module `{node.id}` by itself")

    def _expect_free(self, node: ast.AST, name: str) -> None:
        if name in self.names:
            self.refuse(node, f"another meaning of the imported name {name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not _is_plain_attribute(node.attr):
            self.refuse(node, f"`.{node.attr}`")
        own = isinstance(node.value, ast.Name) and node.value.id == "self"
        if not isinstance(node.ctx, ast.Load) and not own:
            self.refuse(node, f"an assignment to `.{node.attr}`")
        owner = self.module_of(node.value)
        if owner is None:
            self.visit(node.value)
            if not self.may_read(node.attr):
                self.refuse(node, f"`.{node.attr}` of a value")
        elif isinstance(value := getattr(owner, node.attr, None), types.ModuleType):
            self.refuse(node, f"the module `{ast.unparse(node)}` by itself")
        elif not _may_use(owner, node.attr, value):
            self.refuse(node, f"`{ast.unparse(node)}`")

    def may_read(self, name: str) -> bool:
        """Whether the file may read an attribute of a value that is known only when the file runs."""
        return _is_plain_attribute(name) and (name in self.own or name in _value_attributes())

    def module_of(self, node: ast.expr) -> types.ModuleType | None:
        """The module that an expression names, if it names one that the file may use; None for anything else."""
        value: object = None
        if isinstance(node, ast.Name):
            value = self.names.get(node.id)
        elif isinstance(node, ast.Attribute) and (owner := self.module_of(node.value)) is not None:
            if node.attr.startswith("_"):
                self.refuse(node, f"`.{node.attr}`")
            value = getattr(owner, node.attr, None)
        if not isinstance(value, types.ModuleType):
            return None
        if not _may_use(value, "", value):
            self.refuse(node, f"`{ast.unparse(node)}`")
        return value

    # ---- calls, functions and classes --------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in _WITH_CARE and name not in self.names:
            attribute = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
            reads = name != "type" and isinstance(attribute, str) and self.may_read(attribute)
            if node.keywords or not (reads or (name == "type" and len(node.args) == 1)):
                self.refuse(node, f"this use of `{name}`")
            if self.module_of(node.args[0]) is not None:
                self.refuse(node, f"`{name}` of a module")
            for part in node.args:
                self.visit(part)
            return
        self.generic_visit(node)

    def is_jit(self, node: ast.expr) -> bool:
        """True for `@triton.jit`, `@gluon.jit` and the like, also when it is called with options."""
        function = node.func if isinstance(node, ast.Call) else node
        if isinstance(function, ast.Attribute) and (owner := self.module_of(function.value)) is not None:
            return function.attr in _DECORATORS and hasattr(owner, function.attr)
        if isinstance(function, ast.Name):
            value = self.names.get(function.id)
            return getattr(value, "__name__", "") in _DECORATORS and callable(value)
        return False

    def _visit_decorators(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        for decorator in node.decorator_list:
            if not self.is_jit(decorator):
                self.refuse(decorator, f"the decorator `@{ast.unparse(decorator)}`")
            for part in (*decorator.args, *decorator.keywords) if isinstance(decorator, ast.Call) else ():
                self.visit(part)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name.startswith("__") and node.name not in _METHODS:
            self.refuse(node, f"`def {node.name}`")
        self._visit_decorators(node)
        self._expect_free(node, node.name)
        for part in (node.args, *node.body, *([node.returns] if node.returns else [])):
            self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if node.bases or node.keywords or not node.decorator_list:
            self.refuse(node, "a class other than an aggregate")
        self._visit_decorators(node)
        self._expect_free(node, node.name)
        for part in node.body:
            if not isinstance(part, ast.AnnAssign | ast.FunctionDef | ast.Pass | ast.Expr | ast.Assign):
                self.refuse(part, "this statement in an aggregate")
            if isinstance(part, ast.Assign) and any(
                n.id.startswith("_") for n in part.targets if isinstance(n, ast.Name)
            ):
                self.refuse(part, "such a name in an aggregate")
            self.visit(part)

    def visit_arg(self, node: ast.arg) -> None:
        if node.arg.startswith("__"):
            self.refuse(node, f"the argument {node.arg}")
        self._expect_free(node, node.arg)
        if node.annotation is not None:
            self.visit(node.annotation)


def _import(name: str) -> object:
    """The module of a name that is allowed; None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
