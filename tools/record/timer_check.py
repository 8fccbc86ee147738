"""The timer against itself and against Triton's: `python -m tools.record.timer_check --json PATH`, on a GPU.

A/A: `compare` with the same bf16 matmul on both sides; how many of the ratios lie within 1% and 3% of 1, and how wide
the intervals are that it gives them.

Agreement: `measure` and `triton.testing.do_bench` in the mode they share, a cold L2 (256 MB written before each call)
and one launch a sample. They take turns in many short rounds, each as many samples as the other and after the same
work, so that both find the GPU at the same clocks; each round gives a ratio of two medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from utils.benchmark import intervals as stats
from utils.benchmark.measuring import compare, measure
from utils.files import write_whole
from utils.machine.environment import environment

SIZES = (1024, 2048, 4096)
PAIRS = 50  # pairs of samples in each comparison of a matmul with itself
ROUNDS = 30  # of either timer
ROUND_MS = 20.0  # what do_bench spends on one
LOAD_MS = 5.0  # of the same kernel before either timer's turn


def square(n: int) -> torch.Tensor:
    return torch.randn(n, n, device="cuda", dtype=torch.bfloat16)


def shared_kernels() -> dict[str, tuple]:
    """What both timers time: (function, arguments)."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return {
        **{f"matmul {n}": (torch.mm, square(n), square(n)) for n in SIZES},
        "copy 134 MB": (torch.empty_like(x).copy_, x),
        "softmax 8192 x 8192": (torch.softmax, x, -1),
    }


def against_itself(n: int, trials: int) -> dict:
    """Compare an n-cubed matmul with itself `trials` times."""
    a, b = square(n), square(n)
    measure(torch.mm, a, b, max_seconds=0.5, target_interval=0.001)  # let the clocks settle
    results = [compare(torch.mm, torch.mm, a, b, warmup=3, iterations=PAIRS) for _ in range(trials)]
    ratios = [result.speedup for result in results]
    intervals = [result.interval for result in results]
    return {
        "n": n,
        "median_us": statistics.median(result.a.median_ms for result in results) * 1e3,
        "trials": trials,
        "pairs": PAIRS,
        "within_1_percent": sum(abs(ratio - 1) <= 0.01 for ratio in ratios) / trials,
        "within_3_percent": sum(abs(ratio - 1) <= 0.03 for ratio in ratios) / trials,
        "furthest": max(abs(ratio - 1) for ratio in ratios),
        "interval_half_width": statistics.median((high - low) / 2 for low, high in intervals),
        "intervals_that_hold_1": sum(low <= 1 <= high for low, high in intervals) / trials,
        "verdicts": {name: sum(r.verdict == name for r in results) for name in sorted({r.verdict for r in results})},
        "gpu_after": results[-1].a.method["gpu_after"],
        "ratios": ratios,
    }


def against_do_bench(name: str, fn, *arguments, rounds: int = ROUNDS) -> dict:
    """Both timers in turn: each round's medians, and the median of the rounds' ratios with its interval."""
    from triton.testing import do_bench

    def call() -> None:
        fn(*arguments)

    count = len(do_bench(call, warmup=LOAD_MS, rep=ROUND_MS, return_mode="all"))
    once_ms = measure(call, iterations=20, floor=False).median_ms
    ours, theirs = [], []
    for turn in range(rounds):
        for mine in (True, False) if turn % 2 == 0 else (False, True):
            for _ in range(max(1, int(LOAD_MS / once_ms))):
                call()
            if mine:
                times = measure(call, l2="cold", warmup=2, iterations=count, floor=False).samples_ms
            else:
                times = do_bench(call, warmup=1, rep=ROUND_MS, return_mode="all")
            (ours if mine else theirs).append(statistics.median(times) * 1e3)
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, high = stats.median_interval(ratios)
    return {
        "kernel": name,
        "rounds": rounds,
        "samples_a_round": count,
        "measure_us": statistics.median(ours),
        "do_bench_us": statistics.median(theirs),
        "difference": statistics.median(ratios) - 1,
        "interval": [low - 1, high - 1],
        # How far each timer's own rounds lie apart: no agreement can be closer than that.
        "measure_spread": spread(ours),
        "do_bench_spread": spread(theirs),
        "measure_rounds_us": ours,
        "do_bench_rounds_us": theirs,
    }


def spread(rounds: list[float]) -> float:
    """The distance from the 10th to the 90th percentile, as a share of the median."""
    return (stats.percentile(rounds, 90) - stats.percentile(rounds, 10)) / statistics.median(rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the tables to")
    parser.add_argument("--trials", type=int, default=200, help="comparisons of each matmul with itself")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of either timer")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: the timer check needs an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr)
        return 1
    what = "the timer against itself and against do_bench"
    record = {"what": what, "environment": environment("cuda"), "itself": [], "do_bench": []}

    def keep(table: str, row: dict) -> None:
        record[table].append(row)
        if options.json:
            write_whole(options.json, json.dumps(record, indent=1) + "\n")

    for n in SIZES:
        # The shortest one is launched 33 times a sample, and there only the intervals promise something.
        row = against_itself(n, options.trials if n >= 2048 else max(1, options.trials // 4))
        keep("itself", row)
        print(
            f"matmul {n:5} against itself: {row['median_us']:7.1f} us, {row['within_1_percent']:.1%} within 1%, "
            f"{row['within_3_percent']:.1%} within 3%, intervals +-{row['interval_half_width']:.2%}, "
            f"{row['verdicts']}",
            flush=True,
        )
    for name, call in shared_kernels().items():
        row = against_do_bench(name, *call, rounds=options.rounds)
        keep("do_bench", row)
        print(
            f"{name:20} against do_bench: {row['measure_us']:7.2f} us, {row['difference']:+.2%} "
            f"[{row['interval'][0]:+.2%}, {row['interval'][1]:+.2%}]; the rounds of either lie "
            f"{row['measure_spread']:.1%} and {row['do_bench_spread']:.1%} apart",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
