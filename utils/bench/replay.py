"""One side of a case run a few times in a process of its own, for Nsight: `python -m utils.bench.replay '<json>'`."""

from __future__ import annotations

import json
import sys

import torch

from utils.bench.knobs import Setting
from utils.bench.targets import TARGETS
from utils.benchmark.profiling import nvtx_range

WARMUP = 3


@torch.no_grad()
def replay(request: dict) -> None:
    """Build the side that `request` names, warm it up, and call it once inside its NVTX range."""
    target, device = TARGETS[request["target"]], torch.device(request["device"])
    settings = {
        key: Setting(tuple(value) if isinstance(value, list) else value, "default")
        for key, value in request["values"].items()
    }
    case = next(case for case in target.cases(settings, device) if case.label == request["label"])
    built = target.build(case, request["side"], *target.inputs(case))
    for _ in range(WARMUP):
        built.fn()
    if device.type == "cuda":
        torch.cuda.synchronize()
    with nvtx_range(request["range"]):
        built.fn()
        if device.type == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    replay(json.loads(sys.argv[1]))
