"""Masks drawn: every pair, every block, and how much of both is left; and sweeps over masks as heat maps."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .style import GRID, INK, PAPER, SOFT, ink_on, name_axes, open_axes, plain, series

if TYPE_CHECKING:
    import numpy as np
    import torch
    from matplotlib.figure import Figure

MOST_PIXELS = 512  # a longer mask is drawn in cells of several pairs, shaded by their density
FULL, PARTIAL = "#0b4f7d", "#f0a830"  # differ in lightness too: they read on a grey printer


def plot_mask(
    mask_mod: Callable | Sequence[Callable],
    sq: int,
    sk: int | None = None,
    *,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
    b: int = 0,
    h: int = 0,
    labels: Sequence[str] | None = None,
    ax: Any = None,
) -> tuple[Figure, np.ndarray]:
    """Draw a mask, or several below each other: left every query-key pair, right the blocks, with both densities.

    Args:
        mask_mod: (b, h, q, k) -> bool; or a list of them; None is no mask.
        sq, sk: queries and keys; sk is sq by default.
        block_size: tokens of a block, or (queries, keys).
        device: where the mask is evaluated; captured tensors must be there.
        b, h: the sequence and head that are drawn.
        labels: names instead of the functions' own.
        ax: two Axes a mask, in a list; a new Figure without.

    Returns:
        (Figure, array (masks, 2) of Axes).
    """
    import numpy as np

    from utils.attention.masks import dense_mask, name_of
    from utils.attention.masks.sparsity import sparsity

    mods = list(mask_mod) if isinstance(mask_mod, Sequence) else [mask_mod]
    if not mods:
        raise ValueError("mask_mod is an empty list; give one mask function (b, h, q, k), or several.")
    sk = sq if sk is None else sk
    names = [name_of(mod) if mod is not None else "no mask" for mod in mods] if labels is None else list(labels)
    if len(names) != len(mods):
        raise ValueError(f"labels {names} must name the {len(mods)} masks.")
    figure, axes = _pairs_of_axes(ax, len(mods))
    for mod, name, (left, right) in zip(mods, names, axes, strict=True):
        allowed = dense_mask(mod, sq, sk, device, b, h)
        found = sparsity(mod, sq, sk, block_size, device) if b == h == 0 else _of_head(mod, sq, sk, block_size, allowed)
        _draw_pairs(left, ax is None, allowed, name, found)
        _draw_blocks(right, ax is None, found)
    return figure, np.array(axes)


def _pairs_of_axes(ax: Any, count: int) -> tuple[Any, list[list[Any]]]:
    if ax is not None:
        figure, flat = open_axes(ax, (0, 0), 2 * count)
    else:
        import matplotlib.pyplot as plt

        figure, grid = plt.subplots(
            count, 2, figsize=(8.4, 0.3 + 4.1 * count), facecolor=PAPER, layout="constrained", squeeze=False
        )
        _, flat = open_axes(list(grid.flat), (0, 0), 2 * count)
    return figure, [flat[2 * i : 2 * i + 2] for i in range(count)]


def _of_head(mod: Callable, sq: int, sk: int, block_size: Any, allowed: Any) -> Any:
    """The sparsity of one head's mask: its pairs, as a mask of their own."""
    from utils.attention.masks.sparsity import sparsity

    return sparsity(lambda b, h, q, k: allowed[q, k], sq, sk, block_size, allowed.device)


def _shades(allowed: Any) -> Any:
    """(rows, columns) density of cells of pairs, few enough to draw."""
    import torch

    cell = max(1, -(-max(allowed.shape) // MOST_PIXELS))
    if cell == 1:
        return allowed.float().cpu().numpy()
    return torch.nn.functional.avg_pool2d(allowed[None, None].float(), cell, ceil_mode=True)[0, 0].cpu().numpy()


def _draw_pairs(ax: Any, own: bool, allowed: Any, name: str, found: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("pairs", [GRID, series(0).color])
    ax.imshow(
        _shades(allowed),
        cmap=colors,
        vmin=0,
        vmax=1,
        interpolation="nearest",
        extent=(0, found.sk, found.sq, 0),
        aspect="auto" if found.sq != found.sk else "equal",
    )
    if max(found.sq, found.sk) <= 48:  # a single pair can be told
        _lines(ax, range(1, found.sk), range(1, found.sq), 0.5)
    _plain_axes(ax, found)
    name = "\n".join(textwrap.wrap(name, 34, break_long_words=False))
    name_axes(ax, own, x="key", y="query", title=f"{name}\n{_share(found.density)} of the pairs")


def _draw_blocks(ax: Any, own: bool, found: Any) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    state = (found.blocks.partial.int() + 2 * found.blocks.full.int()).cpu().numpy()
    height, width = found.block_size
    extent = (0, state.shape[1] * width, state.shape[0] * height, 0)
    ax.imshow(
        state,
        cmap=ListedColormap([GRID, PARTIAL, FULL]),
        vmin=0,
        vmax=2,
        interpolation="nearest",
        extent=extent,
        aspect="auto" if found.sq != found.sk else "equal",
    )
    if max(state.shape) <= 64:
        _lines(ax, range(width, extent[1], width), range(height, extent[2], height), 0.8)
    _plain_axes(ax, found)
    size = f"{height} x {width}"
    name_axes(
        ax,
        own,
        x="key",
        title=f"{_share(found.block_density)} of the blocks of {size}\nat best {plain(found.ideal_speedup)}x as fast"
        if found.full + found.partial
        else f"no block of {size} is left",
    )
    parts = (("full", found.full, FULL), ("partial", found.partial, PARTIAL), ("empty", found.empty, GRID))
    ax.legend(
        handles=[Patch(facecolor=color, label=f"{count} {what}") for what, count, color in parts],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=3,
        frameon=False,
        fontsize=8.5,
        labelcolor=SOFT if own else None,
        handlelength=1.0,
        columnspacing=1.4,
    )


def _lines(ax: Any, columns: Sequence[int], rows: Sequence[int], width: float) -> None:
    for x in columns:
        ax.axvline(x, color=PAPER, linewidth=width)
    for y in rows:
        ax.axhline(y, color=PAPER, linewidth=width)


def _share(share: float) -> str:
    return f"{100 * share:.3g}%"


def _plain_axes(ax: Any, found: Any) -> None:
    ax.grid(False)
    ax.set_xlim(0, found.sk)
    ax.set_ylim(found.sq, 0)
    ax.xaxis.set_ticks([0, found.sk // 2, found.sk])
    ax.yaxis.set_ticks([0, found.sq // 2, found.sq])


def plot_sparsity_sweep(
    rows: Sequence[Mapping[str, Any]],
    *,
    x: str = "doc_span",
    y: str = "block_size",
    title: str | None = None,
    ax: Any = None,
) -> tuple[Figure, np.ndarray]:
    """Draw a sweep as two heat maps: how many times faster than without a mask, and that as a share of the ideal.

    Args:
        rows: one a point, each with `x`, `y`, "speedup" (dense time / masked time) and "ideal" (1 / block density);
            a row with "refused" instead is drawn as a gap.
        x, y: keys of the columns and rows of the heat map.
        title: of the left one.
        ax: two Axes to draw in; a new Figure without.

    Returns:
        (Figure, array of two Axes): speed-up, share of the ideal.
    """
    import numpy as np

    rows = list(rows)
    if not rows:
        raise ValueError("rows is empty; give one mapping a point of the sweep.")
    for row in rows:
        needed = {x, y} | (set() if "refused" in row else {"speedup", "ideal"})
        if missing := sorted(needed - set(row)):
            raise ValueError(f"a row of the sweep has no {', '.join(map(repr, missing))}; it has {sorted(row)}.")
    columns, lines = sorted({row[x] for row in rows}), sorted({row[y] for row in rows})
    speedup = np.full((len(lines), len(columns)), np.nan)
    share = speedup.copy()
    for row in rows:
        if "refused" not in row:
            at = lines.index(row[y]), columns.index(row[x])
            speedup[at], share[at] = row["speedup"], row["speedup"] / row["ideal"]
    figure, axes = open_axes(ax, (1.6 + 1.7 * len(columns), 1.5 + 0.72 * len(lines)), count=2)
    own = ax is None
    words = {"doc_span": "tokens of a document", "block_size": "tokens of a block"}
    top = max(1.0, np.nanmax(share, initial=1.0))
    for axis, values, form, span, head in (
        (
            axes[0],
            speedup,
            lambda v: f"{plain(round(v, 2))}x",
            (0, max(1.0, np.nanmax(speedup, initial=1.0))),
            "times as fast as without a mask" if title is None else title,
        ),
        (axes[1], share, lambda v: f"{v:.0%}", (0, top), "share of what the blocks promise"),
    ):
        _heat_map(axis, values, form, span)
        axis.set_xticks(range(len(columns)), labels=[str(value) for value in columns])
        axis.set_yticks(range(len(lines)), labels=[str(value) for value in lines])
        name_axes(axis, own, x=words.get(x, x), y=words.get(y, y) if axis is axes[0] else None, title=head)
    return figure, np.array(axes)


def _heat_map(ax: Any, values: Any, form: Callable[[float], str], span: tuple[float, float]) -> None:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("share", ["#f4f7fa", series(0).color, "#003a5c"]).with_extremes(bad=GRID)
    image = ax.imshow(np.ma.masked_invalid(values), cmap=colors, vmin=span[0], vmax=span[1], aspect="auto")
    for (line, column), value in np.ndenumerate(values):
        gap = np.isnan(value)
        ax.text(
            column,
            line,
            "refused" if gap else form(float(value)),
            ha="center",
            va="center",
            fontsize=9,
            color=INK if gap else ink_on(image.cmap(image.norm(value))),
        )
    ax.grid(False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
