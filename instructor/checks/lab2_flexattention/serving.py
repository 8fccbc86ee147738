"""Part 8, bonus: decode and pages."""

from __future__ import annotations

import torch

from instructor.checks.common import Draw
from instructor.checks.lab2_flexattention.common import indices
from utils.checking import check
from utils.checking.labs.lab2_flexattention.kernels import expect_no_constants
from utils.checking.masks import expect_mask, expect_program


def _window(width: int):
    """Allow the last width + b keys in sequence b, causally."""

    def mask_mod(b, h, q, k):
        return (k <= q) & (q - k < width + b + h)

    return mask_mod


@check("Bonus 8.1", "Decode")
def at_positions(at_positions, seed=None):
    """Check queries that start at a different position in each sequence."""
    draw = Draw(seed)
    sk, sq = draw.size(20, 30), draw.size(2, 4)
    starts = draw.sizes(3, 1, sk - sq)
    positions = torch.tensor(starts)
    width = draw.size(4, 7)
    mod = at_positions(_window(width), positions)
    q, k = indices(sq, sk)

    def shift(start, extra=0):
        return (k <= q + start) & (q + start - k < width + extra)

    for b, start in enumerate(starts):
        for h in (0, 1):
            expect_mask(
                mod,
                shift(start, b + h),
                f"at_positions of {starts},",
                {
                    "The queries are not moved, or the keys are moved as well.": shift(0, b + h),
                    "Each sequence has a position of its own: positions[b].": shift(starts[0], b + h),
                    "The queries move, not the keys.": (k + start <= q) & (q - k - start < width + b + h),
                    "Query q stands at positions[b] + q.": (k <= start) & (start - k < width + b + h) & (q >= 0),
                    "Pass b and h on to the mask as they are.": shift(start),
                },
                b,
                h,
            )
    first_two, what = (
        at_positions(lambda b, h, q, k: k < 2, positions),
        f"at_positions of {starts}, the first two keys,",
    )
    expect_mask(first_two, (k < 2).expand(sq, sk), what, b=1, probes={(0, 2): "Only the queries move."})
    expect_program(mod, 16, "at_positions", sq, sk)
    expect_no_constants(at_positions, _window(width), positions)


@check("Bonus 8.2", "Pages")
def paged_mask(paged_mask, seed=None):
    """Check a pool of pages in random order, some of them free."""
    draw = Draw(seed)
    page_size, sequences = draw.size(2, 5), 3
    pages = [(b, n) for b in range(sequences) for n in range(draw.size(2, 4))]
    pages += [(-1, draw.size(0, 2)) for _ in range(2)]
    pages = [pages[i] for i in torch.randperm(len(pages), generator=draw.generator).tolist()]
    owner, number = (torch.tensor(column) for column in zip(*pages, strict=True))
    width = draw.size(3, 6)
    mod = paged_mask(_window(width), owner, number, page_size)
    sq = 4 * page_size
    q, k = indices(sq, len(pages) * page_size)
    page, inside = k // page_size, k % page_size
    place = number[page] * page_size + inside

    def window(at, extra):
        return (at <= q) & (q - at < width + extra)

    for b in range(sequences):
        for h in (0, 1):
            owned, extra = owner[page] == b, b + h
            expect_mask(
                mod,
                owned & window(place, extra),
                f"paged_mask, pages of {page_size},",
                {
                    "Pages of other sequences are visible: look at the owner.": window(place, extra),
                    "The key's position is not its place in the pool.": owned & window(k, extra),
                    "The place inside of the page is missing: k % page_size.": owned
                    & window(number[page] * page_size, extra),
                    "A page holds page_size positions: multiply its number.": owned
                    & window(number[page] + inside, extra),
                    "number[p] counts in the sequence, p in the pool.": owned
                    & window(page * page_size + inside, extra),
                    "The mask itself is missing.": owned.expand(sq, k.shape[1]),
                    "Pass b and h on to the mask as they are.": owned & window(place, 0),
                },
                b,
                h,
            )
    expect_program(mod, max(16, len(pages) * page_size), "paged_mask", sq, len(pages) * page_size)
