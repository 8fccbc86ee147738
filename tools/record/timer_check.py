"""Check the timer against itself and against Triton's, on a GPU.

    python -m tools.record.timer_check --out assets/results/h200/timer.json

Alone: `measure` times the same bf16 matmul again and again. The table says in how many pairs of measurements the interval
of the one contains the median of the other.

Against itself: `compare` gets the same matmul on both sides. The table says how many of the ratios lie within 1% of 1.

Against Triton: `measure` and `triton.testing.do_bench` in the mode that both have, a cold L2 (256 MB are written before each
call) and one launch a sample. They take turns in many short rounds, each after the same work, so that both find the GPU at
the same clocks. Each round gives a ratio of two medians.
"""

from __future__ import annotations

import itertools
import statistics

import torch

from tools.record.common import Record, arguments_parser
from utils.benchmark import intervals as stats
from utils.benchmark.measuring import compare, measure

SIZES = (1024, 2048, 4096)
SINGLE_SIZES = (768, 2560, 5504, 11776)  # 5 us, 55 us, 500 us and 5 ms on an H200
SINGLES = 20  # measurements of each matmul alone
TRIALS = 200  # comparisons of each matmul with itself
ROUNDS = 30  # of each timer against do_bench
PAIRS = 50  # pairs of samples in each comparison of a matmul with itself
ROUND_MS = 20.0  # time that do_bench spends on one round
LOAD_MS = 5.0  # of the same kernel before each round


def square(n: int) -> torch.Tensor:
    """Draw an (n, n) matrix in bf16 on the GPU."""
    return torch.randn(n, n, device="cuda", dtype=torch.bfloat16)


def shared_kernels() -> dict[str, tuple]:
    """Return the kernels that both timers measure: {name: (function, arguments)}."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return {
        **{f"matmul {n}": (torch.mm, square(n), square(n)) for n in SIZES},
        "copy 134 MB": (torch.empty_like(x).copy_, x),
        "softmax 8192 x 8192": (torch.softmax, x, -1),
    }


def alone(n: int, trials: int) -> dict:
    """Measure an n-cubed matmul `trials` times, each by itself, and compare all pairs of these measurements."""
    a, b = square(n), square(n)
    results = [measure(torch.mm, a, b) for _ in range(trials)]
    pairs = list(itertools.permutations(results, 2))
    apart = [abs(y.median_ms / x.median_ms - 1) for x, y in pairs]
    return {
        "n": n,
        "median_us": 1e3 * statistics.median(result.median_ms for result in results),
        "trials": trials,
        "contained": sum(x.interval_ms[0] <= y.median_ms <= x.interval_ms[1] for x, y in pairs) / len(pairs),
        "within_1_percent": sum(share <= 0.01 for share in apart) / len(pairs),
        "furthest": max(apart),
        "half_width": statistics.median(stats.relative_half_width(r.interval_ms, r.median_ms) for r in results),
        "seconds": statistics.median(result.method["seconds"] for result in results),
        "medians_us": [1e3 * result.median_ms for result in results],
        "intervals_us": [[1e3 * edge for edge in result.interval_ms] for result in results],
    }


def against_itself(n: int, trials: int) -> dict:
    """Compare an n-cubed matmul with itself `trials` times."""
    a, b = square(n), square(n)
    measure(torch.mm, a, b)  # let the clocks settle
    results = [compare(torch.mm, torch.mm, a, b, warmup=3, iterations=PAIRS) for _ in range(trials)]
    return {
        "n": n,
        "median_us": 1e3 * statistics.median(result.a.median_ms for result in results),
        "trials": trials,
        "within_1_percent": sum(abs(result.speedup - 1) <= 0.01 for result in results) / trials,
        "furthest": max(abs(result.speedup - 1) for result in results),
        "intervals_that_hold_1": sum(low <= 1 <= high for low, high in (r.interval for r in results)) / trials,
        "verdicts": {name: sum(r.verdict == name for r in results) for name in sorted({r.verdict for r in results})},
    }


def against_do_bench(name: str, fn, *arguments, rounds: int) -> dict:
    """Measure a kernel with both timers in turn: the medians over the rounds, and the median of the rounds' ratios."""
    from triton.testing import do_bench

    def call() -> None:
        fn(*arguments)

    count = len(do_bench(call, warmup=LOAD_MS, rep=ROUND_MS, return_mode="all"))
    load = max(1, int(LOAD_MS / measure(call, iterations=5).median_ms))
    medians_us: dict[str, list[float]] = {"measure": [], "do_bench": []}
    for turn in range(rounds):
        for timer in ("measure", "do_bench") if turn % 2 == 0 else ("do_bench", "measure"):
            for _ in range(load):
                call()
            if timer == "measure":
                # A budget keeps the round as short as the other timer's.
                options = dict(l2="cold", warmup=2, iterations=count, max_seconds=8e-3 * ROUND_MS)
                times = measure(call, **options).samples_ms
            else:
                times = do_bench(call, warmup=1, rep=ROUND_MS, return_mode="all")
            medians_us[timer].append(1e3 * statistics.median(times))
    ratios = [own / other for own, other in zip(*medians_us.values(), strict=True)]
    low, high = stats.repeat_interval(ratios)
    return {
        "kernel": name,
        "rounds": rounds,
        "measure_us": statistics.median(medians_us["measure"]),
        "do_bench_us": statistics.median(medians_us["do_bench"]),
        "difference": statistics.median(ratios) - 1,
        "interval": [low - 1, high - 1],
    }


def show(row: dict) -> str:
    """Return the line that is printed for a row: its numbers, without the lists."""
    cells = {name: value for name, value in row.items() if not isinstance(value, list)}
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in cells.items())


def main() -> None:
    """Measure and record the tables."""
    record = Record(arguments_parser(__doc__).parse_args(), "the timer against itself and against do_bench", "cuda")
    record.fill(SINGLE_SIZES, lambda n: alone(n, SINGLES), show, "alone")
    record.fill(SIZES, lambda n: against_itself(n, TRIALS), show, "itself")
    kernels = shared_kernels()
    record.fill(kernels, lambda name: against_do_bench(name, *kernels[name], rounds=ROUNDS), show, "do_bench")
    record.finish()


if __name__ == "__main__":
    main()
