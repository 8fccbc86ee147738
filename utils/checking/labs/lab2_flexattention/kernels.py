"""Parts 4, 5, 6 and 8: score modifiers, a prepared call, buckets, and masks from serving."""

from __future__ import annotations

import contextlib
import inspect
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from utils.attention.masks import dense_mask
from utils.checking import OperationWatch, expect_close, expect_number, visible
from utils.checking.masks import apply_score_mod, expect_mask, expect_program, kernels_for
from utils.checking.mistakes import name_mistakes


@visible("4.1", "Score modifiers")
def check_score_mods(soft_cap, alibi, in_turn):
    def at(mod, what, score=3.0, b=2, h=1, q=5, k=2):
        """Return the modifier's result for the score of one pair, under vmap as in FlexAttention."""
        return apply_score_mod(mod, torch.full((6, 6), score), what, b, h)[q, k]

    def double(score, b, h, q, k):
        return 2 * score

    slopes, distance = torch.tensor([1.0, 0.5, 0.25]), "(distance q - k = 3: a penalty)"
    for mod, place, right, what, mistakes in (
        (lambda: soft_cap(2.0), {}, 1.81030, "soft_cap(2) of a score of 3", {
            "Multiply by the cap again after the tanh.": 0.905148,
            "Divide by the cap before the tanh.": 1.990110,
            "That cuts scores off; a soft-cap bends them.": 2.0,
            "The score is unchanged.": 3.0,
            "tanh, not tan.": 28.2028,
        }),
        (lambda: alibi(slopes), {}, 1.5, f"alibi([1, 0.5, 0.25]) of a score of 3 in sequence 2, head 1, query 5, key 2 {distance},", {
            "The sign is wrong: keys that lie further back lose.": 4.5,
            "Every head has a slope of its own: slopes[h].": 0.0,
            "Index the slopes with h: b is the sequence.": 2.25,
            "The score itself is lost.": -1.5,
            "The score is unchanged.": 3.0,
            "Multiply the slope by the distance.": 2.5,
        }),
        (lambda: alibi(slopes), {"q": 2, "k": 5}, 4.5, "alibi of a score of 3 in head 1, query 2, key 5 (q - k = -3),", {
            "The distance is q - k, and negative for keys after the query.": 1.5,
        }),
        (lambda: in_turn(lambda s, b, h, q, k: s + 10 * h + b + 2 * (q - k + 1), double, soft_cap(50.0)), {"q": 4, "k": 5}, 26.8525,
         "in_turn(add 10 h + b + 2 (q - k + 1), double, soft_cap(50)) of a score of 3, sequence 2, head 1, query 4, key 5,", {
            "They run from the last to the first here.": 17.9928,
            "Only the first modifier runs.": 15.0,
            "Each modifier gets what the one before it returned.": 2.99641,
            "Pass b and h on.": 5.97150,
        }),
        (lambda: in_turn(double), {}, 6.0, "in_turn of one modifier", {}),
    ):  # fmt: skip
        expect_number(at(mod(), what, **place), right, rel=1e-4, what=what, mistakes=mistakes)


@visible("4.2", "A learned bias")
def check_relative_bias(relative_bias):
    bias = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0], [10.0, 20.0, 30.0, 40.0, 50.0]])  # two heads, R = 2
    mod, scores = relative_bias(bias), torch.full((7, 7), 0.5)
    got = apply_score_mod(mod, scores, "relative_bias", h=1)
    assert isinstance(got, torch.Tensor) and got.shape == scores.shape, "relative_bias should return one score a pair"
    for place in ("442", "433", "451", "424", "240", "604", "060", "614", "140"):
        q, k, column = map(int, place)
        distance = q - k
        wrong = {
            "The distance is q - k, with its sign.": 4 - column,
            "Distances beyond R take the column at that end: this one wraps around.": (2 + distance) % 5,
            "Column R is distance 0.": min(abs(distance), 4),
        }
        known = {text: 0.5 + 10 * (c + 1) for text, c in wrong.items() if c != column}
        known |= {
            "Every head has a row of its own.": 1.5 + column,
            "The score itself is lost.": 10.0 * (column + 1),
            "The bias is missing.": 0.5,
            "Add the bias.": 5.0 * (column + 1),
        }
        what = f"a score of 0.5 in head 1 at query {q}, key {k} (distance q - k = {distance}), R = 2, row [10, 20, 30, 40, 50],"
        expect_number(got[q, k], 0.5 + 10 * (column + 1), rel=1e-6, what=what, mistakes=known)
    wide = apply_score_mod(relative_bias(torch.arange(14.0).view(2, 7) / 2), scores, "relative_bias", h=1)[6, 0]
    expect_number(wide, 7.0, rel=1e-6, what="a score of 0.5, head 1, query 6, key 0, R = 3, row [3.5, 4, ..., 6.5],")
    small = apply_score_mod(mod, scores.bfloat16(), "relative_bias", h=1).dtype
    assert small == torch.bfloat16, (
        f"a bf16 score should keep its dtype, and becomes {small}: convert the bias, not the score"
    )


@visible("5.1", "Prepare once")
def check_prepare_flex(prepare_flex):
    signature, calls, asked, cpu = inspect.signature(flex_attention), [], [], torch.device("cpu")

    def attention(*args, **options):
        """Record the arguments of a call, in place of FlexAttention."""
        calls.append(signature.bind(*args, **options).arguments)
        return args[0] if args else options["query"]

    def near(b, h, q, k):
        asked.append(1)
        return (k <= q) & (q - k < 20)

    def bias(score, b, h, q, k):
        return score - 0.1 * (q - k)

    attend = prepare_flex(attention, near, bias, 48, cpu, 16)
    assert callable(attend), (
        f"prepare_flex should return a function attend(q, k, v), and returns a {type(attend).__name__}"
    )
    assert not calls, "prepare_flex already calls attention; that is what attend is for"
    built = len(asked)
    assert built, "prepare_flex does not build the block mask before the first call: it never called mask_mod"
    q, k, v = torch.randn(2, 4, 48, 16), torch.randn(2, 2, 48, 16), torch.randn(2, 2, 48, 16)
    attend(q, k, v)
    attend(q, k, v)
    assert len(calls) == 2, f"two calls of attend should call attention twice, and called it {len(calls)} times"
    assert len(asked) == built, (
        "attend calls the mask_mod again. Build it once, in prepare_flex: the block mask of the first call serves all"
    )
    given = calls[0]
    assert given["query"] is q and given["key"] is k and given["value"] is v, (
        "attend should pass q, k and v on as they are"
    )
    block_mask = given.get("block_mask")
    assert isinstance(block_mask, BlockMask), (
        "attend calls attention without a block_mask: every block would be computed"
    )
    size, tables = tuple(block_mask.BLOCK_SIZE), tuple(block_mask.kv_num_blocks.shape[:2])
    seen = (block_mask.kv_num_blocks + block_mask.full_kv_num_blocks).flatten().tolist()
    for holds, otherwise in (
        (size == (16, 16), f"block_size is 16, and the block mask has blocks of {size}"),
        (tables == (1, 1), f"the block mask has tables for {tables} (sequences, heads); one for all: B=None, H=None"),
        (seen == [1, 2, 3], f"rows of blocks see {seen} blocks, and should see [1, 2, 3]"),
        (given.get("score_mod") is bias, "attend calls attention without the score_mod"),
        (given.get("enable_gqa"), "4 query heads over 2 key-value heads: pass enable_gqa=True"),
    ):
        assert holds, otherwise
    try:
        attend = prepare_flex(attention, None, None, 48, cpu)
    except TypeError:
        raise AssertionError("prepare_flex fails when mask_mod is None: then there is no block mask to build") from None
    attend(q, q, q)
    assert calls[-1].get("block_mask") is None, "without a mask_mod there should be no block mask"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eager FlexAttention warns that it is not compiled
        got = prepare_flex(flex_attention, lambda b, h, q, k: k <= q, None, 48, cpu, 16)(q, q, q)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    expect_close(
        got, expected, rtol=1e-4, atol=1e-5, what="attend(q, k, v) under a causal mask, by FlexAttention itself"
    )


@visible("6.1", "Buckets")
def check_buckets(bucketed_attention):
    calls = []

    def attend(q, k, v, mask_mod):
        calls.append((tuple(q.shape), mask_mod))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(mask_mod, q.shape[2], k.shape[2]))

    masks = []
    for tokens in (5, 3, 4, 8, 9, 7):
        q, k, v = (torch.randn(2, 3, tokens, 6) for _ in range(3))
        calls.clear()
        masks.append(expect_bucket(bucketed_attention, attend, calls, (q, k, v), [8, 16, 4]))
    expect_one_kernel([masks[0], masks[3], masks[-1]], 8)
    expect_no_bucket(bucketed_attention, attend, 17, [8, 16, 4])


def expect_one_kernel(masks: list, bucket: int) -> None:
    """Assert that one kernel serves the masks of several texts in a bucket."""
    count = kernels_for(masks, bucket)
    assert count == 1, (
        f"the masks of {len(masks)} texts in the bucket of {bucket} need {count} kernels. Their lengths are Python numbers, and became "
        "constants, or the masks are several functions. Let one function serve all. Capture a tensor: torch.tensor(...)."
    )


def expect_no_bucket(bucketed_attention, attend, tokens: int, buckets: list[int]) -> None:
    """Assert a ValueError for a text that is longer than every bucket."""
    with contextlib.suppress(ValueError):
        bucketed_attention(attend, *torch.randn(3, 1, 1, tokens, 6), buckets)
        raise AssertionError(f"{tokens} tokens fit into no bucket of {buckets}: raise a ValueError.")


def expect_bucket(bucketed_attention, attend, calls: list[tuple], qkv: tuple, buckets: list[int]):
    """Assert that a text is padded to the smallest bucket, and the padding is masked and cut off; return the mask.

    Args:
        bucketed_attention: the answer.
        attend: attention of (q, k, v, mask_mod).
        calls: an empty list, to which attend appends the shape of q and the mask of each call.
        qkv: tensors (B, H, S, D).
        buckets: lengths of buckets, of which the longest is at least S.
    """
    q, k, v = qkv
    tokens = q.shape[2]
    bucket = min(size for size in buckets if size >= tokens)
    got = bucketed_attention(attend, q, k, v, list(buckets))
    sizes = [shape[2] for shape, _ in calls]
    assert sizes == [bucket], (
        f"{tokens} tokens and buckets of {buckets}: attend should be called once, with {bucket} tokens, the smallest bucket that "
        f"holds them; it was called with {sizes}"
    )
    expected = F.scaled_dot_product_attention(q, k, v)
    if isinstance(got, torch.Tensor) and got.dim() == 4:
        assert got.shape[2] == tokens, (
            f"{tokens} tokens came in, and the result has {got.shape[2]}: cut the padding off, so that it has the shape of q"
        )
    wide = [F.pad(x, (0, 0, 0, bucket - tokens)) for x in qkv]
    leaky = F.scaled_dot_product_attention(*wide)[:, :, :tokens]
    mistakes = {
        "Padded keys take part in the softmax: hide them.": leaky,
        "Attention is not causal here.": F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    hint = name_mistakes(got, expected, mistakes)
    what = f"{tokens} tokens in a bucket of {bucket}"
    expect_close(got, expected, rtol=1e-4, atol=1e-5, what=f"bucketed_attention of {what}", hint=hint)
    real = (torch.arange(bucket) < tokens).expand(tokens, bucket)
    expect_mask(
        calls[0][1], real, f"the mask of {what}", {"Pad at the end: the first keys are the real ones.": real.flip(1)}
    )
    return calls[0][1]


@visible("Bonus 8.1", "Decode")
def check_at_positions(at_positions):
    def window(b, h, q, k):
        return (k <= q) & (q - k < 3 + h)

    first_two = at_positions(lambda b, h, q, k: k < 2, torch.tensor([0, 3]))
    probes = dict.fromkeys(((0, 0), (0, 2)), "Only the queries move: key k stands at k.")
    expect_mask(first_two, "110000/110000", "at_positions of [0, 3], the first two keys,", b=1, probes=probes)
    mod = at_positions(window, torch.tensor([0, 3]))
    expect_mask(mod, "100000/110000", "at_positions of [0, 3], window of 3,", b=0)
    moved = {
        "The queries are not moved: query q stands at positions[b] + q.": "100000/110000",
        "The queries move, not the keys.": "000000/000000",
        "Query q stands at positions[b] + q.": "011100/011100",
    }
    mistakes = moved | {"Each sequence has a position of its own: positions[b].": "100000/110000"}
    expect_mask(mod, "011100/001110", "at_positions of [0, 3], window of 3,", b=1, mistakes=mistakes)
    mistakes = {"Pass b and h on to the mask as they are.": "011100/001110"}
    expect_mask(
        mod, "111100/011110", "at_positions of [0, 3], a window that depends on h,", b=1, h=1, mistakes=mistakes
    )
    by_sequence = at_positions(lambda b, h, q, k: k == q + b, torch.tensor([0, 3]))
    mistakes = {"Pass b and h on to the mask as they are.": "000100/000010"}
    expect_mask(by_sequence, "000010/000001", "at_positions of a mask that looks at b", b=1, mistakes=mistakes)
    expect_program(mod, 16, "at_positions")
    expect_no_constants(at_positions, window, torch.tensor([0, 3]))


def expect_no_constants(at_positions, mask_mod, positions: torch.Tensor) -> None:
    """Assert that new positions run the same operators with the same arguments, so that no position is a constant."""
    steps = []
    for starts in (positions, positions + 1, positions * 3 + 100):
        mod = at_positions(mask_mod, starts)
        with OperationWatch() as watch:
            mod(*(torch.tensor(0) for _ in range(4)))
        steps.append(watch.steps)
    # If the mask turns a list into a tensor in each call, its numbers are constants, too.
    assert all(other == steps[0] for other in steps) and watch.largest.get("lift_fresh", 0) <= 1, (
        "the positions became constants of the mask: the next token would need another kernel. Capture the tensor, and look "
        "positions[b] up in the mask."
    )


@visible("Bonus 8.2", "Pages")
def check_paged_mask(paged_mask):
    # places 0-1: page 1 of sequence 0; 2-3: page 0 of sequence 1; 4-5: free, its number is an old one; 6-7: page 0 of sequence 0
    owner, number = torch.tensor([0, 1, -1, 0]), torch.tensor([1, 0, 0, 0])
    mod = paged_mask(lambda b, h, q, k: (k <= q) & (q - k < 3 - h + b), owner, number, 2)
    free = "Pages of other sequences are visible: look at the owner."
    mistakes = {
        "The key's position is not its place in the pool.": "10000000/11000000/11000000/01000000",
        "The mask itself is missing.": "11000011/11000011/11000011/11000011",
        "A page holds page_size positions: multiply its number.": "00000010/10000011/11000011/11000001",
        "The place inside of the page is missing: k % page_size.": "00000011/00000011/11000011/11000000",
        "number[p] counts in the sequence, p in the pool.": "10000000/11000000/11000000/01000000",
    }
    probes = {(0, 2): free, (2, 4): "Free pages are seen by nobody."}
    expect_mask(mod, "00000010/00000011/10000011/11000001", "paged_mask", probes=probes, mistakes=mistakes)
    mistakes = {
        "The key's position is not its place in the pool.": "00000000/00000000/00100000/00110000",
        "Pass b and h on to the mask as they are.": "00100000/00110000/00110000/00010000",
    }
    what = "paged_mask of a mask that looks at b and h"
    expect_mask(mod, "00100000/00110000/00010000/00000000", what, b=1, h=2, mistakes=mistakes)
    expect_program(mod, 16, "paged_mask of 4 pages", 8, 8)
