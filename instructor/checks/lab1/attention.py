"""Part 5: standard attention, layouts, online softmax, merging."""

from __future__ import annotations

import math

import torch

from instructor.checks.common import DTYPES, Draw, dtype_name, expect_value
from utils.checking import check
from utils.checking.labs.lab1.attention import ONLINE, STANDARD, expect_attention, expect_bshd, expect_stats


@check(**STANDARD)
def standard_attention(standard_attention, seed=None):
    """Check softmax(q k^T / sqrt(D)) v, without a fused operator and without a causal mask."""
    draw = Draw(seed)
    for dtype, most, d, rtol, atol in (
        (torch.float32, 20, draw.choice((6, 12, 20)), 1e-4, 1e-5),  # not a square number, so sqrt(D) has many digits
        (torch.float64, 20, draw.choice((6, 12, 20)), 1e-5, 1e-6),
        (torch.float32, 9, 128, 1e-3, 1e-4),  # a head dimension as in models
    ):
        b, h, s = draw.sizes(3, 2, most)
        q, k, v = (2 * draw.normal(b, h, s, d, dtype=dtype) for _ in range(3))
        what = f"of ({b}, {h}, {s}, {d}) in {dtype_name(dtype)}"
        expect_attention(standard_attention, q, k, v, what, rtol, atol)
    # The scores are so large that exp overflows, and so small that fp32 distinguishes the largest scores.
    q, k, v = 20 * draw.normal(1, 1, 6, 64), 20 * draw.normal(1, 1, 6, 64), draw.normal(1, 1, 6, 64)
    expect_attention(standard_attention, q, k, v, "with scores in the hundreds", 1e-3, 1e-3)


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
        s = draw.size(1000, 20000)
        memory = 2 * b * h * size * (s + 1) ** 2 - 1  # one byte too few for a further token
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
        expect_bshd(attention_bshd, q, k, v)


@check(**ONLINE)
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
        # The widths differ so much that a shape tells the block, even if the block is joined with a maximum.
        rows, widths = 3, draw.choose(9, range(5, 42, 4))
        if order == "narrow":
            widths = [2] * 40
        if order is None:
            widths[0] = 1
        x = middle + 3 * draw.normal(rows, sum(widths), dtype=dtype)
        if order == "jumping":  # a distance above the range of exponents in every dtype
            x[:, widths[0] :] += 1000.0
            x[:, : widths[0]] -= 1000.0
        elif order in ("rising", "falling"):
            x = x.sort(dim=1, descending=order == "falling").values
        name = f"{len(widths)} blocks" + (f" with {order} values" if order else f" with values around {middle}")
        expect_stats(online_softmax_stats, x, widths, name, used_up=order in ("rising", "falling"))


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
