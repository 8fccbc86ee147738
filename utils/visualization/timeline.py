"""Draw a profiler trace: rows for each thread or stream, and a bar for each operator or kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.validation import whole_number

from .style import SMALL, SOFT, ink_on, key_above, name_axes, open_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from utils.benchmark.profiling import TraceEvent

# Chrome-trace categories and kernel classes of the same kind of work share a colour; all further names have the colour of "other".
_COLORS = {
    "cpu_op": "#8cc5e8",
    "python_function": "#dcdcdc",
    "user_annotation": "#f7e7a1",
    "gpu_user_annotation": "#f7e7a1",
    "cuda_runtime": "#a8a8a8",
    "cuda_driver": "#a8a8a8",
    "kernel": "#0072b2",
    "gpu_memcpy": "#d98c00",
    "gpu_memset": "#d98c00",
    "gemm": "#0072b2",
    "attention": "#00543d",
    "elementwise": "#e58a3c",
    "reduction": "#009e73",
    "softmax": "#c46f9f",
    "layernorm": "#3797d3",
    "memory": "#d98c00",
    "other": "#b5b5b5",
}
MOST_NAMES = 120  # only the longest bars, up to so many, have names
CHARACTER = 4.4  # points: the mean width of a character of a name
LEAST_CHARACTERS = 5  # a shortened name keeps at least so many characters


class _Bar(NamedTuple):
    """One event: a bar in the rows of its lane."""

    name: str
    category: str
    start: float  # ms after the first event
    end: float
    lane: str
    depth: int


def plot_timeline(
    events_or_trace: Iterable[Any] | str | PathLike,
    *,
    ax: Axes | None = None,
    max_depth: int = 4,
    title: str | None = None,
) -> tuple[Figure, Axes]:
    """Draw a profiler trace: rows are threads and streams, bars are operators and kernels.

    Args:
        events_or_trace: a finished profile, the path of a Chrome trace, or events from `read_trace`, or dicts with the keys
            name, category, start_us, duration_us and lane.
        ax: Axes to draw in; None for a new figure.
        max_depth: levels of nested operators to draw in each lane.
        title: the title; None for no title.

    Returns:
        (Figure, Axes).
    """
    whole_number("max_depth", max_depth)
    from utils.benchmark.profiling import busy_us

    events = _events(events_or_trace)
    nested = _nest(events)
    length = max(bar.end for bar in nested) or 1e-3
    bars = [bar for bar in nested if bar.depth < max_depth]
    lanes: dict[str, int] = {}  # levels of each lane, in order of first event
    for bar in bars:
        lanes[bar.lane] = max(lanes.get(bar.lane, 0), bar.depth + 1)
    tops, rows = {}, 0.0
    for lane, depth in lanes.items():
        tops[lane] = rows
        rows += depth + 0.6

    figure, (axes,) = open_axes(ax, (9.6, 1.0 + 0.27 * rows))
    axes.set_xlim(0.0, length)
    axes.set_ylim(rows - 0.3, -0.6)
    colors = {bar.category: _COLORS.get(bar.category, _COLORS["other"]) for bar in bars}
    # An annotation is only a name, and no work.
    work = {lane: [e for e in events if e.lane == lane and "annotation" not in e.category] for lane in lanes}
    labels = [f"{lane}\n{busy_us(work[lane]) / length / 10:.0f}% busy" for lane in lanes]
    axes.set_yticks([tops[lane] + depth / 2 - 0.5 for lane, depth in lanes.items()], labels=labels, fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    deeper = len(nested) - len(bars)
    note = f"   ({deeper} events nested deeper than {max_depth} are not drawn)" if deeper else ""
    name_axes(axes, x=f"time (ms){note}", title=title)
    key_above(axes, _key(colors), columns=6)
    _draw(axes, bars, tops, colors)
    return figure, axes


def _events(given: Any) -> list[TraceEvent]:
    """Return events in the order of their starts, from events, a profile or the path of a trace."""
    from utils.benchmark.profiling import TraceEvent, read_trace

    if isinstance(given, str | PathLike) or hasattr(given, "key_averages"):
        given = read_trace(given)
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise ValueError(
            f"events_or_trace must be events, a profile or a Chrome trace's path, got {type(given).__name__}."
        )
    events = [TraceEvent(**event) if isinstance(event, Mapping) else event for event in given]
    if not events:
        raise ValueError("events_or_trace holds no events: nothing was recorded while the profiler was active.")
    return sorted(events, key=lambda event: (event.start_us, -event.duration_us))


def _nest(events: list[TraceEvent]) -> list[_Bar]:
    """Return bars with their depths: an event that starts inside an event of its lane is one level deeper."""
    bars: list[_Bar] = []
    stacks: dict[str, list[float]] = {}  # {lane: end of the last bar of each level}
    for event in events:
        start, end = ((at - events[0].start_us) / 1e3 for at in (event.start_us, event.end_us))
        stack = stacks.setdefault(event.lane, [])
        # Concurrent bars keep their levels: a level is free again when its bar has ended.
        depth = next((i for i, until in enumerate(stack) if until <= start + 1e-9), len(stack))
        if any(until > start + 1e-9 for until in stack[depth:]):
            depth = len(stack)
        stack[depth:] = [end]
        bars.append(_Bar(event.name, event.category, start, end, event.lane, depth))
    return bars


def _draw(ax: Any, bars: list[_Bar], tops: dict[str, float], colors: dict[str, str]) -> None:
    from matplotlib.collections import PolyCollection

    ax.get_figure(root=True).draw_without_rendering()  # find the room beside the names of the lanes
    low, high = ax.get_xlim()
    pixel = (high - low) / ax.bbox.width
    for category, color in colors.items():
        members = [bar for bar in bars if bar.category == category]
        corners = []
        for bar in members:
            y = tops[bar.lane] + bar.depth
            corners.append([(bar.start, y - 0.44), (bar.end, y - 0.44), (bar.end, y + 0.44), (bar.start, y + 0.44)])
        # A white edge separates neighbours, but it would cover a bar of a few pixels.
        edges = ["white" if bar.end - bar.start > 4 * pixel else color for bar in members]
        ax.add_collection(
            PolyCollection(corners, facecolors=color, edgecolors=edges, linewidths=0.5, zorder=3), autolim=False
        )
    character = CHARACTER * ax.get_figure(root=True).dpi / 72 * pixel
    for bar in sorted(bars, key=lambda bar: bar.start - bar.end)[:MOST_NAMES]:
        left, right = max(bar.start, low), min(bar.end, high)
        name, room = _short(bar.name), int((right - left) / character) - 1
        if len(name) > room >= LEAST_CHARACTERS:
            name = name[: room - 1].rstrip("_ <(:") + "\N{HORIZONTAL ELLIPSIS}"
        if len(name) <= room:
            at, ink = ((left + right) / 2, tops[bar.lane] + bar.depth), ink_on(colors[bar.category])
            ax.text(*at, name, ha="center", va="center_baseline", fontsize=SMALL - 1, color=ink, zorder=6)


def _short(name: str) -> str:
    """Return the name of a kernel or operator without return type, namespaces, template arguments and call arguments."""
    bare = re.sub(r"[<(\[].*", "", name).strip()
    bare = bare.split(" ")[-1].split("::")[-1] if "::" in bare and not bare.startswith("aten::") else bare
    return bare or name


def _key(colors: dict[str, str]) -> list[Any]:
    from matplotlib.patches import Patch

    named: dict[str, list[str]] = {}
    for category, color in colors.items():
        named.setdefault(color, []).append(category.replace("_", " "))
    return [
        Patch(facecolor=color, edgecolor=SOFT, linewidth=0.4, label=", ".join(categories))
        for color, categories in named.items()
    ]
