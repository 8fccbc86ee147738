"""Blackwell's tensor memory and tcgen05: accumulators in a memory of their own, products asynchronous and in order.

A block has 512 columns of 128 lanes, 32 bits each. The products write there, and may take A from there; a partition of 4 or
8 warps loads and stores it, each warp the 32 lanes of its own quarter. Views of other types share columns: what is read as one type must have been
written as that type.

A product is over for whoever has waited for an mbarrier that a `tcgen05_commit` after it arrives at. Products and copies that one
partition has issued run in their order, so none of them waits for another.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell

from . import context, layouts
from .barriers import is_true, own_barriers
from .context import refuse, report
from .dtypes import numpy_type, round_to
from .known import constant, constants, known, number, unwrap
from .memory import Allocation, MemDesc, access
from .products import exact_product
from .tensors import Shape, Tensor

COLUMNS, LANES = 512, 128
QUEUE = "tcgen05"
VARIANTS = ("32x32b", "16x64b", "16x128b", "16x256b", "32x32b_splitn")  # instructions that load and store


def _columns(dtype, layout, elements: int) -> int:
    """Return how many columns a row of elements takes."""
    return max(1, elements * dtype.primitive_bitwidth * layout.col_stride // 32)


class Columns(Allocation):
    """The columns of one allocate_tensor_memory. `data` has their bytes, for who overlaps whom; `values` what is in them."""

    def __init__(self, dtype, shape: list[int], layout):
        super().__init__(dtype, shape, gl.SwizzledSharedLayout(1, 1, 1, list(range(len(shape)))[::-1]), -1)
        self.layout = layout
        rows = [*shape[:-1], _columns(dtype, layout, shape[-1])]
        self.data = np.zeros(rows, np.uint32)
        self.written = np.zeros(rows, np.bool_)
        self.writer: np.ndarray = np.zeros(rows, np.int8)  # which of the types in `values` wrote it
        self.values: dict[tuple[str, int], np.ndarray] = {}
        lanes = layout.block[0] // LANES if layout.block[0] > LANES else 1
        packed = 2 if layout.block[0] == LANES // 2 and math.prod(shape[:-1]) % LANES == 0 else 1
        tiles = math.prod(shape[:-1]) // layout.block[0] // packed
        self.columns = max(tiles, 1) * lanes * rows[-1]

    @property
    def label(self) -> str:
        """What the kernel calls it."""
        return self.name or self.path or f"tensor memory of line {self.site.line}"

    def plane(self, dtype, stride: int) -> tuple[int, np.ndarray]:
        """Return the values as one type has them, and the number of that type here."""
        key = dtype.name, stride
        if key not in self.values:
            each = 32 // (dtype.primitive_bitwidth * stride)
            self.values[key] = np.zeros([*self.data.shape[:-1], self.data.shape[-1] * each], numpy_type(dtype))
        return list(self.values).index(key) + 1, self.values[key]


class TensorMemory(MemDesc):
    """A view of tensor memory: what a kernel calls a tensor_memory_descriptor."""

    allocation: Columns

    def __init__(
        self, allocation: Columns, dtype, shape: list[int], layout, place: tuple, first: int, suffix: str = ""
    ):
        self.element, self.logical, self.place, self.first = dtype, shape, place, first
        end = first + _columns(dtype, layout, shape[-1])
        at = (*place, Ellipsis, slice(first, end))
        super().__init__(allocation, allocation.data[at], allocation.written[at], layout, suffix)
        self.writer, self.end = allocation.writer[at], end

    dtype = element_ty = property(lambda self: self.element)
    shape = property(lambda self: Shape(self.logical))
    rank = property(lambda self: len(self.logical))
    numel = property(lambda self: math.prod(self.logical))
    nbytes = property(lambda self: self.numel * self.dtype.primitive_bitwidth // 8)

    def __repr__(self) -> str:
        return f"<tensor memory {self.label}: {self.dtype}{list(self.shape)}, {self.layout}>"

    def __getattr__(self, name):
        refuse(
            "unknown operation",
            f"tensor memory has no method .{name}: it is loaded into registers by .load(layout), and stored by .store(value).",
        )

    @property
    def values(self) -> np.ndarray:
        """The values, for a product or a load; writing into them changes the memory."""
        plane = self.allocation.plane(self.dtype, self.layout.col_stride)[1]
        each = 32 // (self.dtype.primitive_bitwidth * self.layout.col_stride)
        return plane[(*self.place, Ellipsis, slice(self.first * each, self.first * each + self.logical[-1]))]

    def _claim(self) -> None:
        """Remember that this type has written here."""
        self.writer[...] = self.allocation.plane(self.dtype, self.layout.col_stride)[0]

    def check_type(self, what: str) -> None:
        """Refuse to read as one type what another one has written."""
        mine = self.allocation.plane(self.dtype, self.layout.col_stride)[0]
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

    def slice(self, start, length) -> TensorMemory:  # type: ignore[override]  # Gluon's own signature
        """Return the columns [start, start + length) of each row."""
        start, length = constant(start, "slice's start"), constant(length, "slice's length")
        if start < 0 or length < 1 or start + length > self.logical[-1]:
            refuse("layout", f"{self.label}.slice({start}, {length}) leaves its shape {list(self.shape)}.")
        block = (self.layout.block[0], min(self.layout.block[1], length))
        layout = blackwell.TensorMemoryLayout(block, self.layout.col_stride)
        first = self.first + _columns(self.dtype, self.layout, start) if start else self.first
        return self._derived(
            self.dtype, [*self.logical[:-1], length], layout, self.place, first, f"[:, {start}:{start + length}]"
        )

    def _reinterpret(self, dtype, shape, layout) -> TensorMemory:  # type: ignore[override]  # Gluon's own signature
        """Return the first columns of the same memory as another type: P takes the place of the scores it came from."""
        shape = constants(shape, "_reinterpret's shape")
        _check_layout(dtype, shape, layout)
        if shape[:-1] != self.logical[:-1] or _columns(dtype, layout, shape[-1]) > self.end - self.first:
            text = f"{self.label} has shape {list(self.shape)} in {self.end - self.first} columns"
            need = _columns(dtype, layout, shape[-1])
            refuse("layout", f"_reinterpret: {text}; {dtype}{shape} needs the same rows and {need} columns.")
        return self._derived(dtype, shape, layout, self.place, self.first, f" as {dtype}")

    def _derived(self, dtype, shape, layout, place, first, suffix) -> TensorMemory:
        view = TensorMemory(self.allocation, dtype, shape, layout, place, first, self.suffix + suffix)
        view.outside = self.outside
        return view

    def permute(self, order):
        """Refuse: tensor memory has lanes and columns, and no instruction swaps them."""
        refuse(
            "layout", f"{self.label}.permute: tensor memory cannot be transposed; permute B in shared memory instead."
        )

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
        stride = self.layout.col_stride
        if not any(
            same_registers(layout, wanted, self.logical)
            for wanted in register_layouts(self.dtype, tuple(self.logical), tuple(self.layout.block), stride, warps)
        ):
            advice = "take the layout of get_tmem_reg_layout(dtype, shape, tmem.layout, gl.num_warps()), and gl.convert_layout"
            refuse("layout", f"{what}: no instruction moves tensor memory from or to {layout}; {advice}.")

    def load(self, layout=None):
        """Return a tensor with the values."""
        what = f"{self.label}.load"
        layout = layouts.distributed(layout, list(self.shape), what)
        self._check_registers(layout, what)
        reads = access(self, write=False, asynchronous=True, what=f"the load of {self.label}")
        self.check_type(what)
        self._spend("tensor memory load")
        return Tensor(self.values.copy(), self.dtype, layout, reads=reads)

    def store(self, value, pred=True) -> None:
        """Store a tensor of the same shape and type."""
        what = f"{self.label}.store"
        if list(value.shape) != list(self.shape) or value.dtype.name != self.dtype.name:
            text = f"{self.label} holds {self.dtype}{list(self.shape)}; a tensor {value.dtype}{list(value.shape)}"
            refuse("layout", f"{text} cannot be stored there. Use .to(...) or another view.")
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


@functools.lru_cache(maxsize=256)
def register_layouts(dtype, shape: tuple[int, ...], block: tuple[int, int], stride: int, warps: int) -> list:
    """Return the register layouts that tcgen05's loads and stores take, one for each instruction that fits."""
    layout, found = blackwell.TensorMemoryLayout(block, stride), []
    for variant in VARIANTS:
        try:
            found.append(unwrap(blackwell.get_tmem_reg_layout.fn(dtype, list(shape), layout, warps, variant)))
        except Exception:  # this instruction does not fit the tile; Triton says so by errors of many kinds
            continue
    return found


def same_registers(layout, wanted, shape: list[int]) -> bool:
    """Return whether two register layouts give each element to the same lane of the same warp, in any order of registers."""
    a, b = (layouts.linear(x, shape) for x in (layout, wanted))
    same = a.lane_bases == b.lane_bases and a.warp_bases == b.warp_bases
    return same and sorted(a.reg_bases) == sorted(b.reg_bases)


def _check_layout(dtype, shape: list[int], layout) -> None:
    if not isinstance(layout, blackwell.TensorMemoryLayout):
        refuse("layout", f"Tensor memory needs a TensorMemoryLayout; got {layout!r}.")
    if len(shape) < 2:
        refuse("layout", f"Tensor memory holds matrices; got the shape {shape}.")
    (rows, columns), (m, n) = layout.block, shape[-2:]
    if rows not in (64, LANES) or m % rows or n % min(columns, n):
        text = f"TensorMemoryLayout({[rows, columns]}) does not fit a tile of {[m, n]}"
        refuse("layout", f"{text}: a block has 64 or 128 rows, and the tile is a multiple of it.")
    if dtype.primitive_bitwidth * layout.col_stride > 32:
        refuse(
            "layout", f"col_stride {layout.col_stride} of {dtype} is more than one column of 32 bits for an element."
        )


@known(of=(blackwell,))
def allocate_tensor_memory(element_ty, shape, layout, value=None) -> TensorMemory:
    """Allocate columns of tensor memory."""
    shape = constants(shape, "the shape of tensor memory")
    _check_layout(element_ty, shape, layout)
    program, allocation = context.program(), Columns(element_ty, shape, layout)
    program.tensor_memory.append(allocation)
    total = sum(columns.columns for columns in program.tensor_memory)
    if total > COLUMNS:
        parts = ", ".join(f"{a.label}: {a.columns}" for a in program.tensor_memory)
        refuse("layout", f"{total} columns of tensor memory are allocated ({parts}); a block has {COLUMNS}.")
    desc = TensorMemory(allocation, element_ty, shape, layout, (), 0)
    if value is not None:
        desc.store(value)
    return desc


# ---- products and copies ----------------------------------------------------------------------------------------------


def _check_product(a, b, acc) -> None:
    """Refuse operands that tcgen05.mma does not accept."""
    if not isinstance(acc, TensorMemory):
        refuse("layout", f"tcgen05_mma: the accumulator lies in tensor memory (allocate_tensor_memory); got {acc!r}.")
    if not isinstance(b, MemDesc) or isinstance(b, TensorMemory):
        refuse("layout", f"tcgen05_mma: B lies in shared memory; got {b!r}.")
    if not isinstance(a, MemDesc):
        refuse("layout", f"tcgen05_mma: A lies in shared or in tensor memory, and not in registers; got {a!r}.")
    if len(a.shape) != 2 or len(b.shape) != 2 or acc.rank != 2:
        shapes = f"{list(a.shape)}, {list(b.shape)} and {list(acc.shape)}"
        refuse("layout", f"tcgen05_mma: A, B and the accumulator are matrices; got {shapes}. .index(i) takes one tile.")
    (m, k), (k2, n) = a.shape, b.shape
    if k != k2 or list(acc.shape) != [m, n]:
        refuse("layout", f"tcgen05_mma: A {[m, k]} times B {[k2, n]} into {list(acc.shape)}: the shapes do not fit.")
    if a.dtype.name != b.dtype.name and "fp8" not in a.dtype.name:
        refuse("layout", f"tcgen05_mma: A is {a.dtype} and B is {b.dtype}; both must have the same type.")
    if acc.dtype.name not in ("fp32", "fp16"):
        refuse("layout", f"tcgen05_mma: the accumulator is fp32 or fp16; got {acc.dtype}.")
    least = 256 // b.dtype.primitive_bitwidth
    if k % least or n % 8 or acc.layout.block[1] > 256:
        text = f"K is a multiple of {least} (32 bytes), N of 8, and an instruction has at most 256 columns"
        refuse("layout", f"tcgen05_mma: {text}; got K {k}, N {n} and a block of {acc.layout.block[1]} columns.")
    for name, x in (("A", a), ("B", b)):
        if not isinstance(x, TensorMemory) and not isinstance(x.layout, gl.NVMMASharedLayout):
            refuse("layout", f"tcgen05_mma: {name} in shared memory needs an NVMMASharedLayout; it has {x.layout}.")


def _issue(operands: list[tuple[MemDesc, bool, str]], cycles: float, label: str) -> float:
    """Put an operation into the running partition's queue, check its accesses, and return when it ends."""
    program = context.program()
    program.reschedule()
    p = program.partition
    p.tensor_count, p.tensor_site = p.tensor_count + 1, context.site()
    clock, key = p.blocks[0].clock, (QUEUE, p.index, 0)
    before = clock.get(key, 0)
    clock[key] = p.tensor_count - 1  # in order: what this partition issued before is over when this one begins
    for x, write, words in operands:
        access(x, write=write, asynchronous=True, queue=QUEUE, time=p.tensor_count, what=f"the {words} {x.label}")
    clock[key] = before
    program.spend(program.model.issue, "issue", label)
    start = max(p.time, program.tensor_cores_free)
    end = start + program.jitter(cycles)
    program.tensor_cores_free = p.tensor_end = end
    program.record("tensor cores", "wgmma", label, None, start, end)
    return end


def _values(x: MemDesc) -> np.ndarray:
    return x.values if isinstance(x, TensorMemory) else x.view


@known(of=(blackwell,))
def tcgen05_mma(a, b, acc, *, use_acc=True, pred=True, multicast=False, mbarriers=None, mbarrier_preds=None) -> None:
    """Start acc = a @ b + (acc if use_acc else 0); the barriers learn of its end, as by a commit for each."""
    if context.program().num_ctas > 1 or constant(multicast, "multicast"):
        refuse("unknown operation", "gluon_cpu knows tcgen05_mma in kernels without clusters only.")
    _check_product(a, b, acc)
    if is_true(pred):
        (m, k), n, add = a.shape, b.shape[1], is_true(use_acc)
        operands = [(a, False, "tcgen05_mma that reads A from"), (b, False, "tcgen05_mma that reads B from")]
        operands.append((acc, True, "tcgen05_mma that writes"))
        unwritten = add and not acc.written.all()
        rate = context.program().model.mma_flops * (2 if b.dtype.primitive_bitwidth == 8 else 1)
        end = _issue(operands, 2 * m * n * k / rate, f"{a.label} x {b.label}")

        if unwritten:  # the product reads its accumulator, too
            context.program().unwritten_reads.append(acc.allocation.records[0][-1])

        def finish() -> None:
            for x in (a, acc) if add else (a,):
                if isinstance(x, TensorMemory):
                    x.check_type("tcgen05_mma")
            out = exact_product(_values(a), b.view, b.dtype)
            acc._claim()
            acc.values[...] = round_to(out + acc.values if add else out, acc.dtype)

        context.program().later(end, finish)
    for index, barrier in enumerate(mbarriers or ()):
        tcgen05_commit(barrier, pred=mbarrier_preds[index] if mbarrier_preds else True)


@known(of=(blackwell,))
def tcgen05_copy(src, dst) -> None:
    """Start a copy from shared memory to tensor memory, in order with the products."""
    if not isinstance(dst, TensorMemory) or not isinstance(src, MemDesc) or isinstance(src, TensorMemory):
        refuse("layout", f"tcgen05_copy takes shared memory and tensor memory; got {src!r} and {dst!r}.")
    if list(src.shape) != list(dst.shape) or src.dtype.name != dst.dtype.name:
        text = f"{src.label} is {src.dtype}{list(src.shape)}, {dst.label} is {dst.dtype}{list(dst.shape)}"
        refuse("layout", f"tcgen05_copy: {text}; they must have the same shape and type.")
    operands = [(src, False, "tcgen05_copy that reads"), (dst, True, "tcgen05_copy that writes")]
    end = _issue(operands, src.nbytes / context.program().model.shared_bytes, f"{src.label} to {dst.label}")

    def finish() -> None:
        dst._claim()
        dst.values[...] = src.view

    context.program().later(end, finish)


@known(of=(blackwell,))
def tcgen05_commit(barrier, pred=True, descs=()) -> None:
    """Let an mbarrier learn when all products and copies are over that this partition has issued so far."""
    if not is_true(pred):
        return
    program = context.program()
    program.reschedule()
    p = program.partition
    block, bar = p.blocks[0], own_barriers(barrier, "tcgen05_commit")[0]
    bar.check_visible(block)
    known_at_issue = block.clock | {(QUEUE, p.index, 0): p.tensor_count}
    fenced, site, who, end = dict(block.fenced), context.site(), p.label(block), max(p.time, p.tensor_end)

    def finish() -> None:
        bar.join_end_of_copy(known_at_issue, fenced)
        bar.count_arrivals(1, "tcgen05_commit", who, site, end)

    program.later(end, finish)


@known(of=(blackwell,))
def get_tmem_reg_layout(element_ty, shape, layout, num_warps, instr_variant="32x32b", cga_layout=()):
    """Return the register layout by which an instruction loads and stores a tile."""
    given = (element_ty, constants(shape, "shape"), layout, num_warps, instr_variant, list(cga_layout))
    try:
        return unwrap(blackwell.get_tmem_reg_layout.fn(*map(unwrap, given)))
    except (AssertionError, RuntimeError, ValueError) as error:
        refuse("layout", f"get_tmem_reg_layout for {unwrap(num_warps)} warps: {error}")


def finish(program) -> None:
    """Check, at the end of a program, that somebody has waited for the last operation of each partition."""
    for p in program.partitions:
        known_count = max(other.blocks[0].clock.get((QUEUE, p.index, 0), 0) for other in program.partitions)
        if known_count < p.tensor_count:
            text = "tcgen05 operations may still run when the kernel ends: nothing waits for the last one"
            hint = "tcgen05_commit(bar) after it, and mbarrier.wait(bar, ...)"
            report("unfinished", f"{text}. {hint}.", at=p.tensor_site, partition=p.name)
