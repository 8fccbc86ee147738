"""SDPA's math backend: matmul, softmax, matmul inside torch; runs everywhere, takes everything."""

from torch.nn.attention import SDPBackend

from utils.attention import sdpa
from utils.attention.registry import Provider
from utils.machine.device import Support

_BACKEND = SDPBackend.MATH

PROVIDER = Provider(
    name="math",
    summary="SDPA pinned to its math backend: unfused, inside torch",
    machine=lambda: Support(True, "Part of torch, on every device."),
    accepts=lambda request: sdpa.accepts(_BACKEND, request, masks=True),
    run=lambda q, k, v, request: sdpa.run(_BACKEND, q, k, v, request),
    kernels=r"(?i)softmax|gem[mv]|nvjet",
    cpu_operators=r"aten::_scaled_dot_product_attention_math",
)
