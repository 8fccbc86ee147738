"""The backward pass at head dimension 256, where dK or dV of 64 keys fills the registers of a warpgroup.

So two consumers split the products: the first computes S^T and dV, the second dP^T, dS and dK. P goes from the first to the
second in fp32 through shared memory. A separate kernel (`dq.py`) computes dQ, which is faster here than sums in memory.

    part          what
    tile          64 queries x 64 keys
    left          128 columns of K and V in registers, left operands of S^T and dP^T
    registers     240 a consumer thread, 24 a producer thread
    shared        K + V + Q + dO + P: 32+32+64+64+16 KiB
    measured      1.16 times as fast as the best of cuDNN, FlashAttention 3 and 4 (H200; docs/kernels/backward.md)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, warpgroup_mma

from utils.attention.gluon.backward.fragments import FLAT, from_fragments, store_rows, to_fragments
from utils.attention.gluon.backward.pipeline import SIZES, allocate_work, load_part, make_sizes, numbered_part, rows_of
from utils.attention.gluon.backward.shares import leave_part
from utils.attention.gluon.backward.step3_warp_specialized import probabilities
from utils.attention.gluon.shared import accumulator, left_operand, start_scores, wait_products
from utils.kernels.early_launch import let_next_launch_begin, wait_for_launch_before


@gluon.jit
def first_consumer(work, part, exchange, parts_ptr, dv_desc):
    """Compute S^T, P^T and dV, and hand P^T to the second consumer."""
    p_tile, p_full, p_empty = exchange
    head, m = part.begin(work.sizes)
    dv = gl.zeros([64, 256], gl.float32, accumulator(256))
    mbarrier.wait(work.loaded.index(0), 0)  # K has arrived
    k = rows_of(work.k, 0)
    k_left = k.slice(0, 128, 1).load(left_operand(64))
    for i in range(part.count):
        work.q.wait_full(i)
        s = wait_products(start_scores(k, work.q.tile(i), 0, k_left), 0, 64)
        p = probabilities(work, s, i, part.key, m * 64)
        work.q.release(i, True)
        mbarrier.wait(p_empty, (i & 1) ^ 1)  # without it P would overwrite a P that is still read
        p_tile.store(to_fragments(p))
        mbarrier.arrive(p_full, count=1)
        work.do.wait_full(i)
        p16 = gl.convert_layout(p.to(work.do.tiles.dtype), left_operand(256))
        dv = wait_products(warpgroup_mma(p16, work.do.tile(i), dv, is_async=True), 0, 256)
        work.do.release(i)
        head, m = part.next_tile(head, m)
    # dV goes through dO's first tile. The second consumer has read the last dO when it has read the last P.
    mbarrier.wait(p_empty, (part.count & 1) ^ 1)
    if part.slot >= 0:
        leave_part(parts_ptr, part.slot, dv, 0, work.sizes.PLAN)
    else:
        store_rows(dv_desc, part.batch, part.kv_head, part.key, work.do.tiles.index(0), dv)
    if gl.program_id(0) == 0:
        wait_for_launch_before()  # without it this kernel could end before dQ's kernel, and later kernels read dQ, too


@gluon.jit
def second_consumer(work, part, exchange, parts_ptr, dk_desc):
    """Compute dP^T, dS^T and dK."""
    p_tile, p_full, p_empty = exchange
    dk = gl.zeros([64, 256], gl.float32, accumulator(256))
    mbarrier.wait(work.loaded.index(1), 0)  # V has arrived
    v = rows_of(work.v, 0)
    v_left = v.slice(0, 128, 1).load(left_operand(64))
    for i in range(part.count):
        work.do.wait_full(i)
        dp = wait_products(start_scores(v, work.do.tile(i), 0, v_left), 0, 64)
        delta = work.do.row_numbers(i, gl.SliceLayout(0, dp.type.layout))
        dp = dp - delta[None, :]
        work.do.release(i, True)
        mbarrier.wait(p_full, i & 1)  # the first consumer has stored P
        p = gl.convert_layout(from_fragments(p_tile.load(FLAT), 64), accumulator(64), assert_trivial=True)
        async_copy.mbarrier_arrive(p_empty, increment_count=False)
        ds = gl.convert_layout((p * dp).to(dk_desc.dtype), left_operand(256))
        work.q.wait_full(i)
        dk = wait_products(warpgroup_mma(ds, work.q.tile(i), dk, is_async=True), 0, 256)
        work.q.release(i)
    # Only this consumer reads V, so dK can go through its tile.
    if part.slot >= 0:
        leave_part(parts_ptr, part.slot, dk, 1, work.sizes.PLAN)
    else:
        store_rows(dk_desc, part.batch, part.kv_head, part.key, work.v, dk * work.scale)


@gluon.jit(do_not_specialize=SIZES)
def attention_backward_wide(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dk_desc,
    dv_desc,
    lse_desc,
    delta_desc,
    parts_ptr,
    sq,
    sk,
    back,
    ahead,
    heads,
    kv_heads,
    blocks_n,
    section,
    total,
    whole,
    pieces,
    scale,
    PLAN: gl.constexpr,
):
    """Compute dK and dV of 64 keys of one head in each program, or a piece of them: grid (numbers of `numbered_part`,)."""
    let_next_launch_begin()
    sizes = make_sizes(sq, sk, back, ahead, heads, kv_heads, PLAN)
    descriptors = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    work = allocate_work(sizes, descriptors, scale)
    part = numbered_part(sizes, (blocks_n, section, total, whole, pieces), gl.program_id(0))
    p_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_tile = gl.allocate_shared_memory(gl.float32, [4096], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=128)
    exchange = (p_tile, p_full, p_empty)
    gl.warp_specialize(
        [
            (first_consumer, (work, part, exchange, parts_ptr, dv_desc)),
            (second_consumer, (work, part, exchange, parts_ptr, dk_desc)),
            (load_part, (work, part, 0, descriptors)),
        ],
        [4, 1],
        [240, 24],
    )
