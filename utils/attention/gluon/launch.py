"""Run a step of the ladder on tensors (B, H, S, D) of a Hopper GPU, and register it with torch as one operator."""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import asdict

import torch

from utils.attention.gluon.arguments import Arguments, unused
from utils.attention.gluon.plan import Plan, plan_for, variant_for

LOG2_E = math.log2(math.e)
MODULES = {
    1: "step1_synchronous",
    2: "step2_async_copy",
    3: "step3_tma",
    4: "step4_warp_specialized",
    5: "step5_overlapped",
}


def step_module(step: int):
    """The module of a step, with its kernel and its `launch` (imports Triton)."""
    return importlib.import_module(f"{__package__}.{MODULES[step]}")


def kernel_of(step: int):
    """The Gluon kernel of a step (imports Triton)."""
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention forward: (output like q, log-sum-exp (B, H, Sq) fp32 or empty). window 0: none."""
    if scale <= 0:
        # The kernels take the maximum before they scale. Turned queries give the same scores with a scale they take.
        turned = torch.zeros_like(q) if scale == 0 else -q
        return attention_gluon(turned, k, v, causal, -scale or 1.0, window, return_lse, step)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:3] if return_lse else (0,), dtype=torch.float32)
    if q.numel():
        q, k, v = _copyable(q), _copyable(k), _copyable(v)
        with torch.cuda.device(q.device):
            _launch(step, q, k, v, out, lse, causal, scale * LOG2_E, window, return_lse)
    return out, lse


@attention_gluon.register_fake
def _(q, k, v, causal, scale, window, return_lse, step):
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:3] if return_lse else (0,), dtype=torch.float32)


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
):
    """Attention of q (B, H, Sq, D) over k, v (B, Hkv, Sk, D), fp16 or bf16: output, or (output, log-sum-exp).

    The last query stands at the last key. scale: of the scores, 1/sqrt(D) by default. window: keys fewer than this
    many positions away. The log-sum-exp (B, H, Sq), fp32, natural logarithm, is what a backward pass needs.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    out, lse = attention_gluon(q, k, v, causal, scale, window or 0, return_lse, step)
    return (out, lse) if return_lse else out


def _copyable(x: torch.Tensor) -> torch.Tensor:
    """X itself where TMA can address it: head dimension contiguous, rows at multiples of 16 bytes; else a copy."""
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    aligned = x.data_ptr() % 16 == 0 and all(stride % 8 == 0 and stride > 0 for stride in strides)
    if x.stride(-1) == 1 and aligned:
        return x
    return x.contiguous() if not x.is_contiguous() else x.clone()


def plan_of(step: int, q: torch.Tensor, k: torch.Tensor, causal: bool, window: bool) -> Plan:
    """The plan that a step takes for these tensors on their GPU."""
    batch, heads, sq, head_dim = q.shape
    if step < 5:
        return plan_for(step, head_dim)
    programs = _multiprocessors(q.device)
    return plan_for(step, head_dim, variant_for(head_dim, causal, window, sq, k.shape[2], batch * heads, programs))


def _launch(step: int, q, k, v, out, lse, causal, c, window, return_lse) -> None:
    plan = plan_of(step, q, k, causal, window > 0)
    lse = lse if return_lse else unused(q.device)
    programs = _multiprocessors(q.device)
    step_module(step).launch(Arguments(q, k, v, out, lse, causal, window, return_lse, c, plan, programs))


@functools.lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def describe(step: int, q: torch.Tensor, k: torch.Tensor, causal: bool, window: bool = False) -> dict:
    """The plan that a step takes for these tensors as a dictionary, for reports."""
    return {"step": step, **asdict(plan_of(step, q, k, causal, window))}
