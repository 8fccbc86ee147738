"""Rules for lab 3's attention: right values, and a good order of the simulator's events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from utils.checking.gluon_launches import CLOSE, exponent_scale
from utils.checking.kernel_exercises import Launch, Run, Seeds, Try, run_tries
from utils.checking.kernel_exercises import overlap as overlap_of
from utils.checking.labs.lab3_gluon.rules import cdiv, demand, number
from utils.checking.mistakes import BLOCKS, OVERLAP, SOFTMAX, Steps, attention_in_blocks
from utils.gluon_cpu.timeline import Event

CONSUMERS = ("compute_partition 0", "compute_partition 1")
LEAST_OVERLAP = 0.12  # share of the softmax during a product: zero without overlap, about 0.25 in the model answer


def _mistakes(
    known: dict, downward: bool = False, block: int = 64
) -> Callable[[Launch, dict], dict[str, torch.Tensor]]:
    def of(launch: Launch, expected: dict) -> dict[str, torch.Tensor]:
        q, k, v = (launch.args[name].tensor for name in ("q_desc", "k_desc", "v_desc"))
        inverse = 1 / exponent_scale(q.shape[-1])
        missing = {
            "c is missing: the weights are powers of 2 of c times the scores.": Steps(scale=inverse),
            "c is missing in the factor for the blocks before.": Steps(rescale_output=inverse, rescale_sum=inverse),
        }
        last = slice(0, block) if downward else slice((k.shape[-2] - 1) // block * block, None)
        alone = attention_in_blocks(q, k[..., last, :], v[..., last, :], Steps(), block)
        tables = (known | missing).items()
        found = {words: attention_in_blocks(q, k, v, steps, block, downward) for words, steps in tables}
        return found | {"Only the last block counts: is the new maximum returned, and not the old one?": alone}

    return of


def blocks_of(launch: Launch) -> int:
    """Return the number of blocks of keys of a launch."""
    keys = launch.args["k_desc"]
    return cdiv(keys.tensor.shape[-2], keys.block[-2])


def softmax(text: str, tries: Iterable[Try], compiles: bool = False) -> None:
    """Assert the output of online softmax, and that a program takes each block of keys once."""
    hint = "Keys come in blocks of 64: are columns without a key masked, and are maximum, sum and output carried from block to block?"
    for launch, run in run_tries(text, tries, hint=hint, mistakes=_mistakes(SOFTMAX), compiles=compiles, close=CLOSE):
        for events in run.programs():
            expect_one_pass(events, blocks_of(launch))


def expect_one_pass(events: list[Event], blocks: int) -> None:
    """Assert that a program loads and multiplies each of its blocks of keys once: Q comes by one copy."""
    products, copies = number(events, "wgmma"), number(events, "copy in")
    words = f"{blocks} blocks of keys take {2 * blocks} products and {1 + 2 * blocks} copies, and a program makes {products} and {copies}"
    right = (products, copies) == (2 * blocks, 1 + 2 * blocks)
    demand(right, f"{words}. Online softmax is one pass: it takes each block once, and corrects what came before.")


def specialized(text: str, tries: Iterable[Try], seeds: Seeds, compiles: bool = False) -> None:
    """Assert the output in any timing, and that only the producer loads, each block once for both consumers."""
    hint = "Does each consumer take every block of keys once, and store its own 64 rows?"
    tried = run_tries(text, tries, hint=hint, mistakes=_mistakes(BLOCKS), seeds=seeds, compiles=compiles, close=CLOSE)
    for launch, run in tried:
        for events in run.programs():
            expect_split(events, blocks_of(launch), launch.args["STAGES"])


def expect_split(events: list[Event], blocks: int, stages: int) -> None:
    """Assert that only the producer loads, each block once and as early as possible, and both consumers multiply."""
    copies = [e for e in events if e.kind == "copy in"]
    needed = (
        f"two for Q, one of K and one of V for each block make {2 + 2 * blocks}. Both consumers read the same tile."
    )
    demand(len(copies) == 2 + 2 * blocks, f"{len(copies)} TMA copies for {blocks} blocks of keys; {needed}")
    who = {e.partition for e in copies}
    alone = f"load_partition alone issues copies of K and V; here {', '.join(sorted(who))} did."
    demand(who == {"load_partition"}, alone)
    expect_products(events, blocks, "each computes its own 64 rows")
    ahead = min(stages, blocks)
    used = (len({e.buffer for e in copies}) - 2) // 2  # two tiles are Q's
    demand(used == ahead, f"{used} of {stages} slots are used: tile i lies in slot i % STAGES.")
    second = sorted(e.start for e in events if e.kind == "wgmma" and e.partition == CONSUMERS[0])[1]
    started = sum(e.kind == "issue" and e.partition == "load_partition" and e.start <= second for e in events) - 2
    words = f"{started} copies of K and V have been issued when the first block is worked on, and {2 * ahead} could be"
    free = "the producer waits for nothing but a free slot."
    demand(started >= 2 * ahead, f"with {stages} slots, {words}: {free}")
    waits = [(e.buffer, e.partition == "load_partition") for e in events if e.kind == "wait"]
    both = sorted({buffer for buffer, own in waits if own} & {buffer for buffer, own in waits if not own})
    demand(not both, f"load_partition waits for {' and '.join(both)}, as the consumers do: {free}")


def overlap(text: str, tries: Iterable[Try], seeds: Seeds, compiles: bool = False) -> list[Run]:
    """Assert the output in any timing, and that the two products of a loop turn run at the same time."""
    hint = "Is o rescaled by alpha after the product of the block before, and is p the new p_next?"
    known = _mistakes(SOFTMAX | BLOCKS | OVERLAP, downward=True)
    runs = []
    for launch, run in run_tries(text, tries, hint=hint, mistakes=known, seeds=seeds, compiles=compiles, close=CLOSE):
        for events in run.programs():
            expect_products(events, blocks_of(launch), "the softmax should run during those that are needed")
            expect_pairs(events)
        runs.append(run)
    return runs


def expect_share(run: Run) -> None:
    """Assert that enough of each consumer's softmax runs during the consumer's own products."""
    share = min(overlap_of(replace(run, events=[e for e in run.events if e.partition == name])) for name in CONSUMERS)
    words = f"only {share:.1%} of a consumer's softmax runs under a product of its own, and at least {LEAST_OVERLAP:.0%} should"
    advice = "Issue the scores of block i, then P V of block i - 1, wait until one product is left, and compute the softmax then."
    demand(share >= LEAST_OVERLAP, f"{words}. {advice}")


def expect_pairs(events: list[Event]) -> None:
    """Assert that in each consumer, the scores of a block and P V of the block before run at the same time."""
    for name in CONSUMERS:
        products = sorted((e for e in events if e.kind == "wgmma" and e.partition == name), key=lambda e: e.start)
        issued = sorted(e.start for e in events if e.kind == "issue" and e.partition == name)
        pairs = range(1, len(products) - 1, 2)
        together = sum(issued[i + 1] < products[i].end for i in pairs)
        words = f"in {name} the second product of a turn is issued while the first one runs in {together} of {len(pairs)} turns"
        advice = "issue the scores of block i and P V of block i - 1 together, and wait for the scores only."
        demand(together == len(pairs), f"{words}: {advice}")


def expect_products(events: list[Event], blocks: int, words: str) -> None:
    """Assert that each of two consumers makes two products for each block of keys."""
    for consumer in CONSUMERS:
        products = number(events, "wgmma", consumer)
        needed = f"{blocks} blocks of keys take {2 * blocks} products in each consumer"
        demand(products == 2 * blocks, f"{needed}, and {consumer} makes {products}: {words}.")


def two_softmax(text: str, tries: Iterable[Try], seeds: Seeds) -> None:
    """Assert the output in any timing, that both softmax partitions work, and that the correction rescales O."""
    hint = "Is P stored before it is announced, and is O rescaled by this block's alpha before P V is added?"
    known = _mistakes(SOFTMAX | BLOCKS, block=128)
    for launch, run in run_tries(text, tries, hint=hint, mistakes=known, seeds=seeds, close=CLOSE):
        blocks = blocks_of(launch)
        for events in run.programs():
            for name in ("softmax 0", "softmax 1"):
                stored = number(events, "tensor memory store", name)
                demand(stored == blocks, f"{blocks} blocks, and {name} stores {stored} tiles of P: one each.")
            products = number(events, "wgmma")
            demand(products == 4 * blocks, f"{blocks} blocks take {4 * blocks} products; here are {products}.")
