"""Time the warp-specialized GEMM against torch.matmul (cuBLAS) at shapes drawn at random by seed, with a warm and a cold L2.

    python -m tools.record.gemm_shapes --out assets/results/h200/gemm_shapes.json

M, N and K are drawn evenly in their logarithm from 64 to 16,384 and rounded to multiples of 8; bf16 or fp16; A and B each
row- or column-major. Shapes whose product would take less than 20 MFLOP or more than 4 TFLOP are drawn again. Both sides are
timed in one process, their calls interleaved: once several calls back to back, so that A and B are in the L2 as far as they
fit, and once a call at a time behind a write that empties the L2. Ratio: time of torch.matmul / time of the kernel. The result
is compared with torch.matmul's, both against a float64 product of 64 rows.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import statistics
from concurrent.futures import ProcessPoolExecutor

import torch

from tools.record.common import Record, arguments_parser, relative_difference
from utils.benchmark.measuring import compare
from utils.kernels.gemm import gemm_warp_specialized
from utils.kernels.gemm_plan import choose

SEED, SHAPES = 2026, 122
SMALLEST, LARGEST = 64, 16384
FEWEST_FLOPS, MOST_FLOPS = 2e7, 4e12
ROWS_CHECKED = 64
PROCESSES = 14
SMS = 132  # of an H100 and of an H200
LARGE_US = 100  # a product for which torch.matmul takes as long or longer is a large one


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


def chosen(shape: dict) -> tuple:
    """Return the plan that a shape gets, and its number of parts."""
    return choose(shape["m"], shape["n"], shape["k"], shape["a_column_major"], shape["b_column_major"], SMS)


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
    return relative_difference(c[rows], a[rows].double() @ b.double())


def kernels_of(shapes: list[dict]) -> list[dict]:
    """Return shapes whose products compile all kernels that the shapes need, each once."""
    found = {}
    for shape in shapes:
        key = chosen(shape)[0].kernel, shape["dtype"]
        found.setdefault(key, shape)
    return [*found.values()]


def compile_one(shape: dict) -> None:
    """Compute a product once, so that its kernel is in Triton's cache."""
    gemm_warp_specialized(*operands(shape))
    torch.cuda.synchronize()


def shape_row(shape: dict, pairs: int) -> dict:
    """Measure one shape."""
    a, b = operands(shape)
    plan, split = chosen(shape)
    row = shape | {"plan": plan.name, "split": split}
    row["error"] = relative_error(gemm_warp_specialized(a, b), a, b)
    row["torch_error"] = relative_error(torch.matmul(a, b), a, b)
    for l2 in ("warm", "cold"):
        result = compare(
            torch.matmul,
            gemm_warp_specialized,
            a,
            b,
            warmup=3,
            iterations=pairs,
            max_seconds=1.0,
            l2=l2,
            labels=("torch.matmul", "gemm_warp_specialized"),
        )
        row[l2] = {
            "ratio": result.speedup,
            "interval": list(result.interval),
            "us": 1e3 * result.b.median_ms,
            "torch_us": 1e3 * result.a.median_ms,
        }
    return row


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    order = "".join("C" if row[f"{x}_column_major"] else "R" for x in "ab")
    times = "  ".join(f"{l2} {row[l2]['us']:8.1f} us {row[l2]['ratio']:.3f}x" for l2 in ("warm", "cold"))
    return (
        f"{row['m']:>6} x {row['n']:>6} x {row['k']:>6} {row['dtype']} {order}  {times}  {row['plan']} / {row['split']}"
    )


def summary(rows: list[dict]) -> dict:
    """Return for each state of the L2 the geometric mean of the ratios, that of large products, the smallest, and how many are low."""
    found: dict = {"shapes": len(rows)}
    for l2 in ("warm", "cold"):
        ratios = [row[l2]["ratio"] for row in rows]
        large = [row[l2]["ratio"] for row in rows if row[l2]["torch_us"] >= LARGE_US]
        found[l2] = {
            "geometric_mean": statistics.geometric_mean(ratios),
            "large": statistics.geometric_mean(large) if large else None,
            "smallest": min(ratios),
            "under_0.90": sum(ratio < 0.9 for ratio in ratios),
        }
    return found


def main() -> None:
    """Measure and record the table."""
    parser = arguments_parser(__doc__, pairs=15)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    settings = {"pairs": options.pairs, "seed": options.seed}
    record = Record(options, "GEMM at random shapes", "cuda", **settings)
    torch.manual_seed(options.seed)
    shapes = draw_shapes(options.seed)
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, kernels_of(shapes)))  # one process would take a second and more for each
    record.fill(shapes, lambda shape: shape_row(shape, options.pairs), show)
    record.contents["summary"] = summary(record.contents["rows"])
    print(record.contents["summary"])
    record.finish()


if __name__ == "__main__":
    main()
