"""The blocks of keys of one program of `cluster.py` with query rows as rows: multiply, and ask for what comes next."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from utils.attention.gluon.decode.blocks import clean_values, clear_keys, load_block, mask_block, page_numbers
from utils.attention.gluon.shared import MINUS_INF, accumulator, left_operand, online_softmax, rescale, thread_barrier


@gluon.jit
def start_rows(cache, start, j, s, m, total, o, c, limits, v_tile, v_full, LAST: gl.constexpr):
    """The softmax of block j, query rows as rows, and the start of its product with V: output, maxima, sums."""
    PLAN: gl.constexpr = cache.PLAN
    BLOCK_D: gl.constexpr = PLAN.block_d
    low, clear = limits
    key = j * PLAN.block_n
    if (key + PLAN.block_n > clear) | (key < low):
        s = mask_block(s, cache, start, j, 0, 1)
    p, m, total, factor = online_softmax(s, m, total, c)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout))
    o = rescale(o, factor[:, None].broadcast_to([64, BLOCK_D]))
    p = gl.convert_layout(p.to(v_tile.dtype), left_operand(BLOCK_D))
    barrier, phase = v_full
    mbarrier.wait(barrier, phase)  # V has arrived
    if LAST:  # noqa: SIM102 (decided by the compiler; the next line for each block)
        if key + PLAN.block_n > start.length:
            clean_values(v_tile, start, j, PLAN.block_n, BLOCK_D)
            # Zeros stored by threads, read by wgmma through the async proxy: without the fence it may read what was there,
            # without the barrier the other warps' zeros would be missing.
            fence_async_shared()
            thread_barrier()
    return warpgroup_mma(p, v_tile.reshape([PLAN.block_n, BLOCK_D]), o, is_async=True), m, total


@gluon.jit
def start_row_scores(q, k_tile, layout: gl.constexpr):
    """Hand S = Q K^T to the tensor cores; k_tile: a slot of the ring, q: [64, BLOCK_D]."""
    BLOCK_N: gl.constexpr = k_tile.shape[2]
    k = k_tile.reshape([BLOCK_N, k_tile.shape[3]])
    zero = gl.zeros([64, BLOCK_N], gl.float32, layout)
    return warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def attend_rows(cache, c, start, n, q, ring, full, k_desc, v_desc):
    """The blocks of one program, query rows as rows: the output [64, BLOCK_D], unnormalized, the rows' maxima and sums.

    One warpgroup: a block's scores are computed during the softmax of the block before it.
    """
    PLAN: gl.constexpr = cache.PLAN
    BLOCK_D: gl.constexpr = PLAN.block_d
    SLOTS: gl.constexpr = PLAN.slots
    AHEAD: gl.constexpr = SLOTS // 2
    scores: gl.constexpr = accumulator(PLAN.block_n)
    output: gl.constexpr = accumulator(BLOCK_D)
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    m = gl.full([64], MINUS_INF, gl.float32, rows)
    total = gl.zeros([64], gl.float32, rows)
    o = gl.zeros([64, BLOCK_D], gl.float32, output)
    limits = clear_keys(cache, start)
    numbers = page_numbers(cache, start.behind(AHEAD * cache.step))
    following = page_numbers(cache, start.behind((AHEAD + 1) * cache.step))
    mbarrier.wait(full.index(0), 0)  # K has arrived
    s = warpgroup_mma_wait(0, [start_row_scores(q, ring.index(0), scores)])
    if n > AHEAD:
        thread_barrier()  # all warps have read this K: TMA may overwrite it
        k_next = start.behind(AHEAD * cache.step)
        load_block(k_desc, cache, k_next, numbers, ring.index(0), full.index(0), True)
    for i in range(n - 1):
        after = 2 * (i + 1) % SLOTS
        mbarrier.wait(full.index(after), (2 * (i + 1) // SLOTS) & 1)
        s_next = start_row_scores(q, ring.index(after), scores)
        slot = 2 * i % SLOTS + 1
        v_full = full.index(slot), (2 * i // SLOTS) & 1
        j = start.j + i * cache.step
        o_next, m, total = start_rows(cache, start, j, s, m, total, o, c, limits, ring.index(slot), v_full, False)
        s = warpgroup_mma_wait(1, [s_next])  # the older product: its K is free
        if i + 1 + AHEAD < n:
            thread_barrier()
            k_next = start.behind((i + 1 + AHEAD) * cache.step)
            load_block(k_desc, cache, k_next, following, ring.index(after), full.index(after), True)
        o = warpgroup_mma_wait(0, [o_next])
        if i + AHEAD < n:
            thread_barrier()  # all warps have read V
            v_next = start.behind((i + AHEAD) * cache.step)
            load_block(v_desc, cache, v_next, numbers, ring.index(slot), full.index(slot), True)
        numbers = following
        following = page_numbers(cache, start.behind((i + 2 + AHEAD) * cache.step))
    slot = 2 * (n - 1) % SLOTS + 1
    v_full = full.index(slot), (2 * (n - 1) // SLOTS) & 1
    j = start.j + (n - 1) * cache.step
    o, m, total = start_rows(cache, start, j, s, m, total, o, c, limits, ring.index(slot), v_full, True)
    m = gl.convert_layout(m, gl.SliceLayout(1, output))
    total = gl.convert_layout(total, gl.SliceLayout(1, output))
    return warpgroup_mma_wait(0, [o]), m, total
