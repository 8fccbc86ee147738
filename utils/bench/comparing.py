"""Compare two runs case by case. Runs with different GPUs, shapes or dtypes raise an error that names the difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from utils.bench import results as res
from utils.bench.errors import BenchError
from utils.bench.report import table, to_csv
from utils.bench.targets.base import SIDES
from utils.benchmark import intervals as stats
from utils.benchmark.result import Measurement, format_interval, with_interval
from utils.files import write_whole

SAME_WITHIN = 0.02  # two processes differ by this much, because their clocks and addresses differ
SEPARATE_RUNS = "Two separate runs: what clocks did in between is in no interval."
VERSIONS = ("torch", "triton", "cuda", "cudnn", "driver", "commit", "flash_attn_4", "float32_matmul_precision")


def separate_speedup(a: Measurement, b: Measurement) -> dict:
    """Return {"speedup", "interval", "verdict"} of b over a, for measurements in separate runs."""
    ratio = a.median_ms / b.median_ms
    half = math.hypot(*(stats.relative_half_width(side.interval_ms, side.median_ms) for side in (a, b)))
    interval = ratio / (1.0 + half), ratio * (1.0 + half)
    pairs = min(len(a.samples_ms), len(b.samples_ms))
    verdict = stats.verdict(interval, same_within=SAME_WITHIN, pairs=pairs)
    return {"speedup": ratio, "interval": list(interval), "verdict": verdict}


def differences(a: Mapping, b: Mapping, names: Sequence[str]) -> list[str]:
    """List the names whose values differ: "seq_len 1024 and 2048"."""
    return [f"{name} {a.get(name)} and {b.get(name)}" for name in names if a.get(name) != b.get(name)]


def _pairs(a: dict, b: dict) -> list[tuple[dict, dict]]:
    """Pair cases with the same target and workload. If a workload has several cases, pair them in their order."""
    by_key: dict[tuple, list[dict]] = {}
    for case in b["cases"]:
        by_key.setdefault(res.case_key(case), []).append(case)
    return [(case, by_key[key].pop(0)) for case in a["cases"] if by_key.get(key := res.case_key(case))]


def _compare_side(a: dict, b: dict, side: str) -> dict | None:
    """Make the row of one side of two cases; None if this side has no time in a case."""
    first, second = res.measurement_of(a, side), res.measurement_of(b, side)
    if first is None or second is None:
        return None
    row = {"target": a["target"], "workload": a["label"], "side": side}
    for run, case, measured in (("a", a, first), ("b", b, second)):
        low, high = measured.interval_ms
        row |= {f"{run}_ran": case["ran"][side]["provider"], f"{run}_ms": measured.median_ms}
        row |= {f"{run}_ms_low": low, f"{run}_ms_high": high}
    speedup = separate_speedup(first, second)
    row["speedup_low"], row["speedup_high"] = speedup.pop("interval")
    knobs, others = ({key: knob["value"] for key, knob in case["knobs"].items()} for case in (a, b))
    return row | speedup | {"knobs": "; ".join(differences(knobs, others, [key for key in knobs if key in others]))}


def compare_results(a: dict, b: dict) -> list[dict]:
    """Make one row for each side that both runs measured: "speedup" is how many times as fast b is as a.

    Raise BenchError for runs of two machines, without a common workload, or timed in two ways.
    """
    ids, machines = f"{a['run_id']} and {b['run_id']}", (res.machine_name(a), res.machine_name(b))
    if machines[0] != machines[1]:
        raise BenchError(
            f"{ids} are of different machines, {' and '.join(machines)}: their times cannot be compared. "
            "Run both on one machine."
        )
    rows = []
    for first, second in _pairs(a, b):
        if different := differences(res.timing_mode(first), res.timing_mode(second), ("l2", "graph")):
            raise BenchError(
                f"{first['target']} was timed in two ways, {'; '.join(different)} (in {ids}): compare runs with the "
                "same --l2 and --graph."
            )
        rows += [row for side in SIDES if (row := _compare_side(first, second, side)) is not None]
    if not rows:
        cases = [[f"{case['target']} {case['label']} ({case['status']})" for case in run["cases"]] for run in (a, b)]
        has = "; ".join(f"{run['run_id']} has {', '.join(found)}" for run, found in zip((a, b), cases, strict=True))
        raise BenchError(f"{ids} share no target with the same shape, dtype and mask that both timed: {has}.")
    return rows


def notes(a: dict, b: dict) -> list[str]:
    """List further differences: versions, commits, power limits, cases that only one run has, partial runs."""
    lines = differences(a["environment"], b["environment"], VERSIONS)
    limits = [(run.get("gpu_state") or {}).get("power_limit_w") for run in (a, b)]
    if limits[0] != limits[1]:
        lines.append(f"power limit {limits[0]} W and {limits[1]} W")
    for run, other in ((a, b), (b, a)):
        keys = {res.case_key(case) for case in other["cases"]}
        alone = [f"{case['target']} {case['label']}" for case in run["cases"] if res.case_key(case) not in keys]
        lines += [f"only {run['run_id']} has {', '.join(alone)}"] * bool(alone)
        lines += [f"{run['run_id']} is partial ({run['status']})"] * (run["status"] != "complete")
    return lines


def comparison_table(a: dict, b: dict, rows: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and lines of two compared runs, for the terminal and for a page."""
    runs = {"a": a["run_id"], "b": b["run_id"]}

    def ends(row: dict, name: str) -> tuple[float, float, float]:
        return row[name], row[f"{name}_low"], row[f"{name}_high"]

    lines = [
        [
            *(row["target"], row["workload"], row["side"]),
            *(f"{row[f'{run}_ran']} {format_interval(*ends(row, f'{run}_ms'))}" for run in runs),
            f"{with_interval(*ends(row, 'speedup'))} {row['verdict']}",
            row["knobs"],
        ]
        for row in rows
    ]
    names = [f"{run.upper()}: {run_id}" for run, run_id in runs.items()]
    return ["Target", "Workload", "Side", *names, "Speed of B over A", "Other knobs"], lines


def write_comparison(a: dict, b: dict, rows: Sequence[dict], folder: Path) -> list[Path]:
    """Write CSV and Markdown of two compared runs; return the paths. `compare_results(a, b)` made the rows."""
    written = [folder / "comparison.csv", folder / "comparison.md"]
    write_whole(written[0], to_csv(rows))
    parts = [f"# Run {b['run_id']} against {a['run_id']}", f"{res.machine_name(a)}. {SEPARATE_RUNS}"]
    if different := notes(a, b):
        parts.append(f"Also different: {'; '.join(different)}.")
    write_whole(written[1], "\n\n".join([*parts, table(*comparison_table(a, b, rows))]) + "\n")
    return written
