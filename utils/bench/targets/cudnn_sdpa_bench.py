"""labs/cudnn_sdpa_bench: scaled_dot_product_attention with one backend pinned. Backends come by flag alone."""

from __future__ import annotations

from typing import ClassVar

import torch

from utils.bench.knobs import Knob
from utils.bench.targets import providers
from utils.bench.targets.base import CAUSAL, Built, Case, Target, dtype_support, plain_workload, shape_knobs
from utils.device import Support


def sdpa_support(name: str, case: Case) -> Support:
    """Whether a backend (or "auto", torch's own choice) takes the case on this machine."""
    if not (kind := dtype_support(case.workload.dtype, case.device)):
        return kind
    return Support(True) if name == "auto" else providers.support(name, case.workload, case.device)


def build_sdpa(name: str, case: Case, q, k, v) -> Built:
    """SDPA with one backend pinned alone, or with torch's choice."""
    if name == "auto":
        return Built(providers.bind_default_sdpa(case.workload, q, k, v), name, f"SDPA of torch {torch.__version__}")
    return Built(providers.bind(name, case.workload, q, k, v), name, providers.implementation(name))


def prove_sdpa(built: Built, launched: providers.Launched) -> str:
    """The backend that ran, from its operator; with a backend pinned, its kernels must agree."""
    ran = providers.sdpa_backend(launched)
    if built.provider != "auto" or ran in providers.SDPA_BACKENDS:
        providers.prove(ran if built.provider == "auto" else built.provider, launched)
    return ran


class FlashSdp(Target):
    chapter, workload = "labs/cudnn_sdpa_bench", "flash_sdp"
    summary = "one SDPA backend against another on the same inputs"
    sides: ClassVar = {"baseline": "SDPA with --baseline-backend (math)", "optimized": "SDPA with --backend"}
    choices = ("auto", *providers.SDPA_BACKENDS)
    knobs = (
        *shape_knobs(cpu=(1, 4, 1024, 64, "fp32"), gpu=(4, 16, 4096, 128, "bf16")),
        CAUSAL,
        Knob("backend", "backend of the optimized side; auto is torch's own choice", "auto", "auto", choices=choices),
        Knob("baseline-backend", "backend of the baseline side", "math", "math", choices=choices),
    )

    def cases(self, settings, device):
        return [Case(self.name, plain_workload(settings), settings, device)]

    def _backend(self, case: Case, side: str) -> str:
        return case.value("backend" if side == "optimized" else "baseline_backend")

    def support(self, case, side):
        return sdpa_support(self._backend(case, side), case)

    def score_buffers(self, case, side):
        return 3.0 if self._backend(case, side) == "math" else 0.0

    def build(self, case, side, q, k, v):
        return build_sdpa(self._backend(case, side), case, q, k, v)

    def prove(self, case, side, built, launched):
        return prove_sdpa(built, launched)


TARGETS = (FlashSdp(),)
