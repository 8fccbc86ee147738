"""SDPA's backends on an NVIDIA GPU: pins proved from their kernels, refusals told, the chooser on a few shapes."""

import pytest
import torch

from tests.utils.bench.bench_runs import SDPA
from tests.utils.bench.test_bench_gpu import run_gpu
from utils.bench.targets.sdpa import BACKENDS
from utils.bench.workload import DIRECTIONS

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
SHAPE = "--batch 2 --heads 8 --seq-len 512 --head-dim 64"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_in_each_direction(tmp_path, backend, direction):
    flags = f"{SHAPE} --causal --layout bshd --backend {backend} --baseline-backend auto --pass {direction}"
    (case,) = run_gpu(tmp_path, [SDPA], [f"{SDPA}={flags}"])["cases"]
    assert case["status"] == "ok", case["reason"]
    ran = case["ran"]["optimized"]
    assert ran["provider"] == backend and ran["kernels"] and ran["memory"]["peak_bytes"] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--backend efficient --kv-heads 2", "num_heads"),
        ("--backend flash --window 64", "attn_mask"),
        ("--backend flash --dtype fp32", "dtype"),
        ("--backend cudnn --dtype fp32", "dtype"),
    ],
)
def test_refusals_are_torchs_own(tmp_path, flags, said):
    (case,) = run_gpu(tmp_path, [SDPA], [f"{SDPA}={SHAPE} {flags}"])["cases"]
    assert case["status"] == "refused" and not case["sides"]
    assert "does not take" in case["reason"] and said in case["reason"].lower(), case["reason"]


def test_a_pin_that_allows_two_backends_is_caught(tmp_path, monkeypatch):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def pinning_two(backend, attend):
        def attend_pinned(q, k, v):
            with sdpa_kernel([backend, SDPBackend.FLASH_ATTENTION]):
                return attend(q, k, v)

        return attend_pinned

    monkeypatch.setattr("utils.attention.backends.sdpa._pinning", pinning_two)
    (case,) = run_gpu(tmp_path, [SDPA], [f"{SDPA}={SHAPE} --backend math --baseline-backend flash"])["cases"]
    assert case["status"] == "failed" and "math was asked for and flash ran" in case["reason"]
