"""Which attention backend is fastest at which shape: a heat map over shapes, a panel for each kind of work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .style import HEAD, INK, PAPER, SERIES, SMALL, SOFT, ink_on, key_above, open_axes

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

KINDS = ("training", "prefill", "decode")
# Each backend has a letter too, so that nobody depends on the colour.
LETTERS = {
    "cudnn": "c",
    "flash": "f",
    "efficient": "e",
    "math": "m",
    "gluon": "g",
    "cute": "q",
    "fa3": "3",
    "triton": "t",
    "flex": "x",
    "flex_flash": "X",
    "flash_attn": "F",
    "naive": "n",
}
# Index of the colour in SERIES; every other backend has colour 0.
LOOKS = {"cudnn": 5, "flash": 1, "efficient": 3, "math": 4, "gluon": 2}


def plot_choices(entries: Sequence[dict], *, ax: Any = None, title: str | None = None) -> tuple[Figure, np.ndarray]:
    """Plot the fastest backend at each shape: its colour and letter, and torch's default time over the best time.

    Args:
        entries: one entry for each shape, as `utils.bench.choose.report.measured_shapes` returns them.
        ax: as many Axes as there are kinds of work among the entries; None for a new figure.
        title: the title; None for a sentence that explains the numbers.

    Returns:
        (Figure, array of Axes): training, prefill, decode, as far as there are shapes of the kind.
    """
    import numpy as np
    from matplotlib.patches import Patch

    kinds = [kind for kind in KINDS if any(entry["kind"] == kind for entry in entries)]
    if not kinds:
        raise ValueError(
            "entries must hold at least one measured shape of a kind among training, prefill, decode; "
            "`measured_shapes(document)` gives them."
        )
    tables = [_table([entry for entry in entries if entry["kind"] == kind], kind) for kind in kinds]
    figure, axes = _own_axes(tables) if ax is None else open_axes(ax, (0, 0), count=len(kinds))
    for panel, kind, table in zip(axes, kinds, tables, strict=True):
        _draw_panel(panel, kind, *table)
    if ax is None:
        head = "Best attention backend; number: torch's default / best" if title is None else title
        figure.suptitle(head, x=0.01, ha="left", fontsize=HEAD + 1, fontweight="bold", color=INK)
    backends = sorted({entry["best"] for entry in entries}, key=lambda name: (LOOKS.get(name, 9), name))
    handles = [Patch(facecolor=color_of(name), label=f"{LETTERS.get(name, '?')}  {name}") for name in backends]
    key_above(axes[0], True, handles, columns=len(handles))
    return figure, np.array(axes)


def color_of(backend: str) -> str:
    """Return the colour of a backend in this picture."""
    return SERIES[LOOKS.get(backend, 0)].color


def _table(entries: list[dict], kind: str) -> tuple[list[str], list[str], dict[tuple[str, str], dict]]:
    """Return the names of the rows, the names of the columns, and {(row, column): entry}."""
    row_order: dict[str, tuple] = {}
    column_order: dict[str, tuple] = {}
    cells = {}
    for entry in entries:
        p = entry["point"]
        grouped = p.heads != p.kv_heads
        heads = f"H{p.heads}/{p.kv_heads}" if grouped else f"H{p.heads}"
        if kind == "decode":
            row, column = f"D{p.head_dim} {heads} {p.sq} x {p.sk}", f"{p.batch}"
            row_order[row] = (p.head_dim, not grouped, p.sq, p.sk)
            column_order[column] = (p.batch,)
        else:
            row, column = f"D{p.head_dim} {heads} {'causal' if p.causal else 'full'}", f"{p.batch} x {p.sq}"
            row_order[row] = (p.head_dim, not p.causal, grouped)
            column_order[column] = (p.sq, p.batch)
        cells[row, column] = entry
    return sorted(row_order, key=row_order.__getitem__), sorted(column_order, key=column_order.__getitem__), cells


def _own_axes(tables: list) -> tuple[Any, list]:
    """Make a new figure; of three panels the last one (decode, the tallest) is right of the others."""
    import matplotlib.pyplot as plt

    heights = [len(rows) + 3.5 for rows, _, _ in tables]
    widths = [len(columns) + 4 for _, columns, _ in tables]
    if len(tables) < 3:
        size = (3 + 0.5 * max(widths), 0.9 + 0.24 * sum(heights))
        figure = plt.figure(figsize=size, facecolor=PAPER, layout="constrained")
        return figure, list(figure.subplots(len(tables), 1, height_ratios=heights, squeeze=False).flat)
    left, tall = heights[:2], max(sum(heights[:2]), heights[2])
    size = (3.6 + 0.46 * (max(widths[:2]) + widths[2]), 0.9 + 0.24 * tall)
    figure = plt.figure(figsize=size, facecolor=PAPER, layout="constrained")
    grid = figure.add_gridspec(
        3, 2, width_ratios=(max(widths[:2]), widths[2]), height_ratios=(*left, max(tall - sum(left), 0.01))
    )
    return figure, [figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[:, 1])]


def _draw_panel(ax: Any, kind: str, rows: list[str], columns: list[str], cells: dict) -> None:
    from matplotlib.patches import Rectangle

    for (row, column), entry in cells.items():
        x, y = columns.index(column), rows.index(row)
        color = color_of(entry["best"])
        ax.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=color, linewidth=0))
        cost = entry["default_cost"]
        number = "-" if cost is None else f"{cost:.2f}" if cost < 9.95 else f"{cost:.0f}"
        weight = "bold" if cost is not None and cost > 1.03 else "normal"
        font = {"ha": "center", "va": "center", "fontsize": 7, "color": ink_on(color), "fontweight": weight}
        ax.text(x, y, f"{LETTERS.get(entry['best'], '?')} {number}", **font)
    ax.set_xlim(-0.6, len(columns) - 0.4)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xticks(range(len(columns)), labels=columns, rotation=0 if kind == "decode" else 45, fontsize=SMALL - 1)
    ax.set_yticks(range(len(rows)), labels=rows, fontsize=SMALL - 1)
    ax.tick_params(length=0, labelcolor=INK)
    ax.spines[:].set_visible(False)
    ax.grid(False)
    ax.set_xlabel("batch" if kind == "decode" else "batch x tokens", fontsize=SMALL, color=SOFT)
    title = "decode (head dim, heads, queries x keys)" if kind == "decode" else kind
    ax.set_title(title, loc="left", fontsize=HEAD, fontweight="bold", color=INK)
