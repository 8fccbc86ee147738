"""Two results held against each other, case by case; different GPUs, shapes or dtypes are refused by name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from utils.bench import results as res
from utils.bench.errors import BenchError
from utils.bench.targets.base import SIDES
from utils.benchmark import intervals as stats

SAME_WITHIN = 0.02  # two processes differ by this much in clocks and addresses alone
RESAMPLES = 2000


def independent_interval(
    a: Sequence[float], b: Sequence[float], confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap interval of median(a) / median(b) for samples that were not taken side by side."""
    rng = np.random.default_rng(seed)

    def medians(samples: Sequence[float]) -> np.ndarray:
        array = np.asarray(samples, dtype=np.float64)
        return np.median(array[rng.integers(array.size, size=(RESAMPLES, array.size))], axis=1)

    ratios = medians(a) / medians(b)
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(ratios, [tail, 100.0 - tail])
    return float(low), float(high)


def differences(a: dict, b: dict, names: Sequence[str]) -> list[str]:
    """ "seq_len 1024 and 2048" for each of `names` that differs."""
    return [f"{name} {a.get(name)} and {b.get(name)}" for name in names if a.get(name) != b.get(name)]


def check_machines(a: dict, b: dict) -> None:
    """Refuse results of two machines: a GPU and another, or CPUs with another number of threads."""
    first, second = res.machine_name(a), res.machine_name(b)
    if first != second:
        raise BenchError(
            f"these results are of different machines, {first} ({a['run_id']}) and {second} "
            f"({b['run_id']}): their times cannot be compared. Run both on one."
        )


def _by_key(document: dict) -> dict[tuple, list[dict]]:
    found: dict[tuple, list[dict]] = {}
    for case in document["cases"]:
        found.setdefault(res.case_key(case), []).append(case)
    return found


def pairs(a: dict, b: dict) -> list[tuple[dict, dict]]:
    """Cases of a and b with the same target and workload; a target measured on other shapes or dtypes is refused."""
    first, second = _by_key(a), _by_key(b)
    shared_targets = {key[0] for key in first} & {key[0] for key in second}
    if not shared_targets:
        raise BenchError(
            f"{a['run_id']} and {b['run_id']} share no target: "
            f"{', '.join(sorted({key[0] for key in first})) or 'none'} and "
            f"{', '.join(sorted({key[0] for key in second})) or 'none'}."
        )
    for mine, theirs, name, other in ((first, second, a, b), (second, first, b, a)):
        for key, cases in mine.items():
            if key[0] in shared_targets and key not in theirs:
                work = cases[0]["workload"]
                told = min(
                    (
                        differences(work, case["workload"], list(work))
                        for case in other["cases"]
                        if case["target"] == key[0]
                    ),
                    key=len,
                )
                raise BenchError(
                    f"{key[0]} was measured on different workloads: {'; '.join(told)} (in "
                    f"{name['run_id']} and {other['run_id']}). Compare runs of the same shapes, dtypes "
                    "and masks."
                )
    return [(one, two) for key in first if key in second for one, two in zip(first[key], second[key], strict=False)]


def compare_results(a: dict, b: dict) -> list[dict]:
    """One row for each side that both runs measured: the speed-up of b over a, its interval and a verdict."""
    check_machines(a, b)
    rows = []
    for one, two in pairs(a, b):
        if told := differences(res.timing_mode(one), res.timing_mode(two), ("l2", "graph")):
            raise BenchError(
                f"{one['target']} was timed in two ways, {'; '.join(told)} (in {a['run_id']} and "
                f"{b['run_id']}): compare runs with the same --l2 and --graph."
            )
        knobs = differences(
            {key: knob["value"] for key, knob in one["knobs"].items()},
            {key: knob["value"] for key, knob in two["knobs"].items()},
            [key for key in one["knobs"] if key in two["knobs"]],
        )
        for side in SIDES:
            first, second = res.measured(one, side), res.measured(two, side)
            if first is None or second is None:
                continue
            interval = independent_interval(first.samples_ms, second.samples_ms)
            rows.append(
                {
                    "target": one["target"],
                    "workload": one["label"],
                    "side": side,
                    "a_ran": one["ran"][side]["provider"],
                    "b_ran": two["ran"][side]["provider"],
                    "a_ms": first.median_ms,
                    "a_interval_ms": list(first.interval_ms),
                    "b_ms": second.median_ms,
                    "b_interval_ms": list(second.interval_ms),
                    "speedup": first.median_ms / second.median_ms,
                    "interval": list(interval),
                    "verdict": stats.verdict(
                        interval, same_within=SAME_WITHIN, pairs=min(len(first.samples_ms), len(second.samples_ms))
                    ),
                    "knobs": knobs,
                }
            )
    if not rows:
        raise BenchError(
            f"{a['run_id']} and {b['run_id']} have no side that both measured; their cases ended as "
            f"{sorted({case['status'] for case in a['cases'] + b['cases']})}."
        )
    return rows


def notes(a: dict, b: dict) -> list[str]:
    """What else differs between the runs: versions, commits, power limits."""
    told = differences(
        a["environment"],
        b["environment"],
        ("torch", "triton", "cuda", "cudnn", "driver", "commit", "flash_attn_4", "float32_matmul_precision"),
    )
    limits = [(document.get("gpu_state") or {}).get("power_limit_w") for document in (a, b)]
    if limits[0] != limits[1]:
        told.append(f"power limit {limits[0]} W and {limits[1]} W")
    for document in (a, b):
        if document["status"] != "complete":
            told.append(f"{document['run_id']} is partial ({document['status']})")
    return told
