"""Part 5: flash attention by hand, with and without a causal mask."""

from __future__ import annotations

import itertools

import torch

from instructor.checks.common import (
    Draw,
    SizeWatch,
    dtype_name,
    expect_follows_device,
    expect_unchanged,
    let_narrow_wait,
    let_wait,
    poisoned_memory,
)
from instructor.checks.lab1.attention import SOFTMAX, attend_in_float64
from utils.checking import attention_mistake, check, expect_close, expect_rounded_once
from utils.checking.watching import FUSED_ATTENTION, forbid, forbid_leaving, watch_operations


def _expect_tiled(function, q, k, v, tile_q, tile_k, causal, rtol, atol, name) -> None:
    what = f"{name} of q {tuple(q.shape)}, k {tuple(k.shape)} with tiles ({tile_q}, {tile_k}) in {dtype_name(q.dtype)}"
    copies = q.clone(), k.clone(), v.clone()
    with poisoned_memory(), SizeWatch() as sizes, watch_operations() as watch:
        got = function(q, k, v, tile_q, tile_k)
    expect_unchanged(copies, (q, k, v), what)
    _expect_one_tile_at_a_time(sizes, watch, q, k, tile_q, tile_k, what)
    hint = attention_mistake(got, *copies, causal=causal) or (
        "Look at the rescaling of BOTH the sum and the output, at the tiles at the edges, and at where m, l and O "
        "start."
    )
    expect_close(got, attend_in_float64(*copies, causal=causal), rtol=rtol, atol=atol, what=what, hint=hint)


def _expect_one_tile_at_a_time(sizes: SizeWatch, watch, q, k, tile_q: int, tile_k: int, what: str) -> None:
    """Assert for any sizes and dtypes what holds for all: no softmax of the library, and no scores of more than a tile at once."""
    forbid(
        watch, (*FUSED_ATTENTION, *SOFTMAX), hint="the softmax is the running maximum and sum of online_softmax_stats"
    )
    forbid_leaving(watch)
    (b, h, _, d), tile = q.shape, q.shape[0] * q.shape[1] * tile_q * tile_k
    scores = max((batch * m * n for batch, m, inner, n in sizes.products if inner == d), default=0)
    by_broadcasting, most = sizes.largest_multiplied[1], max(tile * d, q.numel(), k.numel())
    found = scores if scores > tile else by_broadcasting // d if by_broadcasting > most else 0
    if found:
        raise AssertionError(
            f"{what} works on {found} scores at once; one tile of queries and one of keys have {b} x {h} x {tile_q} x {tile_k} = {tile}, "
            "whatever the sizes and the dtype of q and k."
        )


def _expect_wide_inside(function, draw: Draw, causal: bool, name: str) -> None:
    """Assert that inputs in 16 bits are computed on in float32, and rounded once.

    With large scores the weights are few, and what rounding a score costs stands out.
    """
    s, tiles = (400, (200, 4)) if causal else (24, (8, 16))
    for dtype, factor in itertools.product((torch.bfloat16, torch.float16), (1, 8)):
        q, k, v = (draw.normal(1, 2, n, 16, dtype=dtype) for n in (s, 400, 400))
        q = factor * q
        with SizeWatch() as sizes:
            got = function(q, k, v, *tiles)
        exact = attend_in_float64(q.double(), k.double(), v.double(), causal=causal)
        what = f"{name} of 400 keys in {dtype_name(dtype)}" + (" with large scores" if factor > 1 else "")
        expect_close(got, exact.to(q.dtype), rtol=0.1, atol=0.1, what=what)
        expect_rounded_once(got, exact, what, "scores, weights, maximum, sum and output")
        let_narrow_wait(sizes, what)
    # All scores are 0, so the output is the mean of v: ones, and 2^18, which is taken away by the last key.
    q, v = torch.zeros(1, 1, 12, 4, dtype=torch.bfloat16), torch.ones(1, 1, 12, 4, dtype=torch.bfloat16)
    v[:, :, 0], v[:, :, -1] = 2.0**18, -(2.0**18)
    last = function(q, q, v, 12, 2)[0, 0, -1, 0].item()
    if not abs(last - 10 / 12) < 0.2:
        raise AssertionError(
            f"{name} of 12 keys in bfloat16, where v holds 2^18, ten times 1 and -2^18, gives {last:g} for the last query, and the mean is "
            f"{10 / 12:.3g}: a sum in float32 loses nothing here. What rounds it on the way?"
        )


class _Tiles(SizeWatch):
    """Records at which steps a product of queries and keys begins, if it is a matrix product."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.begins: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = len(self.products)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.products) > before and self.products[-1][2] == self.head_dim:
            self.begins.append(len(self.steps))
        return result


def _expect_tiles_only(function, draw: Draw, name: str) -> SizeWatch:
    """Assert that no fused operator and no operator on whole rows runs, and that only one tile of scores exists at a time."""
    # Few numbers for each token and many queries in a tile: then a row of tiles is larger than all that one may keep.
    b, h, s, d, tile_q, tile_k = 1, 2, 288, 2, 32, 24
    q, k, v = (draw.normal(b, h, s, d) for _ in range(3))
    copies = q.clone(), k.clone(), v.clone()
    with _Tiles(d) as sizes, watch_operations() as watch:
        got = function(q, k, v, tile_q, tile_k)
    forbid(
        watch, (*FUSED_ATTENTION, *SOFTMAX), hint="the softmax is the running maximum and sum of online_softmax_stats"
    )
    forbid_leaving(watch)
    tile = b * h * tile_q * tile_k
    largest = max((batch * m * n for batch, m, k, n in sizes.products if k == d), default=0)
    # A whole q or output is no score. Products of two tiles by broadcasting have d elements for each score; a tile of queries
    # with all keys has 1.5 times as many scores.
    found = (
        sizes.over(tile, ("exp", "exp2", "amax", "max"))
        or sizes.over_in_softmax(max(tile, q.numel()), tile * d)
        or (("the product of queries and keys", largest) if largest > tile else None)
    )
    if found:
        line = watch.lines.get(found[0])
        raise AssertionError(
            f"{name}: {found[0]} worked on {found[1]} scores at once; one tile of queries and one of keys have "
            f"{b} x {h} x {tile_q} x {tile_k} = {tile}." + (f"\n  {line}" if line else "")
        )
    # One query at a time has few scores as well; a row that is longer than a tile is no row of a tile.
    rows = max((max(m, n) for _, m, k, n in sizes.products), default=0)
    most = 2 * max(tile_q, tile_k)  # the maximum so far may stand beside the scores of a tile
    along = sizes.longer_in_softmax(most) or (("the product", rows) if rows > most else None)
    if along:
        raise AssertionError(
            f"{name}: {along[0]} worked along {along[1]} queries or keys at once, and a tile has {tile_q} queries and "
            f"{tile_k} keys: walk along the keys tile by tile, with a running maximum and a running sum."
        )
    needed = 2 * b * h * s * s * d  # multiply-accumulates of both products
    done = max(
        sizes.macs, (sizes.macs + sizes.multiplied) / 1.35
    )  # by broadcasting, with what scales scores and output
    if (
        done > 1.55 * needed
    ):  # all maxima first and then the sums is half as much again, and a way that honest students take
        raise AssertionError(
            f"{name} multiplied {done:,.0f} pairs of numbers in its products, and each tile of scores once takes {needed:,}: one "
            "pass over the keys is enough, which corrects what came before when a larger maximum comes."
        )
    sizes.expect_seen(needed // (2 if "causal" in name else 1), name)
    # The sides of the largest tile of scores, if it is a matrix product: the tiles that were asked for.
    sides = [max((p[i] for p in sizes.products if p[2] == d), default=0) for i in (1, 3)]
    if largest and sorted(sides) != sorted((tile_q, tile_k)):
        raise AssertionError(
            f"{name}: tiles of scores have up to {sides[0]} x {sides[1]} elements, and tile_q is {tile_q}, tile_k {tile_k}. "
            "Are the tile sizes used?"
        )
    found = sizes.over(s * s - 1, sizes.computing) or (sizes.created if sizes.created[1] >= s * s else None)
    if found:
        raise AssertionError(
            f"{name}: {found[0]} worked on {found[1]:,} elements, as many as there are pairs of {s} tokens. No tensor may be as large "
            "as the scores of one head, a mask neither."
        )
    # The output, q, k and v in float32, and a few tiles of scores or of products by broadcasting.
    most = 4 * q.numel() + 2 * tile * (1 + d)
    if sizes.held > most:
        raise AssertionError(
            f"{name} kept {sizes.held:,} numbers at once; q, k, v, the output and a few tiles are fewer than {most:,}. Use a tile "
            "of scores up before the next one comes: that is what the running maximum and the running sum are for."
        )
    if any(sizes.carried(step, tile) for step in sizes.begins):
        raise AssertionError(
            f"{name} needs the scores of a tile again after the product of the next one has begun. Use a tile of scores up before the next "
            "one comes."
        )
    what = f"{name} of {s} tokens with tiles ({tile_q}, {tile_k})"
    expect_close(got, attend_in_float64(*copies, causal="causal" in name), rtol=1e-4, atol=1e-5, what=what)
    return sizes


def _let_other_tiles_wait(function, draw: Draw, name: str) -> None:
    """Let an answer wait whose tiles of scores have other numbers of queries and keys than were asked for, such as each other's."""
    tile_q, tile_k, d = 32, 24, 3
    q, k, v = (draw.normal(1, 1, tokens, d) for tokens in (2 * tile_q + 5, 3 * tile_k + 7, 3 * tile_k + 7))
    with SizeWatch() as sizes:
        function(q, k, v, tile_q, tile_k)
    right = {
        frozenset((rows, columns)) for rows in (tile_q, 5) for columns in (tile_k, 7)
    }  # a product may be transposed
    for _, m, inner, n in sizes.products:
        if inner == d and frozenset((m, n)) not in right:
            let_wait(
                f"multiplies tiles of {m} and {n} queries and keys in {name}, with tile_q = {tile_q} and tile_k = {tile_k}"
            )
            return


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


def _as_in_models(draw: Draw) -> list[tuple]:
    """(shape, dtype, tolerance) of inputs with long texts, with large heads, and with many heads."""
    return [
        ((1, 1, draw.size(600, 800), 8), torch.float32, 1e-4),
        ((1, 2, draw.size(130, 150), 128), torch.bfloat16, 3e-2),
        ((3, draw.size(6, 9), draw.size(65, 80), 16), torch.float16, 1e-2),
    ]


@check("5.3", "Flash attention by hand")
def flash_attention_tiled(flash_attention_tiled, seed=None):
    """Check any lengths and tiles, several dtypes and large scores; one tile of scores at a time."""
    draw = Draw(seed)
    name = "flash_attention_tiled"
    q, k, v = (draw.normal(1, 2, 16, 8) for _ in range(3))
    _expect_tiled(flash_attention_tiled, q, k, v, 8, 8, False, 1e-4, 1e-5, name)
    _expect_tiles_only(flash_attention_tiled, draw, name)
    _let_other_tiles_wait(flash_attention_tiled, draw, name)
    for dtype, rtol, atol in ((torch.float32, 1e-4, 1e-5), (torch.bfloat16, 3e-2, 3e-2), (torch.float64, 1e-4, 1e-5)):
        b, h = draw.size(1, 3), draw.size(1, 3)
        s, length = draw.sizes(2, 20, 50)
        d = draw.choice((8, 12, 20))
        q = draw.normal(b, h, s, d, dtype=dtype)
        k, v = draw.normal(b, h, length, d, dtype=dtype), draw.normal(b, h, length, d, dtype=dtype)
        for tile_q, tile_k in (draw.sizes(2, 5, 13), (64, 64)):
            _expect_tiled(flash_attention_tiled, q, k, v, tile_q, tile_k, False, rtol, atol, name)
    for sizes, dtype, rough in _as_in_models(draw):
        q, k, v = (draw.normal(*sizes, dtype=dtype) for _ in range(3))
        _expect_tiled(flash_attention_tiled, q, k, v, 64, 64, False, rough, rough, name)
    _expect_wide_inside(flash_attention_tiled, draw, False, name)
    _expect_running_maximum(flash_attention_tiled, draw, False, name)
    # Large enough for exp to overflow, small enough for fp32 to tell the largest scores apart.
    q, k, v = 20 * draw.normal(1, 1, 20, 16), 20 * draw.normal(1, 1, 33, 16), draw.normal(1, 1, 33, 16)
    _expect_tiled(flash_attention_tiled, q, k, v, 6, 8, False, 1e-3, 1e-3, name)
    q, k, v = (draw.normal(1, 1, 70, 8) for _ in range(3))
    got = flash_attention_tiled(q, k, v)
    expect_close(got, attend_in_float64(q, k, v), rtol=1e-4, atol=1e-5, what=f"{name} with its default tiles")
    shapes = (1, 1, 6, 4), (1, 1, 9, 4), (1, 1, 9, 4)
    expect_follows_device(lambda a, b, c: flash_attention_tiled(a, b, c, 4, 4), *shapes, what=f"{name}(q, k, v)")


@check("Bonus 5.6", "Causal flash attention")
def flash_attention_causal(flash_attention_causal, seed=None):
    """Check the causal output; there must be no product for a tile that the mask hides."""
    draw = Draw(seed)
    name = "flash_attention_causal"
    for dtype, rtol, atol in ((torch.float32, 1e-4, 1e-5), (torch.bfloat16, 3e-2, 3e-2)):
        s, d = draw.size(30, 60), draw.choice((8, 16))
        q, k, v = (draw.normal(2, 2, s, d, dtype=dtype) for _ in range(3))
        for tile_q, tile_k in ((8, 8), draw.sizes(2, 5, 13), (17, 4), (4, 17), (64, 64)):
            _expect_tiled(flash_attention_causal, q, k, v, tile_q, tile_k, True, rtol, atol, name)
    for sizes, dtype, rough in _as_in_models(draw):
        q, k, v = (draw.normal(*sizes, dtype=dtype) for _ in range(3))
        _expect_tiled(flash_attention_causal, q, k, v, 64, 64, True, rough, rough, name)
    _expect_tiles_only(flash_attention_causal, draw, name)
    _expect_wide_inside(flash_attention_causal, draw, True, name)
    _expect_running_maximum(flash_attention_causal, draw, True, name)
    for s, tile_q, tile_k in ((96, 16, 16), (draw.size(60, 90), 16, 8), (draw.size(60, 90), 8, 24)):
        q, k, v = (draw.normal(1, 1, s, 8) for _ in range(3))
        expected = attend_in_float64(q, k, v, causal=True)
        with SizeWatch() as sizes:
            got = flash_attention_causal(q, k, v, tile_q, tile_k)
        needed = whole = 0
        for i in range(0, s, tile_q):
            rows = min(tile_q, s - i)
            for j in range(0, s, tile_k):
                macs = 2 * rows * min(tile_k, s - j) * 8
                whole += macs
                needed += macs if j <= i + rows - 1 else 0
        # By broadcasting, the products are elementwise ones; besides them, scores and output are scaled.
        by_broadcasting = sizes.macs + sizes.multiplied > 1.35 * needed
        if sizes.macs > needed or by_broadcasting:
            more = " That is every tile." if sizes.macs == whole else ""
            raise AssertionError(
                f"{name} on {s} tokens with tiles ({tile_q}, {tile_k}) computed {sizes.macs:,} MACs in its products"
                + (f" and {sizes.multiplied:,} elementwise" if by_broadcasting else "")
                + f"; the tiles with at least one visible score need {needed:,}.{more} Where can the loop over keys stop?"
            )
        what = f"{name} of {s} tokens with tiles ({tile_q}, {tile_k})"
        expect_close(got, expected, rtol=1e-4, atol=1e-5, what=what)
