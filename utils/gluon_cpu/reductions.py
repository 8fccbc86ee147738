"""Reductions and scans along a dimension, by NumPy or by a kernel's own combine function."""

from __future__ import annotations

import numpy as np
from triton.experimental.gluon import language as gl

from utils.machine import versions

from . import context, layouts
from .context import refuse
from .dtypes import is_int, numpy_type, round_to
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
    work(x)
    out = np.asarray(function(data, axis))
    dtype = dtype or x.dtype
    out = round_to(out, dtype)
    if keep_dims:
        return Tensor(np.expand_dims(out, axis), dtype, layout)
    if not out.ndim:
        return Tensor(out.item(), dtype)
    if layout is not None and layouts.threads(layout) is not None:
        layout = layouts.sliced(axis, layout)
    return Tensor(out, dtype, layout)


@known()
def sum_(input, axis=None, keep_dims=False, dtype=None):
    """Return the sum along an axis; small integers are added as 32-bit ones, 16-bit floats as fp32."""
    dtype = constant(dtype, "sum's dtype")
    if dtype is None and is_int(input.dtype) and input.dtype.primitive_bitwidth < 32:
        dtype = gl.uint32 if input.dtype.name.startswith("u") else gl.int32
    kind = np.float32 if input.dtype.name in ("fp16", "bf16", "fp8e4nv", "fp8e5") else numpy_type(dtype or input.dtype)
    return _reduce_axis(input, axis, keep_dims, lambda d, a: d.sum(axis=a, dtype=kind), dtype)


def _enter_extreme(name: str, reduce, arg):
    def run(input, axis=None, return_indices=False, return_indices_tie_break_left=True, keep_dims=False):
        values = _reduce_axis(input, axis, keep_dims, lambda d, a: reduce(d, axis=a))
        if not constant(return_indices, "return_indices"):
            return values
        return values, _reduce_axis(input, axis, keep_dims, lambda d, a: arg(d, axis=a), gl.int32)

    known(name)(run)


_enter_extreme("max", np.fmax.reduce, np.argmax)
_enter_extreme("min", np.fmin.reduce, np.argmin)


@known()
def xor_sum(input, axis=None, keep_dims=False):
    """Return the exclusive or along an axis."""
    return _reduce_axis(input, axis, keep_dims, lambda d, a: np.bitwise_xor.reduce(d, axis=a))


@known()
def reduce_or(input, axis, keep_dims=False):
    """Return the bitwise or along an axis."""
    return _reduce_axis(input, axis, keep_dims, lambda d, a: np.bitwise_or.reduce(d, axis=a))


@known()
def reduce(input, axis, combine_fn, keep_dims=False):
    """Combine the slices along an axis, one after the other, by a function of the kernel's author."""
    many = isinstance(input, tuple)
    inputs = input if many else (input,)
    axis = constant(axis, "reduce's axis")

    def parts(i):
        return [Tensor(np.take(x.data, i, axis=axis)[..., None], x.dtype, layouts.EACH) for x in inputs]

    total = parts(0)
    for i in range(1, inputs[0].shape[axis]):
        out = context.program().call(combine_fn, *total, *parts(i))
        total = list(out) if many else [out]
    results = tuple(
        _reduce_axis(x, axis, keep_dims, lambda d, a, t=t: t.data[..., 0], t.dtype)
        for x, t in zip(inputs, total, strict=True)
    )
    return results if many else results[0]


@known()
def associative_scan(input, axis, combine_fn, reverse=False):
    """Return all partial results along an axis, combined by a function of the kernel's author."""
    many = isinstance(input, tuple)
    inputs = input if many else (input,)
    axis = constant(axis, "the scan's axis") % len(inputs[0].shape)
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
