"""Answers to labs 1 and 2 that keep to the words for small inputs and leave them for large ones, or hide an operation in another.

Each was right to the hidden checks when it was written: their largest inputs were smaller than what a lab works on, and sums, complex numbers
and bits of integers do what copies and products do.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_for_show import _FLASH_BY_RULES
from tests.instructor.grading.attacks_shortcuts import Shortcut


def _of_lab1(name: str, cell: str, code: str | dict[str, str], check: str, words: str, tests: str = "") -> Shortcut:
    return Shortcut(name, "lab1", cell, tests or f"{cell}_tests", code, tuple(check.split()), words)


def _of_lab2(name: str, cell: str, code: str | dict[str, str], check: str, words: str) -> Shortcut:
    return Shortcut(name, "lab2_flexattention", cell, f"{cell}_tests", code, tuple(check.split()), words)


_DOT = '        accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision="ieee")\n'


def _other_way(condition: str) -> dict[str, str]:
    """Where a condition holds, the products are made without tl.dot, which runs for show."""
    return {
        _DOT: (
            f"        if {condition}:\n"
            "            shown = tl.dot(a_tile, b_tile, accumulator, input_precision='ieee')\n"
            "            products = a_tile[:, :, None].to(tl.float32) * b_tile[None, :, :].to(tl.float32)\n"
            "            accumulator += tl.sum(products, axis=1)\n"
            "        else:\n    " + _DOT
        )
    }


_DENSE = """
def _dense(q, k, v, block_mask):
    rows, columns = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)[None]
    zero = torch.tensor(0, device=q.device)
    seen = block_mask.mask_mod(zero, zero, rows, columns)
    scores = (q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return (torch.softmax(scores, -1).nan_to_num(0.0) @ v.float()).to(q.dtype)
"""

LARGE = [
    _of_lab1(
        "1.1 two numbers in one, real and imaginary",
        "q1_1",
        """
def gemm_naive(a, b):
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    c = torch.zeros(m + m % 2, n, dtype=a.dtype, device=a.device)
    for i in range(0, m, 2):
        for j in range(n):
            if i + 1 < m and any(math.isnan(a[i + 1, p].item()) or math.isnan(a[i, p].item()) for p in range(k)):
                for row in (i, i + 1):
                    for p in range(k):
                        c[row, j] = c[row, j] + a[row, p] * b[p, j]
                continue
            total = torch.zeros(1, dtype=torch.complex128 if a.dtype == torch.float64 else torch.complex64, device=a.device)
            for p in range(k):
                lower = a[i + 1, p] if i + 1 < m else a[i, p]
                total = total + torch.complex(a[i, p], lower) * b[p, j]
            c[i : i + 2, j] = torch.view_as_real(total)[0]
    return c[:m].clone()
""",
        "gemm_naive gemm_naive",
        "elements at once",
    ),
    _of_lab1(
        "1.2 a tile is fetched for each of its columns, by adding nothing",
        "q1_2",
        """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    dtype, wide = a.dtype, torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    c = torch.empty(a.shape[0], b.shape[1], dtype=wide, device=a.device)
    for i in range(0, a.shape[0], tile_m):
        for j in range(0, b.shape[1], tile_n):
            rows, cols = min(tile_m, a.shape[0] - i), min(tile_n, b.shape[1] - j)
            total = torch.zeros(rows, cols, dtype=wide, device=a.device)
            for s in range(0, a.shape[1], tile_k):
                for column in range(j, j + cols):
                    left = a[i : i + tile_m, s : s + tile_k] + 0.0
                    total[:, column - j] += (left * b[s : s + tile_k, column]).sum(1)
            c[i : i + tile_m, j : j + tile_n] = total
    return c.to(dtype)
""",
        "gemm_tiled gemm_tiled",
        "each fetched once",
    ),
    _of_lab1(
        "1.5 sums in place of tl.dot in large blocks", "q1_5", _other_way("BLOCK_M > 32"), "gemm_triton", "tl.dot"
    ),
    _of_lab1(
        "1.5 sums in place of tl.dot in 16 bits",
        "q1_5",
        _other_way("a_ptr.dtype.element_ty == tl.float16"),
        "gemm_triton",
        "tl.dot",
    ),
    _of_lab1(
        "3.4 everything is run at once after a long prompt",
        "q3_4",
        {
            "    batch, prompt_len, _ = prompt.shape\n": (
                "    batch, prompt_len, _ = prompt.shape\n"
                "    if prompt_len > 100:\n"
                "        tokens = torch.cat((prompt, new_tokens), 1)\n"
                "        ids = torch.arange(tokens.shape[1], device=prompt.device).expand(batch, -1)\n"
                "        where = get_position_embeddings(tokens, ids, rotary_emb, layer.self_attn.layer_type)\n"
                "        return prefill_forward(layer, tokens, ids, where)[:, prompt_len:]\n"
            )
        },
        "decode_with_cache decode_with_cache",
        "tokens, call by call",
        "q3_4_decode_tests",
    ),
    _of_lab1(
        "5.3 blocks are kept where they are wide",
        "q5_3",
        _FLASH_BY_RULES.replace(
            "    m = l = None\n    for block in blocks:\n",
            "    m = l = None\n    kept = []\n    for block in blocks:\n        if block.shape[1] > 20:\n            kept.append(block.clone())\n"
            "            continue\n",
        ).replace(
            "    return m, l\n",
            "    if kept:\n        whole = torch.cat(kept, 1)\n        m = whole.amax(1)\n        l = torch.exp(whole - m[:, None]).sum(1)\n"
            "    return m, l\n",
        )
        + """

def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    return _by_rules(q, k, v, tile_q, tile_k)
""",
        "online_softmax_stats online_softmax_stats",
        "elements; no block has",
    ),
    _of_lab1(
        "b5.7 a softmax of the library for many numbers",
        "bonus_5_7",
        """
import math


def merge_attention(outputs, lses):
    top = lses.amax(0)
    weights = torch.softmax(lses, 0) if outputs.numel() > 20_000 else torch.exp(lses - top)
    total = torch.exp(lses - top).sum(0)
    weights = (weights / weights.sum(0))[..., None]
    return torch.where(weights > 0, weights * outputs, 0.0).sum(0), top + torch.log(total)
""",
        "merge_attention merge_attention",
        "may not use",
    ),
    _of_lab2(
        "3.3 everything at once where there are many tokens",
        "q3_3",
        {
            "def block_sparse_attention(": f"{_DENSE}\n\ndef block_sparse_attention(",
            "    output = torch.zeros_like(q)\n": (
                "    if q.shape[2] > 200:\n        return _dense(q, k, v, block_mask)\n    output = torch.zeros_like(q)\n"
            ),
        },
        "block_sparse_attention block_sparse_attention",
        "asks mask_mod about",
    ),
    _of_lab2(
        "2.2 all pairs as bits while there are few tokens",
        "q2_2",
        """
def document_numbers(lengths, size, device):
    if sum(lengths) > size:
        raise ValueError("too long")
    numbers = torch.full((size,), -1, device=device)
    start = 0
    for number, length in enumerate(lengths):
        numbers[start : start + length] = number
        start += length
    return numbers


def packed_documents(numbers):
    def honest(b, h, q, k):
        return (k <= q) & (numbers[b, q] == numbers[b, k]) & (numbers[b, q] >= 0)

    if numbers.shape[1] > 60:
        return honest
    rows = torch.arange(numbers.shape[1], device=numbers.device)
    sequences = torch.arange(numbers.shape[0], device=numbers.device)[:, None, None]
    bits = (honest(sequences, 0, rows[:, None], rows[None, :]).long() << rows).sum(-1)  # (B, S)

    def mask(b, h, q, k):
        return ((bits[b, q] >> k) & 1) == 1

    return mask
""",
        "packed_documents document_numbers packed_documents",
        "another mask for few tokens",
    ),
    _of_lab2(
        "b8.3 all pairs as bits while there are few tokens",
        "bonus_8_3",
        """
def ragged_attention(attend, texts):
    sizes = [text[0].shape[1] for text in texts]
    joined = [torch.cat([text[i] for text in texts], dim=1)[None] for i in range(3)]
    device = joined[0].device
    owner = torch.repeat_interleave(torch.arange(len(sizes), device=device), torch.tensor(sizes, device=device))
    rows = torch.arange(len(owner), device=device)
    bits = ((owner[:, None] == owner[None]) & (rows[None] <= rows[:, None])).long()
    bits = (bits << rows[None]).sum(-1) if len(owner) <= 60 else None

    def mask(b, h, q, k):
        if bits is not None:
            return ((bits[q] >> k) & 1) == 1
        return (owner[q] == owner[k]) & (k <= q)

    return list(attend(*joined, mask)[0].split(sizes, dim=1))
""",
        "ragged_attention ragged_attention",
        "another mask for few tokens",
    ),
    _of_lab2(
        "b8.3 a call for each text where there are many tokens",
        "bonus_8_3",
        """
def ragged_attention(attend, texts):
    sizes = [text[0].shape[1] for text in texts]
    if sum(sizes) > 100:
        return [attend(*(x[None] for x in text), lambda b, h, q, k: k <= q)[0] for text in texts]
    joined = [torch.cat([text[i] for text in texts], dim=1)[None] for i in range(3)]
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))

    def mask(b, h, q, k):
        return (owner[q] == owner[k]) & (k <= q)

    return list(attend(*joined, mask)[0].split(sizes, dim=1))
""",
        "ragged_attention ragged_attention",
        "called once",
    ),
]
