"""Traces are written whole, read back and added up correctly, for real profiles and hand-made traces."""

import json
import os

import pytest
import torch

from utils.benchmark import count_cuda_kernels
from utils.benchmark.profiling import (
    TraceEvent,
    export_chrome_trace,
    gpu_idle_share,
    launched,
    nvtx_range,
    profile,
    read_trace,
    summarize_trace,
)


def work(x):
    with nvtx_range("attention scores"):
        scores = x @ x
    return torch.softmax(scores, -1)


@pytest.fixture(scope="module")
def prof():
    return profile(work, torch.randn(64, 64), steps=4, warmup=1)


def test_profile_records_the_steps_it_was_asked_for():
    calls = []
    prof = profile(lambda x: calls.append(x.exp()), torch.ones(8), steps=3, warmup=2)
    assert len(calls) == 2 + 1 + 3
    counts = count_cuda_kernels(prof)
    if not torch.cuda.is_available():
        assert counts["elementwise"] == counts["total"] == 1


def test_what_one_call_launched():
    x = torch.randn(8, 8)
    seen = launched(lambda: (x @ x).exp() + (x @ x))
    assert {"aten::mm", "aten::exp", "aten::add"} <= set(seen.operators)
    assert len(seen.operators) == len(set(seen.operators)) and seen.kernels == () and seen.launches == 0


def test_nvtx_range_shows_in_the_trace(prof):
    ranges = [event for event in read_trace(prof) if event.name == "attention scores"]
    cpu_side = [event for event in ranges if event.category == "user_annotation"]
    assert len(cpu_side) == 4
    products = [event for event in read_trace(prof) if event.name == "aten::mm"]
    assert all(any(r.start_us <= p.start_us and p.end_us <= r.end_us for r in cpu_side) for p in products)


def test_export_creates_folders_replaces_and_can_be_repeated(prof, tmp_path):
    path = export_chrome_trace(prof, tmp_path / "deep" / "er" / "trace.json")
    first = path.read_bytes()
    again = export_chrome_trace(prof, path)
    assert again.read_bytes() == first
    assert sorted(os.listdir(path.parent)) == ["trace.json"]
    assert json.loads(first)["traceEvents"]
    assert read_trace(path) == read_trace(str(path)) == read_trace(prof)


def test_the_trace_names_neither_machine_nor_folder(prof, tmp_path):
    record = json.loads(export_chrome_trace(prof, tmp_path / "trace.json").read_text())
    assert "host_name" not in record
    assert record.get("traceName", "trace.json") == "trace.json"


def test_summary_shares_add_up_and_the_nesting_is_taken_out(prof):
    rows = summarize_trace(prof)
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
    assert rows == sorted(rows, key=lambda row: -row["self_us"])
    product = next(row for row in rows if row["name"] == "aten::mm")
    outer = next(row for row in rows if row["name"] == "aten::matmul")
    assert product["count"] == outer["count"] == 4
    assert outer["total_us"] >= product["total_us"] and outer["self_us"] <= outer["total_us"] - product["total_us"] + 1
    assert len(summarize_trace(prof, top=2)) == 2
    frame = summarize_trace(prof, dataframe=True)
    assert list(frame["name"]) == [row["name"] for row in rows]


def bar(name, start, duration, category="kernel", stream=7, device=0):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": 1000.0 + start,
        "dur": duration,
        "pid": device,
        "tid": stream,
        "args": {"device": device, "stream": stream},
    }


@pytest.fixture
def gpu_trace(tmp_path):
    """Write a trace: nvjet 0-10, gelu 15-20, copy on another stream 18-30, nvjet 40-50: busy 35, idle 15."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        bar("cudaLaunchKernel", -5, 2, "cuda_runtime", stream=4242),
        bar("ProfilerStep#1", 0, 50, "gpu_user_annotation"),
        bar("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", 0, 10),
        bar("triton_poi_fused_gelu_0", 15, 5),
        bar("Memcpy DtoD (Device -> Device)", 18, 12, "gpu_memcpy", stream=13),
        bar("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", 40, 10),
        {"ph": "i", "name": "Record Window End", "ts": 1100.0},
    ]
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_kernel_summary_and_idle_time(gpu_trace):
    rows = summarize_trace(gpu_trace)
    assert [(row["family"], row["count"], row["total_us"]) for row in rows] == [
        ("gemm", 2, 20.0),
        ("memory", 1, 12.0),
        ("elementwise", 1, 5.0),
    ]
    assert rows[0]["share"] == pytest.approx(20 / 37) and rows[0]["mean_us"] == 10.0
    assert gpu_idle_share(gpu_trace) == pytest.approx(15 / 50)


def test_self_time_on_hand_made_nesting():
    times = {"outer": (0, 100), "middle": (10, 50), "inner": (20, 30), "second": (70, 20)}
    events = [TraceEvent(name, "cpu_op", *time, "thread 1") for name, time in times.items()]
    elsewhere = TraceEvent("elsewhere", "cpu_op", 15, 40, "thread 2")
    rows = {row["name"]: row["self_us"] for row in summarize_trace([*events, elsewhere])}
    assert rows == {"outer": 30.0, "middle": 20.0, "inner": 30.0, "second": 20.0, "elsewhere": 40.0}


def test_damaged_and_foreign_files_are_errors_in_sentences(prof, tmp_path):
    whole = export_chrome_trace(prof, tmp_path / "whole.json").read_bytes()
    cases = {
        "cut.json": (whole[: len(whole) // 2], "not valid JSON .* cut off"),
        "empty.json": (b"", "not valid JSON"),
        "binary.json": (b"\x00\xff\xfe\x01", "not valid JSON"),
        "other.json": (b'{"a": 1}', 'no list "traceEvents"'),
    }
    for name, (data, message) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=message):
            read_trace(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"missing\.json"):
        read_trace(tmp_path / "missing.json")


def test_a_trace_without_what_was_asked_for(prof, tmp_path):
    path = tmp_path / "none.json"
    path.write_text('{"traceEvents": []}')
    assert read_trace(path) == []
    with pytest.raises(ValueError, match="neither kernels nor operators"):
        summarize_trace(path)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU kernels"):
            gpu_idle_share(prof)


def test_bad_input_to_profile_and_export(prof, tmp_path):
    unfinished = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    for kind, message, call in (
        (ValueError, "steps is 0; it must be a whole number", lambda: profile(work, torch.ones(2, 2), steps=0)),
        (TypeError, "got int", lambda: export_chrome_trace(3, tmp_path / "trace.json")),
        (ValueError, "holds nothing yet", lambda: export_chrome_trace(unfinished, tmp_path / "trace.json")),
        (RuntimeError, "already running", lambda: profile(lambda: profile(work, torch.ones(2, 2)))),
        (TypeError, "no generator", lambda: profile(lambda: (yield))),
        (ValueError, r"leave out \.gz", lambda: export_chrome_trace(prof, tmp_path / "trace.json.gz")),
    ):
        with pytest.raises(kind, match=message):
            call()
    assert os.listdir(tmp_path) == []


@pytest.mark.gpu
def test_the_kernels_of_one_call_on_the_gpu():
    x = torch.randn(64, 64, device="cuda")
    seen = launched(lambda: (x.exp(), x.exp()))
    assert len(seen.kernels) == 1 and seen.launches == 2


@pytest.mark.gpu
def test_gpu_profile_has_kernels_gaps_and_ranges(tmp_path):
    prof = profile(work, torch.randn(512, 512, device="cuda"), trace_path=tmp_path / "t.json")
    events = read_trace(tmp_path / "t.json")
    kernels = [event for event in events if event.on_gpu]
    assert kernels and all(event.lane.startswith("GPU ") for event in kernels)
    rows = summarize_trace(prof)
    assert {"gemm", "softmax"} <= {row["family"] for row in rows}
    assert 0 <= gpu_idle_share(prof) < 1
    assert any(event.name == "attention scores" for event in events)
    counts = count_cuda_kernels(prof)
    assert counts["softmax"] == 1 and counts["gemm"] >= 1
