"""The visible checks of lab 1: what the test cells call. Grading asks the same of other inputs."""

from utils.checking.labs.lab1.attention import (
    check_attention_intensity,
    check_causal,
    check_flash,
    check_layout,
    check_merge,
    check_online_softmax,
    check_score_memory,
    check_standard,
)
from utils.checking.labs.lab1.gemm import (
    check_achieved,
    check_costs,
    check_gemm_naive,
    check_gemm_tiled,
    check_intensity,
    check_roof,
    check_tile_traffic,
    check_time_calls,
)
from utils.checking.labs.lab1.gemma import (
    check_attention_cost,
    check_counted_flops,
    check_decode,
    check_floor,
    check_kv_cache_bytes,
    check_mlp,
    check_pairs,
)
from utils.checking.labs.lab1.profiling import check_fusion, check_gelu, check_kernels, check_launches, check_profile
from utils.checking.labs.lab1.triton_kernels import check_flash_triton, check_gemm_triton

__all__ = [
    "check_achieved",
    "check_attention_cost",
    "check_attention_intensity",
    "check_causal",
    "check_costs",
    "check_counted_flops",
    "check_decode",
    "check_flash",
    "check_flash_triton",
    "check_floor",
    "check_fusion",
    "check_gelu",
    "check_gemm_naive",
    "check_gemm_tiled",
    "check_gemm_triton",
    "check_intensity",
    "check_kernels",
    "check_kv_cache_bytes",
    "check_launches",
    "check_layout",
    "check_merge",
    "check_mlp",
    "check_online_softmax",
    "check_pairs",
    "check_profile",
    "check_roof",
    "check_score_memory",
    "check_standard",
    "check_tile_traffic",
    "check_time_calls",
]
