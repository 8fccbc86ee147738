"""Colours, fonts, markers and axes of every picture, set for each artist: matplotlib's global style is never changed."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

INK = "#1b1b1b"  # text and roofs
SOFT = "#474747"  # secondary text: contrast 6:1 on the card
HAIR = "#7f868d"  # leader and drop lines
GRID = "#e6eaed"
# The card has a middle tone: a picture must not glare on a dark page, and must have contrast on a light page. (JupyterLab would
# put a white card behind a transparent picture.)
CARD = "#d5dade"
PAPER = "#ffffff"  # edges and hatches of bars, fillings of hollow markers
ALARM = "#b3261e"  # a number that cannot be true
SMALL, TEXT = 8.5, 9.5  # font sizes in points: labels, keys and notes; names of axes
_TITLE: dict[str, Any] = {"loc": "left", "fontsize": 11, "fontweight": "bold", "color": INK}
# Markers of points: hollow for a prediction, solid for a measurement.
_POINT: dict[str, Any] = {"marker": "o", "markersize": 6.5, "linestyle": "none"}
HOLLOW = _POINT | {"markerfacecolor": PAPER, "markeredgecolor": INK, "markeredgewidth": 1.3}
SOLID = _POINT | {"markeredgecolor": PAPER, "markeredgewidth": 0.6}


class Series(NamedTuple):
    """The look of one series: colour, marker, line and hatch all differ, so that nobody depends on colour."""

    color: str
    marker: str
    linestyle: Any
    hatch: str

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of a matplotlib line with this look."""
        return {"color": self.color, "marker": self.marker, "linestyle": self.linestyle, "linewidth": 1.6}

    @property
    def bar(self) -> dict[str, Any]:
        """Arguments of a filled matplotlib shape with this look."""
        return {"facecolor": self.color, "hatch": self.hatch, "edgecolor": PAPER, "linewidth": 0.0}


# The palette of Okabe and Ito. The order, and some darker colours, give neighbours different lightness, so that a grey
# printer keeps them apart.
SERIES = (
    Series("#0072b2", "o", "-", ""),  # blue
    Series("#d98c00", "s", (0, (5, 2)), "///"),  # orange
    Series("#00543d", "^", (0, (1, 1.5)), "..."),  # dark green
    Series("#c46f9f", "D", (0, (5, 1.5, 1, 1.5)), "xxx"),  # purple
    Series("#8a3c00", "v", (0, (8, 2)), "\\\\\\"),  # dark vermilion
    Series("#3797d3", "P", (0, (3, 1, 1, 1, 1, 1)), "++"),  # sky
)


def series(i: int) -> Series:
    """Return the look of the i-th series."""
    return SERIES[i % len(SERIES)]


def luminance(color: Any) -> float:
    """Return the relative luminance of a colour, from 0 (black) to 1 (white), as WCAG 2 defines it."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink_on(color: Any) -> str:
    """Return the ink for text on `color`: black or white, whichever has more contrast."""
    return PAPER if luminance(color) < 0.22 else INK


def open_axes(ax: Any, figsize: tuple[float, float], count: int = 1, rows: int = 1) -> tuple[Any, list[Any]]:
    """Return a Figure and its Axes to draw in: the figure of `ax`, or a new pyplot figure.

    Args:
        ax: one Axes, or a sequence or array of `count` Axes; their figure gets the card's colour. None for a new figure.
        figsize: size of a new figure, in inches.
        count: number of Axes of the picture.
        rows: rows of Axes in a new figure.
    """
    if ax is not None:
        axes = list(ax.flat) if hasattr(ax, "flat") else list(ax) if isinstance(ax, list | tuple) else [ax]
        if len(axes) != count or not all(hasattr(a, "get_figure") and hasattr(a, "plot") for a in axes):
            what = "one matplotlib Axes" if count == 1 else f"{count} matplotlib Axes"
            raise ValueError(f"ax must be {what}, got {ax!r}; leave it out for a new figure.")
        figure = axes[0].get_figure(root=True)
        figure.set_facecolor(CARD)
    else:
        # pyplot makes the figure, because Jupyter's inline backend shows and closes pyplot figures at the end of a cell:
        # once, whether the returned tuple is the last expression or is assigned.
        import matplotlib.pyplot as plt

        figure, grid = plt.subplots(
            rows, count // rows, figsize=figsize, facecolor=CARD, layout="constrained", squeeze=False
        )
        axes = list(grid.flat)
    for a in axes:
        _clean(a)
    return figure, axes


def _clean(ax: Any) -> None:
    ax.set_facecolor(CARD)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_axisbelow(True)
    ax.grid(True, which="major", color=GRID, linewidth=0.8, linestyle="-", alpha=1)
    ax.grid(False, which="minor")
    ax.spines[["left", "bottom"]].set(color=SOFT, linewidth=0.8)
    ax.tick_params(which="both", color=SOFT, labelcolor=INK, labelsize=9, direction="out")
    ax.tick_params(which="minor", length=2)


def name_axes(ax: Any, *, x: str | None = None, y: str | None = None, title: str | None = None) -> None:
    """Write the names of both axes and a left-aligned title."""
    if x:
        ax.set_xlabel(x, fontsize=TEXT, color=INK)
    if y:
        ax.set_ylabel(y, fontsize=TEXT, color=INK)
    if title:
        ax.set_title(title, **_TITLE)


def style_axes(ax: Any, *, x: str | None = None, y: str | None = None, title: str | None = None) -> None:
    """Give the Axes of a notebook's own picture the look of the course: a card, an open frame, a soft grid.

    Args:
        ax: Axes with a finished picture and its legend.
        x: name of the horizontal axis.
        y: name of the vertical axis.
        title: the title, written at the left.
    """
    ax.get_figure(root=True).set_facecolor(CARD)
    _clean(ax)
    name_axes(ax, x=x, y=y, title=title)
    if legend := ax.get_legend():
        legend.set_frame_on(False)
        for text in legend.get_texts():
            text.set(fontsize=SMALL, color=SOFT)


def key_above(ax: Any, handles: list[Any], columns: int = 4) -> None:
    """Write a key between the title and the axes, outside the data, in rows of `columns` entries."""
    rows = math.ceil(len(handles) / columns)
    ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=min(columns, len(handles)),
        frameon=False,
        fontsize=SMALL,
        borderaxespad=0.1,
        borderpad=0.1,
        handletextpad=0.5,
        columnspacing=1.6,
        handlelength=1.8,
        labelcolor=SOFT,
    )
    ax.set_title(ax.get_title(loc="left"), pad=8 + 14 * rows, **_TITLE)


def plain(value: float) -> str:
    """Return a number as text with three digits, without a power of ten between 0.001 and a million."""
    if value == 0 or not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def log_axis(axis: Any, low: float, high: float) -> None:
    """Make an axis logarithmic over [low, high], with plain numbers; over few decades, 2s and 5s have numbers, too."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    decades = math.log10(high / low)
    steps = (1,) if decades > 2.2 else (1, 2, 5) if decades > 0.8 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = 1 if len(exponents) <= 9 else 2
    ticks = [s * 10.0**e for e in exponents if e % every == 0 for s in steps if low <= s * 10.0**e <= high]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axis.set_minor_locator(LogLocator(base=10, subs=range(2, 10), numticks=20))
    axis.set_minor_formatter(NullFormatter())


def size_axis(axis: Any, values: list[int]) -> None:
    """Make a logarithmic axis with the sizes as ticks. A size without room for its name gets a small tick."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullFormatter

    ax = axis.axes
    ax.set_xscale("log", base=2)
    low, high = min(values), max(values)
    margin = (high / low) ** 0.06 if high > low else 2.0
    ax.set_xlim(low / margin, high * margin)
    span = math.log(high / low) + 2 * math.log(margin)
    width = ax.get_position().width * ax.get_figure(root=True).bbox.width / ax.get_figure(root=True).dpi * 72  # points
    kept: list[int] = []
    for value in sorted(values, reverse=True):  # the largest size always has its name
        room = 6.0 * (len(str(value)) + 1.5)  # points: 9-point digits and a gap
        if not kept or math.log(kept[-1] / value) / span * width > room:
            kept.append(value)
    axis.set_major_locator(FixedLocator(kept))
    axis.set_major_formatter(FixedFormatter([str(value) for value in kept]))
    axis.set_minor_locator(FixedLocator(sorted(set(values) - set(kept))))
    axis.set_minor_formatter(NullFormatter())
