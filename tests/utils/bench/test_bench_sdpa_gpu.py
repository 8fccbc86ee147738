"""SDPA's backends on an NVIDIA GPU: pins proved from their kernels, refusals told, the chooser on a few shapes."""

import pytest

from tests.utils.bench.bench_runs import SDPA
from tests.utils.bench.test_bench_gpu import run_gpu
from utils.bench.targets.backends import SDPA as BACKENDS
from utils.bench.workload import DIRECTIONS

pytestmark = pytest.mark.gpu
SHAPE = "--batch 2 --heads 8 --seq-len 512 --head-dim 64"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_in_each_direction(tmp_path, backend, direction):
    flags = f"{SHAPE} --causal --backend {backend} --baseline-backend auto --pass {direction}"
    (case,) = run_gpu(tmp_path, [SDPA], [f"{SDPA}={flags}"])["cases"]
    assert case["status"] == "ok", case["reason"]
    ran = case["ran"]["optimized"]
    assert ran["provider"] == backend and ran["kernels"]


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
