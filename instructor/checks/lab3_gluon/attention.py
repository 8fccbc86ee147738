"""Parts 5 and 6: online softmax in a kernel, producer and consumers, overlap, the causal mask, two softmaxes."""

from __future__ import annotations

import torch

from instructor.checks.common import Draw
from instructor.checks.lab3_gluon.pipelines import HALVES, timings
from utils.checking import check
from utils.checking.gluon_launches import (
    attention_inputs,
    attention_launch,
    edge_inputs,
    falling_inputs,
    overlap_launch,
    two_softmax_launch,
)
from utils.checking.labs.lab3_gluon import attention_rules


@check("5.1", "Online softmax in a kernel")
def softmax(source: str, seed=None):
    """Check the output at the edges of the mask, with large scores, and with scores that fall or rise between blocks."""
    draw = Draw(seed)
    inputs = [edge_inputs(draw.size(33, 64), sk, 64, HALVES[sk == 3], draw.normal) for sk in (3, 65, 1)]
    inputs += [
        attention_inputs(2, draw.size(65, 100), draw.size(66, 180), 128, 1.0, torch.float16, draw.normal),
        edge_inputs(draw.size(65, 90), draw.size(129, 190), 64, torch.float16, draw.normal),
        attention_inputs(1, 64, draw.size(140, 190), 128, 60.0, torch.bfloat16, draw.normal),
        falling_inputs(True, normal=draw.normal),
        falling_inputs(False, normal=draw.normal),
    ]
    attention_rules.softmax(source, [attention_launch("lab3_softmax.py", 64, *each) for each in inputs])


@check("5.2", "Producer and consumers")
def specialized(source: str, seed=None):
    """Check the output for one to three slots in any timing; K and V are loaded once for both consumers."""
    draw = Draw(seed)
    tries = []
    for stages, tail in zip((2, 1, 3), draw.choose(3, (1, 3, 65)), strict=True):
        keys = 192 + tail if tail < 64 else 128 + tail
        inputs = edge_inputs(draw.size(70, 128), keys, 64, draw.choice(HALVES), draw.normal)
        tries.append(attention_launch("lab3_specialized.py", 128, *inputs, STAGES=stages))
    attention_rules.specialized(source, tries, timings(draw))
    many = attention_inputs(1, 128, 448, 64, 1.0, draw.choice(HALVES), draw.normal)
    tries = [attention_launch("lab3_specialized.py", 128, *many, STAGES=draw.size(3, 5))]
    attention_rules.specialized(source, tries, (None,))


@check("5.3", "Overlap")
def overlap(source: str, seed=None):
    """Check the output in any timing; the softmax must run during a product."""
    draw = Draw(seed)
    tries = [
        overlap_launch(
            *edge_inputs(draw.size(70, 128), draw.size(200, 250), 64, draw.choice(HALVES), draw.normal), stages
        )
        for stages in (2, 3)
    ]
    attention_rules.overlap(source, tries, timings(draw))
    # Scores rise toward the first keys, which come last: the output so far must shrink in each block.
    sharp = overlap_launch(*attention_inputs(1, 128, 384, 128, 20.0, torch.bfloat16, draw.normal))
    attention_rules.expect_share(*attention_rules.overlap(source, [sharp], (None,)))


@check("Bonus 6.2", "Two softmaxes")
def two_softmax(source: str, seed=None):
    """Check the output in any timing, with a last block that is nearly empty and with scores that grow."""
    draw = Draw(seed)
    tries = [two_softmax_launch(*edge_inputs(draw.size(130, 256), 256 + draw.size(1, 60), 64, normal=draw.normal))]
    tries.append(two_softmax_launch(*attention_inputs(1, 256, 512, 128, 20.0, torch.float16, draw.normal)))
    attention_rules.two_softmax(source, tries, timings(draw))
