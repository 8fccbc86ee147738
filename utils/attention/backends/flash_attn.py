"""The flash-attn packages: whichever is installed ("flash_attn"), and FlashAttention 4 in the CuTe DSL ("cute").

FlashAttention 4's kernel is compiled when it is first called, and is warp-specialized on Hopper and Blackwell. It does
causal masks and windows by itself; other mask functions, and score modifiers, come into it through FlexAttention.
"""

from __future__ import annotations

import importlib
from importlib import metadata

import torch

from utils.attention.backends.flex import bind_flash, refuses_flash
from utils.attention.problem import (
    Backend,
    Bound,
    Options,
    Problem,
    bind_plain,
    describe_plain,
    positive_scale,
    reason_against_tensors,
    refuse_functions,
)
from utils.attention.sequences import packed_starts
from utils.machine.device import flash_attn_support

_MODULES = {4: "flash_attn.cute", 2: "flash_attn"}


def window_size(problem: Problem, unlimited: int | None) -> tuple:
    """Return (keys to the left, keys to the right) in flash-attn's terms; its masks end at the last key, like ours."""
    if problem.window is None:
        return (unlimited, unlimited)
    return (problem.window - 1, 0 if problem.causal else problem.window - 1)


def reason_against_batches(problem: Problem) -> str:
    """Say why a library that packs sequences as (S, H, D) does not take packed sequences of several batches."""
    return (
        f"it packs sequences of one batch, and there are {problem.batch}."
        if problem.lengths and problem.batch > 1
        else ""
    )


def rows_first(x: torch.Tensor) -> torch.Tensor:
    """View (B, H, S, D) as (B, S, H, D), flash-attn's layout; copy if the head dimension is not contiguous."""
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def call_package(function, q, k, v, softmax_scale: float, **arguments) -> torch.Tensor:
    """Call a `flash_attn_func` on tensors (B, H, S, D)."""
    q, scale = positive_scale(q, softmax_scale)  # the kernels take the maximum before they scale
    out = function(*map(rows_first, (q, k, v)), softmax_scale=scale, **arguments)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def _version() -> int:
    return 4 if flash_attn_support(4) else 2


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> torch.Tensor:
    version = _version()
    window = window_size(problem, None if version == 4 else -1)
    function = importlib.import_module(_MODULES[version]).flash_attn_func
    return call_package(function, q, k, v, softmax_scale=problem.scale, causal=problem.causal, window_size=window)


def _implementation() -> str:
    package = "flash-attn-4" if _version() == 4 else "flash-attn"
    return f"{package} {metadata.version(package)}"


# ---- FlashAttention 4 ---------------------------------------------------------------------------------------


def _native(problem: Problem) -> Problem | None:
    """Return the problem in the kernel's own causal mask, window and packed sequences; None if it needs a function.

    Documents of equal length are not turned into a batch: that was slower than the block mask (docs/flexattention.md), since the
    output has to be copied back to (B, H, S, D).
    """
    plain = problem.plain_or_packed()
    return plain if plain is not None and plain.sq == problem.sq else None


def _refuses_cute(problem: Problem, options: Options) -> str:
    plain = _native(problem)
    if plain is None:
        return refuses_flash(problem, options)
    if options.block_size is not None:
        return "it does this mask by itself, without blocks, and a block_size was given."
    return reason_against_tensors(problem) or reason_against_batches(plain)


def _bind_cute(problem: Problem, options: Options) -> Bound:
    """Bind FlashAttention 4's kernel: its own mask if it has one, else FlexAttention's way into the same kernel."""
    plain = _native(problem)
    if plain is None:
        return bind_flash(problem, options)
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    mask = {"causal": plain.causal, "window_size": window_size(plain, None)}
    settings = {"kernel_mask": describe_plain(problem, plain)} if problem.has_functions else {}
    if plain.lengths:
        starts, longest = packed_starts(plain.lengths, plain.device), max(plain.lengths)
        mask |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}

        def attend(q, k, v):
            q, scale = positive_scale(q, plain.scale)
            out = flash_attn_varlen_func(*(rows_first(x)[0] for x in (q, k, v)), softmax_scale=scale, **mask)
            return (out[0] if isinstance(out, tuple) else out)[None].transpose(1, 2)

        return Bound(attend, settings)
    return Bound(lambda q, k, v: call_package(flash_attn_func, q, k, v, softmax_scale=plain.scale, **mask), settings)


BACKENDS = {
    "flash_attn": Backend(
        name="flash_attn",
        summary="the flash-attn package that is installed (FlashAttention 4 or 2)",
        machine=lambda: flash_attn_support(2) or flash_attn_support(4),
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
