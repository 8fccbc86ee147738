"""Part 7: the layout of a batch, its mask and its blocks."""

from __future__ import annotations

import math

import torch

from instructor.checks.common import Draw
from utils.attention.masks.sparsity import sparsity
from utils.checking import check
from utils.checking.labs.lab2_flexattention.blocks import arrivals, layout_of
from utils.checking.masks import expect_mask, expect_program

SLACK = 1.15  # largest ratio to the blocks of a layout by conversation and position, instructions first or last


def _visible_pairs(conversation, position, window) -> dict[str, torch.Tensor]:
    """Return {mistake: mask between tokens in the order of arrival}; the right mask has the key ""."""
    q, k = (lambda x: x[:, None]), (lambda x: x[None, :])
    same, past = q(conversation) == k(conversation), k(position) <= q(position)
    near, of_instructions, to_them = (q(position) - k(position) < window, q(conversation) == 0, k(conversation) == 0)
    right = (same & past & (near | of_instructions)) | (to_them & ~of_instructions)
    return {
        "": right,
        "Instructions have no window: they see all instructions at or before their own position.": (same & past & near)
        | (to_them & ~of_instructions),
        "The instructions are missing: every token of every conversation sees them.": same
        & past
        & (near | of_instructions),
        "Instructions see each other in the order of their positions only.": (same & past & (near | of_instructions))
        | to_them.expand_as(right),
        "There is a window within a conversation.": (same & past) | (to_them & ~of_instructions),
        "The window is one position too wide.": (
            same & past & ((q(position) - k(position) <= window) | of_instructions)
        )
        | (to_them & ~of_instructions),
        "Positions of instructions are their own: a conversation sees all of them, whatever its position.": (
            same & past & (near | of_instructions)
        )
        | (to_them & past),
        "Within a conversation, later positions are hidden.": (same & (near | of_instructions))
        | (to_them & ~of_instructions),
    }


@check("7.1", "The mask of the layout")
def layout_mask(lay_out, seed=None):
    """Check every pair of rows, for random conversations in a random order of arrival."""
    draw = Draw(seed)
    for _ in range(2):
        lengths = draw.sizes(4, 6, 20)
        conversation, position = arrivals(lengths, draw.generator)
        window, size = draw.size(3, 5), sum(lengths)
        order, mod = layout_of(lay_out, conversation, position, window)
        masks = {hint: mask[order][:, order] for hint, mask in _visible_pairs(conversation, position, window).items()}
        right = masks.pop("")
        by_token = _visible_pairs(conversation, position, window)[""]
        if not torch.equal(by_token, right):
            masks["This is the mask between tokens as they arrived: rows are in the new order."] = by_token
        expect_mask(mod, right, f"the mask of conversations of {lengths} tokens, window {window},", masks)
        expect_program(mod, 2 * size, "the mask_mod of lay_out", size, size)


@check("7.1", "The blocks of the layout")
def layout_blocks(lay_out, seed=None):
    """Compare the number of blocks of the answer's order with the number for an order by conversation and position.

    Both are counted under the right mask: a mistake in the answer's mask has already lost the points of the mask.
    """
    draw = Draw(seed)
    for block, window in ((16, 1000), (16, 20)):
        lengths = draw.sizes(8, 24, 60)
        conversation, position = arrivals(lengths, draw.generator)
        order, _ = layout_of(lay_out, conversation, position, window)
        size = sum(lengths)
        visible = _visible_pairs(conversation, position, window)[""]
        enough = []
        for number in (conversation, torch.where(conversation == 0, len(lengths), conversation)):
            by_owner = torch.argsort(number * size + position)
            enough.append(_count_computed(visible[by_owner][:, by_owner], block))
        computed = _count_computed(visible[order][:, order], block)
        arrival = _count_computed(visible, block)
        if computed > SLACK * max(enough):
            hint = "Tokens that see each other should be neighbours, so that the rest of the row is empty blocks."
            if len(conversation[order].unique_consecutive()) == len(lengths):  # each conversation in one piece
                hint = "It is a good start. Are tokens of one conversation in the order of their positions?"
            raise AssertionError(
                f"your layout leaves {computed} of {math.ceil(size / block) ** 2} blocks of {block} x {block} to "
                f"compute (order of arrival: {arrival}); {min(enough)} are enough. {hint}"
            )


def _count_computed(mask: torch.Tensor, block: int) -> int:
    sq, sk = mask.shape
    counts = sparsity(lambda b, h, q, k: mask[q, k], sq, sk, block_size=block)
    return counts.full + counts.partial
