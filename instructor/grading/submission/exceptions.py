"""Exceptions as data: described in the process that raised them, rebuilt in the other one."""

from __future__ import annotations

import contextlib
import sys

from utils.checking import AnswerNeeded, StudentLine, WrongAnswer
from utils.checking.authors import lines_of_error

MAX_WORDS = 5000  # characters of an exception's message
MAX_LINES = 12  # of a student's, the innermost ones

# ---- on the side that raised -------------------------------------------------------------------------------------


def describe_error(error: BaseException) -> dict:
    """An exception as data: its type, its words, and the student's lines that it went through."""
    kinds = [f"{k.__module__}:{k.__qualname__}"[:200] for k in type(error).__mro__ if isinstance(k.__module__, str)]
    lines = [[line.function[:200], line.number, line.text[:500]] for line in lines_of_error(error)]
    return {"kinds": kinds[:12], "words": words_of(error)[:MAX_WORDS], "lines": lines[-MAX_LINES:]}


def words_of(error: BaseException) -> str:
    """An exception's message, whatever its `__str__` does."""
    try:
        return str(error)
    except BaseException:
        return "(the exception has no words: its __str__ fails)"


# ---- on the checker's side ---------------------------------------------------------------------------------------


def explain(error: BaseException) -> tuple[str, str]:
    """(status, message): the words of a verdict, or what went wrong; never a line of a test."""
    if isinstance(error, WrongAnswer | AnswerNeeded):
        return "failed", str(error)[:5000]
    words = " ".join(str(error).split())[:1000]
    if isinstance(error, AssertionError):
        return "failed", words or "A test of this question failed."
    return "error", f"{type(error).__name__}: {words}" if words else type(error).__name__


def error_with_lines(fields: dict) -> BaseException:
    """Rebuild what `describe_error` gave, and may be forged: of the nearest type known here, with the student's lines in it."""
    error = nearest_error(fields["kinds"], str(fields["words"])[:MAX_WORDS])
    lines = [StudentLine(str(name), int(number), str(text)) for name, number, text in fields["lines"][-MAX_LINES:]]
    vars(error)["student_lines"] = lines
    return error


def nearest_error(kinds: list, words: str) -> BaseException:
    """An exception of the first of these types, each `module:name`, that is known here."""
    for kind in kinds:
        module, _, name = str(kind).partition(":")
        known = module == "builtins" or module.partition(".")[0] in ("torch", "utils")
        found: object = sys.modules.get(module) if known else None
        for part in name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type) and (issubclass(found, Exception) or found is SystemExit):
            with contextlib.suppress(Exception):
                error = found.__new__(found, words)
                error.args = (words,)
                return error
    # KeyboardInterrupt, GeneratorExit, and exceptions of the student's that derive from BaseException alone
    return RuntimeError(words)
