"""Dates and time zones as instructors write them."""

import pytest

from instructor.grading.class_.dates import read_date, time_zone
from instructor.grading.submission.results import GradingError


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2026-11-19 23:59 +0100", "2026-11-19 22:59"),
        ("2026-11-19 23:59 -0500", "2026-11-20 04:59"),
        ("2026-11-19 23:59 +01:00", "2026-11-19 22:59"),
        ("2026-11-19T23:59:00+01:00", "2026-11-19 22:59"),
        ("2026-11-19 23:59 America/New_York", "2026-11-20 04:59"),
        ("2026-11-19 23:59 CET", "2026-11-19 22:59"),
        ("2026-11-19 11:59 PM", "2026-11-19 18:29"),  # of the zone that is given, Asia/Kolkata
        ("2026-11-19 23:59", "2026-11-19 18:29"),
    ],
)
def test_a_due_date_is_what_it_says(text, utc):
    assert f"{read_date(text, time_zone('Asia/Kolkata')):%Y-%m-%d %H:%M}" == utc


@pytest.mark.parametrize(
    "text", ["", "soon", "2026-13-01 10:00", "2026-11-19 23:59 Mars/Olympus", "0001-01-01 00:00 +1400"]
)
def test_what_is_no_date_is_refused(text):
    with pytest.raises(GradingError, match="no date"):
        read_date(text, time_zone("UTC"))


@pytest.mark.parametrize("name", ["Mars/Olympus", "", "../../etc/passwd"])
def test_a_zone_that_does_not_exist_is_refused(name):
    with pytest.raises(GradingError, match="no time zone"):
        time_zone(name)
