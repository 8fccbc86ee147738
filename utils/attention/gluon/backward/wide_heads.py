"""Steps 3 to 6 for head dimension 256, where dK and dV of 64 keys fill the registers of a warpgroup each.

The products are split: one consumer computes S^T and dV, the other dP^T, dS and dK, and each half of dQ's columns, so
both have the same work. P goes from the first to the second in fp32 through shared memory, dS back as the left operand of
dQ, which the first computes a tile late. The additions to dQ run beside the next tile's first product.

    part          what
    tile          64 queries x 64 keys
    left          128 columns of K and V in registers, left operands of S^T and dP^T, where dQ has a kernel of its own
    slots         Q 2, dO 2, dS 2, P 1
    registers     240 a consumer thread, 24 a producer thread
    shared        K + V + Q + dO + dS + P: 32+32+64+64+16+16 KiB

Places and figures: docs/backward-log.md.
"""

# A tuple is unpacked whole: in a kernel `_` would be a variable like any other, with one type.
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from utils.attention.gluon.backward.arguments import Gradients
from utils.attention.gluon.backward.fragments import add_fragments, from_fragments, to_fragments
from utils.attention.gluon.backward.launch import launch_blocks
from utils.attention.gluon.backward.pipeline import Sizes, block_work, tma_add
from utils.attention.gluon.backward.step3_warp_specialized import probabilities, producer, start_product, store_rows
from utils.attention.gluon.shared import accumulator, left_operand, wait_products


@gluon.jit
def half_dq(work, i, W: gl.constexpr):
    """Hand columns W * 128 and on of dQ = dS K of tile i to the tensor cores: [64, 128]."""
    k = work.k.reshape([64, 256]).slice(W * 128, 128, 1)
    return start_product(work.ds.index(i % work.sizes.PLAN.ds_slots).permute([1, 0]), k, 64, 128)


@gluon.jit
def split_columns(dq):
    """[64, 128] -> its two halves of columns, [64, 64]; the right one in registers that no product has written.

    It is read while the next product runs, and ptxas would wait for that product before it reads registers of another.
    """
    left, right = dq.reshape([64, 2, 64]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, accumulator(64)), gl.convert_layout(right, accumulator(64)) + 0.0


@gluon.constexpr_function
def columns_left(plan, case):
    """How many columns of K and V stay in registers: none where dQ is summed here, which needs them itself."""
    return 0 if case.dq else plan.left


@gluon.jit
def left_columns(work, rows):
    """The first columns of K or V in registers, the left operand of each tile's product; 0 if there are none."""
    LEFT: gl.constexpr = columns_left(work.sizes.PLAN, work.sizes.CASE)
    x = 0
    if LEFT:
        x = rows.slice(0, LEFT, 1).load(left_operand(64))
    return x


@gluon.jit
def start_transposed(work, rows, left, tile):
    """Hand rows @ tile^T to the tensor cores, S^T or dP^T: one product, or two where the first columns are in registers."""
    LEFT: gl.constexpr = columns_left(work.sizes.PLAN, work.sizes.CASE)
    if LEFT:
        REST: gl.constexpr = 256 - LEFT
        x = start_product(left, tile.slice(0, LEFT, 1).permute([1, 0]), 64, 64)
        x = warpgroup_mma(rows.slice(LEFT, REST, 1), tile.slice(LEFT, REST, 1).permute([1, 0]), x, is_async=True)
    else:
        x = start_product(rows, tile.permute([1, 0]), 64, 64)
    return x


@gluon.jit
def piece_of(work, head, m, COLUMN: gl.constexpr):
    """Number of the piece of the sums that holds columns COLUMN * 64 and on of a tile of 64 queries."""
    return ((work.batch * work.sizes.heads + head) * work.sizes.tiles_m + m) * 4 + COLUMN


@gluon.jit
def add_now(work, add, dq, piece):
    """Add what can be added at once of a half of dQ, [64, 128], and return the rest, for `add_later`."""
    sums_desc, dq_sums, tile = add
    if work.sizes.PLAN.by_tma:
        left, right = split_columns(dq)
        send_columns(add, left, piece)
        return right
    else:
        # Copied by an addition: ptxas would wait for the next product before it reads registers of another.
        return dq + 0.0


@gluon.jit
def add_later(work, add, rest, piece):
    """Add the rest of a half of dQ, while the tensor cores compute the next tile's first product."""
    sums_desc, dq_sums, tile = add
    if work.sizes.PLAN.by_tma:
        send_columns(add, rest, piece + 1)
    else:
        # The additions leave the SM at about 32 bytes a cycle, and whoever issues them waits for that.
        add_fragments(dq_sums + piece.to(gl.int64) * 4096, rest)


@gluon.jit
def send_columns(add, part, piece):
    """Hand 64 queries x 64 columns of dQ to TMA, which adds them to the sums."""
    sums_desc, dq_sums, tile = add
    tma.store_wait(0)  # TMA may still be reading the last columns
    tile.store(to_fragments(part).reshape([32, 128]))
    # Stored by threads, read by TMA through the async proxy: without the fence it may read what was there before.
    fence_async_shared()
    tma_add(sums_desc, [piece * 32, 0], tile)


@gluon.jit
def finish_scores(work, exchange, s, i, m, dv):
    """P^T of tile i from its scores, to the other consumer too, and dV += P^T dO handed to the tensor cores."""
    p_tile, p_full, p_empty, ds_empty = exchange
    s = wait_products(s, 0, 64)
    p = probabilities(work, s, i, work.key, m * 64)
    work.q.release(i, True)
    mbarrier.wait(p_empty, (i & 1) ^ 1)  # the other consumer has read the last P
    p_tile.store(to_fragments(p))
    mbarrier.arrive(p_full, count=1)
    work.do.wait_full(i)
    p16 = gl.convert_layout(p.to(work.do.tiles.dtype), left_operand(256))
    return warpgroup_mma(p16, work.do.tile(i), dv, is_async=True)


@gluon.jit
def late_dq(work, i):
    """Hand the first half of dQ of tile i to the tensor cores, as soon as the other consumer has written its dS."""
    SLOTS: gl.constexpr = work.sizes.PLAN.ds_slots
    mbarrier.wait(work.written.index(i % SLOTS), (i // SLOTS) & 1)
    return half_dq(work, i, 0)


@gluon.jit
def first_consumer(work, exchange, add, dv_desc):
    """S^T and P^T, dV, and the first half of dQ's columns, a tile later than the rest."""
    p_tile, p_full, p_empty, ds_empty = exchange
    PLAN: gl.constexpr = work.sizes.PLAN
    CASE: gl.constexpr = work.sizes.CASE
    count, lo, hi = work.first()
    head = work.kv_head * work.sizes.group
    m = lo
    dv = gl.zeros([64, 256], gl.float32, accumulator(256))
    mbarrier.wait(work.loaded.index(0), 0)
    k_left = left_columns(work, work.k_rows(0))
    if count > 0:
        work.q.wait_full(0)
        s = start_transposed(work, work.k_rows(0), k_left, work.q.tile(0))
        dv = wait_products(finish_scores(work, exchange, s, 0, m, dv), 0, 256)
        work.do.release(0)
        rest = gl.zeros([64, 64 if PLAN.by_tma else 128], gl.float32, accumulator(64 if PLAN.by_tma else 128))
        piece = piece_of(work, head, m, 0)
        for i in range(1, count):
            work.q.wait_full(i)
            s = start_transposed(work, work.k_rows(0), k_left, work.q.tile(i))
            if CASE.dq:  # noqa: SIM102 (the first is decided by the compiler)
                if i > 1:
                    add_later(work, add, rest, piece)
            piece = piece_of(work, head, m, 0)
            m += 1
            if m == hi:
                m = lo
                head += 1
            dv = finish_scores(work, exchange, s, i, m, dv)
            if CASE.dq:
                dq = late_dq(work, i - 1)
                dv = wait_products(dv, 1, 256)
                work.do.release(i)
                dq = wait_products(dq, 0, 128)
                async_copy.mbarrier_arrive(ds_empty.index((i - 1) % PLAN.ds_slots), increment_count=False)
                rest = add_now(work, add, dq, piece)
            else:
                dv = wait_products(dv, 0, 256)
                work.do.release(i)
        if CASE.dq:
            if count > 1:
                add_later(work, add, rest, piece)
            piece = piece_of(work, head, m, 0)
            rest = add_now(work, add, wait_products(late_dq(work, count - 1), 0, 128), piece)
            add_later(work, add, rest, piece)
        else:
            # Without dS to wait for: the other consumer tells of its last read of dO by reading the last P.
            mbarrier.wait(p_empty, (count - 1) & 1)
    # All dO have been read, by the other consumer too: it has written its last dS.
    store_rows(dv_desc, work, work.do.tiles.index(0), dv, 0)


@gluon.jit
def second_consumer(work, exchange, add, dk_desc):
    """dP^T and dS^T, dK, and the second half of dQ's columns."""
    p_tile, p_full, p_empty, ds_empty = exchange
    PLAN: gl.constexpr = work.sizes.PLAN
    CASE: gl.constexpr = work.sizes.CASE
    SLOTS: gl.constexpr = PLAN.ds_slots
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    dtype: gl.constexpr = dk_desc.dtype
    count, lo, hi = work.first()
    head = work.kv_head * work.sizes.group
    m = lo
    dk = gl.zeros([64, 256], gl.float32, accumulator(256))
    rest = gl.zeros([64, 64 if PLAN.by_tma else 128], gl.float32, accumulator(64 if PLAN.by_tma else 128))
    piece = piece_of(work, head, m, 2)
    mbarrier.wait(work.loaded.index(0), 0)
    mbarrier.wait(work.loaded.index(1), 0, pred=count > 0)  # without a query nobody loads V
    v_left = left_columns(work, work.v_rows(0))
    for i in range(count):
        slot = i % SLOTS
        work.do.wait_full(i)
        dp = start_transposed(work, work.v_rows(0), v_left, work.do.tile(i))
        if CASE.dq:  # noqa: SIM102 (the first is decided by the compiler)
            if i > 0:
                add_later(work, add, rest, piece)
        dp = wait_products(dp, 0, 64)
        delta = work.do.row_numbers(i, gl.SliceLayout(0, dp.type.layout))
        dp = dp - delta[None, :]
        work.do.release(i, True)
        mbarrier.wait(p_full, i & 1)
        p = gl.convert_layout(from_fragments(p_tile.load(flat), 64), accumulator(64), assert_trivial=True)
        async_copy.mbarrier_arrive(p_empty, increment_count=False)
        ds = (p * dp).to(dtype)
        if CASE.dq:
            mbarrier.wait(ds_empty.index(slot), ((i // SLOTS) & 1) ^ 1)  # the first consumer's dQ has read the slot
            work.ds.index(slot).store(ds)
        work.q.wait_full(i)
        dk = warpgroup_mma(gl.convert_layout(ds, left_operand(256)), work.q.tile(i), dk, is_async=True)
        if CASE.dq:
            # Stored by threads, read by wgmma through the async proxy: without the fence it may read what was there
            # before.
            fence_async_shared()
            mbarrier.arrive(work.written.index(slot), count=1)
            dq = half_dq(work, i, 1)
            dk = wait_products(dk, 1, 256)
            work.q.release(i)
            piece = piece_of(work, head, m, 2)
            rest = add_now(work, add, wait_products(dq, 0, 128), piece)
        else:
            dk = wait_products(dk, 0, 256)
            work.q.release(i)
        m += 1
        if m == hi:
            m = lo
            head += 1
    if CASE.dq:  # noqa: SIM102 (the first is decided by the compiler)
        if count > 0:
            add_later(work, add, rest, piece)
    # V is read by this consumer alone: its tile carries dK away.
    store_rows(dk_desc, work, work.v.index(0), dk * work.scale, 0)


@gluon.jit(
    do_not_specialize=["sq", "sk", "window", "heads", "kv_heads", "group", "tiles_m", "blocks_n", "section", "total"]
)
def attention_backward_wide(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dk_desc,
    dv_desc,
    lse_desc,
    delta_desc,
    sums_desc,
    dq_sums_ptr,
    sq,
    sk,
    window,
    heads,
    kv_heads,
    group,
    tiles_m,
    blocks_n,
    section,
    total,
    c,
    scale,
    PLAN: gl.constexpr,
    CASE: gl.constexpr,
):
    """A block computes dK and dV of BLOCK_N keys of one head, and adds to dQ: grid (blocks of keys * B * Hkv,)."""
    sizes = Sizes(sq, sk, window, heads, kv_heads, group, tiles_m, PLAN, CASE)
    tiles = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    work = block_work(sizes, tiles, blocks_n, section, total, c, scale, 2, 1)
    p_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_tile = gl.allocate_shared_memory(gl.float32, [4096], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=128)
    first_tile = p_tile
    second_tile = p_tile
    if PLAN.by_tma:
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 32, 128], sums_desc.layout)
        first_tile = dq_tiles.index(0)
        second_tile = dq_tiles.index(1)
    exchange = (p_tile, p_full, p_empty, work.read)
    gl.warp_specialize(
        [
            (first_consumer, (work, exchange, (sums_desc, dq_sums_ptr, first_tile), dv_desc)),
            (second_consumer, (work, exchange, (sums_desc, dq_sums_ptr, second_tile), dk_desc)),
            (producer, (work, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)),
        ],
        [4, 1],
        [PLAN.registers, 24],
    )


def launch(g: Gradients) -> None:
    """Run the kernel on tensors of a GPU."""
    launch_blocks(attention_backward_wide, g, g.sums_descriptor(), g.dq_sums)
