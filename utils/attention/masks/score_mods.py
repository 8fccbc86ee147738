"""Score modifiers: `score_mod(score, b, h, q, k)` changes one scaled score before the softmax.

    modifier = compose(relative_bias(16), soft_cap(20.0))     # from left to right

A kernel applies the modifier in registers, to the scores of the blocks that it computes. `modify_scores` applies it to
every score.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves

from utils.attention.masks.mask_mods import captures, checked_mods, errors_of, name_of, named
from utils.validation import whole_number

ScoreMod = Callable[..., torch.Tensor]


def alibi(heads: int) -> ScoreMod:
    """Let each head subtract its slope times the distance of the key (ALiBi)."""
    exponent = -8.0 / whole_number("heads", heads)

    def score_mod(score, b, h, q, k):
        return score - torch.exp2(exponent * (h + 1)) * torch.abs(q - k)

    return named(score_mod, f"alibi({heads})", kind="alibi", heads=heads)


def relative_bias(table_or_heads: torch.Tensor | int) -> ScoreMod:
    """Add a bias that depends on the distance between query and key.

    Args:
        table_or_heads: a table (H, distances): the bias is table[h, |q - k|], and keys beyond the table take its last
            entry. Or a number of heads: the bias is ALiBi's slope times k - q, so it lowers the scores of keys before
            the query and raises the scores of keys after it.
    """
    if isinstance(table_or_heads, torch.Tensor):
        table = table_or_heads
        if table.dim() != 2 or not table.is_floating_point():
            raise ValueError(
                "a table of relative biases is a floating-point tensor (heads, distances); got "
                f"{tuple(table.shape)} of {table.dtype}."
            )
        last = table.shape[1] - 1

        def from_table(score, b, h, q, k):
            return score + table[h, torch.abs(q - k).clamp(max=last)]

        return named(from_table, f"relative_bias({tuple(table.shape)})", kind="relative_bias", table=table)
    exponent = -8.0 / whole_number("heads", table_or_heads)

    def score_mod(score, b, h, q, k):
        return score + torch.exp2(exponent * (h + 1)) * (k - q)

    return named(score_mod, f"relative_bias({table_or_heads})", kind="relative_bias", heads=table_or_heads)


def soft_cap(cap: float) -> ScoreMod:
    """Squeeze scores into (-cap, cap) by a tanh, as Gemma 2 does."""
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not 0 < cap < math.inf:
        raise ValueError(f"cap is {cap!r}; it must be a finite number above 0.")
    cap = float(cap)

    def score_mod(score, b, h, q, k):
        return cap * torch.tanh(score / cap)

    return named(score_mod, f"soft_cap({cap:g})", kind="soft_cap", cap=cap)


def compose(*mods: ScoreMod) -> ScoreMod:
    """Apply the modifiers in turn, from left to right."""
    mods = checked_mods("compose", mods, "score modifier", "(score, b, h, q, k)")

    def score_mod(score, b, h, q, k):
        for mod in mods:
            score = mod(score, b, h, q, k)
        return score

    return named(score_mod, f"compose({', '.join(map(name_of, mods))})", kind="compose", mods=mods)


def modify_all_scores(
    score_mod: ScoreMod, scores: torch.Tensor, first: tuple[int, int, int] = (0, 0, 0)
) -> torch.Tensor:
    """Apply a modifier to scores (B, H, Sq, Sk), every score by its own scalars; first: the first sequence, head and query."""
    starts = zip((*first, 0), scores.shape, strict=True)
    indices = [torch.arange(n, n + size, device=scores.device, dtype=torch.int32) for n, size in starts]
    for place in (4, 3, 2, 1):  # the innermost vmap is over the keys
        dims = [0, None, None, None, None]
        dims[place] = 0
        score_mod = torch.vmap(score_mod, tuple(dims))
    return score_mod(scores, *indices)


def modify_scores(
    score_mod: ScoreMod | None, scores: torch.Tensor, b: int = 0, h: int = 0, first_query: int = 0
) -> torch.Tensor:
    """Apply a modifier to scores (Sq, Sk) of sequence b and head h, every score by its own scalars."""
    if score_mod is None:
        return scores
    with errors_of("score modifier", score_mod):
        modified = modify_all_scores(score_mod, scores[None, None], (b, h, first_query))[0, 0]
    if not modified.is_floating_point() or modified.shape != scores.shape:
        raise TypeError(
            f"score modifier {name_of(score_mod)} returns {modified.dtype}{list(modified.shape[2:]) or ''}; it must return the new score, "
            "one floating-point number: torch.where(condition, score, other) chooses between two."
        )
    return modified


def trains(score_mod: ScoreMod | None) -> bool:
    """Whether autograd must see a modifier, because it reads a tensor that requires a gradient."""
    if score_mod is None or not torch.is_grad_enabled():
        return False
    return any(getattr(x, "requires_grad", False) for x in tree_leaves(captures(score_mod)))


def by_name(name: str, heads: int, cap: float) -> ScoreMod | None:
    """Return a score modifier of the benchmarks: none, relative_bias (of `heads` heads) or soft_cap (at `cap`)."""
    makers = {"none": lambda: None, "relative_bias": lambda: relative_bias(heads), "soft_cap": lambda: soft_cap(cap)}
    if name not in makers:
        raise ValueError(f"there is no score modifier {name!r}; choose one of {', '.join(makers)}.")
    return makers[name]()
