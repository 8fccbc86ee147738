"""scaled_dot_product_attention: its four backends, each pinned, and torch's own choice.

A pin allows one backend only. If that backend does not take the call, torch raises an error, and its reason becomes a
`Refused`. `is_causal` is used if it means the same as `causal`; all other masks are tensors.
"""

from __future__ import annotations

import functools
import re
import threading
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from utils.attention.masks.mask_mods import name_of
from utils.attention.problem import Attend, Backend, Bound, Options, Problem, Refused, on_plain_shapes, positive_scale
from utils.attention.reference import allowed_keys
from utils.machine.device import Support
from utils.validation import first_line

HALF = (torch.float16, torch.bfloat16)

# {operator of a backend in a trace: the backend}. The backward pass of math has plain operators only.
_KINDS = {
    "cudnn_attention": "cudnn",
    "flash_attention": "flash",
    "flash_attention_for_cpu": "flash",
    "efficient_attention": "efficient",
    "attention_math": "math",
    "fused_attention_overrideable": "overrideable",
}
FORWARD_OPERATORS = {f"aten::_scaled_dot_product_{kind}": name for kind, name in _KINDS.items()}
BACKWARD_OPERATORS = {f"{operator}_backward": name for operator, name in FORWARD_OPERATORS.items() if name != "math"}
MATH_BACKWARD = "aten::_softmax_backward_data"


@dataclass(frozen=True)
class Pin:
    """One SDPA backend and its limits on a GPU. On a CPU, flash is a different loop without these limits."""

    backend: SDPBackend
    summary: str
    kernels: str
    on_cpu: bool = False
    masks: bool = False  # whether it takes a mask as a tensor
    groups: bool = True  # whether it takes fewer heads of K and V than of Q
    dtypes: tuple[torch.dtype, ...] | None = None
    longest_head: int | None = None


PINS = {
    "math": Pin(
        SDPBackend.MATH,
        "its math backend: unfused, inside torch",
        r"(?i)softmax|gem[mv]|nvjet",
        on_cpu=True,
        masks=True,
    ),
    "flash": Pin(
        SDPBackend.FLASH_ATTENTION,
        "its flash backend (FlashAttention 2 on a GPU)",
        r"pytorch_flash|flash_fwd",
        on_cpu=True,
        dtypes=HALF,
        longest_head=256,
    ),
    "efficient": Pin(
        SDPBackend.EFFICIENT_ATTENTION,
        "its memory-efficient backend (CUTLASS, from xFormers)",
        r"fmha_cutlass",
        masks=True,
        groups=False,
        dtypes=(*HALF, torch.float32),
        longest_head=1 << 10,
    ),
    "cudnn": Pin(
        SDPBackend.CUDNN_ATTENTION, "its cuDNN backend", r"cudnn.*(sdpa|flash)", dtypes=HALF, longest_head=256
    ),
}


_PART_OF_TORCH = Support(True, "Part of torch, on every device.")


@functools.cache
def probe(backend: SDPBackend, device_type: str) -> Support:
    """Call a backend to see whether it runs on a kind of device: torch's switches may say yes for a backend that cannot run."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return Support(False, "there is no NVIDIA GPU.", "Use a machine with an NVIDIA GPU.")
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    x = torch.ones(1, 1, 16, 64, dtype=dtype, device=device_type)
    try:
        _raise_refusals(_pin(backend, F.scaled_dot_product_attention))(x, x, x)
    except RuntimeError as error:
        why = f"torch's {backend.name} backend does not run on {device_type}: {str(error).splitlines()[0]}"
        return Support(False, why, "Use another SDPA backend.")
    return Support(True, f"torch {torch.__version__}'s {backend.name} backend, pinned.")


def _machine(pin: Pin) -> Support:
    if pin.backend == SDPBackend.MATH:
        return _PART_OF_TORCH
    return probe(pin.backend, "cpu" if pin.on_cpu and not torch.cuda.is_available() else "cuda")


def _needs_mask(problem: Problem) -> bool:
    """Whether a problem needs a mask as a tensor: is_causal is aligned at the first query and key."""
    return problem.mask_mod is not None or problem.window is not None or (problem.causal and problem.sq != problem.sk)


def _refuses(pin: Pin, problem: Problem, options: Options) -> str:
    kind, on_cpu = problem.device.type, problem.device.type == "cpu"
    if on_cpu and not pin.on_cpu:
        return f"it runs on an NVIDIA GPU, and the tensors are on {problem.device}."
    if not (available := probe(pin.backend, kind)):
        return available.reason
    if reason := _refuses_functions(problem):
        return reason
    if on_cpu:
        return ""
    if pin.dtypes is not None and problem.dtype not in pin.dtypes:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in pin.dtypes)
        return f"it takes {names} on {kind}, not {problem.type_name}."
    longest = pin.longest_head
    if pin.backend == SDPBackend.CUDNN_ATTENTION:
        if problem.sk == 1:
            return "torch does not give it a single key."
        longest = 256 if torch.cuda.get_device_capability(problem.device) >= (9, 0) else 128
    if longest is not None and (problem.head_dim > longest or problem.head_dim % 8):
        limit = f"ends at {longest}" if problem.head_dim > longest else "is a multiple of 8"
        return f"its head dimension {limit}, and {problem.head_dim} was given."
    plain = problem.plain() or problem
    if not pin.masks and _needs_mask(plain):
        mask = "a sliding window" if plain.window is not None else f"causal with Sq {plain.sq} and Sk {plain.sk}"
        mask = mask if plain.mask_mod is None else name_of(plain.mask_mod)
        return f"it takes no mask, and {mask} needs one."
    if problem.grouped and not pin.groups:
        return f"it takes no grouped heads ({problem.heads} over {problem.kv_heads})."
    return ""


def _refuses_functions(problem: Problem, options: object = None) -> str:
    if problem.score_mod is not None:
        return f"it takes no score modifier, and {name_of(problem.score_mod)} was given."
    if problem.has_empty_rows:
        return f"SDPA leaves rows without keys undefined (Sq {problem.sq} > Sk {problem.sk})."
    return ""


def separate_rows(q: torch.Tensor) -> torch.Tensor:
    """Return queries without overlapping rows: torch's flash kernels write an output with the strides of q."""
    return q.contiguous() if min(q.stride()[:3]) < q.shape[3] else q


def _bind(backend: SDPBackend | None, problem: Problem, options: Options) -> Bound:
    """Bind a pinned backend. None binds torch's own choice, which gets documents as a mask, and not as sequences."""
    plain = problem.plain() or problem
    if backend is None and plain.sq != problem.sq:
        plain = problem
    began = time.perf_counter()
    mask: Any = None
    if _needs_mask(plain):
        mask = allowed_keys(plain)
        if plain.mask_mod is not None and not bool(mask.any(-1).all()):
            raise Refused(f"SDPA leaves rows without keys undefined, and {name_of(plain.mask_mod)} has such rows.")
    arguments = dict(attn_mask=mask, is_causal=plain.causal and mask is None, enable_gqa=plain.grouped)

    def attend(q, k, v):
        # On a CPU, torch's flash backend scales the minus infinity of a causal mask, too: a scale that is not positive breaks it.
        q, scale = positive_scale(separate_rows(q), plain.scale)
        return F.scaled_dot_product_attention(q, k, v, scale=scale, **arguments)

    pinned = attend if backend is None else _pin(backend, attend)
    call, first = (on_plain_shapes(problem, plain, x) for x in (pinned, _raise_refusals(pinned)))
    seconds = {"mask": time.perf_counter() - began}
    return Bound(call, {"stored_mask": mask is not None}, seconds, first=first, light=mask is None)


# {backend: NAME} of torch's switches `torch._C._get_NAME_sdp_enabled` and `torch._C._set_sdp_use_NAME`.
_SWITCHES = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "mem_efficient",
    SDPBackend.MATH: "math",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.OVERRIDEABLE: "overrideable",
}
_SWITCHING = threading.RLock()  # all threads share the switches: without the lock a thread would run another's pin


def _pin(backend: SDPBackend, attend: Attend) -> Attend:
    """Return `attend` with one backend pinned, as under `sdpa_kernel`.

    That context manager takes several times as long as the call, so only torch.compile, which knows it, gets it.
    """
    reads = [getattr(torch._C, f"_get_{name}_sdp_enabled") for name in _SWITCHES.values()]
    writes = [getattr(torch._C, f"_set_sdp_use_{name}") for name in _SWITCHES.values()]
    pinned = [other == backend for other in _SWITCHES]

    def attend_pinned(q, k, v):
        if torch.compiler.is_compiling():
            with sdpa_kernel(backend):
                return attend(q, k, v)
        with _SWITCHING:
            before = [read() for read in reads]
            try:
                for write, on in zip(writes, pinned, strict=True):
                    write(on)
                return attend(q, k, v)
            finally:
                for write, on in zip(writes, before, strict=True):
                    write(on)

    return attend_pinned


def _raise_refusals(attend: Attend) -> Attend:
    """Return `attend` with an error: it raises Refused with torch's reason if the pinned backend does not take the call.

    Torch gives its reasons as warnings. (`torch.backends.cuda.can_use_flash_attention(params, debug=True)` and similar
    functions answer without a call. But on a GPU they write the reason to standard error, and on a CPU they always say no.)
    """

    def attend_or_refuse(q, k, v):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                return attend(q, k, v)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                if "DefaultCPUAllocator" in str(error) or "CUDA error" in str(error):
                    raise
                raise Refused(_reasons(caught) or f"torch: {first_line(error).rstrip('.')}.") from error

    return attend_or_refuse


def _reasons(caught: list) -> str:
    """Return torch's warnings as sentences, without their origin and without warnings about other backends."""
    texts = [re.sub(r"\s*\((?:Triggered|function) .*", "", str(w.message), flags=re.S).strip() for w in caught]
    texts = [text for text in texts if "not used because" not in text and "been runtime disabled" not in text]
    return " ".join(text if text.endswith(".") else f"{text}." for text in dict.fromkeys(texts) if text)


def _implementation(name: str) -> str:
    if name == "cudnn":
        return f"cuDNN {torch.backends.cudnn.version()}"
    return f"SDPA of torch {torch.__version__}, {name} alone"


def _pinned_backend(name: str, pin: Pin) -> Backend:
    on_cpu = "|".join(f"{operator}$" for operator, ran in FORWARD_OPERATORS.items() if ran == name)
    return Backend(
        name=name,
        summary=f"SDPA pinned to {pin.summary}",
        machine=functools.partial(_machine, pin),
        refuses=functools.partial(_refuses, pin),
        bind=functools.partial(_bind, pin.backend),
        kernels=pin.kernels,
        cpu_operators=on_cpu if pin.on_cpu else "",
        implementation=functools.partial(_implementation, name),
        takes_v_dim=name == "math",
    )


BACKENDS = {name: _pinned_backend(name, pin) for name, pin in PINS.items()}
BACKENDS["sdpa"] = Backend(
    name="sdpa",
    summary="SDPA with torch's own choice of backend",
    machine=lambda: _PART_OF_TORCH,
    refuses=_refuses_functions,
    bind=functools.partial(_bind, None),
    kernels="|".join(pin.kernels for pin in PINS.values()),
    cpu_operators=r"aten::_scaled_dot_product_",
    implementation=lambda: f"SDPA of torch {torch.__version__}, its own choice",
    takes_v_dim=True,
)
