"""Scores a block early: the softmax of a block waits for no product.

In `step5_overlapped.consumer` a block's scores are handed to the tensor cores just before their softmax, which waits for them;
only the other consumers' work fills that wait. Here the scores of block i + 1 are handed over before the softmax of block i, so
that they are there when it ends. That takes a second set of scores in registers, which leaves room for two consumers.

    tensor cores   P V(0), S(2)             P V(1), S(3)             P V(2), S(4)
    a consumer     softmax of S(1)          softmax of S(2)          softmax of S(3)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma

from utils.attention.gluon.blocks import start_scores
from utils.attention.gluon.pipeline import Block
from utils.attention.gluon.shared import accumulator, left_operand, rescale, wait_products
from utils.attention.gluon.softmax import (
    Rows,
    first_softmax,
    half_softmax,
    join_rows,
    normalizers,
    split_rows,
    spread,
    unseen_halves,
)
from utils.attention.gluon.stores import store_lse, store_tile


@gluon.jit
def early_step(work, number, q, s, o, p, state, more, loaded=True):
    """Block `number`, whose scores `s` are there: P V of the last block, the next one's scores, the softmax.

    more: whether there is a block number + 2.
    """
    PLAN: gl.constexpr = work.PLAN
    dtype: gl.constexpr = work.k.tiles.dtype
    MASKED: gl.constexpr = work.CASE.causal
    upper, lower = state
    o = rescale(o, spread((upper.factor, lower.factor), o))
    pv = warpgroup_mma(p, work.v.tile(number - 1), o, is_async=True)
    following = start_scores(q, work.k.tile(gl.where(loaded, number + 1, number)))
    s0, s1 = split_rows(s)
    top0 = gl.maximum(upper.maximum, gl.max(s0, 2))
    top1 = gl.maximum(lower.maximum, gl.max(s1, 2))
    p0, upper = half_softmax(s0, upper, top0, work.c, dtype, MASKED, PLAN.by_polynomial)
    p1, lower = half_softmax(s1, lower, top1, work.c, dtype, MASKED, PLAN.by_polynomial)
    work.k.wait_full(number + 2, pred=more)
    work.v.wait_full(number, pred=work.sk > 0)
    o = wait_products(pv, 1, PLAN.block_d)
    work.v.release(number - 1)
    following = wait_products(following, 0, PLAN.block_n)
    if loaded:
        work.k.release(number + 1)
    return following, o, gl.convert_layout(join_rows(p0, p1), left_operand(PLAN.block_d)), (upper, lower)


@gluon.jit
def consumer_early(work, results, W: gl.constexpr):
    """Warpgroup W: rows W * 64 and on of each tile, key blocks from the last to the first, scores a block early.

    There is no gap between tiles: the next tile's first scores are handed over before this one's last P V.
    """
    out, o_tiles, lse_ptr = results
    PLAN: gl.constexpr = work.PLAN
    CAUSAL: gl.constexpr = work.CASE.causal
    MASKED: gl.constexpr = CAUSAL or work.CASE.tail
    BLOCK_N: gl.constexpr = PLAN.block_n
    BLOCK_D: gl.constexpr = PLAN.block_d
    BLOCK_M: gl.constexpr = work.q.tiles.shape[3]
    sq, sk = work.sq, work.sk
    count, t, rest = work.first(BLOCK_M * PLAN.consumers)
    it = gl.to_tensor(0)
    work.q.wait_full(0, W)
    q = work.q.tile(0, W)
    work.k.wait_full(0)
    s = start_scores(q, work.k.tile(0))
    work.k.wait_full(1)
    following = start_scores(q, work.k.tile(1))
    s = wait_products(s, 0, BLOCK_N)
    following = wait_products(following, 0, BLOCK_N)
    work.k.release(0)
    work.k.release(1)
    for i in range(count):
        # Here are the scores of the tile's blocks 0 and 1, numbers it and it + 1.
        t_next = work.todo.start_next(t, rest, i)
        more = i + 1 < count
        tile, flat = work.todo.locate(t)
        first_row = work.first_row(tile)
        row = first_row + W * BLOCK_M
        lo, hi = work.blocks(t, first_row, BLOCK_M * PLAN.consumers)
        n = hi - lo
        q = work.q.tile(i, W)
        padded = hi > work.visible_blocks(first_row, BLOCK_M * PLAN.consumers)[1]
        if padded:  # the first block is behind all keys
            following = work.mask(following, Block(it, row, (hi - 2) * BLOCK_N), CAUSAL, False)
            p = gl.zeros([BLOCK_M, BLOCK_N], q.dtype, left_operand(BLOCK_D))
            upper, lower = unseen_halves(BLOCK_M, BLOCK_N, accumulator(BLOCK_N))
            # The first P V is of zeros, and by this factor it stays zero.
            zero = gl.zeros_like(upper.factor)
            state = (Rows(upper.maximum, upper.total, zero), Rows(lower.maximum, lower.total, zero))
        else:
            if MASKED:
                s = work.mask(s, Block(it, row, (hi - 1) * BLOCK_N), CAUSAL, False)
            p, state = first_softmax(s, work.c, q.dtype, PLAN.halves, MASKED, PLAN.by_polynomial)
            p = gl.convert_layout(p, left_operand(BLOCK_D))
        o = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, accumulator(BLOCK_D))
        work.k.wait_full(it + 2, pred=n > 2)
        work.v.wait_full(it)
        it += 1
        # Two blocks at a time (`Work.blocks` makes n even), so that the two sets of scores change places without moves.
        for j in range(2, n - 1, 2):
            other, o, p, state = early_step(work, it, q, following, o, p, state, sk > 0)
            following, o, p, state = early_step(work, it + 1, q, other, o, p, state, j + 2 < n)
            it += 2
        work.q.release(i, W)
        # The next tile's first two blocks. Behind the last tile they are such that still lie there; nobody asks for the result.
        work.q.wait_full(i + 1, W, pred=more)
        work.k.wait_full(it + 1, pred=more)
        next_q = work.q.tile(gl.where(more, i + 1, i), W)
        s, o, p, state = early_step(work, it, next_q, following, o, p, state, more, more)
        it += 1
        pv = warpgroup_mma(
            p, work.v.tile(it - 1), rescale(o, spread((state[0].factor, state[1].factor), o)), is_async=True
        )
        following = start_scores(next_q, work.k.tile(gl.where(more, it + 1, it - 1)))
        inverse, lses = normalizers(state, work.c, row)
        if work.CASE.lse:
            store_lse(lse_ptr, lses, flat, sq)
        o = wait_products(pv, 1, BLOCK_D)
        following = wait_products(following, 0, BLOCK_N)
        o = o * spread(inverse, o)
        work.v.release(it - 1)
        if more:
            work.k.release(it + 1)
        tma.store_wait(0)  # TMA may still be reading the last tile's rows from this buffer
        store_tile(work, out, flat, row, o_tiles.index(W), o)
        t = work.todo.finish_next(t_next)
    tma.store_wait(0)  # shared memory must live until TMA has read it
