import time
from pathlib import Path

import pytest

from utils.bench.errors import BenchError
from utils.bench.suite import BenchmarkConfig, CUDABenchmarkHarness, load_result

B, H, S, d = 2, 2, 32, 16
FAST = dict(warmup_iterations=2, benchmark_iterations=15)


@pytest.fixture
def harness():
    return CUDABenchmarkHarness(BenchmarkConfig(**FAST))


def own_timing(ms):
    """A kernel function that runs for `ms` and returns its own time."""

    def kernel():
        begin = time.perf_counter()
        while (took := 1e3 * (time.perf_counter() - begin)) < ms:
            pass
        return took

    return kernel


def test_documented_defaults():
    config = BenchmarkConfig()
    assert (config.warmup_iterations, config.benchmark_iterations) == (200, 500)
    assert (config.flush_l2_cache, config.lock_clocks, config.exclude_memory_transfers) == (False, False, True)
    assert config.seed == 42


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"lock_clocks": True}, "never set"),
        ({"warmup_iterations": -1}, "0 or more"),
        ({"benchmark_iterations": 0}, "1 or more"),
        ({"benchmark_iterations": 1.5}, "whole number"),
    ],
)
def test_options_do_or_refuse(option, message):
    with pytest.raises(BenchError, match=message):
        BenchmarkConfig(**option)


def test_the_documented_snippet(harness, tmp_path):
    result = harness.benchmark_kernel(
        kernel_func=own_timing(0.2),
        kernel_name="my_attention_kernel",
        flop_count=4 * B * H * S * S * d,
        memory_bytes=4 * B * H * S * d * 2,
    )
    assert result.method["timing"] == "kernel's own" and "stopped: all 15 iterations done" in str(result)
    assert 0.2 <= result.median_ms < 2.0
    assert result.tflops == pytest.approx(4 * B * H * S * S * d / result.median_ms / 1e9)
    path = harness.save_results(result, tmp_path / "out" / "my_kernel.json")
    comparison = harness.compare_results(baseline_path=Path(path), current_result=result)
    assert f"{comparison['speedup']:.3f}x" == "1.000x" and f"{comparison['improvement_pct']:.2f}%" == "0.00%"
    assert load_result(path).samples_ms == result.samples_ms


@pytest.mark.parametrize(
    ("value", "message"), [(1000.0, "whole call took"), (0.0, "above 0"), (float("nan"), "above 0")]
)
def test_impossible_own_times_are_refused(harness, value, message):
    with pytest.raises(BenchError, match=message):
        harness.benchmark_kernel(lambda: value, "liar")


def test_a_kernel_that_stops_returning_its_time(harness):
    values = iter([0.001] * 5)
    with pytest.raises(BenchError, match="returned None in call"):
        harness.benchmark_kernel(lambda: next(values, None), "forgetful")
    for kernel, count, word in ((3.0, None, "callable"), (float, -3, "flop_count"), (float, "3", "flop_count")):
        with pytest.raises(BenchError, match=word):
            harness.benchmark_kernel(kernel, "wrong", count)


def test_flushing_really_writes_the_cache_outside_the_time():
    config = BenchmarkConfig(flush_l2_cache=True, **FAST)
    for kernel in (own_timing(0.05), lambda: None):
        result = CUDABenchmarkHarness(config).benchmark_kernel(kernel, "cold")
        assert result.method["l2"] == "cold" and result.method["l2_flush_bytes"] >= 64 * 1024**2
        assert result.median_ms < 1.0  # writing that much takes longer


def test_speedup_and_improvement_have_the_right_sign(harness, tmp_path):
    def reporting(ms):
        """A kernel function at work for longer than the time it reports, so that a busy machine adds nothing."""
        at_work, turns = own_timing(1.05 * ms), iter(range(10**6))
        return lambda: (at_work(), ms * (1 + 0.01 * (next(turns) % 5)))[1]

    slow = harness.benchmark_kernel(reporting(1.0), "slow", 1e6)
    fast = harness.benchmark_kernel(reporting(0.5), "fast", 1e6)
    path = harness.save_results(slow, tmp_path / "slow.json")
    found = harness.compare_results(path, fast)
    assert found["speedup"] == pytest.approx(2.0, rel=0.05) and found["improvement_pct"] == pytest.approx(50, abs=3)
    assert found["verdict"] == "faster" and found["interval"][0] <= found["speedup"] <= found["interval"][1]


def test_other_machines_and_other_work_are_refused_by_name(harness, tmp_path):
    path = harness.save_results(harness.benchmark_kernel(own_timing(0.01), "a", 1e6), tmp_path / "a.json")
    result = harness.benchmark_kernel(own_timing(0.01), "b", 2e6)
    with pytest.raises(BenchError, match="flop_count"):
        harness.compare_results(path, result)
    result.environment["gpu"] = "NVIDIA L4"
    with pytest.raises(BenchError, match=r"GPU .* and NVIDIA L4"):
        harness.compare_results(path, result)
    path.write_text(path.read_text()[:99])
    with pytest.raises(BenchError, match=r"a.json is truncated"):
        harness.compare_results(path, result)
