"""Part 6: questions about a table of results; the checks ask them about random tables of the same form."""

from __future__ import annotations

import math

import pandas as pd

from instructor.checks.common import Draw, expect_value
from instructor.checks.lab4_sdpa.common import with_right_answers
from utils.checking.labs.lab4_sdpa.common import check, expect_unchanged
from utils.checking.labs.lab4_sdpa.grid import (
    ALL_FIVE,
    CUDNN_FOUR,
    CUDNN_ONE,
    DECODE_ONLY,
    GEOMETRIC,
    IN_DECODE,
    IN_POWERS,
    IN_TERABYTES,
    LEFT_OUT,
    NEAREST_OF,
    NO_SHAPE,
    NO_WIN,
    ONLY_ABLE,
    ONLY_OK,
    SHARE,
    SMALLEST,
    UPSIDE_DOWN,
    expect_answers,
    expect_choice,
)
from utils.config import GPU_SPECS

KINDS = ("training", "prefill", "decode")
BACKENDS = ("math", "flash", "efficient", "cudnn")


def random_grid(draw: Draw, shapes: int = 24) -> pd.DataFrame:
    """Return a table like the recorded one: rows in any order, some refused, some defaults without a time."""
    rows = []
    for shape in range(shapes):
        kind = KINDS[shape % 3]
        default = draw.choice(("flash", "cudnn", "efficient"))
        queries = draw.choice((1, 4)) if kind == "decode" else 512
        for backend in BACKENDS:
            ms = math.exp(draw.real(-3, 3))
            kernels = [
                draw.choice(("sdpa_sm80_wmma", "sdpa_sm90_wgmma")),
                *draw.choice(([], ["lean_reduction_kernel"])),
            ]
            status = "ok"
            if backend != "math" and draw.size(1, 6) == 1:
                status = draw.choice(("refused", "failed", "out of memory"))
                # a failed row may have a time; it must not count
                ms = draw.choice((math.nan, draw.real(1e-4, 2e-4)))
            rows.append(
                {
                    "kind": kind,
                    "shape": 3 * shape + 5,
                    "backend": backend,
                    "status": status,
                    "ms": ms,
                    "is_default": backend == default,
                    "seq_len_q": queries,
                    "kernels": kernels,
                    "gb_s": draw.real(50, 3000) / ms,
                    "refused": None if status == "ok" else "because",
                }
            )
    draw.numbers.shuffle(rows)
    return pd.DataFrame(rows, index=draw.numbers.sample(range(10 * len(rows)), len(rows)))


def _rows_with_time(grid: pd.DataFrame) -> pd.DataFrame:
    return grid[grid["status"] == "ok"]


def fastest(grid: pd.DataFrame) -> pd.Series:
    """Return the fastest backend of each shape."""
    ordered = _rows_with_time(grid).sort_values("ms").drop_duplicates("shape")
    return ordered.set_index("shape")["backend"].sort_index()


def default_slowdown(grid: pd.DataFrame) -> pd.Series:
    """Return the default backend's time over the best time, for each shape where both are known."""
    best = _rows_with_time(grid).groupby("shape")["ms"].min()
    default = _rows_with_time(grid)[_rows_with_time(grid)["is_default"]].set_index("shape")["ms"]
    return (default / best.reindex(default.index)).sort_index()


def geometric_mean(values) -> float:
    """Return the geometric mean of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _expect_series(got: object, expected: pd.Series, what: str, mistakes: dict[str, pd.Series]) -> None:
    if not isinstance(got, pd.Series):
        raise AssertionError(f"{what} should be a pandas Series, and is a {type(got).__name__}.")
    if not got.index.is_unique or set(got.index) - set(_all_shapes(mistakes, expected)):
        raise AssertionError(f"{what} should be indexed by `shape`, one entry each; it is {list(got.index)[:6]} ...")
    got_values = got.sort_index().to_dict()
    expected_values = expected.to_dict()

    def same(one: dict, other: dict) -> bool:
        return one.keys() == other.keys() and all(
            a == b
            or (
                isinstance(a, int | float)
                and isinstance(b, int | float)
                and (abs(a - b) <= 1e-9 * abs(b) or (a != a and b != b))
            )
            for a, b in ((one[key], other[key]) for key in one)
        )

    if same(got_values, expected_values):
        return
    for hint, wrong in mistakes.items():
        if same(got_values, wrong.sort_index().to_dict()):
            raise AssertionError(f"{what} is wrong. {hint}")
    if got_values.keys() != expected_values.keys():
        extra, missing = (
            sorted(got_values.keys() - expected_values.keys()),
            sorted(expected_values.keys() - got_values.keys()),
        )
        raise AssertionError(
            f"{what} has entries for the wrong shapes: {len(extra)} too many {extra[:4]}, "
            f"{len(missing)} missing {missing[:4]}. A shape counts where what is asked for has a "
            "time."
        )
    bad = [key for key in expected_values if not same({0: got_values[key]}, {0: expected_values[key]})]
    raise AssertionError(
        f"{what} is wrong for {len(bad)} of {len(expected_values)} shapes, the first is shape {bad[0]}: got "
        f"{got_values[bad[0]]!r}, expected {expected_values[bad[0]]!r}."
    )


def _all_shapes(mistakes: dict[str, pd.Series], expected: pd.Series) -> set:
    return set(expected.index).union(*(series.index for series in mistakes.values()))


@check("6.1", "The fastest and the default")
def fastest_and_default(fastest_function, default_function, mean_function, seed=None):
    """Check random tables, in which refused rows may have a time, and means of many values."""
    draw = Draw(seed)
    for shapes in (24, draw.size(5, 20), draw.size(60, 150)):
        grid = random_grid(draw, shapes)
        before = grid.copy(deep=True)
        anything = grid.assign(status="ok").dropna(subset=["ms"])
        slowest = (
            _rows_with_time(grid)
            .sort_values("ms", ascending=False)
            .drop_duplicates("shape")
            .set_index("shape")["backend"]
        )
        _expect_series(
            fastest_function(grid), fastest(grid), "fastest(grid)", {ONLY_OK: fastest(anything), SMALLEST: slowest}
        )
        right = default_slowdown(grid)
        every = _rows_with_time(grid).groupby("shape")["ms"].min()
        _expect_series(
            default_function(grid),
            right,
            "default_slowdown(grid)",
            {
                LEFT_OUT: right.reindex(every.index).fillna(1.0),
                UPSIDE_DOWN: 1 / right,
                ONLY_OK: default_slowdown(anything),
            },
        )
        expect_unchanged(grid, before, "one of the functions")
    values = [math.exp(draw.real(-1, 3)) for _ in range(9)]
    expect_value(
        mean_function(pd.Series(values)),
        geometric_mean(values),
        "",
        "geometric_mean of 9 values",
        {
            "That is the arithmetic mean.": sum(values) / 9,
            "Take the n-th root of the product.": math.prod(values),
            "That is the median.": sorted(values)[4],
        },
        rel=1e-9,
    )
    # The logarithms of the last two are beyond what 80 bits hold, too.
    for low, high in ((2, 4), (60, 70), (-70, -60)):
        many = [math.exp(draw.real(low, high)) for _ in range(600)]
        what = f"geometric_mean of 600 values, whose product {'over' if low > 0 else 'under'}flows,"
        expect_value(mean_function(pd.Series(many)), geometric_mean(many), "", what, rel=1e-9)


def _share(rows: pd.DataFrame, word: str) -> float:
    """Return the share of rows with a word in the name of a kernel."""
    return float(rows["kernels"].map(lambda names: any(word in name for name in names)).mean())


def _of_cudnn(rows: pd.DataFrame, queries: int) -> pd.DataFrame:
    return rows[(rows["kind"] == "decode") & (rows["backend"] == "cudnn") & (rows["seq_len_q"] == queries)]


def answers(grid: pd.DataFrame) -> dict:
    """Return the right answers to Question 6.2 for a table."""
    timed, best, loss = _rows_with_time(grid), fastest(grid), default_slowdown(grid)
    kinds = grid.drop_duplicates("shape").set_index("shape")["kind"]
    default = grid[grid["is_default"]].set_index("shape")["backend"]
    bandwidth = 1e3 * GPU_SPECS["H200"]["memory_bandwidth_tb_s"]
    return {
        "default_wins": float((best == default.reindex(best.index)).mean()),
        "default_loss": geometric_mean(loss),
        "decode_winner": best[kinds.reindex(best.index) == "decode"].value_counts(),
        "worst_default": loss[kinds.reindex(loss.index) == "decode"].max(),
        "decode_bandwidth": timed[timed["kind"] == "decode"]["gb_s"].max() / bandwidth,
        "sm80_one_query": _share(_of_cudnn(timed, 1), "sm80"),
        "splits_four_queries": _share(_of_cudnn(timed, 4), "reduction"),
    }


def _usable(grid: pd.DataFrame) -> bool:
    """Return whether every answer exists, none depends on a tie, and a forgotten condition changes the answer."""
    try:
        right = answers(grid)
    except (KeyError, ZeroDivisionError, ValueError):
        return False
    counts = right["decode_winner"]
    values = [value for key, value in right.items() if key != "decode_winner"]
    if not all(map(math.isfinite, values)) or (len(counts) > 1 and counts.iloc[0] == counts.iloc[1]):
        return False
    timed = _rows_with_time(grid)
    decode = timed[timed["kind"] == "decode"]
    cudnn = decode[decode["backend"] == "cudnn"]
    return (
        default_slowdown(grid).max() > right["worst_default"]
        and fastest(grid).value_counts().idxmax() != counts.idxmax()
        and timed["gb_s"].max() > decode["gb_s"].max()
        and 0 < right["sm80_one_query"] not in (_share(cudnn, "sm80"), _share(decode[decode["seq_len_q"] == 1], "sm80"))
        and 0 < right["splits_four_queries"] != _share(cudnn, "reduction")
    )


def _answer_mistakes(grid: pd.DataFrame, right: dict) -> dict[str, dict[str, float]]:
    """Return {key: {hint: the number that the mistake leads to}} for Question 6.2."""
    timed, loss = _rows_with_time(grid), default_slowdown(grid)
    decode = timed[timed["kind"] == "decode"]
    cudnn = decode[decode["backend"] == "cudnn"]
    wins = right["default_wins"] * len(fastest(grid))
    bandwidth = 1e3 * GPU_SPECS["H200"]["memory_bandwidth_tb_s"]
    return {
        "default_wins": {SHARE: 100 * right["default_wins"], NO_WIN: wins / len(loss)},
        "default_loss": {GEOMETRIC: loss.mean(), "Not the median.": loss.median()},
        "worst_default": {DECODE_ONLY: loss.max()},
        "decode_bandwidth": {
            IN_TERABYTES: 1e3 * right["decode_bandwidth"],
            "Decode only.": timed["gb_s"].max() / bandwidth,
            'Rows that are not "ok" do not count.': grid[grid["kind"] == "decode"]["gb_s"].max() / bandwidth,
        },
        "sm80_one_query": {CUDNN_ONE: _share(cudnn, "sm80")},
        "splits_four_queries": {CUDNN_FOUR: _share(cudnn, "reduction")},
    }


@check("6.2", "The case of two kernels")
def grid_answers(grid_answers, seed=None):
    """Check random tables; right functions of Question 6.1 replace the student's meanwhile."""
    draw = Draw(seed)
    right_functions = {"fastest": fastest, "default_slowdown": default_slowdown, "geometric_mean": geometric_mean}
    # The product of the last one's losses overflows in 64 bits: it has a thousand shapes.
    for shapes in (24, 24, 1000):
        grid = random_grid(draw, shapes)
        while not _usable(grid):
            grid = random_grid(draw, shapes)
        right = answers(grid)
        with with_right_answers(grid_answers, right_functions):
            got = expect_answers(grid_answers, grid)
        winner = right["decode_winner"].idxmax()
        if got["decode_winner"] != winner:
            raise AssertionError(f"decode_winner is {got['decode_winner']!r}, expected {winner!r}. {IN_DECODE}")
        hints = _answer_mistakes(grid, right)
        for key in hints:
            what = f"{key} of a table with {grid['shape'].nunique()} shapes"
            expect_value(got[key], right[key], "", what, hints[key], rel=1e-9)


SIZES = ("batch", "heads", "kv_heads", "seq_len_q", "seq_len_kv")


def _random_shapes(draw: Draw) -> pd.DataFrame:
    """Return measured shapes with their sizes: two kinds, two head dimensions, rows in any order, some not ok."""
    rows = []
    for shape in range(14):
        kv_heads = draw.choice((1, 2, 4, 8))
        sizes = {
            "kind": draw.choice(("prefill", "decode")),
            "head_dim": draw.choice((64, 128)),
            "causal": draw.size(0, 1) == 1,
            "batch": draw.size(1, 64),
            "heads": kv_heads * draw.size(1, 8),
            "kv_heads": kv_heads,
            "seq_len_q": draw.size(1, 9000),
            "seq_len_kv": draw.size(64, 60000),
            "shape": shape,
        }
        for backend in BACKENDS:
            status = "ok" if draw.size(0, 4) else "refused"
            ms = draw.real(0.1, 9) if status == "ok" else draw.choice((math.nan, 0.01))
            rows.append(sizes | {"backend": backend, "status": status, "ms": ms})
    draw.numbers.shuffle(rows)
    return pd.DataFrame(rows, index=draw.numbers.sample(range(1000), len(rows)))


def _choice(grid, call, able, *, logarithmic=True, same=("kind", "head_dim", "causal"), sizes=SIZES, ok=True) -> str:
    """Return the choice of Bonus 6.4, or with other arguments that of a known mistake."""
    near = [
        row
        for row in grid.to_dict("records")
        if row["backend"] in able
        and not math.isnan(row["ms"])
        and (row["status"] == "ok" or not ok)
        and all(row[name] == call[name] for name in same)
    ]
    if not near:
        return able[0]

    def distance(row):
        return sum((math.log2(row[n] / call[n]) if logarithmic else row[n] - call[n]) ** 2 for n in sizes)

    return min(near, key=lambda row: (distance(row), row["shape"], row["ms"]))["backend"]


@check("Bonus 6.4", "A shape that nobody measured")
def choose_backend(choose_backend, seed=None):
    """Check random tables and calls, calls of the table itself, and calls that few backends or none can run."""
    draw = Draw(seed)
    # A length between two measured lengths: the middle in tokens is not the middle in powers of two.
    length, fixed = draw.size(100, 900), {"kind": "prefill", "head_dim": 64, "causal": True}
    sizes = {"batch": 2, "heads": 8, "kv_heads": 4}
    grid = pd.DataFrame(
        [
            fixed | sizes | {"shape": i, "seq_len_q": n, "seq_len_kv": n, "backend": backend, "status": "ok", "ms": ms}
            for i, n in enumerate((length, 4 * length))
            for backend, ms in (("flash", 1.0 + i), ("cudnn", 2.0 - i), ("math", 9.0))
        ]
    )
    for factor in (1.5, 2.3, 3.0):
        n = round(factor * length)
        _expect_choice(choose_backend, grid, fixed | sizes | {"seq_len_q": n, "seq_len_kv": n}, list(BACKENDS))
    for _ in range(3):
        grid = _random_shapes(draw)
        before = grid.copy(deep=True)
        for _ in range(7):
            row = grid.iloc[draw.size(0, len(grid) - 1)]
            call = {"kind": row["kind"], "head_dim": int(row["head_dim"]), "causal": bool(row["causal"])}
            for name in SIZES:
                call[name] = max(1, round(int(row[name]) * 2 ** draw.real(-1.5, 1.5)))
            able = draw.numbers.sample(BACKENDS, draw.size(1, 4))
            _expect_choice(choose_backend, grid, call, able)
        call["head_dim"] = 256
        _expect_choice(choose_backend, grid, call, able)
        expect_unchanged(grid, before, "choose_backend")


def _expect_choice(choose_backend, grid, call, able) -> None:
    given = dict(call), list(able)
    right, got = _choice(grid, call, able), choose_backend(grid, *given)
    assert given == (call, able), f"choose_backend was given {call} and {able}, and left {given[0]} and {given[1]}."
    wrong = {
        IN_POWERS: _choice(grid, call, able, logarithmic=False),
        ONLY_OK: _choice(grid, call, able, ok=False),
        NEAREST_OF: _choice(grid, call, able, same=()),
        ALL_FIVE: _choice(grid, call, able, sizes=("seq_len_q", "seq_len_kv")),
        ONLY_ABLE: _choice(grid, call, BACKENDS),
        NO_SHAPE: "" if call["head_dim"] in set(grid["head_dim"]) else got,
    }
    # There are few backends and many mistakes, so several mistakes can lead to the chosen backend.
    hints = [text for text, choice in wrong.items() if choice == got]
    hint = " Or: ".join(hints) or "Which shape is the nearest?"
    expect_choice(got, right, able, f"choose_backend for {call} and able {able}", hint)
