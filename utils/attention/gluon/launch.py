"""Run a step of the ladder on tensors (B, H, S, D) of a Hopper GPU, and register it with torch as one operator."""

from __future__ import annotations

import functools
import importlib
import math

import torch

from utils.attention.gluon.arguments import Arguments, make_addressable, placeholder, processors, strides_fit
from utils.attention.gluon.backward.operator import Attention, gradients_of, save_for_backward
from utils.attention.gluon.plan import Plan, packed_variant, plan_for, variant_for
from utils.attention.problem import positive_scale
from utils.kernels.handle import CALLS, empty, form, layout, needs_autograd, needs_operator

LOG2_E = math.log2(math.e)
MODULES = ("step1_synchronous", "step2_async_copy", "step3_tma", "step4_warp_specialized", "step5_overlapped")


@functools.cache
def step_module(step: int):
    """Import the module of a step, 1 to 5, with its kernel and its `launch` (imports Triton)."""
    return importlib.import_module(f"{__package__}.{MODULES[step - 1]}")


def kernel_of(step: int):
    """Return the Gluon kernel of a step (imports Triton)."""
    return getattr(step_module(step), f"attention_step{step}")


@torch.library.custom_op("labs::attention_gluon", mutates_args=(), device_types="cuda")
def attention_gluon(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    window: int,
    return_lse: bool,
    step: int,
    lengths: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, like q, and the log-sum-exp, (B, H, Sq) in fp32 or empty. A window of 0 means no window."""
    q, scale = positive_scale(q, scale)  # the kernels take the maximum before they scale
    result = run_step(q, k, v, causal, scale, window, return_lse, step, tuple(lengths or ()))
    return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))


@attention_gluon.register_fake
def _attention_gluon_fake(q, k, v, causal, scale, window, return_lse, step, lengths=None):
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:3] if return_lse else (0,), dtype=torch.float32)


attention_gluon.register_autograd(
    lambda ctx, dout, dlse: (*gradients_of(ctx, dout, dlse), *[None] * 6), setup_context=save_for_backward
)


def run_step(
    q, k, v, causal: bool, scale: float, window: int, return_lse: bool, step: int, lengths: tuple[int, ...] = ()
):
    """Launch a step, and return the output, or output and log-sum-exp. Tensors of an earlier layout repeat its launch."""
    key = causal, scale, window, return_lse, step, lengths, layout(q, k, v)
    if (earlier := CALLS.get(key)) is not None:
        return earlier(q, k, v)
    if not all(map(strides_fit, (q, k, v))) or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        q, k, v = map(make_addressable, (q, k, v))
        return run_step(q, k, v, *key[:6])
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    if q.numel():
        rows, o, sums = q, out, placeholder(q.device) if lse is None else lse
        if step == 5 and not (causal or window or lengths) and q.stride(1) == q.shape[2] * q.stride(2):
            # Without a mask the heads of a group see the same keys. The kernel computes these heads as one head with more rows.
            rows, o = (x.view(q.shape[0], k.shape[1], -1, q.shape[3]) for x in (q, out))
        with torch.cuda.device(q.get_device()):  # on a CPU, where kernels are simulated, it does nothing
            plan, programs = plan_of(step, rows, k, causal, window, lengths), processors(q.device)
            launch = step_module(step).launch(
                Arguments(rows, k, v, o, sums, causal, window, return_lse, scale * LOG2_E, plan, programs, lengths)
            )
        if launch is not None:  # step 5 on a GPU
            forms, index, nothing = form(out) if lse is None else form(out, lse), q.device.index, placeholder(q.device)

            def call_again(q, k, v):
                # The addresses are not part of a layout: TMA may be unable to address these tensors.
                if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
                    q, k, v = map(make_addressable, (q, k, v))
                    return run_step(q, k, v, *key[:6])
                out, *more = empty(forms, index)
                launch(q, k, v, out, *more or (nothing,))
                return (out, *more) if more else out

            CALLS[key] = call_again
    return (out, lse) if return_lse else out


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    return_lse: bool = False,
    step: int = 5,
    lengths: tuple[int, ...] = (),
):
    """Attention of q (B, H, Sq, D) over k, v (B, Hkv, Sk, D), fp16 or bf16: output, or (output, log-sum-exp).

    The last query has the position of the last key.

    Args:
        q: Queries (B, H, Sq, D).
        k: Keys (B, Hkv, Sk, D); H is a multiple of Hkv.
        v: Values (B, Hkv, Sk, D).
        causal: Whether a query sees keys up to its own position only.
        scale: Factor of the scores, 1/sqrt(D) by default.
        window: A query sees the keys that are fewer positions away than this number. With None it sees all keys.
        return_lse: Whether to return the log-sum-exp too: (B, H, Sq), fp32, natural logarithm, for a backward pass.
        step: Number of the kernel in the ladder, 1 to 5.
        lengths: Lengths of packed sequences, for step 5. The tokens of a sequence see only the same sequence.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    # The operator takes the host several times as long as the launch, so it is called only where torch must see it.
    grad = needs_autograd(q, k, v)
    problem = causal, scale, window or 0, return_lse or grad, step
    if not q.is_cuda or scale <= 0 or needs_operator(q, k, v):
        out, lse = attention_gluon(q, k, v, *problem, list(lengths))
    elif grad:
        out, lse = Attention.apply(run_step, q, k, v, (*problem, lengths))
    else:
        return run_step(q, k, v, *problem, lengths)
    return (out, lse) if return_lse else out


def plan_of(step: int, q: torch.Tensor, k: torch.Tensor, causal: bool, window: int, lengths=()) -> Plan:
    """Return the plan that a step takes for these tensors on their GPU."""
    batch, heads, sq, head_dim = q.shape
    if step < 5:
        return plan_for(step, head_dim)
    programs = processors(q.device)
    if lengths:
        return plan_for(step, head_dim, packed_variant(head_dim, lengths, causal, window, batch * heads, programs))
    return plan_for(step, head_dim, variant_for(head_dim, causal, window, sq, k.shape[2], batch * heads, programs))
