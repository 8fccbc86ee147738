"""Start the FP8 GEMM: describe the operands for TMA, choose a configuration, launch, keep the launch.

The caller, `utils.kernels.gemm_fp8`, has checked the operands: A row-major, B column-major, rows of both at multiples of
16 bytes, scales in fp32.
"""

from dataclasses import dataclass, replace

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from utils.kernels.gemm_fp8_gluon import gemm_fp8_kernel
from utils.kernels.gemm_fp8_plan import FAST_CONFIGS, Fp8Config, choose
from utils.kernels.gemm_launch import box_layout, rows_by_parity, tma_can_store
from utils.kernels.gemm_plan import parts_of
from utils.kernels.gemm_ptx import adapted, start
from utils.kernels.handle import Handle
from utils.kernels.workspace import workspace


@dataclass(frozen=True)
class Launch:
    """A launch that was made, to be repeated on operands of the same shapes, strides and alignment."""

    handle: Handle
    shape: tuple[int, int]
    out_dtype: torch.dtype
    partial_sums: int
    counters: int

    def __call__(self, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
        """Return C = (A scale_a) @ (B scale_b)."""
        c = torch.empty(self.shape, dtype=self.out_dtype, device=a.device)
        sums, counters = workspace(c, self.partial_sums, self.counters)
        self.handle(a, b, b, c, c, sums, counters, scale_a, scale_b)
        return c


def chosen(a: torch.Tensor, b: torch.Tensor, fast: bool) -> Fp8Config:
    """Return the configuration that is estimated to be the fastest for A (M, K) and B (K, N)."""
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    late = int(a.stride(0) % 32 > 0), int(b.stride(1) % 32 > 0)  # every second row is at an odd multiple of 16 bytes
    return choose(a.shape[0], b.shape[1], a.shape[1], sms, fast, late)


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    c: torch.Tensor,
    fast: bool,
    config: Fp8Config | None = None,
) -> Launch | None:
    """Start the kernel. Nothing is empty.

    Args:
        a: e4m3 (M, K), row-major.
        b: e4m3 (K, N), column-major.
        scale_a: fp32, one number or M.
        scale_b: fp32, one number or N, as many as rows have.
        c: bf16 or fp16 (M, N), contiguous.
        fast: whether the tensor cores add all of K.
        config: a configuration; None for the one with the shortest estimated time.
    """
    (m, k), n = a.shape, b.shape[1]
    config = (config or chosen(a, b, fast)).placed(b.shape[1], True, simulated=not a.is_cuda)
    if config.split > triton.cdiv(k, config.block_k):
        raise ValueError(f"{config.split} parts of K = {k} would be shorter than one step of {config.block_k}.")
    first, second = config.columns
    a_desc = operand(a, config.box("A", config.rows, config.block_k))
    b_desc = operand(b.T, config.box("B", config.block_k, first, True))
    b2_desc = operand(b.T, config.box("B", config.block_k, second, True)) if second else b_desc
    by_tma = tma_can_store(c)
    c_desc = TensorDescriptor(c, [m, n], [n, 1], config.piece, box_layout(config.piece)) if by_tma else a_desc
    if config.pairs:
        if m % 2 or not by_tma:
            raise ValueError(f"{config} takes rows by their parity: an even number of rows, and C by TMA.")
        a_desc, c_desc = (
            rows_by_parity(a, config.box("A", config.rows, config.block_k)),
            rows_by_parity(c, config.piece),
        )
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    whole, rest = parts_of(m, n, config, sms)
    config = config if rest else replace(config, split=1)  # no tile has parts: there are no counters to compile for
    tiles = rest * config.cluster
    partial_sums, counters_needed = tiles * config.split * config.block_m * config.block_n, tiles * config.consumers
    blocks = config.cluster * min(sms // config.cluster, whole + rest * config.split)
    by_row = scale_a.numel() > 1 or scale_b.numel() > 1
    with torch.cuda.device(a.device if a.is_cuda else -1):
        sums, counters = workspace(c, partial_sums, counters_needed)
        tensors = (a_desc, b_desc, b2_desc, c_desc, c, sums, counters, scale_a, scale_b)
        others = (m, n, k, whole, replace(config, width=0), by_row, by_tma)
        handle = start(gemm_fp8_kernel, blocks, tensors, others, config, a.device)
    return Launch(handle, (m, n), c.dtype, partial_sums, counters_needed) if handle else None


def operand(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Return a TMA descriptor of a row-major e4m3 matrix."""
    rows, columns = x.shape
    pitch = x.stride(0) if rows > 1 else triton.cdiv(columns, 16) * 16  # there is no second row: any pitch will do
    return TensorDescriptor(x, [rows, columns], [pitch, 1], block, box_layout(block, gl.float8e4nv))


def compile_for_hopper(
    config: Fp8Config = FAST_CONFIGS[0], dtype: str = "bf16", *, by_row: bool = False, by_tma: bool = True
):
    """The kernel compiled for sm_90a, on any machine: `.asm["ptx"]`, `.asm["cubin"]`, `.metadata.shared`."""
    from utils.kernels.offline import compile_gluon

    def descriptor(shape: list[int], dtype: str = "fp8e4nv", kind: gl.dtype = gl.float8e4nv) -> str:
        return f"tensordesc<{dtype}{shape},{box_layout(shape, kind)!r}>"

    config = config.placed(4096, True)
    first, second = config.columns
    one = [1] if config.pairs else []
    a = descriptor([*one, *config.box("A", config.rows, config.block_k)])
    signature = {
        "a_desc": a,
        "b_desc": descriptor(config.box("B", config.block_k, first, True)),
        "b2_desc": descriptor(config.box("B", config.block_k, second or first, True)),
        "c_desc": descriptor([*one, *config.piece], dtype, gl.float16) if by_tma else a,
        "c_pointer": f"*{dtype}",
        "sums": "*fp32" if config.split > 1 else f"*{dtype}",
        "counters": "*i32" if config.split > 1 else f"*{dtype}",
        "scale_a": "*fp32",
        "scale_b": "*fp32",
        **dict.fromkeys(("M", "N", "K", "whole"), "i32"),
    }
    constants = {"CONFIG": config, "BY_ROW": by_row, "TMA_STORE": by_tma}
    compiled = compile_gluon(gemm_fp8_kernel, signature, constants)
    return adapted(compiled, config) if config.rewritten else compiled
