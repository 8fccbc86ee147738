"""Two GEMM kernels for Hopper in Gluon: C = A @ B, fp16 or bf16, fp32 accumulation. The ladder's last rung.

**The warp-specialized kernel.** One block stays on each SM and walks over tiles of C (persistent). Its warps have two kinds of
roles. One warp, the producer, does nothing but start TMA copies of the next tiles of A and B into a ring in shared memory. One
or two warpgroups, the consumers, multiply 64 rows of the tile each with wgmma; they read the ring and keep their sums in
registers. Each slot of the ring has two mbarriers: "full" is completed by the TMA unit when the bytes have arrived, "empty" by
the consumers when all have read the slot. So nobody waits for a copy that could have been started earlier:

    producer     | A0 B0 | A1 B1 | A2 B2 | A3 B3 | . wait empty . | A4 B4 | ...       runs on into the next tile
    consumer 0   . wait full .   | wgmma 0 | wgmma 1 | wgmma 2 |  ...  | store C |    its own pace: while one stores,
    consumer 1   . wait full .   | wgmma 0 | wgmma 1 | wgmma 2 |  ...  | store C |    the other may still multiply

    part             what                                     size of the plan 128 x 256, cluster 2 x 1
    tile of C        block_m x block_n, a share of the rows   128 x 256; wgmma m64n256k16, four for each slot
    ring             slots of A and B, 128 B swizzle          4 x (16 KiB + 32 KiB) = 192 KiB
    accumulator      fp32 in registers                        64 x 256 a consumer: 128 registers a thread
    registers        moved between warpgroups (setmaxnreg)    248 and 232 a consumer thread, 24 a producer thread
    pieces of C      column blocks of a tile, two buffers     64 x 64, 2 x 2 x 8 KiB = 32 KiB: stmatrix into one while
                     of each consumer in turn                 TMA drains the other, and the next tile starts meanwhile

In the inner loop a consumer issues the wgmma of slot k before it waits for that of slot k - 1, so the tensor cores always have
the next one queued; then it releases slot k - 1. TMA fills what lies outside of A and B with zeros and drops what lies outside
of C, so no size needs a mask. Clusters of blocks, and tiles in parts along K, are described in `gemm_work.py`.

**Transposed, and widths between powers of two.** Of 160 rows of C two tiles of 128 are empty to three eighths. A tile of 160
columns has tensors of 256, as Gluon knows powers of two only; TMA brings the columns that are there, and products are made as
narrow in the PTX (`gemm_launch.py`). And a plan may compute C^T = B^T A^T, whose columns are the rows of C: the operands change
places, and a piece of C is turned when it goes from registers to shared memory.

**The short kernel.** A product of a few microseconds has few steps, and waits for its first bytes most of its time. So there
four warps do everything, nothing is handed over, and several blocks share an SM: one waits for its bytes while another multiplies.

    start      allocate, initialize a barrier a slot, and ask at once for the first `stages` steps of A and B
    step i     wait for slot i % stages, start its wgmma, wait for the wgmma of step i - 1, fill that one's slot again
    end        sums to shared memory, and by TMA to C

Figures: docs/kernels/gemm.md. Importing this module imports Triton; the way in is `utils.kernels.gemm.gemm_warp_specialized`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from utils.kernels.early_launch import let_next_launch_begin, wait_for_launch_before
from utils.kernels.gemm_work import (
    BLOCK_K,
    Work,
    allocate_ring,
    fill,
    join_cluster,
    operands,
    release,
    shared_tiles,
    store_item,
    wait_until_empty,
    whole_warpgroup,
)
from utils.machine import versions

versions.adopt_newest_gluon_names()


@gluon.jit
def consumer(work, ring, out, partial, WHICH: gl.constexpr):
    """One warpgroup: rows WHICH * rows and on of each tile, or of a part of its steps."""
    PLAN: gl.constexpr = work.PLAN
    ROWS: gl.constexpr = PLAN.rows
    COLUMNS: gl.constexpr = PLAN.columns
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    step = 0
    wait_for_launch_before()
    join_cluster(PLAN)
    for item in range(gl.program_id(0) // PLAN.cluster, work.items, gl.num_programs(0) // PLAN.cluster):
        first, last, row, column = work.locate(item)
        # Made anew for each tile, so that its registers are free while parts are added up.
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        for k in range(first, last):
            a, b = operands(ring, step, PLAN, WHICH)
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])  # only now has the slot before been read
            release(ring, step - 1, PLAN.stages, k > first)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(ring, step - 1, PLAN.stages)
        store_item(work, out, partial, acc, item, row + WHICH * ROWS, column, WHICH)
    tma.store_wait(0)  # shared memory must live until TMA has read it


@gluon.jit
def producer(work, ring, a_desc, b_desc):
    """One warp: keep the ring full. `step` counts slots filled since the start, across tiles."""
    PLAN: gl.constexpr = work.PLAN
    step = 0
    wait_for_launch_before()
    # Only now: with several launches ahead, blocks of those far ahead would take the SMs of the next.
    let_next_launch_begin()
    join_cluster(PLAN)
    for item in range(gl.program_id(0) // PLAN.cluster, work.items, gl.num_programs(0) // PLAN.cluster):
        first, last, row, column = work.locate(item)
        for k in range(first, last):
            # Without this wait TMA would overwrite what a consumer still reads, another block's too where it shares the
            # tile. The parity is that of the round before: in the first round a fresh barrier counts as just completed.
            wait_until_empty(ring, step, PLAN.stages)
            fill(ring, step, a_desc, b_desc, row, column, k * BLOCK_K, PLAN)
            step += 1
    if PLAN.cluster > 1:
        # Until all that this block has fetched has been read: after that no other block sends anything here, and this one
        # may end, with its barriers.
        STAGES: gl.constexpr = PLAN.stages
        for i in gl.static_range(STAGES):
            wait_until_empty(ring, step + i, STAGES)


@gluon.jit(do_not_specialize=["M", "N", "K", "items", "whole", "split"])
def gemm_kernel(a_desc, b_desc, c_desc, sums, counters, M, N, K, items, whole, split, PLAN: gl.constexpr):
    """The warp-specialized kernel: allocate ring and barriers, then start the roles.

    The descriptors bring boxes of PLAN. C is (M, N): `whole` tiles are computed whole, each of the others in `split` parts, with
    sums in fp32 (tiles in parts, parts, block_m, block_n) and counters in int32, all zero (tiles in parts, consumers).
    """
    ring = allocate_ring(a_desc.dtype, PLAN)
    work = Work(M, N, K, items, whole, split, PLAN)
    CONSUMERS: gl.constexpr = PLAN.consumers
    C_BOX: gl.constexpr = PLAN.boxes[2]
    buffers = shared_tiles(c_desc.dtype, PLAN.buffers * CONSUMERS, C_BOX)
    out, partial = (c_desc, buffers), (sums, counters)
    # The first role, the last of the plan's consumers, has num_warps and the registers that are left. Then come the others' warps,
    # and the registers of a thread of each.
    gl.warp_specialize(
        [
            (consumer, (work, ring, out, partial, 1)),
            (consumer, (work, ring, out, partial, 0)),
            (producer, (work, ring, a_desc, b_desc)),
            (join_cluster, (PLAN,)),  # warps without a role
            (join_cluster, (PLAN,)),
        ][2 - CONSUMERS :],
        [4] * (CONSUMERS - 1) + [1, 1, 2],
        [232] * (CONSUMERS - 1) + [24] * 3,
    )


@gluon.jit(do_not_specialize=["M", "N", "K", "items", "whole", "split"])
def short_kernel(a_desc, b_desc, c_desc, sums, counters, M, N, K, items, whole, split, PLAN: gl.constexpr):
    """The short kernel: compute one tile of C, or one part of its sums. The arguments are those of `gemm_kernel`."""
    STAGES: gl.constexpr = PLAN.stages
    ROWS: gl.constexpr = PLAN.rows
    COLUMNS: gl.constexpr = PLAN.columns
    ring = allocate_ring(a_desc.dtype, PLAN)
    work = Work(M, N, K, items, whole, split, PLAN)
    item = gl.program_id(0)
    first, last, row, column = work.locate(item)
    count = last - first
    wait_for_launch_before()
    for i in gl.static_range(STAGES):
        fill(ring, i, a_desc, b_desc, row, column, (first + i) * BLOCK_K, PLAN, i < count)
    let_next_launch_begin()  # only now, as in `producer`

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    for i in range(count):
        a, b = operands(ring, i, PLAN, 0)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        # All four warps have read the slot of step i - 1: without this one warp would refill it under the others.
        whole_warpgroup()
        later = i - 1 + STAGES
        fetch = (i > 0) & (later < count)
        fill(ring, later, a_desc, b_desc, row, column, (first + later) * BLOCK_K, PLAN, fetch)
    acc = warpgroup_mma_wait(0, deps=[acc])

    C_BOX: gl.constexpr = PLAN.boxes[2]
    buffers = shared_tiles(c_desc.dtype, PLAN.buffers, C_BOX)
    store_item(work, (c_desc, buffers), (sums, counters), acc, item, row, column, 0)
    tma.store_wait(0)  # shared memory must live until TMA has read it
