"""Blocks that are split, each in a program for each part, so that all SMs have work until the end (`balance.py`).

Without a mask all blocks take the same time, and an SM holds one. 2048 blocks on 132 SMs are fifteen rounds and 68 blocks:
in the sixteenth, half of the SMs have nothing to do. Split in five parts each, these 68 are done in three fifths of a round.
With grouped heads a block walks over all query heads that share its keys, and blocks can be fewer than SMs from the start.
A part leaves its dK and dV in memory, fp32, and `finish_parts` adds them up, always in the same order.

    parts of dK and dV    (slots, halves of the keys, dV and dK, 64 * BLOCK_D) fp32, in the order of `fragments.py`
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.backward.fragments import from_fragments
from utils.attention.gluon.backward.pipeline import Sizes, block_place
from utils.attention.gluon.backward.queue import block_units


@gluon.jit
def store_part(parts_ptr, work, x, WHICH: gl.constexpr):
    """Store a part of dV (WHICH = 0) or dK (1), fp32, not scaled."""
    HALF: gl.constexpr = 64 * x.shape[1]
    BLOCKS: gl.constexpr = x.shape[1] // 8
    layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [512], [1024], [2048]] if BLOCKS == 8 else [[1], [2], [512], [1024], [2048], [4096]],
        lane_bases=[[4], [8], [16], [32], [64]],
        warp_bases=[[128], [256], [HALF]],
        block_bases=[],
        shape=[2 * HALF],
    )
    flat = x.reshape([2, 4, 2, 8, BLOCKS, 4, 2]).permute([0, 4, 1, 3, 5, 2, 6]).reshape([2 * HALF])
    i = gl.arange(0, 2 * HALF, layout)
    at = ((work.late.to(gl.int64) * 2 + i // HALF) * 2 + WHICH) * HALF + i % HALF
    gl.store(parts_ptr + at, gl.convert_layout(flat, layout, assert_trivial=True))


@gluon.jit
def slots_of_share(sizes, number, total, programs, end):
    """With `even`: block of keys and head of block `number`, and its first slot, the next one, and how many parts it has."""
    n = number // total
    flat = number - n * total
    first = 0
    for row in range(n):
        first += block_units(sizes, row) * total
    length = block_units(sizes, n)
    first += flat * length
    # The program that has place i of the row is the last one whose share, end * p // programs, begins at or before i.
    begin = ((first + 1) * programs - 1) // end
    last = ((first + length) * programs - 1) // end
    return n, flat, 2 * begin + 1, 2 * begin + 2, gl.where(begin == last, 0, last - begin + 1)


@gluon.jit(
    do_not_specialize=[
        *("parts", "whole", "programs", "end", "sq", "sk", "window", "heads", "kv_heads", "group", "tiles_m"),
        *("blocks_n", "section", "total"),
    ]
)
def finish_parts(
    parts_ptr,
    dv_ptr,
    dk_ptr,
    batch_stride,
    head_stride,
    row_stride,
    parts,
    whole,
    programs,
    end,
    sq,
    sk,
    window,
    heads,
    kv_heads,
    group,
    tiles_m,
    blocks_n,
    section,
    total,
    scale,
    HEAD_DIM: gl.constexpr,
    PLAN: gl.constexpr,
    CASE: gl.constexpr,
):
    """Add up the parts of 64 rows and 32 columns of dV or dK: grid (blocks * 2, 2, BLOCK_D / 32), of those that are split.

    With `even` the grid has all blocks, and those that one program had as a whole are left alone.
    """
    BLOCK_D: gl.constexpr = PLAN.block_d
    flat_layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    number = gl.program_id(0) // 2
    half = gl.program_id(0) % 2
    which = gl.program_id(1)
    column = gl.program_id(2) * 32
    sizes = Sizes(sq, sk, window, heads, kv_heads, group, tiles_m, PLAN, CASE)
    if PLAN.even:
        n, head_total, slot, after, count = slots_of_share(sizes, number, total, programs, end)
    else:
        n, head_total = block_place(whole + number, blocks_n, section, total)
        slot = number * parts
        after = slot + 1
        count = parts
    inside = half * (2 * 64 * BLOCK_D) + which * (64 * BLOCK_D) + column * 64 + gl.arange(0, 2048, flat_layout)
    sums = gl.zeros([2048], gl.float32, flat_layout)
    for _part in range(count):
        sums += gl.load(parts_ptr + slot.to(gl.int64) * (4 * 64 * BLOCK_D) + inside)
        slot = after
        after += 2 if PLAN.even else 1
    batch = head_total // kv_heads
    head = head_total - batch * kv_heads
    row = n * 128 + half * 64 + gl.arange(0, 64, gl.SliceLayout(1, rows))[:, None]
    d = column + gl.arange(0, 32, gl.SliceLayout(0, rows))[None, :]
    x = gl.convert_layout(from_fragments(sums, 32), rows)
    place = batch.to(gl.int64) * batch_stride + head.to(gl.int64) * head_stride + row.to(gl.int64) * row_stride + d
    keep = (row < sk) & (d < HEAD_DIM) & (count > 0)
    if which == 0:
        gl.store(dv_ptr + place, x.to(dv_ptr.dtype.element_ty), mask=keep)
    else:
        gl.store(dk_ptr + place, (x * scale).to(dk_ptr.dtype.element_ty), mask=keep)
