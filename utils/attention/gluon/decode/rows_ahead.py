"""`rows.py` for whole heads, with nothing between two heads: the blocks of all heads of a program are one stream.

In `rows.py` a head ends alone: its last product with V, then the output's stores, then the next head's first scores, with
the tensor cores and the exponentials idle in between. Here the next head's first scores are handed over before this
head's last P V, and their softmax runs beside it, as in `consumer_ahead` of step 5. The output goes through shared
memory and leaves by TMA, and is waited for only when the next head's output needs the buffer. So a program takes whole
heads only, and their queries have two tiles.

    part         what                                            head dim 64      128              256
    consumers    warpgroups x 64 query rows                      1 or 2           1 or 2           1
    block        keys                                            128              64 or 128        32 or 64
    output       a tile of 64 query rows for each consumer, in Q's type
    order        keys from the last block to the first: a causal mask touches a head's first block alone

`arrange` takes it at head dimension 128 for 128 query rows where an SM has two or more whole heads, up to 250 MB of keys and values:
0.90 to 0.99 of the time of `rows.py` on an H200 (docs/decode-log.md, entry 28). From there on `rows.py` with a program a head is
2% faster on an H100 (entries 48 and 51).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from utils.attention.gluon.blocks import finish_block, first_block, start_output, start_scores, step
from utils.attention.gluon.decode.blocks import clear_keys
from utils.attention.gluon.decode.heads import Block, Share, clean_tile, inverses, row_sums, store_head_by_tma
from utils.attention.gluon.decode.kernel import SIZES
from utils.attention.gluon.decode.merge import Results, in_eights
from utils.attention.gluon.decode.rows import fill_rings, producer
from utils.attention.gluon.decode.work import Cache
from utils.attention.gluon.pipeline import allocate_ring
from utils.attention.gluon.shared import accumulator
from utils.attention.gluon.softmax import spread, unseen_halves, unseen_whole


@gluon.jit
def queries_of(share, piece, ROW: gl.constexpr):
    """The query rows ROW .. ROW + 63 of head number `piece` of this program, [64, BLOCK_D], in shared memory."""
    tile = share.q.tiles.index(share.q.slot(piece))
    return tile.reshape([share.PLAN.columns, share.PLAN.block_d]).slice(ROW, 64)


@gluon.jit
def consumer_ahead(share, o_desc, o_tiles, W: gl.constexpr):
    """Warpgroup W: the query rows W * 64 and on of each head, over all blocks of this program."""
    results = share.results
    cache = results.cache
    PLAN: gl.constexpr = share.PLAN
    BLOCK_N: gl.constexpr = PLAN.block_n
    BLOCK_D: gl.constexpr = PLAN.block_d
    ROW: gl.constexpr = 64 * W
    count = share.end - share.begin
    cursor = share.start
    o_tile = o_tiles.index(W)
    it = gl.to_tensor(0)  # the block whose scores come next
    piece = gl.to_tensor(0)
    row = gl.to_tensor(ROW)

    share.q.wait_full(piece)  # the first product reads Q
    q = queries_of(share, piece, ROW)
    p, state = first_block(share, Block(it, cursor, cache.block_at(cursor, 0), row), q, True, False, False)
    it += 1
    share.k.wait_full(it, pred=it < count)  # each step waits for the next one's keys; this is the first one's
    while it <= count:
        low, clear = clear_keys(cache, cursor)
        q = queries_of(share, piece, ROW)
        o = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
        for k in range(1, cursor.blocks):
            j = cache.block_at(cursor, k)
            key = (cursor.first + j) * BLOCK_N
            masked = (key + BLOCK_N > clear) | (key < low)
            o, p, state = step(share, Block(it, cursor, j, row), q, o, p, state, it + 1 < count, masked, True, False)
            it += 1
        share.q.release(piece)
        if share.CASE.clean:  # noqa: SIM102 (decided by the compiler; the next line for each head)
            if (cursor.first + cursor.blocks) * BLOCK_N > cursor.length:
                clean_tile(share, Block(it - 1, cursor, cursor.blocks - 1, row), W)

        # The next head's first block. Behind the last head it is one that still lies there, whose result nobody asks for.
        following = cache.advance(cursor.at_last())
        more = it < count
        share.q.wait_full(piece + 1, pred=more)
        next_q = queries_of(share, gl.where(more, piece + 1, piece), ROW)
        s = start_scores(next_q, share.k.tile(gl.where(more, it, it - 1)))
        pv = start_output(share, it, o, p, state)
        inverse = inverses(row_sums(state, ROW))
        if PLAN.halves:
            unseen = unseen_halves(64, BLOCK_N, accumulator(BLOCK_N))
        else:
            unseen = (unseen_whole(64, accumulator(BLOCK_N)),)
        block = Block(it, following, cache.block_at(following, 0), row)
        o, p, state = finish_block(share, block, s, pv, unseen, it + 1 < count, True, True, False, False, True)
        it += 1
        tma.store_wait(0)  # TMA may still be reading the last head's rows from this buffer
        rows = o_tile.reshape([64, BLOCK_D])
        store_head_by_tma(results, cursor, o_desc, o_tile, rows, o * spread(inverse, o), ROW)
        piece += 1
        cursor = following
    tma.store_wait(0)  # shared memory must live until TMA has read it


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["lens_ptr", "table_ptr"])
def attention_decode_rows_ahead(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    out_ptr,
    parts_ptr,
    counters_ptr,
    lens_ptr,
    table_ptr,
    table_stride,
    batch,
    kv_heads,
    group,
    sq,
    sk,
    window,
    tiles,
    pages,
    head_dim,
    c,
    PLAN: gl.constexpr,
    CASE: gl.constexpr,
):
    """One program an SM: its share of whole heads. The arguments are `attention_decode`'s, and the output's descriptor."""
    CONSUMERS: gl.constexpr = PLAN.consumers
    gl.static_assert(CASE.aligned and not CASE.lengths and PLAN.q_slots == 2 and PLAN.raw_slots == 0)
    heads = kv_heads * tiles
    cache = Cache(lens_ptr, table_ptr, table_stride, batch, heads, sq, sk, window, pages, PLAN, CASE)
    results = Results(out_ptr, parts_ptr, counters_ptr, group, tiles, in_eights(head_dim), c, cache)
    split = cache.split()
    program = gl.program_id(0)
    if program < split.programs:
        q = allocate_ring(q_desc, 2, 1, CONSUMERS)
        k = allocate_ring(k_desc, PLAN.slots // 2, 1, CONSUMERS, PLAN.block_n)
        v = allocate_ring(v_desc, PLAN.slots - PLAN.slots // 2, 1, CONSUMERS, PLAN.block_n)
        o_shape: gl.constexpr = o_desc.block_type.shape
        o_tiles = gl.allocate_shared_memory(
            o_desc.dtype, [CONSUMERS, 1, 1, o_shape[2], o_shape[3], o_shape[4]], o_desc.layout
        )
        # TMA completes the barriers through the async proxy, and may otherwise find them as they were before.
        fence_async_shared()
        begin = split.begin(program)
        end = split.begin(program + 1)
        share = Share(results, begin, end, cache.locate(begin), q, k, v, c, counters_ptr, c, PLAN, CASE)
        loads = (share, q_desc, k_desc, v_desc)
        if PLAN.prefill > 0:
            fill_rings(share, q_desc, k_desc, v_desc)
        # The first role has four warps and the registers that are left by the others.
        if CONSUMERS == 1:
            gl.warp_specialize(
                [(consumer_ahead, (share, o_desc, o_tiles, 0)), (producer, loads)], [1], [PLAN.producer_registers]
            )
        else:
            gl.static_assert(CONSUMERS == 2)
            gl.warp_specialize(
                [
                    (consumer_ahead, (share, o_desc, o_tiles, 0)),
                    (consumer_ahead, (share, o_desc, o_tiles, 1)),
                    (producer, loads),
                ],
                [4, 1],
                [PLAN.registers, PLAN.producer_registers],
            )
