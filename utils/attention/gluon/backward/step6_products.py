"""Products of step 6, of 128 keys or of a tile's queries with both warpgroups, their layouts, and how dQ is handed over."""

# A tuple is unpacked whole: in a kernel `_` would be a variable like any other, with one type.
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from utils.attention.gluon.backward.step6_roles import LEFT
from utils.attention.gluon.shared import pass_by, thread_barrier


@gluon.constexpr_function
def keys_layout(columns):
    """Layout of a product [128 keys, columns]: 64 rows for each warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, columns, 16])


@gluon.constexpr_function
def keys_operand(columns):
    """Layout of P^T or dS^T as the left operand, in registers, of a product [128 keys, columns]."""
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [8, 1], [16, columns, 16]), 2)


@gluon.constexpr_function
def dq_layout(queries):
    """Layout of dQ: 64 queries for each warpgroup, or 64 columns where a tile has 64 queries."""
    return gl.NVMMADistributedLayout([3, 0], [8, 1] if queries == 128 else [4, 2], [16, 64, 16])


@gluon.jit
def to_pieces(x):
    """DQ of a tile, 8192 elements, in the order of the sums: a piece of 64 x 64 for each warpgroup; registers are renamed."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [512], [1024], [2048]],
        lane_bases=[[4], [8], [16], [32], [64]],
        warp_bases=[[128], [256], [4096]],
        block_bases=[],
        shape=[8192],
    )
    # row = 16 warp + 8 half + high, column = 8 block + 2 low + pair; thread = 32 warp + 4 high + low
    if x.shape[0] == 64:
        flat = x.reshape([4, 2, 8, 2, 8, 4, 2]).permute([3, 4, 0, 2, 5, 1, 6])
    else:
        flat = x.reshape([2, 4, 2, 8, 8, 4, 2]).permute([0, 4, 1, 3, 5, 2, 6])
    return gl.convert_layout(flat.reshape([8192]), layout, assert_trivial=True)


@gluon.jit
def start_scores(work, q):
    """Hand S^T of a tile's queries, or of some of them, to the tensor cores."""
    QUERIES: gl.constexpr = q.shape[0]
    s = gl.zeros([128, QUERIES], gl.float32, keys_layout(QUERIES))
    k = work.k.reshape([128, work.sizes.PLAN.block_d])
    return warpgroup_mma(k, q.permute([1, 0]), s, use_acc=False, is_async=True)


@gluon.jit
def start_dp(work, v_left, do):
    """Hand dP^T of the same queries to the tensor cores: one product, or two where V's first columns are in registers."""
    PLAN: gl.constexpr = work.sizes.PLAN
    QUERIES: gl.constexpr = do.shape[0]
    v = work.v.index(0).reshape([128, PLAN.block_d])
    dp = gl.zeros([128, QUERIES], gl.float32, keys_layout(QUERIES))
    if PLAN.v_left:
        dp = warpgroup_mma(v_left, do.slice(0, 64, 1).permute([1, 0]), dp, use_acc=False, is_async=True)
        if PLAN.block_d > 64:
            REST: gl.constexpr = PLAN.block_d - 64
            dp = warpgroup_mma(v.slice(64, REST, 1), do.slice(64, REST, 1).permute([1, 0]), dp, is_async=True)
    else:
        dp = warpgroup_mma(v, do.permute([1, 0]), dp, use_acc=False, is_async=True)
    return dp


@gluon.jit
def start_dq(work, i):
    """Hand dQ of load number i to the tensor cores, once both warpgroups have stored dS."""
    PLAN: gl.constexpr = work.sizes.PLAN
    BLOCK_M: gl.constexpr = PLAN.block_m
    BLOCK_D: gl.constexpr = PLAN.block_d
    # Stored by threads, read by wgmma through the async proxy: without the fence it may read what was there before.
    fence_async_shared()
    thread_barrier()  # the other warpgroup's keys are in dQ too
    dq = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, dq_layout(BLOCK_M))
    ds = work.ds.index(i % PLAN.ds_slots).permute([1, 0])
    dq = warpgroup_mma(ds, work.k.reshape([128, BLOCK_D]), dq, use_acc=False, is_async=True)
    # The compiler wants a barrier between this product and the next dS; here nobody waits for long.
    thread_barrier()
    return dq


@gluon.jit
def leave_dq(leave, dq, i, FENCED: gl.constexpr):
    """Leave dQ of load number i where the storing warp reads it. FENCED: that warp fences it."""
    sums_desc, tiles, empty = leave
    mbarrier.wait(empty, (i & 1) ^ 1)  # TMA may still be reading the last tile
    tiles.reshape([8192]).store(to_pieces(dq))
    if not FENCED:
        # Stored by threads, read by TMA through the async proxy.
        fence_async_shared()
    pass_by(LEFT, 288)
