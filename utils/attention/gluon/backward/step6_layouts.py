"""Layouts of step 6: products of 128 keys, of which each warpgroup has 64 rows, and halves of dQ."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
