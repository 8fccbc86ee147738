"""Right answers to lab 1 that differ from the model answers; `answers_in_text` explains the form."""

from tests.instructor.lab_cases import answers_in_text

RIGHT_ANSWERS = answers_in_text(r"""
# %% q1_1: sum kept in C
def gemm_naive(a, b):
    c = a.new_zeros(a.shape[0], b.shape[1])
    for i in range(a.size(0)):
        for j in range(b.size(1)):
            for k in range(a.size(1)):
                c[i][j] += a[i][k] * b[k][j]
    return c

# %% q1_2: matrices padded to whole tiles
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    up = lambda size, tile: -(-size // tile) * tile
    a = F.pad(a, (0, up(k, tile_k) - k, 0, up(m, tile_m) - m))
    b = F.pad(b, (0, up(n, tile_n) - n, 0, up(k, tile_k) - k))
    c = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for i in range(0, a.shape[0], tile_m):
        for j in range(0, b.shape[1], tile_n):
            for p in range(0, a.shape[1], tile_k):
                x, y = a[i:i + tile_m, p:p + tile_k].float(), b[p:p + tile_k, j:j + tile_n].float()
                c[i:i + tile_m, j:j + tile_n] += (x.unsqueeze(2) * y.unsqueeze(0)).sum(dim=1)
    return c[:m, :n].to(a.dtype)

# %% q1_3: one wait between two calls
def time_calls(fn, n_calls, synchronize):
    result = []
    synchronize()
    for i in range(n_calls):
        t0 = time.perf_counter_ns()
        fn()
        synchronize()
        result += [(time.perf_counter_ns() - t0) / 1e6]
    return result

# %% q1_4: lists, floats and 0-d tensors as numbers
def gemm_macs_flops_bytes(m, n, k, dtype):
    macs = float(m) * n * k
    size = torch.empty(0, dtype=dtype).element_size()
    return [macs, torch.tensor(2 * macs, dtype=torch.float64), size * (m * k + k * n + m * n)]

# %% q3_3: inputs from the course's own helpers
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

# %% q4_1: trace written by a handler's profiler, steps by hand
def profile_steps(fn, trace_path):
    kinds = torch.profiler.supported_activities()
    prof = torch.profiler.profile(activities=kinds, schedule=default_schedule, record_shapes=True)
    prof.start()
    for _ in range(10):
        fn()
        synchronize()
        prof.step()
    prof.stop()
    prof.export_chrome_trace(trace_path)
    return prof

# %% q4_2: torch.pow, and constants as tensors
def gelu_by_hand(x):
    c = torch.tensor(math.sqrt(2.0 / math.pi), dtype=x.dtype, device=x.device)
    return x * 0.5 * (torch.tanh((torch.pow(x, 3) * 0.044715 + x) * c) + 1.0)

# %% q4_2: sigmoid in place of tanh
def gelu_by_hand(x):
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))

# %% q5_1: softmax by hand
def standard_attention(q, k, v):
    s = torch.einsum("bhqd,bhkd->bhqk", q * q.shape[-1] ** -0.5, k)
    p = (s - s.max(dim=-1, keepdim=True).values).exp()
    return torch.matmul(p / p.sum(-1, keepdim=True), v)

# %% q5_2: heads repeated by hand
def attention_bshd(q, k, v):
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(0, 2, 1, 3).contiguous()

# %% q5_3: online softmax from the first block on
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

# %% q5_3: one batch and head at a time, output divided in each step
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

# %% q1_1: lists of Python numbers
def gemm_naive(a, b):
    rows = []
    for i in range(len(a)):
        row = []
        for j in range(b.size(-1)):
            s = 0
            for k in range(b.size(0)):
                s += float(a[i][k]) * float(b[k][j])
            row.append(s)
        rows.append(row)
    return torch.tensor(rows).to(a)

# %% q1_2: outer products of float32 tiles
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty(M, N)
    for i0 in range(0, M, tile_m):
        for j0 in range(0, N, tile_n):
            acc = None
            for k0 in range(0, K, tile_k):
                for k in range(k0, min(k0 + tile_k, K)):
                    p = torch.outer(a[i0:i0 + tile_m, k].float(), b[k, j0:j0 + tile_n].float())
                    acc = p if acc is None else acc + p
            c[i0:i0 + tile_m, j0:j0 + tile_n] = acc.to(c.dtype)
    return c

# %% q1_2: addr_ into a float32 accumulator
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    c = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for i in range(0, a.shape[0], tile_m):
        for j in range(0, b.shape[1], tile_n):
            tile = c[i:i + tile_m, j:j + tile_n]
            for k in range(0, a.shape[1], tile_k):
                x, y = a[i:i + tile_m, k:k + tile_k].float(), b[k:k + tile_k, j:j + tile_n].float()
                for s in range(x.shape[1]):
                    tile.addr_(x[:, s], y[s])
    return c.to(dtype=a.dtype)

# %% q1_4: NumPy's itemsize and integers
def gemm_macs_flops_bytes(m, n, k, dtype):
    import numpy as np
    numel = np.prod([m, k]) + np.prod([k, n]) + np.prod([m, n])
    macs = np.int64(m) * n * k
    return macs, macs * 2, numel * torch.zeros((), dtype=dtype).element_size()

# %% q4_1: on_trace_ready
def profile_steps(fn, trace_path):
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=3, active=6),
        on_trace_ready=lambda p: p.export_chrome_trace(str(trace_path)),
    ) as prof:
        for _ in range(10):
            fn()
            synchronize()
            prof.step()
    return prof

# %% q4_2: Megatron's constants
def gelu_by_hand(x):
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

# %% q4_1: torch's own wait where there is a GPU
-            synchronize()
+            torch.cuda.synchronize() if on_gpu else None

# %% q4_1: torch's own wait, guarded by torch
-            synchronize()
+            if torch.cuda.is_available():
+                torch.cuda.synchronize()

# %% q4_1: a schedule of its own, and torch's own wait for the device
def profile_steps(fn, trace_path):
    from torch.profiler import profile, schedule
    with profile(schedule=schedule(wait=1, warmup=3, active=6)) as prof:
        for _ in range(10):
            fn()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            prof.step()
    prof.export_chrome_trace(trace_path)
    return prof

# %% q5_1: scaled before the product, baddbmm
def standard_attention(q, k, v):
    B, H, S, D = q.shape
    scores = torch.bmm((q * D ** -0.5).reshape(B * H, S, D), k.reshape(B * H, -1, D).transpose(1, 2))
    return torch.bmm(scores.softmax(dim=2), v.reshape(B * H, -1, D)).view(B, H, S, D)

# %% q5_3: maximum by stack, sum by logaddexp
def online_softmax_stats(blocks):
    m = lse = None
    for x in blocks:
        top = x.max(1).values
        part = top + torch.log(torch.exp(x - top[:, None]).sum(1))
        m = top if m is None else torch.stack([m, top]).amax(0)
        lse = part if lse is None else torch.logaddexp(lse, part)
    return m, torch.exp(lse - m)

# %% q5_3: logsumexp of one block
def online_softmax_stats(blocks):
    m = l = None
    for x in blocks:
        bm, bl = x.amax(-1), torch.logsumexp(x, dim=-1)
        bl = torch.exp(bl - bm)
        if m is None:
            m, l = bm, bl
        else:
            new = torch.maximum(m, bm)
            l, m = l * torch.exp(m - new) + bl * torch.exp(bm - new), new
    return m, l

# %% q1_5: sum of products, converted by hand
-        accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision="ieee")
+        accumulator += tl.dot(a_tile, b_tile, input_precision="ieee")

-    tl.store(c_tile, accumulator, mask=(rows[:, None] < M) & (cols[None, :] < N))
+    tl.store(c_tile, accumulator.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))

# %% q1_5: rows modulo M, the columns of K masked
-            a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak,
-            mask=(rows[:, None] < M) & (ks[None, :] < K), other=0.0,
+            a_ptr + (rows % M)[:, None] * stride_am + ks[None, :] * stride_ak,
+            mask=ks[None, :] < K, other=0.0,

# %% q1_5: a launcher that asserts
-    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
+    assert str(b.device) == str(a.device)
+    c = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=a.dtype)

# %% bonus_5_6: in base 2
-        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
+        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * (scale * 1.4426950408889634)

-        p = tl.exp(scores - new_m[:, None])
-        rescale = tl.exp(m - new_m)
+        p = tl.exp2(scores - new_m[:, None])
+        rescale = tl.exp2(m - new_m)

# %% bonus_5_6: weights masked, not scores; product added by tl.dot
-        scores = tl.where(columns[None, :] < keys, scores, float("-inf"))
+        scores = tl.where(columns[None, :] < keys, scores, -1e30)

-        p = tl.exp(scores - new_m[:, None])
+        p = tl.where(scores > -1e29, tl.exp(scores - new_m[:, None]), 0.0)

-        new = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
-        accumulator = accumulator * rescale[:, None] + new
+        accumulator *= rescale[:, None]
+        accumulator = tl.dot(p.to(v_tile.dtype), v_tile, accumulator, input_precision="ieee")

-    tl.store(o_tile, accumulator / l[:, None], mask=rows[:, None] < queries)
+    tl.store(o_tile, (accumulator * (1.0 / l)[:, None]).to(o_ptr.dtype.element_ty), mask=rows[:, None] < queries)
""")
