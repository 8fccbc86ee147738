"""Score modifiers: `score_mod(score, b, h, q, k)` changes one scaled score before the softmax.

    scores = compose(relative_bias(16), soft_cap(20.0))     # from left to right

A kernel applies it in registers, to the scores of the blocks that the mask needs. `modified(...)` applies it to all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from utils.attention.masks import _whole, name_of, named

ScoreMod = Callable[..., torch.Tensor]


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}; it must be a finite number above 0.")
    return float(value)


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi's slope of each head, 2^(-8/H), 2^(-16/H), ... for H a power of two (Press et al., 2022)."""
    return [2.0 ** (-8.0 * (head + 1) / _whole("heads", heads)) for head in range(heads)]


def alibi(heads: int) -> ScoreMod:
    """ALiBi: each head takes off its slope times the distance of the key."""
    exponent = -8.0 / _whole("heads", heads)

    def score_mod(score, b, h, q, k):
        return score - torch.exp2(exponent * (h + 1)) * torch.abs(q - k)

    return named(score_mod, f"alibi({heads})", kind="alibi", heads=heads)


def relative_bias(table_or_heads: torch.Tensor | int) -> ScoreMod:
    """A bias by how far the key is from the query.

    With a table (H, distances): entry table[h, |q - k|], further keys take the last one. With a number of heads:
    ALiBi's slope times k - q, so that keys before the query lose and keys after it gain.
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
    exponent = -8.0 / _whole("heads", table_or_heads)

    def score_mod(score, b, h, q, k):
        return score + torch.exp2(exponent * (h + 1)) * (k - q)

    return named(score_mod, f"relative_bias({table_or_heads})", kind="relative_bias", heads=table_or_heads)


def soft_cap(cap: float) -> ScoreMod:
    """Scores squeezed into (-cap, cap) by a tanh, as Gemma 2 does."""
    cap = _positive("cap", cap)

    def score_mod(score, b, h, q, k):
        return cap * torch.tanh(score / cap)

    return named(score_mod, f"soft_cap({cap:g})", kind="soft_cap", cap=cap)


def document_decay(span: int, rate: float = 0.1) -> ScoreMod:
    """Documents of `span` tokens: each document between query and key takes `rate` off the score."""
    _whole("span", span)
    rate = _positive("rate", rate)

    def score_mod(score, b, h, q, k):
        return score - rate * torch.abs(q // span - k // span)

    return named(score_mod, f"document_decay({span}, {rate:g})", kind="document_decay", span=span, rate=rate)


def compose(*mods: ScoreMod) -> ScoreMod:
    """The modifiers one after the other, from left to right."""
    if not mods:
        raise ValueError("compose() was given no score modifier; give it one or more.")
    for mod in mods:
        if not callable(mod):
            raise TypeError(
                f"compose() takes score modifiers (score, b, h, q, k), and was given a {type(mod).__name__}."
            )

    def score_mod(score, b, h, q, k):
        for mod in mods:
            score = mod(score, b, h, q, k)
        return score

    return named(score_mod, f"compose({', '.join(map(name_of, mods))})", kind="compose", mods=mods)


def modified(
    score_mod: ScoreMod | None, scores: torch.Tensor, b: int = 0, h: int = 0, first_query: int = 0
) -> torch.Tensor:
    """Scores (Sq, Sk) of sequence b and head h after the modifier, every pair by its own scalars."""
    if score_mod is None:
        return scores
    batch, head = (torch.full((), index, dtype=torch.int32, device=scores.device) for index in (b, h))
    queries = torch.arange(first_query, first_query + scores.shape[0], device=scores.device, dtype=torch.int32)
    keys = torch.arange(scores.shape[1], device=scores.device, dtype=torch.int32)
    pairs = torch.vmap(torch.vmap(score_mod, (0, None, None, None, 0)), (0, None, None, 0, None))
    return pairs(scores, batch, head, queries, keys)


def by_name(name: str, heads: int, cap: float) -> ScoreMod | None:
    """The score modifiers of the benchmarks: none, relative_bias (by `heads`), soft_cap (at `cap`)."""
    made = {"none": lambda: None, "relative_bias": lambda: relative_bias(heads), "soft_cap": lambda: soft_cap(cap)}
    if name not in made:
        raise ValueError(f"there is no score modifier {name!r}; choose one of {', '.join(made)}.")
    return made[name]()
