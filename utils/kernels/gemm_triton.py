"""The Triton rungs of the GEMM ladder: the device code. `utils/kernels/gemm.py` lists the rungs and is the way in.

Both kernels compute C = A @ B from pointers, sizes and strides, so a transposed view costs no copy. They accumulate in
fp32. The rungs differ in these things:

    rung            a program computes                reads of A and B, in elements      order of programs
    naive           1 x 256 of one row of C           2 M N K: nothing is shared          row by row
    tiled           64 x 64 of C                      M N K (1/BLOCK_M + 1/BLOCK_N)       row of tiles by row of tiles
    tiled_grouped   the same, loads four tiles ahead  the same, more hits in the L2       8 rows of tiles abreast
    autotuned       the fastest tile of seven         M N K (1/BLOCK_M + 1/BLOCK_N)       8 rows of tiles abreast

Figures: docs/kernels/gemm.md. Importing this module imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def naive_kernel(
    a, b, c, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn, BLOCK_N: tl.constexpr
):
    """Compute C by three loops: `for m` is the grid, `for n` the lanes, `for k` the loop. A lane has one element of C."""
    m = tl.program_id(0).to(tl.int64)  # 64-bit: a row's offset can pass 2^31 elements
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    a_element = a + m * stride_am
    b_row = b + n * stride_bn
    total = tl.zeros((BLOCK_N,), tl.float32)
    for _ in range(K):
        total += tl.load(a_element).to(tl.float32) * tl.load(b_row, mask=n < N, other=0.0).to(tl.float32)
        a_element += stride_ak
        b_row += stride_bk
    tl.store(c + m * stride_cm + n * stride_cn, total.to(c.dtype.element_ty), mask=n < N)


@triton.jit
def tiled_kernel(
    a,
    b,
    c,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Compute one tile of C: load a tile of A and a tile of B, multiply (fp16 and bf16 on tensor cores), step along K.

    Programs walk GROUP_M rows of tiles abreast, so programs that run together cover a squarer patch of C. GROUP_M 1 is
    row-major order: programs that run together share rows of A, and no columns of B.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    rows = min(tiles_m - group * GROUP_M, GROUP_M)  # the last group may be shorter
    m = (group * GROUP_M + within % rows) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    n = (within // rows) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    a_tile = a + m[:, None] * stride_am + k[None, :].to(tl.int64) * stride_ak
    b_tile = b + k[:, None].to(tl.int64) * stride_bk + n[None, :] * stride_bn
    a_step = tl.cast(BLOCK_K, tl.int64) * stride_ak
    b_step = tl.cast(BLOCK_K, tl.int64) * stride_bk
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = k < K - start  # the last tile along K may hang over the edge
        x = tl.load(a_tile, mask=(m < M)[:, None] & inside[None, :], other=0.0)
        y = tl.load(b_tile, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        # "ieee": fp32 stays fp32. The default would round fp32 operands to TF32.
        total = tl.dot(x, y, total, input_precision="ieee")
        a_tile += a_step
        b_tile += b_step
    c_tile = c + m[:, None] * stride_cm + n[None, :] * stride_cn
    tl.store(c_tile, total.to(c.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


# Rows, columns and depth of a tile, loads ahead, warps. The first tiles are for large matrices, the last for small matrices.
AUTOTUNE_CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_stages=stages, num_warps=warps)
    for m, n, k, stages, warps in (
        (128, 256, 64, 3, 8),
        (128, 128, 64, 4, 4),
        (128, 128, 64, 3, 8),
        (64, 256, 64, 4, 4),
        (128, 64, 64, 4, 4),
        (64, 64, 64, 4, 4),
        (128, 64, 32, 4, 4),
    )
]


def _configs_that_fit(configs, arguments, **_):
    """Return the configs that fit: fp32 takes twice the shared memory, and its larger tiles unroll into too much code."""
    return configs if arguments["a"].element_size() == 2 else configs[-3:]


# Triton times the configs at the first call with new sizes or layouts, and keeps the fastest for the process.
autotuned_kernel = triton.autotune(
    AUTOTUNE_CONFIGS,
    key=["M", "N", "K", "stride_ak", "stride_bn"],
    prune_configs_by={"early_config_prune": _configs_that_fit},
)(tiled_kernel)

_TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
OPTIONS: dict[str, dict] = {  # launch options of the rungs that compute tiles
    "tiled": _TILE | {"GROUP_M": 1, "num_stages": 1, "num_warps": 4},  # tiles row by row; a program waits for each load
    "tiled_grouped": _TILE | {"GROUP_M": 8, "num_stages": 4, "num_warps": 4},  # eight rows abreast, loads four ahead
    "autotuned": AUTOTUNE_CONFIGS[0].kwargs,  # for the simulator, which times nothing
}


def launch(rung: str, a, b, c) -> None:
    """Compute C = A @ B by the kernel of a rung: "naive", "tiled", "tiled_grouped" or "autotuned"."""
    arguments = a, b, c, a.shape[0], b.shape[1], a.shape[1], *a.stride(), *b.stride(), *c.stride()

    def tiles(tile: dict) -> tuple[int]:
        return (triton.cdiv(c.shape[0], tile["BLOCK_M"]) * triton.cdiv(c.shape[1], tile["BLOCK_N"]),)

    if rung == "naive":
        naive_kernel[(c.shape[0], triton.cdiv(c.shape[1], 256))](*arguments, BLOCK_N=256)
    else:
        timed = rung == "autotuned" and a.is_cuda
        (autotuned_kernel if timed else tiled_kernel)[tiles](*arguments, **({} if timed else OPTIONS[rung]))
