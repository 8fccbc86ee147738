"""Runs on the CPU at the smallest sizes, for the tests of the harness."""

from pathlib import Path

import torch

from utils.bench.run import Options, Runner
from utils.bench.targets import plan

CPU = torch.device("cpu")
SDPA = "labs/cudnn_sdpa_bench:flash_sdp"
SMALL = f"{SDPA}=--batch 1 --heads 2 --seq-len 48 --head-dim 32"


def run_cpu(folder: Path, names, extra=(), environ=None, iterations=12, run_id="small", sweep=None, **options) -> dict:
    """Run targets on the CPU into `folder`: the results document."""
    plans = plan(names, extra, CPU, environ or {}, sweep=sweep)
    options |= {"artifacts_dir": folder, "profiles_dir": folder / "profiles", "run_id": run_id}
    return Runner(plans, Options(timing={"iterations": iterations, "warmup": 1}, **options), CPU).run()
