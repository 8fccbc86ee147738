"""Exceptions as data: described in the process that raised them, rebuilt in the other one."""

from __future__ import annotations

import builtins
import contextlib
import dis
import linecache
import sys

from instructor.grading.sandbox import tampering
from utils.checking import AnswerNeeded, WrongAnswer

MAX_WORDS = 5000  # characters of an exception's message, or of one of its attributes
MAX_FRAMES = 12
MAX_LINE = 100_000  # number of a line

# ---- on the side that raised -------------------------------------------------------------------------------------


def describe_error(error: BaseException) -> dict:
    """An exception as data: its type, its words, and the student's lines that it went through."""
    frames, raised_by_statement, last_is_students = [], False, False
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        last_is_students = tampering.is_students(code)
        if last_is_students:
            text = linecache.getline(code.co_filename, trace.tb_lineno).strip()
            frames.append([code.co_filename[:200], code.co_name[:200], trace.tb_lineno, text[:500]])
            raised_by_statement = dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
        trace = trace.tb_next
    state = {
        str(k)[:40]: v if not isinstance(v, str) else v[:MAX_WORDS]
        for k, v in vars(error).items()
        if v is None or isinstance(v, bool | int | float | str)
    }
    kinds = [f"{k.__module__}:{k.__qualname__}"[:200] for k in type(error).__mro__ if isinstance(k.__module__, str)]
    return {
        "kinds": kinds[:12],
        "words": words_of(error)[:MAX_WORDS],
        "frames": frames[-MAX_FRAMES:],
        "state": state,
        "raised_there": last_is_students and raised_by_statement,
    }


def words_of(error: BaseException) -> str:
    """An exception's message, whatever its `__str__` does."""
    try:
        return str(error)
    except BaseException:
        return "(the exception has no words: its __str__ fails)"


# ---- on the checker's side ---------------------------------------------------------------------------------------


def explain(error: BaseException) -> tuple[str, str]:
    """(status, message): the words of a verdict, or what went wrong; never a line of a test."""
    linecache.checkcache()
    if isinstance(error, WrongAnswer | AnswerNeeded):
        return "failed", str(error)[:5000]
    words = " ".join(str(error).split())[:1000]
    if isinstance(error, SystemExit):
        return "error", f"your code calls sys.exit({words}), which ends a program. Leave the call out."
    if isinstance(error, AssertionError):
        return "failed", words or "A test of this question failed."
    return "error", f"{type(error).__name__}: {words}" if words else type(error).__name__


def error_with_lines(fields: dict, own: dict[str, type] | None = None) -> BaseException:
    """Rebuild a student's exception, of the nearest type known here, with a traceback through the student's lines.

    Args:
        fields: what `describe_error` gave; it comes from the student's process, which may have forged it.
        own: {name: class} of exceptions that the notebook itself defines.
    """
    error = _nearest_error(fields["kinds"], str(fields["words"])[:MAX_WORDS], own or {})
    for name, value in fields["state"].items():
        plain = value is None or type(value) in (int, str, bool, float)
        if plain and name.isidentifier() and not name.startswith("_"):
            with contextlib.suppress(Exception):
                setattr(error, name, value)
    frames = [(str(f), str(n), int(line), str(text)) for f, n, line, text in fields["frames"][-MAX_FRAMES:]]
    for file, _, line, text in frames:
        _show_line(file, line, text)
    # A traceback is made by raising. So for each frame, a function is compiled that bears its file, name and line, and
    # calls the one of the next frame; the last one raises.
    names: dict = {"error": error}
    statement = "raise error"
    if not fields["raised_there"]:  # it came out of a library that the student called
        exec(compile("def go():\n    raise error", __file__, "exec"), names)
        statement = "go()"
    for file, function, line, _ in reversed(frames):
        parameter = "go=go" if statement == "go()" else ""
        padding = "\n" * (max(1, min(line, MAX_LINE)) - 1)
        exec(compile(f"{padding}def go({parameter}): {statement}", file, "exec"), names)
        made = names["go"]
        made.__code__ = made.__code__.replace(co_name=function, co_qualname=function)
        statement = "go()"
    if statement == "go()":
        try:
            names["go"]()
        except BaseException as raised:
            own_frame = raised.__traceback__
            error = raised.with_traceback(own_frame.tb_next if own_frame else None)
    return error


def _show_line(file: str, line: int, text: str) -> None:
    """Have tracebacks show this text for a line of a file that does not exist here."""
    entry = linecache.cache.get(file, ())
    lines = list(entry[2]) if len(entry) > 2 else []
    lines += ["\n"] * (min(line, MAX_LINE) - len(lines))
    if 0 < line <= len(lines):
        lines[line - 1] = text + "\n"
    linecache.cache[file] = (sum(map(len, lines)), None, lines, file)


def _nearest_error(kinds: list, words: str, own: dict[str, type]) -> BaseException:
    for kind in kinds:
        module, _, name = str(kind).partition(":")
        known = module == "builtins" or module.partition(".")[0] in ("torch", "utils")
        found: object = sys.modules.get(module) if known else None
        for part in name.split("."):
            found = getattr(found, part, None)
        found = own.get(name) if module == "__main__" else found
        if isinstance(found, type) and (issubclass(found, Exception) or found is SystemExit):
            with contextlib.suppress(Exception):
                error = found.__new__(found, words)
                error.args = (words,)
                return error
    # KeyboardInterrupt, GeneratorExit, and exceptions of the student's that derive from BaseException alone
    return RuntimeError(words)


# ---- on the student's side, for exceptions of the checker --------------------------------------------------------


def rebuild_error(fields: dict) -> BaseException:
    """Rebuild an exception that one of the checker's functions raised, of the nearest builtin type."""
    for kind in fields["kinds"]:
        module, _, name = kind.partition(":")
        found = getattr(builtins, name, None) if module == "builtins" else None
        if isinstance(found, type) and issubclass(found, Exception):
            return found(fields["words"])
    return RuntimeError(fields["words"])
