"""The kernel suite's Python interface: a harness with a configuration, results on disk, and a comparison of two.

    config = BenchmarkConfig(warmup_iterations=200, benchmark_iterations=500, flush_l2_cache=False, lock_clocks=False)
    harness = CUDABenchmarkHarness(config)
    result = harness.benchmark_kernel(kernel_func=my_kernel, kernel_name="my_attention_kernel",
                                      flop_count=4 * B * H * S * S * d, memory_bytes=4 * B * H * S * d * 2)
    harness.save_results(result, Path("out/my_kernel.json"))
    harness.compare_results(baseline_path=Path("out/baseline.json"), current_result=result)["speedup"]

A kernel function that returns a number times itself: the number is its elapsed ms and one sample. One that returns
anything else is timed by `measure()`. Which of the two it was stands in the result.
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

from utils.bench import results as res
from utils.bench.comparing import SAME_WITHIN, independent_interval
from utils.bench.errors import BenchError
from utils.benchmark import intervals as stats
from utils.benchmark.cuda_timer import gpu_flush_bytes
from utils.benchmark.measuring import measure
from utils.benchmark.result import Measurement
from utils.benchmark.timers import cpu_flush_bytes
from utils.files import write_whole
from utils.machine.environment import environment, gpu_state

SCHEMA, VERSION = "labs-bench-suite", 1
CLOCK_SLACK_MS = 0.05  # two clocks: a self-timed call may read this much more than the host saw


@dataclass(frozen=True)
class BenchmarkConfig:
    """How kernels are benchmarked.

    Args:
        warmup_iterations: calls before the timing.
        benchmark_iterations: samples.
        flush_l2_cache: write twice the last-level cache before every sample, outside the timed region.
        lock_clocks: refused if True: clocks are read and reported, never set.
        device_id: number of the GPU; None takes the current GPU, or the CPU where there is none.
        exclude_memory_transfers: refuse a kernel function that copies between host and GPU, since that would be timed.
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
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise BenchError(f"{name} must be a whole number, {least} or more, got {value!r}.")
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
        if self.device_id is not None:
            return torch.device("cuda", self.device_id)
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@dataclass(frozen=True)
class BenchmarkResult:
    """One kernel's samples and statistics, with what it was and where it ran."""

    kernel_name: str
    timing: str  # "kernel's own" or "harness"
    config: dict
    measurement: Measurement
    shape: dict | None = None  # such as {"B": 8, "H": 4, "S": 128, "d": 64}
    dtype: str | None = None
    notes: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        # median_ms, mean_ms, std_ms, min_ms, max_ms, p95_ms, p99_ms, interval_ms, samples_ms, gb_s, ...
        if name.startswith("_") or name == "measurement":
            raise AttributeError(name)
        return getattr(self.measurement, name)

    @property
    def gflops(self) -> float | None:
        """GFLOP/s at the median time."""
        return None if self.measurement.tflops is None else 1e3 * self.measurement.tflops

    @property
    def queries_per_s(self) -> float | None:
        """B * H * S queries over the median time; None without a shape."""
        if not self.shape or not {"B", "H", "S"} <= set(self.shape):
            return None
        return self.shape["B"] * self.shape["H"] * self.shape["S"] / (self.measurement.median_ms / 1e3)

    def to_dict(self) -> dict:
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "kernel_name": self.kernel_name,
            "timing": self.timing,
            "config": self.config,
            "shape": self.shape,
            "dtype": self.dtype,
            "notes": self.notes,
            "gflops": self.gflops,
            "queries_per_s": self.queries_per_s,
            "measurement": self.measurement.to_dict(),
        }


def load_result(path: Path) -> BenchmarkResult:
    """The result that `save_results` wrote; a truncated file or another schema is refused by name."""
    record = res.read_document(Path(path), SCHEMA, VERSION, ("kernel_name", "timing", "config", "measurement"))
    try:
        measurement = Measurement.from_dict(record["measurement"])
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"{path} is damaged: {error}") from None
    return BenchmarkResult(
        record["kernel_name"],
        record["timing"],
        record["config"],
        measurement,
        record.get("shape"),
        record.get("dtype"),
        record.get("notes", []),
    )


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class CUDABenchmarkHarness:
    """Benchmarks kernel functions under one configuration; the CPU is used where there is no GPU."""

    def __init__(self, config: BenchmarkConfig | None = None):
        self.config = config or BenchmarkConfig()
        self.device = self.config.device

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
            kernel_func: returns its own elapsed time in ms, or anything else to be timed by the harness.
            flop_count, memory_bytes: FLOPs, and bytes read and written, of one call.
            shape, dtype: what was computed, so that a comparison with something else is refused.
        """
        if not callable(kernel_func):
            raise BenchError(f"kernel_func must be callable, got {type(kernel_func).__name__}; pass the function.")
        config, notes = self.config, []
        with torch.cuda.device(self.device if self.device.type == "cuda" else -1):
            torch.manual_seed(config.seed)
            first = kernel_func()
            if config.exclude_memory_transfers and self.device.type == "cuda":
                self._refuse_transfers(kernel_func, kernel_name)
            if _is_time(first):
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
                    l2="cold" if config.flush_l2_cache else "warm",
                )
        if memory_bytes is not None and self.device.type == "cuda":
            from utils.benchmark.roofs import machine_roofs

            peak_gb_s = 1e3 * machine_roofs().memory_bandwidth_tb_s
            if measurement.gb_s > peak_gb_s:
                cache = "cold" if config.flush_l2_cache else "warm"
                notes.append(
                    f"{measurement.gb_s:.4g} GB/s is over the memory's {peak_gb_s:.4g} GB/s: the data came "
                    f"from the cache ({cache} L2) or memory_bytes is too high."
                )
        name = str(dtype).removeprefix("torch.") if dtype is not None else None
        return BenchmarkResult(
            kernel_name,
            "kernel's own" if _is_time(first) else "harness",
            asdict(config),
            measurement,
            None if shape is None else dict(shape),
            name,
            notes,
        )

    def _refuse_transfers(self, kernel_func: Callable, kernel_name: str) -> None:
        from utils.benchmark.profiling import profile, read_trace

        copies = sorted(
            {
                event.name
                for event in read_trace(profile(kernel_func, steps=1, warmup=0))
                if event.on_gpu and ("HtoD" in event.name or "DtoH" in event.name)
            }
        )
        if copies:
            raise BenchError(
                f"{kernel_name} copies between host and GPU ({', '.join(copies)}) and "
                "exclude_memory_transfers is True: move the copies out of kernel_func, or pass "
                "exclude_memory_transfers=False to have them timed."
            )

    def _own_times(self, kernel_func: Callable, kernel_name: str, flop_count, memory_bytes) -> Measurement:
        """Samples as the kernel function reports them; a value that cannot be its elapsed ms is refused."""
        config, on_gpu = self.config, self.device.type == "cuda"
        flush = self._flush_buffer() if config.flush_l2_cache else None
        before = gpu_state(self.device) if on_gpu else None
        for _ in range(config.warmup_iterations):
            kernel_func()
        samples, walls = [], []
        for _ in range(config.benchmark_iterations):
            if flush is not None:
                flush.add_(1)
            if on_gpu:
                torch.cuda.synchronize(self.device)
            begin = time.perf_counter()
            value = kernel_func()
            wall_ms = 1e3 * (time.perf_counter() - begin)
            if not _is_time(value) or not math.isfinite(value) or value <= 0:
                raise BenchError(
                    f"{kernel_name} returned {value!r} in call {len(samples)} (counted from 0) and a time "
                    "at first: a kernel function that times itself returns ms above 0 every time."
                )
            if value > wall_ms + CLOCK_SLACK_MS:
                raise BenchError(
                    f"{kernel_name} says it took {value:.4g} ms and its whole call took {wall_ms:.4g} ms "
                    "on the host's clock: it must return elapsed milliseconds, after waiting for its end."
                )
            samples.append(float(value))
            walls.append(wall_ms)
        method = {
            "clock": "the kernel function's own",
            "device": str(self.device),
            "warmup": config.warmup_iterations,
            "samples": len(samples),
            "l2": "cold" if flush is not None else "warm",
            "graph": False,
            "l2_flush_bytes": None if flush is None else flush.numel() * flush.element_size(),
            "calls_per_sample": 1,
            "stopped": f"all {len(samples)} iterations done",
            "host_ms_median": sorted(walls)[len(walls) // 2],
            "gpu_before": before,
            "gpu_after": gpu_state(self.device) if on_gpu else None,
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
        size = gpu_flush_bytes(self.device) if self.device.type == "cuda" else cpu_flush_bytes()
        return torch.zeros(size // 4, dtype=torch.int32, device=self.device)

    def save_results(self, result: BenchmarkResult, path: Path | str) -> Path:
        """Write a result, raw samples included, as JSON; an older file of that name is replaced whole."""
        path = Path(path)
        write_whole(path, res.to_json(result.to_dict()))
        return path

    def compare_results(self, baseline_path: Path | str, current_result: BenchmarkResult) -> dict:
        """{"speedup", "improvement_pct", "interval", "verdict", ...} of a result over a saved baseline.

        `improvement_pct` is the share of the baseline's time that is saved. Another GPU, shape, dtype, FLOP or byte
        count, or cache state is refused with the difference named.
        """
        baseline = load_result(Path(baseline_path))
        old, new = baseline.measurement, current_result.measurement
        facts = {
            "GPU": (old.environment.get("gpu"), new.environment.get("gpu")),
            "shape": (baseline.shape, current_result.shape),
            "dtype": (baseline.dtype, current_result.dtype),
            "flop_count": (old.flops, new.flops),
            "memory_bytes": (old.bytes, new.bytes),
            "L2": (old.method.get("l2"), new.method.get("l2")),
        }
        if facts["GPU"] == (None, None):
            facts["CPU"] = (old.environment.get("cpu"), new.environment.get("cpu"))
        differ = [f"{name} {a} and {b}" for name, (a, b) in facts.items() if a != b]
        if differ:
            raise BenchError(
                f"{baseline.kernel_name} and {current_result.kernel_name} cannot be compared: {'; '.join(differ)}."
            )
        interval = independent_interval(old.samples_ms, new.samples_ms)
        return {
            "baseline": baseline.kernel_name,
            "current": current_result.kernel_name,
            "baseline_ms": old.median_ms,
            "current_ms": new.median_ms,
            "speedup": old.median_ms / new.median_ms,
            "improvement_pct": 100.0 * (1.0 - new.median_ms / old.median_ms),
            "interval": interval,
            "verdict": stats.verdict(
                interval, same_within=SAME_WITHIN, pairs=min(len(old.samples_ms), len(new.samples_ms))
            ),
            "timing": (baseline.timing, current_result.timing),
        }


def sweep(
    harness: CUDABenchmarkHarness, provider: str = "auto", dtypes: tuple[str, ...] | None = None
) -> Iterator[BenchmarkResult]:
    """Benchmark an attention provider (or torch's default SDPA, "auto") over the suite's B, H, S, d matrix.

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
        if not (kind := dtype_support(dtype, device)):
            raise BenchError(f"{kind.reason} {kind.remedy}")
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
