"""Proxies: objects that are called as a function in another process is, and have its name and its parameters.

FlexAttention counts the positional arguments of a function to tell a mask from a score modifier, and so do checks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

MAX_PARAMETERS = 40
_LEFT_OUT = type("default", (), {"__repr__": lambda self: "..."})()


def parameters_of(function: Callable) -> list[list] | None:
    """[[name, kind, has a default], ...] as the caller meets them; None where Python does not know."""
    try:
        code = getattr(function, "__code__", None)
        if code is not None and not inspect.ismethod(function):  # what FlexAttention looks at; no `__wrapped__`
            known = inspect.Signature.from_callable(function, follow_wrapped=False)
        else:
            known = inspect.signature(function)
        return [[p.name, int(p.kind), p.default is not inspect.Parameter.empty] for p in known.parameters.values()]
    except Exception:  # a student's __signature__ may do anything
        return None


def _signature(parameters: object) -> inspect.Signature | None:
    """The signature that `parameters_of` described; None for anything else, since the other side may have forged it."""
    if type(parameters) is not list or len(parameters) > MAX_PARAMETERS:
        return None
    try:
        found = [
            inspect.Parameter(name, kind, default=_LEFT_OUT if optional else inspect.Parameter.empty)
            for name, kind, optional in parameters
        ]
        return inspect.Signature(found)
    except (TypeError, ValueError):
        return None


class Proxy:
    """Hands its arguments to `call(args, kwargs)`, and none of the defaults.

    Its parameters are as `parameters_of` gives them, or else any; `names` are its `__globals__`.
    """

    _torchdynamo_disable = True  # torch.compile calls it, and does not look into it

    def __init__(
        self, call: Callable[[tuple, dict], object], name: str, parameters: object, names: dict | None = None
    ) -> None:
        self._call, self.__name__, self.__qualname__ = call, name, name
        self.__globals__ = names if names is not None else {}
        if (signature := _signature(parameters)) is not None:
            self.__signature__ = signature

    def __call__(self, /, *args, **kwargs):
        """Call the function in the other process."""
        if (signature := getattr(self, "__signature__", None)) is not None:
            signature.bind(*args, **kwargs)  # raises where an argument is missing, or one too many
        return self._call(args, kwargs)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]
