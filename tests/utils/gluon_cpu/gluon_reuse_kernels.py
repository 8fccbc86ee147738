"""Kernels whose second buffer may lie in the memory of the first: CASE names the place of the wait."""

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

from tests.utils.gluon_cpu.gluon_correct_kernels import plus
from tests.utils.gluon_cpu.gluon_small_kernels import store_matrix
from utils.attention.gluon.shared import tma_load, tma_store


@gluon.jit
def read_tile(x_ptr, column, stride):
    """Load a tile of 16 rows and 32 columns; `column` is its first one."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    return gl.load(x_ptr + rows * stride + column + gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :])


@gluon.jit
def send(tile, x, desc, column):
    """Store a tile by TMA from shared memory, and do not wait for the end."""
    # found: store in flight, next turn, call before, turn before
    tile.store(x)
    fence_async_shared()
    tma_store(desc, [0, column], tile)


@gluon.jit
def send_from_its_own(x, desc, column):
    """Store a tile from a buffer that is free again after this call."""
    send(gl.allocate_shared_memory(gl.float32, [16, 32], desc.layout), x, desc, column)


@gluon.jit
def two_stores(x_ptr, y_desc, z_desc, CASE: gl.constexpr):
    """Store a tile and its double, each from a buffer of its own."""
    x = read_tile(x_ptr, 0, 32)
    first = gl.allocate_shared_memory(gl.float32, [16, 32], y_desc.layout)
    if CASE == "both before":
        second = gl.allocate_shared_memory(gl.float32, [16, 32], z_desc.layout)
    send(first, x, y_desc, 0)
    if CASE == "wait between":
        tma.store_wait(0)
    if CASE != "both before":
        second = gl.allocate_shared_memory(gl.float32, [16, 32], z_desc.layout)
    send(second, x + x, z_desc, 0)
    tma.store_wait(0)


@gluon.jit
def load_tile(desc, bar, PARITY: gl.constexpr):
    """Load a tile by TMA."""
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], desc.layout)
    mbarrier.expect(bar, desc.block_type.nbytes)
    # found: product in flight
    tma_load(desc, [0, 0], bar, tile)
    mbarrier.wait(bar, PARITY)
    return tile


@gluon.jit
def load_first(desc):
    """Load a tile by TMA; return its barrier, whose next phase is free, and the tile."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    return bar, load_tile(desc, bar, 0)


@gluon.jit
def square(a):
    """Start the product of a tile with itself."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    return warpgroup_mma(a, a, gl.zeros([64, 64], gl.float32, layout), is_async=True)


@gluon.jit
def two_products(a_desc, b_desc, c_ptr, CASE: gl.constexpr):
    """C = A A + B B; B comes by TMA while the first product may still run."""
    bar, a = load_first(a_desc)
    acc = square(a)
    if CASE == "wait between":
        acc = warpgroup_mma_wait(0, deps=[acc])
    if CASE == "operand in deps":
        operand = a
    b = load_tile(b_desc, bar, 1)
    if CASE == "operand in deps":  # the operand lives until here
        acc, _ = warpgroup_mma_wait(0, deps=[acc, operand])
    acc = warpgroup_mma_wait(0, deps=[acc])
    store_matrix(c_ptr, warpgroup_mma(b, b, acc))


@gluon.jit
def turns(x_ptr, y_desc, n, CASE: gl.constexpr):
    """Store n tiles from a buffer that each turn of the loop allocates."""
    for i in range(n):
        x = read_tile(x_ptr, i * 32, 32 * n)
        tile = gl.allocate_shared_memory(gl.float32, [16, 32], y_desc.layout)
        if CASE == "wait before use":
            tma.store_wait(0)
        send(tile, x, y_desc, i * 32)
        if CASE == "wait after use":
            tma.store_wait(0)
    tma.store_wait(0)


@gluon.jit
def two_calls(x_ptr, y_desc, z_desc, n, CASE: gl.constexpr):
    """Store n tiles and their doubles: each call may get the buffer of the call before it, of this turn or of the last."""
    for i in range(n):
        x = read_tile(x_ptr, i * 32, 32 * n)
        send_from_its_own(x, y_desc, i * 32)
        if CASE != "call before":
            tma.store_wait(0)
        send_from_its_own(x + x, z_desc, i * 32)
        if CASE != "turn before":
            tma.store_wait(0)
    tma.store_wait(0)


@gluon.jit
def between_warps(x_ptr, y_desc, z_ptr, CASE: gl.constexpr):
    """Exchange values between warps, for which the compiler uses shared memory that it also gives to buffers."""
    x = read_tile(x_ptr, 0, 32)
    tile = gl.allocate_shared_memory(gl.float32, [16, 32], y_desc.layout)
    send(tile, x, y_desc, 0)
    if CASE == "wait between":
        tma.store_wait(0)
    if CASE == "sum in flight":
        # found: sum in flight
        gl.store(z_ptr + gl.arange(0, 32, gl.SliceLayout(0, x.type.layout)), gl.sum(x, 0))
    elif CASE == "gather in flight":
        # found: gather in flight
        store_matrix(z_ptr, gl.gather(x, gl.zeros_like(x, dtype=gl.int32), 0))
    elif CASE == "scan in flight":
        # found: scan in flight
        store_matrix(z_ptr, gl.associative_scan(x, 0, plus))
    elif CASE == "sum in each warp":
        gl.store(z_ptr + gl.arange(0, 16, gl.SliceLayout(1, x.type.layout)), gl.sum(x, 1))
    else:
        # found: conversion in flight
        store_matrix(z_ptr, gl.convert_layout(x, gl.BlockedLayout([4, 1], [4, 8], [1, 4], [0, 1])))
    tma.store_wait(0)


@gluon.jit
def copy_ahead(x_ptr, at):
    """Start a cp.async into a buffer."""
    ahead = gl.allocate_shared_memory(gl.float32, [512], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    async_copy.async_load(ahead, x_ptr + at)
    async_copy.commit_group()
    return ahead


@gluon.jit
def dead_copy(x_ptr, y_ptr, CASE: gl.constexpr):
    """A cp.async into a buffer that nobody reads is still running when the next buffer is stored."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.arange(0, 512, layout)
    ahead = copy_ahead(x_ptr, at)
    if CASE == "wait between":
        async_copy.wait_group(0)
    if CASE == "read later":
        view = ahead.reshape([512])
    out = gl.allocate_shared_memory(gl.float32, [512], ahead.layout)
    # found: copy in flight
    out.store(gl.load(x_ptr + at))
    async_copy.wait_group(0)
    if CASE == "read later" and gl.program_id(0) == 1:  # never in this launch: the compiler cannot know
        gl.store(y_ptr + at, view.load(layout))
    gl.store(y_ptr + at, out.load(layout))


@gluon.jit
def ring_then_tile(x_ptr, y_desc, n, LATE: gl.constexpr):
    """A loop uses a ring and allocates a tile: the ring lives to the end of the loop, so the tile gets other memory."""
    ring = gl.allocate_shared_memory(gl.float32, [2, 16, 32], y_desc.layout)
    for i in range(n):
        x = read_tile(x_ptr, i * 32, 32 * n)
        tma.store_wait(1)
        send(ring.index(i % 2), x, y_desc, i * 32)
        if LATE:
            tile = gl.allocate_shared_memory(gl.float32, [16, 32], y_desc.layout)
            tile.store(x)
    tma.store_wait(0)


@gluon.jit
def barrier_then_tile(a_desc, c_desc, CASE: gl.constexpr):
    """C = A + A in fp32, through a tile that is allocated after the last line that uses the barrier."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    bar, a = load_first(a_desc)
    c = gl.allocate_shared_memory(gl.float32, [64, 64], c_desc.layout)
    x = a.load(layout).to(gl.float32)
    send(c, x + x, c_desc, 0)
    tma.store_wait(0)
    if CASE == "ended":
        mbarrier.invalidate(bar)
