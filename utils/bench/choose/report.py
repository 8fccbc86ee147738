"""What a sweep says: the choices for `attention(backend="auto")`, how well they hold, and what the default costs.

document = load_grid("assets/results/h200/sdpa_grid.json")
choices_document(document)                # the small JSON
holdout_rows(document)                    # each held-out shape: what would be chosen, what was best
summary(document)                         # both in numbers, with geometric means against torch's default
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from utils.attention import choosing as measured
from utils.attention.choosing import Choices, Point
from utils.bench import results as res
from utils.bench.errors import BenchError
from utils.bench.report import table
from utils.bench.workload import DTYPES

WITHIN = 1.03  # a choice this near to the best counts as right: by the measured ratio, tie or not
MACHINE = ("gpu", "cpu", "torch", "cudnn", "cuda", "driver", "triton", "python", "commit", "dirty")


def point_of_row(row: dict) -> Point:
    return Point(
        row["batch"],
        row["heads"],
        row["kv_heads"],
        row["seq_len_q"],
        row["seq_len_kv"],
        row["head_dim"],
        row["kind"],
        8 * DTYPES[row["dtype"]].itemsize,
        row["causal"],
    )


def measured_shapes(document: dict, which: str | None = None) -> list[dict]:
    """One entry a shape: its row's fields, "point", "ms" {backend: ms} of those that ran, "best", and what the default
    costs over the best. Shapes that nothing ran are left out.
    """
    by_label: dict[str, list[dict]] = {}
    for row in document["rows"]:
        if which is None or row["set"] == which:
            by_label.setdefault(row["label"], []).append(row)
    found = []
    for label, rows in by_label.items():
        ms = {row["backend"]: row["ms"] for row in rows if row["status"] == res.OK}
        if not ms:
            continue
        first, best = rows[0], min(ms, key=ms.get)
        found.append(
            {key: first[key] for key in ("set", "kind", "head_dim", "causal", "default")}
            | {
                "label": label,
                "point": point_of_row(first),
                "ms": ms,
                "best": best,
                "default_cost": ms[first["default"]] / ms[best] if first["default"] in ms else None,
            }
        )
    return found


def choices_document(document: dict) -> dict:
    """The small JSON that `use_choices` reads: the grid's shapes and times; the held-out shapes are not in it."""
    entries = measured_shapes(document, "grid")
    if not entries:
        raise BenchError("the sweep holds no shape that was measured, so there is nothing to choose by.")
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


def choices_text(choices: dict) -> str:
    """The small JSON, a shape a line."""
    import json

    head = {key: value for key, value in choices.items() if key != "points"}
    points = ",\n".join("  " + json.dumps(point) for point in choices["points"])
    start = json.dumps(res._jsonable(head), indent=1).rstrip("}").rstrip()
    return f'{start},\n "points": [\n{points}\n ]\n}}\n'


def chosen(choices: Choices, entry: dict, only: Sequence[str] | None = None) -> str:
    """The provider that the choices take for a shape: the first of their order that runs it."""
    able = [name for name in entry["ms"] if only is None or name in only]
    ranked = choices.relative_times(entry["point"], None if only is None else tuple(only))
    return next((name for name in ranked if name in able), entry["default"])


def holdout_rows(document: dict, only: Sequence[str] | None = None) -> list[dict]:
    """Each held-out shape: "chosen", "best", the times, chosen / best, default / chosen. `only`: these providers."""
    choices = measured.parse_choices(choices_document(document), "this sweep")
    rows = []
    for entry in measured_shapes(document, "held-out"):
        ms = {name: value for name, value in entry["ms"].items() if only is None or name in only}
        best, pick = min(ms, key=ms.get), chosen(choices, entry, only)
        rows.append(
            {
                "kind": entry["kind"],
                "label": entry["label"],
                "chosen": pick,
                "best": best,
                "default": entry["default"],
                "ms": ms,
                "over_best": ms[pick] / ms[best],
                "within": ms[pick] / ms[best] <= WITHIN,
                "default_over_chosen": entry["ms"][entry["default"]] / ms[pick]
                if entry["default"] in entry["ms"]
                else None,
            }
        )
    return rows


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values if value is not None]
    return math.exp(sum(logs) / len(logs)) if logs else None


def by_group(document: dict) -> list[dict]:
    """A row for each kind and head dimension: who is best how often, the default's pick, what the default costs."""
    groups: dict[tuple, list[dict]] = {}
    for entry in measured_shapes(document):
        groups.setdefault((entry["kind"], entry["head_dim"]), []).append(entry)
    order = {kind: number for number, kind in enumerate(measured.KINDS)}
    rows = []
    for (kind, head_dim), entries in sorted(groups.items(), key=lambda pair: (order[pair[0][0]], pair[0][1])):
        costs = [entry["default_cost"] for entry in entries if entry["default_cost"] is not None]
        worst = max(entries, key=lambda entry: entry["default_cost"] or 0.0)
        rows.append(
            {
                "kind": kind,
                "head_dim": head_dim,
                "shapes": len(entries),
                "best": dict(Counter(entry["best"] for entry in entries).most_common()),
                "default": dict(Counter(entry["default"] for entry in entries).most_common()),
                "default_over_best": geometric_mean(costs),
                "worst": max(costs, default=None),
                "worst_at": worst["label"],
                "default_within": sum(cost <= WITHIN for cost in costs) / len(costs) if costs else None,
            }
        )
    return rows


def summary(document: dict) -> dict:
    """The sweep in numbers: counts, who is best, and for the held-out shapes how near the choices come."""
    entries, held = measured_shapes(document), holdout_rows(document)
    found = {
        "status": document["status"],
        "shapes": len(entries),
        "grid": sum(e["set"] == "grid" for e in entries),
        "best": dict(Counter(entry["best"] for entry in entries).most_common()),
        "default_over_best": geometric_mean(entry["default_cost"] for entry in entries),
        "groups": by_group(document),
        "held_out": None,
    }
    if held:
        over = [row["over_best"] for row in held]
        found["held_out"] = {
            "shapes": len(held),
            "within_3_percent": sum(row["within"] for row in held),
            "share_within_3_percent": sum(row["within"] for row in held) / len(held),
            "worst_over_best": max(over),
            "chosen_over_best": geometric_mean(over),
            "default_over_best": geometric_mean(
                row["ms"][row["default"]] / row["ms"][row["best"]] for row in held if row["default"] in row["ms"]
            ),
            "default_over_chosen": geometric_mean(row["default_over_chosen"] for row in held),
            "default_within_3_percent": sum(
                row["ms"][row["default"]] <= WITHIN * row["ms"][row["best"]]
                for row in held
                if row["default"] in row["ms"]
            ),
        }
    return found


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _times(ms: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in sorted(ms.items(), key=lambda pair: pair[1]))


def group_lines(document: dict) -> tuple[list[str], list[list[str]]]:
    head = ["Kind", "Head dim", "Shapes", "Best (shapes)", "torch's default", "Default / best", "Worst", "at"]
    return head, [
        [
            row["kind"],
            str(row["head_dim"]),
            str(row["shapes"]),
            _counts(row["best"]),
            _counts(row["default"]),
            f"{row['default_over_best']:.3f}",
            f"{row['worst']:.2f}",
            row["worst_at"],
        ]
        for row in by_group(document)
    ]


def markdown(document: dict) -> str:
    """The sweep as a page: who is best where, the default's cost, the held-out shapes, every shape's times."""
    env, told = document["environment"], summary(document)
    where = env.get("gpu") or env.get("cpu")
    commit = (env.get("commit") or "unknown")[:12] + (" (modified)" if env.get("dirty") else "")
    sessions = document["sessions"]
    when = (
        f"{document['status']}, {sessions[0]['started']}"
        + (f" and {len(sessions) - 1} more sessions" if len(sessions) > 1 else "")
        if sessions
        else document["status"]
    )
    parts = [
        "# Which SDPA backend is best where",
        "",
        f"{where} · torch {env['torch']} · CUDA {env['cuda']} · cuDNN {env['cudnn']} · driver {env['driver']} · "
        f"commit {commit} · {when}",
        "",
        f"{told['shapes']} shapes, {told['grid']} of them on the grid. Milliseconds are medians: "
        f"{document['method']['timing']}. Default / best is a geometric mean: what torch's own choice costs.",
        "",
        table(*group_lines(document)),
        "",
    ]
    if held := told["held_out"]:
        parts += [
            "## Held-out shapes",
            "",
            f"Random shapes that are not on the grid. The choice is within 3% of the best for "
            f"{held['within_3_percent']} of {held['shapes']} ({held['share_within_3_percent']:.1%}), torch's "
            f"default for {held['default_within_3_percent']}. Geometric means: chosen / best "
            f"{held['chosen_over_best']:.4f}, default / best {held['default_over_best']:.4f}, default / chosen "
            f"{held['default_over_chosen']:.4f}.",
            "",
            table(
                ["kind", "shape", "chosen", "best", "chosen / best", "default", "default / chosen", "ms"],
                [
                    [
                        row["kind"],
                        row["label"],
                        row["chosen"],
                        row["best"],
                        f"{row['over_best']:.3f}" + ("" if row["within"] else " !"),
                        row["default"],
                        "-" if row["default_over_chosen"] is None else f"{row['default_over_chosen']:.3f}",
                        _times(row["ms"]),
                    ]
                    for row in holdout_rows(document)
                ],
            ),
            "",
        ]
    parts += [
        "## The grid",
        "",
        table(
            ["kind", "shape", "best", "default", "default / best", "ms"],
            [
                [
                    entry["kind"],
                    entry["label"],
                    entry["best"],
                    entry["default"],
                    "-" if entry["default_cost"] is None else f"{entry['default_cost']:.3f}",
                    _times(entry["ms"]),
                ]
                for entry in measured_shapes(document, "grid")
            ],
        ),
        "",
        "## Refused",
        "",
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in document["rows"]:
        if row["refused"]:
            key = row["backend"], row["status"], _without_sizes(row["refused"])
            reasons.setdefault(key, []).append(row["label"])
    parts += [
        table(
            ["backend", "", "reason", "shapes", "first"],
            [[*key, str(len(labels)), labels[0]] for key, labels in reasons.items()],
        )
        if reasons
        else "Nothing.",
        "",
    ]
    return "\n".join(parts)


def _without_sizes(reason: str) -> str:
    """A reason without the sizes of one shape, so that equal reasons are told once."""
    import re

    return re.sub(r"\[[\d, ]+\]", "[...]", reason)


def paths(out: Path) -> dict[str, Path]:
    """What a sweep into `out` leaves beside it."""
    return {
        "grid": out,
        "choices": out.with_name(f"{out.stem}_choices.json"),
        "report": out.with_name(f"{out.stem}.md"),
        "heatmap": out.with_name(f"{out.stem}_heatmap.png"),
    }
