"""What right answers to the four labs use beside their model answers and the general lists of `vocabulary`."""

from __future__ import annotations

# lab -> {question, or "" for all: names, attributes and modules}
WORDS: dict[str, dict[str, str]] = {
    "lab1": {"q3_4": "create_decode_inputs_with_cache create_prefill_inputs"},
    "lab2_flexattention": {"q2_3": "torch.nn.attention.flex_attention and_masks or_masks", "q3_1": "numpy tolist"},
    "lab4_sdpa": {
        "": "sdpa_kernel SDPBackend",
        "q1_3": "getattr enable_math_sdp enable_flash_sdp enable_mem_efficient_sdp enable_cudnn_sdp _fused_sdp_choice resetwarnings",
        "q6_2": "to_dict",
        "q2_2": "numpy MATH scaled_dot_product_attention",
        "q3_2": "numpy array_split",
    },
}
# lab -> {question: names or attributes that every right answer uses}: what has an effect on a GPU only, and none in a check on a CPU
NEEDED: dict[str, dict[str, str]] = {"lab1": {"q4_1": "synchronize", "q4_3": "synchronize"}}
# lab -> {test cell, or "" for all: operators}
OPERATORS: dict[str, dict[str, str]] = {
    "lab2_flexattention": {"q3_1_tests": ".tolist() .numpy() numpy.asarray(tensor)", "q3_3_tests": ".tolist()"},
    "lab4_sdpa": {
        "q2_2_tests": ".numpy() _safe_softmax _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu"
    },
}
# lab -> {test cell: operators that all calls of its tests run together, at most}
MOST_OPERATORS: dict[str, dict[str, int]] = {
    "lab1": {
        **{"q1_1_tests": 40_000, "q1_2_tests": 300_000, "q4_2_tests": 1_000, "q5_1_tests": 3_000, "q5_3_tests": 4_000},
        **{"q5_3_flash_tests": 90_000, "bonus_5_6_tests": 90_000, "bonus_5_7_tests": 4_000},
    },
    "lab2_flexattention": {"q1_1_tests": 20_000, "q3_1_tests": 30_000, "q3_3_tests": 40_000},
    "lab4_sdpa": {"q2_2_tests": 10_000, "bonus_2_4_tests": 4_000, "q3_2_part_tests": 30_000, "q3_2_tests": 30_000},
}
