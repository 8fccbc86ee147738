"""Correct kernels of ten kinds, for the table of verdicts: `verdict_cases.py` plants bugs into them by editing their text.

Each section below a `# ==== name` line is a file of its own once it is written for a case; it gets the imports, too. The
lines of a section differ from each other, so that an edit can name the line that it changes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from utils.machine.versions import adopt_newest_gluon_names

adopt_newest_gluon_names()
tma_load = gl.constexpr(tma.async_load)
tma_store = gl.constexpr(tma.async_store)
tma_add = gl.constexpr(tma.async_atomic_add)
cp_async = gl.constexpr(async_copy.async_load)


# ==== ring: one partition loads tiles by TMA, STAGES ahead, and stores them with a mask


@gluon.jit
def ring(x_desc, y_ptr, rows, width, steps, STAGES: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    NBYTES: gl.constexpr = x_desc.block_type.nbytes
    slots = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, COLUMNS], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.expect(full.index(s), NBYTES, pred=s < steps)
        tma_load(x_desc, [0, s * COLUMNS], full.index(s), slots.index(s), pred=s < steps)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    for i in range(steps):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        x = slots.index(slot).load(layout)
        inside = (row < rows) & (column + i * COLUMNS < width)
        gl.store(y_ptr + row * width + column + i * COLUMNS, x + 1.0, mask=inside)
        ahead = i + STAGES
        # TMA must not overwrite what a thread still reads.
        fence_async_shared()
        mbarrier.expect(full.index(slot), NBYTES, pred=ahead < steps)
        tma_load(x_desc, [0, ahead * COLUMNS], full.index(slot), slots.index(slot), pred=ahead < steps)


# ==== consumers: a producer and two consumers share a ring; a slot is free when both have arrived


@gluon.jit
def produce(x_desc, slots, full, empty, steps, STAGES: gl.constexpr):
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    for i in range(steps):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(slot), x_desc.block_type.nbytes)
        tma_load(x_desc, [0, i * COLUMNS], full.index(slot), slots.index(slot))


@gluon.jit
def consume(y_ptr, slots, full, empty, steps, factor, STAGES: gl.constexpr, layout: gl.constexpr):
    ROWS: gl.constexpr = slots.shape[1]
    COLUMNS: gl.constexpr = slots.shape[2]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    for i in range(steps):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        x = slots.index(slot).load(layout)
        # The slot will be overwritten by TMA, which must come after these reads.
        fence_async_shared()
        mbarrier.arrive(empty.index(slot))
        gl.store(y_ptr + row * (steps * COLUMNS) + i * COLUMNS + column, x * factor)


@gluon.jit
def consumers(x_desc, y_ptr, z_ptr, steps, STAGES: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    slots = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, COLUMNS], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    gl.warp_specialize(
        [
            (consume, (y_ptr, slots, full, empty, steps, 2.0, STAGES, layout)),
            (consume, (z_ptr, slots, full, empty, steps, 3.0, STAGES, layout)),
            (produce, (x_desc, slots, full, empty, steps, STAGES)),
        ],
        [4, 1],
        [64, 24],
    )


# ==== stores: tiles leave through two buffers by TMA


@gluon.jit
def stores(x_ptr, y_desc, steps, BUFFERS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = y_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = y_desc.block_type.shape[1]
    out = gl.allocate_shared_memory(y_desc.dtype, [BUFFERS, ROWS, COLUMNS], y_desc.layout)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    for i in range(steps):
        x = gl.load(x_ptr + row * (steps * COLUMNS) + i * COLUMNS + column)
        buffer = out.index(i % BUFFERS)
        # The store that read this buffer, BUFFERS stores ago, must have read it.
        tma.store_wait(BUFFERS - 1)
        buffer.store(x * 2.0)
        # TMA does not see what threads have stored before the fence.
        fence_async_shared()
        tma_store(y_desc, [0, i * COLUMNS], buffer)
    tma.store_wait(0)


# ==== product: C = A @ B with a ring of two tiles, one wgmma in flight


@gluon.jit
def product(a_desc, b_desc, c_desc, k_size, STAGES: gl.constexpr):
    M: gl.constexpr = c_desc.block_type.shape[0]
    N: gl.constexpr = c_desc.block_type.shape[1]
    K: gl.constexpr = a_desc.block_type.shape[1]
    NBYTES: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES, M, K], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES, K, N], b_desc.layout)
    c = gl.allocate_shared_memory(c_desc.dtype, [M, N], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    steps = gl.cdiv(k_size, K)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    for s in gl.static_range(STAGES - 1):
        mbarrier.expect(full.index(s), NBYTES, pred=s < steps)
        tma_load(a_desc, [0, s * K], full.index(s), a.index(s), pred=s < steps)
        tma_load(b_desc, [s * K, 0], full.index(s), b.index(s), pred=s < steps)
    acc = gl.zeros([M, N], gl.float32, layout)
    for i in range(steps):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        acc = warpgroup_mma(a.index(slot), b.index(slot), acc, is_async=True)
        # The previous product has ended, so its slot may be filled again.
        acc = warpgroup_mma_wait(1, deps=[acc])
        ahead = i + STAGES - 1
        free = ahead % STAGES
        mbarrier.expect(full.index(free), NBYTES, pred=ahead < steps)
        tma_load(a_desc, [0, ahead * K], full.index(free), a.index(free), pred=ahead < steps)
        tma_load(b_desc, [ahead * K, 0], full.index(free), b.index(free), pred=ahead < steps)
    acc = warpgroup_mma_wait(0, deps=[acc])
    c.store(acc.to(c_desc.dtype))
    # The store below reads through the async proxy.
    fence_async_shared()
    tma_store(c_desc, [0, 0], c)
    tma.store_wait(0)


# ==== operand: threads write an operand of wgmma, twice


@gluon.jit
def operand(a_ptr, b_desc, c_ptr, SIZE: gl.constexpr):
    """C = (A @ B) + (2 A @ B)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    a = gl.allocate_shared_memory(b_desc.dtype, [SIZE, SIZE], b_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [SIZE, SIZE], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, b_desc.block_type.nbytes)
    tma_load(b_desc, [0, 0], full, b)
    rows = gl.arange(0, SIZE, gl.SliceLayout(1, loads))[:, None]
    columns = gl.arange(0, SIZE, gl.SliceLayout(0, loads))[None, :]
    x = gl.load(a_ptr + rows * SIZE + columns)
    a.store(x)
    # wgmma does not see what threads have stored before the fence.
    fence_async_shared()
    mbarrier.wait(full, 0)
    acc = gl.zeros([SIZE, SIZE], gl.float32, layout)
    acc = warpgroup_mma(a, b, acc, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    a.store(x + x)
    # The second product reads what was just stored.
    fence_async_shared()  # again
    acc = warpgroup_mma(a, b, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    row = gl.arange(0, SIZE, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, SIZE, gl.SliceLayout(0, layout))[None, :]
    gl.store(c_ptr + row * SIZE + column, acc)


# ==== groups: a ring of cp.async groups


@gluon.jit
def groups(x_ptr, y_ptr, n, steps, SIZE: gl.constexpr, STAGES: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    slots = gl.allocate_shared_memory(gl.float32, [STAGES, SIZE], shared)
    at = gl.arange(0, SIZE, layout)
    for s in gl.static_range(STAGES - 1):
        cp_async(slots.index(s), x_ptr + s * SIZE + at, mask=s * SIZE + at < n)
        async_copy.commit_group()
    for i in range(steps):
        ahead = (i + STAGES - 1) * SIZE + at
        cp_async(slots.index((i + STAGES - 1) % STAGES), x_ptr + ahead, mask=ahead < n)
        async_copy.commit_group()  # of the loop
        async_copy.wait_group(STAGES - 1)
        x = slots.index(i % STAGES).load(layout)
        gl.store(y_ptr + i * SIZE + at, x * 0.5, mask=i * SIZE + at < n)
    async_copy.wait_group(0)


# ==== signals: one warp copies with cp.async and signals an mbarrier, four warps compute


@gluon.jit
def copy_lines(x_ptr, slots, full, empty, n, steps, SIZE: gl.constexpr, STAGES: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    for i in range(steps):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
        at = i * SIZE + gl.arange(0, SIZE, layout)
        cp_async(slots.index(slot), x_ptr + at, mask=at < n)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def halve_lines(y_ptr, slots, full, empty, n, steps, SIZE: gl.constexpr, STAGES: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    for i in range(steps):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        x = slots.index(slot).load(layout)
        mbarrier.arrive(empty.index(slot))
        at = i * SIZE + gl.arange(0, SIZE, layout)
        gl.store(y_ptr + at, x * 0.5, mask=at < n)


@gluon.jit
def signals(x_ptr, y_ptr, n, steps, SIZE: gl.constexpr, STAGES: gl.constexpr):
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    slots = gl.allocate_shared_memory(gl.float32, [STAGES, SIZE], shared)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        # Each of the copying warp's 32 threads arrives by itself.
        mbarrier.init(full.index(s), count=32)
        mbarrier.init(empty.index(s), count=1)
    gl.warp_specialize(
        [
            (halve_lines, (y_ptr, slots, full, empty, n, steps, SIZE, STAGES)),
            (copy_lines, (x_ptr, slots, full, empty, n, steps, SIZE, STAGES)),
        ],
        [1],
        [24],
    )


# ==== handoff: one partition computes tiles, another one stores them by TMA


@gluon.jit
def compute_tiles(x_ptr, tile, ready, drained, steps, layout: gl.constexpr):
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    for i in range(steps):
        x = gl.load(x_ptr + row * (steps * COLUMNS) + i * COLUMNS + column)
        mbarrier.wait(drained, (i & 1) ^ 1)
        tile.store(x * x)
        # The TMA store of the other partition reads through the async proxy.
        fence_async_shared()
        mbarrier.arrive(ready)


@gluon.jit
def store_tiles(y_desc, tile, ready, drained, steps):
    COLUMNS: gl.constexpr = tile.shape[1]
    for i in range(steps):
        mbarrier.wait(ready, i & 1)
        tma_store(y_desc, [0, i * COLUMNS], tile)
        # The tile may be written again only when TMA has read it.
        tma.store_wait(0)
        mbarrier.arrive(drained)


@gluon.jit
def handoff(x_ptr, y_desc, steps):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.init(drained, count=1)
    gl.warp_specialize(
        [
            (compute_tiles, (x_ptr, tile, ready, drained, steps, layout)),
            (store_tiles, (y_desc, tile, ready, drained, steps)),
        ],
        [1],
        [24],
    )


# ==== sums: every program adds its tile to one of global memory, by TMA


@gluon.jit
def sums(x_desc, y_desc):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    twice = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, x_desc.block_type.nbytes)
    tma_load(x_desc, [gl.program_id(0) * ROWS, 0], full, tile)
    mbarrier.wait(full, 0)
    x = tile.load(layout)
    twice.store(x + x)
    # The reduction reads through the async proxy.
    fence_async_shared()
    tma_add(y_desc, [0, 0], twice)
    tma.store_wait(0)
    twice.store(x)
    # So does the second one.
    fence_async_shared()  # again
    tma_add(y_desc, (0, 0), twice)
    tma.store_wait(0)  # again


# ==== tails: rows and columns that do not fill their tiles, through shared memory


@gluon.jit
def tails(x_ptr, y_ptr, rows, columns, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Y = 2 X."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], shared)
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    column = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    inside = (row < rows) & (column < columns)
    x = gl.load(x_ptr + row * columns + column, mask=inside, other=0.0)
    tile.store(x)
    y = tile.load(layout)
    gl.store(y_ptr + row * columns + column, y + y, mask=inside)
