"""FP8 matrix product on Hopper: C = (A scale_a) @ (B scale_b), beside the last rung of the ladder in `gemm.py`.

An e4m3 number has a sign, four bits of exponent and three of mantissa: 448 is the largest, and neighbours are 6 to 12%
apart. The tensor cores multiply twice as many of them a second as of 16-bit numbers, and memory holds twice as many. To
use the narrow range well, a matrix is divided by a scale before it is rounded, and the product is multiplied by both
scales afterwards: one scale for all of a matrix, or one for each row of A and each column of B.

    a8, scale_a = quantize_fp8(a, by="row")           # a (M, K), bf16:            e4m3 (M, K) and fp32 (M, 1)
    w8, scale_w = quantize_fp8(w, by="row")           # w (N, K), a linear layer:  e4m3 (N, K) and fp32 (N, 1)
    c = gemm_fp8(a8, w8.T, scale_a, scale_w.T)        # a @ w.T, bf16 (M, N)

The operands are those of `torch._scaled_mm` on Hopper. On an H200 it is as fast at 4096 and 8192 cubed; at 14 random shapes
with one scale for a matrix its speed is 0.95 of torch's, 0.90 with `fast=True` (docs/gemm-log.md, entries 17 to 19). The
kernel is in `gemm_fp8_gluon.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from utils.kernels.gemm import need_triton, shapes
from utils.kernels.handle import observed
from utils.newest import Newest

E4M3_LARGEST = 448.0
OUT_DTYPES = (torch.bfloat16, torch.float16)
_launches: Newest[tuple | None, Callable[..., torch.Tensor]] = Newest(1024)


def quantize_fp8(x: torch.Tensor, by: str = "tensor") -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix to e4m3 so that its largest element becomes 448: (e4m3, scale), with x about e4m3 * scale.

    Args:
        x: (R, K), any floating-point dtype; contiguous or a transposed view, and the result lies in memory alike.
        by: "tensor": one scale, fp32 with no dimensions. "row": one for each row, fp32 (R, 1).
    """
    if by not in ("tensor", "row"):
        raise ValueError(f'quantize_fp8 takes by="tensor" (one scale) or by="row" (one for each row); got by={by!r}.')
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"quantize_fp8 takes a floating-point matrix (R, K); got {tuple(x.shape)} in {x.dtype}.")
    largest = x.abs().amax(dim=1, keepdim=True) if by == "row" else x.abs().amax()
    # Zeros alone have no scale of their own: with 1 they stay zeros.
    scale = torch.where(largest > 0, largest.float() / E4M3_LARGEST, 1.0)
    # Rounding of the quotient may pass 448 by a little, and the conversion makes NaN of what is too large.
    return (x.float() / scale).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn), scale


def gemm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
) -> torch.Tensor:
    """C = (A scale_a) @ (B scale_b) by the FP8 Gluon kernel for Hopper: C (M, N).

    Args:
        a: e4m3 (M, K), row-major; rows start at multiples of 16 bytes.
        b: e4m3 (K, N), column-major, such as the `.T` of (N, K); columns start at multiples of 16 bytes.
        scale_a: fp32, one number, or one for each row: (M, 1).
        scale_b: fp32, one number, or one for each column: (1, N). One number goes with one, (M, 1) with (1, N).
        out_dtype: torch.bfloat16 or torch.float16.
        fast: True adds all of K in the tensor cores, which keep about 14 bits of a sum; False adds the sums of each
            128 terms in fp32, which takes longer. The same choice as `use_fast_accum` of `torch._scaled_mm`.
    """
    name = "gemm_fp8"
    # Operands of these shapes, strides and types were checked before, and their launch was kept.
    tensors = (a, b, scale_a, scale_b)
    key = None
    if not observed(*tensors):
        key = (a.shape, b.shape, scale_a.shape, scale_b.shape, a.stride(), b.stride(), scale_a.stride(),
               scale_b.stride(), a.dtype, b.dtype, scale_a.dtype, scale_b.dtype, a.get_device(), b.get_device(),
               scale_a.get_device(), scale_b.get_device(), out_dtype, fast)  # fmt: skip
    kept = _launches.get(key)
    if kept is not None and (a.data_ptr() | b.data_ptr()) % 16 == 0:
        return kept(a, b, scale_a, scale_b)
    check_operands(name, a, b, scale_a, scale_b, out_dtype)
    check_gpu(name, a, b)
    need_triton(name)
    c = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    if not c.numel():
        return c
    if a.shape[1] == 0:
        return c.zero_()
    from utils.kernels import gemm_fp8_launch

    launch = gemm_fp8_launch.launch(a, b, scale_a, scale_b, c, fast)
    if launch is not None and key is not None:
        _launches[key] = launch
    return c


def check_operands(
    name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Raise a TypeError or ValueError if the FP8 kernel cannot multiply these operands."""
    for label, tensor in (("A", a), ("B", b), ("scale_a", scale_a), ("scale_b", scale_b)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} takes torch tensors; {label} is a {type(tensor).__name__}.")
    given = shapes(a, b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{name} multiplies matrices A (M, K) and B (K, N); got {given}. Flatten batch dimensions into M, and give "
            "a weight (N, K) as its .T."
        )
    if (a.dtype, b.dtype) != (torch.float8_e4m3fn, torch.float8_e4m3fn):
        raise TypeError(
            f"{name} multiplies float8_e4m3fn by float8_e4m3fn; got {given} in {a.dtype} and {b.dtype}. "
            "utils.kernels.gemm_fp8.quantize_fp8 makes e4m3 and a scale of a matrix."
        )
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"{name} writes torch.bfloat16 or torch.float16; got out_dtype={out_dtype}.")
    for label, x in (("A", a), ("B's transpose", b.T)):
        rows, columns = x.shape
        in_rows = columns == 1 or x.stride(1) == 1
        if not x.numel() or (in_rows and x.data_ptr() % 16 == 0 and (rows == 1 or _pitch_fits(x))):
            continue
        raise ValueError(
            f"{name} takes A row-major and B column-major, with rows of A and columns of B that start at multiples of 16 "
            f"bytes: wgmma reads 8-bit tiles along K only, and TMA copies from such addresses. {label} {tuple(x.shape)} "
            f"has strides {x.stride()} and lies {x.data_ptr() % 16} bytes past a multiple of 16. Pad K to a multiple of "
            "16; for a row-major B pass b.T.contiguous().T."
        )
    m, n = a.shape[0], b.shape[1]
    kinds = [(scale_a, "scale_a", (m, 1)), (scale_b, "scale_b", (1, n))]
    by_tensor = all(scale.numel() == 1 for scale, _, _ in kinds)
    for scale, label, by_row in kinds:
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} takes scales in torch.float32; got {label} in {scale.dtype}.")
        if not by_tensor and (tuple(scale.shape) != by_row or not scale.is_contiguous()):
            raise ValueError(
                f"{name} takes one number as scale_a and one as scale_b, or scale_a (M, 1) with scale_b (1, N), "
                f"contiguous; got {tuple(scale_a.shape)} and {tuple(scale_b.shape)} for {given}, and {label} should be "
                f"{by_row}."
            )
    devices = {x.device for x in (a, b, scale_a, scale_b)}
    if len(devices) > 1:
        raise ValueError(f"{name} needs operands and scales on one device; got {given} on {sorted(map(str, devices))}.")
    if torch.is_grad_enabled() and (scale_a.requires_grad or scale_b.requires_grad):
        raise ValueError(f"{name} computes forward only, and a scale requires grad. Call it under torch.no_grad().")


def _pitch_fits(x: torch.Tensor) -> bool:
    """Whether rows of bytes do not overlap and start at multiples of 16 bytes, if the first one does."""
    return x.stride(0) % 16 == 0 and x.stride(0) >= x.shape[1]


def check_gpu(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise a ValueError if these operands are not on a Hopper GPU."""
    given = shapes(a, b)
    if not a.is_cuda:
        raise ValueError(
            f"{name} runs on a Hopper GPU (H100, H200) and has no interpreter; got {given} on the CPU. "
            "Move operands and scales with .to('cuda'), or multiply a.float() * scale_a by b.float() * scale_b."
        )
    major, minor = torch.cuda.get_device_capability(a.device)
    if (major, minor) != (9, 0):
        raise ValueError(
            f"{name} uses Hopper's wgmma (compute capability 9.0); got {given} on a GPU of capability {major}.{minor}. "
            "Use torch._scaled_mm there."
        )
