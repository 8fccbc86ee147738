"""Split-KV attention (3.2), and the backward pass by hand (bonus 2.4)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from utils.checking import DERIVATIVES, FUSED_ATTENTION, SOFTMAX, expect_close, expect_items
from utils.checking.labs.lab4_sdpa.common import replace_answers, visible
from utils.checking.labs.lab4_sdpa.costs import attend
from utils.checking.mistakes import name_mistakes

PART = {"forbids": FUSED_ATTENTION, "hint": "write the products and the softmax yourself: SDPA does not return the lse"}
MERGE = {
    "forbids": FUSED_ATTENTION,
    "hint": "each part comes from attend_part, and is computed from its own keys alone",
}
BACKWARD = {"forbids": (FUSED_ATTENTION, SOFTMAX, DERIVATIVES), "hint": "the probabilities are e^(score - lse)"}
GRADIENTS = ("dq", "dk", "dv")


def expect_part_output(got, q, k, v, rtol: float, atol: float, what: str) -> None:
    """Assert the output of a part, in float32; q, k and v may be of any dtype."""
    q, k, v = (t.double() for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    turned = {
        "Query head h reads key head h // (H / Hkv): neighbours share, so repeat_interleave, not repeat.": attend(
            q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)
        ),
        "Divide the scores by sqrt(D).": attend(q, k, v, scale=1.0),
        "Divide the scores by sqrt(D), not by D.": attend(q, k, v, scale=1 / q.shape[-1]),
    }
    scores = q @ k.repeat_interleave(group, dim=1).mT / math.sqrt(q.shape[-1])
    for dim, name in ((-2, "queries"), (1, "heads")):
        over = torch.softmax(scores, dim=dim) @ v.repeat_interleave(group, dim=1)
        turned[f"The softmax goes over the keys, the last dimension of the scores, not over the {name}."] = over
    right = attend(q, k, v).float()
    hint = name_mistakes(got, right, turned, "Divide by the part's own sum.")
    expect_close(got, right, rtol=rtol, atol=atol, what=f"the output of {what}", hint=hint)


@visible("3.2", "Attention over one part", **PART)
def check_attend_part(attend_part):
    """Check outputs, the log-sum-exp over one key and over five equal keys, grouped heads, and large scores."""
    for dtype, large in ((torch.float32, 1), (torch.bfloat16, 1), (torch.float32, 30)):
        q = large * torch.randn(3, 6, 3, 10, dtype=dtype)
        k, v = large * torch.randn(3, 2, 9, 10, dtype=dtype), torch.randn(3, 2, 9, 10, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        what = f"attend_part of 6 heads over 2 in {name}{', scores in the thousands' if large > 1 else ''}"
        output, _ = expect_items(attend_part(q, k, v), "output, lse", what)
        expect_part_output(output, q, k, v, rtol=1e-3, atol=1e-3 if large > 1 else 1e-5, what=what)
        # e^lse is the sum of all e^score. For one key, lse is its score; for n equal keys it is larger by log(n).
        _, one = attend_part(q, k[:, :, :1], v[:, :, :1])
        score = (q.float() * k[:, :, :1].float().repeat_interleave(3, dim=1)).sum(-1) / math.sqrt(10)
        mistakes = {
            "It is the natural logarithm, not that to base 2.": score / math.log(2),
            "It is the log of the sum, not the sum.": score.exp(),
            "The scores are scaled by 1/sqrt(D), also in the lse.": score * math.sqrt(10),
            "The maximum that was subtracted is missing: add it again.": torch.zeros_like(score),
        }
        hint, near = name_mistakes(one, score, mistakes), {"rtol": 1e-3, "atol": 1e-3}
        expect_close(one, score, **near, what=f"the lse over one key, {what}", hint=hint)
        _, five = attend_part(q, k[:, :, :1].expand(3, 2, 5, 10), v[:, :, :5])
        natural = "It is the natural logarithm of the sum of all e^score"
        right = score + math.log(5)
        hint = name_mistakes(five, right, {f"{natural}, not the largest score.": score}, f"{natural}.")
        expect_close(five, right, **near, what=f"the lse over five equal keys, {what}", hint=hint)


def merge_hint(got, q, k, v, splits: int) -> str:
    """Return a hint for a wrong merge of parts whose scores are not large."""
    keys = k.shape[2]
    if splits > keys:
        return "With more splits than keys some parts are empty: leave them out, or give them weight 0."
    q, k, v = (t.double() for t in (q, k, v))
    parts = list(zip(k.tensor_split(splits, 2), v.tensor_split(splits, 2), strict=True))
    outputs = torch.stack([attend(q, *part) for part in parts])
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, dim=1).mT / math.sqrt(q.shape[-1])
    lses = torch.stack([s.logsumexp(-1) for s in scores.tensor_split(splits, -1)])
    counted = keys // splits * splits

    def weighed(weights: torch.Tensor) -> torch.Tensor:
        return (weights[..., None] * outputs).sum(0)

    known = {
        "Parts do not count equally: weight each by its e^lse over the sum of all e^lse.": outputs.mean(0),
        "Outputs of parts cannot just be added: weight each by its e^lse over the sum of all e^lse.": outputs.sum(0),
        "The weights are e^lse, not lse.": weighed(lses / lses.sum(0)),
        "The weights are e^L of an L to base 2: attend_part's lse is the natural logarithm.": weighed(
            torch.softmax(lses / math.log(2), dim=0)
        ),
        "The weights are 2^L, and L is a natural logarithm: they should be e^L.": weighed(
            torch.softmax(lses * math.log(2), dim=0)
        ),
    }
    for dim in range(1, lses.ndim):
        over = f"The weights of the parts add up to 1: take the softmax over dimension 0 of the stack, not over {dim}."
        known[over] = weighed(torch.softmax(lses, dim=dim))
    if counted < keys:
        left_out = f"The last {keys - counted} keys are left out: {splits} does not divide {keys}."
        known[left_out] = attend(q, k[:, :, :counted], v[:, :, :counted])
    otherwise = "Weigh the parts with their log-sum-exp, and let the weights add up to 1."
    return name_mistakes(got, attend(q, k, v), known, otherwise)


def expect_merged(got, q, k, v, splits: int, large: bool, what: str, **near: float) -> None:
    """Assert the result of split-KV attention."""
    hint = "e^lse overflows: subtract the largest lse first." if large else merge_hint(got, q, k, v, splits)
    expected = attend(q.double(), k.double(), v.double()).to(q.dtype)
    expect_close(got, expected, **near, what=what, hint=hint)


@visible("3.2", "Split-KV attention", **MERGE)
def check_split_kv_attention(split_kv_attention):
    """Check the cuts and the merge; right functions replace the student's attend_part."""
    for dtype, keys, splits, large, rtol in (
        (torch.float32, 10, 1, 1, 1e-3),
        (torch.float32, 10, 4, 1, 1e-3),
        (torch.float32, 11, 3, 1, 1e-3),
        (torch.bfloat16, 10, 4, 1, 2e-2),
        (torch.float32, 10, 4, 40, 1e-2),
        (torch.float32, 10, 16, 1, 1e-3),
    ):
        q = large * torch.randn(2, 6, 3, 12, dtype=dtype)
        k, v = large * torch.randn(2, 2, keys, 12, dtype=dtype), torch.randn(2, 2, keys, 12, dtype=dtype)
        what = f"split_kv_attention over {keys} keys in {splits} splits, {str(dtype).removeprefix('torch.')}"
        what += ", scores in the thousands" if large > 1 else ""
        expect_split(split_kv_attention, q, k, v, splits, large > 1, what, rtol=rtol, atol=rtol / 2)


class _Parts:
    """A right `attend_part` with a record of its calls.

    It is an object, because the grader may send the code of a function to the student's process; an object stays here.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, torch.Size]] = []  # keys and queries of each part

    def __call__(self, q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a part, as `attend_part` does."""
        self.calls.append((k.shape[2], q.shape))
        group = q.shape[1] // k.shape[1]
        keys, values = (t.float().repeat_interleave(group, 1) for t in (k, v))
        scores = q.float() @ keys.mT / math.sqrt(q.shape[-1])
        return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)


def expect_split(split_kv_attention, q, k, v, splits: int, large: bool, what: str, **near: float) -> None:
    """Assert the result of split-KV attention from right parts, and that the parts hold each pair of query and key."""
    parts, keys = _Parts(), k.shape[2]
    with replace_answers(split_kv_attention, {"attend_part": parts}):
        got = split_kv_attention(q, k, v, splits)
    expect_merged(got, q, k, v, splits, large, what, **near)
    lengths = {n for n, shape in parts.calls if n and shape.numel()}
    assert lengths <= {keys // splits, -(-keys // splits)}, (
        f"{what}: attend_part was called for {sorted(lengths)} keys. {splits} parts of {keys} keys whose sizes differ by at "
        f"most 1 have {keys // splits} or {-(-keys // splits)}."
    )
    asked = sum(n * shape.numel() for n, shape in parts.calls) / q.numel()
    assert asked >= keys, (
        f"{what}: attend_part was called for {asked:g} keys of each query, and there are {keys}. Each part comes from attend_part."
    )


def expect_gradient(got, right, without_delta, name: str, where: str, **near: float) -> None:
    """Assert one of the three gradients."""
    hint = {
        "dq": "dS = P * (dP - delta), delta the sum of dO * O over a row; then dS K and the scale.",
        "dk": "dK is dS transposed times Q, with the scale.",
        "dv": "dV is P transposed times dO.",
    }[name]
    scale = 1 / math.sqrt(without_delta[0].shape[-1])
    known = {
        "The scale 1/sqrt(D) is missing in this gradient.": right / scale,
        "The scale 1/sqrt(D) stands twice in this gradient.": right * scale,
        "Its sign is wrong.": -right,
    }
    if name != "dv":
        bare = without_delta[GRADIENTS.index(name)]
        known["delta is missing: the softmax's rows add up to 1, so each score moves all of its row."] = bare
    hint = name_mistakes(got, right, known, hint)
    expect_close(got, right, **near, what=f"{name} for {where}", hint=hint)


def expect_lse_used(attention_backward, tensors: tuple, dv: torch.Tensor) -> None:
    """Assert that P comes from the given lse: with an lse that is larger by 1, P is e times smaller."""
    q, k, v, out, lse, dout = tensors
    got, what = attention_backward(q, k, v, out, lse + 1, dout)[2], "dv with an lse that is larger by 1"
    hint = "P is e^(S - lse), with the lse that is given: do not compute the softmax again."
    expect_close(got, dv / math.e, rtol=1e-3, atol=1e-3, what=what, hint=hint)


@visible("Bonus 2.4", "The backward pass", **BACKWARD)
def check_attention_backward(attention_backward):
    """Compare with autograd for 6 queries and 9 keys; without delta the output would make no difference."""
    q, k, v = (torch.randn(2, 3, length, 10, requires_grad=True) for length in (6, 9, 9))
    out = F.scaled_dot_product_attention(q, k, v)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    lse = torch.logsumexp(q @ k.mT / math.sqrt(10), dim=-1)
    q, k, v, out, lse = (t.detach() for t in (q, k, v, out, lse))
    got = expect_items(attention_backward(q, k, v, out, lse, dout), "dq, dk, dv", "attention_backward(...)")
    wide = attention_backward(*(t.double() for t in (q, k, v, out, lse, dout)))
    assert all(t.dtype == torch.float64 for t in wide), "of inputs in float64 the gradients should be float64, too."
    no_delta = attention_backward(q, k, v, torch.zeros_like(out), lse, dout)
    for name, mine, right in zip(GRADIENTS, got, expected, strict=True):
        expect_gradient(mine, right, no_delta, name, "6 queries and 9 keys", rtol=1e-3, atol=1e-4)
    expect_lse_used(attention_backward, (q, k, v, out, lse, dout), expected[2])
