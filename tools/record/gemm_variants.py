"""Time a way out of the GEMM's weak short products against torch.matmul: C stored from registers, without TMA.

    python -m tools.record.gemm_variants --out assets/results/h200/gemm_variants.json

The shapes are those of `tools.record.gemm_shapes`. At each, these run in turns, with a warm L2:

    chosen     what `gemm_warp_specialized` takes today
    direct     the same tile, C stored from registers: a short product need not fetch C's TMA descriptor first
    small      the tile of 64 x 64 in one part, C from registers: the most tiles, and the shortest way in and out

The summary says what the best of them would give, and what a rule would: `direct` where the model's estimate is under
DIRECT_BELOW_US.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import torch

from tools.record.common import Record, arguments_parser
from tools.record.gemm_choice import SMS, interleaved_us, late_rows
from tools.record.gemm_shapes import draw_shapes, operands, relative_error

DIRECT_BELOW_US = 12.0  # of the model's time, which has a cold L2


def sizes_and_late(shape: dict) -> tuple:
    """Return what the model takes of a shape: its three sizes, the multiprocessors, and which rows are late."""
    return shape["m"], shape["n"], shape["k"], SMS, late_rows(shape)


def rule(shape: dict) -> str:
    """Name the way that the rule takes at a shape."""
    from utils.kernels import gemm_gluon

    m, n, k, sms, late = sizes_and_late(shape)
    estimate = gemm_gluon.estimate(m, n, k, gemm_gluon.choose(m, n, k, sms, late), sms, late)
    return "direct" if estimate < DIRECT_BELOW_US else "chosen"


def ways_of(shape: dict) -> dict:
    """Return the configurations to time at a shape, by name."""
    from utils.kernels import gemm_gluon

    chosen = gemm_gluon.choose(*sizes_and_late(shape))
    ways = {"chosen": chosen, "direct": replace(chosen, by_tma=False)}
    if rule(shape) == "direct":
        smallest = min(gemm_gluon.CONFIGS, key=lambda config: config.block_m * config.block_n)
        ways["small"] = replace(smallest, by_tma=False)
    return ways


def shape_row(shape: dict) -> dict:
    """Time the ways at a shape, and compare each with float64."""
    from utils.kernels import gemm_gluon

    a, b = operands(shape)
    calls, errors = {"torch": lambda: torch.matmul(a, b)}, {"torch": relative_error(torch.matmul(a, b), a, b)}
    for name, config in ways_of(shape).items():
        c, launch = gemm_gluon.gemm_and_launch(a, b, config)
        errors[name] = relative_error(c, a, b)
        calls[name] = lambda launch=launch: launch(a, b)
    times = interleaved_us(list(calls.values()), flush=False)
    return shape | {"us": dict(zip(calls, times, strict=True)), "errors": errors, "rule": rule(shape)}


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    us = row["us"]
    ratios = "  ".join(f"{name} {us['torch'] / us[name]:.3f}x" for name in us if name != "torch")
    return f"{row['m']:>6} x {row['n']:>6} x {row['k']:>6} torch {us['torch']:8.1f} us  {ratios}  rule: {row['rule']}"


def summary(rows: list[dict]) -> dict:
    """Return, for each way, the geometric mean of torch's time over its own, and how many shapes are under 0.90."""
    ways = {
        "chosen": lambda us, row: us["chosen"],
        "rule": lambda us, row: us[row["rule"]],
        "best": lambda us, row: min(us[name] for name in us if name != "torch"),
    }
    found = {}
    for name, pick in ways.items():
        ratios = [row["us"]["torch"] / pick(row["us"], row) for row in rows]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        found[name] = {"geometric_mean": mean, "smallest": min(ratios), "under_0.90": sum(r < 0.9 for r in ratios)}
    return found


def main() -> int:
    """Measure and record the table; return the exit status."""
    parser = arguments_parser(__doc__, pairs=7)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: the ways are timed on an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    record = Record(options.out, "GEMM: stores from registers", "cuda", options.seconds)
    complete = record.fill(draw_shapes(), shape_row, show)
    record.contents["summary"] = summary(record.contents["rows"])
    print(record.contents["summary"])
    record.finish() if complete else record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
