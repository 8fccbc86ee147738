"""A card to draw on: boxes, arrows, grids and text, in pixels from the upper left corner."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, PathPatch, Polygon, Rectangle
from matplotlib.path import Path as Outline

from utils.files import ROOT

H200 = ROOT / "assets/results/h200"

INK, SOFT, HAIR, PAPER = "#1b1b1b", "#5f5f5f", "#a9a9a9", "#ffffff"
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#e39a1f", "#00694d", "#a8548a", "#8c8c8c"
BROWN = "#7a4e00"  # text of orange things: orange itself is too light to read
# Tints of the same hues; they differ in lightness too.
TINT = {BLUE: "#cfe4f3", ORANGE: "#fbe3b8", GREEN: "#d3ebdf", PURPLE: "#f0dcea", GREY: "#f1f1f1"}

# On a dark page the card turns dark: light and dark change places, and each colour keeps its hue.
DARK = "@media (prefers-color-scheme: dark){#figure_1{filter: invert(.9) hue-rotate(180deg)}}"

# Letters as outlines look the same in every browser; a fixed salt for the ids makes every run write the same file.
SVG_STYLE = {
    "svg.fonttype": "path",
    "svg.hashsalt": "gpu-efficiency-labs",
    "font.family": ["DejaVu Sans"],
    "mathtext.fontset": "dejavusans",
    "hatch.linewidth": 0.7,
}


@contextlib.contextmanager
def drawn_alike() -> Iterator[None]:
    """Draw with matplotlib's defaults, this style and matplotlib's own fonts: every machine writes the same file.

    Where DejaVu Sans is installed, matplotlib may take that one, whose ligatures have other numbers.
    """
    fonts = font_manager.fontManager
    installed, forget = fonts.ttflist, getattr(fonts, "_findfont_cached", None)
    fonts.ttflist = []  # matplotlib's list is a file in the user's cache, with whatever was installed when it was made
    try:
        for font in sorted(Path(matplotlib.get_data_path(), "fonts", "ttf").glob("*.ttf")):
            fonts.addfont(font)
        if forget is not None:
            forget.cache_clear()
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "agg", **SVG_STYLE}):
            yield
    finally:
        fonts.ttflist = installed
        if forget is not None:
            forget.cache_clear()


class Card:
    """A card of `width` x `height` pixels with a title; white, and dark where the reader's system is."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.size, self.title, self.description = (width, height), title, description
        self.figure = Figure(figsize=(width / 100, height / 100), dpi=100, facecolor="none")
        FigureCanvasAgg(self.figure)
        self.ax = self.figure.add_axes((0, 0, 1, 1))
        self.ax.set(xlim=(0, width), ylim=(height, 0))
        self.ax.axis("off")
        self.box(1, 1, width - 2, height - 2, fill=PAPER, edge="#c4c4c4", round=10, zorder=-10)
        self.text(22, 27, title, size=12.5, weight="bold", ha="left")

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        text: str = "",
        *,
        fill: str = PAPER,
        edge: str = INK,
        round: float = 3,
        size: float = 9,
        color: str = INK,
        weight: str = "normal",
        zorder: float = 2,
    ) -> None:
        """Draw a box with rounded corners and its text in the middle."""
        inner, pad = ((x + round, y + round), w - 2 * round, h - 2 * round), f"round,pad={round}"
        look = {"facecolor": fill, "edgecolor": edge, "linewidth": 1.0, "zorder": zorder}
        self.ax.add_patch(FancyBboxPatch(*inner, boxstyle=pad, **look))
        if text:
            self.text(x + w / 2, y + h / 2, text, size=size, color=color, weight=weight)

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *,
        fill: str = "none",
        edge: str = "none",
        line: float = 1.0,
        hatch: str = "",
        style: str = "-",
        zorder: float = 2,
    ) -> None:
        """Draw a rectangle."""
        look = {"facecolor": fill, "edgecolor": edge, "linewidth": line, "hatch": hatch, "linestyle": style}
        self.ax.add_patch(Rectangle((x, y), w, h, zorder=zorder, **look))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 9,
        color: str = INK,
        ha: str = "center",
        va: str = "center",
        weight: str = "normal",
        style: str = "normal",
        rotation: float = 0,
    ) -> None:
        """Write text at a point."""
        font = {"fontsize": size, "color": color, "fontweight": weight, "fontstyle": style, "rotation": rotation}
        self.ax.text(x, y, text, ha=ha, va=va, linespacing=1.3, zorder=6, **font)

    def arrow(
        self,
        x0: float,
        y0: float,
        x1: float,
        y1: float,
        *,
        color: str = SOFT,
        line: float = 1.2,
        head: str = "-|>",
        style: str = "-",
    ) -> None:
        """Draw an arrow from one point to another; without an arrow head if `head` is "-"."""
        look = {"color": color, "linewidth": line, "linestyle": style, "joinstyle": "miter", "capstyle": "butt"}
        ends = {"arrowstyle": head, "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0}
        self.ax.add_patch(FancyArrowPatch((x0, y0), (x1, y1), zorder=3, **ends, **look))

    def dot(
        self,
        x: float,
        y: float,
        size: float,
        *,
        fill: str,
        edge: str | None = None,
        line: float = 1.0,
        zorder: float = 5,
    ) -> None:
        """Draw a round marker of `size` points."""
        look = {"color": fill, "markeredgecolor": edge or fill, "markeredgewidth": line, "zorder": zorder}
        self.ax.plot([x], [y], marker="o", markersize=size, scalex=False, scaley=False, **look)

    def path(self, *points: tuple[float, float], color: str = SOFT, line: float = 1.2, style: str = "-") -> None:
        """Draw a line through the points."""
        look = {"color": color, "linewidth": line, "linestyle": style, "solid_joinstyle": "miter"}
        self.ax.plot(*zip(*points, strict=True), zorder=3, scalex=False, scaley=False, **look)

    def route(self, *points: tuple[float, float], color: str = SOFT, style: str = "-") -> None:
        """Draw a line through the points that ends in an arrow head."""
        if len(points) > 2:
            self.path(*points[:-1], color=color, style=style)
        (x0, y0), (x1, y1) = points[-2:]
        self.arrow(x0, y0, x1, y1, color=color, style=style)

    def shape(self, *points: tuple[float, float], fill: str) -> None:
        """Draw a filled polygon."""
        self.ax.add_patch(Polygon(points, closed=True, facecolor=fill, edgecolor="none", zorder=1))

    def grid(
        self,
        x: float,
        y: float,
        rows: int,
        cols: int,
        cell: float,
        fill: Callable[[int, int], str] | str = PAPER,
        *,
        edge: str = HAIR,
        line: float = 0.5,
    ) -> None:
        """Draw a matrix of square cells; `fill` is their colour, or a function of row and column."""
        for row in range(rows):
            colors = [fill if isinstance(fill, str) else fill(row, col) for col in range(cols)]
            start = 0
            for end in range(1, cols + 1):  # one rectangle for each run of equal cells
                if end == cols or colors[end] != colors[start]:
                    if colors[start] != PAPER:
                        self.rect(x + start * cell, y + row * cell, (end - start) * cell, cell, fill=colors[start])
                    start = end
        ends = [((x, y + i * cell), (x + cols * cell, y + i * cell)) for i in range(rows + 1)]
        ends += [((x + j * cell, y), (x + j * cell, y + rows * cell)) for j in range(cols + 1)]
        lines = Outline([point for pair in ends for point in pair], [Outline.MOVETO, Outline.LINETO] * len(ends))
        self.ax.add_patch(PathPatch(lines, facecolor="none", edgecolor=edge, linewidth=line, zorder=2.1))

    def panel(self, x: float, y: float, w: float, h: float, title: str = ""):
        """Add axes for data, at a place in pixels, with the look of the card."""
        width, height = self.size
        ax = self.figure.add_axes((x / width, 1 - (y + h) / height, w / width, h / height), zorder=7)
        ax.set_title(title, fontsize=9.5, loc="left", color=INK)
        ax.tick_params(labelsize=8, colors=SOFT)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        ax.set_axisbelow(True)
        ax.grid(color="#e4e4e4", linewidth=0.6)
        return ax

    def save(self, path: Path) -> None:
        """Write the SVG file, without a date."""
        metadata = {"Date": None, "Title": self.title, "Description": self.description}
        text = io.StringIO()
        with drawn_alike():
            self.figure.savefig(text, format="svg", metadata=metadata, facecolor="none")
        # Hundredths of a pixel are enough. Matplotlib writes six decimals and deep indents, which are half of the file.
        svg = re.sub(r' d="[^"]+"|translate\([^)]+\)', shorten_path, text.getvalue())
        svg = re.sub(r"\n +", "\n", svg).replace("</style>", f"{DARK}</style>", 1)
        path.write_text(svg, encoding="utf-8")


def shorten_path(outline: re.Match) -> str:
    """Round the numbers of an SVG outline to hundredths of a pixel."""

    def short(number: re.Match) -> str:
        return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")

    return re.sub(r"\s+", " ", re.sub(r"-?\d+\.\d+", short, outline[0])).replace(' "', '"')
