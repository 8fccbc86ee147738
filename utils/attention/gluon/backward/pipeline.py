"""Common parts of the backward kernels: sizes and masks, rings of tiles with statistics, a block's tiles, and the producer."""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from utils.attention.gluon.intervals import clean_interval, row_bounds, tile_entry
from utils.attention.gluon.shared import aggregate, meet, pass_by, tma_load, zero_columns
from utils.kernels.early_launch import wait_for_launch_before

LOG2_E = gl.constexpr(1.4426950408889634)
SLOTS = gl.constexpr(2)  # slots in the rings of Q and dO
NOBODY = gl.constexpr(1 << 30)  # the first query for a key behind the end: no query has this number
# `do_not_specialize` makes one kernel for all sizes: without it, sizes of 1 and multiples of 16 would have further kernels.
SIZES = ["sq", "sk", "back", "ahead", "heads", "kv_heads", "blocks_n", "section", "total", "whole", "pieces"]
SIZES += ["head_dim", "eighths", "width", "for_parts"]
SIZES += [f"{tensor}_{stride}" for tensor in ("o", "do") for stride in ("batch", "head", "row")]


@aggregate
class Sizes:
    """Sizes and mask of the problem: they say which tiles of queries see a block of keys.

    A query sees the keys from `back` before its position to `ahead` after it. The last query has the position of the last key.
    With PLAN.mask "packed", `back` is the table of `intervals.py`.
    """

    sq: gl.tensor
    sk: gl.tensor
    back: gl.tensor
    ahead: gl.tensor
    heads: gl.tensor
    kv_heads: gl.tensor
    group: gl.tensor  # query heads that share a head of keys
    tiles_m: gl.tensor  # tiles of queries of one head
    PLAN: gl.constexpr

    @gluon.jit
    def tiles_of(self, key):
        """Return the tiles of queries [lo, hi) that see some of the keys key .. key + BLOCK_N - 1; they may be none."""
        BLOCK_M: gl.constexpr = self.PLAN.block_m
        shift = self.sk - self.sq
        last = gl.minimum(key + self.PLAN.block_n, self.sk) - 1
        lo = gl.maximum(key - self.ahead - shift, 0) // BLOCK_M
        # These may be fewer than tiles_m, which counts rows up to a multiple of 128, when a tile has 64 rows.
        hi = gl.minimum(gl.cdiv(self.sq, BLOCK_M), gl.cdiv(gl.maximum(last + self.back - shift + 1, 0), BLOCK_M))
        return lo, gl.maximum(hi, lo)

    @gluon.jit
    def clean_tiles(self, key, stop, lo, hi):
        """Return limits [first, end): tiles of queries in lo .. hi - 1 between them need no mask. stop: the end of the keys."""
        ROWS: gl.constexpr = self.PLAN.block_n
        BLOCK_M: gl.constexpr = self.PLAN.block_m
        if self.PLAN.mask == "packed":
            first, end = clean_interval(self.back, key, ROWS, stop, self.sk, BLOCK_M)
        else:
            own = key - (self.sk - self.sq)  # the query that has the first key's position
            first = gl.cdiv(gl.maximum(own + ROWS - 1 - self.ahead, 0), BLOCK_M)
            end = gl.maximum(own + self.back + 1, 0) // BLOCK_M
        return gl.where(key + ROWS > stop, hi, first), end

    @gluon.jit
    def needs_mask(self, key, KEYS: gl.constexpr, row, ROWS: gl.constexpr):
        """Whether one of the queries row .. row + ROWS - 1 may not look at a key of key .. key + KEYS - 1."""
        position = row + (self.sk - self.sq)
        outside = (key + KEYS - 1 > position + self.ahead) | (key < position + ROWS - 1 - self.back)
        return outside | (key + KEYS > self.sk)

    @gluon.jit
    def queries_of(self, keys, stop):
        """Return low and high for each key: the queries low .. high - 1 see it. No query sees the keys from `stop` on."""
        if self.PLAN.mask == "packed":
            return row_bounds(self.back, keys, stop, self.sk)
        else:
            own = keys - (self.sk - self.sq)  # the query that has the key's position
            # Keys behind the end are loaded as zeros, but their probabilities could be infinite.
            return gl.where(keys < stop, own - self.ahead, NOBODY), own + self.back + 1

    @gluon.jit
    def mask(self, p, key, row):
        """Set probabilities [keys, queries] to zero where a query may not see a key; key, row: the first key and query.

        It masks the probabilities, not the scores: an infinite score times a negative scale could be plus infinity.
        """
        low, high = self.queries_of(key + gl.arange(0, p.shape[0], gl.SliceLayout(1, p.type.layout)), self.sk)
        return zero_columns(p, low - row, high - row)

    @gluon.jit
    def mask_keys(self, p, key, row):
        """Do the same as `mask`, for probabilities [queries, keys]."""
        position = row + gl.arange(0, p.shape[0], gl.SliceLayout(1, p.type.layout)) + (self.sk - self.sq)
        return zero_columns(p, position - self.back - key, gl.minimum(position + self.ahead + 1, self.sk) - key)


@gluon.jit
def make_sizes(sq, sk, back, ahead, heads, kv_heads, PLAN: gl.constexpr):
    """Return the Sizes for the arguments of a kernel."""
    return Sizes(
        sq, sk, back, ahead, heads, kv_heads, heads // kv_heads, gl.cdiv(sq, 128) * (128 // PLAN.block_m), PLAN
    )


@aggregate
class RowRing:
    """A ring of tiles of query rows (Q or dO), with one number for each row (lse or delta).

    Load number i goes to slot i % SLOTS; the parity of i // SLOTS is the phase to wait for.
    """

    tiles: gl.shared_memory_descriptor  # (SLOTS, 1, 1, BLOCK_M, BLOCK_D)
    numbers: gl.shared_memory_descriptor  # (SLOTS, 1, BLOCK_M) fp32
    full: gl.shared_memory_descriptor
    EMPTY: gl.constexpr  # number of the named barrier of slot 0; slot 1 has the next number

    @gluon.jit
    def tile(self, i):
        """Return the tile of load number i, [BLOCK_M, BLOCK_D]."""
        return self.tiles.index(i % SLOTS).reshape([self.tiles.shape[3], self.tiles.shape[4]])

    @gluon.jit
    def row_numbers(self, i, layout: gl.constexpr):
        """Return the rows' numbers of load number i, [BLOCK_M]."""
        return self.numbers.index(i % SLOTS).reshape([self.numbers.shape[2]]).load(layout)

    @gluon.jit
    def load(self, i, tile_desc, number_desc, batch, head, row):
        """Producer: fetch the rows from `row` on when the slot is empty. The slot is full when their numbers are there, too."""
        slot = i % SLOTS
        if i >= SLOTS:
            # Without this wait TMA would overwrite a tile that a consumer still reads.
            meet(self.EMPTY + slot, 288)
        full = self.full.index(slot)
        # Announce the bytes first: a copy that came before could complete the phase too early.
        mbarrier.expect(full, tile_desc.block_type.nbytes + number_desc.block_type.nbytes)
        tma_load(tile_desc, [batch, head, row, 0], full, self.tiles.index(slot))

    @gluon.jit
    def load_numbers(self, i, number_desc, head_total, row):
        """Producer: fetch the numbers of the rows from `row` on, after `load`."""
        tma_load(number_desc, [head_total, row], self.full.index(i % SLOTS), self.numbers.index(i % SLOTS))

    @gluon.jit
    def wait_full(self, i):
        """Consumer: wait until load number i has arrived; without it a product would read the slot's last tile."""
        mbarrier.wait(self.full.index(i % SLOTS), (i // SLOTS) & 1)

    @gluon.jit
    def release(self, i, FENCE: gl.constexpr = False):
        """Consumer: say that this thread has read load number i. Without it the producer waits for ever, a round later.

        FENCE: use it if no other fence lies between the load of the rows' numbers and this release.
        """
        if FENCE:
            # Threads have loaded the numbers, and TMA writes the next numbers: without the fence it may overtake the loads.
            fence_async_shared()
        # Each of eight warps arrives once, instead of each thread.
        pass_by(self.EMPTY + i % SLOTS, 288)


@gluon.jit
def allocate_row_ring(tile_desc, number_desc, EMPTY: gl.constexpr):
    """Allocate a ring for tiles of a TMA descriptor and the numbers of their rows; two warpgroups read it."""
    shape: gl.constexpr = [SLOTS] + tile_desc.block_type.shape  # noqa: RUF005 (Gluon knows no starred lists)
    number_shape: gl.constexpr = [SLOTS] + number_desc.block_type.shape  # noqa: RUF005
    tiles = gl.allocate_shared_memory(tile_desc.dtype, shape, tile_desc.layout)
    numbers = gl.allocate_shared_memory(gl.float32, number_shape, number_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
    return RowRing(tiles, numbers, full, EMPTY)


@aggregate
class Part:
    """A program's part of one block of keys: tiles of queries, counted head by head over all heads that share the keys."""

    key: gl.tensor  # first key of the block
    stop: gl.tensor  # the end of the block's sequence, or of all keys
    batch: gl.tensor
    kv_head: gl.tensor
    lo: gl.tensor  # the tiles lo .. hi - 1 of each head see the block
    first: gl.tensor  # the tiles first .. end - 1 need no mask
    end: gl.tensor
    hi: gl.tensor
    at: gl.tensor  # first tile of this part
    count: gl.tensor  # number of tiles
    slot: gl.tensor  # place for the sums of this part (`shares.py`); -1: the part is the whole block

    @gluon.jit
    def begin(self, sizes):
        """Return the first (query head, tile of that head) of this part."""
        skipped = self.at // gl.maximum(self.hi - self.lo, 1)
        return self.kv_head * sizes.group + skipped, self.lo + self.at - skipped * (self.hi - self.lo)

    @gluon.jit
    def next_tile(self, head, m):
        """Return the next (query head, tile of that head)."""
        last = m + 1 == self.hi
        return gl.where(last, head + 1, head), gl.where(last, self.lo, m + 1)


@gluon.jit
def block_place(block, blocks_n, section, total):
    """Return the place of block number `block`: its number among the blocks of keys of a head, and its head of `total`.

    Heads come in sections of `section` heads. A section begins with the blocks of the first keys of all its heads: under a
    causal mask they take longest.
    """
    per_section = section * blocks_n
    number = block // per_section
    rest = block - number * per_section
    wide = gl.minimum(section, total - number * section)
    n = rest // wide
    return n, number * section + rest - n * wide


@gluon.jit
def part_of(sizes, n, flat, piece, pieces, slot):
    """Return the Part of block n of head `flat`: the whole block (piece 0 of 1), or one of equal pieces."""
    batch = flat // sizes.kv_heads
    if sizes.PLAN.mask == "packed":
        key, stop = tile_entry(sizes.back, n, sizes.sk, 0), tile_entry(sizes.back, n, sizes.sk, 1)
        lo, hi = tile_entry(sizes.back, n, sizes.sk, 2), tile_entry(sizes.back, n, sizes.sk, 3)
    else:
        key, stop = n * sizes.PLAN.block_n, sizes.sk
        lo, hi = sizes.tiles_of(key)
    first, end = sizes.clean_tiles(key, stop, lo, hi)
    tiles = (hi - lo) * sizes.group
    at = tiles * piece // pieces
    count = tiles * (piece + 1) // pieces - at
    return Part(key, stop, batch, flat - batch * sizes.kv_heads, lo, first, end, hi, at, count, slot)


@gluon.jit
def numbered_part(sizes, blocks, number):
    """Return the Part of a number: the first `whole` numbers are whole blocks, the further numbers equal pieces of blocks."""
    blocks_n, section, total, whole, pieces_each = blocks
    block = number
    piece = number * 0
    slot = piece - 1
    pieces = piece + 1
    if number >= whole:
        pieces = pieces_each
        piece = (number - whole) % pieces
        block = whole + (number - whole) // pieces
        slot = block - whole if sizes.PLAN.dq else number - whole
    n, flat = block_place(block, blocks_n, section, total)
    return part_of(sizes, n, flat, piece, pieces, slot)


@aggregate
class Work:
    """The common arguments of a kernel's roles: sizes, rings of Q and dO, and the tiles of K and V in shared memory."""

    sizes: Sizes
    c: gl.tensor  # scale * log2(e)
    scale: gl.tensor
    q: RowRing
    do: RowRing
    k: gl.shared_memory_descriptor  # (1, 1, BLOCK_N, BLOCK_D)
    v: gl.shared_memory_descriptor  # (1, 1, BLOCK_N, BLOCK_D)
    loaded: gl.shared_memory_descriptor  # mbarriers: K and V have arrived


@gluon.jit
def rows_of(tile, W: gl.constexpr):
    """Return the rows W * 64 .. W * 64 + 63 of K or V."""
    return tile.reshape([tile.shape[2], tile.shape[3]]).slice(W * 64, 64, 0)


@gluon.jit
def allocate_work(sizes, descriptors, scale):
    """Allocate the rings, tiles and barriers of a kernel, and return the Work for its roles."""
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc = descriptors
    q = allocate_row_ring(q_desc, lse_desc, 8)
    do = allocate_row_ring(do_desc, delta_desc, 10)
    k = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_type.shape, k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_type.shape, v_desc.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded.index(0), count=1)
    mbarrier.init(loaded.index(1), count=1)
    c = gl.where(scale == 0, 1e-30, scale) * LOG2_E  # not zero: a masked score is infinite, and 0 * infinity is nan
    return Work(sizes, c, scale, q, do, k, v, loaded)


@gluon.jit
def load_part(work, part, done, descriptors):
    """Producer: load K and V once, and Q and dO tile by tile, in the order of their use; done: number of tiles before."""
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc = descriptors
    BLOCK_M: gl.constexpr = work.sizes.PLAN.block_m
    heads = work.sizes.heads
    # K and V have a barrier each, so that the first product can start when K is there.
    mbarrier.expect(work.loaded.index(0), k_desc.block_type.nbytes)
    tma_load(k_desc, [part.batch, part.kv_head, part.key, 0], work.loaded.index(0), work.k)
    head, m = part.begin(work.sizes)
    for i in range(gl.maximum(part.count, 1)):
        if part.count > 0:
            work.q.load(done + i, q_desc, lse_desc, part.batch, head, m * BLOCK_M)
        if i == 0:
            mbarrier.expect(work.loaded.index(1), v_desc.block_type.nbytes)
            tma_load(v_desc, [part.batch, part.kv_head, part.key, 0], work.loaded.index(1), work.v)
        if part.count > 0:
            work.do.load(done + i, do_desc, delta_desc, part.batch, head, m * BLOCK_M)
        if work.sizes.PLAN.dq and i == 0:
            # `start_backward` writes the rows' numbers, the sums of dQ and the counter, and may not have ended yet.
            wait_for_launch_before()
        if part.count > 0:
            work.q.load_numbers(done + i, lse_desc, part.batch * heads + head, m * BLOCK_M)
            work.do.load_numbers(done + i, delta_desc, part.batch * heads + head, m * BLOCK_M)
        head, m = part.next_tile(head, m)
