"""The Gluon ladder on a Hopper GPU: accuracy against float64 over random shapes, memory bounds, determinism."""

import random

import pytest
import torch

from tests.utils.attention.errors import relative_error
from utils.attention import BACKENDS, allowed_keys, attention, find_backend, last_run, make_problem, proof, reference
from utils.attention.backends.gluon import decodes
from utils.machine.device import gluon_support

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gluon_support(), reason=gluon_support().reason),
    pytest.mark.timeout(300),
]

GROUPS = [
    (head_dim, causal, windowed, dtype)
    for head_dim in (64, 128, 256)
    for causal in (False, True)
    for windowed in (False, True)
    for dtype in (torch.bfloat16, torch.float16)
]
SHAPES_PER_GROUP = 9  # 24 groups: 216 shapes
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 251, 256, 383, 509, 512, 640, 1021, 1024, 1500, 2039)


def rounding_error(q, k, v, expected, **options):
    """Return the error of float64 in which only 2^(scores - maximum) and the output are rounded, as in every fused kernel."""
    problem = make_problem(q, k, v, **options)
    keep = allowed_keys(problem)
    group = problem.heads // problem.kv_heads
    out = torch.empty_like(expected)
    for b in range(problem.batch):
        for h in range(problem.heads):
            scores = q[b, h].double() @ k[b, h // group].double().T * problem.scale
            if keep is not None:
                scores = scores.masked_fill(~keep, float("-inf"))
            top = scores.amax(-1, keepdim=True)
            p = torch.exp(scores - torch.where(top.isinf(), 0.0, top))
            total = p.sum(-1, keepdim=True)
            rounded = p.to(q.dtype).double() @ v[b, h // group].double()
            out[b, h] = (rounded / torch.where(total == 0, 1.0, total)).to(q.dtype).double()
    return relative_error(out, expected)


def random_case(rng, head_dim, causal, windowed, dtype):
    generator = torch.Generator("cuda").manual_seed(rng.randrange(1 << 30))
    kv_heads = rng.choice((1, 1, 2, 3))
    heads = kv_heads * rng.choice((1, 1, 2, 4))
    batch = rng.choice((1, 1, 2, 3))
    sq = rng.choice(LENGTHS)
    sk = sq if rng.random() < 0.5 else rng.choice(LENGTHS)
    d = head_dim if rng.random() < 0.75 else {64: 40, 128: 96, 256: 160}[head_dim]

    def tensor(h, s):
        kind = rng.choice(("contiguous", "rows first", "slice of nan"))
        if kind == "rows first":  # (B, S, H, D) in memory
            return torch.randn(batch, s, h, d, device="cuda", dtype=dtype, generator=generator).transpose(1, 2)
        x = torch.randn(batch, h, s, d, device="cuda", dtype=dtype, generator=generator)
        if kind == "slice of nan":  # a read past its end makes the result nan
            whole = torch.full((batch, h, s + 200, d + 8), float("nan"), device="cuda", dtype=dtype)
            whole[:, :, 100 : 100 + s, :d] = x
            x = whole[:, :, 100 : 100 + s, :d]
        return x

    q, k, v = tensor(heads, sq), tensor(kv_heads, sk), tensor(kv_heads, sk)
    if rng.random() < 0.15:
        q = q * 30  # large logits: almost every row picks one key
    options = {
        "causal": causal,
        "window": rng.choice((1, 17, 64, 100, 700)) if windowed else None,
        "scale": rng.choice((None, None, 0.02, 0.5)),
    }
    return q, k, v, options


@pytest.mark.parametrize("head_dim, causal, windowed, dtype", GROUPS)
def test_random_shapes_against_float64(head_dim, causal, windowed, dtype, monkeypatch):
    from utils.attention.gluon import launch
    from utils.attention.gluon.launch import forward

    rng = random.Random(f"{head_dim} {causal} {windowed} {dtype}")
    multiprocessors = launch.processors
    for _ in range(SHAPES_PER_GROUP):
        # These shapes have few tiles: with fewer programs, each of them walks over several.
        few = rng.choice((None, 1, 2, 5, 11))
        monkeypatch.setattr(launch, "processors", multiprocessors if few is None else lambda device, n=few: n)
        q, k, v, options = random_case(rng, head_dim, causal, windowed, dtype)
        what = f"q {tuple(q.shape)} {q.stride()}, k {tuple(k.shape)}, {options}, programs {few}"
        expected, expected_lse = reference(q, k, v, **options)
        out, lse = forward(q, k, v, return_lse=True, **options)
        assert out.shape == q.shape and out.dtype == dtype and torch.isfinite(out).all(), what
        again = forward(q, k, v, **options)
        assert torch.equal(out, again), f"not the same bits twice: {what}"
        error = relative_error(out, expected)
        assert error <= 1.5 * rounding_error(q, k, v, expected, **options) + 1e-6, what
        problem = make_problem(q, k, v, **options)
        if find_backend("cudnn").support(problem):
            cudnn = attention(q, k, v, backend="cudnn", **options)
            assert error <= 1.5 * relative_error(cudnn, expected) + 1e-6, what
        seen = ~expected_lse.isinf()
        assert torch.equal(lse.isinf(), ~seen), what
        assert (out[~seen] == 0).all(), what
        if seen.any():
            assert (lse[seen] - expected_lse[seen]).abs().max() <= 1e-5 * (1 + expected_lse[seen].abs().max()), what


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_tiles_over_many_keys(head_dim):
    """The decode kernel computes them, with more queries than it gets from other calls."""
    rng = random.Random(head_dim)
    for heads, sq in ((1, 700), (4, 300), (8, 200), (20, 100)):
        causal, window, sk = rng.random() < 0.7, rng.choice((None, None, 3000)), rng.randint(4 * sq, 9000)
        q = torch.randn(1, heads, sq, head_dim, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(1, heads, sk, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        assert decodes(make_problem(q, k, v, causal=causal, window=window))
        out = attention(q, k, v, causal=causal, window=window, backend="gluon")
        what = f"{heads} x {sq} x {sk}, causal {causal}, window {window}"
        assert torch.equal(out, attention(q, k, v, causal=causal, window=window, backend="gluon")), what
        expected = reference(q, k, v, causal=causal, window=window)[0]
        bound = 1.5 * rounding_error(q, k, v, expected, causal=causal, window=window)
        assert relative_error(out, expected) <= bound + 1e-6, what


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_step_of_the_ladder(step, head_dim):
    from utils.attention.gluon.launch import forward

    torch.manual_seed(step)
    for sq, sk, causal, window in (
        (300, 300, True, None),
        (300, 517, True, None),
        (517, 300, False, None),
        (129, 129, True, 40),
        (1, 700, True, None),
        (512, 512, False, None),
        (260, 200, False, 60),
    ):
        if window and step < 5:
            continue
        q = torch.randn(2, 4, sq, head_dim, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(2, 2, sk, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        expected, expected_lse = reference(q, k, v, causal=causal, window=window)
        out, lse = forward(q, k, v, causal=causal, window=window, return_lse=True, step=step)
        what = f"step {step}, {sq} x {sk}, causal {causal}, window {window}"
        bound = 1.5 * rounding_error(q, k, v, expected, causal=causal, window=window)
        assert relative_error(out, expected) <= bound, what
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-5, msg=what)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_nothing_is_written_outside_of_the_output(step):
    from utils.attention.gluon import launch

    zone = 1 << 16
    for head_dim, sq in ((64, 197), (128, 131), (256, 65), (96, 129)):
        q, k, v = (torch.randn(2, 3, sq, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        whole = torch.full((2 * zone + q.numel(),), 7.0, device="cuda", dtype=torch.bfloat16)
        out = whole[zone : zone + q.numel()].view(q.shape)
        lses = torch.full((2 * zone + 6 * sq,), 7.0, device="cuda")
        lse = lses[zone : zone + 6 * sq].view(2, 3, sq)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        plan, programs = launch.plan_of(step, q, k, True, 0), launch.processors(q.device)
        options = True, 0, True, head_dim**-0.5 * launch.LOG2_E, plan, programs
        launch.step_module(step).launch(launch.Arguments(q, k, v, out, lse, *options))
        torch.cuda.synchronize()
        for buffer, inner in ((whole, out), (lses, lse)):
            assert (buffer[:zone] == 7).all() and (buffer[-zone:] == 7).all()
            assert torch.isfinite(inner).all()


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_are_not_positive(scale):
    q, k, v = (torch.randn(1, 2, 200, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    expected, _ = reference(q, k, v, causal=True, scale=scale)
    assert relative_error(attention(q, k, v, causal=True, scale=scale, backend="gluon"), expected) < 1e-3


def test_auto_takes_gluon_and_the_kernel_proves_it():
    q, k, v = (torch.randn(1, 2, 256, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    attention(q, k, v, causal=True)
    assert last_run().backend == "gluon"
    assert any("attention_step5" in name for name in proof("gluon", q, k, v, causal=True))


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "varlen"])  # it takes packed sequences only
@pytest.mark.parametrize("causal", [False, True])
def test_backends_prove_themselves_and_agree(name, causal):
    if not find_backend(name).machine():
        pytest.skip(find_backend(name).machine().reason)
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected, _ = reference(q, k, v, causal=causal)
    assert relative_error(attention(q, k, v, causal=causal, backend=name), expected) < 1e-2
    assert proof(name, q, k, v, causal=causal), "none of the launched kernels bears the backend's name"


def test_torch_compile_sees_one_operator():
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def block(q, k, v):
        return torch.ops.labs.attention_gluon(q * 2, k, v, True, 0.125, 0, False, 5)[0] + 1

    attention(q, k, v, backend="gluon")  # registers the operator
    torch.testing.assert_close(torch.compile(block, fullgraph=True)(q, k, v), block(q, k, v), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_sequences_of_any_length(head_dim, causal):
    """More keys than the plan for short ones takes; numbers of rows and keys that are no multiples of a tile, and Sq != Sk."""
    from utils.attention.gluon.launch import forward

    torch.manual_seed(head_dim)
    for sq, sk in ((8192, 8192), (4500, 4500), (4097, 5000), (4800, 4300), (70, 4700)):
        q, k, v = (
            torch.randn(1, heads, length, head_dim, device="cuda", dtype=torch.bfloat16)
            for heads, length in ((4, sq), (2, sk), (2, sk))
        )
        expected, expected_lse = reference(q, k, v, causal=causal)
        out, lse = forward(q, k, v, causal=causal, return_lse=True)
        assert relative_error(out, expected) <= 1.5 * rounding_error(q, k, v, expected, causal=causal), (sq, sk)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-5)
        assert torch.equal(out, forward(q, k, v, causal=causal))


def test_a_first_causal_call_inside_a_capture():
    """The host copies the schedule of its tiles once: if that copy were captured, it would fail or read freed memory."""
    from utils.attention.gluon import step5_overlapped

    def draw(tokens):
        return (torch.randn(2, 8, tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    attention(*draw(4000), causal=True, backend="gluon")  # compiles, which a graph cannot capture
    q, k, v = draw(4224)  # another schedule
    step5_overlapped.tile_schedule.cache_clear()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True, backend="gluon")
    assert step5_overlapped.tile_schedule.cache_info().misses == 1
    step5_overlapped.tile_schedule.cache_clear()
    for _ in range(3):
        q.normal_()
        filler = [torch.randint(0, 1000, (5000,), device="cuda", dtype=torch.int32) for _ in range(50)]
        graph.replay()
        expected = reference(q[:1, :2], k[:1, :2], v[:1, :2], causal=True)[0]
        assert relative_error(out[:1, :2], expected) < 5e-3
        del filler
