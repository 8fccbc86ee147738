"""Typical mistakes in lab 1, each with the question that it loses and words of the message.

`code` runs after the model answer in the same cell, and so replaces one of its functions.
"""

from tests.instructor.lab_cases import WrongAnswer

_NAIVE = """
def gemm_naive(a, b):
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    c = torch.zeros(m, n, dtype=a.dtype, device=a.device)
    {body}
    return c
"""
_TILED = """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    c = torch.zeros(m, n, dtype=a.dtype, device=a.device)
    {body}
    return c
"""
_TILE_LOOPS = """for i in range(0, m, tile_m):
        for j in range(0, n, tile_n):
            acc = torch.zeros(min(tile_m, m - i), min(tile_n, n - j), device=a.device)
            for p in range(0, k, tile_k):
                x, y = a[i:i + tile_m, p:p + tile_k], b[p:p + tile_k, j:j + tile_n]
                {step}
            c[i:i + tile_m, j:j + tile_n] = acc"""
_OUTER = "acc += (x[:, :, None] * y[None]).sum(1)"
_FLASH = """
def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    out = torch.empty_like(q)
    for i in range(0, q.shape[2], tile_q):
        x = q[:, :, i:i + tile_q].float() / math.sqrt(q.shape[-1])
        m = torch.full_like(x[..., :1], -math.inf)
        l, acc = torch.zeros_like(m), torch.zeros_like(x)
        for j in range(0, k.shape[2], tile_k):
            s = x @ k[:, :, j:j + tile_k].float().mT
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            p = torch.exp(s - new)
            {update}
            m = new
        out[:, :, i:i + tile_q] = (acc / l).to(q.dtype)
    return out
"""
_ATTENTION_COST = """
def attention_macs_flops_bytes(batch, query_len, kv_len, config, dtype, window=None):
    h, d = config.hidden_size, config.head_dim
    wide, narrow, t = config.num_attention_heads * d, config.{kv_heads} * d, batch * query_len
    pairs = sum(min(p + 1, window or p + 1) for p in range(kv_len - query_len, kv_len))
    keys = {keys}
    macs = t * h * (2 * wide + 2 * narrow) + 2 * batch * wide * {pairs}
    elements = 2 * h * (wide + narrow) + 4 * t * h + 4 * t * wide + 2 * t * narrow + 2 * batch * keys * narrow
    return macs, {flops}, elements * {size}
"""
_COST = {
    "kv_heads": "num_key_value_heads",
    "keys": "kv_len if window is None else min(kv_len, query_len + window - 1)",
    "pairs": "pairs",
    "flops": "2 * macs",
    "size": "dtype.itemsize",
}


def _cost(**changed: str) -> str:
    return _ATTENTION_COST.format(**{**_COST, **changed})


def _flash(update: str) -> str:
    return _FLASH.format(update=update)


_GOOD_UPDATE = (
    "r = torch.exp(m - new); l = l * r + p.sum(-1, keepdim=True); acc = acc * r + p @ v[:, :, j:j + tile_k].float()"
)

WRONG_ANSWERS = [
    # ---- 1.1
    WrongAnswer("library product", "q1_1", "def gemm_naive(a, b):\n    return a @ b\n", "aten.mm"),
    WrongAnswer(
        "F.linear",
        "q1_1",
        "def gemm_naive(a, b):\n    return F.linear(a, b.T)\n",
        "write the three loops yourself".capitalize(),
    ),
    WrongAnswer(
        "getattr and a spliced name",
        "q1_1",
        "def gemm_naive(a, b):\n    return getattr(torch, 'mat' + 'mul')(a, b)\n",
        "may not use",
    ),
    WrongAnswer(
        "through NumPy",
        "q1_1",
        "def gemm_naive(a, b):\n    return torch.from_numpy(a.numpy() @ b.numpy())\n",
        "out of torch, by .numpy()",
    ),
    WrongAnswer(
        "transposed result",
        "q1_1",
        _NAIVE.format(
            body="""for i in range(m):
        for j in range(n):
            for p in range(k):
                c[i, j] += a[i, p] * b[p, j]
    c = c.T"""
        ),
        "It looks transposed",
    ),
    WrongAnswer(
        "sum not set back",
        "q1_1",
        _NAIVE.format(
            body="""total = 0.0
    for i in range(m):
        for j in range(n):
            for p in range(k):
                total += a[i, p].item() * b[p, j].item()
            c[i, j] = total"""
        ),
        "where is the sum set back to zero",
    ),
    WrongAnswer(
        "last step of the sum missing",
        "q1_1",
        _NAIVE.format(
            body="""for i in range(m):
        for j in range(n):
            for p in range(k - 1):
                c[i, j] += a[i, p] * b[p, j]"""
        ),
        "is wrong in",
    ),
    WrongAnswer(
        "returns fp64",
        "q1_1",
        _NAIVE.format(
            body="""c = c.double()
    for i in range(m):
        for j in range(n):
            for p in range(k):
                c[i, j] += a[i, p] * b[p, j]"""
        ),
        "should have dtype torch.float32, and has torch.float64",
    ),
    WrongAnswer(
        "two loops and a dot product",
        "q1_1",
        _NAIVE.format(
            body="""for i in range(m):
        for j in range(n):
            c[i, j] = (a[i] * b[:, j]).sum()"""
        ),
        "elements at once",
    ),
    WrongAnswer(
        "square only",
        "q1_1",
        _NAIVE.format(
            body="""for i in range(m):
        for j in range(m):
            for p in range(m):
                c[i, j] += a[i, p] * b[p, j]"""
        ),
        # which of the two depends on whether the drawn m is the smallest size
        ("raised IndexError", "is wrong in"),
    ),
    WrongAnswer(
        "result on the CPU",
        "q1_1",
        _NAIVE.format(
            body="""c = torch.zeros(m, n, dtype=a.dtype)
    for i in range(m):
        for j in range(n):
            c[i, j] = sum(a[i, p].item() * b[p, j].item() for p in range(k))"""
        ),
        "device=a.device",
    ),
    WrongAnswer("no return", "q1_1", "def gemm_naive(a, b):\n    c = torch.zeros(2, 2)\n", "is a return missing"),
    # ---- 1.2
    WrongAnswer(
        "whole tiles only",
        "q1_2",
        _TILED.format(
            body="""for i in range(m // tile_m):
        for j in range(n // tile_n):
            rows, cols = slice(i * tile_m, (i + 1) * tile_m), slice(j * tile_n, (j + 1) * tile_n)
            for p in range(k // tile_k):
                x, y = a[rows, p * tile_k:(p + 1) * tile_k], b[p * tile_k:(p + 1) * tile_k, cols]
                c[rows, cols] += (x[:, :, None] * y[None]).sum(1)"""
        ),
        "Look at the tiles at the edges",
    ),
    WrongAnswer(
        "accumulator overwritten in each step",
        "q1_2",
        _TILED.format(body=_TILE_LOOPS.format(step="acc = (x[:, :, None] * y[None]).sum(1)")),
        "Every tile is whole here",
        seen="each step along K",
    ),
    WrongAnswer(
        "one broadcast over the whole matrix",
        "q1_2",
        "def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):\n    return (a[:, :, None] * b[None]).sum(1)\n",
        "elements at once",
        seen="inside of one tile",
    ),
    WrongAnswer(
        "einsum inside of a tile",
        "q1_2",
        _TILED.format(body=_TILE_LOOPS.format(step="acc += torch.einsum('ik,kj->ij', x, y)")),
        "may not use",
    ),
    WrongAnswer(
        "hard-coded tile of 64",
        "q1_2",
        _TILED.format(body="tile_m = tile_n = tile_k = 64\n    " + _TILE_LOOPS.format(step=_OUTER)),
        "Are the tile sizes used",
    ),
    WrongAnswer(
        "added to memory that nothing was written to",
        "q1_2",
        _TILED.format(
            body="c = torch.empty_like(c)\n    " + _TILE_LOOPS.format(step=_OUTER).replace("] = acc", "] += acc")
        ),
        "memory read that nothing was written to",
    ),
    # ---- 1.3
    WrongAnswer(
        "seconds",
        "q1_3",
        """
def time_calls(fn, n_calls, synchronize):
    times = []
    for _ in range(n_calls):
        synchronize(); start = time.perf_counter(); fn(); synchronize()
        times.append(time.perf_counter() - start)
    return times
""",
        "It looks like seconds",
    ),
    WrongAnswer(
        "clock stopped before the wait",
        "q1_3",
        """
def time_calls(fn, n_calls, synchronize):
    times = []
    for _ in range(n_calls):
        synchronize(); start = time.perf_counter(); fn()
        times.append((time.perf_counter() - start) * 1e3); synchronize()
    return times
""",
        "Is the clock stopped after the wait",
    ),
    WrongAnswer(
        "no wait before the clock starts",
        "q1_3",
        """
def time_calls(fn, n_calls, synchronize):
    times = []
    for _ in range(n_calls):
        start = time.perf_counter(); fn(); synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times
""",
        "wait for the device before the clock starts",
    ),
    WrongAnswer(
        "all calls timed together",
        "q1_3",
        """
def time_calls(fn, n_calls, synchronize):
    synchronize(); start = time.perf_counter()
    for _ in range(n_calls):
        fn(); synchronize()
    return [(time.perf_counter() - start) * 1e3 / n_calls] * n_calls
""",
        "is each call timed on its own",
    ),
    # ---- 1.4
    WrongAnswer(
        "MAC for FLOP",
        "q1_4",
        """
def gemm_macs_flops_bytes(m, n, k, dtype):
    return m * n * k, m * n * k, (m * k + k * n + m * n) * dtype.itemsize
""",
        "one multiply-accumulate is two FLOPs",
        seen="one MAC, and two FLOPs",
    ),
    WrongAnswer(
        "bytes of fp32 for every dtype",
        "q1_4",
        """
def gemm_macs_flops_bytes(m, n, k, dtype):
    return m * n * k, 2 * m * n * k, (m * k + k * n + m * n) * 4
""",
        "depends on the dtype",
    ),
    WrongAnswer(
        "result of GEMV not written",
        "q1_4",
        "def gemv_macs_flops_bytes(m, k, dtype):\n    return m * k, 2 * m * k, (m * k + k) * dtype.itemsize\n",
        "The result y is written, too",
    ),
    # ---- 1.5
    WrongAnswer(
        "K not masked",
        "q1_5",
        "",
        "tl.load reads outside",
        replaces=(("(rows[:, None] < M) & (ks[None, :] < K)", "rows[:, None] < M"),),
    ),
    WrongAnswer(
        "store not masked",
        "q1_5",
        "",
        "tl.store writes outside",
        replaces=((", mask=(rows[:, None] < M) & (cols[None, :] < N))", ")"),),
    ),
    WrongAnswer(
        "strides of a contiguous matrix",
        "q1_5",
        "",
        "column-major",
        replaces=(
            (
                "a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak",
                "a_ptr + rows[:, None] * stride_am + ks[None, :]",
            ),
        ),
        seen="Look at the strides",
    ),
    WrongAnswer(
        "rows of A not masked",
        "q1_5",
        "",
        "tl.load reads outside",
        replaces=(("(rows[:, None] < M) & (ks[None, :] < K)", "ks[None, :] < K"),),
    ),
    WrongAnswer(
        "not accumulated",
        "q1_5",
        "",
        "is wrong in",
        replaces=(("tl.dot(a_tile, b_tile, accumulator, input_precision", "tl.dot(a_tile, b_tile, input_precision"),),
    ),
    # ---- 2
    WrongAnswer(
        "bytes over FLOPs",
        "q2_1",
        "def gemv_intensity(m, k, dtype):\n    return (m * k + k + m) * dtype.itemsize / (2 * m * k)\n",
        "FLOPs over bytes",
    ),
    WrongAnswer(
        "the higher roof",
        "q2_2",
        "def attainable_tflops(intensity, peak_tflops, bandwidth_tb_s):\n    return max(peak_tflops, intensity * bandwidth_tb_s)\n",
        "The lower of the two roofs",
    ),
    WrongAnswer(
        "latency taken as seconds",
        "q2_3",
        "def achieved_tflops(flops, latency_ms):\n    return flops / latency_ms / 1e12\n",
        "in ms, not in seconds",
    ),
    WrongAnswer(
        "rounded down",
        "q2_3",
        "def smallest_compute_bound_gemm(ridge, dtype):\n    return int(1.5 * dtype.itemsize * ridge)\n",
        "still memory-bound",
    ),
    # ---- 3
    WrongAnswer(
        "window one key too wide",
        "q3_1",
        """
def attended_pairs(query_len, kv_len, window=None):
    return sum(min(p + 1, (window or p) + 1) for p in range(kv_len - query_len, kv_len))
""",
        "the query's own included",
        loses=("q3_1_pairs_tests",),
    ),
    WrongAnswer(
        "no causal mask",
        "q3_1",
        """
def attended_pairs(query_len, kv_len, window=None):
    return query_len * (min(kv_len, window) if window else kv_len)
""",
        "causal mask hides",
        loses=("q3_1_pairs_tests",),
    ),
    WrongAnswer(
        "forgets GQA", "q3_1", _cost(kv_heads="num_attention_heads"), "not num_attention_heads", ("q3_1_cost_tests",)
    ),
    WrongAnswer(
        "the whole square", "q3_1", _cost(pairs="query_len * kv_len"), "not the whole square", ("q3_1_cost_tests",)
    ),
    WrongAnswer("reads all keys", "q3_1", _cost(keys="kv_len"), "at least one query can see", ("q3_1_cost_tests",)),
    WrongAnswer("MAC for FLOP in attention", "q3_1", _cost(flops="macs"), "two FLOPs", ("q3_1_cost_tests",)),
    WrongAnswer("fp32 bytes in attention", "q3_1", _cost(size="4"), "depends on the dtype", ("q3_1_cost_tests",)),
    WrongAnswer(
        "two matrices in the MLP",
        "q3_2",
        """
def mlp_macs_flops_bytes(tokens, config, dtype):
    h, i = config.hidden_size, config.intermediate_size
    return 2 * tokens * h * i, 4 * tokens * h * i, (3 * h * i + 3 * tokens * h + 8 * tokens * i) * dtype.itemsize
""",
        "three matrices",
    ),
    WrongAnswer(
        "GELU and product as one operator",
        "q3_2",
        """
def mlp_macs_flops_bytes(tokens, config, dtype):
    h, i = config.hidden_size, config.intermediate_size
    return 3 * tokens * h * i, 6 * tokens * h * i, (3 * h * i + 3 * tokens * h + 6 * tokens * i) * dtype.itemsize
""",
        "two operators here",
    ),
    WrongAnswer(
        "counted twice",
        "q3_3",
        """
def counted_flops(fn, *args):
    from torch.utils.flop_counter import FlopCounterMode
    fn(*args)
    with FlopCounterMode(display=False) as counter:
        fn(*args)
    return counter.get_total_flops()
""",
        "fn should run once",
    ),
    WrongAnswer(
        "no cache, all of it in one prefill",
        "q3_4",
        """
def decode_with_cache(layer, rotary_emb, prompt, new_tokens):
    x = torch.cat((prompt, new_tokens), dim=1)
    positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
    embeddings = get_position_embeddings(x, positions, rotary_emb, layer.self_attn.layer_type)
    return prefill_forward(layer, x, positions, embeddings)[:, prompt.shape[1]:]
""",
        "is what the cache is for",
        ("q3_4_decode_tests",),
    ),
    WrongAnswer(
        "rotary embedding always at the prompt's end",
        "q3_4",
        """
def decode_with_cache(layer, rotary_emb, prompt, new_tokens):
    batch, start, _ = prompt.shape
    kind, cache = layer.self_attn.layer_type, initialize_kv_cache(layer.config, start + new_tokens.shape[1])
    positions = torch.arange(start, device=prompt.device).expand(batch, -1)
    prefill_forward(layer, prompt, positions, get_position_embeddings(prompt, positions, rotary_emb, kind), cache)
    outputs = []
    for i in range(new_tokens.shape[1]):
        x, place = new_tokens[:, i:i + 1], torch.tensor([start])
        embeddings = get_position_embeddings(x, place.expand(batch, 1), rotary_emb, kind)
        outputs.append(decode_forward(layer, x, place.expand(batch, 1), embeddings, True, cache, torch.tensor([start + i])))
    return torch.cat(outputs, dim=1)
""",
        "position_ids, the rotary embedding and cache_positions",
        ("q3_4_decode_tests",),
    ),
    WrongAnswer(
        "keys without values",
        "q3_4",
        """
def kv_cache_bytes(batch, length, config, dtype):
    tokens = sum(min(length, config.sliding_window) if "sliding" in kind else length for kind in config.layer_types)
    return batch * tokens * config.num_key_value_heads * config.head_dim * dtype.itemsize
""",
        "Keys and values are both kept",
        ("q3_4_bytes_tests",),
        seen="Keys AND values",
    ),
    WrongAnswer(
        "cache without the window",
        "q3_4",
        """
def kv_cache_bytes(batch, length, config, dtype):
    layers = len(config.layer_types)
    return 2 * layers * batch * length * config.num_key_value_heads * config.head_dim * dtype.itemsize
""",
        "at most config.sliding_window",
        ("q3_4_bytes_tests",),
    ),
    # ---- 4
    WrongAnswer(
        "no schedule",
        "q4_1",
        """
def profile_steps(fn, trace_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        for _ in range(10):
            fn()
    prof.export_chrome_trace(str(trace_path))
    return prof
""",
        "Is schedule=default_schedule given",
    ),
    WrongAnswer(
        "no trace written",
        "q4_1",
        """
def profile_steps(fn, trace_path):
    with torch.profiler.profile(schedule=default_schedule) as prof:
        for _ in range(10):
            fn()
            prof.step()
    return prof
""",
        "no file was written",
    ),
    WrongAnswer(
        "the library's GELU",
        "q4_2",
        "def gelu_by_hand(x):\n    return F.gelu(x, approximate='tanh')\n",
        "may not use torch's gelu",
    ),
    WrongAnswer(
        "GELU with erf",
        "q4_2",
        "def gelu_by_hand(x):\n    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))\n",
        "Gemma uses the tanh form",
    ),
    WrongAnswer(
        "writes into its input",
        "q4_2",
        """
def gelu_by_hand(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)
    x *= 0.5 * (1 + torch.tanh(inner))
    return x
""",
        "changed one of its inputs",
        seen="writes into x",
    ),
    WrongAnswer(
        "writes forgotten",
        "q4_2",
        "def elementwise_bytes(numel, dtype, one_input, two_inputs):\n"
        "    return (one_input + 2 * two_inputs) * numel * dtype.itemsize\n",
        "writes one tensor, too",
        ("q4_2_bytes_tests",),
    ),
    WrongAnswer(
        "sum over all recorded steps",
        "q4_3",
        """
def kernels_per_step(fn):
    with torch.profiler.profile(schedule=default_schedule) as prof:
        for _ in range(10):
            fn()
            prof.step()
    return 6 * count_cuda_kernels(prof)["total"]
""",
        "sum over the 6 recorded steps",
    ),
    WrongAnswer(
        "launches and kernels one after the other",
        "q4_4",
        "def eager_time_us(n, launch_us, kernel_us):\n    return n * (launch_us + kernel_us)\n",
        "overlap",
    ),
    # ---- 5
    WrongAnswer(
        "the fused operator",
        "q5_1",
        "def standard_attention(q, k, v):\n    return F.scaled_dot_product_attention(q, k, v)\n",
        "may not use",
    ),
    WrongAnswer(
        "scores not scaled",
        "q5_1",
        "def standard_attention(q, k, v):\n    return torch.softmax(q @ k.mT, -1) @ v\n",
        "divided by the square root",
    ),
    WrongAnswer(
        "softmax over the queries",
        "q5_1",
        "def standard_attention(q, k, v):\n    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -2) @ v\n",
        "Which dimension is the softmax over",
    ),
    WrongAnswer(
        "one matrix instead of two",
        "q5_1",
        """
def longest_length(memory_bytes, batch, heads, dtype):
    return math.isqrt(memory_bytes // (batch * heads * dtype.itemsize))
""",
        "Scores and probabilities are both there",
        ("q5_1_memory_tests",),
    ),
    WrongAnswer(
        "(B, S, H, D) straight into SDPA",
        "q5_2",
        "def attention_bshd(q, k, v):\n    return F.scaled_dot_product_attention(q, k, v, is_causal=True)\n",
        "attention_bshd of q",
    ),
    WrongAnswer(
        "not causal",
        "q5_2",
        """
def attention_bshd(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
""",
        "It is not causal",
    ),
    WrongAnswer(
        "sum not rescaled",
        "q5_3",
        """
def online_softmax_stats(blocks):
    m = l = None
    for block in blocks:
        new = block.amax(1) if m is None else torch.maximum(m, block.amax(1))
        part = torch.exp(block - new[:, None]).sum(1)
        m, l = new, part if l is None else l + part
    return m, l
""",
        "a larger maximum",
    ),
    WrongAnswer(
        "all blocks gathered first",
        "q5_3",
        """
def online_softmax_stats(blocks):
    x = torch.cat([block.clone() for block in blocks], dim=1)
    m = x.amax(1)
    return m, torch.exp(x - m[:, None]).sum(1)
""",
        "look at one block at a time",
    ),
    WrongAnswer(
        "no maximum subtracted",
        "q5_3",
        """
def online_softmax_stats(blocks):
    m = l = None
    for block in blocks:
        top, part = block.amax(1), torch.exp(block).sum(1)
        m, l = (top, part) if m is None else (torch.maximum(m, top), l + part)
    return m, l / torch.exp(m)
""",
        "l of",
    ),
    WrongAnswer(
        "output not rescaled",
        "q5_3",
        _flash(
            "r = torch.exp(m - new); l = l * r + p.sum(-1, keepdim=True); acc = acc + p @ v[:, :, j:j + tile_k].float()"
        ),
        "BOTH the sum and the output",
        ("q5_3_flash_tests",),
    ),
    WrongAnswer(
        "weights in the dtype of v, as the library's kernels have them",
        "q5_3",
        _flash(
            _GOOD_UPDATE.replace("p @ v[:, :, j:j + tile_k].float()", "(p.to(v.dtype) @ v[:, :, j:j + tile_k]).float()")
        ),
        "fewer bits than float32",
        ("q5_3_flash_tests",),
    ),
    WrongAnswer(
        "last tile of keys left out",
        "q5_3",
        _flash(_GOOD_UPDATE).replace(
            "range(0, k.shape[2], tile_k)", "range(0, max(k.shape[2] - tile_k + 1, 1), tile_k)"
        ),
        "is wrong in",
        ("q5_3_flash_tests",),
    ),
    WrongAnswer(
        "keys counted by the queries' length",
        "q5_3",
        _flash(_GOOD_UPDATE).replace("range(0, k.shape[2], tile_k)", "range(0, q.shape[2], tile_k)"),
        "flash_attention_tiled",
        ("q5_3_flash_tests",),
    ),
    WrongAnswer(
        "standard attention in disguise",
        "q5_3",
        """
def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    s = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return (p @ v.float() / p.sum(-1, keepdim=True)).to(q.dtype)
""",
        "scores at once",
        ("q5_3_flash_tests",),
    ),
    WrongAnswer(
        "scores written and read once",
        "q5_4",
        """
def attention_intensity(length, head_dim, dtype, flash):
    elements = 4 * length * head_dim + (0 if flash else 2 * length * length)
    return 4 * length * length * head_dim / (elements * dtype.itemsize)
""",
        "four times",
    ),
    # ---- bonus
    WrongAnswer(
        "rows and columns of tiles mixed up",
        "bonus_1_6",
        """
def tiled_gemm_bytes(m, n, k, tile_m, tile_n, dtype):
    return (math.ceil(m / tile_m) * m * k + math.ceil(n / tile_n) * k * n + m * n) * dtype.itemsize
""",
        "tile COLUMN",
    ),
    WrongAnswer(
        "weights read once a sequence",
        "bonus_3_6",
        """
def decode_floor_ms(batch, length, config, bandwidth_tb_s, weight_bytes=2, cache_bytes=2):
    h, d, heads, kv = config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads
    weights = (2 * h * d * (heads + kv) + 3 * h * config.intermediate_size) * config.num_hidden_layers
    tokens = sum(min(length, config.sliding_window) if "sliding" in kind else length for kind in config.layer_types)
    return batch * (weights * weight_bytes + 2 * tokens * kv * d * cache_bytes) / bandwidth_tb_s / 1e9
""",
        "The batch shares the weights",
    ),
    # ---- 5.6
    WrongAnswer(
        "missing keys not masked",
        "bonus_5_6",
        "",
        "their scores are 0, and should be minus infinity",
        replaces=(('        scores = tl.where(columns[None, :] < keys, scores, float("-inf"))\n', ""),),
    ),
    WrongAnswer(
        "accumulator not rescaled in Triton",
        "bonus_5_6",
        "",
        "The output of the blocks before is not rescaled",
        replaces=(("accumulator * rescale[:, None] + new", "accumulator + new"),),
    ),
    WrongAnswer(
        "maximum not kept in Triton",
        "bonus_5_6",
        "",
        ("Only the last block of keys counts", "carried from block to block"),
        replaces=(("        m = new_m\n", ""),),
    ),
    WrongAnswer(
        "not divided in Triton",
        "bonus_5_6",
        "",
        "The output is not divided",
        replaces=(("accumulator / l[:, None]", "accumulator"),),
    ),
    WrongAnswer(
        "store of the output not masked",
        "bonus_5_6",
        "",
        "tl.store writes outside",
        replaces=((", mask=rows[:, None] < queries)\n    ###", ")\n    ###"),),
    ),
]
