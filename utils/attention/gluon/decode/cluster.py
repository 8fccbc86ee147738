"""The decode kernel for few heads of keys: the programs of a head are one cluster, and merge in shared memory.

With one sequence a call takes ten to twenty microseconds, and what lies before the first byte and behind the last one counts
as much as the bytes. Here the programs that share a head, 2 to 16 of them, are a thread block cluster: the GPU starts them
together, and each can write to the others' shared memory. Each program attends to its share of the head's blocks, as in
`kernel.py` (up to 32 query rows, keys are the rows of the products) or with query rows as the rows (up to 64). Then it sends
each other program that one's slice of its unnormalized output, with the maxima and sums of all rows. The stores count the
bytes they bring on a barrier of the receiver (`st.async`), so a program waits once, for everything, then adds up its slice
and stores it: no part goes to memory, and no counter is polled.

    grid         (heads of keys, sequences, tiles of queries) clusters; shares of a head differ by a block at most
    ring         tiles of K and V in turn; the first loads are asked for behind a single barrier
    inbox        for each query row a slice of the output (fp32), a maximum and a sum from each program; a large one that would
                 cost tiles takes the place of the ring, which no program may be reading then
    end          all programs of a cluster leave together: each says when it has what the others sent, and waits for them
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from utils.attention.gluon.decode.blocks import clear_keys, load_block, mask_block
from utils.attention.gluon.decode.kernel import SIZES, start_block, start_scores, thread_sums
from utils.attention.gluon.decode.merge import Results, in_eights, inverse
from utils.attention.gluon.decode.work import Cache, Cursor, Split
from utils.attention.gluon.shared import (
    MINUS_INF,
    accumulator,
    left_operand,
    online_softmax,
    rescale,
    thread_barrier,
    tma_load,
)


@gluon.constexpr_function
def _open_asm(plan):
    # The launch asks for more shared memory than Triton knows of: at its end are the inbox's barrier and the inbox, unless it is
    # in the ring.
    # One thread says how many bytes will come.
    tell = "" if plan.inbox_in_ring else "barrier.cluster.arrive.relaxed; "
    return (
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %dynamic_smem_size; mov.u32 $0, global_smem; add.u32 $0, $0, t; "
        f"sub.u32 $0, $0, {plan.inbox_space}; "
        "mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; @p mbarrier.init.shared::cta.b64 [$0], 1; "
        f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {plan.inbox_bytes}; "
        f"@p fence.mbarrier_init.release.cluster; {tell}}}"
    )


@gluon.constexpr_function
def _join_asm(plan):
    # Where the numbers will stand. All programs have opened their inboxes: without the wait, a slice could come before the
    # barrier is there. An inbox in the ring takes the place of tiles that all programs must have read.
    if plan.inbox_in_ring:
        return "barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.u32 $0, global_smem;"
    return "barrier.cluster.wait.acquire; add.u32 $0, $1, 16;"


@gluon.constexpr_function
def _send_asm(parts, pairs):
    # A number ($1: where, $2: to whom, $3: the barrier that counts the bytes, $4: the number), or two that stand side by side
    # there; to a program that does not exist nothing goes.
    at, owner, barrier, numbers, zeros = "$1", "$2", "$3", "$4", "mov.u32 $0, 0;"
    if pairs == "neighbours":  # two neighbouring elements, with the address of the first
        at, owner, barrier, numbers, zeros = "$2", "$4", "$6", "{$8, $9}", "mov.u32 $0, 0; mov.u32 $1, 0;"
    elif pairs:  # two tensors
        numbers = "{$4, $5}"
    return (
        f"{{ .reg .b32 a, b; .reg .pred p; setp.lt.u32 p, {owner}, {parts}; "
        f"@p mapa.shared::cluster.u32 a, {at}, {owner}; @p mapa.shared::cluster.u32 b, {barrier}, {owner}; "
        f"@p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{'.v2' if pairs else ''}.f32 [a], {numbers}, [b]; "
        f"{zeros} }}"
    )


ARRIVED = gl.constexpr(
    "{ .reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$1], 0; @!p bra again; "
    "mov.u32 $0, 0; }"
)
# A program that ends gives its shared memory back, while stores of it, or to it, may still be on their way. So none ends before
# all have what was sent to them; the wait is behind the last work, when the others have long arrived.
ALL_HAVE = gl.constexpr("barrier.cluster.arrive.relaxed; mov.u32 $0, 0;")
LEAVE = gl.constexpr("barrier.cluster.wait.acquire; mov.u32 $0, 0;")


@gluon.jit
def open_inbox(PLAN: gl.constexpr):
    """Set up the barrier of this program's inbox; its address."""
    return gl.inline_asm_elementwise(_open_asm(PLAN), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def join(barrier, PLAN: gl.constexpr):
    """Wait until all inboxes of the cluster may be written; where in each the numbers stand."""
    return gl.inline_asm_elementwise(_join_asm(PLAN), "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send(inbox, barrier, rank, row, d, o, PLAN: gl.constexpr, PAIRS: gl.constexpr):
    """Send each program its slice of o; row, d: of each number, in o's shape. PAIRS: neighbours along d go together."""
    WIDTH: gl.constexpr = PLAN.block_d // PLAN.cluster
    at = inbox + PLAN.numbers_at + 4 * ((rank * PLAN.sent + row) * WIDTH + d % WIDTH)
    owner = gl.where(row < PLAN.sent, d // WIDTH, PLAN.cluster)
    barrier = gl.full_like(at, 0) + barrier
    if PAIRS:
        gl.inline_asm_elementwise(
            _send_asm(PLAN.cluster, "neighbours"),
            "=r,=r,r,r,r,r,r,r,f,f",
            [at, owner, barrier, o],
            dtype=gl.int32,
            is_pure=False,
            pack=2,
        )
    else:
        gl.inline_asm_elementwise(
            _send_asm(PLAN.cluster, False), "=r,r,r,r,f", [at, owner, barrier, o], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def send_sums(inbox, barrier, rank, row, other, m, total, PLAN: gl.constexpr):
    """Send the rows' maxima and sums to program `other`, if there is one; all four of one shape."""
    at = inbox + 8 * (rank * PLAN.sent + row)
    other = gl.where(row < PLAN.sent, other, PLAN.cluster)
    barrier = gl.full_like(at, 0) + barrier
    gl.inline_asm_elementwise(
        _send_asm(PLAN.cluster, True),
        "=r,r,r,r,f,f",
        [at, other, barrier, m, total],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_shared(address):
    """Read fp32 numbers of this program's inbox."""
    return gl.inline_asm_elementwise("ld.shared.f32 $0, [$1];", "=f,r", [address], gl.float32, is_pure=False, pack=1)


@gluon.jit
def load_sums(address):
    """Read maxima and sums, which stand side by side."""
    return gl.inline_asm_elementwise(
        "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r", [address], (gl.float32, gl.float32), is_pure=False, pack=1
    )


@gluon.jit
def add_up(results, inbox, barrier, rank, b, kv_head, tile):
    """Wait for all slices of this program, add them up, and store them: numbers [rank * WIDTH, + WIDTH) of each row."""
    PLAN: gl.constexpr = results.cache.PLAN
    PARTS: gl.constexpr = PLAN.cluster
    ROWS: gl.constexpr = PLAN.sent
    WIDTH: gl.constexpr = PLAN.block_d // PLAN.cluster
    EACH: gl.constexpr = max(1, min(ROWS * WIDTH // 128, 4))
    layout: gl.constexpr = gl.BlockedLayout([EACH], [32], [4], [0])
    i = gl.arange(0, ROWS * WIDTH, layout)
    row = i // WIDTH
    d = rank * WIDTH + i % WIDTH
    in_group = row // PLAN.queries
    query = tile * PLAN.queries + row % PLAN.queries
    kv_heads = results.cache.heads // results.tiles
    place = ((b * kv_heads + kv_head) * results.group + in_group) * results.cache.sq + query
    exists = (in_group < results.group) & (query < results.cache.sq) & (d < results.head_dim)
    gl.inline_asm_elementwise(ARRIVED, "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(ALL_HAVE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    sums = inbox + 8 * row
    numbers = inbox + PLAN.numbers_at + 4 * i
    top = gl.full([ROWS * WIDTH], MINUS_INF, gl.float32, layout)
    for part in gl.static_range(PARTS):
        top = gl.maximum(top, load_shared(sums + 8 * part * ROWS))
    shifted = gl.where(top == MINUS_INF, 0.0, top * results.c)
    o = gl.zeros([ROWS * WIDTH], gl.float32, layout)
    total = gl.zeros([ROWS * WIDTH], gl.float32, layout)
    for part in gl.static_range(PARTS):
        m, part_total = load_sums(sums + 8 * part * ROWS)
        weight = gl.exp2(m * results.c - shifted)
        o += weight * load_shared(numbers + 4 * part * ROWS * WIDTH)
        total += weight * part_total
    o = o * inverse(total)
    at = place.to(gl.int64) * results.head_dim + d
    gl.store(results.out_ptr + at, o.to(results.out_ptr.dtype.element_ty), mask=exists)
    gl.inline_asm_elementwise(LEAVE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def attend_keys(results, start, n, q_tile, ring, full, k_desc, v_desc):
    """The blocks of one program, keys as rows: the output [BLOCK_D, COLUMNS], unnormalized, and the columns' maxima and sums.

    The loop is `kernel.attend`'s, for one head.
    """
    PLAN: gl.constexpr = results.cache.PLAN
    cache = results.cache
    BLOCK_N: gl.constexpr = PLAN.block_n
    SLOTS: gl.constexpr = PLAN.slots
    COLUMNS: gl.constexpr = PLAN.columns
    BLOCK_D: gl.constexpr = PLAN.block_d
    layout: gl.constexpr = accumulator(COLUMNS)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    p_tile = gl.allocate_shared_memory(k_desc.dtype, [COLUMNS, BLOCK_N], gl.NVMMASharedLayout(128, 16, rank=2))
    kv_head = start.head // results.tiles
    q = q_tile.reshape([COLUMNS, BLOCK_D])
    m = gl.full([COLUMNS], MINUS_INF, gl.float32, columns)
    o = gl.zeros([BLOCK_D, COLUMNS], gl.float32, layout)
    sums = thread_sums(gl.zeros([BLOCK_N, COLUMNS], gl.float32, layout))
    low, clear = clear_keys(cache, start)
    mbarrier.wait(full.index(0), 0)  # K has arrived
    s = warpgroup_mma_wait(0, [start_scores(ring.index(0), q, layout)])
    if n > SLOTS // 2:
        thread_barrier()  # all warps have read this K: TMA may overwrite it
        load_block(k_desc, cache, start.behind(SLOTS // 2), (), kv_head, ring.index(0), full.index(0), True)
    for i in range(n - 1):
        after = 2 * (i + 1) % SLOTS
        mbarrier.wait(full.index(after), (2 * (i + 1) // SLOTS) & 1)
        s_next = start_scores(ring.index(after), q, layout)
        slot = 2 * i % SLOTS + 1
        v_full = full.index(slot), (2 * i // SLOTS) & 1
        block = start.j + i, low, clear
        o_next, m, sums = start_block(results, start, block, s, m, o, sums, p_tile, ring.index(slot), v_full, False)
        s = warpgroup_mma_wait(1, [s_next])  # the older product: its K is free
        if i + 1 + SLOTS // 2 < n:
            thread_barrier()
            k_next = start.behind(i + 1 + SLOTS // 2)
            load_block(k_desc, cache, k_next, (), kv_head, ring.index(after), full.index(after), True)
        o = warpgroup_mma_wait(0, [o_next])
        thread_barrier()  # all warps have read V and P
        if i + SLOTS // 2 < n:
            v_next = start.behind(i + SLOTS // 2)
            load_block(v_desc, cache, v_next, (), kv_head, ring.index(slot), full.index(slot), True)
    slot = 2 * (n - 1) % SLOTS + 1
    v_full = full.index(slot), (2 * (n - 1) // SLOTS) & 1
    block = start.j + n - 1, low, clear
    o, m, sums = start_block(results, start, block, s, m, o, sums, p_tile, ring.index(slot), v_full, False)
    total = gl.convert_layout(gl.sum(gl.sum(sums, 1), 0), columns)
    return warpgroup_mma_wait(0, [o]), m, total


@gluon.jit
def start_rows(results, start, i, s, m, total, o, limits, v_tile, v_full):
    """The softmax of block i, query rows as rows, and the start of its product with V: output, maxima, sums."""
    PLAN: gl.constexpr = results.cache.PLAN
    BLOCK_D: gl.constexpr = PLAN.block_d
    low, clear = limits
    key = (start.j + i) * PLAN.block_n
    if (key + PLAN.block_n > clear) | (key < low):
        s = mask_block(s, results.cache, start, start.j + i, start.head % results.tiles, 0, 1)
    p, m, total, factor = online_softmax(s, m, total, results.c)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout))
    o = rescale(o, factor[:, None].broadcast_to([64, BLOCK_D]))
    p = gl.convert_layout(p.to(v_tile.dtype), left_operand(BLOCK_D))
    barrier, phase = v_full
    mbarrier.wait(barrier, phase)  # V has arrived
    return warpgroup_mma(p, v_tile.reshape([PLAN.block_n, BLOCK_D]), o, is_async=True), m, total


@gluon.jit
def start_row_scores(q, k_tile, layout: gl.constexpr):
    """Hand S = Q K^T to the tensor cores; k_tile: a slot of the ring, q: [64, BLOCK_D]."""
    BLOCK_N: gl.constexpr = k_tile.shape[2]
    k = k_tile.reshape([BLOCK_N, k_tile.shape[3]])
    zero = gl.zeros([64, BLOCK_N], gl.float32, layout)
    return warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def attend_rows(results, start, n, q_tile, ring, full, k_desc, v_desc):
    """The blocks of one program, query rows as rows: the output [64, BLOCK_D], unnormalized, the rows' maxima and sums.

    One warpgroup: a block's scores are computed during the softmax of the block before it.
    """
    PLAN: gl.constexpr = results.cache.PLAN
    cache = results.cache
    BLOCK_D: gl.constexpr = PLAN.block_d
    SLOTS: gl.constexpr = PLAN.slots
    scores: gl.constexpr = accumulator(PLAN.block_n)
    output: gl.constexpr = accumulator(BLOCK_D)
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    kv_head = start.head // results.tiles
    q = q_tile.reshape([64, BLOCK_D])
    m = gl.full([64], MINUS_INF, gl.float32, rows)
    total = gl.zeros([64], gl.float32, rows)
    o = gl.zeros([64, BLOCK_D], gl.float32, output)
    limits = clear_keys(cache, start)
    mbarrier.wait(full.index(0), 0)  # K has arrived
    s = warpgroup_mma_wait(0, [start_row_scores(q, ring.index(0), scores)])
    if n > SLOTS // 2:
        thread_barrier()  # all warps have read this K: TMA may overwrite it
        load_block(k_desc, cache, start.behind(SLOTS // 2), (), kv_head, ring.index(0), full.index(0), True)
    for i in range(n - 1):
        after = 2 * (i + 1) % SLOTS
        mbarrier.wait(full.index(after), (2 * (i + 1) // SLOTS) & 1)
        s_next = start_row_scores(q, ring.index(after), scores)
        slot = 2 * i % SLOTS + 1
        v_full = full.index(slot), (2 * i // SLOTS) & 1
        o_next, m, total = start_rows(results, start, i, s, m, total, o, limits, ring.index(slot), v_full)
        s = warpgroup_mma_wait(1, [s_next])  # the older product: its K is free
        if i + 1 + SLOTS // 2 < n:
            thread_barrier()
            k_next = start.behind(i + 1 + SLOTS // 2)
            load_block(k_desc, cache, k_next, (), kv_head, ring.index(after), full.index(after), True)
        o = warpgroup_mma_wait(0, [o_next])
        if i + SLOTS // 2 < n:
            thread_barrier()  # all warps have read V
            v_next = start.behind(i + SLOTS // 2)
            load_block(v_desc, cache, v_next, (), kv_head, ring.index(slot), full.index(slot), True)
    slot = 2 * (n - 1) % SLOTS + 1
    v_full = full.index(slot), (2 * (n - 1) // SLOTS) & 1
    o, m, total = start_rows(results, start, n - 1, s, m, total, o, limits, ring.index(slot), v_full)
    m = gl.convert_layout(m, gl.SliceLayout(1, output))
    total = gl.convert_layout(total, gl.SliceLayout(1, output))
    return warpgroup_mma_wait(0, [o]), m, total


@gluon.jit
def send_part(inbox, barrier, rank, o, m, total, PLAN: gl.constexpr, ROWS: gl.constexpr):
    """Send a part to all programs of the cluster. Dimension ROWS of o holds query rows, the other one D."""
    OTHER: gl.constexpr = 1 - ROWS
    layout: gl.constexpr = o.type.layout
    # A product's 64 rows, or sixteen of its columns, stand for programs: a thread holds some, and sends sums to them.
    few: gl.constexpr = layout if ROWS == 1 else accumulator(16)
    shape: gl.constexpr = [64, PLAN.columns] if ROWS == 1 else [64, 16]
    other = gl.expand_dims(gl.arange(0, shape[OTHER], gl.SliceLayout(ROWS, few)), ROWS).broadcast_to(shape)
    row = gl.expand_dims(gl.arange(0, shape[ROWS], gl.SliceLayout(OTHER, few)), OTHER).broadcast_to(shape)
    m = gl.expand_dims(m, OTHER).broadcast_to(shape)
    total = gl.expand_dims(total, OTHER).broadcast_to(shape)
    send_sums(inbox, barrier, rank, row, other, m, total, PLAN)
    whole: gl.constexpr = o.shape
    d = gl.expand_dims(gl.arange(0, whole[OTHER], gl.SliceLayout(ROWS, layout)), ROWS).broadcast_to(whole)
    row = gl.expand_dims(gl.arange(0, whole[ROWS], gl.SliceLayout(OTHER, layout)), OTHER).broadcast_to(whole)
    send(inbox, barrier, rank, row, d, o, PLAN, ROWS == 0)


@gluon.jit
def store_and_merge(results, start, rank, o, m, total):
    """The merge by memory and a counter, where the last program merges: the simulator, which has no clusters, runs this."""
    PLAN: gl.constexpr = results.cache.PLAN
    PARTS: gl.constexpr = PLAN.cluster
    ROWS: gl.constexpr = 1 if PLAN.consumers == 0 else 0
    gl.static_assert(PLAN.merge == "last")
    program = (start.b * results.cache.heads + start.head) * PARTS + rank
    part = 2 * program + (rank == 0).to(gl.int32)
    results.store_sums(part, gl.arange(0, o.shape[ROWS], gl.SliceLayout(1 - ROWS, o.type.layout)), m, total)
    results.store_part(start, part, o, 0, ROWS)
    thread_barrier()  # one thread says so for all: without it, another's numbers might not be stored yet
    if results.arrive(start, True) == PARTS:
        thread_barrier()  # one thread has seen that: the others may read only behind it
        results.merge(start.b, start.head, program - rank, PARTS, 0, 1, PLAN.merge_steps)
        gl.store(results.counter(start), 0)  # for the next launch


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["lens_ptr", "table_ptr"])
def attention_decode_cluster(
    q_desc,
    k_desc,
    v_desc,
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
    """One program: its share of one head's blocks, and a slice of the head's output. Arguments: `attention_decode`'s."""
    PARTS: gl.constexpr = PLAN.cluster
    SLOTS: gl.constexpr = PLAN.slots
    BLOCK_N: gl.constexpr = PLAN.block_n
    BLOCK_D: gl.constexpr = PLAN.block_d
    BYTES: gl.constexpr = BLOCK_N * BLOCK_D * 2
    gl.static_assert(not (CASE.lengths or CASE.paged or CASE.window))
    cache = Cache(lens_ptr, table_ptr, table_stride, batch, kv_heads * tiles, sq, sk, window, page, pages, PLAN, CASE)
    results = Results(out_ptr, parts_ptr, counters_ptr, group, tiles, in_eights(head_dim), c, cache)
    rank = gl.program_id(0) % PARTS
    kv_head = gl.program_id(0) // PARTS
    b = gl.program_id(1)
    tile = gl.program_id(2)
    ring = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS + 1, 1], mbarrier.MBarrierLayout())
    q_tile = gl.allocate_shared_memory(k_desc.dtype, [1, 1, PLAN.heads, PLAN.queries, BLOCK_D], q_desc.layout)
    blocks = gl.cdiv(sk, BLOCK_N)
    split = Split(blocks // PARTS, blocks % PARTS, gl.to_tensor(PARTS), gl.to_tensor(1))
    first = split.begin(rank)
    n = split.begin(rank + 1) - first
    for slot in gl.static_range(SLOTS + 1):
        mbarrier.init(full.index(slot), count=1)
    # All expectations before all copies: the compiler puts a barrier between the two, here one for all.
    mbarrier.expect(full.index(SLOTS), q_desc.block_type.nbytes)
    for slot in gl.static_range(SLOTS):
        mbarrier.expect(full.index(slot), BYTES, pred=slot // 2 < n)
    # TMA completes the barriers through the async proxy, and may otherwise find them as they were before.
    fence_async_shared()
    thread_barrier()
    for slot in gl.static_range(SLOTS):
        at = [b, kv_head, (first + slot // 2) * BLOCK_N, 0]
        if slot % 2 == 0:
            tma_load(k_desc, at, full.index(slot), ring.index(slot), pred=slot // 2 < n)
        else:
            tma_load(v_desc, at, full.index(slot), ring.index(slot), pred=slot // 2 < n)
        if slot == 0:
            tma_load(q_desc, [b, kv_head, 0, tile * PLAN.queries, 0], full.index(SLOTS), q_tile)

    if PLAN.merge == "cluster":
        barrier = open_inbox(PLAN)
    head = kv_head * tiles + tile
    start = Cursor(b, head, first, sk, sk * 0, blocks)
    mbarrier.wait(full.index(SLOTS), 0)
    if PLAN.consumers == 0:
        o, m, total = attend_keys(results, start, n, q_tile, ring, full, k_desc, v_desc)
    else:
        o, m, total = attend_rows(results, start, n, q_tile, ring, full, k_desc, v_desc)
    if PLAN.merge == "cluster":
        ROWS: gl.constexpr = 1 if PLAN.consumers == 0 else 0  # the dimension of o that holds query rows
        few: gl.constexpr = gl.SliceLayout(1 - ROWS, o.type.layout if ROWS == 1 else accumulator(16))
        # What goes through shared memory by itself comes before the inboxes are open: it may use what becomes one.
        m = gl.convert_layout(m, few)
        total = gl.convert_layout(total, few)
        if PLAN.inbox_in_ring:
            # The hardware may write a barrier's word back late, over what was stored in its place: it must know that it is none.
            thread_barrier()  # all warps have waited for the last tiles
            for slot in gl.static_range(SLOTS + 1):
                mbarrier.invalidate(full.index(slot))
        inbox = join(barrier, PLAN)
        send_part(inbox, barrier, rank, o, m, total, PLAN, ROWS)
        add_up(results, inbox, barrier, rank, b, kv_head, tile)
    else:
        store_and_merge(results, start, rank, o, m, total)
