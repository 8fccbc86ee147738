"""What a sweep says: the choices for `attention(backend="auto")`, who is best where, and what the default costs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

from utils.attention import choosing as measured
from utils.attention.choosing import Point
from utils.bench import results as res
from utils.bench.errors import BenchError
from utils.bench.report import page, table
from utils.bench.workload import DTYPES

MACHINE = ("gpu", "cpu", "torch", "cudnn", "cuda", "driver", "triton", "python", "commit", "dirty")
COLUMNS = ("Kind", "Head dim", "Shapes", "Best (shapes)", "torch's default", "Default / best", "Worst", "at")


def point_of_row(row: dict) -> Point:
    """Return the shape of a row as `attention` looks it up."""
    same = {name: row[name] for name in ("batch", "heads", "kv_heads", "head_dim", "kind", "causal")}
    return Point(**same, sq=row["seq_len_q"], sk=row["seq_len_kv"], bits=8 * DTYPES[row["dtype"]].itemsize)


def measured_shapes(document: dict) -> list[dict]:
    """Make one entry for each shape that a backend ran.

    Returns:
        The fields of the shape's rows, and "point", "ms" {backend: ms}, "best", and "default_cost": the default's time
        over the best.
    """
    by_label: dict[str, list[dict]] = {}
    for row in document["rows"]:
        if row["set"] == "grid":
            by_label.setdefault(row["label"], []).append(row)
    entries = []
    for label, rows in by_label.items():
        ms = {row["backend"]: row["ms"] for row in rows if row["status"] == res.OK}
        if ms:
            first, best = rows[0], min(ms, key=lambda name: ms[name])
            fields = {key: first[key] for key in ("kind", "head_dim", "default")}
            cost = ms[first["default"]] / ms[best] if first["default"] in ms else None
            fields |= {"label": label, "point": point_of_row(first), "ms": ms, "best": best, "default_cost": cost}
            entries.append(fields)
    return entries


def choices_document(document: dict) -> dict:
    """Make the small JSON that `use_choices` reads: the grid's shapes and times."""
    entries = measured_shapes(document)
    if not entries:
        raise BenchError("the sweep measured no shape of the grid, so there is nothing to choose by.")
    env = document["environment"]
    return {
        "schema": measured.SCHEMA,
        "version": measured.VERSION,
        "machine": {key: env.get(key) for key in MACHINE},
        "measured": document["finished"],
        "status": document["status"],
        "rule": measured.RULE,
        "points": [
            asdict(entry["point"]) | {"ms": {name: float(f"{ms:.4g}") for name, ms in entry["ms"].items()}}
            for entry in entries
        ],
    }


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.geometric_mean(known) if known else None


def by_group(document: dict) -> list[dict]:
    """Make a row for each kind and head dimension: how often each backend is best, and what the default costs."""
    groups: dict[tuple[int, int], list[dict]] = {}
    for entry in measured_shapes(document):
        groups.setdefault((measured.KINDS.index(entry["kind"]), entry["head_dim"]), []).append(entry)
    rows = []
    for (kind, head_dim), entries in sorted(groups.items()):
        worst = max(entries, key=lambda entry: entry["default_cost"] or 0.0)
        rows.append(
            {
                "kind": measured.KINDS[kind],
                "head_dim": head_dim,
                "shapes": len(entries),
                "best": dict(Counter(entry["best"] for entry in entries).most_common()),
                "default": dict(Counter(entry["default"] for entry in entries).most_common()),
                "default_over_best": geometric_mean(entry["default_cost"] for entry in entries),
                "worst": worst["default_cost"],
                "worst_at": worst["label"],
            }
        )
    return rows


def group_lines(document: dict) -> list[list[str]]:
    """Return the lines of the table of kinds and head dimensions, under COLUMNS."""

    def cell(value: object) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name} {count}" for name, count in value.items())
        return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    return [[cell(value) for value in row.values()] for row in by_group(document)]


def markdown(document: dict) -> str:
    """Return the sweep as a page: who is best where, the default's cost, every shape's times, the refusals."""
    env = document["environment"]
    shapes = [
        [
            *(entry["kind"], entry["label"], entry["best"], entry["default"]),
            "-" if entry["default_cost"] is None else f"{entry['default_cost']:.3f}",
            ", ".join(f"{name} {ms:.4g}" for name, ms in sorted(entry["ms"].items(), key=lambda pair: pair[1])),
        ]
        for entry in measured_shapes(document)
    ]
    refused = Counter((row["backend"], row["status"], row["refused"]) for row in document["rows"] if row["refused"])
    return page(
        [
            "# Which attention backend is best where",
            f"{env.get('gpu') or env.get('cpu')} · torch {env['torch']} · CUDA {env['cuda']} · cuDNN {env['cudnn']} · "
            f"driver {env['driver']} · commit {(env.get('commit') or 'unknown')[:12]} · {document['status']}",
            "Milliseconds are medians of interleaved calls. Default / best is a geometric mean: what torch's own choice "
            "costs.",
            table(COLUMNS, group_lines(document)),
            "## The grid",
            table(["kind", "shape", "best", "default", "default / best", "ms"], shapes),
            "## Refused",
            table(["backend", "", "reason", "shapes"], [[*key, str(count)] for key, count in refused.items()]),
        ]
    )
