"""Draw who imports whom: `python -m tools.figures.imports` writes `docs/imports.svg` from the code and pyproject.toml.

Each package has a box on the diagonal. To the right of a box, a line leads to the columns of the packages that it imports; a
dot marks each of them, and from there an arrow goes down to the box. The bands are the layers of the import contract in
pyproject.toml: an import may only lead to a lower band. The list of imports is in the description of the SVG as well.
"""

from __future__ import annotations

import re
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import grimp

from tools.figures.drawing import BLUE, BLUE_TINT, GREEN, GREEN_TINT, GREY, GREY_TINT, SOFT, Card, drawn_alike
from utils.files import ROOT

PICTURE = ROOT / "docs" / "imports.svg"
OUTSIDE = ("tools", "instructor")  # they import utils; nothing in utils imports them
FORBIDDEN = "#b3261e"
STEP_X, STEP_Y, BOX = 74, 40, (116, 28)  # pixels from box to box, and the size of a box
LEFT, TOP = 92, 50  # pixels: centre of the first box, and top of the first row

Edge = tuple[str, str]  # the package that imports, the package that is imported


def layers() -> list[list[str]]:
    """Read the layers of `utils` from pyproject.toml, the highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (contract,) = (contract for contract in contracts if contract.get("containers") == ["utils"])
    return [layer.replace(" ", "").split("|") for layer in contract["layers"]]


def imports() -> set[Edge]:
    """Find who imports whom: the packages of `utils`, and `instructor` and `tools` as a whole."""
    graph = grimp.build_graph("utils", *OUTSIDE, exclude_type_checking_imports=True)
    edges = set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            edge = _package(module), _package(imported)
            if edge[0] != edge[1] and "utils" not in edge:
                edges.add(edge)
    return edges


def _package(module: str) -> str:
    """Return the box of a module: "attention" for "utils.attention.masks", "tools" for all of tools."""
    root, *rest = module.split(".")
    return rest[0] if root == "utils" and rest else root


def draw(edges: set[Edge], bands: list[list[str]]) -> Card:
    """Draw the packages and their imports.

    Args:
        edges: who imports whom.
        bands: the layers, the highest first; a package without a layer gets a band of its own at the top.
    """
    names = {name for edge in edges for name in edge}
    listed = [name for band in bands for name in band]
    without_layer = sorted(names.difference(listed, OUTSIDE))
    bands = [[name] for name in (*OUTSIDE, *without_layer)] + bands
    order = [name for band in bands for name in band]
    band_of = {name: number for number, band in enumerate(bands) for name in band}
    column = {name: LEFT + STEP_X * number for number, name in enumerate(order)}
    row = {name: TOP + STEP_Y * number + STEP_Y / 2 for number, name in enumerate(order)}
    width, height = LEFT + STEP_X * len(order) + 20, TOP + STEP_Y * len(order) + 24
    card = Card(width, height, "Who imports whom", description(edges))

    for number, band in enumerate(bands):
        y = row[band[0]] - STEP_Y / 2
        if number % 2:
            card.rect(14, y, width - 28, STEP_Y * len(band), fill="#f7f7f7", zorder=-5)
    for name in order:
        imported = [
            other for importer, other in sorted(edges) if importer == name
        ]  # sorted: every run writes the same file
        color = GREEN if name in OUTSIDE else BLUE
        ends = [column[other] for other in imported]
        if ends:
            start = column[name] + (BOX[0] / 2 if max(ends) > column[name] else -BOX[0] / 2)
            card.path((start, row[name]), (max(ends), row[name]), color=color, line=1.1)
        if any(end < column[name] for end in ends):
            card.path((column[name], row[name]), (min(ends), row[name]), color=FORBIDDEN, line=1.1)
        for other in imported:
            allowed = band_of[other] > band_of[name]
            card.dot(column[other], row[name], 6, fill=color if allowed else FORBIDDEN)
        importers = [importer for importer, other in edges if other == name]
        above = [row[importer] for importer in importers if row[importer] < row[name]]
        below = [row[importer] for importer in importers if row[importer] > row[name]]
        if above:
            card.arrow(column[name], min(above), column[name], row[name] - BOX[1] / 2, color=GREY, line=1.0)
        if below:
            card.arrow(column[name], max(below), column[name], row[name] + BOX[1] / 2, color=FORBIDDEN, line=1.0)
        fill = GREEN_TINT if name in OUTSIDE else GREY_TINT if name in without_layer else BLUE_TINT
        box = column[name] - BOX[0] / 2, row[name] - BOX[1] / 2
        card.box(*box, *BOX, name, fill=fill, edge=color, size=9.5, zorder=5.5)
    _legend(card, height)
    return card


def _legend(card: Card, height: float) -> None:
    """Explain the picture in its empty lower left corner."""
    lines = (
        "A dot: the package of the row imports the package of the column.",
        "Bands: the layers of pyproject.toml. An import leads to a lower band.",
        "Blue: packages of utils. Green: instructor and tools, beside them.",
    )
    for number, text in enumerate(lines):
        card.text(30, height - 128 + 22 * number, text, ha="left", size=9.5, color=SOFT)
    card.dot(34, height - 56, 6, fill=FORBIDDEN)
    card.text(
        44, height - 56, "An import that the contract forbids; there should be none.", ha="left", size=9.5, color=SOFT
    )


def description(edges: set[Edge]) -> str:
    """Write the imports as text, for readers who do not see the picture and for `drawn_imports`."""
    return "Imports between packages: " + "; ".join(f"{a} imports {b}" for a, b in sorted(edges)) + "."


def drawn_imports(picture: Path) -> set[Edge]:
    """Read the imports from the description of a drawn picture."""
    for element in ElementTree.parse(picture).iter():
        if element.tag.endswith("}description"):
            return set(re.findall(r"(\w+) imports (\w+)", element.text or ""))
    return set()


def main(path: Path = PICTURE) -> None:
    """Draw the picture of the code as it is now."""
    with drawn_alike():
        draw(imports(), layers()).save(path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
