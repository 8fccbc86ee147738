"""Measure the Gluon backward against cuDNN and FlashAttention 3 and 4, at round points (`ratios`) or shapes drawn by seed.

    python -m tools.record.backward ratios --fa3 ~/fa3/_C.so --out assets/results/h200/backward_ratios.json
    python -m tools.record.backward drawn --fa3 ~/fa3/_C.so --out assets/results/h200/backward_drawn.json

All contenders of a row run in one process, their calls interleaved on the same inputs (bf16, random normal), so that they
run at the same clocks, with a cold L2. Before, their gradients are compared with float64. A backward counts 10 D operations for
each pair of a query and a key that it sees, for all contenders: what one recomputes beyond that is its own affair.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tools.record.common import Record, arguments_parser, relative_difference
from utils.benchmark.measuring import measure_together

PEERS = ("cudnn", "fa3", "fa4")
WRONG = 0.02  # a relative error above this, four times the greatest of a right one, leaves a contender out
WORK = 7e12  # operations of a drawn shape at most: 10 to 20 ms
TOKENS = 32768  # queries of a drawn shape at most, where there is a batch
Gradients = Callable[[], tuple[torch.Tensor, ...]]


class Point(NamedTuple):
    """A point of a table."""

    head_dim: int
    length: int
    causal: bool
    batch: int
    heads: int
    kv_heads: int
    keys: int
    window: int | None = None

    @property
    def kind(self) -> str:
        """The kind of mask."""
        return "window" if self.window else "causal" if self.causal else "full"

    @property
    def flops(self) -> float:
        """Operations of a backward pass: 10 D for each pair of a query and a key that it sees, about."""
        seen = self.window or self.keys
        hidden = max(seen - (self.keys - self.length), 0) ** 2 / 2 if self.causal else 0
        return 10.0 * self.batch * self.heads * self.head_dim * (self.length * seen - hidden)


def cudnn_backward(q, k, v, dout, out, lse, point: Point) -> Gradients:
    """Return the call of cuDNN's backward pass alone."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if point.window or (point.causal and point.length != point.keys):
        raise ValueError("torch calls cuDNN for no windows, and for causal masks of as many queries as keys only")
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=point.causal, enable_gqa=q.shape[1] != k.shape[1]
        )
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def flash_backward(version: int, q, k, v, dout, out, lse, point: Point) -> Gradients:
    """Return the call of the backward pass of FlashAttention 3 (its C++ build, see --fa3) or 4, on tensors (B, S, H, D)."""
    q, k, v, dout, out = (x.transpose(1, 2).contiguous() for x in (q, k, v, dout, out))
    mask: dict[str, Any]
    if version == 3:
        left, right = (point.window - 1, 0) if point.window else (-1, -1)
        mask = {"is_causal": point.causal, "window_size_left": left, "window_size_right": right}
        call = functools.partial(torch.ops.flash_attn_3.bwd, dout, q, k, v, out, lse, **mask)
    else:
        from flash_attn.cute.interface import _flash_attn_bwd

        mask = {"causal": point.causal, "window_size_left": point.window and point.window - 1}
        call = functools.partial(_flash_attn_bwd, q, k, v, out, dout, lse, **mask)
    return lambda: tuple(x.transpose(1, 2) for x in call()[:3])


def gluon_backward(q, k, v, dout, out, lse, point: Point, deterministic: bool) -> Gradients:
    """Return the call of the Gluon backward pass."""
    from utils.attention.gluon.backward.launch import backward

    mask: dict[str, Any] = {"causal": point.causal, "window": point.window}
    return lambda: backward(dout, q, k, v, out, lse, **mask, deterministic=deterministic)


MAKERS: dict[str, Callable[..., Gradients]] = {
    "cudnn": cudnn_backward,
    "fa3": functools.partial(flash_backward, 3),
    "fa4": functools.partial(flash_backward, 4),
    "gluon": functools.partial(gluon_backward, deterministic=False),
    "deterministic": functools.partial(gluon_backward, deterministic=True),
}


def table_points() -> list[Point]:
    """Return points of 16384 tokens and a model width of 2048."""
    return [
        Point(head_dim, length, causal, max(1, 16384 // length), 2048 // head_dim, 2048 // head_dim, length)
        for head_dim, length, causal in itertools.product((64, 128, 256), (4096, 16384), (False, True))
    ]


def drawn_points(seed: int) -> list[Point]:
    """Draw 24 shapes of training, a third each without a mask, causal, and causal with a window of 128 to 4096 positions.

    400 to 24,000 queries, in a third of the shapes not as many as keys; batch 1 to 8, 4 to 32 heads, of which 1 to 8 share a
    head of keys. A query of a causal mask that sees no key is another question, and what takes too long is drawn again.
    """
    draw = random.Random(seed)
    found: list[Point] = []
    while len(found) < 24:
        kind, head_dim = ("full", "causal", "window")[len(found) % 3], (64, 80, 96, 128, 256)[len(found) % 5]
        length = keys = round(math.exp(draw.uniform(math.log(400), math.log(24_000))))
        if draw.random() < 1 / 3:
            keys = round(length * draw.uniform(0.4 if kind == "full" else 1.0, 2.5))
        group = draw.choice((1, 1, 2, 4, 8))
        kv_heads = draw.choice([n for n in (1, 2, 3, 4, 8, 12, 16, 32) if 4 <= n * group <= 32])
        window = round(math.exp(draw.uniform(math.log(128), math.log(min(4096, length)))))
        batch = min(draw.randint(1, 8), max(1, TOKENS // length))
        point = Point(head_dim, length, kind != "full", batch, kv_heads * group, kv_heads, keys)
        point = point._replace(window=window) if kind == "window" else point
        if point.flops <= WORK:
            found.append(point)
    return found


def make_inputs(point: Point) -> tuple[torch.Tensor, ...]:
    """Draw q, k, v and the gradient of the output, and compute the output and its log-sum-exp."""
    from utils.attention.gluon.launch import forward

    sizes = ((point.heads, point.length), (point.kv_heads, point.keys))
    shapes = [(point.batch, heads, rows, point.head_dim) for heads, rows in sizes]
    q, k, v, dout = (torch.randn(shapes[i], device="cuda", dtype=torch.bfloat16) for i in (0, 1, 1, 0))
    return q, k, v, dout, *forward(q, k, v, causal=point.causal, window=point.window, return_lse=True)


def measured_row(point: Point, names: list[str], samples: int) -> dict:
    """Time the contenders of one point, interleaved; those that refuse it or are wrong are left out, with the reason.

    Errors are those of dQ, dK and dV of the first head of keys, relative to float64.
    """
    from utils.attention.reference import reference_gradients

    tensors = q, k, v, dout, *_ = make_inputs(point)
    group = point.heads // point.kv_heads
    first = [x[:1, :n] for x, n in ((q, group), (k, 1), (v, 1), (dout, group))]
    _, expected = reference_gradients(*first, causal=point.causal, window=point.window)
    calls: dict[str, Gradients] = {}
    errors: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            call = MAKERS[name](*tensors, point)
            given = [x[:1, : y.shape[1]] for x, y in zip(call(), expected, strict=True)]
            errors[name] = [relative_difference(x, y) for x, y in zip(given, expected, strict=True)]
            if not max(errors[name]) < WRONG:
                raise ArithmeticError("its gradients are wrong")
            calls[name] = call
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"[:300]
    results = measure_together(
        list(calls.values()), labels=list(calls), warmup=2, iterations=samples, device="cuda", l2="cold"
    )
    times = {name: result.median_ms for name, result in zip(calls, results, strict=True)}
    row = point._asdict() | {"ms": times, "tflops": {name: point.flops / ms / 1e9 for name, ms in times.items()}}
    if "gluon" in times:
        row["ratios"] = {name: times[name] / times["gluon"] for name in times if name in PEERS}
    return row | {"errors": errors} | ({"refused": refused} if refused else {})


def geometric_means(rows: list[dict]) -> dict[str, float]:
    """Average the ratios by head dimension or kind of mask, and opponent; "best" is the fastest peer of each point."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        ratios = row.get("ratios", {})
        kind = "window" if row.get("window") else "causal" if row["causal"] else "full"
        for name, ratio in (ratios | ({"best": min(ratios.values())} if ratios else {})).items():
            for group in (f"D={row['head_dim']}", f"D={row['head_dim']} {kind}", kind, "all"):
                groups.setdefault(f"{group} {name}", []).append(ratio)
    return {key: statistics.geometric_mean(values) for key, values in sorted(groups.items())}


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    mask = f"window {row['window']}" if row["window"] else "causal" if row["causal"] else "full"
    sizes = f"{row['batch']} x {row['heads']}/{row['kv_heads']} x {row['length']} x {row['keys']}"
    rates = "  ".join(f"{name} {rate:.0f}" for name, rate in row["tflops"].items())
    ratios = "  ".join(f"{ratio:.3f}x {name}" for name, ratio in row.get("ratios", {}).items())
    return f"D={row['head_dim']:<4} {sizes:<26} {mask:<12} {rates}  {ratios}  {row.get('refused', '')}".rstrip()


def main(arguments: list[str] | None = None) -> None:
    """Measure and record a table."""
    parser = arguments_parser(__doc__, pairs=11)
    parser.add_argument("table", choices=("ratios", "drawn"))
    parser.add_argument("--fa3", type=Path, help="FlashAttention 3's library, _C.so")
    parser.add_argument("--seed", type=int, default=20261130, help="drawn: what the shapes are drawn by")
    options = parser.parse_args(arguments)
    if options.fa3:
        torch.ops.load_library(str(options.fa3.expanduser()))
    drawn = options.table == "drawn"
    names = ["gluon", *PEERS] + ([] if drawn else ["deterministic"])
    torch.manual_seed(0)
    points = drawn_points(options.seed) if drawn else table_points()
    record = Record(options, f"backward {options.table}", "cuda", samples=options.pairs)
    record.fill(points, lambda point: measured_row(point, names, options.pairs), show)
    record.contents["geometric_means"] = geometric_means(record.contents["rows"])
    for key, mean in record.contents["geometric_means"].items():
        print(f"{key:<24}{mean:.3f}")
    record.finish()


if __name__ == "__main__":
    main()
