"""Twenty more honest students of labs 1 and 2, each with a style: what narrow lists of words have to let through."""

from __future__ import annotations

_WAIT = "    synchronize()\n"
_GELU_COUNTS = """

def elementwise_bytes(numel, dtype, one_input, two_inputs):
    return numel * dtype.itemsize * (2 * one_input + 3 * two_inputs)


def fusion_speedup(one_input, two_inputs):
    return one_input + 1.5 * two_inputs
"""
_SCORE_COUNTS = """

def score_bytes(batch, heads, length, dtype):
    return batch * heads * length**2 * dtype.itemsize


def longest_length(memory_bytes, batch, heads, dtype):
    return math.isqrt(memory_bytes // (2 * batch * heads * dtype.itemsize))
"""
_NUMBERS = """
def document_numbers(lengths, size, device):
    if sum(lengths) > size:
        raise ValueError(f"{sum(lengths)} tokens do not fit into {size}")
    lengths = [*lengths, size - sum(lengths)]
    marks = [*range(len(lengths) - 1), -1]
    return torch.tensor(marks, device=device).repeat_interleave(torch.tensor(lengths, device=device))
"""

STUDENTS: dict[str, tuple[str, dict]] = {
    # ---- lab 1
    "dataclasses and type hints": (
        "lab1",
        {
            "q1_2": '''
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Rows or columns of a tile."""

    start: int
    stop: int

    @property
    def at(self) -> slice:
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


def spans(size: int, tile: int) -> list[Span]:
    return [Span(start, min(start + tile, size)) for start in range(0, size, tile)]


def gemm_tiled(a: torch.Tensor, b: torch.Tensor, tile_m: int = 64, tile_n: int = 64, tile_k: int = 64) -> torch.Tensor:
    assert a.ndim == b.ndim == 2, "two matrices"
    assert a.shape[1] == b.shape[0], f"{a.shape} and {b.shape} do not fit"
    wide: torch.dtype = torch.promote_types(a.dtype, torch.float32)
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    for rows in spans(a.shape[0], tile_m):
        for cols in spans(b.shape[1], tile_n):
            acc = torch.zeros((len(rows), len(cols)), dtype=wide, device=a.device)
            for inner in spans(a.shape[1], tile_k):
                left, right = a[rows.at, inner.at].to(wide), b[inner.at, cols.at].to(wide)
                acc.add_(torch.sum(left[..., None] * right[None, ...], dim=1))
            c[rows.at, cols.at] = acc.to(c.dtype)
    return c
''',
            "bonus_5_7": '''
from dataclasses import dataclass


@dataclass
class Running:
    """What is merged so far."""

    output: torch.Tensor
    lse: torch.Tensor

    def take(self, output: torch.Tensor, lse: torch.Tensor) -> None:
        new = torch.logaddexp(self.lse, lse)
        old_share, new_share = (torch.exp(x - new).nan_to_num(0.0).unsqueeze(-1) for x in (self.lse, lse))
        output = torch.where(torch.isneginf(lse).unsqueeze(-1), torch.zeros_like(output), output)
        self.output = old_share * self.output + new_share * output
        self.lse = new


def merge_attention(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    running = Running(torch.zeros_like(outputs[0]), torch.full_like(lses[0], -math.inf))
    for output, lse in zip(outputs, lses):
        running.take(output, lse)
    return running.output, running.lse
''',
        },
    ),
    "einsum where it is allowed, named tuples": (
        "lab1",
        {
            "q5_1": """
def standard_attention(q, k, v):
    d = q.size(-1)
    scores = torch.einsum("bhid,bhjd->bhij", q, k).div(d**0.5)
    shifted = scores - scores.max(dim=-1, keepdim=True).values
    p = shifted.exp()
    p = p / p.sum(-1, keepdim=True)
    return torch.einsum("bhij,bhjd->bhid", p, v)
"""
            + _SCORE_COUNTS,
            "q5_3": """
from typing import NamedTuple


class Stats(NamedTuple):
    m: torch.Tensor
    l: torch.Tensor


def online_softmax_stats(blocks):
    stats = None
    for block in blocks:
        m = block.max(dim=1).values
        l = block.sub(m.unsqueeze(1)).exp().sum(1)
        if stats is not None:
            top = torch.maximum(stats.m, m)
            l = stats.l * (stats.m - top).exp() + l * (m - top).exp()
            m = top
        stats = Stats(m=m, l=l)
    return tuple(stats)


def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    scale = q.shape[-1] ** -0.5
    rows = []
    for qs in q.split(tile_q, dim=2):
        qs = qs.float() * scale
        out, m, l = torch.zeros_like(qs), None, None
        for ks, vs in zip(k.split(tile_k, dim=2), v.split(tile_k, dim=2)):
            s = torch.einsum("bhid,bhjd->bhij", qs, ks.float())
            top = s.amax(-1)
            top = top if m is None else torch.maximum(m, top)
            p = (s - top[..., None]).exp_()
            if m is None:
                l, out = p.sum(-1), torch.einsum("bhij,bhjd->bhid", p, vs.float())
            else:
                c = (m - top).exp()
                l = l * c + p.sum(-1)
                out = out * c[..., None] + torch.einsum("bhij,bhjd->bhid", p, vs.float())
            m = top
        rows.append((out / l[..., None]).to(q.dtype))
    return torch.cat(rows, dim=2)
""",
        },
    ),
    "in place wherever torch can": (
        "lab1",
        {
            "q1_1": """
def gemm_naive(a, b):
    c = torch.zeros((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    for i, row in enumerate(a):
        for j in range(b.size(1)):
            cell = c[i, j]
            for x, y in zip(row, b[:, j]):
                cell.add_(x * y)
    return c
""",
            "q4_2": """
def gelu_by_hand(x):
    inner = x.pow(3).mul_(0.044715).add_(x).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)
"""
            + _GELU_COUNTS,
            "q5_3": """
def online_softmax_stats(blocks):
    blocks = iter(blocks)
    first = next(blocks)
    m = first.amax(1)
    l = torch.exp(first - m.unsqueeze(-1)).sum(-1)
    for block in blocks:
        top = torch.max(m, block.amax(1))
        l.mul_(torch.exp(m.sub_(top))).add_(torch.exp(block - top.unsqueeze(-1)).sum(-1))
        m = top
    return m, l


def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for i in range(0, q.size(2), tile_q):
        mine = q[:, :, i : i + tile_q].to(torch.float32)
        acc = torch.zeros(mine.shape, device=q.device)
        m = mine.new_full((*mine.shape[:-1], 1), float("-inf"))
        l = mine.new_zeros((*mine.shape[:-1], 1))
        for j in range(0, k.size(2), tile_k):
            s = torch.matmul(mine, k[:, :, j : j + tile_k].to(torch.float32).mT)
            s.mul_(1.0 / math.sqrt(q.size(-1)))
            top = torch.maximum(m, s.max(-1, keepdim=True)[0])
            s.sub_(top).exp_()
            old = m.sub_(top).exp_()
            l.mul_(old).add_(s.sum(-1, keepdim=True))
            acc.mul_(old).add_(torch.matmul(s, v[:, :, j : j + tile_k].to(torch.float32)))
            m = top
        out[:, :, i : i + tile_q].copy_(acc.div_(l))
    return out
""",
        },
    ),
    "comprehensions, walrus and functools": (
        "lab1",
        {
            "q1_1": """
from itertools import product


def gemm_naive(a, b):
    (m, inner), n = a.shape, b.shape[1]
    c = a.new_zeros((m, n))
    for i, j in product(range(m), range(n)):
        total = a.new_zeros(())
        for k in range(inner):
            total = torch.addcmul(total, a[i, k], b[k, j])
        c[i, j] = total
    return c
""",
            "q1_2": """
import functools
from itertools import accumulate


def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32

    def times(x, y):
        return (x.unsqueeze(-1) * y.unsqueeze(0)).sum(1)

    def tile(x, y):
        pairs = zip(x.split(tile_k, 1), y.split(tile_k, 0))
        parts = (times(p.to(wide), r.to(wide)) for p, r in pairs)
        return functools.reduce(lambda s, t: s + t, parts).to(a.dtype)

    return torch.cat([torch.cat([tile(x, y) for y in b.split(tile_n, 1)], 1) for x in a.split(tile_m, 0)], 0)
""",
            "bonus_5_7": """
def merge_attention(outputs, lses):
    top = lses.max(dim=0, keepdim=True).values
    weights = (lses - top).exp()
    total = weights.sum(0)
    parts = [torch.where((w > 0)[..., None], w[..., None] * o, 0.0) for w, o in zip(weights, outputs)]
    return sum(parts) / total[..., None], top[0] + total.log()
""",
        },
    ),
    "from scratch in the words of a blog on flash attention": (
        "lab1",
        {
            "q5_3": '''
NEG_INF = -1e10
EPSILON = 1e-10


def online_softmax_stats(blocks):
    m_i, l_i = None, None
    for x_ij in blocks:
        m_block = torch.max(x_ij, dim=-1).values
        l_block = torch.sum(torch.exp(x_ij - m_block[:, None]), dim=-1)
        if m_i is None:
            m_i, l_i = m_block, l_block
            continue
        m_new = torch.maximum(m_i, m_block)
        l_i = torch.exp(m_i - m_new) * l_i + torch.exp(m_block - m_new) * l_block
        m_i = m_new
    return m_i, l_i


def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    """Algorithm 1 of the paper, queries outside."""
    scale = 1 / math.sqrt(q.shape[-1])
    Q_BLOCKS = torch.split(q, tile_q, dim=2)
    K_BLOCKS = torch.split(k, tile_k, dim=2)
    V_BLOCKS = torch.split(v, tile_k, dim=2)
    O_BLOCKS = []
    for Qi in Q_BLOCKS:
        Qi = Qi.float() * scale
        Oi = torch.zeros_like(Qi)
        li = torch.zeros_like(Qi[..., :1])
        mi = torch.ones_like(Qi[..., :1]) * float("-inf")
        for Kj, Vj in zip(K_BLOCKS, V_BLOCKS):
            S_ij = Qi @ Kj.float().transpose(-1, -2)
            m_block, _ = torch.max(S_ij, dim=-1, keepdim=True)
            P_ij = torch.exp(S_ij - m_block)
            l_block = torch.sum(P_ij, dim=-1, keepdim=True)
            m_new = torch.maximum(m_block, mi)
            li_new = torch.exp(mi - m_new) * li + torch.exp(m_block - m_new) * l_block
            Oi = torch.exp(mi - m_new) * Oi + torch.exp(m_block - m_new) * (P_ij @ Vj.float())
            li, mi = li_new, m_new
        O_BLOCKS.append((Oi / li).to(q.dtype))
    return torch.cat(O_BLOCKS, dim=2)
''',
            "bonus_5_7": """
import functools


def _update(out, lse, block_out, block_lse):
    empty = torch.isinf(block_lse)[..., None]
    block_out = torch.where(empty, torch.zeros_like(block_out), block_out)
    new = lse + torch.log1p(torch.exp(block_lse - lse)) if not torch.isinf(lse).any() and not empty.any() and (
        (block_lse - lse).max() < 80) else torch.logaddexp(lse, block_lse)
    keep, add = torch.exp(lse - new), torch.exp(block_lse - new)
    keep, add = keep.masked_fill(torch.isinf(lse), 0.0), add.masked_fill(torch.isinf(block_lse), 0.0)
    return keep.unsqueeze(-1) * out + add.unsqueeze(-1) * block_out, new


def merge_attention(outputs, lses):
    out, lse = torch.zeros_like(outputs[0]), torch.full_like(lses[0], float("-inf"))
    for i in range(outputs.shape[0]):
        out, lse = _update(out, lse, outputs[i], lses[i])
    return out, lse
""",
        },
    ),
    "GELU by sigmoid, loops over heads, attention by bmm": (
        "lab1",
        {
            "q4_2": """
ROOT = (2 / math.pi) ** 0.5


def gelu_by_hand(x):
    u = ROOT * (x + 0.044715 * x**3)
    return x * torch.sigmoid(2 * u)
"""
            + _GELU_COUNTS,
            "q5_1": """
def standard_attention(q, k, v):
    b, h, n, d = q.shape
    q, k, v = (x.reshape(b * h, n, d) for x in (q, k, v))
    scores = torch.baddbmm(q.new_zeros(b * h, n, n), q, k.transpose(1, 2), beta=0, alpha=1 / math.sqrt(d))
    log_sum = torch.logsumexp(scores, dim=-1, keepdim=True)
    return torch.bmm(torch.exp(scores - log_sum), v).view(b, h, n, d)
"""
            + _SCORE_COUNTS,
            "q5_2": """
def attention_bshd(q, k, v):
    heads, kv_heads = q.shape[2], k.shape[2]
    q, k, v = [x.movedim(1, 2) for x in (q, k, v)]
    if heads != kv_heads:
        group = heads // kv_heads
        k = k[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)
        v = v[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)
    tokens = q.shape[2]
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1 / math.sqrt(q.shape[-1]))
    return out.movedim(2, 1).contiguous()
""",
        },
    ),
    "exponentials in GELU, own asserts and prints": (
        "lab1",
        {
            "q4_2": """
def gelu_by_hand(x):
    if not x.is_floating_point():
        raise TypeError(f"real numbers only, not {x.dtype}")
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    c = torch.sqrt(torch.tensor(2 / math.pi, dtype=wide.dtype, device=x.device))
    u = c * (wide + 0.044715 * wide * wide * wide)
    e = torch.exp(-2 * u.abs())
    tanh = torch.where(u < 0, -1.0, 1.0) * (1 - e) / (1 + e)
    y = 0.5 * wide * (1 + tanh)
    assert y.shape == x.shape
    return y.to(x.dtype)


print(gelu_by_hand(torch.tensor([-1.0, 0.0, 1.0])))
assert torch.allclose(gelu_by_hand(torch.ones(1)), torch.tensor([0.8412]), atol=1e-4)
"""
            + _GELU_COUNTS,
            "q1_2": """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    rows, inner = a.size()
    inner_b, columns = b.size()
    if inner != inner_b:
        raise ValueError(f"{inner} columns and {inner_b} rows")
    out = torch.zeros(rows, columns, dtype=torch.float64, device=a.device)
    i = 0
    while i < rows:
        j = 0
        while j < columns:
            k = 0
            while k < inner:
                x = a[i : i + tile_m, k : k + tile_k].double()
                y = b[k : k + tile_k, j : j + tile_n].double()
                for p in range(x.shape[1]):
                    out[i : i + tile_m, j : j + tile_n] += torch.outer(x[:, p], y[p])
                k += tile_k
            j += tile_n
        i += tile_m
    return out.to(a.dtype)


small = torch.arange(6.0).reshape(2, 3)
print("small product:", gemm_tiled(small, small.T, 1, 2, 2))
assert torch.equal(gemm_tiled(small, small.T, 1, 2, 2), small @ small.T)
""",
        },
    ),
    "causal tiles by three loops of generators": (
        "lab1",
        {
            "bonus_5_6": """
def _tiles(size, tile):
    yield from (slice(start, min(start + tile, size)) for start in range(0, size, tile))


def flash_attention_causal(q, k, v, tile_q=64, tile_k=64):
    length, scale = q.shape[-2], 1.0 / math.sqrt(q.shape[-1])
    out = torch.zeros_like(q)
    for rows in _tiles(length, tile_q):
        query = q[..., rows, :].float()
        best = torch.full(query.shape[:-1], -torch.inf, device=q.device)
        norm, acc = torch.zeros_like(best), torch.zeros_like(query)
        for cols in _tiles(length, tile_k):
            if cols.start > rows.stop - 1:
                break
            s = query @ k[..., cols, :].float().mT * scale
            if cols.stop - 1 > rows.start:
                i = torch.arange(rows.start, rows.stop, device=q.device).view(-1, 1)
                j = torch.arange(cols.start, cols.stop, device=q.device).view(1, -1)
                s = torch.where(j <= i, s, -torch.inf)
            new = torch.maximum(best, s.amax(-1))
            p, fix = torch.exp(s - new[..., None]), torch.exp(best - new)
            norm = norm * fix + p.sum(-1)
            acc = acc * fix[..., None] + p @ v[..., cols, :].float()
            best = new
        out[..., rows, :] = (acc / norm[..., None]).type_as(q)
    return out
""",
            "q3_4": {
                "    outputs = []\n": "    outputs: list[torch.Tensor] = []\n",
                "    for step in range(new_tokens.shape[1]):\n        token = new_tokens[:, step : step + 1]\n": (
                    "    for step, token in enumerate(torch.split(new_tokens, 1, dim=1)):\n"
                ),
            },
        },
    ),
    "profiler as an object, a class that decodes": (
        "lab1",
        {
            "q4_1": """
def profile_steps(fn, trace_path):
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    prof = torch.profiler.profile(activities=kinds, schedule=default_schedule)
    prof.start()
    for _ in range(10):
        fn()
"""
            + _WAIT.replace("    ", "        ")
            + """        prof.step()
    prof.stop()
    prof.export_chrome_trace(str(trace_path))
    return prof
""",
            "q3_4": """
class Decoder:
    def __init__(self, layer, rotary_emb, batch, room, device):
        self.layer, self.rotary, self.batch, self.device = layer, rotary_emb, batch, device
        self.cache = initialize_kv_cache(layer.config, room)
        self.past = 0

    def where(self, x, count):
        ids = torch.arange(self.past, self.past + count, device=self.device).unsqueeze(0).repeat(self.batch, 1)
        return ids, get_position_embeddings(x, ids, self.rotary, self.layer.self_attn.layer_type)

    def prefill(self, prompt):
        ids, embeddings = self.where(prompt, prompt.size(1))
        prefill_forward(self.layer, prompt, ids, embeddings, self.cache)
        self.past += prompt.size(1)

    def step(self, token):
        ids, embeddings = self.where(token, 1)
        at = torch.as_tensor([self.past], device=self.device)
        out = decode_forward(
            self.layer, token, ids, embeddings, use_kv_cache=True, past_key_values=self.cache, cache_positions=at
        )
        self.past += 1
        return out


@torch.no_grad()
def decode_with_cache(layer, rotary_emb, prompt, new_tokens):
    decoder = Decoder(layer, rotary_emb, prompt.size(0), prompt.size(1) + new_tokens.size(1), prompt.device)
    decoder.prefill(prompt)
    return torch.hstack([decoder.step(new_tokens[:, i : i + 1]) for i in range(new_tokens.size(1))])


def kv_cache_bytes(batch, length, config, dtype):
    per_token = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
    kept = [min(length, config.sliding_window) if "sliding" in kind else length for kind in config.layer_types]
    return batch * per_token * sum(kept)
""",
        },
    ),
    "padding to whole tiles, products by hand in attention": (
        "lab1",
        {
            "q1_2": """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    m, k = a.shape
    n = b.shape[1]
    rows, cols, steps = (math.ceil(size / tile) for size, tile in ((m, tile_m), (n, tile_n), (k, tile_k)))
    left = torch.zeros(rows * tile_m, steps * tile_k, dtype=a.dtype, device=a.device)
    right = torch.zeros(steps * tile_k, cols * tile_n, dtype=a.dtype, device=a.device)
    left[:m, :k], right[:k, :n] = a, b
    left = left.float() if a.dtype != torch.float64 else left
    right = right.float() if b.dtype != torch.float64 else right
    out = torch.zeros(rows * tile_m, cols * tile_n, dtype=left.dtype, device=a.device)
    for r in range(rows):
        for c in range(cols):
            acc = torch.zeros(tile_m, tile_n, dtype=left.dtype, device=a.device)
            for s in range(steps):
                x = left[r * tile_m : (r + 1) * tile_m, s * tile_k : (s + 1) * tile_k]
                y = right[s * tile_k : (s + 1) * tile_k, c * tile_n : (c + 1) * tile_n]
                for p in range(tile_k):
                    acc = torch.addcmul(acc, x[:, p : p + 1], y[p : p + 1, :])
            out[r * tile_m : (r + 1) * tile_m, c * tile_n : (c + 1) * tile_n] = acc
    return out[:m, :n].to(a.dtype)
""",
            "q5_1": """
def softmax(x):
    e = torch.exp(x - torch.amax(x, -1, True))
    return e / torch.sum(e, -1, True)


def standard_attention(q, k, v):
    d = torch.tensor(q.shape[-1], dtype=q.dtype, device=q.device)
    return torch.stack(
        [torch.stack([softmax(qh @ kh.T / d.sqrt()) @ vh for qh, kh, vh in zip(*x)]) for x in zip(q, k, v)]
    )
"""
            + _SCORE_COUNTS,
        },
    ),
    # ---- lab 2
    "masks of torch's functions": (
        "lab2_flexattention",
        {
            "q2_1": """
def causal(b, h, q, k):
    return torch.le(k, q)


def sliding_window(window):
    return lambda b, h, q, k: torch.logical_and(torch.ge(q, k), torch.lt(torch.sub(q, k), window))


def prefix_lm(prefix):
    return lambda b, h, q, k: torch.logical_or(torch.lt(k, prefix), causal(b, h, q, k))
""",
            "q1_1": """
def masked_attention(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(2, 3)).div(math.sqrt(q.size(3)))
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(mask.logical_not(), float("-inf"))
    weights = F.softmax(scores + bias, dim=3)
    weights = torch.nan_to_num(weights, nan=0.0)
    return torch.matmul(weights, v)
""",
        },
    ),
    "classes that are called, type hints": (
        "lab2_flexattention",
        {
            "q2_2": _NUMBERS
            + '''

class Packed:
    """A mask over packed documents."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def __call__(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        mine, other = self.numbers[b, q], self.numbers[b, k]
        return mine.eq(other) & mine.ne(-1) & (k <= q)


def packed_documents(numbers: torch.Tensor) -> Packed:
    return Packed(numbers)
''',
            "bonus_8_2": """
from dataclasses import dataclass
from typing import Callable


@dataclass
class Pool:
    mask_mod: Callable
    owner: torch.Tensor
    number: torch.Tensor
    page_size: int

    def __call__(self, b, h, q, k):
        page, inside = torch.div(k, self.page_size, rounding_mode="floor"), torch.remainder(k, self.page_size)
        position = self.number[page] * self.page_size + inside
        return torch.logical_and(self.owner[page] == b, self.mask_mod(b, h, q, position))


def paged_mask(mask_mod, owner, number, page_size):
    return Pool(mask_mod, owner, number, page_size)
""",
        },
    ),
    "comprehensions, walrus, numpy for orders": (
        "lab2_flexattention",
        {
            "q7_1": """
import numpy as np


def lay_out(conversation, position, window):
    order = torch.from_numpy(np.lexsort((position.numpy(), conversation.numpy())))
    who, when = conversation[order], position[order]

    def mask_mod(b, h, q, k):
        instructions = who[k] == 0
        own = (who[q] == who[k]) & (when[k] <= when[q])
        near = when[q] - when[k] < window
        return torch.where(who[q] == 0, own & instructions, (own & near) | instructions)

    return order, mask_mod
""",
            "q6_1": """
def bucketed_attention(attend, q, k, v, buckets):
    tokens = q.size(-2)
    if (bucket := next((size for size in sorted(buckets) if size >= tokens), None)) is None:
        raise ValueError(f"no bucket of {buckets} holds {tokens} tokens")
    room = torch.zeros(*q.shape[:2], bucket - tokens, q.shape[3], dtype=q.dtype, device=q.device)
    q, k, v = (torch.cat([x, room], dim=2) for x in (q, k, v))
    real = torch.arange(bucket, device=q.device) < tokens

    def mask_mod(b, h, q_idx, kv_idx):
        return real[kv_idx] & (q_idx >= 0)

    return attend(q, k, v, mask_mod).narrow(2, 0, tokens)
""",
        },
    ),
    "blocks walked with running sums": (
        "lab2_flexattention",
        {
            "q3_3": """
def visited(block_mask, i):
    for counts, numbers, whole in (
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, True),
        (block_mask.kv_num_blocks, block_mask.kv_indices, False),
    ):
        for at in range(int(counts[0, 0, i].item())):
            yield int(numbers[0, 0, i, at].item()), whole


def block_sparse_attention(q, k, v, block_mask):
    bq, bk = block_mask.BLOCK_SIZE
    nought = torch.tensor(0, device=q.device)
    out = torch.zeros_like(q)
    for i in range(q.shape[2] // bq):
        mine = q[:, :, i * bq : (i + 1) * bq].float() * q.shape[-1] ** -0.5
        m = torch.full((*mine.shape[:3], 1), -1e30, device=q.device)
        l, acc = torch.zeros_like(m), torch.zeros_like(mine)
        rows = torch.arange(i * bq, (i + 1) * bq, device=q.device).unsqueeze(1)
        for j, whole in visited(block_mask, i):
            s = mine @ k[:, :, j * bk : (j + 1) * bk].float().transpose(-1, -2)
            if not whole:
                cols = torch.arange(j * bk, (j + 1) * bk, device=q.device).unsqueeze(0)
                s = torch.where(block_mask.mask_mod(nought, nought, rows, cols), s, torch.tensor(-math.inf, device=q.device))
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            p, fix = torch.exp(s - new), torch.exp(m - new)
            l, acc, m = l * fix + p.sum(-1, keepdim=True), acc * fix + p @ v[:, :, j * bk : (j + 1) * bk].float(), new
        out[:, :, i * bq : (i + 1) * bq] = torch.where(l > 0, acc / l.clamp_min(1e-30), 0.0).to(q.dtype)
    return out
""",
            "q3_1": """
def count_blocks(mask, block):
    kinds = {"full": 0, "partial": 0, "empty": 0}
    for rows in mask.split(block, dim=0):
        for tile in rows.split(block, dim=1):
            seen = tile.sum().item()
            kinds["empty" if seen == 0 else "full" if seen == block**2 else "partial"] += 1
    return kinds["full"], kinds["partial"], kinds["empty"]
""",
        },
    ),
    "everything as small helpers": (
        "lab2_flexattention",
        {
            "q2_3": """
def _join(mods, how):
    def mask_mod(b, h, q, k):
        answer = mods[0](b, h, q, k)
        for mod in mods[1:]:
            answer = how(answer, mod(b, h, q, k))
        return answer

    return mask_mod


def both(*mods):
    return _join(mods, torch.logical_and)


def either(*mods):
    return _join(mods, torch.logical_or)


def _causal(b, h, q, k):
    return q >= k


def window_per_head(windows):
    def near(b, h, q, k):
        return (q - k) < windows[h]

    return both(_causal, near)


def sinks_and_window(sinks, window):
    return both(_causal, either(lambda b, h, q, k: k < sinks, lambda b, h, q, k: q - k < window))
""",
            "q5_1": """
def _block_mask(mask_mod, length, device, block_size):
    if mask_mod is None:
        return None
    return create_block_mask(mask_mod, B=None, H=None, Q_LEN=length, KV_LEN=length, device=device, BLOCK_SIZE=block_size)


def prepare_flex(attention, mask_mod, score_mod, length, device, block_size=128):
    options = {"score_mod": score_mod, "block_mask": _block_mask(mask_mod, length, device, block_size)}

    def attend(q, k, v):
        return attention(q, k, v, enable_gqa=k.size(1) < q.size(1), **options)

    return attend
""",
        },
    ),
    "partial functions": (
        "lab2_flexattention",
        {
            "q2_1": """
from functools import partial


def causal(b, h, q, k):
    return ~(k > q)


def _window(width, b, h, q, k):
    back = q - k
    return (0 <= back) & (back < width)


def _prefix(prefix, b, h, q, k):
    return (k < prefix) | causal(b, h, q, k)


def sliding_window(window):
    def mod(b, h, q, k):
        return partial(_window, window)(b, h, q, k)

    return mod


def prefix_lm(prefix):
    def mod(b, h, q, k):
        return _prefix(prefix, b, h, q, k)

    return mod
""",
            "bonus_8_3": """
def ragged_attention(attend, texts):
    sizes = [q.size(1) for q, k, v in texts]
    device = texts[0][0].device
    ends = torch.tensor(sizes, device=device).cumsum(0)
    of = torch.bucketize(torch.arange(sum(sizes), device=device), ends, right=True)
    q, k, v = (torch.cat([text[n] for text in texts], 1).unsqueeze(0) for n in range(3))

    def mask_mod(b, h, i, j):
        return (i >= j) & (of[i] == of[j])

    out, results, start = attend(q, k, v, mask_mod).squeeze(0), [], 0
    for size in sizes:
        results.append(out[:, start : start + size])
        start += size
    return results
""",
        },
    ),
    "numbers of documents by a running sum": (
        "lab2_flexattention",
        {
            "q2_2": """
def document_numbers(lengths, size, device):
    total = sum(lengths)
    if total > size:
        raise ValueError("too many tokens")
    starts = torch.zeros(size + 1, dtype=torch.long)
    place = 0
    for length in lengths:
        starts[place] += 1
        place += length
    numbers = starts[:size].cumsum(0) - 1
    numbers[total:] = -1
    return numbers.to(device)


def packed_documents(numbers):
    def mask_mod(b, h, q_idx, kv_idx):
        row = numbers[b]
        same = row[q_idx] == row[kv_idx]
        real = torch.minimum(row[q_idx], row[kv_idx]) >= 0
        return same & real & (q_idx >= kv_idx)

    return mask_mod
""",
            "bonus_8_1": """
def at_positions(mask_mod, positions):
    starts = positions.clone()

    def moved(b, h, q_idx, kv_idx):
        return mask_mod(b, h, torch.add(starts[b], q_idx), kv_idx)

    return moved
""",
        },
    ),
    "broadcasting in place of products": (
        "lab2_flexattention",
        {
            "q1_1": """
def masked_attention(q, k, v, mask):
    out = []
    for qs, ks, vs in zip(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)):
        scores = qs @ ks.t() * qs.shape[-1] ** -0.5
        scores = torch.where(mask, scores, torch.full_like(scores, -math.inf))
        top = scores.amax(1, keepdim=True)
        top = torch.where(torch.isinf(top), torch.zeros_like(top), top)
        e = (scores - top).exp()
        out.append(e @ vs / e.sum(1, keepdim=True).clamp(min=torch.finfo(e.dtype).tiny))
    return torch.stack(out).unflatten(0, q.shape[:2])
""",
            "q7_1": """
def lay_out(conversation, position, window):
    by_position = position.argsort(stable=True)
    order = by_position[conversation[by_position].argsort(stable=True)]
    owner, place = conversation.index_select(0, order), position.index_select(0, order)

    def mask_mod(b, h, q, k):
        distance = place[q] - place[k]
        allowed = torch.where(owner[q] == 0, distance >= 0, (distance >= 0) & (distance < window))
        return (owner[q].eq(owner[k]) & allowed) | (owner[k].eq(0) & owner[q].ne(0))

    return order, mask_mod
""",
        },
    ),
    "score modifiers as closures of closures, one row at a time": (
        "lab2_flexattention",
        {
            "q4_1": """
import functools


def soft_cap(cap):
    return lambda score, b, h, q, k: (score / cap).tanh() * cap


def alibi(slopes):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return score_mod


def in_turn(*score_mods):
    def score_mod(score, b, h, q, k):
        return functools.reduce(lambda s, mod: mod(s, b, h, q, k), score_mods, score)

    return score_mod
""",
            "q3_3": """
def block_sparse_attention(q, k, v, block_mask):
    B, H, S, D = q.shape
    bq, bk = block_mask.BLOCK_SIZE
    out = q.new_zeros(q.shape)
    zero = torch.zeros([], dtype=torch.long, device=q.device)
    k_blocks, v_blocks = k.unflatten(2, (-1, bk)), v.unflatten(2, (-1, bk))
    for i, rows in enumerate(torch.arange(S, device=q.device).split(bq)):
        partial = block_mask.kv_indices[0, 0, i][: block_mask.kv_num_blocks[0, 0, i]]
        full = block_mask.full_kv_indices[0, 0, i][: block_mask.full_kv_num_blocks[0, 0, i]]
        numbers = torch.cat([partial, full]).long()
        if numbers.numel() == 0:
            continue
        keys = k_blocks[:, :, numbers].flatten(2, 3).double()
        values = v_blocks[:, :, numbers].flatten(2, 3).double()
        scores = q[:, :, rows].double() @ keys.mT / math.sqrt(D)
        cols = (partial.long()[:, None] * bk + torch.arange(bk, device=q.device)).flatten()
        if len(cols):
            seen = block_mask.mask_mod(zero, zero, rows[:, None], cols[None, :])
            scores[..., : len(cols)] = scores[..., : len(cols)].masked_fill(~seen, float("-inf"))
        weights = scores.softmax(-1).nan_to_num_(0.0)
        out[:, :, rows] = (weights @ values).to(q.dtype)
    return out
""",
        },
    ),
    "counted with pooling's cousins, buckets by bisect": (
        "lab2_flexattention",
        {
            "q3_1": """
def count_blocks(mask, block):
    s, length = mask.shape
    rows, cols = math.ceil(s / block), math.ceil(length / block)
    padded = torch.zeros(rows * block, cols * block, dtype=torch.bool, device=mask.device)
    padded[:s, :length] = mask
    tiles = padded.reshape(rows, block, cols, block).permute(0, 2, 1, 3).flatten(2)
    full, some = tiles.all(-1), tiles.any(-1)
    return full.sum().item(), (some & ~full).sum().item(), (~some).sum().item()
""",
            "q6_1": """
import bisect


def bucketed_attention(attend, q, k, v, buckets):
    ordered, tokens = sorted(buckets), q.shape[2]
    at = bisect.bisect_left(ordered, tokens)
    if at == len(ordered):
        raise ValueError(f"{tokens} tokens, and the buckets are {ordered}")
    pad = torch.nn.ConstantPad2d((0, 0, 0, ordered[at] - tokens), 0.0)
    last = torch.full((), tokens - 1, device=q.device)
    result = attend(pad(q), pad(k), pad(v), lambda b, h, i, j: j <= last)
    return result[..., :tokens, :]
""",
            "q3_2": """
def block_flops(counts, block, batch, heads, head_dim):
    full, partial, _empty = counts
    per_block = 2 * 2 * head_dim * block * block
    return batch * heads * (full + partial) * per_block


def promised_speedup(counts):
    computed = counts[0] + counts[1]
    return (computed + counts[2]) / computed


def document_blocks(length, span, block):
    if span <= block:
        return length // block
    side, documents = span // block, length // span
    return documents * side * side
""",
        },
    ),
}
