"""Step 3: TMA and mbarriers. One thread starts the copy of a whole tile; an mbarrier completes when it has arrived.

As step 2, but the copy engine (TMA) fetches a tile of K or V by its coordinates in a four-dimensional tensor: no
addresses, no masks (what lies outside comes as zeros), swizzled for wgmma on the way. An mbarrier for each slot counts
the bytes. The freed threads' registers and issue slots go to the softmax. Still one warpgroup: the same four warps
start the copies and compute, so a slot is refilled only after all of them have used it.

    part       what                                   head dim 64    128    256
    tile       64 queries x BLOCK_N keys              128            128    64
    pipeline   K and V: 2 slots each, a full mbarrier for each slot; refilled after the products that read it

On an H200, bf16, S = 16384, full: 483 TFLOP/s at head dim 64 (1.04 of cuDNN), 405 at 128 (0.59), 469 at 256 (0.62).
At 128 its larger tiles leave room for one block on an SM, step 2's for two. assets/results/h200/attention_ladder.json.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from utils.attention.gluon.arguments import Arguments
from utils.attention.gluon.shared import (
    MINUS_INF,
    inverse_and_lse,
    key_blocks,
    mask_scores,
    online_softmax,
    thread_barrier,
    tma_load,
    tma_store,
)


@gluon.jit
def load_tile(descriptor, batch, head, row, ring, full, slot, pred):
    """Start the copy of one tile into a slot; the slot's barrier completes when all bytes are there."""
    # The bytes are announced first: copies that arrive unannounced could complete the barrier too early.
    mbarrier.expect(full.index(slot), descriptor.block_type.nbytes, pred=pred)
    tma_load(descriptor, [batch, head, row, 0], full.index(slot), ring.index(slot), pred=pred)


# One kernel for all sizes: without this, each multiple of 16 and each 1 would be compiled for itself.
@gluon.jit(do_not_specialize=["sq", "sk", "heads", "group"])
def attention_step3(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse_ptr,
    sq,
    sk,
    heads,
    group,
    c,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    CAUSAL: gl.constexpr,
    LSE: gl.constexpr,
):
    """A block computes 64 query rows of one head: grid (row tiles, batch * heads)."""
    dtype: gl.constexpr = q_desc.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()

    row = gl.program_id(0) * BLOCK_M
    flat = gl.program_id(1)
    batch = flat // heads
    head = flat - batch * heads
    kv_head = head // group

    q_ring = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    mbarrier.init(q_full.index(0), count=1)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    # The barriers were initialized through the generic proxy, TMA completes them through the async proxy: without the
    # fence it may find them as they were before; without the barrier a warp could wait on one that is not ready.
    fence_async_shared()
    thread_barrier()

    n, seen = key_blocks(row, BLOCK_M, sq, sk, BLOCK_N, CAUSAL)
    load_tile(q_desc, batch, head, row, q_ring, q_full, 0, True)
    for i in gl.static_range(2):
        load_tile(k_desc, batch, kv_head, (n - 1 - i) * BLOCK_N, k_ring, k_full, i, i < n)
        load_tile(v_desc, batch, kv_head, (n - 1 - i) * BLOCK_N, v_ring, v_full, i, i < n)

    m = gl.full([BLOCK_M], MINUS_INF, gl.float32, rows)
    total = gl.zeros([BLOCK_M], gl.float32, rows)
    o = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, output)
    q = q_ring.index(0).reshape([BLOCK_M, BLOCK_D])
    mbarrier.wait(q_full.index(0), 0)  # without it the first product would read what was in shared memory before
    for i in range(n):
        key = (n - 1 - i) * BLOCK_N
        slot = i % 2
        phase = (i // 2) & 1
        mbarrier.wait(k_full.index(slot), phase)  # K has arrived; `phase` tells this round of the slot from the last
        zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
        s = warpgroup_mma(q, k_ring.index(slot).reshape([BLOCK_N, BLOCK_D]).permute([1, 0]), zero, use_acc=False)
        thread_barrier()  # all four warps have read this K: without it TMA would overwrite it under a slow one
        load_tile(k_desc, batch, kv_head, key - 2 * BLOCK_N, k_ring, k_full, slot, i + 2 < n)
        if key + BLOCK_N > seen:
            s = mask_scores(s, row, key, sq, sk, scores, CAUSAL)
        p, m, total, alpha = online_softmax(s, m, total, c)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]
        mbarrier.wait(v_full.index(slot), phase)  # V has arrived
        o = warpgroup_mma(gl.convert_layout(p.to(dtype), left), v_ring.index(slot).reshape([BLOCK_N, BLOCK_D]), o)
        thread_barrier()  # all four warps have read this V
        load_tile(v_desc, batch, kv_head, key - 2 * BLOCK_N, v_ring, v_full, slot, i + 2 < n)

    inverse, lse = inverse_and_lse(m, total, c)
    if LSE:
        at = row + gl.arange(0, BLOCK_M, rows)
        gl.store(lse_ptr + flat.to(gl.int64) * sq + at, lse, mask=at < sq)
    o = o * gl.convert_layout(inverse, gl.SliceLayout(1, output))[:, None]
    q.store(o.to(dtype))  # Q is not needed any more: its tile carries the output away
    fence_async_shared()  # stored by threads, read by TMA: without the fence TMA may read Q instead
    thread_barrier()  # TMA is started by one thread: the rows of all warps must be there
    tma_store(o_desc, [batch, head, row, 0], q_ring.index(0))
    tma.store_wait(0)  # shared memory must live until TMA has read it


def launch(a: Arguments) -> None:
    """Run the kernel on tensors of a GPU."""
    attention_step3[a.grid()](*a.descriptors(), a.lse, *a.sizes(), **a.constants())
