"""The results of a run: one JSON document, written whole after every case.

    {"schema": "labs-bench-results", "version": 1, "run_id": ..., "status": "complete", "environment": {...},
     "cases": [{"target", "workload", "knobs", "status", "sides": {side: measurement}, ...}]}

The run's status is "running", "complete", "interrupted", or the reason why it ended. A partial document is valid.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from utils.bench.documents import Schema
from utils.bench.errors import BenchError
from utils.bench.targets.base import WORKLOAD_KNOBS
from utils.benchmark.result import Measurement

RESULTS = Schema("labs-bench-results", 1, ("run_id", "status", "environment", "cases"))
RESULTS_FILE, REPORT_FILE = "results.json", "report.md"

OK, REFUSED, FAILED = "ok", "refused", "failed"
OUT_OF_MEMORY, INTERRUPTED, NOT_RUN = "out of memory", "interrupted", "not run"


def find_results(where: str | os.PathLike, artifacts_dir: str | os.PathLike = "artifacts") -> Path:
    """Find the results file of a path, of a run's folder, or of a run id under the artifacts folder."""
    given = Path(where)
    for candidate in (given, given / RESULTS_FILE, Path(artifacts_dir) / given / RESULTS_FILE):
        if candidate.is_file():
            return candidate
    known = sorted(path.parent.name for path in Path(artifacts_dir).glob(f"*/{RESULTS_FILE}"))
    raise BenchError(
        f"there are no results at {where}: it is no file, no folder with {RESULTS_FILE}, and no run in "
        f"{artifacts_dir}/ ({', '.join(known[-5:]) or 'that folder has no runs'})."
    )


def load_results(where: str | os.PathLike, artifacts_dir: str | os.PathLike = "artifacts") -> dict:
    """Read a results document and check every measurement in it; the results of an interrupted run are valid."""
    path = find_results(where, artifacts_dir)
    document = RESULTS.read(path)
    for number, case in enumerate(document["cases"]):
        try:
            case["target"], case["status"], case["workload"], case["knobs"]
            for record in case["sides"].values():
                Measurement.from_dict(record)
            if case["status"] == OK and not case["sides"]:
                raise ValueError("its status is ok, but it has no measurement")
        except (KeyError, TypeError, ValueError) as error:
            raise BenchError(f"{path} is damaged in case {number} (counted from 0): {error!r}.") from None
    return document


def measurement_of(case: dict, side: str) -> Measurement | None:
    """Return the Measurement of one side of a case; None if the side has no times."""
    record = case["sides"].get(side)
    return None if record is None else Measurement.from_dict(record)


def remarks(document: dict) -> list[tuple[str, str, str, str]]:
    """List (target, workload, status, text) for each refusal, failure and note of a run."""
    return [
        (case["target"], case["label"], case["status"], text)
        for case in document["cases"]
        for text in ([case["reason"]] if case["reason"] else []) + case["notes"]
    ]


def options(case: dict) -> dict:
    """Return the set knobs that choose the kernel and are not part of the workload: {"backend": "cudnn"}."""
    values = {key: knob["value"] for key, knob in case["knobs"].items() if key not in WORKLOAD_KNOBS}
    return {key: value for key, value in values.items() if value is not None}


def options_text(case: dict) -> str:
    """Write the options of a case: "backend=cudnn"; "(env)" marks options from environment variables."""
    from_environment = {key for key, knob in case["knobs"].items() if knob["origin"].startswith("environment")}
    return " ".join(f"{key}={value}{' (env)' * (key in from_environment)}" for key, value in options(case).items())


def timing_mode(case: dict) -> dict:
    """Return the timing options that two comparable times share: the state of the L2 cache, and graph or stream."""
    timing = case.get("timing") or {}
    return {"l2": timing.get("l2", "warm"), "graph": timing.get("graph", False)}


def case_key(case: dict) -> tuple:
    """Return the target and the whole workload. Two cases with equal keys are the same benchmark."""
    return case["target"], *sorted((key, str(value)) for key, value in case["workload"].items())


def machine_name(document: dict) -> str:
    """Return the GPU of a result, or its CPU with the number of threads."""
    env = document["environment"]
    threads = env.get("threads")
    return env.get("gpu") or f"{env.get('cpu')} ({threads} thread{'' if threads == 1 else 's'})"


def status_text(document: dict) -> str:
    """Count the cases of each status: "3 ok, 1 refused"."""
    counts = Counter(case["status"] for case in document["cases"])
    return ", ".join(f"{number} {status}" for status, number in counts.items()) or "no case ran"


def exit_code(document: dict) -> int:
    """Return 0 if a case ran and none failed, else 1. A refusal is no failure if a different case ran."""
    ended = {case["status"] for case in document["cases"]}
    failed = ended & {FAILED, OUT_OF_MEMORY, INTERRUPTED, NOT_RUN}
    return 1 if failed or OK not in ended else 0
