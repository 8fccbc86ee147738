"""The errors of the benchmark harness, and the check that a word is allowed."""

from __future__ import annotations

from collections.abc import Iterable

from utils.validation import UserError, did_you_mean


class BenchError(UserError):
    """The input cannot be used."""


class Refused(BenchError):
    """This machine cannot run the case. The message says why."""


class WrongRun(BenchError):
    """A wrong kernel or backend ran, so the times are void."""


class VerificationError(BenchError):
    """The error of an output, measured against the float64 reference, is larger than the rounding of its dtype."""


def check_choice(name: str, value: str, allowed: Iterable[str]) -> str:
    """Return `value` if it is in `allowed`; otherwise raise BenchError and name the most similar allowed word."""
    names = tuple(allowed)
    if value not in names:
        raise BenchError(f"{name} is {value!r}; it must be one of {', '.join(names)}.{did_you_mean(value, names)}")
    return value
