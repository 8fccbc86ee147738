"""Medians, intervals and verdicts about time samples: numpy only, no clock, no device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95  # of every interval
BLOCKS = 10  # of `repeat_interval`; among fewer samples there are no outliers
# How many standard errors Student's two-sided interval has at 95%, by the degrees of freedom: the blocks less one.
STUDENT = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
MIN_PAIRS = 6  # the range of six ratios holds the true median in 97% of cases, that of five in 94%: no verdict

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
    """Return the indices of samples far above the others: by three times the width of the middle half, and by 5%."""
    array = _samples(samples)
    low, middle, high = np.percentile(array, [25, 50, 75])
    limit = max(high + 3.0 * (high - low), 1.05 * middle)
    return [int(i) for i in np.flatnonzero(array > limit)] if array.size >= BLOCKS else []


def repeat_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the interval (low, high) into which the median of another run falls, in 95 of 100 cases.

    The samples, in the order of time, are cut into ten blocks. Their medians differ by the noise of the samples and by
    the machine's level, which moves: at a GPU's power limit the clocks change from second to second, and samples taken
    together do not show it. The interval is Student's prediction of one more block, and wide enough for a
    level that goes on as it went from the first half to the second. From fewer than ten samples it is their range.
    """
    array = _samples(samples)
    if array.size < BLOCKS:
        return float(array.min()), float(array.max())
    blocks = min(BLOCKS, array.size // 3)
    medians = np.array([np.median(block) for block in np.array_split(array, blocks)])
    half = STUDENT[blocks - 1] * float(medians.std(ddof=1)) * math.sqrt(1.0 + 1.0 / blocks)
    first, second = (float(np.median(part)) for part in np.array_split(array, 2))
    # The next run lies as far off as the halves twice, and more after a pause.
    half = max(half, 3.0 * abs(second - first))
    center = float(np.median(array))
    # By ratios, so that both ends are positive times.
    return center / (1.0 + half / center) if center else 0.0, center + half


def relative_half_width(interval: tuple[float, float], center: float) -> float:
    """Return half the interval's width over its center: 0.01 is plus or minus 1%; infinite for a center of 0."""
    low, high = interval
    return (high - low) / 2.0 / abs(center) if center else math.inf


def _log_ratios(a: Sequence[float], b: Sequence[float]) -> np.ndarray:
    first, second = _samples(a, "a"), _samples(b, "b")
    if second.size != first.size:
        raise ValueError(f"a and b must be pairs: a has {first.size} samples, b has {second.size}.")
    if float(np.median(second)) <= 0.0:
        raise ValueError("the median time of b is not above 0, so no speed-up over it can be given.")
    tiny = np.finfo(np.float64).tiny  # stands for a sample of 0, shorter than the clock resolves
    return np.log(np.maximum(first, tiny)) - np.log(np.maximum(second, tiny))


def speedup(a: Sequence[float], b: Sequence[float]) -> float:
    """Return how many times as fast b is as a: the median of a[i] / b[i], timed next to each other.

    Neighbours share the machine's clocks. At a GPU's power limit the clocks jump between levels, and the ratio of the
    two medians jumps with them (a matmul of 4096 against itself on an H200: 91% of 200 comparisons within 1%, errors up
    to 5%). The median of the pairs' ratios stays the same (all within 0.2%).
    """
    return float(np.exp(np.median(_log_ratios(a, b))))


def speedup_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return the interval of `speedup(a, b)`: two of the pairs' ratios in their order, between which the true median lies.

    As many ratios lie below the true median as heads come in throws of a coin, whatever their distribution. Neighbours
    share the machine's clocks and load: the more of them lie on one side of the median together, the fewer pairs count.
    """
    ratios = _log_ratios(a, b)
    n = ratios.size
    side = np.sign(ratios - np.median(ratios))
    alike = max(0.0, float(side[1:] @ side[:-1]) / n)
    independent = max(4.0, n * (1.0 - alike) / (1.0 + alike))
    # Of n ratios n / 2 lie below, with a standard deviation of n / 2 / sqrt(independent), of which 95% are 1.96.
    first = max(0, math.floor(n / 2.0 - 0.98 * n / math.sqrt(independent)))
    low, high = np.exp(np.sort(ratios)[[first, n - 1 - first]])
    return float(low), float(high)


def verdict(interval: tuple[float, float], *, same_within: float = 0.01, pairs: int | None = None) -> str:
    """Return the verdict on b from an interval of its speed-up: "faster", "slower", "same" or "not enough data".

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
