"""Step 4: dQ of a tile beside the next tile's dV and dK, and TMA adds it.

In step 3 a consumer waits for the other one's part of dS, and then for its own additions to leave the SM, at about 32
bytes a cycle. Here dQ of a tile is computed a tile late, when the other consumer has long written its dS, and TMA adds it
to the sums from a buffer of shared memory, so that no thread waits for an addition. Both barriers, the fence and the
traffic of the buffer cost as much as they save: as fast as step 3 at head dim 128, slower at 64.

Tiles, slots and registers are those of step 3. Head dimension 256 is in `wide_heads.py`. Places and figures:
docs/backward-log.md.
"""

# A tuple is unpacked whole: in a kernel `_` would be a variable like any other, with one type.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from utils.attention.gluon.backward.arguments import Gradients
from utils.attention.gluon.backward.fragments import to_fragments
from utils.attention.gluon.backward.launch import launch_blocks
from utils.attention.gluon.backward.pipeline import Sizes, block_work, tma_add
from utils.attention.gluon.backward.step3_warp_specialized import (
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
def softmax_gradient(work, s, dp, i, key, row):
    """P^T and dS^T of tile i from products in flight: P^T as the left operand of dV, and dS^T."""
    PLAN: gl.constexpr = work.sizes.PLAN
    dtype: gl.constexpr = work.k.dtype
    s = wait_products(s, 1, PLAN.block_m)
    p = probabilities(work, s, i, key, row)
    dp = wait_products(dp, 0, PLAN.block_m)
    delta = work.do.row_numbers(i, gl.SliceLayout(0, p.type.layout))
    ds = (p * (dp - delta[None, :])).to(dtype)
    return gl.convert_layout(p.to(dtype), left_operand(PLAN.block_d)), ds


@gluon.jit
def stage_dq(tile, dq):
    """Put this consumer's part of dQ, 64 queries x 64 columns, where TMA reads it."""
    tma.store_wait(0)  # TMA may still be reading the last tile's part
    tile.store(to_fragments(dq).reshape([32, 128]))


@gluon.jit
def send_dq(sums_desc, work, tile, head, m, W: gl.constexpr):
    """Hand the staged part of dQ to TMA, which adds it to the sums."""
    PLAN: gl.constexpr = work.sizes.PLAN
    PIECES: gl.constexpr = PLAN.block_m * PLAN.block_d // 4096
    piece = ((work.batch * work.sizes.heads + head) * work.sizes.tiles_m + m) * PIECES + W
    tma_add(sums_desc, [piece * 32, 0], tile)


@gluon.jit
def consumer(work, sums_desc, dq_tiles, dk_desc, dv_desc, W: gl.constexpr):
    """Warpgroup W: 64 keys of the block against all tiles of queries that see them."""
    PLAN: gl.constexpr = work.sizes.PLAN
    CASE: gl.constexpr = work.sizes.CASE
    BLOCK_M: gl.constexpr = PLAN.block_m
    BLOCK_D: gl.constexpr = PLAN.block_d
    count, lo, hi = work.first()
    head = work.kv_head * work.sizes.group
    m = lo
    key = work.key + W * 64
    dq_tile = dq_tiles.index(W)
    dk = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
    dv = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
    mbarrier.wait(work.loaded.index(0), 0)
    if count > 0:
        mbarrier.wait(work.loaded.index(1), 0)
        # The first tile has no dQ of another beside it.
        s = start_scores(work, 0, W)
        dp = start_dp(work, 0, W)
        p16, ds = softmax_gradient(work, s, dp, 0, key, m * BLOCK_M)
        dv = warpgroup_mma(p16, work.do.tile(0), dv, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, left_operand(BLOCK_D)), work.q.tile(0), dk, is_async=True)
        if CASE.dq:
            write_ds(work, 0, ds, W)
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
            p16, ds = softmax_gradient(work, s, dp, i, key, m * BLOCK_M)
            if CASE.dq:
                # dQ of the tile before: the other consumer has had a whole tile's time to write its part of dS.
                dq = start_dq(work, i - 1, W)
            dv = warpgroup_mma(p16, work.do.tile(i), dv, is_async=True)
            dk = warpgroup_mma(gl.convert_layout(ds, left_operand(BLOCK_D)), work.q.tile(i), dk, is_async=True)
            if CASE.dq:
                # The slot holds the dS of two tiles ago. The other consumer has read it: it wrote the last dS after that.
                write_ds(work, i, ds, W)
                dq = wait_products(dq, 2, 64)
                stage_dq(dq_tile, dq)
                # Only now: who sees this dS written takes the dS before it for read. Its fence is for dQ too.
                publish_ds(work, i)
                send_dq(sums_desc, work, dq_tile, head_before, m_before, W)
            dv = wait_products(dv, 1, BLOCK_D)
            work.do.release(i, not CASE.dq)
            dk = wait_products(dk, 0, BLOCK_D)
            work.q.release(i, not CASE.dq)
        if CASE.dq:
            stage_dq(dq_tile, wait_products(start_dq(work, count - 1, W), 0, 64))
            # Stored by threads, read by TMA through the async proxy: without the fence it may read what was there before.
            fence_async_shared()
            send_dq(sums_desc, work, dq_tile, head, m, W)
    # V's own rows are not needed any more: they carry dV away, and then dK.
    store_rows(dv_desc, work, work.v.index(W), dv, W)
    store_rows(dk_desc, work, work.v.index(W), dk * work.scale, W)


@gluon.jit(
    do_not_specialize=["sq", "sk", "window", "heads", "kv_heads", "group", "tiles_m", "blocks_n", "section", "total"]
)
def attention_backward_step4(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dk_desc,
    dv_desc,
    lse_desc,
    delta_desc,
    sums_desc,
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
    tiles = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    work = block_work(sizes, tiles, blocks_n, section, total, c, scale, 2, 2)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 32, 128], sums_desc.layout)
    gl.warp_specialize(
        [
            (consumer, (work, sums_desc, dq_tiles, dk_desc, dv_desc, 0)),
            (consumer, (work, sums_desc, dq_tiles, dk_desc, dv_desc, 1)),
            (producer, (work, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)),
        ],
        [4, 1],
        [PLAN.registers, 24],
    )


def launch(g: Gradients) -> None:
    """Run the kernel on tensors of a GPU."""
    launch_blocks(attention_backward_step4, g, g.sums_descriptor())
