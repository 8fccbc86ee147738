"""What comes out of a kernel with a known mistake: a wrong result that equals one of these has its mistake named.

Each function returns {what is wrong: the values that this mistake gives}. The sentences say what to look at, not what to
write. Attention is computed block by block in float64, as the kernels of lab 3 do, with one step changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from utils.checking.mistakes import attention_mistake


@dataclass(frozen=True)
class Steps:
    """How blocks of keys become an output; the defaults are right, and each other value is a mistake.

    Attributes:
        last_key: the number of keys that the mask lets through beyond those that exist.
        in_block: whether the mask counts keys within the block, not over all blocks.
        rescale_output: exponent of the factor that the output so far is multiplied with; 0 leaves it out.
        rescale_sum: the same for the sum of each row.
        scale: factor of the scores in the exponent.
        divide: whether the output is divided by the sum.
        total: "new" adds the block's sum to the sum so far; "block" keeps the block's alone.
        value_block: which block of V belongs to a block of K: "own", "first" or "next", or "number": at its number.
        key_block: which block of keys is read in each step: "own" or "first", or "number".
        whole_blocks: whether an incomplete last block is left out.
        skip: the number of blocks left out at the end.
        probabilities: "own" multiplies V with its block's probabilities, "first" always with those of the first block.
    """

    last_key: int = 0
    in_block: bool = False
    rescale_output: float = 1.0
    rescale_sum: float = 1.0
    scale: float = 1.0
    divide: bool = True
    total: str = "new"
    value_block: str = "own"
    key_block: str = "own"
    whole_blocks: bool = False
    skip: int = 0
    probabilities: str = "own"


def attention_in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, steps: Steps, block: int = 64, downward: bool = False
) -> torch.Tensor:
    """Compute attention of q (..., Sq, D) over k and v (..., Sk, D) block by block in float64.

    Args:
        q: queries.
        k: keys; those of an incomplete block arrive as zeros.
        v: values.
        steps: what to do in each block.
        block: keys of a block.
        downward: visit the blocks from the last to the first, as a producer does that loads an incomplete block first.
    """
    q, k, v = q.double(), k.double(), v.double()
    sq, sk = q.shape[-2], k.shape[-2]
    blocks = -(-sk // block)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, blocks * block - sk)) for x in (k, v)]
    scale = steps.scale * math.log2(math.e) / math.sqrt(q.shape[-1])
    output, total = torch.zeros_like(q), torch.zeros_like(q[..., 0])
    highest = torch.full_like(total, -math.inf)
    order = list(range(sk // block if steps.whole_blocks else blocks))
    order = order[::-1] if downward else order
    order = order[: len(order) - steps.skip]
    kept: torch.Tensor | None = None
    for i in order:
        start = {"own": i * block, "first": order[0] * block, "number": i}[steps.key_block]
        s = q @ padded[0][..., start : start + block, :].mT
        counted = torch.arange(block) + (0 if steps.in_block else i * block)
        keep = (counted < sk + steps.last_key).expand(sq, block)
        s = s.masked_fill(~keep, -math.inf)
        top = torch.maximum(highest, s.amax(-1))
        finite = torch.where(torch.isfinite(top), top, 0.0)
        alpha = torch.where(torch.isfinite(highest), torch.exp2((highest - finite) * scale), 0.0)
        p = torch.exp2((s - finite[..., None]) * scale)
        # Turned around, the factor of the first block is 2^(+inf), and 0 times that is NaN.
        grown = alpha if steps.rescale_output < 0 else torch.where(torch.isfinite(highest), alpha, 1.0)
        total = (total * grown**steps.rescale_sum if steps.total == "new" else 0.0) + p.sum(-1)
        kept = p if kept is None or steps.probabilities == "own" else kept
        following = min(i + 1, blocks - 1) * block
        start = {"own": i * block, "first": order[0] * block, "next": following, "number": i}[steps.value_block]
        values = padded[1][..., start : start + block, :]
        output = output * (grown**steps.rescale_output)[..., None] + kept @ values
        highest = top
    return output / total[..., None] if steps.divide else output


CARRIED = {  # from block to block, in the kernels of labs 1 and 3
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
    "The factor for the blocks before is turned around: it must shrink them when the maximum grows, and they grow.": Steps(
        rescale_output=-1.0, rescale_sum=-1.0
    ),
    "Only the last block is in the sum of each row: the sum so far is lost.": Steps(total="block"),
    "The output is not divided by the sum of its row.": Steps(divide=False),
}
SOFTMAX = CARRIED | {
    "The output of the blocks before is rescaled twice.": Steps(rescale_output=2.0),
    "The weights are powers of e. c contains log2(e) already, so they should be powers of 2.": Steps(
        scale=math.log2(math.e)
    ),
    "c multiplies twice.": Steps(scale=2.0),
}
FLASH = CARRIED | {"The weights are powers of 2, and the scores are exponents of e.": Steps(scale=math.log(2))}
BLOCKS = {
    "The last block of keys, which is not full, is left out: how many blocks does sk need?": Steps(whole_blocks=True),
    "One block of keys is left out at the end.": Steps(skip=1),
    "Every block of K is multiplied with the same block of V: which row of V does its copy begin at?": Steps(
        value_block="first"
    ),
    "K of every step is the same block: which row does its copy begin at?": Steps(key_block="first"),
    "K and V of every step are the same block: which row do their copies begin at?": Steps(
        key_block="first", value_block="first"
    ),
    "K is multiplied with V of the next block.": Steps(value_block="next"),
    "The copies of K and V begin at the block's number: rows count elements, not blocks.": Steps(
        key_block="number", value_block="number"
    ),
}
OVERLAP = {
    "P of the first block is multiplied with every block of V: p must become p_next at the end of each turn.": Steps(
        probabilities="first"
    )
}


def attention_mistakes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mistakes: dict[str, Steps],
    downward: bool = False,
    block: int = 64,
) -> dict[str, torch.Tensor]:
    """Return what attention with each of the mistakes gives: {what is wrong: output}.

    Args:
        q: queries (..., Sq, D).
        k: keys (..., Sk, D).
        v: values (..., Sk, D).
        mistakes: the mistakes by their words.
        downward: from the last block to the first.
        block: keys of a block.
    """
    return {words: attention_in_blocks(q, k, v, steps, block, downward) for words, steps in mistakes.items()}


def name_mistakes(got: torch.Tensor, expected: torch.Tensor, mistakes: dict[str, torch.Tensor]) -> list[str]:
    """Return the words of the mistakes that give these values: at most two, the nearest first.

    Args:
        got: the wrong result.
        expected: the right one.
        mistakes: {what is wrong: the values that it gives}.
    """
    found: list[tuple[float, str]] = []
    g, e = got.double(), expected.double()
    wrong = _apart(g, e)
    for words, values in mistakes.items():
        apart = _apart(g, values.double())
        # A mistake explains the wrong elements, and says nothing else about the right ones.
        if apart.double().mean() < 0.1 and apart[wrong].double().mean() < 0.1:
            found.append((apart.double().mean().item(), words))
    best = min((share for share, _ in found), default=0.0)
    return [words for share, words in sorted(found) if share <= best + 1e-3][:2]


def _apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two tensors differ by more than 2% of the typical size of b; NaN equals NaN, and infinity equals infinity."""
    finite = torch.isfinite(b)
    size = b[finite].abs().mean() if finite.any() else torch.ones(())
    near = (a - b).abs() <= 0.02 * size + 0.02 * torch.nan_to_num(b, 0.0, 0.0, 0.0).abs()
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    return ~(near | same)


def flash_mistake(got: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int) -> str:
    """Return what is wrong with the output of lab 1's kernel in Triton, or what to look at if no known mistake gives it.

    Args:
        got: the output (H, Sq, D); for a right one the words are empty.
        q: queries (H, Sq, D).
        k: keys (H, Sk, D).
        v: values (H, Sk, D).
        block: keys of a block.
    """
    q, k, v, got = (x.double() for x in (q, k, v, got))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    if torch.allclose(got, expected, rtol=1e-3, atol=1e-3):
        return ""
    last = (k.shape[1] - 1) // block * block
    known = attention_mistakes(q, k, v, FLASH, block=block) | {
        "Only the last block of keys counts. Is the new maximum kept, and is each part added to what was there?": (
            torch.nn.functional.scaled_dot_product_attention(q, k[:, last:], v[:, last:])
        )
    }
    words = " Or: ".join(name_mistakes(got, expected, known)) or attention_mistake(got, q, k, v)
    if got.isnan().any():
        overflow = (
            "Is the largest score of all blocks so far subtracted before every exponential, along each row, and are missing "
            "keys masked before it is taken? Or: is a part of the output never written (head, strides, mask)?"
        )
        words = f"{words} Or: {overflow}" if words else overflow
    return words or (
        "Are m, l and the accumulator carried from block to block, and has every pointer its head and its strides?"
    )
