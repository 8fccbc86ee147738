"""Three flash-attn backends: the installed package ("flash_attn"), FlashAttention 4 in the CuTe DSL ("cute"), torch's ("varlen").

FlashAttention 4's kernel is compiled at its first call, and is warp-specialized on Hopper and Blackwell. It does causal
masks and windows by itself. FlexAttention compiles all other mask functions, and score modifiers, into it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from importlib import metadata

import torch

from utils.attention.backends.flex import bind_flash, refuses_flash
from utils.attention.backends.sdpa import separate_rows
from utils.attention.choosing import of_lengths
from utils.attention.problem import Backend, Options, Problem, positive_scale
from utils.attention.sequences import packed_starts
from utils.machine.device import Support, cuda_support, flash_attn_support

_PACKAGES: dict = {4: ("flash_attn.cute", None), 2: ("flash_attn", -1)}  # {version: (package, its value for no window)}


def window_size(problem: Problem, unlimited: int | None) -> tuple:
    """Return flash-attn's window: (keys to the left, keys to the right). Its masks are aligned at the last key, like ours."""
    if problem.window is None:
        return (unlimited, unlimited)
    return (problem.window - 1, 0 if problem.causal else problem.window - 1)


def one_batch(problem: Problem, options: Options) -> str:
    """Return why a library that packs sequences as (S, H, D) does not take a problem; "" if it takes it."""
    several = problem.lengths and problem.batch > 1
    return f"it packs sequences of one batch, and there are {problem.batch}." if several else ""


def rows_first(x: torch.Tensor, lengths: tuple[int, ...] = ()) -> torch.Tensor:
    """View (B, H, S, D) in flash-attn's layout, (B, S, H, D), or (S, H, D) for packed sequences.

    If the head dimension is not contiguous, copy it.
    """
    x = x.transpose(1, 2)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x[0] if lengths else x


def heads_first(x: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """View a tensor from `rows_first` as (B, H, S, D) again."""
    return (x[None] if lengths else x).transpose(1, 2)


def packed_arguments(lengths: tuple[int, ...], device: torch.device) -> dict:
    """Return flash-attn's arguments for packed sequences; {} without lengths."""
    if not lengths:
        return {}
    starts, longest = packed_starts(lengths, device), max(lengths)
    return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}


def call_package(function, q, k, v, softmax_scale: float, lengths: tuple[int, ...] = (), **arguments) -> torch.Tensor:
    """Call a `flash_attn_func` on tensors (B, H, S, D), or with lengths a `flash_attn_varlen_func`."""
    q, scale = positive_scale(separate_rows(q), softmax_scale)  # the kernels take the maximum before they scale
    rows = (rows_first(x, lengths) for x in (q, k, v))
    out = function(*rows, softmax_scale=scale, **packed_arguments(lengths, q.device), **arguments)
    return heads_first(out[0] if isinstance(out, tuple) else out, lengths)


def _version() -> int:
    return 4 if flash_attn_support(4) else 2


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, version: int | None = None):
    package, unlimited = _PACKAGES[version or _version()]
    name = "flash_attn_varlen_func" if problem.lengths else "flash_attn_func"
    more = {"causal": problem.causal, "window_size": window_size(problem, unlimited)}
    function = getattr(importlib.import_module(package), name)
    return call_package(function, q, k, v, problem.scale, problem.lengths, **more)


def _implementation() -> str:
    package = "flash-attn-4" if _version() == 4 else "flash-attn"
    return f"{package} {metadata.version(package)}"


# ---- FlashAttention 4 ---------------------------------------------------------------------------------------


def _native(problem: Problem) -> Problem | None:
    """Return the problem without functions, for the kernel's own causal mask, window and packed sequences; None if impossible.

    Documents of equal length do not become sequences: that was slower than the block mask (docs/flexattention.md).
    """
    plain = problem.plain_or_packed()
    native = plain is not None and plain.sq == problem.sq and (not plain.lengths or of_lengths(problem.mask_mod))
    return plain if native else None


def _refuses_cute(problem: Problem, options: Options) -> str:
    if problem.mask_mod is not None or problem.score_mod is not None:  # the kernel has no mask of its own for this
        return refuses_flash(problem, options)
    if options.block_size is not None:
        return "it does this mask by itself, without blocks, and a block_size was given."
    return one_batch(problem, options)


# ---- torch's own FlashAttention 2, of packed sequences ------------------------------------------------------


def _varlen_machine() -> Support:
    cuda = cuda_support()
    return cuda or Support(False, f"torch.nn.attention.varlen needs an NVIDIA GPU: {cuda.reason}", cuda.remedy)


def _refuses_varlen(problem: Problem, options: Options) -> str:
    return (
        one_batch(problem, options) if problem.lengths else "it takes packed sequences only, as cu_seqlens gives them."
    )


def _run_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    left, right = window_size(problem, -1)
    more: dict = {"window_size": (left, 0 if problem.causal else right)}
    if problem.grouped and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        more["enable_gqa"] = True  # torch 2.11 takes fewer heads of keys without this argument

    def function(q, k, v, softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return varlen_attn(q, k, v, *packed, scale=softmax_scale, **more)

    return call_package(function, q, k, v, problem.scale, problem.lengths)


BACKENDS = {
    "flash_attn": Backend(
        name="flash_attn",
        summary="the flash-attn package that is installed (FlashAttention 4 or 2)",
        machine=lambda: flash_attn_support(2) or flash_attn_support(4),
        refuses=one_batch,
        run=_run,
        form=Problem.plain_or_packed,
        largest_head=256,
        kernels=r"(?i)flash",
        implementation=_implementation,
    ),
    "cute": Backend(
        name="cute",
        summary="FlashAttention 4 in the CuTe DSL (package flash-attn-4)",
        machine=lambda: flash_attn_support(4),
        refuses=_refuses_cute,
        bind=bind_flash,  # FlexAttention's way into the same kernel
        run=functools.partial(_run, version=4),
        form=_native,
        largest_head=256,
        kernels=r"(?i)flash_?attention|flash_fwd",
        implementation=lambda: f"flash-attn-4 {metadata.version('flash-attn-4')}",
        options=("block_size",),
        compiles=True,
    ),
    "varlen": Backend(
        name="varlen",
        summary="packed sequences by torch.nn.attention.varlen (FlashAttention 2)",
        machine=_varlen_machine,
        refuses=_refuses_varlen,
        run=_run_varlen,
        form=Problem.plain_or_packed,
        largest_head=256,
        kernels=r"(?i)flash_fwd|flash_bwd",
        implementation=lambda: f"varlen_attn of torch {torch.__version__}",
    ),
}
