"""Part 4: the checks that students see, on drawn shapes and dtypes."""

from __future__ import annotations

import torch

from instructor.checks.common import Draw
from instructor.checks.lab4_sdpa.common import reasons_of
from utils.checking.labs.lab4_sdpa.common import check, replace_answers
from utils.checking.labs.lab4_sdpa.layouts import (
    expect_knock_outs,
    expect_ready,
    expect_strides,
    expect_unpacked,
    layouts_of,
)


@check("4.1", "Strides")
def strides(knocked_out_by_strides, strided_and_fast, seed=None):
    """Check that shape and values stay the same; the dispatcher decides which backends still accept the call."""
    draw = Draw(seed)
    for length in (draw.size(9, 30), draw.size(31, 90)):
        shape = draw.size(1, 3), draw.size(2, 5), length, draw.choice((16, 32, 64))
        expect_strides(knocked_out_by_strides, strided_and_fast, draw.normal(*shape))


@check("4.2", "Four more knock-outs")
def knock_outs(knock_outs, seed=None):
    """Check calls that flash refuses and math computes, for four different reasons other than strides."""
    expect_knock_outs(knock_outs, Draw(seed).normal)


@check("4.3", "Apart without a copy")
def unpack(unpack_qkv, ready_for_flash, seed=None):
    """Check views of one projection that flash accepts; a copy is allowed only where it is needed."""
    draw = Draw(seed)
    for length, dtype, apart in ((20, torch.float32, 1), (60, torch.bfloat16, 1), (60, torch.float16, 2)):
        b, kv, group = (draw.size(2, 3) for _ in range(3))
        s, d = draw.size(9, length), draw.choice((8, 16, 32))
        # With `apart` 2, every second token of a longer projection is taken.
        packed = draw.normal(b, s * apart, kv * (group + 2) * d, dtype=dtype)[:, apart - 1 :: apart]
        expect_unpacked(unpack_qkv, packed, kv * group, kv)
    for half, dtype in ((draw.size(5, 10), torch.float32), (20, torch.bfloat16)):
        x = draw.normal(draw.size(2, 3), draw.size(2, 4), 2 * half, draw.choice((16, 32)), dtype=dtype)
        for what, (tensor, copied) in layouts_of(x).items():
            with replace_answers(ready_for_flash, {"why_not": reasons_of}):
                expect_ready(ready_for_flash, tensor, copied, what)
