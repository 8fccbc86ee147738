"""Aggregates that the roles of step 5 share: rings of tiles with their barriers, the tiles to compute, and sizes.

An aggregate is one argument of a function in a kernel. A role only counts its loads; the ring computes from this number the slot and
the phase of the slot's barriers.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from utils.attention.gluon.intervals import clean_interval, row_bounds, tile_entry, visible_interval
from utils.attention.gluon.shared import aggregate, keep_columns, tma_load, uniform


@aggregate
class Ring:
    """A ring of tiles in shared memory. The producer fills the tiles, and the consumers release them.

    Load number i goes to slot i % SLOTS, and it is the (i // SLOTS)-th load of this slot. The parity of i // SLOTS is the phase of
    the barriers to wait for. The rings of K and V have one lane. The ring of Q has a lane for each consumer.
    """

    tiles: gl.shared_memory_descriptor  # (SLOTS * LANES, 1, 1, rows, BLOCK_D)
    full: gl.shared_memory_descriptor  # mbarriers that complete when the tile's bytes have arrived
    empty: gl.shared_memory_descriptor  # mbarriers that complete when every reading thread has released the tile
    SLOTS: gl.constexpr
    LANES: gl.constexpr
    READERS: gl.constexpr

    @gluon.jit
    def make_barriers(self, FIRST: gl.constexpr, BEHIND: gl.constexpr):
        """Initialize the barriers of the slots FIRST to BEHIND - 1."""
        for i in gl.static_range(FIRST * self.LANES, BEHIND * self.LANES):
            mbarrier.init(self.full.index(i), count=1)  # the producer's `expect`; the barrier counts bytes separately
            mbarrier.init(self.empty.index(i), count=128 * self.READERS)  # each reading thread arrives once

    @gluon.jit
    def slot(self, i, lane=0):
        """Return the index of load number i's tile and barriers."""
        return (i % self.SLOTS) * self.LANES + lane

    @gluon.jit
    def phase(self, i):
        """Return the phase of the barriers for load number i: how often its slot was in use before, modulo two."""
        return (i // self.SLOTS) & 1

    @gluon.jit
    def tile(self, i, lane=0):
        """Return the tile of load number i, [rows, BLOCK_D]."""
        return self.tiles.index(self.slot(i, lane)).reshape([self.tiles.shape[3], self.tiles.shape[4]])

    @gluon.jit
    def wait_empty(self, i, lane=0):
        """Producer: wait until load number i's slot is empty.

        Without this wait TMA would overwrite a tile that a consumer still reads. For a new barrier, the phase before its first
        phase counts as complete: the producer does not wait in the first round.
        """
        mbarrier.wait(self.empty.index(self.slot(i, lane)), self.phase(i) ^ 1)

    @gluon.jit
    def load(self, i, descriptor, batch, head, row, lane=0):
        """Producer: wait until load number i's slot is empty, then start the copy of the rows from `row` on into it."""
        self.wait_empty(i, lane)
        slot = self.slot(i, lane)
        full = self.full.index(slot)
        # `expect` comes before the copy. Otherwise the bytes that arrive could complete the phase too early.
        mbarrier.expect(full, descriptor.block_type.nbytes)
        tma_load(descriptor, [batch, head, row, 0], full, self.tiles.index(slot))

    @gluon.jit
    def wait_full(self, i, lane=0, pred=True):
        """Consumer: wait until load number i has arrived. Without this wait a product would read the tile of the last round."""
        mbarrier.wait(self.full.index(self.slot(i, lane)), self.phase(i), pred=pred)

    @gluon.jit
    def release(self, i, lane=0):
        """Consumer: say that this thread has read load number i. Without it the producer would wait for ever a round later.

        For `mbarrier.arrive`, the compiler would first put a barrier across the warpgroup. The instruction here arrives when the
        thread's cp.async copies are complete. The thread has no such copies, so it arrives at once.
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
    """Allocate a ring for tiles of a TMA descriptor. READERS consumers read each tile.

    ROWS: rows of a tile; 0 means the rows of the descriptor's box. READY: slots that get their barriers now; 0 means all slots.
    """
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
    """The tiles of query rows that this program computes, in their order. A tile belongs to one head of one sequence.

    With DEALT, the host has dealt the tiles (`plan.deal_tiles`), and `schedule` has a row for each program. Otherwise program p takes
    the numbers p, p + programs, ... Numbers before `whole` are tiles. The other numbers are parts of tiles, PARTS to a tile; a part
    has 64 rows, and a program's first consumer computes it alone.
    """

    schedule: gl.tensor
    stride: gl.tensor
    tiles_m: gl.tensor
    numbers: gl.tensor
    whole: gl.tensor
    row_bits: gl.tensor  # a dealt number has the row tile in its lowest `row_bits` bits, and the head above
    DEALT: gl.constexpr
    PARTS: gl.constexpr

    @gluon.jit
    def first(self):
        """Return the number of this program's tiles, its first tile, and the address of its further tiles."""
        program = gl.program_id(0)
        entry = self.schedule + program * self.stride
        if self.DEALT:
            return uniform(gl.load(entry)), uniform(gl.load(entry + 1)), entry + 2
        else:
            return gl.cdiv(self.numbers - program, gl.num_programs(0)), program, entry

    @gluon.jit
    def is_part(self, t):
        """Whether the first consumer computes tile t alone, without the others."""
        return (t >= self.whole) & (self.PARTS > 1)

    @gluon.jit
    def start_next(self, t, rest, i):
        """Start to load the number of the tile that follows t, the program's tile number i; `finish_next` returns it."""
        return gl.load(rest + i) if self.DEALT else t + gl.num_programs(0)

    @gluon.jit
    def finish_next(self, t_next):
        """Return the number of the tile that `start_next` has started to load."""
        return uniform(t_next) if self.DEALT else t_next

    @gluon.jit
    def locate(self, t):
        """Return for a tile number the row tile, the head counted over all sequences, and the part of the row tile."""
        if self.DEALT:
            return t & ((1 << self.row_bits) - 1), t >> self.row_bits, 0
        else:
            behind = gl.maximum(t - self.whole, 0)
            t = gl.minimum(t, self.whole) + behind // self.PARTS
            head = t // self.tiles_m
            return t - head * self.tiles_m, head, behind % self.PARTS


@aggregate
class Work:
    """The argument of every role of the kernel: sizes, rings, tiles, and the constants for which the kernel is compiled."""

    sq: gl.tensor
    sk: gl.tensor
    back: gl.tensor  # number of keys before its position that a query sees, or the table of `intervals.py`
    ahead: gl.tensor  # number of keys behind its position that a query sees
    offset: gl.tensor  # rows by which a head's first tile begins before its first query
    heads: gl.tensor
    group: gl.tensor
    lse_wanted: gl.tensor  # 0 or 1
    c: gl.tensor
    q: Ring
    k: Ring
    v: Ring
    todo: Tiles
    PLAN: gl.constexpr  # plan.Plan: tile and slots
    CASE: gl.constexpr  # plan.Case: mask, and order of the tiles
    PACKED: gl.constexpr  # whether a table has the interval of each row
    WINDOW: gl.constexpr  # whether a window can hide keys of every block, not only of the last blocks

    @gluon.jit
    def place(self, t):
        """Return a tile's head, first row, end of its rows, its blocks of keys [lo, hi), and the key where block 0 begins.

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
        """Return for a head counted over all sequences the sequence, the head of queries, and the head of keys."""
        batch = flat // self.heads
        head = flat - batch * self.heads
        return batch, head, head // self.group

    @gluon.jit
    def visible_blocks(self, row, ROWS: gl.constexpr, stop, base):
        """Return the blocks of keys [lo, hi) that the rows row .. row+ROWS-1 may see. The tile's rows end at `stop`."""
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
        """Return right and left. If i counts the blocks of [lo, hi) from the last, blocks right <= i < left need no mask."""
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
        """Return the scores of a block, with minus infinity where a row may not see the key, or where there is no key."""
        rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
        if self.PACKED:
            first, behind = row_bounds(self.back, block.row + gl.arange(0, s.shape[0], rows), self.sq, self.sq)
            return keep_columns(s, first - block.key, behind - block.key)
        else:
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
    """A block of keys for a consumer: its load number in the rings of K and V, the first query row, the first key."""

    number: gl.tensor
    row: gl.tensor
    key: gl.tensor
