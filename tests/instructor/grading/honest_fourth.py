"""Twelve more honest students, three a lab: right answers in ways that nobody had written down here before the fourth cold round."""

from __future__ import annotations

STUDENTS: dict[str, tuple[str, dict]] = {
    "tiles multiplied at once, keys repeated for the group, the counter by its module": (
        "lab1",
        {
            "q1_2": """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    wide = torch.promote_types(a.dtype, torch.float32)
    rows, inner, columns = *a.shape, b.shape[-1]
    out = a.new_empty(rows, columns)
    for top in range(0, rows, tile_m):
        for left in range(0, columns, tile_n):
            acc = None
            for depth in range(0, inner, tile_k):
                x = a[top : top + tile_m, depth : depth + tile_k].to(wide)
                y = b[depth : depth + tile_k, left : left + tile_n].to(wide)
                part = (x.unsqueeze(2) * y.unsqueeze(0)).sum(dim=1)
                acc = part if acc is None else acc + part
            out[top : top + tile_m, left : left + tile_n] = acc
    return out
""",
            "q3_3": """
import torch.utils.flop_counter as counting

def counted_flops(fn, *args):
    counter = counting.FlopCounterMode(display=False)
    with counter:
        fn(*args)
    return sum(counter.get_flop_counts().get("Global", {}).values())
""",
            "q5_2": """
def attention_bshd(q, k, v):
    groups = q.size(2) // k.size(2)
    heads_first = [q.permute(0, 2, 1, 3)]
    for x in (k, v):
        heads_first.append(x.permute(0, 2, 1, 3).repeat_interleave(groups, dim=1))
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
    return out.permute(0, 2, 1, 3)
""",
        },
    ),
    "a schedule of its own, a step as a function, one tile of Triton added": (
        "lab1",
        {
            "q4_1": """
def kinds_of_activity():
    kinds = [torch.profiler.ProfilerActivity.CPU]
    return kinds + [torch.profiler.ProfilerActivity.CUDA] * torch.cuda.is_available()

def profile_steps(fn, trace_path):
    plan = torch.profiler.schedule(wait=1, warmup=3, active=6)
    prof = torch.profiler.profile(activities=kinds_of_activity(), schedule=plan)

    def one_step():
        fn()
        synchronize()
        prof.step()

    with prof:
        for _ in range(1 + 3 + 6):
            one_step()
    prof.export_chrome_trace(f"{trace_path}")
    return prof
""",
            "q1_5": {
                '        accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision="ieee")': '        accumulator += tl.dot(a_tile, b_tile, input_precision="ieee")'
            },
            "bonus_5_8": {
                '        new = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")\n        accumulator = accumulator * rescale[:, None] + new\n': '        accumulator = tl.dot(p.to(v_tile.dtype), v_tile, accumulator * rescale[:, None], input_precision="ieee")\n'
            },
        },
    ),
    "each head by itself, a softmax by its own sum, the cache one token too long": (
        "lab1",
        {
            "q5_3": """
def online_softmax_stats(blocks):
    blocks = iter(blocks)
    first = next(blocks)
    m = first.max(dim=1).values
    l = (first - m.unsqueeze(1)).exp().sum(dim=1)
    for block in blocks:
        top = torch.maximum(m, block.max(dim=1).values)
        l = l * (m - top).exp() + (block - top.unsqueeze(1)).exp().sum(dim=1)
        m = top
    return m, l


def _one_head(q, k, v, tile_q, tile_k):
    rows = []
    for queries in q.split(tile_q):
        m = queries.new_full((len(queries), 1), float("-inf"))
        l, o = torch.zeros_like(m), torch.zeros_like(queries)
        for keys, values in zip(k.split(tile_k), v.split(tile_k)):
            s = queries @ keys.T
            top = torch.maximum(m, s.max(dim=1, keepdim=True).values)
            p, factor = (s - top).exp(), (m - top).exp()
            l, o, m = l * factor + p.sum(1, keepdim=True), o * factor + p @ values, top
        rows.append(o / l)
    return torch.cat(rows)


def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    scale = q.shape[-1] ** -0.5
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            out[b, h] = _one_head(q[b, h].float() * scale, k[b, h].float(), v[b, h].float(), tile_q, tile_k).to(q.dtype)
    return out
""",
            "q3_4": {
                "    cache = initialize_kv_cache(layer.config, prompt_len + new_tokens.shape[1])": "    cache = initialize_kv_cache(layer.config, prompt_len + new_tokens.shape[1] + 1)"
            },
            "q1_1": """
def gemm_naive(a, b):
    left = [[a[i, k].item() for k in range(a.shape[1])] for i in range(a.shape[0])]
    right = [[b[k, j].item() for j in range(b.shape[1])] for k in range(b.shape[0])]
    c = torch.zeros((len(left), b.shape[1]), dtype=a.dtype, device=a.device)
    for i, row in enumerate(left):
        for j in range(b.shape[1]):
            total = 0.0
            for k, x in enumerate(row):
                total += x * right[k][j]
            c[i, j] = total
    return c
""",
        },
    ),
    "keys gathered by their places, a class that attends, documents by their ends": (
        "lab2_flexattention",
        {
            "q3_3": """
def block_sparse_attention(q, k, v, block_mask):
    size_q, size_k = block_mask.BLOCK_SIZE
    nought = torch.tensor(0, device=q.device)
    out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    steps = torch.arange(size_k, device=q.device)
    for i in range(block_mask.kv_num_blocks.shape[-1]):
        some = block_mask.kv_indices[0, 0, i, : block_mask.kv_num_blocks[0, 0, i].item()].long()
        whole = block_mask.full_kv_indices[0, 0, i, : block_mask.full_kv_num_blocks[0, 0, i].item()].long()
        if len(some) + len(whole) == 0:
            continue
        keys = (torch.cat([some, whole])[:, None] * size_k + steps).flatten()
        rows = torch.arange(i * size_q, (i + 1) * size_q, device=q.device)
        scores = q[:, :, rows].to(out.dtype) @ k[:, :, keys].to(out.dtype).transpose(2, 3) * q.shape[-1] ** -0.5
        asked = len(some) * size_k
        if asked:
            seen = block_mask.mask_mod(nought, nought, rows[:, None], keys[None, :asked])
            scores[..., :asked] = scores[..., :asked].masked_fill(seen.logical_not(), float("-inf"))
        top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(out.dtype).min)
        p = (scores - top).exp()
        out[:, :, rows] = p @ v[:, :, keys].to(out.dtype) / p.sum(-1, keepdim=True).clamp(min=1e-30)
    return out.to(q.dtype)
""",
            "q5_1": """
class Prepared:
    def __init__(self, attention, modifier, mask):
        self.attention, self.modifier, self.mask = attention, modifier, mask

    def __call__(self, q, k, v):
        return self.attention(
            query=q, key=k, value=v, score_mod=self.modifier, block_mask=self.mask, enable_gqa=k.size(1) < q.size(1)
        )

def prepare_flex(attention, mask_mod, score_mod, length, device, block_size=128):
    if mask_mod is None:
        return Prepared(attention, score_mod, None)
    mask = create_block_mask(mask_mod, B=None, H=None, Q_LEN=length, KV_LEN=length, device=str(device), BLOCK_SIZE=block_size)
    return Prepared(attention, score_mod, mask)
""",
            "q2_2": """
def document_numbers(lengths, size, device):
    ends = torch.tensor(lengths, device=device).cumsum(0)
    if sum(lengths) > size:
        raise ValueError("the documents are longer than the row")
    numbers = torch.searchsorted(ends, torch.arange(size, device=device), right=True)
    return torch.where(numbers < len(lengths), numbers, -1)

def packed_documents(numbers):
    def mask_mod(b, h, q, k):
        mine, other = numbers[b, q], numbers[b, k]
        return torch.logical_and(mine.eq(other), mine.ne(-1)) & torch.ge(q, k)

    return mask_mod
""",
        },
    ),
    "two stable sorts, texts told apart by their first token, zeros with the text in front": (
        "lab2_flexattention",
        {
            "q7_1": """
def lay_out(conversation, position, window):
    order = torch.sort(position, stable=True).indices
    order = order[torch.sort(conversation[order], stable=True).indices]
    who, when = conversation.index_select(0, order), position.index_select(0, order)

    def mask_mod(b, h, q, k):
        back = when[q] - when[k]
        instructions = who[k] == 0
        own = (who[q] == who[k]) & (back >= 0) & (instructions | (back < window))
        return own | (instructions & (who[q] != 0))

    return order, mask_mod
""",
            "bonus_8_3": """
def ragged_attention(attend, texts):
    starts, lengths, begin = [], [text[0].size(1) for text in texts], 0
    for length in lengths:
        starts += [begin] * length
        begin += length
    q, k, v = (torch.cat(parts, dim=1).unsqueeze(0) for parts in zip(*texts))
    first = torch.tensor(starts, dtype=torch.long, device=q.device)

    def mask_mod(b, h, i, j):
        return (j <= i) & (j >= first[i])

    return [part for part in attend(q, k, v, mask_mod)[0].split(lengths, dim=1)]
""",
            "q6_1": """
def bucketed_attention(attend, q, k, v, buckets):
    tokens = q.size(2)
    size = next((bucket for bucket in sorted(buckets) if bucket >= tokens), None)
    if size is None:
        raise ValueError(f"no bucket holds {tokens} tokens")

    def widened(x):
        wide = x.new_zeros(*x.shape[:2], size, x.shape[-1])
        wide[:, :, :tokens] = x
        return wide

    last = torch.full((), tokens - 1, device=q.device)
    out = attend(widened(q), widened(k), widened(v), lambda b, h, i, j: j <= last)
    return out.narrow(2, 0, tokens)
""",
        },
    ),
    "blocks looked at one by one, a bias by take, masks folded from the right": (
        "lab2_flexattention",
        {
            "q3_1": """
def count_blocks(mask, block):
    full = empty = total = 0
    for rows in mask.split(block):
        for tile in rows.split(block, dim=1):
            total += 1
            if not tile.any():
                empty += 1
            elif tile.shape == (block, block) and tile.all():
                full += 1
    return full, total - full - empty, empty
""",
            "q4_2": """
def relative_bias(table):
    width = table.shape[1]
    reach = (width - 1) // 2

    def score_mod(score, b, h, q, k):
        distance = torch.minimum(torch.maximum(q - k, torch.full_like(q, -reach)), torch.full_like(q, reach))
        return score + table.flatten()[h * width + reach + distance].type_as(score)

    return score_mod
""",
            "q2_3": """
def both(first, *others):
    if not others:
        return first
    rest = both(*others)
    return lambda b, h, q, k: torch.logical_and(first(b, h, q, k), rest(b, h, q, k))

def either(first, *others):
    if not others:
        return first
    rest = either(*others)
    return lambda b, h, q, k: torch.logical_or(first(b, h, q, k), rest(b, h, q, k))

def window_per_head(windows):
    def mask_mod(b, h, q, k):
        back = q - k
        return (back >= 0) & (back < windows[h])

    return mask_mod

def sinks_and_window(sinks, window):
    return both(causal, either(sliding_window(window), lambda b, h, q, k: (k < sinks) & (q >= 0)))
""",
        },
    ),
    "the softmax in two helpers, squares kept for each column, a larger piece a thread": (
        "lab3_gluon",
        {
            "q5_1": {
                "    top = gl.maximum(m, gl.max(s, 1))\n    alpha = gl.exp2((m - top) * c)\n    p = gl.exp2((s - top[:, None]) * c)\n": "    block_top = gl.max(s, 1)\n    top = gl.where(block_top > m, block_top, m)\n    p = gl.exp2(s * c - (top * c)[:, None])\n    alpha = gl.exp2(m * c - top * c)\n"
            },
            "q3_2": {
                "        total += gl.sum(x * x, 1)": "        squares = x * x\n        total = total + gl.sum(squares, 1)"
            },
            "q2_2": {
                "    reading: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])": "    reading: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [4, 1], [1, 0])",
                "    writing: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])": "    writing: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [1, 4], [0, 1])",
            },
        },
    ),
    "slots counted by hand, bytes in a name, the accumulator by its flag": (
        "lab3_gluon",
        {
            "q5_2": {
                "        mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)\n": "        both_tiles: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes\n        mbarrier.expect(full.index(slot), both_tiles)\n"
            },
            "q4_1": {
                "        acc = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc, is_async=True)\n        acc = warpgroup_mma_wait(0, deps=[acc])  # public": "        turned = b_tile.permute([1, 0])\n        acc = warpgroup_mma(a_tile, turned, acc, use_acc=k > 0)"
            },
            "q3_1": {
                "        total = a_ring.index(i % STAGES).load(layout) + b_ring.index(i % STAGES).load(layout)": "        slot = i % STAGES\n        left = a_ring.index(slot).load(layout)\n        right = b_ring.index(slot).load(layout)\n        total = left + right"
            },
        },
    ),
    "the mask by its distance, blocks from the last key, one wait for both": (
        "lab3_gluon",
        {
            "bonus_5_5": {
                "    blocks = gl.minimum(gl.cdiv(sk, BLOCK_N), gl.cdiv(row + BLOCK_M + sk - sq, BLOCK_N))": "    last_key = gl.minimum(sk - 1, row + BLOCK_M - 1 + sk - sq)\n    blocks = last_key // BLOCK_N + 1"
            },
            "q5_3": {
                "        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]  # public\n        p = gl.convert_layout(p_next.to(dtype), left)": "        p = gl.convert_layout(p_next.to(dtype), left)\n        factor = gl.convert_layout(alpha, gl.SliceLayout(1, output))\n        o *= factor[:, None]"
            },
            "q2_1": """
def owner(row, column, shape, size, threads, warps, order):
    places = (row, column)
    numbers = []
    for step, extent in (((1, 1), size), (size, threads), ([s * t for s, t in zip(size, threads)], warps)):
        coordinates = [places[d] // step[d] % extent[d] for d in (0, 1)]
        numbers.append(coordinates[order[0]] + coordinates[order[1]] * extent[order[0]])
    register, lane, warp = numbers
    whole = [s * t * w for s, t, w in zip(size, threads, warps)]
    copies = [shape[d] // whole[d] for d in (0, 1)]
    copy = [places[d] // whole[d] for d in (0, 1)]
    return warp, lane, register + math.prod(size) * (copy[order[0]] + copy[order[1]] * copies[order[0]])
""",
        },
    ),
    "gradients by einsum, queries of a group in one matrix": (
        "lab4_sdpa",
        {
            "bonus_2_4": """
def attention_backward(q, k, v, out, lse, dout):
    scale = q.shape[-1] ** -0.5
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    p = (scores - lse.unsqueeze(-1)).exp()
    dv = torch.einsum("bhij,bhid->bhjd", p, dout)
    dp = torch.einsum("bhid,bhjd->bhij", dout, v)
    ds = p * (dp - torch.einsum("bhid,bhid->bhi", dout, out).unsqueeze(-1)) * scale
    return torch.einsum("bhij,bhjd->bhid", ds, k), torch.einsum("bhij,bhid->bhjd", ds, q), dv
""",
            "q3_2": """
def attend_part(q, k, v):
    b, h, s, d = q.shape
    kv = k.shape[1]
    rows = q.float().reshape(b, kv, h // kv * s, d)
    scores = rows @ k.float().mT * d**-0.5
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.exp(scores - lse[..., None]) @ v.float()
    return out.reshape(b, h, s, d), lse.reshape(b, h, s)

def split_kv_attention(q, k, v, splits):
    ends = [k.shape[2] * (i + 1) // splits for i in range(splits)]
    starts = [0, *ends[:-1]]
    parts = [attend_part(q, k[:, :, a:e], v[:, :, a:e]) for a, e in zip(starts, ends) if e > a]
    outputs = torch.stack([o for o, _ in parts])
    lses = torch.stack([l for _, l in parts])
    weights = (lses - lses.amax(0)).exp()
    merged = (outputs * weights.unsqueeze(-1)).sum(0) / weights.sum(0).unsqueeze(-1)
    return merged.to(q.dtype)
""",
        },
    ),
    "a generator of reasons, a pin in a pin, bits as integers": (
        "lab4_sdpa",
        {
            "q1_3": """
def pinned_sdpa(backend, q, k, v, **options):
    refused = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with sdpa_kernel([BACKENDS[backend]]):
            try:
                return F.scaled_dot_product_attention(q, k, v, **options)
            except RuntimeError as error:
                refused = error
    raise BackendRefused("; ".join([backend, *why_not(backend, q, k, v, **options)])) from refused
""",
            "q5_2": """
def ulps_apart(a, b):
    def number(x):
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return torch.abs(number(a) - number(b))
""",
            "q4_3": """
def unpack_qkv(packed, heads, kv_heads):
    batch, length, width = packed.shape
    size = width // (heads + 2 * kv_heads)
    parts = torch.split(packed, [heads * size, kv_heads * size, kv_heads * size], dim=-1)
    return tuple(part.unflatten(-1, (-1, size)).permute(0, 2, 1, 3) for part in parts)

def ready_for_flash(x):
    if why_not("flash", x, x, x):
        return x.clone(memory_format=torch.contiguous_format)
    return x
""",
        },
    ),
    "errors by two norms, costs by adding rows, the fastest by sorting": (
        "lab4_sdpa",
        {
            "q2_2": """
def errors(out, q, k, v, causal=False):
    q, k, v = q.double(), k.double(), v.double()
    b, h, s, d = q.shape
    grouped = q.view(b, k.shape[1], -1, s, d)
    scores = grouped @ k.unsqueeze(2).mT / d**0.5
    if causal:
        scores = scores + torch.full((s, s), float("-inf"), dtype=scores.dtype, device=q.device).triu(1)
    exact = (scores.softmax(-1) @ v.unsqueeze(2)).reshape(out.shape)
    apart = out.double() - exact
    return float(apart.abs().amax()), float(apart.norm() / exact.norm())
""",
            "q2_1": """
def attention_costs(batch, heads, kv_heads, query_len, kv_len, head_dim, dtype, causal=False):
    seen = 0
    for query in range(query_len):
        seen += query + kv_len - query_len + 1 if causal else kv_len
    flops = 2 * (2 * head_dim) * seen * heads * batch
    tensors = batch * head_dim * (heads * query_len + kv_heads * kv_len + kv_heads * kv_len + heads * query_len)
    scores = batch * heads * query_len * kv_len
    return flops, tensors * dtype.itemsize, (tensors + 4 * scores) * dtype.itemsize
""",
            "q6_1": """
def fastest(grid):
    timed = grid.loc[grid["status"].eq("ok")].sort_values("ms", kind="stable")
    return timed.drop_duplicates("shape").set_index("shape")["backend"]

def default_slowdown(grid):
    timed = grid.loc[grid["status"].eq("ok")]
    best = timed.groupby("shape")["ms"].min()
    rows = timed.loc[timed["is_default"].astype(bool)]
    return pd.Series({row.shape_name: row.ms / best[row.shape_name] for row in rows.rename(columns={"shape": "shape_name"}).itertuples()})

def geometric_mean(values):
    return 2 ** (sum(math.log2(value) for value in values) / len(values))
""",
        },
    ),
}
