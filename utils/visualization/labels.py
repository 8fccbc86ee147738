"""Labels beside points, laid out so that no two texts overlap.

The layout runs when the figure is drawn, in pixels, from extents that the renderer measured, and again when
the axes change size, limits or resolution. Labels of points that crowd together form a column with leaders;
every other label stands alone. Each of these units tries places around its points, near ones first. Two rules
are hard: inside the axes, and clear of every other text. The rest is cost: distance, a disliked direction,
lines or markers under the text, leaders that cross. Units move to their cheapest places in turn, the others held
still; in the first rounds texts may overlap at a price, so that one can make its neighbour give way.
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

from .style import HAIR, INK, PAPER

GAP = 2.5  # points between two texts, and between a text and the frame
NEAR = 9.0  # points: a label this close needs no leader
CROWD, CROWDED = 9.0, 4  # points: this many labels, each this close to the next, form columns
COLUMN = 12  # labels a column
SHRINK = (1.0, 0.88, 0.76)  # font sizes tried, as shares of the wanted one
COMPASS = {"E": 0, "NE": 45, "N": 90, "NW": 135, "W": 180, "SW": 225, "S": 270, "SE": 315}
# What an overlap of two texts costs, round by round; at infinity it is forbidden.
ROUNDS = (25.0, 60.0, 120.0, math.inf, math.inf, math.inf)
# Costs in points of distance.
COST_DIRECTION, COST_SLIDE, COST_LINE, COST_MARKER, COST_CROSSING, COST_THROUGH = (14.0, 5.0, 16.0, 90.0, 70.0, 110.0)


@dataclass
class _Label:
    text: Any  # matplotlib Text
    xy: np.ndarray  # (A, 2): the point, or the points of a line it may name, best first
    coords: str
    size: float
    prefer: str
    gap: float
    leader: bool
    box: np.ndarray | None = None  # x0, y0, x1, y1 in pixels from the axes' corner
    line: np.ndarray | None = None  # leader: x0, y0, x1, y1
    anchors: np.ndarray = field(default_factory=lambda: np.zeros((1, 2)))  # pixels from the axes' corner
    extent: tuple[float, float] = (0.0, 0.0)


@dataclass
class _Along:
    text: Any
    ends: np.ndarray  # (2, 2) data
    at: np.ndarray = field(default_factory=lambda: np.zeros(2))  # pixels from the axes' corner


class LabelLayer(Artist):
    """Keeps labels clear of each other and of other texts, and off markers and lines where it can."""

    def __init__(self, ax: Any) -> None:
        super().__init__()
        self._labels: list[_Label] = []
        self._along: list[_Along] = []
        self._markers: list[tuple[float, float]] = []
        self._lines: list[np.ndarray] = []
        self._solved_for: tuple | None = None
        self._leaders = LineCollection([], colors=HAIR, linewidths=0.7, transform=IdentityTransform(), zorder=2.5)
        self._leaders.set_in_layout(False)
        self.set_in_layout(False)
        self.set_zorder(-100)  # drawn first: texts are in place before they draw
        ax.add_artist(self)
        ax.add_artist(self._leaders)

    def add(
        self,
        text: str,
        xy: Any,
        *,
        color: str = INK,
        size: float = 8.5,
        prefer: str = "E",
        gap: float = 6.0,
        coords: str = "data",
        leader: bool = True,
        **font: Any,
    ) -> None:
        """Label a point, or one of several points of a line; `prefer` is a compass direction, `gap` in pt."""
        artist = self._text(text, color, size, ha="left", **font)
        points = np.array(xy, float).reshape(-1, 2)
        self._labels.append(_Label(artist, points, coords, size, prefer, gap, leader))

    def add_along(
        self,
        text: str,
        start: tuple[float, float],
        end: tuple[float, float],
        *,
        color: str = INK,
        size: float = 8.5,
        **font: Any,
    ) -> None:
        """Write along and above the line between two data points, where the fewest markers are."""
        artist = self._text(text, color, size, ha="center", rotation_mode="anchor", **font)
        self._along.append(_Along(artist, np.array([start, end], float)))

    def avoid_point(self, x: float, y: float) -> None:
        """Keep texts off a marker at this data point."""
        self._markers.append((x, y))

    def avoid_line(self, x: Any, y: Any) -> None:
        """Keep texts off a line through these data points."""
        self._lines.append(np.column_stack([np.asarray(x, float), np.asarray(y, float)]))

    def draw(self, renderer: Any) -> None:
        """Place the labels for this renderer; they draw themselves afterwards."""
        ax = self.axes
        corner = np.array([ax.bbox.x0, ax.bbox.y0])
        dpi = ax.get_figure(root=True).dpi
        key = (
            round(ax.bbox.width, 2),
            round(ax.bbox.height, 2),
            *ax.get_xlim(),
            *ax.get_ylim(),
            dpi,
            len(self._labels),
        )
        if key != self._solved_for:
            self._solve(renderer, corner, dpi / 72)
            self._solved_for = key
        for words in self._along:
            words.text.set_position(words.at + corner)
        segments = []
        for label in self._labels:
            label.text.set_visible(label.box is not None)
            if label.box is not None:
                label.text.set_position(label.box[:2] + corner)
                if label.line is not None:
                    segments.append(label.line.reshape(2, 2) + corner)
        self._leaders.set_segments(segments)

    def _text(self, text: str, color: str, size: float, **font: Any) -> Any:
        artist = self.axes.text(
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
        ax = self.axes
        self._point = point  # pixels
        self._frame = (ax.bbox.width, ax.bbox.height)
        marker = np.array([ax.transData.transform(p) for p in self._markers]).reshape(-1, 2) - corner
        self._marker_boxes = np.hstack([marker - 4 * point, marker + 4 * point])
        for words in self._along:
            self._place_along(words, renderer, corner, marker)
        own = {id(label.text) for label in self._labels}
        fixed = [t for t in ax.texts if id(t) not in own and t.get_visible() and t.get_text()]
        if ax.get_legend() is not None:
            fixed.append(ax.get_legend())
        boxes = [t.get_window_extent(renderer).extents - np.tile(corner, 2) for t in fixed]
        self._fixed = np.array(boxes).reshape(-1, 4)
        self._line_points = self._sample(corner, step=4 * point)
        for label in self._labels:
            transform = ax.transData if label.coords == "data" else ax.transAxes
            label.anchors = transform.transform(label.xy) - corner
        for share in SHRINK:
            for label in self._labels:
                label.text.set_fontsize(label.size * share)
                extent = label.text.get_window_extent(renderer)
                label.extent = (extent.width, extent.height)
                label.box = label.line = None
            for units in (self._units(), [[label] for label in self._labels]):  # alone, if a column finds no room
                for overlap in ROUNDS:
                    before = [label.box for label in self._labels]
                    for unit in units:
                        self._place(unit, overlap)
                    after = [label.box for label in self._labels]
                    if math.isinf(overlap) and all(map(_same, before, after)):
                        break
                if all(label.box is not None for label in self._labels):
                    return
        left_out = [label.text.get_text() for label in self._labels if label.box is None]
        warnings.warn(
            f"No room for {len(left_out)} of {len(self._labels)} labels here: {', '.join(left_out)}. "
            "Draw fewer points, or pass the Axes of a larger figure as ax=.",
            stacklevel=2,
        )

    def _place_along(self, words: _Along, renderer: Any, corner: np.ndarray, marker: np.ndarray) -> None:
        a, b = self.axes.transData.transform(words.ends) - corner
        along = (b - a) / max(math.dist(a, b), 1e-9)
        words.text.set_rotation(math.degrees(math.atan2(along[1], along[0])))
        lift = np.array([-along[1], along[0]]) * 3 * self._point
        best = -math.inf
        for share in (0.35, 0.45, 0.55, 0.65, 0.25):
            at = a + (b - a) * share + lift
            words.text.set_position(at + corner)
            box = words.text.get_window_extent(renderer).extents - np.tile(corner, 2)
            clear = np.hypot(*(marker - np.clip(marker, box[:2], box[2:])).T).min(initial=60 * self._point)
            if not (box[:2] > 0).all():
                clear -= 100 * self._point
            if clear > best:
                best, words.at = clear, at
        words.text.set_position(words.at + corner)

    def _sample(self, corner: np.ndarray, step: float) -> np.ndarray:
        """Points along every line to avoid, `step` pixels apart."""
        points = [np.empty((0, 2))]
        for line in self._lines:
            pixels = self.axes.transData.transform(line) - corner
            for a, b in itertools.pairwise(pixels):
                count = int(min(400, max(2, math.dist(a, b) / step)))
                points.append(a + (b - a) * np.linspace(0, 1, count)[:, None])
        return np.vstack(points)

    def _units(self) -> list[list[_Label]]:
        """Columns of labels whose points crowd together, and single labels."""
        loose = [label for label in self._labels if label.leader and len(label.anchors) == 1 and label.coords == "data"]
        crowds: list[list[_Label]] = []
        for label in loose:
            near = [
                c for c in crowds if any(math.dist(label.anchors[0], o.anchors[0]) < CROWD * self._point for o in c)
            ]
            crowds = [c for c in crowds if c not in near] + [[label, *(o for c in near for o in c)]]
        units = [[label] for label in self._labels]
        for crowd in crowds:
            if len(crowd) >= CROWDED:
                units = [unit for unit in units if unit[0] not in crowd]
                spread = np.ptp([label.anchors[0] for label in crowd], axis=0)
                axis = 0 if spread[0] > 2 * spread[1] else 1
                crowd.sort(key=lambda label, axis=axis: -label.anchors[0][axis])
                count = math.ceil(len(crowd) / COLUMN)
                size = math.ceil(len(crowd) / count)
                units += [crowd[i : i + size] for i in range(0, len(crowd), size)]
        return units

    def _place(self, unit: list[_Label], overlap: float) -> None:
        """Move one unit to its cheapest place, the others held still; hide it if no place is allowed."""
        boxes, whole, distance, cost = self._candidates(unit)  # (C, n, 4), (C, 4), (C,), (C,)
        gap = GAP * self._point
        others = [other for other in self._labels if other.box is not None and all(other is not u for u in unit)]
        taken = np.vstack([self._fixed, *(other.box[None] for other in others)])
        allowed = (
            (whole[:, 0] >= gap)
            & (whole[:, 1] >= gap)
            & (whole[:, 2] <= self._frame[0] - gap)
            & (whole[:, 3] <= self._frame[1] - gap)
        )
        covered = _overlaps(whole, taken, gap).sum(axis=1)
        if math.isinf(overlap):
            allowed &= covered == 0
        else:
            cost = cost + overlap * covered
        if not allowed.any():
            for label in unit:
                label.box = label.line = None
            return
        boxes, distance, cost = boxes[allowed], distance[allowed], cost[allowed]
        leaders = []
        for i, label in enumerate(unit):
            box = boxes[:, i]
            anchor = label.anchors[0]
            if len(label.anchors) > 1:  # the leader starts at the line's point nearest to the text
                foot = np.clip(label.anchors[:, None], box[:, :2], box[:, 2:])
                anchor = label.anchors[np.argmin(np.hypot(*np.moveaxis(foot - label.anchors[:, None], -1, 0)), axis=0)]
            # Alone, the leader ends at the box's nearest point; in a column, at the facing side.
            foot = np.clip(anchor, box[:, :2], box[:, 2:])
            if len(unit) > 1:
                foot[:, 1] = (box[:, 1] + box[:, 3]) / 2
            leaders.append(np.hstack([np.broadcast_to(anchor, foot.shape), foot]))
            cost = cost + self._cost(box, leaders[-1], distance, others)
            for earlier in leaders[:-1]:
                cost = cost + COST_CROSSING * _cross(leaders[-1], earlier) / len(unit)
        best = int(np.argmin(cost))
        for i, label in enumerate(unit):
            label.box = boxes[best, i]
            far = len(unit) > 1 or distance[best] > NEAR * self._point
            label.line = leaders[i][best] if label.leader and far else None

    def _cost(self, boxes: np.ndarray, leaders: np.ndarray, distance: np.ndarray, others: list[_Label]) -> np.ndarray:
        """What a text here (C, 4), with this leader (C, 4), would cover and cross."""
        cost = COST_MARKER * _overlaps(boxes, self._marker_boxes, 0).sum(axis=1)
        cost = cost + COST_LINE * np.minimum(_holds(boxes, self._line_points, 2 * self._point).sum(axis=1), 3)
        inner = np.linspace(0.1, 0.95, 16)[:, None]
        long = distance > NEAR * self._point
        if others:
            theirs = np.array([other.box for other in others])
            path = leaders[:, None, :2] + (leaders[:, None, 2:] - leaders[:, None, :2]) * inner  # (C, 16, 2)
            through = ((path[:, :, None] >= theirs[:, :2]) & (path[:, :, None] <= theirs[:, 2:])).all(-1).any(1).sum(1)
            cost = cost + COST_THROUGH * through * long
        for other in others:
            if other.line is not None:
                cost = cost + COST_CROSSING * _cross(leaders, other.line[None]) * long
                there = other.line[:2] + (other.line[2:] - other.line[:2]) * inner
                cost = cost + COST_THROUGH * _holds(boxes, there, 0).any(axis=1)
        return cost

    def _candidates(self, unit: list[_Label]) -> tuple[np.ndarray, ...]:
        """Boxes of the labels (C, n, 4), of the whole (C, 4), its distance (C,) and first costs (C,)."""
        point = self._point
        widths = np.array([label.extent[0] for label in unit])
        heights = np.array([label.extent[1] for label in unit]) + (1.0 * point if len(unit) > 1 else 0)
        width, height = widths.max(), heights.sum()
        anchors = unit[0].anchors
        reach = np.zeros(2)
        if len(unit) > 1:
            points = np.vstack([label.anchors for label in unit])
            anchors, reach = (points.min(axis=0) + points.max(axis=0))[None] / 2, np.ptp(points, axis=0) / 2
        radii = [unit[0].gap * point + (14 * point if len(unit) > 1 else 0)]
        while radii[-1] < math.hypot(*self._frame):  # fine near the point, coarse far away
            radii.append(radii[-1] + max(4 * point, 0.06 * radii[-1]))
        slide, radius, angle = (
            a.ravel() for a in np.meshgrid(np.arange(len(anchors)), radii, np.arange(24) * math.pi / 12, indexing="ij")
        )
        cos, sin = np.cos(angle), np.sin(angle)
        near = anchors[slide] + (radius[:, None] + reach) * np.column_stack([cos, sin])
        # The edge or corner that faces the point touches the circle.
        left = near[:, 0] - width * np.where(cos > 0.3, 0.0, np.where(cos < -0.3, 1.0, 0.5))
        low = near[:, 1] - height * np.where(sin > 0.3, 0.0, np.where(sin < -0.3, 1.0, 0.5))
        whole = np.column_stack([left, low, left + width, low + height])
        wanted = math.radians(COMPASS[unit[0].prefer])
        cost = radius / point + COST_DIRECTION * (1 - np.cos(angle - wanted)) / 2 + COST_SLIDE * slide
        if len(unit) == 1:
            return whole[:, None], whole, radius, cost
        cost += np.where(np.abs(cos) < 0.5, 200.0, 0.0)  # columns stand left or right of their points
        variants = []
        for order in (1, -1):  # top to bottom, or bottom to top: one of them crosses fewer leaders
            top = height - np.concatenate([[0], np.cumsum(heights[::order])[:-1]])[::order]
            x = np.where(cos[:, None] >= -0.3, whole[:, :1], whole[:, 2:3] - widths)  # flush on the facing side
            y = whole[:, 1:2] + top - heights
            variants.append(np.stack([x, y, x + widths, y + heights - point], axis=-1))
        return np.vstack(variants), np.tile(whole, (2, 1)), np.tile(radius, 2), np.tile(cost, 2)


def _same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def _overlaps(a: np.ndarray, b: np.ndarray, gap: float) -> np.ndarray:
    """(A, B) booleans: do boxes come closer than `gap`."""
    return (
        (a[:, None, 0] < b[None, :, 2] + gap)
        & (a[:, None, 2] > b[None, :, 0] - gap)
        & (a[:, None, 1] < b[None, :, 3] + gap)
        & (a[:, None, 3] > b[None, :, 1] - gap)
    )


def _holds(boxes: np.ndarray, points: np.ndarray, gap: float) -> np.ndarray:
    """(B, P) booleans: does a box, grown by `gap`, hold a point."""
    return _overlaps(boxes, np.hstack([points, points]), gap)


def _cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(N,) booleans: does each segment of `a` cross the one of `b` beside it; shared ends do not count."""

    def side(p: np.ndarray, q: np.ndarray, r: np.ndarray) -> np.ndarray:
        return (q[:, 0] - p[:, 0]) * (r[:, 1] - p[:, 1]) - (q[:, 1] - p[:, 1]) * (r[:, 0] - p[:, 0])

    p, q, r, s = a[:, :2], a[:, 2:], b[:, :2], b[:, 2:]
    return (side(p, q, r) * side(p, q, s) < -1e-6) & (side(r, s, p) * side(r, s, q) < -1e-6)
