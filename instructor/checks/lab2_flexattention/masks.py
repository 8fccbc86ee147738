"""Part 2: mask functions, packed documents, compositions."""

from __future__ import annotations

import functools

import torch

from instructor.checks.common import Draw
from instructor.checks.lab2_flexattention.common import indices
from utils.checking import check
from utils.checking.labs.lab2_flexattention.masks import expect_device_and_room, expect_numbers, expect_programs
from utils.checking.masks import expect_mask, expect_program, pairs


@check("2.1", "Three masks")
def three_masks(causal, sliding_window, prefix_lm, seed=None):
    """Check the causal mask, the sliding window and prefix-LM for random lengths."""
    draw = Draw(seed)
    for _ in range(2):
        sq, sk = draw.sizes(2, 12, 40)
        q, k = indices(sq, sk)
        expect_mask(
            causal,
            k <= q,
            "causal",
            {
                "A query sees its own key as well.": k < q,
                "The key comes before the query: q and k are the wrong way round.": k >= q,
                "Everything is visible.": (k >= 0) & (q >= 0),
            },
        )
        w = draw.size(2, 9)
        expect_mask(
            sliding_window(w),
            (k <= q) & (q - k < w),
            f"sliding_window({w})",
            {
                "The query's own key is one of the window.": (k <= q) & (q - k <= w),
                "The window is one key too narrow.": (k <= q) & (q - k < w - 1),
                "It has to be causal too: keys after the query are hidden.": (q - k).abs() < w,
                "Keys after the query are visible here.": q - k < w,
                "The last keys are visible, not the keys before them.": (k <= q) & (q - k >= w),
                "The window counts from the query, not from key 0.": (k <= q) & (k < w),
            },
        )
        p = draw.size(3, 9)
        expect_mask(
            prefix_lm(p),
            (k < p) | (k <= q),
            f"prefix_lm({p})",
            {
                "Beyond the prefix the mask is causal: combine with |, not with &.": (k < p) & (k <= q),
                "The prefix has one key too many.": (k <= p) | (k <= q),
                "It is keys in the prefix that everybody sees, not queries that see everything.": (q < p) | (k <= q),
                "The queries of the prefix see its later keys as well.": k <= q,
            },
        )
    expect_programs(causal, sliding_window, prefix_lm)


@check("2.2", "Packed documents")
def packed_documents(document_numbers, packed_documents, seed=None):
    """Check the numbers of documents, and the mask that reads them: one row for each sequence."""
    draw = Draw(seed)
    rows, size = [], draw.size(25, 40)  # there is room for four documents of six tokens
    for _ in range(3):
        lengths = [draw.size(1, 6) for _ in range(draw.size(2, 4))]
        expected = [number for number, length in enumerate(lengths) for _ in range(length)]
        expected += [-1] * (size - len(expected))
        expect_numbers(document_numbers, lengths, size, expected)
        rows.append(expected)
    expect_numbers(document_numbers, [3, size - 3], size, [0] * 3 + [1] * (size - 3))
    expect_device_and_room(document_numbers, [size, 1], size)
    numbers = torch.tensor(rows)
    mod = packed_documents(numbers)
    q, k = indices(size, size)
    for b in range(len(rows)):
        mine = numbers[b]
        same, real, past = mine[q] == mine[k], mine[q] >= 0, k <= q
        mistakes = {
            "Padding sees padding here: -1 equals -1.": same & past,
            "Inside of a document the mask is causal.": same & real,
            "Documents are ignored.": past.expand(size, size),
            "Documents are ignored: a token sees its own only.": past & real & (mine[k] >= 0),
            "Documents are kept apart, but the mask is upside down: keys come before the query.": same
            & real
            & (k >= q),
        }
        other = numbers[0]
        mistakes["It looks at sequence 0 only: each sequence b has its own documents."] = (
            (other[q] == other[k]) & (other[q] >= 0) & past
        )
        for which, first, second in (("queries", other, mine), ("keys", mine, other)):
            mistakes[f"One of the two look-ups, that of the {which}, reads sequence 0."] = (
                (first[q] == second[k]) & (first[q] >= 0) & past
            )
        expect_mask(mod, same & real & past, "packed_documents of 3 sequences", mistakes, b=b)
    expect_program(mod, numbers.numel(), "packed_documents", size, size)


def _stripes(period: int, of_keys: bool):
    def mask_mod(b, h, q, k):
        return ((k if of_keys else q) + b + 2 * h) % period == 0

    return mask_mod


@check("2.3", "both and either")
def compositions(both, either, seed=None):
    """Check the pairs that all masks allow, and the pairs that at least one mask allows."""
    draw = Draw(seed)
    sq, sk = draw.sizes(2, 10, 24)
    mods = [
        _stripes(2, True),
        _stripes(3, False),
        lambda b, h, q, k: k <= q + 3,
        lambda b, h, q, k: (q + k + h) % 5 > 0,
    ]
    for count in (1, 2, 4):
        for b, h in ((0, 0), (1, 2)):
            each = [pairs(mod, sq, sk, "a mask", b, h) for mod in mods[:count]]
            for compose, join, name in ((both, torch.logical_and, "both"), (either, torch.logical_or, "either")):
                expected = functools.reduce(join, each)
                other = functools.reduce(torch.logical_or if join is torch.logical_and else torch.logical_and, each)
                expect_mask(
                    compose(*mods[:count]),
                    expected,
                    f"{name} of {count} masks",
                    {
                        "It does what the other of the two should do.": other,
                        "Only the first two masks count here.": functools.reduce(join, each[:2]),
                        "Only the first mask counts here.": each[0],
                        "Only the last mask counts here.": each[-1],
                        "^ is exclusive: it counts an odd number of masks.": functools.reduce(torch.logical_xor, each),
                        "Pass b and h on to every mask, not to one alone.": functools.reduce(
                            join, [each[0], *(pairs(mod, sq, sk, "a mask") for mod in mods[1:count])]
                        ),
                        "Pass b and h on to the masks as they are.": functools.reduce(
                            join, [pairs(mod, sq, sk, "a mask") for mod in mods[:count]]
                        ),
                    },
                    b,
                    h,
                )
    for compose, name in ((both, "both"), (either, "either")):
        expect_program(compose(*mods[:3]), 16, f"{name} of three masks")


@check("2.3", "Windows and sinks")
def windows_and_sinks(window_per_head, sinks_and_window, seed=None):
    """Check a window for each head, and a window with the first keys."""
    draw = Draw(seed)
    heads = draw.size(3, 5)
    windows = torch.tensor(draw.sizes(heads, 2, 12))
    size = draw.size(20, 36)
    q, k = indices(size, size)
    mod = window_per_head(windows)
    for h in range(heads):
        w = int(windows[h])
        past = k <= q
        expect_mask(
            mod,
            past & (q - k < w),
            f"window_per_head of windows {windows.tolist()}",
            {
                "All heads have the window of head 0.": past & (q - k < windows[0]),
                "Index the windows with h: b is the sequence.": past & (q - k < windows[1]),
                "All heads have the largest window.": past & (q - k < windows.max()),
                "The query's own key is one of the window.": past & (q - k <= w),
                "It has to be causal too.": (q - k < w).expand(size, size),
            },
            b=1,
            h=h,
        )
    expect_program(window_per_head(windows + 500), max(heads, 16), "window_per_head of long windows")
    sinks, w = draw.sizes(2, 3, 8)
    past, window = k <= q, (k <= q) & (q - k < w)
    expect_mask(
        sinks_and_window(sinks, w),
        past & ((q - k < w) | (k < sinks)),
        f"sinks_and_window({sinks}, {w})",
        {
            "Sinks are causal as well: no query sees a key after it.": window | (k < sinks),
            "The sinks are missing.": window,
            "The window is missing.": past & (k < sinks),
            "A key has to be in one of the two, not in both.": window & (k < sinks),
            "There is one sink too many.": past & ((q - k < w) | (k <= sinks)),
            "The two arguments are the wrong way round.": past & ((q - k < sinks) | (k < w)),
        },
    )
    expect_program(sinks_and_window(500, 500), 16, "sinks_and_window(500, 500)")
