"""Matrices that TMA can copy, and a check of a product's error: for the tests of every GEMM."""

import torch

ROUNDING = {torch.float32: 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def assert_product(c, a, b, what=""):
    """Assert that c is a @ b, up to one rounding to its dtype and fp32 sums (TF32, or a missing tile, is far outside)."""
    exact = a.double() @ b.double()
    allowed = ROUNDING[a.dtype] * exact.abs() + 2.0**-20 * (a.double().abs() @ b.double().abs()) + 1e-7
    assert c.shape == exact.shape and c.dtype == a.dtype and c.device == a.device, what
    error = (c.double() - exact).abs() / allowed
    assert c.isfinite().all() and (error <= 1).all(), f"{what}: {error.max():.3g} times the allowed error"


def matrix(rows, columns, column_major=False, dtype=torch.float16, device="cuda"):
    """Return a random matrix of any size whose rows (or columns) start at multiples of 16 bytes."""
    outer, inner = (columns, rows) if column_major else (rows, columns)
    x = torch.randn(outer, -(-inner // 8) * 8, device=device).to(dtype)[:, :inner]
    return x.T if column_major else x
