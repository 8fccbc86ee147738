"""Where a launch has fewer tiles than the GPU has multiprocessors: several programs share the keys of a tile.

Each computes the attention of the tile's rows over its own blocks of keys, a part, and leaves output and log-sum-exp of
each row in global memory, in fp32. The parts of a row are added up in their order, so that the same bits come out twice:

    lse = log sum_i e^lse_i        out = sum_i e^(lse_i - lse) out_i

With `Case.together` all programs of a tile wait until all have left their parts, and add up some rows each. The launch is
cooperative: the GPU starts all programs at the same time or refuses, so that the waiting ends. Without, the one that leaves
its part last adds up all rows. That is slower, because one SM reads all parts; but the simulator, which runs one program
after another, can run no other.

Consumers of a block count and add for themselves: they own different rows.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.plan import MOST_PARTS as _MOST_PARTS
from utils.attention.gluon.shared import MINUS_INF, aggregate, thread_barrier

MOST_PARTS = gl.constexpr(_MOST_PARTS)
PIECE = gl.constexpr(8)  # rows that are added up at a time


@gluon.constexpr_function
def piece_layout(columns):
    """Layout of a piece [PIECE, columns] in four warps: a thread has four neighbours, 16 bytes of fp32, of a row."""
    threads = min(columns // 4, 32)
    return gl.BlockedLayout([1, 4], [32 // threads, threads], [4, 1], [1, 0])


@aggregate
class Parts:
    """Where the parts of a launch are left, and who has left one."""

    results: gl.tensor  # fp32: for each part and consumer 64 log-sum-exps, then 64 rows of output
    counters: gl.tensor  # int32, zero before and after a launch: for each tile and consumer
    count: gl.tensor  # parts of a tile, if it has as many blocks of keys

    @gluon.jit
    def used(self, blocks):
        """How many parts a tile with so many blocks of keys has: none is empty."""
        return gl.minimum(self.count, blocks)

    @gluon.jit
    def blocks(self, t, lo, hi):
        """The blocks of keys [lo, hi) of item t; the others of its tile have none, or as many or one more or less."""
        part = t % self.count
        used = self.used(hi - lo)
        begin = lo + (hi - lo) * part // used
        end = lo + (hi - lo) * (part + 1) // used
        return begin, gl.where(part < used, end, begin)

    @gluon.jit
    def leave(self, t, o, lses, row, W: gl.constexpr, CONSUMERS: gl.constexpr):
        """Store the part of item t of consumer W. lses: pairs of row numbers and log-sum-exps; row: the first one."""
        BLOCK_M: gl.constexpr = o.shape[0]
        BLOCK_D: gl.constexpr = o.shape[1]
        layout: gl.constexpr = o.type.layout
        own = self.results + (t * CONSUMERS + W) * (BLOCK_M * (BLOCK_D + 1))
        for i in gl.static_range(len(lses)):
            rows, lse = lses[i]
            gl.store(own + (rows - row), lse)
        m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))[:, None]
        d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))[None, :]
        gl.store(own + BLOCK_M + m * BLOCK_D + d, o)
        thread_barrier()  # one thread counts for all: without this, another's numbers might not be stored yet

    @gluon.jit
    def arrive(self, t, W: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, used, TOGETHER: gl.constexpr):
        """Say that the part of item t is left; return the first piece of rows to add up, and the step to the next one."""
        counter = self.counters + t // self.count * CONSUMERS + W
        arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
        if TOGETHER:
            while arrived < used:
                arrived = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
            first, stride = t % self.count, used
        else:
            if arrived == used:
                gl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")  # the next launch finds it as this one did
            first, stride = gl.where(arrived == used, 0, BLOCK_M // PIECE), 1
        thread_barrier()  # one thread has seen that all are there: the others may read only behind it
        return first, stride

    @gluon.jit
    def depart(self, t, W: gl.constexpr, CONSUMERS: gl.constexpr, used):
        """Behind a sum together: the last one sets the counter to zero, as the next launch expects it."""
        counter = self.counters + t // self.count * CONSUMERS + W
        before = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
        if before == 2 * used - 1:  # all have counted twice: nobody waits any more
            gl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")

    @gluon.jit
    def add_up(
        self, t, piece, W: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, used
    ):
        """Return the output [PIECE, BLOCK_D] and the log-sum-exp of some rows: all parts of them added up in their order.

        All loads are under way at the same time, past the L1, which may hold what was there before.
        """
        MOST: gl.constexpr = MOST_PARTS
        layout: gl.constexpr = piece_layout(BLOCK_D)
        step: gl.constexpr = CONSUMERS * BLOCK_M * (BLOCK_D + 1)
        results = self.results + (t // self.count * self.count * CONSUMERS + W) * (BLOCK_M * (BLOCK_D + 1))
        m = piece * PIECE + gl.arange(0, PIECE, gl.SliceLayout(1, layout))
        d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))[None, :]
        numbers = results + BLOCK_M + m[:, None] * BLOCK_D + d
        found = ()
        values = ()
        for part in gl.static_range(MOST):
            here = (m >= 0) & (part < used)
            lse = gl.load(results + m + part * step, mask=here, other=MINUS_INF, cache_modifier=".cg")
            found += (lse,)  # type: ignore[assignment]  # in a kernel a name's tuple may grow
            here2 = (m[:, None] >= 0) & (d >= 0) & (part < used)
            value = gl.load(numbers + part * step, mask=here2, other=0.0, cache_modifier=".cg")
            values += (value,)  # type: ignore[assignment]
        top = found[0]  # type: ignore[misc]
        for part in gl.static_range(1, MOST):
            top = gl.maximum(top, found[part])
        top = gl.where(top == MINUS_INF, 0.0, top)  # a row that sees no key: e^(-inf), not nan
        total = gl.zeros_like(top)
        o = gl.zeros([PIECE, BLOCK_D], gl.float32, layout)
        for part in gl.static_range(MOST):
            weight = gl.exp(found[part] - top)
            total += weight
            o += values[part] * weight[:, None]
        nothing = total == 0.0
        safe = gl.where(nothing, 1.0, total)
        return o / safe[:, None], gl.where(nothing, MINUS_INF, top + gl.log(safe))
