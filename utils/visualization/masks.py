"""Draw a mask: every query-key pair, every block, and the shares of visible pairs and of needed blocks."""

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
FULL, PARTIAL = "#0b4f7d", "#d98c00"  # a grey printer keeps them apart by their lightness


def plot_mask(
    mask_mod: Callable | Sequence[Callable],
    length: int,
    *,
    block_size: int = 128,
    device: torch.device | str = "cpu",
    labels: Sequence[str] | None = None,
    ax: Any = None,
) -> tuple[Figure, np.ndarray]:
    """Draw a mask, or several masks below each other: on the left the pairs, on the right the blocks, with their densities.

    If a mask differs by sequence or head, draw the first sequence and the first head.

    Args:
        mask_mod: a function (b, h, q, k) -> bool, or a list of functions; None is no mask.
        length: number of queries, and of keys.
        block_size: tokens of a block.
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
    names = [name_of(mod) if mod is not None else "no mask" for mod in mods] if labels is None else list(labels)
    if len(names) != len(mods):
        raise ValueError(f"labels {names} must name the {len(mods)} masks.")
    names = ["\n".join(textwrap.wrap(name, 34, break_long_words=False)) for name in names]
    # The panels are square with a fixed width, so longer titles need a higher figure.
    height = 0.8 + sum(4.1 + 0.2 * name.count("\n") for name in names)
    figure, flat = open_axes(ax, (8.4, height), 2 * len(mods), rows=len(mods))
    axes = np.array(flat).reshape(-1, 2)
    for mod, name, (left, right) in zip(mods, names, axes, strict=True):
        counts = sparsity(mod, length, length, block_size, device)
        _draw_pairs(left, dense_mask(mod, length, length, device), name, counts)
        _draw_blocks(right, counts)
    return figure, axes


def _shades(allowed: Any) -> Any:
    """Return the densities of cells of pairs, at most MOST_PIXELS cells in each direction."""
    import torch

    cell = max(1, -(-max(allowed.shape) // MOST_PIXELS))
    if cell == 1:
        return allowed.float().cpu().numpy()
    return torch.nn.functional.avg_pool2d(allowed[None, None].float(), cell, ceil_mode=True)[0, 0].cpu().numpy()


def _draw_pairs(ax: Any, allowed: Any, name: str, counts: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("pairs", [GRID, series(0).color])
    separated = range(1, counts.sk) if counts.sk <= 48 else ()  # so few pairs are large enough to be seen
    _draw_cells(ax, _shades(allowed), colors, 1, counts.sk, counts.sk, separated)
    name_axes(ax, x="key", y="query", title=f"{name}\n{_share(counts.density)} of the pairs")


def _draw_blocks(ax: Any, counts: Any) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    state = (counts.blocks.partial.int() + 2 * counts.blocks.full.int()).cpu().numpy()
    block, side = counts.block_size[0], counts.block_size[0] * len(state)
    separated = range(block, side, block) if len(state) <= 64 else ()
    _draw_cells(ax, state, ListedColormap([GRID, PARTIAL, FULL]), 2, side, counts.sk, separated)
    size = f"{block} x {block}"
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


def _draw_cells(
    ax: Any, values: Any, colors: Any, highest: int, side: int, length: int, separated: Sequence[int]
) -> None:
    """Draw values as a square of `side` tokens and show `length` tokens of it, with lines at the tokens `separated`."""
    ax.imshow(values, colors, vmin=0, vmax=highest, interpolation="nearest", extent=(0, side, side, 0))
    for line in (ax.axvline, ax.axhline):
        for place in separated:
            line(place, color=PAPER, linewidth=0.8)
    ax.grid(False)
    ticks = [0, length // 2, length]
    ax.set(xlim=(0, length), ylim=(length, 0), xticks=ticks, yticks=ticks)


def _share(share: float) -> str:
    return f"{100 * share:.3g}%"
