"""The kernel suite's Python interface: a harness with a configuration, results on disk, and comparisons of two results.

    harness = CUDABenchmarkHarness(BenchmarkConfig(warmup_iterations=200, benchmark_iterations=500))
    result = harness.benchmark_kernel(kernel_func=my_kernel, kernel_name="my_attention_kernel",
                                      flop_count=4 * B * H * S * S * d, memory_bytes=4 * B * H * S * d * 2)
    harness.save_results(result, Path("out/my_kernel.json"))
    harness.compare_results(baseline_path=Path("out/baseline.json"), current_result=result)["speedup"]

If a kernel function returns a number, this number is its elapsed ms, and one sample. Otherwise `measure()` times the
function. The result says whose clock it was.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from utils.bench.comparing import differences, separate_speedup
from utils.bench.documents import Schema, write_json
from utils.bench.errors import BenchError
from utils.benchmark import intervals as stats
from utils.benchmark.cpu_timer import flush_buffer
from utils.benchmark.measuring import measure
from utils.benchmark.profiling import profile, read_trace
from utils.benchmark.result import Measurement
from utils.machine.device import default_device
from utils.machine.environment import environment, gpu_state
from utils.validation import whole_number

RESULT = Schema("labs-bench-suite", 3, ("label", "method", "samples_ms"))
CLOCK_SLACK_MS = 0.05  # the clocks of kernel and host may differ by this much


@dataclass(frozen=True)
class BenchmarkConfig:
    """The options of the kernel suite."""

    warmup_iterations: int = 200  # calls before the timing
    benchmark_iterations: int = 500  # samples
    flush_l2_cache: bool = False  # write twice the last-level cache before every sample, untimed
    lock_clocks: bool = False  # refused if True: clocks are read and reported, never set
    exclude_memory_transfers: bool = True  # refuse a kernel function whose copies between host and GPU would be timed
    seed: int = 42  # of torch's generators, set before the kernel function is first called

    def __post_init__(self) -> None:
        for name, least in (("warmup_iterations", 0), ("benchmark_iterations", 1), ("seed", 0)):
            whole_number(name, getattr(self, name), least, BenchError)
        if self.lock_clocks:
            raise BenchError(
                "lock_clocks=True is refused: clocks are read and reported with every result, never set. "
                "Leave it False; an administrator can lock them with nvidia-smi -lgc beforehand."
            )


class CUDABenchmarkHarness:
    """Benchmarks kernel functions under one configuration; it uses the CPU if there is no GPU."""

    def __init__(self, config: BenchmarkConfig | None = None):
        self.config = config or BenchmarkConfig()
        self.device = default_device()
        self.on_gpu = self.device.type == "cuda"

    def benchmark_kernel(
        self,
        kernel_func: Callable[[], Any],
        kernel_name: str,
        flop_count: float | None = None,
        memory_bytes: float | None = None,
    ) -> Measurement:
        """Benchmark `kernel_func()`. The result's `method` has the configuration and names the clock.

        Args:
            kernel_func: returns its own elapsed time in ms, or anything else if the harness is to time it.
            kernel_name: name of the kernel in the result.
            flop_count: FLOPs of one call.
            memory_bytes: bytes that one call reads and writes.
        """
        if not callable(kernel_func):
            raise BenchError(f"kernel_func must be callable, got {type(kernel_func).__name__}; pass the function.")
        for name, count in (("flop_count", flop_count), ("memory_bytes", memory_bytes)):
            if count is not None and not (isinstance(count, numbers.Real) and 0 < count < math.inf):
                raise BenchError(f"{name} is {count!r}; it is the finite number of one call, above 0, or None.")
        config = self.config
        work: dict[str, Any] = {"label": kernel_name, "flops": flop_count, "bytes": memory_bytes}
        torch.manual_seed(config.seed)
        times_itself = _is_time(kernel_func())
        if config.exclude_memory_transfers and self.on_gpu:
            _refuse_transfers(kernel_func, kernel_name)
        if times_itself:
            measured = self._own_times(kernel_func, work)
        else:
            how: dict[str, Any] = {"warmup": config.warmup_iterations, "iterations": config.benchmark_iterations}
            how |= {"device": self.device, "l2": "cold" if config.flush_l2_cache else "warm"}
            measured = measure(kernel_func, **how, **work)
        facts = {"timing": "kernel's own" if times_itself else "harness", "config": asdict(config)}
        return replace(measured, method=measured.method | facts)

    def _own_times(self, kernel_func: Callable, work: dict) -> Measurement:
        """Collect the times that the kernel function returns. With flush_l2_cache, flush the cache before each call."""
        config = self.config
        flush = flush_buffer(self.device) if config.flush_l2_cache else torch.empty(0)
        for _ in range(config.warmup_iterations):
            kernel_func()
        samples: list[float] = []
        for call in range(config.benchmark_iterations):
            flush.add_(1)
            if self.on_gpu:
                torch.cuda.synchronize(self.device)
            begin = time.perf_counter()
            value = kernel_func()
            samples.append(_check_own_time(value, 1e3 * (time.perf_counter() - begin), call, work["label"]))
        method = {"clock": "the kernel function's own", "device": str(self.device), "samples": len(samples)}
        method |= {"warmup": config.warmup_iterations, "l2": "cold" if flush.nbytes else "warm"}
        method |= {"l2_flush_bytes": flush.nbytes or None, "stopped": f"all {len(samples)} iterations done"}
        method |= {"calls_per_sample": 1, "gpu_after": gpu_state(self.device) if self.on_gpu else None}
        interval = stats.repeat_interval(samples)
        return Measurement(tuple(samples), interval, **work, method=method, environment=environment(self.device))

    def save_results(self, result: Measurement, path: Path | str) -> Path:
        """Write a result with its raw samples as JSON. It replaces a file of the same name."""
        return write_json(Path(path), RESULT.document(**result.to_dict()))

    def compare_results(self, baseline_path: Path | str, current_result: Measurement) -> dict:
        """Compare a result with a saved baseline: {"speedup", "improvement_pct", "interval", "verdict"}.

        `improvement_pct` is the saved share of the baseline's time. If machine, FLOPs, bytes or cache state differ, an
        error names the difference.
        """
        old, new = load_result(Path(baseline_path)), current_result
        before, now = _facts(old), _facts(new)
        if different := differences(before, now, list(before)):
            raise BenchError(f"{old.label} and {new.label} cannot be compared: {'; '.join(different)}.")
        saved = 100.0 * (1.0 - new.median_ms / old.median_ms)
        return {"improvement_pct": saved, **separate_speedup(old, new)}


def load_result(path: Path) -> Measurement:
    """Read a result that `save_results` wrote; raise BenchError for a truncated file or another schema."""
    try:
        return Measurement.from_dict(RESULT.read(Path(path)))
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"{path} is damaged: {error}") from None


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_own_time(value: Any, wall_ms: float, call: int, kernel_name: str) -> float:
    """Return the time that a kernel function reports; raise BenchError if the call cannot have taken this time."""
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


def _refuse_transfers(kernel_func: Callable, kernel_name: str) -> None:
    events = read_trace(profile(kernel_func, steps=1, warmup=0))
    copies = {event.name for event in events if event.on_gpu and ("HtoD" in event.name or "DtoH" in event.name)}
    if copies:
        raise BenchError(
            f"{kernel_name} copies between host and GPU ({', '.join(sorted(copies))}) and exclude_memory_transfers is True: "
            "move the copies out of kernel_func, or pass exclude_memory_transfers=False to have them timed."
        )


def _facts(result: Measurement) -> dict:
    """Return the facts that two comparable results share: machine, work and state of the cache."""
    machine = result.environment
    facts = {"GPU": machine.get("gpu"), "CPU": None if machine.get("gpu") else machine.get("cpu")}
    facts |= {"flop_count": result.flops, "memory_bytes": result.bytes}
    return facts | {"L2": result.method.get("l2"), "timing": result.method.get("timing")}
