"""Typical mistakes in lab 4 by answer cell, each with words of the messages; `mistakes` explains a row."""

from tests.instructor.lab_cases import mistakes

_RULE = "capability in ((9, 0), (10, 0)) and cudnn > 91500"
_NONE_IS_ABLE = 'raise BackendRefused("every backend has a reason against this call")'
_SWITCH = 'getattr(torch.backends.cuda, f"enable_{name}_sdp")'
_SHOWN = "[BACKEND_OF[name] for name in operators if name in BACKEND_OF]"
_PAIRS = "query_len * (kv_len - query_len) + query_len * (query_len + 1) // 2"
_RMS = "(difference.square().mean() / exact.square().mean()).sqrt()"
_PART = "return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)"
_WEIGHTS = "torch.softmax(torch.stack(lses), dim=0)"
_BASE_2 = (_WEIGHTS, "torch.softmax(torch.stack(lses) * math.log(2), dim=0)")
_LSE_BASE_2 = ("torch.logsumexp(scores, dim=-1)", "torch.logsumexp(scores, dim=-1) / math.log(2)")
_MERGED = "(weights[..., None] * torch.stack(outputs)).sum(dim=0)"
_COMBINED = "(combine_us if splits > 1 else 0.0)"
_REFUSED_STRIDES = "x.transpose(2, 3).contiguous().transpose(2, 3)"
_FAST_STRIDES = "x.transpose(1, 2).contiguous().transpose(1, 2)"
_VIEWS = "all_heads.split([heads, kv_heads, kv_heads], dim=1)"
_READY = "x if x.stride(-1) == 1 else x.contiguous()"
_ROUNDED = "to_bf16(out) if output else out"
_STEPS = "(place(a) - place(b)).abs()"
_BITS = 'b"".join(t.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes() for t in tensors)'
_MEAN = "math.exp(sum(math.log(value) for value in values) / len(values))"
_SHARE = 'float({rows}["kernels"].map(lambda names: any("{word}" in name for name in names)).mean())'
_ORDER = ("Torch asks", "cuDNN is asked first where both hold")
_LEFT_BEHIND = "other backends are"

WRONG_ANSWERS = [
    *mistakes(
        "q1_1",
        (
            "every operator with the word",
            (_SHOWN, "[b for name in operators for b in BACKENDS if b in name]"),
            "only one of them is in the table",
        ),
        (
            "the CPU's flash forgotten",
            ("if name in BACKEND_OF]", 'if name in BACKEND_OF and "cpu" not in name]'),
            ("one call that ran flash", "a name of its own"),
        ),
        (
            "the backward pass counted",
            (_SHOWN, '[BACKEND_OF[n] for name in operators if (n := name.removesuffix("_backward")) in BACKEND_OF]'),
            "A backward operator is no call",
        ),
        ("a set of backends", (_SHOWN, f"list(dict.fromkeys({_SHOWN}))"), "One entry for each call"),
    ),
    *mistakes(
        "q1_2",
        (
            "the caller's warning filter kept",
            (('warnings.simplefilter("always")', "pass"), (" or [first_line]", "")),
            "open your own filter",
        ),
        (
            "headlines as reasons",
            (' if "not used because" not in text and "runtime disabled" not in text', ""),
            "no reason",
        ),
        ("no reason where torch gives none", (" or [first_line]", ""), "its first line"),
        (
            "CUDA's questions for CPU tensors",
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
        (
            "a pin that is not closed",
            f"""
_asked = why_not
def why_not(backend, q, k, v, **options):
    found = _asked(backend, q, k, v, **options)
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        {_SWITCH}(True)
    return found
""",
            _LEFT_BEHIND,
        ),
        (
            "backends switched off one by one, and left so",
            f"""
_asked = why_not
def why_not(backend, q, k, v, **options):
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        {_SWITCH}(name.removeprefix("mem_") == backend)
    return _asked(backend, q, k, v, **options)
""",
            _LEFT_BEHIND,
        ),
        (
            "warnings silenced for good",
            """
_asked = why_not
def why_not(backend, q, k, v, **options):
    found = _asked(backend, q, k, v, **options)
    warnings.simplefilter("ignore")
    return found
""",
            "warning filters are others",
        ),
        ("reasons not cut", ('.split(" (Triggered internally")[0]', ""), "Triggered"),
        (
            "one string, no list",
            (("return []", 'return ""'), ("return list", 'return " ".join'), (" or [first_line]", " or first_line")),
            "list of sentences",
        ),
    ),
    *mistakes(
        "q1_3",
        (
            "a list of two backends",
            ("sdpa_kernel(BACKENDS[backend])", "sdpa_kernel([BACKENDS[backend], SDPBackend.MATH])"),
            ("returned a result all the same", "A pin allows one backend"),
        ),
        (
            "the inputs copied on the sly",
            ("    with sdpa", "    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()\n    with sdpa"),
            "on copies",
        ),
        (
            "torch's own error let through",
            ("except RuntimeError as error", "except ValueError as error"),
            "should raise BackendRefused",
        ),
        (
            "asked first, computed twice",
            ("    with sdpa", "    why_not(backend, q, k, v, **options)\n    with sdpa"),
            "2 times",
        ),
        (
            "switches left behind",
            (
                "    with sdpa_kernel(BACKENDS[backend]), ",
                '    torch.backends.cuda.enable_flash_sdp(backend == "flash")\n'
                '    torch.backends.cuda.enable_math_sdp(backend == "math")\n    with ',
            ),
            "other backends",
        ),
        (
            "options dropped",
            ("(q, k, v, **options)\n", '(q, k, v, is_causal=options.get("is_causal", False))\n'),
            ("Do all options reach SDPA", "cannot run this", "raised"),
        ),
        (
            "only errors that speak of kernels are refusals",
            (
                "            reasons =",
                '            if "kernel" not in str(error):\n                raise\n            reasons =',
            ),
            "should raise BackendRefused",
        ),
    ),
    *mistakes(
        "q1_4",
        ("cuDNN first everywhere", (_RULE, "True"), _ORDER),
        ("cuDNN first nowhere", (_RULE, "False"), _ORDER),
        ("the GPU alone", (_RULE, "capability[0] in (9, 10)"), _ORDER),
        ("cuDNN's version alone", (_RULE, "cudnn > 91500"), _ORDER),
        ("9.15.0 is newer than itself", ("cudnn > 91500", "cudnn >= 91500"), _ORDER),
        ("any newer GPU", ("in ((9, 0), (10, 0))", ">= (9, 0)"), _ORDER),
        ("math asked last", ('"math", "cudnn"]', '"cudnn", "math"]'), ("Torch asks", "takes every call")),
        (
            "reasons not looked at",
            ("if not reasons[name]", "if True"),
            ("A backend with a reason", "Torch asks", "raise BackendRefused"),
        ),
        ("math as a last resort", (_NONE_IS_ABLE, 'return "math"'), "raise BackendRefused"),
        ("None instead of an error", (_NONE_IS_ABLE, "return None"), "raise BackendRefused"),
    ),
    *mistakes(
        "q2_1",
        ("causal costs as much as full", ("if causal:", "if False:"), "causal costs fewer FLOPs"),
        ("causal from the first key on", (_PAIRS, "query_len * (query_len + 1) // 2"), "last query sees the last key"),
        ("keys copied for each query head", ("2 * batch * kv_heads", "2 * batch * heads"), "the group shares them"),
        ("scores written and read once", ("scores = 4", "scores = 2"), "scores travel four times"),
        ("half of the FLOPs", ("return 4", "return 2"), "two products"),
        ("half of all pairs is causal", (_PAIRS, "query_len * kv_len / 2"), "half of the diagonal"),
        (
            "the mask makes the matrix smaller",
            ("heads * query_len * kv_len\n", "heads * pairs\n"),
            "takes no bytes away",
        ),
        (
            "scores of key heads",
            ("scores = 4 * batch * heads", "scores = 4 * batch * kv_heads"),
            ("scores for all query heads", "unfused", "[2]"),
        ),
        ("no output bytes", ("elements = 2 * batch", "elements = batch"), "output is written"),
    ),
    *mistakes(
        "q2_2",
        (
            "reference rounded to the output's dtype",
            ("out.double() - exact", "(out - exact.to(out.dtype)).double()"),
            "hides the rounding",
        ),
        ("reference in float32", (".double()", ".float()"), "float64 all the way"),
        ("rms not relative", (" / exact.square().mean()", ""), "divide by the root mean square"),
        ("the mask forgotten", ("if causal:", "if False:"), "causal when causal is True"),
        ("the mean for the largest", (".abs().max()", ".abs().mean()"), ("not the mean", "the largest")),
        (
            "groups repeated as a whole",
            ("repeat_interleave(group, dim=1)", "repeat(1, group, 1, 1)"),
            ("neighbours share", "the largest"),
        ),
        ("mean of absolute values", (_RMS, "difference.abs().mean() / exact.abs().mean()"), "mean of absolute values"),
        ("no root", (_RMS, _RMS.removesuffix(".sqrt()")), "take the root"),
    ),
    *mistakes(
        "bonus_2_4",
        ("dq without the scale", ("ds @ k * scale", "ds @ k"), "is missing in this gradient"),
        ("delta left out", (" - delta", ""), "delta is missing"),
        (
            "softmax again",
            ("torch.exp(q @ k.mT * scale - lse[..., None])", "(q @ k.mT * scale).softmax(-1)"),
            "may not",
        ),
        (
            "autograd",
            """
def attention_backward(q, k, v, out, lse, dout):
    with torch.enable_grad():
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(F.scaled_dot_product_attention(*leaves), leaves, dout)
""",
            "may not use",
        ),
    ),
    *mistakes(
        "q3_1",
        (
            "the group's keys read once for each head",
            ("2 * kv_len * head_dim", "2 * group * kv_len * head_dim"),
            "they are read once",
        ),
        ("queries have no bytes", ("* kv_len / (group * slack)", "/ (2 * group)"), "have bytes as well"),
        ("queries rounded to the nearest number", ("return math.ceil(", "return round("), "round up"),
        ("a ridge that is never reached", ("if slack <= 0:", "if False:"), "return None"),
        ("intensity for an element", ("(elements * dtype.itemsize)", "elements"), "divide by the bytes"),
        ("the group forgotten", ("(group * slack)", "slack"), "group * queries count"),
    ),
    *mistakes(
        "q3_2",
        (
            "heads of a group not neighbours",
            ("repeat_interleave(group, dim=1)", "repeat(1, group, 1, 1)"),
            "repeat_interleave",
        ),
        ("the logarithm to base 2", _LSE_BASE_2, "natural logarithm"),
        (
            "a part's softmax over the queries",
            ("softmax(scores, dim=-1)", "softmax(scores, dim=-2)"),
            "not over the queries",
        ),
        ("a part not scaled", (" / math.sqrt(q.shape[-1])", ""), "sqrt(D)"),
        (
            "the largest score for the lse",
            ("torch.logsumexp(scores, dim=-1)", "scores.amax(dim=-1)"),
            "natural logarithm of the sum",
        ),
        (
            "a part without a maximum",
            (_PART, "e = scores.exp()\n    return e / e.sum(-1, keepdim=True) @ values, e.sum(-1).log()"),
            ("overflow", "NaN", "infinite"),
        ),
        (
            "a part in the dtype of q",
            (_PART, "return tuple(t.to(q.dtype) for t in (torch.softmax(scores, -1) @ values, scores.logsumexp(-1)))"),
            "dtype",
        ),
        loses=("q3_2_part_tests",),
    ),
    *mistakes(
        "q3_2",
        ("base 2 in the parts and in the merge", (_LSE_BASE_2, _BASE_2), "natural logarithm"),
        loses=("q3_2_part_tests", "q3_2_tests"),
    ),
    *mistakes(
        "q3_2",
        ("weights to base 2", _BASE_2, "natural logarithm"),
        ("softmax over another dimension of the stack", (_WEIGHTS, _WEIGHTS.replace("=0", "=1")), "not over 1"),
        ("parts averaged", (_MERGED, "torch.stack(outputs).mean(dim=0)"), "do not count equally"),
        ("parts added", (_MERGED, "torch.stack(outputs).sum(dim=0)"), "cannot just be added"),
        (
            "exponentials without a maximum",
            (_WEIGHTS, "torch.stack(lses).exp()\n    weights = weights / weights.sum(dim=0)"),
            "subtract the largest lse",
        ),
        ("weights of lse", (_WEIGHTS, "torch.stack(lses) / torch.stack(lses).sum(dim=0)"), ("not lse", "log-sum-exp")),
        (
            "the last keys dropped",
            (
                "    parts =",
                "    whole = max(k.shape[2] // splits, 1) * splits\n"
                "    k, v = k[:, :, :whole], v[:, :, :whole]\n    parts =",
            ),
            "are left out",
        ),
        ("chunks of unequal size", ("tensor_split", "chunk"), "differ by at most 1"),
        (
            "no parts at all",
            "def split_kv_attention(q, k, v, splits):\n    return attend_part(q, k, v)[0].to(q.dtype)\n",
            ("attend_part was called for", "scores at once"),
        ),
        ("merged in float32, returned so", (".to(q.dtype)", ""), "dtype"),
        (
            "empty parts attended to",
            (
                (" if part[0].shape[2]", ""),
                (_WEIGHTS, "torch.softmax(torch.stack(lses).nan_to_num(neginf=0.0), dim=0)"),
            ),
            ("some parts are empty", "raised"),
        ),
    ),
    *mistakes(
        "q3_3",
        (
            "merged once a split",
            (_COMBINED, "(combine_us * splits if splits > 1 else 0.0)"),
            ("runs once", "decode_us"),
        ),
        ("always merged", (_COMBINED, "combine_us"), "no second kernel"),
        ("never merged", (f" + {_COMBINED}", ""), "second kernel"),
        (
            "tiles not rounded up",
            ("math.ceil(math.ceil(kv_len / splits) / tile)", "math.ceil(kv_len / splits) / tile"),
            ("round the tiles up", "decode_us"),
        ),
        (
            "waves not rounded up",
            ("math.ceil(programs * splits / units)", "programs * splits / units"),
            "round the waves up",
        ),
        ("programs not split", ("programs * splits / units", "programs / units"), "more programs"),
        ("keys not split", ("math.ceil(kv_len / splits)", "kv_len"), "parts shorter"),
        ("the most splits", ("1 + costs.index(min(costs))", "most"), "not always faster"),
        ("the last of the best", ("1 + costs.index(min(costs))", "most - costs[::-1].index(min(costs))"), "the fewest"),
    ),
    *mistakes(
        "q4_1",
        (
            "tokens strided instead of the head dimension",
            (_REFUSED_STRIDES, "torch.stack([x, x], dim=3).flatten(2, 3)[:, :, ::2]"),
            "flash still runs",
        ),
        ("a transposed shape", (_REFUSED_STRIDES, "x.transpose(2, 3)"), "keep the shape"),
        ("contiguous after all", (_FAST_STRIDES, "x.clone()"), "It should not be"),
        (
            "other values",
            (_FAST_STRIDES, "torch.randn(*x.shape[:-1], 2 * x.shape[-1])[..., : x.shape[-1]]"),
            "values of x",
        ),
        ("flash refuses the fast one too", (_FAST_STRIDES, "x.mT.contiguous().mT"), "flash refuses"),
    ),
    *mistakes(
        "q4_2",
        (
            "a mask, which the CPU's flash takes",
            'KNOCK_OUTS["mask"] = lambda q, k, v: dict(query=q, key=k, value=v, attn_mask=torch.zeros(24, 24))',
            "flash runs KNOCK_OUTS['mask']",
        ),
        (
            "a call that nothing can run",
            'KNOCK_OUTS["short keys"] = lambda q, k, v: dict(query=q, key=k[..., :8], value=v)',
            "math cannot compute",
        ),
        (
            "a call on which torch itself breaks",
            'KNOCK_OUTS["a vector"] = lambda q, k, v: dict(query=q, key=k, value=v, attn_mask=torch.zeros(24))',
            "defect of torch",
        ),
        (
            "one reason four times",
            'KNOCK_OUTS = {p: lambda q, k, v: dict(query=q, key=k, value=v, dropout_p=0.1) for p in "abcd"}',
            "for the reason of",
        ),
        ("three are enough", "KNOCK_OUTS = dict(list(KNOCK_OUTS.items())[:3])", "four were asked for"),
        (
            "strides again",
            'KNOCK_OUTS["strides"] = lambda q, k, v: dict(query=q.mT.contiguous().mT, key=k, value=v)',
            "That was 4.1",
        ),
    ),
    *mistakes(
        "q4_3",
        (
            "heads and tokens mixed by a reshape",
            (_VIEWS, f"[t.transpose(1, 2).reshape(t.shape) for t in {_VIEWS}]"),
            "a reshape mixes tokens",
        ),
        ("copies to be safe", (_VIEWS, f"[t.contiguous() for t in {_VIEWS}]"), "is a copy"),
        (
            "keys before queries",
            (f"return {_VIEWS}", f"q, k, v = {_VIEWS}\n    return q, v, k"),
            ("is wrong in", "should be its numbers"),
        ),
        ("contiguous() for everything", (_READY, "x.contiguous()"), "Copy only where"),
        ("never a copy", (_READY, "x"), "flash refuses"),
        ("is_contiguous decides", ("x.stride(-1) == 1", "x.is_contiguous()"), "Copy only where"),
    ),
    *mistakes(
        "q5_1",
        ("the sum of rounded numbers", ("out / total", "out / weights.sum(dim=-1, keepdim=True)"), "before they are"),
        (
            "always normalized first",
            (("e / total if normalize_first else e", "e / total"), ("if not normalize_first", "if False")),
            "normalize_first decides",
        ),
        ("scores never rounded", ("if scores:", "if False:"), "nothing was rounded at that place"),
        ("no maximum subtracted", (" - s.amax(dim=-1, keepdim=True)", ""), "Subtract the maximum"),
        (
            "the output left as it is",
            (_ROUNDED, "out"),
            ("nothing was rounded at that place", "should be a bf16 number"),
        ),
        ("computed in float32", (_ROUNDED, f"({_ROUNDED}).float()"), ("dtype", "float64")),
        (
            "scores rounded before they are scaled",
            ((" / math.sqrt(q.shape[-1])", ""), ("    e = ", "    s = s / math.sqrt(q.shape[-1])\n    e = ")),
            ("after they are scaled", "nothing was rounded"),
        ),
    ),
    *mistakes(
        "q5_2",
        (
            "bits of negative numbers run backwards",
            ("torch.where(bits >= 0, bits, -32768 - bits)", "bits"),
            ("0 steps", "left of 0", "through 0"),
        ),
        (
            "difference over the spacing at one",
            (_STEPS, "((a.float() - b.float()).abs() / 2**-7).round().int()"),
            "Reinterpret the 16 bits",
        ),
        ("sixteen bits to compute with", (".to(torch.int32)", ""), "16 bits"),
        ("0 and -0 apart", ("-32768 - bits", "-32769 - bits"), "0 steps"),
    ),
    *mistakes(
        "q5_3",
        (
            "differences from the first run",
            (
                ("found = set()", "found = []"),
                ("found.add", "found.append"),
                ("len(found)", "1 + sum(bits != found[0] for bits in found)"),
            ),
            "not differences from the first",
        ),
        (
            "values compared, not bits",
            (_BITS, "tuple(tuple(t.flatten().tolist()) for t in tensors)"),
            ("compare bits", "Compare bits"),
        ),
        (
            "results kept without a copy",
            ("for _ in range(runs):\n        result = fn()", "for result in [fn() for _ in range(runs)]:"),
            "Keep a copy",
        ),
        ("only the first tensor of a tuple", (" for t in tensors)", " for t in tensors[:1])"), "distinct_results of"),
    ),
    *mistakes(
        "bonus_5_5",
        (
            "the scale upside down",
            (
                (".to(torch.float8_e4m3fn), scale", ".to(torch.float8_e4m3fn), 1 / scale"),
                (".float() * s", ".float() / s"),
            ),
            "inverse",
        ),
        ("scales in bf16", ("fn), scale\n", "fn), scale.bfloat16()\n"), "float32"),
        ("scales not undone", (" * spread_scales(scale, block, x8.shape[2])", ""), "scale of its own"),
        (
            "a block of zeros",
            ("torch.where(amax > 0, amax / largest_fp8, 1.0)", "amax / largest_fp8"),
            "no largest value to divide by",
        ),
        ("one scale whatever the block", ("x = x.float()", "x, block = x.float(), None"), "of shape"),
    ),
    *mistakes(
        "q6_1",
        ("terabytes and gigabytes", ("/ 1e3 / GPU", "/ GPU"), "in TB/s, and gb_s in GB/s"),
        (
            "the worst of all kinds",
            ('[kinds.reindex(loss.index) == "decode"]', ""),
            ("decode shapes only", "too large"),
        ),
        (
            "a product of all losses, which overflows for many shapes",
            ("geometric_mean(loss)", "float(loss.prod() ** (1 / len(loss)))"),
            ("default_loss of a table with 1440 shapes", "default_loss of a table of 4000 shapes"),
        ),
        ("wins in percent", (": float((default", ": 100 * float((default"), "between 0 and 1"),
        ("arithmetic mean of losses", ("geometric_mean(loss)", "loss.mean()"), "not the arithmetic one"),
        ("the winner of all kinds", ('[kinds.reindex(winners.index) == "decode"]', ""), ("decode", "decode_winner")),
        ("bandwidth of all kinds", ('decode["gb_s"]', 'timed["gb_s"]'), ("Decode only", "decode_bandwidth")),
        (
            "sm80 of all decode calls",
            ('share(1, "sm80")', _SHARE.format(rows="decode", word="sm80")),
            ("Of cuDNN's decode rows with one query", "sm80_one_query"),
        ),
        (
            "sm80 of all backends",
            ('share(1, "sm80")', _SHARE.format(rows='decode[decode["seq_len_q"] == 1]', word="sm80")),
            ("Of cuDNN's decode rows with one query", "sm80_one_query"),
        ),
        (
            "splits of all queries",
            ('share(4, "reduction")', _SHARE.format(rows="cudnn", word="reduction")),
            "Of cuDNN's decode rows with four queries",
        ),
    ),
]
