"""Measure the Gluon backward against cuDNN and FlashAttention 3 and 4 (`ratios`, `drawn`), its steps (`ladder`), its errors.

    python -m tools.record.backward ratios --fa3 ~/fa3/_C.so --out assets/results/h200/backward_ratios.json
    python -m tools.record.backward drawn --fa3 ~/fa3/_C.so --out assets/results/h200/backward_drawn.json
    python -m tools.record.backward ladder --out assets/results/h200/backward_ladder.json
    python -m tools.record.backward errors --fa3 ~/fa3/_C.so --out assets/results/h200/backward_errors.json

All contenders of a row run in one process, their calls interleaved on the same inputs (bf16, random normal), so that they
run at the same clocks, with a cold L2. A backward counts 10 B H Sq Sk D operations, half of them if causal, for all
contenders: what one recomputes beyond that is its own affair.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from tools.record.attention_ratios import relative_difference
from tools.record.common import Record, arguments_parser, numbers
from utils.attention.gluon.backward.plan import STEPS
from utils.benchmark.measuring import measure_together

PEERS = ("cudnn", "fa3", "fa4")
LENGTHS, HEAD_DIMS = "4096,16384", "64,128,256"
Gradients = Callable[[], tuple[torch.Tensor, ...]]


def rows_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copy tensors (B, H, S, D) to (B, S, H, D), the layout of the flash-attn packages."""
    return [x.transpose(1, 2).contiguous() for x in tensors]


def cudnn_backward(q, k, v, dout, causal: bool) -> Gradients:
    """Return the call of cuDNN's backward pass alone."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def fa3_backward(q, k, v, dout, causal: bool) -> Gradients:
    """Return the call of FlashAttention 3's backward pass (its C++ build, see --fa3)."""
    q, k, v, dout = rows_first(q, k, v, dout)
    out, lse = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=causal)[:2]
    return lambda: torch.ops.flash_attn_3.bwd(dout, q, k, v, out, lse, is_causal=causal)[:3]


def fa4_backward(q, k, v, dout, causal: bool) -> Gradients:
    """Return the call of FlashAttention 4's backward pass."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q, k, v, dout = rows_first(q, k, v, dout)
    out, lse = _flash_attn_fwd(q, k, v, causal=causal, return_lse=True)[:2]
    return lambda: _flash_attn_bwd(q, k, v, out, dout, lse, causal=causal)[:3]


def gluon_backward(q, k, v, dout, causal: bool, step: int = 6, deterministic: bool = False) -> Gradients:
    """Return the call of a step of the ladder."""
    from utils.attention.gluon.backward.launch import backward
    from utils.attention.gluon.launch import forward

    out, lse = forward(q, k, v, causal=causal, return_lse=True)
    return lambda: backward(dout, q, k, v, out, lse, causal=causal, step=step, deterministic=deterministic)


MAKERS: dict[str, Callable[..., Gradients]] = {
    "cudnn": cudnn_backward,
    "fa3": fa3_backward,
    "fa4": fa4_backward,
    "gluon": gluon_backward,
    "deterministic": lambda *tensors: gluon_backward(*tensors, deterministic=True),
}
MAKERS |= {f"step{step}": lambda *tensors, step=step: gluon_backward(*tensors, step=step) for step in STEPS}


class Point(NamedTuple):
    """A point of a table."""

    head_dim: int
    length: int
    causal: bool
    batch: int
    heads: int
    kv_heads: int


def table_points(head_dims: Iterable[int], lengths: Iterable[int]) -> list[Point]:
    """Return points of 16384 tokens and a model width of 2048."""
    return [
        Point(head_dim, length, causal, max(1, 16384 // length), 2048 // head_dim, 2048 // head_dim)
        for head_dim, length, causal in itertools.product(head_dims, lengths, (False, True))
    ]


def drawn_points(seed: int = 20261125, count: int = 24) -> list[Point]:
    """Draw shapes of training: 300 to 8000 tokens, batch 1 to 8, 4 to 32 heads, 1 to 8 of which share a head of keys."""
    draw = random.Random(seed)
    found: list[Point] = []
    for i in range(count):
        length = round(math.exp(draw.uniform(math.log(300), math.log(8000))))
        batch = min(draw.randint(1, 8), max(1, 32768 // length))
        group = draw.choice((1, 1, 2, 4, 8))
        kv_heads = draw.choice([n for n in (1, 2, 3, 4, 8, 12, 16, 32) if 4 <= n * group <= 32])
        found.append(Point((64, 80, 96, 128, 256)[i % 5], length, i % 2 == 1, batch, kv_heads * group, kv_heads))
    return found


def make_inputs(point: Point) -> tuple[torch.Tensor, ...]:
    """Draw q, k, v and the gradient of the output."""
    shapes = [(point.batch, heads, point.length, point.head_dim) for heads in (point.heads, point.kv_heads)]
    q, k, v, dout = (torch.randn(shapes[i], device="cuda", dtype=torch.bfloat16) for i in (0, 1, 1, 0))
    return q, k, v, dout


def rates_row(point: Point, names: list[str], samples: int) -> dict:
    """Time the contenders of one point, interleaved; a contender that refuses is left out, with its reason."""
    tensors = make_inputs(point)
    calls, refused = {}, {}
    for name in names:
        if (name, point.head_dim) == ("fa4", 80):
            continue  # its gradients are wrong by more than their size
        try:
            calls[name] = MAKERS[name](*tensors, point.causal)
            calls[name]()
            torch.cuda.synchronize()
        except Exception as error:
            calls.pop(name, None)
            refused[name] = f"{type(error).__name__}: {error}"[:300]
    flops = 10.0 * point.batch * point.heads * point.length**2 * point.head_dim * (0.5 if point.causal else 1.0)
    results = measure_together(
        list(calls.values()), labels=list(calls), warmup=2, iterations=samples, device="cuda", flops=flops, l2="cold"
    )
    times = {name: result.median_ms for name, result in zip(calls, results, strict=True)}
    row = point._asdict() | {"ms": times, "tflops": {name: flops / ms / 1e9 for name, ms in times.items()}}
    if "gluon" in times:
        row["ratios"] = {name: times[name] / times["gluon"] for name in times if name in PEERS}
    return row | ({"refused": refused} if refused else {})


def errors_row(head_dim: int, length: int, causal: bool, names: list[str]) -> dict:
    """Compare dQ, dK and dV of each contender with float64, at one sequence and two heads."""
    from utils.attention.reference import reference_gradients

    q, k, v, dout = (torch.randn(1, 2, length, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    _, expected = reference_gradients(q, k, v, dout, causal=causal)
    row: dict = {"head_dim": head_dim, "length": length, "causal": causal, "errors": {}}
    for name in names:
        gradients = MAKERS[name](q, k, v, dout, causal)()
        if name.startswith("fa"):
            gradients = tuple(x.transpose(1, 2) for x in gradients)
        row["errors"][name] = [relative_difference(x, y) for x, y in zip(gradients, expected, strict=True)]
    if "gluon" in row["errors"]:
        ours = row["errors"]["gluon"]
        others = {name: errors for name, errors in row["errors"].items() if name in PEERS}
        row["ratios"] = {name: max(a / b for a, b in zip(ours, x, strict=True)) for name, x in others.items()}
    return row


def geometric_means(rows: list[dict]) -> dict[str, float]:
    """Average the ratios by head dimension and opponent; "best" is the fastest peer of each point."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        ratios = row.get("ratios", {})
        for name, ratio in (ratios | ({"best": min(ratios.values())} if ratios else {})).items():
            groups.setdefault(f"D={row['head_dim']} {name}", []).append(ratio)
    return {key: math.exp(sum(map(math.log, values)) / len(values)) for key, values in sorted(groups.items())}


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    start = f"D={row['head_dim']:<4} S={row['length']:<6} {'causal' if row['causal'] else 'full':<7}"
    if "errors" in row:
        errors = "  ".join(f"{name} {max(values):.5f}" for name, values in row["errors"].items())
        return f"{start}{errors}"
    rates = "  ".join(f"{name} {rate:.0f}" for name, rate in row["tflops"].items())
    ratios = "  ".join(f"{ratio:.3f}x {name}" for name, ratio in row.get("ratios", {}).items())
    return f"{start}{rates}  {ratios}  {row.get('refused', '')}".rstrip()


def main(arguments: list[str] | None = None) -> None:
    """Measure and record a table."""
    parser = arguments_parser(__doc__, pairs=11)
    parser.add_argument("table", choices=("ratios", "drawn", "ladder", "errors"))
    parser.add_argument("--fa3", type=Path, help="FlashAttention 3's library, _C.so")
    parser.add_argument("--head-dims", type=numbers, default=HEAD_DIMS)
    parser.add_argument("--lengths", type=numbers, help=f"by default {LENGTHS}; errors: 1024,2048")
    options = parser.parse_args(arguments)
    if options.out is None:
        parser.error("--out names the file to write")
    if options.fa3:
        torch.ops.load_library(str(options.fa3.expanduser()))
    names = {
        "ratios": ["gluon", *PEERS, "deterministic"],
        "drawn": ["gluon", *PEERS],
        "ladder": ["cudnn", *(f"step{step}" for step in STEPS), "deterministic"],
        "errors": ["gluon", *PEERS, "deterministic"],
    }[options.table]
    lengths = options.lengths or numbers("1024,2048" if options.table == "errors" else LENGTHS)
    torch.manual_seed(0)
    record = Record(options.out, f"backward {options.table}", "cuda", options.seconds, samples=options.pairs)
    if options.table == "errors":
        points = itertools.product(options.head_dims, lengths, (False, True))
        complete = record.fill(points, lambda point: errors_row(*point, names), show)
    else:
        drawn = options.table == "drawn"
        complete = record.fill(
            drawn_points() if drawn else table_points(options.head_dims, lengths),
            lambda point: rates_row(point, names, options.pairs),
            show,
        )
    if options.table in ("ratios", "drawn"):
        record.contents["geometric_means"] = geometric_means(record.contents["rows"])
        for key, mean in record.contents["geometric_means"].items():
            print(f"{key:<20}{mean:.3f}")
    record.finish() if complete else record.save()


if __name__ == "__main__":
    main()
