"""Register tensors and scalars: NumPy data, a Gluon dtype, a layout, and arithmetic by Triton's rules."""

from __future__ import annotations

import math

import numpy as np
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import AutoLayout

from . import context, layouts
from .dtypes import is_float, is_int, numpy_type, of_number, promote, round_number, round_to
from .known import RunTimeValue, constant, meaning, number, unwrap

NUMBERS = (bool, int, float)


class Shape(list):
    """A shape that adds to lists and tuples alike, as kernels write `[STAGES] + desc.block_type.shape`."""

    def __add__(self, other):
        return Shape([*self, *other])

    def __radd__(self, other):
        return Shape([*other, *self])


class Tensor(RunTimeValue):
    """A block of values in registers, or a scalar (`data` is a Python number then), or pointers (`buffer` is set).

    Pointers hold element offsets into their buffer, a GlobalBuffer.
    """

    __slots__ = ("_data", "buffer", "dtype", "layout")

    def __init__(self, data, dtype, layout=None, buffer=None):
        self._data, self.dtype, self.layout, self.buffer = data, dtype, layout, buffer

    @property
    def data(self):
        """The values: a NumPy array, or a Python number."""
        return self._data

    @property
    def shape(self) -> Shape:
        data = self._data
        return Shape(data.shape) if isinstance(data, np.ndarray) else Shape()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def type(self):
        return gl.distributed_type(self.dtype, list(self.shape), self.layout) if self.shape else self.dtype

    @property
    def handle(self):
        return self

    @property
    def value(self):
        context.refuse("kernel", ".value belongs to a constexpr; this is a value known only when the kernel runs.")

    def __repr__(self) -> str:
        return f"<{self.dtype}{list(self.shape)} {self.layout or ''}: {self.data}>"

    def __getattr__(self, name):
        context.refuse("unknown operation", f"gluon_cpu does not know the method .{name} of a tensor.")

    def __bool__(self) -> bool:
        if self.shape:
            context.refuse(
                "kernel",
                f"A tensor of shape {list(self.shape)} has no single truth value. A condition "
                "must be a scalar; use gl.where, or `|` and `&`.",
            )
        return bool(self.data)

    def __index__(self) -> int:
        return number(self, "an index")

    def __len__(self):
        context.refuse("kernel", "A tensor has no len(); use .shape.")

    def __iter__(self):
        context.refuse(
            "kernel",
            "A tensor cannot be unpacked or iterated over. (warpgroup_mma_wait returns a tensor "
            "for one entry of deps, a tuple for several.)",
        )

    __hash__ = object.__hash__

    # ---- arithmetic -----------------------------------------------------------------------------------------------

    def __add__(self, other):
        return binary("+", self, other)

    def __radd__(self, other):
        return binary("+", other, self)

    def __sub__(self, other):
        return binary("-", self, other)

    def __rsub__(self, other):
        return binary("-", other, self)

    def __mul__(self, other):
        return binary("*", self, other)

    def __rmul__(self, other):
        return binary("*", other, self)

    def __truediv__(self, other):
        return binary("/", self, other)

    def __rtruediv__(self, other):
        return binary("/", other, self)

    def __floordiv__(self, other):
        return binary("//", self, other)

    def __rfloordiv__(self, other):
        return binary("//", other, self)

    def __mod__(self, other):
        return binary("%", self, other)

    def __rmod__(self, other):
        return binary("%", other, self)

    def __and__(self, other):
        return binary("&", self, other)

    def __rand__(self, other):
        return binary("&", other, self)

    def __or__(self, other):
        return binary("|", self, other)

    def __ror__(self, other):
        return binary("|", other, self)

    def __xor__(self, other):
        return binary("^", self, other)

    def __rxor__(self, other):
        return binary("^", other, self)

    def __lshift__(self, other):
        return binary("<<", self, other)

    def __rlshift__(self, other):
        return binary("<<", other, self)

    def __rshift__(self, other):
        return binary(">>", self, other)

    def __rrshift__(self, other):
        return binary(">>", other, self)

    def __lt__(self, other):
        return binary("<", self, other)

    def __le__(self, other):
        return binary("<=", self, other)

    def __gt__(self, other):
        return binary(">", self, other)

    def __ge__(self, other):
        return binary(">=", self, other)

    def __eq__(self, other):
        return binary("==", self, other)

    def __ne__(self, other):
        return binary("!=", self, other)

    def __neg__(self):
        return binary("-", 0, self) if is_int(self.dtype) else binary("*", self, -1.0)

    def __invert__(self):
        return binary("^", self, True if self.dtype.name == "int1" else -1)

    def logical_and(self, other):
        return binary("&", self, other)

    def logical_or(self, other):
        return binary("|", self, other)

    # ---- shape ----------------------------------------------------------------------------------------------------

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        out = self
        for axis, i in enumerate(index):
            if i is None:
                out = expand_dims(out, axis)
            elif i != slice(None):
                context.refuse("kernel", f"A tensor can be indexed by `:` and None only, got {i!r}.")
        return out

    def expand_dims(self, axis):
        return expand_dims(self, axis)

    def reshape(self, *shape):
        shape = [
            constant(s, "reshape's shape")
            for s in (shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape)
        ]
        if math.prod(shape) != self.numel:
            context.refuse("layout", f"A tensor {list(self.shape)} cannot be reshaped to {shape}.")
        layout = layouts.register_view(self.layout, list(self.shape), "reshape", tuple(shape))
        return Tensor(self.data.reshape(shape), self.dtype, layout, self.buffer)

    def permute(self, *dims):
        dims = [
            constant(d, "permute's order")
            for d in (dims[0] if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else dims)
        ]
        layout = layouts.register_view(self.layout, list(self.shape), "permute", tuple(dims))
        return Tensor(np.transpose(self.data, dims), self.dtype, layout, self.buffer)

    def trans(self, *dims):
        return self.permute(*(dims or (1, 0)))

    @property
    def T(self):
        return self.permute(1, 0)

    def split(self):
        if not self.shape or self.shape[-1] != 2:
            context.refuse("layout", f"split needs a last dimension of 2, got shape {list(self.shape)}.")
        layout = layouts.register_view(self.layout, list(self.shape), "split")
        return tuple(Tensor(np.ascontiguousarray(self.data[..., i]), self.dtype, layout) for i in (0, 1))

    def broadcast_to(self, *shape):
        shape = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else list(shape)
        return Tensor(np.broadcast_to(self.data, shape), self.dtype, self.layout, self.buffer)

    # ---- types and reductions -------------------------------------------------------------------------------------

    def to(self, dtype, fp_downcast_rounding=None, bitcast=False):
        """The values in another dtype."""
        dtype = constant(dtype, "the dtype")
        if isinstance(dtype, gl.pointer_type) or self.buffer is not None:
            context.refuse("unknown operation", f"gluon_cpu does not convert {self.dtype} to {dtype}.")
        if fp_downcast_rounding not in (None, "rtne"):
            context.refuse("unknown operation", f"gluon_cpu rounds to nearest even only, not {fp_downcast_rounding!r}.")
        data = self.data
        work(self)
        if bitcast:
            if "bf16" in (dtype.name, self.dtype.name) or not self.shape:
                context.refuse("unknown operation", f"gluon_cpu does not bitcast {self.dtype} to {dtype}.")
            return Tensor(data.view(numpy_type(dtype)), dtype, self.layout)
        return Tensor(round_to(data, dtype), dtype, self.layout)

    cast = to

    def sum(self, axis=None, keep_dims=False, dtype=None):
        return meaning("sum")(self, axis, keep_dims, dtype=dtype)

    def max(self, axis=None, return_indices=False, return_indices_tie_break_left=True, keep_dims=False):
        return meaning("max")(self, axis, return_indices, return_indices_tie_break_left, keep_dims)

    def min(self, axis=None, return_indices=False, return_indices_tie_break_left=True, keep_dims=False):
        return meaning("min")(self, axis, return_indices, return_indices_tie_break_left, keep_dims)

    def reduce(self, axis, combine_fn, keep_dims=False):
        return meaning("reduce")(self, axis, combine_fn, keep_dims)

    def exp(self):
        return meaning("exp")(self)

    def exp2(self):
        return meaning("exp2")(self)

    def log(self):
        return meaning("log")(self)

    def log2(self):
        return meaning("log2")(self)

    def sqrt(self):
        return meaning("sqrt")(self)

    def rsqrt(self):
        return meaning("rsqrt")(self)

    def abs(self):
        return meaning("abs")(self)


def work(x: Tensor, special: bool = False) -> None:
    """Charge one elementwise operation on x to the running partition."""
    program = context.program()
    n = x._data.size if isinstance(x._data, np.ndarray) else 1
    program.spend(program.model.compute(n, program.partition.num_warps, special), "compute")


def to_tensor(x) -> Tensor:
    """A run-time value: tensors stay, numbers become scalars."""
    if isinstance(x, Tensor):
        return x
    x = unwrap(x)
    if isinstance(x, NUMBERS):
        dtype = of_number(x)
        return Tensor(round_number(x, dtype), dtype)
    context.refuse("kernel", f"{x!r} is no tensor and no number.")


def expand_dims(x: Tensor, axis) -> Tensor:
    """Insert a dimension of one; the layout must be the SliceLayout that this dimension was sliced from."""
    axis = constant(axis, "expand_dims' axis")
    if not isinstance(x, Tensor) or not x.shape:
        context.refuse("kernel", "Only tensors have dimensions to add to; this is a scalar.")
    axis = axis + len(x.shape) + 1 if axis < 0 else axis
    layout = x.layout
    if isinstance(layout, gl.SliceLayout):
        if layout.dim != axis:
            context.refuse(
                "layout",
                f"A new dimension {axis} of a tensor with {layout}: it is sliced along "
                f"dimension {layout.dim}, so only that one can be added. Give gl.arange "
                f"SliceLayout({axis}, ...).",
            )
        layout = layout.parent
    elif not isinstance(layout, AutoLayout):
        context.refuse(
            "layout",
            f"A new dimension needs a SliceLayout that says how it is spread over threads; this tensor has {layout}.",
        )
    return Tensor(np.expand_dims(x.data, axis), x.dtype, layout, x.buffer)


def broadcast_layout(a: Tensor, b: Tensor, what: str):
    """The common layout of two operands whose shapes fit."""
    if not a.shape:
        return b.layout
    if not b.shape:
        return a.layout
    layout = layouts.same(a.layout, b.layout, what)
    if len(a.shape) != len(b.shape):
        context.refuse(
            "layout",
            f"{what}: shapes {list(a.shape)} and {list(b.shape)} have different ranks. x[:, None] adds a dimension.",
        )
    for m, n in zip(a.shape, b.shape, strict=True):
        if m != n and 1 not in (m, n):
            context.refuse("layout", f"{what}: shapes {list(a.shape)} and {list(b.shape)} do not fit.")
    return layout


def _divide(a, b, mod: bool):
    """C's integer division, which rounds to zero, and its remainder."""
    if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray):
        if b == 0:
            context.refuse("kernel", "Integer division by zero.")
        q = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return a - q * b if mod else q
    if mod:
        return np.fmod(a, b)
    return (np.abs(a) // np.abs(b)) * (np.sign(a) * np.sign(b))


COMPARISONS = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
}
SCALAR_COMPARISONS = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
BITS = {
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
}
ARITHMETIC = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def operand_type(op: str, a, b):
    """The type that both operands take."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return promote(a.dtype, b.dtype, op == "/")
    tensor, value = (a, b) if isinstance(a, Tensor) else (b, a)
    if is_float(tensor.dtype):
        return tensor.dtype
    if isinstance(value, float) or op == "/":
        return gl.float32
    if tensor.dtype.name == "int1" and isinstance(value, bool):
        return tensor.dtype
    if tensor.dtype.name == "int1":
        return of_number(value)
    if round_number(value, tensor.dtype) != value:
        return of_number(value)
    return tensor.dtype


def binary(op: str, a, b) -> Tensor:
    """A op b, where one of them is a tensor or scalar and the other may be a number."""
    a, b = unwrap(a), unwrap(b)
    for x in (a, b):
        if not isinstance(x, (Tensor, *NUMBERS)):
            context.refuse("kernel", f"{a!r} {op} {b!r}: not numbers or tensors.")
    if getattr(a, "buffer", None) is not None or getattr(b, "buffer", None) is not None:
        return _pointer(op, a, b)
    dtype = operand_type(op, a, b)
    ta = a if isinstance(a, Tensor) else Tensor(a, dtype)
    tb = b if isinstance(b, Tensor) else Tensor(b, dtype)
    x = ta.data if ta.dtype.name == dtype.name else round_to(ta.data, dtype)
    y = tb.data if tb.dtype.name == dtype.name else round_to(tb.data, dtype)
    if not isinstance(x, np.ndarray) and not isinstance(y, np.ndarray):
        work(ta)
        return _scalar(op, x, y, dtype)
    layout = broadcast_layout(ta, tb, f"a {op} b")
    if not isinstance(x, np.ndarray):
        x = numpy_type(dtype)(x)
    if not isinstance(y, np.ndarray):
        y = numpy_type(dtype)(y)
    with np.errstate(all="ignore"):
        if op in COMPARISONS:
            out, dtype = COMPARISONS[op](x, y), gl.int1
        elif op in ARITHMETIC:
            out = (x ^ y if op != "*" else x & y) if dtype.name == "int1" else ARITHMETIC[op](x, y)
        elif op in BITS:
            if is_float(dtype):
                context.refuse("kernel", f"{op} needs integers; got {dtype}.")
            out = BITS[op](x, y)
        elif op == "/":
            out = x / y
        elif is_float(dtype):
            if op == "//":
                context.refuse("kernel", "// needs integers; use / and gl.floor for floats.")
            out = np.fmod(x, y)
        else:
            out = _divide(x, y, op == "%")
    result = Tensor(round_to(out, dtype), dtype, layout)
    work(result)
    return result


def _scalar(op: str, x, y, dtype) -> Tensor:
    if op in SCALAR_COMPARISONS:
        return Tensor(SCALAR_COMPARISONS[op](x, y), gl.int1)
    if op in ARITHMETIC:
        out = ARITHMETIC[op](x, y)
    elif op in BITS:
        if is_float(dtype):
            context.refuse("kernel", f"{op} needs integers; got {dtype}.")
        out = BITS[op](x, y)
    elif op == "/":
        with np.errstate(all="ignore"):
            out = float(np.float64(x) / np.float64(y))
    elif is_float(dtype):
        out = math.fmod(x, y)
    else:
        out = _divide(x, y, op == "%")
    return Tensor(round_number(out, dtype), dtype)


def _pointer(op: str, a, b) -> Tensor:
    if op not in ("+", "-") or (getattr(a, "buffer", None) is not None and getattr(b, "buffer", None) is not None):
        context.refuse(
            "unknown operation",
            f"gluon_cpu adds and subtracts integers to pointers; it does not know pointer {op} pointer."
            if op in "+-"
            else f"gluon_cpu does not know {op} of a pointer.",
        )
    pointer, offset = (a, b) if getattr(a, "buffer", None) is not None else (b, a)
    offset = offset if isinstance(offset, Tensor) else to_tensor(offset)
    if not is_int(offset.dtype):
        context.refuse("kernel", f"A pointer moves by integers, not by {offset.dtype}.")
    layout = broadcast_layout(pointer, offset, "pointer + offset")
    x, y = pointer.data, offset.data
    if isinstance(y, np.ndarray):
        y = y.astype(np.int64)
    out = Tensor(x + y if op == "+" else x - y, pointer.dtype, layout, pointer.buffer)
    work(out)
    return out
