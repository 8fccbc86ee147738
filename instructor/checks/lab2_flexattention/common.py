"""Parts that the checks of lab 2 share: masks and score modifiers, evaluated for each pair, and names of mistakes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from utils.attention import reference
from utils.checking import expect_close
from utils.checking.masks import Mod, apply_score_mod, pairs
from utils.checking.mistakes import name_mistakes


def indices(sq: int, sk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return index tensors (Sq, 1) and (1, Sk) that broadcast to all pairs."""
    return torch.arange(sq)[:, None], torch.arange(sk)[None, :]


class PairCounter:
    """A mask_mod with a counter of the pairs for which it is evaluated.

    It is an object, because the grader may send the code of a function to the student's process; an object stays here.
    """

    def __init__(self, mod: Mod) -> None:
        self.mod, self.pairs = mod, 0

    def __call__(self, b, h, q, k):
        """Answer as the mask does, and count the pairs of the answer."""
        pairs = answer = self.mod(b, h, q, k)
        while torch._C._functorch.is_batchedtensor(pairs):  # under vmap one answer holds the answers of many pairs
            pairs = torch._C._functorch.get_unwrapped(pairs)
        self.pairs += pairs.numel()
        return answer


def attend_densely(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute attention in float64 under a mask that broadcasts to (B, H, S, L); a query without keys gets zeros."""
    if not q.numel() or not k.numel():  # `reference` needs a key; an empty text has no key
        return torch.zeros_like(q)
    return reference(q, k, v, allowed=mask)[0].to(q.dtype)


def expect_scores(
    mod: Mod,
    expected: torch.Tensor,
    scores: torch.Tensor,
    what: str,
    mistakes: Mapping[str, torch.Tensor] | None = None,
    b: int = 0,
    h: int = 0,
) -> None:
    """Assert that a score_mod turns scores (Sq, Sk) of sequence b and head h into `expected`."""
    got = apply_score_mod(mod, scores, what, b, h)
    rough = 1e-4 if scores.dtype.itemsize >= 4 else 3e-2  # a 16-bit result may round before or after an addition
    tolerance = {"rtol": rough, "atol": rough}
    expect_close(got, expected, **tolerance, what=what, hint=name_mistakes(got, expected, mistakes or {}))


def record_calls():
    """Return `attend(q, k, v, mask_mod)` in float64, and the list of its calls: the shape of q, and the mask_mod."""
    calls: list[tuple[tuple[int, ...], Mod]] = []

    def attend(q, k, v, mask_mod):
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor) or x.dim() != 4:
                raise AssertionError(
                    f"attend takes tensors (B, H, S, D), and got {name} of shape {tuple(getattr(x, 'shape', ()))}."
                )
        calls.append((tuple(q.shape), mask_mod))
        if not q.numel():
            return q
        batches = [
            pairs(mask_mod, q.shape[2], k.shape[2], "the mask_mod that attend got", b=b) for b in range(q.shape[0])
        ]
        return attend_densely(q, k, v, torch.stack(batches)[:, None])

    return attend, calls
