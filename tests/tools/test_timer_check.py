"""The timer check says that it needs a GPU where there is none, and fills both tables where there is one."""

import json
import subprocess
import sys

import pytest
import torch


def run_check(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tools.record.timer_check", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so():
    result = run_check()
    assert result.returncode == 1 and "needs an NVIDIA GPU" in result.stderr


@pytest.mark.gpu
def test_both_tables_are_filled(tmp_path):
    result = run_check("--trials", "10", "--rounds", "6", "--out", str(tmp_path / "timer.json"))
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "timer.json").read_text())
    assert [row["n"] for row in record["itself"]] == [1024, 2048, 4096]
    assert [len(row["ratios"]) for row in record["itself"]] == [2, 10, 10] and len(record["do_bench"]) == 5
    assert all(len(row["measure_rounds_us"]) == 6 for row in record["do_bench"])


def test_rounds_take_turns_and_a_common_drift_cancels(monkeypatch):
    """Two timers that agree, on a GPU whose clocks fall from round to round: no difference is found."""
    import types

    from tools.record import timer_check

    clock, order = [100.0], []

    def slower(who):
        order.append(who)
        clock[0] *= 1.01
        return clock[0] / 1e3

    def measure(call, **options):
        value = slower("measure") if options.get("l2") == "cold" else 0.1
        return types.SimpleNamespace(samples_ms=[value] * 3, median_ms=value)

    def do_bench(call, **options):
        assert options["return_mode"] == "all"
        return [slower("do_bench")] * 3

    monkeypatch.setattr(timer_check, "measure", measure)
    monkeypatch.setitem(sys.modules, "triton.testing", types.SimpleNamespace(do_bench=do_bench))
    row = timer_check.against_do_bench("f", lambda: None, rounds=8)
    assert order[1:9] == ["measure", "do_bench", "do_bench", "measure"] * 2
    assert abs(row["difference"]) < 1e-3 and row["interval"][0] <= 0 <= row["interval"][1]
    assert row["measure_spread"] > 0.05 and row["samples_a_round"] == 3
