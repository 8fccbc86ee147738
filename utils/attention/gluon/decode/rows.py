"""The decode kernel for many query rows: query rows are the rows of the products, and a warp does nothing but load.

From 32 query rows on (heads of a group times new tokens) the kernel that makes keys the rows (`kernel.py`) is bound by
its chain of instructions, not by bytes: all its warps meet six times a block, and P goes through shared memory. Here a
tile of 64 query rows belongs to one warpgroup, as in step 5 of the ladder: scores, maxima, P and output stay in its
registers, the next block's scores are queued before this block's P V, and half of the softmax runs beside that. Which
program reads which keys, the parts, and the merge are the same as there.

    part         what                                            head dim 64      128              256
    consumers    warpgroups x 64 query rows                      1 or 2           1 or 2           1 or 2
    block        keys (where a program has few blocks)           128              128 (64)         64 (32)
    rings        slots of K and V (64 rows / 128 rows)           6+7 / 6+6        3+3 / 3+3        3+3 / 2+3
                 two and two from 250 MB of keys and values on (entries 46, 48, 50)
    queries      tiles of Q (64 rows / 128 rows)                 2 / 2            2 / 1            1 / 1
    producer     one warp: TMA copies of Q, K and V, a box a page where the cache is in pages
    programs     one an SM; two with 64 rows and blocks of 64 keys where there are several heads an SM, a program a head
    order        K a block ahead of V where a program has one head; the rings are filled before the roles begin (head dim 128)

On an H200, at the thirteen of thirty points that it computes: 1.09 times as fast as the best other library
(0.98 to 1.27), before the order of the last row (entry 41). Each point: assets/results/h200/decode.json, and why: docs/decode-log.md.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from utils.attention.gluon.blocks import start_output
from utils.attention.gluon.decode.blocks import clear_keys, load_block, load_queries, page_numbers
from utils.attention.gluon.decode.heads import (
    Block,
    Share,
    clean_tile,
    inverses,
    queries_in_fp16,
    row_sums,
    store_head,
    store_head_by_tma,
)
from utils.attention.gluon.decode.kernel import SIZES
from utils.attention.gluon.decode.merge import Results, in_eights
from utils.attention.gluon.decode.steps import first_block, step
from utils.attention.gluon.decode.work import Cache
from utils.attention.gluon.pipeline import allocate_ring
from utils.attention.gluon.shared import accumulator, wait_products
from utils.attention.gluon.softmax import spread
from utils.kernels.early_launch import let_next_launch_begin


@gluon.jit
def load_tile(ring, i, descriptor, cache, cursor, numbers, kv_head):
    """Producer: fetch a block of K or V into load number i's slot, as soon as that is empty."""
    ring.wait_empty(i)
    slot = ring.slot(i)
    load_block(descriptor, cache, cursor, numbers, kv_head, ring.tiles.index(slot), ring.full.index(slot), True)


@gluon.jit
def load_query_tile(share, piece, cursor, q_desc):
    """Producer: fetch the queries of a piece, as soon as the slot is empty."""
    share.q.wait_empty(piece)
    slot = share.q.slot(piece)
    tile, full = share.q.tiles.index(slot), share.q.full.index(slot)
    load_queries(q_desc, share.results, cursor.b, cursor.head, tile, full, True)


@gluon.jit
def fill_rings(share, q_desc, k_desc, v_desc):
    """Before the roles begin: ask for the queries of the first head, and for its first blocks, which the rings have room for.

    All expectations come before all copies, because the compiler puts a barrier between an expectation and its copy.
    """
    COUNT: gl.constexpr = share.PLAN.prefill
    cache = share.results.cache
    cursor = share.start
    kv_head = cursor.head // share.results.tiles
    q, k, v = share.q, share.k, share.v
    mbarrier.expect(q.full.index(0), q_desc.block_type.nbytes)
    for i in gl.static_range(COUNT):
        mbarrier.expect(k.full.index(i), k_desc.block_type.nbytes)
        mbarrier.expect(v.full.index(i), v_desc.block_type.nbytes)
    load_queries(q_desc, share.results, cursor.b, cursor.head, q.tiles.index(0), q.full.index(0), True, False)
    for i in gl.static_range(COUNT):
        block = cursor.behind(i)
        load_block(k_desc, cache, block, (), kv_head, k.tiles.index(i), k.full.index(i), True, False)
        load_block(v_desc, cache, block, (), kv_head, v.tiles.index(i), v.full.index(i), True, False)


@gluon.jit
def producer(share, q_desc, k_desc, v_desc, KEYS: gl.constexpr = 1, VALUES: gl.constexpr = 1):
    """One warp: keep the rings of Q and K (KEYS), and of V (VALUES), full, across heads.

    With one tile of Q, the next head's queries cannot come before this head's last scores. Its first blocks need not
    wait for that, so they are fetched before its queries: the slots they go to become empty without them.
    """
    PLAN: gl.constexpr = share.PLAN
    LATE: gl.constexpr = PLAN.slots // 2 - 2  # the block behind which a later head's queries are fetched
    cache = share.results.cache
    cursor = share.start.behind(PLAN.prefill)
    count = share.end - share.begin
    piece = gl.to_tensor(0)
    numbers = page_numbers(cache, cursor)
    if KEYS and PLAN.prefill == 0:
        load_query_tile(share, piece, cursor, q_desc)
    for i in range(PLAN.prefill, count):
        if (cursor.j == 0) & (i > 0):
            piece += 1
            if KEYS and PLAN.q_slots == 2:
                load_query_tile(share, piece, cursor, q_desc)
        kv_head = cursor.head // share.results.tiles
        if PLAN.k_first:
            # In the order of need: a consumer hands over the scores of block i + 1 before the product with V(i).
            if i == PLAN.prefill:
                load_tile(share.k, i, k_desc, cache, cursor, numbers, kv_head)
            if i + 1 < count:
                following = cache.advance(cursor)
                load_tile(share.k, i + 1, k_desc, cache, following, numbers, following.head // share.results.tiles)
        elif KEYS:
            load_tile(share.k, i, k_desc, cache, cursor, numbers, kv_head)
        if VALUES:
            load_tile(share.v, i, v_desc, cache, cursor, numbers, kv_head)
        if KEYS and PLAN.q_slots == 1:
            is_last = (cursor.j == cursor.blocks - 1) | (i == count - 1)
            late = (cursor.j == LATE) | ((cursor.j < LATE) & is_last)
            if late & (piece > 0):
                load_query_tile(share, piece, cursor, q_desc)
        cursor = cache.advance(cursor)
        numbers = page_numbers(cache, cursor)


@gluon.jit
def consumer(all_heads, o_desc, place, W: gl.constexpr):
    """Warpgroup W: the query rows W * 64 and on of each head, over all blocks of this program.

    o_desc: the output's TMA descriptor where it leaves that way, else None. place: of an fp8 cache's queries in fp16, else None.
    """
    results = all_heads.results
    cache = results.cache
    PLAN: gl.constexpr = all_heads.PLAN
    BLOCK_N: gl.constexpr = PLAN.block_n
    BLOCK_D: gl.constexpr = PLAN.block_d
    ROW: gl.constexpr = 64 * W
    split = cache.split()
    program = gl.program_id(0)
    cursor = all_heads.start
    unit = all_heads.begin
    it = gl.to_tensor(0)
    piece = gl.to_tensor(0)
    while unit < all_heads.end:
        n = gl.minimum(cursor.blocks - cursor.j, all_heads.end - unit)
        low, clear = clear_keys(cache, cursor)
        all_heads.q.wait_full(piece)  # the first product reads Q
        q = all_heads.q.tiles.index(all_heads.q.slot(piece)).reshape([PLAN.columns, BLOCK_D]).slice(ROW, 64)
        powers = results.c
        if PLAN.fp16:
            powers = queries_in_fp16(q, place.slice(ROW, 64), accumulator(BLOCK_N))
            q = place.slice(ROW, 64)
            all_heads.q.release(piece)
        if PLAN.raw_slots > 0:
            share, k_scale, v_scale = all_heads.scaled(cursor.head // results.tiles, powers)
        else:
            share = all_heads
        first = cache.block_at(cursor, 0)
        key = (cursor.first + first) * BLOCK_N
        masked = (key + BLOCK_N > clear) | (key < low)
        p, state = first_block(share, Block(it, cursor, first, gl.to_tensor(ROW)), q, masked)
        o = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
        it += 1
        share.k.wait_full(it, pred=n > 1)  # each step waits for the next one's keys; this is the first one's
        for k in range(1, n):
            j = cache.block_at(cursor, k)
            key = (cursor.first + j) * BLOCK_N
            masked = (key + BLOCK_N > clear) | (key < low)
            block = Block(it, cursor, j, gl.to_tensor(ROW))
            o, p, state = step(share, block, q, o, p, state, k + 1 < n, masked)
            it += 1
        if not (PLAN.by_tma or PLAN.fp16):
            share.q.release(piece)

        j = cursor.j + n - 1
        if share.CASE.clean:  # noqa: SIM102 (decided by the compiler; the next line for each head)
            if (cursor.first + j + 1) * BLOCK_N > cursor.length:
                clean_tile(share, Block(it - 1, cursor, j, gl.to_tensor(ROW)), W)
        pv = start_output(share, it, o, p, state)
        sums = row_sums(state, ROW)
        o = wait_products(pv, 0, BLOCK_D)  # the output's registers are read next, and V's slot is released
        share.v.release(it - 1)
        if PLAN.raw_slots > 0:
            o = o * v_scale
        if PLAN.by_tma:
            # The queries of these rows have been read, by this consumer alone: the output takes their place.
            tile = share.q.tiles.index(share.q.slot(piece)).slice(ROW // PLAN.queries, 64 // PLAN.queries, dim=2)
            store_head_by_tma(results, cursor, o_desc, tile, q, o * spread(inverses(sums), o), ROW)
            tma.store_wait(0)  # shared memory must live until TMA has read it, and the next queries may not come before
            share.q.release(piece)
        elif share.CASE.aligned or n == cursor.blocks:
            store_head(results, cursor, o * spread(inverses(sums), o), ROW)
        else:
            part = 2 * program + (split.owner(unit - cursor.j) == program).to(gl.int32)
            for half in gl.static_range(len(sums)):
                rows, m, total = sums[half]
                if PLAN.raw_slots > 0:
                    m = m * k_scale  # the merge knows one scale for all heads
                results.store_sums(part, rows, m, total)
            results.store_part(cursor, part, o, ROW, 0)
        unit += n
        piece += 1
        cursor = cache.advance(cursor.at_last())


@gluon.jit
def attend_rows(results, split, q_desc, k_desc, v_desc, o_desc, program):
    """The blocks of one program: allocate rings and barriers, and start the roles."""
    cache = results.cache
    PLAN: gl.constexpr = cache.PLAN
    CONSUMERS: gl.constexpr = PLAN.consumers
    gl.static_assert(cache.CASE.aligned or not PLAN.backward, "parts of heads are read forwards")
    gl.static_assert(not (PLAN.k_first and (cache.CASE.page or PLAN.producers == 2)), "no page numbers so far ahead")
    gl.static_assert(PLAN.prefill == 0 or not (cache.CASE.page or cache.CASE.lengths), "lengths and pages come later")
    q = allocate_ring(q_desc, PLAN.q_slots, 1, CONSUMERS)
    k = allocate_ring(k_desc, PLAN.slots // 2, 1, CONSUMERS, PLAN.block_n)
    v = allocate_ring(v_desc, PLAN.slots - PLAN.slots // 2, 1, CONSUMERS, PLAN.block_n)
    # TMA completes the barriers through the async proxy, and may otherwise find them as they were before.
    fence_async_shared()
    begin = split.begin(program)
    start = cache.start(split, program)
    end = split.begin(program + 1)
    share = Share(results, begin, end, start, q, k, v, results.c, results.counters_ptr, results.c, PLAN, cache.CASE)
    if PLAN.prefill > 0:
        fill_rings(share, q_desc, k_desc, v_desc)
    # The first role has four warps and the registers that are left by the others.
    if CONSUMERS == 1 and PLAN.producers == 2:
        gl.warp_specialize(
            [
                (consumer, (share, o_desc, None, 0)),
                (producer, (share, q_desc, k_desc, v_desc, 1, 0)),
                (producer, (share, q_desc, k_desc, v_desc, 0, 1)),
            ],
            [1, 1],
            [PLAN.producer_registers, PLAN.producer_registers],
        )
    elif CONSUMERS == 1:
        gl.warp_specialize(
            [(consumer, (share, o_desc, None, 0)), (producer, (share, q_desc, k_desc, v_desc))],
            [1],
            [PLAN.producer_registers],
        )
    else:
        gl.static_assert(CONSUMERS == 2)
        gl.warp_specialize(
            [
                (consumer, (share, o_desc, None, 0)),
                (consumer, (share, o_desc, None, 1)),
                (producer, (share, q_desc, k_desc, v_desc)),
            ],
            [4, 1],
            [PLAN.registers, PLAN.producer_registers],
        )


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["lens_ptr", "table_ptr"])
def attention_decode_rows(
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
    """One program an SM: its share of the blocks of all heads. The arguments are `attention_decode`'s."""
    heads = kv_heads * tiles
    cache = Cache(lens_ptr, table_ptr, table_stride, batch, heads, sq, sk, window, pages, PLAN, CASE)
    results = Results(out_ptr, parts_ptr, counters_ptr, group, tiles, in_eights(head_dim), c, cache)
    split = cache.split()
    program = gl.program_id(0)
    if PLAN.early and PLAN.merge == "second":
        let_next_launch_begin()
    if program < split.programs:
        attend_rows(results, split, q_desc, k_desc, v_desc, o_desc, program)
        # Behind the roles' last stores: the first role's warps go on when all roles have ended.
        results.merge_own(split, program)
