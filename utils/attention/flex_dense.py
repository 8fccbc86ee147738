"""Attention under any mask and score modifier with all scores stored: the float64 reference and honest baselines.

`flex_reference` is the specification. `stored_scores` is three operators over a mask held as data; compiled, it is the
baseline that a speed-up from sparsity should be told against: the same fusion, none of the skipping.
"""

from __future__ import annotations

import torch

from utils.attention.masks import MaskMod, causal, dense_mask
from utils.attention.score_mods import ScoreMod, modified


@torch.no_grad()
def flex_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask_mod: MaskMod | None = None,
    score_mod: ScoreMod | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Output (B, H, Sq, D) in float64, one head at a time; a query without keys gets zeros, as in FlexAttention.

    q (B, H, Sq, D); k, v (B, Hkv, Sk, D), H a multiple of Hkv. Mask and modifier are evaluated pair by pair.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    shared = dense_mask(mask_mod, q.shape[2], k.shape[2], q.device) if _same_for_all(mask_mod) else None
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = q[b, h].double() @ k[b, h // group].double().T * scale
            scores = modified(score_mod, scores, b, h)
            allowed = dense_mask(mask_mod, *scores.shape, q.device, b, h) if shared is None else shared
            scores = scores.masked_fill(~allowed, float("-inf"))
            weights = torch.softmax(scores, -1).nan_to_num(0.0)  # the softmax of nothing is nan
            out[b, h] = weights @ v[b, h // group].double()
    return out


def _same_for_all(mask_mod: MaskMod | None) -> bool:
    """The masks of `masks` ignore b and h; somebody else's may not."""
    if mask_mod is None:
        return True
    parts = getattr(mask_mod, "mods", ())
    known = mask_mod is causal or hasattr(mask_mod, "kind")
    return bool(known) and all(map(_same_for_all, parts))


def stored_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor | None,
    score_mod: ScoreMod | None,
    scale: float,
) -> torch.Tensor:
    """matmul, modifier, mask, softmax, matmul over (B, H, Sq, Sk) scores. `allowed` (Sq, Sk) bool, or None."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if scores.dtype.itemsize == 2:
        scores = scores.float()  # as FlexAttention does: modifier and softmax in fp32
    if score_mod is not None:
        batch, head, query, key = (torch.arange(size, device=q.device, dtype=torch.int32) for size in scores.shape)
        scores = score_mod(scores, batch[:, None, None, None], head[:, None, None], query[:, None], key)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return torch.softmax(scores, -1).to(q.dtype) @ v
