"""The timer check says that it needs a GPU where there is none, and fills both tables where there is one."""

import json
import subprocess
import sys

import pytest
import torch


def run_check(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "utils.bench.timer_check", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so():
    result = run_check()
    assert result.returncode == 1 and "needs an NVIDIA GPU" in result.stderr


@pytest.mark.gpu
def test_both_tables_are_filled(tmp_path):
    result = run_check("--trials", "10", "--json", str(tmp_path / "timer.json"))
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "timer.json").read_text())
    assert [row["n"] for row in record["itself"]] == [1024, 2048, 4096]
    assert all(len(row["ratios"]) == 10 for row in record["itself"]) and len(record["do_bench"]) == 5
