"""The backward ladder on a Hopper GPU: gradients against float64, and training through the door to attention."""

import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.utils.attention.errors import relative_error
from utils.attention import attention, last_run, reference_gradients
from utils.machine.device import gluon_support

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gluon_support(), reason=gluon_support().reason),
    pytest.mark.timeout(600),
]

LIMITS = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 256, 383, 509, 640, 1024, 1500)


def draw(batch, heads, kv_heads, sq, sk, head_dim, dtype, seed=0):
    torch.manual_seed(seed)
    q = torch.randn(batch, heads, sq, head_dim, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(batch, kv_heads, sk, head_dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2)
    )
    return q, k, v, torch.randn_like(q)


def check(gradients, q, k, v, dout, **problem):
    out, expected = reference_gradients(q, k, v, dout, **problem)
    unavoidable = errors_of_rounded_output(q, k, dout, out, **problem)
    for name, x, y in zip(("dq", "dk", "dv"), gradients, expected, strict=True):
        limit = LIMITS[q.dtype]
        if name in unavoidable:
            limit = max(limit, 2 * (unavoidable[name].norm() / y.norm().clamp_min(1e-9)).item())
        assert relative_error(x, y) < limit, (name, tuple(q.shape), tuple(k.shape), problem)


@torch.no_grad()
def errors_of_rounded_output(q, k, dout, out, causal=False, window=None):
    """Return how far dQ and dK are off if nothing but the output is rounded, as a backward receives it.

    dS is P (dP - delta), with delta the sum of dO times the output. A row that sees two keys subtracts numbers that may be
    nearly alike: of 400 draws with 127 queries and 2 keys in fp16, one in five has a dQ that is off by more than 1e-3, the
    worst by 1e-2.
    """
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    queries, keys = q.double(), k.double().repeat_interleave(group, 1)
    distance = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    distance = distance - torch.arange(k.shape[2], device=q.device)
    hidden = (distance < 0) & causal | (distance.abs() >= (window or 1 << 30))
    p = (queries @ keys.mT * scale).masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)
    wrong_delta = ((out.to(q.dtype).double() - out) * dout.double()).sum(-1, keepdim=True)
    wrong_ds = p * wrong_delta * scale
    wrong_dk = (wrong_ds.mT @ queries).unflatten(1, (-1, group)).sum(2)
    return {"dq": wrong_ds @ keys, "dk": wrong_dk}


@pytest.mark.parametrize(
    ("step", "head_dim"), [(1, 64), (1, 128), (3, 64), (3, 128), (6, 64), (6, 80), (6, 96), (6, 128), (6, 256)]
)
def test_each_step_matches_float64(step, head_dim):
    from utils.attention.gluon.backward.launch import backward
    from utils.attention.gluon.launch import forward

    q, k, v, dout = (x.detach() for x in draw(2, 4, 2, 300, 429, head_dim, torch.bfloat16))
    out, lse = forward(q, k, v, causal=True, return_lse=True)
    check(backward(dout, q, k, v, out, lse, causal=True, step=step), q, k, v, dout, causal=True)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_probabilities_near_zero_and_rows_without_keys(head_dim, causal):
    """Scores hundreds below the greatest, and of minus infinity: the polynomial for 2^x has to give zero, too."""
    from utils.attention.gluon.backward.launch import backward
    from utils.attention.gluon.launch import forward

    q, k, v, dout = (x.detach() for x in draw(2, 4, 2, 400, 300, head_dim, torch.bfloat16))
    q = q * 10
    out, lse = forward(q, k, v, causal=causal, return_lse=True)
    dq, dk, dv = backward(dout, q, k, v, out, lse, causal=causal)
    expected = reference_gradients(q, k, v, dout, causal=causal)[1][2]
    assert relative_error(dv, expected) < LIMITS[torch.bfloat16]
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    if causal:
        assert not dq[:, :, :100].any()  # these rows stand before the first key


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
def test_random_shapes_match_float64(head_dim, causal, windowed, deterministic):
    rng = random.Random(f"{head_dim} {causal} {windowed}")
    for _ in range(6):
        kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 4))
        d = head_dim if rng.random() < 0.75 else rng.choice({64: (40,), 128: (72, 80, 96, 112), 256: (160,)}[head_dim])
        dtype = rng.choice((torch.bfloat16, torch.float16))
        sq = rng.choice(LENGTHS)
        sk = sq if rng.random() < 0.5 else rng.choice(LENGTHS)
        q, k, v, dout = draw(rng.choice((1, 2)), kv_heads * group, kv_heads, sq, sk, d, dtype, rng.randrange(1 << 20))
        problem = {"causal": causal, "window": rng.choice((1, 17, 100, 500)) if windowed else None}
        torch.use_deterministic_algorithms(deterministic)
        try:
            gradients = torch.autograd.grad(attention(q, k, v, backend="gluon", **problem), (q, k, v), dout)
        finally:
            torch.use_deterministic_algorithms(False)
        check(gradients, q, k, v, dout, **problem)


WAYS = {
    "eager": lambda attend: attend,
    "compiled": lambda attend: torch.compile(lambda q, k, v: attend(q * 1.0, k, v) * 1.0),
    "checkpointed": lambda attend: lambda q, k, v: checkpoint(attend, q, k, v, use_reentrant=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_through_the_door(way):
    q, k, v, dout = draw(2, 4, 2, 300, 300, 64, torch.bfloat16)
    attend = WAYS[way](lambda q, k, v: attention(q, k, v, causal=True, backend="gluon"))
    check(torch.autograd.grad(attend(q, k, v), (q, k, v), dout), q, k, v, dout, causal=True)
    assert last_run().backend == "gluon"


@pytest.mark.parametrize("shape", [(2, 12, 3, 1, 640, 128), (1, 4, 4, 128, 4096, 256)])  # at 256 the keys are cut
def test_few_queries_over_more_keys_have_gradients(shape):
    q, k, v, dout = draw(*shape, torch.bfloat16)  # without gradients, the decode kernel takes these
    check(torch.autograd.grad(attention(q, k, v, backend="gluon"), (q, k, v), dout), q, k, v, dout)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bits_repeat_in_deterministic_mode(head_dim):
    from utils.attention.gluon.backward.launch import backward
    from utils.attention.gluon.launch import forward

    q, k, v, dout = (x.detach() for x in draw(2, 8, 4, 2048, 2048, head_dim, torch.bfloat16))
    out, lse = forward(q, k, v, causal=True, return_lse=True)
    first = backward(dout, q, k, v, out, lse, causal=True, deterministic=True)
    for _ in range(5):
        again = backward(dout, q, k, v, out, lse, causal=True, deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_a_graph_captures_forward_and_backward():
    q, k, v, dout = draw(1, 4, 4, 256, 256, 128, torch.bfloat16)

    def step():
        return torch.autograd.grad(attention(q, k, v, causal=True, backend="gluon"), (q, k, v), dout)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()  # compiles, which a graph cannot capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        gradients = step()
    graph.replay()
    torch.cuda.synchronize()
    check(gradients, q, k, v, dout, causal=True)
