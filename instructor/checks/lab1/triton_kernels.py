"""Questions 1.5 and bonus 5.6: the student's Triton kernels, in the simulator.

The check appends the entries below to the student's file. In memory, the distance between rows is longer than a block.
The simulator refuses accesses between rows, and accesses outside of a tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from instructor.checks.common import Draw
from utils.checking import check, expect_close
from utils.checking.labs.lab1.triton_kernels import expect_dots, flash_inputs, run_cases
from utils.checking.mistakes import flash_mistake
from utils.checking.verdicts import raises_not_implemented

_APART = 70  # unused elements between two rows of a tensor

_GEMM = f"""

def entry_of_the_check(a, b, block_m, block_n, block_k, transposed):
    import torch
    import triton

    def apart(rows, columns):
        if transposed:
            return torch.zeros(columns, rows + {_APART}, dtype=a.dtype)[:, :rows].T
        return torch.zeros(rows, columns + {_APART}, dtype=a.dtype)[:, :columns]

    a, b = (apart(*x.shape).copy_(x) for x in (a, b))
    c = apart(a.shape[0], b.shape[1])
    grid = (triton.cdiv(a.shape[0], block_m), triton.cdiv(b.shape[1], block_n))
    gemm_kernel[grid](
        a, b, c, a.shape[0], b.shape[1], a.shape[1],
        *a.stride(), *b.stride(), *c.stride(),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )
    return c.contiguous()
"""
_FLASH = f"""

def entry_of_the_check(q, k, v, block_m, block_n, backwards):
    import torch
    import triton

    def apart(x):
        heads, tokens, width = x.shape
        if backwards:
            return torch.zeros(width, tokens + {_APART}, heads, dtype=x.dtype)[:, :tokens].permute(2, 1, 0)
        return torch.zeros(heads, tokens + {_APART}, width, dtype=x.dtype)[:, :tokens]

    q, k, v, out = (apart(x).copy_(x) for x in (q, k, v, q))
    strides = [stride for x in (q, k, v, out) for stride in x.stride()]
    grid = (triton.cdiv(q.shape[1], block_m), q.shape[0])
    flash_kernel[grid](
        q, k, v, out.zero_(), q.shape[1], k.shape[1], q.shape[2] ** -0.5, *strides,
        D=q.shape[2], BLOCK_M=block_m, BLOCK_N=block_n,
    )
    return out.contiguous()
"""


def _run(source: str, kernel: str, entry: str, case: tuple, name: str, most: int, products: int) -> torch.Tensor:
    """Return the output of the kernel in a student's file.

    Args:
        source: the text of the file.
        kernel: the kernel's name.
        entry: the text of a function that launches the kernel.
        case: arguments of the entry.
        name: the case, in words.
        most: the length of the largest block.
        products: the number of products of tiles that each program has to compute.
    """
    # This looks for the `raise` in the text, because in a compiled kernel it never reaches Python.
    if raises_not_implemented(source):
        raise NotImplementedError
    file = f"{kernel.replace('_kernel', '_triton')}.py"
    got, made = run_cases(source + entry, file, "entry_of_the_check", {name: case}, most)[name]
    expect_dots(made, products, name)
    return got


@check("1.5", "GEMM in Triton")
def gemm_triton(source: str, seed=None):
    """Check the kernel `gemm_kernel` of this source text: values, edges, strides, and no access out of bounds."""
    draw = Draw(seed)
    large = draw.choice(((64, 64, 32), (64, 32, 64), (32, 64, 64)))
    for name, (m, n, k), (bm, bn, bk), transposed, dtype in (
        ("whole blocks", (32, 32, 32), (16, 16, 16), False, torch.float32),
        ("edges", (draw.size(17, 31), draw.size(33, 47), draw.size(17, 31)), (16, 32, 16), False, torch.float32),
        ("column-major matrices", (draw.size(33, 47), draw.size(17, 31), 32), (32, 16, 32), True, torch.float32),
        ("fp16", (draw.size(5, 15), 16, draw.size(33, 47)), (16, 16, 32), False, torch.float16),
        ("large blocks", (draw.size(65, 90), draw.size(65, 90), draw.size(130, 160)), large, False, torch.float32),
    ):
        a, b = draw.normal(m, k, dtype=dtype), draw.normal(k, n, dtype=dtype)
        name = f"({m}, {k}) @ ({k}, {n}) with blocks ({bm}, {bn}, {bk}), {name}"
        case = a, b, bm, bn, bk, transposed
        got = _run(source, "gemm_kernel", _GEMM, case, name, max(bm, bn, bk), -(-k // bk))
        tolerance = 1e-4 if a.dtype == torch.float32 else 5e-3
        expect_close(
            got.double(),
            a.double() @ b.double(),
            rtol=tolerance,
            atol=tolerance,
            what=f"C of {name}",
            hint="Look at the strides, at the masks, and at what other= puts where a mask is false.",
        )


@check("Bonus 5.6", "Flash attention in Triton")
def flash_triton(source: str, seed=None):
    """Check the kernel `flash_kernel` of this source text: values, tails, strides, and no access out of bounds."""
    draw = Draw(seed)
    for words, (queries, keys, size), (block_m, block_n), factor, backwards, dtype in (
        ("whole blocks", (32, 64, 64), (16, 32), 1.0, False, torch.float32),
        (
            "one block, of three keys, scores far below 0",
            (draw.size(17, 31), 3, 16),
            (16, 16),
            -60.0,
            False,
            torch.float32,
        ),
        ("a last block of one key", (draw.size(17, 31), 33, 32), (32, 16), 3.0, False, torch.float32),
        ("a last block of three keys", (3, draw.size(4, 6) * 16 + 3, 16), (16, 16), 60.0, True, torch.float32),
        ("fp16", (draw.size(5, 15), draw.size(65, 79), 32), (16, 32), 1.0, False, torch.float16),
        ("large blocks", (draw.size(65, 79), draw.size(129, 150), 64), (64, 64), 1.0, False, torch.float16),
    ):
        name = f"3 heads, {queries} queries and {keys} keys, D = {size}, blocks of {block_m} and {block_n}, {words}"
        q, k, v = flash_inputs(draw.normal, queries, keys, size, factor, dtype)
        case = q, k, v, block_m, block_n, backwards
        got = _run(source, "flash_kernel", _FLASH, case, name, max(block_m, block_n, size), 2 * -(-keys // block_n))
        got = got.double()
        right = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
        tolerance = 1e-3 if q.dtype == torch.float32 else 5e-3
        hint = flash_mistake(got, q, k, v, block_n)
        expect_close(got, right, rtol=tolerance, atol=tolerance, what=f"the output of {name}", hint=hint)
