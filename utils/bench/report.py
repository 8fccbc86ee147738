"""Reports of a run: Markdown, CSV, and plots of latency and of achieved TFLOP/s under the roof."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

from utils.bench import counters
from utils.bench import results as res
from utils.bench.errors import BenchError
from utils.bench.targets.base import WORKLOAD_KNOBS
from utils.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "target",
    "workload",
    "batch",
    "heads",
    "seq_len",
    "head_dim",
    "dtype",
    "mask",
    "doc_span",
    "score_mod",
    "kv_heads",
    "seq_len_kv",
    "layout",
    "direction",
    "window",
    "options",
    "side",
    "status",
    "ran",
    "median_ms",
    "low_ms",
    "high_ms",
    "mean_ms",
    "std_ms",
    "min_ms",
    "max_ms",
    "p95_ms",
    "p99_ms",
    "samples",
    "tflops",
    "gb_s",
    "roof_share",
    "queries_per_s",
    "error",
    "error_bound",
    "speedup",
    "speedup_low",
    "speedup_high",
    "verdict",
    "reason",
)


SEPARATE_RUNS = "Two separate runs: their intervals hold the spread within each, not what clocks did in between."


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
            row = {
                "target": case["target"],
                "workload": case["label"],
                "options": options_text(case),
                "side": side,
                "status": case["status"],
                "reason": case["reason"],
                **work,
            }
            row["ran"] = case["ran"].get(side, {}).get("provider")
            if (check := case["verification"].get(side)) is not None:
                row |= {"error": check["whole"], "error_bound": check["whole_bound"]}
            if (measured := res.measured(case, side)) is not None:
                low, high = measured.interval_ms
                row |= {
                    name: getattr(measured, name)
                    for name in (
                        "median_ms",
                        "mean_ms",
                        "std_ms",
                        "min_ms",
                        "max_ms",
                        "p95_ms",
                        "p99_ms",
                        "tflops",
                        "gb_s",
                        "roof_share",
                    )
                }
                row |= {
                    "low_ms": low,
                    "high_ms": high,
                    "samples": len(measured.samples_ms),
                    "queries_per_s": work["batch"] * work["heads"] * work["seq_len"] / (measured.median_ms / 1e3),
                }
            if pair is not None and side == "optimized":
                row |= {
                    "speedup": pair["speedup"],
                    "speedup_low": pair["interval"][0],
                    "speedup_high": pair["interval"][1],
                    "verdict": pair["verdict"],
                }
            found.append(row)
    return found


def csv_text(document: dict) -> str:
    """The rows of a run as CSV."""
    return _csv(rows(document), COLUMNS)


def _csv(lines: list[dict], columns: tuple[str, ...]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", extrasaction="raise")
    writer.writeheader()
    for line in lines:
        writer.writerow({key: "" if value is None else value for key, value in line.items()})
    return out.getvalue()


def table(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""

    def cells(values: list[str]) -> str:
        return "| " + " | ".join(str(value).replace("|", "\\|").replace("\n", " ") for value in values) + " |"

    return "\n".join([cells(head), "|" + " --- |" * len(head), *map(cells, lines)])


def with_interval(value: float, low: float, high: float) -> str:
    return f"{value:.3g} [{low:.3g}, {high:.3g}]"


def _load(document: dict) -> str:
    """How busy a CPU was when the run began: other work on it is in every time."""
    load = document.get("load_average")
    if document["device"] != "cpu" or load is None:
        return ""
    return f" · load average {load:.1f} on {document['environment']['cpu_count']} CPUs when it began"


def markdown(document: dict) -> str:
    """The run as a Markdown page: machine, timings, what ran, knobs in force, refusals and failures."""
    env, everything = document["environment"], rows(document)
    parts = [
        f"# Run {document['run_id']}",
        "",
        f"{res.machine_name(document)} · torch {env['torch']} · Triton "
        f"{env['triton']} · CUDA {env['cuda']} · cuDNN {env['cudnn']} · driver {env['driver']} · commit "
        f"{(env['commit'] or 'unknown')[:12]}{' (modified)' if env['dirty'] else ''}",
        "",
        f"Timing: {res.timing_text(document.get('timing') or {})}" + _load(document),
        "",
        f"Status: {document['status']} · started {document['started']} · finished {document['finished'] or '-'}",
        "",
    ]
    if document["command"]:
        parts += ["```", " ".join(document["command"]), "```", ""]
    timed = [row for row in everything if row.get("median_ms") is not None]
    if timed:
        lines = []
        for row in timed:
            speedup = (
                with_interval(row["speedup"], row["speedup_low"], row["speedup_high"]) + f" {row['verdict']}"
                if "speedup" in row
                else ""
            )
            share = "" if row["roof_share"] is None else f"{row['roof_share']:.1%}"
            lines.append(
                [
                    row["target"],
                    row["workload"],
                    row["side"],
                    row["ran"],
                    with_interval(row["median_ms"], row["low_ms"], row["high_ms"]),
                    f"{row['tflops']:.3g}",
                    f"{row['gb_s']:.3g}",
                    share,
                    speedup,
                ]
            )
        parts += [
            "## Times",
            "",
            "Medians with 95% bootstrap intervals; TFLOP/s count the query-key pairs that the "
            "mask lets through, GB/s each of q, k, v and the output once.",
            "",
            table(
                ["target", "workload", "side", "ran", "median ms", "TFLOP/s", "GB/s", "of the roof", "speed-up"], lines
            ),
            "",
        ]
        parts += [
            "## What ran",
            "",
            table(
                [
                    "target",
                    "workload",
                    "side",
                    "asked",
                    "ran",
                    "implementation",
                    "launches",
                    "launched",
                    "memory",
                    "relative error (allowed)",
                ],
                [
                    [
                        case["target"],
                        case["label"],
                        side,
                        ran["asked"],
                        ran["provider"],
                        ran["implementation"],
                        ran["launches"] or "",
                        ", ".join(_short(name) for name in (ran["kernels"] or _telling(ran["operators"]))[:4]),
                        memory_text(ran),
                        "{:.2g} ({:.2g})".format(
                            *(case["verification"][side][key] for key in ("whole", "whole_bound"))
                        ),
                    ]
                    for case in document["cases"]
                    for side, ran in case["ran"].items()
                ],
            ),
            "",
        ]
    parts += [
        "## Settings in force",
        "",
        table(
            ["target", "workload", "knobs"],
            _grouped(
                (
                    case["target"],
                    case["label"],
                    ", ".join(
                        f"{key}={knob['value']} ({knob['origin']})"
                        for key, knob in case["knobs"].items()
                        if key not in case["workload"] or knob["origin"] != "default"
                    ),
                )
                for case in document["cases"]
            ),
        ),
        "",
    ]
    notes = _grouped(
        (case["target"], case["label"], case["status"], text)
        for case in document["cases"]
        for text in ([case["reason"]] if case["reason"] else []) + case["notes"]
    )
    if notes:
        parts += ["## Refused, failed, noted", "", table(["target", "workload", "status", "why"], notes), ""]
    profiles = [(case, side, found) for case in document["cases"] for side, found in case["profiles"].items()]
    if profiles:
        parts += ["## Profiles", ""]
        for case, side, found in profiles:
            parts += [
                f"- {case['target']} {case['label']} {side}, range `{found['range']}`: "
                + ", ".join(f"`{file}`" for file in found["files"])
            ]
            parts += [f"  - {text}" for text in found["why_not"]]
            if (roof := found["roofline"]) is not None:
                parts.append(
                    f"  - roofline counted by hand: {roof['flops_per_byte']:.3g} FLOPs/Byte, "
                    f"{roof['bound']}-bound, {roof['achieved_tflops']:.3g} of "
                    f"{roof['attainable_tflops']:.3g} TFLOP/s attainable"
                )
            if found.get("counters"):
                parts += [f"  - {text}" for text in counters.sentences(found["counters"])]
            if found["gpu_busy_share"] is not None:
                parts.append(f"  - GPU busy {found['gpu_busy_share']:.1%} of the time from first to last kernel")
            parts += [
                f"  - {row['mean_us']:.1f} us x {row['count']}: `{_short(row['name'], 100)}`"
                for row in found["rows"][:5]
            ]
        parts.append("")
    return "\n".join(parts)


def memory_text(ran: dict) -> str:
    """What a call adds to the memory in use, where the target measured it: "+67.1 MB, 0.00154 MB of it workspace"."""
    memory = ran.get("memory")
    return (
        ""
        if memory is None
        else (f"+{memory['peak_bytes'] / 1e6:.3g} MB, {memory['workspace_bytes'] / 1e6:.3g} MB of it workspace")
    )


def _grouped(lines) -> list[list[str]]:
    """Lines that differ in their workload (the second cell) alone, made one."""
    found: dict[tuple, list[str]] = {}
    for target, workload, *rest in lines:
        found.setdefault((target, *rest), []).append(workload)
    return [[key[0], "; ".join(workloads), *key[1:]] for key, workloads in found.items()]


def _short(name: str, length: int = 60) -> str:
    return name if len(name) <= length else name[: length - 3] + "..."


def _telling(operators: list[str]) -> list[str]:
    """Operators that say what ran: attention, products and compiled regions before the rest."""
    words = ("_scaled_dot", "CompiledFx", "softmax", "bmm", "mul")

    def rank(name: str) -> int:
        return next((i for i, word in enumerate(words) if word in name), len(words))

    return sorted(operators, key=rank)[:3]


def plots(document: dict, folder: Path) -> list[Path]:
    """Write latency and roofline plots into `folder`, a pair for each target; returns what was written."""
    timed: dict[str, list] = {}
    for case in document["cases"]:
        for side in case["sides"]:
            timed.setdefault(case["target"], []).append((case, side, res.measured(case, side)))
    if not timed:
        raise BenchError(f"run {document['run_id']} holds no timing to plot (status {document['status']}).")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for target, sides in timed.items():
        suffix = f"_{target.split(':')[1]}" if len(timed) > 1 else ""
        for name, drawn in _figures(target, sides, f"run {document['run_id']}, {res.machine_name(document)}").items():
            path = folder / f"{name}{suffix}.png"
            drawn.savefig(path, dpi=150, bbox_inches="tight")
            written.append(path)
    return written


def _figures(target: str, sides: list, where: str) -> dict[str, Figure]:
    """{"latency": ..., "roofline": ...} of one target. What all of its cases share goes into the title."""
    from utils.visualization import plot_latency, plot_roofline

    words = [case["label"].split() for case, _, _ in sides]
    shared = [word for word in words[0] if all(word in other for other in words)]
    latencies, points, peaks, roof = {}, {}, {}, None
    for (case, side, measured), label in zip(sides, words, strict=True):
        own = " ".join(word for word in label if word not in shared)
        name = f"{own} {side}: {case['ran'][side]['provider']}".strip()
        if name in latencies:
            name += f" {options_text(case)}"
        latencies[name] = measured
        if measured.roof is not None:
            roof = measured.roof
            peaks[roof["dtype"]] = roof["tflops"]
            points[name] = (measured.flops / measured.bytes, measured.tflops, roof["dtype"])
            counted = (case["profiles"].get(side, {}).get("counters") or {}).get("roofline", {})
            if counted.get("bound"):
                points[f"{name}, by hardware counters"] = (
                    counted["flops_per_byte"],
                    counted["achieved_tflops"],
                    roof["dtype"],
                )
    title = f"{target} {' '.join(shared)}\n{where}"
    figures = {"latency": plot_latency(latencies, title=title)[0]}
    if roof is not None:
        figures["roofline"] = plot_roofline(
            roof["name"], max(peaks.values()), roof["memory_bandwidth_tb_s"], measured=points, peaks=peaks, title=title
        )[0]
    return figures


def write_report(document: dict, folder: Path) -> list[Path]:
    """CSV, Markdown and plots of a run into a folder; the paths written."""
    write_whole(folder / "results.csv", csv_text(document))
    write_whole(folder / res.REPORT_FILE, markdown(document))
    written = [folder / "results.csv", folder / res.REPORT_FILE]
    if any(case["sides"] for case in document["cases"]):
        written += plots(document, folder)
    return written


def write_comparison(a: dict, b: dict, compared: list[dict], told: list[str], folder: Path) -> list[Path]:
    """CSV, Markdown and a plot of two runs held against each other (the rows of `compare_results`)."""
    from utils.visualization import plot_latency

    flat = []
    for row in compared:
        line = {key: value for key, value in row.items() if not key.endswith(("interval", "interval_ms"))}
        for name, (low, high) in (
            ("a_ms", row["a_interval_ms"]),
            ("b_ms", row["b_interval_ms"]),
            ("speedup", row["interval"]),
        ):
            line |= {f"{name}_low": low, f"{name}_high": high}
        flat.append(line | {"knobs": "; ".join(row["knobs"])})
    page = [f"# Run {b['run_id']} against {a['run_id']}", "", f"{res.machine_name(a)}. {SEPARATE_RUNS}", ""]
    page += [f"Also different: {'; '.join(told)}.", ""] if told else []
    page += [
        table(
            [
                "target",
                "workload",
                "side",
                f"{a['run_id']} ms",
                f"{b['run_id']} ms",
                "speed-up",
                "verdict",
                "other knobs",
            ],
            [
                [
                    row["target"],
                    row["workload"],
                    row["side"],
                    f"{row['a_ran']} {with_interval(row['a_ms'], *row['a_interval_ms'])}",
                    f"{row['b_ran']} {with_interval(row['b_ms'], *row['b_interval_ms'])}",
                    with_interval(row["speedup"], *row["interval"]),
                    row["verdict"],
                    "; ".join(row["knobs"]),
                ]
                for row in compared
            ],
        ),
        "",
    ]
    latencies = {}
    for row in compared:
        name = f"{row['target'].split(':')[1]} {row['workload']} {row['side']}"
        for run, side in ((a, "a"), (b, "b")):
            low, high = row[f"{side}_interval_ms"]
            latencies[f"{name}, {run['run_id']} {row[f'{side}_ran']}"] = (row[f"{side}_ms"], low, high)
    files = {"comparison.csv": _csv(flat, tuple(flat[0])), "comparison.md": "\n".join(page)}
    for name, text in files.items():
        write_whole(folder / name, text)
    figure, _ = plot_latency(latencies, title=f"{a['run_id']} and {b['run_id']} on {res.machine_name(a)}")
    figure.savefig(folder / "comparison.png", dpi=150, bbox_inches="tight")
    return [folder / name for name in (*files, "comparison.png")]
