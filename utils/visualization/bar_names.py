"""Names inside horizontal bars, fitted to them when the figure is drawn."""

from __future__ import annotations

from typing import Any

from matplotlib.artist import Artist

from .style import SMALL, ink_on

LEAST_CHARACTERS = 5  # that a shortened name of a bar keeps


class BarNames(Artist):
    """Writes names into horizontal bars: whole where they fit, shortened where most fits, none where nothing fits."""

    def __init__(self, ax: Any) -> None:
        super().__init__()
        self._ax = ax
        self._names: list[tuple[Any, str, float, float]] = []
        self.set_in_layout(False)
        self.set_zorder(-100)  # drawn first, like the labels
        ax.add_artist(self)

    def add(self, name: str, left: float, right: float, y: float, color: str) -> None:
        """Name the bar from `left` to `right` (data) at height `y`, which is filled with `color`."""
        font = {"ha": "center", "va": "center_baseline", "fontsize": SMALL - 1, "color": ink_on(color)}
        artist = self._ax.text((left + right) / 2, y, name, clip_on=True, zorder=6, **font)
        artist.set_in_layout(False)
        self._names.append((artist, name, left, right))

    def draw(self, renderer: Any) -> None:
        """Fit every name to the visible part of its bar."""
        low, high = sorted(self._ax.get_xlim())
        for artist, name, left, right in self._names:
            left, right = max(left, low), min(right, high)
            artist.set_visible(left < right)
            if left >= right:
                continue
            ends = self._ax.transData.transform([(left, 0), (right, 0)])[:, 0]
            room = ends[1] - ends[0] - 4  # pixels
            artist.set_text(name)
            artist.set_x((left + right) / 2)
            width = artist.get_window_extent(renderer).width
            characters = len(name)
            while width > room and characters > LEAST_CHARACTERS:
                characters = min(characters - 1, max(LEAST_CHARACTERS, int(characters * room / width)))
                artist.set_text(name[:characters].rstrip("_ <(:") + "\N{HORIZONTAL ELLIPSIS}")
                width = artist.get_window_extent(renderer).width
            artist.set_visible(width <= room)
