"""The timeline of a simulated program: events in model cycles, and their picture.

The cost model is a ruler, not a stopwatch. It has one SM from the data sheet of an H200 (132 SMs at 1.83 GHz) or of another GPU
(`CostModel.of("B200")`). Every unit runs at its peak rate; bank conflicts, caches, registers and other blocks on the SM cost
nothing. It shows waits and overlaps, and does not predict the time of a kernel.
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

Places = dict[int, tuple[float, float]]  # {id of an event: (y, height) of its bar}
# {unit: beginning of its row's name}. The rows of a partition are the partition, then the units of its operations.
UNITS = {"partition": "", "tensor cores": "tensor cores: ", "cp.async": "cp.async: ", "TMA": "TMA: "}
WAIT = "#a6a6a6"  # visible on a light and on a dark page
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
# The hatching of a wait shows its reason; a wait for a barrier has none.
HATCHES = {"wgmma wait": "///", "copy wait": "...", "blocked": "xx"}
LABELS = {
    "wgmma": "product",  # products of tcgen05 have this kind, too
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
    lanes_per_warp: float = 32.0  # fp32 results of a warp in a cycle, for up to four warps
    special_per_warp: float = 4.0  # exp2, log2, rsqrt, ...
    barrier: float = 20.0
    issue: float = 10.0  # the start of a TMA copy, a wgmma or a cp.async by one thread
    tensor_memory_bytes: float = 512.0  # one column of 128 lanes; assumed, because no data sheet has it
    tensor_memory_latency: float = 30.0  # assumed to be the same as for shared memory

    @classmethod
    def of(cls, gpu: str) -> CostModel:
        """Return the rates of a Hopper or Blackwell GPU from its data sheet; the latencies are Hopper's and not measured on a B200.

        Args:
            gpu: a row of `utils.config.GPU_SPECS`: "H100", "H200", "B200".
        """
        spec = gpu_spec(gpu)
        flops = {9: 4096.0, 10: 8192.0}.get(spec["compute_capability"][0])
        if flops is None:
            raise ValueError(f"The cost model knows Hopper and Blackwell (H100, H200, B200); got {gpu}.")
        clock = 1e12 * spec["bf16_tflops"] / spec["sm_count"] / flops  # the SMs reach the sheet's rate at this clock
        return cls(mma_flops=flops, global_bytes=1e12 * spec["memory_bandwidth_tb_s"] / spec["sm_count"] / clock)


@dataclass
class Event:
    """A bar of the timeline; times are in model cycles.

    `phase` is the barrier's phase for a copy, and the parity for a wait. An ordinary load or store has its number of `bytes`,
    and the number of `sectors` of 32 bytes that the instructions of its warps touch.
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
    """Draw a timeline: a row for each partition, and rows for its copies and products.

    Args:
        events: the events of one program.
        ax: Axes to draw in; None for a new figure.
        report: a finding: frames mark its bars, and an arrow shows the missing order between them.
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
    own = ax is None
    if ax is None:
        _, ax = plt.subplots(figsize=(9.6, 0.9 + 0.45 * len(rows)), layout="constrained")
    figure = cast("Figure", ax.figure)
    places = _draw_bars(ax, events, rows, window or (0.0, max(e.end for e in events)))
    if report is not None:
        _draw_finding(ax, events, findings, report, places, rows)
    ax.set_yticks(range(len(rows)), [UNITS[unit] + partition for unit, partition in rows])
    ax.invert_yaxis()
    ax.set_xlim(*(window or (0, None)))
    ax.set_xlabel("model cycles")
    legend: dict[tuple[str, str], str] = {}  # kinds with the same look share an entry
    for kind in sorted({e.kind for e in events}, key=lambda k: list(COLORS).index(k) if k in COLORS else 99):
        legend.setdefault((COLORS.get(kind, "#888888"), HATCHES.get(kind, "")), LABELS.get(kind, kind))
    for name in partitions[1:]:  # a line between one partition's rows and the next one's
        ax.axhline(next(i for i, row in enumerate(rows) if row[1] == name) - 0.5, color="#bbbbbb", linewidth=0.6)
    handles = [
        Patch(facecolor=color, edgecolor="#8a8a8a" if hatch else color, hatch=hatch, linewidth=0.0, label=label)
        for (color, hatch), label in legend.items()
    ]
    if own:  # below the label of the axis for any height
        figure.legend(handles=handles, ncols=8, fontsize=7, loc="outside lower center", frameon=False)
    else:
        ax.legend(handles=handles, ncols=6, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    return figure, ax


def _draw_bars(ax: Axes, events: list[Event], rows: list[tuple], window: tuple[float, float]) -> Places:
    """Draw a bar for each event, with its name if there is room, and return the places of the bars."""
    lanes, places = _lanes(events), Places()
    deepest = {row: 1 + max(lanes[id(e)] for e in events if (e.unit, e.partition) == row) for row in rows}
    first, last = window
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
        if e.kind == "wgmma":  # the right operand is enough to name a product
            label = label.split(" x ")[-1]
        named = e.unit != "partition" or e.kind == "blocked"
        shown = min(e.end, last) - max(e.start, first)
        if named and deepest[row] <= 3 and 0.0085 * (last - first) * len(label) < shown:
            ax.text(max(e.start, first) + shown / 2, y, label, ha="center", va="center", fontsize=7, clip_on=True)
        places[id(e)] = (y, height)
    return places


def _draw_finding(
    ax: Axes, events: list[Event], findings: list[Event], report: Report, places: Places, rows: list[tuple]
) -> None:
    """Frame the bars of a report, and draw the missing order as an arrow."""
    red = "#b3423a"
    stuck = list({e.buffer: e for e in events if e.kind == "blocked"}.values())  # one wait for each barrier
    if stuck:
        for one, other in itertools.pairwise(stuck):
            middle = max(one.start, other.start) + 0.5 * (one.end - max(one.start, other.start))
            look = {"arrowstyle": "<->", "color": red, "linestyle": "--", "linewidth": 1.6}
            ax.annotate("", (middle, places[id(one)][0]), (middle, places[id(other)][0]), arrowprops=look, zorder=6)
        ax.text(stuck[0].end, -0.62, "nobody can go on", color=red, fontsize=8, ha="right")
        return
    lines = {site.line for site in report.others} | {report.line}
    # If a line has several bars, the report means the last bar with a buffer in its message.
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
    """Return {id of an event: its lane}: two events of a row that overlap have different lanes."""
    ends: dict[tuple[str, str], list[float]] = {}
    lanes = {}
    for e in sorted(events, key=lambda e: e.start):
        row = ends.setdefault((e.unit, e.partition), [])
        free = next((i for i, end in enumerate(row) if end <= e.start + 1e-6), len(row))
        row[free : free + 1] = [e.end]
        lanes[id(e)] = free
    return lanes
