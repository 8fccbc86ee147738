from pathlib import Path

import pytest
import torch

from tests.utils.bench.bench_runs import SDPA, SMALL, run_cpu
from utils.attention.prepared import Prepared, Recompiled
from utils.bench.errors import BenchError
from utils.bench.knobs import Sweep
from utils.bench.results import exit_code, load_results
from utils.bench.targets import TARGETS
from utils.bench.targets.base import Built

SUITE, FLEX = "attention_suite:sdpa", "labs/flexattention:flex_attention"


def test_a_run_leaves_everything_documented(small_run):
    folder, document = small_run
    run = folder / "small"
    assert {path.name for path in run.iterdir()} == {"results.json", "report.md"}
    assert document["status"] == "complete" and exit_code(document) == 0
    (case,) = document["cases"]
    assert case["status"] == "ok" and case["ran"]["optimized"]["provider"] == "flash"
    assert case["ran"]["baseline"]["provider"] == "math"
    assert len(case["sides"]["optimized"]["samples_ms"]) == 12
    assert case["comparison"]["speedup"] > 0 and case["knobs"]["backend"] == {"value": "flash", "origin": "flag"}
    assert case["verification"]["optimized"]["whole"] < 1e-6


def test_a_run_is_never_overwritten(small_run):
    with pytest.raises(BenchError, match="never overwritten"):
        run_cpu(small_run[0], [SDPA], [SMALL])


def replaced(monkeypatch, change):
    """The SDPA target with the optimized side's call replaced by `change(fn)`."""
    target = TARGETS[SDPA]
    build = target.build

    def changed(case, which, q, k, v):
        built = build(case, which, q, k, v)
        return Built(change(built.fn), built.provider, built.implementation) if which == "optimized" else built

    monkeypatch.setattr(target, "build", changed)


def test_each_case_of_a_sweep_keeps_its_own_profiles(tmp_path):
    document = run_cpu(tmp_path, [SDPA], [SMALL], sweep=Sweep("backend", ("flash", "math")), profile="minimal")
    files = [file for case in document["cases"] for one in case["profiles"].values() for file in one["files"]]
    assert len(set(files)) == 4 and all(Path(file).is_file() for file in files)


def test_an_exception_out_of_memory_and_a_later_case(tmp_path, monkeypatch):
    calls = iter([torch.OutOfMemoryError("CUDA out of memory"), ValueError("broken kernel"), SystemExit(0)])

    def fail(fn):
        error = next(calls, None)

        def call():
            if error is not None:
                raise error
            return fn()

        return call

    replaced(monkeypatch, fail)
    for number, status in enumerate(("out of memory", "failed", "failed", "ok")):
        document = run_cpu(tmp_path, [SDPA], [SMALL], run_id=f"run{number}")
        assert [case["status"] for case in document["cases"]] == [status]
        assert load_results(tmp_path / f"run{number}")["status"] == "complete"


def test_ctrl_c_keeps_what_was_done(tmp_path, monkeypatch):
    count = 0

    def stop_in_the_third(fn):
        def call():
            nonlocal count
            count += 1
            if count > 6:
                raise KeyboardInterrupt
            return fn()

        return call

    replaced(monkeypatch, stop_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        run_cpu(tmp_path, [SUITE, SDPA], [SMALL, f"{SUITE}=--batch 1 --heads 1 --dtype fp32"])
    document = load_results(tmp_path / "small")
    assert [case["status"] for case in document["cases"]] == ["ok", "ok", "interrupted"]
    assert document["status"] == "interrupted" and document["finished"]


def test_one_side_alone_and_refusals_beside_it(tmp_path):
    flags = ["attention_suite:sdpa=--batch 1 --heads 1 --seq-len 32"]
    sweep = Sweep("dtype", ("fp16", "fp32"))
    document = run_cpu(tmp_path, ["attention_suite:sdpa"], flags, sweep=sweep)
    assert [case["status"] for case in document["cases"]] == ["refused", "ok"]
    assert "Use --dtype fp32" in document["cases"][0]["reason"] and exit_code(document) == 0
    document = run_cpu(tmp_path, ["labs/flashattention_gluon:baseline_flashattention_gluon"], run_id="one")
    (case,) = document["cases"]
    assert list(case["sides"]) == ["baseline"] and case["comparison"] is None
    assert case["ran"]["baseline"]["range"] == "flashattention_baseline_unfused"


def test_a_recompile_in_the_timed_calls_is_an_error(tmp_path, monkeypatch):
    checks = iter([None])  # of `prepare`, before anything is timed

    def check(self):
        if next(checks, self) is self:
            raise Recompiled("it has 2 compiled versions and one is right")

    monkeypatch.setattr(Prepared, "check", check)
    flags = [f"{FLEX}=--heads 1 --seq-len 32 --doc-span 16 --head-dim 16"]
    (case,) = run_cpu(tmp_path, [FLEX.replace(":", ":baseline_")], flags)["cases"]
    assert case["status"] == "failed" and "2 compiled versions" in case["reason"]
