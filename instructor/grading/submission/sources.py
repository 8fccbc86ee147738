"""The sources that decide a grade: the hidden checks of a lab, and what the lab and the checker import.

Imports are read and not run: `import` statements anywhere in a file, modules that a string names, and names that a
package such as `utils` loads when they are first used. Where a file computes the name of a module, all modules that the
name may stand for count. So it may find modules that are not needed, and misses none.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import nbformat

from instructor.build import ROOT, Built
from instructor.grading.submission.plan import python_of

CHECKER = ("instructor.grading.submission.engine", "instructor.grading.submission.zygote")
LIBRARIES = ("torch", "triton", "transformers", "numpy", "pandas", "nbformat", "ipython", "cloudpickle")
_MODULE_NAME = re.compile(r"\b(?:utils|instructor)(?:\.\w+)+")


@dataclass
class References:
    """What a piece of code refers to."""

    modules: set[str] = field(default_factory=set)
    packages: set[str] = field(default_factory=set)  # of which any module may be imported
    words: set[str] = field(default_factory=set)  # identifiers, among them those that a package loads when used
    exports: dict[str, str] = field(default_factory=dict)  # of a package that loads names when used: name -> module


@functools.lru_cache(maxsize=1000)
def read_references(text: str, module: str = "__main__", is_package: bool = False) -> References:
    """Read what the code of a module, or of a notebook's cell, refers to."""
    found, tree = References(), ast.parse(text)
    loads_when_used = is_package and any(getattr(node, "name", "") == "__getattr__" for node in tree.body)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: None if is_package else -1]
            parents = parents[: len(parents) + 1 - node.level] if node.level else []
            base = ".".join([*parents, node.module] if node.module else parents)
            names = [alias.name for alias in node.names]
            found.modules.update([base, *(f"{base}.{name}" for name in names)])
            found.words.update(names)
        elif isinstance(node, ast.Name | ast.Attribute):
            found.words.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found.modules.update(_MODULE_NAME.findall(node.value))
        elif isinstance(node, ast.Call):
            if "import_module" in (getattr(node.func, "id", ""), getattr(node.func, "attr", "")):
                found.packages.update(_computed_package(node.args[0], module, is_package))
        elif isinstance(node, ast.Dict) and loads_when_used:
            for key, value in zip(node.keys, node.values, strict=True):
                name, place = getattr(key, "value", None), getattr(value, "value", None)
                if isinstance(name, str) and isinstance(place, str):
                    found.exports[name] = f"{module}.{place}"
    if found.exports:  # the names that are used say which modules of the package are loaded
        found.packages.discard(module)
    return found


def _computed_package(name: ast.expr, module: str, is_package: bool) -> list[str]:
    """The package of a computed module name: the one that the name begins with, or else that of the file itself."""
    if isinstance(name, ast.Constant):
        return []
    first = name.values[0] if isinstance(name, ast.JoinedStr) else None
    begins = str(first.value) if isinstance(first, ast.Constant) else ""
    return [begins.rstrip(".") if begins.endswith(".") else module if is_package else module.rpartition(".")[0]]


@functools.lru_cache(maxsize=16)
def references_of_notebook(text: str) -> References:
    """What a notebook's code refers to, the files that its cells write included.

    A notebook is one namespace: one cell has `from utils import *`, and others the names of `utils`.
    """
    whole = References()
    for cell in nbformat.reads(text, as_version=4).cells:
        source = cell.source.partition("\n")[2] if cell.source.startswith("%%") else cell.source
        if cell.cell_type == "code" and (code := python_of(source)):
            found = read_references(code)
            whole.modules |= found.modules
            whole.packages |= found.packages - {""}
            whole.words |= found.words
    return whole


def module_file(name: str) -> Path | None:
    """The file of one of the course's modules; None for any other name."""
    if name.partition(".")[0] not in ("utils", "instructor"):
        return None
    place = ROOT.joinpath(*name.split("."))
    files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((path for path in files if path.is_file()), None)


def modules_below(package: str) -> list[str]:
    """The names of all modules in one of the course's packages, at any depth; the package itself included."""
    folder = ROOT.joinpath(*package.split("."))
    paths = [path.relative_to(ROOT).with_suffix("") for path in sorted(folder.rglob("*.py"))]
    return [".".join(path.parts[:-1] if path.name == "__init__" else path.parts) for path in paths]


class Source(NamedTuple):
    """The source of one of the course's modules."""

    text: str
    path: str
    is_package: bool


def import_closure(roots: Iterable[References]) -> dict[str, Source]:
    """{module: its source} of the course's modules that the roots import, directly or through others."""
    found: dict[str, Source] = {}
    looked_up: set[str] = set()
    queue = list(roots)

    def add(names: Iterable[str]) -> None:
        for name in names:
            parts = name.split(".")
            for length in range(1, len(parts) + 1):  # an import runs the packages above it, too
                module = ".".join(parts[:length])
                if module not in looked_up and (path := module_file(module)) is not None:
                    found[module] = source = Source(path.read_text("utf-8"), str(path), path.name == "__init__.py")
                    queue.append(read_references(source.text, module, source.is_package))
                looked_up.add(module)

    while queue:
        references = queue.pop()
        add(references.modules)
        for package in references.packages:
            add(modules_below(package))
        for package in references.modules & found.keys():
            exports = read_references(found[package].text, package, found[package].is_package).exports
            add(exports[word] for word in references.words & exports.keys())
    return found


def fingerprint(built: Built) -> str:
    """A hash of all that decides a grade: the lab, what it and the checker import, and the libraries' versions.

    What only a submission imports is not part of it: after a change there, `labs grade --again` grades again.
    """
    own = References(modules={*CHECKER, *modules_below(f"instructor.checks.{built.name}")})
    digest = hashlib.sha256(built.instructor.encode())
    for name, source in sorted(import_closure([references_of_notebook(built.instructor), own]).items()):
        digest.update(f"{name}\n{source.text}".encode())
    digest.update(sys.version.encode() + repr([_version(library) for library in LIBRARIES]).encode())
    return digest.hexdigest()[:16]


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
