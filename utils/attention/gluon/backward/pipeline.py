"""What the warp-specialized steps share: rings of tiles with a row of statistics, sizes, masks, and a block's start."""

# A tuple is unpacked whole: in a kernel `_` would be a variable like any other, with one type.
# ruff: noqa: RUF059

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from utils.attention.gluon.shared import aggregate, tma_load, zero_columns

# Hand a tile to TMA, which adds it to memory; its end is waited for as a store's.
tma_add = tma.async_atomic_add  # no `gl.constexpr`: see `shared.py`


@aggregate
class RowRing:
    """Tiles of query rows (Q or dO) that go round, each with one number a row (lse or delta).

    Load number i goes to slot i % SLOTS; the parity of i // SLOTS is the phase to wait for.
    """

    tiles: gl.shared_memory_descriptor  # (SLOTS, 1, 1, BLOCK_M, BLOCK_D)
    numbers: gl.shared_memory_descriptor  # (SLOTS, 1, BLOCK_M) fp32
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    SLOTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, numbers, full, empty, SLOTS):
        self.tiles = tiles
        self.numbers = numbers
        self.full = full
        self.empty = empty
        self.SLOTS = gl.constexpr(SLOTS)

    @gluon.jit
    def phase(self, i):
        """Parity of the round in which load number i uses its slot."""
        return (i // self.SLOTS) & 1

    @gluon.jit
    def tile(self, i):
        """The tile of load number i, [BLOCK_M, BLOCK_D]."""
        return self.tiles.index(i % self.SLOTS).reshape([self.tiles.shape[3], self.tiles.shape[4]])

    @gluon.jit
    def row_numbers(self, i, layout: gl.constexpr):
        """The numbers of load number i, one a row, [BLOCK_M]."""
        return self.numbers.index(i % self.SLOTS).reshape([self.numbers.shape[2]]).load(layout)

    @gluon.jit
    def load(self, i, tile_desc, number_desc, batch, head, heads, row):
        """Producer: fetch rows from `row` on, and their numbers, as soon as the slot is empty."""
        slot = i % self.SLOTS
        # Without this wait TMA would overwrite a tile that a consumer still reads.
        mbarrier.wait(self.empty.index(slot), self.phase(i) ^ 1)
        full = self.full.index(slot)
        # The bytes are announced first: copies that arrive unannounced could complete the phase too early.
        mbarrier.expect(full, tile_desc.block_type.nbytes + number_desc.block_type.nbytes)
        tma_load(tile_desc, [batch, head, row, 0], full, self.tiles.index(slot))
        tma_load(number_desc, [batch * heads + head, row], full, self.numbers.index(slot))

    @gluon.jit
    def wait_full(self, i):
        """Consumer: wait until load number i has arrived."""
        mbarrier.wait(self.full.index(i % self.SLOTS), self.phase(i))

    @gluon.jit
    def release(self, i, FENCE: gl.constexpr = False):
        """Consumer: this thread has read load number i. Without it the producer waits for ever, a round later.

        FENCE: where no other fence lies between the ordinary load of the row's numbers and this release.
        """
        if FENCE:
            # TMA writes the next numbers through the async proxy, which need not know of ordinary loads before it.
            fence_async_shared()
        async_copy.mbarrier_arrive(self.empty.index(i % self.SLOTS), increment_count=False)


@gluon.jit
def allocate_row_ring(tile_desc, number_desc, SLOTS: gl.constexpr, READERS: gl.constexpr):
    """A ring for tiles of a TMA descriptor and the numbers of their rows; READERS: warpgroups that read it.

    With no READERS slots are not given back at a barrier of the ring (`step6_roles.give_back`).
    """
    shape: gl.constexpr = [SLOTS] + tile_desc.block_type.shape  # noqa: RUF005 (Gluon knows no starred lists)
    number_shape: gl.constexpr = [SLOTS] + number_desc.block_type.shape  # noqa: RUF005
    tiles = gl.allocate_shared_memory(tile_desc.dtype, shape, tile_desc.layout)
    numbers = gl.allocate_shared_memory(gl.float32, number_shape, number_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = full
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
    if READERS:
        empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(SLOTS):
            mbarrier.init(empty.index(i), count=128 * READERS)
    return RowRing(tiles, numbers, full, empty, SLOTS)


@gluon.jit
def hide(p, key, row, shape, KEYS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Zero the probabilities of keys key.. (dimension KEYS) and queries row.. where a query may not look.

    The probabilities and not the scores, because an infinite score times a negative scale would be infinite again.
    """
    QUERIES: gl.constexpr = 1 - KEYS
    layout: gl.constexpr = p.type.layout
    sq, sk, window, heads, group = shape
    keys = gl.expand_dims(key + gl.arange(0, p.shape[KEYS], gl.SliceLayout(QUERIES, layout)), QUERIES)
    queries = gl.expand_dims(row + gl.arange(0, p.shape[QUERIES], gl.SliceLayout(KEYS, layout)), KEYS)
    positions = queries + (sk - sq)
    # Keys that do not exist were loaded as zeros; their probabilities could still be infinite.
    keep = keys < sk
    if CAUSAL:
        keep = keep & (keys <= positions)
    elif WINDOW:
        keep = keep & (keys < positions + window)
    if WINDOW:
        keep = keep & (keys > positions - window)
    return gl.where(keep, p, 0.0)


@aggregate
class Sizes:
    """Sizes of the problem, and which tiles of queries see a block of keys."""

    sq: gl.tensor
    sk: gl.tensor
    window: gl.tensor
    heads: gl.tensor
    kv_heads: gl.tensor
    group: gl.tensor
    tiles_m: gl.tensor
    PLAN: gl.constexpr
    CASE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, sq, sk, window, heads, kv_heads, group, tiles_m, PLAN, CASE):
        self.sq = sq
        self.sk = sk
        self.window = window
        self.heads = heads
        self.kv_heads = kv_heads
        self.group = group
        self.tiles_m = tiles_m
        self.PLAN = gl.constexpr(PLAN)
        self.CASE = gl.constexpr(CASE)

    @gluon.jit
    def tiles_of(self, key):
        """Tiles of queries [lo, hi) that see some of the keys key .. key + BLOCK_N - 1; may be empty."""
        BLOCK_M: gl.constexpr = self.PLAN.block_m
        shift = self.sk - self.sq
        lo = 0
        hi = gl.cdiv(self.sq, BLOCK_M)  # fewer than tiles_m where rows are rounded up to 128 and a tile has 64
        if self.CASE.causal:
            lo = gl.maximum(key - shift, 0) // BLOCK_M
        elif self.CASE.window:
            lo = gl.maximum(key - self.window + 1 - shift, 0) // BLOCK_M
        if self.CASE.window:
            last = gl.minimum(key + self.PLAN.block_n, self.sk) - 1
            hi = gl.minimum(hi, gl.cdiv(gl.maximum(last + self.window - shift, 0), BLOCK_M))
        return lo, gl.maximum(hi, lo)

    @gluon.jit
    def needs_mask(self, key, ROWS: gl.constexpr, row):
        """Whether a query of the tile at `row` may not look at a key of key .. key + ROWS - 1."""
        BLOCK_M: gl.constexpr = self.PLAN.block_m
        position = row + (self.sk - self.sq)
        masked = key + ROWS > self.sk
        if self.CASE.causal:
            masked = masked | (key + ROWS - 1 > position)
        elif self.CASE.window:
            masked = masked | (key + ROWS - 1 >= position + self.window)
        if self.CASE.window:
            masked = masked | (key <= position + BLOCK_M - 1 - self.window)
        return masked

    @gluon.jit
    def clean_tiles(self, key, ROWS: gl.constexpr, lo, hi):
        """Tiles of queries [first, end) of lo .. hi - 1 that need no mask against keys key .. key + ROWS - 1."""
        BLOCK_M: gl.constexpr = self.PLAN.block_m
        shift = self.sk - self.sq
        first = lo
        end = hi
        if self.CASE.causal:
            first = gl.cdiv(gl.maximum(key + ROWS - 1 - shift, 0), BLOCK_M)
        elif self.CASE.window:
            first = gl.cdiv(gl.maximum(key + ROWS - shift - self.window, 0), BLOCK_M)
        if self.CASE.window:
            # The last query of a tile is window - 1 positions behind the first key, at most.
            end = gl.maximum(key + self.window - shift, 0) // BLOCK_M
        if self.CASE.tail:  # noqa: SIM102 (the first is decided by the compiler)
            if key + ROWS > self.sk:
                first = hi
        first = gl.minimum(gl.maximum(first, lo), hi)
        return first, gl.minimum(gl.maximum(end, first), hi)

    @gluon.jit
    def mask(self, p, key, row):
        """Zero the probabilities [keys, queries] of keys key.. and queries row.. where a query may not look."""
        shape = (self.sq, self.sk, self.window, self.heads, self.group)
        return hide(p, key, row, shape, 0, self.CASE.causal, self.CASE.window)

    @gluon.jit
    def mask_product(self, p, key, row):
        """`mask` for [64 keys, BLOCK_M queries] in the registers of one warpgroup's product, in a third of the instructions."""
        keys = key + gl.arange(0, p.shape[0], gl.SliceLayout(1, p.type.layout))
        own = keys - (self.sk - self.sq) - row  # the column of the query that has the key's position
        first = own
        if not self.CASE.causal:
            first = own - self.window + 1 if self.CASE.window else keys * 0
        if self.CASE.tail:
            # Keys that do not exist were loaded as zeros; their probabilities could still be infinite.
            first = gl.where(keys < self.sk, first, p.shape[1])
        return zero_columns(p, first, own + self.window, self.CASE.window)


@aggregate
class Work:
    """What every role of the kernel gets: sizes, the block's keys, rings of Q and dO, and tiles in shared memory."""

    sizes: Sizes
    key: gl.tensor  # first key of the block
    batch: gl.tensor
    kv_head: gl.tensor
    c: gl.tensor  # scale * log2(e)
    scale: gl.tensor
    q: RowRing
    do: RowRing
    k: gl.shared_memory_descriptor  # (1, 1, BLOCK_N, BLOCK_D)
    v: gl.shared_memory_descriptor  # (consumers, 1, 1, 64, BLOCK_D)
    ds: gl.shared_memory_descriptor  # dS^T: (slots, BLOCK_N, BLOCK_M) or in columns of 64
    loaded: gl.shared_memory_descriptor  # mbarriers: K and V have arrived
    written: gl.shared_memory_descriptor  # mbarriers: all consumers have written their part of dS
    read: gl.shared_memory_descriptor  # mbarriers: dS has been read by those who wait for it (`block_work`)
    late: gl.tensor  # number of this part among those of all split blocks; with `even`: its slot, -1: a whole block
    part: gl.tensor  # which of the block's parts this is; with `even`: its first tile, counted head by head over all
    parts: gl.tensor  # parts of this block, 1 unless it is split; with `even`: how many tiles this part has

    @gluon.constexpr_function
    def __init__(self, sizes, key, batch, kv_head, c, scale, q, do, k, v, ds, loaded, written, read, late, part, parts):
        self.sizes = sizes
        self.key = key
        self.batch = batch
        self.kv_head = kv_head
        self.c = c
        self.scale = scale
        self.q = q
        self.do = do
        self.k = k
        self.v = v
        self.ds = ds
        self.loaded = loaded
        self.written = written
        self.read = read
        self.late = late
        self.part = part
        self.parts = parts

    @gluon.jit
    def moved(self, place):
        """The same shared memory for another block, `place` of `block_part`."""
        key, batch, kv_head, late, part, parts = place
        return Work(
            self.sizes,
            key,
            batch,
            kv_head,
            self.c,
            self.scale,
            self.q,
            self.do,
            self.k,
            self.v,
            self.ds,
            self.loaded,
            self.written,
            self.read,
            late,
            part,
            parts,
        )

    @gluon.jit
    def k_rows(self, W: gl.constexpr):
        """Rows W * 64 .. W * 64 + 63 of K."""
        return self.k.reshape([self.k.shape[2], self.k.shape[3]]).slice(W * 64, 64, 0)

    @gluon.jit
    def v_rows(self, W: gl.constexpr):
        """Rows W * 64 .. W * 64 + 63 of V."""
        return self.v.index(W).reshape([64, self.v.shape[4]])

    @gluon.jit
    def first(self):
        """(number of query tiles to walk, first tile and end of one head): all heads that share these keys."""
        lo, hi = self.sizes.tiles_of(self.key)
        if self.sizes.PLAN.split:
            tiles = hi - lo
            hi = lo + tiles * (self.part + 1) // self.parts
            lo = lo + tiles * self.part // self.parts
        return (hi - lo) * self.sizes.group, lo, hi

    @gluon.jit
    def share(self):
        """`first`, and in front of that the number of the first tile, for a part that may begin and end inside of a head."""
        count, lo, hi = self.first()
        at = 0
        if self.sizes.PLAN.even:
            at = self.part
            count = self.parts
        return at, count, lo, hi

    @gluon.jit
    def start(self, lo, hi):
        """The tile of lo .. hi - 1 that each head begins with; from hi - 1 the walk goes on at lo."""
        CASE: gl.constexpr = self.sizes.CASE
        PLAN: gl.constexpr = self.sizes.PLAN
        if PLAN.stagger and not (CASE.causal or CASE.window or CASE.tail):
            return lo + (self.key // PLAN.block_n) % gl.maximum(hi - lo, 1)
        else:
            return lo


@gluon.jit
def block_place(block, blocks_n, section, total):
    """Return which keys block number `block` owns (in blocks), and of which of the `total` heads of keys.

    Heads are dealt in sections of `section`; within one, the blocks of the first keys, the longest under a causal mask,
    come first.
    """
    per_section = section * blocks_n
    number = block // per_section
    rest = block - number * per_section
    wide = gl.minimum(section, total - number * section)
    n = rest // wide
    return n, number * section + rest - n * wide


@gluon.jit
def block_part(sizes, program, blocks_n, section, total, whole, parts):
    """Return where a program works: key, batch, kv_head, and of a split block the number, the part and the parts.

    Blocks behind the first `whole` have `parts` programs each (`balance.Order`).
    """
    block = program
    late = program * 0
    part = late
    if sizes.PLAN.split:
        late = gl.maximum(program - whole, 0)
        part = late % parts
        block = gl.minimum(program, whole + late // parts)
        parts = gl.where(program < whole, 1, parts)
    n, flat = block_place(block, blocks_n, section, total)
    batch = flat // sizes.kv_heads
    return n * sizes.PLAN.block_n, batch, flat - batch * sizes.kv_heads, late, part, gl.to_tensor(parts)


@gluon.jit
def block_work(
    sizes,
    descriptors,
    blocks_n,
    section,
    total,
    c,
    scale,
    CONSUMERS: gl.constexpr,
    WRITERS: gl.constexpr,
    KEYS: gl.constexpr = 64,
    whole=0,
    parts=1,
):
    """Find this block's keys, allocate its shared memory and barriers, and return what its roles get.

    CONSUMERS: warpgroups that read the rings; WRITERS: roles that write dS; KEYS: of a role.
    whole, parts: blocks behind the first `whole` have `parts` programs each (`split`).
    """
    PLAN: gl.constexpr = sizes.PLAN
    DS_SLOTS: gl.constexpr = PLAN.ds_slots
    # Two writers wait for each other's reads only where dS has one slot; a single writer does at each slot.
    READ_SLOTS: gl.constexpr = 1 if WRITERS > 1 else DS_SLOTS
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc = descriptors
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    place = block_part(sizes, gl.program_id(0), blocks_n, section, total, whole, parts)
    key, batch, kv_head, late, part, parts = place
    READERS: gl.constexpr = 0 if PLAN.named else CONSUMERS
    q = allocate_row_ring(q_desc, lse_desc, PLAN.q_slots, READERS)
    do = allocate_row_ring(do_desc, delta_desc, PLAN.do_slots, READERS)
    k = gl.allocate_shared_memory(dtype, [1, 1, PLAN.block_n, PLAN.block_d], k_desc.layout)
    V_SHAPE: gl.constexpr = [PLAN.block_n // KEYS, 1, 1, KEYS, PLAN.block_d]
    v = gl.allocate_shared_memory(dtype, V_SHAPE, v_desc.layout)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    DS_SHAPE: gl.constexpr = (
        [PLAN.ds_slots, PLAN.block_n, PLAN.block_m]
        if KEYS == 128
        else [PLAN.ds_slots * (PLAN.block_m // 64), PLAN.block_n, 64]
    )
    ds = gl.allocate_shared_memory(dtype, DS_SHAPE, swizzled)
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    # A barrier that is initialised and not used has no place of its own: the compiler gives it to a tile, which PTX forbids.
    # Where processes took turns on the GPU, such tiles had nan at the barriers' places (docs/backward-log.md, entry 44).
    written = loaded
    read = loaded
    ROLES: gl.constexpr = sizes.CASE.dq and KEYS == 64  # which write dS for each other; step 6 meets at another barrier
    mbarrier.init(loaded.index(0), count=1)
    mbarrier.init(loaded.index(1), count=1)
    if ROLES:
        written = gl.allocate_shared_memory(gl.int64, [DS_SLOTS, 1], barrier)
        for i in gl.static_range(DS_SLOTS):
            mbarrier.init(written.index(i), count=WRITERS)
    if ROLES and (WRITERS == 1 or DS_SLOTS == 1):
        read = gl.allocate_shared_memory(gl.int64, [READ_SLOTS, 1], barrier)
        for i in gl.static_range(READ_SLOTS):
            mbarrier.init(read.index(i), count=128 * WRITERS)
    return Work(sizes, key, batch, kv_head, c, scale, q, do, k, v, ds, loaded, written, read, late, part, parts)
