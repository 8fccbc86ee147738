"""Profiles of a side: a Chrome trace always; Nsight Systems and Nsight Compute where they work, else why not.

minimal    an NVTX-named Chrome trace and, on a GPU, an Nsight Systems report
roofline   the Chrome trace, the roofline counted by hand, and Nsight Compute's roofline set: beside the hand's counts
           the hardware's, FLOPs, DRAM and L2 bytes, how busy the tensor cores were
deep_dive  the same with Nsight Compute's full set: also hit rates, occupancy, registers

Clocks are left alone: Nsight Compute runs with `--clock-control none`. It flushes the caches before each kernel where
the run's timing does (`--l2 cold`), and leaves them alone where it does not.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from utils.bench import counters
from utils.bench.errors import first_line
from utils.benchmark.profiling import launch_gaps, nvtx_range, profile, summarize_trace
from utils.files import ROOT

if TYPE_CHECKING:
    from utils.bench.run import Runner
    from utils.bench.targets.base import Built, Case, Target

NCU_SETS = {"roofline": "roofline", "deep_dive": "full"}
# ncu's --cache-control, and what it does, for either cache state of the timing
CACHE_CONTROL = {"warm": ("none", "caches left as they were"), "cold": ("all", "caches flushed before each kernel")}
TOOL_SECONDS = 300
TOP_ROWS = 20


def file_stem(workload: str, side: str, label: str) -> str:
    """Such as "optimized_flash_sdp_B4-H16-S4096-D128-bf16-causal"."""
    return f"{side}_{workload}_{re.sub(r'[^A-Za-z0-9]+', '-', label).strip('-')}"


def profile_side(runner: Runner, target: Target, case: Case, side: str, built: Built, record: dict) -> dict:
    """Profile one side: files, what was left out and why, kernels with durations, the counted roofline."""
    level = runner.options.profile
    folder = runner.options.profiles_dir / target.chapter / runner.options.run_id
    stem = file_stem(target.workload, side, case.label)
    name = record["ran"][side]["range"]

    def ranged() -> None:
        with nvtx_range(name):
            built.fn()

    trace = folder / f"{stem}.trace.json"
    recorded = profile(ranged, steps=3, warmup=2, trace_path=trace)
    rows = summarize_trace(recorded, top=TOP_ROWS)
    found = {
        "range": name,
        "files": [str(trace)],
        "why_not": [],
        "rows": rows,
        "roofline": counted_roofline(record, side),
        "gpu_busy_share": None,
    }
    if case.device.type == "cuda":
        found["gpu_busy_share"] = 1.0 - launch_gaps(recorded)["idle_share"]
    request = {
        "target": target.name,
        "side": side,
        "label": case.label,
        "range": name,
        "device": str(case.device),
        "values": {key: setting.value for key, setting in case.settings.items()},
    }
    if level == "minimal":
        made, why_not = nsight_systems(folder / stem, request)
    else:
        made, why_not, counted = nsight_compute(folder / stem, request, level, runner.options.l2)
        if counted:
            measured = record["sides"][side]
            sums = counters.total(counted["kernels"])
            found["counters"] = {
                **counted,
                "total": sums,
                "roofline": counters.hardware_roofline(sums, measured, measured.get("roof")),
            }
    found["files"] += made
    if why_not:
        found["why_not"].append(why_not)
    return found


def counted_roofline(record: dict, side: str) -> dict | None:
    """The side on the roofline by counted FLOPs and bytes: no counters needed. None without a roof for the dtype."""
    measured = record["sides"][side]
    roof = measured.get("roof")
    if roof is None:
        return None
    intensity = measured["flops"] / measured["bytes"]
    ridge = roof["tflops"] / roof["memory_bandwidth_tb_s"]
    attainable = min(roof["tflops"], intensity * roof["memory_bandwidth_tb_s"])
    return {
        "flops_per_byte": intensity,
        "ridge_point": ridge,
        "bound": "memory" if intensity < ridge else "compute",
        "attainable_tflops": attainable,
        "achieved_tflops": measured["tflops"],
        "share": measured["tflops"] / attainable,
        "roof": roof,
    }


def _run_tool(command: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired:
        return 1, f"it was not done after {TOOL_SECONDS} s"
    except OSError as error:
        return 1, first_line(error)
    return done.returncode, f"{done.stdout}\n{done.stderr}"


def _replay(request: dict) -> list[str]:
    return [sys.executable, "-m", "utils.bench.replay", json.dumps(request)]


def _tool(name: str, executable: str, request: dict) -> tuple[str | None, str]:
    """(path, why not) of one of NVIDIA's profilers."""
    if not request["device"].startswith("cuda"):
        return None, f"{name} was left out: there is no GPU to look at."
    path = shutil.which(executable)
    return path, "" if path else f"{name} was left out: {executable} is not on PATH."


def nsight_systems(base: Path, request: dict) -> tuple[list[str], str]:
    """(files, why not): an Nsight Systems report of the side in a process of its own."""
    tool, why_not = _tool("Nsight Systems", "nsys", request)
    if why_not:
        return [], why_not
    code, output = _run_tool(
        [
            tool,
            "profile",
            "--trace=cuda,nvtx",
            "--sample=none",
            "--cpuctxsw=none",
            "--force-overwrite=true",
            f"--output={base.resolve()}",
            *_replay(request),
        ]
    )
    report = base.parent / f"{base.name}.nsys-rep"
    if code or not report.is_file():
        return [], f"Nsight Systems made no report: {_last_line(output)}"
    return [str(report)], ""


def nsight_compute(base: Path, request: dict, level: str, l2: str) -> tuple[list[str], str, dict | None]:
    """(files, why not, counters): Nsight Compute's report of the side's kernels, where the counters may be read."""
    tool, why_not = _tool("Nsight Compute", "ncu", request)
    if why_not:
        return [], why_not, None
    code, output = _run_tool(
        [
            tool,
            "--clock-control",
            "none",
            "--cache-control",
            CACHE_CONTROL[l2][0],
            "--set",
            NCU_SETS[level],
            "--metrics",
            ",".join(counters.REQUESTED),
            "--nvtx",
            "--nvtx-include",
            f"{request['range']}/",
            "--force-overwrite",
            "--export",
            str(base.resolve()),
            *_replay(request),
        ]
    )
    if "ERR_NVGPUCTRPERM" in output:
        return (
            [],
            (
                "Nsight Compute was left out: the driver lets administrators alone read this GPU's counters "
                "(ERR_NVGPUCTRPERM)."
            ),
            None,
        )
    report = base.parent / f"{base.name}.ncu-rep"
    if code or not report.is_file():
        return [], f"Nsight Compute made no report: {_last_line(output)}", None
    code, output = _run_tool(
        [tool, "--import", str(report.resolve()), "--page", "raw", "--csv", "--print-units", "base"]
    )
    try:
        kernels = counters.read_raw_page(output)
    except ValueError as error:
        said = _last_line(output) if code else str(error)
        return [str(report)], f"Nsight Compute's counters could not be read from its report: {said}", None
    return [str(report)], "", {"set": NCU_SETS[level], "caches": CACHE_CONTROL[l2][1], "kernels": kernels}


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing."
