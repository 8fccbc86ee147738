"""Warp-specialized GEMM for Hopper in Gluon: C = A @ B, fp16 or bf16, fp32 accumulation. The ladder's last rung.

One block stays on each SM and walks over tiles of C (persistent). Its warps have three roles. One warp, the producer,
does nothing but start TMA copies of the next tiles of A and B into a ring in shared memory. Two warpgroups, the
consumers, each multiply half of the rows of the tile with wgmma; they read the ring and keep their sums in registers.
Each slot of the ring has two mbarriers: "full" is completed by the TMA unit when the bytes have arrived, "empty" by
the consumers when both have read the slot. So nobody waits for a copy that could have been started earlier:

    producer     | A0 B0 | A1 B1 | A2 B2 | A3 B3 | . wait empty . | A4 B4 | ...       runs on into the next tile
    consumer 0   . wait full .   | wgmma 0 | wgmma 1 | wgmma 2 |  ...  | store C |    its own pace: while one stores,
    consumer 1   . wait full .   | wgmma 0 | wgmma 1 | wgmma 2 |  ...  | store C |    the other may still multiply

    part             what                                     size, first configuration (128 x 256 x 64)
    tile of C        BLOCK_M x BLOCK_N, half the rows each    128 x 256; wgmma m64n256k16, four for each slot
    ring             slots of A and B, 128 B swizzle          4 x (16 KiB + 32 KiB) = 192 KiB
    accumulator      fp32 in registers                        64 x 256 a consumer: 128 registers a thread
    registers        moved between warpgroups (setmaxnreg)    248 and 232 a consumer thread, 24 a producer thread
    pieces of C      column blocks of a tile, two buffers     64 x 64, 2 x 2 x 8 KiB = 32 KiB: stmatrix into one while
                     of each consumer in turn                 TMA drains the other, and the next tile starts meanwhile

In the inner loop a consumer issues the wgmma of slot k before it waits for that of slot k - 1, so the tensor cores
always have the next one queued; then it releases slot k - 1. TMA fills what lies outside of A and B with zeros and
drops what lies outside of C, so no size needs a mask. Where rows of C do not start at multiples of 16 bytes (N is no
multiple of 8), TMA cannot write them, and consumers store from registers with a mask instead.

On an H200, bf16, M = N = K: 783 TFLOP/s at 4096 and 723 at 8192, 1.00 and 1.02 of torch.matmul (cuBLAS); the
autotuned Triton rung has 0.94 and 1.00 (assets/results/h200/gemm.json). `python -m tools.record.gemm_ladder
--configurations` compares the configurations. Importing this module imports Triton; the way in is
`utils.kernels.gemm.gemm_warp_specialized`.
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from dataclasses import dataclass, replace

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from utils.kernels.handle import Handle
from utils.machine import versions

versions.adopt_newest_gluon_names()
tma_load = gl.constexpr(tma.async_load)
tma_store = gl.constexpr(tma.async_store)
whole_warpgroup = gl.barrier  # of the partition that calls it
aggregate = gluon.aggregate


@dataclass(frozen=True)
class Config:
    """Tile and pipeline of the kernel, and into how many parts the sums of some tiles are cut."""

    block_m: int
    block_n: int
    consumers: int = 2  # warpgroups that multiply, block_m / consumers rows each
    block_k: int = 64  # 128 bytes of 16-bit elements: one swizzled row of shared memory
    stages: int = 4  # slots of the ring
    pieces: int = 4  # column blocks in which a tile of C is stored: even, two buffers take turns
    group_m: int = 8  # rows of tiles that are walked abreast, for the L2
    split: int = 1  # parts along K of a tile that would leave SMs idle: 1, 2, 4, 8 or 16

    @property
    def rows(self) -> int:
        """Rows of a consumer."""
        return self.block_m // self.consumers

    @property
    def registers(self) -> int:
        """Registers of a consumer thread; three consumers and a producer of 32 share the 65536 of an SM."""
        return 160 if self.consumers == 3 else 232

    @property
    def shared_bytes(self) -> int:
        """Shared memory for ring and pieces of C, in bytes; an SM of an H100 or H200 gives a block 232448."""
        ring = self.stages * (self.block_m + self.block_n) * self.block_k * 2
        return ring + 2 * self.block_m * (self.block_n // self.pieces) * 2


# Smaller tiles re-read A and B more often, but give small matrices enough tiles for all SMs.
CONFIGS = (
    Config(128, 256),
    Config(128, 128, stages=6, pieces=2),
    Config(128, 64, stages=8, pieces=2),
    Config(256, 128),
    Config(192, 128, consumers=3, stages=5),
    Config(64, 256, consumers=1, stages=5),
    Config(64, 128, consumers=1, stages=8, pieces=2),
    Config(64, 64, consumers=1, stages=8, pieces=2),
)
SPLITS = (1, 2, 4, 8, 16)


@aggregate
class Work:
    """What producer and consumers share: the ring with its barriers, the sizes, and what is fixed when compiled.

    Step i since the kernel's start, across tiles, uses slot i % stages, for the (i // stages)-th time: the parity of
    that is the phase to wait for.
    """

    a_ring: gl.shared_memory_descriptor  # (stages * consumers, ROWS, BLOCK_K), transposed where A is column-major
    b_ring: gl.shared_memory_descriptor  # (stages, BLOCK_K, BLOCK_N), or its transpose
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    M: gl.tensor
    N: gl.tensor
    K: gl.tensor
    whole: gl.tensor  # tiles that are computed in one go; each of the others in CONFIG.split parts
    CONFIG: gl.constexpr
    A_COLUMN_MAJOR: gl.constexpr
    B_COLUMN_MAJOR: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, a_ring, b_ring, full, empty, M, N, K, whole, CONFIG, A_COLUMN_MAJOR, B_COLUMN_MAJOR):
        self.a_ring = a_ring
        self.b_ring = b_ring
        self.full = full
        self.empty = empty
        self.M = M
        self.N = N
        self.K = K
        self.whole = whole
        self.CONFIG = gl.constexpr(CONFIG)
        self.A_COLUMN_MAJOR = gl.constexpr(A_COLUMN_MAJOR)
        self.B_COLUMN_MAJOR = gl.constexpr(B_COLUMN_MAJOR)

    @gluon.jit
    def slot(self, i):
        """Slot of step i."""
        return i % self.CONFIG.stages

    @gluon.jit
    def phase(self, i):
        """Parity of the round in which step i uses its slot."""
        return i // self.CONFIG.stages & 1

    @gluon.jit
    def tiles(self):
        """Number of tiles of C."""
        return gl.cdiv(self.M, self.CONFIG.block_m) * gl.cdiv(self.N, self.CONFIG.block_n)

    @gluon.jit
    def origin(self, tile):
        """First row and column of a tile: tiles are numbered down group_m rows of tiles, then along."""
        GROUP_M: gl.constexpr = self.CONFIG.group_m
        tiles_m = gl.cdiv(self.M, self.CONFIG.block_m)
        tiles_n = gl.cdiv(self.N, self.CONFIG.block_n)
        group = tile // (GROUP_M * tiles_n)
        within = tile % (GROUP_M * tiles_n)
        rows = min(tiles_m - group * GROUP_M, GROUP_M)
        return (group * GROUP_M + within % rows) * self.CONFIG.block_m, (within // rows) * self.CONFIG.block_n

    @gluon.jit
    def items(self):
        """Number of items of work: whole tiles first, then the parts of the others."""
        return self.whole + (self.tiles() - self.whole) * self.CONFIG.split

    @gluon.jit
    def part(self, item):
        """Number of an item among the parts of tiles; negative for a whole tile."""
        return item - self.whole

    @gluon.jit
    def locate(self, item):
        """Tile of an item, and its first step along K and the one behind its last."""
        SPLIT: gl.constexpr = self.CONFIG.split
        steps = gl.cdiv(self.K, self.CONFIG.block_k)
        part = self.part(item)
        is_part = min(max(part + 1, 0), 1)  # 1 or 0
        tile = min(item, self.whole + part // SPLIT)  # whole tiles: part is negative, and the item is the smaller one
        within = part % SPLIT * is_part
        parts = 1 + (SPLIT - 1) * is_part
        return tile, within * steps // parts, (within + 1) * steps // parts

    @gluon.jit
    def load(self, i, a_desc, b_desc, row, column, k):
        """Producer: fetch A[row.., k..] and B[k.., column..] for step i, as soon as its slot is empty."""
        CONSUMERS: gl.constexpr = self.CONFIG.consumers
        ROWS: gl.constexpr = self.CONFIG.block_m // CONSUMERS
        # Without this wait TMA would overwrite what a consumer still reads. The parity is that of the round before: in
        # the first round a fresh barrier counts as just completed.
        mbarrier.wait(self.empty.index(self.slot(i)), self.phase(i) ^ 1)
        arrived = self.full.index(self.slot(i))
        # The bytes are announced first: copies that arrive unannounced could complete the phase too early. Whole boxes
        # are counted, also where they hang over the edge and TMA fills in zeros.
        mbarrier.expect(arrived, CONSUMERS * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        for w in gl.static_range(CONSUMERS):
            tile = self.a_ring.index(self.slot(i) * CONSUMERS + w)
            if self.A_COLUMN_MAJOR:
                tma_load(a_desc, [k, row + w * ROWS], arrived, tile)
            else:
                tma_load(a_desc, [row + w * ROWS, k], arrived, tile)
        if self.B_COLUMN_MAJOR:
            tma_load(b_desc, [column, k], arrived, self.b_ring.index(self.slot(i)))
        else:
            tma_load(b_desc, [k, column], arrived, self.b_ring.index(self.slot(i)))

    @gluon.jit
    def operands(self, i, WHICH: gl.constexpr):
        """Consumer: its rows of A, and B, of step i. What was column-major was copied as it lies, and is read turned."""
        a = self.a_ring.index(self.slot(i) * self.CONFIG.consumers + WHICH)
        b = self.b_ring.index(self.slot(i))
        # Without this wait wgmma would read the tiles of the round before.
        mbarrier.wait(self.full.index(self.slot(i)), self.phase(i))
        return a.permute((1, 0)) if self.A_COLUMN_MAJOR else a, b.permute((1, 0)) if self.B_COLUMN_MAJOR else b

    @gluon.jit
    def release_before(self, i, pred=True):
        """Consumer: the slot of step i - 1 may be refilled; without that the producer waits for ever.

        The slot was read through the async proxy, as it will be refilled by TMA, so no fence is needed.
        """
        mbarrier.arrive(self.empty.index((i + self.CONFIG.stages - 1) % self.CONFIG.stages), count=1, pred=pred)


@gluon.jit
def producer(work, a_desc, b_desc):
    """One warp: keep the ring full. `step` counts slots filled since the start, across tiles."""
    step = 0
    for item in range(gl.program_id(0), work.items(), gl.num_programs(0)):
        tile, first, last = work.locate(item)
        row, column = work.origin(tile)
        for k in range(first, last):
            work.load(step, a_desc, b_desc, row, column, k * work.CONFIG.block_k)
            step += 1


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
def store_piece(work, out, piece, i, row, column, WHICH: gl.constexpr, TMA_STORE: gl.constexpr):
    """Store column block i of a consumer's rows: through one of its two buffers by TMA, or from registers."""
    c_desc, c_pointer, c_buffers = out
    if TMA_STORE:
        buffer = c_buffers.index(WHICH * 2 + i % 2)
        tma.store_wait(1)  # the store before the last has left this buffer: it may be overwritten
        buffer.store(piece)
        fence_async_shared()  # written by threads, read by the TMA unit: without it TMA may read older data
        tma_store(c_desc, [row, column + i * piece.shape[1]], buffer)
    else:
        layout: gl.constexpr = piece.type.layout
        m = row + gl.arange(0, piece.shape[0], gl.SliceLayout(1, layout))
        n = column + i * piece.shape[1] + gl.arange(0, piece.shape[1], gl.SliceLayout(0, layout))
        inside = (m < work.M)[:, None] & (n < work.N)[None, :]
        gl.store(c_pointer + m.to(gl.int64)[:, None] * work.N + n[None, :], piece, mask=inside)


@gluon.jit
def last_part(work, sums, counters, acc, part, WHICH: gl.constexpr):
    """Leave a part's sums in global memory, and tell whether all parts of the tile are there now."""
    ROWS: gl.constexpr = acc.shape[0]
    BLOCK_N: gl.constexpr = acc.shape[1]
    SPLIT: gl.constexpr = work.CONFIG.split
    CONSUMERS: gl.constexpr = work.CONFIG.consumers
    layout: gl.constexpr = acc.type.layout
    m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    place = (part * CONSUMERS + WHICH).to(gl.int64) * (ROWS * BLOCK_N)
    gl.store(sums + place + m[:, None] * BLOCK_N + n[None, :], acc)
    # All threads of the warpgroup have stored before one of them counts: whoever counts last reads what all have stored.
    whole_warpgroup()
    counter = counters + part // SPLIT * CONSUMERS + WHICH
    count = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if count == SPLIT - 1:
        gl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")  # the next launch finds it as this one did
    return count == SPLIT - 1


@gluon.jit
def summed_piece(work, sums, part, i, WHICH: gl.constexpr):
    """Column block i of a tile, summed over its parts in their order, whichever part was the last to arrive."""
    ROWS: gl.constexpr = work.CONFIG.block_m // work.CONFIG.consumers
    BLOCK_N: gl.constexpr = work.CONFIG.block_n
    SPLIT: gl.constexpr = work.CONFIG.split
    CONSUMERS: gl.constexpr = work.CONFIG.consumers
    COLUMNS: gl.constexpr = BLOCK_N // work.CONFIG.pieces
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // COLUMNS, COLUMNS // 4], [4, 1], [1, 0])
    m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    n = i * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    offsets = m[:, None] * BLOCK_N + n[None, :]
    total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    for other in gl.static_range(SPLIT):
        place = ((part // SPLIT * SPLIT + other) * CONSUMERS + WHICH).to(gl.int64) * (ROWS * BLOCK_N)
        total += gl.load(sums + place + offsets, cache_modifier=".cg")  # the L1 may hold what was there before
    return total


@gluon.jit
def consumer(work, out, partial, WHICH: gl.constexpr, TMA_STORE: gl.constexpr):
    """One warpgroup: rows WHICH * ROWS and on of each tile."""
    dtype: gl.constexpr = work.a_ring.dtype
    ROWS: gl.constexpr = work.CONFIG.block_m // work.CONFIG.consumers
    BLOCK_N: gl.constexpr = work.CONFIG.block_n
    PIECES: gl.constexpr = work.CONFIG.pieces
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums, counters = partial
    step = 0
    acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    for item in range(gl.program_id(0), work.items(), gl.num_programs(0)):
        tile, first, last = work.locate(item)
        row, column = work.origin(tile)
        row += WHICH * ROWS
        for k in range(first, last):
            a, b = work.operands(step, WHICH)
            # use_acc=False in the first step starts the sum anew: nobody has to zero 128 registers.
            acc = warpgroup_mma(a, b, acc, use_acc=k > first, is_async=True)
            # All wgmma but this one are done: only now has the slot before been read.
            acc = warpgroup_mma_wait(1, deps=[acc])
            work.release_before(step, k > first)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])  # the sums are complete, and the last slot has been read
        work.release_before(step)

        if work.CONFIG.split == 1:
            pieces = column_pieces(acc.to(dtype), PIECES)
            for i in gl.static_range(PIECES):
                store_piece(work, out, pieces[i], i, row, column, WHICH, TMA_STORE)
        else:
            part = work.part(item)
            if part < 0:
                pieces = column_pieces(acc.to(dtype), PIECES)
                for i in gl.static_range(PIECES):
                    store_piece(work, out, pieces[i], i, row, column, WHICH, TMA_STORE)
            else:
                if last_part(work, sums, counters, acc, part, WHICH):
                    for i in gl.static_range(PIECES):
                        piece = summed_piece(work, sums, part, i, WHICH).to(dtype)
                        store_piece(work, out, piece, i, row, column, WHICH, TMA_STORE)
    tma.store_wait(0)  # shared memory must live until TMA has read it


@gluon.jit
def shared_tiles(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT boxes of a TMA descriptor."""
    shape: gl.constexpr = [COUNT] + desc.block_type.shape  # noqa: RUF005 (Gluon knows no starred lists)
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit(do_not_specialize=["M", "N", "K", "whole"])
def gemm_kernel(
    a_desc,
    b_desc,
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
    """Allocate ring and barriers, then start the roles. c_desc is a_desc, and unused, where TMA cannot store C.

    sums, counters: fp32 (parts, BLOCK_M, BLOCK_N) and int32 zeros (split tiles, consumers), untouched if split is 1.
    """
    STAGES: gl.constexpr = CONFIG.stages
    CONSUMERS: gl.constexpr = CONFIG.consumers
    REGISTERS: gl.constexpr = CONFIG.registers
    a_ring = shared_tiles(a_desc, STAGES * CONSUMERS)
    b_ring = shared_tiles(b_desc, STAGES)
    c_buffers = shared_tiles(c_desc, 2 * CONSUMERS) if TMA_STORE else a_ring
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)  # the producer's `expect`; the bytes are counted apart
        mbarrier.init(empty.index(i), count=CONSUMERS)  # all consumers
    work = Work(a_ring, b_ring, full, empty, M, N, K, whole, CONFIG, A_COLUMN_MAJOR, B_COLUMN_MAJOR)
    out = (c_desc, c_pointer, c_buffers)
    partial = (sums, counters)
    # After the roles: warps and registers of all but the first, which has num_warps and the registers that are left.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(consumer, (work, out, partial, 0, TMA_STORE)), (producer, (work, a_desc, b_desc))], [1], [24]
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (work, out, partial, 0, TMA_STORE)),
                (consumer, (work, out, partial, 1, TMA_STORE)),
                (producer, (work, a_desc, b_desc)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (consumer, (work, out, partial, 0, TMA_STORE)),
                (consumer, (work, out, partial, 1, TMA_STORE)),
                (consumer, (work, out, partial, 2, TMA_STORE)),
                (producer, (work, a_desc, b_desc)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 32],
        )


def parts_of(m: int, n: int, config: Config, sms: int) -> tuple[int, int]:
    """Return how many tiles are computed whole, and how many in parts: those that would not fill a round of all SMs."""
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    rest = tiles % sms if config.split > 1 else 0
    return tiles - rest, rest


def estimate(m: int, n: int, k: int, config: Config, sms: int) -> float:
    """Estimate the time of a product in cycles of an SM, for a choice between configurations."""
    steps = triton.cdiv(k, config.block_k)
    step = config.block_m * config.block_n * config.block_k * 2 / 4096 + 120
    whole, rest = parts_of(m, n, config, sms)
    time = triton.cdiv(whole, sms) * (steps * step + 1500)
    if rest:
        rounds = triton.cdiv(rest * config.split, sms)
        time += rounds * (triton.cdiv(steps, config.split) * step + 1500)
        time += 3000 + config.rows * config.block_n / 32 * config.split
    return time


def choose(m: int, n: int, k: int, sms: int) -> Config:
    """Return the configuration with the shortest estimated time."""
    steps = triton.cdiv(k, 64)
    candidates = (
        replace(config, split=split) for config in CONFIGS for split in SPLITS if 2 * split <= steps or split == 1
    )
    return min(candidates, key=lambda config: estimate(m, n, k, config, sms))


def _layout(shape: list[int]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(shape, gl.float16)  # for bf16 the same: it knows only widths


def _operand(label: str, x: torch.Tensor, block: list[int]) -> tuple[TensorDescriptor, bool]:
    """A TMA descriptor of a matrix and whether it describes the transpose, for a column-major one."""
    for column_major, y in ((False, x), (True, x.T)):
        (outer, inner), (pitch, step) = y.shape, y.stride()
        if outer == 1:
            pitch = triton.cdiv(inner, 8) * 8  # there is no second row: any pitch will do
        if (step == 1 or inner == 1) and pitch % 8 == 0 and pitch >= inner and x.data_ptr() % 16 == 0:
            shape = block[::-1] if column_major else block
            return TensorDescriptor(x, [outer, inner], [pitch, 1], shape, _layout(shape)), column_major
    raise ValueError(
        f"gemm_warp_specialized copies {label} by TMA, which needs rows (or columns) of neighbouring elements that "
        f"start at multiples of 16 bytes; got {label} {tuple(x.shape)} with strides {x.stride()} elements, "
        f"{x.data_ptr() % 16} bytes past a multiple of 16. Pad its rows to a multiple of 8 elements, copy it with "
        ".contiguous() or .clone(), or use gemm_autotuned."
    )


def gemm(a: torch.Tensor, b: torch.Tensor, config: Config | None = None) -> torch.Tensor:
    """C (M, N) = A (M, K) @ B (K, N): fp16 or bf16, each row- or column-major. The caller has checked them."""
    return gemm_and_launch(a, b, config)[0]


def gemm_and_launch(
    a: torch.Tensor, b: torch.Tensor, config: Config | None = None
) -> tuple[torch.Tensor, "Launch | None"]:
    """Return C, and the launch, to be repeated on operands like these; None if nothing was launched."""
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    if not c.numel():
        return c, None
    if a.shape[1] == 0:
        return c.zero_(), None
    return c, launch(a, b, c, config)


@dataclass(frozen=True)
class Launch:
    """A launch that was made, to be repeated on A and B of the same shapes, strides and alignment."""

    handle: Handle
    shape: tuple[int, int]
    partial_sums: int
    counters: int

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return C = A @ B."""
        c = torch.empty(self.shape, dtype=a.dtype, device=a.device)
        sums, counters = workspace(c, self.partial_sums, self.counters)
        self.handle(a, b, c, c, sums, counters)
        return c


_counters: dict[tuple[int, int], torch.Tensor] = {}  # zeros, by device and stream


def workspace(c: torch.Tensor, partial_sums: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the sums of parts, and counters that are zero, as the kernel leaves them; C if none is needed.

    Launches of one stream run one after another and share their counters. A captured graph may be replayed on any
    stream, so it gets counters of its own.
    """
    if not partial_sums:
        return c, c
    sums = torch.empty(partial_sums, dtype=torch.float32, device=c.device)
    if torch.cuda.is_current_stream_capturing():
        return sums, torch.zeros(counters, dtype=torch.int32, device=c.device)
    key = c.device.index, torch._C._cuda_getCurrentRawStream(c.device.index)
    zeros = _counters.get(key)
    if zeros is None or len(zeros) < counters:
        zeros = _counters[key] = torch.zeros(max(1024, counters), dtype=torch.int32, device=c.device)
    return sums, zeros


def launch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, config: Config | None = None) -> Launch | None:
    """Start the kernel: one block an SM, or an item of work where there are fewer. Nothing is empty.

    Args:
        a: (M, K).
        b: (K, N).
        c: (M, N), contiguous; where N is a multiple of 8, its rows may be further apart.
        config: a configuration; None for the one with the shortest estimated time.
    """
    (m, k), n = a.shape, b.shape[1]
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    config = config or choose(m, n, k, sms)
    if config.split > triton.cdiv(k, config.block_k):
        raise ValueError(f"{config.split} parts of K = {k} would be shorter than one step of {config.block_k}.")
    a_desc, a_column_major = _operand("A", a, [config.rows, config.block_k])
    b_desc, b_column_major = _operand("B", b, [config.block_k, config.block_n])
    by_tma = c.stride(0) % 8 == 0 and c.data_ptr() % 16 == 0
    piece = [config.rows, config.block_n // config.pieces]
    c_desc = TensorDescriptor(c, [m, n], [c.stride(0), 1], piece, _layout(piece)) if by_tma else a_desc
    whole, rest = parts_of(m, n, config, sms)
    partial_sums = rest * config.split * config.block_m * config.block_n
    with torch.cuda.device(a.device):
        sums, counters = workspace(c, partial_sums, rest * config.consumers)
        grid, tensors = (min(sms, whole + rest * config.split),), (a_desc, b_desc, c_desc, c, sums, counters)
        rest_of_arguments = (m, n, k, whole, config, a_column_major, b_column_major, by_tma)
        compiled = gemm_kernel[grid](*tensors, *rest_of_arguments, num_warps=4)
    if compiled is None or not a.is_cuda:  # in a process that only simulates kernels
        return None
    handle = Handle(compiled, grid, tensors, rest_of_arguments, a.device.index)
    return Launch(handle, (m, n), partial_sums, rest * config.consumers)


def compile_for_hopper(
    config: Config = CONFIGS[0],
    dtype: str = "bf16",
    *,
    a_column_major: bool = False,
    b_column_major: bool = False,
    by_tma: bool = True,
):
    """The kernel compiled for sm_90a, on any machine: `.asm["ptx"]`, `.asm["cubin"]`, `.metadata.shared`."""
    from utils.kernels.offline import compile_gluon

    def descriptor(shape: list[int], transposed: bool = False) -> str:
        shape = shape[::-1] if transposed else shape
        return f"tensordesc<{dtype}{shape},{_layout(shape)!r}>"

    a = descriptor([config.rows, config.block_k], a_column_major)
    c = descriptor([config.rows, config.block_n // config.pieces]) if by_tma else a
    constants = {
        "CONFIG": config,
        "A_COLUMN_MAJOR": a_column_major,
        "B_COLUMN_MAJOR": b_column_major,
        "TMA_STORE": by_tma,
    }
    signature = {
        "a_desc": a,
        "b_desc": descriptor([config.block_k, config.block_n], b_column_major),
        "c_desc": c,
        "c_pointer": f"*{dtype}",
        "sums": "*fp32" if config.split > 1 else f"*{dtype}",
        "counters": "*i32" if config.split > 1 else f"*{dtype}",
        **dict.fromkeys(("M", "N", "K", "whole"), "i32"),
    }
    return compile_gluon(gemm_kernel, signature, constants)
