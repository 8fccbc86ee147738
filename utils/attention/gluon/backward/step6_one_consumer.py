"""Step 6: both warpgroups are one consumer of eight warps, a storing warp hands dQ to TMA, and programs draw blocks.

In step 3 the compiler compiles a role for each warpgroup: that doubles the instructions, takes registers for addresses, and
needs an mbarrier for each exchange of dS. Here both warpgroups are one role. Its tiles have 128 keys, with 64 rows in the
registers of each warpgroup as before, and dS is exchanged at one barrier of 256 threads. Each warpgroup computes half of dQ: 64
queries (tiles of 128) or 64 columns (tiles of 64). The storing warp hands it to TMA. The product of S^T starts from the mask
instead of zeros. A quarter of the exponentials are polynomials (`exp2`), because a tile waits for the exponential unit.

    part          what                                        head dim 64      128
    tile          queries x keys                              128 x 128        64 x 128
    left          columns of V that stay in registers         none             64
    registers     a consumer thread, the two other warps      240, 24, 24      240, 24, 24
    shared        K + V + Q + dO + dS + dQ                    16+16+32+32+64+32   32+32+32+32+32+32 KiB
    measured      of the best of cuDNN, FlashAttention 3, 4   1.07             1.01 (H200; docs/kernels/backward.md)
"""

# Unpacked tuples keep all names here: in a kernel `_` is an ordinary variable with one type.
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from utils.attention.gluon.backward.fragments import to_fragments
from utils.attention.gluon.backward.pipeline import SIZES, Part, allocate_work, load_part, make_sizes, numbered_part
from utils.attention.gluon.backward.shares import leave_part, make_share
from utils.attention.gluon.shared import (
    accumulator,
    keep_columns,
    left_operand,
    meet,
    pass_by,
    start_scores,
    thread_barrier,
    tma_store,
    view_sums,
    wait_products,
)
from utils.kernels.early_launch import let_next_launch_begin, wait_for_launch_before

# Hand a tile to TMA, which adds it to memory; `tma.store_wait` waits for the end.
tma_add = tma.async_atomic_add  # no `gl.constexpr`: see `shared.py`
# Number of the named barrier for a tile of dQ in shared memory. Triton uses a barrier for each partition, and two more.
LEFT = gl.constexpr(6)
# The fp32 numbers 0.695117, 0.227645, 0.077067 (least relative error on [0, 1) with the constant term 1), 1.5 * 2^23, -127.
_C1, _C2, _C3, _ROUND, _LEAST = "0f3F31F32D", "0f3E691BB9", "0f3D9DD568", "0f4B400000", "0fC2FE0000"
EIGHT = gl.constexpr(",".join(["=f"] * 8 + ["f"] * 8))  # constraints of an assembly with eight outputs and eight inputs


@gluon.constexpr_function
def _exp2_asm():
    # The fourth and the last of eight registers take the polynomial: below -127 it gives 0, and for nan the greatest number.
    lines = ["{", ".reg .f32 x, y, f;", ".reg .b32 a, b;"]
    for i in range(8):
        if i not in (3, 7):
            lines.append(f"ex2.approx.ftz.f32 ${i}, ${8 + i};")
            continue
        lines += [
            f"max.NaN.f32 x, ${8 + i}, {_LEAST};",
            f"add.rm.f32 y, x, {_ROUND};",
            f"sub.f32 f, y, {_ROUND};",
            "sub.f32 f, x, f;",
            "mov.b32 a, y;",
            f"fma.rn.f32 y, f, {_C3}, {_C2};",
            f"fma.rn.f32 y, y, f, {_C1};",
            "fma.rn.f32 y, y, f, 0f3F800000;",
            "mov.b32 b, y;",
            "shl.b32 a, a, 23;",
            "add.s32 b, b, a;",
            f"mov.b32 ${i}, b;",
        ]
    return " ".join([*lines, "}"])


@gluon.jit
def exp2(x):
    """Return 2^x: the exponential unit computes six of eight registers and the multipliers two, as in FlashAttention 4.

    2^x = 2^n * 2^f with n = floor(x) and 2^f = 1 + f (C1 + f (C2 + f C3)), within 8.6e-5: 1/22 of a rounding to bf16, 1/6 of
    one to fp16. n is added to the exponent's bits.
    """
    return gl.inline_asm_elementwise(_exp2_asm(), EIGHT, [x], dtype=gl.float32, is_pure=True, pack=8)


@gluon.jit
def start_dq(work, ds):
    """Start dQ of a tile on the tensor cores, after both warpgroups have stored dS."""
    BLOCK_M: gl.constexpr = work.sizes.PLAN.block_m
    BLOCK_D: gl.constexpr = work.sizes.PLAN.block_d
    # Threads store and wgmma reads through the async proxy: without the fence wgmma may read older data.
    fence_async_shared()
    thread_barrier()  # without it the other warpgroup's dS would be missing in this product
    # 64 queries for each warpgroup, or 64 columns where a tile has 64 queries.
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1] if BLOCK_M == 128 else [4, 2], [16, 64, 16])
    dq = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, layout)
    dq = warpgroup_mma(ds.permute([1, 0]), work.k.reshape([128, BLOCK_D]), dq, use_acc=False, is_async=True)
    # The compiler needs a barrier between this product and the next store of dS. Here no warp waits for long.
    thread_barrier()
    return dq


@gluon.jit
def leave_dq(leave, dq, i):
    """Leave dQ of load number i in shared memory for the storing warp."""
    sums_desc, tiles, empty = leave
    mbarrier.wait(empty, (i & 1) ^ 1)  # without it the tile would overwrite a tile that TMA still reads
    if dq.shape[0] == 64:  # the second warpgroup's columns become rows 64 .. 127
        dq = dq.reshape([64, 2, 64]).permute([1, 0, 2]).reshape([128, 64])
    tiles.reshape([8192]).store(to_fragments(dq))
    pass_by(LEFT, 288)


@gluon.jit
def start_masked_scores(work, bounds, clean, m, i):
    """Start S^T of tile m, load number i, on the tensor cores. clean: the tiles [first, end) that need no mask.

    A mask is 0 where a query sees a key, and else an infinity that the scale makes negative. So the loop keeps the registers and
    the order of a loop without masks: with a second loop, or a branch after the product, a tile took 1.07 of the time at 64.
    """
    PLAN: gl.constexpr = work.sizes.PLAN
    BLOCK_M: gl.constexpr = PLAN.block_m
    layout: gl.constexpr = accumulator(BLOCK_M, 128)
    work.q.wait_full(i)
    k, q = work.k.reshape([128, PLAN.block_d]), work.q.tile(i)
    if (m < clean[0]) | (m >= clean[1]):
        keys: gl.constexpr = gl.SliceLayout(1, layout)
        low, high = bounds.index(0).load(keys) - m * BLOCK_M, bounds.index(1).load(keys) - m * BLOCK_M
        start = keep_columns(gl.zeros([128, BLOCK_M], gl.float32, layout), low, high)
        s = view_sums(start_scores(k, q, PLAN.depth, None, start * gl.where(work.c < 0, -1.0, 1.0)))
    else:
        s = view_sums(start_scores(k, q, PLAN.depth))
    return s


@gluon.jit
def compute_part(work, share, ds_tiles, leave, bounds, turn, done):
    """Return dK and dV of 128 keys from the query tiles of a part. turn, done: numbers of parts and tiles before."""
    PLAN: gl.constexpr = work.sizes.PLAN
    BLOCK_M: gl.constexpr = PLAN.block_m
    BLOCK_D: gl.constexpr = PLAN.block_d
    dtype: gl.constexpr = work.k.dtype
    part = share.read(turn, 8)
    dk = gl.zeros([128, BLOCK_D], gl.float32, accumulator(BLOCK_D, 128))
    dv = gl.zeros([128, BLOCK_D], gl.float32, accumulator(BLOCK_D, 128))
    # Compute here, while K comes, the range of queries for each key. All warps have used the last part's ranges.
    keys = part.key + gl.arange(0, 128, gl.BlockedLayout([1], [32], [8], [0]))
    low, high = work.sizes.queries_of(keys, part.stop)
    bounds.index(0).store(low)
    bounds.index(1).store(high)
    mbarrier.wait(work.loaded.index(0), turn & 1)  # K has arrived
    mbarrier.wait(work.loaded.index(1), turn & 1)  # V has arrived
    tma.store_wait(0)
    # Without the wait and the barrier, a warp would store dS where TMA still reads dV and dK, or read bounds too early.
    thread_barrier()
    v = work.v.reshape([128, BLOCK_D])
    v_left = v
    if BLOCK_D > 64:
        v_left = v.slice(0, 64, 1).load(left_operand(BLOCK_M, 128))
    m = part.lo + part.at % gl.maximum(part.hi - part.lo, 1)
    for i in range(done, done + part.count):
        s = start_masked_scores(work, bounds, (part.first, part.end), m, i)
        work.do.wait_full(i)
        dp = start_scores(v, work.do.tile(i), PLAN.depth, v_left)
        s = wait_products(s, 2 if BLOCK_D > 64 else 1, BLOCK_M)  # S is complete; the products of dP may still run
        lse2 = work.q.row_numbers(i, gl.SliceLayout(0, s.type.layout))
        p = exp2(s * work.c - lse2[None, :])
        p16 = gl.convert_layout(p.to(dtype), left_operand(BLOCK_D, 128))
        dp = wait_products(dp, 0, BLOCK_M)  # dP is complete
        delta = work.do.row_numbers(i, gl.SliceLayout(0, p.type.layout))
        ds = (p * (dp - delta[None, :])).to(dtype)
        ds_tile = ds_tiles.index(i % 2)
        if PLAN.dq:
            # All warps have read the slot's last dS, two tiles ago: they have met at the last tile's barrier after that.
            ds_tile.store(ds)
        dv = warpgroup_mma(p16, work.do.tile(i), dv, is_async=True)
        if PLAN.dq:
            dq = start_dq(work, ds_tile)
        dv = wait_products(dv, 1 if PLAN.dq else 0, BLOCK_D)  # without it TMA would overwrite dO; dQ may still run
        work.do.release(i, not PLAN.dq)
        dk = warpgroup_mma(gl.convert_layout(ds, left_operand(BLOCK_D, 128)), work.q.tile(i), dk, is_async=True)
        if PLAN.dq:
            leave_dq(leave, wait_products(dq, 1, 64), i)
        dk = wait_products(dk, 0, BLOCK_D)  # without it TMA would overwrite Q
        work.q.release(i, not PLAN.dq)
        m = gl.where(m + 1 == part.hi, part.lo, m + 1)
    return dk, dv


@gluon.jit
def store_keys(sizes, out, part, place, x):
    """Store 128 rows of dV or dK through a place that is free between two parts. The next part waits for the end of the store.

    TMA stores the rows; threads do if the last rows belong to another packed sequence.
    """
    desc, memory, eighths = out
    place = place.reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    place.reshape([128, x.shape[1]]).store(x.to(desc.dtype))
    # Threads store and TMA reads through the async proxy: without the fence TMA may read older data.
    fence_async_shared()
    by_tma = part.key + 128 <= part.stop if sizes.PLAN.mask == "packed" else True
    if by_tma:
        tma_store(desc, [part.batch, part.kv_head, part.key, 0], place)
    if sizes.PLAN.mask == "packed":
        thread_barrier()  # without it a thread would load rows that another thread has not written yet
        if part.key + 128 > part.stop:
            BLOCK_D: gl.constexpr = x.shape[1]
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [8, 1], [1, 0])
            rows = part.key + gl.arange(0, 128, gl.SliceLayout(1, layout))[:, None]
            d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))[None, :]
            flat = (part.batch * sizes.kv_heads + part.kv_head).to(gl.int64) * sizes.sk
            keep = (rows < part.stop) & (d < eighths * 8)
            gl.store(memory + (flat + rows) * (eighths * 8) + d, place.reshape([128, BLOCK_D]).load(layout), mask=keep)


@gluon.jit
def consumer(work, share, freed, ds_tiles, leave, bounds, parts_ptr, dk_out, dv_out):
    """Compute and store dK and dV of all parts of this program, with both warpgroups."""
    BLOCK_D: gl.constexpr = work.sizes.PLAN.block_d
    turn = 0
    done = 0
    key = share.next(turn, 8)
    while key >= 0:
        dk, dv = compute_part(work, share, ds_tiles, leave, bounds, turn, done)
        # Threads have loaded V, and TMA writes the next V: without the fence it may overtake the loads, if a part has no tiles.
        fence_async_shared()
        mbarrier.arrive(freed, count=1)
        part = share.read(turn, 8)
        done += part.count
        if part.slot >= 0:
            leave_part(parts_ptr, part.slot, dv, 0, work.sizes.PLAN)
            leave_part(parts_ptr, part.slot, dk, 1, work.sizes.PLAN)
        else:
            store_keys(work.sizes, dv_out, part, ds_tiles, dv)
            if BLOCK_D > 64:
                tma.store_wait(0)  # TMA has read dV
                thread_barrier()  # without it a warp would store dK into the place from which TMA still reads dV
            store_keys(work.sizes, dk_out, part, ds_tiles.index(1) if BLOCK_D == 64 else ds_tiles, dk * work.scale)
        share.release(turn)
        turn += 1
        key = share.next(turn, 8)
    tma.store_wait(0)  # without it the block would end and free its shared memory while TMA reads it
    if not work.sizes.PLAN.dq:
        wait_for_launch_before()  # without it this kernel could end before dQ's kernel, and later kernels read dQ, too


@gluon.jit
def producer(work, share, blocks, counter, freed, descriptors):
    """Draw this program's numbers and load their parts, with one warp."""
    blocks_n, section, total, whole, pieces = blocks
    for _ in gl.static_range(3):  # it only moves the code after it, which makes the loop at 128 2% faster
        let_next_launch_begin()
    number = gl.program_id(0)
    turn = 0
    done = 0
    while number < whole + (blocks_n * total - whole) * pieces:
        part = numbered_part(work.sizes, blocks, number)
        share.tell(part, turn)
        mbarrier.wait(freed, (turn & 1) ^ 1)  # without it TMA would overwrite K and V that the consumer still reads
        load_part(work, part, done, descriptors)
        done += part.count
        turn += 1
        # Draw no earlier: the first free program should get the next block. The consumer still has two tiles to compute.
        number = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
    none = number * 0 - 1  # a part with negative fields ends the other roles
    share.tell(Part(none, none, none, none, none, none, none, none, none, none, none), turn)


@gluon.jit
def storing_warp(work, share, leave):
    """Hand dQ of each tile to TMA, which adds it to the sums, and give its place back, with one warp."""
    sums_desc, tiles, empty = leave
    PLAN: gl.constexpr = work.sizes.PLAN
    # A tile of dQ has 64 rows of 128 numbers, or fewer if its last columns are zeros.
    ROWS: gl.constexpr = PLAN.depth // 2 if PLAN.depth > 0 else 64
    BOX: gl.constexpr = sums_desc.block_type.shape[0]
    if PLAN.dq:
        turn = 0
        key = share.next(turn, 1)
        while key >= 0:
            part = share.read(turn, 1)
            share.release(turn)
            head, m = part.begin(work.sizes)
            for _ in range(part.count):
                meet(LEFT, 288)  # without it TMA would read a tile that the consumer has not stored yet
                # Threads store and TMA reads through the async proxy: without the fence TMA may read older data.
                fence_async_shared()
                row = ((part.batch * work.sizes.heads + head) * work.sizes.tiles_m + m) * 64
                for w in gl.static_range(ROWS // BOX):
                    tma_add(sums_desc, [row + w * BOX, 0], tiles.slice(w * BOX, BOX, 0))
                tma.store_wait(0)  # without it the consumer would overwrite the tile while TMA reads it
                mbarrier.arrive(empty, count=1)
                head, m = part.next_tile(head, m)
            turn += 1
            key = share.next(turn, 1)


@gluon.jit(do_not_specialize=SIZES)
def attention_backward_step6(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dk_desc,
    dv_desc,
    lse_desc,
    delta_desc,
    sums_desc,
    parts_ptr,
    counter_ptr,
    dk_ptr,
    dv_ptr,
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
    eighths,
    scale,
    PLAN: gl.constexpr,
):
    """Compute dK and dV of blocks of 128 keys, or of their parts, and add to dQ; programs draw the blocks."""
    let_next_launch_begin()
    sizes = make_sizes(sq, sk, back, ahead, heads, kv_heads, PLAN)
    share = make_share(2 if PLAN.dq else 1)
    descriptors = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    work = allocate_work(sizes, descriptors, scale)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ds_tiles = gl.allocate_shared_memory(q_desc.dtype, [2, PLAN.block_n, PLAN.block_m], swizzled)
    freed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(freed, count=1)
    # Without dQ these names stand for other memory: the compiler would give an unused barrier's place to a tile, which PTX forbids.
    tiles = ds_tiles
    empty = freed
    if PLAN.dq:
        tiles = gl.allocate_shared_memory(gl.float32, [64, 128], sums_desc.layout)
        empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(empty, count=1)
    leave = (sums_desc, tiles, empty)
    bounds = gl.allocate_shared_memory(gl.int32, [2, PLAN.block_n], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    dk_out, dv_out = (dk_desc, dk_ptr, eighths), (dv_desc, dv_ptr, eighths)
    gl.warp_specialize(
        [
            (consumer, (work, share, freed, ds_tiles, leave, bounds, parts_ptr, dk_out, dv_out)),
            (producer, (work, share, (blocks_n, section, total, whole, pieces), counter_ptr, freed, descriptors)),
            (storing_warp, (work, share, leave)),
        ],
        [1, 1],
        [24, 24],
    )
