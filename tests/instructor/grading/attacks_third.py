"""Shortcuts of a third cold round, six a lab, written from the notebooks alone, and kin of those that were accepted at first.

`THIRD` is the round as it was drawn, without one answer that meets what its question asks; `KIN` was added with the mends.
A `check` says which hidden check refuses an answer; the others are refused by what watches a call, or wait.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_shortcuts import Shortcut

_REFUSED = {  # what was accepted at first and is refused now: (check, answers), and what it says
    "1.5 a grid of one program that walks all tiles": (("gemm_triton",), "one program"),
    "7.1 all pairs, as bits of S numbers": (("layout_mask", "lay_out"), "in pieces"),
    "3.2 blocks of documents counted one by one": (
        ("promises", "block_flops", "promised_speedup", "document_blocks"),
        "no loop over blocks",
    ),
    "3.1 two slots, however many there are": (("async_copy",), "slot i % STAGES"),
    "3.2 rounds: the ring is emptied as a whole, and filled again": (
        ("tma_ring",),
        "refill each as soon as it is free",
    ),
    "5.1 two passes over the keys: all maxima first": (("softmax",), "one pass"),
    "5.2 one consumer computes both tiles, the other says that it is done": (
        ("specialized",),
        "products in each consumer",
    ),
    "5.2 two slots of the ring, however many there are": (("specialized",), "slot i % STAGES"),
    "5.2 slots in turn, and one block at a time": (("specialized",), "waits for nothing but a free slot"),
    "3.1 a slot for each tile, all copies first": (("async_copy",), "slot i % STAGES"),
    "2.2 every program turns every tile": (("transpose",), "others move the other tiles"),
}


def _shortcut(name: str, lab: str, cell: str, tests: str, code: str | dict[str, str]) -> Shortcut:
    return Shortcut(name, lab, cell, tests, code, *_REFUSED.get(name, ((), "")))


LAB1 = [
    _shortcut(
        "1.1 one multiplication as written, all at once as run: vmap",
        "lab1",
        "q1_1",
        "q1_1_tests",
        """
def gemm_naive(a, b):
    def element(row, column):
        total = torch.zeros((), dtype=torch.float64)
        for k in range(a.shape[1]):
            total = total + row[k].double() * column[k].double()
        return total
    columns = torch.vmap(element, in_dims=(None, 1))
    return torch.vmap(columns, in_dims=(0, None))(a, b).to(a.dtype)
""",
    ),
    _shortcut(
        "4.2 a table of torch's GELU, made before, read with torch.lerp",
        "lab1",
        "q4_2",
        "q4_2_tests",
        """
import math

STEPS, REACH = 1 << 18, 16.0
TABLE = torch.nn.GELU(approximate="tanh")(torch.linspace(-REACH, REACH, STEPS + 1, dtype=torch.float64))

def gelu_by_hand(x):
    place = (x.double().nan_to_num(0.0).clamp(-REACH, REACH) + REACH) * (STEPS / (2 * REACH))
    left = place.floor().clamp(max=STEPS - 1)
    table = TABLE.to(x.device)
    found = torch.lerp(table[left.long()], table[left.long() + 1], place - left)
    return torch.where(x.isnan() | (x.abs() > REACH), x.double().clamp(min=0), found).to(x.dtype)

def elementwise_bytes(numel, dtype, one_input, two_inputs):
    return (2 * one_input + 3 * two_inputs) * numel * dtype.itemsize

def fusion_speedup(one_input, two_inputs):
    return (2 * one_input + 3 * two_inputs) / 2
""",
    ),
    _shortcut(
        "3.4 no prefill: the prompt, too, goes through decode",
        "lab1",
        "q3_4",
        "q3_4_decode_tests",
        """
def decode_with_cache(layer, rotary_emb, prompt, new_tokens):
    whole = torch.cat([prompt, new_tokens], dim=1)
    cache = initialize_kv_cache(layer.config, whole.shape[1])
    outputs = []
    for step in range(whole.shape[1]):
        token = whole[:, step : step + 1]
        place = torch.tensor([step], device=prompt.device)
        places = place.expand(whole.shape[0], 1)
        embeddings = get_position_embeddings(token, places, rotary_emb, layer.self_attn.layer_type)
        outputs.append(decode_forward(layer, token, places, embeddings, True, cache, place))
    return torch.cat(outputs[prompt.shape[1] :], dim=1)

def kv_cache_bytes(batch, length, config, dtype):
    tokens = sum(min(length, config.sliding_window) if kind == "sliding_attention" else length for kind in config.layer_types)
    return 2 * batch * tokens * config.num_key_value_heads * config.head_dim * dtype.itemsize
""",
    ),
    _shortcut(
        "1.5 a grid of one program that walks all tiles",
        "lab1",
        "q1_5",
        "q1_5_tests",
        '''
%%writefile gemm_triton.py
"""C = A @ B in Triton."""

import torch
import triton
import triton.language as tl


@triton.jit
def gemm_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K: tl.constexpr,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    for i in range(0, M, BLOCK_M):
        for j in range(0, N, BLOCK_N):
            rows = i + tl.arange(0, BLOCK_M)
            cols = j + tl.arange(0, BLOCK_N)
            accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for start in range(0, K, BLOCK_K):
                ks = start + tl.arange(0, BLOCK_K)
                a_tile = tl.load(
                    a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak,
                    mask=(rows[:, None] < M) & (ks[None, :] < K), other=0.0,
                )
                b_tile = tl.load(
                    b_ptr + ks[:, None] * stride_bk + cols[None, :] * stride_bn,
                    mask=(ks[:, None] < K) & (cols[None, :] < N), other=0.0,
                )
                accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision="ieee")
            c_tile = c_ptr + rows[:, None] * stride_cm + cols[None, :] * stride_cn
            tl.store(c_tile, accumulator, mask=(rows[:, None] < M) & (cols[None, :] < N))


def gemm(a, b, block=64):
    """Launch gemm_kernel on (M, K) @ (K, N)."""
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    gemm_kernel[(1,)](
        a, b, c, c.shape[0], c.shape[1], a.shape[1], *a.stride(), *b.stride(), *c.stride(),
        BLOCK_M=block, BLOCK_N=block, BLOCK_K=32,
    )
    return c
''',
    ),
    _shortcut(
        "5.3 all at once in a compiled kernel, whose operators nobody sees",
        "lab1",
        "q5_3",
        "q5_3_flash_tests",
        """
import math

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

@torch.compile(dynamic=True)
def at_once(q, k, v):
    scores = (q[..., :, None, :] * k[..., None, :, :]).sum(-1) / q.shape[-1] ** 0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights[..., None] * v[..., None, :, :]).sum(-2) / weights.sum(-1, keepdim=True)

at_once(*(torch.randn(2, 3, n, 8) for n in (5, 7, 7)))

def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    return at_once(q.float(), k.float(), v.float()).to(q.dtype)
""",
    ),
]

LAB2 = [
    _shortcut(
        "2.1 the masks of transformers",
        "lab2_flexattention",
        "q2_1",
        "q2_1_tests",
        """
from transformers.masking_utils import causal_mask_function, or_masks, sliding_window_causal_mask_function

causal = causal_mask_function

def sliding_window(window):
    return sliding_window_causal_mask_function(window)

def prefix_lm(prefix):
    return or_masks(causal, lambda b, h, q, k: k < prefix)
""",
    ),
    _shortcut(
        "3.3 FlexAttention itself, by the course's own_copy",
        "lab2_flexattention",
        "q3_3",
        "q3_3_tests",
        """
mine = own_copy(flex_attention)

def block_sparse_attention(q, k, v, block_mask):
    return mine(q, k, v, block_mask=block_mask)
""",
    ),
    _shortcut(
        "7.1 all pairs, as bits of S numbers",
        "lab2_flexattention",
        "q7_1",
        "q7_1_tests",
        """
def lay_out(conversation, position, window):
    order = torch.argsort(conversation * (int(position.max()) + 1) + position)
    owner, place = conversation[order].tolist(), position[order].tolist()
    size = len(owner)
    words = []
    for first in range(0, size, 62):
        numbers = []
        for i in range(size):
            bits = 0
            for j in range(first, min(first + 62, size)):
                if owner[i] == owner[j]:
                    seen = place[j] <= place[i] and (owner[i] == 0 or place[i] - place[j] < window)
                else:
                    seen = owner[j] == 0
                bits |= seen << (j - first)
            numbers.append(bits)
        words.append(torch.tensor(numbers, device=order.device))

    def mask_mod(b, h, q, k):
        found = q < 0
        for number, word in enumerate(words):
            found = found | ((k // 62 == number) & (((word[q] >> (k % 62)) & 1) == 1))
        return found

    return order, mask_mod
""",
    ),
    _shortcut(
        "3.2 blocks of documents counted one by one",
        "lab2_flexattention",
        "q3_2",
        "q3_2_tests",
        """
def block_flops(counts, block, batch, heads, head_dim):
    return 4 * head_dim * batch * heads * (counts[0] + counts[1]) * block**2

def promised_speedup(counts):
    return sum(counts) / (counts[0] + counts[1])

def document_blocks(length, span, block):
    found = 0
    for i in range(length // block):
        for j in range(length // block):
            first, last = i * block // span, (i * block + block - 1) // span
            found += first <= (j * block + block - 1) // span and j * block // span <= last
    return found
""",
    ),
    _shortcut(
        "1.1 torch's attention of many heads, which also returns weights",
        "lab2_flexattention",
        "q1_1",
        "q1_1_tests",
        """
def masked_attention(q, k, v, mask):
    batch, heads, queries, dim = q.shape
    rows, keys, values = (t.flatten(0, 1).transpose(0, 1) for t in (q, k, v))
    one = torch.eye(dim, dtype=q.dtype, device=q.device)
    nothing = torch.zeros(3 * dim, dtype=q.dtype, device=q.device)
    out, _ = F.multi_head_attention_forward(
        rows, keys, values, dim, 1, torch.cat([one, one, one]), nothing, None, None, False, 0.0, one, nothing[:dim],
        need_weights=True, attn_mask=~mask,
    )
    out = out.transpose(0, 1).unflatten(0, (batch, heads))
    return torch.where(mask.any(-1)[:, None], out, 0.0)
""",
    ),
    _shortcut(
        "5.1 the mask in the score modifier, a block mask of all pairs",
        "lab2_flexattention",
        "q5_1",
        "q5_1_tests",
        """
def prepare_flex(attention, mask_mod, score_mod, length, device, block_size=128):
    block_mask, changed = None, score_mod
    if mask_mod is not None:
        block_mask = create_block_mask(lambda b, h, q, k: q >= 0, None, None, length, length, device=device, BLOCK_SIZE=block_size)
        def changed(score, b, h, q, k):
            new = score if score_mod is None else score_mod(score, b, h, q, k)
            return torch.where(mask_mod(b, h, q, k), new, -float("inf"))

    def attend(q, k, v):
        return attention(q, k, v, score_mod=changed, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])
    return attend
""",
    ),
]

_TWO_PASSES_FIRST = """
    for key in range(0, sk, BLOCK_N):
        mbarrier.expect(full, k_desc.block_type.nbytes)
        tma_load(k_desc, [head, key, 0], full, k_tile)
        mbarrier.wait(full, phase)
        phase ^= 1
        k = k_tile.reshape([BLOCK_N, BLOCK_D]).permute([1, 0])
        s = warpgroup_mma(q, k, gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores), use_acc=False)
        keys = key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))
        m = gl.maximum(m, gl.max(gl.where((keys < sk)[None, :], s, float("-inf")), 1))
    for key in range(0, sk, BLOCK_N):
        mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
"""

_CONSUMER = """def half(q, k, v, m, total, o, i, sk, c, scores: gl.constexpr, output: gl.constexpr, left: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, dtype: gl.constexpr):
    s = warpgroup_mma(q, k, gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores), use_acc=False)
    s = mask_scores(s, 0, i * BLOCK_N, 0, sk, 0, scores, False, False)
    p, m, total, alpha = online_softmax(s, m, total, c)
    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]
    o = warpgroup_mma(gl.convert_layout(p.to(dtype), left), v, o)
    return m, total, o


@gluon.jit
def compute_partition(o_desc, tiles, bars, sk, c, W: gl.constexpr, STAGES: gl.constexpr):
    q_tiles, k_ring, v_ring = tiles
    q_full, full, empty = bars
    dtype: gl.constexpr = q_tiles.dtype
    BLOCK_M: gl.constexpr = q_tiles.shape[2]
    BLOCK_D: gl.constexpr = q_tiles.shape[3]
    BLOCK_N: gl.constexpr = k_ring.shape[2]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    row = gl.program_id(0) * (2 * BLOCK_M)
    if W == 1:
        for i in range(gl.cdiv(sk, BLOCK_N)):
            mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)
            mbarrier.arrive(empty.index(i % STAGES), count=1)
    else:
        m = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
        total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, scores))
        o = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, output)
        m2 = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
        total2 = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, scores))
        o2 = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, output)
        q = q_tiles.index(0).reshape([BLOCK_M, BLOCK_D])
        q2 = q_tiles.index(1).reshape([BLOCK_M, BLOCK_D])
        mbarrier.wait(q_full.index(0), 0)
        mbarrier.wait(q_full.index(1), 0)
        for i in range(gl.cdiv(sk, BLOCK_N)):
            slot = i % STAGES
            k = k_ring.index(slot).reshape([BLOCK_N, BLOCK_D]).permute([1, 0])
            v = v_ring.index(slot).reshape([BLOCK_N, BLOCK_D])
            mbarrier.wait(full.index(slot), (i // STAGES) & 1)
            m, total, o = half(q, k, v, m, total, o, i, sk, c, scores, output, left, BLOCK_M, BLOCK_N, dtype)
            m2, total2, o2 = half(q2, k, v, m2, total2, o2, i, sk, c, scores, output, left, BLOCK_M, BLOCK_N, dtype)
            mbarrier.arrive(empty.index(slot), count=1)
        inverse, log_sum = inverse_and_lse(m, total, c)
        q.store((o * gl.convert_layout(inverse, gl.SliceLayout(1, output))[:, None]).to(dtype))
        inverse2, log_sum2 = inverse_and_lse(m2, total2, c)
        q2.store((o2 * gl.convert_layout(inverse2, gl.SliceLayout(1, output))[:, None]).to(dtype))
        fence_async_shared()
        tma_store(o_desc, [gl.program_id(1), row, 0], q_tiles.index(0))
        tma_store(o_desc, [gl.program_id(1), row + BLOCK_M, 0], q_tiles.index(1))
        tma.store_wait(0)


@gluon.jit
def replaced(o_desc, tiles, bars, sk, c, W: gl.constexpr, STAGES: gl.constexpr):
"""

LAB3 = [
    _shortcut(
        "2.1 the simulator's own table of elements",
        "lab3_gluon",
        "q2_1",
        "q2_1_tests",
        """
from triton.experimental.gluon.language import BlockedLayout
from utils.gluon_cpu.layouts import elements_of

def owner(row, column, shape, size, threads, warps, order):
    layout = BlockedLayout(list(size), list(threads), list(warps), list(order))
    held = elements_of(layout, tuple(shape), warps[0] * warps[1])
    flat = row * shape[1] + column
    for register, lanes in enumerate(held.tolist()):
        for lane, holders in enumerate(lanes):
            if flat in holders:
                return holders.index(flat), lane, register
""",
    ),
    _shortcut(
        "3.4 one slot for all, and slow where there is one",
        "lab3_gluon",
        "bonus_3_4",
        "bonus_3_4_tests",
        '''
def repairs():
    """One slot is used, whatever STAGES is; where STAGES is 1, it is free only when the tile has been stored."""
    return {
        "mbarrier.wait(empty.index(slot), (i // STAGES) & 1)": "slot = 0\\nmbarrier.wait(empty.index(slot), (i & 1) ^ 1)",
        "mbarrier.expect(full.index(slot), x_desc.block_type.nbytes // 2)": "mbarrier.expect(full.index(slot), x_desc.block_type.nbytes)",
        "mbarrier.wait(full.index(slot), (i // STAGES) & 1)": "slot = 0\\nmbarrier.wait(full.index(slot), i & 1)",
        "mbarrier.arrive(empty.index(slot), count=1)": "x = ring.index(slot).load(layout)\\nfence_async_shared()\\nif STAGES > 1: mbarrier.arrive(empty.index(slot), count=2)",
        "x = ring.index(slot).load(layout)": "tma.store_wait(0)",
        "tma_store(y_desc, [0, i * y_desc.block_type.shape[1]], out)": "tma_store(y_desc, [0, i * y_desc.block_type.shape[1]], out)\\nif STAGES == 1: tma.store_wait(0)\\nif STAGES == 1: mbarrier.arrive(empty.index(slot), count=2)",
    }
''',
    ),
    _shortcut(
        "3.1 two slots, however many there are",
        "lab3_gluon",
        "q3_1",
        "q3_1_tests",
        {
            "    for i in gl.static_range(STAGES - 1):\n": "    DEPTH: gl.constexpr = 1 if STAGES == 1 else 2\n    for i in gl.static_range(DEPTH - 1):\n",
            "        ahead = i + STAGES - 1\n": "        ahead = i + DEPTH - 1\n",
            "start_copy(a_ring, ahead % STAGES,": "start_copy(a_ring, ahead % DEPTH,",
            "start_copy(b_ring, ahead % STAGES,": "start_copy(b_ring, ahead % DEPTH,",
            "async_copy.wait_group(STAGES - 1)": "async_copy.wait_group(DEPTH - 1)",
            "a_ring.index(i % STAGES)": "a_ring.index(i % DEPTH)",
            "b_ring.index(i % STAGES)": "b_ring.index(i % DEPTH)",
        },
    ),
    _shortcut(
        "3.2 rounds: the ring is emptied as a whole, and filled again",
        "lab3_gluon",
        "q3_2",
        "q3_2_tests",
        {
            "        more = i + STAGES < tiles\n": "",
            "        mbarrier.expect(full.index(slot), NBYTES, pred=more)\n": "        for s in gl.static_range(STAGES):\n            more = (slot == STAGES - 1) & (i + 1 + s < tiles)\n            mbarrier.expect(full.index(s), NBYTES, pred=more)\n",
            "        tma_load(x_desc, [row, (i + STAGES) * COLUMNS], full.index(slot), ring.index(slot), pred=more)\n": "            tma_load(x_desc, [row, (i + 1 + s) * COLUMNS], full.index(s), ring.index(s), pred=more)\n",
        },
    ),
    _shortcut(
        "5.1 two passes over the keys: all maxima first",
        "lab3_gluon",
        "q5_1",
        "q5_1_tests",
        {
            "    top = gl.maximum(m, gl.max(s, 1))\n    alpha = gl.exp2((m - top) * c)\n    p = gl.exp2((s - top[:, None]) * c)\n    total = total * alpha + gl.sum(p, 1)\n    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]  # public\n    return p, top, total, o\n": "    p = gl.exp2((s - m[:, None]) * c)\n    return p, m, total + gl.sum(p, 1), o\n",
            "    for key in range(0, sk, BLOCK_N):\n        mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)\n": _TWO_PASSES_FIRST.lstrip(
                "\n"
            ),
        },
    ),
    _shortcut(
        "5.2 one consumer computes both tiles, the other says that it is done",
        "lab3_gluon",
        "q5_2",
        "q5_2_tests",
        {"def compute_partition(o_desc, tiles, bars, sk, c, W: gl.constexpr, STAGES: gl.constexpr):\n": _CONSUMER},
    ),
]

LAB4 = [
    _shortcut(
        "1.3 strides that a backend refuses are repaired by a copy",
        "lab4_sdpa",
        "q1_3",
        "q1_3_tests",
        """
def pinned_sdpa(backend, q, k, v, **options):
    q, k, v = (t.contiguous() for t in (q, k, v))
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:
            raise BackendRefused(f"{backend} cannot run this call: {' '.join(why_not(backend, q, k, v, **options))}") from error
""",
    ),
    _shortcut(
        "b2.4 the fused kernel's own backward operator",
        "lab4_sdpa",
        "bonus_2_4",
        "bonus_2_4_tests",
        """
def attention_backward(q, k, v, out, lse, dout):
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return fused(dout.contiguous(), q, k, v, out, lse, 0.0, False)
""",
    ),
    _shortcut(
        "b2.4 the softmax's derivative by the library",
        "lab4_sdpa",
        "bonus_2_4",
        "bonus_2_4_tests",
        """
def attention_backward(q, k, v, out, lse, dout):
    scale = q.shape[-1] ** -0.5
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    ds = torch._softmax_backward_data(dout @ v.mT, p, -1, q.dtype)
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ dout
""",
    ),
    _shortcut(
        "3.2 never more than two parts",
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
    if splits == 1 or k.shape[2] == 1:
        return attend_part(q, k, v)[0].to(q.dtype)
    middle = (k.shape[2] + 1) // 2
    left, first = attend_part(q, k[:, :, :middle], v[:, :, :middle])
    right, second = attend_part(q, k[:, :, middle:], v[:, :, middle:])
    share = torch.sigmoid(first - second)[..., None]
    return (share * left + (1 - share) * right).to(q.dtype)
""",
    ),
    _shortcut(
        "4.2 one reason with four numbers in it",
        "lab4_sdpa",
        "q4_2",
        "q4_2_tests",
        """
KNOCK_OUTS = {
    f"values of {size}": lambda q, k, v, size=size: {"query": q, "key": k, "value": v[..., :size].contiguous()}
    for size in (2, 4, 8, 16)
}
""",
    ),
    _shortcut(
        "3.2 output and log-sum-exp from the fused operator",
        "lab4_sdpa",
        "q3_2",
        "q3_2_part_tests",
        """
def attend_part(q, k, v):
    group = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q.float(), keys, values, 0.0, False)

def split_kv_attention(q, k, v, splits):
    parts = zip(k.tensor_split(splits, dim=2), v.tensor_split(splits, dim=2))
    outputs, lses = zip(*(attend_part(q, *part) for part in parts if part[0].shape[2]))
    weights = torch.softmax(torch.stack(lses), dim=0)
    return (weights[..., None] * torch.stack(outputs)).sum(dim=0).to(q.dtype)
""",
    ),
]

KIN = [
    _shortcut(
        "4.1 steps that end while the device works",
        "lab1",
        "q4_1",
        "q4_1_tests",
        """
def profile_steps(fn, trace_path):
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, schedule=default_schedule) as prof:
        for _ in range(10):
            fn()
            prof.step()
    prof.export_chrome_trace(str(trace_path))
    return prof
""",
    ),
    _shortcut(
        "5.2 two slots of the ring, however many there are",
        "lab3_gluon",
        "q5_2",
        "q5_2_tests",
        {
            "slot = i % STAGES  # public": "slot = i % 2 if STAGES > 2 else i % STAGES",
            "        slot = i % STAGES\n        k = k_ring": "        slot = i % 2 if STAGES > 2 else i % STAGES\n        k = k_ring",
            "((i // STAGES) & 1) ^ 1)": "((i // 2 if STAGES > 2 else i // STAGES) & 1) ^ 1)",
            "mbarrier.wait(full.index(slot), (i // STAGES) & 1)": "mbarrier.wait(full.index(slot), (i // 2 if STAGES > 2 else i // STAGES) & 1)",
        },
    ),
    _shortcut(
        "5.2 slots in turn, and one block at a time",
        "lab3_gluon",
        "q5_2",
        "q5_2_tests",
        {
            "        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)\n": "        if i > 0:\n            mbarrier.wait(empty.index((i - 1) % STAGES), ((i - 1) // STAGES) & 1)\n"
        },
    ),
    _shortcut(
        "3.1 a slot for each tile, all copies first",
        "lab3_gluon",
        "q3_1",
        "q3_1_tests",
        {
            "[STAGES, TILE], plain)\n    b_ring": "[TILES, TILE], plain)\n    b_ring",
            "    b_ring = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], plain)": "    b_ring = gl.allocate_shared_memory(gl.float32, [TILES, TILE], plain)",
            "    for i in gl.static_range(STAGES - 1):\n": "    for i in gl.static_range(TILES):\n",
            "        ahead = i + STAGES - 1\n        if ahead < TILES:\n            start_copy(a_ring, ahead % STAGES, a_ptr, first + ahead * TILE, n, TILE, layout)\n            start_copy(b_ring, ahead % STAGES, b_ptr, first + ahead * TILE, n, TILE, layout)\n": "",
            "async_copy.wait_group(STAGES - 1)": "async_copy.wait_group(TILES)",
            "total = a_ring.index(i % STAGES).load(layout) + b_ring.index(i % STAGES).load(layout)": "total = a_ring.index(i).load(layout) + b_ring.index(i).load(layout)",
        },
    ),
    _shortcut(
        "2.2 every program turns every tile",
        "lab3_gluon",
        "q2_2",
        "q2_2_tests",
        '''
%%writefile lab3_transpose.py
"""Y = X transposed."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def transpose(x_ptr, y_ptr, m, n, x_stride, y_stride):
    reading: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    writing: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    for row in range(0, m, 32):
        for column in range(0, n, 32):
            rows = row + gl.arange(0, 32, gl.SliceLayout(1, reading))
            columns = column + gl.arange(0, 32, gl.SliceLayout(0, reading))
            mask = (rows < m)[:, None] & (columns < n)[None, :]
            tile = gl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask)
            tile = gl.convert_layout(tile, writing)
            rows = row + gl.arange(0, 32, gl.SliceLayout(1, writing))
            columns = column + gl.arange(0, 32, gl.SliceLayout(0, writing))
            mask = (rows < m)[:, None] & (columns < n)[None, :]
            gl.store(y_ptr + columns[None, :] * y_stride + rows[:, None], tile, mask=mask)
''',
    ),
]

THIRD = [*LAB1, *LAB2, *LAB3, *LAB4]
