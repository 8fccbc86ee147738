"""Two GEMM kernels for Hopper in Gluon: C = A @ B, fp16 or bf16, fp32 accumulation. The ladder's last rung.

**The warp-specialized kernel.** One block stays on each SM and walks over tiles of C (persistent). One warp, the producer, does
nothing but start TMA copies of the next tiles of A and B into a ring in shared memory. Four or eight warps, the consumer, multiply
with wgmma; they read the ring and keep their sums in registers. Each slot of the ring has two mbarriers: "full" is completed by the
TMA unit when the bytes have arrived, "empty" by the consumer when it has read the slot. So nobody waits for a copy that could have
been started earlier:

    producer     | A0 B0 | A1 B1 | A2 B2 | A3 B3 | . wait empty . | A4 B4 | ...       runs on into the next tile
    consumer     . wait full .   | wgmma 0 | wgmma 1 | wgmma 2 |  ...  | store C |    TMA stores while the next tile begins

    part             what                                     size of the plan 128 x 256, cluster 2 x 1
    tile of C        block_m rows, columns as launched        128 x 256; wgmma m64n256k16, eight for each slot
    ring             slots of A and B, 128 B swizzle          4 x (16 KiB + 32 KiB); 5 x (16 KiB + 20 KiB) for 160 columns
    accumulator      fp32 in registers                        128 registers a thread of 240; a thread of the producer has 24
    pieces of C      column blocks of a tile, two buffers     128 x 64, 2 x 16 KiB: stmatrix into one while TMA drains the other

In the inner loop the consumer issues the wgmma of slot k before it waits for that of slot k - 1, so the tensor cores always have
the next one queued; then it releases slot k - 1. TMA fills what lies outside of A and B with zeros and drops what lies outside
of C, so no size needs a mask. Clusters of blocks, and tiles in parts along K, are described in `gemm_work.py`.

**Widths.** Of 304 columns of C two tiles of 256 are empty to two fifths, and two of 160 to a twentieth. So a launch says how wide
tiles are, in steps of 16 columns, and the kernel has a loop for each width. Tensors have 256 columns in all, as Gluon knows powers of
two only; products are made as narrow in the PTX (`gemm_launch.py`). A plan may compute C^T = B^T A^T, whose columns are the rows of
C: the operands change places, and a piece of C is turned when it goes from registers to shared memory.

**The short kernel.** A product of a few microseconds has few steps, and waits for its first bytes most of its time. So there
four warps do everything, nothing is handed over, and several blocks share an SM: one waits for its bytes while another multiplies.

Figures: docs/kernels/gemm.md. Importing this module imports Triton; the way in is `utils.kernels.gemm.gemm_warp_specialized`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from utils.kernels.early_launch import let_next_launch_begin, wait_for_launch_before
from utils.kernels.gemm_work import STEP, Work, allocate_ring, fill, join_cluster, know, operands, store_item, take
from utils.machine import versions

versions.adopt_newest_gluon_names()


@gluon.jit
def zeros(PLAN: gl.constexpr):
    """The sums of a tile. Made anew for each tile."""
    ROWS: gl.constexpr = PLAN.block_m
    WARPS: gl.constexpr = PLAN.warps
    COLUMNS: gl.constexpr = PLAN.columns
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16]))
    # Set here: the compiler would set them in the code of each width.
    return gl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [zero], gl.float32, is_pure=False, pack=1)


@gluon.jit
def products(work, ring, acc, source, i, first, last, TILE: gl.constexpr):
    """Add the products of steps `first` to `last` of a tile, which begin with turn i of the ring. Return the turn behind them, too."""
    slot, before = i, i
    for k in range(first, last):
        slot, phase, i = take(work, i)
        # Without this wait wgmma would read the tiles of the round before.
        mbarrier.wait(ring[2].index(slot), phase)
        a, b = operands(work, ring, slot, TILE.block_n)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])  # only now has the slot before been read
        if TILE.short:
            # By all four warps: without this one warp would refill it under the others.
            gl.barrier()
            later = k - 1 + work.slots
            fill(work, ring, before, source, later, (k > first) & (later < last))
        else:
            # It may be refilled. It was read through the async proxy, as it will be refilled by TMA, so no fence is needed.
            mbarrier.arrive(ring[3].index(before), count=1, pred=k > first)
        before = slot
    acc = warpgroup_mma_wait(0, deps=[acc])
    if not TILE.short:
        mbarrier.arrive(ring[3].index(slot), count=1)
    return acc, i


@gluon.jit
def consumer(work, ring, out, sums):
    """One warpgroup for 64 rows: the products of each tile, or of a part of its steps."""
    PLAN: gl.constexpr = work.PLAN
    i = gl.to_tensor(0)
    join_cluster(PLAN)
    wait_for_launch_before()
    for item in range(gl.program_id(0) // PLAN.cluster, work.items, gl.num_programs(0) // PLAN.cluster):
        first, last, row, column = work.locate(item)
        acc = zeros(PLAN)
        for WIDTH in gl.static_range(4 * STEP, PLAN.block_n + 1, STEP):
            if work.width == WIDTH:  # a loop for each width
                acc, i = products(work, ring, acc, 0, i, first, last, PLAN.tile(WIDTH))
        store_item(work, out, sums, acc, item, row, column)
    tma.store_wait(0)  # shared memory must live until TMA has read it


@gluon.jit
def producer(work, ring, a_desc, b_desc):
    """One warp: keep the ring full, across tiles."""
    PLAN: gl.constexpr = work.PLAN
    i = gl.to_tensor(0)
    join_cluster(PLAN, "barrier.cluster.arrive.relaxed; mov.u32 $0, 0;")
    begin = gl.program_id(0) // PLAN.cluster
    for item in range(begin, work.items, gl.num_programs(0) // PLAN.cluster):
        first, last, row, column = work.locate(item)
        know(first + last + row + column)
        if item == begin:
            join_cluster(PLAN, "barrier.cluster.wait.acquire; mov.u32 $0, 0;")
            wait_for_launch_before()
            # Only now: with several launches ahead, blocks of those far ahead would take the SMs of the next.
            let_next_launch_begin()
        for k in range(first, last):
            # Without this wait TMA would overwrite what a consumer still reads, another block's too where it shares the
            # tile. The parity is that of the round before: in the first round a fresh barrier counts as just completed.
            slot, phase, i = take(work, i)
            mbarrier.wait(ring[3].index(slot), phase ^ 1)
            fill(work, ring, slot, (a_desc, b_desc, row, column), k)
    if PLAN.cluster > 1:
        # Until all that this block has fetched has been read: after that no other block sends anything here, and this one
        # may end, with its barriers.
        for _ in range(work.slots):
            slot, phase, i = take(work, i)
            mbarrier.wait(ring[3].index(slot), phase ^ 1)


@gluon.jit(do_not_specialize=["rows", "columns", "steps", "items", "whole", "split", "slots", "eighths"])
def gemm_kernel(
    sums, a_desc, b_desc, c, tail, rows, columns, steps, items, whole, split, slots, eighths, PLAN: gl.constexpr
):
    """The warp-specialized kernel: allocate ring and barriers, then start the roles.

    The descriptors bring boxes of the launch's tiles, which have `eighths` times eight columns. The other numbers are those of `Work`;
    behind pointers and descriptors all of them lie in one line of constants.
    Sums of tiles in parts are fp32 (tiles, parts, numbers of a tile).
    """
    ring = allocate_ring(a_desc.dtype, PLAN)
    work = Work(rows, columns, steps, items, whole, split, slots, eighths * 8, PLAN)
    buffers = gl.allocate_shared_memory(c.dtype, [PLAN.buffers] + c.block_type.shape, c.layout)  # noqa: RUF005
    # The first role has num_warps, and the registers that are left. Then come the others' warps, and registers of a thread of each.
    gl.warp_specialize(
        [
            (consumer, (work, ring, (c, tail, buffers), sums)),
            (producer, (work, ring, a_desc, b_desc)),
            (join_cluster, (PLAN,)),  # warps without a role: all warps of all blocks have to come
            (join_cluster, (PLAN,)),
        ],
        [1, 1, 2],
        [24, 24, 24],
    )


@gluon.jit(do_not_specialize=["rows", "columns", "steps", "items", "whole", "split"])
def short_kernel(sums, a_desc, b_desc, c, rows, columns, steps, items, whole, split, PLAN: gl.constexpr):
    """The short kernel: compute one tile of C, or one part of its sums. The arguments are those of `gemm_kernel`."""
    SLOTS: gl.constexpr = PLAN.slots
    ring = allocate_ring(a_desc.dtype, PLAN)
    work = Work(rows, columns, steps, items, whole, split, gl.to_tensor(SLOTS), gl.to_tensor(PLAN.block_n), PLAN)
    item = gl.program_id(0)
    first, last, row, column = work.locate(item)
    source = (a_desc, b_desc, row, column)
    know(row + column)
    wait_for_launch_before()
    for i in gl.static_range(SLOTS):
        fill(work, ring, i, source, first + i, first + i < last)
    let_next_launch_begin()  # only now, as in `producer`
    acc, _ = products(work, ring, zeros(PLAN), source, gl.to_tensor(0), first, last, PLAN)
    buffers = gl.allocate_shared_memory(c.dtype, [PLAN.buffers] + c.block_type.shape, c.layout)  # noqa: RUF005
    store_item(work, (c, c, buffers), sums, acc, item, row, column)
    tma.store_wait(0)  # shared memory must live until TMA has read it
