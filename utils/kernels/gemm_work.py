"""What the Gluon GEMM's two kernels share: items of work, the ring of operands, clusters, and sums of a tile in parts.

An item is a tile of C, or one of `split` parts of its steps along K. `Ring` is the memory through which the producer hands A and B
to the consumers: a slot has A and B of one step, "full" is completed by the bytes, "empty" by those who have read them. A part
leaves its sums in global memory and counts; the part that counts last adds all of them in their order, so that the same bits
come out twice, and no program waits for another. The algorithm as a whole is described in `gemm_gluon.py`.

**Clusters.** Two blocks whose tiles lie below each other read the same columns of B, two abreast the same rows of A. As a thread
block cluster they start together, and TMA can bring what it reads once to the shared memory of both ("multicast"). So each
fetches half of the shared tile, and the L2 sends it once:

    block 0    A0, first half of B  -> A0 here, B to both           one step: 128 rows of A and 256 columns of B are
    block 1    A1, second half of B -> A1 here, B to both           32 KB from the L2 for a block in place of 48 KB

    barrier of a slot    who completes it
    full                 the bytes: those that this block has asked for, and those that the others send
    empty                the consumers of all blocks: a piece that is sent too early would overwrite what another block still
                         reads. So consumers count on the barriers of all blocks.

Of four blocks below each other each fetches a quarter. Triton 3.6 has no word for any of this: it compiles one block, whose shared
copies stand between two marks, and `gemm_launch.multicast` writes the rest into the PTX.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from utils.kernels import gemm_plan
from utils.kernels.early_launch import instruct
from utils.machine import versions

versions.adopt_newest_gluon_names()
tma_load = tma.async_load
tma_store = tma.async_store
whole_warpgroup = gl.barrier  # of the partition that calls it
aggregate = gluon.aggregate
BLOCK_K = gl.constexpr(gemm_plan.BLOCK_K)
GROUP_M = gl.constexpr(gemm_plan.GROUP_M)
SHARED, OWN = "for all blocks of the cluster", "for this block"
MARK_SHARED, MARK_OWN = (gl.constexpr(f"mov.u32 $0, 0; // {mark}") for mark in (SHARED, OWN))
SHOW = gl.constexpr("fence.mbarrier_init.release.cluster; mov.u32 $0, 0;")
JOIN = gl.constexpr("barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire; mov.u32 $0, 0;")


@gluon.jit
def rank(CLUSTER: gl.constexpr):
    """This block's number in its cluster."""
    return gl.program_id(0) % CLUSTER


@gluon.jit
def join_cluster(PLAN: gl.constexpr):
    """Wait until all blocks have set up their barriers: a copy or an arrival could come before they are there.

    All warps of all blocks have to come, those without a role too.
    """
    if PLAN.cluster > 1:
        instruct(JOIN)


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
        tiles = gl.cdiv(self.M, self.PLAN.block_m * self.PLAN.down)
        tiles *= gl.cdiv(self.N, self.PLAN.block_n * self.PLAN.abreast)
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

    a: gl.shared_memory_descriptor  # (stages * consumers, *PLAN.a_tile)
    b: gl.shared_memory_descriptor  # (stages, *PLAN.b_tile)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    PLAN: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, a, b, full, empty, PLAN):
        self.a = a
        self.b = b
        self.full = full
        self.empty = empty
        self.PLAN = gl.constexpr(PLAN)

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
            rows = row + w * self.PLAN.rows
            at = (k, rows) if self.PLAN.a_column_major else (rows, k)
            self.fetch(a_desc, tile, at, full, pred, self.PLAN.abreast)
        TIMES: gl.constexpr = self.PLAN.b_times
        for time in gl.static_range(TIMES):
            columns = column + time * BLOCK_K
            at = (columns, k) if self.PLAN.b_column_major else (k, columns)
            self.fetch(b_desc, self.b.index(self.slot(i)), at, full, pred, self.PLAN.down, time)

    @gluon.jit
    def fetch(self, desc, tile, at, full, pred, BLOCKS: gl.constexpr, TIME: gl.constexpr = 0):
        """Producer: fetch a tile of an operand, or a share of it; of one that BLOCKS blocks share, this block's piece for all."""
        ROWS: gl.constexpr = desc.block_type.shape[0]
        COLUMNS: gl.constexpr = desc.block_type.shape[1]
        COUNT: gl.constexpr = tile.shape[0] * tile.shape[1] // (ROWS * COLUMNS)
        if COUNT == 1:
            tma_load(desc, [at[0], at[1]], full, tile, pred=pred)
        else:
            DOWN: gl.constexpr = tile.shape[0] // ROWS  # pieces of a column of pieces
            piece = rank(BLOCKS)
            places = tile.reinterpret(tile.dtype, [COUNT, ROWS, COLUMNS], tile.layout)
            if BLOCKS > 1:
                instruct(MARK_SHARED)
            place = places.index(TIME * BLOCKS + piece)
            tma_load(desc, [at[0] + piece % DOWN * ROWS, at[1] + piece // DOWN * COLUMNS], full, place, pred=pred)
            if BLOCKS > 1:
                instruct(MARK_OWN)

    @gluon.jit
    def operands(self, i, WHICH: gl.constexpr):
        """Consumer: its rows of A, and B, of step i, when they have arrived."""
        a = self.a.index(self.slot(i) * self.PLAN.consumers + WHICH)
        b = self.b.index(self.slot(i))
        # Without this wait wgmma would read the tiles of the round before.
        mbarrier.wait(self.full.index(self.slot(i)), self.phase(i))
        if self.PLAN.a_column_major:
            a = a.permute((1, 0))
        if self.PLAN.b_column_major:
            b = b.permute((1, 0))
        return a, b

    @gluon.jit
    def release(self, i, pred=True):
        """Consumer: the slot of step i may be refilled; without that the producer waits for ever.

        The slot was read through the async proxy, as it will be refilled by TMA, so no fence is needed.
        """
        mbarrier.arrive(self.empty.index(self.slot(i + self.PLAN.stages)), count=1, pred=pred)


@gluon.jit
def allocate_ring(DTYPE: gl.constexpr, PLAN: gl.constexpr):
    """Allocate the slots and set up their barriers, before the block joins its cluster."""
    STAGES: gl.constexpr = PLAN.stages
    A_TILE: gl.constexpr = PLAN.a_tile
    B_TILE: gl.constexpr = PLAN.b_tile
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = full  # in the short kernel nothing is handed over
    if not PLAN.short:
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)  # the producer's `expect`; the bytes are counted apart
        if not PLAN.short:
            # All consumers read a slot, and those of the other blocks that this one fetches for.
            mbarrier.init(empty.index(i), count=PLAN.consumers * PLAN.cluster)
    if PLAN.cluster > 1:
        instruct(SHOW)  # without that the other blocks may not see the barriers when this one joins
    a = shared_tiles(DTYPE, STAGES * PLAN.consumers, A_TILE)
    b = shared_tiles(DTYPE, STAGES, B_TILE)
    return Ring(a, b, full, empty, PLAN)


@gluon.jit
def shared_tiles(DTYPE: gl.constexpr, COUNT: gl.constexpr, TILE: gl.constexpr):
    """Shared memory for COUNT tiles of so many rows and columns, swizzled as wgmma and TMA read them."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(TILE, DTYPE)
    return gl.allocate_shared_memory(DTYPE, [COUNT, TILE[0], TILE[1]], layout)


@gluon.jit
def sums_of(work, partial, item, part, WHICH: gl.constexpr, column, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Pointers to some columns of a consumer's sums of a part of an item's tile, in global memory."""
    ROWS: gl.constexpr = work.PLAN.rows
    SIZE: gl.constexpr = ROWS * work.PLAN.block_n
    tile, _ = work.tile_and_part(item)
    place = ((tile * work.split + part) * work.PLAN.consumers + WHICH).to(gl.int64) * SIZE
    m = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    n = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return partial[0] + place + m[:, None] * work.PLAN.block_n + n[None, :]


@gluon.jit
def leave_part(work, partial, acc, item, WHICH: gl.constexpr):
    """Leave a part's sums in global memory, and tell whether all parts of the tile are there now."""
    tile, part = work.tile_and_part(item)
    COLUMNS: gl.constexpr = work.PLAN.columns
    layout: gl.constexpr = acc.type.layout
    inside = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)) < work.PLAN.block_n
    gl.store(sums_of(work, partial, item, part, WHICH, 0, COLUMNS, layout), acc, mask=inside[None, :])
    # All threads of the warpgroup have stored before one of them counts: whoever counts last reads what all have stored.
    whole_warpgroup()
    counter = partial[1] + tile * work.PLAN.consumers + WHICH
    count = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if count == work.split - 1:
        gl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")  # the next launch finds it as this one did
    return count == work.split - 1


@gluon.jit
def summed_piece(work, partial, item, i, WHICH: gl.constexpr):
    """Piece i of a tile, summed over its parts in their order, whichever part was the last to arrive."""
    ROWS: gl.constexpr = work.PLAN.rows
    COLUMNS: gl.constexpr = work.PLAN.piece[1]
    TOGETHER: gl.constexpr = 4  # parts that are read at a time: one alone would wait for memory once for each part
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // COLUMNS, COLUMNS // 4], [4, 1], [1, 0])
    total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    for start in range(0, work.split, TOGETHER):
        for j in gl.static_range(TOGETHER):
            place = sums_of(work, partial, item, start + j, WHICH, i * COLUMNS, COLUMNS, layout)
            # The L1 may hold what was there before.
            total += gl.load(place, mask=start + j < work.split, other=0.0, cache_modifier=".cg")
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
def store_piece(work, out, piece, i, row, column, WHICH: gl.constexpr):
    """Store column block i of a consumer's rows through a buffer by TMA, which drops what lies outside of C."""
    c_desc, turned_desc, buffers, transposed = out
    BUFFERS: gl.constexpr = work.PLAN.buffers
    COUNT: gl.constexpr = BUFFERS * work.PLAN.consumers
    PIECE: gl.constexpr = work.PLAN.piece
    TURNED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PIECE[1], PIECE[0]], c_desc.dtype)
    number = WHICH * BUFFERS + i % BUFFERS
    tma.store_wait(BUFFERS - 1)  # the store that used this buffer before has left it: it may be overwritten
    column += i * PIECE[1]
    # In both branches: written by threads, read by the TMA unit, which may read older data without the fence.
    if transposed != 0:
        turned = buffers.reinterpret(c_desc.dtype, [COUNT, PIECE[1], PIECE[0]], TURNED).index(number)
        turned.permute((1, 0)).store(piece)
        fence_async_shared()
        tma_store(turned_desc, [column, row], turned)
    else:
        buffer = buffers.index(number)
        buffer.store(piece)
        fence_async_shared()
        tma_store(c_desc, [row, column], buffer)


@gluon.jit
def store_item(work, out, partial, acc, item, row, column, WHICH: gl.constexpr):
    """Store a consumer's rows of a tile of C, or leave a part's sums; the part that is the last to arrive stores their total."""
    PIECES: gl.constexpr = work.PLAN.pieces
    dtype: gl.constexpr = out[0].dtype
    if work.part(item) < 0:
        pieces = column_pieces(acc.to(dtype), work.PLAN.columns // work.PLAN.piece[1])
        for i in gl.static_range(PIECES):
            store_piece(work, out, pieces[i], i, row, column, WHICH)
    elif leave_part(work, partial, acc, item, WHICH):
        for i in range(PIECES):
            piece = summed_piece(work, partial, item, i, WHICH).to(dtype)
            store_piece(work, out, piece, i, row, column, WHICH)
