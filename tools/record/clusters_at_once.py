"""Ask the driver how many thread block clusters of the GEMM's kernel run at once, for each number of blocks.

    python -m tools.record.clusters_at_once --out assets/results/h200/clusters_at_once.json

`utils.kernels.gemm_plan.clusters_at_once` says the same without a GPU; a row has both.
"""

from __future__ import annotations

import ctypes
import sys

import torch

from tools.record.common import Record, arguments_parser

CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
SIZES = (1, 2, 3, 4, 5, 6, 7, 8)  # blocks of a cluster; more than eight only some GPUs run


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a number that says what it is, and 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def most_clusters(function: int, threads: int, shared_bytes: int, blocks: int) -> int:
    """Return how many clusters of so many blocks of a kernel the driver says run at once."""
    attribute = _Attribute(CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(blocks, 1, 1))
    launch = _Launch((1024 * blocks, 1, 1), (threads, 1, 1), shared_bytes, None, ctypes.pointer(attribute), 1)
    found = ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuOccupancyMaxActiveClusters(ctypes.byref(found), ctypes.c_void_p(function), ctypes.byref(launch))
    if status:
        raise RuntimeError(f"cuOccupancyMaxActiveClusters returned {status} for clusters of {blocks} blocks.")
    return found.value


def main(arguments: list[str] | None = None) -> int:
    """Ask for each number of blocks; return the exit status."""
    options = arguments_parser(__doc__).parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: this asks the driver of an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr)
        return 1
    from utils.kernels.gemm_launch import gemm_and_launch
    from utils.kernels.gemm_plan import CONFIGS, clusters_at_once

    a = torch.zeros(256, 256, device="cuda", dtype=torch.bfloat16)
    _, launch = gemm_and_launch(a, a, CONFIGS[1])
    assert launch is not None
    handle = launch.handle
    warps, _, shared_bytes = handle.metadata[:3]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    record = Record(options.out, "thread block clusters that run at once", "cuda")
    rows = [{"blocks": blocks, "planned": clusters_at_once(blocks, sms)} for blocks in SIZES]
    record.fill(
        rows,
        lambda row: row | {"clusters": most_clusters(handle.function, 32 * warps, shared_bytes, row["blocks"])},
        lambda row: f"{row['blocks']} blocks: {row['clusters']} clusters at once, {row['planned']} planned",
    )
    record.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
