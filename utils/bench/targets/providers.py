"""The attention providers as targets use them: who can do a workload, the bare call, and proof of who ran."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from utils.attention import Request
from utils.attention import provider as provider_named
from utils.bench.errors import Refused, WrongRun
from utils.bench.workload import DTYPES, Workload
from utils.machine.device import Support, cuda_support

# Operators that a call of SDPA leaves in a trace, by the backend that ran.
SDPA_OPERATORS = {
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_attention_math": "math",
    "aten::_scaled_dot_product_fused_attention_overrideable": "overrideable",
}
NEED_GPU = {"gluon", "cute", "flash_attn", "flex_flash", "cudnn", "efficient"}
SDPA_BACKENDS = ("cudnn", "flash", "math", "efficient")


@dataclass(frozen=True)
class Launched:
    """What one call launched: operators as the CPU saw them, kernels as the GPU did (none on a CPU)."""

    operators: tuple[str, ...]
    kernels: tuple[str, ...]
    launches: int = 0  # kernels, copies and fills that the GPU ran, repeats counted

    @property
    def shown(self) -> tuple[str, ...]:
        return self.kernels or self.operators


def as_sequences(workload: Workload) -> tuple[int, int, int, int]:
    """(B, H * documents, span, D): documents of equal length are sequences of their own, and a view makes them so."""
    lengths = workload.documents
    if len(set(lengths)) > 1:
        raise Refused(
            f"--doc-span {workload.doc_span} does not divide --seq-len {workload.seq_len}: fused kernels "
            f"take documents as sequences of one length; choose a divisor of {workload.seq_len}."
        )
    return workload.batch, workload.heads * len(lengths), lengths[0], workload.head_dim


def _request(workload: Workload, device: torch.device) -> Request:
    batch, heads, length, head_dim = as_sequences(workload)
    return Request(
        batch,
        heads,
        heads,
        length,
        length,
        head_dim,
        DTYPES[workload.dtype],
        device,
        workload.causal,
        head_dim**-0.5,
        None,
        False,
    )


def support(name: str, workload: Workload, device: torch.device) -> Support:
    """Whether a provider computes this workload on this device."""
    if workload.score_mod != "none":
        return Support(
            False,
            f"provider {name} takes no score modifier, and {workload.score_mod} was asked for.",
            "Use --score-mod none.",
        )
    answer = provider_named(name).support(_request(workload, device))
    return answer if answer else Support(False, f"provider {name}: {answer.reason}", answer.remedy)


def first_able(names: Sequence[str], workload: Workload, device: torch.device) -> tuple[str | None, Support]:
    """The first provider of `names` that can do it, or None and every one's reason in a sentence."""
    reasons = []
    if device.type == "cpu" and set(names) <= NEED_GPU and not (cuda := cuda_support()):
        return None, Support(
            False, f"{', '.join(names)} need{'s' * (len(names) == 1)} an NVIDIA GPU: {cuda.reason}", cuda.remedy
        )
    for name in names:
        answer = support(name, workload, device)
        if answer:
            return name, answer
        reasons.append(answer.reason.rstrip("."))
    return None, Support(False, "; ".join(reasons) + ".", f"Run it where one of {', '.join(names)} is supported.")


def bind(
    name: str, workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """The call that is timed: the provider on these inputs, its arguments checked and reshaped beforehand.

    With documents its output is (B, H * documents, span, D); `.reshape(workload.shape)` is not part of the timing.
    """
    entry, request, shape = provider_named(name), _request(workload, q.device), as_sequences(workload)
    q, k, v = (tensor.view(shape) for tensor in (q, k, v))
    return lambda: entry.run(q, k, v, request)


def bind_default_sdpa(
    workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """scaled_dot_product_attention with torch's own choice of backend."""
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=workload.causal)


def implementation(name: str) -> str:
    """Which package and version a provider stands for, such as "flash-attn-4 4.0"."""
    return provider_named(name).implementation() or (
        f"SDPA of torch {torch.__version__}, {name} alone" if name in SDPA_BACKENDS else name
    )


def launched_by(fn: Callable[[], object]) -> Launched:
    """Operators and kernels of one call of a warm function, told by torch's profiler."""
    from utils.benchmark.profiling import profile, read_trace

    events = read_trace(profile(fn, steps=1, warmup=1))
    # Compiled regions on a CPU are no operators of torch's, and tell more than the operators around them.
    operators = [e.name for e in events if e.category == "cpu_op" or "CompiledFxGraph" in e.name]
    kernels = [e.name for e in events if e.on_gpu]
    return Launched(tuple(dict.fromkeys(operators)), tuple(dict.fromkeys(kernels)), len(kernels))


def sdpa_backend(launched: Launched) -> str:
    """The SDPA backend that ran, told from the operators a call left in the trace."""
    found = [SDPA_OPERATORS[name] for name in launched.operators if name in SDPA_OPERATORS]
    if len(found) != 1:
        raise WrongRun(
            f"the trace shows {len(found)} SDPA backends ({', '.join(found) or 'none'}) and one was "
            f"expected; it holds {', '.join(launched.operators[:12])}."
        )
    return found[0]


def prove(name: str, launched: Launched) -> None:
    """Refuse unless the launched kernels (on a CPU: operators) are those of the provider."""
    entry = provider_named(name)
    if name in SDPA_BACKENDS:
        ran = sdpa_backend(launched)
        if ran != name:
            raise WrongRun(
                f"the SDPA backend {name} was asked for and {ran} ran, by its operator "
                f"{next(key for key in launched.operators if SDPA_OPERATORS.get(key) == ran)}."
            )
    on_gpu = bool(launched.kernels)
    pattern, names = (entry.kernels, launched.kernels) if on_gpu else (entry.cpu_operators, launched.operators)
    if pattern and not any(re.search(pattern, launched_name) for launched_name in names):
        raise WrongRun(
            f"provider {name} was asked for and none of what was launched is its own ({pattern}): "
            f"{', '.join(names[:8]) or 'nothing'}."
        )
