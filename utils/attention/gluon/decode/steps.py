"""The blocks of keys of one consumer of `rows.py`: step 5's pipeline, where keys come more slowly than they are computed.

Step 5 waits for the next keys in the middle of a softmax and gives V's slot back behind that, which costs nothing where
keys are always there before they are needed. Decode waits for memory at each block. So here V's slot is given back
first, and the rest of a block's softmax is done when the next keys arrive.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.blocks import start_output, start_scores
from utils.attention.gluon.shared import left_operand, rescale, wait_products
from utils.attention.gluon.softmax import first_softmax, half_softmax, join_rows, split_rows, spread, whole_softmax


@gluon.jit
def first_block(share, block, q, masked):
    """A head's first block, with no other product beside it: probabilities and the softmax state."""
    PLAN: gl.constexpr = share.PLAN
    share.k.wait_full(block.number)
    # The softmax reads the scores' registers: before this wait the tensor cores may not have written them.
    s = wait_products(start_scores(q, share.k.tile(block.number)), 0, PLAN.block_n)
    share.k.release(block.number)
    if PLAN.fp16:
        s = s * share.powers[:, None]
    if masked:
        s = share.mask(s, block, True, False)
    p, state = first_softmax(s, share.c, q.dtype, PLAN.halves, True)
    return gl.convert_layout(p, left_operand(PLAN.block_d)), state


@gluon.jit
def finish_block(share, block, s, pv, state, more, masked):
    """The softmax of block i, from the scores `s` in flight, while P V(i-1), `pv`, is still running."""
    PLAN: gl.constexpr = share.PLAN
    dtype: gl.constexpr = share.k.tiles.dtype
    # Of the two products in flight the older one, the scores, is waited for: their registers are read next.
    s = wait_products(s, 1, PLAN.block_n)
    share.k.release(block.number)
    if PLAN.fp16:
        s = s * share.powers[:, None]
    if masked:
        s = share.mask(s, block, True, False)
    # The second wait for V(i-1), which is long over, makes a basic block of what comes before it: without one ptxas
    # hoists the wait for P V above the exponentials, and nothing overlaps. (K's barrier will not do: its slot has been
    # released, and a barrier two fills further looks as it did before the first.) The wait for P V comes before `o` and
    # the slot of V are used again.
    if PLAN.halves:
        upper, lower = state
        s0, s1 = split_rows(s)
        top0 = gl.maximum(upper.maximum, gl.max(s0, 2))
        top1 = gl.maximum(lower.maximum, gl.max(s1, 2))
        p0, upper = half_softmax(s0, upper, top0, share.c, dtype, True)
        share.v.wait_full(block.number - 1)
        o = wait_products(pv, 0, PLAN.block_d)
        share.v.release(block.number - 1)
        p1, lower = half_softmax(s1, lower, top1, share.c, dtype, True)
        p = gl.convert_layout(join_rows(p0, p1), left_operand(PLAN.block_d))
        share.k.wait_full(block.number + 1, pred=more)
        return o, p, (upper, lower)
    else:
        p, rows = whole_softmax(s, state[0], share.c, dtype, True)
        share.v.wait_full(block.number - 1)
        o = wait_products(pv, 0, PLAN.block_d)
        share.v.release(block.number - 1)
        o = rescale(o, spread((rows.factor,), o))
        share.k.wait_full(block.number + 1, pred=more)
        return o, gl.convert_layout(p, left_operand(PLAN.block_d)), (rows,)


@gluon.jit
def step(share, block, q, o, p, state, more, masked):
    """One key block i: Q K(i) and P V(i-1) to the tensor cores, then the softmax of block i while P V(i-1) runs."""
    s = start_scores(q, share.k.tile(block.number))
    pv = start_output(share, block.number, o, p, state)
    return finish_block(share, block, s, pv, state, more, masked)
