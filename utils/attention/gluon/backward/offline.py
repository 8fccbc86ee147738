"""Compile the kernels of the backward ladder for Hopper without a GPU, and read registers, spills and instructions."""

from __future__ import annotations

import torch

from utils.attention.gluon.backward.arguments import Gradients, Launch, box_of, kernel_of, launches
from utils.attention.gluon.backward.order import Order
from utils.attention.gluon.backward.plan import plan_for
from utils.attention.gluon.intervals import Packed
from utils.kernels.offline import Assembly, compile_gluon, read_assembly

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}


def compile_backward(
    step: int, head_dim: int = 128, *, dtype: str = "bf16", edges: int = 2, deterministic: bool = False, number: int = 1
) -> Assembly:
    """Compile a kernel of a backward pass for sm_90a; it takes all sizes.

    Args:
        step: 1, 3 or 6.
        head_dim: Head dimension; the tile is the next larger of 64, 128 and 256.
        dtype: "bf16" or "fp16".
        edges: As for `plan_for`.
        deterministic: Whether dQ is left to the kernel of `dq.py`.
        number: Of the launch: 0, the kernel before the step's own (1), or one that finishes.
    """
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    q = torch.empty(1, 1, 128, head_dim, dtype=kind, device="meta")
    packed = Packed(torch.empty(4, dtype=torch.int32, device="meta"), (1,)) if edges == 3 else None
    g = Gradients(
        q, q, q, q, q, torch.empty(1, 1, 128, device="meta"), None, plan_for(step, head_dim, deterministic, edges), 2
    )
    return compile_launch(g, launches(step, g, Order(1, 0, 2, 2), True, 0, 1.0, packed)[number])


def compile_launch(g: Gradients, launch: Launch) -> Assembly:
    """Compile the kernel of a launch."""
    from triton.experimental.gluon import language as gl

    kernel = kernel_of(launch.kernel)
    kinds = [f"*{TYPES[getattr(g, name).dtype]}" for name in launch.tensors]
    for i, (name, rows) in enumerate(zip(launch.tensors, launch.boxes, strict=False)):
        shape = box_of(g, name, rows)
        layout = gl.NVMMASharedLayout(*((128, 16) if len(shape) == 4 else (0, 32)), rank=len(shape))
        kinds[i] = f"tensordesc<{kinds[i][1:]}{shape},{layout!r}>"
    kinds += [
        f"*{TYPES[x.dtype]}" if isinstance(x, torch.Tensor) else {int: "i32", float: "fp32"}[type(x)]
        for x in launch.numbers
    ]
    names = [name for name in kernel.arg_names if name not in launch.constants]
    # A launch tells the compiler that tensors start at multiples of 16 bytes.
    aligned = [name for name, kind in zip(names, kinds, strict=True) if kind[0] == "*"]
    signature = dict(zip(names, kinds, strict=True))
    return read_assembly(compile_gluon(kernel, signature, launch.constants, aligned, launch.warps), kernel.__name__)
