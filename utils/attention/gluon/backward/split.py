"""Split the blocks of the last round over the GPU, so that all of its SMs have work until the end.

Without a mask all blocks take the same time, and an SM holds one. 2048 blocks on 132 SMs are fifteen rounds and 68 blocks:
in the sixteenth, half of the SMs have nothing to do. Split in five parts each, by queries, these 68 are done in three fifths
of a round. A part leaves its dK and dV in memory, fp32, and `finish_parts` adds them up, always in the same order.

    parts of dK and dV    (split blocks, parts, consumers, dV and dK, 64 * BLOCK_D) fp32, in the order of `fragments.py`
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.backward.fragments import from_fragments, to_fragments
from utils.attention.gluon.backward.pipeline import block_place


@gluon.jit
def store_part(parts_ptr, work, x, W: gl.constexpr, WHICH: gl.constexpr):
    """Store this consumer's 64 rows of a part of dV (WHICH = 0) or dK (1), fp32, not scaled."""
    SIZE: gl.constexpr = x.shape[0] * x.shape[1]
    at = parts_ptr + ((work.late.to(gl.int64) * 2 + W) * 2 + WHICH) * SIZE
    gl.store(at + gl.arange(0, SIZE, gl.BlockedLayout([4], [32], [4], [0])), to_fragments(x))


@gluon.jit(do_not_specialize=["parts", "whole", "blocks_n", "section", "total", "kv_heads", "sk"])
def finish_parts(
    parts_ptr,
    dv_ptr,
    dk_ptr,
    batch_stride,
    head_stride,
    row_stride,
    parts,
    whole,
    blocks_n,
    section,
    total,
    kv_heads,
    sk,
    scale,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
):
    """Add up the parts of 64 rows and 32 columns of dV or dK: grid (split blocks * 2, 2, BLOCK_D / 32)."""
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    number = gl.program_id(0) // 2
    half = gl.program_id(0) % 2
    which = gl.program_id(1)
    column = gl.program_id(2) * 32
    at = parts_ptr + (((number.to(gl.int64) * parts) * 2 + half) * 2 + which) * (64 * BLOCK_D) + column * 64
    at += gl.arange(0, 2048, flat)
    sums = gl.zeros([2048], gl.float32, flat)
    for _part in range(parts):
        sums += gl.load(at)
        at += 4 * 64 * BLOCK_D
    n, head_total = block_place(whole + number, blocks_n, section, total)
    batch = head_total // kv_heads
    head = head_total - batch * kv_heads
    row = n * 128 + half * 64 + gl.arange(0, 64, gl.SliceLayout(1, rows))[:, None]
    d = column + gl.arange(0, 32, gl.SliceLayout(0, rows))[None, :]
    x = gl.convert_layout(from_fragments(sums, 32), rows)
    place = batch.to(gl.int64) * batch_stride + head.to(gl.int64) * head_stride + row.to(gl.int64) * row_stride + d
    keep = (row < sk) & (d < HEAD_DIM)
    if which == 0:
        gl.store(dv_ptr + place, x.to(dv_ptr.dtype.element_ty), mask=keep)
    else:
        gl.store(dk_ptr + place, (x * scale).to(dk_ptr.dtype.element_ty), mask=keep)
