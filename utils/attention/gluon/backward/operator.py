"""Give `attention` a backward pass in torch's autograd: eagerly, compiled and checkpointed.

If only autograd must see a call, it goes through `Attention`, which takes a fifth of the host's time of an operator. The
operators below are for torch.compile, function transforms and dispatch modes.
"""

from __future__ import annotations

import torch

from utils.attention.gluon.backward.launch import gradients
from utils.kernels.handle import needs_operator


@torch.library.custom_op("labs::attention_gluon_backward", mutates_args=(), device_types="cuda")
def attention_gluon_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
    window: int,
    deterministic: bool,
    lengths: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v. window 0: no window; lengths: of packed sequences; dlse: of the log-sum-exp, or None."""
    return gradients(dout, dlse, q, k, v, out, lse, (causal, scale, window, deterministic, tuple(lengths or ())))


@attention_gluon_backward.register_fake
def _attention_gluon_backward_fake(dout, dlse, q, k, v, out, lse, causal, scale, window, deterministic, lengths=None):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def save_for_backward(ctx, inputs, output) -> None:
    """Keep the tensors of a forward pass for the backward pass; inputs: the arguments of the forward's operator."""
    q, k, v, causal, scale, window, return_lse, _, lengths = inputs
    out, lse = output
    if not return_lse:
        ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.problem = causal, scale, window, return_lse, tuple(lengths or ())


def gradients_of(ctx, dout, dlse):
    """Return the gradients by a bare launch, or by the operator if torch must see it; in torch's deterministic mode bits repeat."""
    q, k, v, out, lse = ctx.saved_tensors
    causal, scale, window, return_lse, lengths = ctx.problem
    if not return_lse:
        raise RuntimeError("The backward pass needs the log-sum-exp: call attention_gluon with return_lse=True.")
    dout = torch.zeros_like(out) if dout is None else dout
    deterministic = torch.are_deterministic_algorithms_enabled()
    # If gradients are enabled here, the caller wants gradients of gradients. The forward pass has checked q, k and v.
    if torch.is_grad_enabled() or needs_operator(dout):
        problem = causal, scale, window, deterministic, list(lengths)
        return attention_gluon_backward(dout, dlse, q, k, v, out, lse, *problem)
    return gradients(dout, dlse, q, k, v, out, lse, (causal, scale, window, deterministic, lengths))


class Attention(torch.autograd.Function):
    """Computes the output and the log-sum-exp by `run(q, k, v, *problem)`, with gradients of q, k and v."""

    @staticmethod
    def forward(ctx, run, q, k, v, problem):
        """Run the forward pass and keep its tensors; problem: the further arguments of the operator."""
        output = run(q, k, v, *problem)
        save_for_backward(ctx, (q, k, v, *problem), output)
        return output

    @staticmethod
    def backward(ctx, dout, dlse):
        """Return the gradients of q, k and v."""
        return None, *gradients_of(ctx, dout, dlse), None
