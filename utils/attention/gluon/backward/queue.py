"""An SM that takes block after block: the numbers of the blocks, drawn by the producer and told to the other roles.

A block that is launched for itself begins with an empty SM: it sets up its barriers and waits for the first K and Q, a few
microseconds in which the tensor cores do nothing, and it ends with stores. Under a causal mask a block of 4096 tokens has 33
tiles of 2 microseconds on average, so that this is several percent. Here as many programs as the GPU has SMs draw blocks
from a counter in memory:

    producer    draws the number of the next block, tells it the others through two slots in shared memory, and loads the
                next K, V, Q and dO while dV and dK of the last block leave. Under a mask it draws when it has asked for
                this block's last tile: drawn at a long block's start, the next one would wait for its end while other SMs
                have nothing to do
    others      count tiles through, over all blocks, as the rings do
    the end     a number behind the last block

With `even` nothing is drawn. All blocks' tiles stand in one row, each block preceded by BLOCK_UNITS for what its beginning
takes, and a program gets an equal share of that row: it begins and ends inside of blocks, whose parts are added up (`split.py`).
"""

# A tuple is unpacked whole: in a kernel `_` would be a variable like any other, with one type.

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from utils.attention.gluon.backward.balance import BLOCK_UNITS
from utils.attention.gluon.backward.pipeline import block_part
from utils.attention.gluon.shared import aggregate, uniform

UNITS = gl.constexpr(BLOCK_UNITS)


@gluon.jit
def block_units(sizes, n):
    """Length of the block of keys number n in the row of all blocks."""
    lo, hi = sizes.tiles_of(n * sizes.PLAN.block_n)
    return (hi - lo) * sizes.group + UNITS


@aggregate
class Queue:
    """Blocks that a program works on one after another: numbers that the producer draws and tells the other roles."""

    counter: gl.tensor  # pointer to the number of blocks drawn so far, by all programs
    programs: gl.tensor  # of this launch; each has its own number as its first block
    end: gl.tensor  # number of blocks, or parts of blocks; with `even` the length of the row of all blocks
    blocks_n: gl.tensor
    section: gl.tensor
    total: gl.tensor
    whole: gl.tensor
    parts: gl.tensor
    numbers: gl.shared_memory_descriptor  # (2, 1) int32
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    freed: gl.shared_memory_descriptor  # mbarrier: K and V may be overwritten

    @gluon.constexpr_function
    def __init__(self, counter, programs, end, blocks_n, section, total, whole, parts, numbers, full, empty, freed):
        self.counter = counter
        self.programs = programs
        self.end = end
        self.blocks_n = blocks_n
        self.section = section
        self.total = total
        self.whole = whole
        self.parts = parts
        self.numbers = numbers
        self.full = full
        self.empty = empty
        self.freed = freed

    @gluon.jit
    def place(self, work, number):
        """`work` at block `number`."""
        order = (self.blocks_n, self.section, self.total, self.whole, self.parts)
        return work.moved(block_part(work.sizes, number, *order))

    @gluon.jit
    def bounds(self, EVEN: gl.constexpr):
        """Number of this program's first block, and the number at which it ends."""
        number = gl.program_id(0)
        end = self.end
        if EVEN:
            end = self.end * (number + 1) // self.programs
            number = self.end * number // self.programs
        return number, end

    @gluon.jit
    def row(self, sizes, number, n, base):
        """With `even`: block of keys, and where its first head begins, of place `number`; n, base: of a place before it."""
        length = block_units(sizes, n) * self.total
        while number >= base + length:
            base += length
            n += 1
            length = block_units(sizes, n) * self.total
        return n, base

    @gluon.jit
    def share(self, work, number, n, base, end):
        """With `even`: `work` at what this program has of the block at place `number`, and the place behind it."""
        length = block_units(work.sizes, n)
        flat = (number - base) // length
        first = number - base - flat * length
        last = gl.minimum(length, first + end - number)
        at = gl.maximum(first - UNITS, 0)
        count = gl.maximum(last - UNITS, 0) - at
        # A program has two parts of blocks at most: of the one that it begins inside of, and of the one that it ends in.
        slot = gl.where(last - first < length, 2 * gl.program_id(0) + gl.where(first == 0, 1, 0), -1)
        batch = flat // work.sizes.kv_heads
        place = (n * work.sizes.PLAN.block_n, batch, flat - batch * work.sizes.kv_heads, slot, at, count)
        return work.moved(place), number + last - first

    @gluon.jit
    def draw(self):
        """Producer: the number of the next block."""
        return gl.atomic_add(self.counter, 1, sem="relaxed") + self.programs

    @gluon.jit
    def publish(self, turn, number, WARPS: gl.constexpr):
        """Producer: tell the other roles the number of the block after block `turn` of this program."""
        slot = turn & 1
        mbarrier.wait(self.empty.index(slot), ((turn >> 1) & 1) ^ 1)  # the number of two turns ago has been read
        self.numbers.index(slot).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
        mbarrier.arrive(self.full.index(slot), count=1)

    @gluon.jit
    def next(self, turn, WARPS: gl.constexpr):
        """Other roles: the number of the block after block `turn` of this program."""
        slot = turn & 1
        mbarrier.wait(self.full.index(slot), (turn >> 1) & 1)
        number = self.numbers.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0]))
        number = uniform(gl.sum(number, 0))
        mbarrier.arrive(self.empty.index(slot), count=1)
        return number


@gluon.jit
def make_queue(counter_ptr, end, blocks_n, section, total, whole, parts, READERS: gl.constexpr, EVEN: gl.constexpr):
    """Allocate a queue; READERS: roles that read the numbers. One role tells when K and V may be overwritten."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    read = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    freed = gl.allocate_shared_memory(gl.int64, [1], barrier)
    if not EVEN:
        # Nobody uses them with `even`: the compiler may then give their place to data, which a barrier must not lie under.
        for w in gl.static_range(2):
            mbarrier.init(told.index(w), count=1)
            mbarrier.init(read.index(w), count=READERS)
    mbarrier.init(freed, count=1)
    programs = gl.num_programs(0)
    return Queue(counter_ptr, programs, end, blocks_n, section, total, whole, parts, numbers, told, read, freed)
