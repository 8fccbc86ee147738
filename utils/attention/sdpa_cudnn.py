"""SDPA's cuDNN backend: NVIDIA's own fused attention, compiled by cuDNN for each shape. The mark to reach on Hopper."""

import torch
from torch.nn.attention import SDPBackend

from utils.attention import sdpa
from utils.attention.registry import Provider
from utils.attention.request import Request
from utils.machine.device import Support

_BACKEND = SDPBackend.CUDNN_ATTENTION


def _accepts(request: Request) -> Support:
    if request.device.type != "cuda":
        return Support(False, f"it runs on an NVIDIA GPU, and the tensors are on {request.device}.")
    if request.sk == 1:
        return Support(False, "torch does not give it a single key.")
    longest = 256 if torch.cuda.get_device_capability(request.device) >= (9, 0) else 128
    return sdpa.accepts(_BACKEND, request, masks=False, dtypes=(torch.float16, torch.bfloat16), longest_head=longest)


def _implementation() -> str:
    return f"cuDNN {torch.backends.cudnn.version()}"


PROVIDER = Provider(
    name="cudnn",
    summary="SDPA pinned to its cuDNN backend",
    machine=lambda: sdpa.probe(_BACKEND, "cuda"),
    accepts=_accepts,
    run=lambda q, k, v, request: sdpa.run(_BACKEND, q, k, v, request),
    kernels=r"cudnn.*(sdpa|flash)",
    implementation=_implementation,
)
