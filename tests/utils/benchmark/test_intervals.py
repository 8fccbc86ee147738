"""Intervals against known truth; verdicts at their edges."""

import numpy as np
import pytest

from utils.benchmark import intervals as stats


def level(rng, kind, run):
    """Return the level at which each of the 100 samples of a run is taken."""
    steps = np.repeat(rng.normal(0, 0.03, 10), 10)  # as a GPU at its power limit: another clock in each block
    if kind == "drift":  # over minutes, far slower than a run
        return 1.0 + 1e-4 * (100 * run + np.arange(100))
    return 1.0 + {"steady": 0.0, "steps": steps}[kind]


@pytest.mark.parametrize("noise", [1e-4, 0.002, 0.02])
@pytest.mark.parametrize("kind", ["steady", "steps", "drift"])
def test_the_interval_contains_the_median_of_the_next_run(kind, noise):
    rng = np.random.default_rng(7)
    runs = [level(rng, kind, run) * rng.lognormal(0, noise, 100) for run in range(200)]
    contained = 0
    for run, following in zip(runs[::2], runs[1::2], strict=True):
        low, high = stats.repeat_interval(run)
        contained += low <= np.median(following) <= high
    assert contained >= 95


def test_few_samples_give_their_range():
    assert stats.repeat_interval([3.0]) == (3.0, 3.0)
    assert stats.repeat_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    low, high = stats.repeat_interval([1.0] * 9 + [500.0])
    assert low <= 1.0 <= high < 2.0  # one outlier does not reach the median of its block


@pytest.mark.parametrize("pairs", [6, 10, 30, 100])
def test_speedup_interval_covers_the_true_speedup_of_drifting_pairs(pairs):
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        drift = 1.0 + 0.2 * np.sin(np.linspace(0, 3, pairs))  # clocks that change under both
        a = 2.0 * drift * rng.lognormal(0, 0.03, pairs)
        b = 1.0 * drift * rng.lognormal(0, 0.03, pairs)
        low, high = stats.speedup_interval(a, b)
        covered += low <= 2.0 <= high
    assert covered / 400 >= 0.94


def test_speedup_is_time_of_a_over_time_of_b():
    assert stats.speedup([2.0, 4.0, 6.0], [1.0, 2.0, 300.0]) == pytest.approx(2.0)
    assert stats.speedup_interval([2.0] * 12, [1.0] * 12) == pytest.approx((2.0, 2.0))
    assert stats.speedup_interval([2.0, 3.0, 4.0, 3.0], [1.0] * 4) == pytest.approx((2.0, 4.0))  # the range of a few
    a, b = [1.0, 5.0, 2.0, 2.5], [2.0, 1.0, 3.0, 4.0]
    assert stats.speedup(a, b) == pytest.approx(1 / stats.speedup(b, a))
    assert stats.speedup([1.0, 0.0, 3.0], [1.0, 2.0, 3.0]) == 1.0  # one sample under the clock's resolution


def test_speedup_holds_where_both_jump_between_two_clocks():
    """Half of the pairs run at each clock: a median may fall on either level, the pairs' ratios stay the same."""
    rng = np.random.default_rng(5)
    for _ in range(50):
        level = np.where(rng.random(100) < 0.5, 176.0, 196.0)
        a, b = (level * rng.normal(1.0, 0.002, 100) for _ in range(2))
        assert stats.speedup(a, b) == pytest.approx(1.0, abs=0.002)
        low, high = stats.speedup_interval(a, b)
        assert high - low < 0.004


@pytest.mark.parametrize(
    ("interval", "pairs", "said"),
    [
        ((1.02, 1.05), 50, "faster"),
        ((0.90, 0.95), 50, "slower"),
        ((0.995, 1.005), 50, "same"),
        ((0.97, 1.20), 50, "not enough data"),
        ((1.005, 1.03), 50, "not enough data"),
        ((1.5, 1.6), 5, "not enough data"),
        ((1.5, 1.6), 6, "faster"),
        ((1.5, 1.6), None, "faster"),
    ],
)
def test_verdict(interval, pairs, said):
    assert stats.verdict(interval, same_within=0.01, pairs=pairs) == said


def test_bad_input_is_refused_in_sentences():
    for call, message in (
        (lambda: stats.repeat_interval([]), "at least one number"),
        (lambda: stats.repeat_interval([1.0, float("nan")]), "1 values that are not finite"),
        (lambda: stats.speedup_interval([1.0, 2.0], [1.0, 2.0, 3.0]), "a has 2 samples, b has 3"),
        (lambda: stats.verdict((1.0, 1.0), same_within=-0.1), "must not be negative, got -0.1"),
        (lambda: stats.verdict((1.0, 1.0), same_within=float("nan")), "must be finite .* got nan"),
        (lambda: stats.speedup([1.0], [0.0]), "not above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
