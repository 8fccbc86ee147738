"""This course's own FlashAttention for Hopper, in Gluon: step 5 of the ladder in `utils/attention/gluon`.

A few queries over more keys go to the decode kernel (`utils/attention/gluon/decode`), which splits the keys, unless
gradients are needed.
"""

from __future__ import annotations

import torch

from utils.attention.gluon.decode.plan import MOST_QUERIES, refuse
from utils.attention.problem import Backend, Problem, accept_plain, bind_plain
from utils.machine.device import Support, gluon_support

# Measured on an H200 (docs/kernels/decode.md): the decode kernel is faster than step 5 for up to 32 new tokens, and for up
# to 64 if batch x heads is below the 132 SMs: step 5 then has no tile for some of the SMs.
FEW_QUERIES, FEW_HEADS = 32, 132


def _accepts(problem: Problem) -> Support:
    if problem.device.type != "cuda":
        return Support(False, f"it needs a Hopper GPU, and the tensors are on {problem.device}.")
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return Support(False, f"it takes float16 and bfloat16, not {problem.type_name}.")
    if problem.head_dim % 8 or not 8 <= problem.head_dim <= 256:
        return Support(False, f"its head dimension is a multiple of 8 up to 256, and {problem.head_dim} was given.")
    return Support(True)


def decodes(problem: Problem) -> bool:
    """Whether the decode kernel takes this: few queries, but one at least, over more keys."""
    heads = problem.batch * problem.heads
    few = problem.sq <= FEW_QUERIES or (problem.sq <= MOST_QUERIES and heads < FEW_HEADS)
    return (
        few and 0 < problem.sq < problem.sk and not refuse(problem.heads // problem.kv_heads, problem.sq, problem.batch)
    )


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> torch.Tensor:
    # The decode kernel has no backward pass and leaves no log-sum-exp to one.
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if decodes(problem) and not needs_grad:
        from utils.attention.gluon.decode.launch import decode

        return decode(q, k, v, causal=problem.causal, scale=problem.scale, window=problem.window)
    from utils.attention.gluon.launch import forward

    return forward(q, k, v, causal=problem.causal, scale=problem.scale, window=problem.window)


def _implementation() -> str:
    import triton

    return f"Gluon of Triton {triton.__version__}, step 5, and its decode kernel"


BACKENDS = {
    "gluon": Backend(
        name="gluon",
        summary="warp-specialized FlashAttention for Hopper, written in Gluon for this course",
        machine=gluon_support,
        accepts=accept_plain(_accepts),
        bind=bind_plain(_run),
        kernels=r"attention_(step5|decode|backward)",
        implementation=_implementation,
    )
}
