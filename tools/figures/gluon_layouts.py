"""Who holds which element, where a tile lies in shared memory, what a barrier counts, what overlaps: lab 3's drawings.

The numbers of the layouts are computed by the rules that the drawings explain; a test compares them with Triton's own.
"""

from __future__ import annotations

from tools.figures.drawing import BLUE, GREEN, GREY, HAIR, ORANGE, PURPLE, SOFT, TINT, Card

RED, RED_TINT = "#b3423a", "#f9d9d5"


def blocked_owner(row: int, column: int) -> tuple[int, int, int]:
    """Return (warp, lane, register) of an element of an 8 x 32 tile under BlockedLayout([1, 4], [4, 8], [2, 1], [1, 0])."""
    return row // 4, row % 4 * 8 + column // 4, column % 4


def fragment_owner(row: int, column: int) -> tuple[int, int]:
    """Return (lane, register) of an element of the 16 rows of a warp in wgmma's accumulator."""
    return row % 8 * 4 + column % 8 // 2, column % 2 + 2 * (row // 8) + 4 * (column // 8)


def _cell(
    card: Card, x: float, y: float, w: float, h: float, words: str, look: tuple[str, str], bold: bool = False
) -> None:
    """Draw a cell of a table: plain corners keep the file small where there are many."""
    card.rect(x + 1, y + 1, w - 2, h - 2, fill=look[0], edge=look[1], line=2.0 if bold else 0.8)
    card.text(x + w / 2, y + h / 2, words, size=8.2, weight="bold" if bold else "normal")


def blocked_layout() -> Card:
    """A tile of a blocked layout with its lanes, and the two slices of it."""
    card = Card(
        1000,
        470,
        "BlockedLayout([1, 4], [4, 8], [2, 1], [1, 0]) and its slices",
        (
            "A tile of 8 rows and 32 columns. Each box is a thread's piece of 1 x 4 elements with the thread's lane. Warp 0 "
            "holds rows 0 to 3, warp 1 rows 4 to 7. Below, SliceLayout(0, L), the layout of a row of columns, and to the "
            "right SliceLayout(1, L), the layout of a column of rows."
        ),
    )
    left, top, wide, high = 90, 96, 78, 30
    for row in range(8):
        card.text(left - 16, top + row * high + high / 2, f"{row}", size=8.5, color=SOFT)
        for piece in range(8):
            warp, lane, _ = blocked_owner(row, 4 * piece)
            tint, edge = (TINT[BLUE], BLUE) if warp == 0 else (TINT[ORANGE], ORANGE)
            _cell(
                card, left + piece * wide, top + row * high, wide, high, f"{lane}", (tint, edge), (row, piece) == (0, 0)
            )
    for piece in range(8):
        card.text(left + piece * wide + wide / 2, top - 14, f"{4 * piece} to {4 * piece + 3}", size=8.2, color=SOFT)
    card.text(left + 4 * wide, top - 34, "columns", size=8.8, color=SOFT)
    card.text(left - 22, top - 14, "row", size=8.2, color=SOFT)
    right = left + 8 * wide
    for warp in range(2):
        card.text(right + 36, top + (4 * warp + 2) * high, f"warp {warp}", size=9, weight="bold")
    card.text(882, 58, "SliceLayout(1, L)", size=9, weight="bold")
    card.text(882, 77, "L without dimension 1", size=8.4, color=SOFT)
    for row in range(8):
        warp, lane, _ = blocked_owner(row, 0)
        tint, edge = (TINT[BLUE], BLUE) if warp == 0 else (TINT[ORANGE], ORANGE)
        _cell(card, 800, top + row * high, 164, high, f"{row}: lanes {lane} to {lane + 7}", (tint, edge))
    y = top + 8 * high + 34
    card.text(left + 4 * wide, y - 13, "SliceLayout(0, L): L without dimension 0", size=9, weight="bold")
    for piece in range(8):
        lane = blocked_owner(0, 4 * piece)[1]
        words = f"{lane}, {lane + 8}, …"
        card.box(left + piece * wide + 2, y, wide - 4, 26, words, fill=TINT[GREY], edge=HAIR, size=8.2)
    words = "numbers are lanes: lane 0 of warp 0 holds row 0, columns 0 to 3, in registers 0 to 3; a larger tensor repeats the tile"
    card.text(500, 438, words, size=9)
    return card


def wgmma_fragment() -> Card:
    """The accumulator of a wgmma: which lane of a warp holds what, and why P needs no move."""
    card = Card(
        1000,
        476,
        "The accumulator of wgmma: 16 rows of one warp",
        (
            "Rows 0 to 15 of a warp and columns 0 to 15. Row r is held by lanes 4 r to 4 r + 3, two neighbouring columns "
            "each; the same lanes hold row r + 8. Lane 5 holds columns 2, 3, 10 and 11 of rows 1 and 9."
        ),
    )
    left, top, wide, high = 96, 78, 66, 21
    card.rect(left, top, 8 * wide, 8 * high, fill=TINT[BLUE])
    card.rect(left, top + 8 * high, 8 * wide, 8 * high, fill=TINT[PURPLE])
    for row in range(16):
        card.text(left - 18, top + row * high + high / 2, f"{row}", size=8, color=SOFT)
        for pair in range(8):
            lane, register = fragment_owner(row, 2 * pair)
            if lane == 5:
                words = f"5: r{register}, r{register + 1}"
                _cell(card, left + pair * wide, top + row * high, wide, high, words, (RED_TINT, RED))
            elif pair < 4 or row % 8 == 0:  # from column 8 on the lanes repeat
                card.text(left + pair * wide + wide / 2, top + row * high + high / 2, f"{lane}", size=8.2)
    for row in range(17):
        card.path((left, top + row * high), (left + 8 * wide, top + row * high), color=HAIR, line=0.6)
    for pair in range(9):
        card.path((left + pair * wide, top), (left + pair * wide, top + 16 * high), color=HAIR, line=0.6)
    for pair in range(8):
        card.text(left + pair * wide + wide / 2, top - 12, f"{2 * pair}, {2 * pair + 1}", size=8, color=SOFT)
    card.text(left - 20, top - 12, "row", size=8, color=SOFT)
    notes = (
        ("four warps, 16 rows each", "warp w: rows 16 w to 16 w + 15"),
        ("row r below 8: lanes 4 r to 4 r + 3", "so a maximum of a row is two\nexchanges among four lanes"),
        ("rows r and r + 8 share lanes", "so a thread has factors of two rows"),
        ("P as left operand", "wants the same pairs in the same\nlanes: convert_layout moves nothing"),
        ("O has other columns", "but row r is in the same lanes:\nalpha moves nothing either"),
    )
    y = 92
    for head, words in notes:
        lines = words.count("\n") + 1
        card.text(660, y, head, size=9.5, weight="bold", ha="left")
        card.text(660, y + 14 + 7 * lines, words, size=8.8, ha="left")
        y += 44 + 15 * lines
    card.text(
        500, 448, "numbers are lanes, and each 8 columns repeat them; red: lane 5 and its registers", size=9, color=RED
    )
    return card


def swizzle() -> Card:
    """Eight rows of eight chunks, plain and swizzled, and the banks that a column's read meets."""
    card = Card(
        1000,
        400,
        "Why tiles are swizzled: a column of eight rows of 128 bytes",
        (
            "Left, plain rows: the chunk of 16 bytes number 2 of every row lies in the same four banks, so a read of it takes "
            "eight turns. Right, chunk c of row r lies at place c XOR r: the eight chunks lie in all 32 banks, one turn."
        ),
    )
    wide, high, top = 50, 27, 112
    for side, (x, name, words) in enumerate(
        (
            (70, "plain: chunk c of row r at place c", "chunk 2: banks 8 to 11, eight turns"),
            (550, "swizzled: at place c XOR r", "chunk 2: all 32 banks, one turn"),
        )
    ):
        card.text(x + 4 * wide, 64, name, size=9.5, weight="bold")
        for place in (0, 2, 7):
            banks = f"{4 * place}-{4 * place + 3}"
            card.text(x + place * wide + wide / 2, top - 12, banks, size=7.8, color=SOFT)
        card.text(x - 26, top - 12, "banks", size=7.8, color=SOFT)
        card.text(x - 20, top + 8 * high + 10, "row", size=7.8, color=SOFT)
        for row in range(8):
            card.text(x - 14, top + row * high + high / 2, f"{row}", size=8, color=SOFT)
            for place in range(8):
                chunk = place ^ row if side else place
                read = chunk == 2
                look = (RED_TINT, RED) if read else (TINT[GREY], HAIR)
                _cell(card, x + place * wide, top + row * high, wide, high, str(chunk), look, read)
        card.text(x + 4 * wide, top + 8 * high + 24, words, size=9, color=RED)
    words = "a turn reads each of the 32 banks of 4 bytes once; the TMA swizzles on the way in"
    card.text(500, 376, words, size=9, color=SOFT)
    return card


def barrier_states() -> Card:
    """What full[0] of a ring of two slots counts, over the tiles 0, 2 and 4."""
    card = Card(
        1000,
        372,
        "An mbarrier at work: full[0] of a ring of two slots, over tiles 0 to 5",
        (
            "A table of events at the barrier of slot 0. Each expect is the one arrival of a phase and announces 2048 bytes; "
            "when the bytes have come the phase ends and its parity flips. Tiles 0, 2 and 4 are its phases 0, 1 and 2; tiles "
            "1, 3 and 5 are counted by full[1]."
        ),
    )
    names = ("arrivals missing", "bytes missing", "running phase", "wait(0)", "wait(1)")
    events = [("init(count=1)", (1, 0, 0))]
    for phase in range(3):
        events += [(f"expect, tile {2 * phase}", (0, 2048, phase)), ("bytes are there", (1, 0, phase + 1))]
    left, wide, top, high = 150, 118, 104, 38
    for r, name in enumerate(names):
        card.text(left - 12, top + r * high + high / 2, name, size=9, ha="right", weight="bold")
    for i, (event, (arrivals, missing, phase)) in enumerate(events):
        x = left + i * wide
        card.text(x + wide / 2, top - 22, event, size=8.6, weight="bold")
        ended = event.startswith("bytes")
        passes = ["passes" if (phase & 1) != parity else "blocks" for parity in (0, 1)]
        for r, words in enumerate((str(arrivals), str(missing), f"{phase} (parity {phase & 1})", *passes)):
            tint, edge = (TINT[GREEN], GREEN) if ended and r < 3 else (TINT[GREY], HAIR)
            if r > 2:
                tint, edge = (TINT[BLUE], BLUE) if words == "passes" else (RED_TINT, RED)
            card.box(x + 3, top + r * high + 3, wide - 6, high - 6, words, fill=tint, edge=edge, size=9)
    words = "a phase ends when no arrival and no byte is missing; a fresh barrier lets wait(1) pass"
    card.text(500, 324, words, size=9.5)
    words = "full[1] counts the tiles 1, 3 and 5 in the same way, so tile i is phase i // 2 of full[i % 2]"
    card.text(500, 346, words, size=9, color=SOFT)
    return card


def overlap_schedule() -> Card:
    """One consumer's blocks, one after the other and overlapped."""
    card = Card(
        1000,
        420,
        "One consumer: what runs while the softmax runs",
        (
            "Above, without overlap: scores, softmax and P V of each block one after the other; the tensor cores wait during "
            "every softmax. Below, the scores of the next block and P V of this one are issued together; the softmax of the "
            "next block starts when its scores are there and runs under P V."
        ),
    )
    left, high = 128, 34

    def bar(x: float, y: float, w: float, words: str, kind: str) -> None:
        tint, edge = {"s": (RED_TINT, RED), "o": (TINT[ORANGE], ORANGE), "e": (TINT[BLUE], BLUE)}[kind]
        card.box(left + x, y, w - 2, high, words, fill=tint, edge=edge, size=8.6)

    card.text(34, 64, "one after the other", size=9.5, weight="bold", ha="left")
    card.text(left - 12, 99, "tensor cores", size=8.6, ha="right", color=SOFT)
    card.text(left - 12, 141, "softmax", size=8.6, ha="right", color=SOFT)
    x = 0.0
    for block in range(3):
        bar(x, 82, 84, f"Q K{block}", "s")
        bar(x + 84, 124, 112, f"softmax {block}", "e")
        bar(x + 196, 82, 84, f"P V{block}", "o")
        x += 280
    card.text(34, 192, "overlapped", size=9.5, weight="bold", ha="left")
    card.text(left - 12, 227, "tensor cores", size=8.6, ha="right", color=SOFT)
    card.text(left - 12, 269, "softmax", size=8.6, ha="right", color=SOFT)
    bar(0, 210, 84, "Q K0", "s")
    bar(84, 252, 112, "softmax 0", "e")
    x = 196.0
    for block in (1, 2):
        bar(x, 210, 84, f"Q K{block}", "s")
        bar(x + 84, 210, 84, f"P V{block - 1}", "o")
        bar(x + 84, 252, 112, f"softmax {block}", "e")
        card.path((left + x, 204), (left + x, 300), color=HAIR, line=0.8, style="--")
        if block == 2:
            card.text(left + x, 310, "wait until none is left", size=8.4)
        card.text(left + x, 310 if block == 1 else 325.5, "issue both", size=8.4)
        card.path((left + x + 84, 248), (left + x + 84, 330), color=HAIR, line=0.8, style="--")
        card.text(left + x + 84, 340, "wait until one is left", size=8.4)
        card.path((left + x + 196, 248), (left + x + 196, 300), color=HAIR, line=0.8, style="--")
        x += 196
    card.text(left + x + 40, 310, "wait until none is left", size=8.4)
    bar(x, 210, 84, "P V2", "o")
    card.text(
        500, 378, "the softmax of block i needs the scores of block i, and nothing of P V of block i - 1", size=9.5
    )
    card.text(
        500,
        399,
        "lengths are an example; PV also waits for V, and a second consumer fills what is still empty",
        size=8.8,
        color=SOFT,
    )
    return card
