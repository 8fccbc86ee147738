"""Parts 2 to 4: transpose, cp.async, the TMA ring, the repair of a broken one, the first wgmma."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial

import torch

from instructor.checks.common import Draw, let_wait
from instructor.checks.lab3_gluon.work import look_at_work
from utils.checking import check
from utils.checking.gluon_launches import (
    async_copy_launch,
    repair_launch,
    ring_mistakes,
    tma_ring_launch,
    transpose_launch,
    wgmma_launch,
    wgmma_mistakes,
)
from utils.checking.kernel_exercises import Run, expect_kernel, simulate_launch
from utils.gluon_cpu.timeline import Event

HALVES = (torch.float16, torch.bfloat16)
MORE_WORK = 1.3  # times the work of a ring of three slots that a ring of one may do; 1.0 in the model answers


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
    launch, expected = transpose_launch(64, 32, draw.normal)
    run = expect_kernel(source, launch, expected, rtol=0, atol=0, programs=2)
    if any(e.kind.startswith("shared") for e in run.events):
        let_wait(
            "takes its tile through shared memory by stores and loads of its own, and the question asks for gl.convert_layout"
        )
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
    look_at_work(source, "transpose", draw.normal, "One load and one store move a whole tile.")


def expect_same_work(runs: dict[int, Run]) -> None:
    """Assert that a ring of one slot does the work of one of three: if it wastes time, a comparison with it says nothing.

    Args:
        runs: {number of slots: its simulation, with a timeline}.
    """
    busy, copies = {}, {}
    for stages, run in runs.items():
        of_program = [e for e in run.events if not e.kind.endswith("wait")]
        copies[stages] = sum(e.kind == "copy in" for e in of_program)
        busy[stages] = sum(e.end - e.start for e in of_program if e.kind not in ("copy in", "copy out", "wgmma"))
    few, many = min(runs), max(runs)
    if copies[few] > copies[many] or busy[few] > MORE_WORK * busy[many]:
        raise AssertionError(
            f"with {few} slot the kernel starts {copies[few]} copies and works for {busy[few]:.0f} model cycles, with {many} "
            f"slots {copies[many]} and {busy[many]:.0f}. The same tiles take the same work, however many slots there are; "
            "only the time that it waits is shorter."
        )


@check("3.1", "cp.async pipeline")
def async_copy(source: str, seed=None):
    """Check the output for every number of slots; copies must overlap."""
    draw, cycles, runs = Draw(seed), {}, {}
    for stages in (2, 4, 1, 3):
        tiles = draw.size(stages + 1, 7)
        n = 128 * tiles + draw.size(1, 127)
        launch, expected = async_copy_launch(n, tiles, stages, 128, draw.normal)
        expect_kernel(
            source,
            launch,
            expected,
            rtol=0,
            atol=0,
            seeds=(None, draw.size(1, 999)),
            hint="Which tile lies in which slot?",
        )
    for stages in (1, 3):
        launch, expected = async_copy_launch(2 * 256 * TILES, TILES, stages, normal=draw.normal)
        runs[stages] = expect_kernel(source, launch, expected, rtol=0, atol=0, programs=2)
        cycles[stages] = max(runs[stages].cycles)
    expect_same_work(runs)
    expect_in_flight(runs[3], 2)
    tiles = draw.size(MANY_SLOTS + 2, 9)
    launch, expected = async_copy_launch(2 * 256 * tiles, tiles, MANY_SLOTS, normal=draw.normal)
    for events in expect_kernel(source, launch, expected, rtol=0, atol=0, programs=2).programs():
        expect_ahead(events, MANY_SLOTS, tiles)
    if cycles[3] > 0.6 * cycles[1]:
        raise AssertionError(
            f"three slots take {cycles[3]:.0f} model cycles, one slot {cycles[1]:.0f}: the copies wait for each other. "
            "Issue the copy of tile i + STAGES - 1 before you wait for tile i, and wait for no more groups than tile i needs."
        )
    look_at_work(source, "async_copy", draw.normal, "Each element is added once.")


@check("3.2", "TMA ring")
def tma_ring(source: str, seed=None):
    """Check the output for every number of slots, also with fewer tiles than slots; copies must overlap."""
    draw, cycles, runs = Draw(seed), {}, {}
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
    for stages in (1, 3):
        launch, expected = tma_ring_launch(32, 64 * TILES, stages, normal=draw.normal)
        runs[stages] = expect_kernel(source, launch, expected, rtol=1e-4, atol=1e-3, programs=2)
        cycles[stages] = max(runs[stages].cycles)
    expect_same_work(runs)
    expect_in_flight(runs[3], 1)
    tiles = draw.size(MANY_SLOTS + 2, 9)
    launch, expected = tma_ring_launch(32, 64 * tiles, MANY_SLOTS, normal=draw.normal)
    for events in expect_kernel(source, launch, expected, rtol=1e-4, atol=1e-3, programs=2).programs():
        expect_ahead(events, MANY_SLOTS, tiles)
    for dtype, scale in ((torch.float16, 512.0), (torch.bfloat16, 1.0)):
        launch, expected = tma_ring_launch(16, 64 * 3, 2, dtype, partial(_numbers_to_square, draw, scale))
        hint = "In 16 bits these squares overflow, or are rounded down: convert x with `.to(gl.float32)` before you square it."
        expect_kernel(source, launch, expected, rtol=1e-4, atol=1e-3, hint=hint)
    if cycles[3] > 0.65 * cycles[1]:
        raise AssertionError(
            f"three slots take {cycles[3]:.0f} model cycles, one slot {cycles[1]:.0f}: the copies wait for each other. "
            "Issue the copies of STAGES tiles before the loop, and refill a slot as soon as its tile is in registers."
        )
    look_at_work(source, "tma_ring", draw.normal, "Each tile is squared and added up once.")


def _numbers_to_square(draw: Draw, scale: float, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw numbers with random signs and powers of two whose squares bf16 rounds down by 0.27%, times `scale`."""
    noise = draw.normal(*shape)
    return (noise.sign() * 1.0546875 * 2.0 ** noise.abs().round().clamp(max=2) * scale).to(dtype)


TILES = 8  # of the rings that are timed
TILES_IN_FLIGHT = 1.2  # on average, with three slots: 1.8 and 2.2 in the model answers, less than 0.9 without overlap


def expect_in_flight(run: Run, copies: int) -> None:
    """Assert that in a ring of three slots more than one tile is on its way at a time, whatever a ring of one slot does.

    Args:
        run: the simulation with three slots, with a timeline of all programs.
        copies: copies of a tile.
    """
    for number, events in enumerate(run.programs()):
        _expect_in_flight(events, run.cycles[number], copies)


def _expect_in_flight(events: list[Event], cycles: float, copies: int) -> None:
    times = [e.end - e.start for e in events if e.kind == "copy in"]
    if len(times) != copies * TILES:
        raise AssertionError(
            f"a program with {TILES} tiles starts {len(times)} copies; {copies * TILES} bring each tile once."
        )
    if loads := [e for e in events if e.kind == "load"]:
        raise AssertionError(f"line {loads[0].line} loads from memory into registers: all tiles come through the ring.")
    read = sum(e.kind == "shared load" for e in events)
    if read != len(times):
        raise AssertionError(
            f"{len(times)} tiles arrive in shared memory, and {read} are read from there: read each once."
        )
    under_way = sum(times) / copies / cycles
    if under_way < TILES_IN_FLIGHT:
        raise AssertionError(
            f"with three slots {under_way:.2f} tiles are on their way at a time, on average: the copies wait for each other. "
            "Issue the copies of the next tiles before you wait for this one."
        )


MANY_SLOTS = 5


def expect_ahead(events: list[Event], stages: int, tiles: int) -> None:
    """Assert that the copies of a program run as far ahead as the slots allow, all the time.

    When tile t is read, every other slot has been ordered anew: t + `stages` tiles in all, unless there are fewer. A ring that
    uses two of five slots, or that is emptied as a whole before it is filled again, has ordered fewer.
    """
    for ring in {e.buffer.partition("[")[0] for e in events if e.kind == "copy in"}:
        mine = [e for e in events if e.buffer.partition("[")[0] == ring]
        copies = sorted((e for e in mine if e.kind == "copy in"), key=lambda e: e.start)
        if len(copies) != tiles:
            raise AssertionError(
                f"a program with {tiles} tiles starts {len(copies)} copies into {ring}: each tile comes once."
            )
        if (used := len({e.buffer for e in copies})) != stages:
            raise AssertionError(f"{used} slots are used, and there are {stages}: tile i lies in slot i % STAGES.")
        for tile, copy in enumerate(copies):
            reads = [
                e.start for e in mine if e.kind == "shared load" and e.buffer == copy.buffer and e.start >= copy.start
            ]
            issued = sum(e.kind == "issue" and e.start <= min(reads, default=copy.end) for e in mine)
            if issued < min(tiles, tile + stages):
                raise AssertionError(
                    f"with {stages} slots, {issued} copies into {ring} have been issued when tile {tile} is read, and "
                    f"{min(tiles, tile + stages)} should be: use every slot, and refill each as soon as it is free."
                )
        if any(copy.buffer != f"{ring}[{tile % stages}]" for tile, copy in enumerate(copies)):
            let_wait("puts the tiles into other slots than the question says: tile i into slot i % STAGES")


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
    launch, _ = repair_launch(3, 8, draw.normal)
    slots = {n: replace(launch, args={**launch.args, "STAGES": n}) for n in (1, 3)}
    runs = {n: simulate_launch(text, ring, timeline=True)[1] for n, ring in slots.items()}
    expect_same_work(runs)
    _expect_ring_of_two(runs[3].programs()[0], 8, 3)
    with_one, with_three = (runs[n].cycles[0] for n in (1, 3))
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
        m, n, k = draw.size(65, 120), 8 * draw.size(9, 24), 8 * draw.size(9, 40)
        launch, expected = wgmma_launch(m, n, k, block_n, dtype, draw.normal)
        run = expect_kernel(
            source,
            launch,
            expected,
            rtol=1e-2,
            atol=2e-2,
            seeds=(None, draw.size(1, 999)),
            hint="C = A Bᵀ: is B turned, and is each step added to the accumulator?",
            mistakes=partial(wgmma_mistakes, launch, expected),
            programs=math.prod(launch.grid),
        )
        for events in run.programs():
            _expect_steps(events, cdiv(k, 64))
    look_at_work(source, "wgmma", draw.normal, "The product of a step adds to the accumulator.")


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
