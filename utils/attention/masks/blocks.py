"""Block masks: the blocks of keys that each block of queries needs, as FlexAttention's BlockMask and as plain counts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from utils.attention.masks.mask_mods import (
    MaskMod,
    captures,
    check_device,
    different_masks,
    errors_of,
    name_of,
    row_chunks,
)
from utils.newest import Newest
from utils.validation import whole_number

BlockSize = int | tuple[int, int]


def block_sizes(block_size: BlockSize) -> tuple[int, int]:
    """Return (queries, keys) of a block, from one number or two."""
    pair = (block_size, block_size) if isinstance(block_size, int) else tuple(block_size)
    if len(pair) != 2:
        raise ValueError(f"block_size is {block_size!r}; it must be one whole number or two: (queries, keys).")
    return whole_number("block_size", pair[0]), whole_number("block_size", pair[1])


@dataclass(frozen=True)
class Blocks:
    """The blocks of keys that each block of queries needs, as plain tensors instead of FlexAttention's BlockMask.

    counts (query blocks, key blocks): pairs that the mask lets through; full, partial: bool of the same shape.
    """

    counts: torch.Tensor
    full: torch.Tensor
    partial: torch.Tensor
    block_size: tuple[int, int]


def count_blocks(
    mask_mod: MaskMod | None,
    sq: int,
    sk: int,
    device: torch.device | str = "cpu",
    block_size: BlockSize = 128,
    b: int = 0,
    h: int = 0,
) -> Blocks:
    """Count the pairs of every block, for sequence b and head h. A block that reaches over an edge is partial."""
    size_q, size_k = block_sizes(block_size)
    chunks = []
    for _, rows in row_chunks(mask_mod, sq, sk, device, size_q, b, h):
        padded = torch.nn.functional.pad(rows, (0, -sk % size_k, 0, -len(rows) % size_q))
        blocks = padded.view(padded.shape[0] // size_q, size_q, padded.shape[1] // size_k, size_k)
        chunks.append(blocks.sum(dim=(1, 3), dtype=torch.int32))
    counts = torch.cat(chunks)
    full = counts == size_q * size_k
    return Blocks(counts, full, (counts > 0) & ~full, (size_q, size_k))


_kept: Newest[tuple, tuple[Any, float]] = Newest(64)


def build_block_mask(
    mask_mod: MaskMod | None,
    sq: int,
    sk: int,
    device: torch.device | str = "cpu",
    block_size: BlockSize = 128,
    *,
    batch: int | None = None,
    heads: int | None = None,
) -> Any:
    """Return FlexAttention's BlockMask, kept for the next call; None for no mask.

    All sequences and heads share it, unless the mask reads b or h: then `batch` or `heads` must say how many there are.
    """
    return build_timed(mask_mod, sq, sk, device, block_size, batch, heads)[0]


def build_timed(
    mask_mod: MaskMod | None, sq: int, sk: int, device, block_size: BlockSize, batch: int | None, heads: int | None
) -> tuple[Any, float]:
    """Return (block mask, seconds of create_block_mask when it was built); (None, 0) for no mask."""
    if mask_mod is None:
        return None, 0.0
    check_device(mask_mod, device)
    sequences, own_heads = different_masks(mask_mod, batch or 0, heads or 0, device)
    if not (sequences and own_heads):
        missing = "its index b, give batch=" if not sequences else "its index h, give heads="
        raise ValueError(f"mask function {name_of(mask_mod)} reads {missing}, for how many of them blocks are listed.")
    lengths = whole_number("sq", sq), whole_number("sk", sk)
    key = (mask_mod, sequences, own_heads, *lengths, str(device), block_sizes(block_size))
    kept = key, captures(mask_mod)
    if kept not in _kept:
        _kept[kept] = _build(*key)
    return _kept[kept]


def _build(mask_mod, batch, heads, sq, sk, device, block_size) -> tuple[Any, float]:
    from torch.nn.attention.flex_attention import create_block_mask

    synchronize(device)
    began = time.perf_counter()
    with errors_of("mask function", mask_mod):
        block_mask = create_block_mask(mask_mod, batch, heads, sq, sk, device=str(device), BLOCK_SIZE=block_size)
    synchronize(device)
    return block_mask, time.perf_counter() - began


def seconds_to_build_block_mask(
    mask_mod: MaskMod, sq: int, sk: int, device: torch.device | str = "cpu", block_size: BlockSize = 128
) -> float:
    """Measure the seconds of a warm create_block_mask: the median of three."""
    return sorted(_build(mask_mod, 1, 1, sq, sk, device, block_sizes(block_size))[1] for _ in range(3))[1]


def synchronize(device: torch.device | str) -> None:
    """Wait for the GPU; return at once on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
