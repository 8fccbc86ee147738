"""Known mistakes: the message about a wrong answer names the usual mistake that gives the same result."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from utils.checking.sizes import tensors_in


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


def attention_mistake(
    got: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
) -> str:
    """Return a hint if `got` is what a known mistake makes of attention over (B, H, S, D); "" if none is known.

    Args:
        got: the output that was returned.
        q: (B, H, S, D).
        k: (B, H, L, D).
        v: (B, H, L, D).
        causal: whether a causal mask was asked for.
        scale: the factor of the scores that was asked for; 1 / sqrt(D) by default.
    """
    if not isinstance(got, torch.Tensor) or got.shape != q.shape:
        return ""
    right_scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    q, k, v, got = (t.detach().double() for t in (q, k, v, got))

    def attend(scale: float = right_scale, causal: bool = causal) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal)

    scores = q @ k.mT * right_scale
    known = {
        "The scores are divided by the square root of the head dimension.": lambda: attend(1.0),
        "The scores are divided by sqrt(D), not by D.": lambda: attend(1 / q.shape[-1]),
        "The scores are divided by sqrt(D), once.": lambda: attend(right_scale**2),
        "The scores are divided by sqrt(D), not multiplied.": lambda: attend(1 / right_scale),
        "Which dimension is the softmax over? Each QUERY's weights sum to 1.": lambda: (
            torch.softmax(scores, dim=-2) @ v
        ),
        "The output is not divided by the sum of the weights.": lambda: (
            torch.exp(scores - scores.amax(dim=-1, keepdim=True)) @ v
        ),
    }
    if q.shape[-2] == k.shape[-2]:
        hint = "A query may not see the keys after it." if causal else "No mask was asked for."
        known[hint] = lambda: attend(causal=not causal)
    right = attend()
    for hint, answer in known.items():
        wrong = answer()
        telling = not torch.allclose(wrong, right, rtol=1e-3, atol=1e-4)
        if telling and torch.allclose(got, wrong, rtol=1e-3, atol=1e-4):
            return hint
    return ""


def leaves_inputs(answer: Callable) -> Callable:
    """Return a function that calls the answer, and asserts that its tensors are as they were: also where nobody looks later.

    Args:
        answer: a student's function; its tensors may stand in tuples and lists.
    """

    @functools.wraps(answer)
    def call(*args, **kwargs):
        given = tensors_in([*args, *kwargs.values()])
        before = [_numbers(tensor) for tensor in given]
        result = answer(*args, **kwargs)
        for old, tensor in zip(before, given, strict=True):
            new = _numbers(tensor)
            if old.shape != new.shape or not torch.equal(old, new):
                name = getattr(answer, "__name__", "your function")
                raise AssertionError(
                    f"{name} changed one of its inputs, or its memory. Work on new tensors: `x += ...` writes into x."
                )
        return result

    return call


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in which NaN equals NaN, which no watch of the check sees being made."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return torch.nan_to_num(tensor.detach()).clone()
