"""One block of keys in step 5's consumers: scores and output to the tensor cores, and the softmax beside them.

A warp of an m64 product holds 16 rows, and each thread holds elements of two of them, r and r + 8. With up to two consumers
the rows r and the rows r + 8 have a softmax each, so that the wait for P V can stand between the two: packing and summing
of the first half then fill the gaps between the exponentials of the second. With 160 registers ptxas would put that wait
first, and nothing would overlap: three consumers compute all rows as one piece. Scores are in base 2 (`shared.py`).

The running maximum follows the true one only when that has grown by more than 2^8. The result is exact all the same,
because sum and output carry the same factor, and after the first blocks hardly any warp multiplies its output again.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from utils.attention.gluon.shared import (
    MINUS_INF,
    aggregate,
    inverse_and_lse,
    left_operand,
    rescale,
    start_scores,
    wait_products,
)


@aggregate
class Rows:
    """Running softmax of some rows: maximum in use, sum, and the factor by which the last block rescaled them.

    Of a half `total` keeps one partial sum for each thread, (4, 8, 4), which are added up only at the end of a tile.
    """

    maximum: gl.tensor
    total: gl.tensor
    factor: gl.tensor


@gluon.jit
def split_rows(x):
    """[64, N] accumulator -> rows r and rows r + 8 of each warp, [4, 8, N] each: registers are renamed, not moved."""
    return x.reshape([4, 2, 8, x.shape[1]]).permute([0, 2, 3, 1]).split()


@gluon.jit
def join_rows(a, b):
    """Undo `split_rows`: two halves [4, 8, N] -> [64, N]."""
    return gl.join(a, b).permute([0, 3, 1, 2]).reshape([64, a.shape[2]])


@gluon.jit
def spread(values, x):
    """Values of the rows, one tensor, or one of rows r and one of rows r + 8, over the columns of the accumulator x."""
    if len(values) == 1:
        return gl.broadcast(gl.convert_layout(values[0], gl.SliceLayout(1, x.type.layout))[:, None], x)[0]
    else:
        x0, x1 = split_rows(x)
        rows: gl.constexpr = gl.SliceLayout(2, x0.type.layout)
        a = gl.broadcast(gl.convert_layout(values[0], rows)[:, :, None], x0)[0]
        b = gl.broadcast(gl.convert_layout(values[1], rows)[:, :, None], x1)[0]
        return gl.convert_layout(join_rows(a, b), x.type.layout)


@gluon.jit
def thread_sums(p):
    """Sum over the columns that one thread holds, [4, 8, N] -> [4, 8, 4]: no exchange between threads."""
    return gl.sum(gl.sum(p.reshape([4, 8, p.shape[2] // 8, 4, 2]), 4), 2)


@gluon.jit
def lazy_maximum(old, top, c, MASKED: gl.constexpr):
    """Return the maximum to use (the old one until the new one is 2^8 above it), c * that, and the rescale factor."""
    new = gl.where((top - old) * c > 8.0, top, old)
    shifted = new * c
    if MASKED:
        shifted = gl.where(new == MINUS_INF, 0.0, shifted)  # a row that has seen no key yet: 2^(-inf), not nan
        return new, shifted, gl.exp2(old * c - shifted)
    else:
        return new, shifted, gl.exp2((old - new) * c)


@gluon.jit
def half_softmax(s, rows, top, c, dtype: gl.constexpr, MASKED: gl.constexpr):
    """Softmax of one half's scores [4, 8, N], whose maximum with all before is `top`: probabilities and new `Rows`."""
    maximum, shifted, factor = lazy_maximum(rows.maximum, top, c, MASKED)
    p = gl.exp2(s * c - shifted[:, :, None])
    sums = thread_sums(p)
    total = rows.total * gl.convert_layout(factor, gl.SliceLayout(2, sums.type.layout))[:, :, None] + sums
    return p.to(dtype), Rows(maximum, total, factor)


@gluon.jit
def whole_softmax(s, rows, c, dtype: gl.constexpr, MASKED: gl.constexpr):
    """Softmax of the scores [64, N] in one piece: probabilities and the new `Rows`."""
    maximum, shifted, factor = lazy_maximum(rows.maximum, gl.maximum(rows.maximum, gl.max(s, 1)), c, MASKED)
    p = gl.exp2(s * c - shifted[:, None])
    return p.to(dtype), Rows(maximum, rows.total * factor + gl.sum(p, 1), factor)


@gluon.jit
def unseen_half(s):
    """`Rows` of a half that has seen no key; s gives the layout."""
    maximum = gl.full_like(gl.max(s, 2), MINUS_INF)
    return Rows(maximum, thread_sums(gl.zeros_like(s)), maximum)


@gluon.jit
def normalizers(state, c, row):
    """Return 1 / sum, and (row numbers, log-sum-exp) to store: each a tuple of one tensor, or of two with halves."""
    if len(state) == 1:
        rows = state[0]
        inverse, lse = inverse_and_lse(rows.maximum, rows.total, c)
        return (inverse,), ((row + gl.arange(0, 64, rows.maximum.type.layout), lse),)
    else:
        upper, lower = state
        layout: gl.constexpr = upper.maximum.type.layout
        inverse0, lse0 = inverse_and_lse(upper.maximum, gl.convert_layout(gl.sum(upper.total, 2), layout), c)
        inverse1, lse1 = inverse_and_lse(lower.maximum, gl.convert_layout(gl.sum(lower.total, 2), layout), c)
        warp = gl.arange(0, 4, gl.SliceLayout(1, layout))[:, None]
        numbers = row + 16 * warp + gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :]
        return (inverse0, inverse1), ((numbers, lse0), (numbers + 8, lse1))


@gluon.jit
def start_output(work, number, o, p, state):
    """Hand P V of block number - 1 to the tensor cores, added to `o`, which with halves is rescaled only here."""
    work.v.wait_full(number - 1)
    if len(state) == 2:
        o = rescale(o, spread((state[0].factor, state[1].factor), o))
    return warpgroup_mma(p, work.v.tile(number - 1), o, is_async=True)


@gluon.jit
def first_block(work, block, q):
    """A tile's first block, with no other product beside it: probabilities, and the `Rows` of both halves."""
    PLAN: gl.constexpr = work.PLAN
    MASKED: gl.constexpr = work.CASE.mask != ""
    dtype: gl.constexpr = work.k.tiles.dtype
    work.k.wait_full(block.number)
    # The softmax reads the scores' registers: before this wait the tensor cores may not have written them.
    s = wait_products(start_scores(q, work.k.tile(block.number), PLAN.depth), 0, PLAN.block_n)
    work.k.release(block.number)
    # Without a mask the first block has the last key, behind which there is none; each row sees one key at least.
    s = work.mask(s, block)
    if PLAN.consumers == 3:
        unseen = gl.full_like(gl.max(s, 1), MINUS_INF)
        p, rows = whole_softmax(s, Rows(unseen, gl.zeros_like(unseen), unseen), work.c, dtype, MASKED)
        return gl.convert_layout(p, left_operand(PLAN.block_d)), (rows,)
    else:
        s0, s1 = split_rows(s)
        p0, upper = half_softmax(s0, unseen_half(s0), gl.max(s0, 2), work.c, dtype, MASKED)
        p1, lower = half_softmax(s1, unseen_half(s1), gl.max(s1, 2), work.c, dtype, MASKED)
        return gl.convert_layout(join_rows(p0, p1), left_operand(PLAN.block_d)), (upper, lower)


@gluon.jit
def step(work, block, q, o, p, state, more, masked):
    """One key block i: Q K(i) and P V(i-1) to the tensor cores, then the softmax of block i while P V(i-1) runs.

    more: whether another block follows. masked: whether this one has a mask.
    """
    PLAN: gl.constexpr = work.PLAN
    HIDING: gl.constexpr = work.HIDING
    dtype: gl.constexpr = work.k.tiles.dtype
    s = start_scores(q, work.k.tile(block.number), PLAN.depth)
    pv = start_output(work, block.number, o, p, state)
    # Of the two products in flight the older one, the scores, is waited for: their registers are read next.
    s = wait_products(s, 1, PLAN.block_n)
    work.k.release(block.number)
    if masked:
        s = work.mask(s, block)

    # The wait for the next keys makes a basic block of what comes before it: without it ptxas hoists the wait for P V
    # above the exponentials, and nothing overlaps. The wait for P V comes before `o` and the slot of V are used again.
    if PLAN.consumers == 3:
        p, rows = whole_softmax(s, state[0], work.c, dtype, HIDING)
        work.k.wait_full(block.number + 1, pred=more)
        o = wait_products(pv, 0, PLAN.block_d)
        work.v.release(block.number - 1)
        return rescale(o, spread((rows.factor,), o)), gl.convert_layout(p, left_operand(PLAN.block_d)), (rows,)
    else:
        upper, lower = state
        s0, s1 = split_rows(s)
        top0 = gl.maximum(upper.maximum, gl.max(s0, 2))
        top1 = gl.maximum(lower.maximum, gl.max(s1, 2))
        p0, upper = half_softmax(s0, upper, top0, work.c, dtype, HIDING)
        work.k.wait_full(block.number + 1, pred=more)
        o = wait_products(pv, 0, PLAN.block_d)
        work.v.release(block.number - 1)
        p1, lower = half_softmax(s1, lower, top1, work.c, dtype, HIDING)
        return o, gl.convert_layout(join_rows(p0, p1), left_operand(PLAN.block_d)), (upper, lower)
