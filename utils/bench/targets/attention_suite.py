"""attention_suite: SDPA, flash-attn, Gluon and the registry's other providers over one matrix of shapes, in fp16 and
bf16.
"""

from __future__ import annotations

import itertools
from typing import ClassVar

from utils.bench.targets import providers
from utils.bench.targets.base import CAUSAL, Built, Case, Target, dtype_support, shape_knobs
from utils.bench.targets.cudnn_sdpa_bench import build_sdpa, prove_sdpa, sdpa_support
from utils.bench.workload import Workload
from utils.machine.device import Support

MATRIX = ((1, 1, 128, 64), (8, 4, 128, 64), (32, 8, 128, 64), (32, 8, 256, 64))  # B, H, S, D
DTYPES = ("fp16", "bf16")


class Suite(Target):
    """One contender over the matrix: a shape given by a flag replaces that column of every row."""

    chapter = "attention_suite"
    knobs = (
        *shape_knobs(cpu=(None, None, None, None, DTYPES), gpu=(None, None, None, None, DTYPES), many_dtypes=True),
        CAUSAL,
    )
    protocol: ClassVar = {"cpu": (5, 30), "cuda": (200, 500)}

    def __init__(self, workload: str, summary: str, baseline: str, optimized: str):
        self.workload, self.summary = workload, summary
        self.contenders = {"baseline": baseline, "optimized": optimized}
        words = {
            "auto": "SDPA, torch's own choice of backend",
            "math": "SDPA's math backend",
            "flash_attn": "the flash-attn package",
            "gluon": "the course's Gluon kernel",
            "cute": "flash-attn-4's CuTe kernel",
            "flex": "FlexAttention, compiled",
            "flex_flash": "FlexAttention with its FLASH backend",
            "triton": "the course's Triton kernel",
        }
        self.sides = {side: words[name] for side, name in self.contenders.items()}

    def cases(self, settings, device):
        given = [settings[key].value for key in ("batch", "heads", "seq_len", "head_dim")]
        shapes = dict.fromkeys(tuple(new or old for new, old in zip(given, row, strict=True)) for row in MATRIX)
        mask = "causal" if settings["causal"].value else "full"
        return [
            Case(self.name, Workload(*shape, dtype, mask), settings, device)
            for dtype, shape in itertools.product(settings["dtype"].value, shapes)
        ]

    def support(self, case, side):
        name = self.contenders[side]
        if name in ("auto", *providers.SDPA_BACKENDS):
            return sdpa_support(name, case)
        if name == "triton" and case.device.type == "cpu":
            return Support(
                False,
                "on a CPU the Triton kernel runs in Triton's interpreter, whose time says nothing.",
                "Run it on an NVIDIA GPU.",
            )
        here = providers.support(name, case.workload, case.device)
        return here and dtype_support(case.workload.dtype, case.device)

    def score_buffers(self, case, side):
        return 3.0 if self.contenders[side] == "math" else 0.0

    def build(self, case, side, q, k, v):
        name = self.contenders[side]
        if name in ("auto", *providers.SDPA_BACKENDS):
            return build_sdpa(name, case, q, k, v)
        return Built(providers.bind(name, case.workload, q, k, v), name, providers.implementation(name))

    def prove(self, case, side, built, launched):
        if self.contenders[side] in ("auto", *providers.SDPA_BACKENDS):
            return prove_sdpa(built, launched)
        providers.prove(built.provider, launched)
        return built.provider

    def range_name(self, side, ran):
        return f"attention_suite_{self.workload}_{side}_{ran}"


TARGETS = (
    Suite("sdpa", "scaled_dot_product_attention over the matrix of shapes", "math", "auto"),
    Suite("flash_attn", "the flash-attn package over the matrix of shapes", "auto", "flash_attn"),
    Suite("gluon", "the Gluon FlashAttention over the matrix of shapes", "auto", "gluon"),
    Suite("cute", "flash-attn-4 over the matrix of shapes", "auto", "cute"),
    Suite("flex", "compiled FlexAttention over the matrix of shapes", "auto", "flex"),
    Suite("flex_flash", "FlexAttention's FLASH backend over the matrix of shapes", "auto", "flex_flash"),
    Suite("triton", "the Triton FlashAttention over the matrix of shapes", "auto", "triton"),
)
