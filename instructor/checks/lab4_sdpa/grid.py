"""Part 6: questions about a table of results. The checks ask these questions about random tables."""

from __future__ import annotations

import math

import pandas as pd

from instructor.checks.common import Draw, expect_value
from utils.checking.labs.lab4_sdpa.common import check
from utils.checking.labs.lab4_sdpa.grid import (
    CUDNN_FOUR,
    CUDNN_ONE,
    DECODE_ONLY,
    GEOMETRIC,
    IN_DECODE,
    IN_TERABYTES,
    NO_WIN,
    SHARE,
    default_slowdown,
    expect_answers,
    fastest,
    geometric_mean,
)
from utils.config import GPU_SPECS

KINDS = ("training", "prefill", "decode")
BACKENDS = ("math", "flash", "efficient", "cudnn")


def random_grid(draw: Draw, shapes: int = 24) -> pd.DataFrame:
    """Return a table like the recorded table: rows in any order, some refused, some defaults without a time."""
    rows = []
    for shape in range(shapes):
        kind = KINDS[shape % 3]
        default = draw.choice(("flash", "cudnn", "efficient"))
        queries = draw.choice((1, 4)) if kind == "decode" else 512
        for backend in BACKENDS:
            ms = math.exp(draw.real(-3, 3))
            kernels = [
                *draw.choice(([], ["Memset"])),
                draw.choice(("sdpa_sm80_wmma", "sdpa_sm90_wgmma")),
                *draw.choice(([], ["lean_reduction_kernel"])),
            ]
            status = "ok"
            if backend != "math" and draw.size(1, 6) == 1:
                status = draw.choice(("refused", "failed", "out of memory"))
                # a failed row may have a time, which must not count
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


def _share(rows: pd.DataFrame, word: str) -> float:
    """Return the share of rows with a word in the name of a kernel."""
    return float(rows["kernels"].map(lambda names: any(word in name for name in names)).mean())


def _of_cudnn(rows: pd.DataFrame, queries: int) -> pd.DataFrame:
    return rows[(rows["kind"] == "decode") & (rows["backend"] == "cudnn") & (rows["seq_len_q"] == queries)]


def answers(grid: pd.DataFrame) -> dict:
    """Return the right answers to Question 6.1 for a table."""
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
    """Return whether every answer exists, no answer depends on a tie, and each known mistake changes an answer."""
    try:
        right = answers(grid)
        wrong = _answer_mistakes(grid, right)
    except (KeyError, ZeroDivisionError, ValueError):
        return False
    told_apart = all(0 < right[key] < math.inf and right[key] not in numbers.values() for key, numbers in wrong.items())
    counts = right["decode_winner"]
    tie = len(counts) > 1 and counts.iloc[0] == counts.iloc[1]
    default = grid[grid["is_default"] & (grid["kind"] == "decode")]["backend"]
    others = (fastest(grid).value_counts().idxmax(), default.value_counts().idxmax())
    return told_apart and not tie and counts.idxmax() not in others


def usable_grid(draw: Draw) -> pd.DataFrame:
    """Return a random table for which `_usable` holds."""
    while not _usable(grid := random_grid(draw)):
        pass
    return grid


def repeat_table(grid: pd.DataFrame, draw: Draw, copies: int = 60) -> pd.DataFrame:
    """Repeat a table many times, with its rows in any order. The answers stay, and the product of losses overflows."""
    tables = [grid.assign(shape=grid["shape"] + 1000 * i, ms=grid["ms"] * draw.real(0.5, 2)) for i in range(copies)]
    return pd.concat(tables, ignore_index=True).sample(frac=1, random_state=draw.size(0, 10**6))


def _answer_mistakes(grid: pd.DataFrame, right: dict) -> dict[str, dict[str, float]]:
    """Return the known mistakes in Question 6.1: {key of an answer: {hint: the number that the mistake leads to}}."""
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
        "sm80_one_query": {
            CUDNN_ONE: _share(cudnn, "sm80"),
            "Rows of cuDNN alone count.": _share(decode[decode["seq_len_q"] == 1], "sm80"),
        },
        "splits_four_queries": {CUDNN_FOUR: _share(cudnn, "reduction")},
    }


@check("6.1", "The case of two kernels")
def grid_answers(grid_answers, seed=None):
    """Check random tables, one of them with a product of losses that overflows."""
    draw = Draw(seed)
    tables = [usable_grid(draw) for _ in range(2)]
    for grid in (*tables, repeat_table(tables[0], draw)):
        right = answers(grid)
        got = expect_answers(grid_answers, grid)
        winner = right["decode_winner"].idxmax()
        if got["decode_winner"] != winner:
            raise AssertionError(f"decode_winner is {got['decode_winner']!r}, expected {winner!r}. {IN_DECODE}")
        hints = _answer_mistakes(grid, right)
        for key in hints:
            what = f"{key} of a table with {grid['shape'].nunique()} shapes"
            expect_value(got[key], right[key], "", what, hints[key], rel=1e-9)
