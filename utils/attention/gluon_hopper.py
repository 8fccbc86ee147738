"""This course's own FlashAttention for Hopper, in Gluon: step 5 of the ladder in `gluon_ladder`."""

from __future__ import annotations

import torch

from utils.attention.registry import Provider
from utils.attention.request import Request
from utils.machine.device import Support, gluon_support


def _accepts(request: Request) -> Support:
    if request.device.type != "cuda":
        return Support(False, f"it runs on a Hopper GPU, and the tensors are on {request.device}.")
    if request.dtype not in (torch.float16, torch.bfloat16):
        return Support(False, f"it takes float16 and bfloat16, not {request.type_name}.")
    if request.head_dim % 8 or not 8 <= request.head_dim <= 256:
        return Support(False, f"its head dimension is a multiple of 8 up to 256, and {request.head_dim} was given.")
    if request.needs_grad:
        return Support(False, "it has no backward pass yet, and an input requires a gradient.")
    return Support(True)


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: Request) -> torch.Tensor:
    from utils.attention.gluon.launch import forward

    return forward(q, k, v, causal=request.causal, scale=request.scale, window=request.window)


def _implementation() -> str:
    import triton

    return f"Gluon of Triton {triton.__version__}, step 5"


PROVIDER = Provider(
    name="gluon",
    summary="warp-specialized FlashAttention for Hopper, written in Gluon for this course",
    machine=gluon_support,
    accepts=_accepts,
    run=_run,
    kernels=r"attention_step5",
    implementation=_implementation,
)
