"""Where labels go: a search that keeps texts from overlapping, in pixels from the axes' lower left corner.

Labels of points that lie close together form a column with leader lines; every other label is placed alone. Each column or
single label tries places around its points, near places first. Two rules are hard: a text stays inside the axes, and it
does not overlap another text. Everything else has a cost: distance, an unwanted direction, lines or markers under the text,
leader lines that cross. The labels move to their cheapest places in turn. In the first rounds texts may overlap at a cost,
so that a label can make its neighbour move.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

GAP = 2.5  # points between two texts, and between a text and the frame
NEAR = 9.0  # points: a label at most this far away needs no leader line
CROWD, CROWDED = 9.0, 4  # points: CROWDED labels, each at most CROWD from the next, form a column
COLUMN = 12  # labels in a column
SHRINK = (1.0, 0.88, 0.76)  # font sizes to try, as shares of the requested one
COMPASS = {"E": 0, "NE": 45, "N": 90, "NW": 135, "W": 180, "SW": 225, "S": 270, "SE": 315}

# The cost of an overlap of two texts, round by round; infinity forbids it.
ROUNDS = (25.0, 60.0, 120.0, math.inf, math.inf, math.inf)
# Costs in points of distance.
COST_DIRECTION, COST_SLIDE, COST_LINE, COST_MARKER, COST_CROSSING, COST_THROUGH = (14.0, 5.0, 16.0, 90.0, 70.0, 110.0)


@dataclass
class Label:
    """One text with its points, and the place that the layout found for it."""

    text: Any  # matplotlib Text
    xy: np.ndarray  # (A, 2): the point, or points of a line where the label may be, best first
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
class Layout:
    """The labels of one drawing, and everything that they must or should keep away from."""

    labels: list[Label]
    point: float  # pixels in a typographic point
    frame: tuple[float, float]  # width and height of the axes
    fixed: np.ndarray  # (F, 4) boxes of other texts
    markers: np.ndarray  # (M, 4) boxes of markers
    line_points: np.ndarray  # (P, 2) points along lines

    def solve(self) -> bool:
        """Find a place for every label; return False if a label found none."""
        for label in self.labels:
            label.box = label.line = None
        for units in (self._units(), [[label] for label in self.labels]):  # singly, if a column finds no room
            for overlap in ROUNDS:
                before = [label.box for label in self.labels]
                for unit in units:
                    self._place(unit, overlap)
                after = [label.box for label in self.labels]
                if math.isinf(overlap) and all(map(_same, before, after)):
                    break
            if all(label.box is not None for label in self.labels):
                return True
        return False

    def _units(self) -> list[list[Label]]:
        """Group the labels whose points lie close together into columns; return the columns and the single labels."""
        loose = [label for label in self.labels if label.leader and len(label.anchors) == 1 and label.coords == "data"]
        crowds: list[list[Label]] = []
        for label in loose:
            near = [c for c in crowds if any(math.dist(label.anchors[0], o.anchors[0]) < CROWD * self.point for o in c)]
            crowds = [c for c in crowds if c not in near] + [[label, *(o for c in near for o in c)]]
        units = [[label] for label in self.labels]
        for crowd in crowds:
            if len(crowd) >= CROWDED:
                units = [unit for unit in units if unit[0] not in crowd]
                spread = np.ptp([label.anchors[0] for label in crowd], axis=0)
                axis = 0 if spread[0] > 2 * spread[1] else 1
                crowd.sort(key=_descending(axis))
                count = math.ceil(len(crowd) / COLUMN)
                size = math.ceil(len(crowd) / count)
                units += [crowd[i : i + size] for i in range(0, len(crowd), size)]
        return units

    def _place(self, unit: list[Label], overlap: float) -> None:
        """Move one column or label to its cheapest place; hide it if no place is allowed."""
        boxes, whole, distance, cost = self._candidates(unit)  # (C, n, 4), (C, 4), (C,), (C,)
        gap = GAP * self.point
        others = [other for other in self.labels if other.box is not None and all(other is not u for u in unit)]
        taken = np.vstack([self.fixed, *(np.atleast_2d(other.box) for other in others if other.box is not None)])
        allowed = (
            (whole[:, 0] >= gap)
            & (whole[:, 1] >= gap)
            & (whole[:, 2] <= self.frame[0] - gap)
            & (whole[:, 3] <= self.frame[1] - gap)
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
            if len(label.anchors) > 1:  # the leader line starts at the point that is nearest to the text
                foot = np.clip(label.anchors[:, None], box[:, :2], box[:, 2:])
                anchor = label.anchors[np.argmin(np.hypot(*np.moveaxis(foot - label.anchors[:, None], -1, 0)), axis=0)]
            # The leader line of a single label ends at the nearest point of its box; in a column, at the facing side.
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
            far = len(unit) > 1 or distance[best] > NEAR * self.point
            label.line = leaders[i][best] if label.leader and far else None

    def _cost(self, boxes: np.ndarray, leaders: np.ndarray, distance: np.ndarray, others: list[Label]) -> np.ndarray:
        """Return the cost (C,) of what texts at `boxes` (C, 4) with `leaders` (C, 4) cover and cross."""
        cost = COST_MARKER * _overlaps(boxes, self.markers, 0).sum(axis=1)
        cost = cost + COST_LINE * np.minimum(_holds(boxes, self.line_points, 2 * self.point).sum(axis=1), 3)
        inner = np.linspace(0.1, 0.95, 16)[:, None]
        long = distance > NEAR * self.point
        if others:
            taken = np.array([other.box for other in others])
            path = leaders[:, None, :2] + (leaders[:, None, 2:] - leaders[:, None, :2]) * inner  # (C, 16, 2)
            through = ((path[:, :, None] >= taken[:, :2]) & (path[:, :, None] <= taken[:, 2:])).all(-1).any(1).sum(1)
            cost = cost + COST_THROUGH * through * long
        for other in others:
            if other.line is not None:
                cost = cost + COST_CROSSING * _cross(leaders, other.line[None]) * long
                along = other.line[:2] + (other.line[2:] - other.line[:2]) * inner
                cost = cost + COST_THROUGH * _holds(boxes, along, 0).any(axis=1)
        return cost

    def _candidates(self, unit: list[Label]) -> tuple[np.ndarray, ...]:
        """List C candidate places for a column of n labels, or for a single label.

        Returns:
            The boxes of the labels (C, n, 4), the box of the whole column (C, 4), its distance (C,), its first cost (C,).
        """
        point = self.point
        widths = np.array([label.extent[0] for label in unit])
        heights = np.array([label.extent[1] for label in unit]) + (1.0 * point if len(unit) > 1 else 0)
        width, height = widths.max(), heights.sum()
        anchors = unit[0].anchors
        reach = np.zeros(2)
        if len(unit) > 1:
            points = np.vstack([label.anchors for label in unit])
            anchors, reach = (points.min(axis=0) + points.max(axis=0))[None] / 2, np.ptp(points, axis=0) / 2
        radii = [unit[0].gap * point + (14 * point if len(unit) > 1 else 0)]
        while radii[-1] < math.hypot(*self.frame):  # fine near the point, coarse far away
            radii.append(radii[-1] + max(4 * point, 0.06 * radii[-1]))
        places: Any = np.meshgrid(np.arange(len(anchors)), radii, np.arange(24) * math.pi / 12, indexing="ij")
        slide, radius, angle = (axis.ravel() for axis in places)
        cos, sin = np.cos(angle), np.sin(angle)
        near = anchors[slide] + (radius[:, None] + reach) * np.column_stack([cos, sin])
        # The edge or corner that faces the point touches the circle.
        left = near[:, 0] - width * np.where(cos > 0.3, 0.0, np.where(cos < -0.3, 1.0, 0.5))
        low = near[:, 1] - height * np.where(sin > 0.3, 0.0, np.where(sin < -0.3, 1.0, 0.5))
        whole = np.column_stack([left, low, left + width, low + height])
        preferred = math.radians(COMPASS[unit[0].prefer])
        cost = radius / point + COST_DIRECTION * (1 - np.cos(angle - preferred)) / 2 + COST_SLIDE * slide
        if len(unit) == 1:
            return whole[:, None], whole, radius, cost
        cost += np.where(np.abs(cos) < 0.5, 200.0, 0.0)  # a column belongs left or right of its points
        variants = []
        for order in (1, -1):  # from the top or from the bottom: one order has fewer leader lines that cross
            top = height - np.concatenate([[0], np.cumsum(heights[::order])[:-1]])[::order]
            x = np.where(cos[:, None] >= -0.3, whole[:, :1], whole[:, 2:3] - widths)  # flush on the facing side
            y = whole[:, 1:2] + top - heights
            variants.append(np.stack([x, y, x + widths, y + heights - point], axis=-1))
        return np.vstack(variants), np.tile(whole, (2, 1)), np.tile(radius, 2), np.tile(cost, 2)


def _descending(axis: int) -> Callable[[Label], Any]:
    """Return a sort key: labels from the largest to the smallest coordinate of their points."""
    return lambda label: -label.anchors[0][axis]


def _same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def _overlaps(a: np.ndarray, b: np.ndarray, gap: float) -> np.ndarray:
    """Return (A, B) booleans: whether two boxes are closer than `gap`."""
    return (
        (a[:, None, 0] < b[None, :, 2] + gap)
        & (a[:, None, 2] > b[None, :, 0] - gap)
        & (a[:, None, 1] < b[None, :, 3] + gap)
        & (a[:, None, 3] > b[None, :, 1] - gap)
    )


def _holds(boxes: np.ndarray, points: np.ndarray, gap: float) -> np.ndarray:
    """Return (B, P) booleans: whether a box, larger by `gap`, contains a point."""
    return _overlaps(boxes, np.hstack([points, points]), gap)


def _cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return (N,) booleans: whether each segment of `a` crosses that of `b`; a shared end is no crossing."""

    def side(p: np.ndarray, q: np.ndarray, r: np.ndarray) -> np.ndarray:
        return (q[:, 0] - p[:, 0]) * (r[:, 1] - p[:, 1]) - (q[:, 1] - p[:, 1]) * (r[:, 0] - p[:, 0])

    p, q, r, s = a[:, :2], a[:, 2:], b[:, :2], b[:, 2:]
    return (side(p, q, r) * side(p, q, s) < -1e-6) & (side(r, s, p) * side(r, s, q) < -1e-6)
