"""Parts 2 to 4: transpose, cp.async, the TMA ring, the repair of a broken one, the first wgmma."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import torch

from instructor.checks.common import Draw
from instructor.checks.lab3_gluon.rings import expect_ahead, expect_each_once
from utils.checking import check
from utils.checking.gluon_launches import (
    Cancelling,
    async_copy_launch,
    repair_launch,
    ring_mistakes,
    tma_ring_launch,
    transpose_launch,
    wgmma_launch,
    wgmma_mistakes,
)
from utils.checking.kernel_exercises import Run, expect_kernel
from utils.gluon_cpu.timeline import Event

HALVES = (torch.float16, torch.bfloat16)


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


@check("2.2", "Transpose")
def transpose(source: str, seed=None):
    """Check the output at any size; loads and stores move whole sectors of 32 bytes."""
    draw = Draw(seed)
    for m, n in ((draw.size(1, 31), draw.size(33, 63)), (draw.size(65, 90), draw.size(1, 60))):
        launch, expected = transpose_launch(m, n, draw.normal)
        expect_kernel(source, launch, expected, rtol=0, atol=0, hint=f"X is ({m}, {n}). Where is row i, column j in Y?")
    launch, expected = transpose_launch(m, n, draw.normal, draw.size(1, 9))
    hint = f"Rows of X ({m}, {n}) lie x_stride = {launch.args['x_stride']} elements apart, and rows of Y y_stride = {launch.args['y_stride']}."
    expect_kernel(source, launch, expected, rtol=0, atol=0, hint=hint)
    for rows, columns, spare in (
        (2, 1, 0),
        (*draw.sizes(2, 1, 4), 0),
        (draw.size(1, 3), draw.size(2, 5), 8 * draw.size(1, 4)),
    ):
        launch, expected = transpose_launch(32 * rows, 32 * columns, draw.normal, spare)
        _expect_whole_sectors(expect_kernel(source, launch, expected, rtol=0, atol=0, programs=math.prod(launch.grid)))


def _expect_whole_sectors(run: Run) -> None:
    """Assert that each program loads and stores one tile, and touches no more sectors than it needs."""
    for events, kind in itertools.product(run.programs(), ("load", "store")):
        events = [e for e in events if e.kind == kind and e.bytes]
        touched, moved = sum(e.sectors for e in events), sum(e.bytes for e in events)
        worst = max(events, key=lambda e: 32 * e.sectors - e.bytes)
        if moved > 4 * 32 * 32:
            raise AssertionError(
                f"a program should {kind} one tile of 32 x 32 elements, 4096 bytes, and moves {moved}: others move the other tiles."
            )
        if 32 * touched > moved or 32 * worst.sectors > worst.bytes:
            raise AssertionError(
                f"the {kind} at line {worst.line} moves {worst.bytes} bytes and touches {worst.sectors} sectors of 32 "
                f"bytes; {worst.bytes // 32} would do. Neighbouring lanes should hold neighbours in memory: look at "
                "the layout's order and at its threads a warp."
            )


@check("3.1", "cp.async pipeline")
def async_copy(source: str, seed=None):
    """Check the output for every number of slots; copies must overlap."""
    draw = Draw(seed)
    for stages in (2, 4, 1, 3):
        tiles = draw.size(stages + 1, 7)
        launch, expected = async_copy_launch(128 * tiles + draw.size(1, 127), tiles, stages, 128, draw.normal)
        seeds = None, draw.size(1, 999)
        expect_kernel(source, launch, expected, rtol=0, atol=0, seeds=seeds, hint="Which tile lies in which slot?")
    _expect_ring(
        source,
        lambda stages, tiles: async_copy_launch(2 * 256 * tiles, tiles, stages, normal=draw.normal),
        copies=2,
        share=0.6,
        words="Issue the copy of tile i + STAGES - 1 before you wait for tile i, and wait for no more groups than tile i needs.",
    )


def _expect_ring(source: str, ring: Callable, copies: int, share: float, words: str) -> None:
    """Assert that two programs of a ring keep their slots filled, and that three slots beat one.

    Args:
        source: the text of the student's file.
        ring: gives the launch on two programs, and the outputs, for numbers of slots and of tiles.
        copies: copies of a tile.
        share: of the cycles with one slot that three slots may take.
        words: what to look at.
    """
    tiles, runs = 8, {}
    for stages in (1, 2, 3, 5):
        launch, expected = ring(stages, tiles)
        runs[stages] = expect_kernel(source, launch, expected, rtol=1e-4, atol=1e-3, programs=2)
    one, three = max(runs[1].cycles), max(runs[3].cycles)
    if three > share * one:
        raise AssertionError(
            f"three slots take {three:.0f} model cycles, one slot {one:.0f}: the copies wait for each other. {words}"
        )
    for stages, run in runs.items():
        for events in run.programs():
            expect_each_once(events, copies, tiles)
            expect_ahead(events, stages, tiles)


@check("3.2", "TMA ring")
def tma_ring(source: str, seed=None):
    """Check the output for every number of slots, also with fewer tiles than slots; copies must overlap."""
    draw = Draw(seed)
    for stages, columns in ((2, 64 * 5), (3, 8 * draw.size(9, 60)), (4, 64 + 8 * draw.size(0, 8)), (1, 64 * 3)):
        launch, expected = tma_ring_launch(draw.size(17, 40), columns, stages, draw.choice(HALVES), draw.normal)
        run = expect_kernel(
            source,
            launch,
            expected,
            rtol=1e-4,
            atol=1e-3,
            seeds=(None, draw.size(1, 999)),
            hint=f"With {stages} slots and {cdiv(columns, 64)} tiles: is each tile added once?",
            mistakes=partial(ring_mistakes, launch, expected),
            programs=launch.grid[0],
        )
        for events in run.programs():
            copies = [e for e in events if e.kind == "copy in" and e.unit == "TMA"]
            if len(copies) != cdiv(columns, 64):
                raise AssertionError(
                    f"a program with {cdiv(columns, 64)} tiles issues {len(copies)} TMA copies: each tile "
                    "should come once, by tma_load."
                )
    for dtype, scale in ((torch.float16, 512.0), (torch.bfloat16, 1.0)):
        launch, expected = tma_ring_launch(16, 64 * 3, 2, dtype, partial(_numbers_to_square, draw, scale))
        hint = "In 16 bits these squares overflow, or are rounded down: convert x with `.to(gl.float32)` before you square it."
        expect_kernel(source, launch, expected, rtol=1e-4, atol=1e-3, hint=hint)
    _expect_ring(
        source,
        lambda stages, tiles: tma_ring_launch(2 * 16, 64 * tiles, stages, draw.choice(HALVES), draw.normal),
        copies=1,
        share=0.65,
        words="Issue the copies of STAGES tiles before the loop, and refill a slot as soon as its tile is in registers.",
    )


def _numbers_to_square(draw: Draw, scale: float, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw numbers with random signs and powers of two whose squares bf16 rounds down by 0.27%, times `scale`."""
    noise = draw.normal(*shape)
    return (noise.sign() * 1.0546875 * 2.0 ** noise.abs().round().clamp(max=2) * scale).to(dtype)


MOST_REPAIRS = 6


def repaired(source: str, repairs: dict[str, str]) -> str:
    """Return the broken file with its repairs; each key is a whole line of the file without the indentation."""
    if not isinstance(repairs, dict) or not repairs:
        raise AssertionError("repairs() should be a dict {wrong line: what should stand there}, and not empty.")
    if len(repairs) > MOST_REPAIRS:
        raise AssertionError(f"repairs changes {len(repairs)} lines; {MOST_REPAIRS} at most. Change what is wrong.")
    lines = source.splitlines()
    before = tuple(line.strip() for line in lines)  # a replacement may read like another line of the file
    for wrong, right in repairs.items():
        places = [i for i, line in enumerate(before) if line == str(wrong).strip()]
        if len(places) != 1:
            raise AssertionError(f"`{wrong}` stands {len(places)} times in lab3_broken.py: copy one whole line of it.")
        indent = lines[places[0]][: len(lines[places[0]]) - len(lines[places[0]].lstrip())]
        lines[places[0]] = "\n".join(indent + line.strip() for line in str(right).splitlines()) or indent + "pass"
    return "\n".join(lines) + "\n"


@check("Bonus 3.4", "Repair")
def repairs(source: str, repairs, seed=None):
    """Check that the repaired ring is right with any number of slots and tiles and in any timing."""
    draw = Draw(seed)
    text = repaired(source, repairs())
    for stages in (1, 2, 3):
        launch, expected = repair_launch(stages, draw.size(4, 7), draw.normal)
        expect_kernel(text, launch, expected, rtol=0, atol=0, seeds=(None, *(draw.size(1, 9999) for _ in range(4))))
    # A ring of three slots must still overlap its copies with the work on other slots.
    cycles = {}
    for stages in (1, 3, 5):
        launch, expected = repair_launch(stages, 8, draw.normal)
        run = expect_kernel(text, launch, expected, rtol=0, atol=0)
        _expect_ring_of_two(run.programs()[0], 8, stages)
        cycles[stages] = run.cycles[0]
    with_one, with_three = cycles[1], cycles[3]
    if with_three > 0.8 * with_one:
        raise AssertionError(
            f"it runs, but three slots take {with_three:.0f} model cycles and one {with_one:.0f}: "
            "a repair serialized the ring."
        )


def _expect_ring_of_two(events: list[Event], tiles: int, stages: int) -> None:
    """Assert that the repaired kernel is still the ring that it was: one partition loads, the other scales and stores."""
    for kind, partition in (("copy in", "load_tiles"), ("copy out", "scale_tiles")):
        copies = [e for e in events if e.kind == kind]
        who = {e.partition.partition(" ")[0] for e in copies}
        if len(copies) != tiles or who != {partition}:
            raise AssertionError(
                f"{tiles} tiles take {tiles} copies {kind.removeprefix('copy ')}, all by {partition}; here are {len(copies)}, by "
                f"{', '.join(sorted(who)) or 'nobody'}. Repair the ring, and leave its two partitions their work."
            )
    if (used := len({e.buffer for e in events if e.kind == "copy in"})) != stages:
        raise AssertionError(f"{used} slots are used, and there are {stages}: tile i lies in slot i % STAGES.")


@check("4.1", "The first wgmma")
def wgmma(source: str, seed=None):
    """Check the output for several sizes and dtypes; the product runs on the tensor cores, and TMA stores it."""
    draw = Draw(seed)
    for block_n, dtype in ((128, torch.bfloat16), (32, torch.float16)):
        m, n, k = draw.size(65, 120), 8 * draw.size(9, 24), 64 * draw.size(2, 5) - 8 * draw.size(0, 7)
        launch, expected = wgmma_launch(m, n, k, block_n, dtype, draw.normal)
        run = expect_kernel(
            source,
            launch,
            expected,
            rtol=1e-2,
            atol=2e-2,
            seeds=(None, draw.size(1, 999)),
            hint="C = A Bᵀ: is B turned, is each step added to the accumulator, and does that stay in fp32?",
            mistakes=partial(wgmma_mistakes, launch, expected),
            programs=math.prod(launch.grid),
        )
        for events in run.programs():
            _expect_steps(events, cdiv(k, 64))
    for dtype in HALVES:
        launch, expected = wgmma_launch(
            draw.size(33, 64), 8 * draw.size(5, 16), 192, 64, dtype, Cancelling(draw.normal)
        )
        hint = "Two steps of these numbers cancel, and their sums overflow in 16 bits: the accumulator is fp32."
        expect_kernel(source, launch, expected, rtol=1e-2, atol=2e-2, hint=hint)


def _expect_steps(events: list[Event], steps: int) -> None:
    """Assert that a program loads and multiplies each step along K once, and stores its tile once, by TMA."""
    products = sum(e.kind == "wgmma" for e in events)
    if products != steps:
        raise AssertionError(f"{steps} steps along K, and {products} products by wgmma: one a step is right.")
    copies = sum(e.kind == "copy in" for e in events)
    if copies != 2 * steps:
        raise AssertionError(f"{steps} steps along K load {2 * steps} tiles, and {copies} copies were started.")
    stored = sum(e.kind == "copy out" for e in events)
    if stored != 1:
        raise AssertionError(
            f"C should leave by TMA, once: store it into c_tile, then tma_store. Here {stored} copies leave."
        )
