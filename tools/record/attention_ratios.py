"""Measure the Gluon attention kernel against the other backends (`ratios`, `random`), or its five steps (`ladder`).

    python -m tools.record.attention_ratios ratios --out assets/results/h200/attention_ratios.json
    python -m tools.record.attention_ratios random --out assets/results/h200/attention_random.json
    python -m tools.record.attention_ratios ladder --out assets/results/h200/attention_ladder.json

Every ratio comes from two backends that are timed in one process, their calls interleaved on the same inputs (bf16, random
normal, forward), so that both run at the same clocks. `ratios` times all backends of a point in turns. TFLOP/s count 4 B H Sq Sk D operations, half of them if causal.
`random` draws forty shapes by seed (`--seed`), and times all backends that take a shape in turns: its ratio is that to the fastest of them.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch

from tools.record.common import Record, arguments_parser, relative_difference
from utils.attention import attention, find_backend, make_problem
from utils.attention.reference import reference
from utils.benchmark import intervals as stats
from utils.benchmark.measuring import compare, measure_together
from utils.benchmark.result import Measurement

TOKENS = 16384  # B x S of every point
HEADS = {64: 32, 128: 16, 256: 8}  # model width 2048
LENGTHS = (1024, 2048, 4096, 8192, 16384)
OTHERS = ("cudnn", "fa3", "cute", "flash")


@functools.lru_cache(maxsize=1)  # the points of one shape come one after the other
def inputs(head_dim: int, length: int) -> list[torch.Tensor]:
    """Draw q, k and v of one shape, (B, H, S, D) in bf16 with B x S = 16384 tokens and H x D = 2048."""
    shape = (max(1, TOKENS // length), HEADS[head_dim], length, head_dim)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def speed_of(kernel: Measurement, other: Measurement, flops: float) -> dict:
    """Return how many times faster `kernel` is than `other`, timed in turns, with the interval, both rates and both times."""
    return {
        "ratio": stats.speedup(other.samples_ms, kernel.samples_ms),
        "interval": list(stats.speedup_interval(other.samples_ms, kernel.samples_ms)),
        "tflops": flops / kernel.median_ms / 1e9,
        "against_tflops": flops / other.median_ms / 1e9,
        "ms": kernel.median_ms,
        "against_ms": other.median_ms,
    }


def flops_of(q: torch.Tensor, causal: bool) -> float:
    """Return the operations of attention whose queries and keys have one shape: those of masked scores do not count."""
    return 4.0 * q.shape[0] * q.shape[1] * q.shape[2] ** 2 * q.shape[3] * (0.5 if causal else 1.0)


@functools.lru_cache(maxsize=1)  # the rows of one point come one after the other
def timed_point(head_dim: int, length: int, causal: bool, pairs: int) -> dict[str, dict]:
    """Time the Gluon kernel and all other backends that take a shape, in turns; return what each one's row says."""
    q, k, v = inputs(head_dim, length)
    problem, calls, rows = make_problem(q, k, v, causal=causal), dict[str, Callable](), dict[str, dict]()
    for name in ("gluon", *OTHERS):
        if support := find_backend(name).support(problem):
            calls[name] = partial(attention, q, k, v, causal=causal, backend=name)
        else:
            rows[name] = {"refused": support.reason}
    outputs = {name: call() for name, call in calls.items()}
    timed = measure_together(
        list(calls.values()), labels=list(calls), warmup=3, iterations=pairs, device="cuda", max_seconds=4.0
    )
    gluon, *rest = timed
    for other in rest:
        rows[other.label] = {"difference": relative_difference(outputs["gluon"], outputs[other.label])}
        rows[other.label] |= speed_of(gluon, other, flops_of(q, causal))
    return rows


def ratio_row(head_dim: int, length: int, causal: bool, other: str, pairs: int) -> dict:
    """Return the row of one backend at one shape; the reason if that backend refuses the shape."""
    q = inputs(head_dim, length)[0]
    row = {"head_dim": head_dim, "length": length, "batch": q.shape[0], "heads": q.shape[1], "causal": causal}
    return row | {"against": other} | timed_point(head_dim, length, causal, pairs)[other]


def random_shapes(seed: int) -> list[dict]:
    """Draw forty shapes: lengths 500 to 40,000 evenly in their logarithm, tails, grouped heads, Sq != Sk, windows, batch 1 to 16."""
    draw, shapes = random.Random(seed), list[dict]()
    while len(shapes) < 40:
        sq = sk = round(math.exp(draw.uniform(math.log(500), math.log(40_000))))
        if draw.random() < 0.5:
            sq = sk = max(512, sk // 128 * 128)
        if draw.random() < 0.25:
            sk = min(40_000, max(500, round(sq * draw.uniform(0.4, 2.5))))
        causal = draw.random() < 0.5
        window = draw.choice((256, 1024, 4096)) if sq == sk and draw.random() < 0.2 else None
        batch, kv_heads, group = (
            draw.choice((1, 2, 3, 4, 8, 16)),
            draw.choice((1, 2, 4, 8)),
            draw.choice((1, 1, 2, 4, 8)),
        )
        head_dim = draw.choice((64, 128, 256))
        flops = 4.0 * batch * kv_heads * group * sq * min(sk, window or sk) * head_dim
        # A query of causal attention that sees no key is another question: not drawn.
        if 1e9 <= flops <= 1e13 and batch * kv_heads * group * sq * head_dim <= 2**28 and (not causal or sk >= sq):
            sizes = {"batch": batch, "heads": kv_heads * group, "kv_heads": kv_heads, "sq": sq, "sk": sk}
            shapes.append(sizes | {"head_dim": head_dim, "causal": causal, "window": window})
    return shapes


def random_row(shape: dict, pairs: int) -> dict:
    """Time Gluon and the other backends that take a shape, in turns; errors are those of the first head in float64."""
    sizes = [(shape["batch"], shape[h], shape[s], shape["head_dim"]) for h, s in (("heads", "sq"), ("kv_heads", "sk"))]
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in (sizes[0], sizes[1], sizes[1]))
    mask = {"causal": shape["causal"], "window": shape["window"]}
    problem = make_problem(q, k, v, **mask)
    last = slice(max(0, shape["sq"] - 256), shape["sq"])  # the last rows see all keys, or the last of a window
    exact = reference(q[:1, :1, last], k[:1, :1], v[:1, :1], **mask)[0]
    calls, errors, refused = {}, {}, {}
    for name in ("gluon", *OTHERS):
        support = find_backend(name).support(problem)
        if not support:
            refused[name] = support.reason
            continue
        calls[name] = partial(attention, q, k, v, **mask, backend=name)
        errors[name] = relative_difference(calls[name]()[:1, :1, last], exact)
    timed = measure_together(
        list(calls.values()), labels=list(calls), warmup=2, iterations=pairs, device="cuda", l2="cold", max_seconds=2.5
    )
    us = {name: 1e3 * result.median_ms for name, result in zip(calls, timed, strict=True)}
    best = min((name for name in us if name != "gluon"), key=us.__getitem__)
    return shape | {"best": best, "ratio": us[best] / us["gluon"], "us": us, "errors": errors, "refused": refused}


def show_random(row: dict) -> str:
    """Return the line that is printed for a row of random shapes."""
    kind = ("causal" if row["causal"] else "full") + (f" window {row['window']}" if row["window"] else "")
    heads = f"{row['batch']} x {row['heads']}/{row['kv_heads']}"
    times = "  ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
    return f"{heads} x {row['sq']} x {row['sk']} D={row['head_dim']} {kind}: {row['ratio']:.3f}x {row['best']}; us: {times}"


def random_summary(rows: list[dict]) -> dict:
    """Return the geometric mean of the ratios to the fastest other backend, the smallest, and how many are under 0.95."""
    ratios = [row["ratio"] for row in rows]
    mean = statistics.geometric_mean(ratios)
    return {"geometric_mean": mean, "smallest": min(ratios), "under_0.95": sum(r < 0.95 for r in ratios)}


def ladder_row(head_dim: int, length: int, causal: bool, step: int, pairs: int) -> dict:
    """Measure one step of the Gluon ladder against cuDNN at one shape."""
    from utils.attention.gluon.launch import forward, plan_of

    q, k, v = inputs(head_dim, length)
    kernel = partial(forward, q, k, v, causal=causal, step=step)
    cudnn = partial(attention, q, k, v, causal=causal, backend="cudnn")
    plan = asdict(plan_of(step, q, k, causal, window=0))
    row = {"head_dim": head_dim, "length": length, "causal": causal, "plan": plan, "step": step}
    row["difference"] = relative_difference(kernel(), cudnn())
    pair = compare(cudnn, kernel, warmup=3, iterations=pairs, labels=("cudnn", f"step {step}"), device="cuda")
    return (
        row | {"against": "cudnn"} | speed_of(pair.b, pair.a, flops_of(q, causal)) | {"interval": list(pair.interval)}
    )


def geometric_means(rows: list[dict]) -> dict[str, float]:
    """Average the ratios by head dimension and opponent, for long (8k, 16k) and for short sequences."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if "ratio" in row:
            key = f"D={row['head_dim']} {'long' if row['length'] >= 8192 else 'short'} {row['against']}"
            groups.setdefault(key, []).append(row["ratio"])
    return {key: statistics.geometric_mean(values) for key, values in groups.items()}


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    name = f"step {row['step']}" if "step" in row else "gluon"
    start = f"D={row['head_dim']:<4} S={row['length']:<6} {'causal' if row['causal'] else 'full':<7}{name:<7} "
    if "refused" in row:
        return f"{start}{row['against']} refuses: {row['refused']}"
    low, high = row["interval"]
    return f"{start}{row['tflops']:7.1f} TFLOP/s  {row['ratio']:.3f}x {row['against']} [{low:.3f}, {high:.3f}]"


def main(arguments: list[str] | None = None) -> None:
    """Measure and record a table."""
    parser = arguments_parser(__doc__, pairs=15)
    parser.add_argument("table", choices=("ratios", "random", "ladder"))
    parser.add_argument("--seed", type=int, default=40, help="random: what the shapes are drawn by")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    record = Record(options, options.table, "cuda", pairs=options.pairs)
    if options.table == "random":
        record.contents["seed"] = options.seed
        record.fill(random_shapes(options.seed), partial(random_row, pairs=options.pairs), show_random)
        record.contents["summary"] = random_summary(record.contents["rows"])
        print(record.contents["summary"])
    else:
        measure_row, variants = (ratio_row, OTHERS) if options.table == "ratios" else (ladder_row, range(1, 6))
        points = itertools.product(HEADS, LENGTHS, (False, True), variants)
        record.fill(points, lambda point: measure_row(*point, pairs=options.pairs), show)
    if options.table == "ratios":
        record.contents["geometric_means"] = geometric_means(record.contents["rows"])
        for key, mean in record.contents["geometric_means"].items():
            print(f"{key:<28}{mean:.3f}")
    record.finish()


if __name__ == "__main__":
    main()
