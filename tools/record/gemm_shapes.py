"""Time the warp-specialized GEMM against torch.matmul (cuBLAS) at 80 shapes drawn at random by seed.

    python -m tools.record.gemm_shapes --out assets/results/h200/gemm_shapes.json
    python -m tools.record.gemm_shapes --tune --out assets/results/h100/gemm_shapes_tuned.json

M, N and K are drawn evenly in their logarithm from 64 to 16,384 and rounded to multiples of 8; bf16 or fp16; A and B each
row- or column-major. Shapes whose product would take less than 20 MFLOP or more than 4 TFLOP are drawn again. Both sides
are timed in one process, their calls interleaved. Ratio: time of torch.matmul / time of the kernel. The result is compared
with torch.matmul's, both against a float64 product of 64 rows. With --tune the kernel is called with `tune=True`: before it is
timed against torch.matmul, the model's first four configurations are timed against each other, anew.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from tools.record.common import Record, arguments_parser, read_record
from utils.benchmark.measuring import compare
from utils.kernels import gemm_choose, gemm_tune
from utils.kernels.gemm import gemm_warp_specialized

SEED, SHAPES = 16, 80
SMALLEST, LARGEST = 64, 16384
FEWEST_FLOPS, MOST_FLOPS = 2e7, 4e12
ROWS_CHECKED = 64
PROCESSES = 15
SMS = 132  # of an H100 and of an H200


def draw_shapes(seed: int = SEED, count: int = SHAPES) -> list[dict]:
    """Draw the shapes: m, n, k, dtype, and whether A and B are column-major."""
    draw, shapes = random.Random(seed), []
    while len(shapes) < count:
        m, n, k = (8 * round(math.exp(draw.uniform(math.log(SMALLEST), math.log(LARGEST))) / 8) for _ in "mnk")
        rest = {
            "dtype": draw.choice(("bf16", "fp16")),
            "a_column_major": draw.random() < 0.5,
            "b_column_major": draw.random() < 0.5,
        }
        if FEWEST_FLOPS <= 2.0 * m * n * k <= MOST_FLOPS:
            shapes.append({"m": m, "n": n, "k": k} | rest)
    return shapes


def late_rows(shape: dict) -> tuple[int, int]:
    """Return for A and B how rows lie in memory, and whether they start at odd multiples of 16 bytes: see `gemm_launch.lateness`."""
    a = shape["m"] if shape["a_column_major"] else shape["k"]
    b = shape["k"] if shape["b_column_major"] else shape["n"]
    late, aligned = ((2, 1), (3, 0))
    return (late if a % 16 else aligned)[not shape["a_column_major"]], (late if b % 16 else aligned)[
        shape["b_column_major"]
    ]


def operands(shape: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw A (M, K) and B (K, N) of a shape on the GPU."""
    dtype = torch.bfloat16 if shape["dtype"] == "bf16" else torch.float16

    def matrix(rows: int, columns: int, column_major: bool) -> torch.Tensor:
        size = (columns, rows) if column_major else (rows, columns)
        x = torch.randn(size, device="cuda", dtype=dtype)
        return x.T if column_major else x

    m, n, k = shape["m"], shape["n"], shape["k"]
    return matrix(m, k, shape["a_column_major"]), matrix(k, n, shape["b_column_major"])


def relative_error(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the error of the first and last rows of C against their float64 product."""
    half = min(ROWS_CHECKED, len(a)) // 2
    rows = [*range(half), *range(len(a) - half, len(a))]
    exact = a[rows].double() @ b.double()
    return ((c[rows].double() - exact).norm() / exact.norm()).item()


def kernels_of(shapes: list[dict], tune: bool) -> list[tuple]:
    """Return what `compile_one` takes, so that all kernels of the shapes are compiled, each once."""
    found = {}
    for shape in shapes:
        sizes, late = (shape["m"], shape["n"], shape["k"]), late_rows(shape)
        for config in gemm_choose.first_choices(*sizes, SMS, late, True, gemm_tune.CANDIDATES if tune else 1):
            # A C that is narrower than the tile has its own products.
            columns = config.width_at(shape["m"] if config.transposed else shape["n"])
            layout = shape["dtype"], shape["a_column_major"], shape["b_column_major"]
            found.setdefault((config.name, *layout, columns), (shape, config))
    return [*found.values()]


def compile_one(job: tuple) -> None:
    """Run a product by a configuration once, so that its kernel is in Triton's cache."""
    from utils.kernels import gemm_launch

    shape, config = job
    gemm_launch.gemm(*operands(shape), config)
    torch.cuda.synchronize()


def compile_all(shapes: list[dict], tune: bool = False) -> None:
    """Compile what the shapes need, in many processes: one process would take a second and more for each."""
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, kernels_of(shapes, tune)))


def shape_row(shape: dict, pairs: int, l2: str, tune: bool = False) -> dict:
    """Measure one shape."""
    from utils.kernels import gemm_launch

    a, b = operands(shape)
    config = gemm_launch.chosen(a, b, a.new_empty(shape["m"], shape["n"]))
    found = {"config": config.name}
    if tune:
        times = gemm_tune.times_of(a, b)
        found = {"config": next(iter(times)), "model": config.name, "tuned_us": times}
    kernel = functools.partial(gemm_warp_specialized, tune=tune)
    errors = {"error": relative_error(kernel(a, b), a, b)}
    errors["torch_error"] = relative_error(torch.matmul(a, b), a, b)
    result = compare(
        torch.matmul,
        kernel,
        a,
        b,
        warmup=3,
        iterations=pairs,
        max_seconds=1.5,
        l2=l2,
        labels=("torch.matmul", "gemm_warp_specialized"),
    )
    flops = 2.0 * shape["m"] * shape["n"] * shape["k"]
    return shape | {
        **found,
        "ratio": result.speedup,
        "interval": list(result.interval),
        "us": 1e3 * result.b.median_ms,
        "torch_us": 1e3 * result.a.median_ms,
        "tflops": flops / result.b.median_ms / 1e9,
        **errors,
    }


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    order = "".join("C" if row[f"{x}_column_major"] else "R" for x in "ab")
    return (
        f"{row['m']:>6} x {row['n']:>6} x {row['k']:>6} {row['dtype']} {order} {row['us']:9.1f} us "
        f"{row['tflops']:6.1f} TFLOP/s  {row['ratio']:.3f}x  {row['config']}"
    )


def summary(rows: list[dict]) -> dict:
    """Return the geometric mean of the ratios, the smallest, and how many are under 0.90."""
    ratios = [row["ratio"] for row in rows]
    return {
        "geometric_mean": math.exp(sum(map(math.log, ratios)) / len(ratios)),
        "smallest": min(ratios),
        "under_0.90": sum(ratio < 0.9 for ratio in ratios),
        "shapes": len(ratios),
    }


def kept_rows(path: Path, seed: int, l2: str, tune: bool = False) -> list[dict]:
    """Return the rows of an earlier record; refuse one that was measured by another method."""
    record = read_record(path)
    before, now = (record["seed"], record["l2"], record.get("tune", False)), (seed, l2, tune)
    if before != now:
        raise SystemExit(
            f"error: {path} has seed, L2 and tune {before}, and this run {now}: their rows are no one table."
        )
    return record["rows"]


def missing_shapes(shapes: list[dict], rows: list[dict]) -> list[dict]:
    """Return the shapes that no row has measured."""
    return [shape for shape in shapes if not any(all(row[key] == shape[key] for key in shape) for row in rows)]


def main() -> int:
    """Measure and record the table; return the exit status."""
    parser = arguments_parser(__doc__, pairs=15)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--keep", type=Path, help="an earlier record: its rows are kept and not measured again")
    parser.add_argument("--l2", choices=("cold", "warm"), default="cold", help="state of the cache before each call")
    parser.add_argument("--tune", action="store_true", help="call the kernel with tune=True")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: the shapes are timed on an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr)
        return 1
    kept = kept_rows(options.keep, options.seed, options.l2, options.tune) if options.keep else []
    torch.manual_seed(options.seed)
    shapes = missing_shapes(draw_shapes(options.seed), kept)
    compile_all(shapes, options.tune)
    os.environ["LABS_COMPILE_CACHE"] = "off"  # what an earlier run has timed is not taken from its file
    record = Record(
        options.out,
        "GEMM at random shapes",
        "cuda",
        options.seconds,
        pairs=options.pairs,
        seed=options.seed,
        l2=options.l2,
        tune=options.tune,
    )
    if kept:
        record.contents |= {"rows": kept, "rows_kept": len(kept), "kept_from": read_record(options.keep)["environment"]}
    complete = record.fill(shapes, lambda shape: shape_row(shape, options.pairs, options.l2, options.tune), show)
    record.contents["summary"] = summary(record.contents["rows"])
    print(record.contents["summary"])
    record.finish() if complete else record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
