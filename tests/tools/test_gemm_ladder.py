"""The GEMM ladder's table: why it needs a GPU, what its rows say, and a measurement where there is one."""

import pytest
import torch

from tools.record import gemm_ladder
from utils.kernels.gemm import LADDER


def test_the_table_says_why_it_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="GPU"):
        gemm_ladder.main([])


def test_a_rung_is_timed_or_says_why_not(monkeypatch):
    def refuse(a, b):
        raise ValueError("it needs a Hopper GPU")

    monkeypatch.setattr(gemm_ladder, "LADDER", {"gemm_naive": torch.mm, "gemm_warp_specialized": refuse})
    timed = gemm_ladder.rung_row(64, "gemm_naive", "cpu", max_seconds=0.1)
    assert timed["relative_error"] < 5e-3 and "x torch.matmul" in gemm_ladder.show(timed)
    for size, name, reason in ((64, "gemm_warp_specialized", "Hopper"), (8192, "gemm_naive", "up to 4096")):
        assert reason in gemm_ladder.show(gemm_ladder.rung_row(size, name, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LADDER)
def test_the_ladder_is_measured_against_torch_matmul(name):
    row = gemm_ladder.rung_row(512, name, max_seconds=0.3)
    if name != "gemm_warp_specialized" or "skipped" not in row:
        assert row["relative_error"] < 5e-3 and row["tflops"] > 0 and row["interval"][0] <= row["ratio"]
        assert len(row["samples_ms"]) == len(row["torch_samples_ms"]) >= 3
