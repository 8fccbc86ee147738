"""Lab 4's pictures of what was recorded on an H200: the case, the map of refusals, and the decode contest."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from matplotlib.ticker import FixedLocator, NullLocator

from tools.figures.drawing import BLUE, GREEN, GREY, H200, INK, ORANGE, PAPER, PURPLE, SOFT, Card
from utils.config import GPU_SPECS

BACKENDS = ("math", "flash", "efficient", "cudnn")
SIZES = ("batch", "heads", "kv_heads", "seq_len_q", "seq_len_kv", "head_dim")


def cudnn_in_decode() -> Iterator[tuple[dict, float]]:
    """Yield cuDNN's row of each recorded decode shape, and its time over that of the best backend."""
    rows = json.loads((H200 / "sdpa_grid.json").read_text(encoding="utf-8"))["rows"]
    shapes: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["set"] == "grid" and row["kind"] == "decode" and row["status"] == "ok" and row["backend"] in BACKENDS:
            shapes.setdefault(tuple(row[name] for name in SIZES), {})[row["backend"]] = row
    for found in shapes.values():
        yield found["cudnn"], found["cudnn"]["ms"] / min(row["ms"] for row in found.values())


def case() -> Card:
    """CuDNN beside the best backend in decode, with one query and with four."""
    card = Card(
        820,
        330,
        "The case: cuDNN in decode, beside the best of four backends",
        (
            "Two panels of recorded points from an H200. With one query, answered by a kernel for sm80, cuDNN takes 1 to 1.7 "
            "times as long as the best. With four queries, answered by a kernel for sm90, it takes up to 5.4 times as long "
            "where a call has few programs."
        ),
    )
    points = list(cudnn_in_decode())
    for i, (queries, kernel, color) in enumerate(((1, "sm80", GREEN), (4, "sm90", PURPLE))):
        title = f"{queries} quer{'y' if queries == 1 else 'ies'}: a kernel for {kernel}"
        ax = card.panel(66 + 390 * i, 74, 340, 196, title)
        mine = [(row["batch"] * row["kv_heads"], ratio) for row, ratio in points if row["seq_len_q"] == queries]
        ax.plot(*zip(*mine, strict=True), "o", color=color, markersize=4.5, alpha=0.6, markeredgewidth=0)
        ax.axhline(1, color=INK, linewidth=1)
        ax.set(xscale="log", yscale="log", ylim=(0.9, 6.5), xlim=(0.8, 1400))
        for axis, ticks in ((ax.xaxis, (1, 4, 16, 64, 256, 1024)), (ax.yaxis, (1, 1.5, 2, 3, 5))):
            axis.set_major_locator(FixedLocator(ticks))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter("{x:g}")
    card.text(22, 172, "time / time of the best", size=9, color=SOFT, rotation=90)
    card.text(410, 302, "programs of a call: sequences × key heads", size=9, color=SOFT)
    return card


def backend_map() -> Card:
    """The recorded map of calls and backends."""
    tables = json.loads((H200 / "lab4.json").read_text(encoding="utf-8"))["tables"]
    rows = [row | {"call": row["call"].replace("yours: ", "")} for row in tables["layouts"]]
    rows += [{"call": "fp32", **{b: row[b] for b in BACKENDS}} for row in tables["dtypes"] if "32" in row["call"]]
    card = Card(
        820,
        96 + 25 * len(rows),
        "Which backend where: the map of an H200",
        "A table of calls and the four backends. A filled box runs the call; an empty one refuses it. Math runs all of them.",
    )
    edges = {"math": BLUE, "flash": GREEN, "efficient": ORANGE, "cudnn": PURPLE}
    for x, backend in enumerate(BACKENDS):
        card.text(330 + 118 * x, 58, backend, size=9.5, weight="bold")
    for y, row in enumerate(rows):
        top = 72 + 25 * y
        card.text(258, top + 10, row["call"], size=9, ha="right")
        for x, backend in enumerate(BACKENDS):
            works = row[backend] == "runs"
            card.box(276 + 118 * x, top, 108, 20, fill=edges[backend] if works else PAPER, edge=edges[backend])
            color = SOFT if not works else INK if backend == "efficient" else PAPER  # white on orange is hard to read
            card.text(330 + 118 * x, top + 10, "runs" if works else "refused", size=8.5, color=color)
    return card


def contest() -> Card:
    """The course's decode kernel beside the best other one."""
    rows = json.loads((H200 / "decode.json").read_text(encoding="utf-8"))["rows"]
    card = Card(
        820,
        320,
        "Decode on an H200: time of the best other kernel over that of the course's",
        (
            "Three panels, for 1, 8 and 16 new tokens, with a bar for each recorded shape. Bars above 1 mean that the course's "
            "kernel is faster than the best of cuDNN and FlashAttention 2, 3 and 4."
        ),
    )
    for i, new in enumerate((1, 8, 16)):
        mine = sorted((row["ratio"] for row in rows if row["new_tokens"] == new), reverse=True)
        title = f"{new} new token{'s' if new > 1 else ''}"
        ax = card.panel(56 + 260 * i, 74, 216, 196, title)
        colors = [GREEN if ratio >= 1 else GREY for ratio in mine]
        ax.bar(range(len(mine)), [ratio - 1 for ratio in mine], bottom=1, color=colors)
        ax.axhline(1, color=INK, linewidth=1)
        ax.set(ylim=(0.8, math.ceil(10 * max(row["ratio"] for row in rows)) / 10), xticks=[])
    card.text(410, 300, "one bar a shape, sorted; green: the course's kernel leads", size=9, color=SOFT)
    return card


def roofs() -> Card:
    """Attainable speed by intensity: the memory, the tensor cores, and one multiprocessor alone."""
    card = Card(
        820,
        330,
        "Three roofs of decode",
        (
            "A roofline of an H200 in bf16. The memory's roof rises with FLOPs a byte up to 989 TFLOP/s at 206. Far below it lies "
            "the roof of a call of 4 programs that do not split the keys. Decode with one query sits at 1 FLOP a byte, with a "
            "group of 8 at 8, prefill far right."
        ),
    )
    ax = card.panel(70, 66, 700, 212, "")
    peak, memory = GPU_SPECS["H200"]["bf16_tflops"], GPU_SPECS["H200"]["memory_bandwidth_tb_s"]
    worst, _ = max(cudnn_in_decode(), key=lambda found: found[1])  # 4 programs, 4 queries, 65536 keys
    alone = worst["gb_s"] / 1e3
    x = [2 ** (i / 4 - 2) for i in range(60)]
    ax.plot(x, [min(peak, memory * i) for i in x], color=INK, linewidth=2)
    ax.plot(x, [min(4 / 132 * peak, alone * i) for i in x], color=PURPLE, linewidth=2, linestyle="--")
    ax.set(xscale="log", yscale="log", xlim=(0.25, 6000), ylim=(0.05, 2500))
    for at, text in (
        (1, "decode,\n1 query"),
        (8, "group of 8,\nor 8 queries"),
        (peak / memory, "ridge: 206"),
        (2048, "prefill"),
    ):
        top = min(peak, memory * at)
        ax.plot([at], [top], "o", color=ORANGE, zorder=5)
        ax.annotate(text, (at, top), (8, -22), textcoords="offset points", fontsize=8.5, color=INK)
    ax.text(0.3, 3.4, "1. bytes: 4.8 TB/s", fontsize=8.5, rotation=27, color=INK)
    ax.text(400, 1400, "2. products: 989 TFLOP/s", fontsize=8.5, color=INK)
    words = f"3. a call of 4 programs that do not split: {alone:.2f} TB/s, recorded"
    ax.text(12, 0.35, words, fontsize=8.5, color=PURPLE)
    card.text(420, 312, "FLOPs a byte", size=9, color=SOFT)
    card.text(22, 52, "TFLOP/s", size=9, color=SOFT, ha="left")
    return card
