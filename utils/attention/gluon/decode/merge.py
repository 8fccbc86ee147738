"""Where results go: the output of a head that one program computed whole, or its parts, which are added up here.

A part is an unnormalized output (columns x BLOCK_D, fp32) with the maximum and the sum of each column. With m the largest
of the maxima, out = sum_i 2^(c (m_i - m)) o_i / sum_i 2^(c (m_i - m)) total_i.

A program has two parts at most: of the head in which it begins (part 2 p) and of the one in which it ends (2 p + 1).
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.decode.work import Cache
from utils.attention.gluon.shared import MINUS_INF, aggregate, thread_barrier

CHUNK = gl.constexpr(64)  # columns of the head dimension that a step of the merge adds up


@aggregate
class Results:
    """Output, parts, and the counters by which the programs of a head know of each other: two for each head."""

    out_ptr: gl.tensor
    parts_ptr: gl.tensor
    sums_ptr: gl.tensor
    counters_ptr: gl.tensor
    group: gl.tensor  # query heads of a head of keys
    tiles: gl.tensor  # tiles of queries
    head_dim: gl.tensor
    c: gl.tensor
    cache: Cache

    @gluon.constexpr_function
    def __init__(self, out_ptr, parts_ptr, sums_ptr, counters_ptr, group, tiles, head_dim, c, cache):
        self.out_ptr = out_ptr
        self.parts_ptr = parts_ptr
        self.sums_ptr = sums_ptr
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
    def store_whole(self, cursor, o, total):
        """Store the output of a head; o: [BLOCK_D, columns], total: [columns]."""
        layout: gl.constexpr = o.type.layout
        column = gl.arange(0, o.shape[1], gl.SliceLayout(0, layout))
        d = gl.arange(0, o.shape[0], gl.SliceLayout(1, layout))
        at, exists = self.rows(cursor.b, cursor.head, column)
        # A row that sees no key has the sum zero, and zeros as its output.
        o = o * gl.where(total == 0.0, 0.0, 1.0 / gl.where(total == 0.0, 1.0, total))[None, :]
        keep = exists[None, :] & (d < self.head_dim)[:, None]
        gl.store(self.out_ptr + at[None, :] + d[:, None], o.to(self.out_ptr.dtype.element_ty), mask=keep)

    @gluon.jit
    def store_part(self, cursor, part, o, m, total):
        """Store one part of a head."""
        layout: gl.constexpr = o.type.layout
        COLUMNS: gl.constexpr = o.shape[1]
        BLOCK_D: gl.constexpr = o.shape[0]
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        d = gl.arange(0, BLOCK_D, gl.SliceLayout(1, layout))
        exists = self.rows(cursor.b, cursor.head, column)[1]
        base = self.parts_ptr + part.to(gl.int64) * (COLUMNS * BLOCK_D)
        keep = exists[None, :] & (d < self.head_dim)[:, None]
        gl.store(base + column[None, :] * BLOCK_D + d[:, None], o, mask=keep)
        sums = self.sums_ptr + part * (2 * COLUMNS) + column
        gl.store(sums, m)
        gl.store(sums + COLUMNS, total)

    @gluon.jit
    def merge(self, b, head, first, count, turn, turns):
        """Add up the parts of the programs first .. first + count - 1: pieces turn, turn + turns, ... of the head.

        A piece is CHUNK numbers of one row.
        """
        PLAN: gl.constexpr = self.cache.PLAN
        COLUMNS: gl.constexpr = PLAN.columns
        BLOCK_D: gl.constexpr = PLAN.block_d
        SPLITS: gl.constexpr = PLAN.merge_splits
        CHUNKS: gl.constexpr = BLOCK_D // CHUNK
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
        split = gl.arange(0, SPLITS, gl.SliceLayout(1, layout))
        d0 = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))

        tile = head % self.tiles
        queries = gl.minimum(self.cache.sq - tile * PLAN.queries, PLAN.queries)
        pieces = self.group * queries * CHUNKS
        for piece in range(turn, pieces, turns):
            row = piece // CHUNKS
            d = (piece % CHUNKS) * CHUNK + d0
            column = (row // queries) * PLAN.queries + row % queries
            m = gl.to_tensor(float("-inf"))
            total = gl.to_tensor(0.0)
            o = gl.zeros([CHUNK], gl.float32, gl.SliceLayout(0, layout))
            for begin in range(0, count, SPLITS):
                i = begin + split
                part = 2 * (first + i) + (i == 0).to(gl.int32)
                own = self.sums_ptr + part * (2 * COLUMNS) + column
                here = i < count
                parts = self.parts_ptr + part.to(gl.int64) * (COLUMNS * BLOCK_D) + column * BLOCK_D
                # Past the L1: other SMs have written this during the launch.
                values = gl.load(
                    parts[:, None] + d[None, :],
                    mask=here[:, None] & (d < self.head_dim)[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                maxima = gl.load(own, mask=here, other=MINUS_INF, cache_modifier=".cg")
                totals = gl.load(own + COLUMNS, mask=here, other=0.0, cache_modifier=".cg")
                top = gl.maximum(m, gl.max(maxima, 0))
                shifted = gl.where(top == MINUS_INF, 0.0, top * self.c)
                weight = gl.exp2(maxima * self.c - shifted)
                old = gl.exp2(m * self.c - shifted)
                m = top
                total = total * old + gl.sum(totals * weight, 0)
                o = o * old + gl.sum(values * weight[:, None], 0)
            o = o * gl.where(total == 0.0, 0.0, 1.0 / gl.where(total == 0.0, 1.0, total))
            at = self.rows(b, head, column)[0]
            gl.store(self.out_ptr + at + d, o.to(self.out_ptr.dtype.element_ty), mask=d < self.head_dim)

    @gluon.jit
    def counter(self, b, head):
        """The head's counters: parts that are stored, and programs that have done their share of the merge."""
        return self.counters_ptr + 2 * (b * self.cache.heads + head)

    @gluon.jit
    def arrive(self, b, head):
        """Say that this program's part is stored; returns how many were before."""
        # All threads have stored before one of them says so.
        thread_barrier()
        return gl.atomic_add(self.counter(b, head), 1, sem="acq_rel", scope="gpu")

    @gluon.jit
    def merge_if_last(self, b, head, first, count):
        """Arrive; the program that arrives last adds up all parts, and leaves the counter at zero for the next launch."""
        if self.arrive(b, head) == count - 1:
            thread_barrier()
            gl.store(self.counter(b, head), 0)
            self.merge(b, head, first, count, 0, 1)

    @gluon.jit
    def merge_together(self, b, head, first, count, program):
        """After `arrive`: wait for the other programs of the head, and add up this program's share of the rows.

        All programs are on the GPU at the same time (a cooperative launch), so that waiting ends.
        """
        counter = self.counter(b, head)
        tile = head % self.tiles
        PLAN: gl.constexpr = self.cache.PLAN
        pieces = self.group * gl.minimum(self.cache.sq - tile * PLAN.queries, PLAN.queries) * (PLAN.block_d // CHUNK)
        if program - first < pieces:
            stored = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
            while stored < count:
                stored = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
            thread_barrier()
            self.merge(b, head, first, count, program - first, count)
        # The program that leaves last resets both counters: nobody waits for them any more.
        if gl.atomic_add(counter + 1, 1, sem="acq_rel", scope="gpu") == count - 1:
            gl.store(counter, 0)
            gl.store(counter + 1, 0)
