"""Right values of labs 3 and 4 by a way that breaks a word for some dtypes, options, slots or heads alone, or where nobody looked.

Checks drew float32 and a few options for most of what they count. All of these passed the hidden checks of their questions. Most
are the model answer with a few lines changed: {text of the model answer: what stands there instead}.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_paths import _PV, _WAIT
from tests.instructor.grading.attacks_shortcuts import Shortcut


def _lab4(name: str, cell: str, code: str | dict[str, str], check: str, words: str, tests: str = "") -> Shortcut:
    return Shortcut(name, "lab4_sdpa", cell, tests or f"{cell}_tests", code, tuple(check.split()), words)


def _why_not(name: str, code: str | dict[str, str], words: str) -> Shortcut:
    return _lab4(f"1.2 {name}", "q1_2", code, "why_not why_not", words)


def _pinned(name: str, code: dict[str, str], words: str) -> Shortcut:
    return _lab4(f"1.3 {name}", "q1_3", code, "pinned_sdpa pinned_sdpa", words)


def _errors(name: str, code: str | dict[str, str], words: str) -> Shortcut:
    return _lab4(f"2.2 {name}", "q2_2", code, "errors errors", words)


def _backward(name: str, code: dict[str, str], words: str) -> Shortcut:
    return _lab4(f"2.4 {name}", "bonus_2_4", code, "attention_backward attention_backward", words)


def _part(name: str, code: dict[str, str], words: str) -> Shortcut:
    return _lab4(f"3.2 {name}", "q3_2", code, "attend_part attend_part", words, "q3_2_part_tests")


def _views(name: str, code: dict[str, str]) -> Shortcut:
    return _lab4(f"4.3 {name}", "q4_3", code, "unpack unpack_qkv ready_for_flash", "is a copy")


def _kernel(name: str, cell: str, code: dict[str, str], check: str, words: str) -> Shortcut:
    return Shortcut(name, "lab3_gluon", cell, f"{cell}_tests", code, (check,), words)


# Lines of the model answers.
_PIN = "    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings():\n"
_CALL = "            return F.scaled_dot_product_attention(q, k, v, **options)\n"
_ASK = "why_not(backend, q, k, v, **options)"
_SCALE = "    scale = 1 / math.sqrt(q.shape[-1])\n"
_P = "    p = torch.exp(q @ k.mT * scale - lse[..., None])\n"
_SCORES = "    scores = q.float() @ keys.transpose(-2, -1) / math.sqrt(q.shape[-1])\n"
_OF_PART = "    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)\n"
_PARTS = "    outputs, lses = zip("
_SPLIT_HEADS = "    return all_heads.split([heads, kv_heads, kv_heads], dim=1)\n"
_FULL = "        mbarrier.wait(full.index(slot), (i // STAGES) & 1)"
_READY = "    return x if x.stride(-1) == 1 else x.contiguous()"

OTHER_INPUTS = [
    _why_not(
        "filter left where torch raises without warnings",
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
        "warning filters are others",
    ),
    _why_not(
        "no repetition dropped",
        {"return list(dict.fromkeys(reasons)) or [first_line]": "return reasons or [first_line]"},
        "says something twice",
    ),
    _why_not(
        "cut at 400 signs",
        {'.split(" (Triggered internally")[0] for': '.split(" (Triggered internally")[0][:400] for'},
        "whole",
    ),
    _pinned(
        "asks first where there is dropout",
        {
            _PIN: f"""    if options.get("dropout_p") and (reasons := {_ASK}):
        raise BackendRefused(" ".join(reasons))
{_PIN}"""
        },
        "compute",
    ),
    _pinned(
        "copies 16 bits",
        {
            _CALL: f"""            if q.dtype in (torch.bfloat16, torch.float16):
                q, k, v = q + 0, k + 0, v + 0
{_CALL}"""
        },
        "No copies",
    ),
    _pinned(
        "mask is made numbers",
        {
            _CALL: f"""            mask = options.get("attn_mask")
            if mask is not None and mask.is_floating_point():
                {_ASK}
{_CALL}"""
        },
        "times",
    ),
    _pinned(
        "asks where scale is given",
        {_PIN: f'    if "scale" in options and "attn_mask" in options:\n        {_ASK}\n{_PIN}'},
        "times",
    ),
    _pinned(
        "leaves out an option",
        {_PIN: f'    if backend != "flash":\n        options.pop("dropout_p", None)\n{_PIN}'},
        "drops nothing",
    ),
    _pinned(
        "a list of two where one cannot",
        {
            _PIN: f"""    backends = [BACKENDS[backend]] if backend in ("math", "flash") else [BACKENDS[backend], BACKENDS["efficient"]]
{_PIN.replace("BACKENDS[backend]", "backends")}"""
        },
        "several backends are allowed",
    ),
    _errors(
        "float32 for 16 bits",
        """
def errors(out, q, k, v, causal=False):
    wide = torch.float64 if out.dtype == torch.float32 else torch.float32
    exact = F.scaled_dot_product_attention(*(t.to(wide) for t in (q, k, v)), is_causal=causal, enable_gqa=True).double()
    d = out.double() - exact
    return d.abs().max().item(), (d.square().mean() / exact.square().mean()).sqrt().item()
""",
        "It is attention in float64",
    ),
    _errors(
        "products in float32 on 16 bits",
        {
            "    keys, values = (t.double()": (
                "    wide = torch.float64 if out.dtype == torch.float32 else torch.float32\n"
                "    keys, values = (t.to(wide)"
            ),
            "scores = q.double() @ keys.transpose(-2, -1) /": "scores = (q.to(wide) @ keys.transpose(-2, -1)).double() /",
            "@ values\n": "@ values.double()\n",
        },
        "It is attention in float64",
    ),
    _errors(
        "fp64 output",
        """
def errors(out, q, k, v, causal=False):
    exact = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), is_causal=causal, enable_gqa=True)
    if out.dtype == torch.float64:
        exact = exact.float()
    d = out.double() - exact
    return d.abs().max().item(), (d.square().mean() / exact.square().mean()).sqrt().item()
""",
        "_to_copy in float32",
    ),
    _backward(
        "bf16 gradients in float32",
        {
            _SCALE: f"""    if q.dtype.itemsize < 4:
        q, k, v, out, lse, dout = (t.float() for t in (q, k, v, out, lse, dout))
{_SCALE}"""
        },
        "have the dtype",
    ),
    _backward("scores twice in 16 bits", {_P: f"{_P}    if q.dtype.itemsize < 4:\n    {_P}"}, "five products have"),
    _backward(
        "scores twice where one batch element", {_P: f"{_P}    if q.shape[0] > 2:\n    {_P}"}, "five products have"
    ),
    _part(
        "three products key by key",
        {
            _SCORES: "",
            _OF_PART: """    q = q.float()

    def score(j):
        return (q * keys[:, :, j : j + 1]).sum(-1) / math.sqrt(q.shape[-1])

    top = torch.stack([score(j) for j in range(k.shape[2])]).amax(0)
    total, acc = torch.zeros(q.shape[:3]), torch.zeros(*q.shape[:3], v.shape[-1])
    for j in range(k.shape[2]):
        p = torch.exp(score(j) - top)
        total, acc = total + p, acc + p[..., None] * values[:, :, j : j + 1]
    return acc / total[..., None], top + torch.log(total)
""",
        },
        "meet other numbers",
    ),
    _part(
        "scores twice in the part for 16 bits",
        {_OF_PART: f"    if q.dtype == torch.float16:\n    {_SCORES}{_OF_PART}"},
        "two products have",
    ),
    _part(
        "scores twice in column halves by sum",
        {
            _OF_PART: """    lse = torch.logsumexp(scores, -1)
    acc = torch.zeros(*q.shape[:3], v.shape[-1])
    for j in range(k.shape[2]):
        p = torch.exp((q.float() * keys[:, :, j : j + 1]).sum(-1) / math.sqrt(q.shape[-1]) - lse)
        acc += p[..., None] * values[:, :, j : j + 1]
    return acc, lse
"""
        },
        "meet other numbers",
    ),
    _lab4(
        "3.2 parts twice where 16 bits",
        "q3_2",
        {
            _PARTS: f"""    parts = list(parts)
    if q.dtype == torch.float16:
        for part in parts:
            attend_part(q, *part)
{_PARTS}"""
        },
        "split_kv_attention split_kv_attention",
        "keys of each query",
    ),
    _views(
        "copies wide ones",
        {
            _SPLIT_HEADS: """    q, k, v = all_heads.split([heads, kv_heads, kv_heads], dim=1)
    if packed.dtype == torch.bfloat16:
        q, k, v = q.clone(), k.clone(), v.clone()
    return q, k, v
"""
        },
    ),
    _views("copies 16 bits", {_READY: f"    if x.dtype == torch.bfloat16:\n        return x.contiguous()\n{_READY}"}),
    _views(
        "copies what is contiguous, too, with one batch",
        {
            _SPLIT_HEADS: f"    if packed.shape[0] == 1:\n        all_heads = all_heads.contiguous()\n{_SPLIT_HEADS}",
            _READY: "    return x if x.stride(-1) == 1 and x.shape[0] > 1 else x.contiguous()",
        },
    ),
    _views(
        "copies for one kv head",
        {_SPLIT_HEADS: f"    if kv_heads == 1:\n        all_heads = all_heads.contiguous()\n{_SPLIT_HEADS}"},
    ),
    _kernel(
        "2.2 reads the gap between rows",
        "q2_2",
        {
            "    mask = (rows < m)[:, None] & (columns < n)[None, :]\n    tile": "    mask = (rows < m)[:, None] & (columns < x_stride)[None, :]\n    if m > 0:\n        mask = mask & ((rows < m - 1)[:, None] | (columns < n)[None, :])\n    tile"
        },
        "transpose",
        "between two of its rows",
    ),
    _kernel(
        "2.2 writes the gap between rows",
        "q2_2",
        {
            "    mask = (rows < m)[:, None] & (columns < n)[None, :]\n    gl.store": "    mask = (columns[None, :] < n) & (columns[None, :] * y_stride + rows[:, None] < (n - 1) * y_stride + m) & (rows[:, None] < y_stride)\n    gl.store"
        },
        "transpose",
        "between two of its rows",
    ),
    _kernel(
        "4.1 fp16 accumulator",
        "q4_1",
        {
            "    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)": "    kind: gl.constexpr = gl.float16 if a_desc.dtype == gl.float16 else gl.float32\n    acc = gl.zeros([BLOCK_M, BLOCK_N], kind, layout)"
        },
        "wgmma",
        "overflow in 16 bits",
    ),
    _kernel(
        "3.1 with seven slots waits for all",
        "q3_1",
        {_WAIT: f"        if STAGES == 7:\n            async_copy.wait_group(0)\n{_WAIT}"},
        "async_copy",
        "waits for copies of later tiles",
    ),
    _kernel(
        "3.2 with eight slots waits for the tile after this one",
        "q3_2",
        {
            _FULL: f"""        if (STAGES > 7) & (i > 0) & (i + 1 < tiles) & (slot + 1 < STAGES):
            mbarrier.wait(full.index(slot + 1), (i // STAGES) & 1)
{_FULL}"""
        },
        "tma_ring",
        "waits for copies of later tiles",
    ),
    _kernel(
        "5.1 divides in each block for the fourth head",
        "q5_1",
        {_PV: f"{_PV}        if head > 2:\n            o = o / 1.0\n"},
        "softmax",
        "more divisions than one",
    ),
    _kernel(
        "3.1 waits for all in the fifth program",
        "q3_1",
        {_WAIT: f"        if gl.program_id(0) == 4:\n            async_copy.wait_group(0)\n{_WAIT}"},
        "async_copy",
        "on their way at a time",
    ),
]
