"""How many times faster one attention provider is than each other, over the sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .style import INK, SOFT, name_axes, open_axes, series, size_axis

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

_NAMES = {
    "cudnn": "cuDNN",
    "cute": "flash-attn-4",
    "flex_flash": "Flex (FLASH)",
    "flash": "torch flash (FA2)",
    "flex": "Flex (Triton)",
}


def plot_attention_ratios(
    rows: Sequence[dict], *, highest: float = 1.5, title: str | None = None, ax: Any = None
) -> tuple[Figure, np.ndarray]:
    """Plot a table of ratios, a panel for each head dimension and mask; above 1 the course's kernel is the faster.

    Args:
        rows: `head_dim`, `length`, `causal`, `against`, and `ratio` with `interval`, or `refused`: what
            `python -m tools.record.attention_ratios ratios` writes.
        highest: the top of the axis; an opponent that is beyond it somewhere is named in the corner instead.
        title: of the figure.
        ax: Axes to draw in, one for each panel; a new Figure without.

    Returns:
        (Figure, array of Axes): the full panels in order of head dimension, then the causal ones.
    """
    import numpy as np
    from matplotlib.ticker import FuncFormatter

    measured = [row for row in rows if "ratio" in row]
    if not measured:
        raise ValueError("rows has no row with a ratio; pass the rows of an attention ratio table.")
    masks = sorted({bool(row["causal"]) for row in measured})
    head_dims = sorted({row["head_dim"] for row in measured})
    panels = [(head_dim, causal) for causal in masks for head_dim in head_dims]
    lengths = sorted({row["length"] for row in measured})
    opponents = list(dict.fromkeys(row["against"] for row in measured))
    figure, axes = open_axes(ax, (3.9 * len(head_dims), 3.1 * len(masks) + 0.6), len(panels), len(masks))
    own = ax is None
    shown: list[str] = []
    for panel, (head_dim, causal) in zip(axes, panels, strict=True):
        here = [row for row in measured if (row["head_dim"], bool(row["causal"])) == (head_dim, causal)]
        beyond = []
        panel.axhline(1.0, color=INK, linewidth=1.2, zorder=2)
        for i, name in enumerate(opponents):
            points = sorted((row["length"], row["ratio"], *row["interval"]) for row in here if row["against"] == name)
            if not points:
                beyond.append(f"{_NAMES.get(name, name)}: refuses")
                continue
            x, y, low, high = map(np.array, zip(*points, strict=True))
            if y.max() > highest:
                beyond.append(f"{_NAMES.get(name, name)}: {y.min():.2f} to {y.max():.2f}")
                continue
            look = series(i)
            panel.errorbar(
                x,
                y,
                yerr=[np.maximum(y - low, 0), np.maximum(high - y, 0)],
                color=look.color,
                marker=look.marker,
                linestyle=look.linestyle,
                markersize=5.5,
                linewidth=1.6,
                capsize=2.5,
                zorder=3,
                clip_on=True,
            )
            shown.append(name)
        name_axes(
            panel,
            own,
            x="sequence length" if causal == masks[-1] else None,
            y="times faster" if head_dim == head_dims[0] else None,
            title=f"head dim {head_dim}, {'causal' if causal else 'full'}",
        )
        panel.set_ylim(0.9, highest)
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1f}x"))
        if beyond:
            panel.text(
                0.98, 0.97, "\n".join(beyond), transform=panel.transAxes, ha="right", va="top", fontsize=8.5, color=SOFT
            )
    figure.canvas.draw()  # the ticks below need the panels' widths
    for panel in axes:
        size_axis(panel.xaxis, lengths)
    key = [_line(i, _NAMES.get(name, name)) for i, name in enumerate(opponents) if name in shown]
    if own:
        figure.legend(
            handles=key,
            loc="outside upper left",
            ncols=len(key),
            frameon=False,
            fontsize=9,
            labelcolor=SOFT,
            title=title,
            title_fontsize=11,
            alignment="left",
        )
    else:
        axes[0].legend(handles=key, frameon=False, fontsize=8.5)
    return figure, np.array(axes, dtype=object)


def _line(i: int, label: str) -> Any:
    from matplotlib.lines import Line2D

    look = series(i)
    return Line2D(
        [],
        [],
        color=look.color,
        marker=look.marker,
        linestyle=look.linestyle,
        markersize=5.5,
        linewidth=1.6,
        label=label,
    )
