"""Profiles of a side: always a Chrome trace; Nsight Systems and Nsight Compute where they work, else the reason why not.

minimal    an NVTX-named Chrome trace and, on a GPU, an Nsight Systems report
roofline   the Chrome trace, the roofline counted by hand, and Nsight Compute's roofline set, which adds the hardware's
           counts: FLOPs, DRAM and L2 bytes, how busy the tensor cores were
deep_dive  the same with Nsight Compute's full set: also hit rates, occupancy, registers

Nsight runs the side in a process of its own: `python -m utils.bench.profiles '<request as JSON>'`.

Clocks are left alone: Nsight Compute runs with `--clock-control none`. It flushes the caches before each kernel if the
run's timing does (`--l2 cold`), and leaves them alone otherwise.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from utils.bench import counters
from utils.bench.errors import first_line
from utils.bench.knobs import Setting
from utils.bench.targets import TARGETS
from utils.bench.targets.base import Case
from utils.benchmark.profiling import launch_gaps, nvtx_range, profile, summarize_trace
from utils.files import ROOT

LEVELS = ("none", "minimal", "roofline", "deep_dive")
NCU_SETS = {"roofline": "roofline", "deep_dive": "full"}
# The timing's cache state -> ncu's --cache-control, and its effect in words
CACHE_CONTROL = {"warm": ("none", "caches left as they were"), "cold": ("all", "caches flushed before each kernel")}
TOOL_SECONDS = 300
TOP_ROWS = 20
REPLAY_WARMUP = 3  # calls


@dataclass(frozen=True)
class Request:
    """One side of a case to profile: enough for another process to build the side again."""

    target: str
    side: str
    label: str
    range: str  # NVTX range of the side
    device: str
    values: dict[str, Any]  # of the knobs

    @classmethod
    def of_side(cls, case: Case, side: str, range_name: str) -> Request:
        """Make the request for one side of a case."""
        values = {key: setting.value for key, setting in case.settings.items()}
        return cls(case.target, side, case.label, range_name, str(case.device), values)

    @property
    def command(self) -> list[str]:
        """The command that runs the side in a process of its own."""
        return [sys.executable, "-m", "utils.bench.profiles", json.dumps(asdict(self))]


class NsightReport(NamedTuple):
    """What an Nsight tool left: its files, why something is missing, and the hardware counters."""

    files: list[str]
    why_not: str = ""
    counters: dict | None = None


def file_stem(workload: str, side: str, label: str) -> str:
    """Name the files of a side, such as "optimized_flash_sdp_B4-H16-S4096-D128-bf16-causal"."""
    return f"{side}_{workload}_{re.sub(r'[^A-Za-z0-9]+', '-', label).strip('-')}"


def profile_side(
    fn: Callable[[], object], request: Request, measured: dict, base: Path, *, level: str, l2: str
) -> dict:
    """Profile one side: files, reasons for what is missing, kernels with durations, and the roofline.

    Args:
        fn: the side's call.
        request: the side, for the profilers that run it in another process.
        measured: the side's measurement, as it is in the results.
        base: path of the files, without their suffixes.
        level: "minimal", "roofline" or "deep_dive".
        l2: "warm" or "cold", as the side was timed.
    """

    def call_in_range() -> None:
        with nvtx_range(request.range):
            fn()

    trace = base.with_name(f"{base.name}.trace.json")
    recorded = profile(call_in_range, steps=3, warmup=2, trace_path=trace)
    on_gpu = request.device.startswith("cuda")
    nsight = nsight_systems(base, request) if level == "minimal" else nsight_compute(base, request, level, l2)
    record = {
        "range": request.range,
        "files": [str(trace), *nsight.files],
        "why_not": [nsight.why_not] if nsight.why_not else [],
        "rows": summarize_trace(recorded, top=TOP_ROWS),
        "roofline": counted_roofline(measured),
        "gpu_busy_share": 1.0 - launch_gaps(recorded)["idle_share"] if on_gpu else None,
    }
    if nsight.counters:
        sums = counters.total(nsight.counters["kernels"])
        roofline = counters.hardware_roofline(sums, measured, measured.get("roof"))
        record["counters"] = {**nsight.counters, "total": sums, "roofline": roofline}
    return record


def counted_roofline(measured: dict) -> dict | None:
    """Place a measurement on the roofline by its counted FLOPs and bytes; None without a roof for the dtype."""
    roof = measured.get("roof")
    if roof is None:
        return None
    intensity = measured["flops"] / measured["bytes"]
    return {
        "flops_per_byte": intensity,
        "ridge_point": roof["tflops"] / roof["memory_bandwidth_tb_s"],
        **counters.under_roof(intensity, measured["tflops"], roof),
        "achieved_tflops": measured["tflops"],
        "roof": roof,
    }


def _run_tool(command: list[str]) -> tuple[int, str]:
    """Run a program; return its exit status and its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired:
        return 1, f"it was not done after {TOOL_SECONDS} s"
    except OSError as error:
        return 1, first_line(error)
    return done.returncode, f"{done.stdout}\n{done.stderr}"


def _find_tool(name: str, executable: str, request: Request) -> tuple[str, str]:
    """Find one of NVIDIA's profilers: its path, and if it cannot be used, the reason."""
    if not request.device.startswith("cuda"):
        return "", f"{name} was left out: there is no GPU to look at."
    path = shutil.which(executable) or ""
    return path, "" if path else f"{name} was left out: {executable} is not on PATH."


def nsight_systems(base: Path, request: Request) -> NsightReport:
    """Record an Nsight Systems report of the side."""
    tool, why_not = _find_tool("Nsight Systems", "nsys", request)
    if why_not:
        return NsightReport([], why_not)
    flags = ["--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true"]
    status, output = _run_tool([tool, "profile", *flags, f"--output={base.resolve()}", *request.command])
    report = base.with_name(f"{base.name}.nsys-rep")
    if status or not report.is_file():
        return NsightReport([], f"Nsight Systems made no report: {_last_line(output)}")
    return NsightReport([str(report)])


def nsight_compute(base: Path, request: Request, level: str, l2: str) -> NsightReport:
    """Record an Nsight Compute report of the side's kernels and read its counters, if the driver allows that."""
    tool, why_not = _find_tool("Nsight Compute", "ncu", request)
    if why_not:
        return NsightReport([], why_not)
    cache_control, caches = CACHE_CONTROL[l2]
    flags = f"--clock-control none --cache-control {cache_control} --set {NCU_SETS[level]} --nvtx --force-overwrite"
    status, output = _run_tool(
        [
            *(tool, *flags.split(), "--metrics", ",".join(counters.REQUESTED)),
            *("--nvtx-include", f"{request.range}/", "--export", str(base.resolve())),
            *request.command,
        ]
    )
    if "ERR_NVGPUCTRPERM" in output:
        why_not = "the driver lets administrators alone read this GPU's counters (ERR_NVGPUCTRPERM)."
        return NsightReport([], f"Nsight Compute was left out: {why_not}")
    report = base.with_name(f"{base.name}.ncu-rep")
    if status or not report.is_file():
        return NsightReport([], f"Nsight Compute made no report: {_last_line(output)}")
    status, output = _run_tool(
        [tool, "--import", str(report.resolve()), "--page", "raw", "--csv", "--print-units", "base"]
    )
    try:
        kernels = counters.read_raw_page(output)
    except ValueError as error:
        reason = _last_line(output) if status else str(error)
        return NsightReport([str(report)], f"Nsight Compute's counters could not be read from its report: {reason}")
    return NsightReport([str(report)], "", {"set": NCU_SETS[level], "caches": caches, "kernels": kernels})


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing."


@torch.no_grad()
def replay(request: Request) -> None:
    """Build the side of a request, warm it up, and call it once inside its NVTX range."""
    target, device = TARGETS[request.target], torch.device(request.device)
    settings = {
        key: Setting(tuple(value) if isinstance(value, list) else value, "default")
        for key, value in request.values.items()
    }
    case = next(case for case in target.cases(settings, device) if case.label == request.label)
    built = target.build(case, request.side, *target.inputs(case))
    for _ in range(REPLAY_WARMUP):
        built.fn()
    if device.type == "cuda":
        torch.cuda.synchronize()
    with nvtx_range(request.range):
        built.fn()
        if device.type == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    replay(Request(**json.loads(sys.argv[1])))
