"""Step 1: FlashAttention's algorithm and nothing else. One warpgroup computes, and nothing overlaps.

Four warps own 64 rows of queries. For each block of keys, they load K and V from global memory through registers into
shared memory, multiply Q by K, compute the softmax, and multiply the probabilities by V. The warps wait for the end of
each part before the next.

    part       what                                   head dim 64    128    256
    tile       64 queries x BLOCK_N keys              64             64     32
    pipeline   none: one tile of K, one tile of V; the warps wait for each product at once

On an H200, bf16, S = 16384, full: 345 TFLOP/s at head dim 64 (0.71 of cuDNN), 361 at 128 (0.52), 316 at 256 (0.42).
assets/results/h200/attention_ladder.json.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from utils.attention.gluon.arguments import Arguments
from utils.attention.gluon.shared import (
    MINUS_INF,
    inverse_and_lse,
    key_blocks,
    mask_scores,
    online_softmax,
    thread_barrier,
)


@gluon.jit
def load_rows(
    base, first, rows, stride, HEAD_DIM: gl.constexpr, layout: gl.constexpr, ROWS: gl.constexpr, BLOCK_D: gl.constexpr
):
    """Load rows first .. first+ROWS-1 of a (rows, HEAD_DIM) matrix into registers. Elements outside of the matrix are zeros."""
    r = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))[None, :]
    return gl.load(base + r.to(gl.int64) * stride + d, mask=(r < rows) & (d < HEAD_DIM), other=0.0)


@gluon.jit
def store_output(o_ptr, lse_ptr, o, m, total, c, row, sq, stride, HEAD_DIM: gl.constexpr, LSE: gl.constexpr):
    """Divide the output [64, D] by the row sums and store it. With LSE, store the log-sum-exp, too."""
    inverse, lse = inverse_and_lse(m, total, c)
    layout: gl.constexpr = o.type.layout
    o = o * gl.convert_layout(inverse, gl.SliceLayout(1, layout))[:, None]
    r = row + gl.arange(0, o.shape[0], gl.SliceLayout(1, layout))[:, None]
    d = gl.arange(0, o.shape[1], gl.SliceLayout(0, layout))[None, :]
    gl.store(o_ptr + r.to(gl.int64) * stride + d, o.to(o_ptr.dtype.element_ty), mask=(r < sq) & (d < HEAD_DIM))
    if LSE:
        rows = row + gl.arange(0, o.shape[0], m.type.layout)
        gl.store(lse_ptr + rows, lse, mask=rows < sq)


# One kernel serves all sizes. Otherwise Triton would compile again for sizes that are 1 or multiples of 16.
@gluon.jit(do_not_specialize=["sq", "sk", "heads", "group"])
def attention_step1(
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
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # 16 bytes a thread, 8 threads to a row
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)

    row = gl.program_id(0) * BLOCK_M
    batch = gl.program_id(1) // heads
    head = gl.program_id(1) - batch * heads
    q_base = q_ptr + batch.to(gl.int64) * q_batch + head.to(gl.int64) * q_head
    k_base = k_ptr + batch.to(gl.int64) * k_batch + (head // group).to(gl.int64) * k_head
    v_base = v_ptr + batch.to(gl.int64) * v_batch + (head // group).to(gl.int64) * v_head
    o_base = o_ptr + batch.to(gl.int64) * o_batch + head.to(gl.int64) * o_head

    q = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_D], swizzled)
    k = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_D], swizzled)
    v = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_D], swizzled)
    q.store(load_rows(q_base, row, sq, q_row, HEAD_DIM, loads, BLOCK_M, BLOCK_D))

    m = gl.full([BLOCK_M], MINUS_INF, gl.float32, rows)
    total = gl.zeros([BLOCK_M], gl.float32, rows)
    o = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, output)
    n, seen = key_blocks(row, BLOCK_M, sq, sk, BLOCK_N, CAUSAL)
    for i in range(n):
        key = (n - 1 - i) * BLOCK_N
        k.store(load_rows(k_base, key, sk, k_row, HEAD_DIM, loads, BLOCK_N, BLOCK_D))
        v.store(load_rows(v_base, key, sk, v_row, HEAD_DIM, loads, BLOCK_N, BLOCK_D))
        # The threads stored Q, K and V through the generic proxy, and wgmma reads them through the async proxy. Without
        # the fence wgmma may read old data.
        fence_async_shared()
        thread_barrier()  # without it a warp would multiply rows that another warp has not stored yet
        zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
        s = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False)
        if key + BLOCK_N > seen:
            s = mask_scores(s, row, key, sq, sk, scores, CAUSAL)
        p, m, total, alpha = online_softmax(s, m, total, c)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]
        o = warpgroup_mma(gl.convert_layout(p.to(dtype), left), v, o)
        thread_barrier()  # without it a fast warp would store the next K and V while a slow warp still reads these
    store_output(o_base, lse_ptr + gl.program_id(1).to(gl.int64) * sq, o, m, total, c, row, sq, o_row, HEAD_DIM, LSE)


def launch(a: Arguments) -> None:
    """Run the kernel on tensors of a GPU."""
    strides = [stride for x in (a.q, a.k, a.v, a.out) for stride in x.stride()[:3]]
    attention_step1[a.grid()](a.q, a.k, a.v, a.out, a.lse, *strides, *a.sizes(), HEAD_DIM=a.head_dim, **a.constants())
