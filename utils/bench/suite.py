"""The kernel suite's Python interface: a harness with a configuration, results on disk, and comparisons of two results.

    config = BenchmarkConfig(warmup_iterations=200, benchmark_iterations=500, flush_l2_cache=False, lock_clocks=False)
    harness = CUDABenchmarkHarness(config)
    result = harness.benchmark_kernel(kernel_func=my_kernel, kernel_name="my_attention_kernel",
                                      flop_count=4 * B * H * S * S * d, memory_bytes=4 * B * H * S * d * 2)
    harness.save_results(result, Path("out/my_kernel.json"))
    harness.compare_results(baseline_path=Path("out/baseline.json"), current_result=result)["speedup"]

A kernel function that returns a number times itself: the number is its elapsed ms, and one sample. `measure()` times a
kernel function that returns anything else. The result says which of the two timed it.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from utils.bench.comparing import differences, independent_interval, speedup_verdict
from utils.bench.documents import Schema, write_json
from utils.bench.errors import BenchError
from utils.benchmark import intervals as stats
from utils.benchmark.cpu_timer import cpu_flush_bytes
from utils.benchmark.cuda_timer import gpu_flush_bytes
from utils.benchmark.measuring import measure
from utils.benchmark.result import Measurement
from utils.machine.environment import environment, gpu_state
from utils.validation import whole_number

RESULT = Schema("labs-bench-suite", 1, ("kernel_name", "timing", "config", "measurement"))
CLOCK_SLACK_MS = 0.05  # the kernel's clock and the host's may differ by this much


@dataclass(frozen=True)
class BenchmarkConfig:
    """How kernels are benchmarked.

    Args:
        warmup_iterations: calls before the timing.
        benchmark_iterations: samples.
        flush_l2_cache: write twice the last-level cache before every sample, outside the timed region.
        lock_clocks: refused if True: clocks are read and reported, never set.
        device_id: number of the GPU; None takes the current GPU, or the CPU if there is none.
        exclude_memory_transfers: refuse a kernel function that copies between host and GPU: the copy would be timed.
        seed: of torch's generators, set before the kernel function is first called.
    """

    warmup_iterations: int = 200
    benchmark_iterations: int = 500
    flush_l2_cache: bool = False
    lock_clocks: bool = False
    device_id: int | None = None
    exclude_memory_transfers: bool = True
    seed: int = 42

    def __post_init__(self) -> None:
        for name, least in (("warmup_iterations", 0), ("benchmark_iterations", 1), ("seed", 0)):
            whole_number(name, getattr(self, name), least, BenchError)
        for name in ("flush_l2_cache", "lock_clocks", "exclude_memory_transfers"):
            if not isinstance(getattr(self, name), bool):
                raise BenchError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.lock_clocks:
            raise BenchError(
                "lock_clocks=True is refused: clocks are read and reported with every result, never set. "
                "Leave it False; an administrator can lock them with nvidia-smi -lgc beforehand."
            )
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.device_id is not None and not (isinstance(self.device_id, int) and 0 <= self.device_id < gpus):
            raise BenchError(
                f"device_id is {self.device_id!r} and this machine has {gpus} usable GPUs"
                + (f", 0 to {gpus - 1}." if gpus else "; None runs on the CPU.")
            )

    @property
    def device(self) -> torch.device:
        """The device to benchmark on."""
        if self.device_id is not None:
            return torch.device("cuda", self.device_id)
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def l2(self) -> str:
        """The state of the L2 cache before each sample, "warm" or "cold"."""
        return "cold" if self.flush_l2_cache else "warm"


@dataclass(frozen=True)
class BenchmarkResult:
    """One kernel's samples and statistics, with its configuration and environment.

    The fields of `measurement` are the result's own as well: `median_ms`, `p95_ms`, `samples_ms`, `gb_s`, ...
    """

    kernel_name: str
    timing: str  # "kernel's own" or "harness"
    config: dict
    measurement: Measurement
    shape: dict | None = None  # such as {"B": 8, "H": 4, "S": 128, "d": 64}
    dtype: str | None = None
    notes: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "measurement":
            raise AttributeError(name)
        return getattr(self.measurement, name)

    @property
    def gflops(self) -> float | None:
        """GFLOP/s at the median time; None without a FLOP count."""
        return None if self.measurement.tflops is None else 1e3 * self.measurement.tflops

    @property
    def queries_per_s(self) -> float | None:
        """B * H * S queries over the median time; None without a shape."""
        if not self.shape or not {"B", "H", "S"} <= set(self.shape):
            return None
        return self.shape["B"] * self.shape["H"] * self.shape["S"] / (self.measurement.median_ms / 1e3)

    def to_dict(self) -> dict:
        """Return the result, ready for JSON, in the form that `load_result` reads."""
        return RESULT.document(
            **{name: value for name, value in vars(self).items() if name != "measurement"},
            gflops=self.gflops,
            queries_per_s=self.queries_per_s,
            measurement=self.measurement.to_dict(),
        )


def load_result(path: Path) -> BenchmarkResult:
    """Read a result that `save_results` wrote; raise BenchError for a truncated file or another schema."""
    record = RESULT.read(Path(path))
    fields = {name: record[name] for name in BenchmarkResult.__dataclass_fields__ if name in record}
    try:
        fields["measurement"] = Measurement.from_dict(record["measurement"])
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"{path} is damaged: {error}") from None
    return BenchmarkResult(**fields)


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class CUDABenchmarkHarness:
    """Benchmarks kernel functions under one configuration; it uses the CPU if there is no GPU."""

    def __init__(self, config: BenchmarkConfig | None = None):
        self.config = config or BenchmarkConfig()
        self.device = self.config.device
        self.on_gpu = self.device.type == "cuda"

    def benchmark_kernel(
        self,
        kernel_func: Callable[[], Any],
        kernel_name: str,
        flop_count: float | None = None,
        memory_bytes: float | None = None,
        *,
        shape: Mapping[str, int] | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> BenchmarkResult:
        """Benchmark `kernel_func()`.

        Args:
            kernel_func: returns its own elapsed time in ms, or anything else if the harness is to time it.
            kernel_name: name of the kernel in the result.
            flop_count: FLOPs of one call.
            memory_bytes: bytes that one call reads and writes.
            shape: the sizes, such as {"B": 8, "H": 4, "S": 128, "d": 64}; results of other shapes are not compared.
            dtype: of the data; results of other dtypes are not compared.
        """
        if not callable(kernel_func):
            raise BenchError(f"kernel_func must be callable, got {type(kernel_func).__name__}; pass the function.")
        config = self.config
        with torch.cuda.device(self.device if self.on_gpu else -1):
            torch.manual_seed(config.seed)
            times_itself = _is_time(kernel_func())
            if config.exclude_memory_transfers and self.on_gpu:
                self._refuse_transfers(kernel_func, kernel_name)
            if times_itself:
                measurement = self._own_times(kernel_func, kernel_name, flop_count, memory_bytes)
            else:
                measurement = measure(
                    kernel_func,
                    warmup=config.warmup_iterations,
                    label=kernel_name,
                    iterations=config.benchmark_iterations,
                    device=self.device,
                    flops=flop_count,
                    bytes=memory_bytes,
                    l2=config.l2,
                )
        return BenchmarkResult(
            kernel_name,
            "kernel's own" if times_itself else "harness",
            asdict(config),
            measurement,
            None if shape is None else dict(shape),
            None if dtype is None else str(dtype).removeprefix("torch."),
            self._bandwidth_notes(measurement),
        )

    def _bandwidth_notes(self, measurement: Measurement) -> list[str]:
        """Note a bandwidth that this GPU's memory does not have."""
        if measurement.gb_s is None or not self.on_gpu:
            return []
        from utils.benchmark.roofs import machine_roofs

        peak_gb_s = 1e3 * machine_roofs().memory_bandwidth_tb_s
        if measurement.gb_s <= peak_gb_s:
            return []
        return [
            f"{measurement.gb_s:.4g} GB/s is over the memory's {peak_gb_s:.4g} GB/s: the data came "
            f"from the cache ({self.config.l2} L2) or memory_bytes is too high."
        ]

    def _refuse_transfers(self, kernel_func: Callable, kernel_name: str) -> None:
        from utils.benchmark.profiling import profile, read_trace

        events = read_trace(profile(kernel_func, steps=1, warmup=0))
        copies = {event.name for event in events if event.on_gpu and ("HtoD" in event.name or "DtoH" in event.name)}
        if copies:
            raise BenchError(
                f"{kernel_name} copies between host and GPU ({', '.join(sorted(copies))}) and "
                "exclude_memory_transfers is True: move the copies out of kernel_func, or pass "
                "exclude_memory_transfers=False to have them timed."
            )

    def _own_times(
        self, kernel_func: Callable, kernel_name: str, flop_count: float | None, memory_bytes: float | None
    ) -> Measurement:
        """Collect the times that the kernel function returns."""
        config = self.config
        flush = self._flush_buffer() if config.flush_l2_cache else None
        before = gpu_state(self.device) if self.on_gpu else None
        for _ in range(config.warmup_iterations):
            kernel_func()
        samples: list[float] = []
        walls: list[float] = []
        for call in range(config.benchmark_iterations):
            if flush is not None:
                flush.add_(1)
            if self.on_gpu:
                torch.cuda.synchronize(self.device)
            begin = time.perf_counter()
            value = kernel_func()
            walls.append(1e3 * (time.perf_counter() - begin))
            samples.append(_check_own_time(value, walls[-1], call, kernel_name))
        method: dict[str, Any] = {
            "clock": "the kernel function's own",
            "device": str(self.device),
            "warmup": config.warmup_iterations,
            "samples": len(samples),
            "l2": config.l2,
            "graph": False,
            "l2_flush_bytes": None if flush is None else flush.numel() * flush.element_size(),
            "calls_per_sample": 1,
            "stopped": f"all {len(samples)} iterations done",
            "host_ms_median": sorted(walls)[len(walls) // 2],
            "gpu_before": before,
            "gpu_after": gpu_state(self.device) if self.on_gpu else None,
            "notes": [],
        }
        return Measurement(
            tuple(samples),
            stats.median_interval(samples),
            label=kernel_name,
            flops=flop_count,
            bytes=memory_bytes,
            method=method,
            environment=environment(self.device),
        )

    def _flush_buffer(self) -> torch.Tensor:
        size = gpu_flush_bytes(self.device) if self.on_gpu else cpu_flush_bytes()
        return torch.zeros(size // 4, dtype=torch.int32, device=self.device)

    def save_results(self, result: BenchmarkResult, path: Path | str) -> Path:
        """Write a result with its raw samples as JSON, in the place of an older file of that name."""
        return write_json(Path(path), result.to_dict())

    def compare_results(self, baseline_path: Path | str, current_result: BenchmarkResult) -> dict:
        """Compare a result with a saved baseline: {"speedup", "improvement_pct", "interval", "verdict", ...}.

        `improvement_pct` is the share of the baseline's time that is saved. Results of another GPU, shape, dtype, FLOP
        or byte count, or cache state are refused, and the error names the difference.
        """
        baseline = load_result(Path(baseline_path))
        old, new = baseline.measurement, current_result.measurement
        _check_comparable(baseline, current_result)
        interval = independent_interval(old.samples_ms, new.samples_ms)
        return {
            "baseline": baseline.kernel_name,
            "current": current_result.kernel_name,
            "baseline_ms": old.median_ms,
            "current_ms": new.median_ms,
            "speedup": old.median_ms / new.median_ms,
            "improvement_pct": 100.0 * (1.0 - new.median_ms / old.median_ms),
            "interval": interval,
            "verdict": speedup_verdict(interval, old.samples_ms, new.samples_ms),
            "timing": (baseline.timing, current_result.timing),
        }


def _check_own_time(value: Any, wall_ms: float, call: int, kernel_name: str) -> float:
    """Return the time that a kernel function reported; raise BenchError if it cannot be the elapsed ms of the call."""
    if not _is_time(value) or not math.isfinite(value) or value <= 0:
        raise BenchError(
            f"{kernel_name} returned {value!r} in call {call} (counted from 0) and a time "
            "at first: a kernel function that times itself returns ms above 0 every time."
        )
    if value > wall_ms + CLOCK_SLACK_MS:
        raise BenchError(
            f"{kernel_name} says it took {value:.4g} ms and its whole call took {wall_ms:.4g} ms "
            "on the host's clock: it must return elapsed milliseconds, after waiting for its end."
        )
    return float(value)


def _check_comparable(baseline: BenchmarkResult, current: BenchmarkResult) -> None:
    """Raise BenchError if two results are of different machines, work or cache states."""

    def facts(result: BenchmarkResult) -> dict:
        measurement = result.measurement
        return {
            "GPU": measurement.environment.get("gpu"),
            "CPU": measurement.environment.get("cpu"),
            "shape": result.shape,
            "dtype": result.dtype,
            "flop_count": measurement.flops,
            "memory_bytes": measurement.bytes,
            "L2": measurement.method.get("l2"),
        }

    old, new = facts(baseline), facts(current)
    on_cpus = old["GPU"] is None and new["GPU"] is None
    if different := differences(old, new, [name for name in old if name != "CPU" or on_cpus]):
        raise BenchError(
            f"{baseline.kernel_name} and {current.kernel_name} cannot be compared: {'; '.join(different)}."
        )


def sweep(
    harness: CUDABenchmarkHarness, provider: str = "auto", dtypes: tuple[str, ...] | None = None
) -> Iterator[BenchmarkResult]:
    """Benchmark an attention provider over the suite's B, H, S, d matrix.

    Args:
        harness: how to benchmark.
        provider: a provider of attention, or "auto" for torch's default SDPA.
        dtypes: "fp16" and "bf16" by default; on a CPU bf16 alone, since fp16 products run near 1 GFLOP/s there.
    """
    from utils.attention import find_backend, prepare
    from utils.bench.targets.attention_suite import DTYPES, MATRIX
    from utils.bench.targets.base import dtype_support
    from utils.bench.targets.proof import BACKEND_OF
    from utils.bench.workload import Workload, make_inputs

    device = harness.device
    if dtypes is None:
        dtypes = tuple(name for name in DTYPES if dtype_support(name, device))
    for dtype in dtypes:
        if not (support := dtype_support(dtype, device)):
            raise BenchError(f"{support.reason} {support.remedy}")
        for shape in MATRIX:
            workload = Workload(*shape, dtype)
            inputs = make_inputs(workload, device, harness.config.seed)
            name = BACKEND_OF.get(provider, provider)
            if not (answer := find_backend(name).support(workload.problem(device))):
                raise BenchError(f"backend {provider}: {answer.reason} {answer.remedy}")
            call = functools.partial(prepare(*inputs, backend=name, **workload.attention_arguments).fn, *inputs)
            yield harness.benchmark_kernel(
                call,
                f"{provider} {workload.label}",
                workload.cost.flops,
                workload.cost.bytes,
                shape=dict(zip("BHSd", shape, strict=True)),
                dtype=dtype,
            )
