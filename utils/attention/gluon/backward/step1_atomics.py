"""Step 1: the algorithm alone, with plain products and atomics.

A block owns 64 keys and walks over the tiles of 64 queries that see them. Each tile of Q and dO comes from global memory
through registers into shared memory. The block computes P again from the scores and the statistics of the rows, and dS from P
and dP; both go through shared memory to become operands. dV and dK stay in registers. dQ belongs to the queries, so every
block adds its part to a sum in memory (`fragments.py`). Loads, products and exponentials wait for each other.

    S^T  = K Q^T          P^T  = 2^(c S^T - lse2)        dV += P^T dO
    dP^T = V dO^T         dS^T = P^T (dP^T - delta)      dK += dS^T Q        dQ += dS K   (atomic)

    tile       64 queries x 64 keys, head dimensions up to 128; tensors are contiguous; no pipeline
    measured   not by itself: docs/kernels/backward.md has the figures of step 6
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from utils.attention.gluon.backward.fragments import add_fragments
from utils.attention.gluon.backward.pipeline import LOG2_E, SIZES, make_sizes
from utils.attention.gluon.shared import accumulator, thread_barrier
from utils.attention.gluon.step1_synchronous import load_rows


@gluon.jit
def store_plain(base, first, rows, x, HEAD_DIM: gl.constexpr):
    """Store an accumulator [64, D] as rows first .. first + 63 of a matrix with `rows` rows."""
    layout: gl.constexpr = x.type.layout
    r = first + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    d = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
    gl.store(base + r * HEAD_DIM + d, x.to(base.dtype.element_ty), mask=(r < rows) & (d < HEAD_DIM))


@gluon.jit(do_not_specialize=SIZES)
def attention_backward_step1(
    q_ptr,
    do_ptr,
    k_ptr,
    v_ptr,
    lse2_ptr,
    delta_ptr,
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
    """Compute dK and dV of 64 keys of one head in each block, and add to dQ: grid (B * Hkv, blocks of keys)."""
    BLOCK_D: gl.constexpr = PLAN.block_d
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    output: gl.constexpr = accumulator(BLOCK_D)
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    queries: gl.constexpr = gl.SliceLayout(0, accumulator(64))
    sizes = make_sizes(sq, sk, back, ahead, heads, kv_heads, PLAN)

    batch = gl.program_id(0) // kv_heads
    kv_head = gl.program_id(0) - batch * kv_heads
    key = gl.program_id(1) * 64
    first_key = gl.program_id(0).to(gl.int64) * sk * HEAD_DIM
    q_tile = gl.allocate_shared_memory(dtype, [64, BLOCK_D], swizzled)
    do_tile = gl.allocate_shared_memory(dtype, [64, BLOCK_D], swizzled)
    k_tile = gl.allocate_shared_memory(dtype, [64, BLOCK_D], swizzled)
    v_tile = gl.allocate_shared_memory(dtype, [64, BLOCK_D], swizzled)
    p_tile = gl.allocate_shared_memory(dtype, [64, 64], swizzled)
    ds_tile = gl.allocate_shared_memory(dtype, [64, 64], swizzled)
    k_tile.store(load_rows(k_ptr + first_key, key, sk, HEAD_DIM, HEAD_DIM, loads, 64, BLOCK_D))
    v_tile.store(load_rows(v_ptr + first_key, key, sk, HEAD_DIM, HEAD_DIM, loads, 64, BLOCK_D))

    lo, hi = sizes.tiles_of(key)
    dk = gl.zeros([64, BLOCK_D], gl.float32, output)
    dv = gl.zeros([64, BLOCK_D], gl.float32, output)
    for i in range((hi - lo) * sizes.group):
        turn = i // (hi - lo)
        row = (lo + i - turn * (hi - lo)) * 64
        head = (batch * heads + kv_head * sizes.group + turn).to(gl.int64)
        flat = head * sizes.tiles_m * 64
        first = head * sq * HEAD_DIM
        q_tile.store(load_rows(q_ptr + first, row, sq, HEAD_DIM, HEAD_DIM, loads, 64, BLOCK_D))
        do_tile.store(load_rows(do_ptr + first, row, sq, HEAD_DIM, HEAD_DIM, loads, 64, BLOCK_D))
        # Threads store and wgmma reads through the async proxy: without the fence wgmma may read older data.
        fence_async_shared()
        thread_barrier()  # without it a warp would multiply rows that another warp has not stored yet
        zero = gl.zeros([64, 64], gl.float32, accumulator(64))
        s = warpgroup_mma(k_tile, q_tile.permute([1, 0]), zero, use_acc=False)
        dp = warpgroup_mma(v_tile, do_tile.permute([1, 0]), zero, use_acc=False)
        at = row + gl.arange(0, 64, queries)
        p = gl.exp2(s * (scale * LOG2_E) - gl.load(lse2_ptr + flat + at)[None, :])
        if sizes.needs_mask(key, 64, row, 64):
            p = sizes.mask(p, key, row)
        ds = p * (dp - gl.load(delta_ptr + flat + at)[None, :])
        p_tile.store(p.to(dtype))
        ds_tile.store(ds.to(dtype))
        fence_async_shared()  # as above, for P and dS
        thread_barrier()  # as above
        dv = warpgroup_mma(p_tile, do_tile, dv)
        dk = warpgroup_mma(ds_tile, q_tile, dk)
        dq = warpgroup_mma(ds_tile.permute([1, 0]), k_tile, gl.zeros([64, BLOCK_D], gl.float32, output), use_acc=False)
        # Other blocks add to the same rows at the same time: without atomics one of two additions would be lost.
        add_fragments(dq_sums_ptr + (flat + row) * BLOCK_D, dq)
        thread_barrier()  # without it a fast warp would store the next Q and dO while a slow one still reads these
    store_plain(dk_ptr + first_key, key, sk, dk * scale, HEAD_DIM)
    store_plain(dv_ptr + first_key, key, sk, dv, HEAD_DIM)
