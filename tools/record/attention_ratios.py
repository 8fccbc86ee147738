"""Tables of this GPU's attention providers: `ratios` (Gluon against the others) and `ladder` (its five steps).

    python -m tools.record.attention_ratios ratios --out assets/results/h200/attention_ratios.json
    python -m tools.record.attention_ratios ladder --out assets/results/h200/attention_ladder.json
    python -m tools.record.attention_ratios plot --read assets/results/h200/attention_ratios.json --out ratios.svg

Every ratio comes from two providers timed in one process, their calls interleaved on the same inputs (bf16, random
normal, forward), so that both run at the same clocks. TFLOP/s count 4 B H Sq Sk D operations, half of them if causal.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from functools import partial
from pathlib import Path

import torch

from utils.attention import attention, find_backend, make_problem
from utils.benchmark.measuring import compare
from utils.machine.environment import environment

TOKENS = 16384  # B x S of every point
HEADS = {64: 32, 128: 16, 256: 8}  # model width 2048


def inputs(head_dim: int, length: int, device: str = "cuda") -> list[torch.Tensor]:
    """q, k, v of one point: B x S = 16384 tokens, width 2048."""
    shape = (max(1, TOKENS // length), HEADS[head_dim], length, head_dim)
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]


def operations(q: torch.Tensor, k: torch.Tensor, causal: bool) -> float:
    """Floating-point operations of one forward pass; a causal mask halves them."""
    return 4.0 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.shape[3] * (0.5 if causal else 1.0)


def against(name: str, call, other_name: str, other, flops: float, pairs: int) -> dict:
    """One comparison: how many times faster `call` is than `other`, with its interval, and both rates."""
    result = compare(other, call, warmup=3, iterations=pairs, labels=(other_name, name), device="cuda")
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


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def ratios(head_dims, lengths, others, pairs: int, show) -> list[dict]:
    """Gluon against each other provider at each point."""
    rows = []
    for head_dim in head_dims:
        for length in lengths:
            q, k, v = inputs(head_dim, length)
            for causal in (False, True):
                flops = operations(q, k, causal)
                expected = attention(q, k, v, causal=causal, backend="math") if length <= 2048 else None
                for other in others:
                    row = {
                        "head_dim": head_dim,
                        "length": length,
                        "batch": q.shape[0],
                        "heads": q.shape[1],
                        "causal": causal,
                    }
                    support = find_backend(other).support(make_problem(q, k, v, causal=causal))
                    if not support:
                        rows.append(row | {"against": other, "refused": support.reason})
                        continue
                    mine, theirs = (
                        partial(attention, q, k, v, causal=causal, backend=name) for name in ("gluon", other)
                    )
                    row["difference"] = relative_difference(mine(), theirs())
                    if expected is not None:
                        row["difference_from_math"] = relative_difference(mine(), expected)
                    rows.append(row | against("gluon", mine, other, theirs, flops, pairs))
                    show(rows)
    return rows


def ladder(head_dims, lengths, pairs: int, show) -> list[dict]:
    """Each step of the Gluon ladder against cuDNN."""
    from utils.attention.gluon.launch import describe, forward

    rows = []
    for head_dim in head_dims:
        for length in lengths:
            q, k, v = inputs(head_dim, length)
            for causal in (False, True):
                flops = operations(q, k, causal)
                theirs = partial(attention, q, k, v, causal=causal, backend="cudnn")
                for step in range(1, 6):
                    mine = partial(forward, q, k, v, causal=causal, step=step)
                    row = {
                        "head_dim": head_dim,
                        "length": length,
                        "causal": causal,
                        "plan": describe(step, q, k, causal),
                        "step": step,
                        "difference": relative_difference(mine(), theirs()),
                    }
                    rows.append(row | against(f"step {step}", mine, "cudnn", theirs, flops, pairs))
                    show(rows)
    return rows


def geometric_means(rows: list[dict]) -> dict:
    """Geometric mean of the ratio by head dimension and opponent, for long (8k, 16k) and short sequences."""
    means = {}
    for row in rows:
        if "ratio" in row:
            key = f"D={row['head_dim']} {'long' if row['length'] >= 8192 else 'short'} {row['against']}"
            means.setdefault(key, []).append(row["ratio"])
    return {key: math.exp(sum(map(math.log, values)) / len(values)) for key, values in means.items()}


def plot(read: Path, out: Path) -> None:
    """Draw a recorded table of ratios, with the machine and the commit it comes from."""
    from utils.visualization.ratios import plot_attention_ratios

    record = json.loads(read.read_text())
    where = record["environment"]
    figure, _ = plot_attention_ratios(
        record["rows"],
        title="How many times faster the Gluon kernel is: bf16 forward, B x S = 16384. Recorded on "
        f"{where['gpu']}, torch {where['torch']}, commit {where['commit']}.",
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    print(f"wrote {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=("ratios", "ladder", "plot"))
    parser.add_argument("--out", type=Path, required=True, help="JSON file, written after each point; plot: a picture")
    parser.add_argument("--read", type=Path, help="plot: the recorded table of ratios")
    parser.add_argument("--against", default="cudnn,cute,flash", help="providers, with commas")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time, with what there is")
    args = parser.parse_args()
    if (args.table == "plot") != (args.read is not None):
        parser.error("--read names a recorded table of ratios for `plot`, and goes with nothing else")
    if args.table == "plot":
        plot(args.read, args.out)
        return
    torch.manual_seed(0)
    start = time.monotonic()
    record = {"table": args.table, "environment": environment("cuda"), "pairs": args.pairs, "rows": []}
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def show(rows: list[dict]) -> None:
        row = rows[-1]
        name = f"step {row['step']}" if "step" in row else "gluon"
        print(
            f"D={row['head_dim']:<4} S={row['length']:<6} {'causal' if row['causal'] else 'full':<7}{name:<7} "
            f"{row['tflops']:7.1f} TFLOP/s  {row['ratio']:.3f}x {row['against']} "
            f"[{row['interval'][0]:.3f}, {row['interval'][1]:.3f}]",
            flush=True,
        )
        record["rows"] = rows
        record["geometric_means"] = geometric_means(rows) if args.table == "ratios" else {}
        record["complete"] = False
        args.out.write_text(json.dumps(record, indent=1, default=str))
        if time.monotonic() - start > args.seconds:
            raise TimeoutError

    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    try:
        if args.table == "ratios":
            others = args.against.split(",")
            record["rows"] = ratios(numbers(args.head_dims), numbers(args.lengths), others, args.pairs, show)
        else:
            record["rows"] = ladder(numbers(args.head_dims), numbers(args.lengths), args.pairs, show)
        record["complete"] = True
        args.out.write_text(json.dumps(record, indent=1, default=str))
    except TimeoutError:
        print(f"stopped after {args.seconds:g} s, before the table was complete")
    for key, mean in record.get("geometric_means", {}).items():
        print(f"{key:<28}{mean:.3f}")


if __name__ == "__main__":
    main()
