"""Ten honest students of lab 4, each with a style of their own, at the questions that forbid or demand a way."""

from __future__ import annotations

# name -> (lab, {answer cell: its text})
STUDENTS: dict[str, tuple[str, dict[str, str]]] = {
    "a dataclass, a regular expression, work in place": (
        "lab4_sdpa",
        {
            "q1_2": """
import re


def why_not(backend: str, q, k, v, **options) -> list[str]:
    noise = re.compile(r"not used because|runtime disabled")
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(BACKENDS[backend]):
                F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as failure:
            texts = (re.sub(r" \\(Triggered internally.*", "", str(w.message), flags=re.DOTALL) for w in log)
            unique = list(dict.fromkeys(text for text in texts if not noise.search(text)))
            return unique if unique else str(failure).split("\\n", 1)[:1]
        else:
            return []
""",
            "bonus_2_4": """
def attention_backward(q, k, v, out, lse, dout):
    assert q.shape == out.shape == dout.shape and lse.shape == q.shape[:-1]
    scale = q.shape[-1] ** -0.5
    p = q @ k.transpose(-1, -2)
    p.mul_(scale).sub_(lse.unsqueeze(-1)).exp_()
    dv = p.transpose(-1, -2) @ dout
    delta = torch.mul(dout, out).sum(-1, keepdim=True)
    ds = dout @ v.transpose(-1, -2)
    ds.sub_(delta).mul_(p).mul_(scale)
    return ds @ k, ds.transpose(-1, -2) @ q, dv
""",
            "q3_2": """
from dataclasses import dataclass


@dataclass
class Part:
    out: torch.Tensor
    lse: torch.Tensor

    def merge(self, other: "Part") -> "Part":
        total = torch.logaddexp(self.lse, other.lse)
        mine, theirs = (self.lse - total).exp(), (other.lse - total).exp()
        return Part(self.out * mine[..., None] + other.out * theirs[..., None], total)


def attend_part(q, k, v):
    groups = q.size(1) // k.size(1)
    k, v = k.float().repeat_interleave(groups, 1), v.float().repeat_interleave(groups, 1)
    s = torch.matmul(q.float(), k.transpose(-1, -2)).div_(q.size(-1) ** 0.5)
    m = s.amax(dim=-1, keepdim=True)
    p = s.sub_(m).exp_()
    l = p.sum(-1, keepdim=True)
    return torch.matmul(p, v).div_(l), (m + l.log()).squeeze(-1)


def split_kv_attention(q, k, v, splits):
    n, merged = k.shape[2], None
    base, extra = divmod(n, splits)
    start = 0
    for i in range(splits):
        stop = start + base + (i < extra)
        if stop > start:
            part = Part(*attend_part(q, k[:, :, start:stop], v[:, :, start:stop]))
            merged = part if merged is None else merged.merge(part)
        start = stop
    return merged.out.to(q.dtype)
""",
        },
    ),
    "einsum everywhere, a walrus": (
        "lab4_sdpa",
        {
            "q2_2": """
def errors(out, q, k, v, causal=False):
    q, k, v, o = (x.to(torch.float64) for x in (q, k, v, out))
    b, h, s, d = q.shape
    n = k.shape[1]
    x = torch.einsum("bngid,bnjd->bngij", q.reshape(b, n, h // n, s, d), k) / d**0.5
    if causal:
        i = torch.arange(s, device=q.device)
        x = torch.where(i[:, None] >= i[None, :], x, torch.tensor(float("-inf"), dtype=x.dtype, device=x.device))
    p = torch.exp(x - torch.logsumexp(x, dim=-1, keepdim=True))
    right = torch.einsum("bngij,bnjd->bngid", p, v).reshape_as(o)
    wrong = (o - right).abs()
    return wrong.max().item(), ((wrong * wrong).mean() / (right * right).mean()).sqrt().item()
""",
            "bonus_2_4": """
def attention_backward(q, k, v, out, lse, dout):
    c = 1.0 / math.sqrt(q.size(3))
    P = torch.exp(torch.einsum("bhid,bhjd->bhij", q, k).mul(c) - lse[:, :, :, None])
    dV = torch.einsum("bhij,bhid->bhjd", P, dout)
    dP = torch.einsum("bhid,bhjd->bhij", dout, v)
    dS = P * (dP - torch.einsum("bhid,bhid->bhi", dout, out)[..., None])
    dQ = c * torch.einsum("bhij,bhjd->bhid", dS, k)
    dK = c * torch.einsum("bhij,bhid->bhjd", dS, q)
    return dQ, dK, dV
""",
            "q3_2": """
def attend_part(q, k, v):
    q, k, v = q.float(), k.float(), v.float()
    if (g := q.shape[1] // k.shape[1]) > 1:
        k, v = torch.repeat_interleave(k, g, dim=1), torch.repeat_interleave(v, g, dim=1)
    s = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
    lse = s.logsumexp(-1)
    return torch.einsum("bhij,bhjd->bhid", (s - lse[..., None]).exp(), v), lse


def split_kv_attention(q, k, v, splits):
    outs, lses = [], []
    for kk, vv in zip(torch.tensor_split(k, splits, 2), torch.tensor_split(v, splits, 2)):
        if (n := kk.size(2)) == 0:
            continue
        o, l = attend_part(q, kk, vv)
        outs.append(o)
        lses.append(l)
    L = torch.stack(lses, -1)
    w = (L - L.max(-1, keepdim=True).values).exp()
    w = w / w.sum(-1, keepdim=True)
    return torch.einsum("bhip,bhidp->bhid", w, torch.stack(outs, -1)).to(q.dtype)
""",
        },
    ),
    "loops over batch and heads, lists and cat": (
        "lab4_sdpa",
        {
            "q2_2": """
def errors(out, q, k, v, causal=False):
    group = q.shape[1] // k.shape[1]
    batches = []
    for b in range(q.shape[0]):
        heads = []
        for h in range(q.shape[1]):
            qs, ks, vs = q[b, h].double(), k[b, h // group].double(), v[b, h // group].double()
            scores = torch.mm(qs, ks.t()) / math.sqrt(qs.shape[1])
            if causal:
                scores += torch.full_like(scores, float("-inf")).triu(diagonal=1)
            heads.append(F.softmax(scores, dim=1).mm(vs))
        batches.append(torch.stack(heads))
    reference = torch.stack(batches)
    diff = (out.double() - reference).flatten()
    return float(diff.abs().max()), math.sqrt(float(diff.dot(diff)) / float((reference**2).sum()))
""",
            "bonus_2_4": """
def attention_backward(q, k, v, out, lse, dout):
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    scale = 1 / q.shape[-1] ** 0.5
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            Q, K, V, O, dO = q[b, h], k[b, h], v[b, h], out[b, h], dout[b, h]
            P = torch.exp(Q.mm(K.T) * scale - lse[b, h].view(-1, 1))
            dv[b, h] = P.T.mm(dO)
            D = (dO * O).sum(1).view(-1, 1)
            dS = P * (dO.mm(V.T) - D)
            dq[b, h] = dS.mm(K) * scale
            dk[b, h] = dS.T.mm(Q) * scale
    return dq, dk, dv
""",
            "q3_2": """
def one_head(q, k, v):
    s = q.mm(k.t()) / q.size(1) ** 0.5
    m = s.max(1).values
    e = torch.exp(s - m[:, None])
    return e.mm(v) / e.sum(1, keepdim=True), m + torch.log(e.sum(1))


def attend_part(q, k, v):
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for b in range(q.shape[0]):
        pairs = [one_head(q[b, h].float(), k[b, h // group].float(), v[b, h // group].float()) for h in range(q.shape[1])]
        outs.append(torch.cat([o.unsqueeze(0) for o, _ in pairs]))
        lses.append(torch.cat([l.unsqueeze(0) for _, l in pairs]))
    return torch.cat([o[None] for o in outs]), torch.cat([l[None] for l in lses])


def split_kv_attention(q, k, v, splits):
    length = k.shape[2]
    edges = [length * i // splits for i in range(splits + 1)]
    parts = [attend_part(q, k[:, :, a:b], v[:, :, a:b]) for a, b in zip(edges[:-1], edges[1:]) if a != b]
    top = parts[0][1]
    for _, l in parts[1:]:
        top = torch.maximum(top, l)
    up, down = torch.zeros_like(parts[0][0]), torch.zeros_like(top)
    for o, l in parts:
        w = (l - top).exp()
        up += w[..., None] * o
        down += w
    return (up / down[..., None]).to(dtype=q.dtype)
""",
        },
    ),
    "named tuples, type hints, checks of one's own": (
        "lab4_sdpa",
        {
            "q1_3": '''
from typing import Any


def pinned_sdpa(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Only this backend, or an error."""
    if backend not in BACKENDS:
        raise KeyError(f"{backend} is none of {', '.join(sorted(BACKENDS))}")
    refusal: RuntimeError | None = None
    with sdpa_kernel(backends=[BACKENDS[backend]]):
        try:
            return F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:
            refusal = error
    why = why_not(backend, q, k, v, **options)
    shapes = " x ".join(str(tuple(t.shape)) for t in (q, k, v))
    raise BackendRefused("{} refuses {}:\\n- {}".format(backend, shapes, "\\n- ".join(why))) from refusal
''',
            "bonus_2_4": """
from typing import NamedTuple


class Gradients(NamedTuple):
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def probabilities(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.exp(torch.matmul(q * scale, k.transpose(-2, -1)) - lse.unsqueeze(-1))


def attention_backward(q, k, v, out, lse, dout) -> Gradients:
    assert q.dim() == 4 and k.shape == v.shape, "(B, H, S, D)"
    scale = q.shape[-1] ** -0.5
    p = probabilities(q, k, lse, scale)
    assert torch.isfinite(p).all()
    delta = torch.sum(dout * out, dim=-1, keepdim=True)
    ds = p * (torch.matmul(dout, v.mT) - delta)
    got = Gradients(dq=torch.matmul(ds, k) * scale, dk=torch.matmul(ds.mT, q) * scale, dv=torch.matmul(p.mT, dout))
    assert all(g.dtype == q.dtype for g in got)
    return got
""",
            "q4_3": """
from typing import NamedTuple


class QKV(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def unpack_qkv(packed: torch.Tensor, heads: int, kv_heads: int) -> QKV:
    batch, length, width = packed.size()
    assert width % (heads + 2 * kv_heads) == 0
    head_dim = width // (heads + 2 * kv_heads)
    q, k, v = packed.split((heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), dim=-1)
    views = QKV(*(t.view(batch, length, -1, head_dim).transpose(1, 2) for t in (q, k, v)))
    assert views.q.data_ptr() == packed.data_ptr()
    return views


def ready_for_flash(x: torch.Tensor) -> torch.Tensor:
    *_, last = x.stride()
    if last == 1:
        return x
    copy = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    copy.copy_(x)
    assert copy.is_contiguous()
    return copy
""",
        },
    ),
    "base 2, softplus of two parts at a time": (
        "lab4_sdpa",
        {
            "bonus_2_4": """
LOG2E = math.log2(math.e)


def attention_backward(q, k, v, out, lse, dout):
    d = q.shape[-1]
    p = torch.exp2((q @ k.mT) * (LOG2E / d**0.5) - lse[..., None] * LOG2E)
    ds = p * (dout @ v.mT - (dout * out).sum(-1)[..., None]) / d**0.5
    return ds @ k, ds.mT @ q, p.mT @ dout
""",
            "q3_2": '''
def attend_part(q, k, v):
    b, h, s, d = q.shape
    g = h // k.shape[1]
    k = k[:, :, None].expand(-1, -1, g, -1, -1).flatten(1, 2).to(torch.float32)
    v = v[:, :, None].expand(-1, -1, g, -1, -1).flatten(1, 2).to(torch.float32)
    x = q.to(torch.float32) @ k.mT * (math.log2(math.e) / math.sqrt(d))
    top = x.max(dim=-1, keepdim=True)[0]
    p = torch.exp2(x - top)
    l = p.sum(-1, keepdim=True)
    return p @ v / l, ((top + torch.log2(l)) / math.log2(math.e))[..., 0]


def merge(a, b):
    """Two parts: the weight of the second is a sigmoid of the difference."""
    (oa, la), (ob, lb) = a, b
    w = torch.sigmoid(lb - la)[..., None]
    return torch.lerp(oa, ob, w), torch.logaddexp(la, lb)


def split_kv_attention(q, k, v, splits):
    from functools import reduce

    parts = [
        attend_part(q, a, b)
        for a, b in zip(k.tensor_split(splits, dim=2), v.tensor_split(splits, dim=2), strict=True)
        if a.shape[2]
    ]
    return reduce(merge, parts)[0].type(q.dtype)
''',
            "q4_3": """
def unpack_qkv(packed, heads, kv_heads):
    total = heads + kv_heads + kv_heads
    x = packed.unflatten(dim=-1, sizes=(total, packed.shape[-1] // total))
    parts = x[:, :, :heads], x[:, :, heads:-kv_heads], x[:, :, -kv_heads:]
    return tuple(part.movedim(2, 1) for part in parts)


def ready_for_flash(x):
    return x.contiguous() if x.stride()[-1] > 1 else x
""",
        },
    ),
    "logging to the screen, filters by name": (
        "lab4_sdpa",
        {
            "q1_2": """
def is_reason(text):
    return not any(part in text for part in ("kernel not used because", "has been runtime disabled"))


def why_not(backend, q, k, v, **options):
    collected: list[str] = []
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(BACKENDS[backend]):
        warnings.filterwarnings("always", category=UserWarning)
        try:
            _ = F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:
            first, *_ = str(error).splitlines()
        else:
            return collected
    for record in caught:
        message, _, _ = str(record.message).partition(" (Triggered internally")
        if is_reason(message) and message not in collected:
            collected.append(message)
    return collected or [first]
""",
            "q1_3": """
def pinned_sdpa(backend, q, k, v, **options):
    kernel = BACKENDS[backend]
    try:
        with sdpa_kernel(kernel):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    except RuntimeError as error:
        reasons = why_not(backend, q, k, v, **options)
        print(f"{backend}: refused")
        for number, reason in enumerate(reasons, start=1):
            print(f"  {number}. {reason}")
        raise BackendRefused(f"{backend} cannot do it. " + " / ".join(reasons)) from error
    return out
""",
            "q2_2": """
def errors(out, q, k, v, causal=False):
    with torch.no_grad():
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=bool(causal), enable_gqa=True)
        rms = (F.mse_loss(out.double(), exact) / exact.pow(2).mean()) ** 0.5
        largest = torch.max(torch.abs(out.double() - exact))
    print(f"largest {largest:.3e}, rms {rms:.3e}")
    return largest.item(), rms.item()
""",
        },
    ),
    "closures, partial, map": (
        "lab4_sdpa",
        {
            "q1_3": """
from functools import partial


def pinned_sdpa(backend, q, k, v, **options):
    call = partial(F.scaled_dot_product_attention, q, k, v, **options)
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        try:
            return call()
        except RuntimeError as e:
            raise BackendRefused("; ".join(map(str, why_not(backend, q, k, v, **options)))) from e
""",
            "q3_2": """
from functools import partial
from itertools import accumulate, pairwise


def attend_part(q, k, v):
    def spread(t, times):
        return t.to(torch.float).repeat_interleave(times, dim=1)

    wide = partial(spread, times=q.shape[1] // k.shape[1])
    scores = q.to(torch.float) @ wide(k).swapaxes(-1, -2)
    scores *= 1 / math.sqrt(q.shape[-1])
    log_p = torch.log_softmax(scores, -1)
    return log_p.exp() @ wide(v), (scores - log_p)[..., 0]


def split_kv_attention(q, k, v, splits):
    n = k.shape[2]
    sizes = [n // splits + (1 if i < n % splits else 0) for i in range(splits)]
    bounds = pairwise(accumulate(sizes, initial=0))
    results = [attend_part(q, k.narrow(2, a, b - a), v.narrow(2, a, b - a)) for a, b in bounds if b - a]
    outputs, lses = map(torch.stack, zip(*results))
    weights = lses.softmax(0).unsqueeze(-1)
    return torch.sum(weights * outputs, 0).to(q.dtype)
""",
            "q4_3": """
from itertools import accumulate


def unpack_qkv(packed, heads, kv_heads):
    counts = [heads, kv_heads, kv_heads]
    d = packed.shape[2] // sum(counts)
    starts = [0, *accumulate(counts)]

    def take(start, count):
        return packed.narrow(2, start * d, count * d).unflatten(2, (count, d)).permute(0, 2, 1, 3)

    return tuple(map(take, starts, counts))


def ready_for_flash(x):
    fine = not why_not("flash", x, x, x)
    return x if fine else x.clone(memory_format=torch.contiguous_format)
""",
        },
    ),
    "an online softmax in blocks of keys, a class that keeps the state": (
        "lab4_sdpa",
        {
            "q3_2": """
class Online:
    def __init__(self, shape, width, device):
        self.m = torch.full(shape, float("-inf"), device=device)
        self.l = torch.zeros(shape, device=device)
        self.acc = torch.zeros(*shape, width, device=device)

    def add(self, s, v):
        new = torch.maximum(self.m, s.amax(-1))
        keep = (self.m - new).exp()
        p = (s - new.unsqueeze(-1)).exp()
        self.l = self.l * keep + p.sum(-1)
        self.acc = self.acc * keep.unsqueeze(-1) + p @ v
        self.m = new

    @property
    def result(self):
        return self.acc / self.l.unsqueeze(-1), self.m + self.l.log()


def attend_part(q, k, v, block=4):
    g = q.shape[1] // k.shape[1]
    q = q.float() / math.sqrt(q.shape[-1])
    state = Online(q.shape[:-1], v.shape[-1], q.device)
    for j in range(0, k.shape[2], block):
        kb = k[:, :, j : j + block].float().repeat_interleave(g, dim=1)
        vb = v[:, :, j : j + block].float().repeat_interleave(g, dim=1)
        state.add(q @ kb.mT, vb)
    return state.result


def split_kv_attention(q, k, v, splits):
    m = l = acc = None
    for part, rows in zip(k.tensor_split(splits, 2), v.tensor_split(splits, 2)):
        if part.numel() == 0:
            continue
        o, lse = attend_part(q, part, rows)
        if m is None:
            m, l, acc = lse, torch.ones_like(lse), o
            continue
        new = torch.max(m, lse)
        a, b = torch.exp(m - new), torch.exp(lse - new)
        l, acc, m = l * a + b, acc * a[..., None] + o * b[..., None], new
    return (acc / l[..., None]).to(q)
""",
            "q2_2": '''
def errors(out, q, k, v, causal=False):
    """One query at a time: it sees the keys up to its own place, or all."""
    group = q.shape[1] // k.shape[1]
    k64, v64 = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    rows = []
    for i in range(q.shape[2]):
        seen = i + 1 if causal else k.shape[2]
        s = (q[:, :, i : i + 1].double() * k64[:, :, :seen]).sum(-1) / q.shape[-1] ** 0.5
        p = torch.softmax(s, dim=-1)
        rows.append((p.unsqueeze(-1) * v64[:, :, :seen]).sum(2))
    exact = torch.stack(rows, dim=2)
    difference = out.double() - exact
    return difference.abs().max().item(), (difference.norm() / exact.norm()).item()
''',
        },
    ),
    "queries of a group side by side, products on flat batches": (
        "lab4_sdpa",
        {
            "bonus_2_4": """
def attention_backward(q, k, v, out, lse, dout):
    flat = [t.flatten(0, 1) for t in (q, k, v, out, dout)]
    Q, K, V, O, G = flat
    alpha = 1 / math.sqrt(Q.shape[-1])
    P = torch.baddbmm(-lse.flatten(0, 1).unsqueeze(2).expand(-1, -1, K.shape[1]), Q, K.transpose(1, 2), alpha=alpha).exp()
    D = torch.addcmul(torch.zeros_like(O), G, O).sum(2, keepdim=True)
    S = P * (torch.bmm(G, V.transpose(1, 2)) - D)
    dQ, dK, dV = torch.bmm(S, K) * alpha, torch.bmm(S.transpose(1, 2), Q) * alpha, torch.bmm(P.transpose(1, 2), G)
    return dQ.view_as(q), dK.view_as(k), dV.view_as(v)
""",
            "q3_2": """
def attend_part(q, k, v):
    (b, h, s, d), n = q.shape, k.shape[1]
    rows = q.float().reshape(b * n, h // n * s, d)
    keys, values = k.float().reshape(b * n, -1, d), v.float().reshape(b * n, -1, v.shape[-1])
    scores = torch.bmm(rows, keys.transpose(1, 2)) * d**-0.5
    lse = torch.logsumexp(scores, dim=2, keepdim=True)
    out = torch.bmm(torch.exp(scores - lse), values)
    return out.view(b, h, s, -1), lse.view(b, h, s)


def split_kv_attention(q, k, v, splits):
    pieces = [(a, b) for a, b in zip(k.tensor_split(splits, 2), v.tensor_split(splits, 2)) if a.size(2) > 0]
    out = torch.empty(len(pieces), *q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(len(pieces), *q.shape[:3], dtype=torch.float32, device=q.device)
    for i, (a, b) in enumerate(pieces):
        out[i], lse[i] = attend_part(q, a, b)
    weight = torch.exp(lse - lse.logsumexp(0))
    return out.mul_(weight.unsqueeze(-1)).sum(0).to(q.dtype)
""",
            "q4_3": """
def unpack_qkv(packed, heads, kv_heads):
    b, s, w = packed.shape
    every = packed.view(b, s, heads + 2 * kv_heads, -1).permute(0, 2, 1, 3)
    q, kv = every[:, :heads], every[:, heads:]
    k, v = kv.chunk(2, dim=1)
    return q, k, v


def ready_for_flash(x):
    if x.stride(3) != 1:
        made = torch.empty_like(x, memory_format=torch.contiguous_format)
        made[:] = x
        return made
    return x
""",
        },
    ),
    "parts with weight zero, one tensor of bounds": (
        "lab4_sdpa",
        {
            "q1_2": """
from contextlib import ExitStack


def why_not(backend, q, k, v, **options):
    with ExitStack() as stack:
        said = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        stack.enter_context(sdpa_kernel([BACKENDS[backend]], set_priority=False))
        failure = None
        try:
            F.scaled_dot_product_attention(query=q, key=k, value=v, **options)
        except RuntimeError as error:
            failure = error
    if failure is None:
        return []
    reasons = []
    for one in said:
        text = one.message.args[0].split(" (Triggered internally")[0]
        if text.endswith("because:") or "not used because" in text or text.endswith("runtime disabled."):
            continue
        if "runtime disabled" in text or text in reasons:
            continue
        reasons += [text]
    if len(reasons) == 0:
        reasons = [failure.args[0].partition("\\n")[0]]
    return reasons
""",
            "q2_2": """
def reference_in_float64(q, k, v, causal):
    q, k, v = map(torch.Tensor.double, (q, k, v))
    if q.shape[1] != k.shape[1]:
        times = q.shape[1] // k.shape[1]
        b, n, s, d = k.shape
        k = k.unsqueeze(2).expand(b, n, times, s, d).reshape(b, n * times, s, d)
        v = v.unsqueeze(2).expand(b, n, times, s, d).reshape(b, n * times, s, d)
    weight = q.matmul(k.transpose(-1, -2)) / math.sqrt(q.size(-1))
    if causal:
        keep = torch.tril(torch.ones_like(weight[0, 0], dtype=torch.bool))
        weight.masked_fill_(~keep, float("-inf"))
    weight = weight - weight.max(dim=-1, keepdim=True).values
    weight = weight.exp()
    weight = weight / weight.sum(dim=-1, keepdim=True)
    return weight.matmul(v)


def errors(out, q, k, v, causal=False):
    exact = reference_in_float64(q, k, v, causal)
    delta = out.double().sub(exact)
    worst = max(delta.max(), -delta.min())
    return float(worst), float(delta.square().mean().sqrt() / exact.square().mean().sqrt())
""",
            "q3_2": """
def attend_part(q, k, v):
    if k.shape[2] == 0:
        return torch.zeros_like(q, dtype=torch.float32), torch.full(q.shape[:3], -math.inf, device=q.device)
    group = q.shape[1] // k.shape[1]
    q, k, v = q.float(), k.float(), v.float()
    outs = torch.zeros_like(q)
    lses = q.new_zeros(q.shape[:-1])
    for head in range(q.shape[1]):
        scores = torch.matmul(q[:, head], k[:, head // group].transpose(1, 2)) / q.shape[-1] ** 0.5
        outs[:, head] = torch.matmul(scores.softmax(dim=-1), v[:, head // group])
        lses[:, head] = torch.logsumexp(scores, dim=-1)
    return outs, lses


def split_kv_attention(q, k, v, splits):
    places = torch.arange(k.shape[2]).tensor_split(splits)
    outs, lses = [], []
    for place in places:
        o, l = attend_part(q, k[:, :, place], v[:, :, place])
        outs.append(o)
        lses.append(l)
    lse = torch.stack(lses)
    top = lse.amax(0)
    weights = torch.where(torch.isinf(lse), torch.zeros_like(lse), torch.exp(lse - top))
    out = (weights[..., None] * torch.stack(outs)).sum(0) / weights.sum(0)[..., None]
    return out.to(q.dtype)
""",
        },
    ),
}
