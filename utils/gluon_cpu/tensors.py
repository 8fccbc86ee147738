"""Register tensors and scalars: NumPy data, a Gluon dtype, a layout, and arithmetic by Triton's rules."""

from __future__ import annotations

import functools
import math
import operator
import types

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl

from . import context, layouts
from .context import refuse
from .dtypes import FP8_LARGEST, HELD_WIDER, is_float, is_int, numpy_type, of_number, promote, round_number, round_to
from .known import RunTimeValue, number, once_for_constants, unwrap

NUMBERS = (bool, int, float)


class Shape(list):
    """A shape that adds to lists and tuples alike, as kernels write `[STAGES] + desc.block_type.shape`."""

    def __add__(self, other):
        return Shape([*self, *other])

    def __radd__(self, other):
        return Shape([*other, *self])


class Tensor(RunTimeValue):
    """A block of values in registers, or a scalar, or pointers.

    The data of a scalar is a Python number. Pointers have a `buffer`, a GlobalBuffer, and their data are offsets into
    it, in elements. `reads` are the shared-memory loads of the values. Operators are added below the class.
    """

    __slots__ = ("_data", "buffer", "dtype", "layout", "reads")

    def __init__(self, data, dtype, layout=None, buffer=None, reads=()):
        self._data, self.dtype, self.layout, self.buffer, self.reads = data, dtype, layout, buffer, reads

    @property
    def data(self):
        """The values: a NumPy array, or a Python number."""
        return self._data

    @property
    def shape(self) -> Shape:
        """The dimensions; none for a scalar."""
        return Shape(self._data.shape) if isinstance(self._data, np.ndarray) else Shape()

    @property
    def type(self):
        """Triton's type, with shape and layout."""
        return _type_of(self.dtype, tuple(self.shape), self.layout) if self.shape else self.dtype

    numel = property(lambda self: math.prod(self.shape))
    handle = property(lambda self: self)  # for builtins of a kernel's author

    T = property(lambda self: self.trans())

    @property
    def value(self):
        """Refuse the read: only constants have a value before the kernel runs."""
        refuse("kernel", ".value belongs to a constexpr; this is a value known only when the kernel runs.")

    def to(self, *args, **kwargs):
        """Return the values in another dtype."""
        return self.cast(*args, **kwargs)

    def broadcast_to(self, *shape):
        """Return the tensor with its dimensions of one repeated."""
        shape = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else list(shape)
        return Tensor(np.broadcast_to(self.data, shape), self.dtype, self.layout, self.buffer)

    def __repr__(self) -> str:
        return f"<{self.dtype}{list(self.shape)} {self.layout or ''}: {self.data}>"

    def __getattr__(self, name):
        function = getattr(gl, name, getattr(tl, name, None))
        if hasattr(gl.tensor, name) and callable(function):  # x.atomic_add(y) is gl.atomic_add(x, y)
            return types.MethodType(functools.partial(context.program().call, function), self)
        text = f"gluon_cpu does not know the method .{name} of a tensor"
        refuse("unknown operation", f"{text}. Call a function of gl, or compute it with operators and gl.where.")

    def __bool__(self) -> bool:
        if self.shape:
            text = f"A tensor of shape {list(self.shape)} has no single truth value. A condition must be a scalar"
            refuse("kernel", f"{text}; use gl.where, or `|` and `&` between comparisons in parentheses.")
        return bool(self.data)

    def __index__(self) -> int:
        return number(self, "an index")

    def __len__(self):
        refuse("kernel", "A tensor has no len(); use .shape.")

    def __iter__(self):
        text = "(warpgroup_mma_wait returns a tensor for one entry of deps, a tuple for several.)"
        refuse("kernel", f"A tensor cannot be unpacked or iterated over. {text}")

    def __neg__(self):
        return binary("-", 0, self) if is_int(self.dtype) else binary("*", self, -1.0)

    def __invert__(self):
        return binary("^", self, True if self.dtype.name == "int1" else -1)

    def __getitem__(self, index):
        result = self
        for axis, i in enumerate(index if isinstance(index, tuple) else (index,)):
            if i is None:
                result = result.expand_dims(axis)
            elif i != slice(None):
                refuse("kernel", f"A tensor can be indexed by `:` and None only, got {i!r}.")
        return result


def work(x: Tensor, special: bool = False) -> None:
    """Spend the time of an elementwise operation on x; special: it needs the special function units (exp2, log2, ...)."""
    program = context.program()
    p, data = program.partition, x._data
    cycles = (data.size if type(data) is np.ndarray else 1) / (p.special_rate if special else p.rate)
    if program.events is None and program.random is None:
        p.time += cycles
    else:
        program.spend(cycles, "compute")


def to_tensor(x) -> Tensor:
    """Return a tensor unchanged, and a number as a run-time scalar."""
    if isinstance(x, Tensor):
        return x
    x = unwrap(x)
    if isinstance(x, NUMBERS):
        dtype = of_number(x)
        return Tensor(round_number(x, dtype), dtype)
    refuse("kernel", f"{x!r} is no tensor and no number.")


def broadcast_layout(a: Tensor, b: Tensor, what: str):
    """Return the common layout of two operands; refuse shapes that do not fit."""
    m, n = (x._data.shape if isinstance(x._data, np.ndarray) else () for x in (a, b))
    if not m or not n:
        return a.layout if m else b.layout
    layout = a.layout if a.layout is b.layout else layouts.common_layout(a.layout, b.layout, what)
    if m != n:
        shapes = f"{what}: shapes {list(m)} and {list(n)}"
        if len(m) != len(n) and context.program().run.gluon:  # in plain Triton, dimensions are added in front
            refuse("layout", f"{shapes} have different ranks. x[:, None] adds a dimension.")
        if any(i != j and 1 not in (i, j) for i, j in zip(m[::-1], n[::-1], strict=False)):
            refuse("layout", f"{shapes} do not fit.")
    return layout


@once_for_constants
def _type_of(dtype, shape: tuple, layout):
    return gl.distributed_type(dtype, list(shape), layout)


# ---- arithmetic --------------------------------------------------------------------------------------------------

COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
COMPARISONS |= {"==": operator.eq, "!=": operator.ne}
BITS = {"&": operator.and_, "|": operator.or_, "^": operator.xor, "<<": operator.lshift, ">>": operator.rshift}
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul}
FUNCTIONS = COMPARISONS | BITS | ARITHMETIC | {"/": np.true_divide, "max": np.fmax, "min": np.fmin}
_OF_INTEGERS = FUNCTIONS | {"max": max, "min": min}


def _divide(a, b, mod: bool):
    """Return C's integer quotient, which rounds to zero, or its remainder.

    A GPU does not stop at a division by zero: the quotient has all bits set, and the remainder is the dividend. Correct kernels
    do this when they compute the place of a tile behind the last tile and do not use it.
    """
    if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray):
        if b == 0:
            return a if mod else -1
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return a - quotient * b if mod else quotient
    safe = np.where(b == 0, 1, b)
    if mod:
        return np.where(b == 0, a, np.fmod(a, safe))
    return np.where(b == 0, -1, (np.abs(a) // np.abs(safe)) * (np.sign(a) * np.sign(safe)))


def operand_type(op: str, a, b):
    """Return the common type of both operands."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype is b.dtype and op != "/":
            return a.dtype
        return promote(a.dtype, b.dtype, op == "/")
    tensor, value = (a, b) if isinstance(a, Tensor) else (b, a)
    if is_float(tensor.dtype):
        return tensor.dtype
    if isinstance(value, float) or op == "/":
        return gl.float32
    if tensor.dtype.name == "int1":
        return tensor.dtype if isinstance(value, bool) else of_number(value)
    return tensor.dtype if round_number(value, tensor.dtype) == value else of_number(value)


def binary(op: str, a, b) -> Tensor:
    """Return `a op b`; one operand is a tensor or scalar of the kernel, the other may be a number."""
    if type(a) is Tensor and a.dtype is _INT32 and (result := _of_integers(op, a, b)) is not None:
        return result
    a = a if type(a) is Tensor else _operand(op, a)
    b = b if type(b) is Tensor else _operand(op, b)
    key = op, _kind(a), _kind(b)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) > 20000:
            _plans.clear()
        plan = _plans[key] = _plan(op, a, b)
    convert_a, convert_b, function, kind, finish, dtype, layout, _ = plan
    reads, buffer = (), None
    if type(a) is Tensor:
        a, reads, buffer = a._data, a.reads, a.buffer
    if type(b) is Tensor:
        b, reads, buffer = b._data, reads or b.reads, buffer or b.buffer
    out = function(convert_a(a) if convert_a else a, convert_b(b) if convert_b else b)
    if kind is None or out.dtype is not kind:
        out = finish(out)
    result = Tensor(out, dtype, layout, buffer, reads)
    work(result)
    return result


_INT32 = gl.int32  # Triton has one object for it


def _of_integers(op: str, a: Tensor, b) -> Tensor | None:
    """Return `a op b` of two int32 scalars if the result is an int32 scalar or a truth value; else None."""
    x, y = a._data, b._data if type(b) is Tensor and b.dtype is _INT32 else b
    if type(x) is not int or type(y) is not int or not -(2**31) <= y < 2**31 or op == "/":
        return None
    function = _OF_INTEGERS.get(op)
    out = _divide(x, y, op == "%") if function is None else function(x, y)
    if not -(2**31) <= out < 2**31:
        return None
    result = Tensor(out, gl.int1 if op in COMPARISONS else _INT32)
    work(result)
    return result


def _operand(op: str, x):
    """Return an operand for an operator: a plain Tensor with its values, or a Python number."""
    if isinstance(x, Tensor):
        return Tensor(x.data, x.dtype, x.layout)  # x is a product, and reading its data may be a race
    x = unwrap(x)
    return x if isinstance(x, NUMBERS) else refuse("kernel", f"An operand of {op} is {x!r}: no number and no tensor.")


# {(op, kind of a, kind of b): plan of `_plan`}. A kind has the id of a layout; the plan's reference to the layout keeps it unique.
_plans: dict[tuple, tuple] = {}


def _kind(x) -> tuple:
    if type(x) is Tensor:
        return x.dtype.name, x._data.shape if type(x._data) is np.ndarray else None, id(x.layout)
    return type(x), repr(x)


def _plan(op: str, a, b) -> tuple:
    """Return (conversion of a, of b, function, NumPy type that needs no rounding, rounding, dtype, layout, layouts to keep)."""
    tensors = [x for x in (a, b) if isinstance(x, Tensor)]
    keep = [x.layout for x in tensors]
    layout = broadcast_layout(tensors[0], tensors[1], f"the operator {op}") if len(tensors) == 2 else keep[0]
    arrays = any(isinstance(x._data, np.ndarray) for x in tensors)
    if any(x.buffer is not None for x in tensors):
        return *_pointer_conversions(op, a, b), FUNCTIONS[op], None, lambda out: out, tensors[0].dtype, layout, keep
    dtype = operand_type(op, a, b)
    _check_operator(op, dtype)
    if dtype.name == "int1" and op in ARITHMETIC:
        function = operator.and_ if op == "*" else operator.xor
    elif op in ("%", "//"):
        function = np.fmod if is_float(dtype) else lambda x, y: _divide(x, y, op == "%")
    else:
        function = FUNCTIONS[op]
    result = gl.int1 if op in COMPARISONS else dtype
    kind = np.dtype(numpy_type(result)) if arrays and result.name not in HELD_WIDER else None
    conversions = (_conversion(x, dtype) for x in (a, b))
    return *conversions, function, kind, lambda out: round_to(out, result), result, layout, keep


def _conversion(x, dtype):
    """Return the function that converts an operand's data to the operator's type; None if they have this type."""
    if isinstance(x, Tensor):
        return (lambda data: round_to(data, dtype)) if x.dtype.name != dtype.name else None
    number = round_number(x, dtype)  # a plan is for one number
    return lambda _: number


def _check_operator(op: str, dtype) -> None:
    if dtype.name in FP8_LARGEST and op not in COMPARISONS:
        refuse("unknown operation", f"gluon_cpu does not compute {op} in {dtype}: convert first, .to(gl.float16).")
    if op in BITS and is_float(dtype):
        refuse("kernel", f"{op} needs integers; got {dtype}.")
    if op == "//" and is_float(dtype):
        refuse("kernel", "// needs integers; use / and gl.floor for floats.")


def _pointer_conversions(op: str, a, b) -> list:
    """Return the conversions of a pointer and its offset; refuse wrong operators and operands."""
    if op not in ("+", "-"):
        refuse("unknown operation", f"gluon_cpu does not know {op} of a pointer.")
    is_pointer = [getattr(x, "buffer", None) is not None for x in (a, b)]
    if all(is_pointer):
        text = "gluon_cpu adds and subtracts integers to pointers; it does not know"
        refuse("unknown operation", f"{text} pointer {op} pointer.")
    offset = to_tensor(b if is_pointer[0] else a)
    if not is_int(offset.dtype):
        refuse("kernel", f"A pointer moves by integers, not by {offset.dtype}.")
    wide = (lambda data: data.astype(np.int64)) if isinstance(offset._data, np.ndarray) else None
    return [None, wide] if is_pointer[0] else [wide, None]


# ---- operators ---------------------------------------------------------------------------------------------------


def _operator(op: str, reflected: bool = False):
    return (lambda self, other: binary(op, other, self)) if reflected else (lambda self, other: binary(op, self, other))


ARITHMETIC_NAMES = "add sub mul truediv floordiv mod and or xor lshift rshift"
ARITHMETIC_SIGNS = "+ - * / // % & | ^ << >>"

for _name, _op in zip(ARITHMETIC_NAMES.split(), ARITHMETIC_SIGNS.split(), strict=True):
    setattr(Tensor, f"__{_name}__", _operator(_op))
    setattr(Tensor, f"__r{_name}__", _operator(_op, reflected=True))
for _name, _op in zip(["lt", "le", "gt", "ge", "eq", "ne"], COMPARISONS, strict=True):
    setattr(Tensor, f"__{_name}__", _operator(_op))
for _name, _op in {"logical_and": "&", "logical_or": "|"}.items():
    setattr(Tensor, _name, _operator(_op))
