"""The visible checks of lab 1: what the test cells call. Grading asks the same of other inputs."""

from utils.checking.labs.lab1.attention import (
    check_attention_bshd,
    check_attention_intensity,
    check_attention_memory,
    check_flash_attention_causal,
    check_flash_attention_tiled,
    check_merge_attention,
    check_online_softmax_stats,
    check_standard_attention,
)
from utils.checking.labs.lab1.gemm import (
    check_achieved_and_smallest,
    check_gemm_and_gemv_costs,
    check_gemm_naive,
    check_gemm_tiled,
    check_intensities,
    check_ridge_and_roof,
    check_tile_traffic,
    check_time_calls,
)
from utils.checking.labs.lab1.gemma import (
    check_attended_pairs,
    check_attention_cost,
    check_counted_flops,
    check_decode_floor,
    check_decode_with_cache,
    check_kv_cache_bytes,
    check_mlp_and_norm_costs,
)
from utils.checking.labs.lab1.profiling import (
    check_fusion_bytes,
    check_gelu_by_hand,
    check_kernels_per_step,
    check_launch_model,
    check_profile_steps,
)
from utils.checking.labs.lab1.triton_kernels import check_flash_triton, check_gemm_triton

__all__ = [
    "check_achieved_and_smallest",
    "check_attended_pairs",
    "check_attention_bshd",
    "check_attention_cost",
    "check_attention_intensity",
    "check_attention_memory",
    "check_counted_flops",
    "check_decode_floor",
    "check_decode_with_cache",
    "check_flash_attention_causal",
    "check_flash_attention_tiled",
    "check_flash_triton",
    "check_fusion_bytes",
    "check_gelu_by_hand",
    "check_gemm_and_gemv_costs",
    "check_gemm_naive",
    "check_gemm_tiled",
    "check_gemm_triton",
    "check_intensities",
    "check_kernels_per_step",
    "check_kv_cache_bytes",
    "check_launch_model",
    "check_merge_attention",
    "check_mlp_and_norm_costs",
    "check_online_softmax_stats",
    "check_profile_steps",
    "check_ridge_and_roof",
    "check_standard_attention",
    "check_tile_traffic",
    "check_time_calls",
]
