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
    queries      tiles of Q (64 rows / 128 rows)                 2 / 2            2 / 1            1 / 1
    producer     one warp: TMA copies of Q, K and V, a box a page where the cache is in pages

On an H200, at the seventeen of thirty points that it computes: 1.07 times as fast as the best other library
(0.90 to 1.22). Each point: assets/results/h200/decode.json, and why: docs/decode-log.md.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from utils.attention.gluon.decode.blocks import (
    clean_values,
    clear_keys,
    load_block,
    load_queries,
    mask_block,
    page_numbers,
)
from utils.attention.gluon.decode.kernel import SIZES
from utils.attention.gluon.decode.merge import Results, in_eights, inverse
from utils.attention.gluon.decode.steps import first_block as first_block_unmasked
from utils.attention.gluon.decode.steps import step as step_soon
from utils.attention.gluon.decode.work import Cache, Cursor
from utils.attention.gluon.pipeline import Ring, allocate_ring
from utils.attention.gluon.shared import accumulator, aggregate, thread_barrier, tma_store, wait_products
from utils.attention.gluon.softmax import spread
from utils.attention.gluon.step5_overlapped import first_block, start_output, step
from utils.kernels.early_launch import let_next_launch_begin


@aggregate
class Share:
    """One program's blocks, first and behind the last in the long row, and what its roles share."""

    results: Results
    begin: gl.tensor
    end: gl.tensor
    start: Cursor  # the cursor at block `begin`
    q: Ring
    k: Ring
    v: Ring
    cleaned: gl.shared_memory_descriptor  # mbarrier: V's rows behind the last key have been replaced by zeros
    turns: gl.shared_memory_descriptor  # mbarriers: consumer 0, and 1, may hand over its products
    c: gl.tensor
    scales_ptr: gl.tensor  # of K, then of V, a head of keys each; read only where the cache is in fp8
    powers: gl.tensor  # by which the queries' rows were divided, where the products of an fp8 cache are in fp16
    PLAN: gl.constexpr
    CASE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, results, begin, end, start, q, k, v, cleaned, turns, c, scales_ptr, powers, PLAN, CASE):
        self.results = results
        self.begin = begin
        self.end = end
        self.start = start
        self.q = q
        self.k = k
        self.v = v
        self.cleaned = cleaned
        self.turns = turns
        self.c = c
        self.scales_ptr = scales_ptr
        self.powers = powers
        self.PLAN = gl.constexpr(PLAN)
        self.CASE = gl.constexpr(CASE)

    @gluon.jit
    def scaled(self, kv_head, powers):
        """This share for one head of an fp8 cache, whose scores have a scale of their own; and the scales of K and V."""
        heads = self.results.cache.heads // self.results.tiles
        k_scale = gl.load(self.scales_ptr + kv_head)
        v_scale = gl.load(self.scales_ptr + heads + kv_head)
        c = self.c * k_scale
        share = Share(
            self.results,
            self.begin,
            self.end,
            self.start,
            self.q,
            self.k,
            self.v,
            self.cleaned,
            self.turns,
            c,
            self.scales_ptr,
            powers,
            self.PLAN,
            self.CASE,
        )
        return share, k_scale, v_scale

    @gluon.jit
    def mask(self, s, block, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
        """The scores of a block, minus infinity where a row may not look: what step 5's functions call."""
        tile = block.cursor.head % self.results.tiles
        return mask_block(s, self.results.cache, block.cursor, block.j, tile, block.row, 1)


@aggregate
class Block:
    """One block of keys for one consumer: its number in the K and V rings, its number in the head, its first row."""

    number: gl.tensor
    cursor: Cursor
    j: gl.tensor
    row: gl.tensor

    @gluon.constexpr_function
    def __init__(self, number, cursor, j, row):
        self.number = number
        self.cursor = cursor
        self.j = j
        self.row = row


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
def producer(share, q_desc, k_desc, v_desc, KEYS: gl.constexpr = 1, VALUES: gl.constexpr = 1):
    """One warp: keep the rings of Q and K (KEYS), and of V (VALUES), full, across heads.

    With one tile of Q, the next head's queries cannot come before this head's last scores. Its first blocks need not
    wait for that, so they are fetched before its queries: the slots they go to become empty without them.
    """
    PLAN: gl.constexpr = share.PLAN
    LATE: gl.constexpr = PLAN.slots // 2 - 2  # the block behind which a later head's queries are fetched
    cache = share.results.cache
    cursor = share.start
    count = share.end - share.begin
    piece = gl.to_tensor(0)
    numbers = page_numbers(cache, cursor)
    if KEYS:
        load_query_tile(share, piece, cursor, q_desc)
    for i in range(count):
        if (cursor.j == 0) & (i > 0):
            piece += 1
            if KEYS and PLAN.q_slots == 2:
                load_query_tile(share, piece, cursor, q_desc)
        kv_head = cursor.head // share.results.tiles
        if KEYS:
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


# Threads t = 0 .. 3 of a row hold word t of the groups 0 .. 3, and then hold group t: the first exchange swaps bit 0 of
# group and thread, the second one bit 1.
EXCHANGE = gl.constexpr(
    "{ .reg .pred odd, high; .reg .b32 t, w0, w1, w2, w3; mov.u32 t, %laneid; "
    "and.b32 w0, t, 1; setp.ne.u32 odd, w0, 0; and.b32 w0, t, 2; setp.ne.u32 high, w0, 0; "
    "selp.b32 t, $4, $5, odd; shfl.sync.bfly.b32 t, t, 1, 31, 0xffffffff; "
    "selp.b32 w0, t, $4, odd; selp.b32 w1, $5, t, odd; "
    "selp.b32 t, $6, $7, odd; shfl.sync.bfly.b32 t, t, 1, 31, 0xffffffff; "
    "selp.b32 w2, t, $6, odd; selp.b32 w3, $7, t, odd; "
    "selp.b32 t, w0, w2, high; shfl.sync.bfly.b32 t, t, 2, 31, 0xffffffff; "
    "selp.b32 $0, t, w0, high; selp.b32 $2, w2, t, high; "
    "selp.b32 t, w1, w3, high; shfl.sync.bfly.b32 t, t, 2, 31, 0xffffffff; "
    "selp.b32 $1, t, w1, high; selp.b32 $3, w3, t, high; }"
)


@gluon.constexpr_function
def four_groups(PAIRS):
    """Layout of words [64, PAIRS] as a product leaves them, a thread's words of four groups of four one after another."""
    registers = [[0, 4], [0, 8], [8, 0]] + [[0, d] for d in (16, 32, 64) if d < PAIRS]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, PAIRS])


@gluon.jit
def store_head(results, cursor, o, row):
    """Store the output of a head that this program has computed whole, [64, BLOCK_D]; row: the tile's first."""
    numbers = o.to(results.out_ptr.dtype.element_ty)
    if results.cache.PLAN.wide:
        # Two neighbours as one word; then the four threads of a row exchange words, four by four.
        PAIRS: gl.constexpr = o.shape[1] // 2
        low, high = numbers.to(gl.int16, bitcast=True).reshape([64, PAIRS, 2]).split()
        words = (low.to(gl.int32) & 0xFFFF) | (high.to(gl.int32) << 16)
        words = gl.convert_layout(words, four_groups(PAIRS)).reshape([64, PAIRS // 16, 4, 4])
        words = gl.inline_asm_elementwise(
            EXCHANGE, "=&r,=&r,=&r,=&r,r,r,r,r", [words], dtype=gl.int32, is_pure=True, pack=4
        )
        words = words.permute([0, 1, 3, 2]).reshape([64, PAIRS])
        pairs = gl.join((words & 0xFFFF).to(gl.int16), (words >> 16).to(gl.int16)).reshape([64, 2 * PAIRS])
        results.store_whole(cursor, pairs.to(numbers.dtype, bitcast=True), row, 0)
    else:
        results.store_whole(cursor, numbers, row, 0)


@gluon.jit
def store_head_by_tma(results, cursor, o_desc, tile, rows, o, ROW: gl.constexpr):
    """Hand the output of a head, query rows ROW .. ROW + 63 of its tile, to TMA, which leaves out rows that are none.

    tile, rows: the same shared memory, as the box of the copy and as [64, BLOCK_D].
    """
    PLAN: gl.constexpr = results.cache.PLAN
    rows.store(o.to(tile.dtype))
    # The threads wrote through the generic proxy, TMA reads through the async proxy: without the fence it may read
    # what was there before.
    fence_async_shared()
    query = (cursor.head % results.tiles) * PLAN.queries
    tma_store(o_desc, [cursor.b, cursor.head // results.tiles, ROW // PLAN.queries, query, 0], tile)


@gluon.jit
def row_sums(state, row):
    """Row numbers, maximum in use and sum: a tuple with one such triple, or with two where a warp's rows are halved."""
    if len(state) == 2:
        upper, lower = state
        layout: gl.constexpr = upper.maximum.type.layout
        warp = gl.arange(0, 4, gl.SliceLayout(1, layout))[:, None]
        numbers = row + 16 * warp + gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :]
        total0 = gl.convert_layout(gl.sum(upper.total, 2), layout)
        total1 = gl.convert_layout(gl.sum(lower.total, 2), layout)
        return (numbers, upper.maximum, total0), (numbers + 8, lower.maximum, total1)
    else:
        rows = state[0]
        numbers = row + gl.arange(0, rows.maximum.shape[0], rows.maximum.type.layout)
        return ((numbers, rows.maximum, rows.total),)


@gluon.jit
def inverses(sums):
    """1 / sum of each triple of `row_sums`."""
    if len(sums) == 2:
        return inverse(sums[0][2]), inverse(sums[1][2])
    else:
        return (inverse(sums[0][2]),)


@gluon.jit
def clean_tile(share, block, times, W: gl.constexpr):
    """Replace the values behind the last key by zeros before any consumer multiplies them; times: cleaned before."""
    PLAN: gl.constexpr = share.PLAN
    share.v.wait_full(block.number)
    if W == 0:
        tile = share.v.tiles.index(share.v.slot(block.number))
        clean_values(tile, block.cursor, block.j, PLAN.block_n, PLAN.block_d)
        # Zeros stored by threads, read by wgmma through the async proxy: without the fence it may read what was there.
        fence_async_shared()
        if PLAN.consumers == 2:
            async_copy.mbarrier_arrive(share.cleaned, increment_count=False)
        thread_barrier()  # the other warps' zeros
    else:
        mbarrier.wait(share.cleaned, times & 1)  # without it this consumer could multiply what is not a number


@gluon.jit
def queries_in_fp16(q, target, layout: gl.constexpr):
    """Store 64 rows of queries as fp16, each divided by a power of two near its largest number; the powers of the rows."""
    BLOCK_D: gl.constexpr = q.shape[1]
    lanes: gl.constexpr = BLOCK_D // 8
    own: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    numbers = q.load(own).to(gl.float32)
    largest = gl.max(gl.abs(numbers), 1)
    power = (largest.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    power = gl.minimum(gl.maximum(power, 1.1754943508222875e-38), 8.507059173023462e37)  # 2^-126 to 2^126
    target.store((numbers / power[:, None]).to(gl.float16))
    # The threads wrote through the generic proxy, wgmma reads through the async proxy; and other warps' rows are read, too.
    fence_async_shared()
    thread_barrier()
    return gl.convert_layout(power, gl.SliceLayout(1, layout))


@gluon.jit
def consumer(all_heads, o_desc, W: gl.constexpr):
    """Warpgroup W: the query rows W * 64 and on of each head, over all blocks of this program."""
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
    cleaned = gl.to_tensor(0)
    while unit < all_heads.end:
        n = gl.minimum(cursor.blocks - cursor.j, all_heads.end - unit)
        low, clear = clear_keys(cache, cursor)
        all_heads.q.wait_full(piece)  # the first product reads Q
        q = all_heads.q.tiles.index(all_heads.q.slot(piece)).reshape([PLAN.columns, BLOCK_D]).slice(ROW, 64)
        if PLAN.fp16:
            # Here `o_desc` is the place of the queries in fp16.
            half_q = o_desc.slice(ROW, 64)
            powers = queries_in_fp16(q, half_q, accumulator(BLOCK_N))
            all_heads.q.release(piece)
            q = half_q
        else:
            powers = results.c
        if PLAN.raw_slots > 0:
            share, k_scale, v_scale = all_heads.scaled(cursor.head // results.tiles, powers)
        else:
            share = all_heads
        if PLAN.lean:
            key = (cursor.first + cursor.j) * BLOCK_N
            masked = (key + BLOCK_N > clear) | (key < low)
            p, state = first_block_unmasked(share, Block(it, cursor, cursor.j, gl.to_tensor(ROW)), q, masked)
        else:
            p, state = first_block(share, Block(it, cursor, cursor.j, gl.to_tensor(ROW)), q, True, False, False)
        o = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
        it += 1
        share.k.wait_full(it, pred=n > 1)  # each step waits for the next one's keys; this is the first one's
        for k in range(1, n):
            j = cursor.j + k
            key = (cursor.first + j) * BLOCK_N
            masked = (key + BLOCK_N > clear) | (key < low)
            block = Block(it, cursor, j, gl.to_tensor(ROW))
            if PLAN.soon:
                o, p, state = step_soon(share, block, q, o, p, state, k + 1 < n, masked, it - piece - 1, W)
            else:
                o, p, state = step(share, block, q, o, p, state, k + 1 < n, masked, True, False)
            it += 1
        if not PLAN.by_tma and not PLAN.fp16:
            share.q.release(piece)

        j = cursor.j + n - 1
        if share.CASE.clean:  # noqa: SIM102 (decided by the compiler; the next line for each head)
            if (cursor.first + j + 1) * BLOCK_N > cursor.length:
                clean_tile(share, Block(it - 1, cursor, j, gl.to_tensor(ROW)), cleaned, W)
                cleaned += 1
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
        elif (PLAN.lean and share.CASE.aligned) or n == cursor.blocks:
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
    q = allocate_ring(q_desc, PLAN.q_slots, 1, CONSUMERS)
    k = allocate_ring(k_desc, PLAN.slots // 2, 1, CONSUMERS, PLAN.block_n)
    v = allocate_ring(v_desc, PLAN.slots - PLAN.slots // 2, 1, CONSUMERS, PLAN.block_n)
    cleaned = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(cleaned, count=128)  # every thread of the consumer that cleans arrives for itself
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for turn in gl.static_range(2):
        mbarrier.init(turns.index(turn), count=128)  # every thread of the other consumer
    # TMA completes the barriers through the async proxy, and may otherwise find them as they were before.
    fence_async_shared()
    begin = split.begin(program)
    start = cache.start(split, program)
    end = split.begin(program + 1)
    share = Share(
        results,
        begin,
        end,
        start,
        q,
        k,
        v,
        cleaned,
        turns,
        results.c,
        results.counters_ptr,
        results.c,
        PLAN,
        cache.CASE,
    )
    # The first role has four warps and the registers that are left by the others.
    if CONSUMERS == 1 and PLAN.producers == 2:
        gl.warp_specialize(
            [
                (consumer, (share, o_desc, 0)),
                (producer, (share, q_desc, k_desc, v_desc, 1, 0)),
                (producer, (share, q_desc, k_desc, v_desc, 0, 1)),
            ],
            [1, 1],
            [PLAN.producer_registers, PLAN.producer_registers],
        )
    elif CONSUMERS == 1:
        gl.warp_specialize(
            [(consumer, (share, o_desc, 0)), (producer, (share, q_desc, k_desc, v_desc))],
            [1],
            [PLAN.producer_registers],
        )
    else:
        gl.static_assert(CONSUMERS == 2)
        gl.warp_specialize(
            [
                (consumer, (share, o_desc, 0)),
                (consumer, (share, o_desc, 1)),
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
    page,
    pages,
    head_dim,
    c,
    PLAN: gl.constexpr,
    CASE: gl.constexpr,
):
    """One program an SM: its share of the blocks of all heads. The arguments are `attention_decode`'s."""
    heads = kv_heads * tiles
    cache = Cache(lens_ptr, table_ptr, table_stride, batch, heads, sq, sk, window, page, pages, PLAN, CASE)
    results = Results(out_ptr, parts_ptr, counters_ptr, group, tiles, in_eights(head_dim), c, cache)
    split = cache.split()
    program = gl.program_id(0)
    if PLAN.early and PLAN.merge == "second":
        let_next_launch_begin()
    if program < split.programs:
        attend_rows(results, split, q_desc, k_desc, v_desc, o_desc, program)
        # Behind the roles' last stores: the first role's warps go on when all roles have ended.
        results.merge_own(split, program)
