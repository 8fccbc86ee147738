"""GEMM tiles, the memory hierarchy, the roofline, kernel fusion."""

from __future__ import annotations

from tools.figures.drawing import BLUE, BROWN, GREEN, GREY, INK, ORANGE, PAPER, SOFT, TINT, Card
from utils.config import GPU_SPECS


def gemm_tiling() -> Card:
    """Naive and tiled GEMM: what is read for one element of C, and for one tile of it."""
    card = Card(
        1084,
        505,
        "C = A B, naive and tiled",
        (
            "Left: the naive kernel reads a row of A and a column of B for each element of C. Right: the tiled kernel "
            "reads a strip of A and a strip of B for each tile of C, one pair of tiles at a time; tiles at the border are "
            "masked."
        ),
    )
    cell, n, tile = 14, 10, 4
    by, cy = 90, 290

    def matrices(x: float, title: str, reads: str, colors: tuple) -> None:
        """A left of C, B above C; `colors` are three functions of row and column."""
        ax, cx = x + 10, x + 208
        for left, top, fill in zip((ax, cx, cx), (cy, by, cy), colors, strict=True):
            card.grid(left, top, n, n, cell, fill)
        card.text(x, 58, title, size=10.5, weight="bold", ha="left")
        card.text(x, 480, reads, size=10.5, ha="left")
        for u, v, dim in (
            (ax - 9, cy + 70, "M"),
            (ax + 70, cy - 11, "K"),
            (cx - 9, by + 70, "K"),
            (cx + 70, by - 11, "N"),
        ):
            card.text(u, v, dim, color=SOFT, size=8.5)
        for u, v, name, color in (
            (ax + 20, cy - 13, "A", BLUE),
            (cx + 20, by - 13, "B", "#8a5800"),
            (cx + 20, cy - 13, "C", GREEN),
        ):
            card.text(u, v, name, weight="bold", color=color, size=11)

    row, col = 6, 3
    matrices(
        30,
        "One element of C at a time",
        "reads in all:  2 M N K numbers",
        (
            lambda i, j: BLUE if i == row else PAPER,
            lambda i, j: ORANGE if j == col else PAPER,
            lambda i, j: GREEN if (i, j) == (row, col) else PAPER,
        ),
    )
    card.text(394, 130, "a row of A and\na column of B:\n2 K numbers for\none element", ha="left", size=8.8)
    card.path((505, 52), (505, 480), color="#dddddd", line=1)

    down, across, step = range(4, 8), range(0, 4), range(4, 8)
    matrices(
        530,
        "One tile of C at a time",
        "reads in all:  M N K (1/tile_m + 1/tile_n) numbers",
        (
            lambda i, j: BLUE if i in down and j in step else TINT[BLUE] if i in down else PAPER,
            lambda i, j: ORANGE if i in step and j in across else TINT[ORANGE] if j in across else PAPER,
            lambda i, j: GREEN if i in down and j in across else PAPER,
        ),
    )
    side = tile * cell
    for left, top in ((540, cy), (738, by), (738, cy)):
        for i in range(3):
            for j in range(3):  # the last tile in each direction sticks out of the matrix
                card.rect(
                    left + j * side,
                    top + i * side,
                    side,
                    side,
                    edge=GREY,
                    line=0.8,
                    zorder=3,
                    style=(0, (2, 1.5)) if 2 in (i, j) else "-",
                )
    card.text(
        918,
        150,
        "each step along K:\na tile of A\n(tile_m × tile_k) and\none of B\n(tile_k × tile_n)\ncome on chip, used\n"
        "tile_n, tile_m times",
        ha="left",
        size=8.8,
    )
    card.text(
        918,
        420,
        "dashed: boundary tiles;\na slice is shorter there\n(1.2), a load is masked\n(1.5)",
        ha="left",
        size=8.8,
        color=SOFT,
    )
    return card


def memory_hierarchy() -> Card:
    """The memories of one H200, from registers to the host, with size, bandwidth and latency."""
    spec = GPU_SPECS["H200"]
    sms = spec["sm_count"]
    # Per SM: 65 536 registers of 4 bytes; 128 bytes a clock from shared memory at 1.98 GHz (CUDA C++ programming
    # guide, Hopper tuning guide). Latencies: orders of magnitude from published microbenchmarks of Hopper.
    shared_tb_s = sms * 128 * 1.98e9 / 1e12
    rows = [
        (
            "registers",
            f"256 KB an SM, {256 * sms / 1024:.0f} MB in all",
            "what the units need",
            "about a cycle",
            "one thread: operands, accumulators",
            BLUE,
        ),
        (
            "shared memory and L1",
            f"{spec['sram_per_sm_kb']} KB an SM, {spec['sram_per_sm_kb'] * sms / 1024:.0f} MB in all",
            f"about {shared_tb_s:.0f} TB/s",
            "tens of cycles",
            "one thread block: tiles of A, B, K, V",
            "#2f8ac4",
        ),
        (
            "L2 cache",
            f"{spec['l2_mb']} MB",
            "several TB/s",
            "hundreds of cycles",
            "all SMs: what was read a moment ago",
            "#7fb5da",
        ),
        (
            "HBM, “global memory”",
            f"{spec['memory_gb']} GB",
            f"{spec['memory_bandwidth_tb_s']:g} TB/s",
            "near a thousand cycles",
            "the process: weights, activations, KV cache",
            "#b8d6ea",
        ),
        (
            "host memory, over PCIe 5",
            "hundreds of GB",
            "0.06 TB/s each way",
            "microseconds",
            "the machine: data sets, checkpoints",
            "#e2e2e2",
        ),
    ]
    card = Card(
        940,
        412,
        f"Where data can be: one {spec['full_name']}",
        (
            "Five levels of memory. Each is slower than the one above it, and none is smaller: registers, shared memory and L1, "
            "L2 cache, HBM, host memory."
        ),
    )
    top, height = 88, 58
    for x, words in ((395, "size"), (545, "bandwidth"), (668, "latency")):
        card.text(x, 68, words, size=9, color=SOFT, style="italic")
    card.text(730, 68, "who shares it: what lies there", size=9, color=SOFT, style="italic", ha="left")
    for i, (name, size, bandwidth, latency, use, color) in enumerate(rows):
        y, half = top + i * height, 75 + 14 * i
        dark = i < 2
        next_half = half + 14
        card.shape(
            (165 - half, y),
            (165 + half, y),
            (165 + next_half - 3, y + height - 6),
            (165 - next_half + 3, y + height - 6),
            fill=color,
        )
        card.text(165, y + 26, name, weight="bold", size=9, color=PAPER if dark else INK)
        middle = y + 26
        for x, words, limit in ((395, size, 20), (545, bandwidth, 18), (668, latency, 16)):
            card.text(x, middle, _fold(words, limit), size=8.8)
        card.text(730, middle, _fold(use, 26), size=8.8, ha="left")
        if i:
            card.path((335, y - 3), (918, y - 3), color="#e0e0e0", line=0.8)
    card.text(
        22,
        394,
        "Each step down: larger, slower, farther. A fast kernel reads from HBM once and works from the "
        "levels above it.",
        size=9,
        ha="left",
        color=SOFT,
    )
    return card


def _fold(text: str, limit: int) -> str:
    """Break a line at spaces so that no piece exceeds `limit` characters by much."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > limit and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def roofline_anatomy() -> Card:
    """The two regimes, the ridge, and a measured point below the roof with its gap."""
    card = Card(
        860,
        500,
        "Anatomy of a roofline",
        (
            "Attainable performance over arithmetic intensity, both logarithmic: a slope set by memory bandwidth, a "
            "ceiling set by peak compute, the ridge between them, and a measured point whose distance to the roof is "
            "the gap."
        ),
    )
    left, right, top, bottom = 92, 820, 62, 428
    ridge, roof = 420, 140
    start = (left, roof + (ridge - left) * 0.72)
    card.shape((left, start[1]), (ridge, roof), (ridge, bottom), (left, bottom), fill=TINT[ORANGE])
    card.shape((ridge, roof), (right, roof), (right, bottom), (ridge, bottom), fill=TINT[BLUE])
    card.path((left, bottom), (ridge, bottom), (right, bottom), color=SOFT)
    card.path((left, top), (left, bottom), color=SOFT)
    card.path(start, (ridge, roof), (right, roof), color=INK, line=2.4)
    card.path((ridge, roof), (ridge, bottom), color=SOFT, style=(0, (3, 3)))
    card.text((left + right) / 2, 471, "arithmetic intensity: FLOPs done for each byte moved (log scale)")
    card.text(38, (top + bottom) / 2, "performance: FLOP/s (log scale)", rotation=90)
    card.text(236, 208, "slope: memory bandwidth (bytes/s)\nattainable = intensity × bandwidth", rotation=35.8, size=9)
    card.text(right - 8, roof - 18, "ceiling: peak compute (FLOP/s)", ha="right")
    card.text(222, 400, "memory-bound", size=11, weight="bold", color=BROWN)
    card.text(700, 400, "compute-bound", size=11, weight="bold", color="#00507d")
    card.text(ridge, bottom + 16, "ridge point = peak compute / bandwidth", size=9, weight="bold")
    card.dot(ridge, roof, 6, fill=INK)
    card.text(ridge - 4, roof - 22, "the ridge", weight="bold")
    for x, y0, y1, name, gap in (
        (215, start[1] - (215 - left) * 0.72, 352, "GEMV", "gap: reads that stall\nor repeat"),
        (600, roof, 232, "GEMM", "gap: units that wait,\ntiles that do not fit"),
    ):
        card.path((x, y0), (x, y1), color=INK, line=1.1)
        card.dot(x, y0, 8, fill=PAPER, edge=INK, line=1.5)
        card.dot(x, y1, 8.5, fill=BLUE, edge=PAPER)
        card.text(x + 13, y0 + 18 if name == "GEMM" else y0 + 8, "predicted: on the roof", ha="left", size=8.5)
        card.text(x + 13, (y0 + y1) / 2 + (12 if name == "GEMM" else 6), gap, ha="left", size=8.5, color=SOFT)
        card.text(x + 13, y1 + 2, f"{name}, measured", ha="left", size=9, weight="bold", color="#00507d")
    return card


def kernel_fusion() -> Card:
    """tanh-GELU by hand, nine kernels with memory between them, against one fused kernel."""
    # gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): each kernel with the tensors it reads and writes.
    steps = [
        ("x · x", 2),
        ("x² · x", 2),
        ("0.0447 · x³", 1),
        ("x + …", 2),
        ("0.798 · …", 1),
        ("tanh", 1),
        ("0.5 · x", 1),
        ("1 + …", 1),
        ("… · …", 2),
    ]
    moved = sum(reads + 1 for _, reads in steps)
    card = Card(
        940,
        440,
        "Kernel fusion: tanh-GELU of one tensor",
        (
            f"By hand: {len(steps)} kernels, each reads its operands from memory and writes its result back, {moved} "
            "tensors moved. Fused: one kernel, the steps stay in registers, 2 tensors moved."
        ),
    )
    width, x0 = 98, 30
    card.text(30, 58, f"By hand: {len(steps)} launches", size=10.5, weight="bold", ha="left")
    card.box(x0, 178, 880, 30, "memory (HBM)", fill=TINT[ORANGE], edge=ORANGE, size=9.5)
    for i, (name, reads) in enumerate(steps):
        x = x0 + i * width
        card.box(x + 3, 86, width - 14, 38, name, fill=TINT[BLUE], edge=BLUE, size=9.5)
        for r in range(reads):
            card.arrow(x + 22 + 12 * r, 177, x + 22 + 12 * r, 126, color="#9a6200")
        card.arrow(x + 70, 125, x + 70, 176, color=BLUE)
    card.text(
        30,
        228,
        f"memory traffic: {moved} times the tensor; between launches every intermediate goes out to "
        "memory and comes back",
        ha="left",
        size=9,
    )
    card.path((30, 252), (910, 252), color="#dddddd", line=1)
    card.text(30, 276, "Fused: 1 launch", size=10.5, weight="bold", ha="left")
    card.box(x0 + 150, 296, 595, 48, fill=TINT[BLUE], edge=BLUE)
    card.arrow(x0 + 165, 331, x0 + 730, 331, color=BLUE)
    for i, (name, _) in enumerate(steps):
        card.text(x0 + 155 + (i + 0.5) * 65, 312, name, size=8.2)
    card.text(785, 320, "intermediates stay\nin registers", ha="left", size=9, color=SOFT)
    card.box(x0, 382, 880, 30, "memory (HBM)", fill=TINT[ORANGE], edge=ORANGE, size=9.5)
    card.arrow(222, 381, 222, 346, color="#9a6200")
    card.arrow(718, 345, 718, 380, color=BLUE)
    card.text(230, 364, "read x", ha="left", size=8.8)
    card.text(710, 364, "write gelu(x)", ha="right", size=8.8)
    card.text(455, 364, f"traffic: 2 times the tensor, {moved / 2:g} times less", size=9, weight="bold")
    return card


def gpu_in_ten_minutes() -> Card:
    """A GPU as a newcomer needs it: the CPU, the stream of kernels, SMs with warps and tensor cores, L2 and HBM."""
    spec = GPU_SPECS["H200"]
    card = Card(
        1000,
        500,
        f"A GPU: one {spec['full_name']}",
        (
            "Left: the CPU launches kernels into a stream. Middle: the GPU takes one kernel after the other and deals its "
            "thread blocks to the SMs, each with warps, tensor cores, registers and shared memory. Below: the L2 cache, "
            "which all SMs share, and the HBM."
        ),
    )
    card.box(30, 70, 150, 62, "CPU: Python, PyTorch,\nthe driver", fill=TINT[ORANGE], edge=ORANGE, size=9)
    card.text(105, 152, "launches a kernel\nin some microseconds,\nand goes on", size=8.5, color=SOFT, va="top")
    for i, name in enumerate(("GEMM", "add", "norm")):
        card.box(215 + 62 * i, 84, 54, 34, name, fill=PAPER, edge=BLUE, size=8.8)
    card.text(303, 66, "a stream: kernels in a queue", size=9, color=SOFT, style="italic")
    card.arrow(180, 101, 212, 101)
    card.arrow(402, 101, 436, 101)
    card.box(436, 60, 534, 418, fill="#f8fafc", edge=SOFT, round=8)
    card.text(452, 80, "GPU", size=11, weight="bold", ha="left")
    card.text(
        500,
        80,
        "deals the blocks of a kernel to its SMs; the rest waits for the next wave",
        size=8.5,
        ha="left",
        color=SOFT,
    )
    for x in (452, 804):
        card.box(x, 102, 150, 214, fill=PAPER, edge=INK)
        card.text(x + 75, 116, "SM", size=9.5, weight="bold")
        card.box(x + 8, 128, 134, 84, fill=TINT[BLUE], edge=BLUE)
        card.text(x + 75, 139, "a thread block", size=8.3)
        for row in range(4):
            card.rect(x + 16, 150 + 14 * row, 118, 9, fill=BLUE if row == 0 else "#a9cbe6")
        card.box(x + 8, 218, 134, 26, "tensor cores", fill=GREEN, edge=GREEN, color=PAPER, size=8.5, weight="bold")
        card.box(x + 8, 249, 134, 24, "registers 256 KB", fill=PAPER, edge=GREY, size=8)
        card.box(x + 8, 278, 134, 30, "shared memory 228 KB", fill=PAPER, edge=GREY, size=7)
    card.text(703, 200, f"{spec['sm_count']} SMs", size=12, weight="bold", color=SOFT)
    card.path((438, 155), (468, 155), color=BLUE)
    card.text(424, 172, "a warp:\n32 threads that take\nthe same step", size=8.5, color=BLUE, ha="right")
    card.text(424, 232, "multiply small\nmatrices: nearly\nall the FLOP/s", size=8.5, color=GREEN, ha="right")
    card.box(452, 336, 502, 36, f"L2 cache, {spec['l2_mb']} MB: shared by all SMs", fill="#cfe2f1", edge=BLUE, size=9)
    card.box(
        452,
        402,
        502,
        58,
        f"HBM, {spec['memory_gb']} GB: weights, activations, KV cache",
        fill="#b8d6ea",
        edge=BLUE,
        size=9.5,
        weight="bold",
    )
    for x in (527, 879):
        card.arrow(x, 334, x, 318, head="<|-|>")
    card.arrow(703, 400, 703, 374, head="<|-|>", line=2.2, color=BLUE)
    card.text(712, 387, f"{spec['memory_bandwidth_tb_s']:g} TB/s: the narrowest pipe", size=8.8, ha="left", color=BLUE)
    card.text(
        30,
        330,
        "Three limits of a kernel:\n\n1  compute: its FLOPs over the peak\n2  memory: its bytes over the bandwidth\n"
        "3  launch: the CPU cannot feed it faster\n\nThe slowest of the three decides.",
        size=9.3,
        ha="left",
        va="top",
    )
    return card
