"""Warp-specialized GEMM for Hopper in Gluon: C = A @ B, fp16 or bf16, fp32 accumulation. The ladder's last rung.

One block stays on each SM and walks over tiles of C (persistent). Its warps have two kinds of roles. One warp, the
producer, does nothing but start TMA copies of the next tiles of A and B into a ring in shared memory. One to three
warpgroups, the consumers, multiply 64 or 128 rows of the tile each with wgmma; they read the ring and keep their sums
in registers. Each slot of the ring has two mbarriers: "full" is completed by the TMA unit when the bytes have arrived,
"empty" by the consumers when all have read the slot. So nobody waits for a copy that could have been started earlier:

    producer     | A0 B0 | A1 B1 | A2 B2 | A3 B3 | . wait empty . | A4 B4 | ...       runs on into the next tile
    consumer 0   . wait full .   | wgmma 0 | wgmma 1 | wgmma 2 |  ...  | store C |    its own pace: while one stores,
    consumer 1   . wait full .   | wgmma 0 | wgmma 1 | wgmma 2 |  ...  | store C |    the other may still multiply

    part             what                                     size, first configuration (128 x 256 x 64)
    tile of C        BLOCK_M x BLOCK_N, a share of the rows   128 x 256; wgmma m64n256k16, four for each slot
    ring             slots of A and B, 128 B swizzle          4 x (16 KiB + 32 KiB) = 192 KiB
    accumulator      fp32 in registers                        64 x 256 a consumer: 128 registers a thread
    registers        moved between warpgroups (setmaxnreg)    248 and 232 a consumer thread, 24 a producer thread
    pieces of C      column blocks of a tile, two buffers     64 x 64, 2 x 2 x 8 KiB = 32 KiB: stmatrix into one while
                     of each consumer in turn                 TMA drains the other, and the next tile starts meanwhile

In the inner loop a consumer issues the wgmma of slot k before it waits for that of slot k - 1, so the tensor cores
always have the next one queued; then it releases slot k - 1. TMA fills what lies outside of A and B with zeros and
drops what lies outside of C, so no size needs a mask. Where rows of C do not start at multiples of 16 bytes (N is no
multiple of 8), TMA cannot write them, and consumers store from registers with a mask instead.

**Which tile.** A tile reads block_m + block_n rows of 128 bytes a step, and the L2 gives an SM about as many bytes as
128 x 256 needs, so larger tiles pay where there are enough of them: 192 x 256 (three consumers) and 256 x 192 (192
registers of sums a thread) read 22% less a product. Gluon's tiles are powers of two, so 192 columns are two products of
128 and 64, and the tiles of 80, 96, 144 and 160 columns, which fit more edges and numbers of SMs, two as well; the PTX makes
one instruction of both (`gemm_ptx.py`), and where C is narrower than the tile, one that is as narrow. `gemm_choose.choose` takes the configuration that a model
of the time, fitted to measured times and corrected by measured neighbours, ranks first.

**Late rows** start at odd multiples of 16 bytes: 128 bytes then lie in five sectors of the L2 instead of four, and cost
about twice the time. Where rows of A are an odd multiple of 16 bytes apart, every second one is late. With
`Config.pairs` a tile has even rows only or odd rows only, and odd ones begin eight elements earlier along K, where no
row is late (`gemm_work.py`).

**Few rows.** A tile has 64 rows at least. With `Config.transposed` the kernel computes C^T = B^T A^T, so that few rows of C are
few columns of the tile, and turns each piece on its way to shared memory (stmatrix).

**Clusters.** With `Config.multicast` the blocks of a cluster, two, four or eight, have neighbouring tiles. Those below each
other fetch their columns of B by pieces, each for all of them, those abreast their rows of A (`gemm_ptx.py`). Where the L2's
bytes are the limit, the SMs ask it for fewer; and where all blocks read the same few columns of B at the same time, fewer do.

**Parts.** 800 tiles on 132 SMs are 6.06 rounds, done in 7; and a product with few tiles and long sums leaves most SMs
idle. So the tiles that do not fill a round may be cut along K into 2 to 16 parts. Each part leaves its sums in global
memory and counts; the part that counts last adds all of them in their order, so that the same bits come out twice. No
program waits for another. With `Config.in_cluster` the parts of a tile are a cluster, whose blocks do wait for each other and
add up their sums in shared memory (`gemm_ptx.py`): that is faster where tiles are few and sums long.

**The L2.** Where A and B are about as large as the L2, copies of the larger one may say that half of its lines are the first to leave
it (`Config.stream`, `gemm_stream.py`), and a launch may wait for the one before it, so that tiles stay on their SMs.

H200 figures of square matrices: assets/results/h200/gemm.json; of random shapes: gemm_shapes.json (docs/gemm-log.md).
Products of a few microseconds have a kernel of their own, `gemm_short.py`; `gemm_launch.py` starts both. Importing this
module imports Triton; the way in is `utils.kernels.gemm.gemm_warp_specialized`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from utils.kernels.early_launch import wait_for_launch_before
from utils.kernels.gemm_parts import last_part, shared_tiles, summed_piece, whole_warpgroup
from utils.kernels.gemm_ptx import (
    join_cluster,
    let_cluster_see_barriers,
    meet_in_cluster,
    rank,
    read_block,
    read_this_block,
)
from utils.kernels.gemm_work import Work, bystander, producer, ring, rings_of_b
from utils.machine import versions

versions.adopt_newest_gluon_names()
tma_store = tma.async_store


@gluon.jit
def column_pieces(tile, PIECES: gl.constexpr):
    """A tile cut into PIECES column blocks, in registers: each half lies in registers of its own, nothing moves."""
    pieces = (tile,)
    for _ in gl.static_range(PIECES.bit_length() - 1):
        halves = ()
        for i in gl.static_range(len(pieces)):
            x = pieces[i]
            halves += x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()
        pieces = halves  # type: ignore[assignment]  # in a kernel a name's tuple may grow
    return pieces


@gluon.jit
def store_piece(work, out, piece, i, row, column, parity, WHICH: gl.constexpr, TMA_STORE: gl.constexpr):
    """Store column block i of a consumer's rows: through one of its buffers by TMA, or from registers."""
    c_desc, c_pointer, c_buffers = out
    BUFFERS: gl.constexpr = work.CONFIG.buffers
    if TMA_STORE:
        buffer = c_buffers.index(WHICH * BUFFERS + i % BUFFERS)
        tma.store_wait(BUFFERS - 1)  # the store that used this buffer before has left it: it may be overwritten
        if work.CONFIG.transposed:
            buffer.permute((1, 0)).store(piece)
        else:
            buffer.store(piece)
        fence_async_shared()  # written by threads, read by the TMA unit: without it TMA may read older data
        if work.CONFIG.pairs:
            tma_store(c_desc, [parity, row, column + i * piece.shape[1]], buffer.reshape(c_desc.block_type.shape))
        elif work.CONFIG.transposed:
            tma_store(c_desc, [column + i * piece.shape[1], row], buffer)
        else:
            tma_store(c_desc, [row, column + i * piece.shape[1]], buffer)
    else:
        gl.static_assert(not work.CONFIG.pairs, "rows of one parity are stored by TMA only")
        gl.static_assert(not work.CONFIG.transposed, "the transpose of C is stored by TMA only")
        layout: gl.constexpr = piece.type.layout
        m = row + gl.arange(0, piece.shape[0], gl.SliceLayout(1, layout))
        n = column + i * piece.shape[1] + gl.arange(0, piece.shape[1], gl.SliceLayout(0, layout))
        inside = (m < work.M)[:, None] & (n < work.N)[None, :]
        gl.store(c_pointer + m.to(gl.int64)[:, None] * work.N + n[None, :], piece, mask=inside)


@gluon.jit
def store_tile(work, out, acc, acc2, row, column, parity, WHICH: gl.constexpr, TMA_STORE: gl.constexpr):
    """Store a consumer's rows of a tile of C, piece by piece."""
    dtype: gl.constexpr = work.a_ring.dtype
    PIECES: gl.constexpr = work.CONFIG.pieces
    pieces = column_pieces(acc.to(dtype), PIECES)
    for i in gl.static_range(PIECES):
        store_piece(work, out, pieces[i], i, row, column, parity, WHICH, TMA_STORE)
    if work.CONFIG.columns[1] > 0:
        MORE: gl.constexpr = work.CONFIG.columns[1] // work.CONFIG.piece[1]
        more = column_pieces(acc2.to(dtype), MORE)
        for i in gl.static_range(MORE):
            store_piece(work, out, more[i], PIECES + i, row, column, parity, WHICH, TMA_STORE)


@gluon.jit
def add_steps(work, step, first, last, acc, acc2, WHICH: gl.constexpr):
    """Consumer: add the products of the steps first to last - 1 to its sums; returns them and the number of the next step."""
    for k in range(first, last):
        a, b, b2 = work.operands(step, WHICH)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        # All wgmma but this step's are done: only now has the slot before been read.
        if work.CONFIG.columns[1] > 0:
            acc2 = warpgroup_mma(a, b2, acc2, is_async=True)
            acc, acc2 = warpgroup_mma_wait(2, deps=[acc, acc2])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        work.release_before(step, k > first)
        step += 1
    # The sums are complete, and the last slot has been read.
    if work.CONFIG.columns[1] > 0:
        acc, acc2 = warpgroup_mma_wait(0, deps=[acc, acc2])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    work.release_before(step)
    return acc, acc2, step


@gluon.jit
def add_in_cluster(work, out, sums, acc, acc2, row, column, parity, WHICH: gl.constexpr):
    """Consumer: leave a part's sums in shared memory, add up some column blocks of the cluster's sums, and store these.

    The parts are added in their order, so that the same bits come out twice.
    """
    SPLIT: gl.constexpr = work.CONFIG.split
    PIECES: gl.constexpr = work.CONFIG.pieces
    ROWS: gl.constexpr = work.CONFIG.rows
    COLUMNS: gl.constexpr = work.CONFIG.piece[1]
    TOTAL_PIECES: gl.constexpr = work.CONFIG.block_n // COLUMNS
    pieces = column_pieces(acc, PIECES)
    if work.CONFIG.columns[1] > 0:
        pieces += column_pieces(acc2, work.CONFIG.columns[1] // work.CONFIG.piece[1])
    for i in gl.static_range(TOTAL_PIECES):
        sums.index(WHICH * TOTAL_PIECES + i).store(pieces[i])
    # All threads' sums are there before one of them tells the cluster so.
    whole_warpgroup()
    meet_in_cluster(True)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    for i in range(rank(SPLIT), TOTAL_PIECES, SPLIT):
        total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        for part in gl.static_range(SPLIT):
            zero = read_block(part)
            total += sums.index(WHICH * TOTAL_PIECES + i + zero).load(layout)
            read_this_block()
        store_piece(work, out, total.to(work.a_ring.dtype), i, row, column, parity, WHICH, True)
    # A block that ends, or goes on, takes its sums with it: not before all have been read.
    meet_in_cluster()


@gluon.jit
def compute(work, out, partial, step, item, tile, first, last, WHICH: gl.constexpr, TMA_STORE: gl.constexpr):
    """Consumer: its rows of a tile, or of a part of its steps; returns the number of the next step."""
    ROWS: gl.constexpr = work.CONFIG.rows
    COLUMNS: gl.constexpr = work.CONFIG.columns[0]
    MORE: gl.constexpr = work.CONFIG.columns[1]
    TOTAL_PIECES: gl.constexpr = work.CONFIG.block_n // work.CONFIG.piece[1]
    SECOND: gl.constexpr = MORE if MORE > 0 else 8  # without a second part its accumulator is never used
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    layout2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SECOND, 16])
    sums, counters, sums_here = partial
    row, column, parity = work.origin(tile)
    row += WHICH * ROWS
    # Made anew for each tile, so that its registers are free while parts are added up.
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    acc2 = gl.zeros([ROWS, SECOND], gl.float32, layout2)
    acc, acc2, step = add_steps(work, step, first, last, acc, acc2, WHICH)
    part = work.part(item)
    if work.CONFIG.split == 1:
        store_tile(work, out, acc, acc2, row, column, parity, WHICH, TMA_STORE)
    elif work.CONFIG.in_cluster:
        add_in_cluster(work, out, sums_here, acc, acc2, row, column, parity, WHICH)
    elif part < 0:
        store_tile(work, out, acc, acc2, row, column, parity, WHICH, TMA_STORE)
    else:
        part = work.own_part(part)
        if last_part(work.CONFIG, sums, counters, acc, acc2, part, WHICH):
            for i in gl.static_range(TOTAL_PIECES):
                piece = summed_piece(work.CONFIG, sums, part, i, WHICH).to(work.a_ring.dtype)
                store_piece(work, out, piece, i, row, column, parity, WHICH, TMA_STORE)
    return step


@gluon.jit
def consumer(work, out, partial, WHICH: gl.constexpr, TMA_STORE: gl.constexpr):
    """One warpgroup: rows WHICH * ROWS and on of each tile."""
    step = 0
    if work.CONFIG.early:
        wait_for_launch_before()
    join_cluster(work.CONFIG)
    for item in range(work.first_item(), work.items(), work.stride()):
        tile, first, last = work.locate(item)
        step = compute(work, out, partial, step, item, tile, first, last, WHICH, TMA_STORE)
    tma.store_wait(0)  # shared memory must live until TMA has read it


@gluon.jit(do_not_specialize=["M", "N", "K", "whole"])
def gemm_kernel(
    a_desc,
    b_desc,
    b2_desc,
    c_desc,
    c_pointer,
    sums,
    counters,
    M,
    N,
    K,
    whole,
    CONFIG: gl.constexpr,
    A_COLUMN_MAJOR: gl.constexpr,
    B_COLUMN_MAJOR: gl.constexpr,
    TMA_STORE: gl.constexpr,
):
    """Allocate ring and barriers, then start the roles.

    b2_desc is b_desc, and unused, where the tile's columns are a power of two; c_desc is a_desc where TMA cannot store C.

    sums, counters: fp32 (parts, BLOCK_M, BLOCK_N) and int32 zeros (split tiles, consumers), untouched if split is 1.
    """
    STAGES: gl.constexpr = CONFIG.stages
    CONSUMERS: gl.constexpr = CONFIG.consumers
    REGISTERS: gl.constexpr = CONFIG.registers
    READERS: gl.constexpr = CONSUMERS * (CONFIG.cluster if CONFIG.on_clusters and CONFIG.multicast != "" else 1)
    a_ring = ring(a_desc, STAGES * CONSUMERS, CONFIG.rows, CONFIG.block_k, A_COLUMN_MAJOR)
    b_ring, b2_ring = rings_of_b(b_desc, b2_desc, CONFIG, B_COLUMN_MAJOR)
    c_buffers = shared_tiles(c_desc, CONFIG.buffers * CONSUMERS) if TMA_STORE else a_ring
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)  # the producer's `expect`; the bytes are counted apart
        mbarrier.init(empty.index(i), count=READERS)  # all consumers, and those of the other block that it fetches for
    let_cluster_see_barriers(CONFIG)
    work = Work(a_ring, b_ring, b2_ring, full, empty, M, N, K, whole, CONFIG, A_COLUMN_MAJOR, B_COLUMN_MAJOR)
    out = (c_desc, c_pointer, c_buffers)
    sums_here = a_ring
    if CONFIG.in_cluster:
        gl.static_assert(TMA_STORE, "sums of a cluster are stored by TMA only")
        # Four rows of eight columns lie in different banks: a quarter of a warp's sums.
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, CONFIG.piece[1] // 8, [1, 0])
        NUMBER: gl.constexpr = CONSUMERS * CONFIG.block_n // CONFIG.piece[1]
        sums_here = gl.allocate_shared_memory(gl.float32, [NUMBER, CONFIG.rows, CONFIG.piece[1]], swizzled)
    partial = (sums, counters, sums_here)
    # After the roles: warps and registers of all but the first, which has num_warps and the registers that are left. A
    # cluster is joined by all warps, so there the three that would be idle have a role, too.
    if CONSUMERS == 1:
        if CONFIG.on_clusters:
            gl.warp_specialize(
                [
                    (consumer, (work, out, partial, 0, TMA_STORE)),
                    (producer, (work, a_desc, b_desc, b2_desc)),
                    (bystander, (work,)),
                    (bystander, (work,)),
                ],
                [1, 1, 2],
                [24, 24, 24],
            )
        else:
            gl.warp_specialize(
                [(consumer, (work, out, partial, 0, TMA_STORE)), (producer, (work, a_desc, b_desc, b2_desc))], [1], [24]
            )
    elif CONSUMERS == 2:
        if CONFIG.on_clusters:
            gl.warp_specialize(
                [
                    (consumer, (work, out, partial, 0, TMA_STORE)),
                    (consumer, (work, out, partial, 1, TMA_STORE)),
                    (producer, (work, a_desc, b_desc, b2_desc)),
                    (bystander, (work,)),
                    (bystander, (work,)),
                ],
                [4, 1, 1, 2],
                [REGISTERS, 24, 24, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (consumer, (work, out, partial, 0, TMA_STORE)),
                    (consumer, (work, out, partial, 1, TMA_STORE)),
                    (producer, (work, a_desc, b_desc, b2_desc)),
                ],
                [4, 1],
                [REGISTERS, 24],
            )
    else:
        gl.static_assert(CONSUMERS == 3)
        if CONFIG.on_clusters:
            gl.warp_specialize(
                [
                    (consumer, (work, out, partial, 0, TMA_STORE)),
                    (consumer, (work, out, partial, 1, TMA_STORE)),
                    (consumer, (work, out, partial, 2, TMA_STORE)),
                    (producer, (work, a_desc, b_desc, b2_desc)),
                    (bystander, (work,)),
                    (bystander, (work,)),
                ],
                [4, 4, 1, 1, 2],
                [REGISTERS, REGISTERS, 32, 32, 32],
            )
        else:
            gl.warp_specialize(
                [
                    (consumer, (work, out, partial, 0, TMA_STORE)),
                    (consumer, (work, out, partial, 1, TMA_STORE)),
                    (consumer, (work, out, partial, 2, TMA_STORE)),
                    (producer, (work, a_desc, b_desc, b2_desc)),
                ],
                [4, 4, 1],
                [REGISTERS, REGISTERS, 32],
            )
