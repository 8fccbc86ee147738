"""Bonus 5.8: the student's flash attention in Triton, in Triton's interpreter, with guard zones around the tensors."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F

from instructor.checks.common import Draw
from instructor.checks.lab1.triton_blocks import LIMIT_BLOCKS
from utils.checking import check, expect_close
from utils.checking.kernel_files import kernels_of
from utils.checking.kernel_mistakes import flash_mistake
from utils.kernels.interpreter import InterpretedKernelError, run_interpreted_cases

_GUARD = 70  # rows around each head: more than a block can reach beyond its edges

# Appended to the student's file; it runs in the interpreter's process, which refuses accesses outside the memory of the
# tensors. The gaps around the rows are inside that memory: they hold NaN in Q, K and V, and sevens in the output.
_ENTRY = f"""{LIMIT_BLOCKS}

def entry_of_the_check(q, k, v, block_m, block_n, tokens_first):
    import torch
    import triton

    blocks = triton.cdiv(k.shape[1], block_n)
    products = limit_blocks_of_the_check(max(block_m, block_n, q.shape[2]))

    def guarded(x, value):
        heads, tokens, size = x.shape
        shape = (heads, tokens + 2 * {_GUARD}, size)
        whole = torch.full(shape, value, dtype=x.dtype)
        if tokens_first:
            whole = whole.transpose(0, 1).contiguous().transpose(0, 1)
        return whole, whole[:, {_GUARD}:{_GUARD} + tokens]

    views = [guarded(x, float("nan"))[1].copy_(x) for x in (q, k, v)]
    whole, view = guarded(q, 7.0)
    strides = [stride for x in (*views, view) for stride in x.stride()]
    flash_kernel[(triton.cdiv(q.shape[1], block_m), q.shape[0])](
        *views, view, q.shape[1], k.shape[1], q.shape[2] ** -0.5, *strides,
        D=q.shape[2], BLOCK_M=block_m, BLOCK_N=block_n,
    )
    expect_products_of_the_check(products, triton.cdiv(q.shape[1], block_m) * q.shape[0], 2 * blocks)
    return whole.contiguous().double()
"""


@check("Bonus 5.8", "Flash attention in Triton")
def flash_triton(source: str, seed=None):
    """Check the kernel `flash_kernel` of this source text: values, tails, strides, and no access out of bounds."""
    # Searched in the text, because a `raise` in a compiled kernel never reaches Python.
    if re.search(r"^\s*raise NotImplementedError", source, flags=re.MULTILINE):
        raise NotImplementedError
    if "flash_kernel" not in source:
        raise AssertionError("the file defines no flash_kernel: keep the name and the arguments of the kernel.")
    source = kernels_of(source, "flash_triton.py", "flash_kernel")  # what launches the kernel is the check's own
    draw = Draw(seed)
    cases, names = [], []
    for words, (queries, keys, size), (block_m, block_n), factor, tokens_first, dtype in (
        ("whole blocks", (32, 64, 16), (16, 32), 1.0, False, torch.float32),
        ("one block, of three keys", (draw.size(17, 31), 3, 16), (16, 16), 1.0, False, torch.float32),
        ("a last block of one key", (draw.size(17, 31), 33, 32), (32, 16), 3.0, False, torch.float32),
        ("a last block of three keys", (3, draw.size(4, 6) * 16 + 3, 16), (16, 16), 60.0, True, torch.float32),
        ("fp16", (draw.size(5, 15), draw.size(65, 79), 32), (16, 32), 1.0, False, torch.float16),
        ("large blocks", (draw.size(65, 79), draw.size(129, 150), 64), (64, 64), 1.0, False, torch.float16),
    ):
        q, k, v = (draw.normal(3, tokens, size) for tokens in (queries, keys, keys))
        k, v = k + torch.arange(keys)[:, None] / keys, v + 1.0  # scores rise in some rows, and fall in others
        place = f"3 heads, {queries} queries and {keys} keys, D = {size}, blocks of {block_m} and {block_n}, {words}"
        cases.append((*(x.to(dtype) for x in (q * factor, k, v)), block_m, block_n, tokens_first))
        names.append(place)
    try:
        results = run_interpreted_cases((source + _ENTRY, "entry_of_the_check"), cases, timeout=120)
    except InterpretedKernelError as error:
        place = f" on {names[error.case]}" if error.case is not None else ""
        raise AssertionError(f"flash_kernel failed{place}: {error.in_short}") from None
    for name, (q, k, v, _, block_n, _), result in zip(names, cases, results, strict=True):
        inside = result[:, _GUARD : _GUARD + q.shape[1]]
        around = result.clone()
        around[:, _GUARD : _GUARD + q.shape[1]] = 7.0
        if not torch.equal(around, torch.full_like(around, 7.0)):
            raise AssertionError(
                f"the kernel wrote {int((around != 7.0).sum())} elements outside of the output on {name}. Which mask does "
                "tl.store need?"
            )
        expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
        tolerance = 1e-3 if q.dtype == torch.float32 else 5e-3
        hint = flash_mistake(inside, q, k, v, block_n)
        expect_close(inside, expected, rtol=tolerance, atol=tolerance, what=f"the output of {name}", hint=hint)
