"""Step 5, the fastest: products overlapped with softmax, a persistent grid. FlashAttention forward for Hopper.

One block stays on each SM and walks over tiles of query rows. Its producer warp loads Q, K and V by TMA, running
ahead as far as the rings of shared memory allow, into the next tile too. Two to four consumer warpgroups own 64 rows
each. A consumer hands Q K(i) to the tensor cores and P V(i-1) behind it, waits for the scores only, and computes their
softmax while P V(i-1) is still running; scores, probabilities and output never leave its registers. Keys are walked
from the last block to the first, so the masked blocks of a causal tile come first.

    part          what                                         head dim 64      128              256
    consumers     warpgroups x 64 query rows                   3                2                2
    K, V tile     BLOCK_N keys, slots of the K and V rings     128, 3 and 3     128, 2 and 3     64, 2 and 3
    registers     a consumer thread, a producer thread         160, 32          240, 24          240, 24
    shared        Q + K ring + V ring + O                      24+48+48+24      32+64+96+32      64+64+96+0 KiB
    halves        rows r and r+8 of a warp as two softmaxes    no               yes              yes
    own keys      each consumer starts at its own last block   yes              no               yes

Two variants (`plan.variant_for`). "short", few causal keys at head dim 64: 4 consumers, 64 keys, 4 slots, 112
registers. "ahead", full attention at head dim 64 and 128 (`consumer_ahead`): 2 consumers, two tiles of Q, and a tile's
end beside the next one's start.

The checklist of warp-specialized attention, for Hopper:
- Pipeline: four roles: TMA producer; Q K, softmax and P V inside each consumer, a block apart from each other. A V
  is given back half a block later than its K, so where shared memory is short V has the slot more.
- Layouts: wgmma accumulators m64nN; P goes over into the left operand of P V in registers; 128-byte swizzle for
  every tile; no conversion in the loop moves data between threads.
- Softmax: base 2; the running maximum follows only when it has grown by more than 2^8 (exact all the same: sum and
  output carry the same factor), so after the first blocks no warp multiplies its output any more.
- Sync: full and empty mbarriers for every slot of the K ring and the V ring apart; no barrier inside a consumer.
- Memory: no tensor memory on Hopper: O stays in registers, Q in shared memory, O leaves through shared memory by TMA.
- Loads: one elected thread issues TMA boxes of 64 rows (Q) and BLOCK_N rows (K, V); TMA zeroes what lies outside.
- Critical path: the next scores' product is queued before P V; the rescaling hides behind it; with `halves` the
  wait for P V stands between the two halves of the softmax, so that packing P and summing fill the gaps between
  exponentials (the compiler otherwise collects them behind the wait).
- Schedule: chosen by hand (`plan.py`): tiles, slots and registers by head dimension; causal tiles dealt out longest
  first, so that all SMs end together.
- Masking: only blocks that straddle the diagonal, the window's edge or the last key are masked. `ALIGNED`: that is a
  tile's first block alone, and the loop has no mask in it.

On an H200, bf16, S = 8192 and 16384, full and causal, each against the other in one process (geometric means of four):
1.187 of cuDNN and 0.990 of FlashAttention 4 at head dim 64, 1.190 and 1.066 at 128, 1.168 and 1.015 at 256. Each point:
assets/results/h200/attention_ratios.json; how it got there, failures included: docs/attention-log.md.
"""

# A tuple is unpacked whole: in a kernel `_` would be a variable like any other, with one type.
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from utils.attention.gluon.shared import (
    MINUS_INF,
    clean_blocks,
    inverse_and_lse,
    key_blocks,
    mask_by_last_key,
    mask_scores,
    release,
    rescale,
    tma_load,
    tma_store,
    uniform,
    wait_products,
)


@gluon.jit
def tile_of(t, tiles_m, heads_total, DEALT: gl.constexpr, CAUSAL: gl.constexpr):
    """Tile number -> (row tile, flat head). Dealt tiles are encoded; others run over rows, or longest first."""
    if DEALT:
        return t & 0xFFFF, t >> 16
    elif CAUSAL:
        down = t // heads_total
        return tiles_m - 1 - down, t - down * heads_total
    else:
        head = t // tiles_m
        return t - head * tiles_m, head


@gluon.jit
def first_tile(schedule, schedule_stride, total, DEALT: gl.constexpr):
    """Number of tiles of this program, its first tile, and where it reads the others."""
    program = gl.program_id(0)
    mine = schedule + program * schedule_stride
    if DEALT:
        return uniform(gl.load(mine)), uniform(gl.load(mine + 1)), mine + 2
    else:
        return gl.cdiv(total - program, gl.num_programs(0)), program, mine


@gluon.jit
def split_rows(x):
    """[64, N] accumulator -> rows r and rows r + 8 of each warp, [4, 8, N] each: registers are renamed, not moved."""
    return x.reshape([4, 2, 8, x.shape[1]]).permute([0, 2, 3, 1]).split()


@gluon.jit
def join_rows(a, b):
    return gl.join(a, b).permute([0, 3, 1, 2]).reshape([64, a.shape[2]])


@gluon.jit
def spread_rows(a, b, x):
    """Values of rows r (a) and rows r + 8 (b) over the columns of the accumulator x."""
    x0, x1 = split_rows(x)
    rows: gl.constexpr = gl.SliceLayout(2, x0.type.layout)
    a, _ = gl.broadcast(gl.convert_layout(a, rows)[:, :, None], x0)
    b, _ = gl.broadcast(gl.convert_layout(b, rows)[:, :, None], x1)
    return gl.convert_layout(join_rows(a, b), x.type.layout)


@gluon.jit
def thread_sums(p):
    """Sum over the columns that one thread holds, [4, 8, N] -> [4, 8, 4]: no exchange between threads."""
    return gl.sum(gl.sum(p.reshape([4, 8, p.shape[2] // 8, 4, 2]), 4), 2)


@gluon.jit
def lazy_maximum(m, top, c, MASKED: gl.constexpr):
    """The maximum to use: the old one until the new one is 2^8 above it. Also c * m and the rescale factor."""
    new = gl.where((top - m) * c > 8.0, top, m)
    shifted = new * c
    if MASKED:
        shifted = gl.where(new == MINUS_INF, 0.0, shifted)
        return new, shifted, gl.exp2(m * c - shifted)
    else:
        return new, shifted, gl.exp2((m - new) * c)


@gluon.jit
def half_softmax(s, m, top, total, c, dtype: gl.constexpr, MASKED: gl.constexpr):
    m, shifted, alpha = lazy_maximum(m, top, c, MASKED)
    p = gl.exp2(s * c - shifted[:, :, None])
    sums = thread_sums(p)
    total = total * gl.convert_layout(alpha, gl.SliceLayout(2, sums.type.layout))[:, :, None] + sums
    return p.to(dtype), m, total, alpha


@gluon.jit
def whole_softmax(s, m, total, c, dtype: gl.constexpr, MASKED: gl.constexpr):
    m, shifted, alpha = lazy_maximum(m, gl.maximum(m, gl.max(s, 1)), c, MASKED)
    p = gl.exp2(s * c - shifted[:, None])
    return p.to(dtype), m, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def first_softmax(s, c, dtype: gl.constexpr, HALVES: gl.constexpr, MASKED: gl.constexpr):
    """Softmax of a tile's first block: probabilities and the running state (maxima, sums, factors)."""
    if HALVES:
        s0, s1 = split_rows(s)
        top0 = gl.max(s0, 2)
        top1 = gl.max(s1, 2)
        p0, m0, l0, a0 = half_softmax(
            s0, gl.full_like(top0, MINUS_INF), top0, thread_sums(gl.zeros_like(s0)), c, dtype, MASKED
        )
        p1, m1, l1, a1 = half_softmax(
            s1, gl.full_like(top1, MINUS_INF), top1, thread_sums(gl.zeros_like(s1)), c, dtype, MASKED
        )
        return join_rows(p0, p1), (m0, m1, l0, l1, a0, a1)
    else:
        rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
        m = gl.full([s.shape[0]], MINUS_INF, gl.float32, rows)
        p, m, total, alpha = whole_softmax(s, m, gl.zeros([s.shape[0]], gl.float32, rows), c, dtype, MASKED)
        return p, (m, total, alpha)


@gluon.jit
def start_scores(slot, q, k_ring, scores: gl.constexpr):
    """Hand Q K to the tensor cores: these rows and the keys in `slot`."""
    BLOCK_M: gl.constexpr = q.shape[0]
    BLOCK_D: gl.constexpr = q.shape[1]
    BLOCK_N: gl.constexpr = k_ring.shape[3]
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
    k = k_ring.index(slot).reshape([BLOCK_N, BLOCK_D]).permute([1, 0])
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def start_output(it, o, p, state, v_ring, bars, HALVES: gl.constexpr):
    """Hand P V(i-1) to the tensor cores, added to `o`, which with `halves` is rescaled only here."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    BLOCK_N: gl.constexpr = v_ring.shape[3]
    BLOCK_D: gl.constexpr = v_ring.shape[4]
    V_STAGES: gl.constexpr = v_ring.shape[0]
    slot = (it - 1) % V_STAGES
    mbarrier.wait(v_full.index(slot), ((it - 1) // V_STAGES) & 1)
    if HALVES:
        m0, m1, l0, l1, a0, a1 = state
        o = rescale(o, spread_rows(a0, a1, o))
    return warpgroup_mma(p, v_ring.index(slot).reshape([BLOCK_N, BLOCK_D]), o, is_async=True)


@gluon.jit
def finish_block(
    it,
    more,
    masked,
    s,
    pv,
    state,
    kv,
    bars,
    where,
    c,
    scores: gl.constexpr,
    left: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    TAIL: gl.constexpr,
    HALVES: gl.constexpr,
    mask: gl.constexpr,
):
    """The softmax of block i, from the scores `s` in flight, while P V(i-1), `pv`, is still running."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    row, key, sq, sk, window = where
    dtype: gl.constexpr = kv[0].dtype
    BLOCK_N: gl.constexpr = kv[0].shape[3]
    BLOCK_D: gl.constexpr = kv[0].shape[4]
    STAGES: gl.constexpr = kv[0].shape[0]
    V_STAGES: gl.constexpr = kv[1].shape[0]
    MASKED: gl.constexpr = CAUSAL or WINDOW or TAIL
    slot = it % STAGES
    last_slot = (it - 1) % V_STAGES
    s = wait_products(s, 1, BLOCK_N)
    release(k_empty.index(slot))
    if MASKED:  # noqa: SIM102 (decided by the compiler; the next line for each block)
        if masked:
            s = mask(s, row, key, sq, sk, window, scores, CAUSAL, WINDOW)

    # The wait for the next keys makes a basic block of what stands before it: without it ptxas hoists the wait for
    # P V above the exponentials, and nothing overlaps.
    next_full = k_full.index((it + 1) % STAGES)
    next_phase = ((it + 1) // STAGES) & 1
    if HALVES:
        m0, m1, l0, l1, a0, a1 = state
        s0, s1 = split_rows(s)
        top0 = gl.maximum(m0, gl.max(s0, 2))
        top1 = gl.maximum(m1, gl.max(s1, 2))
        p0, m0, l0, a0 = half_softmax(s0, m0, top0, l0, c, dtype, MASKED)
        mbarrier.wait(next_full, next_phase, pred=more)
        o = wait_products(pv, 0, BLOCK_D)
        release(v_empty.index(last_slot))
        p1, m1, l1, a1 = half_softmax(s1, m1, top1, l1, c, dtype, MASKED)
        return o, gl.convert_layout(join_rows(p0, p1), left), (m0, m1, l0, l1, a0, a1)
    else:
        m, total, alpha = state
        p, m, total, alpha = whole_softmax(s, m, total, c, dtype, MASKED)
        mbarrier.wait(next_full, next_phase, pred=more)
        o = wait_products(pv, 0, BLOCK_D)
        release(v_empty.index(last_slot))
        factor, _ = gl.broadcast(gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None], o)
        return rescale(o, factor), gl.convert_layout(p, left), (m, total, alpha)


@gluon.jit
def step(
    it,
    more,
    masked,
    q,
    o,
    p,
    state,
    kv,
    bars,
    where,
    c,
    scores: gl.constexpr,
    left: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    HALVES: gl.constexpr,
    mask: gl.constexpr,
):
    """One key block i: Q K(i) and P V(i-1) to the tensor cores, then the softmax of block i while P V(i-1) runs.

    CAUSAL, WINDOW: what the mask is where `masked`; both false in a loop over blocks that need none.
    """
    k_ring, v_ring = kv
    s = start_scores(it % k_ring.shape[0], q, k_ring, scores)
    pv = start_output(it, o, p, state, v_ring, bars, HALVES)
    return finish_block(
        it, more, masked, s, pv, state, kv, bars, where, c, scores, left, CAUSAL, WINDOW, False, HALVES, mask
    )


@gluon.jit
def fresh_state(scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The running state of rows that have seen no key, for `halves`."""
    s0, s1 = split_rows(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores))
    m = gl.full_like(gl.max(s0, 2), MINUS_INF)
    total = thread_sums(gl.zeros_like(s0))
    return (m, m, total, total, m, m)


@gluon.jit
def normalizers(state, c, row, HALVES: gl.constexpr):
    """1 / sum and (rows, log-sum-exp) to store, of rows r and rows r + 8 (halves) or of all rows."""
    if HALVES:
        m0, m1, l0, l1, a0, a1 = state
        rows: gl.constexpr = m0.type.layout
        i0, lse0 = inverse_and_lse(m0, gl.convert_layout(gl.sum(l0, 2), rows), c)
        i1, lse1 = inverse_and_lse(m1, gl.convert_layout(gl.sum(l1, 2), rows), c)
        warp = gl.arange(0, 4, gl.SliceLayout(1, rows))[:, None]
        r0 = row + 16 * warp + gl.arange(0, 8, gl.SliceLayout(0, rows))[None, :]
        return (i0, i1), ((r0, lse0), (r0 + 8, lse1))
    else:
        m, total, alpha = state
        inverse, lse = inverse_and_lse(m, total, c)
        return (inverse,), ((row + gl.arange(0, m.shape[0], m.type.layout), lse),)


@gluon.jit
def normalized(o, inverse, HALVES: gl.constexpr):
    if HALVES:
        return o * spread_rows(inverse[0], inverse[1], o)
    else:
        return o * gl.broadcast(gl.convert_layout(inverse[0], gl.SliceLayout(1, o.type.layout))[:, None], o)[0]


@gluon.jit
def producer(
    loads,
    CONSUMERS: gl.constexpr,
    Q_SLOTS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    DEALT: gl.constexpr,
):
    descriptors, rings, bars, shape, schedule = loads
    q_desc, k_desc, v_desc = descriptors
    q_tiles, k_ring, v_ring = rings
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    sq, sk, window, tiles_m, heads_total, heads, group, schedule_stride = shape
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_N: gl.constexpr = k_ring.shape[3]
    STAGES: gl.constexpr = k_ring.shape[0]
    V_STAGES: gl.constexpr = v_ring.shape[0]
    count, t, rest = first_tile(schedule, schedule_stride, tiles_m * heads_total, DEALT)
    it = 0
    for i in range(count):
        t_next = gl.load(rest + i) if DEALT else t + gl.num_programs(0)
        tile, flat = tile_of(t, tiles_m, heads_total, DEALT, CAUSAL)
        row = tile * (BLOCK_M * CONSUMERS)
        batch = flat // heads
        head = flat - batch * heads
        kv_head = head // group
        lo, hi = key_blocks(row, BLOCK_M * CONSUMERS, sq, sk, window, BLOCK_N, CAUSAL, WINDOW)
        q_slot = (i % Q_SLOTS) * CONSUMERS
        q_free = ((i // Q_SLOTS) & 1) ^ 1
        for j in range(hi - lo):
            slot = it % STAGES
            v_slot = it % V_STAGES
            key = (hi - 1 - j) * BLOCK_N
            if j == 0:
                # In the order of need: the first consumer's Q, K, the other consumers' Q, V.
                mbarrier.wait(q_empty.index(q_slot), q_free)
                mbarrier.expect(q_full.index(q_slot), q_desc.block_type.nbytes)
                tma_load(q_desc, [batch, head, row, 0], q_full.index(q_slot), q_tiles.index(q_slot))
            mbarrier.wait(k_empty.index(slot), ((it // STAGES) & 1) ^ 1)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            tma_load(k_desc, [batch, kv_head, key, 0], k_full.index(slot), k_ring.index(slot))
            if j == 0:
                for w in gl.static_range(1, CONSUMERS):
                    mbarrier.wait(q_empty.index(q_slot + w), q_free)
                    mbarrier.expect(q_full.index(q_slot + w), q_desc.block_type.nbytes)
                    tma_load(
                        q_desc, [batch, head, row + w * BLOCK_M, 0], q_full.index(q_slot + w), q_tiles.index(q_slot + w)
                    )
            mbarrier.wait(v_empty.index(v_slot), ((it // V_STAGES) & 1) ^ 1)
            mbarrier.expect(v_full.index(v_slot), v_desc.block_type.nbytes)
            tma_load(v_desc, [batch, kv_head, key, 0], v_full.index(v_slot), v_ring.index(v_slot))
            it += 1
        t = uniform(t_next) if DEALT else t_next


@gluon.jit
def first_block(
    it,
    q,
    k_ring,
    bars,
    where,
    c,
    scores: gl.constexpr,
    left: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    MASKED: gl.constexpr,
    HALVES: gl.constexpr,
    mask: gl.constexpr,
):
    """A tile's first block with nothing beside it: probabilities and the running state."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    row, key, sq, sk, window = where
    BLOCK_N: gl.constexpr = k_ring.shape[3]
    STAGES: gl.constexpr = k_ring.shape[0]
    mbarrier.wait(k_full.index(it % STAGES), (it // STAGES) & 1)
    s = wait_products(start_scores(it % STAGES, q, k_ring, scores), 0, BLOCK_N)
    release(k_empty.index(it % STAGES))
    if MASKED:
        s = mask(s, row, key, sq, sk, window, scores, CAUSAL, WINDOW)
    p, state = first_softmax(s, c, q.dtype, HALVES, MASKED)
    return gl.convert_layout(p, left), state


@gluon.jit
def store_tile(o_desc, where, o_tile, o):
    """Hand rows to TMA to store, through shared memory."""
    o_tile.reshape([o.shape[0], o.shape[1]]).store(o.to(o_tile.dtype))
    fence_async_shared()
    tma_store(o_desc, where, o_tile)


@gluon.jit
def store_lse(lse_ptr, lses, flat, sq):
    for part in gl.static_range(len(lses)):
        rows, lse = lses[part]
        gl.store(lse_ptr + flat.to(gl.int64) * sq + rows, lse, mask=rows < sq)


@gluon.jit
def consumer(
    work,
    W: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    TAIL: gl.constexpr,
    LSE: gl.constexpr,
    DEALT: gl.constexpr,
    HALVES: gl.constexpr,
    O_IN_Q: gl.constexpr,
    OWN_KEYS: gl.constexpr,
    SPLIT: gl.constexpr,
    ALIGNED: gl.constexpr,
):
    o_desc, lse_ptr, rings, o_tiles, bars, shape, schedule, c = work
    q_tiles, k_ring, v_ring = rings
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    sq, sk, window, tiles_m, heads_total, heads, group, schedule_stride = shape
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_D: gl.constexpr = q_tiles.shape[4]
    BLOCK_N: gl.constexpr = k_ring.shape[3]
    STAGES: gl.constexpr = k_ring.shape[0]
    V_STAGES: gl.constexpr = v_ring.shape[0]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    MASKED: gl.constexpr = CAUSAL or WINDOW or TAIL
    # The diagonal of 64 aligned rows lies in their last block, which is walked first: the loop needs no mask.
    LOOP_CAUSAL: gl.constexpr = CAUSAL and not ALIGNED
    mask: gl.constexpr = mask_by_last_key if OWN_KEYS else mask_scores

    q_tile = q_tiles.index(W)
    q = q_tile.reshape([BLOCK_M, BLOCK_D])
    o_tile = o_tiles.index(W)
    count, t, rest = first_tile(schedule, schedule_stride, tiles_m * heads_total, DEALT)
    it = 0
    for i in range(count):
        t_next = gl.load(rest + i) if DEALT else t + gl.num_programs(0)
        tile, flat = tile_of(t, tiles_m, heads_total, DEALT, CAUSAL)
        first_row = tile * (BLOCK_M * CONSUMERS)
        row = first_row + W * BLOCK_M
        lo, hi = key_blocks(first_row, BLOCK_M * CONSUMERS, sq, sk, window, BLOCK_N, CAUSAL, WINDOW)
        if OWN_KEYS:
            # The tile's last blocks may lie behind the last key of this consumer's rows; rows that do not exist need
            # none. It gives those slots back unused, but not before they are full: until then the others may still
            # owe the barrier their arrival for the slot's last use.
            own_lo, own_hi = key_blocks(row, BLOCK_M, sq, sk, window, BLOCK_N, CAUSAL, WINDOW)
            own_hi = gl.where(row < sq, own_hi, lo + 1)
            for _skipped in range(hi - own_hi):
                mbarrier.wait(k_full.index(it % STAGES), (it // STAGES) & 1)
                release(k_empty.index(it % STAGES))
                mbarrier.wait(v_full.index(it % V_STAGES), (it // V_STAGES) & 1)
                release(v_empty.index(it % V_STAGES))
                it += 1
            hi = own_hi
        n = hi - lo
        right, edge = clean_blocks(row, BLOCK_M, lo, hi, sq, sk, window, BLOCK_N, CAUSAL, WINDOW)

        mbarrier.wait(q_full.index(W), i & 1)
        p, state = first_block(
            it,
            q,
            k_ring,
            bars,
            (row, (hi - 1) * BLOCK_N, sq, sk, window),
            c,
            scores,
            left,
            CAUSAL,
            WINDOW,
            MASKED,
            HALVES,
            mask,
        )
        o = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, output)
        it += 1
        mbarrier.wait(k_full.index(it % STAGES), (it // STAGES) & 1, pred=n > 1)
        kv = (k_ring, v_ring)
        if OWN_KEYS and LOOP_CAUSAL and not WINDOW:
            key = (hi - 1) * BLOCK_N
            # The first row sees keys up to this one: blocks that end behind it are masked.
            seen = gl.minimum(row + sk - sq, sk - 1)
            if SPLIT:
                while (key > 0) & (key - 1 > seen):
                    key -= BLOCK_N
                    o, p, state = step(
                        it,
                        key > 0,
                        True,
                        q,
                        o,
                        p,
                        state,
                        kv,
                        bars,
                        (row, key, sq, sk, window),
                        c,
                        scores,
                        left,
                        True,
                        False,
                        HALVES,
                        mask,
                    )
                    it += 1
            while key > 0:
                key -= BLOCK_N
                o, p, state = step(
                    it,
                    key > 0,
                    key + (BLOCK_N - 1) > seen,
                    q,
                    o,
                    p,
                    state,
                    kv,
                    bars,
                    (row, key, sq, sk, window),
                    c,
                    scores,
                    left,
                    not SPLIT,
                    False,
                    HALVES,
                    mask,
                )
                it += 1
        else:
            for j in range(1, n):
                o, p, state = step(
                    it,
                    j + 1 < n,
                    (j < right) | (j >= edge),
                    q,
                    o,
                    p,
                    state,
                    kv,
                    bars,
                    (row, (hi - 1 - j) * BLOCK_N, sq, sk, window),
                    c,
                    scores,
                    left,
                    LOOP_CAUSAL,
                    WINDOW,
                    HALVES,
                    mask,
                )
                it += 1
        if not O_IN_Q:
            release(q_empty.index(W))

        pv = start_output(it, o, p, state, v_ring, bars, HALVES)
        inverse, lses = normalizers(state, c, row, HALVES)
        if LSE:
            store_lse(lse_ptr, lses, flat, sq)
        o = normalized(wait_products(pv, 0, BLOCK_D), inverse, HALVES)
        release(v_empty.index((it - 1) % V_STAGES))
        if not O_IN_Q:
            tma.store_wait(0)  # the last tile's rows have left the buffer
        batch = flat // heads
        store_tile(o_desc, [batch, flat - batch * heads, row, 0], o_tile, o)
        if O_IN_Q:
            tma.store_wait(0)
            release(q_empty.index(W))
        t = uniform(t_next) if DEALT else t_next
    tma.store_wait(0)


@gluon.jit
def consumer_ahead(
    work, W: gl.constexpr, CONSUMERS: gl.constexpr, TAIL: gl.constexpr, LSE: gl.constexpr, O_IN_Q: gl.constexpr
):
    """`consumer` for full attention with two tiles of Q: the key blocks of all tiles are one stream.

    A tile's last P V runs beside the softmax of the next tile's first block, so each tile has two blocks at least.
    """
    o_desc, lse_ptr, rings, o_tiles, bars, shape, schedule, c = work
    q_tiles, k_ring, v_ring = rings
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    sq, sk, window, tiles_m, heads_total, heads, group, schedule_stride = shape
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_D: gl.constexpr = q_tiles.shape[4]
    BLOCK_N: gl.constexpr = k_ring.shape[3]
    STAGES: gl.constexpr = k_ring.shape[0]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, output, 2)

    kv = (k_ring, v_ring)
    count, t, rest = first_tile(schedule, schedule_stride, tiles_m * heads_total, False)
    n = gl.cdiv(sk, BLOCK_N)
    it = gl.to_tensor(0)
    keys = (it, (n - 1) * BLOCK_N, sq, sk, window)  # the last keys' mask does not ask for the row
    mbarrier.wait(q_full.index(W), 0)
    p, state = first_block(
        it,
        q_tiles.index(W).reshape([BLOCK_M, BLOCK_D]),
        k_ring,
        bars,
        keys,
        c,
        scores,
        left,
        False,
        False,
        TAIL,
        True,
        mask_scores,
    )
    it += 1
    mbarrier.wait(k_full.index(it % STAGES), (it // STAGES) & 1)
    for i in range(count):
        more = i + 1 < count
        tile, flat = tile_of(t, tiles_m, heads_total, False, False)
        row = (tile * CONSUMERS + W) * BLOCK_M
        batch = flat // heads
        q_slot = (i % 2) * CONSUMERS + W
        other_slot = ((i + 1) % 2) * CONSUMERS + W
        q = q_tiles.index(q_slot).reshape([BLOCK_M, BLOCK_D])
        o = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, output)
        if O_IN_Q:
            # The second block by itself: the last tile's rows leave its Q's slot while the products run.
            s = start_scores(it % STAGES, q, k_ring, scores)
            pv = start_output(it, o, p, state, v_ring, bars, True)
            if i > 0:
                tma.store_wait(0)
                release(q_empty.index(other_slot))
            o, p, state = finish_block(
                it,
                (n > 2) | more,
                False,
                s,
                pv,
                state,
                kv,
                bars,
                keys,
                c,
                scores,
                left,
                False,
                False,
                False,
                True,
                mask_scores,
            )
            it += 1
        for j in range(2 if O_IN_Q else 1, n):
            o, p, state = step(
                it,
                (j + 1 < n) | more,
                False,
                q,
                o,
                p,
                state,
                kv,
                bars,
                keys,
                c,
                scores,
                left,
                False,
                False,
                True,
                mask_scores,
            )
            it += 1
        if not O_IN_Q:
            release(q_empty.index(q_slot))

        # Behind the last tile the next block is one that still lies there, and nobody asks for the result.
        mbarrier.wait(q_full.index(other_slot), ((i + 1) // 2) & 1, pred=more)
        next_q = q_tiles.index(gl.where(more, other_slot, q_slot)).reshape([BLOCK_M, BLOCK_D])
        s = start_scores(gl.where(more, it, it - 1) % STAGES, next_q, k_ring, scores)
        pv = start_output(it, o, p, state, v_ring, bars, True)
        inverse, lses = normalizers(state, c, row, True)
        if LSE:
            store_lse(lse_ptr, lses, flat, sq)
        o, p, state = finish_block(
            it,
            more,
            True,
            s,
            pv,
            fresh_state(scores, BLOCK_M, BLOCK_N),
            kv,
            bars,
            keys,
            c,
            scores,
            left,
            False,
            False,
            TAIL,
            True,
            mask_scores,
        )
        it += 1
        if not O_IN_Q:
            tma.store_wait(0)  # the last tile's rows have left the buffer
        store_tile(
            o_desc,
            [batch, flat - batch * heads, row, 0],
            o_tiles.index(q_slot if O_IN_Q else W),
            normalized(o, inverse, True),
        )
        t += gl.num_programs(0)
    tma.store_wait(0)


# One kernel for all sizes: without this, each multiple of 16 and each 1 would be compiled for itself.
@gluon.jit(do_not_specialize=["sq", "sk", "window", "tiles_m", "heads_total", "heads", "group", "schedule_stride"])
def attention_step5(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse_ptr,
    schedule,
    sq,
    sk,
    window,
    tiles_m,
    heads_total,
    heads,
    group,
    schedule_stride,
    c,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    Q_SLOTS: gl.constexpr,
    REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    TAIL: gl.constexpr,
    LSE: gl.constexpr,
    DEALT: gl.constexpr,
    HALVES: gl.constexpr,
    O_IN_Q: gl.constexpr,
    OWN_KEYS: gl.constexpr,
    SPLIT: gl.constexpr,
    ALIGNED: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(dtype, [Q_SLOTS * CONSUMERS, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    if O_IN_Q:
        o_tiles = q_tiles
    else:
        o_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, BLOCK_M, BLOCK_D], o_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS * CONSUMERS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_SLOTS * CONSUMERS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], barrier)
    for i in gl.static_range(Q_SLOTS * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=128)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=128 * CONSUMERS)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=128 * CONSUMERS)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    rings = (q_tiles, k_ring, v_ring)
    shape = (sq, sk, window, tiles_m, heads_total, heads, group, schedule_stride)

    loads = ((q_desc, k_desc, v_desc), rings, bars, shape, schedule)
    work = (o_desc, lse_ptr, rings, o_tiles, bars, shape, schedule, c)
    if Q_SLOTS == 2:
        gl.static_assert(CONSUMERS == 2 and HALVES and not (CAUSAL or WINDOW or OWN_KEYS))
        gl.warp_specialize(
            [
                (consumer_ahead, (work, 0, 2, TAIL, LSE, O_IN_Q)),
                (consumer_ahead, (work, 1, 2, TAIL, LSE, O_IN_Q)),
                (producer, (loads, 2, 2, CAUSAL, WINDOW, DEALT)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (work, 0, 2, CAUSAL, WINDOW, TAIL, LSE, DEALT, HALVES, O_IN_Q, OWN_KEYS, SPLIT, ALIGNED)),
                (consumer, (work, 1, 2, CAUSAL, WINDOW, TAIL, LSE, DEALT, HALVES, O_IN_Q, OWN_KEYS, SPLIT, ALIGNED)),
                (producer, (loads, 2, Q_SLOTS, CAUSAL, WINDOW, DEALT)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (consumer, (work, 0, 3, CAUSAL, WINDOW, TAIL, LSE, DEALT, HALVES, O_IN_Q, OWN_KEYS, SPLIT, ALIGNED)),
                (consumer, (work, 1, 3, CAUSAL, WINDOW, TAIL, LSE, DEALT, HALVES, O_IN_Q, OWN_KEYS, SPLIT, ALIGNED)),
                (consumer, (work, 2, 3, CAUSAL, WINDOW, TAIL, LSE, DEALT, HALVES, O_IN_Q, OWN_KEYS, SPLIT, ALIGNED)),
                (producer, (loads, 3, Q_SLOTS, CAUSAL, WINDOW, DEALT)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 32],
        )
    else:
        gl.static_assert(CONSUMERS == 4)
        gl.warp_specialize(
            [
                (consumer, (work, 0, 4, CAUSAL, WINDOW, TAIL, LSE, DEALT, HALVES, O_IN_Q, OWN_KEYS, SPLIT, ALIGNED)),
                (consumer, (work, 1, 4, CAUSAL, WINDOW, TAIL, LSE, DEALT, HALVES, O_IN_Q, OWN_KEYS, SPLIT, ALIGNED)),
                (consumer, (work, 2, 4, CAUSAL, WINDOW, TAIL, LSE, DEALT, HALVES, O_IN_Q, OWN_KEYS, SPLIT, ALIGNED)),
                (consumer, (work, 3, 4, CAUSAL, WINDOW, TAIL, LSE, DEALT, HALVES, O_IN_Q, OWN_KEYS, SPLIT, ALIGNED)),
                (producer, (loads, 4, Q_SLOTS, CAUSAL, WINDOW, DEALT)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )
