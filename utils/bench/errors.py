"""What the harness raises when it is asked for something it cannot do, and the nearest right name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BenchError(Exception):
    """Bad input: what was given, what is allowed, what to do next."""


class Refused(BenchError):
    """This machine cannot run what was asked for; the message says why."""


class WrongRun(BenchError):
    """Something else ran than was asked for; its times are void."""


class VerificationError(BenchError):
    """An output that is not the reference's within the bounds of its dtype."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """ " Did you mean X?", or nothing where none is near."""
    near = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else ""


def nearest(given: str, allowed: Iterable[str]) -> str:
    """ " Did you mean X?", or the allowed names where none is near."""
    names = list(allowed)
    return did_you_mean(given, names) or (f" Allowed: {', '.join(names)}." if names else "")


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type's name."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
