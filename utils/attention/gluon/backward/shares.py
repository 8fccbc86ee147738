"""Which tiles a program of step 6 works on: one block of keys, or an equal share of all blocks' tiles, and sums of parts.

Few blocks leave SMs without work: 72 blocks on 132 SMs, or blocks of very different length under a causal mask. Where
`order.py` says that it ends earlier, all blocks' tiles stand in one row, each block preceded by UNITS for what its beginning
takes, and a program gets an equal share of that row. It begins and ends inside of blocks: such a part leaves its dK and dV
in memory, fp32, and `finish_parts` adds them up, always in the same order.

    parts of dK and dV    (slots, halves of the keys, dV and dK, 64 * BLOCK_D) fp32, in the order of `fragments.py`
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.backward.fragments import from_fragments
from utils.attention.gluon.backward.order import BLOCK_UNITS
from utils.attention.gluon.backward.pipeline import SIZES, Sizes, block_place, part_of
from utils.attention.gluon.shared import aggregate

UNITS = gl.constexpr(BLOCK_UNITS)


@gluon.jit
def block_units(sizes, n):
    """Length of the block of keys number n in the row of all blocks."""
    lo, hi = sizes.tiles_of(n * sizes.PLAN.block_n)
    return (hi - lo) * sizes.group + UNITS


@aggregate
class Share:
    """The blocks of a launch, and what a program has of them."""

    blocks_n: gl.tensor  # blocks of keys of one head
    section: gl.tensor  # heads of keys whose blocks are taken together
    total: gl.tensor  # heads of keys, of all sequences
    units: gl.tensor  # length of the row of all blocks; 0: a program takes one block

    @gluon.constexpr_function
    def __init__(self, blocks_n, section, total, units):
        self.blocks_n = blocks_n
        self.section = section
        self.total = total
        self.units = units

    @gluon.jit
    def bounds(self):
        """This program's first place in the row, and its end; where programs take blocks, the number of its first one."""
        program = gl.program_id(0)
        programs = gl.num_programs(0)
        even = self.units > 0
        begin = gl.where(even, self.units * program // programs, program)
        return begin, gl.where(even, self.units * (program + 1) // programs, self.blocks_n * self.total)

    @gluon.jit
    def part(self, sizes, place, end, n, base):
        """This program's part at `place`, the place behind it, and n and base for the next call.

        n, base: a block of keys at or before that of `place`, and where its first head begins in the row; at first 0, 0.
        """
        zero = place * 0
        if self.units > 0:
            length = block_units(sizes, n)
            while place >= base + length * self.total:
                base += length * self.total
                n += 1
                length = block_units(sizes, n)
            flat = (place - base) // length
            first = place - base - flat * length
            last = gl.minimum(length, first + end - place)
            at = gl.maximum(first - UNITS, 0)
            count = gl.maximum(last - UNITS, 0) - at
            # A program has two parts of blocks at most: of the one that it begins inside of, and of the one that it ends in.
            slot = gl.where(last - first < length, 2 * gl.program_id(0) + gl.where(first == 0, 1, 0), -1)
            behind = place + last - first
        else:
            n, flat = block_place(place, self.blocks_n, self.section, self.total)
            at = zero
            count = zero - 1
            slot = zero - 1
            # Of each next row of blocks the same program, from the other end: long and short blocks take turns.
            programs = gl.num_programs(0)
            row = place // programs
            behind = (2 * row + 2) * programs - 1 - place
        return part_of(sizes, n, flat, at, count, slot), behind, n, base


@gluon.jit
def store_part(parts_ptr, slot, x, WHICH: gl.constexpr):
    """Store a part of dV (WHICH = 0) or dK (1), fp32, not scaled."""
    HALF: gl.constexpr = 64 * x.shape[1]
    BLOCKS: gl.constexpr = x.shape[1] // 8
    layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [512], [1024], [2048]] if BLOCKS == 8 else [[1], [2], [512], [1024], [2048], [4096]],
        lane_bases=[[4], [8], [16], [32], [64]],
        warp_bases=[[128], [256], [HALF]],
        block_bases=[],
        shape=[2 * HALF],
    )
    flat = x.reshape([2, 4, 2, 8, BLOCKS, 4, 2]).permute([0, 4, 1, 3, 5, 2, 6]).reshape([2 * HALF])
    i = gl.arange(0, 2 * HALF, layout)
    at = ((slot.to(gl.int64) * 2 + i // HALF) * 2 + WHICH) * HALF + i % HALF
    gl.store(parts_ptr + at, gl.convert_layout(flat, layout, assert_trivial=True))


@gluon.jit
def slots_of_block(sizes, n, flat, total, units, programs):
    """First slot of head `flat` of block of keys n, and how many parts it has; 0 where one program has all of it."""
    first = 0
    for row in range(n):
        first += block_units(sizes, row) * total
    length = block_units(sizes, n)
    first += flat * length
    # The program that has place i of the row is the last one whose share, units * p // programs, begins at or before i.
    begin = ((first + 1) * programs - 1) // units
    last = ((first + length) * programs - 1) // units
    return 2 * begin + 1, gl.where(begin == last, 0, last - begin + 1)


@gluon.jit(do_not_specialize=[*SIZES, "row_stride", "head_stride", "batch_stride", "programs", "head_dim"])
def finish_parts(
    parts_ptr,
    dv_ptr,
    dk_ptr,
    batch_stride,
    head_stride,
    row_stride,
    sq,
    sk,
    back,
    ahead,
    heads,
    kv_heads,
    group,
    tiles_m,
    blocks_n,
    section,
    total,
    units,
    scale,
    programs,
    head_dim,
    PLAN: gl.constexpr,
):
    """Add up the parts of 64 rows and 32 columns of dV or dK: grid (blocks * 2, 2, BLOCK_D / 32).

    Strides and head_dim are in units of 8 elements.
    """
    BLOCK_D: gl.constexpr = PLAN.block_d
    flat_layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    number = gl.program_id(0) // 2
    half = gl.program_id(0) % 2
    which = gl.program_id(1)
    column = gl.program_id(2) * 32
    sizes = Sizes(sq, sk, back, ahead, heads, kv_heads, group, tiles_m, PLAN)
    n = number // total
    flat = number - n * total
    slot, count = slots_of_block(sizes, n, flat, total, units, programs)
    inside = (half * 2 + which) * (64 * BLOCK_D) + column * 64 + gl.arange(0, 2048, flat_layout)
    sums = gl.zeros([2048], gl.float32, flat_layout)
    for i in range(count):
        # The first part is the end of a program's share, the others are the beginnings of the next programs' shares.
        at = slot + gl.where(i == 0, 0, 2 * i - 1)
        sums += gl.load(parts_ptr + at.to(gl.int64) * (256 * BLOCK_D) + inside)
    batch = flat // kv_heads
    head = flat - batch * kv_heads
    row = n * PLAN.block_n + half * 64 + gl.arange(0, 64, gl.SliceLayout(1, rows))[:, None]
    d = column + gl.arange(0, 32, gl.SliceLayout(0, rows))[None, :]
    x = gl.convert_layout(from_fragments(sums, 32), rows)
    place = (
        batch.to(gl.int64) * batch_stride + head.to(gl.int64) * head_stride + row.to(gl.int64) * row_stride
    ) * 8 + d
    keep = (row < sk) & (d < head_dim * 8) & (count > 0)
    if which == 0:
        gl.store(dv_ptr + place, x.to(dv_ptr.dtype.element_ty), mask=keep)
    else:
        gl.store(dk_ptr + place, (x * scale).to(dk_ptr.dtype.element_ty), mask=keep)
