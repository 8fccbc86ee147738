"""The values that a function reads beside its arguments. A change of them ends a block mask; the timer looks for tensors in them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any


@functools.lru_cache(maxsize=256)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in a function's code, and in the code of the functions that it defines."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return *code.co_names, *(name for part in inner for name in names_in(part))


def outside_values(function: Callable) -> list[Any]:
    """Return a function's default arguments, the values of its closure, and the globals that its code names."""
    values = [
        *(getattr(function, "__defaults__", None) or ()),
        *(getattr(function, "__kwdefaults__", None) or {}).values(),
    ]
    values += [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != types.CellType()]
    known = getattr(function, "__globals__", {})
    names = names_in(function.__code__) if hasattr(function, "__code__") else ()
    return values + [known[name] for name in names if name in known]
