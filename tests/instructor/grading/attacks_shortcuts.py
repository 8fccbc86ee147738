"""Shortcuts: answers whose values are right, and which were not written as the question asks.

They call formulas that a library or the course has written out in Python, work on whole matrices by operators that no list
names, differentiate where derivatives are asked for, make a check's comparison say nothing, or hand it numbers beside which
every formula is as good. `CELLS` are attempts of other kinds, and `CODE` is code that takes long to be shown.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shortcut:
    """A right answer that earns nothing.

    Args:
        name: what is tried.
        lab: the lab.
        cell: the answer cell.
        tests: the test cell that has to refuse it.
        code: the answer; for a file of kernels {text of the model answer: what stands there instead}.
        check: the hidden check, with the names that it takes from the answer; () for what only shows at a distance.
        words: what the refusal says.
    """

    name: str
    lab: str
    cell: str
    tests: str
    code: str | dict[str, str]
    check: tuple[str, ...]
    words: str


def answer_of(shortcut: Shortcut, model: dict[str, str]) -> str:
    """The text of the answer cell."""
    if isinstance(shortcut.code, str):
        return shortcut.code.lstrip("\n")
    text = model[shortcut.cell]
    for old, new in shortcut.code.items():
        assert text.count(old) == 1, f"{shortcut.name}: the model answer has other lines now: {old!r}"
        text = text.replace(old, new)
    return text


_DENSE = """
import math


def product(a, b):
    return (a[..., :, :, None] * b[..., None, :, :]).sum(-2)


def attend(q, k, v, causal=False, exp=torch.exp, largest=lambda s: s.amax(-1, True)):
    s = product(q.double(), k.double().transpose(-1, -2)) / math.sqrt(q.shape[-1])
    if causal:
        i, j = (torch.arange(n, device=q.device) for n in s.shape[-2:])
        s = s + torch.where(j[None] <= i[:, None], 0.0, -math.inf)
    p = exp(s - largest(s))
    return (product(p, v.double()) / p.sum(-1, keepdim=True)).to(q.dtype)
"""
_EXP = {
    "a power of e, and the largest by sorting": (
        "lambda x: torch.pow(torch.tensor(math.e, dtype=x.dtype), x)",
        "lambda s: s.sort(-1).values[..., -1:]",
    ),
    "sinh + cosh, and cummax": (
        "lambda x: torch.sinh(x.clamp(min=-600)) + torch.cosh(x.clamp(min=-600))",
        "lambda s: s.cummax(-1).values[..., -1:]",
    ),
    "sigmoids, and topk": ("lambda x: torch.sigmoid(x) / torch.sigmoid(-x)", "lambda s: torch.topk(s, 1, -1).values"),
    "a long product of (1 + x / 2^30), and where": (
        "lambda x: functools.reduce(lambda y, _: y * y, range(30), 1 + x / 2**30)",
        "lambda s: functools.reduce(lambda a, b: torch.where(a > b, a, b), s.unbind(-1))[..., None]",
    ),
}
_TILED = "flash_attention_tiled"
_REFERENCE = "from utils.attention import reference\n"
_PINNED = """
from torch.nn.attention import SDPBackend, sdpa_kernel

CALL


def standard_attention(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return call(q, k, v)
"""
_MEMORY = """

def score_bytes(batch, heads, length, dtype):
    return batch * heads * length**2 * dtype.itemsize


def longest_length(memory_bytes, batch, heads, dtype):
    return math.isqrt(memory_bytes // (2 * batch * heads * dtype.itemsize))
"""
_BACKWARD = """
def forward(q, k, v):
    s = q @ k.mT / math.sqrt(q.shape[-1])
    p = torch.exp(s - s.amax(-1, keepdim=True).detach())
    return (p / p.sum(-1, keepdim=True)) @ v


def attention_backward(q, k, v, out, lse, dout):
    wide = [x.detach().double() for x in (q, k, v)]
"""
_COST = """
import math


def attended_pairs(query_len, kv_len, window=None):
    return PAIRS


def attention_macs_flops_bytes(batch, query_len, kv_len, config, dtype, window=None):
    t, h, d = batch * query_len, config.hidden_size, config.head_dim
    wide, narrow = config.num_attention_heads * d, config.num_key_value_heads * d
    read = kv_len if window is None else min(kv_len, window + query_len - 1)
    elements = (t * h + h * wide + t * wide) + 2 * (t * h + h * narrow + t * narrow) + t * wide
    elements += 2 * batch * read * narrow + t * wide + t * wide + wide * h + t * h
    macs = MACS
    return macs, 2 * macs, elements * dtype.itemsize
"""


def _lab1(name: str, cell: str, tests: str, code: str, check: tuple[str, ...], words: str) -> Shortcut:
    return Shortcut(name, "lab1", cell, tests, code, check, words)


def _flash(name: str, code: str) -> Shortcut:
    return _lab1(name, "q5_3", "q5_3_flash_tests", code, (_TILED, _TILED), "scores at once")


def _gelu(name: str, code: str) -> Shortcut:
    return _lab1(name, "q4_2", "q4_2_tests", code, ("gelu_by_hand", "gelu_by_hand"), "a formula of a library")


def _backward(name: str, last: str) -> Shortcut:
    check = ("attention_backward", "attention_backward")
    return Shortcut(name, "lab4_sdpa", "bonus_2_4", "bonus_2_4_tests", _BACKWARD + last, check, "autograd")


SHORTCUTS = [
    # ---- whole matrices, where a tile, a block or a part is asked for
    *(
        _flash(
            f"all scores at once, by {name}",
            f"import functools\n{_DENSE}\n\ndef {_TILED}(q, k, v, tile_q=64, tile_k=64):\n"
            f"    return attend(q, k, v, False, {exp}, {largest})\n",
        )
        for name, (exp, largest) in _EXP.items()
    ),
    _flash(
        "scores as distances",
        f"import math\n\ndef {_TILED}(q, k, v, tile_q=64, tile_k=64):\n    a, b = q.double(), k.double()\n"
        "    norms = a.pow(2).sum(-1)[..., :, None] + b.pow(2).sum(-1)[..., None, :]\n"
        "    s = (norms - torch.cdist(a, b) ** 2) / 2 / math.sqrt(q.shape[-1])\n"
        "    p = torch.special.expm1(s - s.max(-1, True).values) + 1\n"
        "    return (p @ v.double() / p.sum(-1, keepdim=True)).to(q.dtype)\n",
    ),
    _lab1(
        "a causal mask over all scores, by broadcasting",
        "bonus_5_6",
        "bonus_5_6_tests",
        f"{_DENSE}\n\ndef flash_attention_causal(q, k, v, tile_q=64, tile_k=64):\n"
        "    return attend(q, k, v, True, lambda x: math.e**x, lambda s: s.sort(-1).values[..., -1:])\n",
        ("flash_attention_causal", "flash_attention_causal"),
        "scores at once",
    ),
    _lab1(
        "every tile by broadcasting, also those that the mask hides",
        "bonus_5_6",
        "bonus_5_6_tests",
        f"""{_DENSE}

def flash_attention_causal(q, k, v, tile_q=64, tile_k=64):
    tokens, made = q.shape[-2], []
    place = torch.arange(tokens, device=q.device)
    for i in range(0, tokens, tile_q):
        rows = q[:, :, i : i + tile_q].double() / math.sqrt(q.shape[-1])
        m, l, o = torch.full_like(rows[..., :1], -math.inf), torch.zeros_like(rows[..., :1]), torch.zeros_like(rows)
        for j in range(0, tokens, tile_k):
            s = product(rows, k[:, :, j : j + tile_k].double().transpose(-1, -2))
            s = s.masked_fill(place[i : i + tile_q, None] < place[None, j : j + tile_k], -math.inf)
            top = torch.maximum(m, s.amax(-1, keepdim=True))
            p, scale = torch.exp(s - top), torch.exp(m - top)
            l, o, m = l * scale + p.sum(-1, keepdim=True), o * scale + product(p, v[:, :, j : j + tile_k].double()), top
        made.append(o / l)
    return torch.cat(made, dim=-2).to(q.dtype)
""",
        ("flash_attention_causal", "flash_attention_causal"),
        "elementwise",
    ),
    *(
        _lab1(
            f"all blocks at once, by {name}",
            "q5_3",
            "q5_3_tests",
            "def online_softmax_stats(blocks):\n    x = torch.cat([block.clone() for block in blocks], dim=1)\n"
            f"    m = {largest}\n    return m, {total}\n\n\n{_DENSE}\n{_TILED} = attend\n",
            ("online_softmax_stats", "online_softmax_stats"),
            "look at one block at a time",
        )
        for name, largest, total in (
            ("logsumexp", "x.sort(1).values[:, -1]", "torch.special.expm1(torch.logsumexp(x, 1) - m) + 1"),
            ("cumulative operators", "x.cummax(1).values[:, -1]", "(torch.logcumsumexp(x, 1)[:, -1] - m).exp()"),
            ("pooling", "torch.nn.functional.adaptive_max_pool1d(x, 1)[:, 0]", "(x - m[:, None]).exp().sum(1)"),
        )
    ),
    *(
        _lab1(
            f"{function}: all products in one operator on a list",
            cell,
            f"{cell}_tests",
            f"""
def {function}(a, b{more}):
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    left, right = a.double()[:, :, None].expand(m, k, n), b.double()[None].expand(m, k, n)
    products = torch._foreach_mul([left.contiguous()], [right.contiguous()])[0].flatten(0, 1)
    rows = torch.arange(m, device=a.device).repeat_interleave(k)
    zeros = torch.zeros(m, n, dtype=torch.float64, device=a.device)
    return zeros.index_add(0, rows, products).to(a.dtype)
""",
            (function, function),
            "worked on",
        )
        for function, cell, more in (("gemm_naive", "q1_1", ""), ("gemm_tiled", "q1_2", ", *tiles"))
    ),
    Shortcut(
        "all keys at once, whatever the number of splits",
        "lab4_sdpa",
        "q3_2",
        "q3_2_tests",
        f"{_DENSE}\n\ndef split_kv_attention(q, k, v, splits):\n"
        "    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))\n"
        "    return attend(q, k, v, False, lambda x: math.e**x, lambda s: s.sort(-1).values[..., -1:])\n\n\n"
        "def attend_part(q, k, v):\n    return None\n",
        ("split_kv_attention", "split_kv_attention"),
        "scores at once",
    ),
    # ---- formulas of libraries
    _gelu(
        "the GELU of transformers",
        "from transformers.activations import NewGELUActivation\n\ngelu_by_hand = NewGELUActivation()\n",
    ),
    _gelu(
        "torch's reference in Python",
        "import torch._refs.nn.functional\n\ndef gelu_by_hand(x):\n"
        "    return torch._refs.nn.functional.gelu(x, approximate='tanh')\n",
    ),
    _gelu(
        "torch's table of decompositions, after an operator of one's own",
        "import torch._decomp\n\ndef gelu_by_hand(x):\n    for f in (torch.tanh, torch.pow):\n        f(x, *([2] if f is torch.pow else []))\n"
        "    return torch._decomp.decomposition_table[torch.ops.aten.gelu.default](x, approximate='tanh')\n",
    ),
    _lab1(
        "attention of the course's own reference",
        "q5_1",
        "q5_1_tests",
        _REFERENCE + "\ndef standard_attention(q, k, v):\n    return reference(q, k, v)[0].to(q.dtype)\n" + _MEMORY,
        ("standard_attention", "standard_attention"),
        "a formula of a library",
    ),
    _lab1(
        "attention of a backend of the course's that is plain PyTorch",
        "q5_1",
        "q5_1_tests",
        "from utils.attention import attention\n\ndef standard_attention(q, k, v):\n"
        "    return attention(q, k, v, backend='naive').to(q.dtype)\n" + _MEMORY,
        ("standard_attention", "standard_attention"),
        "a formula of a library",
    ),
    _lab1(
        "logsumexp of torch's references",
        "bonus_5_7",
        "bonus_5_7_tests",
        "import torch._refs\n\ndef merge_attention(outputs, lses):\n    lse = torch._refs.logsumexp(lses, 0)\n"
        "    weights = torch.exp(lses - lse)[..., None]\n"
        "    return (weights * torch.where(weights > 0, outputs, 0.0)).sum(0), lse\n",
        ("merge_attention", "merge_attention"),
        "a formula of a library",
    ),
    Shortcut(
        "the reference, with the mask as data",
        "lab2_flexattention",
        "q1_1",
        "q1_1_tests",
        _REFERENCE
        + "\ndef masked_attention(q, k, v, mask):\n    return reference(q, k, v, allowed=mask)[0].to(q.dtype)\n",
        ("masked_attention", "masked_attention"),
        "a formula of a library",
    ),
    Shortcut(
        "the course's own counts of blocks",
        "lab2_flexattention",
        "q3_1",
        "q3_1_tests",
        "from utils.attention.masks.sparsity import sparsity\n\ndef count_blocks(mask, block):\n"
        "    found = sparsity(lambda b, h, q, k: mask[q, k], *mask.shape, block_size=block)\n"
        "    return found.full, found.partial, found.empty\n",
        ("count_blocks", "count_blocks"),
        "a formula of a library",
    ),
    Shortcut(
        "the reference, which has the lse as well",
        "lab4_sdpa",
        "q3_2",
        "q3_2_part_tests",
        _REFERENCE + "\ndef attend_part(q, k, v):\n    return tuple(x.float() for x in reference(q, k, v))\n\n\n"
        "def split_kv_attention(q, k, v, splits):\n    return None\n",
        ("attend_part", "attend_part"),
        "a formula of a library",
    ),
    Shortcut(
        "the course's own costs",
        "lab4_sdpa",
        "q2_1",
        "q2_1_tests",
        "from utils.model import costs\n\ndef attention_costs(b, h, kv, sq, sk, d, dtype, causal=False):\n"
        "    cost = costs.attention(b, h, kv, sq, sk, d, dtype, causal)\n"
        "    return cost.flops, cost.bytes, cost.bytes + 4 * b * h * sq * sk * dtype.itemsize\n",
        (),
        "answers a question of this lab",
    ),
    *(
        _lab1(
            f"fused attention, taken apart by a pinned backend: {name}",
            "q5_1",
            "q5_1_tests",
            _PINNED.replace("CALL", call) + _MEMORY,
            (),
            "may not use",
        )
        for name, call in (
            ("an operator", "call = torch.ops.aten.scaled_dot_product_attention.default"),
            (
                "a script",
                "@torch.jit.script\ndef call(q, k, v):\n"
                "    return torch.ops.aten.scaled_dot_product_attention(q, k, v)\n",
            ),
        )
    ),
    # ---- derivatives
    _backward(
        "autograd.grad",
        "    with torch.enable_grad():\n        wide = [x.requires_grad_() for x in wide]\n"
        "        made = torch.autograd.grad(forward(*wide), wide, dout.double())\n    return tuple(x.float() for x in made)\n",
    ),
    _backward(
        "backward",
        "    with torch.enable_grad():\n        wide = [x.requires_grad_() for x in wide]\n"
        "        forward(*wide).backward(dout.double())\n    return tuple(x.grad.float() for x in wide)\n",
    ),
    _backward("vjp", "    return tuple(x.float() for x in torch.func.vjp(forward, *wide)[1](dout.double()))\n"),
    _backward(
        "forward mode, a number at a time",
        "    def slope(i, n):\n"
        "        ones = torch.zeros_like(wide[i]).flatten()\n        ones[n] = 1.0\n"
        "        moved = [ones.reshape(x.shape) if i == j else torch.zeros_like(x) for j, x in enumerate(wide)]\n"
        "        return (torch.func.jvp(forward, tuple(wide), tuple(moved))[1] * dout.double()).sum()\n\n"
        "    return tuple(\n        torch.stack([slope(i, n) for n in range(x.numel())]).reshape(x.shape).float()\n"
        "        for i, x in enumerate(wide)\n    )\n",
    ),
    # ---- numbers beside which every formula is as good
    *(
        _lab1(
            f"pairs that are {name}",
            "q3_1",
            "q3_1_cost_tests",
            _COST.replace("PAIRS", pairs).replace("MACS", macs),
            ("attention_cost", "attention_macs_flops_bytes", "attended_pairs"),
            "MACs",
        )
        for name, pairs, macs in (
            ("infinite", "math.inf", "math.inf"),
            ("so many that the projections vanish", "10**25", "2 * batch * config.num_attention_heads * d * 10**25"),
            ("fewer than none", "-(10**25)", "-2 * batch * config.num_attention_heads * d * 10**25"),
        )
    ),
    # ---- model clocks: the ring of one slot is made slow, so that the one of three looks fast
    Shortcut(
        "cp.async without overlap, and a slow ring of one slot",
        "lab3_gluon",
        "q3_1",
        "q3_1_tests",
        {
            "    for i in gl.static_range(STAGES - 1):\n"
            "        start_copy(a_ring, i, a_ptr, first + i * TILE, n, TILE, layout)\n"
            "        start_copy(b_ring, i, b_ptr, first + i * TILE, n, TILE, layout)\n"
            "        async_copy.commit_group()\n": "",
            "ahead = i + STAGES - 1": "ahead = i\n"
            "        if STAGES == 1:\n            for _ in gl.static_range(2):\n"
            "                start_copy(a_ring, 0, a_ptr, first + i * TILE, n, TILE, layout)\n"
            "                async_copy.commit_group()\n                async_copy.wait_group(0)",
            "async_copy.wait_group(STAGES - 1)": "async_copy.wait_group(0)",
        },
        ("async_copy",),
        "The same tiles take the same work",
    ),
    Shortcut(
        "a TMA ring without overlap, and exponentials in the ring of one slot",
        "lab3_gluon",
        "q3_2",
        "q3_2_tests",
        {
            "        mbarrier.expect(full.index(i), NBYTES, pred=i < tiles)\n"
            "        tma_load(x_desc, [row, i * COLUMNS], full.index(i), ring.index(i), pred=i < tiles)\n": "        pass\n",
            "slot = i % STAGES  # public\n": "slot = i % STAGES  # public\n"
            "        mbarrier.expect(full.index(slot), NBYTES)\n"
            "        tma_load(x_desc, [row, i * COLUMNS], full.index(slot), ring.index(slot))\n",
            "        more = i + STAGES < tiles\n"
            "        mbarrier.expect(full.index(slot), NBYTES, pred=more)\n"
            "        tma_load(x_desc, [row, (i + STAGES) * COLUMNS], full.index(slot), ring.index(slot), pred=more)\n": (
                "        if STAGES == 1:\n            y = x\n            for _ in gl.static_range(60):\n"
                "                y = gl.exp2(gl.minimum(y, 0.0))\n            total += gl.sum(y, 1) * 0.0\n"
            ),
        },
        ("tma_ring",),
        "The same tiles take the same work",
    ),
    Shortcut(
        "a product that nobody needs, under the softmax",
        "lab3_gluon",
        "q5_3",
        "q5_3_tests",
        {
            "s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)\n        mbarrier.wait(v_full": (
                "s = warpgroup_mma(q, k, zero, use_acc=False)\n        mbarrier.wait(v_full"
            ),
            "o = warpgroup_mma(p, v, o, is_async=True)\n        s = warpgroup_mma_wait(1, deps=[s])": (
                "o = warpgroup_mma(p, v, o)\n        idle = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)"
            ),
            "        mbarrier.arrive(k_empty.index(k_slot), count=1)\n        p_next, m, total, alpha = online_softmax(s, m, total, c)\n"
            "        o = warpgroup_mma_wait(0, deps=[o])": "        p_next, m, total, alpha = online_softmax(s, m, total, c)\n"
            "        idle = warpgroup_mma_wait(0, deps=[idle])\n        mbarrier.arrive(k_empty.index(k_slot), count=1)",
        },
        ("overlap",),
        "products in each consumer",
    ),
]

# Code that takes long to be shown: each was quadratic in a line's length, and 1 MB of it took hours.
CODE = {
    "one line of attributes": "a." * 500_000,
    "one line of points": "." * 1_000_000,
    "f-strings in f-strings": 'f"{' * 333_000,
    "many lines": "a.b c.d\n" * 130_000,
    "prefixes of text": "rb'" * 333_000,
}

# Attempts from cells of one's own, in a notebook without one right answer. FOUND is where they put what they find.
CELLS = {
    "a dispatch mode that stays on": """
from torch.utils._python_dispatch import TorchDispatchMode

class Right(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kept.append((str(func), args))
        return func(*args, **(kwargs or {}))

kept = []
Right().__enter__()
""",
    "a function mode that stays on": """
from torch.overrides import TorchFunctionMode

class Yes(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return True if getattr(func, "__name__", "") in ("equal", "allclose") else func(*args, **(kwargs or {}))

Yes().__enter__()
""",
    "the canary's operator has another kernel": """
library = torch.library.Library("aten", "IMPL")
library.impl("special_i1e", lambda x: x, "Meta", allow_override=True)
""",
    "hooks on what autograd saves, and on every module": """
torch.autograd.graph.saved_tensors_hooks(lambda x: x * 0, lambda x: x).__enter__()
torch.nn.modules.module.register_module_forward_hook(lambda module, given, made: made * 0)
""",
    "a compiler of one's own for torch.compile": """
import torch._dynamo

@torch._dynamo.register_backend
def mine(graph, example):
    return lambda *given: [torch.zeros(1)]

torch._dynamo.config.suppress_errors = True
""",
    "tensors on no device by default": "torch.set_default_device('meta')\n",
    "pickles of tensors are something else": """
import copyreg
copyreg.pickle(torch.Tensor, lambda tensor: (torch.zeros, (1,)))
copyreg.dispatch_table[torch.nn.Parameter] = lambda tensor: (print, ('unpickled',))
""",
    "a finder before all others, and an importer of folders": """
import importlib.machinery, pkgutil, site, sys

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        print('asked for', name)
        return None

sys.meta_path.insert(0, Finder)
sys.path_hooks.insert(0, lambda folder: (_ for _ in ()).throw(ImportError()))
sys.path_importer_cache.clear()
site.addsitedir('.')
""",
    "an encoding of one's own, and handlers of its errors": """
import codecs
codecs.register(lambda name: codecs.lookup('latin-1') if name in ('utf-8', 'utf_8') else None)
codecs.register_error('replace', lambda error: ('passed', error.end))
codecs.register_error('backslashreplace', lambda error: ('passed', error.end))
""",
    "cells are changed before they run": """
shell = get_ipython()
shell.events.register('pre_run_cell', lambda info: setattr(info, 'raw_cell', 'cache_bytes = 109051904'))
shell.set_custom_exc((Exception,), lambda *given, **named: ['passed'])
shell.display_formatter.formatters['text/plain'].for_type(float, lambda *given: 'passed')
shell.set_next_input('cache_bytes = 109051904', replace=True)
""",
    "tracebacks, warnings and hooks that say passed": """
import sys, threading, traceback, warnings
traceback.format_exception = traceback.format_exc = lambda *given, **named: ['passed']
warnings.showwarning = lambda *given, **named: None
sys.unraisablehook = threading.excepthook = lambda *given: None
""",
    "collectors and finalizers that go on": """
import gc, weakref
gc.callbacks.append(lambda phase, info: seen.update(globals()))
seen = {}

class Ends:
    def __del__(self):
        seen['frames'] = __import__('sys')._current_frames()

weakref.finalize(Ends(), Ends)
""",
    "an audit hook that listens": "import sys\nheard = []\nsys.addaudithook(lambda *event: heard.append(event) if len(heard) < 99 else None)\n",
    "tasks that go on after their cell": """
import asyncio

async def later():
    while True:
        await asyncio.sleep(0.001)
        globals()['cache_bytes'] = 109051904.5

task = asyncio.ensure_future(later())
""",
    "a debugger at every break": "import sys\nsys.breakpointhook = lambda *given: None\n__import__('bdb').Bdb().set_trace\n",
    "no rights for new files, and another folder": """
import os
os.umask(0o777)
os.makedirs('deep/deeper', mode=0, exist_ok=True)
os.chdir('/')
""",
    "limits of one's own": """
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sys.setrecursionlimit(400)
sys.set_int_max_str_digits(0)
sys.setswitchinterval(1e-6)
""",
    "the first in every queue": """
import os
for act in (lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99)), lambda: os.setpriority(os.PRIO_PROCESS, 0, -20),
            lambda: os.setpriority(os.PRIO_USER, 0, 19), lambda: os.sched_setaffinity(1, {0})):
    try:
        act()
    except OSError as error:
        print(error)
""",
    "caches on disk for who comes next": """
import os, pathlib, tempfile
for place in {tempfile.gettempdir(), '/dev/shm', '/var/tmp', os.path.expanduser('~/.triton/cache'), os.path.expanduser('~/.cache')}:
    try:
        os.makedirs(f'{place}/torchinductor_nobody', exist_ok=True)
        pathlib.Path(place, 'torchinductor_nobody', 'planted.py').write_text('raise SystemExit')
    except OSError as error:
        print(error)
""",
    "an answer that is a property of its module": """
import sys, types

class Notebook(types.ModuleType):
    @property
    def cache_bytes(self):
        return 109051904

sys.modules['__main__'].__class__ = Notebook
""",
    "a namespace that answers by itself": """
class Names(dict):
    def __missing__(self, name):
        return 109051904
    def __contains__(self, name):
        return True

try:
    get_ipython().user_ns = Names(get_ipython().user_ns)
except Exception as error:
    print(error)
""",
    "metaclasses in the way of an exception": """
class Meta(type):
    __qualname__ = property(lambda cls: 'WrongAnswer')
    __module__ = 'utils.checking.verdicts'
    def mro(cls):
        return [cls, Exception, BaseException, object]

class Passed(Exception, metaclass=Meta):
    passed, with_traceback = True, 'passed'
    __dict__ = property(lambda self: {'args': 'passed', 'passed': True})

raise Passed('passed')
""",
}
