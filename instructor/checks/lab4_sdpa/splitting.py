"""Split-KV attention (3.2) and the backward pass by hand (bonus 2.4)."""

from __future__ import annotations

import math

import torch

from instructor.checks.common import Draw, dtype_name
from instructor.checks.lab4_sdpa.common import reference_attention, with_right_answers
from utils.attention import reference, reference_gradients
from utils.checking import DERIVATIVES, FUSED_ATTENTION, SOFTMAX, check, expect_close


def _lse(q, k) -> torch.Tensor:
    """Return the log of the sum of e^score of each query, in float64."""
    return reference(q.double(), k.double(), k.double())[1]


def _right_part(q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a right answer for `attend_part`."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, 1) for t in (k, v))
    scores = q.float() @ keys.mT / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)


def _expect_pair(got: object, what: str) -> tuple:
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise AssertionError(f"{what} should be (output, lse), two tensors, and is a {type(got).__name__}.")
    return tuple(got)


def _group_hint(got, q, k, v) -> str:
    """Return a hint if query heads are paired with the wrong key heads."""
    if isinstance(got, torch.Tensor) and got.shape == q.shape and k.shape[1] < q.shape[1]:
        repeats = q.shape[1] // k.shape[1]
        wrong = reference_attention(q, k.repeat(1, repeats, 1, 1), v.repeat(1, repeats, 1, 1))
        if torch.allclose(got.double(), wrong, rtol=1e-2, atol=1e-2):
            return "Query head h reads key head h // (H / Hkv): neighbours share, so repeat_interleave, not repeat."
    return ""


def _scale_hint(got, q, k, v) -> str:
    for factor, text in (
        (math.sqrt(q.shape[-1]), "Divide the scores by sqrt(D)."),
        (1 / math.sqrt(q.shape[-1]), "Divide the scores by sqrt(D), not by D."),
    ):
        if isinstance(got, torch.Tensor) and got.shape == q.shape:
            wrong = reference_attention(q.double() * factor, k, v)
            if torch.allclose(got.double(), wrong, rtol=1e-2, atol=1e-2):
                return text
    return ""


@check(
    "3.2",
    "Attention over one part",
    forbids=FUSED_ATTENTION,
    hint="write the products and the softmax yourself: SDPA does not return the lse",
)
def attend_part(attend_part, seed=None):
    """Check output and log-sum-exp in float32, with grouped heads and large scores."""
    draw = Draw(seed)
    # The last case: large enough for exp to overflow, small enough for fp32 to tell the largest scores apart.
    for dtype, rtol, scale in ((torch.float32, 1e-4, 1), (torch.bfloat16, 1e-4, 1), (torch.float32, 1e-3, 20)):
        b, kv, group, sq, sk, d = (
            draw.size(1, 3),
            draw.size(2, 3),
            draw.size(2, 3),
            draw.size(1, 4),
            draw.size(9, 30),
            draw.choice((6, 8, 10, 12)),
        )
        q = scale * draw.normal(b, kv * group, sq, d, dtype=dtype)
        k, v = scale * draw.normal(b, kv, sk, d, dtype=dtype), draw.normal(b, kv, sk, d, dtype=dtype)
        large = ", scores in the hundreds" if scale > 1 else ""
        what = f"attend_part of q {tuple(q.shape)}, k {tuple(k.shape)} in {dtype_name(dtype)}{large}"
        got = attend_part(q, k, v)
        output, lse = _expect_pair(got, what)
        hint = _group_hint(output, q, k, v) or _scale_hint(output, q, k, v) or "Divide by the part's own sum."
        expect_close(
            output,
            reference_attention(q, k, v).float(),
            rtol=rtol,
            atol=1e-3 if scale > 1 else 1e-5,
            what=f"the output of {what}",
            hint=hint,
        )
        hint = "It is the natural logarithm of the sum of e^score: maximum + log(sum of e^(score - maximum))."
        expect_close(lse, _lse(q, k).float(), rtol=rtol, atol=1e-3, what=f"the lse of {what}", hint=hint)
        if (macs := attend_part.sizes.macs) > 2.2 * q.numel() * sk:
            raise AssertionError(
                f"{what} multiplies {macs:,} pairs of numbers, and its two products have {2 * q.numel() * sk:,}: the scores "
                "give the output and the lse, and are computed once."
            )


def _parts_merged_wrongly(q, k, v, splits: int) -> dict[str, torch.Tensor]:
    """Return the results of known wrong merges, by hint."""
    keys, values = (t.tensor_split(splits, dim=2) for t in (k, v))
    outputs = torch.stack([reference_attention(q, *pair) for pair in zip(keys, values, strict=True)])
    lses = torch.stack([_lse(q, part) for part in keys])
    weights = lses / lses.sum(0)
    return {
        "Parts do not count equally: weight each by e^lse over the sum of all e^lse.": outputs.mean(0),
        "The weights are e^lse, not lse.": (weights[..., None] * outputs).sum(0),
        "The weights are 2^lse, and lse is a natural logarithm: they should be e^lse.": (
            torch.softmax(lses * math.log(2), dim=0)[..., None] * outputs
        ).sum(0),
        "The weights must add up to 1: divide by their sum.": (torch.exp(lses)[..., None] * outputs).sum(0),
        "Outputs of parts cannot just be added: weight each by e^lse over the sum of all e^lse.": outputs.sum(0),
    }


class _Parts:
    """Right answers for `attend_part` that remember which parts they were asked for."""

    def __init__(self):
        self.calls: list[tuple[int, torch.Size]] = []  # keys and queries of each part

    def __call__(self, q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a part, as `attend_part` does."""
        self.calls.append((k.shape[2], q.shape))
        return _right_part(q, k, v)

    def expect_each_once(self, q: torch.Tensor, keys: int, splits: int, what: str) -> None:
        """Assert that the parts are as long as they should be, and that each pair of a query and a key was in one of them."""
        lengths = {n for n, shape in self.calls if n and shape.numel()}
        if not lengths <= {keys // splits, -(-keys // splits)}:
            raise AssertionError(
                f"{what}: attend_part was called for {sorted(lengths)} keys. {splits} parts of {keys} keys whose sizes differ by at "
                f"most 1 have {keys // splits} or {-(-keys // splits)}."
            )
        asked = sum(n * shape.numel() for n, shape in self.calls)
        if asked != keys * q.numel():
            raise AssertionError(
                f"{what}: attend_part was called for {asked / q.numel():g} keys of each query, and there are {keys}. Each part comes "
                "from attend_part, once."
            )


@check(
    "3.2",
    "Split-KV attention",
    forbids=FUSED_ATTENTION,
    hint="each part comes from attend_part, and is computed from its own keys alone",
)
def split_kv_attention(split_kv_attention, seed=None):
    """Check any number of splits, each part alone, large scores, and the dtype of the queries."""
    draw, asked = Draw(seed), []  # asked: which parts each call of the answer asked `attend_part` for
    for dtype, splits, scale in (
        (torch.float32, 1, 1),
        (torch.float32, 4, 1),
        (torch.float32, 7, 1),
        (torch.bfloat16, 3, 1),
        (torch.float32, 5, 40),
        (torch.float32, 64, 1),
        (torch.float16, 2, 1),
        (torch.float64, 3, 1),
    ):
        b, kv, group, sq = draw.size(1, 4), draw.size(1, 3), draw.size(1, 3), draw.size(1, 4)
        sk, d = draw.choice((37, 41, 43)), draw.choice((6, 8, 10, 12))
        q = scale * draw.normal(b, kv * group, sq, d, dtype=dtype)
        k, v = scale * draw.normal(b, kv, sk, d, dtype=dtype), draw.normal(b, kv, sk, d, dtype=dtype)
        large = ", scores in the thousands" if scale > 1 else ""
        what = f"split_kv_attention over {sk} keys in {splits} splits, {dtype_name(dtype)}{large}"
        parts = _Parts()
        with with_right_answers(split_kv_attention, {"attend_part": parts}):
            got = split_kv_attention(q, k, v, splits)
        expected = reference_attention(q, k, v).to(dtype)
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize == 2 else {"rtol": 1e-3, "atol": 1e-4}
        if scale > 1:
            tolerance = {"rtol": 1e-2, "atol": 1e-2}
        hint = _group_hint(got, q, k, v)
        if isinstance(got, torch.Tensor) and got.shape == expected.shape and 1 < splits <= sk and scale == 1:
            close = torch.allclose(got.double(), expected.double(), **tolerance)
            for text, wrong in _parts_merged_wrongly(q, k, v, splits).items():
                if not close and torch.allclose(got.double(), wrong, rtol=2e-2, atol=1e-2):
                    hint = text
            whole = sk // splits * splits
            short = reference_attention(q, k[:, :, :whole], v[:, :, :whole])
            if not close and torch.allclose(got.double(), short, **tolerance):
                hint = f"The last {sk - whole} keys are left out: {splits} does not divide {sk}."
        if scale > 1:
            hint = hint or "e^lse overflows: subtract the largest lse first."
        if splits > sk:
            hint = hint or "With more splits than keys some parts are empty: leave them out, or give them weight 0."
        expect_close(got, expected, **tolerance, what=what, hint=hint)
        asked.append((parts, q, sk, splits, what))
    for parts, *about in asked:
        parts.expect_each_once(*about)


@check(
    "Bonus 2.4",
    "The backward pass",
    forbids=(FUSED_ATTENTION, SOFTMAX, DERIVATIVES),
    hint="the probabilities are e^(score - lse)",
)
def attention_backward(attention_backward, seed=None):
    """Compare the gradients with autograd in float64; softmax and autograd are forbidden."""
    draw = Draw(seed)
    for case in range(4):
        dtype, tolerance = (torch.float64, 1e-5) if case == 3 else (torch.float32, 1e-3)
        b, h = draw.size(1, 2), draw.size(1, 3)
        (sq, sk), d = draw.sizes(2, 7, 20), draw.choice((6, 8, 10, 12))
        scale = 12 if case == 2 else 1
        q, k = (scale * draw.normal(b, h, length, d, dtype=dtype) for length in (sq, sk))
        v, dout = (draw.normal(b, h, length, d, dtype=dtype) for length in (sk, sq))
        out, expected = reference_gradients(q, k, v, dout)
        tensors = q, k, v, out.to(dtype), _lse(q, k).to(dtype), dout
        got = attention_backward(*tensors)
        macs = b * h * sq * sk * d  # of one product
        if (done := attention_backward.sizes.macs) > 5.2 * macs:
            raise AssertionError(
                f"attention_backward does the work of {done / macs:.0f} products, and five are enough: use the formulas, and no "
                "differences of the forward pass."
            )
        if not isinstance(got, tuple | list) or len(got) != 3:
            raise AssertionError(f"attention_backward should return (dq, dk, dv), and returned {type(got).__name__}.")
        p = torch.exp(q.double() @ k.double().mT / math.sqrt(d) - _lse(q, k)[..., None])
        dp = dout.double() @ v.double().mT
        no_delta = (p * dp) @ k.double() / math.sqrt(d)
        hints = {
            "dq": "dS = P * (dP - delta), delta the sum of dO * O over a row; then the scale 1/sqrt(D).",
            "dk": "dK = dS^T Q, with the scale 1/sqrt(D).",
            "dv": "dV = P^T dO.",
        }
        for name, gradient, right in zip(
            ("dv", "dq", "dk"), (got[2], got[0], got[1]), (expected[2], expected[0], expected[1]), strict=True
        ):
            hint = hints[name]
            if isinstance(gradient, torch.Tensor) and gradient.shape == right.shape:
                if name == "dq" and torch.allclose(gradient.double(), no_delta, rtol=1e-2, atol=1e-3):
                    hint = "delta is missing: the softmax's rows add up to 1, so each score moves all of its row."
                elif torch.allclose(gradient.double(), right * math.sqrt(d), rtol=1e-2, atol=1e-3):
                    hint = "The scale 1/sqrt(D) is missing in this gradient."
            what = f"{name} for q {tuple(q.shape)}, k {tuple(k.shape)} in {dtype_name(dtype)}"
            expect_close(gradient, right.to(dtype), rtol=tolerance, atol=tolerance * scale, what=what, hint=hint)
    _expect_lse_used(attention_backward, draw)
    _expect_close_in_16_bits(attention_backward, draw)


def _expect_close_in_16_bits(attention_backward, draw: Draw) -> None:
    """Assert that inputs in 16 bits have gradients in 16 bits, as close as such probabilities let them be."""
    shapes = (1, 2, draw.size(7, 20), 8), (1, 2, draw.size(21, 30), 8)
    for dtype in (torch.bfloat16, torch.float16):
        q, dout = (draw.normal(*shapes[0], dtype=dtype) for _ in range(2))
        k, v = (draw.normal(*shapes[1], dtype=dtype) for _ in range(2))
        out, expected = reference_gradients(q, k, v, dout)
        got = attention_backward(q, k, v, out.to(dtype), _lse(q, k).to(dtype), dout)
        for name, gradient, right in zip(("dq", "dk", "dv"), got, expected, strict=True):
            what = f"{name} for inputs in {dtype_name(dtype)}"
            if not isinstance(gradient, torch.Tensor) or gradient.dtype != dtype or gradient.shape != right.shape:
                raise AssertionError(f"{what} should have the dtype and the shape of the input.")
            distance = (gradient.double() - right).square().mean().sqrt() / right.square().mean().sqrt()
            if not distance < 0.2:
                raise AssertionError(f"{what} is {float(distance):.0%} away from what it should be.")


def _expect_lse_used(attention_backward, draw: Draw) -> None:
    """Assert that P comes from the lse that is given: here these keys are a part of all keys, so their P add up to less than 1."""
    shape, d = (1, 2, draw.size(7, 12), draw.size(13, 20)), 8
    q, dout = (draw.normal(*shape[:3], d) for _ in range(2))
    k, v = (draw.normal(*shape[:2], shape[3], d) for _ in range(2))
    out = reference(q.double(), k.double(), v.double())[0]
    others = draw.normal(*shape[:3], dtype=torch.float64).abs()  # what the other keys add to the lse
    lse, out = _lse(q, k) + others, out * torch.exp(-others)[..., None]
    got = attention_backward(q, k, v, out.float(), lse.float(), dout)
    p = torch.exp(q.double() @ k.double().mT / math.sqrt(d) - lse[..., None])
    ds = p * (dout.double() @ v.double().mT - (dout.double() * out).sum(-1, keepdim=True)) / math.sqrt(d)
    right = ds @ k.double(), ds.mT @ q.double(), p.mT @ dout.double()
    for name, gradient, expected in zip(("dq", "dk", "dv"), got, right, strict=True):
        what = f"{name} over a part of the keys, with the lse of all"
        hint = "P is e^(S - lse), with the lse that is given: do not compute the softmax again."
        expect_close(gradient, expected.float(), rtol=1e-3, atol=1e-3, what=what, hint=hint)
