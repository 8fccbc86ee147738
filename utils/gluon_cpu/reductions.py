"""Reductions and scans along a dimension, by NumPy or by a kernel's own combine function."""

from __future__ import annotations

import numpy as np
from triton.experimental.gluon import language as gl

from utils.machine import versions

from . import context, layouts, reuse
from .context import refuse
from .dtypes import is_int, round_to
from .known import constant, known
from .tensors import Tensor, work


def _reduce_axis(x: Tensor, axis, keep_dims: bool, function, dtype=None) -> Tensor:
    if not x.shape:
        refuse("kernel", "A scalar cannot be reduced.")
    axis, keep_dims = constant(axis, "the axis"), constant(keep_dims, "keep_dims")
    data, layout = x.data, x.layout
    if axis is None:
        data, axis, keep_dims, layout = data.reshape(-1), 0, False, None
    elif not -len(x.shape) <= axis < len(x.shape):
        refuse("layout", f"axis {axis} of a tensor with shape {list(x.shape)}.")
    axis %= data.ndim
    program = context.program()
    if program.num_ctas > 1 and any(x.layout is not None and basis[axis] for basis in layouts.block_bases(x.layout)):
        if not versions.clusters_are_complete():
            text = "A reduction across the blocks of a cluster is in Triton from 3.8 on"
            refuse("unknown operation", f"{text}. Reduce each block's part, and add the parts with gl.atomic_add.")
        program.meet("A reduction across blocks")
    reuse.exchange("A reduction", lambda: layouts.spans_warps(x.layout, list(x.shape), axis))
    work(x)
    out = np.asarray(function(data, axis))
    dtype = dtype or x.dtype
    out = round_to(out, dtype)
    if keep_dims:
        return Tensor(np.expand_dims(out, axis), dtype, layout)
    if not out.ndim:
        return Tensor(out.item(), dtype)
    if layout is not None and layouts.threads(layout) is not None:
        layout = layouts.slice_layout(axis, layout)
    return Tensor(out, dtype, layout)


@known()
def sum_(input, axis=None, keep_dims=False, dtype=None):
    """Return the sum along an axis, added by halves; small integers are added in 32 bits, all other numbers in their type."""
    dtype = constant(dtype, "sum's dtype")
    if dtype is None and is_int(input.dtype) and input.dtype.primitive_bitwidth < 32:
        dtype = gl.uint32 if input.dtype.name.startswith("u") else gl.int32
    dtype = dtype or input.dtype

    def by_halves(data, axis):
        parts = np.moveaxis(round_to(data, dtype), axis, 0)
        while (half := len(parts) // 2) > 0:
            parts = round_to(parts[:half] + parts[half:], dtype)
        return parts[0]

    return _reduce_axis(input, axis, keep_dims, by_halves, dtype)


def _enter_extreme(name: str, reduce, arg):
    def run(input, axis=None, return_indices=False, return_indices_tie_break_left=True, keep_dims=False):
        indices = constant(return_indices, "return_indices")
        # Triton widens types with fewer than 32 bits; with indices it widens only bf16.
        narrow = input.dtype.primitive_bitwidth < 32 and (not indices or input.dtype.name == "bf16")
        dtype = (gl.int32 if is_int(input.dtype) else gl.float32) if narrow else input.dtype
        values = _reduce_axis(input, axis, keep_dims, lambda d, a: reduce(d, axis=a), dtype)
        if not indices:
            return values
        return values, _reduce_axis(input, axis, keep_dims, lambda d, a: arg(d, axis=a), gl.int32)

    known(name)(run)


_enter_extreme("max", np.fmax.reduce, np.argmax)
_enter_extreme("min", np.fmin.reduce, np.argmin)


for _name, _function in {"xor_sum": np.bitwise_xor, "reduce_or": np.bitwise_or}.items():
    known(_name)(
        lambda input, axis=None, keep_dims=False, function=_function: _reduce_axis(
            input, axis, keep_dims, lambda data, axis: function.reduce(data, axis=axis)
        )
    )


@known()
def reduce(input, axis, combine_fn, keep_dims=False):
    """Combine the slices along an axis, one after another, by a function of the kernel's author."""
    scanned = associative_scan(input, axis, combine_fn)
    results = tuple(
        _reduce_axis(x, axis, keep_dims, lambda data, axis: data.take(-1, axis))
        for x in (scanned if isinstance(input, tuple) else (scanned,))
    )
    return results if isinstance(input, tuple) else results[0]


@known()
def associative_scan(input, axis, combine_fn, reverse=False):
    """Return all partial results along an axis, combined by a function of the kernel's author."""
    many = isinstance(input, tuple)
    inputs = input if many else (input,)
    axis = constant(axis, "the scan's axis") % len(inputs[0].shape)
    reuse.exchange("A scan", lambda: layouts.spans_warps(inputs[0].layout, list(inputs[0].shape), axis))
    order = range(inputs[0].shape[axis])
    order = order[::-1] if constant(reverse, "reverse") else order
    outs = [np.empty_like(x.data) for x in inputs]
    total = None
    for i in order:
        at = tuple(slice(i, i + 1) if d == axis else slice(None) for d in range(len(inputs[0].shape)))
        current = [Tensor(x.data[at], x.dtype, x.layout) for x in inputs]
        if total is None:
            total = current
        else:
            out = context.program().call(combine_fn, *total, *current)
            total = list(out) if many else [out]
        for o, t in zip(outs, total, strict=True):
            o[at] = t.data
    work(inputs[0])
    results = tuple(Tensor(o, x.dtype, x.layout) for o, x in zip(outs, inputs, strict=True))
    return results if many else results[0]
