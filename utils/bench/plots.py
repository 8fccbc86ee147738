"""Plots of a run: latency with intervals, and achieved TFLOP/s under the roof."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from utils.bench import results as res
from utils.bench.errors import BenchError
from utils.benchmark.result import Measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TimedSide:
    """One side of a case that was timed."""

    case: dict
    side: str
    measured: Measurement

    @property
    def words(self) -> list[str]:
        """The workload's label in words: "B1", "H2", "S48", ..."""
        return self.case["label"].split()

    @property
    def ran(self) -> str:
        """The side and what ran: "optimized: cudnn"."""
        return f"{self.side}: {self.case['ran'][self.side]['provider']}"

    @property
    def counted(self) -> dict:
        """The side on the roofline by hardware counters; empty if Nsight Compute did not count."""
        counted = self.case["profiles"].get(self.side, {}).get("counters") or {}
        return counted.get("roofline", {})


def plots(document: dict, folder: Path) -> list[Path]:
    """Write a latency and a roofline plot for each target into `folder`; return the paths."""
    by_target: dict[str, list[TimedSide]] = {}
    for case in document["cases"]:
        for side in case["sides"]:
            measured = res.measured(case, side)
            if measured is not None:
                by_target.setdefault(case["target"], []).append(TimedSide(case, side, measured))
    if not by_target:
        raise BenchError(f"run {document['run_id']} has no times to plot (status {document['status']}).")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for target, sides in by_target.items():
        suffix = f"_{target.split(':')[1]}" if len(by_target) > 1 else ""
        for name, figure in _figures(target, sides, f"run {document['run_id']}, {res.machine_name(document)}").items():
            path = folder / f"{name}{suffix}.png"
            figure.savefig(path, dpi=150, bbox_inches="tight")
            written.append(path)
    return written


def _figures(target: str, sides: list[TimedSide], run: str) -> dict[str, Figure]:
    """Draw {"latency": ..., "roofline": ...} of one target. The title takes the words that all labels share."""
    from utils.visualization import plot_latency, plot_roofline

    shared = [word for word in sides[0].words if all(word in side.words for side in sides)]
    latencies: dict[str, Measurement] = {}
    points: dict[str, tuple] = {}
    peaks: dict[str, float] = {}
    roof = None
    for timed in sides:
        measured = timed.measured
        name = " ".join([*(word for word in timed.words if word not in shared), timed.ran])
        if name in latencies:
            name += f" {res.options_text(timed.case)}"
        latencies[name] = measured
        if measured.roof is None or not measured.flops or not measured.bytes:
            continue
        roof, dtype = measured.roof, measured.roof["dtype"]
        peaks[dtype] = roof["tflops"]
        points[name] = (measured.flops / measured.bytes, measured.tflops, dtype)
        if timed.counted.get("bound"):
            counted = timed.counted["flops_per_byte"], timed.counted["achieved_tflops"], dtype
            points[f"{name}, by hardware counters"] = counted
    title = f"{target} {' '.join(shared)}\n{run}"
    figures = {"latency": plot_latency(latencies, title=title)[0]}
    if roof is not None:
        bandwidth = roof["memory_bandwidth_tb_s"]
        figures["roofline"], _ = plot_roofline(
            roof["name"], max(peaks.values()), bandwidth, measured=points, peaks=peaks, title=title
        )
    return figures
