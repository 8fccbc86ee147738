"""Step 6 with a tile's queries in two halves: dV and dK of one run beside the exponentials and dS of the other. Not measured.

All of a tile's exponentials otherwise stand between S^T and dP^T and the three other products, and both warpgroups are there at
the same time: about a thousand of 4300 cycles in which the tensor cores have nothing (docs/backward-log.md, entry 41).

    tensor cores    S0 dP0 S1 dP1      dV0 dK0      dV1 dQ dK1
    threads               P0 dS0       P1 dS1       dQ left for the storing warp

    field       what                                                                           default
    halves      3: the order above; 2: S0 S1 dP0 dP1; 1: so, and P1 before dS0                 0: none
    early_dk    dK0 starts with dV0, and not with dK1                                          off
    dq_late     dV1 dK1 dQ, and dQ is left for the storing warp beside the next S0 and dP0     off
    exp_first   the exponentials of a half stand before its wait for dP^T                      off
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from utils.attention.gluon.backward.step6_products import (
    dq_layout,
    keys_operand,
    leave_dq,
    start_dp,
    start_dq,
    start_scores,
)
from utils.attention.gluon.backward.step6_roles import give_back
from utils.attention.gluon.shared import hold_here, wait_products


@gluon.jit
def half_scores(work, i, H: gl.constexpr):
    """Hand S^T of half H of tile i to the tensor cores."""
    HALF: gl.constexpr = work.sizes.PLAN.block_m // 2
    return start_scores(work, work.q.tile(i).slice(H * HALF, HALF, 0))


@gluon.jit
def half_dp(work, v_left, i, H: gl.constexpr):
    """Hand dP^T of half H of tile i to the tensor cores."""
    HALF: gl.constexpr = work.sizes.PLAN.block_m // 2
    return start_dp(work, v_left, work.do.tile(i).slice(H * HALF, HALF, 0))


@gluon.jit
def half_numbers(ring, i, layout: gl.constexpr, H: gl.constexpr):
    """The numbers of the rows of half H of load number i."""
    HALF: gl.constexpr = ring.numbers.shape[2] // 2
    return ring.numbers.index(i % ring.SLOTS).reshape([2 * HALF]).slice(H * HALF, HALF, 0).load(layout)


@gluon.jit
def half_probabilities(work, s, i, m, H: gl.constexpr, LEFT_OVER: gl.constexpr, MASK: gl.constexpr):
    """P^T of half H of tile m, load number i, from its scores, with LEFT_OVER younger products in flight."""
    PLAN: gl.constexpr = work.sizes.PLAN
    HALF: gl.constexpr = PLAN.block_m // 2
    s = wait_products(s, LEFT_OVER, HALF)
    lse2 = half_numbers(work.q, i, gl.SliceLayout(0, s.type.layout), H)
    p = gl.exp2(s * work.c - lse2[None, :])
    if MASK:
        p = work.sizes.mask_product(p, work.key, m * PLAN.block_m + H * HALF)
    if PLAN.exp_first:
        p = hold_here(p)
    return p


@gluon.jit
def half_ds(work, p, dp, i, H: gl.constexpr, LEFT_OVER: gl.constexpr):
    """dS^T of half H of tile i, rounded, and stored where the other warpgroup reads it."""
    PLAN: gl.constexpr = work.sizes.PLAN
    HALF: gl.constexpr = PLAN.block_m // 2
    dp = wait_products(dp, LEFT_OVER, HALF)
    delta = half_numbers(work.do, i, gl.SliceLayout(0, p.type.layout), H)
    ds = (p * (dp - delta[None, :])).to(work.k.dtype)
    if work.sizes.CASE.dq:
        # The slot's last dS, two tiles ago, has been read: all threads have since come to the last tile's barrier.
        work.ds.index(i % PLAN.ds_slots).slice(H * HALF, HALF, 1).store(ds)
    return ds


@gluon.jit
def add_half(x, ring, i, total, H: gl.constexpr):
    """Hand total += x @ rows of half H of load number i to the tensor cores."""
    HALF: gl.constexpr = x.shape[1]
    left = gl.convert_layout(x, keys_operand(ring.tiles.shape[4]))
    return warpgroup_mma(left, ring.tile(i).slice(H * HALF, HALF, 0), total, is_async=True)


@gluon.jit
def walk_halves(work, leave, v_left, state, lo, hi, number, MASK: gl.constexpr):
    """`walk` where a tile's queries are computed in two halves, and dV of one runs beside dS of the other.

    The tensor cores get S^T and dP^T of both halves at once. dV of the first half (and dK, with `early_dk`) starts when its
    dS is there, and runs while the threads compute the second one.
    """
    PLAN: gl.constexpr = work.sizes.PLAN
    CASE: gl.constexpr = work.sizes.CASE
    BLOCK_D: gl.constexpr = PLAN.block_d
    BLOCK_M: gl.constexpr = PLAN.block_m
    dtype: gl.constexpr = work.k.dtype
    gl.static_assert(PLAN.by_tma)
    DP: gl.constexpr = 2 if PLAN.v_left and BLOCK_D > 64 else 1  # products of dP^T of a half
    EARLY: gl.constexpr = 2 if PLAN.early_dk else 1  # products of the first half that run beside the second one
    dk, dv = state
    late = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, dq_layout(BLOCK_M))
    for m in range(lo, hi):
        i = number + m
        work.q.wait_full(i)
        s0 = half_scores(work, i, 0)
        if PLAN.halves == 3:
            work.do.wait_full(i)
            dp0 = half_dp(work, v_left, i, 0)
            if PLAN.dq_late and CASE.dq:  # noqa: SIM102 (the first is decided by the compiler)
                if m > lo:
                    leave_dq(leave, late, i - 1, PLAN.storer_fences)
            s1 = half_scores(work, i, 1)
        else:
            s1 = half_scores(work, i, 1)
            work.do.wait_full(i)
            dp0 = half_dp(work, v_left, i, 0)
        dp1 = half_dp(work, v_left, i, 1)
        p0 = half_probabilities(work, s0, i, m, 0, 1 + 2 * DP, MASK)
        if PLAN.halves == 1:
            p1 = half_probabilities(work, s1, i, m, 1, 2 * DP, MASK)
        ds0 = half_ds(work, p0, dp0, i, 0, 1 + DP if PLAN.halves == 3 else DP)
        dv = add_half(p0.to(dtype), work.do, i, dv, 0)
        if PLAN.early_dk:
            dk = add_half(ds0, work.q, i, dk, 0)
        if PLAN.halves > 1:
            # Behind dS of the first half, so that dV starts earlier.
            p1 = half_probabilities(work, s1, i, m, 1, DP + EARLY, MASK)
        ds1 = half_ds(work, p1, dp1, i, 1, EARLY)
        dv = add_half(p1.to(dtype), work.do, i, dv, 1)
        if CASE.dq and PLAN.dq_late:
            if not PLAN.early_dk:
                dk = add_half(ds0, work.q, i, dk, 0)
            dk = add_half(ds1, work.q, i, dk, 1)
            dq = start_dq(work, i)
            dv = wait_products(dv, 1, BLOCK_D)
            dk = wait_products(dk, 1, BLOCK_D)
            give_back(work, work.do, i, 10)
            give_back(work, work.q, i, 8)
            late = wait_products(dq, 0, 64)
        elif CASE.dq:
            dq = start_dq(work, i)
            dv = wait_products(dv, 1, BLOCK_D)
            give_back(work, work.do, i, 10)
            if not PLAN.early_dk:
                dk = add_half(ds0, work.q, i, dk, 0)
            dk = add_half(ds1, work.q, i, dk, 1)
            dq = wait_products(dq, 3 - EARLY, 64)
            leave_dq(leave, dq, i, PLAN.storer_fences)
        else:
            if not PLAN.early_dk:
                dk = add_half(ds0, work.q, i, dk, 0)
            dk = add_half(ds1, work.q, i, dk, 1)
            dv = wait_products(dv, 3 - EARLY, BLOCK_D)
            give_back(work, work.do, i, 10)
        if not (CASE.dq and PLAN.dq_late):
            dk = wait_products(dk, 0, BLOCK_D)
            give_back(work, work.q, i, 8)
    if CASE.dq and PLAN.dq_late:  # noqa: SIM102 (the first is decided by the compiler)
        if hi > lo:
            leave_dq(leave, late, number + hi - 1, PLAN.storer_fences)
    return dk, dv
