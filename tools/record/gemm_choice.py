"""Fit the model that chooses the GEMM's tile and parts: measure many configurations at random shapes, then fit.

    python -m tools.record.gemm_choice measure --l2 cold --out assets/results/h200/gemm_choice.json
    python -m tools.record.gemm_choice measure --l2 warm --worst 44 --out assets/results/h200/gemm_choice_warm.json
    python -m tools.record.gemm_choice measure --l2 warm --longest 24 --out assets/results/h200/gemm_choice_multicast.json
    python -m tools.record.gemm_choice fit --read assets/results/h200/gemm_choice_warm.json

`measure` times, at each shape, the configurations that the present model ranks first and torch.matmul, in turns. The shapes
are those of `tools.record.gemm_shapes` (kind "test") and others (kind "train"); with `--worst` they are those at which the
recorded table is worst, and every second one is kept for the test; with `--longest` those that take longest and are not
ahead, and two squares, with as many configurations whose blocks share tiles (`multicast`) as others. `fit` does not see the shapes of the test: it prints
the constants for `utils.kernels.gemm_plan.Cost` and how much slower than the best measured configuration the chosen one is,
for the shapes it was fitted to and for the others. A configuration is recorded by its name, such as "128x256/4": tile, parts.
"""

from __future__ import annotations

import collections
import functools
import math
import multiprocessing
import random
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from tools.record.common import Record, arguments_parser, read_record
from tools.record.gemm_shapes import LARGEST, PROCESSES, SMALLEST, draw_shapes
from utils.benchmark.measuring import measure_together
from utils.files import ROOT

SEED, SHAPES = 7, 140
RANKED = 12  # configurations that are timed at a shape
SPLITS_OF_A_TILE = 2  # at most so many of them differ in their parts only
SMS = 132


def training_shapes(seed: int = SEED, count: int = SHAPES) -> list[dict]:
    """Draw shapes as `gemm_shapes` does, from another seed; A is row-major, B either."""
    draw, shapes = random.Random(seed), []
    while len(shapes) < count:
        m, n, k = (8 * round(math.exp(draw.uniform(math.log(SMALLEST), math.log(LARGEST))) / 8) for _ in "mnk")
        column_major = draw.random() < 0.5
        if 2e7 <= 2 * m * n * k <= 1.2e12:
            shapes.append({"m": m, "n": n, "k": k, "a_column_major": False, "b_column_major": column_major})
    return shapes


def worst_shapes(count: int) -> list[dict]:
    """Return the shapes at which the recorded table is worst; every second one is kept for the test."""
    rows = read_record(ROOT / "assets/results/h200/gemm_shapes.json")["rows"]
    rows = sorted(rows, key=lambda row: row["ratio"])[:count]
    sizes = ("m", "n", "k", "a_column_major", "b_column_major")
    return [{x: row[x] for x in sizes} | {"kind": ("train", "test")[i % 2]} for i, row in enumerate(rows)]


def longest_shapes(count: int) -> list[dict]:
    """Return the longest products of the recorded table where torch is ahead, and two squares; every second one is kept."""
    rows = read_record(ROOT / "assets/results/h200/gemm_shapes.json")["rows"]
    rows = sorted((row for row in rows if row["ratio"] < 0.95), key=lambda row: -row["torch_us"])[:count]
    sizes = ("m", "n", "k", "a_column_major", "b_column_major")
    shapes = [{"m": x, "n": x, "k": x, "a_column_major": False, "b_column_major": False} for x in (5000, 8192)]
    shapes += [{x: row[x] for x in sizes} for row in rows]
    return [shape | {"kind": ("train", "test")[i % 2], "long": True} for i, shape in enumerate(shapes)]


@functools.cache
def _configs_by_name() -> dict:
    from utils.kernels.gemm_plan import CONFIGS, SHORT_CONFIGS, SPLITS

    found = [
        replace(config, split=split, pairs=pairs, multicast=multicast)
        for config in (*CONFIGS, *SHORT_CONFIGS)
        for split in SPLITS
        for pairs in (False, True)
        for multicast in ("", "A", "B")
        if not (config.short and multicast)
    ]
    return {config.name: config for config in found}


def config_of(name: str):
    """Return the configuration with a name; None if the kernels no longer have its tile."""
    return _configs_by_name().get(name)


def late_rows(shape: dict) -> tuple[int, int]:
    """Return for A and B whether rows start at odd multiples of 16 bytes, as `gemm_plan.estimate` takes it."""
    a = shape["m"] if shape["a_column_major"] else shape["k"]
    b = shape["k"] if shape["b_column_major"] else shape["n"]
    along_k = 2 if shape["a_column_major"] else 1, 1 if shape["b_column_major"] else 2
    return (along_k[0] if a % 16 else 0, along_k[1] if b % 16 else 0)


def ranked(shape: dict, count: int = RANKED) -> list:
    """Return the configurations that the present model ranks first at a shape; of a long one half of each kernel."""
    from utils.kernels import gemm_plan

    sizes, late = (shape["m"], shape["n"], shape["k"]), late_rows(shape)
    if "long" in shape:
        found = gemm_plan.candidates(*sizes, SMS, late)
        halves = [[config for config in found if bool(config.multicast) == shared] for shared in (False, True)]
        return [config for half in halves for config in first_of(half, shape, count // 2)]
    return first_of(gemm_plan.candidates(*sizes, SMS, late), shape, count)


def first_of(found: list, shape: dict, count: int) -> list:
    """Return the configurations among these that the present model ranks first."""
    from utils.kernels import gemm_plan

    sizes, late = (shape["m"], shape["n"], shape["k"]), late_rows(shape)
    found.sort(key=lambda config: gemm_plan.estimate(*sizes, config, SMS, late))
    taken: collections.Counter = collections.Counter()
    kept = []
    for config in found:
        kind = replace(config, split=1)
        taken[kind] += 1
        if taken[kind] <= SPLITS_OF_A_TILE:
            kept.append(config)
    return kept[:count]


def matrix(rows: int, columns: int, column_major: bool) -> torch.Tensor:
    """Draw a matrix in bf16 on the GPU."""
    x = torch.randn((columns, rows) if column_major else (rows, columns), device="cuda", dtype=torch.bfloat16)
    return x.T if column_major else x


def compile_one(job: tuple) -> tuple[tuple, float | str, bool]:
    """Compile and run a configuration: (job, relative error or what went wrong, whether the same bits came twice)."""
    from utils.kernels import gemm_launch

    name, a_column_major, b_column_major = job
    config = config_of(name)
    a = matrix(3 * config.block_m - 8, 64 * 33 - 8, a_column_major)
    b = matrix(64 * 33 - 8, 5 * config.block_n - 8, b_column_major)
    try:
        first, second = gemm_launch.gemm(a, b, config), gemm_launch.gemm(a, b, config)
    except Exception as error:
        return job, str(error)[-300:], False
    exact = a.double() @ b.double()
    return job, ((first.double() - exact).norm() / exact.norm()).item(), torch.equal(first, second)


def compile_all(shapes: list[dict]) -> None:
    """Compile what the shapes need, in many processes; raise if one configuration computes wrong sums."""
    jobs = {
        (config.name, shape["a_column_major"], shape["b_column_major"]) for shape in shapes for config in ranked(shape)
    }
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        done = list(pool.map(compile_one, sorted(jobs)))
    wrong = [entry for entry in done if isinstance(entry[1], str) or entry[1] > 4e-3 or not entry[2]]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(done)} configurations are wrong: {wrong[:5]}")
    print(f"compiled {len(done)} kernels, all right")


def shape_row(shape: dict, l2: str) -> dict:
    """Time the ranked configurations and torch.matmul at a shape."""
    from utils.kernels import gemm_launch

    a = matrix(shape["m"], shape["k"], shape["a_column_major"])
    b = matrix(shape["k"], shape["n"], shape["b_column_major"])
    configs = ranked(shape)
    launches = [gemm_launch.gemm_and_launch(a, b, config)[1] for config in configs]
    calls = [lambda: torch.matmul(a, b), *(lambda launch=launch: launch(a, b) for launch in launches)]
    names = [config.name for config in configs]
    labels = ["torch.matmul", *names]
    timed = measure_together(calls, labels=labels, warmup=2, iterations=9, device="cuda", l2=l2, max_seconds=1.0)
    torch_us, *times = (1e3 * each.median_ms for each in timed)
    return shape | {"torch_us": torch_us, "times": [*zip(names, times, strict=True)]}


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    name, us = min(row["times"], key=lambda entry: entry[1])
    return f"{row['kind']:<6}{row['m']:>6} x {row['n']:>6} x {row['k']:>6}: best {name}, {row['torch_us'] / us:.3f}x"


# ---- the fit -----------------------------------------------------------------------------------------------


def times_of(row: dict) -> list[tuple]:
    """Return the configurations of a row that the kernel still has, each with its measured time."""
    return [(config, us) for name, us in row["times"] if (config := config_of(name)) is not None]


def estimate(row: dict, config, cost) -> float:
    """Return the model's time of a configuration."""
    from utils.kernels import gemm_plan

    return gemm_plan.estimate(row["m"], row["n"], row["k"], config, SMS, late_rows(row), cost)


def error(rows: list[dict], cost) -> float:
    """Return the mean square of log(estimate / measured)."""
    logs = [math.log(estimate(row, config, cost) / us) for row in rows for config, us in times_of(row)]
    return sum(value * value for value in logs) / len(logs)


def fit(rows: list[dict], cost, sweeps: int = 40, error: Callable = error):
    """Fit the constants, one after the other, by steps that shrink where none of them helps.

    error: takes rows and constants, and returns what is to become small.
    """
    best, stride = error(rows, cost), 1.3
    for _ in range(sweeps):
        before = best
        for field in fields(cost):
            for factor in (stride, 1 / stride):
                tried = replace(cost, **{field.name: getattr(cost, field.name) * factor})
                if (now := error(rows, tried)) < best:
                    best, cost = now, tried
        if best == before:
            stride = math.sqrt(stride)
    return cost


def judge(rows: list[dict], cost) -> dict:
    """Return how the choice does: time of the best over time of the chosen, and of torch.matmul over the chosen."""
    against_best, against_torch, oracle = [], [], []
    for row in rows:
        estimates = [estimate(row, config, cost) for config, _ in times_of(row)]
        times = [us for _, us in times_of(row)]
        chosen = times[estimates.index(min(estimates))]
        against_best.append(min(times) / chosen)
        against_torch.append(row["torch_us"] / chosen)
        oracle.append(row["torch_us"] / min(times))
    if not rows:
        return {}

    def mean(values: list[float]) -> float:
        return math.exp(sum(map(math.log, values)) / len(values))

    return {
        "shapes": len(rows),
        "best / chosen": mean(against_best),
        "worst choice": min(against_best),
        "torch / chosen": mean(against_torch),
        "torch / best": mean(oracle),
        "under_0.90": sum(ratio < 0.9 for ratio in against_torch),
    }


def print_fit(paths: list[Path]) -> None:
    """Fit the recorded times; print the constants and the judgement. Of rows without a kind every second one is held out."""
    from utils.kernels import gemm_plan

    rows = [row for path in paths for row in read_record(path)["rows"]]
    rows = [{"kind": ("train", "test")[i % 2]} | row for i, row in enumerate(rows)]
    seen, held_out = ([row for row in rows if (row["kind"] == "test") == test] for test in (False, True))
    fitted = fit(seen, gemm_plan.COST)
    print("fitted:", {name: float(f"{value:.4g}") for name, value in asdict(fitted).items()})
    for what, cost in (("fitted", fitted), ("present", gemm_plan.COST)):
        for label, group in (("the shapes of the fit", seen), ("held-out shapes", held_out)):
            if group:
                spread = math.sqrt(error(group, cost))
                print(f"{what} constants, {label}: off by {spread:.0%}, {judge(group, cost)}")


def main(arguments: list[str] | None = None) -> int:
    """Measure or fit; return the exit status."""
    parser = arguments_parser(__doc__)
    parser.add_argument("what", choices=("measure", "fit"))
    parser.add_argument("--read", type=Path, nargs="+", help="fit: the recorded times, of one or more tables")
    parser.add_argument("--seconds", type=float, default=math.inf, help="measure: stop after this time")
    parser.add_argument("--l2", choices=("cold", "warm"), default="cold", help="measure: the cache before each call")
    parser.add_argument("--worst", type=int, help="measure: this many shapes, the worst ones of gemm_shapes.json")
    parser.add_argument("--longest", type=int, help="measure: this many shapes, the longest of it, with multicast too")
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
    if options.worst:
        shapes = worst_shapes(options.worst)
    elif options.longest:
        shapes = longest_shapes(options.longest)
    else:
        shapes = [shape | {"kind": "test"} for shape in draw_shapes()]
        shapes += [shape | {"kind": "train"} for shape in training_shapes()]
    method = {"ranked": RANKED, "l2": options.l2}
    record = Record(options.out, "GEMM configurations at random shapes", "cuda", options.seconds, **method)
    compile_all(shapes)
    complete = record.fill(shapes, functools.partial(shape_row, l2=options.l2), show)
    record.finish() if complete else record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
