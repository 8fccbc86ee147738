"""Question 1.5: the student's Triton kernel, in Triton's interpreter, with guard zones around the tensors."""

from __future__ import annotations

import re

import torch

from instructor.checks.common import Draw
from instructor.checks.lab1.triton_blocks import LIMIT_BLOCKS
from utils.checking import check, expect_close
from utils.checking.kernel_files import kernels_of
from utils.kernels.interpreter import InterpretedKernelError, run_interpreted_cases

_GUARD = 40  # rows and columns around each matrix: more than a block can reach beyond its edges

# The code is appended to the student's file and runs in the interpreter's process, which refuses accesses outside the memory
# of the matrices. The gaps between rows are inside that memory: they hold NaN around A and B, and sevens around C.
_ENTRY = f"""{LIMIT_BLOCKS}

def entry_of_the_check(a, b, block_m, block_n, block_k, transposed, dtype):
    import torch
    import triton

    products = limit_blocks_of_the_check(max(block_m, block_n, block_k))

    def guarded(rows, cols, value):
        whole = torch.full((rows + 2 * {_GUARD}, cols + 2 * {_GUARD}), value, dtype=dtype)
        whole = whole.T.contiguous().T if transposed else whole
        return whole, whole[{_GUARD}:{_GUARD} + rows, {_GUARD}:{_GUARD} + cols]

    a_view = guarded(*a.shape, float("nan"))[1].copy_(a)
    b_view = guarded(*b.shape, float("nan"))[1].copy_(b)
    c_whole, c_view = guarded(a.shape[0], b.shape[1], 7.0)

    grid = (triton.cdiv(a.shape[0], block_m), triton.cdiv(b.shape[1], block_n))
    gemm_kernel[grid](
        a_view, b_view, c_view, a.shape[0], b.shape[1], a.shape[1],
        *a_view.stride(), *b_view.stride(), *c_view.stride(),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )
    expect_products_of_the_check(products, grid[0] * grid[1], triton.cdiv(a.shape[1], block_k))
    return c_whole.contiguous().double()
"""


@check("1.5", "GEMM in Triton")
def gemm_triton(source: str, seed=None):
    """Check the kernel `gemm_kernel` of this source text: values, edges, strides, and no access out of bounds."""
    # Searched in the text, because a `raise` in a compiled kernel never reaches Python.
    if re.search(r"^\s*raise NotImplementedError", source, flags=re.MULTILINE):
        raise NotImplementedError
    if "gemm_kernel" not in source:
        raise AssertionError("the file defines no gemm_kernel: keep the name and the arguments of the kernel.")
    source = kernels_of(source, "gemm_triton.py", "gemm_kernel")  # what launches the kernel is the check's own
    draw = Draw(seed)
    cases, names, large = [], [], draw.choice(((64, 64, 32), (64, 32, 64), (32, 64, 64)))
    for name, (m, n, k), (bm, bn, bk), transposed, dtype in (
        ("whole blocks", (32, 32, 32), (16, 16, 16), False, torch.float32),
        ("edges", (draw.size(17, 31), draw.size(33, 47), draw.size(17, 31)), (16, 32, 16), False, torch.float32),
        ("column-major matrices", (draw.size(33, 47), draw.size(17, 31), 32), (32, 16, 32), True, torch.float32),
        ("fp16", (draw.size(5, 15), 16, draw.size(33, 47)), (16, 16, 32), False, torch.float16),
        ("large blocks", (draw.size(65, 90), draw.size(65, 90), draw.size(130, 160)), large, False, torch.float32),
    ):
        a, b = draw.normal(m, k, dtype=dtype), draw.normal(k, n, dtype=dtype)
        cases.append((a, b, bm, bn, bk, transposed, dtype))
        names.append(f"({m}, {k}) @ ({k}, {n}) with blocks ({bm}, {bn}, {bk}), {name}")
    try:
        results = run_interpreted_cases((source + _ENTRY, "entry_of_the_check"), cases, timeout=120)
    except InterpretedKernelError as error:
        place = f" on {names[error.case]}" if error.case is not None else ""
        raise AssertionError(f"gemm_kernel failed{place}: {error.in_short}") from None
    for name, (a, b, *_), result in zip(names, cases, results, strict=True):
        m, n = a.shape[0], b.shape[1]
        inside = result[_GUARD : _GUARD + m, _GUARD : _GUARD + n]
        around = result.clone()
        around[_GUARD : _GUARD + m, _GUARD : _GUARD + n] = 7.0
        if not torch.equal(around, torch.full_like(around, 7.0)):
            raise AssertionError(
                f"the kernel wrote {int((around != 7.0).sum())} elements outside of C on {name}. Which mask does "
                "tl.store need?"
            )
        expected = a.double() @ b.double()
        rtol, atol = (1e-4, 1e-4) if a.dtype == torch.float32 else (5e-3, 5e-3)
        expect_close(
            inside,
            expected,
            rtol=rtol,
            atol=atol,
            what=f"C of {name}",
            hint="Look at the strides, at the masks, and at what other= puts where a mask is false.",
        )
