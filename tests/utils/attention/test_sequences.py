"""Lengths, packed sequences, sinks, the log-sum-exp and values of another width: each against float64."""

import random

import pytest
import torch

from utils.attention import BACKENDS, AttentionUnsupported, attention, find_backend, last_run, make_problem, reference

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE, BOUND = ("cuda", torch.bfloat16, 1.5e-2) if ON_GPU else ("cpu", torch.float32, 2e-5)
GIVES_LSE = [name for name in BACKENDS if find_backend(name).returns_lse]
COMPILED = ("naive_compiled", "flex")
ways = [pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("compiled", marks=pytest.mark.slow), "eager"]


def error(x, expected):
    return float((x.detach().double() - expected.detach()).norm() / expected.detach().norm().clamp(min=1))


def draw(rng, sq, sk, batch=1, head_dim=64, v_dim=None):
    kv_heads, group = rng.randint(1, 2), rng.randint(1, 3)
    sizes = (kv_heads * group, sq, head_dim), (kv_heads, sk, head_dim), (kv_heads, sk, v_dim or head_dim)
    return [torch.randn(batch, *size, device=DEVICE).to(DTYPE).requires_grad_() for size in sizes]


def with_sink(out, lse, sink):
    """Return output and log-sum-exp with a sink: one more score in each row, which has no value."""
    column = sink.double()[:, None].expand(lse.shape)
    share = torch.softmax(torch.stack([lse, column], -1), -1)[..., 0]
    return out * share[..., None], torch.logaddexp(lse, column)


def run_here(name, way, q, k, v, **arguments):
    """Run a backend; return None if it is not for this way, or refuses this call."""
    if way != "gpu" and (name in COMPILED) != (way == "compiled"):
        return None
    try:
        return attention(q, k, v, backend=name, **arguments)
    except AttentionUnsupported as refusal:
        assert refusal.reason
        return None


def compare(results, expected, leaves, what):
    """Compare outputs, and their gradients if there are any, with float64."""
    results, expected = (x if isinstance(x, tuple) else (x,) for x in (results, expected))
    for got, right in zip(results, expected, strict=True):
        seen = right.isfinite()
        assert torch.equal(got.isfinite(), seen), what
        assert error(got[seen], right[seen]) < BOUND, what
    if results[0].requires_grad:
        weights = [torch.randn_like(x) for x in results]

        def total(outputs):
            return sum((x * w).where(x.isfinite(), 0).sum() for x, w in zip(outputs, weights, strict=True))

        for one, right in zip(
            *(torch.autograd.grad(total(x), leaves, retain_graph=True) for x in (results, expected)), strict=True
        ):
            assert error(one, right.double()) < 2 * BOUND, (*what, "gradient")


def differentiable_reference(q, k, v, mask, scale=None):
    """(output, log-sum-exp) in float64 under a mask that broadcasts to (B, H, Sq, Sk), with gradients."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = (q.double() @ k.mT * (scale or q.shape[-1] ** -0.5)).masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0)[..., None])
    return weights @ v, lse


def positions(q, k):
    return torch.arange(q.shape[2], device=DEVICE)[:, None] + k.shape[2] - q.shape[2], torch.arange(
        k.shape[2], device=DEVICE
    )


@pytest.mark.parametrize("way", ways)
def test_lse_and_sinks_against_float64(way):
    rng, ran = random.Random(5), dict.fromkeys(GIVES_LSE, 0)
    torch.manual_seed(1)
    for _ in range(1 if way == "compiled" else 3):
        q, k, v = draw(rng, rng.randint(2, 70), rng.randint(70, 130), rng.randint(1, 2))
        sink = torch.randn(q.shape[1], device=DEVICE, requires_grad=True)
        causal, window = rng.random() < 0.5, rng.choice((None, 9))
        row, column = positions(q, k)
        mask = ((row >= column) | (not causal)) & (((row - column).abs() < window) if window else True)
        plain = differentiable_reference(q, k, v, mask)
        for name in GIVES_LSE:
            for given in (None, sink):
                expected = plain if given is None else with_sink(*plain, given)
                for inputs in ([q, k, v], [x.detach() for x in (q, k, v)]):
                    more = {"sink": given if inputs[0].requires_grad or given is None else given.detach()}
                    got = run_here(name, way, *inputs, causal=causal, window=window, return_lse=True, **more)
                    if got is None:
                        continue
                    leaves = [q, k, v, *([sink] if given is not None else [])]
                    compare(got, expected, leaves, (name, causal, window, q.shape, k.shape))
                    ran[name] += 1
        print(ran)
    assert sum(ran.values())


@pytest.mark.parametrize("way", ways)
def test_lengths_and_packed_sequences_against_float64(way):
    rng, ran = random.Random(6), dict.fromkeys(BACKENDS, 0)
    torch.manual_seed(2)
    for turn in range(2 if way == "compiled" else 4):
        causal, window = rng.random() < 0.5, rng.choice((None, 11))
        if turn % 2:  # padded; what lies behind the last key is not a number
            q, k, v = draw(rng, rng.randint(1, 20), 70, 3)
            lengths = torch.tensor([rng.randint(0, 70) for _ in range(3)], dtype=torch.int32, device=DEVICE)
            arguments = {"seqlens": lengths}
            row, column = positions(q, k)
            row, ends = row + (lengths - 70)[:, None, None, None], lengths[:, None, None, None]
            inside = (column < ends).expand(3, 1, q.shape[2], 70)
            behind = ~(column < ends)[:, :, 0, :, None].expand(k.shape)
            k, v = (x.detach().masked_fill(behind, torch.nan).requires_grad_() for x in (k, v))
            clean = k.masked_fill(behind, 0), v.masked_fill(behind, 0)
        else:
            sizes = rng.choice(([30, 30, 30], [1, 40, 17, 0, 30]))
            q, k, v = draw(rng, sum(sizes), sum(sizes))
            places = torch.tensor([0, *sizes], device=DEVICE).cumsum(0).int()
            arguments = {"cu_seqlens": places}
            row, column = positions(q, k)
            ids = torch.repeat_interleave(torch.arange(len(sizes), device=DEVICE), torch.tensor(sizes, device=DEVICE))
            inside, clean = ids[:, None] == ids, (k, v)
        mask = inside & ((row >= column) | (not causal)) & (((row - column).abs() < window) if window else True)
        expected = differentiable_reference(q, *clean, mask)[0]
        for name in BACKENDS:
            for inputs in ([q, k, v], [x.detach() for x in (q, k, v)]):
                got = run_here(name, way, *inputs, causal=causal, window=window, **arguments)
                if got is not None:
                    compare(got, expected, [q, k, v], (name, arguments, causal, window))
                    ran[name] += 1
        print(ran)
    assert sum(ran.values())


def test_values_of_another_width_and_eight_bits():
    torch.manual_seed(3)
    q, k, v = (x.detach().float() for x in draw(random.Random(3), 20, 40, 2, 48, 32))
    expected, _ = reference(q, k, v, causal=True)
    for name in ("naive", "math", "sdpa", "flex_eager", "auto"):
        assert error(attention(q, k, v, causal=True, backend=name), expected) < 1e-5
    for name in ("flash", "gluon"):
        with pytest.raises(AttentionUnsupported, match=r"wide|GPU"):
            attention(q, k, v, causal=True, backend=name)
    eight = [x.to(torch.float8_e4m3fn) for x in (q, k, k)]
    for name in ("auto", "naive", "sdpa", "flex_eager"):
        with pytest.raises(AttentionUnsupported, match=r"8-bit|float8"):
            attention(*eight, backend=name)


def test_changed_lengths_are_seen():
    q, k, v = (torch.randn(2, 2, n, 16) for n in (3, 30, 30))
    lengths = torch.tensor([5, 30], dtype=torch.int32)
    first = attention(q, k, v, seqlens=lengths)
    assert last_run().backend == "sdpa"  # nothing is compiled for these lengths
    lengths[0] = 20  # in place
    assert not torch.equal(attention(q, k, v, seqlens=lengths)[0], first[0])
    assert make_problem(q, k, v).v_dim == 0
