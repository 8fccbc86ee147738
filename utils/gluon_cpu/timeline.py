"""The timeline of a simulated program: events in model cycles, and their picture.

The cost model is a ruler, not a stopwatch: one SM of an H200's data sheet (132 SMs at 1.83 GHz) or of another GPU's
(`CostModel.of("B200")`), every unit at its peak rate, and no cost for bank conflicts, caches, registers or other blocks on the SM. It shows what waits for what and what
overlaps; it does not predict a kernel's time.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from utils.config import gpu_spec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .reports import Report

# Rows of the picture, for each partition: itself, then what it started on other units.
UNITS = {"partition": "", "tensor cores": "tensor cores: ", "cp.async": "cp.async: ", "TMA": "TMA: "}
WAIT = "#a6a6a6"  # seen on a light and on a dark page
COLORS = {
    "wait": WAIT,
    "compute": "#4c78a8",
    "load": "#72b7b2",
    "store": "#eeca3b",
    "shared load": "#9ecae9",
    "shared store": "#f2cf5b",
    "tensor memory load": "#6f5fa8",
    "tensor memory store": "#6f5fa8",
    "issue": "#b279a2",
    "barrier": "#5f4b3c",
    "copy in": "#54a24b",
    "copy out": "#f58518",
    "wgmma": "#e45756",
    "wgmma wait": WAIT,
    "copy wait": WAIT,
    "blocked": "#f4b6b0",
}
# Waits say by their hatching what they wait for: a barrier has none.
HATCHES = {"wgmma wait": "///", "copy wait": "...", "blocked": "xx"}
LABELS = {
    "wgmma": "product",  # of tcgen05, too
    "wait": "wait: barrier",
    "wgmma wait": "wait: product",
    "copy wait": "wait: copy",
    "blocked": "waits for ever",
    "tensor memory load": "tensor memory",
    "tensor memory store": "tensor memory",
}


@dataclass(frozen=True)
class CostModel:
    """Rates of one SM, for each cycle, and latencies in cycles."""

    mma_flops: float = 4096.0  # dense fp16/bf16: 989.4 TFLOP/s / 132 SMs / 1.83 GHz
    global_bytes: float = 20.0  # an SM's share of 4.8 TB/s
    global_latency: float = 600.0  # a miss in the L2, about
    shared_bytes: float = 128.0
    shared_latency: float = 30.0
    lanes_per_warp: float = 32.0  # fp32 results a cycle, for each warp up to four
    special_per_warp: float = 4.0  # exp2, log2, rsqrt, ...
    barrier: float = 20.0
    issue: float = 10.0  # one thread starting a TMA copy, a wgmma, a cp.async
    tensor_memory_bytes: float = 512.0  # one column of 128 lanes: assumed, no data sheet says it
    tensor_memory_latency: float = 30.0  # assumed to be shared memory's

    @classmethod
    def of(cls, gpu: str) -> CostModel:
        """Return the data sheet's rates of a Hopper or Blackwell GPU; a B200's are not measured, its latencies are Hopper's.

        Args:
            gpu: a row of `utils.config.GPU_SPECS`: "H100", "H200", "B200".
        """
        spec = gpu_spec(gpu)
        flops = {9: 4096.0, 10: 8192.0}.get(spec["compute_capability"][0])
        if flops is None:
            raise ValueError(f"The cost model knows Hopper and Blackwell (H100, H200, B200); got {gpu}.")
        clock = 1e12 * spec["bf16_tflops"] / spec["sm_count"] / flops  # at which the SMs reach the sheet's rate
        return cls(mma_flops=flops, global_bytes=1e12 * spec["memory_bandwidth_tb_s"] / spec["sm_count"] / clock)


@dataclass
class Event:
    """A bar of the timeline; times are in model cycles.

    `phase` is the barrier's phase for a copy, and the parity for a wait. An ordinary load or store has the `bytes` that
    it asks for, and the `sectors` of 32 bytes that its warps' instructions touch.
    """

    partition: str
    kind: str
    buffer: str
    phase: int | None
    start: float
    end: float
    line: int
    unit: str = "partition"
    bytes: int = 0
    sectors: int = 0


def plot_events(
    events: list[Event],
    *,
    ax: Axes | None = None,
    report: Report | None = None,
    window: tuple[float, float] | None = None,
) -> tuple[Figure, Axes]:
    """Draw a timeline: a row for each partition, and rows for the copies and products that it started.

    Args:
        events: the events of one program.
        ax: where to draw; a new figure without.
        report: a finding that ended the run: the bars that it is about are framed, and an arrow shows the order that is
            missing between them.
        window: the cycles (first, last) to show; None shows all.

    Returns:
        (Figure, Axes).
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    findings = [e for e in events if e.kind == "finding"]
    events = [e for e in events if e.kind != "finding"]

    if not events:
        raise ValueError("No events to draw: launch a kernel inside `with gluon_cpu.simulate(timeline=True) as run:`.")
    by_start = sorted(events, key=lambda e: (e.start, e.unit != "partition"))
    partitions = list(dict.fromkeys(e.partition for e in by_start))
    rows = sorted(
        {(e.unit, e.partition) for e in events}, key=lambda row: (partitions.index(row[1]), list(UNITS).index(row[0]))
    )
    lanes = _lanes(events)
    deepest = {row: 1 + max(lanes[id(e)] for e in events if (e.unit, e.partition) == row) for row in rows}
    own = ax is None
    if ax is None:
        _, ax = plt.subplots(figsize=(9.6, 0.9 + 0.45 * len(rows)), layout="constrained")
    figure = cast("Figure", ax.figure)
    first, last = window or (0.0, max(e.end for e in events))
    longest = last - first
    places: dict[int, tuple[float, float]] = {}
    for e in events:
        row = (e.unit, e.partition)
        height = 0.8 / deepest[row]
        y = rows.index(row) - 0.4 + height * (lanes[id(e)] + 0.5)
        ax.barh(
            y,
            max(e.end - e.start, 1e-9),
            left=e.start,
            height=height,
            color=COLORS.get(e.kind, "#888888"),
            edgecolor="#8a8a8a" if e.kind in HATCHES else "white",
            linewidth=0.0 if e.kind in HATCHES else 0.3,
            hatch=HATCHES.get(e.kind, ""),
        )
        label = e.buffer if e.phase is None else f"{e.buffer} ({e.phase})"
        if e.kind == "wgmma":  # its right operand says which product it is
            label = label.split(" x ")[-1]
        named = e.unit != "partition" or e.kind == "blocked"
        shown = min(e.end, last) - max(e.start, first)
        if named and deepest[row] <= 3 and 0.0085 * longest * len(label) < shown:
            ax.text(max(e.start, first) + shown / 2, y, label, ha="center", va="center", fontsize=7, clip_on=True)
        places[id(e)] = (y, height)
    if report is not None:
        _draw_finding(ax, events, findings, report, places, rows)
    ax.set_yticks(range(len(rows)), [UNITS[unit] + partition for unit, partition in rows])
    ax.invert_yaxis()
    ax.set_xlim(*(window or (0, None)))
    ax.set_xlabel("model cycles")
    legend: dict[tuple[str, str], str] = {}  # kinds that look the same share an entry
    for kind in sorted({e.kind for e in events}, key=lambda k: list(COLORS).index(k) if k in COLORS else 99):
        legend.setdefault((COLORS.get(kind, "#888888"), HATCHES.get(kind, "")), LABELS.get(kind, kind))
    for name in partitions[1:]:  # a line between one partition's rows and the next one's
        ax.axhline(next(i for i, row in enumerate(rows) if row[1] == name) - 0.5, color="#bbbbbb", linewidth=0.6)
    handles = [
        Patch(facecolor=color, edgecolor="#8a8a8a" if hatch else color, hatch=hatch, linewidth=0.0, label=label)
        for (color, hatch), label in legend.items()
    ]
    if own:  # below the axis label, whatever the height
        figure.legend(handles=handles, ncols=8, fontsize=7, loc="outside lower center", frameon=False)
    else:
        ax.legend(handles=handles, ncols=6, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    return figure, ax


def _draw_finding(
    ax: Axes,
    events: list[Event],
    findings: list[Event],
    report: Report,
    places: dict[int, tuple[float, float]],
    rows: list,
) -> None:
    """Frame the bars that a report is about, and draw the order that is missing as an arrow."""
    red = "#b3423a"
    stuck = list({e.buffer: e for e in events if e.kind == "blocked"}.values())  # one for each barrier
    if stuck:
        for one, other in itertools.pairwise(stuck):
            middle = max(one.start, other.start) + 0.5 * (one.end - max(one.start, other.start))
            look = {"arrowstyle": "<->", "color": red, "linestyle": "--", "linewidth": 1.6}
            ax.annotate("", (middle, places[id(one)][0]), (middle, places[id(other)][0]), arrowprops=look, zorder=6)
        ax.text(stuck[0].end, -0.62, "nobody can go on", color=red, fontsize=8, ha="right")
        return
    lines = {site.line for site in report.others} | {report.line}
    # Of several bars of a line, the report means the last one whose buffer it names.
    about = [e for e in events if e.line in lines and e.buffer]
    about = [e for e in about if e.buffer in report.message] or about
    framed = {e.line: e for e in about if e.kind not in ("issue", "barrier")}
    for e in framed.values():
        y, height = places[id(e)]
        ax.barh(y, e.end - e.start, left=e.start, height=height, fill=False, edgecolor=red, linewidth=1.8, zorder=5)
    if not findings:
        return
    found = findings[-1]
    row = rows.index(("partition", found.partition)) if ("partition", found.partition) in rows else 0
    ax.plot([found.start], [row], marker="X", color=red, markersize=9, markeredgecolor="white", zorder=6)
    ax.text(found.start, row - 0.1, f"   {report.kind}: line {report.line}", color=red, fontsize=8, zorder=7)
    early = [e for e in framed.values() if e.line != report.line]
    if early:
        look = {"arrowstyle": "-|>", "color": red, "linestyle": "--", "linewidth": 1.6}
        start = (early[0].end, places[id(early[0])][0])
        ax.annotate("", (found.start, row), start, arrowprops=look, zorder=6)


def _lanes(events: list[Event]) -> dict[int, int]:
    """A lane for each event, by its id: within a lane of a row no two events overlap."""
    ends: dict[tuple[str, str], list[float]] = {}
    lanes = {}
    for e in sorted(events, key=lambda e: e.start):
        row = ends.setdefault((e.unit, e.partition), [])
        free = next((i for i, end in enumerate(row) if end <= e.start + 1e-6), len(row))
        row[free : free + 1] = [e.end]
        lanes[id(e)] = free
    return lanes
