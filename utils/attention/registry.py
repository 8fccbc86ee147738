"""The providers of attention: what each is, whether it runs here, what it accepts, and the one call in front of them.

out = attention(q, k, v, causal=True)            # "auto": the best that can do it
last_run().provider                              # which one that was
for row in provider_table(): print(row)          # what runs on this machine, and why not
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from utils.attention.choices import ranked
from utils.attention.request import AttentionUnsupported, Refused, Request, make_request
from utils.machine.device import Support


@dataclass(frozen=True)
class Provider:
    """One way to compute attention.

    machine: whether it runs here at all. accepts: whether it can do this request on this machine. run: does it,
    on checked arguments. kernels: a regular expression that its GPU kernels' names match, its proof of having run.
    cpu_operators: the same for operator names on a CPU.
    """

    name: str
    summary: str
    machine: Callable[[], Support]
    accepts: Callable[[Request], Support]
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Request], torch.Tensor]
    kernels: str
    cpu_operators: str = ""
    implementation: Callable[[], str] = lambda: ""

    def support(self, request: Request) -> Support:
        """Whether this machine and this provider can do the request."""
        return self.machine() and self.accepts(request)


@dataclass(frozen=True)
class Run:
    """What an attention call did: who ran, in which implementation, and who was passed over and why ("auto").

    chosen_by: the file of measured choices that "auto" went by (`choices.py`), "" where it was the fixed order.
    """

    provider: str
    implementation: str
    request: Request
    passed_over: tuple[tuple[str, str], ...] = ()
    chosen_by: str = ""


# One file each, in the order of the course: from the plainest to the fastest.
_MODULES = {
    "naive": "naive",
    "math": "sdpa_math",
    "flash": "sdpa_flash",
    "efficient": "sdpa_efficient",
    "cudnn": "sdpa_cudnn",
    "flash_attn": "flash_attn_package",
    "cute": "flash_attn_cute",
    "flex": "flex",
    "flex_flash": "flex_flash",
    "triton": "triton_flash",
    "gluon": "gluon_hopper",
}
PROVIDERS = tuple(_MODULES)
# Gluon on Hopper, else flash-attn, else SDPA by its measured speed on a GPU; the CPU has the last four.
AUTO_ORDER = ("gluon", "cute", "flash_attn", "cudnn", "flash", "efficient", "math", "naive")

_last: Run | None = None


def provider(name: str) -> Provider:
    """The provider of that name."""
    if name not in _MODULES:
        raise ValueError(f"There is no attention provider {name!r}; choose one of {', '.join(PROVIDERS)}, or auto.")
    return importlib.import_module(f"utils.attention.{_MODULES[name]}").PROVIDER


def able_providers(request: Request) -> tuple[str, ...]:
    """The names of the providers that can do this request on this machine."""
    return tuple(name for name in PROVIDERS if provider(name).support(request))


def choose(request: Request, refused: tuple[tuple[str, str], ...] = ()) -> tuple[Provider, tuple[tuple[str, str], ...]]:
    """The provider that "auto" takes for this request, and the better ones that cannot do it, with their reasons.

    The order is that of the measured choices in force, then AUTO_ORDER.
    refused: providers that have already refused this request, when they were called.
    """
    passed_over = []
    for name in dict.fromkeys((*ranked(request)[0], *AUTO_ORDER)):
        candidate = provider(name)
        reason = dict(refused).get(name) or candidate.support(request)
        if isinstance(reason, Support):
            if reason:
                return candidate, tuple(passed_over)
            reason = reason.reason
        passed_over.append((name, reason))
    reason = f"nothing in its order accepts {request.type_name} on {request.device}."
    raise AttentionUnsupported("auto", reason, able_providers(request))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    provider: str = "auto",
) -> torch.Tensor:
    """Attention of q (B, H, Sq, D) over k and v (B, Hkv, Sk, D): output like q.

    causal: query i sees keys up to i + Sk - Sq, so the last query sees the last key. scale: of the scores,
    1/sqrt(D) by default. window: only keys fewer than this many positions away (causal: the own and those before).
    Grouped heads: head h of q reads head h * Hkv // H of k and v. provider: a name in PROVIDERS, or "auto".
    A provider that cannot do this raises AttentionUnsupported and names those that can. `last_run()` says who ran.
    """
    global _last
    request = make_request(q, k, v, causal, scale, window)
    refused: tuple[tuple[str, str], ...] = ()
    while True:
        if provider == "auto":
            chosen, passed_over = choose(request, refused)
        else:
            chosen, passed_over = _provider(provider), ()
            support = chosen.support(request)
            if not support:
                raise _unsupported(provider, support.reason, request)
        try:
            out = chosen.run(q, k, v, request)
            break
        except Refused as refusal:  # a library that says no only when it is called
            if provider != "auto":
                raise _unsupported(provider, str(refusal), request) from refusal
            refused += ((chosen.name, str(refusal)),)
    by = ranked(request)[1] if provider == "auto" else ""
    _last = Run(chosen.name, chosen.implementation(), request, passed_over, by)
    return out


def _unsupported(name: str, reason: str, request: Request) -> AttentionUnsupported:
    return AttentionUnsupported(name, reason, tuple(other for other in able_providers(request) if other != name))


_provider = provider  # `attention` has an argument of that name


def last_run() -> Run | None:
    """Who computed the last attention call of this process, and who was passed over; None before the first."""
    return _last


def provider_table() -> list[dict]:
    """A row for each provider: name, summary, ok, reason, remedy on this machine."""
    rows = []
    for name in PROVIDERS:
        entry = provider(name)
        support = entry.machine()
        rows.append(
            {
                "provider": name,
                "summary": entry.summary,
                "ok": support.ok,
                "reason": support.reason,
                "remedy": support.remedy,
                "implementation": entry.implementation() if support else "",
            }
        )
    return rows


def launched_names(call: Callable[[], object], device: torch.device | str) -> list[str]:
    """The names of the kernels (on a GPU) or operators (on a CPU) that a call launches, from torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.device(device).type == "cuda"
    call()  # compiled, warm
    if on_gpu:
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as trace:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    return [event.name for event in trace.events() if event.device_type == wanted]


def proof(name: str, q, k, v, **options) -> list[str]:
    """The launched kernels (CPU: operators) that show that a provider really computed this call; empty if none do."""
    entry = provider(name)
    pattern = entry.kernels if q.is_cuda else entry.cpu_operators
    names = launched_names(lambda: attention(q, k, v, provider=name, **options), q.device)
    return [launched for launched in names if pattern and re.search(pattern, launched)]
