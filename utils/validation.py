"""Checks of arguments for several packages, with the same words in their errors."""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class UserError(Exception):
    """A problem that the user can solve: the text says what was given, what is allowed, and what to do next."""


def lab_named(given: str, labs: list[str]) -> str:
    """Return the lab that is named in full or by its beginning, such as lab3; UserError if none is, or several are."""
    stem = given.removesuffix(".ipynb")
    found = [lab for lab in labs if lab == stem] or [lab for lab in labs if stem and lab.startswith(stem)]
    if len(found) != 1:
        problem = f"{given!r} could be {' or '.join(found)}" if found else f"there is no lab {given!r}"
        raise UserError(f"{problem}; the labs are: {', '.join(labs) or 'none'}.")
    return found[0]


def did_you_mean(given: object, allowed: Iterable[str]) -> str:
    """Return " Did you mean X?" for the closest allowed name, in upper or lower case, or "" if no name is close."""
    names = {name.lower(): name for name in allowed}
    near = difflib.get_close_matches(str(given).lower(), names, n=1, cutoff=0.5)
    return f" Did you mean {names[near[0]]}?" if near else ""


def first_line(error: object) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def whole_number(name: str, value: object, least: int = 1, error: type[Exception] = ValueError) -> int:
    """Return `value` as an int if it is a whole number and at least `least`; otherwise raise `error` with the given value.

    Args:
        name: the caller's name for the value, such as "warmup" or "--repeats".
        value: an int, or a whole number of NumPy. True and False are not numbers here.
        least: the smallest allowed value.
        error: the exception to raise.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise error(f"{name} is {value!r}; it must be a whole number, {least} or more.")
    return int(value)


def whole_numbers(**values: int) -> None:
    """Check that every value is a whole number, 1 or more: `whole_numbers(batch=batch, tokens=tokens)`."""
    for name, value in values.items():
        whole_number(name, value)


def floating_dtype(dtype: object) -> torch.dtype:
    """Return `dtype` if it is a floating-point dtype of 16 bits or more, and torch's default dtype for None.

    Most of torch's functions do not take dtypes of 8 bits and fewer.
    """
    import torch

    dtype = torch.get_default_dtype() if dtype is None else dtype
    allowed = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    if dtype not in allowed:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(map(str, allowed))}.")
    return dtype


def check_callable(caller: str, fn: object, *arguments: object) -> None:
    """Raise TypeError if calling `fn`, or calling it with these arguments again and again, does nothing.

    The usual cause is `caller(fn(x))` instead of `caller(fn, x)`; another one is an iterator, which the first call uses up.
    """
    if not callable(fn) or inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        raise TypeError(
            f"{caller}() takes a function: fn must be callable, and no generator or coroutine, got {type(fn).__name__}. "
            f"Pass fn and its arguments separately: {caller}(fn, x), not {caller}(fn(x))."
        )
    if isinstance(fn, functools.partial):
        arguments = (*arguments, *fn.args, *fn.keywords.values())
    for one in arguments:
        if isinstance(one, Iterator) and not hasattr(one, "seek"):  # a file may be read or written again
            raise TypeError(f"{caller}() got a {type(one).__name__}, which the first call uses up: pass a list.")
