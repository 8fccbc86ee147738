"""The visible checks of lab 3. They choose the launches, and `rules` judges them."""

from __future__ import annotations

from pathlib import Path

import torch

from utils.checking import expect_items, visible
from utils.checking.gluon_launches import (
    async_copy_launch,
    attention_inputs,
    attention_launch,
    cancelling,
    edge_inputs,
    falling_inputs,
    overlap_launch,
    repair_launch,
    tcgen05_launch,
    tma_ring_launch,
    transpose_launch,
    two_softmax_launch,
    wgmma_launch,
)
from utils.checking.labs.lab3_gluon import attention_rules, rules

HALF, BRAIN = torch.float16, torch.bfloat16
TWO = (None, 1)  # the cost model's own timing, and a second timing

# ---- Part 1 and 2: numbers ---------------------------------------------------------------------------------------


@visible("1.1", "What a tile costs")
def check_tile_cycles(tile_cycles):
    """Compare the cycles of three units for two tiles."""
    rules.expect_cycles(tile_cycles, (100, 40, 50), (195.3125, 250, 400))
    rules.expect_cycles(tile_cycles, (192, 96, 64), (1152, 1152, 1228.8))


@visible("1.1", "What a tile needs")
def check_tile_budget(shared_bytes, registers_per_thread):
    """Compare the shared memory of two tiles, and the registers of two tiles."""
    rules.expect_shared_bytes(shared_bytes, (1, 16, 10, 2), q=1280, ring=1280)
    rules.expect_shared_bytes(shared_bytes, (3, 96, 128, 4), q=49_152, ring=196_608)
    rules.expect_registers(registers_per_thread, (20, 40), right=30)
    rules.expect_registers(registers_per_thread, (160, 64), right=112)


@visible("2.1", "Who holds an element")
def check_owner(owner):
    """Compare elements of three layouts; each element shows a usual mistake."""
    along, down = ((1, 4), (4, 8), (2, 1), (1, 0)), ((4, 1), (8, 4), (1, 4), (0, 1))
    odd = ((2, 2), (4, 8), (2, 2), (0, 1))
    backwards = "`order` names the fastest dimension first."
    again = "Repetitions are counted in the layout's order, too."
    pieces = "Registers count first within the piece of a thread, and then over the repetitions."
    dropped = "A tensor that is larger than the layout's tile repeats it: each repetition takes further registers."
    for layout, row, column, shape, right, known in (
        (along, 0, 0, (8, 32), (0, 0, 0), {}),
        (along, 0, 3, (8, 32), (0, 0, 3), {}),
        (along, 0, 4, (8, 32), (0, 1, 0), {(0, 4, 0): backwards}),
        (along, 1, 0, (8, 32), (0, 8, 0), {(0, 1, 0): backwards}),
        (along, 5, 0, (8, 32), (1, 8, 0), {(1, 1, 0): backwards}),
        (along, 0, 33, (8, 64), (0, 0, 5), {(0, 0, 3): pieces, (0, 0, 1): dropped}),
        (along, 8, 1, (16, 64), (0, 0, 9), {}),
        (down, 5, 3, (32, 16), (0, 25, 1), {(0, 7, 1): backwards}),
        (down, 5, 7, (32, 16), (1, 25, 1), {}),
        (down, 37, 3, (64, 32), (0, 25, 5), {(0, 25, 9): again, (0, 25, 1): dropped}),
        (down, 37, 23, (64, 32), (1, 25, 13), {}),
        (odd, 9, 41, (32, 64), (1, 16, 11), {(1, 16, 7): again, (1, 16, 14): pieces}),
    ):
        got = expect_items(owner(row, column, shape, *layout), "warp, lane, register", "owner(...)")
        if tuple(got) == right:
            continue
        hint = known.get(tuple(got), "")
        if got[1] >= 32:
            hint = "A warp has lanes 0 to 31: its grid of pieces repeats from warp to warp."
        part = next(name for name, a, b in zip(("warp", "lane", "register"), got, right, strict=True) if a != b)
        raise AssertionError(
            f"element ({row}, {column}) of {shape} in BlockedLayout{layout} is held by (warp, lane, register) {right}, "
            f"not {tuple(got)}: the {part} is wrong. {hint}"
        )


# ---- kernels: the last launch is compiled, too -------------------------------------------------------------------


@visible("2.2", "Transpose")
def check_transpose(text: str):
    """Check whole and incomplete tiles, with and without unused elements between the rows."""
    sizes = ((32, 64), (96, 32), (3, 65), (33, 1), (45, 70))
    rules.transpose(text, [transpose_launch(m, n, spare=spare) for m, n in sizes for spare in (0, 3)], compiles=True)


@visible("3.1", "cp.async pipeline")
def check_async_copy(text: str):
    """Check one to four slots."""
    tries = [async_copy_launch(*sizes) for sizes in ((2051, 5, 2), (700, 3, 1), (1089, 4, 4), (2001, 4, 3))]
    rules.async_copy(
        text, tries, lambda stages, tiles: async_copy_launch(256 * tiles, tiles, stages), (1, 3), TWO, True
    )


@visible("3.2", "TMA ring")
def check_tma_ring(text: str):
    """Check one to four slots, also with fewer tiles than slots."""
    sizes = ((16, 320, 2, HALF), (19, 72, 4, HALF), (16, 192, 1, HALF), (40, 440, 3, BRAIN))
    tries = [tma_ring_launch(*each) for each in sizes]
    rules.tma_ring(text, tries, lambda stages, tiles: tma_ring_launch(16, 64 * tiles, stages), (1, 3), TWO, True)


@visible("Bonus 3.4", "Repair")
def check_repairs(text: str, repairs):
    """Check three rings in four timings; write the file with the repairs, so that a report's lines can be found."""
    text = rules.repair_text(text, repairs())
    Path("lab3_repaired.py").write_text(text)
    rules.repairs(text, [repair_launch(stages) for stages in (2, 1, 3)], repair_launch, (1, 3), (None, 1, 2, 3))


@visible("4.1", "The first wgmma")
def check_wgmma(text: str):
    """Check several sizes and dtypes, and sums that 16 bits cannot hold."""
    sizes = ((64, 128, 64, 128, BRAIN), (129, 520, 72, 128, BRAIN), (100, 72, 200, 32, HALF))
    rules.matmul(text, [wgmma_launch(*each) for each in sizes], TWO, compiles=True)
    rules.cancelling(text, [wgmma_launch(40, 72, 192, 64, HALF, cancelling())])


@visible("5.1", "Online softmax in a kernel")
def check_softmax(text: str):
    """Check the edges of the mask, large scores, and scores that fall or rise from block to block."""
    inputs = (
        edge_inputs(70, 3, dtype=HALF),
        edge_inputs(60, 65),
        edge_inputs(60, 1),
        attention_inputs(1, 64, 130, 64, 60.0),
        falling_inputs(False),
        falling_inputs(True),
        attention_inputs(2, 100, 200, 128, dtype=HALF),
    )
    attention_rules.softmax(text, [attention_launch("lab3_softmax.py", 64, *each) for each in inputs], compiles=True)


@visible("5.2", "Producer and consumers")
def check_specialized(text: str):
    """Check one to three slots in three timings."""
    tries = [
        attention_launch("lab3_specialized.py", 128, *edge_inputs(sq, sk, dtype=dtype), STAGES=stages)
        for sq, sk, stages, dtype in ((128, 257, 2, BRAIN), (70, 193, 1, BRAIN), (100, 195, 3, HALF))
    ]
    attention_rules.specialized(text, tries, (None, 1, 2), compiles=True)


@visible("5.3", "Overlap")
def check_overlap(text: str):
    """Check two and three slots, large scores, and the share of the softmax that runs during a product."""
    inputs = (
        (edge_inputs(128, 257), 2),
        (attention_inputs(1, 128, 256, 64, 20.0), 2),
        (edge_inputs(100, 195, dtype=HALF), 3),
    )
    attention_rules.overlap(text, [overlap_launch(*each, stages=stages) for each, stages in inputs], TWO, compiles=True)
    (run,) = attention_rules.overlap(text, [overlap_launch(*attention_inputs(1, 128, 512, d=128))], (None,))
    attention_rules.expect_share(run)


@visible("Bonus 6.1", "The same product by tcgen05")
def check_tcgen05(text: str):
    """Check sizes as in Question 4.1, with tiles of 128 rows."""
    sizes = ((128, 128, 64, 128, BRAIN), (200, 264, 136, 128, BRAIN), (100, 72, 200, 32, HALF))
    rules.matmul(text, [tcgen05_launch(*each) for each in sizes], TWO)
    rules.cancelling(text, [tcgen05_launch(40, 72, 192, 64, HALF, cancelling())])


@visible("Bonus 6.2", "Two softmaxes")
def check_two_softmax(text: str):
    """Check one to eight blocks of keys in three timings, also with rising scores, for which O has to shrink."""
    tries = [two_softmax_launch(*edge_inputs(sq, sk)) for sq, sk in ((256, 257), (200, 70))]
    tries.append(two_softmax_launch(*attention_inputs(1, 130, 512, 64, 20.0)))
    attention_rules.two_softmax(text, tries, (None, 1, 2))
