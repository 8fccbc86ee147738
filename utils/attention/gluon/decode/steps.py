"""Compute the blocks of keys of `rows.py`: step 5's pipeline for keys that come more slowly than products.

Step 5 waits for the next keys in the middle of a softmax, and releases V's slot after that. This costs nothing if keys always
come in time. But decode waits for memory at each block. So here the kernel first releases V's slot, and computes the rest of a
block's softmax before it waits for the next keys.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from utils.attention.gluon.decode.blocks import clean_values, mask_block, needs_mask
from utils.attention.gluon.decode.merge import Results
from utils.attention.gluon.decode.work import Cursor
from utils.attention.gluon.pipeline import Ring
from utils.attention.gluon.shared import aggregate, left_operand, rescale, start_scores, thread_barrier, wait_products
from utils.attention.gluon.softmax import Rows, first_softmax, half_softmax, join_rows, split_rows, spread


@aggregate
class Share:
    """The blocks and rings of one program, for its roles."""

    results: Results
    start: Cursor  # the cursor at the first block
    count: gl.tensor  # number of blocks
    q: Ring
    k: Ring
    v: Ring
    PLAN: gl.constexpr


@aggregate
class Block:
    """One block of keys: its number in the K and V rings, and its number in the head."""

    number: gl.tensor
    cursor: Cursor
    j: gl.tensor


# A loop over negative sums. Sums of exponentials are not negative, so it never runs, but ptxas must keep it.
SUMS = gl.constexpr(
    "{ .reg .pred p; mov.f32 $0, $1; on: setp.lt.f32 p, $0, 0f00000000; @p abs.f32 $0, $0; @p bra on; }"
)


@gluon.jit
def finish_sums(rows):
    """Return the same `Rows` after a branch on the sums, so that the sums are computed before.

    Without it ptxas may move the exponentials after the wait for P V, and nothing overlaps.
    """
    total = gl.inline_asm_elementwise(SUMS, "=f,f", [rows.total], dtype=gl.float32, is_pure=False, pack=1)
    return Rows(rows.maximum, total, rows.factor)


@gluon.jit
def start_output(share, number, o, p, state):
    """Rescale `o`, and start P V of block number - 1 on the tensor cores, added to `o`."""
    share.v.wait_full(number - 1)
    o = rescale(o, spread((state[0].factor, state[1].factor), o))
    return warpgroup_mma(p, share.v.tile(number - 1), o, is_async=True)


@gluon.jit
def first_block(share, block, q):
    """Compute the scores and the softmax of a head's first block. No product with V runs beside them."""
    PLAN: gl.constexpr = share.PLAN
    share.k.wait_full(block.number)  # K has arrived
    # The softmax reads the scores' registers: before this wait the tensor cores may not have written them.
    s = wait_products(start_scores(q, share.k.tile(block.number)), 0, PLAN.block_n)
    share.k.release(block.number)
    if needs_mask(share.results.cache, block.cursor, block.j):
        s = mask_block(s, share.results.cache, block.cursor, block.j, 1)
    p, state = first_softmax(s, share.results.cache.c, q.dtype, True, True)
    return gl.convert_layout(p, left_operand(PLAN.block_d, q.shape[0])), state


@gluon.jit
def step(share, block, q, o, p, state, more, MASKED: gl.constexpr):
    """Compute block i of keys: start Q K(i) and P V(i-1) on the tensor cores, then the softmax of block i beside P V(i-1).

    more: whether another block follows. MASKED: whether this block may need a mask.
    """
    PLAN: gl.constexpr = share.PLAN
    dtype: gl.constexpr = share.k.tiles.dtype
    c = share.results.cache.c
    s = start_scores(q, share.k.tile(block.number))
    pv = start_output(share, block.number, o, p, state)
    # Wait for the older of two products, the scores: the softmax reads their registers next.
    s = wait_products(s, 1, PLAN.block_n)
    share.k.release(block.number)
    if MASKED:  # noqa: SIM102 (the compiler decides this line, and the kernel the next)
        if needs_mask(share.results.cache, block.cursor, block.j):
            s = mask_block(s, share.results.cache, block.cursor, block.j, 1)
    upper, lower = state
    s0, s1 = split_rows(s)
    top0 = gl.maximum(upper.maximum, gl.max(s0, 2))
    top1 = gl.maximum(lower.maximum, gl.max(s1, 2))
    p0, upper = half_softmax(s0, upper, top0, c, dtype, MASKED)
    upper = finish_sums(upper)
    # Without this wait the next rescale would read unfinished sums, and TMA would overwrite V.
    o = wait_products(pv, 0, PLAN.block_d)
    share.v.release(block.number - 1)
    p1, lower = half_softmax(s1, lower, top1, c, dtype, MASKED)
    p = gl.convert_layout(join_rows(p0, p1), left_operand(PLAN.block_d, q.shape[0]))
    share.k.wait_full(block.number + 1, pred=more)  # the next step's keys have arrived
    return o, p, (upper, lower)


@gluon.jit
def clean_tile(share, block):
    """Set the values behind the last key to zero before the product."""
    PLAN: gl.constexpr = share.PLAN
    share.v.wait_full(block.number)  # V has arrived
    tile = share.v.tiles.index(share.v.slot(block.number))
    clean_values(tile, block.cursor, block.j, PLAN.block_n, PLAN.block_d)
    # Threads store zeros and wgmma reads through the async proxy: without the fence it may read older values.
    fence_async_shared()
    thread_barrier()  # without it the zeros of other warps would be missing


@gluon.jit
def row_sums(state):
    """Return (row numbers, maxima, sums) for each of the two halves of every warp's rows."""
    upper, lower = state
    layout: gl.constexpr = upper.maximum.type.layout
    warp = gl.arange(0, upper.maximum.shape[0], gl.SliceLayout(1, layout))[:, None]
    numbers = 16 * warp + gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :]
    total0 = gl.convert_layout(gl.sum(upper.total, 2), layout)
    total1 = gl.convert_layout(gl.sum(lower.total, 2), layout)
    return (numbers, upper.maximum, total0), (numbers + 8, lower.maximum, total1)
