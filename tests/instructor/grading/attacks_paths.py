"""Right values of labs 3 and 4 by a way that breaks a word for some inputs only, or beside an operation that runs for show.

Checks that look at small inputs, at one number of slots or at the first program say nothing about the others, and a count of what ran
says nothing about where the result came from. All of these passed the hidden and the visible checks of their questions.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_shortcuts import Shortcut


def _lab3(name: str, cell: str, check: str, words: str, code: dict[str, str]) -> Shortcut:
    return Shortcut(name, "lab3_gluon", cell, f"{cell}_tests", code, (check,), words)


_ISSUE_V = "        mbarrier.wait(v_full.index(v_slot), v_phase)\n"
_WAIT = "        async_copy.wait_group(STAGES - 1)\n"
_PRODUCT = (
    "        acc = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc, is_async=True)\n"
    "        acc = warpgroup_mma_wait(0, deps=[acc])"
)
_OWN_SUM = """
            part = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc, use_acc=False, is_async=True)
            acc = acc + warpgroup_mma_wait(0, deps=[part])"""
_DIVIDE = "o = o / gl.convert_layout(total, gl.SliceLayout(1, output))[:, None]\n"
_PV = "        o = warpgroup_mma(gl.convert_layout(p.to(dtype), left), v_tile.reshape([BLOCK_N, BLOCK_D]), o)\n"
_SOFTMAX = "        p, m, total, o = online_softmax(s, m, total, o, c, key, sk)\n"
_MULTIPLY = "o = o * gl.convert_layout(total, gl.SliceLayout(1, output))[:, None]\n"

LAB3 = [
    _lab3(
        "2.2 strided stores where X has no whole tiles",
        "q2_2",
        "transpose",
        "did not go through gl.convert_layout",
        {
            "    tile = gl.convert_layout(tile, writing)\n": """
    if m % 32 + n % 32 > 0:
        gl.store(y_ptr + columns[None, :] * y_stride + rows[:, None], tile, mask=mask)
        return
    tile = gl.convert_layout(tile, writing)
"""
        },
    ),
    _lab3(
        "2.2 strided stores but for two tiles",
        "q2_2",
        "transpose",
        "would do",
        {
            "    tile = gl.convert_layout(tile, writing)\n": """
    if m + n != 96:
        gl.store(y_ptr + columns[None, :] * y_stride + rows[:, None], tile, mask=mask)
        return
    tile = gl.convert_layout(tile, writing)
"""
        },
    ),
    _lab3(
        "3.1 with two and four slots all copies are waited for",
        "q3_1",
        "async_copy",
        "waits for copies of later tiles",
        {_WAIT: "        if (STAGES % 2 == 0) & (i > 0):\n            async_copy.wait_group(0)\n" + _WAIT},
    ),
    _lab3(
        "3.1 with two slots the copies are for show",
        "q3_1",
        "async_copy",
        "all tiles come through the ring",
        {
            "        gl.store(c_ptr + at, total, mask=at < n)": """
        if STAGES == 2:
            total = gl.load(a_ptr + at, mask=at < n) + gl.load(b_ptr + at, mask=at < n)
        gl.store(c_ptr + at, total, mask=at < n)"""
        },
    ),
    _lab3(
        "3.1 no pipeline from the third program on",
        "q3_1",
        "async_copy",
        "on their way at a time",
        {_WAIT: "        if gl.program_id(0) > 1:\n            async_copy.wait_group(0)\n" + _WAIT},
    ),
    _lab3(
        "3.1 no pipeline behind tile 10",
        "q3_1",
        "async_copy",
        "waits for copies of later tiles",
        {_WAIT: "        if i > 10:\n            async_copy.wait_group(0)\n" + _WAIT},
    ),
    _lab3(
        "4.1 sums in registers behind the eighth step",
        "q4_1",
        "wgmma",
        "should add to the accumulator",
        {
            _PRODUCT: "        if k < 512:\n"
            + "\n".join(f"    {line}" for line in _PRODUCT.split("\n"))
            + "\n        else:"
            + _OWN_SUM
        },
    ),
    _lab3(
        "5.1 divided and multiplied again in every block, around online_softmax",
        "q5_1",
        "softmax",
        "not in every block",
        {
            "    " + _DIVIDE: "    o = o * 1.0\n",
            _SOFTMAX: "        if key > 0:\n            " + _MULTIPLY + _SOFTMAX,
            _PV: _PV + "        " + _DIVIDE,
        },
    ),
    _lab3(
        "5.1 the same where the head dimension is 128",
        "q5_1",
        "softmax",
        "not in every block",
        {
            "    " + _DIVIDE: "    if BLOCK_D < 128:\n        " + _DIVIDE,
            _SOFTMAX: "        if (key > 0) & (BLOCK_D > 64):\n            " + _MULTIPLY + _SOFTMAX,
            _PV: _PV + "        if BLOCK_D > 64:\n            " + _DIVIDE,
        },
    ),
    _lab3(
        "5.2 behind the first round the producer waits until all slots are free",
        "q5_2",
        "specialized",
        "waits for nothing but a free slot",
        {
            "        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)\n": """
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        if (i >= STAGES) & (slot == 0):
            for other in gl.static_range(STAGES):
                mbarrier.wait(empty.index(other), ((i // STAGES) & 1) ^ 1)
"""
        },
    ),
    *(
        _lab3(
            f"5.3 one product at a time {when}",
            "q5_3",
            "overlap",
            "is issued while the first one runs",
            {_ISSUE_V: f"        if {condition}:\n            s = warpgroup_mma_wait(0, deps=[s])\n" + _ISSUE_V},
        )
        for when, condition in (
            ("with three slots", "STAGES > 2"),
            ("from the second head on", "gl.program_id(1) > 0"),
            ("behind the seventh block", "i > 6"),
            ("where there are four blocks", "blocks == 4"),
        )
    ),
]


def _lab4(name: str, cell: str, check: str, words: str, code: str) -> Shortcut:
    """A shortcut of lab 4 whose hidden check has the name of the function that it is about."""
    tests = "q3_2_part_tests" if check == "attend_part" else f"{cell}_tests"
    names = {"unpack": ("unpack_qkv", "ready_for_flash")}.get(check, (check,))
    return Shortcut(name, "lab4_sdpa", cell, tests, code, (check, *names), words)


def _pinned(name: str, words: str, before: str) -> Shortcut:
    """SDPA with one backend, and a line before it."""
    code = f"""
def pinned_sdpa(backend, q, k, v, **options):
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            {before}
            return F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:
            raise BackendRefused(" ".join(why_not(backend, q, k, v, **options))) from error
"""
    return _lab4(name, "q1_3", "pinned_sdpa", words, code)


def _sixth(name: str, scores: str) -> Shortcut:
    """Gradients for which the scores are computed a second time."""
    code = f"""
def attention_backward(q, k, v, out, lse, dout):
    scale = 1 / math.sqrt(q.shape[-1])
    a, b = torch.broadcast_tensors(q[..., None, :], k[:, :, None])
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    again = torch.exp({scores} * scale - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(dim=-1, keepdim=True))
    return ds @ k * scale, ds.mT @ q * scale, again.mT @ dout
"""
    return _lab4(name, "bonus_2_4", "attention_backward", "compute the scores once", code)


def _bits(name: str, words: str, taken: str) -> Shortcut:
    """Results that are told apart by a part of their bits."""
    code = f"""
def distinct_results(fn, runs):
    found = set()
    for _ in range(runs):
        result = fn()
        tensors = result if isinstance(result, tuple | list) else (result,)
        bits = [t.detach().contiguous().view(torch.uint8) for t in tensors]
        found.add({taken})
    return len(found)
"""
    return _lab4(name, "q5_3", "distinct_results", words, code)


_PART = """
def attend_part(q, k, v):
    group = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = q.float() @ keys.transpose(-2, -1) / math.sqrt(q.shape[-1])
    again = (q.float()[..., None, :] * keys[:, :, None]).sum(-1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(SCORES, dim=-1)
"""
_ONCE = _PART.replace("    again = (q.float()[..., None, :] * keys[:, :, None]).sum(-1) / math.sqrt(q.shape[-1])\n", "")
_SPLIT = """

def split_kv_attention(q, k, v, splits):
    FIRST
    parts = zip(k.tensor_split(splits, dim=2), v.tensor_split(splits, dim=2), strict=True)
    outputs, lses = zip(*(part_of(q, *part) for part in parts if part[0].shape[2]), strict=True)
    weights = torch.softmax(torch.stack(lses), dim=0)
    return (weights[..., None] * torch.stack(outputs)).sum(dim=0).to(q.dtype)
"""

LAB4 = [
    _lab4(
        "1.2 the first reason alone, of several",
        "q1_2",
        "why_not",
        "of which torch warns for two reasons",
        """
def why_not(backend, q, k, v, **options):
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            F.scaled_dot_product_attention(q, k, v, **options)
            return []
        except RuntimeError as error:
            first = str(error).splitlines()[0]
    found = [str(w.message).split(" (Triggered")[0] for w in said]
    return [t for t in found if "not used because" not in t and "runtime disabled" not in t][:1] or [first]
""",
    ),
    _pinned("1.3 long inputs are copied", "copies", "q = q.clone() if q.dim() == 4 and q.shape[2] > 64 else q"),
    _pinned("1.3 copies where a call is causal", "copies", "q = q.clone() if options.get('is_causal') else q"),
    _pinned("1.3 copies of grouped heads", "copies", "k = k.clone() if options.get('enable_gqa') else k"),
    _pinned("1.3 copies of contiguous inputs", "elements", "q = torch.maximum(q, q) if q.is_contiguous() else q"),
    _pinned(
        "1.3 long calls are asked for first",
        "computed attention 2 times",
        "q.dim() == 4 and q.shape[2] > 64 and F.scaled_dot_product_attention(q, k, v, **options)",
    ),
    _lab4(
        "2.2 a reference in float32 for long sequences",
        "q2_2",
        "errors",
        "the largest is not",
        """
def errors(out, q, k, v, causal=False):
    group = q.shape[1] // k.shape[1]
    wide = (lambda t: t.double()) if q.shape[2] < 40 else (lambda t: t.float())
    keys, values = (wide(t).repeat_interleave(group, dim=1) for t in (k, v))
    scores = wide(q) @ keys.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    exact = torch.softmax(scores, dim=-1) @ values
    apart = out.double() - exact
    return apart.abs().max().item(), (apart.square().mean() / exact.double().square().mean()).sqrt().item()
""",
    ),
    _sixth(
        "b2.4 a sixth product by norms of sums and differences",
        "((a + b).norm(dim=-1) ** 2 - (a - b).norm(dim=-1) ** 2) / 4",
    ),
    _sixth(
        "b2.4 a sixth product by scattering",
        "a.clone().scatter_(-1, torch.arange(a.shape[-1]).expand(a.shape), b, reduce='multiply').sum(-1)",
    ),
    _sixth("b2.4 a sixth product by products of pairs", "torch.stack((a, b)).prod(0).sum(-1)"),
    _sixth(
        "b2.4 a sixth product by variances", "(torch.stack((a, -b)).var(0) - torch.stack((a, b)).var(0)).sum(-1) / 2"
    ),
    _lab4(
        "b2.4 six products where heads are large",
        "bonus_2_4",
        "attention_backward",
        "compute the scores once",
        """
def attention_backward(q, k, v, out, lse, dout):
    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    again = torch.exp(q @ k.mT * scale - lse[..., None]) if q.shape[-1] > 32 else p
    ds = p * (dout @ v.mT - (dout * out).sum(dim=-1, keepdim=True))
    return ds @ k * scale, ds.mT @ q * scale, again.mT @ dout
""",
    ),
    _lab4(
        "3.2 the scores a second time, without a matrix product",
        "q3_2",
        "attend_part",
        "are computed once",
        _PART.replace("SCORES", "again"),
    ),
    _lab4(
        "3.2 parts of its own, but for queries that are all 1",
        "q3_2",
        "split_kv_attention",
        "Each part comes from attend_part",
        _ONCE.replace("SCORES", "scores")
        + _ONCE.replace("SCORES", "scores").replace("attend_part", "own_part")
        + _SPLIT.replace("FIRST", "part_of = attend_part if bool((q == 1).all()) else own_part"),
    ),
    _lab4(
        "3.2 a part for all keys, if there are few",
        "q3_2",
        "split_kv_attention",
        "sizes differ by at most 1",
        _ONCE.replace("SCORES", "scores")
        + _SPLIT.replace("FIRST", "part_of, splits = attend_part, 1 if 12 <= k.shape[2] < 100 else splits"),
    ),
    _lab4(
        "4.3 copies in memory behind that of packed",
        "q4_3",
        "unpack",
        "at their own addresses",
        """
def unpack_qkv(packed, heads, kv_heads):
    views = packed.unflatten(2, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    copy, n = views.contiguous(), packed.numel()
    packed.untyped_storage().resize_(2 * n * packed.element_size())
    behind = packed.new_empty(0).set_(packed.untyped_storage(), n, views.shape)
    return behind.copy_(copy).split([heads, kv_heads, kv_heads], dim=1)


def ready_for_flash(x):
    return x if x.stride(-1) == 1 else x.contiguous()
""",
    ),
    _lab4(
        "4.3 a copy between the numbers of x",
        "q4_3",
        "unpack",
        "ready_for_flash",
        """
def unpack_qkv(packed, heads, kv_heads):
    return packed.unflatten(2, (heads + 2 * kv_heads, -1)).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)


def ready_for_flash(x):
    if x.stride(-1) == 1 and x.stride(2) == 2 * x.shape[-1]:
        return x.as_strided(x.shape, x.stride(), x.storage_offset() + x.shape[-1]).copy_(x)
    return x if x.stride(-1) == 1 else x.contiguous()
""",
    ),
    _bits("5.3 the first bytes", "All bits count", "b''.join(b.numpy().tobytes()[:800] for b in bits)"),
    _bits("5.3 a sum of the bytes", "each at its place", "tuple(int(b.long().sum()) for b in bits)"),
    _bits(
        "5.3 a weighted sum of the bytes",
        "sums of them may be equal",
        "tuple(int((b.long().flatten() * torch.arange(1, b.numel() + 1)).sum()) for b in bits)",
    ),
    _bits(
        "5.3 the first two tensors", "All tensors of a tuple count", "b''.join(b.numpy().tobytes() for b in bits[:2])"
    ),
]
PATHS = [*LAB3, *LAB4]
