"""Parts 3 and 7: numbers and costs of blocks, attention that skips blocks, and a layout with more empty blocks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from utils.attention.masks import dense_mask
from utils.checking import FUSED_ATTENTION, expect_close, expect_items, expect_number, expect_rounded_once, visible
from utils.checking.masks import expect_program, pairs
from utils.checking.mistakes import name_mistakes

PROMISES: dict[str, Any] = {
    "question": "3.2",
    "title": "Promises",
    "largest": 64,
    "hint": "work the blocks of documents out on paper, without a mask",
}
SKIPPING: dict[str, Any] = {
    "question": "3.3",
    "title": "Attention that skips",
    "forbids": FUSED_ATTENTION,
    "largest": "the scores of a row of blocks, or q, k or v",
    "hint": "visit the blocks in the tables, not the filler, and work on the scores of one row of blocks at a time",
}


@visible("3.1", "Counting blocks", forbids=(), hint="count the pairs of each block")
def check_count_blocks(count_blocks):
    causal, column = torch.ones(8, 4, dtype=torch.bool).tril(), torch.zeros(5, 7, dtype=torch.bool)
    column[:, 2] = True
    edges = "The blocks at the edges are left out."
    for mask, block, expected, what, mistakes in (
        (causal, 2, (5, 2, 1), "a causal mask of 8 x 4", {
            "The order is (full, partial, empty).": (1, 2, 5),
            "A partial block is neither full nor empty.": (5, 7, 1),
            "A partial block counts as full here.": (7, 2, 1),
            "True means visible: full and empty are exchanged.": (1, 2, 5),
        }),
        (causal[:7], 2, (3, 4, 1), "a causal mask of 7 x 4 (its last row of blocks sticks out)", {
            edges: (3, 2, 1),
            "A block that sticks out over the edge is not full: the kernel has to mask what is outside.": (5, 2, 1),
        }),
        (column, 3, (0, 2, 4), "a mask of 5 x 7 in which key 2 alone is seen", {edges: (0, 1, 1)}),
        (torch.ones(6, 12, dtype=torch.bool), 3, (8, 0, 0), "a mask of 6 x 12 in which everything is seen", {
            "The edges of this mask are edges of blocks: nothing sticks out.": (3, 5, 0),
        }),
    ):  # fmt: skip
        what = f"count_blocks of {what}, in blocks of {block},"
        got = tuple(map(int, expect_items(count_blocks(mask.clone(), block), "full, partial, empty", what)))
        hint = " Or: ".join(text for text, wrong in mistakes.items() if got == wrong) or "Draw its blocks, and count."
        for name, given, right in zip(("full", "partial", "empty"), got, expected, strict=True):
            assert given == right, f"{what} is {got}, and {name} should be {right}. {hint}"


@visible(**PROMISES)
def check_promises(block_flops, promised_speedup, document_blocks):
    short = "Documents shorter than a block still need the block, and share it."
    shared = "A block that two documents share is computed once."
    counts = (2, 3, 6)  # full, partial and empty blocks of 4 x 4; with D = 13 a block has 4 D x 16 = 832 FLOPs
    for name, function, arguments, right, unit, mistakes in (
        ("block_flops", block_flops, (counts, 4, 11, 17, 13), 777_920, "FLOPs", {
            "Partial blocks are computed as well, whole.": 311_168,
            "Partial blocks are computed whole, not half.": 544_544,
            "Empty blocks are skipped.": 1_711_424,
            "The counts are for one head of one sequence.": 4_160,
            "Each sequence has its blocks, too.": 70_720,
            "Each head has its blocks, too.": 45_760,
            "A block has block x block pairs.": 194_480,
            "A multiply-add is two FLOPs, and there are two products.": 388_960,
        }),
        ("promised_speedup", promised_speedup, (counts,), 2.2, "", {
            "This is the share of blocks that are computed; the speed-up is its inverse.": 5 / 11,
            "Partial blocks are computed as well.": 5.5,
            "A partial block costs as much as a full one.": 11 / 3.5,
            "Compare with all blocks, not with the empty ones.": 1.2,
        }),
        ("promised_speedup", promised_speedup, ((0, 7, 5),), 12 / 7, "", {}),
        ("document_blocks", document_blocks, (64, 16, 4), 64, "blocks", {
            "These are all blocks.": 256,
            "A document of n blocks a side has n x n blocks, not n.": 16,
            "Not causal: both halves count.": 40,
        }),
        ("document_blocks", document_blocks, (64, 2, 16), 4, "blocks", {short: 0.5, shared: 32}),
        ("document_blocks", document_blocks, (64, 8, 16), 4, "blocks", {short: 2, shared: 8}),
        ("document_blocks", document_blocks, (32, 8, 8), 4, "blocks", {}),
    ):  # fmt: skip
        what = f"{name}({', '.join(map(str, arguments))})"
        expect_number(function(*arguments), right, rel=1e-6, unit=unit, what=what, mistakes=mistakes)


@visible(**SKIPPING)
def check_block_sparse_attention(block_sparse_attention):
    """Check 12 queries, 9 keys, 2 documents, blocks of 2 x 3. Queries 0, 4 and 5 see no key; 4 and 5 have no block."""
    numbers = torch.tensor([0] * 6 + [1] * 6)
    asked = []

    def mod(b, h, q, k):
        asked.append(math.prod(torch.broadcast_shapes(q.shape, k.shape)))
        return (numbers[q] == numbers[k]) & (q >= k) & (q > 0) & (q // 2 != 2)

    block_mask = create_block_mask(mod, None, None, 12, 9, device="cpu", BLOCK_SIZE=(2, 3))
    mask = dense_mask(mod, 12, 9)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        q, k, v = (torch.randn(2, 3, n, 10).to(dtype) for n in (12, 9, 9))
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask).nan_to_num(0.0)
        limited = block_sparse_attention.with_limit(q.numel())
        asked.clear()
        got = limited(q, k, v, block_mask)
        what = f"block_sparse_attention in {str(dtype)[6:]}, blocks of (2, 3), queries 0, 4 and 5 see nothing,"
        hint = skipping_mistake(got, q, k, v, mask, block_mask)
        expect_close(got, exact.to(dtype), rtol=tolerance, atol=tolerance, what=what, hint=hint)
        if dtype == torch.bfloat16:
            expect_rounded_once(got, exact, what, "scores, weights and sums")
        expect_skipped(what, limited.watch, sum(asked), block_mask, q, k)


def skipping_mistake(got, q, k, v, mask: torch.Tensor, block_mask: BlockMask) -> str:
    """Name the usual mistake that gives `got` in attention along the tables of a block mask; "" if none is known."""
    if not isinstance(got, torch.Tensor) or got.shape != q.shape:
        return ""
    if got.isnan().any():
        return "A query that sees nothing in a block, or nothing at all, must not end in NaN: its weights are 0."
    q, k, v = q.double(), k.double(), v.double()
    size_q, size_k = block_mask.BLOCK_SIZE
    inside = mask.unfold(0, size_q, size_q).unfold(1, size_k, size_k).sum(dim=(2, 3))
    inside = inside.repeat_interleave(size_q, 0).repeat_interleave(size_k, 1)  # visible pairs in each pair's block
    full, computed = inside == size_q * size_k, inside > 0
    query, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]

    def attend(times: torch.Tensor, factor: float = 1.0, width: int = k.shape[2]) -> torch.Tensor:
        """Compute attention in which pairs have weights `times`, with a softmax for each `width` keys."""
        weights = (q @ k.mT * factor / math.sqrt(q.shape[-1])).exp() * times
        weights = weights.unflatten(-1, (-1, width))
        return (weights / weights.sum(-1, keepdim=True).clamp_min(1e-99)).flatten(-2) @ v

    filler = "Entries of the tables beyond kv_num_blocks (full_kv_num_blocks) are filler: do not visit them."
    shifted = "The indices that mask_mod takes count from the start of the text, not of the block."
    heads = "The heads are in another order."
    wrong = [
        ("The mask is not applied inside of partial blocks.", attend(computed)),
        ("Full blocks are missing.", attend(mask & ~full)),
        ("Partial blocks are missing.", attend(full)),
        (filler, attend(1 + mask.int())),
        (filler, attend(mask.int() + full)),
        (filler, attend(1 + (mask & ~full).int())),
        (shifted, attend(full | (computed & mask[query, key % size_k]))),
        (shifted, attend(full | (computed & mask[query % size_q, key]))),
        (shifted, attend(full | (computed & mask[query % size_q, key % size_k]))),
        ("The softmax of a row goes over the keys of all its blocks, not block by block.", attend(mask, width=size_k)),
        ("Divide the scores by sqrt(D).", attend(mask, math.sqrt(q.shape[-1]))),
        *((heads, attend(mask).roll(by, 1)) for by in range(1, q.shape[1])),
        (heads, attend(mask).flip(1)),
    ]
    return name_mistakes(got, attend(mask), wrong)


def expect_skipped(what: str, watch, asked: int, block_mask: BlockMask, q: torch.Tensor, k: torch.Tensor) -> None:
    """Assert that only blocks with a visible pair need products, evaluations of the mask, and memory for scores.

    Args:
        what: the call in the student's words.
        watch: the `OperationWatch` of the call.
        asked: number of pairs for which mask_mod was evaluated.
        block_mask: the blocks, one table for all heads.
        q: (B, H, S, D).
        k: (B, H, L, D).
    """
    size_q, size_k = block_mask.BLOCK_SIZE
    one = 2 * math.prod(q.shape[:2]) * size_q * size_k * q.shape[3]  # multiply-adds of both products in a block
    partial = int(block_mask.kv_num_blocks.sum())
    visited = partial + int(block_mask.full_kv_num_blocks.sum())
    assert watch.macs <= one * visited, (
        f"{what} does the products of {watch.macs / one:.0f} blocks; only {visited} of "
        f"{q.shape[2] * k.shape[2] // (size_q * size_k)} hold a visible pair. Visit the blocks in the tables, and only the first "
        "kv_num_blocks entries of a row: the rest is filler."
    )
    assert asked <= partial * size_q * size_k, (
        f"{what} asks mask_mod about {asked} pairs; the {partial} partial blocks hold {partial * size_q * size_k}. "
        "In full blocks every pair is visible: do not ask."
    )
    row = math.prod(q.shape[:2]) * size_q * k.shape[2]
    scores = watch.largest_above(row, frozenset({"exp", "exp2", "expm1", "amax", "max", "_softmax"}))
    assert scores is None, (
        f"{what} works on a tensor of {scores[1]} elements (in {scores[0]}); one row of blocks has {row} scores. "
        "Work on the scores of one row of blocks at a time."
    )


def layout_of(lay_out, conversation: torch.Tensor, position: torch.Tensor, window: int) -> tuple:
    """Return the order and the mask of a layout; assert that the order is a permutation."""
    result = lay_out(conversation.clone(), position.clone(), window)
    (order, mask_mod), size = expect_items(result, "order, mask_mod", "lay_out(...)"), len(conversation)
    assert callable(mask_mod), f"lay_out's second result should be a mask_mod, and is of type {type(mask_mod).__name__}"
    assert isinstance(order, torch.Tensor) and order.shape == (size,) and sorted(order.tolist()) == list(range(size)), (
        f"order should hold each of 0 ... {size - 1} once, a permutation in a tensor of integers, and is {order!r:.120}"
    )
    assert not order.is_floating_point(), f"order should be a tensor of integers, and is {order.dtype}"
    return order, mask_mod


def arrivals(lengths: list[int], generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (conversation, position) of each token, in a random order; `lengths` are the conversations' tokens."""
    conversation = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    conversation = conversation[torch.randperm(len(conversation), generator=generator)]
    position = torch.zeros_like(conversation)
    for number in range(len(lengths)):
        mine = conversation == number
        position[mine] = torch.arange(int(mine.sum()))
    return conversation, position


@visible("7.1", "The mask of the layout")
def check_layout_mask(lay_out):
    # tokens 2, 5, 7 are the instructions, 0, 3, 6, 9 are conversation 1, and 1, 4, 8 conversation 2; the window is 2
    conversation = torch.tensor([1, 2, 0, 1, 2, 0, 1, 0, 2, 1])
    position = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3])
    order, mod = layout_of(lay_out, conversation, position, 2)
    got = pairs(mod, 10, 10, "the mask_mod of lay_out")
    by_token = torch.zeros_like(got)
    by_token[order[:, None], order[None, :]] = got
    own = {2: "2", 5: "25", 7: "257", 0: "0", 3: "03", 6: "36", 9: "69", 1: "1", 4: "14", 8: "48"}
    right = torch.zeros_like(got)
    for token, keys in own.items():
        right[token, [int(key) for key in keys + ("" if token in (2, 5, 7) else "257")]] = True
    if torch.equal(by_token, right):
        expect_program(mod, 20, "the mask_mod of lay_out", 10, 10)
        return
    hints = {
        "This is the mask between tokens as they arrived; the rows are in the new order.": torch.equal(got, right),
        "Rows and tokens are mixed up: row r of the new layout holds token order[r], not the other way round.": torch.equal(
            got[order][:, order], right
        ),
        "Within a conversation, later positions are hidden.": bool(by_token[0, 3] or by_token[1, 4]),
        "The instructions have no window: they see all instructions up to their own position.": not by_token[7, 2],
        "Every token of every other conversation sees all instructions.": not by_token[[0, 1], :][:, [2, 5, 7]].all(),
        "There is a window within a conversation.": bool(by_token[9, 0] or by_token[8, 1]),
        "Instructions see instructions only, and no later ones.": bool(by_token[2, [5, 7, 0, 1]].any()),
        "A conversation does not see other conversations.": bool(by_token[0, 1] or by_token[9, 8] or by_token[1, 0]),
    }
    q, k = (by_token != right).nonzero()[0].tolist()
    hint = next((text for text, true in hints.items() if true), "")
    raise AssertionError(
        f"of ten tokens, {int((by_token & ~right).sum())} pairs too many are seen and {int((right & ~by_token).sum())} are hidden. "
        f"The first wrong pair is token {q} (conversation {conversation[q]}, position {position[q]}) that "
        f"{'sees' if by_token[q, k] else 'does not see'} token {k} (conversation {conversation[k]}, position {position[k]}). {hint}"
    )


@visible("7.1", "The blocks of the layout")
def check_layout_blocks(lay_out):
    # The blocks of your order are counted under the right mask, so a mistake in your mask costs nothing here.
    for lengths, block, enough in (([32] * 8, 32, 15), ([64] * 4, 16, 79)):
        conversation, position = arrivals(lengths)
        order = layout_of(lay_out, conversation, position, 16)[0].tolist()
        tokens = list(zip(conversation[order].tolist(), position[order].tolist(), strict=True))
        computed = {
            (i // block, j // block)
            for i, (own, at) in enumerate(tokens)
            for j, (other, there) in enumerate(tokens)
            if (other == 0 < own) or (own == other and there <= at and (own == 0 or at - there < 16))
        }
        pieces = 1 + sum(a[0] != b[0] for a, b in itertools.pairwise(tokens))
        hint = "Tokens that see each other should be neighbours."
        if pieces == len(lengths):
            hint = "Each conversation is in one piece. Are its tokens in the order of their positions?"
        assert len(computed) <= 1.15 * enough, (
            f"your order of {len(lengths)} conversations of {lengths[0]} tokens, window 16, leaves {len(computed)} of "
            f"{(256 // block) ** 2} blocks of {block} x {block} to compute, and {enough} are enough. {hint}"
        )
