"""Where results go: the output of a head that one program computed whole, or its parts, which are added up here.

A part is an unnormalized output (columns x BLOCK_D, fp32) with the maximum and the sum of each column. With m the largest
of the maxima, out = sum_i 2^(c (m_i - m)) o_i / sum_i 2^(c (m_i - m)) total_i.

A program has two parts at most: of the head in which it begins (part 2 p) and of the one in which it ends (2 p + 1). The
maxima and sums of a part stand before its output.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.decode.work import Cache
from utils.attention.gluon.shared import MINUS_INF, aggregate, thread_barrier


@gluon.jit
def in_eights(head_dim):
    """The head dimension, known to the compiler as a multiple of eight: it then stores two neighbours at once."""
    return head_dim // 8 * 8


@gluon.jit
def inverse(total):
    """1 / total; zero for a row that sees no key, whose sum is zero, so that its output is zeros."""
    return gl.where(total == 0.0, 0.0, 1.0 / gl.where(total == 0.0, 1.0, total))


@aggregate
class Results:
    """Output and parts, and what says where in them a row is."""

    out_ptr: gl.tensor
    parts_ptr: gl.tensor
    counters_ptr: gl.tensor  # two for each head, zero before and after a launch; untouched with a second launch
    group: gl.tensor  # query heads of a head of keys
    tiles: gl.tensor  # tiles of queries
    head_dim: gl.tensor
    c: gl.tensor
    cache: Cache

    @gluon.constexpr_function
    def __init__(self, out_ptr, parts_ptr, counters_ptr, group, tiles, head_dim, c, cache):
        self.out_ptr = out_ptr
        self.parts_ptr = parts_ptr
        self.counters_ptr = counters_ptr
        self.group = group
        self.tiles = tiles
        self.head_dim = head_dim
        self.c = c
        self.cache = cache

    @gluon.jit
    def rows(self, b, head, column):
        """Where the columns' rows begin in the output, (B, Hkv, group, Sq, D), and which of them exist."""
        QUERIES: gl.constexpr = self.cache.PLAN.queries
        in_group = column // QUERIES
        query = (head % self.tiles) * QUERIES + column % QUERIES
        kv_head = head // self.tiles
        kv_heads = self.cache.heads // self.tiles
        row = ((b * kv_heads + kv_head) * self.group + in_group) * self.cache.sq + query
        return row.to(gl.int64) * self.head_dim, (in_group < self.group) & (query < self.cache.sq)

    @gluon.jit
    def store_whole(self, cursor, o, first_row, ROWS: gl.constexpr):
        """Store the output of a head; dimension ROWS of o holds the tile's query rows first_row and on, the other D."""
        layout: gl.constexpr = o.type.layout
        row = first_row + gl.arange(0, o.shape[ROWS], gl.SliceLayout(1 - ROWS, layout))
        d = gl.expand_dims(gl.arange(0, o.shape[1 - ROWS], gl.SliceLayout(ROWS, layout)), ROWS)
        at, exists = self.rows(cursor.b, cursor.head, row)
        keep = gl.expand_dims(exists, 1 - ROWS) & (d < self.head_dim)
        gl.store(self.out_ptr + gl.expand_dims(at, 1 - ROWS) + d, o.to(self.out_ptr.dtype.element_ty), mask=keep)

    @gluon.jit
    def store_sums(self, part, row, m, total):
        """Store the maxima and sums of some rows of a part."""
        COLUMNS: gl.constexpr = self.cache.PLAN.columns
        sums = self.parts_ptr + part * (COLUMNS * (self.cache.PLAN.block_d + 2))
        gl.store(sums + row, m)
        gl.store(sums + COLUMNS + row, total)

    @gluon.jit
    def store_part(self, cursor, part, o, first_row, ROWS: gl.constexpr):
        """Store a part's unnormalized output; o as in `store_whole`."""
        layout: gl.constexpr = o.type.layout
        COLUMNS: gl.constexpr = self.cache.PLAN.columns
        BLOCK_D: gl.constexpr = self.cache.PLAN.block_d
        row = first_row + gl.arange(0, o.shape[ROWS], gl.SliceLayout(1 - ROWS, layout))
        d = gl.expand_dims(gl.arange(0, o.shape[1 - ROWS], gl.SliceLayout(ROWS, layout)), ROWS)
        exists = self.rows(cursor.b, cursor.head, row)[1]
        keep = gl.expand_dims(exists, 1 - ROWS) & (d < self.head_dim)
        numbers = self.parts_ptr + part * (COLUMNS * (BLOCK_D + 2)) + 2 * COLUMNS
        gl.store(numbers + gl.expand_dims(row, 1 - ROWS) * BLOCK_D + d, o, mask=keep)

    @gluon.jit
    def pieces(self, head, STEPS: gl.constexpr):
        """How many pieces the merge of a head has: a piece is what all threads add up at once, STEPS groups each."""
        PLAN: gl.constexpr = self.cache.PLAN
        queries = gl.minimum(self.cache.sq - head % self.tiles * PLAN.queries, PLAN.queries)
        threads: gl.constexpr = 32 * (gl.num_warps() // PLAN.merge_warps)
        return gl.cdiv(self.group * queries * PLAN.block_d, PLAN.merge_width * STEPS * threads)

    @gluon.jit
    def merge(self, b, head, first, count, turn, turns, STEPS: gl.constexpr):
        """Add up the parts of the programs first .. first + count - 1: pieces turn, turn + turns, ... of the head.

        A thread holds `merge_width` neighbouring numbers, STEPS times, of `merge_parts` parts, so that all its loads are
        under way at the same time, and adds them up by itself. With `merge_warps`, for heads of many parts, as many
        warps take some of the parts each.
        """
        PLAN: gl.constexpr = self.cache.PLAN
        COLUMNS: gl.constexpr = PLAN.columns
        BLOCK_D: gl.constexpr = PLAN.block_d
        WIDTH: gl.constexpr = PLAN.merge_width
        PARTS: gl.constexpr = PLAN.merge_parts * PLAN.merge_warps
        WARPS: gl.constexpr = gl.num_warps() // PLAN.merge_warps
        GROUPS: gl.constexpr = 32 * WARPS * STEPS
        layout: gl.constexpr = gl.BlockedLayout(
            [PLAN.merge_parts, 1, WIDTH], [1, 32, 1], [PLAN.merge_warps, WARPS, 1], [2, 1, 0]
        )
        sums: gl.constexpr = gl.SliceLayout(2, layout)
        split = gl.arange(0, PARTS, gl.SliceLayout(1, sums))
        group = gl.arange(0, GROUPS, gl.SliceLayout(0, sums))
        width = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
        result: gl.constexpr = gl.SliceLayout(0, layout)

        queries = gl.minimum(self.cache.sq - head % self.tiles * PLAN.queries, PLAN.queries)
        rows = self.group * queries
        for piece in range(turn, self.pieces(head, STEPS), turns):
            at = (piece * GROUPS + group) * WIDTH
            row = at // BLOCK_D
            d = at % BLOCK_D
            column = (row // queries) * PLAN.queries + row % queries
            exists = (row < rows) & (d < self.head_dim)
            m = gl.full([GROUPS], MINUS_INF, gl.float32, gl.SliceLayout(0, sums))
            total = gl.zeros([GROUPS], gl.float32, gl.SliceLayout(0, sums))
            o = gl.zeros([GROUPS, WIDTH], gl.float32, result)
            for begin in range(0, count, PARTS):
                i = begin + split
                part = 2 * (first + i) + (i == 0).to(gl.int32)
                here = (i < count)[:, None] & exists[None, :]
                # Past the L1: other SMs have written this a moment ago.
                start = (part * (COLUMNS * (BLOCK_D + 2)))[:, None]
                own = start + column[None, :]
                numbers = start + (column * BLOCK_D + d + 2 * COLUMNS)[None, :]
                values = gl.load(
                    self.parts_ptr + numbers[:, :, None] + width[None, None, :],
                    mask=here[:, :, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
                maxima = gl.load(self.parts_ptr + own, mask=here, other=MINUS_INF, cache_modifier=".cg")
                totals = gl.load(self.parts_ptr + own + COLUMNS, mask=here, other=0.0, cache_modifier=".cg")
                top = gl.maximum(m, gl.max(maxima, 0))
                shifted = gl.where(top == MINUS_INF, 0.0, top * self.c)
                weight = gl.exp2(maxima * self.c - shifted[None, :])
                old = gl.exp2(m * self.c - shifted)
                m = top
                total = total * old + gl.sum(totals * weight, 0)
                spread = gl.convert_layout(old, gl.SliceLayout(1, result))
                o = o * spread[:, None] + gl.sum(values * weight[:, :, None], 0)
            o = o * gl.convert_layout(inverse(total), gl.SliceLayout(1, result))[:, None]
            place = gl.convert_layout(self.rows(b, head, column)[0] + d, gl.SliceLayout(1, result))
            keep = gl.convert_layout(exists, gl.SliceLayout(1, result))
            out = self.out_ptr + place[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, result))[None, :]
            gl.store(out, o.to(self.out_ptr.dtype.element_ty), mask=keep[:, None])

    @gluon.jit
    def merge_own(self, split, program):
        """After a program's last store: its part in the merge of the head it began in, and of the one it ended in."""
        if self.cache.PLAN.merge != "second":
            begin = split.begin(program)
            end = split.begin(program + 1)
            left = self.cache.locate(begin)
            right = self.cache.locate(end - 1)
            left_begin = begin - left.j
            right_begin = end - 1 - right.j
            has_left = left.j > 0
            has_right = (right.j + 1 < right.blocks) & (right_begin >= begin)
            thread_barrier()  # one thread says so for all: without it, another's part might not be stored yet
            # Both are announced before either is waited for: otherwise each program would wait for the one before it.
            left_arrived = self.arrive(left, has_left)
            right_arrived = self.arrive(right, has_right)
            if has_left:
                self.merge_head(split, program, left, left_begin, left_arrived)
            if has_right:
                self.merge_head(split, program, right, right_begin, right_arrived)

    @gluon.jit
    def counter(self, cursor):
        """The first of the two counters of the cursor's head."""
        return self.counters_ptr + 2 * (cursor.b * self.cache.heads + cursor.head)

    @gluon.jit
    def arrive(self, cursor, has_part):
        """Say that this program's part of a head is stored; how many are now."""
        arrived = gl.to_tensor(0)
        if has_part:
            arrived = gl.atomic_add(self.counter(cursor), 1, sem="acq_rel", scope="gpu") + 1
        return arrived

    @gluon.jit
    def merge_head(self, split, program, cursor, head_begin, arrived):
        """Merge a head, or this program's share of it, once all its parts are stored."""
        first = split.owner(head_begin)
        count = split.owner(head_begin + cursor.blocks - 1) - first + 1
        counter = self.counter(cursor)
        STEPS: gl.constexpr = self.cache.PLAN.merge_steps
        if self.cache.PLAN.merge == "last":
            if arrived == count:
                thread_barrier()  # one thread has seen that: the others may read only behind it
                self.merge(cursor.b, cursor.head, first, count, 0, 1, STEPS)
                gl.store(counter, 0)  # for the next launch: nobody looks at it any more
        else:
            # All programs are on the GPU at the same time (a cooperative launch), and none waits before it has said
            # that its parts are stored, so the waiting ends.
            if program - first < self.pieces(cursor.head, STEPS):
                while arrived < count:
                    arrived = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
                thread_barrier()
                self.merge(cursor.b, cursor.head, first, count, program - first, count, STEPS)
            # Who leaves last sets both counters to zero for the next launch.
            if gl.atomic_add(counter + 1, 1, sem="acq_rel", scope="gpu") == count - 1:
                gl.store(counter, 0)
                gl.store(counter + 1, 0)
