"""SDPA's flash backend: FlashAttention 2 inside torch on a GPU, its own fused loop on a CPU."""

import torch
from torch.nn.attention import SDPBackend

from utils.attention import sdpa
from utils.attention.registry import Provider
from utils.attention.request import Request
from utils.machine.device import Support

_BACKEND = SDPBackend.FLASH_ATTENTION


def _accepts(request: Request) -> Support:
    if request.device.type == "cpu":  # there it takes masks, any head dimension and fp32, in its own loop
        return sdpa.accepts(_BACKEND, request, masks=True)
    return sdpa.accepts(_BACKEND, request, masks=False, dtypes=(torch.float16, torch.bfloat16), longest_head=256)


PROVIDER = Provider(
    name="flash",
    summary="SDPA pinned to its flash backend (FlashAttention 2 on a GPU)",
    machine=lambda: sdpa.probe(_BACKEND, "cuda" if torch.cuda.is_available() else "cpu"),
    accepts=_accepts,
    run=lambda q, k, v, request: sdpa.run(_BACKEND, q, k, v, request),
    kernels=r"pytorch_flash|flash_fwd",
    cpu_operators=r"aten::_scaled_dot_product_flash_attention_for_cpu",
)
