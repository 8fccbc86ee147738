"""Repairs of Triton's interpreter: what it computes wrongly is put right, and what it cannot compute is refused.

Each repair replaces one function of the interpreter, and gets the original as its first argument (None where there was
none). Importing this module repairs the interpreter of this process. Triton 3.6 to 3.9 need all but the two that name a version.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

_tensor_addresses: list[tuple[int, int]] = []  # first and last-plus-one byte of each tensor of the launch


def replaces(owner: object, name: str) -> Callable[[Callable], Callable]:
    """Put the decorated function in the place of owner.name."""
    original = getattr(owner, name, None)

    def put(repair: Callable) -> Callable:
        setattr(owner, name, lambda *arguments: repair(original, *arguments))
        return repair

    return put


@replaces(interpreter, "_patch_lang_tensor")
def give_tensors_an_index(original, tensor, scope):
    """Let Python use a scalar tensor as an index; Triton 3.6 with NumPy 2.4 has no `range` to a bound known at run time."""
    original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


# bf16. The interpreter holds it as the bit patterns in uint16.


def is_bf16(x) -> bool:
    """Whether a tensor handle holds bf16."""
    return x.dtype.scalar == tl.bfloat16


def widen(x):
    """The values of a bf16 handle in fp32; any other handle as it is."""
    return TensorHandle(torch.tensor(x.data).view(torch.bfloat16).float().numpy(), tl.float32) if is_bf16(x) else x


def narrow(x):
    """An fp32 handle in bf16, rounded to nearest even as a GPU does."""
    return TensorHandle(torch.tensor(x.data).bfloat16().view(torch.uint16).numpy(), tl.bfloat16)


@replaces(InterpreterBuilder, "cast_impl")
def cast_with_rounding(original, builder, source, target):
    """Convert to and from bf16 by way of fp32; the original truncates fp32, and takes other numbers for bit patterns."""
    if target.scalar == tl.bfloat16:
        return narrow(original(builder, widen(source), tl.float32))
    return original(builder, widen(source), target)


@replaces(InterpreterBuilder, "get_bf16")
def bf16_constant(original, builder, value):
    """Make a constant in bf16, for which Triton before 3.9 has no function."""
    return narrow(builder.get_fp32(value))


@replaces(InterpreterBuilder, "create_dot")
def dot_of_values(original, builder, a, b, *rest):
    """`tl.dot`: of bf16 the values are multiplied, in fp32; the original multiplies the bit patterns as integers."""
    return original(builder, widen(a), widen(b), *rest)


@replaces(InterpreterBuilder, "unary_op")
@replaces(InterpreterBuilder, "binary_op")
def without_bf16(original, builder, *operands_and_operation):
    """Refuse bf16 in arithmetic, which would compute with the bit patterns."""
    if any(is_bf16(x) for x in operands_and_operation[:-1]):
        raise TypeError(
            "Triton's interpreter has no bf16 arithmetic (it would compute with the bit patterns): "
            "convert first, x.to(tl.float32), and convert the result back when it is stored"
        )
    return original(builder, *operands_and_operation)


# A load or store outside every tensor of the launch would read or write whatever is there.


@replaces(GridExecutor, "_init_args_hst")
def note_addresses(original, executor, args, kwargs):
    """Note where the tensors of the launch lie."""
    on_host = original(executor, args, kwargs)
    _tensor_addresses.clear()
    for value in [*on_host[0], *on_host[1].values()]:
        tensor = getattr(value, "base", value)  # a tensor descriptor has its tensor in .base
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            first = tensor.data_ptr()
            _tensor_addresses.append((first, first + (reach + 1) * tensor.element_size()))
    return on_host


def refuse_outside(pointers, mask, access: str) -> None:
    """Raise an IndexError if an element that the mask keeps lies outside every tensor. access: "tl.load reads"."""
    addresses = np.broadcast_to(pointers.data, mask.data.shape)[mask.data]
    element = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
    outside = np.ones(addresses.shape, dtype=bool)
    for first, end in _tensor_addresses:
        outside &= (addresses < first) | (addresses + np.uint64(element) > end)
    if outside.any():
        raise IndexError(
            f"{access} outside every tensor given to the kernel, at {outside.sum()} of "
            f"{mask.data.size} elements: check the offsets, and mask the elements past an edge "
            "(mask=offsets < size)"
        )


@replaces(InterpreterBuilder, "create_masked_load")
def load_inside(original, builder, pointers, mask, other, *rest):
    """Refuse a load outside of the tensors; give NaN where the mask hides an element and `other` is missing.

    Triton leaves such an element undefined. The interpreter puts 0 there, with which a sum comes out right that is wrong on a GPU.
    """
    refuse_outside(pointers, mask, "tl.load reads")
    kind = pointers.get_element_ty().scalar
    if other is None and kind in (tl.bfloat16, tl.float16, tl.float32, tl.float64):
        nan = np.uint16(0x7FC0) if kind == tl.bfloat16 else np.dtype(f"float{kind.primitive_bitwidth}").type("nan")
        other = TensorHandle(np.full(pointers.data.shape, nan), kind)
    return original(builder, pointers, mask, other, *rest)


@replaces(InterpreterBuilder, "create_masked_store")
def store_inside(original, builder, pointers, value, mask, *rest):
    """Refuse a store outside of the tensors."""
    refuse_outside(pointers, mask, "tl.store writes")
    return original(builder, pointers, value, mask, *rest)
