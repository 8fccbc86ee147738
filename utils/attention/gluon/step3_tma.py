"""Step 3: TMA and mbarriers. One thread starts the copy of a whole tile, and an mbarrier completes when the tile has arrived.

As step 2, but the copy engine (TMA) fetches a tile of K or V by its coordinates in a four-dimensional tensor. The
threads need no addresses and no masks: elements outside of the tensor arrive as zeros, and TMA swizzles the tile for
wgmma. An mbarrier for each slot counts the bytes. So the softmax has more registers and more issue slots. There is
still one warpgroup: its four warps start the copies and compute, so a slot gets new rows only after all of them used it.

    part       what                                   head dim 64    128    256
    tile       64 queries x BLOCK_N keys              128            128    64
    pipeline   K and V: 2 slots each, a full mbarrier for each slot; the next copy starts after the product that reads the slot

On an H200, bf16, S = 16384, full: 483 TFLOP/s at head dim 64 (1.04 of cuDNN), 405 at 128 (0.59), 469 at 256 (0.62).
At 128 an SM has room for one block of step 3, for two blocks of step 2. assets/results/h200/attention_ladder.json.
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
    """Start the copy of one tile into a slot. The slot's barrier completes when all bytes have arrived."""
    # `expect` comes before the copy. Otherwise the bytes that arrive could complete the barrier's phase too early.
    mbarrier.expect(full.index(slot), descriptor.block_type.nbytes, pred=pred)
    tma_load(descriptor, [batch, head, row, 0], full.index(slot), ring.index(slot), pred=pred)


# One kernel serves all sizes. Otherwise Triton would compile again for sizes that are 1 or multiples of 16.
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
    # The threads initialized the mbarriers through the generic proxy, and TMA completes them through the async proxy.
    # Without the fence TMA may find old data there. Without the barrier a warp could wait on an uninitialized mbarrier.
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
    mbarrier.wait(q_full.index(0), 0)  # without it the first product would read old data from shared memory
    for i in range(n):
        key = (n - 1 - i) * BLOCK_N
        slot = i % 2
        phase = (i // 2) & 1
        mbarrier.wait(k_full.index(slot), phase)  # without it the product would read the K of the slot's last round
        zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
        s = warpgroup_mma(q, k_ring.index(slot).reshape([BLOCK_N, BLOCK_D]).permute([1, 0]), zero, use_acc=False)
        thread_barrier()  # without it TMA would overwrite this K while a slow warp still reads it
        load_tile(k_desc, batch, kv_head, key - 2 * BLOCK_N, k_ring, k_full, slot, i + 2 < n)
        if key + BLOCK_N > seen:
            s = mask_scores(s, row, key, sq, sk, scores, CAUSAL)
        p, m, total, alpha = online_softmax(s, m, total, c)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]
        mbarrier.wait(v_full.index(slot), phase)  # without it the product would read the V of the slot's last round
        o = warpgroup_mma(gl.convert_layout(p.to(dtype), left), v_ring.index(slot).reshape([BLOCK_N, BLOCK_D]), o)
        thread_barrier()  # without it TMA would overwrite this V while a slow warp still reads it
        load_tile(v_desc, batch, kv_head, key - 2 * BLOCK_N, v_ring, v_full, slot, i + 2 < n)

    inverse, lse = inverse_and_lse(m, total, c)
    if LSE:
        at = row + gl.arange(0, BLOCK_M, rows)
        gl.store(lse_ptr + flat.to(gl.int64) * sq + at, lse, mask=at < sq)
    o = o * gl.convert_layout(inverse, gl.SliceLayout(1, output))[:, None]
    q.store(o.to(dtype))  # the kernel does not need Q any more, so the output leaves through Q's tile
    fence_async_shared()  # the threads stored the output, and TMA reads it: without the fence TMA may read Q
    thread_barrier()  # one thread starts TMA: without the barrier the rows of other warps may be missing
    tma_store(o_desc, [batch, head, row, 0], q_ring.index(0))
    tma.store_wait(0)  # without it another block could get this shared memory before TMA has read it


def launch(a: Arguments) -> None:
    """Run the kernel on tensors of a GPU."""
    attention_step3[a.grid()](*a.descriptors(), a.lse, *a.sizes(), **a.constants())
