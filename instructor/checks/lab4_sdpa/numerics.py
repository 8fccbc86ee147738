"""Part 5: where rounding happens, distances between bf16 numbers, repeatability, and attention in FP8."""

from __future__ import annotations

import math

import torch

from instructor.checks.common import Draw, dtype_name, expect_value
from utils.checking import check, expect_close


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).double()


def _rounded_attention(q, k, v, scores, p, normalize_first, output, *, sum_of_rounded=False, late_maximum=True):
    """Compute Question 5.1 in float64, or with two known mistakes."""
    s = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    s = _bf16(s) if scores else s
    e = torch.exp(s - s.amax(-1, keepdim=True)) if late_maximum else torch.exp(s)
    total = e.sum(-1, keepdim=True)
    if normalize_first:
        weights = _bf16(e / total) if p else e / total
        out = weights @ v.double()
    else:
        e = _bf16(e) if p else e
        total = e.sum(-1, keepdim=True) if sum_of_rounded else total
        out = (e @ v.double()) / total
    return _bf16(out) if output else out


@check("5.1", "Where rounding happens")
def rounded_attention(rounded_attention, seed=None):
    """Check each switch alone and some together; the allowed difference is in units of the rounding itself."""
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
        hint = "Compute in float64, and round to bf16 and back only where a switch says so."
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
        "normalize_first decides what is rounded: P itself, or e^(s - max), which is divided by its sum at the end.": _rounded_attention(
            q, k, v, scores, p, not normalize_first, output
        ),
        "The sum is that of the numbers before they are rounded: a kernel adds it up in float32.": _rounded_attention(
            q, k, v, scores, p, normalize_first, output, sum_of_rounded=True
        ),
        "Subtract the maximum before the exponential: e^s rounds differently.": _rounded_attention(
            q, k, v, scores, p, normalize_first, output, late_maximum=False
        ),
    }
    for place, name in ((0, "scores"), (1, "p"), (3, "output")):
        flipped = list(switches)
        flipped[place] = not flipped[place]
        word = "True here, and nothing" if switches[place] else "False here, and something"
        wrong[f"`{name}` is {word} was rounded at that place."] = _rounded_attention(q, k, v, *flipped)
    s = _bf16(q.double() @ k.double().mT) / math.sqrt(q.shape[-1])
    if scores:
        weights = torch.softmax(s, -1)
        wrong["Round the scores after they are scaled."] = weights @ v.double()
    return wrong


def _line(x: torch.Tensor) -> torch.Tensor:
    """Map bf16 numbers to whole numbers in the same order: neighbours differ by 1."""
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
    cases = (
        ("two positive tensors", x, y, "Reinterpret the 16 bits as an integer: neighbours then differ by 1."),
        ("two negative tensors", -x, -y, "Below zero the integers run backwards."),
        ("1 and its neighbour below", one, below_one, "Spacing changes at a power of two: count steps, not sizes."),
        ("0 and -0", zero, -zero, "0 and -0 are the same number: 0 steps."),
        ("the smallest number and 0", tiny, zero, "Neighbours are one step apart, also around 0."),
        ("the smallest number and its negative", tiny, -tiny, "From one to the other it is two steps, through 0."),
        ("two random tensors with both signs", u, w, "Put the numbers on one line, negative ones left of 0."),
        ("huge numbers and their negatives", huge, -huge, "Up to 65,000 steps: 16 bits are too few to compute with."),
    )
    for name, a, b, hint in cases:
        for first, second in ((a, b), (b, a)):
            expected = (_line(first) - _line(second)).abs()  # before the answer can write to its inputs
            got = ulps_apart(first, second)
            if not isinstance(got, torch.Tensor) or got.dtype.is_floating_point or got.dtype == torch.bool:
                kind = got.dtype if isinstance(got, torch.Tensor) else type(got).__name__
                raise AssertionError(f"ulps_apart of {name} should be a tensor of integers, and is {kind}.")
            expect_close(got.long(), expected, rtol=0, atol=0, what=f"ulps_apart of {name}", hint=hint)


_TUPLES = "fn may return a tuple of tensors, such as gradients: all of it counts."


def _next_number(x: torch.Tensor) -> torch.Tensor:
    """Return x with the last bit of its last number turned over."""
    found = x.clone()
    found.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]).flatten()[
        -1:
    ].bitwise_xor_(1)
    return found


@check("5.3", "Same bits every time?")
def distinct_results(distinct_results, seed=None):
    """Check prepared sequences: NaN, signed zero, tiny differences, reused buffers, tuples."""
    draw = Draw(seed)
    base = draw.normal(4, 5)
    near = base.clone()
    near[2, 3] = torch.nextafter(near[2, 3], torch.tensor(10.0))
    holes = base.clone()
    holes[0, 0] = math.nan

    def run(sequence, expected: int, what: str, hint: str, buffer: bool = False) -> None:
        calls = iter(sequence)
        kept = torch.empty_like(base)

        def call():
            value = next(calls)
            return kept.copy_(value) if buffer else value

        try:
            got = distinct_results(call, len(sequence))
        except StopIteration:
            raise AssertionError(f"fn was called more than {len(sequence)} times: runs says how often.") from None
        if next(calls, None) is not None:
            raise AssertionError(f"fn was called fewer than {len(sequence)} times: runs says how often.")
        if isinstance(got, bool):
            raise AssertionError(f"distinct_results should be a count, and is {got!r}.")
        expect_value(got, expected, "", f"distinct_results of {what}", {hint: got} if got != expected else None)

    other_hole = holes.clone()
    other_hole.view(torch.int32)[0, 0] += 1
    bits = "Compare bits: no tolerance."
    different = (
        "Count different results, not changes, not differences from the first, and not only whether there are two."
    )
    for sequence, expected, what, hint in (
        ([base, base.clone(), base.clone()], 1, "three equal results", "Equal bits count once."),
        ([base, base + 1, base + 1, base], 2, "A, B, B, A", different),
        ([base, near, base.clone()], 2, "two results that differ in the last bit of one number", bits),
        ([base, near, base + 1, base + 2, near], 4, "A, B, C, D, B", different),
        (
            [holes, holes.clone()],
            1,
            "two equal results with a NaN",
            "NaN != NaN, but its bits are equal: compare bits.",
        ),
        ([holes, other_hole], 2, "two results whose NaN have other bits", bits),
        ([torch.zeros(3), -torch.zeros(3)], 2, "0 and -0", f"They compare equal, and their bits differ. {bits}"),
        ([base, base.flip(0), base], 2, "two results with the same numbers at other places", bits),
        ([base.bfloat16(), base.bfloat16(), base.bfloat16() + 1], 2, "bf16 results", "Any dtype may come."),
        ([(base, near), (base.clone(), near.clone()), (base, base)], 2, "tuples of two tensors", _TUPLES),
    ):
        run(sequence, expected, what, hint)
    hint = "Keep a copy of each result: fn may write the next one into the same memory."
    run([base, base + 1, base + 2], 3, "three results in one buffer that fn writes again", hint, buffer=True)
    # Torch prints neither all of a large tensor nor all digits.
    long = draw.normal(60, 1000)
    other = long.clone()
    place = draw.size(10_000, 50_000)
    other.flatten()[place] = torch.nextafter(other.flatten()[place], torch.tensor(10.0))
    run([long, other, long], 2, "two results of 60,000 numbers that differ in one bit of one number", "All bits count.")
    for dtype in (torch.float64, torch.float8_e4m3fn):
        x = base.to(dtype)
        what = f"two {dtype_name(dtype)} results that differ in the last bit"
        run([x, _next_number(x), x.clone()], 2, what, "Any dtype may come.")


@check("Bonus 5.5", "FP8 with scales")
def fp8(quantize_fp8, dequantize_fp8, seed=None):
    """Check shapes, ranges, exact scales, zeros and incomplete blocks; errors must be those of the format."""
    draw = Draw(seed)
    largest = torch.finfo(torch.float8_e4m3fn).max
    cases = ((None, torch.float32), (16, torch.float32), (16, torch.bfloat16), (7, torch.float32))
    lengths = [draw.choice((32, 35)) for _ in cases] + [draw.size(150, 300) for _ in range(2)]
    for (block, dtype), s in zip(
        (*cases, (None, torch.bfloat16), (draw.size(20, 70), torch.float32)), lengths, strict=True
    ):
        b, h, d = draw.size(1, 2), draw.size(1, 3), draw.choice((8, 16))
        x = draw.normal(b, h, s, d) * (10.0 ** draw.normal(b, h, s, 1)).clamp(1e-3, 1e3)
        x = x.to(dtype)
        x[0, 0, :16] = 0.0  # a block of zeros
        what = f"quantize_fp8 of {tuple(x.shape)} with block {block}"
        got = quantize_fp8(x, block)
        if not isinstance(got, tuple | list) or len(got) != 2:
            raise AssertionError(f"{what} should be (x8, scale), and is a {type(got).__name__}.")
        x8, scale = got
        blocks = 1 if block is None else math.ceil(s / block)
        shape = (1, 1, 1, 1) if block is None else (b, h, blocks, 1)
        if not isinstance(x8, torch.Tensor) or x8.dtype != torch.float8_e4m3fn or x8.shape != x.shape:
            raise AssertionError(f"x8 of {what} should be a float8_e4m3fn tensor of the shape of x.")
        if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32 or tuple(scale.shape) != shape:
            found = tuple(scale.shape) if isinstance(scale, torch.Tensor) else scale
            raise AssertionError(f"scale of {what} should be a float32 tensor of shape {shape}, and is {found}.")
        if not torch.isfinite(x8.float()).all() or not torch.isfinite(scale).all():
            raise AssertionError(
                f"{what} holds NaN or infinity. A block of zeros has no largest value to divide by: "
                "give it the scale 1."
            )
        wide, spread = x.float(), scale if block is None else scale.repeat_interleave(block, dim=2)[:, :, :s]
        back = dequantize_fp8(x8, scale, block)
        if not isinstance(back, torch.Tensor) or back.shape != x.shape or back.dtype != torch.float32:
            raise AssertionError(f"dequantize_fp8 after {what} should be a float32 tensor of the shape of x.")
        rows = [wide.flatten()] if block is None else [w for w in wide.split(block, dim=2)]
        scales = [scale.flatten()] if block is None else list(scale.unbind(2))
        for index, (rows_of_block, scale_of_block) in enumerate(zip(rows, scales, strict=True)):
            amax = rows_of_block.abs().amax() if block is None else rows_of_block.abs().amax(dim=(2, 3))
            right = torch.where(amax > 0, amax / largest, 1.0).reshape(scale_of_block.shape)
            hint = f"The scale maps a block's largest absolute value to {largest:g}, the largest number of e4m3."
            if torch.allclose(scale_of_block, 1 / right, rtol=1e-3):
                hint = "It is the inverse: x8 = x / scale, and x = x8 * scale."
            name = f"the scale of block {index} of {what}"
            expect_close(scale_of_block, right, rtol=1e-3, atol=0, what=name, hint=hint)
        allowed = wide.abs() / 16 * 1.001 + spread * 2**-10 * 1.001  # half a step of e4m3: 2^-4 relative, or subnormal
        worst = ((back - wide).abs() - allowed).max()
        if worst > 0:
            raise AssertionError(
                f"dequantize_fp8 after {what} misses x by more than e4m3 rounds. x8 = x / scale in "
                "float32, then the cast; back: x8 in float32, times the scale of its own "
                "block."
            )
        # One step of e4m3: a division may be rounded otherwise where it is done by the inverse.
        step = (wide / spread).abs() / 8 + 2**-9
        if ((x8.float() - wide / spread).abs() > step).any():
            raise AssertionError(f"x8 of {what} is not x / scale, rounded to e4m3.")
