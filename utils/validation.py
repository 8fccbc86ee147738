"""Checks of arguments that several packages make, with one wording."""

from __future__ import annotations


def whole_number(name: str, value: object, least: int = 1, error: type[Exception] = ValueError) -> int:
    """Return `value` if it is a whole number of at least `least`; otherwise raise `error` and say what was given.

    Args:
        name: what the caller calls the value, such as "warmup" or "--repeats".
        value: what was given. True and False are no numbers here.
        least: the smallest value that is allowed.
        error: the exception to raise.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise error(f"{name} is {value!r}; it must be a whole number, {least} or more.")
    return value
