"""Questions 1.5 and bonus 5.6: the student's Triton kernels, in Triton's interpreter, with guard zones around the tensors.

The entries below are appended to the student's file and run in the interpreter's process, which refuses accesses outside the
memory of the tensors. The gaps around rows and columns are inside that memory: they hold NaN around what a kernel reads,
and sevens around what it writes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from instructor.checks.common import Draw
from utils.checking import check, expect_close
from utils.checking.kernel_files import kernels_of
from utils.checking.labs.lab1.triton_kernels import WATCHED_PRODUCTS, flash_inputs, interpreted
from utils.checking.mistakes import flash_mistake
from utils.checking.verdicts import raises_not_implemented

_GUARD = 70  # rows and columns around a tensor: more than a block can reach beyond its edges

_WATCH = f"""{WATCHED_PRODUCTS}

def guarded_by_the_check(rows, columns, value, dtype, heads=1, sides=1):
    # A tensor (heads, rows, columns) in the middle of a larger one, and the larger one.
    import torch

    whole = torch.full((heads, rows + 2 * {_GUARD}, columns + 2 * {_GUARD} * sides), value, dtype=dtype)
    return whole, whole[:, {_GUARD}:{_GUARD} + rows, {_GUARD} * sides:{_GUARD} * sides + columns]


def limit_blocks_of_the_check(most):
    # No range is longer than `most`. Returns the products that each program makes by tl.dot, {{program: number}}.
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder

    def make_range(*args):  # the last two are its ends
        if args[-1] - args[-2] > most:
            raise ValueError(f"a block of {{args[-1] - args[-2]}}, and the largest here has {{most}}: work block by block")
        return type(builder).create_make_range(builder, *args)

    builder.create_make_range = make_range
    return watch_products_of_the_check()


def expect_products_of_the_check(products, programs, each):
    # Every one of so many programs makes so many products.
    made = sorted(set(products.values())) if len(products) == programs else [0, *sorted(set(products.values()))]
    if made != [each]:
        raise ValueError(f"a program makes {{made[0]}} products of tiles by tl.dot, and its blocks take {{each}}: each block once")
"""
_GEMM = f"""{_WATCH}

def entry_of_the_check(a, b, block_m, block_n, block_k, transposed, dtype):
    import triton

    products = limit_blocks_of_the_check(max(block_m, block_n, block_k))

    def guarded(rows, columns, value):
        if transposed:
            whole, view = guarded_by_the_check(columns, rows, value, dtype)
            return whole[0].T, view[0].T
        return [x[0] for x in guarded_by_the_check(rows, columns, value, dtype)]

    a_view, b_view = (guarded(*x.shape, float("nan"))[1].copy_(x) for x in (a, b))
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
_FLASH = f"""{_WATCH}

def entry_of_the_check(q, k, v, block_m, block_n, tokens_first):
    import triton

    blocks = triton.cdiv(k.shape[1], block_n)
    products = limit_blocks_of_the_check(max(block_m, block_n, q.shape[2]))

    def guarded(x, value):
        whole, _ = guarded_by_the_check(x.shape[1], x.shape[2], value, x.dtype, heads=x.shape[0], sides=0)
        if tokens_first:
            whole = whole.transpose(0, 1).contiguous().transpose(0, 1)
        return whole, whole[:, {_GUARD}:{_GUARD} + x.shape[1]]

    views = [guarded(x, float("nan"))[1].copy_(x) for x in (q, k, v)]
    whole, view = guarded(q, 7.0)
    strides = [stride for x in (*views, view) for stride in x.stride()]
    grid = (triton.cdiv(q.shape[1], block_m), q.shape[0])
    flash_kernel[grid](
        *views, view, q.shape[1], k.shape[1], q.shape[2] ** -0.5, *strides,
        D=q.shape[2], BLOCK_M=block_m, BLOCK_N=block_n,
    )
    expect_products_of_the_check(products, grid[0] * grid[1], 2 * blocks)
    return whole.contiguous().double()
"""


def _run(source: str, kernel: str, entry: str, cases: dict[str, tuple]) -> dict[str, torch.Tensor]:
    """Return what the kernel of a student's file wrote in each case, with the guard zones: {case: tensor}."""
    # Searched in the text, because a `raise` in a compiled kernel never reaches Python.
    if raises_not_implemented(source):
        raise NotImplementedError
    file = f"{kernel.replace('_kernel', '_triton')}.py"
    source = kernels_of(source, file, kernel)  # what launches it is the check's own
    return interpreted(source + entry, "entry_of_the_check", cases, timeout=120)


def _inside(whole: torch.Tensor, place: tuple, name: str) -> torch.Tensor:
    """Return the output itself; assert that all around it is as it was."""
    around = whole.clone()
    around[place] = 7.0
    if not torch.equal(around, torch.full_like(around, 7.0)):
        raise AssertionError(
            f"the kernel wrote {int((around != 7.0).sum())} elements outside of {name}. Which mask does tl.store need?"
        )
    return whole[place]


@check("1.5", "GEMM in Triton")
def gemm_triton(source: str, seed=None):
    """Check the kernel `gemm_kernel` of this source text: values, edges, strides, and no access out of bounds."""
    draw, cases = Draw(seed), {}
    large = draw.choice(((64, 64, 32), (64, 32, 64), (32, 64, 64)))
    for name, (m, n, k), (bm, bn, bk), transposed, dtype in (
        ("whole blocks", (32, 32, 32), (16, 16, 16), False, torch.float32),
        ("edges", (draw.size(17, 31), draw.size(33, 47), draw.size(17, 31)), (16, 32, 16), False, torch.float32),
        ("column-major matrices", (draw.size(33, 47), draw.size(17, 31), 32), (32, 16, 32), True, torch.float32),
        ("fp16", (draw.size(5, 15), 16, draw.size(33, 47)), (16, 16, 32), False, torch.float16),
        ("large blocks", (draw.size(65, 90), draw.size(65, 90), draw.size(130, 160)), large, False, torch.float32),
    ):
        a, b = draw.normal(m, k, dtype=dtype), draw.normal(k, n, dtype=dtype)
        what = f"({m}, {k}) @ ({k}, {n}) with blocks ({bm}, {bn}, {bk}), {name}"
        cases[what] = a, b, bm, bn, bk, transposed, dtype
    for name, whole in _run(source, "gemm_kernel", _GEMM, cases).items():
        a, b = cases[name][:2]
        place = slice(_GUARD, _GUARD + a.shape[0]), slice(_GUARD, _GUARD + b.shape[1])
        tolerance = 1e-4 if a.dtype == torch.float32 else 5e-3
        expect_close(
            _inside(whole, place, f"C on {name}"),
            a.double() @ b.double(),
            rtol=tolerance,
            atol=tolerance,
            what=f"C of {name}",
            hint="Look at the strides, at the masks, and at what other= puts where a mask is false.",
        )


@check("Bonus 5.6", "Flash attention in Triton")
def flash_triton(source: str, seed=None):
    """Check the kernel `flash_kernel` of this source text: values, tails, strides, and no access out of bounds."""
    draw, cases = Draw(seed), {}
    for words, (queries, keys, size), (block_m, block_n), factor, tokens_first, dtype in (
        ("whole blocks", (32, 64, 16), (16, 32), 1.0, False, torch.float32),
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
        what = f"3 heads, {queries} queries and {keys} keys, D = {size}, blocks of {block_m} and {block_n}, {words}"
        inputs = flash_inputs(draw.normal, queries, keys, size, factor, dtype)
        cases[what] = (*inputs, block_m, block_n, tokens_first)
    for name, whole in _run(source, "flash_kernel", _FLASH, cases).items():
        q, k, v, _, block_n, _ = cases[name]
        got = _inside(whole, (slice(None), slice(_GUARD, _GUARD + q.shape[1])), f"the output on {name}")
        right = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
        tolerance = 1e-3 if q.dtype == torch.float32 else 5e-3
        hint = flash_mistake(got, q, k, v, block_n)
        expect_close(got, right, rtol=tolerance, atol=tolerance, what=f"the output of {name}", hint=hint)
