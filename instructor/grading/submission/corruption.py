"""The control of checks that run inside: wrong answers made of a student's."""

from __future__ import annotations

import types

import torch


def corrupt(value: object) -> object:
    """Make a wrong answer of a student's: a function with wrong results, a class with wrong methods, a wrong value."""
    if isinstance(value, type):
        body = {name: corrupt(getattr(value, name)) for name in ("forward", "__call__") if name in vars(value)}
        try:
            return type(value)(value.__name__, (value,), body) if body else None
        except TypeError:
            return None
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):

        def wrong(*args, **kwargs):
            return corrupt_result(value(*args, **kwargs))

        wrong.__name__ = getattr(value, "__name__", "wrong")
        return wrong
    return corrupt_result(value)


def corrupt_result(value):
    """Change a result: tensors and numbers in value, texts in their letters, anything unknown to None."""
    if isinstance(value, torch.Tensor):
        return ~value if value.dtype is torch.bool else value * -3 + 5 if value.numel() else value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float | complex):
        return value * -3 + 5
    if isinstance(value, str):
        return value[::-1] + "?"
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(corrupt_result(v) for v in value)
    if type(value) is dict:
        return {k: corrupt_result(v) for k, v in value.items()}
    return None
