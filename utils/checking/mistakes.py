"""Known mistakes: the message about a wrong answer names the usual mistake that gives the same result."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F


def known_mistake(
    got: object, mistakes: Mapping[str, torch.Tensor], rtol: float = 1e-3, atol: float = 1e-4, otherwise: str = ""
) -> str:
    """Return the hints of the mistakes whose result is `got`, joined by "Or:".

    Args:
        got: the answer's result; anything but a tensor has no known mistake.
        mistakes: {hint: the result that this mistake leads to}. A result of another shape is not compared.
        rtol: relative tolerance.
        atol: absolute tolerance.
        otherwise: what is returned if no mistake fits.
    """
    if not isinstance(got, torch.Tensor):
        return otherwise
    value = got.detach().double()
    hints = [
        hint
        for hint, wrong in mistakes.items()
        if wrong.shape == value.shape
        and torch.allclose(value, wrong.to(value.device, torch.float64), rtol, atol, equal_nan=True)
    ]
    return " Or: ".join(hints) or otherwise


def attention_mistake(got: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> str:
    """Return a hint if `got` is what a known mistake makes of attention over (B, H, S, D); "" if none is known.

    Args:
        got: the output that was returned.
        q: (B, H, S, D).
        k: (B, H, L, D).
        v: (B, H, L, D).
        causal: whether a causal mask was asked for.
    """
    if not isinstance(got, torch.Tensor) or got.shape != q.shape:
        return ""
    right_scale = 1 / math.sqrt(q.shape[-1])
    q, k, v, got = (t.detach().double() for t in (q, k, v, got))

    def attend(scale: float = right_scale, causal: bool = causal) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal)

    right = attend()
    if torch.allclose(got, right, rtol=1e-3, atol=1e-4):
        return ""
    scores = q @ k.mT * right_scale
    known = {
        "The scores are divided by the square root of the head dimension.": attend(1.0),
        "The scores are divided by sqrt(D), not by D or twice.": attend(right_scale**2),
        "The root is that of the head dimension D, not of the length.": attend(1 / math.sqrt(q.shape[-2])),
        "The scores are divided by sqrt(D), not multiplied.": attend(1 / right_scale),
        "Which dimension is the softmax over? Each QUERY's weights sum to 1.": torch.softmax(scores, dim=-2) @ v,
        "The output is not divided by the sum of the weights.": torch.exp(scores - scores.amax(-1, keepdim=True)) @ v,
    }
    if q.shape[-2] == k.shape[-2]:
        hint = "A query may not see the keys after it." if causal else "No mask was asked for."
        known[hint] = attend(causal=not causal)
    telling = {hint: wrong for hint, wrong in known.items() if not torch.allclose(wrong, right, rtol=1e-3, atol=1e-4)}
    return known_mistake(got, telling)


# Share of the results that may differ from the exact ones, rounded. With float32 inside, only those few differ that lie almost
# in the middle of two numbers of the dtype: none of most inputs, half a percent of scores in float16 that are large. With weights
# of 8 bits it is 7 to 86 percent, with scores, the sum or the output in 16 bits on the way 41 to 74.
_OTHERWISE = 0.04


def expect_rounded_once(got: torch.Tensor, exact: torch.Tensor, what: str, suspects: str) -> None:
    """Assert that results are the exact ones, rounded to their dtype, but for the few that float32 rounds the other way.

    The size of an error hides what happens inside: the last rounding is as large. Here the last rounding is taken out.

    Args:
        got: the results, of a dtype with 16 bits.
        exact: the same in float64.
        what: the value in the student's words.
        suspects: what may be in 16 bits, such as `scores, weights and sums`.
    """
    otherwise = float((got.detach() != exact.to(got.dtype)).double().mean())
    if otherwise > _OTHERWISE:
        dtype = str(got.dtype).removeprefix("torch.")
        raise AssertionError(
            f"{what}: {otherwise:.0%} of the results are not the exact ones rounded to {dtype}. With float32 inside and one rounding at the "
            f"end it is less than 1%. Which of {suspects} has fewer bits than float32 on the way?"
        )
