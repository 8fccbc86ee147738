"""The checker's functions that run where the student's code runs: each travels as its code, and as what it refers to.

Most functions of a check stay with the checker, and a student's code calls them from afar. A profiler or a FLOP counter of
the student's sees nothing of such a call. So two kinds of functions travel themselves: those that a check marks
(`by_value` in `utils.checking`), and functions without parameters that only compute with tensors. They hold no
expected value: a student can read what travels.
"""

from __future__ import annotations

import builtins
import dis
import importlib
import marshal
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from instructor.grading.wire.channel import WireError

_COMPUTING = ("torch", "math")  # the packages that an unmarked function may use
MARK = "travels_by_value"


def travels(value: object, refers: Callable[[object], bool]) -> bool:
    """True for a function of the checker's that is sent and not called from afar.

    Args:
        value: any value.
        refers: says whether a value travels as a reference to something that the other side can import.
    """
    if not isinstance(value, types.FunctionType) or "remote_number" in vars(value):
        return False
    if MARK in vars(value):
        return True
    code = value.__code__
    if code.co_argcount or code.co_kwonlyargcount or code.co_flags & 0x2C:  # parameters, *args, **kwargs, a generator
        return False
    parts = [part for _, part in parts_of(value)]
    return all(_is_plain(part, refers) for part in parts) and any(_computes(part) for part in parts)


def _computes(part: object) -> bool:
    module = part.__name__ if isinstance(part, types.ModuleType) else getattr(part, "__module__", None) or ""
    return isinstance(part, torch.Tensor) or module.partition(".")[0] == "torch"


def _is_plain(part: object, refers: Callable[[object], bool]) -> bool:
    if part is None or isinstance(part, bool | int | float | str | torch.dtype | torch.device):
        return True
    if isinstance(part, types.ModuleType):
        return part.__name__.partition(".")[0] in _COMPUTING
    return type(part) is torch.Tensor or refers(part)


def parts_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a function refers to outside of itself: variables around it, and global names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell.cell_contents
    for name in sorted(_global_names(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]
        elif not hasattr(builtins, name):
            raise WireError(f"a function that uses {name}, which is not defined")


def _global_names(code: types.CodeType) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def describe_function(function: types.FunctionType) -> tuple[bytes, dict]:
    """A function's code as bytes, and the values that it needs."""
    code = function.__code__
    return marshal.dumps(code), {
        "name": function.__name__,
        "defaults": list(function.__defaults__ or ()),
        "keywords": dict(function.__kwdefaults__ or {}),
        "parts": dict(parts_of(function)),
    }


def rebuild_function(code: bytes, fields: dict) -> types.FunctionType:
    """Make a function of what `describe_function` gave."""
    made, parts = marshal.loads(code), fields["parts"]
    cells = tuple(types.CellType(parts[name]) for name in made.co_freevars)
    space = {"__builtins__": builtins, "__name__": "checks", **{k: v for k, v in parts.items()}}
    function = types.FunctionType(made, space, fields["name"], tuple(fields["defaults"]), cells)
    function.__kwdefaults__ = fields["keywords"] or None
    return function


def module_of_name(name: str) -> types.ModuleType:
    """The module of this name, on the student's side; never one of the instructor's."""
    if name.partition(".")[0] == "instructor":
        raise WireError("a module of the instructor's cannot travel")
    return importlib.import_module(name)
