"""GELU in its tanh form, three ways: gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).

One element costs a handful of FLOPs, so on a GPU the bytes moved decide the time. For n elements of e bytes each, read
and written:

    version        kernels    bytes moved    why
    gelu_unfused   9          21 n e         every operation reads from memory and writes its result: six operations
                                             move two tensors, three operations combine two and move three
    gelu_torch     1          2 n e          F.gelu(approximate="tanh"): torch's own kernel
    gelu_triton    1          2 n e          the same fused by hand, in Triton

So fusion should give up to 10.5x on tensors that do not fit in the L2: predict, then measure.

All take fp32, fp16 and bf16, any shape, empty ones too. Strides: a dense tensor in any order of dimensions (a
transposed matrix) needs no copy. A tensor with gaps or overlaps, such as x[:, ::2] or an expanded tensor, is copied by
gelu_triton first: a profile shows one more kernel, which moves up to 2 n e bytes.

The fused versions compute in fp32 and round once; gelu_unfused rounds to its dtype at each step. gelu_triton computes forward
only. On a CPU it runs in the simulator: `with simulate(): gelu_triton(x)`, from `utils.gluon_cpu`.
"""

from __future__ import annotations

import math

import torch

from utils.kernels.gemm import DTYPES, check_triton

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
CUBIC = 0.044715


def gelu_unfused(x: torch.Tensor) -> torch.Tensor:
    """tanh-GELU written out, an operation at a time: nine kernels on a GPU. x any shape; result like x."""
    _check("gelu_unfused", x)
    cube = x * x * x  # 2 kernels, moving 2 + 3 tensors
    inner = x + CUBIC * cube  # 2 kernels, 2 + 3
    t = torch.tanh(SQRT_2_OVER_PI * inner)  # 2 kernels, 2 + 2
    return 0.5 * x * (1 + t)  # 3 kernels, 2 + 2 + 3


def gelu_torch(x: torch.Tensor) -> torch.Tensor:
    """Torch's own fused tanh-GELU. x any shape; result like x."""
    _check("gelu_torch", x)
    return torch.nn.functional.gelu(x, approximate="tanh")


def gelu_triton(x: torch.Tensor) -> torch.Tensor:
    """tanh-GELU as one Triton kernel, forward only. x any shape; result like x."""
    name = "gelu_triton"
    _check(name, x)
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(
            f"{name} computes forward only, and autograd would lose its result; x {tuple(x.shape)} "
            "requires grad. Call it under torch.no_grad(), or use gelu_torch."
        )
    check_triton(name, x, f"x {tuple(x.shape)}")
    from utils.kernels import gelu_triton as device_code

    y = torch.empty_like(x)
    if y.stride() != x.stride():  # x has gaps or overlaps
        x = x.clone()  # the copy has the strides of y
    if x.numel():
        with torch.cuda.device(x.device if x.is_cuda else -1):
            device_code.launch(x, y)
    return y


VERSIONS = {"gelu_unfused": gelu_unfused, "gelu_torch": gelu_torch, "gelu_triton": gelu_triton}


def _check(name: str, x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} takes a torch tensor; got a {type(x).__name__}.")
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{name} takes float32, float16 or bfloat16; got x {tuple(x.shape)} in {x.dtype}. "
            "Convert it, or use torch.nn.functional.gelu."
        )
