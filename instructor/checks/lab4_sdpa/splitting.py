"""Split-KV attention (3.2) and the backward pass by hand (bonus 2.4)."""

from __future__ import annotations

import math

import torch

from instructor.checks.common import Draw, dtype_name
from utils.attention import reference, reference_gradients
from utils.checking import expect_close, expect_items
from utils.checking.labs.lab4_sdpa.common import check
from utils.checking.labs.lab4_sdpa.splitting import (
    BACKWARD,
    GRADIENTS,
    MERGE,
    PART,
    expect_gradient,
    expect_lse_used,
    expect_part_output,
    expect_split,
)


def _lse(q, k) -> torch.Tensor:
    """Return the log of the sum of e^score of each query, in float64."""
    return reference(q.double(), k.double(), k.double())[1]


@check("3.2", "Attention over one part", **PART)
def attend_part(attend_part, seed=None):
    """Check output and log-sum-exp in float32, with grouped heads and large scores."""
    draw = Draw(seed)
    # The scores of the last case are so large that exp overflows, and so small that fp32 distinguishes the largest.
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
        output, lse = expect_items(attend_part(q, k, v), "output, lse", what)
        expect_part_output(output, q, k, v, rtol=rtol, atol=1e-3 if scale > 1 else 1e-5, what=what)
        hint = "It is the natural logarithm of the sum of e^score: maximum + log(sum of e^(score - maximum))."
        expect_close(lse, _lse(q, k).float(), rtol=rtol, atol=1e-3, what=f"the lse of {what}", hint=hint)


@check("3.2", "Split-KV attention", **MERGE)
def split_kv_attention(split_kv_attention, seed=None):
    """Check any number of splits, each part alone, large scores, and the dtype of the queries."""
    draw = Draw(seed)
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
        near = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize == 2 or scale > 1 else {"rtol": 1e-3, "atol": 1e-4}
        expect_split(split_kv_attention, q, k, v, splits, scale > 1, what, **near)


@check("Bonus 2.4", "The backward pass", **BACKWARD)
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
        macs = b * h * sq * sk * d  # multiply-accumulates of one product
        if (done := attention_backward.watch.macs) > 8 * macs:  # five, and three for repeated products
            raise AssertionError(
                f"attention_backward does the work of {done / macs:.0f} products, and five are enough: use the formulas, and no "
                "differences of the forward pass."
            )
        p = torch.exp(q.double() @ k.double().mT / math.sqrt(d) - _lse(q, k)[..., None])
        ds = p * (dout.double() @ v.double().mT) / math.sqrt(d)
        no_delta = (ds @ k.double()).to(dtype), (ds.mT @ q.double()).to(dtype)
        where = f"q {tuple(q.shape)}, k {tuple(k.shape)} in {dtype_name(dtype)}"
        for name, gradient, right in zip(
            GRADIENTS, expect_items(got, "dq, dk, dv", "attention_backward(...)"), expected, strict=True
        ):
            near = {"rtol": tolerance, "atol": tolerance * scale}
            expect_gradient(gradient, right.to(dtype), no_delta, name, where, **near)
    expect_lse_used(attention_backward, tensors, expected[2])
    _expect_close_in_16_bits(attention_backward, draw)


def _expect_close_in_16_bits(attention_backward, draw: Draw) -> None:
    """Assert that inputs in 16 bits have gradients in 16 bits, with errors that probabilities in 16 bits explain."""
    shapes = (1, 2, draw.size(7, 20), 8), (1, 2, draw.size(21, 30), 8)
    for dtype in (torch.bfloat16, torch.float16):
        q, dout = (draw.normal(*shapes[0], dtype=dtype) for _ in range(2))
        k, v = (draw.normal(*shapes[1], dtype=dtype) for _ in range(2))
        out, expected = reference_gradients(q, k, v, dout)
        got = attention_backward(q, k, v, out.to(dtype), _lse(q, k).to(dtype), dout)
        for name, gradient, right in zip(GRADIENTS, got, expected, strict=True):
            what = f"{name} for inputs in {dtype_name(dtype)}"
            if not isinstance(gradient, torch.Tensor) or gradient.dtype != dtype or gradient.shape != right.shape:
                raise AssertionError(f"{what} should have the dtype and the shape of the input.")
            distance = (gradient.double() - right).square().mean().sqrt() / right.square().mean().sqrt()
            if not distance < 0.2:
                raise AssertionError(f"{what} is {float(distance):.0%} away from what it should be.")
