"""Medians, intervals and verdicts about time samples: numpy only, no clock, no device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95  # of every interval
BLOCKS = 10  # of `repeat_interval`; with fewer samples `outliers` finds none
# Half width of Student's two-sided 95% interval in standard errors, by degrees of freedom (number of blocks minus 1).
STUDENT = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
MIN_PAIRS = 6  # the range of six ratios holds the true median in 97% of cases; the range of five only in 94%

FASTER, SLOWER, SAME, NOT_ENOUGH_DATA = "faster", "slower", "same", "not enough data"


def _samples(values: Sequence[float], name: str = "samples") -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be a list of at least one number, got shape {array.shape}.")
    if not np.isfinite(array).all():
        raise ValueError(
            f"{name} holds {int((~np.isfinite(array)).sum())} values that are not finite; "
            "find out where they come from before you drop them."
        )
    return array


def outliers(samples: Sequence[float]) -> list[int]:
    """Return the indices of long samples: at least 5% above the median, and three interquartile ranges above the third quartile."""
    array = _samples(samples)
    low, middle, high = np.percentile(array, [25, 50, 75])
    limit = max(high + 3.0 * (high - low), 1.05 * middle)
    return [int(i) for i in np.flatnonzero(array > limit)] if array.size >= BLOCKS else []


def repeat_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the interval (low, high) that contains the median of a later run in 95 of 100 cases.

    The samples are cut into ten blocks, in the order of time. The medians of the blocks differ for two reasons: samples
    are noisy, and the machine's speed drifts. At a GPU's power limit the clocks change from second to second. The
    interval is Student's prediction of one more block. It also allows the drift between the two halves to continue.
    With fewer than ten samples, the interval is their range.
    """
    array = _samples(samples)
    if array.size < BLOCKS:
        return float(array.min()), float(array.max())
    blocks = min(BLOCKS, array.size // 3)
    medians = np.array([np.median(block) for block in np.array_split(array, blocks)])
    half = STUDENT[blocks - 1] * float(medians.std(ddof=1)) * math.sqrt(1.0 + 1.0 / blocks)
    first, second = (float(np.median(part)) for part in np.array_split(array, 2))
    # If the halves differ by d, the drift moves the next run by up to 2 d, and by more after a pause.
    half = max(half, 3.0 * abs(second - first))
    center = float(np.median(array))
    # The lower end is a ratio, so that it is a positive time.
    return center / (1.0 + half / center) if center else 0.0, center + half


def relative_half_width(interval: tuple[float, float], center: float) -> float:
    """Return half the interval's width divided by its center: 0.01 means plus or minus 1%. It is infinite at center 0."""
    low, high = interval
    return (high - low) / 2.0 / abs(center) if center else math.inf


def _log_ratios(a: Sequence[float], b: Sequence[float]) -> np.ndarray:
    first, second = _samples(a, "a"), _samples(b, "b")
    if second.size != first.size:
        raise ValueError(f"a and b must be pairs: a has {first.size} samples, b has {second.size}.")
    if float(np.median(second)) <= 0.0:
        raise ValueError("the median time of b is not above 0, so no speed-up over it can be given.")
    tiny = np.finfo(np.float64).tiny  # replaces a sample of 0, which is too short for the clock
    return np.log(np.maximum(first, tiny)) - np.log(np.maximum(second, tiny))


def speedup(a: Sequence[float], b: Sequence[float]) -> float:
    """Return how many times as fast b is as a: the median of a[i] / b[i]. The pairs were timed next to each other.

    Neighbours share the machine's clocks. At a GPU's power limit the clocks jump between levels, and so does the ratio
    of the two medians (a matmul of 4096 against itself on an H200: 91% of 200 comparisons within 1%, errors up
    to 5%). The median of the pairs' ratios stays the same (all within 0.2%).
    """
    return float(np.exp(np.median(_log_ratios(a, b))))


def speedup_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return the interval of `speedup(a, b)`: two of the sorted ratios, with the true median between them.

    Each ratio lies below the true median with probability 1/2, like heads of a coin, for every distribution. But
    neighbours share the machine's clocks and load. If neighbours often lie on the same side, fewer pairs count.
    """
    ratios = _log_ratios(a, b)
    n = ratios.size
    side = np.sign(ratios - np.median(ratios))
    alike = max(0.0, float(side[1:] @ side[:-1]) / n)
    independent = max(4.0, n * (1.0 - alike) / (1.0 + alike))
    # About n / 2 ratios lie below the true median. 1.96 standard deviations of n / 2 / sqrt(independent) cover 95%.
    first = max(0, math.floor(n / 2.0 - 0.98 * n / math.sqrt(independent)))
    low, high = np.exp(np.sort(ratios)[[first, n - 1 - first]])
    return float(low), float(high)


def verdict(interval: tuple[float, float], *, same_within: float = 0.01, pairs: int | None = None) -> str:
    """Judge b by the interval of its speed-up: return "faster", "slower", "same" or "not enough data".

    For "faster" and "slower" the whole interval must lie outside the margin, for "same" inside. If the interval
    crosses an edge of the margin, or if there are fewer than 6 pairs, the verdict is "not enough data".
    """
    if not 0 <= same_within < math.inf:
        raise ValueError(f"same_within must be finite and must not be negative, got {same_within!r}; 0.01 means 1%.")
    low, high = interval
    if pairs is not None and pairs < MIN_PAIRS:
        return NOT_ENOUGH_DATA
    upper = 1.0 + same_within
    lower = 1.0 / upper
    if low > upper:
        return FASTER
    if high < lower:
        return SLOWER
    if lower <= low and high <= upper:
        return SAME
    return NOT_ENOUGH_DATA
