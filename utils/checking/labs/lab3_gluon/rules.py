"""What the kernels of lab 3 have to do beyond right values, read in the simulator's events.

The notebook's checks and the grader's ask the same of other launches. Each function takes the text of a student's file and
the launches to try, and raises AssertionError with a sentence for the student.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from utils.checking.gluon_launches import CLOSE, exponent_scale, ring_mistakes, wgmma_mistakes
from utils.checking.kernel_exercises import Launch, Run, Tile, expect_kernel
from utils.checking.kernel_exercises import overlap as overlap_of
from utils.checking.kernel_mistakes import BLOCKS, OVERLAP, SOFTMAX, Steps, attention_mistakes, causal
from utils.gluon_cpu.timeline import Event

Try = tuple[Launch, dict[str, torch.Tensor]]  # a launch, and what it should write
Seeds = tuple[int | None, ...]  # timings of the simulator: None is the cost model's own
CONSUMERS = ("compute_partition 0", "compute_partition 1")
LEAST_OVERLAP = 0.12  # share of the softmax during a product: zero without overlap, about 0.25 in the model answer
MOST_REPAIRS = 6
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 0.0}
SUMS: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-3}  # of squares in fp32
PRODUCTS: dict[str, Any] = {"rtol": 1e-2, "atol": 2e-2}  # in 16 bits


def demand(condition: bool, words: str) -> None:
    """Refuse an answer with these words if the condition does not hold."""
    if not condition:
        raise AssertionError(words)


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def simulated(
    text: str,
    tries: Iterable[Try],
    *,
    hint: str = "",
    mistakes: Callable[[Launch, dict], dict[str, torch.Tensor]] | None = None,
    seeds: Seeds = (None,),
    compiles: bool = False,
    close: dict[str, Any] = EXACT,
) -> Iterator[tuple[Launch, Run]]:
    """Try each launch, and yield it with the events of all of its programs; the last one is compiled, too, with `compiles`."""
    tries = list(tries)
    for launch, expected in tries:
        run = expect_kernel(
            text,
            launch,
            expected,
            **close,
            seeds=seeds,
            compiles=compiles and launch is tries[-1][0],
            hint=f"{hint} The launch: {sizes_of(launch)}.".strip(),
            mistakes=partial(mistakes, launch, expected) if mistakes else None,
            programs=math.prod(launch.grid),
        )
        yield launch, run


def sizes_of(launch: Launch) -> str:
    """Return the sizes of a launch's arguments: "x_ptr (45, 70), n = 70"."""
    words = []
    for name, value in launch.args.items():
        tensor = value.tensor if isinstance(value, Tile) else value
        if isinstance(tensor, torch.Tensor):
            words.append(f"{name} {tuple(tensor.shape)}")
        elif isinstance(tensor, int):
            words.append(f"{name} = {tensor}")
    return ", ".join(words)


def number(events: Iterable[Event], kind: str, partition: str = "") -> int:
    """Count the events of a kind, of one partition or of all."""
    return sum(e.kind == kind and partition in ("", e.partition) for e in events)


# ---- layouts and rings -------------------------------------------------------------------------------------------


def transpose(text: str, tries: Iterable[Try], compiles: bool = False) -> None:
    """Right at any size and stride; at whole tiles a program moves its tile and touches no sector more than it needs."""
    hint = "Where is row i, column j of X in Y, and how far apart do rows lie?"
    for launch, run in simulated(text, tries, hint=hint, compiles=compiles):
        m, n, *strides = (int(launch.args[name]) for name in ("m", "n", "x_stride", "y_stride"))  # type: ignore[call-overload]
        if m % 32 or n % 32 or any(stride % 8 for stride in strides):
            continue  # rows that begin within a sector touch more of them
        for events in run.programs():
            for kind in ("load", "store"):
                moving = [e for e in events if e.kind == kind and e.bytes]
                moved = sum(e.bytes for e in moving)
                demand(
                    moved <= 4 * 32 * 32,
                    f"a program should {kind} one tile of 32 x 32 elements, 4096 bytes, and moves {moved}: others move the other tiles.",
                )
                for e in moving:
                    demand(
                        32 * e.sectors <= e.bytes,
                        f"the {kind} at line {e.line} moves {e.bytes} bytes and touches {e.sectors} sectors of 32 bytes; "
                        f"{e.bytes // 32} would do. Neighbouring lanes should hold neighbours in memory: look at the "
                        "layout's order and at its threads a warp.",
                    )


def async_copy(
    text: str,
    tries: Iterable[Try],
    ring: Callable[[int, int], Try],
    slots: tuple[int, ...],
    seeds: Seeds,
    compiles=False,
) -> None:
    """Right for any number of slots; `ring` gives the launch of two programs for a number of slots and of tiles."""
    list(simulated(text, tries, hint="Which tile lies in which slot?", seeds=seeds, compiles=compiles))
    words = "Issue the copies of tile i + STAGES - 1 before you wait for tile i, and wait for no more groups than tile i needs."
    full_ring(text, ring, slots, 2, 0.6, words)


def tma_ring(
    text: str,
    tries: Iterable[Try],
    ring: Callable[[int, int], Try],
    slots: tuple[int, ...],
    seeds: Seeds,
    compiles=False,
) -> None:
    """The same by TMA; there may be fewer tiles than slots."""
    for launch, run in simulated(text, tries, mistakes=ring_mistakes, seeds=seeds, compiles=compiles, close=SUMS):
        tiles = cdiv(launch.args["columns"], 64)  # type: ignore[arg-type]
        for events in run.programs():
            copies = sum(e.kind == "copy in" and e.unit == "TMA" for e in events)
            demand(
                copies == tiles,
                f"a program with {tiles} tiles issues {copies} TMA copies: each tile should come once, by tma_load.",
            )
    words = "Issue the copies of STAGES tiles before the loop, and refill a slot as soon as its tile is in registers."
    full_ring(text, ring, slots, 1, 0.65, words)


def full_ring(
    text: str, ring: Callable[[int, int], Try], slots: tuple[int, ...], copies: int, share: float, words: str
) -> None:
    """Assert that a ring of 8 tiles keeps its slots filled, and that three slots beat one.

    Args:
        text: the text of the student's file.
        ring: gives a launch, and the outputs, for numbers of slots and of tiles.
        slots: the numbers of slots; 1 and 3 are among them.
        copies: copies of a tile.
        share: of the cycles with one slot that three slots may take.
        words: what to look at.
    """
    tiles, runs = 8, {}
    for stages in slots:
        ((_, runs[stages]),) = simulated(text, [ring(stages, tiles)], close=SUMS)
    one, three = max(runs[1].cycles), max(runs[3].cycles)
    demand(
        three <= share * one,
        f"three slots take {three:.0f} model cycles, one slot {one:.0f}: the copies wait for each other. {words}",
    )
    for stages, run in runs.items():
        for events in run.programs():
            expect_each_once(events, copies, tiles)
            expect_ahead(events, stages, tiles)


def expect_each_once(events: list[Event], copies: int, tiles: int) -> None:
    """Assert that each tile comes into shared memory once, is read there once, and comes by no other way."""
    started, read = number(events, "copy in"), number(events, "shared load")
    demand(
        started == copies * tiles,
        f"a program with {tiles} tiles starts {started} copies; {copies * tiles} bring each tile once.",
    )
    loads = [e for e in events if e.kind == "load"]
    demand(
        not loads, f"line {loads and loads[0].line} loads from memory into registers: all tiles come through the ring."
    )
    demand(read == started, f"{started} tiles arrive in shared memory, and {read} are read from there: read each once.")


def expect_ahead(events: list[Event], stages: int, tiles: int) -> None:
    """Assert that the copies of a program run as far ahead as the slots allow, all the time.

    When tile t is read, every other slot has been ordered anew: t + `stages` tiles in all, unless there are fewer. A ring that
    uses two of five slots, or that is emptied as a whole before it is filled again, has ordered fewer.
    """
    for ring in {e.buffer.partition("[")[0] for e in events if e.kind == "copy in"}:
        mine = [e for e in events if e.buffer.partition("[")[0] == ring]
        copies = sorted((e for e in mine if e.kind == "copy in"), key=lambda e: e.start)
        demand(
            len(copies) == tiles,
            f"a program with {tiles} tiles starts {len(copies)} copies into {ring}: each tile comes once.",
        )
        expect_slots(copies, stages)
        for tile, copy in enumerate(copies):
            reads = [
                e.start for e in mine if e.kind == "shared load" and e.buffer == copy.buffer and e.start >= copy.start
            ]
            issued = sum(e.kind == "issue" and e.start <= min(reads, default=copy.end) for e in mine)
            demand(
                issued >= min(tiles, tile + stages),
                f"with {stages} slots, {issued} copies into {ring} have been issued when tile {tile} is read, and "
                f"{min(tiles, tile + stages)} should be: use every slot, and refill each as soon as it is free.",
            )


def expect_slots(copies: list[Event], stages: int) -> None:
    """Assert that copies go into all slots of a ring."""
    used = len({e.buffer for e in copies})
    demand(used == stages, f"{used} slots are used, and there are {stages}: tile i lies in slot i % STAGES.")


def repaired(text: str, repairs: dict[str, str]) -> str:
    """Return the broken file with its repairs; each key is a whole line of the file without the indentation."""
    demand(isinstance(repairs, dict), f"repairs() should be a dict, and is {type(repairs).__name__}.")
    demand(
        len(repairs) <= MOST_REPAIRS,
        f"repairs changes {len(repairs)} lines; {MOST_REPAIRS} at most. Change what is wrong.",
    )
    lines = text.splitlines()
    before = [line.strip() for line in lines]  # a replacement may read like another line of the file
    for wrong, right in repairs.items():
        count = before.count(str(wrong).strip())
        demand(count == 1, f"`{wrong}` stands {count} times in lab3_broken.py: copy one whole line of it.")
        place = before.index(str(wrong).strip())
        indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
        lines[place] = "\n".join(indent + line.strip() for line in str(right).splitlines()) or indent + "pass"
    return "\n".join(lines) + "\n"


def repairs(
    text: str, tries: Iterable[Try], ring: Callable[[int, int], Try], slots: tuple[int, ...], seeds: Seeds
) -> None:
    """Right with any number of slots and in any timing, and still a ring of two partitions that overlap."""
    list(simulated(text, tries, seeds=seeds))
    cycles = {}
    for stages in slots:
        ((_, run),) = simulated(text, [ring(stages, 8)])
        for kind, partition in (("copy in", "load_tiles"), ("copy out", "scale_tiles")):
            copies = [e for e in run.events if e.kind == kind]
            who = {e.partition.partition(" ")[0] for e in copies}
            demand(
                len(copies) == 8 and who == {partition},
                f"8 tiles take 8 copies {kind.removeprefix('copy ')}, all by {partition}; here are {len(copies)}, by "
                f"{', '.join(sorted(who)) or 'nobody'}. Repair the ring, and leave its two partitions their work.",
            )
        expect_slots([e for e in run.events if e.kind == "copy in"], stages)
        cycles[stages] = run.cycles[0]
    demand(
        cycles[3] <= 0.8 * cycles[1],
        f"it runs, but three slots take {cycles[3]:.0f} model cycles and one {cycles[1]:.0f}: a repair serialized the ring.",
    )


# ---- products ----------------------------------------------------------------------------------------------------


def matmul(text: str, tries: Iterable[Try], seeds: Seeds, compiles: bool = False) -> None:
    """C = A Bᵀ on the tensor cores: one product a step, two copies a step, and one copy out."""
    hint = "C = A Bᵀ: is B turned, is each step added to the accumulator, and does that stay in fp32?"
    for launch, run in simulated(
        text, tries, hint=hint, mistakes=wgmma_mistakes, seeds=seeds, compiles=compiles, close=PRODUCTS
    ):
        steps = cdiv(launch.args["k_size"], 64)  # type: ignore[arg-type]
        for events in run.programs():
            products, copies, stored = (number(events, kind) for kind in ("wgmma", "copy in", "copy out"))
            demand(
                products == steps,
                f"{steps} steps along K, and {products} products on the tensor cores: one a step is right.",
            )
            demand(
                copies == 2 * steps, f"{steps} steps along K load {2 * steps} tiles, and {copies} copies were started."
            )
            demand(
                stored == 1,
                f"C should leave by TMA, once: store it into c_tile, then tma_store. Here {stored} copies leave.",
            )


def cancelling(text: str, tries: Iterable[Try]) -> None:
    """The accumulator is fp32: the first two steps cancel, and their sums overflow in 16 bits."""
    hint = "Two steps of these numbers cancel, and their sums overflow in 16 bits: the accumulator is fp32."
    list(simulated(text, tries, hint=hint, close=PRODUCTS))


# ---- attention ---------------------------------------------------------------------------------------------------


def _mistakes(
    known: dict, downward: bool = False, block: int = 64
) -> Callable[[Launch, dict], dict[str, torch.Tensor]]:
    def of(launch: Launch, expected: dict) -> dict[str, torch.Tensor]:
        q, k, v = (launch.args[name].tensor for name in ("q_desc", "k_desc", "v_desc"))  # type: ignore[attr-defined]
        missing = {
            "c is missing: the weights are powers of 2 of c times the scores.": Steps(
                scale=1 / exponent_scale(q.shape[-1])
            )
        }
        return attention_mistakes(q, k, v, known | missing, downward, block)

    return of


def blocks_of(launch: Launch) -> int:
    """How many blocks of keys a launch has."""
    keys: Tile = launch.args["k_desc"]  # type: ignore[assignment]
    return cdiv(keys.tensor.shape[-2], keys.block[-2])


def softmax(text: str, tries: Iterable[Try], compiles: bool = False) -> None:
    """Right at the edges of the mask, with large scores, and with scores that fall or rise; each block is taken once."""
    hint = "They take keys in blocks of 64: are columns without a key masked, and are maximum, sum and output carried from block to block?"
    for launch, run in simulated(text, tries, hint=hint, mistakes=_mistakes(SOFTMAX), compiles=compiles, close=CLOSE):
        for events in run.programs():
            expect_one_pass(events, blocks_of(launch))


def expect_one_pass(events: list[Event], blocks: int) -> None:
    """Assert that a program loads and multiplies each of its blocks of keys once: Q comes by one copy."""
    products, copies = number(events, "wgmma"), number(events, "copy in")
    demand(
        (products, copies) == (2 * blocks, 1 + 2 * blocks),
        f"{blocks} blocks of keys take {2 * blocks} products and {1 + 2 * blocks} copies, and a program makes {products} and "
        f"{copies}. Online softmax is one pass: it takes each block once, and corrects what came before.",
    )


def specialized(text: str, tries: Iterable[Try], seeds: Seeds, compiles: bool = False) -> None:
    """Right for any number of slots in any timing; the producer alone loads, each block once for both consumers."""
    hint = "Does each consumer take every block of keys once, and store its own 64 rows?"
    tried = simulated(text, tries, hint=hint, mistakes=_mistakes(BLOCKS), seeds=seeds, compiles=compiles, close=CLOSE)
    for launch, run in tried:
        for events in run.programs():
            expect_split(events, blocks_of(launch), launch.args["STAGES"])  # type: ignore[arg-type]


def expect_split(events: list[Event], blocks: int, stages: int) -> None:
    """Assert that a program's producer alone loads each block once, as far ahead as slots allow, and both consumers multiply."""
    copies = [e for e in events if e.kind == "copy in"]
    demand(
        len(copies) == 2 + 2 * blocks,
        f"{len(copies)} TMA copies for {blocks} blocks of keys; two for Q, one of K and one of V for each block make "
        f"{2 + 2 * blocks}. Both consumers read the same tile.",
    )
    who = {e.partition for e in copies}
    demand(
        who == {"load_partition"}, f"load_partition alone issues copies of K and V; here {', '.join(sorted(who))} did."
    )
    expect_products(events, blocks, "each computes its own 64 rows")
    rings = len({e.buffer for e in copies}) - 2  # two tiles are Q's
    demand(
        rings == 2 * min(stages, blocks),
        f"{blocks} blocks come into {rings // 2} slots of each ring, and there are {stages}: tile i lies in slot i % STAGES.",
    )
    second = sorted(e.start for e in events if e.kind == "wgmma" and e.partition == CONSUMERS[0])[1]
    started = sum(e.kind == "issue" and e.partition == "load_partition" and e.start <= second for e in events) - 2
    demand(
        started >= 2 * min(stages, blocks),
        f"with {stages} slots, {started} copies of K and V have been issued when the first block is worked on, and "
        f"{2 * min(stages, blocks)} could be: the producer waits for nothing but a free slot.",
    )
    waits = [(e.buffer, e.partition == "load_partition") for e in events if e.kind == "wait"]
    both = sorted({buffer for buffer, own in waits if own} & {buffer for buffer, own in waits if not own})
    demand(
        not both,
        f"load_partition waits for {' and '.join(both)}, as the consumers do: that a tile has come matters to them alone. The "
        "producer waits for nothing but a free slot.",
    )


def overlapped(text: str, tries: Iterable[Try], seeds: Seeds, compiles: bool = False) -> list[Run]:
    """Right in any timing; both products of a turn are under way together, and the softmax runs under them."""
    hint = "Is o rescaled by alpha after the product of the block before, and is p the new p_next?"
    known = _mistakes(SOFTMAX | BLOCKS | OVERLAP, downward=True)
    runs = []
    for launch, run in simulated(text, tries, hint=hint, mistakes=known, seeds=seeds, compiles=compiles, close=CLOSE):
        for events in run.programs():
            expect_products(events, blocks_of(launch), "the softmax should run during those that are needed")
            expect_pairs(events)
        runs.append(run)
    return runs


def expect_share(run: Run) -> None:
    """Assert that enough of the softmax of each consumer of a program runs during products of its own."""
    share = min(overlap_of(replace(run, events=[e for e in run.events if e.partition == name])) for name in CONSUMERS)
    demand(
        share >= LEAST_OVERLAP,
        f"only {share:.1%} of a consumer's softmax runs while a product of the same consumer is under way, and at least {LEAST_OVERLAP:.0%} should. "
        "Issue the scores of block i, then P V of block i - 1, wait until one product is left, and compute the softmax then.",
    )


def expect_pairs(events: list[Event]) -> None:
    """Assert that the scores of a block and P V of the one before it are under way together, in each consumer."""
    for name in CONSUMERS:
        products = sorted((e for e in events if e.kind == "wgmma" and e.partition == name), key=lambda e: e.start)
        issued = sorted(e.start for e in events if e.kind == "issue" and e.partition == name)
        pairs = range(1, len(products) - 1, 2)
        together = sum(issued[i + 1] < products[i].end for i in pairs)
        demand(
            together == len(pairs),
            f"in {name} the second product of a turn is issued while the first one runs in {together} of {len(pairs)} turns: "
            "issue the scores of block i and P V of block i - 1 together, and wait for the scores only.",
        )


def expect_products(events: list[Event], blocks: int, words: str) -> None:
    """Assert that each of two consumers makes two products for each block of keys."""
    for consumer in CONSUMERS:
        products = number(events, "wgmma", consumer)
        demand(
            products == 2 * blocks,
            f"{blocks} blocks of keys take {2 * blocks} products in each consumer, and {consumer} makes {products}: {words}.",
        )


def attention_causal(text: str, tries: Iterable[Try], compiles: bool = False) -> None:
    """Right with fewer queries than keys; a program takes the blocks that its rows see, each once, and no other."""

    def known(launch: Launch, expected: dict) -> dict[str, torch.Tensor]:
        return _mistakes(causal(launch.args["sk"] - launch.args["sq"]))(launch, expected)  # type: ignore[operator]

    hint = "Here query i sees keys 0 ... i + sk - sq."
    for launch, run in simulated(text, tries, hint=hint, mistakes=known, compiles=compiles, close=CLOSE):
        sq, sk = (int(launch.args[name]) for name in ("sq", "sk"))  # type: ignore[call-overload]
        for program, events in enumerate(run.programs()):
            first = program % launch.grid[0] * 64
            needed = min(cdiv(sk, 64), cdiv(first + 64 + sk - sq, 64))
            products = number(events, "wgmma")
            demand(
                products == 2 * needed,
                f"{sq} queries, {sk} keys: rows {first} to {first + 63} see {needed} of {cdiv(sk, 64)} blocks of keys, which "
                f"take {2 * needed} products, and their program makes {products}.",
            )
            expect_one_pass(events, needed)


def two_softmax(text: str, tries: Iterable[Try], seeds: Seeds) -> None:
    """Right in any timing; both softmax partitions work, and the correction rescales O beside them."""
    hint = "Is P stored before it is announced, and is O rescaled by this block's alpha before P V is added?"
    known = _mistakes(SOFTMAX | BLOCKS, block=128)
    for launch, run in simulated(text, tries, hint=hint, mistakes=known, seeds=seeds, close=CLOSE):
        blocks = blocks_of(launch)
        for events in run.programs():
            for name in ("softmax 0", "softmax 1"):
                stored = number(events, "tensor memory store", name)
                demand(
                    stored == blocks, f"{blocks} blocks of keys, and {name} stores {stored} tiles of P: one a block."
                )
            products = number(events, "wgmma")
            demand(
                products == 4 * blocks,
                f"two tiles and {blocks} blocks take {4 * blocks} products; here are {products}.",
            )
