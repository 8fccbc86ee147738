"""The roofs of a machine: no program on it exceeds these FLOP/s and bytes/s.

A datasheet's roof follows from the clocks and the number of units. A measured roof is the speed of a large matrix product
and of a large copy. It is usually lower: a kernel may reach 70% of the datasheet's roof and 95% of the measured roof.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from utils.benchmark.measuring import measure_together, pick_device
from utils.config import DTYPES, dtype_name, gpu_spec
from utils.machine.device import default_device, detect_gpu
from utils.machine.environment import available_memory_bytes, cpu_model, last_level_cache_bytes

_TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}

# Side n of the square product. With 2 n^3 FLOPs on 3 n^2 elements and a large n, the bytes do not matter.
_SIDE = {"cpu": 2048, "cuda": 8192}
_COPY_BYTES = {"cpu": 256_000_000, "cuda": 4_000_000_000}
_MIN_COPY = 4  # times the last-level cache
_ROUNDS = 32  # samples of each product and of the copy, in turns
_BUDGET_S = 3.0  # fewer rounds on a machine that needs longer for them
_BUSY = 0.2  # if other processes use more of the CPU, `Roofs.busy` warns


@dataclass(frozen=True)
class Roofs:
    """Peak FLOP/s for each dtype and memory bandwidth of one machine, and the source of these numbers."""

    name: str
    origin: Literal["datasheet", "measured"]
    tflops: dict[str, float]  # "bf16" -> TFLOP/s
    memory_bandwidth_tb_s: float  # TB/s, 1e12, read + written
    detail: str = ""  # the document, or the sizes measured
    others: float | None = None  # share of the CPU that other processes used just before the measurement, if known

    @property
    def busy(self) -> str:
        """A warning if the machine was busy during the measurement, so that the roofs may be too low; else ""."""
        if self.others is None or self.others <= _BUSY:
            return ""
        return (
            f"The machine was busy when its roofs were measured: other processes used {self.others:.0%} of the CPU. "
            "The roofs may be too low; machine_roofs(refresh=True) measures again and keeps the best."
        )

    def remeasure(self) -> Roofs:
        """If this machine's roofs were measured, measure again and return the best of all; else return the roofs unchanged."""
        if self.origin == "measured" and any(self is kept for kept in _machine_roofs.values()):
            return machine_roofs(refresh=True)
        return self

    def record(self, dtype: str | None) -> dict:
        """Return the entry for a Measurement: name and origin of the roofs, and both peaks for this dtype."""
        facts = {"name": self.name, "origin": self.origin, "dtype": dtype, "tflops": self.tflops.get(dtype or "")}
        return facts | {"memory_bandwidth_tb_s": self.memory_bandwidth_tb_s}

    def ridge_point(self, dtype) -> float:
        """Return the arithmetic intensity in FLOPs/Byte at which the compute roof meets the memory roof."""
        return self.peak_tflops(dtype) / self.memory_bandwidth_tb_s

    def attainable_tflops(self, intensity: float, dtype) -> float:
        """Return the roof in TFLOP/s at an intensity in FLOPs/Byte: the lower of compute and memory roof."""
        if not intensity >= 0:
            raise ValueError(f"intensity is {intensity!r}; it must be a number of FLOPs/Byte, 0 or more.")
        return min(self.peak_tflops(dtype), intensity * self.memory_bandwidth_tb_s)

    def peak_tflops(self, dtype) -> float:
        """Return the compute roof in TFLOP/s for a dtype, given as "bf16" or torch.bfloat16."""
        name = dtype_name(dtype)
        if name not in self.tflops:
            raise ValueError(
                f"The {self.origin} roofs of {self.name} have no peak for {name}; they have {', '.join(self.tflops)}."
            )
        return self.tflops[name]


def datasheet_roofs(gpu_name: str) -> Roofs:
    """Return the roofs of a GPU by its datasheet: the dense rates of the row `gpu_name` in GPU_SPECS."""
    spec = gpu_spec(gpu_name)
    return Roofs(
        name=spec["full_name"],
        origin="datasheet",
        tflops={name: spec[f"{name}_tflops"] for name in DTYPES if spec[f"{name}_tflops"] is not None},
        memory_bandwidth_tb_s=spec["memory_bandwidth_tb_s"],
        detail=spec["source"],
    )


def measure_roofs(device: torch.device | str | None = None) -> Roofs:
    """Measure the roofs of this machine, in a few seconds: square matrix products and a large copy.

    The best of all samples counts, since a disturbance can only lengthen a time. The products and the copy take turns,
    so that a short disturbance does not hit all samples of one of them.

    On a CPU the bf16 roof is at least the fp32 roof, because a kernel may convert bf16 to fp32 and multiply in fp32. This is
    faster on a CPU without bf16 instructions. On some CPUs, such as x86 without AVX-512, torch has no bf16 kernel. There
    one product would take a minute, so bf16 is not timed, and its roof is the fp32 roof.

    Args:
        device: "cpu" measures fp32 and bf16. "cuda" measures fp16, bf16, fp32 and tf32, if the GPU supports them. Default:
            the GPU if there is one.
    """
    target = pick_device(device)
    side, copy_bytes, timed = _SIDE[target.type], _copy_bytes(target), _fast_dtypes(target)
    calls = {name: _product(target, name, side) for name in timed}
    source = torch.ones(copy_bytes // 4, dtype=torch.float32, device=target)
    calls["copy"] = functools.partial(torch.empty_like(source).copy_, source)  # reads and writes `copy_bytes`

    others = psutil.cpu_percent(interval=0.2) / 100  # this process only waits, so other processes cause the load
    # A GPU's first call loads libraries, so its time is not the time of a launch.
    warmup = 3 if target.type == "cuda" else 1
    options = dict(warmup=warmup, iterations=_ROUNDS, max_seconds=_BUDGET_S, device=target)
    results = measure_together(list(calls.values()), labels=list(calls), **options)
    best_ms = {result.label: result.min_ms for result in results}

    reached = {name: 2 * side**3 / best_ms[name] / 1e9 for name in timed}
    if target.type == "cpu":
        threads = torch.get_num_threads()
        machine = f"{cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"
        reached["bf16"] = max(reached.get("bf16", 0.0), reached["fp32"])
    else:
        machine = torch.cuda.get_device_name(target)
    return Roofs(
        name=machine,
        origin="measured",
        tflops=reached,
        memory_bandwidth_tb_s=2 * copy_bytes / best_ms["copy"] / 1e9,
        detail=f"best of repeats: torch.mm of {side} x {side} matrices, copy of {copy_bytes / 1e6:.0f} MB "
        f"(read + written), torch {torch.__version__}; {len(results[0].samples_ms)} rounds"
        + ("; bf16 as fp32, since torch has no bf16 kernel for this CPU" if timed == ("fp32",) else ""),
        others=others,
    )


def _fast_dtypes(device: torch.device) -> tuple[str, ...]:
    """Return the dtypes for which torch has a fast matrix product on this device."""
    if device.type == "cuda":
        ampere = torch.cuda.get_device_capability(device) >= (8, 0)  # older tensor cores compute only fp16
        return ("fp16", "bf16", "fp32", "tf32") if ampere else ("fp16", "fp32")
    # No fp16: on a CPU torch multiplies fp16 matrices at about 1 GFLOP/s, far below what the machine can do.
    bf16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return ("fp32", "bf16") if bf16 else ("fp32",)


_machine_roofs: dict[tuple, Roofs] = {}


def machine_roofs(refresh: bool = False) -> Roofs:
    """Return the roofs of this machine: from the datasheet if GPU_SPECS has its GPU, else from a measurement.

    A measurement is made once and kept. The roofs of a CPU depend on the number of threads, so each number of threads is
    measured separately. If the machine is busy during a measurement, a line on standard error warns.

    Args:
        refresh: measure again and keep the best of all measurements, for example if a point lies above a measured roof.
    """
    row = detect_gpu()
    if row is not None:
        return datasheet_roofs(row)
    device = default_device()
    key = ("cpu", torch.get_num_threads()) if device.type == "cpu" else ("cuda", torch.cuda.current_device())
    old = _machine_roofs.get(key)
    if refresh or old is None:
        new = measure_roofs(device)
        if new.busy and old is None:
            print(new.busy, file=sys.stderr)
        if old is not None:
            tflops = {name: max(value, old.tflops.get(name, 0.0)) for name, value in new.tflops.items()}
            bandwidth = max(new.memory_bandwidth_tb_s, old.memory_bandwidth_tb_s)
            new = dataclasses.replace(new, tflops=tflops, memory_bandwidth_tb_s=bandwidth)
        _machine_roofs[key] = new
    return _machine_roofs[key]


def _copy_bytes(device: torch.device) -> int:
    """Return the bytes to copy: many times the last-level cache, but at most a quarter of the free memory."""
    free, cache = available_memory_bytes(device), last_level_cache_bytes() or 0
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    size = min(max(_COPY_BYTES[device.type], _MIN_COPY * cache), free // 4)
    if size < _MIN_COPY * cache:
        raise ValueError(
            f"A copy measures memory only if it is {_MIN_COPY} times the last-level cache of "
            f"{cache / 1e6:.0f} MB, and a quarter of the free memory is {size / 1e6:.0f} MB. "
            f"Free some memory of {str(device)!r} first."
        )
    return size // 4096 * 4096


def _product(device: torch.device, name: str, side: int) -> Callable[[], torch.Tensor]:
    """Return a function that multiplies (side, side) @ (side, side) into a fixed buffer."""
    generator = torch.Generator(device).manual_seed(0)
    # Random data: a GPU multiplies zeros faster, at lower power.
    a, b = (torch.randn(side, side, device=device, generator=generator).to(_TORCH_DTYPES[name]) for _ in range(2))
    out = torch.empty_like(a)

    def product() -> torch.Tensor:
        with _fp32_products("tf32" if name == "tf32" else "ieee"):
            return torch.mm(a, b, out=out)

    return product


@contextlib.contextmanager
def _fp32_products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Multiply fp32 matrices in fp32 or in TF32, and restore the settings afterwards."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = precision
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value
