"""Masks for sequences of unequal length: padded to one length (`seqlens`), or packed one after another (`cu_seqlens`).

The same lengths get the same function object, so that nothing is compiled anew.
"""

from __future__ import annotations

import functools
import itertools

import torch

from utils.attention.masks.mask_mods import MaskMod, both, document_ids, documents, named


def check_tensor(name: str, x, shape: tuple, device: torch.device, *dtypes: torch.dtype) -> None:
    """Raise an error unless x is a tensor of this shape (a word: any size) and of one of the types (none: int32)."""
    kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes or (torch.int32,))
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of {kinds}, and is a {type(x).__name__}.")
    fits = x.dim() == len(shape) and all(n == m or isinstance(n, str) for n, m in zip(shape, x.shape, strict=True))
    dense = not x.dim() or x.shape[-1] < 2 or x.stride(-1) == 1
    if not (fits and dense and x.device == device and x.dtype in (dtypes or (torch.int32,))):
        wanted = str(shape).replace("'", "")
        raise ValueError(
            f"{name} must be {kinds} of shape {wanted} on {device}, its last dimension contiguous; it is {x.dtype} of "
            f"shape {tuple(x.shape)} on {x.device}."
        )


def padded_mask(q: torch.Tensor, k: torch.Tensor, seqlens, is_causal: bool, window: int | None) -> MaskMod:
    """Return the mask of sequences with `seqlens` keys; the last query is at the last key, as in `attention_decode`."""
    check_tensor("seqlens", seqlens, (len(q),), q.device)
    return _padded_mask(read_lengths(seqlens, k.shape[2]), q.device, q.shape[2], is_causal, window)


def read_lengths(seqlens: torch.Tensor, keys: int) -> tuple[int, ...]:
    """Return the numbers of `seqlens`, which waits for the GPU; raise an error if a number is not from 0 to `keys`."""
    lengths = tuple(seqlens.tolist())
    if not 0 <= min(lengths) <= max(lengths) <= keys:
        raise ValueError(f"seqlens must be from 0 to the {keys} keys of k; they are {min(lengths)} to {max(lengths)}.")
    return lengths


@functools.lru_cache(maxsize=64)
def _padded_mask(lengths: tuple[int, ...], device, sq: int, is_causal: bool, window: int | None) -> MaskMod:
    ends = torch.tensor(lengths, dtype=torch.int32, device=device)
    text = f"padded({'causal' if is_causal else 'full'}, window {window})"
    return named(mask_by_ends(ends, sq, is_causal, window), text, lengths=lengths)


def mask_by_ends(ends: torch.Tensor, sq: int, is_causal: bool, window: int | None) -> MaskMod:
    """Return the mask of sequences with `ends` (B,) keys; the last of `sq` queries is at the last key."""

    def mask_mod(b, h, q, k):
        allowed, distance = k < ends[b], q + ends[b] - sq - k
        if is_causal:
            allowed = allowed & (distance >= 0)
        return allowed if window is None else allowed & (distance < window) & (-distance < window)

    return mask_mod


def clear_behind(ends: torch.Tensor, *caches: torch.Tensor) -> list[torch.Tensor]:
    """Return keys or values (B, Hkv, S, D) with zeros behind `ends`: memory there may hold nan, and zero times nan is nan."""
    filled = torch.arange(caches[0].shape[2], device=ends.device) < ends[:, None]
    return [torch.where(filled[:, None, :, None], x, 0) for x in caches]


def packed_mask(q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor) -> MaskMod:
    """Return the mask of packed sequences that begin at the tokens `cu_seqlens` (0, ..., S)."""
    check_tensor("cu_seqlens", cu_seqlens, ("sequences + 1",), q.device)
    places, tokens = cu_seqlens.tolist(), q.shape[2]
    lengths = tuple(end - start for start, end in itertools.pairwise(places))
    if tokens != k.shape[2]:
        raise ValueError(f"cu_seqlens packs as many queries as keys, and there are {tokens} and {k.shape[2]}.")
    if len(places) < 2 or places[0] != 0 or places[-1] != tokens or min(lengths) < 0:
        raise ValueError(
            f"cu_seqlens must rise from 0 to the {tokens} tokens of q; it is {places[:4]}{' ...' if places[4:] else ''}."
        )
    return _packed_mask(tuple(n for n in lengths if n), q.device)


@functools.lru_cache(maxsize=64)
def _packed_mask(lengths: tuple[int, ...], device) -> MaskMod:
    if len(set(lengths)) == 1:
        return documents(lengths[0])
    return named(documents(document_ids(lengths, device)), f"packed({len(lengths)} sequences)", lengths=lengths)


@functools.lru_cache(maxsize=64)
def packed_starts(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return `cu_seqlens`: the first token of each packed sequence, and the end of the last sequence."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


both_masks = functools.lru_cache(maxsize=64)(both)
