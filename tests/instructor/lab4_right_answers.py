"""Right answers to lab 4 that differ from the model answers; `answers_in_text` explains the form."""

from tests.instructor.lab_cases import answers_in_text

RIGHT_ANSWERS = answers_in_text(r"""
# %% q1_2: asks the dispatcher without computing
def why_not(backend, q, k, v, **options):
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest: said.append(str(message))
        try:
            with sdpa_kernel([BACKENDS[backend]]):
                torch._fused_sdp_choice(q, k, v, **options)
        except RuntimeError as error:
            reasons = []
            for text in said:
                text = text.partition(" (Triggered internally")[0]
                if text.endswith(":") or "disabled" in text or text in reasons:
                    continue
                reasons.append(text)
            if not reasons:
                reasons.append(str(error).partition("\n")[0])
            return reasons
    return []

# %% q1_3: switches of torch.backends.cuda, restored
def pinned_sdpa(backend, q, k, v, **options):
    cuda = torch.backends.cuda
    before = [getattr(cuda, f"{name}_sdp_enabled")() for name in ("math", "flash", "mem_efficient", "cudnn")]
    def switch(math_on, flash_on, efficient_on, cudnn_on):
        cuda.enable_math_sdp(math_on)
        cuda.enable_flash_sdp(flash_on)
        cuda.enable_mem_efficient_sdp(efficient_on)
        cuda.enable_cudnn_sdp(cudnn_on)
    switch(*(backend == name for name in ("math", "flash", "efficient", "cudnn")))
    try:
        out = F.scaled_dot_product_attention(q, k, v, **options)
    except RuntimeError:
        out = None
    finally:
        switch(*before)
    if out is None:
        raise BackendRefused("; ".join(why_not(backend, q, k, v, **options)))
    return out

# %% q2_2: SDPA's math in float64 as the reference
def errors(out, q, k, v, causal=False):
    with sdpa_kernel(SDPBackend.MATH):
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True)
    d = (out.to(torch.float64) - exact).flatten()
    return d.abs().amax(), torch.linalg.vector_norm(d) / torch.linalg.vector_norm(exact)

# %% q3_2: without gradients
-def split_kv_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, splits: int) -> torch.Tensor:
+@torch.no_grad()
+def split_kv_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, splits: int) -> torch.Tensor:

# %% q3_2: grouped heads as a dimension of their own
def attend_part(q, k, v):
    b, h, s, d = q.shape
    q = q.float().reshape(b, k.shape[1], -1, s, d) * d ** -0.5
    x = torch.einsum("bngqd,bnkd->bngqk", q, k.float())
    m = x.amax(-1, keepdim=True)
    e = (x - m).exp()
    l = e.sum(-1, keepdim=True)
    out = torch.einsum("bngqk,bnkd->bngqd", e / l, v.float())
    return out.reshape(b, h, s, d), (m + l.log()).reshape(b, h, s)

# %% q3_2: merged one after the other
def split_kv_attention(q, k, v, splits):
    length, out, lse = k.shape[2], None, None
    for i in range(splits):
        a, b = i * length // splits, (i + 1) * length // splits
        if a == b:
            continue
        o, l = attend_part(q, k[:, :, a:b], v[:, :, a:b])
        if out is None:
            out, lse = o, l
            continue
        both = torch.logaddexp(lse, l)
        out = torch.exp(lse - both)[..., None] * out + torch.exp(l - both)[..., None] * o
        lse = both
    return out.to(q.dtype)

# %% q4_1: a buffer with other strides
def knocked_out_by_strides(x):
    wide = torch.zeros(*x.shape, 2, dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]

def strided_and_fast(x):
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 8)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]

# %% q4_2: other knock-outs
KNOCK_OUTS = {
    "two dimensions": lambda q, k, v: dict(query=q[0, 0], key=k[0, 0], value=v[0, 0]),
    "wide values": lambda q, k, v: dict(query=q, key=k, value=torch.cat([v, v], dim=-1)),
    "a mask that learns": lambda q, k, v: dict(query=q, key=k, value=v,
                                               attn_mask=torch.zeros(24, 24, requires_grad=True)),
    "one sequence for all": lambda q, k, v: dict(query=q[:1], key=k, value=v),
}

# %% q4_3: views by slices and as_strided
def unpack_qkv(packed, heads, kv_heads):
    b, s, width = packed.shape
    d = width // (heads + 2 * kv_heads)
    found, at = [], 0
    for n in (heads, kv_heads, kv_heads):
        found.append(packed[..., at:at + n * d].view(b, s, n, d).permute(0, 2, 1, 3))
        at += n * d
    return tuple(found)

def ready_for_flash(x):
    if why_not("flash", x, x, x):
        return x.clone(memory_format=torch.contiguous_format)
    return x

# %% q5_2: sign and magnitude
def ulps_apart(a, b):
    def line(x):
        magnitude = x.abs().view(torch.int16).long()
        return torch.where(torch.signbit(x), -magnitude, magnitude)
    return torch.abs(line(a) - line(b))

# %% bonus_2_4: gradients in float64, by einsum
def attention_backward(q, k, v, out, lse, dout):
    kind = q.dtype
    q, k, v, out, lse, dout = (t.double() for t in (q, k, v, out, lse, dout))
    c = q.shape[-1] ** -0.5
    p = (torch.einsum("bhqd,bhkd->bhqk", q, k) * c - lse.unsqueeze(-1)).exp()
    ds = p * (torch.einsum("bhqd,bhkd->bhqk", dout, v) - (out * dout).sum(-1).unsqueeze(-1)) * c
    return (ds @ k).to(kind), (ds.transpose(2, 3) @ q).to(kind), (p.transpose(2, 3) @ dout).to(kind)

# %% q1_2: a set of seen reasons, text cut by index
def why_not(backend, q, k, v, **options):
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("always")
        with sdpa_kernel([BACKENDS[backend]]):
            try:
                F.scaled_dot_product_attention(query=q, key=k, value=v, **options)
            except RuntimeError as e:
                error = e
    if error is None:
        return []
    out, seen = [], set()
    for w in caught:
        text = str(w.message)
        cut = text.find(" (Triggered internally")
        text = text[:cut] if cut >= 0 else text
        if "because" in text or "has been runtime disabled" in text or text in seen:
            continue
        seen.add(text)
        out.append(text)
    return out if out else [str(error).split("\n")[0]]

# %% q1_3: nested try, error re-raised
def pinned_sdpa(backend, q, k, v, **options):
    pin = sdpa_kernel([BACKENDS[backend]])
    with pin:
        try:
            result = torch.nn.functional.scaled_dot_product_attention(query=q, key=k, value=v, **options)
        except RuntimeError as error:
            problem = error
        else:
            return result
    raise BackendRefused(f"{backend}: " + "; ".join(why_not(backend, q, k, v, **options))) from problem

# %% q2_2: a loop over heads, numpy norms
def errors(out, q, k, v, causal=False):
    import numpy as np
    group = q.shape[1] // k.shape[1]
    exact = torch.empty(q.shape, dtype=torch.float64)
    for h in range(q.shape[1]):
        s = q[:, h].double() @ k[:, h // group].double().transpose(1, 2) / math.sqrt(q.shape[3])
        if causal:
            s[:, ~torch.ones(s.shape[1:], dtype=torch.bool).tril()] = -math.inf
        exact[:, h] = torch.softmax(s, 2) @ v[:, h // group].double()
    d, e = (out.double() - exact).numpy(), exact.numpy()
    return np.abs(d).max(), np.linalg.norm(d) / np.linalg.norm(e)

# %% q3_1: the intensity simplified, a number of queries as NumPy rounds it
def intensity(query_len, kv_len, group, head_dim, dtype):
    harmonic = 1 / (1 / (group * query_len) + 1 / kv_len)
    return 2 * harmonic / dtype.itemsize

def queries_to_ridge(ridge, kv_len, group, head_dim, dtype):
    x = ridge * dtype.itemsize / 2
    if x >= kv_len:
        return None
    import numpy as np
    return np.ceil(x * kv_len / (kv_len - x) / group)

# %% q3_2: online softmax over single keys
def attend_part(q, k, v):
    b, h, s, d = q.shape
    k = k.float().repeat_interleave(h // k.shape[1], dim=1)
    v = v.float().repeat_interleave(h // v.shape[1], dim=1)
    top, total, acc = torch.full((b, h, s), -math.inf), torch.zeros(b, h, s), torch.zeros(b, h, s, v.shape[-1])
    for j in range(k.shape[2]):
        x = (q.float() * k[:, :, j : j + 1]).sum(-1) / math.sqrt(d)
        new = torch.maximum(top, x)
        scale, p = torch.exp(top - new), torch.exp(x - new)
        total, acc, top = total * scale + p, acc * scale[..., None] + p[..., None] * v[:, :, j : j + 1], new
    return acc / total[..., None], top + torch.log(total)

# %% q3_2: keys expanded, merged with a maximum, products and parts computed again
def attend_part(q, k, v):
    b, h, s, d = q.shape
    n, l = k.shape[1], k.shape[2]
    k, v = (t.float()[:, :, None].expand(b, n, h // n, l, t.shape[-1]).reshape(b, h, l, -1) for t in (k, v))
    x = torch.matmul(q.float() / d**0.5, k.transpose(2, 3))
    lse = torch.logsumexp(torch.matmul(q.float() / d**0.5, k.transpose(2, 3)), 3)
    return torch.matmul(torch.exp(x - lse.unsqueeze(3)), v), lse

def split_kv_attention(q, k, v, splits):
    cuts = [round(i * k.shape[2] / splits) for i in range(splits + 1)]
    parts = [attend_part(q, k[:, :, a:b], v[:, :, a:b]) for a, b in zip(cuts, cuts[1:]) if b > a]
    top = torch.stack([attend_part(q, k[:, :, a:b], v[:, :, a:b])[1] for a, b in zip(cuts, cuts[1:]) if b > a]).max(0).values
    weights = [torch.exp(lse - top) for _, lse in parts]
    out = sum(w[..., None] * o for w, (o, _) in zip(weights, parts)) / sum(weights)[..., None]
    return out.type_as(q)

# %% q3_2: array_split, empty parts with weight 0
def split_kv_attention(q, k, v, splits):
    import numpy as np
    outs, lses = [], []
    for part in np.array_split(np.arange(k.shape[2]), splits):
        if len(part) == 0:
            outs.append(torch.zeros(q.shape, dtype=torch.float32))
            lses.append(torch.full(q.shape[:3], -math.inf))
            continue
        o, l = attend_part(q, k[:, :, part[0] : part[-1] + 1], v[:, :, part[0] : part[-1] + 1])
        outs.append(o)
        lses.append(l)
    lse = torch.stack(lses)
    w = torch.exp(lse - torch.logsumexp(lse, 0))
    return torch.einsum("pbhs,pbhsd->bhsd", w, torch.stack(outs)).to(q.dtype)

# %% q4_1: memory by empty_strided
def knocked_out_by_strides(x):
    b, h, s, d = x.shape
    out = torch.empty_strided(x.shape, (h * s * d, s * d, 1, s), dtype=x.dtype, device=x.device)
    return out.copy_(x)

def strided_and_fast(x):
    b, h, s, d = x.shape
    return torch.empty_strided(x.shape, (s * h * d, d, h * d, 1), dtype=x.dtype, device=x.device).copy_(x)

# %% q4_2: functions with names
def _dropped(q, k, v):
    return {"query": q, "key": k, "value": v, "dropout_p": 0.25}
def _flat(q, k, v):
    return {"query": q.flatten(0, 2), "key": k.flatten(0, 2), "value": v.flatten(0, 2)}
def _wide(q, k, v):
    return {"query": q, "key": k, "value": F.pad(v, (0, 8))}
def _learned(q, k, v):
    bias = torch.zeros(q.shape[-2], k.shape[-2], requires_grad=True)
    return {"query": q, "key": k, "value": v, "attn_mask": bias}
KNOCK_OUTS = {f.__name__: f for f in (_dropped, _flat, _wide, _learned)}
KNOCK_OUTS["one batch"] = lambda q, k, v: dict(query=q, key=k[:1], value=v[:1])

# %% q4_3: split first, then unflatten
def unpack_qkv(packed, heads, kv_heads):
    d = packed.shape[-1] // (heads + kv_heads + kv_heads)
    q, k, v = torch.split(packed, [heads * d, kv_heads * d, kv_heads * d], dim=-1)
    return [t.unflatten(-1, (-1, d)).movedim(2, 1) for t in (q, k, v)]

def ready_for_flash(x):
    if x.stride()[-1] != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    return x

# %% q5_1: exponentials in base two
def rounded_attention(q, k, v, scores=False, p=False, normalize_first=True, output=False):
    keep = lambda x, switch: to_bf16(x) if switch else x
    s = keep(torch.matmul(q.double(), k.double().transpose(-1, -2)) * (1 / math.sqrt(q.size(-1))), scores)
    e = torch.exp2((s - s.max(dim=-1, keepdim=True)[0]) * math.log2(math.e))
    l = torch.sum(e, -1, True)
    o = keep(e / l, p) @ v.double() if normalize_first else (keep(e, p) @ v.double()) / l
    return keep(o, output)

# %% q6_1: merged tables and means of truth values
def grid_answers(grid):
    ok = grid[grid["status"].eq("ok")].copy()
    winners = fastest(grid).rename("winner").reset_index()
    merged = winners.merge(ok.loc[ok["is_default"], ["shape", "backend"]], on="shape", how="left")
    kinds = grid[["shape", "kind"]].drop_duplicates().set_index("shape")["kind"]
    in_decode = kinds[kinds == "decode"].index
    loss = default_slowdown(grid)
    decode = ok[ok["shape"].isin(in_decode)]
    names = decode[decode["backend"] == "cudnn"].assign(names=lambda t: t["kernels"].map(",".join)).set_index("seq_len_q")["names"]
    return {
        "default_wins": merged["winner"].eq(merged["backend"]).mean(),
        "default_loss": geometric_mean(loss),
        "decode_winner": winners[winners["shape"].isin(in_decode)]["winner"].mode()[0],
        "worst_default": loss[loss.index.isin(in_decode)].max(),
        "decode_bandwidth": decode["gb_s"].max() / GPU_SPECS["H200"]["memory_bandwidth_tb_s"] / 1000,
        "sm80_one_query": names[[1]].str.contains("sm80").mean(),
        "splits_four_queries": names[[4]].str.contains("reduction").mean(),
    }

# %% bonus_5_5: a scale for each token by repeated indices
def quantize_fp8(x, block=None):
    x = x.float()
    if block is None:
        top = x.abs().max().reshape(1, 1, 1, 1)
    else:
        starts = range(0, x.shape[2], block)
        top = torch.cat([x[:, :, i : i + block].abs().amax((2, 3), keepdim=True) for i in starts], dim=2)
    scale = (top / 448).where(top > 0, torch.ones_like(top))
    return (x / _of_tokens(scale, block, x)).to(torch.float8_e4m3fn), scale

def _of_tokens(scale, block, x):
    return scale if block is None else scale[:, :, torch.arange(x.shape[2]) // block]

def dequantize_fp8(x8, scale, block=None):
    return x8.to(torch.float32) * _of_tokens(scale, block, x8)

# %% bonus_2_4: gradients with matmul and transposes, dP computed twice
def attention_backward(q, k, v, out, lse, dout):
    d = q.size(-1)
    s = torch.matmul(q, k.transpose(-2, -1)) / d**0.5
    p = (s - lse.unsqueeze(-1)).exp()
    dv = torch.matmul(p.transpose(-2, -1), dout)
    dp = torch.matmul(dout, v.transpose(-2, -1))
    delta = torch.einsum("bhij,bhij->bhi", p, torch.matmul(dout, v.transpose(-2, -1)))
    ds = p * (dp - delta[..., None])
    return torch.matmul(ds, k) / d**0.5, torch.matmul(ds.transpose(-2, -1), q) / d**0.5, dv
""")
