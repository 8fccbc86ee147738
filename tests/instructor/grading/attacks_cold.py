"""Shortcuts of a cold round, and what it tried to cost others: right values without what the question asks for.

They use nothing of a tile but its name, compute beside what they are asked to call, remember instead of computing, let
numbers out of torch one by one and multiply them there, take a kernel's answer from a helper of the course, or make a
clock of the simulator's compare with something slow. `HARM` are cells, and `HARMFUL_VALUES` answers, in notebooks
without one right answer.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_shortcuts import Shortcut

COLD = [
    Shortcut(
        "1.1 NumPy product of numbers read one at a time",
        "lab1",
        "q1_1",
        "q1_1_tests",
        """
import numpy as np
def gemm_naive(a, b):
    A = np.array([[a[i, k].item() for k in range(a.shape[1])] for i in range(a.shape[0])])
    B = np.array([[b[k, j].item() for j in range(b.shape[1])] for k in range(b.shape[0])])
    C = (A @ B).tolist()
    c = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            c[i, j] = C[i][j]
    return c
""",
        ("gemm_naive", "gemm_naive"),
        "out of torch",
    ),
    Shortcut(
        "1.1 a data base joins the two matrices",
        "lab1",
        "q1_1",
        "q1_1_tests",
        """
import sqlite3
def gemm_naive(a, b):
    db = sqlite3.connect(":memory:")
    db.execute("create table a(i, k, v)"); db.execute("create table b(k, j, v)")
    db.executemany("insert into a values(?,?,?)", [(i, k, str(a[i, k].item())) for i in range(a.shape[0]) for k in range(a.shape[1])])
    db.executemany("insert into b values(?,?,?)", [(k, j, str(b[k, j].item())) for k in range(b.shape[0]) for j in range(b.shape[1])])
    c = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    nan = float("nan")
    for i, j, v, bad in db.execute("select i, j, sum(cast(a.v as real) * cast(b.v as real)), sum(a.v = 'nan' or b.v = 'nan') from a join b on a.k = b.k group by i, j"):
        c[i, j] = nan if bad else v
    return c
""",
        ("gemm_naive", "gemm_naive"),
        "out of torch",
    ),
    Shortcut(
        "1.2 tile sizes not used: three loops",
        "lab1",
        "q1_2",
        "q1_2_tests",
        """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    c = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            total = 0.0
            for k in range(a.shape[1]):
                total += a[i, k].item() * b[k, j].item()
            c[i, j] = total
    return c
""",
        ("gemm_tiled", "gemm_tiled"),
        "tile sizes are not used",
    ),
    Shortcut(
        "1.2 tiles of a fixed size",
        "lab1",
        "q1_2",
        "q1_2_tests",
        """
def gemm_tiled(a, b, *tiles):
    c = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    for k in range(a.shape[1]):
        for i in range(a.shape[0]):
            for j in range(0, b.shape[1]):
                c[i, j] += a[i, k].double() * b[k, j].double()
    return c.to(a.dtype)
""",
        ("gemm_tiled", "gemm_tiled"),
        "tile sizes are not used",
    ),
    Shortcut(
        "5.3 whole rows of scores, one query of one head at a time",
        "lab1",
        "q5_3",
        "q5_3_flash_tests",
        """
def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                s = (k[b, h].float() @ q[b, h, i].float()[:, None])[:, 0] / math.sqrt(q.shape[-1])
                p = torch.exp(s - s.max())
                out[b, h, i] = ((p / p.sum())[None] @ v[b, h].float())[0].to(q.dtype)
    return out
""",
        ("flash_attention_tiled", "flash_attention_tiled"),
        "worked along",
    ),
    Shortcut(
        "b5.6 whole rows of visible keys, one query at a time",
        "lab1",
        "bonus_5_6",
        "bonus_5_6_tests",
        """
def flash_attention_causal(q, k, v, tile_q=64, tile_k=64):
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                s = (k[b, h, : i + 1].float() @ q[b, h, i].float()[:, None])[:, 0] / math.sqrt(q.shape[-1])
                p = torch.exp(s - s.max())
                out[b, h, i] = ((p / p.sum())[None] @ v[b, h, : i + 1].float())[0].to(q.dtype)
    return out
""",
        ("flash_attention_causal", "flash_attention_causal"),
        "worked along",
    ),
    Shortcut(
        "b5.7 torch._masked_softmax",
        "lab1",
        "bonus_5_7",
        "bonus_5_7_tests",
        """
def merge_attention(outputs, lses):
    w = torch.ops.aten._masked_softmax(lses.movedim(0, -1).contiguous(), torch.isinf(lses).movedim(0, -1).contiguous(), -1, None).movedim(-1, 0)
    best = w.argmax(0, keepdim=True)
    lse = (lses.gather(0, best) - w.gather(0, best).log())[0]
    return (w[..., None] * torch.where(w[..., None] > 0, outputs, 0.0)).sum(0), lse
""",
        ("merge_attention", "merge_attention"),
        "softmax",
    ),
    Shortcut(
        "b5.7 torch.sparse.softmax",
        "lab1",
        "bonus_5_7",
        "bonus_5_7_tests",
        """
def merge_attention(outputs, lses):
    flat = lses.reshape(lses.shape[0], -1).double()
    w = torch.sparse.softmax(flat.clamp(min=-1e30).to_sparse(), 0).to_dense().reshape(lses.shape)
    best = w.argmax(0, keepdim=True)
    lse = (lses.double().gather(0, best) - w.gather(0, best).log())[0]
    return (w[..., None] * torch.where(w[..., None] > 0, outputs.double(), 0.0)).sum(0).float(), lse.float()
""",
        ("merge_attention", "merge_attention"),
        "softmax",
    ),
    Shortcut(
        "b5.8 all keys in one block",
        "lab1",
        "bonus_5_8",
        "bonus_5_8_tests",
        {
            "    for start in range(0, keys, BLOCK_N):\n        columns = start + tl.arange(0, BLOCK_N)": "    for start in range(0, 1):\n        columns = start + tl.arange(0, 128)",
            '        new_m = tl.maximum(m, tl.max(scores, 1))\n        p = tl.exp(scores - new_m[:, None])\n        rescale = tl.exp(m - new_m)\n        l = l * rescale + tl.sum(p, 1)\n        new = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")\n        accumulator = accumulator * rescale[:, None] + new\n        m = new_m': '        p = tl.exp(scores - tl.max(scores, 1)[:, None])\n        p = p / tl.sum(p, 1)[:, None]\n        accumulator = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")',
            "accumulator / l[:, None]": "accumulator",
        },
        ("flash_triton",),
        "work block by block",
    ),
    Shortcut(
        "1.5 all of K in one block",
        "lab1",
        "q1_5",
        "q1_5_tests",
        {
            "    for start in range(0, K, BLOCK_K):\n        ks = start + tl.arange(0, BLOCK_K)": "    for start in range(0, 1):\n        ks = tl.arange(0, 128)"
        },
        ("gemm_triton",),
        "work block by block",
    ),
    Shortcut(
        "3.4 a prefill of a copy, and the layer called for show",
        "lab1",
        "q3_4",
        "q3_4_decode_tests",
        """from utils import *
import torch
def decode_with_cache(layer, rotary_emb, prompt, new_tokens):
    other, _ = build_decoder_layer(layer.config, layer.self_attn.layer_idx, torch.float32, "cpu")
    other.load_state_dict(layer.state_dict())
    tokens = torch.cat([prompt, new_tokens], 1)
    ids = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)
    emb = get_position_embeddings(tokens, ids, rotary_emb, layer.self_attn.layer_type)
    out = prefill_forward(other, tokens, ids, emb)[:, prompt.shape[1]:]
    layer.self_attn.q_proj(prompt)
    for t in range(new_tokens.shape[1]):
        layer.self_attn.q_proj(new_tokens[:, t : t + 1])
    return out


def kv_cache_bytes(batch, length, config, dtype):
    return 0
""",
        ("decode_with_cache", "decode_with_cache"),
        "wrong in",
    ),
    Shortcut(
        "4.3 operators counted by a mode, without a profiler",
        "lab1",
        "q4_3",
        "q4_3_tests",
        """
from torch.utils._python_dispatch import TorchDispatchMode
class Count(TorchDispatchMode):
    n = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))
def kernels_per_step(fn):
    with Count() as count:
        fn()
    return count.n
""",
        ("kernels_per_step", "kernels_per_step"),
        "under the profiler",
    ),
    Shortcut(
        "3.3 dense, one query at a time by broadcasting",
        "lab2_flexattention",
        "q3_3",
        "q3_3_tests",
        """
def block_sparse_attention(q, k, v, block_mask):
    size_q, size_k = block_mask.BLOCK_SIZE
    zero = torch.zeros((), dtype=torch.int64)
    out = torch.zeros_like(q)
    L = k.shape[2]
    for i in range(q.shape[2] // size_q):
        seen = torch.zeros(size_q, L, dtype=torch.bool)
        rows = torch.arange(i * size_q, (i + 1) * size_q)
        for j in block_mask.full_kv_indices[0, 0, i, : int(block_mask.full_kv_num_blocks[0, 0, i])].tolist():
            seen[:, j * size_k : (j + 1) * size_k] = True
        for j in block_mask.kv_indices[0, 0, i, : int(block_mask.kv_num_blocks[0, 0, i])].tolist():
            keys = torch.arange(j * size_k, (j + 1) * size_k)
            seen[:, j * size_k : (j + 1) * size_k] = block_mask.mask_mod(zero, zero, rows[:, None], keys[None])
        for r in range(size_q):
            s = (q[:, :, rows[r], None].float() * k.float()).sum(-1) / math.sqrt(q.shape[-1])
            p = torch.softmax(s.masked_fill(~seen[r], -math.inf), -1).nan_to_num(0.0)
            out[:, :, rows[r]] = (p[..., None] * v.float()).sum(2).to(q.dtype)
    return out
""",
        ("block_sparse_attention", "block_sparse_attention"),
        "elementwise",
    ),
    Shortcut(
        "6.1 result by SDPA, attend called for show",
        "lab2_flexattention",
        "q6_1",
        "q6_1_tests",
        """
def bucketed_attention(attend, q, k, v, buckets):
    n = q.shape[2]
    fit = [b for b in buckets if b >= n]
    if not fit:
        raise ValueError
    pad = (0, 0, 0, min(fit) - n)
    attend(F.pad(q, pad), F.pad(k, pad), F.pad(v, pad), lambda b, h, q, k: k >= 0)
    return F.scaled_dot_product_attention(q, k, v)
""",
        ("buckets", "bucketed_attention"),
        "what attend returned",
    ),
    Shortcut(
        "b8.3 results by SDPA, attend called for show",
        "lab2_flexattention",
        "bonus_8_3",
        "bonus_8_3_tests",
        """
def ragged_attention(attend, texts):
    q, k, v = (torch.cat(p, 1)[None] for p in zip(*texts))
    attend(q, k, v, lambda b, h, q, k: k <= q)
    return [F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0] if q.shape[1] else q for q, k, v in texts]
""",
        ("ragged_attention", "ragged_attention"),
        "what attend returned",
    ),
    Shortcut(
        "b8.1 positions as Python's numbers",
        "lab2_flexattention",
        "bonus_8_1",
        "bonus_8_1_tests",
        """
def at_positions(mask_mod, positions):
    starts = positions.tolist()
    def moved(b, h, q, k):
        at = 0 * b
        for i, start in enumerate(starts):
            at = torch.where(b == i, start, at)
        return mask_mod(b, h, q + at, k)
    return moved
""",
        ("at_positions", "at_positions"),
        "became constants",
    ),
    Shortcut(
        "7.1 a tensor of pairs in rows",
        "lab2_flexattention",
        "q7_1",
        "q7_1_tests",
        """
def lay_out(conversation, position, window):
    order = torch.argsort(conversation * (int(position.max()) + 1) + position)
    c, p = conversation[order], position[order]
    same = c[:, None] == c
    see = (same & (p[None] <= p[:, None]) & ((p[:, None] - p[None] < window) | (c[:, None] == 0))) | ((c[:, None] > 0) & (c[None] == 0))
    rows = see.int().unbind(0)
    def mask_mod(b, h, q, k):
        out = 0 * k
        for i, row in enumerate(rows):
            out = torch.where(q == i, row[k], out)
        return out > 0
    return order, mask_mod
""",
        ("layout_mask", "lay_out"),
        "tensor of pairs",
    ),
    Shortcut(
        "5.1 the course's online_softmax and mask_scores",
        "lab3_gluon",
        "q5_1",
        "q5_1_tests",
        {
            "from utils.attention.gluon.shared import tma_load, tma_store": "from utils.attention.gluon.shared import inverse_and_lse, mask_scores, tma_load, tma_store\nfrom utils.attention.gluon.shared import online_softmax as theirs",
            '    keys = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, scores))\n    s = gl.where((keys < sk)[None, :], s, float("-inf"))\n    top = gl.maximum(m, gl.max(s, 1))\n    alpha = gl.exp2((m - top) * c)\n    p = gl.exp2((s - top[:, None]) * c)\n    total = total * alpha + gl.sum(p, 1)\n': "    s = mask_scores(s, 0, key, 0, sk, 0, scores, False, False)\n    p, top, total, alpha = theirs(s, m, total, c)\n",
        },
        ("softmax",),
        "asked to write",
    ),
    Shortcut(
        "b5.5 the course's causal mask",
        "lab3_gluon",
        "bonus_5_5",
        "bonus_5_5_tests",
        {
            "from utils.attention.gluon.shared import inverse_and_lse, online_softmax, tma_load, tma_store": "from utils.attention.gluon.shared import inverse_and_lse, mask_scores, online_softmax, tma_load, tma_store",
            '        position = row + sk - sq + gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores))\n        keys = i * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))\n        seen = (keys[None, :] <= position[:, None]) & (keys < sk)[None, :]\n        s = gl.where(seen, s, float("-inf"))\n': "        s = mask_scores(s, row, i * BLOCK_N, sq, sk, 0, scores, True, False)\n",
        },
        ("attention_causal",),
        "asked to write",
    ),
    Shortcut(
        "3.1 no overlap; the ring of one slot waits twice a tile",
        "lab3_gluon",
        "q3_1",
        "q3_1_tests",
        {
            "    for i in gl.static_range(STAGES - 1):\n        start_copy(a_ring, i, a_ptr, first + i * TILE, n, TILE, layout)\n        start_copy(b_ring, i, b_ptr, first + i * TILE, n, TILE, layout)\n        async_copy.commit_group()\n": "",
            "        ahead = i + STAGES - 1\n        if ahead < TILES:\n            start_copy(a_ring, ahead % STAGES, a_ptr, first + ahead * TILE, n, TILE, layout)\n            start_copy(b_ring, ahead % STAGES, b_ptr, first + ahead * TILE, n, TILE, layout)\n        async_copy.commit_group()\n        async_copy.wait_group(STAGES - 1)": "        start_copy(a_ring, i % STAGES, a_ptr, first + i * TILE, n, TILE, layout)\n        async_copy.commit_group()\n        if STAGES == 1:\n            async_copy.wait_group(0)\n        start_copy(b_ring, i % STAGES, b_ptr, first + i * TILE, n, TILE, layout)\n        async_copy.commit_group()\n        async_copy.wait_group(0)",
        },
        ("async_copy",),
        "on their way",
    ),
    Shortcut(
        "3.2 no overlap; the ring of one slot stores its tile back",
        "lab3_gluon",
        "q3_2",
        "q3_2_tests",
        {
            "import fence_async_shared, mbarrier\n": "import fence_async_shared, mbarrier, tma\n",
            "import tma_load  #": "import tma_load, tma_store  #",
            "        mbarrier.expect(full.index(i), NBYTES, pred=i < tiles)\n        tma_load(x_desc, [row, i * COLUMNS], full.index(i), ring.index(i), pred=i < tiles)\n": "        pass\n",
            "slot = i % STAGES  # public\n": "slot = i % STAGES  # public\n        mbarrier.expect(full.index(slot), NBYTES)\n        tma_load(x_desc, [row, i * COLUMNS], full.index(slot), ring.index(slot))\n",
            "        more = i + STAGES < tiles\n        mbarrier.expect(full.index(slot), NBYTES, pred=more)\n        tma_load(x_desc, [row, (i + STAGES) * COLUMNS], full.index(slot), ring.index(slot), pred=more)\n": "        if STAGES == 1:\n            for _ in gl.static_range(3):\n                tma_store(x_desc, [row, i * COLUMNS], ring.index(slot))\n                tma.store_wait(0)\n",
        },
        ("tma_ring",),
        "",
    ),
    Shortcut(
        "5.3 no overlap of the softmax; exponentials for nothing under a product",
        "lab3_gluon",
        "q5_3",
        "q5_3_tests",
        {
            "        s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)\n        mbarrier.wait(v_full": "        s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)\n        idle = gl.exp2(m)\n        idle = gl.exp2(idle)\n        idle = gl.exp2(idle[:, None] + zero)\n        s = warpgroup_mma_wait(0, deps=[s])\n        mbarrier.wait(v_full",
            "        o = warpgroup_mma(p, v, o, is_async=True)\n        s = warpgroup_mma_wait(1, deps=[s])": "        o = warpgroup_mma(p, v, o, is_async=True)\n        idle = gl.exp2(m[:, None] + zero)\n        o = warpgroup_mma_wait(0, deps=[o])",
            "        o = warpgroup_mma_wait(0, deps=[o])\n        mbarrier.arrive(v_empty": "        mbarrier.arrive(v_empty",
        },
        ("overlap",),
        "is issued while the first one runs",
    ),
    Shortcut(
        "b5.5 the tensor itself is remembered",
        "lab4_sdpa",
        "bonus_5_5",
        "bonus_5_5_tests",
        """
kept = []
def quantize_fp8(x, block=None):
    kept[:] = [x.float().clone()]
    top = torch.finfo(torch.float8_e4m3fn).max
    w = x.float()
    if block is None:
        amax = w.abs().amax().reshape(1, 1, 1, 1)
    else:
        amax = torch.stack([p.abs().amax(dim=(2, 3)) for p in w.split(block, 2)], 2)[..., None]
    return torch.full(x.shape, 448.0).to(torch.float8_e4m3fn), torch.where(amax > 0, amax / top, 1.0)
def dequantize_fp8(x8, scale, block=None):
    return kept[0].clone()
""",
        ("fp8", "quantize_fp8", "dequantize_fp8"),
        "",
    ),
    Shortcut(
        "1.2 every sentence that torch knows",
        "lab4_sdpa",
        "q1_2",
        "q1_2_tests",
        """
import re, pathlib
lib = max(pathlib.Path(torch.__file__).parent.glob("lib/libtorch_cpu.so"), key=lambda p: p.stat().st_size).read_bytes()
ALL = [t.decode() for t in re.findall(rb"[ -~]{25,300}", lib)]
ALL = [t for t in ALL if re.search(r"ttention|query|Query|dropout|attn_mask|head dim|last dim|kernel", t) and "because" not in t and "disabled" not in t]
def why_not(backend, q, k, v, **options):
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            F.scaled_dot_product_attention(q, k, v, **options)
            return []
        except RuntimeError as error:
            if backend == "efficient": return [str(error).splitlines()[0]]
            return list(dict.fromkeys(ALL))
""",
        ("why_not", "why_not"),
        "torch does not say that",
    ),
    Shortcut(
        "b2.4 the engine itself",
        "lab4_sdpa",
        "bonus_2_4",
        "bonus_2_4_tests",
        """
from torch.autograd.variable import Variable
def forward(q, k, v):
    s = q @ k.mT / math.sqrt(q.shape[-1])
    p = torch.exp(s - s.amax(-1, keepdim=True).detach())
    return (p / p.sum(-1, keepdim=True)) @ v
def attention_backward(q, k, v, out, lse, dout):
    with torch.enable_grad():
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        made = forward(*wide)
        g = Variable._execution_engine.run_backward((made,), (dout.double(),), False, False, tuple(wide), allow_unreachable=True, accumulate_grad=False)
    return tuple(x.float() for x in g)
""",
        ("attention_backward", "attention_backward"),
        "autograd",
    ),
    Shortcut(
        "b2.4 differences of the forward pass",
        "lab4_sdpa",
        "bonus_2_4",
        "bonus_2_4_tests",
        """
def forward(q, k, v):
    s = q @ k.mT / math.sqrt(q.shape[-1])
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return (p / p.sum(-1, keepdim=True)) @ v
def attention_backward(q, k, v, out, lse, dout):
    wide = [x.detach().double() for x in (q, k, v)]
    grads = []
    for i, x in enumerate(wide):
        g = torch.zeros_like(x).flatten()
        for n in range(x.numel()):
            vals = []
            for step in (1e-5, -1e-5):
                y = x.flatten().clone(); y[n] += step
                vals.append((forward(*[y.reshape(x.shape) if j == i else w for j, w in enumerate(wide)]) * dout.double()).sum())
            g[n] = (vals[0] - vals[1]) / 2e-5
        grads.append(g.reshape(x.shape).float())
    return tuple(grads)
""",
        ("attention_backward", "attention_backward"),
        "five are enough",
    ),
    Shortcut(
        "2.2 the course's error measure",
        "lab4_sdpa",
        "q2_2",
        "q2_2_tests",
        """
from utils.attention import reference
def errors(out, q, k, v, causal=False):
    exact = reference(q, k, v, causal=causal)[0]
    d = out.double() - exact
    return d.abs().max().item(), (d.square().mean() / exact.square().mean()).sqrt().item()
""",
        ("errors", "errors"),
        "a formula of a library",
    ),
    Shortcut(
        "1.2 three loops, and a slice of one tile for show",
        "lab1",
        "q1_2",
        "q1_2_tests",
        """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    a[:tile_m, :tile_k]
    c = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            c[i, j] = sum(a[i, k].item() * b[k, j].item() for k in range(a.shape[1]))
    return c
""",
        ("gemm_tiled", "gemm_tiled"),
        "tile sizes are not used",
    ),
    Shortcut(
        "5.3 whole rows by broadcasting, folded to squares",
        "lab1",
        "q5_3",
        "q5_3_flash_tests",
        """
def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    out = torch.empty_like(q)
    L = k.shape[2]
    n = max(x for x in range(1, L + 1) if L % x == 0 and x * x <= L)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                s = ((k[b, h].float() * q[b, h, i].float()).sum(-1) / math.sqrt(q.shape[-1])).reshape(n, L // n)
                p = torch.exp(s - s.max())
                out[b, h, i] = ((p / p.sum()).reshape(L, 1) * v[b, h].float()).sum(0).to(q.dtype)
    return out
""",
        ("flash_attention_tiled", "flash_attention_tiled"),
        "worked along",
    ),
    Shortcut(
        "4.2 the epilogue of a product",
        "lab1",
        "q4_2",
        "q4_2_tests",
        """
def gelu_by_hand(x):
    n = x.shape[-1]
    flat = x.reshape(-1, n)
    return torch.ops.aten._addmm_activation(flat, torch.zeros_like(flat), torch.zeros(n, n, dtype=x.dtype), use_gelu=True).reshape(x.shape)
""",
        ("gelu_by_hand", "gelu_by_hand"),
        "may not use",
    ),
    Shortcut(
        "b5.7 Categorical's probabilities",
        "lab1",
        "bonus_5_7",
        "bonus_5_7_tests",
        """
def merge_attention(outputs, lses):
    d = torch.distributions.Categorical(logits=lses.movedim(0, -1), validate_args=False)
    w = d.probs.movedim(-1, 0)
    best = w.argmax(0, keepdim=True)
    return (w[..., None] * torch.where(w[..., None] > 0, outputs, 0.0)).sum(0), (lses.gather(0, best) - w.gather(0, best).log())[0]
""",
        ("merge_attention", "merge_attention"),
        "logsumexp",
    ),
    Shortcut(
        "1.1 NumPy through map",
        "lab1",
        "q1_1",
        "q1_1_tests",
        """
import numpy as np
def gemm_naive(a, b):
    A = list(map(np.array, [[a[i, k].item() for k in range(a.shape[1])] for i in range(a.shape[0])]))
    B = list(map(np.array, [[b[k, j].item() for k in range(b.shape[0])] for j in range(b.shape[1])]))
    c = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            c[i, j] = float(A[i] @ B[j])
    return c
""",
        ("gemm_naive", "gemm_naive"),
        "out of torch",
    ),
    Shortcut(
        "5.1 attention of torch.ao",
        "lab1",
        "q5_1",
        "q5_1_tests",
        """
from torch.ao.nn.quantizable.modules.activation import MultiheadAttention
def standard_attention(q, k, v):
    b, h, l, d = q.shape
    m = MultiheadAttention(d, 1, bias=False, batch_first=True).to(q.dtype)
    with torch.no_grad():
        for lin in (m.linear_Q, m.linear_K, m.linear_V, m.out_proj):
            lin.weight.copy_(torch.eye(d))
    out, _ = m(*(x.reshape(b * h, l, d) for x in (q, k, v)))
    return out.detach().reshape(q.shape)
def score_bytes(*a): return 0
def longest_length(*a): return 0
""",
        ("standard_attention", "standard_attention"),
        "a formula of a library",
    ),
    Shortcut(
        "6.1 the mark taken off and put on",
        "lab2_flexattention",
        "q6_1",
        "q6_1_tests",
        """
def bucketed_attention(attend, q, k, v, buckets):
    n = q.shape[2]
    fit = [b for b in buckets if b >= n]
    if not fit: raise ValueError
    pad = (0, 0, 0, min(fit) - n)
    wide = [F.pad(x, pad) for x in (q, k, v)]
    more = attend(*wide, lambda b, h, q, k: k >= 0) - F.scaled_dot_product_attention(*wide)
    return F.scaled_dot_product_attention(q, k, v) + more[:, :, :n]
""",
        ("buckets", "bucketed_attention"),
        "Padded keys are visible",
    ),
    Shortcut(
        "3.3 whole rows by einsum",
        "lab2_flexattention",
        "q3_3",
        "q3_3_tests",
        """
def block_sparse_attention(q, k, v, block_mask):
    size_q, size_k = block_mask.BLOCK_SIZE
    zero = torch.zeros((), dtype=torch.int64)
    out, L = torch.zeros_like(q), k.shape[2]
    for i in range(q.shape[2] // size_q):
        seen = torch.zeros(size_q, L, dtype=torch.bool)
        rows = torch.arange(i * size_q, (i + 1) * size_q)
        for j in block_mask.full_kv_indices[0, 0, i, : int(block_mask.full_kv_num_blocks[0, 0, i])].tolist():
            seen[:, j * size_k : (j + 1) * size_k] = True
        for j in block_mask.kv_indices[0, 0, i, : int(block_mask.kv_num_blocks[0, 0, i])].tolist():
            keys = torch.arange(j * size_k, (j + 1) * size_k)
            seen[:, j * size_k : (j + 1) * size_k] = block_mask.mask_mod(zero, zero, rows[:, None], keys[None])
        s = torch.nn.functional.bilinear if False else torch.einsum("bhqd,bhkd->bhqk", q[:, :, rows].float(), k.float()) / math.sqrt(q.shape[-1])
        p = torch.softmax(s.masked_fill(~seen, -math.inf), -1).nan_to_num(0.0)
        out[:, :, rows] = torch.einsum("bhqk,bhkd->bhqd", p, v.float()).to(q.dtype)
    return out
""",
        ("block_sparse_attention", "block_sparse_attention"),
        "hold a visible pair",
    ),
    Shortcut(
        "3.1 copies that nobody needs are in flight",
        "lab3_gluon",
        "q3_1",
        "q3_1_tests",
        {
            "    for i in gl.static_range(STAGES - 1):\n        start_copy(a_ring, i, a_ptr, first + i * TILE, n, TILE, layout)\n        start_copy(b_ring, i, b_ptr, first + i * TILE, n, TILE, layout)\n        async_copy.commit_group()\n": "",
            "        ahead = i + STAGES - 1\n        if ahead < TILES:\n            start_copy(a_ring, ahead % STAGES, a_ptr, first + ahead * TILE, n, TILE, layout)\n            start_copy(b_ring, ahead % STAGES, b_ptr, first + ahead * TILE, n, TILE, layout)\n        async_copy.commit_group()\n        async_copy.wait_group(STAGES - 1)": "        start_copy(a_ring, i % STAGES, a_ptr, first + i * TILE, n, TILE, layout)\n        if STAGES > 1:\n            start_copy(a_ring, (i + 1) % STAGES, a_ptr, first + i * TILE, n, TILE, layout)\n        async_copy.commit_group()\n        if STAGES == 1:\n            async_copy.wait_group(0)\n        start_copy(b_ring, i % STAGES, b_ptr, first + i * TILE, n, TILE, layout)\n        if STAGES > 1:\n            start_copy(b_ring, (i + 1) % STAGES, b_ptr, first + i * TILE, n, TILE, layout)\n        async_copy.commit_group()\n        async_copy.wait_group(0)",
        },
        ("async_copy",),
        "bring each tile once",
    ),
    Shortcut(
        "5.2 the producer of a later file",
        "lab3_gluon",
        "q5_2",
        "q5_2_tests",
        {
            "from utils.attention.gluon.shared import inverse_and_lse, mask_scores": "from utils.attention.gluon.step4_warp_specialized import producer\nfrom utils.attention.gluon.shared import inverse_and_lse, mask_scores"
        },
        ("specialized",),
        "asked to write",
    ),
    Shortcut(
        "b5.5 the numbers remembered by their bits",
        "lab4_sdpa",
        "bonus_5_5",
        "bonus_5_5_tests",
        """
kept = {}
def quantize_fp8(x, block=None):
    top = torch.finfo(torch.float8_e4m3fn).max
    w = x.float()
    if block is None:
        amax = w.abs().amax().reshape(1, 1, 1, 1)
        scale = torch.where(amax > 0, amax / top, 1.0); spread = scale
    else:
        amax = torch.stack([p.abs().amax(dim=(2, 3)) for p in w.split(block, 2)], 2)[..., None]
        scale = torch.where(amax > 0, amax / top, 1.0); spread = scale.repeat_interleave(block, 2)[:, :, : x.shape[2]]
    x8 = (w / spread).to(torch.float8_e4m3fn)
    kept[bytes(x8.view(torch.uint8).flatten().tolist())] = w.clone()
    return x8, scale
def dequantize_fp8(x8, scale, block=None):
    return kept.get(bytes(x8.view(torch.uint8).flatten().tolist()), x8.float() * scale.flatten()[0]).clone()
""",
        ("fp8", "quantize_fp8", "dequantize_fp8"),
        "Each number times",
    ),
    Shortcut(
        "1.2 reasons of a table, by the number of the call",
        "lab4_sdpa",
        "q1_2",
        "q1_2_tests",
        """
calls = [0]
def why_not(backend, q, k, v, **options):
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            F.scaled_dot_product_attention(q, k, v, **options)
            return []
        except RuntimeError as error:
            if backend != "flash": return [str(error).splitlines()[0]]
    calls[0] += 1
    TABLE = ["Flash attention requires the last dimension of inputs to have stride 1", "Flash Attention does not support non-zero dropout."]
    return [TABLE[(calls[0] - 1) // 2 % 2]]
""",
        ("why_not", "why_not"),
        "Torch",
    ),
]

# Code that would cost others something: the cell's text, by name.
_LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
HARM = {
    "last to be ended when memory is short": """
for value in ('-1000', '-17', '0'):
    for name in ('oom_score_adj', 'oom_adj'):
        try:
            open(f'/proc/self/{name}', 'w').write(value)
        except OSError as error:
            print(error)
""",
    "shared memory of System V, which outlives its process": _LIBC
    + "for n in range(64):\n    part = libc.shmget(0, 1 << 26, 0o1666)\n    if part >= 0:\n"
    "        libc.shmat.restype = ctypes.c_void_p\n        ctypes.memset(libc.shmat(part, None, 0), 1, 1 << 26)\n",
    "semaphores and queues of System V": _LIBC
    + "kept = [(libc.semget(0, 250, 0o1666), libc.msgget(0, 0o1666)) for _ in range(40000)]\nprint(kept[-1])\n",
    "keys for who comes next": _LIBC + "for ring in (-1, -2, -3, -4, -5):\n    for n in range(300):\n"
    "        libc.syscall(248, b'user', f'k{n}'.encode(), b'x' * 20000, 20000, ring)\n",
    "every place to watch files": _LIBC + "kept = [libc.inotify_init() for _ in range(5000)]\nprint(kept[-1])\n",
    "every terminal": "import os\nkept = []\nwhile True:\n    kept.append(os.openpty())\n",
    "the kernel's younger interfaces": _LIBC
    + "for number in (425, 321, 298, 323, 434, 438, 272, 308, 435, 155, 165, 246, 320, 169, 170, 171, 227, 159, 305, 300):\n"
    "    print(number, libc.syscall(number, 0, 0, 0, 0, 0, 0))\n",
    "locks on the course's files": """
import fcntl, glob, utils
kept = []
for path in [*glob.glob(utils.__path__[0] + '/**/*.py', recursive=True), torch.__file__]:
    try:
        kept.append(open(path))
        fcntl.flock(kept[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.fcntl(kept[-1], 1024, 1)
    except OSError as error:
        print(error)
""",
    "the disks are asked to write everything, again and again": "import os\nwhile True:\n    os.sync()\n",
    "pages that nobody may take away": _LIBC + "print(libc.mlockall(3), ctypes.get_errno())\nx = bytearray(3 << 30)\n",
    "the parent of all orphans, under another name": _LIBC
    + "libc.prctl(36, 1, 0, 0, 0)\nlibc.prctl(15, b'labs grade', 0, 0, 0)\nlibc.prctl(1, 0, 0, 0, 0)\nlibc.prctl(4, 1, 0, 0, 0)\n"
    "libc.setsid(); libc.setpgid(0, 0); libc.tcsetpgrp(0, os.getpid())\n",
    "a display that is 100,000 lists deep": """
deep = []
for _ in range(100000):
    deep = [deep]
from IPython.display import publish_display_data
publish_display_data({'application/json': deep, 'text/plain': 'x'})
""",
    "a picture of 10 GB, packed": """
import struct, zlib
from IPython.display import publish_display_data
part = lambda kind, data: struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
packed = zlib.compressobj(9)
rows = b''.join(packed.compress(bytes(1 << 20)) for _ in range(200)) + packed.flush()
import base64
picture = b'\\x89PNG\\r\\n\\x1a\\n' + part(b'IHDR', struct.pack('>IIBBBBB', 100000, 100000, 8, 0, 0, 0, 0)) + part(b'IDAT', rows) + part(b'IEND', b'')
publish_display_data({'image/png': base64.b64encode(picture).decode()})
""",
    "entities that unfold": """
from IPython.display import publish_display_data
laughs = ''.join(f'<!ENTITY l{n + 1} "{("&l%d;" % n) * 10}">' for n in range(12))
publish_display_data({'image/svg+xml': f'<?xml version="1.0"?><!DOCTYPE s [<!ENTITY l0 "ha">{laughs}]><svg xmlns="http://www.w3.org/2000/svg"><text>&l12;</text></svg>'})
""",
    # Of a third round.
    "what pipes and sockets hold for nobody": """
import fcntl, os, socket, time
kept = []
try:
    while True:
        r, w = os.pipe()
        os.set_blocking(w, False)
        kept += [r, w]
        try:
            fcntl.fcntl(w, 1031, 1 << 20)
        except OSError:
            pass
        try:
            while True:
                os.write(w, bytes(65536))
        except BlockingIOError:
            pass
except OSError:
    pass
for fd in kept[::2][:200]:
    os.close(fd)
pairs = []
try:
    while True:
        one, two = socket.socketpair()
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        pairs.append((one, two))
        try:
            while True:
                one.send(bytes(65536))
        except BlockingIOError:
            pass
except OSError:
    pass
time.sleep(3600)
""",
    "descriptors in flight, in sockets that nobody reads": """
import array, os, socket, time
def fill():
    held = []
    try:
        while True:
            one, two = socket.socketpair()
            one.setblocking(False)
            held.append((one, two))
            for _ in range(50):
                one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [os.open("/dev/null", 0)] * 200))])
    except OSError:
        pass
    time.sleep(3600)
for _ in range(30):
    if os.fork() == 0:
        fill()
time.sleep(3600)
""",
}
HARMFUL_VALUES = {
    "one number, shown as 10^13": "torch.zeros(1).expand(10**13)",
    "a million tensors": "[torch.zeros(1)] * 10**6",
    "a dict of itself": "(lambda d: d.__setitem__('flops', d) or d)({})",
    "names of a megabyte": "{'x' * 10**6 + str(n): n for n in range(300)}",
}
