"""Step 4: the products of one tile beside the softmax of the next."""

# A tuple is unpacked whole: in a kernel `_` would be a variable like any other, with one type.
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from utils.attention.gluon.backward.pipeline import Sizes, Work, allocate_row_ring
from utils.attention.gluon.backward.step3_warp_specialized import (
    add_dq,
    probabilities,
    producer,
    publish_ds,
    start_dp,
    start_dq,
    start_scores,
    store_rows,
    write_ds,
)
from utils.attention.gluon.shared import accumulator, left_operand, wait_products


@gluon.jit
def consumer(work, dk_desc, dv_desc, W: gl.constexpr):
    """Warpgroup W: 64 keys of the block against all tiles of queries that see them."""
    PLAN: gl.constexpr = work.sizes.PLAN
    CASE: gl.constexpr = work.sizes.CASE
    BLOCK_M: gl.constexpr = PLAN.block_m
    BLOCK_D: gl.constexpr = PLAN.block_d
    dtype: gl.constexpr = dk_desc.dtype
    count, lo, hi = work.first()
    head = work.kv_head * work.sizes.group
    m = lo
    key = work.key + W * 64
    dk = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
    dv = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
    mbarrier.wait(work.loaded.index(0), 0)
    if count > 0:
        mbarrier.wait(work.loaded.index(1), 0)
        # The first tile has no dQ of another beside it.
        s = start_scores(work, 0, W)
        dp = start_dp(work, 0, W)
        s = wait_products(s, 1, BLOCK_M)
        p = probabilities(work, s, 0, key, m * BLOCK_M)
        dp = wait_products(dp, 0, BLOCK_M)
        delta = work.do.row_numbers(0, gl.SliceLayout(0, p.type.layout))
        ds = (p * (dp - delta[None, :])).to(dtype)
        p16 = gl.convert_layout(p.to(dtype), left_operand(BLOCK_D))
        if CASE.dq:
            write_ds(work, 0, ds, W)
        dv = warpgroup_mma(p16, work.do.tile(0), dv, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, left_operand(BLOCK_D)), work.q.tile(0), dk, is_async=True)
        if CASE.dq:
            publish_ds(work, 0)
        dv = wait_products(dv, 1, BLOCK_D)
        work.do.release(0, not CASE.dq)
        dk = wait_products(dk, 0, BLOCK_D)
        work.q.release(0, not CASE.dq)
        for i in range(1, count):
            m_before = m
            head_before = head
            m += 1
            if m == hi:
                m = lo
                head += 1
            s = start_scores(work, i, W)
            dp = start_dp(work, i, W)
            s = wait_products(s, 1, BLOCK_M)
            p = probabilities(work, s, i, key, m * BLOCK_M)
            dp = wait_products(dp, 0, BLOCK_M)
            delta = work.do.row_numbers(i, gl.SliceLayout(0, p.type.layout))
            ds = (p * (dp - delta[None, :])).to(dtype)
            p16 = gl.convert_layout(p.to(dtype), left_operand(BLOCK_D))
            if CASE.dq:
                write_ds(work, i, ds, W)
                dq = start_dq(work, i - 1, W)
            dv = warpgroup_mma(p16, work.do.tile(i), dv, is_async=True)
            dk = warpgroup_mma(gl.convert_layout(ds, left_operand(BLOCK_D)), work.q.tile(i), dk, is_async=True)
            if CASE.dq:
                dq = wait_products(dq, 2, 64)
                # Only now: who sees this dS written takes the dS before it for read.
                publish_ds(work, i)
                add_dq(work, dq, head_before, m_before, W)
            dv = wait_products(dv, 1, BLOCK_D)
            work.do.release(i, not CASE.dq)
            dk = wait_products(dk, 0, BLOCK_D)
            work.q.release(i, not CASE.dq)
        if CASE.dq:
            dq = wait_products(start_dq(work, count - 1, W), 0, 64)
            add_dq(work, dq, head, m, W)
    # V's own rows are not needed any more: they carry dV away, and then dK.
    store_rows(dv_desc, work, work.v.index(W), dv, W)
    store_rows(dk_desc, work, work.v.index(W), dk * work.scale, W)


@gluon.jit(do_not_specialize=["sq", "sk", "window", "heads", "kv_heads", "group", "tiles_m", "blocks_n", "section", "total"])
def attention_backward_step4(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dk_desc,
    dv_desc,
    lse_desc,
    delta_desc,
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
    """A block computes dK and dV of BLOCK_N keys of one head, and adds to dQ: grid (blocks of keys * B * Hkv,).

    Heads are dealt in sections of `section`; within one, the blocks of the first keys, the longest under a causal mask,
    come first.
    """
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    CONSUMERS: gl.constexpr = PLAN.block_n // 64
    DS_SLOTS: gl.constexpr = PLAN.ds_slots
    per_section = section * blocks_n
    number = gl.program_id(0) // per_section
    rest = gl.program_id(0) - number * per_section
    wide = gl.minimum(section, total - number * section)
    n = rest // wide
    flat = number * section + rest - n * wide
    batch = flat // kv_heads

    q = allocate_row_ring(q_desc, lse_desc, PLAN.q_slots, CONSUMERS)
    do = allocate_row_ring(do_desc, delta_desc, PLAN.do_slots, CONSUMERS)
    k = gl.allocate_shared_memory(dtype, [1, 1, PLAN.block_n, PLAN.block_d], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 64, PLAN.block_d], v_desc.layout)
    columns: gl.constexpr = PLAN.block_m // 64
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ds = gl.allocate_shared_memory(dtype, [PLAN.ds_slots * columns, PLAN.block_n, 64], swizzled)
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    written = gl.allocate_shared_memory(gl.int64, [PLAN.ds_slots, 1], barrier)
    mbarrier.init(loaded.index(0), count=1)
    mbarrier.init(loaded.index(1), count=1)
    for i in gl.static_range(DS_SLOTS):
        mbarrier.init(written.index(i), count=CONSUMERS)
    sizes = Sizes(sq, sk, window, heads, kv_heads, group, tiles_m, PLAN, CASE)
    work = Work(
        sizes, n * PLAN.block_n, batch, flat - batch * kv_heads, c, scale, dq_sums_ptr, q, do, k, v, ds, loaded, written
    )
    gl.warp_specialize(
        [
            (consumer, (work, dk_desc, dv_desc, 0)),
            (consumer, (work, dk_desc, dv_desc, 1)),
            (producer, (work, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)),
        ],
        [4, 1],
        [PLAN.registers, 24],
    )
