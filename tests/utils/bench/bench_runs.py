"""Runs on the CPU at the smallest sizes, for the tests of the harness."""

from pathlib import Path

import torch

from utils.bench.options import Options
from utils.bench.run import Runner
from utils.bench.targets import plan

CPU = torch.device("cpu")
SDPA = "labs/cudnn_sdpa_bench:flash_sdp"
SMALL = f"{SDPA}=--batch 1 --heads 2 --seq-len 48 --head-dim 32"


def run_cpu(folder: Path, names, extra=(), environ=None, **options) -> dict:
    """Run targets on the CPU into `folder`: the results document."""
    options = {"iterations": 12, "warmup": 1, "run_id": "small", **options}
    plans = plan(names, extra, CPU, environ or {})
    return Runner(plans, Options(artifacts_dir=folder, profiles_dir=folder / "profiles", **options), CPU).run()
