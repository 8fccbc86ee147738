"""Part 6: questions about a table of results; the visible checks ask them about small tables."""

from __future__ import annotations

import math

import pandas as pd

from utils.checking import expect_number
from utils.checking.labs.lab4_sdpa.common import expect_unchanged, visible
from utils.config import GPU_SPECS

ONLY_OK = 'Rows that are not "ok" do not count, whatever stands in their `ms`.'
LEFT_OUT = "A shape whose default has no time is left out: a missing default is no 1, and no NaN."
UPSIDE_DOWN = "Time of the default over the best time, not the other way round."
SMALLEST = "The fastest has the smallest time."


@visible("6.1", "The fastest and the default")
def check_fastest_and_default(fastest, default_slowdown, geometric_mean):
    """Check four shapes: in 1 cuDNN failed, in 4 the default was refused, and 7 has no time at all."""
    rows = [
        *((0, "math", 9.0, "ok", False), (0, "flash", 2.0, "ok", True), (0, "cudnn", 1.0, "ok", False)),
        *((1, "math", 8.0, "ok", False), (1, "flash", 3.0, "ok", True), (1, "cudnn", 0.5, "failed", False)),
        *((4, "math", 6.0, "ok", False), (4, "flash", 0.1, "refused", True), (4, "cudnn", 4.0, "ok", False)),
        *((7, "math", 3.0, "out of memory", False), (7, "flash", math.nan, "refused", True)),
    ]
    columns = ["shape", "backend", "ms", "status", "is_default"]
    small = pd.DataFrame(rows, columns=columns, index=range(20, 9, -1)).sample(frac=1)
    before = small.copy(deep=True)
    _expect_entries(
        fastest(small),
        {0: "cudnn", 1: "flash", 4: "cudnn"},
        "fastest(grid)",
        {ONLY_OK: {0: "cudnn", 1: "cudnn", 4: "flash", 7: "math"}, SMALLEST: {0: "math", 1: "math", 4: "math"}},
        "A shape without any time is left out; the index is `shape`.",
    )
    got = default_slowdown(small)
    extra = (
        f"{LEFT_OUT} {ONLY_OK}" if isinstance(got, pd.Series) and set(got.index) > {0, 1} else "The index is `shape`."
    )
    mistakes = {UPSIDE_DOWN: {0: 0.5, 1: 1.0}, ONLY_OK: {0: 2.0, 1: 6.0}}
    _expect_entries(got, {0: 2.0, 1: 1.0}, "default_slowdown(grid)", mistakes, extra)
    expect_unchanged(small, before, "one of the functions")
    mistakes = {
        "That is the arithmetic mean.": 35 / 3,
        "That is the median.": 2.0,
        "Take the n-th root of the product.": 64.0,
        "The n-th root, not always the square root.": 8.0,
    }
    got = geometric_mean(pd.Series([1.0, 2.0, 32.0]))
    expect_number(got, 4.0, rel=1e-6, what="the geometric mean of 1, 2 and 32", mistakes=mistakes)
    got = geometric_mean(pd.Series([100.0] * 400))
    assert math.isfinite(got), "the product of 400 times 100 overflows, and its mean is 100: add logarithms instead."
    expect_number(got, 100.0, rel=1e-6, what="the geometric mean of 400 times 100")


def _expect_entries(got, right: dict, what: str, mistakes: dict[str, dict], otherwise: str) -> None:
    """Assert a Series by its entries."""
    assert isinstance(got, pd.Series), f"{what} should be a Series, and is a {type(got).__name__}."
    hint = next((text for text, wrong in mistakes.items() if dict(got) == wrong), otherwise)
    assert dict(got) == right, f"{what} is {dict(got)}, expected {right}. {hint}"


ANSWERS = (
    "default_wins",
    "default_loss",
    "decode_winner",
    "worst_default",
    "decode_bandwidth",
    "sm80_one_query",
    "splits_four_queries",
)
IN_DECODE = "Count among decode shapes only, the shapes that a backend wins."
NO_WIN = "Shapes whose default has no time count, too: they are no wins."
SHARE = "It is a share, between 0 and 1."
GEOMETRIC = "Geometric mean, not the arithmetic one."
DECODE_ONLY = "Among decode shapes only."
IN_TERABYTES = "Memory bandwidth in the table is in TB/s, and gb_s in GB/s."
CUDNN_ONE = "Of cuDNN's decode rows with one query, those with sm80 in a kernel's name."
CUDNN_FOUR = "Of cuDNN's decode rows with four queries, those with `reduction` in a kernel's name."


def expect_answers(grid_answers, grid: pd.DataFrame) -> dict:
    """Assert the keys of the answers to a table, and return them."""
    got = grid_answers(grid.copy(deep=True))
    assert isinstance(got, dict) and set(got) == set(ANSWERS), f"the keys should be {sorted(ANSWERS)}; got {got!r:.200}"
    return got


@visible("6.2", "The case of two kernels")
def check_grid_answers(grid_answers):
    """Check a table of ten shapes, and the same 400 times over; flash is the default."""
    sm80, sm90, reduction = "sdpa_sm80_flash_fprop_wmma", "sdpa_sm90_flash_fprop_wgmma", "lean_reduction_kernel"
    columns = ["shape", "kind", "seq_len_q", "backend", "ms", "gb_s", "status", "kernels"]
    rows = [
        *((0, "training", 512, "flash", 3.0, 100, "ok", []), (0, "training", 512, "cudnn", 2.0, 200, "ok", [sm90])),
        *((1, "prefill", 512, "flash", 4.0, 100, "ok", []), (1, "prefill", 512, "cudnn", 1.0, 200, "ok", [sm90])),
        *((2, "decode", 1, "flash", 1.0, 2400, "ok", []), (2, "decode", 1, "cudnn", 2.0, 9, "ok", [sm80, reduction])),
        (2, "decode", 1, "math", 0.5, 4700, "failed", []),
        *((3, "decode", 1, "flash", 1.0, 100, "ok", []), (3, "decode", 1, "cudnn", 3.0, 9, "ok", [sm90, reduction])),
        *((4, "decode", 4, "flash", 0.1, 100, "refused", []), (4, "decode", 4, "cudnn", 3.0, 9, "ok", [sm90])),
        *((5, "decode", 4, "flash", 3.0, 100, "ok", []), (5, "decode", 4, "cudnn", 2.0, 9, "ok", [sm90, reduction])),
        *((6, "training", 512, "flash", 8.0, 9, "ok", []), (6, "training", 512, "cudnn", 1.0, 5000, "ok", [sm90])),
        *((7, "decode", 1, "flash", 1.0, 100, "ok", []), (7, "decode", 1, "cudnn", 0.1, 9, "failed", [sm80])),
        *((8, "decode", 4, "flash", 2.0, 100, "ok", []), (8, "decode", 4, "cudnn", 1.0, 9, "ok", [sm90])),
        *((9, "decode", 1, "flash", 1.0, 100, "ok", []), (9, "decode", 1, "cudnn", 4.0, 9, "ok", [sm80])),
    ]
    small = pd.DataFrame(rows, columns=columns).assign(is_default=lambda table: table["backend"] == "flash")
    got = expect_answers(grid_answers, small)
    assert got["decode_winner"] == "flash", f"flash wins most decode shapes, not {got['decode_winner']!r}. {IN_DECODE}"
    loss, bandwidth = [1.5, 4.0, 1.0, 1.0, 1.5, 8.0, 1.0, 2.0, 1.0], GPU_SPECS["H200"]["memory_bandwidth_tb_s"]
    as_share = "As a share: GB/s over the bandwidth in GB/s."
    for key, right, mistakes in (
        ("default_wins", 4 / 10, {NO_WIN: 4 / 9, SHARE: (4.0, 40.0), "A share of shapes, not of rows.": 4 / 18}),
        ("default_loss", math.prod(loss) ** (1 / 9), {GEOMETRIC: sum(loss) / 9, "Not the median.": 1.0}),
        ("worst_default", 2.0, {DECODE_ONLY: (8.0, 4.0), "The largest: the default loses most there.": 1.0}),
        (
            "decode_bandwidth",
            2.4 / bandwidth,
            {as_share: (2400.0, 2.4), IN_TERABYTES: 2400 / bandwidth, "Decode only.": 5.0 / bandwidth}
            | {'Rows that are not "ok" do not count.': 4.7 / bandwidth},
        ),
        ("sm80_one_query", 2 / 3, {'Rows that are not "ok" do not count.': 3 / 4, CUDNN_ONE: (1 / 3, 2 / 6, 2 / 9)}),
        ("splits_four_queries", 1 / 3, {CUDNN_FOUR: (3 / 6, 1 / 6, 2 / 3, 3 / 9)}),
    ):
        expect_number(got[key], right, rel=1e-6, what=f"{key} of a small table of ten shapes", mistakes=mistakes)
    # Of 400 such tables in one the answers are the same, and the product of all losses is beyond what 64 bits hold.
    many = pd.concat([small.assign(shape=small["shape"] + 10 * i) for i in range(400)], ignore_index=True)
    for key, found in expect_answers(grid_answers, many).items():
        if key != "decode_winner":
            what = f"{key} of a table of 4000 shapes, the small table 400 times,"
            expect_number(found, got[key], rel=1e-6, what=what)


NEAREST_OF = "Look only at shapes of the same kind, head dimension and causality."
IN_POWERS = "Measure distance in powers of two: log2 of the ratio, squared."
ALL_FIVE = "All five sizes count, the batch as well."
ONLY_ABLE = "Of the nearest shapes only those count for which a backend in `able` has a time."
NO_SHAPE = "No shape of this head dimension was measured: the answer is able[0]."


def expect_choice(got: object, right: str, able: list[str], what: str, hint: str) -> None:
    """Assert a chosen backend."""
    assert got in able, f"{what} is {got!r}, which cannot run the call: it is not in `able`. {NO_SHAPE}"
    assert got == right, f"{what} is {got!r}, expected {right!r}. {hint}"


@visible("Bonus 6.4", "A shape that nobody measured")
def check_choose_backend(choose_backend):
    """Check calls beside seven measured shapes; negative times stand for rows that failed."""
    base = {"kind": "prefill", "head_dim": 64, "causal": True, "batch": 1, "heads": 8, "kv_heads": 8}
    shapes = (
        ({"flash": 1.0, "cudnn": 2.0}, 512, {}),
        ({"flash": 2.0, "cudnn": 1.0, "math": -0.1}, 2048, {}),
        ({"math": 1.0, "efficient": 2.0}, 1024, {"batch": 64}),
        ({"efficient": 1.0, "cudnn": 2.0}, 1024, {"kind": "training"}),
        ({"math": 1.0, "cudnn": 2.0}, 1024, {"head_dim": 128}),
        ({"efficient": 1.0, "flash": 3.0}, 1024, {"causal": False}),
        ({"efficient": 1.0, "flash": 3.0}, 16384, {}),
    )
    small = pd.DataFrame(
        base
        | {"shape": shape, "seq_len_q": length, "seq_len_kv": length, "backend": backend, "ms": abs(ms)}
        | {"status": "ok" if ms > 0 else "failed"}
        | sizes
        for shape, (times, length, sizes) in enumerate(shapes)
        for backend, ms in times.items()
    )
    before, every = small.copy(deep=True), ["math", "flash", "efficient", "cudnn"]
    for length, change, able, right, hint in (
        (600, {}, every, "flash", f"600 tokens are nearest to shape 0, of 512. {NEAREST_OF}"),
        (1500, {}, every, "cudnn", f"Shape 1, of 2048 tokens, is the nearest. {ONLY_OK}"),
        (1120, {}, every, "cudnn", f"{IN_POWERS} 2048 is nearer to 1120 than 512 is."),
        (1024, {}, every, "flash", "512 and 2048 are equally far from 1024: take the smaller `shape`."),
        (1024, {"batch": 60}, every, "math", ALL_FIVE),
        (1500, {}, ["flash"], "flash", "cudnn is not in `able`."),
        (600, {}, ["efficient", "math"], "math", ONLY_ABLE),
        (600, {"head_dim": 256}, ["efficient", "cudnn"], "efficient", NO_SHAPE),
    ):
        call = base | {"seq_len_q": length, "seq_len_kv": length} | change
        got = choose_backend(small, dict(call), list(able))
        if got in ("math", "efficient"):
            hint += f" Or: {NEAREST_OF} And: {ALL_FIVE}"
        expect_choice(got, right, able, f"choose_backend for {call} and able {able}", hint)
    expect_unchanged(small, before, "choose_backend")
