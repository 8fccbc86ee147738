"""Products with query rows as rows, for the programs of a cluster: one warpgroup takes up to 64 rows of a head of keys."""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from utils.attention.gluon.decode.blocks import clean_values, mask_block, needs_mask
from utils.attention.gluon.decode.work import Cache
from utils.attention.gluon.shared import (
    MINUS_INF,
    accumulator,
    aggregate,
    left_operand,
    online_softmax,
    rescale,
    start_scores,
    thread_barrier,
)


@aggregate
class RowsAsRows:
    """S = Q K^T and O = P V for one tile of 64 query rows; it has the methods of `keys.KeysAsRows`."""

    cache: Cache
    q: gl.shared_memory_descriptor

    @gluon.jit
    def initial_state(self):
        """Return the state before the first block: output [64, BLOCK_D], maxima and sums of the rows."""
        rows: gl.constexpr = gl.SliceLayout(1, accumulator(self.cache.PLAN.block_n))
        BLOCK_D: gl.constexpr = self.cache.PLAN.block_d
        o = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
        return o, gl.full([64], MINUS_INF, gl.float32, rows), gl.zeros([64], gl.float32, rows)

    @gluon.jit
    def start_scores(self, k_tile):
        """Start the scores of a block on the tensor cores; k_tile: a slot of the ring."""
        return start_scores(self.q, k_tile.reshape([self.cache.PLAN.block_n, self.cache.PLAN.block_d]))

    @gluon.jit
    def start_block(self, cursor, j, s, state, v_tile, v_full, LAST: gl.constexpr):
        """Compute the softmax of block j of a head, start its product with V, and return the new state."""
        PLAN: gl.constexpr = self.cache.PLAN
        BLOCK_D: gl.constexpr = PLAN.block_d
        o, m, total = state
        if needs_mask(self.cache, cursor, j):
            s = mask_block(s, self.cache, cursor, j, 1)
        p, m, total, factor = online_softmax(s, m, total, self.cache.c)
        factor = gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout))
        o = rescale(o, factor[:, None].broadcast_to([64, BLOCK_D]))
        p = gl.convert_layout(p.to(v_tile.dtype), left_operand(BLOCK_D))
        barrier, phase = v_full
        mbarrier.wait(barrier, phase)  # V has arrived
        if LAST:
            clean_values(v_tile, cursor, j, PLAN.block_n, BLOCK_D)
            # Threads store zeros and wgmma reads through the async proxy: without the fence it may read older values, and
            # without the barrier the zeros of other warps would be missing.
            fence_async_shared()
            thread_barrier()
        return warpgroup_mma(p, v_tile.reshape([PLAN.block_n, BLOCK_D]), o, is_async=True), m, total

    @gluon.jit
    def totals(self, state):
        """Return the maxima and sums of the rows."""
        rows: gl.constexpr = gl.SliceLayout(1, accumulator(self.cache.PLAN.block_d))
        return gl.convert_layout(state[1], rows), gl.convert_layout(state[2], rows)
