"""The timer check counts what its tables promise."""

import itertools
import sys
import types

import pytest

from tools.record import timer_check
from utils.benchmark.result import Measurement


def test_pairs_whose_interval_contains_the_other_median_are_counted(monkeypatch):
    """A narrow and a wide interval, and one that lies outside of the narrow one: 5 of 6 pairs are contained."""
    intervals = {1.0: (0.9, 1.1), 1.05: (0.5, 2.0), 1.5: (1.0, 1.6)}
    results = iter([Measurement((median,), edges, method={"seconds": 0.5}) for median, edges in intervals.items()])
    monkeypatch.setattr(timer_check, "square", lambda n: None)
    monkeypatch.setattr(timer_check, "measure", lambda *arguments, **options: next(results))
    row = timer_check.alone(1, 3)
    assert row["contained"] == pytest.approx(5 / 6) and row["furthest"] == pytest.approx(0.5)
    assert "contained 0.8333" in timer_check.show(row) and "medians_us" not in timer_check.show(row)


def test_rounds_take_turns_and_a_common_drift_cancels(monkeypatch):
    """Two timers that agree, on a GPU whose clocks fall from round to round: no difference is found."""
    clock, order = itertools.count(), []

    def time_ms(who):
        order.append(who)
        return 0.1 * 1.01 ** next(clock)

    def measure(call, **options):
        value = time_ms("measure") if options.get("l2") == "cold" else 0.1
        return types.SimpleNamespace(samples_ms=[value] * 3, median_ms=value)

    monkeypatch.setattr(timer_check, "measure", measure)
    do_bench = types.SimpleNamespace(do_bench=lambda call, **options: [time_ms("do_bench")] * 3)
    monkeypatch.setitem(sys.modules, "triton.testing", do_bench)
    row = timer_check.against_do_bench("f", lambda: None, rounds=8)
    assert order[1:9] == ["measure", "do_bench", "do_bench", "measure"] * 2
    assert abs(row["difference"]) < 1e-3 and row["interval"][0] <= 0 <= row["interval"][1]
