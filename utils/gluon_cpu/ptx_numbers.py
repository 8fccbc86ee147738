"""Inline assembly that computes numbers from numbers: a few PTX instructions, run on NumPy arrays in fp32."""

from __future__ import annotations

import re

import numpy as np

from .context import refuse
from .tensors import Tensor

_BLOCK = re.compile(r"\{ (?:\.reg \.(?:f32|b32) [a-z, ]+; )+((?:ex2|max|add|sub|mov|fma|shl)[^{}]*;) \}")


def computes_numbers(text: str) -> bool:
    """Whether this is the assembly of a block that `run_numbers` may know."""
    return _BLOCK.fullmatch(text) is not None


def _floor_sum(x, y):
    # add.rm.f32: the exact sum, rounded down; the sum of two numbers in fp32 is exact in fp64 where their sizes are alike.
    exact = x.astype(np.float64) + y.astype(np.float64)
    near = exact.astype(np.float32)
    return np.where(near.astype(np.float64) > exact, np.nextafter(near, np.float32("-inf")), near)


def _flushed(x):
    return np.where(np.abs(x) < np.float32(2.0**-126), np.float32(0), x)


_OPERATIONS = {
    "ex2.approx.ftz.f32": lambda x: _flushed(np.exp2(x)),
    "max.NaN.f32": np.maximum,
    "add.rm.f32": _floor_sum,
    "sub.f32": np.subtract,
    "mov.b32": lambda x: x,
    "fma.rn.f32": lambda x, y, z: (x.astype(np.float64) * y + z).astype(np.float32),
    "shl.b32": lambda x, y: (x.view(np.uint32) << np.uint32(y)).view(np.float32),
    "add.s32": lambda x, y: (x.view(np.uint32) + y.view(np.uint32)).view(np.float32),
}


def run_numbers(text: str, x: Tensor, pack: int) -> Tensor:
    """Run such a block on a product [rows, columns], of which it gets `pack` registers at a time.

    Registers 2 h + 4 b + p hold, of each sixteen rows and columns, row 8 h and on, column 8 b and on, and of two neighbours p.
    """
    if pack != 8 or x.data.ndim != 2 or x.dtype.name != "fp32":
        refuse("unknown operation", f"gluon_cpu does not know this inline assembly with pack={pack}: {text[:120]}")
    rows, columns = (np.arange(n) for n in x.data.shape)
    register = (rows % 16 // 8 * 2)[:, None] + (columns % 16 // 8 * 4 + columns % 2)[None, :]
    out = np.empty_like(x.data)
    values = {f"${pack + i}": x.data[register == i] for i in range(pack)}

    def read(name: str):
        if name.startswith("0f"):
            return np.full(values["$8"].shape, np.uint32(int(name[2:], 16)).view(np.float32))
        return values[name] if not name.isdigit() else int(name)

    with np.errstate(all="ignore"):
        for line in _BLOCK.sub(r"\1", text).strip("; ").split("; "):
            operation, _, names = line.partition(" ")
            if operation not in _OPERATIONS:
                refuse("unknown operation", f"gluon_cpu does not know {operation} in inline assembly: {line}")
            target, *sources = names.split(", ")
            values[target] = _OPERATIONS[operation](*(read(name) for name in sources))
    for i in range(pack):
        out[register == i] = values[f"${i}"]
    return Tensor(out, x.dtype, x.layout)
