"""Where step 5's consumers leave a tile: the output through shared memory by TMA, or by the threads, and the log-sum-exp."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from utils.attention.gluon.shared import thread_barrier, tma_store
from utils.attention.gluon.softmax import normalizers


@gluon.jit
def store_tile(work, out, flat, row, tile, o, stop):
    """Store 64 rows of the output through a tile in shared memory.

    By TMA, but where the first row is before the first query: TMA reads from negative coordinates, and fills in zeros, but
    a store to them is an illegal instruction. Nor where the last row is behind `stop`, in the next packed sequence. The rows
    of such a tile the threads store themselves.
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
    """Store the log-sum-exp, if it is wanted, of the rows from `row` on that exist, and are before `stop`.

    The branch keeps the logarithms, a hundred instructions, behind the products that have just been handed over.
    """
    if work.lse_wanted != 0:
        lses = normalizers(state, work.c, row)[1]
        for half in gl.static_range(len(lses)):
            rows, lse = lses[half]
            gl.store(lse_ptr + flat.to(gl.int64) * work.sq + rows, lse, mask=(rows >= 0) & (rows < stop))
