"""A consumer of step 5 computes one block of keys: the products run on the tensor cores, and the softmax runs beside them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from utils.attention.gluon.shared import left_operand, rescale, start_scores, wait_products
from utils.attention.gluon.softmax import first_softmax, half_softmax, join_rows, split_rows, spread, whole_softmax


@gluon.jit
def start_output(work, number, o, p, state):
    """Start the product P V of block `number` - 1, added to `o`. If the softmax works on halves, rescale `o` first."""
    work.v.wait_full(number - 1)
    if len(state) == 2:
        o = rescale(o, spread((state[0].factor, state[1].factor), o))
    return warpgroup_mma(p, work.v.tile(number - 1), o, is_async=True)


@gluon.jit
def first_block(work, block, q):
    """Compute the first block of a tile, while no other product runs; return probabilities and softmax state."""
    PLAN: gl.constexpr = work.PLAN
    MASKED: gl.constexpr = work.CASE.mask != ""
    work.k.wait_full(block.number)
    # The softmax reads the registers of the scores. Without this wait the tensor cores may not have written them yet.
    s = wait_products(start_scores(q[0], work.k.tile(block.number), PLAN.depth, q[1]), 0, PLAN.block_n)
    work.k.release(block.number)
    # Without a mask, only this block has columns behind the last key. Each row sees a key, so its maximum is finite.
    p, state = first_softmax(work.mask(s, block), work.c, q[0].dtype, PLAN.consumers < 3, MASKED)
    return gl.convert_layout(p, left_operand(PLAN.block_d)), state


@gluon.jit
def step(work, block, q, o, p, state, more, masked):
    """Compute block i of the keys: start Q K(i) and P V(i-1), then compute the softmax of block i while P V(i-1) runs.

    more: whether another block follows. masked: whether block i has a mask.
    """
    PLAN: gl.constexpr = work.PLAN
    WINDOW: gl.constexpr = work.WINDOW
    dtype: gl.constexpr = work.k.tiles.dtype
    s = start_scores(q[0], work.k.tile(block.number), PLAN.depth, q[1])
    pv = start_output(work, block.number, o, p, state)
    # Two products run. Wait for the older product, the scores: without the wait the softmax would read unfinished registers.
    s = wait_products(s, 1, PLAN.block_n)
    work.k.release(block.number)
    if masked:
        s = work.mask(s, block)

    # The wait for the next keys ends a basic block. Without it, ptxas moves the wait for P V above the exponentials,
    # and nothing overlaps. Without the wait for P V, `o` would be read, and V's slot overwritten, while the product
    # still uses them.
    if len(state) == 1:
        p, rows = whole_softmax(s, state[0], work.c, dtype, WINDOW)
        work.k.wait_full(block.number + 1, pred=more)
        o = wait_products(pv, 0, PLAN.block_d)
        work.v.release(block.number - 1)
        return rescale(o, spread((rows.factor,), o)), gl.convert_layout(p, left_operand(PLAN.block_d)), (rows,)
    else:
        upper, lower = state
        s0, s1 = split_rows(s)
        top0 = gl.maximum(upper.maximum, gl.max(s0, 2))
        top1 = gl.maximum(lower.maximum, gl.max(s1, 2))
        p0, upper = half_softmax(s0, upper, top0, work.c, dtype, WINDOW)
        work.k.wait_full(block.number + 1, pred=more)
        o = wait_products(pv, 0, PLAN.block_d)
        work.v.release(block.number - 1)
        p1, lower = half_softmax(s1, lower, top1, work.c, dtype, WINDOW)
        return o, gl.convert_layout(join_rows(p0, p1), left_operand(PLAN.block_d)), (upper, lower)
