"""Reports of a run: Markdown, CSV, and plots of latency and of achieved TFLOP/s under the roof."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from utils.bench import results as res
from utils.bench.errors import BenchError
from utils.bench.targets.base import WORKLOAD_KNOBS
from utils.files import write_whole
from utils.measurement import format_ms

COLUMNS = ("target", "workload", "batch", "heads", "seq_len", "head_dim", "dtype", "mask", "doc_span", "score_mod",
           "options", "side", "status", "ran", "median_ms", "low_ms", "high_ms", "mean_ms", "std_ms", "min_ms",
           "max_ms", "p95_ms", "p99_ms", "samples", "tflops", "gb_s", "roof_share", "queries_per_s", "error",
           "error_bound", "speedup", "speedup_low", "speedup_high", "verdict", "reason")


def options_text(case: dict) -> str:
    """Knobs in force that are no part of the workload: "backend=cudnn"; "(env)" marks those from the environment."""
    parts = []
    for key, knob in case["knobs"].items():
        if key not in WORKLOAD_KNOBS:
            value = ",".join(knob["value"]) if isinstance(knob["value"], list) else knob["value"]
            parts.append(f"{key}={value}" + (" (env)" if knob["origin"].startswith("environment") else ""))
    return " ".join(parts)


def rows(document: dict) -> list[dict]:
    """One row for each side of each case, those that did not run included."""
    found = []
    for case in document["cases"]:
        work, pair = case["workload"], case["comparison"]
        for side in case["sides_asked"]:
            row = {"target": case["target"], "workload": case["label"], "options": options_text(case), "side": side,
                   "status": case["status"], "reason": case["reason"], **work}
            row["ran"] = case["ran"].get(side, {}).get("provider")
            if (check := case["verification"].get(side)) is not None:
                row |= {"error": check["whole"], "error_bound": check["whole_bound"]}
            if (measured := res.measured(case, side)) is not None:
                low, high = measured.interval_ms
                row |= {name: getattr(measured, name) for name in ("median_ms", "mean_ms", "std_ms", "min_ms", "max_ms",
                                                                   "p95_ms", "p99_ms", "tflops", "gb_s", "roof_share")}
                row |= {"low_ms": low, "high_ms": high, "samples": len(measured.samples_ms),
                        "queries_per_s": work["batch"] * work["heads"] * work["seq_len"] / (measured.median_ms / 1e3)}
            if pair is not None and side == "optimized":
                row |= {"speedup": pair["speedup"], "speedup_low": pair["interval"][0],
                        "speedup_high": pair["interval"][1], "verdict": pair["verdict"]}
            found.append(row)
    return found


def csv_text(document: dict) -> str:
    """The rows as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", extrasaction="raise")
    writer.writeheader()
    for row in rows(document):
        writer.writerow({key: "" if value is None else value for key, value in row.items()})
    return out.getvalue()


def table(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    def cells(values: list[str]) -> str:
        return "| " + " | ".join(str(value).replace("|", "\\|").replace("\n", " ") for value in values) + " |"

    return "\n".join([cells(head), "|" + " --- |" * len(head), *map(cells, lines)])


def with_interval(value: float, low: float, high: float) -> str:
    return f"{value:.3g} [{low:.3g}, {high:.3g}]"


def markdown(document: dict) -> str:
    """The run as a Markdown page: machine, timings, what ran, knobs in force, refusals and failures."""
    env, everything = document["environment"], rows(document)
    parts = [f"# Run {document['run_id']}", "", f"{res.machine_name(document)} · torch {env['torch']} · Triton "
             f"{env['triton']} · CUDA {env['cuda']} · cuDNN {env['cudnn']} · driver {env['driver']} · commit "
             f"{(env['commit'] or 'unknown')[:12]}{' (modified)' if env['dirty'] else ''}", "",
             f"Status: {document['status']} · started {document['started']} · finished "
             f"{document['finished'] or '-'}", ""]
    if document["command"]:
        parts += ["```", " ".join(document["command"]), "```", ""]
    timed = [row for row in everything if row.get("median_ms") is not None]
    if timed:
        lines = []
        for row in timed:
            speedup = with_interval(row["speedup"], row["speedup_low"], row["speedup_high"]) + f" {row['verdict']}" \
                if "speedup" in row else ""
            share = "" if row["roof_share"] is None else f"{row['roof_share']:.1%}"
            lines.append([row["target"], row["workload"], row["side"], row["ran"],
                          with_interval(row["median_ms"], row["low_ms"], row["high_ms"]), f"{row['tflops']:.3g}",
                          f"{row['gb_s']:.3g}", share, speedup])
        parts += ["## Times", "", "Medians with 95% bootstrap intervals; TFLOP/s count the query-key pairs that the "
                  "mask lets through, GB/s each of q, k, v and the output once.", "",
                  table(["target", "workload", "side", "ran", "median ms", "TFLOP/s", "GB/s", "of the roof",
                         "speed-up"], lines), ""]
        parts += ["## What ran", "", table(
            ["target", "workload", "side", "asked", "ran", "implementation", "launches", "launched",
             "relative error (allowed)"],
            [[case["target"], case["label"], side, ran["asked"], ran["provider"], ran["implementation"],
              ran["launches"] or "",
              ", ".join(_short(name) for name in (ran["kernels"] or _telling(ran["operators"]))[:4]),
              "{:.2g} ({:.2g})".format(*(case["verification"][side][key] for key in ("whole", "whole_bound")))]
             for case in document["cases"] for side, ran in case["ran"].items()]), ""]
    parts += ["## Settings in force", "", table(["target", "workload", "knobs"], _grouped(
        (case["target"], case["label"], ", ".join(f"{key}={knob['value']} ({knob['origin']})"
                                                  for key, knob in case["knobs"].items() if key not in case["workload"]
                                                  or knob["origin"] != "default"))
        for case in document["cases"])), ""]
    notes = _grouped((case["target"], case["label"], case["status"], text) for case in document["cases"]
                     for text in ([case["reason"]] if case["reason"] else []) + case["notes"])
    if notes:
        parts += ["## Refused, failed, noted", "", table(["target", "workload", "status", "why"], notes), ""]
    profiles = [(case, side, found) for case in document["cases"] for side, found in case["profiles"].items()]
    if profiles:
        parts += ["## Profiles", ""]
        for case, side, found in profiles:
            parts += [f"- {case['target']} {case['label']} {side}, range `{found['range']}`: "
                      + ", ".join(f"`{file}`" for file in found["files"])]
            parts += [f"  - {text}" for text in found["why_not"]]
            if (roof := found["roofline"]) is not None:
                parts.append(f"  - counted roofline: {roof['flops_per_byte']:.3g} FLOPs/Byte, {roof['bound']}-bound, "
                             f"{roof['achieved_tflops']:.3g} of {roof['attainable_tflops']:.3g} TFLOP/s attainable")
            if found["gpu_busy_share"] is not None:
                parts.append(f"  - GPU busy {found['gpu_busy_share']:.1%} of the time from first to last kernel")
            parts += [f"  - {row['mean_us']:.1f} us x {row['count']}: `{_short(row['name'], 100)}`"
                      for row in found["rows"][:5]]
        parts.append("")
    return "\n".join(parts)


def _grouped(lines) -> list[list[str]]:
    """Lines that differ in their workload (the second cell) alone, made one."""
    found: dict[tuple, list[str]] = {}
    for target, workload, *rest in lines:
        found.setdefault((target, *rest), []).append(workload)
    return [[key[0], "; ".join(workloads), *key[1:]] for key, workloads in found.items()]


def _short(name: str, length: int = 60) -> str:
    return name if len(name) <= length else name[:length - 3] + "..."


def _telling(operators: list[str]) -> list[str]:
    """Operators that say what ran: attention, products and compiled regions before the rest."""
    words = ("_scaled_dot", "CompiledFx", "softmax", "bmm", "mul")

    def rank(name: str) -> int:
        return next((i for i, word in enumerate(words) if word in name), len(words))

    return sorted(operators, key=rank)[:3]


def plots(document: dict, folder: Path) -> list[Path]:
    """Write latency.png and roofline.png into `folder`; returns what was written."""
    from matplotlib.figure import Figure

    from utils.visualization import plot_latency, plot_roofline

    timed = [(case, side, res.measured(case, side)) for case in document["cases"] for side in case["sides"]]
    if not timed:
        raise BenchError(f"run {document['run_id']} holds no timing to plot (status {document['status']}).")
    many = len({case["target"] for case, _, _ in timed}) > 1
    latencies, points, peaks, roof = {}, {}, {}, None
    for case, side, measured in timed:
        start = f"{case['target'].split(':')[1]} " if many else ""
        name = f"{start}{case['label']} {side} {case['ran'][side]['provider']}"
        if name in latencies:
            name += f" {options_text(case)}"
        latencies[name] = measured
        if measured.roof is not None:
            roof = measured.roof
            peaks[roof["dtype"]] = roof["tflops"]
            points[name] = (measured.flops / measured.bytes, measured.tflops, roof["dtype"])
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    figure, _ = plot_latency(latencies, title=f"{document['run_id']} on {res.machine_name(document)}")
    figures: dict[str, Figure] = {"latency.png": figure}
    if roof is not None:
        top = max(peaks.values())
        figures["roofline.png"], _ = plot_roofline(roof["name"], top, roof["memory_bandwidth_tb_s"], measured=points,
                                                   peaks=peaks)
    for name, drawn in figures.items():
        drawn.savefig(folder / name, dpi=150, bbox_inches="tight")
        written.append(folder / name)
    return written


def write_report(document: dict, folder: Path) -> list[Path]:
    """CSV, Markdown and plots of a run into a folder; the paths written."""
    write_whole(folder / "results.csv", csv_text(document))
    write_whole(folder / res.REPORT_FILE, markdown(document))
    written = [folder / "results.csv", folder / res.REPORT_FILE]
    if any(case["sides"] for case in document["cases"]):
        written += plots(document, folder)
    return written


def summary_line(case: dict) -> str:
    """One line for the terminal: what a case came to."""
    if case["comparison"] is not None:
        pair = case["comparison"]
        return f"{with_interval(pair['speedup'], *pair['interval'])}x {pair['verdict']}"
    if case["sides"]:
        return ", ".join(f"{side} {format_ms(record['median_ms'])}" for side, record in case["sides"].items())
    return f"{case['status']}: {case['reason']}"
