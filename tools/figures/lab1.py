"""Figures of lab 1: one decode step and its limits, the launch queue, the operators of attention, online softmax."""

from __future__ import annotations

import json
import math

from tools.figures.drawing import BLUE, GREEN, H200, HAIR, INK, ORANGE, SOFT, TINT, Card
from utils.config import GEMMA_CONFIG, GPU_SPECS


def _decode_us() -> dict[str, float]:
    """One decode step of one layer on an H200 at batch 1, in µs: recorded eager, as a graph, with the decode kernel; its floor."""
    table = json.loads((H200 / "lab1.json").read_text())["tables"]["cuda_graphs"]
    step = next(row for row in table if row["batch"] == 1 and row["phase"].startswith("decode"))
    rows = json.loads((H200 / "decode_layer.json").read_text())["rows"]
    kernel = next(row for row in rows if row["type"] == "full_attention" and row["batch"] == 1)["decode kernel"]
    c = GEMMA_CONFIG
    heads, tokens = c.num_attention_heads + c.num_key_value_heads, 513
    weights = 2 * c.hidden_size * c.head_dim * heads + 3 * c.hidden_size * c.intermediate_size
    cache, macs = (2 * tokens * c.head_dim * n for n in (c.num_key_value_heads, c.num_attention_heads))
    spec = GPU_SPECS["H200"]
    return {
        "eager": 1e3 * step["eager_ms"],
        "graph": 1e3 * step["graph_ms"],
        "kernel": kernel["graph_us"],
        "memory": 2 * (weights + cache) / spec["memory_bandwidth_tb_s"] / 1e6,
        "compute": 2 * (weights + macs) / spec["bf16_tflops"] / 1e6,
    }


def _log_dots(card: Card, rows: list[tuple[str, float, str]], low: float, high: float) -> None:
    """Dots on a logarithmic axis with a name to the left of each; a bar's length would mean nothing there."""
    ax = card.panel(270, 46, card.size[0] - 380, 42 * len(rows))
    ax.set(xscale="log", xlim=(low, high), ylim=(len(rows) - 0.5, -0.5))
    ax.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=9.3, color=INK)
    ax.xaxis.set_major_formatter("{x:g} µs")
    ax.minorticks_off()
    for i, (_, value, color) in enumerate(rows):
        ax.plot([low, value], [i, i], color=HAIR, linewidth=1, linestyle=(0, (2, 3)))
        ax.plot([value], [i], "o", color=color, markersize=10)
        words = f"{value:,.0f} µs" if value >= 10 else f"{value:.2g} µs"
        ax.annotate(words, (value, i), (10, 0), textcoords="offset points", va="center", fontsize=9.8, weight="bold")


def decode_step() -> Card:
    """The scoreboard: one token through one layer, from launched kernel by kernel down to its floor."""
    us = _decode_us()
    description = (
        f"One token through one layer of Gemma-3 on an H200, batch 1: {us['eager']:,.0f} µs launched kernel by kernel, {us['graph']:.0f} µs in "
        f"a CUDA graph, {us['kernel']:.0f} µs with a better attention kernel, and {us['memory']:.1f} µs that its bytes need."
    )
    card = Card(940, 290, "One token, one layer of Gemma-3, one user: where do the microseconds go?", description)
    rows = [
        ("launched kernel by kernel", us["eager"], ORANGE),
        ("in a CUDA graph: one launch", us["graph"], BLUE),
        ("and with a better attention kernel", us["kernel"], BLUE),
        ("floor: its bytes over 4.8 TB/s", us["memory"], GREEN),
    ]
    _log_dots(card, rows, 1.0, 4000.0)
    card.text(
        22, 270, "Recorded on an H200; logarithmic axis. You will compute each line.", ha="left", size=9, color=SOFT
    )
    return card


def three_roofs() -> Card:
    """The three limits of one decode step: the largest decides."""
    us = _decode_us()
    description = (
        f"One decode step of one layer: compute allows {us['compute']:.2g} µs, memory {us['memory']:.1f} µs, and launching ninety kernels one "
        f"by one takes {us['eager']:,.0f} µs. The largest decides."
    )
    card = Card(940, 248, "Three roofs over one decode step: the largest decides", description)
    rows = [
        ("compute: FLOPs / peak", us["compute"], GREEN),
        ("memory: bytes / bandwidth", us["memory"], BLUE),
        ("launches: kernels × time of a launch", us["eager"], ORANGE),
    ]
    _log_dots(card, rows, 0.004, 8000.0)
    card.text(22, 230, "One layer of Gemma-3, batch 1, on an H200.", ha="left", size=9, color=SOFT)
    return card


def launch_queue() -> Card:
    """Eager and as a graph: two lanes, CPU and GPU, with launches that take longer than kernels."""
    description = (
        "Eager: the CPU launches four kernels one after the other, each launch longer than a kernel, so the GPU waits between kernels. As a "
        "CUDA graph: one launch, then four kernels back to back."
    )
    card = Card(940, 366, "Who waits for whom: four short kernels", description)
    launch, kernel, x0 = 118, 42, 108
    for top, title, launches in (
        (62, "eager: a launch for each kernel", 4),
        (212, "as a CUDA graph: one launch for all", 1),
    ):
        card.text(22, top, title, ha="left", weight="bold", size=10)
        for lane, words in ((top + 22, "CPU"), (top + 66, "GPU")):
            card.text(60, lane + 17, words, size=9.3, color=SOFT)
            card.path((x0, lane + 38), (910, lane + 38), color="#dddddd", line=1)
        for i in range(launches):
            name = f"launch {i + 1}" if launches > 1 else "launch all"
            card.box(x0 + i * launch, top + 22, launch - 4, 34, name, fill=TINT[ORANGE], edge=ORANGE, size=8.8)
        for i in range(4):
            start = x0 + launch * (i + 1) if launches > 1 else x0 + launch + i * kernel
            card.box(start, top + 66, kernel - 3, 34, f"k{i + 1}", fill=TINT[BLUE], edge=BLUE, size=8.8)
            if launches > 1 and i < 3:
                card.text(
                    start + kernel + (launch - kernel) / 2, top + 83, "waits", size=8.5, color=SOFT, style="italic"
                )
        end = x0 + launch * 4 + kernel if launches > 1 else x0 + launch + 4 * kernel
        card.path((end, top + 14), (end, top + 106), color=INK, line=1.4, style=(0, (3, 2)))
        card.text(end + 8, top + 116, "done", size=9, weight="bold", ha="left")
    card.text(
        22,
        350,
        "Time goes to the right. Where kernels are longer than launches, both pictures are nearly the same.",
        ha="left",
        size=9,
        color=SOFT,
    )
    return card


def five_operators() -> Card:
    """The five operators of an attention block, with arrows from and into memory."""
    operators = [
        ("q_proj", ["T · h", "weight\nh × H D"], "queries\nT · H D"),
        ("k_proj", ["T · h", "weight\nh × Hkv D"], "keys\nT · Hkv D"),
        ("v_proj", ["T · h", "weight\nh × Hkv D"], "values\nT · Hkv D"),
        ("attention", ["queries\nT · H D", "cached keys\nand values"], "vectors\nT · H D"),
        ("o_proj", ["T · H D", "weight\nH D × h"], "hidden\nT · h"),
    ]
    description = (
        "q_proj, k_proj and v_proj each read the hidden states and their weight and write queries, keys and values; attention reads the "
        "queries and the cached keys and values, and writes one vector for each query and head; o_proj reads these and its weight, and "
        "writes hidden states."
    )
    card = Card(940, 340, "Five operators: what each one reads from memory, and what it writes", description)
    for i, (name, reads, writes) in enumerate(operators):
        x = 28 + 182 * i
        for j, words in enumerate(reads):
            card.box(x + 80 * j, 66, 74, 48, words, fill=TINT[ORANGE], edge=ORANGE, size=7.8)
            card.arrow(x + 37 + 80 * j, 115, x + 60 + 34 * j, 150, color="#9a6200")
        card.box(x + 12, 152, 130, 40, name, fill=TINT[BLUE], edge=BLUE, size=10, weight="bold")
        card.arrow(x + 77, 193, x + 77, 232, color=BLUE)
        card.box(x + 32, 234, 90, 48, writes, fill=TINT[GREEN], edge=GREEN, size=8.2)
    card.text(
        22,
        306,
        "above: read    below: written    T new tokens of width h, H query heads, Hkv key-value heads of D",
        ha="left",
        size=9,
        color=SOFT,
    )
    card.text(
        22,
        324,
        "A number that one operator writes and the next one reads travels twice.",
        ha="left",
        size=9,
        color=SOFT,
    )
    return card


def online_softmax() -> Card:
    """Online softmax of one row in three blocks: the terms of the sum after each block, as bars."""
    blocks = [[1.0, 2.5], [3.0, 0.5], [4.0, 3.5]]
    description = (
        "A row arrives in three blocks. After each block the old terms of the sum are rescaled by exp(m - m'), the new terms are added, and "
        "the largest term is one."
    )
    card = Card(940, 372, "Online softmax: a row arrives in three blocks", description)
    m, total, seen = -math.inf, 0.0, []
    base, height = 262, 130
    for step, block in enumerate(blocks):
        x0, new_m = 34 + 306 * step, max(m, *block)
        factor = math.exp(m - new_m)
        total = total * factor + sum(math.exp(value - new_m) for value in block)
        card.text(
            x0,
            66,
            f"block {step + 1}: [{', '.join(f'{value:g}' for value in block)}]",
            ha="left",
            weight="bold",
            size=10,
        )
        card.text(x0, 90, f"m = {new_m:g}" + (f"   (was {m:g})" if seen else ""), ha="left", size=9.5)
        for i, (value, new) in enumerate([*((v, False) for v in seen), *((v, True) for v in block)]):
            term, x = math.exp(value - new_m), x0 + 8 + 44 * i
            if not new:
                before = math.exp(value - m)
                card.rect(x, base - height * before, 32, height * before, edge=SOFT, line=0.9, style=(0, (2, 2)))
            fill, edge = (TINT[ORANGE], ORANGE) if new else (TINT[BLUE], BLUE)
            card.rect(x, base - height * term, 32, height * term, fill=fill, edge=edge, line=1)
            card.text(x + 16, base + 13, f"{value:g}", size=8.8)
        card.path((x0, base), (x0 + 268, base), color=INK, line=1)
        rescaled = (
            f"old sum × e^({m:g} − {new_m:g}) = × {factor:.2f}" if seen else "the first block: nothing to rescale"
        )
        card.text(x0, base + 40, rescaled, ha="left", size=9, color="#00507d")
        card.text(x0, base + 62, f"l = {total:.3f}", ha="left", size=10, weight="bold")
        seen, m = seen + block, new_m
    card.text(
        22,
        354,
        "bars: e^(x − m). orange: new terms; blue: old ones, rescaled from the dashed height. All by one factor.",
        ha="left",
        size=9,
        color=SOFT,
    )
    return card
