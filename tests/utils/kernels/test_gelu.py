"""tanh-GELU, three versions against float64: values, extremes, shapes, strides, and the number of launches."""

import importlib.util
import math

import pytest
import torch

from utils import gluon_cpu
from utils.kernels import gelu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
EXTREMES = [0.0, -0.0, 1e-30, -1e-30, 1e-7, 3.0, -3.0, 12.0, -12.0, 90.0, -90.0, 6e4, -6e4]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def inputs(device="cpu"):
    """Return random values, extremes up to infinity, and tensors with all kinds of strides."""
    tensors = []
    for dtype in DTYPES:

        def randn(*shape, dtype=dtype):
            return (torch.randn(*shape, device=device) * 4).to(dtype)

        extremes = [*EXTREMES, math.inf, -math.inf, math.nan]
        if dtype != torch.float16:
            extremes += [1e38, -1e38]  # x^3 overflows to infinity
        tensors += [
            randn(5000),
            torch.tensor(extremes, device=device).to(dtype),
            randn(1),
            randn(()),
            randn(0, 3),
            randn(3, 5, 7),
            randn(31, 17).T,
            randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            randn(8, 10)[:, ::2],
            randn(9, 9)[2:, 3:].T,
            randn(3, 1, 5).expand(3, 4, 5),
            randn(100)[7:60],
        ]
    return tensors


def gelu_of(x):
    """Compute tanh-GELU in float64."""
    wide = x.double()
    return 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))


def assert_gelu(y, x, what="", steps=1.0):
    """Assert that y is gelu(x), rounded to its dtype `steps` times, with the shape and dtype of x."""
    wide, exact = x.double(), gelu_of(x)
    assert y.shape == x.shape and y.dtype == x.dtype and y.device == x.device, what
    assert torch.equal(y.isnan(), exact.isnan()), what  # gelu(-inf) is -inf * 0 in every version
    finite = exact.isfinite() & (exact.abs() < torch.finfo(x.dtype).max)
    allowed = steps * (2 * ROUNDING[x.dtype] * exact.abs() + 2.0**-24 * wide.abs()) + 1e-7
    wrong = (y.double() - exact).abs() > allowed
    assert not (wrong & finite).any(), f"{what}: x {x[wrong & finite][:5]}, got {y[wrong & finite][:5]}"
    assert torch.equal(y[exact.isinf()].double(), exact[exact.isinf()]), what


@needs_triton
def test_the_fused_kernel_in_the_simulator():
    tail = torch.linspace(-6, -3, 200)  # where 1 + tanh cancels to 0 in fp32, and x / (1 + exp(-2u)) stays accurate
    tensors = [*inputs(), tail]
    with gluon_cpu.simulate():
        results = [gelu.gelu_triton(x) for x in tensors]
    for x, y in zip(tensors, results, strict=True):
        assert_gelu(y, x, "gelu_triton")
        assert y.stride() == torch.empty_like(x).stride()
    relative = lambda value: ((value.double() - gelu_of(tail)) / gelu_of(tail)).abs().max().item()  # noqa: E731
    assert relative(results[-1]) < 1e-5 < relative(gelu.gelu_unfused(tail))


@pytest.mark.parametrize(
    "name, device",
    [("gelu_torch", "cpu"), *(pytest.param(f"gelu_{x}", "cuda", marks=pytest.mark.gpu) for x in ("torch", "triton"))],
)
def test_fused_versions(name, device):
    for x in [*inputs(device), torch.randn(1 << 20, device=device) * 5]:
        y = gelu.VERSIONS[name](x)
        assert_gelu(y, x, name, steps=4 if x.dtype == torch.float32 else 1.5)
        assert y.stride() == torch.empty_like(x).stride(), name


def test_the_unfused_version_rounds_at_every_step():
    for x in inputs():
        exact, y = gelu_of(x), gelu.gelu_unfused(x)
        assert y.shape == x.shape and y.dtype == x.dtype
        usable = exact.isfinite() & (x.abs() < 30)  # beyond it x^3 overflows fp16
        error = (y.double() - exact).abs()[usable]
        assert (error <= 6 * ROUNDING[x.dtype] * (1 + x.double().abs()[usable])).all()


def test_refusals_say_what_was_given():
    for name, version in gelu.VERSIONS.items():
        for x, word in ((torch.ones(2, 3, dtype=torch.float64), r"x \(2, 3\) in torch.float64"), (1.0, "a float")):
            with pytest.raises(TypeError, match=f"{name} takes .*{word}"):
                version(x)
    with pytest.raises(ValueError, match="forward only"):
        gelu.gelu_triton(torch.ones(4, requires_grad=True))
    with pytest.raises(ValueError, match=r"x \(4,\).*with simulate\(\): gelu_triton"):
        gelu.gelu_triton(torch.ones(4))


@pytest.mark.gpu
def test_kernel_launches_on_a_gpu():
    """Unfused there are nine launches, fused one, and one more for a copy if x has gaps."""
    from torch.profiler import ProfilerActivity, profile

    def kernels(function, x):
        function(x)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            function(x)
            torch.cuda.synchronize()
        return sum(
            event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
            for event in trace.events()
        )

    x = torch.randn(4096, 4096, device="cuda")
    counts = {name: kernels(version, x) for name, version in gelu.VERSIONS.items()}
    assert counts == {"gelu_unfused": 9, "gelu_torch": 1, "gelu_triton": 1}
    assert kernels(gelu.gelu_triton, x.T) == 1 and kernels(gelu.gelu_triton, x[:, ::2]) == 2
