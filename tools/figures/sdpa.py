"""Who computes a call of SDPA, and a decode step whose keys are split."""

from __future__ import annotations

from tools.figures.drawing import (
    BLUE,
    BLUE_TINT,
    GREEN,
    GREEN_TINT,
    GREY_TINT,
    INK,
    ORANGE,
    ORANGE_TINT,
    PAPER,
    PURPLE,
    PURPLE_TINT,
    SOFT,
    Card,
)


def dispatcher() -> Card:
    """The backends are asked one after the other; the first that is allowed and able runs."""
    card = Card(
        820,
        348,
        "Who computes this call?",
        (
            "A call of scaled_dot_product_attention reaches cuDNN, flash, efficient and math one after the other. Each is "
            "asked whether sdpa_kernel allows it and whether it can do this call. The first that says yes runs. A no goes "
            "on to the next, and its reason is kept back unless nothing is left."
        ),
    )
    call = "F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)"
    card.box(22, 52, 776, 34, call, fill=GREY_TINT, edge=SOFT, size=9.5)
    looks = (
        ("cuDNN", PURPLE_TINT, PURPLE),
        ("flash", GREEN_TINT, GREEN),
        ("efficient", ORANGE_TINT, ORANGE),
        ("math", BLUE_TINT, BLUE),
    )
    width, gap, top = 150, 58, 126
    card.arrow(22 + width / 2, 86, 22 + width / 2, top)
    for i, (name, fill, edge) in enumerate(looks):
        x = 22 + i * (width + gap)
        mid = x + width / 2
        card.box(x, top, width, 62, f"{name}\nallowed? able?", fill=fill, edge=edge, size=9.5)
        card.arrow(mid, top + 62, mid, top + 104)
        card.text(mid + 8, top + 83, "yes", size=8.5, color=SOFT, ha="left")
        runs = "two products, a softmax\nand some helpers" if name == "math" else "fused"
        card.box(x, top + 104, width, 42, runs, fill=PAPER, edge=edge, size=8.2)
        if i < 3:
            card.arrow(x + width, top + 31, x + width + gap, top + 31)
            card.text(x + width + gap / 2, top + 19, "no", size=8.5, color=SOFT)
    card.text(
        22,
        300,
        "Asked about: device, dtype, dimensions, head dimension, strides, mask, dropout, gradients, groups.",
        size=9,
        ha="left",
    )
    card.text(
        22,
        322,
        "The order belongs to the machine and the version. A no is silent: its reason is told only if "
        "nothing is left to ask.",
        size=9,
        ha="left",
    )
    return card


def split_kv() -> Card:
    """One query, keys in four parts, four programs, and a merge."""
    card = Card(
        820,
        372,
        "Split-KV: four programs read one cache",
        (
            "The keys and values of one head are cut into four parts. A program attends from the same query to each part, "
            "and returns the part's output and log-sum-exp. A second kernel weighs the outputs by e to the log-sum-exp, "
            "over the sum of all of them, and adds them."
        ),
    )
    left, width = 112, 160
    card.text(98, 74, "keys and\nvalues", size=9, ha="right")
    card.text(98, 148, "same query", size=9, ha="right")
    card.text(98, 226, "what a part\nknows", size=9, ha="right")
    card.text(98, 322, "second\nkernel", size=9, ha="right")
    for i in range(4):
        x = left + i * (width + 12)
        mid = x + width / 2
        card.grid(x, 58, 2, 10, 16, BLUE_TINT, edge=BLUE)
        card.arrow(mid, 92, mid, 126)
        card.box(x, 126, width, 44, f"program {i + 1}\nits keys alone", fill=ORANGE_TINT, edge=ORANGE, size=9)
        card.arrow(mid, 170, mid, 204)
        card.box(x + 8, 204, 62, 44, f"$O_{i + 1}$", fill=GREEN_TINT, edge=GREEN, size=11)
        card.box(x + 90, 204, 62, 44, f"$L_{i + 1}$", fill=PURPLE_TINT, edge=PURPLE, size=11)
        card.path((mid, 248), (mid, 274))
    ends = left + width / 2, left + 3 * (width + 12) + width / 2
    card.path((ends[0], 274), (ends[1], 274))
    middle = sum(ends) / 2
    card.arrow(middle, 274, middle, 300)
    card.box(
        left,
        300,
        4 * width + 36,
        44,
        r"$O = \sum_p\ e^{L_p}\,O_p\ /\ \sum_r\ e^{L_r}$",
        fill=GREY_TINT,
        edge=INK,
        size=11,
    )
    return card
