"""torch.nn.attention.varlen: packed sequences by torch's own FlashAttention 2, where this torch has it."""

from __future__ import annotations

import inspect

import torch

from utils.attention.backends.flash_attn import reason_against_batches, rows_first, window_size
from utils.attention.problem import (
    Backend,
    Problem,
    bind_plain,
    positive_scale,
    reason_against_tensors,
    refuse_functions,
)
from utils.attention.sequences import packed_starts
from utils.machine.device import Support, cuda_support


def _machine() -> Support:
    if not (cuda := cuda_support()):
        return Support(False, f"torch.nn.attention.varlen needs an NVIDIA GPU: {cuda.reason}", cuda.remedy)
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return Support(
            False, f"torch {torch.__version__} has no torch.nn.attention.varlen.", "Use torch 2.11 or later."
        )
    if "window_size" not in inspect.signature(varlen_attn).parameters:
        return Support(False, f"torch {torch.__version__} has an earlier varlen_attn.", "Use torch 2.11 or later.")
    return Support(True, "Part of torch.")


def _refuses(problem: Problem) -> str:
    if not problem.lengths:
        return "it takes packed sequences only, as cu_seqlens gives them."
    return reason_against_tensors(problem) or reason_against_batches(problem)


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, scale = positive_scale(q, problem.scale)
    starts, longest = packed_starts(problem.lengths, q.device), max(problem.lengths)
    left, right = window_size(problem, -1)
    more = {"scale": scale, "window_size": (left, 0 if problem.causal else right)}
    if problem.grouped and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        more["enable_gqa"] = True  # torch 2.11 asks for nothing, and takes fewer heads of keys
    rows = (rows_first(x)[0] for x in (q, k, v))
    return varlen_attn(*rows, starts, starts, longest, longest, **more)[None].transpose(1, 2)


BACKENDS = {
    "varlen": Backend(
        name="varlen",
        summary="packed sequences by torch.nn.attention.varlen (FlashAttention 2)",
        machine=_machine,
        refuses=refuse_functions(_refuses, Problem.plain_or_packed),
        bind=bind_plain(_run, form=Problem.plain_or_packed),
        kernels=r"(?i)flash_fwd|flash_bwd",
        implementation=lambda: f"varlen_attn of torch {torch.__version__}",
    )
}
