"""The profilers' paths, with programs in their place that behave as nsys and ncu do: they work, or fail in each way."""

import dataclasses
import os
import stat

import pytest
import torch

from tests.utils.bench.bench_runs import CPU, SDPA, SMALL
from utils.bench import counters, profiles
from utils.bench.report import markdown
from utils.bench.targets import plan

# What ncu 2025.3 printed on an H200, cut to the columns that are read: cuDNN's attention, and one kernel without
# tensor cores.
NAMES = [
    "ID",
    "Process ID",
    "Kernel Name",
    "Block Size",
    "Grid Size",
    *counters.REQUESTED,
    "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "sm__ops_path_tensor_src_bf16_dst_fp32_sparsity_off.sum",
    "sm__ops_path_tensor_src_bf16_dst_fp32.sum.per_second",
    "sm__ops_path_tensor_src_int8.sum",
    "sm__ops_path_tensor_op_hgmma_src_bf16_dst_fp32_sparsity_off.sum",
    "lts__t_sector_hit_rate.pct",
]
ATTENTION = [
    "0",
    "477",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma",
    "(384, 1, 1)",
    "(132, 1, 1)",
    "820,160",
    "201,377,792",
    "58,685,440",
    "3,113,784,160",
    "73.27",
    "1,000",
    "2,000",
    "3,000",
    "0",
    "0",
    "10",
    "549,755,813,888",
    "549,755,813,888",
    "670,303,128,521,264.12",
    "77",
    "549,755,813,888",
    "91.70",
]
ADDITION = [
    "1",
    "477",
    "void at::native::elementwise_kernel, with a comma",
    "(128, 1, 1)",
    "(65536, 1, 1)",
    "179,840",
    "100,000,000",
    "50,000,000",
    "200,000,000",
    "0",
    "0",
    "0",
    "0",
    "0",
    "0",
    "0",
    "0",
    "0",
    "0",
    "0",
    "0",
    "",
]
PAGE = "\n".join(",".join(f'"{cell}"' for cell in line) for line in (NAMES, [""] * len(NAMES), ATTENTION, ADDITION))
REQUEST = profiles.Request(SDPA, "optimized", "any", "flash_sdp_optimized_cudnn", "cuda:0", {})


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a shell script on PATH under a profiler's name, in front of everything."""

    def put(name: str, script: str):
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}{os.environ['PATH']}")

    return put


def a_working_ncu(tmp_path, page=PAGE):
    (tmp_path / "page.csv").write_text(page + "\n")
    return (
        f'echo "$@" >> {tmp_path}/arguments\n'
        f'if [ "$1" = --import ]; then test -f "$2" && cat {tmp_path}/page.csv; exit $?; fi\n'
        'while [ "$1" != --export ]; do shift; done\ntouch "$2.ncu-rep"\necho "==PROF== Report: $2.ncu-rep"'
    )


def test_counters_of_a_working_ncu(tmp_path, program):
    program("ncu", a_working_ncu(tmp_path))
    files, why_not, counted = profiles.nsight_compute(tmp_path / "side", REQUEST, "roofline", "warm")
    assert why_not == "" and files == [str(tmp_path / "side.ncu-rep")]
    profiled, imported = (tmp_path / "arguments").read_text().splitlines()
    for words in (
        "--clock-control none",
        "--cache-control none",
        "--set roofline",
        "dram__bytes_read.sum",
        "--nvtx-include flash_sdp_optimized_cudnn/",
        "-m utils.bench.profiles",
    ):
        assert words in profiled
    assert imported.split() == ["--import", *files, "--page", "raw", "--csv", "--print-units", "base"]
    attention, addition = counted["kernels"]
    assert attention["tensor_flops"] == 4 * 64 * 4096**2 * 128 and attention["l2_hit_percent"] == 91.7
    assert attention["time_us"] == 820.16 and "l2_hit_percent" not in addition
    assert addition["name"].endswith("with a comma") and addition["tensor_flops"] == 0


def test_the_hardwares_roofline_beside_the_hands():
    kernels = counters.read_raw_page(PAGE)
    sums = counters.total(kernels)
    assert sums["time_us"] == pytest.approx(1000.0) and sums["dram_read_bytes"] == 301_377_792
    assert sums["tensor_core_percent"] == pytest.approx(73.27 * 0.82016)
    assert sums["cuda_core_flops"] == 1000 + 2000 + 2 * 3000 + 4 * 10
    by_hand = {"flops": 4 * 64 * 4096**2 * 128, "bytes": 4 * 64 * 4096 * 128 * 2}
    roof = {"tflops": 989.0, "memory_bandwidth_tb_s": 4.8}
    found = counters.hardware_roofline(sums, by_hand, roof)
    assert found["tensor_flops_over_by_hand"] == 1.0 and found["dram_tb_s"] == pytest.approx(0.41006, rel=1e-3)
    assert found["dram_bytes_over_by_hand"] == pytest.approx(410_063_232 / 268_435_456)
    assert found["bound"] == "compute" and found["share"] == pytest.approx(0.5498 / 0.989, rel=1e-3)
    first, second = counters.sentences({"kernels": kernels, "total": sums, "roofline": found, "caches": "warm"})
    assert "DRAM 301.4 MB read and 108.7 MB written" in first and "tensor cores busy 60.1%" in first
    assert "compute-bound, 550 of 989 TFLOP/s attainable" in second


def test_what_a_gpu_does_not_count_is_left_out():
    page = PAGE.replace("sm__ops_path_tensor", "other").replace("lts__t_bytes.sum", "other_bytes")
    sums = counters.total(counters.read_raw_page(page))
    assert sums["tensor_flops"] is None and sums["l2_bytes"] is None and sums["time_us"] == pytest.approx(1000.0)
    found = counters.hardware_roofline(sums, {"flops": 1.0, "bytes": 1.0}, None)
    assert found["flops"] is None and found["bound"] is None and found["dram_tb_s"] > 0
    (line,) = counters.sentences({"kernels": [1, 2], "total": sums, "roofline": found, "caches": "warm"})
    assert "L2" not in line and "DRAM" in line


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"; exit 1', "administrators alone"),
        ('echo "==ERROR== LibraryNotLoaded"; exit 1', "made no report: ==ERROR== LibraryNotLoaded"),
        ('echo "all well, and no file"', "made no report: all well"),
        ("exit 3", "made no report: it said nothing."),
    ],
)
def test_an_ncu_that_fails_is_one_sentence(tmp_path, program, script, message):
    program("ncu", script)
    files, why_not, counted = profiles.nsight_compute(tmp_path / "x", REQUEST, "deep_dive", "cold")
    assert files == [] and counted is None and message in why_not and "\n" not in why_not


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("", "printed no table"),
        ('"ID","Kernel Name"', "holds no kernel"),
        ("==WARNING== no kernels were profiled", "printed no table"),
    ],
)
def test_a_report_without_kernels_keeps_the_file_and_says_so(tmp_path, program, page, message):
    program("ncu", a_working_ncu(tmp_path, page))
    files, why_not, counted = profiles.nsight_compute(tmp_path / "x", REQUEST, "deep_dive", "cold")
    assert len(files) == 1 and counted is None and message in why_not


def test_nsys_that_works_and_one_that_does_not(tmp_path, program):
    program(
        "nsys",
        f'echo "$@" > {tmp_path}/arguments\nfor word; do case $word in --output=*) '
        'touch "${word#--output=}.nsys-rep";; esac; done',
    )
    assert profiles.nsight_systems(tmp_path / "s", REQUEST) == ([str(tmp_path / "s.nsys-rep")], "", None)
    assert "--trace=cuda,nvtx" in (tmp_path / "arguments").read_text()
    program("nsys", 'echo "Importer error status: The importer binary could not be found."')
    files, why_not, _ = profiles.nsight_systems(tmp_path / "t", REQUEST)
    assert files == [] and why_not.startswith("Nsight Systems made no report: Importer error")


def test_tools_that_are_missing_or_too_slow(tmp_path, program, monkeypatch):
    monkeypatch.setattr(profiles, "TOOL_SECONDS", 0.2)
    program("nsys", "exec sleep 30")
    assert "not done after 0.2 s" in profiles.nsight_systems(tmp_path / "s", REQUEST).why_not
    monkeypatch.setenv("PATH", str(tmp_path))
    assert profiles.nsight_systems(tmp_path / "s", REQUEST).why_not.endswith("nsys is not on PATH.")
    assert profiles.nsight_compute(tmp_path / "s", REQUEST, "roofline", "warm").why_not.endswith("ncu is not on PATH.")


def test_counters_stand_in_the_results_and_the_report(tmp_path, program, monkeypatch, document):
    """The whole path of `--profile roofline`, on a request that claims to be of a GPU."""
    program("ncu", a_working_ncu(tmp_path))
    monkeypatch.setattr(profiles, "launch_gaps", lambda trace: {"idle_share": 0.25})
    (found,) = plan([SDPA], [SMALL], CPU, {})
    (case,) = found.cases
    built = found.target.build(case, "optimized", *found.target.inputs(case))
    request = dataclasses.replace(profiles.Request.of_side(case, "optimized", "r"), device="cuda:0")
    record = document["cases"][0]
    measured = record["sides"]["optimized"]
    with torch.no_grad():
        profile = profiles.profile_side(built.fn, request, measured, tmp_path / "p", level="roofline", l2="warm")
    assert profile["gpu_busy_share"] == 0.75
    assert profile["why_not"] == [] and len(profile["files"]) == 2
    assert profile["counters"]["roofline"]["flops"] > 0 and profile["counters"]["set"] == "roofline"
    record["profiles"] = {"optimized": profile}
    page = markdown(document)
    assert "hardware counters (2 kernels, 1000 us, caches left as they were): DRAM 301.4 MB read" in page
    assert "roofline counted by hand: " in page
