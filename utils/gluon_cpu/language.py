"""The functions of `gl` on NumPy data: programs, shapes, layouts, mathematics."""

from __future__ import annotations

import math

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import AutoLayout
from triton.experimental.gluon.language.nvidia import blackwell
from triton.language.extra import libdevice

from utils.machine import versions

from . import context, layouts, memory, reuse
from .aggregates import flatten
from .barriers import MODULES, spend_barrier
from .context import Knowledge, refuse
from .dtypes import from_bits, numpy_type, promote, round_number, round_to, to_bits
from .known import constant, constants, known, meaning
from .tensors import Tensor, binary, broadcast_layout, operand_type, to_tensor, work

# ---- programs and making tensors ---------------------------------------------------------------------------------


@known()
def program_id(axis=0):
    """Return this program's index along an axis of the grid."""
    return Tensor(context.program().ids[constant(axis, "program_id's axis")], gl.int32)


@known()
def num_programs(axis=0):
    """Return the size of the grid along an axis."""
    return Tensor(context.program().grid[constant(axis, "num_programs' axis")], gl.int32)


@known()
def arange(start, end, layout=None):
    """Return the integers [start, end)."""
    start, end = constant(start, "arange's start"), constant(end, "arange's end")
    layouts.check_block([end - start], f"gl.arange({start}, {end})")
    run = context.program().run
    run.longest = max(run.longest, end - start)
    layout = layouts.register_layout(layout, [end - start], "gl.arange")
    return Tensor(np.arange(start, end, dtype=np.int32), gl.int32, layout)


@known()
def full(shape, value, dtype, layout=None):
    """Return a tensor of one value."""
    shape, dtype = constants(shape, "gl.full's shape"), constant(dtype, "gl.full's dtype")
    layouts.check_block(shape, "gl.full")
    layout = layouts.register_layout(layout, shape, "gl.full")
    out = Tensor(np.full(shape, round_number(to_tensor(value).data, dtype), numpy_type(dtype)), dtype, layout)
    work(out)
    return out


@known()
def full_like(input, value, shape=None, dtype=None, layout=None):
    """Return a tensor of one value, otherwise like `input`."""
    return full(input.shape if shape is None else shape, value, dtype or input.dtype, layout or input.layout)


# Functions that follow from other functions.
for _name, _function in {
    "num_warps": lambda: context.partition().num_warps,
    "num_ctas": lambda: context.program().num_ctas,
    "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype, layout),
    "zeros_like": lambda input, shape=None, dtype=None, layout=None: full_like(input, 0, shape, dtype, layout),
    "to_tensor": to_tensor,
    "cdiv": lambda x, div: (x + (div - 1)) // div,
    "add": lambda x, y, sanitize_overflow=True: to_tensor(x) + y,
    "sub": lambda x, y, sanitize_overflow=True: to_tensor(x) - y,
    "mul": lambda x, y, sanitize_overflow=True: to_tensor(x) * y,
    "fdiv": lambda x, y, ieee_rounding=False: to_tensor(x) / y,
    "div_rn": lambda x, y: to_tensor(x) / y,
    "ravel": lambda x: x.reshape([x.numel]),
    "trans": lambda input, *dims: input.permute(*(dims or (1, 0))),
    "broadcast_to": lambda input, *shape: input.broadcast_to(*shape),
    "view": lambda input, *shape: input.reshape(*shape),
    "debug_barrier": lambda: None,
    "to_linear_layout": lambda layout, shape: layouts.linear(layout, constants(shape, "the shape")),
    "bank_conflicts": layouts.bank_conflicts,
    "max_contiguous": lambda input, values=None: input,
    "max_constancy": lambda input, values=None: input,
    "static_print": print,
    "expect_zero": lambda x, mask: x,
}.items():
    known(_name)(_function)


# Blackwell computes two numbers with one instruction; the results are the same.
for _name, _function in {
    "add2": lambda lhs, rhs, dtype=None: to_tensor(lhs) + rhs,
    "sub2": lambda lhs, rhs, dtype=None: to_tensor(lhs) - rhs,
    "mul2": lambda lhs, rhs, dtype=None: to_tensor(lhs) * rhs,
    "fma2": lambda lhs, rhs, acc, dtype=None: meaning("fma")(*meaning("broadcast")(lhs, rhs), acc),
}.items():
    known(_name, of=(blackwell,))(_function)


@known()
def map_elementwise(scalar_fn, *args, pack=1):
    """Return the results of a function of scalars for each element."""
    return context.program().call(scalar_fn, *args)


# ---- layouts and shapes ------------------------------------------------------------------------------------------


@known()
def convert_layout(value, layout, assert_trivial=False):
    """Return the same values in another layout."""
    if not isinstance(value, Tensor) or not value.shape:
        refuse("kernel", "gl.convert_layout needs a tensor, got a scalar.")
    layout = layouts.register_layout(layout, list(value.shape), "gl.convert_layout")
    data = value.data
    if constant(assert_trivial, "assert_trivial"):
        layouts.view(value.layout, list(value.shape), "convert_layout(assert_trivial=True)", layout)
    elif value.layout != layout:
        program = context.program()
        if program.num_ctas > 1 and layouts.block_bases(value.layout) != layouts.block_bases(layout):
            program.meet("gl.convert_layout between blocks")
        reuse.exchange("gl.convert_layout", lambda: layouts.crosses_warps(value.layout, layout, list(value.shape)))
        work(value)
    return Tensor(data, value.dtype, layout, value.buffer, value.reads)


known("set_auto_layout")(lambda value, layout: convert_layout(value, layout))


@known()
def broadcast(input, other):
    """Return both tensors with their common shape."""
    input, other = to_tensor(input), to_tensor(other)
    layout = broadcast_layout(input, other, "gl.broadcast")
    a, b = np.asarray(input.data), np.asarray(other.data)
    if a.shape != b.shape:
        a, b = np.broadcast_arrays(a, b)
    return Tensor(a, input.dtype, layout, input.buffer), Tensor(b, other.dtype, layout, other.buffer)


@known()
def expand_dims(input, axis):
    """Insert a dimension of one; the layout must be a SliceLayout along this dimension."""
    axis = constant(axis, "expand_dims' axis")
    if not isinstance(input, Tensor) or not input.shape:
        refuse("kernel", "Only tensors have dimensions to add to; this is a scalar.")
    axis = axis + len(input.shape) + 1 if axis < 0 else axis
    layout = input.layout
    if isinstance(layout, gl.SliceLayout):
        if layout.dim != axis:
            text = f"A new dimension {axis} of a tensor with {layout}: it is sliced along dimension {layout.dim}"
            refuse("layout", f"{text}, so only that one can be added. Give gl.arange SliceLayout({axis}, ...).")
        layout = layout.parent
    elif not isinstance(layout, AutoLayout):
        text = "A new dimension needs a SliceLayout that says how it is spread over threads"
        refuse("layout", f"{text}; this tensor has {layout}.")
    return Tensor(input.data[(*(slice(None),) * axis, None)], input.dtype, layout, input.buffer)


def _flat(values: tuple, what: str) -> list:
    """Return the constants of `f(1, 2)` or `f((1, 2))` as a list."""
    return constants(values[0] if len(values) == 1 and isinstance(values[0], (list, tuple)) else values, what)


@known()
def reshape(input, *shape):
    """Return the values in another shape."""
    shape = _flat(shape, "reshape's shape")
    if math.prod(shape) != input.numel:
        refuse("layout", f"A tensor {list(input.shape)} cannot be reshaped to {shape}.")
    if not shape:
        return Tensor(input.data.item(), input.dtype, None, input.buffer, input.reads)
    layout = layouts.view(input.layout, list(input.shape), "reshape", tuple(shape))
    return Tensor(input.data.reshape(shape), input.dtype, layout, input.buffer, input.reads)


@known()
def permute(input, *dims):
    """Return the tensor with its dimensions in another order."""
    dims = _flat(dims, "permute's order")
    layout = layouts.view(input.layout, list(input.shape), "permute", tuple(dims))
    return Tensor(np.transpose(input.data, dims), input.dtype, layout, input.buffer, input.reads)


@known()
def split(a):
    """Return the two halves along a last dimension of two."""
    if not a.shape or a.shape[-1] != 2:
        refuse("layout", f"split needs a last dimension of 2, got shape {list(a.shape)}.")
    layout = layouts.view(a.layout, list(a.shape), "split")
    return tuple(Tensor(np.ascontiguousarray(a.data[..., i]), a.dtype, layout) for i in (0, 1))


@known()
def join(a, b):
    """Return both tensors along a new last dimension of two."""
    a, b = broadcast(a, b)
    layout = layouts.view(a.layout, list(a.shape), "join")
    return Tensor(np.stack([a.data, b.data], axis=-1), a.dtype, layout)


@known()
def gather(src, index, axis):
    """Return elements along an axis, by a tensor of indices."""
    axis = constant(axis, "gather's axis")
    memory.check_indices("gl.gather", index, axis, src.shape[axis])
    reuse.exchange("gl.gather", lambda: layouts.spans_warps(src.layout, list(src.shape), axis))
    work(src)
    return Tensor(np.take_along_axis(src.data, index.data, axis), src.dtype, index.layout)


# ---- elementwise -------------------------------------------------------------------------------------------------


def _erf(x: np.ndarray) -> np.ndarray:
    import torch

    return torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy()


def _enter_function(name: str, function, special: bool, of: tuple = (gl, tl)) -> None:
    def run(x):
        x = to_tensor(x)
        if x.dtype.name not in ("fp32", "fp64"):
            refuse("kernel", f"gl.{name} needs fp32 or fp64, got {x.dtype}; use .to(gl.float32).")
        out = round_to(np.asarray(function(np.asarray(x.data))), x.dtype)
        work(x, special)
        return Tensor(out if out.ndim else out.item(), x.dtype, x.layout)

    known(name, of=of)(run)


for _name in ["exp", "exp2", "log", "log2", "cos", "sin", "sqrt"]:
    _enter_function(_name, getattr(np, _name), special=True)
_enter_function("sqrt_rn", np.sqrt, special=True)
_enter_function("rsqrt", lambda x: 1 / np.sqrt(x), special=True)
_enter_function("erf", _erf, special=True)
_enter_function("floor", np.floor, special=False)
_enter_function("ceil", np.ceil, special=False)
# The fast versions of CUDA's library differ from these in the last bits.
for _name in ["exp", "exp10", "log", "log2", "log10", "sin", "cos", "tan", "tanh"]:
    _function = (lambda x: np.power(10, x)) if _name == "exp10" else getattr(np, _name)
    _enter_function(f"fast_{_name}f", _function, special=True, of=(libdevice,))
known("fast_dividef", of=(libdevice,))(lambda x, y: to_tensor(x) / y)


@known()
def abs_(x):
    """Return absolute values."""
    x = to_tensor(x)
    work(x)
    return Tensor(np.abs(x.data) if x.shape else round_number(math.fabs(x.data), x.dtype), x.dtype, x.layout)


@known()
def fma(x, y, z):
    """Return x y + z, rounded once."""
    x, y, z = to_tensor(x), to_tensor(y), to_tensor(z)
    layout = broadcast_layout(x, y, "gl.fma") or broadcast_layout(y, z, "gl.fma")
    work(x)
    out = np.asarray(x.data, np.float64) * np.asarray(y.data, np.float64) + np.asarray(z.data, np.float64)
    return Tensor(round_to(out, x.dtype) if out.ndim else round_number(out.item(), x.dtype), x.dtype, layout)


@known()
def umulhi(x, y):
    """Return the upper 32 bits of the product."""
    x, y = to_tensor(x), to_tensor(y)
    layout = broadcast_layout(x, y, "gl.umulhi")
    high = (np.asarray(x.data).astype(np.uint32).astype(np.uint64) * np.asarray(y.data).astype(np.uint32)) >> 32
    high = high.astype(numpy_type(x.dtype)) if high.ndim else round_number(high.item(), x.dtype)
    return Tensor(high, x.dtype, layout)


def _enter_extreme(name: str, op: str, of_constants) -> None:
    def run(x, y, propagate_nan=None):
        if not isinstance(x, Tensor) and not isinstance(y, Tensor):
            return of_constants(x, y)
        # Triton compares bf16 as fp32.
        x, y = (cast(one, gl.float32) if getattr(one, "dtype", None) is gl.bfloat16 else one for one in (x, y))
        out = binary(op, x, y)
        if propagate_nan is not None and "ALL" in str(propagate_nan):
            for one in (x, y):
                out = where(binary("!=", one, one), one, out) if isinstance(one, Tensor) else out
        return out

    known(name)(run)


_enter_extreme("maximum", "max", max)
_enter_extreme("minimum", "min", min)


@known()
def clamp(x, min, max, propagate_nan=None):
    """Return the values, with `min` for smaller values and `max` for larger values."""
    return meaning("minimum")(meaning("maximum")(x, min, propagate_nan), max, propagate_nan)


@known()
def where(condition, x, y):
    """Return x where the condition holds, and y elsewhere."""
    condition = to_tensor(condition)
    if isinstance(x, Tensor) == isinstance(y, Tensor):
        dtype = promote(to_tensor(x).dtype, to_tensor(y).dtype)
    else:
        tensor, value = (x, y) if isinstance(x, Tensor) else (y, x)
        dtype = operand_type("+", tensor, value) if tensor.dtype.name != "int1" else tensor.dtype
    x, y = to_tensor(x), to_tensor(y)
    layout = None
    for a, b in ((condition, x), (condition, y), (x, y)):
        layout = broadcast_layout(a, b, "gl.where") or layout
    out = np.where(condition.data, round_to(np.asarray(x.data), dtype), round_to(np.asarray(y.data), dtype))
    result = Tensor(out if out.ndim else out.item(), dtype, layout)
    work(result)
    return result


@known()
def cast(input, dtype, fp_downcast_rounding=None, bitcast=False):
    """Return the values in another dtype; with `bitcast` the same bits."""
    input, dtype = to_tensor(input), constant(dtype, "the dtype")
    if isinstance(dtype, gl.pointer_type) or input.buffer is not None:
        refuse("unknown operation", f"gluon_cpu does not convert {input.dtype} to {dtype}.")
    if fp_downcast_rounding not in (None, "rtne"):
        refuse("unknown operation", f"gluon_cpu rounds to nearest even only, not {fp_downcast_rounding!r}.")
    work(input)
    if bitcast:
        if not input.shape or input.dtype.primitive_bitwidth != dtype.primitive_bitwidth:
            text = "it bitcasts tensors to a type of the same size"
            refuse("unknown operation", f"gluon_cpu does not bitcast {input.dtype} to {dtype}: {text}.")
        return Tensor(from_bits(to_bits(input.data, input.dtype), dtype), dtype, input.layout)
    return Tensor(round_to(input.data, dtype), dtype, input.layout, None, input.reads)


@known()
def histogram(input, num_bins, mask=None, layout=None):
    """Count how often each of the integers [0, num_bins) occurs."""
    data = input.data if mask is None else input.data[np.broadcast_to(mask.data, input.data.shape)]
    n = constant(num_bins, "num_bins")
    reuse.exchange("gl.histogram", lambda: True)
    return Tensor(np.bincount(data, minlength=n)[:n].astype(np.int32), gl.int32, layout)


@known()
def dot_fma(a, b, acc):
    """Return a @ b + acc, computed without tensor cores."""
    work(acc)
    return Tensor(round_to(np.matmul(a.data, b.data) + acc.data, acc.dtype), acc.dtype, acc.layout)


# ---- the rest ----------------------------------------------------------------------------------------------------


@known()
def allocate_shared_memory(element_ty, shape, layout, value=None):
    """Allocate shared memory, and store a tensor there if one is given."""
    return memory.allocate(constant(element_ty, "the dtype"), shape, constant(layout, "the layout"), value)


@known()
def static_assert(cond, msg=""):
    """Refuse the kernel unless a constant condition holds."""
    if not constant(cond, "static_assert's condition"):
        refuse("kernel", f"static_assert failed. {msg}")


@known("assume", "device_assert")
def device_assert(cond, msg="", mask=None):
    """Refuse the kernel unless a condition holds in every element; the compiler relies on gl.assume."""
    if not np.all(to_tensor(cond).data):
        refuse("kernel", f"gl.assume or gl.device_assert: the condition does not hold. {msg}")


@known()
def multiple_of(input, values):
    """Return the input; refuse it if its first element is no multiple of `values`, because the compiler relies on that."""
    first = np.asarray(to_tensor(input).data).flat[0]
    if input.buffer is None and any(first % value for value in _flat((values,), "multiple_of's values")):
        refuse("kernel", f"gl.multiple_of: {first} is no multiple of {values}, and the compiler relies on that.")
    return input


@known()
def device_print(prefix, *args, hex=False):
    """Print the program's index and then values."""
    print(context.program().ids, prefix, *(a.data if isinstance(a, Tensor) else a for a in args))


@known(of=MODULES)
def fence_init_release_cluster() -> None:
    """Make all mbarriers initialized so far visible to the cluster: blocks see them after the cluster's next barrier."""
    for block in context.partition().blocks:
        block.inits |= {component: count for component, count in block.clock.items() if component[0] == "init"}


@known("arrive", of=versions.cluster_modules())
def cluster_arrive(relaxed=False) -> None:
    """Arrive at the cluster's barrier; a relaxed arrival passes on fenced initializations only."""
    program = context.program()
    if program.num_ctas == 1:
        refuse("kernel", "cluster.arrive needs a cluster: the compiler refuses it unless num_ctas is 2 or more.")
    if program.cluster_arrival is not None:
        refuse("barrier", "cluster.arrive: the barrier has been arrived at already; cluster.wait comes first.")
    program.check_outside_of_partitions("cluster.arrive")
    relaxed = constant(relaxed, "relaxed")
    program.cluster_arrival = [
        Knowledge(dict(block.inits), {}) if relaxed else block.copy() for block in program.partition.blocks
    ]
    spend_barrier("cluster")


@known("wait", of=versions.cluster_modules())
def cluster_wait() -> None:
    """Wait until all blocks have arrived at the cluster's barrier."""
    program = context.program()
    if program.cluster_arrival is None:
        refuse("barrier", "cluster.wait waits for ever: cluster.arrive() comes first.")
    for block in program.partition.blocks:
        for known_there in program.cluster_arrival:
            block.learn(known_there)
    program.cluster_arrival = None
    spend_barrier("cluster")


@known("barrier", of=versions.cluster_modules())
def cluster_barrier(relaxed=False) -> None:
    """Let the blocks of the cluster meet."""
    if context.program().num_ctas > 1:
        cluster_arrive(relaxed)
        cluster_wait()


@known("barrier", "thread_barrier", of=(gl,))
def block_barrier(cluster=False):
    """Let the warps of a partition meet, or with `cluster` the blocks.

    The warps of a partition in one block are one actor here, so a barrier of warps only takes time.
    """
    program = context.program()
    program.reschedule()
    if constant(cluster, "cluster"):
        program.meet("gl.barrier(cluster=True)")
    spend_barrier("")


@known()
def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    """Run the first function in the default partition, and every other function in its own partition."""
    pairs = [tuple(p) for p in functions_and_args]
    warps = constants(worker_num_warps, "worker_num_warps")
    for what, counts in (("warp", warps), ("register", worker_num_regs)):
        if counts is not None and len(counts) != len(pairs) - 1:
            refuse("kernel", f"warp_specialize: {len(pairs) - 1} workers but {len(counts)} {what} counts.")
    if worker_num_regs is None and versions.workers_need_register_counts():
        refuse("kernel", "warp_specialize: Triton 3.6 needs worker_num_regs, a register count for each worker.")
    for n in warps:
        if n < 1 or n & (n - 1):
            refuse("kernel", f"warp_specialize: a worker has a power of two of warps, got {n}.")
    names = [getattr(f, "__name__", "partition") for f, _ in pairs]
    labels = [  # a function that runs in several partitions gets a number in each
        f"{name} {names[:i].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)
    ]
    for (_, args), label in zip(pairs[1:], labels[1:], strict=True):
        if any(isinstance(a, Tensor) and a.shape for a in flatten(args)):
            what = "workers take scalars, pointers, descriptors and shared memory, no tensors"
            refuse("kernel", f"warp_specialize: {label} is a worker; {what}.")
    program = context.program()
    calls = [(label, lambda f=f, a=tuple(a): program.call(f, *a)) for label, (f, a) in zip(labels, pairs, strict=True)]
    return program.warp_specialize(calls, warps)
