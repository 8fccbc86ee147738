"""Run the arithmetic of Gluon kernels as plain Python: which program does what, without a simulator.

The source itself runs, with a stand-in for Gluon's language that knows whole numbers and loads. A scalar is a `Number`, which
raises an OverflowError where 32 bits would not hold it.
"""

from __future__ import annotations

import operator
import types
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]


class Number(int):
    """A 32-bit scalar of a kernel."""

    def to(self, dtype):
        return self


def _checked(name):
    operation = getattr(operator, name)

    def result(self, *other):
        value = operation(int(self), *(int(x) if isinstance(x, int) else x for x in other))
        if isinstance(value, int):
            if not -(2**31) <= value < 2**31:
                raise OverflowError(f"{name}({self}, {other}) is {value}")
            return Number(value)
        return value

    return result


def _reflected(name):
    operation = _checked(name)
    return lambda self, other: operation(Number(other), self)


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _checked({"and": "and_", "or": "or_"}.get(_name, _name)))
for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(Number, f"__r{_name}__", _reflected(_name))
Number.__hash__ = int.__hash__


class Numbers(np.ndarray):
    """A tensor of a kernel."""

    def to(self, dtype):
        return self.astype(np.int64)


class Pointer:
    """A pointer into an array."""

    def __init__(self, array, at=0):
        self.array, self.at = np.asarray(array, dtype=np.int64), at

    def __add__(self, offset):
        return Pointer(self.array, self.at + offset)


def _load(pointer, mask=None, other=0):
    if mask is None:
        return Number(pointer.array[pointer.at])  # an IndexError behind the end
    assert (pointer.at[mask] < len(pointer.array)).all(), "a load behind the end of the array"
    found = np.where(mask, pointer.array[np.where(mask, pointer.at, 0)], other)
    return found.view(Numbers)


def _either(scalar, array):
    return lambda *given: (
        array(*given).view(Numbers) if any(isinstance(x, np.ndarray) for x in given) else Number(scalar(*given))
    )


class Language:
    """What kernels ask of `gl`; program and programs are set by the caller."""

    program, programs = 0, 1
    tensor = shared_memory_descriptor = int32 = int64 = None

    def __init__(self):
        self.constexpr = self.to_tensor = self.static_range = None
        self.constexpr = lambda x: x
        self.to_tensor = Number
        self.load = _load
        self.maximum, self.minimum = _either(max, np.maximum), _either(min, np.minimum)
        self.where = _either(lambda a, b, c: b if a else c, np.where)
        self.sum = lambda x, axis: Number(int(x.sum()))
        self.max = lambda x, axis: Number(int(x.max()))
        self.associative_scan = lambda x, axis, add: np.cumsum(x).view(Numbers)
        self.arange = lambda begin, end, layout: np.arange(begin, end).view(Numbers)
        self.cdiv = lambda x, y: Number(-(-int(x) // int(y)))
        self.BlockedLayout = lambda *given: None
        self.num_warps = lambda: 4

    def program_id(self, axis):
        return Number(self.program)

    def num_programs(self, axis):
        return Number(self.programs)


def kernel_code(path: str, begin: str, end: str = "", **names) -> types.SimpleNamespace:
    """Return the names that a part of a kernel's source defines, run with `gl` as a `Language`."""
    source = (ROOT / path).read_text()
    part = source[source.index(begin) :]
    part = part[: part.index(end)] if end else part
    gl = Language()
    gluon = types.SimpleNamespace(jit=lambda f: f, constexpr_function=lambda f: f)
    names = {"gl": gl, "gluon": gluon, "aggregate": lambda c: c, **names}
    exec(compile(part, path, "exec"), names)
    return types.SimpleNamespace(**names)
