"""Parts that the hidden checks of lab 4 share: calls that torch refuses, its reasons, and attention in float64."""

from __future__ import annotations

import contextlib
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from utils.attention import reference
from utils.checking.labs.lab4_sdpa.common import BACKENDS


def reasons_of(backend: str, q, k, v, **options) -> list[str]:
    """Return torch's reasons to refuse a call with this backend alone; "" if torch runs the call."""
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            F.scaled_dot_product_attention(q, k, v, **options)
            return []
        except RuntimeError as error:
            first_line = str(error).splitlines()[0]
    reasons = [str(warning.message).split(" (Triggered internally")[0] for warning in caught]
    reasons = [text for text in reasons if "not used because" not in text and "runtime disabled" not in text]
    return reasons or [first_line]


# Every torch from 2.11 to 2.15 refuses these calls. Tensors of three dimensions and one key head for all heads are not
# here, because flash on a CPU computes them from 2.14 on. Keys of length zero are not here: only 2.11 refuses them.
KNOCKED_OUT = (
    "a head dimension that is not the last in memory",
    "dropout",
    "two dimensions",
    "values narrower than keys",
    "one batch of keys for all",
)


def knock_out(name: str, q, k, v) -> tuple[tuple, dict]:
    """Return (q, k, v) and options of a CPU call that torch's flash backend refuses and its math backend computes."""
    if name == KNOCKED_OUT[0]:
        return (q.mT.contiguous().mT, k, v), {}
    if name == "dropout":
        return (q, k, v), {"dropout_p": 0.5}
    if name == "two dimensions":
        return (q[0, 0], k[0, 0], v[0, 0]), {}
    if name == "values narrower than keys":
        return (q, k, v[..., : v.shape[-1] // 2].contiguous()), {}
    wide = torch.cat([q, q])
    return (wide, k[:1], v[:1]), {}


def other_refusals(q, k, v) -> dict[str, tuple[str, tuple, dict]]:
    """Return further calls that raise torch's RuntimeError, {name: (backend, (q, k, v), options)}.

    The words of the error differ between versions of torch. A call is left out if this version computes it, or raises
    another error. The dispatcher accepts the wrong call of math, and an operator behind the first product raises the error.
    """
    few = k[:, : k.shape[1] - 1], v[:, : v.shape[1] - 1]
    calls = {
        "math with a mask of another size": ("math", (q, k, v), {"attn_mask": q.new_zeros(q.shape[2], k.shape[2] + 3)}),
        "flash with three key heads for four": ("flash", (q, *few), {"enable_gqa": True}),
        "flash with integers": ("flash", (q.int(), k.int(), v.int()), {}),
        "cudnn on CPU tensors": ("cudnn", (q, k, v), {}),
        "efficient on CPU tensors": ("efficient", (q, k, v), {}),
    }
    found = {}
    for name, (backend, tensors, options) in calls.items():
        with contextlib.suppress(Exception):
            if reasons_of(backend, *tensors, **options):
                found[name] = backend, tensors, options
    return found


def reference_attention(q, k, v, causal: bool = False) -> torch.Tensor:
    """Compute attention of (B, H, Sq, D) over (B, Hkv, Sk, D) in float64; causal: the last query sees the last key."""
    return reference(q.double(), k.double(), v.double(), causal=causal)[0]
