"""The picture of who imports whom is drawn from the code, is current, and shows what the contract forbids."""

import itertools

import pytest

from tools.figures import imports as figure
from tools.figures.drawing import Card

BANDS = [["top"], ["left", "right"], ["bottom"]]


def test_the_kept_picture_is_current():
    assert figure.drawn_imports(figure.PICTURE) == figure.imports(), "run python -m tools.figures.imports"
    assert figure.PICTURE.stat().st_size < 100_000
    assert "<dc:date>" not in figure.PICTURE.read_text(encoding="utf-8")


def test_every_package_of_utils_is_in_a_layer():
    listed = {name for layer in figure.layers() for name in layer}
    assert {name for edge in figure.imports() for name in edge} <= listed | set(figure.OUTSIDE)


def test_the_picture_says_what_it_shows(tmp_path):
    edges = {("top", "left"), ("left", "bottom"), ("tools", "top"), ("top", "unlisted")}
    path = tmp_path / "imports.svg"
    figure.draw(edges, BANDS).save(path)
    assert figure.drawn_imports(path) == edges


def dots(card: Card) -> dict[str, int]:
    """Count the dots of the imports by colour, without the one of the legend."""
    colors = [line.get_markerfacecolor() for line in card.ax.lines if line.get_marker() == "o"]
    return {color: colors.count(color) - (color == figure.FORBIDDEN) for color in sorted(set(colors))}


@pytest.mark.parametrize("edge", [("bottom", "top"), ("left", "right"), ("right", "left")])
def test_an_import_against_the_layers_is_red(edge):
    allowed = {("top", "left"), ("top", "right"), ("right", "bottom"), ("tools", "left")}
    assert dots(figure.draw(allowed, BANDS))[figure.FORBIDDEN] == 0
    assert dots(figure.draw(allowed | {edge}, BANDS))[figure.FORBIDDEN] == 1


def test_texts_neither_overlap_nor_leave_the_card():
    card = figure.draw(figure.imports(), figure.layers())
    card.figure.canvas.draw()
    renderer = card.figure.canvas.get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in card.ax.texts]
    for text, box in boxes:
        assert box.x0 > 8 and box.y0 > 6 and box.x1 < card.size[0] - 8 and box.y1 < card.size[1] - 6, text
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.overlaps(b), (one, other)
