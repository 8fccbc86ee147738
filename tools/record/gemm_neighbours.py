"""Fit what the GEMM's model of the time is off by at measured products: the weights of `utils.kernels.gemm_neighbours`.

    python -m tools.record.gemm_neighbours          write utils/kernels/gemm_measured.json, and judge the choice by it
    python -m tools.record.gemm_neighbours --judge  only judge it

The fit reads all recorded searches with a warm L2, and leaves out every product that is in one of the two tables of random
shapes. So the tables are held out: the judgement is by the times of the model's first four there, which `gemm_shapes --tune` has
recorded. Besides, the products of the fit are divided into five groups, and each is judged by a fit to the other four.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from pathlib import Path

import numpy as np

from tools.record.gemm_choice_fit import Measured, measured, recorded_rows
from tools.record.gemm_choice_shapes import SIZES, recorded
from tools.record.gemm_shapes import SMS, late_rows
from utils.files import ROOT, write_whole
from utils.kernels import gemm_model
from utils.kernels.gemm_neighbours import FILE, described, features, nearness

NOISE = 0.3  # of a measured error, beside 1 for how much errors differ from product to product
LEAST_WEIGHT = 0.02  # of a configuration that is much slower than the best of its product
MORE = 2.0  # weight of searches that compare families
GROUPS = 5
DIGITS = 4  # of a weight
# The tables whose candidates were the first by the model alone (commit f63eb9e).
TUNED = ("gemm_shapes_tuned_before", "gemm_shapes_tuned_before_other")


def rows_of(paths: list[Path]) -> list[dict]:
    """Return the rows with more than one configuration, L2 warm."""
    rows = [row for path in paths for row in recorded_rows(path)]
    return [row for row in rows if len(row["times"]) > 1 and not row["cold"]]


def product_of(row: dict) -> tuple:
    """Return what names a row's product."""
    return tuple(row[x] for x in SIZES[:3])


def tuned_rows() -> list[dict]:
    """Return the rows of both tables with the times of the model's first four, as rows of a search."""
    rows = [row for name in TUNED for row in recorded(name)]
    how = {"cold": False, "waiting": False, "families": True}
    return [row | how | {"times": [*row["tuned_us"].items()]} for row in rows]


class Points:
    """The configurations of some rows: their features, their own errors, and their weights in a fit."""

    def __init__(self, rows: list[dict]) -> None:
        self.given: Measured = measured(rows)
        given = self.given
        self.raw = features(*given.sizes, given.traits, SMS, given.late)
        self.estimates = np.log(given.estimates(gemm_model.COST))
        errors = np.log(given.us) - self.estimates
        self.errors = errors - (given.sums(given.weight * errors) / given.sums(given.weight))[given.row]
        families = np.array([row.get("families", False) for row in given.rows])[given.row]
        self.weight = np.maximum(given.weight * np.where(families, MORE, 1.0), LEAST_WEIGHT)

    def judge(self, corrections: np.ndarray | float = 0.0) -> dict:
        """Return how the first by corrected times does: the best over it, the worst, and how many are under 0.90 of torch."""
        times, found, under = self.estimates + corrections, [], 0
        for i, row in enumerate(self.given.rows):
            (entries,) = np.nonzero(self.given.row == i)
            us = self.given.us[entries]
            chosen = us[times[entries].argmin()]
            found.append(us.min() / chosen)
            under += row["torch_us"] < 0.9 * chosen
        return {
            "products": len(found),
            "best / chosen": round(math.exp(np.log(found).mean()), 4),
            "worst": round(min(found), 3),
            "under 0.90 of torch": int(under),
        }


def fitted(raw: np.ndarray, errors: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean and deviation of the features, and the weight of each point in what is expected elsewhere."""
    mean, deviation = raw.mean(0), np.maximum(raw.std(0), 1e-6)
    points = (raw - mean) / deviation
    return mean, deviation, np.linalg.solve(nearness(points, points) + np.diag(NOISE / weight), errors)


def expected(fit: tuple, raw: np.ndarray, elsewhere: np.ndarray) -> np.ndarray:
    """Return the errors that are expected at other features by a fit to the features `raw`."""
    mean, deviation, weights = fit
    return nearness((elsewhere - mean) / deviation, (raw - mean) / deviation) @ weights


def held_out(points: Points) -> np.ndarray:
    """Return the errors that are expected at each point by a fit to the products of other groups."""
    products = sorted({product_of(row) for row in points.given.rows})
    random.Random(1).shuffle(products)
    group = {product: i % GROUPS for i, product in enumerate(products)}
    groups = np.array([group[product_of(row)] for row in points.given.rows])[points.given.row]
    found = np.zeros(len(groups))
    for i in range(GROUPS):
        seen = groups != i
        fit = fitted(points.raw[seen], points.errors[seen], points.weight[seen])
        found[~seen] = expected(fit, points.raw[seen], points.raw[~seen])
    return found


def contents(points: Points, weights: np.ndarray) -> dict:
    """Return what `utils.kernels.gemm_neighbours` reads."""
    from tools.record.gemm_choice_fit import times_of

    rows = points.given.rows
    configs = [config for row in rows for config, _ in times_of(row)]
    numbers = {config: i for i, config in enumerate(dict.fromkeys(configs))}
    products = [[row["m"], row["n"], row["k"], *late_rows(row)] for row in rows]
    entries = [
        [int(row), numbers[config], float(f"{weight:.{DIGITS}g}")]
        for row, config, weight in zip(points.given.row, configs, weights, strict=True)
    ]
    return {
        "what": "errors of gemm_model at measured products; written by python -m tools.record.gemm_neighbours",
        "products": products,
        "configurations": [described(config) for config in numbers],
        "entries": entries,
    }


def to_lines(value: dict) -> str:
    """Write the file: a line for each configuration, and many products and entries in one."""
    lines = [f' "what": {json.dumps(value["what"])}']
    for key, many in (("products", 8), ("configurations", 1), ("entries", 12)):
        items = [json.dumps(item, separators=(",", ":")) for item in value[key]]
        rows = [",".join(items[i : i + many]) for i in range(0, len(items), many)]
        lines.append(f' "{key}": [\n  ' + ",\n  ".join(rows) + "\n ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: list[str] | None = None) -> int:
    """Fit, judge and write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--judge", action="store_true", help="write no file")
    options = parser.parse_args(arguments)
    rows = rows_of(sorted(ROOT.glob("assets/results/h?00/gemm_choice_*.json")))
    tables = tuned_rows()
    in_tables = {product_of(row) for row in tables}
    points = Points([row for row in rows if product_of(row) not in in_tables])
    print("the fit's products, the model alone:", points.judge())
    print("the fit's products, each held out:", points.judge(held_out(points)))
    fit = fitted(points.raw, points.errors, points.weight)
    of_tables = Points(tables)
    print("the tables' products, the model alone:", of_tables.judge())
    print("the tables' products, all held out:", of_tables.judge(expected(fit, points.raw, of_tables.raw)))
    if not options.judge:
        write_whole(FILE, to_lines(contents(points, fit[2])))
        print(f"wrote {FILE}: {len(points.errors)} configurations of {len(points.given.rows)} products")
    return 0


if __name__ == "__main__":
    sys.exit(main())
