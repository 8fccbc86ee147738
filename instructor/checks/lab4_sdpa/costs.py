"""Parts 2 and 3: FLOPs and bytes, the error against float64, intensity, and how many splits fill a chip."""

from __future__ import annotations

import math

import torch

from instructor.checks.common import DTYPES, Draw, dtype_name, expect_counts, expect_value
from instructor.checks.lab4_sdpa.common import reference_attention
from utils.checking.labs.lab4_sdpa.common import check
from utils.checking.labs.lab4_sdpa.costs import FEWEST, MOST, TRIED, expect_errors, expect_unreachable


def _costs(b, h, kv, sq, sk, d, size, pairs):
    fused = (2 * b * h * sq * d + 2 * b * kv * sk * d) * size
    return 4 * b * h * d * pairs, fused, fused + 4 * b * h * sq * sk * size


@check("2.1", "FLOPs and bytes of attention")
def attention_costs(attention_costs, seed=None):
    """Check full, causal and decode attention, with grouped heads and several dtypes."""
    draw = Draw(seed)
    for index, dtype in enumerate(DTYPES[:4] * 2):
        size = dtype.itemsize
        kv, group, b, d = draw.sizes(4, 2, 9)
        h = kv * group
        sq, sk = sorted(draw.sizes(2, 20, 90))
        if index == 2:
            sk = sq
        if index == 5:
            sq = 1
        causal = index % 4 != 0
        triangle = sq * (sk - sq) + sq * (sq + 1) // 2
        pairs = triangle if causal else sq * sk
        right = _costs(b, h, kv, sq, sk, d, size, pairs)
        fused, unfused = right[1], right[2]
        expect_counts(
            attention_costs(b, h, kv, sq, sk, d, dtype, causal),
            right,
            ("FLOPs", "fused bytes", "unfused bytes"),
            f"attention_costs({b}, {h}, {kv}, {sq}, {sk}, {d}, {dtype_name(dtype)}, causal={causal})",
            {
                "The mask takes pairs away: causal costs fewer FLOPs.": _costs(b, h, kv, sq, sk, d, size, sq * sk),
                "The last query sees the last key: query i sees i + 1 + (kv_len - query_len) keys.": _costs(
                    b, h, kv, sq, sk, d, size, sq * (sq + 1) // 2
                ),
                "Half of all pairs leaves out half of the diagonal.": _costs(b, h, kv, sq, sk, d, size, sq * sk / 2),
                "A multiply-accumulate is two FLOPs, and there are two products.": (
                    right[0] / 2,
                    fused / size,
                    unfused / size,
                ),
                "Keys and values have kv_heads heads, and the group shares them.": _costs(
                    b, h, h, sq, sk, d, size, pairs
                ),
                "Count FLOPs for query heads.": _costs(b, kv, kv, sq, sk, d, size, pairs),
                "Queries and outputs have the length of the queries; keys and values have the length of the keys.": (
                    right[0],
                    4 * b * h * sq * d * size,
                    4 * b * h * sq * d * size + 4 * b * h * sq * sk * size,
                ),
                "The output is written, too.": (
                    right[0],
                    fused - b * h * sq * d * size,
                    unfused - b * h * sq * d * size,
                ),
                "The scores travel four times: written, read and written by the softmax, read.": (
                    right[0],
                    fused,
                    fused + 2 * b * h * sq * sk * size,
                ),
                "The mask takes no bytes away: the whole score matrix is written, and read.": (
                    right[0],
                    fused,
                    fused + 4 * b * h * pairs * size,
                ),
            },
        )


@check("2.2", "Error against float64", forbids=(), hint="the reference in float64 is yours to write")
def errors(errors, seed=None):
    """Check outputs with a known error, also one that only a float64 reference reveals; grouped heads; causal."""
    draw = Draw(seed)
    for dtype, causal, group, s, d in (
        (torch.float32, False, 1, draw.size(12, 30), draw.choice((6, 8, 10, 12))),
        (torch.bfloat16, True, 2, draw.size(12, 30), draw.choice((6, 8, 10, 12))),
        (torch.bfloat16, False, 4, draw.size(12, 30), draw.choice((6, 8, 10, 12))),
        (torch.float16, True, 1, draw.size(12, 30), draw.choice((6, 8, 10, 12))),
        (torch.float64, True, 2, draw.size(12, 30), draw.choice((6, 8, 10, 12))),
        (torch.float32, True, 2, draw.size(130, 260), draw.choice((32, 64))),
    ):
        b, kv = draw.size(1, 4), draw.size(1, 3)
        q = draw.normal(b, kv * group, s, d, dtype=dtype)
        k, v = draw.normal(b, kv, s, d, dtype=dtype), draw.normal(b, kv, s, d, dtype=dtype)
        exact = {
            "": reference_attention(q, k, v, causal),
            "The reference is causal when causal is True, and only then.": reference_attention(q, k, v, not causal),
        }
        right = exact[""]
        noise = draw.normal(*right.shape, dtype=torch.float64) * right.abs().max() * draw.real(0.005, 0.02)
        # If the output equals the reference, its error depends on the order of the sums.
        for out in (right.to(dtype), (right + noise).to(dtype))[dtype == torch.float64 :]:
            what = f"a {dtype_name(dtype)} output, {group} query heads a key head, causal={causal}"
            expect_errors(errors, out, (q, k, v), causal, exact, what)


@check("3.1", "Intensity, prefill and decode")
def intensities(intensity, queries_to_ridge, seed=None):
    """Check the counts of fused attention, and the inverse function."""
    draw = Draw(seed)
    for dtype in DTYPES[:4]:
        size = dtype.itemsize
        sq, sk, group, d = draw.size(1, 60), draw.size(70, 900), draw.size(2, 9), draw.choice((32, 64, 100))
        what = f"intensity({sq}, {sk}, {group}, {d}, {dtype_name(dtype)})"
        expect_value(
            intensity(sq, sk, group, d, dtype),
            2 * group * sq * sk / ((group * sq + sk) * size),
            "FLOPs/Byte",
            what,
            {
                "The heads of a group share keys and values: they are read once.": 2 * sq * sk / ((sq + sk) * size),
                "These are FLOPs per element: divide by the bytes of an element.": 2
                * group
                * sq
                * sk
                / (group * sq + sk),
                "Two FLOPs a multiply-accumulate.": group * sq * sk / ((group * sq + sk) * size),
                "Each query head of the group has queries and an output of its own.": 2
                * group
                * sq
                * sk
                / ((sq + sk) * size),
                "Keys are as long as the cache, not as the queries.": 2 * group * sq * sq / ((group * sq + sq) * size),
            },
        )
    for turn, dtype in enumerate((torch.bfloat16, torch.float32, torch.float8_e4m3fn) * 2):
        size, sk, group, d = dtype.itemsize, draw.size(200, 900), draw.size(2, 9), 64
        ridge, exact = 0.0, 0.0
        # At whole numbers the last bit would decide, so avoid them. The first case is also below a half, so that
        # rounding to the nearest number is wrong in every draw.
        while not 0.05 < exact % 1 < (0.45 if turn == 0 else 0.95):
            # Near the limit the bytes of the queries matter. Once, more queries than keys are needed.
            ridge = draw.real(*((0.92, 0.96) if turn == 1 else (0.3, 0.8))) * 2 * sk / size
            exact = ridge * size * sk / (group * (2 * sk - ridge * size))
        what = f"queries_to_ridge({ridge:.4f}, {sk}, {group}, {d}, {dtype_name(dtype)})"
        got = queries_to_ridge(ridge, sk, group, d, dtype)
        assert got is not None, (
            f"{what} is None, and {math.ceil(exact)} queries reach it: more than keys may be needed."
        )
        expect_value(
            got,
            math.ceil(exact),
            "",
            what,
            {
                "One query fewer still lies left of the ridge: round up.": math.floor(exact),
                "Rounded to the nearest: the ridge must be reached.": exact,
                "The group shares the keys, too: group * queries count.": math.ceil(exact * group),
                "Queries and outputs have bytes as well, not only the cache.": math.ceil(ridge * size / (2 * group)),
                "An element has itemsize bytes.": math.ceil(ridge * sk / (group * (2 * sk - ridge))),
            },
        )
    for sk in (draw.size(3, 20), 50):
        ridge = sk + draw.real(1, 5)  # the intensity ends at 2 sk / itemsize = sk for bf16
        expect_unreachable(queries_to_ridge, ridge, sk)


def _decode_us(programs, sk, splits, units, tile, tile_us, combine_us):
    waves = math.ceil(programs * splits / units)
    tiles = math.ceil(math.ceil(sk / splits) / tile)
    return waves * tiles * tile_us + (combine_us if splits > 1 else 0.0)


@check("3.3", "How many splits?")
def splits(decode_us, best_splits, seed=None):
    """Check waves, tiles, the second kernel, and that the answer is the smallest of equally good numbers of splits."""
    draw = Draw(seed)
    for case in range(10):
        programs, units = draw.size(1, 300), draw.size(20, 150)
        sk, splits, tile = draw.size(500, 9000), draw.size(2, 12), draw.choice((64, 128))
        if case == 1:
            splits = 1
        if case == 2:
            programs, splits, sk = units, 3, 27 * tile + 1  # whole waves; the longest part is one key over nine tiles
        tile_us, combine_us = draw.real(0.2, 0.9), draw.real(2, 6)
        arguments = programs, sk, splits, units, tile, tile_us, combine_us
        waves, tiles = programs * splits / units, math.ceil(math.ceil(sk / splits) / tile)
        up = math.ceil(waves)
        tail = combine_us if splits > 1 else 0.0
        expect_value(
            decode_us(*arguments),
            _decode_us(*arguments),
            "us",
            f"decode_us{arguments}",
            {
                "A part of a wave takes as long as a whole one: round the waves up.": waves * tiles * tile_us + tail,
                "Splitting makes more programs: programs * splits.": math.ceil(programs / units) * tiles * tile_us
                + tail,
                "Splitting makes parts shorter: kv_len / splits keys each.": up * math.ceil(sk / tile) * tile_us + tail,
                "A part of a tile takes as long as a whole one: round the tiles up.": up * sk / splits / tile * tile_us
                + tail,
                "One split needs no second kernel.": up * tiles * tile_us + combine_us,
                "Results of several splits are merged by a second kernel.": up * tiles * tile_us,
            },
            rel=1e-9,
        )
    for case, programs in enumerate((264, 132, draw.size(41, 300), draw.size(2, 40), 1, 1)):
        sk, most = draw.size(3000, 90000), draw.choice((16, 64))
        if case == 5:
            sk = 128 * most * draw.size(4, 11)  # `most` parts of whole tiles: every smaller number is slower
        # Sums of eighths need no rounding, so equal times compare as equal in any order of the sums.
        arguments = 132, 128, draw.size(2, 7) / 8, draw.size(16, 48) / 8
        times = {n: _decode_us(programs, sk, n, *arguments) for n in range(1, most + 1)}
        best = min(times.values())
        right, *_, last = [n for n, time in times.items() if time == best] * 2
        got = best_splits(programs, sk, *arguments, most)
        what = f"best_splits({programs}, {sk}, {', '.join(f'{a:.4g}' for a in arguments)}, most={most})"
        expect_value(
            got,
            right,
            "",
            what,
            {
                FEWEST: last,
                MOST: most,
                TRIED: min(range(1, most), key=times.get),
                "With these many programs, splitting does pay: compare the times.": 1,
            },
        )
