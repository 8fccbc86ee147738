"""Plots of latencies with their intervals: a row for each label, or a line over sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import inputs
from .style import INK, PAPER, SMALL, SOFT, log_axis, name_axes, open_axes, plain, series, size_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_gemm_torch_matmul_latency(
    sizes: Sequence[int],
    gemm_tiled_latency_ms: Sequence[float],
    torch_matmul_latency_ms: Sequence[float],
    *,
    ax: Axes | None = None,
) -> tuple[Figure, Axes]:
    """Plot the latency of `gemm_tiled` and `torch.matmul` over the size of square matrices.

    Args:
        sizes: n of each (n, n) @ (n, n).
        gemm_tiled_latency_ms: a latency for each size, in ms: numbers, Measurements, or (median, low, high).
        torch_matmul_latency_ms: the same for `torch.matmul`.
        ax: Axes to draw in; None for a new figure.

    Returns:
        (Figure, Axes).
    """
    order = inputs.sizes("sizes", sizes)
    curves: dict[str, dict[int, Any]] = {}
    for label, argument, values in (
        ("gemm_tiled", "gemm_tiled_latency_ms", gemm_tiled_latency_ms),
        ("torch.matmul", "torch_matmul_latency_ms", torch_matmul_latency_ms),
    ):
        row = inputs.sequence(argument, values, "latencies in ms")
        if len(row) != len(order):
            raise ValueError(f"{argument} holds {len(row)} latencies for {len(order)} sizes; pass one a size.")
        for size, value in zip(order, row, strict=True):
            median, _ = inputs.median_and_interval(f"{argument} at n={size}", value)
            implied = 2 * size**3 / (median * 1e-3) / 1e12
            if implied > inputs.MAX_TFLOPS:
                raise ValueError(
                    f"{argument} at n={size} is {median:g} ms, which means {implied:.3g} TFLOP/s; no machine does "
                    f"more than {inputs.MAX_TFLOPS:g}. It looks like seconds: multiply by 1000."
                )
        curves[label] = dict(zip(order, row, strict=True))
    name = "matrix size n, for (n, n) @ (n, n)   (numbers: ratio of the two)"
    return plot_latency(curves, ax=ax, size_name=name, title="GEMM latency")


def plot_latency(
    results: Mapping[str, Any],
    *,
    ax: Axes | None = None,
    size_name: str = "size",
    title: str | None = None,
    ratios: Mapping[int, float] | None = None,
) -> tuple[Figure, Axes]:
    """Plot medians with their intervals: a row for each label, or a line for each label over sizes.

    Args:
        results: {label: latency} for rows, {label: {size: latency}} for lines. A latency is a Measurement,
            a median in ms, or (median, low, high) in ms.
        ax: Axes to draw in; None for a new figure.
        size_name: name of the axis of sizes.
        title: the title; None for no title.
        ratios: {size: number} to write above two lines, such as the `speedup` of `compare`; None for the ratios of their
            medians, the larger over the smaller.

    Returns:
        (Figure, Axes).
    """
    rows = inputs.mapping("results", results, '{"eager": 1.93, "compiled": (0.71, 0.70, 0.73)}')
    nested = [isinstance(value, Mapping) for value in rows.values()]
    if any(nested) and not all(nested):
        raise ValueError("results mixes {label: latency} and {label: {size: latency}}; use one of the two.")
    if not any(nested):
        return _rows({name: inputs.median_and_interval(name, value) for name, value in rows.items()}, ax, title)
    lines: dict[str, dict[int, tuple]] = {}
    for name, value in rows.items():
        curve = inputs.mapping(f"results[{name!r}]", value, "{1024: 0.02}")
        order = inputs.sizes(f"results[{name!r}]", list(value))
        lines[name] = {
            size: inputs.median_and_interval(f"{name} at {size}", item)
            for size, item in sorted(zip(order, curve.values(), strict=True), key=lambda pair: pair[0])
        }
    if ratios is None and len(lines) == 2:
        first, second = ({size: median for size, (median, _) in curve.items()} for curve in lines.values())
        ratios = {n: max(first[n], second[n]) / min(first[n], second[n]) for n in first if n in second}
    figure, (axes,) = open_axes(ax, (7.0, 4.3))
    draw_lines(axes, lines, ratios or {})
    name_axes(axes, x=size_name, y="latency (ms)", title=title)
    return figure, axes


def _rows(rows: dict[str, tuple], ax: Any, title: str | None) -> tuple[Any, Any]:
    figure, (axes,) = open_axes(ax, (7.0, 0.9 + 0.36 * len(rows)))
    ends = [end for median, interval in rows.values() for end in (median, *(interval or ()))]
    low, high = min(ends), max(ends)
    if high / low > 12:
        log_axis(axes.xaxis, low / 1.6, high * 4)
    else:
        axes.set_xlim(0, high * 1.32)
    look = series(0)
    for y, (median, interval) in enumerate(rows.values()):
        axes.plot([axes.get_xlim()[0], median], [y, y], color="#dddddd", linewidth=1.2, zorder=1)
        text = f"{plain(median)} ms"
        if interval is not None:
            axes.plot(interval, [y, y], color=look.color, linewidth=4, alpha=0.35, solid_capstyle="butt", zorder=2)
            axes.plot(interval, [y, y], color=look.color, linestyle="none", marker="|", markersize=9, zorder=2)
            text += f"  [{plain(interval[0])}, {plain(interval[1])}]"
        axes.plot([median], [y], color=look.color, marker="o", markersize=6, zorder=3)
        end = (max(median, (interval or (median,))[-1]), y)
        axes.annotate(text, end, (9, 0), textcoords="offset points", va="center", fontsize=SMALL, color=INK)
    axes.set_yticks(range(len(rows)), labels=list(rows), fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    name_axes(axes, x="latency (ms)", title=title)
    return figure, axes


def draw_lines(ax: Any, lines: Mapping[str, Mapping[int, tuple]], ratios: Mapping[int, float]) -> None:
    """Draw a line over sizes for each label, with its name at its end.

    Args:
        ax: empty Axes.
        lines: {label: {size: (value, interval or None)}}, by growing size; a NaN means out of memory.
        ratios: {size: number} to write above the lines; a NaN is not written.
    """
    from .labels import LabelLayer

    results = [result for curve in lines.values() for result in curve.values()]
    ends = [end for value, interval in results for end in (value, *(interval or ())) if not math.isnan(end)]
    size_axis(ax.xaxis, sorted({size for curve in lines.values() for size in curve}))
    left, right = ax.get_xlim()
    ax.set_xlim(left, right * (right / left) ** 0.16)  # room for the lines' names
    log_axis(ax.yaxis, min(ends) / 2, max(ends) * 2)
    layer = LabelLayer(ax, names=len(lines))
    for i, (name, curve) in enumerate(lines.items()):
        look = series(i)
        points = [(size, value) for size, (value, _) in curve.items() if not math.isnan(value)]
        edge = {"markersize": 6, "markeredgecolor": PAPER, "markeredgewidth": 0.6}
        ax.plot(list(curve), [value for value, _ in curve.values()], label=name, zorder=3, **look.line, **edge)
        for size, (value, interval) in curve.items():
            if interval is not None:
                ax.plot([size, size], interval, color=look.color, linewidth=1.2, marker="_", markersize=6, zorder=2)
            if math.isnan(value):
                note = ax.annotate("out of memory", (size, ax.get_ylim()[0]), xytext=(0, 4), textcoords="offset points")
                note.set(rotation=90, fontsize=SMALL, color=SOFT, ha="center", va="bottom")
        layer.name(name, points[-1], prefer="E", gap=8, fontsize=9, fontweight="bold")
    layer.list_names()
    for size, ratio in ratios.items():
        if not math.isnan(ratio):
            highest = max(curve[size][0] for curve in lines.values() if size in curve)
            text = f"{plain(float(f'{ratio:.3g}'))}x"
            layer.add(text, (size, highest), prefer="N", gap=7, fontsize=8, color=SOFT)
