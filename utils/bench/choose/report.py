"""What a sweep says: the choices for `attention(backend="auto")`, how well they hold, and what the default costs.

document = load_grid("assets/results/h200/sdpa_grid.json")
choices_document(document)                # the small JSON that `use_choices` reads
holdout_rows(document)                    # each held-out shape: the chosen provider and the best one
summary(document)                         # both in numbers, with geometric means against torch's default
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from utils.attention import choosing as measured
from utils.attention.choosing import Choices, Point
from utils.bench import results as res
from utils.bench.errors import BenchError
from utils.bench.report import page, percent, table
from utils.bench.workload import DTYPES

WITHIN = 1.03  # a provider this near to the best counts as a right choice
MACHINE = ("gpu", "cpu", "torch", "cudnn", "cuda", "driver", "triton", "python", "commit", "dirty")


def point_of_row(row: dict) -> Point:
    """Return the shape of a row as `attention` looks it up."""
    same = {name: row[name] for name in ("batch", "heads", "kv_heads", "head_dim", "kind", "causal")}
    return Point(**same, sq=row["seq_len_q"], sk=row["seq_len_kv"], bits=8 * DTYPES[row["dtype"]].itemsize)


def measured_shapes(document: dict, which: str | None = None) -> list[dict]:
    """Make one entry for each shape that a provider ran, in the "grid", the "held-out" shapes, or both.

    Returns:
        The fields of the shape's rows, and "point", "ms" {backend: ms}, "best", and "default_cost": the default's time
        over the best.
    """
    by_label: dict[str, list[dict]] = {}
    for row in document["rows"]:
        if which is None or row["set"] == which:
            by_label.setdefault(row["label"], []).append(row)
    entries = []
    for label, rows in by_label.items():
        ms = {row["backend"]: row["ms"] for row in rows if row["status"] == res.OK}
        if not ms:
            continue
        first, best = rows[0], fastest(ms)
        entries.append(
            {
                **{key: first[key] for key in ("set", "kind", "head_dim", "causal", "default")},
                "label": label,
                "point": point_of_row(first),
                "ms": ms,
                "best": best,
                "default_cost": ms[first["default"]] / ms[best] if first["default"] in ms else None,
            }
        )
    return entries


def fastest(ms: dict[str, float]) -> str:
    """Return the provider with the smallest time."""
    return min(ms, key=lambda name: ms[name])


def choices_document(document: dict) -> dict:
    """Make the small JSON that `use_choices` reads: the grid's shapes and times, without the held-out shapes."""
    entries = measured_shapes(document, "grid")
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


def chosen(choices: Choices, entry: dict) -> str:
    """Return the provider that the choices take for a shape: the first of their order that runs it."""
    return next((name for name in choices.relative_times(entry["point"]) if name in entry["ms"]), entry["default"])


def holdout_rows(document: dict) -> list[dict]:
    """Make a row for each held-out shape: "chosen", "best", the times, chosen / best, default / chosen."""
    choices = measured.parse_choices(choices_document(document), "this sweep")
    rows = []
    for entry in measured_shapes(document, "held-out"):
        ms, choice = entry["ms"], chosen(choices, entry)
        over_best, default_ms = ms[choice] / ms[entry["best"]], ms.get(entry["default"])
        rows.append(
            {
                **{key: entry[key] for key in ("kind", "label", "best", "default", "ms")},
                "chosen": choice,
                "over_best": over_best,
                "within": over_best <= WITHIN,
                "default_over_chosen": None if default_ms is None else default_ms / ms[choice],
            }
        )
    return rows


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.geometric_mean(known) if known else None


def by_group(document: dict) -> list[dict]:
    """Make a row for each kind and head dimension: how often each provider is best, and what the default costs."""
    groups: dict[tuple[int, int], list[dict]] = {}
    for entry in measured_shapes(document):
        groups.setdefault((measured.KINDS.index(entry["kind"]), entry["head_dim"]), []).append(entry)
    rows = []
    for (kind, head_dim), entries in sorted(groups.items()):
        costs = [entry["default_cost"] for entry in entries if entry["default_cost"] is not None]
        worst = max(entries, key=lambda entry: entry["default_cost"] or 0.0)
        rows.append(
            {
                "kind": measured.KINDS[kind],
                "head_dim": head_dim,
                "shapes": len(entries),
                "best": _count(entry["best"] for entry in entries),
                "default": _count(entry["default"] for entry in entries),
                "default_over_best": geometric_mean(costs),
                "worst": max(costs, default=None),
                "worst_at": worst["label"],
                "default_within": sum(cost <= WITHIN for cost in costs) / len(costs) if costs else None,
            }
        )
    return rows


def summary(document: dict) -> dict:
    """Return the sweep in numbers: counts, who is best, and for the held-out shapes how near the choices come."""
    entries, held = measured_shapes(document), holdout_rows(document)
    return {
        "status": document["status"],
        "shapes": len(entries),
        "grid": sum(entry["set"] == "grid" for entry in entries),
        "best": _count(entry["best"] for entry in entries),
        "default_over_best": geometric_mean(entry["default_cost"] for entry in entries),
        "groups": by_group(document),
        "held_out": _held_out_summary(held) if held else None,
    }


def _held_out_summary(rows: list[dict]) -> dict:
    over_best = [row["over_best"] for row in rows]
    within = sum(row["within"] for row in rows)
    default = [row["ms"][row["default"]] / row["ms"][row["best"]] for row in rows if row["default"] in row["ms"]]
    return {
        "shapes": len(rows),
        "within_3_percent": within,
        "share_within_3_percent": within / len(rows),
        "worst_over_best": max(over_best),
        "chosen_over_best": geometric_mean(over_best),
        "default_over_best": geometric_mean(default),
        "default_over_chosen": geometric_mean(row["default_over_chosen"] for row in rows),
        "default_within_3_percent": sum(ratio <= WITHIN for ratio in default),
    }


# ---- text --------------------------------------------------------------------------------------------------


def _count(names: Iterable[str]) -> dict[str, int]:
    """Count names, the most frequent first."""
    return dict(Counter(names).most_common())


def _counts_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _times_text(ms: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in sorted(ms.items(), key=lambda pair: pair[1]))


def _ratio_text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def group_table(document: dict) -> tuple[list[str], list[list[str]]]:
    """Return the columns and lines of the table of kinds and head dimensions."""
    columns = ["Kind", "Head dim", "Shapes", "Best (shapes)", "torch's default", "Default / best", "Worst", "at"]
    return columns, [
        [
            *(row["kind"], str(row["head_dim"]), str(row["shapes"])),
            *(_counts_text(row["best"]), _counts_text(row["default"])),
            *(f"{row['default_over_best']:.3f}", f"{row['worst']:.2f}", row["worst_at"]),
        ]
        for row in by_group(document)
    ]


def held_out_sentence(held: dict) -> str:
    """Say how well the choices hold for the held-out shapes of `summary`."""
    return (
        f"Held out: within 3% of the best for {held['within_3_percent']} of {held['shapes']} shapes; "
        f"torch's default for {held['default_within_3_percent']}. Default / chosen, geometric mean: "
        f"{held['default_over_chosen']:.4f}."
    )


def markdown(document: dict) -> str:
    """Return the sweep as a page: who is best where, the default's cost, the held-out shapes, every shape's times."""
    numbers = summary(document)
    grid = [
        [
            *(entry["kind"], entry["label"], entry["best"], entry["default"]),
            *(_ratio_text(entry["default_cost"]), _times_text(entry["ms"])),
        ]
        for entry in measured_shapes(document, "grid")
    ]
    return page(
        [
            "# Which SDPA backend is best where",
            _machine_line(document),
            f"{numbers['shapes']} shapes, {numbers['grid']} of them on the grid. Milliseconds are medians: "
            f"{document['method']['timing']}. Default / best is a geometric mean: what torch's own choice costs.",
            table(*group_table(document)),
            *(_held_out_section(document, numbers["held_out"]) if numbers["held_out"] else ()),
            "## The grid",
            table(["kind", "shape", "best", "default", "default / best", "ms"], grid),
            "## Refused",
            _refusals(document),
        ]
    )


def _machine_line(document: dict) -> str:
    env, sessions = document["environment"], document["sessions"]
    commit = (env.get("commit") or "unknown")[:12] + (" (modified)" if env.get("dirty") else "")
    when = document["status"]
    if sessions:
        when += f", {sessions[0]['started']}"
    if len(sessions) > 1:
        when += f" and {len(sessions) - 1} more sessions"
    return (
        f"{env.get('gpu') or env.get('cpu')} · torch {env['torch']} · CUDA {env['cuda']} · cuDNN {env['cudnn']} · "
        f"driver {env['driver']} · commit {commit} · {when}"
    )


def _held_out_section(document: dict, held: dict) -> list[str]:
    lines = [
        [
            *(row["kind"], row["label"], row["chosen"], row["best"]),
            _ratio_text(row["over_best"]) + ("" if row["within"] else " !"),
            *(row["default"], _ratio_text(row["default_over_chosen"]), _times_text(row["ms"])),
        ]
        for row in holdout_rows(document)
    ]
    return [
        "## Held-out shapes",
        f"Random shapes that are not on the grid. The choice is within 3% of the best for "
        f"{held['within_3_percent']} of {held['shapes']} ({percent(held['share_within_3_percent'])}), torch's "
        f"default for {held['default_within_3_percent']}. Geometric means: chosen / best "
        f"{held['chosen_over_best']:.4f}, default / best {held['default_over_best']:.4f}, default / chosen "
        f"{held['default_over_chosen']:.4f}.",
        table(["kind", "shape", "chosen", "best", "chosen / best", "default", "default / chosen", "ms"], lines),
    ]


def _refusals(document: dict) -> str:
    """Return the table of refusals; reasons that differ only in sizes share a line."""
    labels: dict[tuple[str, str, str], list[str]] = {}
    for row in document["rows"]:
        if row["refused"]:
            reason = re.sub(r"\[[\d, ]+\]", "[...]", row["refused"])
            labels.setdefault((row["backend"], row["status"], reason), []).append(row["label"])
    lines = [[*key, str(len(shapes)), shapes[0]] for key, shapes in labels.items()]
    return table(["backend", "", "reason", "shapes", "first"], lines) if lines else "Nothing."


def paths(out: Path) -> dict[str, Path]:
    """Return the files that a sweep into `out` leaves."""
    return {
        "grid": out,
        "choices": out.with_name(f"{out.stem}_choices.json"),
        "report": out.with_name(f"{out.stem}.md"),
        "heatmap": out.with_name(f"{out.stem}_heatmap.png"),
    }
