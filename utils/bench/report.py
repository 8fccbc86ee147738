"""Reports of a run: its rows, as CSV and Markdown; `write_report` adds the plots."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from utils.bench import results as res
from utils.bench.plots import plots
from utils.benchmark.intervals import NOT_ENOUGH_DATA
from utils.benchmark.result import digits, format_interval, format_rate
from utils.files import write_whole

COLUMNS = (
    *("target", "workload", "batch", "heads", "seq_len", "head_dim", "dtype", "mask", "doc_span", "score_mod"),
    *("kv_heads", "seq_len_kv", "layout", "direction", "window", "options", "side", "status", "ran"),
    *("median_ms", "low_ms", "high_ms", "mean_ms", "std_ms", "min_ms", "max_ms", "p95_ms", "p99_ms", "samples"),
    *("tflops", "gb_s", "roof_share", "queries_per_s", "error", "error_bound"),
    *("speedup", "speedup_low", "speedup_high", "verdict", "reason", "inputs", "outliers", "throttled", "discarded"),
)
STATISTICS = ("median_ms", "mean_ms", "std_ms", "min_ms", "max_ms", "p95_ms", "p99_ms", "tflops", "gb_s", "roof_share")
WIDEST_SPEEDUP = len(f"0.999 [0.999, 0.999] {NOT_ENOUGH_DATA}")
TELLING_OPERATORS = ("_scaled_dot", "CompiledFx", "softmax", "bmm", "mul")  # the most telling first


# ---- rows --------------------------------------------------------------------------------------------------


def rows(document: dict) -> list[dict]:
    """Make one row for each side of each case, also for those that did not run."""
    return [_row(case, side) for case in document["cases"] for side in case["sides_asked"]]


def _row(case: dict, side: str) -> dict:
    work, pair = case["workload"], case["comparison"]
    row = {
        "target": case["target"],
        "workload": case["label"],
        "options": res.options_text(case),
        "side": side,
        "status": case["status"],
        "reason": case["reason"],
        **work,
        "ran": case["ran"].get(side, {}).get("provider"),
    }
    if (check := case["verification"].get(side)) is not None:
        row |= {"error": check["whole"], "error_bound": check["whole_bound"]}
    if (measured := res.measured(case, side)) is not None:
        low, high = measured.interval_ms
        row |= {name: getattr(measured, name) for name in STATISTICS}
        row |= {"low_ms": low, "high_ms": high, "samples": len(measured.samples_ms)}
        row |= {name: measured.method.get(name) for name in ("outliers", "throttled", "discarded")}
        if "heads" in work:
            row["queries_per_s"] = work["batch"] * work["heads"] * work["seq_len"] / (measured.median_ms / 1e3)
    if pair is not None and side == "optimized":
        low, high = pair["interval"]
        row |= {"speedup": pair["speedup"], "speedup_low": low, "speedup_high": high, "verdict": pair["verdict"]}
    return row


# ---- text --------------------------------------------------------------------------------------------------


def csv_text(document: dict) -> str:
    """Return the rows of a run as CSV."""
    return to_csv(rows(document), COLUMNS)


def to_csv(lines: Iterable[Mapping], columns: Sequence[str]) -> str:
    """Return rows as CSV with these columns; None and missing cells are empty, an unknown cell is an error."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", extrasaction="raise")
    writer.writeheader()
    for line in lines:
        floats = {key: digits(value, 7) for key, value in line.items() if isinstance(value, float)}
        writer.writerow({**line, **floats})
    return out.getvalue()


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""

    def line_text(cells: Sequence[object]) -> str:
        return "| " + " | ".join(str(cell).strip().replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line_text(head), "|" + " --- |" * len(head), *map(line_text, lines)])


def page(paragraphs: Iterable[str]) -> str:
    """Return a Markdown page of paragraphs: headings, sentences, tables."""
    return "\n\n".join(paragraphs) + "\n"


def with_interval(value: float, low: float, high: float) -> str:
    """Write a value with its interval: "1.23 [1.2, 1.26]"."""
    return f"{digits(value)} [{digits(low)}, {digits(high)}]"


def speedup_text(row: dict) -> str:
    """Write a row's speed-up with its interval and verdict; empty for a row without one."""
    if "speedup" not in row:
        return ""
    return f"{with_interval(row['speedup'], row['speedup_low'], row['speedup_high'])} {row['verdict']}"


def memory_text(ran: dict) -> str:
    """Say how much memory a call adds, if the target measured it: "+67.1 MB, 0.00154 MB of it workspace"."""
    memory = ran.get("memory")
    if memory is None:
        return ""
    return f"+{memory['peak_bytes'] / 1e6:.3g} MB, {memory['workspace_bytes'] / 1e6:.3g} MB of it workspace"


def join_workloads(lines: Iterable[Sequence[str]]) -> list[list[str]]:
    """Join lines that differ only in their workload, the second cell."""
    workloads: dict[tuple, list[str]] = {}
    for target, workload, *rest in lines:
        workloads.setdefault((target, *rest), []).append(workload)
    return [[key[0], "; ".join(names), *key[1:]] for key, names in workloads.items()]


def _short(name: str, length: int = 60) -> str:
    return name if len(name) <= length else name[: length - 3] + "..."


def _telling(operators: Iterable[str]) -> list[str]:
    """Pick the three operators that say most about what ran: attention, products and compiled regions."""

    def rank(name: str) -> int:
        return next((i for i, word in enumerate(TELLING_OPERATORS) if word in name), len(TELLING_OPERATORS))

    return sorted(operators, key=rank)[:3]


# ---- a run in the terminal ---------------------------------------------------------------------------------


def times_table(document: dict) -> tuple[list[str], list[list[str]]]:
    """Return the columns and lines of a run's table: medians with intervals, what ran, the speed-up.

    Cells of numbers have the width of the longest that can come, so that two runs of a target have one layout.
    """
    lines = [
        [
            *(row["target"], row["workload"], f"{row['side']}: {row['ran']}"),
            f"{format_interval(row['median_ms'], row['low_ms'], row['high_ms']):<24}",
            f"{format_rate(row['tflops']):<12}",
            f"{'-' if row['gb_s'] is None else digits(row['gb_s']):<6}",
            f"{'-' if row['roof_share'] is None else format(row['roof_share'], '.1%'):<6}",
            f"{speedup_text(row):<{WIDEST_SPEEDUP}}",
            row["options"],
        ]
        for row in rows(document)
        if "median_ms" in row
    ]
    return ["Target", "Workload", "Side: ran", "Median [95%]", "Rate", "GB/s", "Of roof", "Speed-up", "Options"], lines


def terminal_remarks(document: dict) -> list[str]:
    """Return the lines under a run's table: the memory of each side, then refusals, failures and notes."""
    lines = []
    for case in document["cases"]:
        for side, ran in case["ran"].items():
            if memory := memory_text(ran):
                launches = f"{ran['launches']} launches, " if ran["launches"] else ""
                lines.append(f"{case['label']} {side}: {ran['provider']}: {launches}{memory}")
    below: dict[str, list[str]] = {}
    for target, labels, status, text in join_workloads(res.remarks(document)):
        below.setdefault(f"{target} ({labels}) {status}:", []).append(f"    {text}")
    return lines + [line for heading, texts in below.items() for line in (heading, *texts)]


# ---- a run as a page ---------------------------------------------------------------------------------------


def markdown(document: dict) -> str:
    """Return the run as a Markdown page: machine, times, what ran, knobs in force, refusals and failures."""
    parts = [*_head(document), *_times(document), *_what_ran(document), *_settings(document)]
    if remarks := join_workloads(res.remarks(document)):
        parts += ["## Refused, failed, noted", table(["target", "workload", "status", "why"], remarks)]
    return page([*parts, *_profiles(document)])


def _head(document: dict) -> list[str]:
    env, load = document["environment"], document.get("load_average")
    timing = f"Timing: {res.timing_text(document.get('timing') or {})}"
    if document["device"] == "cpu" and load is not None:  # other work on a CPU is in every time
        timing += f" · load average {load:.1f} on {env['cpu_count']} CPUs when it began"
    command = [f"```\n{' '.join(document['command'])}\n```"] if document["command"] else []
    return [
        f"# Run {document['run_id']}",
        f"{res.machine_name(document)} · torch {env['torch']} · Triton {env['triton']} · CUDA {env['cuda']} · "
        f"cuDNN {env['cudnn']} · driver {env['driver']} · commit {(env['commit'] or 'unknown')[:12]}"
        f"{' (modified)' if env['dirty'] else ''}",
        timing,
        f"Status: {document['status']} · started {document['started']} · finished {document['finished'] or '-'}",
        *command,
    ]


def _times(document: dict) -> list[str]:
    columns, lines = times_table(document)
    explanation = (
        "Medians with 95% intervals; FLOPs are those of matrix products, in attention of the query-key pairs that the "
        "mask lets through; GB/s count each input and output once."
    )
    return ["## Times", explanation, table(columns, lines)] if lines else []


def _what_ran(document: dict) -> list[str]:
    if not any(case["sides"] for case in document["cases"]):
        return []
    head = ["target", "workload", "side", "asked", "ran", "implementation", "launches", "launched", "memory"]
    lines = []
    for case in document["cases"]:
        for side, ran in case["ran"].items():
            error = case["verification"].get(side)
            launched = ", ".join(_short(name) for name in (ran["kernels"] or _telling(ran["operators"]))[:4])
            lines.append(
                [
                    *(case["target"], case["label"], side, ran["asked"], ran["provider"], ran["implementation"]),
                    *(ran["launches"] or "", launched, memory_text(ran)),
                    f"{error['whole']:.2g} ({error['whole_bound']:.2g})" if error else "not compared",
                ]
            )
    return ["## What ran", table([*head, "relative error (allowed)"], lines)]


def _settings(document: dict) -> list[str]:
    lines = []
    for case in document["cases"]:
        knobs = ", ".join(
            f"{key}={knob['value']} ({knob['origin']})"
            for key, knob in case["knobs"].items()
            if key not in case["workload"] or knob["origin"] != "default"
        )
        lines.append([case["target"], case["label"], knobs])
    return ["## Settings in force", table(["target", "workload", "knobs"], join_workloads(lines))]


def _profiles(document: dict) -> list[str]:
    items = []
    for case in document["cases"]:
        for side, profile in case["profiles"].items():
            files = ", ".join(f"`{file}`" for file in profile["files"])
            items.append(f"- {case['target']} {case['label']} {side}, range `{profile['range']}`: {files}")
            items += [f"  - {text}" for text in _profile_facts(profile)]
    return ["## Profiles", "\n".join(items)] if items else []


def _profile_facts(profile: dict) -> list[str]:
    facts = list(profile["why_not"])
    if (roof := profile["roofline"]) is not None:
        facts.append(
            f"roofline counted by hand: {roof['flops_per_byte']:.3g} FLOPs/Byte, {roof['bound']}-bound, "
            f"{roof['achieved_tflops']:.3g} of {roof['attainable_tflops']:.3g} TFLOP/s attainable"
        )
    if profile["gpu_busy_share"] is not None:
        facts.append(f"GPU busy {profile['gpu_busy_share']:.1%} of the time from first to last kernel")
    kernels = profile["rows"][:5]
    return facts + [f"{row['mean_us']:.1f} us x {row['count']}: `{_short(row['name'], 100)}`" for row in kernels]


def write_report(document: dict, folder: Path) -> list[Path]:
    """Write CSV, Markdown and plots of a run into a folder; return the paths."""
    written = [folder / "results.csv", folder / res.REPORT_FILE]
    write_whole(written[0], csv_text(document))
    write_whole(written[1], markdown(document))
    if any(case["sides"] for case in document["cases"]):
        written += plots(document, folder)
    return written
