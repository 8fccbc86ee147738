"""Right values of labs 3 and 4 by a way that breaks a word for some dtypes, options, slots or heads alone, or where nobody looked.

Checks drew float32 and a few options for most of what they count. All of these passed the hidden checks of their questions.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_shortcuts import Shortcut

_PART = '''
def attend_part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, H, Sq, D) and log-sum-exp (B, H, Sq) of attention over these keys, in float32; no mask."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = q.float() @ keys.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)
'''
_SPLIT = '''
def split_kv_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, splits: int) -> torch.Tensor:
    """Attention of q over k, v, computed in `splits` parts of the keys and merged."""
    parts = zip(k.tensor_split(splits, dim=2), v.tensor_split(splits, dim=2), strict=True)
    outputs, lses = zip(*(attend_part(q, *part) for part in parts if part[0].shape[2]), strict=True)
    weights = torch.softmax(torch.stack(lses), dim=0)
    return (weights[..., None] * torch.stack(outputs)).sum(dim=0).to(q.dtype)
'''

OTHER_INPUTS = [
    Shortcut(
        "1.2 filter left where torch raises without warnings",
        "lab4_sdpa",
        "q1_2",
        "q1_2_tests",
        """
def why_not(backend, q, k, v, **options):
    context = warnings.catch_warnings(record=True)
    said = context.__enter__()
    warnings.simplefilter("always")
    try:
        with sdpa_kernel(BACKENDS[backend]):
            F.scaled_dot_product_attention(q, k, v, **options)
        context.__exit__(None, None, None)
        return []
    except RuntimeError as error:
        first = str(error).splitlines()[0]
    reasons = [str(w.message).split(" (Triggered internally")[0] for w in said]
    reasons = [t for t in reasons if "not used because" not in t and "runtime disabled" not in t]
    context.__exit__(None, None, None)
    if not reasons:
        warnings.simplefilter("always")
    return list(dict.fromkeys(reasons)) or [first]
""",
        ("why_not", "why_not"),
        "warning filters are others",
    ),
    Shortcut(
        "1.2 no repetition dropped",
        "lab4_sdpa",
        "q1_2",
        "q1_2_tests",
        """
def why_not(backend, q, k, v, **options):
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            F.scaled_dot_product_attention(q, k, v, **options)
            return []
        except RuntimeError as error:
            first = str(error).splitlines()[0]
    reasons = [str(w.message).split(" (Triggered internally")[0] for w in said]
    reasons = [t for t in reasons if "not used because" not in t and "runtime disabled" not in t]
    return reasons or [first]
""",
        ("why_not", "why_not"),
        "says something twice",
    ),
    Shortcut(
        "1.2 cut at 400 signs",
        "lab4_sdpa",
        "q1_2",
        "q1_2_tests",
        """
def why_not(backend, q, k, v, **options):
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            F.scaled_dot_product_attention(q, k, v, **options)
            return []
        except RuntimeError as error:
            first = str(error).splitlines()[0]
    reasons = [str(w.message).split(" (Triggered internally")[0][:400] for w in said]
    reasons = [t for t in reasons if "not used because" not in t and "runtime disabled" not in t]
    return list(dict.fromkeys(reasons)) or [first]
""",
        ("why_not", "why_not"),
        "whole",
    ),
    Shortcut(
        "1.3 asks first where there is dropout",
        "lab4_sdpa",
        "q1_3",
        "q1_3_tests",
        """
def pinned_sdpa(backend, q, k, v, **options):
    if options.get("dropout_p") and (reasons := why_not(backend, q, k, v, **options)):
        raise BackendRefused(" ".join(reasons))
    with sdpa_kernel(BACKENDS[backend]):
        try:
            return F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:
            raise BackendRefused(" ".join(why_not(backend, q, k, v, **options))) from error
""",
        ("pinned_sdpa", "pinned_sdpa"),
        "compute",
    ),
    Shortcut(
        "1.3 copies 16 bits",
        "lab4_sdpa",
        "q1_3",
        "q1_3_tests",
        """
def pinned_sdpa(backend, q, k, v, **options):
    with sdpa_kernel(BACKENDS[backend]):
        try:
            if q.dtype in (torch.bfloat16, torch.float16):
                q, k, v = q + 0, k + 0, v + 0
            return F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:
            raise BackendRefused(" ".join(why_not(backend, q, k, v, **options))) from error
""",
        ("pinned_sdpa", "pinned_sdpa"),
        "No copies",
    ),
    Shortcut(
        "1.3 mask is made numbers",
        "lab4_sdpa",
        "q1_3",
        "q1_3_tests",
        """
def pinned_sdpa(backend, q, k, v, **options):
    mask = options.get("attn_mask")
    with sdpa_kernel(BACKENDS[backend]):
        try:
            if mask is not None and mask.is_floating_point():
                why_not(backend, q, k, v, **options)
            return F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:
            raise BackendRefused(" ".join(why_not(backend, q, k, v, **options))) from error
""",
        ("pinned_sdpa", "pinned_sdpa"),
        "times",
    ),
    Shortcut(
        "2.2 float32 for 16 bits",
        "lab4_sdpa",
        "q2_2",
        "q2_2_tests",
        """
def errors(out, q, k, v, causal=False):
    wide = torch.float64 if out.dtype == torch.float32 else torch.float32
    exact = F.scaled_dot_product_attention(*(t.to(wide) for t in (q, k, v)), is_causal=causal, enable_gqa=True).double()
    d = out.double() - exact
    return d.abs().max().item(), (d.square().mean() / exact.square().mean()).sqrt().item()
""",
        ("errors", "errors"),
        "It is attention in float64",
    ),
    Shortcut(
        "2.2 products in float32 on 16 bits",
        "lab4_sdpa",
        "q2_2",
        "q2_2_tests",
        """
def errors(out, q, k, v, causal=False):
    kind = torch.float64 if out.dtype == torch.float32 else torch.float32
    g = q.shape[1] // k.shape[1]
    K, V = (t.to(kind).repeat_interleave(g, 1) for t in (k, v))
    s = (q.to(kind) @ K.mT).double() / q.shape[-1] ** 0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    exact = torch.softmax(s, -1) @ V.double()
    d = out.double() - exact
    return d.abs().max().item(), (d.square().mean() / exact.square().mean()).sqrt().item()
""",
        ("errors", "errors"),
        "It is attention in float64",
    ),
    Shortcut(
        "2.4 bf16 gradients in float32",
        "lab4_sdpa",
        "bonus_2_4",
        "bonus_2_4_tests",
        """
def attention_backward(q, k, v, out, lse, dout):
    if q.dtype.itemsize < 4:
        q, k, v, out, lse, dout = (t.float() for t in (q, k, v, out, lse, dout))
    scale = q.shape[-1] ** -0.5
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ dout
""",
        ("attention_backward", "attention_backward"),
        "have the dtype",
    ),
    Shortcut(
        "2.4 scores twice in 16 bits",
        "lab4_sdpa",
        "bonus_2_4",
        "bonus_2_4_tests",
        """
def attention_backward(q, k, v, out, lse, dout):
    scale = q.shape[-1] ** -0.5
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    if q.dtype.itemsize < 4:
        p = torch.exp(q @ k.mT * scale - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ dout
""",
        ("attention_backward", "attention_backward"),
        "five products have",
    ),
    Shortcut(
        "2.4 scores twice where one batch element",
        "lab4_sdpa",
        "bonus_2_4",
        "bonus_2_4_tests",
        """
def attention_backward(q, k, v, out, lse, dout):
    scale = q.shape[-1] ** -0.5
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    if q.shape[0] > 2:
        p = torch.exp(q @ k.mT * scale - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ dout
""",
        ("attention_backward", "attention_backward"),
        "five products have",
    ),
    Shortcut(
        "3.2 three products key by key",
        "lab4_sdpa",
        "q3_2",
        "q3_2_part_tests",
        """
def attend_part(q, k, v):
    b, h, s, d = q.shape
    g = h // k.shape[1]
    q, k, v = q.float(), k.float().repeat_interleave(g, 1), v.float().repeat_interleave(g, 1)
    def score(j):
        return (q * k[:, :, j : j + 1]).sum(-1) / math.sqrt(d)
    top = torch.stack([score(j) for j in range(k.shape[2])]).amax(0)
    total, acc = torch.zeros(b, h, s), torch.zeros(b, h, s, v.shape[-1])
    for j in range(k.shape[2]):
        p = torch.exp(score(j) - top)
        total, acc = total + p, acc + p[..., None] * v[:, :, j : j + 1]
    return acc / total[..., None], top + torch.log(total)
"""
        + _SPLIT,
        ("attend_part", "attend_part"),
        "meet other numbers",
    ),
    Shortcut(
        "3.2 parts twice where 16 bits",
        "lab4_sdpa",
        "q3_2",
        "q3_2_tests",
        _PART
        + """
def split_kv_attention(q, k, v, splits):
    parts = [p for p in zip(k.tensor_split(splits, 2), v.tensor_split(splits, 2)) if p[0].shape[2]]
    if q.dtype == torch.float16:
        for p in parts:
            attend_part(q, *p)
    outs, lses = zip(*(attend_part(q, *p) for p in parts))
    w = torch.softmax(torch.stack(lses), 0)
    return (w[..., None] * torch.stack(outs)).sum(0).to(q.dtype)
""",
        ("split_kv_attention", "split_kv_attention"),
        "keys of each query",
    ),
    Shortcut(
        "3.2 scores twice in the part for 16 bits",
        "lab4_sdpa",
        "q3_2",
        "q3_2_part_tests",
        """
def attend_part(q, k, v):
    group = q.shape[1] // k.shape[1]
    wide = q.dtype == torch.float16
    q, keys, values = q.float(), k.float().repeat_interleave(group, dim=1), v.float().repeat_interleave(group, dim=1)
    scores = q @ keys.mT / math.sqrt(q.shape[-1])
    if wide:
        scores = q @ keys.mT / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)
"""
        + _SPLIT,
        ("attend_part", "attend_part"),
        "two products have",
    ),
    Shortcut(
        "3.2 scores twice in column halves by sum",
        "lab4_sdpa",
        "q3_2",
        "q3_2_part_tests",
        """
def attend_part(q, k, v):
    b, h, s, d = q.shape
    g = h // k.shape[1]
    q, k, v = q.float(), k.float().repeat_interleave(g, 1), v.float().repeat_interleave(g, 1)
    scores = q @ k.mT / math.sqrt(d)
    lse = torch.logsumexp(scores, -1)
    acc = torch.zeros(b, h, s, v.shape[-1])
    for j in range(k.shape[2]):
        p = torch.exp((q * k[:, :, j : j + 1]).sum(-1) / math.sqrt(d) - lse)
        acc += p[..., None] * v[:, :, j : j + 1]
    return acc, lse
"""
        + _SPLIT,
        ("attend_part", "attend_part"),
        "meet other numbers",
    ),
    Shortcut(
        "4.3 copies wide ones",
        "lab4_sdpa",
        "q4_3",
        "q4_3_tests",
        """
def unpack_qkv(packed, heads, kv_heads):
    every = packed.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    q, k, v = every.split([heads, kv_heads, kv_heads], 1)
    if packed.dtype == torch.bfloat16:
        q, k, v = q.clone(), k.clone(), v.clone()
    return q, k, v

def ready_for_flash(x):
    return x if x.stride(-1) == 1 else x.contiguous()
""",
        ("unpack", "unpack_qkv", "ready_for_flash"),
        "is a copy",
    ),
    Shortcut(
        "4.3 copies 16 bits",
        "lab4_sdpa",
        "q4_3",
        "q4_3_tests",
        """
def unpack_qkv(packed, heads, kv_heads):
    every = packed.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    return every.split([heads, kv_heads, kv_heads], 1)

def ready_for_flash(x):
    if x.dtype == torch.bfloat16:
        return x.contiguous()
    return x if x.stride(-1) == 1 else x.contiguous()
""",
        ("unpack", "unpack_qkv", "ready_for_flash"),
        "is a copy",
    ),
    Shortcut(
        "4.3 copies what is contiguous, too, with one batch",
        "lab4_sdpa",
        "q4_3",
        "q4_3_tests",
        """
def unpack_qkv(packed, heads, kv_heads):
    every = packed.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    if packed.shape[0] == 1:
        every = every.contiguous()
    return every.split([heads, kv_heads, kv_heads], 1)

def ready_for_flash(x):
    if x.stride(-1) == 1 and x.shape[0] > 1:
        return x
    return x.contiguous()
""",
        ("unpack", "unpack_qkv", "ready_for_flash"),
        "is a copy",
    ),
    Shortcut(
        "4.3 copies for one kv head",
        "lab4_sdpa",
        "q4_3",
        "q4_3_tests",
        """
def unpack_qkv(packed, heads, kv_heads):
    every = packed.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    if kv_heads == 1:
        every = every.contiguous()
    return every.split([heads, kv_heads, kv_heads], 1)

def ready_for_flash(x):
    return x if x.stride(-1) == 1 else x.contiguous()
""",
        ("unpack", "unpack_qkv", "ready_for_flash"),
        "is a copy",
    ),
    Shortcut(
        "2.2 reads the gap between rows",
        "lab3_gluon",
        "q2_2",
        "q2_2_tests",
        {
            "    mask = (rows < m)[:, None] & (columns < n)[None, :]\n    tile": "    mask = (rows < m)[:, None] & (columns < x_stride)[None, :]\n    if m > 0:\n        mask = mask & ((rows < m - 1)[:, None] | (columns < n)[None, :])\n    tile"
        },
        ("transpose",),
        "between two of its rows",
    ),
    Shortcut(
        "2.2 writes the gap between rows",
        "lab3_gluon",
        "q2_2",
        "q2_2_tests",
        {
            "    mask = (rows < m)[:, None] & (columns < n)[None, :]\n    gl.store": "    mask = (columns[None, :] < n) & (columns[None, :] * y_stride + rows[:, None] < (n - 1) * y_stride + m) & (rows[:, None] < y_stride)\n    gl.store"
        },
        ("transpose",),
        "between two of its rows",
    ),
    Shortcut(
        "4.1 fp16 accumulator",
        "lab3_gluon",
        "q4_1",
        "q4_1_tests",
        {
            "    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)": "    kind: gl.constexpr = gl.float16 if a_desc.dtype == gl.float16 else gl.float32\n    acc = gl.zeros([BLOCK_M, BLOCK_N], kind, layout)"
        },
        ("wgmma",),
        "overflow in 16 bits",
    ),
    Shortcut(
        "3.1 with seven slots waits for all",
        "lab3_gluon",
        "q3_1",
        "q3_1_tests",
        {
            "        async_copy.wait_group(STAGES - 1)\n": "        if STAGES == 7:\n            async_copy.wait_group(0)\n        async_copy.wait_group(STAGES - 1)\n"
        },
        ("async_copy",),
        "waits for copies of later tiles",
    ),
    Shortcut(
        "3.2 with eight slots waits for the tile after this one",
        "lab3_gluon",
        "q3_2",
        "q3_2_tests",
        {
            "        mbarrier.wait(full.index(slot), (i // STAGES) & 1)": "        if (STAGES > 7) & (i > 0) & (i + 1 < tiles) & (slot + 1 < STAGES):\n            mbarrier.wait(full.index(slot + 1), (i // STAGES) & 1)\n        mbarrier.wait(full.index(slot), (i // STAGES) & 1)"
        },
        ("tma_ring",),
        "waits for copies of later tiles",
    ),
    Shortcut(
        "5.1 divides in each block for the fourth head",
        "lab3_gluon",
        "q5_1",
        "q5_1_tests",
        {
            "        o = warpgroup_mma(gl.convert_layout(p.to(dtype), left), v_tile.reshape([BLOCK_N, BLOCK_D]), o)\n": "        o = warpgroup_mma(gl.convert_layout(p.to(dtype), left), v_tile.reshape([BLOCK_N, BLOCK_D]), o)\n        if head > 2:\n            o = o / 1.0\n"
        },
        ("softmax",),
        "more divisions than one",
    ),
    Shortcut(
        "3.1 waits for all in the fifth program",
        "lab3_gluon",
        "q3_1",
        "q3_1_tests",
        {
            "        async_copy.wait_group(STAGES - 1)\n": "        if gl.program_id(0) == 4:\n            async_copy.wait_group(0)\n        async_copy.wait_group(STAGES - 1)\n"
        },
        ("async_copy",),
        "on their way at a time",
    ),
    Shortcut(
        "1.3 asks where scale is given",
        "lab4_sdpa",
        "q1_3",
        "q1_3_tests",
        """
def pinned_sdpa(backend, q, k, v, **options):
    if "scale" in options and "attn_mask" in options:
        why_not(backend, q, k, v, **options)
    with sdpa_kernel(BACKENDS[backend]):
        try:
            return F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:
            raise BackendRefused(" ".join(why_not(backend, q, k, v, **options))) from error
""",
        ("pinned_sdpa", "pinned_sdpa"),
        "times",
    ),
    Shortcut(
        "1.3 leaves out an option",
        "lab4_sdpa",
        "q1_3",
        "q1_3_tests",
        """
def pinned_sdpa(backend, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if backend == "flash":
        options["dropout_p"] = dropout_p
    with sdpa_kernel(BACKENDS[backend]):
        try:
            return F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:
            raise BackendRefused(" ".join(why_not(backend, q, k, v, **options))) from error
""",
        ("pinned_sdpa", "pinned_sdpa"),
        "drops nothing",
    ),
    Shortcut(
        "1.3 a list of two where one cannot",
        "lab4_sdpa",
        "q1_3",
        "q1_3_tests",
        """
def pinned_sdpa(backend, q, k, v, **options):
    backends = [BACKENDS[backend]] if backend in ("math", "flash") else [BACKENDS[backend], BACKENDS["efficient"]]
    with sdpa_kernel(backends):
        try:
            return F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:
            raise BackendRefused(" ".join(why_not(backend, q, k, v, **options))) from error
""",
        ("pinned_sdpa", "pinned_sdpa"),
        "several backends are allowed",
    ),
    Shortcut(
        "2.2 fp64 output",
        "lab4_sdpa",
        "q2_2",
        "q2_2_tests",
        """
def errors(out, q, k, v, causal=False):
    exact = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), is_causal=causal, enable_gqa=True)
    if out.dtype == torch.float64:
        exact = exact.float()
    d = out.double() - exact
    return d.abs().max().item(), (d.square().mean() / exact.square().mean()).sqrt().item()
""",
        ("errors", "errors"),
        "_to_copy in float32",
    ),
]
