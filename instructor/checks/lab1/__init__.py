"""Hidden checks of lab 1: each takes the student's functions and a seed, and returns a Verdict.

`seed=None` draws fresh inputs at each call. All inputs live on the CPU, so the verdict is the same with and without a
GPU. The meta device shows whether a result is on the device of its inputs.
"""

from instructor.checks.lab1.attention import (
    attention_bshd,
    attention_intensity,
    attention_memory,
    online_softmax_stats,
    standard_attention,
)
from instructor.checks.lab1.flash import flash_attention_tiled
from instructor.checks.lab1.gemm import gemm_and_gemv_costs, gemm_naive, gemm_tiled, tile_traffic, time_calls
from instructor.checks.lab1.gemma import (
    attended_pairs,
    attention_cost,
    decode_floor,
    decode_with_cache,
    kv_cache_bytes,
    mlp_and_norm_costs,
)
from instructor.checks.lab1.profiling import fusion_bytes, gelu_by_hand, launch_model, profile_steps
from instructor.checks.lab1.roofline import achieved_and_smallest, intensities, ridge_and_roof
from instructor.checks.lab1.triton_kernels import flash_triton, gemm_triton

__all__ = [
    "achieved_and_smallest",
    "attended_pairs",
    "attention_bshd",
    "attention_cost",
    "attention_intensity",
    "attention_memory",
    "decode_floor",
    "decode_with_cache",
    "flash_attention_tiled",
    "flash_triton",
    "fusion_bytes",
    "gelu_by_hand",
    "gemm_and_gemv_costs",
    "gemm_naive",
    "gemm_tiled",
    "gemm_triton",
    "intensities",
    "kv_cache_bytes",
    "launch_model",
    "mlp_and_norm_costs",
    "online_softmax_stats",
    "profile_steps",
    "ridge_and_roof",
    "standard_attention",
    "tile_traffic",
    "time_calls",
]
