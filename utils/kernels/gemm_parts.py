"""Sums of a tile in parts, for both Gluon kernels: each part leaves its own, and the one that counts last adds them up.

No part waits for another. The last one adds the sums in their order, so that the same bits come out twice.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.machine import versions

versions.adopt_newest_gluon_names()
whole_warpgroup = gl.barrier  # of the partition that calls it


@gluon.jit
def shared_tiles(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT boxes of a TMA descriptor; a box of rows of one parity lies there as a matrix."""
    ROWS: gl.constexpr = desc.block_type.shape[-2]
    COLUMNS: gl.constexpr = desc.block_type.shape[-1]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], desc.dtype)
    return gl.allocate_shared_memory(desc.dtype, [COUNT, ROWS, COLUMNS], layout)


@gluon.jit
def leave_sums(sums, acc, FIRST: gl.constexpr, BLOCK_N: gl.constexpr):
    """Store an accumulator as columns FIRST and on of BLOCK_N columns."""
    layout: gl.constexpr = acc.type.layout
    m = gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    n = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    gl.store(sums + m[:, None] * BLOCK_N + n[None, :], acc)


@gluon.jit
def last_part(CONFIG: gl.constexpr, sums, counters, acc, acc2, part, WHICH: gl.constexpr):
    """Leave a part's sums in global memory, and tell whether all parts of the tile are there now."""
    BLOCK_N: gl.constexpr = CONFIG.block_n
    SPLIT: gl.constexpr = CONFIG.split
    CONSUMERS: gl.constexpr = CONFIG.consumers
    own = sums + (part * CONSUMERS + WHICH).to(gl.int64) * (acc.shape[0] * BLOCK_N)
    leave_sums(own, acc, 0, BLOCK_N)
    if CONFIG.columns[1] > 0:
        leave_sums(own, acc2, acc.shape[1], BLOCK_N)
    # All threads of the warpgroup have stored before one of them counts: whoever counts last reads what all have stored.
    whole_warpgroup()
    counter = counters + part // SPLIT * CONSUMERS + WHICH
    count = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if count == SPLIT - 1:
        gl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")  # the next launch finds it as this one did
    return count == SPLIT - 1


@gluon.jit
def summed_piece(CONFIG: gl.constexpr, sums, part, i, WHICH: gl.constexpr):
    """Column block i of a tile, summed over its parts in their order, whichever part was the last to arrive."""
    ROWS: gl.constexpr = CONFIG.block_m // CONFIG.consumers
    BLOCK_N: gl.constexpr = CONFIG.block_n
    SPLIT: gl.constexpr = CONFIG.split
    CONSUMERS: gl.constexpr = CONFIG.consumers
    COLUMNS: gl.constexpr = CONFIG.piece[1]
    # Neighbours in a row of sums are neighbours in memory, and in a column of them if C's transpose is stored.
    by_rows: gl.constexpr = gl.BlockedLayout([1, 4], [128 // COLUMNS, COLUMNS // 4], [4, 1], [1, 0])
    by_columns: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    layout: gl.constexpr = by_columns if CONFIG.transposed else by_rows
    m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    n = i * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    offsets = m[:, None] * BLOCK_N + n[None, :]
    total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    for other in gl.static_range(SPLIT):
        place = ((part // SPLIT * SPLIT + other) * CONSUMERS + WHICH).to(gl.int64) * (ROWS * BLOCK_N)
        total += gl.load(sums + place + offsets, cache_modifier=".cg")  # the L1 may hold what was there before
    return total
