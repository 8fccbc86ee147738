"""Part 1: products in loops and tiles, timing, counts of work and traffic."""

from __future__ import annotations

import math
import time

import torch

from instructor.checks.common import (
    DTYPES,
    Draw,
    dtype_name,
    expect_counts,
    expect_follows_device,
    expect_value,
    poisoned_memory,
)
from utils.checking import MATMUL, check, expect_close

# Sums of a few products of numbers near 1. float64 is here for the dtype of the result, not for its precision: a sum that
# was kept in float32 is right.
_RTOL, _ATOL = 1e-4, 1e-4
_WIDE_ENOUGH = (
    0.008  # rms error of a bf16 product with K = 512: 0.003 with a float32 accumulator, 0.02 with one in bf16
)


def _expect_product(gemm, a: torch.Tensor, b: torch.Tensor, what: str, hint: str) -> None:
    """Assert gemm(a, b) = a @ b, also with NaN; the inputs must not change, and unwritten memory must not be read."""
    with poisoned_memory():
        got = gemm(a, b)
    expect_close(got, a @ b, rtol=_RTOL, atol=_ATOL, what=what, hint=hint)


def _name(function: str, m: int, k: int, n: int, dtype: torch.dtype, more: str = "") -> str:
    return f"{function} of ({m}, {k}) @ ({k}, {n}){more} in {dtype_name(dtype)}"


@check(
    "1.1", "Naive GEMM", forbids=MATMUL, largest=1, hint="write the three loops yourself, with one a[i, k] at a time"
)
def gemm_naive(gemm_naive, seed=None):
    """Check any shape and dtype; one element at a time, without a product of the library."""
    draw = Draw(seed)
    hint = "Which index does each of the three loops run over, and where is the sum set back to zero?"
    for dtype in (torch.float32, torch.float64):
        shapes = [tuple(draw.sizes(3, 3, 7)), (1, draw.size(4, 9), 1), (draw.size(3, 6), 1, draw.size(3, 6)), (4, 4, 4)]
        for m, k, n in shapes:
            what = _name("gemm_naive", m, k, n, dtype)
            _expect_product(gemm_naive, draw.normal(m, k, dtype=dtype), draw.normal(k, n, dtype=dtype), what, hint)
    a, b = draw.normal(5, 3).T, draw.normal(4, 5).T  # not contiguous
    a[1, 2] = math.nan
    _expect_product(gemm_naive, a, b, "gemm_naive of transposed views, with a NaN in row 1 of a,", hint)
    expect_follows_device(gemm_naive, (2, 3), (3, 4), what="gemm_naive(a, b)")


@check(
    "1.2",
    "Tiled GEMM",
    forbids=MATMUL,
    largest="one step of its tiles",
    hint="build the product of two tiles from elementwise products and sums. Are the tile sizes used?",
)
def gemm_tiled(gemm_tiled, seed=None):
    """Check tiles and matrices of any size; one tile at a time, without a product of the library for more."""
    draw = Draw(seed)
    hint = "Look at the tiles at the edges, and at where the accumulator starts and ends."

    def with_tiles(*tiles):
        return lambda x, y: gemm_tiled.limited(math.prod(tiles))(x, y, *tiles)

    # Whole tiles come first, so that the message separates errors in the tiling from errors at the edges.
    for (m, k, n), tiles, words in (
        ((8, 12, 4), (4, 2, 3), "Every tile is whole here."),
        ((10, 12, 11), (5, 4, 3), hint),
        (draw.sizes(3, 9, 16), draw.sizes(3, 2, 7), hint),
        (draw.sizes(3, 9, 30), (64, 32, 128), hint),
        (draw.sizes(3, 5, 13), (1, 5, 1), hint),
    ):
        for dtype in (torch.float32, torch.float64):
            what = _name("gemm_tiled", m, k, n, dtype, f" with tiles {tuple(tiles)}")
            a, b = draw.normal(m, k, dtype=dtype), draw.normal(k, n, dtype=dtype)
            _expect_product(with_tiles(*tiles), a, b, what, words)
    _expect_tiles_used(gemm_tiled, draw)
    _expect_tiles_copied(gemm_tiled, draw)
    a, b = draw.normal(70, 9), draw.normal(9, 5)
    _expect_product(gemm_tiled, a, b, _name("gemm_tiled", 70, 9, 5, a.dtype, " with the default tiles"), hint)
    a, b = draw.normal(7, 10).T, draw.normal(9, 7).T
    a[1, 2] = math.nan
    _expect_product(with_tiles(4, 4, 4), a, b, "gemm_tiled of transposed views, with a NaN in row 1 of a,", hint)
    _expect_wide_accumulator(gemm_tiled, draw)
    expect_follows_device(lambda x, y: gemm_tiled(x, y, 2, 2, 2), (3, 5), (5, 4), what="gemm_tiled(a, b)")


def _expect_tiles_used(gemm_tiled, draw: Draw) -> None:
    """Assert that larger tiles take fewer steps: three loops over single elements stay inside of any tile."""
    a, b, steps = draw.normal(6, 8), draw.normal(8, 9), []
    for tiles in ((1, 2, 2), (3, 4, 4)):
        gemm_tiled(a, b, *tiles)
        steps.append(len(gemm_tiled.sizes.steps))
    if steps[1] > 0.9 * steps[0]:
        raise AssertionError(
            "gemm_tiled runs as many operators with tiles (3, 4, 4) as with (1, 2, 2): the tile sizes are not used. Walk over "
            "the tiles of C, and for each of them over the tiles along K."
        )


def _expect_tiles_copied(gemm_tiled, draw: Draw) -> None:
    """Assert that no part of a matrix that is copied is larger than what one step works on: a strip of all of K is."""
    # In 16 bits, so that a conversion to a wider dtype is a copy.
    a, b = (draw.normal(*shape, dtype=torch.bfloat16) for shape in ((10, 40), (40, 8)))
    tiles = 5, 4, 2
    gemm_tiled(a, b, *tiles)
    most, whole = math.prod(tiles), min(a.numel(), b.numel())
    if found := next(((name, n) for name, n in gemm_tiled.sizes.copied if most < n < whole), None):
        raise AssertionError(
            f"gemm_tiled of (10, 40) @ (40, 8) copied or converted {found[1]} elements of a matrix at once ({found[0]}), and a "
            f"step with tiles {tiles} works on at most {most}. Fetch a tile of A and a tile of B in each step along K, not a strip."
        )


def _expect_wide_accumulator(gemm_tiled, draw: Draw) -> None:
    """Assert that a long sum of bf16 products is added in at least float32; float64 and float32 alike are right."""
    a, b = draw.normal(8, 512, dtype=torch.bfloat16), draw.normal(512, 8, dtype=torch.bfloat16)
    got = gemm_tiled(a, b, 8, 8, 16)
    exact = a.double() @ b.double()
    # Wrong values, shapes and dtypes have their own messages.
    expect_close(got, exact.to(a.dtype), rtol=0.2, atol=10.0, what="gemm_tiled of (8, 512) @ (512, 8) in bfloat16")
    error = float(((got.double() - exact).square().mean() / exact.square().mean()).sqrt())
    if error > _WIDE_ENOUGH:
        raise AssertionError(
            f"gemm_tiled of (8, 512) @ (512, 8) in bfloat16 is off by {error:.1%} (root mean square); rounding the result "
            "alone is off by 0.2%. In which dtype does the accumulator add 512 products?"
        )


class _Queue:
    """A device that accepts work at once and finishes it later; it logs the calls and the waits, with their times."""

    def __init__(self, work_ms: list[float], older_ms: float = 0.0):
        self.work_ms, self.busy_until = list(work_ms), time.perf_counter() + older_ms / 1e3
        self.log: list[str] = []
        self.launched: list[float] = []  # seconds: when each call came
        self.waited: list[float] = []  # seconds: when the first wait after each call was over
        self.ready: float | None = None  # seconds: when the first wait of all was over

    def launch(self) -> None:
        now = time.perf_counter()
        if len(self.log) > 1000:
            raise AssertionError("fn was called over and over: call it n_calls times.")
        self.log.append("call")
        self.launched.append(now)
        work = self.work_ms.pop(0) if self.work_ms else 0.0
        self.busy_until = max(self.busy_until, now) + work / 1e3

    def synchronize(self) -> None:
        self.log.append("wait")
        while (rest := self.busy_until - time.perf_counter()) > 0:
            time.sleep(rest)
        self.ready = self.ready or time.perf_counter()
        if len(self.waited) < len(self.launched):
            self.waited.append(time.perf_counter())


@check("1.3", "Timing")
def time_calls(time_calls, seed=None):
    """Check that the function waits at the right moments and times each call separately, in ms."""
    draw = Draw(seed)
    work_ms = [draw.real(40, 60), draw.real(4, 6), draw.real(15, 25)]
    device = _Queue(work_ms, older_ms=80.0)
    begin = time.perf_counter()
    times = time_calls(device.launch, len(work_ms), device.synchronize)
    end = time.perf_counter()
    if not isinstance(times, list | tuple) or len(times) != len(work_ms):
        raise AssertionError(f"time_calls should return {len(work_ms)} times, one a call, and returned {times!r}.")
    calls = device.log.count("call")
    if calls != len(work_ms):
        raise AssertionError(f"fn should be called n_calls = {len(work_ms)} times, and was called {calls} times.")
    if device.log[0] != "wait":
        raise AssertionError(
            "wait for the device before the clock starts: work from before is billed to the first call."
        )
    after = [b for a, b in zip(device.log, [*device.log[1:], ""], strict=True) if a == "call"]
    if any(event != "wait" for event in after):
        raise AssertionError("wait for the device after each call, before the clock stops: the work is still running.")
    # At most, a call is timed from the end of the wait before it to the next call. The limits are measured, so a busy machine
    # does not change the verdict.
    most_ms = [
        (stop - start) * 1e3 * 1.01 + 1
        for start, stop in zip([device.ready or begin, *device.waited], [*device.launched[1:], end], strict=False)
    ]
    for i, (got, work, most) in enumerate(zip([float(t) for t in times], work_ms, most_ms, strict=True)):
        if got < 0.99 * work:
            hint = "Is the clock stopped after the wait, and is each call timed on its own?"
            if 0.99 * work <= got * 1e3 <= most:
                hint = "It looks like seconds: the answer should be in ms."
            raise AssertionError(f"call {i} took the device {work:.1f} ms, and time_calls says {got:.4g} ms. {hint}")
        if not got <= most:
            raise AssertionError(
                f"time_calls says {got:.4g} ms for call {i}, and only {most - 1:.4g} ms went by between the calls "
                "around it. Is it in ms, does the clock of each call start anew, and is each call timed on its own?"
            )


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
        for _ in range(4):
            fast, tile_k = draw.size(20_000, 300_000), draw.choice((8, 16, 32, 64))
            t = max(x for x in range(300) if 4 * x * x + 2 * x * tile_k * dtype.itemsize <= fast)
            what = f"largest_square_tile({fast}, {tile_k}, {dtype_name(dtype)})"
            expect_value(
                largest_square_tile(fast, tile_k, dtype),
                t,
                "",
                what,
                {"This one does not fit any more.": t + 1, "A larger one fits.": t - 1},
            )
