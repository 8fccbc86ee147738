"""Masks, score modifiers, sparsity and their pictures: each against loops over pairs written out here."""

import functools
import math
import types

import matplotlib
import numpy as np
import pytest
import torch

from utils.attention import allowed_keys, make_problem
from utils.attention.backends.flex import proved_options
from utils.attention.masks import (
    at_offset,
    both,
    build_block_mask,
    by_name,
    causal,
    count_blocks,
    dense_mask,
    dilated,
    document_ids,
    documents,
    either,
    name_of,
    nearby,
    negate,
    prefix_lm,
    score_mods,
    sliding_window,
)
from utils.attention.masks.sparsity import sparsity
from utils.attention.problem import describe_plain

matplotlib.use("Agg")
IDS = document_ids([5, 9, 1, 6])
MASKS = {
    "causal": (causal, lambda q, k: k <= q),
    "sliding_window(4)": (sliding_window(4), lambda q, k: q - 4 < k <= q),
    "nearby(4)": (nearby(4), lambda q, k: abs(q - k) < 4),
    "documents(6)": (documents(6), lambda q, k: q // 6 == k // 6),
    "documents(ids)": (documents(IDS), lambda q, k: IDS.tolist()[q] == IDS.tolist()[k]),
    "prefix_lm(3)": (prefix_lm(3), lambda q, k: k <= q or k < 3),
    "dilated(3)": (dilated(3), lambda q, k: k <= q and (q - k) % 3 == 0),
    "both(causal, documents(6))": (both(causal, documents(6)), lambda q, k: k <= q and q // 6 == k // 6),
    "either(causal, documents(ids))": (
        either(causal, documents(IDS)),
        lambda q, k: k <= q or IDS.tolist()[q] == IDS.tolist()[k],
    ),
    "negate(causal)": (negate(causal), lambda q, k: k > q),
    "at_offset(causal, 2)": (at_offset(causal, 2), lambda q, k: k <= q + 2),
}
MODIFIERS = {
    "alibi(4)": (score_mods.alibi(4), lambda s, h, q, k: s - 2.0 ** (-2 * (h + 1)) * abs(q - k)),
    "relative_bias(4)": (score_mods.relative_bias(4), lambda s, h, q, k: s + 2.0 ** (-2 * (h + 1)) * (k - q)),
    "soft_cap(2)": (score_mods.soft_cap(2.0), lambda s, h, q, k: 2 * math.tanh(s / 2)),
}
TABLE = torch.arange(12.0).reshape(4, 3)
MODIFIERS["relative_bias((4, 3))"] = (
    score_mods.relative_bias(TABLE),
    lambda s, h, q, k: s + TABLE[h, min(abs(q - k), 2)].item(),
)
MODIFIERS["compose(soft_cap(2), alibi(4))"] = (
    score_mods.compose(score_mods.soft_cap(2.0), score_mods.alibi(4)),
    lambda s, h, q, k: 2 * math.tanh(s / 2) - 2.0 ** (-2 * (h + 1)) * abs(q - k),
)


def by_loops(rule, sq, sk):
    return torch.tensor([[rule(q, k) for k in range(sk)] for q in range(sq)])


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_its_rule_pair_by_pair_and_its_name_reads_well(name):
    mask, rule = MASKS[name]
    assert name_of(mask) == name and name in repr(mask)
    for sq, sk in ((21, 21), (9, 21)):
        assert torch.equal(dense_mask(mask, sq, sk), by_loops(rule, sq, sk))


def test_masks_of_the_benchmarks_by_name():
    assert by_name("full") is None and by_name("causal") is causal
    assert by_name("document", 6) is by_name("document", 6)  # one object: one block mask is kept for it
    assert torch.equal(
        dense_mask(by_name("causal_document", 6), 20, 20), by_loops(lambda q, k: k <= q and q // 6 == k // 6, 20, 20)
    )
    with pytest.raises(ValueError, match="choose one of full, causal"):
        by_name("casual")


def test_a_long_mask_is_evaluated_in_chunks_of_rows(monkeypatch):
    monkeypatch.setattr("utils.attention.masks.mask_mods.ROWS_AT_ONCE", 64)
    assert torch.equal(dense_mask(prefix_lm(3), 21, 21), by_loops(MASKS["prefix_lm(3)"][1], 21, 21))
    blocks = count_blocks(causal, 21, 21, block_size=4)
    assert int(blocks.counts.sum()) == 21 * 22 // 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sliding_window(0), "window is 0; it must be a whole number, 1 or more"),
        (lambda: documents(2.5), "span is 2.5"),
        (lambda: documents(torch.zeros(3)), r"tensor \(S,\) of integers"),
        (lambda: document_ids([]), "no lengths"),
        (lambda: both(), r"both\(\) was given no mask"),
        (lambda: either(causal, 3), "was given a int"),
        (lambda: dense_mask(lambda b, h, q, k: q >= k and k > 2, 4, 4), "write &, |, ~"),
        (lambda: dense_mask(lambda b, h, q, k: q - k, 4, 4), "must return True or False a pair"),
        (lambda: sparsity(causal, -1, 4), "sq is -1"),
        (lambda: build_block_mask(causal, 8, 8, block_size=(8, 8, 8)), "one whole number or two"),
        (lambda: dense_mask(both(causal, documents(IDS)), 4, 4, "meta"), "make them there"),
        (lambda: score_mods.soft_cap(-1), "above 0"),
        (lambda: score_mods.relative_bias(torch.zeros(3)), r"\(heads, distances\)"),
        (lambda: score_mods.compose(), "no score modifier"),
    ],
)
def test_bad_input_says_what_was_given_and_what_is_allowed(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize("name", MODIFIERS)
def test_a_score_modifier_is_its_rule_pair_by_pair(name):
    modifier, rule = MODIFIERS[name]
    assert name_of(modifier) == name
    scores = torch.randn(7, 9, dtype=torch.float64)
    for head in (0, 3):
        expected = torch.tensor([[rule(scores[q, k].item(), head, q, k) for k in range(9)] for q in range(7)])
        got = score_mods.modify_scores(modifier, scores, h=head)
        assert torch.allclose(got, expected.double(), rtol=1e-6, atol=1e-6)


def test_a_block_mask_is_built_once_and_shared_across_batches_and_heads():
    mask = both(causal, documents(40))
    first = build_block_mask(mask, 96, 96, block_size=32)
    assert build_block_mask(mask, 96, 96, block_size=32) is first and first.kv_num_blocks.shape[:2] == (1, 1)
    assert build_block_mask(mask, 96, 96, block_size=16) is not first
    assert build_block_mask(None, 96, 96) is None
    again = both(causal, documents(40))
    assert build_block_mask(again, 96, 96, block_size=32) is not first  # another function may capture other tensors


@pytest.mark.parametrize("name", MASKS)
def test_blocks_are_counted_as_flexattention_counts_them(name):
    mask, rule = MASKS[name]
    for size in (4, (8, 4)):
        height, width = (size, size) if isinstance(size, int) else size
        found = sparsity(mask, 21, 21, size)
        allowed = by_loops(rule, 21, 21)
        full = partial = 0
        for top in range(0, 21, height):
            for left in range(0, 21, width):
                block = allowed[top : top + height, left : left + width]
                full += int(block.sum()) == height * width
                partial += 0 < int(block.sum()) < height * width
        assert (found.pairs, found.full, found.partial) == (int(allowed.sum()), full, partial)
        assert found.total == -(-21 // height) * -(-21 // width)
        listed = build_block_mask(mask, 21, 21, block_size=size)  # FlexAttention's own count of the same blocks
        assert listed.full_kv_num_blocks.sum() == full and listed.kv_num_blocks.sum() == partial


def test_sparsity_of_a_mask_known_by_hand():
    found = sparsity(both(causal, documents(128)), 512, 512, 64)
    assert (found.full, found.partial, found.empty) == (4, 8, 52) and found.pairs == 4 * 128 * 129 // 2
    assert found.density == found.pairs / 512**2 and found.block_density == 12 / 64
    assert found.ideal_speedup == 64 / 12
    assert "12.6% of the pairs, 18.8% of the blocks of 64 x 64 (4 full, 8 partial, 52 empty)" in str(found)
    assert found.to_dict()["ideal_speedup"] == found.ideal_speedup and "blocks" not in found.to_dict()
    nothing = sparsity(lambda b, h, q, k: q < 0, 64, 64, 32)
    assert nothing.ideal_speedup == float("inf")
    assert sparsity(None, 100, 60, 64).density == 1.0


SPAN, DEEP, OBJECT, PAIR = 16, {"a": {"b": {"span": 16}}}, types.SimpleNamespace(span=16), [None, 16]


class Size:
    """A mask that reads an attribute of its class."""

    span = 16

    def __call__(self, b, h, q, k):
        return q // self.span == k // self.span


def test_blocks_are_built_anew_for_a_mask_that_reads_something_else_now(monkeypatch):
    ids, place, last, array = document_ids([16] * 4), [16], torch.tensor(3), np.array([16])
    helper, uncounted = [lambda q: q // 16], torch.inference_mode()(torch.tensor)(16)
    for mask, change in (
        (documents(ids), lambda: ids.zero_()),
        (both(causal, documents(ids)), lambda: ids.add_(torch.arange(64) // 32)),
        (lambda b, h, q, k: q // SPAN == k // SPAN, lambda: monkeypatch.setitem(globals(), "SPAN", 64)),
        (lambda b, h, q, k: q // place[0] == k // place[0], lambda: place.__setitem__(0, 64)),
        (lambda b, h, q, k: (lambda x: x // SPAN)(q) == k // 16, lambda: monkeypatch.setitem(globals(), "SPAN", 32)),
        (lambda b, h, q, k: q // 16 == k // DEEP["a"]["b"]["span"], lambda: DEEP["a"]["b"].update(span=64)),
        (lambda b, h, q, k: k < PAIR[1] if PAIR[1] else q < PAIR[0], PAIR.reverse),
        (lambda b, h, q, k: k // int(array[0]) == q // 16, lambda: array.fill(64)),
        (lambda b, h, q, k: helper[0](q) == k // 16, lambda: helper.__setitem__(0, lambda q: q // 32)),
        (lambda b, h, q, k: q // uncounted == k // 16, lambda: torch.inference_mode()(uncounted.fill_)(64)),
        (Size(), lambda: monkeypatch.setattr(Size, "span", 64)),
        (lambda b, h, q, k: q // OBJECT.span == k // OBJECT.span, lambda: monkeypatch.setattr(OBJECT, "span", 64)),
        (functools.partial(lambda last, b, h, q, k: k <= last, last), lambda: last.fill_(63)),
        (lambda b, h, q, k, *, first=array: q >= k + int(first[0]), lambda: array.fill(0)),
        (lambda b, h, q, k: k <= place[0] if place else unset, lambda: place.__setitem__(0, 3)),
    ):
        before = build_block_mask(mask, 64, 64, block_size=16)
        assert build_block_mask(mask, 64, 64, block_size=16) is before
        change()
        assert not torch.equal(build_block_mask(mask, 64, 64, block_size=16).to_dense(), before.to_dense())
    unset = 0  # no variable yet when the last mask is read


def plain(mask, sq=64, sk=64, kv_heads=2, **arguments):
    """Describe the mask that a kernel which knows causal masks and windows gets in place of a mask function; None if there is none."""
    problem = make_problem(torch.empty(1, 2, sq, 8), *[torch.empty(1, kv_heads, sk, 8)] * 2, mask_mod=mask, **arguments)
    found = problem.plain()
    if found is None:
        return None
    assert found.mask_mod is None and found.batch * found.heads * found.sq == 2 * sq
    return describe_plain(problem, found)["kernel_mask"]


def test_a_kernel_is_asked_only_for_the_masks_that_it_does_by_itself():
    assert plain(None, 8, 4) == "no mask" and plain(causal) == "causal" and plain(causal, kv_heads=1) == "causal"
    assert plain(sliding_window(9)) == "causal, window 9" and plain(nearby(9)) == "window 9"
    assert plain(both(documents(16), causal)) == "causal, documents of 16 as sequences"
    assert plain(documents(16)) == "documents of 16 as sequences"
    for mask in (
        documents(document_ids([30, 34])),
        prefix_lm(3),
        negate(causal),
        both(causal, causal),
        lambda b, h, q, k: q >= k,
        documents(24),
        both(documents(16), documents(32)),
        both(documents(16), prefix_lm(2)),
        either(causal, documents(16)),
    ):
        assert plain(mask) is None
    assert plain(causal, 32, 64) is None and plain(documents(16), kv_heads=1) is None
    assert plain(documents(16), causal=True) is None and plain(causal, score_mod=score_mods.soft_cap(2.0)) is None


@pytest.mark.parametrize(("sq", "sk"), [(9, 9), (5, 12), (12, 5)])
def test_the_fields_and_the_function_of_a_problem_make_one_mask(sq, sk):
    """`causal` and `window` count from the last key, the function from the first."""
    q, k = torch.empty(1, 1, sq, 8), torch.empty(1, 1, sk, 8)
    for is_causal in (False, True):
        for window in (None, 3):
            for mask in (None, documents(4)):
                problem = make_problem(q, k, k, causal=is_causal, window=window, mask_mod=mask)

                def rule(i, j, problem=problem):
                    distance = i + sk - sq - j
                    return (
                        (not problem.causal or distance >= 0)
                        and (problem.window is None or abs(distance) < problem.window)
                        and (problem.mask_mod is None or i // 4 == j // 4)
                    )

                expected = by_loops(rule, sq, sk)
                assert torch.equal(dense_mask(problem.mask_function(), sq, sk), expected)
                allowed = allowed_keys(problem)
                assert expected.all() if allowed is None else torch.equal(allowed, expected)
                again = make_problem(q, k, k, causal=is_causal, window=window, mask_mod=mask)
                assert again.mask_function() is problem.mask_function()  # block masks are kept by the object


@pytest.mark.parametrize(("sq", "sk"), [(9, 9), (5, 12), (12, 5), (1, 4), (4, 1)])
def test_a_window_that_hides_no_key_is_none(sq, sk):
    """A window is dropped exactly then: kernels without a window are faster, and cuDNN has only those."""
    q, k = torch.empty(1, 1, sq, 8), torch.empty(1, 1, sk, 8)
    distance = torch.arange(sq)[:, None] + sk - sq - torch.arange(sk)
    for is_causal in (False, True):
        seen = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
        for window in range(1, 15):
            problem = make_problem(q, k, k, causal=is_causal, window=window)
            hides = bool((seen & (distance.abs() >= window)).any())
            assert problem.window == (window if hides else None)
            if sq == sk:
                mask = sliding_window(window) if is_causal else nearby(window)
                assert make_problem(q, k, k, mask_mod=mask).plain().window == problem.window


def test_options_are_claimed_only_where_the_mask_is_shown_to_allow_them():
    """If rows are claimed to be safe and the first visited tile of one is all masked, the kernel computes NaN."""
    long, near = document_ids([130, 250, 132]), both(dilated(3), sliding_window(200))
    safe = {"ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True}
    for mask in (causal, documents(128), prefix_lm(77), either(documents(128), causal)):
        assert proved_options(mask, 512, 512, "cpu", (128, 128), 64) == safe
    for mask in (documents(100), documents(long), near, sliding_window(100), negate(causal)):
        assert proved_options(mask, 512, 512, "cpu", (128, 128), 64) == {"BLOCKS_ARE_CONTIGUOUS": True}
    gap = either(both(causal, documents(128)), prefix_lm(40))
    assert "BLOCKS_ARE_CONTIGUOUS" in proved_options(causal, 512, 512, "cpu", (128, 128), 64)
    far = either(documents(128), lambda b, h, q, k: (k < 5) & (q >= 256))
    assert "BLOCKS_ARE_CONTIGUOUS" not in proved_options(either(nearby(9), far), 640, 640, "cpu", (128, 128), 64)
    assert proved_options(gap, 512, 512, "cpu", (128, 128), 64)["ROWS_GUARANTEED_SAFE"]


def test_masks_are_drawn_with_both_densities_and_sweeps_as_heat_maps():
    import matplotlib.pyplot as plt

    from utils.visualization import plot_mask, plot_sparsity_sweep

    figure, axes = plot_mask([both(causal, documents(IDS)), None], 21, block_size=8)
    shown = [[ax.get_title(loc="left") for ax in row] for row in axes]
    assert axes.shape == (2, 2) and "both(causal, documents(ids))" in shown[0][0] and "no mask" in shown[1][0]
    found = sparsity(both(causal, documents(IDS)), 21, 21, 8)
    assert f"{100 * found.density:.3g}% of the pairs" in shown[0][0]
    assert f"{100 * found.block_density:.3g}% of the blocks of 8 x 8" in shown[0][1]
    assert torch.equal(
        torch.tensor(axes[0, 0].images[0].get_array()).bool(), dense_mask(both(causal, documents(IDS)), 21, 21)
    )
    assert int((torch.tensor(axes[0, 1].images[0].get_array()) == 1).sum()) == found.partial
    legend = [text.get_text() for text in axes[0, 1].get_legend().get_texts()]
    assert legend == [f"{found.full} full", f"{found.partial} partial", f"{found.empty} empty"]
    plt.close(figure)
    rows = [
        {"doc_span": 64, "block_size": 32, "speedup": 3.0, "ideal": 4.0},
        {"doc_span": 128, "block_size": 32, "refused": "why"},
    ]
    figure, axes = plot_sparsity_sweep(rows)
    assert [text.get_text() for text in axes[1].texts] == ["75%", "refused"]
    assert [text.get_text() for text in axes[0].texts] == ["3x", "refused"]
    plt.close(figure)
    for call, message in (
        (lambda: plot_sparsity_sweep([]), "is empty"),
        (lambda: plot_mask([], 8), "empty list"),
        (lambda: plot_sparsity_sweep([{"doc_span": 1, "block_size": 1}]), "no 'ideal', 'speedup'"),
        (lambda: plot_mask(causal, 8, labels=["a", "b"]), "must name the 1 masks"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
