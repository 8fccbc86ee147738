"""Lab 1's drawings: reproducible, small, readable on any page, and true to the code they show."""

import itertools
import re
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest

import tools.figures.__main__ as figures
from utils.files import ROOT

ASSETS = ROOT / "assets"
SVG = "{http://www.w3.org/2000/svg}"
NAMES = sorted(figures.FIGURES)


@pytest.fixture(scope="module")
def cards():
    return {name: figures.draw(name) for name in NAMES}


def made_by(svg: str) -> str:
    """The matplotlib that wrote a file."""
    return re.search(r"Matplotlib v([\w.+]+)", svg)[1]


def shapes(svg: str) -> dict[str, int]:
    """How many elements of each kind a drawing has, but for shared definitions."""
    root = ElementTree.fromstring(svg)
    for defs in root.iter(f"{SVG}defs"):
        defs.clear()
    kinds = [element.tag for element in root.iter()]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def test_every_figure_is_there_and_nothing_is_drawn_twice():
    assert {path.stem for path in ASSETS.glob("*.svg")} == set(NAMES)


@pytest.mark.slow
def test_the_script_draws_the_files_that_are_kept(tmp_path):
    before = dict(matplotlib.rcParams)
    figures.main(tmp_path)
    assert dict(matplotlib.rcParams) | {"backend": before["backend"]} == before  # Agg has two spellings
    drawn_anew = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.svg")}
    assert set(drawn_anew) == {f"{name}.svg" for name in NAMES}
    for name, drawn in drawn_anew.items():
        kept = (ASSETS / name).read_text(encoding="utf-8")
        stale = f"{name} is out of date: run python -m tools.figures"
        assert shapes(kept) == shapes(drawn), stale
        if made_by(kept) == matplotlib.__version__:
            # Digits may differ where a font library rounds differently; half a pixel may not.
            one, other = (np.array(re.findall(r"(?<![\w#.])-?\d+\.?\d*", svg), float) for svg in (kept, drawn))
            assert len(one) == len(other) and np.abs(one - other).max() < 0.5, stale


@pytest.mark.parametrize("name", NAMES)
def test_files_are_small_undated_and_described(name):
    path = ASSETS / f"{name}.svg"
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 100_000
    assert "<dc:date>" not in text and "prefers-color-scheme: dark" in text
    assert len(re.search(r"<dc:description>(.+?)</dc:description>", text, re.S)[1]) > 80
    assert "<text" not in text, "text must be drawn as outlines: fonts differ between machines"
    assert not re.search(r'(href|src)="(?!#)', text), "nothing may be loaded from elsewhere"


@pytest.mark.parametrize("name", NAMES)
def test_texts_neither_overlap_nor_leave_the_card_which_brings_its_background(name, cards):
    """On a white page and on a dark one the same pixels show, but for the rounded corners."""
    figure = cards[name].figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer).extents) for text in cards[name].ax.texts]
    width, height = cards[name].size
    for text, box in boxes:
        assert box[0] > 8 and box[1] > 6 and box[2] < width - 8 and box[3] < height - 6, f"{text!r} leaves the card"
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        across = min(a[2], b[2]) - max(a[0], b[0])
        down = min(a[3], b[3]) - max(a[1], b[1])
        assert across < 1 or down < 1, f"{one!r} and {other!r} overlap"
    alpha = np.asarray(figure.canvas.buffer_rgba())[:, :, 3]
    assert (alpha[12:-12, 3:-3] == 255).all() and (alpha[3:-3, 12:-12] == 255).all()
    assert alpha[0, 0] == 0


def test_the_decoder_layer_shows_the_configuration_in_use():
    pytest.importorskip("transformers")
    from tools.figures import attention
    from utils.config import GEMMA_CONFIG

    for key, value in attention.GEMMA.items():
        assert getattr(GEMMA_CONFIG, key) == value
    sliding = [kind == "sliding_attention" for kind in GEMMA_CONFIG.layer_types]
    assert sum(sliding) * 6 == len(sliding) * 5  # "5 of 6 layers"
    assert GEMMA_CONFIG.query_pre_attn_scalar == GEMMA_CONFIG.head_dim  # scores are divided by its root


def test_the_fusion_drawing_counts_what_the_written_out_gelu_does(cards):
    import torch

    from utils.checking import OperationWatch
    from utils.kernels.gelu import gelu_unfused

    x = torch.randn(64)
    with OperationWatch() as watch:
        gelu_unfused(x)
    # A launch reads each of its inputs, two for `x * x`, and writes one output.
    launches, moved = len(watch.steps), sum(len([s for s in shapes if s]) + 1 for _, shapes, *_ in watch.steps)
    words = [text.get_text() for text in cards["kernel_fusion"].ax.texts]
    assert f"By hand: {launches} launches" in words
    assert any(f"memory traffic: {moved} times" in word for word in words)
    assert any(f"{moved / 2:g} times less" in word for word in words)


def test_the_hierarchy_shows_the_table_of_machines(cards):
    from utils.config import GPU_SPECS

    words = [text.get_text().replace("\n", " ") for text in cards["memory_hierarchy"].ax.texts]
    spec = GPU_SPECS["H200"]
    assert f"{spec['memory_gb']} GB" in words and f"{spec['l2_mb']} MB" in words
    assert f"{spec['memory_bandwidth_tb_s']:g} TB/s" in words


def test_lab_3s_layouts_are_tritons():
    pytest.importorskip("triton")
    from triton.experimental.gluon import language as gl

    from tools.figures import gluon_layouts
    from utils.gluon_cpu.layouts import elements_of

    held = elements_of(gl.BlockedLayout([1, 4], [4, 8], [2, 1], [1, 0]), (8, 32), 2)  # registers, lanes, warps
    fragment = elements_of(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]), (64, 16), 4)
    for row, column in itertools.product(range(8), range(32)):
        warp, lane, register = gluon_layouts.blocked_owner(row, column)
        assert held[register, lane, warp] == 32 * row + column
    for row, column in itertools.product(range(16), range(16)):
        lane, register = gluon_layouts.fragment_owner(row, column)
        assert fragment[register, lane, 0] == 16 * row + column
