"""Part 5: online softmax in a kernel, producer and consumers, overlap, the causal mask."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from instructor.checks.common import Draw
from instructor.checks.lab3_gluon.pipelines import HALVES, cdiv
from utils.checking import check
from utils.checking.gluon_launches import (
    CLOSE,
    attention_inputs,
    attention_launch,
    causal_launch,
    edge_inputs,
    falling_inputs,
    overlap_launch,
)
from utils.checking.kernel_exercises import Run, expect_kernel
from utils.checking.kernel_exercises import overlap as overlap_of
from utils.checking.kernel_mistakes import BLOCKS, OVERLAP, SOFTMAX, attention_mistakes, causal
from utils.gluon_cpu.timeline import Event

LEAST_OVERLAP = 0.12  # share of the softmax during a product: zero without overlap, about 0.25 in the model answer
CONSUMERS = ("compute_partition 0", "compute_partition 1")
TAILS = (3, 65, 1)  # keys: a few, alone in the second block, and alone at all


@check("5.1", "Online softmax in a kernel")
def softmax(source: str, seed=None):
    """Check the output at the edges of the mask, with large scores, and with scores that fall or rise between blocks."""
    draw = Draw(seed)
    cases = [
        (
            edge_inputs(draw.size(33, 64), sk, 64, HALVES[sk == 3], draw.normal),
            f"{sk} keys in blocks of 64: are all columns without a key masked?",
        )
        for sk in TAILS
    ]
    sq, sk = draw.size(65, 100), draw.size(66, 180)
    cases.append((attention_inputs(2, sq, sk, 128, 1.0, torch.float16, draw.normal), ""))
    cases.append((edge_inputs(draw.size(65, 90), draw.size(129, 190), 64, torch.float16, draw.normal), ""))
    sharp = attention_inputs(1, 64, draw.size(140, 190), 128, 60.0, torch.bfloat16, draw.normal)
    text = "Scores go up to 200 here: is the maximum subtracted, and carried from block to block?"
    cases.append((sharp, text))
    cases.append((falling_inputs(True, normal=draw.normal), "The maximum starts at minus infinity, not at zero."))
    text = "Scores fall from the first block to the second: the maximum never goes down."
    cases.append((falling_inputs(False, normal=draw.normal), text))
    for inputs, words in cases:
        q, k, v, _ = inputs
        launch, expected = attention_launch("lab3_softmax.py", 64, *inputs)
        run = expect_kernel(
            source,
            launch,
            expected,
            **CLOSE,
            hint=words or f"{k.shape[1]} keys in blocks of 64, {q.shape[1]} queries, head dimension {q.shape[2]}.",
            mistakes=partial(attention_mistakes, q, k, v, SOFTMAX),
            programs=math.prod(launch.grid),
        )
        for events in run.programs():
            expect_one_pass(events, cdiv(k.shape[1], 64))


def expect_one_pass(events: list[Event], blocks: int) -> None:
    """Assert that a program loads and multiplies each of its blocks of keys once: Q comes by one copy."""
    products = sum(e.kind == "wgmma" for e in events)
    copies = sum(e.kind == "copy in" for e in events)
    if (products, copies) != (2 * blocks, 1 + 2 * blocks):
        raise AssertionError(
            f"{blocks} blocks of keys take {2 * blocks} products and {1 + 2 * blocks} copies, and a program makes {products} "
            f"and {copies}. Online softmax is one pass: it takes each block once, and corrects what came before."
        )


@check("5.2", "Producer and consumers")
def specialized(source: str, seed=None):
    """Check the output for one to three slots in any timing; K and V are loaded once for both consumers."""
    draw = Draw(seed)
    tails = draw.some(3, (1, 3, 65))
    for stages, tail in zip((2, 1, 3), tails, strict=True):
        sk = 192 + tail if tail < 64 else 128 + tail
        inputs = edge_inputs(draw.size(70, 128), sk, 64, draw.choice(HALVES), draw.normal)
        q, k, v, _ = inputs
        launch, expected = attention_launch("lab3_specialized.py", 128, *inputs, STAGES=stages)
        run = expect_kernel(
            source,
            launch,
            expected,
            **CLOSE,
            seeds=(None, draw.size(1, 999), draw.size(1, 999)),
            hint=f"With {stages} slots: does each consumer take every block of keys once, and store its own 64 rows?",
            mistakes=partial(attention_mistakes, q, k, v, BLOCKS),
            programs=math.prod(launch.grid),
        )
        for events in run.programs():
            _expect_split(events, cdiv(k.shape[-2], 64), stages)
    for stages in (2, draw.size(3, 5)):
        q, k, v, right = attention_inputs(1, 128, 448, 64, 1.0, draw.choice(HALVES), draw.normal)
        launch, expected = attention_launch("lab3_specialized.py", 128, q, k, v, right, STAGES=stages)
        events = expect_kernel(source, launch, expected, **CLOSE).programs()[0]
        _expect_split(events, 7, stages)


def _expect_split(events: list[Event], blocks: int, stages: int) -> None:
    """Assert that a program's producer alone loads each block once, as far ahead as slots allow, and both consumers multiply."""
    copies = [e for e in events if e.kind == "copy in"]
    if len(copies) != 2 + 2 * blocks:
        raise AssertionError(
            f"{len(copies)} TMA copies for {blocks} blocks of keys; two for Q, one of K and one "
            f"of V for each block make {2 + 2 * blocks}. Both consumers read the same tile."
        )
    who = {e.partition for e in copies}
    if who != {"load_partition"}:
        raise AssertionError(f"K and V should be issued by load_partition alone, and were by {', '.join(who)}.")
    _expect_products(events, blocks, "each computes its own 64 rows")
    places = {e.buffer for e in copies}  # two tiles of Q, and the slots of K and V
    if len(places) != 2 + 2 * min(stages, blocks):
        raise AssertionError(
            f"{blocks} blocks come into {(len(places) - 2) // 2} slots of each ring, and there are {stages}: tile i lies in "
            "slot i % STAGES."
        )
    second = sorted(e.start for e in events if e.kind == "wgmma" and e.partition == "compute_partition 0")[1]
    started = sum(e.kind == "issue" and e.partition == "load_partition" and e.start <= second for e in events) - 2
    if started < 2 * min(stages, blocks):
        raise AssertionError(
            f"with {stages} slots, {started} copies of K and V have been issued when the first block is worked on, and "
            f"{2 * min(stages, blocks)} could be: the producer waits for nothing but a free slot."
        )
    waited = [
        {e.buffer for e in events if e.kind == "wait" and (e.partition == "load_partition") == own}
        for own in (True, False)
    ]
    if both := sorted(waited[0] & waited[1]):
        raise AssertionError(
            f"load_partition waits for {' and '.join(both)}, as the consumers do: that a tile has come matters to them alone. The "
            "producer waits for nothing but a free slot."
        )


@check("5.3", "Overlap")
def overlap(source: str, seed=None):
    """Check the output in any timing; the softmax must run during a product."""
    draw = Draw(seed)
    for stages in (2, 3):
        inputs = edge_inputs(draw.size(70, 128), draw.size(200, 250), 64, draw.choice(HALVES), draw.normal)
        run = _expect_overlapped(source, inputs, stages, (None, draw.size(1, 999), draw.size(1, 999)), "")
        for events in run.programs():
            _expect_products(events, 4, "the softmax should run during those that are needed")
            _expect_pairs(events)
    # Scores rise toward the first keys, which come last: the output so far must shrink in each block.
    for d, length, sharp in ((64, 256, 1.0), (128, 384, 20.0)):
        inputs = attention_inputs(1, 128, length, d, sharp, torch.bfloat16, draw.normal)
        run = _expect_overlapped(source, inputs, 2, (None,), "The scores are large here." if sharp > 1 else "")
        _expect_products(run.programs()[0], cdiv(length, 64), "the softmax should run during those that are needed")
    _expect_share(run, run.events)
    _expect_pairs(run.events)


def _expect_share(run: Run, events: list[Event]) -> None:
    """Assert that enough of the softmax of each consumer of a program runs during products of its own."""
    share = min(overlap_of(replace(run, events=[e for e in events if e.partition == name])) for name in CONSUMERS)
    if share < LEAST_OVERLAP:
        raise AssertionError(
            f"only {share:.1%} of a consumer's softmax runs while a product of the same consumer is under way, and at least {LEAST_OVERLAP:.0%} should. "
            "Issue the scores of block i, then P V of block i - 1, wait until one product is left, and compute the softmax then."
        )


def _expect_pairs(events: list[Event]) -> None:
    """Assert that the scores of a block and P V of the one before it are under way together, in each consumer."""
    for name in CONSUMERS:
        products = sorted((e for e in events if e.kind == "wgmma" and e.partition == name), key=lambda e: e.start)
        issued = sorted(e.start for e in events if e.kind == "issue" and e.partition == name)
        pairs = range(1, len(products) - 1, 2)
        together = sum(issued[i + 1] < products[i].end for i in pairs)
        if together < len(pairs):
            raise AssertionError(
                f"in {name} the second product of a turn is issued while the first one runs in {together} of {len(pairs)} turns: "
                "issue the scores of block i and P V of block i - 1 together, and wait for the scores only."
            )


def _expect_products(events: list[Event], blocks: int, words: str) -> None:
    """Assert that each of two consumers makes two products for each block of keys."""
    for consumer in CONSUMERS:
        products = sum(e.kind == "wgmma" and e.partition == consumer for e in events)
        if products != 2 * blocks:
            raise AssertionError(
                f"{blocks} blocks of keys take {2 * blocks} products in each consumer, and {consumer} makes {products}: {words}."
            )


def _expect_overlapped(source: str, inputs, stages: int, seeds: tuple, words: str):
    q, k, v, right = inputs
    launch, expected = overlap_launch(q, k, v, right, stages)
    return expect_kernel(
        source,
        launch,
        expected,
        **CLOSE,
        seeds=seeds,
        programs=math.prod(launch.grid),
        hint=words or "Is o rescaled by alpha after the product of the block before, and is p the new p_next?",
        mistakes=lambda: attention_mistakes(q[None], k[None], v[None], SOFTMAX | BLOCKS | OVERLAP, downward=True),
    )


@check("Bonus 5.5", "Causal attention")
def attention_causal(source: str, seed=None):
    """Check fewer queries than keys and incomplete blocks; there must be no product for a block that no query sees."""
    draw = Draw(seed)
    square, wide = draw.size(130, 190), (draw.size(65, 100), draw.size(150, 200))
    for (sq, sk), d in (((square, square), 64), (wide, 128), ((draw.size(1, 60), 193), 64)):
        q, k, v, _ = attention_inputs(2, sq, sk, d, 1.0, draw.choice(HALVES), draw.normal)
        q[0], k[0] = q[0].abs(), k[0].abs()  # the keys' sizes grow, so that one key more or less is seen
        k[0] *= (torch.arange(sk)[:, None] / sk).to(k.dtype)
        launch, expected = causal_launch(q, k, v)
        hint = f"{sq} queries, {sk} keys: query i sees keys 0 ... i + {sk - sq}."
        run = expect_kernel(
            source,
            launch,
            expected,
            **CLOSE,
            hint=hint,
            mistakes=partial(attention_mistakes, q, k, v, causal(k.shape[1] - q.shape[1])),
            programs=math.prod(launch.grid),
        )
        for number, events in enumerate(run.programs()):
            first = number % launch.grid[0] * 64
            products = sum(e.kind == "wgmma" for e in events)
            needed = min(cdiv(sk, 64), cdiv(first + 64 + sk - sq, 64))
            if products != 2 * needed:
                raise AssertionError(
                    f"rows {first} to {first + 63} (head {number // launch.grid[0]}) need {needed} of {cdiv(sk, 64)} blocks of keys, {2 * needed} "
                    f"products, and their program makes {products}. {hint}"
                )
            expect_one_pass(events, needed)
