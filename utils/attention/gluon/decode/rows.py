"""The decode kernel for many query rows: query rows are the rows of the products, and one warp only loads.

With more than 16 query rows (heads of a group times new tokens) the kernel of `keys.py` is limited by its chain of
instructions, not by bytes: all its warps meet six times a block, and P goes through shared memory. Here each warp has 16
query rows, as in step 5 of the ladder. Scores, maxima, P and output stay in its registers. The next block's scores are
queued before this block's P V, and half of the softmax runs beside that product. Blocks, parts and the merge are the same as
in `keys.py`.

    part         what                                            head dim 64      128              256
    consumer     warpgroups x 64 query rows, one role            1                1 or 2           1 or 2
    block        keys                                            128              128, or 64       64
    rings        slots of K and V                                2+2              2+2              2+2
    queries      two tiles of Q; one of 128 rows of 256 numbers
    producer     one warp: TMA copies of Q, K and V
    programs     one an SM; two at 64, and at 128 with blocks of 64, for many heads and small pages

Measured: 16 tokens, 8192 keys, 16 x 64/8 heads, 0.95 of the best library's speed (H200; docs/kernels/decode.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from utils.attention.gluon.decode.blocks import clear_blocks, load_block, load_queries, page_numbers
from utils.attention.gluon.decode.steps import Block, Share, clean_tile, first_block, row_sums, start_output, step
from utils.attention.gluon.pipeline import allocate_ring
from utils.attention.gluon.shared import accumulator, wait_products


@gluon.jit
def load_tile(ring, i, descriptor, cache, cursor, numbers):
    """Producer: fetch a block of K or V into the slot of load number i when the slot is empty."""
    ring.wait_empty(i)
    slot = ring.slot(i)
    load_block(descriptor, cache, cursor, numbers, ring.tiles.index(slot), ring.full.index(slot), True)


@gluon.jit
def producer(share, q_desc, k_desc, v_desc):
    """Keep the rings of Q, K and V full across heads, with one warp."""
    cache = share.results.cache
    cursor = share.start
    piece = gl.to_tensor(0)
    numbers = page_numbers(cache, cursor)
    for i in range(share.count):
        if (cursor.j == 0) | (i == 0):
            share.q.wait_empty(piece)  # without it TMA would overwrite queries that the consumer still multiplies
            slot = share.q.slot(piece)
            load_queries(q_desc, cache, cursor, share.q.tiles.index(slot), share.q.full.index(slot), True)
            piece += 1
        load_tile(share.k, i, k_desc, cache, cursor, numbers)
        load_tile(share.v, i, v_desc, cache, cursor, numbers)
        cursor = cache.advance(cursor)
        numbers = page_numbers(cache, cursor)


@gluon.jit
def consumer(share):
    """Attend with the query rows of each head to all blocks of this program, in all other warps."""
    results = share.results
    cache = results.cache
    PLAN: gl.constexpr = share.PLAN
    ROWS: gl.constexpr = PLAN.columns
    BLOCK_D: gl.constexpr = PLAN.block_d
    cursor = share.start
    it = gl.to_tensor(0)
    piece = gl.to_tensor(0)
    while it < share.count:
        n = gl.minimum(cursor.blocks - cursor.j, share.count - it)
        share.q.wait_full(piece)  # the first product reads Q
        q = share.q.tile(piece)
        p, state = first_block(share, Block(it, cursor, cursor.j), q)
        o = gl.zeros([ROWS, BLOCK_D], gl.float32, accumulator(BLOCK_D, ROWS))
        it += 1
        share.k.wait_full(it, pred=n > 1)  # the keys of the first step; each step waits for the keys of the next step
        # A loop without a mask makes long heads 1.05 times as fast.
        clear = gl.maximum(gl.minimum(n, clear_blocks(cache, cursor)), 1)
        for k in range(1, clear):
            o, p, state = step(share, Block(it, cursor, cursor.j + k), q, o, p, state, k + 1 < n, False)
            it += 1
        for k in range(clear, n):
            o, p, state = step(share, Block(it, cursor, cursor.j + k), q, o, p, state, k + 1 < n, True)
            it += 1
        share.q.release(piece)

        j = cursor.j + n - 1
        if (cursor.first + j + 1) * PLAN.block_n > cursor.length:
            clean_tile(share, Block(it - 1, cursor, j))
        pv = start_output(share, it, o, p, state)
        sums = row_sums(state)
        o = wait_products(pv, 0, BLOCK_D)  # without it the store would read unfinished sums, and TMA would overwrite V
        share.v.release(it - 1)
        results.store(cursor, n, o, sums, 0)
        piece += 1
        cursor = cache.advance(cursor.last_block())


@gluon.jit
def attend_rows(results, q_desc, k_desc, v_desc, scales_ptr):
    """Attend to a program's share of the blocks of all heads: allocate rings and barriers, and start the roles."""
    PLAN: gl.constexpr = results.cache.PLAN
    start, count = results.cache.start()
    if count > 0:
        q = allocate_ring(q_desc, PLAN.q_slots, 1, PLAN.consumers)
        k = allocate_ring(k_desc, PLAN.slots // 2, 1, PLAN.consumers, PLAN.block_n)
        v = allocate_ring(v_desc, PLAN.slots // 2, 1, PLAN.consumers, PLAN.block_n)
        # TMA completes the barriers through the async proxy: without the fence it may find them not initialized.
        fence_async_shared()
        share = Share(results, start, count, q, k, v, PLAN)
        # The first role has the launch's warps and the rest of the registers. The producer, which looks up pages, needs 40
        # registers; with 24 ptxas spills.
        gl.warp_specialize([(consumer, (share,)), (producer, (share, q_desc, k_desc, v_desc))], [1], [40])
