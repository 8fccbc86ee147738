"""The roofs of a machine: the FLOP/s and the bytes/s that nothing on it exceeds.

A roof comes from a datasheet or from a measurement, and says which. The datasheet's roof is what clocks and unit counts
allow. The measured roof is what this machine delivers in a large square matrix product and a large copy. A kernel at 70%
of the first may be at 95% of the second.
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

# Side of the square product, large enough that its bytes do not matter: 2 n^3 FLOPs on 3 n^2 elements.
_SIDE = {"cpu": 2048, "cuda": 8192}
_COPY_BYTES = {"cpu": 256_000_000, "cuda": 4_000_000_000}
_MIN_COPY = 4  # times the last-level cache
_ROUNDS = 32  # samples of each product and of the copy, in turns
_BUDGET_S = 3.0  # fewer rounds on a machine that needs longer for them
_BUSY = 0.2  # share of the CPU that other processes may use before a measured roof says so


@dataclass(frozen=True)
class Roofs:
    """Peak FLOP/s for each dtype and memory bandwidth of one machine, and where the figures come from."""

    name: str
    origin: Literal["datasheet", "measured"]
    tflops: dict[str, float]  # "bf16" -> TFLOP/s
    memory_bandwidth_tb_s: float  # TB/s, 1e12, read + written
    detail: str = ""  # the document, or the sizes measured
    others: float | None = None  # share of the CPU that other processes used just before; None if not known

    @property
    def busy(self) -> str:
        """A sentence if the machine was busy while the roofs were measured, so that they may be too low; else ""."""
        if self.others is None or self.others <= _BUSY:
            return ""
        return (
            f"The machine was busy when its roofs were measured: other processes used {self.others:.0%} of the CPU. "
            "The roofs may be too low; machine_roofs(refresh=True) measures again and keeps the best."
        )

    def measured_again(self) -> Roofs:
        """Measure again if these are the measured roofs of this machine, and return the best so far; else return these."""
        if self.origin == "measured" and any(self is kept for kept in _machine_roofs.values()):
            return machine_roofs(refresh=True)
        return self

    def record(self, dtype: str | None) -> dict:
        """Return what a measurement keeps of its roofs: their name, their origin and both peaks for this dtype."""
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

    On a CPU the bf16 roof is at least the fp32 roof: a kernel may convert bf16 to fp32 and multiply there, which is faster on
    a CPU without bf16 instructions. Where torch has no bf16 kernel for the CPU at all, as without AVX-512 on x86, one product
    of this size would take a minute, so that bf16 is not timed and its roof is that of fp32.

    Args:
        device: "cpu", of which fp32 and bf16 are measured, or "cuda": those of fp16, bf16, fp32 and tf32 that it has. By
            default the GPU if there is one.
    """
    target = pick_device(device)
    side, copy_bytes, timed = _SIDE[target.type], _copy_bytes(target), _timed_dtypes(target)
    calls = {name: _product(target, name, side) for name in timed}
    source = torch.ones(copy_bytes // 4, dtype=torch.float32, device=target)
    calls["copy"] = functools.partial(torch.empty_like(source).copy_, source)  # reads so many bytes and writes as many

    others = psutil.cpu_percent(interval=0.2) / 100  # while this process waits, all of it is other processes'
    # A GPU's first call loads libraries: it does not say how long a launch takes.
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


def _timed_dtypes(device: torch.device) -> tuple[str, ...]:
    """Return the dtypes whose products are timed: those for which torch has a fast kernel on this device."""
    if device.type == "cuda":
        ampere = torch.cuda.get_device_capability(device) >= (8, 0)  # older tensor cores are for fp16 only
        return ("fp16", "bf16", "fp32", "tf32") if ampere else ("fp16", "fp32")
    # No fp16: torch multiplies fp16 matrices at about 1 GFLOP/s on a CPU, which is no property of the machine.
    bf16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return ("fp32", "bf16") if bf16 else ("fp32",)


_machine_roofs: dict[tuple, Roofs] = {}


def machine_roofs(refresh: bool = False) -> Roofs:
    """Return the roofs of this machine: the datasheet's if GPU_SPECS has its GPU, else measured once and kept.

    The roofs of a CPU depend on the number of threads, so each number has its own. A measurement on a busy machine says so
    in a line on standard error.

    Args:
        refresh: measure again, and keep the best of all measurements: a point above a measured roof shows that it is too
            low.
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
    """Return the size of the copy: large compared with the last-level cache, small compared with the free memory."""
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
    """Return a call that multiplies (side, side) @ (side, side) into a buffer of its own."""
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
