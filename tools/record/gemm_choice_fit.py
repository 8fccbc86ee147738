"""Fit the constants of the model that chooses the GEMM's configuration, and judge what it chooses, by recorded times.

`python -m tools.record.gemm_choice fit --read FILES` calls `print_fit`. Rows of the kind "test" are not fitted to.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

from tools.record.common import read_record
from tools.record.gemm_choice_shapes import SMS, config_of, late_rows

COLD_US = 1.5  # more of a product whose operands are not in the L2
COMMON = 0.15  # weight of what the model gets wrong for all configurations of a row alike


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
