"""Answers to labs 1 and 2 that break one word of a question each, and were right to the checks until that word was measured."""

from __future__ import annotations

from tests.instructor.grading.attacks_shortcuts import Shortcut


def _lab1(name: str, cell: str, code: str | dict[str, str], check: str, words: str, tests: str = "") -> Shortcut:
    return Shortcut(name, "lab1", cell, tests or f"{cell}_tests", code, tuple(check.split()), words)


def _lab2(name: str, cell: str, code: str | dict[str, str], check: str, words: str) -> Shortcut:
    return Shortcut(name, "lab2_flexattention", cell, f"{cell}_tests", code, tuple(check.split()), words)


_STRIPS = """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    wide = torch.promote_types(a.dtype, torch.float32)
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    for i in range(0, a.shape[0], tile_m):
        for j in range(0, b.shape[1], tile_n):
            {rows}
            {columns}
            total = torch.zeros(rows.shape[0], columns.shape[1], dtype=wide, device=a.device)
            for start in range(0, a.shape[1], tile_k):
                for k in range(start, min(start + tile_k, a.shape[1])):
                    total += rows[:, k, None].to(wide) * columns[None, k, :].to(wide)
            c[i : i + tile_m, j : j + tile_n] = total
    return c
"""
_WAITS_ONCE = """
def kernels_per_step(fn):
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, schedule=default_schedule) as prof:
        for step in range(10):
            fn()
            if step == 9:
                synchronize()
            prof.step()
    return count_cuda_kernels(prof)["total"]
"""
_A_CALL_FOR_EACH_GROUP = """
def attention_bshd(q, k, v):
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if q.shape[1] == k.shape[1]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    parts = []
    for i, heads in enumerate(q.chunk(k.shape[1], dim=1)):
        keys, values = (x[:, i : i + 1].expand(heads.shape) for x in (k, v))
        parts.append(F.scaled_dot_product_attention(heads, keys, values, is_causal=True))
    return torch.cat(parts, dim=1).transpose(1, 2)
"""
_TABLE = """
def both(*mods):
    tables = {}

    def mask_mod(b, h, q, k):
        if not tables:
            axes = torch.arange(4), torch.arange(4), torch.arange(64), torch.arange(64)
            grid = torch.meshgrid(*axes, indexing="ij")
            tables[0] = functools.reduce(lambda x, y: x & y, (mod(*grid) for mod in mods))
        return tables[0][b, h, q, k]

    return mask_mod


def either(*mods):
    def mask_mod(b, h, q, k):
        return functools.reduce(lambda x, y: x | y, (mod(b, h, q, k) for mod in mods))

    return mask_mod
"""
_BY_NUMPY = """
def merge_attention(outputs, lses):
    o, l = outputs.numpy(), lses.numpy()
    top = l.max(0)
    weights = 2.718281828459045 ** (l - top)
    total = weights.sum(0)
    o = torch.from_numpy(o).nan_to_num(0.0)
    merged = (torch.from_numpy(weights / total)[..., None] * o).sum(0)
    return merged, torch.from_numpy(top) + torch.log(torch.from_numpy(total))
"""
_SCORES_NARROW = {
    "            scores = q_tile @ k[:, :, j : j + tile_k].float().transpose(-2, -1)\n": (
        "            scores = (q[:, :, i : i + tile_q] @ k[:, :, j : j + tile_k].transpose(-2, -1)).float() / math.sqrt(q.shape[-1])\n"
    )
}
_NARROW = {
    ".float().transpose(-2, -1)\n            hidden_keys": ".transpose(-2, -1)\n            hidden_keys",
    "q_tile = q[:, :, i : i + tile_q].float() / math": "q_tile = q[:, :, i : i + tile_q] / math",
    "p @ v[:, :, j : j + tile_k].float()": "p @ v[:, :, j : j + tile_k]",
}
_MASK_MADE_ONCE = {
    "            hidden_keys = positions[i : i + tile_q, None] < positions[None, j : j + tile_k]\n": (
        "            hidden_keys = hidden[i : i + tile_q, j : j + tile_k]\n"
    ),
    "    output = torch.empty_like(q)\n": (
        "    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)\n    output = torch.empty_like(q)\n"
    ),
}
_MASK_OF_PAIRS = {
    "    output = torch.zeros_like(q)\n": (
        "    output = torch.zeros_like(q)\n"
        "    visible = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)\n"
    ),
    "                tile = tile.masked_fill(~seen, -math.inf)\n": (
        "                visible[rows, columns] = seen\n"
        "                tile = tile.masked_fill(~visible[rows, columns], -math.inf)\n"
    ),
}
_BUILT = "        block_mask = create_block_mask(mask_mod, None, None, length, length, device=device, BLOCK_SIZE=block_size)\n"
_READ_FOR_SHOW = """
def at_positions(mask_mod, positions):
    starts = positions.tolist()

    def moved(b, h, q, k):
        start = 0 * positions[0]
        for number, value in enumerate(starts):
            start = start + value * (b == number)
        return mask_mod(b, h, q + start, k)

    return moved
"""

WORDS = [
    _lab1(
        "1.2 strips of all of K, walked in steps of tile_k",
        "q1_2",
        _STRIPS.format(rows="rows = a[i : i + tile_m].to(wide)", columns="columns = b[:, j : j + tile_n].to(wide)"),
        "gemm_tiled gemm_tiled",
        "not a strip",
    ),
    _lab1(
        "1.2 a strip of A put together from its tiles",
        "q1_2",
        _STRIPS.format(
            rows="rows = torch.cat([a[i : i + tile_m, k : k + tile_k] for k in range(0, a.shape[1], tile_k)], dim=1)",
            columns="columns = b[:, j : j + tile_n]",
        ),
        "gemm_tiled gemm_tiled",
        "not a strip",
    ),
    _lab1(
        "1.5 products in the precision of TF32",
        "q1_5",
        {', accumulator, input_precision="ieee")': ", accumulator)"},
        "gemm_triton",
        "ten bits",
    ),
    _lab1(
        "b5.8 scores in the precision of TF32",
        "bonus_5_8",
        {'tl.trans(k_tile), input_precision="ieee")': "tl.trans(k_tile))"},
        "flash_triton",
        "ten bits",
    ),
    _lab1(
        "3.4 a cache for three times as many tokens",
        "q3_4",
        {"prompt_len + new_tokens.shape[1])": "3 * (prompt_len + new_tokens.shape[1]))"},
        "decode_with_cache decode_with_cache",
        "How many tokens must the cache hold",
        "q3_4_decode_tests",
    ),
    _lab1(
        "3.4 the new tokens are cleared on the way",
        "q3_4",
        {"        outputs.append(output)\n": "        outputs.append(output)\n        token.zero_()\n"},
        "decode_with_cache decode_with_cache",
        "changed one of its inputs",
        "q3_4_decode_tests",
    ),
    _lab1(
        "4.3 one wait, after the last step",
        "q4_3",
        _WAITS_ONCE,
        "kernels_per_step kernels_per_step",
        "waits for the device",
    ),
    _lab1(
        "5.3 scores in the dtype of the inputs",
        "q5_3",
        _SCORES_NARROW,
        "flash_attention_tiled flash_attention_tiled",
        "of the results are not the exact ones rounded",
        "q5_3_flash_tests",
    ),
    _lab1(
        "b5.6 everything in the dtype of the inputs",
        "bonus_5_6",
        _NARROW,
        "flash_attention_causal flash_attention_causal",
        "in bfloat16",
    ),
    _lab1(
        "b5.6 a mask of all pairs that nothing computes",
        "bonus_5_6",
        _MASK_MADE_ONCE,
        "flash_attention_causal flash_attention_causal",
        "a mask neither",
    ),
    _lab1(
        "5.2 a call for each group of heads",
        "q5_2",
        _A_CALL_FOR_EACH_GROUP,
        "attention_bshd attention_bshd",
        "calls SDPA",
    ),
    _lab1("b5.7 weights by NumPy", "bonus_5_7", _BY_NUMPY, "merge_attention merge_attention", "out of torch"),
    _lab2(
        "2.3 a table of all pairs, filled when it is first asked",
        "q2_3",
        "import functools\n" + _TABLE,
        "compositions both either",
        "no tensor of pairs",
    ),
    _lab2(
        "3.3 the mask of all pairs is kept",
        "q3_3",
        _MASK_OF_PAIRS,
        "block_sparse_attention block_sparse_attention",
        "a mask neither",
    ),
    _lab2(
        "5.1 the block mask is built twice",
        "q5_1",
        {_BUILT: _BUILT + _BUILT},
        "prepare_flex prepare_flex",
        "build it once",
    ),
    _lab2(
        "5.1 a block mask of twice the length",
        "q5_1",
        {"None, None, length, length,": "None, None, 2 * length, 2 * length,"},
        "prepare_flex prepare_flex",
        "length is",
    ),
    _lab2(
        "5.1 queries doubled, keys halved",
        "q5_1",
        {"return attention(q, k, v,": "return attention(2 * q, k / 2, v,"},
        "prepare_flex prepare_flex",
        "as they are",
    ),
    _lab2(
        "b8.1 positions are constants, the tensor is read for show",
        "bonus_8_1",
        _READ_FOR_SHOW,
        "at_positions at_positions",
        "became constants",
    ),
]
