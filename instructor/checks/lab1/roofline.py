"""Part 2: arithmetic intensity, ridge point, roof, and the achieved rate."""

from __future__ import annotations

import math

from instructor.checks.common import DTYPES, Draw, dtype_name, expect_value
from utils.checking import check


@check("2.1", "Arithmetic intensity")
def intensities(gemm_intensity, gemv_intensity, seed=None):
    """Check FLOPs over bytes of GEMM and GEMV."""
    draw = Draw(seed)
    for dtype in DTYPES:
        size = dtype.itemsize
        m, n, k = draw.sizes(3, 20, 2000)
        gemm_bytes, gemv_bytes = (m * k + k * n + m * n) * size, (m * k + k + m) * size
        upside_down = "FLOPs over bytes, not bytes over FLOPs."
        expect_value(
            gemm_intensity(m, n, k, dtype),
            2 * m * n * k / gemm_bytes,
            "FLOPs/Byte",
            f"gemm_intensity({m}, {n}, {k}, {dtype_name(dtype)})",
            {upside_down: gemm_bytes / (2 * m * n * k)},
        )
        expect_value(
            gemv_intensity(m, k, dtype),
            2 * m * k / gemv_bytes,
            "FLOPs/Byte",
            f"gemv_intensity({m}, {k}, {dtype_name(dtype)})",
            {upside_down: gemv_bytes / (2 * m * k)},
        )


@check("2.2", "Ridge point and roof")
def ridge_and_roof(ridge_point, attainable_tflops, seed=None):
    """Check the ridge point, and the lower of the two roofs."""
    draw = Draw(seed)
    for _ in range(3):
        peak, bandwidth = draw.real(0.1, 2000), draw.real(0.02, 8)
        what = f"ridge_point({peak:.4g}, {bandwidth:.4g})"
        expect_value(
            ridge_point(peak, bandwidth),
            peak / bandwidth,
            "FLOPs/Byte",
            what,
            {"It is the peak over the bandwidth.": bandwidth / peak},
        )
        ridge = peak / bandwidth
        for intensity in (ridge * draw.real(0.01, 0.9), ridge * draw.real(1.1, 50), ridge):
            side = "left of" if intensity < ridge else "right of" if intensity > ridge else "at"
            expect_value(
                attainable_tflops(intensity, peak, bandwidth),
                min(peak, intensity * bandwidth),
                "TFLOP/s",
                f"attainable_tflops({intensity:.4g}, {peak:.4g}, {bandwidth:.4g}), {side} the ridge,",
                {"The lower of the two roofs limits, not the higher.": max(peak, intensity * bandwidth)},
            )


@check("2.3", "Achieved speed and the smallest compute-bound GEMM")
def achieved_and_smallest(achieved_tflops, smallest_compute_bound_gemm, seed=None):
    """Check TFLOP/s from FLOPs and ms, and the n at which GEMM reaches the ridge."""
    draw = Draw(seed)
    for _ in range(3):
        flops, latency_ms = draw.size(10**6, 10**13), draw.real(0.002, 500)
        expect_value(
            achieved_tflops(flops, latency_ms),
            flops / latency_ms / 1e9,
            "TFLOP/s",
            f"achieved_tflops({flops}, {latency_ms:.4g})",
            {"The latency is in ms, not in seconds.": flops / latency_ms / 1e12},
        )
    for dtype in DTYPES:
        ridge = draw.size(5, 400) + draw.real(0.1, 0.4)
        size = dtype.itemsize
        n = next(n for n in range(1, 10**5) if 2 * n**3 / (3 * n * n * size) >= ridge)
        expect_value(
            smallest_compute_bound_gemm(ridge, dtype),
            n,
            "",
            f"smallest_compute_bound_gemm({ridge:.4f}, {dtype_name(dtype)})",
            {
                "This one is still memory-bound: round up, n is an integer.": n - 1,
                "The number of bytes depends on the dtype.": math.ceil(1.5 * 4 * ridge),
                "Three matrices travel: A, B and C.": math.ceil(size * ridge),
                "Use FLOPs, two for each MAC.": math.ceil(3 * size * ridge),
                "n is an integer.": 1.5 * size * ridge,
            },
        )
    for dtype in DTYPES[1:3]:  # an integer n reaches this ridge exactly, however the formula is written
        ridge, size = draw.choice((40, 48, 64, 96)), dtype.itemsize
        n = 3 * size * ridge // 2
        expect_value(
            smallest_compute_bound_gemm(float(ridge), dtype),
            n,
            "",
            f"smallest_compute_bound_gemm({ridge}.0, {dtype_name(dtype)})",
            {"An intensity equal to the ridge reaches it.": n + 1},
        )
