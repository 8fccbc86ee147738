"""Measure the GEMM's configurations at many shapes, and fit the model that chooses between them.

    python -m tools.record.gemm_choice measure --part 1/2 --out assets/results/h200/gemm_choice_families_1.json
    python -m tools.record.gemm_choice fit --read assets/results/h200/gemm_choice_*.json

`measure` times, at the shapes and by the configurations of `gemm_choice_shapes`, each configuration and torch.matmul, in
turns. Earlier records were made by earlier choices of shapes; each names its commit. `fit` prints the constants for
`utils.kernels.gemm_model.Cost`, and how much slower than the best measured configuration the chosen one is, at shapes that the
constants were not fitted to. A configuration is recorded by its name, such as "128x256/4": tile, parts.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from tools.record.common import Record, arguments_parser, in_many_processes
from tools.record.gemm_choice_fit import choices, judge, measured, print_fit
from tools.record.gemm_choice_shapes import all_shapes, config_of, families_of, shapes_as_in_tables
from tools.record.gemm_shapes import PROCESSES, relative_error
from utils.benchmark.measuring import measure_together
from utils.kernels import gemm_model

MOST_ERROR = 4e-3  # of C in bf16, relative to a float64 product; rounding alone gives 1.7e-3


def matrix(rows: int, columns: int, column_major: bool) -> torch.Tensor:
    """Draw a matrix in bf16 on the GPU."""
    x = torch.randn((columns, rows) if column_major else (rows, columns), device="cuda", dtype=torch.bfloat16)
    return x.T if column_major else x


def compile_one(job: tuple) -> tuple[float, bool]:
    """Compile and run a configuration: relative error, and whether the same bits came twice."""
    from utils.kernels import gemm_launch

    name, a_column_major, b_column_major, columns = job
    config = config_of(name)
    m, n = 3 * config.block_m - 8, columns or 5 * config.block_n - 8
    m, n = (n, m) if config.transposed else (m, n)
    a, b = matrix(m, 64 * 33 - 8, a_column_major), matrix(64 * 33 - 8, n, b_column_major)
    first, second = gemm_launch.gemm(a, b, config), gemm_launch.gemm(a, b, config)
    exact = a.double() @ b.double()
    return ((first.double() - exact).norm() / exact.norm()).item(), torch.equal(first, second)


def compile_all(shapes: list[dict]) -> dict[str, str]:
    """Compile what the shapes need, in many processes; return the configurations that are wrong, and what is wrong."""
    jobs = set()
    for shape in shapes:
        for config in families_of(shape):
            # Columns of the kernel's C: a narrow one has its own products.
            columns = shape["m"] if config.transposed else shape["n"]
            columns = config.width_at(columns) if columns <= config.block_n else 0
            jobs.add((config.name, shape["a_column_major"], shape["b_column_major"], columns))
    began = time.monotonic()
    wrong, listed = {}, sorted(jobs)
    for job, (answer, problem) in zip(listed, in_many_processes(compile_one, listed, PROCESSES), strict=True):
        if problem or answer[0] > MOST_ERROR or not answer[1]:
            wrong[job[0]] = problem or f"{job}: error {answer[0]:.3g}, same bits twice: {answer[1]}"
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - began:.0f} s; wrong: {wrong or 'none'}", flush=True)
    return wrong


def shape_row(shape: dict, l2: str, wrong: Iterable[str] = ()) -> dict:
    """Time the configurations of a shape and torch.matmul, in turns; one whose product is wrong is named and not timed."""
    a = matrix(shape["m"], shape["k"], shape["a_column_major"])
    b = matrix(shape["k"], shape["n"], shape["b_column_major"])
    launches = right_launches(a, b, [config for config in families_of(shape) if config.name not in wrong])
    calls = [lambda: torch.matmul(a, b), *(lambda launch=launch: launch(a, b) for launch, _ in launches.values())]
    labels = ["torch.matmul", *launches]
    timed = measure_together(calls, labels=labels, warmup=2, iterations=9, device="cuda", l2=l2, max_seconds=0.4)
    torch_us, *times = (1e3 * each.median_ms for each in timed)
    return shape | {
        "torch_us": torch_us,
        "times": [*zip(launches, times, strict=True)],
        "error": max(error for _, error in launches.values()),
    }


def right_launches(a: torch.Tensor, b: torch.Tensor, configs: list) -> dict[str, tuple]:
    """Return by name the launch of each configuration, and the error of its first and last rows against a float64 product."""
    from utils.kernels import gemm_launch

    found = {}
    for config in configs:
        c, launch = gemm_launch.gemm_and_launch(a, b, config)
        if (error := relative_error(c, a, b)) > MOST_ERROR:
            print(f"WRONG: {config.name} at {tuple(a.shape)} x {tuple(b.shape)}: error {error:.3g}", flush=True)
        else:
            found[config.name] = launch, error
    return found


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    name, us = min(row["times"], key=lambda entry: entry[1])
    return f"{row['kind']:<6}{row['m']:>6} x {row['n']:>6} x {row['k']:>6}: {row['torch_us'] / us:.3f} {name}"


def part_of(shapes: list[dict], part: str) -> list[dict]:
    """Return one part of the shapes, such as "1/2": every second one, from the first."""
    number, count = map(int, part.split("/"))
    return shapes[number - 1 :: count]


def main(arguments: list[str] | None = None) -> int:
    """Measure or fit; return the exit status."""
    parser = arguments_parser(__doc__)
    parser.add_argument("what", choices=("measure", "fit"))
    parser.add_argument("--read", type=Path, nargs="+", help="fit: the recorded times, of one or more tables")
    parser.add_argument("--seconds", type=float, default=math.inf, help="measure: stop so long after compiling")
    parser.add_argument("--l2", choices=("cold", "warm"), default="warm", help="measure: the cache before each call")
    parser.add_argument("--part", default="1/1", help="measure: such as 1/2, every second shape from the first")
    parser.add_argument(
        "--drawn", type=int, nargs=2, help="measure: seed and number of shapes as in the tables instead"
    )
    options = parser.parse_args(arguments)
    if (options.what == "fit") != (options.read is not None):
        parser.error("--read names the recorded times for `fit`, and goes with nothing else")
    if options.what == "fit":
        print_fit(options.read)
        return 0
    if not torch.cuda.is_available():
        print(
            "error: the times are measured on an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr
        )
        return 1
    shapes = part_of(shapes_as_in_tables(*options.drawn) if options.drawn else all_shapes(), options.part)
    wrong = compile_all(shapes)
    # Only now: the seconds are for rows.
    record = Record(
        options.out,
        "GEMM configurations of different families at random shapes",
        "cuda",
        options.seconds,
        l2=options.l2,
        part=options.part,
    )
    record.contents["wrong"] = wrong
    complete = record.fill(shapes, functools.partial(shape_row, l2=options.l2, wrong=wrong), show)
    print(torch.cuda.get_device_name(), judge(choices(measured(record.contents["rows"]), gemm_model.COST)))
    record.finish() if complete else record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
