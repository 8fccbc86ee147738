"""Step 2: asynchronous copies into two slots. The next block of keys arrives while the warps compute the current block.

As step 1, but cp.async copies K and V directly from global into shared memory, 16 bytes for each thread. K and V have
two slots each, so the copies of block i + 1 start before block i is computed. If computing a block takes longer than
loading a block, the warps do not wait for memory. The threads still start each copy and compute its address.

    part       what                                   head dim 64    128    256
    tile       64 queries x BLOCK_N keys              64             64     32
    pipeline   K and V: 2 slots each, cp.async groups, a barrier before and a barrier after the products

On an H200, bf16, S = 16384, full: 402 TFLOP/s at head dim 64 (0.86 of cuDNN), 426 at 128 (0.62), 407 at 256 (0.54).
assets/results/h200/attention_ladder.json.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma

from utils.attention.gluon.arguments import Arguments
from utils.attention.gluon.shared import MINUS_INF, key_blocks, mask_scores, online_softmax, thread_barrier
from utils.attention.gluon.step1_synchronous import load_rows, store_output


@gluon.jit
def copy_rows(
    slot,
    base,
    first,
    rows,
    stride,
    HEAD_DIM: gl.constexpr,
    layout: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_D: gl.constexpr,
):
    """Start to copy rows first .. first+ROWS-1 of a (rows, HEAD_DIM) matrix. Elements outside of the matrix become zeros."""
    r = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))[None, :]
    # A copy has 16 bytes, so the mask must be the same for 8 elements: HEAD_DIM is a multiple of 8.
    async_copy.async_load(slot, base + r.to(gl.int64) * stride + d, mask=(r < rows) & (d < HEAD_DIM))


# One kernel serves all sizes. Otherwise Triton would compile again for sizes that are 1 or multiples of 16.
@gluon.jit(do_not_specialize=["sq", "sk", "heads", "group"])
def attention_step2(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    o_batch,
    o_head,
    o_row,
    sq,
    sk,
    heads,
    group,
    c,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    CAUSAL: gl.constexpr,
    LSE: gl.constexpr,
):
    """A block computes 64 query rows of one head: grid (row tiles, batch * heads)."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)

    row = gl.program_id(0) * BLOCK_M
    batch = gl.program_id(1) // heads
    head = gl.program_id(1) - batch * heads
    q_base = q_ptr + batch.to(gl.int64) * q_batch + head.to(gl.int64) * q_head
    k_base = k_ptr + batch.to(gl.int64) * k_batch + (head // group).to(gl.int64) * k_head
    v_base = v_ptr + batch.to(gl.int64) * v_batch + (head // group).to(gl.int64) * v_head
    o_base = o_ptr + batch.to(gl.int64) * o_batch + head.to(gl.int64) * o_head

    q = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_D], swizzled)
    k_ring = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_D], swizzled)
    v_ring = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_D], swizzled)
    q.store(load_rows(q_base, row, sq, q_row, HEAD_DIM, loads, BLOCK_M, BLOCK_D))

    m = gl.full([BLOCK_M], MINUS_INF, gl.float32, rows)
    total = gl.zeros([BLOCK_M], gl.float32, rows)
    o = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, output)
    n, seen = key_blocks(row, BLOCK_M, sq, sk, BLOCK_N, CAUSAL)
    copy_rows(k_ring.index(0), k_base, (n - 1) * BLOCK_N, sk, k_row, HEAD_DIM, loads, BLOCK_N, BLOCK_D)
    copy_rows(v_ring.index(0), v_base, (n - 1) * BLOCK_N, sk, v_row, HEAD_DIM, loads, BLOCK_N, BLOCK_D)
    async_copy.commit_group()
    for i in range(n):
        key = (n - 1 - i) * BLOCK_N
        slot = i % 2
        # Start the copies of the next block. After the last block they begin at row sk, and copy only zeros.
        next_key = gl.where(i + 1 < n, key - BLOCK_N, sk)
        copy_rows(k_ring.index(1 - slot), k_base, next_key, sk, k_row, HEAD_DIM, loads, BLOCK_N, BLOCK_D)
        copy_rows(v_ring.index(1 - slot), v_base, next_key, sk, v_row, HEAD_DIM, loads, BLOCK_N, BLOCK_D)
        async_copy.commit_group()
        async_copy.wait_group(1)  # without it this thread's copies of the current block could still be on their way
        # The copies wrote through the generic proxy, and wgmma reads through the async proxy. Without the fence wgmma
        # may read old data.
        fence_async_shared()
        thread_barrier()  # a thread waits only for its copies: without the barrier a warp would read unfinished rows
        zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
        s = warpgroup_mma(q, k_ring.index(slot).permute([1, 0]), zero, use_acc=False)
        if key + BLOCK_N > seen:
            s = mask_scores(s, row, key, sq, sk, scores, CAUSAL)
        p, m, total, alpha = online_softmax(s, m, total, c)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]
        o = warpgroup_mma(gl.convert_layout(p.to(dtype), left), v_ring.index(slot), o)
        thread_barrier()  # without it a fast warp's next copies would overwrite this slot while a slow warp reads it
    async_copy.wait_group(0)  # without it the last copies could arrive in the shared memory of another block
    store_output(o_base, lse_ptr + gl.program_id(1).to(gl.int64) * sq, o, m, total, c, row, sq, o_row, HEAD_DIM, LSE)


def launch(a: Arguments) -> None:
    """Run the kernel on tensors of a GPU."""
    strides = [stride for x in (a.q, a.k, a.v, a.out) for stride in x.stride()[:3]]
    attention_step2[a.grid()](a.q, a.k, a.v, a.out, a.lse, *strides, *a.sizes(), HEAD_DIM=a.head_dim, **a.constants())
