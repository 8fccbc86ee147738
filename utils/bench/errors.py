"""The errors of the benchmark harness, and the check of a word against those allowed."""

from __future__ import annotations

from collections.abc import Iterable

from utils.validation import UserError, did_you_mean


class BenchError(UserError):
    """The input cannot be used."""


class Refused(BenchError):
    """This machine cannot run what was asked for. The message says why."""


class WrongRun(BenchError):
    """Another kernel or backend ran than was asked for, so the times are void."""


class VerificationError(BenchError):
    """An output differs from the float64 reference by more than its dtype's rounding explains."""


def check_choice(name: str, value: str, allowed: Iterable[str]) -> str:
    """Return `value` if it is one of `allowed`; otherwise raise BenchError and name the nearest one."""
    names = tuple(allowed)
    if value not in names:
        raise BenchError(f"{name} is {value!r}; it must be one of {', '.join(names)}.{did_you_mean(value, names)}")
    return value
