"""Shared memory: allocations, views of them, and who accessed what.

Every access leaves a record: which bytes, read or write, through which proxy, and the clock event that says it is
over. A new access must come after every record that it overlaps, unless both read; if nothing orders them that is a
race, whatever the order in this run. An asynchronous access after an ordinary one needs a fence as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from . import context, layouts
from .clocks import Clock
from .dtypes import numpy_type
from .known import constant, number
from .reports import Site
from .tensors import Shape, Tensor

SHARED_BYTES = 232448  # what one block of an H100 or H200 may use: 227 KiB


@dataclass(slots=True, eq=False)
class Access:
    """One access to shared memory; over for whoever's clock has `time` at `component`."""

    key: tuple
    view: np.ndarray
    write: bool
    asynchronous: bool  # through the async proxy: TMA and wgmma
    component: tuple
    time: int
    what: str  # "the TMA copy into ring[1]"
    site: Site
    partition: str
    barrier: object = None  # the mbarrier that tells of its end, and in which phase
    phase: int = 0
    covers: bool = True


class Allocation:
    """One gl.allocate_shared_memory."""

    def __init__(self, dtype, shape: list[int], layout, index: int):
        self.dtype, self.shape, self.layout, self.index = dtype, shape, layout, index
        self.name = ""  # the first variable that held it, and
        self.path = ""  # the path to it through an aggregate, such as ring.bars.full
        self.data = np.zeros(shape, numpy_type(dtype))
        self.written = np.zeros(shape, np.bool_)
        self.records: list[Access] = []
        self.barriers: dict[int, object] = {}
        self.bytes = math.prod(shape) * dtype.primitive_bitwidth // 8
        self.site = context.site()
        self.first = self.last = context.program().steps

    @property
    def label(self) -> str:
        # A function that makes rings gives the memory of each the same name: then the path says which ring is meant.
        if self.path and (
            not self.name or any(a.name == self.name and a is not self for a in context.program().allocations)
        ):
            return self.path
        return self.name or f"shared memory of line {self.site.line}"


_overlaps: dict[tuple, bool] = {}


def _overlap(a: Access, key: tuple, view: np.ndarray) -> bool:
    if a.key == key:
        return True
    if not np.may_share_memory(a.view, view):
        return False
    pair = (a.key, key, a.view.itemsize)
    if pair not in _overlaps:
        if len(_overlaps) > 50000:
            _overlaps.clear()
        _overlaps[pair] = bool(np.shares_memory(a.view, view))
    return _overlaps[pair]


def is_over(access: Access, clock: Clock) -> bool:
    return clock.get(access.component, 0) >= access.time


class MemDesc:
    """A view of shared memory: what a kernel calls a shared_memory_descriptor."""

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
        self.outside = ""  # why this view may not be used: an address outside is harmless until then
        start = view.__array_interface__["data"][0] - allocation.data.__array_interface__["data"][0]
        self.key = (start, view.shape, view.strides)

    dtype = property(lambda self: self.allocation.dtype)
    shape = property(lambda self: Shape(self.view.shape))
    rank = property(lambda self: self.view.ndim)
    numel = property(lambda self: self.view.size)
    type = property(lambda self: self)  # buffers.type.shape, buffers.type.layout
    element_ty = property(lambda self: self.allocation.dtype)
    nbytes = property(lambda self: self.view.size * self.dtype.primitive_bitwidth // 8)
    label = property(lambda self: self.allocation.label + self.suffix)

    def __repr__(self) -> str:
        return f"<shared memory {self.label}: {self.dtype}{list(self.shape)}, {self.layout}>"

    def __getattr__(self, name):
        context.refuse("unknown operation", f"gluon_cpu does not know the method .{name} of shared memory.")

    # ---- views ----------------------------------------------------------------------------------------------------

    def index(self, index) -> MemDesc:
        """The subview at `index` of the first dimension."""
        i = number(index, "the index into shared memory")
        if self.rank < 2:
            context.refuse("layout", f"{self.label} has shape {list(self.shape)}; .index needs two dimensions or more.")
        slots = self.view.shape[0]
        inside = min(max(i, 0), slots - 1)
        found = MemDesc(self.allocation, self.view[inside], self.written[inside], self.layout, f"{self.suffix}[{i}]")
        if i != inside:
            found.outside = (
                f"{found.label}: there are {slots} slots, 0 to {slots - 1}. (In Triton -1 % n is -1, as in C.)"
            )
        return found

    def slice(self, start, length, dim=0) -> MemDesc:
        """The subview [start, start + length) along a dimension."""
        start, length, dim = (
            constant(x, "slice's " + name) for x, name in ((start, "start"), (length, "length"), (dim, "dim"))
        )
        if start < 0 or length < 1 or start + length > self.view.shape[dim]:
            context.refuse(
                "layout", f"{self.label}.slice({start}, {length}, dim={dim}) leaves its shape {list(self.shape)}."
            )
        at = tuple(slice(start, start + length) if d == dim else slice(None) for d in range(self.rank))
        text = ", ".join(f"{start}:{start + length}" if d == dim else ":" for d in range(dim + 1))
        return self._view(self.view[at], self.written[at], self.layout, f"{self.suffix}[{text}]", self.alloc_shape)

    def permute(self, order) -> MemDesc:
        """The same memory with its dimensions in another order."""
        order = [constant(o, "permute's order") for o in order]
        layout = layouts.shared_view(self.dtype, list(self.shape), self.layout, "permute", tuple(order))
        return self._view(
            self.view.transpose(order),
            self.written.transpose(order),
            layout,
            self.suffix,
            [self.alloc_shape[-self.rank :][o] for o in order],
        )

    def reshape(self, shape) -> MemDesc:
        """The same memory with another shape."""
        shape = [constant(s, "reshape's shape") for s in shape]
        if math.prod(shape) != self.view.size:
            context.refuse(
                "layout",
                f"{self.label} has shape {list(self.shape)}, {self.view.size} elements; it cannot become {shape}.",
            )
        layout = layouts.shared_view(self.dtype, list(self.shape), self.layout, "reshape", tuple(shape))
        view, written = self.view.reshape(shape), self.written.reshape(shape)
        if not np.may_share_memory(view, self.view):
            context.refuse(
                "unknown operation",
                f"gluon_cpu cannot reshape {self.label}: this view does not lie in "
                "order. Reshape before .permute or .slice.",
            )
        return self._view(view, written, layout, self.suffix)

    def _view(self, view, written, layout, suffix, alloc_shape=None) -> MemDesc:
        found = MemDesc(self.allocation, view, written, layout, suffix, alloc_shape)
        found.outside = self.outside
        return found

    def _keep_alive(self) -> None:
        self.allocation.last = context.program().steps

    # ---- ordinary access ------------------------------------------------------------------------------------------

    def load(self, layout=None):
        """A tensor with this memory's values."""
        program = context.program()
        layout = layouts.distributed(layout, list(self.shape), f"{self.label}.load")
        access(self, write=False, what=f"the load of {self.label}")
        program.spend(
            program.model.shared_latency + self.nbytes / program.model.shared_bytes, "shared load", self.label
        )
        return Tensor(self.view.copy(), self.dtype, layout)

    def store(self, value) -> None:
        """Store a tensor of the same shape and dtype."""
        program = context.program()
        if list(value.shape) != list(self.shape) or value.dtype.name != self.dtype.name:
            context.refuse(
                "layout",
                f"{self.label} holds {self.dtype}{list(self.shape)}; a tensor "
                f"{value.dtype}{list(value.shape)} cannot be stored there. Shapes and dtypes must match: "
                "use .to(...) or .reshape(...).",
            )
        data = value.data
        access(self, write=True, what=f"the store into {self.label}")
        program.spend(
            program.model.shared_latency + self.nbytes / program.model.shared_bytes, "shared store", self.label
        )
        self.view[...] = data

    def gather(self, indices, axis):
        """Elements along an axis by a tensor of indices."""
        axis = constant(axis, "gather's axis")
        access(self, write=False, what=f"the gather from {self.label}")
        return Tensor(np.take_along_axis(self.view, indices.data, axis), self.dtype, indices.layout)

    def scatter(self, values, indices, axis) -> None:
        """Write elements along an axis by a tensor of indices."""
        axis = constant(axis, "scatter's axis")
        access(self, write=True, what=f"the scatter into {self.label}", covers=False)
        np.put_along_axis(self.view, indices.data, values.data, axis)


def allocate(dtype, shape, layout, value=None) -> MemDesc:
    """gl.allocate_shared_memory."""
    program = context.program()
    shape = [constant(s, "the shape of shared memory") for s in shape]
    layouts.check_shared(layout, dtype, shape)
    allocation = Allocation(dtype, shape, layout, len(program.allocations))
    program.allocations.append(allocation)
    desc = MemDesc(allocation, allocation.data, allocation.written, layout)
    if value is not None:
        desc.store(value)
    return desc


def access(
    desc: MemDesc,
    *,
    write: bool,
    what: str,
    asynchronous: bool = False,
    component: tuple | None = None,
    time: int = 0,
    barrier=None,
    phase: int = 0,
    covers: bool = True,
) -> Access:
    """Check an access against all before it, and remember it. Without `component` it is an ordinary one."""
    if desc.outside:
        context.refuse("out of bounds", desc.outside)
    program = context.program()
    p = program.partition
    allocation = desc.allocation
    allocation.last = program.steps
    if component is None:
        component, time = p.me, p.tick()
    new = Access(
        desc.key, desc.view, write, asynchronous, component, time, what, context.site(), p.name, barrier, phase, covers
    )
    keep = []
    for old in allocation.records:
        if not _overlap(old, desc.key, desc.view):
            keep.append(old)
            continue
        if write or old.write:
            if not is_over(old, p.clock):
                _race(old, new, desc, p)
            elif asynchronous and not old.asynchronous and p.fenced.get(old.component, 0) < old.time:
                _missing_fence(old, new, desc)
            if write and covers and (old.key == desc.key or _contains(new, old)):
                continue  # ordered before this one: whoever comes after this one comes after that one
        elif old.key == desc.key and old.component == component:
            continue  # the same reader again: the later read stands for both
        keep.append(old)
    keep.append(new)
    allocation.records = keep
    if write:
        if covers:
            desc.written[...] = True
    elif not desc.written.all():
        program.unwritten_reads.append(new)
    return new


def _contains(outer: Access, inner: Access) -> bool:
    """Whether a contiguous view covers another one."""
    if not outer.view.flags.c_contiguous:
        return False
    low, shape, strides = inner.key
    high = low + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + inner.view.itemsize
    return outer.key[0] <= low and high <= outer.key[0] + outer.view.nbytes


def _hint(old: Access, p) -> str:
    if old.barrier is None:
        return ""
    text = f" Its end is told by {old.barrier.name}, phase {old.phase} (parity {old.phase & 1})"
    if old.barrier in p.last_wait:
        parity, phase, site = p.last_wait[old.barrier]
        text += (
            f"; {p.name} last waited there for parity {parity} at line {site.line}, "
            f"when {phase} phase{'s were' if phase != 1 else ' was'} over"
        )
    else:
        text += f"; {p.name} never waited for it"
    return text + "."


def _race(old: Access, new: Access, desc: MemDesc, p) -> None:
    where = f"{old.what} ({old.partition}, {old.site})"
    unwritten = next((r for r in context.program().unwritten_reads if r is old), None)
    if unwritten is not None:
        context.program().unwritten_reads.remove(unwritten)
        reader = context.program().partitions[old.component[1]]
        context.report(
            "race",
            f"{_upper(old.what)} comes before {new.what} ({new.partition}, {new.site}) has "
            "written there: nothing makes it wait for that." + _hint(new, reader),
            at=old.site,
            others=(new.site,),
            partition=old.partition,
        )
        return
    if old.write and not new.write:
        text = f"{_upper(new.what)} may come before {where} has written there: nothing orders them."
    elif old.write:
        text = f"{_upper(new.what)} may mix with {where}: two writes to the same bytes, and nothing orders them."
    else:
        text = f"{_upper(new.what)} may overwrite what {where} still reads: nothing orders them."
    if old.component[0] == "wgmma":
        text += " warpgroup_mma_wait tells when a wgmma has read its operands."
    elif old.component[0] == "tma store":
        text += " tma.store_wait tells when a TMA store has read its buffer."
    elif old.component[0] == "cp.async":
        text += " async_copy.wait_group tells when a cp.async has written."
    context.report("race", text + _hint(old, p), others=(old.site,))


def _missing_fence(old: Access, new: Access, desc: MemDesc) -> None:
    context.report(
        "missing fence",
        f"{_upper(new.what)} goes through the async proxy; {old.what} "
        f"({old.partition}, {old.site}) was an ordinary access. They are in order, but without "
        "fence_async_shared() between them the async proxy need not see that.",
        others=(old.site,),
    )


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def finish(program) -> None:
    """Checks at the end of a program: reads of what nobody wrote, and how much memory was alive at once."""
    for read in program.unwritten_reads:
        context.report(
            "uninitialized",
            f"{_upper(read.what)} reads bytes that nothing has written.",
            at=read.site,
            partition=read.partition,
        )
    program.unwritten_reads = []
    ends = sorted({a.first for a in program.allocations})
    for step in ends:
        alive = [a for a in program.allocations if a.first <= step <= a.last]
        total = sum(a.bytes for a in alive)
        if total > SHARED_BYTES:
            context.report(
                "layout",
                f"{total} bytes of shared memory are in use at once ("
                + ", ".join(f"{a.label}: {a.bytes}" for a in alive)
                + f"); a block of an H100 or H200 has {SHARED_BYTES}.",
                at=alive[-1].site,
            )
            return
