"""Known mistakes. If a wrong result equals the result of a usual mistake, the message names this mistake.

The sentences say what to look at, not what to write. As the kernels of labs 1 and 3, this module computes attention
block by block, in float64, and with one step changed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Mistakes = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def name_mistakes(got: object, expected: torch.Tensor, mistakes: Mistakes, otherwise: str = "") -> str:
    """Return the words of the mistakes that give these values: at most two, joined by "Or:".

    Args:
        got: the wrong result. If it is no tensor of the right shape, no mistake is known.
        expected: the right result.
        mistakes: {words: the values that the mistake gives}, or a list of such pairs where two mistakes have the same
            words. Values of another shape are ignored.
        otherwise: the words if no mistake fits.
    """
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
        return otherwise
    found: list[tuple[float, str]] = []
    g = got.detach().double()
    wrong = _apart(g, expected.double())
    for words, values in mistakes.items() if isinstance(mistakes, Mapping) else mistakes:
        if values.shape == g.shape and wrong.any():
            apart = _apart(g, values.to(g)).double()
            # A mistake has to explain all wrong elements, and to leave the right elements as they are.
            if apart.mean() < 0.1 and apart[wrong].mean() < 0.1:
                found.append((apart.mean().item(), words))
    best = min(found, default=(0.0, ""))[0]
    nearest = dict.fromkeys(words for share, words in sorted(found) if share <= best + 1e-3)
    return " Or: ".join(list(nearest)[:2]) or otherwise


def _apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mark the elements that differ by more than 2% of b's typical size. NaN equals NaN, infinity equals infinity."""
    finite = torch.isfinite(b)
    size = b[finite].abs().mean() if finite.any() else torch.ones(())
    near = (a - b).abs() <= 0.02 * size + 0.02 * torch.nan_to_num(b, 0.0, 0.0, 0.0).abs()
    return ~(near | (a == b) | (torch.isnan(a) & torch.isnan(b)))


# ---- attention with one step changed ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """The steps from blocks of keys to an output. The default of a field is right; every other value is a mistake."""

    last_key: int = 0  # number of keys behind the last key that the mask lets through
    in_block: bool = False  # the mask counts keys within the block, not over all blocks
    rescale_output: float = 1.0  # exponent of the factor that rescales the output so far; with 0 there is no factor
    rescale_sum: float = 1.0  # exponent of the factor that rescales the sum of each row
    scale: float = 1.0  # factor of the scores in the exponent
    divide: bool = True  # whether the output is divided by the sum
    total: str = "new"  # the new sum is old sum plus block's sum; with "block" it is the block's sum
    value_block: str = "own"  # where V's block begins: at its own key, at key 0, or ("number") at its number
    key_block: str = "own"  # where K's block begins, in the same words
    skip: int = 0  # number of blocks that are left out at the end
    probabilities: str = "own"  # the block whose probabilities multiply V


def attention_in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, steps: Steps, block: int = 64, downward: bool = False
) -> torch.Tensor:
    """Compute attention of q (..., Sq, D) over k and v (..., Sk, D) in float64; keys beyond the last are zeros.

    `downward` visits the blocks from the last to the first.
    """
    q, k, v = q.double(), k.double(), v.double()
    sk = k.shape[-2]
    blocks = -(-sk // block)
    k, v = (F.pad(x, (0, 0, 0, blocks * block - sk)) for x in (k, v))
    scale = steps.scale * math.log2(math.e) / math.sqrt(q.shape[-1])
    output, total = torch.zeros_like(q), torch.zeros_like(q[..., 0])
    highest = torch.full_like(total, -math.inf)
    order = list(range(blocks))[:: -1 if downward else 1]
    kept: torch.Tensor | None = None
    for i in order[: blocks - steps.skip]:
        starts = {"own": i * block, "first": order[0] * block, "number": i}
        s = q @ k[..., starts[steps.key_block] :, :][..., :block, :].mT
        counted = torch.arange(block) + (0 if steps.in_block else i * block)
        s = s.masked_fill(counted >= sk + steps.last_key, -math.inf)
        top = torch.maximum(highest, s.amax(-1))
        finite = torch.where(torch.isfinite(top), top, 0.0)
        p = torch.exp2((s - finite[..., None]) * scale)
        # Before the first block the factor is 1. With the wrong sign it is 2^(+inf), and 0 times this is NaN.
        factor = torch.exp2((highest - finite) * scale)
        grown = factor if steps.rescale_output < 0 else torch.where(torch.isfinite(highest), factor, 1.0)
        total = (total * grown**steps.rescale_sum if steps.total == "new" else 0.0) + p.sum(-1)
        kept = p if kept is None or steps.probabilities == "own" else kept
        values = v[..., starts[steps.value_block] :, :][..., :block, :]
        output = output * (grown**steps.rescale_output)[..., None] + kept @ values
        highest = top
    return output / total[..., None] if steps.divide else output


CARRIED = {  # mistakes from block to block, in the kernels of labs 1 and 3
    "Keys that do not exist take part: their scores are 0, and should be minus infinity. Are they masked?": Steps(
        last_key=10**9
    ),
    "One key too many takes part, behind the last one.": Steps(last_key=1),
    "The last key takes no part.": Steps(last_key=-1),
    "The mask counts the keys of each block from 0, and not over all blocks.": Steps(in_block=True),
    "The output of the blocks before is not rescaled when the maximum of a row grows.": Steps(rescale_output=0.0),
    "The sum of the blocks before is not rescaled when the maximum of a row grows.": Steps(rescale_sum=0.0),
    "Neither the sum nor the output of the blocks before is rescaled when the maximum grows.": Steps(
        rescale_output=0.0, rescale_sum=0.0
    ),
    "The factor for the blocks before is inverted: when the maximum grows it must shrink them, and they grow.": Steps(
        rescale_output=-1.0, rescale_sum=-1.0
    ),
    "Only the last block is in the sum of each row: the sum so far is lost.": Steps(total="block"),
    "The output is not divided by the sum of its row.": Steps(divide=False),
}
SOFTMAX = CARRIED | {
    "The weights are powers of e. c contains log2(e) already, so they should be powers of 2.": Steps(
        scale=math.log2(math.e)
    )
}
FLASH = CARRIED | {"The weights are powers of 2, and the scores are exponents of e.": Steps(scale=math.log(2))}
BLOCKS = {
    "The last block of keys is left out: how many blocks does sk need?": Steps(skip=1),
    "Every block of K is multiplied with the same block of V: which row of V does its copy begin at?": Steps(
        value_block="first"
    ),
    "K of every step is the same block: which row does its copy begin at?": Steps(key_block="first"),
    "The copies of K and V begin at the block's number: rows count elements, not blocks.": Steps(
        key_block="number", value_block="number"
    ),
}
OVERLAP = {
    "P of the first block is multiplied with every block of V: p must become p_next at the end of each turn.": Steps(
        probabilities="first"
    )
}


def attention_mistake(got: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Return a hint if a known mistake in attention over q, k, v (..., S, D) gives `got`; otherwise return ""."""
    scale = 1 / math.sqrt(q.shape[-1])
    q, k, v = (t.detach().double() for t in (q, k, v))
    attend = functools.partial(F.scaled_dot_product_attention, q, k, v)
    scores = q @ k.mT * scale
    known = {
        "The scores are divided by the square root of the head dimension.": attend(scale=1.0),
        "The scores are divided by sqrt(D), not by D or twice.": attend(scale=scale**2),
        "The root is that of the head dimension D, not of the length.": attend(scale=1 / math.sqrt(q.shape[-2])),
        "The scores are divided by sqrt(D), not multiplied.": attend(scale=1 / scale),
        "Which dimension is the softmax over? Each QUERY's weights sum to 1.": torch.softmax(scores, dim=-2) @ v,
        "The output is not divided by the sum of the weights.": torch.exp(scores - scores.amax(-1, keepdim=True)) @ v,
    }
    if q.shape[-2] == k.shape[-2]:
        known["No mask was asked for."] = attend(is_causal=True)
    return name_mistakes(got, attend(), known)


def flash_mistake(got: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int) -> str:
    """Return a hint for the output (H, Sq, D) of lab 1's kernel in Triton, which takes keys in blocks of `block`."""
    last = (k.shape[1] - 1) // block * block
    alone = "Only the last block of keys counts. Is the new maximum kept, and is each part added to what was there?"
    known = {words: attention_in_blocks(q, k, v, steps, block) for words, steps in FLASH.items()}
    known[alone] = attention_in_blocks(q, k[:, last:], v[:, last:], Steps(), block)
    overflow = (
        "Is the largest score of all blocks so far subtracted before every exponential, along each row, and are missing keys "
        "masked before it is taken? Or: is a part of the output never written (head, strides, mask)?"
    )
    right = attention_in_blocks(q, k, v, Steps(), block)
    words = name_mistakes(got, right, known) or attention_mistake(got, q, k, v)  # a guess if all is NaN
    return " Or: ".join(filter(None, (overflow if got.isnan().any() else "", words))) or (
        "Are m, l and the accumulator carried from block to block, and has every pointer its head and its strides?"
    )


# ---- roundings -------------------------------------------------------------------------------------------------------

# Share of the results that may differ from the rounded exact results. With float32 inside, a result differs only if it
# lies almost in the middle between two numbers of the dtype: mostly none, half a percent at large float16 scores.
# With weights of 8 bits 7 to 86% differ; with scores, sum or output in 16 bits 41 to 74% differ.
_OTHERWISE = 0.04


def expect_rounded_once(got: torch.Tensor, exact: torch.Tensor, what: str, suspects: str) -> None:
    """Assert that nearly all results equal the exact results, rounded to their dtype.

    The size of the errors would not show a rounding in between, because the last rounding has the same size.
    `got` has 16 bits, `exact` is float64. `suspects` names the values that may be in 16 bits, such as `scores and sums`.
    """
    otherwise = float((got.detach() != exact.to(got.dtype)).double().mean())
    if otherwise > _OTHERWISE:
        dtype = str(got.dtype).removeprefix("torch.")
        raise AssertionError(
            f"{what.removesuffix(',')}: {otherwise:.0%} of the results are not the exact ones rounded to {dtype}. With float32 inside and one rounding at the "
            f"end it is less than 1%. Which of {suspects} has fewer bits than float32 on the way?"
        )
