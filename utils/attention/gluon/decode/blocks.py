"""Load one block of keys and values: its pages, its copy by TMA, and the mask of its scores.

All decode kernels use these functions, with keys as the rows of the products or with query rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from utils.attention.gluon.shared import MINUS_INF, keep_columns, thread_barrier, tma_load


@gluon.jit
def page_numbers(cache, cursor):
    """Return the places of a block's boxes, a tuple of pages or of the sequence. Call it a block ahead: each page is a load."""
    BOXES: gl.constexpr = cache.PLAN.block_n // cache.PLAN.box
    numbers = ()
    key = (cursor.first + cursor.j) * cache.PLAN.block_n
    row = cache.table_ptr + cursor.b.to(gl.int64) * cache.table_stride
    # Page -1 lies outside of the tensor, so TMA writes zeros for it.
    other = gl.where(cache.pages > 0, -1, cursor.b)
    for i in gl.static_range(BOXES):
        page = (key + i * cache.PLAN.box) >> cache.page_bits
        inside = (cursor.b < cache.batch) & (page < cache.pages)
        # The loads need a mask and no branch: after a branch the warp would wait for them.
        numbers = numbers + (gl.load(row + page, mask=inside, other=other),)  # noqa: RUF005
    return numbers


# Add lane // 32, which is zero. ptxas does not see that.
UNCHANGED = gl.constexpr("{ .reg .b32 t; mov.u32 t, %laneid; shr.u32 t, t, 5; add.u32 $0, $1, t; }")


@gluon.jit
def fresh_register(number):
    """Return the same page number in a new register, which is read when the number is used.

    TMA takes its coordinates from uniform registers. Otherwise ptxas moves a number there right after its load, a block
    before its use, and the warp waits there for the memory.
    """
    return gl.inline_asm_elementwise(UNCHANGED, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def expect_block(descriptor, cache, full, pred):
    """Announce the bytes of a block of K or V to its barrier: a copy that came before could complete the phase too early."""
    PLAN: gl.constexpr = cache.PLAN
    mbarrier.expect(full, PLAN.block_n * PLAN.block_d * (descriptor.dtype.primitive_bitwidth // 8), pred=pred)


@gluon.jit
def copy_block(descriptor, cache, cursor, numbers, tile, full, pred):
    """Start the copy of one announced block of K or V; its barrier completes when all bytes are there.

    TMA writes zeros for rows outside of the tensor.
    """
    PLAN: gl.constexpr = cache.PLAN
    key = (cursor.first + cursor.j) * PLAN.block_n
    for i in gl.static_range(PLAN.block_n // PLAN.box):
        row = (key + i * PLAN.box) & ((1 << cache.page_bits) - 1)
        part = tile.slice(i * PLAN.box, PLAN.box, dim=2)
        tma_load(descriptor, [fresh_register(numbers[i]), cursor.head, row, 0], full, part, pred=pred)


@gluon.jit
def load_block(descriptor, cache, cursor, numbers, tile, full, pred):
    """Announce and start the copy of one block of K or V."""
    expect_block(descriptor, cache, full, pred)
    copy_block(descriptor, cache, cursor, numbers, tile, full, pred)


@gluon.jit
def copy_queries(q_desc, cache, cursor, tile, full, pred):
    """Start the copy of an announced tile of query rows; TMA writes zeros for rows outside of the tensor."""
    tma_load(q_desc, [cursor.b, cursor.head, cache.tile() * cache.PLAN.columns, 0], full, tile, pred=pred)


@gluon.jit
def load_queries(q_desc, cache, cursor, tile, full, pred):
    """Announce and start the copy of a tile of query rows."""
    mbarrier.expect(full, q_desc.block_type.nbytes, pred=pred)
    copy_queries(q_desc, cache, cursor, tile, full, pred)


@gluon.jit
def first_blocks(cache, cursor):
    """Return the first blocks, as many as the ring holds, each a cursor with its page numbers; and the next cursor."""
    ROOM: gl.constexpr = cache.PLAN.slots // 2
    blocks = ()
    for _ in gl.static_range(ROOM):
        blocks = blocks + ((cursor, page_numbers(cache, cursor)),)  # noqa: RUF005
        cursor = cache.advance(cursor)
    return blocks, cursor


@gluon.jit
def fill_ring(cache, descriptors, blocks, count, Q_TILES: gl.constexpr):
    """Allocate the ring (tiles of K and V in turn), the tiles of queries and a barrier for each tile, and start the first loads.

    The queries' barriers stand after the ring's in one array: Triton would give the place of an unused barrier to a tile.
    blocks: from `first_blocks`. count: number of the program's blocks.
    """
    PLAN: gl.constexpr = cache.PLAN
    SLOTS: gl.constexpr = PLAN.slots
    q_desc, k_desc, v_desc = descriptors
    ring = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, 1, 1, PLAN.block_n, PLAN.block_d], k_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS + Q_TILES, 1], mbarrier.MBarrierLayout())
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [Q_TILES, 1, 1, PLAN.columns, PLAN.block_d], q_desc.layout)
    for i in gl.static_range(SLOTS + Q_TILES):
        mbarrier.init(full.index(i), count=1)
    # All announcements come before all copies: the compiler puts a barrier between the two, and this way needs only one.
    mbarrier.expect(full.index(SLOTS), q_desc.block_type.nbytes)
    for slot in gl.static_range(SLOTS):
        expect_block(k_desc, cache, full.index(slot), slot // 2 < count)
    # Without the fence, TMA, which completes the barriers through the async proxy, may find them not initialized; without the
    # barrier a warp could wait at one that is not initialized.
    fence_async_shared()
    thread_barrier()
    copy_queries(q_desc, cache, blocks[0][0], q_ring.index(0), full.index(SLOTS), True)
    for slot in gl.static_range(SLOTS):
        cursor, numbers = blocks[slot // 2]
        descriptor = k_desc if slot % 2 == 0 else v_desc
        copy_block(descriptor, cache, cursor, numbers, ring.index(slot), full.index(slot), slot // 2 < count)
    return ring, full, q_ring


@gluon.jit
def needs_mask(cache, cursor, j):
    """Whether block j holds a key that some query may not see. Every query sees the keys [low, clear)."""
    key = (cursor.first + j) * cache.PLAN.block_n
    low = cursor.length - cache.left
    clear = cursor.length - gl.maximum(cache.sq - cache.right - 1, 0)
    return (key + cache.PLAN.block_n > clear) | (key < low)


@gluon.jit
def clear_blocks(cache, cursor):
    """Return the number of blocks from the cursor on that need no mask; zero with a window."""
    BLOCK_N: gl.constexpr = cache.PLAN.block_n
    clear = cursor.length - gl.maximum(cache.sq - cache.right - 1, 0) - (cursor.first + cursor.j) * BLOCK_N
    return gl.where(cursor.length > cache.left, 0, clear // BLOCK_N)


@gluon.jit
def mask_block(s, cache, cursor, j, KEYS: gl.constexpr):
    """Return the scores of block j, with minus infinity where a query may not see a key.

    Dimension KEYS holds the keys, the other dimension the query rows of the program's tile: the new tokens of the first query
    head, then those of the next head.
    """
    PLAN: gl.constexpr = cache.PLAN
    ROWS: gl.constexpr = 1 - KEYS
    layout: gl.constexpr = s.type.layout
    row = cache.tile() * PLAN.columns + gl.arange(0, s.shape[ROWS], gl.SliceLayout(KEYS, layout))
    position = cursor.length - cache.sq + row % cache.sq - (cursor.first + j) * PLAN.block_n
    behind = gl.minimum(position + cache.right + 1, cursor.length - (cursor.first + j) * PLAN.block_n)
    first = position - cache.left + 1
    if KEYS == 1:
        s = keep_columns(s, first, behind)
    else:
        key = gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))[:, None]
        s = gl.where((key >= first[None, :]) & (key < behind[None, :]), s, MINUS_INF)
    return s


@gluon.jit
def clean_values(v_tile, cursor, j, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr):
    """Set the values of block j behind the last key to zero: zero times nan would be nan."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    # Take few keys at a time, because the output needs most registers.
    PIECE: gl.constexpr = min(16 * gl.num_warps() // (BLOCK_D // 64), BLOCK_N)
    begin = (cursor.first + j) * BLOCK_N
    if begin + BLOCK_N > cursor.length:
        v = v_tile.reshape([BLOCK_N, BLOCK_D])
        for i in gl.static_range(BLOCK_N // PIECE):
            key = begin + i * PIECE + gl.arange(0, PIECE, gl.SliceLayout(1, layout))
            piece = v.slice(i * PIECE, PIECE)
            values = piece.load(layout)
            piece.store(gl.where((key < cursor.length)[:, None], values, gl.zeros_like(values)))
