"""Checks of a student's answers: a verdict instead of a crash, and messages that say what to look at.

A check is a function of the student's objects. It tests them by plain ``assert`` and the ``expect_*`` functions below.
``@check`` turns its end, or any exception, into a `Verdict`:

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
    """Return `Question 1.1` for `1.1`, and `Bonus 4.5` for `Bonus 4.5`."""
    return f"Question {question}" if question[:1].isdigit() else question


class WrongAnswer(AssertionError):
    """A failed verdict. Notebooks show its message alone, without a traceback through the checks."""

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[31m✗\x1b[0m {self}"]


class AnswerNeeded(NotImplementedError):
    """A cell needs an answer that is not written yet. Notebooks show its message alone."""

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
    """Redirect all text for stderr to stdout inside of the block.

    nbgrader gives a test cell no points if any text appears on its stderr, even a harmless warning. There are three ways
    to stderr: `sys.stderr`, file descriptor 2 (C++ code), and log handlers that hold the stream object.
    """
    stream, buffer = sys.stderr, io.StringIO()
    with contextlib.suppress(Exception):
        stream.flush()
    with tempfile.TemporaryFile() as file:
        try:
            with contextlib.ExitStack() as undo:
                with contextlib.suppress(OSError):  # file descriptor 2 may not exist
                    undo.callback(os.close, saved := os.dup(2))
                    undo.callback(os.dup2, saved, 2)
                    os.dup2(file.fileno(), 2)
                # ipykernel's stream is a Python object: a new `write` also redirects log handlers that hold the stream.
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
    """Return whether a function always raises NotImplementedError, and never returns."""
    steps = {step.opname for step in dis.get_instructions(code)}
    return "NotImplementedError" in code.co_names and not steps & {"RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE"}


def is_answered(value: object) -> bool:
    """Return whether a value is an answer: not None, not `...`, and not the unwritten stub of a function or kernel."""
    if value is None or value is ...:
        return False
    for _ in range(8):  # the function inside of decorators, triton.jit and functools.partial
        inner = getattr(value, "__wrapped__", None) or getattr(value, "fn", None) or getattr(value, "func", None)
        if isinstance(value, types.FunctionType) or inner is None:
            break
        value = inner
    function = inspect.unwrap(value) if callable(value) else value
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return not (isinstance(code, types.CodeType) and _only_raises(code))


def raises_not_implemented(source: str) -> bool:
    """Return whether a text of Python still has the `raise NotImplementedError()` of an unanswered question."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # it is written, but wrong: the check names the error
    return any(isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node) for node in ast.walk(tree))


def missing_answer(cell: ast.Module, names: Mapping[str, Any]) -> str | None:
    """Return a message about an unwritten answer that a cell of a notebook uses; None if the cell may run.

    The checks' parameters have the names of the answers, except for texts of files. Three kinds of cells may run: a check
    reports an unwritten answer itself, a cell with `is_answered` needs no answer, and an answer may call a later one.
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
            return f"{what}, and there is no {name}. {above}, repair the cells that end in an error, and name your answer {name}."
        if name not in may_wait and not is_answered(names[name]):
            return f"{what}: answer it first."
    return None


def watch_cells() -> None:
    """Before each cell of this notebook, show a message if an answer is missing; do nothing outside of a notebook."""
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

    If the answer is right, the function returns nothing, or a sentence for the student. A call of a student's function
    fails if it changes its inputs (`Answer`), or breaks the rule (`Rule`).

    Args:
        question: `1.1`, or `Bonus 4.5`
        title: a name for the question, in the message of a right answer
        forbids: one or more families of operators that may not run; () forbids only formulas of libraries
        largest: elements that an operator may work on, or words such as "one tile" where the check gives the number
        hint: advice, for an answer that breaks the rule
    """
    families = (forbids,) if isinstance(forbids, Family) else forbids
    rule = None if families is None and largest is None else Rule(families or (), largest, hint)

    def decorate(function: Callable) -> Callable[..., Verdict]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: object, **kwargs: object) -> Verdict:
            given = signature.bind(*args, **kwargs)  # wrong arguments of the check itself are not the student's mistake
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

        # The grader reads these, and so does the builder of the question's text.
        checked.question, checked.title, checked.rule = question, title, rule  # type: ignore[attr-defined]
        return checked

    return decorate


def visible(question: str, title: str = "", **rule) -> Callable[[Callable], Callable[..., None]]:
    """Turn a function into a check that raises `WrongAnswer` or prints a line; its `.judge` returns the verdict."""

    def decorate(function: Callable) -> Callable[..., None]:
        judge = check(question, title, **rule)(function)

        @functools.wraps(judge)
        def checked(*args: object, **kwargs: object) -> None:
            judge(*args, **kwargs).raise_if_wrong()

        checked.judge = judge  # type: ignore[attr-defined]
        return checked

    return decorate


def _explain(error: BaseException, question: str, function: Callable) -> str:
    """Return a message for the student: the error, and the student's line that led to it."""
    lines = lines_of_error(error, skip=inspect.unwrap(function).__code__)
    where = f"\n  {lines[-1]}" if lines else ""
    if isinstance(error, AnswerNeeded):
        return str(error)
    # The NotImplementedError of a stub has no words; torch's error for a missing operator has words.
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
    """Return a sentence about a simple relation between wrong and right values; "" if there is none."""
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
    """Assert that an answer returned a tuple or list with an item for each name, such as "q, k, v"; return it."""
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
    """Assert that `got`, also a 0-d tensor or a NumPy scalar, is `expected`; name a wrong unit or a known mistake.

    `mistakes` is {hint: the number, or numbers, that this mistake leads to}. With `tell` the message has the right number.
    In a visible check it would answer the question.
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
    # If two mistakes lead to the same number, the message names both.
    known = [
        text
        for text, numbers in (mistakes or {}).items()
        if any(abs(value - n) <= near * abs(n) for n in (numbers if isinstance(numbers, Sequence) else (numbers,)))
    ]
    hint = f" {' Or: '.join(known)}" if known else _factor(value, float(expected), unit)
    right = f", expected {_number_text(float(expected))}{tail}" if tell else ""
    raise AssertionError(f"{what} is not {_number_text(value)}{tail}{right}.{hint}")


def _number_text(number: float) -> str:
    return f"{int(number):,}" if number.is_integer() and abs(number) < 1e15 else f"{number:.6g}"


def _factor(value: float, expected: float, unit: str) -> str:
    """Say whether a number is too large or too small, and whether MACs or a prefix of the unit explain the factor."""
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
