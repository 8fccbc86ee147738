"""Comparing two runs, case by case. Runs of different GPUs, shapes or dtypes are refused, and the error says why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from utils.bench import results as res
from utils.bench.errors import BenchError
from utils.bench.report import page, table, to_csv
from utils.bench.targets.base import SIDES
from utils.benchmark import intervals as stats
from utils.benchmark.result import Measurement, format_interval, with_interval
from utils.files import write_whole

SAME_WITHIN = 0.02  # clocks and addresses alone make two processes differ by this much
SEPARATE_RUNS = "Two separate runs: what clocks did in between is in no interval."
VERSIONS = ("torch", "triton", "cuda", "cudnn", "driver", "commit", "flash_attn_4", "float32_matmul_precision")


def separate_speedup(a: Measurement, b: Measurement) -> dict:
    """Return {"speedup", "interval", "verdict"} of b over a for measurements that were not taken together."""
    ratio = a.median_ms / b.median_ms
    half = math.hypot(*(stats.relative_half_width(side.interval_ms, side.median_ms) for side in (a, b)))
    interval = ratio / (1.0 + half), ratio * (1.0 + half)
    pairs = min(len(a.samples_ms), len(b.samples_ms))
    verdict = stats.verdict(interval, same_within=SAME_WITHIN, pairs=pairs)
    return {"speedup": ratio, "interval": list(interval), "verdict": verdict}


def differences(a: Mapping, b: Mapping, names: Sequence[str]) -> list[str]:
    """List the names whose values differ: "seq_len 1024 and 2048"."""
    return [f"{name} {a.get(name)} and {b.get(name)}" for name in names if a.get(name) != b.get(name)]


def _check_comparable(a: dict, b: dict) -> None:
    """Raise BenchError for runs of two machines, without a common target, or with a workload that one of them lacks."""
    ids, machines = f"{a['run_id']} and {b['run_id']}", (res.machine_name(a), res.machine_name(b))
    if machines[0] != machines[1]:
        raise BenchError(
            f"{ids} are of different machines, {' and '.join(machines)}: their times cannot be compared. "
            "Run both on one machine."
        )
    targets = [sorted({case["target"] for case in run["cases"]}) for run in (a, b)]
    if not set(targets[0]) & set(targets[1]):
        names = " and ".join(", ".join(found) or "none" for found in targets)
        raise BenchError(f"{ids} share no target: they have {names}.")
    for run, other in ((a, b), (b, a)):
        keys = {res.case_key(case) for case in other["cases"]}
        for case in run["cases"]:
            workloads = [one["workload"] for one in other["cases"] if one["target"] == case["target"]]
            if workloads and res.case_key(case) not in keys:
                work = case["workload"]
                nearest = min((differences(work, workload, list(work)) for workload in workloads), key=len)
                raise BenchError(
                    f"{case['target']} was measured on different workloads: {'; '.join(nearest)} (in "
                    f"{run['run_id']} and {other['run_id']}). Compare runs of the same shapes, dtypes and masks."
                )


def _pairs(a: dict, b: dict) -> list[tuple[dict, dict]]:
    """Pair the cases with the same target and workload; several cases of one workload are paired in their order."""
    by_key: dict[tuple, list[dict]] = {}
    for case in b["cases"]:
        by_key.setdefault(res.case_key(case), []).append(case)
    return [(case, by_key[key].pop(0)) for case in a["cases"] if by_key.get(key := res.case_key(case))]


def _compare_side(a: dict, b: dict, side: str) -> dict | None:
    """Make the row of one side of two cases; None if one of them was not timed."""
    first, second = res.measured(a, side), res.measured(b, side)
    if first is None or second is None:
        return None
    values_a, values_b = ({key: knob["value"] for key, knob in case["knobs"].items()} for case in (a, b))
    row = {"target": a["target"], "workload": a["label"], "side": side}
    for run, case, measured in (("a", a, first), ("b", b, second)):
        row |= {f"{run}_ran": case["ran"][side]["provider"], f"{run}_ms": measured.median_ms}
        row[f"{run}_interval_ms"] = list(measured.interval_ms)
    knobs = differences(values_a, values_b, [key for key in values_a if key in values_b])
    return row | separate_speedup(first, second) | {"knobs": knobs}


def compare_results(a: dict, b: dict) -> list[dict]:
    """Make one row for each side that both runs measured: "speedup" is how many times as fast b is as a."""
    _check_comparable(a, b)
    rows = []
    for first, second in _pairs(a, b):
        if different := differences(res.timing_mode(first), res.timing_mode(second), ("l2", "graph")):
            raise BenchError(
                f"{first['target']} was timed in two ways, {'; '.join(different)} (in {a['run_id']} and "
                f"{b['run_id']}): compare runs with the same --l2 and --graph."
            )
        rows += [row for side in SIDES if (row := _compare_side(first, second, side)) is not None]
    if not rows:
        raise BenchError(
            f"{a['run_id']} and {b['run_id']} have no side that both measured; their cases ended as "
            f"{sorted({case['status'] for case in a['cases'] + b['cases']})}."
        )
    return rows


def notes(a: dict, b: dict) -> list[str]:
    """List what else differs between the runs: versions, commits, power limits, and whether one is partial."""
    lines = differences(a["environment"], b["environment"], VERSIONS)
    limits = [(run.get("gpu_state") or {}).get("power_limit_w") for run in (a, b)]
    if limits[0] != limits[1]:
        lines.append(f"power limit {limits[0]} W and {limits[1]} W")
    return lines + [f"{run['run_id']} is partial ({run['status']})" for run in (a, b) if run["status"] != "complete"]


def comparison_table(a: dict, b: dict, rows: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and lines of two compared runs, for the terminal and for a page."""
    ids = {"a": a["run_id"], "b": b["run_id"]}
    lines = [
        [
            *(row["target"], row["workload"], row["side"]),
            *(f"{row[f'{run}_ran']} {format_interval(row[f'{run}_ms'], *row[f'{run}_interval_ms'])}" for run in ids),
            f"{with_interval(row['speedup'], *row['interval'])} {row['verdict']}",
            "; ".join(row["knobs"]),
        ]
        for row in rows
    ]
    runs = [f"{run.upper()}: {run_id}" for run, run_id in ids.items()]
    return ["Target", "Workload", "Side", *runs, "B over A", "Other knobs"], lines


def write_comparison(a: dict, b: dict, rows: Sequence[dict], folder: Path) -> list[Path]:
    """Write CSV and Markdown of two compared runs, whose rows `compare_results(a, b)` returned; return the paths."""
    written = [folder / "comparison.csv", folder / "comparison.md"]
    cells = []
    for row in rows:
        ends = {key: row[key] for key in row if "interval" in key}
        cells.append({key: value for key, value in row.items() if key not in ends} | {"knobs": "; ".join(row["knobs"])})
        for key, (low, high) in ends.items():
            name = "speedup" if key == "interval" else key.replace("_interval", "")
            cells[-1] |= {f"{name}_low": low, f"{name}_high": high}
    write_whole(written[0], to_csv(cells, tuple(cells[0])))
    parts = [f"# Run {b['run_id']} against {a['run_id']}", f"{res.machine_name(a)}. {SEPARATE_RUNS}"]
    if different := notes(a, b):
        parts.append(f"Also different: {'; '.join(different)}.")
    write_whole(written[1], page([*parts, table(*comparison_table(a, b, rows))]))
    return written
