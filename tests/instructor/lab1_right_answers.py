"""Right answers to lab 1 that differ from the model answers: (difference, answer cell, code)."""

RIGHT_ANSWERS = [
    (
        "sum kept in C",
        "q1_1",
        """
def gemm_naive(a, b):
    c = a.new_zeros(a.shape[0], b.shape[1])
    for i in range(a.size(0)):
        for j in range(b.size(1)):
            for k in range(a.size(1)):
                c[i][j] += a[i][k] * b[k][j]
    return c
""",
    ),
    (
        "sum in a 0-d tensor, loops in another order",
        "q1_1",
        """
def gemm_naive(a, b):
    m, k = a.shape
    n = b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    for j in range(n):
        for i in range(m):
            total = torch.zeros((), dtype=a.dtype, device=a.device)
            for p in range(k):
                total = total + torch.mul(a[i, p], b[p, j])
            c[i, j] = total
    return c
""",
    ),
    (
        "matrices padded to whole tiles",
        "q1_2",
        """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    up = lambda size, tile: -(-size // tile) * tile
    a = F.pad(a, (0, up(k, tile_k) - k, 0, up(m, tile_m) - m))
    b = F.pad(b, (0, up(n, tile_n) - n, 0, up(k, tile_k) - k))
    c = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for i in range(0, a.shape[0], tile_m):
        for j in range(0, b.shape[1], tile_n):
            for p in range(0, a.shape[1], tile_k):
                x, y = a[i:i + tile_m, p:p + tile_k], b[p:p + tile_k, j:j + tile_n]
                c[i:i + tile_m, j:j + tile_n] += (x.unsqueeze(2) * y.unsqueeze(0)).sum(dim=1)
    return c[:m, :n].to(a.dtype)
""",
    ),
    (
        "rows of a tile, one at a time, accumulated in float64",
        "q1_2",
        """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    c = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    for i in range(0, a.shape[0], tile_m):
        for j in range(0, b.shape[1], tile_n):
            for p in range(0, a.shape[1], tile_k):
                x, y = a[i:i + tile_m, p:p + tile_k].double(), b[p:p + tile_k, j:j + tile_n].double()
                for row in range(x.shape[0]):
                    c[i + row, j:j + tile_n] += (x[row, :, None] * y).sum(0)
    return c.to(a.dtype)
""",
    ),
    (
        "one wait between two calls",
        "q1_3",
        """
def time_calls(fn, n_calls, synchronize):
    result = []
    synchronize()
    for i in range(n_calls):
        t0 = time.perf_counter_ns()
        fn()
        synchronize()
        result += [(time.perf_counter_ns() - t0) / 1e6]
    return result
""",
    ),
    (
        "lists, floats and 0-d tensors as numbers",
        "q1_4",
        """
def gemm_macs_flops_bytes(m, n, k, dtype):
    macs = float(m) * n * k
    size = torch.empty(0, dtype=dtype).element_size()
    return [macs, torch.tensor(2 * macs, dtype=torch.float64), size * (m * k + k * n + m * n)]
""",
    ),
    (
        "pairs in closed form",
        "q3_1",
        """
def attended_pairs(query_len, kv_len, window=None):
    w = kv_len if window is None else min(window, kv_len)
    first = kv_len - query_len  # position of the first query
    growing = max(0, min(kv_len, w) - first)  # queries that see fewer than w or exactly w keys
    return growing * first + growing * (growing + 1) // 2 + (query_len - growing) * w
""",
    ),
    (
        "inputs from the course's own helpers",
        "q3_4",
        """
def decode_with_cache(layer, rotary_emb, prompt, new_tokens):
    b, s, h = prompt.shape
    t = new_tokens.shape[1]
    kind = layer.self_attn.layer_type
    cache = initialize_kv_cache(layer.config, max_cache_len=s + t + 10)
    _, ids = create_prefill_inputs(b, s, h, prompt.dtype, prompt.device)
    prefill_forward(layer, prompt, ids, get_position_embeddings(prompt, ids, rotary_emb, kind), cache)
    out = torch.empty_like(new_tokens)
    for i, x in enumerate(new_tokens.split(1, dim=1)):
        _, ids, place = create_decode_inputs_with_cache(b, s + i, h, x.dtype, x.device)
        out[:, i:i + 1] = decode_forward(
            layer, x, ids, get_position_embeddings(x, ids, rotary_emb, kind), use_kv_cache=True,
            past_key_values=cache, cache_positions=place,
        )
    return out
""",
    ),
    (
        "trace written by a handler's profiler, steps by hand",
        "q4_1",
        """
def profile_steps(fn, trace_path):
    kinds = torch.profiler.supported_activities()
    prof = torch.profiler.profile(activities=kinds, schedule=default_schedule, record_shapes=True)
    prof.start()
    for _ in range(10):
        fn()
        prof.step()
    prof.stop()
    prof.export_chrome_trace(trace_path)
    return prof
""",
    ),
    (
        "torch.pow, and constants as tensors",
        "q4_2",
        """
def gelu_by_hand(x):
    c = torch.tensor(math.sqrt(2.0 / math.pi), dtype=x.dtype, device=x.device)
    return x * 0.5 * (torch.tanh((torch.pow(x, 3) * 0.044715 + x) * c) + 1.0)
""",
    ),
    (
        "sigmoid in place of tanh",
        "q4_2",
        """
def gelu_by_hand(x):
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))
""",
    ),
    (
        "launch queue simulated",
        "q4_4",
        """
def eager_time_us(n, launch_us, kernel_us):
    free = 0.0
    for i in range(n):
        free = max(free, (i + 1) * launch_us) + kernel_us
    return free
""",
    ),
    (
        "softmax by hand",
        "q5_1",
        """
def standard_attention(q, k, v):
    s = torch.einsum("bhqd,bhkd->bhqk", q * q.shape[-1] ** -0.5, k)
    p = (s - s.max(dim=-1, keepdim=True).values).exp()
    return torch.matmul(p / p.sum(-1, keepdim=True), v)
""",
    ),
    (
        "heads repeated by hand",
        "q5_2",
        """
def attention_bshd(q, k, v):
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(0, 2, 1, 3).contiguous()
""",
    ),
    (
        "online softmax from the first block on",
        "q5_3",
        """
def online_softmax_stats(blocks):
    blocks = iter(blocks)
    first = next(blocks)
    m, _ = first.max(dim=1)
    l = (first - m.unsqueeze(1)).exp().sum(1)
    for x in blocks:
        bigger = torch.max(m, x.max(dim=1).values)
        l.mul_((m - bigger).exp()).add_((x - bigger.unsqueeze(1)).exp().sum(1))
        m = bigger
    return m, l
""",
    ),
    (
        "one batch and head at a time, output divided in each step",
        "q5_3",
        """
def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(0, q.shape[2], tile_q):
                x = q[b, h, i:i + tile_q].float() * q.shape[-1] ** -0.5
                m = x.new_full((x.shape[0], 1), -math.inf)
                l, o = x.new_zeros(x.shape[0], 1), torch.zeros_like(x)
                for y, w in zip(k[b, h].float().split(tile_k), v[b, h].float().split(tile_k)):
                    s = x @ y.T
                    top = torch.maximum(m, s.max(dim=1, keepdim=True).values)
                    old, p = l * torch.exp(m - top), torch.exp(s - top)
                    new = old + p.sum(1, keepdim=True)
                    o, l, m = (o * old + p @ w) / new, new, top
                out[b, h, i:i + tile_q] = o
    return out.to(q.dtype)
""",
    ),
    (
        "merged two by two",
        "bonus_5_7",
        """
def merge_attention(outputs, lses):
    o, l = torch.nan_to_num(outputs[0]), lses[0]
    for x, y in zip(outputs[1:], lses[1:]):
        top = torch.maximum(l, y)
        safe = torch.where(torch.isinf(top), 0.0, top)
        a, b = torch.exp(l - safe), torch.exp(y - safe)
        total = (a + b).clamp_min(1e-30)
        o = (a[..., None] * o + b[..., None] * torch.nan_to_num(x)) / total[..., None]
        l = torch.where(a + b > 0, safe + torch.log(total), -math.inf)
    return o, l
""",
    ),
]
