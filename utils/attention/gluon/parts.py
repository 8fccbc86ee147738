"""Where a launch has fewer tiles than the GPU has multiprocessors: several programs share the keys of a tile.

Each computes the attention of the tile's rows over its own blocks of keys, a part, and leaves output and log-sum-exp of
each row in global memory, in fp32. Then it counts. Who counts last adds the parts up:

    lse = log sum_i e^lse_i        out = sum_i e^(lse_i - lse) out_i

No program waits for another, and the parts are added in their order, so that the same bits come out twice. Consumers of
a block count and add for themselves: they own different rows.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.plan import MOST_PARTS as _MOST_PARTS
from utils.attention.gluon.shared import MINUS_INF, accumulator, aggregate, thread_barrier
from utils.attention.gluon.softmax import spread

MOST_PARTS = gl.constexpr(_MOST_PARTS)


@aggregate
class Parts:
    """Where the parts of a launch are left, and who has left one."""

    results: gl.tensor  # fp32: for each part and consumer 64 log-sum-exps, then 64 rows of output
    counters: gl.tensor  # int32, zero before and after a launch: for each tile and consumer
    count: gl.tensor  # parts of a tile, if it has as many blocks of keys

    @gluon.constexpr_function
    def __init__(self, results, counters, count):
        self.results = results
        self.counters = counters
        self.count = count

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
    def leave(self, t, o, lses, row, W: gl.constexpr, CONSUMERS: gl.constexpr, used):
        """Store the part of item t of consumer W, count it, and tell whether it is the last of its tile.

        lses: pairs of row numbers and log-sum-exps; row: the first one.
        """
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
        # All threads have stored before one of them counts: who counts last reads what all have stored.
        thread_barrier()
        counter = self.counters + t // self.count * CONSUMERS + W
        arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        last = arrived == used - 1
        if last:
            gl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")  # the next launch finds it as this one did
        return last

    @gluon.jit
    def add_up(self, t, tile, lses, row, W: gl.constexpr, CONSUMERS: gl.constexpr, used):
        """Add up all parts of a tile in their order: the rows go into `tile`; returns pairs of row numbers and log-sum-exps.

        t: any item of the tile; lses: as in `leave`, of which only the row numbers count. All loads of a piece of 64
        columns are under way at the same time, past the L1, which may hold what was there before.
        """
        BLOCK_M: gl.constexpr = tile.shape[0]
        BLOCK_D: gl.constexpr = tile.shape[1]
        MOST: gl.constexpr = MOST_PARTS
        layout: gl.constexpr = accumulator(64)
        step: gl.constexpr = CONSUMERS * BLOCK_M * (BLOCK_D + 1)
        results = self.results + (t // self.count * self.count * CONSUMERS + W) * (BLOCK_M * (BLOCK_D + 1))
        totals = ()
        weights = ()  # of each part: one tensor, or one for each half of the rows
        for i in gl.static_range(len(lses)):
            rows = lses[i][0]
            found = ()
            for part in gl.static_range(MOST):
                here = (rows >= row) & (part < used)
                lse = gl.load(results + (rows - row) + part * step, mask=here, other=MINUS_INF, cache_modifier=".cg")
                found += (lse,)  # type: ignore[assignment]  # in a kernel a name's tuple may grow
            top = found[0]  # type: ignore[misc]
            for part in gl.static_range(1, MOST):
                top = gl.maximum(top, found[part])
            top = gl.where(top == MINUS_INF, 0.0, top)  # a row that sees no key: e^(-inf), not nan
            total = gl.zeros_like(top)
            own = ()
            for part in gl.static_range(MOST):
                own += (gl.exp(found[part] - top),)  # type: ignore[assignment]
                total += own[part]
            nothing = total == 0.0
            safe = gl.where(nothing, 1.0, total)
            lse = gl.where(nothing, MINUS_INF, top + gl.log(safe))
            totals += ((rows, lse),)  # type: ignore[assignment]
            weights += ((own, 1.0 / safe),)  # type: ignore[assignment]
        m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))[:, None]
        d = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
        for piece in gl.static_range(BLOCK_D // 64):
            numbers = results + BLOCK_M + m * BLOCK_D + (d + piece * 64)
            o = gl.zeros([BLOCK_M, 64], gl.float32, layout)
            for part in gl.static_range(MOST):
                here = (m >= 0) & (d >= 0) & (part < used)
                values = gl.load(numbers + part * step, mask=here, other=0.0, cache_modifier=".cg")
                factors = ()
                for i in gl.static_range(len(lses)):
                    factors += (weights[i][0][part] * weights[i][1],)  # type: ignore[assignment]
                o += values * spread(factors, values)
            tile.slice(piece * 64, 64, 1).store(o.to(tile.dtype))
        return totals
