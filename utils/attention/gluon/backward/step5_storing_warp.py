"""Step 5: a warp of its own hands dQ to TMA, and masked tiles have a loop of their own.

Tiles that the diagonal or a window's edge crosses are walked in loops of their own, so that the loop over all others has
neither mask nor branch. Other changes to step 3 are fields of the plan, so that each can be measured by itself:

    field            what                                                                          default
    by_tma           a consumer leaves its part of dQ in shared memory and goes on; a fourth role, one    128
                     warp, hands it to TMA, which adds it to the sums. In step 4 the consumers wait.
    producer_first   the producer is the default partition, with four warps of which one thread works.    64 causal
                     ptxas gives the default partition less room: at head dimension 64 its consumer has
                     33 spills in the loop of step 3, the other consumer none. Not with by_tma: there are
                     no registers for it
    v_left           V's first 64 columns stay in registers and are a left operand of dP^T there: S^T and dP^T   128
                     need all that shared memory can give
    stagger          without a mask, block n starts at tile n and goes round, so that fewer blocks add to  64 full
                     the same rows of dQ at the same time

The fastest with a mask at head dimensions 64 and 128. Tiles and slots are those of step 3, and head dimension 256 is in
`wide_heads.py`. Places and figures: docs/backward-log.md.
"""

# A tuple is unpacked whole: in a kernel `_` would be a variable like any other, with one type.
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from utils.attention.gluon.backward.arguments import Gradients
from utils.attention.gluon.backward.fragments import to_fragments
from utils.attention.gluon.backward.launch import launch_blocks
from utils.attention.gluon.backward.pipeline import Sizes, block_work, tma_add
from utils.attention.gluon.backward.step3_warp_specialized import (
    add_dq,
    producer,
    publish_ds,
    start_dp,
    start_dq,
    start_product,
    start_scores,
    store_rows,
    wait_dq,
    write_ds,
)
from utils.attention.gluon.shared import accumulator, left_operand, wait_products


@gluon.jit
def hand_over(work, dq, leave, i, W: gl.constexpr):
    """Leave this consumer's part of dQ of tile i, 64 queries x 64 columns, where the storing warp reads it."""
    sums_desc, tiles, full, empty = leave
    mbarrier.wait(empty.index(W), (i & 1) ^ 1)  # TMA may still be reading the last tile's part
    tiles.index(W).store(to_fragments(dq).reshape([32, 128]))
    # Stored by threads, read by TMA through the async proxy: without the fence it may read what was there before.
    fence_async_shared()
    mbarrier.arrive(full.index(W), count=1)


@gluon.jit
def storing_warp(work, leave):
    """One warp: hand both parts of each tile's dQ to TMA, which adds them to the sums, and give their places back."""
    sums_desc, tiles, full, empty = leave
    PLAN: gl.constexpr = work.sizes.PLAN
    PIECES: gl.constexpr = PLAN.block_m * PLAN.block_d // 4096
    if work.sizes.CASE.dq and PLAN.by_tma:
        count, lo, hi = work.first()
        head = work.batch * work.sizes.heads + work.kv_head * work.sizes.group
        start = work.start(lo, hi)
        m = start
        for i in range(count):
            for w in gl.static_range(2):
                mbarrier.wait(full.index(w), i & 1)
                tma_add(sums_desc, [((head * work.sizes.tiles_m + m) * PIECES + w) * 32, 0], tiles.index(w))
            for w in gl.static_range(2):
                tma.store_wait(1 - w)  # the first part has been read before the second
                mbarrier.arrive(empty.index(w), count=1)
            m += 1
            if m == hi:
                m = lo
            if m == start:
                head += 1


@gluon.jit
def start_dp_from_registers(work, v_left, i, W: gl.constexpr):
    """`start_dp` with the first 64 columns of V in registers: one product for them, and one for the others, if any."""
    PLAN: gl.constexpr = work.sizes.PLAN
    work.do.wait_full(i)
    do = work.do.tile(i)
    dp = start_product(v_left, do.slice(0, 64, 1).permute([1, 0]), 64, PLAN.block_m)
    if PLAN.block_d > 64:
        REST: gl.constexpr = PLAN.block_d - 64
        v = work.v_rows(W).slice(64, REST, 1)
        dp = warpgroup_mma(v, do.slice(64, REST, 1).permute([1, 0]), dp, is_async=True)
    return dp


@gluon.jit
def softmax_gradient(work, s, dp, i, key, row, W: gl.constexpr, MASK: gl.constexpr):
    """P^T, as the left operand of dV, and dS^T of tile i, from its two products in flight; MASK: whether it gets a mask."""
    PLAN: gl.constexpr = work.sizes.PLAN
    dtype: gl.constexpr = work.k.dtype
    s = wait_products(s, 2 if PLAN.v_left and PLAN.block_d > 64 else 1, PLAN.block_m)
    lse2 = work.q.row_numbers(i, gl.SliceLayout(0, s.type.layout))
    p = gl.exp2(s * work.c - lse2[None, :])
    if MASK:
        # At 64 the assembly makes ptxas spill in the loop without a mask, too.
        p = work.sizes.mask_product(p, key, row) if PLAN.block_d == 128 else work.sizes.mask(p, key, row)
    p16 = gl.convert_layout(p.to(dtype), left_operand(PLAN.block_d))
    dp = wait_products(dp, 0, PLAN.block_m)
    delta = work.do.row_numbers(i, gl.SliceLayout(0, p.type.layout))
    return p16, (p * (dp - delta[None, :])).to(dtype)


@gluon.jit
def start_gradients(work, state, p16, ds, i, W: gl.constexpr):
    """Hand dV, dQ and dK of tile i to the tensor cores, and wait for dV: returns dK, dV and dQ (or dV again)."""
    CASE: gl.constexpr = work.sizes.CASE
    BLOCK_D: gl.constexpr = work.sizes.PLAN.block_d
    dk, dv = state
    if CASE.dq:
        # The slot's last dS, two tiles ago, has been read: this consumer has since seen the other one's next dS.
        write_ds(work, i, ds, W)
    dv = warpgroup_mma(p16, work.do.tile(i), dv, is_async=True)
    dq = dv
    if CASE.dq:
        publish_ds(work, i)
        dq = start_dq(work, i, W)
        dv = wait_products(dv, 1, BLOCK_D)
        work.do.release(i)
    dk = warpgroup_mma(gl.convert_layout(ds, left_operand(BLOCK_D)), work.q.tile(i), dk, is_async=True)
    if not CASE.dq:
        dv = wait_products(dv, 1, BLOCK_D)
        work.do.release(i, True)
    return dk, dv, dq


@gluon.jit
def finish_tile(work, sums, leave, dk, dq, i, m, head, W: gl.constexpr):
    """Add dQ of tile i, and wait for dK: returns dK."""
    PLAN: gl.constexpr = work.sizes.PLAN
    if work.sizes.CASE.dq:
        dq = wait_dq(work, dq, 1)
        if PLAN.by_tma:
            hand_over(work, dq, leave, i, W)
        else:
            add_dq(work, sums, dq, head, m, W)
    dk = wait_products(dk, 0, PLAN.block_d)
    work.q.release(i, not work.sizes.CASE.dq)
    return dk


@gluon.jit
def walk(work, sums, leave, v_left, state, lo, hi, number, head, W: gl.constexpr, MASK: gl.constexpr):
    """Tiles of queries lo .. hi - 1 of one head: returns the state (dK, dV) behind them.

    v_left: columns of V in registers, or 0. number: of the load of tile 0, if there was one. MASK: whether these tiles get
    a mask.
    """
    PLAN: gl.constexpr = work.sizes.PLAN
    BLOCK_M: gl.constexpr = PLAN.block_m
    key = work.key + W * 64
    dk, dv = state
    for m in range(lo, hi):
        i = number + m
        s = start_scores(work, i, W)
        dp = start_dp_from_registers(work, v_left, i, W) if PLAN.v_left else start_dp(work, i, W)
        p16, ds = softmax_gradient(work, s, dp, i, key, m * BLOCK_M, W, MASK)
        dk, dv, dq = start_gradients(work, (dk, dv), p16, ds, i, W)
        dk = finish_tile(work, sums, leave, dk, dq, i, m, head, W)
    return dk, dv


@gluon.jit
def consumer(work, sums, leave, dk_desc, dv_desc, W: gl.constexpr):
    """Warpgroup W: 64 keys of the block against all tiles of queries that see them."""
    PLAN: gl.constexpr = work.sizes.PLAN
    CASE: gl.constexpr = work.sizes.CASE
    BLOCK_D: gl.constexpr = PLAN.block_d
    count, lo, hi = work.first()
    MASKS: gl.constexpr = CASE.causal or CASE.window or CASE.tail
    dk = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
    dv = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
    mbarrier.wait(work.loaded.index(0), 0)
    if count > 0:
        mbarrier.wait(work.loaded.index(1), 0)
        v_left = 0
        if PLAN.v_left:
            v_left = work.v_rows(W).slice(0, 64, 1).load(left_operand(PLAN.block_m))
        state = (dk, dv)
        first, end = work.sizes.clean_tiles(work.key + W * 64, 64, lo, hi)
        for turn in range(work.sizes.group):
            head = work.kv_head * work.sizes.group + turn
            number = turn * (hi - lo) - lo
            if MASKS:
                state = walk(work, sums, leave, v_left, state, lo, first, number, head, W, True)
                state = walk(work, sums, leave, v_left, state, first, end, number, head, W, False)
                if CASE.window:
                    state = walk(work, sums, leave, v_left, state, end, hi, number, head, W, True)
            elif PLAN.stagger:
                start = work.start(lo, hi)
                state = walk(work, sums, leave, v_left, state, start, hi, number + lo - start, head, W, False)
                state = walk(work, sums, leave, v_left, state, lo, start, number + hi - start, head, W, False)
            else:
                state = walk(work, sums, leave, v_left, state, lo, hi, number, head, W, False)
        dk, dv = state
    # V's own rows are not needed any more: they carry dV away, and then dK.
    store_rows(dv_desc, work, work.v.index(W), dv, W)
    store_rows(dk_desc, work, work.v.index(W), dk * work.scale, W)


@gluon.jit(
    do_not_specialize=["sq", "sk", "window", "heads", "kv_heads", "group", "tiles_m", "blocks_n", "section", "total"]
)
def attention_backward_step5(
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
    work = block_work(sizes, descriptors, blocks_n, section, total, c, scale, 2, 2)
    tiles = work.ds
    full = work.loaded
    empty = work.loaded
    if PLAN.by_tma and CASE.dq:
        tiles = gl.allocate_shared_memory(gl.float32, [2, 32, 128], sums_desc.layout)
        full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for w in gl.static_range(2):
            mbarrier.init(full.index(w), count=1)
            mbarrier.init(empty.index(w), count=1)
    leave = (sums_desc, tiles, full, empty)
    loads = (work, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    REGISTERS: gl.constexpr = PLAN.registers
    if PLAN.producer_first:
        gl.warp_specialize(
            [
                (producer, loads),
                (consumer, (work, dq_sums_ptr, leave, dk_desc, dv_desc, 0)),
                (consumer, (work, dq_sums_ptr, leave, dk_desc, dv_desc, 1)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )
    elif PLAN.by_tma:
        gl.warp_specialize(
            [
                (consumer, (work, dq_sums_ptr, leave, dk_desc, dv_desc, 0)),
                (consumer, (work, dq_sums_ptr, leave, dk_desc, dv_desc, 1)),
                (producer, loads),
                (storing_warp, (work, leave)),
            ],
            [4, 1, 1],
            [REGISTERS, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (work, dq_sums_ptr, leave, dk_desc, dv_desc, 0)),
                (consumer, (work, dq_sums_ptr, leave, dk_desc, dv_desc, 1)),
                (producer, loads),
            ],
            [4, 1],
            [REGISTERS, 24],
        )


def launch(g: Gradients) -> None:
    """Run the kernel on tensors of a GPU."""
    launch_blocks(attention_backward_step5, g, g.sums_descriptor(), g.dq_sums)
