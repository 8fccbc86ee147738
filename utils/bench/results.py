"""The results of a run: one JSON document, written whole after every case, and refused where it is not whole.

    {"schema": "labs-bench-results", "version": 1, "run_id": ..., "status": "complete", "environment": {...},
     "cases": [{"target", "workload", "knobs", "status", "sides": {side: measurement}, ...}]}

The run's status is "running", "complete", "interrupted" or why else it ended; a partial document is a valid one.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from utils.bench.errors import BenchError
from utils.benchmark.result import Measurement

SCHEMA, VERSION = "labs-bench-results", 1
RESULTS_FILE, REPORT_FILE, MANIFEST_FILE, LOG_FILE = "results.json", "report.md", "manifest.json", "run.log"

OK, REFUSED, FAILED, OUT_OF_MEMORY, INTERRUPTED, NOT_RUN = (
    "ok",
    "refused",
    "failed",
    "out of memory",
    "interrupted",
    "not run",
)


def _jsonable(value: Any) -> Any:
    """JSON has no NaN or infinity: such a number becomes null rather than a file that other readers refuse."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return value


def to_json(document: Any) -> str:
    return json.dumps(_jsonable(document), indent=1, allow_nan=False) + "\n"


def find_results(where: str | os.PathLike, artifacts_dir: str | os.PathLike = "artifacts") -> Path:
    """The results file of a path, of a run's folder, or of a run id under the artifacts folder."""
    given = Path(where)
    candidates = [given, given / RESULTS_FILE, Path(artifacts_dir) / given / RESULTS_FILE]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    known = sorted(path.parent.name for path in Path(artifacts_dir).glob(f"*/{RESULTS_FILE}"))
    raise BenchError(
        f"there are no results at {where}: neither a file, nor a folder with {RESULTS_FILE}, nor a run in "
        f"{artifacts_dir}/ ({', '.join(known[-5:]) or 'it holds none'})."
    )


def read_document(path: Path, schema: str, version: int, needed: tuple[str, ...]) -> dict:
    """A JSON document of a schema and version; what is truncated, foreign, older or newer is refused by name."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise BenchError(f"{path} is no text file.") from None
    except ValueError as error:
        raise BenchError(f"{path} is truncated or no JSON ({error}); it was not written whole. Run again.") from None
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise BenchError(f"{path} is JSON and no {schema} document: its schema is {found!r}.")
    if document.get("version") != version:
        age = "older" if isinstance(document.get("version"), int) and document["version"] < version else "other"
        raise BenchError(
            f"{path} has the {age} schema {schema} version {document.get('version')!r}; this program "
            f"reads version {version}: run again to make one."
        )
    if missing := [key for key in needed if key not in document]:
        raise BenchError(f"{path} is truncated: {', '.join(missing)} missing from a {schema} document.")
    return document


def load_results(where: str | os.PathLike, artifacts_dir: str | os.PathLike = "artifacts") -> dict:
    """Read a results document and check every measurement in it; partial results are valid and say so in `status`."""
    path = find_results(where, artifacts_dir)
    document = read_document(path, SCHEMA, VERSION, ("run_id", "status", "environment", "cases"))
    for number, case in enumerate(document["cases"]):
        try:
            case["target"], case["status"], case["workload"], case["knobs"]
            for record in case["sides"].values():
                Measurement.from_dict(record)
            if case["status"] == OK and not case["sides"]:
                raise ValueError("it is ok and holds no measurement")
        except (KeyError, TypeError, ValueError) as error:
            raise BenchError(f"{path} is damaged in case {number} (counted from 0): {error!r}.") from None
    return document


def measured(case: dict, side: str) -> Measurement | None:
    """The measurement of a side of a case, None where there is none."""
    record = case["sides"].get(side)
    return None if record is None else Measurement.from_dict(record)


def timing_mode(case: dict) -> dict:
    """What of the timing makes times comparable: the cache's state, and graph or stream."""
    timing = case.get("timing") or {}
    return {"l2": timing.get("l2", "warm"), "graph": timing.get("graph", False)}


def timing_text(timing: dict) -> str:
    """Such as "cold L2, CUDA graph, until the interval is within 1%, at most 5 s a case"."""
    parts = [f"{timing.get('l2', 'warm')} L2", "CUDA graph" if timing.get("graph") else "stream"]
    if timing.get("target_interval") is not None:
        parts.append(f"until the interval is within {timing['target_interval']:.3g} of the median")
    if timing.get("max_seconds") is not None:
        parts.append(f"at most {timing['max_seconds']:g} s a case")
    return ", ".join(parts)


def case_key(case: dict) -> tuple:
    """What makes two cases the same benchmark: the target and the whole workload."""
    return case["target"], *sorted((key, str(value)) for key, value in case["workload"].items())


def machine_name(document: dict) -> str:
    """The GPU of a result, else its CPU and threads."""
    env = document["environment"]
    return env.get("gpu") or f"{env.get('cpu')} ({env.get('threads')} threads)"
