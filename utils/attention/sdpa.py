"""What the four SDPA providers share: one backend of scaled_dot_product_attention, pinned, never another."""

from __future__ import annotations

import functools
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from utils.attention.request import Refused, Request, allowed_keys
from utils.machine.device import Support


@functools.cache
def probe(backend: SDPBackend, device_type: str) -> Support:
    """Whether a backend runs on a kind of device, by a call: torch's own switches say yes where it cannot."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return Support(False, "there is no NVIDIA GPU.", "Use a machine with an NVIDIA GPU.")
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    x = torch.ones(1, 1, 16, 64, dtype=dtype, device=device_type)
    try:
        with sdpa_kernel(backend), warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            F.scaled_dot_product_attention(x, x, x)
    except RuntimeError as error:
        why = str(error).splitlines()[0].rstrip(".")
        return Support(
            False, f"torch's {backend.name} backend does not run on {device_type}: {why}.", "Use another SDPA provider."
        )
    return Support(True, f"torch {torch.__version__}'s {backend.name} backend, pinned.")


def run(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: Request) -> torch.Tensor:
    """Scaled dot product attention with one backend; a mask only where `causal` alone does not say it."""
    plain = request.window is None and request.aligned_at_start
    mask = None if plain else allowed_keys(request)
    with sdpa_kernel(backend), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=plain and request.causal,
                scale=request.scale,
                enable_gqa=request.grouped,
            )
        except RuntimeError as error:
            if "No available kernel" not in str(error) and "No viable backend" not in str(error):
                raise
            # torch tells why in warnings, among those about the backends that were switched off.
            reasons = [str(warning.message).split(" (Triggered")[0] for warning in said]
            reasons = [text for text in reasons if "disabled" not in text and "not used because" not in text]
            raise Refused(" ".join(reasons) or "torch refuses this shape and does not say why.") from error


def accepts(
    backend: SDPBackend,
    request: Request,
    *,
    masks: bool,
    groups: bool = True,
    dtypes: tuple[torch.dtype, ...] | None = None,
    longest_head: int | None = None,
) -> Support:
    """Whether a backend takes a request. masks: it takes a mask (windows, or causal with Sq != Sk)."""
    kind = request.device.type
    if not (here := probe(backend, kind)):
        return Support(False, here.reason, here.remedy)
    if request.has_empty_rows:
        return Support(False, f"SDPA leaves rows without keys undefined (Sq {request.sq} > Sk {request.sk}).")
    if dtypes is not None and request.dtype not in dtypes:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return Support(False, f"it takes {names} on {kind}, not {request.type_name}.")
    if longest_head is not None and request.head_dim > longest_head:
        return Support(False, f"its head dimension ends at {longest_head}, and {request.head_dim} was given.")
    if longest_head is not None and request.head_dim % 8:
        return Support(False, f"its head dimension is a multiple of 8, and {request.head_dim} was given.")
    if not masks and not (request.window is None and request.aligned_at_start):
        what = "a sliding window" if request.window is not None else f"causal with Sq {request.sq} and Sk {request.sk}"
        return Support(False, f"it takes no mask, and {what} needs one.")
    if request.grouped and not groups:
        return Support(False, f"it takes no grouped heads ({request.heads} over {request.kv_heads}).")
    return Support(True)
