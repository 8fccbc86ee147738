"""Time what `gemm_choose.for_l2` says at products about as large as the L2: launches that wait, and operands that stream.

    python -m tools.record.gemm_repeated --out assets/results/h100/gemm_repeated.json
    python -m tools.record.gemm_repeated --wide --out assets/results/h100/gemm_repeated_wide.json

At the products of the two tables of random shapes where it says anything, and at others of a seed that are near its limits, the first
configurations are timed as they are launched, without a stream, and without waiting, beside torch.matmul, in turns, L2 warm.
With --wide the products are those whose C has neither few rows nor few columns, but whose tiles are all computed at once. Two
earlier versions looked for what helps at all: `gemm_repeated_first.json` (commit f63eb9e) and `gemm_repeated_second.json` (9cfcb0b).
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import replace

import torch

from tools.record.common import Record, arguments_parser, in_many_processes
from tools.record.gemm_choice_shapes import SIZES, TABLES, recorded
from tools.record.gemm_shapes import PROCESSES, SMS, draw_shapes, late_rows, operands, relative_error
from utils.benchmark.measuring import measure_together
from utils.kernels import gemm_choose
from utils.kernels.gemm_config import Config
from utils.kernels.gemm_plan import clusters_at_once, items_of

MOST_ERROR = {"bf16": 4e-3, "fp16": 5e-4}
SEED, DRAWN = 4243, 14
THIN, MB = 320, (24, 110)  # of shapes that are drawn: beyond the limits of `for_l2`, to see what is there
CONFIGS = 2
WIDE, WIDE_MB, MOST_WIDE = (256, 2500), (28, 85), 26


def ways_of(config: Config, shape: dict) -> list[Config]:
    """Return a configuration with the larger operand as a stream and without, and where its launch waits also without that."""
    larger = "A" if (shape["m"] > shape["n"]) != config.transposed else "B"
    found = [replace(config, stream=stream, early=True) for stream in (larger, "")]
    return found if config.early else [*(replace(x, early=False) for x in found), *found]


def jobs_of(shape: dict) -> list[Config]:
    """Return what is timed at a shape: the first configurations, the first of them first as it is launched."""
    sizes = shape["m"], shape["n"], shape["k"]
    first = gemm_choose.first_choices(*sizes, SMS, late_rows(shape), True, CONFIGS)
    return [way for config in first if not config.short for way in ways_of(config, shape)]


def all_shapes() -> list[dict]:
    """Return the products of both tables where `for_l2` says anything, and drawn ones with few rows or columns."""
    rows = [{x: row[x] for x in (*SIZES, "dtype")} for table in TABLES for row in recorded(table)]
    found = [
        row | {"kind": "table"} for row in rows if any(x.stream or not x.early for x in jobs_of(row)) and thin(row)
    ]
    drawn = [shape | {"kind": "drawn"} for shape in draw_shapes(SEED, 700) if thin(shape) and jobs_of(shape)][:DRAWN]
    found = [row | {"mb": size_of(row)} for row in (*found, *drawn)]
    return sorted(found, key=lambda row: row["mb"])


def wide_shapes() -> list[dict]:
    """Return products of both tables, and drawn ones, with more rows and columns, whose tiles are all computed at once."""
    rows = [{x: row[x] for x in (*SIZES, "dtype")} | {"kind": "table"} for table in TABLES for row in recorded(table)]
    found = [row | {"mb": size_of(row)} for row in (*rows, *(x | {"kind": "drawn"} for x in draw_shapes(SEED, 400)))]
    found = [
        row for row in found if WIDE[0] < min(row["m"], row["n"]) < WIDE[1] and WIDE_MB[0] < row["mb"] < WIDE_MB[1]
    ]
    return sorted((row for row in found if at_once(row)), key=lambda row: row["mb"])[:MOST_WIDE]


def at_once(shape: dict) -> bool:
    """Whether the first configuration computes all tiles, or parts, in one round."""
    config = jobs_of(shape)[0] if jobs_of(shape) else None
    if config is None:
        return False
    sizes = (shape["n"], shape["m"]) if config.transposed else (shape["m"], shape["n"])
    return items_of(*sizes, config, SMS) <= clusters_at_once(config.cluster, SMS)


def size_of(shape: dict) -> float:
    """Return the size of A and B in MB."""
    return 2e-6 * shape["k"] * (shape["m"] + shape["n"])


def thin(shape: dict) -> bool:
    """Whether C has few rows or columns, and A and B are about as large as the L2."""
    return min(shape["m"], shape["n"]) <= THIN and MB[0] < size_of(shape) < MB[1]


def compile_one(job: tuple) -> float:
    """Compile and run a kernel at a shape; return the error."""
    from utils.kernels import gemm_launch

    shape, config = job
    a, b = operands(shape)
    return relative_error(gemm_launch.gemm(a, b, config), a, b)


def shape_row(shape: dict, rounds: int) -> dict:
    """Time what `jobs_of` names at a shape, and torch.matmul, in turns; a wrong one is named and not timed."""
    from utils.kernels import gemm_launch

    a, b = operands(shape)
    calls, wrong = {"torch.matmul": functools.partial(torch.matmul, a, b)}, {}
    for config in jobs_of(shape):
        c, made = gemm_launch.gemm_and_launch(a, b, config)
        if (error := relative_error(c, a, b)) > MOST_ERROR[shape["dtype"]]:
            wrong[config.name] = error
        else:
            calls[config.name] = functools.partial(made, a, b)
    timed = measure_together(
        [*calls.values()], labels=[*calls], warmup=2, iterations=rounds, device="cuda", l2="warm", max_seconds=1.0
    )
    times = [[name, 1e3 * each.median_ms] for name, each in zip(calls, timed, strict=True)]
    return shape | {"torch_us": times[0][1], "times": times[1:], "wrong": wrong}


def show(row: dict) -> str:
    """Return the line that is printed for a row: torch's time, and the time of each way."""
    times = ", ".join(f"{name} {us:.1f}" for name, us in row["times"])
    sizes = f"{row['kind'][0]} {row['m']}x{row['n']}x{row['k']} {row['mb']:.0f}MB"
    return f"{sizes} {row['torch_us']:.1f}: {times}{row['wrong'] or ''}".replace("waiting", "w").replace("streams", "s")


def main() -> int:
    """Measure and record; return the exit status."""
    parser = arguments_parser(__doc__, pairs=11)
    parser.add_argument("--wide", action="store_true", help="products with more rows and columns of C")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: products are timed on an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr)
        return 1
    shapes = wide_shapes() if options.wide else all_shapes()
    jobs = {}
    for shape in shapes:
        for config in jobs_of(shape):
            columns = config.width_at(shape["m"] if config.transposed else shape["n"])
            layouts = shape["dtype"], shape["a_column_major"], shape["b_column_major"]
            jobs.setdefault((config.name, *layouts, columns), (shape, config))
    answers = in_many_processes(compile_one, jobs.values(), PROCESSES)
    for (shape, config), (error, problem) in zip(jobs.values(), answers, strict=True):
        if problem or not error < MOST_ERROR[shape["dtype"]]:
            print("WRONG", config.name, error, problem)
    print(torch.cuda.get_device_name(), len(jobs), "kernels", len(shapes), "shapes", flush=True)
    record = Record(
        options.out, "GEMM about as large as the L2", "cuda", options.seconds, rounds=options.pairs, l2="warm"
    )
    complete = record.fill(shapes, functools.partial(shape_row, rounds=options.pairs), show)
    ratios = []
    for row in record.contents["rows"]:
        times = dict(row["times"])
        ratios += [times[name.partition(" streams")[0]] / us for name, us in times.items() if " streams" in name]
    if ratios:
        print(f"without / with a stream: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}")
    record.finish() if complete else record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
