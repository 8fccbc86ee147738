"""The roles of step 6 beside its consumer: the producer, the warp that adds dQ, and how a consumer gives a slot back.

named barrier    who comes to it
LEFT             the consumer has left a tile's dQ in shared memory, and the storing warp hands it to TMA
8 and 9          with `named`: slots 0 and 1 of Q have been read, and the producer may load into them
10 and 11        the same of dO
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from utils.attention.gluon.backward.pipeline import tma_add
from utils.attention.gluon.shared import meet, pass_by, tma_load

# Triton does not use the named barriers from here on: its own are one for each partition, and two more.
LEFT = gl.constexpr(6)


@gluon.constexpr_function
def draws_early(plan, case):
    """Whether a program draws its next block when it begins one: without a mask, where all blocks take the same time."""
    return plan.queue and not plan.even and not case.causal and not case.window


@gluon.jit
def give_back(work, ring, i, NUMBER: gl.constexpr):
    """Consumer: load number i of a ring has been read; NUMBER: the named barrier of its first slot, with `named`."""
    if work.sizes.PLAN.named:
        if not work.sizes.CASE.dq:
            fence_async_shared()  # as in `RowRing.release`
        # An arrival of each warp, in place of one of each thread at the same word of shared memory.
        pass_by(NUMBER + i % ring.SLOTS, 384 if work.sizes.PLAN.producer_first else 288)
    else:
        ring.release(i, not work.sizes.CASE.dq)


@gluon.jit
def load_rows(work, ring, i, tile_desc, number_desc, head, row, NUMBER: gl.constexpr):
    """Producer: fetch rows of a head, and their numbers, as soon as the slot is empty."""
    heads = work.sizes.heads
    if work.sizes.PLAN.named:
        slot = i % ring.SLOTS
        if i >= ring.SLOTS:
            # Without it TMA would overwrite a tile that a consumer still reads.
            meet(NUMBER + slot, 384 if work.sizes.PLAN.producer_first else 288)
        full = ring.full.index(slot)
        mbarrier.expect(full, tile_desc.block_type.nbytes + number_desc.block_type.nbytes)
        tma_load(tile_desc, [work.batch, head, row, 0], full, ring.tiles.index(slot))
        tma_load(number_desc, [work.batch * heads + head, row], full, ring.numbers.index(slot))
    else:
        ring.load(i, tile_desc, number_desc, work.batch, head, heads, row)


@gluon.jit
def load_block(work, queue, turn, done, after, descriptors):
    """Load a block's K and V once, and Q and dO tile by tile, in the order of need: returns how many tiles.

    turn, done: blocks and tiles of this program before. after: number of its next block, where that is drawn early.
    """
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc = descriptors
    PLAN: gl.constexpr = work.sizes.PLAN
    at, count, lo, hi = work.share()
    if PLAN.queue:
        # Nobody reads the last block's K and V any more.
        mbarrier.wait(queue.freed, (turn & 1) ^ 1)
    # K and V have a barrier each: the first product starts when K is there.
    mbarrier.expect(work.loaded.index(0), k_desc.block_type.nbytes)
    tma_load(k_desc, [work.batch, work.kv_head, work.key, 0], work.loaded.index(0), work.k)
    skipped = at // gl.maximum(hi - lo, 1)
    head = work.kv_head * work.sizes.group + skipped
    m = lo + at - skipped * (hi - lo)
    for i in range(gl.maximum(count, 1)):
        if count > 0:
            load_rows(work, work.q, done + i, q_desc, lse_desc, head, m * PLAN.block_m, 8)
        if i == 0:
            mbarrier.expect(work.loaded.index(1), v_desc.block_type.nbytes)
            tma_load(v_desc, [work.batch, work.kv_head, work.key, 0], work.loaded.index(1), work.v.index(0))
            if draws_early(work.sizes.PLAN, work.sizes.CASE):
                queue.publish(turn, after, 4 if PLAN.producer_first else 1)
        if count > 0:
            load_rows(work, work.do, done + i, do_desc, delta_desc, head, m * PLAN.block_m, 10)
        m += 1
        if m == hi:
            m = lo
            head += 1
    return count


@gluon.jit
def producer(work, queue, descriptors):
    """One warp loads all blocks of this program."""
    WARPS: gl.constexpr = 4 if work.sizes.PLAN.producer_first else 1
    EVEN: gl.constexpr = work.sizes.PLAN.even
    if work.sizes.PLAN.queue:
        number, end = queue.bounds(EVEN)
        n = 0
        base = 0
        turn = 0
        done = 0
        while number < end:
            if EVEN:
                n, base = queue.row(work.sizes, number, n, base)
                here, number = queue.share(work, number, n, base, end)
                done += load_block(here, queue, turn, done, 0, descriptors)
            elif draws_early(work.sizes.PLAN, work.sizes.CASE):
                here = queue.place(work, number)
                number = queue.draw()
                done += load_block(here, queue, turn, done, number, descriptors)
            else:
                done += load_block(queue.place(work, number), queue, turn, done, 0, descriptors)
                # Not before: whoever is free first is to have the next block. The consumer has two tiles left to compute.
                number = queue.draw()
                queue.publish(turn, number, WARPS)
            turn += 1
    else:
        load_block(work, queue, 0, 0, 0, descriptors)


@gluon.jit
def add_block(work, leave, done):
    """Hand dQ of each tile of a block to TMA, which adds it to the sums, and give its place back: returns how many tiles."""
    sums_desc, tiles, empty = leave
    PLAN: gl.constexpr = work.sizes.PLAN
    PIECES: gl.constexpr = PLAN.block_m * PLAN.block_d // 4096
    at, count, lo, hi = work.share()
    skipped = at // gl.maximum(hi - lo, 1)
    head = work.batch * work.sizes.heads + work.kv_head * work.sizes.group + skipped
    m = lo + at - skipped * (hi - lo)
    for _i in range(done, done + count):
        meet(LEFT, 288)
        if PLAN.storer_fences:
            # Stored by threads, read by TMA through the async proxy: a fence on the way from one to the other is enough.
            fence_async_shared()
        for w in gl.static_range(2):
            place = [((head * work.sizes.tiles_m + m) * PIECES + w) * 32, 0]
            tma_add(sums_desc, place, tiles.slice(w * 32, 32, 0))
        tma.store_wait(0)
        mbarrier.arrive(empty, count=1)
        m += 1
        if m == hi:
            m = lo
            head += 1
    return count


@gluon.jit
def storing_warp(work, queue, leave):
    """One warp adds dQ of all blocks of this program."""
    EVEN: gl.constexpr = work.sizes.PLAN.even
    if work.sizes.CASE.dq and work.sizes.PLAN.by_tma:
        if work.sizes.PLAN.queue:
            number, end = queue.bounds(EVEN)
            n = 0
            base = 0
            turn = 0
            done = 0
            while number < end:
                if EVEN:
                    n, base = queue.row(work.sizes, number, n, base)
                    here, number = queue.share(work, number, n, base, end)
                    done += add_block(here, leave, done)
                else:
                    done += add_block(queue.place(work, number), leave, done)
                    number = queue.next(turn, 1)
                turn += 1
        else:
            add_block(work, leave, 0)
