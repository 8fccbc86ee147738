"""This course's own FlashAttention for Hopper, in Gluon: step 5 of the ladder in `utils/attention/gluon`.

A few queries over more keys go to the decode kernel (`utils/attention/gluon/decode`), which splits the keys, unless
gradients are needed.
"""

from __future__ import annotations

import torch

from utils.attention.gluon.decode.plan import MOST_QUERIES, refuse
from utils.attention.problem import Attend, Backend, Problem, bind_plain, reason_against_tensors, refuse_functions
from utils.machine.device import gluon_support

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


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem):
    # The decode kernel has no backward pass and leaves no log-sum-exp to one.
    needs_lse = problem.with_lse or (
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    )
    if decodes(problem) and not needs_lse:
        from utils.attention.gluon.decode.launch import decode

        return decode(q, k, v, causal=problem.causal, scale=problem.scale, window=problem.window)
    from utils.attention.gluon.launch import forward

    window, with_lse = problem.window, problem.with_lse
    return forward(q, k, v, causal=problem.causal, scale=problem.scale, window=window, return_lse=with_lse)


def _again(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> Attend | None:
    """Return the kept launch for tensors of this layout; None if the call must go through `_run`, as for a gradient."""
    if decodes(problem) or problem.needs_grad or problem.with_lse or problem.scale <= 0:
        return None
    from utils.attention.gluon.launch import repeat

    return repeat(q, k, v, problem.causal, problem.scale, problem.window or 0)


def _implementation() -> str:
    import triton

    return f"Gluon of Triton {triton.__version__}, step 5, and its decode kernel"


BACKENDS = {
    "gluon": Backend(
        name="gluon",
        summary="warp-specialized FlashAttention for Hopper, written in Gluon for this course",
        machine=gluon_support,
        refuses=refuse_functions(reason_against_tensors),
        bind=bind_plain(_run, _again),
        kernels=r"attention_(step5|decode|backward)",
        implementation=_implementation,
        returns_lse=True,
    )
}
