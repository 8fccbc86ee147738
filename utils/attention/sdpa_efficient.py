"""SDPA's memory-efficient backend (CUTLASS, from xFormers): runs on old GPUs too, takes masks and fp32."""

import torch
from torch.nn.attention import SDPBackend

from utils.attention import sdpa
from utils.attention.registry import Provider
from utils.attention.request import Request
from utils.machine.device import Support

_BACKEND = SDPBackend.EFFICIENT_ATTENTION


def _accepts(request: Request) -> Support:
    if request.device.type != "cuda":
        return Support(False, f"it runs on an NVIDIA GPU, and the tensors are on {request.device}.")
    return sdpa.accepts(
        _BACKEND,
        request,
        masks=True,
        groups=False,
        dtypes=(torch.float16, torch.bfloat16, torch.float32),
        longest_head=1 << 10,
    )


PROVIDER = Provider(
    name="efficient",
    summary="SDPA pinned to its memory-efficient backend (CUTLASS)",
    machine=lambda: sdpa.probe(_BACKEND, "cuda"),
    accepts=_accepts,
    run=lambda q, k, v, request: sdpa.run(_BACKEND, q, k, v, request),
    kernels=r"fmha_cutlass",
)
