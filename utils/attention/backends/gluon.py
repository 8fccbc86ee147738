"""This course's own FlashAttention in Gluon: step 5 of the ladder in `utils/attention/gluon`, for Hopper.

A few queries over more keys go to the decode kernel (`utils/attention/gluon/decode`), which splits the keys, unless
gradients are needed. A GPU of compute capability 10 takes the kernel of `utils/attention/gluon/blackwell`, by its name
only and with a warning: it was compiled and simulated, and no GPU has run it.
"""

from __future__ import annotations

import functools
import math
import warnings

import torch

from utils.attention.gluon.arguments import addressable
from utils.attention.gluon.decode.plan import MOST_QUERIES, refuse
from utils.attention.problem import (
    Attend,
    Backend,
    Problem,
    bind_plain,
    positive_scale,
    reason_against_tensors,
    refuse_functions,
)
from utils.machine.device import Support, compute_capability, gluon_on_blackwell, gluon_support

# Measured on an H200 (docs/kernels/decode.md): the decode kernel is faster than step 5 for up to 32 new tokens, and for up
# to 64 if batch x heads is below the 132 SMs: step 5 then has no tile for some of the SMs.
FEW_QUERIES, FEW_HEADS = 32, 132


def decodes(problem: Problem) -> bool:
    """Whether the decode kernel takes this: few queries, but one at least, over more keys."""
    heads = problem.batch * problem.heads
    few = problem.sq <= FEW_QUERIES or (problem.sq <= MOST_QUERIES and heads < FEW_HEADS)
    return (
        few and 0 < problem.sq < problem.sk and not refuse(problem.heads // problem.kv_heads, problem.sq, problem.batch)
    )


def _on_blackwell() -> bool:
    return (compute_capability() or (0, 0))[0] == 10


def _machine() -> Support:
    return gluon_on_blackwell() if _on_blackwell() else gluon_support()


def _refuses(problem: Problem) -> str:
    reason = reason_against_tensors(problem) or (reason_against_packing(problem) if problem.lengths else "")
    return reason or (reason_against_blackwell(problem) if _on_blackwell() else "")


def reason_against_packing(problem: Problem) -> str:
    """Say why the kernels do not take packed sequences; "" if they do."""
    if _on_blackwell():
        return "it takes no packed sequences on Blackwell."
    if problem.needs_grad and problem.head_dim > 128:
        return f"its backward pass of packed sequences ends at head dimension 128, and {problem.head_dim} was given."
    if problem.needs_grad and torch.are_deterministic_algorithms_enabled():
        return "its backward pass of packed sequences is not deterministic."
    return ""


def reason_against_blackwell(problem: Problem) -> str:
    """Say why the kernel for Blackwell does not take a problem that step 5 takes on Hopper; "" if it does."""
    if problem.head_dim > 128:
        return f"its head dimension is at most 128 on Blackwell, and {problem.head_dim} was given."
    if problem.window:
        return "it has no sliding window on Blackwell."
    if problem.needs_grad:
        return "it has no backward pass on Blackwell, and a gradient is needed."
    if problem.batch * problem.heads > 65535:
        return f"it takes 65535 heads of all sequences on Blackwell, and {problem.batch * problem.heads} were given."
    if not problem.sk:
        return "it waits for a first block of keys on Blackwell, and there are none."
    return ""


@functools.cache
def _warn_of_blackwell() -> None:
    text = "The Gluon kernel for Blackwell was compiled for sm_100a and simulated; no GPU has run it or taken its time."
    warnings.warn(f"{text} Compare it with another backend.", RuntimeWarning, stacklevel=3)


def attend_on_blackwell(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> tuple:
    """Attention of q (B, H, Sq, D) over k, v (B, Hkv, Sk, D) by the kernel for Blackwell, and its log-sum-exp."""
    from utils.attention.gluon.blackwell.attention import launch

    _warn_of_blackwell()
    q, scale = positive_scale(q, scale)
    q, k, v = map(addressable, (q, k, v))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if q.numel():
        launch(q, k, v, out, lse, causal, scale * math.log2(math.e))
    return out, lse


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem):
    if _on_blackwell():
        with torch.cuda.device(q.device):
            out, lse = attend_on_blackwell(q, k, v, problem.causal, problem.scale)
        return (out, lse) if problem.with_lse else out
    # The decode kernel has no backward pass and leaves no log-sum-exp to one.
    needs_lse = problem.with_lse or (
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    )
    if decodes(problem) and not needs_lse:
        from utils.attention.gluon.decode.launch import decode

        return decode(q, k, v, causal=problem.causal, scale=problem.scale, window=problem.window)
    from utils.attention.gluon.launch import forward

    window, with_lse, lengths = problem.window, problem.with_lse, problem.lengths
    causal, scale = problem.causal, problem.scale
    return forward(q, k, v, causal=causal, scale=scale, window=window, return_lse=with_lse, lengths=lengths)


def _again(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> Attend | None:
    """Return the kept launch for tensors of this layout; None if the call must go through `_run`, as for a gradient."""
    if decodes(problem) or problem.needs_grad or problem.with_lse or problem.scale <= 0 or _on_blackwell():
        return None
    from utils.attention.gluon.launch import repeat

    return repeat(q, k, v, problem.causal, problem.scale, problem.window or 0, problem.lengths)


def _implementation() -> str:
    import triton

    kernels = "the kernel for Blackwell" if _on_blackwell() else "step 5, and its decode kernel"
    return f"Gluon of Triton {triton.__version__}, {kernels}"


BACKENDS = {
    "gluon": Backend(
        name="gluon",
        summary="warp-specialized FlashAttention for Hopper, written in Gluon for this course",
        machine=_machine,
        refuses=refuse_functions(_refuses, Problem.plain_or_packed),
        bind=bind_plain(_run, _again, Problem.plain_or_packed),
        kernels=r"attention_(step5|decode|backward|blackwell)",
        implementation=_implementation,
        returns_lse=True,
    )
}
