"""Shortcuts of a fourth and a fifth cold round, six a lab each, without the answers that break no word of their questions.

They compute the right values by a way that makes a question's point void: work that nobody needs, one step after the other,
numbers that leave torch, a tool that is called for show. A `check` says which hidden check refuses an answer; the others are
refused by the visible one, or wait.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_shortcuts import Shortcut

_REFUSED: dict[str, tuple[str, str, str]] = {  # name: check, the answers that it takes, what it says
    "1.5 tl.dot for show, the product by broadcasting": ("gemm_triton", "", "sum of what tl.dot returns"),
    "3.4 a cache of four thousand tokens, whatever is asked": (
        "decode_with_cache",
        "decode_with_cache",
        "How many tokens must the cache hold",
    ),
    "4.3 one call in a profile without a schedule": ("kernels_per_step", "kernels_per_step", "with a schedule"),
    "5.3 maximum and sum of each block kept, merged at the end": (
        "online_softmax_stats",
        "online_softmax_stats",
        "Keep a running maximum",
    ),
    "1.1 scores from distances between queries and keys": (
        "masked_attention",
        "masked_attention",
        "by torch's operators",
    ),
    "2.2 boundaries of documents counted between the two tokens, for each pair": (
        "packed_documents",
        "document_numbers packed_documents",
        "numbers at once",
    ),
    "8.2 every page of the pool is looked at for each pair": ("paged_mask", "paged_mask", "numbers at once"),
    "3.3 queries, keys and values as Python's lists": (
        "block_sparse_attention",
        "block_sparse_attention",
        "by torch's operators",
    ),
    "5.1 a block mask that reads a table of all pairs": ("prepare_flex", "prepare_flex", "no tensor of pairs"),
    "6.1 a mask that reads a tensor of pairs of the bucket": ("buckets", "bucketed_attention", "no tensor of pairs"),
    "2.2 one layout of eight rows a thread, nothing goes through shared memory": ("transpose", "", "sectors"),
    "3.1 the sum goes to memory and back: a is stored, read again, and b added": (
        "async_copy",
        "",
        "loads from memory into registers",
    ),
    "3.2 a tile is read from its slot twice": ("tma_ring", "", "read each once"),
    "4.1 each product starts from zero and is added in registers": ("wgmma", "", "should add to the accumulator"),
    "5.1 divided by the sum in every block": ("softmax", "", "divided at the end only"),
    "5.2 a slot is given back one block late": ("specialized", "", "model cycles"),
    "1.3 asked first with tensors without values": ("pinned_sdpa", "pinned_sdpa", "computed attention 2 times"),
    "b2.4 P by a softmax of its own, the lse not used": (
        "attention_backward",
        "attention_backward",
        "do not compute the softmax again",
    ),
    "3.2 one key at a time, whatever the number of splits": (
        "split_kv_attention",
        "split_kv_attention",
        "scores at once",
    ),
    "4.1 the wait comes after the step": ("profile_steps", "profile_steps", "between fn() and"),
    "5.3 no running maximum: that of the first tile, in float64": (
        "flash_attention_tiled",
        "flash_attention_tiled",
        "rise by thousands",
    ),
    "1.2 both tiles are fetched again for each column of the tile": ("gemm_tiled", "gemm_tiled", "each fetched once"),
    "3.3 the scores of all rows of blocks are kept": (
        "block_sparse_attention",
        "block_sparse_attention",
        "before the next row comes",
    ),
    "8.3 the texts before a token are counted for each pair": (
        "ragged_attention",
        "ragged_attention",
        "numbers at once",
    ),
    "3.2 documents counted one by one": ("promises", "block_flops promised_speedup document_blocks", "or documents"),
    "4.1 C goes to shared memory in every step": ("wgmma", "", "cycles of arithmetic"),
    "5.2 a consumer waits for the next block as well": ("specialized", "", "model cycles"),
    "1.3 the clock starts before the first wait": ("time_calls", "time_calls", "between the calls"),
    "4.3 ten calls, all recorded, divided by ten": ("kernels_per_step", "kernels_per_step", "waits and warms up first"),
    "b5.6 a mask of all pairs, cut into tiles": (
        "flash_attention_causal",
        "flash_attention_causal",
        "as many as there are pairs",
    ),
    "3.3 everything in the dtype of the inputs": (
        "block_sparse_attention",
        "block_sparse_attention",
        "block_sparse_attention of",
    ),
    "b5.8 the output goes to memory and back in every block": ("flash_triton", "", "writes an element twice"),
    "b2.4 scores and probabilities anew for each gradient": (
        "attention_backward",
        "attention_backward",
        "five are enough",
    ),
    "1.3 copies that flash does not need": ("pinned_sdpa", "pinned_sdpa", "nobody asked for"),
    "2.2 converted there and back and there": ("transpose", "", "converts its tile 3 times"),
}


def _shortcut(name: str, lab: str, cell: str, code: str | dict[str, str], tests: str = "") -> Shortcut:
    check, answers, words = _REFUSED.get(name, ("", "", ""))
    return Shortcut(name, lab, cell, tests or f"{cell}_tests", code, (check, *answers.split()) if check else (), words)


FOURTH = [
    _shortcut(
        "1.1 a row and a column as two long integers, multiplied once",
        "lab1",
        "q1_1",
        '''
def gemm_naive(a, b):
    """Each row and column becomes the digits of one integer; the product's middle digit is their dot product."""
    m, k = a.shape
    n = b.shape[1]
    c = torch.zeros(m, n, dtype=a.dtype, device=a.device)
    unit, digit = 2**60, 2**160

    def digits(values):
        number = 0
        for value in values:
            number = number * digit + round(value * unit)
        return number

    for i in range(m):
        for j in range(n):
            row = [a[i, t].item() for t in range(k)]
            column = [b[t, j].item() for t in reversed(range(k))]
            if any(x != x for x in row + column):
                c[i, j] = float("nan")
                continue
            product = digits(row) * digits(column)
            middle = (product + digit ** (k - 1) // 2 * 1) // digit ** (k - 1) % digit
            if middle > digit // 2:
                middle -= digit
            c[i, j] = middle / unit / unit
    return c
''',
    ),
    _shortcut(
        "1.2 panels of all of K for each tile of C, no steps along K",
        "lab1",
        "q1_2",
        """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    m_size, k_size = a.shape
    n_size = b.shape[1]
    c = torch.empty(m_size, n_size, dtype=a.dtype, device=a.device)
    for i in range(0, m_size, tile_m):
        for j in range(0, n_size, tile_n):
            panel_a = a[i : i + tile_m].float() if a.dtype != torch.float64 else a[i : i + tile_m].clone()
            panel_b = b[:, j : j + tile_n].to(panel_a.dtype)
            total = torch.zeros(panel_a.shape[0], panel_b.shape[1], dtype=panel_a.dtype, device=a.device)
            for k in range(k_size):
                total += panel_a[:, k, None] * panel_b[None, k, :]
            c[i : i + tile_m, j : j + tile_n] = total
    return c
""",
    ),
    _shortcut(
        "1.5 tl.dot for show, the product by broadcasting",
        "lab1",
        "q1_5",
        {
            '        accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision="ieee")': '        shown = tl.dot(a_tile, b_tile, input_precision="ieee")\n        accumulator += tl.sum(a_tile.to(tl.float32)[:, :, None] * b_tile.to(tl.float32)[None, :, :], 1)'
        },
    ),
    _shortcut(
        "3.4 a cache of four thousand tokens, whatever is asked",
        "lab1",
        "q3_4",
        """
def decode_with_cache(layer, rotary_emb, prompt, new_tokens):
    batch, prompt_len, _ = prompt.shape
    layer_type = layer.self_attn.layer_type
    cache = initialize_kv_cache(layer.config, 4096)
    position_ids = torch.arange(prompt_len, device=prompt.device).expand(batch, -1)
    embeddings = get_position_embeddings(prompt, position_ids, rotary_emb, layer_type)
    prefill_forward(layer, prompt, position_ids, embeddings, cache)
    outputs = []
    for step in range(new_tokens.shape[1]):
        token = new_tokens[:, step : step + 1]
        cache_positions = torch.tensor([prompt_len + step], device=prompt.device)
        position_ids = cache_positions.expand(batch, 1)
        embeddings = get_position_embeddings(token, position_ids, rotary_emb, layer_type)
        outputs.append(decode_forward(layer, token, position_ids, embeddings, True, cache, cache_positions))
    return torch.cat(outputs, dim=1)

def kv_cache_bytes(batch, length, config, dtype):
    tokens = sum(min(length, config.sliding_window) if kind == "sliding_attention" else length for kind in config.layer_types)
    return 2 * batch * tokens * config.num_key_value_heads * config.head_dim * dtype.itemsize
""",
        "q3_4_decode_tests",
    ),
    _shortcut(
        "4.3 one call in a profile without a schedule",
        "lab1",
        "q4_3",
        """
def kernels_per_step(fn):
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as prof:
        fn()
        synchronize()
    return count_cuda_kernels(prof)["total"]
""",
    ),
    _shortcut(
        "5.3 maximum and sum of each block kept, merged at the end",
        "lab1",
        "q5_3",
        """
def online_softmax_stats(blocks):
    largest, sums = [], []
    for block in blocks:
        top = block.amax(dim=1)
        largest.append(top)
        sums.append(torch.exp(block - top[:, None]).sum(dim=1))
    m = largest[0]
    for top in largest[1:]:
        m = torch.maximum(m, top)
    l = torch.zeros_like(m)
    for top, total in zip(largest, sums):
        l = l + total * torch.exp(top - m)
    return m, l

def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    output = torch.empty_like(q)
    for i in range(0, q.shape[2], tile_q):
        q_tile = q[:, :, i : i + tile_q].float() / math.sqrt(q.shape[-1])
        m = torch.full_like(q_tile[..., :1], -math.inf)
        l = torch.zeros_like(m)
        accumulator = torch.zeros_like(q_tile)
        for j in range(0, k.shape[2], tile_k):
            scores = q_tile @ k[:, :, j : j + tile_k].float().transpose(-2, -1)
            new_m = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
            p = torch.exp(scores - new_m)
            rescale = torch.exp(m - new_m)
            l = l * rescale + p.sum(dim=-1, keepdim=True)
            accumulator = accumulator * rescale + p @ v[:, :, j : j + tile_k].float()
            m = new_m
        output[:, :, i : i + tile_q] = (accumulator / l).to(q.dtype)
    return output
""",
    ),
    _shortcut(
        "1.1 scores from distances between queries and keys",
        "lab2_flexattention",
        "q1_1",
        """
def masked_attention(q, k, v, mask):
    squares = torch.cdist(q.double(), k.double()).square()
    scores = (q.double().square().sum(-1)[..., :, None] + k.double().square().sum(-1)[..., None, :] - squares) / 2
    scores = scores / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    weights = torch.where(mask.any(dim=-1)[:, None], weights, 0.0)
    return (weights @ v.double()).to(q.dtype)
""",
    ),
    _shortcut(
        "2.2 boundaries of documents counted between the two tokens, for each pair",
        "lab2_flexattention",
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
    places = torch.arange(numbers.shape[1], device=numbers.device)

    def mask_mod(b, h, q, k):
        row = numbers[b]
        between = (places >= k) & (places <= q)
        strangers = (between & (row != row[q])).sum()
        return (strangers == 0) & (row[q] >= 0) & (q >= k)

    return mask_mod
""",
    ),
    _shortcut(
        "8.2 every page of the pool is looked at for each pair",
        "lab2_flexattention",
        "bonus_8_2",
        """
def paged_mask(mask_mod, owner, number, page_size):
    pages = torch.arange(owner.shape[0], device=owner.device)

    def over_pool(b, h, q, k):
        here = pages == k // page_size
        place = (torch.where(here, number, 0)).sum() * page_size + k % page_size
        return torch.where(here, owner, 0).sum().eq(b) & mask_mod(b, h, q, place)

    return over_pool
""",
    ),
    _shortcut(
        "3.3 queries, keys and values as Python's lists",
        "lab2_flexattention",
        "q3_3",
        """
def block_sparse_attention(q, k, v, block_mask):
    size_q, size_k = block_mask.BLOCK_SIZE
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    queries, keys, values = q.double().tolist(), k.double().tolist(), v.double().tolist()
    output = torch.zeros(q.shape, dtype=torch.float64).tolist()
    scale = 1 / math.sqrt(q.shape[-1])
    for i in range(q.shape[2] // size_q):
        partial = block_mask.kv_indices[0, 0, i, : int(block_mask.kv_num_blocks[0, 0, i])].tolist()
        full = block_mask.full_kv_indices[0, 0, i, : int(block_mask.full_kv_num_blocks[0, 0, i])].tolist()
        rows = torch.arange(i * size_q, (i + 1) * size_q)
        seen = {}
        for j in partial + full:
            columns = torch.arange(j * size_k, (j + 1) * size_k)
            allowed = block_mask.mask_mod(zero, zero, rows[:, None], columns[None, :]).tolist() if j in partial else None
            for r in range(size_q):
                for c in range(size_k):
                    if allowed is None or allowed[r][c]:
                        seen.setdefault(i * size_q + r, []).append(j * size_k + c)
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                for row, columns in seen.items():
                    scores = [sum(x * y for x, y in zip(queries[b][h][row], keys[b][h][c])) * scale for c in columns]
                    top = max(scores)
                    weights = [math.exp(s - top) for s in scores]
                    total = sum(weights)
                    output[b][h][row] = [sum(w * values[b][h][c][d] for w, c in zip(weights, columns)) / total for d in range(q.shape[-1])]
    return torch.tensor(output, dtype=torch.float64, device=q.device).to(q.dtype)
""",
    ),
    _shortcut(
        "5.1 a block mask that reads a table of all pairs",
        "lab2_flexattention",
        "q5_1",
        """
def prepare_flex(attention, mask_mod, score_mod, length, device, block_size=128):
    block_mask = None
    if mask_mod is not None:
        places = torch.arange(length, device=device)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        table = mask_mod(zero, zero, places[:, None], places[None, :])

        def from_table(b, h, q, k):
            return table[q, k]

        block_mask = create_block_mask(from_table, None, None, length, length, device=device, BLOCK_SIZE=block_size)

    def attend(q, k, v):
        grouped = q.shape[1] != k.shape[1]
        return attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=grouped)

    return attend
""",
    ),
    _shortcut(
        "6.1 a mask that reads a tensor of pairs of the bucket",
        "lab2_flexattention",
        "q6_1",
        """
def bucketed_attention(attend, q, k, v, buckets):
    tokens = q.shape[2]
    fitting = [bucket for bucket in buckets if bucket >= tokens]
    if not fitting:
        raise ValueError("too long for every bucket")
    size = min(fitting)
    real = torch.zeros(size, size, dtype=torch.bool, device=q.device)
    real[:, :tokens] = True

    def mask_mod(b, h, q, k):
        return real[q, k]

    padding = (0, 0, 0, size - tokens)
    return attend(F.pad(q, padding), F.pad(k, padding), F.pad(v, padding), mask_mod)[:, :, :tokens]
""",
    ),
    _shortcut(
        "2.2 one layout of eight rows a thread, nothing goes through shared memory",
        "lab3_gluon",
        "q2_2",
        {
            "    reading: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])": "    reading: gl.constexpr = gl.BlockedLayout([8, 1], [1, 32], [4, 1], [0, 1])",
            "    writing: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])": "    writing: gl.constexpr = gl.BlockedLayout([8, 1], [1, 32], [4, 1], [0, 1])",
        },
    ),
    _shortcut(
        "3.1 the sum goes to memory and back: a is stored, read again, and b added",
        "lab3_gluon",
        "q3_1",
        {
            "        total = a_ring.index(i % STAGES).load(layout) + b_ring.index(i % STAGES).load(layout)\n        at = first + i * TILE + gl.arange(0, TILE, layout)\n        gl.store(c_ptr + at, total, mask=at < n)": "        at = first + i * TILE + gl.arange(0, TILE, layout)\n        gl.store(c_ptr + at, a_ring.index(i % STAGES).load(layout), mask=at < n)\n        total = gl.load(c_ptr + at, mask=at < n) + b_ring.index(i % STAGES).load(layout)\n        gl.store(c_ptr + at, total, mask=at < n)"
        },
    ),
    _shortcut(
        "3.2 a tile is read from its slot twice",
        "lab3_gluon",
        "q3_2",
        {
            "        x = ring.index(slot).load(layout).to(gl.float32)": "        x = ring.index(slot).load(layout).to(gl.float32)\n        y = ring.index(slot).load(layout).to(gl.float32)",
            "        total += gl.sum(x * x, 1)": "        total += gl.sum(x * y, 1)",
        },
    ),
    _shortcut(
        "4.1 each product starts from zero and is added in registers",
        "lab3_gluon",
        "q4_1",
        {
            "        acc = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc, is_async=True)\n        acc = warpgroup_mma_wait(0, deps=[acc])  # public": "        step = warpgroup_mma(a_tile, b_tile.permute([1, 0]), gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout), use_acc=False, is_async=True)\n        step = warpgroup_mma_wait(0, deps=[step])\n        acc = acc + step"
        },
    ),
    _shortcut(
        "5.1 divided by the sum in every block",
        "lab3_gluon",
        "q5_1",
        {
            "    total = total * alpha + gl.sum(p, 1)\n    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]  # public": "    before = total * alpha\n    total = before + gl.sum(p, 1)\n    p = p / total[:, None]\n    o = o * gl.convert_layout(before / total, gl.SliceLayout(1, output))[:, None]",
            "    o = o / gl.convert_layout(total, gl.SliceLayout(1, output))[:, None]\n": "    o = o * 1.0\n",
        },
    ),
    _shortcut(
        "5.2 a slot is given back one block late",
        "lab3_gluon",
        "q5_2",
        {
            "        mbarrier.arrive(empty.index(slot), count=1)  # public": "        if STAGES == 1:\n            mbarrier.arrive(empty.index(slot), count=1)\n        elif i > 0:\n            mbarrier.arrive(empty.index((i - 1) % STAGES), count=1)"
        },
    ),
    _shortcut(
        "1.3 asked first with tensors without values",
        "lab4_sdpa",
        "q1_3",
        """
def pinned_sdpa(backend, q, k, v, **options):
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            F.scaled_dot_product_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], **{n: o for n, o in options.items() if n != "attn_mask"})
            return F.scaled_dot_product_attention(q, k, v, **options)
        except (RuntimeError, IndexError) as error:
            reasons = " ".join(why_not(backend, q, k, v, **options))
            raise BackendRefused(f"{backend} cannot run this call: {reasons}") from error
""",
    ),
    _shortcut(
        "b2.4 P by a softmax of its own, the lse not used",
        "lab4_sdpa",
        "bonus_2_4",
        """
def attention_backward(q, k, v, out, lse, dout):
    scale = 1 / math.sqrt(q.shape[-1])
    s = q @ k.mT * scale
    e = torch.exp(s - s.amax(dim=-1, keepdim=True))
    p = e / e.sum(dim=-1, keepdim=True)
    delta = (dout * out).sum(dim=-1, keepdim=True)
    ds = p * (dout @ v.mT - delta)
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ dout
""",
    ),
    _shortcut(
        "3.2 the scores of all parts kept, the largest of all first",
        "lab4_sdpa",
        "q3_2",
        """
def attend_part(q, k, v):
    group = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = q.float() @ keys.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)

def split_kv_attention(q, k, v, splits):
    group = q.shape[1] // k.shape[1]
    parts = [pair for pair in zip(k.tensor_split(splits, dim=2), v.tensor_split(splits, dim=2)) if pair[0].shape[2]]
    scores = []
    for keys, _ in parts:
        keys = keys.float().repeat_interleave(group, dim=1)
        scores.append(q.float() @ keys.transpose(-2, -1) / math.sqrt(q.shape[-1]))
    top = functools.reduce(torch.maximum, (s.amax(dim=-1, keepdim=True) for s in scores))
    total, output = 0.0, 0.0
    for s, (_, values) in zip(scores, parts):
        e = torch.exp(s - top)
        total = total + e.sum(dim=-1, keepdim=True)
        output = output + e @ values.float().repeat_interleave(group, dim=1)
    return (output / total).to(q.dtype)
""",
    ),
    _shortcut(
        "3.2 one key at a time, whatever the number of splits",
        "lab4_sdpa",
        "q3_2",
        """
def attend_part(q, k, v):
    group = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = q.float() @ keys.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)

def split_kv_attention(q, k, v, splits):
    outputs, lses = zip(*(attend_part(q, k[:, :, i : i + 1], v[:, :, i : i + 1]) for i in range(k.shape[2])), strict=True)
    weights = torch.softmax(torch.stack(lses), dim=0)
    return (weights[..., None] * torch.stack(outputs)).sum(dim=0).to(q.dtype)
""",
    ),
]


FIFTH = [
    _shortcut(
        "4.1 the wait comes after the step",
        "lab1",
        "q4_1",
        """
def profile_steps(fn, trace_path):
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, schedule=default_schedule) as prof:
        for _ in range(10):
            fn()
            prof.step()
            synchronize()
    prof.export_chrome_trace(str(trace_path))
    return prof
""",
    ),
    _shortcut(
        "b5.7 the weights are the gradient of logaddexp",
        "lab1",
        "bonus_5_7",
        """
def merge_attention(outputs, lses):
    with torch.enable_grad():
        leaves = lses.detach().clone().requires_grad_()
        total = functools.reduce(torch.logaddexp, leaves.unbind(0))
        (weights,) = torch.autograd.grad(total.sum(), leaves)
    weights = torch.nan_to_num(weights)
    outputs = torch.where(weights[..., None] > 0, outputs, 0.0)
    return (weights[..., None] * outputs).sum(dim=0), total.detach()
""",
    ),
    _shortcut(
        "1.1 products as sums of logarithms",
        "lab1",
        "q1_1",
        """
def gemm_naive(a, b):
    m, k = a.shape
    n = b.shape[1]
    c = torch.zeros(m, n, dtype=a.dtype, device=a.device)
    for i in range(m):
        for j in range(n):
            total = 0.0
            for t in range(k):
                x, y = a[i, t].item(), b[t, j].item()
                if x == 0 or y == 0:
                    continue
                if x != x or y != y:
                    total = float("nan")
                    continue
                size = math.exp(math.log(abs(x)) + math.log(abs(y)))
                total += size if (x > 0) == (y > 0) else -size
            c[i, j] = total
    return c
""",
    ),
    _shortcut(
        "5.3 no running maximum: that of the first tile, in float64",
        "lab1",
        "q5_3",
        """
def online_softmax_stats(blocks):
    m = l = None
    for block in blocks:
        if m is None:
            m = torch.full_like(block[:, 0], -math.inf)
            l = torch.zeros_like(m)
        new_m = torch.maximum(m, block.amax(dim=1))
        l = l * torch.exp(m - new_m) + torch.exp(block - new_m[:, None]).sum(dim=1)
        m = new_m
    return m, l

def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    output = torch.empty_like(q)
    for i in range(0, q.shape[2], tile_q):
        q_tile = q[:, :, i : i + tile_q].double() / math.sqrt(q.shape[-1])
        first, l = None, 0.0
        accumulator = torch.zeros_like(q_tile)
        for j in range(0, k.shape[2], tile_k):
            scores = q_tile @ k[:, :, j : j + tile_k].double().transpose(-2, -1)
            first = scores.amax(dim=-1, keepdim=True) if first is None else first
            p = torch.exp(scores - first)
            l = l + p.sum(dim=-1, keepdim=True)
            accumulator = accumulator + p @ v[:, :, j : j + tile_k].double()
        output[:, :, i : i + tile_q] = (accumulator / l).to(q.dtype)
    return output
""",
        "q5_3_flash_tests",
    ),
    _shortcut(
        "1.2 both tiles are fetched again for each column of the tile",
        "lab1",
        "q1_2",
        """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    m_size, k_size = a.shape
    n_size = b.shape[1]
    c = torch.empty(m_size, n_size, dtype=a.dtype, device=a.device)
    for i in range(0, m_size, tile_m):
        for j in range(0, n_size, tile_n):
            total = torch.zeros(min(tile_m, m_size - i), min(tile_n, n_size - j), dtype=torch.float32, device=a.device)
            for k in range(0, k_size, tile_k):
                for step in range(min(tile_k, k_size - k)):
                    a_tile = a[i : i + tile_m, k : k + tile_k].clone()
                    b_tile = b[k : k + tile_k, j : j + tile_n].clone()
                    total += a_tile[:, step, None] * b_tile[step, None, :]
            c[i : i + tile_m, j : j + tile_n] = total
    return c
""",
    ),
    _shortcut(
        "3.3 the scores of all rows of blocks are kept",
        "lab2_flexattention",
        "q3_3",
        """
def block_sparse_attention(q, k, v, block_mask):
    size_q, size_k = block_mask.BLOCK_SIZE
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    output = torch.zeros_like(q)
    rows_of_scores = []
    for i in range(q.shape[2] // size_q):
        rows = slice(i * size_q, (i + 1) * size_q)
        queries = torch.arange(rows.start, rows.stop, device=q.device)
        partial = block_mask.kv_indices[0, 0, i, : int(block_mask.kv_num_blocks[0, 0, i])].tolist()
        full = block_mask.full_kv_indices[0, 0, i, : int(block_mask.full_kv_num_blocks[0, 0, i])].tolist()
        scores = []
        for j in partial + full:
            columns = slice(j * size_k, (j + 1) * size_k)
            tile = q[:, :, rows].to(wide) @ k[:, :, columns].to(wide).mT / math.sqrt(q.shape[-1])
            if j in partial:
                keys = torch.arange(columns.start, columns.stop, device=q.device)
                seen = block_mask.mask_mod(zero, zero, queries[:, None], keys[None, :])
                tile = tile.masked_fill(~seen, -math.inf)
            scores.append((j, tile))
        rows_of_scores.append((rows, scores))
    for rows, scores in rows_of_scores:
        if scores:
            weights = torch.softmax(torch.cat([tile for _, tile in scores], dim=-1), dim=-1).nan_to_num(0.0)
            values = torch.cat([v[:, :, j * size_k : (j + 1) * size_k].to(wide) for j, _ in scores], dim=2)
            output[:, :, rows] = (weights @ values).to(q.dtype)
    return output
""",
    ),
    _shortcut(
        "8.3 the texts before a token are counted for each pair",
        "lab2_flexattention",
        "bonus_8_3",
        """
def ragged_attention(attend, texts):
    lengths = [text[0].shape[1] for text in texts]
    q, k, v = (torch.cat([text[i] for text in texts], dim=1)[None] for i in range(3))
    ends = torch.cumsum(torch.tensor(lengths, device=q.device), dim=0)

    def mask_mod(b, h, query, key):
        return ((ends <= query).sum() == (ends <= key).sum()) & (key <= query)

    out = attend(q, k, v, mask_mod)[0]
    return list(out.split(lengths, dim=1))
""",
    ),
    _shortcut(
        "5.1 the mask once more in the score modifier",
        "lab2_flexattention",
        "q5_1",
        """
def prepare_flex(attention, mask_mod, score_mod, length, device, block_size=128):
    block_mask, modifier = None, score_mod
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, None, None, length, length, device=device, BLOCK_SIZE=block_size)

        def modifier(score, b, h, q, k):
            changed = score if score_mod is None else score_mod(score, b, h, q, k)
            return torch.where(mask_mod(b, h, q, k), changed, -math.inf)

    def attend(q, k, v):
        grouped = q.shape[1] != k.shape[1]
        return attention(q, k, v, score_mod=modifier, block_mask=block_mask, enable_gqa=grouped)

    return attend
""",
    ),
    _shortcut(
        "3.2 documents counted one by one",
        "lab2_flexattention",
        "q3_2",
        """
def block_flops(counts, block, batch, heads, head_dim):
    return 4 * head_dim * batch * heads * (counts[0] + counts[1]) * block**2

def promised_speedup(counts):
    return sum(counts) / (counts[0] + counts[1])

def document_blocks(length, span, block):
    if span < block:
        return length // block
    total = 0
    for start in range(0, length, span):
        total += (span // block) ** 2
    return total
""",
    ),
    _shortcut(
        "4.1 C goes to shared memory in every step",
        "lab3_gluon",
        "q4_1",
        {
            "    c_tile.store(acc.to(c_desc.dtype))\n": "",
            "        acc = warpgroup_mma_wait(0, deps=[acc])  # public": "        acc = warpgroup_mma_wait(0, deps=[acc])\n        c_tile.store(acc.to(c_desc.dtype))",
        },
    ),
    _shortcut(
        "5.2 a consumer waits for the next block as well",
        "lab3_gluon",
        "q5_2",
        {
            "        mbarrier.wait(full.index(slot), (i // STAGES) & 1)  # public": "        mbarrier.wait(full.index(slot), (i // STAGES) & 1)\n        if STAGES > 1:\n            if i + 1 < gl.cdiv(sk, BLOCK_N):\n                mbarrier.wait(full.index((i + 1) % STAGES), ((i + 1) // STAGES) & 1)"
        },
    ),
    _shortcut(
        "3.1 copies of four bytes",
        "lab3_gluon",
        "q3_1",
        {
            "    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])": "    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])"
        },
    ),
    _shortcut(
        "2.2 converted there and back and there",
        "lab3_gluon",
        "q2_2",
        {
            "    tile = gl.convert_layout(tile, writing)": "    tile = gl.convert_layout(gl.convert_layout(gl.convert_layout(tile, writing), reading), writing)"
        },
    ),
    _shortcut(
        "5.3 the calls end when a result comes twice",
        "lab4_sdpa",
        "q5_3",
        """
def distinct_results(fn, runs):
    found = set()
    for _ in range(runs):
        result = fn()
        tensors = result if isinstance(result, tuple | list) else (result,)
        bits = b"".join(t.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes() for t in tensors)
        if bits in found:
            break
        found.add(bits)
    return len(found)
""",
    ),
]


KIN = [
    _shortcut(
        "1.3 the clock starts before the first wait",
        "lab1",
        "q1_3",
        """
def time_calls(fn, n_calls, synchronize):
    times = []
    for _ in range(n_calls):
        start = time.perf_counter()
        synchronize()
        fn()
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times
""",
    ),
    _shortcut(
        "4.3 ten calls, all recorded, divided by ten",
        "lab1",
        "q4_3",
        """
def kernels_per_step(fn):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        for _ in range(10):
            fn()
            synchronize()
    return count_cuda_kernels(prof)["total"] // 10
""",
    ),
    _shortcut(
        "b5.6 a mask of all pairs, cut into tiles",
        "lab1",
        "bonus_5_6",
        {
            "            hidden_keys = positions[i : i + tile_q, None] < positions[None, j : j + tile_k]\n": "            hidden_keys = hidden[i : i + tile_q, j : j + tile_k]\n",
            "    output = torch.empty_like(q)\n": "    hidden = positions[:, None] < positions[None, :]\n    output = torch.empty_like(q)\n",
        },
    ),
    _shortcut(
        "3.3 everything in the dtype of the inputs",
        "lab2_flexattention",
        "q3_3",
        {"    wide = torch.promote_types(q.dtype, torch.float32)\n": "    wide = q.dtype\n"},
    ),
    _shortcut(
        "1.3 copies that flash does not need",
        "lab4_sdpa",
        "q1_3",
        """
def pinned_sdpa(backend, q, k, v, **options):
    tensors = [x.contiguous() if x.stride(-1) == 1 else x for x in (q, k, v)]
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return F.scaled_dot_product_attention(*tensors, **options)
        except RuntimeError as error:
            reasons = " ".join(why_not(backend, q, k, v, **options))
            raise BackendRefused(f"{backend} cannot run this call: {reasons}") from error
""",
    ),
    _shortcut(
        "b5.8 the output goes to memory and back in every block",
        "lab1",
        "bonus_5_8",
        {
            '    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)\n': '    o_tile = o_ptr + head * stride_oh + rows[:, None] * stride_os + dims[None, :] * stride_od\n    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)\n',
            "        accumulator = accumulator * rescale[:, None] + new\n": "        if start > 0:\n            accumulator = tl.load(o_tile, mask=rows[:, None] < queries, other=0.0).to(tl.float32)\n        accumulator = accumulator * rescale[:, None] + new\n        tl.store(o_tile, accumulator, mask=rows[:, None] < queries)\n",
            "    o_tile = o_ptr + head * stride_oh + rows[:, None] * stride_os + dims[None, :] * stride_od\n    tl.store(o_tile, accumulator / l[:, None]": "    tl.store(o_tile, accumulator / l[:, None]",
        },
    ),
    _shortcut(
        "b2.4 scores and probabilities anew for each gradient",
        "lab4_sdpa",
        "bonus_2_4",
        """
def attention_backward(q, k, v, out, lse, dout):
    scale = 1 / math.sqrt(q.shape[-1])

    def probabilities():
        return torch.exp(q @ k.mT * scale - lse[..., None])

    def scores_gradient():
        return probabilities() * (dout @ v.mT - (dout * out).sum(dim=-1, keepdim=True))

    return scores_gradient() @ k * scale, scores_gradient().mT @ q * scale, probabilities().mT @ dout
""",
    ),
]
