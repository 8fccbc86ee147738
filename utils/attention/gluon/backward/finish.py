"""The kernel that ends a backward pass: rows of dQ from their sums, and dK and dV of blocks that were cut from their pieces'."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.backward.fragments import from_fragments
from utils.attention.gluon.backward.pipeline import block_place
from utils.attention.gluon.intervals import tile_entry
from utils.kernels.early_launch import wait_for_launch_before

NUMBERS = ["sq", "sk", "back", "head_dim", "width", "blocks_n", "section", "total", "whole", "pieces", "for_parts"]


@gluon.jit
def finish_part(parts_ptr, dv_ptr, dk_ptr, sizes, blocks, program, scale, TABLE: gl.constexpr):
    """Add up the pieces of 64 rows and 32 columns of dV or dK of a block of 128 keys, and store the sums' rows."""
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    sk, back, head_dim, width = sizes
    blocks_n, section, total, whole, pieces = blocks
    own = program // (width * 8)
    quarter = program // (width * 2) - own * 4  # dV and dK of the first 64 keys, dV and dK of the others
    column = program % (width * 2) * 32
    first = (own.to(gl.int64) * pieces * 4 + quarter) * (width * 4096) + column * 64
    parts = parts_ptr + first + gl.arange(0, 2048, flat)
    sums = gl.zeros([2048], gl.float32, flat)
    for _piece in range(pieces):
        sums += gl.load(parts)
        parts += width * 16384
    n, head = block_place(whole + own, blocks_n, section, total)
    row, stop = n * 128, sk
    if TABLE:
        row, stop = tile_entry(back, n, sk, 0), tile_entry(back, n, sk, 1)
    r = row + quarter // 2 * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    d = column + gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :]
    at = (head.to(gl.int64) * sk + r) * (head_dim * 8) + d
    keep = (r < stop) & (d < head_dim * 8)
    x = gl.convert_layout(from_fragments(sums, 32), layout)
    if quarter % 2 == 0:
        gl.store(dv_ptr + at, x.to(dv_ptr.dtype.element_ty), mask=keep)
    else:
        gl.store(dk_ptr + at, (x * scale).to(dk_ptr.dtype.element_ty), mask=keep)


@gluon.jit
def finish_dq(sums_ptr, dq_ptr, sq, head_dim, width, number, scale, FRAGMENTS: gl.constexpr):
    """Scale piece `number` of the sums, 64 queries x 64 columns, and store it as rows of dQ."""
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = number // width
    piece = number - tile * width
    tiles = gl.cdiv(sq, 128) * 2
    head = (tile // tiles).to(gl.int64)
    r = tile % tiles * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    d = piece * 64 + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    keep = (r < sq) & (d < head_dim * 8)
    if FRAGMENTS:
        i = gl.arange(0, 4096, flat)
        # Eight columns follow each other. What lies behind the head dimension was not cleared either.
        sums = gl.load(sums_ptr + number.to(gl.int64) * 4096 + i, mask=i < (head_dim - piece * 8) * 512, other=0.0)
        dq = gl.convert_layout(from_fragments(sums, 64), layout)
    else:
        dq = gl.load(sums_ptr + (head * (tiles * 64) + r) * (width * 64) + d, mask=keep, other=0.0)
    at = dq_ptr + (head * sq + r) * (head_dim * 8) + d
    gl.store(at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=keep)


@gluon.jit(do_not_specialize=NUMBERS)
def finish_backward(
    sums_ptr,
    dq_ptr,
    parts_ptr,
    dv_ptr,
    dk_ptr,
    sq,
    sk,
    back,
    head_dim,
    width,
    blocks_n,
    section,
    total,
    whole,
    pieces,
    for_parts,
    scale,
    FRAGMENTS: gl.constexpr,
    TABLE: gl.constexpr,
):
    """End a backward pass: grid (for_parts + pieces of dQ's sums,).

    head_dim is in units of 8 elements, so that the compiler knows of 16 bytes; width in 64 columns. for_parts: so many programs add up parts, eight for each block that was cut and each 64 columns.
    FRAGMENTS: dQ's sums are in the order of the fragments, else in rows. TABLE: `back` is the table of packed sequences.
    """
    wait_for_launch_before()
    program = gl.program_id(0)
    if program < for_parts:
        blocks = (blocks_n, section, total, whole, pieces)
        finish_part(parts_ptr, dv_ptr, dk_ptr, (sk, back, head_dim, width), blocks, program, scale, TABLE)
    else:
        # The last heads come first, whose sums are still in the L2.
        finish_dq(sums_ptr, dq_ptr, sq, head_dim, width, gl.num_programs(0) - 1 - program, scale, FRAGMENTS)
