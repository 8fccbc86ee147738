"""What the roles of `rows.py` share, and how a head ends there: sums, masks of V, and the output's way out by TMA."""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from utils.attention.gluon.decode.blocks import clean_values, mask_block
from utils.attention.gluon.decode.merge import Results, inverse
from utils.attention.gluon.decode.work import Cursor
from utils.attention.gluon.pipeline import Ring
from utils.attention.gluon.shared import aggregate, meet, thread_barrier, tma_store

CLEANED = gl.constexpr(9)  # named barrier of two consumers: V's rows behind the last key have been replaced by zeros


@aggregate
class Share:
    """One program's blocks, first and behind the last in the long row, and what its roles share."""

    results: Results
    begin: gl.tensor
    end: gl.tensor
    start: Cursor  # the cursor at block `begin`
    q: Ring
    k: Ring
    v: Ring
    c: gl.tensor
    scales_ptr: gl.tensor  # of K, then of V, a head of keys each; read only where the cache is in fp8
    powers: gl.tensor  # by which the queries' rows were divided, where an fp8 cache's products are in fp16
    PLAN: gl.constexpr
    CASE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, results, begin, end, start, q, k, v, c, scales_ptr, powers, PLAN, CASE):
        self.results = results
        self.begin = begin
        self.end = end
        self.start = start
        self.q = q
        self.k = k
        self.v = v
        self.c = c
        self.scales_ptr = scales_ptr
        self.powers = powers
        self.PLAN = gl.constexpr(PLAN)
        self.CASE = gl.constexpr(CASE)

    @gluon.jit
    def scaled(self, kv_head, powers):
        """This share for one head of an fp8 cache, whose scores have a scale of their own; and the scales of K and V."""
        heads = self.results.cache.heads // self.results.tiles
        k_scale = gl.load(self.scales_ptr + kv_head)
        v_scale = gl.load(self.scales_ptr + heads + kv_head)
        c = self.c * k_scale
        share = Share(
            self.results,
            self.begin,
            self.end,
            self.start,
            self.q,
            self.k,
            self.v,
            c,
            self.scales_ptr,
            powers,
            self.PLAN,
            self.CASE,
        )
        return share, k_scale, v_scale

    @gluon.jit
    def mask(self, s, block, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
        """The scores of a block, minus infinity where a row may not look: what step 5's functions call."""
        tile = block.cursor.head % self.results.tiles
        return mask_block(s, self.results.cache, block.cursor, block.j, tile, block.row, 1)


@aggregate
class Block:
    """One block of keys for one consumer: its number in the K and V rings, its number in the head, its first row."""

    number: gl.tensor
    cursor: Cursor
    j: gl.tensor
    row: gl.tensor

    @gluon.constexpr_function
    def __init__(self, number, cursor, j, row):
        self.number = number
        self.cursor = cursor
        self.j = j
        self.row = row


@gluon.jit
def queries_in_fp16(q, target, layout: gl.constexpr):
    """Store 64 rows of queries as fp16, each divided by a power of two near its largest number; the powers of the rows.

    Bytes become fp16 in one instruction for two numbers, bf16 in four; queries in bf16 may be larger than fp16 has numbers.
    """
    BLOCK_D: gl.constexpr = q.shape[1]
    lanes: gl.constexpr = BLOCK_D // 8
    own: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    numbers = q.load(own).to(gl.float32)
    largest = gl.max(gl.abs(numbers), 1)
    power = (largest.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    power = gl.minimum(gl.maximum(power, 1.1754943508222875e-38), 8.507059173023462e37)  # 2^-126 to 2^126
    target.store((numbers / power[:, None]).to(gl.float16))
    # The threads wrote through the generic proxy, wgmma reads through the async proxy; and other warps' rows are read, too.
    fence_async_shared()
    thread_barrier()
    return gl.convert_layout(power, gl.SliceLayout(1, layout))


# Threads t = 0 .. 3 of a row hold word t of the groups 0 .. 3, and then hold group t: the first exchange swaps bit 0 of
# group and thread, the second one bit 1.
EXCHANGE = gl.constexpr(
    "{ .reg .pred odd, high; .reg .b32 t, w0, w1, w2, w3; mov.u32 t, %laneid; "
    "and.b32 w0, t, 1; setp.ne.u32 odd, w0, 0; and.b32 w0, t, 2; setp.ne.u32 high, w0, 0; "
    "selp.b32 t, $4, $5, odd; shfl.sync.bfly.b32 t, t, 1, 31, 0xffffffff; "
    "selp.b32 w0, t, $4, odd; selp.b32 w1, $5, t, odd; "
    "selp.b32 t, $6, $7, odd; shfl.sync.bfly.b32 t, t, 1, 31, 0xffffffff; "
    "selp.b32 w2, t, $6, odd; selp.b32 w3, $7, t, odd; "
    "selp.b32 t, w0, w2, high; shfl.sync.bfly.b32 t, t, 2, 31, 0xffffffff; "
    "selp.b32 $0, t, w0, high; selp.b32 $2, w2, t, high; "
    "selp.b32 t, w1, w3, high; shfl.sync.bfly.b32 t, t, 2, 31, 0xffffffff; "
    "selp.b32 $1, t, w1, high; selp.b32 $3, w3, t, high; }"
)


@gluon.constexpr_function
def four_groups(PAIRS):
    """Layout of words [64, PAIRS] as a product leaves them, a thread's words of four groups of four one after another."""
    registers = [[0, 4], [0, 8], [8, 0]] + [[0, d] for d in (16, 32, 64) if d < PAIRS]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, PAIRS])


@gluon.jit
def store_head(results, cursor, o, row):
    """Store the output of a head that this program has computed whole, [64, BLOCK_D]; row: the tile's first."""
    numbers = o.to(results.out_ptr.dtype.element_ty)
    if results.cache.PLAN.wide:
        # Two neighbours as one word; then the four threads of a row exchange words, four by four.
        PAIRS: gl.constexpr = o.shape[1] // 2
        low, high = numbers.to(gl.int16, bitcast=True).reshape([64, PAIRS, 2]).split()
        words = (low.to(gl.int32) & 0xFFFF) | (high.to(gl.int32) << 16)
        words = gl.convert_layout(words, four_groups(PAIRS)).reshape([64, PAIRS // 16, 4, 4])
        words = gl.inline_asm_elementwise(
            EXCHANGE, "=&r,=&r,=&r,=&r,r,r,r,r", [words], dtype=gl.int32, is_pure=True, pack=4
        )
        words = words.permute([0, 1, 3, 2]).reshape([64, PAIRS])
        pairs = gl.join((words & 0xFFFF).to(gl.int16), (words >> 16).to(gl.int16)).reshape([64, 2 * PAIRS])
        results.store_whole(cursor, pairs.to(numbers.dtype, bitcast=True), row, 0)
    else:
        results.store_whole(cursor, numbers, row, 0)


@gluon.jit
def store_head_by_tma(results, cursor, o_desc, tile, rows, o, ROW: gl.constexpr):
    """Hand the output of a head, query rows ROW .. ROW + 63 of its tile, to TMA, which leaves out rows that are none.

    tile, rows: the same shared memory, as the box of the copy and as [64, BLOCK_D].
    """
    PLAN: gl.constexpr = results.cache.PLAN
    rows.store(o.to(tile.dtype))
    # The threads wrote through the generic proxy, TMA reads through the async proxy: without the fence it may read
    # what was there before.
    fence_async_shared()
    query = (cursor.head % results.tiles) * PLAN.queries
    tma_store(o_desc, [cursor.b, cursor.head // results.tiles, ROW // PLAN.queries, query, 0], tile)


@gluon.jit
def row_sums(state, row):
    """Row numbers, maximum in use and sum: a tuple with one such triple, or with two where a warp's rows are halved."""
    if len(state) == 2:
        upper, lower = state
        layout: gl.constexpr = upper.maximum.type.layout
        warp = gl.arange(0, 4, gl.SliceLayout(1, layout))[:, None]
        numbers = row + 16 * warp + gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :]
        total0 = gl.convert_layout(gl.sum(upper.total, 2), layout)
        total1 = gl.convert_layout(gl.sum(lower.total, 2), layout)
        return (numbers, upper.maximum, total0), (numbers + 8, lower.maximum, total1)
    else:
        rows = state[0]
        numbers = row + gl.arange(0, rows.maximum.shape[0], rows.maximum.type.layout)
        return ((numbers, rows.maximum, rows.total),)


@gluon.jit
def inverses(sums):
    """1 / sum of each triple of `row_sums`."""
    if len(sums) == 2:
        return inverse(sums[0][2]), inverse(sums[1][2])
    else:
        return (inverse(sums[0][2]),)


@gluon.jit
def clean_tile(share, block, W: gl.constexpr):
    """Replace the values behind the last key by zeros before any consumer multiplies them."""
    PLAN: gl.constexpr = share.PLAN
    share.v.wait_full(block.number)
    if W == 0:
        tile = share.v.tiles.index(share.v.slot(block.number))
        clean_values(tile, block.cursor, block.j, PLAN.block_n, PLAN.block_d)
        # Zeros stored by threads, read by wgmma through the async proxy: without the fence it may read what was there.
        fence_async_shared()
        if PLAN.consumers == 1:
            thread_barrier()  # the other warps' zeros
    if PLAN.consumers == 2:
        # Without it the other consumer could multiply what is not a number. A named barrier, since where heads are one block
        # long one consumer may be some heads ahead, and a wait for an mbarrier's parity cannot tell a time from the next but one.
        meet(CLEANED, 256)
