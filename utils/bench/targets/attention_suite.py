"""attention_suite: SDPA, flash-attn, Gluon and other attention backends over one matrix of shapes, in two dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from utils.bench.targets import sdpa
from utils.bench.targets.base import CAUSAL, Case, Target, dtype_support, shape_knobs
from utils.bench.targets.cudnn_sdpa_bench import build_sdpa, sdpa_support
from utils.bench.targets.prepared import backend_support, build_prepared
from utils.bench.targets.proof import prove
from utils.bench.workload import Inputs, Workload
from utils.machine.device import Support

MATRIX = ((1, 1, 128, 64), (8, 4, 128, 64), (32, 8, 128, 64), (32, 8, 256, 64))  # B, H, S, D
DTYPES = ("fp16", "bf16")
CPU_DTYPES = ("fp32", "bf16")  # fp16 products run near 1 GFLOP/s there
WORDS = {
    "auto": "SDPA, torch's own choice of backend",
    "math": "SDPA's math backend",
    "flash_attn": "the flash-attn package",
    "fa3": "FlashAttention 3's C++ kernels",
    "gluon": "the course's Gluon kernel",
    "cute": "flash-attn-4's CuTe kernel",
    "flex": "FlexAttention, compiled",
    "flex_flash": "FlexAttention with its FLASH backend",
    "triton": "the course's Triton kernel",
}


class Suite(Target):
    """One contender over the matrix: a shape given by a flag replaces that column of every row."""

    chapter = "attention_suite"
    knobs = (
        *shape_knobs(cpu=(None, None, None, None, CPU_DTYPES), gpu=(None, None, None, None, DTYPES), many_dtypes=True),
        CAUSAL,
    )
    protocol: Mapping[str, tuple[int, int]] = {"cpu": (5, 30), "cuda": (200, 500)}

    def __init__(self, workload: str, summary: str, baseline: str, optimized: str):
        self.workload, self.summary = workload, summary
        self.contenders = {"baseline": baseline, "optimized": optimized}
        self.sides = {side: WORDS[name] for side, name in self.contenders.items()}

    def cases(self, settings, device):
        """Return a case for each shape and dtype."""
        given = [settings[key].value for key in ("batch", "heads", "seq_len", "head_dim")]
        shapes = dict.fromkeys(tuple(new or old for new, old in zip(given, row, strict=True)) for row in MATRIX)
        mask = "causal" if settings["causal"].value else "full"
        return [
            Case(self.name, Workload(*shape, dtype, mask), settings, device)
            for dtype, shape in itertools.product(settings["dtype"].value, shapes)
        ]

    def support(self, case, side):
        """Whether this machine runs this side of the case, and why not."""
        name = self.contenders[side]
        if name in ("auto", *sdpa.BACKENDS):
            return sdpa_support(name, case)
        if name == "triton" and case.device.type == "cpu":
            return Support(
                False,
                "on a CPU the Triton kernel runs in Triton's interpreter, whose time says nothing.",
                "Run it on an NVIDIA GPU.",
            )
        return backend_support(name, case) and dtype_support(case.workload.dtype, case.device)

    def score_buffers(self, case, side):
        """Fp32 buffers of (B, H, S, S) that the side needs at once."""
        return 3.0 if self.contenders[side] == "math" else 0.0

    def build(self, case, side, q, k, v):
        """Prepare the side's call."""
        name = self.contenders[side]
        if name in ("auto", *sdpa.BACKENDS):
            return build_sdpa(name, case, Inputs(q, k, v))
        return build_prepared(name, case, (q, k, v))

    def prove(self, case, side, built, launched):
        """Return the backend that ran; raise WrongRun if it is another one than asked for."""
        return prove(self.contenders[side], launched)


TARGETS = (
    Suite("sdpa", "scaled_dot_product_attention over the matrix of shapes", "math", "auto"),
    Suite("flash_attn", "the flash-attn package over the matrix of shapes", "auto", "flash_attn"),
    Suite("gluon", "the Gluon FlashAttention over the matrix of shapes", "auto", "gluon"),
    Suite("fa3", "FlashAttention 3 over the matrix of shapes", "auto", "fa3"),
    Suite("cute", "flash-attn-4 over the matrix of shapes", "auto", "cute"),
    Suite("flex", "compiled FlexAttention over the matrix of shapes", "auto", "flex"),
    Suite("flex_flash", "FlexAttention's FLASH backend over the matrix of shapes", "auto", "flex_flash"),
    Suite("triton", "the Triton FlashAttention over the matrix of shapes", "auto", "triton"),
)
