"""FlashAttention 4, written in the CuTe DSL: compiled when first called, warp-specialized on Hopper and Blackwell."""

from __future__ import annotations

import torch

from utils.attention import flash_attn_package
from utils.attention.registry import Provider
from utils.attention.request import Request
from utils.machine.device import Support, flash_attn_support


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: Request) -> torch.Tensor:
    from flash_attn.cute import flash_attn_func

    q, k, v = map(flash_attn_package.rows_first, (q, k, v))
    out = flash_attn_func(
        q,
        k,
        v,
        softmax_scale=request.scale,
        causal=request.causal,
        window_size=flash_attn_package.window_size(request, None),
    )
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def _implementation() -> str:
    from importlib import metadata

    return f"flash-attn-4 {metadata.version('flash-attn-4')}"


def _machine() -> Support:
    return flash_attn_support(4)


PROVIDER = Provider(
    name="cute",
    summary="FlashAttention 4 in the CuTe DSL (package flash-attn-4)",
    machine=_machine,
    accepts=flash_attn_package.accepts,
    run=_run,
    kernels=r"(?i)flash_?attention|flash_fwd",
    implementation=_implementation,
)
