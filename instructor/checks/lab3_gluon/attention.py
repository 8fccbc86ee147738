"""Part 5: online softmax in a kernel, producer and consumers, overlap, the causal mask."""

from __future__ import annotations

import math
from typing import Any

import torch

from instructor.checks.common import Draw
from instructor.checks.lab3_gluon.pipelines import cdiv
from utils.checking import check
from utils.checking.kernel_exercises import Launch, Tile, expect_kernel
from utils.checking.kernel_exercises import overlap as overlap_of

TOLERANCE: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2}
LEAST_OVERLAP = 0.12  # share of the softmax during a product: zero without overlap, about 0.25 in the model answer


def tile(x: torch.Tensor, rows: int) -> Tile:
    """Return a tensor that is copied in tiles of `rows` whole rows."""
    return Tile(x, [1] * (x.dim() - 2) + [rows, x.shape[-1]])


def inputs(heads: int, sq: int, sk: int, d: int, draw: Draw, sharp: float = 1.0) -> list[torch.Tensor]:
    """Draw q, k and v (heads, S, D) in bf16; `sharp` multiplies q, and so the scores."""
    q, k, v = (draw.normal(heads, s, d) for s in (sq, sk, sk))
    return [x.to(torch.bfloat16) for x in (q * sharp, k, v)]


def expected_output(q, k, v, causal: bool = False) -> torch.Tensor:
    """Compute attention in float64; with fewer queries than keys, the last query is at the last key."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        positions = torch.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2]
        scores = scores.masked_fill(torch.arange(k.shape[-2])[None] > positions, -math.inf)
    return torch.softmax(scores, -1) @ v


def attention_launch(file: str, rows: int, q, k, v, block_n: int = 64, stages: int | None = None):
    """Return a launch of `attention`, a program for each `rows` queries of each head, and its expected output."""
    d, sk = q.shape[-1], k.shape[-2]
    args = {
        "q_desc": tile(q, 64),
        "k_desc": tile(k, block_n),
        "v_desc": tile(v, block_n),
        "o_desc": tile(torch.full_like(q, float("nan")), 64),
        "sk": sk,
        "c": d**-0.5 * math.log2(math.e),
    }
    if stages:
        args["STAGES"] = stages
    launch = Launch("attention", (cdiv(q.shape[-2], rows), q.shape[0]), args, ("o_desc",), file=file)
    return launch, {"o_desc": expected_output(q, k, v)}


@check("5.1", "Online softmax in a kernel")
def softmax(source: str, seed=None):
    """Check the output with an incomplete last block, with large scores, and with very negative scores in the first block."""
    draw = Draw(seed)
    for sk, d, sharp in ((draw.size(65, 180), 64, 1.0), (draw.size(1, 24), 64, 1.0), (draw.size(140, 190), 128, 60.0)):
        q, k, v = inputs(1, draw.size(33, 64), sk, d, draw, sharp)
        launch, expected = attention_launch("lab3_softmax.py", 64, q, k, v)
        hint = (
            f"{sk} keys in blocks of 64: are the keys past the last one masked, are the sum and the output "
            "rescaled by alpha in each block, and is the output divided by the sum at the end?"
        )
        if sharp == 60.0:
            hint = (
                f"{sk} keys in blocks of 64. Scores go up to 200 here: is the maximum subtracted, and carried from "
                "block to block?"
            )
        expect_kernel(source, launch, expected, **TOLERANCE, hint=hint)
    # All scores of one block are far above zero, those of the other far below; once the lower block comes first, once last.
    for low, hint in (
        (slice(0, 64), "The maximum starts at minus infinity, not at zero."),
        (slice(64, 128), "Scores fall from the first block to the second: the maximum never goes down."),
    ):
        q, k, v = inputs(1, 64, 128, 64, draw)
        q, k = q.abs(), k.abs()
        k[:, low] *= -40
        launch, expected = attention_launch("lab3_softmax.py", 64, q, k, v)
        expect_kernel(source, launch, expected, **TOLERANCE, hint=hint)


@check("5.2", "Producer and consumers")
def specialized(source: str, seed=None):
    """Check the output for one to three slots in any timing; K and V are loaded once for both consumers."""
    draw = Draw(seed)
    for stages in (2, 1, 3):
        q, k, v = inputs(1, draw.size(70, 128), draw.size(200, 300), 64, draw)
        launch, expected = attention_launch("lab3_specialized.py", 128, q, k, v, stages=stages)
        run = expect_kernel(
            source,
            launch,
            expected,
            **TOLERANCE,
            seeds=(None, draw.size(1, 999), draw.size(1, 999)),
            hint=f"With {stages} slots: does each consumer take every block of keys once, and store its own 64 rows?",
        )
        blocks = cdiv(k.shape[-2], 64)
        copies = [e for e in run.events if e.kind == "copy in"]
        if len(copies) != 2 + 2 * blocks:
            raise AssertionError(
                f"{len(copies)} TMA copies for {blocks} blocks of keys; two for Q, one of K and one "
                f"of V for each block make {2 + 2 * blocks}. Both consumers read the same tile."
            )
        who = {e.partition for e in copies}
        if who != {"load_partition"}:
            raise AssertionError(f"K and V should be ordered by load_partition alone, and were by {', '.join(who)}.")


def overlap_launch(q, k, v, stages: int, block_n: int = 64):
    """Return a launch of the overlapped `attention` for q, k, v (B, heads, S, D), and its expected output."""
    sq, sk, heads = q.shape[-2], k.shape[-2], q.shape[1]
    args = {
        "q_desc": tile(q, 64),
        "k_desc": tile(k, block_n),
        "v_desc": tile(v, block_n),
        "o_desc": tile(torch.full_like(q, float("nan")), 64),
        "sq": sq,
        "sk": sk,
        "heads": heads,
        "c": q.shape[-1] ** -0.5 * math.log2(math.e),
        "STAGES": stages,
    }
    launch = Launch("attention", (cdiv(sq, 128), q.shape[0] * heads), args, ("o_desc",), file="lab3_overlap.py")
    return launch, {"o_desc": expected_output(q, k, v)}


@check("5.3", "Overlap")
def overlap(source: str, seed=None):
    """Check the output in any timing; the softmax must run during a product."""
    draw = Draw(seed)
    for stages in (2, 3):
        q, k, v = (x[None] for x in inputs(1, draw.size(70, 128), draw.size(200, 300), 64, draw))
        launch, expected = overlap_launch(q, k, v, stages)
        expect_kernel(
            source,
            launch,
            expected,
            **TOLERANCE,
            seeds=(None, draw.size(1, 999), draw.size(1, 999)),
            hint="Is o rescaled by alpha after the product of the block before, and is the last product "
            "added after the loop?",
        )
    q, k, v = (x[None] for x in inputs(1, 128, 384, 128, draw, sharp=20.0))
    launch, expected = overlap_launch(q, k, v, 2)
    run = expect_kernel(
        source,
        launch,
        expected,
        **TOLERANCE,
        hint="The scores are large here: is o rescaled by alpha after the product of the block before?",
    )
    share = overlap_of(run)
    if share < LEAST_OVERLAP:
        raise AssertionError(
            f"only {share:.0%} of the softmax runs while a product of the same consumer is under way. Order the scores "
            "of block i, then P V of block i - 1, wait until one product is left, and compute the softmax then."
        )


@check("Bonus 5.5", "Causal attention")
def attention_causal(source: str, seed=None):
    """Check fewer queries than keys and incomplete blocks; there must be no product for a block that no query sees."""
    draw = Draw(seed)
    for (sq, sk), d in (((draw.size(130, 190),) * 2, 64), ((draw.size(65, 100), draw.size(150, 200)), 128)):
        q, k, v = inputs(1, sq, sk, d, draw)
        launch, _ = attention_launch("lab3_causal.py", 64, q, k, v)
        tiles = cdiv(sq, 64)
        args = {name: launch.args[name] for name in ("q_desc", "k_desc", "v_desc", "o_desc")}
        args |= {"sq": sq, "sk": sk, "c": launch.args["c"]}
        launch = Launch("attention_causal", (tiles, 1), args, ("o_desc",), file="lab3_causal.py")
        expected = {"o_desc": expected_output(q, k, v, causal=True)}
        hint = f"{sq} queries, {sk} keys: query i sees keys 0 ... i + {sk - sq}."
        run = expect_kernel(source, launch, expected, **TOLERANCE, hint=hint)
        products = sum(e.kind == "wgmma" for e in run.events)  # of the first program
        needed = 2 * min(cdiv(sk, 64), cdiv(64 + sk - sq, 64))
        if products != needed:
            raise AssertionError(
                f"the first 64 rows need {needed // 2} of {cdiv(sk, 64)} blocks of keys, {needed} "
                f"products, and their program makes {products}. {hint}"
            )
