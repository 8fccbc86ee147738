"""Part 5: standard attention, layouts, online softmax, flash attention by hand, and merging."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F

from utils.attention import reference
from utils.checking import (
    FUSED_ATTENTION,
    SOFTMAX,
    OperationWatch,
    attention_mistake,
    expect_close,
    expect_items,
    expect_number,
    expect_rounded_once,
    poisoned_memory,
    visible,
)
from utils.checking.labs.lab1.gemm import BF16, DTYPE, ELEMENTS, FP32
from utils.checking.mistakes import name_mistakes

STANDARD: dict[str, Any] = {
    "question": "5.1",
    "title": "Standard attention",
    "forbids": FUSED_ATTENTION,
    "hint": "write the three lines yourself",
}
ONLINE: dict[str, Any] = {
    "question": "5.3",
    "title": "Online softmax",
    "largest": "one block, with two numbers a row",
    "hint": "keep a running maximum and a running sum, and look at one block at a time",
}
FLASH: dict[str, Any] = {
    "question": "5.3",
    "title": "Flash attention by hand",
    "forbids": (FUSED_ATTENTION, SOFTMAX),
    "largest": "one tile of scores, or q, k or v",
    "hint": "the softmax is the running maximum and sum of online_softmax_stats",
}


def attend_in_float64(q, k, v):
    """Compute attention of (B, H, S, D) in float64, rounded to the dtype of q."""
    return reference(q, k, v)[0].to(q.dtype)


def expect_attention(standard_attention, q, k, v, what: str, rtol: float, atol: float) -> None:
    """Assert attention without a mask; the hint names a known mistake."""
    got = standard_attention(q, k, v)
    hint = attention_mistake(got, q, k, v) or (
        "Over which dimension is the softmax? Is the root taken of the last dimension? exp overflows unless the largest score is "
        "subtracted first, as torch.softmax does."
    )
    expect_close(got, attend_in_float64(q, k, v), rtol=rtol, atol=atol, what=f"standard_attention {what}", hint=hint)


@visible(**STANDARD)
def check_standard_attention(standard_attention):
    """Check two dtypes, and scores for which exp overflows."""
    q, k, v = (torch.randn(2, 3, 6, 12) for _ in range(3))
    expect_attention(standard_attention, q, k, v, "of (2, 3, 6, 12)", 1e-4, 1e-5)
    expect_attention(standard_attention, q.double(), k.double(), v.double(), "in float64", 1e-4, 1e-5)
    q, k, v = 20 * torch.randn(1, 1, 6, 64), 20 * torch.randn(1, 1, 6, 64), torch.randn(1, 1, 6, 64)
    expect_attention(standard_attention, q, k, v, "with scores in the hundreds", 1e-2, 1e-2)


@visible("5.1", "Memory of the scores")
def check_attention_memory(score_bytes, longest_length):
    """Check the bytes of one score matrix, and the length at which two of them fill a memory."""
    for kind, size in ((BF16, 2), (FP32, 4)):
        known: dict[str, float] = {
            "One score for each pair of a query and a key.": 14844 * size,
            "Each head has scores of its own.": 4_590_507 * size,
            "Each sequence has scores of its own.": 6_120_676 * size,
            "One matrix was asked for.": 36_724_056 * size,
            ELEMENTS: 18_362_028,
            DTYPE: 18_362_028 * (6 - size),
        }
        got, what = score_bytes(3, 4, 1237, kind), f"score_bytes(3, 4, 1237, {kind})"
        expect_number(got, 18_362_028 * size, rel=0, unit="bytes", what=what, mistakes=known)
    for arguments, right, both, square in (
        ((3 * 10**9, 1, 1, FP32), 19364, 27386, 375_000_000),
        ((10**9, 2, 5, BF16), 5000, 7071, 25_000_000),
    ):
        known = {
            "Scores and probabilities are both there.": both,
            "One more does not fit.": right + 1,
            "A longer one fits.": right - 1,
            "Memory grows with the square of the length.": square,
            "A length is an integer.": 19364.916731037085,
            "Each head of each sequence has scores of its own.": 15811 if right == 5000 else -1,
        }
        got, what = longest_length(*arguments), f"longest_length{arguments}"
        expect_number(got, right, rel=0, what=what, mistakes=known)


def expect_bshd(attention_bshd, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Assert causal attention of (B, S, H, D): compare it with attention that is computed token by token."""
    (_, length, heads, d), kv_heads = q.shape, k.shape[2]
    what, group = f"attention_bshd of q {tuple(q.shape)} with {kv_heads} key-value heads", heads // kv_heads
    try:
        with OperationWatch() as watch:
            got = attention_bshd(q.clone(), k.clone(), v.clone())
    except RuntimeError as error:
        apart = heads != kv_heads and "must match" in str(error)
        shared = " enable_gqa=True lets SDPA share the heads." if apart else ""
        raise AssertionError(f"{what} raised: {error}.{shared}") from None
    if isinstance(got, torch.Tensor) and got.shape != q.shape:
        raise AssertionError(f"{what} has shape {tuple(got.shape)}: turn the result back to {tuple(q.shape)}.")
    # Token i attends to the tokens 0 ... i, and query head h uses key-value head h // group.
    right, loose = torch.empty_like(q), torch.empty_like(q)
    for i, h in itertools.product(range(length), range(heads)):
        scores = (k[:, :, h // group] * q[:, i, h, None]).sum(-1) / math.sqrt(d)
        loose[:, i, h] = (torch.softmax(scores, 1)[..., None] * v[:, :, h // group]).sum(1)
        right[:, i, h] = (torch.softmax(scores[:, : i + 1], 1)[..., None] * v[:, : i + 1, h // group]).sum(1)
    hint = "Which two dimensions does SDPA take as tokens and head dimension, and which key-value head belongs to a query head?"
    known = {"It is not causal: each token sees the tokens after it.": loose}
    if heads == kv_heads:
        over_heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        known["This is attention over HEADS instead of tokens: SDPA wants (B, H, S, D)."] = over_heads
    hint = name_mistakes(got, right, known, hint)
    expect_close(got, right, rtol=1e-4, atol=1e-5, what=what, hint=hint)
    calls = sum(count for name, count in watch.calls.items() if name.strip("_") == "scaled_dot_product_attention")
    assert calls == 1, f"{what} calls SDPA {calls} times; one call does it for all sequences, heads and groups."


@visible("5.2", "Attention with (B, S, H, D) inputs")
def check_attention_bshd(attention_bshd):
    """Check a key-value head for each head, a key-value head for three heads, and one for all heads."""
    for heads, kv_heads in ((6, 6), (6, 2), (4, 1)):
        expect_bshd(attention_bshd, torch.randn(2, 7, heads, 8), *(torch.randn(2, 7, kv_heads, 8) for _ in range(2)))


def expect_stats(online_softmax_stats, x: torch.Tensor, widths: list[int], name: str, used_up: bool = False) -> None:
    """Assert the maximum and the sum of rows that arrive in blocks. Each block can be read only once.

    With `used_up`, no operator may work on a block after an operator on the next. No other tensor has a block's width.
    """
    taken = []

    def arriving():
        for block in x.split(widths, dim=1):
            taken.append(block.clone())
            yield taken[-1]
            taken[-1].fill_(math.nan)

    limited = online_softmax_stats.with_limit(len(x) * (max(widths) + 2))
    result = expect_items(limited(arriving()), "m, l", "online_softmax_stats(blocks)")
    if len(taken) != len(widths):
        raise AssertionError(f"{len(widths)} blocks arrived, and {len(taken)} were looked at.")
    m = x.double().amax(1)
    hint = "m is the largest value of the row over ALL blocks."
    expect_close(result[0], m.to(x.dtype), rtol=1e-6, atol=1e-5, what=f"m of {name}", hint=hint)
    hint = "When a block brings a larger maximum, what happens to the sum so far? Is a maximum subtracted before exp?"
    right = torch.exp(x.double() - m[:, None]).sum(1).to(x.dtype)
    expect_close(result[1], right, rtol=1e-3, atol=1e-6, what=f"l of {name}", hint=hint)
    used = [[i for i, step in enumerate(limited.watch.steps) if any(w in shape for shape in step[1])] for w in widths]
    for place, (mine, following) in enumerate(itertools.pairwise(used if used_up else [])):
        assert not mine or not following or max(mine) < min(following), (
            f"block {place} is used again after block {place + 1} was taken. Keep two numbers a row from one block to the next, "
            "and look at one block at a time."
        )


@visible(**ONLINE)
def check_online_softmax_stats(online_softmax_stats):
    """Check two rows in four blocks, around three values, and in float64."""
    x = torch.tensor([[1.0, 3.0, 5.0, 2.0, 2.5, -1.0, 0.5, 4.0, 9.0], [7.0, 3.0, 1.0, 2.0, 0.0, -1.0, 0.5, 1.5, 2.0]])
    for rows, shift in ((x, 0.0), (x, 1000.0), (x.double(), -1000.0)):
        expect_stats(online_softmax_stats, rows + shift, [1, 2, 3, 3], f"the blocks with values around {shift:g}")
    expect_stats(online_softmax_stats, x.repeat(1, 2), [7, 11], "two wide blocks", used_up=True)


def expect_tiled(function, inputs, tiles: tuple[int, int], name: str, tolerance: float = 1e-4) -> None:
    """Assert the values of a call, and that no operator works on more than one tile of scores."""
    q, k, v = inputs
    b, h, _, d = q.shape
    what = f"{name} of {q.shape[2]} queries and {k.shape[2]} keys with tiles {tuple(tiles)} in {q.dtype}"
    tile = b * h * tiles[0] * tiles[1]
    # Operators on a whole q or output are allowed. A product of two tiles by broadcasting has d numbers for each score.
    limited = function.with_limit(max(tile * d, q.numel(), k.numel()))
    with poisoned_memory():
        got = limited(q, k, v, *tiles)
    scores = max((batch * m * n for batch, m, inner, n in limited.watch.products if inner == d), default=0)
    of_scores = limited.watch.largest_above(tile, ("exp", "exp2", "amax", "max"))
    if found := (("the product of queries and keys", scores) if scores > tile else of_scores):
        raise AssertionError(
            f"{what}: {found[0]} worked on {found[1]} scores at once; one tile of queries and one of keys have {b} x {h} x {tiles[0]} x "
            f"{tiles[1]} = {tile}."
        )
    hint = attention_mistake(got, q, k, v) or (
        "Look at the rescaling of BOTH the sum and the output, at the tiles at the edges, at where m, l and O start. Is a maximum "
        "subtracted before every exp?"
    )
    expect_close(got, attend_in_float64(q, k, v), rtol=tolerance, atol=tolerance, what=what, hint=hint)


def expect_wide_inside(function, inputs, tiles: tuple[int, int], name: str) -> None:
    """Assert that the answer computes in float32 for inputs in 16 bits, and rounds once."""
    q, k, v = inputs
    got, what = function(q, k, v, *tiles), f"{name} of {k.shape[2]} keys in bfloat16"
    exact = attend_in_float64(q.double(), k.double(), v.double())
    expect_close(got, exact.to(q.dtype), rtol=0.1, atol=0.1, what=what)
    expect_rounded_once(got, exact, what, "scores, weights, maximum, sum and output")


def _draw(*shape: int, length: int, factor: float = 1.0, dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    """Draw q of this shape, times a factor, and k and v of another length."""
    b, h, _, d = shape
    return [(factor * torch.randn(*shape)).to(dtype), *(torch.randn(b, h, length, d, dtype=dtype) for _ in range(2))]


@visible(**FLASH)
def check_flash_attention_tiled(flash_attention_tiled):
    """Check four sizes of tiles, large scores, and 16 bits."""
    function, name, inputs = flash_attention_tiled, "flash_attention_tiled", _draw(2, 3, 17, 12, length=37)
    for tiles in ((5, 7), (4, 4), (64, 64), (17, 37)):
        expect_tiled(function, inputs, tiles, name)
    expect_tiled(function, _draw(1, 1, 33, 16, length=20, factor=400.0), (6, 8), name, 1e-2)
    for size in (1, 8):  # with large scores the error of rounded scores is clear
        expect_wide_inside(function, _draw(1, 2, 24, 16, length=400, factor=size, dtype=BF16), (24, 16), name)


@visible("5.4", "Intensity of attention")
def check_attention_intensity(attention_intensity):
    """Check both kinds of attention in two dtypes."""
    products, written = "Two products, two FLOPs a MAC: 4 L² D.", "O is written, too."
    for kind, scale in ((BF16, 1.0), (FP32, 0.5)):
        flash = {
            products: 250.0 * scale,
            written: 666.667 * scale,
            "Flash attention never writes the scores.": 23.8095 * scale,
            ELEMENTS: 1000.0,
            DTYPE: 250.0 / scale,
            "FLOPs over bytes, not bytes over FLOPs.": 0.002 / scale,
        }
        standard = {
            "Scores are written, read, written and read: four times.": 45.45455 * scale,
            "Q, K, V and O travel as well.": 25.0 * scale,
            "Scores are written, read, written and read: not three times.": 31.25 * scale,
            "Scores are written, read, written and read: not once.": 83.3333 * scale,
            written: 24.09639 * scale,
            "Standard attention writes the scores to memory.": 500.0 * scale,
            products: 11.90476 * scale,
            ELEMENTS: 47.61905,
            DTYPE: 11.90476 / scale,
        }
        for name, right, known in (("flash", 500.0, flash), ("standard", 23.80952, standard)):
            got = attention_intensity(1000, 50, kind, flash=name == "flash")
            what = f"{name} attention, 1000 tokens, D = 50, {kind},"
            expect_number(got, right * scale, rel=1e-4, unit="FLOPs/Byte", what=what, mistakes=known)
