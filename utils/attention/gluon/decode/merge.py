"""Store results: the output of a head that one program has computed, or parts of heads, which a second launch adds up.

A part is an unnormalized output (columns x BLOCK_D, fp32) with the maximum and the sum of each column. With m the largest
of the maxima, out = sum_i 2^(c (m_i - m)) o_i / sum_i 2^(c (m_i - m)) total_i.

A program p has at most two parts: part 2 p of the head in which it begins, and part 2 p + 1 of the head in which it ends. The
maxima and sums of a part stand before its output. The numbers of the first and the last program of each head stand after all
parts, so the second launch need not compute them: it often begins with a cold instruction cache, and short code saves time.

    grid         heads of all sequences x programs for each head, about 2048 programs in all
    thread       4 neighbouring numbers of 8 parts at once; of a head with more parts, 4 groups of lanes share the numbers
    measured     the groups make 1 x 4/1 heads, 32768 keys of 256 numbers 1.19 times as fast (docs/kernels/decode.md)
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.decode.plan import MERGE_GROUPS, MERGE_PARTS
from utils.attention.gluon.decode.work import Cache
from utils.attention.gluon.shared import MINUS_INF, aggregate
from utils.attention.gluon.softmax import spread
from utils.kernels.early_launch import wait_for_launch_before

WIDTH = gl.constexpr(4)
HELD = gl.constexpr(MERGE_PARTS)
GROUPS = gl.constexpr(MERGE_GROUPS)
LANES_OF_GROUP = gl.constexpr(32 // MERGE_GROUPS)


@gluon.jit
def in_eights(head_dim):
    """Return the head dimension as a multiple of eight, so that the compiler stores two neighbours at once."""
    return head_dim // 8 * 8


@gluon.jit
def inverse(total):
    """Return 1 / total, or 0 if a row sees no key and its sum is zero: its output is zeros."""
    return gl.where(total == 0.0, 0.0, 1.0 / gl.where(total == 0.0, 1.0, total))


@gluon.constexpr_function
def rows_by_eights(rows, columns):
    """Return a layout like a product's [rows, columns] with eight neighbours of a row in a thread: warps keep their rows."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *([0, 32 << i] for i in range((columns // 32).bit_length() - 1))]
    warps = [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], warps, [], [rows, columns])


@aggregate
class Results:
    """The memory for the output and the parts, with the places of rows."""

    out_ptr: gl.tensor
    parts_ptr: gl.tensor
    head_dim: gl.tensor
    cache: Cache

    @gluon.jit
    def places(self, cursor, column):
        """Return where the rows of these columns begin in the output (B, Hkv, rows, D), and whether each row exists."""
        row = self.cache.tile() * self.cache.PLAN.columns + column
        flat = (cursor.b * self.cache.heads + cursor.head) * self.cache.rows + row
        return flat.to(gl.int64) * self.head_dim, row < self.cache.rows

    @gluon.jit
    def store_rows(self, cursor, o):
        """Store the output [rows, D] of a tile by eight numbers at once: by twos, heads of 256 keys take 1.1 to 1.2 times as long."""
        layout: gl.constexpr = rows_by_eights(o.shape[0], o.shape[1])
        o = gl.convert_layout(o.to(self.out_ptr.dtype.element_ty), layout)
        at, exists = self.places(cursor, gl.arange(0, o.shape[0], gl.SliceLayout(1, layout)))
        d = gl.arange(0, o.shape[1], gl.SliceLayout(0, layout))[None, :]
        gl.store(self.out_ptr + at[:, None] + d, o, mask=exists[:, None] & (d < self.head_dim))

    @gluon.jit
    def store(self, cursor, n, o, sums, ROWS: gl.constexpr):
        """Store the result of the n blocks from the cursor on: the output of a head, or a part of it.

        Dimension ROWS of the unnormalized o holds the tile's query rows, the other dimension D. sums: tuples (row numbers, maxima,
        sums), one for all rows or one for each half of the rows (`softmax.split_rows`).
        """
        cache = self.cache
        COLUMNS: gl.constexpr = cache.PLAN.columns
        BLOCK_D: gl.constexpr = cache.PLAN.block_d
        PART: gl.constexpr = COLUMNS * (BLOCK_D + 2)
        layout: gl.constexpr = o.type.layout
        row = gl.arange(0, o.shape[ROWS], gl.SliceLayout(1 - ROWS, layout))
        d = gl.expand_dims(gl.arange(0, o.shape[1 - ROWS], gl.SliceLayout(ROWS, layout)), ROWS)
        at, exists = self.places(cursor, row)
        keep = gl.expand_dims(exists, 1 - ROWS) & (d < self.head_dim)
        # Store for the second launch the number of the program with a head's first block, and with its last block.
        programs = gl.num_programs(1)
        program = cache.tile() * programs + gl.program_id(1)
        tile = (cursor.b * cache.heads + cursor.head) * gl.num_programs(0) + cache.tile()
        ends = self.parts_ptr + 2 * gl.num_programs(0) * programs * PART + 2 * tile
        gl.store(ends, program.to(gl.float32), mask=(cache.whole == 0) & (cursor.j == 0))
        gl.store(ends + 1, program.to(gl.float32), mask=(cache.whole == 0) & (cursor.j + n == cursor.blocks))
        if n == cursor.blocks:
            if ROWS == 1:
                o = o * gl.convert_layout(inverse(sums[0][2]), gl.SliceLayout(0, layout))[None, :]
                gl.store(self.out_ptr + at[None, :] + d, o.to(self.out_ptr.dtype.element_ty), mask=keep)
            else:
                self.store_rows(cursor, o * spread((inverse(sums[0][2]), inverse(sums[1][2])), o))
        else:
            part = self.parts_ptr + (2 * program + (cursor.j == 0).to(gl.int32)) * PART
            for i in gl.static_range(len(sums)):
                rows, m, total = sums[i]
                gl.store(part + rows, m)
                gl.store(part + COLUMNS + rows, total)
            gl.store(part + 2 * COLUMNS + gl.expand_dims(row, 1 - ROWS) * BLOCK_D + d, o, mask=keep)


@gluon.jit
def add_piece(results, first, count, piece, shared, columns, d_bits):
    """Add up some neighbouring numbers of a head's rows over the parts of `count` programs.

    results: pointers, scale, first row and number of rows of the head, head dimension. A thread holds WIDTH neighbours of HELD
    parts, so that all its loads run at the same time. shared: the GROUPS of a warp hold different parts of the same numbers.
    """
    LANES: gl.constexpr = LANES_OF_GROUP * gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout(
        [HELD, 1, 1, WIDTH], [1, GROUPS, LANES_OF_GROUP, 1], [1, 1, gl.num_warps(), 1], [3, 2, 1, 0]
    )
    loads: gl.constexpr = gl.SliceLayout(3, layout)  # [parts, groups, lanes]
    sums: gl.constexpr = gl.SliceLayout(0, loads)  # [groups, lanes]
    result: gl.constexpr = gl.SliceLayout(0, layout)  # [groups, lanes, neighbours]
    out_ptr, parts_ptr, c, above, rows, head_dim = results
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, sums))[:, None]
    lane = gl.arange(0, LANES, gl.SliceLayout(0, sums))[None, :]
    at = (gl.where(shared, piece, piece * GROUPS + group) * LANES + lane) * WIDTH
    block_d = 1 << d_bits
    column = at >> d_bits
    d = (at & (block_d - 1)) // WIDTH * WIDTH
    exists = (column < rows) & (d < head_dim)
    held = gl.arange(0, HELD, gl.SliceLayout(1, gl.SliceLayout(2, loads)))[:, None]
    turn = gl.where(shared, gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, loads))), 0)[None, :]
    width = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    m = gl.full([GROUPS, LANES], MINUS_INF, gl.float32, sums)
    total = gl.zeros([GROUPS, LANES], gl.float32, sums)
    o = gl.zeros([GROUPS, LANES, WIDTH], gl.float32, result)
    for begin in range(0, count, gl.where(shared, GROUPS * HELD, HELD)):
        i = begin + turn * HELD + held
        part = 2 * (first + i) + (i == 0).to(gl.int32)
        here = (i < count)[:, :, None] & exists[None, :, :]
        # The compiler sees multiples of WIDTH, and loads all neighbours at once.
        start = (part * (columns * (block_d + 2) // WIDTH * WIDTH))[:, :, None]
        numbers = start + (at + 2 * columns // WIDTH * WIDTH)[None, :, :]
        # Read past the L1: other SMs have just written these numbers.
        pointers = parts_ptr + numbers[:, :, :, None] + width[None, None, None, :]
        values = gl.load(pointers, mask=here[:, :, :, None], other=0.0, cache_modifier=".cg")
        pointers = parts_ptr + start + column[None, :, :]
        maxima = gl.load(pointers, mask=here, other=MINUS_INF, cache_modifier=".cg")
        totals = gl.load(pointers + columns, mask=here, other=0.0, cache_modifier=".cg")
        top = gl.maximum(m, gl.max(maxima, 0))
        shifted = gl.where(top == MINUS_INF, 0.0, top * c)  # without a key, 2^(-inf - 0) = 0; -inf + inf is nan
        weight = gl.exp2(maxima * c - shifted[None, :, :])
        old = gl.exp2(m * c - shifted)
        m = top
        total = total * old + gl.sum(totals * weight, 0)
        o = o * gl.convert_layout(old, gl.SliceLayout(2, result))[:, :, None] + gl.sum(
            values * weight[:, :, :, None], 0
        )
    if shared:
        top = gl.max(m, 0)
        shifted = gl.where(top == MINUS_INF, 0.0, top * c)
        weight = gl.exp2(m * c - shifted[None, :])
        total = gl.broadcast(gl.sum(total * weight, 0)[None, :], total)[0]
        weight = gl.convert_layout(weight, gl.SliceLayout(2, result))
        o = gl.broadcast(gl.sum(o * weight[:, :, None], 0)[None, :, :], o)[0]
        exists &= group == 0
    o = o * gl.convert_layout(inverse(total), gl.SliceLayout(2, result))[:, :, None]
    place = (above + column).to(gl.int64) * head_dim + d
    out = out_ptr + gl.convert_layout(place, gl.SliceLayout(2, result))[:, :, None]
    out += gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, result)))[None, None, :]
    keep = gl.convert_layout(exists, gl.SliceLayout(2, result))
    gl.store(out, o.to(out_ptr.dtype.element_ty), mask=keep[:, :, None])


@gluon.jit(do_not_specialize=["tiles", "rows", "columns", "d_bits", "head_dim", "ends"])
def attention_decode_merge(out_ptr, parts_ptr, tiles, rows, columns, d_bits, head_dim, ends, c):
    """Merge the parts of heads in the second launch, for all tiles: grid (heads of all sequences, programs for each head).

    ends: the place of the heads' first and last programs after the parts.
    """
    head = gl.program_id(0)
    row_of_tile = (head % tiles) * columns
    mine = gl.minimum(rows - row_of_tile, columns)
    results = out_ptr, parts_ptr, c, head // tiles * rows + row_of_tile, mine, in_eights(head_dim)
    wait_for_launch_before()  # without it the parts might not be complete
    first = gl.load(parts_ptr + ends + 2 * head, cache_modifier=".cg").to(gl.int32)
    count = gl.load(parts_ptr + ends + 2 * head + 1, cache_modifier=".cg").to(gl.int32) - first + 1
    if count > 1:
        shared = count > HELD
        numbers = LANES_OF_GROUP * gl.num_warps() * WIDTH * gl.where(shared, 1, GROUPS)  # numbers of a piece
        for piece in range(gl.program_id(1), gl.cdiv(mine << d_bits, numbers), gl.num_programs(1)):
            add_piece(results, first, count, piece, shared, columns, d_bits)
