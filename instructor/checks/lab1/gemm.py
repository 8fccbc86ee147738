"""Part 1: products in loops and tiles, timing, counts of work and traffic."""

from __future__ import annotations

import math
import time

import torch

from instructor.checks.common import (
    DTYPES,
    Draw,
    SizeWatch,
    dtype_name,
    expect_counts,
    expect_follows_device,
    expect_unchanged,
    expect_value,
    let_wait,
    poisoned_memory,
)
from utils.checking import MATMUL, check, expect_close, forbid, forbid_leaving, watch_operations
from utils.checking.sizes import MOVES, computing_name, tensors_in

# Sums of a few products of numbers near 1. float64 is here for the dtype of the result, not for its precision: a sum that
# was kept in float32 is right.
_RTOL, _ATOL = 1e-4, 1e-4
_WIDE_ENOUGH = (
    0.008  # rms error of a bf16 product with K = 512: 0.003 with a float32 accumulator, 0.02 with one in bf16
)


def _expect_product(gemm, a: torch.Tensor, b: torch.Tensor, what: str, hint: str) -> None:
    """Assert gemm(a, b) = a @ b, also with NaN; the inputs must not change, and unwritten memory must not be read."""
    copies = a.clone(), b.clone()
    with poisoned_memory():
        got = gemm(a, b)
    expect_unchanged(copies, (a, b), what)
    expect_close(got, copies[0] @ copies[1], rtol=_RTOL, atol=_ATOL, what=what, hint=hint)


def _name(function: str, m: int, k: int, n: int, dtype: torch.dtype, more: str = "") -> str:
    return f"{function} of ({m}, {k}) @ ({k}, {n}){more} in {dtype_name(dtype)}"


@check("1.1", "Naive GEMM")
def gemm_naive(gemm_naive, seed=None):
    """Check any shape and dtype; one element at a time, without a product of the library."""
    draw = Draw(seed)
    m, k, n = draw.sizes(3, 3, 7)
    a, b = draw.normal(m, k), draw.normal(k, n)
    expected = a @ b
    watched = _one_at_a_time(gemm_naive, a, b)
    hint = "Which index does each of the three loops run over, and where is the sum set back to zero?"
    for shape in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):  # many rows, a long sum, many columns: no other way for these
        rows, inner, columns = (draw.size(2, 3) if short else draw.size(40, 60) for short in shape)
        x, y = draw.normal(rows, inner), draw.normal(inner, columns)
        got = _one_at_a_time(gemm_naive, x, y)
        what = _name("gemm_naive", rows, inner, columns, x.dtype)
        expect_close(got, x @ y, rtol=_RTOL, atol=_ATOL, what=what, hint=hint)
    watched_what = _name("gemm_naive", m, k, n, a.dtype)
    for dtype in (torch.float32, torch.float64):
        shapes = [tuple(draw.sizes(3, 3, 7)), (1, draw.size(4, 9), 1), (draw.size(3, 6), 1, draw.size(3, 6)), (4, 4, 4)]
        for m, k, n in shapes:
            what = _name("gemm_naive", m, k, n, dtype)
            _expect_product(gemm_naive, draw.normal(m, k, dtype=dtype), draw.normal(k, n, dtype=dtype), what, hint)
    a, b = draw.normal(5, 3).T, draw.normal(4, 5).T  # not contiguous
    a[1, 2] = math.nan
    _expect_product(gemm_naive, a, b, "gemm_naive of transposed views, with a NaN in row 1 of a,", hint)
    expect_close(watched, expected, rtol=1e-4, atol=1e-5, what=watched_what, hint=hint)
    _expect_each_product(gemm_naive, draw, "gemm_naive")
    expect_follows_device(gemm_naive, (2, 3), (3, 4), what="gemm_naive(a, b)")


def _expect_each_product(gemm, draw: Draw, what: str) -> None:
    """Assert that each number of A is multiplied by numbers of B alone: sums of them, as Strassen and Winograd multiply, lose digits."""
    m, k, n = (draw.size(4, 7) for _ in range(3))
    a, b = draw.normal(m, k, dtype=torch.float64), draw.normal(k, n, dtype=torch.float64)
    far = 10.0 ** torch.arange(12, 12 - 4 * 7, -4, dtype=torch.float64)
    one = torch.ones(7, dtype=torch.float64)
    for rows, inner, columns in ((one[:m], 1e12 * one[:k], one[:n]), (far[:m], one[:k], far[:n].flip(0))):
        got = gemm(a * rows[:, None] * inner, b / inner[:, None] * columns)
        if isinstance(got, torch.Tensor) and got.shape == (m, n):
            got = got / rows[:, None] / columns
        expect_close(
            got,
            a @ b,
            rtol=1e-3,
            atol=1e-3,
            what=f"{what} of ({m}, {k}) @ ({k}, {n}) in float64, with large and small numbers, and their sizes taken out again,",
            hint="Multiply each element of a row of A by the element of a column of B that belongs to it, and add these products.",
        )


def _one_at_a_time(gemm_naive, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return gemm_naive(a, b); assert that each operator works on single numbers, and none is a product of the library."""
    with SizeWatch() as sizes, watch_operations() as watch:
        got = gemm_naive(a, b)
    forbid(watch, MATMUL, hint="write the three loops yourself")
    forbid_leaving(watch, hint="Read one element at a time: a[i, k], or a[i, k].item().")
    # Whole numbers count as well: the bits of real ones can be multiplied.
    if found := sizes.over(1) or sizes.over(1, sizes.computing, but=("result_type", "promote_types")):
        line = watch.lines.get(found[0])
        raise AssertionError(
            f"the operator {found[0]} worked on {found[1]} elements at once. Question 1.1 asks for one "
            f"multiply-accumulate on two numbers in each pass of the inner loop." + (f"\n  {line}" if line else "")
        )
    return got


@check("1.2", "Tiled GEMM")
def gemm_tiled(gemm_tiled, seed=None):
    """Check tiles and matrices of any size; one tile at a time, without a product of the library for more."""
    draw = Draw(seed)
    hint = "Look at the tiles at the edges, and at where the accumulator starts and ends."

    def tiles(m, n, k):
        return f" with tiles ({m}, {n}, {k})"

    # Whole tiles come first, so that the message separates errors in the tiling from errors at the edges.
    a, b = draw.normal(8, 12), draw.normal(12, 4)
    what = _name("gemm_tiled", 8, 12, 4, a.dtype, tiles(4, 2, 3))
    _expect_product(lambda x, y: gemm_tiled(x, y, 4, 2, 3), a, b, what, "Every tile is whole here.")

    a, b = draw.normal(20, 24), draw.normal(24, 22)
    expected = a @ b
    with SizeWatch() as sizes, watch_operations() as watch:
        watched = gemm_tiled(a, b, 5, 4, 3)
    forbid(watch, MATMUL, hint="build the product of two tiles from elementwise products and sums")
    forbid_leaving(watch)
    if found := sizes.over(5 * 4 * 3) or sizes.over(5 * 4 * 3, sizes.computing, but=("result_type", "promote_types")):
        line = watch.lines.get(found[0])
        raise AssertionError(
            f"the operator {found[0]} worked on {found[1]} elements at once, and a tile of (5, 4, 3) has {5 * 4 * 3}. "
            "Are the tile sizes used, and is every operation inside of one tile?" + (f"\n  {line}" if line else "")
        )
    _expect_tiles_used(gemm_tiled, draw)  # before the counts: these would blame what follows from it
    most = 20 * 24 * 24  # multiply-accumulates of whole tiles
    if sizes.multiplied > 1.3 * most:
        raise AssertionError(
            f"gemm_tiled multiplied {sizes.multiplied:,} pairs of elements for (20, 24) @ (24, 22), and the tiles (5, 4, 3) hold "
            f"{most:,}: each is multiplied once, and nothing else is."
        )
    # Bonus 1.6 counts what tiles fetch: A once for each tile column of C, B once for each tile row. Whole copies come on top.
    most = 6 * a.numel() + 4 * b.numel() + 2 * (a.numel() + b.numel() + expected.numel())
    if sizes.moved > 1.5 * most:
        raise AssertionError(
            f"gemm_tiled copied {sizes.moved:,} elements, and its tiles hold {most:,}, each fetched once. Fetch a tile before the "
            "loop that multiplies its columns and rows."
        )
    _expect_tiles_copied(gemm_tiled, draw)
    _let_long_steps_wait(gemm_tiled, draw)
    for dtype in (torch.float32, torch.float64):
        for (m, k, n), (tm, tn, tk) in (
            (draw.sizes(3, 9, 20), draw.sizes(3, 2, 7)),
            (draw.sizes(3, 9, 30), (64, 32, 128)),
            (draw.sizes(3, 5, 13), (1, 5, 1)),
        ):
            what = _name("gemm_tiled", m, k, n, dtype, tiles(tm, tn, tk))
            a, b = draw.normal(m, k, dtype=dtype), draw.normal(k, n, dtype=dtype)
            _expect_product(lambda x, y, t=(tm, tn, tk): gemm_tiled(x, y, *t), a, b, what, hint)
    a, b = draw.normal(70, 9), draw.normal(9, 5)
    _expect_product(gemm_tiled, a, b, _name("gemm_tiled", 70, 9, 5, a.dtype, " with the default tiles"), hint)
    a, b = draw.normal(7, 10).T, draw.normal(9, 7).T
    a[1, 2] = math.nan
    what = "gemm_tiled of transposed views, with a NaN in row 1 of a,"
    _expect_product(lambda x, y: gemm_tiled(x, y, 4, 4, 4), a, b, what, hint)
    what = _name("gemm_tiled", 20, 24, 22, torch.float32, tiles(5, 4, 3))
    expect_close(watched, expected, rtol=1e-4, atol=1e-5, what=what, hint=hint)
    _expect_tiles_everywhere(gemm_tiled, draw)
    _expect_each_product(lambda x, y: gemm_tiled(x, y, 4, 2, 3), draw, "gemm_tiled with tiles (4, 2, 3)")
    _expect_wide_accumulator(gemm_tiled, draw)
    expect_follows_device(lambda x, y: gemm_tiled(x, y, 2, 2, 2), (3, 5), (5, 4), what="gemm_tiled(a, b)")


def _expect_tiles_everywhere(gemm_tiled, draw: Draw) -> None:
    """Assert that nothing is larger than a step with many rows, a long sum or many columns either, in any dtype."""
    for long, dtype in enumerate(draw.some(4, (torch.float64, torch.float32, torch.bfloat16, torch.float16))):
        m, k, n = (draw.size(150, 250) if place == long % 3 else draw.size(3, 5) for place in range(3))
        tiles = draw.size(5, 9), draw.size(5, 9), draw.size(2, 4)
        a, b = draw.normal(m, k, dtype=dtype), draw.normal(k, n, dtype=dtype)
        with SizeWatch() as sizes, watch_operations() as watch:
            got = gemm_tiled(a, b, *tiles)
        forbid(watch, MATMUL, hint="build the product of two tiles from elementwise products and sums")
        forbid_leaving(watch)
        what = _name("gemm_tiled", m, k, n, dtype, f" with tiles ({tiles[0]}, {tiles[1]}, {tiles[2]})")
        if found := sizes.over(math.prod(tiles)):
            raise AssertionError(
                f"the operator {found[0]} worked on {found[1]} elements at once in {what}, and a step has {math.prod(tiles)} at most. Is "
                "every operation inside of one tile, for matrices of any size?"
            )
        rough = 0.2 if dtype.itemsize == 2 else 1e-4  # how exact it is in 16 bits is looked at below
        expect_close(got, (a.double() @ b.double()).to(dtype), rtol=rough, atol=rough, what=what)


def _expect_tiles_used(gemm_tiled, draw: Draw) -> None:
    """Assert that other tile sizes make other steps: three loops over single elements stay inside of any tile."""
    a, b, steps = draw.normal(6, 8), draw.normal(8, 9), []
    for tiles in ((2, 3, 4), (3, 2, 2)):
        with SizeWatch() as sizes:
            gemm_tiled(a, b, *tiles)
        steps.append(sizes.steps)
    long, ends = max(map(len, steps)), 0
    for one, other in (steps, [list(reversed(part)) for part in steps]):
        ends += next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), long)
    if ends > 0.8 * long:
        raise AssertionError(
            "gemm_tiled does the same steps with tiles (2, 3, 4) and (3, 2, 2): the tile sizes are not used. Walk over "
            "the tiles of C, and for each of them over the tiles along K."
        )


def _expect_tiles_copied(gemm_tiled, draw: Draw) -> None:
    """Assert that no part of a matrix that is copied is larger than what one step works on: a strip of all of K is."""
    # In 16 bits, so that a conversion to a wider dtype is a copy.
    a, b = (draw.normal(*shape, dtype=torch.bfloat16) for shape in ((10, 120), (120, 8)))
    tiles = 5, 4, 2
    with SizeWatch() as sizes:
        gemm_tiled(a, b, *tiles)
    most, whole = math.prod(tiles), min(a.numel(), b.numel())
    if found := next(((name, n) for name, n in sizes.copied if most < n < whole), None):
        raise AssertionError(
            f"gemm_tiled of (10, 120) @ (120, 8) copied or converted {found[1]} elements of a matrix at once ({found[0]}), and a "
            f"step with tiles {tiles} works on at most {most}. Fetch a tile of A and a tile of B in each step along K, not a strip."
        )


class _Sides(SizeWatch):
    """Records the longest dimension that an operator computes on."""

    def __init__(self) -> None:
        super().__init__()
        self.side: tuple[int, str] = (0, "")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = computing_name(func, args, kwargs or {})
        if name not in MOVES:
            real = [t for t in tensors_in((*args, *(kwargs or {}).values(), result)) if t.is_floating_point()]
            self.side = max(self.side, *((n, name) for t in real for n in t.shape), (0, ""))
        return result


class _Roundings(SizeWatch):
    """Counts the numbers that were rounded from 32 bits or more to 16 and computed with after that, as a running sum is."""

    def __init__(self) -> None:
        super().__init__()
        self.again = 0
        self.rounded: set[int] = set()  # ids of tensors that were made, or written to, by rounding

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = computing_name(func, args, kwargs or {})
        given = [t for t in tensors_in(args) if t.is_floating_point() and t.numel() > 1]
        # What is written over, such as the matrix C of which one tile is done, is not read.
        read = given[1:] if name == "copy" else given
        narrow = [t for t in read if t.itemsize < 4 and self._memory.get(id(t), id(t)) in self.rounded]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made = [t for t in tensors_in((result,)) if t.is_floating_point()]
        if narrow and any(t.itemsize >= 4 for t in made):
            self.again += max(t.numel() for t in narrow)
        if any(t.itemsize >= 4 for t in read):
            self.rounded |= {self._memory.get(id(t), id(t)) for t in made if t.itemsize < 4}
        return result


def _let_long_steps_wait(gemm_tiled, draw: Draw) -> None:
    """Let an answer wait whose steps along K are longer than tile_k: with few rows and columns they are as small as a step."""
    m, n, k = draw.size(1, 2), draw.size(1, 2), draw.size(40, 60)
    tiles = draw.size(6, 9), draw.size(6, 9), draw.size(2, 4)
    a, b = draw.normal(m, k), draw.normal(k, n)
    with _Sides() as sides:
        gemm_tiled(a, b, *tiles)
    if sides.side[0] > max(tiles):
        let_wait(
            f"works along {sides.side[0]} numbers at once (in {sides.side[1]}), and no side of its tiles {tiles} is as long"
        )


def _expect_small_steps_kept(gemm_tiled, draw: Draw) -> None:
    """Assert that the accumulator has all 24 bits of float32: ones are added to 2^22, which is taken away at the end."""
    k = draw.size(6, 12)
    a, b = torch.ones(3, k, dtype=torch.bfloat16), torch.ones(k, 5, dtype=torch.bfloat16)
    a[:, 0], a[:, -1], b[0], b[-1] = 2048, -2048, 2048, 2048
    got = gemm_tiled(a, b, 2, 3, 1)
    if not torch.equal(got, torch.full_like(got, k - 2)):
        raise AssertionError(
            f"gemm_tiled of (3, {k}) @ ({k}, 5) in bfloat16 adds {k - 2} times 1 to 2^22, takes 2^22 away, and gives {got[0, 0].item():g}: an "
            "accumulator in float32 loses nothing here. What rounds it on the way?"
        )


def _expect_wide_accumulator(gemm_tiled, draw: Draw) -> None:
    """Assert that a long sum of bf16 products is added in at least float32; float64 and float32 alike are right."""
    a, b = draw.normal(8, 512, dtype=torch.bfloat16), draw.normal(512, 8, dtype=torch.bfloat16)
    with _Roundings() as sizes:
        got = gemm_tiled(a, b, 8, 8, 1)
    exact = a.double() @ b.double()
    # Wrong values, shapes and dtypes have their own messages.
    expect_close(got, exact.to(a.dtype), rtol=0.2, atol=10.0, what="gemm_tiled of (8, 512) @ (512, 8) in bfloat16")
    error = float(((got.double() - exact).square().mean() / exact.square().mean()).sqrt())
    if error > _WIDE_ENOUGH:
        raise AssertionError(
            f"gemm_tiled of (8, 512) @ (512, 8) in bfloat16 is off by {error:.1%} (root mean square); rounding the result "
            "alone is off by 0.2%. In which dtype does the accumulator add 512 products?"
        )
    _expect_small_steps_kept(gemm_tiled, draw)
    if sizes.narrowed > 4 * got.numel():
        raise AssertionError(
            f"gemm_tiled of (8, 512) @ (512, 8) in bfloat16 rounds {sizes.narrowed:,} numbers to 16 bits, and C has {got.numel()}: "
            "round once, when a tile of C is done."
        )
    if sizes.again:
        let_wait(f"rounds {sizes.again:,} numbers to 16 bits, and computes with them after that")
    if sizes.narrow[1] > 1:  # what is lost in 16 bits can be carried along, and the error does not show it
        let_wait(f"adds numbers of bfloat16 in bfloat16 (in {sizes.narrow[0]})")


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
