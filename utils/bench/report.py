"""Reports of a run: CSV, a Markdown page, and plots of latency and of TFLOP/s under the roof."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from utils.bench import results as res
from utils.benchmark.result import STATISTICS, Measurement, digits, format_interval, format_rate, with_interval
from utils.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rows(document: dict) -> list[dict]:
    """Make one row for each side of each case, also if the side did not run."""
    return [_row(case, side) for case in document["cases"] for side in case["sides_asked"]]


def _row(case: dict, side: str) -> dict:
    work, pair = case["workload"], case["comparison"]
    row = {"target": case["target"], "workload": case["label"], **work, "options": res.options_text(case)}
    row |= {"side": side, "status": case["status"], "reason": case["reason"]}
    row["ran"] = case["ran"].get(side, {}).get("provider")
    if (measured := res.measurement_of(case, side)) is not None:
        low, high = measured.interval_ms
        row |= {name: getattr(measured, name) for name in STATISTICS}
        row |= {"low_ms": low, "high_ms": high, "samples": len(measured.samples_ms)}
        row |= {name: measured.method.get(name) for name in ("outliers", "throttled", "discarded")}
        if "heads" in work:
            row["queries_per_s"] = work["batch"] * work["heads"] * work["seq_len"] / (measured.median_ms / 1e3)
    if (check := case["verification"].get(side)) is not None:
        row |= {"error": check["whole"], "error_bound": check["whole_bound"]}
    if pair is not None and side == "optimized":
        low, high = pair["interval"]
        row |= {"speedup": pair["speedup"], "speedup_low": low, "speedup_high": high, "verdict": pair["verdict"]}
    return row


# ---- tables ------------------------------------------------------------------------------------------------


def to_csv(lines: Sequence[Mapping]) -> str:
    """Return rows as CSV. Each name in a row is a column; None and missing cells are empty."""
    import pandas as pd

    return pd.DataFrame(lines).to_csv(index=False, float_format=lambda value: digits(value, 7))


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""

    def line_text(cells: Sequence[object]) -> str:
        return "| " + " | ".join(str(cell).strip().replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line_text(head), "|" + " --- |" * len(head), *map(line_text, lines)])


def times_table(document: dict) -> tuple[list[str], list[list[str]]]:
    """Return the columns and lines of a run's times, for the terminal and for a page."""
    lines = []
    for row in (row for row in rows(document) if "median_ms" in row):
        speedup = ""
        if "speedup" in row:
            speedup = with_interval(row["speedup"], row["speedup_low"], row["speedup_high"]) + f" {row['verdict']}"
        lines.append(
            [
                row["target"],
                row["workload"],
                f"{row['side']}: {row['ran']}",
                format_interval(row["median_ms"], row["low_ms"], row["high_ms"]),
                format_rate(row["tflops"]),
                "-" if row["gb_s"] is None else digits(row["gb_s"]),
                "-" if row["roof_share"] is None else format(row["roof_share"], ".1%"),
                speedup,
                row["options"],
            ]
        )
    return ["Target", "Workload", "Side: ran", "Median [95%]", "Rate", "GB/s", "Of roof", "Speed-up", "Options"], lines


def join_workloads(lines: Iterable[Sequence[str]]) -> list[list[str]]:
    """Join lines that differ only in their workload, the second cell."""
    workloads: dict[tuple, list[str]] = {}
    for target, workload, *rest in lines:
        workloads.setdefault((target, *rest), []).append(workload)
    return [[key[0], "; ".join(names), *key[1:]] for key, names in workloads.items()]


def terminal_remarks(document: dict) -> list[str]:
    """Return the lines under a run's table: refusals, failures and notes. A heading names their workloads."""
    below: dict[str, list[str]] = {}
    for target, labels, status, text in join_workloads(res.remarks(document)):
        below.setdefault(f"{target} ({labels}) {status}:", []).append(f"    {text}")
    return [line for heading, texts in below.items() for line in (heading, *texts)]


# ---- a run as a page ---------------------------------------------------------------------------------------


def markdown(document: dict) -> str:
    """Return the run as a Markdown page: machine, command, times, backends, refusals, failures and profiles."""
    parts = _head(document)
    columns, times = times_table(document)
    if times:
        parts += [
            "## Times",
            "Medians with 95% intervals; FLOPs are those of matrix products, in attention of the query-key pairs that the "
            "mask lets through; GB/s count each input and output once.",
            table(columns, times),
            "## What ran",
            table(*_what_ran(document)),
        ]
    if remarks := join_workloads(res.remarks(document)):
        parts += ["## Refused, failed, noted", table(["target", "workload", "status", "why"], remarks)]
    if profiles := [line for case in document["cases"] for line in _profiles(case)]:
        parts += ["## Profiles", "\n".join(profiles)]
    return "\n\n".join(parts) + "\n"


def _head(document: dict) -> list[str]:
    env = document["environment"]
    timing = ", ".join(f"{name} {value}" for name, value in document["timing"].items() if value)
    command = [f"```\n{' '.join(document['command'])}\n```"] if document["command"] else []
    return [
        f"# Run {document['run_id']}",
        f"{res.machine_name(document)} · torch {env['torch']} · Triton {env['triton']} · CUDA {env['cuda']} · "
        f"cuDNN {env['cudnn']} · driver {env['driver']} · commit {(env['commit'] or 'unknown')[:12]}"
        f"{' (modified)' if env['dirty'] else ''}",
        f"Timing: {timing}",
        f"Status: {document['status']} · started {document['started']} · finished {document['finished'] or '-'}",
        *command,
    ]


def _what_ran(document: dict) -> tuple[list[str], list[list[object]]]:
    """Return columns and lines of a table with the backend, the launched kernels and the error of each side."""
    columns = ["target", "workload", "side", "asked", "ran", "implementation", "launches", "launched"]
    lines = []
    for case in document["cases"]:
        for side, ran in case["ran"].items():
            error = case["verification"].get(side)
            launched = ", ".join(_short(name, 60) for name in (ran["kernels"] or ran["operators"])[:4])
            lines.append(
                [
                    *(case["target"], case["label"], side, ran["asked"], ran["provider"], ran["implementation"]),
                    *(ran["launches"] or "", launched),
                    f"{error['whole']:.2g} ({error['whole_bound']:.2g})" if error else "not compared",
                ]
            )
    return [*columns, "relative error (allowed)"], lines


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 3] + "..."


def _profiles(case: dict) -> list[str]:
    """Return a list item for each profile of a case, with the content of the profile below."""
    items = []
    for side, profile in case["profiles"].items():
        files = ", ".join(f"`{file}`" for file in profile["files"])
        items.append(f"- {case['target']} {case['label']} {side}, range `{profile['range']}`: {files}")
        facts = list(profile["why_not"])
        if profile["gpu_busy_share"] is not None:
            facts.append(f"GPU busy {profile['gpu_busy_share']:.1%} of the time from first to last kernel")
        for row in profile["rows"][:5]:  # sorted by self_us: an operator's time without the operators inside it
            facts.append(f"{row['self_us'] / row['count']:.1f} us x {row['count']}: `{_short(row['name'], 100)}`")
        items += [f"  - {text}" for text in facts]
    return items


# ---- a run as pictures --------------------------------------------------------------------------------------------


def plots(document: dict, folder: Path) -> list[Path]:
    """Write the plots of each target that has times into `folder`; return the paths."""
    os.environ.setdefault("MPLBACKEND", "Agg")  # matplotlib reads the variable at its import
    by_target: dict[str, list[tuple[dict, str]]] = {}
    for case in document["cases"]:
        for side in case["sides"]:
            by_target.setdefault(case["target"], []).append((case, side))
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    run = f"run {document['run_id']}, {res.machine_name(document)}"
    written = []
    for target, sides in by_target.items():
        suffix = f"_{re.sub('[/:]', '-', target)}" if len(by_target) > 1 else ""
        for name, figure in _figures(target, sides, run).items():
            written.append(folder / f"{name}{suffix}.png")
            figure.savefig(written[-1], dpi=150, bbox_inches="tight")
            plt.close(figure)  # pyplot keeps open figures, and warns at the 21st
    return written


def _sweep(target: str, sides: list[tuple[dict, str]], run: str) -> Figure:
    """Draw the times of a sweep: a line for each side if the values are sizes, else a row for each value."""
    from utils.visualization import plot_latency

    (name,) = sides[0][0]["swept"]
    lines: dict[str, dict[str, Measurement]] = {}
    for case, side in sides:
        label = f"{side}: {case['ran'][side]['provider']}"
        lines.setdefault(label, {})[case["swept"][name]] = Measurement.from_dict(case["sides"][side])
    if all(value.isdigit() for line in lines.values() for value in line) and len(next(iter(lines.values()))) > 1:
        sizes = {label: {int(value): one for value, one in line.items()} for label, line in lines.items()}
        ratios = {int(case["swept"][name]): case["comparison"]["speedup"] for case, _ in sides if case["comparison"]}
        return plot_latency(sizes, size_name=name, title=f"{target}\n{run}", ratios=ratios)[0]
    rows = {f"{name} {value}, {label}": one for label, line in lines.items() for value, one in line.items()}
    return plot_latency(rows, title=f"{target}\n{run}")[0]


def _figures(target: str, sides: list[tuple[dict, str]], run: str) -> dict[str, Figure]:
    """Draw {"latency": ..., "roofline": ...} of one target. The title has the words that all labels share."""
    from utils.visualization import plot_latency, plot_roofline

    if any(case.get("swept") for case, _ in sides):
        return {"sweep": _sweep(target, sides, run)}
    labels = [case["label"].split() for case, _ in sides]
    shared = [word for word in labels[0] if all(word in words for words in labels)]
    latencies: dict[str, Measurement] = {}
    points: dict[str, tuple] = {}
    peaks: dict[str, float] = {}
    roof = None
    for (case, side), words in zip(sides, labels, strict=True):
        measured = Measurement.from_dict(case["sides"][side])
        name = " ".join([*(word for word in words if word not in shared), f"{side}: {case['ran'][side]['provider']}"])
        if name in latencies:
            name += f" {res.options_text(case)}"
        latencies[name] = measured
        if measured.roof is None or not measured.flops or not measured.bytes:
            continue
        roof, dtype = measured.roof, measured.roof["dtype"]
        peaks[dtype] = roof["tflops"]
        points[name] = (measured.flops / measured.bytes, measured.tflops, dtype)
    title = f"{target} {' '.join(shared)}\n{run}"
    figures = {"latency": plot_latency(latencies, title=title)[0]}
    if roof is not None:
        bandwidth = roof["memory_bandwidth_tb_s"]
        figures["roofline"], _ = plot_roofline(
            roof["name"], max(peaks.values()), bandwidth, measured=points, peaks=peaks, title=title
        )
    return figures


def write_report(document: dict, folder: Path) -> list[Path]:
    """Write CSV, Markdown and plots of a run into a folder; return the paths."""
    written = [folder / "results.csv", folder / res.REPORT_FILE]
    write_whole(written[0], to_csv(rows(document)))
    write_whole(written[1], markdown(document))
    if any(case["sides"] for case in document["cases"]):
        written += plots(document, folder)
    return written
