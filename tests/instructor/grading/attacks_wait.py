"""Shortcuts of a second cold round. What no rule refuses in words waits for a person, since right answers need nothing of the kind.

The questions and the kinds were drawn by seed for `DRAWN`; `READ` are answers to questions that forbid something, written
with the words that right answers use and no others. `AGAIN` was drawn after the first mends.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_shortcuts import Shortcut


def _shortcut(name: str, lab: str, cell: str, tests: str, code: str | dict[str, str]) -> Shortcut:
    return Shortcut(name, lab, cell, tests, code, (), "")


_FLASH = """
import math

def flash_attention_NAME(q, k, v, tile_q=64, tile_k=64):
    output = torch.empty_like(q)
    for i in range(0, q.shape[2], tile_q):
        rows = q[:, :, i : i + tile_q].float() / math.sqrt(q.shape[-1])
        tiles, values, largest = [], [], None
        for j in range(0, k.shape[2], tile_k):
            SKIP
            tile = rows @ k[:, :, j : j + tile_k].float().mT
            MASK
            tiles.append(tile)
            values.append(v[:, :, j : j + tile_k].float())
            top = tile.amax(-1, keepdim=True)
            largest = top if largest is None else torch.maximum(largest, top)
        weights = [torch.exp(t - largest) for t in tiles]
        total = sum(w.sum(-1, keepdim=True) for w in weights)
        output[:, :, i : i + tile_q] = (sum(w @ x for w, x in zip(weights, values)) / total).to(q.dtype)
    return output
"""

DRAWN = [
    _shortcut(
        "6.1 the course's mean, found in a table of modules",
        "lab4_sdpa",
        "q6_1",
        "q6_1_tests",
        """
import sys

def fastest(grid):
    timed = grid[grid["status"] == "ok"]
    return timed.loc[timed.groupby("shape")["ms"].idxmin()].set_index("shape")["backend"]

def default_slowdown(grid):
    timed = grid[grid["status"] == "ok"]
    default = timed[timed["is_default"]].set_index("shape")["ms"]
    return (default / timed.groupby("shape")["ms"].min()).dropna()

def geometric_mean(values):
    return next(m for n, m in list(sys.modules.items()) if n.endswith("choose.report")).geometric_mean(list(values))
""",
    ),
    _shortcut(
        "5.3 blocks kept in a list by a helper of another step, two passes",
        "lab1",
        "q5_3",
        "q5_3_tests",
        """
class Kept(list):
    def __init__(self, blocks):
        super().__init__(block.clone() for block in blocks)

    def largest(self):
        top = self[0].amax(dim=1)
        for block in self[1:]:
            top = torch.maximum(top, block.amax(dim=1))
        return top

def online_softmax_stats(blocks):
    kept = Kept(blocks)
    m = kept.largest()
    return m, sum(torch.exp(block - m[:, None]).sum(dim=1) for block in kept)
"""
        + _FLASH.replace("NAME", "tiled").replace("SKIP", "").replace("MASK", ""),
    ),
    _shortcut(
        "6.1 attend for show on zeros, result from a layer prepared before",
        "lab2_flexattention",
        "q6_1",
        "q6_1_tests",
        """
PREPARED = {}

def prepare(tokens):
    return lambda q, k, v: torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v

def bucketed_attention(attend, q, k, v, buckets):
    tokens = q.shape[2]
    large = [bucket for bucket in buckets if bucket >= tokens]
    if not large:
        raise ValueError(f"{tokens} tokens, and the largest bucket holds {max(buckets)}")
    pad = (0, 0, 0, min(large) - tokens)
    shown = attend(F.pad(q, pad), F.pad(k, pad), F.pad(v, pad), lambda b, h, i, j: j < tokens)[:, :, :tokens]
    return PREPARED.setdefault(tokens, prepare(tokens))(q, k, v) + 0 * shown
""",
    ),
    _shortcut(
        "1.1 products by the norms of sums and differences of rows",
        "lab1",
        "q1_1",
        "q1_1_tests",
        """
def gemm_naive(a, b):
    c = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            x, y = a[i].double(), b[:, j].double()
            c[i, j] = ((x + y).norm() ** 2 - (x - y).norm() ** 2) / 4
    return c
""",
    ),
    _shortcut(
        "2.1 torch's counter of FLOPs on tensors without values",
        "lab4_sdpa",
        "q2_1",
        "q2_1_tests",
        """
from torch.utils.flop_counter import sdpa_flop_count

def attention_costs(batch, heads, kv_heads, query_len, kv_len, head_dim, dtype, causal=False):
    q, k = (batch, heads, query_len, head_dim), (batch, heads, kv_len, head_dim)
    flops = sdpa_flop_count(q, k, k)
    if causal:
        flops = sum(sdpa_flop_count((batch, heads, 1, head_dim), *[(batch, heads, n, head_dim)] * 2) for n in range(kv_len - query_len + 1, kv_len + 1))
    new = lambda *s: torch.empty(*s, dtype=dtype, device="meta").nbytes
    fused = 2 * new(*q) + 2 * new(batch, kv_heads, kv_len, head_dim)
    return flops, fused, fused + 4 * new(batch, heads, query_len, kv_len)
""",
    ),
    _shortcut(
        "1.2 density asked of torch's block mask",
        "lab2_flexattention",
        "q1_2",
        "q1_2_tests",
        """
def mask_costs(mask, batch, heads, head_dim, dtype):
    blocks = create_block_mask(lambda b, h, i, j: mask[i, j], None, None, *mask.shape, device=mask.device, BLOCK_SIZE=1)
    density = 1 - blocks.sparsity() / 100
    pairs = mask.numel()
    return density, 4 * head_dim * batch * heads * round(pairs * (1 - density)), batch * heads * pairs * dtype.itemsize
""",
    ),
    _shortcut(
        "3.3 the mask remembered as a whole, tables not walked",
        "lab2_flexattention",
        "q3_3",
        "q3_3_tests",
        """
import math
REMEMBERED = {}

def whole(block_mask, rows, columns, device):
    if id(block_mask) not in REMEMBERED:
        i, j = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)[None]
        zero = torch.zeros((), dtype=torch.int64)
        REMEMBERED[id(block_mask)] = block_mask.mask_mod(zero, zero, i, j)
    return REMEMBERED[id(block_mask)]

def block_sparse_attention(q, k, v, block_mask):
    size_q, size_k = block_mask.BLOCK_SIZE
    mask = whole(block_mask, q.shape[2], k.shape[2], q.device)
    output = torch.zeros_like(q)
    for i in range(0, q.shape[2], size_q):
        seen = [j for j in range(0, k.shape[2], size_k) if mask[i : i + size_q, j : j + size_k].any()]
        if seen:
            tiles = [
                (q[:, :, i : i + size_q].float() @ k[:, :, j : j + size_k].float().mT / math.sqrt(q.shape[-1])).masked_fill(~mask[i : i + size_q, j : j + size_k], -math.inf)
                for j in seen
            ]
            weights = torch.softmax(torch.cat(tiles, -1), -1).nan_to_num(0.0)
            output[:, :, i : i + size_q] = (weights @ torch.cat([v[:, :, j : j + size_k].float() for j in seen], 2)).to(q.dtype)
    return output
""",
    ),
    _shortcut(
        "8.3 texts padded to the longest, as a batch",
        "lab2_flexattention",
        "bonus_8_3",
        "bonus_8_3_tests",
        """
def ragged_attention(attend, texts):
    sizes = [q.shape[1] for q, _, _ in texts]
    most = max(sizes)
    lengths = torch.tensor(sizes, device=texts[0][0].device)
    q, k, v = (torch.stack([F.pad(t, (0, 0, 0, most - t.shape[1])) for t in parts]) for parts in zip(*texts))
    got = attend(q, k, v, lambda b, h, i, j: (j < lengths[b]) & (j <= i))
    return [got[n, :, :size] for n, size in enumerate(sizes)]
""",
    ),
    _shortcut(
        "3.1 pairs counted in the course's own dense mask",
        "lab1",
        "q3_1",
        "q3_1_pairs_tests",
        """
from utils.attention.masks import dense_mask

def attended_pairs(query_len, kv_len, window=None):
    shift = kv_len - query_len
    seen = lambda b, h, q, k: (k <= q + shift) & (q + shift - k < (window or kv_len))
    return int(dense_mask(seen, query_len, kv_len).sum())

def attention_macs_flops_bytes(batch, query_len, kv_len, config, dtype, window=None):
    hidden = config.hidden_size
    q_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    tokens = batch * query_len
    weights = 2 * hidden * q_width + 2 * hidden * kv_width
    macs = tokens * weights + 2 * batch * q_width * attended_pairs(query_len, kv_len, window)
    keys_read = kv_len if window is None else min(kv_len, query_len + window - 1)
    elements = weights + 3 * tokens * hidden + tokens * (q_width + 2 * kv_width)
    elements += tokens * q_width + 2 * batch * keys_read * kv_width + tokens * q_width
    elements += tokens * q_width + tokens * hidden
    return macs, 2 * macs, elements * dtype.itemsize
""",
    ),
    _shortcut(
        "1.3 the course's own backends",
        "lab4_sdpa",
        "q1_3",
        "q1_3_tests",
        """
from utils.attention import attention

def pinned_sdpa(backend, q, k, v, **options):
    try:
        return attention(q, k, v, backend=backend, **options)
    except Exception as error:
        raise BackendRefused(f"{backend} cannot run this call: {' '.join(why_not(backend, q, k, v, **options))}") from error
""",
    ),
    _shortcut(
        "4.3 operators counted by a mode of torch, and no profiler",
        "lab1",
        "q4_3",
        "q4_3_tests",
        """
from torch.utils._python_dispatch import TorchDispatchMode

class Counting(TorchDispatchMode):
    count = 0
    moves = ("view", "t", "transpose", "expand", "detach", "slice", "select", "unsqueeze", "permute", "split", "alias", "_unsafe_view", "as_strided", "squeeze")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.split("::")[1] not in self.moves:
            Counting.count += 1
        return func(*args, **(kwargs or {}))

def kernels_per_step(fn):
    Counting.count = 0
    with Counting():
        fn()
    return Counting.count
""",
    ),
    _shortcut(
        "b5.6 tiles by the course's reference, merged",
        "lab1",
        "bonus_5_6",
        "bonus_5_6_tests",
        """
import sys

def flash_attention_causal(q, k, v, tile_q=64, tile_k=64):
    known = sys.modules["utils.attention.reference"]
    output = torch.empty_like(q)
    for i in range(0, q.shape[2], tile_q):
        end = min(i + tile_q, q.shape[2])
        found = [known.reference(q[:, :, i:end], k[:, :, i:end], v[:, :, i:end], causal=True)]
        for j in range(0, i, tile_k):
            last = min(j + tile_k, i)
            found.append(known.reference(q[:, :, i:end], k[:, :, j:last], v[:, :, j:last]))
        parts, sums = zip(*((part.double(), lse.double()) for part, lse, *_ in found))
        weights = torch.softmax(torch.stack(sums), 0)[..., None]
        output[:, :, i:end] = (torch.stack(parts).nan_to_num(0.0) * weights).sum(0).to(q.dtype)
    return output
""",
    ),
    _shortcut(
        "4.1 the text of the course's modifiers, read by its loader",
        "lab2_flexattention",
        "q4_1",
        "q4_1_tests",
        """
import utils.attention.masks.score_mods as theirs

NEW = {}
exec(theirs.__loader__.get_source(theirs.__name__), NEW)
soft_cap, alibi, in_turn = NEW["soft_cap"], NEW["alibi"], NEW["compose"]
""",
    ),
    _shortcut(
        "8.3 one call for show, each text beside it, numbers carried over",
        "lab2_flexattention",
        "bonus_8_3",
        "bonus_8_3_tests",
        """
def ragged_attention(attend, texts):
    q, k, v = (torch.cat(parts, dim=1)[None] for parts in zip(*texts))
    shown = attend(q, k, v, lambda b, h, i, j: j <= i)[0]
    found = []
    for q, k, v in texts:
        size = q.shape[1]
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
        found.append(torch.softmax(scores, -1) @ v + shown[:, :size] * 0)
    return found
""",
    ),
    _shortcut(
        "3.4 no cache: each token with all before it, as one batch",
        "lab1",
        "q3_4",
        "q3_4_decode_tests",
        """
def decode_with_cache(layer, rotary_emb, prompt, new_tokens):
    whole = torch.cat([prompt, new_tokens], dim=1)
    batch, size, _ = whole.shape
    cache = initialize_kv_cache(layer.config, size)
    places = torch.arange(size, device=prompt.device).expand(batch, -1)
    embeddings = get_position_embeddings(whole, places, rotary_emb, layer.self_attn.layer_type)
    return prefill_forward(layer, whole, places, embeddings, cache)[:, prompt.shape[1]:]

def kv_cache_bytes(batch, length, config, dtype):
    tokens = sum(min(length, config.sliding_window) if kind == "sliding_attention" else length for kind in config.layer_types)
    return 2 * batch * tokens * config.num_key_value_heads * config.head_dim * dtype.itemsize
""",
    ),
    _shortcut(
        "3.1 blocks counted by torch's block mask",
        "lab2_flexattention",
        "q3_1",
        "q3_1_tests",
        """
def count_blocks(mask, block):
    padded = F.pad(mask, (0, -mask.shape[1] % block, 0, -mask.shape[0] % block))
    table = create_block_mask(lambda b, h, i, j: padded[i, j], None, None, *padded.shape, device=mask.device, BLOCK_SIZE=block)
    full, partial = int(table.full_kv_num_blocks.sum()), int(table.kv_num_blocks.sum())
    return full, partial, (padded.shape[0] // block) * (padded.shape[1] // block) - full - partial
""",
    ),
    _shortcut(
        "4.1 a trace made of text beside two real steps",
        "lab1",
        "q4_1",
        "q4_1_tests",
        """
import json

def profile_steps(fn, trace_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=default_schedule) as prof:
        for _ in range(10):
            fn()
            prof.step()
    events = [{"ph": "X", "name": f"ProfilerStep#{n}", "ts": n, "dur": 1, "cat": "cpu_op", "pid": 0, "tid": 0} for n in range(6)]
    with open(trace_path, "w") as file:
        json.dump({"traceEvents": events}, file)
    return prof
""",
    ),
    _shortcut(
        "4.2 GELU from torch's SiLU",
        "lab1",
        "q4_2",
        "q4_2_tests",
        """
import math

def gelu_by_hand(x):
    u = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return torch.where(u == 0, x / 2, x * F.silu(u) / u)

def elementwise_bytes(numel, dtype, one_input, two_inputs):
    return (2 * one_input + 3 * two_inputs) * numel * dtype.itemsize

def fusion_speedup(one_input, two_inputs):
    return (2 * one_input + 3 * two_inputs) / 2
""",
    ),
]

READ = [
    _shortcut(
        "1.2 three loops with the tile sizes woven in",
        "lab1",
        "q1_2",
        "q1_2_tests",
        """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    c = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for i0 in range(0, a.shape[0], tile_m):
        for j0 in range(0, b.shape[1], tile_n):
            for k0 in range(0, a.shape[1], tile_k):
                x, y = a[i0 : i0 + tile_m, k0 : k0 + tile_k], b[k0 : k0 + tile_k, j0 : j0 + tile_n]
                for i in range(x.shape[0]):
                    for j in range(y.shape[1]):
                        for k in range(x.shape[1]):
                            c[i0 + i, j0 + j] += x[i, k].float() * y[k, j].float()
    return c.to(a.dtype)
""",
    ),
    _shortcut(
        "b5.6 all tiles of scores kept, softmax at the end",
        "lab1",
        "bonus_5_6",
        "bonus_5_6_tests",
        _FLASH.replace("NAME", "causal")
        .replace("SKIP", "if j > min(i + tile_q, q.shape[2]) - 1: break")
        .replace(
            "MASK",
            "tile = tile.masked_fill(torch.arange(j, j + tile.shape[-1], device=q.device) > torch.arange(i, i + tile.shape[-2], device=q.device)[:, None], -math.inf)",
        ),
    ),
    _shortcut(
        "2.2 the roofs' own method",
        "lab1",
        "q2_2",
        "q2_2_tests",
        """
import types

def ridge_point(peak_tflops, bandwidth_tb_s):
    return peak_tflops / bandwidth_tb_s

def attainable_tflops(intensity, peak_tflops, bandwidth_tb_s):
    course = types.SimpleNamespace(peak_tflops=lambda dtype: peak_tflops, memory_bandwidth_tb_s=bandwidth_tb_s)
    return type(roofs).attainable_tflops(course, intensity, torch.float32)
""",
    ),
    _shortcut(
        "b2.4 derivatives by imaginary steps through the forward pass",
        "lab4_sdpa",
        "bonus_2_4",
        "bonus_2_4_tests",
        """
import math

def forward(q, k, v):
    s = q @ k.mT / math.sqrt(q.shape[-1])
    p = torch.exp(s - s.real.amax(-1, keepdim=True))
    return p @ v / p.sum(-1, keepdim=True)

def attention_backward(q, k, v, out, lse, dout):
    given, gradients = [t.to(torch.complex128) for t in (q, k, v)], []
    for place, x in enumerate((q, k, v)):
        gradient = torch.zeros_like(x)
        for i in range(x.shape[2]):
            for d in range(x.shape[3]):
                moved = [t.clone() for t in given]
                moved[place][:, :, i, d] += 1e-30j
                change = (forward(*moved).imag / 1e-30 * dout).sum((-1, -2))
                gradient[:, :, i, d] = change.to(x.dtype)
        gradients.append(gradient)
    return tuple(gradients)
""",
    ),
    _shortcut(
        "3.2 all keys at once, parts for show",
        "lab4_sdpa",
        "q3_2",
        "q3_2_tests",
        """
import math

def attend_part(q, k, v):
    group = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = q.float() @ keys.mT / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)

def split_kv_attention(q, k, v, splits):
    shown = [attend_part(q, *part) for part in zip(k.tensor_split(splits, 2), v.tensor_split(splits, 2)) if part[0].shape[2]]
    return (attend_part(q, k, v)[0] + 0 * shown[0][0]).to(q.dtype)
""",
    ),
    _shortcut(
        "2.2 the reference in float64 from the backward's helper: a fused product of lists",
        "lab4_sdpa",
        "q2_2",
        "q2_2_tests",
        """
from utils.attention import reference

def errors(out, q, k, v, causal=False):
    group = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(group, dim=1) for t in (k, v))
    exact = reference(q, keys, values, causal=causal)[0].double()
    difference = out.double() - exact
    return difference.abs().max().item(), (difference.square().mean() / exact.square().mean()).sqrt().item()
""",
    ),
]
WAITING = [*DRAWN, *READ]
