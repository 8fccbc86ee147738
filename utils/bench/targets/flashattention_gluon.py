"""labs/flashattention_gluon: a warp-specialized FlashAttention, Gluon's where it runs: forward, and the passes of training."""

from __future__ import annotations

from collections.abc import Mapping

from utils.bench.knobs import Knob
from utils.bench.targets.attention import CAUSAL, UnfusedFused, plain_workload, provider_knob, shape_knobs
from utils.bench.targets.base import Case
from utils.bench.targets.cudnn_sdpa_bench import FlashSdp
from utils.bench.workload import DIRECTIONS

CHOICES = (
    *FlashSdp.choices,
    "gluon",
    "cute",
    "flash_attn",
)  # with the backends outside of torch that have a backward pass


class FlashAttentionGluon(UnfusedFused):
    """matmul, softmax, matmul against the course's Gluon kernel, else FlashAttention 3, else CuTe, else flash-attn."""

    chapter, workload = "labs/flashattention_gluon", "flashattention_gluon"
    summary = "unfused attention against a fused, warp-specialized FlashAttention"
    sides: Mapping[str, str] = {
        "baseline": "matmul, softmax, matmul",
        "optimized": "Gluon, else FlashAttention 3, else CuTe, else flash-attn",
    }
    order = ("gluon", "fa3", "cute", "flash_attn")
    knobs = (*shape_knobs(cpu=(1, 2, 512, 64, "fp32"), gpu=(4, 16, 4096, 128, "bf16")), CAUSAL, provider_knob(order))

    def cases(self, settings, device):
        """Return the one case of these settings."""
        return [Case(self.name, plain_workload(settings), settings, device)]

    def range_name(self, side, ran):
        """NVTX range of the side in a profile."""
        return f"flashattention_{side}_{ran}"


class AttentionTraining(FlashSdp):
    """Forward plus backward, or one of them: the course's Gluon kernels, or a package's, against an SDPA backend."""

    chapter, workload = "labs/flashattention_gluon", "attention_training"
    summary = "forward plus backward of one attention backend against another"
    sides: Mapping[str, str] = {
        "baseline": "SDPA with --baseline-backend (cudnn)",
        "optimized": "attention with --backend (gluon)",
    }
    knobs = (
        *(knob for knob in FlashSdp.knobs if knob.name not in ("pass", "backend", "baseline-backend")),
        Knob("pass", "what is timed", "both", "both", choices=DIRECTIONS),
        Knob("backend", "backend of the optimized side", "flash", "gluon", choices=CHOICES),
        Knob("baseline-backend", "backend of the baseline side", "math", "cudnn", choices=CHOICES),
    )


TARGETS = (FlashAttentionGluon(), AttentionTraining())
