"""Kernels for single properties of the simulator, such as timing and collecting."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from utils.machine.versions import adopt_newest_gluon_names

adopt_newest_gluon_names()


@gluon.jit
def store_matrix(y_ptr, x):
    """Store a matrix whose rows follow each other."""
    layout: gl.constexpr = x.type.layout
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))[:, None]
    gl.store(y_ptr + rows * x.shape[1] + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :], x)


@gluon.jit
def two_findings(y_ptr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a = gl.allocate_shared_memory(gl.float32, [128], shared)
    b = gl.allocate_shared_memory(gl.float32, [128], shared)
    x = a.load(layout)
    y = b.load(layout)
    gl.store(y_ptr + gl.arange(0, 128, layout), x + y)


@gluon.jit
def waits(bar, PARITY: gl.constexpr = 0):
    mbarrier.wait(bar, PARITY)


@gluon.jit
def returns(bar):
    pass


@gluon.jit
def deadlock(y_ptr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.warp_specialize([(returns, (bar,)), (waits, (bar,)), (waits, (bar,))], [1, 1], [24, 24])


@gluon.jit
def partitions_fail(bar):
    gl.static_assert(False, "planted")


@gluon.jit
def failing_worker(y_ptr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.warp_specialize([(waits, (bar,)), (partitions_fail, (bar,))], [1], [24])


@gluon.jit
def programs(y_ptr, WIDTH: gl.constexpr):
    at = (gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)) * gl.num_programs(0) + gl.program_id(0)
    gl.store(y_ptr + at, gl.num_warps() * WIDTH)
    gl.atomic_add(y_ptr + gl.num_programs(0) * gl.num_programs(1) * gl.num_programs(2), 1)


@gluon.jit
def outside_but_not_used(y_ptr, n):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=1)
    mbarrier.arrive(bars.index((n - 1) % 2), pred=n > 0)
    gl.store(y_ptr + gl.arange(0, 128, layout), 1.0)


@gluon.jit
def used_outside(y_ptr, n):
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index((n - 1) % 2), count=1)


@gluon.jit
def count_bank_conflicts(y_ptr, shared: gl.constexpr):
    """Store a 32 x 32 fp32 matrix by columns, an element by each thread: all hit one bank, unless the layout swizzles."""
    columns: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    a = gl.allocate_shared_memory(gl.float32, [32, 32], shared)
    x = gl.full([32, 32], 1.0, gl.float32, columns)
    a.store(x)
    gl.store(y_ptr, gl.bank_conflicts(x.type, a.type))


@gluon.jit
def old_cp_async(x_ptr, y_ptr):
    """Copy a tile, calling cp.async by its name before Triton 3.8."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    at = gl.arange(0, 64, layout)
    tile = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    async_copy.async_copy_global_to_shared(tile, x_ptr + at)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.store(y_ptr + at, tile.load(layout))


@gluon.jit
def old_tma(x_desc, y_ptr):
    """Load a tile, calling the TMA load by its name before Triton 3.8."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 2], [1, 0])
    tile = gl.allocate_shared_memory(gl.float32, x_desc.block_type.shape, x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [0, 0], bar, tile)
    mbarrier.wait(bar, 0)
    store_matrix(y_ptr, tile.load(layout))


@gluon.jit
def tile_behind_the_last(y_ptr, tiles, group):
    """Divide by zero, as a scheduler does for a tile that does not exist; the result is not used."""
    place = tiles % (group - 8) + tiles // (group - 8)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 128, layout)
    gl.store(y_ptr + at, gl.where(at < 64, at % (at // 64), place))


@gluon.jit
def slot_used_again(x_ptr, y_ptr):
    """Store a tile of 16 x 64 at the start of a slot of 32 x 64, and read it as 8 x 128."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, 8, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 128, gl.SliceLayout(0, layout))
    at = rows[:, None] * 128 + columns[None, :]
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    slots = gl.allocate_shared_memory(gl.float32, [2, 32, 64], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    tile = slots.index(1)._reinterpret(gl.float32, [8, 128], shared)
    tile.store(gl.load(x_ptr + at))
    gl.store(y_ptr + at, tile.load(layout))


@gluon.jit
def gather_and_scatter(y_ptr, index, CASE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    smem = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    places = gl.arange(0, 128, layout)
    smem.store(places.to(gl.float32))
    indices = gl.where(places == 5, index, places)
    if CASE == "scatter":
        smem.scatter(places.to(gl.float32), indices, axis=0)
    gathered = gl.gather(places.to(gl.float32), indices, 0) if CASE == "registers" else smem.gather(indices, axis=0)
    gl.store(y_ptr + places, gathered)


@gluon.jit
def arrival_before_the_partitions():
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, 0)
    mbarrier.arrive(bar, count=1)
    gl.warp_specialize([(waits, (bar, 1)), (returns, (bar,))], [4], [24])


@gluon.jit
def arrive_twice(bar):
    mbarrier.arrive(bar, count=1)
    mbarrier.arrive(bar, count=1)


@gluon.jit
def arrivals_beside_the_wait():
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.warp_specialize([(arrive_twice, (bar,)), (waits, (bar, 1))], [4], [24])


@gluon.jit
def spin_on_a_flag(flag_ptr):
    while gl.load(flag_ptr) == 0:  # here
        pass


@gluon.jit
def wait_for_the_flag(flag_ptr):
    flag = 0
    while flag == 0:
        flag = gl.load(flag_ptr)
    gl.store(flag_ptr + 1, flag + 1)


@gluon.jit
def set_the_flag(flag_ptr):
    gl.store(flag_ptr, 1)


@gluon.jit
def flag_between_partitions(flag_ptr):
    gl.warp_specialize([(wait_for_the_flag, (flag_ptr,)), (set_the_flag, (flag_ptr,))], [1], [24])


@gluon.jit
def constant_in_each_turn(y_ptr):
    for i in gl.static_range(2):
        twice: gl.constexpr = 2 * i  # here
        gl.store(y_ptr + i, twice)


@gluon.jit
def misspelled_argument(y_ptr):
    gl.store(y_ptr, gl.load(y_ptr, masked=True))  # here


@gluon.jit
def tile_of_other_elements(y_ptr):
    """Threads may store int32 to memory whose layout is for 16 bits; TMA may not."""
    layout: gl.constexpr = gl.NVMMASharedLayout(0, 16, rank=2)
    tile = gl.allocate_shared_memory(gl.int32, [8, 16], layout)
    tile.store(gl.zeros([8, 16], gl.int32, gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])))
    desc = tma.make_tensor_descriptor(y_ptr, [8, 16], [16, 1], [8, 16], layout)
    tma.async_store(desc, [0, 0], tile)  # here
