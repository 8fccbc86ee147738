"""Parts 1 and 2: attention under a mask, its costs, and masks as programs."""

from __future__ import annotations

import contextlib
import math

import torch
import torch.nn.functional as F

from utils.checking import FUSED_ATTENTION, expect_close, expect_items, expect_number, visible
from utils.checking.masks import expect_mask, expect_program
from utils.checking.mistakes import name_mistakes


def masking_mistake(got, q, k, v, mask: torch.Tensor) -> str:
    """Name the usual mistake that gives `got` in attention under a mask (S, L); "" if none is known."""
    if not isinstance(got, torch.Tensor) or got.shape != q.shape:
        return ""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores, dim=-1)

    def attend(mask=mask, **scale):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **scale).nan_to_num(0.0)

    heads = "The heads are in another order."
    known = [
        ("Divide the scores by sqrt(D).", attend(scale=1.0)),
        ("Divide the scores by sqrt(D), not by D.", attend(scale=1 / q.shape[-1])),
        ("The mask is upside down: True means that the query sees the key.", attend(~mask)),
        ("The mask is ignored.", weights @ v),
        (
            "The weights of a query add up to 1: mask the scores before the softmax, not the weights.",
            weights * mask @ v,
        ),
        ("A masked score should be -inf, not 0: e^0 is 1.", torch.softmax(scores * mask, dim=-1) @ v),
        ("True and False are added to the scores as 1 and 0.", torch.softmax(scores + mask, dim=-1) @ v),
        *((heads, attend().roll(by, 1)) for by in range(1, q.shape[1])),
        (heads, attend().flip(1)),
    ]
    found = name_mistakes(got, attend(), known)
    if not found and not torch.equal(got[:, :, ~mask.any(-1)], torch.zeros_like(got[:, :, ~mask.any(-1)])):
        return "A query that sees no key gets zeros: the softmax of nothing is 0 divided by 0."
    return found


@visible(
    "1.1", "Attention under a mask", forbids=FUSED_ATTENTION, hint="write product, mask, softmax, product yourself"
)
def check_masked_attention(masked_attention):
    """Check a mask with a visible and a hidden pair in each row, and a mask in which query 2 sees no key."""
    for what, lonely in (("each query sees some keys,", None), ("query 2 sees no key,", 2)):
        q, k, v = torch.randn(2, 3, 5, 10), torch.randn(2, 3, 7, 10), torch.randn(2, 3, 7, 10)
        mask = torch.rand(5, 7) < 0.5
        mask[:, 0], mask[:, 1] = True, False
        if lonely is not None:
            mask[lonely] = False
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).nan_to_num(0.0)
        got = masked_attention(q, k, v, mask)
        what = f"masked_attention, 2 sequences of 3 heads, {what}"
        expect_close(got, expected, rtol=1e-4, atol=1e-5, what=what, hint=masking_mistake(got, q, k, v, mask))


@visible("1.2", "Costs of a mask")
def check_mask_costs(mask_costs):
    # 10 of 24 pairs stay and 14 go
    causal = torch.ones(4, 6, dtype=torch.bool).tril()
    where = "of a causal mask of 4 x 6 pairs, 5 sequences of 3 heads, D = 8,"
    names = "density, wasted FLOPs, mask bytes"
    density, flops, size = expect_items(mask_costs(causal, 5, 3, 8, torch.float32), names, f"mask_costs {where}")
    half = mask_costs(causal, 5, 3, 8, torch.bfloat16)[2]
    for number, right, unit, what, mistakes in (
        (density, 10 / 24, "", f"the density {where}", {
            "This is the share of the pairs that are masked.": 14 / 24,
            "A share of the pairs is asked for, not their number.": 10,
        }),
        (flops, 6720, "FLOPs", f"the number of wasted FLOPs {where}", {
            "Each head of each sequence computes its own pairs.": 448,
            "Each sequence computes its own pairs.": 1344,
            "Each head computes its own pairs.": 2240,
            "These are the FLOPs of all pairs.": 11520,
            "These are the FLOPs of the pairs that stay.": 4800,
            "A multiply-add is two FLOPs, and both products count.": 3360,
            "Each pair costs 4 D FLOPs.": 210,
        }),
        (size, 1440, "bytes", f"the size {where} in fp32", {
            "A truth value takes one byte. Fused kernels take the mask as numbers of the dtype of q.": 360,
            "Every head of every sequence reads a number for each pair.": 96,
            "Every sequence reads them.": 288,
            "Every head reads them.": 480,
            "All pairs have a number, the masked ones too.": 600,
            "The pairs that stay have a number, too.": 840,
        }),
        (half, 720, "bytes", f"the size {where} in bf16", {"A bf16 number has 2 bytes: dtype.itemsize.": 1440}),
    ):  # fmt: skip
        expect_number(number, right, rel=1e-6, unit=unit, what=what, mistakes=mistakes)


@visible("2.1", "Three masks")
def check_three_masks(causal, sliding_window, prefix_lm):
    own, later = "A query sees its own key.", "Keys after the query are hidden: it is causal."
    probes = {(1, 1): own, (0, 1): later, (1, 0): "Keys before the query are seen."}
    mistakes = {"q and k are the wrong way round: the key comes before the query.": "1111/0111/0011"}
    expect_mask(causal, "1000/1100/1110", "causal", probes=probes, mistakes=mistakes)
    probes = {
        (0, 1): later,
        (0, 0): own,
        (3, 0): "The window holds `window` keys, and the query's own key is one of them.",
        (2, 0): "The window is too narrow: it holds `window` keys, the query's own key included.",
    }
    mistakes = {"The window counts back from the query, not on from key 0.": "10000/11000/11100/11100/11100"}
    expect_mask(
        sliding_window(3), "10000/11000/11100/01110/00111", "sliding_window(3)", probes=probes, mistakes=mistakes
    )
    probes = {
        (0, 2): "Every query sees the first `prefix` keys, the queries of the prefix as well. Beyond it the mask is "
        "causal. Which of & and | joins the two?",
        (4, 3): "Beyond the prefix the mask is causal: which of & and | joins the two?",
        (3, 4): later,
        (0, 3): "The prefix has one key too many: keys 0 ... prefix - 1.",
    }
    expect_mask(prefix_lm(3), "11100/11100/11100/11110/11111", "prefix_lm(3)", probes=probes)
    expect_programs(causal, sliding_window, prefix_lm)


def expect_programs(causal, sliding_window, prefix_lm) -> None:
    """Assert that three masks read only one pair. The windows are so long that a loop over them would show."""
    masks = {"causal": causal, "sliding_window(500)": sliding_window(500), "prefix_lm(500)": prefix_lm(500)}
    for what, mod in masks.items():
        expect_program(mod, 16, what)


def expect_numbers(document_numbers, lengths: list[int], size: int, expected: list[int]) -> None:
    """Assert the document number of each token, and that the list of lengths is unchanged."""
    what, given = f"document_numbers({lengths}, {size}, cpu)", list(lengths)
    try:
        got = document_numbers(given, size, torch.device("cpu"))
    except ValueError as error:
        raise AssertionError(f"{what} raises ValueError ({error}), and the documents fit.") from None
    assert given == lengths, f"{what} left {given} of its list. Work on a copy."
    assert isinstance(got, torch.Tensor) and not got.is_floating_point() and got.dtype != torch.bool, (
        f"{what} should be a tensor of integers, and is {getattr(got, 'dtype', type(got).__name__)}."
    )
    hint = " Tokens after the last document are padding: -1." if -1 in expected and -1 not in got.tolist() else ""
    assert got.tolist() == expected, f"{what} is {got.tolist()}, expected {expected}.{hint}"


def expect_device_and_room(document_numbers, lengths: list[int], size: int) -> None:
    """Assert that the numbers are on the given device, and that documents that do not fit raise a ValueError."""
    with contextlib.suppress(RuntimeError):  # meta tensors have no values: answers that read values pass
        on = document_numbers([1], 2, torch.device("meta")).device.type
        assert on == "meta", f"document_numbers should put its tensor on the device it is given; it is on the {on}."
    try:
        came = f"returns {document_numbers(lengths, size, torch.device('cpu'))}"
    except ValueError:
        return
    except Exception as error:
        came = f"raises {type(error).__name__}"
    raise AssertionError(
        f"documents of {lengths} tokens do not fit into {size}: raise a ValueError. document_numbers {came}."
    )


@visible("2.2", "Packed documents")
def check_packed_documents(document_numbers, packed_documents):
    for lengths, size, expected in (([2, 1], 5, [0, 0, 1, -1, -1]), ([1, 3], 4, [0, 1, 1, 1]), ([3], 4, [0, 0, 0, -1])):
        expect_numbers(document_numbers, lengths, size, expected)
    expect_device_and_room(document_numbers, [3, 2], 4)
    rows = torch.tensor([[0, 0, 1, 1, -1, -1], [0, 1, 1, 1, 2, -1]])
    mod = packed_documents(rows)
    hints = {
        (0, 1): "Inside of a document the mask is causal.",
        (2, 1): "A token sees its own document only.",
        (4, 4): "Padding sees padding here: -1 equals -1.",
        (1, 0): "A token sees the earlier tokens of its document.",
    }
    expect_mask(mod, "100000/110000/001000/001100/000000/000000", "packed_documents", probes=hints)
    mistakes = {
        "It looks at sequence 0 only: each sequence b has documents of its own.": "100000/110000/001000/001100/000000/000000",
        "One of the two look-ups reads sequence 0: index with b in both.": "100000/100000/011000/011100/000000/000000",
        "One of the two look-ups reads sequence 0: index with b in both": "100000/000000/001000/001100/000000/000000",
    }
    probes = {(5, 5): "Padding sees padding here: -1 equals -1."}
    expect_mask(
        mod, "100000/010000/011000/011100/000010/000000", "packed_documents", probes=probes, b=1, mistakes=mistakes
    )
    long = torch.zeros(1, 64, dtype=torch.int64)
    expect_program(packed_documents(long), 64, "packed_documents of 64 tokens", 64, 64)


@visible("2.3", "both and either")
def check_compositions(both, either):
    def even_keys(b, h, q, k):
        return k % 2 == 0

    def past(b, h, q, k):
        return k <= q

    def not_first(b, h, q, k):
        return k > 0

    def shifted(b, h, q, k):
        return k == b + 2 * h

    swapped, first = "It does what the other of the two should do.", "Only the first mask counts here."
    last, two = "Only the last mask counts here.", "Only the first two masks count here: any number may come."
    exclusive = "^ is exclusive: it counts an odd number of masks."
    both_of, either_of = "100/100/101", "101/111/111"  # even keys, causal
    one = {first: "101/101/101", last: "100/110/111", exclusive: "001/011/010"}
    three = even_keys, past, not_first
    for mod, rows, what, mistakes in (
        (both(even_keys, past), both_of, "both(even keys, causal)", {swapped: either_of, **one}),
        (either(even_keys, past), either_of, "either(even keys, causal)", {swapped: both_of, **one}),
        (both(*three), "000/000/001", "both of three masks", {two: both_of}),
        (either(*three), "111/111/111", "either of three masks", {two: either_of, exclusive: "010/000/001"}),
        (both(past), "100/110/111", "both of one mask", {}),
        (either(past), "100/110/111", "either of one mask", {}),
    ):
        expect_mask(mod, rows, what, mistakes=mistakes)
    one_alone = (["0000/0000/0000/0000"] * 2, ["1100/1100/1100/1100", "1010/1010/1010/1010"])
    for b, h, rows in ((1, 0, "0100/0100/0100/0100"), (0, 1, "0010/0010/0010/0010")):
        for compose, name in ((both, "both"), (either, "either")):
            mistakes = {
                "Pass b and h on to the masks as they are.": "1000/1000/1000/1000",
                "b and h are mixed up.": "0010/0010/0010/0010" if b else "0100/0100/0100/0100",
                "Pass b and h on to every mask, not to one alone.": one_alone[compose is either][h],
            }
            what = f"{name} of two masks that look at b and h"
            expect_mask(compose(shifted, shifted), rows, what, b=b, h=h, mistakes=mistakes)


@visible("2.3", "Windows and sinks")
def check_windows_and_sinks(window_per_head, sinks_and_window):
    mod, what = window_per_head(torch.tensor([1, 2, 4])), "window_per_head of windows 1, 2 and 4"
    tables = ["1000/0100/0010/0001", "1000/1100/0110/0011", "1000/1100/1110/1111"]
    hints = {
        "All heads have the window of head 0.": tables[0],
        "All heads have the largest window.": tables[2],
        "Index the windows with h: b is the sequence.": tables[1],
    }
    for h, rows in enumerate(tables):
        outside = (1, 2, 0)[h], 0  # the window of this query begins at key 1, where there is such a query
        probes = {(0, 1): "It has to be causal too.", outside: "The query's own key is one of the window."}
        mistakes = {hint: other for hint, other in hints.items() if other != rows}
        expect_mask(mod, rows, what, probes=probes, b=1, h=h, mistakes=mistakes)
    expect_program(window_per_head(torch.tensor([501, 502, 504])), 16, "window_per_head of three long windows")
    wide, missing = "Is there one sink too many, or a window that is too wide?", "The sinks are missing."
    swapped = "The two arguments are the wrong way round."
    later = "Sinks are causal as well: no query sees a key after it."
    for sinks, window, rows, wrong, probes in (
        (2, 1, "1000/1100/1110/1101", "1000/1100/1110/1011", {
            (0, 1): later, (3, 0): missing, (3, 2): wide, (2, 2): "The window is missing.",
        }),
        (1, 3, "10000/11000/11100/11110/10111", "10000/11000/11100/11110/11101", {
            (4, 1): wide, (4, 0): missing, (2, 1): "A key has to be in one of the two, not in both.",
        }),
    ):  # fmt: skip
        what = f"sinks_and_window({sinks}, {window})"
        expect_mask(sinks_and_window(sinks, window), rows, what, probes=probes, mistakes={swapped: wrong})
    expect_program(sinks_and_window(500, 500), 16, "sinks_and_window(500, 500)")
