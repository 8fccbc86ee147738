"""Plots of a run: latency with intervals, and achieved TFLOP/s under the roof."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from utils.bench import results as res
from utils.bench.errors import BenchError
from utils.benchmark.result import Measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plots(document: dict, folder: Path) -> list[Path]:
    """Write a latency and a roofline plot for each target into `folder`; return the paths."""
    os.environ.setdefault("MPLBACKEND", "Agg")  # matplotlib reads it when it is imported
    by_target: dict[str, list[tuple[dict, str]]] = {}
    for case in document["cases"]:
        for side in case["sides"]:
            by_target.setdefault(case["target"], []).append((case, side))
    if not by_target:
        raise BenchError(f"run {document['run_id']} has no times to plot (status {document['status']}).")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    run = f"run {document['run_id']}, {res.machine_name(document)}"
    written = []
    for target, sides in by_target.items():
        suffix = f"_{target.split(':')[1]}" if len(by_target) > 1 else ""
        for name, figure in _figures(target, sides, run).items():
            path = folder / f"{name}{suffix}.png"
            figure.savefig(path, dpi=150, bbox_inches="tight")
            plt.close(figure)  # pyplot keeps figures, and warns from the 21st on
            written.append(path)
    return written


def _line(target: str, sides: list[tuple[dict, str]], run: str) -> Figure:
    """Draw the times of a sweep: a line for each side over the sizes, or a row for each value that is no size."""
    from utils.visualization import plot_latency

    lines: dict[str, dict[str, Measurement]] = {}
    for case, side in sides:
        name, value = next(iter(case["swept"].items()))
        measured = Measurement.from_dict(case["sides"][side])
        provider = (
            side
            if name in ("backend", "baseline", "baseline_backend", "provider", "kernel")
            else f"{side}: {case['ran'][side]['provider']}"
        )
        lines.setdefault(provider, {})[value] = measured
    if all(value.isdigit() for line in lines.values() for value in line) and len(next(iter(lines.values()))) > 1:
        sizes = {label: {int(value): one for value, one in line.items()} for label, line in lines.items()}
        ratios = {int(case["swept"][name]): case["comparison"]["speedup"] for case, _ in sides if case["comparison"]}
        return plot_latency(sizes, size_name=name, title=f"{target}\n{run}", ratios=ratios)[0]
    rows = {f"{name} {value}, {label}": one for label, line in lines.items() for value, one in line.items()}
    return plot_latency(rows, title=f"{target}\n{run}")[0]


def _figures(target: str, sides: list[tuple[dict, str]], run: str) -> dict[str, Figure]:
    """Draw {"latency": ..., "roofline": ...} of one target. The title takes the words that all labels share."""
    from utils.visualization import plot_latency, plot_roofline

    if any(case.get("swept") for case, _ in sides):
        return {"sweep": _line(target, sides, run)}
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
