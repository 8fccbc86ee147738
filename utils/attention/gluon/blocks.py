"""One block of keys in step 5's consumers: scores and output to the tensor cores, and the softmax beside them.

A plan's `columns` are the widths of the products. Head dimensions 72 to 96 have tiles 128 wide, of which the products compute
64 and then 32 columns: Q K^T adds up two products, and the output is a tuple of two accumulators. Otherwise there is one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from utils.attention.gluon.shared import accumulator, left_operand, rescale, wait_products
from utils.attention.gluon.softmax import first_softmax, half_softmax, join_rows, split_rows, spread, whole_softmax


@gluon.constexpr_function
def products(plan):
    """How many products compute a tile's columns."""
    return len(plan.columns)


@gluon.constexpr_function
def width(plan, i):
    """The columns of product number i."""
    return plan.columns[i]


@gluon.constexpr_function
def _first_column(plan, i):
    return sum(plan.columns[:i])


@gluon.jit
def piece(tile, PLAN: gl.constexpr, i: gl.constexpr, DIM: gl.constexpr = 1):
    """The columns of a tile in shared memory that belong to product number i."""
    if products(PLAN) == 1:
        return tile
    else:
        return tile.slice(_first_column(PLAN, i), width(PLAN, i), dim=DIM)


@gluon.jit
def start_scores(work, q, k):
    """Hand Q K^T to the tensor cores: tiles [BLOCK_M, BLOCK_D] and [BLOCK_N, BLOCK_D] of shared memory."""
    PLAN: gl.constexpr = work.PLAN
    BLOCK_N: gl.constexpr = PLAN.block_n
    BLOCK_M: gl.constexpr = q.shape[0]
    s = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, accumulator(BLOCK_N))
    for i in gl.static_range(products(PLAN)):
        k_piece = piece(k.permute([1, 0]), PLAN, i, 0)
        s = warpgroup_mma(piece(q, PLAN, i), k_piece, s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def no_output(work):
    """The output of a tile that has seen no key: zeros, an accumulator for each product."""
    PLAN: gl.constexpr = work.PLAN
    BLOCK_M: gl.constexpr = work.q.tiles.shape[3]
    o = ()
    for i in gl.static_range(products(PLAN)):
        o += (gl.zeros([BLOCK_M, width(PLAN, i)], gl.float32, accumulator(width(PLAN, i))),)
    return o


@gluon.jit
def start_output(work, number, o, p, state):
    """Hand P V of block number - 1 to the tensor cores, added to `o`, which with halves is rescaled only here."""
    PLAN: gl.constexpr = work.PLAN
    work.v.wait_full(number - 1)  # before that the product would read the values of the slot's last round
    v = work.v.tile(number - 1)
    pv = ()
    for i in gl.static_range(products(PLAN)):
        o_piece = o[i]
        if PLAN.halves:
            o_piece = rescale(o_piece, spread((state[0].factor, state[1].factor), o_piece))
        left = gl.convert_layout(p, left_operand(width(PLAN, i)))  # the same registers
        pv += (warpgroup_mma(left, piece(v, PLAN, i), o_piece, is_async=True),)
    return pv


@gluon.jit
def wait_output(work, pv):
    """Wait until the output's products are done: their registers are read next, and V's slot is released."""
    PLAN: gl.constexpr = work.PLAN
    o = ()
    for i in gl.static_range(products(PLAN)):
        o += (wait_products(pv[i], 0, width(PLAN, i)),)
    return o


@gluon.jit
def times_rows(work, o, factors):
    """Multiply each row of the output by a number; factors: as `softmax.spread` takes them."""
    product = ()
    for i in gl.static_range(products(work.PLAN)):
        product += (o[i] * spread(factors, o[i]),)
    return product


@gluon.jit
def first_block(work, block, q):
    """A tile's first block, with no other product beside it: probabilities and the softmax state."""
    PLAN: gl.constexpr = work.PLAN
    MASKED: gl.constexpr = work.CASE.causal or work.CASE.window
    work.k.wait_full(block.number)
    # The softmax reads the scores' registers: before this wait the tensor cores may not have written them.
    s = wait_products(start_scores(work, q, work.k.tile(block.number)), 0, PLAN.block_n)
    work.k.release(block.number)
    if MASKED:  # noqa: SIM114 (decided by the compiler; the next line for each tile)
        s = work.mask(s, block)
    elif block.key + PLAN.block_n > work.sk:
        s = work.mask(s, block)
    # Of the last keys each row sees one at least: no maximum is minus infinity without another mask.
    p, state = first_softmax(s, work.c, q.dtype, PLAN.halves, MASKED)
    return gl.convert_layout(p, left_operand(width(PLAN, 0))), state


@gluon.jit
def finish_block(work, block, s, pv, state, more, masked):
    """The softmax of block i, from the scores `s` in flight, while P V(i-1), `pv`, is still running.

    more: whether another block follows. masked: whether the block needs a mask; None: behind a tile's first block none does.
    """
    PLAN: gl.constexpr = work.PLAN
    UNSEEN: gl.constexpr = work.CASE.window  # a row may have seen no key yet
    dtype: gl.constexpr = work.k.tiles.dtype
    # Of the products in flight the oldest, the scores, are waited for: their registers are read next.
    s = wait_products(s, products(PLAN), PLAN.block_n)
    work.k.release(block.number)
    if masked is not None:  # noqa: SIM102 (decided by the compiler; the next line for each block)
        if masked:
            s = work.mask(s, block)

    # The wait for the next keys makes a basic block of what comes before it: without it ptxas hoists the wait for P V
    # above the exponentials, and nothing overlaps. The wait for P V comes before `o` and the slot of V are used again.
    if PLAN.halves:
        upper, lower = state
        s0, s1 = split_rows(s)
        top0 = gl.maximum(upper.maximum, gl.max(s0, 2))
        top1 = gl.maximum(lower.maximum, gl.max(s1, 2))
        p0, upper = half_softmax(s0, upper, top0, work.c, dtype, UNSEEN)
        work.k.wait_full(block.number + 1, pred=more)
        o = wait_output(work, pv)
        work.v.release(block.number - 1)
        p1, lower = half_softmax(s1, lower, top1, work.c, dtype, UNSEEN)
        return o, gl.convert_layout(join_rows(p0, p1), left_operand(width(PLAN, 0))), (upper, lower)
    else:
        gl.static_assert(products(PLAN) == 1)
        p, rows = whole_softmax(s, state[0], work.c, dtype, UNSEEN)
        work.k.wait_full(block.number + 1, pred=more)
        o = wait_output(work, pv)[0]
        work.v.release(block.number - 1)
        o = rescale(o, spread((rows.factor,), o))
        return (o,), gl.convert_layout(p, left_operand(width(PLAN, 0))), (rows,)


@gluon.jit
def step(work, block, q, o, p, state, more, masked):
    """One key block i: Q K(i) and P V(i-1) to the tensor cores, then the softmax of block i while P V(i-1) runs."""
    s = start_scores(work, q, work.k.tile(block.number))
    pv = start_output(work, block.number, o, p, state)
    return finish_block(work, block, s, pv, state, more, masked)
