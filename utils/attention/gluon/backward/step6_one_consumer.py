"""Step 6: both warpgroups are one consumer of eight warps, and an SM takes block after block.

In steps 3 to 5 each warpgroup is a role, which the compiler compiles for itself: twice the instructions, registers for each
tile's addresses, and an mbarrier for each exchange of dS. Here both are one role. Its tiles have 128 keys, 64 rows in the
registers of each warpgroup as before, and dS is exchanged at one barrier of 256 threads. Each warpgroup computes half of dQ:
64 queries (tiles of 128) or 64 columns (tiles of 64), which a warp of its own hands to TMA. The loop over tiles has no
spills and no moves of addresses between registers (docs/backward-log.md, entry 35).

    field         what                                                                       default
    queue         as many programs as SMs draw blocks from a counter (`queue.py`)            all
    split         blocks of the last round over the GPU are split (`split.py`)               without a mask
    even          programs have equal shares of all tiles (`queue.py`)                       few blocks (`balance.py`)
    v_left        V's first 64 columns are a left operand in registers                       128
    by_tma        the storing warp adds dQ; else the threads do                              all
    named         a slot is given back by one arrival of each warp at a named barrier        64
    storer_fences the storing warp fences before it hands dQ to TMA, and the consumer not    64, 128 causal
    by_polynomial of eight exponentials, so many are polynomials (`exponentials.py`)         all: 2
    divided       half of the exponentials stand in front of the wait for dP^T               64 causal

The fastest at head dimensions 64 and 128; windows and the
deterministic mode take step 5, because they are not measured. Tiles and slots are those of step 3. The other
roles are in `step6_roles.py`, and head dimension 256 is in `wide_heads.py`. Places and figures: docs/backward-log.md.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from utils.attention.gluon.backward.arguments import Gradients, processors
from utils.attention.gluon.backward.launch import launch_blocks
from utils.attention.gluon.backward.pipeline import Sizes, block_work
from utils.attention.gluon.backward.queue import make_queue
from utils.attention.gluon.backward.split import finish_parts, store_part
from utils.attention.gluon.backward.step6_products import (
    keys_layout,
    keys_operand,
    leave_dq,
    start_dp,
    start_dq,
    start_scores,
    to_pieces,
)
from utils.attention.gluon.backward.step6_roles import give_back, producer, storing_warp
from utils.attention.gluon.exponentials import exp2
from utils.attention.gluon.shared import divide_code, tma_store, wait_products


@gluon.jit
def walk(work, sums, leave, v_left, state, lo, hi, number, head, MASK: gl.constexpr):
    """Tiles of queries lo .. hi - 1 of one head: returns the state (dK, dV) behind them.

    number: of the load of tile 0, if there was one. MASK: whether these tiles get a mask.
    """
    PLAN: gl.constexpr = work.sizes.PLAN
    CASE: gl.constexpr = work.sizes.CASE
    BLOCK_M: gl.constexpr = PLAN.block_m
    BLOCK_D: gl.constexpr = PLAN.block_d
    dtype: gl.constexpr = work.k.dtype
    dk, dv = state
    for m in range(lo, hi):
        i = number + m
        work.q.wait_full(i)
        s = start_scores(work, work.q.tile(i))
        work.do.wait_full(i)
        dp = start_dp(work, v_left, work.do.tile(i))
        s = wait_products(s, 2 if PLAN.v_left and BLOCK_D > 64 else 1, BLOCK_M)
        lse2 = work.q.row_numbers(i, gl.SliceLayout(0, s.type.layout))
        p = exp2(s * work.c - lse2[None, :], PLAN.by_polynomial)
        if PLAN.divided:
            # ptxas would move the wait for dP^T in front of the exponentials, which can run beside that product.
            divide_code(i)
        if MASK:
            p = work.sizes.mask_product(p, work.key, m * BLOCK_M)
        p16 = gl.convert_layout(p.to(dtype), keys_operand(BLOCK_D))
        dp = wait_products(dp, 0, BLOCK_M)
        delta = work.do.row_numbers(i, gl.SliceLayout(0, p.type.layout))
        ds = (p * (dp - delta[None, :])).to(dtype)
        if CASE.dq:
            # The slot's last dS, two tiles ago, has been read: all threads have since come to the last tile's barrier.
            work.ds.index(i % PLAN.ds_slots).store(ds)
        dv = warpgroup_mma(p16, work.do.tile(i), dv, is_async=True)
        if CASE.dq:
            dq = start_dq(work, i)
            dv = wait_products(dv, 1, BLOCK_D)
            give_back(work, work.do, i, 10)
            dk = warpgroup_mma(gl.convert_layout(ds, keys_operand(BLOCK_D)), work.q.tile(i), dk, is_async=True)
            dq = wait_products(dq, 1, 64)
            if PLAN.by_tma:
                leave_dq(leave, dq, i, PLAN.storer_fences)
            else:
                flat = to_pieces(dq)
                tile = (work.batch * work.sizes.heads + head).to(gl.int64) * work.sizes.tiles_m + m
                gl.atomic_add(sums + tile * 8192 + gl.arange(0, 8192, flat.type.layout), flat, sem="relaxed")
        else:
            dk = warpgroup_mma(gl.convert_layout(ds, keys_operand(BLOCK_D)), work.q.tile(i), dk, is_async=True)
            dv = wait_products(dv, 1, BLOCK_D)
            give_back(work, work.do, i, 10)
        dk = wait_products(dk, 0, BLOCK_D)
        give_back(work, work.q, i, 8)
    return dk, dv


@gluon.jit
def store_keys(work, dk_desc, dv_desc, dk, dv):
    """Store 128 rows of dV and dK through the places of dS, which nobody uses between two blocks."""
    PLAN: gl.constexpr = work.sizes.PLAN
    D: gl.constexpr = PLAN.block_d
    dtype: gl.constexpr = work.k.dtype
    COUNT: gl.constexpr = PLAN.ds_slots * PLAN.block_m // D
    at = [work.batch, work.kv_head, work.key, 0]
    places = work.ds.reinterpret(dtype, [COUNT, 1, 1, 128, D], dv_desc.layout)
    dv_tile = places.index(0)
    dk_tile = places.index(COUNT - 1)
    if COUNT == 1 and not PLAN.queue:
        dk_tile = work.v.index(0)  # not needed any more
    dv_tile.reshape([128, D]).store(dv.to(dtype))
    if COUNT == 1 and PLAN.queue:
        # One place for both, because V's is for the next block. The fence: stored by threads, read by TMA.
        fence_async_shared()
        tma_store(dv_desc, at, dv_tile)
        tma.store_wait(0)
        dk_tile.reshape([128, D]).store((dk * work.scale).to(dtype))
        fence_async_shared()
    else:
        dk_tile.reshape([128, D]).store((dk * work.scale).to(dtype))
        # Stored by threads, read by TMA through the async proxy: without the fence it may read what was there before.
        fence_async_shared()
        tma_store(dv_desc, at, dv_tile)
    tma_store(dk_desc, at, dk_tile)
    tma.store_wait(0)


@gluon.jit
def compute_block(work, sums, leave, turn, done):
    """128 keys against all tiles of queries that see them: returns dK, dV, and how many tiles."""
    PLAN: gl.constexpr = work.sizes.PLAN
    CASE: gl.constexpr = work.sizes.CASE
    MASKS: gl.constexpr = CASE.causal or CASE.window or CASE.tail
    BLOCK_D: gl.constexpr = PLAN.block_d
    at = 0
    if PLAN.even:
        at, count, lo, hi = work.share()
    else:
        count, lo, hi = work.first()
    tiles = hi - lo
    dk = gl.zeros([128, BLOCK_D], gl.float32, keys_layout(BLOCK_D))
    dv = gl.zeros([128, BLOCK_D], gl.float32, keys_layout(BLOCK_D))
    mbarrier.wait(work.loaded.index(0), turn & 1)
    mbarrier.wait(work.loaded.index(1), turn & 1)
    v_left = 0
    if PLAN.v_left:
        v_left = work.v.index(0).reshape([128, BLOCK_D]).slice(0, 64, 1).load(keys_operand(PLAN.block_m))
    state = (dk, dv)
    begin = 0
    behind = work.sizes.group
    if PLAN.even:
        # Heads of which this part has a tile; it may begin and end inside of one.
        begin = at // gl.maximum(tiles, 1)
        behind = begin + gl.cdiv(at - begin * tiles + count, gl.maximum(tiles, 1))
    first, end = work.sizes.clean_tiles(work.key, 128, lo, hi)
    for g in range(begin, behind):
        head = work.kv_head * work.sizes.group + g
        number = done + g * tiles - at - lo
        low = lo
        high = hi
        if PLAN.even:
            low = lo + gl.maximum(at - g * tiles, 0)
            high = lo + gl.minimum(at + count - g * tiles, tiles)
            first, end = work.sizes.clean_tiles(work.key, 128, low, high)
        if MASKS:
            state = walk(work, sums, leave, v_left, state, low, first, number, head, True)
            state = walk(work, sums, leave, v_left, state, first, end, number, head, False)
            if CASE.window:
                state = walk(work, sums, leave, v_left, state, end, high, number, head, True)
        else:
            state = walk(work, sums, leave, v_left, state, low, high, number, head, False)
    dk, dv = state
    return dk, dv, count


@gluon.jit
def leave_block(work, parts_ptr, dk_desc, dv_desc, dk, dv):
    """Store dV and dK of a block, or of a part of one."""
    PLAN: gl.constexpr = work.sizes.PLAN
    if (PLAN.split and work.parts > 1) or (PLAN.even and work.late >= 0):
        store_part(parts_ptr, work, dv, 0)
        store_part(parts_ptr, work, dk, 1)
    else:
        store_keys(work, dk_desc, dv_desc, dk, dv)


@gluon.jit
def consumer(work, queue, sums, leave, parts_ptr, dk_desc, dv_desc):
    """Both warpgroups: all blocks of this program."""
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
            else:
                here = queue.place(work, number)
            dk, dv, count = compute_block(here, sums, leave, turn, done)
            done += count
            if work.sizes.PLAN.v_left:
                # V was read by ordinary loads, and TMA writes the next one: a block without tiles has had no fence since.
                fence_async_shared()
            mbarrier.arrive(queue.freed, count=1)
            if not EVEN:
                number = queue.next(turn, 8)
            leave_block(here, parts_ptr, dk_desc, dv_desc, dk, dv)
            turn += 1
    else:
        dk, dv, count = compute_block(work, sums, leave, 0, 0)
        leave_block(work, parts_ptr, dk_desc, dv_desc, dk, dv)


@gluon.jit(
    do_not_specialize=[
        "sq",
        "sk",
        "window",
        "heads",
        "kv_heads",
        "group",
        "tiles_m",
        "blocks_n",
        "section",
        "total",
        "whole",
        "parts",
        "end",
    ]
)
def attention_backward_step6(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dk_desc,
    dv_desc,
    lse_desc,
    delta_desc,
    sums_desc,
    dq_sums_ptr,
    parts_ptr,
    counter_ptr,
    end,
    whole,
    parts,
    sq,
    sk,
    window,
    heads,
    kv_heads,
    group,
    tiles_m,
    blocks_n,
    section,
    total,
    c,
    scale,
    PLAN: gl.constexpr,
    CASE: gl.constexpr,
):
    """A block computes dK and dV of BLOCK_N keys of one head, and adds to dQ: grid (blocks of keys * B * Hkv,)."""
    sizes = Sizes(sq, sk, window, heads, kv_heads, group, tiles_m, PLAN, CASE)
    descriptors = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    work = block_work(sizes, descriptors, blocks_n, section, total, c, scale, 2, 1, 128, whole, parts)
    tiles = work.ds
    empty = work.loaded
    if PLAN.by_tma and CASE.dq:
        tiles = gl.allocate_shared_memory(gl.float32, [64, 128], sums_desc.layout)
        empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(empty, count=1)
    leave = (sums_desc, tiles, empty)
    queue = 0
    if PLAN.queue:
        READERS: gl.constexpr = 2 if PLAN.by_tma and CASE.dq else 1
        queue = make_queue(counter_ptr, end, blocks_n, section, total, whole, parts, READERS, PLAN.even)
    loads = (work, queue, descriptors)
    REGISTERS: gl.constexpr = PLAN.registers
    if PLAN.producer_first:
        gl.warp_specialize(
            [(producer, loads), (consumer, (work, queue, dq_sums_ptr, leave, parts_ptr, dk_desc, dv_desc))],
            [8],
            [REGISTERS],
        )
    elif PLAN.by_tma:
        gl.warp_specialize(
            [
                (consumer, (work, queue, dq_sums_ptr, leave, parts_ptr, dk_desc, dv_desc)),
                (producer, loads),
                (storing_warp, (work, queue, leave)),
            ],
            [1, 1],
            [24, 24],
        )
    else:
        gl.warp_specialize(
            [(consumer, (work, queue, dq_sums_ptr, leave, parts_ptr, dk_desc, dv_desc)), (producer, loads)], [1], [24]
        )


def launch(g: Gradients) -> None:
    """Run the kernel on tensors of a GPU, and add up the parts of split blocks."""
    order, even = g.order, g.plan.even
    split = order.blocks - order.whole
    slots = 2 * order.even if even else split * order.parts
    end = order.units if even else order.programs
    programs = min(order.programs, processors(g.q.device)) if g.plan.queue else order.programs
    parts_of = g.lse2.new_empty(slots * 4 * 64 * g.plan.block_d) if slots else g.delta
    launch_blocks(
        attention_backward_step6,
        g,
        g.sums_descriptor(),
        g.dq_sums,
        parts_of,
        g.counter,
        end,
        order.whole,
        order.parts,
        programs=programs,
        num_warps=4 if g.plan.producer_first else 8,
        keys=128,
    )
    if slots:
        finish_parts[((order.blocks if even else split) * 2, 2, g.plan.block_d // 32)](
            parts_of,
            g.dv,
            g.dk,
            *g.dk.stride()[:3],
            order.parts,
            order.whole,
            programs,
            end,
            *g.sizes(),
            g.blocks_n,
            order.section,
            g.kv_heads_total,
            g.scale,
            HEAD_DIM=g.head_dim,
            PLAN=g.plan,
            CASE=g.case(),
            num_warps=4,
        )
