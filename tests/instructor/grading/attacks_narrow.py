"""Answers to labs 1 and 2 that were tried before a fourth blind round: right values, each breaks a word, and the checks accepted all of them.

`NARROWED` are refused in words by a hidden check, or wait by it. `BY_TEXT` wait by their text alone: what they do is in no record that a check
can see, or behind a size that no check draws.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_for_show import _BYTES, _FLASH_BY_RULES, _TILED
from tests.instructor.grading.attacks_large_inputs import _DENSE
from tests.instructor.grading.attacks_shortcuts import Shortcut


def _lab1(name: str, cell: str, code: str | dict[str, str], check: str, words: str, tests: str = "") -> Shortcut:
    return Shortcut(name, "lab1", cell, tests or f"{cell}_tests", code, tuple(check.split()), words)


def _lab2(name: str, cell: str, code: str | dict[str, str], check: str, words: str) -> Shortcut:
    return Shortcut(name, "lab2_flexattention", cell, f"{cell}_tests", code, tuple(check.split()), words)


_ROUNDED_WEIGHTS = _FLASH_BY_RULES.replace(
    "weights @ v[:, :, j : j + tile_k].float()", "(weights.to(v.dtype) @ v[:, :, j : j + tile_k]).float()"
)

NARROWED = [
    _lab1(
        "1.2 steps along K of a whole tile product",
        "q1_2",
        """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    wide = torch.promote_types(a.dtype, torch.float32)
    (m, inner), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    for i in range(0, m, tile_m):
        for j in range(0, n, tile_n):
            rows, cols = min(tile_m, m - i), min(tile_n, n - j)
            total = torch.zeros(rows, cols, dtype=wide, device=a.device)
            step = max(1, tile_m * tile_n * tile_k // (rows * cols))
            for s in range(0, inner, step):
                x, y = a[i : i + tile_m, s : s + step].to(wide), b[s : s + step, j : j + tile_n].to(wide)
                total += (x[:, :, None] * y[None]).sum(1)
            c[i : i + tile_m, j : j + tile_n] = total
    return c
""",
        "gemm_tiled gemm_tiled",
        "works along",
    ),
    _lab1(
        "4.1 the first four calls outside of the profiler",
        "q4_1",
        """
def profile_steps(fn, trace_path):
    for _ in range(4):
        fn()
        synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, schedule=torch.profiler.schedule(wait=0, warmup=0, active=6, repeat=1)) as prof:
        for _ in range(6):
            fn()
            synchronize()
            prof.step()
    prof.export_chrome_trace(trace_path)
    return prof
""",
        "profile_steps profile_steps",
        "all ten calls",
    ),
    _lab1(
        "4.2 looked up between values of a table by index",
        "q4_2",
        """
def gelu_by_hand(x):
    wide = x.double()
    grid = torch.linspace(-9.0, 9.0, 180_001, dtype=torch.float64, device=x.device)
    table = 0.5 * grid * (1 + torch.tanh(math.sqrt(2 / math.pi) * (grid + 0.044715 * grid**3)))
    at = ((wide.clamp(-8.99, 8.99).nan_to_num() + 9.0) * 10_000).clamp(0, 179_999)
    low = at.long()
    part = at - low
    y = table[low] + part * (table[low + 1] - table[low])
    y = torch.where(wide > 8.9, wide, torch.where(wide < -8.9, 0.0, y))
    return torch.where(wide.isnan(), wide, y).to(x.dtype)
"""
        + _BYTES,
        "gelu_by_hand gelu_by_hand",
        "computes on",
    ),
    _lab1(
        "4.2 rows one by one",
        "q4_2",
        """
def gelu_by_hand(x):
    rows = [0.5 * r * (1 + torch.tanh(math.sqrt(2 / math.pi) * (r + 0.044715 * r * r * r))) for r in x]
    return torch.stack(rows)
"""
        + _BYTES,
        "gelu_by_hand gelu_by_hand",
        "computes on",
    ),
    _lab1(
        "5.3 each block is worked on when the next one has come",
        "q5_3",
        _FLASH_BY_RULES.split("def online")[0]
        + """
def online_softmax_stats(blocks):
    m = l = kept = None

    def take(block, ahead=None):
        nonlocal m, l
        largest = block.amax(1)
        if ahead is not None:
            largest = torch.maximum(largest, ahead.amax(1))
        new = largest if m is None else torch.maximum(m, largest)
        now = torch.exp(block.sub_(new[:, None])).sum(1)
        l = now if m is None else l * torch.exp(m - new) + now
        m = new

    for block in blocks:
        if kept is not None:
            take(kept, block)
        kept = block.clone()
    take(kept)
    return m, l
"""
        + _FLASH_BY_RULES[_FLASH_BY_RULES.index("def _by_rules") :]
        + """

def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    return _by_rules(q, k, v, tile_q, tile_k)
""",
        "online_softmax_stats online_softmax_stats",
        "from one block to the next",
    ),
    _lab1(
        "5.3 the scores of a tile wait for those of the next",
        "q5_3",
        _FLASH_BY_RULES
        + """

def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    out = torch.empty_like(q)
    for i in range(0, q.shape[2], tile_q):
        mine = q[:, :, i : i + tile_q].float() / math.sqrt(q.shape[-1])
        m = torch.full(mine.shape[:3], -math.inf, device=q.device)
        l = torch.zeros(mine.shape[:3], device=q.device)
        total = torch.zeros(mine.shape, device=q.device)
        kept = None
        for j in (*range(0, k.shape[2], tile_k), None):
            scores = None if j is None else mine @ k[:, :, j : j + tile_k].float().transpose(-2, -1)
            if kept is not None:
                old, at = kept
                largest = torch.maximum(m, old.amax(-1))
                weights = torch.exp(old - largest[..., None])
                factor = torch.exp(m - largest)
                l = factor * l + weights.sum(-1)
                total = factor[..., None] * total + weights @ v[:, :, at : at + tile_k].float()
                m = largest
            kept = scores, j
        out[:, :, i : i + tile_q] = (total / l[..., None]).to(q.dtype)
    return out
""",
        "flash_attention_tiled flash_attention_tiled",
        "needs the scores",
        "q5_3_flash_tests",
    ),
    _lab2(
        "b8.1 constants by where, as real numbers",
        "bonus_8_1",
        """
def at_positions(mask_mod, positions):
    starts = [float(x) for x in positions.tolist()]

    def moved(b, h, q, k):
        start = 0.0 * positions[0]
        for number, value in enumerate(starts):
            start = torch.where(b == number, value, start)
        return mask_mod(b, h, q + start, k)

    return moved
""",
        "at_positions at_positions",
        "became constants",
    ),
    _lab2(
        "b8.1 constants, a tensor of one number each",
        "bonus_8_1",
        """
def at_positions(mask_mod, positions):
    starts = positions.tolist()

    def moved(b, h, q, k):
        start = 0 * positions[0]
        for number, value in enumerate(starts):
            start = torch.where(b == number, torch.tensor(value), start)
        return mask_mod(b, h, q + start, k)

    return moved
""",
        "at_positions at_positions",
        "makes a tensor of a Python number",
    ),
    _lab2(
        "5.1 the mask becomes bits of numbers",
        "q5_1",
        """
def prepare_flex(attention, mask_mod, score_mod, length, device, block_size=128):
    block_mask = None
    if mask_mod is not None:
        index, zero = torch.arange(length, device=device), torch.tensor(0, device=device)
        ask = torch.vmap(torch.vmap(mask_mod, in_dims=(None, None, None, 0)), in_dims=(None, None, 0, None))
        table = ask(zero, zero, index, index).long()
        powers = 2 ** (index % 32)
        words = [(table[:, i : i + 32] * powers[i : i + 32]).sum(1) for i in range(0, length, 32)]

        def in_bits(b, h, q, k):
            word = words[0][q]
            for number in range(1, len(words)):
                word = torch.where(k // 32 == number, words[number][q], word)
            return word // powers[k] % 2 == 1

        block_mask = create_block_mask(in_bits, None, None, length, length, device=device, BLOCK_SIZE=block_size)

    def attend(q, k, v):
        return attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=k.shape[1] < q.shape[1])

    return attend
""",
        "prepare_flex prepare_flex",
        "a tensor of pairs, in pieces",
    ),
    _lab2(
        "6.1 a constant in the larger buckets",
        "q6_1",
        """
def bucketed_attention(attend, q, k, v, buckets):
    tokens = q.shape[2]
    fits = [bucket for bucket in buckets if bucket >= tokens]
    if not fits:
        raise ValueError("too long")
    padding = (0, 0, 0, min(fits) - tokens)
    end = torch.tensor(tokens, device=q.device) if min(fits) == min(buckets) else tokens

    def mask_mod(b, h, q, k):
        return k < end

    return attend(F.pad(q, padding), F.pad(k, padding), F.pad(v, padding), mask_mod)[:, :, :tokens]
""",
        "buckets bucketed_attention",
        "kernels",
    ),
    _lab2(
        "3.3 a row of scores waits for the next",
        "q3_3",
        """
def block_sparse_attention(q, k, v, block_mask):
    size_q, size_k = block_mask.BLOCK_SIZE
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    output = torch.zeros_like(q)

    def finish(rows, scores, visited):
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
        values = torch.cat([v[:, :, j * size_k : (j + 1) * size_k].float() for j in visited], 2)
        output[:, :, rows] = (weights @ values).to(q.dtype)

    kept = None
    for i in range(q.shape[2] // size_q):
        rows = slice(i * size_q, (i + 1) * size_q)
        partial = block_mask.kv_indices[0, 0, i, : int(block_mask.kv_num_blocks[0, 0, i])].tolist()
        full = block_mask.full_kv_indices[0, 0, i, : int(block_mask.full_kv_num_blocks[0, 0, i])].tolist()
        scores = []
        for j in partial + full:
            tile = q[:, :, rows].float() @ k[:, :, j * size_k : (j + 1) * size_k].float().mT / math.sqrt(q.shape[-1])
            if j in partial:
                queries = torch.arange(rows.start, rows.stop, device=q.device)
                keys = torch.arange(j * size_k, (j + 1) * size_k, device=q.device)
                tile = tile.masked_fill(~block_mask.mask_mod(zero, zero, queries[:, None], keys[None, :]), -math.inf)
            scores.append(tile)
        if kept:
            finish(*kept)
        kept = (rows, torch.cat(scores, -1), partial + full) if scores else None
    if kept:
        finish(*kept)
    return output
""",
        "block_sparse_attention block_sparse_attention",
        "next",
    ),
    _lab1(
        "1.2 the sum is rounded once on its way",
        "q1_2",
        """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    wide = torch.promote_types(a.dtype, torch.float32)
    (m, inner), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    for i in range(0, m, tile_m):
        for j in range(0, n, tile_n):
            rows, cols = min(tile_m, m - i), min(tile_n, n - j)
            total = torch.zeros(rows, cols, dtype=wide, device=a.device)
            steps = range(0, inner, tile_k)
            for number, s in enumerate(steps):
                if number == len(steps) // 2:
                    total = total.to(a.dtype).to(wide)
                x, y = a[i : i + tile_m, s : s + tile_k].to(wide), b[s : s + tile_k, j : j + tile_n].to(wide)
                total += (x[:, :, None] * y[None]).sum(1)
            c[i : i + tile_m, j : j + tile_n] = total
    return c
""",
        "gemm_tiled gemm_tiled",
        "rounds",
    ),
    _lab1(
        "5.3 weights and values multiplied in 16 bits",
        "q5_3",
        _ROUNDED_WEIGHTS
        + """

def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    return _by_rules(q, k, v, tile_q, tile_k)
""",
        "flash_attention_tiled flash_attention_tiled",
        "in 16 bits",
        "q5_3_flash_tests",
    ),
    _lab1(
        "b5.6 weights and values multiplied in 16 bits",
        "bonus_5_6",
        _ROUNDED_WEIGHTS
        + """

def flash_attention_causal(q, k, v, tile_q=64, tile_k=64):
    return _by_rules(q, k, v, tile_q, tile_k, causal=True)
""",
        "flash_attention_causal flash_attention_causal",
        "in 16 bits",
    ),
    _lab2(
        "3.3 weights and values multiplied in 16 bits",
        "q3_3",
        {
            "output[:, :, rows] = (weights @ torch.cat(values, dim=2)).to(q.dtype)": "output[:, :, rows] = weights.to(q.dtype) @ torch.cat(values, dim=2).to(q.dtype)"
        },
        "block_sparse_attention block_sparse_attention",
        "16",
    ),
    _lab1(
        "1.1 Winograd's products of sums",
        "q1_1",
        """
def gemm_naive(a, b):
    (m, inner), n = a.shape, b.shape[1]
    c = torch.zeros(m, n, dtype=a.dtype, device=a.device)
    half = inner // 2
    for i in range(m):
        for j in range(n):
            total = 0.0
            for p in range(half):
                x, y = a[i, 2 * p].item(), a[i, 2 * p + 1].item()
                u, w = b[2 * p, j].item(), b[2 * p + 1, j].item()
                total += (x + w) * (y + u) - x * y - u * w
            if inner - 2 * half:
                total += a[i, inner - 1].item() * b[inner - 1, j].item()
            c[i, j] = total
    return c
""",
        "gemm_naive gemm_naive",
        "with large and small",
    ),
    _lab1(
        "1.2 Winograd's products of sums, tile by tile",
        "q1_2",
        """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    wide = torch.promote_types(a.dtype, torch.float32)
    (m, inner), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    for i in range(0, m, tile_m):
        for j in range(0, n, tile_n):
            rows, cols = min(tile_m, m - i), min(tile_n, n - j)
            total = torch.zeros(rows, cols, dtype=wide, device=a.device)
            for s in range(0, inner, tile_k):
                x, y = a[i : i + tile_m, s : s + tile_k].to(wide), b[s : s + tile_k, j : j + tile_n].to(wide)
                width = x.shape[1]
                for p in range(0, width - 1, 2):
                    total += (x[:, p, None] + y[p + 1]) * (x[:, p + 1, None] + y[p])
                    total -= (x[:, p] * x[:, p + 1])[:, None] + y[p] * y[p + 1]
                if width % 2:
                    total += x[:, -1:] * y[-1:]
            c[i : i + tile_m, j : j + tile_n] = total
    return c
""",
        "gemm_tiled gemm_tiled",
        "with large and small",
    ),
    _lab1(
        "5.3 tiles of queries and of keys change places",
        "q5_3",
        _FLASH_BY_RULES
        + """

def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    return _by_rules(q, k, v, tile_k, tile_q)
""",
        "flash_attention_tiled flash_attention_tiled",
        "queries and keys in",
        "q5_3_flash_tests",
    ),
    _lab1(
        "1.2 all at once in float16",
        "q1_2",
        _TILED
        + """

def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    if a.dtype == torch.float16:
        return (a[:, :, None].float() * b[None].float()).sum(1).to(a.dtype)
    return _by_rules(a, b, tile_m, tile_n, tile_k)
""",
        "gemm_tiled gemm_tiled",
        "elements at once",
    ),
    _lab1(
        "5.3 whole rows in float16",
        "q5_3",
        _FLASH_BY_RULES
        + """

def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    return _by_rules(q, k, v, tile_q, k.shape[2] if q.dtype == torch.float16 else tile_k)
""",
        "flash_attention_tiled flash_attention_tiled",
        "scores at once",
        "q5_3_flash_tests",
    ),
]

BY_TEXT = [
    _lab1(
        "1.1 the whole row at once where there are many",
        "q1_1",
        """
def gemm_naive(a, b):
    c = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    if a.shape[1] > 500:
        return (a[:, :, None] * b[None]).sum(1)
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            for k in range(a.shape[1]):
                c[i, j] += a[i, k] * b[k, j]
    return c
""",
        "gemm_naive gemm_naive",
        "a.shape[1] > 500",
    ),
    _lab1(
        "1.5 sums in place of tl.dot in many columns",
        "q1_5",
        {
            '        accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision="ieee")\n': (
                "        if K > 1000:\n"
                "            accumulator += tl.sum(a_tile[:, :, None].to(tl.float32) * b_tile[None, :, :].to(tl.float32), axis=1)\n"
                '        else:\n            accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision="ieee")\n'
            )
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
    _lab1(
        "5.3 whole rows where there are many tokens",
        "q5_3",
        _FLASH_BY_RULES
        + """

def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    many = q.size(2) * k.size(2)
    if many >= 4_000_000:
        tile_k = k.size(2)
    return _by_rules(q, k, v, tile_q, tile_k)
""",
        "flash_attention_tiled flash_attention_tiled",
        "many >= 4000000",
        "q5_3_flash_tests",
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
    def mask(b, h, q, k):
        return (k <= q) & (numbers[b, q] == numbers[b, k]) & (numbers[b, q] >= 0)

    if numbers.shape[1] > 4096:
        rows = torch.arange(numbers.shape[1], device=numbers.device)
        table = mask(torch.arange(len(numbers), device=numbers.device)[:, None, None], 0, rows[:, None], rows)
        return lambda b, h, q, k: table[b, q, k]
    return mask
""",
        "packed_documents document_numbers packed_documents",
        "numbers.shape[1] > 4096",
    ),
    _lab2(
        "3.2 documents one by one while there are few",
        "q3_2",
        """
def block_flops(counts, block, batch, heads, head_dim):
    return 4 * head_dim * batch * heads * (counts[0] + counts[1]) * block**2


def promised_speedup(counts):
    return sum(counts) / (counts[0] + counts[1])


def document_blocks(length, span, block):
    if length <= 2**20:
        rows = 0
        for start in range(0, length, max(span, block)):
            rows += max(1, span // block) ** 2
        return rows
    return length // block * max(1, span // block)
""",
        "promises block_flops promised_speedup document_blocks",
        "a loop",
    ),
]
