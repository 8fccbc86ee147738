"""Typical mistakes in lab 4, each with the question that it loses and words of the message.

`code` runs after the model answer in the same cell, and so replaces one of its functions.
"""

from tests.instructor.lab_cases import WrongAnswer

_WHY = """
def why_not(backend, q, k, v, **options):
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings(record=True) as said:
        {filter}
        try:
            F.scaled_dot_product_attention(q, k, v, **options)
            return []
        except RuntimeError as error:
            first = str(error).splitlines()[0]
    found = [str(w.message).split(" (Triggered internally")[0] for w in said]
    {rest}
"""
_ALWAYS = 'warnings.simplefilter("always")'
_KEEP = 'found = [t for t in found if "not used because" not in t and "runtime disabled" not in t]'
_COSTS = """
def attention_costs(batch, heads, kv_heads, query_len, kv_len, head_dim, dtype, causal=False):
    pairs = {pairs}
    elements = 2 * batch * heads * query_len * head_dim + 2 * batch * {kv} * kv_len * head_dim
    scores = {scores}
    size = dtype.itemsize
    return 4 * batch * heads * head_dim * pairs, elements * size, (elements + scores) * size
"""
_PAIRS = "sum(kv_len - query_len + i + 1 for i in range(query_len)) if causal else query_len * kv_len"
_SCORES = "4 * batch * heads * query_len * kv_len"
_ERRORS = """
def errors(out, q, k, v, causal=False):
    group = q.shape[1] // k.shape[1]
    q, k, v = (t.double() for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    exact = torch.softmax(s, -1) @ v
    {rest}
"""
_SPLIT = """
def split_kv_attention(q, k, v, splits):
    parts = [(a, b) for a, b in zip(k.tensor_split(splits, 2), v.tensor_split(splits, 2)) if a.shape[2]]
    outs, lses = (torch.stack(t) for t in zip(*(attend_part(q, *part) for part in parts)))
    {rest}
"""
_ROUNDED = """
def rounded_attention(q, k, v, scores=False, p=False, normalize_first=True, output=False):
    s = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    s = to_bf16(s) if scores else s
    {rest}
    return to_bf16(out) if output else out
"""
_ANSWERS = """
_right_answers = grid_answers
def grid_answers(grid):
    found = _right_answers(grid)
    timed = grid[grid["status"] == "ok"]
    {change}
    return found
"""

_FLASH_FIRST = '["flash", "efficient", "math", "cudnn"]'
_RULE = "capability in ((9, 0), (10, 0)) and cudnn > 91500"
_REFUSED = 'raise BackendRefused("none")'

_NAMED = 'timed.loc[{rows}, "kernels"].map(lambda k: any("{word}" in n for n in k)).mean()'

WRONG_ANSWERS = [
    # ---- 1
    WrongAnswer(
        "every operator with the word",
        "q1_1",
        """
def backends_in(operators):
    return [b for name in operators for b in ("flash", "efficient", "cudnn", "math") if b in name]
""",
        "only one of them is in the table",
    ),
    WrongAnswer(
        "the CPU's flash forgotten",
        "q1_1",
        """
def backends_in(operators):
    words = {f"aten::_scaled_dot_product_{b}_attention": b for b in ("flash", "efficient", "cudnn")}
    words["aten::_scaled_dot_product_attention_math"] = "math"
    return [words[name] for name in operators if name in words]
""",
        "one call that ran flash",
        seen="a name of its own",
    ),
    WrongAnswer(
        "the backward pass counted",
        "q1_1",
        """
def backends_in(operators):
    found = []
    for name in operators:
        for b in ("flash", "efficient", "cudnn"):
            if name.startswith(f"aten::_scaled_dot_product_{b}_attention"):
                found.append(b)
        if name == "aten::_scaled_dot_product_attention_math":
            found.append("math")
    return found
""",
        "A backward operator is no call",
    ),
    WrongAnswer(
        "a set of backends",
        "q1_1",
        """
_one_each = backends_in
def backends_in(operators):
    return list(dict.fromkeys(_one_each(operators)))
""",
        "One entry for each call",
    ),
    WrongAnswer(
        "the caller's warning filter kept",
        "q1_2",
        _WHY.format(filter="pass", rest=f"{_KEEP}\n    return list(dict.fromkeys(found))"),
        "open your own filter",
    ),
    WrongAnswer(
        "headlines as reasons",
        "q1_2",
        _WHY.format(filter=_ALWAYS, rest="return list(dict.fromkeys(found)) or [first]"),
        "no reason",
    ),
    WrongAnswer(
        "no reason where torch gives none",
        "q1_2",
        _WHY.format(filter=_ALWAYS, rest=f"{_KEEP}\n    return list(dict.fromkeys(found))"),
        "its first line",
    ),
    WrongAnswer(
        "CUDA's questions for CPU tensors",
        "q1_2",
        """
def why_not(backend, q, k, v, **options):
    if backend == "math":
        return []
    params = torch.backends.cuda.SDPAParams(q, k, v, options.get("attn_mask"), options.get("dropout_p", 0.0),
                                            options.get("is_causal", False), False)
    ask = getattr(torch.backends.cuda, f"can_use_{backend}_attention")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        able = ask(params, True)
    return [] if able else [str(w.message) for w in said] or ["it cannot"]
""",
        "flash runs this here",
    ),
    WrongAnswer(
        "a list of two backends",
        "q1_3",
        """
def pinned_sdpa(backend, q, k, v, **options):
    with sdpa_kernel([BACKENDS[backend], SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, **options)
""",
        ("returned a result all the same", "A pin allows one backend"),
    ),
    WrongAnswer(
        "the inputs copied on the sly",
        "q1_3",
        """
def pinned_sdpa(backend, q, k, v, **options):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    with sdpa_kernel(BACKENDS[backend]):
        try:
            return F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:
            raise BackendRefused(" ".join(why_not(backend, q, k, v, **options))) from error
""",
        "on copies",
    ),
    WrongAnswer(
        "torch's own error let through",
        "q1_3",
        """
def pinned_sdpa(backend, q, k, v, **options):
    with sdpa_kernel(BACKENDS[backend]):
        return F.scaled_dot_product_attention(q, k, v, **options)
""",
        "should raise BackendRefused",
    ),
    WrongAnswer(
        "asked first, computed twice",
        "q1_3",
        """
def pinned_sdpa(backend, q, k, v, **options):
    reasons = why_not(backend, q, k, v, **options)
    if reasons:
        raise BackendRefused(" ".join(reasons))
    with sdpa_kernel(BACKENDS[backend]):
        return F.scaled_dot_product_attention(q, k, v, **options)
""",
        "2 times",
    ),
    WrongAnswer(
        "switches left behind",
        "q1_3",
        """
_pin = pinned_sdpa
def pinned_sdpa(backend, q, k, v, **options):
    torch.backends.cuda.enable_flash_sdp(backend == "flash")
    torch.backends.cuda.enable_math_sdp(backend == "math")
    try:
        return F.scaled_dot_product_attention(q, k, v, **options)
    except RuntimeError as error:
        raise BackendRefused(" ".join(why_not(backend, q, k, v, **options))) from error
""",
        "other backends",
    ),
    WrongAnswer(
        "options dropped",
        "q1_3",
        """
def pinned_sdpa(backend, q, k, v, is_causal=False, **options):
    with sdpa_kernel(BACKENDS[backend]):
        try:
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        except RuntimeError as error:
            raise BackendRefused(" ".join(why_not(backend, q, k, v, is_causal=is_causal, **options))) from error
""",
        ("Do all options reach SDPA", "cannot run this", "raised"),
    ),
    WrongAnswer(
        "only errors that speak of kernels are refusals",
        "q1_3",
        """
def pinned_sdpa(backend, q, k, v, **options):
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:
            if "kernel" not in str(error):
                raise
            raise BackendRefused(" ".join(why_not(backend, q, k, v, **options))) from error
""",
        "should raise BackendRefused",
    ),
    *(
        WrongAnswer(
            mistake,
            "q1_4",
            f"""
def default_backend(capability, cudnn, reasons):
    first = {first}
    order = ["cudnn", "flash", "efficient", "math"] if first else {otherwise}
    for name in order:
        if {able}:
            return name
    {end}
""",
            phrase,
            seen=(
                "cuDNN is asked first where both hold",
                "A backend with a reason",
                "takes every call",
                "raise BackendRefused",
            ),
        )
        for mistake, first, otherwise, able, end, phrase in (
            ("cuDNN first everywhere", "True", "[]", "not reasons[name]", _REFUSED, "Torch asks in the order"),
            ("cuDNN first nowhere", "False", _FLASH_FIRST, "not reasons[name]", _REFUSED, "Torch asks in the order"),
            ("the GPU alone", "capability[0] in (9, 10)", _FLASH_FIRST, "not reasons[name]", _REFUSED, "Torch asks"),
            ("cuDNN's version alone", "cudnn > 91500", _FLASH_FIRST, "not reasons[name]", _REFUSED, "Torch asks"),
            (
                "9.15.0 is newer than itself",
                _RULE.replace(">", ">="),
                _FLASH_FIRST,
                "not reasons[name]",
                _REFUSED,
                "Torch asks",
            ),
            (
                "any newer GPU",
                _RULE.replace("in ((9, 0), (10, 0))", ">= (9, 0)"),
                _FLASH_FIRST,
                "not reasons[name]",
                _REFUSED,
                "Torch asks",
            ),
            (
                "math asked last",
                _RULE,
                '["flash", "efficient", "cudnn", "math"]',
                "not reasons[name]",
                _REFUSED,
                "Torch asks",
            ),
            (
                "reasons not looked at",
                _RULE,
                _FLASH_FIRST,
                "True",
                _REFUSED,
                ("A backend with a reason", "Torch asks", "raise BackendRefused"),
            ),
            (
                "math as a last resort",
                _RULE,
                _FLASH_FIRST,
                "not reasons[name]",
                'return "math"',
                "raise BackendRefused",
            ),
            (
                "None instead of an error",
                _RULE,
                _FLASH_FIRST,
                "not reasons[name]",
                "return None",
                "raise BackendRefused",
            ),
        )
    ),
    # ---- 2
    WrongAnswer(
        "causal costs as much as full",
        "q2_1",
        _COSTS.format(pairs="query_len * kv_len", kv="kv_heads", scores=_SCORES),
        "causal costs fewer FLOPs",
    ),
    WrongAnswer(
        "causal from the first key on",
        "q2_1",
        _COSTS.format(
            pairs="query_len * (query_len + 1) // 2 if causal else query_len * kv_len", kv="kv_heads", scores=_SCORES
        ),
        "last query sees the last key",
    ),
    WrongAnswer(
        "keys copied for each query head",
        "q2_1",
        _COSTS.format(pairs=_PAIRS, kv="heads", scores=_SCORES),
        "the group shares them",
    ),
    WrongAnswer(
        "scores written and read once",
        "q2_1",
        _COSTS.format(pairs=_PAIRS, kv="kv_heads", scores="2 * batch * heads * query_len * kv_len"),
        "scores travel four times",
    ),
    WrongAnswer(
        "reference rounded to the output's dtype",
        "q2_2",
        _ERRORS.format(
            rest="""d = (out - exact.to(out.dtype)).double()
    return d.abs().max().item(), (d.square().mean() / exact.square().mean()).sqrt().item()"""
        ),
        "hides the rounding",
    ),
    WrongAnswer(
        "reference in float32",
        "q2_2",
        _ERRORS.replace(".double()", ".float()").format(
            rest="""d = out.double() - exact.double()
    return d.abs().max().item(), (d.square().mean() / exact.double().square().mean()).sqrt().item()"""
        ),
        "float64 all the way",
    ),
    WrongAnswer(
        "rms not relative",
        "q2_2",
        _ERRORS.format(
            rest="d = out.double() - exact\n    return d.abs().max().item(), d.square().mean().sqrt().item()"
        ),
        "divide by the root mean square",
    ),
    WrongAnswer(
        "the mask forgotten",
        "q2_2",
        """
_masked = errors
def errors(out, q, k, v, causal=False):
    return _masked(out, q, k, v)
""",
        "causal when causal is True",
    ),
    # ---- 3
    WrongAnswer(
        "the group's keys read once for each head",
        "q3_1",
        """
def intensity(query_len, kv_len, group, head_dim, dtype):
    return 2 * query_len * kv_len / ((query_len + kv_len) * dtype.itemsize)
""",
        "they are read once",
    ),
    WrongAnswer(
        "queries have no bytes",
        "q3_1",
        """
def queries_to_ridge(ridge, kv_len, group, head_dim, dtype):
    if ridge * dtype.itemsize >= 2 * kv_len:
        return None
    return math.ceil(ridge * dtype.itemsize / (2 * group))
""",
        "have bytes as well",
    ),
    WrongAnswer(
        "queries rounded to the nearest number",
        "q3_1",
        """
def queries_to_ridge(ridge, kv_len, group, head_dim, dtype):
    size = ridge * dtype.itemsize
    return None if size >= 2 * kv_len else round(size * kv_len / (group * (2 * kv_len - size)))
""",
        "round up",
    ),
    WrongAnswer(
        "a ridge that is never reached",
        "q3_1",
        """
def queries_to_ridge(ridge, kv_len, group, head_dim, dtype):
    size = ridge * dtype.itemsize
    return math.ceil(size * kv_len / (group * (2 * kv_len - size)))
""",
        "return None",
    ),
    WrongAnswer(
        "heads of a group not neighbours",
        "q3_2",
        """
def attend_part(q, k, v):
    n = q.shape[1] // k.shape[1]
    s = q.float() @ k.float().repeat(1, n, 1, 1).mT / math.sqrt(q.shape[-1])
    return torch.softmax(s, -1) @ v.float().repeat(1, n, 1, 1), torch.logsumexp(s, -1)
""",
        "repeat_interleave",
        ("q3_2_part_tests",),
    ),
    WrongAnswer(
        "the logarithm to base 2",
        "q3_2",
        """
_natural = attend_part
def attend_part(q, k, v):
    out, lse = _natural(q, k, v)
    return out, lse / math.log(2)
""",
        "natural logarithm",
        ("q3_2_part_tests",),
    ),
    WrongAnswer(
        "base 2 in the parts and in the merge",
        "q3_2",
        _SPLIT.format(rest="return (torch.softmax(lses * math.log(2), 0)[..., None] * outs).sum(0).to(q.dtype)")
        + """
_natural = attend_part
def attend_part(q, k, v):
    out, lse = _natural(q, k, v)
    return out, lse / math.log(2)
""",
        "natural logarithm",
        ("q3_2_part_tests", "q3_2_tests"),
    ),
    WrongAnswer(
        "weights to base 2",
        "q3_2",
        _SPLIT.format(rest="return (torch.softmax(lses * math.log(2), 0)[..., None] * outs).sum(0).to(q.dtype)"),
        "natural logarithm",
    ),
    WrongAnswer(
        "softmax over another dimension of the stack",
        "q3_2",
        _SPLIT.format(rest="return (torch.softmax(lses, 1)[..., None] * outs).sum(0).to(q.dtype)"),
        "not over 1",
    ),
    WrongAnswer(
        "parts averaged", "q3_2", _SPLIT.format(rest="return outs.mean(0).to(q.dtype)"), "do not count equally"
    ),
    WrongAnswer(
        "exponentials without a maximum",
        "q3_2",
        _SPLIT.format(
            rest="""w = torch.exp(lses)
    return ((w[..., None] * outs).sum(0) / w.sum(0)[..., None]).to(q.dtype)"""
        ),
        "subtract the largest lse",
    ),
    WrongAnswer(
        "the last keys dropped",
        "q3_2",
        """
def split_kv_attention(q, k, v, splits):
    n = max(k.shape[2] // splits, 1)
    parts = [(k[:, :, i * n:(i + 1) * n], v[:, :, i * n:(i + 1) * n]) for i in range(splits) if i * n < k.shape[2]]
    outs, lses = (torch.stack(t) for t in zip(*(attend_part(q, *part) for part in parts)))
    return (torch.softmax(lses, 0)[..., None] * outs).sum(0).to(q.dtype)
""",
        "are left out",
    ),
    WrongAnswer(
        "no parts at all",
        "q3_2",
        "def split_kv_attention(q, k, v, splits):\n    return attend_part(q, k, v)[0].to(q.dtype)\n",
        ("attend_part was called for", "scores at once"),
    ),
    WrongAnswer(
        "waves not rounded up",
        "q3_3",
        """
def decode_us(programs, kv_len, splits, units, tile, tile_us, combine_us):
    tiles = math.ceil(math.ceil(kv_len / splits) / tile)
    return programs * splits / units * tiles * tile_us + (combine_us if splits > 1 else 0)
""",
        "round the waves up",
    ),
    WrongAnswer(
        "the most splits",
        "q3_3",
        "def best_splits(programs, kv_len, units, tile, tile_us, combine_us, most=64):\n    return most\n",
        "not always faster",
    ),
    # ---- 4
    WrongAnswer(
        "tokens strided instead of the head dimension",
        "q4_1",
        """
def knocked_out_by_strides(x):
    return torch.stack([x, x], dim=3).flatten(2, 3)[:, :, ::2]
""",
        "flash still runs",
    ),
    WrongAnswer(
        "a transposed shape", "q4_1", "def knocked_out_by_strides(x):\n    return x.transpose(2, 3)\n", "keep the shape"
    ),
    WrongAnswer("contiguous after all", "q4_1", "def strided_and_fast(x):\n    return x.clone()\n", "It should not be"),
    WrongAnswer(
        "a mask, which the CPU's flash takes",
        "q4_2",
        """
KNOCK_OUTS["mask"] = lambda q, k, v: {"query": q, "key": k, "value": v, "attn_mask": torch.zeros(24, 24)}
""",
        "flash runs KNOCK_OUTS['mask']",
    ),
    WrongAnswer(
        "a call that nothing can run",
        "q4_2",
        """
KNOCK_OUTS["short keys"] = lambda q, k, v: {"query": q, "key": k[..., :8], "value": v}
""",
        "math cannot compute",
    ),
    WrongAnswer(
        "a call on which torch itself breaks",
        "q4_2",
        """
KNOCK_OUTS["mask of one dimension"] = lambda q, k, v: {"query": q, "key": k, "value": v, "attn_mask": torch.zeros(24)}
""",
        "defect of torch",
    ),
    WrongAnswer(
        "heads and tokens mixed by a reshape",
        "q4_3",
        """
def unpack_qkv(packed, heads, kv_heads):
    b, s, width = packed.shape
    d = width // (heads + 2 * kv_heads)
    q, k, v = packed.split([heads * d, kv_heads * d, kv_heads * d], dim=2)
    return q.reshape(b, heads, s, d), k.reshape(b, kv_heads, s, d), v.reshape(b, kv_heads, s, d)
""",
        "a reshape mixes tokens",
    ),
    WrongAnswer(
        "copies to be safe",
        "q4_3",
        """
_views = unpack_qkv
def unpack_qkv(packed, heads, kv_heads):
    return [t.contiguous() for t in _views(packed, heads, kv_heads)]
""",
        "is a copy",
    ),
    WrongAnswer(
        "contiguous() for everything", "q4_3", "def ready_for_flash(x):\n    return x.contiguous()\n", "Copy only where"
    ),
    # ---- 5
    WrongAnswer(
        "the sum of rounded numbers",
        "q5_1",
        _ROUNDED.format(
            rest="""e = torch.exp(s - s.amax(-1, keepdim=True))
    if normalize_first:
        e = e / e.sum(-1, keepdim=True)
        out = (to_bf16(e) if p else e) @ v.double()
    else:
        e = to_bf16(e) if p else e
        out = e @ v.double() / e.sum(-1, keepdim=True)"""
        ),
        "before they are rounded",
    ),
    WrongAnswer(
        "always normalized first",
        "q5_1",
        _ROUNDED.format(
            rest="""w = torch.softmax(s, -1)
    out = (to_bf16(w) if p else w) @ v.double()"""
        ),
        "normalize_first decides",
    ),
    WrongAnswer(
        "scores never rounded",
        "q5_1",
        """
_round = rounded_attention
def rounded_attention(q, k, v, scores=False, p=False, normalize_first=True, output=False):
    return _round(q, k, v, False, p, normalize_first, output)
""",
        "nothing was rounded at that place",
    ),
    WrongAnswer(
        "bits of negative numbers run backwards",
        "q5_2",
        "def ulps_apart(a, b):\n    return (a.view(torch.int16).int() - b.view(torch.int16).int()).abs()\n",
        ("0 steps", "left of 0", "through 0"),
    ),
    WrongAnswer(
        "difference over the spacing at one",
        "q5_2",
        "def ulps_apart(a, b):\n    return ((a.float() - b.float()).abs() / 2**-7).round().int()\n",
        "Reinterpret the 16 bits",
    ),
    WrongAnswer(
        "differences from the first run",
        "q5_3",
        """
def distinct_results(fn, runs):
    bits = lambda r: b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in (r if isinstance(r, tuple) else (r,)))
    first = bits(fn())
    return 1 + sum(bits(fn()) != first for _ in range(runs - 1))
""",
        "not differences from the first",
    ),
    WrongAnswer(
        "values compared, not bits",
        "q5_3",
        """
def distinct_results(fn, runs):
    found = []
    for _ in range(runs):
        r = fn()
        r = tuple(t.clone() for t in (r if isinstance(r, tuple) else (r,)))
        if not any(all(torch.equal(a, b) for a, b in zip(r, old)) for old in found):
            found.append(r)
    return len(found)
""",
        ("compare bits", "Compare bits"),
    ),
    WrongAnswer(
        "results kept without a copy",
        "q5_3",
        """
def distinct_results(fn, runs):
    kept = [fn() for _ in range(runs)]
    bits = lambda r: b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in (r if isinstance(r, tuple) else (r,)))
    return len({bits(r) for r in kept})
""",
        "Keep a copy",
    ),
    # ---- 6
    WrongAnswer(
        "terabytes and gigabytes",
        "q6_1",
        _ANSWERS.format(change='found["decode_bandwidth"] *= 1000'),
        "in TB/s, and gb_s in GB/s",
    ),
    WrongAnswer(
        "the worst of all kinds",
        "q6_1",
        _ANSWERS.format(change='found["worst_default"] = default_slowdown(grid).max()'),
        ("decode shapes only", "too large"),
    ),
    # ---- bonus
    WrongAnswer(
        "delta left out",
        "bonus_2_4",
        """
def attention_backward(q, k, v, out, lse, dout):
    scale = q.shape[-1] ** -0.5
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    ds = p * (dout @ v.mT)
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ dout
""",
        "delta is missing",
    ),
    WrongAnswer(
        "a block of zeros",
        "bonus_5_5",
        """
def quantize_fp8(x, block=None):
    x = x.float()
    amax = x.abs().amax().reshape(1, 1, 1, 1) if block is None else torch.stack(
        [part.abs().amax(dim=(2, 3)) for part in x.split(block, dim=2)], dim=2)[..., None]
    scale = amax / 448
    return (x / spread_scales(scale, block, x.shape[2])).to(torch.float8_e4m3fn), scale
""",
        "no largest value to divide by",
    ),
    WrongAnswer(
        "one scale whatever the block",
        "bonus_5_5",
        """
_blocks = quantize_fp8
def quantize_fp8(x, block=None):
    return _blocks(x, None)
""",
        "of shape",
    ),
    # ---- what only a second look finds
    WrongAnswer(
        "a pin that is not closed",
        "q1_2",
        """
_asked = why_not
def why_not(backend, q, k, v, **options):
    found = _asked(backend, q, k, v, **options)
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)
    return found
""",
        "other backends are",
    ),
    WrongAnswer(
        "backends switched off one by one, and left so",
        "q1_2",
        """
_asked = why_not
def why_not(backend, q, k, v, **options):
    for name in BACKENDS:
        switch = {"efficient": "mem_efficient"}.get(name, name)
        getattr(torch.backends.cuda, f"enable_{switch}_sdp")(name == backend)
    return _asked(backend, q, k, v, **options)
""",
        "other backends are",
    ),
    WrongAnswer(
        "warnings silenced for good",
        "q1_2",
        """
_asked = why_not
def why_not(backend, q, k, v, **options):
    found = _asked(backend, q, k, v, **options)
    warnings.simplefilter("ignore")
    return found
""",
        "warning filters are others",
    ),
    WrongAnswer(
        "reasons not cut",
        "q1_2",
        _WHY.replace('.split(" (Triggered internally")[0]', "").format(
            filter=_ALWAYS, rest=f"{_KEEP}\n    return list(dict.fromkeys(found)) or [first]"
        ),
        "Triggered",
    ),
    WrongAnswer(
        "one string, no list",
        "q1_2",
        """
_asked = why_not
def why_not(backend, q, k, v, **options):
    return " ".join(_asked(backend, q, k, v, **options))
""",
        "list of sentences",
    ),
    *(
        WrongAnswer(mistake, "q2_1", code, phrase)
        for mistake, code, phrase in (
            (
                "half of the FLOPs",
                _COSTS.format(pairs=f"({_PAIRS}) / 2", kv="kv_heads", scores=_SCORES),
                "two products",
            ),
            (
                "half of all pairs is causal",
                _COSTS.format(
                    pairs="(query_len * kv_len / 2 if causal else query_len * kv_len)", kv="kv_heads", scores=_SCORES
                ),
                ("half of the diagonal",),
            ),
            (
                "the mask makes the matrix smaller",
                _COSTS.format(pairs=_PAIRS, kv="kv_heads", scores=f"4 * batch * heads * ({_PAIRS})"),
                "takes no bytes away",
            ),
            (
                "scores of key heads",
                _COSTS.format(pairs=_PAIRS, kv="kv_heads", scores="4 * batch * kv_heads * query_len * kv_len"),
                ("scores for all query heads", "unfused", "[2]"),
            ),
        )
    ),
    WrongAnswer(
        "no output bytes",
        "q2_1",
        """
def attention_costs(batch, heads, kv_heads, query_len, kv_len, head_dim, dtype, causal=False):
    pairs = sum(kv_len - query_len + i + 1 for i in range(query_len)) if causal else query_len * kv_len
    elements = batch * heads * query_len * head_dim + 2 * batch * kv_heads * kv_len * head_dim
    scores = 4 * batch * heads * query_len * kv_len
    return 4 * batch * heads * head_dim * pairs, elements * dtype.itemsize, (elements + scores) * dtype.itemsize
""",
        "output is written",
    ),
    WrongAnswer(
        "the mean for the largest",
        "q2_2",
        _ERRORS.format(
            rest="""d = out.double() - exact
    return d.abs().mean().item(), (d.square().mean() / exact.square().mean()).sqrt().item()"""
        ),
        ("not the mean", "the largest"),
    ),
    WrongAnswer(
        "groups repeated as a whole",
        "q2_2",
        _ERRORS.replace(
            "k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)",
            "k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)",
        ).format(
            rest="""d = out.double() - exact
    return d.abs().max().item(), (d.square().mean() / exact.square().mean()).sqrt().item()"""
        ),
        ("neighbours share", "the largest"),
    ),
    WrongAnswer(
        "mean of absolute values",
        "q2_2",
        _ERRORS.format(
            rest="""d = out.double() - exact
    return d.abs().max().item(), (d.abs().mean() / exact.abs().mean()).item()"""
        ),
        ("mean of absolute values",),
    ),
    WrongAnswer(
        "no root",
        "q2_2",
        _ERRORS.format(
            rest="""d = out.double() - exact
    return d.abs().max().item(), (d.square().mean() / exact.square().mean()).item()"""
        ),
        "take the root",
    ),
    WrongAnswer(
        "intensity for an element",
        "q3_1",
        """
def intensity(query_len, kv_len, group, head_dim, dtype):
    return 2 * group * query_len * kv_len / (group * query_len + kv_len)
""",
        "divide by the bytes",
    ),
    WrongAnswer(
        "the group forgotten",
        "q3_1",
        """
def queries_to_ridge(ridge, kv_len, group, head_dim, dtype):
    slack = 2 * kv_len - ridge * dtype.itemsize
    return None if slack <= 0 else math.ceil(ridge * dtype.itemsize * kv_len / slack)
""",
        "group * queries count",
    ),
    WrongAnswer(
        "a part's softmax over the queries",
        "q3_2",
        """
def attend_part(q, k, v):
    n = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(n, 1) for t in (k, v))
    s = q.float() @ k.mT / math.sqrt(q.shape[-1])
    return torch.softmax(s, -2) @ v, torch.logsumexp(s, -1)
""",
        "not over the queries",
        loses=("q3_2_part_tests",),
    ),
    WrongAnswer(
        "a part not scaled",
        "q3_2",
        """
def attend_part(q, k, v):
    n = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(n, 1) for t in (k, v))
    s = q.float() @ k.mT
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)
""",
        "sqrt(D)",
        ("q3_2_part_tests",),
    ),
    WrongAnswer(
        "the largest score for the lse",
        "q3_2",
        """
_exact = attend_part
def attend_part(q, k, v):
    out, _ = _exact(q, k, v)
    n = q.shape[1] // k.shape[1]
    s = q.float() @ k.float().repeat_interleave(n, 1).mT / math.sqrt(q.shape[-1])
    return out, s.amax(-1)
""",
        "natural logarithm of the sum",
        ("q3_2_part_tests",),
    ),
    WrongAnswer(
        "a part without a maximum",
        "q3_2",
        """
def attend_part(q, k, v):
    n = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(n, 1) for t in (k, v))
    e = torch.exp(q.float() @ k.mT / math.sqrt(q.shape[-1]))
    total = e.sum(-1, keepdim=True)
    return e / total @ v, total[..., 0].log()
""",
        ("overflow", "NaN", "infinite"),
        ("q3_2_part_tests",),
    ),
    WrongAnswer(
        "a part in the dtype of q",
        "q3_2",
        """
_exact = attend_part
def attend_part(q, k, v):
    return tuple(t.to(q.dtype) for t in _exact(q, k, v))
""",
        "dtype",
        ("q3_2_part_tests",),
    ),
    WrongAnswer(
        "chunks of unequal size",
        "q3_2",
        """
def split_kv_attention(q, k, v, splits):
    parts = zip(k.chunk(splits, 2), v.chunk(splits, 2))
    outs, lses = (torch.stack(t) for t in zip(*(attend_part(q, *part) for part in parts)))
    return (torch.softmax(lses, 0)[..., None] * outs).sum(0).to(q.dtype)
""",
        "differ by at most 1",
        seen="differ by at most 1",
    ),
    WrongAnswer("parts added", "q3_2", _SPLIT.format(rest="return outs.sum(0).to(q.dtype)"), "cannot just be added"),
    WrongAnswer(
        "weights of lse",
        "q3_2",
        _SPLIT.format(rest="w = lses / lses.sum(0)\n    return (w[..., None] * outs).sum(0).to(q.dtype)"),
        ("not lse", "log-sum-exp"),
    ),
    WrongAnswer(
        "merged in float32, returned so",
        "q3_2",
        _SPLIT.format(rest="return (torch.softmax(lses, 0)[..., None] * outs).sum(0)"),
        "dtype",
    ),
    WrongAnswer(
        "empty parts attended to",
        "q3_2",
        """
def split_kv_attention(q, k, v, splits):
    n, rest = divmod(k.shape[2], splits)
    ends = [0]
    for i in range(splits):
        ends.append(ends[-1] + n + (i < rest))
    outs, lses = [], []
    for a, b in zip(ends, ends[1:]):
        o, l = attend_part(q, k[:, :, a:b], v[:, :, a:b])
        outs.append(o); lses.append(l if b > a else torch.zeros(q.shape[:3]))
    return (torch.softmax(torch.stack(lses), 0)[..., None] * torch.stack(outs)).sum(0).to(q.dtype)
""",
        ("some parts are empty", "raised"),
    ),
    *(
        WrongAnswer(
            mistake,
            "q3_3",
            f"""
def decode_us(programs, kv_len, splits, units, tile, tile_us, combine_us):
    waves, keys = {waves}, {keys}
    return waves * {tiles} * tile_us + {tail}
""",
            phrase,
        )
        for mistake, waves, keys, tiles, tail, phrase in (
            (
                "merged once a split",
                "math.ceil(programs * splits / units)",
                "math.ceil(kv_len / splits)",
                "math.ceil(keys / tile)",
                "(combine_us * splits if splits > 1 else 0)",
                ("runs once", "decode_us"),
            ),
            (
                "always merged",
                "math.ceil(programs * splits / units)",
                "math.ceil(kv_len / splits)",
                "math.ceil(keys / tile)",
                "combine_us",
                "no second kernel",
            ),
            (
                "never merged",
                "math.ceil(programs * splits / units)",
                "math.ceil(kv_len / splits)",
                "math.ceil(keys / tile)",
                "0",
                "second kernel",
            ),
            (
                "tiles not rounded up",
                "math.ceil(programs * splits / units)",
                "math.ceil(kv_len / splits)",
                "keys / tile",
                "(combine_us if splits > 1 else 0)",
                ("round the tiles up", "decode_us"),
            ),
            (
                "programs not split",
                "math.ceil(programs / units)",
                "math.ceil(kv_len / splits)",
                "math.ceil(keys / tile)",
                "(combine_us if splits > 1 else 0)",
                "more programs",
            ),
            (
                "keys not split",
                "math.ceil(programs * splits / units)",
                "kv_len",
                "math.ceil(keys / tile)",
                "(combine_us if splits > 1 else 0)",
                "parts shorter",
            ),
        )
    ),
    WrongAnswer(
        "the last of the best",
        "q3_3",
        """
def best_splits(programs, kv_len, units, tile, tile_us, combine_us, most=64):
    costs = {n: decode_us(programs, kv_len, n, units, tile, tile_us, combine_us) for n in range(1, most + 1)}
    return max(n for n in costs if costs[n] <= min(costs.values()))
""",
        "take the fewest",
    ),
    WrongAnswer(
        "other values",
        "q4_1",
        "def strided_and_fast(x):\n    return torch.randn(*x.shape[:-1], 2 * x.shape[-1])[..., : x.shape[-1]]\n",
        ("values of x",),
    ),
    WrongAnswer(
        "flash refuses the fast one too",
        "q4_1",
        "def strided_and_fast(x):\n    return x.mT.contiguous().mT\n",
        "flash refuses",
    ),
    WrongAnswer(
        "one reason four times",
        "q4_2",
        """
KNOCK_OUTS = {f"dropout {p}": lambda q, k, v, p=p: {"query": q, "key": k, "value": v, "dropout_p": p} for p in (0.1, 0.2, 0.3, 0.4)}
""",
        "for the reason of",
    ),
    WrongAnswer(
        "three are enough", "q4_2", "KNOCK_OUTS = dict(list(KNOCK_OUTS.items())[:3])\n", ("four were asked for",)
    ),
    WrongAnswer(
        "strides again",
        "q4_2",
        """
KNOCK_OUTS["strides"] = lambda q, k, v: {"query": q.mT.contiguous().mT, "key": k, "value": v}
""",
        "That was 4.1",
    ),
    WrongAnswer(
        "keys before queries",
        "q4_3",
        """
_taken = unpack_qkv
def unpack_qkv(packed, heads, kv_heads):
    q, k, v = _taken(packed, heads, kv_heads)
    return q, v, k
""",
        ("is wrong in", "should be its numbers"),
    ),
    WrongAnswer("never a copy", "q4_3", "def ready_for_flash(x):\n    return x\n", "flash refuses"),
    WrongAnswer(
        "is_contiguous decides",
        "q4_3",
        "def ready_for_flash(x):\n    return x if x.is_contiguous() else x.contiguous()\n",
        "Copy only where",
    ),
    WrongAnswer(
        "no maximum subtracted",
        "q5_1",
        _ROUNDED.format(
            rest="""e = torch.exp(s)
    l = e.sum(-1, keepdim=True)
    if normalize_first:
        out = (to_bf16(e / l) if p else e / l) @ v.double()
    else:
        out = (to_bf16(e) if p else e) @ v.double() / l"""
        ),
        "Subtract the maximum",
    ),
    WrongAnswer(
        "the output left as it is",
        "q5_1",
        """
_round = rounded_attention
def rounded_attention(q, k, v, scores=False, p=False, normalize_first=True, output=False):
    return _round(q, k, v, scores, p, normalize_first, False)
""",
        ("nothing was rounded at that place", "should be a bf16 number"),
    ),
    WrongAnswer(
        "computed in float32",
        "q5_1",
        """
_round = rounded_attention
def rounded_attention(q, k, v, scores=False, p=False, normalize_first=True, output=False):
    return _round(q, k, v, scores, p, normalize_first, output).float()
""",
        ("dtype", "float64"),
    ),
    WrongAnswer(
        "scores rounded before they are scaled",
        "q5_1",
        """
def rounded_attention(q, k, v, scores=False, p=False, normalize_first=True, output=False):
    s = q.double() @ k.double().mT
    s = (to_bf16(s) if scores else s) / math.sqrt(q.shape[-1])
    e = torch.exp(s - s.amax(-1, keepdim=True))
    l = e.sum(-1, keepdim=True)
    w = e / l if normalize_first else e
    out = (to_bf16(w) if p else w) @ v.double()
    out = out if normalize_first else out / l
    return to_bf16(out) if output else out
""",
        ("after they are scaled", "nothing was rounded"),
    ),
    WrongAnswer(
        "sixteen bits to compute with",
        "q5_2",
        """
def ulps_apart(a, b):
    def place(x):
        bits = x.view(torch.int16)
        return torch.where(bits >= 0, bits, -32768 - bits)
    return (place(a) - place(b)).abs()
""",
        ("16 bits",),
    ),
    WrongAnswer(
        "0 and -0 apart",
        "q5_2",
        """
def ulps_apart(a, b):
    def place(x):
        bits = x.view(torch.int16).int()
        return torch.where(bits >= 0, bits, -32769 - bits)
    return (place(a) - place(b)).abs()
""",
        ("0 steps",),
    ),
    WrongAnswer(
        "only the first tensor of a tuple",
        "q5_3",
        """
def distinct_results(fn, runs):
    found = set()
    for _ in range(runs):
        r = fn()
        r = r[0] if isinstance(r, tuple) else r
        found.add(r.contiguous().view(torch.uint8).numpy().tobytes() * 1)
    return len(found)
_first = distinct_results
def distinct_results(fn, runs):
    return min(_first(fn, runs), 2)
""",
        ("distinct_results of",),
    ),
    *(
        WrongAnswer(mistake, "q6_1", _ANSWERS.format(change=f'found["{key}"] = {value}'), phrase)
        for mistake, key, value, phrase in (
            (
                "a product of all losses, which overflows for many shapes",
                "default_loss",
                "(lambda loss: float(loss.prod() ** (1 / len(loss))))(default_slowdown(grid))",
                ("default_loss of a table with 1000 shapes", "default_loss of a table of 4000 shapes"),
            ),
            ("wins in percent", "default_wins", '100 * found["default_wins"]', "between 0 and 1"),
            ("arithmetic mean of losses", "default_loss", "default_slowdown(grid).mean()", "not the arithmetic one"),
            (
                "the winner of all kinds",
                "decode_winner",
                "fastest(grid).value_counts().idxmax()",
                ("decode", "decode_winner"),
            ),
            (
                "bandwidth of all kinds",
                "decode_bandwidth",
                'timed["gb_s"].max() / 1e3 / 4.8',
                ("Decode only", "decode_bandwidth"),
            ),
            (
                "sm80 of all decode calls",
                "sm80_one_query",
                _NAMED.format(rows='timed["kind"] == "decode"', word="sm80"),
                ("Of cuDNN's decode rows with one query", "sm80_one_query"),
            ),
            (
                "sm80 of all backends",
                "sm80_one_query",
                _NAMED.format(rows='(timed["kind"] == "decode") & (timed["seq_len_q"] == 1)', word="sm80"),
                ("Of cuDNN's decode rows with one query", "sm80_one_query"),
            ),
            (
                "splits of all queries",
                "splits_four_queries",
                _NAMED.format(rows='(timed["kind"] == "decode") & (timed["backend"] == "cudnn")', word="reduction"),
                "Of cuDNN's decode rows with four queries",
            ),
        )
    ),
    WrongAnswer(
        "dq without the scale",
        "bonus_2_4",
        """
_scaled = attention_backward
def attention_backward(q, k, v, out, lse, dout):
    dq, dk, dv = _scaled(q, k, v, out, lse, dout)
    return dq * math.sqrt(q.shape[-1]), dk, dv
""",
        "is missing in this gradient",
    ),
    WrongAnswer(
        "autograd",
        "bonus_2_4",
        """
def attention_backward(q, k, v, out, lse, dout):
    with torch.enable_grad():
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(F.scaled_dot_product_attention(*leaves), leaves, dout)
""",
        "may not use",
    ),
    WrongAnswer(
        "softmax again",
        "bonus_2_4",
        """
def attention_backward(q, k, v, out, lse, dout):
    scale = q.shape[-1] ** -0.5
    p = torch.softmax(q @ k.mT * scale, -1)
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ dout
""",
        "may not use",
    ),
    WrongAnswer(
        "the scale upside down",
        "bonus_5_5",
        """
_q, _d = quantize_fp8, dequantize_fp8
def quantize_fp8(x, block=None):
    x8, scale = _q(x, block)
    return x8, 1 / scale
def dequantize_fp8(x8, scale, block=None):
    return _d(x8, 1 / scale, block)
""",
        "inverse",
    ),
    WrongAnswer(
        "scales in bf16",
        "bonus_5_5",
        """
_q = quantize_fp8
def quantize_fp8(x, block=None):
    x8, scale = _q(x, block)
    return x8, scale.bfloat16()
""",
        "float32",
    ),
    WrongAnswer(
        "scales not undone",
        "bonus_5_5",
        "def dequantize_fp8(x8, scale, block=None):\n    return x8.float()\n",
        "scale of its own",
    ),
]
