"""Step 5, the fastest: FlashAttention's forward for Hopper, with products beside the softmax and a persistent grid.

One block stays on each SM and walks over tiles of query rows. Its producer warp loads Q, K and V by TMA, as far ahead
as the rings in shared memory allow. One to four consumer warpgroups own 64 rows each. A consumer starts Q K(i) and
P V(i-1), waits only for the scores, and computes their softmax while P V(i-1) still runs. Scores, probabilities and
output stay in registers. Blocks of keys are computed from the last to the first: masked blocks come first.

    part          what                                         head dim 64      128              256
    consumers     warpgroups x 64 query rows                   3                2                2
    Q             tiles of the block's rows                    2                2                1
    K, V tile     BLOCK_N keys, slots of the K and V rings     128, 4 and 4     128, 2 and 3     64, 2 and 3
    registers     a consumer thread, a producer thread         160, 32          240, 24          240, 24
    shared        Q + K ring + V ring                          48+64+64         64+64+96         64+64+96 KiB

On an H200: 1.015 to 1.053 times as fast as the best of cuDNN, FlashAttention 3 and 4 (docs/kernels/attention.md).

With two tiles of Q, the producer loads the next tile while the consumers compute this tile. If full attention leaves
few tiles for the last round, all programs share these tiles, 64 rows each (`plan.whole_tiles`). Only blocks that
contain the diagonal, the window's edge or the last key are masked. Causal tiles begin where only a tile's first block
contains the diagonal and the last key. So without a window the loop has no mask.

`blocks.py` computes a block of keys, and `softmax.py` its softmax. `pipeline.py` has rings and masks, `transfers.py`
loads and stores, `plan.py` the other plans and the order of the tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from utils.attention.gluon.arguments import Arguments, placeholder
from utils.attention.gluon.blocks import first_block, start_output, step
from utils.attention.gluon.intervals import packed_queries
from utils.attention.gluon.pipeline import Block, Tiles, Work, allocate_ring
from utils.attention.gluon.plan import Case, deal_tiles, row_offset, tile_blocks, whole_tiles
from utils.attention.gluon.shared import accumulator, left_operand, wait_products
from utils.attention.gluon.softmax import normalizers, spread
from utils.attention.gluon.transfers import load_block, producer, store_lse, store_tile
from utils.kernels.assembling import narrow_kernel
from utils.kernels.capture import tensor_on
from utils.kernels.handle import Handle


@gluon.jit
def skip_blocks(work, it, count):
    """Release blocks of keys that this consumer's rows do not see, and return the number of the next block.

    Without the waits, this arrival could count for the slot's previous load, which other consumers may not have released yet.
    """
    for _skipped in range(count):
        work.k.wait_full(it)
        work.k.release(it)
        work.v.wait_full(it)
        work.v.release(it)
        it += 1
    return it


@gluon.jit
def consumer(work, results, W: gl.constexpr):
    """Compute the rows from W * 64 on of each tile, with warpgroup W and with the blocks of keys from the last to the first."""
    out, lse_ptr = results
    PLAN: gl.constexpr = work.PLAN
    WINDOW: gl.constexpr = work.WINDOW
    BLOCK_N: gl.constexpr = PLAN.block_n
    BLOCK_D: gl.constexpr = PLAN.block_d
    BLOCK_M: gl.constexpr = work.q.tiles.shape[3]
    Q_SLOTS: gl.constexpr = work.q.SLOTS

    count, t, rest = work.todo.first()
    PARTS: gl.constexpr = work.todo.PARTS
    tiles = count  # for this consumer; the program's last tile may be a part, which only the first consumer computes
    if W > 0 and PARTS > 1:
        tiles = count - work.todo.is_part(t + (count - 1) * gl.num_programs(0)).to(gl.int32)
    it = 0
    for i in range(tiles):
        t_next = work.todo.start_next(t, rest, i)
        flat, first_row, stop, lo, hi, base = work.place(t)
        row = first_row + W * BLOCK_M
        if work.CASE.mask != "":
            # This consumer's rows may not see the tile's last blocks. Rows behind `stop` do not exist and compute one block.
            visible_hi = gl.where(row < stop, work.visible_blocks(row, BLOCK_M, stop, base)[1], lo + 1)
            it = skip_blocks(work, it, hi - visible_hi)
            hi = visible_hi
        n = hi - lo
        right, edge = work.clean_blocks(row, BLOCK_M, lo, hi, stop, base)

        work.q.wait_full(i, W)  # without it the first product would read the previous Q
        q, left = work.q.tile(i, W), None
        if BLOCK_D == 128 or (BLOCK_D == 64 and PLAN.consumers < 3):
            # 64 columns of Q stay in registers, because shared memory is as busy as the tensor cores.
            left = q.slice(0, 64, 1).load(left_operand(BLOCK_N))
        block = Block(it, row, base + (hi - 1) * BLOCK_N)
        p, state = first_block(work, block, (q, left))
        if Q_SLOTS == 2:  # noqa: SIM102 (the compiler decides this condition, and the program the next one for each tile)
            if i > 0:
                # The previous tile's output leaves through the slot of its Q. Without the wait the next Q would overwrite it.
                tma.store_wait(0)
                work.q.release(i + 1, W)
        o = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, accumulator(BLOCK_D))
        it += 1
        work.k.wait_full(it, pred=n > 1)  # without it the first step would read old keys
        for j in range(1, n):
            block = Block(it, row, base + (hi - 1 - j) * BLOCK_N)
            # Each step waits for the keys of the next step. Without a window only a tile's first block needs a mask.
            masked = WINDOW and ((j < right) | (j >= edge))
            o, p, state = step(work, block, (q, left), o, p, state, j + 1 < n, masked)
            it += 1

        pv = start_output(work, it, o, p, state)
        inverse = normalizers(state, work.c, row)[0]
        store_lse(work, lse_ptr, state, flat, row, stop)
        # Without the wait, the next lines would read unfinished output, and release V while the product still reads it.
        o = wait_products(pv, 0, BLOCK_D)
        o = o * spread(inverse, o)
        work.v.release(it - 1)
        store_tile(work, out, flat, row, work.q.tiles.index(work.q.slot(i, W)), o, stop)
        if Q_SLOTS == 1:
            tma.store_wait(0)  # Q's slot holds the output: without the wait the next Q would overwrite it
            work.q.release(i, W)
        t = work.todo.finish_next(t_next)
    if W > 0 and PARTS > 1:
        skip_blocks(work, it, (count - tiles) * gl.cdiv(work.sk, BLOCK_N))
    tma.store_wait(0)  # without it another block could get this shared memory before TMA has read it


# One kernel serves all sizes. Otherwise Triton would compile again for sizes that are 1 or multiples of 16.
SIZES = ["sq", "sk", "back", "ahead", "tiles_m", "numbers", "heads", "group"]
SIZES += ["whole", "row_bits", "schedule_stride", "offset", "eighths", "lse_wanted"]


@gluon.jit(do_not_specialize=SIZES)
def attention_step5(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    out_ptr,
    lse_ptr,
    schedule,
    sq,
    sk,
    back,
    ahead,
    tiles_m,
    numbers,
    heads,
    group,
    whole,
    row_bits,
    schedule_stride,
    offset,
    eighths,
    lse_wanted,
    c,
    PLAN: gl.constexpr,
    CASE: gl.constexpr,
):
    """Allocate rings and barriers, then start the roles: a producer warp and PLAN.consumers consumer warpgroups."""
    CONSUMERS: gl.constexpr = PLAN.consumers
    # Registers of a consumer's thread. Of a multiprocessor's 65536 registers, they leave 24 or 32 for a thread of the producer.
    REGISTERS: gl.constexpr = 240 if CONSUMERS < 3 else 160 if CONSUMERS == 3 else 112
    PACKED: gl.constexpr = CASE.mask == "packed" or CASE.mask == "packed window"
    WINDOW: gl.constexpr = CASE.mask == "window" or CASE.mask == "packed window"
    # With two slots, the next Q is loaded while a tile is computed. Two tiles of 128 x 256 do not fit into shared memory.
    q = allocate_ring(q_desc, 1 if CONSUMERS * PLAN.block_d == 512 else 2, CONSUMERS, 1, READY=1)
    k = allocate_ring(k_desc, PLAN.stages, 1, CONSUMERS, READY=1)
    # Consumers release V's slots half a block later than K's slots. So V has three slots where K has two.
    v = allocate_ring(v_desc, 3 if PLAN.stages == 2 else PLAN.stages, 1, CONSUMERS, READY=1)
    PARTS: gl.constexpr = CONSUMERS if CASE.mask == "" else 1
    todo = Tiles(schedule, schedule_stride, tiles_m, numbers, whole, row_bits, CASE.dealt, PARTS)
    work = Work(sq, sk, back, ahead, offset, heads, group, lse_wanted, c, q, k, v, todo, PLAN, CASE, PACKED, WINDOW)
    # The barriers of the first loads exist now. The other barriers are made while these loads run: each takes 35 cycles.
    fence_async_shared()  # TMA completes a barrier through the async proxy: without the fence it may find old data there
    t = todo.first()[1]
    load_block(work, (q_desc, k_desc, v_desc), t, work.place(t), 0, 0, 0, True)
    for ring in gl.static_range(3):
        (q, k, v)[ring].make_barriers(1, (q, k, v)[ring].SLOTS)
    results = ((o_desc, out_ptr, eighths), lse_ptr)
    # The lists: the roles with their arguments, then warps and registers of all roles but the first. The first role has
    # four warps and the registers that the other roles leave. With fewer consumers the last roles do not exist.
    gl.warp_specialize(
        [
            (consumer, (work, results, 0)),
            (producer, (work, (q_desc, k_desc, v_desc))),
            (consumer, (work, results, 1)),
            (consumer, (work, results, 2)),
            (consumer, (work, results, 3)),
        ][: CONSUMERS + 1],
        [1, 4, 4, 4][:CONSUMERS],
        [32 if CONSUMERS == 3 else 24, REGISTERS, REGISTERS, REGISTERS][:CONSUMERS],
    )


@functools.lru_cache(maxsize=64)
def tile_schedule(
    blocks: tuple[int, ...], heads_total: int, group: int, head_bytes: int, programs: int, device: torch.device
) -> tuple[torch.Tensor, int]:
    """Return the schedule of the tiles on the GPU, with a row for each program, and the length of a row."""
    dealt = deal_tiles(blocks, heads_total, group, head_bytes, programs)
    # A row has the number of tiles, the tiles, and one further entry, because a program reads one entry ahead.
    stride = max(map(len, dealt)) + 2
    table = [[len(tiles), *tiles, *[0] * (stride - 1 - len(tiles))] for tiles in dealt]
    return tensor_on(device, table), stride


_graph_schedules: dict[int, torch.Tensor] = {}  # {address: schedule that a CUDA graph reads}


def make_launcher(handle: Callable, schedule: torch.Tensor | None) -> Callable:
    """Return a function that launches the kernel again, on (q, k, v, out, lse) with the layouts of the first launch.

    A CUDA graph reads the schedule at the address of its capture, and does not keep the schedule alive. `tile_schedule`
    forgets old schedules. So this module keeps the schedules of graphs; otherwise the programs would read their tiles
    from freed memory.
    """

    def launch_again(q, k, v, out, lse) -> None:
        if schedule is not None and torch.cuda.is_current_stream_capturing():
            _graph_schedules[schedule.data_ptr()] = schedule
        handle(q, k, v, out, out, lse)

    return launch_again


def launch(a: Arguments) -> Callable | None:
    """Run the kernel on tensors of a GPU, with a program on each multiprocessor, or with fewer if there are fewer tiles.

    Returns:
        A function that launches the kernel again on (q, k, v, out, lse) of the same layouts; None where kernels are only simulated.
    """
    plan, causal, window = a.plan, a.causal, a.window
    if a.lengths:
        back, blocks = packed_queries(a.lengths, causal, window, plan.rows, plan.block_n, a.q.device)
        ahead, mask = 0, "packed window" if window else "packed"
    else:
        blocks = tuple(tile_blocks(plan, a.sq, a.sk, causal, window))
        back, ahead = max(window - 1, 0), 0 if causal else max(window - 1, 0)
        mask = "window" if window else "causal" if causal else ""
    offset = row_offset(mask == "causal", a.sk - a.sq)
    tiles = len(blocks) * a.heads_total
    whole = tiles if mask else whole_tiles(tiles, plan.consumers, a.programs)
    numbers = whole + (tiles - whole) * plan.consumers
    programs = min(a.programs, numbers)
    schedule, stride, row_bits = None, 0, (len(blocks) - 1).bit_length()  # row_bits as in `deal_tiles`
    if tiles > programs and len(set(blocks)) > 1:  # causal, or a window
        work = blocks, a.heads_total, a.group, a.sk * plan.block_d * 4
        schedule, stride = tile_schedule(*work, programs, a.q.device)
    case = Case(mask, dealt=schedule is not None, overhang=offset > 0 or len(a.lengths) > 1)
    tensors = (*a.descriptors(), a.out, a.lse)
    table = schedule if schedule is not None else placeholder(a.q.device, torch.int32)
    tiling = len(blocks), numbers, a.heads, a.group, whole, row_bits, stride, offset
    sizes = a.sq, a.sk, back, ahead, *tiling, a.head_dim // 8, int(a.return_lse), a.c
    options = {"PLAN": plan, "CASE": case, "num_warps": 4}
    if not a.q.is_cuda:
        return attention_step5[(programs,)](*tensors, table, *sizes, **options)
    compiled = attention_step5.warmup(*tensors, table, *sizes, grid=(programs,), **options)
    if compiled is None:
        return None
    compiled = narrow_kernel(compiled, plan.depth)
    handle = Handle(compiled, (programs,), tensors, (table, *sizes, plan, case), a.q.device.index)
    launch_again = make_launcher(handle, schedule)
    launch_again(a.q, a.k, a.v, a.out, a.lse)
    return launch_again
