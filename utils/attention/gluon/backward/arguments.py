"""One backward pass to launch: tensors and sizes, the kernels that compute it, and their launches. No Triton yet."""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from utils.attention.gluon.arguments import descriptor
from utils.attention.gluon.backward.order import Order, order_of
from utils.attention.gluon.backward.plan import BackwardPlan, span

LOG2_E = math.log2(math.e)


@functools.lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """SMs of a GPU; those of an H100 or H200 where a kernel is simulated."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


class Launch(NamedTuple):
    """A launch of one kernel of this package."""

    module: str
    kernel: str
    grid: tuple[int, ...]
    tensors: tuple[str, ...]  # names of fields of `Gradients`: pointers, or TMA descriptors where `boxes` names them
    boxes: dict[str, int]  # rows of the box of a TMA descriptor
    numbers: tuple  # the arguments behind the tensors
    constants: dict[str, Any]
    warps: int = 4


@dataclass(slots=True)
class Gradients:
    """One backward pass: q, out, dout (B, H, Sq, D), k, v (B, Hkv, Sk, D), not empty; lse, dlse (B, H, Sq) fp32.

    The tensors from `dq` on are made here.
    """

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None  # gradient of the log-sum-exp, if it was used
    plan: BackwardPlan
    programs: int  # that add parts of dK and dV; 0: no blocks are shared

    dq: torch.Tensor = field(init=False)
    dk: torch.Tensor = field(init=False)
    dv: torch.Tensor = field(init=False)
    lse2: torch.Tensor = field(init=False)  # (B * H, rows) fp32: lse * log2(e)
    delta: torch.Tensor = field(init=False)  # (B * H, rows) fp32: rowsum(dO * O)
    sums: torch.Tensor = field(init=False)  # of dQ, B * H * rows * block_d, fp32, rows of 128
    parts: torch.Tensor = field(init=False)  # of dK and dV (`shares.py`)

    def __post_init__(self):
        q, width = self.q, self.plan.block_d
        batch, heads, sq, _ = q.shape
        rows = -(-sq // 128) * 128
        self.dq, self.dk, self.dv = (torch.empty(x.shape, dtype=q.dtype, device=q.device) for x in (q, self.k, self.v))
        self.lse2, self.delta = self.lse.new_empty((2, batch * heads, rows)).unbind()
        # Where nothing is summed in memory, the kernels get a pointer that they do not use.
        self.sums = self.lse.new_empty((batch * heads * rows * width // 128, 128)) if self.plan.dq else self.lse2
        self.parts = self.lse.new_empty(2 * self.programs * 256 * width) if self.programs else self.lse2
        self.dlse = self.lse if self.dlse is None else self.dlse


def flat_descriptor(x: torch.Tensor, box: list[int]):
    """TMA descriptor of a matrix of fp32 numbers."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, gl.NVMMASharedLayout(0, 32, rank=2))


def argument(g: Gradients, launch: Launch, name: str):
    """Return what a kernel gets for a tensor: a TMA descriptor or the tensor."""
    x = getattr(g, name)
    if name not in launch.boxes:
        return x
    if name == "sums":
        # A piece of the sums: 4096 numbers that follow each other.
        return flat_descriptor(x, [32, 128])
    if name in ("lse2", "delta"):
        return flat_descriptor(x, [1, launch.boxes[name]])
    return descriptor(x, launch.boxes[name], g.plan.block_d)


def launches(
    step: int, g: Gradients, order: Order, causal: bool, window: int, scale: float, dlse: bool
) -> list[Launch]:
    """Return the launches of a backward pass: `start_backward`, the step's own kernel, and those that finish."""
    plan, (batch, heads, sq, head_dim), (_, kv_heads, sk, _) = g.plan, g.q.shape, g.k.shape
    rows, total, wide, c = g.lse2.shape[1], batch * kv_heads, plan.block_d == 256, scale * LOG2_E
    blocks_n = -(-sk // plan.block_n)
    sizes = sq, sk, *span(causal, window), heads, kv_heads, heads // kv_heads, rows // plan.block_m
    blocks = blocks_n, order.section, total, order.units

    def strides(x):
        return tuple(n // 8 for n in x.stride()[:3])

    found = [
        Launch(
            *("fragments", "start_backward", (rows // 64, batch * heads)),
            ("out", "dout", "lse", "dlse", "lse2", "delta", "sums"),
            {},
            (*strides(g.out), *strides(g.dout), sq, heads, rows, head_dim // 8),
            {"BLOCK_D": plan.block_d, "CLEAR": plan.dq, "DLSE": dlse},
        )
    ]
    constants = {"PLAN": plan}
    boxes = dict.fromkeys(("q", "dout", "lse2", "delta"), plan.block_m) | {"k": plan.block_n}
    rowwise = "q", "dout", "k", "v", "dk", "dv", "lse2", "delta"
    if step == 1:
        tensors = "q", "dout", "k", "v", "dk", "dv", "lse2", "delta", "sums"
        numbers = *sizes, rows, c, scale
        constants = {"HEAD_DIM": head_dim} | constants
        found.append(
            Launch("step1_atomics", "attention_backward_step1", (total, blocks_n), tensors, {}, numbers, constants)
        )
    elif wide or step == 3:
        module, name = ("wide_heads", "wide") if wide else ("step3_warp_specialized", "step3")
        boxes |= dict.fromkeys(("v", "dk", "dv"), 64)
        tensors = rowwise if wide else (*rowwise, "sums")
        numbers = *sizes, *blocks, c, scale
        found.append(
            Launch(module, f"attention_backward_{name}", (order.programs,), tensors, boxes, numbers, constants)
        )
    else:
        boxes |= dict.fromkeys(("v", "dk", "dv"), plan.block_n) | {"sums": 32}
        tensors = *rowwise, "sums", "parts"
        numbers = *sizes, *blocks, c, scale
        name = "attention_backward_step6"
        found.append(Launch("step6_one_consumer", name, (order.programs,), tensors, boxes, numbers, constants, 8))
        if order.units:
            grid = blocks_n * total * 2, 2, plan.block_d // 32
            numbers = *strides(g.dk), *sizes, *blocks, scale, order.programs, head_dim // 8
            found.append(Launch("shares", "finish_parts", grid, ("parts", "dv", "dk"), {}, numbers, constants))
    if plan.dq:
        grid = plan.block_d // 64, rows // 64, batch * heads
        numbers = *strides(g.dq), sq, heads, rows, head_dim // 8, plan.block_d // 64, scale
        found.append(Launch("fragments", "finish_dq", grid, ("sums", "dq"), {}, numbers, {"FRAGMENTS": step > 1}))
    else:
        keys, tiles = 128 if plan.block_d == 64 else 64, -(-sq // 128)
        boxes = {"q": 64, "dout": 64, "k": keys, "v": keys, "dq": 64}
        numbers = *sizes, rows, tiles, batch * heads, c, scale
        found.append(
            Launch(
                *("dq", "attention_backward_dq", (tiles * batch * heads,), (*boxes, "lse2", "delta"), boxes, numbers),
                constants,
            )
        )
    return found


def run(g: Gradients, launch: Launch):
    """Launch a kernel; return a `Handle` that repeats the launch, or None where it was simulated."""
    from utils.kernels.handle import Handle

    kernel = kernel_of(launch.module, launch.kernel)
    tensors = [argument(g, launch, name) for name in launch.tensors]
    compiled = kernel[launch.grid](*tensors, *launch.numbers, **launch.constants, num_warps=launch.warps)
    if compiled is None or not g.q.is_cuda:
        return None
    rest = *launch.numbers, *launch.constants.values()
    return Handle(compiled, launch.grid, tensors, rest, g.q.device.index)


@functools.cache
def kernel_of(module: str, name: str):
    """Import a kernel of this package (imports Triton)."""
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def find_order(step: int, q: torch.Tensor, k: torch.Tensor, plan: BackwardPlan, causal: bool, window: int) -> Order:
    """Return the order of blocks for these tensors on their GPU."""
    (batch, heads, sq, _), (_, kv_heads, sk, _) = q.shape, k.shape
    shares = step == 6 and plan.block_d < 256
    return order_of(
        *(plan, sq, sk, batch * kv_heads, heads // kv_heads), processors(q.device), span(causal, window), shares
    )
