"""The timer against itself and against Triton's: `python -m utils.bench.timer_check --json PATH`, on a GPU.

A/A: `compare` with the same bf16 matmul on both sides; how many of the ratios lie within 1% and 3% of 1.
Agreement: the median of `measure` against that of `triton.testing.do_bench`, cold L2, one launch a sample.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from utils.environment import environment
from utils.measuring import compare, measure

SIZES = (1024, 2048, 4096)


def square(n: int) -> torch.Tensor:
    return torch.randn(n, n, device="cuda", dtype=torch.bfloat16)


def against_itself(n: int, trials: int) -> dict:
    """Compare an n-cubed matmul with itself `trials` times."""
    a, b = square(n), square(n)
    measure(torch.mm, a, b, max_seconds=0.5, target_interval=0.001)  # let the clocks settle
    results = [compare(torch.mm, torch.mm, a, b, warmup=3, iterations=100) for _ in range(trials)]
    ratios = [result.speedup for result in results]
    return {
        "n": n,
        "median_us": statistics.median(result.a.median_ms for result in results) * 1e3,
        "trials": trials,
        "within_1_percent": sum(abs(ratio - 1) <= 0.01 for ratio in ratios) / trials,
        "within_3_percent": sum(abs(ratio - 1) <= 0.03 for ratio in ratios) / trials,
        "verdicts": {name: sum(r.verdict == name for r in results) for name in sorted({r.verdict for r in results})},
        "ratios": ratios,
    }


def against_do_bench(name: str, fn, *arguments, rounds: int = 5) -> dict:
    """Medians of both timers, taken in turn because clocks drift."""
    from triton.testing import do_bench

    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(measure(fn, *arguments, l2="cold", iterations=400).median_ms * 1e3)
        theirs.append(do_bench(lambda: fn(*arguments), rep=400, return_mode="median") * 1e3)
    return {
        "kernel": name,
        "measure_us": ours,
        "do_bench_us": theirs,
        "difference": statistics.median(ours) / statistics.median(theirs) - 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the tables to")
    parser.add_argument("--trials", type=int, default=200)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: the timer check needs an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr)
        return 1
    what = "the timer against itself and against do_bench"
    record = {"what": what, "environment": environment("cuda"), "itself": [], "do_bench": []}
    for n in SIZES:
        row = against_itself(n, options.trials)
        record["itself"].append(row)
        print(f"matmul {n:5} against itself: {row['median_us']:7.1f} us, {row['within_1_percent']:.1%} within 1%, "
              f"{row['within_3_percent']:.1%} within 3%, {row['verdicts']}", flush=True)
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for name, call in {
        **{f"matmul {n}": (torch.mm, square(n), square(n)) for n in SIZES},
        "copy 134 MB": (torch.empty_like(x).copy_, x),
        "softmax 8192 x 8192": (torch.softmax, x, -1),
    }.items():
        row = against_do_bench(name, *call)
        record["do_bench"].append(row)
        print(f"{name:20} against do_bench: {statistics.median(row['measure_us']):7.2f} us, {row['difference']:+.2%}",
              flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
