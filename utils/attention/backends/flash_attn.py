"""The flash-attn packages: whichever is installed ("flash_attn"), and FlashAttention 4 in the CuTe DSL ("cute").

FlashAttention 4's kernel is compiled when it is first called, and is warp-specialized on Hopper and Blackwell. It does
causal masks and windows by itself; other mask functions, and score modifiers, come into it through FlexAttention.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from importlib import metadata

import torch

from utils.attention.problem import (
    Backend,
    Bound,
    Options,
    Problem,
    bind_plain,
    describe_plain,
    positive_scale,
    refuse_functions,
)
from utils.machine.device import Support, cuda_support, flash_attn_support

# Module, distribution that brings it, oldest GPU: the fastest on a Hopper GPU first.
_PACKAGES = {
    "FlashAttention 3": ("flash_attn_interface", "flash-attn-3", (9, 0)),
    "FlashAttention 4": ("flash_attn.cute", "flash-attn-4", (9, 0)),
    "FlashAttention 2": ("flash_attn.flash_attn_interface", "flash-attn", (8, 0)),
}


def window_size(problem: Problem, unlimited: int | None) -> tuple:
    """Return (keys to the left, keys to the right) in flash-attn's terms; its masks end at the last key, like ours."""
    if problem.window is None:
        return (unlimited, unlimited)
    return (problem.window - 1, 0 if problem.causal else problem.window - 1)


def rows_first(x: torch.Tensor) -> torch.Tensor:
    """View (B, H, S, D) as (B, S, H, D), flash-attn's layout; copy if the head dimension is not contiguous."""
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def call_package(function, q, k, v, softmax_scale: float, **arguments) -> torch.Tensor:
    """Call a `flash_attn_func` on tensors (B, H, S, D)."""
    q, scale = positive_scale(q, softmax_scale)  # the kernels take the maximum before they scale
    out = function(*map(rows_first, (q, k, v)), softmax_scale=scale, **arguments)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


@functools.cache
def _installed() -> str:
    """Return the name of the fastest package that is installed for this GPU, "" if there is none."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    for name, (module, _, needed) in _PACKAGES.items():
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            spec = None
        if spec is not None and capability >= needed:
            return name
    return ""


@functools.cache
def _machine() -> Support:
    if not (cuda := cuda_support()):
        return Support(False, f"flash-attn needs an NVIDIA GPU: {cuda.reason}", cuda.remedy)
    name = _installed()
    if not name:
        return Support(
            False,
            "None of flash-attn, flash-attn-3 and flash-attn-4 is installed for this GPU.",
            "Run pip install '.[gpu]' in the course's folder (flash-attn-4, nothing is compiled).",
        )
    return Support(True, f"{name} is installed.")


def reason_against_tensors(problem: Problem) -> str:
    """Say why a kernel for 16-bit tensors of a GPU does not take tensors like these; "" if it does."""
    if problem.device.type != "cuda":
        return f"it needs an NVIDIA GPU, and the tensors are on {problem.device}."
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {problem.type_name}."
    if problem.head_dim % 8 or problem.head_dim > 256:
        return f"its head dimension is a multiple of 8 up to 256, and {problem.head_dim} was given."
    return ""


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> torch.Tensor:
    name = _installed()
    function = importlib.import_module(_PACKAGES[name][0]).flash_attn_func
    window = window_size(problem, None if name == "FlashAttention 4" else -1)
    return call_package(function, q, k, v, softmax_scale=problem.scale, causal=problem.causal, window_size=window)


def _implementation() -> str:
    name = _installed()
    try:
        return f"{name}, {_PACKAGES[name][1]} {metadata.version(_PACKAGES[name][1])}"
    except metadata.PackageNotFoundError:
        return name


# ---- FlashAttention 4 ---------------------------------------------------------------------------------------


def _native(problem: Problem) -> Problem | None:
    """Return the problem in the kernel's own causal mask and window; None if it needs a function.

    Documents are not turned into sequences: that was slower than the block mask (docs/flexattention.md), since the
    output has to be copied back to (B, H, S, D).
    """
    plain = problem.plain()
    return plain if plain is not None and plain.sq == problem.sq else None


def _refuses_cute(problem: Problem, options: Options) -> str:
    if _native(problem) is None:
        from utils.attention.backends.flex import refuses_flash

        return refuses_flash(problem, options)
    if options.block_size is not None:
        return "it does this mask by itself, without blocks, and a block_size was given."
    return reason_against_tensors(problem)


def _bind_cute(problem: Problem, options: Options) -> Bound:
    """Bind FlashAttention 4's kernel: its own mask if it has one, else FlexAttention's way into the same kernel."""
    plain = _native(problem)
    if plain is None:
        from utils.attention.backends.flex import bind_flash

        return bind_flash(problem, options)
    from flash_attn.cute import flash_attn_func

    mask = {"causal": plain.causal, "window_size": window_size(plain, None)}
    settings = {"kernel_mask": describe_plain(problem, plain)} if problem.has_functions else {}
    return Bound(lambda q, k, v: call_package(flash_attn_func, q, k, v, softmax_scale=plain.scale, **mask), settings)


BACKENDS = {
    "flash_attn": Backend(
        name="flash_attn",
        summary="the flash-attn package that is installed (FlashAttention 3, 4 or 2)",
        machine=_machine,
        refuses=refuse_functions(reason_against_tensors),
        bind=bind_plain(_run),
        kernels=r"(?i)flash",
        implementation=_implementation,
    ),
    "cute": Backend(
        name="cute",
        summary="FlashAttention 4 in the CuTe DSL (package flash-attn-4)",
        machine=lambda: flash_attn_support(4),
        refuses=_refuses_cute,
        bind=_bind_cute,
        kernels=r"(?i)flash_?attention|flash_fwd",
        implementation=lambda: f"flash-attn-4 {metadata.version('flash-attn-4')}",
        options=("block_size",),
        compiles=True,
    ),
}
