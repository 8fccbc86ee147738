"""The flash-attn packages, whichever is installed: FlashAttention 3, 2 or 4, named in `implementation`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from importlib import metadata

import torch

from utils.attention.registry import Provider
from utils.attention.request import Request
from utils.machine.device import Support, cuda_support

# What to import, the distribution that brings it, the oldest GPU: fastest first on a Hopper GPU.
_PACKAGES = {
    "FlashAttention 3": ("flash_attn_interface", "flash-attn-3", (9, 0)),
    "FlashAttention 4": ("flash_attn.cute", "flash-attn-4", (9, 0)),
    "FlashAttention 2": ("flash_attn.flash_attn_interface", "flash-attn", (8, 0)),
}


def window_size(request: Request, unlimited) -> tuple:
    """(keys to the left, keys to the right) in flash-attn's terms; its masks end at the last key, like ours."""
    if request.window is None:
        return (unlimited, unlimited)
    return (request.window - 1, 0 if request.causal else request.window - 1)


def rows_first(x: torch.Tensor) -> torch.Tensor:
    """(B, H, S, D) <-> (B, S, H, D): flash-attn's layout, a view with the head dimension contiguous."""
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.cache
def _installed() -> str | None:
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    for name, (module, _, needed) in _PACKAGES.items():
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is not None and capability >= needed:
            return name
    return None


@functools.cache
def _machine() -> Support:
    if not (cuda := cuda_support()):
        return Support(False, f"flash-attn needs an NVIDIA GPU: {cuda.reason}", cuda.remedy)
    name = _installed()
    if name is None:
        return Support(
            False,
            "None of flash-attn, flash-attn-3 and flash-attn-4 is installed for this GPU.",
            "Run pip install '.[gpu]' in the course's folder (flash-attn-4, nothing is compiled).",
        )
    return Support(True, f"{name} is installed.")


def accepts(request: Request) -> Support:
    if request.device.type != "cuda":
        return Support(False, f"it runs on an NVIDIA GPU, and the tensors are on {request.device}.")
    if request.dtype not in (torch.float16, torch.bfloat16):
        return Support(False, f"it takes float16 and bfloat16, not {request.type_name}.")
    if request.head_dim % 8 or request.head_dim > 256:
        return Support(False, f"its head dimension is a multiple of 8 up to 256, and {request.head_dim} was given.")
    return Support(True)


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: Request) -> torch.Tensor:
    name = _installed()
    function = importlib.import_module(_PACKAGES[name][0]).flash_attn_func
    out = function(
        rows_first(q),
        rows_first(k),
        rows_first(v),
        softmax_scale=request.scale,
        causal=request.causal,
        window_size=window_size(request, None if name == "FlashAttention 4" else -1),
    )
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def _implementation() -> str:
    name = _installed()
    try:
        return f"{name}, {_PACKAGES[name][1]} {metadata.version(_PACKAGES[name][1])}"
    except metadata.PackageNotFoundError:
        return name


PROVIDER = Provider(
    name="flash_attn",
    summary="the flash-attn package that is installed (FlashAttention 3, 4 or 2)",
    machine=_machine,
    accepts=accepts,
    run=_run,
    kernels=r"(?i)flash",
    implementation=_implementation,
)
