"""Step 1: one block of keys after another, plain products and atomics. The algorithm and nothing else.

A block owns 64 keys and walks over the tiles of 64 queries that see them. Each tile of Q and dO comes from global
memory through registers into shared memory. P and dS are computed again from the scores, the statistics of the rows and
dP, and both go through shared memory to be operands. dV and dK stay in registers; dQ belongs to the queries, so every
block adds its part to a sum in memory, element by element. Every part of the SM waits for every other.

    S^T  = K Q^T          P^T  = 2^(c S^T - lse2)        dV += P^T dO
    dP^T = V dO^T         dS^T = P^T (dP^T - delta)      dK += dS^T Q        dQ += dS K   (atomic)

    part       what                                   head dim 64, 128    256
    tile       64 queries x 64 keys
    warps      one warpgroup, or two halves of columns         4          8
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from utils.attention.gluon.backward.arguments import Gradients
from utils.attention.gluon.backward.pipeline import Sizes
from utils.attention.gluon.shared import thread_barrier
from utils.attention.gluon.step1_synchronous import load_rows


@gluon.jit
def add_rows(sums, row, dq, BLOCK_D: gl.constexpr):
    """Add dQ of 64 queries to the sums, (rows, BLOCK_D) in fp32: every element by an atomic of its own or of a pair."""
    layout: gl.constexpr = dq.type.layout
    r = row + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))[None, :]
    # Other blocks add to the same rows at the same time: without the atomic one of two sums would be lost.
    gl.atomic_add(sums + r * BLOCK_D + d, dq, sem="relaxed")


@gluon.jit
def store_plain(base, first, rows, stride, x, HEAD_DIM: gl.constexpr):
    """Store an accumulator [64, D] as rows first .. first + 63 of a matrix with `rows` rows."""
    layout: gl.constexpr = x.type.layout
    r = first + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    d = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
    gl.store(base + r.to(gl.int64) * stride + d, x.to(base.dtype.element_ty), mask=(r < rows) & (d < HEAD_DIM))


# One kernel for all sizes: without this, each multiple of 16 and each 1 would be compiled for itself.
@gluon.jit(do_not_specialize=["sq", "sk", "window", "heads", "kv_heads", "group", "tiles_m", "rows"])
def attention_backward_step1(
    q_ptr,
    do_ptr,
    k_ptr,
    v_ptr,
    dk_ptr,
    dv_ptr,
    lse2_ptr,
    delta_ptr,
    dq_sums_ptr,
    q_batch,
    q_head,
    q_row,
    do_batch,
    do_head,
    do_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    dk_batch,
    dk_head,
    dk_row,
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
    HEAD_DIM: gl.constexpr,
    PLAN: gl.constexpr,
    CASE: gl.constexpr,
):
    """A block computes dK and dV of 64 keys of one head, and adds to dQ: grid (B * Hkv, blocks of keys)."""
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK_D: gl.constexpr = PLAN.block_d
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    # Eight warps: two warpgroups, each with half of the columns.
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 256 // WARPS, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, BLOCK_D * 4 // WARPS, 16])
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    queries: gl.constexpr = gl.SliceLayout(0, scores)
    sizes = Sizes(sq, sk, window, heads, kv_heads, group, tiles_m, PLAN, CASE)

    batch = gl.program_id(0) // kv_heads
    kv_head = gl.program_id(0) - batch * kv_heads
    key = gl.program_id(1) * 64
    wide = batch.to(gl.int64)
    k_base = k_ptr + wide * k_batch + kv_head.to(gl.int64) * k_head
    v_base = v_ptr + wide * v_batch + kv_head.to(gl.int64) * v_head
    q_tile = gl.allocate_shared_memory(dtype, [64, BLOCK_D], swizzled)
    do_tile = gl.allocate_shared_memory(dtype, [64, BLOCK_D], swizzled)
    k_tile = gl.allocate_shared_memory(dtype, [64, BLOCK_D], swizzled)
    v_tile = gl.allocate_shared_memory(dtype, [64, BLOCK_D], swizzled)
    p_tile = gl.allocate_shared_memory(dtype, [64, 64], swizzled)
    ds_tile = gl.allocate_shared_memory(dtype, [64, 64], swizzled)
    k_tile.store(load_rows(k_base, key, sk, k_row, HEAD_DIM, loads, 64, BLOCK_D))
    v_tile.store(load_rows(v_base, key, sk, v_row, HEAD_DIM, loads, 64, BLOCK_D))

    lo, hi = sizes.tiles_of(key)
    dk = gl.zeros([64, BLOCK_D], gl.float32, output)
    dv = gl.zeros([64, BLOCK_D], gl.float32, output)
    for i in range((hi - lo) * group):
        turn = i // (hi - lo)
        row = (lo + i - turn * (hi - lo)) * 64
        head = kv_head * group + turn
        flat = (wide * heads + head) * rows
        q_base = q_ptr + wide * q_batch + head.to(gl.int64) * q_head
        do_base = do_ptr + wide * do_batch + head.to(gl.int64) * do_head
        q_tile.store(load_rows(q_base, row, sq, q_row, HEAD_DIM, loads, 64, BLOCK_D))
        do_tile.store(load_rows(do_base, row, sq, do_row, HEAD_DIM, loads, 64, BLOCK_D))
        # The threads stored through the generic proxy, wgmma reads through the async proxy: without the fence it may
        # read what was there before.
        fence_async_shared()
        thread_barrier()  # without it a warp would multiply rows that another warp has not stored yet
        zero = gl.zeros([64, 64], gl.float32, scores)
        s = warpgroup_mma(k_tile, q_tile.permute([1, 0]), zero, use_acc=False)
        dp = warpgroup_mma(v_tile, do_tile.permute([1, 0]), zero, use_acc=False)
        at = row + gl.arange(0, 64, queries)
        p = gl.exp2(s * c - gl.load(lse2_ptr + flat + at)[None, :])
        if sizes.needs_mask(key, 64, row):
            p = sizes.mask(p, key, row)
        ds = p * (dp - gl.load(delta_ptr + flat + at)[None, :])
        p_tile.store(p.to(dtype))
        ds_tile.store(ds.to(dtype))
        fence_async_shared()
        thread_barrier()
        dv = warpgroup_mma(p_tile, do_tile, dv)
        dk = warpgroup_mma(ds_tile, q_tile, dk)
        dq = warpgroup_mma(ds_tile.permute([1, 0]), k_tile, gl.zeros([64, BLOCK_D], gl.float32, output), use_acc=False)
        add_rows(dq_sums_ptr + flat * BLOCK_D, row, dq, BLOCK_D)
        thread_barrier()  # without it a fast warp would store the next Q and dO while a slow one still reads these
    dk_base = wide * dk_batch + kv_head.to(gl.int64) * dk_head
    store_plain(dk_ptr + dk_base, key, sk, dk_row, dk * scale, HEAD_DIM)
    store_plain(dv_ptr + dk_base, key, sk, dk_row, dv, HEAD_DIM)


def launch(g: Gradients) -> None:
    """Run the kernel on tensors of a GPU."""
    tensors = g.q, g.dout, g.k, g.v
    strides = [stride for x in (*tensors, g.dk) for stride in x.stride()[:3]]
    attention_backward_step1[g.grid()](
        *tensors,
        g.dk,
        g.dv,
        g.lse2,
        g.delta,
        g.dq_sums,
        *strides,
        *g.sizes(),
        g.rows,
        g.c,
        g.scale,
        HEAD_DIM=g.head_dim,
        PLAN=g.plan,
        CASE=g.case(),
        num_warps=g.warps(),
    )
