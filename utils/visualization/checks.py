"""What a plot accepts: positive finite numbers in the unit its axis names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

# Above these a number is in another unit, not from a better machine. The fastest part of 2026 does about
# 10 000 TFLOP/s dense in 4 bits; memory (HBM4) about 22 TB/s, and no shared memory reaches 50 TB/s.
MAX_TFLOPS = 50_000.0
MAX_BANDWIDTH_TB_S = 50.0
MAX_MEMORY_GB = 4_000.0
# No operator returns in half a microsecond: dispatch alone, or a kernel launch, takes longer.
MIN_LATENCY_MS = 0.0005


def number(name: str, value: Any, unit: str) -> float:
    """`value` as a positive finite float, or a ValueError that says what was given."""
    try:
        result = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a number in {unit}, got {value!r}.") from error
    if not math.isfinite(result) or result <= 0:
        raise ValueError(f"{name} must be positive and finite, in {unit}; got {result:g}.")
    return result


def tflops(name: str, value: Any) -> float:
    """A compute rate in TFLOP/s; a rate in FLOP/s is refused."""
    result = number(name, value, "TFLOP/s")
    if result > MAX_TFLOPS:
        hint = f"pass {result / 1e12:g}" if result >= 1e9 else f"pass {result / 1e3:g} if it is in GFLOP/s"
        raise ValueError(
            f"{name} is in TFLOP/s (1e12 FLOP/s), and {result:g} TFLOP/s is beyond any machine "
            f"(at most {MAX_TFLOPS:g} is accepted): {hint}."
        )
    return result


def bandwidth(name: str, value: Any) -> float:
    """A memory bandwidth in TB/s; one in GB/s or bytes/s is refused."""
    result = number(name, value, "TB/s")
    if result > MAX_BANDWIDTH_TB_S:
        hint = f"pass {result / 1e12:g}" if result >= 1e9 else f"pass {result / 1e3:g} if it is in GB/s"
        raise ValueError(
            f"{name} is in TB/s (1e12 bytes/s), and {result:g} TB/s is beyond any memory "
            f"(at most {MAX_BANDWIDTH_TB_S:g} is accepted): {hint}."
        )
    return result


def latency(name: str, value: Any) -> float:
    """A latency in ms; one that is plainly in seconds is refused."""
    result = number(name, value, "ms")
    if result < MIN_LATENCY_MS:
        raise ValueError(
            f"{name} is {result:g} ms ({result * 1e6:.3g} ns), shorter than any operator takes to launch: "
            f"it looks like seconds. Multiply by 1000, giving {result * 1e3:g} ms."
        )
    return result


def sequence(name: str, values: Any, of: str) -> list:
    """`values` as a list with at least one element."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a sequence of {of}, got {values!r}.")
    result = list(values)
    if not result:
        raise ValueError(f"{name} is empty; pass at least one of {of}.")
    return result


def sizes(name: str, values: Any) -> list[int]:
    """Problem sizes: positive whole numbers, none twice."""
    result = []
    for i, value in enumerate(sequence(name, values, "positive whole numbers")):
        size = number(f"{name}[{i}]", value, "whole numbers")
        if size != int(size):
            raise ValueError(f"{name}[{i}] must be a whole number, got {value!r}.")
        result.append(int(size))
    twice = sorted({size for size in result if result.count(size) > 1})
    if twice:
        raise ValueError(f"{name} holds {twice} more than once; pass one value a size.")
    return result


def mapping(name: str, value: Any, example: str) -> dict:
    """`value` as a non-empty dict with text keys."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict such as {example}, got {value!r}.")
    if not value:
        raise ValueError(f"{name} is empty; pass a dict such as {example}, or leave {name} out.")
    return {str(key): item for key, item in value.items()}


def median_and_interval(name: str, value: Any) -> tuple[float, tuple[float, float] | None]:
    """A median in ms with its interval, from a Measurement, `(median, low, high)` or a bare number."""
    if hasattr(value, "median_ms"):
        interval = getattr(value, "interval_ms", None)
        parts = [value.median_ms, *(interval if interval is not None else ())]
    elif isinstance(value, tuple | list):
        parts = list(value)
    else:
        parts = [value]
    if len(parts) not in (1, 3):
        raise ValueError(f"{name} must be a Measurement, a median in ms, or (median, low, high) in ms; got {value!r}.")
    median = latency(name, parts[0])
    if len(parts) == 1:
        return median, None
    low, high = (latency(f"{name} ({end} end)", part) for end, part in zip(("low", "high"), parts[1:], strict=True))
    if not low <= median <= high:
        raise ValueError(f"{name}: the interval [{low:g}, {high:g}] ms does not hold the median, {median:g} ms.")
    return median, (low, high)
