"""The roofline: attainable TFLOP/s against arithmetic intensity, with predicted and measured points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from . import inputs
from .style import (
    ALARM,
    HAIR,
    HOLLOW,
    INK,
    SMALL,
    SOFT,
    SOLID,
    key_above,
    log_axis,
    name_axes,
    open_axes,
    plain,
    series,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class _Roof(NamedTuple):
    """A ceiling of compute over the slope of memory."""

    dtype: str  # "" for a main roof without a name
    tflops: float  # in the plot's unit
    ridge: float  # FLOPs/Byte


class _Point(NamedTuple):
    """An operation: its place on the roof, and its measured rate or None."""

    name: str
    intensity: float  # FLOPs/Byte
    attainable: float  # on its roof, in the plot's unit
    measured: float | None

    @property
    def share(self) -> float:
        """Return the measured rate over the attainable rate."""
        return (self.measured or 0.0) / self.attainable

    @property
    def above_roof(self) -> bool:
        """Return whether the point is above its roof by more than rounding."""
        return self.measured is not None and self.share > 1 + 1e-9


def plot_roofline(
    gpu_name: str,
    peak_flops: float,
    peak_bandwidth: float,
    operations: Mapping[str, float] | None = None,
    *,
    measured: Mapping[str, tuple] | None = None,
    peaks: Mapping[str, float] | None = None,
    ax: Axes | None = None,
    title: str | None = None,
) -> tuple[Figure, Axes]:
    """Plot a roofline model with predicted points on it and measured points under it.

    From 13 points on, the points have numbers, and a list beside the axes names them.

    Args:
        gpu_name: name of the machine, for the title.
        peak_flops: peak compute in TFLOP/s.
        peak_bandwidth: peak memory bandwidth in TB/s.
        operations: {name: arithmetic intensity in FLOPs/Byte}; hollow points on the roof.
        measured: {name: (FLOPs/Byte, TFLOP/s)}; solid points, each with a line to the roof and its share of the roof.
            A third element names the roof of `peaks` to compare with: `(212.5, 610.0, "bf16")`.
        peaks: {dtype: peak compute in TFLOP/s}, further roofs over the same memory.
        ax: Axes to draw in; None for a new figure.
        title: the title; None for "Roofline: <gpu_name>".

    Returns:
        (Figure, Axes).
    """
    if not isinstance(gpu_name, str):
        raise ValueError(f'gpu_name is {gpu_name!r}; it is the name in the title, such as "H200".')
    main = inputs.rate("peak_flops", peak_flops)
    slope = inputs.rate("peak_bandwidth", peak_bandwidth, "TB/s")
    # The numbers of a laptop are easier to read in GFLOP/s and GB/s.
    prefix, scale = ("G", 1e3) if main < 1 else ("T", 1.0)
    main, slope = main * scale, slope * scale
    if peaks is not None:
        given = inputs.mapping("peaks", peaks, '{"bf16": 989.0}')
        peaks = {dtype: inputs.rate(f"peaks[{dtype!r}]", peak) * scale for dtype, peak in given.items()}
    roofs = _roofs(main, slope, peaks or {})
    points = _points(main, slope, peaks or {}, operations, measured, scale)

    from .labels import LabelLayer, list_columns  # it imports matplotlib, which takes half a second

    figure, (axes,) = open_axes(ax, (7.4 + 3.2 * list_columns(len(points)), 4.7))
    _limits(axes, roofs, slope, points)
    layer = LabelLayer(axes, names=len(points))
    _draw_roofs(axes, layer, roofs, slope, prefix, points)
    _draw_points(axes, layer, points)
    layer.list_names()
    name_axes(
        axes,
        x="arithmetic intensity (FLOPs/Byte)",
        y=f"performance ({prefix}FLOP/s)",
        title=f"Roofline: {gpu_name}" if title is None else title,
    )
    handles = _key(points)
    if handles:
        key_above(axes, handles)
    return figure, axes


def _roofs(main: float, slope: float, peaks: Mapping[str, float]) -> list[_Roof]:
    """Return the roofs, the main one first; dtypes with equal peaks share one roof."""
    by_peak: dict[float, list[str]] = {main: []}
    for dtype, peak in peaks.items():
        by_peak.setdefault(peak, []).append(dtype)
    return [_Roof(", ".join(dtypes), peak, peak / slope) for peak, dtypes in by_peak.items()]


def _points(
    main: float, slope: float, peaks: Mapping[str, float], operations: Any, measured: Any, scale: float
) -> list[_Point]:
    """Return the measured points, and the predicted points without a measurement. scale: 1 TFLOP/s in the plot's unit."""
    points = []
    if measured is not None:
        for name, item in inputs.mapping("measured", measured, '{"gemm_1024": (341.3, 14.2)}').items():
            parts = list(item) if isinstance(item, tuple | list) else [item]
            if len(parts) not in (2, 3):
                raise ValueError(f"measured[{name!r}] must be (FLOPs/Byte, TFLOP/s), got {item!r}.")
            intensity = inputs.number(f"measured[{name!r}][0]", parts[0], "FLOPs/Byte")
            rate = inputs.rate(f"measured[{name!r}][1]", parts[1]) * scale
            if len(parts) == 3 and parts[2] not in peaks:
                raise ValueError(f"measured[{name!r}] names roof {parts[2]!r}; peaks has {sorted(peaks) or 'none'}.")
            peak = peaks[parts[2]] if len(parts) == 3 else main
            points.append(_Point(name, intensity, min(peak, intensity * slope), rate))
    seen = {(point.name, point.intensity) for point in points}
    if operations is not None:
        for name, value in inputs.mapping("operations", operations, '{"gemm_1024": 341.3}').items():
            intensity = inputs.number(f"operations[{name!r}]", value, "FLOPs/Byte")
            if (name, intensity) not in seen:
                points.append(_Point(name, intensity, min(main, intensity * slope), None))
    return points


def _limits(ax: Any, roofs: list[_Roof], slope: float, points: list[_Point]) -> None:
    """Set the limits: room for every point, a decade and a half on both sides of the ridges, and space above the roofs."""
    ridges = [roof.ridge for roof in roofs]
    intensities = [point.intensity for point in points]
    low = min([min(ridges) / 30, *(i / 2.5 for i in intensities)])
    high = max([max(ridges) * 25, *(i * 4 for i in intensities)])
    rates = [rate for point in points for rate in (point.attainable, point.measured) if rate]
    bottom = min([low * slope, *(rate / 2.5 for rate in rates)])
    top = max([roof.tflops for roof in roofs] + rates) * 3.2
    log_axis(ax.xaxis, low, high)
    log_axis(ax.yaxis, bottom, top)


def _draw_roofs(ax: Any, layer: Any, roofs: list[_Roof], slope: float, prefix: str, points: list[_Point]) -> None:
    low, high = ax.get_xlim()
    bottom, _ = ax.get_ylim()
    main = roofs[0]
    highest = max(roofs, key=lambda roof: roof.tflops)
    start = max(low, bottom / slope)
    slope_line = [start, highest.ridge], [start * slope, highest.tflops]
    ax.plot(*slope_line, color=INK, linewidth=1.8, zorder=3, solid_capstyle="round")
    # Left of the ridge the slope is the lower limit: operations there are memory-bound.
    ax.axvspan(low, main.ridge, color="#c8ced4", linewidth=0, zorder=0)
    ax.plot([main.ridge] * 2, [bottom, main.tflops], color=HAIR, linewidth=0.9, linestyle=(0, (2, 2)), zorder=2)
    for i, roof in enumerate(roofs):
        look = series(i)
        color, style, width = (INK, "-", 1.8) if i == 0 else (look.color, look.linestyle, 1.5)
        ax.plot([roof.ridge, high], [roof.tflops] * 2, color=color, linestyle=style, linewidth=width, zorder=3)
        ax.plot([roof.ridge], [roof.tflops], marker="o", markersize=3.5, color=color, zorder=3.5)
        name = f"{roof.dtype}  " if roof.dtype else ""
        ridge = "" if i == 0 else f", ridge {plain(roof.ridge)}"
        line = [(roof.ridge * (high / roof.ridge) ** share, roof.tflops) for share in (0.98, 0.85, 0.7, 0.55, 0.4)]
        weight = "bold" if i == 0 else "normal"
        layer.add(f"{name}{plain(roof.tflops)} {prefix}FLOP/s{ridge}", line, prefer="NW", gap=4, fontweight=weight)
    layer.add(f"ridge {plain(main.ridge)} FLOPs/Byte", (main.ridge, main.tflops), prefer="NW", gap=7)
    at = (math.log(main.ridge) - math.log(low)) / (math.log(high) - math.log(low))
    for x, ha, words in ((at - 0.01, "right", "memory-bound"), (at + 0.01, "left", "compute-bound")):
        ax.text(x, 0.02, words, transform=ax.transAxes, ha=ha, va="bottom", fontsize=SMALL, color=SOFT, style="italic")
    places = [start * (main.ridge / start) ** share for share in (0.6, 0.3, 0.8)]
    beyond = [point.intensity for point in points if point.above_roof]  # above the slope, where the text may hide them
    along = max(places, key=lambda x: min((abs(math.log(x / i)) for i in beyond), default=0.0))
    layer.add_along(f"{plain(slope)} {prefix}B/s", (along, along * slope), fontweight="bold")


def _draw_points(ax: Any, layer: Any, points: list[_Point]) -> None:
    for point in sorted(points, key=lambda p: (p.intensity, p.attainable)):
        ax.plot([point.intensity], [point.attainable], zorder=4, **HOLLOW)
        if point.measured is None:
            below = "SE" if point.intensity < point.attainable else "S"
            layer.name(point.name, (point.intensity, point.attainable), prefer=below)
            continue
        color = ALARM if point.above_roof else series(0).color
        ax.plot([point.intensity] * 2, [point.attainable, point.measured], color=color, linewidth=0.9, zorder=3.2)
        look = SOLID | ({"marker": "X", "markersize": 9} if point.above_roof else {})
        ax.plot([point.intensity], [point.measured], color=color, zorder=4.5, **look)
        layer.name(
            f"{point.name}  {_percent(point.share)}",
            (point.intensity, point.measured),
            color=color if point.above_roof else INK,
            prefer="NW" if point.above_roof else "E",
            fontweight="bold" if point.above_roof else "normal",
        )
    beyond = [point for point in points if point.above_roof]
    if beyond:
        worst = max(beyond, key=lambda p: p.share)
        which = f"{worst.name} at" if len(beyond) == 1 else f"{len(beyond)} points, up to"
        text = (
            f"Above the roof: {which} {_percent(worst.share)}.\n"
            "Was the machine busy when the roofs were measured? Measure\nthem again. Or is a count wrong (bytes, FLOPs, peaks)?"
        )
        ax.text(0.01, 0.985, text, transform=ax.transAxes, va="top", fontsize=SMALL, color=ALARM, zorder=6)


def _percent(share: float) -> str:
    """Return a share of the roof as text; rounding never moves it across 100%."""
    percent = 100 * share
    if 99.5 <= percent < 100.5 and percent != 100:
        return f"{percent:.2f}%" if f"{percent:.1f}" == "100.0" else f"{percent:.1f}%"
    return f"{percent:.0f}%" if percent >= 9.95 else f"{percent:.2g}%"


def _key(points: list[_Point]) -> list[Any]:
    """Return the key of the plot: hollow, solid and impossible points, if there are such points."""
    from matplotlib.lines import Line2D

    handles = []
    if points:
        handles.append(Line2D([], [], label="predicted, on the roof", **HOLLOW))
    if any(point.measured is not None for point in points):
        handles.append(Line2D([], [], color=series(0).color, label="measured, with its share of the roof", **SOLID))
    if any(point.above_roof for point in points):
        handles.append(Line2D([], [], marker="X", linestyle="none", markersize=8, color=ALARM, label="above the roof"))
    return handles
