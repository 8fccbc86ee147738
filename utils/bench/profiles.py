"""Profiles of a side: always a Chrome trace, and a report of Nsight Systems or Compute, or the reason for its absence.

minimal    an NVTX-named Chrome trace and, on a GPU, an Nsight Systems report
roofline   the Chrome trace, and a report of Nsight Compute's roofline set
deep_dive  the Chrome trace, and a report of Nsight Compute's full set

Nsight runs the side in a separate process: `python -m utils.bench.profiles '<request as JSON>'`.

Nsight Compute runs with `--clock-control none`, so it does not change the clocks. It flushes the caches before each kernel
only if the timing of the run does (`--l2 cold`).
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
from typing import Any

import torch

from utils.bench.knobs import Setting
from utils.bench.targets import read_name
from utils.benchmark.profiling import gpu_idle_share, nvtx_range, profile, summarize_trace
from utils.files import ROOT

LEVELS = ("none", "minimal", "roofline", "deep_dive")
NCU_SETS = {"roofline": "roofline", "deep_dive": "full"}
CACHE_CONTROL = {"warm": "none", "cold": "all"}  # the timing's cache state -> ncu's --cache-control
TOOL_SECONDS = 300
TOP_ROWS = 20
REPLAY_WARMUP = 3  # calls


@dataclass(frozen=True)
class Request:
    """One side of a case to profile. A separate process can build the side from these fields."""

    target: str
    side: str
    label: str
    range: str  # NVTX range of the side
    device: str
    values: dict[str, Any]  # of the knobs


def profile_side(fn: Callable[[], object], request: Request, folder: Path, level: str, l2: str) -> dict:
    """Profile the call of one side. Return the files in `folder`, reasons for missing files, and kernels with durations.

    Nsight builds the side from `request` in a separate process. l2: the cache state of the timing.
    """
    # Such as "optimized_flash_sdp_B4-H16-S4096-D128-bf16-causal".
    label = re.sub(r"[^A-Za-z0-9]+", "-", request.label).strip("-")
    base = folder / f"{request.side}_{request.target.partition(':')[2]}_{label}"

    def call_in_range() -> None:
        with nvtx_range(request.range):
            fn()

    trace = base.with_name(f"{base.name}.trace.json")
    recorded = profile(call_in_range, steps=3, warmup=2, trace_path=trace)
    report, why_not = nsight(base, request, level, l2)
    return {
        "range": request.range,
        "files": [str(trace)] + ([str(report)] if report else []),
        "why_not": [why_not] if why_not else [],
        "rows": summarize_trace(recorded, top=TOP_ROWS),
        "gpu_busy_share": 1.0 - gpu_idle_share(recorded) if request.device.startswith("cuda") else None,
    }


def nsight(base: Path, request: Request, level: str, l2: str) -> tuple[Path | None, str]:
    """Run Nsight Systems ("minimal") or Compute on a side. Return the report, or the reason for its absence."""
    if level == "minimal":
        name, executable, report = "Nsight Systems", "nsys", base.with_name(f"{base.name}.nsys-rep")
        flags = ["profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true"]
        flags.append(f"--output={base.resolve()}")
    else:
        name, executable, report = "Nsight Compute", "ncu", base.with_name(f"{base.name}.ncu-rep")
        flags = f"--clock-control none --cache-control {CACHE_CONTROL[l2]} --set {NCU_SETS[level]} --nvtx".split()
        flags += ["--force-overwrite", "--nvtx-include", f"{request.range}/", "--export", str(base.resolve())]
    if not request.device.startswith("cuda"):
        return None, f"{name} was left out: there is no GPU to look at."
    if (tool := shutil.which(executable)) is None:
        return None, f"{name} was left out: {executable} is not on PATH."
    command = [tool, *flags, sys.executable, "-m", "utils.bench.profiles", json.dumps(asdict(request))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired:
        return None, f"{name} made no report: it was not done after {TOOL_SECONDS} s"
    output = f"{done.stdout}\n{done.stderr}"
    if "ERR_NVGPUCTRPERM" in output:
        return None, f"{name} was left out: only administrators may read this GPU's counters (ERR_NVGPUCTRPERM)."
    if done.returncode or not report.is_file():
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        return None, f"{name} made no report: {lines[-1][:300] if lines else 'it said nothing.'}"
    return report, ""


@torch.no_grad()
def replay(request: Request) -> None:
    """Build the side of a request, warm it up, and call it once inside its NVTX range."""
    ((target, _),), device = read_name(request.target), torch.device(request.device)
    settings = {key: Setting(value, "default") for key, value in request.values.items()}
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
