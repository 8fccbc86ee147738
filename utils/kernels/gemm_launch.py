"""Start the GEMM's Gluon kernels: describe the operands for TMA, choose a configuration, launch, keep the launch.

`gemm(a, b)` is one product. `gemm_and_launch` also returns the launch, which can be repeated on operands of the same
shapes, strides and alignment without deciding anything again: that is how `utils.kernels.gemm` keeps a call cheap.
"""

from dataclasses import dataclass, replace

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from utils.kernels.gemm_choose import choose
from utils.kernels.gemm_config import Config
from utils.kernels.gemm_gluon import gemm_kernel
from utils.kernels.gemm_plan import CONFIGS, clusters_at_once, items_of, partial_tiles, parts_of
from utils.kernels.gemm_ptx import adapted, start
from utils.kernels.gemm_short import short_kernel
from utils.kernels.handle import Handle
from utils.kernels.workspace import workspace


def gemm(a: torch.Tensor, b: torch.Tensor, config: Config | None = None) -> torch.Tensor:
    """C (M, N) = A (M, K) @ B (K, N): fp16 or bf16, each row- or column-major. The caller has checked them."""
    return gemm_and_launch(a, b, config)[0]


def gemm_and_launch(
    a: torch.Tensor, b: torch.Tensor, config: Config | None = None
) -> tuple[torch.Tensor, "Launch | None"]:
    """Return C, and the launch, to be repeated on operands like these; None if nothing was launched."""
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    if not c.numel():
        return c, None
    if a.shape[1] == 0:
        return c.zero_(), None
    return c, launch(a, b, c, config)


@dataclass(frozen=True)
class Launch:
    """A launch that was made, to be repeated on A and B of the same shapes, strides and alignment."""

    handle: Handle
    config: Config
    shape: tuple[int, int]
    partial_sums: int
    counters: int

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return C = A @ B."""
        c = torch.empty(self.shape, dtype=a.dtype, device=a.device)
        sums, counters = workspace(c, self.partial_sums, self.counters)
        if self.config.transposed:
            a, b = b, a
        if self.config.short:
            self.handle(a, b, c, c, sums, counters)
        else:
            self.handle(a, b, b, c, c, sums, counters)
        return c


def tma_can_store(c: torch.Tensor) -> bool:
    """Whether rows of C start at multiples of 16 bytes."""
    return c.stride(0) % 8 == 0 and c.data_ptr() % 16 == 0


def chosen(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Config:
    """Return the configuration that is estimated to be the fastest for A (M, K), B (K, N) and C (M, N)."""
    return choose(*problem(a, b, tma_can_store(c)))


def problem(a: torch.Tensor, b: torch.Tensor, by_tma: bool) -> tuple[int, int, int, int, tuple[int, int], bool]:
    """Return what `gemm_choose.choose` takes for A (M, K) and B (K, N): M, N, K, SMs, lateness, and whether TMA stores C."""
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    late = lateness("A", a, by_tma), lateness("B", b)
    return a.shape[0], b.shape[1], a.shape[1], sms, late, by_tma


def launch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, config: Config | None = None) -> Launch | None:
    """Start the kernel of a configuration. Nothing is empty.

    Args:
        a: (M, K).
        b: (K, N).
        c: (M, N), contiguous; where N is a multiple of 8, its rows may be further apart.
        config: a configuration; None for the one with the shortest estimated time.
    """
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    by_tma = tma_can_store(c)
    config = config or chosen(a, b, c)
    if config.transposed:
        if not by_tma:
            raise ValueError(f"{config} stores the transpose of C by TMA: rows of C start at multiples of 16 bytes.")
        a, b = b.T, a.T
    (m, k), n = a.shape, b.shape[1]
    if config.split > triton.cdiv(k, config.block_k):
        raise ValueError(f"{config.split} parts of K = {k} would be shorter than one step of {config.block_k}.")
    if config.in_cluster and not by_tma:
        raise ValueError(f"{config} stores C by TMA: rows of C start at multiples of 16 bytes.")
    config = config.placed(n, rows_in_memory("B", b)[3], simulated=not a.is_cuda)
    first, second = config.columns[0], config.brought
    a_desc, a_column_major = operand("A", a, [config.rows, config.block_k], config)
    if config.pairs and (m % 2 or a_column_major or not by_tma):
        raise ValueError(f"{config} takes rows by their parity: an even number of rows of A, row-major, and C by TMA.")
    if config.pairs:
        a_desc = rows_by_parity(a, config.box("A", config.rows, config.block_k))
    b_desc, b_column_major = operand("B", b, [config.block_k, first], config)
    piece = config.piece[::-1] if config.transposed else config.piece
    c_desc = TensorDescriptor(c, [*c.shape], [c.stride(0), 1], piece, box_layout(piece)) if by_tma else a_desc
    c_desc = rows_by_parity(c, piece) if config.pairs else c_desc
    whole, rest = parts_of(m, n, config, sms)
    if not (rest or config.in_cluster):  # no tile has parts: there are no counters to compile for
        config = replace(config, split=1)
    items = items_of(m, n, config, sms)
    partial_sums = partial_tiles(m, n, config, sms) * config.block_m * config.block_n if rest else 0
    counters_needed = rest * config.cluster * config.consumers
    tensors: tuple[TensorDescriptor | torch.Tensor, ...]
    sizes: tuple[int, ...]
    with torch.cuda.device(a.device if a.is_cuda else -1):
        sums, counters = workspace(c, partial_sums, counters_needed)
        if config.short:  # a block for each item of work
            kernel, blocks = short_kernel, items
            tensors, sizes = (a_desc, b_desc, c_desc, c, sums, counters), (m, n, k)
        else:  # a block an SM, or an item where there are fewer; both blocks of a cluster work on the same items
            clusters = items if config.in_cluster else min(clusters_at_once(config.cluster, sms), items)
            kernel, blocks = gemm_kernel, config.cluster * clusters
            b2_desc = operand("B", b, [config.block_k, second], config)[0] if second else b_desc
            tensors, sizes = (a_desc, b_desc, b2_desc, c_desc, c, sums, counters), (m, n, k, whole)
        others = (*sizes, replace(config, width=0), a_column_major, b_column_major, by_tma)
        handle = start(kernel, blocks, tensors, others, config, a.device)
    return Launch(handle, config, (*c.shape,), partial_sums, counters_needed) if handle else None


def box_layout(shape: list[int], dtype: gl.dtype = gl.float16) -> gl.NVMMASharedLayout:
    """Return the layout in shared memory of a box that TMA copies: swizzled as wgmma reads it.

    Only the width of a type counts: fp16 and bf16 have the same layout.
    """
    return gl.NVMMASharedLayout.get_default_for(shape, dtype)


def is_row_major(x: torch.Tensor) -> bool:
    """Whether the neighbours in a row of a matrix are neighbours in memory."""
    return x.stride(1) == 1 or x.shape[1] == 1


def rows_in_memory(label: str, x: torch.Tensor) -> tuple[int, int, int, bool]:
    """Return how a matrix lies in memory: rows, elements of a row, elements from row to row, whether it is transposed."""
    for column_major, y in ((False, x), (True, x.T)):
        (outer, inner), pitch = y.shape, y.stride(0)
        if outer == 1:
            pitch = triton.cdiv(inner, 8) * 8  # there is no second row: any pitch will do
        if is_row_major(y) and pitch % 8 == 0 and pitch >= inner and x.data_ptr() % 16 == 0:
            return outer, inner, pitch, column_major
    raise ValueError(
        f"gemm_warp_specialized copies {label} by TMA, which needs rows (or columns) of neighbouring elements that "
        f"start at multiples of 16 bytes; got {label} {tuple(x.shape)} with strides {x.stride()} elements, "
        f"{x.data_ptr() % 16} bytes past a multiple of 16. Pad its rows to a multiple of 8 elements, copy it with "
        ".contiguous() or .clone(), or use gemm_autotuned."
    )


def operand(
    label: str, x: torch.Tensor, block: list[int], config: Config = CONFIGS[0]
) -> tuple[TensorDescriptor, bool]:
    """Return a TMA descriptor of a matrix and whether it describes the transpose, for a column-major one."""
    outer, inner, pitch, column_major = rows_in_memory(label, x)
    shape = config.box(label, block[0], block[1], column_major)
    return TensorDescriptor(x, [outer, inner], [pitch, 1], shape, box_layout(shape)), column_major


def rows_by_parity(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Return a TMA descriptor of a row-major matrix (2 R, K) as (2, R, K): even rows, odd rows."""
    (rows, columns), pitch = x.shape, x.stride(0)
    box = [1, *block]
    layout = box_layout(box, gl.float8e4nv if x.element_size() == 1 else gl.float16)
    return TensorDescriptor(x, [2, rows // 2, columns], [pitch, 2 * pitch, 1], box, layout)


def lateness(label: str, x: torch.Tensor, pairs: bool = True) -> int:
    """Return how rows of a matrix lie in memory, as `gemm_model.estimate` takes it.

    0 or 1 mean that they lie along K, 3 or 2 that they lie along M or N; 1 or 2 that every second row starts at an odd
    multiple of 16 bytes, so that 128 bytes of it are in five sectors. Rows along K that cannot be taken by parity (not
    `pairs`) are 2, too.
    """
    _, _, pitch, column_major = rows_in_memory(label, x)
    along_k = column_major == (label == "B")
    if pitch % 16 == 0:
        return 0 if along_k else 3
    return 1 if along_k and pairs else 2


def compile_for_hopper(
    config: Config = CONFIGS[0],
    dtype: str = "bf16",
    *,
    a_column_major: bool = False,
    b_column_major: bool = False,
    by_tma: bool = True,
    n: int = 4096,
):
    """The kernel compiled for sm_90a, on any machine: `.asm["ptx"]`, `.asm["cubin"]`, `.metadata.shared`."""
    from utils.kernels.offline import compile_gluon

    def descriptor(label: str, shape: list[int], transposed: bool = False, pairs: bool = False) -> str:
        shape = config.box(label, shape[0], shape[1], transposed)
        shape = [1, *shape] if pairs else shape
        return f"tensordesc<{dtype}{shape},{box_layout(shape)!r}>"

    config = config.placed(n, b_column_major)
    a = descriptor("A", [config.rows, config.block_k], a_column_major, config.pairs)
    piece = config.piece[::-1] if config.transposed else config.piece
    c = descriptor("C", piece, pairs=config.pairs) if by_tma else a
    first, second = config.columns[0], config.brought
    constants = {
        "CONFIG": replace(config, width=0),
        "A_COLUMN_MAJOR": a_column_major,
        "B_COLUMN_MAJOR": b_column_major,
        "TMA_STORE": by_tma,
    }
    signature = {
        "a_desc": a,
        "b_desc": descriptor("B", [config.block_k, first], b_column_major),
        "b2_desc": descriptor("B", [config.block_k, second or first], b_column_major),
        "c_desc": c,
        "c_pointer": f"*{dtype}",
        "sums": "*fp32" if config.split != 1 else f"*{dtype}",
        "counters": "*i32" if config.split != 1 else f"*{dtype}",
        **dict.fromkeys(("M", "N", "K", "whole"), "i32"),
    }
    compiled = compile_gluon(short_kernel if config.short else gemm_kernel, signature, constants)
    return adapted(compiled, config) if config.rewritten else compiled
