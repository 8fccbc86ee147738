"""Checks of a student's answers: a verdict instead of a crash, and messages that say what to look at.

A check is a function of the student's objects. It states what must hold with plain ``assert`` and the ``expect_*``
functions below; ``@check`` turns whatever happens inside of it into a `Verdict`:

    @check("1.1", "Naive GEMM", forbids=MATMUL, largest=1, hint="write the three loops")
    def check_1_1(gemm_naive, seed=None):
        a, b = ...
        expect_close(gemm_naive(a, b), a @ b, rtol=1e-4, atol=1e-5, what="gemm_naive(a, b)")

    check_1_1(gemm_naive).raise_if_wrong()
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import io
import math
import numbers
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from utils.checking.answers import Answer
from utils.checking.authors import lines_of_error
from utils.checking.watching import Family, Rule


def label_of(question: str) -> str:
    """Return `Question 1.1` for `1.1`; `Bonus 4.5` stays."""
    return f"Question {question}" if question[:1].isdigit() else question


class WrongAnswer(AssertionError):
    """A failed verdict. Notebooks show its message alone, without a traceback through the checks."""

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[31m✗\x1b[0m {self}"]


class AnswerNeeded(NotImplementedError):
    """A cell needs an answer that is not there yet. Notebooks show its message alone."""

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[33m…\x1b[0m {self}"]


@dataclass(frozen=True)
class Verdict:
    """The result of a check: the question, whether the answer passed, and a message to the student."""

    question: str
    passed: bool
    message: str = ""

    def raise_if_wrong(self) -> None:
        """Raise `WrongAnswer` (an AssertionError) if the answer failed; print one line if it passed."""
        if not self.passed:
            raise WrongAnswer(self._text())
        print(f"✓ {self._text()}")

    def _text(self) -> str:
        label = label_of(self.question)
        message = self.message or ("passed." if self.passed else "failed.")
        return message if message.startswith(label) else f"{label}: {message}"

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return f"{'✓' if self.passed else '✗'} {self._text()}"


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Send everything that is written to stderr inside to stdout instead.

    nbgrader gives a test cell no points when anything appears on its stderr, even a harmless warning. Text gets there
    in three ways: by `sys.stderr`, by file descriptor 2 (C++ code), and by log handlers that kept the stream object.
    """
    stream, buffer = sys.stderr, io.StringIO()
    with contextlib.suppress(Exception):
        stream.flush()
    with tempfile.TemporaryFile() as file:
        try:
            with contextlib.ExitStack() as undo:
                with contextlib.suppress(OSError):  # there may be no file descriptor 2
                    undo.callback(os.close, saved := os.dup(2))
                    undo.callback(os.dup2, saved, 2)
                    os.dup2(file.fileno(), 2)
                # ipykernel's stream is a Python object: replacing its `write` reaches log handlers that kept the stream.
                with contextlib.suppress(AttributeError):
                    stream.write = buffer.write  # type: ignore[method-assign]
                    undo.callback(delattr, stream, "write")
                with contextlib.redirect_stderr(buffer):
                    yield
        finally:
            file.seek(0)
            if text := buffer.getvalue() + file.read().decode(errors="replace"):
                print(text, end="" if text.endswith("\n") else "\n")


def _only_raises(code: types.CodeType) -> bool:
    """Whether a function does nothing in the end but raise NotImplementedError: it has no way to return."""
    steps = {step.opname for step in dis.get_instructions(code)}
    return "NotImplementedError" in code.co_names and not steps & {"RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE"}


def is_answered(value: object) -> bool:
    """Return whether a value is an answer: not None, not `...`, and no function or kernel that is still the stub."""
    if value is None or value is ...:
        return False
    for _ in range(8):  # through decorators, triton.jit and functools.partial
        inner = getattr(value, "__wrapped__", None) or getattr(value, "fn", None) or getattr(value, "func", None)
        if isinstance(value, types.FunctionType) or inner is None:
            break
        value = inner
    function = inspect.unwrap(value) if callable(value) else value
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return not (isinstance(code, types.CodeType) and _only_raises(code))


def raises_not_implemented(source: str) -> bool:
    """Whether a text of Python still has the `raise NotImplementedError()` of an unanswered question in it."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # written, if wrongly: the check says what is wrong with it
    return any(isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node) for node in ast.walk(tree))


def missing_answer(cell: ast.Module, names: Mapping[str, Any]) -> str | None:
    """Say which answer a cell of a notebook uses that is not there yet; None if the cell may run.

    The checks' parameters have the names of the answers, but for texts of files. A check says by itself that its answer is not
    written, a cell that asks `is_answered` goes on without it, and an answer may call one that is written later.
    """
    checks = {name: check for name, check in names.items() if name.startswith("check_") and hasattr(check, "question")}
    asked = [(check.question, inspect.signature(check).parameters.values()) for check in checks.values()]
    questions = {p.name: question for question, answers in asked for p in answers if p.annotation is p.empty}
    nodes = list(ast.walk(cell))
    bound = {getattr(node, "name", getattr(node, "arg", None)) for node in nodes}  # functions, classes, arguments
    bound |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    if bound & questions.keys():
        return None
    calls = [n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") in ("is_answered", *checks)]
    may_wait = {part.id for call in calls for part in ast.walk(call) if isinstance(part, ast.Name)}
    for name in (node.id for node in nodes if isinstance(node, ast.Name) and node.id in questions):
        what = f"This cell needs {label_of(questions[name])} ({name})"
        if name not in names:
            above = "Run the cells above this one first (menu Run, Run All Above Selected Cell)"
            return f"{what}, and there is no {name}. {above}, mend what ends in an error there, and name your answer {name}."
        if name not in may_wait and not is_answered(names[name]):
            return f"{what}: answer it first."
    return None


def watch_cells() -> None:
    """Let each cell of this notebook say what it lacks before it runs; do nothing outside of a notebook."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()

    def visit(cell: ast.Module) -> ast.Module:
        if message := missing_answer(cell, shell.user_ns):
            cell.body = ast.parse(f"raise __import__('utils.checking').checking.AnswerNeeded({message!r})").body
        return cell

    if shell:
        shell.ast_transformers.append(types.SimpleNamespace(visit=visit))


def check(
    question: str,
    title: str = "",
    *,
    forbids: Family | tuple[Family, ...] | None = None,
    largest: int | str | None = None,
    hint: str = "",
) -> Callable[[Callable], Callable[..., Verdict]]:
    """Turn a function into a check, which returns a `Verdict` and never raises for a student's mistake.

    The function returns nothing, or a sentence for the student, when the answer is right. Every call of the student's
    functions leaves its inputs as they were, and keeps to what is forbidden or limited, or fails (`Rule`, `Answer`).

    Args:
        question: `1.1`, or with its own word, `Bonus 4.5`
        title: a name for the question, in the message of a right answer
        forbids: a family of operators that may not run, or several; () forbids formulas of libraries alone
        largest: elements that an operator may work on, or words such as "one tile" where the check gives the number
        hint: what to do instead of what is forbidden
    """
    families = (forbids,) if isinstance(forbids, Family) else forbids
    rule = None if families is None and largest is None else Rule(families or (), largest, hint)

    def decorate(function: Callable) -> Callable[..., Verdict]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: object, **kwargs: object) -> Verdict:
            given = signature.bind(*args, **kwargs)  # a wrong call of the check itself is not the student's mistake
            answers = {name: is_answered(value) for name, value in given.arguments.items() if callable(value)}
            if missing := [name for name, answered in answers.items() if not answered]:
                what = missing[0] if len(missing) < len(answers) else label_of(question)
                return Verdict(question, False, f"{what} is not answered yet.")
            given.arguments.update({name: Answer(given.arguments[name], rule) for name in answers})
            try:
                with quiet_stderr():
                    message = function(*given.args, **given.kwargs)
            except (Exception, SystemExit) as error:
                return Verdict(question, False, _explain(error, question, function))
            return Verdict(question, True, message or (f"{title}: passed." if title else "passed."))

        # For the grader, and for the question's text.
        checked.question, checked.title, checked.rule = question, title, rule  # type: ignore[attr-defined]
        return checked

    return decorate


def visible(question: str, title: str = "", **rule) -> Callable[[Callable], Callable[..., None]]:
    """Turn a function into a check that raises `WrongAnswer` by itself, or prints a line; `.judge` returns the verdict."""

    def decorate(function: Callable) -> Callable[..., None]:
        judge = check(question, title, **rule)(function)

        @functools.wraps(judge)
        def checked(*args: object, **kwargs: object) -> None:
            judge(*args, **kwargs).raise_if_wrong()

        checked.judge = judge  # type: ignore[attr-defined]
        return checked

    return decorate


def _explain(error: BaseException, question: str, function: Callable) -> str:
    """One message for the student: what happened, and on which line of theirs."""
    lines = lines_of_error(error, skip=inspect.unwrap(function).__code__)
    where = f"\n  {lines[-1]}" if lines else ""
    if isinstance(error, AnswerNeeded):
        return str(error)
    # The `raise NotImplementedError()` of a stub has no words; torch's, for an operator that it lacks, has some.
    if isinstance(error, NotImplementedError) and not str(error):
        if len(lines) > 1 and lines[-1].function != lines[0].function:
            return f"{label_of(question)} calls {lines[-1].function}, which is not answered yet."
        return f"{label_of(question)} is not answered yet."
    if isinstance(error, AssertionError):
        return (str(error) or "an assert without a message failed.") + where
    if isinstance(error, SystemExit):
        return f"your code ended the program (SystemExit: {error.code}). Return the result instead.{where}"
    text = " ".join(str(error).split())
    if len(text) > 500:
        text = text[:500] + " ..."
    return f"your code raised {type(error).__name__}: {text}{where}"


def expect_close(
    got: object, expected: torch.Tensor, rtol: float, atol: float, what: str = "the result", *, hint: str = ""
) -> None:
    """Assert that `got` is `expected`: dtype, device and shape, then |got - expected| <= atol + rtol |expected|.

    `what` is the value in the student's words, such as `gemm_naive(a, b)`; `hint` ends the message about wrong values.
    """
    if got is None:
        raise AssertionError(f"{what} is None: is a return missing?")
    if not isinstance(got, torch.Tensor):
        raise AssertionError(f"{what} should be a torch.Tensor, and is of type {type(got).__name__}.")
    for name in ("layout", "dtype", "device"):
        if getattr(got, name) != getattr(expected, name):
            raise AssertionError(f"{what} should have {name} {getattr(expected, name)}, and has {getattr(got, name)}.")
    if got.shape != expected.shape:
        extra = " It looks transposed." if got.dim() > 1 and got.mT.shape == expected.shape else ""
        raise AssertionError(
            f"{what} should have shape {tuple(expected.shape)}, and has shape {tuple(got.shape)}.{extra}"
        )
    if got.numel() == 0:
        return
    g, e = got.detach().double(), expected.detach().double()
    hint = f" {hint}" if hint else ""
    stray = torch.isfinite(e) & ~torch.isfinite(g)
    if stray.any():
        name = "NaN" if g[stray].isnan().any() else "infinite"
        raise AssertionError(
            f"{what} has {int(stray.sum())} {name} values where numbers should be, the first at {stray.nonzero()[0].tolist()}: is "
            f"memory read that nothing was written to, or something divided by 0, or did an exponential overflow?{hint}"
        )
    wrong = ~torch.isclose(g, e, rtol=rtol, atol=atol, equal_nan=True)
    if not wrong.any():
        return
    excess = torch.nan_to_num((g - e).abs() - rtol * e.abs(), nan=math.inf)
    place = int(torch.where(wrong, excess, -math.inf).argmax())
    position = [int(i) for i in torch.unravel_index(torch.tensor(place), got.shape)]
    raise AssertionError(
        f"{what} is wrong in {int(wrong.sum())} of {wrong.numel()} elements. The worst is at {position}: got "
        f"{got.flatten()[place].item():.6g}, expected {expected.flatten()[place].item():.6g} "
        f"(allowed: rtol {rtol:g}, atol {atol:g}).{_pattern(g, e, rtol)}{hint}"
    )


def _pattern(got: torch.Tensor, expected: torch.Tensor, rtol: float) -> str:
    """A sentence on how wrong values relate to the right ones, if they do so simply."""
    if not got.any():
        return " Every element is zero."
    close = functools.partial(torch.allclose, rtol=max(rtol, 1e-3), atol=0.0)
    if got.dim() > 1 and got.shape[-1] == got.shape[-2] and close(got.mT, expected):
        return " It is the transpose of the right answer."
    used = expected.abs() > expected.abs().max() * 1e-3
    ratio = got[used] / expected[used]
    if ratio.numel() < 2 or abs(float(ratio.median()) - 1) < 1e-3:  # "1 times" would say nothing
        return ""
    if close(got, expected * ratio.median()):
        return f" Every element is {float(ratio.median()):.4g} times the right one."
    return ""


def expect_items(got: object, names: str, what: str) -> list:
    """Assert that an answer returned a tuple or a list of the things that are named, such as "q, k, v"; return it."""
    if not isinstance(got, tuple | list) or len(got) != len(names.split(", ")):
        raise AssertionError(f"{what} should be ({names}), and is {got!r:.80}.")
    return list(got)


def expect_number(
    got: object,
    expected: float,
    rel: float = 0.01,
    unit: str = "",
    what: str = "the answer",
    *,
    mistakes: Mapping[str, float | Sequence[float]] | None = None,
    tell: bool = False,
) -> None:
    """Assert that `got`, also a 0-d tensor or a NumPy scalar, is the number `expected`; name a wrong unit or a known mistake.

    `mistakes` is {hint: the number, or numbers, that this mistake leads to}. With `tell` the message says the right number:
    that of a visible check would answer the question with it.
    """
    if got is None:
        raise AssertionError(f"{what} is None: is a return missing?")
    if isinstance(got, torch.Tensor) and got.numel() == 1:
        got = got.item()
    if isinstance(got, bool) or not isinstance(got, numbers.Real):
        raise AssertionError(
            f"{what} should be a number{unit and f' in {unit}'}, and is {got!r} ({type(got).__name__})."
        )
    value = float(got)
    if not math.isfinite(value):
        raise AssertionError(f"{what} should be a finite number{unit and f' in {unit}'}, and is {value}.")
    if abs(value - expected) <= rel * abs(expected):
        return
    tail, near = unit and f" {unit}", max(rel, 1e-9)
    # Two mistakes may lead to the same number; then the message names both.
    known = [
        text
        for text, numbers in (mistakes or {}).items()
        if any(abs(value - n) <= near * abs(n) for n in (numbers if isinstance(numbers, Sequence) else (numbers,)))
    ]
    hint = f" {' Or: '.join(known)}" if known else _factor(value, float(expected), unit)
    right = f", expected {_shown(float(expected))}{tail}" if tell else ""
    raise AssertionError(f"{what} is not {_shown(value)}{tail}{right}.{hint}")


def _shown(number: float) -> str:
    return f"{int(number):,}" if number.is_integer() and abs(number) < 1e15 else f"{number:.6g}"


def _factor(value: float, expected: float, unit: str) -> str:
    """Say on which side of the right number a wrong one lies, and whether MACs, or a prefix of the unit, explain the distance."""
    ratio = value / expected if expected else 0.0
    counts = "FLOP" in unit or "MAC" in unit
    if counts and abs(2 * ratio - 1) < 2e-3:
        return " It is half of the right number: a multiply-accumulate (MAC) is one MAC, and two FLOPs."
    if counts and abs(ratio / 2 - 1) < 2e-3:
        return " It is twice the right number: one multiply-accumulate (MAC) is two FLOPs; which one is asked for?"
    side = "large" if value > expected else "small"
    power = round(math.log10(ratio)) if ratio > 0 else 0
    if unit and power and power % 3 == 0 and abs(ratio / 10.0**power - 1) < 2e-3:
        return f" It is 10^{abs(power)} times too {side}: check the prefix of the unit (k, M, G, T; m for milli)."
    return f" It is too {side}."
