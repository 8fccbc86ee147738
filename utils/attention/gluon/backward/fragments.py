"""Keep the sums of dQ in the order of the tensor cores' registers; and the two small kernels around the main kernel.

Blocks of keys add to the same rows of dQ, in fp32 and without an order. For each eight columns, a thread of an m64n64
product holds two elements of row r and two elements of row r + 8. In row-major order these would be scattered pairs. In the
order (eight columns, thread, four elements) they are neighbours, and a warp adds 512 consecutive bytes with one
`red.v4.f32`. `finish_backward` brings the rows back into order.

    sums of dQ    (B * H, Sq / 64, D / 64, 8, 128, 4) fp32: pieces of 64 queries x 64 columns
    statistics    lse * log2(e) and delta = rowsum(dO * O), (B * H, rows), fp32, rows a multiple of the query tile
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from utils.attention.gluon.backward.pipeline import LOG2_E, SIZES, block_place
from utils.attention.gluon.intervals import tile_entry
from utils.attention.gluon.shared import tma_store
from utils.kernels.early_launch import let_next_launch_begin, wait_for_launch_before

INFINITY = gl.constexpr(float("inf"))
FLAT = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))  # layout of the sums: each thread has four neighbours


@gluon.constexpr_function
def halves_layout(half):
    """Return the layout of the two halves of `to_fragments`; half: elements of each."""
    registers = [[1], [2], [512], [1024], [2048], [4096]]
    return gl.DistributedLinearLayout(
        registers[: half // 4096 + 4], [[4], [8], [16], [32], [64]], [[128], [256], [half]], [], [2 * half]
    )


@gluon.jit
def to_fragments(x):
    """Return an accumulator as a flat tensor in the order of the sums: the 64 rows of a warpgroup, or first one half of 128 rows.

    The compiler renames registers and moves nothing.
    """
    HALVES: gl.constexpr = x.shape[0] // 64
    HALF: gl.constexpr = 64 * x.shape[1]
    # row = 64 * half + 16 * warp + 8 * eight + high, column = 8 * block + 2 * low + pair, thread = 32 * warp + 4 * high + low
    flat = x.reshape([HALVES, 4, 2, 8, HALF // 512, 4, 2]).permute([0, 4, 1, 3, 5, 2, 6]).reshape([HALVES * HALF])
    return gl.convert_layout(flat, FLAT if HALVES == 1 else halves_layout(HALF), assert_trivial=True)


@gluon.jit
def from_fragments(flat, N: gl.constexpr):
    """Undo `to_fragments` of one warpgroup: return [64 * N] as [64, N] in the layout of an accumulator."""
    return flat.reshape([N // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, N])


@gluon.jit
def add_fragments(sums, x):
    """Add an accumulator [64, N] to 64 * N consecutive elements of the sums of dQ."""
    at = sums + gl.arange(0, 64 * x.shape[1], FLAT)
    gl.atomic_add(at, to_fragments(x), sem="relaxed")


@gluon.jit
def store_rows(desc, batch, head, row, tile, x):
    """Store 64 rows through a tile of shared memory, and wait until the tile is free again."""
    tile.reshape([64, x.shape[1]]).store(x.to(tile.dtype))
    # Threads store and TMA reads through the async proxy: without the fence TMA may read older data.
    fence_async_shared()
    tma_store(desc, [batch, head, row, 0], tile)
    tma.store_wait(0)  # a block that ended now would take the tile away from TMA


@gluon.jit(do_not_specialize=SIZES)
def start_backward(
    o_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    lse2_ptr,
    delta_ptr,
    dq_sums_ptr,
    parts_ptr,
    counter_ptr,
    o_batch,
    o_head,
    o_row,
    do_batch,
    do_head,
    do_row,
    sq,
    heads,
    head_dim,
    width,
    for_parts,
    DLSE: gl.constexpr,
):
    """Compute delta and lse * log2(e) of 64 rows of one head, and write zeros for dQ's sums: grid (rows / 64, B * H).

    The last heads come first, so the L2 still has the first heads when the main kernel begins with them. Strides and head_dim
    are in units of 8 elements: so the compiler knows of multiples of 16 bytes, and one kernel takes all strides. width: columns
    of dQ's sums in units of 64, or 0 without sums in memory. for_parts: pieces of 4096 zeros for sums of dK and dV.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    let_next_launch_begin()
    tile = gl.program_id(0)
    rows = gl.num_programs(0) * 64
    head_total = (gl.num_programs(1) - 1 - gl.program_id(1)).to(gl.int64)
    batch = head_total // heads
    head = head_total - batch * heads
    r = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    d = gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]
    wide = r.to(gl.int64)[:, None]
    o_rows = o_ptr + (batch * o_batch + head * o_head + wide * o_row) * 8
    do_rows = do_ptr + (batch * do_batch + head * do_head + wide * do_row) * 8
    # Start all loads of up to 128 columns before the first wait: most of the time is the memory's latency.
    lse = gl.load(lse_ptr + head_total * sq + r, mask=r < sq, other=INFINITY)
    o = gl.load(o_rows + d, mask=(r < sq)[:, None] & (d < head_dim * 8), other=0.0)
    do = gl.load(do_rows + d, mask=(r < sq)[:, None] & (d < head_dim * 8), other=0.0)
    gl.store(counter_ptr, 0)
    sums = dq_sums_ptr + (head_total * gl.num_programs(0) + tile) * (width * 4096)
    for piece in range(width):
        i = gl.arange(0, 4096, FLAT)
        # The sums lie eight columns after eight columns. Nobody reads the columns behind the head dimension.
        gl.store(sums + piece * 4096 + i, gl.zeros([4096], gl.float32, FLAT), mask=i < (head_dim - piece * 8) * 512)
    for piece in range(
        gl.program_id(1) * gl.num_programs(0) + tile, for_parts, gl.num_programs(0) * gl.num_programs(1)
    ):
        gl.store(parts_ptr + piece * 4096 + gl.arange(0, 4096, FLAT), gl.zeros([4096], gl.float32, FLAT))
    delta = gl.sum(o.to(gl.float32) * do.to(gl.float32), 1)
    for column in range(128, head_dim * 8, 128):
        keep = (r < sq)[:, None] & (column + d < head_dim * 8)
        o = gl.load(o_rows + column + d, mask=keep, other=0.0)
        do = gl.load(do_rows + column + d, mask=keep, other=0.0)
        delta += gl.sum(o.to(gl.float32) * do.to(gl.float32), 1)
    # A row without keys has the log-sum-exp -inf; a row behind the last has none. Infinity makes their probabilities 2^(-inf) = 0.
    lse2 = gl.where(gl.abs(lse) == INFINITY, INFINITY, lse * LOG2_E)
    if DLSE:
        # The log-sum-exp has a gradient too: d lse / d S = P, so dS = P (dP - delta + dlse).
        delta -= gl.load(dlse_ptr + head_total * sq + r, mask=r < sq, other=0.0)
    gl.store(lse2_ptr + head_total * rows + r, lse2)
    gl.store(delta_ptr + head_total * rows + r, delta)


@gluon.jit(do_not_specialize=SIZES)
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
    TABLE: gl.constexpr,
):
    """Store sums as rows, 64 rows x 64 columns in a program: grid (for_parts + pieces of dQ's sums,).

    head_dim is in units of 8 elements, so the compiler knows of multiples of 16 bytes; width is in 64 columns. for_parts: programs for
    dV and dK of the blocks in pieces; each block has `pieces` sums. TABLE: `back` is the table of packed sequences.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    wait_for_launch_before()  # the main kernel still adds to the sums
    i = gl.arange(0, 4096, FLAT)
    program = gl.program_id(0)
    if program < for_parts:
        halves = gl.where(width == 4, 1, 2)  # a block has one or two halves of 64 keys; `wide_heads.py` has one
        own = program // (width * 2 * halves)
        quarter = program // width - own * 2 * halves  # 0: dV, 1: dK of the first 64 keys; 2: dV, 3: dK of the next 64
        column = program % width * 64
        n, head = block_place(whole + own, blocks_n, section, total)
        row, stop = n * 64 * halves, sk
        if TABLE:
            row, stop = tile_entry(back, n, sk, 0), tile_entry(back, n, sk, 1)
        row += quarter // 2 * 64
        first = head.to(gl.int64) * sk
        parts = parts_ptr + (own.to(gl.int64) * pieces * 2 * halves + quarter) * (width * 4096) + column * 64 + i
        sums = gl.zeros([4096], gl.float32, FLAT)
        for _piece in range(pieces):
            sums += gl.load(parts)
            parts += halves * width * 8192
        out_ptr = dv_ptr
        if quarter % 2 == 0:
            scale = 1.0
        else:
            out_ptr = dk_ptr
    else:
        number = gl.num_programs(0) - 1 - program  # the last heads come first: their sums are still in the L2
        tile = number // width
        column = (number - tile * width) * 64
        tiles = gl.cdiv(sq, 128) * 2
        row, stop = tile % tiles * 64, sq
        first = (tile // tiles).to(gl.int64) * sq
        # The sums lie eight columns after eight columns. `start_backward` has not cleared columns behind the head dimension.
        keep = i < (head_dim * 8 - column) * 64
        sums = gl.load(sums_ptr + number.to(gl.int64) * 4096 + i, mask=keep, other=0.0)
        out_ptr = dq_ptr
    r = row + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    d = column + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    x = gl.convert_layout(from_fragments(sums, 64), layout) * scale
    keep = (r < stop) & (d < head_dim * 8)
    gl.store(out_ptr + (first + r) * (head_dim * 8) + d, x.to(out_ptr.dtype.element_ty), mask=keep)
