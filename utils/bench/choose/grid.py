"""The shapes that `labs bench choose` measures: training, prefill and decode at three head dimensions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from utils.bench.targets.sdpa import SdpaWorkload

HEADS = {64: 32, 128: 16, 256: 8}  # model width 2048
GROUPED = {64: (32, 8), 128: (32, 8), 256: (16, 4)}  # query heads, KV heads

# (batch, tokens): at most 16k tokens, as in a step of training or in a prompt
TRAINING = ((32, 128), (16, 512), (8, 1024), (4, 2048), (2, 4096), (1, 8192))
TRAINING_FEW = ((8, 512), (4, 2048), (1, 8192))
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
# sizes, mask, direction, whether the heads are grouped
GPU = (
    (TRAINING, "causal", "both", False),
    (TRAINING_FEW, "causal", "both", True),
    (TRAINING_FEW, "full", "both", False),
    (PREFILL, "causal", "forward", False),
    (PREFILL_GROUPED, "causal", "forward", True),
    (PREFILL_FULL, "full", "forward", False),
    (DECODE, "full", "forward", False),
    (DECODE_GROUPED, "full", "forward", True),
)
CPU = (
    (((1, 128), (1, 512)), "causal", "both", False),
    (((1, 64), (1, 256), (1, 1024)), "causal", "forward", False),
    (((1, 256),), "full", "forward", False),
    (((1, 1, 512), (1, 1, 4096), (4, 1, 1024)), "full", "forward", True),
)


def shapes(device_type: str, head_dims: Iterable[int], dtype: str) -> list[SdpaWorkload]:
    """Make the grid of a device: for each head dimension 79 shapes on a GPU, 9 small ones on a CPU."""
    grid = []
    for head_dim in head_dims:
        few = max(1, 256 // head_dim)
        plain, groups = (HEADS[head_dim], GROUPED[head_dim]) if device_type == "cuda" else (few, (2 * few, few))
        for sizes, mask, direction, grouped in GPU if device_type == "cuda" else CPU:
            heads, kv_heads = groups if grouped else (plain, None)
            for batch, queries, *keys in sizes:
                options: dict[str, Any] = {
                    "kv_heads": kv_heads,
                    "seq_len_kv": keys[0] if keys else None,
                    "direction": direction,
                }
                grid.append(SdpaWorkload(batch, heads, queries, head_dim, dtype, mask, **options))
    return grid
