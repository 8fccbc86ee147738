"""Draw a sweep over masks as heat maps: the speed-up, and its share of the ideal speed-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .style import GRID, INK, TEXT, ink_on, name_axes, open_axes, plain, series

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure


def plot_sparsity_sweep(
    rows: Sequence[Mapping[str, Any]], *, title: str = "times as fast as without a mask", ax: Any = None
) -> tuple[Figure, np.ndarray]:
    """Draw a sweep as two heat maps: the speed-up over no mask, and its share of the ideal speed-up.

    Args:
        rows: one mapping for each point, with "doc_span", "block_size", "speedup" (dense time / masked time) and "ideal"
            (1 / block density); a row with "refused" in place of the last two is drawn as a gap.
        title: of the left heat map.
        ax: two Axes to draw in; None for a new figure.

    Returns:
        (Figure, array of two Axes): speed-up, share of the ideal.
    """
    import numpy as np

    rows = list(rows)
    if not rows:
        raise ValueError("rows is empty; give one mapping a point of the sweep.")
    for row in rows:
        needed = {"doc_span", "block_size"} | (set() if "refused" in row else {"speedup", "ideal"})
        if missing := sorted(needed - set(row)):
            raise ValueError(f"a row of the sweep has no {', '.join(map(repr, missing))}; it has {sorted(row)}.")
    columns, lines = (sorted({row[key] for row in rows}) for key in ("doc_span", "block_size"))
    speedup = np.full((len(lines), len(columns)), np.nan)
    share = speedup.copy()
    for row in rows:
        if "refused" not in row:
            at = lines.index(row["block_size"]), columns.index(row["doc_span"])
            speedup[at], share[at] = row["speedup"], row["speedup"] / row["ideal"]
    figure, axes = open_axes(ax, (1.6 + 1.7 * len(columns), 1.5 + 0.72 * len(lines)), count=2)
    _heat_map(axes[0], speedup, lambda value: f"{plain(round(value, 2))}x")
    _heat_map(axes[1], share, lambda value: f"{value:.0%}")
    for axis, head in zip(axes, (title, "share of what the blocks promise"), strict=True):
        axis.set_xticks(range(len(columns)), labels=[str(value) for value in columns])
        axis.set_yticks(range(len(lines)), labels=[str(value) for value in lines])
        name_axes(axis, x="tokens of a document", y="tokens of a block" if axis is axes[0] else None, title=head)
    return figure, np.array(axes)


def _heat_map(ax: Any, values: Any, form: Callable[[float], str]) -> None:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("share", ["#f4f7fa", series(0).color, "#003a5c"]).with_extremes(bad=GRID)
    highest = max(1.0, np.nanmax(values, initial=1.0))
    image = ax.imshow(np.ma.masked_invalid(values), colors, vmin=0, vmax=highest, aspect="auto")
    for (line, column), value in np.ndenumerate(values):
        text, ink = ("refused", INK) if np.isnan(value) else (form(float(value)), ink_on(colors(image.norm(value))))
        ax.text(column, line, text, ha="center", va="center", fontsize=TEXT, color=ink)
    ax.grid(False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
