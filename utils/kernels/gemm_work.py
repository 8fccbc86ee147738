"""The list of work and the ring of the warp-specialized GEMM, for 16 and 8 bits: which tile is next, and how its operands come.

`Work` is what producer and consumers share. It numbers the tiles of C and their parts, and knows the ring: a slot has A and B
of one step, "full" is completed by the bytes, "empty" by those who have read them. `producer` is the warp that fills it.
The algorithm as a whole is described in `gemm_gluon.py`, what a cluster shares in `gemm_ptx.py`.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from utils.kernels.early_launch import let_next_launch_begin, wait_for_launch_before
from utils.kernels.gemm_ptx import for_sharing_blocks, for_this_block, join_cluster, meet_in_cluster, rank
from utils.kernels.gemm_stream import copies_stay, copies_stream
from utils.machine import versions

versions.adopt_newest_gluon_names()
tma_load = tma.async_load
aggregate = gluon.aggregate


@aggregate
class Work:
    """What producer and consumers share: the ring with its barriers, the sizes, and what is fixed when compiled.

    Step i since the kernel's start, across tiles, uses slot i % stages, for the (i // stages)-th time: the parity of
    that is the phase to wait for.
    """

    a_ring: gl.shared_memory_descriptor  # (stages * consumers, ROWS, BLOCK_K), transposed where A is column-major
    b_ring: gl.shared_memory_descriptor  # (stages, BLOCK_K, columns[0]), or its transpose
    b2_ring: gl.shared_memory_descriptor  # (stages, BLOCK_K, columns[1]), or its transpose; b_ring if that is 0
    # With CONFIG.join both are one ring of tiles with as many columns as the second part brings: a slot's parts in a row.
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    M: gl.tensor
    N: gl.tensor
    K: gl.tensor
    whole: gl.tensor  # tiles that are computed in one go; each of the others in CONFIG.split parts
    CONFIG: gl.constexpr
    A_COLUMN_MAJOR: gl.constexpr
    B_COLUMN_MAJOR: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, a_ring, b_ring, b2_ring, full, empty, M, N, K, whole, CONFIG, A_COLUMN_MAJOR, B_COLUMN_MAJOR):
        self.a_ring = a_ring
        self.b_ring = b_ring
        self.b2_ring = b2_ring
        self.full = full
        self.empty = empty
        self.M = M
        self.N = N
        self.K = K
        self.whole = whole
        self.CONFIG = gl.constexpr(CONFIG)
        self.A_COLUMN_MAJOR = gl.constexpr(A_COLUMN_MAJOR)
        self.B_COLUMN_MAJOR = gl.constexpr(B_COLUMN_MAJOR)

    @gluon.jit
    def slot(self, i):
        """Slot of step i."""
        return i % self.CONFIG.stages

    @gluon.jit
    def phase(self, i):
        """Parity of the round in which step i uses its slot."""
        return i // self.CONFIG.stages & 1

    @gluon.jit
    def rows_of_tiles(self):
        """Number of rows of tiles of C."""
        if self.CONFIG.pairs:
            return 2 * gl.cdiv(self.M // 2, self.CONFIG.cluster_tile[0])
        else:
            return gl.cdiv(self.M, self.CONFIG.cluster_tile[0])

    @gluon.jit
    def tiles(self):
        """Number of tiles of C. Those that the two blocks of a cluster compute at the same time count as one."""
        return self.rows_of_tiles() * gl.cdiv(self.N, self.CONFIG.cluster_tile[1])

    @gluon.jit
    def origin(self, tile):
        """First row and column of this block's tile, and the parity of its rows, which then count pairs.

        Tiles are numbered down group_m rows of tiles, then along.
        """
        TILE_M: gl.constexpr = self.CONFIG.cluster_tile[0]
        TILE_N: gl.constexpr = self.CONFIG.cluster_tile[1]
        GROUP_M: gl.constexpr = self.CONFIG.group_m * self.CONFIG.block_m // TILE_M
        tiles_m = self.rows_of_tiles()
        tiles_n = gl.cdiv(self.N, TILE_N)
        group = tile // (GROUP_M * tiles_n)
        within = tile % (GROUP_M * tiles_n)
        rows = min(tiles_m - group * GROUP_M, GROUP_M)
        row, column = group * GROUP_M + within % rows, (within // rows) * TILE_N
        parity = 0
        if self.CONFIG.pairs:
            row, parity = row // 2, row % 2
        row *= TILE_M
        if self.CONFIG.down > 1:
            row += self.number_down() * self.CONFIG.block_m
        if self.CONFIG.abreast > 1:
            column += self.number_abreast() * self.CONFIG.block_n
        return row, column, parity

    @gluon.jit
    def items(self):
        """Number of items of work: whole tiles first, then the parts of the others."""
        return self.whole + (self.tiles() - self.whole) * self.CONFIG.split

    @gluon.jit
    def first_item(self):
        """First item of this block; both blocks of a cluster walk over the same items."""
        return gl.program_id(0) // self.CONFIG.cluster

    @gluon.jit
    def stride(self):
        """From one item of this block to the next."""
        return gl.num_programs(0) // self.CONFIG.cluster

    @gluon.jit
    def part(self, item):
        """Number of an item among the parts of tiles; negative for a whole tile."""
        return item - self.whole

    @gluon.jit
    def number_down(self):
        """Number of this block's tile among the cluster's tiles below each other."""
        if self.CONFIG.abreast == 1:
            return rank(self.CONFIG.down)
        else:
            return rank(self.CONFIG.cluster) % self.CONFIG.down

    @gluon.jit
    def number_abreast(self):
        """Number of this block's tile among the cluster's tiles abreast."""
        return rank(self.CONFIG.cluster) // self.CONFIG.down

    @gluon.jit
    def own_part(self, part):
        """Number of this block's part: a cluster's item is a part of each block's tile."""
        if self.CONFIG.multicast != "":
            SPLIT: gl.constexpr = self.CONFIG.split
            CLUSTER: gl.constexpr = self.CONFIG.cluster
            return (part // SPLIT * CLUSTER + rank(CLUSTER)) * SPLIT + part % SPLIT
        else:
            return part

    @gluon.jit
    def steps(self):
        """Number of steps of a tile."""
        return gl.cdiv(self.K + (self.CONFIG.shift if self.CONFIG.pairs else 0), self.CONFIG.block_k)

    @gluon.jit
    def locate(self, item):
        """Tile of an item, and its first step along K and the one behind its last."""
        steps = self.steps()
        part = self.part(item)
        is_part = min(max(part + 1, 0), 1)  # 1 or 0
        if self.CONFIG.in_cluster:  # an item is a tile, and each block of a cluster has a part of its steps
            PARTS: gl.constexpr = self.CONFIG.split
            number = rank(PARTS)
            return item, number * steps // PARTS, (number + 1) * steps // PARTS
        else:
            SPLIT: gl.constexpr = self.CONFIG.split
            tile = min(
                item, self.whole + part // SPLIT
            )  # whole tiles: part is negative, and the item is the smaller one
            within = part % SPLIT * is_part
            parts = 1 + (SPLIT - 1) * is_part
            return tile, within * steps // parts, (within + 1) * steps // parts

    @gluon.jit
    def fetch(self, desc, tile, at, parity, arrived, OPERAND: gl.constexpr):
        """Producer: fetch a tile of an operand into a slot; of one that blocks share this block's piece, for all of them.

        at: where the whole tile begins, as it lies in memory.
        """
        PIECES: gl.constexpr = self.CONFIG.down if OPERAND == "B" else self.CONFIG.abreast
        if self.CONFIG.stream == OPERAND:
            copies_stream()
        if PIECES == 1:
            self.copy(desc, tile, at, parity, arrived)
        elif self.CONFIG.simulated:
            for piece in gl.static_range(PIECES):
                self.copy_piece(desc, tile, at, piece, parity, arrived, PIECES)
        else:
            for_sharing_blocks(OPERAND)
            number = self.number_down() if OPERAND == "B" else self.number_abreast()
            self.copy_piece(desc, tile, at, number, parity, arrived, PIECES)
            for_this_block()
        if self.CONFIG.stream == OPERAND:
            copies_stay()

    @gluon.jit
    def copy_piece(self, desc, tile, at, piece, parity, arrived, PIECES: gl.constexpr):
        """Producer: fetch a piece of a tile: of its rows, of its columns, or of both (`Config.box`)."""
        ROWS: gl.constexpr = desc.block_type.shape[-2]
        COLUMNS: gl.constexpr = desc.block_type.shape[-1]
        DOWN: gl.constexpr = PIECES * COLUMNS // tile.shape[1]
        first_row, first_column = piece % DOWN * ROWS, piece // DOWN * COLUMNS
        # The simulator keeps elements by their place in a tile, and has no blocks of 128 bytes.
        if self.CONFIG.simulated and tile.shape[1] != COLUMNS:
            memory = tile.slice(piece // DOWN * COLUMNS, COLUMNS, dim=1).slice(piece % DOWN * ROWS, ROWS, dim=0)
        else:
            memory = tile.reinterpret(tile.dtype, [PIECES, ROWS, COLUMNS], tile.layout).index(piece)
        self.copy(desc, memory, (at[0] + first_row, at[1] + first_column), parity, arrived)

    @gluon.jit
    def copy(self, desc, memory, at, parity, arrived):
        """Producer: start a TMA copy of a box of a matrix, or of its rows of one parity."""
        if len(desc.block_type.shape) == 3:
            tma_load(desc, [parity, at[0], at[1]], arrived, memory.reshape(desc.block_type.shape))
        else:
            tma_load(desc, [at[0], at[1]], arrived, memory)

    @gluon.jit
    def load(self, i, a_desc, b_desc, b2_desc, row, column, parity, k):
        """Producer: fetch A[row.., k..] and B[k.., column..] for step i, as soon as its slot is empty."""
        CONSUMERS: gl.constexpr = self.CONFIG.consumers
        ROWS: gl.constexpr = self.CONFIG.block_m // CONSUMERS
        # Without this wait TMA would overwrite what a consumer still reads, the other block's too where it shares the
        # tile. The parity is that of the round before: in the first round a fresh barrier counts as just completed.
        self.wait_until_empty(i)
        arrived = self.full.index(self.slot(i))
        # The bytes are announced first: copies that arrive unannounced could complete the phase too early. Whole boxes
        # are counted, also where they hang over the edge and TMA fills in zeros. The other block's half may be here
        # before: that is no harm, since the phase is not complete before this arrival.
        mbarrier.expect(arrived, self.CONFIG.slot_bytes)
        for w in gl.static_range(CONSUMERS):
            tile = self.a_ring.index(self.slot(i) * CONSUMERS + w)
            at = self.place(row + w * ROWS, k, self.A_COLUMN_MAJOR)
            self.fetch(a_desc, tile, at, parity, arrived, "A")
        at = self.place(k, column, self.B_COLUMN_MAJOR)
        b, b2 = self.parts_of_b(i)
        self.fetch(b_desc, b, at, 0, arrived, "B")
        if self.CONFIG.columns[1] > 0:
            at = self.place(k, column + self.CONFIG.columns[0], self.B_COLUMN_MAJOR)
            self.fetch(b2_desc, b2, at, 0, arrived, "B")

    @gluon.jit
    def parts_of_b(self, i):
        """Both parts of B in the slot of step i, as they lie in memory."""
        if self.CONFIG.join:
            FIRST: gl.constexpr = self.CONFIG.columns[0]
            SECOND: gl.constexpr = self.CONFIG.brought
            ROWS: gl.constexpr = FIRST if self.B_COLUMN_MAJOR else self.CONFIG.block_k
            COLUMNS: gl.constexpr = self.CONFIG.block_k if self.B_COLUMN_MAJOR else FIRST
            start = self.slot(i) * (FIRST // SECOND + 1)
            b = self.b2_ring.index(start).reinterpret(self.b2_ring.dtype, [ROWS, COLUMNS], self.b2_ring.layout)
            return b, self.b2_ring.index(start + FIRST // SECOND)
        else:
            return self.b_ring.index(self.slot(i)), self.b2_ring.index(self.slot(i))

    @gluon.jit
    def place(self, row, column, COLUMN_MAJOR: gl.constexpr):
        """A place in a matrix, as the matrix lies in memory."""
        if COLUMN_MAJOR:
            return column, row
        else:
            return row, column

    @gluon.jit
    def wait_until_empty(self, i):
        """Producer: wait until the slot of step i has been read by all who read it."""
        mbarrier.wait(self.empty.index(self.slot(i)), self.phase(i) ^ 1)

    @gluon.jit
    def operands(self, i, WHICH: gl.constexpr):
        """Consumer: its rows of A, and B in two parts, of step i. What is column-major lies there as it is, and is turned."""
        a = self.a_ring.index(self.slot(i) * self.CONFIG.consumers + WHICH)
        b, b2 = self.parts_of_b(i)
        # Without this wait wgmma would read the tiles of the round before.
        mbarrier.wait(self.full.index(self.slot(i)), self.phase(i))
        if self.A_COLUMN_MAJOR:
            a = a.permute((1, 0))
        if self.B_COLUMN_MAJOR:
            b = b.permute((1, 0))
            b2 = b2.permute((1, 0))
        elif self.CONFIG.pad:
            b2 = b2.slice(0, self.CONFIG.columns[1], dim=1)
        return a, b, b2

    @gluon.jit
    def release_before(self, i, pred=True):
        """Consumer: the slot of step i - 1 may be refilled; without that the producer waits for ever.

        The slot was read through the async proxy, as it will be refilled by TMA, so no fence is needed.
        """
        mbarrier.arrive(self.empty.index((i + self.CONFIG.stages - 1) % self.CONFIG.stages), count=1, pred=pred)


@gluon.jit
def producer(work, a_desc, b_desc, b2_desc):
    """One warp: keep the ring full. `step` counts slots filled since the start, across tiles."""
    step = 0
    if work.CONFIG.early:
        wait_for_launch_before()
        # Only now: with several launches ahead, blocks of those far ahead would take the SMs of the next.
        let_next_launch_begin()
    join_cluster(work.CONFIG)
    for item in range(work.first_item(), work.items(), work.stride()):
        tile, first, last = work.locate(item)
        row, column, parity = work.origin(tile)
        for k in range(first, last):
            # Odd rows start 16 bytes late: so much earlier they are where even rows are. TMA fills in zeros before the
            # first element, for A and for B.
            start = k * work.CONFIG.block_k - work.CONFIG.shift * parity
            work.load(step, a_desc, b_desc, b2_desc, row, column, parity, start)
            step += 1
        if work.CONFIG.in_cluster:
            meet_for_sums()
    if work.CONFIG.on_clusters and work.CONFIG.multicast != "":
        # Until all that this block has fetched has been read: after that the other block sends nothing here, and this
        # one may end, with its barriers.
        STAGES: gl.constexpr = work.CONFIG.stages
        for i in gl.static_range(STAGES):
            work.wait_until_empty(step + i)


@gluon.jit
def meet_for_sums():
    """Wait with the cluster's other warps, as all have to: until a tile's sums are there, and until they have been read."""
    meet_in_cluster()
    meet_in_cluster()


@gluon.jit
def bystander(work):
    """Warps without a role: they are there because all warps of a block join its cluster."""
    join_cluster(work.CONFIG)
    if work.CONFIG.in_cluster:
        for _ in range(work.first_item(), work.items(), work.stride()):
            meet_for_sums()


@gluon.jit
def rings_of_b(b_desc, b2_desc, CONFIG: gl.constexpr, COLUMN_MAJOR: gl.constexpr):
    """Shared memory for both parts of B: a ring each, or one ring if both are read as one tile (`Work.parts_of_b`)."""
    STAGES: gl.constexpr = CONFIG.stages
    FIRST: gl.constexpr = CONFIG.columns[0]
    SECOND: gl.constexpr = CONFIG.brought
    if CONFIG.join:
        both = ring(b2_desc, STAGES * (FIRST // SECOND + 1), CONFIG.block_k, SECOND, COLUMN_MAJOR)
        return both, both
    else:
        b_ring = ring(b_desc, STAGES, CONFIG.block_k, FIRST, COLUMN_MAJOR)
        if SECOND > 0:
            return b_ring, ring(b2_desc, STAGES, CONFIG.block_k, SECOND, COLUMN_MAJOR)
        else:
            return b_ring, b_ring


@gluon.jit
def ring(desc, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, COLUMN_MAJOR: gl.constexpr):
    """Shared memory for COUNT tiles of a matrix; what is column-major lies there as it is."""
    BOX: gl.constexpr = [COLUMNS, ROWS] if COLUMN_MAJOR else [ROWS, COLUMNS]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BOX, desc.dtype)
    return gl.allocate_shared_memory(desc.dtype, [COUNT, BOX[0], BOX[1]], layout)
