"""Names inside bars: whole where they fit, cut where most fits, absent where nothing does."""

from __future__ import annotations

from typing import Any

from matplotlib.artist import Artist

from .style import ink_on

LEAST = 5  # characters a cut name must keep


class BarNames(Artist):
    """Writes names into horizontal bars when they are drawn, with widths that the renderer measured."""

    def __init__(self, ax: Any) -> None:
        super().__init__()
        self._names: list[tuple[Any, str, float, float]] = []
        self.set_in_layout(False)
        self.set_zorder(-100)
        ax.add_artist(self)

    def add(self, name: str, left: float, right: float, y: float, color: str, size: float = 7.5) -> None:
        """Name the bar from `left` to `right` (data) centred at height `y`, filled with `color`."""
        artist = self.axes.text(
            (left + right) / 2,
            y,
            name,
            ha="center",
            va="center_baseline",
            fontsize=size,
            color=ink_on(color),
            clip_on=True,
            zorder=6,
        )
        artist.set_in_layout(False)
        self._names.append((artist, name, left, right))

    def draw(self, renderer: Any) -> None:
        """Fit every name to its bar as it is now."""
        low, high = sorted(self.axes.get_xlim())
        for artist, name, left, right in self._names:
            left, right = max(left, low), min(right, high)
            artist.set_visible(False)
            if right <= left:
                continue
            ends = self.axes.transData.transform([(left, 0), (right, 0)])[:, 0]
            room = ends[1] - ends[0] - 4  # pixels
            artist.set_text(name)
            artist.set_x((left + right) / 2)
            artist.set_visible(True)
            width = artist.get_window_extent(renderer).width
            keep = len(name)
            while width > room and keep > LEAST:
                keep = min(keep - 1, max(LEAST, int(keep * room / width)))
                artist.set_text(name[:keep].rstrip("_ <(:") + "\N{HORIZONTAL ELLIPSIS}")
                width = artist.get_window_extent(renderer).width
            artist.set_visible(width <= room)
