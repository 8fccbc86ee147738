"""Sixteen more right answers in other ways, drawn by seed over the questions that the cold round had made stricter."""

from __future__ import annotations

STUDENTS: dict[str, tuple[str, dict]] = {
    "tiles by dot products of rows and columns, the sum over K in the middle": (
        "lab1",
        {
            "q1_2": """
import itertools

def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    m, k = a.shape
    n = b.shape[1]
    wide = torch.promote_types(a.dtype, torch.float32)
    c = torch.zeros(m, n, dtype=wide, device=a.device)
    for k0, i, j in itertools.product(range(0, k, tile_k), range(0, m, tile_m), range(0, n, tile_n)):
        x, y = a[i : i + tile_m, k0 : k0 + tile_k].to(wide), b[k0 : k0 + tile_k, j : j + tile_n].to(wide).T
        for row in range(x.shape[0]):
            c[i + row, j : j + tile_n] += torch.linalg.vecdot(x[row].expand_as(y), y)
    return c.to(a.dtype)
"""
        },
    ),
    "three loops over Python's lists and complex numbers": (
        "lab1",
        {
            "q1_1": """
def gemm_naive(a, b):
    result = a.new_zeros((len(a), b.size(1)))
    columns = [[b[k][j] for k in range(b.size(0))] for j in range(b.size(1))]
    for i, row in enumerate(a):
        for j, column in enumerate(columns):
            for x, y in zip(row, column):
                result[i, j] += x * y
    return result
"""
        },
    ),
    "GELU by expm1, kernels with a schedule of one's own": (
        "lab1",
        {
            "q4_2": """
def gelu_by_hand(x):
    wide = x.double()
    u = (2 / torch.pi) ** 0.5 * torch.addcmul(wide, wide.square(), wide, value=0.044715)
    e = torch.expm1((2 * u).clamp(-700, 700))
    return (wide * (e + 1) / (e + 2)).to(x.dtype)

def elementwise_bytes(numel, dtype, one_input, two_inputs):
    return sum([2] * one_input + [3] * two_inputs) * numel * dtype.itemsize

def fusion_speedup(one_input, two_inputs):
    return one_input + 1.5 * two_inputs
""",
            "q4_3": """
def kernels_per_step(fn):
    steps = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with torch.profiler.profile(activities=kinds, schedule=steps) as seen:
        for _ in range(5):
            fn()
            synchronize()
            seen.step()
    return count_cuda_kernels(seen)["total"]
""",
        },
    ),
    "flash attention over all queries' statistics, divided at the end": (
        "lab1",
        {
            "q5_3": """
def online_softmax_stats(blocks):
    top = total = None
    for x in blocks:
        t, s = x.amax(1), torch.logsumexp(x, 1)
        if top is None:
            top, total = t, (s - t).exp()
        else:
            new = torch.max(top, t)
            total = total * (top - new).exp() + (s - new).exp()
            top = new
    return top, total

def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    scale = q.size(-1) ** -0.5
    out = q.new_zeros(q.shape, dtype=torch.float32)
    top, total = out.new_full(q.shape[:3], -math.inf), out.new_zeros(q.shape[:3])
    for i in range(0, q.size(2), tile_q):
        at = slice(i, i + tile_q)
        for x, y in zip(k.float().split(tile_k, 2), v.float().split(tile_k, 2)):
            s = torch.einsum("bhqd,bhkd->bhqk", q[:, :, at].float() * scale, x)
            new = torch.maximum(top[:, :, at], s.amax(-1))
            old, p = (top[:, :, at] - new).exp(), (s - new[..., None]).exp()
            total[:, :, at] = total[:, :, at] * old + p.sum(-1)
            out[:, :, at] = out[:, :, at] * old[..., None] + p @ y
            top[:, :, at] = new
    return (out * total.reciprocal()[..., None]).to(q.dtype)
"""
        },
    ),
    "pointers of a block moved along K": (
        "lab1",
        {
            "q1_5": {
                "            a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak,\n": (
                    "            a_ptr + start * stride_ak + rows[:, None] * stride_am + tl.arange(0, BLOCK_K)[None, :] * stride_ak,\n"
                ),
                "        accumulator = tl.dot(a_tile, b_tile, accumulator": (
                    "        accumulator += tl.dot(a_tile, b_tile"
                ),
            }
        },
    ),
    "masks by stacking, windows by their number": (
        "lab2_flexattention",
        {
            "q2_3": """
def both(*mods):
    def mask_mod(b, h, q, k):
        return torch.stack(torch.broadcast_tensors(*(mod(b, h, q, k) for mod in mods))).all(0)
    return mask_mod

def either(*mods):
    def mask_mod(b, h, q, k):
        return torch.stack(torch.broadcast_tensors(*(mod(b, h, q, k) for mod in mods))).any(0)
    return mask_mod

def window_per_head(windows):
    def mask_mod(b, h, q, k):
        return (q - k >= 0) & (k + windows.to(q.dtype)[h] > q)
    return mask_mod

def sinks_and_window(sinks, window):
    def causal_(b, h, q, k):
        return q >= k
    return both(causal_, either(lambda b, h, q, k: k < sinks, lambda b, h, q, k: q - k < window))
""",
            "bonus_8_1": """
def at_positions(mask_mod, positions):
    first = positions.clone()
    return lambda b, h, q, k: mask_mod(b, h, torch.add(first[b], q), k)
""",
        },
    ),
    "blocks with a running softmax, products by broadcasting": (
        "lab2_flexattention",
        {
            "q3_3": """
def block_sparse_attention(q, k, v, block_mask):
    size_q, size_k = block_mask.BLOCK_SIZE
    zero = torch.tensor(0)
    out = torch.zeros(q.shape, dtype=torch.float32)
    for i in range(q.shape[2] // size_q):
        at = slice(i * size_q, (i + 1) * size_q)
        x = q[:, :, at].float() / math.sqrt(q.shape[-1])
        m = torch.full(x.shape[:3], -math.inf)
        l, o = torch.zeros_like(m), torch.zeros_like(x)
        for counts, places, partial in (
            (block_mask.kv_num_blocks, block_mask.kv_indices, True),
            (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, False),
        ):
            for j in places[0, 0, i, : counts[0, 0, i]].tolist():
                keys = slice(j * size_k, (j + 1) * size_k)
                s = (x[:, :, :, None] * k[:, :, None, keys].float()).sum(-1)
                if partial:
                    see = block_mask.mask_mod(zero, zero, torch.arange(at.start, at.stop)[:, None], torch.arange(keys.start, keys.stop)[None])
                    s = torch.where(see, s, -math.inf)
                new = torch.maximum(m, s.amax(-1))
                safe = torch.where(new.isinf(), 0.0, new)
                p, old = (s - safe[..., None]).exp(), (m - safe).exp()
                l, o, m = l * old + p.sum(-1), o * old[..., None] + (p[..., None] * v[:, :, None, keys].float()).sum(-2), new
        out[:, :, at] = o / torch.where(l > 0, l, 1.0)[..., None]
    return out.to(q.dtype)
"""
        },
    ),
    "padding by cat, results by narrow and unbind": (
        "lab2_flexattention",
        {
            "q6_1": """
import bisect

def bucketed_attention(attend, q, k, v, buckets):
    n, sizes = q.size(2), sorted(buckets)
    place = bisect.bisect_left(sizes, n)
    if place == len(sizes):
        raise ValueError(f"{n} tokens fit into none of {sizes}")
    def wide(x):
        return torch.cat([x, x.new_zeros(*x.shape[:2], sizes[place] - n, x.size(3))], 2)
    real = torch.arange(sizes[place], device=q.device) < n
    return attend(wide(q), wide(k), wide(v), lambda b, h, q, k: real[k] & (q >= 0)).narrow(2, 0, n)
""",
            "bonus_8_3": """
def ragged_attention(attend, texts):
    lengths = torch.tensor([text[0].size(1) for text in texts])
    ends = lengths.cumsum(0)
    owner = torch.searchsorted(ends, torch.arange(int(ends[-1])), right=True)
    rows = [torch.cat([text[i] for text in texts], 1).unsqueeze(0) for i in range(3)]
    out = attend(*rows, lambda b, h, q, k: (k <= q) & (owner[q] == owner[k])).squeeze(0)
    return [out[:, end - n : end] for n, end in zip(lengths.tolist(), ends.tolist())]
""",
        },
    ),
    "cp.async with the first copies in the loop": (
        "lab3_gluon",
        {
            "q3_1": {
                "    for i in range(TILES):\n        ahead = i + STAGES - 1\n        if ahead < TILES:\n": (
                    "    for i in range(TILES):\n        ahead = i + (STAGES - 1)\n        if TILES > ahead:\n"
                ),
                "        total = a_ring.index(i % STAGES).load(layout) + b_ring.index(i % STAGES).load(layout)\n": (
                    "        total = b_ring.index(i % STAGES).load(layout)\n        total += a_ring.index(i % STAGES).load(layout)\n"
                ),
            },
            "q5_1": {
                '    s = gl.where((keys < sk)[None, :], s, float("-inf"))\n': (
                    '    s = s + gl.where(keys < sk, 0.0, float("-inf"))[None, :]\n'
                ),
                "    alpha = gl.exp2((m - top) * c)\n    p = gl.exp2((s - top[:, None]) * c)\n": (
                    "    p = gl.exp2(s * c - (top * c)[:, None])\n    alpha = gl.exp2(m * c - top * c)\n"
                ),
            },
            "q5_3": {
                "        p_next, m, total, alpha = online_softmax(s, m, total, c)\n        o = warpgroup_mma_wait(0, deps=[o])\n": (
                    "        p_next, m, total, alpha = online_softmax(s, m, total, c)\n"
                    "        factor = gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]\n"
                    "        o = warpgroup_mma_wait(0, deps=[o])\n"
                ),
                "        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]  # public\n": (
                    "        o = o * factor\n"
                ),
            },
            "bonus_5_5": {
                "        seen = (keys[None, :] <= position[:, None]) & (keys < sk)[None, :]\n": (
                    "        seen = keys[None, :] < gl.minimum(position + 1, sk)[:, None]\n"
                )
            },
        },
    ),
    "reasons by a list of filters": (
        "lab4_sdpa",
        {
            "q1_2": """
import contextlib

def why_not(backend, q, k, v, **options):
    found = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel([BACKENDS[backend]]))
        heard = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.resetwarnings()
        warnings.simplefilter("always")
        try:
            F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:
            found = [str(w.message).partition(" (Triggered internally")[0] for w in heard]
            found = [t for t in found if not any(part in t for part in ("not used because", "runtime disabled"))]
            found = sorted(set(found), key=found.index) or str(error).split("\\n")[:1]
    return found
""",
            "bonus_5_5": """
TOP = 448.0

def _blocks(x, block):
    size = x.shape[2]
    block = block or size
    padded = F.pad(x, (0, 0, 0, -size % block))
    return padded.unflatten(2, (-1, block))

def quantize_fp8(x, block=None):
    parts = _blocks(x.float(), block)
    top = parts.abs().amax((0, 1, 2, 3, 4) if block is None else (3, 4), keepdim=True)
    scale = torch.where(top == 0, torch.ones_like(top), top / TOP)
    x8 = (parts / scale).flatten(2, 3)[:, :, : x.shape[2]].to(torch.float8_e4m3fn)
    return x8, scale[..., 0]

def dequantize_fp8(x8, scale, block=None):
    return (_blocks(x8.float(), block) * scale[..., None]).flatten(2, 3)[:, :, : x8.shape[2]]
""",
        },
    ),
}
