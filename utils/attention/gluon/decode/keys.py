"""The decode kernel for few query rows: keys are the rows of the products, query rows the columns, and SMs share the keys.

A product of tensor cores has at least 64 rows. A decode step has few query rows (heads of the group times new tokens), so
the products are transposed: S^T = K Q^T and O^T = V^T P^T, with eight columns or more. Products read K and V in shared memory
as TMA writes them, and P goes through shared memory. Each program reads an equal share of all blocks of keys (`work.py`). If
several programs have blocks of one head, a second launch merges their parts (`merge.py`).

There is one role: all warps compute, and between two products one thread starts the copy into the slot that is free now. The
warps of a program meet at a barrier before that anyway, for the maxima over the keys.

    part        what                                    head dim 64           128                 256
    columns     heads of the group x new tokens         16; more: `rows.py`
    block       keys                                    128                   128, or 64          64
    ring        tiles of K and V in turn                4                     4                   6
    pipeline    this block's softmax runs beside the next block's scores
    programs    one an SM; two if there are as many heads as SMs, with blocks of 64 keys at 128

Measured: 1.09 times as fast as the best library, over 30 points (H200; docs/kernels/decode.md, assets/results/h200/decode.json).
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from utils.attention.gluon.decode.blocks import (
    clean_values,
    copy_block,
    expect_block,
    fill_ring,
    first_blocks,
    load_block,
    load_queries,
    mask_block,
    needs_mask,
    page_numbers,
)
from utils.attention.gluon.decode.work import Cache
from utils.attention.gluon.shared import MINUS_INF, accumulator, aggregate, thread_barrier


@gluon.jit
def thread_sums(p):
    """Sum the rows in each thread, [keys, columns] -> [4, 8, columns], without an exchange between threads."""
    parts = p.reshape([p.shape[0] // 64, 4, 2, 8, p.shape[1]])
    return gl.sum(gl.sum(parts, 2), 0)


@gluon.jit
def softmax(s, m, sums, c):
    """Compute one block of the online softmax: return 2^(scores - maximum), and the columns' new maxima, factors and sums."""
    top = gl.maximum(m, gl.max(s, 0))
    shifted = gl.where(top == MINUS_INF, 0.0, top * c)  # without a key: 2^(-inf - 0) = 0; 2^(-inf + inf) would be nan
    factor = gl.exp2(m * c - shifted)
    p = gl.exp2(s * c - shifted[None, :])
    layout: gl.constexpr = sums.type.layout
    spread = gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return p, top, factor, sums * spread[None, :][:, None, :] + thread_sums(p)


@aggregate
class KeysAsRows:
    """Products with keys as rows: S^T = K Q^T and O^T = V^T P^T, for one tile of queries; P goes through shared memory."""

    cache: Cache
    q: gl.shared_memory_descriptor
    p_tile: gl.shared_memory_descriptor

    @gluon.jit
    def initial_state(self):
        """Return the state before the first block: output [BLOCK_D, columns], maxima, and the sums of each thread."""
        COLUMNS: gl.constexpr = self.cache.PLAN.columns
        BLOCK_N: gl.constexpr = self.cache.PLAN.block_n
        BLOCK_D: gl.constexpr = self.cache.PLAN.block_d
        layout: gl.constexpr = accumulator(COLUMNS)
        m = gl.full([COLUMNS], MINUS_INF, gl.float32, gl.SliceLayout(0, layout))
        o = gl.zeros([BLOCK_D, COLUMNS], gl.float32, layout)
        return o, m, thread_sums(gl.zeros([BLOCK_N, COLUMNS], gl.float32, layout))

    @gluon.jit
    def start_scores(self, k_tile):
        """Start the scores of a block on the tensor cores; k_tile: a slot of the ring."""
        COLUMNS: gl.constexpr = self.cache.PLAN.columns
        BLOCK_N: gl.constexpr = self.cache.PLAN.block_n
        k = k_tile.reshape([BLOCK_N, self.cache.PLAN.block_d])
        zero = gl.zeros([BLOCK_N, COLUMNS], gl.float32, accumulator(COLUMNS))
        return warpgroup_mma(k, self.q.permute([1, 0]), zero, use_acc=False, is_async=True)

    @gluon.jit
    def start_block(self, cursor, j, s, state, v_tile, v_full, LAST: gl.constexpr):
        """Compute the softmax of block j of a head from its scores, start its product with V, and return the new state.

        v_full: the barrier of V and its phase. LAST: whether the block may hold keys behind the last key.
        """
        PLAN: gl.constexpr = self.cache.PLAN
        o, m, sums = state
        if needs_mask(self.cache, cursor, j):
            s = mask_block(s, self.cache, cursor, j, 0)
        p, m, factor, sums = softmax(s, m, sums, self.cache.c)
        self.p_tile.permute([1, 0]).store(p.to(self.p_tile.dtype))
        o = o * factor[None, :]
        barrier, phase = v_full
        mbarrier.wait(barrier, phase)  # V has arrived
        if LAST:
            clean_values(v_tile, cursor, j, PLAN.block_n, PLAN.block_d)
        # Threads store P and wgmma reads through the async proxy: without the fence it may read the last P, and without the
        # barrier the rows of slower warps would be missing.
        fence_async_shared()
        thread_barrier()
        v = v_tile.reshape([PLAN.block_n, PLAN.block_d])
        o = warpgroup_mma(v.permute([1, 0]), self.p_tile.permute([1, 0]), o, is_async=True)
        return o, m, sums

    @gluon.jit
    def totals(self, state):
        """Return the maxima and sums of the columns."""
        columns: gl.constexpr = gl.SliceLayout(0, accumulator(self.cache.PLAN.columns))
        return state[1], gl.convert_layout(gl.sum(gl.sum(state[2], 1), 0), columns)


@gluon.jit
def attend_head(way, cursor, span, tiles, loads):
    """Attend to blocks of one head from the cursor on; return the unnormalized output, maxima and sums of rows, and the loads.

    way: `KeysAsRows`, or `cluster_rows.RowsAsRows`. span: number of blocks, number of the first block in this program, and
    number of the program's blocks. tiles: the ring, its barriers, and the descriptors of K and V. loads: cursor and pages of
    the next block to load; within a head K runs a block before V.
    """
    cache = way.cache
    SLOTS: gl.constexpr = cache.PLAN.slots
    n, i, count = span
    ring, full, k_desc, v_desc = tiles
    block, pages = loads
    state = way.initial_state()
    # The first block's scores come before the loop. Each step then starts the next block's scores, so that the tensor cores
    # compute them during this block's softmax.
    slot = 2 * i % SLOTS
    mbarrier.wait(full.index(slot), (2 * i // SLOTS) & 1)  # K has arrived
    s = warpgroup_mma_wait(0, [way.start_scores(ring.index(slot))])
    thread_barrier()  # all warps have read this K: TMA may overwrite it
    load_block(k_desc, cache, block, pages, ring.index(slot), full.index(slot), i + SLOTS // 2 < count)
    following = cache.advance(block)
    following_pages = page_numbers(cache, following)
    for k in range(n - 1):
        after = 2 * (i + 1) % SLOTS
        mbarrier.wait(full.index(after), (2 * (i + 1) // SLOTS) & 1)  # the next K has arrived
        s_next = way.start_scores(ring.index(after))
        slot = 2 * i % SLOTS + 1
        v_full = full.index(slot), (2 * i // SLOTS) & 1
        o_next, m, sums = way.start_block(
            cursor, cursor.j + (k << cache.bits), s, state, ring.index(slot), v_full, False
        )
        s, o = warpgroup_mma_wait(0, [s_next, o_next])  # without it the next softmax would read unfinished scores
        state = o, m, sums
        thread_barrier()  # all warps have read this K and V, and P: TMA may overwrite them
        more = i + SLOTS // 2 < count
        i += 1
        k_more = i + SLOTS // 2 < count
        expect_block(v_desc, cache, full.index(slot), more)
        expect_block(k_desc, cache, full.index(after), k_more)
        copy_block(v_desc, cache, block, pages, ring.index(slot), full.index(slot), more)
        copy_block(k_desc, cache, following, following_pages, ring.index(after), full.index(after), k_more)
        block, pages = following, following_pages
        following = cache.advance(block)
        following_pages = page_numbers(cache, following)

    # The last block has no next scores to start.
    slot = 2 * i % SLOTS + 1
    v_full = full.index(slot), (2 * i // SLOTS) & 1
    j = cursor.j + ((n - 1) << cache.bits)
    o_next, m, sums = way.start_block(cursor, j, s, state, ring.index(slot), v_full, True)
    o = warpgroup_mma_wait(0, [o_next])
    thread_barrier()  # all warps have read this V, and P: TMA may overwrite them
    more = i + SLOTS // 2 < count
    load_block(v_desc, cache, block, pages, ring.index(slot), full.index(slot), more)
    m, total = way.totals((o, m, sums))
    return o, m, total, (following, following_pages)


@gluon.jit
def allocate_probabilities(dtype: gl.constexpr, PLAN: gl.constexpr):
    """Allocate a tile for P, the right operand of V^T P^T, with keys innermost: wgmma reads this order fastest."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    return gl.allocate_shared_memory(dtype, [PLAN.columns, PLAN.block_n], layout)


@gluon.jit
def attend_keys(results, q_desc, k_desc, v_desc, scales_ptr):
    """Attend to a program's share of the blocks of all heads, and store each head, or its part."""
    cache = results.cache
    PLAN: gl.constexpr = cache.PLAN
    columns: gl.constexpr = gl.SliceLayout(0, accumulator(PLAN.columns))
    cursor, count = cache.start()
    if count > 0:
        blocks, following = first_blocks(cache, cursor)
        ring, full, q_ring = fill_ring(cache, (q_desc, k_desc, v_desc), blocks, count, 2)
        p_tile = allocate_probabilities(k_desc.dtype, PLAN)
        loads = following, page_numbers(cache, following)
        done = gl.to_tensor(0)
        piece = gl.to_tensor(0)
        while done < count:
            n = gl.minimum(cursor.blocks - cursor.j, count - done)
            following = cache.advance(cursor.last_block())
            # The products of the last piece are done, so its tile of Q is free.
            tile, barrier = q_ring.index((piece + 1) % 2), full.index(PLAN.slots + (piece + 1) % 2)
            load_queries(q_desc, cache, following, tile, barrier, done + n < count)
            mbarrier.wait(full.index(PLAN.slots + piece % 2), (piece // 2) & 1)  # Q has arrived
            q = q_ring.index(piece % 2).reshape([PLAN.columns, PLAN.block_d])
            way = KeysAsRows(cache, q, p_tile)
            o, m, total, loads = attend_head(way, cursor, (n, done, count), (ring, full, k_desc, v_desc), loads)
            results.store(cursor, n, o, ((gl.arange(0, PLAN.columns, columns), m, total),), 1)
            done += n
            piece += 1
            cursor = following
