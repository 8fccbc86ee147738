"""Time the GEMM kernels of `utils.kernels` against torch.matmul on a GPU, in bf16 on square matrices.

    python -m tools.record.gemm_ladder --json assets/results/h200/gemm.json

Each kernel is interleaved with torch.matmul on the same operands. Ratio: time of torch.matmul / time of the kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from utils.benchmark.measuring import compare
from utils.kernels.gemm import DTYPES, LADDER
from utils.machine.environment import environment

SIZES = (512, 1024, 2048, 4096, 8192)
NAIVE_UP_TO = 4096  # beyond it one call of the three loops takes too long to repeat
ERROR_UP_TO = 2048  # the float64 product of larger matrices takes too long


def against_matmul(kernel, name: str, a: torch.Tensor, b: torch.Tensor, max_seconds: float):
    """Compare a kernel with torch.matmul on A (M, K) and B (K, N); max_seconds includes the warm-up."""
    return compare(
        torch.matmul,
        kernel,
        a,
        b,
        flops=2 * a.shape[0] * a.shape[1] * b.shape[1],
        dtype=a.dtype,
        max_seconds=max_seconds,
        warmup=3,
        iterations=50,
        labels=("torch.matmul", name),
    )


def square_operands(size: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Random A and B, size x size, on the GPU."""
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in "ab")
    return a, b


def measure_ladder(
    sizes: Sequence[int] = SIZES, *, dtype: torch.dtype = torch.bfloat16, max_seconds: float = 1.0
) -> dict:
    """Time every rung of the ladder: rows of TFLOP/s and ratios, and the rungs that were skipped, with the reason.

    sizes: M = N = K. max_seconds: time for each pair of kernel and torch.matmul, warm-up included.
    """
    rows, skipped = [], {}
    for size in sizes:
        a, b = square_operands(size, dtype)
        exact = a.double() @ b.double() if size <= ERROR_UP_TO else None
        for name, rung in LADDER.items():
            if name == "gemm_naive" and size > NAIVE_UP_TO:
                skipped[f"{name} {size}"] = f"the three loops are timed up to {NAIVE_UP_TO}"
                continue
            try:
                c = rung(a, b)
            except ValueError as error:  # the last rung on a GPU that is not a Hopper
                skipped[f"{name} {size}"] = str(error)
                continue
            pair = against_matmul(rung, name, a, b, max_seconds)
            error = None if exact is None else ((c.double() - exact).norm() / exact.norm()).item()
            rows.append(
                {
                    "kernel": name,
                    "size": size,
                    "dtype": DTYPES[dtype],
                    "tflops": pair.b.tflops,
                    "torch_tflops": pair.a.tflops,
                    "ratio": pair.ratio,
                    "interval": list(pair.interval),
                    "verdict": pair.verdict,
                    "relative_error": error,
                    "median_ms": pair.b.median_ms,
                    "torch_median_ms": pair.a.median_ms,
                    "samples_ms": list(pair.b.samples_ms),
                    "torch_samples_ms": list(pair.a.samples_ms),
                    "method": pair.b.method,
                }
            )
    return {
        "what": "GEMM ladder against torch.matmul",
        "environment": environment(torch.device("cuda")),
        "rows": rows,
        "skipped": skipped,
    }


def ladder_table(result: dict) -> str:
    """The rows of `measure_ladder` as text: a line for each rung, a column for each size, TFLOP/s and ratio."""
    sizes = sorted({row["size"] for row in result["rows"]})
    cells = {(row["kernel"], row["size"]): f"{row['tflops']:.1f} ({row['ratio']:.2f}x)" for row in result["rows"]}
    # Each rung was interleaved with a torch.matmul of its own: the reference line shows the fastest of those runs.
    for size in sizes:
        best = max(row["torch_tflops"] for row in result["rows"] if row["size"] == size)
        cells["torch.matmul", size] = f"{best:.1f} (1.00x)"
    lines = [f"{'TFLOP/s (ratio)':<22}" + "".join(f"{size:>17}" for size in sizes)]
    for name in (*LADDER, "torch.matmul"):
        lines.append(f"{name:<22}" + "".join(f"{cells.get((name, size), '-'):>17}" for size in sizes))
    return "\n".join(lines)


def print_ladder(path: Path | None) -> None:
    """Measure the ladder, print its table, and write every sample to `path` as JSON if there is one."""
    result = measure_ladder()
    print(f"{torch.cuda.get_device_name()}, bf16, M = N = K; ratio: time of torch.matmul / time of the kernel")
    print(ladder_table(result))
    for rung, reason in result["skipped"].items():
        print(f"  {rung}: {reason}")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {path}")


def main(arguments: list[str] | None = None) -> int:
    """Read the command line and measure; 1 without the GPU that it needs."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.record.gemm_ladder", description="Time the GEMM kernels against torch.matmul in bf16."
    )
    parser.add_argument("--json", metavar="PATH", type=Path, help="write every sample of the ladder there")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "The GEMM kernels are timed on an NVIDIA GPU, and torch finds none here; "
            "run_interpreted in utils.kernels.interpreter shows what they compute.",
            file=sys.stderr,
        )
        return 1
    print_ladder(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
