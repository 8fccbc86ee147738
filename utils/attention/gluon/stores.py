"""Where step 5's consumers leave a tile: the output through shared memory by TMA, or by the threads, and the log-sum-exp."""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from utils.attention.gluon.blocks import piece, products
from utils.attention.gluon.shared import aggregate, thread_barrier, tma_store


@aggregate
class Results:
    """Where the results of a launch go. lse_rows: rows of the log-sum-exp that are stored, all of a head's or none."""

    descriptor: tma.tensor_descriptor
    out: gl.tensor
    lse: gl.tensor
    lse_rows: gl.tensor
    head_dim: gl.tensor
    tiles: gl.shared_memory_descriptor  # through which tiles leave

    @gluon.constexpr_function
    def __init__(self, descriptor, out, lse, lse_rows, head_dim, tiles):
        self.descriptor = descriptor
        self.out = out
        self.lse = lse
        self.lse_rows = lse_rows
        self.head_dim = head_dim
        self.tiles = tiles

    @gluon.jit
    def store_tile(self, work, flat, row, number, o):
        """Store 64 rows of the output through tile `number` of shared memory.

        By TMA, but where the first row is before the first query: TMA reads from negative coordinates, and fills in zeros, but
        a store to them is an illegal instruction. Such rows, of a head's first tile, the threads store themselves.
        """
        PLAN: gl.constexpr = work.PLAN
        BLOCK_D: gl.constexpr = PLAN.block_d
        whole = self.tiles.index(number)
        tile = whole.reshape([64, BLOCK_D])
        for i in gl.static_range(products(PLAN)):
            piece(tile, PLAN, i).store(o[i].to(tile.dtype))
        # The threads wrote through the generic proxy, TMA reads through the async proxy: without the fence it may read
        # what was there before.
        fence_async_shared()
        by_tma = True
        if work.CASE.offset:
            by_tma = row >= 0
            if row < 0:
                layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
                thread_barrier()  # all rows have been written
                x = tile.load(layout)
                rows = row + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
                d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))[None, :]
                keep = (rows >= 0) & (rows < work.sq) & (d < self.head_dim)
                gl.store(self.out + (flat.to(gl.int64) * work.sq + rows) * self.head_dim + d, x, mask=keep)
                fence_async_shared()  # TMA may be the next to write here
                thread_barrier()  # all rows have been read
        if by_tma:
            batch = flat // work.heads
            tma_store(self.descriptor, [batch, flat - batch * work.heads, row, 0], whole)

    @gluon.jit
    def store_rows(self, work, flat, row, o, lse):
        """Store rows that threads hold as `parts.piece_layout` says, from row number `row` on, and their log-sum-exp."""
        layout: gl.constexpr = o.type.layout
        rows = row + gl.arange(0, o.shape[0], gl.SliceLayout(1, layout))
        d = gl.arange(0, o.shape[1], gl.SliceLayout(0, layout))[None, :]
        exists = (rows >= 0) & (rows < work.sq)
        place = (flat.to(gl.int64) * work.sq + rows[:, None]) * self.head_dim + d
        gl.store(self.out + place, o.to(self.out.dtype.element_ty), mask=exists[:, None] & (d < self.head_dim))
        gl.store(self.lse + flat.to(gl.int64) * work.sq + rows, lse, mask=exists & (rows < self.lse_rows))

    @gluon.jit
    def store_lse(self, work, lses, flat):
        """Store the log-sum-exp of the rows that exist; lses: pairs of row numbers and values."""
        for part in gl.static_range(len(lses)):
            rows, lse = lses[part]
            gl.store(self.lse + flat.to(gl.int64) * work.sq + rows, lse, mask=(rows >= 0) & (rows < self.lse_rows))
