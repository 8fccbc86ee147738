"""Which program reads which blocks of keys.

The blocks of all heads stand in one long row, sequence by sequence, head by head. Each program takes the same number of
neighbours; a head's beginning counts as a block. A head that lies in several programs is merged.

Where a head has several tiles of query rows, as many programs have the same blocks, one for each tile. They run at the same time,
so that one of them reads the keys from memory, and the others find them in the L2.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.decode.blocks import when_used
from utils.attention.gluon.shared import aggregate

CHUNK = gl.constexpr(128)  # sequences whose lengths a warp looks at together, four a lane
# Blocks that a head's beginning counts as, since nothing runs beside its first scores and its store. With 0, 32 x 32 heads of up to 768
# keys took 90 us in place of 76: the programs of short sequences had the most heads.
BEGINNING = gl.constexpr(1)


@gluon.jit
def _add(a, b):
    return a + b


@aggregate
class Split:
    """Programs 0 .. extra-1 take share + 1 units, the others share.

    A head is so many units: its beginning, and behind it grains of so many blocks, of one or of those of a whole head.
    """

    share: gl.tensor
    extra: gl.tensor
    grain: gl.tensor
    beginning: gl.tensor  # units

    @gluon.jit
    def begin(self, program):
        """First unit of a program."""
        return program * self.share + gl.minimum(program, self.extra)

    @gluon.jit
    def units(self, blocks):
        """Units of a head of so many blocks."""
        return self.beginning + gl.cdiv(blocks, self.grain)

    @gluon.jit
    def blocks_before(self, unit, blocks):
        """How many blocks stand before a unit, if heads of so many blocks stand in one row; and how many whole heads."""
        head = unit // self.units(blocks)
        j = (unit - head * self.units(blocks) - self.beginning) * self.grain
        return head * blocks + gl.minimum(gl.maximum(j, 0), blocks), head


@aggregate
class Cursor:
    """One block: sequence, head of keys, number in the head; and the sequence's sizes."""

    b: gl.tensor
    head: gl.tensor
    j: gl.tensor
    length: gl.tensor
    first: gl.tensor
    blocks: gl.tensor

    @gluon.jit
    def behind(self, blocks):
        """The cursor that many blocks further, in the same head."""
        return Cursor(self.b, self.head, self.j + blocks, self.length, self.first, self.blocks)

    @gluon.jit
    def at_last(self):
        """The cursor at the last block of this head."""
        return Cursor(self.b, self.head, self.blocks - 1, self.length, self.first, self.blocks)


@aggregate
class Cache:
    """Sizes of the cache and of the question, the same for all programs."""

    lens_ptr: gl.tensor
    table_ptr: gl.tensor
    table_stride: gl.tensor
    batch: gl.tensor
    heads: gl.tensor  # of keys
    rows: gl.tensor  # query rows of a head of keys: query heads of its group times new tokens
    sq: gl.tensor  # new tokens
    sk: gl.tensor  # keys of every sequence where it has no length of its own
    left: gl.tensor  # a query sees keys behind its position minus this
    right: gl.tensor  # and up to its position plus this
    lengths: gl.tensor  # 1: each sequence has a length of its own
    page_bits: gl.tensor  # logarithm of the tokens of a page; 30 for a cache in one piece
    pages: gl.tensor  # columns of the block table; 0 for a cache in one piece
    whole: (
        gl.tensor
    )  # 1: programs take whole heads, of equal lengths or at most one each, and there is no second launch
    bits: gl.tensor  # 2^bits programs of a cluster take the blocks of a head in turn
    c: gl.tensor  # scale of the scores times log2(e)
    PLAN: gl.constexpr

    @gluon.jit
    def tile(self):
        """Which tile of a head's query rows this program computes; what follows from it would otherwise stay in registers for all heads."""
        return gl.to_tensor(0) if self.PLAN.cluster else when_used(gl.program_id(0))

    @gluon.jit
    def length(self, b):
        """Number of keys of sequence b; behind the last sequence, that of the last."""
        return gl.load(self.lens_ptr + gl.minimum(b, self.batch - 1), mask=self.lengths > 0, other=self.sk)

    @gluon.jit
    def first_visible(self, length):
        """First block with a key that the first new token of a sequence sees."""
        return gl.maximum(length - self.sq - self.left + 1, 0) // self.PLAN.block_n

    @gluon.jit
    def count_blocks(self, length):
        """Number of blocks that a sequence needs; one at least, so that each row is written."""
        return gl.maximum(gl.cdiv(length, self.PLAN.block_n) - self.first_visible(length), 1)

    @gluon.jit
    def blocks_of_chunk(self, begin):
        """Blocks of the sequences begin .. begin + CHUNK - 1, zero for those that do not exist; each warp has all of them."""
        b = begin + gl.arange(0, CHUNK, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
        lengths = gl.load(self.lens_ptr + b, mask=b < self.batch, other=0)
        return gl.where(b < self.batch, self.count_blocks(lengths), 0)

    @gluon.jit
    def at(self, b, head, j, length):
        """The cursor at a block of a sequence of this length."""
        return Cursor(b, head, j, length, self.first_visible(length), self.count_blocks(length))

    @gluon.jit
    def deal(self, programs):
        """The Split of all blocks over that many programs."""
        each = self.count_blocks(self.sk)
        total = self.batch * each
        if (self.lengths > 0) & (self.whole == 0):
            total = 0 * total
            for begin in range(0, self.batch, CHUNK):
                total += gl.sum(self.blocks_of_chunk(begin), 0)
        # With a window a shorter sequence may need one block more.
        grain = gl.where(self.whole > 0, each + self.lengths, 1)
        beginning = gl.where(self.whole > 0, 0, BEGINNING)
        units = self.heads * (self.batch * beginning + gl.where(self.whole > 0, self.batch, total))
        programs = gl.minimum(programs, units)
        share = units // programs
        return Split(share, units - share * programs, grain, beginning)

    @gluon.jit
    def start(self):
        """Where the blocks of this program begin, and how many it has; behind the last sequence where there are none."""
        program = gl.program_id(1)
        split = self.deal(gl.num_programs(1))
        unit, end = split.begin(program), split.begin(program + 1)
        each = split.units(self.count_blocks(self.sk)) * self.heads
        b = unit // each
        begin = b * each
        count = 0 * b
        unequal = (self.lengths > 0) & (self.whole == 0)
        if unequal:
            b = 0 * b
            begin = 0 * begin
            total = 0 * begin
            for chunk in range(0, self.batch, CHUNK):
                blocks = self.blocks_of_chunk(chunk)
                units = gl.where(blocks > 0, split.units(blocks) * self.heads, 0)
                ends = total + gl.associative_scan(units, 0, _add)
                before = ends <= unit
                b += gl.sum(before.to(gl.int32), 0)
                begin = gl.maximum(begin, gl.max(gl.where(before, ends, 0), 0))
                first = gl.minimum(gl.maximum(unit - (ends - units), 0), units)
                last = gl.minimum(gl.maximum(end - (ends - units), 0), units)
                count += gl.sum(split.blocks_before(last, blocks)[0] - split.blocks_before(first, blocks)[0], 0)
                total = gl.max(ends, 0)
        zero = gl.to_tensor(0)
        cursor = self.at(b, zero, zero, self.length(b))
        skipped, head = split.blocks_before(unit - begin, cursor.blocks)
        if not unequal:
            count = split.blocks_before(gl.minimum(end, self.batch * each) - begin, cursor.blocks)[0] - skipped
        return Cursor(b, head, skipped - head * cursor.blocks, cursor.length, cursor.first, cursor.blocks), count

    @gluon.jit
    def advance(self, cursor):
        """The cursor at the program's next block."""
        if self.PLAN.cluster:
            return cursor.behind(1 << self.bits)  # the programs of a cluster have one head, and take its blocks in turn
        j = cursor.j + 1
        over = j >= cursor.blocks
        j = gl.where(over, 0, j)
        head = cursor.head + over.to(gl.int32)
        b = cursor.b + (head == self.heads).to(gl.int32)
        head = gl.where(head == self.heads, 0, head)
        length = cursor.length
        if b != cursor.b:
            length = self.length(b)
        return self.at(b, head, j, length)
