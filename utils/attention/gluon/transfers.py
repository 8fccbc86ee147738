"""What step 5 loads and stores: the producer warp, and where the consumers leave a tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from utils.attention.gluon.shared import thread_barrier, tma_store
from utils.attention.gluon.softmax import normalizers


@gluon.jit
def load_block(work, descriptors, t, place, i, it, j, with_queries):
    """Ask for block j of tile t, counted from the last one, and in the order of need for the tile's queries."""
    q_desc, k_desc, v_desc = descriptors
    flat, row, _stop, _lo, hi, base = place
    batch, head, kv_head = work.heads_of(flat)
    key = base + (hi - 1 - j) * work.PLAN.block_n
    if work.q.SLOTS == 1:
        work.k.load(it, k_desc, batch, kv_head, key)
    if with_queries:
        work.q.load(i, q_desc, batch, head, row)
    if work.q.SLOTS == 2:  # of two tiles of Q one is free before K's slot is, and does not wait for that
        work.k.load(it, k_desc, batch, kv_head, key)
    if with_queries & (not work.todo.is_part(t)):
        for w in gl.static_range(1, work.q.LANES):
            work.q.load(i, q_desc, batch, head, row + w * work.q.tiles.shape[3], w)
    work.v.load(it, v_desc, batch, kv_head, key)


@gluon.jit
def producer(work, descriptors):
    """One warp: keep the rings of Q, K and V full, across tiles. `it` counts blocks of keys since the start."""
    count, t, rest = work.todo.first()
    it = 0
    for i in range(count):
        t_next = work.todo.start_next(t, rest, i)
        place = work.place(t)
        n = place[4] - place[3]
        begin = (i == 0).to(gl.int32)  # the first tile's Q and its first block were asked for before the roles began
        it += begin
        # With which block a tile's Q is asked for: its slot, where there is one, is free only when the last tile's output has left it.
        ahead = gl.minimum(i, gl.minimum(n, 2) - 1) if work.q.SLOTS == 1 else 0
        for j in range(begin, n):
            load_block(work, descriptors, t, place, i, it, j, j == ahead)
            it += 1
        t = work.todo.finish_next(t_next)


@gluon.jit
def store_tile(work, out, flat, row, tile, o, stop):
    """Store 64 rows of the output through a tile in shared memory.

    By TMA, unless the first row is before the first query, where a store by TMA is an illegal instruction, or the last row is
    behind `stop`, in the next packed sequence. The threads store the rows of such a tile themselves.
    """
    o_desc, out_ptr, eighths = out
    BLOCK_D: gl.constexpr = o.shape[1]
    rows_of_tile = tile.reshape([64, BLOCK_D])
    rows_of_tile.store(o.to(tile.dtype))
    # The threads wrote through the generic proxy, TMA reads through the async proxy: without the fence it may read
    # what was there before.
    fence_async_shared()
    by_tma = True
    if work.CASE.offset:
        by_tma = row + 64 <= stop if work.PACKED else row >= 0
        if not by_tma:
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
            thread_barrier()  # all rows have been written
            x = rows_of_tile.load(layout)
            rows = row + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
            d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))[None, :]
            place = (flat.to(gl.int64) * work.sq + rows) * (eighths * 8) + d
            gl.store(out_ptr + place, x, mask=(rows >= 0) & (rows < stop) & (d < eighths * 8))
            fence_async_shared()  # TMA may be the next to write here
            thread_barrier()  # all rows have been read
    if by_tma:
        batch, head, _kv_head = work.heads_of(flat)
        tma_store(o_desc, [batch, head, row, 0], tile)


@gluon.jit
def store_lse(work, lse_ptr, state, flat, row, stop):
    """Store the log-sum-exp, if it is wanted, of the rows from `row` on that exist, and are before `stop`."""
    # The logarithms run beside the products that have just been handed over; in the branch, or behind the output, they cost up to 3%.
    lses = normalizers(state, work.c, row)[1]
    if work.lse_wanted != 0:
        for half in gl.static_range(len(lses)):
            rows, lse = lses[half]
            gl.store(lse_ptr + flat.to(gl.int64) * work.sq + rows, lse, mask=(rows >= 0) & (rows < stop))
