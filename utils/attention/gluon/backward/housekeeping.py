"""Clearing and finishing the sums of dQ while the main kernel runs, by two warps that would otherwise be idle.

`start_backward` and `finish_dq` move 470 MB at 16384 tokens of width 2048, at the rate of the memory, while the tensor
cores wait; the main kernel leaves the memory nearly idle. Blocks are dealt in sections of heads (`block_work`), and blocks
of one section run before those of the next. So, in a block of section s:

    what                                     after                                         by
    clear a share of the sums of s + 1       -                                             housekeeper
    add to the sums of s                     all blocks of s - 1 have cleared their share  consumers, or TMA
    finish a share of the sums of s - 2      all blocks of s - 2 have added                housekeeper

`start_backward` then clears the first section only, and `finish_dq` finishes the last two. Two counters for each section
say how many blocks have cleared (number 2 s) and added (2 s + 1). A block waits only for blocks with lower numbers, and
GPUs start blocks in the order of their numbers; CUDA does not promise that order. The first half of a section's blocks do
all the work: under a causal mask they are the long ones. Not measured yet; the simulator runs blocks one after another, so
it checks what is cleared and finished, and not that a block waits for another.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from utils.attention.gluon.decode.kernel import wait_for_first_launch
from utils.attention.gluon.shared import thread_barrier

WARPS = gl.constexpr(2)


@gluon.jit
def wait_for_additions_by_tma():
    """Wait until what this thread handed to TMA has been added to memory; `tma.store_wait` waits for the reads only."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence_async():
    """Order ordinary accesses to memory before accesses by TMA."""
    gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_count(counter, count):
    """Wait until a counter has reached `count`; what was stored before it was counted can then be read."""
    seen = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while seen < count:
        seen = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    thread_barrier()  # one thread has seen that: the others may go on only behind it


@gluon.jit
def count_up(counter):
    """Count this block; what its threads have stored before can be read by who sees that."""
    thread_barrier()  # one thread counts: the others must have stored
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


@gluon.jit
def section_place(work, section, blocks_n, total):
    """(section of this block, its rank among those who clear and finish, how many those are)."""
    per_section = section * blocks_n
    s = gl.program_id(0) // per_section
    rank = gl.program_id(0) - s * per_section
    return s, rank, (gl.minimum(section, total - s * section) * blocks_n + 1) // 2


@gluon.jit
def clear_pieces(sums, first, count, rank, ranks):
    """Zero the pieces rank, rank + ranks, ... of the `count` pieces, 4096 sums each, from number `first` on."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    zero = gl.zeros([128 * WARPS], gl.float32, layout)
    for piece in range(rank, count, ranks):
        at = sums + (first + piece).to(gl.int64) * 4096 + gl.arange(0, 128 * WARPS, layout)
        for part in gl.static_range(4096 // (128 * WARPS)):
            gl.store(at + part * (128 * WARPS), zero)


@gluon.jit
def finish_pieces(work, sums, dq_ptr, first, count, rank, ranks):
    """Scale the pieces rank, rank + ranks, ... of the `count` from number `first` on, and store them as rows of dQ."""
    PLAN: gl.constexpr = work.sizes.PLAN
    BLOCK_D: gl.constexpr = PLAN.block_d
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    tiles = work.sizes.tiles_m * (PLAN.block_m // 64)
    for piece in range(rank, count, ranks):
        number = first + piece
        rows = number // (BLOCK_D // 64)
        head = rows // tiles
        row = (rows - head * tiles) * 64
        at = sums + number.to(gl.int64) * 4096 + gl.arange(0, 512, layout)
        out = dq_ptr + head.to(gl.int64) * (work.sizes.sq * BLOCK_D) + (number % (BLOCK_D // 64)) * 64
        for part in range(8):
            # Eight columns of all 64 rows, in the order of `fragments.py`. Other SMs wrote them: L1 may hold older ones.
            x = gl.load(at + part * 512, cache_modifier=".cg").reshape([4, 8, 4, 2, 2]).permute([0, 3, 1, 2, 4])
            x = x.reshape([64, 8]) * work.scale
            r = row + gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))[:, None]
            d = part * 8 + gl.arange(0, 8, gl.SliceLayout(0, x.type.layout))[None, :]
            gl.store(out + r * BLOCK_D + d, x.to(dq_ptr.dtype.element_ty), mask=r < work.sizes.sq)


@gluon.jit
def housekeeper(work, sums, dq_ptr, counters, ready, added, section, blocks_n, total):
    """Two warps: say when the sums may be added to, clear a share of the next section, finish one of the last but one.

    ready, added: mbarriers: the sums of this section are clear; both consumers have added (where threads add).
    """
    PLAN: gl.constexpr = work.sizes.PLAN
    s, rank, ranks = section_place(work, section, blocks_n, total)
    if PLAN.early:
        wait_for_first_launch()  # it sets the counters to zero
    if s > 0:
        wait_for_count(counters + 2 * s, (section * blocks_n + 1) // 2)
    if PLAN.by_tma:
        fence_async()  # zeros were stored by threads, TMA adds to them
    mbarrier.arrive(ready.index(0), count=1)
    pieces = work.sizes.group * work.sizes.tiles_m * (PLAN.block_m * PLAN.block_d // 4096)  # of a head of keys
    if rank < ranks:
        if (s + 1) * section < total:
            count = gl.minimum(section, total - (s + 1) * section) * pieces
            clear_pieces(sums, (s + 1) * section * pieces, count, rank, ranks)
            count_up(counters + 2 * s + 2)
        # A last section that is narrower would have too few blocks for that.
        if (s >= 2) & ((s + 1) * section <= total):
            wait_for_count(counters + 2 * s - 3, section * blocks_n)
            finish_pieces(work, sums, dq_ptr, (s - 2) * section * pieces, section * pieces, rank, ranks)
    if not PLAN.by_tma:
        mbarrier.wait(added.index(0), 0)
        count_up(counters + 2 * s + 1)
