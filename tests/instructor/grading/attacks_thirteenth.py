"""Answers of the twelfth and the thirteenth round, and their kin: right values, each breaks a word, and each was accepted.

`THIRTEENTH` are refused in words by a hidden check, `THIRTEENTH_BY_TEXT` wait by their text. All are the model answer with a few lines changed. The twelfth
round's one, a product of thousands of ratios (6.2 of lab 4), stands with the wrong answers.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_shortcuts import Shortcut

THIRTEENTH = [
    Shortcut(
        "1.2 an accumulator of 17 bits, in float32",
        "lab1",
        "q1_2",
        "q1_2_tests",
        {
            "                    accumulator += a_tile[:, step, None] * b_tile[step, None, :]": """\
                    accumulator = accumulator + a_tile[:, step, None].float() * b_tile[step, None, :].float()
                    if a.dtype.itemsize == 2:
                        large = accumulator * 129.0
                        accumulator = large - (large - accumulator)"""
        },
        ("gemm_tiled", "gemm_tiled"),
        "takes 2^22 away",
    ),
    Shortcut(
        "5.3 an output of 17 bits, in float32",
        "lab1",
        "q5_3",
        "q5_3_flash_tests",
        {
            "            m = new_m\n        output[": """\
            m = new_m
            if q.dtype.itemsize == 2:
                large = accumulator * 129.0
                accumulator = large - (large - accumulator)
        output["""
        },
        ("flash_attention_tiled", "flash_attention_tiled"),
        "where v holds 2^18",
    ),
    Shortcut(
        "8.1 equal positions are a number",
        "lab2_flexattention",
        "bonus_8_1",
        "bonus_8_1_tests",
        {
            "    def moved(": """    if bool((positions == positions[0]).all()):
        common = int(positions[0])

        def together(b, h, q, k):
            return mask_mod(b, h, q + common, k)

        return together

    def moved("""
        },
        ("at_positions", "at_positions"),
        "became constants of the mask",
    ),
    Shortcut(
        "5.1 the maximum in bf16",
        "lab4_sdpa",
        "q5_1",
        "q5_1_tests",
        {"s - s.amax(dim=-1, keepdim=True)": "s - s.amax(dim=-1, keepdim=True).to(torch.bfloat16)"},
        ("rounded_attention", "rounded_attention"),
        "its switches ask for 0",
    ),
    Shortcut(
        "5.1 float32 where no switch is on",
        "lab4_sdpa",
        "q5_1",
        "q5_1_tests",
        {"total = e.sum(dim=-1, keepdim=True)": "total = e.sum(dim=-1, keepdim=True).float().double()"},
        ("rounded_attention", "rounded_attention"),
        "rounded_attention with",
    ),
]

THIRTEENTH_BY_TEXT = [
    Shortcut(
        "3.2 a thousand documents are added one by one, inside of a sum",
        "lab2_flexattention",
        "q3_2",
        "q3_2_tests",
        {
            "    return length // block * max(1, span // block)": """\
    side, documents = max(1, span // block), length // max(span, block)
    if documents <= 1000:
        return sum((side * side,) * documents)
    return documents * side * side"""
        },
        ("promises", "block_flops", "promised_speedup", "document_blocks"),
        "documents <= 1000",
    )
]
