"""Part 6: questions about a table of results. The visible checks ask them about small tables."""

from __future__ import annotations

import math

import pandas as pd

from utils.checking import expect_number
from utils.checking.labs.lab4_sdpa.common import visible
from utils.config import GPU_SPECS


def fastest(grid: pd.DataFrame) -> pd.Series:
    """Return the fastest backend of each shape that has a time."""
    timed = grid[grid["status"] == "ok"]
    return timed.loc[timed.groupby("shape")["ms"].idxmin()].set_index("shape")["backend"]


def default_slowdown(grid: pd.DataFrame) -> pd.Series:
    """Return for each shape the default's time over the best time, if the default has a time."""
    timed = grid[grid["status"] == "ok"]
    default = timed[timed["is_default"]].set_index("shape")["ms"]
    return (default / timed.groupby("shape")["ms"].min()).dropna()


def geometric_mean(values: pd.Series) -> float:
    """Return the n-th root of the product of n positive values; the product itself may overflow."""
    return math.exp(sum(map(math.log, values)) / len(values))


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
CUDNN_ONE = "Count cuDNN's decode rows with one query and with sm80 in a kernel's name."
CUDNN_FOUR = "Count cuDNN's decode rows with four queries and with `reduction` in a kernel's name."


def expect_answers(grid_answers, grid: pd.DataFrame) -> dict:
    """Assert the keys of the answers to a table, and return them."""
    got = grid_answers(grid.copy(deep=True))
    apart = sorted(map(str, set(got) ^ set(ANSWERS))) if isinstance(got, dict) else [type(got).__name__]
    assert not apart, f"grid_answers should return a dict with the keys {ANSWERS}: look at {', '.join(apart)}."
    winner = got["decode_winner"]
    assert isinstance(winner, str), f"decode_winner should be a backend's name, and is of type {type(winner).__name__}."
    return got


@visible("6.1", "The case of two kernels")
def check_grid_answers(grid_answers):
    """Check a table of ten shapes, and a table that repeats it 400 times; flash is the default."""
    sm80, sm90, reduction = "sdpa_sm80_flash_fprop_wmma", "sdpa_sm90_flash_fprop_wgmma", "lean_reduction_kernel"
    columns = ["shape", "kind", "seq_len_q", "backend", "ms", "gb_s", "status", "kernels"]
    rows = [
        *((0, "training", 512, "flash", 3.0, 100, "ok", []), (0, "training", 512, "cudnn", 2.0, 200, "ok", [sm90])),
        *((1, "prefill", 512, "flash", 4.0, 100, "ok", []), (1, "prefill", 512, "cudnn", 1.0, 200, "ok", [sm90])),
        *((2, "decode", 1, "flash", 1.0, 2400, "ok", []), (2, "decode", 1, "cudnn", 2.0, 9, "ok", [sm80, reduction])),
        (2, "decode", 1, "math", 0.5, 4700, "failed", []),
        *((3, "decode", 1, "flash", 1.0, 100, "ok", []), (3, "decode", 1, "cudnn", 3.0, 9, "ok", [sm90, reduction])),
        *(
            (4, "decode", 4, "flash", 0.1, 100, "refused", []),
            (4, "decode", 4, "cudnn", 3.0, 9, "ok", ["Memset", sm90]),
        ),
        *((5, "decode", 4, "flash", 30.0, 100, "ok", []), (5, "decode", 4, "cudnn", 20.0, 9, "ok", [sm90, reduction])),
        *((6, "training", 512, "flash", 8.0, 9, "ok", []), (6, "training", 512, "cudnn", 1.0, 5000, "ok", [sm90])),
        *((7, "decode", 1, "flash", 1.0, 100, "ok", []), (7, "decode", 1, "cudnn", 0.1, 9, "failed", [sm80])),
        *((8, "decode", 4, "flash", 2.0, 100, "ok", []), (8, "decode", 4, "cudnn", 1.0, 9, "ok", [sm90])),
        *((9, "decode", 1, "flash", 1.0, 100, "ok", []), (9, "decode", 1, "cudnn", 4.0, 9, "ok", ["Memset", sm80])),
    ]
    small = pd.DataFrame(rows, columns=columns).assign(is_default=lambda table: table["backend"] == "flash")
    small = small.sample(frac=1, random_state=0)  # so that no row has its index as its position
    got = expect_answers(grid_answers, small)
    other = expect_answers(grid_answers, small.assign(is_default=small["backend"] == "cudnn"))
    for winner in (other["decode_winner"], got["decode_winner"]):
        assert winner == "flash", f"flash wins most decode shapes, not {winner!r}. {IN_DECODE}"
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
    what = "decode_bandwidth of the small table, where cudnn is the default,"
    expect_number(other["decode_bandwidth"], got["decode_bandwidth"], rel=1e-6, what=what)
    # A table that repeats this one 400 times has the same answers, but 64 bits cannot hold the product of all losses.
    many = pd.concat([small.assign(shape=small["shape"] + 10 * i) for i in range(400)], ignore_index=True)
    for key, found in expect_answers(grid_answers, many).items():
        if key != "decode_winner":
            what = f"{key} of a table of 4000 shapes, the small table 400 times,"
            expect_number(found, got[key], rel=1e-6, what=what)
