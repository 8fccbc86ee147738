"""Gluon's element types in NumPy. NumPy has no bf16 and no fp8, so these values are float32 numbers, rounded to their type."""

from __future__ import annotations

import numpy as np
import torch
from triton.experimental.gluon import language as gl

# (Triton's type, torch's type, NumPy's type for the values).
_SAME_NAME = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
_TYPES = (
    (gl.int1, torch.bool, np.bool_),
    *((getattr(gl, name), getattr(torch, name), getattr(np, name)) for name in _SAME_NAME),
    (gl.bfloat16, torch.bfloat16, np.float32),
    (gl.float8e4nv, torch.float8_e4m3fn, np.float32),
    (gl.float8e5, torch.float8_e5m2, np.float32),
)
NUMPY = {dtype.name: kind for dtype, _, kind in _TYPES}
TORCH = {of_torch: dtype for dtype, of_torch, _ in _TYPES}
_DTYPES = {name: np.dtype(kind) for name, kind in NUMPY.items()}
# Floating-point formats by range, then by precision: mixed arithmetic takes the higher rank.
FLOAT_RANK = {"fp8e4nv": -2, "fp8e5": -1, "bf16": 0, "fp16": 1, "fp32": 2, "fp64": 3}
# {type whose values are float32 in NumPy: (torch's type, torch's and NumPy's integer types of the same bits)}.
HELD_WIDER = {
    "bf16": (torch.bfloat16, torch.int16, np.int16),
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8, np.uint8),
    "fp8e5": (torch.float8_e5m2, torch.uint8, np.uint8),
}
FP8_LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}  # a conversion to fp8 saturates: cvt.rn.satfinite


def numpy_type(dtype) -> type:
    """Return NumPy's type for a Gluon dtype."""
    try:
        return NUMPY[dtype.name]
    except KeyError:
        raise TypeError(
            f"gluon_cpu computes with {', '.join(NUMPY)}; it does not know {dtype}. Hopper's fp8 are float8e4nv and float8e5."
        ) from None


def round_wide(x, name: str) -> np.ndarray:
    """Round to a type of HELD_WIDER, to nearest even, as float32. A number too large for fp8 becomes the largest fp8 number."""
    values = np.array(x, np.float32, order="C")
    if name in FP8_LARGEST:
        values = np.clip(values, -FP8_LARGEST[name], FP8_LARGEST[name])
    return torch.from_numpy(values).to(HELD_WIDER[name][0]).float().numpy()


def to_bits(data: np.ndarray, dtype) -> np.ndarray:
    """Return the bits of values, as integers if NumPy lacks the type."""
    if dtype.name not in HELD_WIDER:
        return data
    kind, same_size, _ = HELD_WIDER[dtype.name]
    return torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).to(kind).view(same_size).numpy()


def from_bits(bits: np.ndarray, dtype) -> np.ndarray:
    """Return the values of bits from `to_bits`."""
    if dtype.name not in HELD_WIDER:
        return bits.view(numpy_type(dtype))
    kind, _, same_size = HELD_WIDER[dtype.name]
    return torch.from_numpy(np.ascontiguousarray(bits).view(same_size)).view(kind).float().numpy()


def is_float(dtype) -> bool:
    """Return whether a dtype is a floating-point type."""
    return dtype.name in FLOAT_RANK


def is_int(dtype) -> bool:
    """Return whether a dtype is an integer type, int1 included."""
    return dtype.name in NUMPY and dtype.name not in FLOAT_RANK


def round_to(data, dtype):
    """Return an array (or number) as values of `dtype`: integers wrap around, floats round to nearest even."""
    if not isinstance(data, np.ndarray):
        return round_number(data, dtype)
    if dtype.name in HELD_WIDER:
        return round_wide(data, dtype.name)
    kind = _DTYPES.get(dtype.name)
    if data.dtype is kind:
        return data
    kind = kind or numpy_type(dtype)
    if data.dtype.kind == "f" and kind.kind in "iu":
        if kind.itemsize < 8:  # a GPU takes the nearest number of 32 bits, and zero for NaN
            least, most = (0, 2**32 - 1) if kind.kind == "u" else (-(2**31), 2**31 - 1)
            data = np.clip(np.nan_to_num(data.astype(np.float64)), least, most)
        return np.trunc(data).astype(np.int64).astype(kind)
    return data.astype(kind)


def round_number(value, dtype):
    """Return a Python number as a value of `dtype`; it stays a Python number."""
    name = dtype.name
    if name == "int1":
        return bool(value)
    if name in FLOAT_RANK:
        return float(round_wide(value, name) if name in HELD_WIDER else numpy_type(dtype)(value))
    if isinstance(value, float):
        return round_to(np.array(value), dtype).item()
    bits = dtype.primitive_bitwidth
    value = int(value) & ((1 << bits) - 1)
    return value - (1 << bits) if not name.startswith("u") and value >> (bits - 1) else value


def of_number(value) -> gl.dtype:
    """Return the type that Triton gives a Python number."""
    if isinstance(value, bool):
        return gl.int1
    if isinstance(value, int):
        if -(2**31) <= value < 2**31:
            return gl.int32
        return gl.uint32 if 0 <= value < 2**32 else gl.int64
    return gl.float32


def promote(a, b, division: bool = False):
    """Return the type of `a op b` for two run-time types, by Triton's rules."""
    if is_float(a) or is_float(b):
        if not is_float(a):
            return b
        if not is_float(b):
            return a
        if {a.name, b.name} == {"bf16", "fp16"}:  # neither holds all values of the other
            return gl.float32
        return max(a, b, key=lambda t: FLOAT_RANK[t.name])
    if division:
        return gl.float32
    wide, narrow = (a, b) if a.primitive_bitwidth >= b.primitive_bitwidth else (b, a)
    if wide.primitive_bitwidth == narrow.primitive_bitwidth and narrow.name.startswith("u"):
        return narrow
    return wide
