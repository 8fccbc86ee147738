"""One block of keys and values on its way: its pages, its copy by TMA, and the mask of its scores.

Both decode kernels use these: the one in which keys are the rows of the products (`kernel.py`), and the one in which
query rows are (`rows.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from utils.attention.gluon.shared import MINUS_INF, tma_load


@gluon.jit
def page_numbers(cache, cursor):
    """The pages of a block, a tuple; fetched a block ahead, because each is a load from memory."""
    if not cache.CASE.page:
        return ()
    else:
        PAGES: gl.constexpr = cache.PLAN.block_n // cache.PLAN.box
        numbers = ()
        first = (cursor.first + cursor.j) * cache.PLAN.block_n // cache.CASE.page
        row = cache.table_ptr + cursor.b.to(gl.int64) * cache.table_stride
        for i in gl.static_range(PAGES):
            inside = (cursor.b < cache.batch) & (first + i < cache.pages)
            numbers = numbers + (gl.load(row + first + i, mask=inside, other=-1),)  # noqa: RUF005
        return numbers


# Adds zero: the number of a lane is below 32. ptxas does not see that.
UNCHANGED = gl.constexpr("{ .reg .b32 t; mov.u32 t, %laneid; shr.u32 t, t, 5; add.u32 $0, $1, t; }")


@gluon.jit
def when_used(number):
    """The same page number, in a register that only its use reads.

    TMA takes its coordinates from uniform registers. Without this, ptxas moves a number there right behind its load, a
    block before it is used, and the warp waits for the memory at that place.
    """
    return gl.inline_asm_elementwise(UNCHANGED, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_block(descriptor, cache, cursor, numbers, kv_head, tile, full, pred, EXPECT: gl.constexpr = True):
    """Start the copy of one block of K or V; its barrier completes when all bytes are there.

    Rows outside of the tensor, and pages whose number is none, come as zeros. EXPECT: the barrier has not been told yet.
    """
    PLAN: gl.constexpr = cache.PLAN
    if EXPECT:
        mbarrier.expect(full, PLAN.block_n * PLAN.block_d * (descriptor.dtype.primitive_bitwidth // 8), pred=pred)
    key = (cursor.first + cache.block_at(cursor, 0)) * PLAN.block_n
    if cache.CASE.page:
        PAGES: gl.constexpr = PLAN.block_n // PLAN.box
        row = key % cache.CASE.page
        for i in gl.static_range(PAGES):
            part = tile.slice(i * PLAN.box, PLAN.box, dim=2)
            number = when_used(numbers[i])
            tma_load(descriptor, [number, kv_head, row, 0], full, part, pred=pred)
    else:
        tma_load(descriptor, [cursor.b, kv_head, key, 0], full, tile, pred=pred)


@gluon.jit
def load_next(descriptor, results, cursor, numbers, tile, full, pred, EXPECT: gl.constexpr = True):
    """Start the copy of the block at the cursor, and return the next block's cursor and page numbers."""
    cache = results.cache
    load_block(descriptor, cache, cursor, numbers, cursor.head // results.tiles, tile, full, pred, EXPECT)
    cursor = cache.advance(cursor)
    return cursor, page_numbers(cache, cursor)


@gluon.jit
def load_queries(q_desc, results, b, head, tile, full, pred, EXPECT: gl.constexpr = True):
    """Start the copy of the queries of a head; heads and tokens that do not exist come as zeros."""
    if EXPECT:
        mbarrier.expect(full, q_desc.block_type.nbytes, pred=pred)
    query = (head % results.tiles) * results.cache.PLAN.queries
    tma_load(q_desc, [b, head // results.tiles, 0, query, 0], full, tile, pred=pred)


@gluon.jit
def clear_keys(cache, cursor):
    """Keys [low, clear) of a sequence are seen by every query: blocks that lie within them need no mask."""
    clear = cursor.length
    if cache.CASE.causal:
        clear = clear - cache.sq + 1
    elif cache.CASE.window:
        clear = gl.minimum(clear, clear - cache.sq + cache.window)
    low = cursor.length - cache.window if cache.CASE.window else gl.to_tensor(0)
    return low, clear


@gluon.jit
def mask_block(s, cache, cursor, j, tile, first_row, KEYS: gl.constexpr):
    """The scores of block j, minus infinity where a query may not look.

    Dimension KEYS holds the keys; the other one the query rows `first_row` and on of this tile of queries.
    """
    PLAN: gl.constexpr = cache.PLAN
    ROWS: gl.constexpr = 1 - KEYS
    layout: gl.constexpr = s.type.layout
    key = (cursor.first + j) * PLAN.block_n + gl.arange(0, s.shape[KEYS], gl.SliceLayout(ROWS, layout))
    row = first_row + gl.arange(0, s.shape[ROWS], gl.SliceLayout(KEYS, layout))
    position = cursor.length - cache.sq + tile * PLAN.queries + row % PLAN.queries
    if cache.CASE.causal:
        last = gl.minimum(position, cursor.length - 1)
    elif cache.CASE.window:
        last = gl.minimum(position + cache.window - 1, cursor.length - 1)
    else:
        last = gl.full_like(position, 0) + (cursor.length - 1)
    key = gl.expand_dims(key, ROWS)
    keep = key <= gl.expand_dims(last, KEYS)
    if cache.CASE.window:
        keep = keep & (key > gl.expand_dims(position - cache.window, KEYS))
    return gl.where(keep, s, MINUS_INF)


@gluon.jit
def clean_values(v_tile, cursor, j, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr):
    """Replace the values behind the last key by zeros: zero times nan would be nan."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    # Few keys at a time, because the output's registers are in use.
    PIECE: gl.constexpr = min(16 * gl.num_warps() // (BLOCK_D // 64), BLOCK_N)
    v = v_tile.reshape([BLOCK_N, BLOCK_D])
    for i in gl.static_range(BLOCK_N // PIECE):
        key = (cursor.first + j) * BLOCK_N + i * PIECE + gl.arange(0, PIECE, gl.SliceLayout(1, layout))
        piece = v.slice(i * PIECE, PIECE)
        values = piece.load(layout)
        piece.store(gl.where((key < cursor.length)[:, None], values, gl.zeros_like(values)))
