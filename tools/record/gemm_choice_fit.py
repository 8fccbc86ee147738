"""Fit the constants of the model that chooses the GEMM's configuration, and judge what it chooses, by recorded times.

`python -m tools.record.gemm_choice fit --read FILES` calls `print_fit`. It judges by shapes that the constants have not seen:
the shapes are divided into four groups, and each is judged by constants that were fitted to the other three. Those that it
prints last are fitted to all. Every fit begins with the present constants. So the judgement is of unseen shapes only for rows
that were measured after these were fitted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from tools.record.common import read_record
from tools.record.gemm_choice_shapes import SIZES, config_of
from tools.record.gemm_shapes import SMS, late_rows
from utils.kernels import gemm_model
from utils.kernels.gemm_candidates import Traits

COLD_US = 1.5  # more of a product whose operands are not in the L2
COMMON = (
    0.05  # weight of what the model gets wrong for all configurations of a row alike: a GPU's clocks and memory differ
)
GROUPS = 4
FAMILIES = "different families"  # in the "what" of records whose rows compare families, which count more
FIXED = ("edge",)  # constants that are not fitted: bytes count of the whole tile


@dataclass(frozen=True)
class Measured:
    """Measured times as arrays, an entry for each configuration at a shape."""

    rows: list[dict]
    row: np.ndarray  # which row an entry is of
    us: np.ndarray
    sizes: tuple[np.ndarray, ...]  # m, n, k
    late: tuple[np.ndarray, np.ndarray]
    traits: Traits
    more: np.ndarray  # us that a cold L2 takes
    weight: np.ndarray  # of an entry in its row: one that is much slower than the best counts less
    counts: np.ndarray  # of a row

    def estimates(self, cost: gemm_model.Cost) -> np.ndarray:
        """Return the model's times."""
        return gemm_model.estimates(*self.sizes, self.traits, SMS, self.late, cost) + self.more

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sum over the entries of each row."""
        return np.bincount(self.row, values, len(self.rows))


def recorded_rows(path: Path) -> list[dict]:
    """Return the rows of a record of times, or of `gemm_shapes`, and how they were measured.

    Until launches began early, records did not say which configurations are wrong.
    """
    record = read_record(path)
    rows = [row if "times" in row else row | {"times": [[row["config"], row["us"]]]} for row in record["rows"]]
    how = {
        "waiting": "times" in record["rows"][0] and "wrong" not in record,
        "cold": record.get("l2", "cold") == "cold",
        "families": FAMILIES in record["what"],
    }
    return [row | how for row in rows]


def times_of(row: dict) -> list[tuple]:
    """Return the configurations of a row that are candidates still, each with its measured time.

    Tiles that began at other places along K ("spread") count as those that do not: of 93 pairs one takes as long as the other.
    """
    found = [(config, us) for name, us in row["times"] if (config := config_of(name)) is not None]
    return [(replace(config, early=False), us) for config, us in found] if row.get("waiting") else found


def measured(rows: list[dict]) -> Measured:
    """Return the times of these rows as arrays. Rows of which no configuration is left are left out."""
    rows = [row for row in rows if times_of(row)]
    entries = [(i, config, us) for i, row in enumerate(rows) for config, us in times_of(row)]
    index, us = np.array([i for i, _, _ in entries]), np.array([us for _, _, us in entries])
    best = np.full(len(rows), math.inf)
    np.minimum.at(best, index, us)

    def column(values: list) -> np.ndarray:
        return np.array(values)[index]

    late = [late_rows(row) for row in rows]
    counts = [
        0.3 if len(row["times"]) == 1 else 1.0 if row.get("waiting") else 9.0 if row.get("families") else 3.0
        for row in rows
    ]
    return Measured(
        rows,
        index,
        us,
        tuple(column([row[x] for row in rows]) for x in "mnk"),
        (column([a for a, _ in late]), column([b for _, b in late])),
        Traits.of_all(config for _, config, _ in entries),
        column([COLD_US if row.get("cold") else 0.0 for row in rows]),
        (best[index] / us) ** 3,
        np.array(counts),
    )


def error(given: Measured, cost: gemm_model.Cost) -> float:
    """Return how far the model is off where it matters for a choice: a mean square of log(estimate / measured).

    What all configurations of a row have in common counts little, and so does a configuration that is much slower than
    the best one.
    """
    logs = np.log(given.estimates(cost) / given.us)
    total = given.sums(given.weight)
    mean = given.sums(given.weight * logs) / total
    spread = given.sums(given.weight * (logs - mean[given.row]) ** 2) / total
    return float((given.counts * (spread + COMMON * mean**2)).sum() / given.counts.sum())


def fit(given: Any, cost, tries: int = 4000, error: Callable = error, seed: int = 0):
    """Fit the constants by random steps in some of them, which become smaller; one that does not help is not taken.

    error: takes what is given and constants, and returns what is to become small.
    """
    draw, best = random.Random(seed), error(given, cost)
    names = [field.name for field in fields(cost) if field.name not in FIXED]
    for i in range(tries):
        size = 0.25 * (1 - 0.8 * i / tries)
        changed = draw.sample(names, draw.choice((1, 1, 2, 3, 5)))
        tried = replace(cost, **{x: getattr(cost, x) * math.exp(draw.gauss(0, size)) for x in changed})
        if (now := error(given, tried)) < best:
            best, cost = now, tried
    return cost


def choices(given: Measured, cost: gemm_model.Cost) -> list[tuple[float, float, float]]:
    """Return for each row with more than one configuration: measured times of the best, of the chosen, and of torch.matmul."""
    times, found = given.estimates(cost), []
    for i, row in enumerate(given.rows):
        (entries,) = np.nonzero(given.row == i)
        if len(entries) > 1:
            us = given.us[entries]
            found.append((float(us.min()), float(us[times[entries].argmin()]), row["torch_us"]))
    return found


def judge(found: list[tuple[float, float, float]]) -> dict:
    """Return how a choice does: time of the best over time of the chosen, and of torch.matmul over both."""

    def mean(values: list[float]) -> float:
        return math.exp(sum(map(math.log, values)) / len(values))

    return {
        "shapes": len(found),
        "best / chosen": mean([best / chosen for best, chosen, _ in found]),
        "worst choice": min(best / chosen for best, chosen, _ in found),
        "torch / chosen": mean([torch / chosen for _, chosen, torch in found]),
        "torch / best": mean([torch / best for best, _, torch in found]),
        "under_0.90": sum(torch < 0.9 * chosen for _, chosen, torch in found),
        "best under_0.90": sum(torch < 0.9 * best for best, _, torch in found),
    }


def groups(rows: list[dict]) -> list[list[dict]]:
    """Divide rows into four groups; rows of one shape are in one group."""
    shapes = sorted({tuple(row[x] for x in SIZES) for row in rows})
    random.Random(5).shuffle(shapes)
    number = {shape: i % GROUPS for i, shape in enumerate(shapes)}
    return [[row for row in rows if number[tuple(row[x] for x in SIZES)] == i] for i in range(GROUPS)]


def print_fit(paths: list[Path], tries: int = 4000) -> None:
    """Fit the recorded times; print what is chosen at shapes that were not seen, and the constants that are fitted to all."""
    rows = [row for path in paths for row in recorded_rows(path)]
    parts = groups(rows)
    held_out: dict[str, list] = {"fitted to the others": [], "present": []}
    for i, part in enumerate(parts):
        seen = measured([row for j, other in enumerate(parts) if j != i for row in other])
        unseen = [
            x for x in (measured([row for row in part if row.get("families", False) == f]) for f in (False, True))
        ]
        fitted = fit(seen, gemm_model.COST, tries // 2)
        for name, cost in (("fitted to the others", fitted), ("present", gemm_model.COST)):
            held_out[name].append([choices(x, cost) for x in unseen])
    for name, found in held_out.items():
        for which, kind in enumerate(("earlier searches", "searches of all families")):
            print(f"{name} constants, held-out shapes, {kind}: {judge([x for part in found for x in part[which]])}")
    everything = measured(rows)
    fitted = fit(everything, gemm_model.COST, tries)
    for name, cost in (("fitted to all", fitted), ("present", gemm_model.COST)):
        print(f"{name}: off by {math.sqrt(error(everything, cost)):.2%}, {judge(choices(everything, cost))}")
    print("constants:", {name: float(f"{value:.4g}") for name, value in asdict(fitted).items()})
