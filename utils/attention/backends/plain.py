"""Unfused attention, the baseline of every lab: matmul, softmax and matmul are separate kernels.

The scores, (B, H, Sq, Sk), are written to and read from memory three times: at S = 16384 and 16 heads, 8.6 GB in bf16.
`naive_compiled` is the same under torch.compile. It is the honest baseline for kernels that skip blocks: it fuses modifier,
mask and softmax as they do, and skips nothing.
"""

from __future__ import annotations

import time

import torch

from utils.attention.masks.score_mods import modify_all_scores
from utils.attention.prepared import compile_attend, own_copy
from utils.attention.problem import Attend, Backend, Bound, Options, Problem
from utils.attention.reference import allowed_keys
from utils.machine.device import Support, compile_support


def stored_scores(problem: Problem, hidden: torch.Tensor | None, empty: torch.Tensor | None) -> Attend:
    """Return a function for attention that stores all scores.

    Args:
        problem: the problem.
        hidden: broadcasts to (B, H, Sq, Sk); True where a query does not see a key.
        empty: broadcasts to (B, H, Sq, 1); True where a query sees no key. None: every query sees a key.
    """
    scale, score_mod, group = problem.scale, problem.score_mod, problem.heads // problem.kv_heads
    with_lse = problem.with_lse

    def attend(q, k, v):
        if v.dtype.itemsize == 2 and v.device.type == "cpu":  # fp32 is as fast there, and fp16 scores may be infinite
            q, k = q.float(), k.float()
        if group > 1:  # heads that share K and V broadcast them, and repeat nothing
            q, k, v = q.unflatten(1, (-1, group)), k.unsqueeze(2), v.unsqueeze(2)
        scores = q @ k.transpose(-1, -2) * scale
        if group > 1:
            scores = scores.flatten(1, 2)
        if score_mod is not None:
            if scores.dtype.itemsize == 2:
                scores = scores.float()  # modifier and softmax compute in fp32, as in FlexAttention
            scores = modify_all_scores(score_mod, scores)
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        weights = torch.softmax(scores, -1).to(v.dtype)  # sums are in fp32 for 16-bit scores, too
        if empty is not None:
            weights = weights.masked_fill(empty, 0.0)  # the softmax of nothing is nan
        out = (weights.unflatten(1, (-1, group)) @ v).flatten(1, 2) if group > 1 else weights @ v
        return (out, torch.logsumexp(scores.float(), -1)) if with_lse else out

    return attend


def _bind(problem: Problem, options: Options) -> Bound:
    began = time.perf_counter()
    hidden, empty = allowed_keys(problem), None
    if hidden is not None:
        hidden = ~hidden
        if problem.mask_mod is not None or problem.has_empty_rows:
            rows = hidden.all(-1, keepdim=True)
            empty = rows if bool(rows.any()) else None
    seconds = {"mask": time.perf_counter() - began}
    return Bound(stored_scores(problem, hidden, empty), seconds=seconds, light=hidden is None)


def _bind_compiled(problem: Problem, options: Options) -> Bound:
    bound, mode = _bind(problem, options), options.mode or "default"
    source = own_copy(bound.call)
    # Without this option inductor recognizes attention in these three operators and calls SDPA's flash backend.
    return Bound(compile_attend(source, mode, pattern_matcher=False), {"mode": mode}, bound.seconds, source)


def reason_against_compiling(problem: Problem, options: Options) -> str:
    """Return why torch.compile does not run here with these options; "" if it runs."""
    if problem.device.type != ("cuda" if torch.cuda.is_available() else "cpu"):
        return f"torch.compile was probed for another device than {problem.device}."
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.compile does not run under vmap, grad and their like."
    if problem.device.type == "cpu" and options.mode in ("reduce-overhead", "max-autotune"):
        return f"with mode {options.mode!r} it uses CUDA graphs, and the tensors are on a CPU."
    return ""


def _implementation() -> str:
    return f"matmul, softmax, matmul of torch {torch.__version__}"


BACKENDS = {
    "naive": Backend(
        name="naive",
        summary="matmul, softmax, matmul: unfused",
        machine=lambda: Support(True, "Plain torch operators."),
        refuses=lambda problem, options: "",
        bind=_bind,
        kernels=r"gemm|nvjet|cutlass|cublas|gemv|dot_kernel|splitK",
        cpu_operators=r"aten::(bmm|matmul)",
        implementation=_implementation,
        returns_lse=True,
        takes_v_dim=True,
    ),
    "naive_compiled": Backend(
        name="naive_compiled",
        summary="matmul, softmax, matmul under torch.compile",
        machine=compile_support,
        refuses=reason_against_compiling,
        bind=_bind_compiled,
        kernels=r"triton_(red|per|poi)_fused",
        cpu_operators=r"(?i)torch-compiled region|cpp_fused",
        implementation=lambda: f"{_implementation()}, compiled",
        options=("mode",),
        returns_lse=True,
        takes_v_dim=True,
        compiles=True,
    ),
}
