"""The errors of the benchmark harness, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BenchError(Exception):
    """The input cannot be used. The message says what was given, what is allowed, and what to do next."""


class Refused(BenchError):
    """This machine cannot run what was asked for. The message says why."""


class WrongRun(BenchError):
    """Another kernel or backend ran than was asked for, so the times are void."""


class VerificationError(BenchError):
    """An output differs from the float64 reference by more than its dtype's rounding explains."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Return " Did you mean X?", or "" if no allowed name is close to the given one."""
    near = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else ""


def check_choice(name: str, value: str, allowed: Iterable[str]) -> str:
    """Return `value` if it is one of `allowed`; otherwise raise BenchError and name the nearest one."""
    names = tuple(allowed)
    if value not in names:
        raise BenchError(f"{name} is {value!r}; it must be one of {', '.join(names)}.{did_you_mean(value, names)}")
    return value


def check_choices(name: str, text: str, allowed: Iterable[str]) -> tuple[str, ...]:
    """Split words that are separated by commas, drop repeated ones, and check each of them (see `check_choice`)."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise BenchError(f"{name} names nothing; allowed are {', '.join(allowed)}.")
    return tuple(check_choice(name, word, allowed) for word in dict.fromkeys(words))


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its type if the message is empty."""
    from utils.machine import device  # loads torch

    return device.first_line(error) or type(error).__name__
