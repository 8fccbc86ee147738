"""Step 4: warp specialization. A producer warp loads, and consumer warpgroups compute. Mbarriers pass the slots between them.

The producer needs one warp and 24 or 32 registers for each thread. It runs ahead until the rings are full. Each
consumer owns 64 rows of queries and gets the registers that the producer does not need. Consumers share K and V, so a
tile serves 128 or 192 rows. While one consumer waits for its product, another consumer may compute its softmax. This
overlap is left to chance; inside a consumer nothing overlaps yet.

    part       what                                   head dim 64    128    256
    consumers  warpgroups x 64 query rows             3              2      2
    tile       BLOCK_N keys, slots of each ring       128, 3         128, 2 64, 2
    registers  a consumer thread, a producer thread   160, 32        240, 24

On an H200, bf16, S = 16384, full: 539 TFLOP/s at head dim 64 (1.11 of cuDNN), 592 at 128 (0.86), 663 at 256 (0.91).
assets/results/h200/attention_ladder.json.
"""

# The kernel unpacks whole tuples into names that it does not use. `_` could not replace them: in a kernel it has one type.
# ruff: noqa: RUF059

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
    tma_load,
    tma_store,
)


@gluon.jit
def producer(loads, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """Load Q, then each block of K and V when its slot is empty, from the last block to the first. The producer is one warp."""
    descriptors, rings, bars, shape = loads
    q_desc, k_desc, v_desc = descriptors
    q_tiles, k_ring, v_ring = rings
    q_full, k_full, k_empty, v_full, v_empty = bars
    sq, sk, heads, group = shape
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_N: gl.constexpr = k_ring.shape[3]
    row = gl.program_id(0) * (BLOCK_M * CONSUMERS)
    batch = gl.program_id(1) // heads
    head = gl.program_id(1) - batch * heads
    for w in gl.static_range(CONSUMERS):
        mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
        tma_load(q_desc, [batch, head, row + w * BLOCK_M, 0], q_full.index(w), q_tiles.index(w))
    n = key_blocks(row, BLOCK_M * CONSUMERS, sq, sk, BLOCK_N, CAUSAL)[0]
    for i in range(n):
        slot = i % STAGES
        free = ((i // STAGES) & 1) ^ 1  # for a new barrier this phase counts as complete: the first round does not wait
        key = (n - 1 - i) * BLOCK_N
        # Without the waits TMA would overwrite a K or V that a consumer still reads. `expect` comes before the copy:
        # otherwise the bytes that arrive could complete the barrier's phase too early.
        mbarrier.wait(k_empty.index(slot), free)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        tma_load(k_desc, [batch, head // group, key, 0], k_full.index(slot), k_ring.index(slot))
        mbarrier.wait(v_empty.index(slot), free)
        mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
        tma_load(v_desc, [batch, head // group, key, 0], v_full.index(slot), v_ring.index(slot))


@gluon.jit
def consumer(work, W: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, LSE: gl.constexpr):
    """Compute 64 query rows with warpgroup W, from the blocks of K and V that the producer loads."""
    o_desc, lse_ptr, rings, bars, shape, c = work
    q_tiles, k_ring, v_ring = rings
    q_full, k_full, k_empty, v_full, v_empty = bars
    sq, sk, heads, group = shape
    dtype: gl.constexpr = q_tiles.dtype
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_D: gl.constexpr = q_tiles.shape[4]
    BLOCK_N: gl.constexpr = k_ring.shape[3]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    rows: gl.constexpr = gl.SliceLayout(1, scores)

    first_row = gl.program_id(0) * (BLOCK_M * CONSUMERS)
    row = first_row + W * BLOCK_M
    flat = gl.program_id(1)
    # Each consumer must release all blocks of the tile, so n counts the blocks of all its rows.
    n = key_blocks(first_row, BLOCK_M * CONSUMERS, sq, sk, BLOCK_N, CAUSAL)[0]
    seen = key_blocks(row, BLOCK_M, sq, sk, BLOCK_N, CAUSAL)[1]
    m = gl.full([BLOCK_M], MINUS_INF, gl.float32, rows)
    total = gl.zeros([BLOCK_M], gl.float32, rows)
    o = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, output)
    q = q_tiles.index(W).reshape([BLOCK_M, BLOCK_D])
    mbarrier.wait(q_full.index(W), 0)  # without it the first product would read old data from shared memory
    for i in range(n):
        slot = i % STAGES
        phase = (i // STAGES) & 1
        key = (n - 1 - i) * BLOCK_N
        mbarrier.wait(k_full.index(slot), phase)  # without it the product would read the K of the slot's last round
        zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
        s = warpgroup_mma(q, k_ring.index(slot).reshape([BLOCK_N, BLOCK_D]).permute([1, 0]), zero, use_acc=False)
        mbarrier.arrive(k_empty.index(slot), count=1)  # without it the producer would wait for ever a round later
        if key + BLOCK_N > seen:
            s = mask_scores(s, row, key, sq, sk, scores, CAUSAL)
        p, m, total, alpha = online_softmax(s, m, total, c)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]
        mbarrier.wait(v_full.index(slot), phase)  # without it the product would read the V of the slot's last round
        o = warpgroup_mma(gl.convert_layout(p.to(dtype), left), v_ring.index(slot).reshape([BLOCK_N, BLOCK_D]), o)
        mbarrier.arrive(v_empty.index(slot), count=1)

    inverse, lse = inverse_and_lse(m, total, c)
    if LSE:
        at = row + gl.arange(0, BLOCK_M, rows)
        gl.store(lse_ptr + flat.to(gl.int64) * sq + at, lse, mask=at < sq)
    o = o * gl.convert_layout(inverse, gl.SliceLayout(1, output))[:, None]
    q.store(o.to(dtype))  # the kernel does not need Q any more, so the output leaves through Q's tile
    fence_async_shared()  # the threads stored the output, and TMA reads it: without the fence TMA may read Q
    batch = flat // heads
    tma_store(o_desc, [batch, flat - batch * heads, row, 0], q_tiles.index(W))
    tma.store_wait(0)  # without it another block could get this shared memory before TMA has read it


# One kernel serves all sizes. Otherwise Triton would compile again for sizes that are 1 or multiples of 16.
@gluon.jit(do_not_specialize=["sq", "sk", "heads", "group"])
def attention_step4(
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
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    LSE: gl.constexpr,
):
    """Allocate tiles, rings and barriers, then start the roles: CONSUMERS warpgroups and the producer warp."""
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)  # the producer's `expect`; the barrier counts bytes separately
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)  # each consumer arrives once, after it has read the slot
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    rings = (q_tiles, k_ring, v_ring)
    bars = (q_full, k_full, k_empty, v_full, v_empty)
    shape = (sq, sk, heads, group)
    loads = ((q_desc, k_desc, v_desc), rings, bars, shape)
    work = (o_desc, lse_ptr, rings, bars, shape, c)
    # The first role has the four warps of the launch, and the registers that the other roles leave. With two consumers
    # the last role does not exist.
    gl.warp_specialize(
        [
            (consumer, (work, 0, STAGES, CAUSAL, LSE)),
            (producer, (loads, CONSUMERS, STAGES, CAUSAL)),
            (consumer, (work, 1, STAGES, CAUSAL, LSE)),
            (consumer, (work, 2, STAGES, CAUSAL, LSE)),
        ][: CONSUMERS + 1],
        [1, 4, 4][:CONSUMERS],
        [32, 160, 160] if CONSUMERS == 3 else [24, 240],
    )


def launch(a: Arguments) -> None:
    """Run the kernel on tensors of a GPU."""
    pipeline = {"CONSUMERS": a.plan.consumers, "STAGES": a.plan.stages}
    attention_step4[a.grid()](*a.descriptors(), a.lse, *a.sizes(), **a.constants(), **pipeline)
