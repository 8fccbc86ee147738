"""Typical mistakes in lab 4 by answer cell, each with words of the messages: `mistakes` explains a row, `mistakes_in_text` a cell."""

from tests.instructor.lab_cases import mistakes, mistakes_in_text

_RULE = "capability in ((9, 0), (10, 0)) and cudnn > 91500"
_NONE_IS_ABLE = 'raise BackendRefused("every backend has a reason against this call")'
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
_SHARE = 'float({rows}["kernels"].map(lambda names: any("{word}" in name for name in names)).mean())'
_ORDER = ("Torch asks", "cuDNN is asked first where both hold")

WRONG_ANSWERS = [
    *mistakes("q1_1", ("a set of backends", (_SHOWN, f"list(dict.fromkeys({_SHOWN}))"), "One entry for each call")),
    *mistakes(
        "q1_2",
        (
            "keys for values",
            ("product_attention(q, k, v,", "product_attention(q, k, k,"),
            ("flash runs", "torch refuses"),
        ),
        (
            "the caller's warning filter kept",
            (('warnings.simplefilter("always")', "pass"), (" or [first_line]", "")),
            "open your own filter",
        ),
        ("no reason where torch gives none", (" or [first_line]", ""), "its first line"),
        ("no choice", (" reasons or [first_line]", " [*reasons, first_line]"), ("first line", "does not say")),
        ("own words", ("return reasons or", 'return reasons and ["last dimension, dropout"] or'), "and torch"),
        ("reasons not cut", ('.split(" (Triggered internally")[0]', ""), "Triggered"),
        (
            "one string, no list",
            (("return []", 'return ""'), ("return reasons or [first_line]", 'return " ".join(reasons) or first_line')),
            "list of sentences",
        ),
    ),
    *mistakes(
        "q1_3",
        ("keys and values exchanged", ("product_attention(q, k, v,", "product_attention(q, v, k,"), "is wrong in"),
        (
            "the inputs copied on the sly",
            ("    with sdpa", "    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()\n    with sdpa"),
            "on unnecessary copies",
        ),
        ("torch's own error let through", ("RuntimeError as", "ValueError as"), "should raise BackendRefused"),
        (
            "asked first, computed twice",
            ("    with sdpa", "    why_not(backend, q, k, v, **options)\n    with sdpa"),
            "2 times",
        ),
    ),
    *mistakes(
        "q1_4",
        ("cuDNN first nowhere", (_RULE, "False"), _ORDER),
        ("the GPU alone", (_RULE, "capability[0] in (9, 10)"), _ORDER),
        ("cuDNN's version alone", (_RULE, "cudnn > 91500"), _ORDER),
        ("9.15.0 is newer than itself", ("cudnn > 91500", "cudnn >= 91500"), _ORDER),
        ("any 9.x and 10.x", ("in ((9, 0), (10, 0))", "[0] in (9, 10)"), _ORDER),
        ("math asked last", ('"math", "cudnn"]', '"cudnn", "math"]'), ("Torch asks", "order of the picture")),
        ("cuDNN not asked without the rule", ('"math", "cudnn"]', '"math"]'), "a backend can run"),
        ("math as a last resort", (_NONE_IS_ABLE, 'return "math"'), "raise BackendRefused"),
    ),
    *mistakes(
        "q2_1",
        ("causal costs as much as full", ("if causal:", "if False:"), "causal costs fewer FLOPs"),
        ("causal from the first key on", (_PAIRS, "query_len * (query_len + 1) // 2"), "last query sees the last key"),
        ("keys copied for each query head", ("2 * batch * kv_heads", "2 * batch * heads"), "the group shares them"),
        ("scores written and read once", ("scores = 4", "scores = 2"), "scores travel four times"),
        ("half of the FLOPs", ("return 4", "return 2"), "two products"),
        ("half of all pairs is causal", (_PAIRS, "query_len * kv_len / 2"), "half of the diagonal"),
        ("the mask makes the matrix smaller", ("heads * query_len * kv_len", "heads * pairs"), "takes no bytes away"),
        ("no output bytes", ("elements = 2 * batch", "elements = batch"), "output is written"),
    ),
    *mistakes(
        "q2_2",
        ("reference in float32", (".double()", ".float()"), "float64 all the way"),
        ("rms not relative", (" / exact.square().mean()", ""), "divide by the root mean square"),
        ("the mask forgotten", ("if causal:", "if False:"), "causal when causal is True"),
        ("the mean for the largest", (".abs().max()", ".abs().mean()"), ("not the mean", "the largest")),
        ("mean of absolute values", (_RMS, "difference.abs().mean() / exact.abs().mean()"), "mean of absolute values"),
        ("no root", (_RMS, _RMS.removesuffix(".sqrt()")), "take the root"),
    ),
    *mistakes(
        "bonus_2_4",
        ("dq without the scale", ("ds @ k * scale", "ds @ k"), "is missing in this gradient"),
        ("delta left out", (" - delta", ""), "delta is missing"),
        ("softmax again", ("torch.exp(q @ k.mT * scale - lse[..., None]", "(q @ k.mT * scale).softmax(-1"), "may not"),
    ),
    *mistakes(
        "q3_1",
        ("the group's keys read once for each head", ("2 * kv_len *", "2 * group * kv_len *"), "they are read once"),
        ("queries have no bytes", ("* kv_len / (group * slack)", "/ (2 * group)"), "have bytes as well"),
        ("queries rounded to the nearest number", ("return math.ceil(", "return round("), "round up"),
        ("a ridge that is never reached", ("if slack <= 0:", "if False:"), "return None"),
        ("intensity for an element", ("(elements * dtype.itemsize)", "elements"), "divide by the bytes"),
        ("the group forgotten", ("(group * slack)", "slack"), "group * queries count"),
        (
            "no more queries than keys",
            ("if slack <= 0:", "if slack < kv_len / group:"),
            ("more queries than", "needed"),
        ),
    ),
    *mistakes(
        "q3_2",
        ("the logarithm to base 2", _LSE_BASE_2, "natural logarithm"),
        ("a part not scaled", (" / math.sqrt(q.shape[-1])", ""), "sqrt(D)"),
        (
            "a part without a maximum",
            (_PART, "e = scores.exp()\n    return e / e.sum(-1, keepdim=True) @ values, e.sum(-1).log()"),
            ("overflow", "NaN", "infinite"),
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
        ("chunks of unequal size", ("tensor_split", "chunk"), "differ by at most 1"),
        ("merged in float32, returned so", (".to(q.dtype)", ""), "dtype"),
    ),
    *mistakes(
        "q3_3",
        ("always merged", (_COMBINED, "combine_us"), "no second kernel"),
        ("never merged", (f" + {_COMBINED}", ""), "second kernel"),
        ("programs not split", ("programs * splits / units", "programs / units"), "more programs"),
        ("keys not split", ("math.ceil(kv_len / splits)", "kv_len"), "parts shorter"),
        ("keys rounded down", ("math.ceil(kv_len / splits)", "kv_len // splits"), ("parts shorter", "decode_us")),
        ("the most splits", ("1 + costs.index(min(costs))", "most"), "not always faster"),
        (
            "the most never tried",
            ("1 + costs.index(min(costs))", "1 + costs.index(min(costs[:-1]))"),
            "a number to try",
        ),
        ("the last of the best", ("1 + costs.index(min(costs))", "most - costs[::-1].index(min(costs))"), "the fewest"),
    ),
    *mistakes(
        "q4_1",
        ("a transposed shape", (_REFUSED_STRIDES, "x.transpose(2, 3)"), "keep the shape"),
        ("contiguous after all", (_FAST_STRIDES, "x.clone()"), "It should not be"),
        ("flash refuses the fast one too", (_FAST_STRIDES, "x.mT.contiguous().mT"), "flash refuses"),
    ),
    *mistakes("q4_2", ("three are enough", "KNOCK_OUTS = dict(list(KNOCK_OUTS.items())[:3])", "four were asked for")),
    *mistakes(
        "q4_3",
        ("copies to be safe", (_VIEWS, f"[t.contiguous() for t in {_VIEWS}]"), "is a copy"),
        (
            "keys before queries",
            (f"return {_VIEWS}", f"q, k, v = {_VIEWS}\n    return q, v, k"),
            ("is wrong in", "should be its numbers"),
        ),
        ("contiguous() for everything", (_READY, "x.contiguous()"), "Copy only where"),
        ("never a copy", (_READY, "x"), "flash refuses"),
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
        ("one maximum for all rows", ("s.amax(dim=-1, keepdim=True)", "s.max()"), ("maximum of each row", "away from")),
        ("computed in float32", (_ROUNDED, f"({_ROUNDED}).float()"), ("dtype", "float64")),
        (
            "scores rounded before they are scaled",
            ((" / math.sqrt(q.shape[-1])", ""), ("    e = ", "    s = s / math.sqrt(q.shape[-1])\n    e = ")),
            ("after they are scaled", "nothing was rounded"),
        ),
    ),
    *mistakes(
        "q5_2",
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
            "results kept without a copy",
            ("for _ in range(runs):\n        result = fn()", "for result in [fn() for _ in range(runs)]:"),
            "Keep a copy",
        ),
        ("only the first tensor of a tuple", (" for t in tensors)", " for t in tensors[:1])"), "distinct_results of"),
    ),
    *mistakes(
        "bonus_5_5",
        ("scales in bf16", ("fn), scale\n", "fn), scale.bfloat16()\n"), "float32"),
        ("scales not undone", (" * spread_scales(scale, block, x8.shape[2])", ""), "scale of its own"),
        ("one scale whatever the block", ("x = x.float()", "x, block = x.float(), None"), "of shape"),
    ),
    *mistakes(
        "q6_1",
        ("terabytes and gigabytes", ("/ 1e3 / GPU", "/ GPU"), "in TB/s, and gb_s in GB/s"),
        ("wins in percent", (": float((default", ": 100 * float((default"), "between 0 and 1"),
        ("arithmetic mean of losses", ("geometric_mean(loss)", "loss.mean()"), "not the arithmetic one"),
        ("the winner of all kinds", ('[kinds.reindex(winners.index) == "decode"]', ""), ("decode", "decode_winner")),
        (
            "the default as the winner",
            ("winners[kinds.reindex(winners.index)", "default[kinds.reindex(default.index)"),
            "decode",
        ),
        ("bandwidth of the default", ('decode["gb_s"]', 'decode[decode["is_default"]]["gb_s"]'), "decode_bandwidth"),
        (
            "the first kernel alone",
            ("any(word in name for name in kernels)", "word in kernels[0]"),
            ("in a kernel's name", "sm80_one_query"),
        ),
        ("bandwidth of all kinds", ('decode["gb_s"]', 'timed["gb_s"]'), ("Decode only", "decode_bandwidth")),
        (
            "sm80 of all decode calls",
            ('share(1, "sm80")', _SHARE.format(rows="decode", word="sm80")),
            ("Count cuDNN's decode rows with one query", "sm80_one_query"),
        ),
        (
            "sm80 of all backends",
            ('share(1, "sm80")', _SHARE.format(rows='decode[decode["seq_len_q"] == 1]', word="sm80")),
            ("Count cuDNN's decode rows with one query", "sm80_one_query"),
        ),
        (
            "splits of all queries",
            ('share(4, "reduction")', _SHARE.format(rows="cudnn", word="reduction")),
            "Count cuDNN's decode rows with four queries",
        ),
    ),
    *mistakes_in_text(r"""
# %% q1_1: every operator with the word => only one of them is in the table
-    return [BACKEND_OF[name] for name in operators if name in BACKEND_OF]
+    return [b for name in operators for b in BACKENDS if b in name]

# %% q1_1: the CPU's flash forgotten => one call that ran flash | a name of its own
-    return [BACKEND_OF[name] for name in operators if name in BACKEND_OF]
+    return [BACKEND_OF[name] for name in operators if name in BACKEND_OF and "cpu" not in name]

# %% q1_1: the backward pass counted => A backward operator is no call
-    return [BACKEND_OF[name] for name in operators if name in BACKEND_OF]
+    return [BACKEND_OF[n] for name in operators if (n := name.removesuffix("_backward")) in BACKEND_OF]

# %% q1_2: headlines as reasons => no reason
-    reasons = [text for text in reasons if "not used because" not in text and "runtime disabled" not in text]
+    reasons = [text for text in reasons]

# %% q1_2: CUDA's questions for CPU tensors => flash runs this here
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

# %% q1_2: a pin that is not closed => other backends are
_asked = why_not
def why_not(backend, q, k, v, **options):
    found = _asked(backend, q, k, v, **options)
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)
    return found

# %% q1_2: backends switched off one by one, and left so => other backends are
_asked = why_not
def why_not(backend, q, k, v, **options):
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(name.removeprefix("mem_") == backend)
    return _asked(backend, q, k, v, **options)

# %% q1_2: warnings silenced for good => warning filters are others
_asked = why_not
def why_not(backend, q, k, v, **options):
    found = _asked(backend, q, k, v, **options)
    warnings.simplefilter("ignore")
    return found

# %% q1_3: a list of two backends => returned a result all the same | A pin allows one backend
-    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings():
+    with sdpa_kernel([BACKENDS[backend], SDPBackend.MATH]), warnings.catch_warnings():

# %% q1_3: switches left behind => other backends
-    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings():
+    torch.backends.cuda.enable_flash_sdp(backend == "flash")
+    torch.backends.cuda.enable_math_sdp(backend == "math")
+    with warnings.catch_warnings():

# %% q1_3: options dropped => Do all options reach SDPA | cannot run this | raised
-            return F.scaled_dot_product_attention(q, k, v, **options)
+            return F.scaled_dot_product_attention(q, k, v, is_causal=options.get("is_causal", False))

# %% q1_3: only errors that speak of kernels are refusals => should raise BackendRefused
-        except RuntimeError as error:  # public
+        except RuntimeError as error:  # public
+            if "kernel" not in str(error):
+                raise

# %% q1_4: reasons not looked at => A backend with a reason | Torch asks | raise BackendRefused
-        if not reasons[name]:
+        if True:

# %% q2_1: scores of key heads => scores for all query heads | unfused | [2]
-    scores = 4 * batch * heads * query_len * kv_len
+    scores = 4 * batch * kv_heads * query_len * kv_len

# %% q2_2: reference rounded to the output's dtype => hides the rounding
-    difference = out.double() - exact
+    difference = (out - exact.to(out.dtype)).double()

# %% q2_2: groups repeated as a whole => neighbours share | the largest
-    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
+    keys, values = (t.double().repeat(1, group, 1, 1) for t in (k, v))

# %% bonus_2_4: autograd => may not use
def attention_backward(q, k, v, out, lse, dout):
    with torch.enable_grad():
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(F.scaled_dot_product_attention(*leaves), leaves, dout)

# %% bonus_2_4: P by a sum of its own => with the lse that is given
-    p = torch.exp(q @ k.mT * scale - lse[..., None])
+    p = q @ k.mT * scale
+    p = torch.exp(p - p.amax(-1, keepdim=True))
+    p = p / p.sum(-1, keepdim=True)

# %% q3_2 loses q3_2_part_tests: heads of a group not neighbours => repeat_interleave
-    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
+    keys, values = (t.float().repeat(1, group, 1, 1) for t in (k, v))

# %% q3_2 loses q3_2_part_tests: a part's softmax over the queries => not over the queries
-    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)
+    return torch.softmax(scores, dim=-2) @ values, torch.logsumexp(scores, dim=-1)

# %% q3_2 loses q3_2_part_tests: the largest score for the lse => natural logarithm of the sum
-    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)
+    return torch.softmax(scores, dim=-1) @ values, scores.amax(dim=-1)

# %% q3_2 loses q3_2_part_tests: a part in the dtype of q => dtype
-    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)
+    return tuple(t.to(q.dtype) for t in (torch.softmax(scores, -1) @ values, scores.logsumexp(-1)))

# %% q3_2: the last keys dropped => are left out
-    parts = zip(k.tensor_split(splits, dim=2), v.tensor_split(splits, dim=2), strict=True)
+    whole = max(k.shape[2] // splits, 1) * splits
+    k, v = k[:, :, :whole], v[:, :, :whole]
+    parts = zip(k.tensor_split(splits, dim=2), v.tensor_split(splits, dim=2), strict=True)

# %% q3_2: no parts at all => attend_part was called for
def split_kv_attention(q, k, v, splits):
    return attend_part(q, k, v)[0].to(q.dtype)

# %% q3_2: empty parts attended to => some parts are empty | raised
-    outputs, lses = zip(*(attend_part(q, *part) for part in parts if part[0].shape[2]), strict=True)
-    weights = torch.softmax(torch.stack(lses), dim=0)
+    outputs, lses = zip(*(attend_part(q, *part) for part in parts), strict=True)
+    weights = torch.softmax(torch.stack(lses).nan_to_num(neginf=0.0), dim=0)

# %% q3_3: merged once a split => runs once | decode_us
-    return waves * tiles * tile_us + (combine_us if splits > 1 else 0.0)
+    return waves * tiles * tile_us + (combine_us * splits if splits > 1 else 0.0)

# %% q3_3: tiles not rounded up => round the tiles up | decode_us
-    tiles = math.ceil(math.ceil(kv_len / splits) / tile)
+    tiles = math.ceil(kv_len / splits) / tile

# %% q3_3: waves not rounded up => round the waves up
-    waves = math.ceil(programs * splits / units)
+    waves = programs * splits / units

# %% q4_1: tokens strided instead of the head dimension => flash still runs
-    return x.transpose(2, 3).contiguous().transpose(2, 3)
+    return torch.stack([x, x], dim=3).flatten(2, 3)[:, :, ::2]

# %% q4_1: other values => values of x
-    return x.transpose(1, 2).contiguous().transpose(1, 2)
+    return torch.randn(*x.shape[:-1], 2 * x.shape[-1])[..., : x.shape[-1]]

# %% q4_2: a mask, which the CPU's flash takes => flash runs KNOCK_OUTS['mask']
KNOCK_OUTS["mask"] = lambda q, k, v: dict(query=q, key=k, value=v, attn_mask=torch.zeros(24, 24))

# %% q4_2: a call that nothing can run => math cannot compute
KNOCK_OUTS["short keys"] = lambda q, k, v: dict(query=q, key=k[..., :8], value=v)

# %% q4_2: a call on which torch itself breaks => defect of torch
KNOCK_OUTS["a vector"] = lambda q, k, v: dict(query=q, key=k, value=v, attn_mask=torch.zeros(24))

# %% q4_2: one reason four times => for the reason of
KNOCK_OUTS = {p: lambda q, k, v: dict(query=q, key=k, value=v, dropout_p=0.1) for p in "abcd"}

# %% q4_2: strides again => That was 4.1
KNOCK_OUTS["strides"] = lambda q, k, v: dict(query=q.mT.contiguous().mT, key=k, value=v)

# %% q4_3: strides of a whole projection => should be its numbers
-    all_heads = packed.unflatten(2, (heads + 2 * kv_heads, -1)).transpose(1, 2)
+    shape = packed.unflatten(2, (heads + 2 * kv_heads, -1)).shape
+    all_heads = packed.as_strided(shape, torch.empty(shape).stride()).transpose(1, 2)

# %% q4_3: heads and tokens mixed by a reshape => a reshape mixes tokens
-    return all_heads.split([heads, kv_heads, kv_heads], dim=1)
+    return [t.transpose(1, 2).reshape(t.shape) for t in all_heads.split([heads, kv_heads, kv_heads], dim=1)]

# %% q5_1: the output left as it is => nothing was rounded at that place | should be a bf16 number
-    return to_bf16(out) if output else out
+    return out

# %% q5_2: bits of negative numbers run backwards => 0 steps | left of 0 | through 0
-        return torch.where(bits >= 0, bits, -32768 - bits)
+        return bits

# %% q5_2: difference over the spacing at one => Reinterpret the 16 bits
-    return (place(a) - place(b)).abs()
+    return ((a.float() - b.float()).abs() / 2**-7).round().int()

# %% q5_3: values compared, not bits => compare bits | Compare bits
-        found.add(b"".join(t.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes() for t in tensors))
+        found.add(tuple(tuple(t.flatten().tolist()) for t in tensors))

# %% bonus_5_5: the scale upside down => inverse
-    return (x / spread_scales(scale, block, x.shape[2])).to(torch.float8_e4m3fn), scale
+    return (x / spread_scales(scale, block, x.shape[2])).to(torch.float8_e4m3fn), 1 / scale

-    return x8.float() * spread_scales(scale, block, x8.shape[2])
+    return x8.float() / spread_scales(scale, block, x8.shape[2])

# %% bonus_5_5: a block of zeros => no largest value to divide by
-    scale = torch.where(amax > 0, amax / largest_fp8, 1.0)
+    scale = amax / largest_fp8

# %% q6_1: places for names of rows => default_wins | positional indexers
-    winners, loss = fastest(grid), default_slowdown(grid)
+    loss = default_slowdown(grid)
+    winners = grid.iloc[timed.groupby("shape")["ms"].idxmin()].set_index("shape")["backend"]

# %% q6_1: the worst of all kinds => decode shapes only | too large
-        "worst_default": loss[kinds.reindex(loss.index) == "decode"].max(),
+        "worst_default": loss.max(),

# %% q6_1: a product of all losses, which overflows for many shapes => default_loss of a table with 1440 shapes | default_loss of a table of 4000 shapes
-        "default_loss": geometric_mean(loss),
+        "default_loss": float(loss.prod() ** (1 / len(loss))),
"""),
]
