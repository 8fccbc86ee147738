"""Warp-specialized GEMM for Hopper in Gluon: C = A @ B, fp16 or bf16, fp32 accumulation. The ladder's last rung.

One block stays on each SM and walks over tiles of C (persistent). Its warps have three jobs. One warp, the producer,
does nothing but start TMA copies of the next tiles of A and B into a ring in shared memory. Two warpgroups, the
consumers, each multiply half of the rows of the tile with wgmma, reading the ring and keeping their sums in
registers. Two mbarriers for each slot of the ring tell "full" (by the TMA unit, when the bytes have arrived) and
"empty" (by the consumers, when both have read it). So nobody waits for a copy that could have been started earlier:

    producer     | A0 B0 | A1 B1 | A2 B2 | A3 B3 | . wait empty . | A4 B4 | ...       runs on into the next tile
    consumer 0   . wait full .   | wgmma 0 | wgmma 1 | wgmma 2 |  ...  | store C |    its own pace: while one stores,
    consumer 1   . wait full .   | wgmma 0 | wgmma 1 | wgmma 2 |  ...  | store C |    the other may still multiply

    part             what                                     size, first configuration (128 x 256 x 64)
    tile of C        BLOCK_M x BLOCK_N, half the rows each    128 x 256; wgmma m64n256k16, four for each slot
    ring             STAGES slots of A and B, 128 B swizzle   4 x (16 KiB + 32 KiB) = 192 KiB
    accumulator      fp32 in registers                        64 x 256 a consumer: 128 registers a thread
    registers        moved between warpgroups (setmaxnreg)    248 and 232 a consumer thread, 24 a producer thread
    pieces of C      PIECES column blocks, two buffers a      64 x 64, 2 x 2 x 8 KiB = 32 KiB: stmatrix into one while
                     consumer in turn                         TMA drains the other, and the next tile starts meanwhile
    order of tiles   GROUP_M rows of tiles abreast            8: a wave of 132 tiles shares rows and columns in the L2

In the inner loop a consumer issues the wgmma of slot k before it waits for that of slot k - 1, so the tensor cores
always have the next one queued; then it hands slot k - 1 back. TMA fills what lies outside of A and B with zeros
and drops what lies outside of C, so no size needs a mask. Where rows of C do not start at multiples of 16 bytes (N is
no multiple of 8), TMA cannot write them, and consumers store from registers with a mask instead.

Figures: assets/results/h200/gemm.json, against torch.matmul. `python -m utils.kernels.gemm_gluon` compares the
configurations. Importing this module imports Triton; `utils.kernels.gemm.gemm_warp_specialized` is the way in.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass

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

# Triton 3.8 renamed the two TMA copies.
tma_load = gl.constexpr(getattr(tma, "async_load", None) or tma.async_copy_global_to_shared)
tma_store = gl.constexpr(getattr(tma, "async_store", None) or tma.async_copy_shared_to_global)


@dataclass(frozen=True)
class Config:
    """Tile and pipeline of the kernel; powers of two. `speed` is the tile's rate against the best tile's, about."""

    block_m: int
    block_n: int
    block_k: int = 64  # 128 bytes of 16-bit elements: one swizzled row of shared memory
    stages: int = 4  # slots of the ring
    pieces: int = 4  # column blocks in which a tile of C is stored: even, two buffers take turns
    group_m: int = 8
    speed: float = 1.0

    @property
    def shared_bytes(self) -> int:
        """Shared memory for ring and pieces of C, in bytes; an SM of an H100 or H200 gives a block 232448."""
        ring = self.stages * (self.block_m + self.block_n) * self.block_k * 2
        return ring + 4 * (self.block_m // 2) * (self.block_n // self.pieces) * 2


# Smaller tiles re-read A and B more often, but give small matrices enough tiles for all SMs. `speed` is the mean of
# 4096 and 8192 cubed in bf16 on an H200.
CONFIGS = (
    Config(128, 256),
    Config(128, 128, stages=6, pieces=2, speed=0.93),
    Config(128, 64, stages=8, pieces=2, speed=0.58),
)


@gluon.jit
def tile_origin(tile, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    """First row and column of a tile: tiles are numbered down GROUP_M rows of tiles, then along."""
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    group = tile // (GROUP_M * tiles_n)
    within = tile % (GROUP_M * tiles_n)
    rows = min(tiles_m - group * GROUP_M, GROUP_M)
    return (group * GROUP_M + within % rows) * BLOCK_M, (within // rows) * BLOCK_N


@gluon.jit
def producer(
    a_desc,
    b_desc,
    a_ring,
    b_ring,
    full,
    empty,
    M,
    N,
    K,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    A_COLUMN_MAJOR: gl.constexpr,
    B_COLUMN_MAJOR: gl.constexpr,
):
    """One warp: keep the ring full. `step` counts slots filled since the start, across tiles."""
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = tile_origin(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            slot = step % STAGES
            # The parity of the round before: in the first round a fresh barrier counts as just completed.
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            arrived = full.index(slot)
            # Whole boxes are counted, also where they hang over the edge and TMA fills in zeros.
            mbarrier.expect(arrived, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            if A_COLUMN_MAJOR:
                tma_load(a_desc, [k, row], arrived, a_ring.index(slot))
            else:
                tma_load(a_desc, [row, k], arrived, a_ring.index(slot))
            if B_COLUMN_MAJOR:
                tma_load(b_desc, [column, k], arrived, b_ring.index(slot))
            else:
                tma_load(b_desc, [k, column], arrived, b_ring.index(slot))
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
        pieces = halves
    return pieces


@gluon.jit
def consumer(
    c_desc,
    c_pointer,
    a_ring,
    b_ring,
    c_buffers,
    full,
    empty,
    M,
    N,
    K,
    WHICH: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    A_COLUMN_MAJOR: gl.constexpr,
    B_COLUMN_MAJOR: gl.constexpr,
    PIECES: gl.constexpr,
    TMA_STORE: gl.constexpr,
):
    """One warpgroup: rows WHICH * BLOCK_M / 2 and on of each tile."""
    dtype: gl.constexpr = a_ring.dtype
    ROWS: gl.constexpr = BLOCK_M // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    step = 0
    acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = tile_origin(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        row += WHICH * ROWS
        for k in range(0, K, BLOCK_K):
            slot = step % STAGES
            # A column-major operand was copied as it lies; its transposed view makes wgmma read it the other way.
            a = a_ring.index(slot).permute((1, 0)) if A_COLUMN_MAJOR else a_ring.index(slot)
            b = b_ring.index(slot).permute((1, 0)) if B_COLUMN_MAJOR else b_ring.index(slot)
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            # use_acc=False at k = 0 starts the sum anew: nobody has to zero 128 registers.
            acc = warpgroup_mma(a.slice(WHICH * ROWS, ROWS, dim=0), b, acc, use_acc=k > 0, is_async=True)
            # All but this wgmma are done: the slot before may be refilled. Its reads went through the async proxy,
            # as the refilling TMA will, so no fence is needed.
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)

        if TMA_STORE:
            pieces = column_pieces(acc.to(dtype), PIECES)
            for i in gl.static_range(PIECES):
                buffer = c_buffers.index(WHICH * 2 + i % 2)
                tma.store_wait(1)  # the store before the last has left this buffer
                buffer.store(pieces[i])
                fence_async_shared()  # written by threads, read by the TMA unit
                tma_store(c_desc, [row, column + i * (BLOCK_N // PIECES)], buffer)
        else:
            m = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            n = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
            gl.store(
                c_pointer + m.to(gl.int64)[:, None] * N + n[None, :],
                acc.to(dtype),
                mask=(m < M)[:, None] & (n < N)[None, :],
            )
    tma.store_wait(0)


@gluon.jit
def shared_tiles(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT boxes of a TMA descriptor."""
    shape: gl.constexpr = [COUNT] + desc.block_type.shape  # noqa: RUF005 (Gluon knows no starred lists)
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit(do_not_specialize=["M", "N", "K"])
def gemm_kernel(
    a_desc,
    b_desc,
    c_desc,
    c_pointer,
    M,
    N,
    K,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    A_COLUMN_MAJOR: gl.constexpr,
    B_COLUMN_MAJOR: gl.constexpr,
    PIECES: gl.constexpr,
    TMA_STORE: gl.constexpr,
):
    """Ring and barriers, then the three jobs. c_desc is a_desc, and unused, where TMA cannot store C."""
    a_ring = shared_tiles(a_desc, STAGES)
    b_ring = shared_tiles(b_desc, STAGES)
    c_buffers = shared_tiles(c_desc, 4) if TMA_STORE else a_ring
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)  # the producer's `expect`; the bytes are counted apart
        mbarrier.init(empty.index(i), count=2)  # both consumers
    gl.warp_specialize(
        [
            (
                consumer,
                (
                    c_desc,
                    c_pointer,
                    a_ring,
                    b_ring,
                    c_buffers,
                    full,
                    empty,
                    M,
                    N,
                    K,
                    0,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                    GROUP_M,
                    A_COLUMN_MAJOR,
                    B_COLUMN_MAJOR,
                    PIECES,
                    TMA_STORE,
                ),
            ),
            (
                consumer,
                (
                    c_desc,
                    c_pointer,
                    a_ring,
                    b_ring,
                    c_buffers,
                    full,
                    empty,
                    M,
                    N,
                    K,
                    1,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                    GROUP_M,
                    A_COLUMN_MAJOR,
                    B_COLUMN_MAJOR,
                    PIECES,
                    TMA_STORE,
                ),
            ),
            (
                producer,
                (
                    a_desc,
                    b_desc,
                    a_ring,
                    b_ring,
                    full,
                    empty,
                    M,
                    N,
                    K,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                    GROUP_M,
                    A_COLUMN_MAJOR,
                    B_COLUMN_MAJOR,
                ),
            ),
        ],
        [4, 1],
        [232, 24],
    )  # warps and registers of the second and third; the first has num_warps and the rest


def choose(m: int, n: int, sms: int) -> Config:
    """The configuration with the least work for the busiest SM, each tile weighed by its rate."""

    def time(config: Config) -> float:
        tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
        return triton.cdiv(tiles, sms) * config.block_m * config.block_n / config.speed

    return min(CONFIGS, key=time)


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
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    if not c.numel():
        return c
    if a.shape[1] == 0:
        return c.zero_()
    launch(a, b, c, config)
    return c


def launch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, config: Config | None = None) -> None:
    """Start the kernel: one block an SM, or a tile where there are fewer. c is contiguous, nothing is empty."""
    (m, k), n = a.shape, b.shape[1]
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    config = config or choose(m, n, sms)
    a_desc, a_column_major = _operand("A", a, [config.block_m, config.block_k])
    b_desc, b_column_major = _operand("B", b, [config.block_k, config.block_n])
    by_tma = n % 8 == 0 and c.data_ptr() % 16 == 0
    piece = [config.block_m // 2, config.block_n // config.pieces]
    c_desc = TensorDescriptor(c, [m, n], [n, 1], piece, _layout(piece)) if by_tma else a_desc
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    with torch.cuda.device(a.device):
        gemm_kernel[(min(sms, tiles),)](
            a_desc,
            b_desc,
            c_desc,
            c,
            m,
            n,
            k,
            config.block_m,
            config.block_n,
            config.block_k,
            config.stages,
            config.group_m,
            a_column_major,
            b_column_major,
            config.pieces,
            by_tma,
            num_warps=4,
        )


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

    a = descriptor([config.block_m, config.block_k], a_column_major)
    c = descriptor([config.block_m // 2, config.block_n // config.pieces]) if by_tma else a
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.stages,
        "GROUP_M": config.group_m,
        "A_COLUMN_MAJOR": a_column_major,
        "B_COLUMN_MAJOR": b_column_major,
        "PIECES": config.pieces,
        "TMA_STORE": by_tma,
    }
    signature = {
        "a_desc": a,
        "b_desc": descriptor([config.block_k, config.block_n], b_column_major),
        "c_desc": c,
        "c_pointer": f"*{dtype}",
        "M": "i32",
        "N": "i32",
        "K": "i32",
    }
    return compile_gluon(gemm_kernel, signature, constants)


def main() -> int:
    """Every configuration, and variations of the first, against torch.matmul in bf16 on square matrices."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print(
            "This kernel runs on a Hopper GPU (H100, H200), and there is none here; "
            "compile_for_hopper() shows its assembly on any machine.",
            file=sys.stderr,
        )
        return 1
    from utils.benchmark.measuring import compare

    candidates = (
        *CONFIGS,
        Config(128, 256, group_m=4),
        Config(128, 256, group_m=16),
        Config(128, 256, stages=3, pieces=2),
        Config(256, 128),
    )
    sizes = (1024, 2048, 4096, 8192)
    print(f"{torch.cuda.get_device_name()}, bf16, M = N = K: TFLOP/s (time of torch.matmul / time of the kernel)")
    print(f"{'tile, stages, pieces, group':<32}" + "".join(f"{size:>18}" for size in sizes))
    operands = {size: [torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in "ab"] for size in sizes}
    for config in candidates:
        tile = f"{config.block_m} x {config.block_n} x {config.block_k}"
        line = f"{f'{tile}, {config.stages}, {config.pieces}, {config.group_m}':<32}"
        for size in sizes:
            gemm(*operands[size], config)
            found = compare(
                torch.matmul,
                functools.partial(gemm, config=config),
                *operands[size],
                flops=2 * size**3,
                warmup=3,
                iterations=50,
                max_seconds=0.7,
                labels=("torch.matmul", "gemm_gluon"),
            )
            line += f"{f'{found.b.tflops:.1f} ({found.ratio:.3f}x)':>18}"
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
