"""Unfused attention: matmul, softmax, matmul, each a kernel of its own. The baseline of every lab.

The scores, (B, H, Sq, Sk), are written to and read from memory three times: at S = 16384 and 16 heads, 8.6 GB in bf16.
"""

from __future__ import annotations

import torch

from utils.attention.registry import Provider
from utils.attention.request import Request, allowed_keys
from utils.machine.device import Support


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: Request) -> torch.Tensor:
    group = request.heads // request.kv_heads
    q = q.unflatten(1, (request.kv_heads, group))  # heads that share K and V side by side: broadcast, not repeated
    scores = q @ k.unsqueeze(2).transpose(-1, -2) * request.scale
    keep = allowed_keys(request)
    if keep is not None:
        scores = scores.masked_fill(~keep, float("-inf"))
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    if request.has_empty_rows:
        weights = weights.nan_to_num(0.0)  # the softmax of nothing
    return (weights @ v.unsqueeze(2)).flatten(1, 2)


PROVIDER = Provider(
    name="naive",
    summary="matmul, softmax, matmul: unfused",
    machine=lambda: Support(True, "Plain torch operators."),
    accepts=lambda request: Support(True),
    run=_run,
    kernels=r"gemm|nvjet|cutlass|cublas|gemv|dot_kernel|splitK",
    cpu_operators=r"aten::(bmm|matmul)",
)
