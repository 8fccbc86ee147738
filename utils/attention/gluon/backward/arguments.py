"""Tensors, sizes and kernel launches of one backward pass. Importing this file imports no Triton."""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from utils.attention.gluon.arguments import descriptor, processors
from utils.attention.gluon.backward.order import Order
from utils.attention.gluon.backward.plan import BackwardPlan, span
from utils.kernels.assembling import narrow_kernel
from utils.kernels.handle import Handle

if TYPE_CHECKING:
    from utils.attention.gluon.intervals import PackedTable

GIVEN = "dout", "q", "k", "v", "out", "lse", "dlse", "dq", "dk", "dv"  # each of these tensors has its own memory


class Launch(NamedTuple):
    """A launch of one kernel of this package."""

    kernel: str  # its name, "module.function"
    grid: tuple[int, ...]
    tensors: tuple[str, ...]  # names of fields of `Gradients`
    numbers: tuple  # the arguments after the tensors
    constants: dict[str, Any]
    boxes: tuple[int, ...] = ()  # the first tensors become TMA descriptors with so many rows in a box
    warps: int = 4
    early: bool = False  # whether the kernel may begin while the launch before it ends
    depth: int = 0  # columns of dV and dK that are computed; 0: all


class Gradients:
    """The tensors of one backward pass: q, out, dout (B, H, Sq, D), k, v (B, Hkv, Sk, D), not empty; lse, dlse (B, H, Sq) fp32.

    dlse: gradient of the log-sum-exp, or None. order: the cut of blocks into pieces, which sets the memory for sums. This class
    makes dq, dk, dv and the memory between the launches.
    """

    def __init__(
        self, dout, q, k, v, out, lse, dlse: torch.Tensor | None, plan: BackwardPlan, order: Order, dq_pieces=1
    ):
        self.dout, self.q, self.k, self.v, self.out, self.lse, self.plan = dout, q, k, v, out, lse, plan
        self.dlse = lse if dlse is None else dlse
        self.parts_each = 1 if plan.dq else order.pieces  # sums for each block of keys in pieces
        self.dq_pieces, self.summed = dq_pieces, plan.dq or dq_pieces > 1
        heads, rows, width = q.shape[0] * q.shape[1], -(-q.shape[2] // 128) * 128, plan.block_d
        self.dq, self.dk, self.dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        # The launches share one piece of memory. The counter's single number comes last, so all parts begin at multiples of 16 bytes.
        numbers = (
            2 * heads * rows,
            heads * rows * width * self.summed,
            self.parts_each * order.slots // order.pieces * 2 * plan.block_n * width,
            1,
        )
        self.between = lse.new_empty(sum(numbers))
        statistics, sums, self.parts, counter = self.between.split(numbers)  # parts: sums of dK and dV (`shares.py`)
        self.lse2, self.delta = statistics.view(2, heads, rows)  # lse * log2(e), rowsum(dO * O)
        self.sums = sums.view(-1, 128) if self.summed else self.lse2  # sums of dQ, or a pointer that no kernel uses
        self.counter = counter.view(torch.int32)  # counts the numbers that programs have drawn (`shares.py`)

    def place(self, name: str) -> tuple[int, int]:
        """Return where a tensor begins: (number in GIVEN, or the number of `between` after these; bytes behind that address)."""
        if name in GIVEN:
            return GIVEN.index(name), 0
        return len(GIVEN), 4 * getattr(self, name).storage_offset()


def arguments_of(g: Gradients, launch: Launch) -> list:
    """Return the first arguments of a launch: TMA descriptors, and tensors for pointers."""
    found: list = [getattr(g, name) for name in launch.tensors]
    for i, rows in enumerate(launch.boxes):
        matrix = (rows, 128) if launch.tensors[i] == "sums" else (1, rows)
        found[i] = descriptor(found[i], *((rows, g.plan.block_d) if found[i].ndim == 4 else matrix))
    return found


def launches(
    step: int, g: Gradients, order: Order, causal: bool, window: int, scale: float, packed: PackedTable | None = None
) -> list[Launch]:
    """Return the launches of a backward pass: `start_backward`, perhaps a kernel for dQ, the step, perhaps `finish_backward`."""
    plan, (batch, heads, sq, head_dim), (_, kv_heads, sk, _) = g.plan, g.q.shape, g.k.shape
    rows, width = g.lse2.shape[1], plan.block_d
    for_parts = order.slots // order.pieces * plan.block_n * width // 2048
    # The unit of 8 elements tells the compiler that rows begin at multiples of 16 bytes.
    strides = [n // 8 for x in (g.out, g.dout) for n in x.stride()[:3]]
    tensors: tuple[str, ...] = ("out", "dout", "lse", "dlse", "lse2", "delta", "sums", "parts", "counter")
    numbers: tuple = (*strides, sq, heads, head_dim // 8, width // 64 * g.summed, for_parts * plan.dq)
    constants: dict[str, Any] = {"DLSE": g.dlse is not g.lse}
    found = [Launch("fragments.start_backward", (rows // 64, batch * heads), tensors, numbers, constants)]
    blocks_n = -(-sk // plan.block_n) if packed is None else len(packed.blocks)
    sizes = sq, sk, *(span(causal, window) if packed is None else (packed.table, 0)), heads, kv_heads
    blocks = blocks_n, order.section, batch * kv_heads, order.whole, order.pieces
    if not plan.dq:
        keys, grid = 128 if width == 64 else 64, (-(-sq // 128) * batch * heads * g.dq_pieces,)
        tensors, constants = ("q", "dout", "k", "v", "dq", "lse2", "delta", "sums"), {"PLAN": replace(plan, depth=0)}
        more = (*sizes, g.dq_pieces, scale), constants, (64, 64, keys, keys, 64)
        found.append(Launch("dq.attention_backward_dq", grid, tensors, *more, early=True))
    found.append(step_launch(step, g, sizes, blocks, order.whole + order.slots, scale))
    programs = for_parts + rows // 64 * batch * heads * width // 64 * g.summed
    if programs:
        tensors = "sums", "dq", "parts", "dv", "dk"
        numbers = *sizes[:3], head_dim // 8, width // 64, *blocks[:-1], g.parts_each, for_parts, scale
        constants = {"TABLE": packed is not None}
        found.append(Launch("fragments.finish_backward", (programs,), tensors, numbers, constants, early=True))
    return found


def step_launch(step: int, g: Gradients, sizes: tuple, blocks: tuple, programs: int, scale: float) -> Launch:
    """Return the launch of the kernel of a step."""
    tensors: tuple[str, ...] = ("q", "dout", "k", "v", "dk", "dv", "lse2", "delta")
    plan, m, n = g.plan, g.plan.block_m, g.plan.block_n
    boxes: tuple[int, ...] = (m, m, n, n, n, n, m, m)
    if step < 6:
        kernel = ("step1_atomics" if step == 1 else "step3_warp_specialized") + f".attention_backward_step{step}"
        tensors, boxes = ("q", "dout", "k", "v", "lse2", "delta", "dk", "dv", "sums"), (m, m, n, n, m, m)
        grid, constants = (blocks[2], blocks[0]), {"HEAD_DIM": g.q.shape[-1], "PLAN": plan}
        return Launch(kernel, grid, tensors, (*sizes, scale), constants, boxes if step == 3 else (), early=step == 3)
    if plan.block_d == 256:
        kernel, numbers = "wide_heads.attention_backward_wide", (*sizes, *blocks, scale)
        return Launch(kernel, (programs,), (*tensors, "parts"), numbers, {"PLAN": plan}, boxes, early=True)
    tensors = *tensors, "sums", "parts", "counter", "dk", "dv"
    # A tile of dQ is 64 rows of 128 numbers, or fewer rows (`storing_warp`). TMA adds up to 32 rows at once.
    boxes = *boxes, math.gcd(32, (plan.depth or 128) // 2)
    numbers = *sizes, *blocks, g.q.shape[-1] // 8, scale
    kernel, programs = "step6_one_consumer.attention_backward_step6", min(programs, processors(g.q.device))
    return Launch(kernel, (programs,), tensors, numbers, {"PLAN": plan}, boxes, 8, early=True, depth=plan.depth)


def run(g: Gradients, launch: Launch) -> Handle | None:
    """Compile a kernel and return its launch. In the simulator, run the kernel and return None."""
    kernel, tensors = kernel_of(launch.kernel), arguments_of(g, launch)
    rest = *launch.numbers, *launch.constants.values()
    options = {"num_warps": launch.warps, "launch_pdl": launch.early}
    if not g.q.is_cuda:
        return kernel[launch.grid](*tensors, *rest, **options)
    compiled = narrow_kernel(kernel.warmup(*tensors, *rest, grid=launch.grid, **options), launch.depth)
    places = [g.place(name) for name in launch.tensors]
    return Handle(compiled, launch.grid, tensors, rest, g.q.device.index, places=places)


@functools.cache
def kernel_of(name: str):
    """Import a kernel of this package by its name "module.function"; this imports Triton."""
    module, name = name.split(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)
