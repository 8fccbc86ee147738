"""Step 2: TMA brings the tiles, mbarriers say when. The loads of the next tile run beside the products of this one.

The same block, tiles and products as in step 1. One thread asks for whole tiles, so no register and no instruction of
the others is spent on addresses, and Q, dO and the statistics of the next tile are on their way while this one is
computed: two slots for each.

    part       what                                            head dim 64, 128    256
    tile       64 queries x 64 keys
    pipeline   slots of Q and dO                                        2          2
    warps      one warpgroup, or two halves of columns                  4          8
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from utils.attention.gluon.backward.arguments import Gradients
from utils.attention.gluon.backward.pipeline import Sizes
from utils.attention.gluon.backward.step1_atomics import add_rows
from utils.attention.gluon.shared import thread_barrier, tma_load, tma_store


@gluon.jit
def load_tile(sizes, i, lo, hi, batch, kv_head, descriptors, tiles, numbers, full):
    """Start to fetch Q, dO, lse and delta of the i-th tile of this block's walk into its slot."""
    q_desc, do_desc, lse_desc, delta_desc = descriptors
    q_tiles, do_tiles = tiles
    lse_numbers, delta_numbers = numbers
    slot = i % sizes.PLAN.q_slots
    turn = i // (hi - lo)
    row = (lo + i - turn * (hi - lo)) * 64
    head = kv_head * sizes.group + turn
    flat = batch * sizes.heads + head
    bar = full.index(slot)
    # The bytes are announced first: copies that arrive unannounced could complete the phase too early.
    mbarrier.expect(bar, 2 * q_desc.block_type.nbytes + 2 * lse_desc.block_type.nbytes)
    tma_load(q_desc, [batch, head, row, 0], bar, q_tiles.index(slot))
    tma_load(do_desc, [batch, head, row, 0], bar, do_tiles.index(slot))
    tma_load(lse_desc, [flat, row], bar, lse_numbers.index(slot))
    tma_load(delta_desc, [flat, row], bar, delta_numbers.index(slot))


# One kernel for all sizes: without this, each multiple of 16 and each 1 would be compiled for itself.
@gluon.jit(do_not_specialize=["sq", "sk", "window", "heads", "kv_heads", "group", "tiles_m", "rows"])
def attention_backward_step2(
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
    rows,
    c,
    scale,
    PLAN: gl.constexpr,
    CASE: gl.constexpr,
):
    """A block computes dK and dV of 64 keys of one head, and adds to dQ: grid (B * Hkv, blocks of keys)."""
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK_D: gl.constexpr = PLAN.block_d
    SLOTS: gl.constexpr = PLAN.q_slots
    dtype: gl.constexpr = q_desc.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 256 // WARPS, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, BLOCK_D * 4 // WARPS, 16])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    queries: gl.constexpr = gl.SliceLayout(0, scores)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    sizes = Sizes(sq, sk, window, heads, kv_heads, group, tiles_m, PLAN, CASE)

    batch = gl.program_id(0) // kv_heads
    kv_head = gl.program_id(0) - batch * kv_heads
    key = gl.program_id(1) * 64
    q_tiles = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, 64, BLOCK_D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, 64, BLOCK_D], q_desc.layout)
    lse_numbers = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, 64], lse_desc.layout)
    delta_numbers = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, 64], lse_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, 1, 64, BLOCK_D], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, 1, 64, BLOCK_D], k_desc.layout)
    p_tile = gl.allocate_shared_memory(dtype, [64, 64], swizzled)
    ds_tile = gl.allocate_shared_memory(dtype, [64, 64], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    loaded = gl.allocate_shared_memory(gl.int64, [1], barrier)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
    mbarrier.init(loaded, count=1)
    # Without the barrier a thread may wait for an mbarrier that is not initialized yet.
    thread_barrier()
    mbarrier.expect(loaded, 2 * k_desc.block_type.nbytes)
    tma_load(k_desc, [batch, kv_head, key, 0], loaded, k_tile)
    tma_load(v_desc, [batch, kv_head, key, 0], loaded, v_tile)

    descriptors = (q_desc, do_desc, lse_desc, delta_desc)
    tiles = (q_tiles, do_tiles)
    numbers = (lse_numbers, delta_numbers)
    lo, hi = sizes.tiles_of(key)
    count = (hi - lo) * group
    dk = gl.zeros([64, BLOCK_D], gl.float32, output)
    dv = gl.zeros([64, BLOCK_D], gl.float32, output)
    k = k_tile.reshape([64, BLOCK_D])
    v = v_tile.reshape([64, BLOCK_D])
    mbarrier.wait(loaded, 0)
    if count > 0:
        load_tile(sizes, 0, lo, hi, batch, kv_head, descriptors, tiles, numbers, full)
    for i in range(count):
        slot = i % SLOTS
        if i + 1 < count:  # the other slot: its last reader was the tile before
            load_tile(sizes, i + 1, lo, hi, batch, kv_head, descriptors, tiles, numbers, full)
        turn = i // (hi - lo)
        row = (lo + i - turn * (hi - lo)) * 64
        q = q_tiles.index(slot).reshape([64, BLOCK_D])
        do = do_tiles.index(slot).reshape([64, BLOCK_D])
        mbarrier.wait(full.index(slot), (i // SLOTS) & 1)
        zero = gl.zeros([64, 64], gl.float32, scores)
        s = warpgroup_mma(k, q.permute([1, 0]), zero, use_acc=False)
        dp = warpgroup_mma(v, do.permute([1, 0]), zero, use_acc=False)
        p = gl.exp2(s * c - lse_numbers.index(slot).reshape([64]).load(queries)[None, :])
        if sizes.needs_mask(key, 64, row):
            p = sizes.mask(p, key, row)
        ds = p * (dp - delta_numbers.index(slot).reshape([64]).load(queries)[None, :])
        p_tile.store(p.to(dtype))
        ds_tile.store(ds.to(dtype))
        # The threads stored through the generic proxy, wgmma reads through the async proxy. The fence also lies
        # between the ordinary loads of the statistics and the next TMA copy into their slot.
        fence_async_shared()
        thread_barrier()
        dv = warpgroup_mma(p_tile, do, dv)
        dk = warpgroup_mma(ds_tile, q, dk)
        dq = warpgroup_mma(ds_tile.permute([1, 0]), k, gl.zeros([64, BLOCK_D], gl.float32, output), use_acc=False)
        flat = (batch * heads + kv_head * group + turn).to(gl.int64) * rows
        add_rows(dq_sums_ptr + flat * BLOCK_D, row, dq, BLOCK_D)
        thread_barrier()  # without it the next copy could overwrite a tile that a slow warp still reads
    # K and V are not needed any more: their tiles carry dK and dV away.
    k.store((dk * scale).to(dtype))
    v.store(dv.to(dtype))
    fence_async_shared()
    thread_barrier()
    tma_store(dk_desc, [batch, kv_head, key, 0], k_tile)
    tma_store(dv_desc, [batch, kv_head, key, 0], v_tile)
    tma.store_wait(0)


def launch(g: Gradients) -> None:
    """Run the kernel on tensors of a GPU."""
    attention_backward_step2[g.grid()](
        *g.descriptors(64), g.dq_sums, *g.sizes(), g.rows, g.c, g.scale, PLAN=g.plan, CASE=g.case(), num_warps=g.warps()
    )
