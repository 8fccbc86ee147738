"""Global memory: torch tensors on the CPU as flat NumPy buffers, ordinary loads and stores, TMA descriptors."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import AutoLayout
from triton.experimental.gluon.language.nvidia import hopper

from . import context, layouts
from .context import refuse
from .dtypes import HELD_WIDER, TORCH, from_bits, is_int, numpy_type, round_to, to_bits
from .known import constant, known, number
from .tensors import Shape, Tensor, broadcast_layout, to_tensor


class GlobalBuffer:
    """The memory of a torch tensor. Offsets count elements from the tensor's first one."""

    def __init__(self, tensor: torch.Tensor, name: str):
        if tensor.device.type != "cpu":
            raise ValueError(f"gluon_cpu runs on CPU tensors; {name} is on {tensor.device}. Move it with .cpu().")
        if tensor.dtype not in TORCH:
            known_types = ", ".join(map(str, TORCH))
            raise TypeError(f"gluon_cpu does not know {tensor.dtype} ({name}); it knows {known_types}.")
        self.name, self.dtype = name, TORCH[tensor.dtype]
        self.base = tensor.storage_offset()
        # A kernel may touch the tensor's elements only: nothing before the first, nothing from `end` on, nothing between rows.
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        self.end = last + 1 if tensor.numel() else 0
        # If rows have gaps between them, the gaps belong to other tensors.
        steps = sorted(((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1), reverse=True)
        spans = [sum((n - 1) * s for s, n in steps[i:]) for i in range(len(steps) + 1)]
        apart = all(step > spans[i + 1] for i, (step, _) in enumerate(steps)) and self.end > tensor.numel()
        self.steps = steps if apart else []
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        flat = torch.as_strided(tensor.detach(), (count,), (1,), 0)
        self.in_bits = self.dtype.name in HELD_WIDER
        self.raw = (flat.view(HELD_WIDER[self.dtype.name][1]) if self.in_bits else flat).numpy()

    def check(self, offsets: np.ndarray, what: str) -> None:
        """Refuse offsets that lie outside of the tensor."""
        if offsets.size and (offsets.min() < 0 or offsets.max() >= self.end):
            bad = offsets[(offsets < 0) | (offsets >= self.end)]
            has = f"which has elements 0 to {self.end - 1} ({bad.size} elements outside)"
            text = f"{what} reaches element {int(bad.flat[0])} of {self.name}, {has}"
            refuse("out of bounds", f"{text}. A mask is missing or wrong.")
        if offsets.size and self.steps:
            rest, inside = offsets, np.ones(offsets.shape, np.bool_)
            for step, count in self.steps:
                place, rest = np.divmod(rest, step)
                inside &= place < count
            if not (inside & (rest == 0)).all():
                bad = offsets[~(inside & (rest == 0))]
                text = f"{what} reaches element {int(bad.flat[0])} behind the first one of {self.name}, between two of its rows"
                refuse("out of bounds", f"{text} ({bad.size} elements outside). A mask or a stride is wrong.")

    def read(self, offsets: np.ndarray) -> np.ndarray:
        """Return the values at offsets, counted in elements."""
        raw = self.raw[offsets + self.base]
        return from_bits(raw, self.dtype) if self.in_bits else raw

    def write(self, offsets: np.ndarray, values: np.ndarray) -> None:
        """Set the values at offsets, counted in elements."""
        at, bits = offsets + self.base, to_bits(np.asarray(values), self.dtype) if self.in_bits else values
        if not np.array_equal(self.raw[at], bits):  # equal values are no effect: that shows endless loops
            context.program().effects += 1
            self.raw[at] = bits


def pointer(tensor: torch.Tensor, name: str) -> Tensor:
    """Return the pointer to the first element of a torch tensor, as the argument of a kernel."""
    buffer = GlobalBuffer(tensor, name)
    return Tensor(0, gl.pointer_type(buffer.dtype), None, buffer)


def addresses(ptr, mask, what: str):
    """Return (offsets, mask, layout) of an access; refuse a mask that does not fit, and addresses outside of the tensor."""
    if not isinstance(ptr, Tensor) or ptr.buffer is None:
        refuse("kernel", f"{what} needs a pointer or a tensor of pointers, got {ptr!r}.")
    layout = ptr.layout
    offsets = np.asarray(ptr.data, dtype=np.int64)
    keep: np.ndarray = np.ones((), np.bool_)
    if mask is not None:
        mask = to_tensor(mask)
        if mask.dtype.name != "int1":
            refuse("kernel", f"{what}: a mask is of True and False, such as `at < n`; this one is {mask.dtype}.")
        layout = broadcast_layout(ptr, mask, f"{what}: pointers and mask")
        if mask.shape and not ptr.shape:
            refuse("layout", f"{what}: one pointer with a mask of shape {list(mask.shape)}.")
        keep = np.asarray(mask.data, dtype=np.bool_)
    if offsets.ndim:
        layouts.register_layout(layout, offsets.shape, what)
    everywhere = keep.all()
    if offsets.shape != keep.shape:
        offsets, keep = np.broadcast_arrays(offsets, keep)
    ptr.buffer.check(offsets if everywhere else offsets[keep], what)
    return offsets, keep, layout


def read_kept(buffer: GlobalBuffer, offsets: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Return the values at the offsets that a mask keeps, and zeros at all others."""
    if offsets.ndim and keep.all():
        return buffer.read(offsets)
    values = np.zeros(offsets.shape, numpy_type(buffer.dtype))
    values[keep] = buffer.read(offsets[keep])
    return values


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
    """Load elements by their addresses; masked elements are `other`, or NaN, because a GPU leaves them undefined."""
    offsets, keep, layout = addresses(pointer, mask, "gl.load")
    program = context.program()
    dtype = pointer.dtype.element_ty
    values = read_kept(pointer.buffer, offsets, keep)
    if other is not None:
        if mask is None:
            refuse("kernel", "gl.load: `other` stands for what a mask leaves out, and there is no mask.")
        other = to_tensor(other)
        if other.shape:
            broadcast_layout(pointer, other, "gl.load: pointers and other")
        if not keep.all():
            wide = np.asarray(other.data, dtype=np.int64 if is_int(dtype) else np.float64)
            values = np.where(keep, values, round_to(wide, dtype))
    elif not is_int(dtype) and not keep.all():
        values = np.where(keep, values, np.asarray(np.nan, values.dtype))
    _spend(program.model.global_latency, "load", pointer, offsets, keep, layout)
    return Tensor(values if values.ndim else values.item(), dtype, layout)


@known()
def store(pointer, value, mask=None, boundary_check=(), cache_modifier="", eviction_policy=""):
    """Store elements by their addresses."""
    offsets, keep, _ = addresses(pointer, mask, "gl.store")
    dtype = pointer.dtype.element_ty
    value = to_tensor(value)
    if value.shape:
        broadcast_layout(pointer, value, "gl.store: pointers and value")
        if not pointer.shape:
            refuse("layout", f"gl.store: a value of shape {list(value.shape)} to one pointer.")
    data = np.asarray(value.data)
    data = np.broadcast_to(data if value.dtype.name == dtype.name else round_to(data, dtype), offsets.shape)
    pointer.buffer.write(offsets[keep], data[keep])
    _spend(10, "store", pointer, offsets, keep, pointer.layout)


def _spend(latency: float, kind: str, pointer: Tensor, offsets: np.ndarray, keep: np.ndarray, layout) -> None:
    """Spend the time of an access, and note its bytes and its sectors of 32 bytes on the timeline.

    A sector counts once for each instruction of each warp that touches it.
    """
    program, buffer = context.program(), pointer.buffer
    size = buffer.dtype.primitive_bitwidth // 8
    program.spend(
        latency + np.count_nonzero(keep) * size / program.num_ctas / program.model.global_bytes, kind, buffer.name
    )
    if program.events is None or not offsets.shape or isinstance(layout, AutoLayout):
        return  # only the compiler knows the layout, and with it the sectors
    elements = layouts.elements_of(layout, offsets.shape, program.partition.num_warps, program.num_ctas)
    at = (offsets.reshape(-1)[elements] + buffer.base) * size  # registers x lanes x warps
    kept = keep.reshape(-1)[elements]
    together = 1  # an instruction moves so many registers: neighbours in memory, at most 16 bytes
    while 2 * together * size <= 16 and 2 * together <= len(at) and (np.diff(at[: 2 * together, 0, 0]) == size).all():
        together *= 2
    groups = (at // 32).reshape(-1, together, *at.shape[1:])
    kept = kept.reshape(groups.shape)
    sectors = sum(
        len(np.unique(groups[g, ..., w][kept[g, ..., w]])) for g in range(len(groups)) for w in range(at.shape[2])
    )
    event = program.events[-1]
    event.bytes, event.sectors = int(keep.sum()) * size, sectors


def _combine(what: str, update, pointer, mask, *operands) -> Tensor:
    """Replace elements of memory by `update(element, operands...)`, and return the old elements."""
    offsets, keep, layout = addresses(pointer, mask, what)
    dtype = pointer.dtype.element_ty
    values = [np.broadcast_to(round_to(np.asarray(to_tensor(x).data), dtype), offsets.shape) for x in operands]
    old = np.zeros(offsets.shape, numpy_type(dtype))
    if update is np.add and offsets.ndim and np.unique(offsets[keep]).size == np.count_nonzero(keep):
        # No address comes twice, as nearly always: compute all at once, because one by one takes seconds.
        old[keep] = pointer.buffer.read(offsets[keep])
        pointer.buffer.write(offsets[keep], round_to(np.asarray(old[keep] + values[0][keep]), dtype))
        keep = np.zeros_like(keep)
    for i in np.ndindex(offsets.shape):
        if keep[i]:
            place = offsets[i] + np.zeros((), np.int64)
            old[i] = pointer.buffer.read(place)
            pointer.buffer.write(place, round_to(np.asarray(update(old[i], *(x[i] for x in values))), dtype))
    program = context.program()
    program.spend(program.model.global_latency, "store", pointer.buffer.name)
    return Tensor(old if old.ndim else old.item(), dtype, layout)


UPDATES = {"add": np.add, "max": np.maximum, "min": np.minimum, "xchg": lambda old, new: new}
UPDATES |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
for _name, _update in UPDATES.items():
    known(f"atomic_{_name}")(
        lambda pointer, val, mask=None, sem=None, scope=None, what=f"gl.atomic_{_name}", update=_update: _combine(
            what, update, pointer, mask, val
        )
    )


@known()
def atomic_cas(pointer, cmp, val, sem=None, scope=None):
    """Store `val` where memory holds `cmp`, and return the old values."""
    return _combine("gl.atomic_cas", lambda old, wanted, new: new if old == wanted else old, pointer, None, cmp, val)


known("atomic_load")(lambda pointer, mask=None, sem=None, scope=None: load(pointer, mask))
known("atomic_store")(lambda pointer, val, mask=None, sem=None, scope=None: store(pointer, val, mask))


class _BlockType:
    """The type `desc.block_type` of a descriptor's box: shape, dtype and bytes."""

    def __init__(self, dtype, shape: list[int]):
        self.element_ty = self.scalar = dtype
        self.shape = Shape(shape)
        self.nbytes = math.prod(shape) * dtype.primitive_bitwidth // 8
        self.numel = math.prod(shape)

    def __eq__(self, other) -> bool:
        return (self.element_ty.name, self.shape) == (other.element_ty.name, other.shape)


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
        part = math.prod(layouts.per_block(list(block_shape), layout))
        self.nbytes_per_cta = part * buffer.dtype.primitive_bitwidth // 8
        self.shape = tuple(Tensor(s, gl.int32) for s in self.sizes)
        self.strides = tuple(Tensor(s, gl.int64) for s in self.steps)
        self.type = self
        # {size of a box: offsets of its elements from the first element}.
        self.boxes: dict[tuple[int, ...], np.ndarray] = {}

    def __getattr__(self, name):
        refuse("unknown operation", f"gluon_cpu does not know .{name} of a TMA descriptor.")

    def box(self, coord: list[int], what: str) -> tuple[np.ndarray, tuple[slice, ...]]:
        """Return the part of a box inside of the tensor: its offsets in memory, and its place in the box."""
        start, lengths, places = self.start, [], []
        for at, size, step, block in zip(coord, self.sizes, self.steps, self.block_shape, strict=True):
            first, end = min(max(at, 0), size), max(min(at + block, size), 0)
            start += first * step
            lengths.append(max(end - first, 0))
            places.append(slice(first - at, first - at + lengths[-1]))
        if (key := tuple(lengths)) not in self.boxes:
            along: list[np.ndarray] = [
                np.arange(n, dtype=np.int64) * step for n, step in zip(lengths, self.steps, strict=True)
            ]
            self.boxes[key] = functools.reduce(np.add.outer, along)
        offsets: np.ndarray = self.boxes[key] + start
        self.buffer.check(offsets, what)
        return offsets, tuple(places)

    def read(self, coord: list[int]) -> np.ndarray:
        """Return the values of the box; outside of the tensor they are the padding."""
        offsets, places = self.box(coord, "A TMA copy")
        values = self.buffer.read(offsets)
        if values.shape == tuple(self.block_shape):
            return values
        whole: np.ndarray = np.full(self.block_shape, np.nan if self.padding == "nan" else 0, numpy_type(self.dtype))
        whole[places] = values
        return whole

    def write(self, coord: list[int], values: np.ndarray) -> None:
        """Write the box; values outside of the tensor are dropped."""
        offsets, places = self.box(coord, "A TMA store")
        self.buffer.write(offsets, values[places])

    def update(self, coord: list[int], values: np.ndarray, combine) -> None:
        """Combine the box with values, in the tensor's type; values outside of the tensor are dropped."""
        offsets, places = self.box(coord, "A TMA reduction")
        old = np.asarray(self.buffer.read(offsets))
        self.buffer.write(offsets, round_to(np.asarray(combine(old, np.asarray(values)[places])), self.dtype))

    handle = property(lambda self: self)  # for builtins of a kernel's author


def host_descriptor(desc, name: str) -> Descriptor:
    """Return the Descriptor of a TensorDescriptor from the host."""
    if getattr(desc, "round_f32_to_tf32", False):
        text = f"{name}: gluon_cpu does not round to tf32 on the way, as round_f32_to_tf32=True asks"
        refuse("unknown operation", f"{text}. Make the descriptor without it; wgmma reads the upper 19 bits anyway.")
    buffer = GlobalBuffer(desc.base, name)
    box, padding = [int(b) for b in desc.block_shape], getattr(desc, "padding", "zero")
    return Descriptor(buffer, 0, list(desc.shape), list(desc.strides), box, desc.layout, padding)


@known("make_tensor_descriptor", of=(hopper.tma,))
def device_descriptor(base, shape, strides, block_shape, layout, padding_option="zero") -> Descriptor:
    """Make a TMA descriptor inside of a kernel."""
    block = [constant(b, "block_shape") for b in block_shape]
    sizes = [number(s, "shape") for s in shape]
    steps = [number(s, "strides") for s in strides]
    size = base.buffer.dtype.primitive_bitwidth // 8
    if steps[-1] != 1 or any(s * size % 16 for s in (*steps[:-1], base.buffer.base + int(base.data))):
        text = "the last must be 1, and the others and the place of the first element multiples of 16 bytes"
        refuse("layout", f"make_tensor_descriptor: strides {steps} of {base.buffer.dtype}; {text}.")
    return Descriptor(base.buffer, int(base.data), sizes, steps, block, constant(layout, "layout"), padding_option)
