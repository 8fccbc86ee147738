"""Which tiles a program of step 6 works on: blocks of keys one after another, equal shares of blocks, and sums of their parts.

As many programs as the GPU has SMs draw numbers from a counter in memory. The producer draws the next number when it has
asked for the last tile of the one before, tells the other roles its parts through two slots in shared memory, and loads while
dV and dK leave: a block that is launched for itself begins with an empty SM. The first `whole` numbers are blocks.

Few blocks leave SMs without work: 72 blocks on 132 SMs, or the 68 blocks that are left of 2048 in the last round. All tiles
of such blocks stand in one row, each block preceded by UNITS for what its beginning takes, and the numbers from `whole` on are
equal shares of that row. A share begins and ends inside of blocks: such a part leaves its dK and dV in memory, fp32, and
`finish_parts` adds them up, always in the same order.

    parts of dK and dV    (slots, halves of the keys, dV and dK, 64 * BLOCK_D) fp32, in the order of `fragments.py`
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from utils.attention.gluon.backward.fragments import from_fragments
from utils.attention.gluon.backward.order import BLOCK_UNITS
from utils.attention.gluon.backward.pipeline import SIZES, Part, Sizes, block_place, part_of
from utils.attention.gluon.intervals import tile_at, tile_entry, tile_units
from utils.attention.gluon.shared import aggregate, uniform

UNITS = gl.constexpr(BLOCK_UNITS)


@gluon.jit
def block_units(sizes, n):
    """Length of the block of keys number n in the row of all blocks."""
    if sizes.PLAN.edges == 3:
        lo, hi = tile_entry(sizes.back, n, sizes.sk, 2), tile_entry(sizes.back, n, sizes.sk, 3)
    else:
        lo, hi = sizes.tiles_of(n * sizes.PLAN.block_n)
    return (hi - lo) * sizes.group + UNITS


@gluon.jit
def units_before(sizes, n):
    """Length of the blocks of all keys before number n, of one head."""
    if sizes.PLAN.edges == 3:
        length = tile_units(sizes.back, n, sizes.sk, sizes.group, UNITS)
    else:
        length = n * 0
        for i in range(n):
            length += block_units(sizes, i)
    return length


@aggregate
class Share:
    """The numbers of a launch, how programs draw them, and what a program has of each."""

    blocks_n: gl.tensor  # blocks of keys of one head
    section: gl.tensor  # heads of keys whose blocks are taken together
    total: gl.tensor  # heads of keys, of all sequences
    whole: gl.tensor  # so many numbers are blocks
    shares: gl.tensor  # so many are shares of the blocks behind them
    units: gl.tensor  # length of the row of those blocks
    counter: gl.tensor  # pointer to the number of draws so far, by all programs
    told: gl.shared_memory_descriptor  # (2 * 9, 1) int32: the fields of two parts
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def bounds(self, number):
        """Where a number begins and ends: places in the row of a share, or the number of a block and the next one."""
        share = number - self.whole
        shares = gl.maximum(self.shares, 1)
        begin = gl.where(share < 0, number, self.units * share // shares)
        return begin, gl.where(share < 0, number + 1, self.units * (share + 1) // shares)

    @gluon.jit
    def part(self, sizes, number, place, end):
        """The part of a number at `place`, and the place behind it."""
        at = place * 0
        count = at - 1
        slot = at - 1
        n, flat = block_place(gl.where(number < self.whole, place, 0), self.blocks_n, self.section, self.total)
        behind = place + 1
        if number >= self.whole:
            n, base = self.keys_at(sizes, place)
            length = block_units(sizes, n)
            skipped = (place - base) // length
            block = self.whole + n * self.total + skipped
            n, flat = block_place(block, self.blocks_n, self.section, self.total)
            first = place - base - skipped * length
            last = gl.minimum(length, first + end - place)
            at = gl.maximum(first - UNITS, 0)
            count = gl.maximum(last - UNITS, 0) - at
            # A share has two parts of blocks at most: of the one that it begins inside of, and of the one that it ends in.
            slot = gl.where(last - first < length, 2 * (number - self.whole) + gl.where(first == 0, 1, 0), -1)
            behind = place + last - first
        return part_of(sizes, n, flat, at, count, slot), behind

    @gluon.jit
    def keys_at(self, sizes, place):
        """The keys whose blocks have this place in the row, and where the first of these blocks begins.

        Behind whole blocks all blocks have one length, and the keys count as number 0.
        """
        n = place * 0
        base = place * 0
        if sizes.PLAN.edges == 3:
            n = tile_at(sizes.back, place // self.total, self.blocks_n, sizes.sk, sizes.group, UNITS)
            base = units_before(sizes, n) * self.total
        else:
            length = block_units(sizes, n) * self.total
            while (self.whole == 0) & (place >= base + length):
                base += length
                n += 1
                length = block_units(sizes, n) * self.total
        return n, base

    @gluon.jit
    def draw(self):
        """Producer: draw the program's next number."""
        return gl.atomic_add(self.counter, 1, sem="relaxed") + gl.num_programs(0)

    @gluon.jit
    def tell(self, part, turn):
        """Producer: tell the other roles this program's part number `turn`; a negative key: there is none."""
        slot = turn & 1
        mbarrier.wait(self.empty.index(slot), ((turn >> 1) & 1) ^ 1)  # the part of two turns ago is done
        fields = (part.key, part.stop, part.batch, part.kv_head, part.lo, part.hi, part.at, part.count, part.slot)
        for i in gl.static_range(9):
            number = gl.full([1], fields[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
            self.told.index(slot * 9 + i).store(number)
        mbarrier.arrive(self.full.index(slot), count=1)

    @gluon.jit
    def field(self, turn, i, WARPS: gl.constexpr):
        """Other roles: field i of part number `turn`."""
        number = self.told.index((turn & 1) * 9 + i).load(gl.BlockedLayout([1], [32], [WARPS], [0]))
        return uniform(gl.sum(number, 0))

    @gluon.jit
    def next(self, turn, WARPS: gl.constexpr):
        """Other roles: wait for part number `turn`, and return its key."""
        mbarrier.wait(self.full.index(turn & 1), (turn >> 1) & 1)
        return self.field(turn, 0, WARPS)

    @gluon.jit
    def read(self, turn, WARPS: gl.constexpr):
        """Other roles: part number `turn`. Read again where it is used again, it takes no registers in between."""
        return Part(
            self.field(turn, 0, WARPS),
            self.field(turn, 1, WARPS),
            self.field(turn, 2, WARPS),
            self.field(turn, 3, WARPS),
            self.field(turn, 4, WARPS),
            self.field(turn, 5, WARPS),
            self.field(turn, 6, WARPS),
            self.field(turn, 7, WARPS),
            self.field(turn, 8, WARPS),
        )

    @gluon.jit
    def release(self, turn):
        """Other roles: part number `turn` is done."""
        mbarrier.arrive(self.empty.index(turn & 1), count=1)


@gluon.jit
def make_share(blocks_n, section, total, whole, shares, units, counter, READERS: gl.constexpr):
    """Allocate what the producer tells parts by; READERS: roles that are told."""
    told = gl.allocate_shared_memory(gl.int32, [18, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Share(blocks_n, section, total, whole, shares, units, counter, told, full, empty)


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


@gluon.jit(do_not_specialize=[*SIZES, "row_stride", "head_stride", "batch_stride", "head_dim"])
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
    whole,
    shares,
    units,
    scale,
    head_dim,
    PLAN: gl.constexpr,
):
    """Add up the parts of 64 rows and 32 columns of dV or dK: grid (blocks behind `whole` * 2, 2, BLOCK_D / 32).

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
    n, flat = block_place(whole + number, blocks_n, section, total)
    length = block_units(sizes, n)
    first = number * length  # behind whole blocks all blocks have one length
    if whole == 0:
        first = units_before(sizes, n) * total + flat * length
    # The share that has place i of the row is the last one that begins at or before i: units * share // shares.
    begin = ((first + 1) * shares - 1) // units
    last = ((first + length) * shares - 1) // units
    slot = 2 * begin + 1
    count = gl.where(begin == last, 0, last - begin + 1)
    inside = (half * 2 + which) * (64 * BLOCK_D) + column * 64 + gl.arange(0, 2048, flat_layout)
    sums = gl.zeros([2048], gl.float32, flat_layout)
    for i in range(count):
        # The first part is the end of a share, the others are the beginnings of the next shares.
        at = slot + gl.where(i == 0, 0, 2 * i - 1)
        sums += gl.load(parts_ptr + at.to(gl.int64) * (256 * BLOCK_D) + inside)
    batch = flat // kv_heads
    head = flat - batch * kv_heads
    row, stop = n * PLAN.block_n, sk
    if PLAN.edges == 3:
        row, stop = tile_entry(back, n, sk, 0), tile_entry(back, n, sk, 1)
    row = row + half * 64 + gl.arange(0, 64, gl.SliceLayout(1, rows))[:, None]
    d = column + gl.arange(0, 32, gl.SliceLayout(0, rows))[None, :]
    x = gl.convert_layout(from_fragments(sums, 32), rows)
    place = (
        batch.to(gl.int64) * batch_stride + head.to(gl.int64) * head_stride + row.to(gl.int64) * row_stride
    ) * 8 + d
    keep = (row < stop) & (d < head_dim * 8) & (count > 0)
    if which == 0:
        gl.store(dv_ptr + place, x.to(dv_ptr.dtype.element_ty), mask=keep)
    else:
        gl.store(dk_ptr + place, (x * scale).to(dk_ptr.dtype.element_ty), mask=keep)
