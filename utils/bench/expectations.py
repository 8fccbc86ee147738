"""What each GPU is expected to do: `expectations/<gpu>.json`, checked against by every commit, changed by request.

    {"schema": "labs-bench-expectations", "version": 1, "gpu": "NVIDIA H200",
     "entries": [{"target", "label", "workload", "options", "metrics": {name: {"value", "interval", "direction"}},
                  "recorded": {"run_id", "date", "commit", ...}, "history": [{"metrics", "recorded"}, ...]}]}

A metric says which direction is better. It is worse when its whole interval lies beyond the stored one's by more than
the tolerance. Checking never writes, so a stored value cannot drift: it changes by `--update-expectations` alone, and
what it replaces stays in `history`, oldest first.
"""

from __future__ import annotations

import re
from pathlib import Path

from utils.bench import results as res
from utils.bench.errors import BenchError
from utils.bench.targets.base import WORKLOAD_KNOBS
from utils.files import ROOT, write_whole
from utils.machine.device import detect_gpu

SCHEMA, VERSION = "labs-bench-expectations", 1
FOLDER = ROOT / "expectations"
TOLERANCE = 0.05

HIGHER, LOWER = "higher", "lower"
DIRECTIONS = {"optimized_ms": LOWER, "baseline_ms": LOWER, "speedup": HIGHER}

BETTER, WITHIN, WORSE, UNSURE = "better", "within", "worse", "unsure"
RECORDED_FROM = ("gpu", "driver", "cuda", "cudnn", "torch", "triton", "flash_attn_4", "commit", "dirty")


def expectations_file(gpu: str | None, folder: Path = FOLDER) -> Path:
    """The file of a GPU by its CUDA name: `h200.json` for a row of GPU_SPECS, else a name made of the whole name."""
    if gpu is None:
        raise BenchError(
            "expectations are kept for GPUs, and these results are of a CPU: its times depend on what "
            "else runs on it. Use `labs bench compare` with an earlier run of this machine."
        )
    name = detect_gpu(gpu) or re.sub(r"(?i)^nvidia\s+", "", gpu)
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def load_expectations(path: Path) -> dict:
    """Read an expectations file; a GPU without one is an error that says how to record it."""
    if not path.is_file():
        raise BenchError(
            f"there is no {path}: this GPU has no expectations yet; record them with "
            "`labs bench run --targets ... --update-expectations`."
        )
    document = res.read_document(path, SCHEMA, VERSION, ("gpu", "entries"))
    for entry in document["entries"]:
        for name, metric in entry.get("metrics", {}).items():
            if metric.get("direction") != DIRECTIONS.get(name) or len(metric.get("interval", ())) != 2:
                raise BenchError(
                    f"{path} is damaged: the metric {name!r} of {entry.get('target')} has no interval or "
                    f"the direction {metric.get('direction')!r}; put back the committed file."
                )
    return document


def options(case: dict) -> dict:
    """Knobs that choose what runs and are no part of the workload: two backends are two expectations."""
    return {key: knob["value"] for key, knob in case["knobs"].items() if key not in WORKLOAD_KNOBS}


def metrics(case: dict) -> dict:
    """Absolute times and their ratio, with intervals and directions, of a case that was measured whole."""
    found = {}
    for side in ("optimized", "baseline"):
        if (measured := res.measured(case, side)) is not None:
            found[f"{side}_ms"] = {"value": measured.median_ms, "interval": list(measured.interval_ms)}
    if case["comparison"] is not None:
        found["speedup"] = {"value": case["comparison"]["speedup"], "interval": list(case["comparison"]["interval"])}
    return {name: {**metric, "direction": DIRECTIONS[name]} for name, metric in found.items()}


def judge(now: dict, then: dict, tolerance: float = TOLERANCE) -> str:
    """ "better", "within", "worse" or "unsure": where the interval of now lies against the stored one."""
    (low, high), (stored_low, stored_high) = now["interval"], then["interval"]
    floor, ceiling = stored_low / (1.0 + tolerance), stored_high * (1.0 + tolerance)
    if floor <= low and high <= ceiling:
        return WITHIN
    above, below = low > ceiling, high < floor
    if not above and not below:
        return UNSURE
    return BETTER if above == (then["direction"] == HIGHER) else WORSE


# Decided on the optimized side's time and on the ratio; the baseline's time says which of the two moved.
def decide(judged: dict[str, str]) -> tuple[str, bool, str]:
    """(verdict, whether the check fails, what it means) out of each metric's judgement."""
    time, base, ratio = (judged.get(name) for name in ("optimized_ms", "baseline_ms", "speedup"))
    if time == WORSE:
        if ratio == WORSE or ratio is None:
            return "regression", True, "the optimized side is slower, in time and against its baseline"
        if base == WORSE:
            return (
                "slower",
                True,
                (
                    "both sides are slower: a cause they share, such as clocks, power or the driver; "
                    "the ratio alone would not show it"
                ),
            )
        return "slower", True, "the optimized side's time is worse and the ratio does not say so yet"
    if ratio == WORSE:
        if base == BETTER:
            return "baseline faster", False, "the ratio fell because the baseline got faster; the optimized side holds"
        return "regression", True, "the ratio to the baseline is worse"
    if time is None and base is not None:
        return ("slower", True, "the baseline's time is worse") if base == WORSE else ("steady", False, "")
    if ratio == BETTER and time != BETTER:
        return (
            "baseline slower",
            base == WORSE,
            ("the ratio rose because the baseline is slower; the optimized side is no faster"),
        )
    if base == WORSE:
        return "baseline slower", True, "the baseline's time is worse"
    if time == BETTER:
        return "improvement", False, "faster than expected; --update-expectations would record it"
    if UNSURE in judged.values():
        return "not enough data", False, "an interval crosses the tolerance: take more --iterations"
    return "steady", False, ""


def _entry(document: dict, case: dict) -> dict | None:
    wanted = (case["target"], case["workload"], options(case), res.timing_mode(case))
    for entry in document["entries"]:
        if (entry["target"], entry["workload"], entry["options"], res.timing_mode(entry)) == wanted:
            return entry
    return None


def check(document: dict, expected: dict, tolerance: float = TOLERANCE) -> list[dict]:
    """One row for each measured case: verdict, whether it fails, and each metric now and then. It writes nothing.

    The commit plays no part: a result is held to the stored value whichever commit either comes from.
    """
    if document["environment"].get("gpu") != expected["gpu"]:
        raise BenchError(
            f"these results are of {res.machine_name(document)} and the expectations of "
            f"{expected['gpu']}: they cannot be compared."
        )
    rows = []
    for case in document["cases"]:
        row = {"target": case["target"], "workload": case["label"], "options": options(case), "metrics": {}}
        if case["status"] != res.OK:
            expected_here = _entry(expected, case) is not None
            row |= {"verdict": case["status"], "fails": expected_here, "why": case["reason"]}
            rows.append(row)
            continue
        entry = _entry(expected, case)
        if entry is None:
            row |= {"verdict": "no expectation", "fails": False, "why": "nothing is stored for this case"}
            rows.append(row)
            continue
        now, judged = metrics(case), {}
        for name, then in entry["metrics"].items():
            if name in now:
                judged[name] = judge(now[name], then, tolerance)
                row["metrics"][name] = {"now": now[name], "expected": then, "judged": judged[name]}
        verdict, fails, why = decide(judged)
        row |= {"verdict": verdict, "fails": fails, "why": why, "recorded": entry["recorded"]}
        rows.append(row)
    return rows


def updated(document: dict, expected: dict | None) -> tuple[dict, list[str]]:
    """The expectations with this run's cases recorded, old values moved to their history; and what changed, in words.

    Only cases measured whole (both sides, verified) are recorded.
    """
    gpu = document["environment"].get("gpu")
    if expected is None:
        expected = {"schema": SCHEMA, "version": VERSION, "gpu": gpu, "entries": []}
    if expected["gpu"] != gpu:
        raise BenchError(f"the expectations are of {expected['gpu']} and these results of {gpu}; nothing was changed.")
    environment = document["environment"]
    state = document.get("gpu_state") or {}
    recorded = {
        "run_id": document["run_id"],
        "date": document["finished"] or document["started"],
        **{key: environment.get(key) for key in RECORDED_FROM},
        "power_limit_w": state.get("power_limit_w"),
    }
    changes = []
    for case in document["cases"]:
        if case["status"] != res.OK or case["comparison"] is None:
            continue
        entry, new = _entry(expected, case), metrics(case)
        ran = {side: found["provider"] for side, found in case["ran"].items()}
        name = f"{case['target']} {case['label']}"
        if entry is None:
            expected["entries"].append(
                {
                    "target": case["target"],
                    "label": case["label"],
                    "workload": case["workload"],
                    "options": options(case),
                    "timing": res.timing_mode(case),
                    "ran": ran,
                    "metrics": new,
                    "recorded": recorded,
                    "history": [],
                }
            )
            changes.append(f"{name}: recorded, {new['optimized_ms']['value']:.4g} ms, {new['speedup']['value']:.3g}x")
            continue
        entry["history"].append({"metrics": entry["metrics"], "recorded": entry["recorded"]})
        old = entry["metrics"]
        worse = [metric for metric in new if metric in old and judge(new[metric], old[metric]) == WORSE]
        first = entry["history"][0]["metrics"]["optimized_ms"]["value"]
        entry |= {"metrics": new, "recorded": recorded, "ran": ran}
        changes.append(
            f"{name}: {old['optimized_ms']['value']:.4g} -> {new['optimized_ms']['value']:.4g} ms (first "
            f"recorded: {first:.4g} ms), {old['speedup']['value']:.3g} -> {new['speedup']['value']:.3g}x"
            + (f"; WORSE in {', '.join(worse)}" if worse else "")
        )
    if not changes:
        raise BenchError("no case of this run was measured on both sides, so there is nothing to record.")
    return expected, changes


def update_file(document: dict, folder: Path = FOLDER) -> tuple[Path, list[str]]:
    """Record a run in its GPU's file; the path and what changed."""
    path = expectations_file(document["environment"].get("gpu"), folder)
    expected, changes = updated(document, load_expectations(path) if path.exists() else None)
    write_whole(path, res.to_json(expected))
    return path, changes
