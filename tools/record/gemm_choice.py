"""Fit the model that chooses the GEMM's tile and parts: measure many configurations at random shapes, then fit.

    python -m tools.record.gemm_choice measure --l2 cold --out assets/results/h200/gemm_choice.json
    python -m tools.record.gemm_choice measure --l2 warm --worst 44 --out assets/results/h200/gemm_choice_warm.json
    python -m tools.record.gemm_choice measure --l2 warm --longest 24 --out assets/results/h200/gemm_choice_multicast.json
    python -m tools.record.gemm_choice measure --l2 warm --behind 0.97 --out assets/results/h200/gemm_choice_widths.json
    python -m tools.record.gemm_choice measure --l2 warm --poor 0.93 --out assets/results/h200/gemm_choice_clusters.json
    python -m tools.record.gemm_choice measure --l2 warm --few 0.96 --out assets/results/h200/gemm_choice_few.json
    python -m tools.record.gemm_choice fit --read assets/results/h200/gemm_choice_warm.json

`measure` times, at each shape, the configurations that the present model ranks first and torch.matmul, in turns. The shapes
are those of `tools.record.gemm_shapes` (kind "test") and others (kind "train"); with `--worst` they are those at which the
recorded table is worst, and every second one is kept for the test; with `--longest` those that take longest and are not
ahead, and two squares, with as many configurations whose blocks share tiles (`multicast`) as others; with `--behind` those
of two recorded tables whose ratio is below it, and as many of another seed (kind "test"), with some configurations of each
kind (`kinds_of`); with `--poor` likewise, with clusters that add up a tile's parts, and with the names of torch's kernels; with `--few` those of that record with few rows
or columns, and as many others, with clusters of four and eight blocks that share tiles. `fit` does not see the shapes of the test: it prints
the constants for `utils.kernels.gemm_model.Cost` and how much slower than the best measured configuration the chosen one is,
for the shapes it was fitted to and for the others. A configuration is recorded by its name, such as "128x256/4": tile, parts.
"""

from __future__ import annotations

import collections
import functools
import math
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from tools.record.common import Record, arguments_parser, in_many_processes, read_record
from tools.record.gemm_shapes import LARGEST, PROCESSES, SMALLEST, draw_shapes, relative_error
from utils.benchmark.measuring import measure_together
from utils.benchmark.profiling import launched
from utils.files import ROOT

SEED, SHAPES = 7, 140
RANKED = 12  # configurations that are timed at a shape
SPLITS_OF_A_TILE = 2  # at most so many of them differ in their parts only
SMS = 132
MORE_SPLITS = (5, 7, 12)  # numbers of parts that are tried and are no candidates
POOR_SEEDS, POOR_HELD_OUT = (2027, 2028), 14
FEW_SEEDS = (2031, 2032, 2033)
BEHIND_TABLES = ("gemm_shapes", "gemm_shapes_other")
BEHIND_SEED, HELD_OUT = 2027, 14
COLD_US = 1.5  # more of a product whose operands are not in the L2
COMMON = 0.15  # weight of what the model gets wrong for all configurations of a row alike
MOST_ERROR = 4e-3  # of C in bf16, relative to a float64 product; rounding alone gives 1.7e-3


def training_shapes(seed: int = SEED, count: int = SHAPES) -> list[dict]:
    """Draw shapes as `gemm_shapes` does, from another seed; A is row-major, B either."""
    draw = random.Random(seed)
    shapes: list[dict] = []
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


def shapes_behind(ratio: float) -> list[dict]:
    """Return the shapes of both recorded tables whose ratio is below `ratio`, the worst first, each before one of another seed.

    Between them stand squares, where tiles of 192 columns are compared with products apart and joined.
    """
    tables = (read_record(ROOT / f"assets/results/h200/{name}.json")["rows"] for name in BEHIND_TABLES)
    rows = sorted((row for rows in tables for row in rows if row["ratio"] < ratio), key=lambda row: row["ratio"])
    sizes = ("m", "n", "k", "a_column_major", "b_column_major")
    behind = [{x: row[x] for x in sizes} | {"kind": "train", "before": row["config"]} for row in rows]
    others = [shape | {"kind": "test"} for shape in draw_shapes(BEHIND_SEED, len(rows)) if is_long(shape)][:HELD_OUT]
    squares = [
        {"m": x, "n": x, "k": x, "a_column_major": order, "b_column_major": order, "kind": "train", "apart": True}
        for x, order in ((4096, False), (8192, True))
    ]
    found: list[dict] = []
    for i, shape in enumerate(behind):
        found += [
            shape,
            *(others[i // 2 : i // 2 + 1] if i % 2 else []),
            *(squares[i // 8 : i // 8 + 1] if i % 8 == 7 else []),
        ]
    return [{x: y for x, y in shape.items() if x != "dtype"} for shape in found]


def is_long(shape: dict) -> bool:
    """Whether the model expects a product to take more than 7 us: shorter ones are ahead."""
    from utils.kernels import gemm_model

    sizes, late = (shape["m"], shape["n"], shape["k"]), late_rows(shape)
    return gemm_model.estimate(*sizes, gemm_model.choose(*sizes, SMS, late), SMS, late) > 7


@functools.cache
def _configs_by_name() -> dict:
    from utils.kernels.gemm_plan import (
        CONFIGS,
        DEEP,
        EVEN,
        MOST_IN_CLUSTER,
        SHAPES,
        SHORT_CONFIGS,
        SPLITS,
        WIDTHS,
        as_cluster,
    )

    found = [
        replace(
            config,
            split=split,
            pairs=pairs,
            multicast=multicast,
            transposed=transposed,
            early=early,
            join=join,
            spread=spread,
        )
        for config in (*CONFIGS, *WIDTHS, *DEEP, *SHORT_CONFIGS)
        for split in (*SPLITS, *MORE_SPLITS, EVEN)
        for spread in (False, True)
        for pairs in (False, True)
        for multicast in SHAPES
        for transposed in (False, True)
        for early in (True, False)
        for join in (True, False)
        if not (config.short and (multicast or transposed)) and not (pairs and transposed) and (join or config.can_join)
    ]
    found += [
        as_cluster(replace(config, pairs=pairs, transposed=transposed), split)
        for config in (*CONFIGS, *WIDTHS, *DEEP)
        for split in range(2, MOST_IN_CLUSTER + 1)
        for pairs, transposed in ((False, False), (True, False), (False, True))
    ]
    # Of configurations with one name, as of a cluster whose sums leave no room for more slots, the first.
    return {config.name: config for config in reversed(found)}


def config_of(name: str):
    """Return the configuration with a name; None if the kernels no longer have its tile."""
    return _configs_by_name().get(name)


def late_rows(shape: dict) -> tuple[int, int]:
    """Return for A and B how rows lie in memory, and whether they start at odd multiples of 16 bytes: see `gemm_launch.lateness`."""
    a = shape["m"] if shape["a_column_major"] else shape["k"]
    b = shape["k"] if shape["b_column_major"] else shape["n"]
    late, aligned = ((2, 1), (3, 0))
    return (late if a % 16 else aligned)[not shape["a_column_major"]], (late if b % 16 else aligned)[
        shape["b_column_major"]
    ]


def candidates_of(shape: dict) -> list:
    """Return the candidates of a shape."""
    from utils.kernels import gemm_plan

    return gemm_plan.candidates(shape["m"], shape["n"], shape["k"], SMS, late_rows(shape))


def ranked(shape: dict, count: int = RANKED) -> list:
    """Return the configurations that the present model ranks first at a shape; of a long one half of each kernel."""
    if shape.get("apart"):
        found = [x for x in first_of(candidates_of(shape), shape, 400) if x.can_join and not x.multicast]
        return [replace(x, join=join) for x in [x for x in found if x.block_n == 192][:2] for join in (True, False)]
    if "few" in shape:
        return larger_and_others(shape)
    if "poor" in shape:
        return clusters_and_others(shape)
    if "kind" in shape and "long" not in shape:
        return kinds_of(shape)
    if "long" in shape:
        found = candidates_of(shape)
        halves = [[config for config in found if bool(config.multicast) == shared] for shared in (False, True)]
        return [config for half in halves for config in first_of(half, shape, count // 2)]
    return first_of(candidates_of(shape), shape, count)


def kinds_of(shape: dict) -> list:
    """Return some configurations of each kind, those that the present model ranks first: of each tile one number of parts."""
    from utils.kernels import gemm_plan

    m, n, k, late = shape["m"], shape["n"], shape["k"], late_rows(shape)
    found = candidates_of(shape)
    turned = [replace(config, transposed=True) for config in gemm_plan.tiles_for(m, late[0])]
    even = gemm_plan.in_shares(gemm_plan.with_neighbours(gemm_plan.tiles_for(n, late[1]), m, n), m, n, k, SMS)
    even += gemm_plan.in_shares(gemm_plan.with_neighbours(turned, n, m), n, m, k, SMS)
    found += even + [replace(config, spread=True) for config in found + even if not config.short]
    width = {(config.block_m, config.block_n) for config in gemm_plan.WIDTHS}
    of_width = lambda config: (config.block_m, config.block_n) in width  # noqa: E731
    few_tiles = lambda x: x.split > 2 and x.block_m * x.block_n >= 24576  # noqa: E731
    kinds = (
        (1 if min(shape["m"], shape["n"]) <= 512 else 0, few_tiles),
        (1, lambda x: not (x.transposed or x.multicast or of_width(x) or x.short)),
        (1, lambda x: x.multicast and not (x.transposed or of_width(x))),
        (1, lambda x: of_width(x) and not (x.transposed or x.multicast)),
        (1, lambda x: of_width(x) and x.multicast and not x.transposed),
        (1, lambda x: x.transposed and not x.multicast),
        (2, lambda x: x.transposed and x.multicast),
        (2, lambda x: x.even and not x.spread),
        (2, lambda x: x.spread),
    )
    kept = [config for config in [config_of(shape.get("before", ""))] if config]
    for count, of_kind in kinds:
        new = count == 2 and of_kind in (kinds[-1][1], kinds[-2][1])
        pool = found if new else [config for config in found if not (config.even or config.spread)]
        kept += first_of([config for config in pool if of_kind(config)], shape, count, 1)
    shared = [config for config in kept[:1] if config.multicast]
    kept += [replace(config, early=False, prefetch=False, lean=False) for config in shared]
    return [*dict.fromkeys(kept)]


def poor_shapes(ratio: float) -> list[dict]:
    """Return the shapes of both recorded tables whose ratio is below `ratio`, the worst first, and between them held-out ones.

    Those are of other seeds, such as the model expects a cluster's sums in shared memory to help.
    """
    tables = (read_record(ROOT / f"assets/results/h200/{name}.json")["rows"] for name in BEHIND_TABLES)
    rows = sorted((row for rows in tables for row in rows if row["ratio"] < ratio), key=lambda row: row["ratio"])
    sizes = ("m", "n", "k", "a_column_major", "b_column_major")
    poor = [{x: row[x] for x in sizes} | {"kind": "train", "poor": True, "before": row["config"]} for row in rows]
    others = [shape for seed in POOR_SEEDS for shape in draw_shapes(seed, 80) if is_long(shape) and is_helped(shape)]
    others = [{x: shape[x] for x in sizes} | {"kind": "test", "poor": True} for shape in others[:POOR_HELD_OUT]]
    found: list[dict] = []
    for i, shape in enumerate(poor):
        found += [shape, *(others[i // 2 : i // 2 + 1] if i % 2 else [])]
    return found


def few_shapes(ratio: float) -> list[dict]:
    """Return the shapes with few rows or columns at which all of `gemm_choice_clusters` is below a ratio, and others.

    The worst stand first, and between them others of another seed, at which the model expects clusters of four or eight blocks
    to be within a tenth of what is chosen.
    """
    from utils.kernels.gemm_plan import FEW, LARGER

    rows = read_record(ROOT / "assets/results/h200/gemm_choice_clusters.json")["rows"]
    best = [min(row["times"], key=lambda entry: entry[1]) for row in rows]
    found = sorted((row["torch_us"] / us, i, name) for i, (row, (name, us)) in enumerate(zip(rows, best, strict=True)))
    sizes = ("m", "n", "k", "a_column_major", "b_column_major")
    few = [
        {x: rows[i][x] for x in (*sizes, "kind")} | {"poor": True, "few": True, "before": name}
        for value, i, name in found
        if value < ratio and min(rows[i]["m"], rows[i]["n"]) <= FEW
    ]
    others: list[dict] = []
    for shape in (shape for seed in FEW_SEEDS for shape in draw_shapes(seed, 80) if is_long(shape)):
        if min(shape["m"], shape["n"]) > FEW or len(others) == POOR_HELD_OUT:
            continue
        candidates = candidates_of(shape)
        larger = first_of([x for x in candidates if x.multicast in LARGER], shape, 1)
        if larger and estimate(shape, larger[0], None) < 1.1 * estimate(shape, first_of(candidates, shape, 1)[0], None):
            others.append({x: shape[x] for x in sizes} | {"kind": "test", "poor": True, "few": True})
    mixed: list[dict] = []
    for i, shape in enumerate(few):
        mixed += [shape, *(others[i // 2 : i // 2 + 1] if i % 2 else [])]
    return mixed + others[len(few) // 2 :]


def larger_and_others(shape: dict) -> list:
    """Return what was best, clusters of four and eight blocks of each form, and other candidates, the first of each."""
    from utils.kernels.gemm_plan import LARGER

    found = candidates_of(shape)
    larger = [config for config in found if config.multicast in LARGER and shape.get("clusters", True)]
    others = [config for config in found if config.multicast not in LARGER]

    def form(config) -> tuple[int, int]:
        """How many rows and columns of C's own tiles a cluster has."""
        return (config.abreast, config.down) if config.transposed else (config.down, config.abreast)

    kept = [config for config in [config_of(shape.get("before", ""))] if config]
    kept += first_of(larger, shape, 2, 1)
    for each in sorted({form(config) for config in larger}):
        of_form = [config for config in larger if form(config) == each]
        kept += first_of(of_form, shape, 1) + first_of([config for config in of_form if config.split == 1], shape, 1)
    kept += first_of(others, shape, 3) + first_of([config for config in others if config.stages > 8], shape, 1)
    return [*dict.fromkeys(kept)]


def is_helped(shape: dict) -> bool:
    """Whether the model expects a cluster's sums in shared memory to be faster than all else."""
    return first_of(candidates_of(shape), shape, 1)[0].in_cluster


def clusters_and_others(shape: dict) -> list:
    """Return what was chosen, clusters that add up in shared memory, and candidates in more numbers of parts, the first of each.

    Of tiles that two blocks share some begin at other places along K.
    """
    from utils.kernels import gemm_plan

    found = candidates_of(shape)
    clusters, others = ([config for config in found if config.in_cluster == wanted] for wanted in (True, False))
    most = gemm_plan.most_parts
    more = [
        replace(config, split=split)
        for config in others
        if config.split == 2 and not config.short
        for split in MORE_SPLITS
        if split <= min(most(config), -(-shape["k"] // config.block_k) // 2)
    ]
    spread = [replace(config, spread=True) for config in others + more if config.multicast]
    kept = [config for config in [config_of(shape.get("before", ""))] if config]
    for count, found in ((6, clusters if shape.get("clusters", True) else []), (4, others), (1, more), (2, spread)):
        kept += first_of(found, shape, count)
    return [*dict.fromkeys(kept)]


def first_of(found: list, shape: dict, count: int, splits: int = SPLITS_OF_A_TILE) -> list:
    """Return the configurations among these that the present model ranks first, of each tile at most `splits`."""
    from utils.kernels import gemm_model

    sizes, late = (shape["m"], shape["n"], shape["k"]), late_rows(shape)
    found.sort(key=lambda config: gemm_model.estimate(*sizes, config, SMS, late))
    taken: collections.Counter = collections.Counter()
    kept = []
    for config in found:
        kind = replace(config, split=1)
        taken[kind] += 1
        if taken[kind] <= splits:
            kept.append(config)
    return kept[:count]


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
        for config in ranked(shape):
            columns = (
                shape["m"] if config.transposed else shape["n"]
            )  # of the kernel's C: a narrow one has its own products
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
    """Time the ranked configurations, but for those that are wrong, and torch.matmul at a shape."""
    a = matrix(shape["m"], shape["k"], shape["a_column_major"])
    b = matrix(shape["k"], shape["n"], shape["b_column_major"])
    configs = [config for config in ranked(shape) if config.name not in wrong]
    launches = [right_launch(a, b, config) for config in configs]
    calls = [lambda: torch.matmul(a, b), *(lambda launch=launch: launch(a, b) for launch in launches)]
    names = [config.name for config in configs]
    labels = ["torch.matmul", *names]
    timed = measure_together(calls, labels=labels, warmup=2, iterations=9, device="cuda", l2=l2, max_seconds=0.4)
    torch_us, *times = (1e3 * each.median_ms for each in timed)
    row = shape | {"torch_us": torch_us, "times": [*zip(names, times, strict=True)]}
    return row | {"torch_kernels": launched(calls[0]).kernels} if "poor" in shape else row


def right_launch(a: torch.Tensor, b: torch.Tensor, config):
    """Return the launch of a configuration; raise if its first and last rows are not those of a float64 product."""
    from utils.kernels import gemm_launch

    c, launch = gemm_launch.gemm_and_launch(a, b, config)
    if (error := relative_error(c, a, b)) > MOST_ERROR:
        raise RuntimeError(f"{config.name} at {tuple(a.shape)} x {tuple(b.shape)}: error {error:.3g}")
    return launch


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    name, us = min(row["times"], key=lambda entry: entry[1])
    return f"{row['kind']:<6}{row['m']:>6} x {row['n']:>6} x {row['k']:>6}: best {name}, {row['torch_us'] / us:.3f}x"


# ---- the fit -----------------------------------------------------------------------------------------------


def recorded_rows(path: Path) -> list[dict]:
    """Return the rows of a record of times, or of `gemm_shapes`, and how they were measured.

    Until launches began early, records did not say which configurations are wrong.
    """
    record = read_record(path)
    rows = [row if "times" in row else row | {"times": [[row["config"], row["us"]]]} for row in record["rows"]]
    waiting = "times" in record["rows"][0] and "wrong" not in record
    return [row | {"waiting": waiting, "cold": record.get("l2", "cold") == "cold"} for row in rows]


def times_of(row: dict) -> list[tuple]:
    """Return the configurations of a row that the kernel still has, each with its measured time."""
    found = [(config, us) for name, us in row["times"] if (config := config_of(name)) is not None]
    return [(replace(config, early=False), us) for config, us in found] if row.get("waiting") else found


def estimate(row: dict, config, cost) -> float:
    """Return the model's time of a configuration."""
    from utils.kernels import gemm_model

    us = gemm_model.estimate(row["m"], row["n"], row["k"], config, SMS, late_rows(row), cost)
    return us + COLD_US if row.get("cold") else us


def error(rows: list[dict], cost) -> float:
    """Return how far the model is off where it matters for a choice: a mean square of log(estimate / measured).

    What all configurations of a row have in common counts little, and so does a configuration that is much slower than
    the best one. Rows of the present kernels count more than those of earlier ones, which waited for the launch before.
    """
    total = count = 0.0
    for row in rows:
        times = times_of(row)
        if not times:
            continue
        best = min(us for _, us in times)
        weights = [(best / us) ** 3 for _, us in times]
        logs = [math.log(estimate(row, config, cost) / us) for config, us in times]
        mean = sum(weight * x for weight, x in zip(weights, logs, strict=True)) / sum(weights)
        spread = sum(weight * (x - mean) ** 2 for weight, x in zip(weights, logs, strict=True)) / sum(weights)
        counts = 0.3 if len(times) == 1 else 1.0 if row.get("waiting") else 3.0
        total += counts * (spread + COMMON * mean * mean)
        count += counts
    return total / count


def fit(rows: list[dict], cost, tries: int = 4000, error: Callable = error, seed: int = 0):
    """Fit the constants by random steps in some of them, which become smaller; one that does not help is not taken.

    error: takes rows and constants, and returns what is to become small.
    """
    draw, best = random.Random(seed), error(rows, cost)
    names = [field.name for field in fields(cost)]
    for i in range(tries):
        size = 0.25 * (1 - 0.8 * i / tries)
        changed = draw.sample(names, draw.choice((1, 1, 2, 3, 5)))
        tried = replace(cost, **{x: getattr(cost, x) * math.exp(draw.gauss(0, size)) for x in changed})
        if (now := error(rows, tried)) < best:
            best, cost = now, tried
    return cost


def judge(rows: list[dict], cost) -> dict:
    """Return how the choice does: time of the best over time of the chosen, and of torch.matmul over the chosen."""
    against_best, against_torch, oracle = [], [], []
    for row in rows:
        if len(times_of(row)) < 2:
            continue
        estimates = [estimate(row, config, cost) for config, _ in times_of(row)]
        times = [us for _, us in times_of(row)]
        chosen = times[estimates.index(min(estimates))]
        against_best.append(min(times) / chosen)
        against_torch.append(row["torch_us"] / chosen)
        oracle.append(row["torch_us"] / min(times))
    if not against_best:
        return {}

    def mean(values: list[float]) -> float:
        return math.exp(sum(map(math.log, values)) / len(values))

    return {
        "shapes": len(against_best),
        "best / chosen": mean(against_best),
        "worst choice": min(against_best),
        "torch / chosen": mean(against_torch),
        "torch / best": mean(oracle),
        "under_0.90": sum(ratio < 0.9 for ratio in against_torch),
    }


def print_fit(paths: list[Path]) -> None:
    """Fit the recorded times; print the constants and the judgement. Rows of the kind "test" are held out."""
    from utils.kernels import gemm_model

    rows = [row for path in paths for row in recorded_rows(path)]
    rows = [
        {"kind": "train" if row["waiting"] or "config" in row else ("train", "test")[i % 2]} | row
        for i, row in enumerate(rows)
    ]
    seen, held_out = ([row for row in rows if (row["kind"] == "test") == test] for test in (False, True))
    fitted = fit(seen, gemm_model.COST)
    print("fitted:", {name: float(f"{value:.4g}") for name, value in asdict(fitted).items()})
    for what, cost in (("fitted", fitted), ("present", gemm_model.COST)):
        for label, group in (("the shapes of the fit", seen), ("held-out shapes", held_out)):
            if group:
                spread = math.sqrt(error(group, cost))
                print(f"{what} constants, {label}: off by {spread:.0%}, {judge(group, cost)}")


def main(arguments: list[str] | None = None) -> int:
    """Measure or fit; return the exit status."""
    parser = arguments_parser(__doc__)
    parser.add_argument("what", choices=("measure", "fit"))
    parser.add_argument("--read", type=Path, nargs="+", help="fit: the recorded times, of one or more tables")
    parser.add_argument("--seconds", type=float, default=math.inf, help="measure: stop so long after compiling")
    parser.add_argument("--l2", choices=("cold", "warm"), default="cold", help="measure: the cache before each call")
    parser.add_argument("--worst", type=int, help="measure: this many shapes, the worst ones of gemm_shapes.json")
    parser.add_argument("--behind", type=float, help="measure: the shapes of both tables below this ratio, and others")
    parser.add_argument("--poor", type=float, help="measure: the shapes of both tables below this ratio, with clusters")
    parser.add_argument(
        "--few", type=float, help="measure: few rows or columns, below this ratio, with larger clusters"
    )
    parser.add_argument(
        "--without-clusters", action="store_true", help="with --poor and --few: where such clusters do not run"
    )
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
    if options.poor:
        shapes = [shape | {"clusters": not options.without_clusters} for shape in poor_shapes(options.poor)]
    elif options.few:
        shapes = [shape | {"clusters": not options.without_clusters} for shape in few_shapes(options.few)]
    elif options.behind:
        shapes = shapes_behind(options.behind)
    elif options.worst:
        shapes = worst_shapes(options.worst)
    elif options.longest:
        shapes = longest_shapes(options.longest)
    else:
        shapes = [shape | {"kind": "test"} for shape in draw_shapes()]
        shapes += [shape | {"kind": "train"} for shape in training_shapes()]
    method = {"ranked": RANKED, "l2": options.l2}
    wrong = compile_all(shapes)
    # Only now: the seconds are for rows.
    record = Record(options.out, "GEMM configurations at random shapes", "cuda", options.seconds, **method)
    record.contents["wrong"] = wrong
    complete = record.fill(shapes, functools.partial(shape_row, l2=options.l2, wrong=wrong), show)
    record.finish() if complete else record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
