"""Part 5: where rounding happens, steps between bf16 numbers, repeatability, and FP8 with scales."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from utils.checking import expect_close, expect_items, expect_number
from utils.checking.labs.lab4_sdpa.common import visible


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Return x rounded to bf16, as float64."""
    return x.to(torch.bfloat16).double()


FIRST_OR_LATE = "normalize_first decides what is rounded: P itself, or e^(s - max), which is divided at the end."
SUM_BEFORE = "The sum takes the numbers before they are rounded."
MAXIMUM = "Subtract the maximum of each row before the exponential: e^s rounds differently."
SCALED = "Round the scores after they are scaled."
IN_FLOAT64 = "Compute in float64, and round only where a switch says so."


@visible("5.1", "Where rounding happens")
def check_rounded_attention(rounded_attention):
    """Check calls without rounding, a rounded output, and the first of two queries over four keys, computed by hand."""
    q, k, v = (torch.randn(2, 3, length, 10, dtype=torch.bfloat16) for length in (20, 50, 50))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    for first in (True, False):
        got = rounded_attention(q, k, v, normalize_first=first)
        what = f"rounded_attention without rounding, normalize_first={first}"
        expect_close(got, exact, rtol=1e-6, atol=1e-8, what=what, hint=IN_FLOAT64)
    got = rounded_attention(q, k, v, output=True)
    expect_close(got, to_bf16(exact), rtol=1e-2, atol=1e-6, what="the rounded output")
    assert torch.equal(got, to_bf16(got)), "with output=True every number of the result should be a bf16 number."
    keys = [[0.5, 1.0, 0.75], [-1.0, 0.25, 1.5], [2.0, -1.0, 0.3125], [0.1, 0.7, -0.4]]
    values = [[1.0], [-2.0], [3.0], [0.7]]
    q, k, v = (torch.tensor([[x]], dtype=torch.bfloat16) for x in ([[1.0, -0.5, 2.0], [1.5, 0.5, 3.0]], keys, values))
    bare, p_first, e_late, all_late, only_scores = 1.2619220209, 1.2604379654, 1.2611877311, 1.2590798424, 1.2595055602
    none, no_p = "Nothing was rounded at that place.", "P is not rounded here."
    late = {"p": True, "normalize_first": False}
    wrong_late = {none: bare, FIRST_OR_LATE: p_first, SUM_BEFORE: 1.2613347195, MAXIMUM: [1.2584492055, 1.2611546212]}
    wrong_all = {SUM_BEFORE: 1.2578434713, MAXIMUM: 1.2541361155, FIRST_OR_LATE: p_first, no_p: only_scores}
    for switches, right, mistakes in (
        ({"scores": True}, only_scores, {none: bare, SCALED: 1.2618713040}),
        ({"p": True}, p_first, {none: bare, FIRST_OR_LATE: e_late}),
        (late, e_late, wrong_late),
        (late | {"scores": True}, all_late, wrong_all | {"The scores are not rounded here.": e_late}),
        ({"scores": True, "p": True}, p_first, {FIRST_OR_LATE: all_late, no_p: only_scores}),
    ):
        got = rounded_attention(q, k, v, **switches).flatten()[0].item()
        what = f"the first query over four keys with {', '.join(f'{name}={value}' for name, value in switches.items())}"
        expect_number(got, right, rel=1e-7, what=what, mistakes=mistakes)


def expect_steps(ulps_apart, a: torch.Tensor, b: torch.Tensor, steps: torch.Tensor, what: str, hint: str) -> None:
    """Assert the number of bf16 steps from a to b, and from b to a."""
    for x, y in ((a, b), (b, a)):
        got = ulps_apart(x, y)
        if not isinstance(got, torch.Tensor) or got.is_floating_point() or got.dtype == torch.bool:
            raise AssertionError(f"ulps_apart of {what} should be a tensor of integers, and is {got!r:.120}.")
        expect_close(got.long(), steps, rtol=0, atol=0, what=f"ulps_apart of {what}", hint=hint)


BITS, STEPS = "Reinterpret the 16 bits as an integer:", "count steps, not sizes."
ONE_LINE = "Put the numbers on one line, negative ones left of 0."
AROUND_ZERO = "Neighbours are one step apart, also around 0."
THROUGH_ZERO = "From one to the other it is two steps, through 0."
SAME_ZERO = "They are the same number: 0 steps."
BACKWARDS = "Below zero the integers run backwards."
FAR = "The largest distance is about 65,000: compute with more than 16 bits."


@visible("5.2", "Steps between bf16 numbers")
def check_ulps_apart(ulps_apart):
    """Check pairs of numbers: neighbours, numbers across a power of two, numbers around zero, distant numbers."""
    smallest = 2.0**-133
    for a, b, steps, hint in (
        (1.0, 1.0, 0, ""),
        (1.0, 1.0078125, 1, f"{BITS} neighbours then differ by 1."),
        (0.001, 0.001, 0, ""),
        (4.0, 4.0625, 2, f"{BITS} spacing grows with the number."),
        (1.0, 0.99609375, 1, f"Spacing changes at a power of two: {STEPS}"),
        (0.001, 0.0010147, 2, f"{BITS} spacing shrinks with the number."),
        (-1.0, -1.0078125, 1, BACKWARDS),
        (0.0, -0.0, 0, SAME_ZERO),
        (smallest, 0.0, 1, AROUND_ZERO),
        (-smallest, smallest, 2, THROUGH_ZERO),
        (1.0, -1.0, 32_512, ONE_LINE),
        (3e38, -3e38, 65_220, FAR),
    ):
        x, y = (torch.tensor([[number]], dtype=torch.bfloat16) for number in (a, b))
        expect_steps(ulps_apart, x, y, torch.tensor([[steps]]), f"{a:g} and {b:g}", hint)


def expect_distinct(
    distinct_results, sequence: list, expected: int, what: str, hint: str, buffer: bool = False
) -> None:
    """Assert the number of different results in a sequence.

    Args:
        distinct_results: the answer.
        sequence: the results of the calls of fn.
        expected: the count.
        what: the sequence, in words.
        hint: advice for a wrong count.
        buffer: whether fn writes all results to the same memory.
    """
    calls = iter(sequence)
    kept = torch.empty_like(sequence[0]) if buffer else None

    def fn():
        value = next(calls)
        return value if kept is None else kept.copy_(value)

    try:
        got = distinct_results(fn, len(sequence))
    except StopIteration:
        raise AssertionError(f"fn was called more than {len(sequence)} times: `runs` says how often.") from None
    assert next(calls, None) is None, f"fn was called fewer than {len(sequence)} times: `runs` says how often."
    assert not isinstance(got, bool), f"distinct_results should be a count, and is {got!r}."
    assert got == expected, f"distinct_results of {what} is {got!r}, expected {expected}. {hint}"


DIFFERENT = "Count different results, not changes, and not differences from the first."
COMPARE = "Compare bits, without a tolerance."
ANY_DTYPE = "Any floating-point dtype may come."
BUFFER = "Keep a copy of each result: fn may write the next one into the same memory."


def change_last_bit(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of x in which the last bit of the last number is changed."""
    found = x.clone()
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    found.view(integer).flatten()[-1:].bitwise_xor_(1)
    return found


def expect_bits_compared(distinct_results, x: torch.Tensor) -> None:
    """Assert counts for results with equal values but different bits, and for slightly different values."""
    near, holes = change_last_bit(x), x.clone()
    holes[0, 0] = math.nan
    other = holes.clone()
    other.view(torch.int32)[0, 0] += 1
    tuples = [(x, near), (x.clone(), near.clone()), (x, x)]
    for results, expected, what, hint in (
        ([x, x.clone(), x.clone()], 1, "three equal results", "Equal bits count once."),
        ([x, 2 * x, x, 3 * x], 3, "A, B, A, C", DIFFERENT),
        ([x, near, near.clone(), x], 2, "A, B, B, A", f"{DIFFERENT} {COMPARE}"),
        ([x, near, x + 1, x + 2, near], 4, "A, B, C, D, B", DIFFERENT),
        ([x, x.flip(0), x], 2, "two results with the same numbers at other places", COMPARE),
        ([holes, holes.clone()], 1, "two equal results with a NaN", f"NaN != NaN, but its bits are equal. {COMPARE}"),
        ([holes, other, holes], 2, "two results whose NaN have other bits", COMPARE),
        ([torch.zeros(3), -torch.zeros(3)], 2, "0 and -0", f"They compare equal, and their bits differ. {COMPARE}"),
        (tuples, 2, "tuples of two tensors", "All tensors of a tuple count, such as gradients."),
    ):
        expect_distinct(distinct_results, results, expected, what, hint)
    for dtype in (torch.bfloat16, torch.float64, torch.float8_e4m3fn):
        y = x.to(dtype)
        what = f"two {str(dtype).removeprefix('torch.')} results that differ in their last bit"
        expect_distinct(distinct_results, [y, change_last_bit(y), y.clone()], 2, what, ANY_DTYPE)
    what = "three results in one buffer that fn writes again"
    expect_distinct(distinct_results, [x, near, 2 * x], 3, what, BUFFER, buffer=True)


@visible("5.3", "Same bits every time?")
def check_distinct_results(distinct_results):
    """Check prepared sequences of twelve numbers."""
    expect_bits_compared(distinct_results, torch.randn(3, 4))


def expect_fp8(quantize_fp8, dequantize_fp8, x: torch.Tensor, block: int | None) -> None:
    """Assert dtypes, shapes, scales and errors; a block of zeros in x has the scale 1."""
    what = f"quantize_fp8 of {tuple(x.shape)} with block {block}"
    x8, scale = expect_items(quantize_fp8(x, block), "x8, scale", what)
    batch, heads, length, _ = x.shape
    shape = (1, 1, 1, 1) if block is None else (batch, heads, math.ceil(length / block), 1)
    if not isinstance(x8, torch.Tensor) or x8.dtype != torch.float8_e4m3fn or x8.shape != x.shape:
        raise AssertionError(f"x8 of {what} should be a float8_e4m3fn tensor of the shape of x.")
    assert isinstance(scale, torch.Tensor), f"scale of {what} should be a tensor, and is {scale!r:.80}."
    assert scale.dtype == torch.float32, f"scale of {what} should be float32, and is {scale.dtype}."
    assert tuple(scale.shape) == shape, f"scale of {what} should be of shape {shape}, and is {tuple(scale.shape)}."
    assert torch.isfinite(x8.float()).all() and torch.isfinite(scale).all(), (
        f"{what} holds NaN or infinity: a block of zeros has no largest value to divide by. Its scale is 1."
    )
    wide, blocks = x.float(), [x.float()] if block is None else x.float().split(block, dim=2)
    spread = scale if block is None else scale.repeat_interleave(block, dim=2)[:, :, :length]
    for index, part in enumerate(blocks):
        top = part.abs().amax().reshape(1, 1, 1, 1) if block is None else part.abs().amax(dim=(2, 3))[..., None, None]
        own = scale[:, :, index : index + 1]
        hint = "The largest absolute value under a scale should land on 448; of a block of zeros the scale is 1."
        if torch.allclose(own * top, torch.full_like(own, 448.0), rtol=1e-3):
            hint = "It is the inverse: x8 = x / scale, and x = x8 * scale."
        landed = torch.where(top > 0, top / own, own)
        right = torch.where(top > 0, 448.0, torch.ones_like(own))
        under = f"the largest value under scale {index} of {what}"
        expect_close(landed, right, rtol=1e-3, atol=0, what=under, hint=hint)
    back = dequantize_fp8(x8, scale, block)
    if not isinstance(back, torch.Tensor) or back.dtype != torch.float32 or back.shape != x.shape:
        raise AssertionError(f"dequantize_fp8 after {what} should be a float32 tensor of the shape of x.")
    # Half a step of e4m3: 2^-4 of a number, or half of a subnormal step.
    allowed = wide.abs() / 16 * 1.001 + spread * 2**-10 * 1.001
    assert ((back - wide).abs() <= allowed).all(), (
        f"dequantize_fp8 after {what} misses x by more than e4m3 rounds. x8 is x / scale, computed in float32; back, each "
        "number is multiplied by the scale of its own block."
    )
    # One step of e4m3: a product with the inverse may be rounded differently from a division.
    step = (wide / spread).abs() / 8 + 2**-9
    assert ((x8.float() - wide / spread).abs() <= step).all(), f"x8 of {what} is not x / scale, rounded to e4m3."


@visible("Bonus 5.5", "FP8 with scales")
def check_fp8(quantize_fp8, dequantize_fp8):
    """Check one scale, scales of blocks and of tokens, with a large token and a block of zeros."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 3, 40, 8, dtype=dtype)
        x[0, 0, 0] *= 1000
        x[1, 2, 16:32] = 0.0
        for block in (None, 16, 1):
            expect_fp8(quantize_fp8, dequantize_fp8, x, block)
