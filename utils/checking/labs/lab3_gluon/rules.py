"""Rules for the kernels of lab 3: right values, and in the simulator's events good layouts, rings and products.

The notebook's checks and the grader's checks use the same rules with different launches. A rule takes the text of a
student's file and the launches, and raises AssertionError with a sentence for the student.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from utils.checking import expect_items, expect_number
from utils.checking.gluon_launches import ring_mistakes, transpose_mistakes, wgmma_mistakes
from utils.checking.kernel_exercises import Seeds, Try, run_tries
from utils.gluon_cpu.timeline import Event

Ring = Callable[[int, int], Try]  # returns the launch for a number of slots and a number of tiles
MOST_REPAIRS = 6
SUMS: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-3}  # tolerance of sums of squares in fp32
PRODUCTS: dict[str, Any] = {"rtol": 1e-2, "atol": 2e-2}  # tolerance of outputs in 16 bits


def demand(condition: bool, words: str) -> None:
    """Raise an AssertionError with these words if the condition does not hold."""
    if not condition:
        raise AssertionError(words)


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def number(events: Iterable[Event], kind: str, partition: str = "") -> int:
    """Count the events of a kind, in one partition or in all."""
    return sum(e.kind == kind and partition in ("", e.partition) for e in events)


# ---- numbers -----------------------------------------------------------------------------------------------------


def expect_cycles(tile_cycles, sizes: tuple[int, int, int], right: tuple[float, float, float]) -> None:
    """Assert the cycles of three units for a tile of (rows, keys, head dimension)."""
    (rows, _, d), (products, exponentials, loads) = sizes, right
    names, what = ("products", "exponentials", "loads"), f"tile_cycles{sizes}"
    got = expect_items(tile_cycles(*sizes), ", ".join(names), what)
    hints = (
        {"Count both products, Q Kᵀ and P V, and two FLOPs for each multiply-accumulate.": products / 2},
        {"One quarter takes 4 a cycle, and an SM has four quarters.": 4 * exponentials},
        {
            "Load K and V, two bytes an element.": loads / 2,
            "Each element has two bytes.": 2 * loads,
            "Q is loaded once, before the loop.": loads + 2 * rows * d / 20,
        },
    )
    for name, number, expected, known in zip(names, got, right, hints, strict=True):
        expect_number(number, expected, rel=1e-6, unit="cycles", what=f"{name} of {what}", mistakes=known)


def expect_shared_bytes(shared_bytes, sizes: tuple[int, int, int, int], q: int, ring: int) -> None:
    """Assert the shared memory for Q and both rings of a tile of (consumers, keys, head dimension, stages)."""
    consumers, keys, d, stages = sizes
    known = {
        "K and V need a ring each.": q + ring // 2,
        "An element of bf16 takes two bytes.": 2 * (q + ring),
        "That counts elements; one of bf16 takes two bytes.": (q + ring) // 2,
        "Each consumer has 64 rows of Q of its own.": q // consumers + ring,
        "Both rings have `stages` slots.": q + 2 * (stages + 1) * keys * d,
    }
    what = f"shared_bytes{sizes}"
    expect_number(shared_bytes(*sizes), q + ring, rel=1e-6, unit="bytes", what=what, mistakes=known)


def expect_registers(registers_per_thread, sizes: tuple[int, int], right: float) -> None:
    """Assert the registers of a thread for scores and output of a tile of (keys, head dimension)."""
    known: dict[str, Any] = {
        "The output (64 × d) lies in registers, too.": sizes[0] / 2,
        "A warpgroup is four warps: 128 threads share the tile.": [2 * right, 4 * right],
        "Accumulators are fp32: an element takes a whole register.": right / 2,
    }
    what = f"registers_per_thread{sizes}"
    expect_number(registers_per_thread(*sizes), right, rel=1e-6, unit="registers", what=what, mistakes=known)


# ---- layouts and rings -------------------------------------------------------------------------------------------


def transpose(text: str, tries: Iterable[Try], compiles: bool = False) -> None:
    """Assert the transpose for each launch, and that loads and stores of whole tiles touch no unnecessary sector."""
    hint = "Row i, column j of X goes to row j, column i of Y: are the addresses turned, and how far apart do rows lie?"
    for launch, run in run_tries(text, tries, hint=hint, mistakes=transpose_mistakes, compiles=compiles):
        m, n, *strides = (int(launch.args[name]) for name in ("m", "n", "x_stride", "y_stride"))
        if m % 32 or n % 32 or any(stride % 8 for stride in strides):
            continue  # rows that begin within a sector touch more sectors
        for events in run.programs():
            for kind in ("load", "store"):
                moving = [e for e in events if e.kind == kind and e.bytes]
                moved = sum(e.bytes for e in moving)
                demand(moved <= 4096, f"a program should {kind} one tile, 4096 bytes, and moves {moved}: no other.")
                for e in moving:
                    words = (
                        f"the {kind} at line {e.line} moves {e.bytes} bytes and touches {e.sectors} sectors of 32 bytes"
                    )
                    advice = "Neighbouring lanes should hold neighbours in memory: look at the layout's order and threads a warp."
                    demand(32 * e.sectors <= e.bytes, f"{words}; {e.bytes // 32} would do. {advice}")


def async_copy(
    text: str, tries: Iterable[Try], ring: Ring, slots: tuple[int, ...], seeds: Seeds, compiles=False
) -> None:
    """Assert the sums for each launch, and a full ring; `ring` launches two programs."""
    list(run_tries(text, tries, hint="Which tile lies in which slot?", seeds=seeds, compiles=compiles))
    words = "Issue the copies of tile i + STAGES - 1 before you wait for tile i, and wait for no more groups than tile i needs."
    full_ring(text, ring, slots, 2, 0.6, words)


def tma_ring(text: str, tries: Iterable[Try], ring: Ring, slots: tuple[int, ...], seeds: Seeds, compiles=False) -> None:
    """Assert the outputs for each launch, also with fewer tiles than slots, and a full ring."""
    for launch, run in run_tries(text, tries, mistakes=ring_mistakes, seeds=seeds, compiles=compiles, close=SUMS):
        tiles = cdiv(launch.args["columns"], 64)
        for events in run.programs():
            copies = sum(e.kind == "copy in" and e.unit == "TMA" for e in events)
            demand(copies == tiles, f"a program with {tiles} tiles issues {copies} TMA copies: one each, by tma_load.")
    words = "Issue the copies of STAGES tiles before the loop, and refill a slot as soon as its tile is in registers."
    full_ring(text, ring, slots, 1, 0.65, words)


def full_ring(text: str, ring: Ring, slots: tuple[int, ...], copies: int, share: float, words: str) -> None:
    """Assert that a ring of 8 tiles uses all its slots, and that three slots are faster than one slot.

    Args:
        text: the text of the student's file.
        ring: returns a launch and its outputs, for a number of slots and a number of tiles.
        slots: the numbers of slots, with 1 and 3.
        copies: number of copies of a tile.
        share: largest allowed ratio of the cycles with three slots to the cycles with one slot.
        words: advice for the student.
    """
    tiles, runs = 8, {}
    for stages in slots:
        ((_, runs[stages]),) = run_tries(text, [ring(stages, tiles)], close=SUMS)
    for stages, run in runs.items():
        for events in run.programs():
            expect_each_once(events, copies, tiles)
            expect_ahead(events, stages, tiles)
    one, three = max(runs[1].cycles), max(runs[3].cycles)
    slow = f"three slots take {three:.0f} model cycles, one slot {one:.0f}: the copies wait for each other."
    demand(three <= share * one, f"{slow} {words}")


def expect_each_once(events: list[Event], copies: int, tiles: int) -> None:
    """Assert that each tile is copied into shared memory once, read there once, and loaded in no other way."""
    started, read, loads = number(events, "copy in"), number(events, "shared load"), number(events, "load")
    demand(started == copies * tiles, f"{tiles} tiles take {copies * tiles} copies; {started} were started.")
    demand(not loads, "a program loads from memory into registers: all tiles come through the ring.")
    demand(read == started, f"{started} tiles arrive in shared memory, and {read} are read from there: read each once.")


def expect_ahead(events: list[Event], stages: int, tiles: int) -> None:
    """Assert that the copies of a program run as far ahead as the slots allow, all the time.

    When a program reads tile t, it has started the copies of t + `stages` tiles, or of all tiles. A ring that uses two of
    five slots, or that becomes empty before it is filled again, has started fewer copies.
    """
    for ring in {e.buffer.partition("[")[0] for e in events if e.kind == "copy in"}:
        mine = [e for e in events if e.buffer.partition("[")[0] == ring]
        copies = sorted((e for e in mine if e.kind == "copy in"), key=lambda e: e.start)
        demand(len(copies) == tiles, f"{tiles} tiles, and {len(copies)} copies into {ring}: each tile comes once.")
        expect_slots(copies, stages)
        for tile, copy in enumerate(copies):
            reads = [
                e.start for e in mine if e.kind == "shared load" and e.buffer == copy.buffer and e.start >= copy.start
            ]
            issued = sum(e.kind == "issue" and e.start <= min(reads, default=copy.end) for e in mine)
            least = min(tiles, tile + stages)
            words = f"{issued} copies into {ring} have been issued when tile {tile} is read, and {least} should be"
            demand(issued >= least, f"with {stages} slots, {words}: refill a slot as soon as it is free.")


def expect_slots(copies: list[Event], stages: int) -> None:
    """Assert that copies go into all slots of a ring."""
    used = len({e.buffer for e in copies})
    demand(used == stages, f"{used} slots are used, and there are {stages}: tile i lies in slot i % STAGES.")


def repair_text(text: str, repairs: dict[str, str]) -> str:
    """Return the broken file with repairs, {line of the file without its indentation: new line}."""
    demand(isinstance(repairs, dict), f"repairs() should be a dict, and is {type(repairs).__name__}.")
    many = f"repairs changes {len(repairs)} lines; {MOST_REPAIRS} at most. Change what is wrong."
    demand(len(repairs) <= MOST_REPAIRS, many)
    lines = text.splitlines()
    before = [line.strip() for line in lines]  # a replacement may equal another line of the file
    for wrong, right in repairs.items():
        count = before.count(str(wrong).strip())
        demand(count == 1, f"`{wrong}` stands {count} times in lab3_broken.py: copy one whole line of it.")
        place = before.index(str(wrong).strip())
        indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
        lines[place] = "\n".join(indent + line.strip() for line in str(right).splitlines()) or indent + "pass"
    return "\n".join(lines) + "\n"


def repairs(text: str, tries: Iterable[Try], ring: Ring, slots: tuple[int, ...], seeds: Seeds) -> None:
    """Assert the output for any number of slots in any timing, and that the ring's two partitions still overlap."""
    list(run_tries(text, tries, seeds=seeds))
    cycles = {}
    for stages in slots:
        ((_, run),) = run_tries(text, [ring(stages, 8)])
        for kind, partition in (("copy in", "load_tiles"), ("copy out", "scale_tiles")):
            copies = [e for e in run.events if e.kind == kind]
            who = {e.partition.partition(" ")[0] for e in copies}
            words = f"8 tiles take 8 copies {kind[5:]}, all by {partition}; here are {len(copies)}, by {', '.join(sorted(who)) or 'nobody'}"
            right = len(copies) == 8 and who == {partition}
            demand(right, f"{words}. Repair the ring, and leave its two partitions their work.")
        expect_slots([e for e in run.events if e.kind == "copy in"], stages)
        cycles[stages] = run.cycles[0]
    slow = f"it runs, but three slots take {cycles[3]:.0f} model cycles and one {cycles[1]:.0f}: a repair serialized the ring."
    demand(cycles[3] <= 0.8 * cycles[1], slow)


# ---- products ----------------------------------------------------------------------------------------------------


def matmul(text: str, tries: Iterable[Try], seeds: Seeds, compiles: bool = False) -> None:
    """Assert C = A Bᵀ, and that a program makes one product and two copies for each step, and one copy of C."""
    hint = "C = A Bᵀ: is B turned, is each step added to the accumulator, and does that stay in fp32?"
    for launch, run in run_tries(
        text, tries, hint=hint, mistakes=wgmma_mistakes, seeds=seeds, compiles=compiles, close=PRODUCTS
    ):
        steps = cdiv(launch.args["k_size"], 64)
        for events in run.programs():
            products, copies, stored = (number(events, kind) for kind in ("wgmma", "copy in", "copy out"))
            demand(products == steps, f"{steps} steps along K, and {products} products: one a step.")
            demand(copies == 2 * steps, f"{steps} steps load {2 * steps} tiles, and {copies} copies were started.")
            demand(stored == 1, f"C should leave by one tma_store from c_tile; {stored} copies leave.")


def cancelling(text: str, tries: Iterable[Try]) -> None:
    """Assert that the accumulator is fp32: the first two steps cancel, and their sums overflow in 16 bits."""
    hint = "Two steps of these numbers cancel, and their sums overflow in 16 bits: the accumulator is fp32."
    list(run_tries(text, tries, hint=hint, close=PRODUCTS))
