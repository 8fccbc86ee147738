"""Profiles of a side: a Chrome trace always; Nsight Systems and Nsight Compute where they work, else why not.

minimal    an NVTX-named Chrome trace and, on a GPU, an Nsight Systems report
roofline   the Chrome trace, the counted roofline, and Nsight Compute's roofline set
deep_dive  the same with Nsight Compute's full set

Clocks are left alone: Nsight Compute runs with `--clock-control none`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from utils.bench.errors import first_line
from utils.environment import PROJECT_ROOT
from utils.profiling import launch_gaps, nvtx_range, profile, summarize_trace

if TYPE_CHECKING:
    from utils.bench.run import Runner
    from utils.bench.targets.base import Built, Case, Target

NCU_SETS = {"roofline": "roofline", "deep_dive": "full"}
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
    found = {"range": name, "files": [str(trace)], "why_not": [], "rows": rows,
             "roofline": counted_roofline(record, side), "gpu_busy_share": None}
    if case.device.type == "cuda":
        found["gpu_busy_share"] = 1.0 - launch_gaps(recorded)["idle_share"]
    request = {"target": target.name, "side": side, "label": case.label, "range": name, "device": str(case.device),
               "values": {key: setting.value for key, setting in case.settings.items()}}
    tools = [nsight_systems] if level == "minimal" else [nsight_compute]
    for tool in tools:
        made, why_not = tool(folder / stem, request, level)
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
    return {"flops_per_byte": intensity, "ridge_point": ridge, "bound": "memory" if intensity < ridge else "compute",
            "attainable_tflops": attainable, "achieved_tflops": measured["tflops"],
            "share": measured["tflops"] / attainable, "roof": roof}


def _run_tool(command: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, cwd=PROJECT_ROOT,
                              check=False)
    except subprocess.TimeoutExpired:
        return 1, f"it was not done after {TOOL_SECONDS} s"
    except OSError as error:
        return 1, first_line(error)
    return done.returncode, f"{done.stdout}\n{done.stderr}"


def _replay(request: dict) -> list[str]:
    return [sys.executable, "-m", "utils.bench.replay", json.dumps(request)]


def nsight_systems(base: Path, request: dict, level: str) -> tuple[list[str], str]:
    """(files, why not): an Nsight Systems report of the side in a process of its own."""
    if not request["device"].startswith("cuda"):
        return [], "Nsight Systems was left out: there is no GPU to trace."
    tool = shutil.which("nsys")
    if tool is None:
        return [], "Nsight Systems was left out: nsys is not on PATH."
    code, output = _run_tool([tool, "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none",
                              "--force-overwrite=true", f"--output={base.resolve()}", *_replay(request)])
    report = base.parent / f"{base.name}.nsys-rep"
    if code or not report.is_file():
        return [], f"Nsight Systems made no report: {_last_line(output)}"
    return [str(report)], ""


def nsight_compute(base: Path, request: dict, level: str) -> tuple[list[str], str]:
    """(files, why not): Nsight Compute's report of the side's kernels, where the counters may be read."""
    if not request["device"].startswith("cuda"):
        return [], "Nsight Compute was left out: there is no GPU to count on."
    tool = shutil.which("ncu")
    if tool is None:
        return [], "Nsight Compute was left out: ncu is not on PATH."
    code, output = _run_tool([tool, "--clock-control", "none", "--set", NCU_SETS[level], "--nvtx", "--nvtx-include",
                              f"{request['range']}/", "--force-overwrite", "--export", str(base.resolve()),
                              *_replay(request)])
    if "ERR_NVGPUCTRPERM" in output:
        return [], ("Nsight Compute was left out: the driver lets administrators alone read this GPU's counters "
                    "(ERR_NVGPUCTRPERM).")
    report = base.parent / f"{base.name}.ncu-rep"
    if code or not report.is_file():
        return [], f"Nsight Compute made no report: {_last_line(output)}"
    return [str(report)], ""


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing."
