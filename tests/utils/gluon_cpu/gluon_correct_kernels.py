# ruff: noqa: RUF059 (partitions unpack tuples of which they use a part)
"""Small correct Gluon kernels of many kinds, for the simulator's tests. They compile for a GPU unchanged."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from utils.machine.versions import adopt_newest_gluon_names

adopt_newest_gluon_names()
tma_load = gl.constexpr(tma.async_load)
tma_store = gl.constexpr(tma.async_store)
cp_async = gl.constexpr(async_copy.async_load)
HALF = gl.constexpr(0.5)


@gluon.jit
def copy_1d(x_ptr, y_ptr, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    offsets = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
    gl.store(y_ptr + offsets, gl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)


@gluon.jit
def offsets_2d(row, column, row_stride, column_stride, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    return rows[:, None] * row_stride + columns[None, :] * column_stride, rows, columns


@gluon.jit
def scale_add_2d(
    a_ptr, b_ptr, c_ptr, m, n, a_row, a_column, b_row, b_column, scale, ROWS: gl.constexpr, COLUMNS: gl.constexpr
):
    """C = scale * a + b with any strides; c is row-major."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    row = gl.program_id(0) * ROWS
    column = gl.program_id(1) * COLUMNS
    a_at, rows, columns = offsets_2d(row, column, a_row, a_column, ROWS, COLUMNS, layout)
    b_at, rows, columns = offsets_2d(row, column, b_row, b_column, ROWS, COLUMNS, layout)
    c_at, rows, columns = offsets_2d(row, column, n, 1, ROWS, COLUMNS, layout)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    a = gl.load(a_ptr + a_at, mask=mask, other=0.0).to(gl.float32)
    b = gl.load(b_ptr + b_at, mask=mask, other=0.0).to(gl.float32)
    gl.store(c_ptr + c_at, (a * scale + b).to(c_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def softmax_rows(x_ptr, y_ptr, m, n, stride, ROWS: gl.constexpr, COLUMNS: gl.constexpr, num_warps: gl.constexpr):
    """Y = softmax(x) over rows of up to COLUMNS elements."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [num_warps, 1], [1, 0])
    at, rows, columns = offsets_2d(gl.program_id(0) * ROWS, 0, stride, 1, ROWS, COLUMNS, layout)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    x = gl.load(x_ptr + at, mask=mask, other=-float("inf")).to(gl.float32)
    x = gl.where((rows < m)[:, None], x, 0.0)
    p = gl.exp2((x - gl.max(x, 1)[:, None]) * 1.4426950408889634)
    y = p / gl.sum(p, 1)[:, None]
    gl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def transpose(x_ptr, y_ptr, m, n, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    reading: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    writing: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [0, 1])
    row = gl.program_id(0) * ROWS
    column = gl.program_id(1) * COLUMNS
    at, rows, columns = offsets_2d(row, column, n, 1, ROWS, COLUMNS, reading)
    x = gl.load(x_ptr + at, mask=(rows < m)[:, None] & (columns < n)[None, :])
    x = gl.convert_layout(x, writing)
    at, rows, columns = offsets_2d(row, column, 1, m, ROWS, COLUMNS, writing)
    gl.store(y_ptr + at, x, mask=(rows < m)[:, None] & (columns < n)[None, :])


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def reductions(x_ptr, y_ptr, SIZE: gl.constexpr):
    """Store five numbers: maximum (by a combine function), minimum, sum, sum of the even elements, last running sum."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    x = gl.load(x_ptr + gl.arange(0, SIZE, layout))
    pairs = x.reshape([SIZE // 2, 2])
    even, odd = pairs.split()
    both = gl.join(even, odd).reshape([SIZE])
    gl.store(y_ptr, gl.reduce(x, 0, larger))
    gl.store(y_ptr + 1, gl.min(x, 0))
    gl.store(y_ptr + 2, gl.sum(both, 0))
    gl.store(y_ptr + 3, gl.sum(even, 0))
    gl.store(y_ptr + 4, gl.max(gl.associative_scan(gl.abs(x), 0, plus), 0))


@gluon.jit
def integers(y_ptr, a, b, n):
    """Follow C's rules: division rounds to zero, int32 wraps around."""
    gl.store(y_ptr, a // b)
    gl.store(y_ptr + 1, a % b)
    gl.store(y_ptr + 2, a * 1000003)
    gl.store(y_ptr + 3, min(max(a, b), 3))
    total = 0
    for i in range(0, n, 3):
        if i % 2 == 0:
            total += i
        else:
            total -= 1
    gl.store(y_ptr + 4, total)
    while total > 5:
        total = total // 2
    gl.store(y_ptr + 5, total)


@gluon.jit
def add_double_buffered(a_ptr, b_ptr, c_ptr, n, STEP: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """C = a + b with cp.async: STAGES - 1 groups of copies are under way."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    a_ring = gl.allocate_shared_memory(a_ptr.dtype.element_ty, [STAGES, STEP], shared)
    b_ring = gl.allocate_shared_memory(b_ptr.dtype.element_ty, [STAGES, STEP], shared)
    first = gl.program_id(0) * (STEP * STEPS)
    for i in gl.static_range(STAGES - 1):
        at = first + i * STEP + gl.arange(0, STEP, layout)
        cp_async(a_ring.index(i), a_ptr + at, mask=at < n)
        cp_async(b_ring.index(i), b_ptr + at, mask=at < n)
        async_copy.commit_group()
    for i in range(STEPS):
        ahead = i + STAGES - 1
        at = first + ahead * STEP + gl.arange(0, STEP, layout)
        mask = (at < n) & (ahead < STEPS)
        cp_async(a_ring.index(ahead % STAGES), a_ptr + at, mask=mask)
        cp_async(b_ring.index(ahead % STAGES), b_ptr + at, mask=mask)
        async_copy.commit_group()
        async_copy.wait_group(STAGES - 1)
        c = a_ring.index(i % STAGES).load(layout) + b_ring.index(i % STAGES).load(layout)
        at = first + i * STEP + gl.arange(0, STEP, layout)
        gl.store(c_ptr + at, c, mask=at < n)
    async_copy.wait_group(0)


@gluon.jit
def copy_tiles(x_desc, y_desc, columns, SCALE: gl.constexpr, STAGES: gl.constexpr):
    """Y = SCALE * x by TMA both ways: a ring of loads, two buffers of stores, one partition."""
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)  # noqa: RUF005
    out = gl.allocate_shared_memory(y_desc.dtype, [2, ROWS, COLUMNS], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    row = gl.program_id(0) * ROWS
    steps = gl.cdiv(columns, COLUMNS)
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), x_desc.block_type.nbytes, pred=i < steps)
        tma_load(x_desc, [row, i * COLUMNS], full.index(i), ring.index(i), pred=i < steps)
    for i in range(steps):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        x = ring.index(slot).load(layout)
        tma.store_wait(1)
        out.index(i % 2).store((x.to(gl.float32) * SCALE).to(y_desc.dtype))
        fence_async_shared()
        tma_store(y_desc, [row, i * COLUMNS], out.index(i % 2))
        mbarrier.expect(full.index(slot), x_desc.block_type.nbytes, pred=i + STAGES < steps)
        tma_load(x_desc, [row, (i + STAGES) * COLUMNS], full.index(slot), ring.index(slot), pred=i + STAGES < steps)
    tma.store_wait(0)
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(i))


@gluon.jit
def matmul(
    a_desc, b_desc, c_desc, k_size, TRANSPOSE_B: gl.constexpr, A_IN_REGISTERS: gl.constexpr, num_warps: gl.constexpr
):
    """C = A @ B, one tile for each program; it waits for each product at once."""
    BLOCK_M: gl.constexpr = c_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = c_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, BLOCK_N // (num_warps // 4), 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    a_tile = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b_tile = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    row = gl.program_id(0) * BLOCK_M
    column = gl.program_id(1) * BLOCK_N
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    phase = 0
    for k in range(0, k_size, BLOCK_K):
        mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(a_desc, [row, k], full, a_tile)
        if TRANSPOSE_B:
            tma_load(b_desc, [column, k], full, b_tile)
        else:
            tma_load(b_desc, [k, column], full, b_tile)
        mbarrier.wait(full, phase)
        phase ^= 1
        b = b_tile.permute((1, 0)) if TRANSPOSE_B else b_tile
        if A_IN_REGISTERS:
            acc = warpgroup_mma(a_tile.load(left), b, acc)
            fence_async_shared()
        else:
            acc = warpgroup_mma(a_tile, b, acc)
    c_tile = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    c_tile.store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [row, column], c_tile)
    tma.store_wait(0)


@gluon.jit
def matmul_persistent(a_desc, b_desc, c_desc, m, n, k_size):
    """C = A @ B: each program computes several tiles, and a product runs while the next tiles are loaded."""
    BLOCK_M: gl.constexpr = c_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = c_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [2, BLOCK_M, BLOCK_K], a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [2, BLOCK_K, BLOCK_N], b_desc.layout)
    c_tile = gl.allocate_shared_memory(c_desc.dtype, [BLOCK_M, BLOCK_N], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    step = 0
    tiles_n = gl.cdiv(n, BLOCK_N)
    for tile in range(gl.program_id(0), gl.cdiv(m, BLOCK_M) * tiles_n, gl.num_programs(0)):
        row = tile // tiles_n * BLOCK_M
        column = tile % tiles_n * BLOCK_N
        acc = warpgroup_mma_init(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout))
        for k in range(0, k_size, BLOCK_K):
            a = a_ring.index(step & 1)
            b = b_ring.index(step & 1)
            mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma_load(a_desc, [row, k], full, a)
            tma_load(b_desc, [k, column], full, b)
            mbarrier.wait(full, step & 1)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        tma.store_wait(0)
        c_tile.store(acc.to(c_desc.dtype))
        fence_async_shared()
        tma_store(c_desc, [row, column], c_tile)
    tma.store_wait(0)


@gluon.jit
def load_partition(descs, bars, buffers, row, columns, STAGES: gl.constexpr):
    a_desc, b_desc, c_desc = descs
    full, empty, ready, drained = bars
    a_ring, b_ring, out = buffers
    COLUMNS: gl.constexpr = a_desc.block_type.shape[1]
    for i in range(gl.cdiv(columns, COLUMNS)):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(a_desc, [row, i * COLUMNS], full.index(slot), a_ring.index(slot))
        tma_load(b_desc, [row, i * COLUMNS], full.index(slot), b_ring.index(slot))


@gluon.jit
def store_partition(descs, bars, buffers, row, columns, STAGES: gl.constexpr):
    a_desc, b_desc, c_desc = descs
    full, empty, ready, drained = bars
    a_ring, b_ring, out = buffers
    COLUMNS: gl.constexpr = a_desc.block_type.shape[1]
    for i in range(gl.cdiv(columns, COLUMNS)):
        mbarrier.wait(ready, i & 1)
        tma_store(c_desc, [row, i * COLUMNS], out)
        tma.store_wait(0)
        mbarrier.arrive(drained)


@gluon.jit
def add_partition(bars, buffers, columns, scale, STAGES: gl.constexpr, layout: gl.constexpr):
    full, empty, ready, drained = bars
    a_ring, b_ring, out = buffers
    COLUMNS: gl.constexpr = out.shape[1]
    for i in range(gl.cdiv(columns, COLUMNS)):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        c = a_ring.index(slot).load(layout) + scale * b_ring.index(slot).load(layout)
        fence_async_shared()
        mbarrier.arrive(empty.index(slot))
        mbarrier.wait(drained, (i & 1) ^ 1)
        out.store(c)
        fence_async_shared()
        mbarrier.arrive(ready)


@gluon.jit
def add_specialized(a_desc, b_desc, c_desc, columns, scale, STAGES: gl.constexpr):
    """C = a + scale * b with three partitions: load, add, store."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)  # noqa: RUF005
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)  # noqa: RUF005
    out = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(ready, count=1)
    mbarrier.init(drained, count=1)
    row = gl.program_id(0) * a_desc.block_type.shape[0]
    bars = (full, empty, ready, drained)
    buffers = (a_ring, b_ring, out)
    descs = (a_desc, b_desc, c_desc)
    gl.warp_specialize(
        [
            (add_partition, (bars, buffers, columns, scale, STAGES, layout)),
            (load_partition, (descs, bars, buffers, row, columns, STAGES)),
            (store_partition, (descs, bars, buffers, row, columns, STAGES)),
        ],
        [1, 1],
        [24, 24],
    )


@gluon.jit
def copying_partition(x_ptr, ring, full, empty, n, SIZE: gl.constexpr, STAGES: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    for i in range(gl.cdiv(n, SIZE)):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
        at = i * SIZE + gl.arange(0, SIZE, layout)
        cp_async(ring.index(slot), x_ptr + at, mask=at < n)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def halving_partition(y_ptr, ring, full, empty, n, SIZE: gl.constexpr, STAGES: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    for i in range(gl.cdiv(n, SIZE)):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        x = ring.index(slot).load(layout)
        mbarrier.arrive(empty.index(slot))
        at = i * SIZE + gl.arange(0, SIZE, layout)
        gl.store(y_ptr + at, x * HALF, mask=at < n)


@gluon.jit
def halve_cp_async_specialized(x_ptr, y_ptr, n, SIZE: gl.constexpr, STAGES: gl.constexpr):
    """Y = x / 2: one warp copies with cp.async and signals an mbarrier, four warps compute."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, SIZE], shared)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=32)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (halving_partition, (y_ptr, ring, full, empty, n, SIZE, STAGES)),
            (copying_partition, (x_ptr, ring, full, empty, n, SIZE, STAGES)),
        ],
        [1],
        [24],
    )
