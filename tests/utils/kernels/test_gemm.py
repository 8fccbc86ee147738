"""The GEMM ladder: every rung against float64, on a CPU in the simulator, on a GPU compiled."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from tests.utils.kernels.products import ROUNDING, assert_product
from utils.gluon_cpu import simulate
from utils.kernels import gemm

TRITON_RUNGS = ["gemm_naive", "gemm_tiled", "gemm_tiled_grouped", "gemm_autotuned"]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def operands(dtype, device="cpu"):
    """Return pairs of matrices: single elements, prime sizes, views, empty matrices, K = 0."""

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float32, device=device).to(dtype)

    wide = randn(40, 300)
    return [
        (randn(1, 1), randn(1, 1)),
        (randn(7, 29), randn(29, 41)),
        (randn(1, 70), randn(70, 3)),
        (randn(9, 5), randn(7, 5).T),  # a row, a transposed view
        (randn(23, 7).T, randn(23, 11)),
        (wide[:9, 3:291:9], wide[5:37, ::7]),  # neither rows nor columns are contiguous in a
        (randn(1, 8).expand(9, 8), randn(8, 2)),
        (randn(3, 0), randn(0, 4)),  # stride 0, K = 0
        (randn(0, 4), randn(4, 5)),
        (randn(4, 6), randn(6, 0)),
    ]


def cases_of(name):
    """Return the operands on which a rung is simulated; the simulator refuses any access outside of them."""
    cases = [case for dtype in ROUNDING for case in operands(dtype)]
    if name in ("gemm_tiled", "gemm_tiled_grouped"):
        cases += [
            # 130 = 128 + 2: more than one tile along M, N and K; eleven rows of tiles: more than one group of eight.
            (torch.randn(130, 260), torch.randn(260, 131)),
            (torch.randn(1300, 20), torch.randn(20, 257)),
            # The sum of 4096 products of ones is 4096: sums in fp16 would stop at 2048.
            (torch.ones(2, 4096, dtype=torch.float16), torch.ones(4096, 2, dtype=torch.float16)),
        ]
    return cases


@needs_triton
@pytest.mark.parametrize("name", TRITON_RUNGS)
def test_rungs_compute_the_product_in_the_simulator(name):
    for a, b in cases_of(name):
        with simulate():
            c = gemm.LADDER[name](a, b)
        assert_product(c, a, b, name)


def test_refusals_say_what_was_given():
    half = torch.ones(3, 5).half()
    refused = [  # operands, and a word that the message must have
        ((torch.ones(2, 3, 4), torch.ones(4, 5)), ValueError, r"\(2, 3, 4\) and B \(4, 5\)"),
        ((torch.ones(2, 3), torch.ones(4, 5)), ValueError, r"A \(2, 3\) and B \(4, 5\): 3 and 4"),
        ((torch.ones(2, 3).half(), half.float()), TypeError, "one dtype"),
        ((torch.ones(2, 3).double(), half.double()), TypeError, "float64"),
        ((torch.ones(2, 3).half(), half.to("meta")), ValueError, "one device"),
        (([[1.0]], half), TypeError, "A is a list"),
        ((torch.ones(2, 3).half(), half.clone().requires_grad_()), ValueError, "forward only"),
        ((torch.ones(2, 3).half(), half), ValueError, "GPU"),
    ]
    for name, rung in gemm.LADDER.items():
        for operands, error, word in refused:
            with pytest.raises(error, match=word) as refusal:
                rung(*operands)
            assert name in str(refusal.value)
    with pytest.raises(ValueError, match=r"with simulate\(\): gemm_tiled"):
        gemm.gemm_tiled(torch.ones(2, 2), torch.ones(2, 2))


@needs_triton
def test_the_ladder_imports_no_triton_and_refuses_a_process_that_interprets():
    code = (
        "import os, sys, torch, utils.kernels.gelu, utils.gluon_cpu\nfrom utils.kernels.gemm import gemm_tiled\n"
        "print('triton' in sys.modules)\nos.environ['TRITON_INTERPRET'] = '1'\n"
        "gemm_tiled(torch.ones(2, 2), torch.ones(2, 2))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False" and "Restart Python without TRITON_INTERPRET" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("name", TRITON_RUNGS)
def test_rungs_compute_the_product_on_a_gpu(name, dtype):
    pairs = [
        (torch.randn(m, k, device="cuda").to(dtype), torch.randn(n, k, device="cuda").to(dtype).T)
        for m, k, n in torch.randint(1, 700, (6, 3)).tolist()
    ]
    # The autotuned rung times its tiles for each new size, which takes a second.
    for a, b in pairs[:1] if name == "gemm_autotuned" else [*operands(dtype, "cuda"), *pairs]:
        assert_product(gemm.LADDER[name](a, b), a, b, name)


@pytest.mark.gpu
def test_no_rung_writes_outside_of_c():
    from utils.kernels import gemm_triton

    a, b = torch.randn(131, 77, device="cuda").half(), torch.randn(77, 203, device="cuda").half()
    for name in TRITON_RUNGS:
        zone = torch.full((131 + 64, 203 + 64), 7.0, device="cuda", dtype=torch.float16)
        c = zone[32:-32, 32:-32]
        gemm_triton.launch(name.removeprefix("gemm_"), a, b, c)
        assert_product(c, a, b, name)
        c.fill_(7.0)
        assert (zone == 7.0).all(), name
