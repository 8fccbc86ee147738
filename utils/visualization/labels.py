"""Labels of points, which find their places when the figure is drawn.

The places are found when the figure is drawn, in pixels, with the sizes of the texts that the renderer measured, and anew
when the axes change their size, limits or resolution. One label after another takes the cheapest place around its point: it
must lie inside the axes and overlap no other text, and it should be near, on the preferred side, and clear of lines,
markers and leader lines.

From MANY_NAMES names on, the points get numbers, and a list beside the axes says what the numbers mean.
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
from matplotlib.transforms import IdentityTransform, ScaledTranslation

from .style import CARD, HAIR, INK, SMALL

MANY_NAMES = 13  # from this many names on, points get numbers
LIST_ROWS = 26  # names in a column of the list of numbers
GAP = 2.5  # points between two texts, and between a text and the frame
NEAR = 9.0  # points: a label at most this far away needs no leader line
COMPASS = {"E": 0, "NE": 45, "N": 90, "NW": 135, "W": 180, "SW": 225, "S": 270, "SE": 315}
# Costs in points of distance: the other side of the point, a further point of a line, and what a text covers or crosses.
COST_DIRECTION, COST_SLIDE, COST_LINE, COST_MARKER, COST_LEADER = 14.0, 5.0, 16.0, 90.0, 70.0
COST_NEIGHBOUR = 40.0  # of a place that is nearer to another point than to its own


@dataclass(eq=False)
class Label:
    """A text with its points, and the place that was found for it."""

    text: Any  # matplotlib Text
    xy: np.ndarray  # (A, 2): the point, or points of a line where the label may be, best first
    prefer: str
    gap: float
    leader: bool
    anchors: np.ndarray = field(default_factory=lambda: np.zeros((1, 2)))  # pixels from the axes' corner
    extent: np.ndarray = field(default_factory=lambda: np.zeros(2))  # width and height, in pixels
    box: np.ndarray | None = None  # x0, y0, x1, y1 in pixels from the axes' corner
    line: np.ndarray | None = None  # leader: (2, 2)


@dataclass
class Obstacles:
    """What a text must or should keep away from, in pixels from the axes' corner."""

    frame: tuple[float, float]  # width and height of the axes
    texts: list[np.ndarray]  # boxes
    markers: np.ndarray  # (M, 4) boxes
    points: np.ndarray  # (P, 2) points along lines
    leaders: list[np.ndarray] = field(default_factory=list)  # points along each


def list_columns(names: int) -> int:
    """Return the number of columns of the list of names; 0 if so few names are written at their points."""
    return 0 if names < MANY_NAMES else math.ceil(names / LIST_ROWS)


def candidate_places(label: Label, point: float, reach: float) -> tuple:
    """List C places of a label around its points: boxes (C, 4), the point of each (C, 2), distances and costs (C,)."""
    radii = [label.gap * point]
    while radii[-1] < reach:  # fine near the point, coarse far away
        radii.append(radii[-1] + max(4 * point, 0.06 * radii[-1]))
    places: Any = np.meshgrid(np.arange(len(label.anchors)), radii, np.arange(24) * math.pi / 12, indexing="ij")
    slide, radius, angle = (axis.ravel() for axis in places)
    towards = np.column_stack([np.cos(angle), np.sin(angle)])
    # The edge or corner that faces the point touches the circle.
    share = np.where(towards > 0.3, 0.0, np.where(towards < -0.3, 1.0, 0.5))
    low = label.anchors[slide] + radius[:, None] * towards - share * label.extent
    turned = 1 - np.cos(angle - math.radians(COMPASS[label.prefer]))
    cost = radius / point + COST_DIRECTION * turned / 2 + COST_SLIDE * slide
    return np.hstack([low, low + label.extent]), label.anchors[slide], radius, cost


def place(label: Label, point: float, obstacles: Obstacles) -> bool:
    """Give a label its cheapest place among the obstacles; return False if none is allowed."""
    boxes, start, distance, cost = candidate_places(label, point, math.hypot(*obstacles.frame))
    gap = GAP * point
    inside = (boxes[:, :2] >= gap).all(axis=1) & (boxes[:, 2:] <= np.array(obstacles.frame) - gap).all(axis=1)
    allowed = inside & ~_overlaps(boxes, np.array(obstacles.texts).reshape(-1, 4), gap).any(axis=1)
    if not allowed.any():
        return False
    boxes, start, distance, cost = (array[allowed] for array in (boxes, start, distance, cost))
    cost = cost + COST_MARKER * _overlaps(boxes, obstacles.markers, 0).sum(axis=1)
    cost += COST_LINE * np.minimum(_holds(boxes, obstacles.points, 2 * point).sum(axis=1), 3)
    # A text that stands nearer to another point seems to name that one, unless a line leads to its own.
    centres = (obstacles.markers[:, :2] + obstacles.markers[:, 2:]) / 2
    away = np.linalg.norm(np.clip(centres, boxes[:, None, :2], boxes[:, None, 2:]) - centres, axis=2)
    others = np.linalg.norm(centres - start[:, None], axis=2) > point
    misleads = ((away < distance[:, None]) & others).any(axis=1)
    cost += COST_NEIGHBOUR * misleads
    # The leader line of a far text may cross neither texts nor leader lines.
    path = _path(start, np.clip(start, boxes[:, :2], boxes[:, 2:]))
    far = (distance > NEAR * point) | misleads
    for text in obstacles.texts:
        cost += COST_LEADER * far * ((path >= text[:2]) & (path <= text[2:])).all(axis=2).any(axis=1)
    for leader in obstacles.leaders:
        cost += COST_LEADER * _holds(boxes, leader, 0).any(axis=1)
        apart = np.abs(path[:, :, None] - leader).max(axis=3)
        cost += COST_LEADER * far * (apart < 3 * point).any(axis=(1, 2))
    best = int(np.argmin(cost))
    label.box = boxes[best]
    obstacles.texts.append(boxes[best])
    if label.leader and far[best]:
        label.line = np.stack([start[best], path[best, -1]])
        obstacles.leaders.append(path[best])
    return True


def _path(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return 16 points along each line, (C, 16, 2)."""
    return start[:, None] + (end - start)[:, None] * np.linspace(0.1, 1.0, 16)[:, None]


def _overlaps(a: np.ndarray, b: np.ndarray, gap: float) -> np.ndarray:
    """Return (A, B) booleans: whether two boxes are closer than `gap`."""
    return (a[:, None, :2] < b[:, 2:] + gap).all(axis=2) & (a[:, None, 2:] > b[:, :2] - gap).all(axis=2)


def _holds(boxes: np.ndarray, points: np.ndarray, gap: float) -> np.ndarray:
    """Return (B, P) booleans: whether a box, larger by `gap`, contains a point."""
    return _overlaps(boxes, np.hstack([points, points]), gap)


def _sample(lines: list[np.ndarray], step: float) -> np.ndarray:
    """Return points along every line, `step` pixels apart."""
    points = [np.empty((0, 2))]
    for line in lines:
        for a, b in itertools.pairwise(line):
            count = int(min(400, max(2, math.dist(a, b) / step)))
            points.append(a + (b - a) * np.linspace(0, 1, count)[:, None])
    return np.vstack(points)


class LabelLayer(Artist):
    """Keeps labels from overlapping each other and other texts, and away from markers and lines where possible."""

    def __init__(self, ax: Any, names: int = 0) -> None:
        """Add an empty layer to the axes, for so many named points; from MANY_NAMES on they get numbers."""
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

    def add(
        self,
        text: str,
        xy: Any,
        *,
        color: str = INK,
        size: float = SMALL,
        prefer: str = "E",
        gap: float = 6.0,
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
            leader: whether a text far from its point is joined to it by a line.
            **font: further properties of the text.
        """
        points = np.array(xy, float).reshape(-1, 2)
        artist = self._text(text, color, size, ha="left", **font)
        self._labels.append(Label(artist, points, prefer, gap, leader))

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

    def add_along(self, text: str, xy: tuple[float, float], **font: Any) -> None:
        """Write above a line through the origin, at one of its points, with the slope that the line has on these axes."""
        above = ScaledTranslation(-2 / 72, 2 / 72, self._ax.get_figure(root=True).dpi_scale_trans)
        artist = self._text(text, INK, SMALL, ha="center", rotation_mode="anchor", transform_rotates_text=True, **font)
        artist.set(position=xy, rotation=math.degrees(math.atan2(*xy[::-1])), transform=self._ax.transData + above)

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
        for label in self._labels:
            label.text.set_visible(label.box is not None)
            if label.box is not None:
                label.text.set_position(label.box[:2] + corner)
        self._leaders.set_segments([label.line + corner for label in self._labels if label.line is not None])

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
            path_effects=[withStroke(linewidth=2.2, foreground=CARD)],
            **font,
        )
        artist.set_in_layout(False)
        return artist

    def _solve(self, renderer: Any, corner: np.ndarray, point: float) -> None:
        """Place all texts; `point` is a typographic point in pixels."""
        ax = self._ax
        lines = [(line, ax.transData.transform(line.get_xydata()) - corner) for line in ax.lines]
        lines = [(line, pixels[np.isfinite(pixels).all(axis=1)]) for line, pixels in lines]
        markers = np.vstack([pixels for line, pixels in lines if line.get_marker() != "None"] or [np.empty((0, 2))])
        own_texts = {id(label.text) for label in self._labels}
        fixed = [t for t in ax.texts if id(t) not in own_texts and t.get_visible() and t.get_text()]
        if ax.get_legend() is not None:
            fixed.append(ax.get_legend())
        texts = [t.get_window_extent(renderer).extents - np.tile(corner, 2) for t in fixed]
        boxes = np.hstack([markers - 4 * point, markers + 4 * point])
        points = _sample([pixels for line, pixels in lines if line.get_linestyle() != "None"], step=4 * point)
        obstacles, left_out = Obstacles((ax.bbox.width, ax.bbox.height), texts, boxes, points), []
        for label in self._labels:
            label.box = label.line = None
            extent = label.text.get_window_extent(renderer)
            label.extent = np.array([extent.width, extent.height + point])
            label.anchors = ax.transData.transform(label.xy) - corner
            if not place(label, point, obstacles):
                left_out.append(label.text.get_text())
        if not left_out:
            return
        warnings.warn(
            f"No room for {len(left_out)} of {len(self._labels)} labels here: {', '.join(left_out)}. "
            "Draw fewer points, or pass the Axes of a larger figure as ax=.",
            stacklevel=2,
        )
