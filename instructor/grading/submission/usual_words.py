"""What right answers to the four labs use beside their model answers and the general lists of `vocabulary`."""

from __future__ import annotations

from collections.abc import Mapping

from instructor.grading.submission import narrow_lab3, narrow_lab4
from instructor.grading.submission.narrow_labs_1_2 import LAB1, LAB2, OPERATORS_LAB1, OPERATORS_LAB2
from instructor.grading.submission.usual import Usual

# lab -> {question, or "" for all: names, attributes and modules}
WORDS: dict[str, dict[str, str]] = {
    "lab1": {"q3_4": "create_decode_inputs_with_cache create_prefill_inputs"},
    "lab2_flexattention": {
        **dict.fromkeys(("q2_2", "q6_1", "q7_1", "bonus_8_3"), "numpy"),
        "q2_3": "torch.nn.attention.flex_attention and_masks or_masks",
        "q3_1": "numpy tolist",
    },
    "lab4_sdpa": {
        "": "sdpa_kernel SDPBackend",
        "q1_3": "getattr enable_math_sdp enable_flash_sdp enable_mem_efficient_sdp enable_cudnn_sdp _fused_sdp_choice resetwarnings",
        "q6_2": "to_dict",
        "q2_2": "numpy MATH scaled_dot_product_attention",
        "q3_2": "numpy array_split",
    },
}
# lab -> {question: names or attributes that every right answer uses}: a tool that the question names, and what has an effect on
# a GPU only, and none in a check on a CPU
NEEDED: dict[str, dict[str, str]] = {
    "lab1": {
        "q3_3": "FlopCounterMode",
        "q4_1": "profile export_chrome_trace synchronize",
        "q4_3": "profile count_cuda_kernels synchronize",
    },
    "lab2_flexattention": {"q5_1": "create_block_mask"},
    "lab3_gluon": {"q2_2": "convert_layout"},
    "lab4_sdpa": {"q1_3": "scaled_dot_product_attention"},
}
# lab -> {question or test cell: all words of Python and torch that right answers use}: where numbers leave torch one by one, what Python
# computes with them is in no record. Python's operators beside +, - and * are words, too.
NARROW: dict[str, dict[str, str]] = {
    "lab1": {
        "q1_1": """
            range len zip enumerate float int sum tuple list isinstance ValueError TypeError AssertionError NotImplementedError
            print reversed map item shape size dtype device zeros zeros_like empty empty_like new_zeros new_empty full new_full
            new_tensor tensor as_tensor stack cat append extend to type type_as float double half bfloat16 mul add addcmul add_
            mul_ multiply select unbind view reshape unsqueeze squeeze T t transpose contiguous clone detach ndim dim numel
            product reduce accumulate fsum is_floating_point float32 float64 bfloat16 float16 finfo promote_types result_type
            Tensor no_grad inference_mode starmap chain pow dtype cpu is_cuda fill_ zero_ copy_ expand rows columns range_
            lru_cache cache wraps partial count islice repeat requires_grad
        """,
        **LAB1,
    },
    "lab2_flexattention": LAB2,
    "lab3_gluon": narrow_lab3.WORDS,
    "lab4_sdpa": narrow_lab4.WORDS,
}
# lab -> {test cell: all operators that right answers run}, in place of the usual ones
NARROW_OPERATORS: dict[str, dict[str, frozenset[str]]] = {
    "lab1": OPERATORS_LAB1,
    "lab2_flexattention": OPERATORS_LAB2,
    "lab4_sdpa": narrow_lab4.OPERATORS,
}
# lab -> {test cell: words for what its question forbids, "@" for the operator, "loop" for a loop}: an answer that holds one has a way that no input of the
# check may have reached
_LIBRARY_PRODUCTS = """
    @ mm bmm matmul addmm baddbmm addbmm mv addmv dot vdot inner einsum tensordot bilinear linear multi_dot chain_matmul
"""
_LIBRARY_SOFTMAX = "softmax log_softmax softmin logsumexp logcumsumexp _softmax _log_softmax"
FORBIDDEN: dict[str, dict[str, str]] = {
    "lab1": {
        **{"q1_1_tests": _LIBRARY_PRODUCTS, "q1_2_tests": _LIBRARY_PRODUCTS, "q4_2_tests": _LIBRARY_PRODUCTS},
        **dict.fromkeys(("q5_3_flash_tests", "bonus_5_6_tests", "bonus_5_7_tests"), _LIBRARY_SOFTMAX),
    },
    "lab2_flexattention": {"q3_2_tests": "loop"},
}
# lab -> {test cell, or "" for all: operators}
OPERATORS: dict[str, dict[str, str]] = {
    "lab1": {
        "q5_2_tests": "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math _safe_softmax"
    },
    "lab2_flexattention": {"q3_1_tests": ".tolist() .numpy() numpy.asarray(tensor)", "q3_3_tests": ".tolist()"},
    "lab4_sdpa": {
        "q2_2_tests": ".numpy() _safe_softmax _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu"
    },
}
# lab -> {test cell: operators that all calls of its tests run together, at most}
MOST_OPERATORS: dict[str, dict[str, int]] = {
    "lab1": {
        **{"q1_1_tests": 40_000, "q1_2_tests": 300_000, "q4_2_tests": 1_000, "q5_1_tests": 10_000, "q5_3_tests": 4_000},
        **{"q5_3_flash_tests": 90_000, "bonus_5_6_tests": 90_000, "bonus_5_7_tests": 4_000},
    },
    "lab2_flexattention": {"q1_1_tests": 20_000, "q3_1_tests": 30_000, "q3_3_tests": 40_000},
    "lab4_sdpa": {"q2_2_tests": 10_000, "bonus_2_4_tests": 4_000, "q3_2_part_tests": 30_000, "q3_2_tests": 30_000},
}
# Single values that all calls of a test cell's functions take out of torch, at most, but where they are multiplied or looked up one by one.
MOST_NUMBERS = 500
READING_ONE_BY_ONE = {"lab1": ("q1_1_tests",), "lab2_flexattention": ("q3_1_tests", "q3_3_tests")}
# Labs whose right answers compare values with large numbers: there only sizes may not be compared with them (`limits`).
ONLY_SIZES = ("lab1",)
REWRITTEN = ("lab1",)  # labs whose files of kernels students may write in their own way, around the holes too


def usual_in(lab: str, instructor_notebook: str, base: Mapping[str, object]) -> Usual:
    """Return what right answers to a lab use; of a lab that is none of the four, what its model answers do.

    Args:
        lab: name of the lab.
        instructor_notebook: the lab with its solutions.
        base: the notebook's names after its setup.
    """
    return Usual(
        instructor_notebook,
        base,
        more=WORDS.get(lab),
        needed=NEEDED.get(lab),
        narrow=NARROW.get(lab),
        forbidden=FORBIDDEN.get(lab),
        keeps_lines=lab not in REWRITTEN,
        only_sizes=lab in ONLY_SIZES or lab not in NARROW,
    )
