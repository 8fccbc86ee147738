"""Answers to labs 1 and 2 that were tried before a fourth blind round: right values, each breaks a word, and the checks accepted all of them.

`NARROWED` are refused in words by a hidden check, or wait by it. `BY_TEXT` wait by their text alone: what they do is in no record that a check
can see, or behind a size that no check draws. Most are the model answer with a few lines changed: {text of the model answer: what
stands there instead}.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_large_inputs import _DENSE, _DOT
from tests.instructor.grading.attacks_shortcuts import Shortcut


def _lab1(name: str, cell: str, code: str | dict[str, str], check: str, words: str, tests: str = "") -> Shortcut:
    return Shortcut(name, "lab1", cell, tests or f"{cell}_tests", code, tuple(check.split()), words)


def _lab2(name: str, cell: str, code: dict[str, str], check: str, words: str) -> Shortcut:
    return Shortcut(name, "lab2_flexattention", cell, f"{cell}_tests", code, tuple(check.split()), words)


def _gemm(name: str, code: dict[str, str], words: str) -> Shortcut:
    return _lab1(f"1.2 {name}", "q1_2", code, "gemm_tiled gemm_tiled", words)


def _gelu(name: str, lines: str) -> Shortcut:
    return _lab1(f"4.2 {name}", "q4_2", {_TANH: lines}, "gelu_by_hand gelu_by_hand", "computes on")


def _flash(name: str, code: dict[str, str], words: str) -> Shortcut:
    check = "flash_attention_tiled flash_attention_tiled"
    return _lab1(f"5.3 {name}", "q5_3", code, check, words, "q5_3_flash_tests")


# Lines of the model answers.
_SUM = "                total += a[i, k].item() * b[k, j].item()\n"  # 1.1
_STEPS = "            for k in range(0, k_size, tile_k):\n"  # 1.2
_PRODUCT = """                for step in range(a_tile.shape[1]):
                    accumulator += a_tile[:, step, None] * b_tile[step, None, :]
"""
_TANH = """    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + torch.tanh(inner))
"""  # 4.2
_OUTPUT = "    output = torch.empty_like(q)\n"  # 5.3
_PV = "p @ v[:, :, j : j + tile_k].float()"
_NARROW_PV = "(p.to(v.dtype) @ v[:, :, j : j + tile_k]).float()"
_MOVED = "    def moved("  # 8.1 of lab 2

NARROWED = [
    _gemm(
        "steps along K of a whole tile product",
        {
            _STEPS: f"            width = max(1, tile_m * tile_n * tile_k // accumulator.numel())\n{_STEPS}".replace(
                ", tile_k)", ", width)"
            ),
            "k : k + tile_k]\n": "k : k + width].float()\n",
            "b[k : k + tile_k, cols]": "b[k : k + width, cols].float()",
            _PRODUCT: "                accumulator += (a_tile[:, :, None] * b_tile[None]).sum(1)\n",
        },
        "works along",
    ),
    _lab1(
        "4.1 the first four calls outside of the profiler",
        "q4_1",
        {
            "    activities = [": "    for _ in range(4):\n        fn()\n        synchronize()\n    activities = [",
            "schedule=default_schedule": "schedule=torch.profiler.schedule(wait=0, warmup=0, active=6, repeat=1)",
            "range(10)": "range(6)",
        },
        "profile_steps profile_steps",
        "all ten calls",
    ),
    _gelu(
        "looked up between values of a table by index",
        """    wide = x.double()
    grid = torch.linspace(-9.0, 9.0, 180_001, dtype=torch.float64, device=x.device)
    table = 0.5 * grid * (1 + torch.tanh(math.sqrt(2 / math.pi) * (grid + 0.044715 * grid**3)))
    at = ((wide.clamp(-8.99, 8.99).nan_to_num() + 9.0) * 10_000).clamp(0, 179_999)
    low = at.long()
    part = at - low
    y = table[low] + part * (table[low + 1] - table[low])
    y = torch.where(wide > 8.9, wide, torch.where(wide < -8.9, 0.0, y))
    return torch.where(wide.isnan(), wide, y).to(x.dtype)
""",
    ),
    _gelu(
        "rows one by one",
        """    rows = [0.5 * r * (1 + torch.tanh(math.sqrt(2 / math.pi) * (r + 0.044715 * r * r * r))) for r in x]
    return torch.stack(rows)
""",
    ),
    _lab1(
        "5.3 each block is worked on when the next one has come",
        "q5_3",
        {
            "def online_softmax_stats(": "import itertools\n\n\ndef online_softmax_stats(",
            "    for block in blocks:\n": """    kept = None
    for ahead in itertools.chain(blocks, [None]):
        kept, block = None if ahead is None else ahead.clone(), kept
        if block is None:
            continue
""",
            "        new_m = torch.maximum(m, block.amax(dim=1))\n": """        new_m = torch.maximum(m, block.amax(dim=1))
        if ahead is not None:
            new_m = torch.maximum(new_m, ahead.amax(dim=1))
""",
            "torch.exp(block - new_m[:, None])": "torch.exp(block.sub_(new_m[:, None]))",
        },
        "online_softmax_stats online_softmax_stats",
        "from one block to the next",
    ),
    _flash(
        "the scores of a tile wait for those of the next",
        {
            "        for j in range(0, k.shape[2], tile_k):\n": """        kept = None
        for j in (*range(0, k.shape[2], tile_k), None):
""",
            "            scores = q_tile @ k[:, :, j : j + tile_k].float().transpose(-2, -1)\n": """            ready = kept
            kept = j if j is None else (q_tile @ k[:, :, j : j + tile_k].float().transpose(-2, -1), j)
            if ready is None:
                continue
            scores, at = ready
""",
            _PV: _PV.replace("j", "at"),
        },
        "needs the scores",
    ),
    _lab2(
        "b8.1 constants by where, as real numbers",
        "bonus_8_1",
        {
            _MOVED: f"    starts = [float(x) for x in positions.tolist()]\n\n{_MOVED}",
            "        return mask_mod(b, h, q + positions[b], k)": """        start = 0.0 * positions[0]
        for number, value in enumerate(starts):
            start = torch.where(b == number, value, start)
        return mask_mod(b, h, q + start, k)""",
        },
        "at_positions at_positions",
        "became constants",
    ),
    _lab2(
        "b8.1 constants, a tensor of one number each",
        "bonus_8_1",
        {
            _MOVED: f"    starts = positions.tolist()\n\n{_MOVED}",
            "        return mask_mod(b, h, q + positions[b], k)": """        start = 0 * positions[0]
        for number, value in enumerate(starts):
            start = torch.where(b == number, torch.tensor(value), start)
        return mask_mod(b, h, q + start, k)""",
        },
        "at_positions at_positions",
        "makes a tensor of a Python number",
    ),
    _lab2(
        "5.1 the mask becomes bits of numbers",
        "q5_1",
        {
            "        block_mask = create_block_mask(mask_mod,": """        index, zero = torch.arange(length, device=device), torch.tensor(0, device=device)
        ask = torch.vmap(torch.vmap(mask_mod, in_dims=(None, None, None, 0)), in_dims=(None, None, 0, None))
        table = ask(zero, zero, index, index).long()
        powers = 2 ** (index % 32)
        words = [(table[:, i : i + 32] * powers[i : i + 32]).sum(1) for i in range(0, length, 32)]

        def in_bits(b, h, q, k):
            word = words[0][q]
            for number in range(1, len(words)):
                word = torch.where(k // 32 == number, words[number][q], word)
            return word // powers[k] % 2 == 1

        block_mask = create_block_mask(in_bits,"""
        },
        "prepare_flex prepare_flex",
        "a tensor of pairs, in pieces",
    ),
    _lab2(
        "6.1 a constant in the larger buckets",
        "q6_1",
        {
            "    end = torch.tensor(tokens, device=q.device)\n": """    smallest = min(large_enough) == min(buckets)
    end = torch.tensor(tokens, device=q.device) if smallest else tokens
"""
        },
        "buckets bucketed_attention",
        "kernels",
    ),
    _lab2(
        "3.3 a row of scores waits for the next",
        "q3_3",
        {
            "    for i in range(q.shape[2] // size_q):\n": """
    def finish(rows, scores, values):
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
        output[:, :, rows] = (weights @ torch.cat(values, dim=2)).to(q.dtype)

    kept = None
    for i in range(q.shape[2] // size_q):
""",
            """        if scores:
            weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1).nan_to_num(0.0)
            output[:, :, rows] = (weights @ torch.cat(values, dim=2)).to(q.dtype)
""": """        if kept:
            finish(*kept)
        kept = (rows, torch.cat(scores, dim=-1), values) if scores else None
    if kept:
        finish(*kept)
""",
        },
        "block_sparse_attention block_sparse_attention",
        "next",
    ),
    _gemm(
        "the sum is rounded once on its way",
        {
            _STEPS: f"""            middle = -(-k_size // tile_k) // 2 * tile_k
{_STEPS}                if k == middle:
                    accumulator = accumulator.to(a.dtype).float()
"""
        },
        "rounds",
    ),
    _flash(
        "weights and values multiplied in 16 bits", {_PV: _NARROW_PV}, "of the results are not the exact ones rounded"
    ),
    _lab1(
        "b5.6 weights and values multiplied in 16 bits",
        "bonus_5_6",
        {_PV: _NARROW_PV},
        "flash_attention_causal flash_attention_causal",
        "of the results are not the exact ones rounded",
    ),
    _lab2(
        "3.3 weights and values multiplied in 16 bits",
        "q3_3",
        {
            "(weights @ torch.cat(values, dim=2)).to(q.dtype)": "weights.to(q.dtype) @ torch.cat(values, dim=2).to(q.dtype)"
        },
        "block_sparse_attention block_sparse_attention",
        "of the results are not the exact ones rounded",
    ),
    _lab1(
        "1.1 Winograd's products of sums",
        "q1_1",
        {
            f"            for k in range(k_size):\n{_SUM}": """            for k in range(0, k_size - 1, 2):
                x, y = a[i, k].item(), a[i, k + 1].item()
                u, w = b[k, j].item(), b[k + 1, j].item()
                total += (x + w) * (y + u) - x * y - u * w
            if k_size % 2:
                total += a[i, k_size - 1].item() * b[k_size - 1, j].item()
"""
        },
        "gemm_naive gemm_naive",
        "with large and small",
    ),
    _gemm(
        "Winograd's products of sums, tile by tile",
        {
            _PRODUCT: """                x, y = a_tile.float(), b_tile.float()
                for p in range(0, x.shape[1] - 1, 2):
                    accumulator += (x[:, p, None] + y[p + 1]) * (x[:, p + 1, None] + y[p])
                    accumulator -= (x[:, p] * x[:, p + 1])[:, None] + y[p] * y[p + 1]
                if x.shape[1] % 2:
                    accumulator += x[:, -1:] * y[-1:]
"""
        },
        "with large and small",
    ),
    _flash(
        "tiles of queries and of keys change places",
        {_OUTPUT: f"    tile_q, tile_k = tile_k, tile_q\n{_OUTPUT}"},
        "queries and keys in",
    ),
    _gemm(
        "all at once in float16",
        {
            "    n_size = b.shape[1]\n": """    n_size = b.shape[1]
    if a.dtype == torch.float16:
        return (a[:, :, None].float() * b[None].float()).sum(1).to(a.dtype)
"""
        },
        "elements at once",
    ),
    _flash(
        "whole rows in float16",
        {_OUTPUT: f"    if q.dtype == torch.float16:\n        tile_k = k.shape[2]\n{_OUTPUT}"},
        "scores at once",
    ),
]

BY_TEXT = [
    _lab1(
        "1.1 the whole row at once where there are many",
        "q1_1",
        {
            "    n_size = b.shape[1]\n": """    n_size = b.shape[1]
    if a.shape[1] > 500:
        return (a[:, :, None] * b[None]).sum(1)
"""
        },
        "gemm_naive gemm_naive",
        "a.shape[1] > 500",
    ),
    _lab1(
        "1.5 sums in place of tl.dot in many columns",
        "q1_5",
        {
            _DOT: f"""        if K > 1000:
            accumulator += tl.sum(a_tile[:, :, None].to(tl.float32) * b_tile[None, :, :].to(tl.float32), axis=1)
        else:
    {_DOT}"""
        },
        "gemm_triton",
        "K > 1000",
    ),
    _lab1(
        "3.4 everything is run at once after a prompt of thousands",
        "q3_4",
        {
            "    batch, prompt_len, _ = prompt.shape\n": (
                "    batch, prompt_len, _ = prompt.shape\n"
                "    if prompt_len > 1000:\n"
                "        tokens = torch.cat((prompt, new_tokens), 1)\n"
                "        ids = torch.arange(tokens.shape[1], device=prompt.device).expand(batch, -1)\n"
                "        where = get_position_embeddings(tokens, ids, rotary_emb, layer.self_attn.layer_type)\n"
                "        return prefill_forward(layer, tokens, ids, where)[:, prompt_len:]\n"
            )
        },
        "decode_with_cache decode_with_cache",
        "prompt_len > 1000",
        "q3_4_decode_tests",
    ),
    _flash(
        "whole rows where there are many tokens",
        {
            _OUTPUT: f"""    many = q.size(2) * k.size(2)
    if many >= 4_000_000:
        tile_k = k.size(2)
{_OUTPUT}"""
        },
        "many >= 4000000",
    ),
    _lab2(
        "3.3 everything at once where there are thousands of tokens",
        "q3_3",
        {
            "def block_sparse_attention(": f"{_DENSE}\n\ndef block_sparse_attention(",
            "    output = torch.zeros_like(q)\n": (
                "    if len(q[0, 0]) > 2000:\n        return _dense(q, k, v, block_mask)\n    output = torch.zeros_like(q)\n"
            ),
        },
        "block_sparse_attention block_sparse_attention",
        "len(q[0, 0]) > 2000",
    ),
    _lab2(
        "2.2 all pairs in a table unless there are thousands of tokens",
        "q2_2",
        {
            "    return mask_mod": """    if numbers.shape[1] > 4096:
        rows = torch.arange(numbers.shape[1], device=numbers.device)
        table = mask_mod(torch.arange(len(numbers), device=numbers.device)[:, None, None], 0, rows[:, None], rows)
        return lambda b, h, q, k: table[b, q, k]
    return mask_mod"""
        },
        "packed_documents document_numbers packed_documents",
        "numbers.shape[1] > 4096",
    ),
    _lab2(
        "3.2 documents one by one while there are few",
        "q3_2",
        {
            "    return length // block * max(1, span // block)": """    if length <= 2**20:
        rows = 0
        for start in range(0, length, max(span, block)):
            rows += max(1, span // block) ** 2
        return rows
    return length // block * max(1, span // block)"""
        },
        "promises block_flops promised_speedup document_blocks",
        "a loop",
    ),
]
