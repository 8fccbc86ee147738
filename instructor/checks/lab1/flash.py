"""Part 5: flash attention by hand, with and without a causal mask."""

from __future__ import annotations

import itertools

import torch

from instructor.checks.common import Draw, dtype_name, expect_follows_device, poisoned_memory
from instructor.checks.lab1.attention import attend_in_float64
from utils.checking import (
    FUSED_ATTENTION,
    SOFTMAX,
    SizeWatch,
    attention_mistake,
    check,
    expect_close,
    expect_rounded_once,
)

_ONE_TILE = "all that belongs to one tile of scores"
_BY_HAND = "the softmax is the running maximum and sum of online_softmax_stats"
_OF_SCORES = ("exp", "exp2", "amax", "max")  # operators of a softmax by hand


def _expect_tiled(function, inputs, tiles: tuple[int, int], name: str, tolerance: float = 1e-4) -> SizeWatch:
    """Assert the values of a call, and that no operator works on more than one tile of scores; return its sizes."""
    q, k, v = inputs
    (b, h, _, d), causal = q.shape, "causal" in name
    what = f"{name} of q {tuple(q.shape)}, k {tuple(k.shape)} with tiles {tuple(tiles)} in {dtype_name(q.dtype)}"
    tile = b * h * tiles[0] * tiles[1]
    # A whole q or output is no score, and a product of two tiles by broadcasting has d numbers for each score.
    limited = function.limited(max(tile * d, q.numel(), k.numel()))
    with poisoned_memory():
        got = limited(q, k, v, *tiles)
    scores = max((batch * m * n for batch, m, inner, n in limited.sizes.products if inner == d), default=0)
    found = ("the product of queries and keys", scores) if scores > tile else limited.sizes.over(tile, _OF_SCORES)
    if found:
        raise AssertionError(
            f"{what}: {found[0]} worked on {found[1]} scores at once; one tile of queries and one of keys have {b} x {h} x "
            f"{tiles[0]} x {tiles[1]} = {tile}."
        )
    hint = attention_mistake(got, q, k, v, causal=causal) or (
        "Look at the rescaling of BOTH the sum and the output, at the tiles at the edges, and at where m, l and O "
        "start."
    )
    right = attend_in_float64(q, k, v, causal=causal)
    expect_close(got, right, rtol=tolerance, atol=tolerance, what=what, hint=hint)
    return limited.sizes


def _expect_tiles_used(function, draw: Draw, name: str) -> None:
    """Assert that the tiles of scores are those that were asked for, where the scores are a matrix product."""
    # Few numbers for each token and many queries in a tile: then a row of tiles is larger than all that one may keep.
    tiles, d = (32, 24), 2
    sizes = _expect_tiled(function, [draw.normal(1, 2, 96, d) for _ in range(3)], tiles, name)
    sides = [max((product[i] for product in sizes.products if product[2] == d), default=0) for i in (1, 3)]
    if any(sides) and sorted(sides) != sorted(tiles):
        raise AssertionError(
            f"{name}: tiles of scores have up to {sides[0]} x {sides[1]} elements, and tile_q is {tiles[0]}, tile_k {tiles[1]}. "
            "Are the tile sizes used?"
        )


def _expect_wide_inside(function, draw: Draw, name: str) -> None:
    """Assert that inputs in 16 bits are computed on in float32, and rounded once.

    With large scores the weights are few, and what rounding a score costs stands out.
    """
    causal = "causal" in name
    s, tiles = (400, (200, 8)) if causal else (16, (8, 16))
    for factor in (1, 8):
        q, k, v = (draw.normal(1, 2, n, 16, dtype=torch.bfloat16) for n in (s, 400, 400))
        q = factor * q
        got = function(q, k, v, *tiles)
        exact = attend_in_float64(q.double(), k.double(), v.double(), causal=causal)
        what = f"{name} of 400 keys in bfloat16" + (" with large scores" if factor > 1 else "")
        expect_close(got, exact.to(q.dtype), rtol=0.1, atol=0.1, what=what)
        expect_rounded_once(got, exact, what, "scores, weights, maximum, sum and output")


def _expect_running_maximum(function, draw: Draw, causal: bool, name: str) -> None:
    """Assert that the maximum runs: from tile to tile the scores rise so far that no exponent, of any dtype, bridges it."""
    s, d = 24, 8
    q, k = draw.normal(1, 1, s, d).abs() + 0.5, draw.normal(1, 1, s, d).abs() + 0.5
    k = k * torch.linspace(-300.0, 300.0, s)[None, None, :, None]
    v = draw.normal(1, 1, s, d)
    what = f"{name} of scores that rise by thousands from tile to tile"
    hint = "When a larger maximum comes, rescale what was there; the first tile's maximum is not the row's."
    got = function(q, k, v, 8, 8)
    expect_close(got, attend_in_float64(q, k, v, causal=causal), rtol=1e-3, atol=1e-3, what=what, hint=hint)


@check("5.3", "Flash attention by hand", forbids=(FUSED_ATTENTION, SOFTMAX), largest=_ONE_TILE, hint=_BY_HAND)
def flash_attention_tiled(flash_attention_tiled, seed=None):
    """Check any lengths and tiles, several dtypes and large scores; one tile of scores at a time."""
    draw = Draw(seed)
    name = "flash_attention_tiled"
    _expect_tiled(flash_attention_tiled, [draw.normal(1, 2, 16, 8) for _ in range(3)], (8, 8), name)
    _expect_tiles_used(flash_attention_tiled, draw, name)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2), (torch.float64, 1e-4)):
        b, h = draw.size(1, 3), draw.size(1, 3)
        s, length = draw.sizes(2, 20, 50)
        d = draw.choice((8, 12, 20))
        inputs = [draw.normal(b, h, tokens, d, dtype=dtype) for tokens in (s, length, length)]
        for tiles in (draw.sizes(2, 7, 16), (64, 64)):
            _expect_tiled(flash_attention_tiled, inputs, tiles, name, tolerance)
    _expect_wide_inside(flash_attention_tiled, draw, name)
    _expect_running_maximum(flash_attention_tiled, draw, False, name)
    # Large enough for exp to overflow, small enough for fp32 to tell the largest scores apart.
    q, k, v = 20 * draw.normal(1, 1, 20, 16), 20 * draw.normal(1, 1, 33, 16), draw.normal(1, 1, 33, 16)
    _expect_tiled(flash_attention_tiled, (q, k, v), (6, 8), name, 1e-3)
    q, k, v = (draw.normal(1, 1, 70, 8) for _ in range(3))
    got = flash_attention_tiled(q, k, v)
    expect_close(got, attend_in_float64(q, k, v), rtol=1e-4, atol=1e-5, what=f"{name} with its default tiles")
    shapes = (1, 1, 6, 4), (1, 1, 9, 4), (1, 1, 9, 4)
    expect_follows_device(lambda a, b, c: flash_attention_tiled(a, b, c, 4, 4), *shapes, what=f"{name}(q, k, v)")


@check("Bonus 5.6", "Causal flash attention", forbids=(FUSED_ATTENTION, SOFTMAX), largest=_ONE_TILE, hint=_BY_HAND)
def flash_attention_causal(flash_attention_causal, seed=None):
    """Check the causal output; there must be no product for a tile that the mask hides."""
    draw = Draw(seed)
    name = "flash_attention_causal"
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        inputs = [draw.normal(2, 2, draw.size(30, 60), draw.choice((8, 16)), dtype=dtype)]
        inputs += [draw.normal(*inputs[0].shape, dtype=dtype) for _ in range(2)]
        for tiles in ((8, 8), draw.sizes(2, 7, 16), (17, 6), (6, 17), (64, 64)):
            _expect_tiled(flash_attention_causal, inputs, tiles, name, tolerance)
    _expect_tiles_used(flash_attention_causal, draw, name)
    _expect_wide_inside(flash_attention_causal, draw, name)
    _expect_running_maximum(flash_attention_causal, draw, True, name)
    for s, tile_q, tile_k in ((64, 16, 16), (draw.size(50, 70), 16, 8), (draw.size(50, 70), 8, 24)):
        inputs = [draw.normal(1, 1, s, 8) for _ in range(3)]
        macs = _expect_tiled(flash_attention_causal, inputs, (tile_q, tile_k), name).macs
        needed = whole = 0
        for i, j in itertools.product(range(0, s, tile_q), range(0, s, tile_k)):
            rows = min(tile_q, s - i)
            products = 2 * rows * min(tile_k, s - j) * 8
            whole += products
            needed += products if j <= i + rows - 1 else 0
        if macs > needed:
            more = " That is every tile." if macs == whole else ""
            raise AssertionError(
                f"{name} on {s} tokens with tiles ({tile_q}, {tile_k}) computed {macs:,} MACs in its products; the tiles with at "
                f"least one visible score need {needed:,}.{more} Where can the loop over keys stop?"
            )
