"""Kernels in plain Triton in the simulator: the values are those of a GPU, and what would be wrong there is refused."""

import pytest
import torch

pytest.importorskip("triton", reason="the simulator needs Triton for the language; there are wheels for Linux only")

import triton
import triton.language as tl
from triton.experimental import gluon

from utils.gluon_cpu import GlobalMemoryError, KernelError, LayoutError, UnknownOperationError, simulate


@triton.jit
def convert(x, y, BLOCK: tl.constexpr):
    """Store x in the type of y."""
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@triton.jit
def part(x, y, count, BLOCK: tl.constexpr):
    """Load the first `count` elements, without a value for the others."""
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < count))


@triton.jit
def product(a, b, c, K, BLOCK: tl.constexpr):
    """C = A @ B of one tile, in the default precision of tensor cores."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in tl.range(0, K, BLOCK, num_stages=2):
        x = tl.load(a + i[:, None] * K + k + i)  # a dimension is added in front
        y = tl.load(b + (k + i[:, None]) * BLOCK + i[None, :])
        total = tl.dot(x, tl.trans(tl.trans(y)), total)
    tl.store(c + i[:, None] * BLOCK + i[None, :], total.to(c.dtype.element_ty))


@gluon.jit
def no_dimension_in_front(y, BLOCK: tl.constexpr):
    """Add a vector to a matrix as in `product`: Gluon refuses it, since it adds no dimension in front."""
    tl.store(y + tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK), 1.0)


@triton.jit
def by_block_pointer(x, y, BLOCK: tl.constexpr):
    """Use block pointers, a part of Triton that the simulator does not know."""
    tl.store(y + tl.arange(0, BLOCK), tl.load(tl.make_block_ptr(x, (BLOCK,), (1,), (0,), (BLOCK,), (0,))))


HALVES = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.3e38, -1e-40, float("inf"), 0.1, 7.0, -2.0, *torch.randn(56)])
NUMBERS = [HALVES, HALVES.double(), HALVES.half(), torch.arange(-3000, -2936, dtype=torch.int32)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x", NUMBERS, ids=lambda x: str(x.dtype))
def test_every_number_becomes_the_nearest_of_16_bits(x, dtype):
    y, back = torch.empty(64, dtype=dtype), torch.empty(64)
    with simulate():
        convert[(1,)](x, y, BLOCK=64)
        convert[(1,)](y, back, BLOCK=64)
    assert torch.equal(y, x.to(dtype)) and torch.equal(back, y.float())


def test_products_of_bf16_are_exact_and_of_fp32_need_their_precision():
    a, b, c = torch.randn(16, 48).bfloat16(), torch.randn(48, 16).bfloat16(), torch.empty(16, 16).bfloat16()
    with simulate(timeline=True) as run:
        product[(1,)](a, b, c, 48, BLOCK=16)
    exact = a.double() @ b.double()
    assert ((c.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()  # half a unit in the last place
    assert [e.kind for e in run.events].count("dot") == 3
    with simulate(), pytest.raises(KernelError, match='input_precision="ieee"'):
        product[(1,)](a.float(), b.float(), c, 48, BLOCK=16)
    with simulate(), pytest.raises(KernelError, match="do not fit"):
        product[(1,)](a, b.half(), c, 48, BLOCK=16)


def test_what_a_mask_hides_is_undefined_and_what_lies_outside_is_refused():
    x, y = torch.randn(10), torch.empty(16)
    with simulate():
        part[(1,)](x, y, 10, BLOCK=16)
    assert torch.equal(y[:10], x) and y[10:].isnan().all()
    with simulate(), pytest.raises(GlobalMemoryError, match="2 elements outside"):
        part[(1,)](x, y, 12, BLOCK=16)
    with simulate(), pytest.raises(UnknownOperationError, match=r"make_block_ptr.*by addresses"):
        by_block_pointer[(1,)](x, y, BLOCK=8)
    with simulate(), pytest.raises(LayoutError, match="different ranks"):
        no_dimension_in_front[(1,)](torch.empty(8, 8), BLOCK=8)
