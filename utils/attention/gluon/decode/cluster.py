"""The decode kernel for few heads of keys: the programs of a head are one cluster, and merge in shared memory.

With one sequence a call takes ten to twenty microseconds, and what lies before the first byte and behind the last one counts
as much as the bytes. Here the programs that share a head, 2 to 16 of them, are a thread block cluster: the GPU starts them
together, and each can write to the others' shared memory. Each program attends to its share of the head's blocks, as in
`kernel.py` (up to 32 query rows, keys are the rows of the products) or with query rows as the rows (up to 64). Then it sends
each other program that one's slice of its output, and adds up the slices that it gets (`inbox.py`): no part goes to memory, and
no counter is polled.

    grid         (heads of keys, sequences, tiles of queries) clusters; shares of a head differ by a block at most
    blocks       a run of them each; with lengths in turn, so that the first ones are known before the length is
    lengths      where several sequences' lengths may differ, each has 64 programs at most, two an SM; heads of short ones
                 share a cluster (`divide.py`)
    ring         tiles of K and V in turn; the first loads are asked for behind a single barrier
    inbox        for each query row a slice of the output (fp32), a maximum and a sum from each program of the head; a large one that would
                 cost tiles takes the place of the ring, which no program may be reading then
    end          all programs of a cluster leave together: each says when it has what the others sent, and waits for them
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from utils.attention.gluon.decode import divide
from utils.attention.gluon.decode.blocks import load_block, load_queries, page_numbers
from utils.attention.gluon.decode.cluster_blocks import attend_keys, attend_rows
from utils.attention.gluon.decode.inbox import Team, add_up, join, leave, open_inbox, power, send_part, wait_for_slices
from utils.attention.gluon.decode.kernel import SIZES
from utils.attention.gluon.decode.merge import Results, in_eights
from utils.attention.gluon.decode.work import Cache, Cursor, Split
from utils.attention.gluon.shared import accumulator, thread_barrier


@gluon.constexpr_function
def stride(plan):
    """From a block of a program to its next one."""
    return plan.cluster if plan.in_turn else 1


@gluon.jit
def keep_place(kept, END: gl.constexpr):
    """Keep the program's SM and the time of its beginning, or of its end."""
    zero = gl.to_tensor(0)
    read: gl.constexpr = "mov.u32 $0, %globaltimer_lo;"
    number = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    time = gl.inline_asm_elementwise(read, "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1)
    gl.store(kept + 3 * number + 1 + END, time.to(gl.float32, bitcast=True))
    if END == 0:
        place: gl.constexpr = "mov.u32 $0, %smid;"
        sm = gl.inline_asm_elementwise(place, "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1)
        gl.store(kept + 3 * number, sm.to(gl.float32, bitcast=True))


@gluon.jit
def store_and_merge(results, team, start, o, m, total):
    """The merge by memory and a counter, where the last program merges: the simulator, which has no clusters, runs this."""
    PLAN: gl.constexpr = results.cache.PLAN
    ROWS: gl.constexpr = 1 if PLAN.consumers == 0 else 0
    gl.static_assert(PLAN.merge == "last")
    count = 1 << team.bits
    first = (start.b * results.cache.heads + start.head) * PLAN.cluster
    part = 2 * (first + team.rank) + (team.rank == 0).to(gl.int32)
    results.store_sums(part, gl.arange(0, o.shape[ROWS], gl.SliceLayout(1 - ROWS, o.type.layout)), m, total)
    results.store_part(start, part, o, 0, ROWS)
    thread_barrier()  # one thread says so for all: without it, another's numbers might not be stored yet
    if results.arrive(start, True) == count:
        thread_barrier()  # one thread has seen that: the others may read only behind it
        results.merge(start.b, start.head, first, count, 0, 1, PLAN.merge_steps)
        gl.store(results.counter(start), 0)  # for the next launch


@gluon.jit
def first_block(cache, b, head, rank):
    """The first block of a program, how many it has, and the pages of those that its ring has room for."""
    PLAN: gl.constexpr = cache.PLAN
    AHEAD: gl.constexpr = PLAN.slots // 2
    STEP: gl.constexpr = stride(PLAN)
    length = cache.length(b)
    blocks = cache.blocks(length)
    if PLAN.in_turn:
        # Where the length is read from memory, it is on its way beside the first page numbers, which do not depend on it.
        first = rank
        n = (blocks - rank + (STEP - 1)) // STEP
    else:
        split = Split(blocks // PLAN.cluster, blocks % PLAN.cluster, gl.to_tensor(PLAN.cluster), gl.to_tensor(1))
        first = split.begin(rank)
        n = split.begin(rank + 1) - first
    if cache.CASE.lengths:
        # A program behind the last block computes one all the same: all its scores are masked, and its sums are zero.
        n = gl.maximum(n, 1)
    start = Cursor(b, head, first, length, length * 0, blocks)
    numbers = ()
    for i in gl.static_range(AHEAD):
        numbers = numbers + (page_numbers(cache, start.behind(i * STEP)),)  # noqa: RUF005
    return start, n, numbers


@gluon.jit
def open_ring(PLAN: gl.constexpr, q_desc, k_desc):
    """The tiles of K and V, a barrier for each of them and one for the queries, and the queries' tile.

    It comes behind a program's first loads, of lengths and page numbers, while these are on their way.
    """
    SLOTS: gl.constexpr = PLAN.slots
    ring = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, 1, 1, PLAN.block_n, PLAN.block_d], k_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS + 1, 1], mbarrier.MBarrierLayout())
    q_tile = gl.allocate_shared_memory(k_desc.dtype, [1, 1, PLAN.heads, PLAN.queries, PLAN.block_d], q_desc.layout)
    for slot in gl.static_range(SLOTS + 1):
        mbarrier.init(full.index(slot), count=1)
    return ring, full, q_tile


@gluon.jit
def attend_together(results, tiles, team, start, n, step, numbers, q_desc, k_desc, v_desc):
    """The program's share of its head, and the merge with the other programs of its team.

    tiles: what `open_ring` returns. start, n: its first block, and how many it has. step: from one to the next. numbers: the pages of
    the blocks that come first.
    """
    PLAN: gl.constexpr = results.cache.PLAN
    SLOTS: gl.constexpr = PLAN.slots
    BLOCK_N: gl.constexpr = PLAN.block_n
    BLOCK_D: gl.constexpr = PLAN.block_d
    BYTES: gl.constexpr = BLOCK_N * BLOCK_D * 2
    cache = results.cache
    kv_head = start.head // results.tiles
    ring, full, q_tile = tiles
    # All expectations before all copies: the compiler puts a barrier between the two, here one for all.
    mbarrier.expect(full.index(SLOTS), q_desc.block_type.nbytes)
    for slot in gl.static_range(SLOTS):
        mbarrier.expect(full.index(slot), BYTES, pred=slot // 2 < n)
    # TMA completes the barriers through the async proxy, and may otherwise find them as they were before.
    fence_async_shared()
    thread_barrier()
    for slot in gl.static_range(SLOTS):
        block = start.behind(slot // 2 * step)
        pages = numbers[slot // 2]
        wanted = slot // 2 < n
        if slot % 2 == 0:
            load_block(k_desc, cache, block, pages, kv_head, ring.index(slot), full.index(slot), wanted, False)
        else:
            load_block(v_desc, cache, block, pages, kv_head, ring.index(slot), full.index(slot), wanted, False)
        if slot == 0:
            load_queries(q_desc, results, start.b, start.head, q_tile, full.index(SLOTS), True, False)

    if PLAN.merge == "cluster":
        barrier = open_inbox(team, PLAN)
    mbarrier.wait(full.index(SLOTS), 0)
    if PLAN.consumers == 0:
        o, m, total = attend_keys(results, start, n, step, q_tile, ring, full, k_desc, v_desc)
    else:
        o, m, total = attend_rows(results, start, n, step, q_tile, ring, full, k_desc, v_desc)
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
        send_part(inbox, barrier, team, o, m, total, PLAN, ROWS)
        wait_for_slices(barrier)
        if PLAN.halvings:
            for k in gl.static_range(PLAN.halvings + 1):
                if PLAN.base <= k:
                    if team.bits == power(PLAN.cluster) - k:
                        add_up(results, inbox, team.rank, start, PLAN.cluster >> k)
        else:
            add_up(results, inbox, team.rank, start, PLAN.cluster)
        leave()
    else:
        store_and_merge(results, team, start, o, m, total)


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
    pages,
    head_dim,
    c,
    PLAN: gl.constexpr,
    CASE: gl.constexpr,
):
    """One program: its share of one head's blocks, and a slice of the head's output. Arguments: `attention_decode`'s."""
    gl.static_assert(not CASE.window)
    heads = kv_heads * tiles
    cache = Cache(lens_ptr, table_ptr, table_stride, batch, heads, sq, sk, window, pages, PLAN, CASE)
    results = Results(out_ptr, parts_ptr, counters_ptr, group, tiles, in_eights(head_dim), c, cache)
    if PLAN.where:
        keep_place(parts_ptr, 0)
    rank = gl.program_id(0) % PLAN.cluster
    kv_head = gl.program_id(0) // PLAN.cluster
    tile = gl.program_id(2)
    if PLAN.halvings:
        number = gl.program_id(1) * (kv_heads >> PLAN.base) + kv_head
        guessed = divide.guess(cache, kv_heads, divide.spread(number) if PLAN.order else number)
        team, head = guessed.team(rank, tiles, tile, PLAN.cluster)
        numbers = divide.first_pages(cache, guessed.b, head, team)
        place, changed = divide.find(cache, kv_heads, number, guessed)
        ring = open_ring(PLAN, q_desc, k_desc)
        if place.b < batch:  # all programs of a cluster agree: none waits for one that has left
            team, head = place.team(rank, tiles, tile, PLAN.cluster)
            if changed:
                numbers = divide.first_pages(cache, place.b, head, team)
            start, n = divide.first_block(cache, place.b, head, team)
            attend_together(results, ring, team, start, n, 1 << team.bits, numbers, q_desc, k_desc, v_desc)
    else:
        start, n, numbers = first_block(cache, gl.program_id(1), kv_head * tiles + tile, rank)
        ring = open_ring(PLAN, q_desc, k_desc)
        team = Team(gl.to_tensor(0), rank, gl.to_tensor(power(PLAN.cluster)))
        attend_together(results, ring, team, start, n, stride(PLAN), numbers, q_desc, k_desc, v_desc)
    if PLAN.where:
        keep_place(parts_ptr, 1)
