"""Check the numbers for a plot: they must be positive and finite, and in the unit of the axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

# A larger number is in a wrong unit, and not from a better machine. The fastest chip of 2026 reaches about 10 000 TFLOP/s
# (dense, 4 bits), its memory (HBM4) about 22 TB/s, and no shared memory reaches 50 TB/s.
MAX_TFLOPS = 50_000.0
MAX_BANDWIDTH_TB_S = 50.0
MAX_MEMORY_GB = 4_000.0
# No operator returns in half a microsecond: its dispatch or its kernel launch takes longer.
MIN_LATENCY_MS = 0.0005


def number(name: str, value: Any, unit: str) -> float:
    """Return `value` as a positive finite float, or raise a ValueError that says what was given."""
    try:
        result = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a number in {unit}, got {value!r}.") from error
    if not math.isfinite(result) or result <= 0:
        raise ValueError(f"{name} must be positive and finite, in {unit}; got {result:g}.")
    return result


def rate(name: str, value: Any, unit: str = "TFLOP/s") -> float:
    """Return a rate in TFLOP/s or TB/s; raise ValueError if the number can only be in a smaller unit."""
    result = number(name, value, unit)
    limit, smaller_unit = (MAX_TFLOPS, "GFLOP/s") if unit == "TFLOP/s" else (MAX_BANDWIDTH_TB_S, "GB/s")
    if result > limit:
        hint = f"pass {result / 1e12:g}" if result >= 1e9 else f"pass {result / 1e3:g} if it is in {smaller_unit}"
        raise ValueError(
            f"{name} is in {unit}, and no machine reaches {result:g} (at most {limit:g} is accepted): {hint}."
        )
    return result


def latency(name: str, value: Any) -> float:
    """Return a latency in ms; raise ValueError if the number can only be in seconds."""
    result = number(name, value, "ms")
    if result < MIN_LATENCY_MS:
        raise ValueError(
            f"{name} is {result:g} ms ({result * 1e6:.3g} ns), shorter than any operator takes to launch: "
            f"it looks like seconds. Multiply by 1000, giving {result * 1e3:g} ms."
        )
    return result


def sequence(name: str, values: Any, of: str) -> list:
    """Return `values` as a list; raise ValueError if it is no sequence or is empty."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a sequence of {of}, got {values!r}.")
    result = list(values)
    if not result:
        raise ValueError(f"{name} is empty; pass at least one of {of}.")
    return result


def sizes(name: str, values: Any) -> list[int]:
    """Return problem sizes as positive whole numbers; raise ValueError if a size comes twice."""
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
    """Return `value` as a dict with text keys; raise ValueError if it is no mapping or is empty."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict such as {example}, got {value!r}.")
    if not value:
        raise ValueError(f"{name} is empty; pass a dict such as {example}, or leave {name} out.")
    return {str(key): item for key, item in value.items()}


def median_and_interval(name: str, value: Any) -> tuple[float, tuple[float, float] | None]:
    """Return a median in ms and its interval or None, from a Measurement, (median, low, high) or a number."""
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
    # On a busy machine the interval may begin below MIN_LATENCY_MS, so only the median shows the unit.
    low, high = (
        number(f"{name} ({end} end)", part, "ms") for end, part in zip(("low", "high"), parts[1:], strict=True)
    )
    if not low <= median <= high:
        raise ValueError(f"{name}: the interval [{low:g}, {high:g}] ms does not hold the median, {median:g} ms.")
    return median, (low, high)
