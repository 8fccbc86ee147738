"""Compute dQ in a separate kernel, for deterministic mode and head dimension 256.

A block owns 128 query rows and walks over their keys, as the forward does: S = Q K^T, dP = dO V^T, dQ += dS K. This kernel
computes S and dP a second time, so a backward pass has seven products instead of five. But dQ stays in fp32 registers until
it is stored, so nothing is summed in memory and the bits repeat. Only at 256, a few programs may add pieces in memory.

    part          what                              head dim 64    128          256
    consumers     2 warpgroups x 64 query rows
    K, V tile     BLOCK_N keys, slots of the rings  128, 2 and 2   64, 2 and 2  64, 2 and 1
    registers     a consumer thread, a producer     240, 24

A product of 64 x BLOCK_N reads 64 rows of Q or dO and BLOCK_N rows of K or V from shared memory. With 32 keys these reads
take 1.5 times as long as the product, with 64 keys as long. So at 256 V has one slot: it is free as soon as dP is there, and
the next V comes during dS and dQ. Deterministic passes take 1.48 and 1.34 times as long at 64 and 128 (docs/kernels/backward.md).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from utils.attention.gluon.backward.fragments import add_fragments, store_rows
from utils.attention.gluon.backward.pipeline import LOG2_E, SIZES, make_sizes
from utils.attention.gluon.pipeline import allocate_ring
from utils.attention.gluon.shared import accumulator, left_operand, start_scores, tma_load, wait_products
from utils.kernels.early_launch import let_next_launch_begin, wait_for_launch_before


@gluon.jit
def key_tiles(sizes, row, cut, BLOCK_N: gl.constexpr):
    """Return the tiles of keys [lo, hi) for the 128 queries from `row` on, or a piece of these tiles; they may be none."""
    position = row + sizes.sk - sizes.sq
    last = gl.minimum(position + 127 + sizes.ahead, sizes.sk - 1)
    lo = gl.maximum(position - sizes.back, 0) // BLOCK_N
    tiles = gl.maximum(gl.cdiv(gl.maximum(last + 1, 0), BLOCK_N) - lo, 0)
    return lo + tiles * cut[0] // cut[1], lo + tiles * (cut[0] + 1) // cut[1]


@gluon.jit
def producer(sizes, place, rings, descriptors):
    """Load the block's Q and dO once, and K and V tile by tile, with one warp."""
    row, batch, head, cut = place
    q, do, k, v, loaded = rings
    q_desc, do_desc, k_desc, v_desc = descriptors
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    mbarrier.expect(loaded.index(0), q_desc.block_type.nbytes * 4)
    for w in gl.static_range(2):
        tma_load(q_desc, [batch, head, row + w * 64, 0], loaded.index(0), q.index(w))
        tma_load(do_desc, [batch, head, row + w * 64, 0], loaded.index(0), do.index(w))
    lo, hi = key_tiles(sizes, row, cut, BLOCK_N)
    for i in range(hi - lo):
        key = (hi - 1 - i) * BLOCK_N
        k.load(i, k_desc, batch, head // sizes.group, key)
        v.load(i, v_desc, batch, head // sizes.group, key)


@gluon.jit
def consumer(sizes, place, rings, dq_desc, numbers, scale, W: gl.constexpr):
    """Compute dQ of 64 query rows over their tiles of keys, in warpgroup W."""
    first_row, batch, head, cut = place
    q_tiles, do_tiles, k, v, loaded = rings
    lse2_ptr, delta_ptr, sums_ptr = numbers
    dtype: gl.constexpr = q_tiles.dtype
    BLOCK_D: gl.constexpr = q_tiles.shape[4]
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    row = first_row + W * 64
    at = row + gl.arange(0, 64, gl.SliceLayout(1, accumulator(BLOCK_N)))
    lse2 = gl.load(lse2_ptr + at)
    delta = gl.load(delta_ptr + at)
    lo, hi = key_tiles(sizes, first_row, cut, BLOCK_N)
    dq = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
    mbarrier.wait(loaded.index(0), 0)  # without it the products would read Q and dO before TMA has written them
    for i in range(hi - lo):
        key = (hi - 1 - i) * BLOCK_N
        # i is far below 2**30, so this is W. ptxas does not know that. If it did, it would keep the addresses of all parts of Q
        # and dO over the loop in 64 registers at head dimension 256, and spill.
        own = W + (i >> 30)
        q = q_tiles.index(own).reshape([64, BLOCK_D])
        do = do_tiles.index(own).reshape([64, BLOCK_D])
        k.wait_full(i)  # this product reads K
        s = start_scores(q, k.tile(i))
        v.wait_full(i)  # this product reads V
        dp = start_scores(do, v.tile(i))
        s = wait_products(s, 1, BLOCK_N)  # S is complete; dP may still run
        p = gl.exp2(s * (scale * LOG2_E) - lse2[:, None])
        if sizes.needs_mask(key, BLOCK_N, row, 64):
            p = sizes.mask_keys(p, key, row)
        dp = wait_products(dp, 0, BLOCK_N)  # without it TMA would overwrite V, and dP would be incomplete
        v.release(i)
        ds = gl.convert_layout((p * (dp - delta[:, None])).to(dtype), left_operand(BLOCK_D))
        dq = wait_products(warpgroup_mma(ds, k.tile(i), dq, is_async=True), 0, BLOCK_D)
        k.release(i)
    if cut[1] > 1:
        add_fragments(sums_ptr + row.to(gl.int64) * BLOCK_D, dq)
    else:
        # The products have read Q, so dQ can go through its tile.
        store_rows(dq_desc, batch, head, row, q_tiles.index(W), dq * scale)


@gluon.jit(do_not_specialize=SIZES)
def attention_backward_dq(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dq_desc,
    lse2_ptr,
    delta_ptr,
    sums_ptr,
    sq,
    sk,
    back,
    ahead,
    heads,
    kv_heads,
    pieces,
    scale,
    PLAN: gl.constexpr,
):
    """Compute dQ of 128 query rows of one head in each block, the last rows first: grid (tiles * B * H * pieces,).

    With more than one piece of the keys, the pieces are added to the sums of dQ, and `finish_backward` stores them as rows.
    """
    V_SLOTS: gl.constexpr = 1 if PLAN.block_d == 256 else 2
    sizes = make_sizes(sq, sk, back, ahead, heads, kv_heads, PLAN)
    tiles = gl.cdiv(sq, 128)
    heads_total = gl.num_programs(0) // (tiles * pieces)
    program = gl.program_id(0) // pieces
    down = program // heads_total
    flat = program - down * heads_total
    batch = flat // heads
    row = (tiles - 1 - down) * 128
    shape: gl.constexpr = [2] + q_desc.block_type.shape  # noqa: RUF005 (Gluon knows no starred lists)
    q = gl.allocate_shared_memory(q_desc.dtype, shape, q_desc.layout)
    do = gl.allocate_shared_memory(q_desc.dtype, shape, q_desc.layout)
    k = allocate_ring(k_desc, 2, 1, 2)
    v = allocate_ring(v_desc, V_SLOTS, 1, 2)
    loaded = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded.index(0), count=1)
    wait_for_launch_before()
    let_next_launch_begin()  # the kernel of dK and dV needs only the launch before this one, and takes the SMs that become free
    place = (row, batch, flat - batch * heads, (gl.program_id(0) % pieces, pieces))
    rings = (q, do, k, v, loaded)
    first = flat.to(gl.int64) * tiles * 128
    numbers = (lse2_ptr + first, delta_ptr + first, sums_ptr + first * PLAN.block_d)
    gl.warp_specialize(
        [
            (consumer, (sizes, place, rings, dq_desc, numbers, scale, 0)),
            (consumer, (sizes, place, rings, dq_desc, numbers, scale, 1)),
            (producer, (sizes, place, rings, (q_desc, do_desc, k_desc, v_desc))),
        ],
        [4, 1],
        [240, 24],
    )
