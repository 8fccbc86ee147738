"""Deal blocks of keys to programs.

The blocks of all heads stand in one long row, sequence by sequence, head by head. Each program takes the same number of
neighbours; the beginning of a head counts as a block. If a head lies in several programs, its parts are merged.

If a head has several tiles of query rows, each tile has a program with the same blocks. These programs run at the same time, so
that one of them reads the keys from memory, and the others find them in the L2.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.decode.blocks import fresh_register
from utils.attention.gluon.shared import aggregate

CHUNK = gl.constexpr(128)  # number of sequences whose lengths a warp reads together, four in each lane
# A head's beginning counts as so many blocks, since nothing runs beside its first scores and its store. With 0, 32 x 32 heads of up to
# 768 keys took 90 us instead of 76: programs with short sequences had too many heads.
BEGINNING = gl.constexpr(1)


@gluon.jit
def _add(a, b):
    return a + b


@aggregate
class Split:
    """The units of each program: programs 0 .. extra - 1 take share + 1 units, the others take share units.

    A head has `beginning` units for its start, and then a unit for each `grain` blocks. A grain is one block or a whole head.
    """

    share: gl.tensor
    extra: gl.tensor
    grain: gl.tensor
    beginning: gl.tensor  # units

    @gluon.jit
    def begin(self, program):
        """Return the first unit of a program."""
        return program * self.share + gl.minimum(program, self.extra)

    @gluon.jit
    def units(self, blocks):
        """Return the units of a head of so many blocks."""
        return self.beginning + gl.cdiv(blocks, self.grain)

    @gluon.jit
    def blocks_before(self, unit, blocks):
        """Return the numbers of blocks and of whole heads before a unit, in a row of heads of so many blocks."""
        head = unit // self.units(blocks)
        j = (unit - head * self.units(blocks) - self.beginning) * self.grain
        return head * blocks + gl.minimum(gl.maximum(j, 0), blocks), head


@aggregate
class Cursor:
    """The place of one block: sequence, head of keys, number in the head; and the sizes of the sequence."""

    b: gl.tensor
    head: gl.tensor
    j: gl.tensor
    length: gl.tensor
    first: gl.tensor
    blocks: gl.tensor

    @gluon.jit
    def skip(self, blocks):
        """Return the cursor so many blocks further in the same head."""
        return Cursor(self.b, self.head, self.j + blocks, self.length, self.first, self.blocks)

    @gluon.jit
    def last_block(self):
        """Return the cursor at the last block of this head."""
        return Cursor(self.b, self.head, self.blocks - 1, self.length, self.first, self.blocks)


@aggregate
class Cache:
    """Sizes of the cache and of the queries, the same for all programs."""

    lens_ptr: gl.tensor
    table_ptr: gl.tensor
    table_stride: gl.tensor
    batch: gl.tensor
    heads: gl.tensor  # heads of keys
    rows: gl.tensor  # query rows of a head of keys: query heads of its group times new tokens
    sq: gl.tensor  # new tokens
    sk: gl.tensor  # keys of every sequence, if there are no lengths
    left: gl.tensor  # a query sees keys from its position - left + 1 on
    right: gl.tensor  # and keys up to its position + right
    lengths: gl.tensor  # 1: `lens_ptr` has the length of each sequence
    page_bits: gl.tensor  # logarithm of the tokens of a page; 30 for a cache in one piece
    pages: gl.tensor  # columns of the block table; 0 for a cache in one piece
    whole: gl.tensor  # 1: programs take whole heads, of equal lengths or at most one each, and nothing is merged
    bits: gl.tensor  # 2^bits programs of a cluster take the blocks of a head in turn
    c: gl.tensor  # scale of the scores times log2(e)
    PLAN: gl.constexpr

    @gluon.jit
    def tile(self):
        """Return the number of this program's tile of query rows, in a new register: so nothing that depends on it stays in registers."""
        return gl.to_tensor(0) if self.PLAN.cluster else fresh_register(gl.program_id(0))

    @gluon.jit
    def length(self, b):
        """Return the number of keys of sequence b, or of the last sequence if b is behind it."""
        return gl.load(self.lens_ptr + gl.minimum(b, self.batch - 1), mask=self.lengths > 0, other=self.sk)

    @gluon.jit
    def first_visible(self, length):
        """Return the first block with a key that the first new token of a sequence sees."""
        return gl.maximum(length - self.sq - self.left + 1, 0) // self.PLAN.block_n

    @gluon.jit
    def count_blocks(self, length):
        """Return the number of blocks of a sequence, at least one, so that each row of the output is written."""
        return gl.maximum(gl.cdiv(length, self.PLAN.block_n) - self.first_visible(length), 1)

    @gluon.jit
    def blocks_of_chunk(self, begin):
        """Return, in each warp, the blocks of the sequences begin .. begin + CHUNK - 1; zero behind the last sequence."""
        b = begin + gl.arange(0, CHUNK, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
        lengths = gl.load(self.lens_ptr + b, mask=b < self.batch, other=0)
        return gl.where(b < self.batch, self.count_blocks(lengths), 0)

    @gluon.jit
    def at(self, b, head, j, length):
        """Return the cursor at a block of a sequence of this length."""
        return Cursor(b, head, j, length, self.first_visible(length), self.count_blocks(length))

    @gluon.jit
    def deal(self, programs):
        """Return the Split of all blocks over so many programs."""
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
        """Return the cursor at this program's first block, and the number of its blocks, which may be zero."""
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
        """Return the cursor at the program's next block."""
        if self.PLAN.cluster:
            return cursor.skip(1 << self.bits)  # the programs of a cluster take the blocks of a head in turn
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
