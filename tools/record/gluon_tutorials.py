"""Run Triton's own Gluon tutorials for Hopper in the simulator, unchanged, and record what came out.

    python -m tools.record.gluon_tutorials /path/to/triton/python/tutorials/gluon --out assets/results/gluon_tutorials.json

The tutorials are not part of this project; the folder comes from a checkout of Triton. Each of their tests compares a kernel
with torch. It runs here with tensors on the CPU in place of the GPU, and with small sizes. A row says which file and which
test, with which arguments, whether it agreed with torch, what the simulator reported, and the seconds. A report does not end
a run, so a kernel with one can agree with torch all the same; REASONS says what is behind those that are known.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.record.common import Record, arguments_parser

# File, test, arguments; `scheduler` is an index into the list of schedulers that tutorial 7 defines.
CASES: list[tuple[str, str, tuple, int | None]] = [
    ("01-intro", "test_copy_scalar", (), None),
    ("01-intro", "test_memcpy", (64, 40), None),
    ("01-intro", "test_memcpy", (64, 500), None),
    ("02-layouts", "test_memcpy_1d", (128, 1000, 4), None),
    ("02-layouts", "test_memcpy_2d", (128, 256, 100, 500, False, 4), None),
    ("02-layouts", "test_memcpy_2d", (128, 256, 100, 500, True, 4), None),
    ("02-layouts", "test_memcpy_2d_inout", (300, 400, True, False), None),
    ("03-async-copy", "test_memcpy_1d_cpasync", (200, 128), None),
    ("03-async-copy", "test_elementwise_add", (100, 200, 32, 32), None),
    ("03-async-copy", "test_elementwise_add_cpasync", (100, 200, 32, 32), None),
    ("03-async-copy", "test_elementwise_add_pipelined", (100, 300, 32, 64, 2), None),
    ("03-async-copy", "test_elementwise_add_pipelined", (400, 120, 32, 64, 3), None),
    ("04-tma", "test_tma_message_passing", (16,), None),
    ("04-tma", "test_memcpy_1d_tma", (64, 40), None),
    ("04-tma", "test_memcpy_1d_tma", (64, 500), None),
    ("04-tma", "test_elementwise_add_pipelined", (100, 200, 32, 64, 2), None),
    ("04-tma", "test_elementwise_add_pipelined", (400, 120, 32, 64, 3), None),
    ("05-wgmma", "test_small_mma", (64, 32, 32, False, 16, 4), None),
    ("05-wgmma", "test_small_mma", (64, 256, 128, True, 64, 8), None),
    ("05-wgmma", "test_blocked_matmul", (208, 416, 304, 64, 64, 64, False, 4), None),
    ("05-wgmma", "test_blocked_matmul", (208, 416, 304, 128, 128, 128, True, 8), None),
    ("05-wgmma", "test_blocked_matmul_pipelined", (208, 416, 304, 64, 64, 64, 4), None),
    ("07-persistence", "test_pipelined_matmul", (208, 416, 304, 128, 256, 64, 3, 8), None),
    ("07-persistence", "test_persistent_matmul", (208, 416, 304, 128, 256, 64, 2, 4), 0),
    ("07-persistence", "test_persistent_matmul", (208, 416, 304, 128, 256, 64, 2, 4), 1),
    ("07-persistence", "test_persistent_matmul_pipelined", (208, 416, 304, 64, 64, 64, 3, 4), 0),
    ("07-persistence", "test_persistent_matmul_pipelined", (208, 416, 304, 128, 256, 64, 4, 8), 1),
    ("08-warp-specialization", "test_elementwise_add_warp_specialized", (100, 200, 32, 64, 1, 1, 4), None),
    ("08-warp-specialization", "test_elementwise_add_warp_specialized", (400, 120, 32, 64, 2, 2, 8), None),
    ("13-conv-im2col", "test_tma_im2col_simple", (), None),
    ("14-multicta", "test_multicta_softmax_f32", (64, 64), None),
    ("14-multicta", "test_multicta_softmax_f32", (2, 2**16), None),
    ("14-multicta", "test_tma_multicast_copy", (), None),
]
# What was found when the reports were looked into, in the tutorials of August 2026.
REASONS = {
    ("07-persistence", "test_persistent_matmul_pipelined"): (
        "Rightly reported: the last load of the peeled prologue has no predicate, unlike those before it. Behind the last tile "
        "the kernel starts a copy of a tile that nobody needs, and ends without waiting for it."
    ),
    ("13-conv-im2col", "test_tma_im2col_simple"): "Refused by its name: the simulator does not know TMA's im2col mode.",
    ("14-multicta", "test_tma_multicast_copy"): (
        "Rightly reported: the kernel ends after a TMA store, without tma.store_wait(0). Triton 3.8 and 3.9 put no wait there "
        "either: the PTX for sm_90a ends with cp.async.bulk.commit_group."
    ),
}
SMS = 4  # of the GPU that the tutorials are told of: the persistent kernels start that many programs


def pretend_hopper() -> None:
    """Let the tutorials find a Hopper GPU: its target, its capability and its number of SMs."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    class Target(GPUTarget):
        def is_cuda_backend(self) -> bool:
            return True

    class Driver:
        def get_current_target(self) -> Target:
            return Target("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

    class Properties:
        multi_processor_count = SMS

    triton.runtime.driver.set_active(Driver())
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: Properties


def on_the_cpu() -> Any:
    """Return a context in which torch makes tensors on the CPU where a tutorial says "cuda"."""
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    return OnCpu()


def load(folder: Path, name: str) -> ModuleType:
    """Import one tutorial; the files import each other by their names."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None, f"{folder / name}.py cannot be imported"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_case(folder: Path, case: tuple) -> dict:
    """Run one test of a tutorial in the simulator and return its row."""
    from utils import gluon_cpu

    name, test, arguments, scheduler = case
    row = {"file": f"{name}.py", "test": test, "arguments": list(arguments), "report": ""}
    start = time.perf_counter()
    try:
        module = load(folder, name)
        if scheduler is not None:
            arguments = (*arguments, module.schedulers[scheduler])
            row["arguments"].append(arguments[-1].__name__)
        with on_the_cpu(), gluon_cpu.simulate(max_seconds=120, stop_at_first=False) as run:
            getattr(module, test)(*arguments)
        row["result"] = "equals torch"
        row["report"] = "; ".join(f"{report.kind}, line {report.line}: {report.message}" for report in run.reports)[
            :400
        ]
    except Exception as error:  # the simulator has refused it, or it differs from torch: both belong in the table
        row["result"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
    if row["report"] or row["result"] != "equals torch":
        row["reason"] = REASONS.get((name, test), "")
    return {**row, "seconds": round(time.perf_counter() - start, 2)}


def main() -> None:
    """Run all cases and write the record."""
    parser = arguments_parser(__doc__)
    parser.add_argument("folder", type=Path, help="python/tutorials/gluon of a checkout of Triton")
    options = parser.parse_args()
    if not (options.folder / "01-intro.py").is_file():
        parser.error(
            f"{options.folder} has no 01-intro.py; give the folder python/tutorials/gluon of a checkout of Triton."
        )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(options.folder))
    pretend_hopper()
    record = Record(options.out, "Triton's Gluon tutorials for Hopper, unchanged, in the simulator", "cpu", sms=SMS)
    record.fill(
        CASES,
        lambda case: run_case(options.folder, case),
        lambda row: (
            f"{row['file']} {row['test']}{tuple(row['arguments'])}: {row['result'][:160]} {row['report'][:80]} ({row['seconds']} s)"
        ),
    )
    record.finish()


if __name__ == "__main__":
    main()
