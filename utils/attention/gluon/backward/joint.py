"""Step 5 with one consumer of eight warps in place of two of four: both warpgroups run the same instructions.

A role of its own for each warpgroup is compiled for itself, so the two loops are twice the instructions that an SM has to
fetch, and each has barriers of its own. Here both warpgroups are one role: tiles of 128 keys, of which each has 64 rows in
its registers as before, and dS is exchanged at one barrier of 256 threads. Each warpgroup computes half of dQ: 64 queries
(tiles of 128) or 64 columns (tiles of 64).
"""

# A tuple is unpacked whole: in a kernel `_` would be a variable like any other, with one type.
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from utils.attention.gluon.backward.arguments import Gradients
from utils.attention.gluon.backward.pipeline import Sizes, block_work, tma_add
from utils.attention.gluon.backward.queue import make_queue
from utils.attention.gluon.backward.step5_storing_warp import launch_step5
from utils.attention.gluon.shared import meet, pass_by, thread_barrier, tma_load, tma_store, wait_products

LEFT = gl.constexpr(6)  # a named barrier that Triton does not use: its own are one for each partition, and two more


@gluon.constexpr_function
def keys_layout(columns):
    """Layout of a product [128 keys, columns]: 64 rows for each warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, columns, 16])


@gluon.constexpr_function
def keys_operand(columns):
    """Layout of P^T or dS^T as the left operand, in registers, of a product [128 keys, columns]."""
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [8, 1], [16, columns, 16]), 2)


@gluon.constexpr_function
def dq_layout(queries):
    """Layout of dQ: 64 queries for each warpgroup, or 64 columns where a tile has 64 queries."""
    return gl.NVMMADistributedLayout([3, 0], [8, 1] if queries == 128 else [4, 2], [16, 64, 16])


@gluon.constexpr_function
def _hold_asm(n):
    # The warp's mask is full, so that nothing is waited for; but the instruction needs all n numbers.
    lines = [
        "{",
        ".reg .b32 t;",
        "activemask.b32 t;",
        *[f"or.b32 t, t, ${i};" for i in range(n)],
        "bar.warp.sync t;",
        "}",
    ]
    return " ".join(lines)


@gluon.constexpr_function
def _hold_constraints(n):
    return ",".join(["=r"] * n) + "," + ",".join(str(i) for i in range(n))


@gluon.jit
def hold_here(x):
    """Compute x before what follows; ptxas otherwise moves exponentials behind the next wait for a product."""
    registers: gl.constexpr = x.shape[1] // 2
    bits = gl.inline_asm_elementwise(
        _hold_asm(registers),
        _hold_constraints(registers),
        [x.to(gl.int32, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=registers,
    )
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def to_pieces(x):
    """DQ of a tile, 8192 elements, in the order of the sums: a piece of 64 x 64 for each warpgroup; registers are renamed."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [512], [1024], [2048]],
        lane_bases=[[4], [8], [16], [32], [64]],
        warp_bases=[[128], [256], [4096]],
        block_bases=[],
        shape=[8192],
    )
    # row = 16 warp + 8 half + high, column = 8 block + 2 low + pair; thread = 32 warp + 4 high + low
    if x.shape[0] == 64:
        flat = x.reshape([4, 2, 8, 2, 8, 4, 2]).permute([3, 4, 0, 2, 5, 1, 6])
    else:
        flat = x.reshape([2, 4, 2, 8, 8, 4, 2]).permute([0, 4, 1, 3, 5, 2, 6])
    return gl.convert_layout(flat.reshape([8192]), layout, assert_trivial=True)


@gluon.jit
def clean_tiles(sizes, key, lo, hi):
    """Tiles of queries [first, end) of lo .. hi - 1 that need no mask against the 128 keys from `key` on."""
    BLOCK_M: gl.constexpr = sizes.PLAN.block_m
    shift = sizes.sk - sizes.sq
    first = lo
    end = hi
    if sizes.CASE.causal:
        first = gl.cdiv(gl.maximum(key + 127 - shift, 0), BLOCK_M)
    elif sizes.CASE.window:
        first = gl.cdiv(gl.maximum(key + 128 - shift - sizes.window, 0), BLOCK_M)
    if sizes.CASE.window:
        # The last query of a tile is window - 1 positions behind the first key, at most.
        end = gl.maximum(key + sizes.window - shift, 0) // BLOCK_M
    if sizes.CASE.tail:  # noqa: SIM102 (the first is decided by the compiler)
        if key + 128 > sizes.sk:
            first = hi
    first = gl.minimum(gl.maximum(first, lo), hi)
    return first, gl.minimum(gl.maximum(end, first), hi)


@gluon.jit
def give_back(work, ring, i, NUMBER: gl.constexpr):
    """Consumer: load number i of a ring has been read; NUMBER: the named barrier of its first slot, with `named`."""
    if work.sizes.PLAN.named:
        # An arrival of each warp, in place of one of each thread at the same word of shared memory.
        pass_by(NUMBER + i % ring.SLOTS, 384 if work.sizes.PLAN.producer_first else 288)
    else:
        ring.release(i, not work.sizes.CASE.dq)


@gluon.jit
def load_rows(work, ring, i, tile_desc, number_desc, head, row, NUMBER: gl.constexpr):
    """Producer: fetch rows of a head, and their numbers, as soon as the slot is empty."""
    heads = work.sizes.heads
    if work.sizes.PLAN.named:
        slot = i % ring.SLOTS
        if i >= ring.SLOTS:
            # Without it TMA would overwrite a tile that a consumer still reads.
            meet(NUMBER + slot, 384 if work.sizes.PLAN.producer_first else 288)
        full = ring.full.index(slot)
        mbarrier.expect(full, tile_desc.block_type.nbytes + number_desc.block_type.nbytes)
        tma_load(tile_desc, [work.batch, head, row, 0], full, ring.tiles.index(slot))
        tma_load(number_desc, [work.batch * heads + head, row], full, ring.numbers.index(slot))
    else:
        ring.load(i, tile_desc, number_desc, work.batch, head, heads, row)


@gluon.jit
def load_block(work, queue, turn, done, after, descriptors):
    """Load a block's K and V once, and Q and dO tile by tile, in the order of need: returns how many tiles.

    turn, done: blocks and tiles of this program before. after: number of its next block.
    """
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc = descriptors
    PLAN: gl.constexpr = work.sizes.PLAN
    WARPS: gl.constexpr = 4 if PLAN.producer_first else 1
    heads = work.sizes.heads
    count, lo, hi = work.first()
    if PLAN.queue:
        # Nobody reads the last block's K and V any more.
        mbarrier.wait(queue.freed.index(0), (turn & 1) ^ 1)
    # K and V have a barrier each: the first product starts when K is there.
    mbarrier.expect(work.loaded.index(0), k_desc.block_type.nbytes)
    tma_load(k_desc, [work.batch, work.kv_head, work.key, 0], work.loaded.index(0), work.k)
    head = work.kv_head * work.sizes.group
    start = work.start(lo, hi)
    m = start
    for i in range(gl.maximum(count, 1)):
        if count > 0:
            load_rows(work, work.q, done + i, q_desc, lse_desc, head, m * PLAN.block_m, 8)
        if i == 0:
            mbarrier.expect(work.loaded.index(1), v_desc.block_type.nbytes)
            tma_load(v_desc, [work.batch, work.kv_head, work.key, 0], work.loaded.index(1), work.v)
            if PLAN.queue:
                queue.publish(turn, after, WARPS)
        if count > 0:
            load_rows(work, work.do, done + i, do_desc, delta_desc, head, m * PLAN.block_m, 10)
        m += 1
        if m == hi:
            m = lo
        if m == start:
            head += 1
    return count


@gluon.jit
def producer(work, queue, descriptors):
    """One warp loads all blocks of this program."""
    if work.sizes.PLAN.queue:
        number = gl.program_id(0)
        turn = 0
        done = 0
        while number < queue.end:
            here = queue.place(work, number)
            number = queue.draw()
            done += load_block(here, queue, turn, done, number, descriptors)
            turn += 1
    else:
        load_block(work, queue, 0, 0, 0, descriptors)


@gluon.jit
def add_block(work, leave, done):
    """Hand dQ of each tile of a block to TMA, which adds it to the sums, and give its place back: returns how many tiles."""
    sums_desc, tiles, full, empty = leave
    PLAN: gl.constexpr = work.sizes.PLAN
    PIECES: gl.constexpr = PLAN.block_m * PLAN.block_d // 4096
    count, lo, hi = work.first()
    head = work.batch * work.sizes.heads + work.kv_head * work.sizes.group
    start = work.start(lo, hi)
    m = start
    for i in range(done, done + count):
        if PLAN.joint == 2:
            meet(LEFT, 288)
        else:
            mbarrier.wait(full, i & 1)
        for w in gl.static_range(2):
            at = [((head * work.sizes.tiles_m + m) * PIECES + w) * 32, 0]
            tma_add(sums_desc, at, tiles.slice(w * 32, 32, 0))
        tma.store_wait(0)
        mbarrier.arrive(empty, count=1)
        m += 1
        if m == hi:
            m = lo
        if m == start:
            head += 1
    return count


@gluon.jit
def storing_warp(work, queue, leave):
    """One warp adds dQ of all blocks of this program."""
    if work.sizes.CASE.dq and work.sizes.PLAN.by_tma:
        if work.sizes.PLAN.queue:
            number = gl.program_id(0)
            turn = 0
            done = 0
            while number < queue.end:
                done += add_block(queue.place(work, number), leave, done)
                number = queue.next(turn, 1)
                turn += 1
        else:
            add_block(work, leave, 0)


@gluon.jit
def walk(work, sums, leave, v_left, state, lo, hi, number, head, MASK: gl.constexpr):
    """Tiles of queries lo .. hi - 1 of one head: returns the state (dK, dV) behind them.

    number: of the load of tile 0, if there was one. MASK: whether these tiles get a mask.
    """
    sums_desc, tiles, full, empty = leave
    PLAN: gl.constexpr = work.sizes.PLAN
    CASE: gl.constexpr = work.sizes.CASE
    BLOCK_M: gl.constexpr = PLAN.block_m
    BLOCK_D: gl.constexpr = PLAN.block_d
    dtype: gl.constexpr = work.k.dtype
    k = work.k.reshape([128, BLOCK_D])
    v = work.v.reshape([128, BLOCK_D])
    dk, dv = state
    for m in range(lo, hi):
        i = number + m
        slot = i % PLAN.ds_slots
        work.q.wait_full(i)
        s = gl.zeros([128, BLOCK_M], gl.float32, keys_layout(BLOCK_M))
        s = warpgroup_mma(k, work.q.tile(i).permute([1, 0]), s, use_acc=False, is_async=True)
        work.do.wait_full(i)
        dp = gl.zeros([128, BLOCK_M], gl.float32, keys_layout(BLOCK_M))
        if PLAN.v_left:
            do = work.do.tile(i)
            dp = warpgroup_mma(v_left, do.slice(0, 64, 1).permute([1, 0]), dp, use_acc=False, is_async=True)
            if BLOCK_D > 64:
                REST: gl.constexpr = BLOCK_D - 64
                dp = warpgroup_mma(v.slice(64, REST, 1), do.slice(64, REST, 1).permute([1, 0]), dp, is_async=True)
        else:
            dp = warpgroup_mma(v, work.do.tile(i).permute([1, 0]), dp, use_acc=False, is_async=True)
        if PLAN.late_fence and CASE.dq and m > lo:
            # The last tile's dQ is handed over while S^T and dP^T are with the tensor cores: the fence takes its time.
            fence_async_shared()
            pass_by(LEFT, 288)
        s = wait_products(s, 2 if PLAN.v_left and BLOCK_D > 64 else 1, BLOCK_M)
        lse2 = work.q.row_numbers(i, gl.SliceLayout(0, s.type.layout))
        p = gl.exp2(s * work.c - lse2[None, :])
        if MASK:
            # At 64 the assembly makes ptxas spill in the loop without a mask, too.
            row = m * BLOCK_M
            p = work.sizes.mask_product(p, work.key, row) if BLOCK_D == 128 else work.sizes.mask(p, work.key, row)
        if PLAN.exp_first:
            p = hold_here(p)
        p16 = gl.convert_layout(p.to(dtype), keys_operand(BLOCK_D))
        if PLAN.dv_early:
            dv = warpgroup_mma(p16, work.do.tile(i), dv, is_async=True)
            dp = wait_products(dp, 1, BLOCK_M)
        else:
            dp = wait_products(dp, 0, BLOCK_M)
        delta = work.do.row_numbers(i, gl.SliceLayout(0, p.type.layout))
        ds = (p * (dp - delta[None, :])).to(dtype)
        if CASE.dq:
            # The slot's last dS, two tiles ago, has been read: all threads have since come to the last tile's barrier.
            work.ds.index(slot).store(ds)
        if not PLAN.dv_early:
            dv = warpgroup_mma(p16, work.do.tile(i), dv, is_async=True)
        if CASE.dq:
            # Stored by threads, read by wgmma through the async proxy: without the fence it may read what was there before.
            fence_async_shared()
            thread_barrier()  # the other warpgroup's keys are in dQ too
            dq = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, dq_layout(BLOCK_M))
            dq = warpgroup_mma(work.ds.index(slot).permute([1, 0]), k, dq, use_acc=False, is_async=True)
            if PLAN.joint == 2:
                # The compiler wants a barrier between this product and the next dS; here nobody waits for long.
                thread_barrier()
            dv = wait_products(dv, 1, BLOCK_D)
            give_back(work, work.do, i, 10)
            dk = warpgroup_mma(gl.convert_layout(ds, keys_operand(BLOCK_D)), work.q.tile(i), dk, is_async=True)
            dq = wait_products(dq, 1, 64)
            if PLAN.by_tma:
                mbarrier.wait(empty, (i & 1) ^ 1)  # TMA may still be reading the last tile
                tiles.reshape([8192]).store(to_pieces(dq))
                # Stored by threads, read by TMA through the async proxy.
                if not PLAN.late_fence:
                    fence_async_shared()
                if PLAN.late_fence:
                    pass
                elif PLAN.joint == 2:
                    pass_by(LEFT, 288)
                else:
                    mbarrier.arrive(full, count=1)
            else:
                flat = to_pieces(dq)
                tile = (work.batch * work.sizes.heads + head).to(gl.int64) * work.sizes.tiles_m + m
                gl.atomic_add(sums + tile * 8192 + gl.arange(0, 8192, flat.type.layout), flat, sem="relaxed")
        else:
            dk = warpgroup_mma(gl.convert_layout(ds, keys_operand(BLOCK_D)), work.q.tile(i), dk, is_async=True)
            dv = wait_products(dv, 1, BLOCK_D)
            give_back(work, work.do, i, 10)
        dk = wait_products(dk, 0, BLOCK_D)
        give_back(work, work.q, i, 8)
    if PLAN.late_fence and CASE.dq and hi > lo:
        fence_async_shared()
        pass_by(LEFT, 288)
    return dk, dv


@gluon.jit
def store_keys(work, dk_desc, dv_desc, dk, dv):
    """Store 128 rows of dV and dK through the places of dS, which nobody uses between two blocks."""
    PLAN: gl.constexpr = work.sizes.PLAN
    D: gl.constexpr = PLAN.block_d
    dtype: gl.constexpr = work.k.dtype
    COUNT: gl.constexpr = PLAN.ds_slots * PLAN.block_m // D
    at = [work.batch, work.kv_head, work.key, 0]
    places = work.ds._reinterpret(dtype, [COUNT, 1, 1, 128, D], dv_desc.layout)
    dv_tile = places.index(0)
    dk_tile = places.index(COUNT - 1)
    if COUNT == 1 and not PLAN.queue:
        dk_tile = work.v  # not needed any more
    dv_tile.reshape([128, D]).store(dv.to(dtype))
    if COUNT == 1 and PLAN.queue:
        # One place for both, because V's is for the next block. The fence: stored by threads, read by TMA.
        fence_async_shared()
        tma_store(dv_desc, at, dv_tile)
        tma.store_wait(0)
        dk_tile.reshape([128, D]).store((dk * work.scale).to(dtype))
        fence_async_shared()
    else:
        dk_tile.reshape([128, D]).store((dk * work.scale).to(dtype))
        # Stored by threads, read by TMA through the async proxy: without the fence it may read what was there before.
        fence_async_shared()
        tma_store(dv_desc, at, dv_tile)
    tma_store(dk_desc, at, dk_tile)
    tma.store_wait(0)


@gluon.jit
def store_part(parts_ptr, work, x, WHICH: gl.constexpr):
    """Store a part of dV (WHICH = 0) or dK (1), fp32, not scaled, in the order of `split.py`."""
    HALF: gl.constexpr = 64 * x.shape[1]
    BLOCKS: gl.constexpr = x.shape[1] // 8
    layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [512], [1024], [2048]] if BLOCKS == 8 else [[1], [2], [512], [1024], [2048], [4096]],
        lane_bases=[[4], [8], [16], [32], [64]],
        warp_bases=[[128], [256], [HALF]],
        block_bases=[],
        shape=[2 * HALF],
    )
    flat = x.reshape([2, 4, 2, 8, BLOCKS, 4, 2]).permute([0, 4, 1, 3, 5, 2, 6]).reshape([2 * HALF])
    i = gl.arange(0, 2 * HALF, layout)
    at = ((work.late.to(gl.int64) * 2 + i // HALF) * 2 + WHICH) * HALF + i % HALF
    gl.store(parts_ptr + at, gl.convert_layout(flat, layout, assert_trivial=True))


@gluon.jit
def compute_block(work, sums, leave, turn, done):
    """128 keys against all tiles of queries that see them: returns dK, dV, and how many tiles."""
    PLAN: gl.constexpr = work.sizes.PLAN
    CASE: gl.constexpr = work.sizes.CASE
    MASKS: gl.constexpr = CASE.causal or CASE.window or CASE.tail
    BLOCK_D: gl.constexpr = PLAN.block_d
    count, lo, hi = work.first()
    dk = gl.zeros([128, BLOCK_D], gl.float32, keys_layout(BLOCK_D))
    dv = gl.zeros([128, BLOCK_D], gl.float32, keys_layout(BLOCK_D))
    mbarrier.wait(work.loaded.index(0), turn & 1)
    mbarrier.wait(work.loaded.index(1), turn & 1)
    v_left = 0
    if PLAN.v_left:
        v_left = work.v.reshape([128, BLOCK_D]).slice(0, 64, 1).load(keys_operand(PLAN.block_m))
    state = (dk, dv)
    first, end = clean_tiles(work.sizes, work.key, lo, hi)
    for g in range(work.sizes.group):
        head = work.kv_head * work.sizes.group + g
        number = done + g * (hi - lo) - lo
        if MASKS:
            state = walk(work, sums, leave, v_left, state, lo, first, number, head, True)
            state = walk(work, sums, leave, v_left, state, first, end, number, head, False)
            if CASE.window:
                state = walk(work, sums, leave, v_left, state, end, hi, number, head, True)
        elif PLAN.stagger:
            start = work.start(lo, hi)
            state = walk(work, sums, leave, v_left, state, start, hi, number + lo - start, head, False)
            state = walk(work, sums, leave, v_left, state, lo, start, number + hi - start, head, False)
        else:
            state = walk(work, sums, leave, v_left, state, lo, hi, number, head, False)
    dk, dv = state
    return dk, dv, count


@gluon.jit
def leave_block(work, parts_ptr, dk_desc, dv_desc, dk, dv):
    """Store dV and dK of a block, or of a part of one."""
    if work.sizes.PLAN.split_tail and work.parts > 1:
        store_part(parts_ptr, work, dv, 0)
        store_part(parts_ptr, work, dk, 1)
    else:
        store_keys(work, dk_desc, dv_desc, dk, dv)


@gluon.jit
def consumer(work, queue, sums, leave, parts_ptr, dk_desc, dv_desc):
    """Both warpgroups: all blocks of this program."""
    if work.sizes.PLAN.queue:
        number = gl.program_id(0)
        turn = 0
        done = 0
        while number < queue.end:
            here = queue.place(work, number)
            dk, dv, count = compute_block(here, sums, leave, turn, done)
            done += count
            mbarrier.arrive(queue.freed.index(0), count=1)
            number = queue.next(turn, 8)
            leave_block(here, parts_ptr, dk_desc, dv_desc, dk, dv)
            turn += 1
    else:
        dk, dv, count = compute_block(work, sums, leave, 0, 0)
        leave_block(work, parts_ptr, dk_desc, dv_desc, dk, dv)


@gluon.jit(
    do_not_specialize=[
        *(
            "sq",
            "sk",
            "window",
            "heads",
            "kv_heads",
            "group",
            "tiles_m",
            "blocks_n",
            "section",
            "total",
            "whole",
            "parts",
        ),
        "end",
    ]
)
def attention_backward_joint(
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
    parts_ptr,
    counter_ptr,
    end,
    whole,
    parts,
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
    descriptors = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    work = block_work(sizes, descriptors, blocks_n, section, total, c, scale, 2, 2, whole, parts)
    tiles = work.ds
    full = work.loaded
    empty = work.loaded
    if PLAN.by_tma:
        tiles = gl.allocate_shared_memory(gl.float32, [64, 128], sums_desc.layout)
        full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(full, count=1)
        mbarrier.init(empty, count=1)
    leave = (sums_desc, tiles, full, empty)
    queue = 0
    if PLAN.queue:
        READERS: gl.constexpr = 2 if PLAN.by_tma and CASE.dq else 1
        queue = make_queue(counter_ptr, end, blocks_n, section, total, whole, parts, READERS, 1)
    loads = (work, queue, descriptors)
    REGISTERS: gl.constexpr = PLAN.registers
    if PLAN.producer_first:
        gl.warp_specialize(
            [(producer, loads), (consumer, (work, queue, dq_sums_ptr, leave, parts_ptr, dk_desc, dv_desc))],
            [8],
            [REGISTERS],
        )
    elif PLAN.by_tma:
        gl.warp_specialize(
            [
                (consumer, (work, queue, dq_sums_ptr, leave, parts_ptr, dk_desc, dv_desc)),
                (producer, loads),
                (storing_warp, (work, queue, leave)),
            ],
            [1, 1],
            [24, 24],
        )
    else:
        gl.warp_specialize(
            [(consumer, (work, queue, dq_sums_ptr, leave, parts_ptr, dk_desc, dv_desc)), (producer, loads)], [1], [24]
        )


def launch(g: Gradients) -> None:
    """Run the kernel on tensors of a GPU."""
    launch_step5(attention_backward_joint, g, num_warps=4 if g.plan.producer_first else 8)
