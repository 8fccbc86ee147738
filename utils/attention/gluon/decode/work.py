"""Which program reads which blocks of keys, and the ring of tiles they come through.

The blocks of all heads stand in one long row, sequence by sequence, head by head, and each program takes the same number
of neighbours, so every SM reads the same number of bytes. A head whose blocks lie in several programs is merged.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.shared import aggregate


@aggregate
class Cache:
    """Sizes of the cache and of the question, the same for all programs."""

    lens_ptr: gl.tensor
    table_ptr: gl.tensor
    table_stride: gl.tensor
    batch: gl.tensor
    heads: gl.tensor  # heads of keys times tiles of queries
    sq: gl.tensor
    sk: gl.tensor  # keys of every sequence; with lengths, unused
    window: gl.tensor
    pages: gl.tensor  # columns of the block table
    PLAN: gl.constexpr
    CASE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, lens_ptr, table_ptr, table_stride, batch, heads, sq, sk, window, pages, PLAN, CASE):
        self.lens_ptr = lens_ptr
        self.table_ptr = table_ptr
        self.table_stride = table_stride
        self.batch = batch
        self.heads = heads
        self.sq = sq
        self.sk = sk
        self.window = window
        self.pages = pages
        self.PLAN = gl.constexpr(PLAN)
        self.CASE = gl.constexpr(CASE)

    @gluon.jit
    def length(self, b):
        """Number of keys of sequence b; behind the last sequence, that of the last."""
        if self.CASE.lengths:
            return gl.load(self.lens_ptr + gl.minimum(b, self.batch - 1))
        else:
            return self.sk

    @gluon.jit
    def first_block(self, length):
        """First block with a key that the first new token sees."""
        if self.CASE.window:
            return gl.maximum(length - self.sq - self.window + 1, 0) // self.PLAN.block_n
        else:
            return length * 0

    @gluon.jit
    def blocks(self, length):
        """Number of blocks that a sequence of this length needs; one at least, so that each row is written."""
        last = (length + (self.PLAN.block_n - 1)) // self.PLAN.block_n
        return gl.maximum(last - self.first_block(length), 1)

    @gluon.jit
    def split(self):
        """The Split of all blocks over the programs of this launch."""
        return self.split_for(gl.num_programs(0))

    @gluon.jit
    def split_for(self, programs):
        """The Split of all blocks over that many programs, or fewer if there are fewer blocks."""
        grain = gl.to_tensor(1)
        if self.CASE.lengths:
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            at = gl.arange(0, self.CASE.batch_block, layout)
            lengths = gl.load(self.lens_ptr + at, mask=at < self.batch, other=0)
            blocks = gl.where(at < self.batch, self.blocks(lengths), 0)
            total = gl.sum(blocks, 0) * self.heads
            if self.PLAN.level:
                total, grain = self.split_level(total, gl.max(blocks, 0), programs)
        elif self.CASE.aligned:
            total = self.heads * self.batch
            grain = self.blocks(self.sk)
        else:
            total = self.heads * self.batch * self.blocks(self.sk)
        programs = gl.minimum(programs, total)
        share = total // programs
        return Split(share, total - share * programs, programs, grain)

    @gluon.jit
    def split_level(self, total, most, programs):
        """Number of grains and blocks of a grain, for lengths that only the kernel knows; most: blocks of the longest.

        Where all sequences have as many blocks and whole heads are balanced, by the rule of `arrangement.aligned_split`, a grain
        is a head, and nothing is merged. Otherwise it is a block.
        """
        heads = self.heads * self.batch
        balanced = 25 * (gl.cdiv(heads, programs) * programs) <= 26 * heads
        whole = (total == most * heads) & (balanced | (most == 1))
        return gl.where(whole, heads, total), gl.where(whole, most, 1)

    @gluon.jit
    def place(self, flat):
        """First block of a head, counted over all sequences, in the long row; and how many it has."""
        if self.CASE.lengths:
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            at = gl.arange(0, self.CASE.batch_block, layout)
            b = flat // self.heads
            lengths = gl.load(self.lens_ptr + at, mask=at < b, other=0)
            before = gl.sum(gl.where(at < b, self.blocks(lengths), 0), 0)
            blocks = self.blocks(self.length(b))
            return before * self.heads + (flat - b * self.heads) * blocks, blocks
        else:
            blocks = self.blocks(self.sk)
            return flat * blocks, blocks

    @gluon.jit
    def locate(self, unit):
        """The cursor at block number `unit` of the long row."""
        if self.CASE.lengths:
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            at = gl.arange(0, self.CASE.batch_block, layout)
            lengths = gl.load(self.lens_ptr + at, mask=at < self.batch, other=0)
            blocks = gl.where(at < self.batch, self.blocks(lengths), 0) * self.heads
            ends = gl.associative_scan(blocks, 0, _add)
            before = ends <= unit
            b = gl.sum(before.to(gl.int32), 0)
            begin = gl.max(gl.where(before, ends, 0), 0)
            length = self.length(b)
        else:
            b = gl.to_tensor(0)
            begin = gl.to_tensor(0)
            length = self.sk
        blocks = self.blocks(length)
        head = (unit - begin) // blocks
        j = unit - begin - head * blocks
        if not self.CASE.lengths:
            b = head // self.heads
            head = head - b * self.heads
        return Cursor(b, head, j, length, self.first_block(length), blocks)

    @gluon.jit
    def start(self, split, program):
        """The cursor at a program's first block. Whole heads need one division for it."""
        if self.CASE.aligned and not self.CASE.lengths and (self.PLAN.lean or self.PLAN.consumers > 0):
            flat = split.first_grain(program)
            b = flat // self.heads
            return Cursor(
                b, flat - b * self.heads, gl.to_tensor(0), self.sk, self.first_block(self.sk), self.blocks(self.sk)
            )
        else:
            return self.locate(split.begin(program))

    @gluon.jit
    def block_at(self, cursor, k):
        """Number in its head of the block that is read k blocks behind the cursor's."""
        if self.PLAN.backward:
            return cursor.blocks - 1 - cursor.j - k
        else:
            return cursor.j + k

    @gluon.jit
    def advance(self, cursor):
        """The cursor at the next block."""
        j = cursor.j + 1
        over = j == cursor.blocks
        j = gl.where(over, 0, j)
        head = cursor.head + over.to(gl.int32)
        b = cursor.b + (head == self.heads).to(gl.int32)
        head = gl.where(head == self.heads, 0, head)
        if self.CASE.lengths:
            length = cursor.length
            first = cursor.first
            blocks = cursor.blocks
            if b != cursor.b:
                length = self.length(b)
                first = self.first_block(length)
                blocks = self.blocks(length)
            return Cursor(b, head, j, length, first, blocks)
        else:
            return Cursor(b, head, j, cursor.length, cursor.first, cursor.blocks)


@gluon.jit
def _add(a, b):
    return a + b


@aggregate
class Cursor:
    """One block: sequence, head (tile of queries and head of keys), number in the head; and the sequence's sizes."""

    b: gl.tensor
    head: gl.tensor
    j: gl.tensor
    length: gl.tensor
    first: gl.tensor
    blocks: gl.tensor

    @gluon.constexpr_function
    def __init__(self, b, head, j, length, first, blocks):
        self.b = b
        self.head = head
        self.j = j
        self.length = length
        self.first = first
        self.blocks = blocks

    @gluon.jit
    def behind(self, blocks):
        """The cursor that many blocks further, in the same head."""
        return Cursor(self.b, self.head, self.j + blocks, self.length, self.first, self.blocks)

    @gluon.jit
    def at_last(self):
        """The cursor at the last block of this head."""
        return Cursor(self.b, self.head, self.blocks - 1, self.length, self.first, self.blocks)


@aggregate
class Split:
    """Programs 0 .. extra-1 take share + 1 grains, the others share; a grain is a block, or a whole head."""

    share: gl.tensor
    extra: gl.tensor
    programs: gl.tensor
    grain: gl.tensor

    @gluon.constexpr_function
    def __init__(self, share, extra, programs, grain):
        self.share = share
        self.extra = extra
        self.programs = programs
        self.grain = grain

    @gluon.jit
    def first_grain(self, program):
        """First grain of a program."""
        return program * self.share + gl.minimum(program, self.extra)

    @gluon.jit
    def begin(self, program):
        """First block of a program."""
        return self.first_grain(program) * self.grain

    @gluon.jit
    def owner(self, unit):
        """The program that reads block number `unit`."""
        unit = unit // self.grain
        long = self.extra * (self.share + 1)
        return gl.where(unit < long, unit // (self.share + 1), self.extra + (unit - long) // self.share)
