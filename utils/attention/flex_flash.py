"""FlexAttention with the FLASH backend: the mask function goes into FlashAttention 4's CuTe kernel."""

from __future__ import annotations

from utils.attention import flex
from utils.attention.registry import Provider
from utils.attention.request import Request
from utils.machine.device import Support, compile_support, flash_attn_support


def _machine() -> Support:
    return flash_attn_support(4) and compile_support()


def _accepts(request: Request) -> Support:
    if request.device.type != "cuda":
        return Support(False, f"it runs on an NVIDIA GPU, and the tensors are on {request.device}.")
    if request.type_name not in ("float16", "bfloat16"):
        return Support(False, f"it takes float16 and bfloat16, not {request.type_name}.")
    if request.head_dim > 128 and (request.causal or request.window is not None):
        return Support(
            False,
            "with a mask its head dimension ends at 128 (blocks of 128 keys do not fit its tile "
            f"of 80), and {request.head_dim} was given.",
        )
    if request.needs_grad:
        return Support(False, "it is used forward only here, and an input requires a gradient.")
    return flex.accepts(request)


PROVIDER = Provider(
    name="flex_flash",
    summary="FlexAttention with BACKEND=FLASH: FlashAttention 4's kernel with the mask inside",
    machine=_machine,
    accepts=_accepts,
    run=lambda q, k, v, request: flex.run(q, k, v, request, {"BACKEND": "FLASH"}),
    kernels=r"(?i)flash_?attention|flash_fwd|flash_attncute",
)
