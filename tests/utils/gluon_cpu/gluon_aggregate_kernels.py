# ruff: noqa: RUF005, SIM108 (as in Triton's own kernels)
"""A TMA pipeline written with aggregates: rings with barriers and a position, a shape, and constant flags.

BUG names the mistake to plant; the kernel is correct with BUG="".
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from utils.attention.gluon.shared import tma_load, tma_store

aggregate = gluon.aggregate


@aggregate
class Flags:
    """Constants alone."""

    STAGES: gl.constexpr
    SCALE: gl.constexpr
    BUG: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, STAGES, SCALE, BUG):
        self.STAGES = gl.constexpr(STAGES)
        self.SCALE = gl.constexpr(SCALE)
        self.BUG = gl.constexpr(BUG)

    @gluon.constexpr_function
    def doubled(self):
        return 2 * self.SCALE


@aggregate
class Barriers:
    """Both sides of a ring."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, full, empty):
        self.full = full
        self.empty = empty

    @gluon.jit
    def create(STAGES: gl.constexpr):
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=1)
        return Barriers(full, empty)


@aggregate
class Ring:
    """Slots and their barriers, which are an aggregate within this aggregate."""

    slots: gl.shared_memory_descriptor
    bars: Barriers
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, slots, bars, STAGES):
        self.slots = slots
        self.bars = bars
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def create(desc, STAGES: gl.constexpr):
        slots = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)
        return Ring(slots, Barriers.create(STAGES), STAGES)

    @gluon.jit
    def load(self, desc, column, at):
        mbarrier.wait(self.bars.empty.index(at.slot), at.phase ^ 1)
        mbarrier.expect(self.bars.full.index(at.slot), desc.block_type.nbytes)
        tma_load(desc, [0, column], self.bars.full.index(at.slot), self.slots.index(at.slot))

    @gluon.jit
    def take(self, at, layout: gl.constexpr):
        mbarrier.wait(self.bars.full.index(at.slot), at.phase)
        return self.slots.index(at.slot).load(layout)

    @gluon.jit
    def release(self, at):
        fence_async_shared()  # the next copy into this slot goes through the async proxy
        mbarrier.arrive(self.bars.empty.index(at.slot), count=1)


@aggregate
class Position:
    """Where a partition is in a ring: run-time scalars."""

    slot: gl.tensor
    phase: gl.tensor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, slot, phase, STAGES):
        self.slot = slot
        self.phase = phase
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def start(STAGES: gl.constexpr):
        return Position(gl.to_tensor(0), gl.to_tensor(0), STAGES)

    @gluon.jit
    def next(self):
        last = self.slot == self.STAGES - 1
        return Position(gl.where(last, 0, self.slot + 1), gl.where(last, self.phase ^ 1, self.phase), self.STAGES)


@gluon.jit
def load_partition(x_desc, y_desc, z_desc, x_ring, y_ring, steps, flags):
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    at = Position.start(flags.STAGES)
    for i in range(steps):
        x_ring.load(x_desc, i * COLUMNS, at)
        y_ring.load(y_desc, i * COLUMNS, at)
        at = at.next()


@gluon.jit
def add_partition(x_desc, y_desc, z_desc, x_ring, y_ring, steps, flags):
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    out = gl.allocate_shared_memory(z_desc.dtype, z_desc.block_type.shape, z_desc.layout)
    at = Position.start(flags.STAGES)
    for i in range(steps):
        x = x_ring.take(at, layout)
        if flags.BUG == "no wait for y":
            y = y_ring.slots.index(at.slot).load(layout)
        else:
            y = y_ring.take(at, layout)
        x_ring.release(at)
        if flags.BUG != "no release of y":
            y_ring.release(at)
        tma.store_wait(0)
        out.store(x * flags.SCALE + y * flags.doubled())
        fence_async_shared()
        tma_store(z_desc, [0, i * COLUMNS], out)
        at = at.next()
    tma.store_wait(0)


@gluon.jit
def add_with_aggregates(x_desc, y_desc, z_desc, steps, STAGES: gl.constexpr, SCALE: gl.constexpr, BUG: gl.constexpr):
    """Compute z = SCALE x + 2 SCALE y, a block of columns in each step."""
    flags = Flags(STAGES, SCALE, BUG)
    x_ring = Ring.create(x_desc, STAGES)
    y_ring = Ring.create(y_desc, STAGES)
    args = (x_desc, y_desc, z_desc, x_ring, y_ring, steps, flags)
    gl.warp_specialize([(add_partition, args), (load_partition, args)], [1], [24])


# ---- operators, and one kernel for each rule that Triton has -----------------------------------------------------------


@aggregate
class Pair:
    """Two tensors."""

    a: gl.tensor
    b: gl.tensor

    @gluon.constexpr_function
    def __init__(self, a, b):
        self.a = a
        self.b = b

    @gluon.jit
    def __add__(self, other):
        gl.static_assert(isinstance(other, Pair), "a Pair is added to a Pair")
        return Pair(self.a + other.a, self.b + other.b)

    @gluon.jit
    def total(self, scale: gl.constexpr = 1):
        return (self.a + self.b) * scale


@gluon.jit
def add_pairs(x_ptr, y_ptr, n):
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    pair = Pair(gl.load(x_ptr + at), gl.full([128], 1.0, gl.float32, gl.BlockedLayout([1], [32], [4], [0])))
    for _ in range(n):
        pair = pair + pair
    gl.store(y_ptr + at, pair.total(scale=3))


@aggregate
class Loose:
    """An aggregate whose constructor makes the mistake that WRONG names."""

    size: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, size, WRONG):
        if WRONG != "forgets a field":
            self.size = size if WRONG == "a number for a constant" else gl.constexpr(size)
        if WRONG == "an unknown field":
            self.sizes = gl.constexpr(size)

    @gluon.jit
    def grow(self):
        self.size = 4


@gluon.jit
def misuse(y_ptr, WRONG: gl.constexpr):
    loose = Loose(3, WRONG)
    if WRONG == "a field is assigned":
        loose.grow()
    if WRONG == "an unknown attribute":
        gl.store(y_ptr, loose.other)
    if WRONG == "a number for a tensor":
        Pair(1, 2)
    if WRONG == "a tensor for a worker":
        x = gl.full([128], 1.0, gl.float32, gl.BlockedLayout([1], [32], [4], [0]))
        pair = Pair(x, x)
        gl.warp_specialize([(no_work, (pair,)), (no_work, (pair,))], [1], [24])
    if WRONG == "subtracts":
        Pair(gl.to_tensor(1), gl.to_tensor(2)) - Pair(gl.to_tensor(1), gl.to_tensor(2))


@gluon.jit
def no_work(pair):
    pass


if hasattr(gl, "aggregate_replace"):  # Triton 3.8 and later

    @aggregate
    class Place:
        """An aggregate without a constructor: Triton makes one from the fields."""

        row: gl.tensor
        column: gl.tensor
        WIDTH: gl.constexpr = gl.constexpr(8)

        @gluon.jit
        def at(self):
            return self.row * self.WIDTH + self.column

    @gluon.jit
    def generated_constructors(y_ptr):
        first = Place(gl.to_tensor(1), column=gl.to_tensor(2))
        second = gl.aggregate_replace(first, row=gl.to_tensor(3))
        third = Place(first.row, first.column, 16)
        gl.store(y_ptr, first.at())
        gl.store(y_ptr + 1, second.at())
        gl.store(y_ptr + 2, third.at())

    @gluon.jit
    def field_left_out(y_ptr):
        gl.store(y_ptr, Place(gl.to_tensor(1)).at())
