"""What lab 1 says about its record from an H200 holds: each sentence beside the number that it is about."""

import json
import re

import pytest

from instructor.build import ROOT
from tests.instructor.lab_cases import built
from utils.config import GPU_SPECS, get_ridge_point

H200 = GPU_SPECS["H200"]
RECORDS = ROOT / "assets/results/h200"


@pytest.fixture(scope="module")
def text() -> str:
    """The instructor's notebook, answers in words included, as one line."""
    cells = json.loads(built("lab1").instructor)["cells"]
    return re.sub(r"\s+", " ", " ".join("".join(cell["source"]) for cell in cells))


@pytest.fixture(scope="module")
def tables() -> dict[str, list[dict]]:
    return json.loads((RECORDS / "lab1.json").read_text())["tables"]


def row(table: list[dict], **where) -> dict:
    (found,) = [row for row in table if all(row[name] == value for name, value in where.items())]
    return found


def says(text: str, *sentences: str) -> None:
    """Check that the lab still says this: a test of a sentence that is gone would hold for nothing."""
    for sentence in sentences:
        assert sentence in text, sentence


def test_opening(text, tables):
    says(
        text,
        "An H200 can do 989 trillion bf16 operations a second.",
        "it does less than one hundredth of a percent of that",
        "Memory alone would allow three to four hundred times as much.",
        "It reaches less than one percent of its *memory* roof.",
        "On the H200 at batch 1 it is 0.3% of the memory roof",
    )
    decode = row(tables["layer_roofline"], operation="decode B1")
    assert round(H200["bf16_tflops"]) == 989
    assert decode["TFLOP/s"] / H200["bf16_tflops"] < 1e-4
    assert decode["FLOPs/Byte"] < get_ridge_point("H200", "bf16")  # so the memory roof is the lower one
    assert decode["share"] == pytest.approx(decode["TFLOP/s"] / (decode["FLOPs/Byte"] * H200["memory_bandwidth_tb_s"]))
    again = json.loads((RECORDS / "labs_again.json").read_text())["labs"]["lab1"]
    for share in (decode["share"], row(again["layer_roofline"], operation="decode B1")["share"]):
        assert 300 <= 1 / share <= 400 and f"{share:.1%}" == "0.3%"


def test_two_runs_on_the_same_gpu_agree_where_the_gpu_takes_the_time(tables):
    """On a busier CPU what waits for launches took up to twice as long; what the GPU computes took the same time."""
    again = json.loads((RECORDS / "labs_again.json").read_text())["labs"]["lab1"]
    for operation in ("gemm 8192", "gemv 16384"):
        first, second = (row(t["roofline"], operation=operation)["TFLOP/s"] for t in (tables, again))
        assert first == pytest.approx(second, rel=0.01)
    for first, second in zip(tables["gelu"], again["gelu"], strict=True):
        assert first["ms"] == pytest.approx(second["ms"], rel=0.03)
    assert row(again["roofline"], operation="gemm 256")["TFLOP/s"] < 0.7 * tables["roofline"][0]["TFLOP/s"]


def test_large_products_reach_four_fifths_of_the_peak(text, tables):
    says(text, "and reach 80% of the peak all the same")
    assert 0.75 < row(tables["roofline"], operation="gemm 8192")["share"] < 0.85


def test_kernels_of_gelu_by_hand(text, tables):
    """Counted after a synchronize, a chain of nine operators is nine kernels on a GPU, however long they are."""
    says(text, "The chain of nine operators")
    assert row(tables["gelu"], GELU="by hand")["kernels"] == 9
    assert {way["kernels"] for way in tables["gelu"] if way["GELU"] != "by hand"} == {1}


def test_graphs(text, tables):
    says(
        text,
        "a CUDA graph gains nothing at batch 8, and a part of the time at batch 1",
        "one launch is left of about ninety",
        "It still takes seventy times as long as the memory floor allows",
    )
    graphs = tables["cuda_graphs"]
    decode = row(graphs, phase="decode after 512", batch=1)
    assert 85 <= decode["kernels"] <= 95 and 85 <= decode["launches"] <= 95 and decode["launches of the graph"] == 1
    assert decode["gain"] > 4 and decode["graph_ms"] / 0.0023 == pytest.approx(70, abs=5)
    one, eight = (row(graphs, phase="prefill of 8192", batch=batch) for batch in (1, 8))
    assert 1.2 < one["gain"] < 2.6 and 0.95 < eight["gain"] < 1.1
    # "At batch 8 the kernels are longer than a launch", at batch 1 shorter.
    launch_us = 1e3 * decode["eager_ms"] / decode["kernels"]
    assert 1e3 * eight["graph_ms"] / eight["kernels"] > launch_us > 1e3 * one["graph_ms"] / one["kernels"]


def test_own_flash_attention(text, tables):
    """The record holds three versions, and the memory of the student's loop grows like the library's."""
    says(text, "it grows like the library's, not like the square", "On a GPU it is even slower than standard attention")
    first, last = tables["flash_attention"][0], tables["flash_attention"][-1]
    longer = last["seq_len"] / first["seq_len"]
    assert last["standard_mem_gb"] / first["standard_mem_gb"] > 0.8 * longer**2
    assert last["yours_mem_gb"] / first["yours_mem_gb"] < 1.5 * longer
    assert last["library_mem_gb"] / first["library_mem_gb"] < 1.2 * longer
    assert last["yours_ms"] > last["standard_ms"]


def test_flash_attention_in_triton(text, tables):
    """Bonus 5.6's kernel beside the library, whose default on an H200 is cuDNN (lab 4's record)."""
    says(
        text,
        "three times as fast as standard attention, and has 0.6 of the speed of the library, which is cuDNN there",
        "Blocks of 64 × 64 were the fastest of six sizes tried.",
    )
    record = json.loads((ROOT / "assets/results/h200/lab1_flash_triton.json").read_text())["tables"]
    longest = row(record["flash_triton"], tokens=16384)
    assert 2.8 < longest["standard, ms"] / longest["your kernel, ms"] < 3.4
    assert round(longest["library, ms"] / longest["your kernel, ms"], 1) == 0.6
    for tokens in (4096, 16384):
        tried = {entry["blocks"]: entry["ms"] for entry in record["blocks"] if entry["tokens"] == tokens}
        assert len(tried) == 6 and min(tried, key=tried.get) == "64 x 64"
    order = json.loads((ROOT / "assets/results/h200/lab4.json").read_text())["tables"]["order"]
    assert order[0]["torch asks"].startswith("cudnn")
