"""What the roles of step 5 share: rings of tiles with their barriers, the tiles to compute, and sizes.

Each is an aggregate, so it goes into a kernel's functions as one argument. A ring alone knows which slot and which
phase of its barriers belong to a load: a role counts its loads, and never computes either.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from utils.attention.gluon.intervals import clean_interval, keep_interval, tile_entry, visible_interval
from utils.attention.gluon.shared import aggregate, keep_columns, tma_load, uniform


@aggregate
class Ring:
    """Tiles in shared memory that go round: the producer fills them, the consumers release them.

    Load number i goes to slot i % SLOTS, and the slot is in use for the (i // SLOTS)-th time: the parity of that is
    the phase to wait for. The rings of K and V have one lane; Q's has one for each consumer, all filled as number i.
    """

    tiles: gl.shared_memory_descriptor  # (SLOTS * LANES, 1, 1, rows, BLOCK_D)
    full: gl.shared_memory_descriptor  # mbarriers: the tile's bytes have arrived
    empty: gl.shared_memory_descriptor  # mbarriers: every thread that reads the tile has released it
    SLOTS: gl.constexpr
    LANES: gl.constexpr
    READERS: gl.constexpr

    @gluon.jit
    def make_barriers(self, FIRST: gl.constexpr, BEHIND: gl.constexpr):
        """Make the barriers of the slots from FIRST on, before BEHIND."""
        for i in gl.static_range(FIRST * self.LANES, BEHIND * self.LANES):
            mbarrier.init(self.full.index(i), count=1)  # the producer's `expect`; the bytes are counted apart
            mbarrier.init(self.empty.index(i), count=128 * self.READERS)  # every thread releases for itself

    @gluon.jit
    def slot(self, i, lane=0):
        """Index of load number i among tiles and barriers."""
        return (i % self.SLOTS) * self.LANES + lane

    @gluon.jit
    def phase(self, i):
        """Parity of the round in which load number i uses its slot."""
        return (i // self.SLOTS) & 1

    @gluon.jit
    def tile(self, i, lane=0):
        """The tile of load number i, [rows, BLOCK_D]."""
        return self.tiles.index(self.slot(i, lane)).reshape([self.tiles.shape[3], self.tiles.shape[4]])

    @gluon.jit
    def wait_empty(self, i, lane=0):
        """Producer: wait until load number i's slot is empty.

        Without this wait TMA would overwrite a tile that a consumer still reads. A fresh barrier counts as having
        completed the phase before its first: nobody waits in the first round.
        """
        mbarrier.wait(self.empty.index(self.slot(i, lane)), self.phase(i) ^ 1)

    @gluon.jit
    def load(self, i, descriptor, batch, head, row, lane=0):
        """Producer: fetch rows from `row` on into load number i's slot, as soon as that is empty."""
        self.wait_empty(i, lane)
        slot = self.slot(i, lane)
        full = self.full.index(slot)
        # Before the copy: bytes that arrive unannounced could complete the phase.
        mbarrier.expect(full, descriptor.block_type.nbytes)
        tma_load(descriptor, [batch, head, row, 0], full, self.tiles.index(slot))

    @gluon.jit
    def wait_full(self, i, lane=0, pred=True):
        """Consumer: wait until load number i has arrived; a product before that would read the last round's tile."""
        mbarrier.wait(self.full.index(self.slot(i, lane)), self.phase(i), pred=pred)

    @gluon.jit
    def release(self, i, lane=0):
        """Consumer: this thread has read load number i. Without it the producer waits for ever, a round later.

        `mbarrier.arrive` is one arrival, for which the compiler first brings the warpgroup together at a barrier.
        This instruction arrives when the thread's own cp.async copies are done: it has none, so at once.
        """
        async_copy.mbarrier_arrive(self.empty.index(self.slot(i, lane)), increment_count=False)


@gluon.jit
def allocate_ring(
    descriptor,
    SLOTS: gl.constexpr,
    LANES: gl.constexpr,
    READERS: gl.constexpr,
    ROWS: gl.constexpr = 0,
    READY: gl.constexpr = 0,
):
    """A ring for tiles of a TMA descriptor, each read by READERS consumers. ROWS: of a tile, if not a box's. READY: slots that get barriers now, if not all."""
    count: gl.constexpr = SLOTS * LANES
    box: gl.constexpr = descriptor.block_type.shape
    rows: gl.constexpr = ROWS if ROWS > 0 else box[2]
    tiles = gl.allocate_shared_memory(descriptor.dtype, [count, 1, 1, rows, box[3]], descriptor.layout)
    full = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    ring = Ring(tiles, full, empty, SLOTS, LANES, READERS)
    ring.make_barriers(0, READY if READY > 0 else SLOTS)
    return ring


@aggregate
class Tiles:
    """Which tiles of query rows this program computes, in which order. A tile belongs to one head of one sequence.

    DEALT: a row of `schedule` for each program, computed on the host (`plan.deal_tiles`). Otherwise program p takes the
    numbers p, p + programs, ...: those before `whole` are tiles, the others parts of 64 rows, PARTS of a tile, each of which
    a program's first consumer computes alone.
    """

    schedule: gl.tensor
    stride: gl.tensor
    tiles_m: gl.tensor
    numbers: gl.tensor
    whole: gl.tensor
    row_bits: gl.tensor  # the lowest bits of a dealt number, which are the row tile; the others are the head
    DEALT: gl.constexpr
    PARTS: gl.constexpr

    @gluon.jit
    def first(self):
        """Number of tiles of this program, its first tile, and where it reads the others."""
        program = gl.program_id(0)
        own = self.schedule + program * self.stride
        if self.DEALT:
            return uniform(gl.load(own)), uniform(gl.load(own + 1)), own + 2
        else:
            return gl.cdiv(self.numbers - program, gl.num_programs(0)), program, own

    @gluon.jit
    def is_part(self, t):
        """Whether the first consumer computes tile t alone, without the others."""
        return (t >= self.whole) & (self.PARTS > 1)

    @gluon.jit
    def start_next(self, t, rest, i):
        """Start to fetch the tile after t, the program's i-th; `finish_next` gives its number when t is done."""
        return gl.load(rest + i) if self.DEALT else t + gl.num_programs(0)

    @gluon.jit
    def finish_next(self, t_next):
        """The tile whose fetching `start_next` started."""
        return uniform(t_next) if self.DEALT else t_next

    @gluon.jit
    def locate(self, t):
        """Tile number -> (row tile, head counted over all sequences, part of the row tile)."""
        if self.DEALT:
            return t & ((1 << self.row_bits) - 1), t >> self.row_bits, 0
        else:
            behind = gl.maximum(t - self.whole, 0)
            t = gl.minimum(t, self.whole) + behind // self.PARTS
            head = t // self.tiles_m
            return t - head * self.tiles_m, head, behind % self.PARTS


@aggregate
class Work:
    """What every role of the kernel gets: sizes, rings and tiles, and what is fixed when the kernel is compiled."""

    sq: gl.tensor
    sk: gl.tensor
    back: gl.tensor  # how many keys before its own position a query sees, or the table of `intervals.py`
    ahead: gl.tensor  # and how many behind it
    offset: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    lse_wanted: gl.tensor  # 0 or 1
    c: gl.tensor
    q: Ring
    k: Ring
    v: Ring
    todo: Tiles
    PLAN: gl.constexpr  # plan.Plan: tile, slots, variants
    CASE: gl.constexpr  # plan.Case: what the attention needs
    PACKED: gl.constexpr  # a table has the interval of each row
    WINDOW: gl.constexpr  # the mask may hide any block's keys, not only the last ones'

    @gluon.jit
    def place(self, t):
        """Where a tile lies: its head, its rows [row, stop), its blocks of keys [lo, hi), and the key from which on they are counted.

        The first row of the first tile may be negative (`plan.row_offset`); TMA skips such rows.
        """
        tile, flat, part = self.todo.locate(t)
        if self.PACKED:
            table = self.back
            row, stop = tile_entry(table, tile, self.sq, 0), tile_entry(table, tile, self.sq, 1)
            return flat, row, stop, 0, tile_entry(table, tile, self.sq, 3), tile_entry(table, tile, self.sq, 2)
        else:
            BLOCK_M: gl.constexpr = self.q.tiles.shape[3]
            ROWS: gl.constexpr = BLOCK_M * self.PLAN.consumers
            row = tile * ROWS + part * BLOCK_M - self.offset
            lo, hi = self.visible_blocks(row, ROWS, self.sq, 0)
            return flat, row, self.sq, lo, hi, 0

    @gluon.jit
    def heads_of(self, flat):
        """A head counted over all sequences -> (sequence, head of queries, head of keys)."""
        batch = flat // self.heads
        head = flat - batch * self.heads
        return batch, head, head // self.group

    @gluon.jit
    def visible_blocks(self, row, ROWS: gl.constexpr, stop, base):
        """Blocks of keys [lo, hi) that the rows row .. row+ROWS-1 may see, of a tile whose rows end at `stop`."""
        BLOCK_N: gl.constexpr = self.PLAN.block_n
        if self.PACKED:
            return visible_interval(self.back, row, ROWS, stop, self.sq, BLOCK_N, base)
        else:
            lo, hi = 0, gl.cdiv(self.sk, BLOCK_N)
            position = row + (self.sk - self.sq)
            if self.WINDOW:
                lo = gl.minimum(gl.maximum(position - self.back, 0) // BLOCK_N, hi - 1)
            if self.CASE.mask != "":
                hi = gl.minimum(hi, gl.cdiv(gl.maximum(position + ROWS + self.ahead, 0), BLOCK_N))
            return lo, gl.maximum(hi, lo + 1)

    @gluon.jit
    def clean_blocks(self, row, ROWS: gl.constexpr, lo, hi, stop, base):
        """The blocks of [lo, hi) that need no mask, counted from the last one down: right <= i < left."""
        BLOCK_N: gl.constexpr = self.PLAN.block_n
        if self.PACKED:
            first, end = clean_interval(self.back, row, ROWS, stop, self.sq, BLOCK_N, base)
            return gl.maximum(hi - end, 0), hi - gl.maximum(first, lo)
        else:
            seen, left, position = self.sk, hi - lo, row + (self.sk - self.sq)
            if self.CASE.mask != "":
                seen = gl.minimum(gl.maximum(position + 1 + self.ahead, 0), seen)
            if self.WINDOW:
                left = hi - gl.maximum(gl.maximum(position + ROWS - 1 - self.back + BLOCK_N - 1, 0) // BLOCK_N, lo)
            return gl.maximum(hi - seen // BLOCK_N, 0), left

    @gluon.jit
    def mask(self, s, block):
        """The scores of a block, minus infinity where a row may not look, or where there is no key."""
        if self.PACKED:
            return keep_interval(s, self.back, block.row, block.key, self.sq)
        else:
            rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
            first = gl.zeros([s.shape[0]], gl.int32, rows)
            behind = gl.full([s.shape[0]], self.sk, gl.int32, rows)
            if self.CASE.mask != "":
                positions = block.row + (self.sk - self.sq) + gl.arange(0, s.shape[0], rows)
                behind = gl.minimum(behind, positions + 1 + self.ahead)
                if self.WINDOW:
                    first = positions - self.back
            return keep_columns(s, first - block.key, behind - block.key)


@aggregate
class Block:
    """One block of keys for one consumer: its number in the K and V rings, the first query row, the first key."""

    number: gl.tensor
    row: gl.tensor
    key: gl.tensor
