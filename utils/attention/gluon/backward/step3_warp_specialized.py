"""Step 3: warp specialization. A producer warp loads, two consumer warpgroups compute, and dS goes between them.

A block owns 128 keys, 64 for each consumer, and walks over the tiles of queries that see them. The scores are computed
transposed, keys along M, so that P^T and dS^T are left operands of dV and dK in the registers where they were computed;
only dS goes through shared memory, because dQ sums over the keys of both consumers. Each consumer computes half of dQ
(64 queries, or 64 columns) and its threads add it to the sums in the order of their registers (`fragments.py`).

    part          what                                        head dim 64      128
    tile          queries x keys                              128 x 128        64 x 128
    slots         of Q, of dO, of dS                          2, 2, 2          2, 2, 2
    registers     a consumer thread, a producer thread        240, 24          240, 24
    shared        K + V + Q + dO + dS                         16+16+32+32+64   32+32+32+32+32 KiB

Head dimension 256 is in `wide_heads.py`. Places and figures: docs/backward-log.md.
"""

# A tuple is unpacked whole: in a kernel `_` would be a variable like any other, with one type.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from utils.attention.gluon.backward.arguments import Gradients
from utils.attention.gluon.backward.fragments import add_fragments
from utils.attention.gluon.backward.launch import launch_blocks
from utils.attention.gluon.backward.pipeline import Sizes, block_work
from utils.attention.gluon.shared import accumulator, left_operand, tma_load, tma_store, wait_products


@gluon.jit
def producer(work, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc):
    """One warp: load the block's K and V once, and Q and dO tile by tile, in the order of need."""
    PLAN: gl.constexpr = work.sizes.PLAN
    CONSUMERS: gl.constexpr = PLAN.block_n // 64
    heads = work.sizes.heads
    count, lo, hi = work.first()
    # K and V^T have a barrier each: the first product starts when K is there.
    mbarrier.expect(work.loaded.index(0), k_desc.block_type.nbytes)
    tma_load(k_desc, [work.batch, work.kv_head, work.key, 0], work.loaded.index(0), work.k)
    head = work.kv_head * work.sizes.group
    start = work.start(lo, hi)
    m = start
    for i in range(count):
        work.q.load(i, q_desc, lse_desc, work.batch, head, heads, m * PLAN.block_m)
        if i == 0:
            mbarrier.expect(work.loaded.index(1), v_desc.block_type.nbytes * (PLAN.block_n // 64))
            for w in gl.static_range(CONSUMERS):
                at = [work.batch, work.kv_head, work.key + w * 64, 0]
                tma_load(v_desc, at, work.loaded.index(1), work.v.index(w))
        work.do.load(i, do_desc, delta_desc, work.batch, head, heads, m * PLAN.block_m)
        m += 1
        if m == hi:
            m = lo
        if m == start:
            head += 1


@gluon.jit
def start_product(a, b, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Hand a @ b to the tensor cores, from zero: [64, COLUMNS]."""
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def start_scores(work, i, W: gl.constexpr):
    """Hand S^T = K Q^T of tile i to the tensor cores: 64 keys, BLOCK_M queries."""
    work.q.wait_full(i)
    return start_product(work.k_rows(W), work.q.tile(i).permute([1, 0]), 64, work.sizes.PLAN.block_m)


@gluon.jit
def start_dp(work, i, W: gl.constexpr):
    """Hand dP^T = V dO^T of tile i to the tensor cores: 64 keys, BLOCK_M queries."""
    work.do.wait_full(i)
    return start_product(work.v_rows(W), work.do.tile(i).permute([1, 0]), 64, work.sizes.PLAN.block_m)


@gluon.jit
def probabilities(work, s, i, key, row):
    """P^T of tile i from its scores: 2^(c s - lse2), and zero where a query may not look."""
    lse2 = work.q.row_numbers(i, gl.SliceLayout(0, s.type.layout))
    p = gl.exp2(s * work.c - lse2[None, :])
    if work.sizes.CASE.causal or work.sizes.CASE.window or work.sizes.CASE.tail:  # noqa: SIM102 (one is compiled)
        if work.sizes.needs_mask(key, 64, row):
            p = work.sizes.mask(p, key, row)
    return p


@gluon.jit
def write_ds(work, i, ds, W: gl.constexpr):
    """Store this consumer's 64 keys of dS^T, and tell the other one."""
    PLAN: gl.constexpr = work.sizes.PLAN
    slot = i % PLAN.ds_slots
    if PLAN.ds_slots == 1:
        mbarrier.wait(work.read.index(0), (i & 1) ^ 1)  # the other consumer's dQ has read the last dS
    if PLAN.block_m == 64:
        work.ds.index(slot).reshape([PLAN.block_n, 64]).slice(W * 64, 64, 0).store(ds)
    else:
        # Queries in columns of 64, so that each consumer's part of dQ reads one tile.
        gl.static_assert(PLAN.block_m == 128)
        left, right = ds.reshape([64, 2, 64]).permute([0, 2, 1]).split()
        tile: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
        left = gl.convert_layout(left, tile)
        right = gl.convert_layout(right, tile)
        work.ds.index(slot * 2).slice(W * 64, 64, 0).store(left)
        work.ds.index(slot * 2 + 1).slice(W * 64, 64, 0).store(right)


@gluon.jit
def publish_ds(work, i):
    """After `write_ds`: the tensor cores may read it, and the other consumer may know."""
    slot = i % work.sizes.PLAN.ds_slots
    # Stored by threads, read by wgmma through the async proxy: without the fence it may read what was there before.
    fence_async_shared()
    mbarrier.arrive(work.written.index(slot), count=1)


@gluon.jit
def start_dq(work, i, W: gl.constexpr):
    """Hand this consumer's part of dQ = dS K of tile i to the tensor cores: [64, 64], all keys of the block."""
    PLAN: gl.constexpr = work.sizes.PLAN
    slot = i % PLAN.ds_slots
    # The other consumer's keys are in this sum too.
    mbarrier.wait(work.written.index(slot), (i // PLAN.ds_slots) & 1)
    k = work.k.reshape([work.k.shape[2], work.k.shape[3]])
    if PLAN.block_m == 64:
        ds = work.ds.index(slot).reshape([PLAN.block_n, 64])
        return start_product(ds.permute([1, 0]), k.slice(W * 64, 64, 1), 64, 64)
    else:
        return start_product(work.ds.index(slot * 2 + W).permute([1, 0]), k, 64, 64)


@gluon.jit
def wait_dq(work, dq, LEFT: gl.constexpr):
    """Wait for dQ, with LEFT younger products in flight; this consumer has then read dS."""
    dq = wait_products(dq, LEFT, 64)
    if work.sizes.PLAN.ds_slots == 1:
        async_copy.mbarrier_arrive(work.read.index(0), increment_count=False)
    return dq


@gluon.jit
def add_dq(work, dq_sums, dq, head, m, W: gl.constexpr):
    """Add this consumer's part of dQ to the sums: 64 queries (tiles of 128) or 64 columns (tiles of 64)."""
    PLAN: gl.constexpr = work.sizes.PLAN
    tile = (work.batch * work.sizes.heads + head).to(gl.int64) * work.sizes.tiles_m + m
    add_fragments(dq_sums + tile * (PLAN.block_m * PLAN.block_d) + W * 4096, dq)


@gluon.jit
def store_rows_at(desc, batch, head, row, tile, x):
    """Store 64 rows through a tile of shared memory, which is free again afterwards."""
    tile.reshape([64, x.shape[1]]).store(x.to(tile.dtype))
    # Stored by threads, read by TMA through the async proxy: without the fence it may read what was there before.
    fence_async_shared()
    tma_store(desc, [batch, head, row, 0], tile)
    tma.store_wait(0)


@gluon.jit
def store_rows(desc, work, tile, x, W: gl.constexpr):
    """Store this consumer's 64 rows of dK or dV through a tile of shared memory."""
    store_rows_at(desc, work.batch, work.kv_head, work.key + W * 64, tile, x)


@gluon.jit
def consumer(work, dq_sums, dk_desc, dv_desc, W: gl.constexpr):
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
    for i in range(count):
        s = start_scores(work, i, W)
        dp = start_dp(work, i, W)
        s = wait_products(s, 1, BLOCK_M)
        p = probabilities(work, s, i, key, m * BLOCK_M)
        p16 = gl.convert_layout(p.to(dtype), left_operand(BLOCK_D))
        dp = wait_products(dp, 0, BLOCK_M)
        delta = work.do.row_numbers(i, gl.SliceLayout(0, p.type.layout))
        ds = (p * (dp - delta[None, :])).to(dtype)
        if CASE.dq:
            # The slot's last dS, two tiles ago, has been read: this consumer has since seen the other one's next dS.
            write_ds(work, i, ds, W)
        dv = warpgroup_mma(p16, work.do.tile(i), dv, is_async=True)
        if CASE.dq:
            publish_ds(work, i)
            dq = start_dq(work, i, W)
            dv = wait_products(dv, 1, BLOCK_D)
            work.do.release(i, not CASE.dq)
            dk = warpgroup_mma(gl.convert_layout(ds, left_operand(BLOCK_D)), work.q.tile(i), dk, is_async=True)
            dq = wait_dq(work, dq, 1)
            add_dq(work, dq_sums, dq, head, m, W)
        else:
            dk = warpgroup_mma(gl.convert_layout(ds, left_operand(BLOCK_D)), work.q.tile(i), dk, is_async=True)
            dv = wait_products(dv, 1, BLOCK_D)
            work.do.release(i, not CASE.dq)
        dk = wait_products(dk, 0, BLOCK_D)
        work.q.release(i, not CASE.dq)
        m += 1
        if m == hi:
            m = lo
            head += 1
    # V's own rows are not needed any more: they carry dV away, and then dK.
    store_rows(dv_desc, work, work.v.index(W), dv, W)
    store_rows(dk_desc, work, work.v.index(W), dk * work.scale, W)


@gluon.jit(
    do_not_specialize=["sq", "sk", "window", "heads", "kv_heads", "group", "tiles_m", "blocks_n", "section", "total"]
)
def attention_backward_step3(
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
    """A block computes dK and dV of BLOCK_N keys of one head, and adds to dQ: grid (blocks of keys * B * Hkv,)."""
    sizes = Sizes(sq, sk, window, heads, kv_heads, group, tiles_m, PLAN, CASE)
    tiles = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    work = block_work(sizes, tiles, blocks_n, section, total, c, scale, 2, 2)
    gl.warp_specialize(
        [
            (consumer, (work, dq_sums_ptr, dk_desc, dv_desc, 0)),
            (consumer, (work, dq_sums_ptr, dk_desc, dv_desc, 1)),
            (producer, (work, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)),
        ],
        [4, 1],
        [PLAN.registers, 24],
    )


def launch(g: Gradients) -> None:
    """Run the kernel on tensors of a GPU."""
    launch_blocks(attention_backward_step3, g, g.dq_sums)
