"""Correct kernels over random sizes: the simulator's results against torch, no report on any, and the same on a Hopper GPU."""

import os
import random
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="gluon_cpu needs Triton for the language; there are wheels for Linux only")

from triton import cdiv
from triton.experimental.gluon import language as gl

from tests.utils.gluon_cpu import gluon_aggregate_kernels as aggregates
from tests.utils.gluon_cpu import gluon_correct_kernels as kernels
from tests.utils.gluon_cpu.gluon_helpers import descriptor
from tests.utils.gluon_cpu.verdict_cases import Case, launch
from utils import gluon_cpu
from utils.files import ROOT

# Relative to the largest value. fp32: sums in another order.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.int32: 0.0}
HALVES = torch.float16, torch.bfloat16


def scale_add(draw, device):
    m, n, dtype = draw.randint(1, 90), draw.randint(1, 90), draw.choice((torch.float32, *HALVES))
    a, b = torch.randn(m, 2 * n, dtype=dtype, device=device)[:, ::2], torch.randn(n, m, dtype=dtype, device=device).T
    c = torch.empty(m, n, dtype=dtype, device=device)
    sizes = m, n, *a.stride(), *b.stride(), 0.3, 16, 32
    kernels.scale_add_2d[(cdiv(m, 16), cdiv(n, 32))](a, b, c, *sizes)
    return c, 0.3 * a.double() + b.double()


def softmax(draw, device):
    m, n, dtype = draw.randint(1, 40), draw.randint(1, 128), draw.choice((torch.float32, torch.bfloat16))
    x = 5 * torch.randn(m, n, dtype=dtype, device=device)
    y = torch.empty_like(x)
    kernels.softmax_rows[(cdiv(m, 8),)](x, y, m, n, n, 8, 128, num_warps=draw.choice((1, 2, 4, 8)))
    return y, torch.softmax(x.double(), 1)


def transpose(draw, device):
    m, n = draw.randint(1, 90), draw.randint(1, 90)
    x, y = torch.randn(m, n, device=device), torch.zeros(n, m, device=device)
    kernels.transpose[(cdiv(m, 32), cdiv(n, 32))](x, y, m, n, 32, 32)
    return y, x.T


def reductions(draw, device):
    x, y = torch.randn(512, device=device), torch.zeros(5, device=device)
    kernels.reductions[(1,)](x, y, 512)
    return y, torch.stack([x.max(), x.min(), x.sum(), x[::2].sum(), x.abs().sum()])


def matmul(draw, device):
    m, n, k, dtype = draw.randint(1, 200), 8 * draw.randint(1, 16), 8 * draw.randint(1, 20), draw.choice(HALVES)
    transposed, in_registers = draw.random() < 0.5, draw.random() < 0.5
    a, b = (torch.randn(size, dtype=dtype, device=device) for size in ((m, k), (n, k) if transposed else (k, n)))
    c = torch.full((m, n), float("nan"), dtype=dtype, device=device)
    b_desc = descriptor(b, [64, 32] if transposed else [32, 64])
    kernels.matmul[(cdiv(m, 64), cdiv(n, 64))](
        *(descriptor(a, [64, 32]), b_desc, descriptor(c, [64, 64]), k, transposed, in_registers),
        num_warps=4 if in_registers else draw.choice((4, 8)),
    )
    return c, a.double() @ (b.T if transposed else b).double()


def pipeline_of_aggregates(draw, device):
    x, y, z = torch.randn(3, 16, 32 * draw.randint(1, 5), device=device)
    given = [descriptor(t, [16, 32]) for t in (x, y, z)]
    aggregates.add_with_aggregates[(1,)](*given, z.shape[1] // 32, draw.randint(1, 3), 0.5, "")
    return z, 0.5 * x + y


def verdict_kernel(name, draw_sizes):
    return lambda draw, device: launch(Case(name, "drawn", "", (), draw_sizes(draw)), device)


def ring_sizes(draw):
    steps = draw.randint(1, 8)
    width, dtype = 32 * steps - 8 * draw.randint(0, 3), draw.choice((torch.float32, torch.float16))
    return dict(stages=draw.randint(1, 3), steps=steps, rows=draw.randint(1, 16), width=width, dtype=dtype)


SIZES = {
    "ring": ring_sizes,
    "consumers": lambda draw: dict(stages=draw.randint(1, 4), steps=draw.randint(1, 8)),
    "stores": lambda draw: dict(buffers=draw.randint(1, 3), steps=draw.randint(1, 8)),
    "product": lambda draw: dict(stages=draw.randint(2, 4), k=8 * draw.randint(1, 40), n=draw.choice((32, 64, 128))),
    "operand": lambda draw: dict(size=draw.choice((64, 128))),
    "groups": lambda draw: dict(stages=draw.randint(2, 4), n=draw.randint(1, 2000)),
    "signals": lambda draw: dict(stages=draw.randint(1, 4), n=draw.randint(1, 2000)),
    "handoff": lambda draw: dict(steps=draw.randint(1, 8)),
    "sums": lambda draw: dict(programs=draw.randint(1, 8)),
    "tails": lambda draw: dict(rows=draw.randint(1, 90), columns=draw.randint(1, 90)),
}
OTHERS = scale_add, softmax, transpose, reductions, matmul, pipeline_of_aggregates
LAUNCHES = {name: verdict_kernel(name, sizes) for name, sizes in SIZES.items()} | {f.__name__: f for f in OTHERS}


def run(name: str, start: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(start)
    output, expected = LAUNCHES[name](random.Random(start), device)
    return output.cpu(), expected.cpu()


def close(output: torch.Tensor, expected: torch.Tensor) -> bool:
    apart = (output.double() - expected.double()).abs().max().item()
    return apart <= TOLERANCE[output.dtype] * (expected.double().abs().max().item() or 1.0)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", LAUNCHES)
def test_results_are_right_in_the_simulator(name, seed):
    start = random.randrange(10**6)
    with gluon_cpu.simulate(seed=seed) as seen:
        assert close(*run(name, start, "cpu")), f"drawn from {start}"
    assert seen.ok and not seen.notes


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAUNCHES)
def test_simulator_and_gpu_agree(name):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("TMA, mbarriers and wgmma of these kernels need a Hopper GPU (H100, H200)")
    for _ in range(5):
        start = random.randrange(10**6)
        with gluon_cpu.simulate(seed=start):
            simulated, expected = run(name, start, "cpu")
        output, on_gpu = run(name, start, "cuda")
        assert close(simulated, expected) and close(output, on_gpu), f"drawn from {start}"


@pytest.mark.slow
def test_the_correct_kernels_are_gluon_that_compiles_for_hopper(tmp_path):
    """Compiled in another process, since a wrong kernel can end it."""
    code = (
        "import random\nfrom tests.utils.gluon_cpu import test_gluon_results as results\n"
        "from tests.utils.gluon_cpu.verdict_cases import compiling\n"
        "with compiling() as names:\n    for name in results.LAUNCHES:\n        results.run(name, 0, 'cpu')\n"
        "print(len(names))"
    )
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) == len(LAUNCHES)


@pytest.mark.parametrize(("a", "b"), [(7, 2), (-7, 2), (7, -2), (-7, -2), (3, 5), (2**30, 3)])
def test_integers_follow_c(a, b):
    y = torch.zeros(7, dtype=torch.int32)
    with gluon_cpu.simulate():
        kernels.integers[(1,)](y, a, b, 20)
    wrapped = (a * 1000003 + 2**31) % 2**32 - 2**31
    total = sum(i if i % 2 == 0 else -1 for i in range(0, 20, 3))
    halved = total
    while halved > 5:
        halved //= 2
    nearest = min(max(int(a * 1e20), -(2**31)), 2**31 - 1)
    assert y.tolist() == [int(a / b), a - int(a / b) * b, wrapped, min(max(a, b), 3), total, halved, nearest]


def test_a_sum_in_fp16_is_rounded_at_each_addition():
    y = torch.zeros(1)
    with gluon_cpu.simulate():
        kernels.sum_in_fp16[(1,)](y)
    assert y.item() == 2302, "rounded once, it would be 2304"


def test_layouts_of_views_are_tritons_own():
    """Splitting a reshaped and permuted wgmma accumulator gives the layout that Triton's algebra derives."""
    from utils.gluon_cpu import layouts

    layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    found = layouts._layout_of_view(4, 1, layout, gl.float32, (64, 64), "reshape", (4, 2, 8, 64))
    assert isinstance(found, gl.DistributedLinearLayout) and found.shape == [4, 2, 8, 64]
