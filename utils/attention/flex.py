"""FlexAttention, compiled: masks are Python functions, inductor writes the kernel (Triton on a GPU, C++ on a CPU)."""

from __future__ import annotations

import functools

import torch

from utils.attention.registry import Provider
from utils.attention.request import Request
from utils.machine.device import Support, compile_support

# Beyond torch's limit of eight shapes flex_attention silently runs unfused, fifty times slower: more shapes, and
# an error rather than that.
_DYNAMO = {"recompile_limit": 256, "accumulated_recompile_limit": 1024, "fail_on_recompile_limit_hit": True}


def _mask_mod(request: Request):
    """The request's mask as a FlexAttention mask function; None if there is none."""
    shift, window, causal = request.sk - request.sq, request.window, request.causal

    def causal_mask(b, h, q, k):
        return k <= q + shift

    def window_mask(b, h, q, k):
        return (k > q + shift - window) & (k < q + shift + window)

    def causal_window_mask(b, h, q, k):
        return (k <= q + shift) & (k > q + shift - window)

    if window is None:
        return causal_mask if causal else None
    return causal_window_mask if causal else window_mask


@functools.lru_cache(maxsize=64)
def block_mask(request: Request, block: int | tuple[int, int] = 128):
    """The blocks of keys that each block of queries needs, once for all heads; kept for the next call."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask_mod = _mask_mod(request)
    if mask_mod is None:
        return None
    return create_block_mask(mask_mod, None, None, request.sq, request.sk, device=str(request.device), BLOCK_SIZE=block)


@functools.cache
def _compiled():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: Request, kernel_options: dict | None = None):
    """Compiled flex_attention; the first call of a shape compiles (seconds)."""
    with torch._dynamo.config.patch(_DYNAMO):
        return _compiled()(
            q,
            k,
            v,
            block_mask=block_mask(request),
            scale=request.scale,
            enable_gqa=request.grouped,
            kernel_options=kernel_options,
        )


def accepts(request: Request) -> Support:
    if request.device.type != ("cuda" if torch.cuda.is_available() else "cpu"):
        return Support(False, f"torch.compile was probed for another device than {request.device}.")
    if request.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return Support(False, f"it takes float16, bfloat16 and float32, not {request.type_name}.")
    if request.head_dim not in (8, 16, 32, 64, 128, 256):
        return Support(False, f"its head dimension is a power of two from 8 to 256, and {request.head_dim} was given.")
    if request.has_empty_rows:
        return Support(False, f"rows without keys are not tested with it (Sq {request.sq} > Sk {request.sk}).")
    if request.device.type == "cpu" and request.needs_grad:
        return Support(False, "on a CPU it has no backward pass, and an input requires a gradient.")
    return Support(True)


PROVIDER = Provider(
    name="flex",
    summary="FlexAttention compiled by inductor",
    machine=compile_support,
    accepts=accepts,
    run=run,
    kernels=r"triton_tem_fused|flex",
    cpu_operators=r"(?i)torch-compiled region|flex|cpp_fused",
    implementation=lambda: f"FlexAttention of torch {torch.__version__}",
)
