"""What `decode_again` measures: variants that fit and differ, and ratios whose interval knows all series."""

import pytest

from tools.record.decode_again import HEADS, NOT_TIMED, TIES, summary, variants_of_heads, variants_of_ties
from tools.record.decode_variants import arrangement, fits


@pytest.mark.parametrize(("points", "variants"), [(TIES, variants_of_ties), (HEADS, variants_of_heads)], ids="th")
def test_variants_fit_and_differ(points, variants):
    for point in points:
        found = {name: arrangement(point, choices) for name, choices in variants(point).items()}
        assert "default" in found and all(map(fits, found.values()))
        assert len(set(found.values())) == len(found)


def test_the_new_orders_are_measured_where_query_rows_are_rows():
    plan = arrangement(TIES[0], variants_of_ties(TIES[0])["all three"]).plan
    assert plan.backward and plan.k_first and plan.prefill == plan.slots // 2 and plan.by_tma
    parts = variants_of_ties((1, 32, 8, 131072, 128, 16))
    assert "k first, rings filled early" in parts and not {"backward", "all three"} & set(parts)


def test_a_ratio_has_an_interval_over_all_series_and_one_number_for_each():
    series = [{"default": [10.0 + 0.01 * i] * 21, "fa4": [20.0] * 21, "cudnn": [30.0] * 21} for i in range(3)]
    series[1]["copy of as many bytes"] = [1.0] * 21  # not in all series
    found = summary(series, {"own": {"default": "what it is"}})
    assert found["best_other"] == "fa4" and "copy of as many bytes" not in found["us"]
    ratio = found["ratios"]["default"]
    low, high = ratio["interval"]
    assert ratio["series"] == [2.0, 1.998, 1.996] and low <= ratio["ratio"] == 1.998 <= high


def test_what_is_not_timed_is_nowhere_the_best_of_the_points():
    from pathlib import Path

    from tools.record.common import read_record

    rows = read_record(Path(__file__).resolve().parents[2] / "assets/results/h200/decode.json")["rows"]
    assert not {row["best_other"] for row in rows} & set(NOT_TIMED)
