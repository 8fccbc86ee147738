"""The expected times of each GPU, in `expectations/<gpu>.json`: every commit checks them, only a request changes them.

    {"schema": "labs-bench-expectations", "version": 2, "gpu": "NVIDIA H200",
     "entries": [{"target", "label", "workload", "options", "metrics": {name: {"value", "interval"}},
                  "recorded": {"run_id", "date", "commit", ...}}]}

A metric is worse if its whole interval lies beyond the stored interval by more than the tolerance. A check never writes,
so stored values cannot drift: only `--update-expectations` changes them.
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
TOLERANCE = 0.05  # a metric may lie this far beyond the stored interval

BETTER, WITHIN, WORSE, UNSURE = "better", "within", "worse", "unsure"
RECORDED_FROM = ("gpu", "driver", "cuda", "cudnn", "torch", "triton", "flash_attn_4", "commit", "dirty")


def expectations_file(gpu: str | None, folder: Path = FOLDER) -> Path:
    """Return the path of a GPU's file: `h200.json` for a row of GPU_SPECS, else a file with the full CUDA name."""
    if gpu is None:
        raise BenchError(
            "expectations are kept for GPUs, and these results are of a CPU: its times depend on what "
            "else runs on it. Use `labs bench compare` with an earlier run of this machine."
        )
    name = detect_gpu(gpu) or re.sub(r"(?i)^nvidia\s+", "", gpu)
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def load_expectations(path: Path) -> dict:
    """Read an expectations file. If a GPU has no file, the error says how to record one."""
    if not path.is_file():
        raise BenchError(
            f"there is no {path}: this GPU has no expectations yet; record them with --update-expectations."
        )
    return EXPECTATIONS.read(path)


def metrics(case: dict) -> dict[str, dict]:
    """Return the times of a case and their ratio, each with its interval."""
    values = {}
    for side in ("optimized", "baseline"):
        if (measured := res.measurement_of(case, side)) is not None:
            values[f"{side}_ms"] = {"value": measured.median_ms, "interval": list(measured.interval_ms)}
    if case["comparison"] is not None:
        values["speedup"] = {"value": case["comparison"]["speedup"], "interval": list(case["comparison"]["interval"])}
    return values


def judge(name: str, now: dict, stored: dict) -> str:
    """Judge a metric as "better", "within", "worse" or "unsure". Smaller is better, except for the speed-up."""
    low, high = now["interval"]
    floor, ceiling = stored["interval"][0] / (1.0 + TOLERANCE), stored["interval"][1] * (1.0 + TOLERANCE)
    if floor <= low and high <= ceiling:
        return WITHIN
    if low <= ceiling and high >= floor:
        return UNSURE
    return BETTER if (low > ceiling) == (name == "speedup") else WORSE


def decide(judged: dict[str, str]) -> tuple[str, bool, str]:
    """Decide on a case by the judgements of its metrics; return the verdict, whether the check fails, and a sentence.

    A single worse metric fails, except if the speed-up fell because the baseline got faster. The baseline's time counts,
    too: a slower baseline raises the speed-up, and it shows that clocks, power or the driver slowed both sides.
    """
    worse = [name for name, word in judged.items() if word == WORSE]
    if worse == ["speedup"] and judged.get("baseline_ms") == BETTER:
        return "baseline faster", False, "the optimized side holds"
    if worse:
        return "regression", True, f"worse: {', '.join(worse)}"
    if BETTER in judged.values():
        return "improvement", False, "--update-expectations would record it"
    if UNSURE in judged.values():
        return "not enough data", False, "an interval crosses the tolerance: take more --iterations"
    return "steady", False, ""


def _find_entry(expected: dict, case: dict) -> dict | None:
    """Find the entry of the same target, workload, options and way of timing."""
    key = (case["target"], case["workload"], res.options(case), res.timing_mode(case))
    for entry in expected["entries"]:
        if (entry["target"], entry["workload"], entry["options"], res.timing_mode(entry)) == key:
            return entry
    return None


def check(document: dict, expected: dict) -> list[dict]:
    """Make one row for each case: the verdict, whether it fails, and each metric, new and stored. Write nothing.

    The commits of the result and of the stored value do not matter.
    """
    _check_gpu(document, expected)
    return [_check_case(case, _find_entry(expected, case)) for case in document["cases"]]


def _check_gpu(document: dict, expected: dict) -> None:
    if document["environment"].get("gpu") != expected["gpu"]:
        raise BenchError(
            f"these results are of {res.machine_name(document)} and the expectations of {expected['gpu']}."
        )


def _check_case(case: dict, entry: dict | None) -> dict:
    row = {"target": case["target"], "workload": case["label"], "options": res.options(case), "metrics": {}}
    if case["status"] != res.OK:
        return row | {"verdict": case["status"], "fails": entry is not None, "why": case["reason"]}
    if entry is None:
        return row | {"verdict": "no expectation", "fails": False, "why": "nothing is stored for this case"}
    for name, now in metrics(case).items():
        if (stored := entry["metrics"].get(name)) is not None:
            row["metrics"][name] = {"now": now, "expected": stored, "judged": judge(name, now, stored)}
    verdict, fails, why = decide({name: metric["judged"] for name, metric in row["metrics"].items()})
    return row | {"verdict": verdict, "fails": fails, "why": why, "recorded": entry["recorded"]}


def update_file(document: dict, folder: Path = FOLDER) -> tuple[Path, list[str]]:
    """Record in the GPU's file all cases with two timed sides; return the path and the changes in words."""
    environment = document["environment"]
    path = expectations_file(environment.get("gpu"), folder)
    expected = EXPECTATIONS.document(gpu=environment.get("gpu"), entries=[])
    if path.exists():
        expected = load_expectations(path)
        _check_gpu(document, expected)
    recorded = {"run_id": document["run_id"], "date": document["finished"] or document["started"]}
    recorded |= {key: environment.get(key) for key in RECORDED_FROM}
    recorded |= {"power_limit_w": (document.get("gpu_state") or {}).get("power_limit_w")}
    complete = [case for case in document["cases"] if case["status"] == res.OK and case["comparison"] is not None]
    if not complete:
        raise BenchError("no case of this run was measured on both sides, so there is nothing to record.")
    changes = [_record_case(case, expected, recorded) for case in complete]
    return write_json(path, expected), changes


def _record_case(case: dict, expected: dict, recorded: dict) -> str:
    """Record one case as a new entry, or replace its old values; return the change in words."""
    old, new = _find_entry(expected, case), metrics(case)
    entry = {key: case[key] for key in ("target", "label", "workload")}
    entry |= {"options": res.options(case), "timing": res.timing_mode(case), "metrics": new, "recorded": recorded}
    entry["ran"] = {side: record["provider"] for side, record in case["ran"].items()}
    change = f"{case['target']} {case['label']}: {new['optimized_ms']['value']:.4g} ms, {new['speedup']['value']:.3g}x"
    if old is None:
        expected["entries"].append(entry)
        return f"{change}; recorded"
    before = old["metrics"]
    old |= entry
    worse = [name for name in new if name in before and judge(name, new[name], before[name]) == WORSE]
    return f"{change}, before {before['optimized_ms']['value']:.4g} ms" + f"; WORSE in {', '.join(worse)}" * bool(worse)
