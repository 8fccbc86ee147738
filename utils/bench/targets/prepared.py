"""Sides of a target that are prepared calls of `utils.attention`, and targets of unfused against fused attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from utils.attention import AttentionUnsupported, Prepared, find_backend, prepare
from utils.attention.prepared import compiled_versions
from utils.bench.errors import Refused, WrongRun
from utils.bench.knobs import Knob
from utils.bench.targets.base import Built, Case, Target, dtype_support
from utils.bench.targets.proof import prove
from utils.machine.device import Support, cuda_support

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class PreparedBuilt(Built):
    """A side with the prepared call behind it."""

    prepared: Prepared = field(kw_only=True)


def build_prepared(name: str, case: Case, inputs: Inputs, asked: str = "", **options) -> PreparedBuilt:
    """Prepare a backend on these inputs; raise Refused if it cannot do the case.

    The side's function is the bare call without the guard; `after` checks that it was compiled once.

    Args:
        name: the backend.
        case: the case; its mask and score modifier are passed on.
        inputs: q, k, v (B, H, S, D).
        asked: the name of the backend in records, if it is another one.
        **options: block_size, mode and kernel_options of `prepare`.
    """
    q, k, v = inputs
    try:
        prepared = prepare(q, k, v, backend=name, **case.workload.attention_arguments, **options)
    except AttentionUnsupported as error:
        raise Refused(str(error)) from None
    attend = prepared.fn

    def after() -> None:
        if prepared.source is not None and (versions := compiled_versions(prepared.source)) != 1:
            raise WrongRun(
                f"backend {name} was compiled {versions} times and once is right: a recompile or a fallback to eager "
                "was among the timed calls, so these times are void."
            )

    implementation = prepared.settings["implementation"]
    return PreparedBuilt(lambda: attend(q, k, v), asked or name, implementation, after, prepared=prepared)


def backend_support(name: str, case: Case) -> Support:
    """Whether a backend computes the case on its device."""
    answer = find_backend(name).support(case.workload.problem(case.device))
    return answer if answer else Support(False, f"backend {name}: {answer.reason}", answer.remedy)


def first_able(names: Sequence[str], case: Case) -> tuple[str | None, Support]:
    """Return the first backend of `names` that can do the case, or None and the reason of each."""
    if not (cuda := cuda_support()) and not any(find_backend(name).machine() for name in names):
        need = f"{', '.join(names)} need{'s' * (len(names) == 1)} an NVIDIA GPU: {cuda.reason}"
        return None, Support(False, need, cuda.remedy)
    reasons = []
    for name in names:
        answer = backend_support(name, case)
        if answer:
            return name, answer
        reasons.append(answer.reason.rstrip("."))
    return None, Support(False, "; ".join(reasons) + ".", f"Run it where one of {', '.join(names)} is supported.")


def provider_knob(order: tuple[str, ...]) -> Knob:
    """Return the flag --provider: the backend of the optimized side."""
    explanation = f"fused attention; auto takes the first of {', '.join(order)} that runs here"
    return Knob("provider", explanation, "auto", "auto", choices=("auto", *order))


class UnfusedFused(Target):
    """Unfused attention against the first fused backend of `order` that can do the case, or the one of --provider."""

    order: tuple[str, ...]

    def optimized_backend(self, case: Case) -> tuple[str | None, Support]:
        """Return the backend of the optimized side, or None and why there is none."""
        asked = case.value("provider")
        return first_able(self.order if asked == "auto" else (asked,), case)

    def support(self, case, side):
        """Whether this machine runs this side of the case, and why not."""
        if side == "optimized" and not (answer := self.optimized_backend(case)[1]):
            return answer
        return dtype_support(case.workload.dtype, case.device)

    def score_buffers(self, case, side):
        """Fp32 buffers of (B, H, S, S) that the side needs at once."""
        return 3.0 if side == "baseline" else 0.0

    def build(self, case, side, q, k, v):
        """Prepare the side's call."""
        if side == "baseline":
            return build_prepared("naive", case, (q, k, v), asked="unfused")
        return build_prepared(self.optimized_backend(case)[0], case, (q, k, v))

    def prove(self, case, side, built, launched):
        """Return the backend that ran; raise WrongRun if it is another one than asked for."""
        prove("naive" if side == "baseline" else built.provider, launched)
        return built.provider
