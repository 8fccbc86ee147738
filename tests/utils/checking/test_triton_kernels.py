"""A file of Triton kernels in the simulator: what failed is said with its case and its line."""

import pytest
import torch

pytest.importorskip("triton", reason="there are wheels for Linux only")

from instructor.checks.lab1 import gemm_triton
from utils.checking.labs.lab1.triton_kernels import run_cases

DOUBLE = """
import torch, triton
import triton.language as tl

@triton.jit
def double_kernel(x, y, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < count) * 2, mask=i < count)

def double(x):
    y = torch.empty_like(x)
    double_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y
"""
FAULTS = [  # text of DOUBLE, the text that replaces it, a phrase of the error
    ("* 2", "* w", "line 8 in double_kernel: tl.store(y + i"),
    ("BLOCK=64)\n", "BLOCK=64\n", "SyntaxError"),
    ("y = torch.empty_like(x)", "raise SystemExit", "on long: SystemExit"),
    ("y = torch.empty_like(x)", "y = torch.empty_like(z)", "on long: NameError"),
    ("x + i, mask=i < count", "x + i", "on long: out of bounds"),
]


def test_a_functions_outputs_come_by_their_cases():
    cases = {"short": (torch.randn(3),), "long": (torch.randn(100),)}
    results = run_cases(DOUBLE, "double.py", "double", cases)
    assert all(torch.equal(y, 2 * cases[name][0]) for name, (y, _) in results.items())
    with pytest.raises(AssertionError, match="a block of 64, and the largest here has 32"):
        run_cases(DOUBLE, "double.py", "double", cases, most=32)


@pytest.mark.parametrize(("old", "new", "phrase"), FAULTS, ids=[new for _, new, _ in FAULTS])
def test_a_failure_says_its_case_and_its_line(old, new, phrase):
    assert old in DOUBLE
    with pytest.raises(AssertionError) as failure:
        run_cases(DOUBLE.replace(old, new), "double.py", "double", {"long": (torch.randn(100),)})
    assert phrase in str(failure.value) and "/tmp" not in str(failure.value)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        (
            "class Kernel:\n    def __getitem__(self, grid):\n        return lambda a, b, c, *_, **__: c.copy_(a @ b)\n\n"
            "gemm_kernel = Kernel()\n",
            "products of tiles by tl.dot",
        ),
        ("def gemm(a, b):\n    return a @ b\n", "gemm_kernel"),
    ],
)
def test_a_product_of_torch_is_no_kernel(text, phrase):
    verdict = gemm_triton(text)
    assert not verdict and phrase in verdict.message
