"""Part 5: where rounding happens, distances between bf16 numbers, repeatability, and attention in FP8."""

from __future__ import annotations

import math

import torch

from instructor.checks.common import Draw
from utils.checking import expect_close
from utils.checking.labs.lab4_sdpa.common import check
from utils.checking.labs.lab4_sdpa.numerics import (
    AROUND_ZERO,
    BACKWARDS,
    BITS,
    COMPARE,
    FAR,
    FIRST_OR_LATE,
    IN_FLOAT64,
    MAXIMUM,
    ONE_LINE,
    SAME_ZERO,
    SCALED,
    STEPS,
    SUM_BEFORE,
    THROUGH_ZERO,
    expect_bits_compared,
    expect_distinct,
    expect_fp8,
    expect_steps,
    to_bf16,
)


def _rounded_attention(q, k, v, scores, p, normalize_first, output, *, sum_of_rounded=False, late_maximum=True):
    """Compute the answer to Question 5.1 in float64; two arguments stand for known mistakes."""
    s = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    s = to_bf16(s) if scores else s
    e = torch.exp(s - s.amax(-1, keepdim=True)) if late_maximum else torch.exp(s)
    total = e.sum(-1, keepdim=True)
    if normalize_first:
        weights = to_bf16(e / total) if p else e / total
        out = weights @ v.double()
    else:
        e = to_bf16(e) if p else e
        total = e.sum(-1, keepdim=True) if sum_of_rounded else total
        out = (e @ v.double()) / total
    return to_bf16(out) if output else out


@check("5.1", "Where rounding happens")
def rounded_attention(rounded_attention, seed=None):
    """Check each switch alone and some together. The allowed difference is a multiple of the rounding step."""
    draw = Draw(seed)
    names = ("scores", "p", "normalize_first", "output")
    for switches in (
        (False, False, True, False),
        (False, False, False, False),
        (False, False, True, True),
        (True, False, True, False),
        (False, True, True, False),
        (False, True, False, False),
        (True, True, False, True),
    ):
        b, h, sq, sk, d = (
            draw.size(1, 2),
            draw.size(1, 3),
            draw.size(30, 60),
            draw.size(250, 350),
            draw.choice((24, 32, 48)),
        )
        q, k, v = (draw.normal(b, h, s, d, dtype=torch.bfloat16) for s in (sq, sk, sk))
        options = dict(zip(names, switches, strict=True))
        got = rounded_attention(q, k, v, **options)
        what = "rounded_attention with " + ", ".join(f"{name}={value}" for name, value in options.items())
        expected = _rounded_attention(q, k, v, *switches)
        expect_close(got, expected, rtol=0.05, atol=0.05, what=what)  # checks dtype, shape and a rough answer
        exact = _rounded_attention(q, k, v, False, False, True, False)
        noise = (expected - exact).square().mean().sqrt()
        distance = (got - expected).square().mean().sqrt()
        if distance <= max(0.04 * noise, 1e-6):
            continue
        hint = IN_FLOAT64
        for text, wrong in _rounding_mistakes(q, k, v, switches).items():
            near = (got - wrong).square().mean().sqrt()
            if near <= max(0.05 * distance, 1e-9):
                hint = text
                break
        raise AssertionError(
            f"{what} is {float(distance):.2e} (rms) away from what it should be, and the roundings "
            f"that were asked for make {float(noise):.2e}. {hint}"
        )


def _rounding_mistakes(q, k, v, switches) -> dict[str, torch.Tensor]:
    scores, p, normalize_first, output = switches
    wrong = {
        FIRST_OR_LATE: _rounded_attention(q, k, v, scores, p, not normalize_first, output),
        SUM_BEFORE: _rounded_attention(q, k, v, *switches, sum_of_rounded=True),
        MAXIMUM: _rounded_attention(q, k, v, *switches, late_maximum=False),
    }
    for place, name in ((0, "scores"), (1, "p"), (3, "output")):
        flipped = list(switches)
        flipped[place] = not flipped[place]
        word = "True here, and nothing" if switches[place] else "False here, and something"
        wrong[f"`{name}` is {word} was rounded at that place."] = _rounded_attention(q, k, v, *flipped)
    s = to_bf16(q.double() @ k.double().mT) / math.sqrt(q.shape[-1])
    if scores:
        weights = torch.softmax(s, -1)
        wrong[SCALED] = weights @ v.double()
    return wrong


def _line(x: torch.Tensor) -> torch.Tensor:
    """Map bf16 numbers to integers in the same order, so that neighbours differ by 1."""
    bits = x.contiguous().view(torch.int16).long()
    return torch.where(bits >= 0, bits, -32768 - bits)


@check("5.2", "Steps between bf16 numbers")
def ulps_apart(ulps_apart, seed=None):
    """Check neighbours across powers of two, zero and signs, and random pairs."""
    draw = Draw(seed)
    bits = [draw.size(200, 32000) for _ in range(6)]
    x = torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16)
    steps = torch.tensor([draw.size(0, 150) for _ in bits])
    y = (torch.tensor(bits) - steps).to(torch.int16).view(torch.bfloat16)
    tiny = torch.tensor([1], dtype=torch.int16).view(torch.bfloat16)
    zero, one = torch.zeros(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    below_one = torch.tensor([0x3F7F], dtype=torch.int16).view(torch.bfloat16)
    u, w = draw.normal(5, 7, dtype=torch.bfloat16), draw.normal(5, 7, dtype=torch.bfloat16)
    huge = (10.0 ** (30 + 8 * draw.normal(6).abs().clamp(max=1))).to(torch.bfloat16)
    for name, a, b, hint in (
        ("two positive tensors", x, y, f"{BITS} neighbours then differ by 1."),
        ("two negative tensors", -x, -y, BACKWARDS),
        ("1 and its neighbour below", one, below_one, f"Spacing changes at a power of two: {STEPS}"),
        ("0 and -0", zero, -zero, SAME_ZERO),
        ("the smallest number and 0", tiny, zero, AROUND_ZERO),
        ("the smallest number and its negative", tiny, -tiny, THROUGH_ZERO),
        ("two random tensors with both signs", u, w, ONE_LINE),
        ("huge numbers and their negatives", huge, -huge, FAR),
    ):
        expect_steps(ulps_apart, a, b, (_line(a) - _line(b)).abs(), name, hint)


@check("5.3", "Same bits every time?")
def distinct_results(distinct_results, seed=None):
    """Check prepared sequences: NaN, signed zero, tiny differences, reused buffers, tuples."""
    draw = Draw(seed)
    expect_bits_compared(distinct_results, draw.normal(4, 5))
    # Torch prints only a part of a large tensor, and few digits. So printed texts would be equal here.
    long = draw.normal(60, 1000)
    other = long.clone()
    place = draw.size(10_000, 50_000)
    other.flatten()[place] = torch.nextafter(other.flatten()[place], torch.tensor(10.0))
    what = "two results of 60,000 numbers that differ in one bit of one number"
    expect_distinct(distinct_results, [long, other, long], 2, what, COMPARE)


@check("Bonus 5.5", "FP8 with scales")
def fp8(quantize_fp8, dequantize_fp8, seed=None):
    """Check shapes, ranges, exact scales, zeros, incomplete blocks, and that errors are those of the format."""
    draw = Draw(seed)
    for block, dtype, s in (
        (None, torch.float32, draw.choice((32, 35))),
        (16, torch.float32, draw.choice((32, 35))),
        (16, torch.bfloat16, draw.choice((32, 35))),
        (7, torch.float32, draw.choice((32, 35))),
        (None, torch.bfloat16, draw.size(150, 300)),
        (draw.size(20, 70), torch.float32, draw.size(150, 300)),
    ):
        b, h, d = draw.size(1, 2), draw.size(1, 3), draw.choice((8, 16))
        x = draw.normal(b, h, s, d) * (10.0 ** draw.normal(b, h, s, 1)).clamp(1e-3, 1e3)
        x = x.to(dtype)
        x[0, 0, :16] = 0.0
        expect_fp8(quantize_fp8, dequantize_fp8, x, block)
