"""Step 3: warp specialization. A producer warp loads, and two consumer warpgroups compute and exchange dS.

A block owns 128 keys, 64 for each consumer, and walks over the tiles of queries that see them. The consumers compute the
scores transposed, with keys along M. So P^T and dS^T are already in the registers of left operands for dV and dK. Only dS
goes through shared memory, because dQ sums over the keys of both consumers. Each consumer computes half of dQ (64 queries, or
64 columns), and its threads add it to the sums in the order of their registers (`fragments.py`).

    part          what                                        head dim 64      128
    tile          queries x keys                              128 x 128        64 x 128
    slots         of Q, of dO, of dS                          2, 2, 2          2, 2, 2
    registers     a consumer thread, a producer thread        240, 24          240, 24
    shared        K + V + Q + dO + dS                         16+16+32+32+64   32+32+32+32+32 KiB

It takes any sizes and masks up to head dimension 128, but no deterministic mode. docs/kernels/backward.md has step 6's figures.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from utils.attention.gluon.backward.fragments import add_fragments
from utils.attention.gluon.backward.pipeline import SIZES, allocate_work, load_part, make_sizes, part_of, rows_of
from utils.attention.gluon.backward.step1_atomics import store_plain
from utils.attention.gluon.shared import accumulator, left_operand, start_scores, wait_products


@gluon.jit
def probabilities(work, s, i, key, row):
    """Return P^T of tile i from its scores: 2^(c s - lse2), and zero where a query may not see a key."""
    lse2 = work.q.row_numbers(i, gl.SliceLayout(0, s.type.layout))
    p = gl.exp2(s * work.c - lse2[None, :])
    if work.sizes.needs_mask(key, 64, row, work.sizes.PLAN.block_m):
        p = work.sizes.mask(p, key, row)
    return p


@gluon.jit
def start_dq(work, exchange, i, W: gl.constexpr):
    """Start this consumer's part of dQ = dS K of tile i on the tensor cores: 64 columns, over all keys of the block."""
    tiles, written = exchange
    slot = i % 2
    # Threads store and wgmma reads through the async proxy: without the fence wgmma may read older data.
    fence_async_shared()
    mbarrier.arrive(written.index(slot), count=1)
    mbarrier.wait(written.index(slot), (i // 2) & 1)  # without it the other consumer's dS would be missing
    k = work.k.reshape([128, 128]).slice(W * 64, 64, 1)
    zero = gl.zeros([64, 64], gl.float32, accumulator(64))
    return warpgroup_mma(tiles.index(slot).permute([1, 0]), k, zero, use_acc=False, is_async=True)


@gluon.jit
def consumer(work, part, exchange, dq_sums, dk_ptr, dv_ptr, HEAD_DIM: gl.constexpr, W: gl.constexpr):
    """Compute dK and dV of 64 keys over all their tiles of queries, in warpgroup W."""
    PLAN: gl.constexpr = work.sizes.PLAN
    BLOCK_M: gl.constexpr = PLAN.block_m
    BLOCK_D: gl.constexpr = PLAN.block_d
    dtype: gl.constexpr = work.k.dtype
    head, m = part.begin(work.sizes)
    key = part.key + W * 64
    dk = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
    dv = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
    mbarrier.wait(work.loaded.index(0), 0)  # K has arrived
    mbarrier.wait(work.loaded.index(1), 0)  # V has arrived
    for i in range(part.count):
        work.q.wait_full(i)
        s = start_scores(rows_of(work.k, W), work.q.tile(i))
        work.do.wait_full(i)
        dp = start_scores(rows_of(work.v, W), work.do.tile(i))
        s = wait_products(s, 1, BLOCK_M)  # S is complete; dP may still run
        p = probabilities(work, s, i, key, m * BLOCK_M)
        p16 = gl.convert_layout(p.to(dtype), left_operand(BLOCK_D))
        dp = wait_products(dp, 0, BLOCK_M)  # dP is complete
        delta = work.do.row_numbers(i, gl.SliceLayout(0, p.type.layout))
        ds = (p * (dp - delta[None, :])).to(dtype)
        # Both consumers have read the slot's last dS, two tiles ago: they have exchanged the dS of the tile in between.
        exchange[0].index(i % 2).slice(W * 64, 64, 0).store(ds)
        dv = warpgroup_mma(p16, work.do.tile(i), dv, is_async=True)
        dq = start_dq(work, exchange, i, W)
        dv = wait_products(dv, 1, BLOCK_D)  # without it TMA would overwrite dO; dQ may still run
        work.do.release(i)
        dk = warpgroup_mma(gl.convert_layout(ds, left_operand(BLOCK_D)), work.q.tile(i), dk, is_async=True)
        dq = wait_products(dq, 1, 64)  # dQ is complete; dK may still run
        tile = (part.batch * work.sizes.heads + head).to(gl.int64) * work.sizes.tiles_m + m
        add_fragments(dq_sums + tile * 8192 + W * 4096, dq)
        dk = wait_products(dk, 0, BLOCK_D)  # without it TMA would overwrite Q
        work.q.release(i)
        head, m = part.next_tile(head, m)
    first = (part.batch * work.sizes.kv_heads + part.kv_head).to(gl.int64) * work.sizes.sk * HEAD_DIM
    store_plain(dv_ptr + first, key, work.sizes.sk, dv, HEAD_DIM)
    store_plain(dk_ptr + first, key, work.sizes.sk, dk * work.scale, HEAD_DIM)


@gluon.jit(do_not_specialize=SIZES)
def attention_backward_step3(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    lse_desc,
    delta_desc,
    dk_ptr,
    dv_ptr,
    dq_sums_ptr,
    sq,
    sk,
    back,
    ahead,
    heads,
    kv_heads,
    scale,
    HEAD_DIM: gl.constexpr,
    PLAN: gl.constexpr,
):
    """Compute dK and dV of 128 keys of one head in each block, and add to dQ: grid (B * Hkv, blocks of keys)."""
    sizes = make_sizes(sq, sk, back, ahead, heads, kv_heads, PLAN)
    descriptors = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    work = allocate_work(sizes, descriptors, scale)
    n = gl.program_id(1)
    part = part_of(sizes, n, gl.program_id(0), n * 0, 1, n * 0 - 1)
    ds_tiles = gl.allocate_shared_memory(q_desc.dtype, [2, 128, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    written = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(written.index(i), count=2)
    exchange = (ds_tiles, written)
    gl.warp_specialize(
        [
            (consumer, (work, part, exchange, dq_sums_ptr, dk_ptr, dv_ptr, HEAD_DIM, 0)),
            (consumer, (work, part, exchange, dq_sums_ptr, dk_ptr, dv_ptr, HEAD_DIM, 1)),
            (load_part, (work, part, 0, descriptors)),
        ],
        [4, 1],
        [240, 24],
    )
