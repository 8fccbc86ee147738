"""Every target on an NVIDIA GPU, at its real sizes or near them; what the machine lacks must be refused by name."""

from pathlib import Path

import pytest
import torch

from utils.bench.results import load_results
from utils.bench.run import Options, Runner
from utils.bench.targets import TARGETS, plan

pytestmark = pytest.mark.gpu
SDPA = "labs/cudnn_sdpa_bench:flash_sdp"
FLEX = "labs/flexattention:flex_attention"


def run_gpu(folder, names, extra=(), environ=None, **options) -> dict:
    device = torch.device("cuda")
    plans = plan(names, extra, device, environ or {})
    timing = {"iterations": 20, "warmup": 3} | {name: options.pop(name) for name in ("l2", "graph") if name in options}
    options = {"timing": timing, "run_id": "gpu", **options}
    return Runner(plans, Options(artifacts_dir=folder, profiles_dir=folder / "profiles", **options), device).run()


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_runs_or_says_why_not(tmp_path, name):
    document = run_gpu(tmp_path, [name], profile="minimal")
    assert load_results(tmp_path / "gpu")["status"] == "complete"
    for case in document["cases"]:
        assert case["status"] in ("ok", "refused"), case["reason"]
        if case["status"] == "ok":
            assert case["ran"]["optimized"]["kernels"], "no kernel was seen"
            text = Path(case["profiles"]["optimized"]["files"][0]).read_text()
            assert case["ran"]["optimized"]["range"] in text


@pytest.mark.parametrize(("profile", "l2"), [("roofline", "warm"), ("deep_dive", "cold")])
def test_a_report_of_nsight_compute_or_a_sentence_why_not(tmp_path, profile, l2):
    name = SDPA.replace(":", ":optimized_")
    (case,) = run_gpu(tmp_path, [name], [f"{SDPA}=--seq-len 1024"], profile=profile, l2=l2)["cases"]
    found = case["profiles"]["optimized"]
    if found["why_not"]:
        assert found["why_not"][0].startswith("Nsight Compute")
    else:
        assert found["files"][1].endswith(".ncu-rep")


def test_graphs_and_flushed_caches_are_what_was_asked_for(tmp_path):
    extra = ["attention_suite:sdpa=--batch 8 --heads 4 --seq-len 128 --dtype bf16"]
    (graph,) = run_gpu(tmp_path, ["attention_suite:sdpa"], extra, run_id="graph", graph=True)["cases"]
    (cold,) = run_gpu(tmp_path, ["attention_suite:sdpa"], extra, run_id="cold", l2="cold")["cases"]
    assert graph["status"] == cold["status"] == "ok", (graph["reason"], cold["reason"])
    assert graph["sides"]["optimized"]["method"]["calls_per_sample"] > 1
    assert cold["sides"]["optimized"]["median_ms"] > graph["sides"]["optimized"]["median_ms"]


def test_what_cannot_be_captured_is_refused_by_name(tmp_path):
    (case,) = run_gpu(tmp_path, [FLEX], [f"{FLEX}=--seq-len 1024"], graph=True)["cases"]
    assert case["status"] == "refused" and "leave --graph out" in case["reason"]


@pytest.mark.parametrize("block", ["64", "128"])
def test_flexattention_block_sizes_of_the_documented_command(tmp_path, block):
    (case,) = run_gpu(tmp_path, [FLEX], [f"{FLEX}=--seq-len 2048"], {"BLOCK_SIZE": block, "DOC_SPAN": "128"})["cases"]
    assert case["status"] == "ok", case["reason"]
    assert case["comparison"]["verdict"] == "faster" and case["workload"]["doc_span"] == 128


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_compile_modes(tmp_path, mode):
    (case,) = run_gpu(tmp_path, [FLEX], [f"{FLEX}=--seq-len 1024 --compile-mode {mode}"])["cases"]
    assert case["status"] == "ok", case["reason"]


def test_a_kernel_fault_leaves_valid_results_and_ends_the_run(tmp_path):
    """In a process of its own: the fault takes the CUDA context with it."""
    import subprocess
    import sys

    program = f"""
import torch
from pathlib import Path
from utils.bench.run import Options, Runner
from utils.bench.targets import TARGETS, plan
target = TARGETS[{SDPA!r}]
build = target.build
def faulty(case, side, q, k, v):
    built = build(case, side, q, k, v)
    built.fn = lambda: q.flatten()[torch.full((4,), 1 << 40, device="cuda")]
    return built
target.build = faulty
device = torch.device("cuda")
plans = plan([{SDPA!r}, "attention_suite:sdpa"], [], device, {{}})
Runner(plans, Options(artifacts_dir=Path({str(tmp_path)!r}), run_id="fault"), device).run()
"""
    subprocess.run([sys.executable, "-c", program], check=False, timeout=300, capture_output=True)
    document = load_results(tmp_path / "fault")
    assert document["status"] == "ended by a GPU fault"
    assert document["cases"][0]["status"] == "failed"
    assert {case["status"] for case in document["cases"][1:]} == {"not run"}


def test_the_suites_snippet_on_events_and_its_refusal_of_copies():
    from utils.bench.errors import BenchError
    from utils.bench.suite import BenchmarkConfig, CUDABenchmarkHarness

    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)

    def kernel():
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        a @ a
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    for cold in (False, True):
        config = BenchmarkConfig(warmup_iterations=20, benchmark_iterations=50, flush_l2_cache=cold)
        result = CUDABenchmarkHarness(config).benchmark_kernel(kernel, "events", flop_count=2 * 2048**3)
        assert result.method["timing"] == "kernel's own" and result.tflops > 1
    with pytest.raises(BenchError, match="copies between host and GPU"):
        CUDABenchmarkHarness(config).benchmark_kernel(lambda: a.cpu(), "copying")
