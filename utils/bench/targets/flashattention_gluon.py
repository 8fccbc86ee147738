"""labs/flashattention_gluon: a warp-specialized FlashAttention, Gluon's where it runs."""

from __future__ import annotations

from collections.abc import Mapping

from utils.bench.targets.attention import CAUSAL, UnfusedFused, provider_knob, shape_knobs


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

    def range_name(self, side, ran):
        """NVTX range of the side in a profile."""
        return f"flashattention_{side}_{ran}"


TARGETS = (FlashAttentionGluon(),)
