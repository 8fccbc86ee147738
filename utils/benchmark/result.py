"""Results of a timing: a Measurement of one function or a Comparison of two, with statistics and a printed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from utils.benchmark import intervals as stats
from utils.machine.environment import slowdown_reasons

STATISTICS = ("median_ms", "mean_ms", "std_ms", "min_ms", "max_ms", "p95_ms", "p99_ms", "tflops", "gb_s", "roof_share")


def _statistic(of: Callable[[Any], Any], meaning: str) -> property:
    """Return a property of a Measurement that is computed from its samples."""
    return property(lambda self: float(of(self.samples_ms)), doc=meaning)


@dataclass(frozen=True)
class Measurement:
    """The times of one function: all samples in ms, their statistics, and the way of timing (`method`)."""

    samples_ms: tuple[float, ...]
    interval_ms: tuple[float, float]  # contains the median of a later run in 95% of cases
    label: str = "function"
    flops: float | None = None  # FLOPs of one call
    bytes: float | None = None  # bytes that one call reads and writes
    dtype: str | None = None
    roof: dict | None = None  # the peaks for `roof_share`
    method: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)

    median_ms = _statistic(np.median, "Median time of one call.")
    mean_ms = _statistic(np.mean, "Mean time of one call.")
    std_ms = _statistic(lambda ms: np.std(ms, ddof=1) if len(ms) > 1 else 0.0, "Standard deviation; 0 of one sample.")
    min_ms = _statistic(min, "Shortest sample.")
    max_ms = _statistic(max, "Longest sample.")
    p95_ms = _statistic(lambda ms: np.percentile(ms, 95), "95th percentile.")
    p99_ms = _statistic(lambda ms: np.percentile(ms, 99), "99th percentile.")

    @property
    def tflops(self) -> float | None:
        """TFLOP/s at the median time; None without a FLOP count."""
        return None if self.flops is None else self.flops / (self.median_ms * 1e9)

    @property
    def gb_s(self) -> float | None:
        """GB/s (1e9 bytes) at the median time; None without a byte count."""
        return None if self.bytes is None else self.bytes / (self.median_ms * 1e6)

    @property
    def roof_share(self) -> float | None:
        """Shortest time that the roofs allow / median time; above 1, something is wrong (`over_roof`). None without roofs."""
        if self.roof is None or not self.median_ms:
            return None
        compute_ms = self.flops / (self.roof["tflops"] * 1e9) if self.flops else 0.0
        memory_ms = self.bytes / (self.roof["memory_bandwidth_tb_s"] * 1e9) if self.bytes else 0.0
        return max(compute_ms, memory_ms) / self.median_ms

    @property
    def over_roof(self) -> bool:
        """True if the time is shorter than the roof allows: then the counts, the cache state or the roof are wrong."""
        return self.roof_share is not None and self.roof_share > 1.0

    @property
    def below_floor(self) -> bool:
        """True if the time cannot be distinguished from the time of an empty call."""
        return bool(self.method.get("below_floor"))

    def doubts(self) -> list[str]:
        """List reasons to doubt the measurement: odd samples, a time beyond roof or floor, throttled clocks, notes."""
        method, found = self.method, []
        for name, words in (
            ("outliers", "far above the others (outliers)"),
            ("throttled", "taken while the GPU's clocks were held back"),
            ("discarded", "left out, with the samples of the same rounds"),
        ):
            if count := method.get(name):
                found.append(f"{count} sample{'s' * (count > 1)} {words}")
        found += method.get("notes", [])
        if self.over_roof:
            found.append(
                "faster than the roof allows: the FLOP and byte counts or the dtype are wrong, data came from the cache, "
                "or the roof is too low"
            )
        if self.below_floor:
            found.append(
                f"as short as an empty call, which takes {format_ms(method['floor_ms'])} here: give the function more work"
            )
        if held := slowdown_reasons(method.get("gpu_after")):
            found.append(f"clocks were held back after the timing: {', '.join(sorted(held))}")
        return found

    def to_dict(self) -> dict:
        """Return all fields and statistics, ready for JSON."""
        record = asdict(self) | {name: getattr(self, name) for name in STATISTICS}
        return record | {"samples_ms": list(self.samples_ms), "interval_ms": list(self.interval_ms)}

    @classmethod
    def from_dict(cls, record: dict) -> Self:
        """Return the measurement that `to_dict` wrote; the statistics are computed again from the samples."""
        fields = {name: record[name] for name in cls.__dataclass_fields__ if name in record}
        fields["samples_ms"] = tuple(float(value) for value in record["samples_ms"])
        fields["interval_ms"] = tuple(float(value) for value in record["interval_ms"])
        return cls(**fields)

    def __repr__(self) -> str:
        low, high = self.interval_ms
        lines = [
            f"{self.label}: {format_ms(self.median_ms)} median "
            f"[{format_ms(low)}, {format_ms(high)}] at {stats.CONFIDENCE:.0%}, {len(self.samples_ms)} samples",
            f"  mean {format_ms(self.mean_ms)}, std {format_ms(self.std_ms)}, min {format_ms(self.min_ms)}, "
            f"p95 {format_ms(self.p95_ms)}, max {format_ms(self.max_ms)}",
        ]
        rates = []
        if self.tflops is not None:
            rates.append(f"{self.tflops:.4g} TFLOP/s")
        if self.gb_s is not None:
            rates.append(f"{self.gb_s:.4g} GB/s")
        if self.roof_share is not None and self.roof is not None:
            rates.append(f"{self.roof_share:.1%} of the {self.roof['name']} roof ({self.roof['origin']})")
        if rates:
            lines.append("  " + ", ".join(rates))
        how = [self.method.get("device", ""), f"{self.method.get('l2', '?')} L2"]
        if self.method.get("graph"):
            how.append("CUDA graph")
        if self.method.get("calls_per_sample", 1) > 1:
            how.append(f"{self.method['calls_per_sample']} calls a sample")
        how.append(f"stopped: {self.method.get('stopped', '?')}")
        lines.append("  " + ", ".join(part for part in how if part))
        lines += [f"  note: {text}" for text in self.doubts()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Comparison:
    """The times of two functions in turns. `speedup` is time of a / time of b; above 1, b is faster."""

    speedup: float
    interval: tuple[float, float]  # of `speedup`, the median over pairs of neighbouring samples
    verdict: str  # on b: "faster", "slower", "same" or "not enough data"
    a: Measurement
    b: Measurement
    same_within: float = 0.01

    def sentence(self) -> str:
        """Return the verdict in words."""
        a, b, margin = self.a.label, self.b.label, f"{self.same_within:.2g}"
        return {
            stats.FASTER: f"{b} is faster than {a}",
            stats.SLOWER: f"{b} is slower than {a}",
            stats.SAME: f"{b} and {a} take the same time within {margin}",
            stats.NOT_ENOUGH_DATA: f"whether {b} and {a} differ by more than {margin} remains open",
        }[self.verdict]

    def __repr__(self) -> str:
        low, high = self.interval
        return (
            f"{self.b.label} is {self.speedup:.4g}x as fast as {self.a.label} [{low:.4g}, {high:.4g}]: "
            f"{self.sentence()} ({len(self.a.samples_ms)} pairs)\n"
            f"  {self.a.label}: {format_ms(self.a.median_ms)}\n  {self.b.label}: {format_ms(self.b.median_ms)}"
        )


def _in_unit(value: float, units: tuple[tuple[str, float], ...]) -> tuple[str, float]:
    """Return unit and factor: the first unit in which the value is at least 1, or else the last unit."""
    return next((found for found in units if abs(value) >= 0.9995 / found[1]), units[-1])


def format_interval(value: float, low: float, high: float) -> str:
    """Format a time in ms with its interval, in one unit: "12.71 [12.1, 13.05] ms"."""
    unit, scale = _in_unit(value, _UNITS)
    return f"{digits(value * scale, 4)} [{digits(low * scale, 4)}, {digits(high * scale, 4)}] {unit}"


def with_interval(value: float, low: float, high: float) -> str:
    """Format a value with its interval: "1.23 [1.2, 1.26]"."""
    return f"{digits(value)} [{digits(low)}, {digits(high)}]"


def format_rate(tflops: float | None) -> str:
    """Format TFLOP/s with a suitable unit: "989 TFLOP/s", "98 GFLOP/s"; "-" for None."""
    if tflops is None:
        return "-"
    unit, scale = _in_unit(tflops, _RATES)
    return f"{digits(tflops * scale)} {unit}"


def digits(value: float, count: int = 3) -> str:
    """Write a number with `count` significant digits and without an exponent: "1380", "0.000098"."""
    return np.format_float_positional(float(f"{value:.{count - 1}e}"), trim="-")


_UNITS = (("s", 1e-3), ("ms", 1.0), ("us", 1e3), ("ns", 1e6))
_RATES = (("TFLOP/s", 1.0), ("GFLOP/s", 1e3), ("MFLOP/s", 1e6))


def format_ms(value: float) -> str:
    """Format a time given in ms with a suitable unit: "1.23 s", "4.56 ms", "7.89 us" or "12 ns"."""
    unit, scale = _in_unit(value, _UNITS)
    return f"{value * scale:.4g} {unit}"
