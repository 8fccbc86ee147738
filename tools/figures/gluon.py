"""An SM, a ring of slots and its barriers, a block split into producer and consumers: lab 3's drawings."""

from __future__ import annotations

from tools.figures.drawing import BLUE, GREEN, GREY, HAIR, INK, ORANGE, PAPER, PURPLE, SOFT, TINT, Card
from utils.config import GPU_SPECS


def streaming_multiprocessor() -> Card:
    """What one SM of an H200 consists of, and who may use what."""
    spec = GPU_SPECS["H200"]
    card = Card(
        938,
        480,
        f"One of the {spec['sm_count']} streaming multiprocessors (SMs) of an H200",
        (
            "Four quarters, each with a warp scheduler, 16384 registers, a tensor core, arithmetic units and four special "
            "function units. Below them shared memory, the TMA copy engine and mbarriers, which all quarters use; then the "
            "L2 cache and memory. A warpgroup is one warp on each quarter."
        ),
    )
    width, top = 206, 84
    many = "16384 registers"
    for i in range(4):
        x = 30 + i * (width + 18)
        card.box(x, top, width, 196, fill=TINT[GREY], edge=HAIR, round=6)
        card.text(x + width / 2, top + 15, f"quarter {i}", size=9, weight="bold")
        if i == 1:  # the first quarter says it all
            many, tensor, lanes, special = "registers", "tensor core", "fp32", "exp2"
        elif i == 0:
            tensor, lanes, special = "tensor core\n1024 FLOPs a cycle", "32 lanes\nof fp32", "4 special\nfunction units"
        card.box(x + 12, top + 30, width - 24, 30, many, fill=TINT[PURPLE], edge=PURPLE, size=8.5)
        card.box(x + 12, top + 68, width - 24, 44, tensor, fill="#f9d9d5", edge="#b3423a", size=8.5)
        card.box(x + 12, top + 120, 86, 62, lanes, fill=TINT[BLUE], edge=BLUE, size=8.5)
        card.box(x + 106, top + 120, 88, 62, special, fill=TINT[ORANGE], edge=ORANGE, size=8.5)
    card.path((40, 64), (908, 64), color=INK, line=1.4)
    for i in range(4):
        x = 30 + i * (width + 18) + width / 2
        card.arrow(x, 64, x, 82, color=INK)
    card.text(474, 53, "a warpgroup: four warps, one on each quarter, 128 threads; it issues a wgmma", size=9)

    card.box(30, 322, 620, 62, fill=TINT[GREEN], edge=GREEN, round=5)
    card.text(340, 342, "shared memory: 227 KiB for a block, 128 bytes a cycle", size=9.5, weight="bold")
    card.text(340, 364, "tiles of Q, K, V;  mbarriers: 8 bytes each that count arrivals and bytes", size=8.8)
    card.box(700, 322, 208, 62, "TMA copy engine\none thread issues a copy", fill=PAPER, edge=GREEN, size=8.8)
    card.arrow(698, 353, 652, 353, color=GREEN, line=2)
    for i in range(4):
        x = 30 + i * (width + 18) + 60
        if i < 3:
            card.arrow(x, 320, x, 282, color=SOFT)
        else:  # this arrow comes from shared memory, so it bends around the box of the TMA
            card.route((620, 320), (620, 301), (x, 301), (x, 282), color=SOFT)
    card.text(202, 301, "operands of wgmma", size=8.8, color=SOFT)
    card.text(426, 301, "results stay in registers", size=8.8, color=SOFT)
    below = f"L2 cache, {spec['l2_mb']} MB, shared by all SMs;  memory: about 20 bytes a cycle for each SM; L2: more"
    card.box(30, 420, 878, 36, below, fill=PAPER, edge=HAIR, size=9)
    card.arrow(804, 419, 804, 386, color=GREEN, line=2)
    return card


def ring() -> Card:
    """Six tiles through a ring of two slots: phases, parities, and both barriers of a slot."""
    card = Card(
        1000,
        380,
        "A ring of two slots over six tiles",
        (
            "A table with a column for each tile. Tile i lies in slot i modulo 2 and is phase i divided by 2 of its "
            "barrier. The reader waits for parity 0, 0, 1, 1, 0, 0. A slot is refilled only after its reader is done."
        ),
    )
    left, cell, rows = 190, 128, (78, 132, 186, 240)
    labels = ("tile i", "slot  i % 2", "phase  i // 2", "parity  (i // 2) & 1")
    for y, label in zip(rows, labels, strict=True):
        card.text(left - 16, y + 21, label, ha="right", size=9.5, weight="bold")
    tints, edges = (TINT[BLUE], TINT[ORANGE]), (BLUE, ORANGE)
    for i in range(6):
        x, slot, phase = left + i * cell, i % 2, i // 2
        texts = (f"{i}", f"slot {slot}", f"phase {phase}", f"{phase & 1}")
        for y, text in zip(rows, texts, strict=True):
            card.box(x + 4, y, cell - 8, 42, text, fill=tints[slot], edge=edges[slot], size=9.5)
    for i in range(4):
        x = left + i * cell + cell / 2
        card.route(
            (x, 284),
            (x, 300 + 14 * (i % 2)),
            (x + 2 * cell, 300 + 14 * (i % 2)),
            (x + 2 * cell, 284),
            color=edges[i % 2],
        )
    card.text(
        left + 3 * cell,
        340,
        "the copy of tile i + 2 into the slot is issued when tile i has been read: the same barrier's next phase",
        size=9.5,
    )
    card.text(
        left + 3 * cell,
        362,
        "a parity tells phase k from phase k + 1, not from k + 2: nobody in a ring is two phases ahead",
        size=9,
        color=SOFT,
    )
    return card


def specialized() -> Card:
    """Producer, ring, two consumers, and the barriers between them."""
    card = Card(
        1000,
        430,
        "One block, three partitions",
        (
            "Left, the producer: one warp with 24 registers a thread, which issues copies. Middle, shared memory: a ring "
            "of slots with a tile of K and of V each, full barriers and empty barriers. Right, two consumers: a warpgroup "
            "each with 240 registers a thread, which wait for full, multiply, compute the softmax and arrive at empty."
        ),
    )
    card.box(28, 120, 190, 190, fill=TINT[GREEN], edge=GREEN, round=6)
    card.text(123, 142, "producer", size=11, weight="bold")
    card.text(123, 166, "1 warp, 24 registers", size=9, color=SOFT)
    card.text(123, 236, "wait empty[slot]\nexpect full[slot]\nissue copies of K, V\n\nnext slot", size=9)

    card.box(328, 76, 260, 292, fill=TINT[GREY], edge=HAIR, round=6)
    card.text(458, 94, "shared memory", size=10, weight="bold")
    for s in range(2):
        y = 116 + 118 * s
        card.box(346, y, 106, 50, f"K   slot {s}", fill=TINT[BLUE], edge=BLUE, size=9.5)
        card.box(464, y, 106, 50, f"V   slot {s}", fill=TINT[ORANGE], edge=ORANGE, size=9.5)
        card.box(346, y + 56, 106, 24, f"full[{s}]", fill=PAPER, edge=INK, size=8.5)
        card.box(464, y + 56, 106, 24, f"empty[{s}]", fill=PAPER, edge=INK, size=8.5)
    card.text(458, 344, "full: all bytes of the slot are there\nempty: both consumers are done", size=8.6)

    for w in range(2):
        y = 76 + 152 * w
        card.box(706, y, 262, 140, fill=TINT[PURPLE], edge=PURPLE, round=6)
        card.text(837, y + 18, f"consumer {w}", size=11, weight="bold")
        card.text(837, y + 38, f"4 warps, 240 registers, rows {64 * w} to {64 * w + 63}", size=8.6, color=SOFT)
        steps = "wait full[slot]\nS = Q Kᵀ,  softmax,  O += P V\narrive at empty[slot]\nnext slot"
        card.text(837, y + 92, steps, size=9)
        card.arrow(590, 172 + 88 * w, 704, y + 70, color=BLUE, line=2)
        card.arrow(704, y + 110, 590, 208 + 92 * w, color=INK, line=1.1, style="--")
    card.arrow(220, 186, 326, 150, color=GREEN, line=2)
    card.text(273, 146, "TMA", size=9, color=GREEN, weight="bold")
    card.arrow(326, 292, 220, 268, color=INK, line=1.1, style="--")
    card.text(273, 306, "free again", size=8.8, color=SOFT)
    card.text(
        500,
        400,
        "Q of each consumer comes once, before the loop. Each tile of K and V serves 128 rows.",
        size=9,
        color=SOFT,
    )
    return card


def blackwell() -> Card:
    """The six partitions of attention on Blackwell, what lies in tensor memory between them, and who waits for whom."""
    card = Card(
        1000,
        420,
        "One block on Blackwell: six partitions, and tensor memory between them",
        (
            "Load fills a ring in shared memory. Products, one thread, multiplies Q K and P V. Scores of two tiles, P in the "
            "same columns, and two outputs lie in tensor memory. Two softmaxes read scores and write P. The correction rescales O."
        ),
    )
    card.box(28, 70, 150, 96, "load\n1 warp\n\nQ, K, V by TMA", fill=TINT[GREEN], edge=GREEN, round=6)
    card.box(28, 236, 150, 96, "store\n1 warp\n\nO by TMA", fill=TINT[GREEN], edge=GREEN, round=6)
    card.box(
        238,
        70,
        160,
        96,
        "products\n1 warp, 1 thread issues\n\nS = Q Kᵀ,  O += P V",
        fill="#f9d9d5",
        edge="#b3423a",
        round=6,
    )
    card.box(238, 236, 160, 96, "correction\n4 warps\n\nO α;  last, O / sum", fill=TINT[BLUE], edge=BLUE, round=6)
    card.box(478, 54, 210, 296, fill=TINT[GREY], edge=HAIR, round=6)
    card.text(583, 72, "tensor memory: 512 columns", size=8.8, weight="bold")
    for tile in range(2):
        y = 90 + 72 * tile
        card.box(
            492,
            y,
            182,
            58,
            f"S of tile {tile}: 128 columns\nthen P in its first 64",
            fill=TINT[ORANGE],
            edge=ORANGE,
            size=8.8,
        )
        card.box(768, 62 + 120 * tile, 216, 100, fill=TINT[PURPLE], edge=PURPLE, round=6)
        card.text(870, 112 + 120 * tile, f"softmax {tile}\n4 warps, a row a thread\n\nmask, max, exponentials", size=9)
        card.arrow(676, y + 16, 766, 98 + 120 * tile, color=ORANGE, line=2)
        card.arrow(766, 130 + 120 * tile, 676, y + 44, color=INK, line=1.2, style="--")
        card.box(492, 240 + 52 * tile, 182, 44, f"O of tile {tile}: 128 columns", fill=PAPER, edge=INK, size=8.8)
    card.text(721, 86, "s_full", size=8.6)
    card.text(719, 148, "p_full", size=8.6)
    card.arrow(180, 118, 236, 118, color=GREEN, line=2)
    card.text(208, 104, "k, v", size=8.6)
    card.arrow(400, 106, 476, 106, color="#b3423a", line=2)
    card.arrow(400, 150, 476, 258, color="#b3423a", line=2)
    card.text(416, 226, "o_done", size=8.6)
    card.arrow(476, 300, 400, 292, color=BLUE, line=2)
    card.arrow(318, 234, 318, 168, color=INK, line=1.2, style="--")
    card.text(350, 202, "o_ready", size=8.6)
    card.route((870, 284), (870, 372), (318, 372), (318, 334), color=INK, style="--")
    card.text(600, 384, "alpha_full: by how much O shrinks;  sum_full: 1 / sum of each row", size=8.8)
    card.arrow(236, 284, 180, 284, color=GREEN, line=2)
    card.text(208, 270, "out_full", size=8.6)
    card.text(500, 402, "Solid: data. Dashed: somebody may go on.", size=8.6, color=SOFT)
    return card
