"""Whether the result of an operator reaches an answer's result: the operator's result is altered, and the answer's has to change with it.

An operator that a question asks for can be run for show, beside what really computes the result. Counting it says nothing about that.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from torch.overrides import TorchFunctionMode


class Altered(TorchFunctionMode):
    """Adds a number to what some functions of torch return, while it is on.

        with Altered(("tanh",), 0.25):
            other = gelu_by_hand(x)  # as far from the right values as that takes it

    It goes with the call to another process, as torch's function modes do, and there it holds for what the call's own code calls.

    Args:
        names: of functions, without underscores around them; each is a regular expression.
        amount: what is added to each element of a result of real numbers.
    """

    def __init__(self, names: Collection[str], amount: float):
        super().__init__()
        self.pattern = "|".join(f"(?:{name})" for name in names)
        self.amount = amount

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        real = isinstance(result, torch.Tensor) and result.is_floating_point()
        if not real or not re.fullmatch(self.pattern, plain_name(name)) or _is_power_by_number(name, args, kwargs):
            return result
        if any(result is given for given in (*args[:1], kwargs.get("out"))):  # tanh_(), and tanh(out=...)
            return result.add_(self.amount)
        return result + self.amount


def plain_name(name: str) -> str:
    """`__rpow__` and `tanh_` as `rpow` and `tanh`."""
    return name.strip("_") if name.startswith("__") else name.rstrip("_")


def _is_power_by_number(name: str, args: tuple, kwargs: dict) -> bool:
    """True for a power whose exponent is one number, such as x ** 3; e ** x is an exponential."""
    if plain_name(name) not in ("pow", "float_power", "ipow"):
        return False
    exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
    return not isinstance(exponent, torch.Tensor) or exponent.numel() == 1
