"""FlexAttention: a mask as data and as a program, blocks and their tables, the ways to a kernel, a pool of pages."""

from __future__ import annotations

from tools.figures.drawing import BLUE, BROWN, GREEN, GREY, HAIR, INK, ORANGE, PAPER, PURPLE, SOFT, TINT, Card

# Three packed documents, causal, in blocks of 4 x 4; the last four tokens are padding.
DOCUMENTS, SIZE, BLOCK = (9, 5, 6), 24, 4


def visible(q: int, k: int) -> bool:
    """Whether query q sees key k in the drawn mask."""
    ends = [sum(DOCUMENTS[: i + 1]) for i in range(len(DOCUMENTS))]
    owner = [next((i for i, end in enumerate(ends) if token < end), -1) for token in (q, k)]
    return owner[0] == owner[1] >= 0 and k <= q


def block_state(i: int, j: int) -> str:
    """full, partial or empty."""
    seen = sum(visible(q, k) for q in range(i * BLOCK, (i + 1) * BLOCK) for k in range(j * BLOCK, (j + 1) * BLOCK))
    return "empty" if seen == 0 else "full" if seen == BLOCK**2 else "partial"


def block_tables() -> tuple[list[list[int]], list[list[int]]]:
    """The key blocks that each row of blocks visits: (partial ones, full ones)."""
    rows = range(SIZE // BLOCK)
    partial, full = ([[j for j in rows if block_state(i, j) == state] for i in rows] for state in ("partial", "full"))
    return partial, full


def mask_program() -> Card:
    """The same mask read from memory, and computed in registers."""
    card = Card(
        940,
        372,
        "A mask as data, and as a program",
        (
            "Left: every score is computed, then a number of the mask is read and added. Right: the mask is "
            "two comparisons that become part of the kernel; blocks without a visible pair are not visited at all."
        ),
    )
    cell, top = 8, 92
    for x, title in ((40, "as data"), (500, "as a program")):
        card.text(x, 68, title, size=10.5, weight="bold", ha="left", va="baseline")
        as_data = x == 40
        size = cell * SIZE
        if as_data:
            card.grid(x, top, SIZE, SIZE, cell, lambda q, k: ORANGE if visible(q, k) else TINT[ORANGE], line=0.3)
        else:
            for i in range(SIZE // BLOCK):
                for j in range(SIZE // BLOCK):
                    empty = block_state(i, j) == "empty"
                    card.rect(
                        x + j * BLOCK * cell,
                        top + i * BLOCK * cell,
                        BLOCK * cell,
                        BLOCK * cell,
                        fill=TINT[GREY] if empty else TINT[GREEN],
                        edge=HAIR,
                        line=0.7,
                    )
            for q in range(SIZE):
                seen = [k for k in range(SIZE) if visible(q, k)]
                if seen:
                    card.rect(x + seen[0] * cell, top + q * cell, len(seen) * cell, cell, fill=GREEN, zorder=2.2)
        words = (
            "S x S numbers in memory, each read\nby every head, for a score that has\nbeen computed already"
            if as_data
            else "empty blocks (grey) are known\nbefore the kernel starts: nothing\nis loaded or computed there"
        )
        card.text(x, top + size + 34, words, size=9, ha="left")
    card.box(252, 100, 210, 150, fill="#fafafa", edge=SOFT, round=8)
    lines = ("every pair:", "    score = q · k", "    load mask[q, k]", "    score += mask", "    p = exp(score - m)")
    for i, line in enumerate(lines):
        card.text(264, 120 + 22 * i, line, size=8.6, ha="left", color=BROWN if "mask" in line else INK)
    card.text(264, 236, f"{SIZE} x {SIZE} = {SIZE**2} pairs computed", size=8.6, ha="left", color=SOFT)
    partial, full = block_tables()
    blocks = sum(map(len, partial)) + sum(map(len, full))
    card.box(706, 100, 216, 150, fill="#fafafa", edge=SOFT, round=8)
    lines = (
        "for blocks in the table:",
        "  score = q · k",
        "  ok = (doc[q] == doc[k])",
        "          & (k <= q)",
        "  score = where(ok, score, -inf)",
        "  p = exp(score - m)",
    )
    for i, line in enumerate(lines):
        card.text(718, 117 + 20 * i, line, size=8.6, ha="left", color="#00694d" if i in (2, 3, 4) else INK)
    card.text(718, 236, f"{blocks} x 16 = {blocks * BLOCK**2} pairs computed", size=8.6, ha="left", color=SOFT)
    return card


def blocks() -> Card:
    """A mask sorted into blocks, and the two tables that the kernel walks."""
    card = Card(
        940,
        430,
        "From pairs to blocks to tables",
        (
            "A causal mask of three packed documents with padding over 24 tokens, in blocks of 4: full, partial and "
            "empty. Two tables say which key blocks each row of query blocks visits; the kernel loops over those alone."
        ),
    )
    cell, x, y = 11, 62, 96
    card.text(x, 66, "pairs", size=10, weight="bold", ha="left")
    card.grid(x, y, SIZE, SIZE, cell, lambda q, k: BLUE if visible(q, k) else PAPER, line=0.4)
    card.text(x + SIZE * cell / 2, y - 10, "keys", size=8.5, color=SOFT)
    card.text(x - 14, y + SIZE * cell / 2, "queries", size=8.5, color=SOFT, rotation=90)
    left, wide, rows = 384, 44, SIZE // BLOCK
    card.arrow(x + SIZE * cell + 12, y + SIZE * cell / 2, left - 16, y + SIZE * cell / 2, color=INK)
    card.text(left, 66, "blocks of 4 x 4", size=10, weight="bold", ha="left")
    look = {"full": (BLUE, PAPER), "partial": (TINT[BLUE], INK), "empty": (PAPER, HAIR)}
    for i in range(rows):
        for j in range(rows):
            fill, _ = look[block_state(i, j)]
            card.rect(
                left + j * wide,
                y + i * wide,
                wide,
                wide,
                fill=fill,
                edge=HAIR,
                line=0.8,
                hatch="" if block_state(i, j) != "empty" else "///",
            )
        card.text(left - 7, y + (i + 0.5) * wide, str(i), size=8, color=SOFT, ha="right")
        card.text(left + (i + 0.5) * wide, y - 9, str(i), size=8, color=SOFT)
    table = left + rows * wide + 34
    card.text(table, 66, "tables: visit these", size=10, weight="bold", ha="left")
    card.text(table, y - 9, "partial", size=8.5, color=SOFT, ha="left")
    card.text(table + 128, y - 9, "full", size=8.5, color=SOFT, ha="left")
    partial, full = block_tables()
    for i in range(rows):
        for dx, entries, fill, ink in ((0, partial[i], TINT[BLUE], INK), (128, full[i], BLUE, PAPER)):
            middle = y + (i + 0.5) * wide
            card.text(table + dx, middle, f"{len(entries)}:", size=9, ha="left")
            for n, j in enumerate(entries):
                card.box(table + dx + 22 + 27 * n, middle - 12, 24, 24, str(j), fill=fill, edge=BLUE, color=ink, size=9)
    legend = y + rows * wide + 26
    total = {state: sum(block_state(i, j) == state for i in range(rows) for j in range(rows)) for state in look}
    for n, (state, words) in enumerate(
        (("full", "computed, mask not asked"), ("partial", "computed whole, mask asked"), ("empty", "skipped"))
    ):
        at = 62 + (0, 300, 620)[n]
        card.rect(at, legend, 15, 15, fill=look[state][0], edge=HAIR, hatch="///" if state == "empty" else "", line=0.7)
        card.text(at + 22, legend + 8, f"{total[state]} {state}: {words}", size=9, ha="left")
    return card


def paths() -> Card:
    """Two Python functions become part of a kernel."""
    card = Card(
        940,
        400,
        "From two Python functions to one kernel",
        (
            "mask_mod and score_mod are traced by Dynamo into a small graph. Inductor puts it into a flash-attention "
            "template and writes Triton on a GPU or C++ on a CPU; with the FLASH backend it goes into a CuTe kernel. "
            "Eager runs it operator by operator."
        ),
    )
    card.box(28, 66, 250, 74, "def mask_mod(b, h, q, k):\n    return k <= q", fill=TINT[GREEN], edge=GREEN, size=8.8)
    card.box(
        28,
        160,
        250,
        74,
        "def score_mod(score, b, h, q, k):\n    return 20 * tanh(score / 20)",
        fill=TINT[PURPLE],
        edge=PURPLE,
        size=8.8,
    )
    card.box(28, 254, 250, 74, "q, k, v  (B, H, S, D)\nblock tables", fill=TINT[BLUE], edge=BLUE, size=8.8)
    for y in (103, 197, 291):
        card.arrow(278, y, 330, 197)
    card.box(
        332,
        150,
        150,
        94,
        "Dynamo\n\ntraces both functions\ninto graphs of a few\noperators",
        fill=TINT[GREY],
        edge=SOFT,
        size=8.6,
    )
    for y, title, words, fill, edge in (
        (
            62,
            "eager",
            "no compiler: all scores stored,\nthe mask asked for every pair,\none kernel an operator",
            TINT[GREY],
            SOFT,
        ),
        (
            154,
            "compiled",
            "Inductor's template of flash attention\nwith both graphs inside:\nTriton on a GPU, C++ on a CPU",
            TINT[ORANGE],
            ORANGE,
        ),
        (
            246,
            "CuTe",
            "FlashAttention 4's kernel with both\ngraphs inside, in NVIDIA's CuTe DSL,\nfor Hopper and newer",
            TINT[ORANGE],
            ORANGE,
        ),
    ):
        card.box(548, y, 364, 82, fill=fill, edge=edge, round=6)
        card.text(562, y + 41, title, size=10, weight="bold", ha="left")
        card.text(672, y + 41, words, size=8.6, ha="left")
        card.arrow(482, 197, 546, y + 41)
    card.text(
        28,
        366,
        "Same arguments, same result. Compiled and CuTe walk the block tables, a tile of scores at a time; eager skips "
        "nothing.",
        size=9,
        ha="left",
        color=SOFT,
    )
    return card


# The drawn pool: the owner and the number of each page.
PAGES = ((1, 0), (0, 1), (-1, 2), (0, 0), (1, 1), (0, 2), (-1, 1), (1, 2))


def pages() -> Card:
    """A pool of pages, and how a place becomes a position."""
    card = Card(
        940,
        318,
        "A paged KV cache",
        (
            "Eight pages of four keys in one pool. Owner and number of each page tell which sequence and positions it "
            "holds. The mask turns a place in the pool into a position of a sequence; free pages are seen by nobody."
        ),
    )
    wide, x, y = 104, 66, 62
    colors = {0: (TINT[BLUE], BLUE), 1: (TINT[ORANGE], ORANGE), -1: (PAPER, HAIR)}
    for row, words in (
        (y + 17, "place k"),
        (y + 54, "page p"),
        (y + 88, "owner"),
        (y + 114, "number"),
        (y + 146, "position"),
    ):
        card.text(x - 8, row, words.split()[0], size=8.5, color=SOFT, ha="right")
    for p, (owner, number) in enumerate(PAGES):
        fill, edge = colors[owner]
        left = x + p * wide
        for n in range(4):
            card.rect(
                left + 4 + n * 24, y + 4, 24, 26, fill=fill, edge=edge, line=0.8, hatch="///" if owner < 0 else ""
            )
            if owner >= 0:
                card.text(left + 16 + n * 24, y + 17, str(p * 4 + n), size=8)
        card.text(left + 52, y + 54, str(p), size=9, weight="bold")
        card.text(left + 52, y + 88, str(owner) if owner >= 0 else "-1", size=9)
        card.text(left + 52, y + 114, str(number), size=9, color=INK if owner >= 0 else SOFT)
        words = f"{number * 4} … {number * 4 + 3}" if owner >= 0 else "free"
        card.text(left + 52, y + 146, words, size=9, color=INK if owner >= 0 else SOFT)
    for n, (owner, words) in enumerate(((0, "sequence 0"), (1, "sequence 1"), (-1, "free page"))):
        fill, edge = colors[owner]
        card.rect(66 + 130 * n, 230, 14, 14, fill=fill, edge=edge, line=0.8, hatch="///" if owner < 0 else "")
        card.text(87 + 130 * n, 237, words, size=8.5, ha="left")
    place, (owner, number) = 21, PAGES[21 // 4]
    text = (
        f"place {place}:  page {place} // 4 = {place // 4},  inside of it {place} % 4 = {place % 4};  owner {owner},  "
        f"number {number};  position {number} · 4 + {place % 4} = {number * 4 + place % 4} of sequence {owner}"
    )
    card.box(66, 260, 820, 36, text, fill=TINT[BLUE], edge=BLUE, size=9)
    return card


# Conversation of each drawn token, in the order of arrival: 0 holds the instructions, of which the others see all.
ARRIVED = (1, 0, 2, 1, 0, 3, 2, 1, 3, 0, 2, 3, 0, 1, 3, 2, 1, 2, 0, 3, 3, 1, 0, 2)


def sees(q: int, k: int) -> bool:
    """Whether the q-th token to arrive sees the k-th."""
    own, other = ARRIVED[q], ARRIVED[k]
    return (own == other and k <= q) or other == 0 < own


def layout() -> Card:
    """Tokens in the order of arrival, whose mask has no empty block, beside a layout that is still to be found."""
    card = Card(
        940,
        372,
        "No block is empty. Does another order help?",
        (
            "Left: the mask between 24 tokens of an instruction and three conversations in the order of their arrival; each of "
            "the 36 blocks holds a visible pair. Right: the same tokens, in an order that is yours to find."
        ),
    )
    fills, cell, top = (PURPLE, BLUE, ORANGE, GREEN), 10, 92
    size = cell * SIZE
    for x, words in ((60, "in the order of arrival: 36 of 36 blocks"), (560, "in your order: ? of 36 blocks")):
        card.text(x, 62, words, size=10.5, weight="bold", ha="left")
        for i in range(SIZE // BLOCK):
            for j in range(SIZE // BLOCK):
                place = (x + j * BLOCK * cell, top + i * BLOCK * cell, BLOCK * cell, BLOCK * cell)
                card.rect(*place, fill=TINT[GREY], edge=HAIR, line=0.8)
    for q, owner in enumerate(ARRIVED):
        card.rect(60 + q * cell, top - 14, cell, 10, fill=fills[owner], edge=PAPER, line=0.5)
        for k in filter(lambda k: sees(q, k), range(SIZE)):
            card.rect(60 + k * cell, top + q * cell, cell, cell, fill=fills[ARRIVED[k]], zorder=2.2)
    card.text(560 + size / 2, top + size / 2, "?", size=60, color=SOFT)
    card.arrow(330, top + size / 2, 540, top + size / 2, color=INK)
    card.text(435, top + size / 2 - 16, "order, mask_mod", size=9.5)
    for n, words in enumerate(("instructions", "conversation 1", "conversation 2", "conversation 3")):
        card.rect(60 + 130 * n, 345, 12, 12, fill=fills[n])
        card.text(79 + 130 * n, 351, words, size=8.5, ha="left")
    return card
