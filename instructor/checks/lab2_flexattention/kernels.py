"""Parts 5 and 6: a prepared call, and buckets that keep it compiled."""

from __future__ import annotations

import inspect

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import _disable_current_modes

from instructor.checks.common import Draw
from instructor.checks.lab2_flexattention.common import attend_densely, indices, record_calls
from utils.attention import reference
from utils.checking import Answer, OperationWatch, check, expect_close
from utils.checking.labs.lab2_flexattention.kernels import expect_bucket, expect_no_bucket, expect_one_kernel
from utils.checking.masks import expect_program
from utils.checking.watching import MOVES

_SIGNATURE = inspect.signature(flex_attention)


class _Attention:
    """A replacement for compiled FlexAttention that records its arguments and computes each pair."""

    def __init__(self):
        self.calls: list[dict] = []
        self.running = False  # whether it is evaluating the mask_mod for every pair now
        self.result = torch.zeros(())  # the result of the last call

    def __call__(self, *args, **kwargs):
        self.running = True
        try:
            return self._attend(*args, **kwargs)
        finally:
            self.running = False

    def _attend(self, *args, **kwargs):
        given = _SIGNATURE.bind(*args, **kwargs).arguments
        self.calls.append(given)
        q, k, v = (given[name] for name in ("query", "key", "value"))
        if q.shape[1] != k.shape[1] and not given.get("enable_gqa"):
            raise ValueError(f"{q.shape[1]} query heads and {k.shape[1]} key-value heads need enable_gqa=True.")
        block_mask = given.get("block_mask")
        mask_mod = None if block_mask is None else block_mask.mask_mod
        with _disable_current_modes():  # the watch is for operators of attend, not of this function
            out, _ = reference(q, k, v, mask_mod=mask_mod, score_mod=given.get("score_mod"), scale=given.get("scale"))
            self.result = out.to(q.dtype)
            return self.result


def _expect_one_call(attention: _Attention, kv_heads: int, got) -> None:
    """Assert that attend called attention once, with keys whose heads are not repeated, and returned its result."""
    if len(attention.calls) != 1:
        raise AssertionError(
            f"attend(q, k, v) calls attention {len(attention.calls)} times; once is enough for all heads."
        )
    heads = attention.calls[0]["key"].shape[1]
    if heads != kv_heads:
        raise AssertionError(
            f"attend hands {heads} key heads to attention, and k has {kv_heads}: with enable_gqa=True no keys are copied."
        )
    right = attention.result
    if not isinstance(got, torch.Tensor) or got.shape != right.shape or not torch.allclose(got, right):
        raise AssertionError("attend should return what attention returns, and compute nothing else.")


@check("5.1", "Prepare once")
def prepare_flex(prepare_flex, seed=None):
    """Check that all calls share one block mask, built before, and pass on modifier, block size and GQA."""
    draw = Draw(seed)
    length, block, cpu = 16 * draw.size(3, 20), 16, torch.device("cpu")
    attention = _Attention()
    asked = [0]
    near = draw.size(10, 40)

    def mod(b, h, q, k):
        asked[0] += not attention.running
        return (k <= q) & (q - k < near)

    def bias(score, b, h, q, k):
        return score - 0.1 * (q - k) * (h + 1)

    query, key = indices(length, length)
    mask = (key <= query) & (query - key < near)
    attend = prepare_flex(attention, mod, bias, length, cpu, block)
    kind = type(attend).__name__
    assert callable(attend), f"prepare_flex should return a function attend(q, k, v), and returns a {kind}."
    assert not attention.calls, "prepare_flex already calls attention; only attend should call it."
    assert asked[0], "prepare_flex does not build the block mask: the mask_mod was not asked before the first call."
    built, masks, computing = asked[0], [], set()
    asked[0] = 0
    create_block_mask(mod, None, None, length, length, device="cpu", BLOCK_SIZE=block)
    once, asked[0] = asked[0], built
    if built > once:
        raise AssertionError(
            f"prepare_flex calls the mask_mod {built} times, and building a block mask calls it {once} times: build it once, for all calls."
        )
    for kv_heads in (4, 2):
        q = draw.normal(2, 4, length, 16)
        k, v = draw.normal(2, kv_heads, length, 16), draw.normal(2, kv_heads, length, 16)
        try:
            with OperationWatch() as watch:
                got = Answer(attend)(q, k, v)
            computing |= watch.largest.keys() - MOVES
        except ValueError as error:
            if "enable_gqa" in str(error):
                raise AssertionError(
                    "attend fails with 4 query heads and 2 key-value heads: pass enable_gqa."
                ) from None
            raise
        if not attention.calls:
            raise AssertionError("attend(q, k, v) does not call attention.")
        _expect_one_call(attention, kv_heads, got)
        arguments = attention.calls.pop()
        _expect_block_mask(arguments.get("block_mask"), block, length)
        for name, x in (("query", q), ("key", k), ("value", v)):
            assert torch.equal(arguments[name], x), "attend should pass q, k and v on as they are."
        assert arguments.get("score_mod") is not None, "attend calls attention without the score_mod."
        expected = reference(q, k, v, allowed=mask, score_mod=bias)[0].float()
        expect_close(got, expected, rtol=1e-3, atol=1e-4, what=f"attend with 4 heads over {kv_heads}")
        masks.append(arguments["block_mask"])
    if masks[0] is not masks[1]:
        raise AssertionError(
            "every call of attend has another block mask. Build it once, in prepare_flex, and keep it."
        )
    if asked[0] != built:
        raise AssertionError("attend calls the mask_mod again. Build the block mask once, in prepare_flex.")
    if computing:
        raise AssertionError(
            f"attend computes with {', '.join(sorted(computing)[:4])} beside attention. Build the block mask once, in prepare_flex; attend "
            "hands it on."
        )
    expect_program(masks[0].mask_mod, 2 * length, "the mask_mod of the block mask", length, length)
    _expect_no_mask(prepare_flex, draw, length)


def _expect_block_mask(block_mask, block: int, length: int) -> None:
    """Assert a block mask over `length` queries for all sequences and heads, with square blocks."""
    computed = "attend calls attention without a block_mask: every block would be computed."
    assert isinstance(block_mask, BlockMask), computed
    *tables, rows = block_mask.kv_num_blocks.shape
    assert tables == [1, 1], (
        f"the block mask has tables for {tuple(tables)} sequences and heads; the mask is the same for all: B=None, H=None."
    )
    blocks = tuple(block_mask.BLOCK_SIZE)
    assert blocks == (block, block), f"block_size is {block}, and the block mask has blocks of {blocks}."
    assert rows * block == length, f"the block mask is for {rows * block} queries, and length is {length}."


def _expect_no_mask(prepare_flex, draw: Draw, length: int) -> None:
    """Assert that without a mask_mod, attend computes full attention and passes no block mask."""
    unmasked = _Attention()
    attend = prepare_flex(unmasked, None, None, length, torch.device("cpu"))
    q, k, v = (draw.normal(1, 2, length, 16) for _ in range(3))
    got = Answer(attend)(q, k, v)
    _expect_one_call(unmasked, 2, got)
    if unmasked.calls[0].get("block_mask") is not None:
        raise AssertionError("mask_mod is None, and attend calls attention with a block mask: then there is none.")
    right = attend_densely(q, k, v, torch.ones(1, 1, dtype=torch.bool))
    expect_close(got, right, rtol=1e-3, atol=1e-4, what="attend without a mask_mod")


@check("6.1", "Buckets")
def buckets(bucketed_attention, seed=None):
    """Check the padding to the smallest bucket, and the mask that hides the padding without a new compilation."""
    draw = Draw(seed)
    sizes = sorted((draw.size(12, 20), *draw.sizes(2, 24, 200)))
    shuffled = [sizes[1], sizes[2], sizes[0]]
    mods = []
    for tokens in (sizes[0] - 3, sizes[0] - 1, sizes[0], sizes[1], sizes[2] - 1):
        attend, calls = record_calls()
        q, k, v = (draw.normal(2, 2, tokens, 4) for _ in range(3))
        k = k - 1.0  # the scores differ clearly from scores of padding
        k[:, :, 1] = 0.0  # a key that looks like padding, but is a key
        mod = expect_bucket(bucketed_attention, attend, calls, (q, k, v), shuffled)
        bucket = calls[0][0][2]
        expect_program(mod, 2 * bucket, "the mask_mod of bucketed_attention", bucket, bucket)
        mods.append(mod)
    expect_one_kernel(mods[:3], sizes[0])
    expect_no_bucket(bucketed_attention, record_calls()[0], sizes[2] + 1, shuffled)
