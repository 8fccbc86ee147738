"""What the Gluon GEMM's two kernels share: items of work, the ring of operands, clusters, and sums of a tile in parts.

**Parts.** 800 tiles on 132 SMs are 6.06 rounds, done in 7; and a product with few tiles and long sums leaves most SMs idle. So
the tiles that do not fill a round may be cut along K. An item of work is a tile of C, or one of `split` parts of its steps. A part
leaves its sums in global memory and counts; the part that counts last adds all of them in their order, so that the same bits
come out twice, and no program waits for another.

**Clusters.** Blocks whose tiles lie below each other read the same columns of B. As a thread block cluster they start together,
and TMA can bring what it reads once to the shared memory of all ("multicast"). So of two blocks each fetches half of the shared
tile, and the L2 sends it once:

    block 0    A0, first half of B  -> A0 here, B to both           one step: 128 rows of A and 256 columns of B are
    block 1    A1, second half of B -> A1 here, B to both           32 KB from the L2 for a block in place of 48 KB

    barrier of a slot    who completes it
    full                 the bytes: those that this block has asked for, and those that the others send
    empty                the consumers of all blocks: a piece that is sent too early would overwrite what another block still
                         reads. So consumers count on the barriers of all blocks.

Triton 3.6 has no word for this: it compiles one block, whose shared copies stand between two marks, and `gemm_launch.multicast`
writes the rest into the PTX.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from utils.kernels import gemm_plan
from utils.kernels.early_launch import instruct
from utils.machine import versions

versions.adopt_newest_gluon_names()
whole_warpgroup = gl.barrier  # of the partition that calls it
aggregate = gluon.aggregate
BLOCK_K = gl.constexpr(gemm_plan.BLOCK_K)
GROUP_M = gl.constexpr(gemm_plan.GROUP_M)
SHARED, OWN = "for all blocks of the cluster", "for this block"
MARK_SHARED, MARK_OWN = (gl.constexpr(f"mov.u32 $0, 0; // {mark}") for mark in (SHARED, OWN))
SHOW = gl.constexpr("fence.mbarrier_init.release.cluster; mov.u32 $0, 0;")
JOIN = gl.constexpr("barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire; mov.u32 $0, 0;")


@gluon.jit
def rank(PLAN: gl.constexpr):
    """This block's number in its cluster."""
    return gl.program_id(0) % PLAN.cluster


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
    items: gl.tensor  # whole tiles first, then the parts of the others; tiles that a cluster computes together are one
    whole: gl.tensor  # tiles that are computed whole; each of the others in `split` parts
    split: gl.tensor
    PLAN: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, M, N, K, items, whole, split, PLAN):
        self.M = M
        self.N = N
        self.K = K
        self.items = items
        self.whole = whole
        self.split = split
        self.PLAN = gl.constexpr(PLAN)

    @gluon.jit
    def locate(self, item):
        """An item's first step along K and the one behind its last, and the first row and column of this block's tile.

        Tiles are numbered down GROUP_M rows of tiles, then along.
        """
        steps = gl.cdiv(self.K, BLOCK_K)
        part = item - self.whole  # negative for a whole tile, and then the item is the smaller one
        tile = min(item, self.whole + part // self.split)
        parts = self.split if part >= 0 else 1
        within = part % parts
        TOGETHER: gl.constexpr = self.PLAN.block_m * self.PLAN.cluster
        GROUP: gl.constexpr = GROUP_M // self.PLAN.cluster
        tiles_m = gl.cdiv(self.M, TOGETHER)
        tiles_n = gl.cdiv(self.N, self.PLAN.block_n)
        above = tile // (GROUP * tiles_n) * GROUP
        in_group = tile % (GROUP * tiles_n)
        rows = min(tiles_m - above, GROUP)
        row = (above + in_group % rows) * TOGETHER + rank(self.PLAN) * self.PLAN.block_m
        return within * steps // parts, (within + 1) * steps // parts, row, in_group // rows * self.PLAN.block_n

    @gluon.jit
    def tile_and_part(self, item):
        """Number of this block's tile among those in parts, and of its part: a cluster's item is a part of each block's tile."""
        part = item - self.whole
        return part // self.split * self.PLAN.cluster + rank(self.PLAN), part % self.split


# The ring is (A, B, full, empty): slots of both operands with their barriers. Step i since the kernel's start, across tiles, uses slot
# i % stages for the (i // stages)-th time: the parity of that is the phase to wait for. What is column-major lies in memory as it
# is, and is turned when it is read.


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
    return (shared_tiles(DTYPE, STAGES * PLAN.consumers, A_TILE), shared_tiles(DTYPE, STAGES, B_TILE), full, empty)


@gluon.jit
def wait_until_empty(ring, i, STAGES: gl.constexpr):
    """Producer: wait until the slot of step i has been read by all who read it."""
    mbarrier.wait(ring[3].index(i % STAGES), i // STAGES & 1 ^ 1)


@gluon.jit
def fill(ring, i, a_desc, b_desc, row, column, k, PLAN: gl.constexpr, pred=True):
    """Producer: fetch A[row.., k..] and B[k.., column..] for step i; its slot is empty.

    TMA fills what lies outside of A and B with zeros, which count as bytes too.
    """
    CONSUMERS: gl.constexpr = PLAN.consumers
    slot = i % PLAN.stages
    full = ring[2].index(slot)
    # The bytes are announced first: copies that arrive unannounced could complete the phase too early. A piece that
    # another block sends may be here before: that is no harm, since the phase is not complete before this arrival.
    mbarrier.expect(full, 2 * (PLAN.block_m + PLAN.brought) * BLOCK_K, pred=pred)
    for w in gl.static_range(CONSUMERS):
        rows = row + w * PLAN.rows
        at = [k, rows] if PLAN.a_column_major else [rows, k]
        tma.async_load(a_desc, at, full, ring[0].index(slot * CONSUMERS + w), pred=pred)
    tile = ring[1].index(slot)
    B_BOX: gl.constexpr = PLAN.b_box
    if PLAN.b_tile == B_BOX:
        at = [column, k] if PLAN.b_column_major else [k, column]
        tma.async_load(b_desc, at, full, tile, pred=pred)
    else:
        ROWS_B: gl.constexpr = B_BOX[0]
        COUNT: gl.constexpr = PLAN.columns // ROWS_B
        TIMES: gl.constexpr = PLAN.brought // PLAN.cluster // ROWS_B
        boxes = tile.reinterpret(tile.dtype, [COUNT, ROWS_B, BLOCK_K], tile.layout)
        if PLAN.cluster > 1:
            instruct(MARK_SHARED)
        for i in gl.static_range(TIMES):
            box = rank(PLAN) * TIMES + i
            # Where rows of B are longer than 128 bytes, they lie in shared memory as blocks of 64 columns, one behind the other.
            y = box * ROWS_B
            at = [column + y, k] if PLAN.b_column_major else [k + y % BLOCK_K, column + y // BLOCK_K * BLOCK_K]
            tma.async_load(b_desc, at, full, boxes.index(box), pred=pred)
        if PLAN.cluster > 1:
            instruct(MARK_OWN)


@gluon.jit
def operands(ring, i, PLAN: gl.constexpr, WHICH: gl.constexpr):
    """Consumer: its rows of A, and B, of step i, when they have arrived."""
    slot = i % PLAN.stages
    a = ring[0].index(slot * PLAN.consumers + WHICH)
    b = ring[1].index(slot)
    # Without this wait wgmma would read the tiles of the round before.
    mbarrier.wait(ring[2].index(slot), i // PLAN.stages & 1)
    if PLAN.a_column_major:
        a = a.permute((1, 0))
    if PLAN.b_column_major:
        b = b.permute((1, 0))
    return a, b


@gluon.jit
def release(ring, i, STAGES: gl.constexpr, pred=True):
    """Consumer: the slot of step i may be refilled; without that the producer waits for ever.

    The slot was read through the async proxy, as it will be refilled by TMA, so no fence is needed.
    """
    mbarrier.arrive(ring[3].index((i + STAGES) % STAGES), count=1, pred=pred)


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
    c_desc, buffers = out
    BUFFERS: gl.constexpr = work.PLAN.buffers
    buffer = buffers.index(WHICH * BUFFERS + i % BUFFERS)
    tma.store_wait(BUFFERS - 1)  # the store that used this buffer before has left it: it may be overwritten
    column += i * work.PLAN.piece[1]
    if work.PLAN.transposed:
        buffer.permute((1, 0)).store(piece)
        row, column = column, row
    else:
        buffer.store(piece)
    fence_async_shared()  # written by threads, read by the TMA unit: without it TMA may read older data
    tma.async_store(c_desc, [row, column], buffer)


@gluon.jit
def store_item(work, out, partial, acc, item, row, column, WHICH: gl.constexpr):
    """Store a consumer's rows of a tile of C, or leave a part's sums; the part that is the last to arrive stores their total."""
    PIECES: gl.constexpr = work.PLAN.pieces
    dtype: gl.constexpr = out[0].dtype
    if PIECES % work.PLAN.buffers > 0:
        tma.store_wait(0)  # an odd number of pieces ends with the buffer that the next tile begins with
    if item < work.whole:
        pieces = column_pieces(acc.to(dtype), work.PLAN.columns // work.PLAN.piece[1])
        for i in gl.static_range(PIECES):
            store_piece(work, out, pieces[i], i, row, column, WHICH)
    elif leave_part(work, partial, acc, item, WHICH):
        for i in range(PIECES):
            piece = summed_piece(work, partial, item, i, WHICH).to(dtype)
            store_piece(work, out, piece, i, row, column, WHICH)
