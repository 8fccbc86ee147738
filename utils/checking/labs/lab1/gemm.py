"""Parts 1 and 2: products in loops and tiles, timing, counts of work and traffic, and the roofline."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from utils.checking import (
    MATMUL,
    expect_close,
    expect_follows_device,
    expect_items,
    expect_number,
    expect_rounded_once,
    poisoned_memory,
    visible,
)

BF16, FP32 = torch.bfloat16, torch.float32
ELEMENTS = "These are elements, not bytes."
DTYPE = "The number of bytes depends on the dtype."
MACS = "A multiply-accumulate is two FLOPs."
UPSIDE_DOWN = "FLOPs over bytes, not bytes over FLOPs."

NAIVE: dict[str, Any] = {
    "question": "1.1",
    "title": "Naive GEMM",
    "forbids": MATMUL,
    "largest": 1,
    "hint": "write the three loops yourself, with one a[i, k] at a time",
}
TILED: dict[str, Any] = {
    "question": "1.2",
    "title": "Tiled GEMM",
    "forbids": MATMUL,
    "largest": "one step of its tiles",
    "hint": "build the product of two tiles from elementwise products and sums. Are the tile sizes used?",
}


def expect_product(gemm, a: torch.Tensor, b: torch.Tensor, what: str, hint: str) -> None:
    """Assert gemm(a, b) = a @ b, and that gemm reads no memory before it is written."""
    with poisoned_memory():
        got = gemm(a, b)
    expect_close(got, a @ b, rtol=1e-4, atol=1e-4, what=what, hint=hint)


@visible(**NAIVE)
def check_gemm_naive(gemm_naive):
    """Check a product with three different sizes in two dtypes, and a product of transposed views."""
    a = torch.tensor([[1.0, 2.0, 3.14159, -1.0], [4.0, 5.0, 6.0, 2.71828]])
    b = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0], [1.0, 1.0, -3.0], [2.0, -1.0, 0.5]])
    hint = "Which index does each loop run over, and where is the sum set back to zero?"
    for x, y, what in (
        (a, b, "of (2, 4) @ (4, 3)"),
        (a.double(), b.double(), "in float64"),
        (b.T, a.T, "of transposed views"),
    ):
        expect_product(gemm_naive, x, y, f"gemm_naive {what}", hint)
    expect_follows_device(gemm_naive, (2, 4), (4, 3), what="gemm_naive(a, b)")


def fix_tiles(gemm_tiled, *tiles: int):
    """Return gemm_tiled for these tiles; an operator may work on one step of the tiles at most."""
    return lambda a, b: gemm_tiled.with_limit(math.prod(tiles))(a, b, *tiles)


def expect_wide_accumulator(gemm_tiled, a: torch.Tensor, b: torch.Tensor, tiles: tuple[int, int, int]) -> None:
    """Assert that the answer multiplies and adds bf16 numbers in at least float32, and rounds once."""
    got, exact = gemm_tiled(a, b, *tiles), a.double() @ b.double()
    what = f"gemm_tiled of {tuple(a.shape)} @ {tuple(b.shape)} in bfloat16"
    expect_close(got, exact.to(a.dtype), rtol=0.2, atol=10.0, what=what)
    expect_rounded_once(got, exact, what, "the product of two elements, the accumulator and C")


def expect_tiles_used(gemm_tiled) -> None:
    """Assert that larger tiles take fewer steps. Loops over single elements would not, but also fit into a tile."""
    steps = []
    for tiles in ((1, 2, 2), (3, 4, 4)):
        gemm_tiled(torch.ones(4, 6), torch.ones(6, 6), *tiles)
        steps.append(len(gemm_tiled.watch.steps))
    assert steps[1] <= 0.9 * steps[0], (
        "gemm_tiled runs as many operators with tiles (3, 4, 4) as with (1, 2, 2): the tile sizes are not used. Walk over "
        "the tiles of C, and for each of them over the tiles along K."
    )


@visible(**TILED)
def check_gemm_tiled(gemm_tiled):
    """Check whole tiles, edges and large tiles; one step at a time, with a wide accumulator."""
    a, b = torch.arange(40.0).reshape(8, 5) % 7 - 3, torch.arange(30.0).reshape(5, 6) % 5 - 2
    for tiles, hint in (
        ((4, 3, 5), "Every tile is whole here."),
        ((4, 3, 1), "Is each step along K added to the sum of the steps before?"),
        ((3, 4, 2), "Look at the tiles at the edges."),
        ((1, 6, 1), "Are rows cut by tile_m, and columns by tile_n?"),
        ((64, 32, 128), "Here the tiles are larger than the matrices."),
    ):
        expect_product(fix_tiles(gemm_tiled, *tiles), a, b, f"gemm_tiled of (8, 5) @ (5, 6) with tiles {tiles}", hint)
    expect_tiles_used(gemm_tiled)
    expect_wide_accumulator(gemm_tiled, torch.randn(16, 128).to(BF16), torch.randn(128, 16).to(BF16), (16, 16, 2))
    expect_product(fix_tiles(gemm_tiled, 3, 2, 2), b.T.double(), a.T.double(), "gemm_tiled of (6, 5) @ (5, 8)", "")
    expect_follows_device(gemm_tiled, (2, 4), (4, 3), 2, 2, 2, what="gemm_tiled(a, b)")


class Queue:
    """A device that accepts work immediately and finishes it later. It logs the times of calls and waits."""

    def __init__(self, work_ms: Sequence[float] = (), older_ms: float = 0.0):
        self.work_ms, self.busy_until = list(work_ms), time.perf_counter() + older_ms / 1e3
        self.log: list[str] = []
        self.launched: list[float] = []  # time of each call, in seconds
        self.waited: list[float] = []  # end of the first wait after each call, in seconds
        self.ready: float | None = None  # end of the first wait, in seconds

    def launch(self, work_ms: float = 0.0) -> None:
        """Take the next work, or this one if there is no next, and return."""
        now = time.perf_counter()
        if len(self.log) > 1000:
            raise AssertionError("fn was called over and over: call it n_calls times.")
        self.log.append("call")
        self.launched.append(now)
        work = self.work_ms.pop(0) if self.work_ms else work_ms
        self.busy_until = max(self.busy_until, now) + work / 1e3

    def synchronize(self) -> None:
        """Wait until all work is done."""
        self.log.append("wait")
        while (rest := self.busy_until - time.perf_counter()) > 0:
            time.sleep(rest)
        self.ready = self.ready or time.perf_counter()
        if len(self.waited) < len(self.launched):
            self.waited.append(time.perf_counter())


def expect_times(time_calls, work_ms: list[float], older_ms: float) -> None:
    """Assert that time_calls waits at the right moments and times each call of a pretend device on its own, in ms."""
    device = Queue(work_ms, older_ms)
    begin = time.perf_counter()
    times = time_calls(device.launch, len(work_ms), device.synchronize)
    end = time.perf_counter()
    if not isinstance(times, list | tuple) or len(times) != len(work_ms):
        raise AssertionError(
            f"time_calls should return a list of {len(work_ms)} times, one a call, and returned {times!r}."
        )
    if (called := device.log.count("call")) != len(work_ms):
        raise AssertionError(f"fn should be called n_calls = {len(work_ms)} times, and was called {called} times.")
    if device.log[0] != "wait":
        raise AssertionError("wait for the device before the clock starts: older work is billed to the first call.")
    if any(b != "wait" for a, b in zip(device.log, [*device.log[1:], ""], strict=True) if a == "call"):
        raise AssertionError("wait for the device after each call, before the clock stops: the work is still running.")
    # The largest right time of a call is from the end of the wait before it to the next call. Both are measured, so a
    # busy machine does not change the verdict.
    begins, ends = [device.ready or begin, *device.waited], [*device.launched[1:], end]
    most_ms = [(stop - start) * 1e3 * 1.01 + 1 for start, stop in zip(begins, ends, strict=False)]
    calls = list(zip([float(t) for t in times], work_ms, most_ms, strict=True))
    for i, (got, work, most) in enumerate(calls):
        if got < 0.99 * work:
            hint = "Is the clock stopped after the wait, and is each call timed on its own?"
            if all(0.99 * work <= got * 1e3 <= most for got, work, most in calls):
                hint = "It looks like seconds: the answer should be in ms."
            raise AssertionError(f"call {i} took the device {work:.1f} ms, and time_calls says {got:.4g} ms. {hint}")
        if not got <= most:
            raise AssertionError(
                f"time_calls says {got:.4g} ms for call {i}, and only {most - 1:.4g} ms went by between the calls around it. Is it in ms, "
                "does the clock of each call start anew, behind a wait for older work, and is each call timed on its own?"
            )


@visible("1.3", "Timing")
def check_time_calls(time_calls):
    """Check three calls of a pretend device."""
    expect_times(time_calls, [30.0, 5.0, 15.0], 40.0)


@visible("1.4", "MACs, FLOPs and bytes")
def check_gemm_and_gemv_costs(gemm_macs_flops_bytes, gemv_macs_flops_bytes):
    """Check one product and one GEMV in two dtypes."""
    for kind, size in ((BF16, 2), (FP32, 4)):
        gemm = {
            "The result C is written, too.": 520 * size,
            DTYPE: 1199 * (6 - size),
            ELEMENTS: 1199,
            "A and B are read once, not once a product.": [6790 * size, 7469 * size],
            "C is written once; nothing is read from it.": 1878 * size,
            "Look at the shapes: A (M, K), B (K, N).": 1407 * size,
        }
        gemv = {
            "The result y is written, too.": 5194 * size,
            DTYPE: 5291 * (6 - size),
            ELEMENTS: 5291,
            "y has M elements, and x has K.": 5247 * size,
            "x has K elements, and y has M.": 5335 * size,
            "The vector x is read, too.": 5238 * size,
        }
        for name, got, expected, mistakes in (
            ("gemm_macs_flops_bytes(7, 97, 5", gemm_macs_flops_bytes(7, 97, 5, kind), (3395, 6790, 1199 * size), gemm),
            ("gemv_macs_flops_bytes(97, 53", gemv_macs_flops_bytes(97, 53, kind), (5141, 10282, 5291 * size), gemv),
        ):
            items = expect_items(got, "macs, flops, bytes", f"{name}, {kind})")
            for value, right, unit in zip(items, expected, ("MACs", "FLOPs", "bytes"), strict=True):
                known = mistakes if unit == "bytes" else None
                expect_number(value, right, rel=0, unit=unit, what=f"{name}, {kind}), {unit},", mistakes=known)


@visible("Bonus 1.6", "Tile traffic")
def check_tile_traffic(tiled_gemm_bytes, largest_square_tile):
    """Check one tile, tiles at the edges, and the largest tile that fits."""
    one_tile = "bytes with one tile that holds all of C (everything travels once)"
    got = tiled_gemm_bytes(20, 10, 257, 20, 10, FP32)
    expect_number(got, 31640, rel=0, unit="bytes", what=one_tile, mistakes={"C is written, too.": 30840})
    for kind, size in ((FP32, 4), (BF16, 2)):
        mistakes: dict[str, float] = {
            "A is read once for each tile COLUMN of C, and B once for each tile ROW.": 831 * size,
            "The last tile is there as well if it is not whole: part of a tile is a tile.": 493 * size,
            "Part of a tile is a tile.": 9163 / 15 * size,
            "C is written, too.": 650 * size,
            DTYPE: 727 * (6 - size),
            ELEMENTS: 727,
            "C is written once, not once a step.": 958 * size,
        }
        got, what = tiled_gemm_bytes(11, 7, 13, 3, 5, kind), f"tiled_gemm_bytes(11, 7, 13, 3, 5, {kind})"
        expect_number(got, 727 * size, rel=0, unit="bytes", what=what, mistakes=mistakes)
    two, wide = "There are two input tiles.", "The accumulator is fp32."
    for memory, kind, right, known in (
        (8192, torch.float16, 32, {two: 37, wide: 39}),
        (8191, torch.float16, 31, {two: 37, wide: 38}),
        (12288, FP32, 32, {"The input tiles are of dtype.": 43}),
    ):
        mistakes = {"This one does not fit any more.": right + 1, "A larger one fits.": right - 1, **known}
        what = f"largest_square_tile({memory}, 32, {kind})"
        expect_number(largest_square_tile(memory, 32, kind), right, rel=0, what=what, mistakes=mistakes)


@visible("2.1", "Arithmetic intensity")
def check_intensities(gemm_intensity, gemv_intensity):
    """Check one product and one GEMV in two dtypes."""
    for function, name, arguments, elements, inverse, known in (
        (gemm_intensity, "gemm_intensity(300, 200, 100", (300, 200, 100), 109.0909, 0.018333, {"C is written, too.": 120}),
        (gemv_intensity, "gemv_intensity(300, 100", (300, 100), 1.973684, 1.013333, {
            "y is written, too.": 0.996678, "x is read, too.": 0.990099, "x is read and y is written, too.": 1.0,
        }),
    ):  # fmt: skip
        for kind, size in ((BF16, 2), (FP32, 4)):
            mistakes = {hint: number * 2 / size for hint, number in known.items()}
            mistakes |= {UPSIDE_DOWN: inverse * size / 2, ELEMENTS: elements}
            mistakes |= {MACS: elements / size / 2, DTYPE: elements / (6 - size)}
            what = f"{name}, {kind})"
            expect_number(
                function(*arguments, kind), elements / size, rel=1e-5, unit="FLOPs/Byte", what=what, mistakes=mistakes
            )


@visible("2.2", "Ridge point and roof")
def check_ridge_and_roof(ridge_point, attainable_tflops):
    """Check the ridge of one machine, and its roof on both sides."""
    mistakes = {"It is the peak over the bandwidth.": 0.081, "It is a ratio, not a product.": 8.1}
    what = "ridge_point(10 TFLOP/s, 0.81 TB/s)"
    expect_number(ridge_point(10.0, 0.81), 12.345679, rel=1e-6, unit="FLOPs/Byte", what=what, mistakes=mistakes)
    lower = "The lower of the two roofs limits"
    for place, intensity, right, known in (
        ("left of", 3.1416, 1.25664, {f"{lower}, not the higher.": 10.0, "Times the bandwidth?": [7.854, 3.1416]}),
        ("right of", 100.0, 10.0, {f"{lower}: no kernel is faster than the peak.": 40.0}),
        ("at", 25.0, 10.0, {}),
    ):
        what = f"attainable_tflops({intensity}, 10.0, 0.4), {place} the ridge,"
        got = attainable_tflops(intensity, 10.0, 0.4)
        expect_number(got, right, rel=1e-6, unit="TFLOP/s", what=what, mistakes=known)


@visible("2.3", "Achieved speed and the smallest compute-bound GEMM")
def check_achieved_and_smallest(achieved_tflops, smallest_compute_bound_gemm):
    """Check one speed, and the smallest n at three ridges; an integer n reaches one of the ridges exactly."""
    mistakes = {"The latency is in ms, not in seconds.": 2.857143e-4, "TFLOP/s, not GFLOP/s.": 285.7143}
    got = achieved_tflops(2 * 1000**3, 7.0)
    expect_number(got, 0.2857143, rel=1e-6, unit="TFLOP/s", what="2 GFLOPs in 7 ms", mistakes=mistakes)
    down, integer = "This one is still memory-bound: which way must n be rounded?", "n is an integer."
    equal, dtype = "An intensity equal to the ridge reaches it.", f"{DTYPE} (Or is a factor of 2 lost?)"
    three, macs = "Three matrices travel: A, B and C.", "The intensity has FLOPs, two for each MAC."
    elements = "The intensity has bytes, not elements."
    for ridge, kind, right, known in (
        (200.1, FP32, 1201, {down: 1200, integer: 1200.6, dtype: 601, three: 801, macs: 2402, elements: [300, 301]}),
        (200.1, BF16, 601, {down: 600, integer: 600.3, dtype: 1201, three: 401, elements: 301}),
        (40.0, FP32, 240, {equal: 241, dtype: 120, three: 160, macs: 480}),
    ):
        got, what = smallest_compute_bound_gemm(ridge, kind), f"smallest_compute_bound_gemm({ridge}, {kind})"
        expect_number(got, right, rel=0, what=what, mistakes=known)
