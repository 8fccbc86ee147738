"""Time what a launch of the 16-bit GEMM costs: with launches that begin early, descriptors fetched before, fewer barriers.

    python -m tools.record.gemm_launches --out assets/results/h200/gemm_launches.json

At the shortest shapes of `tools.record.gemm_shapes`, of two seeds: the chosen configuration with none of the three, with one or
two, and with all, beside torch.matmul, in turns. L2 warm: products of one kind follow each other within a sample. L2 cold: a
sample is one product, behind the kernel that empties the L2.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from tools.record.common import Record, arguments_parser
from tools.record.gemm_shapes import PROCESSES, draw_shapes, operands
from utils.benchmark.measuring import measure_together

SEEDS = (16, 1123)
NONE = {"early": False, "prefetch": False, "lean": False}
WAYS = {
    "none": NONE,
    "early": NONE | {"early": True},
    "early, prefetch": NONE | {"early": True, "prefetch": True},
    "lean": NONE | {"lean": True},
    "all": {"early": True, "prefetch": True, "lean": True},
}


def shortest_shapes(count: int) -> list[dict]:
    """Return the shapes with the fewest operations, as many of each seed."""
    size = lambda shape: shape["m"] * shape["n"] * shape["k"]  # noqa: E731
    return [shape for seed in SEEDS for shape in sorted(draw_shapes(seed), key=size)[: count // len(SEEDS)]]


def launches_of(shape: dict) -> tuple:
    """Return A, B, and the launches of all ways at a shape, each made once."""
    from utils.kernels import gemm_launch

    a, b = operands(shape)
    chosen = gemm_launch.chosen(a, b, a.new_empty(shape["m"], shape["n"]))
    made = [gemm_launch.gemm_and_launch(a, b, replace(chosen, **way)) for way in WAYS.values()]
    if not all(torch.equal(made[0][0], c) for c, _ in made):
        raise RuntimeError(f"{shape}: not the same bits in all ways.")
    return a, b, chosen.name, [launch for _, launch in made]


def compile_one(shape: dict) -> None:
    """Compile and run all ways at a shape."""
    launches_of(shape)


def shape_row(shape: dict, rounds: int, l2: str) -> dict:
    """Time all ways and torch.matmul at a shape."""
    a, b, name, launches = launches_of(shape)
    calls = [functools.partial(torch.matmul, a, b), *(functools.partial(launch, a, b) for launch in launches)]
    labels = ["torch.matmul", *WAYS]
    timed = measure_together(calls, labels=labels, warmup=2, iterations=rounds, device="cuda", l2=l2, max_seconds=0.6)
    torch_us, *us = (1e3 * each.median_ms for each in timed)
    return shape | {"config": name, "torch_us": torch_us, "us": dict(zip(WAYS, us, strict=True))}


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    ratios = "  ".join(f"{way} {row['torch_us'] / us:.3f}" for way, us in row["us"].items())
    return f"{row['m']:>6} x {row['n']:>6} x {row['k']:>6} {row['us']['all']:6.2f} us  {ratios}  {row['config']}"


def main() -> int:
    """Measure and record; return the exit status."""
    parser = arguments_parser(__doc__, pairs=11)
    parser.add_argument("--shapes", type=int, default=44)
    parser.add_argument("--l2", choices=("cold", "warm"), default="warm", help="state of the cache before each sample")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: launches are timed on an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr)
        return 1
    shapes = shortest_shapes(options.shapes)
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, shapes))
    method = {"rounds": options.pairs, "l2": options.l2}
    record = Record(options.out, "what a launch of the GEMM costs", "cuda", options.seconds, **method)
    complete = record.fill(shapes, functools.partial(shape_row, rounds=options.pairs, l2=options.l2), show)
    rows = record.contents["rows"]
    mean = {
        way: math.exp(sum(math.log(row["torch_us"] / row["us"][way]) for row in rows) / len(rows))
        for way in (WAYS if rows else ())
    }
    record.contents["geometric mean of torch.matmul / kernel"] = mean
    print(mean)
    record.finish() if complete else record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
