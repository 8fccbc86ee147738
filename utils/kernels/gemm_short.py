"""GEMM for products of a few microseconds on Hopper, in Gluon: one block a tile of C, several blocks on each SM.

The warp-specialized kernel of `gemm_gluon.py` keeps one block on an SM, which walks over many tiles: what it does once
(start the roles, move registers between them) is paid back over many steps. A product of a few microseconds has few
steps, and waits for its first bytes most of its time. So here four warps do everything, and nothing is handed over:

    start      allocate, initialize a barrier a slot, and ask at once for the first `stages` steps of A and B
    step i     wait for slot i % stages, start its wgmma, wait for the wgmma of step i - 1, fill that one's slot again
    end        sums to shared memory, and by TMA to C

While one block waits for its bytes, the others on its SM multiply: a tile of 64 x 64 with four slots takes 64 KiB of
shared memory, so three blocks share an SM. Long sums with few tiles are cut in parts (`gemm_parts.py`), as there.

    tile        slots    blocks an SM, by shared memory    sums a thread
    64 x 32     4        4                                 16 registers
    64 x 64     4        3                                 32
    64 x 128    4        2                                 64
    128 x 64    4        2                                 64
    128 x 128   3        2                                 128

Gluon puts a barrier of the four warps between announcing bytes, copying A and copying B, 27 ns each. The warp-specialized
kernel has one warp for that, and is ahead again where sums are long. Measured: docs/gemm-log.md, entry 16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from utils.kernels.early_launch import let_next_launch_begin, wait_for_launch_before
from utils.kernels.gemm_parts import last_part, shared_tiles, summed_piece, whole_warpgroup
from utils.machine import versions

versions.adopt_newest_gluon_names()
tma_load = tma.async_load
tma_store = tma.async_store


@gluon.jit
def load(work, i, pred, k, A_COLUMN_MAJOR: gl.constexpr, B_COLUMN_MAJOR: gl.constexpr):
    """Fetch A[row.., k..] and B[k.., column..] into the slot of step i, if `pred`."""
    a_desc, b_desc, a_ring, b_ring, full, row, column, parity = work
    slot = i % a_ring.shape[0]
    arrived = full.index(slot)
    # The bytes are announced first: copies that arrive unannounced could complete the phase too early.
    mbarrier.expect(arrived, a_desc.block_type.nbytes + b_desc.block_type.nbytes, pred=pred)
    if len(a_desc.block_type.shape) == 3:  # rows by parity
        tma_load(a_desc, [parity, row, k], arrived, a_ring.index(slot).reshape(a_desc.block_type.shape), pred=pred)
    elif A_COLUMN_MAJOR:
        tma_load(a_desc, [k, row], arrived, a_ring.index(slot), pred=pred)
    else:
        tma_load(a_desc, [row, k], arrived, a_ring.index(slot), pred=pred)
    if B_COLUMN_MAJOR:
        tma_load(b_desc, [column, k], arrived, b_ring.index(slot), pred=pred)
    else:
        tma_load(b_desc, [k, column], arrived, b_ring.index(slot), pred=pred)


@gluon.jit
def store(out, tile, row, column, parity, M, N, TMA_STORE: gl.constexpr):
    """Store a block's tile of C: by TMA, or from registers with a mask."""
    c_desc, c_pointer, c_buffer = out
    if TMA_STORE:
        c_buffer.store(tile)
        fence_async_shared()  # written by threads, read by the TMA unit: without it TMA may read older data
        if len(c_desc.block_type.shape) == 3:
            tma_store(c_desc, [parity, row, column], c_buffer.reshape(c_desc.block_type.shape))
        else:
            tma_store(c_desc, [row, column], c_buffer)
    else:
        layout: gl.constexpr = tile.type.layout
        m = row + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
        n = column + gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
        inside = (m < M)[:, None] & (n < N)[None, :]
        gl.store(c_pointer + m.to(gl.int64)[:, None] * N + n[None, :], tile, mask=inside)


@gluon.jit(do_not_specialize=["M", "N", "K"])
def short_kernel(
    a_desc,
    b_desc,
    c_desc,
    c_pointer,
    sums,
    counters,
    M,
    N,
    K,
    CONFIG: gl.constexpr,
    A_COLUMN_MAJOR: gl.constexpr,
    B_COLUMN_MAJOR: gl.constexpr,
    TMA_STORE: gl.constexpr,
):
    """Compute one tile of C, or one part of its sums. The arguments are those of `gemm_gluon.gemm_kernel`."""
    STAGES: gl.constexpr = CONFIG.stages
    SPLIT: gl.constexpr = CONFIG.split
    BLOCK_M: gl.constexpr = CONFIG.block_m
    BLOCK_N: gl.constexpr = CONFIG.block_n
    BLOCK_K: gl.constexpr = CONFIG.block_k
    a_ring = shared_tiles(a_desc, STAGES)
    b_ring = shared_tiles(b_desc, STAGES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    item = gl.program_id(0)
    tile = item // SPLIT
    if CONFIG.pairs:
        tiles_m = 2 * gl.cdiv(M // 2, BLOCK_M)
        row, parity = tile % tiles_m // 2 * BLOCK_M, tile % tiles_m % 2
    else:
        tiles_m = gl.cdiv(M, BLOCK_M)
        row, parity = tile % tiles_m * BLOCK_M, 0
    column = tile // tiles_m * BLOCK_N
    steps = gl.cdiv(K + (8 if CONFIG.pairs else 0), BLOCK_K)  # odd rows begin at -8
    first = item % SPLIT * steps // SPLIT
    count = (item % SPLIT + 1) * steps // SPLIT - first
    work = (a_desc, b_desc, a_ring, b_ring, full, row, column, parity)
    if CONFIG.early:
        wait_for_launch_before()
    for i in gl.static_range(STAGES):
        # Eight elements earlier for odd rows, which start 16 bytes late: see `gemm_work.producer`.
        load(work, i, i < count, (first + i) * BLOCK_K - 8 * parity, A_COLUMN_MAJOR, B_COLUMN_MAJOR)
    if CONFIG.early:
        # Only now: with several launches ahead, blocks of those far ahead would take the SMs of the next.
        let_next_launch_begin()

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    for i in range(count):
        a = a_ring.index(i % STAGES)
        b = b_ring.index(i % STAGES)
        mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
        if A_COLUMN_MAJOR:
            a = a.permute((1, 0))
        if B_COLUMN_MAJOR:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        # All four warps have read the slot of step i - 1: without this one warp would refill it under the others.
        whole_warpgroup()
        later = i - 1 + STAGES
        pred = (i > 0) & (later < count)
        load(work, later, pred, (first + later) * BLOCK_K - 8 * parity, A_COLUMN_MAJOR, B_COLUMN_MAJOR)
    acc = warpgroup_mma_wait(0, deps=[acc])

    c_buffer = shared_tiles(c_desc, 1).index(0) if TMA_STORE else a_ring
    out = (c_desc, c_pointer, c_buffer)
    if SPLIT == 1:
        store(out, acc.to(a_ring.dtype), row, column, parity, M, N, TMA_STORE)
    else:
        if last_part(CONFIG, sums, counters, acc, acc, item, 0):
            piece = summed_piece(CONFIG, sums, item, 0, 0).to(a_ring.dtype)
            store(out, piece, row, column, parity, M, N, TMA_STORE)
    tma.store_wait(0)  # shared memory must live until TMA has read it
