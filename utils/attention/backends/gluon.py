"""This course's own FlashAttention in Gluon: step 5 of the ladder in `utils/attention/gluon`, for Hopper.

Without gradients, a few queries over more keys go to the decode kernel (`utils/attention/gluon/decode`), which splits the keys.
On a GPU of compute capability 10, the backend runs the kernel of `utils/attention/gluon/blackwell`, but "auto" does not take it,
and it warns: the kernel was compiled and simulated, and no GPU has run it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings

import torch

from utils.attention.gluon.arguments import make_addressable
from utils.attention.gluon.decode.plan import MOST_QUERIES, refuse
from utils.attention.problem import Attend, Backend, Options, Problem, positive_scale
from utils.kernels.handle import CALLS, layout, needs_autograd
from utils.machine.device import compute_capability, gluon_on_blackwell, gluon_support

# Measured on an H200 (docs/kernels/decode.md): the decode kernel is faster than step 5 for up to 32 new tokens, and for up to 64
# if batch x heads is below the 132 SMs, because step 5 then has no tile for some SMs. If it has none for half of the SMs, and
# there are four times as many keys as queries, the decode kernel takes 0.35 to 0.65 of step 5's time for any number of queries.
FEW_QUERIES, FEW_HEADS = 32, 132


def decodes(problem: Problem) -> bool:
    """Whether the decode kernel takes a problem: few queries over more keys, or few tiles of queries over many keys."""
    heads, sq, sk = problem.batch * problem.heads, problem.sq, problem.sk
    few = sq <= FEW_QUERIES or (sq <= MOST_QUERIES and heads < FEW_HEADS)
    few = few or (2 * heads * -(-sq // 64) <= FEW_HEADS and sk >= 4 * sq)
    return few and 0 < sq < sk and not refuse(problem.heads // problem.kv_heads, min(sq, MOST_QUERIES), problem.batch)


def _refuses(problem: Problem, options: Options) -> str:
    if problem.lengths and problem.needs_autograd and problem.head_dim > 128:
        return f"its backward pass of packed sequences ends at head dimension 128, and {problem.head_dim} was given."
    if problem.lengths and problem.needs_autograd and torch.are_deterministic_algorithms_enabled():
        return "its backward pass of packed sequences is not deterministic."
    return ""


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem):
    causal, scale, window, with_lse = problem.causal, problem.scale, problem.window, problem.with_lse
    # The decode kernel has no backward pass and no log-sum-exp.
    if decodes(problem) and not (with_lse or needs_autograd(q, k, v)):
        from utils.attention.gluon.decode.launch import decode

        return decode(q, k, v, causal=causal, scale=scale, window=window)
    from utils.attention.gluon.launch import forward

    return forward(q, k, v, causal=causal, scale=scale, window=window, return_lse=with_lse, lengths=problem.lengths)


def _again(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> Attend | None:
    """Return the kept launch of step 5 for tensors of this layout; None if a call must go through `_run`, as for a gradient."""
    if decodes(problem) or problem.needs_autograd or problem.scale <= 0:
        return None
    window, lengths = problem.window or 0, problem.lengths
    return CALLS.get((problem.causal, problem.scale, window, problem.with_lse, 5, lengths, layout(q, k, v)))


# ---- Blackwell ---------------------------------------------------------------------------------------------


def _refuses_on_blackwell(problem: Problem, options: Options) -> str:
    if options.tuned:
        return "no GPU has run its kernel for Blackwell, so it is taken by its name only."
    if problem.window:
        return "it has no sliding window on Blackwell."
    if problem.needs_autograd:
        return "it has no backward pass on Blackwell, and a gradient is needed."
    if problem.batch * problem.heads > 65535:
        return f"it takes 65535 heads of all sequences on Blackwell, and {problem.batch * problem.heads} were given."
    return ""


@functools.cache
def _warn_of_blackwell() -> None:
    text = "The Gluon kernel for Blackwell was compiled for sm_100a and simulated; no GPU has run it or taken its time."
    warnings.warn(f"{text} Compare it with another backend.", RuntimeWarning, stacklevel=3)


def run_on_blackwell(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem):
    """Compute a plain problem by the kernel for Blackwell."""
    from utils.attention.gluon.blackwell.attention import launch

    _warn_of_blackwell()
    q, scale = positive_scale(q, problem.scale)
    q, k, v = map(make_addressable, (q, k, v))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if q.numel():
        with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
            launch(q, k, v, out, lse, problem.causal, scale * math.log2(math.e))
    return (out, lse) if problem.with_lse else out


def _implementation(kernels: str) -> str:
    import triton

    return f"Gluon of Triton {triton.__version__}, {kernels}"


ON_HOPPER = Backend(
    name="gluon",
    summary="warp-specialized FlashAttention for Hopper, written in Gluon for this course",
    machine=gluon_support,
    refuses=_refuses,
    run=_run,
    again=_again,
    form=Problem.plain_or_packed,
    largest_head=256,
    kernels=r"attention_(step5|decode|backward)",
    implementation=lambda: _implementation("step 5, and its decode kernel"),
    returns_lse=True,
)
ON_BLACKWELL = Backend(
    name="gluon",
    summary="warp-specialized FlashAttention for Blackwell in Gluon, simulated only",
    machine=gluon_on_blackwell,
    refuses=_refuses_on_blackwell,
    run=run_on_blackwell,
    largest_head=128,
    kernels=r"attention_blackwell",
    implementation=lambda: _implementation("the kernel for Blackwell"),
    returns_lse=True,
)
BACKENDS = {"gluon": ON_BLACKWELL if (compute_capability() or (0, 0))[0] == 10 else ON_HOPPER}
