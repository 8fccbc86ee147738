"""Shared memory: allocations and their views, as kernels use them. accesses.py has the records of accesses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import context, layouts
from .accesses import Access, access, capitalize
from .context import Clock, refuse, report
from .dtypes import numpy_type
from .known import constant, constants, number
from .tensors import Shape, Tensor

SHARED_BYTES = 232448  # the limit for a block on an H100, an H200 or a B200: 227 KiB
COLUMNS = 512  # columns of Blackwell's tensor memory


class Allocation:
    """The memory of one gl.allocate_shared_memory."""

    kind = "shared memory"

    def __init__(self, dtype, shape: list[int], layout, index: int):
        self.dtype, self.shape, self.layout, self.index = dtype, shape, layout, index
        self.name = ""  # its first variable in the kernel
        self.names: set[tuple[str, str]] = set()  # (function, variable) of all its variables
        self.path = ""  # the path to it through an aggregate, such as ring.bars.full
        self.data: np.ndarray = np.zeros(shape, numpy_type(dtype))
        self.written: np.ndarray = np.zeros(shape, np.int8)  # 0, or 1 + the index in `spreads` of the last write
        self.spreads: list = [layouts.places(layout, shape)]  # the different places of elements in its views
        self.records: list[list[Access]] = [[] for _ in range(context.program().num_ctas)]  # the accesses in each block
        self.barriers: dict[int, list] = {}  # {place: its MBarriers, one for each block}
        self.bytes = math.prod(layouts.per_block(shape, layout)) * dtype.primitive_bitwidth // 8  # in each block
        self.chain = context.sites()  # the line of the allocation, and the lines of the calls around it
        self.site = self.chain[0]
        self.first = self.last = context.program().steps  # first and last use, in steps of the program
        self.partition = context.partition().index  # the partition that allocated it
        self.opened: list[Clock] = []  # the clock of each block at the first use
        self.opened_at, self.opened_by = self.site, ""

    def touch(self) -> None:
        """Remember a use, and at the first use the knowledge of the running partition."""
        program = context.program()
        self.last = program.steps
        if not self.opened:
            p = program.partition
            self.opened = [dict(block.clock) for block in p.blocks]
            self.opened_at, self.opened_by = context.site(), p.name

    @property
    def label(self) -> str:
        """The name of the memory in the kernel."""
        labels = context.program().labels
        if self not in labels:
            # A function that makes several rings gives them the same name: then the path tells them apart.
            others = context.program().allocations if self.path else []
            own = "" if any(a.name == self.name and a is not self for a in others) else self.name
            labels[self] = own or self.path or f"{self.kind} of line {self.site.line}"
        return labels[self]


class MemDesc:
    """A view of shared memory, in kernels a shared_memory_descriptor."""

    def __init__(
        self,
        allocation: Allocation,
        view: np.ndarray,
        written: np.ndarray,
        layout,
        suffix: str = "",
        alloc_shape: list[int] | None = None,
    ):
        self.allocation, self.view, self.written, self.layout = allocation, view, written, layout
        self.suffix = suffix
        self.alloc_shape = alloc_shape or list(view.shape)
        self.spread = 1  # 1 + its index in the allocation's spreads
        self.outside = ""  # why an access to this view is an error; the address alone is harmless
        self.views: dict[Any, MemDesc] = {}  # the views of this view so far
        start = view.__array_interface__["data"][0] - allocation.data.__array_interface__["data"][0]
        self.key = (start, view.shape, view.strides)

    dtype = element_ty = property(lambda self: self.allocation.dtype)
    shape = property(lambda self: Shape(self.view.shape))
    rank = property(lambda self: self.view.ndim)
    numel = property(lambda self: self.view.size)
    type = property(lambda self: self)  # buffers.type.shape, buffers.type.layout
    nbytes_per_cta = property(
        lambda self: math.prod(layouts.per_block(list(self.shape), self.layout)) * self.dtype.primitive_bitwidth // 8
    )
    nbytes = property(lambda self: self.view.size * self.dtype.primitive_bitwidth // 8)
    label = property(lambda self: self.allocation.label + self.suffix)
    handle = property(lambda self: self)  # for builtins of a kernel's author
    values = property(lambda self: self.view)  # the values for a product or a copy

    def __repr__(self) -> str:
        return f"<shared memory {self.label}: {self.dtype}{list(self.shape)}, {self.layout}>"

    def __getattr__(self, name):
        text = f"gluon_cpu does not know the method .{name} of shared memory"
        hint = "Load the tile with .load(layout), compute in registers, and .store(...) it"
        refuse("unknown operation", f"{text}. {hint}; a sum of several threads goes to global memory by gl.atomic_add.")

    def __getitem__(self, index):
        refuse("kernel", f"{self.label}[...] is not how shared memory is indexed: {self.label}.index(i) is slot i.")

    def check_inside(self) -> None:
        """Refuse a view that lies outside of its memory."""
        if self.outside:
            refuse("out of bounds", self.outside)

    # ---- views ----------------------------------------------------------------------------------------------------

    def index(self, index) -> MemDesc:
        """Return the subview at `index` of the first dimension."""
        i = number(index, "the index into shared memory")
        if i in self.views:
            return self.views[i]
        if self.rank < 2:
            refuse("layout", f"{self.label} has shape {list(self.shape)}; .index needs two dimensions or more.")
        slots = self.view.shape[0]
        inside = min(max(i, 0), slots - 1)
        slot = MemDesc(self.allocation, self.view[inside], self.written[inside], self.layout, f"{self.suffix}[{i}]")
        slot.spread = self.spread
        if i != inside:
            slots_text = f"there are {slots} slots, 0 to {slots - 1}"
            sign = " (In Triton -1 % n is -1, as in C.)" if i < 0 else ""
            slot.outside = f"{slot.label}: {slots_text}.{sign}"
        self.views[i] = slot
        return slot

    def slice(self, start, length, dim=0) -> MemDesc:
        """Return the subview [start, start + length) along a dimension."""
        start, length, dim = constant(start, "slice's start"), constant(length, "slice's length"), constant(dim, "dim")
        if start < 0 or length < 1 or start + length > self.view.shape[dim]:
            refuse("layout", f"{self.label}.slice({start}, {length}, dim={dim}) leaves its shape {list(self.shape)}.")
        layouts.check_block([length], f"{self.label}.slice")
        if any(basis[dim - self.rank] for basis in layouts.block_bases(self.layout) if self.rank - dim <= len(basis)):
            text = f"gluon_cpu does not cut {self.label} along a dimension that is spread over the blocks of a cluster"
            refuse("unknown operation", f"{text}. Allocate the parts, or cut before: .index(i) takes a slot.")
        at = tuple(slice(start, start + length) if d == dim else slice(None) for d in range(self.rank))
        text = ", ".join(f"{start}:{start + length}" if d == dim else ":" for d in range(dim + 1))
        return self._view(self.view[at], self.written[at], self.layout, f"{self.suffix}[{text}]", self.alloc_shape)

    def permute(self, order) -> MemDesc:
        """Return the same memory with its dimensions in another order."""
        order = constants(order, "permute's order")
        if (key := ("permute", *order)) in self.views:
            return self.views[key]
        layout = layouts.view(self.layout, list(self.shape), "permute of memory", tuple(order), self.dtype)
        alloc_shape = [self.alloc_shape[-self.rank :][o] for o in order]
        view, written = self.view.transpose(order), self.written.transpose(order)
        self.views[key] = self._view(view, written, layout, self.suffix, alloc_shape)
        return self.views[key]

    def reshape(self, shape) -> MemDesc:
        """Return the same memory with another shape."""
        shape = constants(shape, "reshape's shape")
        if (key := ("reshape", *shape)) in self.views:
            return self.views[key]
        if math.prod(shape) != self.view.size:
            text = f"{self.label} has shape {list(self.shape)}, {self.view.size} elements"
            refuse("layout", f"{text}; it cannot become {shape}.")
        layout = layouts.view(self.layout, list(self.shape), "reshape of memory", tuple(shape), self.dtype)
        view, written = self.view.reshape(shape), self.written.reshape(shape)
        if not np.may_share_memory(view, self.view):  # NumPy has made a copy
            return Rearranged(self, shape, layout)
        self.views[key] = self._view(view, written, layout, self.suffix)
        return self.views[key]

    def _reinterpret(self, dtype=None, shape=None, layout=None) -> MemDesc:
        """Return the start of the same memory with another shape and layout, so that a kernel can use a free slot again.

        Values must be read through the layout of their write, or through a layout that puts elements in the same places. The
        simulator keeps values by their place in the tile, not by their address, so it refuses another dtype.
        """
        shape = list(self.shape) if shape is None else constants(shape, "_reinterpret's shape")
        layout = self.layout if layout is None else layout
        if dtype is not None and dtype.name != self.dtype.name:
            text = f"gluon_cpu cannot read {self.label}, {self.dtype}, as {dtype}"
            refuse("unknown operation", f"{text}; allocate memory of that type instead.")
        size = math.prod(shape)
        if size > self.view.size or not self.view.flags.c_contiguous:
            text = f"{self.label} has {self.view.size} elements that lie in order"
            refuse("layout", f"_reinterpret: {text}; {shape} needs {size}.")
        layouts.check_shared(layout, self.dtype, shape)
        parts = [math.prod(layouts.per_block(x, y)) for x, y in ((shape, layout), (self.shape, self.layout))]
        if parts[0] > parts[1]:
            text = f"each block has {parts[1]} elements of {self.label}"
            refuse("layout", f"_reinterpret: {text}; {shape} needs {parts[0]}.")
        view, written = (array.reshape(-1)[:size].reshape(shape) for array in (self.view, self.written))
        subview = self._view(view, written, layout, f"{self.suffix} as {shape}")
        spreads, places = self.allocation.spreads, layouts.places(layout, shape)
        if places != layouts.places(self.layout, list(self.shape)):
            if places not in spreads:
                spreads.append(places)
            subview.spread = spreads.index(places) + 1
        return subview

    reinterpret = _reinterpret  # its name from Triton 3.9 on

    def _view(self, view, written, layout, suffix, alloc_shape=None) -> MemDesc:
        subview = MemDesc(self.allocation, view, written, layout, suffix, alloc_shape)
        subview.outside, subview.spread = self.outside, self.spread
        return subview

    def _keep_alive(self) -> None:  # notes that the memory is in use here
        self.allocation.last = context.program().steps

    # ---- ordinary access ------------------------------------------------------------------------------------------

    def _spend(self, kind: str) -> None:
        program = context.program()
        cycles = program.model.shared_latency + self.nbytes / program.num_ctas / program.model.shared_bytes
        program.spend(cycles, kind, self.label)

    def load(self, layout=None):
        """Return a tensor with this memory's values."""
        layout = layouts.register_layout(layout, list(self.shape), f"{self.label}.load")
        layouts.check_same_blocks(self, layout, "load")
        reads = access(self, write=False, what=f"the load of {self.label}")
        self._spend("shared load")
        return Tensor(self.values.copy(), self.dtype, layout, reads=reads)

    def check_value(self, value) -> None:
        """Refuse a tensor of another shape or dtype."""
        if list(value.shape) != list(self.shape) or value.dtype.name != self.dtype.name:
            text = f"{self.label} holds {self.dtype}{list(self.shape)}; values {value.dtype}{list(value.shape)}"
            hint = "Shapes and dtypes must match: use .to(...), .reshape(...) or another view."
            refuse("layout", f"{text} cannot be stored there. {hint}")

    def store(self, value) -> None:
        """Store a tensor of the same shape and dtype."""
        self.check_value(value)
        layouts.check_same_blocks(self, value.layout, "store")
        data = value.data
        access(self, write=True, what=f"the store into {self.label}")
        self._spend("shared store")
        self.view[...] = data

    def _check_places(self, indices, axis: int, operation: str) -> None:
        """Refuse indices that name no element along an axis, or memory of another block of the cluster."""
        layouts.check_same_blocks(self, indices.layout, operation)
        check_indices(f"{self.label}.{operation}", indices, axis, self.view.shape[axis])

    def gather(self, indices, axis):
        """Return elements along an axis, by a tensor of indices."""
        axis = constant(axis, "gather's axis")
        self._check_places(indices, axis, "gather")
        access(self, write=False, what=f"the gather from {self.label}")
        return Tensor(np.take_along_axis(self.view, indices.data, axis), self.dtype, indices.layout)

    def scatter(self, values, indices, axis) -> None:
        """Write elements along an axis, by a tensor of indices."""
        axis = constant(axis, "scatter's axis")
        self._check_places(indices, axis, "scatter")
        access(self, write=True, what=f"the scatter into {self.label}", covers=False)
        np.put_along_axis(self.view, indices.data, values.data, axis)


def check_indices(what: str, indices, axis: int, size: int) -> None:
    """Refuse indices that name no element along an axis."""
    wrong = indices.data[(indices.data < 0) | (indices.data >= size)]
    if wrong.size:
        text = f"{what}: index {int(wrong[0])} along dimension {axis}, which has {size} elements"
        hint = "Clamp the indices first: a GPU reads or writes something else"
        refuse("out of bounds", f"{text}, 0 to {size - 1}. {hint}.")


class Rearranged(MemDesc):
    """Memory in an order that strides cannot express, such as scales for tcgen05_copy. It can only be read as a whole."""

    def __init__(self, source: MemDesc, shape: list[int], layout):
        self.tile = shape
        super().__init__(source.allocation, source.view, source.written, layout, source.suffix, shape)
        self.outside, self.spread = source.outside, source.spread

    shape = property(lambda self: Shape(self.tile))
    rank = property(lambda self: len(self.tile))
    values = property(lambda self: self.view.reshape(self.tile))

    def _refuse(self, *_, **__):
        text = f"gluon_cpu reads {self.label} as a whole, once it is reshaped after a permute"
        refuse("unknown operation", f"{text}. Cut or store it before that.")

    index = slice = permute = reshape = _reinterpret = reinterpret = store = gather = scatter = _refuse


def allocate(dtype, shape, layout, value=None) -> MemDesc:
    """Allocate shared memory, as gl.allocate_shared_memory does."""
    program = context.program()
    shape = constants(shape, "the shape of shared memory")
    layouts.check_shared(layout, dtype, shape)
    allocation = Allocation(dtype, shape, layout, len(program.allocations))
    program.allocations.append(allocation)
    program.labels.clear()
    desc = MemDesc(allocation, allocation.data, allocation.written, layout)
    if value is not None:
        desc.store(value)
    return desc


def finish(program) -> None:
    """Check at the end of a program for reads of unwritten memory, and for too much memory in use at once."""
    for read in program.unwritten_reads:
        text = f"{capitalize(read.what)} reads bytes that nothing has written."
        report("uninitialized", text, at=read.site, partition=read.partition)
    program.unwritten_reads = []
    _check_size(program.allocations, "bytes", "shared memory", SHARED_BYTES)
    _check_size(program.tensor_memory, "columns", "tensor memory", COLUMNS)


def _check_size(allocations: list, unit: str, memory: str, limit: int) -> None:
    """Report the first allocation that does not fit beside the other memory in use."""
    for step in sorted({a.first for a in allocations}):
        alive = [a for a in allocations if a.first <= step <= a.last]
        total = sum(getattr(a, unit) for a in alive)
        if total > limit:
            parts = ", ".join(f"{a.label}: {getattr(a, unit)}" for a in alive[:8])
            text = f"{total} {unit} of {memory} are in use at once; a block has {limit} ({parts})."
            report("layout", text, at=alive[-1].site)
            return
