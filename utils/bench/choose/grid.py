"""The shapes that `labs bench choose` measures: a grid of training, prefill and decode, and random held-out shapes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

from utils.bench.targets.sdpa import SdpaWorkload

HEAD_DIMS = (64, 128, 256)
HEADS = {64: 32, 128: 16, 256: 8}  # model width 2048
GROUPED = {64: (32, 8), 128: (32, 8), 256: (16, 4)}  # query heads, KV heads

# (batch, tokens): at most 16k tokens, as in a step of training or in a prompt
TRAINING = ((32, 128), (16, 512), (8, 1024), (4, 2048), (2, 4096), (1, 8192))
TRAINING_GROUPED = TRAINING_FULL = ((8, 512), (4, 2048), (1, 8192))
PREFILL = ((1, 128), (1, 512), (1, 2048), (1, 8192), (1, 16384), (8, 128), (8, 512), (8, 2048), (4, 4096))
PREFILL_GROUPED = ((1, 128), (1, 512), (1, 2048), (1, 8192), (8, 512), (4, 4096))
PREFILL_FULL = ((1, 512), (8, 512), (4, 2048), (1, 8192))
# (batch, queries, keys). The best backend for decode changes near as many blocks of work (batch x KV heads for one
# query, batch x heads for several) as there are multiprocessors, so the grid is dense there.
DECODE = ((1, 1, 4096), (4, 1, 16384), (16, 1, 1024))
DECODE_GROUPED = (
    *((batch, 1, keys) for batch in (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 64) for keys in (2048, 16384)),
    *((batch, 1, 512) for batch in (1, 8, 24, 64)),
    *((batch, 1, 65536) for batch in (1, 4, 8)),
    *((batch, 4, keys) for batch in (1, 2, 3, 4, 8) for keys in (1024, 8192)),
    (1, 4, 65536),
    (32, 4, 2048),
)


def _shapes(
    sizes: Iterable[tuple[int, ...]], heads: int, head_dim: int, dtype: str, mask: str, **options: Any
) -> list[SdpaWorkload]:
    """Make the shapes of (batch, tokens) or (batch, queries, keys) sizes."""
    return [
        SdpaWorkload(batch, heads, queries, head_dim, dtype, mask, seq_len_kv=keys[0] if keys else None, **options)
        for batch, queries, *keys in sizes
    ]


def gpu_grid(head_dims: Iterable[int] = HEAD_DIMS, dtype: str = "bf16") -> list[SdpaWorkload]:
    """Make the grid for a GPU: 79 shapes a head dimension."""
    shapes = []
    for head_dim in head_dims:
        for sizes, mask, direction, grouped in (
            (TRAINING, "causal", "both", False),
            (TRAINING_GROUPED, "causal", "both", True),
            (TRAINING_FULL, "full", "both", False),
            (PREFILL, "causal", "forward", False),
            (PREFILL_GROUPED, "causal", "forward", True),
            (PREFILL_FULL, "full", "forward", False),
            (DECODE, "full", "forward", False),
            (DECODE_GROUPED, "full", "forward", True),
        ):
            heads, kv_heads = GROUPED[head_dim] if grouped else (HEADS[head_dim], None)
            shapes += _shapes(sizes, heads, head_dim, dtype, mask, kv_heads=kv_heads, direction=direction)
    return shapes


def cpu_grid(head_dims: Iterable[int] = HEAD_DIMS, dtype: str = "fp32") -> list[SdpaWorkload]:
    """Make the grid for a CPU: 9 small shapes a head dimension."""
    shapes = []
    for head_dim in head_dims:
        heads = max(1, 256 // head_dim)
        shapes += _shapes([(1, 128), (1, 512)], heads, head_dim, dtype, "causal", direction="both")
        shapes += _shapes([(1, 64), (1, 256), (1, 1024)], heads, head_dim, dtype, "causal")
        shapes += _shapes([(1, 256)], heads, head_dim, dtype, "full")
        decode = [(1, 1, 512), (1, 1, 4096), (4, 1, 1024)]
        shapes += _shapes(decode, 2 * heads, head_dim, dtype, "full", kv_heads=heads)
    return shapes


def quick_grid(device_type: str, head_dims: Iterable[int], dtype: str) -> list[SdpaWorkload]:
    """Make two shapes of each kind, of the smallest head dimension, for a first look."""
    head_dim = min(head_dims)
    by_kind: dict[tuple, list[SdpaWorkload]] = {}
    for shape in gpu_grid((head_dim,), dtype) if device_type == "cuda" else cpu_grid((head_dim,), dtype):
        by_kind.setdefault((shape.direction, shape.seq_len == shape.sk), []).append(shape)
    return [shape for shapes in by_kind.values() for shape in shapes[:2]]


def held_out(
    count: int, seed: int, device_type: str, head_dims: Iterable[int], dtype: str, grid: Iterable[SdpaWorkload]
) -> list[SdpaWorkload]:
    """Draw random shapes that the grid does not have, a third of each kind.

    Lengths are log-uniform and any whole number, so most are no multiple of a tile; heads and groups vary freely.

    Args:
        count: number of shapes.
        seed: of the random numbers; the same seed draws the same shapes, so that a sweep can be resumed.
        device_type: "cpu" draws smaller shapes than "cuda".
        head_dims: the head dimensions, taken in turn.
        dtype: of all shapes.
        grid: the shapes to leave out.
    """
    draw, known, shapes = random.Random(seed), set(grid), list[SdpaWorkload]()
    head_dims, small = tuple(head_dims), device_type == "cpu"

    def length(low: int, high: int) -> int:
        value = round(math.exp(draw.uniform(math.log(low), math.log(high))))
        return value if draw.random() < 0.5 else max(8, value // 8 * 8)

    while len(shapes) < count:
        number = len(shapes)
        head_dim = head_dims[number // 3 % len(head_dims)]
        heads = draw.choice((2, 4)) if small else draw.choice((8, 12, 16, 24, 32, 40))
        ratio = draw.choice((1, 2)) if small else draw.choice((1, 1, 2, 4, 8))
        kv_heads = None if ratio == 1 or heads % ratio else heads // ratio
        mask = "causal" if draw.random() < 0.75 else "full"
        keys, direction = None, "forward"
        if number % 3 == 2:
            keys, mask = (length(64, 4096) if small else length(300, 100_000)), "full"
            batch = draw.randint(1, max(1, min(4 if small else 64, (8192 if small else 500_000) // keys)))
            tokens = draw.choice((1, 1, 1, 4))
        else:
            direction = "both" if number % 3 == 0 else "forward"
            tokens = length(64, 512) if small else length(128, 8192 if direction == "both" else 16384)
            batch = 1 if small else max(1, round(2 ** draw.uniform(10, 14) / tokens))
        shape = SdpaWorkload(
            batch, heads, tokens, head_dim, dtype, mask, kv_heads=kv_heads, seq_len_kv=keys, direction=direction
        )
        if shape not in known:
            known.add(shape)
            shapes.append(shape)
    return shapes
