"""Part 5: standard attention, layouts, online softmax, flash attention by hand, merging."""

from __future__ import annotations

import math
import re

import torch

from instructor.checks.common import (
    DTYPES,
    Draw,
    SizeWatch,
    dtype_name,
    expect_follows_device,
    expect_unchanged,
    expect_value,
    poisoned_memory,
)
from utils.attention import reference
from utils.checking import attention_mistake, check, expect_close
from utils.checking.watching import FUSED_ATTENTION, demand, forbid, forbid_leaving, watch_operations

# What the text names: "softmax and logsumexp of the library, under any name". logaddexp is allowed.
_SOFTMAX = (r"\w*softmax\w*", r"\w*logsumexp\w*", "logcumsumexp", "softmin")
_FUSED_ON_CPU = r"_scaled_dot_product_\w+"
_BESIDE_SDPA = r"mm|bmm|addmm|baddbmm|mv|dot|\w*softmax|exp2?|expm1|sigmoid|tanh|pow"
# {causal: {factor of the queries: largest rms error in bf16}}. With float32 inside it is 0.0018 at most, with probabilities in
# the dtype of v, as libraries have them, 0.003. With scores in bf16 it is 0.01 at factor 8, with the output in bf16 0.006.
_ACCURATE_ENOUGH = {False: {1: 0.006, 8: 0.005}, True: {1: 0.0045, 8: 0.005}}


def _reference(q, k, v, causal=False):
    """Compute attention of (B, H, S, D) in float64, rounded to the dtype of q."""
    return reference(q, k, v, causal=causal)[0].to(q.dtype)


@check("5.1", "Standard attention")
def standard_attention(standard_attention, seed=None):
    """Check softmax(q k^T / sqrt(D)) v, without a fused operator and without a causal mask."""
    draw = Draw(seed)
    q, k, v = (draw.normal(1, 2, 5, 8) for _ in range(3))
    copies = q.clone(), k.clone(), v.clone()
    with SizeWatch() as sizes, watch_operations() as watch:
        watched = standard_attention(q, k, v)
    forbid(watch, FUSED_ATTENTION, hint="write the three lines yourself")
    right = _reference(*copies)
    for dtype, rtol, atol in ((torch.float32, 1e-4, 1e-5), (torch.float64, 1e-5, 1e-6)):
        b, h, s = draw.sizes(3, 2, 20)
        d = draw.choice((6, 12, 20))  # no square, so that sqrt(D) is no short number
        q, k, v = (2 * draw.normal(b, h, s, d, dtype=dtype) for _ in range(3))
        copies = q.clone(), k.clone(), v.clone()
        got = standard_attention(q, k, v)
        what = f"standard_attention of ({b}, {h}, {s}, {d}) in {dtype_name(dtype)}"
        expect_unchanged(copies, (q, k, v), what)
        hint = attention_mistake(got, q, k, v) or "Which dimension is the softmax over?"
        expect_close(got, _reference(q, k, v), rtol=rtol, atol=atol, what=what, hint=hint)
    # Large enough for exp to overflow, small enough for fp32 to tell the largest scores apart.
    q, k, v = 20 * draw.normal(1, 1, 6, 64), 20 * draw.normal(1, 1, 6, 64), draw.normal(1, 1, 6, 64)
    got = standard_attention(q, k, v)
    expect_close(
        got,
        _reference(q, k, v),
        rtol=1e-3,
        atol=1e-3,
        what="standard_attention with scores in the hundreds",
        hint="exp overflows: subtract the largest score first, or use torch.softmax.",
    )
    expect_close(watched, right, rtol=1e-4, atol=1e-5, what="standard_attention of (1, 2, 5, 8)")
    sizes.expect_seen(2 * 2 * 5 * 5 * 8, "standard_attention")


@check("5.1", "Memory of the scores")
def attention_memory(score_bytes, longest_length, seed=None):
    """Check the bytes of one score matrix, and the length at which two of them fill a memory."""
    draw = Draw(seed)
    for dtype in DTYPES[:3]:
        b, h, s = draw.sizes(3, 2, 300)
        size = dtype.itemsize
        expect_value(
            score_bytes(b, h, s, dtype),
            b * h * s * s * size,
            "bytes",
            f"score_bytes({b}, {h}, {s}, {dtype_name(dtype)})",
            {
                "One score for each pair of a query and a key.": b * h * s * size,
                "Each head has scores of its own.": b * s * s * size,
                "The number of bytes depends on the dtype.": b * h * s * s * 4,
                "These are elements, not bytes.": b * h * s * s,
                "One matrix was asked for.": 2 * b * h * s * s * size,
            },
        )
        memory = draw.size(10**9, 10**11)
        s = math.isqrt(memory // (2 * b * h * size))
        expect_value(
            longest_length(memory, b, h, dtype),
            s,
            "",
            f"longest_length({memory}, {b}, {h}, {dtype_name(dtype)})",
            {
                "Scores and probabilities are both there.": math.isqrt(memory // (b * h * size)),
                "One more does not fit.": s + 1,
                "A longer one fits.": s - 1,
                "Memory grows with the square of the length.": memory // (2 * b * h * size),
                "A length is an integer.": math.sqrt(memory / (2 * b * h * size)),
            },
            rel=1e-9,
        )


@check("5.2", "Attention with (B, S, H, D) inputs")
def attention_bshd(attention_bshd, seed=None):
    """Check the layout, the causal mask and grouped heads, and that SDPA computes it."""
    draw = Draw(seed)
    for s, heads, kv_heads in ((draw.size(9, 15), 4, 4), (6, 6, 6), (draw.size(9, 15), 6, 2), (draw.size(9, 15), 4, 1)):
        b, d = draw.size(2, 3), draw.choice((8, 16))
        q, k, v = draw.normal(b, s, heads, d), draw.normal(b, s, kv_heads, d), draw.normal(b, s, kv_heads, d)
        inputs = q.clone(), k.clone(), v.clone()
        with watch_operations() as watch:
            got = attention_bshd(*inputs)
        what = f"attention_bshd of q ({b}, {s}, {heads}, {d}) with {kv_heads} key-value heads"
        expect_unchanged((q, k, v), inputs, what)

        def attend(causal, q=q, k=k, v=v, group=heads // kv_heads):
            keys, values = (t.transpose(1, 2).repeat_interleave(group, dim=1) for t in (k, v))
            return _reference(q.transpose(1, 2), keys, values, causal=causal).transpose(1, 2)

        hint = "Which two dimensions does SDPA take as tokens and head dimension?"
        if isinstance(got, torch.Tensor) and got.shape == q.shape:
            if torch.allclose(got, attend(False).to(got.dtype), rtol=1e-3, atol=1e-4):
                hint = "It is not causal: each token sees the tokens after it."
            elif heads == kv_heads and torch.allclose(got, _reference(q, k, v, causal=True).to(got.dtype), atol=1e-4):
                hint = "This is attention over HEADS instead of tokens: SDPA wants (B, H, S, D)."
        elif isinstance(got, torch.Tensor) and got.shape == (b, heads, s, d):
            hint = "Turn the result back to (B, S, H, D)."
            raise AssertionError(f"{what} should have shape {tuple(q.shape)}, and has {tuple(got.shape)}. {hint}")
        expect_close(got, attend(True), rtol=1e-4, atol=1e-5, what=what, hint=hint)
        calls = sum(count for name, count in watch.calls.items() if name.strip("_") == "scaled_dot_product_attention")
        if calls > 1:
            raise AssertionError(
                f"{what} calls SDPA {calls} times; one call does it for all sequences, heads and groups of heads."
            )
    q, k, v = (draw.normal(1, 64, 2, 8) for _ in range(3))
    with watch_operations() as watch:
        watched = attention_bshd(q, k, v)
    demand(watch, FUSED_ATTENTION, hint="call F.scaled_dot_product_attention on views with the heads before the tokens")
    ran = [name for name, count in watch.operations.items() for _ in range(count) if re.fullmatch(_FUSED_ON_CPU, name)]
    beside = [name for name in watch.operations if re.fullmatch(_BESIDE_SDPA, name)]
    if len(ran) != 1 or beside:
        raise AssertionError(
            f"attention_bshd computes attention by {', '.join((*ran, *beside)) or 'nothing that is fused'}; one call of SDPA does it "
            "for all heads, and leaves no product and no exponential to do."
        )
    views = (x.transpose(1, 2) for x in (q, k, v))
    right = _reference(*views, causal=True).transpose(1, 2)
    expect_close(watched, right, rtol=1e-4, atol=1e-5, what="attention_bshd of (1, 64, 2, 8)")


def _softmax_stats(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    m = x.amax(dim=1)
    return m, torch.exp(x - m[:, None]).sum(dim=1)


@check("5.3", "Online softmax")
def online_softmax_stats(online_softmax_stats, seed=None):
    """Check the running maximum and sum; each block is read once."""
    draw = Draw(seed)
    for middle, order, dtype in (
        (0, None, torch.float32),
        (1000, None, torch.float32),
        (-1000, None, torch.float64),
        (0, "rising", torch.float32),
        (0, "falling", torch.float32),
        (0, "jumping", torch.float64),
        (0, "narrow", torch.float32),
    ):
        rows, widths = draw.size(3, 7), [draw.size(4, 9) for _ in range(draw.size(9, 12))]
        if order == "narrow":
            widths = [2] * 40
        if order is None:
            widths[0] = 1
        x = middle + 3 * draw.normal(rows, sum(widths), dtype=dtype)
        if order == "jumping":  # so far that no exponent bridges it, in any dtype
            x[:, widths[0] :] += 1000.0
            x[:, : widths[0]] -= 1000.0
        elif order in ("rising", "falling"):
            x = x.sort(dim=1, descending=order == "falling").values
        blocks = x.split(widths, dim=1)
        copies = [block.clone() for block in blocks]
        taken = []

        def arriving(copies=copies, taken=taken):
            for i, block in enumerate(copies):
                taken.append(i)
                yield block
                block.fill_(math.nan)  # each block can be read once

        with SizeWatch() as sizes, watch_operations() as watch:
            result = online_softmax_stats(arriving())
        forbid_leaving(watch)
        if len(taken) != len(widths):
            raise AssertionError(f"{len(widths)} blocks arrived, and {len(taken)} were looked at.")
        largest = rows * max(widths)
        if found := sizes.over(largest + 2 * rows):  # a block, the maximum and the sum so far
            raise AssertionError(
                f"the operator {found[0]} worked on {found[1]} elements; no block has over {largest}. Keep a running "
                "maximum and a running sum, and look at one block at a time."
            )
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise AssertionError(f"online_softmax_stats should return (m, l), and returned {type(result).__name__}.")
        if (held := sizes.held) > 3 * largest + 8 * rows:
            raise AssertionError(
                f"online_softmax_stats kept {held} numbers at once; no block has over {largest}. Keep a running maximum and a "
                "running sum, and no block."
            )
        m, l = _softmax_stats(x.double())  # noqa: E741 (the formula's letter)
        name = f"{len(widths)} blocks" + (f" with {order} values" if order else f" with values around {middle}")
        expect_close(
            result[0],
            m.to(dtype),
            rtol=1e-6,
            atol=1e-5,
            what=f"m of {name}",
            hint="m is the largest value of the row over all blocks.",
        )
        hint = "When a block brings a larger maximum, what happens to the sum so far?"
        expect_close(result[1], l.to(dtype), rtol=1e-3, atol=1e-6, what=f"l of {name}", hint=hint)


def _expect_tiled(function, q, k, v, tile_q, tile_k, causal, rtol, atol, name) -> None:
    what = f"{name} of q {tuple(q.shape)}, k {tuple(k.shape)} with tiles ({tile_q}, {tile_k}) in {dtype_name(q.dtype)}"
    copies = q.clone(), k.clone(), v.clone()
    with poisoned_memory():
        got = function(q, k, v, tile_q, tile_k)
    expect_unchanged(copies, (q, k, v), what)
    hint = attention_mistake(got, *copies, causal=causal) or (
        "Look at the rescaling of BOTH the sum and the output, at the tiles at the edges, and at where m, l and O "
        "start."
    )
    expect_close(got, _reference(*copies, causal=causal), rtol=rtol, atol=atol, what=what, hint=hint)


def _expect_wide_inside(function, draw: Draw, causal: bool, name: str) -> None:
    """Assert that bf16 inputs are computed on in float32: an error of bf16 in each tile adds up.

    With large scores the weights are few, and what rounding a score costs stands out.
    """
    s, tiles = (400, (50, 4)) if causal else (24, (8, 16))
    for factor, limit in _ACCURATE_ENOUGH[causal].items():
        q, k, v = (draw.normal(1, 2, n, 16, dtype=torch.bfloat16) for n in (s, 400, 400))
        q = factor * q
        got = function(q, k, v, *tiles)
        exact = _reference(q.double(), k.double(), v.double(), causal=causal)
        what = f"{name} of 400 keys in bfloat16" + (" with large scores" if factor > 1 else "")
        expect_close(got, exact.to(q.dtype), rtol=0.1, atol=0.1, what=what)
        error = float(((got.double() - exact).square().mean() / exact.square().mean()).sqrt())
        if error > limit:
            raise AssertionError(
                f"{what} is off by {error:.2%} (root mean square); with float32 inside it is about 0.2%. Which of scores, maximum, "
                "sum and output are still in bfloat16?"
            )


def _expect_tiles_only(function, draw: Draw, name: str) -> SizeWatch:
    """Assert that no fused operator and no operator on whole rows runs, and that only one tile of scores exists at a time."""
    # Few numbers for each token and many queries in a tile: then a row of tiles is larger than all that one may keep.
    b, h, s, d, tile_q, tile_k = 1, 2, 288, 2, 32, 24
    q, k, v = (draw.normal(b, h, s, d) for _ in range(3))
    copies = q.clone(), k.clone(), v.clone()
    with SizeWatch() as sizes, watch_operations() as watch:
        got = function(q, k, v, tile_q, tile_k)
    forbid(
        watch, (*FUSED_ATTENTION, *_SOFTMAX), hint="the softmax is the running maximum and sum of online_softmax_stats"
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
    what = f"{name} of {s} tokens with tiles ({tile_q}, {tile_k})"
    expect_close(got, _reference(*copies, causal="causal" in name), rtol=1e-4, atol=1e-5, what=what)
    return sizes


def _expect_running_maximum(function, draw: Draw, causal: bool, name: str) -> None:
    """Assert that the maximum runs: from tile to tile the scores rise so far that no exponent, of any dtype, bridges it."""
    s, d = 24, 8
    q, k = draw.normal(1, 1, s, d).abs() + 0.5, draw.normal(1, 1, s, d).abs() + 0.5
    k = k * torch.linspace(-300.0, 300.0, s)[None, None, :, None]
    v = draw.normal(1, 1, s, d)
    what = f"{name} of scores that rise by thousands from tile to tile"
    hint = "When a larger maximum comes, rescale what was there; the first tile's maximum is not the row's."
    got = function(q, k, v, 8, 8)
    expect_close(got, _reference(q, k, v, causal=causal), rtol=1e-3, atol=1e-3, what=what, hint=hint)


@check("5.3", "Flash attention by hand")
def flash_attention_tiled(flash_attention_tiled, seed=None):
    """Check any lengths and tiles, several dtypes and large scores; one tile of scores at a time."""
    draw = Draw(seed)
    name = "flash_attention_tiled"
    q, k, v = (draw.normal(1, 2, 16, 8) for _ in range(3))
    _expect_tiled(flash_attention_tiled, q, k, v, 8, 8, False, 1e-4, 1e-5, name)
    _expect_tiles_only(flash_attention_tiled, draw, name)
    for dtype, rtol, atol in ((torch.float32, 1e-4, 1e-5), (torch.bfloat16, 3e-2, 3e-2), (torch.float64, 1e-4, 1e-5)):
        b, h = draw.size(1, 3), draw.size(1, 3)
        s, length = draw.sizes(2, 20, 50)
        d = draw.choice((8, 12, 20))
        q = draw.normal(b, h, s, d, dtype=dtype)
        k, v = draw.normal(b, h, length, d, dtype=dtype), draw.normal(b, h, length, d, dtype=dtype)
        for tile_q, tile_k in (draw.sizes(2, 5, 13), (64, 64)):
            _expect_tiled(flash_attention_tiled, q, k, v, tile_q, tile_k, False, rtol, atol, name)
    _expect_wide_inside(flash_attention_tiled, draw, False, name)
    _expect_running_maximum(flash_attention_tiled, draw, False, name)
    # Large enough for exp to overflow, small enough for fp32 to tell the largest scores apart.
    q, k, v = 20 * draw.normal(1, 1, 20, 16), 20 * draw.normal(1, 1, 33, 16), draw.normal(1, 1, 33, 16)
    _expect_tiled(flash_attention_tiled, q, k, v, 6, 8, False, 1e-3, 1e-3, name)
    q, k, v = (draw.normal(1, 1, 70, 8) for _ in range(3))
    got = flash_attention_tiled(q, k, v)
    expect_close(got, _reference(q, k, v), rtol=1e-4, atol=1e-5, what=f"{name} with its default tiles")
    shapes = (1, 1, 6, 4), (1, 1, 9, 4), (1, 1, 9, 4)
    expect_follows_device(lambda a, b, c: flash_attention_tiled(a, b, c, 4, 4), *shapes, what=f"{name}(q, k, v)")


@check("5.4", "Intensity of attention")
def attention_intensity(attention_intensity, seed=None):
    """Check standard and flash attention for several dtypes."""
    draw = Draw(seed)
    for dtype in DTYPES[:3]:
        s, d = draw.size(100, 9000), draw.choice((48, 64, 96, 128, 256))
        size, flops = dtype.itemsize, 4 * s * s * d
        for flash in (False, True):
            n_bytes = (4 * s * d + (0 if flash else 4 * s * s)) * size
            expect_value(
                attention_intensity(s, d, dtype, flash),
                flops / n_bytes,
                "FLOPs/Byte",
                f"attention_intensity({s}, {d}, {dtype_name(dtype)}, flash={flash})",
                {
                    "Scores are written, read, written and read: four times.": flops / ((4 * s * d + 2 * s * s) * size),
                    "O is written, too.": flops / (n_bytes - s * d * size),
                    "Two products, two FLOPs a MAC: 4 L² D.": flops / 2 / n_bytes,
                    "Flash attention never writes the scores.": flops / ((4 * s * d + 4 * s * s) * size),
                    "Standard attention writes the scores to memory.": flops / (4 * s * d * size),
                    "Q, K, V and O travel as well.": flops / (4 * s * s * size),
                },
            )


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
    _expect_tiles_only(flash_attention_causal, draw, name)
    _expect_wide_inside(flash_attention_causal, draw, True, name)
    _expect_running_maximum(flash_attention_causal, draw, True, name)
    for s, tile_q, tile_k in ((96, 16, 16), (draw.size(60, 90), 16, 8), (draw.size(60, 90), 8, 24)):
        q, k, v = (draw.normal(1, 1, s, 8) for _ in range(3))
        expected = _reference(q, k, v, causal=True)
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


@check("Bonus 5.7", "Merging")
def merge_attention(merge_attention, seed=None):
    """Check that merged parts equal attention over all keys, with large scores and with empty parts."""
    draw = Draw(seed)
    for scale, parts, empty in ((1, 3, False), (25, 4, False), (1, 1, False), (2, 4, True)):
        b, h, s, d = draw.sizes(4, 2, 9)
        q = scale * draw.normal(b, h, s, d, dtype=torch.float64)
        k, v = (
            scale * draw.normal(b, h, 12 * parts, d, dtype=torch.float64),
            draw.normal(b, h, 12 * parts, d).double(),
        )
        scores = q @ k.transpose(-2, -1)
        if empty:
            scores[:, :, ::2, :24] = -math.inf  # every second query sees no key of parts 0 and 1
            scores[:, :, 1::2, 36:] = -math.inf
        outputs, lses = [], []
        for part in range(parts):
            block = scores[..., 12 * part : 12 * part + 12]
            lses.append(torch.logsumexp(block, dim=-1))
            outputs.append(
                torch.softmax(block, dim=-1) @ v[:, :, 12 * part : 12 * part + 12]
            )  # NaN where the part is empty
        outputs, lses = torch.stack(outputs).float(), torch.stack(lses).float()
        copies = outputs.clone(), lses.clone()
        with watch_operations() as watch:
            result = merge_attention(outputs, lses)
        forbid(watch, _SOFTMAX, hint="subtract the largest L, then take exp")
        forbid_leaving(watch)
        expect_unchanged(copies, (outputs, lses), "merge_attention")
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise AssertionError(f"merge_attention should return (output, lse), and returned {type(result).__name__}.")
        what = f"{parts} parts" + (" of which some are empty" if empty else f" with L up to {lses.abs().max():.0f}")
        # The expected value is computed from the float32 inputs: at L around 1000 their rounding alone changes the answer.
        wide = copies[1].double()
        weights = torch.softmax(wide, dim=0)[..., None]
        expected = (weights * torch.where(weights > 0, copies[0].double(), 0.0)).sum(dim=0)
        hint = "A part counts with the weight exp(L_p - L); where L_p is -inf, its output must not be touched."
        expect_close(result[0], expected.float(), rtol=1e-3, atol=1e-4, what=f"the output of {what}", hint=hint)
        expect_close(
            result[1],
            torch.logsumexp(wide, dim=0).float(),
            rtol=1e-5,
            atol=1e-3,
            what=f"the lse of {what}",
            hint="L = log of the sum over parts of exp(L_p).",
        )
