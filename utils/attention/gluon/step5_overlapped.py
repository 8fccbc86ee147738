"""Step 5, the fastest: products overlapped with softmax, a persistent grid. FlashAttention forward for Hopper.

One block stays on each SM and walks over tiles of query rows. Its producer warp loads Q, K and V by TMA, running
ahead as far as the rings of shared memory allow, into the next tile too. One to four consumer warpgroups own 64 rows
each. A consumer hands Q K(i) to the tensor cores and P V(i-1) behind it, waits for the scores only, and computes their
softmax while P V(i-1) is still running; scores, probabilities and output never leave its registers. Keys are walked
from the last block to the first, so the masked blocks of a causal tile come first.

    part          what                                         head dim 64      128              256
    consumers     warpgroups x 64 query rows                   3                2                2
    Q             tiles of the block's rows                    2                2                1
    K, V tile     BLOCK_N keys, slots of the K and V rings     128, 4 and 4     128, 2 and 3     64, 2 and 3
    registers     a consumer thread, a producer thread         160, 32          240, 24          240, 24
    shared        Q + K ring + V ring                          48+64+64         64+64+96         64+64+96 KiB

With two tiles of Q the producer goes on into the next tile while this one is computed. A last round of few tiles of full
attention is shared by all programs, 64 rows each (`plan.whole_tiles`). The other plans are in `plan.py`.

Where to find what: a block of keys in `blocks.py`, its softmax in `softmax.py`, rings and masks in `pipeline.py`, what is loaded and stored in `transfers.py`,
and which program has which tile in `plan.py`. Only blocks that straddle the diagonal, the window's edge or the
last key are masked. Causal tiles begin where the diagonal lies in a tile's first block alone, and so does the last key: without
a window, the loop has no mask in it. Measured beside cuDNN and FlashAttention 3 and 4: docs/kernels/attention.md.
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
    """Release blocks of keys that this consumer's rows do not see; return the number of the next block.

    Not before they are full: until then the other consumers may still owe the barrier their arrival for the slot's last use.
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
    """Warpgroup W: rows W * 64 and on of each tile, key blocks from the last to the first."""
    out, lse_ptr = results
    PLAN: gl.constexpr = work.PLAN
    WINDOW: gl.constexpr = work.WINDOW
    BLOCK_N: gl.constexpr = PLAN.block_n
    BLOCK_D: gl.constexpr = PLAN.block_d
    BLOCK_M: gl.constexpr = work.q.tiles.shape[3]
    Q_SLOTS: gl.constexpr = work.q.SLOTS

    count, t, rest = work.todo.first()
    PARTS: gl.constexpr = work.todo.PARTS
    own = count  # tiles that this consumer computes rows of
    if W > 0 and PARTS > 1:
        own = count - work.todo.is_part(t + (count - 1) * gl.num_programs(0)).to(gl.int32)
    it = 0
    for i in range(own):
        t_next = work.todo.start_next(t, rest, i)
        flat, first_row, stop, lo, hi, base = work.place(t)
        row = first_row + W * BLOCK_M
        if work.CASE.mask != "":
            # The tile's last blocks may lie behind the last key of this consumer's rows; rows that do not exist need none.
            own_hi = gl.where(row < stop, work.visible_blocks(row, BLOCK_M, stop, base)[1], lo + 1)
            it = skip_blocks(work, it, hi - own_hi)
            hi = own_hi
        n = hi - lo
        right, edge = work.clean_blocks(row, BLOCK_M, lo, hi, stop, base)

        work.q.wait_full(i, W)  # the first product reads Q; the producer loads it in the order of need
        q, left = work.q.tile(i, W), None
        if BLOCK_D == 128 or (BLOCK_D == 64 and PLAN.consumers < 3):
            # 64 columns of Q stay in registers: shared memory is as busy as the tensor cores.
            left = q.slice(0, 64, 1).load(left_operand(BLOCK_N))
        block = Block(it, row, base + (hi - 1) * BLOCK_N)
        p, state = first_block(work, block, (q, left))
        if Q_SLOTS == 2:  # noqa: SIM102 (decided by the compiler; the next line for each tile)
            if i > 0:
                # The last tile's output leaves through its Q's slot: the next Q may not come before it has left.
                tma.store_wait(0)
                work.q.release(i + 1, W)
        o = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, accumulator(BLOCK_D))
        it += 1
        work.k.wait_full(it, pred=n > 1)  # each step waits for the next one's keys; this is the first one's
        for j in range(1, n):
            block = Block(it, row, base + (hi - 1 - j) * BLOCK_N)
            # Causal and packed tiles begin where the diagonal of their rows lies in the block that was first (`first_row`).
            masked = WINDOW and ((j < right) | (j >= edge))
            o, p, state = step(work, block, (q, left), o, p, state, j + 1 < n, masked)
            it += 1

        pv = start_output(work, it, o, p, state)
        inverse = normalizers(state, work.c, row)[0]
        store_lse(work, lse_ptr, state, flat, row, stop)
        # The output's registers are read next, and V's slot is released.
        o = wait_products(pv, 0, BLOCK_D)
        o = o * spread(inverse, o)
        work.v.release(it - 1)
        store_tile(work, out, flat, row, work.q.tiles.index(work.q.slot(i, W)), o, stop)
        if Q_SLOTS == 1:
            tma.store_wait(0)  # Q's slot holds the output: the next Q may not come before that has left
            work.q.release(i, W)
        t = work.todo.finish_next(t_next)
    if W > 0 and PARTS > 1:
        skip_blocks(work, it, (count - own) * gl.cdiv(work.sk, BLOCK_N))
    tma.store_wait(0)  # shared memory must live until TMA has read it


# One kernel for all sizes: without this, each multiple of 16 and each 1 would be compiled for itself.
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
    # Registers of a thread: 65536 on a multiprocessor, of which a consumer leaves the producer's warpgroup 24 or 32.
    REGISTERS: gl.constexpr = 240 if CONSUMERS < 3 else 160 if CONSUMERS == 3 else 112
    PACKED: gl.constexpr = CASE.mask == "packed" or CASE.mask == "packed window"
    WINDOW: gl.constexpr = CASE.mask == "window" or CASE.mask == "packed window"
    # With two tiles of Q, the next one is loaded while a tile is computed; two of 128 x 256 do not fit.
    q = allocate_ring(q_desc, 1 if CONSUMERS * PLAN.block_d == 512 else 2, CONSUMERS, 1, READY=1)
    k = allocate_ring(k_desc, PLAN.stages, 1, CONSUMERS, READY=1)
    # V's slots are released half a block later than K's: with two of K, V has a third.
    v = allocate_ring(v_desc, 3 if PLAN.stages == 2 else PLAN.stages, 1, CONSUMERS, READY=1)
    PARTS: gl.constexpr = CONSUMERS if CASE.mask == "" else 1
    todo = Tiles(schedule, schedule_stride, tiles_m, numbers, whole, row_bits, CASE.dealt, PARTS)
    work = Work(sq, sk, back, ahead, offset, heads, group, lse_wanted, c, q, k, v, todo, PLAN, CASE, PACKED, WINDOW)
    # A barrier takes 35 cycles to make. Those of the first loads are made; the others are while these loads are on their way.
    fence_async_shared()  # TMA completes a barrier through the async proxy, and may otherwise find it as it was before
    t = todo.first()[1]
    load_block(work, (q_desc, k_desc, v_desc), t, work.place(t), 0, 0, 0, True)
    for ring in gl.static_range(3):
        (q, k, v)[ring].make_barriers(1, (q, k, v)[ring].SLOTS)
    results = ((o_desc, out_ptr, eighths), lse_ptr)
    # Each role gets its arguments; then warps and registers of all roles but the first, which has four warps and the
    # registers that are left. With fewer consumers than four the last roles fall away.
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
    """The schedule of a head's tiles on the GPU, a row for each program, and the length of a row."""
    dealt = deal_tiles(blocks, heads_total, group, head_bytes, programs)
    # A row: how many tiles, the tiles, and one more, because a program reads ahead.
    stride = max(map(len, dealt)) + 2
    table = [[len(tiles), *tiles, *[0] * (stride - 1 - len(tiles))] for tiles in dealt]
    return tensor_on(device, table), stride


_graph_schedules: dict[int, torch.Tensor] = {}  # schedules that CUDA graphs read, by address


def make_launcher(handle: Callable, schedule: torch.Tensor | None) -> Callable:
    """Return a launch that was made, to be repeated on (q, k, v, out, lse) like its own.

    A graph is replayed with the addresses that it was captured with. It keeps nothing alive that was there before, and
    `tile_schedule` drops what is old: the programs would then read which tiles are theirs from another tensor's memory.
    """

    def again(q, k, v, out, lse) -> None:
        if schedule is not None and torch.cuda.is_current_stream_capturing():
            _graph_schedules[schedule.data_ptr()] = schedule
        handle(q, k, v, out, out, lse)

    return again


def launch(a: Arguments) -> Callable | None:
    """Run the kernel on tensors of a GPU: a program on each multiprocessor, or one for each tile if those are fewer.

    Returns:
        The launch, to be repeated on (q, k, v, out, lse) like these; None in a process that only simulates kernels.
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
    schedule, stride, row_bits = None, 0, (len(blocks) - 1).bit_length()  # row_bits: of the numbers of `deal_tiles`
    if tiles > programs and len(set(blocks)) > 1:  # causal, or a window
        work = blocks, a.heads_total, a.group, a.sk * plan.block_d * 4
        schedule, stride = tile_schedule(*work, programs, a.q.device)
    case = Case(mask, schedule is not None, offset > 0 or len(a.lengths) > 1)
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
