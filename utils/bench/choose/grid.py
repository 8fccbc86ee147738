"""The shapes that `labs bench choose` measures: a grid of training, prefill and decode, and random ones held out."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from utils.bench.targets.sdpa import SdpaWorkload

HEAD_DIMS = (64, 128, 256)
HEADS = {64: 32, 128: 16, 256: 8}  # model width 2048
GROUPED = {64: (32, 8), 128: (32, 8), 256: (16, 4)}  # query heads, K and V heads

# (batch, tokens): of 16k tokens or fewer, as a step of training or a prompt has them
TRAINING = ((32, 128), (16, 512), (8, 1024), (4, 2048), (2, 4096), (1, 8192))
TRAINING_GROUPED = TRAINING_FULL = ((8, 512), (4, 2048), (1, 8192))
PREFILL = ((1, 128), (1, 512), (1, 2048), (1, 8192), (1, 16384), (8, 128), (8, 512), (8, 2048), (4, 4096))
PREFILL_GROUPED = ((1, 128), (1, 512), (1, 2048), (1, 8192), (8, 512), (4, 4096))
PREFILL_FULL = ((1, 512), (8, 512), (4, 2048), (1, 8192))
# (batch, queries, keys). Decode changes its mind around as many blocks of work as there are multiprocessors (batch x
# heads of K and V for one query, batch x heads for several): there the grid is dense.
DECODE = ((1, 1, 4096), (4, 1, 16384), (16, 1, 1024))
DECODE_GROUPED = (
    *((batch, 1, keys) for batch in (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 64) for keys in (2048, 16384)),
    *((batch, 1, 512) for batch in (1, 8, 24, 64)),
    *((batch, 1, 65536) for batch in (1, 4, 8)),
    *((batch, 4, keys) for batch in (1, 2, 3, 4, 8) for keys in (1024, 8192)),
    (1, 4, 65536),
    (32, 4, 2048),
)


def _self_attention(
    pairs: Iterable[tuple[int, int]], head_dim: int, dtype: str, mask: str, direction: str, grouped: bool
) -> list[SdpaWorkload]:
    heads, kv_heads = GROUPED[head_dim] if grouped else (HEADS[head_dim], None)
    return [
        SdpaWorkload(batch, heads, tokens, head_dim, dtype, mask, kv_heads=kv_heads, direction=direction)
        for batch, tokens in pairs
    ]


def _decode(triples: Iterable[tuple[int, int, int]], head_dim: int, dtype: str, grouped: bool) -> list[SdpaWorkload]:
    heads, kv_heads = GROUPED[head_dim] if grouped else (HEADS[head_dim], None)
    return [
        SdpaWorkload(batch, heads, queries, head_dim, dtype, "full", kv_heads=kv_heads, seq_len_kv=keys)
        for batch, queries, keys in triples
    ]


def gpu_grid(head_dims: Iterable[int] = HEAD_DIMS, dtype: str = "bf16") -> list[SdpaWorkload]:
    """The grid for a GPU: 79 shapes a head dimension."""
    found = []
    for d in head_dims:
        found += _self_attention(TRAINING, d, dtype, "causal", "both", False)
        found += _self_attention(TRAINING_GROUPED, d, dtype, "causal", "both", True)
        found += _self_attention(TRAINING_FULL, d, dtype, "full", "both", False)
        found += _self_attention(PREFILL, d, dtype, "causal", "forward", False)
        found += _self_attention(PREFILL_GROUPED, d, dtype, "causal", "forward", True)
        found += _self_attention(PREFILL_FULL, d, dtype, "full", "forward", False)
        found += _decode(DECODE, d, dtype, False) + _decode(DECODE_GROUPED, d, dtype, True)
    return found


def cpu_grid(head_dims: Iterable[int] = HEAD_DIMS, dtype: str = "fp32") -> list[SdpaWorkload]:
    """The grid for a CPU: 12 small shapes a head dimension."""
    found = []
    for d in head_dims:
        heads = max(1, 256 // d)
        for direction, mask, sizes in (
            ("both", "causal", (128, 512)),
            ("forward", "causal", (64, 256, 1024)),
            ("forward", "full", (256,)),
        ):
            found += [SdpaWorkload(1, heads, size, d, dtype, mask, direction=direction) for size in sizes]
        found += [
            SdpaWorkload(batch, 2 * heads, 1, d, dtype, "full", kv_heads=heads, seq_len_kv=keys)
            for batch, keys in ((1, 512), (1, 4096), (4, 1024))
        ]
    return found


def quick_grid(device_type: str, head_dims: Iterable[int], dtype: str) -> list[SdpaWorkload]:
    """A few shapes of each kind, for a first look."""
    head_dim = min(head_dims)
    every = gpu_grid((head_dim,), dtype) if device_type == "cuda" else cpu_grid((head_dim,), dtype)
    by_kind: dict[tuple, list[SdpaWorkload]] = {}
    for one in every:
        by_kind.setdefault((one.direction, one.seq_len == one.sk), []).append(one)
    return [one for shapes in by_kind.values() for one in shapes[:2]]


def held_out(
    count: int, seed: int, device_type: str, head_dims: Iterable[int], dtype: str, grid: Iterable[SdpaWorkload]
) -> list[SdpaWorkload]:
    """`count` random shapes that the grid does not hold, a third of each kind, drawn with `seed`.

    Lengths are log-uniform and any whole number, so most are no multiple of a tile; heads and groups vary freely.
    """
    draw, known = random.Random(seed), set(grid)
    found: list[SdpaWorkload] = []
    head_dims, small = tuple(head_dims), device_type == "cpu"

    def length(low: int, high: int) -> int:
        value = round(math.exp(draw.uniform(math.log(low), math.log(high))))
        return value if draw.random() < 0.5 else max(8, value // 8 * 8)

    while len(found) < count:
        number = len(found)
        head_dim = head_dims[number // 3 % len(head_dims)]
        heads = draw.choice((2, 4)) if small else draw.choice((8, 12, 16, 24, 32, 40))
        ratio = draw.choice((1, 2)) if small else draw.choice((1, 1, 2, 4, 8))
        kv_heads = None if ratio == 1 or heads % ratio else heads // ratio
        mask = "causal" if draw.random() < 0.75 else "full"
        if number % 3 == 2:
            keys = length(64, 4096) if small else length(300, 100_000)
            batch = draw.randint(1, max(1, min(4 if small else 64, (8192 if small else 500_000) // keys)))
            one = SdpaWorkload(
                batch, heads, draw.choice((1, 1, 1, 4)), head_dim, dtype, "full", kv_heads=kv_heads, seq_len_kv=keys
            )
        else:
            training = number % 3 == 0
            tokens = length(64, 512) if small else length(128, 8192 if training else 16384)
            batch = 1 if small else max(1, round(2 ** draw.uniform(10, 14) / tokens))
            one = SdpaWorkload(
                batch,
                heads,
                tokens,
                head_dim,
                dtype,
                mask,
                kv_heads=kv_heads,
                direction="both" if training else "forward",
            )
        if one not in known:
            known.add(one)
            found.append(one)
    return found
