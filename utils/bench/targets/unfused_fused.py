"""Unfused attention as baseline, a fused provider as optimized side: the first of an order that runs here, or one asked
for by --provider.
"""

from __future__ import annotations

from utils.bench.knobs import Knob
from utils.bench.targets import providers
from utils.bench.targets.base import Built, Case, Target, dtype_support
from utils.bench.workload import allowed_pairs, unfused_attention
from utils.machine.device import Support


def provider_knob(order: tuple[str, ...]) -> Knob:
    return Knob(
        "provider",
        f"fused attention; auto takes the first of {', '.join(order)} that runs here",
        "auto",
        "auto",
        choices=("auto", *order),
    )


class UnfusedFused(Target):
    order: tuple[str, ...]  # providers that "auto" tries

    def _provider(self, case: Case) -> tuple[str | None, Support]:
        asked = case.value("provider")
        return providers.first_able(self.order if asked == "auto" else (asked,), case.workload, case.device)

    def support(self, case, side):
        if side == "optimized" and not (here := self._provider(case)[1]):
            return here
        return dtype_support(case.workload.dtype, case.device)

    def score_buffers(self, case, side):
        return 3.0 if side == "baseline" else 0.0

    def build(self, case, side, q, k, v):
        if side == "baseline":
            allowed = allowed_pairs(case.workload, case.device)
            return Built(
                lambda: unfused_attention(case.workload, q, k, v, allowed), "unfused", "matmul, softmax, matmul"
            )
        name, _ = self._provider(case)
        return Built(providers.bind(name, case.workload, q, k, v), name, providers.implementation(name))

    def prove(self, case, side, built, launched):
        providers.prove("naive" if side == "baseline" else built.provider, launched)
        return built.provider
