"""Labels of points, which find their places when the figure is drawn.

The layer places texts in pixels, with the sizes from the renderer, and again when the axes change their size, limits or
resolution. Each label in turn takes the cheapest place around its point. The place must lie inside the axes and overlap no
other text. It should be near, on the preferred side, and away from lines, markers and leader lines.

From MANY_NAMES names on, the points get numbers, and a list beside the axes explains the numbers.
"""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.collections import LineCollection
from matplotlib.patheffects import withStroke
from matplotlib.transforms import IdentityTransform, ScaledTranslation

from .style import CARD, HAIR, INK, SMALL

MANY_NAMES = 13  # from this many names on, points get numbers
LIST_ROWS = 26  # names in a column of the list of numbers
GAP = 2.5  # points between two texts, and between a text and the frame
NEAR = 9.0  # points: a label at most this far away needs no leader line
COMPASS = {"E": 0, "NE": 45, "N": 90, "NW": 135, "W": 180, "SW": 225, "S": 270, "SE": 315}
# Costs in points of distance. DIRECTION: the side opposite to the preferred side; SLIDE: a further point of a line. The others
# are for covering a piece of a line, a marker, a piece of a leader line; LEADER also for a leader line that crosses a text.
COST_DIRECTION, COST_SLIDE, COST_LINE, COST_MARKER, COST_LEADER = 14.0, 5.0, 16.0, 90.0, 70.0
COST_NEIGHBOUR = 40.0  # for a place that is nearer to another point than to its own


@dataclass(eq=False)
class Label:
    """A text with its points, and its place in pixels from the axes' corner."""

    text: Any  # matplotlib Text
    xy: np.ndarray  # (A, 2): the point, or possible points on a line, the best first
    prefer: str
    gap: float
    box: np.ndarray | None = None  # x0, y0, x1, y1
    line: np.ndarray | None = None  # leader: (2, 2)


def list_columns(names: int) -> int:
    """Return the number of columns in the list of names; 0 if few names need no list."""
    return 0 if names < MANY_NAMES else math.ceil(names / LIST_ROWS)


def _candidates(label: Label, anchors: np.ndarray, extent: np.ndarray, point: float, reach: float) -> tuple:
    """Return C places of a label around its points: boxes (C, 4), their points (C, 2), distances (C,) and costs (C,)."""
    radii = [label.gap * point]
    while radii[-1] < reach:  # small steps near the point, large steps far away
        radii.append(radii[-1] + max(4 * point, 0.06 * radii[-1]))
    places: Any = np.meshgrid(np.arange(len(anchors)), radii, np.arange(24) * math.pi / 12, indexing="ij")
    slide, radius, angle = (axis.ravel() for axis in places)
    towards = np.column_stack([np.cos(angle), np.sin(angle)])
    # The edge or corner that faces the point touches the circle.
    share = np.where(towards > 0.3, 0.0, np.where(towards < -0.3, 1.0, 0.5))
    low = anchors[slide] + radius[:, None] * towards - share * extent
    turned = 1 - np.cos(angle - math.radians(COMPASS[label.prefer]))
    cost = radius / point + COST_DIRECTION * turned / 2 + COST_SLIDE * slide
    return np.hstack([low, low + extent]), anchors[slide], radius, cost


def _overlaps(a: np.ndarray, b: np.ndarray, gap: float) -> np.ndarray:
    """Return (A, B) booleans: whether two boxes are closer than `gap`."""
    return (a[:, None, :2] < b[:, 2:] + gap).all(axis=2) & (a[:, None, 2:] > b[:, :2] - gap).all(axis=2)


def _sample(line: np.ndarray, step: float, cost: float) -> np.ndarray:
    """Return points along a line, `step` pixels apart, as rows (x, y, cost of covering the point): (P, 3)."""
    points = [np.empty((0, 2))]
    for a, b in itertools.pairwise(line):
        count = int(min(400, max(2, math.dist(a, b) / step)))
        points.append(a + (b - a) * np.linspace(0, 1, count)[:, None])
    found = np.vstack(points)
    return np.column_stack([found, np.full(len(found), cost)])


class LabelLayer(Artist):
    """Keeps labels from overlapping each other and other texts, and away from markers and lines where possible."""

    def __init__(self, ax: Any, names: int = 0) -> None:
        """Add an empty layer to the axes. names: number of points with names; from MANY_NAMES on they get numbers."""
        super().__init__()
        self._ax = ax
        self._labels: list[Label] = []
        self._numbered: list[str] | None = [] if list_columns(names) else None
        self._solved_for: tuple | None = None
        self._leaders = LineCollection([], colors=HAIR, linewidths=0.7, transform=IdentityTransform(), zorder=2.5)
        self._leaders.set_in_layout(False)
        self.set_in_layout(False)
        self.set_zorder(-100)  # drawn first: texts are in place before they are drawn
        ax.add_artist(self)
        ax.add_artist(self._leaders)

    def add(self, text: str, xy: Any, *, prefer: str = "E", gap: float = 6.0, **font: Any) -> None:
        """Add a label to a point.

        Args:
            text: the label.
            xy: the point, or several points of a line; the label takes one of them.
            prefer: the preferred side of the point, a compass direction such as "NE".
            gap: between point and text, in points.
            **font: properties of the text, such as its color.
        """
        self._labels.append(Label(self._text(text, ha="left", **font), np.array(xy, float).reshape(-1, 2), prefer, gap))

    def name(self, text: str, xy: Any, **options: Any) -> None:
        """Label a point with its name, as `add` does, or with a number if there are many names."""
        if self._numbered is not None:
            self._numbered.append(text)
            text = str(len(self._numbered))
        self.add(text, xy, **options)

    def list_names(self) -> None:
        """Write the list of numbers and names right of the axes, if the points have numbers."""
        before: Any = "axes fraction"  # each column of the list stands right of the last column
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

    def add_along(self, text: str, xy: tuple[float, float], **font: Any) -> None:
        """Write a text above a line through the origin, at one of its points, with the slope of the line on these axes."""
        above = ScaledTranslation(-2 / 72, 2 / 72, self._ax.get_figure(root=True).dpi_scale_trans)
        artist = self._text(text, ha="center", rotation_mode="anchor", transform_rotates_text=True, **font)
        artist.set(position=xy, rotation=math.degrees(math.atan2(*xy[::-1])), transform=self._ax.transData + above)

    def draw(self, renderer: Any) -> None:
        """Place the labels for this renderer; they draw themselves afterwards."""
        ax = self._ax
        corner, dpi = np.array([ax.bbox.x0, ax.bbox.y0]), ax.get_figure(root=True).dpi
        size = round(ax.bbox.width, 2), round(ax.bbox.height, 2)
        key = (*size, *ax.get_xlim(), *ax.get_ylim(), dpi, len(self._labels))
        if key != self._solved_for:
            self._solve(renderer, corner, dpi / 72)
            self._solved_for = key
        for label in self._labels:
            label.text.set_visible(label.box is not None)
            if label.box is not None:
                label.text.set_position(label.box[:2] + corner)
        self._leaders.set_segments([label.line + corner for label in self._labels if label.line is not None])

    def _text(self, text: str, **font: Any) -> Any:
        look = {"fontsize": SMALL, "color": INK, "transform": IdentityTransform(), "va": "bottom", "zorder": 6}
        artist = self._ax.text(0, 0, text, path_effects=[withStroke(linewidth=2.2, foreground=CARD)], **(look | font))
        artist.set_in_layout(False)
        return artist

    def _solve(self, renderer: Any, corner: np.ndarray, point: float) -> None:
        """Place all texts; `point` is a typographic point in pixels."""
        ax, frame = self._ax, np.array([self._ax.bbox.width, self._ax.bbox.height])
        lines = [(line, ax.transData.transform(line.get_xydata()) - corner) for line in ax.lines]
        lines = [(line, pixels[np.isfinite(pixels).all(axis=1)]) for line, pixels in lines]
        markers = np.vstack([pixels for line, pixels in lines if line.get_marker() != "None"] or [np.empty((0, 2))])
        ink = [_sample(pixels, 6 * point, COST_LINE) for line, pixels in lines if line.get_linestyle() != "None"]
        ink += [np.column_stack([markers, np.full(len(markers), COST_MARKER)])]
        own_texts = {id(label.text) for label in self._labels}
        fixed = [t for t in ax.texts if id(t) not in own_texts and t.get_visible() and t.get_text()]
        if ax.get_legend() is not None:
            fixed.append(ax.get_legend())
        texts = [t.get_window_extent(renderer).extents - np.tile(corner, 2) for t in fixed]
        for label in self._labels:
            label.box = label.line = None
            extent = label.text.get_window_extent(renderer)
            extent = np.array([extent.width, extent.height + point])
            anchors = ax.transData.transform(label.xy) - corner
            places = _candidates(label, anchors, extent, point, math.hypot(*frame))
            boxes, gap = places[0], GAP * point
            inside = (boxes[:, :2] >= gap).all(axis=1) & (boxes[:, 2:] <= frame - gap).all(axis=1)
            allowed = inside & ~_overlaps(boxes, np.array(texts).reshape(-1, 4), gap).any(axis=1)
            if not allowed.any():
                continue
            boxes, start, distance, cost = (array[allowed] for array in places)
            # A text nearer to another point seems to name that point, unless a leader line shows its own point.
            away = np.linalg.norm(np.clip(markers, boxes[:, None, :2], boxes[:, None, 2:]) - markers, axis=2)
            others = np.linalg.norm(markers - start[:, None], axis=2) > point
            misleads = ((away < distance[:, None]) & others).any(axis=1)
            covered = np.vstack(ink)
            cost = (
                cost + _overlaps(boxes, covered[:, [0, 1, 0, 1]], 4 * point) @ covered[:, 2] + COST_NEIGHBOUR * misleads
            )
            far = (distance > NEAR * point) | misleads
            end = np.clip(start, boxes[:, :2], boxes[:, 2:])
            path = start[:, None] + (end - start)[:, None] * np.linspace(0.1, 1.0, 16)[:, None]  # (C, 16, 2)
            met = np.linalg.norm(path[:, :, None] - markers, axis=3).min(axis=1) < 4 * point
            cost += COST_LEADER * far * (met & others).any(axis=1)
            for text in texts:
                cost += COST_LEADER * far * ((path >= text[:2]) & (path <= text[2:])).all(axis=2).any(axis=1)
            best = int(np.argmin(cost))
            label.box = boxes[best]
            texts.append(boxes[best])
            if far[best]:
                label.line = np.stack([start[best], end[best]])
                ink.append(_sample(label.line, 6 * point, COST_LEADER))
        if left_out := [label.text.get_text() for label in self._labels if label.box is None]:
            warnings.warn(
                f"No room for {len(left_out)} of {len(self._labels)} labels here: {', '.join(left_out)}. "
                "Draw fewer points, or pass the Axes of a larger figure as ax=.",
                stacklevel=2,
            )
