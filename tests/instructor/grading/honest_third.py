"""Twelve more honest students, three a lab: right answers in ways that nobody had written down here before the third cold round."""

from __future__ import annotations

STUDENTS: dict[str, tuple[str, dict]] = {
    "addcmul of columns and rows, GELU by one division, a softmax written out": (
        "lab1",
        {
            "q1_2": """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    strips = []
    for rows in a.split(tile_m, dim=0):
        blocks = []
        for columns in b.split(tile_n, dim=1):
            total = torch.zeros(rows.shape[0], columns.shape[1], dtype=torch.float64, device=a.device)
            for left, right in zip(rows.split(tile_k, dim=1), columns.split(tile_k, dim=0)):
                for x, y in zip(left.double().unbind(1), right.double().unbind(0)):
                    total.addcmul_(x[:, None], y[None, :])
            blocks.append(total.to(a.dtype))
        strips.append(torch.cat(blocks, dim=1))
    return torch.cat(strips, dim=0)
""",
            "q4_2": """
def gelu_by_hand(x):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    u = (2 / math.pi) ** 0.5 * wide * (1 + 0.044715 * wide.square())
    return (wide / (1 + torch.exp(-2 * u))).to(x.dtype)


def elementwise_bytes(numel, dtype, one_input, two_inputs):
    tensors = sum([2] * one_input) + sum([3] * two_inputs)
    return tensors * numel * dtype.itemsize


def fusion_speedup(one_input, two_inputs):
    return elementwise_bytes(1, torch.int8, one_input, two_inputs) / elementwise_bytes(1, torch.int8, 1, 0)
""",
            "q5_1": """
def standard_attention(q, k, v):
    scores = torch.matmul(q, k.mT).div(q.size(-1) ** 0.5)
    scores = scores.sub(scores.max(dim=-1, keepdim=True).values).exp()
    return torch.matmul(scores, v).div(scores.sum(dim=-1, keepdim=True))


def score_bytes(batch, heads, length, dtype):
    return math.prod((batch, heads, length, length, dtype.itemsize))


def longest_length(memory_bytes, batch, heads, dtype):
    low, high = 0, 1
    while 2 * score_bytes(batch, heads, high, dtype) <= memory_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if 2 * score_bytes(batch, heads, middle, dtype) <= memory_bytes:
            low = middle
        else:
            high = middle
    return low
""",
        },
    ),
    "statistics by logaddexp, pairs by a closed formula, a kernel that moves its pointers": (
        "lab1",
        {
            "q5_3": {
                "    m = l = None\n    for block in blocks:\n        if m is None:\n            m = torch.full_like(block[:, 0], -math.inf)\n            l = torch.zeros_like(m)\n        new_m = torch.maximum(m, block.amax(dim=1))\n        l = l * torch.exp(m - new_m) + torch.exp(block - new_m[:, None]).sum(dim=1)\n        m = new_m\n    return m, l\n": "    top = log_sum = None\n    for block in blocks:\n        largest, here = block.max(dim=1).values, block.logsumexp(dim=1)\n        top = largest if top is None else torch.maximum(top, largest)\n        log_sum = here if log_sum is None else torch.logaddexp(log_sum, here)\n    return top, torch.exp(log_sum - top)\n"
            },
            "q3_1": """
def attended_pairs(query_len, kv_len, window=None):
    first = kv_len - query_len + 1  # keys that the first query sees
    if window is None or window >= kv_len:
        return query_len * (first + kv_len) // 2
    if window <= first:
        return query_len * window
    growing = window - first
    return growing * (first + window - 1) // 2 + (query_len - growing) * window


def attention_macs_flops_bytes(batch, query_len, kv_len, config, dtype, window=None):
    tokens, hidden, size = batch * query_len, config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    macs = moved = 0
    for reads, writes in ((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)):
        macs += tokens * reads * writes
        moved += tokens * (reads + writes) + reads * writes
    macs += 2 * batch * queries * attended_pairs(query_len, kv_len, window)
    visible = kv_len if window is None else min(kv_len, query_len + window - 1)
    moved += 2 * tokens * queries + 2 * batch * visible * keys
    return macs, 2 * macs, moved * dtype.itemsize
""",
            "q1_5": {
                '    for start in range(0, K, BLOCK_K):\n        ks = start + tl.arange(0, BLOCK_K)\n        a_tile = tl.load(\n            a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak,\n            mask=(rows[:, None] < M) & (ks[None, :] < K), other=0.0,\n        )\n        b_tile = tl.load(\n            b_ptr + ks[:, None] * stride_bk + cols[None, :] * stride_bn,\n            mask=(ks[:, None] < K) & (cols[None, :] < N), other=0.0,\n        )\n        accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision="ieee")\n': '    ks = tl.arange(0, BLOCK_K)\n    a_at = a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak\n    b_at = b_ptr + ks[:, None] * stride_bk + cols[None, :] * stride_bn\n    for step in range(tl.cdiv(K, BLOCK_K)):\n        left = K - step * BLOCK_K\n        a_tile = tl.load(a_at, mask=(rows < M)[:, None] & (ks < left)[None, :], other=0.0)\n        b_tile = tl.load(b_at, mask=(ks < left)[:, None] & (cols < N)[None, :], other=0.0)\n        accumulator += tl.dot(a_tile, b_tile, input_precision="ieee")\n        a_at += BLOCK_K * stride_ak\n        b_at += BLOCK_K * stride_bk\n'
            },
        },
    ),
    "two passes over the tiles: all maxima first, then sums": (
        "lab1",
        {
            "q5_3": """
def online_softmax_stats(blocks):
    first = next(blocks)
    m = first.amax(dim=1)
    l = torch.exp(first - m.unsqueeze(1)).sum(dim=1)
    for block in blocks:
        here = block.amax(dim=1)
        higher = here > m
        l = torch.where(higher, l * torch.exp(m - here), l)
        m = torch.where(higher, here, m)
        l = l + torch.exp(block - m.unsqueeze(1)).sum(dim=1)
    return m, l


def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    scale = q.shape[-1] ** -0.5
    output = []
    for rows in q.float().split(tile_q, dim=2):
        tiles = [slice(at, at + tile_k) for at in range(0, k.shape[2], tile_k)]
        largest = torch.full_like(rows[..., 0], -math.inf)
        for tile in tiles:
            largest = torch.maximum(largest, (rows @ k[:, :, tile].float().mT * scale).amax(dim=-1))
        total, out = torch.zeros_like(largest), torch.zeros_like(rows)
        for tile in tiles:
            weights = torch.exp(rows @ k[:, :, tile].float().mT * scale - largest[..., None])
            total += weights.sum(dim=-1)
            out += weights @ v[:, :, tile].float()
        output.append((out / total[..., None]).to(q.dtype))
    return torch.cat(output, dim=2)
""",
            "bonus_5_7": """
def merge_attention(outputs, lses):
    output, lse = outputs[0].nan_to_num(0.0), lses[0]
    for part, new in zip(outputs[1:], lses[1:]):
        both = torch.logaddexp(lse, new)
        old = torch.where(lse == -math.inf, 0.0, torch.exp(lse - both))
        now = torch.where(new == -math.inf, 0.0, torch.exp(new - both))
        output = old.unsqueeze(-1) * output + now.unsqueeze(-1) * part.nan_to_num(0.0)
        lse = both
    return output, lse
""",
        },
    ),
    "weights by exp and a mask of ones, blocks by all and any": (
        "lab2_flexattention",
        {
            "q1_1": """
def masked_attention(q, k, v, mask):
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
    seen = mask.to(scores.dtype)
    scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp() * seen
    total = weights.sum(dim=-1, keepdim=True)
    return torch.einsum("bhij,bhjd->bhid", weights / total.where(total > 0, torch.ones_like(total)), v)
""",
            "q3_1": """
def count_blocks(mask, block):
    full = partial = 0
    rows, columns = -(-mask.shape[0] // block), -(-mask.shape[1] // block)
    for i in range(rows):
        for j in range(columns):
            part = mask[i * block : (i + 1) * block, j * block : (j + 1) * block]
            if part.all() and part.numel() == block * block:
                full += 1
            elif part.any():
                partial += 1
    return full, partial, rows * columns - full - partial
""",
            "q3_2": """
def block_flops(counts, block, batch, heads, head_dim):
    return sum(counts[:2]) * block * block * head_dim * heads * batch * 4


def promised_speedup(counts):
    full, partial, empty = counts
    return 1 + empty / (full + partial)


def document_blocks(length, span, block):
    across = length // block
    return across if span <= block else across * (span // block)
""",
        },
    ),
    "documents by searchsorted, an order by two stable sorts, starts of pages": (
        "lab2_flexattention",
        {
            "q2_2": """
def document_numbers(lengths, size, device):
    ends = torch.tensor(lengths, device=device).cumsum(0)
    if len(lengths) and int(ends[-1]) > size:
        raise ValueError("the documents are longer than the row")
    places = torch.arange(size, device=device)
    numbers = torch.searchsorted(ends, places, right=True)
    return numbers.masked_fill(numbers == len(lengths), -1)


def packed_documents(numbers):
    def mask_mod(b, h, q, k):
        mine, theirs = numbers[b, q], numbers[b, k]
        return (mine == theirs) & (mine != -1) & (k <= q)

    return mask_mod
""",
            "q7_1": """
def lay_out(conversation, position, window):
    order = position.argsort(stable=True)
    order = order[conversation[order].argsort(stable=True)]
    speaker, turn = conversation[order], position[order]

    def mask_mod(b, h, q, k):
        gap = turn[q] - turn[k]
        own = (speaker[q] == speaker[k]) & (gap >= 0)
        return torch.where(speaker[q] == 0, own, torch.where(speaker[k] == 0, True, own & (gap < window)))

    return order, mask_mod
""",
            "bonus_8_2": """
def paged_mask(mask_mod, owner, number, page_size):
    start = number * page_size

    def over_pool(b, h, q, k):
        page, inside = torch.div(k, page_size, rounding_mode="floor"), torch.remainder(k, page_size)
        return mask_mod(b, h, q, start[page] + inside) & owner[page].eq(b)

    return over_pool
""",
        },
    ),
    "a tensor of what exists, scores by partial and reduce, keys that are clipped": (
        "lab2_flexattention",
        {
            "q6_1": """
def bucketed_attention(attend, q, k, v, buckets):
    size = next((bucket for bucket in sorted(buckets) if bucket >= q.shape[2]), None)
    if size is None:
        raise ValueError("the text is longer than every bucket")
    exists = torch.arange(size, device=q.device) < q.shape[2]

    def mask_mod(b, h, i, j):
        return exists[j]

    padded = [torch.cat([t, t.new_zeros(*t.shape[:2], size - t.shape[2], t.shape[3])], dim=2) for t in (q, k, v)]
    return attend(*padded, mask_mod).narrow(2, 0, q.shape[2])
""",
            "q4_1": """
def soft_cap(cap):
    return lambda score, b, h, q, k: torch.tanh(score / cap) * cap


def alibi(slopes):
    def score_mod(score, b, h, q, k):
        distance = k - q
        return score + slopes[h] * distance

    return score_mod


def in_turn(*score_mods):
    def chain(score, b, h, q, k):
        return functools.reduce(lambda so_far, mod: mod(so_far, b, h, q, k), score_mods, score)

    return chain
""",
            "q4_2": """
def relative_bias(table):
    middle = (table.shape[1] - 1) // 2

    def score_mod(score, b, h, q, k):
        column = torch.clamp(q - k + middle, 0, 2 * middle)
        return (score + table[h, column]).to(score.dtype)

    return score_mod
""",
        },
    ),
    "owners by divmod, a tile of half the rows, a product that waits by itself": (
        "lab3_gluon",
        {
            "q2_1": """
def owner(row, column, shape, size, threads, warps, order):
    index = {0: row, 1: column}
    inside, lane, warp, again = {}, {}, {}, {}
    for axis in (0, 1):
        rest, inside[axis] = divmod(index[axis], size[axis])
        rest, lane[axis] = divmod(rest, threads[axis])
        again[axis], warp[axis] = divmod(rest, warps[axis])
    first, second = order
    times = shape[first] // (size[first] * threads[first] * warps[first])
    register = inside[first] + size[first] * inside[second]
    register += size[0] * size[1] * (again[first] + times * again[second])
    return warp[first] + warps[first] * warp[second], lane[first] + threads[first] * lane[second], register
""",
            "q4_1": {
                "        acc = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc, is_async=True)\n        acc = warpgroup_mma_wait(0, deps=[acc])  # public\n": "        across = b_tile.permute([1, 0])\n        acc = warpgroup_mma(a_tile, across, acc)\n"
            },
            "q5_1": {
                '    keys = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, scores))\n    s = gl.where((keys < sk)[None, :], s, float("-inf"))\n    top = gl.maximum(m, gl.max(s, 1))\n    alpha = gl.exp2((m - top) * c)\n    p = gl.exp2((s - top[:, None]) * c)\n    total = total * alpha + gl.sum(p, 1)\n': '    left = sk - key\n    exists = gl.arange(0, s.shape[1], gl.SliceLayout(0, scores))[None, :] < left\n    s = gl.where(exists, s * c, float("-inf"))\n    top = gl.maximum(m, gl.max(s, 1) / c)\n    alpha = gl.exp2(m * c - top * c)\n    p = gl.exp2(s - (top * c)[:, None])\n    total = gl.sum(p, 1) + alpha * total\n'
            },
        },
    ),
    "groups that are counted, barriers with one loop": (
        "lab3_gluon",
        {
            "q3_1": {
                "        ahead = i + STAGES - 1\n        if ahead < TILES:\n            start_copy(a_ring, ahead % STAGES, a_ptr, first + ahead * TILE, n, TILE, layout)\n            start_copy(b_ring, ahead % STAGES, b_ptr, first + ahead * TILE, n, TILE, layout)\n        async_copy.commit_group()\n": "        later = i + (STAGES - 1)\n        slot = later % STAGES\n        if later <= TILES - 1:\n            start_copy(b_ring, slot, b_ptr, first + later * TILE, n, TILE, layout)\n            start_copy(a_ring, slot, a_ptr, first + later * TILE, n, TILE, layout)\n        async_copy.commit_group()\n"
            },
            "q3_2": {
                "        more = i + STAGES < tiles\n        mbarrier.expect(full.index(slot), NBYTES, pred=more)\n        tma_load(x_desc, [row, (i + STAGES) * COLUMNS], full.index(slot), ring.index(slot), pred=more)\n        total += gl.sum(x * x, 1)\n": "        if i + STAGES < tiles:\n            mbarrier.expect(full.index(slot), NBYTES)\n            tma_load(x_desc, [row, (i + STAGES) * COLUMNS], full.index(slot), ring.index(slot))\n        squares = x * x\n        total = total + gl.sum(squares, axis=1)\n"
            },
            "bonus_5_5": {
                "    blocks = gl.minimum(gl.cdiv(sk, BLOCK_N), gl.cdiv(row + BLOCK_M + sk - sq, BLOCK_N))\n": "    last = gl.minimum(row + BLOCK_M, sq) - 1 + sk - sq\n    blocks = last // BLOCK_N + 1\n"
            },
        },
    ),
    "costs in steps, slots by adding up, a split with a counter of its own": (
        "lab3_gluon",
        {
            "q1_1": """
def tile_cycles(rows, keys, d):
    pairs = rows * keys
    flops = 4 * pairs * d
    loaded = sum(keys * d * torch.bfloat16.itemsize for _ in ("k", "v"))
    return flops / 4096, pairs / 16, loaded / 20


def shared_bytes(consumers, keys, d, stages):
    elements = consumers * 64 * d
    for _ in range(stages):
        elements += 2 * keys * d
    return elements * torch.bfloat16.itemsize


def registers_per_thread(keys, d):
    return (keys + d) / 2
""",
            "bonus_1_3": """
def bytes_in_flight(bandwidth_tb_s, latency_ns, sms):
    return bandwidth_tb_s * latency_ns * 1000 / sms


def slots_needed(bandwidth_tb_s, latency_ns, sms, slot_bytes):
    slots = 1
    while slots * slot_bytes < bytes_in_flight(bandwidth_tb_s, latency_ns, sms):
        slots += 1
    return slots
""",
            "q5_2": {
                "        mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)\n        tma_load(k_desc, [head, i * BLOCK_N, 0], full.index(slot), k_ring.index(slot))\n        tma_load(v_desc, [head, i * BLOCK_N, 0], full.index(slot), v_ring.index(slot))\n": "        here = full.index(slot)\n        key = i * BLOCK_N\n        mbarrier.expect(here, v_desc.block_type.nbytes + k_desc.block_type.nbytes)\n        tma_load(v_desc, [head, key, 0], here, v_ring.index(slot))\n        tma_load(k_desc, [head, key, 0], here, k_ring.index(slot))\n"
            },
        },
    ),
    "reasons by a function that shows warnings, parts in a loop, pairs of a mask": (
        "lab4_sdpa",
        {
            "q2_1": """
def attention_costs(batch, heads, kv_heads, query_len, kv_len, head_dim, dtype, causal=False):
    pairs = sum(min(kv_len, i + 1 + kv_len - query_len) if causal else kv_len for i in range(query_len))
    read = (heads * query_len + 2 * kv_heads * kv_len) * batch * head_dim
    written = heads * query_len * batch * head_dim
    fused = (read + written) * dtype.itemsize
    return 4 * batch * heads * head_dim * pairs, fused, fused + 4 * batch * heads * query_len * kv_len * dtype.itemsize
""",
            "q3_2": """
def attend_part(q, k, v):
    batch, heads, queries, size = q.shape
    grouped = q.float().reshape(batch, k.shape[1], -1, size)  # the queries of a group are more queries of one head
    scores = torch.matmul(grouped, k.float().transpose(2, 3)) / size**0.5
    largest = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - largest)
    total = weights.sum(dim=-1, keepdim=True)
    out = torch.matmul(weights, v.float()) / total
    return out.reshape(batch, heads, queries, size), (largest + total.log()).reshape(batch, heads, queries)


def split_kv_attention(q, k, v, splits):
    size, extra = divmod(k.shape[2], splits)
    merged = lse = None
    start = 0
    for part in range(splits):
        end = start + size + (part < extra)
        if end > start:
            out, new = attend_part(q, k[:, :, start:end], v[:, :, start:end])
            if merged is None:
                merged, lse = out, new
            else:
                both = torch.logaddexp(lse, new)
                merged = merged * torch.exp(lse - both)[..., None] + out * torch.exp(new - both)[..., None]
                lse = both
        start = end
    return merged.to(q.dtype)
""",
            "q3_3": """
def decode_us(programs, kv_len, splits, units, tile, tile_us, combine_us):
    keys = -(-kv_len // splits)
    took = -(-programs * splits // units) * -(-keys // tile) * tile_us
    return took if splits == 1 else took + combine_us


def best_splits(programs, kv_len, units, tile, tile_us, combine_us, most=64):
    return min(range(1, most + 1), key=lambda n: (decode_us(programs, kv_len, n, units, tile, tile_us, combine_us), n))
""",
        },
    ),
    "steps by the sign, results by a digest, views by narrow": (
        "lab4_sdpa",
        {
            "q5_2": """
def ulps_apart(a, b):
    first, second = (x.view(torch.int16).int() for x in (a, b))
    first, second = ((n & 0x7FFF) * torch.where(n < 0, -1, 1) for n in (first, second))
    return torch.abs(first - second)
""",
            "q5_3": """
import hashlib

def distinct_results(fn, runs):
    seen = []
    for _ in range(runs):
        result = fn()
        digest = hashlib.sha256()
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            digest.update(bytes(tensor.detach().cpu().contiguous().view(torch.uint8).flatten().tolist()))
        if digest.digest() not in seen:
            seen.append(digest.digest())
    return len(seen)
""",
            "q4_3": """
def unpack_qkv(packed, heads, kv_heads):
    size = packed.shape[2] // (heads + 2 * kv_heads)
    found, start = [], 0
    for count in (heads, kv_heads, kv_heads):
        part = packed.narrow(2, start, count * size)
        found.append(part.unflatten(2, (count, size)).permute(0, 2, 1, 3))
        start += count * size
    return tuple(found)


def ready_for_flash(x):
    if x.stride()[-1] != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    return x
""",
            "bonus_5_5": """
def quantize_fp8(x, block=None):
    wide = x.float()
    if block is None:
        parts = wide.abs().max().reshape(1, 1, 1, 1)
    else:
        short = -x.shape[2] % block
        padded = F.pad(wide.abs(), (0, 0, 0, short))
        parts = padded.unflatten(2, (-1, block)).amax(dim=(3, 4))[..., None]
    scale = parts / 448.0
    scale = scale.masked_fill(scale == 0, 1.0)
    return (wide / each(scale, block, x.shape[2])).to(torch.float8_e4m3fn), scale


def each(scale, block, length):
    if block is None:
        return scale
    return scale[:, :, torch.arange(length, device=scale.device) // block]


def dequantize_fp8(x8, scale, block=None):
    return x8.to(torch.float32) * each(scale, block, x8.shape[2])
""",
        },
    ),
    "tables by sorting, the nearest shape by a loop over rows": (
        "lab4_sdpa",
        {
            "q6_1": """
def fastest(grid):
    timed = grid.loc[grid["status"].eq("ok")].sort_values("ms", kind="stable")
    return timed.drop_duplicates("shape").set_index("shape")["backend"].sort_index()


def default_slowdown(grid):
    timed = grid.loc[grid["status"].eq("ok")]
    defaults = timed.loc[timed["is_default"].astype(bool)]
    least = timed.groupby("shape")["ms"].min()
    return pd.Series({row.shape_: row.ms / least[row.shape_] for row in defaults.rename(columns={"shape": "shape_"}).itertuples()}, dtype=float)


def geometric_mean(values):
    total = 0.0
    for value in values:
        total += math.log2(value)
    return 2 ** (total / len(values))
""",
            "bonus_6_4": """
def choose_backend(grid, call, able):
    best = None
    for row in grid.to_dict("records"):
        same = all(row[name] == call[name] for name in ("kind", "head_dim", "causal"))
        if row["status"] != "ok" or row["backend"] not in able or not same:
            continue
        far = sum((math.log2(row[name]) - math.log2(call[name])) ** 2 for name in ("batch", "heads", "kv_heads", "seq_len_q", "seq_len_kv"))
        found = (round(far, 9), row["shape"], row["ms"], row["backend"])
        if best is None or found[:3] < best[:3]:
            best = found
    return able[0] if best is None else best[3]
""",
            "q1_1": """
def backends_in(operators):
    found = []
    for operator in operators:
        name = operator.removeprefix("aten::_scaled_dot_product_")
        if name == operator:
            continue
        if name == "attention_math":
            found.append("math")
        elif name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
            found.append(name.split("_")[0])
    return found
""",
        },
    ),
}
