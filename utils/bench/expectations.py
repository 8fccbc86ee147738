"""What each GPU is expected to do: `expectations/<gpu>.json`, checked by every commit, changed only on request.

    {"schema": "labs-bench-expectations", "version": 2, "gpu": "NVIDIA H200",
     "entries": [{"target", "label", "workload", "options", "metrics": {name: {"value", "interval"}},
                  "recorded": {"run_id", "date", "commit", ...}}]}

A metric is worse when its whole interval lies beyond the stored one's by more than the tolerance. Checking never writes,
so a stored value cannot drift: only `--update-expectations` changes it.
"""

from __future__ import annotations

import re
from pathlib import Path

from utils.bench import results as res
from utils.bench.documents import Schema, write_json
from utils.bench.errors import BenchError
from utils.files import ROOT
from utils.machine.device import detect_gpu

EXPECTATIONS = Schema("labs-bench-expectations", 2, ("gpu", "entries"))
FOLDER = ROOT / "expectations"
TOLERANCE = 0.05  # how far beyond the stored interval counts

BETTER, WITHIN, WORSE, UNSURE = "better", "within", "worse", "unsure"
RECORDED_FROM = ("gpu", "driver", "cuda", "cudnn", "torch", "triton", "flash_attn_4", "commit", "dirty")


def expectations_file(gpu: str | None, folder: Path = FOLDER) -> Path:
    """Name the file of a GPU by its CUDA name: `h200.json` for a row of GPU_SPECS, else made of the whole name."""
    if gpu is None:
        raise BenchError(
            "expectations are kept for GPUs, and these results are of a CPU: its times depend on what "
            "else runs on it. Use `labs bench compare` with an earlier run of this machine."
        )
    name = detect_gpu(gpu) or re.sub(r"(?i)^nvidia\s+", "", gpu)
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def load_expectations(path: Path) -> dict:
    """Read an expectations file; for a GPU without one, the error says how to record it."""
    if not path.is_file():
        raise BenchError(
            f"there is no {path}: this GPU has no expectations yet; record them with --update-expectations."
        )
    return EXPECTATIONS.read(path)


def metrics(case: dict) -> dict[str, dict]:
    """Return the times of a case and their ratio, each with its interval."""
    values = {}
    for side in ("optimized", "baseline"):
        if (measured := res.measured(case, side)) is not None:
            values[f"{side}_ms"] = {"value": measured.median_ms, "interval": list(measured.interval_ms)}
    if case["comparison"] is not None:
        values["speedup"] = {"value": case["comparison"]["speedup"], "interval": list(case["comparison"]["interval"])}
    return values


def judge(name: str, now: dict, stored: dict) -> str:
    """Judge a metric, of which less is better unless it is the speed-up: "better", "within", "worse" or "unsure"."""
    low, high = now["interval"]
    floor, ceiling = stored["interval"][0] / (1.0 + TOLERANCE), stored["interval"][1] * (1.0 + TOLERANCE)
    if floor <= low and high <= ceiling:
        return WITHIN
    if low <= ceiling and high >= floor:
        return UNSURE
    return BETTER if (low > ceiling) == (name == "speedup") else WORSE


# (time, ratio, baseline's time) as they were judged, None for any -> verdict, whether the check fails, what it means.
# The first row that fits counts. The optimized side's time and the ratio decide; the baseline's says which of the two moved.
RULES = (
    (WORSE, WORSE, None, "regression", True, "the optimized side is slower, in time and against its baseline"),
    (WORSE, None, WORSE, "slower", True, "both sides are slower: clocks, power or the driver"),
    (WORSE, None, None, "slower", True, "the optimized side's time is worse, the ratio not yet"),
    (None, WORSE, BETTER, "baseline faster", False, "the baseline got faster; the optimized side holds"),
    (None, WORSE, None, "regression", True, "the ratio to the baseline is worse"),
    (None, None, WORSE, "baseline slower", True, "the baseline's time is worse, which raises the ratio alone"),
    (BETTER, None, None, "improvement", False, "faster than expected; --update-expectations would record it"),
    (None, BETTER, None, "baseline slower", False, "the ratio rose because the baseline is slower"),
)


def decide(judged: dict[str, str]) -> tuple[str, bool, str]:
    """Decide on a case by its metrics' judgements; return the verdict, whether the check fails, and what it means."""
    found = [judged.get(name) for name in ("optimized_ms", "speedup", "baseline_ms")]
    unsure = ("not enough data", False, "an interval crosses the tolerance: take more --iterations")
    steady = unsure if UNSURE in found else ("steady", False, "")
    fitting = (
        rule[3:] for rule in RULES if all(wanted in (None, given) for wanted, given in zip(rule, found, strict=False))
    )
    return next(fitting, steady)


def _find_entry(expected: dict, case: dict) -> dict | None:
    """Find the entry of the same target, workload, options and way of timing."""
    key = (case["target"], case["workload"], res.options(case), res.timing_mode(case))
    for entry in expected["entries"]:
        if (entry["target"], entry["workload"], entry["options"], res.timing_mode(entry)) == key:
            return entry
    return None


def check(document: dict, expected: dict) -> list[dict]:
    """Make one row for each case: its verdict, whether it fails, and each metric now and as stored. Writes nothing.

    Commits play no part: a result is compared with the stored value, whichever commit either comes from.
    """
    _check_gpu(document, expected, "they cannot be compared")
    return [_check_case(case, _find_entry(expected, case)) for case in document["cases"]]


def _check_gpu(document: dict, expected: dict, consequence: str) -> None:
    if document["environment"].get("gpu") != expected["gpu"]:
        raise BenchError(
            f"these results are of {res.machine_name(document)} and the expectations of {expected['gpu']}: {consequence}."
        )


def _check_case(case: dict, entry: dict | None) -> dict:
    row = {"target": case["target"], "workload": case["label"], "options": res.options(case), "metrics": {}}
    if case["status"] != res.OK:
        return row | {"verdict": case["status"], "fails": entry is not None, "why": case["reason"]}
    if entry is None:
        return row | {"verdict": "no expectation", "fails": False, "why": "nothing is stored for this case"}
    now = metrics(case)
    row["metrics"] = {
        name: {"now": now[name], "expected": stored, "judged": judge(name, now[name], stored)}
        for name, stored in entry["metrics"].items()
        if name in now
    }
    verdict, fails, why = decide({name: metric["judged"] for name, metric in row["metrics"].items()})
    return row | {"verdict": verdict, "fails": fails, "why": why, "recorded": entry["recorded"]}


def updated(document: dict, expected: dict | None) -> tuple[dict, list[str]]:
    """Record a run's cases with both sides verified and timed in the expectations; return them and the changes in words."""
    environment = document["environment"]
    expected = expected or EXPECTATIONS.document(gpu=environment.get("gpu"), entries=[])
    _check_gpu(document, expected, "nothing was changed")
    recorded = {"run_id": document["run_id"], "date": document["finished"] or document["started"]}
    recorded |= {key: environment.get(key) for key in RECORDED_FROM}
    recorded |= {"power_limit_w": (document.get("gpu_state") or {}).get("power_limit_w")}
    complete = [case for case in document["cases"] if case["status"] == res.OK and case["comparison"] is not None]
    if not complete:
        raise BenchError("no case of this run was measured on both sides, so there is nothing to record.")
    return expected, [_record_case(case, expected, recorded) for case in complete]


def _record_case(case: dict, expected: dict, recorded: dict) -> str:
    """Record one case, as a new entry or in the place of its old values; return the change in words."""
    entry, new = _find_entry(expected, case), metrics(case)
    ran = {side: record["provider"] for side, record in case["ran"].items()}
    name = f"{case['target']} {case['label']}"
    now = f"{new['optimized_ms']['value']:.4g} ms, {new['speedup']['value']:.3g}x"
    if entry is None:
        facts = {key: case[key] for key in ("target", "label", "workload")}
        facts |= {"options": res.options(case), "timing": res.timing_mode(case), "ran": ran}
        expected["entries"].append(facts | {"metrics": new, "recorded": recorded})
        return f"{name}: recorded, {now}"
    old = entry["metrics"]
    entry |= {"metrics": new, "recorded": recorded, "ran": ran}
    worse = [metric for metric in new if metric in old and judge(metric, new[metric], old[metric]) == WORSE]
    return f"{name}: {old['optimized_ms']['value']:.4g} -> {now}" + f"; WORSE in {', '.join(worse)}" * bool(worse)


def update_file(document: dict, folder: Path = FOLDER) -> tuple[Path, list[str]]:
    """Record a run in its GPU's file; return the path and the changes in words."""
    path = expectations_file(document["environment"].get("gpu"), folder)
    expected, changes = updated(document, load_expectations(path) if path.exists() else None)
    return write_json(path, expected), changes
