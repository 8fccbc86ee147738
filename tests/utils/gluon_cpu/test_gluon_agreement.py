"""The simulator against a Hopper GPU: same launches, random shapes, outputs equal within the dtype's rounding."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="gluon_cpu needs Triton for the language; there are wheels for Linux only")

from tests.utils.gluon_cpu.gluon_launches import LAUNCHES
from utils import gluon_cpu

ROUNDING = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.int32: 0.0}


def simulate(name: str, start: int) -> tuple:
    torch.manual_seed(start)
    launch = LAUNCHES[name](random.Random(start))
    with gluon_cpu.simulate(seed=start) as run:
        return launch, launch.run("cpu"), run


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_launch_runs_in_the_simulator(name):
    _, outputs, run = simulate(name, random.randrange(10**6))
    assert run.ok and all(out.isfinite().all() and out.any() for out in outputs)


def test_the_correct_kernels_are_gluon_that_compiles_for_hopper(tmp_path):
    here, root = Path(__file__).parent, Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, here / "gluon_offline.py"],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(set(done.stdout.split())) == 17


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAUNCHES)
def test_simulator_and_gpu_agree(name):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("TMA, mbarriers and wgmma of these kernels need a Hopper GPU (H100, H200)")
    for _ in range(5):
        start = random.randrange(10**6)
        launch, simulated, _ = simulate(name, start)
        for ours, real in zip(simulated, launch.run("cuda"), strict=True):
            allowed = ROUNDING[launch.rounding or ours.dtype] * ours.double().abs().max().item()
            difference = (ours.double() - real.double()).abs().max().item()
            assert difference <= allowed, f"{name}, drawn from {start}: {difference} > {allowed}"
