"""Two GEMM kernels for Hopper in Gluon: C = A @ B, fp16 or bf16, fp32 accumulation. The ladder's last rung.

**The warp-specialized kernel.** One block stays on each SM and walks over tiles of C (persistent). One warp, the producer, only
starts TMA copies of the next tiles of A and B into a ring in shared memory. Four or eight warps, the consumer, read the ring,
multiply with wgmma and keep their sums in registers. Each slot of the ring has two mbarriers: the TMA unit completes "full" when
the bytes have arrived, and the consumer completes "empty" when it has read the slot. So the copies run ahead of the products:

    producer     | A0 B0 | A1 B1 | A2 B2 | A3 B3 | . wait empty . | A4 B4 | ...       runs on into the next tile
    consumer     . wait full .   | wgmma 0 | wgmma 1 | wgmma 2 |  ...  | store C |    TMA stores while the next tile begins

    part             what                                     size in the plan 128 x 256, cluster 2 x 1
    tile of C        block_m rows, columns from the launch    128 x 256; wgmma m64n256k16, eight for each slot
    ring             slots of A and B, 128 B swizzle          4 x (16 KiB + 32 KiB); 5 x (16 KiB + 20 KiB) for 160 columns
    accumulator      fp32 in registers                        128 registers a thread of 240; a thread of the producer has 24
    pieces of C      column blocks of a tile, two buffers     128 x 64, 2 x 16 KiB: stmatrix into one while TMA drains the other

In the inner loop the consumer issues the wgmma of slot k before it waits for the wgmma of slot k - 1, so the tensor cores always
have a product in their queue. Then it releases slot k - 1. TMA fills the parts of a tile outside of A and B with zeros and drops
the parts outside of C, so no size needs a mask. `gemm_work.py` describes clusters of blocks, and tiles in parts along K.

**Widths.** On 304 columns of C, two tiles of 256 columns waste two fifths of their work, and two tiles of 160 columns a twentieth.
So the launch sets the width of the tiles, in steps of 16 columns, and the kernel has a loop for each width. Gluon's tensors have 256
columns in every loop, because their sizes are powers of two; `gemm_launch.py` narrows the products in the PTX. A plan may compute
C^T = B^T A^T: the operands change places, and a piece of C is transposed on its way from registers to shared memory.

**The short kernel.** A product of a few microseconds has few steps, and waits for its first bytes most of its time. So its four
warps have one role, and several blocks share an SM: one block waits for its bytes while another block multiplies.

On an H200 1.14 times as fast as cuBLAS with a warm L2, 0.99 with a cold L2 (800 drawn shapes, docs/kernels/gemm.md). Importing this
module imports Triton; call `utils.kernels.gemm.gemm_warp_specialized`.
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
    """Return zeros for the sums of one tile."""
    ROWS: gl.constexpr = PLAN.block_m
    WARPS: gl.constexpr = PLAN.warps
    COLUMNS: gl.constexpr = PLAN.columns
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16]))
    # The assembly sets the registers here: the compiler would set them in the code of each width.
    return gl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [zero], gl.float32, is_pure=False, pack=1)


@gluon.jit
def products(work, ring, acc, source, i, first, last, TILE: gl.constexpr):
    """Add the products of steps `first` to `last` - 1 of a tile, from turn i of the ring on. Return the sums and the next turn."""
    slot, before = i, i
    for k in range(first, last):
        slot, phase, i = take(work, i)
        # Without this wait wgmma would read the tiles of the last round.
        mbarrier.wait(ring[2].index(slot), phase)
        a, b = operands(work, ring, slot, TILE.block_n)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])  # without it TMA would refill a slot that wgmma still reads
        if TILE.short:
            # All four warps have read the last slot: without this barrier one warp would refill it too early.
            gl.barrier()
            later = k - 1 + work.slots
            fill(work, ring, before, source, later, (k > first) & (later < last))
        else:
            # TMA may refill the last slot. wgmma has read it through TMA's own proxy, so no fence is needed.
            mbarrier.arrive(ring[3].index(before), count=1, pred=k > first)
        before = slot
    acc = warpgroup_mma_wait(0, deps=[acc])  # the caller reads the sums next
    if not TILE.short:
        mbarrier.arrive(ring[3].index(slot), count=1)
    return acc, i


@gluon.jit
def consumer(work, ring, out, sums):
    """Multiply and store each tile of this program, or each part of a tile, with one warpgroup for 64 rows."""
    PLAN: gl.constexpr = work.PLAN
    i = gl.to_tensor(0)
    join_cluster(PLAN)
    wait_for_launch_before()  # C and the sums may still be in use by the launch before
    for item in range(gl.program_id(0) // PLAN.cluster, work.items, gl.num_programs(0) // PLAN.cluster):
        first, last, row, column = work.locate(item)
        acc = zeros(PLAN)
        for WIDTH in gl.static_range(4 * STEP, PLAN.block_n + 1, STEP):
            if work.width == WIDTH:  # the kernel has a loop for each width
                acc, i = products(work, ring, acc, 0, i, first, last, PLAN.tile(WIDTH))
        store_item(work, out, sums, acc, item, row, column)
    tma.store_wait(0)  # shared memory must live until TMA has read it


@gluon.jit
def producer(work, ring, a_desc, b_desc):
    """Keep the ring full across tiles, with one warp."""
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
            # Any earlier, blocks of launches far ahead would take the SMs of the next launch.
            let_next_launch_begin()
        for k in range(first, last):
            # Without this wait TMA would overwrite a slot that a consumer still reads; in a cluster, a consumer of any block.
            # The parity is the last round's: in the first round a fresh barrier counts as completed.
            slot, phase, i = take(work, i)
            mbarrier.wait(ring[3].index(slot), phase ^ 1)
            fill(work, ring, slot, (a_desc, b_desc, row, column), k)
    if PLAN.cluster > 1:
        # Wait until all consumers have read all that this block has fetched. Then no other block sends anything here. Without
        # this wait the block could end while others still write to its memory and barriers.
        for _ in range(work.slots):
            slot, phase, i = take(work, i)
            mbarrier.wait(ring[3].index(slot), phase ^ 1)


@gluon.jit(do_not_specialize=["rows", "columns", "steps", "items", "whole", "split", "slots", "eighths"])
def gemm_kernel(
    sums, a_desc, b_desc, c, tail, rows, columns, steps, items, whole, split, slots, eighths, PLAN: gl.constexpr
):
    """Compute C by the warp-specialized kernel: allocate ring and barriers, then start the roles.

    A tile has 8 * `eighths` columns. The other numbers are fields of `Work`. They come behind pointers and descriptors, so that
    all of them lie in one line of the constant cache. `sums` are fp32 (tiles in parts, parts, numbers of a tile).
    """
    ring = allocate_ring(a_desc.dtype, PLAN)
    work = Work(rows, columns, steps, items, whole, split, slots, eighths * 8, PLAN)
    buffers = gl.allocate_shared_memory(c.dtype, [PLAN.buffers] + c.block_type.shape, c.layout)  # noqa: RUF005
    # The first role has num_warps warps. The lists have the warps of each other role, and the registers of its threads.
    gl.warp_specialize(
        [
            (consumer, (work, ring, (c, tail, buffers), sums)),
            (producer, (work, ring, a_desc, b_desc)),
            (join_cluster, (PLAN,)),  # warps without a role: a cluster's barrier waits for all warps
            (join_cluster, (PLAN,)),
        ],
        [1, 1, 2],
        [24, 24, 24],
    )


@gluon.jit(do_not_specialize=["rows", "columns", "steps", "items", "whole", "split"])
def short_kernel(sums, a_desc, b_desc, c, rows, columns, steps, items, whole, split, PLAN: gl.constexpr):
    """Compute one tile of C, or one part of its sums, by the short kernel. The arguments mean the same as in `gemm_kernel`."""
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
    let_next_launch_begin()  # not earlier, for the reason in `producer`
    acc, _ = products(work, ring, zeros(PLAN), source, gl.to_tensor(0), first, last, PLAN)
    buffers = gl.allocate_shared_memory(c.dtype, [PLAN.buffers] + c.block_type.shape, c.layout)  # noqa: RUF005
    store_item(work, (c, c, buffers), sums, acc, item, row, column)
    tma.store_wait(0)  # shared memory must live until TMA has read it
