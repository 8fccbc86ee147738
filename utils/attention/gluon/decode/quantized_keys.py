"""The decode kernel for an fp8 (e4m3) cache: keys are the rows of the products, and their bytes become left operands.

The left operand of a wgmma may come from registers. So a warp reads the bytes of K and V from shared memory and converts
them in registers, and the tensor cores take them from there: nothing is stored a second time. The products are
S^T = K Q^T and O^T = V^T P^T, as in `keys.py`.

    part        what                                                    head dim 64     128            256
    columns     heads of the group x new tokens; more: tiles            8, 16, 64       8, 16, 64      8, 16, 32
    block       keys                                                    128; 64 with 64 columns        64
    programs    2 for each SM: one loads and converts while the other waits for products or warps
    ring        blocks of K and V, as bytes                             6               3 or 4         3 or 2

On an H200, with one new token: 1.57 to 1.87 times as fast as a bf16 cache of 268 MB and more, 1.06 to 1.48 times below.

The layouts make the loads wide. The columns d of K may be multiplied in any order, if Q has the same order: a thread takes
16 neighbouring bytes of K, and Q is stored to shared memory in the order of these bytes. V's columns are rows of the output,
which may come in any order, too: a thread takes d / 32 neighbours, and stores each at its place.

All products are in fp16, which holds every e4m3 number exactly. A row of queries in bf16 is divided by a power of two near
its largest number, so that fp16 holds it; its scores are multiplied by this power and by K's scale. A nan stays a nan.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from utils.attention.gluon.decode.blocks import (
    fill_ring,
    first_blocks,
    load_block,
    load_queries,
    mask_block,
    needs_mask,
    page_numbers,
)
from utils.attention.gluon.decode.keys import allocate_probabilities, softmax, thread_sums
from utils.attention.gluon.shared import MINUS_INF, accumulator, left_operand, thread_barrier

# Convert four e4m3 numbers in one register to four fp16 numbers in two registers, exactly.
CONVERT = gl.constexpr(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)


@gluon.constexpr_function
def powers(begin, end):
    """Return the powers of two from begin, a power of two, up to below end."""
    found = []
    while begin < end:
        found.append(begin)
        begin *= 2
    return found


@gluon.constexpr_function
def key_layout(BLOCK_N, BLOCK_D):
    """Return the layout of K's bytes [keys, d]: a thread reads 16 neighbours at once, in the rows of its left operand.

    Four threads share a row. Each takes 32 bytes of 128 (16 of 64), so that eight threads, which read shared memory together,
    read from different banks.
    """
    wide = 32 if BLOCK_D >= 128 else 16
    registers = [[0, d] for d in (1, 2, 4, 8, *powers(16, wide), *powers(128, BLOCK_D))]
    registers += [[8, 0]] + [[key, 0] for key in powers(64, BLOCK_N)]
    lanes = [[0, wide], [0, 2 * wide], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [BLOCK_N, BLOCK_D])


@gluon.constexpr_function
def value_layout(BLOCK_N, BLOCK_D, PAIRS):
    """Return the layout of V's bytes [keys, d]: a thread reads d / 32 neighbours at once. PAIRS: two keys stand together."""
    each = BLOCK_D // 32
    own = [[0, d] for d in powers(1, each)]
    registers = ([[1, 0], *own] if PAIRS else [*own, [1, 0]]) + [[8, 0]] + [[key, 0] for key in powers(16, BLOCK_N)]
    lanes = [[2, 0], [4, 0]] + [[0, d] for d in (each, 2 * each, 4 * each)]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 8 * each], [0, 16 * each]], [], [BLOCK_N, BLOCK_D])


@gluon.jit
def mix_columns(x, BLOCK_D: gl.constexpr):
    """Return [rows, BLOCK_D] in the order of `key_layout`: a step along d takes four neighbours of each of four threads."""
    ROWS: gl.constexpr = x.shape[0]
    if BLOCK_D == 64:
        parts = x.reshape([ROWS, 4, 4, 2, 2]).permute([0, 2, 3, 1, 4])
    else:
        parts = x.reshape([ROWS, BLOCK_D // 128, 4, 2, 4, 2, 2]).permute([0, 1, 3, 4, 5, 2, 6])
    return parts.reshape([ROWS, BLOCK_D])


@gluon.jit
def to_fp16(e4m3):
    """Return the e4m3 numbers of bytes in fp16. This is exact, and nan stays nan."""
    return gl.inline_asm_elementwise(CONVERT, "=r,=r,r", [e4m3], dtype=gl.float16, is_pure=True, pack=4)


@gluon.jit
def keys_operand(tile, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, COLUMNS: gl.constexpr):
    """Return a tile of K as the left operand of K Q^T. After the conversion registers are renamed, and nothing moves."""
    layout: gl.constexpr = key_layout(BLOCK_N, BLOCK_D)
    keys = to_fp16(tile.reshape([BLOCK_N, BLOCK_D]).load(layout))
    return gl.convert_layout(mix_columns(keys, BLOCK_D), left_operand(COLUMNS))


@gluon.jit
def values_operand(tile, cursor, j, PLAN: gl.constexpr):
    """Return a tile of V as the left operand of V^T P^T. Values behind the last key become zero: zero times nan is nan."""
    BLOCK_N: gl.constexpr = PLAN.block_n
    BLOCK_D: gl.constexpr = PLAN.block_d
    layout: gl.constexpr = value_layout(BLOCK_N, BLOCK_D, False)
    values = tile.reshape([BLOCK_N, BLOCK_D]).load(layout)
    key = (cursor.first + j) * BLOCK_N
    if key + BLOCK_N > cursor.length:
        keys = key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
        values = gl.where((keys < cursor.length)[:, None], values, gl.zeros_like(values))
    # A register of the operand has two neighbouring keys of one column d.
    pairs = to_fp16(gl.convert_layout(values, value_layout(BLOCK_N, BLOCK_D, True)))
    rows = pairs.permute([1, 0]).reshape([4, 8, BLOCK_D // 64, 2, BLOCK_N]).permute([2, 0, 3, 1, 4])
    return gl.convert_layout(rows.reshape([BLOCK_D, BLOCK_N]), left_operand(PLAN.columns))


@gluon.jit
def sort_rows(o):
    """Return the output O^T [d, columns] with its rows in the order of d, after the order of `values_operand`."""
    BLOCK_D: gl.constexpr = o.shape[0]
    rows = o.reshape([BLOCK_D // 64, 4, 2, 8, o.shape[1]]).permute([1, 3, 0, 2, 4])
    return rows.reshape([BLOCK_D, o.shape[1]])


@gluon.jit
def store_queries(raw, target, PLAN: gl.constexpr):
    """Divide each row of a tile of queries by a power of two, store it as fp16 in the order of K, and return the powers."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    q = raw.reshape([PLAN.columns, PLAN.block_d]).load(layout).to(gl.float32)
    largest = gl.max(gl.abs(q), 1)
    power = (largest.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    power = gl.minimum(gl.maximum(power, 1.1754943508222875e-38), 8.507059173023462e37)  # 2^-126 to 2^126
    target.store(mix_columns((q / power[:, None]).to(gl.float16), PLAN.block_d))
    return power


@gluon.jit
def attend_fp8(results, q_desc, k_desc, v_desc, scales_ptr):
    """Attend to a program's share of the blocks of all heads: load, convert, multiply, and store each head or its part."""
    cache = results.cache
    PLAN: gl.constexpr = cache.PLAN
    BLOCK_N: gl.constexpr = PLAN.block_n
    BLOCK_D: gl.constexpr = PLAN.block_d
    COLUMNS: gl.constexpr = PLAN.columns
    SLOTS: gl.constexpr = PLAN.slots
    layout: gl.constexpr = accumulator(COLUMNS)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    cursor, count = cache.start()
    if count > 0:
        blocks, ahead = first_blocks(cache, cursor)
        ring, full, q_raw = fill_ring(cache, (q_desc, k_desc, v_desc), blocks, count, 1)
        numbers = page_numbers(cache, ahead)  # pages of the next block to load
        q_tile = gl.allocate_shared_memory(gl.float16, [COLUMNS, BLOCK_D], gl.NVMMASharedLayout(128, 16, rank=2))
        p_tile = allocate_probabilities(gl.float16, PLAN)

        done = gl.to_tensor(0)
        piece = gl.to_tensor(0)
        while done < count:
            n = gl.minimum(cursor.blocks - cursor.j, count - done)
            following = cache.advance(cursor.last_block())
            mbarrier.wait(full.index(SLOTS), piece & 1)  # the queries have arrived
            power = store_queries(q_raw.index(0), q_tile, PLAN)
            # wgmma reads these queries through the async proxy, and TMA writes the next queries. Without the fence and the barrier,
            # wgmma may read the last queries, and TMA may overtake the loads of a slow warp.
            fence_async_shared()
            thread_barrier()
            load_queries(q_desc, cache, following, q_raw.index(0), full.index(SLOTS), done + n < count)
            factor_s = gl.convert_layout(power, columns) * gl.load(scales_ptr + cursor.head)
            v_scale = gl.load(scales_ptr + cache.heads + cursor.head)

            m = gl.full([COLUMNS], MINUS_INF, gl.float32, columns)
            o = gl.zeros([BLOCK_D, COLUMNS], gl.float32, layout)
            zero = gl.zeros([BLOCK_N, COLUMNS], gl.float32, layout)
            sums = thread_sums(zero)
            for k in range(n):
                j = cursor.j + k
                i = done + k
                slot = 2 * i % SLOTS
                phase = (2 * i // SLOTS) & 1
                mbarrier.wait(full.index(slot), phase)  # K has arrived
                keys = keys_operand(ring.index(slot), BLOCK_N, BLOCK_D, COLUMNS)
                s = warpgroup_mma(keys, q_tile.permute([1, 0]), zero, use_acc=False, is_async=True)
                mbarrier.wait(full.index(slot + 1), phase)  # V has arrived
                values = values_operand(ring.index(slot + 1), cursor, j, PLAN)
                # All warps have read K and V into registers, so TMA may overwrite them. Without the fence it may overtake the
                # loads, and without the barrier a slow warp.
                fence_async_shared()
                thread_barrier()
                more = i + SLOTS // 2 < count
                load_block(k_desc, cache, ahead, numbers, ring.index(slot), full.index(slot), more)
                load_block(v_desc, cache, ahead, numbers, ring.index(slot + 1), full.index(slot + 1), more)
                ahead = cache.advance(ahead)
                numbers = page_numbers(cache, ahead)
                s = warpgroup_mma_wait(0, [s]) * factor_s[None, :]
                if needs_mask(cache, cursor, j):
                    s = mask_block(s, cache, cursor, j, 0)
                p, m, factor, sums = softmax(s, m, sums, results.cache.c)
                p_tile.permute([1, 0]).store(p.to(gl.float16))
                o = o * factor[None, :]
                # Threads store P and wgmma reads through the async proxy: without the fence it may read the last P, and without
                # the barrier the rows of slower warps would be missing.
                fence_async_shared()
                thread_barrier()
                o = warpgroup_mma(values, p_tile.permute([1, 0]), o, is_async=True)
                # The next store of P comes after the next barrier, when all warps have waited here.
                o = warpgroup_mma_wait(0, [o])

            total = gl.convert_layout(gl.sum(gl.sum(sums, 1), 0), columns)
            rows = ((gl.arange(0, COLUMNS, columns), m, total),)
            results.store(cursor, n, sort_rows(o * v_scale), rows, 1)
            done += n
            piece += 1
            cursor = cache.advance(cursor.last_block())
            thread_barrier()  # all warps have multiplied these queries: without it the next queries could overwrite them
