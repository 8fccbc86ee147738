"""How many times faster the course's attention kernel is than each other backend, over the sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .style import HEAD, INK, SMALL, SOFT, name_axes, open_axes, series, size_axis

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

_NAMES = {
    "cudnn": "cuDNN",
    "fa3": "FlashAttention 3",
    "cute": "flash-attn-4",
    "flex_flash": "Flex (FLASH)",
    "flash": "torch flash (FA2)",
    "flex": "Flex (Triton)",
}


def plot_attention_ratios(
    rows: Sequence[dict], *, highest: float = 1.5, title: str | None = None, ax: Any = None
) -> tuple[Figure, np.ndarray]:
    """Plot a table of ratios, a panel for each head dimension and mask; above 1 the course's kernel is faster.

    Args:
        rows: mappings with `head_dim`, `length`, `causal`, `against`, and either `ratio` with `interval` or `refused`, as
            `python -m tools.record.attention_ratios ratios` writes them.
        highest: the top of the axis; a backend with a larger ratio is named in the corner instead.
        title: of the figure.
        ax: Axes to draw in, one for each panel; None for a new figure.

    Returns:
        (Figure, array of Axes): the panels without a mask in order of head dimension, then the causal ones.
    """
    import numpy as np
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter

    measured = [row for row in rows if "ratio" in row]
    if not measured:
        raise ValueError("rows has no row with a ratio; pass the rows of an attention ratio table.")
    masks = sorted({bool(row["causal"]) for row in measured})
    head_dims = sorted({row["head_dim"] for row in measured})
    panels = [(head_dim, causal) for causal in masks for head_dim in head_dims]
    lengths = sorted({row["length"] for row in measured})
    backends = list(dict.fromkeys(row["against"] for row in measured))
    figure, axes = open_axes(ax, (3.9 * len(head_dims), 3.1 * len(masks) + 0.6), len(panels), len(masks))
    own = ax is None
    drawn: list[str] = []
    for panel, (head_dim, causal) in zip(axes, panels, strict=True):
        rows_of_panel = [row for row in measured if (row["head_dim"], bool(row["causal"])) == (head_dim, causal)]
        notes = []
        panel.axhline(1.0, color=INK, linewidth=1.2, zorder=2)
        for i, name in enumerate(backends):
            points = sorted(
                (row["length"], row["ratio"], *row["interval"]) for row in rows_of_panel if row["against"] == name
            )
            if not points:
                notes.append(f"{_NAMES.get(name, name)}: refuses")
                continue
            x, y, low, high = map(np.array, zip(*points, strict=True))
            if y.max() > highest:
                notes.append(f"{_NAMES.get(name, name)}: {y.min():.2f} to {y.max():.2f}")
                continue
            yerr = [np.maximum(y - low, 0), np.maximum(high - y, 0)]
            panel.errorbar(x, y, yerr, markersize=5.5, capsize=2.5, zorder=3, clip_on=True, **series(i).line)
            drawn.append(name)
        name_axes(
            panel,
            own,
            x="sequence length" if causal == masks[-1] else None,
            y="times faster" if head_dim == head_dims[0] else None,
            title=f"head dim {head_dim}, {'causal' if causal else 'full'}",
        )
        panel.set_ylim(0.9, highest)
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1f}x"))
        if notes:
            corner = {"transform": panel.transAxes, "ha": "right", "va": "top"}
            panel.text(0.98, 0.97, "\n".join(notes), fontsize=SMALL, color=SOFT, **corner)
    figure.canvas.draw()  # the ticks depend on the widths of the panels
    for panel in axes:
        size_axis(panel.xaxis, lengths)
    key = [
        Line2D([], [], markersize=5.5, label=_NAMES.get(name, name), **series(i).line)
        for i, name in enumerate(backends)
        if name in drawn
    ]
    look = {"handles": key, "frameon": False, "fontsize": SMALL}
    if own:
        look |= {"labelcolor": SOFT, "title": title, "title_fontsize": HEAD, "alignment": "left"}
        figure.legend(loc="outside upper left", ncols=len(key), **look)
    else:
        axes[0].legend(**look)
    return figure, np.array(axes, dtype=object)
