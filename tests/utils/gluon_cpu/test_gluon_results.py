"""Correct kernels: the simulator's results against torch, over random shapes and seeds, and no report on any."""

import random

import pytest
import torch

pytest.importorskip("triton", reason="gluon_cpu needs Triton for the language; there are wheels for Linux only")

from triton.experimental.gluon import language as gl

from tests.utils.gluon_cpu import gluon_correct_kernels as kernels
from tests.utils.gluon_cpu.gluon_helpers import descriptor
from utils import gluon_cpu

SEEDS = (None, 1, 2)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(got: torch.Tensor, want: torch.Tensor, factor: float = 1.0) -> None:
    """Assert that a result is right within the rounding of its dtype, relative to the largest value."""
    scale = want.double().abs().max().item() or 1.0
    error = (got.double() - want.double()).abs().max().item()
    assert error <= factor * TOLERANCE[got.dtype] * scale, f"{error} of {scale}"


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@pytest.fixture(params=SEEDS, ids=lambda s: f"seed{s}")
def draw(request):
    """Return (random source, simulation seed); each run of the tests draws another seed, and a failure shows it."""
    start = random.randrange(10**9)
    print("shapes drawn from", start)
    torch.manual_seed(start)
    return random.Random(start), request.param


def test_copy(draw):
    rng, seed = draw
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        n = rng.randint(1, 700)
        x = (100 * torch.randn(n)).to(dtype)
        y = torch.zeros_like(x)
        with gluon_cpu.simulate(seed=seed) as run:
            kernels.copy_1d[(cdiv(n, 256),)](x, y, n, BLOCK=256)
        assert torch.equal(x, y) and run.ok and len(run.cycles) == cdiv(n, 256)


def test_scale_add_of_strided_matrices(draw):
    rng, seed = draw
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        m, n = rng.randint(1, 90), rng.randint(1, 90)
        a, b = torch.randn(m, 2 * n, dtype=dtype)[:, ::2], torch.randn(n, m, dtype=dtype).T
        c = torch.empty(m, n, dtype=dtype)
        with gluon_cpu.simulate(seed=seed) as run:
            kernels.scale_add_2d[(cdiv(m, 16), cdiv(n, 32))](a, b, c, m, n, *a.stride(), *b.stride(), 0.3, 16, 32)
        close(c, 0.3 * a.double() + b.double())
        assert run.ok


def test_softmax(draw):
    rng, seed = draw
    for dtype in (torch.float32, torch.bfloat16):
        m, n = rng.randint(1, 40), rng.randint(1, 128)
        x = 5 * torch.randn(m, n).to(dtype)
        y = torch.empty_like(x)
        with gluon_cpu.simulate(seed=seed) as run:
            kernels.softmax_rows[(cdiv(m, 8),)](x, y, m, n, n, 8, 128, num_warps=rng.choice((1, 2, 4, 8)))
        close(y, torch.softmax(x.double(), 1))
        assert run.ok


def test_transpose(draw):
    rng, seed = draw
    m, n = rng.randint(1, 90), rng.randint(1, 90)
    x, y = torch.randn(m, n), torch.zeros(n, m)
    with gluon_cpu.simulate(seed=seed):
        kernels.transpose[(cdiv(m, 32), cdiv(n, 32))](x, y, m, n, 32, 32)
    assert torch.equal(y, x.T)


def test_reductions_scans_splits():
    x, y = torch.randn(512), torch.zeros(5)
    with gluon_cpu.simulate():
        kernels.reductions[(1,)](x, y, 512)
    want = torch.stack([x.max(), x.min(), x.sum(), x[::2].sum(), x.abs().sum()])
    assert torch.allclose(y, want, atol=1e-4)


@pytest.mark.parametrize(("a", "b"), [(7, 2), (-7, 2), (7, -2), (-7, -2), (3, 5), (2**30, 3)])
def test_integers_follow_c(a, b):
    y = torch.zeros(6, dtype=torch.int32)
    with gluon_cpu.simulate():
        kernels.integers[(1,)](y, a, b, 20)
    wrapped = (a * 1000003 + 2**31) % 2**32 - 2**31
    total = sum(i if i % 2 == 0 else -1 for i in range(0, 20, 3))
    halved = total
    while halved > 5:
        halved //= 2
    assert y.tolist() == [int(a / b), a - int(a / b) * b, wrapped, min(max(a, b), 3), total, halved]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_cp_async_pipeline(draw, stages):
    rng, seed = draw
    n = rng.randint(1, 4000)
    a, b, c = torch.randn(n), torch.randn(n), torch.zeros(n)
    with gluon_cpu.simulate(seed=seed) as run:
        kernels.add_double_buffered[(cdiv(n, 1024),)](a, b, c, n, 256, 4, stages)
    assert torch.equal(c, a + b) and run.ok


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_tma_ring(draw, stages):
    rng, seed = draw
    for dtype in (torch.float32, torch.bfloat16):
        m, n = rng.randint(1, 60), 8 * rng.randint(1, 20)
        x = torch.randn(m, n).to(dtype)
        y = torch.full_like(x, float("nan"))
        with gluon_cpu.simulate(seed=seed) as run:
            kernels.copy_tiles[(cdiv(m, 16),)](descriptor(x, [16, 64]), descriptor(y, [16, 64]), n, 0.5, stages)
        assert torch.equal(y, x * 0.5) and run.ok


@pytest.mark.parametrize("variant", ["shared", "transposed", "registers", "eight warps"])
def test_matmul(draw, variant):
    rng, seed = draw
    dtype = rng.choice((torch.float16, torch.bfloat16))
    m, n, k = rng.randint(1, 200), 8 * rng.randint(1, 16), 8 * rng.randint(1, 20)
    a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
    c = torch.full((m, n), float("nan"), dtype=dtype)
    transposed = variant == "transposed"
    b_desc = descriptor(b.T.contiguous(), [64, 32]) if transposed else descriptor(b, [32, 64])
    with gluon_cpu.simulate(seed=seed) as run:
        kernels.matmul[(cdiv(m, 64), cdiv(n, 64))](
            descriptor(a, [64, 32]),
            b_desc,
            descriptor(c, [64, 64]),
            k,
            transposed,
            variant == "registers",
            num_warps=8 if variant == "eight warps" else 4,
        )
    close(c, a.double() @ b.double())
    assert run.ok


def test_matmul_persistent(draw):
    rng, seed = draw
    m, n, k = rng.randint(65, 200), 8 * rng.randint(9, 24), 8 * rng.randint(1, 24)
    a, b = torch.randn(m, k, dtype=torch.bfloat16), torch.randn(k, n, dtype=torch.bfloat16)
    c = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
    with gluon_cpu.simulate(seed=seed) as run:
        kernels.matmul_persistent[(rng.randint(1, 3),)](
            descriptor(a, [64, 64]), descriptor(b, [64, 64]), descriptor(c, [64, 64]), m, n, k
        )
    close(c, a.double() @ b.double())
    assert run.ok


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_warp_specialized_add(draw, stages):
    rng, seed = draw
    m, n = rng.randint(1, 60), 4 * rng.randint(1, 80)
    a, b, c = torch.randn(m, n), torch.randn(m, n), torch.zeros(m, n)
    with gluon_cpu.simulate(seed=seed) as run:
        kernels.add_specialized[(cdiv(m, 16),)](*(descriptor(x, [16, 32]) for x in (a, b, c)), n, 2.0, stages)
    assert torch.equal(c, a + 2.0 * b) and run.ok


@pytest.mark.parametrize("stages", [1, 3])
def test_cp_async_tells_by_mbarrier(draw, stages):
    rng, seed = draw
    n = rng.randint(1, 2000)
    x, y = torch.randn(n), torch.zeros(n)
    with gluon_cpu.simulate(seed=seed) as run:
        kernels.halve_cp_async_specialized[(1,)](x, y, n, 128, stages)
    assert torch.equal(y, x / 2) and run.ok


def test_every_dtype_is_rounded_to_nearest_even():
    x = torch.randn(1024) * 10 ** torch.randint(-6, 6, (1024,))
    for dtype in (torch.float16, torch.bfloat16):
        a, c = torch.zeros(32, 32, dtype=torch.float32), torch.zeros(32, 32, dtype=dtype)
        b = x.reshape(32, 32)
        with gluon_cpu.simulate():
            kernels.scale_add_2d[(2, 1)](a, b, c, 32, 32, 32, 1, 32, 1, 0.0, 16, 32)
        assert torch.equal(c, b.to(dtype))


def test_layouts_of_views_are_tritons_own():
    """Split of a reshaped, permuted wgmma accumulator: the layout comes from Triton's algebra."""
    from utils.gluon_cpu import layouts

    layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    found = layouts._register_view(4, 1, layout, (64, 64), "reshape", (4, 2, 8, 64))
    assert isinstance(found, gl.DistributedLinearLayout) and found.shape == [4, 2, 8, 64]
