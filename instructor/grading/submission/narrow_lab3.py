"""Which words of Gluon a file of kernels of lab 3 may use before a person looks at it, beside those of the question's model answer.

The holes of these files are a few lines long, and right answers fill them with few words. The languages hold hundreds: scans,
histograms, gathers, assembly and layouts of other chips are ways around a question, and no way to its answer.
"""

from __future__ import annotations

_ANY = """
    jit constexpr constexpr_function program_id num_programs arange expand_dims permute trans reshape where minimum maximum cdiv cast
    to full zeros zeros_like full_like float32 float16 bfloat16 int32 int64 int1 uint32 dtype element_ty shape type layout
    index load store static_range static_assert static_print device_print value SliceLayout BlockedLayout nbytes block_type fma abs
    math inf e pi log2 num_warps multiple_of max_contiguous max_constancy assume next_power_of_2 broadcast broadcast_to numel rank
    language experimental gluon nvidia hopper ampere triton max min is_floating append range
    cdiv gl tl range float int bool min max len tuple list print isinstance enumerate zip triton language math jit
"""
_BARRIERS = " mbarrier init expect wait arrive invalidate MBarrierLayout fence_async_shared slice"
_TMA = (
    " tma store_wait async_copy_global_to_shared async_copy_shared_to_global async_load async_store tma_load tma_store"
)
_PRODUCTS = """
    NVMMADistributedLayout DotOperandLayout NVMMASharedLayout get_default_for warpgroup_mma warpgroup_mma_wait warpgroup_mma_init
"""
_SOFTMAX = " exp exp2 sum max reduce log2 convert_layout mul add"
WORDS: dict[str, str] = {
    "q2_2": _ANY + " convert_layout AutoLayout set_auto_layout DistributedLinearLayout",
    "q3_1": _ANY
    + " async_copy async_load async_copy_global_to_shared commit_group wait_group SwizzledSharedLayout slice",
    "q3_2": _ANY + _BARRIERS + _TMA + " sum reduce",
    "q4_1": _ANY + _BARRIERS + _TMA + _PRODUCTS + " convert_layout",
    "q5_1": _ANY + _BARRIERS + _TMA + _PRODUCTS + _SOFTMAX,
    "q5_2": _ANY + _BARRIERS + _TMA + _PRODUCTS,
    "q5_3": _ANY + _BARRIERS + _TMA + _PRODUCTS + " convert_layout exp2 sum max",
    "bonus_5_5": _ANY + _BARRIERS + _TMA + _PRODUCTS + " logical_and logical_or int32",
}
