"""FP8 GEMM for Hopper in Gluon: C = (A scale_a) @ (B scale_b), e4m3 operands, bf16 or fp16 C. A rung beside the last one.

The roles, the ring and the walk over tiles are those of `gemm_gluon.py`: read that first. A slot still holds 128 bytes
of each row, which are 128 terms of the sums now, and the tensor cores multiply them in the time of 64 terms of 16 bits.
So a step takes as long as there and reads as many bytes, a product has half as many steps, and the end of a tile weighs
twice as much. Three things are new:

**Both operands lie along K.** wgmma transposes 16-bit tiles on its way, not 8-bit ones. A is row-major and B
column-major, as in `torch._scaled_mm`.

**Scales.** One number for each operand, or one for each row of A and each column of B. They are factors of whole rows
and columns of C, so the sums are multiplied by them once, in registers, before they are rounded. A consumer asks for
the scales of a tile before its products start, and a thread holds one or two of the rows and of each piece's columns;
after the products they go through shared memory to the threads that need them.

**Two ways to add.** The tensor core of Hopper adds products of FP8 with fewer bits than fp32 has: about 14, as
DeepSeek-V3's report says (arXiv 2412.19437). Each wgmma cuts bits off the sum again, so the error grows with K
(docs/gemm-log.md, entry 18).

    fast       all of K is added in the tensor core, as wgmma does it        torch._scaled_mm(use_fast_accum=True)
    promoted   each step of 128 terms starts from zero; its sums are         use_fast_accum=False
               added to fp32 registers by ordinary instructions

A promoted step needs registers for its own sums beside the total. Products of 128 columns take 64 registers, so
128 x 256 is computed as two halves, one after the other: 128 + 64 registers. While a consumer waits and adds, the tensor
cores work for the other one:

    consumer 0   | wgmma left | add | wgmma right | add | wgmma left | ...
    consumer 1         | wgmma left | add | wgmma right | add | ...

    part           fast, 128 x 256                         promoted, 128 x 256
    ring           4 x (16 KiB + 32 KiB)                   the same; B in two boxes of 128 columns
    wgmma          m64n256k32, four a step                 m64n128k32, twice four a step, each four from zero
    accumulator    128 registers a thread                  128, and 64 for the sums of a step
    against torch  1.01 at 4096 cubed, 0.99 at 8192        1.03 and 0.97

H200, one scale for a matrix, time of `torch._scaled_mm` / time of the kernel; 20 random shapes and two squares read 1.03
(fast) and 1.07 (promoted) in the geometric mean, with scales by row 1.16 and 1.28 (entry 31).

Importing this module imports Triton; the way in is `utils.kernels.gemm_fp8.gemm_fp8`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from utils.kernels.early_launch import wait_for_launch_before
from utils.kernels.gemm_gluon import add_steps, column_pieces, store_piece
from utils.kernels.gemm_parts import last_part, shared_tiles, summed_piece
from utils.kernels.gemm_ptx import join_cluster, let_cluster_see_barriers
from utils.kernels.gemm_work import Work, bystander, producer, ring, rings_of_b
from utils.machine import versions

versions.adopt_newest_gluon_names()


@gluon.jit
def load_scales(work, scales, row, column, parity, BY_ROW: gl.constexpr):
    """Load a tile's scales: a vector for a consumer's rows and one for each piece's columns, or their product alone.

    Rows and columns outside of C get zeros, and are not stored.
    """
    scale_a, scale_b = scales
    if BY_ROW:
        # A thread holds one or two numbers of a vector here, not all that its sums need: so they can wait in registers.
        spread: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        COLUMNS: gl.constexpr = work.CONFIG.piece[1]
        m = row + gl.arange(0, work.CONFIG.rows, spread)
        m = 2 * m + parity if work.CONFIG.pairs else m
        of_rows = gl.load(scale_a + m, mask=m < work.M, other=0.0)
        of_columns = ()
        for i in gl.static_range(work.CONFIG.block_n // COLUMNS):
            n = column + i * COLUMNS + gl.arange(0, COLUMNS, spread)
            of_columns += (gl.load(scale_b + n, mask=n < work.N, other=0.0),)  # type: ignore[assignment]
        return of_rows, of_columns
    else:
        return gl.load(scale_a) * gl.load(scale_b), ()


@gluon.jit
def scaled(piece, of, i, BY_ROW: gl.constexpr):
    """Multiply column block i of a tile by the scales of its rows and columns."""
    of_rows, of_columns = of
    if BY_ROW:
        layout: gl.constexpr = piece.type.layout
        rows = gl.convert_layout(of_rows, gl.SliceLayout(1, layout))
        columns = gl.convert_layout(of_columns[i], gl.SliceLayout(0, layout))
        return piece * rows[:, None] * columns[None, :]
    else:
        return piece * of_rows


@gluon.jit
def store_scaled(work, out, acc, acc2, of, place, BY_ROW: gl.constexpr, WHICH: gl.constexpr, TMA_STORE: gl.constexpr):
    """Scale a consumer's rows of a tile, round them and store them, piece by piece."""
    row, column, parity = place
    dtype: gl.constexpr = out[1].dtype.element_ty
    PIECES: gl.constexpr = work.CONFIG.pieces
    pieces = column_pieces(acc, PIECES)
    if work.CONFIG.columns[1] > 0:
        pieces = pieces + column_pieces(acc2, work.CONFIG.columns[1] // work.CONFIG.piece[1])
    for i in gl.static_range(len(pieces)):
        piece = scaled(pieces[i], of, i, BY_ROW).to(dtype)
        store_piece(work, out, piece, i, row, column, parity, WHICH, TMA_STORE)


@gluon.jit
def promoted_sums(work, step, first, last, acc, acc2, WHICH: gl.constexpr):
    """Add the steps first to last, each of 128 terms, in fp32 registers; return the sums and the number of the next step."""
    for _ in range(first, last):
        a, b, b2 = work.operands(step, WHICH)
        # The operand of zeros is never read: the first of the four wgmma starts a sum of its own.
        sums = warpgroup_mma(a, b, gl.zeros_like(acc), use_acc=False, is_async=True)
        if work.CONFIG.columns[1] > 0:
            if work.CONFIG.both_halves:
                sums2 = warpgroup_mma(a, b2, gl.zeros_like(acc2), use_acc=False, is_async=True)
                acc += warpgroup_mma_wait(1, deps=[sums])
            else:
                acc += warpgroup_mma_wait(0, deps=[sums])
                sums2 = warpgroup_mma(a, b2, gl.zeros_like(acc2), use_acc=False, is_async=True)
            sums2 = warpgroup_mma_wait(0, deps=[sums2])
            work.release_before(step + 1)  # the slot of this step has been read
            acc2 += sums2
        else:
            sums = warpgroup_mma_wait(0, deps=[sums])
            work.release_before(step + 1)
            acc += sums
        step += 1
    return acc, acc2, step


@gluon.jit
def consumer(work, out, partial, scales, BY_ROW: gl.constexpr, WHICH: gl.constexpr, TMA_STORE: gl.constexpr):
    """One warpgroup: rows WHICH * ROWS and on of each tile."""
    ROWS: gl.constexpr = work.CONFIG.rows
    COLUMNS: gl.constexpr = work.CONFIG.columns[0]
    MORE: gl.constexpr = work.CONFIG.columns[1]
    TOTAL_PIECES: gl.constexpr = work.CONFIG.block_n // work.CONFIG.piece[1]
    SECOND: gl.constexpr = MORE if MORE > 0 else 8  # without a second part its accumulator is never used
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    layout2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SECOND, 32])
    sums, counters = partial
    step = 0
    if work.CONFIG.early:
        wait_for_launch_before()
    join_cluster(work.CONFIG)
    for item in range(work.first_item(), work.items(), work.stride()):
        tile, first, last = work.locate(item)
        row, column, parity = work.origin(tile)
        row += WHICH * ROWS
        of = load_scales(work, scales, row, column, parity, BY_ROW)
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        acc2 = gl.zeros([ROWS, SECOND], gl.float32, layout2)
        if work.CONFIG.promote:
            acc, acc2, step = promoted_sums(work, step, first, last, acc, acc2, WHICH)
        else:
            acc, acc2, step = add_steps(work, step, first, last, acc, acc2, WHICH)

        if work.CONFIG.split == 1:
            store_scaled(work, out, acc, acc2, of, (row, column, parity), BY_ROW, WHICH, TMA_STORE)
        else:
            part = work.part(item)
            if part < 0:
                store_scaled(work, out, acc, acc2, of, (row, column, parity), BY_ROW, WHICH, TMA_STORE)
            else:
                part = work.own_part(part)
                if last_part(work.CONFIG, sums, counters, acc, acc2, part, WHICH):
                    for i in gl.static_range(TOTAL_PIECES):
                        piece = scaled(summed_piece(work.CONFIG, sums, part, i, WHICH), of, i, BY_ROW)
                        store_piece(
                            work, out, piece.to(out[1].dtype.element_ty), i, row, column, parity, WHICH, TMA_STORE
                        )
    tma.store_wait(0)  # shared memory must live until TMA has read it


@gluon.jit(do_not_specialize=["M", "N", "K", "whole"], do_not_specialize_on_alignment=["scale_a", "scale_b"])
def gemm_fp8_kernel(
    a_desc,
    b_desc,
    b2_desc,
    c_desc,
    c_pointer,
    sums,
    counters,
    scale_a,
    scale_b,
    M,
    N,
    K,
    whole,
    CONFIG: gl.constexpr,
    BY_ROW: gl.constexpr,
    TMA_STORE: gl.constexpr,
):
    """Allocate ring and barriers, then start the roles; see `gemm_gluon.gemm_kernel` for what is not said here.

    scale_a, scale_b: fp32, one number each; with BY_ROW (M,) and (N,).
    """
    STAGES: gl.constexpr = CONFIG.stages
    CONSUMERS: gl.constexpr = CONFIG.consumers
    REGISTERS: gl.constexpr = CONFIG.registers
    READERS: gl.constexpr = CONSUMERS * (2 if CONFIG.on_clusters else 1)
    a_ring = ring(a_desc, STAGES * CONSUMERS, CONFIG.rows, CONFIG.block_k, False)
    b_ring, b2_ring = rings_of_b(b_desc, b2_desc, CONFIG, True)
    c_buffers = shared_tiles(c_desc, CONFIG.buffers * CONSUMERS) if TMA_STORE else a_ring
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    let_cluster_see_barriers(CONFIG)
    work = Work(a_ring, b_ring, b2_ring, full, empty, M, N, K, whole, CONFIG, False, True)
    out = (c_desc, c_pointer, c_buffers)
    partial = (sums, counters)
    scales = (scale_a, scale_b)
    if CONSUMERS == 1:
        if CONFIG.on_clusters:
            gl.warp_specialize(
                [
                    (consumer, (work, out, partial, scales, BY_ROW, 0, TMA_STORE)),
                    (producer, (work, a_desc, b_desc, b2_desc)),
                    (bystander, (work,)),
                    (bystander, (work,)),
                ],
                [1, 1, 2],
                [24, 24, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (consumer, (work, out, partial, scales, BY_ROW, 0, TMA_STORE)),
                    (producer, (work, a_desc, b_desc, b2_desc)),
                ],
                [1],
                [24],
            )
    elif CONSUMERS == 2:
        if CONFIG.on_clusters:
            gl.warp_specialize(
                [
                    (consumer, (work, out, partial, scales, BY_ROW, 0, TMA_STORE)),
                    (consumer, (work, out, partial, scales, BY_ROW, 1, TMA_STORE)),
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
                    (consumer, (work, out, partial, scales, BY_ROW, 0, TMA_STORE)),
                    (consumer, (work, out, partial, scales, BY_ROW, 1, TMA_STORE)),
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
                    (consumer, (work, out, partial, scales, BY_ROW, 0, TMA_STORE)),
                    (consumer, (work, out, partial, scales, BY_ROW, 1, TMA_STORE)),
                    (consumer, (work, out, partial, scales, BY_ROW, 2, TMA_STORE)),
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
                    (consumer, (work, out, partial, scales, BY_ROW, 0, TMA_STORE)),
                    (consumer, (work, out, partial, scales, BY_ROW, 1, TMA_STORE)),
                    (consumer, (work, out, partial, scales, BY_ROW, 2, TMA_STORE)),
                    (producer, (work, a_desc, b_desc, b2_desc)),
                ],
                [4, 4, 1],
                [REGISTERS, REGISTERS, 32],
            )
