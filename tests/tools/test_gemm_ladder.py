"""The GEMM ladder's table: how it is laid out, why it needs a GPU, and a measurement where there is one."""

import pytest
import torch

from tools.record import gemm_ladder
from utils.kernels.gemm import LADDER


def test_the_table_says_why_it_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gemm_ladder.main([]) == 1
    assert "GPU" in capsys.readouterr().err


def test_the_table_has_a_line_for_each_rung_and_a_column_for_each_size():
    rows = [
        {"kernel": "gemm_tiled", "size": 512, "tflops": 10.0, "torch_tflops": 40.0, "ratio": 0.25},
        {"kernel": "gemm_autotuned", "size": 1024, "tflops": 90.0, "torch_tflops": 100.0, "ratio": 0.9},
    ]
    lines = gemm_ladder.ladder_table({"rows": rows}).splitlines()
    assert lines[0].split() == ["TFLOP/s", "(ratio)", "512", "1024"]
    assert [line.split()[0] for line in lines[1:]] == [*LADDER, "torch.matmul"]
    assert lines[2].split()[1:] == ["10.0", "(0.25x)", "-"]
    assert lines[-1].split()[1:] == ["40.0", "(1.00x)", "100.0", "(1.00x)"]


@pytest.mark.gpu
def test_the_ladder_is_measured_against_torch_matmul():
    result = gemm_ladder.measure_ladder([512], max_seconds=0.3)
    assert {row["kernel"] for row in result["rows"]} >= set(LADDER) - {"gemm_warp_specialized"}
    for row in result["rows"]:
        assert row["relative_error"] < 5e-3 and row["tflops"] > 0 and row["interval"][0] <= row["ratio"]
        assert len(row["samples_ms"]) == len(row["torch_samples_ms"]) >= 3
