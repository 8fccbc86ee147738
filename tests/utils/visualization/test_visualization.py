"""Plots: documented names and returns, units that are checked, labels that never overlap, no global state."""

import functools
import itertools
import math
import time
import warnings

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.visualization import (
    plot_flash_attn_improvement,
    plot_gemm_torch_matmul_latency,
    plot_latency,
    plot_roofline,
    plot_timeline,
    series,
    style_axes,
)
from utils.visualization.labels import LabelLayer
from utils.visualization.style import CARD, SERIES, luminance, plain

DOCUMENTED = {"gemm_1024": 341.3, "gemv_1024": 1.0}
SIZES, TILED, TORCH = [128, 256, 512, 1024], [0.05, 0.2, 0.9, 6.0], [0.008, 0.009, 0.012, 0.04]
FRAME = pd.DataFrame(
    {
        "seq_len": [512, 1024, 2048, 4096],
        "sdpa_ms": [0.08, 0.21, 0.75, 2.9],
        "flash_ms": [0.05, 0.08, 0.18, 0.55],
        "sdpa_mem_gb": [0.02, 0.07, 0.28, 1.1],
        "flash_mem_gb": [0.008, 0.016, 0.033, 0.067],
    }
)


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def events() -> list[dict]:
    """Return events: two operators of a thread, the first with a nested one, and two kernels of a stream."""
    rows = [
        ("aten::linear", "cpu_op", 1000.0, 50.0, "thread 1"),
        ("aten::addmm", "cpu_op", 1005.0, 40.0, "thread 1"),
        ("aten::gelu", "cpu_op", 1060.0, 40.0, "thread 1"),
        ("sm90_xmma_gemm_bf16", "kernel", 1050.0, 25.0, "stream 7"),
        ("void at::native::vectorized_elementwise_kernel<4>(int)", "kernel", 1090.0, 10.0, "stream 7"),
    ]
    keys = ("name", "category", "start_us", "duration_us", "lane")
    return [dict(zip(keys, row, strict=True)) for row in rows]


PLOTS = {
    "roofline": functools.partial(plot_roofline, "A100", 19.5, 2.0, DOCUMENTED, measured={"gemm": (300, 14.0)}),
    "gemm": functools.partial(plot_gemm_torch_matmul_latency, SIZES, TILED, TORCH),
    "flash": functools.partial(plot_flash_attn_improvement, FRAME),
    "timeline": functools.partial(plot_timeline, events()),
    "rows": functools.partial(plot_latency, {"eager": 1.9, "compiled": (0.71, 0.70, 0.73)}),
}


def text_boxes(figure: Figure) -> list[tuple[str, np.ndarray]]:
    """Return the extent in pixels of every visible text of the drawn figure."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    boxes = []
    for text in figure.findobj(matplotlib.text.Text):
        axes = text.axes
        if not text.get_visible() or not text.get_text().strip():
            continue
        box = text.get_window_extent(renderer)
        if axes is not None and text in axes.texts and not axes.bbox.overlaps(box):
            continue
        boxes.append((text.get_text(), box.extents))
    for axes in figure.axes:  # tick labels outside the limits exist but are not drawn
        hidden = set()
        for axis, bounds in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            low, high = sorted(bounds)
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low * (1 - 1e-9) <= tick.get_loc() <= high * (1 + 1e-9):
                    box = tick.label1.get_window_extent(renderer).extents
                    hidden.add((tick.label1.get_text(), tuple(box)))
        boxes = [(text, box) for text, box in boxes if (text, tuple(box)) not in hidden]
    return boxes


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Return the pairs of texts whose boxes overlap by more than half a pixel in both directions."""
    found = []
    for (one, a), (other, b) in itertools.combinations(text_boxes(figure), 2):
        width = min(a[2], b[2]) - max(a[0], b[0])
        height = min(a[3], b[3]) - max(a[1], b[1])
        if width > 0.5 and height > 0.5:
            found.append((one, other))
    return found


def labels(axes: Axes) -> list[str]:
    """Return the visible texts inside the axes, after drawing."""
    axes.figure.canvas.draw()
    return [text.get_text() for text in axes.texts if text.get_visible()]


# ---- the documented interface ----


def test_documented_roofline_example():
    figure, axes = plot_roofline("A100", 19.5, 2.0, {"gemm_1024": 341.3, "gemv_1024": 1.0})
    assert isinstance(figure, Figure) and isinstance(axes, Axes)
    assert "A100" in axes.get_title(loc="left")
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert "FLOPs/Byte" in axes.get_xlabel() and "TFLOP/s" in axes.get_ylabel()
    words = labels(axes)
    assert {"gemm_1024", "gemv_1024", "19.5 TFLOP/s", "2 TB/s", "ridge 9.75 FLOPs/Byte"} <= set(words)


@pytest.mark.parametrize("name", PLOTS)
def test_returns_figure_and_axes_and_draws_in_given_axes(name):
    plot = PLOTS[name]
    figure, axes = plot()
    assert isinstance(figure, Figure)
    count = 2 if name == "flash" else 1
    assert np.size(axes) == count
    own, grid = plt.subplots(1, 2, figsize=(12, 5))
    given = grid if count == 2 else grid[0]
    before = plt.get_fignums()
    figure, axes = plot(ax=given)
    assert figure is own
    assert plt.get_fignums() == before
    assert np.all(np.ravel(axes) == np.ravel(given))
    for wrong in ("here", plt.subplots(1, 3)[1]):
        with pytest.raises(ValueError, match="ax must be"):
            plot(ax=wrong)


def roofline(**arguments):
    return plot_roofline(**{"gpu_name": "A100", "peak_flops": 19.5, "peak_bandwidth": 2.0, **arguments})


def flash(**columns):
    """Plot attention's frame with other columns."""
    return plot_flash_attn_improvement(FRAME.assign(**columns))


REFUSED = {
    "gpu_name is None; it is the name in the title": lambda: roofline(gpu_name=None),
    r"peak_flops is in TFLOP/s.*pass 19\.5": lambda: roofline(peak_flops=19.5e12),
    "peak_flops must be positive and finite": lambda: roofline(peak_flops=math.nan),
    "peak_flops must be a number in TFLOP/s, got 'fast'": lambda: roofline(peak_flops="fast"),
    r"peak_bandwidth is in TB/s.*pass 2\.039 if it is in GB/s": lambda: roofline(peak_bandwidth=2039),
    "operations is empty": lambda: roofline(operations={}),
    r"measured\['gemm'\] must be \(FLOPs/Byte, TFLOP/s\)": lambda: roofline(measured={"gemm": 14.0}),
    r"fp8.*fp32": lambda: roofline(measured={"gemm": (400.0, 33.5, "fp8")}, peaks={"fp32": 67}),
    r"peaks\['fp16'\]": lambda: roofline(peaks={"fp16": 312e12}),
    "sizes is empty": lambda: plot_gemm_torch_matmul_latency([], [], []),
    "holds 3 latencies for 4 sizes": lambda: plot_gemm_torch_matmul_latency(SIZES, TILED[:3], TORCH),
    r"\[128\] more than once": lambda: plot_gemm_torch_matmul_latency([128, 128, 256, 512], TILED, TORCH),
    "torch_matmul_latency_ms at n=128.*looks like seconds": lambda: plot_gemm_torch_matmul_latency(
        SIZES, TILED, [ms / 1e3 for ms in TORCH]
    ),
    r"means 1e\+06 TFLOP/s.*looks like seconds": lambda: plot_gemm_torch_matmul_latency([8192], [0.0011], [0.0011]),
    r"interval \[3, 4\] ms does not hold the median": lambda: plot_latency({"a": (2.0, 3.0, 4.0)}),
    "mixes": lambda: plot_latency({"a": 1.0, "b": {1: 2.0}}),
    "no column 'flash_ms'; it has": lambda: plot_flash_attn_improvement(FRAME.drop(columns="flash_ms")),
    "df has no rows": lambda: plot_flash_attn_improvement(FRAME.iloc[:0]),
    "must be a pandas DataFrame": lambda: plot_flash_attn_improvement(FRAME.to_dict()),
    "sdpa_ms is NaN where its memory is not": lambda: flash(sdpa_ms=[1, math.nan, 1, 1]),
    "sdpa_ms is NaN at every length": lambda: flash(sdpa_ms=math.nan, sdpa_mem_gb=math.nan),
    "looks like MB or bytes": lambda: flash(sdpa_mem_gb=FRAME.sdpa_mem_gb * 1e9),
    "must pair up": lambda: plot_flash_attn_improvement(FRAME, latency_cols=["sdpa_ms"]),
    "labels": lambda: plot_flash_attn_improvement(FRAME, labels=["one"]),
    "holds no events": lambda: plot_timeline([]),
    "must be events, a profile or a Chrome trace's path, got int": lambda: plot_timeline(3),
    "max_depth": lambda: plot_timeline(events(), max_depth=0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_plot_refuses_in_a_sentence_and_leaves_no_empty_figure(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
    assert plt.get_fignums() == []


def test_a_dark_global_style_is_left_as_it_is_and_does_not_hide_the_ink():
    with plt.style.context("dark_background"):
        plt.figure()  # settles the backend, which pyplot writes into rcParams on first use
        before = dict(matplotlib.rcParams)
        figures = [plot()[0] for plot in PLOTS.values()]
        for figure in figures:
            figure.canvas.draw()
        assert dict(matplotlib.rcParams) == before
    assert 0.6 < luminance(figures[0].get_facecolor()) < 0.8  # not white, for dark pages, and lighter than the ink
    for text in figures[0].findobj(matplotlib.text.Text):
        if text.get_visible() and text.get_text():
            assert luminance(text.get_color()) < 0.3, text.get_text()


def test_a_plot_of_a_notebook_gets_the_look_of_the_others():
    """It changes frame, title, legend and paper of this plot, but not matplotlib's global style."""
    before = dict(matplotlib.rcParams)
    figure, ax = plt.subplots(facecolor="black")
    ax.plot([1, 2], [3, 4], **series(1).line, label="one")
    ax.legend()
    style_axes(ax, x="tokens", y="time (ms)", title="A title")
    assert [ax.spines[side].get_visible() for side in ("top", "right", "bottom", "left")] == [False, False, True, True]
    assert (ax.get_title(loc="left"), ax.get_xlabel(), ax.get_ylabel()) == ("A title", "tokens", "time (ms)")
    assert not ax.get_legend().get_frame_on() and matplotlib.colors.to_hex(figure.get_facecolor()) == CARD
    assert dict(matplotlib.rcParams) == before
    plt.close(figure)


@pytest.mark.slow
def test_a_notebook_shows_each_figure_exactly_once():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    call = "plot_roofline('A100', 19.5, 2.0, {'gemm_1024': 341.3})"
    cells = [
        f"from utils.visualization import plot_roofline\n{call}",  # the tuple is the last expression
        f"figure, axes = {call}",  # assigned
        f"{call};",
        "1 + 1",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MPLBACKEND", raising=False)
        nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    pictures = [sum("image/png" in output.get("data", {}) for output in cell["outputs"]) for cell in book["cells"]]
    assert pictures == [1, 1, 1, 0]


# ---- roofline ----


def markers(axes: Axes) -> list[tuple[float, float, str]]:
    """Return (x, y, "hollow" or "solid") of every marker in the axes that is not part of a line."""
    found = []
    for line in axes.lines:
        if len(line.get_xdata()) == 1 and line.get_markersize() > 4:
            hollow = luminance(line.get_markerfacecolor()) > 0.9
            found.append((float(line.get_xdata()[0]), float(line.get_ydata()[0]), "hollow" if hollow else "solid"))
    return sorted(found)


def test_predicted_points_lie_on_the_roof_and_measured_ones_where_they_were_measured():
    predicted = {"decode": 1.0, "gemm": 500.0}  # gemm is measured, too, and still has one point on the roof
    _, axes = plot_roofline("A100", 312, 2.0, predicted, measured={"gemm": (500.0, 218.4), "norm": (0.5, 0.4)})
    assert markers(axes) == [
        (0.5, 0.4, "solid"),
        (0.5, 1.0, "hollow"),
        (1.0, 2.0, "hollow"),
        (500.0, 218.4, "solid"),
        (500.0, 312.0, "hollow"),
    ]
    words = labels(axes)
    assert {"gemm  70%", "norm  40%", "decode"} <= set(words) and "gemm" not in words
    joins = [line for line in axes.lines if len(set(line.get_xdata())) == 1 and len(line.get_xdata()) == 2]
    assert sorted(line.get_ydata()[0] for line in joins if line.get_xdata()[0] in (0.5, 500.0)) == [1.0, 312.0]


def test_a_point_above_the_roof_is_flagged_in_words_and_does_not_raise():
    _, axes = plot_roofline("A100", 19.5, 2.0, measured={"copy": (2.5, 5.35), "gemm": (300.0, 15.0)})
    words = labels(axes)
    assert "copy  107%" in words
    assert any("Above the roof: copy at 107%" in word and "bytes" in word for word in words)
    assert {text.get_text() for text in axes.get_legend().get_texts()} >= {"above the roof"}
    assert next(t for t in axes.texts if t.get_text() == "2 TB/s").get_position()[0] < 1.25  # this text hides no point
    flagged = next(text for text in axes.texts if text.get_text() == "copy  107%")
    plain_one = next(text for text in axes.texts if text.get_text() == "gemm  77%")
    assert flagged.get_color() != plain_one.get_color() and flagged.get_fontweight() == "bold"


def test_a_point_exactly_on_the_roof_is_not_flagged_and_one_just_above_is():
    for reached, share, flagged in ((19.5, "100%", False), (19.52, "100.1%", True)):
        words = labels(roofline(measured={"gemm": (300.0, reached)})[1])
        assert f"gemm  {share}" in words and any("Above" in word for word in words) is flagged


def test_several_dtype_roofs():
    _, axes = plot_roofline(
        "H200",
        989,
        4.8,
        {"gemm": 400.0},
        measured={"gemm fp32": (400.0, 33.5, "fp32")},
        peaks={"bf16": 989, "fp16": 989, "fp32": 67},
    )
    words = labels(axes)
    assert "bf16, fp16  989 TFLOP/s" in words
    assert "fp32  67 TFLOP/s, ridge 14" in words
    assert "gemm fp32  50%" in words  # a share of the fp32 roof, not of the main one
    flat = [line for line in axes.lines if len(line.get_xdata()) == 2 and len(set(line.get_ydata())) == 1]
    assert {line.get_ydata()[0] for line in flat} >= {989, 67}
    assert len({str(line.get_linestyle()) + line.get_color() for line in flat}) == len(flat)


@pytest.mark.parametrize(("peak", "bandwidth"), [(0.2, 0.08), (0.98, 0.085), (989, 4.8), (4500, 8.0), (0.001, 0.01)])
def test_every_machine_gets_room_around_its_ridge(peak, bandwidth):
    _, axes = plot_roofline("machine", peak, bandwidth)
    low, high = axes.get_xlim()
    bottom, top = axes.get_ylim()
    ridge = peak / bandwidth
    peak *= 1000 if peak < 1 else 1  # drawn in GFLOP/s
    assert low < ridge / 10 and high > ridge * 10 and bottom < peak / 10 and top > peak * 1.5
    assert len(axes.get_xticks()) >= 2 and len(axes.get_yticks()) >= 2
    assert f"ridge {plain(ridge)} FLOPs/Byte" in labels(axes)


def test_a_laptops_roof_is_in_gflops():
    _, axes = roofline(peak_flops=0.0257, peak_bandwidth=0.00564, measured={"gemm": (3.0, 0.0128)})
    assert axes.get_ylabel().endswith("(GFLOP/s)") and {"5.64 GB/s", "25.7 GFLOP/s"} <= {*labels(axes)}


# ---- labels ----


def test_a_label_that_stands_nearer_to_another_point_has_a_line_to_its_own():
    """Three points of an H200's layer lie nearly above each other; no line from a label to its point touches another point."""
    points = {"prefill_B1": (524, 152.7), "prefill_B8": (536, 231.4), "prefill_B32": (537, 240.7), "B1": (2.3, 0.03)}
    figure, axes = plot_roofline("H200", 989, 4.8, measured=points)
    figure.canvas.draw()
    (layer,) = (artist for artist in axes.get_children() if isinstance(artist, LabelLayer))
    at = {name: axes.transData.transform(place) - [axes.bbox.x0, axes.bbox.y0] for name, place in points.items()}
    for label in layer._labels:
        own = label.text.get_text().split()[0]
        if own in points and label.line is None:
            away = {name: np.hypot(*(np.clip(xy, label.box[:2], label.box[2:]) - xy)) for name, xy in at.items()}
            assert away[own] < min(away.values()) + 3
        elif own in points:
            line = np.linspace(*label.line, 50)
            assert all(np.hypot(*(line - xy).T).min() > 4 for xy in at.values() if np.hypot(*(at[own] - xy)) > 8)


def crowded(seed: int) -> dict:
    """Return keyword arguments of rooflines whose labels are crowded in different ways."""
    rng = np.random.default_rng(seed)
    close = {f"operation_{i}": 100 * 1.01**i for i in range(12)}
    same = {f"shape {i}": 40.0 for i in range(12)}
    flat = {f"gemm_{2**i}": 300 + 5 * i for i in range(12)}
    return [
        dict(operations=close),
        dict(operations=same),
        dict(measured={name: (x, float(rng.uniform(0.3, 1) * min(312, 2 * x))) for name, x in close.items()}),
        dict(measured={name: (x, float(rng.uniform(0.3, 1.3) * min(312, 2 * x))) for name, x in flat.items()}),
        dict(operations={f"op {i}": float(x) for i, x in enumerate(10 ** rng.uniform(-1, 3.5, 12))}),
        dict(operations=close, peaks={"fp16": 312, "tf32": 156, "fp32": 19.5, "fp8": 330, "int8": 350}),
    ][seed]


def test_the_overlap_check_sees_an_overlap():
    figure, axes = plt.subplots()
    axes.text(0.5, 0.5, "one")
    axes.text(0.51, 0.5, "other")
    assert overlaps(figure) == [("one", "other")]


@pytest.mark.parametrize("seed", range(6))
def test_labels_never_overlap_on_a_crowded_roofline(seed):
    arguments = crowded(seed)
    figure, axes = plot_roofline("A100", 312, 2.0, **arguments)
    assert overlaps(figure) == []
    words = labels(axes)
    for name in {**arguments.get("operations", {}), **arguments.get("measured", {})}:
        assert any(word == name or word.startswith(f"{name}  ") for word in words), f"{name} has no label"
    for text in axes.texts:
        box = text.get_window_extent(figure.canvas.get_renderer())
        assert axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1, text.get_text()
        assert axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1, text.get_text()


@pytest.mark.slow
def test_from_thirteen_names_on_points_have_numbers_and_a_list_names_them():
    names = {f"decoder_layer.self_attn.projection_{i} bf16": 100 * 1.01**i for i in range(40)}
    began = time.process_time()
    figure, axes = plot_roofline("A100", 312, 2.0, names)
    assert overlaps(figure) == []
    assert time.process_time() - began < 30, "the layout of numbers is quick: a few seconds on one core"
    words = labels(axes)
    rows = [row.split("  ", 1) for text in words if "\n" in text for row in text.splitlines()]
    assert [number.strip() for number, _ in rows] == [str(i) for i in range(1, 41)]
    assert set(words) >= {str(i) for i in range(1, 41)}
    by_intensity = sorted(names, key=names.get)
    assert [name.strip() for _, name in rows] == by_intensity  # numbers grow from left to right
    _, axes = plot_roofline("A100", 312, 2.0, dict(list(names.items())[:12]))
    assert set(list(names)[:12]) <= {text.get_text() for text in axes.texts}


def test_labels_stay_apart_at_another_resolution_size_and_zoom():
    figure, axes = plot_roofline("A100", 312, 2.0, {f"operation_{i}": 100 * 1.01**i for i in range(12)})
    figure.set_dpi(200)
    assert overlaps(figure) == []
    figure.set_size_inches(5.0, 3.6)
    assert overlaps(figure) == []
    axes.set_xlim(20, 900)
    assert overlaps(figure) == []


def test_axes_too_small_for_all_labels_say_so():
    figure, axes = plt.subplots(figsize=(1.6, 1.2))
    plot_roofline("A100", 312, 2.0, {f"a rather long operation name {i}": 10.0 + i for i in range(12)}, ax=axes)
    with pytest.warns(UserWarning, match="No room for .* labels"):
        figure.canvas.draw()


@pytest.mark.parametrize("name", PLOTS)
def test_no_text_overlaps_in_any_plot_and_nothing_is_warned_of(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure, _ = PLOTS[name]()
        assert overlaps(figure) == []


def test_many_sizes_thin_the_ticks_instead_of_printing_them_over_each_other():
    sizes = list(range(128, 2049, 128))
    figure, axes = plot_gemm_torch_matmul_latency(
        sizes, [n**3 * 1e-8 for n in sizes], [n**3 * 1e-10 + 0.01 for n in sizes]
    )
    assert overlaps(figure) == []
    assert "2048" in [tick.get_text() for tick in axes.get_xticklabels()]


def test_lines_that_end_at_the_same_place_keep_separate_names():
    curves = {f"kernel {i}": {512: 0.1 + i * 1e-4, 1024: 0.5 + i * 1e-3} for i in range(6)}
    figure, axes = plot_latency(curves)
    assert overlaps(figure) == []
    assert set(curves) <= set(labels(axes))


# ---- colours ----


def test_series_survive_a_grey_printer_and_colour_blindness():
    for one, other in itertools.pairwise(SERIES[:4]):
        light, dark = sorted((luminance(one.color), luminance(other.color)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 1.8
    # Marker, line and hatch distinguish all series without colour.
    for attribute in ("marker", "linestyle", "hatch"):
        assert len({str(getattr(look, attribute)) for look in SERIES}) == len(SERIES)


# ---- latency ----


def test_gemm_latency_draws_the_numbers_it_was_given():
    _, axes = plot_gemm_torch_matmul_latency(SIZES, TILED, TORCH)
    lines = {line.get_label(): line for line in axes.lines if len(line.get_xdata()) == len(SIZES)}
    assert list(lines["gemm_tiled"].get_ydata()) == TILED
    assert list(lines["torch.matmul"].get_ydata()) == TORCH
    assert list(lines["torch.matmul"].get_xdata()) == SIZES
    assert "(ms)" in axes.get_ylabel()
    assert {"gemm_tiled", "torch.matmul", "150x"} <= set(labels(axes))


class _Measured:
    """The attributes of a Measurement that the plots read."""

    def __init__(self, median_ms, interval_ms):
        self.median_ms, self.interval_ms = median_ms, interval_ms


def test_latencies_carry_intervals():
    _, axes = plot_latency({"a": _Measured(2.0, (1.9, 2.2)), "b": (1.0, 2e-5, 1.1), "c": 3.0})
    words = labels(axes)
    assert words == ["2 ms  [1.9, 2.2]", "1 ms  [2e-05, 1.1]", "3 ms"]
    assert "(ms)" in axes.get_xlabel()


# ---- flash attention ----


def test_flash_lines_are_the_columns():
    _, (latency, memory) = plot_flash_attn_improvement(FRAME)
    for axes, columns in ((latency, ["sdpa_ms", "flash_ms"]), (memory, ["sdpa_mem_gb", "flash_mem_gb"])):
        for line, column in zip(axes.lines, columns, strict=True):
            assert list(line.get_ydata()) == pytest.approx(list(FRAME[column]))
    assert "ms" in latency.get_ylabel() and "GB" in memory.get_ylabel()
    assert {tick.get_text() for tick in latency.get_xticklabels()} == {"512", "1024", "2048", "4096"}
    assert {"sdpa", "flash", "1.6x", "2.62x", "4.17x", "5.27x"} <= set(labels(latency))


def test_flash_takes_other_columns_and_sorts():
    other = FRAME.rename(columns={"seq_len": "S", "sdpa_ms": "math_ms", "flash_ms": "cudnn_ms"})[::-1]
    _, (latency, _) = plot_flash_attn_improvement(other, ["math_ms", "cudnn_ms"], ["sdpa_mem_gb", "flash_mem_gb"], "S")
    assert {"math", "cudnn"} <= set(labels(latency))
    assert list(latency.lines[0].get_ydata()) == pytest.approx([0.08, 0.21, 0.75, 2.9])


def test_flash_memory_below_a_gigabyte_is_in_megabytes():
    _, (_, memory) = plot_flash_attn_improvement(FRAME.assign(sdpa_mem_gb=0.25, flash_mem_gb=0.125))
    assert "MB" in memory.get_ylabel() and list(memory.lines[0].get_ydata()) == pytest.approx([250] * 4)


def test_flash_draws_what_ran_out_of_memory():
    last = {name: [*FRAME[name][:-1], math.nan] for name in ("sdpa_ms", "sdpa_mem_gb")}
    figure, axes = flash(**last)
    for ax in axes:
        assert [text.get_text() for text in ax.texts].count("out of memory") == 1
    figure.canvas.draw()


# ---- timeline ----


def bars(axes: Axes) -> dict[str, list[tuple[float, float, float]]]:
    """Return left, right and row of each bar, by colour."""
    found = {}
    for collection in axes.collections:
        if isinstance(collection, matplotlib.collections.PolyCollection):
            boxes = [path.get_extents().extents for path in collection.get_paths()]
            color = matplotlib.colors.to_hex(collection.get_facecolor()[0])
            found[color] = [(round(b[0], 6), round(b[2], 6), round((b[1] + b[3]) / 2, 6)) for b in boxes]
    return found


def test_timeline_nests_operators_and_measures_each_lane():
    figure, axes = plot_timeline(events())
    drawn = bars(axes)
    cpu, gpu = drawn["#8cc5e8"], drawn["#0072b2"]
    assert cpu == [(0.0, 0.05, 0.0), (0.005, 0.045, 1.0), (0.06, 0.1, 0.0)]
    assert [bar[:2] for bar in gpu] == [(0.05, 0.075), (0.09, 0.1)]
    names = [tick.get_text() for tick in axes.get_yticklabels()]
    assert names == ["thread 1\n90% busy", "stream 7\n35% busy"]
    assert "(ms)" in axes.get_xlabel()
    words = labels(axes)
    assert "aten::linear" in words and not any("at::native" in word or "<" in word for word in words)
    assert overlaps(figure) == []


def test_timeline_depth():
    _, axes = plot_timeline(events(), max_depth=1)
    assert bars(axes)["#8cc5e8"] == [(0.0, 0.05, 0.0), (0.06, 0.1, 0.0)]
    assert "1 events nested deeper than 1" in axes.get_xlabel()


def test_timeline_draws_a_finished_profile():
    torch = pytest.importorskip("torch")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        torch.nn.functional.gelu(torch.randn(256, 256) @ torch.randn(256, 256))
    figure, axes = plot_timeline(prof)
    assert any("aten::" in word for word in [text.get_text() for text in axes.texts])
    assert overlaps(figure) == []


def test_plain_numbers():
    assert [plain(value) for value in (0.2, 19.5, 989, 1979, 206.04, 0.085, 10000, 1e-5)] == (
        ["0.2", "19.5", "989", "1979", "206", "0.085", "10000", "1e-05"]
    )


def test_a_mask_saved_plainly_keeps_its_titles():
    """`fig.savefig(path)` without bbox_inches crops at the figure's edge: nothing may lie outside."""
    from utils.attention.masks import causal
    from utils.visualization import plot_mask

    long_name = "a causal mask whose name is so long that it stands on three lines above its panel"
    for masks, length, labels in (
        ([causal], 256, None),
        ([causal, None], 256, None),
        ([causal], 32, None),
        ([causal], 32, [long_name]),
    ):
        figure, axes = plot_mask(masks, length, labels=labels)
        figure.canvas.draw()
        for ax in axes.flat:
            title = ax._left_title.get_window_extent()
            assert figure.bbox.y0 <= title.y0 and title.y1 <= figure.bbox.y1
        plt.close(figure)
