"""Compile the kernels of the backward ladder for Hopper without a GPU, and read registers, spills and instructions."""

from __future__ import annotations

import torch

from utils.attention.gluon.backward.arguments import Gradients, arguments_of, kernel_of, launches
from utils.attention.gluon.backward.order import Order
from utils.attention.gluon.backward.plan import plan_for
from utils.attention.gluon.intervals import PackedTable
from utils.kernels.assembling import narrow_kernel
from utils.kernels.offline import Assembly, compile_gluon, read_assembly


def compile_backward(
    step: int, head_dim: int = 128, *, mask: str = "ends", deterministic: bool = False, number: int = -2
) -> Assembly:
    """Compile a launch of a backward pass in bf16 for sm_90a: the first (number 0), the step's own (-2), or the last (-1)."""
    from triton.runtime.jit import mangle_type

    q = torch.empty(1, 1, 128, head_dim, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(1, 1, 128, device="meta")
    packed = PackedTable(torch.empty(4, dtype=torch.int32, device="meta"), (1,)) if mask == "packed" else None
    g = Gradients(q, q, q, q, q, lse, None, plan_for(step, head_dim, deterministic, mask), order := Order(1, 0, 2, 2))
    launch = launches(step, g, order, True, 0, 1.0, packed)[number]
    kernel, kinds = kernel_of(launch.kernel), map(mangle_type, (*arguments_of(g, launch), *launch.numbers))
    names = [name for name in kernel.arg_names if name not in launch.constants]
    signature = dict(zip(names, kinds, strict=True))
    # A launch tells the compiler that tensors start at multiples of 16 bytes.
    aligned = [name for name, kind in signature.items() if kind[0] == "*"]
    compiled = compile_gluon(kernel, signature, launch.constants, aligned, launch.warps)
    return read_assembly(narrow_kernel(compiled, launch.depth), kernel.__name__)
