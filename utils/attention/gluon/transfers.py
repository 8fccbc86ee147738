"""Loads and stores of step 5: the producer warp loads Q, K and V, and the consumers store the output and the log-sum-exp."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from utils.attention.gluon.shared import thread_barrier, tma_store
from utils.attention.gluon.softmax import normalizers


@gluon.jit
def load_block(work, descriptors, t, place, i, it, j, with_queries):
    """Start the loads of block j of tile t, in the order of need; block 0 is the last block. with_queries: load the tile's Q, too."""
    q_desc, k_desc, v_desc = descriptors
    flat, row, _stop, _lo, hi, base = place
    batch, head, kv_head = work.heads_of(flat)
    key = base + (hi - 1 - j) * work.PLAN.block_n
    if work.q.SLOTS == 1:
        work.k.load(it, k_desc, batch, kv_head, key)
    if with_queries:
        work.q.load(i, q_desc, batch, head, row)
    if work.q.SLOTS == 2:  # with two slots, Q's slot becomes empty before K's slot, and its load need not wait for K's
        work.k.load(it, k_desc, batch, kv_head, key)
    if with_queries & (not work.todo.is_part(t)):
        for w in gl.static_range(1, work.q.LANES):
            work.q.load(i, q_desc, batch, head, row + w * work.q.tiles.shape[3], w)
    work.v.load(it, v_desc, batch, kv_head, key)


@gluon.jit
def producer(work, descriptors):
    """Keep the rings of Q, K and V full, with one warp, tile after tile. `it` counts blocks of keys since the start."""
    count, t, rest = work.todo.first()
    it = 0
    for i in range(count):
        t_next = work.todo.start_next(t, rest, i)
        place = work.place(t)
        n = place[4] - place[3]
        begin = (i == 0).to(gl.int32)  # the loads of the first tile's Q and first block started before the roles
        it += begin
        # A tile's Q is loaded with block `ahead`. A single slot of Q becomes empty only after the previous tile's output has left.
        ahead = gl.minimum(i, gl.minimum(n, 2) - 1) if work.q.SLOTS == 1 else 0
        for j in range(begin, n):
            load_block(work, descriptors, t, place, i, it, j, j == ahead)
            it += 1
        t = work.todo.finish_next(t_next)


@gluon.jit
def store_tile(work, out, flat, row, tile, o, stop):
    """Store 64 rows of the output through a tile in shared memory, by TMA where that is possible.

    If the first row is before the first query, a store by TMA is an illegal instruction. If the last row is behind
    `stop`, it belongs to the next packed sequence. In both cases the threads store the rows.
    """
    o_desc, out_ptr, eighths = out
    BLOCK_D: gl.constexpr = o.shape[1]
    rows_of_tile = tile.reshape([64, BLOCK_D])
    rows_of_tile.store(o.to(tile.dtype))
    # The threads wrote through the generic proxy, TMA reads through the async proxy. Without the fence TMA may read old data.
    fence_async_shared()
    by_tma = True
    if work.CASE.overhang:
        by_tma = row + 64 <= stop if work.PACKED else row >= 0
        if not by_tma:
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
            thread_barrier()  # without it a thread would read rows that another warp has not written yet
            x = rows_of_tile.load(layout)
            rows = row + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
            d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))[None, :]
            place = (flat.to(gl.int64) * work.sq + rows) * (eighths * 8) + d
            gl.store(out_ptr + place, x, mask=(rows >= 0) & (rows < stop) & (d < eighths * 8))
            fence_async_shared()  # TMA writes the next Q here: without the fence it may come before these reads
            thread_barrier()  # without it the slot could get new rows before another warp has read these
    if by_tma:
        batch, head, _kv_head = work.heads_of(flat)
        tma_store(o_desc, [batch, head, row, 0], tile)


@gluon.jit
def store_lse(work, lse_ptr, state, flat, row, stop):
    """If the launch wants the log-sum-exp, store it for the 64 rows from `row` on, but not before row 0 or from `stop` on."""
    # The logarithms run beside the products that have just started. In the branch, or after the output, they would cost up to 3%.
    lses = normalizers(state, work.c, row)[1]
    if work.lse_wanted != 0:
        for half in gl.static_range(len(lses)):
            rows, lse = lses[half]
            gl.store(lse_ptr + flat.to(gl.int64) * work.sq + rows, lse, mask=(rows >= 0) & (rows < stop))
