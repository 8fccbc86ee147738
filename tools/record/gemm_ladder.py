"""Time the GEMM kernels of `utils.kernels` against torch.matmul on a GPU, in bf16 on square matrices.

    python -m tools.record.gemm_ladder --out assets/results/h200/gemm.json

Each kernel is interleaved with torch.matmul on the same operands. Ratio: time of torch.matmul / time of the kernel.
"""

from __future__ import annotations

import functools
import itertools

import torch

from tools.record.common import Record, arguments_parser, relative_difference
from utils.benchmark.measuring import compare
from utils.kernels.gemm import LADDER

SIZES = (512, 1024, 2048, 4096, 8192)
NAIVE_UP_TO = 4096  # beyond it one call of the three loops takes too long to repeat
ERROR_UP_TO = 2048  # the float64 product of larger matrices takes too long


@functools.lru_cache(maxsize=1)  # the rungs of one size come one after the other
def operands(size: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Draw A and B, size x size in bf16; return them and, up to ERROR_UP_TO, their product in float64."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in "ab")
    return a, b, a.double() @ b.double() if size <= ERROR_UP_TO else None


def rung_row(size: int, name: str, device: str = "cuda", max_seconds: float = 1.0) -> dict:
    """Measure one rung against torch.matmul at one size; a rung that does not run there has the reason in its row."""
    row = {"kernel": name, "size": size, "dtype": "bf16"}
    if name == "gemm_naive" and size > NAIVE_UP_TO:
        return row | {"skipped": f"the three loops are timed up to {NAIVE_UP_TO}"}
    a, b, exact = operands(size, device)
    try:
        c = LADDER[name](a, b)
    except ValueError as error:  # the last rung on a GPU that is not a Hopper
        return row | {"skipped": str(error)}
    options = dict(flops=2 * size**3, dtype=a.dtype, max_seconds=max_seconds, warmup=3, iterations=50)
    pair = compare(torch.matmul, LADDER[name], a, b, labels=("torch.matmul", name), **options)
    return row | {
        "tflops": pair.b.tflops,
        "torch_tflops": pair.a.tflops,
        "ratio": pair.speedup,
        "interval": list(pair.interval),
        "verdict": pair.verdict,
        "relative_error": None if exact is None else relative_difference(c, exact),
        "median_ms": pair.b.median_ms,
        "torch_median_ms": pair.a.median_ms,
        "samples_ms": list(pair.b.samples_ms),
        "torch_samples_ms": list(pair.a.samples_ms),
        "method": pair.b.method,
    }


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    start = f"{row['kernel']:<22}{row['size']:>6}"
    if "skipped" in row:
        return f"{start}  {row['skipped']}"
    return f"{start}{row['tflops']:9.1f} TFLOP/s{row['ratio']:7.2f}x torch.matmul"


def main(arguments: list[str] | None = None) -> None:
    """Measure and record the ladder."""
    record = Record(arguments_parser(__doc__).parse_args(arguments), "GEMM ladder against torch.matmul", "cuda")
    record.fill(itertools.product(SIZES, LADDER), lambda point: rung_row(*point), show)
    record.finish()


if __name__ == "__main__":
    main()
