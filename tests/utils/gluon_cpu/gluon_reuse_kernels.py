"""Kernels whose second buffer may lie in the memory of the first: CASE names where the wait stands."""

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
cp_async = gl.constexpr(async_copy.async_load)


@gluon.jit
def two_stores(x_ptr, y_desc, z_desc, CASE: gl.constexpr):
    """Store a tile and its double, each from a buffer of its own."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    x = gl.load(x_ptr + rows * 32 + gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :])
    first = gl.allocate_shared_memory(gl.float32, [16, 32], y_desc.layout)
    if CASE == "both before":
        second = gl.allocate_shared_memory(gl.float32, [16, 32], z_desc.layout)
    first.store(x)
    fence_async_shared()
    tma_store(y_desc, [0, 0], first)
    if CASE == "wait between":
        tma.store_wait(0)
    if CASE != "both before":
        second = gl.allocate_shared_memory(gl.float32, [16, 32], z_desc.layout)
    # found: store in flight
    second.store(x + x)
    fence_async_shared()
    tma_store(z_desc, [0, 0], second)
    tma.store_wait(0)


@gluon.jit
def two_products(a_desc, b_desc, c_ptr, CASE: gl.constexpr):
    """C = A A + B B; B comes by TMA while the first product may still run."""
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    a = gl.allocate_shared_memory(gl.float16, [64, 64], a_desc.layout)
    mbarrier.expect(bar, a_desc.block_type.nbytes)
    tma_load(a_desc, [0, 0], bar, a)
    mbarrier.wait(bar, 0)
    acc = warpgroup_mma(a, a, gl.zeros([64, 64], gl.float32, acc_layout), is_async=True)
    if CASE == "wait between":
        acc = warpgroup_mma_wait(0, deps=[acc])
    b = gl.allocate_shared_memory(gl.float16, [64, 64], b_desc.layout)
    mbarrier.expect(bar, b_desc.block_type.nbytes)
    # found: product in flight
    tma_load(b_desc, [0, 0], bar, b)
    mbarrier.wait(bar, 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    acc = warpgroup_mma(b, b, acc)
    rows = gl.arange(0, 64, gl.SliceLayout(1, acc_layout))[:, None]
    gl.store(c_ptr + rows * 64 + gl.arange(0, 64, gl.SliceLayout(0, acc_layout))[None, :], acc)


@gluon.jit
def turns(x_ptr, y_desc, n, CASE: gl.constexpr):
    """Store n tiles from a buffer that each turn of the loop allocates."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :]
    for i in range(n):
        x = gl.load(x_ptr + rows * (32 * n) + i * 32 + columns)
        tile = gl.allocate_shared_memory(gl.float32, [16, 32], y_desc.layout)
        if CASE == "wait before use":
            tma.store_wait(0)
        # found: next turn
        tile.store(x)
        fence_async_shared()
        tma_store(y_desc, [0, i * 32], tile)
        if CASE == "wait after use":
            tma.store_wait(0)
    tma.store_wait(0)


@gluon.jit
def dead_copy(x_ptr, y_ptr, CASE: gl.constexpr):
    """A cp.async into a buffer that nobody reads is still under way when the next buffer is stored."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    at = gl.arange(0, 512, layout)
    ahead = gl.allocate_shared_memory(gl.float32, [512], shared)
    cp_async(ahead, x_ptr + at)
    async_copy.commit_group()
    if CASE == "wait between":
        async_copy.wait_group(0)
    out = gl.allocate_shared_memory(gl.float32, [512], shared)
    # found: copy in flight
    out.store(gl.load(x_ptr + at))
    async_copy.wait_group(0)
    gl.store(y_ptr + at, out.load(layout))


@gluon.jit
def copy_read_later(x_ptr, y_ptr):
    """The buffer of the cp.async is read at the end, so no other buffer gets its memory."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    at = gl.arange(0, 512, layout)
    ahead = gl.allocate_shared_memory(gl.float32, [512], shared)
    view = ahead.reshape([512])
    cp_async(ahead, x_ptr + at)
    async_copy.commit_group()
    out = gl.allocate_shared_memory(gl.float32, [512], shared)
    out.store(gl.load(x_ptr + at))
    async_copy.wait_group(0)
    if gl.program_id(0) == 1:  # never in this launch: the compiler cannot know
        gl.store(y_ptr + at, view.load(layout))
    gl.store(y_ptr + at, out.load(layout))


@gluon.jit
def operand_in_deps(a_desc, b_desc, c_ptr):
    """The wait names the first product's operand, which lives until there."""
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    a = gl.allocate_shared_memory(gl.float16, [64, 64], a_desc.layout)
    mbarrier.expect(bar, a_desc.block_type.nbytes)
    tma_load(a_desc, [0, 0], bar, a)
    mbarrier.wait(bar, 0)
    acc = warpgroup_mma(a, a, gl.zeros([64, 64], gl.float32, acc_layout), is_async=True)
    b = gl.allocate_shared_memory(gl.float16, [64, 64], b_desc.layout)
    mbarrier.expect(bar, b_desc.block_type.nbytes)
    tma_load(b_desc, [0, 0], bar, b)
    mbarrier.wait(bar, 1)
    acc, _ = warpgroup_mma_wait(0, deps=[acc, a])
    acc = warpgroup_mma(b, b, acc)
    rows = gl.arange(0, 64, gl.SliceLayout(1, acc_layout))[:, None]
    gl.store(c_ptr + rows * 64 + gl.arange(0, 64, gl.SliceLayout(0, acc_layout))[None, :], acc)


@gluon.jit
def ring_then_tile(x_ptr, y_desc, n, LATE: gl.constexpr):
    """A ring lives through the loop that allocates a tile, even in its last turn: no memory is shared."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :]
    ring = gl.allocate_shared_memory(gl.float32, [2, 16, 32], y_desc.layout)
    for i in range(n):
        x = gl.load(x_ptr + rows * (32 * n) + i * 32 + columns)
        slot = ring.index(i % 2)
        tma.store_wait(1)
        slot.store(x)
        fence_async_shared()
        tma_store(y_desc, [0, i * 32], slot)
        if LATE:
            tile = gl.allocate_shared_memory(gl.float32, [16, 32], y_desc.layout)
            tile.store(x)
            gl.store(x_ptr + rows * (32 * n) + i * 32 + columns, tile.load(layout))
    tma.store_wait(0)


@gluon.jit
def barrier_then_tile(a_desc, c_desc, CASE: gl.constexpr):
    """C = A + A in fp32, through a tile that is allocated behind the last line that names the barrier."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    a = gl.allocate_shared_memory(gl.float16, [64, 64], a_desc.layout)
    mbarrier.expect(bar, a_desc.block_type.nbytes)
    tma_load(a_desc, [0, 0], bar, a)
    mbarrier.wait(bar, 0)
    c = gl.allocate_shared_memory(gl.float32, [64, 64], c_desc.layout)
    x = a.load(layout).to(gl.float32)
    c.store(x + x)
    fence_async_shared()
    tma_store(c_desc, [0, 0], c)
    tma.store_wait(0)
    if CASE == "ended":
        mbarrier.invalidate(bar)
