"""Global memory: torch tensors on the CPU as flat NumPy buffers, ordinary loads and stores, TMA descriptors."""

from __future__ import annotations

import math

import numpy as np
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from . import context, layouts
from .context import refuse
from .dtypes import TORCH, is_int, numpy_type, round_to
from .known import constant, known, number
from .tensors import Shape, Tensor, broadcast_layout, to_tensor


class GlobalBuffer:
    """The storage under a torch tensor. Offsets count elements from the tensor's first one."""

    def __init__(self, tensor: torch.Tensor, name: str):
        if tensor.device.type != "cpu":
            raise ValueError(f"gluon_cpu runs on CPU tensors; {name} is on {tensor.device}. Move it with .cpu().")
        if tensor.dtype not in TORCH:
            raise TypeError(
                f"gluon_cpu does not know {tensor.dtype} ({name}); it knows " + ", ".join(str(t) for t in TORCH) + "."
            )
        self.name, self.dtype = name, TORCH[tensor.dtype]
        self.base = tensor.storage_offset()
        # Elements that the tensor reaches, first to last: what a kernel may touch through this pointer.
        self.low, self.high = (
            0,
            (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0),
        )
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        flat = torch.as_strided(tensor.detach(), (count,), (1,), 0)
        self.raw = (flat.view(torch.int16) if tensor.dtype == torch.bfloat16 else flat).numpy()
        self.is_bf16 = tensor.dtype == torch.bfloat16

    def check(self, offsets: np.ndarray, what: str) -> None:
        """Refuse offsets outside of the tensor."""
        if offsets.size and (offsets.min() < self.low or offsets.max() >= self.high):
            bad = offsets[(offsets < self.low) | (offsets >= self.high)]
            refuse(
                "out of bounds",
                f"{what} reaches element {int(bad.flat[0])} of {self.name}, which has "
                f"elements {self.low} to {self.high - 1} ({bad.size} elements outside). A mask is missing "
                "or wrong.",
            )

    def read(self, offsets: np.ndarray) -> np.ndarray:
        """Values at element offsets."""
        raw = self.raw[offsets + self.base]
        if self.is_bf16:
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return raw

    def write(self, offsets: np.ndarray, values: np.ndarray) -> None:
        """Set values at element offsets."""
        if self.is_bf16:
            bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
            values = (bits >> 16).astype(np.uint16).view(np.int16)
        self.raw[offsets + self.base] = values


def pointer(tensor: torch.Tensor, name: str) -> Tensor:
    """A torch tensor as a kernel sees it: a pointer to its first element."""
    buffer = GlobalBuffer(tensor, name)
    return Tensor(0, gl.pointer_type(buffer.dtype), None, buffer)


def addresses(ptr, mask, what: str):
    """(offsets, mask, layout) of an access; all checked."""
    if not isinstance(ptr, Tensor) or ptr.buffer is None:
        refuse("kernel", f"{what} needs a pointer or a tensor of pointers, got {ptr!r}.")
    layout = ptr.layout
    offsets = np.asarray(ptr.data, dtype=np.int64)
    keep = np.ones((), np.bool_)
    if mask is not None:
        mask = to_tensor(mask)
        layout = broadcast_layout(ptr, mask, f"{what}: pointers and mask")
        if mask.shape and not ptr.shape:
            refuse("layout", f"{what}: one pointer with a mask of shape {list(mask.shape)}.")
        keep = np.asarray(mask.data, dtype=np.bool_)
    if ptr.shape:
        layouts.distributed(layout, list(ptr.shape), what)
    offsets, keep = np.broadcast_arrays(offsets, keep)
    ptr.buffer.check(offsets[keep], what)
    return offsets, keep, layout


@known()
def load(
    pointer,
    mask=None,
    other=None,
    boundary_check=(),
    padding_option="",
    cache_modifier="",
    eviction_policy="",
    volatile=False,
):
    """gl.load."""
    offsets, keep, layout = addresses(pointer, mask, "gl.load")
    program = context.program()
    dtype = pointer.dtype.element_ty
    values = np.zeros(offsets.shape, numpy_type(dtype))
    values[keep] = pointer.buffer.read(offsets[keep])
    if other is not None:
        other = to_tensor(other)
        if other.shape:
            broadcast_layout(pointer, other, "gl.load: pointers and other")
        values = np.where(
            keep, values, round_to(np.asarray(other.data, dtype=np.float64 if not is_int(dtype) else np.int64), dtype)
        )
    program.spend(
        program.model.global_latency + int(keep.sum()) * dtype.primitive_bitwidth / 8 / program.model.global_bytes,
        "load",
        pointer.buffer.name,
    )
    _count_sectors(program, pointer.buffer, offsets, keep, layout)
    return Tensor(values if values.ndim else values.item(), dtype, layout)


@known()
def store(pointer, value, mask=None, boundary_check=(), cache_modifier="", eviction_policy=""):
    """gl.store."""
    offsets, keep, _ = addresses(pointer, mask, "gl.store")
    program = context.program()
    dtype = pointer.dtype.element_ty
    value = to_tensor(value)
    if value.shape:
        broadcast_layout(pointer, value, "gl.store: pointers and value")
        if not pointer.shape:
            refuse("layout", f"gl.store: a value of shape {list(value.shape)} to one pointer.")
    data = round_to(np.asarray(value.data), dtype)
    data = np.broadcast_to(data, offsets.shape)
    pointer.buffer.write(offsets[keep], data[keep])
    program.spend(
        int(keep.sum()) * dtype.primitive_bitwidth / 8 / program.model.global_bytes + 10, "store", pointer.buffer.name
    )
    _count_sectors(program, pointer.buffer, offsets, keep, pointer.layout)


def _count_sectors(program, buffer: GlobalBuffer, offsets: np.ndarray, keep: np.ndarray, layout) -> None:
    """Note on the timeline how many 32-byte sectors an access touches, counted for each instruction of each warp."""
    if program.events is None or not offsets.shape:
        return
    elements = layouts.elements_of(layout, offsets.shape, program.partition.num_warps)
    size = buffer.dtype.primitive_bitwidth // 8
    at = (offsets.reshape(-1)[elements] + buffer.base) * size  # registers x lanes x warps
    kept = keep.reshape(-1)[elements]
    together = 1  # registers that one instruction moves: neighbours in memory, 16 bytes at most
    while 2 * together * size <= 16 and 2 * together <= len(at) and (np.diff(at[: 2 * together, 0, 0]) == size).all():
        together *= 2
    groups = (at // 32).reshape(-1, together, *at.shape[1:])
    kept = kept.reshape(groups.shape)
    sectors = sum(
        len(np.unique(groups[g, ..., w][kept[g, ..., w]])) for g in range(len(groups)) for w in range(at.shape[2])
    )
    event = program.events[-1]
    event.bytes, event.sectors = int(keep.sum()) * size, sectors


def _atomic(name: str):
    """gl.atomic_add and its sisters: the old values; programs run one after another."""
    update = {
        "add": np.add,
        "max": np.maximum,
        "min": np.minimum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "xchg": lambda old, new: new,
    }[name]

    def run(pointer, val, mask=None, sem=None, scope=None):
        offsets, keep, layout = addresses(pointer, mask, f"gl.atomic_{name}")
        dtype = pointer.dtype.element_ty
        val = to_tensor(val)
        data = np.broadcast_to(round_to(np.asarray(val.data), dtype), offsets.shape)
        old = np.zeros(offsets.shape, numpy_type(dtype))
        for i in zip(*np.nonzero(np.atleast_1d(keep)), strict=True):
            i = i if offsets.ndim else ()
            here = offsets[i] + np.zeros((), np.int64)
            old[i] = pointer.buffer.read(here)
            pointer.buffer.write(here, round_to(np.asarray(update(old[i], data[i])), dtype))
        program = context.program()
        program.spend(program.model.global_latency, "store", pointer.buffer.name)
        return Tensor(old if old.ndim else old.item(), dtype, layout)

    return known(f"atomic_{name}")(run)


for _name in ("add", "max", "min", "and", "or", "xor", "xchg"):
    _atomic(_name)


class _BlockType:
    """desc.block_type: shape, dtype and bytes of a descriptor's box."""

    def __init__(self, dtype, shape: list[int]):
        self.element_ty = self.scalar = dtype
        self.shape = Shape(shape)
        self.nbytes = math.prod(shape) * dtype.primitive_bitwidth // 8
        self.numel = math.prod(shape)

    def __eq__(self, other) -> bool:
        return (self.element_ty.name, self.shape) == (other.element_ty.name, other.shape)

    __hash__ = None


class Descriptor:
    """A TMA descriptor inside of a kernel."""

    def __init__(
        self, buffer: GlobalBuffer, start: int, shape: list, strides: list, block_shape: list[int], layout, padding: str
    ):
        self.buffer, self.start, self.layout, self.padding = buffer, start, layout, padding
        self.dtype = buffer.dtype
        self.sizes, self.steps = [int(s) for s in shape], [int(s) for s in strides]
        self.block_shape = Shape(block_shape)
        self.block_type = _BlockType(buffer.dtype, list(block_shape))
        self.nbytes_per_cta = self.block_type.nbytes
        self.shape = tuple(Tensor(s, gl.int32) for s in self.sizes)
        self.strides = tuple(Tensor(s, gl.int64) for s in self.steps)
        self.type = self

    def __getattr__(self, name):
        refuse("unknown operation", f"gluon_cpu does not know .{name} of a TMA descriptor.")

    def box(self, coord: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(element offsets, inside) of the box at coordinates; both of the box's shape."""
        offsets, inside = np.int64(self.start), np.bool_(True)
        rank = len(self.sizes)
        for d, (at, size, step, block) in enumerate(zip(coord, self.sizes, self.steps, self.block_shape, strict=True)):
            i = (at + np.arange(block, dtype=np.int64)).reshape([-1 if e == d else 1 for e in range(rank)])
            offsets, inside = offsets + i * step, inside & (i >= 0) & (i < size)
        return np.broadcast_arrays(offsets, inside)

    def read(self, coord: list[int]) -> np.ndarray:
        """The box's values; what lies outside of the tensor is the padding."""
        offsets, inside = self.box(coord)
        values = np.full(offsets.shape, np.nan if self.padding == "nan" else 0, numpy_type(self.dtype))
        self.buffer.check(offsets[inside], "A TMA copy")
        values[inside] = self.buffer.read(offsets[inside])
        return values

    def write(self, coord: list[int], values: np.ndarray) -> None:
        """Write the box; what lies outside of the tensor is dropped."""
        offsets, inside = self.box(coord)
        self.buffer.check(offsets[inside], "A TMA store")
        self.buffer.write(offsets[inside], values[inside])


def host_descriptor(desc, name: str) -> Descriptor:
    """A TensorDescriptor made on the host, as a kernel argument."""
    buffer = GlobalBuffer(desc.base, name)
    return Descriptor(
        buffer,
        0,
        list(desc.shape),
        list(desc.strides),
        [int(b) for b in desc.block_shape],
        desc.layout,
        getattr(desc, "padding", "zero"),
    )


@known("make_tensor_descriptor", of=(hopper.tma,))
def device_descriptor(base, shape, strides, block_shape, layout, padding_option="zero") -> Descriptor:
    """tma.make_tensor_descriptor."""
    block = [constant(b, "block_shape") for b in block_shape]
    sizes = [number(s, "shape") for s in shape]
    steps = [number(s, "strides") for s in strides]
    size = base.buffer.dtype.primitive_bitwidth // 8
    if steps[-1] != 1 or any(s * size % 16 for s in steps[:-1]):
        refuse(
            "layout",
            f"make_tensor_descriptor: strides {steps} of {base.buffer.dtype}; the last must be 1 "
            "and the others multiples of 16 bytes.",
        )
    return Descriptor(base.buffer, int(base.data), sizes, steps, block, constant(layout, "layout"), padding_option)
