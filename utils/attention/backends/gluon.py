"""This course's own FlashAttention for Hopper, in Gluon: step 5 of the ladder in `utils/attention/gluon`."""

from __future__ import annotations

import torch

from utils.attention.problem import Backend, Problem, accept_plain, bind_plain
from utils.machine.device import Support, gluon_support


def _accepts(problem: Problem) -> Support:
    if problem.device.type != "cuda":
        return Support(False, f"it needs a Hopper GPU, and the tensors are on {problem.device}.")
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return Support(False, f"it takes float16 and bfloat16, not {problem.type_name}.")
    if problem.head_dim % 8 or not 8 <= problem.head_dim <= 256:
        return Support(False, f"its head dimension is a multiple of 8 up to 256, and {problem.head_dim} was given.")
    return Support(True)


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> torch.Tensor:
    from utils.attention.gluon.launch import forward

    return forward(q, k, v, causal=problem.causal, scale=problem.scale, window=problem.window)


def _implementation() -> str:
    import triton

    return f"Gluon of Triton {triton.__version__}, step 5"


BACKENDS = {
    "gluon": Backend(
        name="gluon",
        summary="warp-specialized FlashAttention for Hopper, written in Gluon for this course",
        machine=gluon_support,
        accepts=accept_plain(_accepts),
        bind=bind_plain(_run),
        kernels=r"attention_step5|attention_backward",
        implementation=_implementation,
    )
}
