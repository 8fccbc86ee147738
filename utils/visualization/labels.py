"""Texts that find their places when the figure is drawn: labels of points, and names inside bars.

The layout (see `placing`) runs when the figure is drawn, in pixels, with the sizes of the texts that the renderer measured.
It runs again when the axes change their size, limits or resolution.

From MANY_NAMES names on, the points get numbers, and a list beside the axes says what the numbers mean: a layout of many
long names takes many seconds, and nobody can read it.
"""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.collections import LineCollection
from matplotlib.patheffects import withStroke
from matplotlib.transforms import IdentityTransform

from .placing import SHRINK, Label, Layout
from .style import HAIR, INK, PAPER, SMALL, ink_on

MANY_NAMES = 20  # from this many names on, points get numbers
LIST_ROWS = 26  # names in a column of the list of numbers
LEAST_CHARACTERS = 5  # that a shortened name of a bar keeps


@dataclass
class _LineText:
    """A text along a line."""

    text: Any
    ends: np.ndarray  # (2, 2) data
    at: np.ndarray = field(default_factory=lambda: np.zeros(2))  # pixels from the axes' corner


def list_columns(names: int) -> int:
    """Return the number of columns of the list of names; 0 if so few names are written at their points."""
    return 0 if names < MANY_NAMES else math.ceil(names / LIST_ROWS)


class LabelLayer(Artist):
    """Keeps labels from overlapping each other and other texts, and away from markers and lines where possible."""

    def __init__(self, ax: Any, names: int = 0) -> None:
        """Add an empty layer to the axes.

        Args:
            ax: the Axes.
            names: how many points will be named; from MANY_NAMES on they get numbers.
        """
        super().__init__()
        self._ax = ax
        self._labels: list[Label] = []
        self._line_texts: list[_LineText] = []
        self._markers: list[tuple[float, float]] = []
        self._lines: list[np.ndarray] = []
        self._numbered: list[str] | None = [] if list_columns(names) else None
        self._solved_for: tuple | None = None
        self._leaders = LineCollection([], colors=HAIR, linewidths=0.7, transform=IdentityTransform(), zorder=2.5)
        self._leaders.set_in_layout(False)
        self.set_in_layout(False)
        self.set_zorder(-100)  # drawn first: texts are in place before they are drawn
        ax.add_artist(self)
        ax.add_artist(self._leaders)

    def add(
        self,
        text: str,
        xy: Any,
        *,
        color: str = INK,
        size: float = SMALL,
        prefer: str = "E",
        gap: float = 6.0,
        coords: str = "data",
        leader: bool = True,
        **font: Any,
    ) -> None:
        """Add a label to a point.

        Args:
            text: the label.
            xy: the point, or several points of a line, of which one gets the label.
            color: of the text.
            size: of the font, in points.
            prefer: the preferred side of the point, a compass direction such as "NE".
            gap: between point and text, in points.
            coords: "data", or "axes fraction".
            leader: whether a text far from its point is joined to it by a line.
            **font: further properties of the text.
        """
        points = np.array(xy, float).reshape(-1, 2)
        self._labels.append(
            Label(self._text(text, color, size, ha="left", **font), points, coords, size, prefer, gap, leader)
        )

    def name(self, text: str, xy: Any, **options: Any) -> None:
        """Name a point like `add`, with a number instead of the text if there are many names."""
        if self._numbered is not None:
            self._numbered.append(text)
            text = str(len(self._numbered))
        self.add(text, xy, **options)

    def list_names(self) -> None:
        """Write the list of numbers and names right of the axes, if the points have numbers."""
        before: Any = "axes fraction"  # each column of the list is placed right of the one before
        for start in range(0, len(self._numbered or ()), LIST_ROWS):
            rows = list(enumerate(self._numbered or (), 1))[start : start + LIST_ROWS]
            before = self._ax.annotate(
                "\n".join(f"{number:>2}  {text}" for number, text in rows),
                (1.0, 1.0),
                xycoords=before,
                xytext=(10, 0),
                textcoords="offset points",
                va="top",
                fontsize=SMALL - 1,
                color=INK,
                annotation_clip=False,
            )

    def add_along(self, text: str, start: tuple[float, float], end: tuple[float, float], **font: Any) -> None:
        """Write along and above the line between two data points, where the fewest markers are."""
        artist = self._text(text, INK, SMALL, ha="center", rotation_mode="anchor", **font)
        self._line_texts.append(_LineText(artist, np.array([start, end], float)))

    def avoid_point(self, x: float, y: float) -> None:
        """Keep texts away from a marker at this data point."""
        self._markers.append((x, y))

    def avoid_line(self, x: Any, y: Any) -> None:
        """Keep texts away from a line through these data points."""
        self._lines.append(np.column_stack([np.asarray(x, float), np.asarray(y, float)]))

    def draw(self, renderer: Any) -> None:
        """Place the labels for this renderer; they draw themselves afterwards."""
        ax = self._ax
        corner = np.array([ax.bbox.x0, ax.bbox.y0])
        dpi = ax.get_figure(root=True).dpi
        size = round(ax.bbox.width, 2), round(ax.bbox.height, 2)
        key = (*size, *ax.get_xlim(), *ax.get_ylim(), dpi, len(self._labels))
        if key != self._solved_for:
            self._solve(renderer, corner, dpi / 72)
            self._solved_for = key
        for line_text in self._line_texts:
            line_text.text.set_position(line_text.at + corner)
        segments = []
        for label in self._labels:
            label.text.set_visible(label.box is not None)
            if label.box is not None:
                label.text.set_position(label.box[:2] + corner)
                if label.line is not None:
                    segments.append(label.line.reshape(2, 2) + corner)
        self._leaders.set_segments(segments)

    def _text(self, text: str, color: str, size: float, **font: Any) -> Any:
        artist = self._ax.text(
            0,
            0,
            text,
            transform=IdentityTransform(),
            fontsize=size,
            color=color,
            va="bottom",
            zorder=6,
            path_effects=[withStroke(linewidth=2.2, foreground=PAPER)],
            **font,
        )
        artist.set_in_layout(False)
        return artist

    # ---- layout, in pixels from the axes' lower left corner ----

    def _solve(self, renderer: Any, corner: np.ndarray, point: float) -> None:
        ax = self._ax
        self._point = point  # pixels
        marker = np.array([ax.transData.transform(p) for p in self._markers]).reshape(-1, 2) - corner
        for line_text in self._line_texts:
            self._place_along(line_text, renderer, corner, marker)
        own_texts = {id(label.text) for label in self._labels}
        fixed = [t for t in ax.texts if id(t) not in own_texts and t.get_visible() and t.get_text()]
        if ax.get_legend() is not None:
            fixed.append(ax.get_legend())
        boxes = [t.get_window_extent(renderer).extents - np.tile(corner, 2) for t in fixed]
        for label in self._labels:
            transform = ax.transData if label.coords == "data" else ax.transAxes
            label.anchors = transform.transform(label.xy) - corner
        layout = Layout(
            labels=self._labels,
            point=point,
            frame=(ax.bbox.width, ax.bbox.height),
            fixed=np.array(boxes).reshape(-1, 4),
            markers=np.hstack([marker - 4 * point, marker + 4 * point]),
            line_points=self._sample(corner, step=4 * point),
        )
        for share in SHRINK:
            for label in self._labels:
                label.text.set_fontsize(label.size * share)
                extent = label.text.get_window_extent(renderer)
                label.extent = (extent.width, extent.height)
            if layout.solve():
                return
        left_out = [label.text.get_text() for label in self._labels if label.box is None]
        warnings.warn(
            f"No room for {len(left_out)} of {len(self._labels)} labels here: {', '.join(left_out)}. "
            "Draw fewer points, or pass the Axes of a larger figure as ax=.",
            stacklevel=2,
        )

    def _place_along(self, line_text: _LineText, renderer: Any, corner: np.ndarray, marker: np.ndarray) -> None:
        a, b = self._ax.transData.transform(line_text.ends) - corner
        along = (b - a) / max(math.dist(a, b), 1e-9)
        line_text.text.set_rotation(math.degrees(math.atan2(along[1], along[0])))
        lift = np.array([-along[1], along[0]]) * 3 * self._point
        best = -math.inf
        for share in (0.35, 0.45, 0.55, 0.65, 0.25):
            at = a + (b - a) * share + lift
            line_text.text.set_position(at + corner)
            box = line_text.text.get_window_extent(renderer).extents - np.tile(corner, 2)
            clear = np.hypot(*(marker - np.clip(marker, box[:2], box[2:])).T).min(initial=60 * self._point)
            if not (box[:2] > 0).all():
                clear -= 100 * self._point
            if clear > best:
                best, line_text.at = clear, at
        line_text.text.set_position(line_text.at + corner)

    def _sample(self, corner: np.ndarray, step: float) -> np.ndarray:
        """Return points along every line to avoid, `step` pixels apart."""
        points = [np.empty((0, 2))]
        for line in self._lines:
            pixels = self._ax.transData.transform(line) - corner
            for a, b in itertools.pairwise(pixels):
                count = int(min(400, max(2, math.dist(a, b) / step)))
                points.append(a + (b - a) * np.linspace(0, 1, count)[:, None])
        return np.vstack(points)


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
