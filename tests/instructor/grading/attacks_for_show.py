"""Answers to labs 1 and 2 in which what a check demands runs for show, or which take another way where a check did not look.

Each was right to the checks as they stood after two blind rounds: an operator whose result reaches nothing, a product under a name that was not
counted, a way for large inputs or another dtype that the watched call did not take, a mask that looks whether it is asked about one pair.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_shortcuts import Shortcut

_FLASH_BY_RULES = """
import math


def online_softmax_stats(blocks):
    m = l = None
    for block in blocks:
        largest = block.amax(1)
        if m is None:
            m, l = torch.full_like(largest, -math.inf), torch.zeros_like(largest)
        new = torch.maximum(m, largest)
        l = l * torch.exp(m - new) + torch.exp(block - new[:, None]).sum(1)
        m = new
    return m, l


def _by_rules(q, k, v, tile_q, tile_k, causal=False):
    out = torch.empty_like(q)
    positions = torch.arange(max(q.shape[2], k.shape[2]), device=q.device)
    for i in range(0, q.shape[2], tile_q):
        mine = q[:, :, i : i + tile_q].float() / math.sqrt(q.shape[-1])
        m = torch.full(mine.shape[:3], -math.inf, device=q.device)
        l = torch.zeros(mine.shape[:3], device=q.device)
        total = torch.zeros(mine.shape, device=q.device)
        end = min(k.shape[2], i + tile_q) if causal else k.shape[2]
        for j in range(0, end, tile_k):
            scores = mine @ k[:, :, j : j + tile_k].float().transpose(-2, -1)
            if causal:
                later = positions[i : i + mine.shape[2], None] < positions[None, j : j + scores.shape[-1]]
                scores = scores.masked_fill(later, -math.inf)
            largest = torch.maximum(m, scores.amax(-1))
            weights = torch.exp(scores - largest[..., None])
            factor = torch.exp(m - largest)
            l = factor * l + weights.sum(-1)
            total = factor[..., None] * total + weights @ v[:, :, j : j + tile_k].float()
            m = largest
        out[:, :, i : i + tile_q] = (total / l[..., None]).to(q.dtype)
    return out
"""
_AT_ONCE = """
    scores = q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.shape[-1])
    return (torch.softmax(scores, -1) @ v.float()).to(q.dtype)
"""
_TILED = """
def _by_rules(a, b, tile_m, tile_n, tile_k):
    wide = torch.promote_types(a.dtype, torch.float32)
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    for i in range(0, a.shape[0], tile_m):
        for j in range(0, b.shape[1], tile_n):
            rows, cols = min(tile_m, a.shape[0] - i), min(tile_n, b.shape[1] - j)
            total = torch.zeros(rows, cols, dtype=wide, device=a.device)
            for s in range(0, a.shape[1], tile_k):
                left, right = a[i : i + tile_m, s : s + tile_k].to(wide), b[s : s + tile_k, j : j + tile_n].to(wide)
                for p in range(left.shape[1]):
                    total += left[:, p : p + 1] * right[p : p + 1, :]
            c[i : i + tile_m, j : j + tile_n] = total
    return c
"""
_BYTES = """

def elementwise_bytes(numel, dtype, one_input, two_inputs):
    return (2 * one_input + 3 * two_inputs) * numel * dtype.itemsize


def fusion_speedup(one_input, two_inputs):
    return (2 * one_input + 3 * two_inputs) / 2
"""
# tanh by a rational function of whole tensors (an Euler continued fraction is exact enough where |u| is small; doubled angles elsewhere).
_TANH_BY_HAND = """
def _tanh(u):
    u = u.clamp(-12.0, 12.0) / 16.0
    s = u * u
    t = u * (10395 + s * (1260 + s * 21)) / (10395 + s * (4725 + s * (210 + s)))
    for _ in range(4):
        t = 2 * t / (1 + t * t)
    return t


def _gelu(x):
    wide = x.double() if x.dtype == torch.float64 else x.float()
    return (0.5 * wide * (1 + _tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)))).to(x.dtype)
"""


def _of_lab1(name: str, cell: str, code: str, check: str, words: str, tests: str = "") -> Shortcut:
    return Shortcut(name, "lab1", cell, tests or f"{cell}_tests", code, tuple(check.split()), words)


def _of_lab2(name: str, cell: str, code: str | dict[str, str], check: str, words: str) -> Shortcut:
    return Shortcut(name, "lab2_flexattention", cell, f"{cell}_tests", code, tuple(check.split()), words)


FOR_SHOW = [
    # ---- what runs and reaches nothing
    _of_lab1(
        "4.2 a tanh beside a rational function, times zero",
        "q4_2",
        "import math\n"
        + _TANH_BY_HAND
        + """

def gelu_by_hand(x):
    return _gelu(x) + 0 * torch.tanh(x).nan_to_num()
"""
        + _BYTES,
        "gelu_by_hand gelu_by_hand",
        "does not reach",
    ),
    _of_lab1(
        "4.2 an exponential that is dropped",
        "q4_2",
        "import math\n"
        + _TANH_BY_HAND
        + """

def gelu_by_hand(x):
    torch.exp(-x)
    return _gelu(x)
"""
        + _BYTES,
        "gelu_by_hand gelu_by_hand",
        "does not reach",
    ),
    _of_lab1(
        "5.2 SDPA runs for show, beside products and exponentials of other names",
        "q5_2",
        """
import math


def attention_bshd(q, k, v):
    F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True)
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    q, k = q.double(), k.double()
    scores = (q[:, :, None] * k[:, None]).sum(-1) / math.sqrt(q.shape[-1])  # (B, S, S, H)
    later = torch.ones(q.shape[1], q.shape[1], device=q.device).triu(1).bool()[None, :, :, None]
    scores = (scores - scores.amax(2, keepdim=True)).masked_fill(later, -40.0)
    top = scores.masked_fill(later, -math.inf).amax(2, keepdim=True)
    weights = (torch.sinh(scores - top) + torch.cosh(scores - top)).masked_fill(later, 0.0)
    return ((weights[..., None] * v[:, None]).sum(2) / weights.sum(2)[..., None]).float()
""",
        "attention_bshd attention_bshd",
        "does not reach",
    ),
    _of_lab1(
        "5.1 products for show, and NumPy's numbers",
        "q5_1",
        """
import math


def standard_attention(q, k, v):
    torch.softmax(q @ k.transpose(-2, -1), -1) @ v
    x, y, z = (t.numpy() for t in (q, k, v))
    scores = x @ y.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    weights = 2.718281828459045 ** (scores - scores.max(-1, keepdims=True))
    return torch.from_numpy((weights / weights.sum(-1, keepdims=True)) @ z).to(q.dtype)


def score_bytes(b, h, length, dtype):
    return b * h * length**2 * dtype.itemsize


def longest_length(memory_bytes, b, h, dtype):
    return math.isqrt(memory_bytes // (2 * b * h * dtype.itemsize))
""",
        "standard_attention standard_attention",
        "out of torch",
    ),
    # ---- another way for larger inputs, or for another dtype
    _of_lab1(
        "1.1 the library's product where there are more than ten numbers in a row",
        "q1_1",
        """
def gemm_naive(a, b):
    if max(*a.shape, *b.shape) > 10:
        return a @ b
    c = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            for k in range(a.shape[1]):
                c[i, j] = c[i, j] + a[i, k] * b[k, j]
    return c
""",
        "gemm_naive gemm_naive",
        "may not use",
    ),
    _of_lab1(
        "1.2 the library's product where a matrix has more rows than a tile of the default",
        "q1_2",
        _TILED
        + """

def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    if a.shape[0] > 25 or a.dtype == torch.float64:
        return a @ b
    return _by_rules(a, b, tile_m, tile_n, tile_k)
""",
        "gemm_tiled gemm_tiled",
        "may not use",
    ),
    _of_lab1(
        "1.2 all at once where K is long",
        "q1_2",
        _TILED
        + """

def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    if a.shape[1] > 130 or a.dtype == torch.float64:
        return (a[:, :, None].float() * b[None].float()).sum(1).to(a.dtype)
    return _by_rules(a, b, tile_m, tile_n, tile_k)
""",
        "gemm_tiled gemm_tiled",
        "elements at once",
    ),
    _of_lab1(
        "4.2 torch's own GELU where there are more than 50 numbers",
        "q4_2",
        """
import math


def gelu_by_hand(x):
    if x.numel() > 50:
        return F.gelu(x, approximate="tanh")
    wide = x.double()
    return (0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))).to(x.dtype)
"""
        + _BYTES,
        "gelu_by_hand gelu_by_hand",
        "may not use",
    ),
    _of_lab1(
        "5.1 SDPA where heads have more than eight numbers",
        "q5_1",
        """
import math


def standard_attention(q, k, v):
    if q.shape[-1] > 8 or q.dtype == torch.float64:
        return F.scaled_dot_product_attention(q, k, v)
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v


def score_bytes(b, h, length, dtype):
    return b * h * length**2 * dtype.itemsize


def longest_length(memory_bytes, b, h, dtype):
    return math.isqrt(memory_bytes // (2 * b * h * dtype.itemsize))
""",
        "standard_attention standard_attention",
        "may not use",
    ),
    _of_lab1(
        "5.3 a softmax of whole rows where heads have four numbers or more",
        "q5_3",
        _FLASH_BY_RULES
        + """

def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    if q.shape[-1] < 4 and q.dtype == torch.float32:
        return _by_rules(q, k, v, tile_q, tile_k)
"""
        + _AT_ONCE,
        "flash_attention_tiled flash_attention_tiled",
        "may not use",
        "q5_3_flash_tests",
    ),
    _of_lab1(
        "5.3 whole rows of scores where heads have four numbers or more",
        "q5_3",
        _FLASH_BY_RULES
        + """

def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    if q.shape[-1] < 4:
        return _by_rules(q, k, v, tile_q, tile_k)
    scores = q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.shape[-1])
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights @ v.float() / weights.sum(-1, keepdim=True)).to(q.dtype)
""",
        "flash_attention_tiled flash_attention_tiled",
        "scores at once",
        "q5_3_flash_tests",
    ),
    _of_lab1(
        "b5.6 a softmax of whole rows in 16 bits",
        "bonus_5_6",
        _FLASH_BY_RULES
        + """

def flash_attention_causal(q, k, v, tile_q=64, tile_k=64):
    if q.dtype == torch.float32:
        return _by_rules(q, k, v, tile_q, tile_k, causal=True)
    later = torch.ones(q.shape[2], k.shape[2], device=q.device).triu(1).bool()
    scores = (q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf)
    return (torch.softmax(scores, -1) @ v.float()).to(q.dtype)
""",
        "flash_attention_causal flash_attention_causal",
        "may not use",
    ),
    # ---- products under a name that was not counted
    _of_lab1(
        "b5.6 masked tiles are multiplied by addbmm",
        "bonus_5_6",
        _FLASH_BY_RULES
        + """

def flash_attention_causal(q, k, v, tile_q=64, tile_k=64):
    for i in range(0, q.shape[2], tile_q):
        for j in range(i + tile_q, k.shape[2], tile_k):
            left, right = q[:, :, i : i + tile_q].flatten(0, 1).float(), k[:, :, j : j + tile_k].flatten(0, 1).float().transpose(1, 2)
            for one, other in zip(left.split(1), right.split(1)):
                torch.addbmm(torch.zeros(one.shape[1], other.shape[2], device=q.device), one, other)
    return _by_rules(q, k, v, tile_q, tile_k, causal=True)
""",
        "flash_attention_causal flash_attention_causal",
        "the tiles with at least one visible score need",
    ),
    _of_lab2(
        "3.3 empty blocks are multiplied elementwise",
        "q3_3",
        """
def block_sparse_attention(q, k, v, block_mask):
    size_q, size_k = block_mask.BLOCK_SIZE
    out = torch.zeros_like(q)
    zero = torch.tensor(0, device=q.device)
    for i in range(q.shape[2] // size_q):
        partial = block_mask.kv_indices[0, 0, i, : int(block_mask.kv_num_blocks[0, 0, i])].tolist()
        full = block_mask.full_kv_indices[0, 0, i, : int(block_mask.full_kv_num_blocks[0, 0, i])].tolist()
        rows = slice(i * size_q, (i + 1) * size_q)
        mine = q[:, :, rows].float()
        scores = []
        for j in range(k.shape[2] // size_k):
            keys = k[:, :, j * size_k : (j + 1) * size_k].float()
            if j not in partial + full:
                one = (mine[:, :, :, None] * keys[:, :, None]).sum(-1)
                scores.append(torch.full_like(one, -math.inf))
                continue
            one = mine @ keys.transpose(-2, -1) / math.sqrt(q.shape[-1])
            if j in partial:
                queries = torch.arange(i * size_q, (i + 1) * size_q, device=q.device)[:, None]
                seen = block_mask.mask_mod(zero, zero, queries, torch.arange(j * size_k, (j + 1) * size_k, device=q.device)[None])
                one = one.masked_fill(~seen, -math.inf)
            scores.append(one)
        scores = torch.cat(scores, -1)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True).clamp(min=-1e30))
        total = torch.zeros_like(mine)
        for j in partial + full:
            total = total + weights[..., j * size_k : (j + 1) * size_k] @ v[:, :, j * size_k : (j + 1) * size_k].float()
        out[:, :, rows] = (total / weights.sum(-1, keepdim=True).clamp(min=1e-30)).to(q.dtype)
    return out
""",
        "block_sparse_attention block_sparse_attention",
        "blocks in the tables",
    ),
    # ---- masks
    _of_lab2(
        "2.1 a table of all pairs, unless a single pair is asked about",
        "q2_1",
        """
import functools


@functools.cache
def _distances(size):
    rows = torch.arange(size)
    return rows[:, None] - rows[None, :]


def causal(b, h, q, k):
    try:
        return int(k) <= q
    except RuntimeError:  # many pairs at once
        return _distances(1024)[q, k] >= 0


def sliding_window(window):
    def mod(b, h, q, k):
        return causal(b, h, q, k) & (q - k < window)

    return mod


def prefix_lm(prefix):
    def mod(b, h, q, k):
        return causal(b, h, q, k) | (k < prefix)

    return mod
""",
        "three_masks causal sliding_window prefix_lm",
        "tensor of",
    ),
    _of_lab2(
        "b8.1 the positions become a tensor of constants, and the tensor is read for show",
        "bonus_8_1",
        """
def at_positions(mask_mod, positions):
    starts = positions.tolist()

    def moved(b, h, q, k):
        return mask_mod(b, h, q + torch.tensor(starts)[b] + 0 * positions[b], k)

    return moved
""",
        "at_positions at_positions",
        "another kernel",
    ),
    _of_lab2(
        "1.1 SDPA where there are more than 20 tokens",
        "q1_1",
        """
def masked_attention(q, k, v, mask):
    if q.shape[2] > 20:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).nan_to_num(0.0)
    scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v
""",
        "masked_attention masked_attention",
        "may not use",
    ),
    _of_lab2(
        "1.1 products for show, and NumPy's numbers",
        "q1_1",
        """
def masked_attention(q, k, v, mask):
    torch.softmax(q @ k.transpose(-2, -1), -1) @ v
    x, y, z = (t.numpy() for t in (q, k, v))
    scores = x @ y.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    weights = (2.718281828459045 ** (scores - scores.max(-1, keepdims=True))) * mask.numpy()
    sums = weights.sum(-1, keepdims=True)
    return torch.from_numpy((weights / (sums + (sums == 0))) @ z).to(q.dtype)
""",
        "masked_attention masked_attention",
        "out of torch",
    ),
]
