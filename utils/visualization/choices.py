"""Which attention backend is best where: a heat map over shapes, a panel for each kind of work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .style import INK, PAPER, SERIES, SOFT, ink_on, open_axes

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

KINDS = ("training", "prefill", "decode")
# A letter beside the colour, so that no reader depends on it; other providers take the letters that are left.
LETTERS = {
    "cudnn": "c",
    "flash": "f",
    "efficient": "e",
    "math": "m",
    "gluon": "g",
    "cute": "q",
    "triton": "t",
    "flex": "x",
    "flex_flash": "X",
    "flash_attn": "F",
    "naive": "n",
}
LOOKS = {"cudnn": 5, "flash": 1, "efficient": 3, "math": 4, "gluon": 2}


def plot_choices(entries: Sequence[dict], *, ax: Any = None, title: str | None = None) -> tuple[Figure, np.ndarray]:
    """Plot who is best on each shape: colour and letter of the best backend, number: torch's default over the best.

    Args:
        entries: what `utils.bench.choose.report.measured_shapes` gives, one entry a shape.
        ax: as many Axes as there are kinds among the entries; a new Figure without.
        title: instead of the default one.

    Returns:
        (Figure, array of Axes): training, prefill, decode, as far as there are shapes of the kind.
    """
    import numpy as np

    kinds = [kind for kind in KINDS if any(entry["kind"] == kind for entry in entries)]
    if not kinds:
        raise ValueError(
            "entries must hold at least one measured shape of a kind among training, prefill, decode; "
            "`measured_shapes(document)` gives them."
        )
    tables = [_table([entry for entry in entries if entry["kind"] == kind], kind) for kind in kinds]
    if ax is None:
        figure, axes = _own_axes(tables)
    else:
        figure, axes = open_axes(ax, (0, 0), count=len(kinds))
    backends = sorted({entry["best"] for entry in entries}, key=lambda name: (LOOKS.get(name, 9), name))
    for panel, kind, (rows, columns, cells) in zip(axes, kinds, tables, strict=True):
        _panel(panel, kind, rows, columns, cells)
    head = "Best attention backend; number: torch's default / best" if title is None else title
    axes[0].set_title(axes[0].get_title(loc="left"), loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=26)
    if ax is None:
        figure.suptitle(head, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    _key(axes[0], backends)
    return figure, np.array(axes)


def color_of(backend: str) -> str:
    """The colour of a backend in these plots."""
    return SERIES[LOOKS.get(backend, 0)].color


def _table(entries: list[dict], kind: str) -> tuple[list[str], list[str], dict]:
    """Row names, column names and {(row, column): entry}."""
    rows, columns, cells = {}, {}, {}
    for entry in entries:
        p = entry["point"]
        heads = f"H{p.heads}" if p.heads == p.kv_heads else f"H{p.heads}/{p.kv_heads}"
        if kind == "decode":
            row, column = f"D{p.head_dim} {heads} {p.sq} x {p.sk}", f"{p.batch}"
            rows[row] = (p.head_dim, p.heads == p.kv_heads, p.sq, p.sk)
            columns[column] = (p.batch,)
        else:
            row, column = f"D{p.head_dim} {heads} {'causal' if p.causal else 'full'}", f"{p.batch} x {p.sq}"
            rows[row] = (p.head_dim, not p.causal, p.heads != p.kv_heads)
            columns[column] = (p.sq, p.batch)
        cells[row, column] = entry
    return sorted(rows, key=rows.get), sorted(columns, key=columns.get), cells


def _own_axes(tables: list) -> tuple[Any, list]:
    """A new figure: the last panel (decode, the tallest) beside the others."""
    import matplotlib.pyplot as plt

    heights = [len(rows) + 3.5 for rows, _, _ in tables]
    widths = [len(columns) + 4 for _, columns, _ in tables]
    if len(tables) < 3:
        figure, grid = plt.subplots(
            len(tables),
            1,
            figsize=(3 + 0.5 * max(widths), 0.9 + 0.24 * sum(heights)),
            height_ratios=heights,
            squeeze=False,
            facecolor=PAPER,
            layout="constrained",
        )
        return figure, list(grid.flat)
    left, tall = heights[:2], max(sum(heights[:2]), heights[2])
    figure = plt.figure(
        figsize=(3.6 + 0.46 * (max(widths[:2]) + widths[2]), 0.9 + 0.24 * tall), facecolor=PAPER, layout="constrained"
    )
    grid = figure.add_gridspec(
        3, 2, width_ratios=(max(widths[:2]), widths[2]), height_ratios=(*left, max(tall - sum(left), 0.01))
    )
    return figure, [figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[:, 1])]


def _panel(ax: Any, kind: str, rows: list[str], columns: list[str], cells: dict) -> None:
    from matplotlib.patches import Rectangle

    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            entry = cells.get((row, column))
            if entry is None:
                continue
            color = color_of(entry["best"])
            ax.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=color, linewidth=0))
            cost = entry["default_cost"]
            number = "-" if cost is None else f"{cost:.2f}" if cost < 9.95 else f"{cost:.0f}"
            costly = cost is not None and cost > 1.03
            ax.text(
                x,
                y,
                f"{LETTERS.get(entry['best'], '?')} {number}",
                ha="center",
                va="center",
                fontsize=7,
                color=ink_on(color),
                fontweight="bold" if costly else "normal",
            )
    ax.set_xlim(-0.6, len(columns) - 0.4)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xticks(range(len(columns)), labels=columns, rotation=0 if kind == "decode" else 45, fontsize=7.5)
    ax.set_yticks(range(len(rows)), labels=rows, fontsize=7.5)
    ax.tick_params(length=0, labelcolor=INK)
    ax.spines[:].set_visible(False)
    ax.grid(False)
    ax.set_xlabel("batch" if kind == "decode" else "batch x tokens", fontsize=8.5, color=SOFT)
    title = "decode (head dim, heads, queries x keys)" if kind == "decode" else kind
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)


def _key(ax: Any, backends: list[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=color_of(name), label=f"{LETTERS.get(name, '?')}  {name}") for name in backends]
    ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        borderaxespad=0.1,
        handlelength=1.4,
        columnspacing=1.6,
        labelcolor=SOFT,
    )
