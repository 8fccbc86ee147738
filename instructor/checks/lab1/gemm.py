"""Part 1: products in loops and tiles, timing, counts of work and traffic."""

from __future__ import annotations

import math

import torch

from instructor.checks.common import DTYPES, Draw, dtype_name, expect_counts, expect_value
from utils.checking import check, expect_follows_device
from utils.checking.labs.lab1.gemm import (
    NAIVE,
    TILED,
    expect_product,
    expect_tiles_used,
    expect_times,
    expect_wide_accumulator,
    fix_tiles,
)


def _name(function: str, m: int, k: int, n: int, dtype: torch.dtype, more: str = "") -> str:
    return f"{function} of ({m}, {k}) @ ({k}, {n}){more} in {dtype_name(dtype)}"


@check(**NAIVE)
def gemm_naive(gemm_naive, seed=None):
    """Check any shape and dtype; one element at a time, without a product of the library."""
    draw = Draw(seed)
    hint = "Which index does each of the three loops run over, and where is the sum set back to zero?"
    for dtype in (torch.float32, torch.float64):
        shapes = [tuple(draw.sizes(3, 3, 7)), (1, draw.size(4, 9), 1), (draw.size(3, 6), 1, draw.size(3, 6)), (4, 4, 4)]
        for m, k, n in shapes:
            what = _name("gemm_naive", m, k, n, dtype)
            expect_product(gemm_naive, draw.normal(m, k, dtype=dtype), draw.normal(k, n, dtype=dtype), what, hint)
    a, b = draw.normal(5, 3).T, draw.normal(4, 5).T  # not contiguous
    a[1, 2] = math.nan
    expect_product(gemm_naive, a, b, "gemm_naive of transposed views, with a NaN in row 1 of a,", hint)
    expect_follows_device(gemm_naive, (2, 3), (3, 4), what="gemm_naive(a, b)")


@check(**TILED)
def gemm_tiled(gemm_tiled, seed=None):
    """Check tiles and matrices of any size; an operator works on one tile at most."""
    draw = Draw(seed)
    hint = "Look at the tiles at the edges, and at where the accumulator starts and ends."
    # Whole tiles come first, so that the message separates errors in the tiling from errors at the edges.
    for (m, k, n), tiles, dtype, words in (
        ((8, 12, 4), (4, 2, 3), torch.float32, "Every tile is whole here."),
        ((10, 12, 11), (5, 4, 3), torch.float64, hint),
        (draw.sizes(3, 9, 16), draw.sizes(3, 2, 7), torch.float32, hint),
        (draw.sizes(3, 9, 30), (64, 32, 128), torch.float64, hint),
        (draw.sizes(3, 5, 9), (1, 5, 1), torch.float32, hint),
        (draw.sizes(3, 5, 9), (5, 1, 1), torch.float32, hint),
    ):
        what = _name("gemm_tiled", m, k, n, dtype, f" with tiles {tuple(tiles)}")
        a, b = draw.normal(m, k, dtype=dtype), draw.normal(k, n, dtype=dtype)
        expect_product(fix_tiles(gemm_tiled, *tiles), a, b, what, words)
    expect_tiles_used(gemm_tiled)
    narrow = [draw.normal(*shape, dtype=torch.bfloat16) for shape in ((16, 128), (128, 16))]
    a, b = draw.normal(70, 9), draw.normal(9, 5)
    expect_product(gemm_tiled, a, b, _name("gemm_tiled", 70, 9, 5, a.dtype, " with the default tiles"), hint)
    a, b = draw.normal(7, 10).T, draw.normal(9, 7).T
    a[1, 2] = math.nan
    what = "gemm_tiled of transposed views, with a NaN in row 1 of a,"
    expect_product(fix_tiles(gemm_tiled, 4, 4, 4), a, b, what, hint)
    expect_wide_accumulator(gemm_tiled, *narrow, (16, 16, 16))
    expect_follows_device(gemm_tiled, (3, 5), (5, 4), 2, 2, 2, what="gemm_tiled(a, b)")


@check("1.3", "Timing")
def time_calls(time_calls, seed=None):
    """Check that the function waits at the right moments and times each call separately, in ms."""
    draw = Draw(seed)
    expect_times(time_calls, [draw.real(40, 60), draw.real(4, 6), draw.real(15, 25)], older_ms=80.0)


_UNITS = ("MACs", "FLOPs", "bytes")


@check("1.4", "MACs, FLOPs and bytes")
def gemm_and_gemv_costs(gemm_macs_flops_bytes, gemv_macs_flops_bytes, seed=None):
    """Check the counts of (M, K) @ (K, N) and (M, K) @ (K,) for several dtypes."""
    draw = Draw(seed)
    for dtype in DTYPES:
        size = dtype.itemsize
        m, n, k = draw.sizes(3, 11, 500)
        macs = m * n * k
        _expect_costs(
            gemm_macs_flops_bytes(m, n, k, dtype),
            macs,
            (m * k + k * n + m * n) * size,
            f"gemm_macs_flops_bytes({m}, {n}, {k}, {dtype_name(dtype)})",
            {
                "The result C is written, too.": (m * k + k * n) * size,
                "The number of bytes depends on the dtype.": (m * k + k * n + m * n) * 4,
                "These are elements, not bytes.": m * k + k * n + m * n,
                "The least I/O reads A and B once, not once a product.": 2 * m * n * k * size,
            },
        )
        _expect_costs(
            gemv_macs_flops_bytes(m, k, dtype),
            m * k,
            (m * k + k + m) * size,
            f"gemv_macs_flops_bytes({m}, {k}, {dtype_name(dtype)})",
            {
                "The result y is written, too.": (m * k + k) * size,
                "The number of bytes depends on the dtype.": (m * k + k + m) * 4,
                "y has M elements, x has K.": (m * k + 2 * k) * size,
            },
        )


def _expect_costs(got, macs, n_bytes, what, byte_mistakes) -> None:
    mistakes = {hint: (math.nan, math.nan, number) for hint, number in byte_mistakes.items()}
    mistakes["A FLOP is not a MAC: one multiply-accumulate is two FLOPs."] = (2 * macs, macs, math.nan)
    expect_counts(got, (macs, 2 * macs, n_bytes), _UNITS, what, mistakes)


@check("Bonus 1.6", "Tile traffic")
def tile_traffic(tiled_gemm_bytes, largest_square_tile, seed=None):
    """Check the traffic of a tiled GEMM, and the largest tile that fits."""
    draw = Draw(seed)
    for dtype in DTYPES[1:3]:
        size = dtype.itemsize
        m, n, k = draw.sizes(3, 300, 900)
        for tm, tn in ((32, 64), (50, 7), (1000, 128), (2000, 2000), (1, 1)):
            rows, cols = math.ceil(m / tm), math.ceil(n / tn)
            expect_value(
                tiled_gemm_bytes(m, n, k, tm, tn, dtype),
                (cols * m * k + rows * k * n + m * n) * size,
                "bytes",
                f"tiled_gemm_bytes({m}, {n}, {k}, {tm}, {tn}, {dtype_name(dtype)})",
                {
                    "A is read once for each tile COLUMN of C, B once for each tile ROW.": (
                        rows * m * k + cols * k * n + m * n
                    )
                    * size,
                    "The last tile is there as well if it is not whole.": (n // tn * m * k + m // tm * k * n + m * n)
                    * size,
                    "Part of a tile is a tile: their number is an integer.": (n / tn * m * k + m / tm * k * n + m * n)
                    * size,
                    "C is written, too.": (cols * m * k + rows * k * n) * size,
                },
            )
    for dtype in DTYPES[1:3]:
        for case in range(4):
            fast, tile_k = draw.size(20_000, 300_000), draw.choice((8, 16, 32, 64))
            if case == 0:  # a tile that fills the memory to the last byte
                fast = 4 * 150**2 + 300 * tile_k * dtype.itemsize
            t = max(x for x in range(300) if 4 * x * x + 2 * x * tile_k * dtype.itemsize <= fast)
            what = f"largest_square_tile({fast}, {tile_k}, {dtype_name(dtype)})"
            expect_value(
                largest_square_tile(fast, tile_k, dtype),
                t,
                "",
                what,
                {"This one does not fit any more.": t + 1, "A larger one fits.": t - 1},
            )
