"""Checks of arguments that several packages make, with one wording."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def whole_number(name: str, value: object, least: int = 1, error: type[Exception] = ValueError) -> int:
    """Return `value` if it is a whole number of at least `least`; otherwise raise `error` and say what was given.

    Args:
        name: the caller's name for the value, such as "warmup" or "--repeats".
        value: the value. True and False are no numbers here.
        least: the smallest value that is allowed.
        error: the exception to raise.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise error(f"{name} is {value!r}; it must be a whole number, {least} or more.")
    return value


def whole_numbers(**values: int) -> None:
    """Check that every value is a whole number, 1 or more: `whole_numbers(batch=batch, tokens=tokens)`."""
    for name, value in values.items():
        whole_number(name, value)


def floating_dtype(dtype: object, name: str = "dtype") -> torch.dtype:
    """Return `dtype` if torch computes with it as it does with ordinary numbers, torch's default dtype for None.

    The formats of 8 bits and fewer are not among them: most of torch's functions do not take them.
    """
    import torch

    if dtype is None:
        return torch.get_default_dtype()
    allowed = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    if dtype not in allowed:
        raise ValueError(f"{name} is {dtype!r}; it must be one of {', '.join(map(str, allowed))}.")
    return dtype


def check_callable(caller: str, fn: object) -> None:
    """Raise TypeError if `fn` cannot be called; the usual cause is `caller(fn(x))` instead of `caller(fn, x)`."""
    if not callable(fn):
        raise TypeError(
            f"{caller}() takes a function: fn must be callable, got {type(fn).__name__}. "
            f"Pass fn and its arguments separately: {caller}(fn, x), not {caller}(fn(x))."
        )


def suggest_keywords(function: Callable) -> Callable:
    """Decorate a function so that a misspelt keyword is answered with the name that was probably meant.

    Python says so itself from 3.13 on.
    """
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        for name in kwargs:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"its arguments are {', '.join(names)}"
                raise TypeError(f"{function.__name__}() has no argument {name!r}: {hint}")
        return function(*args, **kwargs)

    return wrapper
