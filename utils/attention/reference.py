"""Attention in float64, written to be read: the specification that every provider is tested against."""

from __future__ import annotations

import torch

from utils.attention.request import allowed_keys, make_request


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, H, Sq, D) and log-sum-exp (B, H, Sq) in float64. A query without keys: zeros, minus infinity.

    The last query stands at the last key: query i has position i + Sk - Sq. causal: it sees keys at or before its
    position. window: only keys fewer than `window` positions away. One head at a time, so it needs Sq x Sk numbers.
    """
    request = make_request(q, k, v, causal, scale, window)
    keep = allowed_keys(request)
    group = request.heads // request.kv_heads
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float64, device=q.device)
    for b in range(request.batch):
        for h in range(request.heads):
            scores = q[b, h].double() @ k[b, h // group].double().T * request.scale
            if keep is not None:
                scores = scores.masked_fill(~keep, float("-inf"))
            lse[b, h] = torch.logsumexp(scores, -1)
            # exp(-inf - -inf) would be nan in a row without keys: there the maximum is taken as zero.
            weights = torch.exp(scores - torch.where(lse[b, h].isinf(), 0.0, lse[b, h])[:, None])
            out[b, h] = weights @ v[b, h // group].double()
    return out, lse
