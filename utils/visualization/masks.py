"""A mask as a picture: every query-key pair, every block, and the share of both that is left."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .style import GRID, PAPER, SMALL, SOFT, name_axes, open_axes, plain, series

if TYPE_CHECKING:
    import numpy as np
    import torch
    from matplotlib.figure import Figure

MOST_PIXELS = 512  # a longer mask is drawn in cells of several pairs; the shade of a cell is its density
FULL, PARTIAL = "#0b4f7d", "#d98c00"  # they differ in lightness too, for a grey printer


def plot_mask(
    mask_mod: Callable | Sequence[Callable],
    sq: int,
    sk: int | None = None,
    *,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
    labels: Sequence[str] | None = None,
    ax: Any = None,
) -> tuple[Figure, np.ndarray]:
    """Draw a mask, or several masks below each other: the query-key pairs left, the blocks right, with both densities.

    Of a mask that differs by sequence or head, the first sequence and the first head are drawn.

    Args:
        mask_mod: a function (b, h, q, k) -> bool, or a list of functions; None is no mask.
        sq: number of queries.
        sk: number of keys; None for as many as queries.
        block_size: tokens of a block, or (queries, keys).
        device: where the mask is evaluated; tensors that the function captures must be there.
        labels: names of the masks; None for the names of the functions.
        ax: a list of two Axes for each mask; None for a new figure.

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
    names = ["\n".join(textwrap.wrap(name, 34, break_long_words=False)) for name in names]
    # The panels are square and their width is given: what their titles need on top has to come from the height.
    height = 0.8 + sum(4.1 + 0.2 * name.count("\n") for name in names)
    figure, flat = open_axes(ax, (8.4, height), 2 * len(mods), rows=len(mods))
    axes = np.array(flat).reshape(-1, 2)
    for mod, name, (left, right) in zip(mods, names, axes, strict=True):
        counts = sparsity(mod, sq, sk, block_size, device)
        _draw_pairs(left, dense_mask(mod, sq, sk, device), name, counts)
        _draw_blocks(right, counts)
    return figure, axes


def _shades(allowed: Any) -> Any:
    """Return the densities of cells of pairs (rows, columns), few enough to draw."""
    import torch

    cell = max(1, -(-max(allowed.shape) // MOST_PIXELS))
    if cell == 1:
        return allowed.float().cpu().numpy()
    return torch.nn.functional.avg_pool2d(allowed[None, None].float(), cell, ceil_mode=True)[0, 0].cpu().numpy()


def _draw_pairs(ax: Any, allowed: Any, name: str, counts: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("pairs", [GRID, series(0).color])
    _image(ax, _shades(allowed), colors, 1, (0, counts.sk, counts.sq, 0))
    if max(counts.sq, counts.sk) <= 48:  # single pairs are large enough to be seen
        _grid_lines(ax, range(1, counts.sk), range(1, counts.sq), 0.5)
    _plain_axes(ax, counts)
    name_axes(ax, x="key", y="query", title=f"{name}\n{_share(counts.density)} of the pairs")


def _draw_blocks(ax: Any, counts: Any) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    state = (counts.blocks.partial.int() + 2 * counts.blocks.full.int()).cpu().numpy()
    height, width = counts.block_size
    extent = (0, state.shape[1] * width, state.shape[0] * height, 0)
    _image(ax, state, ListedColormap([GRID, PARTIAL, FULL]), 2, extent)
    if max(state.shape) <= 64:
        _grid_lines(ax, range(width, extent[1], width), range(height, extent[2], height), 0.8)
    _plain_axes(ax, counts)
    size = f"{height} x {width}"
    title = f"{_share(counts.block_density)} of the blocks of {size}\nat best {plain(counts.ideal_speedup)}x as fast"
    name_axes(ax, x="key", title=title if counts.full + counts.partial else f"no block of {size} is left")
    parts = (("full", counts.full, FULL), ("partial", counts.partial, PARTIAL), ("empty", counts.empty, GRID))
    ax.legend(
        handles=[Patch(facecolor=color, label=f"{count} {kind}") for kind, count, color in parts],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=3,
        frameon=False,
        fontsize=SMALL,
        labelcolor=SOFT,
        handlelength=1.0,
        columnspacing=1.4,
    )


def _image(ax: Any, values: Any, colors: Any, highest: int, extent: tuple[int, int, int, int]) -> None:
    ax.imshow(values, colors, vmin=0, vmax=highest, interpolation="nearest", extent=extent)
    if extent[1] != extent[2]:
        ax.set_aspect("auto")


def _grid_lines(ax: Any, columns: Sequence[int], rows: Sequence[int], width: float) -> None:
    for x in columns:
        ax.axvline(x, color=PAPER, linewidth=width)
    for y in rows:
        ax.axhline(y, color=PAPER, linewidth=width)


def _share(share: float) -> str:
    return f"{100 * share:.3g}%"


def _plain_axes(ax: Any, counts: Any) -> None:
    ax.grid(False)
    ax.set_xlim(0, counts.sk)
    ax.set_ylim(counts.sq, 0)
    ax.xaxis.set_ticks([0, counts.sk // 2, counts.sk])
    ax.yaxis.set_ticks([0, counts.sq // 2, counts.sq])
