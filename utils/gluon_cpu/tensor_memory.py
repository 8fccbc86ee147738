"""Blackwell's tensor memory: 512 columns of 128 lanes in each block, 32 bits each.

The products of tcgen05.py write there, and may read A and scales from there. Partitions of 4 or 8 warps load and store it; each
warp has the 32 lanes of its own quarter. Views of different types may share columns: a read must have the type of the last
write.
"""

from __future__ import annotations

import inspect
import math
import operator

import numpy as np
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell

from utils.machine import versions

from . import context, layouts
from .accesses import access
from .barriers import is_true
from .context import refuse
from .dtypes import numpy_type
from .known import constant, constants, known, number, unwrap
from .memory import Allocation, MemDesc
from .tensors import Shape, Tensor

LANES = 128
VARIANTS = ("32x32b", "16x64b", "16x128b", "16x256b", "32x32b_splitn")  # instructions for loads and stores


def stride_of(layout) -> int:
    """Return the distance of neighbours in a row, counted in elements; scales have the distance 1."""
    return getattr(layout, "col_stride", 1)


def _columns(dtype, layout, elements: int) -> int:
    """Return the number of columns for a row of elements."""
    return max(1, elements * dtype.primitive_bitwidth * stride_of(layout) // 32)


def _columns_in_a_block(dtype, shape: list[int], layout) -> int:
    """Return an allocation's number of columns in a block: tiles of 64 rows share columns, and so do 128 rows of scales."""
    *rows, width = layouts.per_block(shape, layout)
    height = math.prod(rows)
    if isinstance(layout, blackwell.TensorMemoryScalesLayout):
        return max(1, height // 32) * _columns(dtype, layout, width)
    block = layout.block[0]
    packed = 2 if block == LANES // 2 and height % LANES == 0 else 1
    return max(height // block // packed, 1) * max(block // LANES, 1) * _columns(dtype, layout, width)


class Columns(Allocation):
    """The columns of one allocate_tensor_memory. `data` has their bytes, to find overlaps; `values` has their values by type."""

    kind = "tensor memory"

    def __init__(self, dtype, shape: list[int], layout):
        super().__init__(dtype, shape, gl.SwizzledSharedLayout(1, 1, 1, list(range(len(shape)))[::-1]), -1)
        self.layout = layout
        rows = [*shape[:-1], _columns(dtype, layout, shape[-1])]
        self.data = np.zeros(rows, np.uint32)
        self.written = np.zeros(rows, np.int8)
        self.writer: np.ndarray = np.zeros(rows, np.int8)  # 0, or the number of the type in `values` that wrote it
        self.values: dict[tuple[str, int], np.ndarray] = {}
        self.columns = _columns_in_a_block(dtype, shape, layout)

    def plane(self, dtype, stride: int) -> tuple[int, np.ndarray]:
        """Return the number of a type in this memory, and the values of that type."""
        key = dtype.name, stride
        if key not in self.values:
            each = 32 // (dtype.primitive_bitwidth * stride)
            self.values[key] = np.zeros([*self.data.shape[:-1], self.data.shape[-1] * each], numpy_type(dtype))
        return list(self.values).index(key) + 1, self.values[key]


class TensorMemory(MemDesc):
    """A view of tensor memory, in kernels a tensor_memory_descriptor."""

    allocation: Columns

    def __init__(
        self,
        allocation: Columns,
        dtype,
        shape: list[int],
        layout,
        place: tuple = (),
        first: int = 0,
        suffix: str = "",
        alloc_shape: list[int] | None = None,
    ):
        self.element, self.logical, self.place, self.first = dtype, shape, place, first
        end = first + _columns(dtype, layout, shape[-1])
        at = (*place, Ellipsis, slice(first, end))
        super().__init__(allocation, allocation.data[at], allocation.written[at], layout, suffix, alloc_shape or shape)
        self.writer, self.end = allocation.writer[at], end

    dtype = element_ty = property(lambda self: self.element)
    shape = property(lambda self: Shape(self.logical))
    rank = property(lambda self: len(self.logical))
    numel = property(lambda self: math.prod(self.logical))
    nbytes = property(lambda self: self.numel * self.dtype.primitive_bitwidth // 8)

    def __repr__(self) -> str:
        return f"<tensor memory {self.label}: {self.dtype}{list(self.shape)}, {self.layout}>"

    def __getattr__(self, name):
        hint = "it is loaded into registers by .load(layout), and stored by .store(value)"
        refuse("unknown operation", f"tensor memory has no method .{name}: {hint}.")

    @property
    def values(self) -> np.ndarray:
        """The values for a product or a load; writing to them changes the memory."""
        plane = self.allocation.plane(self.dtype, stride_of(self.layout))[1]
        each = 32 // (self.dtype.primitive_bitwidth * stride_of(self.layout))
        return plane[(*self.place, Ellipsis, slice(self.first * each, self.first * each + self.logical[-1]))]

    def _claim(self) -> None:
        """Remember that this type has written here."""
        self.writer[...] = self.allocation.plane(self.dtype, stride_of(self.layout))[0]

    def check_type(self, what: str) -> None:
        """Refuse a read if another type has written these columns."""
        mine = self.allocation.plane(self.dtype, stride_of(self.layout))[0]
        others = self.writer[(self.writer != mine) & (self.writer != 0)]
        if others.size:
            name, stride = list(self.allocation.values)[int(others[0]) - 1]
            text = f"{what}: {self.label} is read as {self.dtype}, and its columns were written as {name}"
            refuse("layout", f"{text} (col_stride {stride}). Views that share columns do not convert values.")

    # ---- views ----------------------------------------------------------------------------------------------------

    def index(self, index) -> TensorMemory:
        """Return the subview at `index` of the first dimension."""
        i = number(index, "the index into tensor memory")
        if self.rank < 3:
            refuse("layout", f"{self.label} has shape {list(self.shape)}; .index needs three dimensions or more.")
        inside = min(max(i, 0), self.logical[0] - 1)
        view = self._derived(self.dtype, self.logical[1:], self.layout, (*self.place, inside), self.first, f"[{i}]")
        if i != inside:
            view.outside = f"{view.label}: there are {self.logical[0]} tiles, 0 to {self.logical[0] - 1}."
        return view

    def slice(self, start, length, dim=None) -> TensorMemory:
        """Return the columns [start, start + length) of each row."""
        start, length = constant(start, "slice's start"), constant(length, "slice's length")
        takes = "dim" in inspect.signature(blackwell.tensor_memory_descriptor.slice).parameters
        if dim is not None and not (takes and dim == self.rank - 1):
            no = "no other dim" if takes else "no dim in this Triton"
            refuse("unknown operation", f"{self.label}.slice cuts the last dimension and takes {no}; got dim={dim}.")
        if start < 0 or length < 1 or start + length > self.logical[-1]:
            refuse("layout", f"{self.label}.slice({start}, {length}) leaves its shape {list(self.shape)}.")
        layout = self.layout
        if not versions.clusters_are_complete():  # before Triton 3.8 a slice's block is as narrow as the slice
            block = (layout.block[0], min(layout.block[1], length))
            layout = blackwell.TensorMemoryLayout(block, layout.col_stride)
        first = self.first + _columns(self.dtype, self.layout, start) if start else self.first
        suffix, shape = f"[:, {start}:{start + length}]", [*self.logical[:-1], length]
        return self._derived(self.dtype, shape, layout, self.place, first, suffix, self.alloc_shape)

    def _reinterpret(self, dtype=None, shape=None, layout=None) -> TensorMemory:
        """Return the first columns of the same memory as another type, for example for P in the place of its scores."""
        dtype, layout = dtype or self.dtype, layout or self.layout
        shape = self.logical if shape is None else constants(shape, "_reinterpret's shape")
        _check_layout(dtype, shape, layout)
        if shape[:-1] != self.logical[:-1] or _columns(dtype, layout, shape[-1]) > self.end - self.first:
            text = f"{self.label} has shape {list(self.shape)} in {self.end - self.first} columns"
            need = _columns(dtype, layout, shape[-1])
            refuse("layout", f"_reinterpret: {text}; {dtype}{shape} needs the same rows and {need} columns.")
        return self._derived(dtype, shape, layout, self.place, self.first, f" as {dtype}")

    reinterpret = _reinterpret  # its name from Triton 3.9 on

    def _derived(self, dtype, shape, layout, place, first, suffix, alloc_shape=None) -> TensorMemory:
        view = TensorMemory(self.allocation, dtype, shape, layout, place, first, self.suffix + suffix, alloc_shape)
        view.outside = self.outside
        return view

    def permute(self, order):
        """Refuse: tensor memory has lanes and columns, and no instruction swaps them."""
        hint = "permute B in shared memory instead"
        refuse("layout", f"{self.label}.permute: tensor memory cannot be transposed; {hint}.")

    reshape = permute

    # ---- load and store ---------------------------------------------------------------------------------------------

    def _check_registers(self, layout, what: str) -> None:
        warps = context.partition().num_warps
        if warps not in (4, 8):
            text = "each warp reaches the 32 lanes of its own quarter of tensor memory, so 4 or 8 warps are needed"
            refuse("layout", f"{what}: {text}; this partition has {warps}.")
        if self.rank != 2:
            refuse("layout", f"{what}: shape {list(self.shape)}; take one tile by .index(i).")
        if isinstance(layout, gl.AutoLayout):
            return
        tile = (self.dtype, self.logical, self.alloc_shape, self.layout, warps)
        if not any(same_registers(layout, wanted, self.logical) for wanted in register_layouts(*tile)):
            advice = "take the layout of get_tmem_reg_layout(dtype, shape, tmem.layout, gl.num_warps()), and gl.convert_layout"
            refuse("layout", f"{what}: no instruction moves tensor memory from or to {layout}; {advice}.")

    if hasattr(blackwell.tensor_memory_descriptor, "get_reg_layout"):  # from Triton 3.8 on

        def get_reg_layout(self, num_warps=None, instr_variant="32x32b"):
            """Return the register layout of an instruction that loads and stores this memory."""
            warps = context.partition().num_warps if num_warps is None else num_warps
            return get_tmem_reg_layout(
                self.dtype, self.logical, self.layout, warps, instr_variant, alloc_shape=self.alloc_shape
            )

    def load(self, layout=None):
        """Return a tensor with the values."""
        what = f"{self.label}.load"
        layout = self.get_reg_layout() if layout is None else layout
        layout = layouts.register_layout(layout, list(self.shape), what)
        self._check_registers(layout, what)
        reads = access(self, write=False, asynchronous=True, what=f"the load of {self.label}")
        self.check_type(what)
        self._spend("tensor memory load")
        return Tensor(self.values.copy(), self.dtype, layout, reads=reads)

    def store(self, value, pred=True) -> None:
        """Store a tensor of the same shape and type."""
        what = f"{self.label}.store"
        self.check_value(value)
        self._check_registers(value.layout, what)
        if not is_true(pred):
            return
        data = value.data
        access(self, write=True, asynchronous=True, what=f"the store into {self.label}")
        self._spend("tensor memory store")
        self._claim()
        self.values[...] = data

    def _spend(self, kind: str) -> None:
        program = context.program()
        cycles = program.model.tensor_memory_latency + 4 * self.view.size / program.model.tensor_memory_bytes
        program.spend(cycles, kind, self.label)


_registers: dict[tuple, list] = {}  # {(type, shapes, text of a layout, warps): register layouts}


def register_layouts(dtype, shape: list[int], alloc_shape: list[int], layout, warps: int) -> list:
    """Return the register layouts for tcgen05's loads and stores, one for each instruction that fits."""
    key = (dtype.name, tuple(shape), tuple(alloc_shape), layout.mangle(), warps)
    if key not in _registers:
        found = _registers[key] = []
        for variant in VARIANTS:
            try:
                found.append(versions.tensor_memory_registers(dtype, shape, alloc_shape, layout, warps, variant))
            except Exception:  # this instruction does not fit the tile: Triton raises many kinds of errors
                continue
    return _registers[key]


def same_registers(layout, wanted, shape: list[int]) -> bool:
    """Return whether two register layouts give each element to the same lane of the same warp, in any order of registers."""
    a, b = (layouts.linear(x, shape) for x in (layout, wanted))
    return (
        a.lane_bases == b.lane_bases
        and a.warp_bases == b.warp_bases
        and _registers_of(a, shape) == _registers_of(b, shape)
    )


def _registers_of(layout, shape: list[int]) -> list[list[int]]:
    """Return the register steps of a layout inside of a tile: drop steps beyond the tile, and repeat a layout that is too small."""
    steps = [basis for basis in layout.reg_bases if any(basis) and all(map(operator.lt, basis, shape))]
    for d, (covered, size) in enumerate(zip(layout.shape, shape, strict=True)):
        while covered < size:
            steps.append([covered if axis == d else 0 for axis in range(len(shape))])
            covered *= 2
    return sorted(steps)


def _check_layout(dtype, shape: list[int], layout) -> None:
    if isinstance(layout, blackwell.TensorMemoryScalesLayout) and dtype.primitive_bitwidth == 8:
        return
    if not isinstance(layout, blackwell.TensorMemoryLayout):
        refuse("layout", f"Tensor memory needs a TensorMemoryLayout; got {layout!r}.")
    if len(shape) < 2:
        refuse("layout", f"Tensor memory holds matrices; got the shape {shape}.")
    if context.program().num_ctas > 1 and not hasattr(layout, "cga_layout"):
        refuse("unknown operation", "gluon_cpu knows tensor memory in clusters from Triton 3.8 on.")
    (rows, columns), (m, n) = layout.block, layouts.per_block(shape, layout)[-2:]
    if rows not in (64, LANES) or m % rows or n % min(columns, n):
        text = f"TensorMemoryLayout({[rows, columns]}) does not fit a tile of {[m, n]}"
        refuse("layout", f"{text}: a block has 64 or 128 rows, and the tile is a multiple of it.")
    if dtype.primitive_bitwidth * layout.col_stride > 32:
        text = "is more than one column of 32 bits for an element"
        refuse("layout", f"col_stride {layout.col_stride} of {dtype} {text}.")


@known(of=(blackwell,))
def allocate_tensor_memory(element_ty, shape, layout, value=None) -> TensorMemory:
    """Allocate columns of tensor memory."""
    shape = constants(shape, "the shape of tensor memory")
    _check_layout(element_ty, shape, layout)
    program, allocation = context.program(), Columns(element_ty, shape, layout)
    program.tensor_memory.append(allocation)
    desc = TensorMemory(allocation, element_ty, shape, layout)
    if value is not None:
        desc.store(value)
    return desc


@known(of=(blackwell,))
def get_tmem_reg_layout(
    element_ty, shape, layout, num_warps, instr_variant="32x32b", cga_layout=(), *, alloc_shape=None
):
    """Return the register layout of an instruction that loads and stores a tile."""
    tile = [unwrap(element_ty), constants(shape, "shape"), constants(alloc_shape or shape, "shape")]
    try:
        return versions.tensor_memory_registers(*tile, *map(unwrap, (layout, num_warps, instr_variant)))
    except (AssertionError, RuntimeError, ValueError) as error:
        refuse("layout", f"get_tmem_reg_layout for {unwrap(num_warps)} warps: {error}")
