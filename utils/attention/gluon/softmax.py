"""Step 5's softmax in the registers of one warpgroup. It computes 64 rows as one piece, or as two halves in turn.

A warp of an m64 product holds 16 rows, and a thread holds elements of the rows r and r + 8. With one or two consumers,
the rows r and the rows r + 8 are halves, and the wait for P V stands between the two halves. The first half
is packed and summed while the exponentials of the second half run. With three or four consumers, a thread has at most
160 registers: ptxas would move the wait before both halves, and nothing would overlap. So these consumers compute all
rows as one piece. Scores are in base 2 (`shared.py`).

The maximum in use changes only when the true maximum exceeds it by 8 in base 2. Until then probabilities are at most
2^8. The result is exact nevertheless, because sum and output have the same factor. Later blocks rarely rescale it.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.shared import MINUS_INF, aggregate, inverse_and_lse


@aggregate
class Rows:
    """State of the softmax for some rows: the maximum in use, the sum, and the factor by which the last block rescaled the sum.

    For a half, `total` has a partial sum of each thread, (4, 8, 4). The end of a tile adds them up.
    """

    maximum: gl.tensor
    total: gl.tensor
    factor: gl.tensor


@gluon.jit
def split_rows(x):
    """Split an accumulator [64, N] into the rows r and the rows r + 8 of its warps, [4, 8, N] each. No register moves."""
    return x.reshape([x.shape[0] // 16, 2, 8, x.shape[1]]).permute([0, 2, 3, 1]).split()


@gluon.jit
def join_rows(a, b):
    """Undo `split_rows`: join two halves [4, 8, N] to [64, N]."""
    return gl.join(a, b).permute([0, 3, 1, 2]).reshape([16 * a.shape[0], a.shape[2]])


@gluon.jit
def spread(values, x):
    """Repeat the values of the rows over the columns of the accumulator x. `values` has one tensor, or a tensor for each half."""
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
    """Sum the columns of each thread, [4, 8, N], to [4, 8, 4]. The threads exchange nothing."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], 8, p.shape[2] // 8, 4, 2]), 4), 2)


@gluon.jit
def lazy_maximum(old, top, c, MASKED: gl.constexpr):
    """Return the maximum to use, c * maximum, and the rescale factor. `old` stays in use until `top` exceeds it by 8 in base 2."""
    new = gl.where((top - old) * c > 8.0, top, old)
    shifted = new * c
    if MASKED:
        shifted = gl.where(new == MINUS_INF, 0.0, shifted)  # for a row without keys so far: 2^(-inf), not nan
        return new, shifted, gl.exp2(old * c - shifted)
    else:
        return new, shifted, gl.exp2((old - new) * c)


@gluon.jit
def half_softmax(s, rows, top, c, dtype: gl.constexpr, MASKED: gl.constexpr):
    """Compute the softmax of a half's scores [4, 8, N]; return probabilities and `Rows`. top: the maximum up to this block."""
    maximum, shifted, factor = lazy_maximum(rows.maximum, top, c, MASKED)
    p = gl.exp2(s * c - shifted[:, :, None])
    sums = thread_sums(p)
    total = rows.total * gl.convert_layout(factor, gl.SliceLayout(2, sums.type.layout))[:, :, None] + sums
    return p.to(dtype), Rows(maximum, total, factor)


@gluon.jit
def whole_softmax(s, rows, c, dtype: gl.constexpr, MASKED: gl.constexpr):
    """Compute the softmax of the scores [64, N] in one piece; return probabilities and `Rows`."""
    maximum, shifted, factor = lazy_maximum(rows.maximum, gl.maximum(rows.maximum, gl.max(s, 1)), c, MASKED)
    p = gl.exp2(s * c - shifted[:, None])
    return p.to(dtype), Rows(maximum, rows.total * factor + gl.sum(p, 1), factor)


@gluon.jit
def initial_half(s):
    """Return the `Rows` of a half before its first key; `s` gives the layout."""
    maximum = gl.full_like(gl.max(s, 2), MINUS_INF)
    return Rows(maximum, thread_sums(gl.zeros_like(s)), maximum)


@gluon.jit
def first_softmax(s, c, dtype: gl.constexpr, HALVES: gl.constexpr, MASKED: gl.constexpr):
    """Compute the softmax of a tile's first block; return probabilities [64, N], and as state a tuple of one or two `Rows`."""
    if HALVES:
        s0, s1 = split_rows(s)
        p0, rows0 = half_softmax(s0, initial_half(s0), gl.max(s0, 2), c, dtype, MASKED)
        p1, rows1 = half_softmax(s1, initial_half(s1), gl.max(s1, 2), c, dtype, MASKED)
        return join_rows(p0, p1), (rows0, rows1)
    else:
        maximum = gl.full_like(gl.max(s, 1), MINUS_INF)
        p, rows = whole_softmax(s, Rows(maximum, gl.zeros_like(maximum), maximum), c, dtype, MASKED)
        return p, (rows,)


@gluon.jit
def normalizers(state, c, row):
    """Return two tuples: of 1 / sum, and of (row numbers, log-sum-exp). Each has one entry, or an entry for each half."""
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
