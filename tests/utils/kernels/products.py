"""Matrices that TMA can copy, and how exact a product has to be: for the tests of every GEMM."""

import torch

ROUNDING = {torch.float32: 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def assert_product(c, a, b, what=""):
    """C is a @ b: one rounding to its dtype, and fp32 sums (TF32, or a missing tile, would be far outside)."""
    exact = a.double() @ b.double()
    allowed = ROUNDING[a.dtype] * exact.abs() + 2.0**-20 * (a.double().abs() @ b.double().abs()) + 1e-7
    assert c.shape == exact.shape and c.dtype == a.dtype and c.device == a.device, what
    error = (c.double() - exact).abs() / allowed
    assert c.isfinite().all() and (error <= 1).all(), f"{what}: {error.max():.3g} times the allowed error"


def matrix(rows, columns, column_major=False, dtype=torch.float16, device="cuda"):
    """A random matrix whose rows (or columns) start at multiples of 16 bytes, however long they are."""
    outer, inner = (columns, rows) if column_major else (rows, columns)
    x = torch.randn(outer, -(-inner // 8) * 8, device=device).to(dtype)[:, :inner]
    return x.T if column_major else x
