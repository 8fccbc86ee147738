"""The table of Gluon's functions that the simulator knows, and the rules for constants.

The table is empty at first. The modules with the operations fill it at their import, and the interpreter reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import DistributedLayout, SharedLayout

from utils.machine import versions

from .context import refuse

versions.adopt_newest_gluon_names()

TABLE: dict[Any, Callable] = {}  # a function of Triton -> the function that does the same on NumPy data


def known(*names: str, of: tuple = (gl, tl)) -> Callable:
    """Add a function to the table as the meaning of Triton's functions with these names.

    Names that this version of Triton lacks are left out.

    Args:
        names: names in `of`; without names, the function's own name without a trailing underscore.
        of: the modules of Triton with the function.
    """

    def enter(function: Callable) -> Callable:
        for name in names or (function.__name__.rstrip("_"),):
            for module in of:
                if callable(getattr(module, name, None)):
                    TABLE[getattr(module, name)] = _refusal_of_removed(name) or function
        return function

    return enter


def _refusal_of_removed(name: str) -> Callable | None:
    """Return a function that refuses a name that the installed Triton has removed; None if Triton still has the name."""
    replacement = versions.replacement_of_removed_gluon_name(name)
    if replacement is None:
        return None

    def refuse_name(*_, **__):
        refuse("unknown operation", f"{name} was removed from this version of Triton; call {replacement} instead.")

    return refuse_name


# {part of a name in Triton that the simulator does not know: advice}.
INSTEAD = {
    "block_ptr": "Load and store by addresses: pointer + offsets, with a mask.",
    "im2col": "Copy plain tiles with a TensorDescriptor, or load elements by their addresses with gl.load.",
    "hopper.async_store": "Send the tile through global memory, or give it to the other block by gl.convert_layout.",
    "blackwell.": "That is Blackwell's; on Hopper the plain operators (+, -, *, gl.fma, gl.maximum) do the same.",
    "rubin.": "That is Rubin's; on Hopper use what gl and nvidia.hopper have.",
    "fp4_to_fp": "Hopper has no products of fp4; load fp8 or 16-bit values, or unpack integers with >> and &.",
    "atomic_poll": "Programs run one after another here, so none can wait for another: split the kernel into two launches.",
    "fpsan": "Leave it out: it serves a sanitizer of Triton's, and changes no result.",
    "_core.inline_asm": "gl.inline_asm_elementwise runs the PTX of the course's kernels; say anything else in gl's functions.",
    "mma_v2": "Hopper's product is warpgroup_mma.",
}


def advice(name: str) -> str:
    """Return advice in place of a function that the simulator does not know; "" if there is none."""
    return next((f" {text}" for part, text in INSTEAD.items() if part in name), "")


def meaning(name: str) -> Callable:
    """Return the simulator's version of `gl.<name>`."""
    return TABLE[getattr(gl, name)]


class RunTimeValue:
    """A value that is known when the kernel runs, but not when it is compiled."""

    __slots__ = ()
    shape: Any
    data: Any


def constant(value, what: str):
    """Return a value that must be known when the kernel is compiled; refuse any other."""
    if isinstance(value, RunTimeValue):
        text = f"{what} must be a constexpr; got a value that is known only when the kernel runs"
        refuse("kernel", f"{text}. Annotate it: `name: gl.constexpr = ...`.")
    return value


def constants(values, what: str) -> list:
    """Return a list of values that must be known when the kernel is compiled."""
    return [constant(value, what) for value in values]


def once_for_constants(function):
    """Return a function of constants that computes once for the same arguments: equal numbers and identical layouts."""
    results: dict[tuple, tuple] = {}

    def run(*args, **kwargs):
        key = _key((*args, *kwargs.items()) if kwargs else args)
        if key is None:
            return function(*args, **kwargs)
        found = results.get(key)
        if found is None:
            found = function(*args, **kwargs), args, kwargs  # the references keep the arguments' ids unique
            if not isinstance(found[0], list):  # a caller may change a list
                results[key] = found
        return found[0]

    return run


def _key(value):
    """Return a key for a constant: the value of a number or text, the identity of a layout or type, None for others."""
    kind = type(value)
    if kind is int or kind is str:
        return value
    if kind is bool or value is None:
        return kind, value  # True is not 1
    if kind is tuple or kind is list:
        parts = tuple(map(_key, value))
        return None if None in parts else (kind, *parts)
    return (object, id(value)) if isinstance(value, (DistributedLayout, SharedLayout, gl.dtype)) else None


def number(value, what: str) -> int:
    """Return an integer, whether it is known at compile time or only at run time."""
    data = value.data if isinstance(value, RunTimeValue) else value
    if type(data) is int:
        return data
    if getattr(value, "shape", ()):
        refuse("kernel", f"{what} must be a scalar; got a tensor of shape {list(value.shape)}.")
    refuse("kernel", f"{what} must be an integer; got {data!r}.")


_CONSTEXPR = gl.constexpr


def unwrap(value):
    """Return the Python value of a gl.constexpr, and anything else as it is."""
    return value.value if isinstance(value, _CONSTEXPR) else value
