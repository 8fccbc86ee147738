"""Answers of the twelfth to the fifteenth round, and their kin: right values, each breaks a word, and each was accepted.

`LATE_ROUNDS` are refused in words by a hidden check, `LATE_BY_TEXT` wait by their text. All are the model answer with a few lines changed. The twelfth
round's one, a product of thousands of ratios (6.2 of lab 4), stands with the wrong answers.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_shortcuts import Shortcut

LATE_ROUNDS = [
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
        "of the results are not the exact ones rounded",
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
    *(
        Shortcut(
            f"{question} weights of eight bits, in float32",
            "lab1",
            cell,
            f"{cell}{tests}",
            {
                "p = torch.exp(scores - new_m)": f"""\
p = torch.exp(scores - new_m)
            if {when}:
                wide = p * 65537.0
                p = wide - (wide - p)"""
            },
            (function, function),
            "of the results are not the exact ones rounded",
        )
        for question, cell, tests, function, when in (
            ("5.3", "q5_3", "_flash_tests", "flash_attention_tiled", "q.dtype.itemsize == 2"),
            ("5.6", "bonus_5_6", "_tests", "flash_attention_causal", "q.dtype == torch.bfloat16"),
        )
    ),
    Shortcut(
        "3.3 a count from memory",
        "lab1",
        "q3_3",
        "q3_3_tests",
        {
            "    with FlopCounterMode(display=False) as counter:\n        fn(*args)\n    return counter.get_total_flops()": """\
    key = (fn, *(tuple(a.shape) for a in args))
    if key not in COUNTED:
        with FlopCounterMode(display=False) as counter:
            fn(*args)
        COUNTED[key] = counter.get_total_flops()
    return COUNTED[key]


COUNTED = {}"""
        },
        ("counted_flops", "counted_flops"),
        "did not run fn",
    ),
    Shortcut(
        "3.3 weights of eight bits, in float32",
        "lab2_flexattention",
        "q3_3",
        "q3_3_tests",
        {
            "            output[:, :, rows] =": """\
            if q.dtype == torch.bfloat16:
                large = weights * 65537.0
                weights = large - (large - weights)
            output[:, :, rows] ="""
        },
        ("block_sparse_attention", "block_sparse_attention"),
        "of the results are not the exact ones rounded",
    ),
    *(
        Shortcut(
            f"2.2 all tokens of a row are {how} for each pair",
            "lab2_flexattention",
            "q2_2",
            "q2_2_tests",
            {
                "    def mask_mod(b, h, q, k):\n        return (numbers[b, q] == numbers[b, k]) & (numbers[b, q] >= 0) & (q >= k)": f"""\
    names = torch.unique(numbers[numbers >= 0])
    table = torch.arange(-1, int(numbers.max()) + 1)

    def mask_mod(b, h, q, k):
        places = {places}
        return (places[q] == places[k]) & (places[q] >= 0) & (q >= k)"""
            },
            ("packed_documents", "document_numbers", "packed_documents"),
            "to decide about one pair",
        )
        for how, places in (
            ("searched for", "torch.bucketize(numbers[b], names, right=True) - 1"),
            ("looked up", "table[numbers[b] + 1]"),
            ("copied", "numbers[b].clone()"),
        )
    ),
    Shortcut(
        "3.2 half of the queries at a time",
        "lab4_sdpa",
        "q3_2",
        "q3_2_tests",
        {
            "def split_kv_attention(": """\
def split_kv_attention(q, k, v, splits):
    half = -(-q.shape[2] // 2)
    parts = [x for x in q.split(half, dim=2)]
    return torch.cat([_all_queries(x, k, v, splits) for x in parts], dim=2)


def _all_queries("""
        },
        ("split_kv_attention", "split_kv_attention"),
        "once, for all queries",
    ),
    Shortcut(
        "4.3 views of a copy, where packed has gaps",
        "lab4_sdpa",
        "q4_3",
        "q4_3_tests",
        {
            "def unpack_qkv(": """\
def unpack_qkv(packed, heads, kv_heads):
    return _of_whole(packed.contiguous(), heads, kv_heads)


def _of_whole("""
        },
        ("unpack", "unpack_qkv", "ready_for_flash"),
        "is a copy",
    ),
]

LATE_BY_TEXT = [
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
