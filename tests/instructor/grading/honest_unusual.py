"""Twenty honest students: right answers to the labs' questions in ways that nobody had written down here before.

Some come close to what `attacks_shortcuts.py` forbids: products of two tiles by broadcasting, whole masks,
other exponentials on one block, a GELU by a sigmoid, derivatives by einsum.
"""

from __future__ import annotations

_LAB1_FLASH = '''
def online_softmax_stats(blocks):
    blocks = iter(blocks)
    first = next(blocks).clone()
    m = first.max(1).values
    l = (first - m.unsqueeze(1)).exp().sum(1)
    for x in blocks:
        top = x.max(1).values
        new = torch.where(top > m, top, m)
        l = l / torch.exp(new - m) + torch.exp2((x - new[:, None]) * math.log2(math.e)).sum(1)
        m = new
    return m, l


def product(a, b):
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    """Products of tiles by broadcasting, in float64; the sum is divided out at the end."""
    rows = []
    for q_tile in q.double().split(tile_q, dim=2):
        m = q_tile.new_full(q_tile.shape[:3], -torch.inf)
        l, o = torch.zeros_like(m), torch.zeros_like(q_tile)
        for k_tile, v_tile in zip(k.double().split(tile_k, 2), v.double().split(tile_k, 2), strict=True):
            s = product(q_tile, k_tile.mT) * q.shape[-1] ** -0.5
            new = torch.maximum(m, s.max(-1)[0])
            p = (s - new[..., None]).exp_()
            keep = (m - new).exp_()
            l, m = torch.addcmul(p.sum(-1), l, keep), new
            o = o * keep[..., None] + product(p, v_tile)
        rows.append((o / l[..., None]).to(q.dtype))
    return torch.cat(rows, dim=2)
'''
_CAUSAL_WITH_MASK = '''
def flash_attention_causal(q, k, v, tile_q=64, tile_k=64):
    """The mask of a tile is made as numbers to add; tiles above the diagonal are left out."""
    b, h, s, d = q.shape
    out = torch.zeros(b, h, s, d, dtype=q.dtype, device=q.device)
    for r0 in range(0, s, tile_q):
        r1 = min(r0 + tile_q, s)
        m = l = o = torch.full((), -math.inf, device=q.device).exp()
        m = m.log()
        for c0 in range(0, r1, tile_k):
            c1 = min(c0 + tile_k, s)
            x = torch.einsum("bhqd,bhkd->bhqk", q[:, :, r0:r1].float(), k[:, :, c0:c1].float()) / math.sqrt(d)
            x += torch.triu(torch.full((r1 - r0, c1 - c0), -math.inf, device=q.device), diagonal=r0 - c0 + 1)
            new = x.amax(-1, keepdim=True).clamp(min=m)
            p = torch.exp(x - new)
            a = torch.exp(m - new)
            l, o, m = a * l + p.sum(-1, keepdim=True), a * o + torch.matmul(p, v[:, :, c0:c1].float()), new
        out[:, :, r0:r1] = (o / l).to(q.dtype)
    return out
'''
_BY_HEAD = '''
def online_softmax_stats(blocks):
    stats = None
    for x in blocks:
        m = x.amax(1)
        l = torch.logsumexp(x - m[:, None], 1).exp()
        if stats is not None:
            top = torch.maximum(stats[0], m)
            l = l * (m - top).exp() + stats[1] * (stats[0] - top).exp()
            m = top
        stats = m, l
    return stats


class Running:
    """The softmax of one row of tiles of one head."""

    def __init__(self, rows, d):
        self.m, self.l, self.o = rows.new_full((len(rows), 1), -math.inf), 0.0, rows.new_zeros(len(rows), d)

    def take(self, s, v):
        new = torch.max(torch.cat([self.m, s], dim=1), dim=1, keepdim=True).values
        p, old = (s - new).exp(), (self.m - new).exp()
        self.l, self.o, self.m = self.l * old + p.sum(1, keepdim=True), self.o * old + p.mm(v), new

    def done(self):
        return self.o / self.l


def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    """One head at a time, with matrices of two dimensions."""
    out = torch.empty_like(q)
    q, k, v = q.float() * q.shape[-1] ** -0.5, k.float(), v.float()
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(0, q.shape[2], tile_q):
                row = Running(q[b, h, i : i + tile_q], q.shape[-1])
                for j in range(0, k.shape[2], tile_k):
                    row.take(q[b, h, i : i + tile_q] @ k[b, h, j : j + tile_k].T, v[b, h, j : j + tile_k])
                out[b, h, i : i + tile_q] = row.done().to(out.dtype)
    return out
'''
_ROWS = '''
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    """Tiles, and inside of each a column of A by a row of B at a time."""
    (m, k), n = a.shape, b.shape[1]
    c = a.new_zeros(m, n, dtype=torch.float64)
    for i in range(0, m, tile_m):
        for j in range(0, n, tile_n):
            block = c[i : i + tile_m, j : j + tile_n]
            for p in range(0, k, tile_k):
                for column, row in zip(a[i : i + tile_m, p : p + tile_k].unbind(1), b[p : p + tile_k, j : j + tile_n]):
                    block.sub_(column.neg()[:, None].double() * row[None])
    return c.to(a.dtype)
'''

# name -> (lab, {answer cell: its text})
STUDENTS: dict[str, tuple[str, dict[str, str]]] = {
    "products of tiles by broadcasting": ("lab1", {"q5_3": "import torch\nimport math\n" + _LAB1_FLASH}),
    "a mask of numbers, a GELU by a sigmoid, einsum": (
        "lab1",
        {
            "bonus_5_6": _CAUSAL_WITH_MASK,
            "q4_2": """
def gelu_by_hand(x):
    z = (8 / math.pi) ** 0.5 * torch.addcmul(x, x.pow(3), torch.tensor(0.044715, dtype=x.dtype, device=x.device))
    return x * torch.sigmoid(z)


def elementwise_bytes(numel, dtype, one_input, two_inputs):
    return sum((2,) * one_input + (3,) * two_inputs) * numel * torch.empty((), dtype=dtype).element_size()


def fusion_speedup(one_input, two_inputs):
    return one_input + two_inputs * 1.5
""",
            "q5_1": """
def standard_attention(q, k, v):
    s = torch.einsum("...qd,...kd->...qk", q / q.shape[-1] ** 0.5, k)
    e = (s - s.max(dim=-1, keepdim=True).values).exp()
    return torch.einsum("...qk,...kd->...qd", e / e.sum(-1, True), v)


def score_bytes(batch, heads, length, dtype):
    return math.prod((batch, heads, length, length, dtype.itemsize))


def longest_length(memory_bytes, batch, heads, dtype):
    import bisect

    return bisect.bisect_right(range(10**6), memory_bytes, key=lambda n: 2 * score_bytes(batch, heads, n, dtype)) - 1
""",
        },
    ),
    "one head at a time, and a merge two by two": (
        "lab1",
        {
            "q5_3": _BY_HEAD,
            "bonus_5_7": """
def merge_attention(outputs, lses):
    def two(one, other):
        (a, x), (b, y) = one, other
        both = torch.logaddexp(x, y)
        # a part without keys: its output may be NaN, and its weight is 0
        share = [torch.exp(z - both).nan_to_num(0.0).unsqueeze(-1) for z in (x, y)]
        parts = [torch.where(w > 0, w * o, torch.zeros_like(o)) for w, o in zip(share, (a, b))]
        return parts[0] + parts[1], both

    import functools
    empty = torch.zeros_like(outputs[0]), torch.full_like(lses[0], -math.inf)
    return functools.reduce(two, zip(outputs, lses), empty)
""",
        },
    ),
    "a column by a row at a time": ("lab1", {"q1_2": _ROWS}),
    "Python's numbers, pairs counted one by one, a bisection": (
        "lab1",
        {
            "q1_1": """
def gemm_naive(a, b):
    rows, inner, columns = len(a), a.shape[1], b.shape[-1]
    c = a.new_empty((rows, columns))
    for i in range(rows):
        for j in range(columns):
            c[i][j] = sum((float(a[i][k]) * float(b[k][j]) for k in range(inner)), start=0.0)
    return c
""",
            "q3_1": """
from itertools import product as every


def attended_pairs(query_len, kv_len, window=None):
    sees = lambda q, k: k <= q and (window is None or q - k < window)
    return sum(sees(q, k) for q, k in every(range(kv_len - query_len, kv_len), range(kv_len)))


def attention_macs_flops_bytes(batch, query_len, kv_len, config, dtype, window=None):
    c, rows = config, batch * query_len
    products = {"q": (c.hidden_size, c.num_attention_heads * c.head_dim), "o": (c.num_attention_heads * c.head_dim, c.hidden_size)}
    products |= dict.fromkeys("kv", (c.hidden_size, c.num_key_value_heads * c.head_dim))
    macs = sum(rows * i * o for i, o in products.values())
    numbers = sum(rows * i + i * o + rows * o for i, o in products.values())
    seen = sum(min(p + 1, window or p + 1) for p in range(kv_len - query_len, kv_len))
    macs += 2 * batch * c.num_attention_heads * c.head_dim * seen
    keys = min(kv_len, query_len + window - 1) if window else kv_len
    numbers += 2 * rows * c.num_attention_heads * c.head_dim + 2 * batch * keys * c.num_key_value_heads * c.head_dim
    return macs, macs * 2, numbers * dtype.itemsize
""",
            "bonus_1_6": """
def tiled_gemm_bytes(m, n, k, tile_m, tile_n, dtype):
    tiles = [(min(tile_m, m - i), min(tile_n, n - j)) for i in range(0, m, tile_m) for j in range(0, n, tile_n)]
    return sum(h * k + k * w + h * w for h, w in tiles) * dtype.itemsize


def largest_square_tile(fast_bytes, tile_k, dtype):
    low, high = 0, 1 << 20
    while high - low > 1:
        t = (low + high) // 2
        low, high = (t, high) if 4 * t * t + 2 * t * tile_k * dtype.itemsize <= fast_bytes else (low, t)
    return low
""",
        },
    ),
    "compiled, cached, in a module of one's own": (
        "lab1",
        {
            "q4_2": """
from pathlib import Path

Path("own_gelu.py").write_text('import math\\nimport torch\\n\\nSQRT = math.sqrt(2 / math.pi)\\n\\n@torch.compile\\n'
    'def gelu(x):\\n    return x / 2 * (1 + (SQRT * (x + 0.044715 * x**3)).tanh())\\n')

import functools
from own_gelu import gelu as gelu_by_hand


@functools.cache
def moved(one, two):
    return 2 * one + 3 * two


def elementwise_bytes(numel, dtype, one_input, two_inputs):
    return numel * dtype.itemsize * moved(one_input, two_inputs)


fusion_speedup = lambda one, two: moved(one, two) / 2
""",
            "q4_3": """
def kernels_per_step(fn):
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=kinds, schedule=default_schedule) as prof:
        for step in range(10):
            fn(), synchronize(), prof.step()
    return count_cuda_kernels(prof)["total"]
""",
        },
    ),
    # ---- lab 2
    "objects and partials as masks": (
        "lab2_flexattention",
        {
            "q2_1": """
from functools import partial
from operator import and_, or_


def causal(b, h, q, k):
    return torch.ge(q, k)


class Window:
    def __init__(self, width):
        self.width = width

    def __call__(self, b, h, q, k):
        distance = q - k
        return torch.logical_and(distance >= 0, distance < self.width)


sliding_window = Window


def _prefix(prefix, b, h, q, k):
    return ~((k >= prefix) & (k > q))


def prefix_lm(prefix):
    return partial(_prefix, prefix)
""",
            "q2_3": """
from functools import reduce


def joined(join):
    def compose(*mods):
        def mod(b, h, q, k):
            first, *others = (mod(b, h, q, k) for mod in mods)
            return reduce(join, others, first)
        return mod
    return compose


both, either = joined(torch.logical_and), joined(torch.logical_or)


def window_per_head(windows):
    return lambda b, h, q, k: both(lambda *x: x[3] <= x[2], lambda b, h, q, k: k > q - windows[h])(b, h, q, k)


def sinks_and_window(sinks, window):
    def mod(b, h, q, k):
        near, sink = q - k < window, k < sinks
        return torch.where(q >= k, near | sink, torch.zeros_like(near | sink))
    return mod
""",
        },
    ),
    "blocks counted by pooling, and by NumPy": (
        "lab2_flexattention",
        {
            "q3_1": """
def count_blocks(mask, block):
    right, below = -mask.shape[1] % block, -mask.shape[0] % block
    numbers = F.pad(mask.float(), (0, right, 0, below))[None, None]
    share = F.avg_pool2d(numbers, block, divisor_override=1)
    full, empty = share.eq(block * block).sum().item(), share.eq(0).sum().item()
    return full, share.numel() - full - empty, empty
""",
            "q1_2": """
import numpy as np


def mask_costs(mask, batch, heads, head_dim, dtype):
    seen = np.asarray(mask.cpu())
    hidden = np.count_nonzero(~seen)
    return float(seen.mean()), int(hidden) * 4 * head_dim * batch * heads, seen.size * batch * heads * dtype.itemsize
""",
            "q1_1": """
def masked_attention(q, k, v, mask):
    s = torch.einsum("bhsd,bhld->bhsl", q, k).div_(q.shape[-1] ** 0.5)
    e = torch.where(mask, s - s.masked_fill(~mask, float("-inf")).amax(-1, True).nan_to_num(neginf=0.0), -torch.inf).exp()
    return e @ v / e.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
""",
        },
    ),
    "a row of blocks by einsum and a running softmax": (
        "lab2_flexattention",
        {
            "q3_3": """
def block_sparse_attention(q, k, v, block_mask):
    \"\"\"Online over the blocks of a row, so that one block of scores is there at a time.\"\"\"
    size_q, size_k = block_mask.BLOCK_SIZE
    scale, zero = q.shape[-1] ** -0.5, torch.tensor(0, device=q.device)
    rows = []
    for i, part in enumerate(q.float().split(size_q, 2)):
        m = part.new_full((*part.shape[:3], 1), -1e30)
        l, o = torch.zeros_like(m), torch.zeros_like(part)
        visits = [(int(j), True) for j in block_mask.kv_indices[0, 0, i][: block_mask.kv_num_blocks[0, 0, i]]]
        visits += [(int(j), False) for j in block_mask.full_kv_indices[0, 0, i][: block_mask.full_kv_num_blocks[0, 0, i]]]
        for j, asks in visits:
            at = slice(j * size_k, (j + 1) * size_k)
            s = torch.einsum("bhqd,bhkd->bhqk", part, k[:, :, at].float()) * scale
            if asks:
                place = torch.arange(i * size_q, (i + 1) * size_q, device=q.device)[:, None]
                s = torch.where(block_mask.mask_mod(zero, zero, place, torch.arange(at.start, at.stop, device=q.device)[None]), s, -1e38)
            new = torch.maximum(m, s.amax(-1, True))
            p, keep = torch.exp(s - new), torch.exp(m - new)
            l, o, m = l * keep + p.sum(-1, True), o * keep + p @ v[:, :, at].float(), new
        rows.append(torch.where(l > 0, o / l.clamp(min=1e-30), 0.0).to(q.dtype))
    return torch.cat(rows, 2)
"""
        },
    ),
    "scores by closures with defaults, a layout by sort": (
        "lab2_flexattention",
        {
            "q4_1": """
def soft_cap(cap):
    return lambda score, *place, cap=cap: (score / cap).tanh() * cap


def alibi(slopes):
    def bend(score, b, h, q, k, slopes=slopes):
        return torch.sub(score, torch.mul(slopes[h], q - k))
    return bend


def in_turn(*mods):
    if not mods:
        return lambda score, *place: score
    *before, last = mods
    return lambda score, *place: last(in_turn(*before)(score, *place), *place)
""",
            "q7_1": """
def lay_out(conversation, position, window):
    keys = list(zip(conversation.tolist(), position.tolist()))
    order = torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), device=conversation.device)
    who, at = conversation.index_select(0, order), position.index_select(0, order)

    def mask_mod(b, h, q, k):
        common = who[k] == 0
        own = (who[q] == who[k]) & (at[q] >= at[k]) & (common | (at[q] < at[k] + window))
        return own | (common & (who[q] != 0))

    return order, mask_mod
""",
        },
    ),
    "documents by bincount, texts by masks": (
        "lab2_flexattention",
        {
            "q2_2": """
def document_numbers(lengths, size, device):
    ends = list(__import__("itertools").accumulate(lengths))
    if ends and ends[-1] > size:
        raise ValueError("the documents do not fit")
    numbers = torch.tensor([sum(at >= end for end in ends) for at in range(size)], device=device)
    return numbers.where(numbers < len(lengths), -1)


def packed_documents(numbers):
    def mask_mod(b, h, q, k):
        mine, theirs = numbers[b][q] if numbers.ndim == 1 else numbers[b, q], numbers[b, k]
        return torch.stack([mine == theirs, mine != -1, q >= k]).all(0) if mine.ndim == 0 and q.ndim == 0 else (
            (mine == theirs) & (mine != -1) & (q >= k))
    return mask_mod
""",
            "bonus_8_3": """
def ragged_attention(attend, texts):
    lengths = [text[0].shape[1] for text in texts]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    number = torch.searchsorted(starts[1:].contiguous(), torch.arange(sum(lengths)), right=True)
    number = number.to(texts[0][0].device)
    joined = [torch.concatenate([text[i] for text in texts], 1).unsqueeze(0) for i in range(3)]
    out = attend(*joined, lambda b, h, q, k: torch.logical_and(number[q] == number[k], q >= k)).squeeze(0)
    return [out[:, a:b] for a, b in zip(starts[:-1].tolist(), starts[1:].tolist())]
""",
        },
    ),
    # ---- lab 4
    "parts by einsum, merged by a running logaddexp": (
        "lab4_sdpa",
        {
            "q3_2": """
def attend_part(q, k, v):
    b, h, s, d = q.shape
    q = q.float().unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bgrqd,bgkd->bgrqk", q, k.float()) / d**0.5
    top = scores.amax(-1, keepdim=True)
    e = torch.exp(scores - top)
    total = e.sum(-1, keepdim=True)
    out = torch.einsum("bgrqk,bgkd->bgrqd", e, v.float()) / total
    return out.flatten(1, 2), (top + total.log()).squeeze(-1).flatten(1, 2)


def split_kv_attention(q, k, v, splits):
    ends = [round(i * k.shape[2] / splits) for i in range(splits + 1)]
    out = lse = None
    for a, b in zip(ends, ends[1:]):
        if a == b:
            continue
        o, l = attend_part(q, k[:, :, a:b], v[:, :, a:b])
        if out is None:
            out, lse = o, l
        else:
            new = torch.logaddexp(lse, l)
            out, lse = out * (lse - new).exp()[..., None] + o * (l - new).exp()[..., None], new
    return out.to(q.dtype)
""",
            "bonus_2_4": """
def attention_backward(q, k, v, out, lse, dout):
    e = lambda rule, *x: torch.einsum(rule, *x)
    c = q.shape[-1] ** -0.5
    p = (e("bhqd,bhkd->bhqk", q, k) * c - lse.unsqueeze(-1)).exp()
    dv = e("bhqk,bhqd->bhkd", p, dout)
    ds = p * (e("bhqd,bhkd->bhqk", dout, v) - e("bhqd,bhqd->bhq", dout, out).unsqueeze(-1)) * c
    return e("bhqk,bhkd->bhqd", ds, k), e("bhqk,bhqd->bhkd", ds, q), dv
""",
        },
    ),
    "errors by SDPA, costs by adding up": (
        "lab4_sdpa",
        {
            "q2_2": """
def errors(out, q, k, v, causal=False):
    right = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True)
    wrong = out.double().sub(right)
    return torch.linalg.vector_norm(wrong, float("inf")).item(), (wrong.norm() / right.norm()).item()
""",
            "q2_1": """
def attention_costs(batch, heads, kv_heads, query_len, kv_len, head_dim, dtype, causal=False):
    visible = [kv_len - query_len + i + 1 if causal else kv_len for i in range(query_len)]
    flops = sum(2 * 2 * head_dim * n for n in visible) * batch * heads
    rows = {"q": heads * query_len, "o": heads * query_len, "k": kv_heads * kv_len, "v": kv_heads * kv_len}
    fused = sum(rows.values()) * batch * head_dim * dtype.itemsize
    return flops, fused, fused + 4 * dtype.itemsize * batch * heads * query_len * kv_len
""",
            "q5_2": """
def ulps_apart(a, b):
    def line(x):
        whole = x.contiguous().view(torch.int16).long() & 0xFFFF
        size = whole & 0x7FFF
        return torch.where(whole >= 0x8000, -size, size)
    return torch.abs(line(a) - line(b))
""",
        },
    ),
    "tables by loops": (
        "lab4_sdpa",
        {
            "q6_1": """
def fastest(grid):
    best = {}
    for row in grid[grid.status.eq("ok")].itertuples():
        if row.shape not in best or row.ms < best[row.shape].ms:
            best[row.shape] = row
    return pd.Series({shape: row.backend for shape, row in sorted(best.items())}, name="backend")


def default_slowdown(grid):
    ok = grid.query("status == 'ok'")
    table = ok.pivot_table(index="shape", values="ms", aggfunc="min").join(
        ok.loc[ok.is_default, ["shape", "ms"]].set_index("shape"), rsuffix="_default", how="inner")
    return table.ms_default / table.ms


def geometric_mean(values):
    import numpy as np

    return float(np.exp(np.mean(np.log(np.asarray(values, dtype=float)))))
""",
            "q5_3": """
def distinct_results(fn, runs):
    import hashlib

    def digest(result):
        parts = [result] if isinstance(result, torch.Tensor) else result
        made = hashlib.sha256()
        for part in parts:
            made.update(bytes(part.detach().cpu().contiguous().flatten().view(torch.uint8).tolist()))
        return made.hexdigest()

    return len({digest(fn()) for _ in range(runs)})
""",
        },
    ),
    "views by chunks, and strides by as_strided": (
        "lab4_sdpa",
        {
            "q4_3": """
def unpack_qkv(packed, heads, kv_heads):
    d = packed.shape[-1] // (heads + 2 * kv_heads)
    ends = [heads * d, (heads + kv_heads) * d]
    parts = torch.tensor_split(packed, ends, dim=-1)
    return tuple(part.view(*part.shape[:2], -1, d).permute(0, 2, 1, 3) for part in parts)


def ready_for_flash(x):
    *_, step = x.stride()
    return x.clone(memory_format=torch.contiguous_format) if step != 1 else x
""",
            "q4_1": """
def knocked_out_by_strides(x):
    made = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)[..., ::2]
    return made.copy_(x)


def strided_and_fast(x):
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide.narrow(-1, 0, x.shape[-1])
""",
        },
    ),
    "a dispatcher by generators": (
        "lab4_sdpa",
        {
            "q1_4": """
def dispatch(order, allowed, reasons, set_priority=False):
    asked = (name for name in (allowed if set_priority else order))
    found = next((name for name in asked if name in set(allowed) and len(reasons.get(name, [])) == 0), None)
    if found is None:
        raise BackendRefused(", ".join(allowed))
    return found
""",
            "q1_1": """
import re


def backends_in(operators):
    form = re.compile(r"aten::_scaled_dot_product_(?:(flash|efficient|cudnn)_attention(?:_for_cpu)?|attention_(math))")
    return [m[1] or m[2] for m in map(form.fullmatch, operators) if m]
""",
            "q3_3": """
def decode_us(programs, kv_len, splits, units, tile, tile_us, combine_us):
    up = lambda a, b: -(-a // b)
    return up(programs * splits, units) * up(up(kv_len, splits), tile) * tile_us + combine_us * (splits != 1)


def best_splits(programs, kv_len, units, tile, tile_us, combine_us, most=64):
    return min(range(1, most + 1), key=lambda n: (decode_us(programs, kv_len, n, units, tile, tile_us, combine_us), n))
""",
        },
    ),
    # ---- lab 3: {text of the model answer: what stands there instead}, for files of kernels
    "owner by powers of two": (
        "lab3_gluon",
        {
            "q2_1": """
import numpy as np


def owner(row, column, shape, size, threads, warps, order):
    at, found = np.array((row, column)), []
    for extent in (size, threads, warps, [n // (a * b * c) for n, a, b, c in zip(shape, size, threads, warps)]):
        inside, at = at % extent, at // np.array(extent)
        fast, slow = order
        found.append(int(inside[fast] + extent[fast] * inside[slow]))
    piece, lane, warp, again = found
    return warp, lane, piece + int(np.prod(size)) * again
""",
            "q1_1": """
def tile_cycles(rows, keys, d):
    macs, exponentials, loaded = 2 * rows * keys * d, rows * keys, 2 * keys * d
    return macs * 2 / 4096, exponentials / (4 * 4), loaded * 2 / 20


def shared_bytes(consumers, keys, d, stages):
    import torch
    half = torch.bfloat16.itemsize
    return half * d * (64 * consumers + 2 * stages * keys)


def registers_per_thread(keys, d):
    return (keys + d) / 2
""",
        },
    ),
    "copies ahead in another order": (
        "lab3_gluon",
        {
            "q3_1": {
                "for i in gl.static_range(STAGES - 1):\n": "for i in range(0, STAGES - 1):\n",
                "        ahead = i + STAGES - 1\n        if ahead < TILES:\n": "        ahead = i + (STAGES - 1)\n"
                "        if TILES - ahead > 0:\n",
                "        total = a_ring.index(i % STAGES).load(layout) + b_ring.index(i % STAGES).load(layout)\n": (
                    "        slot = i % STAGES\n        total = a_ring.index(slot).load(layout)\n"
                    "        total += b_ring.index(slot).load(layout)\n"
                ),
            },
            "q3_2": {
                "        more = i + STAGES < tiles\n": "        total += gl.sum(x * x, 1)\n        more = tiles > i + STAGES\n",
                "ring.index(slot), pred=more)\n        total += gl.sum(x * x, 1)\n": "ring.index(slot), pred=more)\n",
            },
        },
    ),
    "a softmax in natural exponentials": (
        "lab3_gluon",
        {
            "q5_1": {
                "    alpha = gl.exp2((m - top) * c)\n    p = gl.exp2((s - top[:, None]) * c)\n": (
                    "    natural = c * 0.6931471805599453\n    alpha = gl.exp((m - top) * natural)\n"
                    "    p = gl.exp((s - gl.expand_dims(top, 1)) * natural)\n"
                ),
                "total = total * alpha + gl.sum(p, 1)": "total = gl.sum(p, 1) + alpha * total",
            },
            "q2_2": {
                "gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])": "gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])",
                "gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])": "gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])",
            },
        },
    ),
    "the products issued in the other order": (
        "lab3_gluon",
        {
            "q5_3": {
                "p_next, m, total, alpha = online_softmax(s, m, total, c)\n        o = warpgroup_mma_wait(0, deps=[o])": (
                    "following, m, total, alpha = online_softmax(s, m, total, c)\n"
                    "        o = warpgroup_mma_wait(num_outstanding=0, deps=[o])"
                ),
                "p = gl.convert_layout(p_next.to(dtype), left)\n    # The last": (
                    "p = gl.convert_layout(following.to(dtype), left)\n    # The last"
                ),
            },
            "bonus_5_5": {
                "blocks = gl.minimum(gl.cdiv(sk, BLOCK_N), gl.cdiv(row + BLOCK_M + sk - sq, BLOCK_N))": (
                    "last = gl.minimum(sk, row + BLOCK_M + sk - sq)\n    blocks = (last + BLOCK_N - 1) // BLOCK_N"
                )
            },
        },
    ),
}
