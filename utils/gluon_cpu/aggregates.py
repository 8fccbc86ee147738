"""Gluon's aggregates: values with named fields, for example a ring of buffers with its barriers.

Triton's rules hold here, too: the constructor is a constexpr function that sets every declared field to a value of the
declared type, and nothing changes a field afterwards. From Triton 3.8 on, a class without a constructor takes its fields in
the order of their declaration, with their defaults, and inherits the fields of its base aggregates.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.runtime.jit import JITCallable

from . import context
from .context import refuse
from .global_memory import Descriptor
from .known import known, unwrap
from .memory import MemDesc
from .tensor_memory import TensorMemory
from .tensors import Tensor

# {Triton's type of a value: the simulator's type}.
TYPES = {
    blackwell.tensor_memory_descriptor: TensorMemory,
    gl.tensor: Tensor,
    gl.shared_memory_descriptor: MemDesc,
    tma.tensor_descriptor: Descriptor,
    gl.tuple: tuple,
}
OPERATORS = "add sub mul truediv floordiv mod and or xor lshift rshift lt le gt ge eq ne"


@functools.cache
def author_class(cls):
    """Return the class in the kernel's source. Triton keeps it only in a closure."""
    return inspect.getclosurevars(cls.__setattr__).nonlocals["cls"]


class Aggregate:
    """An instance of a kernel's aggregate class."""

    def __init__(self, cls, args: tuple, kwargs: dict):
        author = author_class(cls)
        set_slot = object.__setattr__
        set_slot(self, "_cls", cls)
        generated = getattr(cls, "__aggregate_defaults__", None)  # from Triton 3.8 on; None before
        set_slot(self, "_declared", author.__annotations__ if generated is None else cls.__annotations__)
        set_slot(self, "_fields", {})
        set_slot(self, "_complete", False)
        constructor = author.__init__
        if isinstance(constructor, JITCallable):
            constructor.fn(self, *map(unwrap, args), **{name: unwrap(value) for name, value in kwargs.items()})
        elif generated is not None and "__init__" not in vars(author):
            self._set_fields(args, kwargs, generated)
        else:
            refuse("kernel", f"{cls.__name__}: decorate its __init__ with @gluon.constexpr_function.")
        for name in self._declared:
            if name not in self._fields:
                refuse("kernel", f"The constructor of {cls.__name__} did not set the field {name}.")
        set_slot(self, "_complete", True)

    def _set_fields(self, args: tuple, kwargs: dict, defaults: dict) -> None:
        """Set the fields of a class without a constructor, as Triton's generated constructor does."""
        label, names = self._cls.__name__, list(self._declared)
        if len(args) > len(names):
            refuse("kernel", f"{label} has {len(names)} fields and got {len(args)} values.")
        given = dict(zip(names, args, strict=False))
        for name in kwargs:
            if name in given or name not in names:
                what = "is given twice" if name in given else "is no field of it"
                refuse("kernel", f"{label}({name}=...): {name} {what}.")
        for name, value in ({**defaults, **given, **kwargs}).items():
            kind = self._declared[name]
            constant = not is_instance(value, kind) and is_instance(gl.constexpr(value), kind)
            setattr(self, name, gl.constexpr(value) if constant else value)

    def __setattr__(self, name: str, value: Any) -> None:
        label = self._cls.__name__
        if self._complete:
            refuse("kernel", f"The field {name} of a {label} cannot be changed; make a new {label}.")
        if name not in self._declared:
            refuse("kernel", f"{label} has no field {name}: declare it as `{name}: type` in the class.")
        kind = self._declared[name]
        if isinstance(kind, str):
            refuse("kernel", f"{label}: `from __future__ import annotations` hides the types of its fields.")
        if not is_instance(value, kind):
            text = getattr(kind, "__name__", str(kind))
            wrap = f" Write gl.constexpr({value!r})." if kind is gl.constexpr and not isinstance(value, Tensor) else ""
            refuse("kernel", f"The field {name} of {label} holds a value of type {text}; got {value!r}.{wrap}")
        self._fields[name] = unwrap(value)
        object.__setattr__(self, name, self._fields[name])  # so reads do not call __getattr__

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._cls, name, None)
        if not isinstance(member, JITCallable):
            refuse("kernel", f"A {self._cls.__name__} has no field or method {name}.")
        return types.MethodType(member, self)

    def __repr__(self) -> str:
        return f"{self._cls.__name__}({', '.join(f'{name}={value!r}' for name, value in self._fields.items())})"

    def leaves(self) -> list[tuple[str, Any]]:
        """Return all fields that are no aggregates, each with its path, such as `bars.full`."""
        leaves = []
        for name, value in self._fields.items():
            inner = Aggregate.leaves(value) if isinstance(value, Aggregate) else [("", value)]
            leaves += [(f"{name}.{path}".rstrip("."), leaf) for path, leaf in inner]
        return leaves


def _operator(name: str):
    def apply(self: Aggregate, other: Any) -> Any:
        return context.program().call(self.__getattr__(name), other)

    return apply


for _name in OPERATORS.split():
    setattr(Aggregate, f"__{_name}__", _operator(f"__{_name}__"))


def is_instance(value: Any, kind: Any) -> bool:
    """Return whether a value has a type from a kernel: one of Triton's types, an aggregate class, or a union."""
    if kind in TYPES:
        return isinstance(value, TYPES[kind])
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = typing.get_args(kind)
    if isinstance(kind, tuple):
        return any(is_instance(value, k) for k in kind)
    if getattr(kind, "__triton_aggregate__", False):
        return isinstance(value, Aggregate) and value._cls is kind
    return isinstance(value, kind)


def flatten(values: tuple) -> list:
    """Return the values of arguments, and in place of tuples and aggregates their parts."""
    flat: list = []
    for value in values:
        if isinstance(value, Aggregate):
            value = tuple(value._fields.values())
        flat += flatten(value) if isinstance(value, tuple) else [value]
    return flat


@known("aggregate_replace")
def replace(instance, **changes):
    """Return a copy of an aggregate in which some fields have other values."""
    if not isinstance(instance, Aggregate):
        refuse("kernel", f"aggregate_replace takes an aggregate; got {instance!r}.")
    return Aggregate(instance._cls, (), {**instance._fields, **changes})
