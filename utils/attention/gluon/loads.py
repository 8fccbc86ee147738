"""Loads of step 5: the producer warp."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def producer(work, q_desc, k_desc, v_desc):
    """One warp: keep the rings of Q, K and V full, across tiles. `it` counts blocks of keys since the start."""
    PLAN: gl.constexpr = work.PLAN
    CONSUMERS: gl.constexpr = PLAN.consumers
    BLOCK_M: gl.constexpr = work.q.tiles.shape[3]
    count, t, rest = work.first(PLAN.rows)
    it = 0
    for i in range(count):
        t_next = work.todo.start_next(t, rest, i)
        tile, flat = work.todo.locate(t)
        row = work.first_row(tile)
        batch = flat // work.heads
        head = flat - batch * work.heads
        kv_head = head // work.group
        lo, hi = work.blocks(t, row, PLAN.rows)
        for j in range(hi - lo):
            key = (hi - 1 - j) * PLAN.block_n
            # In the order in which slots become free: where there is one tile of Q, its output leaves last.
            work.k.load(it, k_desc, batch, kv_head, key)
            if j == 0:
                for w in gl.static_range(CONSUMERS):
                    work.q.load(i, q_desc, batch, head, row + w * BLOCK_M, w)
            work.v.load(it, v_desc, batch, kv_head, key)
            it += 1
        t = work.todo.finish_next(t_next)
