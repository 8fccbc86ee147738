"""Share code between the two kernels of the Gluon GEMM: items of work, the ring, clusters, and sums of a tile in parts.

**Parts.** 800 tiles on 132 SMs are 6.06 rounds and take 7, and a product with few tiles and long sums leaves most SMs idle. So
the tiles that do not fill a round may be cut along K. An item of work is a tile of C, or one of `split` parts of its steps. A part
leaves its sums in global memory, and a second launch adds up the parts in order. So the same call gives the same bits again, no
program waits for another program, and all SMs add.

**Clusters.** Blocks whose tiles lie below each other read the same columns of B. As a thread block cluster they start together,
and one TMA copy can write to the shared memory of all of them ("multicast"). So each of two blocks fetches half of the shared tile,
and the L2 sends the tile once:

    block 0    A0, first half of B  -> A0 here, B to both           one step: 128 rows of A and 256 columns of B are
    block 1    A1, second half of B -> A1 here, B to both           32 KB from the L2 for a block in place of 48 KB

    barrier of a slot    who completes it
    full                 the bytes from this block's copies and from the other blocks' copies
    empty                the consumers of all blocks arrive at the barriers of all blocks: a copy that came too early would
                         overwrite a slot that another block still reads

Triton 3.6 has no multicast. It compiles one block, whose shared copies stand between two marks, and `gemm_launch.multicast` writes
the rest into the PTX.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from utils.kernels import gemm_plan
from utils.kernels.early_launch import instruct, let_next_launch_begin, wait_for_launch_before
from utils.machine import versions

versions.adopt_newest_gluon_names()
aggregate = gluon.aggregate
BLOCK_K, GROUP_M = gl.constexpr(gemm_plan.BLOCK_K), gl.constexpr(gemm_plan.GROUP_M)
SHARED, OWN = "for all blocks of the cluster", "for this block"
MARK_SHARED, MARK_OWN = (gl.constexpr(f"mov.u32 $0, 0; // {mark}") for mark in (SHARED, OWN))
STEP, MOST_PARTS = gl.constexpr(gemm_plan.STEP), gl.constexpr(max(gemm_plan.SPLITS))
KNOW = gl.constexpr("{ .reg .pred p; setp.lt.s32 p, $1, 0; @p trap; } mov.u32 $0, 0;")
JOIN = gl.constexpr("barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire; mov.u32 $0, 0;")


@gluon.jit
def join_cluster(PLAN: gl.constexpr, STEPS: gl.constexpr = JOIN):
    """Wait until all blocks have set up their barriers: without it a copy or an arrival could reach an unset barrier."""
    if PLAN.cluster > 1:
        instruct(STEPS)


@gluon.jit
def quotient(x, y):
    """Return x // y for x below 2**21, where rounding is harmless. It is fast, and the first copy waits for it."""
    return ((x + 0.5) / (y + 0.0)).to(gl.int32)


@gluon.jit
def place(tile, rows, columns, GROUP):
    """Return the row and column of a tile. Tiles are numbered down GROUP rows, then along the columns."""
    above = 0
    if rows > GROUP:
        above = quotient(tile, GROUP * columns) * GROUP
        rows = min(rows - above, GROUP)
    tile -= above * columns
    column = quotient(tile, rows)
    return above + tile - column * rows, column


@aggregate
class Work:
    """The cut of a product into items of work, as `Items` of `gemm_plan.py` has it on the host."""

    rows: gl.tensor  # rows of tiles; the tiles of a cluster count as one tile
    columns: gl.tensor  # columns of tiles
    steps: gl.tensor  # steps of a tile along K
    items: gl.tensor  # whole tiles first, then parts of tiles; the tiles of a cluster count as one tile
    whole: gl.tensor  # number of whole tiles; all further tiles are cut into `split` parts
    split: gl.tensor
    slots: gl.tensor  # slots of the ring
    width: gl.tensor  # columns of a tile
    PLAN: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, rows, columns, steps, items, whole, split, slots, width, PLAN):
        self.rows = rows
        self.columns = columns
        self.steps = steps
        self.items = items
        self.whole = whole
        self.split = split
        self.slots = slots
        self.width = width
        self.PLAN = gl.constexpr(PLAN)

    @gluon.jit
    def locate(self, item):
        """Return an item's steps along K [first, last), and the first row and column of this block's tile."""
        tile, first, last = item, 0, self.steps
        if item >= self.whole:
            part = item - self.whole
            tile = self.whole + part // self.split
            within = part % self.split
            first = within * self.steps // self.split
            last = (within + 1) * self.steps // self.split
        row, column = place(tile, self.rows, self.columns, GROUP_M // self.PLAN.cluster)
        row = row * self.PLAN.cluster + gl.program_id(0) % self.PLAN.cluster
        return first, last, row * self.PLAN.block_m, column * self.width

    @gluon.jit
    def tile_and_part(self, item):
        """Return the number of this block's tile among the tiles in parts, and the number of the part in the tile."""
        part = item - self.whole
        return part // self.split * self.PLAN.cluster + gl.program_id(0) % self.PLAN.cluster, part % self.split


# The ring is (A, B, full, empty): slots of both operands with their barriers. In a cluster A and B lie in one memory, B behind A, so that
# narrow tiles have smaller slots and more of them. A turn counts the steps of all tiles, up to twice the slots; slot and phase of a step
# follow from it. A column-major operand keeps its order in shared memory, and wgmma reads it transposed. The kernel is compiled for PLAN;
# TILE is the plan of a tile with the launch's width.


@gluon.jit
def allocate_ring(DTYPE: gl.constexpr, PLAN: gl.constexpr):
    """Allocate the slots and set up their barriers, before the block joins its cluster."""
    A_TILE: gl.constexpr = PLAN.a_tile
    B_TILE: gl.constexpr = PLAN.b_tile
    KILOBYTES: gl.constexpr = PLAN.ring_kilobytes
    SLOTS: gl.constexpr = PLAN.slots if PLAN.cluster == 1 else gemm_plan.SLOTS
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = full  # the short kernel has one role and needs no second barrier
    if not PLAN.short:
        empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)  # the arrival of the producer's `expect`; bytes are counted by themselves
        if not PLAN.short:
            # The consumers of all blocks of the cluster read what this block has fetched.
            mbarrier.init(empty.index(i), count=PLAN.cluster)
    if PLAN.cluster > 1:
        # Without the fence the other blocks may not see the barriers when this block joins.
        instruct("fence.mbarrier_init.release.cluster; mov.u32 $0, 0;")
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(A_TILE, DTYPE)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(B_TILE, DTYPE)
    if PLAN.cluster == 1:
        a = gl.allocate_shared_memory(DTYPE, [SLOTS, A_TILE[0], A_TILE[1]], a_layout)
        b = gl.allocate_shared_memory(DTYPE, [SLOTS, B_TILE[0], B_TILE[1]], b_layout)
    else:
        b = gl.allocate_shared_memory(DTYPE, [KILOBYTES, 8, BLOCK_K], b_layout)
        a = b.reinterpret(DTYPE, [8 * KILOBYTES // PLAN.block_m, A_TILE[0], A_TILE[1]], a_layout)
    return (a, b, full, empty)


@gluon.jit
def take(work, i):
    """Return the slot of turn i, its phase, and the next turn."""
    again = i >= work.slots
    return gl.where(again, i - work.slots, i), again.to(gl.int32), gl.where(i + 1 == 2 * work.slots, 0, i + 1)


@gluon.jit
def b_of(work, slot):
    """Return where B of a slot begins in a cluster, in kilobytes, and how many each block fetches, as in `Plan.b_columns`."""
    PLAN: gl.constexpr = work.PLAN
    UNIT: gl.constexpr = PLAN.cluster if PLAN.b_column_major else 8
    share = gl.cdiv(work.width, 8 * UNIT) * (UNIT // PLAN.cluster)
    return work.slots * (PLAN.block_m // 8) + slot * share * PLAN.cluster, share


@gluon.jit
def know(number):
    """Make the compiler compute a number here: it would put off the work until after a wait."""
    gl.inline_asm_elementwise(KNOW, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fill(work, ring, slot, source, step, pred=True):
    """Fetch A and B of a tile's step along K into an empty slot; in a cluster this block fetches its share of B.

    TMA writes zeros for elements outside of A and B. They count as bytes, too.
    """
    a_desc, b_desc, row, column = source
    PLAN: gl.constexpr = work.PLAN
    k = step * BLOCK_K
    full = ring[2].index(slot)
    # Announce the bytes first: a copy that came before could complete the phase too early. A copy from another block may
    # come before, and does no harm: the phase cannot end before this arrival.
    mbarrier.expect(full, 2 * (PLAN.block_m + PLAN.b_columns) * BLOCK_K, pred=pred)
    at = [k, row] if PLAN.a_column_major else [row, k]
    tma.async_load(a_desc, at, full, ring[0].index(slot), pred=pred)
    if PLAN.cluster == 1:
        at = [column, k] if PLAN.b_column_major else [k, column]
        tma.async_load(b_desc, at, full, ring[1].index(slot), pred=pred)
    else:
        # The kernel is compiled for copies of eight rows. The launch's descriptor copies this block's whole share, or 64 columns
        # and as many rows as divide the share. `Plan.b_columns` and `Plan.b_box` have these sizes on the host.
        begin, share = b_of(work, slot)
        box = share if PLAN.b_column_major else min(share & -share, 8)
        COPIES: gl.constexpr = 1 if PLAN.b_column_major else 3
        own = gl.program_id(0) % PLAN.cluster * share + instruct(MARK_SHARED)
        for j in gl.static_range(COPIES):
            # Rows of B that are longer than 128 bytes lie in shared memory as blocks of 64 columns, one block after another.
            unit = own + j * box
            y = unit * 8
            at = [column + y, k] if PLAN.b_column_major else [k + y % BLOCK_K, column + y // BLOCK_K * BLOCK_K]
            tma.async_load(b_desc, at, full, ring[1].index(begin + unit), pred=j * box < share)
        instruct(MARK_OWN)


@gluon.jit
def operands(work, ring, slot, WIDTH: gl.constexpr):
    """Return A and B of a slot for a product, and write a mark into the PTX: the width of the product, and where B begins.

    In a cluster B is the ring's first tile, and the mark moves it: Triton has no tile that begins at any kilobyte.
    """
    B_TILE: gl.constexpr = work.PLAN.b_tile
    MARK: gl.constexpr = f"mov.u32 $0, 0; // width {WIDTH} at $1"
    a, b, begin = ring[0].index(slot), ring[1].index(slot), gl.to_tensor(0)
    if work.PLAN.cluster > 1:
        b = ring[1].reinterpret(ring[1].dtype, B_TILE, ring[1].type.layout)
        begin, _ = b_of(work, slot)
    # The descriptor of a product counts in units of 16 bytes.
    gl.inline_asm_elementwise(MARK, "=r,r", [begin * 64], dtype=gl.int32, is_pure=False, pack=1)
    if work.PLAN.a_column_major:
        a = a.permute((1, 0))
    if work.PLAN.b_column_major:
        b = b.permute((1, 0))
    return a, b


@gluon.jit
def leave_part(work, sums, acc, item):
    """Leave a part's sums in global memory, eight columns after eight columns, in the order of the registers of wgmma."""
    ROWS: gl.constexpr = work.PLAN.block_m
    EIGHTS: gl.constexpr = work.PLAN.columns // 8
    x = acc.reshape([ROWS // 16, 2, 8, EIGHTS, 4, 2]).permute(3, 0, 2, 4, 1, 5).reshape([EIGHTS, ROWS * 8])
    eight = gl.arange(0, EIGHTS, gl.SliceLayout(1, x.type.layout))[:, None]
    tile, part = work.tile_and_part(item)
    begin = sums + (tile * work.split + part).to(gl.int64) * (ROWS * work.width)
    places = eight * (ROWS * 8) + gl.arange(0, ROWS * 8, gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(begin + places, x, mask=eight * 8 < work.width)


@gluon.jit(
    do_not_specialize=["rows", "columns", "whole", "split", "cluster", "block_m", "eighths", "transposed", "m", "n"]
)
def add_kernel(sums, c, rows, columns, whole, split, cluster, block_m, eighths, transposed, m, n):
    """Add up the parts of tiles in order, and store the sums in C: a program has 256 numbers of one tile.

    C has m rows of 8 n columns in memory, a tile has 8 * `eighths` columns.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [2, 1], [1, 0])
    tile = gl.program_id(0)
    row, column = place(whole + tile // cluster, rows, columns, GROUP_M // cluster)
    four = gl.program_id(1) * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    one = gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]
    eight, within = four // (block_m * 2), four % (block_m * 2)
    y = (row * cluster + tile % cluster) * block_m + within // 32 * 16 + one // 2 * 8 + within // 4 % 8
    x = (column * eighths + eight) * 8 + within % 4 * 2 + one % 2
    places = sums + (tile * split).to(gl.int64) * (block_m * eighths * 8) + four * 4 + one
    total = gl.zeros([64, 4], gl.float32, layout)
    wait_for_launch_before()
    let_next_launch_begin()
    for part in gl.static_range(MOST_PARTS):
        # Read past the L1, which may hold older data.
        total += gl.load(places + part * (block_m * eighths * 8), mask=part < split, other=0.0, cache_modifier=".cg")
    y, x = gl.where(transposed != 0, x, y), gl.where(transposed != 0, y, x)
    gl.store(c + y.to(gl.int64) * (n * 8) + x, total.to(c.dtype.element_ty), mask=(y < m) & (x < n * 8))


@gluon.jit
def column_pieces(tile, PIECES: gl.constexpr):
    """Cut a tile in registers into PIECES blocks of columns. Each block has registers of its own, so nothing moves."""
    pieces = (tile,)
    for _ in gl.static_range(PIECES.bit_length() - 1):
        halves = ()
        for i in gl.static_range(len(pieces)):
            x = pieces[i]
            halves += x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()
        pieces = halves  # type: ignore[assignment]  # in a kernel a name's tuple may grow
    return pieces


@gluon.jit
def store_piece(work, out, piece, i, row, column):
    """Store column block i of a tile through a buffer. TMA drops the elements outside of C."""
    c_desc, c_tail, buffers = out
    BUFFERS: gl.constexpr = work.PLAN.buffers
    buffer = buffers.index(i % BUFFERS)
    tma.store_wait(BUFFERS - 1)  # without it this piece would overwrite a piece that TMA still reads
    column += i * work.PLAN.piece[1]
    if work.PLAN.transposed:
        buffer.permute((1, 0)).store(piece)
        row, column = column, row
    else:
        buffer.store(piece)
    fence_async_shared()  # threads have written and the TMA unit reads: without the fence it may read older data
    if work.PLAN.short or (i + 1) * work.PLAN.piece[1] <= work.width:
        tma.async_store(c_desc, [row, column], buffer)
    else:
        tma.async_store(c_tail, [row, column], buffer)


@gluon.jit
def store_item(work, out, sums, acc, item, row, column):
    """Store a tile of C, or leave a part's sums."""
    PIECES: gl.constexpr = work.PLAN.pieces
    dtype: gl.constexpr = out[0].dtype
    if not work.PLAN.short:
        tma.store_wait(0)  # without it, after an odd number of pieces, TMA may still read the first buffer
    if item >= work.whole:  # the order of the branches matters: the other order costs short products 4%
        leave_part(work, sums, acc, item)
    else:
        pieces = column_pieces(acc.to(dtype), PIECES)
        for i in gl.static_range(PIECES):
            if work.PLAN.short or i * work.PLAN.piece[1] < work.width:
                store_piece(work, out, pieces[i], i, row, column)
