"""Lab 4's drawings: who computes a call, what crosses the memory, split keys and waves, strides, roundings, roofs."""

from __future__ import annotations

from tools.figures.drawing import BLUE, BROWN, GREEN, GREY, INK, ORANGE, PAPER, PURPLE, SOFT, TINT, Card

LOOKS = {  # tint and edge of each backend
    "cuDNN": (TINT[PURPLE], PURPLE),
    "flash": (TINT[GREEN], GREEN),
    "efficient": (TINT[ORANGE], ORANGE),
    "math": (TINT[BLUE], BLUE),
}


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
    card.box(22, 52, 776, 34, call, fill=TINT[GREY], edge=SOFT, size=9.5)
    width, gap, top = 150, 58, 126
    card.arrow(22 + width / 2, 86, 22 + width / 2, top)
    for i, (name, (fill, edge)) in enumerate(LOOKS.items()):
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
        card.grid(x, 58, 2, 10, 16, TINT[BLUE], edge=BLUE)
        card.arrow(mid, 92, mid, 126)
        card.box(x, 126, width, 44, f"program {i + 1}\nits keys alone", fill=TINT[ORANGE], edge=ORANGE, size=9)
        card.arrow(mid, 170, mid, 204)
        card.box(x + 8, 204, 62, 44, f"$O_{i + 1}$", fill=TINT[GREEN], edge=GREEN, size=11)
        card.box(x + 90, 204, 62, 44, f"$L_{i + 1}$", fill=TINT[PURPLE], edge=PURPLE, size=11)
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
        fill=TINT[GREY],
        edge=INK,
        size=11,
    )
    return card


def order() -> Card:
    """Torch's two orders on a GPU, and the condition that chooses."""
    card = Card(
        820,
        250,
        "Who is asked first on a GPU?",
        (
            "A condition with two ways out. If the compute capability is 9.0 or 10.0 and cuDNN is newer than 9.15.0, torch asks "
            "cuDNN, flash, efficient, math. Otherwise it asks flash, efficient, math, and cuDNN is never reached."
        ),
    )
    rule = "capability 9.0 or 10.0\nand\ncuDNN newer than 9.15.0 ?"
    card.box(22, 92, 196, 92, rule, fill=TINT[GREY], edge=SOFT, size=9.5)
    for y, word, names in (
        (66, "yes", ("cuDNN", "flash", "efficient", "math")),
        (176, "no", ("flash", "efficient", "math", "cuDNN")),
    ):
        card.route((218, 138), (240, 138), (240, y + 22), (268, y + 22))
        card.text(254, y + 12, word, size=8.5, color=SOFT)
        for i, name in enumerate(names):
            fill, edge = LOOKS[name]
            unreached = (word, name) == ("no", "cuDNN")
            card.box(268 + 136 * i, y, 108, 44, name, fill=PAPER if unreached else fill, edge=edge, size=10)
            if i < 3:
                card.arrow(376 + 136 * i, y + 22, 404 + 136 * i, y + 22)
    card.text(660, 232, "never reached: math takes every call", size=8.2, color=SOFT)
    return card


def traffic() -> Card:
    """How often the scores cross the memory, unfused and fused."""
    card = Card(
        820,
        262,
        "The same formula, and what crosses the memory",
        (
            "Unfused, the first product writes the scores, the softmax reads and writes them, and the second product reads them: "
            "four crossings. Fused, one kernel reads q, k and v, and writes the output."
        ),
    )
    card.text(22, 78, "math", size=10, ha="left", weight="bold", color=BLUE)
    card.text(22, 200, "fused", size=10, ha="left", weight="bold", color=GREEN)
    card.box(90, 116, 708, 26, "memory: q, k, v, scores, output", fill=TINT[GREY], edge=SOFT, size=9)
    steps = (("$QK^T$", "q, k", "scores"), ("softmax", "scores", "scores"), ("$PV$", "scores, v", "output"))
    for i, (name, reads, writes) in enumerate(steps):
        x = 110 + 236 * i
        card.box(x, 56, 196, 30, name, fill=TINT[BLUE], edge=BLUE, size=10)
        for at, text, up in ((x + 46, reads, True), (x + 150, writes, False)):
            color = ORANGE if "scores" in text else SOFT
            card.arrow(at, 116 if up else 86, at, 86 if up else 116, color=color, line=2)
            card.text(at + 6, 101, text, size=8.2, color=BROWN if "scores" in text else SOFT, ha="left")
    card.box(
        110, 184, 668, 34, "one kernel; a tile of scores at a time, on the chip", fill=TINT[GREEN], edge=GREEN, size=10
    )
    for x, text, up in ((190, "q, k, v", False), (700, "output", True)):
        card.arrow(x, 184 if up else 142, x, 142 if up else 184, line=2)
        card.text(x + 6, 163, text, size=8.2, color=SOFT, ha="left")
    card.text(444, 240, "orange: the whole score matrix, B·H·Sq·Sk numbers, four times", size=9, color=BROWN)
    return card


def waves() -> Card:
    """Eight programs on 132 multiprocessors: not split, in 16 and in 17 parts."""
    card = Card(
        820,
        262,
        "Waves: 8 programs on 132 multiprocessors",
        (
            "Three rows of 132 boxes. Without a split 8 are busy. With 16 splits 128 are busy for a sixteenth of the time. With "
            "17 splits a second wave runs 4 programs, and takes as long as the first."
        ),
    )
    for y, text, busy, second in (
        (64, "1 split: 8 programs", 8, None),
        (122, "16 splits: 128 programs", 128, None),
        (180, "17 splits: 136 programs", 132, 4),
    ):
        card.text(22, y + 16, text, size=9, ha="left")
        card.grid(190, y, 3, 44, 8, lambda row, col, n=busy: ORANGE if row + 3 * col < n else PAPER)
        if second is not None:
            card.grid(560, y, 3, 44 // 2, 8, lambda row, col, n=second: ORANGE if row + 3 * col < n else PAPER)
            card.text(648, y + 36, "second wave: 4 programs, the same time", size=8.2, color=SOFT)
    card.text(366, 244, "each box is a multiprocessor; orange ones read keys", size=9, color=SOFT)
    return card


def strides() -> Card:
    """Three orders of the same numbers in memory."""
    card = Card(
        820,
        236,
        "One shape, three orders in memory",
        (
            "Rows of boxes in the order of memory, for 2 heads of 2 tokens with 4 numbers. Contiguous: head, token, number. "
            "Heads between tokens: flash runs it. Numbers of a head apart: flash refuses it."
        ),
    )
    colors = (TINT[BLUE], TINT[ORANGE])
    contiguous = [(h, t, d) for h in range(2) for t in range(2) for d in range(4)]
    between = [(h, t, d) for t in range(2) for h in range(2) for d in range(4)]
    apart = [(h, t, d) for h in range(2) for d in range(4) for t in range(2)]
    for y, text, places, verdict in (
        (62, "contiguous", contiguous, "stride of D: 1. Flash runs."),
        (116, "heads between tokens", between, "stride of D: 1. Flash runs."),
        (170, "D is not last in memory", apart, "stride of D: 2. Flash refuses."),
    ):
        card.text(172, y + 15, text, size=9, ha="right")
        for i, (h, t, d) in enumerate(places):
            card.box(184 + 27 * i, y, 26, 30, f"{t}.{d}", fill=colors[h], edge=SOFT, round=1, size=7.5)
        card.text(630, y + 15, verdict, size=8.8, ha="left", color=PURPLE if "refuses" in verdict else GREEN)
    card.text(
        400,
        218,
        "token.number of head 0 (blue) and head 1 (orange), from left to right in memory",
        size=8.8,
        color=SOFT,
    )
    return card


def rounding() -> Card:
    """The textbook's order and a fused kernel's, with the places that may round."""
    card = Card(
        820,
        238,
        "Where a number may be rounded to bf16",
        (
            "Two rows of steps. Textbook: scores, exponentials, P as e over its sum, P times V. Fused: scores, exponentials, e "
            "times V, then the division. Marks show the switches scores, p and output."
        ),
    )
    rows = (
        (
            66,
            "normalize_first",
            (("s = QKᵀ/√D", "scores"), ("e = exp(s − max)", ""), ("P = e / ℓ", "p"), ("O = P V", "output")),
        ),
        (150, "fused", (("s = QKᵀ/√D", "scores"), ("e = exp(s − max)", "p"), ("e V", ""), ("O = e V / ℓ", "output"))),
    )
    for y, name, steps in rows:
        card.text(22, y + 20, name, size=9.5, ha="left", weight="bold")
        for i, (text, switch) in enumerate(steps):
            x = 150 + 166 * i
            card.box(
                x,
                y,
                138,
                40,
                text,
                fill=TINT[ORANGE] if switch else TINT[GREY],
                edge=ORANGE if switch else SOFT,
                size=9.5,
            )
            if switch:
                card.text(x + 69, y + 54, f"switch: {switch}", size=8.5, color=BROWN)
            if i < 3:
                card.arrow(x + 138, y + 20, x + 166, y + 20)
    return card
