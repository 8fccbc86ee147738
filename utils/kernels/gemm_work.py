"""What the Gluon GEMM's two kernels share: items of work, the ring of operands, and sums of a tile in parts.

An item is a tile of C, or one of `split` parts of its steps along K. `Ring` is the memory through which the producer hands A and B
to the consumers: a slot has A and B of one step, "full" is completed by the bytes, "empty" by those who have read them. A part
leaves its sums in global memory and counts; the part that counts last adds all of them in their order, so that the same bits
come out twice, and no program waits for another. The algorithm as a whole is described in `gemm_gluon.py`.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from utils.kernels.gemm_ptx import for_all_blocks, for_this_block, rank
from utils.machine import versions

versions.adopt_newest_gluon_names()
tma_load = tma.async_load
tma_store = tma.async_store
whole_warpgroup = gl.barrier  # of the partition that calls it
aggregate = gluon.aggregate
BLOCK_K = gl.constexpr(64)
GROUP_M = gl.constexpr(8)


@aggregate
class Work:
    """The product's sizes and how it is cut. `Items` of `gemm_plan.py` says the same on the host."""

    M: gl.tensor
    N: gl.tensor
    K: gl.tensor
    whole: gl.tensor  # tiles that are computed whole; each of the others in `split` parts
    split: gl.tensor
    PLAN: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, M, N, K, whole, split, PLAN):
        self.M = M
        self.N = N
        self.K = K
        self.whole = whole
        self.split = split
        self.PLAN = gl.constexpr(PLAN)

    @gluon.jit
    def items(self):
        """Number of items: whole tiles first, then the parts of the others. Tiles that a cluster computes together are one."""
        tiles = gl.cdiv(self.M, self.PLAN.block_m * self.PLAN.down) * gl.cdiv(
            self.N, self.PLAN.block_n * self.PLAN.abreast
        )
        return self.whole + (tiles - self.whole) * self.split

    @gluon.jit
    def part(self, item):
        """Number of an item among the parts of tiles; negative for a whole tile."""
        return item - self.whole

    @gluon.jit
    def locate(self, item):
        """Tile of an item, and its first step along K and the one behind its last."""
        steps = gl.cdiv(self.K, BLOCK_K)
        part = self.part(item)
        is_part = min(max(part + 1, 0), 1)  # 1 or 0
        parts = 1 + (self.split - 1) * is_part
        within = part % self.split * is_part
        # For a whole tile the number of its part is negative, and the item is the smaller one.
        tile = min(item, self.whole + part // self.split)
        return tile, within * steps // parts, (within + 1) * steps // parts

    @gluon.jit
    def origin(self, tile):
        """First row and column of this block's tile. Tiles are numbered down GROUP_M rows of tiles, then along."""
        ROWS: gl.constexpr = self.PLAN.block_m * self.PLAN.down
        COLUMNS: gl.constexpr = self.PLAN.block_n * self.PLAN.abreast
        GROUP: gl.constexpr = max(GROUP_M // self.PLAN.down, 1)
        tiles_m = gl.cdiv(self.M, ROWS)
        tiles_n = gl.cdiv(self.N, COLUMNS)
        first = tile // (GROUP * tiles_n) * GROUP
        within = tile % (GROUP * tiles_n)
        rows = min(tiles_m - first, GROUP)
        row = (first + within % rows) * ROWS + rank(self.PLAN.down) * self.PLAN.block_m
        return row, within // rows * COLUMNS + rank(self.PLAN.abreast) * self.PLAN.block_n

    @gluon.jit
    def tile_and_part(self, item):
        """Number of this block's tile among those in parts, and of its part: a cluster's item is a part of each block's tile."""
        part = self.part(item)
        return part // self.split * self.PLAN.cluster + rank(self.PLAN.cluster), part % self.split


@aggregate
class Ring:
    """Slots for A and B with their barriers.

    Step i since the kernel's start, across tiles, uses slot i % stages, for the (i // stages)-th time: the parity of that is the
    phase to wait for. What is column-major lies in memory as it is, and is turned when it is read.
    """

    a: gl.shared_memory_descriptor  # (stages * consumers, rows, BLOCK_K), or transposed
    b: gl.shared_memory_descriptor  # (stages, BLOCK_K, block_n), or transposed
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    PLAN: gl.constexpr
    A_COLUMN_MAJOR: gl.constexpr
    B_COLUMN_MAJOR: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, a, b, full, empty, PLAN, A_COLUMN_MAJOR, B_COLUMN_MAJOR):
        self.a = a
        self.b = b
        self.full = full
        self.empty = empty
        self.PLAN = gl.constexpr(PLAN)
        self.A_COLUMN_MAJOR = gl.constexpr(A_COLUMN_MAJOR)
        self.B_COLUMN_MAJOR = gl.constexpr(B_COLUMN_MAJOR)

    @gluon.jit
    def slot(self, i):
        """Slot of step i."""
        return i % self.PLAN.stages

    @gluon.jit
    def phase(self, i):
        """Parity of the round in which step i uses its slot."""
        return i // self.PLAN.stages & 1

    @gluon.jit
    def wait_until_empty(self, i):
        """Producer: wait until the slot of step i has been read by all who read it."""
        mbarrier.wait(self.empty.index(self.slot(i)), self.phase(i) ^ 1)

    @gluon.jit
    def fill(self, i, a_desc, b_desc, row, column, k, pred=True):
        """Producer: fetch A[row.., k..] and B[k.., column..] for step i; its slot is empty.

        TMA fills what lies outside of A and B with zeros, which count as bytes too.
        """
        CONSUMERS: gl.constexpr = self.PLAN.consumers
        full = self.full.index(self.slot(i))
        # The bytes are announced first: copies that arrive unannounced could complete the phase too early. A piece that
        # another block sends may be here before: that is no harm, since the phase is not complete before this arrival.
        mbarrier.expect(full, self.PLAN.slot_bytes, pred=pred)
        for w in gl.static_range(CONSUMERS):
            tile = self.a.index(self.slot(i) * CONSUMERS + w)
            at = in_memory(row + w * self.PLAN.rows, k, self.A_COLUMN_MAJOR)
            self.fetch(a_desc, tile, at, full, pred, self.PLAN.abreast)
        at = in_memory(k, column, self.B_COLUMN_MAJOR)
        self.fetch(b_desc, self.b.index(self.slot(i)), at, full, pred, self.PLAN.down)

    @gluon.jit
    def fetch(self, desc, tile, at, full, pred, PIECES: gl.constexpr):
        """Producer: fetch a tile of an operand; of one that the cluster's PIECES blocks share a piece, for all of them."""
        if PIECES == 1:
            tma_load(desc, [at[0], at[1]], full, tile, pred=pred)
        elif self.PLAN.simulated:
            for piece in gl.static_range(PIECES):
                self.fetch_piece(desc, tile, at, piece, full, PIECES)
        else:
            for_all_blocks()
            self.fetch_piece(desc, tile, at, rank(PIECES), full, PIECES)
            for_this_block()

    @gluon.jit
    def fetch_piece(self, desc, tile, at, piece, full, PIECES: gl.constexpr):
        """Producer: fetch a piece of a tile: of its rows, of its columns, or of both (`Plan.box`)."""
        ROWS: gl.constexpr = desc.block_type.shape[0]
        COLUMNS: gl.constexpr = desc.block_type.shape[1]
        DOWN: gl.constexpr = PIECES * COLUMNS // tile.shape[1]
        row, column = piece % DOWN * ROWS, piece // DOWN * COLUMNS
        # The simulator keeps elements by their place in a tile, and has no blocks of 128 bytes.
        if self.PLAN.simulated and tile.shape[1] != COLUMNS:
            memory = tile.slice(piece // DOWN * COLUMNS, COLUMNS, dim=1).slice(piece % DOWN * ROWS, ROWS, dim=0)
        else:
            memory = tile.reinterpret(tile.dtype, [PIECES, ROWS, COLUMNS], tile.layout).index(piece)
        tma_load(desc, [at[0] + row, at[1] + column], full, memory)

    @gluon.jit
    def operands(self, i, WHICH: gl.constexpr):
        """Consumer: its rows of A, and B, of step i, when they have arrived."""
        a = self.a.index(self.slot(i) * self.PLAN.consumers + WHICH)
        b = self.b.index(self.slot(i))
        # Without this wait wgmma would read the tiles of the round before.
        mbarrier.wait(self.full.index(self.slot(i)), self.phase(i))
        if self.A_COLUMN_MAJOR:
            a = a.permute((1, 0))
        if self.B_COLUMN_MAJOR:
            b = b.permute((1, 0))
        return a, b

    @gluon.jit
    def release(self, i, pred=True):
        """Consumer: the slot of step i may be refilled; without that the producer waits for ever.

        The slot was read through the async proxy, as it will be refilled by TMA, so no fence is needed.
        """
        mbarrier.arrive(self.empty.index(self.slot(i + self.PLAN.stages)), count=1, pred=pred)


@gluon.jit
def allocate_ring(
    a_desc,
    b_desc,
    READERS: gl.constexpr,
    PLAN: gl.constexpr,
    A_COLUMN_MAJOR: gl.constexpr,
    B_COLUMN_MAJOR: gl.constexpr,
):
    """Allocate the slots and set up their barriers; READERS arrive when they have read a slot."""
    STAGES: gl.constexpr = PLAN.stages
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = full
    if READERS > 0:
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)  # the producer's `expect`; the bytes are counted apart
        if READERS > 0:
            mbarrier.init(empty.index(i), count=READERS)
    a = shared_tiles(a_desc.dtype, STAGES * PLAN.consumers, PLAN.rows, BLOCK_K, A_COLUMN_MAJOR)
    b = shared_tiles(b_desc.dtype, STAGES, BLOCK_K, PLAN.block_n, B_COLUMN_MAJOR)
    return Ring(a, b, full, empty, PLAN, A_COLUMN_MAJOR, B_COLUMN_MAJOR)


@gluon.jit
def in_memory(row, column, COLUMN_MAJOR: gl.constexpr):
    """A row and a column of a matrix, as the matrix lies in memory."""
    if COLUMN_MAJOR:
        return column, row
    else:
        return row, column


@gluon.jit
def shared_tiles(
    DTYPE: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TURNED: gl.constexpr = False
):
    """Shared memory for COUNT tiles, swizzled as wgmma and TMA read them; column-major ones lie there as they are."""
    BOX: gl.constexpr = [COLUMNS, ROWS] if TURNED else [ROWS, COLUMNS]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BOX, DTYPE)
    return gl.allocate_shared_memory(DTYPE, [COUNT, BOX[0], BOX[1]], layout)


@gluon.jit
def last_part(work, partial, acc, item, WHICH: gl.constexpr):
    """Leave a part's sums in global memory, and tell whether all parts of the tile are there now."""
    sums, counters = partial
    CONSUMERS: gl.constexpr = work.PLAN.consumers
    tile, part = work.tile_and_part(item)
    place = sums + ((tile * work.split + part) * CONSUMERS + WHICH).to(gl.int64) * (acc.shape[0] * acc.shape[1])
    layout: gl.constexpr = acc.type.layout
    m = gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    n = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    gl.store(place + m[:, None] * acc.shape[1] + n[None, :], acc)
    # All threads of the warpgroup have stored before one of them counts: whoever counts last reads what all have stored.
    whole_warpgroup()
    counter = counters + tile * CONSUMERS + WHICH
    count = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if count == work.split - 1:
        gl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")  # the next launch finds it as this one did
    return count == work.split - 1


@gluon.jit
def summed_piece(work, partial, item, i, WHICH: gl.constexpr):
    """Piece i of a tile, summed over its parts in their order, whichever part was the last to arrive."""
    ROWS: gl.constexpr = work.PLAN.rows
    COLUMNS: gl.constexpr = work.PLAN.piece[1]
    SIZE: gl.constexpr = ROWS * work.PLAN.block_n
    CONSUMERS: gl.constexpr = work.PLAN.consumers
    TOGETHER: gl.constexpr = 4  # parts that are read at a time: one alone would wait for memory once for each part
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // COLUMNS, COLUMNS // 4], [4, 1], [1, 0])
    m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    n = i * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    tile, _ = work.tile_and_part(item)
    first = partial[0] + (tile * work.split * CONSUMERS + WHICH).to(gl.int64) * SIZE
    first += m[:, None] * work.PLAN.block_n + n[None, :]
    total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    for start in range(0, work.split, TOGETHER):
        for j in gl.static_range(TOGETHER):
            there = start + j < work.split
            # The L1 may hold what was there before.
            total += gl.load(first + (start + j) * (CONSUMERS * SIZE), mask=there, other=0.0, cache_modifier=".cg")
    return total


@gluon.jit
def column_pieces(tile, PIECES: gl.constexpr):
    """A tile cut into PIECES column blocks, in registers: each half lies in registers of its own, nothing moves."""
    pieces = (tile,)
    for _ in gl.static_range(PIECES.bit_length() - 1):
        halves = ()
        for i in gl.static_range(len(pieces)):
            x = pieces[i]
            halves += x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()
        pieces = halves  # type: ignore[assignment]  # in a kernel a name's tuple may grow
    return pieces


@gluon.jit
def store_piece(work, out, piece, i, row, column, WHICH: gl.constexpr, TMA_STORE: gl.constexpr):
    """Store column block i of a consumer's rows: through a buffer by TMA, which drops what lies outside of C, or from registers."""
    c_desc, c_pointer, buffers = out
    BUFFERS: gl.constexpr = work.PLAN.buffers
    column += i * piece.shape[1]
    if TMA_STORE:
        buffer = buffers.index(WHICH * BUFFERS + i % BUFFERS)
        tma.store_wait(BUFFERS - 1)  # the store that used this buffer before has left it: it may be overwritten
        buffer.store(piece)
        fence_async_shared()  # written by threads, read by the TMA unit: without it TMA may read older data
        tma_store(c_desc, [row, column], buffer)
    else:
        layout: gl.constexpr = piece.type.layout
        m = row + gl.arange(0, piece.shape[0], gl.SliceLayout(1, layout))
        n = column + gl.arange(0, piece.shape[1], gl.SliceLayout(0, layout))
        inside = (m < work.M)[:, None] & (n < work.N)[None, :]
        gl.store(c_pointer + m.to(gl.int64)[:, None] * work.N + n[None, :], piece, mask=inside)


@gluon.jit
def store_item(work, out, partial, acc, item, row, column, WHICH: gl.constexpr, TMA_STORE: gl.constexpr):
    """Store a consumer's rows of a tile of C, or leave a part's sums; the part that is the last to arrive stores their total."""
    dtype: gl.constexpr = out[1].dtype.element_ty
    PIECES: gl.constexpr = work.PLAN.pieces
    if work.part(item) < 0:
        pieces = column_pieces(acc.to(dtype), PIECES)
        for i in gl.static_range(PIECES):
            store_piece(work, out, pieces[i], i, row, column, WHICH, TMA_STORE)
    elif last_part(work, partial, acc, item, WHICH):
        for i in range(PIECES):
            piece = summed_piece(work, partial, item, i, WHICH).to(dtype)
            store_piece(work, out, piece, i, row, column, WHICH, TMA_STORE)
