"""Parts 2 and 3: FLOPs and bytes, the error against float64, intensity, and the number of splits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from utils.checking import expect_items, expect_number
from utils.checking.labs.lab4_sdpa.common import visible

COSTS = ("FLOPs", "fused bytes", "unfused bytes")


@visible("2.1", "FLOPs and bytes of attention")
def check_attention_costs(attention_costs):
    """Check 5 sequences, 6 query heads over 2 key heads, 3 queries, 7 keys, D = 10 in bf16, and two causal calls."""
    full = expect_items(attention_costs(5, 6, 2, 3, 7, 10, torch.bfloat16), ", ".join(COSTS), "attention_costs")
    causal = attention_costs(5, 6, 2, 3, 7, 10, torch.bfloat16, causal=True)
    square = attention_costs(1, 4, 4, 5, 5, 6, torch.float64, True)
    where = "5 sequences, 6 heads over 2 key heads, 3 queries, 7 keys, D = 10, bf16"
    square_shape = "4 heads, 5 queries and keys, D = 6, fp64, causal"
    elements, each = "These are elements: multiply by dtype.itemsize.", "Each sequence counts."
    diagonal = "Half of all pairs leaves out half of the diagonal."
    shared = "Keys and values have kv_heads heads, and the group shares them."
    flops = {
        "Count FLOPs for query heads: each has its own scores.": 8_400,
        each: 5_040,
        "A multiply-accumulate is two FLOPs, and there are two products.": 12_600,
    }
    fused = {
        shared: 12_000,
        "The output is written, too.": 4_600,
        elements: 3_200,
        each: 1_280,
        "Queries and outputs have the length of the queries; keys and values have the length of the keys.": 4_800,
        "Queries and outputs have the heads of the queries.": 4_000,
    }
    unfused = {
        "The scores travel four times: written, read and written by the softmax, read.": (8_920, 10_180, 7_660),
        "The matrix of scores is missing.": 6_400,
        "There are scores for all query heads.": 8_080,
        elements: 5_720,
        "The scores have the dtype of the inputs here.": 16_480,
        shared: 17_040,
    }
    pairs = {
        "The mask takes pairs away: causal costs fewer FLOPs.": 25_200,
        "The last query sees the last key: query i sees i + 1 + (kv_len - query_len) keys.": 7_200,
        diagonal: [12_600, 12_000],
    }
    for got, place, right, shape, mistakes in (
        (full, 0, 25_200, where, flops),
        (full, 1, 6_400, where, fused),
        (full, 2, 11_440, where, unfused),
        (causal, 0, 21_600, f"{where}, causal: the queries see 5, 6 and 7 keys", pairs),
        (causal, 2, 11_440, f"{where}, causal", {"The mask takes no bytes away: all scores lie in memory.": 10_720}),
        (square, 0, 1_440, square_shape, {diagonal: 1_200}),
        (square, 1, 3_840, square_shape, {}),
    ):
        unit = COSTS[place].split()[-1]
        expect_number(got[place], right, rel=0, unit=unit, what=f"{shape}: {COSTS[place]}", mistakes=mistakes)


def attend(q, k, v, **options) -> torch.Tensor:
    """Return attention of grouped heads by SDPA, in the dtype of the inputs."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def size_of_error(out: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Return the largest absolute difference, and the relative root mean square."""
    difference = out.double() - exact
    relative = difference.square().mean() / exact.square().mean()
    return difference.abs().max().item(), relative.sqrt().item()


def expect_errors(errors, out, inputs: tuple, causal: bool, exact: dict[str, torch.Tensor], what: str) -> None:
    """Assert both errors of an output.

    Args:
        errors: the answer.
        out: the output.
        inputs: q, k and v.
        causal: whether the output should be causal.
        exact: references in float64: {"": the right reference, hint: a reference with this mistake}.
        what: the output, in words.
    """
    got = expect_items(errors(out, *inputs, causal), "largest, rms", "errors(...)")
    right, wide = exact[""], out.double()
    largest, rms = size_of_error(out, right)
    mean, rounded = (wide - right).abs().mean().item(), (out - right.to(out.dtype)).double()
    hides = "The reference stays in float64: rounded to the output's dtype, it hides the rounding."
    known = {hint: size_of_error(out, wrong)[0] for hint, wrong in exact.items() if hint}
    known |= {hides: rounded.abs().max().item(), "The largest error: take the maximum, not the mean.": mean}
    if (wide - right).max() != (wide - right).abs().max():
        known["Take the absolute value first."] = (wide - right).max().item()
    if largest > 0 and float(got[0]) == 0:
        raise AssertionError(f"the largest error of {what} is its rounding, and not 0. {hides}")
    if 1.05 * largest < float(got[0]) < 1e-5:
        raise AssertionError(
            f"the largest error of {what} is its rounding, and smaller. Is the reference in float64 all the way?"
        )
    expect_number(got[0], largest, rel=1e-3, what=f"the largest error of {what},", mistakes=known)
    size = right.square().mean().sqrt().item()
    known = {
        "Relative: divide by the root mean square of the reference.": rms * size,
        "Root mean square: take the root.": rms**2,
        "That is a mean of absolute values, not a root mean square.": mean / right.abs().mean().item(),
        "Relative to the reference, not to the output.": rms * size / wide.square().mean().sqrt().item(),
        hides: rounded.square().mean().sqrt().item() / size,
    }
    expect_number(got[1], rms, rel=1e-3, what=f"the relative rms error of {what},", mistakes=known)


@visible("2.2", "Error against float64", forbids=(), hint="the reference in float64 is yours to write")
def check_errors(errors):
    """Check outputs with a known error, and outputs that are only rounded; grouped heads, causal or not."""
    inputs = [torch.randn(3, heads, 20, 10) for heads in (6, 2, 2)]
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (t.to(dtype) for t in inputs)
        wide = [t.double() for t in (q, k, v)]
        for causal in (False, True):
            exact = {
                "": attend(*wide, is_causal=causal),
                "The reference is causal when causal is True, and only then.": attend(*wide, is_causal=not causal),
                "Query head h reads key head h // (H / Hkv): neighbours share.": attend(
                    wide[0], *(t.repeat(1, 3, 1, 1) for t in wide[1:]), is_causal=causal
                ),
            }
            right = exact[""]
            for out, kind in (
                (right, "without an error but its rounding"),
                (right + torch.rand_like(right), "that is up to 1 too large"),
                (3 * right, "three times too large"),
            ):
                name = str(dtype).removeprefix("torch.")
                what = f"a {name} output {kind}, 6 heads over 2, causal={causal}"
                expect_errors(errors, out.to(dtype), (q, k, v), causal, exact, what)


@visible("3.1", "Intensity, prefill and decode")
def check_intensities(intensity, queries_to_ridge):
    """Check 20 queries and 100 keys with three heads for each key head, and ridges within and beyond reach."""
    up = "One query fewer still lies left of the ridge: round up."
    bytes_too = "Queries and outputs have bytes as well, not only the cache."
    bf16, groups = torch.bfloat16, "20 queries, 100 keys, 3 heads to a key head"
    of_intensity = {
        "The heads of a group share keys and values: they are read once.": 50 / 3,
        "These are FLOPs per element: divide by the bytes of an element.": 75.0,
        "Two FLOPs a multiply-accumulate, and two bytes a number in bf16.": 18.75,
        "Each query head of the group has queries and an output of its own.": 50.0,
        "Keys are as long as the cache, not as the queries.": 15.0,
        bytes_too: 60.0,
    }
    shared, itemsize = "The group shares the keys, too: group * queries count.", "An element has itemsize bytes."
    of_queries = {up: 28, shared: 87, bytes_too: 17, itemsize: 11}
    short, long = "a ridge of 50.3, 120 keys, 3 heads to a key head, bf16", "a ridge of 50.7, 1000 keys, 1 head, bf16"
    near = "a ridge of 48.3, just below the limit of 50 keys, bf16"
    for got, right, what, mistakes in (
        (intensity(20, 100, 3, 10, bf16), 37.5, f"the intensity of {groups}, bf16,", of_intensity),
        (intensity(20, 100, 3, 10, torch.float32), 18.75, f"the intensity of {groups}, fp32,", {itemsize: 37.5}),
        (queries_to_ridge(50.3, 120, 3, 10, bf16), 29, f"queries_to_ridge of {short}", of_queries),
        (queries_to_ridge(50.7, 1000, 1, 64, bf16), 54, f"queries_to_ridge of {long}", {up: 53, bytes_too: 51}),
        (queries_to_ridge(48.3, 50, 1, 64, bf16), 1421, f"queries_to_ridge of {near}", {up: 1420}),
    ):
        assert got is not None, f"{what} is None, and more queries than keys do reach it."
        expect_number(got, right, rel=1e-6, what=what, mistakes=mistakes)
    for ridge in (12.0, 10.0):
        expect_unreachable(queries_to_ridge, ridge, 10)


def expect_unreachable(queries_to_ridge, ridge: float, keys: int) -> None:
    """Assert None for a ridge that bf16 calls over these keys never reach."""
    got = queries_to_ridge(ridge, keys, 4, 64, torch.bfloat16)
    assert got is None, (
        f"over {keys} keys in bf16 the intensity stays below {keys} however many queries there are, and the ridge is "
        f"{ridge:.4g}: return None. Got {got!r}."
    )


FEWEST = "Of splits that take equally long, take the fewest."
TRIED = "`most` is also a number to try."
MOST = "More splits are not always faster: compare the times."


@visible("3.3", "How many splits?")
def check_splits(decode_us, best_splits):
    """Check waves, tiles and the merge, and that the answer is the smallest of equally good numbers of splits."""
    waves = "A part of a wave takes as long as a whole one: round the waves up."
    tiles = "A part of a tile takes as long as a whole one: round the tiles up."
    whole = {"One split needs no second kernel.": 37.0, waves: 24.0, tiles: 31.25, "Round both up.": 23.4375}
    split = {
        waves: 18.5,
        tiles: [17.015625, 17.046875],
        "Splitting makes more programs: programs * splits.": 11.0,
        "Splitting makes parts shorter: kv_len / splits keys each, rounded up.": [47.0, 17.0],
        "Results of several splits are merged by a second kernel.": 18.0,
        "The second kernel runs once, whatever the number of splits.": 33.0,
    }
    for arguments, right, what, mistakes in (
        ((6, 1000, 1, 4, 128, 2.0, 5.0), 32.0, "6 programs on 4 units, 1000 keys in tiles of 128, no split,", whole),
        ((3, 769, 3, 4, 128, 2.0, 5.0), 23.0, "3 programs, 769 keys in 3 splits, the same tiles", split),
        ((4, 1024, 2, 4, 128, 2, 5.12), 21.12, "4 programs, 2 splits", {"A wave that is full is one wave.": 29.12}),
    ):
        expect_number(decode_us(*arguments), right, rel=1e-9, unit="us", what=what, mistakes=mistakes)
    for arguments, right, what, mistakes in (
        ((2, 1000, 4, 100, 1.0, 3.0, 2), 2, "2 programs on 4 units: 1 split 10 us, 2 splits, the most, 8,", {TRIED: 1}),
        ((4, 1000, 4, 100, 1.0, 3.0, 8), 1, "4 programs fill 4 units: no number of splits is faster than one,", {}),
        ((1, 400, 9, 100, 1.0, 0.5, 16), 4, "1 program on 9 units, 4 tiles: 4 to 9 splits take 1.5 us,", {FEWEST: 9}),
        ((1, 10_000, 64, 100, 1.0, 0.5, 16), 15, "1 program, 100 tiles: 15 and 16 splits take 7.5 us,", {FEWEST: 16}),
    ):
        what = f"the best number of splits of {what}"
        expect_number(best_splits(*arguments), right, rel=0, what=what, mistakes=mistakes | {MOST: arguments[-1]})
