"""Known mistakes: the message about a wrong answer names the usual mistake that gives the same result."""

from __future__ import annotations

from collections.abc import Mapping

import torch


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
