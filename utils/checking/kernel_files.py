"""The rule for imports of a student's file of kernels. The check reads the file as text before it runs.

The file may import the kernel languages and helpers that the labs hand out, but not the course's own kernels, which are
answers. This rule does not stop a determined author from using the rest of Python. The walls around the process, the
judge in another process, and a teacher who reads the file are there for this.
"""

from __future__ import annotations

import ast

from utils.checking.verdicts import WrongAnswer

# Modules that a file may import. Of the languages, it may import the modules below them, too.
MODULES = ("triton", "triton.experimental", "math", "__future__")
LANGUAGES = ("triton.language", "triton.experimental.gluon")
# Parts of the course's kernels that the labs hand out.
HELPERS = {
    "utils.attention.gluon.shared": frozenset(
        ["aggregate", "inverse_and_lse", "mask_scores", "online_softmax", "thread_barrier", "tma_load", "tma_store"]
    ),
    "utils.attention.gluon.blackwell.attention": frozenset(
        ["Barriers", "load", "make_barriers", "matrix", "probabilities", "products", "rescale", "store", "work"]
    ),
    "utils.attention.gluon.step4_warp_specialized": frozenset({"producer"}),
}
# Objects that a student has to write in a file; the labs hand them out for other files.
ASKED_FOR = {
    "lab3_softmax.py": frozenset({"inverse_and_lse", "mask_scores", "online_softmax", "producer"}),
    "lab3_specialized.py": frozenset({"producer"}),
}


def expect_kernel_file(source: str, file: str) -> None:
    """Assert that a file of kernels has only imports that are allowed; the message names the line and the import."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line, text = getattr(error, "lineno", None), (getattr(error, "text", None) or "").strip()
        words = getattr(error, "msg", None) or str(error)
        raise WrongAnswer(f"{file} is no Python: {words}" + (f", line {line}: {text}" if line else "")) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and (what := _wrong_import(node, file)):
            raise WrongAnswer(
                f"{file}, line {node.lineno}: {what} may not stand in a file of kernels. It may import "
                "triton and its languages, and define kernels, helpers, aggregates and constants; put anything else into a "
                "cell of the notebook."
            )


def _wrong_import(statement: ast.Import | ast.ImportFrom, file: str) -> str:
    """Return the name of the module or object that a file may not import; "" if the whole import is allowed."""
    for name in (alias.name for alias in statement.names):
        if isinstance(statement, ast.Import):
            if not _is_allowed(name):
                return f"`import {name}`"
            continue
        module = statement.module or ""
        if module in HELPERS and name in ASKED_FOR.get(file, ()):
            return f"{name} of the course, which this file is asked to write,"
        if statement.level or not (name in HELPERS.get(module, ()) or _is_allowed(module)):
            return f"`from {'.' * statement.level}{module} import {name}`"
    return ""


def _is_allowed(module: str) -> bool:
    return module in MODULES or any(f"{module}.".startswith(f"{language}.") for language in LANGUAGES)
