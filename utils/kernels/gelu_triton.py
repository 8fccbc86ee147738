"""The fused tanh-GELU in Triton: the device code, called from `utils/kernels/gelu.py`. Importing this imports Triton.

No tanh is needed: 1 + tanh(u) = 2 / (1 + exp(-2u)), so gelu(x) = x / (1 + exp(-2u)). Where exp overflows to infinity,
the quotient is -0; where exp underflows, it is x. Both are right. Near 0 this form keeps its accuracy, and the form
1 - 2 / (exp(2u) + 1) would lose it.

    tile         1024 neighbouring elements for each program, read and written once; no pipeline
    measured     by the student, in lab 1
"""

import triton
import triton.language as tl


@triton.jit
def gelu_kernel(x, y, count, BLOCK: tl.constexpr):
    """Compute y = gelu(x) of BLOCK elements: load, compute in fp32, round once, store."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < count).to(tl.float32)
    u = 0.7978845608028654 * (v + 0.044715 * v * v * v)  # sqrt(2/pi)
    tl.store(y + i, (v / (1.0 + tl.exp(-2.0 * u))).to(y.dtype.element_ty), mask=i < count)


def launch(x, y) -> None:
    """Compute y = gelu(x). Both tensors are dense and have the same strides."""
    block = 1024 if x.is_cuda else 1 << 16  # the simulator's time grows with the number of programs
    gelu_kernel[(triton.cdiv(x.numel(), block),)](x, y, x.numel(), BLOCK=block)
