"""Start the Gluon GEMM's kernels: describe the operands for TMA, choose a plan, launch, keep the launch.

`gemm_and_launch` returns C and the launch, which can be repeated on operands of the same shapes, strides and alignment without
deciding anything again: that is how `utils.kernels.gemm` keeps a call cheap.
"""

from dataclasses import dataclass, replace

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from utils.kernels.gemm_gluon import gemm_kernel, short_kernel
from utils.kernels.gemm_plan import BLOCK_K, Plan, choose, clusters_at_once, items_of
from utils.kernels.gemm_ptx import adapted
from utils.kernels.handle import Handle
from utils.kernels.workspace import workspace


@dataclass(frozen=True)
class Launch:
    """A launch that was made, to be repeated on A and B of the same shapes, strides and alignment."""

    handle: Handle
    plan: Plan
    shape: tuple[int, int]
    partial_sums: (
        int  # fp32 numbers and int32 counters of tiles in parts; one of each, never touched, if there are none
    )
    counters: int

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return C = A @ B."""
        c = torch.empty(self.shape, dtype=a.dtype, device=a.device)
        self.handle(a, b, c, c, *workspace(c, self.partial_sums, self.counters))
        return c


def gemm_and_launch(
    a: torch.Tensor, b: torch.Tensor, plan: Plan | None = None, split: int = 1
) -> tuple[torch.Tensor, Launch | None]:
    """Return C (M, N) = A (M, K) @ B (K, N) and the launch, to be repeated on operands like these; None if nothing was launched.

    Both are fp16 or bf16, each row- or column-major; the caller has checked them.
    """
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    if not c.numel():
        return c, None
    if a.shape[1] == 0:
        return c.zero_(), None
    return c, launch(a, b, c, plan, split)


def launch(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, plan: Plan | None = None, split: int = 1
) -> Launch | None:
    """Start the kernel of a plan, the one with the shortest estimated time by default. Nothing is empty.

    Args:
        a: (M, K).
        b: (K, N).
        c: (M, N), contiguous.
        plan: a plan.
        split: with a plan, into how many parts the tiles are cut that do not fill a round.

    Returns:
        The launch, or None in a process that only simulates kernels.
    """
    (m, k), n = a.shape, b.shape[1]
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    if plan is None:
        plan, split = choose(m, n, k, sms, lateness("A", a), lateness("B", b))
    if split > max(1, triton.cdiv(k, BLOCK_K)):
        raise ValueError(f"{split} parts of K = {k} would be shorter than one step of {BLOCK_K}.")
    plan = replace(plan, simulated=not a.is_cuda)
    items = items_of(m, n, plan, split, sms)
    a_desc, a_column_major = operand("A", a, plan.rows, BLOCK_K, plan)
    b_desc, b_column_major = operand("B", b, BLOCK_K, plan.block_n, plan)
    by_tma = c.stride(0) % 8 == 0 and c.data_ptr() % 16 == 0
    c_desc = TensorDescriptor(c, [*c.shape], [c.stride(0), 1], plan.piece, box_layout(plan.piece)) if by_tma else a_desc
    # Not by what `workspace` returns for nothing: a kernel with other types of arguments would be compiled once more.
    partial_sums = max(1, plan.cluster * items.rest * items.split * plan.block_m * plan.block_n)
    counters = max(1, plan.cluster * items.rest * plan.consumers)
    # The short kernel has a block for each item; the other a block an SM, or an item where there are fewer.
    groups = items.number if plan.short else min(clusters_at_once(plan.cluster, sms), items.number)
    kernel, blocks = short_kernel if plan.short else gemm_kernel, groups * plan.cluster
    rest = (m, n, k, items.whole, items.split, plan, a_column_major, b_column_major, by_tma)
    with torch.cuda.device(a.device if a.is_cuda else -1):
        tensors = (a_desc, b_desc, c_desc, c, *workspace(c, partial_sums, counters))
        options = {"num_warps": 4, "launch_pdl": True}
        if not a.is_cuda:
            kernel[(blocks,)](*tensors, *rest, **options)
            return None
        compiled = adapted(kernel.warmup(*tensors, *rest, grid=(blocks,), **options), plan)
        handle = Handle(compiled, (groups,), tensors, rest, a.device.index, plan.cluster)
        handle(a, b, c, *tensors[3:])
    return Launch(handle, plan, (m, n), partial_sums, counters)


def box_layout(shape: list[int]) -> gl.NVMMASharedLayout:
    """Return the layout in shared memory of a box that TMA copies, swizzled as wgmma reads it; the same for fp16 and bf16."""
    return gl.NVMMASharedLayout.get_default_for(shape, gl.float16)


def rows_in_memory(label: str, x: torch.Tensor) -> tuple[int, int, int, bool]:
    """Return how a matrix lies in memory: rows, elements of a row, elements from row to row, whether it is transposed."""
    for column_major, y in ((False, x), (True, x.T)):
        (outer, inner), pitch = y.shape, y.stride(0)
        if outer == 1:
            pitch = triton.cdiv(inner, 8) * 8  # there is no second row: any pitch will do
        if (y.stride(1) == 1 or inner == 1) and pitch % 8 == 0 and pitch >= inner and x.data_ptr() % 16 == 0:
            return outer, inner, pitch, column_major
    raise ValueError(
        f"gemm_warp_specialized copies {label} by TMA, which needs rows (or columns) of neighbouring elements that "
        f"start at multiples of 16 bytes; got {label} {tuple(x.shape)} with strides {x.stride()} elements, "
        f"{x.data_ptr() % 16} bytes past a multiple of 16. Pad its rows to a multiple of 8 elements, copy it with "
        ".contiguous() or .clone(), or use gemm_autotuned."
    )


def operand(label: str, x: torch.Tensor, rows: int, columns: int, plan: Plan) -> tuple[TensorDescriptor, bool]:
    """Return a TMA descriptor of a matrix and whether it describes the transpose, for a column-major one."""
    outer, inner, pitch, column_major = rows_in_memory(label, x)
    box = plan.box(label, rows, columns, column_major)
    return TensorDescriptor(x, [outer, inner], [pitch, 1], box, box_layout(box)), column_major


def lateness(label: str, x: torch.Tensor) -> bool:
    """Whether every second row in memory starts at an odd multiple of 16 bytes, so that 128 bytes of it lie in five sectors."""
    return rows_in_memory(label, x)[2] % 16 != 0


def compile_for_hopper(
    plan: Plan, dtype: str = "bf16", *, a_column_major: bool = False, b_column_major: bool = False, by_tma: bool = True
):
    """The kernel compiled for sm_90a, on any machine: `.asm["ptx"]`, `.asm["cubin"]`, `.metadata.shared`."""
    from utils.kernels.offline import compile_gluon

    def descriptor(box: list[int]) -> str:
        return f"tensordesc<{dtype}{box},{box_layout(box)!r}>"

    a = descriptor(plan.box("A", plan.rows, BLOCK_K, a_column_major))
    signature = {
        "a_desc": a,
        "b_desc": descriptor(plan.box("B", BLOCK_K, plan.block_n, b_column_major)),
        "c_desc": descriptor(plan.piece) if by_tma else a,
        "c_pointer": f"*{dtype}",
        "sums": "*fp32",
        "counters": "*i32",
        **dict.fromkeys(("M", "N", "K", "whole", "split"), "i32"),
    }
    orders = {"A_COLUMN_MAJOR": a_column_major, "B_COLUMN_MAJOR": b_column_major}
    constants = {"PLAN": plan, **orders, "TMA_STORE": by_tma}
    kernel = short_kernel if plan.short else gemm_kernel
    return adapted(compile_gluon(kernel, signature, constants, ["c_pointer", "sums", "counters"]), plan)
