"""Part 5: standard attention, layouts, online softmax, merging."""

from __future__ import annotations

import itertools
import math
import re

import torch

from instructor.checks.common import DTYPES, Draw, dtype_name, expect_value
from utils.attention import reference
from utils.checking import FUSED_ATTENTION, SOFTMAX, attention_mistake, check, expect_close, watch_operations

_BESIDE_SDPA = r"mm|bmm|addmm|baddbmm|mv|dot|\w*softmax|exp2?|expm1|sigmoid|tanh|pow"


def attend_in_float64(q, k, v, causal=False):
    """Compute attention of (B, H, S, D) in float64, rounded to the dtype of q."""
    return reference(q, k, v, causal=causal)[0].to(q.dtype)


@check("5.1", "Standard attention", forbids=FUSED_ATTENTION, hint="write the three lines yourself")
def standard_attention(standard_attention, seed=None):
    """Check softmax(q k^T / sqrt(D)) v, without a fused operator and without a causal mask."""
    draw = Draw(seed)
    for dtype, most, d, rtol, atol in (
        (torch.float32, 20, draw.choice((6, 12, 20)), 1e-4, 1e-5),  # no square, so that sqrt(D) is no short number
        (torch.float64, 20, draw.choice((6, 12, 20)), 1e-5, 1e-6),
        (torch.float32, 9, 128, 1e-3, 1e-4),  # heads as models have them
    ):
        b, h, s = draw.sizes(3, 2, most)
        q, k, v = (2 * draw.normal(b, h, s, d, dtype=dtype) for _ in range(3))
        got = standard_attention(q, k, v)
        what = f"standard_attention of ({b}, {h}, {s}, {d}) in {dtype_name(dtype)}"
        hint = attention_mistake(got, q, k, v) or "Which dimension is the softmax over?"
        expect_close(got, attend_in_float64(q, k, v), rtol=rtol, atol=atol, what=what, hint=hint)
    # Large enough for exp to overflow, small enough for fp32 to tell the largest scores apart.
    q, k, v = 20 * draw.normal(1, 1, 6, 64), 20 * draw.normal(1, 1, 6, 64), draw.normal(1, 1, 6, 64)
    expect_close(
        standard_attention(q, k, v),
        attend_in_float64(q, k, v),
        rtol=1e-3,
        atol=1e-3,
        what="standard_attention with scores in the hundreds",
        hint="exp overflows: subtract the largest score first, or use torch.softmax.",
    )


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

        def attend(causal, q=q, k=k, v=v, group=heads // kv_heads):
            keys, values = (t.transpose(1, 2).repeat_interleave(group, dim=1) for t in (k, v))
            return attend_in_float64(q.transpose(1, 2), keys, values, causal=causal).transpose(1, 2)

        hint = "Which two dimensions does SDPA take as tokens and head dimension?"
        if isinstance(got, torch.Tensor) and got.shape == q.shape:
            if torch.allclose(got, attend(False).to(got.dtype), rtol=1e-3, atol=1e-4):
                hint = "It is not causal: each token sees the tokens after it."
            elif heads == kv_heads and torch.allclose(
                got, attend_in_float64(q, k, v, causal=True).to(got.dtype), atol=1e-4
            ):
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
        attention_bshd(q, k, v)
    fused = [n for name, n in watch.operations.items() if re.fullmatch("|".join(FUSED_ATTENTION), name)]
    beside = [name for name in watch.operations if re.fullmatch(_BESIDE_SDPA, name)]
    if sum(fused) != 1 or beside:
        raise AssertionError(
            f"attention_bshd runs fused attention {sum(fused)} times{' beside ' if beside else ''}{', '.join(beside)}; one call of "
            "F.scaled_dot_product_attention, on views with the heads before the tokens, does it for all heads, and leaves no product "
            "and no exponential to do."
        )


def _softmax_stats(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    m = x.amax(dim=1)
    return m, torch.exp(x - m[:, None]).sum(dim=1)


@check(
    "5.3",
    "Online softmax",
    largest="a block with the maximum and the sum of its rows",
    hint="keep a running maximum and a running sum, and look at one block at a time",
)
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
        # So different that the shapes say which block an operator works on, also where a block stands beside a maximum.
        rows, widths = 3, draw.some(9, range(5, 42, 4))
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
        copies = [block.clone() for block in x.split(widths, dim=1)]
        taken = []

        def arriving(copies=copies, taken=taken):
            for i, block in enumerate(copies):
                taken.append(i)
                yield block
                block.fill_(math.nan)  # each block can be read once

        limited = online_softmax_stats.limited(rows * max(widths) + 2 * rows)
        result = limited(arriving())
        if len(taken) != len(widths):
            raise AssertionError(f"{len(widths)} blocks arrived, and {len(taken)} were looked at.")
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise AssertionError(f"online_softmax_stats should return (m, l), and returned {type(result).__name__}.")
        if order in ("rising", "falling"):
            _expect_used_up(limited.sizes.steps, widths)
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


def _expect_used_up(steps: list[tuple], widths: list[int]) -> None:
    """Assert that no operator works on a block after one worked on the next block, which has another width."""
    used = [[i for i, step in enumerate(steps) if any(width in shape for shape in step[1])] for width in widths]
    for place, (mine, following) in enumerate(itertools.pairwise(used)):
        if mine and following and max(mine) > min(following):
            raise AssertionError(
                f"block {place} is used again after block {place + 1} was taken. Keep two numbers a row from one block to the next, "
                "and look at one block at a time."
            )


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


@check("Bonus 5.7", "Merging", forbids=SOFTMAX, hint="subtract the largest L, then take exp")
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
        result = merge_attention(outputs, lses)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise AssertionError(f"merge_attention should return (output, lse), and returned {type(result).__name__}.")
        what = f"{parts} parts" + (" of which some are empty" if empty else f" with L up to {lses.abs().max():.0f}")
        # The expected value is computed from the float32 inputs: at L around 1000 their rounding alone changes the answer.
        wide = lses.double()
        weights = torch.softmax(wide, dim=0)[..., None]
        expected = (weights * torch.where(weights > 0, outputs.double(), 0.0)).sum(dim=0)
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
