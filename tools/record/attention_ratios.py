"""Measure the Gluon attention kernel against the other backends (`ratios`), or its five steps against cuDNN (`ladder`).

    python -m tools.record.attention_ratios ratios --out assets/results/h200/attention_ratios.json
    python -m tools.record.attention_ratios ladder --out assets/results/h200/attention_ladder.json
    python -m tools.record.attention_ratios plot --read assets/results/h200/attention_ratios.json --out ratios.svg

Every ratio comes from two backends that are timed in one process, their calls interleaved on the same inputs (bf16, random
normal, forward), so that both run at the same clocks. TFLOP/s count 4 B H Sq Sk D operations, half of them if causal.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tools.record.common import Record, arguments_parser, machine_name, numbers, read_record, save_picture
from utils.attention import attention, find_backend, make_problem
from utils.benchmark.measuring import compare

TOKENS = 16384  # B x S of every point
HEADS = {64: 32, 128: 16, 256: 8}  # model width 2048
CHECKED_LENGTH = 2048  # up to this length the output is also compared with the "math" backend


@functools.lru_cache(maxsize=1)  # the points of one shape come one after the other
def inputs(head_dim: int, length: int, device: str = "cuda") -> list[torch.Tensor]:
    """Draw q, k and v of one shape, (B, H, S, D) in bf16 with B x S = 16384 tokens and H x D = 2048."""
    shape = (max(1, TOKENS // length), HEADS[head_dim], length, head_dim)
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]


@functools.lru_cache(maxsize=1)
def math_output(head_dim: int, length: int, causal: bool) -> torch.Tensor:
    """Compute the output of the "math" backend for one shape and mask."""
    return attention(*inputs(head_dim, length), causal=causal, backend="math")


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return |a - b| / |b| in the Frobenius norm, computed in float64."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def compare_kernels(name: str, kernel: Callable, other_name: str, other: Callable, causal: bool, pairs: int) -> dict:
    """Time `kernel` and `other` in turn: how many times faster `kernel` is, the interval, and both rates.

    Args:
        name: name of the kernel.
        kernel: `partial(function, q, k, v, ...)`.
        other_name: name of the kernel to compare with.
        other: the call of that kernel, on the same tensors.
        causal: whether half of the scores are masked, and so not counted as operations.
        pairs: interleaved pairs of samples.
    """
    q, k = kernel.args[:2]
    flops = 4.0 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.shape[3] * (0.5 if causal else 1.0)
    result = compare(other, kernel, warmup=3, iterations=pairs, labels=(other_name, name), device="cuda")
    return {
        "against": other_name,
        "ratio": result.speedup,
        "interval": list(result.interval),
        "verdict": result.verdict,
        "tflops": flops / result.b.median_ms / 1e9,
        "against_tflops": flops / result.a.median_ms / 1e9,
        "ms": result.b.median_ms,
        "against_ms": result.a.median_ms,
    }


def ratio_row(head_dim: int, length: int, causal: bool, other_name: str, pairs: int) -> dict:
    """Measure the Gluon kernel against one backend at one shape; the reason if that backend refuses the shape."""
    q, k, v = inputs(head_dim, length)
    row = {"head_dim": head_dim, "length": length, "batch": q.shape[0], "heads": q.shape[1], "causal": causal}
    support = find_backend(other_name).support(make_problem(q, k, v, causal=causal))
    if not support:
        return row | {"against": other_name, "refused": support.reason}
    gluon, other = (partial(attention, q, k, v, causal=causal, backend=name) for name in ("gluon", other_name))
    row["difference"] = relative_difference(gluon(), other())
    if length <= CHECKED_LENGTH:
        row["difference_from_math"] = relative_difference(gluon(), math_output(head_dim, length, causal))
    return row | compare_kernels("gluon", gluon, other_name, other, causal, pairs)


def ladder_row(head_dim: int, length: int, causal: bool, step: int, pairs: int) -> dict:
    """Measure one step of the Gluon ladder against cuDNN at one shape."""
    from utils.attention.gluon.launch import describe, forward

    q, k, v = inputs(head_dim, length)
    kernel = partial(forward, q, k, v, causal=causal, step=step)
    cudnn = partial(attention, q, k, v, causal=causal, backend="cudnn")
    row = {"head_dim": head_dim, "length": length, "causal": causal, "plan": describe(step, q, k, causal), "step": step}
    row["difference"] = relative_difference(kernel(), cudnn())
    return row | compare_kernels(f"step {step}", kernel, "cudnn", cudnn, causal, pairs)


def geometric_means(rows: list[dict]) -> dict[str, float]:
    """Average the ratios by head dimension and opponent, for long (8k, 16k) and for short sequences."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if "ratio" in row:
            key = f"D={row['head_dim']} {'long' if row['length'] >= 8192 else 'short'} {row['against']}"
            groups.setdefault(key, []).append(row["ratio"])
    return {key: math.exp(sum(map(math.log, values)) / len(values)) for key, values in groups.items()}


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    name = f"step {row['step']}" if "step" in row else "gluon"
    start = f"D={row['head_dim']:<4} S={row['length']:<6} {'causal' if row['causal'] else 'full':<7}{name:<7} "
    if "refused" in row:
        return f"{start}{row['against']} refuses: {row['refused']}"
    low, high = row["interval"]
    return f"{start}{row['tflops']:7.1f} TFLOP/s  {row['ratio']:.3f}x {row['against']} [{low:.3f}, {high:.3f}]"


def plot(path: Path, out: Path) -> None:
    """Draw a recorded table of ratios; the title says the machine and the commit that it comes from."""
    from utils.visualization.ratios import plot_attention_ratios

    record = read_record(path)
    where = record["environment"]
    title = (
        "How many times faster the Gluon kernel is: bf16 forward, B x S = 16384. "
        f"Recorded on {machine_name(record)}, torch {where['torch']}, commit {where['commit']}."
    )
    save_picture(plot_attention_ratios(record["rows"], title=title)[0], out)


def main(arguments: list[str] | None = None) -> None:
    """Measure and record a table, or draw a recorded one."""
    parser = arguments_parser(__doc__, pairs=15)
    parser.add_argument("table", choices=("ratios", "ladder", "plot"))
    parser.add_argument("--read", type=Path, help="plot: the recorded table of ratios")
    parser.add_argument("--against", default="cudnn,fa3,cute,flash", help="ratios: backends, with commas")
    parser.add_argument("--head-dims", type=numbers, default="64,128,256")
    parser.add_argument("--lengths", type=numbers, default="1024,2048,4096,8192,16384")
    options = parser.parse_args(arguments)
    if options.out is None:
        parser.error("--out names the file to write")
    if (options.table == "plot") != (options.read is not None):
        parser.error("--read names a recorded table of ratios for `plot`, and goes with nothing else")
    if options.table == "plot":
        plot(options.read, options.out)
        return
    torch.manual_seed(0)
    record = Record(options.out, options.table, "cuda", options.seconds, pairs=options.pairs)
    measure_row, variants = (
        (ratio_row, options.against.split(",")) if options.table == "ratios" else (ladder_row, range(1, 6))
    )
    points = itertools.product(options.head_dims, options.lengths, (False, True), variants)
    complete = record.fill(points, lambda point: measure_row(*point, pairs=options.pairs), show)
    if options.table == "ratios":
        record.contents["geometric_means"] = geometric_means(record.contents["rows"])
        for key, mean in record.contents["geometric_means"].items():
            print(f"{key:<28}{mean:.3f}")
    record.finish() if complete else record.save()


if __name__ == "__main__":
    main()
