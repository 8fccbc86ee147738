"""Attention in float64, written to be read. It is the specification: tests compare every backend with it.

    out, lse = reference(q, k, v, causal=True)
    out, (dq, dk, dv) = reference_gradients(q, k, v, dout, mask_mod=both(causal, documents(1024)))

It computes one head and a few rows of queries at a time, so that long sequences fit in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from utils.attention.masks.mask_mods import dense_mask, different_masks, evaluate, same_for_all_heads
from utils.attention.masks.score_mods import modify_scores
from utils.attention.problem import Problem, make_problem

CHUNK_BYTES = 512 * 1024**2  # memory for the scores of one chunk of rows, with their gradients


def allowed_keys(problem: Problem) -> torch.Tensor | None:
    """Return the whole mask, True where a query sees a key; None if every query sees every key.

    Its shape is (Sq, Sk) if all sequences and heads have the same mask, else (B, H, Sq, Sk); B or H is 1 if the mask ignores it.
    """
    mask, sq, sk, device, allowed = problem.mask_mod, problem.sq, problem.sk, problem.device, None
    if mask is not None:
        sequences, heads = different_masks(mask, problem.batch, problem.heads, device)
        each = [dense_mask(mask, sq, sk, device, b, h) for b in range(sequences) for h in range(heads)]
        allowed = each[0] if len(each) == 1 else torch.stack(each).view(sequences, heads, sq, sk)
    queries, keys = (torch.arange(n, device=device) for n in (sq, sk))
    return visible_pairs(problem, queries, keys, allowed)


def visible_pairs(problem: Problem, queries, keys, allowed: torch.Tensor | None) -> torch.Tensor | None:
    """Return the pairs of `allowed` that `causal` and `window` let through. None means all pairs, as argument and as result."""
    if not problem.causal and problem.window is None:
        return allowed
    distance = queries[:, None] + (problem.sk - problem.sq) - keys  # the last query is at the last key
    keep = torch.ones_like(distance, dtype=torch.bool) if allowed is None else allowed
    if problem.causal:
        keep = keep & (distance >= 0)
    return keep if problem.window is None else keep & (distance.abs() < problem.window)


@torch.no_grad()
def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, allowed: torch.Tensor | None = None, **arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (B, H, Sq, D) and the log-sum-exp (B, H, Sq) of an attention in float64.

    A query without keys gets zeros, and minus infinity as its log-sum-exp. The arguments are those of `attention`, and
    `allowed`: a mask as data, bool, that broadcasts to (B, H, Sq, Sk), True where a query sees a key.
    """
    problem = make_problem(q, k, v, **arguments)
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float64, device=q.device)
    for b, h, kv, rows, mask in _pieces(problem, allowed):
        query, keys, values = q[b, h, rows].double(), k[b, kv].double(), v[b, kv].double()
        out[b, h, rows], lse[b, h, rows] = _attend(problem, query, keys, values, mask, b, h, rows.start)
    return out, lse


def reference_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, **arguments
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the output and, by torch.autograd, the gradients of q, k and v in float64; dout: gradient of the output.

    The other arguments are those of `attention`.
    """
    q, k, v = q.detach(), k.detach(), v.detach()
    problem = make_problem(q, k, v, **arguments)
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, k, v))
    for b, h, kv, rows, mask in _pieces(problem, None):
        tensors = [x.double().requires_grad_() for x in (q[b, h, rows], k[b, kv], v[b, kv])]
        with torch.enable_grad():
            part, _ = _attend(problem, tensors[0], tensors[1], tensors[2], mask, b, h, rows.start)
        parts = torch.autograd.grad(part, tensors, dout[b, h, rows].double())
        out[b, h, rows], dq[b, h, rows] = part.detach(), parts[0]
        dk[b, kv] += parts[1]
        dv[b, kv] += parts[2]
    return out, (dq, dk, dv)


def _pieces(
    problem: Problem, allowed: torch.Tensor | None
) -> Iterator[tuple[int, int, int, slice, torch.Tensor | None]]:
    """Yield (sequence, head, head of K and V, rows of queries, mask of these rows or None)."""
    step = max(1, CHUNK_BYTES // (8 * 6 * problem.sk))
    group = problem.heads // problem.kv_heads
    if allowed is not None:
        allowed = allowed.expand(problem.batch, problem.heads, problem.sq, problem.sk)
    for first in range(0, problem.sq, step):
        rows = slice(first, min(first + step, problem.sq))
        shared = same_for_all_heads(problem.mask_mod) and allowed is None
        mask = _mask_rows(problem, rows, 0, 0) if shared else None
        for b in range(problem.batch):
            for h in range(problem.heads):
                if not shared:
                    mask = _mask_rows(problem, rows, b, h)
                if allowed is not None:
                    mask = allowed[b, h, rows] if mask is None else mask & allowed[b, h, rows]
                yield b, h, h // group, rows, mask


def _mask_rows(problem: Problem, rows: slice, b: int, h: int) -> torch.Tensor | None:
    queries = torch.arange(rows.start, rows.stop, device=problem.device, dtype=torch.int32)
    keys = torch.arange(problem.sk, device=problem.device, dtype=torch.int32)
    mask = None if problem.mask_mod is None else evaluate(problem.mask_mod, queries, keys, b, h)
    return visible_pairs(problem, queries, keys, mask)


def _attend(problem: Problem, query, keys, values, mask, b: int, h: int, first_query: int):
    """Return (output, log-sum-exp) of some rows of one head: query (rows, D), keys and values (Sk, D), float64."""
    scores = query @ keys.T * problem.scale
    scores = modify_scores(problem.score_mod, scores, b, h, first_query)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    # A row without keys subtracts zero, because exp(-inf - -inf) would be nan.
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[:, None])
    return weights @ values, lse
