"""GEMM as a ladder: C = A @ B from one element at a time to the speed of the tensor cores.

A is (M, K), B is (K, N), any sizes, any strides (a transposed view costs no copy), fp32, fp16 or bf16. Sums are kept
in fp32; C has the dtype of its inputs. Every rung is a kernel for the GPU, compared with `torch.matmul`:

    rung                    new in it                                                        code
    gemm_naive              the three loops: a lane sums one element of C, nothing is        gemm_triton.py
                            reused, every product reads two elements from the cache
    gemm_tiled              a program computes 64 x 64 of C from tiles of A and B: each      gemm_triton.py
                            element read serves 64 products; fp16 and bf16 on tensor cores
    gemm_tiled_grouped      the same tile; loads run four tiles ahead, and programs that     gemm_triton.py
                            run together share rows of A and columns of B in the L2
    gemm_autotuned          the fastest tile, warps and stages for each size and layout:     gemm_triton.py
                            the first call of a size times all of them
    gemm_warp_specialized   Hopper: one warp keeps TMA copies in flight, two warpgroups      gemm_gluon.py
                            multiply 128 x 256 of C, stores overlap; fp16 and bf16

fp32 stays fp32 (no TF32), as in torch.matmul by default. The kernels compute forward only. On a CPU they run in the
simulator: `with simulate(): gemm_tiled(a, b)`, from `utils.gluon_cpu`. Figures: docs/kernels/gemm.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from utils.kernels.handle import CALLS, layout, needs_autograd, needs_operator
from utils.machine.device import gluon_support, triton_support

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def gemm_naive(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute C = A @ B by the three loops, one element of C a lane: A (M, K), B (K, N), C (M, N)."""
    return _launch("naive", a, b)


def gemm_tiled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute C = A @ B in tiles of 64 x 64, one a program, stepping along K: A (M, K), B (K, N), C (M, N)."""
    return _launch("tiled", a, b)


def gemm_tiled_grouped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute C = A @ B in tiles, with pipelined loads and an order for the L2: A (M, K), B (K, N), C (M, N)."""
    return _launch("tiled_grouped", a, b)


def gemm_autotuned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute C = A @ B with the fastest tile, timed in about a second for a new size: A (M, K), B (K, N), C (M, N)."""
    return _launch("autotuned", a, b)


def gemm_warp_specialized(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute C = A @ B by the warp-specialized Gluon kernel for Hopper: fp16 or bf16 A (M, K), B (K, N), C (M, N).

    TMA copies A and B, so their rows must start at multiples of 16 bytes; the columns of a column-major matrix likewise.
    """
    name = "gemm_warp_specialized"
    key = () if needs_operator(a, b) or needs_autograd(a, b) else (name, *layout(a, b))
    # An earlier call has checked operands of these shapes, strides and types, and has kept their launch.
    kept = CALLS.get(key)
    if kept is not None and (a.data_ptr() | b.data_ptr()) % 16 == 0:
        return kept(a, b)
    check_operands(name, a, b, dtypes=(torch.float16, torch.bfloat16))
    if not a.is_cuda or not gluon_support():
        raise ValueError(
            f"{name} runs on a Hopper GPU; got {shapes(a, b)} on {a.device}. {gluon_support().reason} "
            "Use gemm_autotuned on another GPU, or torch.matmul."
        )
    if not a.numel() or not b.numel():
        return a.new_zeros((a.shape[0], b.shape[1]))
    from utils.kernels.gemm_launch import prepare

    launch = prepare(a, b)
    if key:
        CALLS[key] = launch
    return launch(a, b)


# From the first rung to the last; all are measured against `torch.matmul`.
LADDER: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    rung.__name__: rung for rung in (gemm_naive, gemm_tiled, gemm_tiled_grouped, gemm_autotuned, gemm_warp_specialized)
}


def shapes(a: torch.Tensor, b: torch.Tensor) -> str:
    """Name the shapes of both operands for a message."""
    return f"A {tuple(a.shape)} and B {tuple(b.shape)}"


def check_operands(name: str, a: torch.Tensor, b: torch.Tensor, dtypes=tuple(DTYPES)) -> None:
    """Raise a TypeError or ValueError if the function `name` cannot multiply these operands."""
    for label, tensor in (("A", a), ("B", b)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} multiplies two torch tensors; {label} is a {type(tensor).__name__}.")
    given = shapes(a, b)
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(
            f"{name} multiplies matrices A (M, K) and B (K, N); got {given}. "
            "Flatten batch dimensions into M, or use torch.matmul."
        )
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{name} needs A's columns to match B's rows; got {given}: {a.shape[1]} and {b.shape[0]}. "
            "Transpose one of them?"
        )
    if a.dtype != b.dtype:
        raise TypeError(f"{name} needs one dtype for both; got {given} in {a.dtype} and {b.dtype}. Convert one.")
    if a.dtype not in dtypes:
        allowed = " or ".join(", ".join(str(d).removeprefix("torch.") for d in dtypes).rsplit(", ", 1))
        raise TypeError(f"{name} takes {allowed}; got {given} in {a.dtype}. Convert both, or use torch.matmul.")
    if a.device != b.device:
        raise ValueError(f"{name} needs both matrices on one device; got {given} on {a.device} and {b.device}.")
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        raise ValueError(
            f"{name} computes forward only, and autograd would lose its result; got {given}, and at least one "
            "requires grad. Call it under torch.no_grad(), or use torch.matmul."
        )


def check_triton(name: str, tensor: torch.Tensor, given: str) -> None:
    """Raise an error unless Triton kernels run on the tensor's device: on a GPU, or in the simulator on a CPU."""
    if not (support := triton_support()):
        raise RuntimeError(f"{name} is a Triton kernel. {support.reason} {support.remedy}")
    jit = sys.modules.get("triton.runtime.jit")
    if jit is not None and jit.JITFunction.run.__module__ != jit.__name__:
        return  # launches go to the simulator
    if not tensor.is_cuda:
        raise ValueError(
            f"{name} is a GPU kernel; got {given} on {tensor.device}. Move the input with .to('cuda'), or see on a "
            f"CPU what it computes: `with simulate(): {name}(...)`, from utils.gluon_cpu."
        )


def _launch(rung: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    name = f"gemm_{rung}"
    check_operands(name, a, b)
    check_triton(name, a, shapes(a, b))
    from utils.kernels import gemm_triton

    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    if c.numel():
        with torch.cuda.device(a.device if a.is_cuda else -1):
            gemm_triton.launch(rung, a, b, c)
    return c
