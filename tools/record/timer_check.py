"""Check the timer against itself and against Triton's, on a GPU.

    python -m tools.record.timer_check --out assets/results/h200/timer.json

Against itself: `compare` gets the same bf16 matmul on both sides. The table says how many of the ratios lie within 1% and
3% of 1, and how wide the intervals are that `compare` gives them.

Alone: `measure` times the same matmul again and again. The table says how many pairs of these medians lie within 1%, and in
how many the two intervals meet.

Against Triton: `measure` and `triton.testing.do_bench` in the mode that both have, a cold L2 (256 MB are written before each
call) and one launch a sample. They take turns in many short rounds. Each round takes as many samples as the other timer's
and follows the same work, so that both find the GPU at the same clocks. Each round gives a ratio of two medians.
"""

from __future__ import annotations

import itertools
import statistics
import sys

import torch

from tools.record.common import Record, arguments_parser
from utils.benchmark import intervals as stats
from utils.benchmark.measuring import compare, measure

SIZES = (1024, 2048, 4096)
SINGLE_SIZES = (768, 1536, 2048, 2560, 3072, 4096, 8192)
PAIRS = 50  # pairs of samples in each comparison of a matmul with itself
ROUNDS = 30  # rounds of each timer
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


def alone(n: int, trials: int) -> dict:
    """Measure an n-cubed matmul `trials` times, each by itself, and compare all pairs of these measurements."""
    a, b = square(n), square(n)
    measure(torch.mm, a, b, max_seconds=0.5, floor=False)  # let the clocks settle
    results = [measure(torch.mm, a, b, floor=False) for _ in range(trials)]
    pairs = list(itertools.combinations(results, 2))
    ratios = [max(x.median_ms, y.median_ms) / min(x.median_ms, y.median_ms) for x, y in pairs]
    meet = [max(x.interval_ms[0], y.interval_ms[0]) <= min(x.interval_ms[1], y.interval_ms[1]) for x, y in pairs]
    return {
        "n": n,
        "median_us": 1e3 * statistics.median(result.median_ms for result in results),
        "trials": trials,
        "within_1_percent": sum(ratio <= 1.01 for ratio in ratios) / len(pairs),
        "furthest": max(ratios) - 1,
        "within_1_percent_or_intervals_meet": sum(ratio <= 1.01 or met for ratio, met in zip(ratios, meet, strict=True))
        / len(pairs),
        "interval_half_width": statistics.median(
            (r.interval_ms[1] - r.interval_ms[0]) / 2 / r.median_ms for r in results
        ),
        "stopped": sorted({result.method["stopped"] for result in results})[:3],
        "medians_us": [1e3 * result.median_ms for result in results],
    }


def show_alone(row: dict) -> str:
    """Return the line that is printed for a matmul that was measured again and again."""
    return (
        f"matmul {row['n']:5} alone: {row['median_us']:7.1f} us, {row['within_1_percent']:.1%} of pairs within 1% (furthest "
        f"{row['furthest']:.1%}), {row['within_1_percent_or_intervals_meet']:.1%} within it or with intervals that meet, "
        f"intervals +-{row['interval_half_width']:.2%}"
    )


def against_do_bench(name: str, fn, *arguments, rounds: int = ROUNDS) -> dict:
    """Measure a kernel with both timers in turn.

    Args:
        name: name of the kernel, for the row.
        fn: the kernel's function.
        *arguments: its arguments.
        rounds: rounds of each timer.

    Returns:
        The medians of each round in microseconds, and the median of the rounds' ratios with its interval.
    """
    from triton.testing import do_bench

    def call() -> None:
        fn(*arguments)

    count = len(do_bench(call, warmup=LOAD_MS, rep=ROUND_MS, return_mode="all"))
    once_ms = measure(call, iterations=20, floor=False).median_ms
    measure_us: list[float] = []
    do_bench_us: list[float] = []
    for turn in range(rounds):
        for own_turn in (True, False) if turn % 2 == 0 else (False, True):
            for _ in range(max(1, int(LOAD_MS / once_ms))):
                call()
            if own_turn:
                times = measure(call, l2="cold", warmup=2, iterations=count, floor=False).samples_ms
            else:
                times = do_bench(call, warmup=1, rep=ROUND_MS, return_mode="all")
            (measure_us if own_turn else do_bench_us).append(statistics.median(times) * 1e3)
    ratios = [own / other for own, other in zip(measure_us, do_bench_us, strict=True)]
    low, high = stats.median_interval(ratios)
    return {
        "kernel": name,
        "rounds": rounds,
        "samples_a_round": count,
        "measure_us": statistics.median(measure_us),
        "do_bench_us": statistics.median(do_bench_us),
        "difference": statistics.median(ratios) - 1,
        "interval": [low - 1, high - 1],
        # How far a timer's own rounds differ: the two timers cannot agree better than that.
        "measure_spread": spread(measure_us),
        "do_bench_spread": spread(do_bench_us),
        "measure_rounds_us": measure_us,
        "do_bench_rounds_us": do_bench_us,
    }


def spread(rounds: list[float]) -> float:
    """Return the distance from the 10th to the 90th percentile as a share of the median."""
    return (stats.percentile(rounds, 90) - stats.percentile(rounds, 10)) / statistics.median(rounds)


def show_itself(row: dict) -> str:
    """Return the line that is printed for a matmul against itself."""
    return (
        f"matmul {row['n']:5} against itself: {row['median_us']:7.1f} us, {row['within_1_percent']:.1%} within 1%, "
        f"{row['within_3_percent']:.1%} within 3%, intervals +-{row['interval_half_width']:.2%}, {row['verdicts']}"
    )


def show_do_bench(row: dict) -> str:
    """Return the line that is printed for a kernel that both timers measured."""
    low, high = row["interval"]
    return (
        f"{row['kernel']:20} against do_bench: {row['measure_us']:7.2f} us, {row['difference']:+.2%} "
        f"[{low:+.2%}, {high:+.2%}]; rounds differ by {row['measure_spread']:.1%} (measure) and "
        f"{row['do_bench_spread']:.1%} (do_bench)"
    )


def main() -> int:
    """Measure and record both tables; return the exit status."""
    parser = arguments_parser(__doc__)
    parser.add_argument("--trials", type=int, default=200, help="comparisons of each matmul with itself")
    parser.add_argument("--singles", type=int, default=20, help="measurements of each matmul alone")
    parser.add_argument("--only-alone", action="store_true", help="measure this table alone")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each timer")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: the timer check needs an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr)
        return 1
    record = Record(options.out, "the timer against itself and against do_bench", "cuda")

    def itself(n: int) -> dict:
        # The shortest matmul is launched 33 times a sample, and only its intervals promise something.
        return against_itself(n, options.trials if n >= 2048 else max(1, options.trials // 4))

    def do_bench(kernel: tuple) -> dict:
        name, call = kernel
        return against_do_bench(name, *call, rounds=options.rounds)

    complete = record.fill(SINGLE_SIZES, lambda n: alone(n, options.singles), show_alone, "alone")
    if not options.only_alone:
        complete = complete and record.fill(SIZES, itself, show_itself, "itself")
        complete = complete and record.fill(shared_kernels().items(), do_bench, show_do_bench, "do_bench")
    record.finish() if complete else record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
