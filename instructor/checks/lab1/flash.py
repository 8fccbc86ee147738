"""Part 5: flash attention by hand."""

from __future__ import annotations

import torch

from instructor.checks.common import Draw
from utils.checking import check, expect_close, expect_follows_device
from utils.checking.labs.lab1.attention import FLASH, attend_in_float64, expect_tiled, expect_wide_inside


def _expect_wide_inside(function, draw: Draw, name: str) -> None:
    """Assert that the result is rounded once. With large scores, few weights count, and a rounded score shows."""
    for factor in (1, 8):
        q, k, v = (draw.normal(1, 2, n, 16, dtype=torch.bfloat16) for n in (16, 400, 400))
        expect_wide_inside(function, (factor * q, k, v), (16, 16), f"{name}{' of large scores' if factor > 1 else ''}")


def _expect_running_maximum(function, draw: Draw, name: str) -> None:
    """Assert a new maximum for each tile: from tile to tile, scores rise by more than any dtype's exponent allows."""
    s, d = 24, 8
    q, k = draw.normal(1, 1, s, d).abs() + 0.5, draw.normal(1, 1, s, d).abs() + 0.5
    k = k * torch.linspace(-300.0, 300.0, s)[None, None, :, None]
    v = draw.normal(1, 1, s, d)
    what = f"{name} of scores that rise by thousands from tile to tile"
    hint = "When a larger maximum comes, rescale what was there; the first tile's maximum is not the row's."
    got = function(q, k, v, 8, 8)
    expect_close(got, attend_in_float64(q, k, v), rtol=1e-3, atol=1e-3, what=what, hint=hint)


@check(**FLASH)
def flash_attention_tiled(flash_attention_tiled, seed=None):
    """Check any lengths and tiles, several dtypes and large scores; one tile of scores at a time."""
    draw = Draw(seed)
    name = "flash_attention_tiled"
    expect_tiled(flash_attention_tiled, [draw.normal(1, 2, 16, 8) for _ in range(3)], (8, 8), name)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2), (torch.float64, 1e-4)):
        b, h = draw.size(1, 3), draw.size(1, 3)
        s, length = draw.sizes(2, 17, 35)
        d = draw.choice((8, 12, 20))
        inputs = [draw.normal(b, h, tokens, d, dtype=dtype) for tokens in (s, length, length)]
        for tiles in (draw.sizes(2, 7, 16), (64, 64)):
            expect_tiled(flash_attention_tiled, inputs, tiles, name, tolerance)
    _expect_wide_inside(flash_attention_tiled, draw, name)
    _expect_running_maximum(flash_attention_tiled, draw, name)
    # The scores are so large that exp overflows, and so small that fp32 distinguishes the largest scores.
    q, k, v = 20 * draw.normal(1, 1, 33, 16), 20 * draw.normal(1, 1, 20, 16), draw.normal(1, 1, 20, 16)
    expect_tiled(flash_attention_tiled, (q, k, v), (6, 8), name, 1e-3)
    q, k, v = (draw.normal(1, 1, 70, 8) for _ in range(3))
    got = flash_attention_tiled(q, k, v)
    expect_close(got, attend_in_float64(q, k, v), rtol=1e-4, atol=1e-5, what=f"{name} with its default tiles")
    shapes = (1, 1, 6, 4), (1, 1, 9, 4), (1, 1, 9, 4)
    expect_follows_device(flash_attention_tiled, *shapes, 4, 4, what=f"{name}(q, k, v)")
