"""Medians, bootstrap intervals and verdicts about time samples: numpy only, no clock, no device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
FEWEST_PAIRS = 10  # below this a bootstrap interval says little, so no verdict is given

FASTER, SLOWER, SAME, NOT_ENOUGH_DATA = "faster", "slower", "same", "not enough data"


def _samples(values: Sequence[float], name: str = "samples") -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be a list of at least one number, got shape {array.shape}.")
    if not np.isfinite(array).all():
        raise ValueError(
            f"{name} holds {int((~np.isfinite(array)).sum())} values that are not finite; drop none "
            "silently: find out where they come from."
        )
    return array


def check_confidence(confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence!r}; 0.95 is usual.")


def percentile(samples: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) of the samples, linearly interpolated."""
    return float(np.percentile(_samples(samples), q))


def standard_deviation(samples: Sequence[float]) -> float:
    """The sample standard deviation (n - 1 in the denominator); 0 for a single sample."""
    array = _samples(samples)
    return float(array.std(ddof=1)) if array.size > 1 else 0.0


def median_interval(
    samples: Sequence[float], confidence: float = 0.95, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap percentile interval (low, high) of the median.

    A resample draws n of the n sorted samples with replacement, that is n uniform positions in [0, 1); its median
    depends only on the middle one (or two) of those positions. The k-th smallest of n uniform numbers is Beta(k,
    n + 1 - k) distributed, so the middle is drawn directly: the distribution of plain resampling, without the n x
    resamples table.
    """
    check_confidence(confidence)
    array = np.sort(_samples(samples))
    n = array.size
    rng = np.random.default_rng(seed)
    k = (n + 1) // 2
    position = rng.beta(k, n + 1 - k, size=resamples)
    medians = array[np.minimum((position * n).astype(np.int64), n - 1)]
    if n % 2 == 0:
        # The next position up: the smallest of the n - k uniform numbers left above `position`.
        upper = 1.0 - (1.0 - position) * rng.random(resamples) ** (1.0 / (n - k))
        medians = 0.5 * (medians + array[np.minimum((upper * n).astype(np.int64), n - 1)])
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(medians, [tail, 100.0 - tail])
    return float(low), float(high)


def relative_half_width(interval: tuple[float, float], center: float) -> float:
    """Half the interval's width over its center: 0.01 is plus or minus 1%. Infinite for a center of 0."""
    low, high = interval
    return (high - low) / 2.0 / abs(center) if center else math.inf


def _log_ratios(a: Sequence[float], b: Sequence[float]) -> np.ndarray:
    first, second = _samples(a, "a"), _samples(b, "b")
    if second.size != first.size:
        raise ValueError(f"a and b must be pairs: a has {first.size} samples, b has {second.size}.")
    if float(np.median(second)) <= 0.0:
        raise ValueError("the median time of b is not above 0, so no speed-up over it can be given.")
    tiny = np.finfo(np.float64).tiny  # a single sample of 0, shorter than the clock can tell
    return np.log(np.maximum(first, tiny)) - np.log(np.maximum(second, tiny))


def speedup(a: Sequence[float], b: Sequence[float]) -> float:
    """How many times as fast b is as a: the median of a[i] / b[i], where a[i] and b[i] were timed next to each other.

    Neighbours share the machine's clocks. At a GPU's power limit these jump between levels, and the ratio of the two
    medians jumps with them (a matmul of 4096 against itself on an H200: 91% of 200 comparisons within 1%, up to 5%
    off); the median of the pairs' ratios does not (all within 0.2%).
    """
    return float(np.exp(np.median(_log_ratios(a, b))))


def speedup_interval(
    a: Sequence[float], b: Sequence[float], confidence: float = 0.95, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap interval of `speedup(a, b)`.

    Pairs are resampled in runs of n**(1/3) neighbours (a circular block bootstrap): neighbours share the machine's
    clocks and load, and an interval that takes them for independent would be too narrow.
    """
    check_confidence(confidence)
    ratios = _log_ratios(a, b)
    n = ratios.size
    block = max(1, math.ceil(n ** (1.0 / 3.0))) if n >= FEWEST_PAIRS else 1
    runs = math.ceil(n / block)
    rng = np.random.default_rng(seed)
    medians = []
    per_chunk = max(1, 2_000_000 // n)  # keeps the index table under 16 MB
    for begin in range(0, resamples, per_chunk):
        rows = min(per_chunk, resamples - begin)
        starts = rng.integers(n, size=(rows, runs, 1))
        index = ((starts + np.arange(block)) % n).reshape(rows, -1)[:, :n]
        medians.append(np.median(ratios[index], axis=1))
    tail = 50.0 * (1.0 - confidence)
    low, high = np.exp(np.percentile(np.concatenate(medians), [tail, 100.0 - tail]))
    return float(low), float(high)


def verdict(interval: tuple[float, float], *, same_within: float = 0.01, pairs: int | None = None) -> str:
    """What an interval of b's speed-up over a says: "faster", "slower", "same" or "not enough data".

    "faster" and "slower" need the whole interval outside the margin, "same" needs it inside. An interval across the
    edge of the margin, or fewer than 10 pairs, is "not enough data".
    """
    if same_within < 0:
        raise ValueError(f"same_within must not be negative, got {same_within!r}; 0.01 means 1%.")
    low, high = interval
    if pairs is not None and pairs < FEWEST_PAIRS:
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
