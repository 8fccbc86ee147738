"""What the functions of `gl` do on NumPy data: shapes, layouts, mathematics, reductions."""

from __future__ import annotations

import math

import numpy as np
from triton.experimental.gluon import language as gl

from . import context, layouts, memory
from .aggregates import flatten
from .dtypes import is_float, numpy_type, promote, round_number, round_to
from .known import constant, constants, known
from .tensors import Tensor, binary, broadcast_layout, expand_dims, to_tensor, work

# ---- programs and making tensors ---------------------------------------------------------------------------------


@known()
def program_id(axis=0):
    return Tensor(context.program().ids[constant(axis, "program_id's axis")], gl.int32)


@known()
def num_programs(axis=0):
    return Tensor(context.program().grid[constant(axis, "num_programs' axis")], gl.int32)


@known()
def num_warps():
    return context.partition().num_warps


@known()
def num_ctas():
    return 1


@known()
def arange(start, end, layout=None):
    start, end = constant(start, "arange's start"), constant(end, "arange's end")
    layouts.check_block([end - start], f"gl.arange({start}, {end})")
    layout = layouts.distributed(layout, [end - start], "gl.arange")
    return Tensor(np.arange(start, end, dtype=np.int32), gl.int32, layout)


@known()
def full(shape, value, dtype, layout=None):
    shape, dtype = constants(shape, "gl.full's shape"), constant(dtype, "gl.full's dtype")
    layouts.check_block(shape, "gl.full")
    layout = layouts.distributed(layout, shape, "gl.full")
    out = Tensor(np.full(shape, round_number(to_tensor(value).data, dtype), numpy_type(dtype)), dtype, layout)
    work(out)
    return out


@known()
def zeros(shape, dtype, layout=None):
    return full(shape, 0, dtype, layout)


@known()
def full_like(input, value, shape=None, dtype=None, layout=None):
    return full(input.shape if shape is None else shape, value, dtype or input.dtype, layout or input.layout)


@known()
def zeros_like(input, shape=None, dtype=None, layout=None):
    return full_like(input, 0, shape, dtype, layout)


@known()
def to_tensor_(x):
    return to_tensor(x)


# ---- layouts and shapes ------------------------------------------------------------------------------------------


@known()
def convert_layout(value, layout, assert_trivial=False):
    if not isinstance(value, Tensor) or not value.shape:
        context.refuse("kernel", "gl.convert_layout needs a tensor, got a scalar.")
    layout = layouts.distributed(layout, list(value.shape), "gl.convert_layout")
    data = value.data
    if constant(assert_trivial, "assert_trivial"):
        layouts.check_trivial(value.layout, layout, list(value.shape))
    elif value.layout != layout:
        work(value)
    return Tensor(data, value.dtype, layout, value.buffer)


@known()
def set_auto_layout(value, layout):
    return convert_layout(value, layout)


@known()
def to_linear_layout(layout, shape):
    return layouts.linear(layout, constants(shape, "the shape"))


@known()
def broadcast(input, other):
    input, other = to_tensor(input), to_tensor(other)
    layout = broadcast_layout(input, other, "gl.broadcast")
    a, b = np.broadcast_arrays(np.asarray(input.data), np.asarray(other.data))
    return Tensor(a, input.dtype, layout, input.buffer), Tensor(b, other.dtype, layout, other.buffer)


@known()
def expand_dims_(input, axis):
    return expand_dims(input, axis)


@known()
def reshape(input, *shape):
    return input.reshape(*shape)


@known()
def permute(input, *dims):
    return input.permute(*dims)


@known()
def split(a):
    return a.split()


@known()
def join(a, b):
    a, b = broadcast(a, b)
    layout = layouts.register_view(a.layout, list(a.shape), "join")
    return Tensor(np.stack([a.data, b.data], axis=-1), a.dtype, layout)


@known()
def ravel(x):
    return x.reshape([x.numel])


@known()
def gather(src, index, axis):
    axis = constant(axis, "gather's axis")
    work(src)
    return Tensor(np.take_along_axis(src.data, index.data, axis), src.dtype, index.layout)


# ---- elementwise -------------------------------------------------------------------------------------------------


def _math(name: str, function, special: bool = True):
    def run(x):
        x = to_tensor(x)
        if not is_float(x.dtype):
            context.refuse("kernel", f"gl.{name} needs floats, got {x.dtype}; use .to(gl.float32).")
        with np.errstate(all="ignore"):
            out = function(np.asarray(x.data))
        work(x, special)
        out = round_to(np.asarray(out), x.dtype)
        return Tensor(out if x.shape else out.item(), x.dtype, x.layout)

    return known(name)(run)


def _erf(x: np.ndarray) -> np.ndarray:
    import torch

    return torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy()


for _name, _function in {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "cos": np.cos,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "sqrt_rn": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": _erf,
    "floor": np.floor,
    "ceil": np.ceil,
}.items():
    _math(_name, _function, _name not in ("floor", "ceil"))


@known()
def abs_(x):
    x = to_tensor(x)
    work(x)
    return Tensor(np.abs(x.data) if x.shape else round_number(math.fabs(x.data), x.dtype), x.dtype, x.layout)


@known()
def fma(x, y, z):
    with np.errstate(all="ignore"):
        x, y, z = to_tensor(x), to_tensor(y), to_tensor(z)
        layout = broadcast_layout(x, y, "gl.fma") or broadcast_layout(y, z, "gl.fma")
        work(x)
        out = np.asarray(x.data, np.float64) * np.asarray(y.data, np.float64) + np.asarray(z.data, np.float64)
        return Tensor(round_to(out, x.dtype) if out.ndim else round_number(out.item(), x.dtype), x.dtype, layout)


@known()
def fdiv(x, y, ieee_rounding=False):
    return to_tensor(x) / y


@known()
def div_rn(x, y):
    return to_tensor(x) / y


@known()
def umulhi(x, y):
    x, y = to_tensor(x), to_tensor(y)
    layout = broadcast_layout(x, y, "gl.umulhi")
    high = (np.asarray(x.data).astype(np.uint32).astype(np.uint64) * np.asarray(y.data).astype(np.uint32)) >> 32
    high = high.astype(numpy_type(x.dtype)) if high.ndim else round_number(high.item(), x.dtype)
    return Tensor(high, x.dtype, layout)


def _pick(name: str, function):
    def run(x, y, propagate_nan=None):
        if not isinstance(x, Tensor) and not isinstance(y, Tensor):
            return max(x, y) if name == "maximum" else min(x, y)
        total = binary("+" if getattr(x, "dtype", getattr(y, "dtype", None)).name != "int1" else "|", x, y)
        x, y = to_tensor(x), to_tensor(y)
        out = function(round_to(np.asarray(x.data), total.dtype), round_to(np.asarray(y.data), total.dtype))
        return Tensor(out if total.shape else out.item(), total.dtype, total.layout)

    return known(name)(run)


maximum, minimum = _pick("maximum", np.fmax), _pick("minimum", np.fmin)


@known()
def where(condition, x, y):
    condition = to_tensor(condition)
    if not isinstance(x, Tensor) and isinstance(y, Tensor):
        dtype = binary("+", y, x).dtype if y.dtype.name != "int1" else y.dtype
    elif not isinstance(y, Tensor) and isinstance(x, Tensor):
        dtype = binary("+", x, y).dtype if x.dtype.name != "int1" else x.dtype
    else:
        dtype = promote(to_tensor(x).dtype, to_tensor(y).dtype)
    x, y = to_tensor(x), to_tensor(y)
    layout = None
    for a, b in ((condition, x), (condition, y), (x, y)):
        layout = broadcast_layout(a, b, "gl.where") or layout
    out = np.where(condition.data, round_to(np.asarray(x.data), dtype), round_to(np.asarray(y.data), dtype))
    result = Tensor(round_to(out, dtype) if out.ndim else out.item(), dtype, layout)
    work(result)
    return result


@known()
def cdiv(x, div):
    return (x + (div - 1)) // div


@known()
def add(x, y, sanitize_overflow=True):
    return to_tensor(x) + y


@known()
def sub(x, y, sanitize_overflow=True):
    return to_tensor(x) - y


@known()
def mul(x, y, sanitize_overflow=True):
    return to_tensor(x) * y


@known()
def cast(input, dtype, fp_downcast_rounding=None, bitcast=False):
    return to_tensor(input).to(dtype, fp_downcast_rounding, bitcast)


@known()
def histogram(input, num_bins, mask=None, layout=None):
    data = input.data if mask is None else input.data[np.broadcast_to(mask.data, input.data.shape)]
    n = constant(num_bins, "num_bins")
    return Tensor(np.bincount(data, minlength=n)[:n].astype(np.int32), gl.int32, layout)


@known()
def dot_fma(a, b, acc):
    work(acc)
    return Tensor(round_to(np.matmul(a.data, b.data) + acc.data, acc.dtype), acc.dtype, acc.layout)


# ---- the rest ----------------------------------------------------------------------------------------------------


@known()
def allocate_shared_memory(element_ty, shape, layout, value=None):
    return memory.allocate(constant(element_ty, "the dtype"), shape, constant(layout, "the layout"), value)


@known()
def static_assert(cond, msg=""):
    if not constant(cond, "static_assert's condition"):
        context.refuse("kernel", f"static_assert failed. {msg}")


@known()
def device_assert(cond, msg="", mask=None):
    cond = to_tensor(cond)
    if not np.all(cond.data):
        context.refuse("kernel", f"device_assert failed. {msg}")


@known()
def device_print(prefix, *args, hex=False):
    print(context.program().ids, prefix, *(a.data if isinstance(a, Tensor) else a for a in args))


@known()
def static_print(*values, sep=" ", end="\n", file=None, flush=False):
    print(*values, sep=sep, end=end)


@known()
def assume(cond):
    return None


def _identity(input, values=None):
    return input


known("multiple_of", "max_contiguous", "max_constancy")(_identity)
known("bank_conflicts")(layouts.bank_conflicts)


@known("barrier", "thread_barrier", of=(gl,))
def _block_barrier(cluster=False):
    """gl.barrier, gl.thread_barrier: the warps of a partition meet. A partition is one actor here: only time passes."""
    program = context.program()
    program.reschedule()
    program.spend(program.model.barrier, "barrier")


@known()
def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    """gl.warp_specialize: the first function in the default partition, each other in one of its own."""
    pairs = [tuple(p) for p in functions_and_args]
    warps = constants(worker_num_warps, "worker_num_warps")
    if len(warps) != len(pairs) - 1:
        context.refuse("kernel", f"warp_specialize: {len(pairs) - 1} workers but {len(warps)} warp counts.")
    if worker_num_regs is not None and len(worker_num_regs) != len(warps):
        context.refuse("kernel", f"warp_specialize: {len(warps)} workers but {len(worker_num_regs)} register counts.")
    if worker_num_regs is None and gl_version() < (3, 7):
        context.refuse("kernel", "warp_specialize: Triton 3.6 needs worker_num_regs, a register count for each worker.")
    for n in warps:
        if n < 1 or n & (n - 1):
            context.refuse("kernel", f"warp_specialize: a worker has a power of two of warps, got {n}.")
    names = [getattr(f, "__name__", "partition") for f, _ in pairs]
    seen: dict[str, int] = {}
    labels = []
    for name in names:
        labels.append(f"{name} {seen.get(name, 0)}" if names.count(name) > 1 else name)
        seen[name] = seen.get(name, 0) + 1
    for (_, args), label in zip(pairs[1:], labels[1:], strict=True):
        if any(isinstance(a, Tensor) and a.shape for a in flatten(args)):
            context.refuse(
                "kernel",
                f"warp_specialize: {label} is a worker; workers take scalars, pointers, "
                "descriptors and shared memory, no tensors.",
            )
    program = context.program()
    return program.warp_specialize(
        [(label, lambda f=f, a=tuple(a): program.call(f, *a)) for label, (f, a) in zip(labels, pairs, strict=True)],
        warps,
    )


def gl_version() -> tuple[int, int]:
    """(major, minor) of the installed Triton."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)
