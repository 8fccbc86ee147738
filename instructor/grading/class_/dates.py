"""Dates as people write them, in UTC as nbgrader keeps them: without an offset."""

from __future__ import annotations

import contextlib
import warnings
from datetime import UTC, datetime, tzinfo

from dateutil import parser, tz

from instructor.grading.submission.results import GradingError


def time_zone(name: str | None) -> tzinfo:
    """The time zone of a name such as Europe/Berlin; this machine's without one."""
    zone = tz.tzlocal() if name is None else _zone_of(name)
    if zone is None:
        raise GradingError(f"{name!r} is no time zone: name it as Europe/Berlin, America/New_York or UTC.")
    return zone


def _zone_of(name: str) -> tzinfo | None:
    with contextlib.suppress(ValueError, OSError, Warning):  # of the path of a file, which dateutil would read
        return tz.gettz(name) if name else None
    return None


def read_date(text: str, zone: tzinfo) -> datetime:
    """Read a date such as `2026-12-01 23:59 +0100`, `... Europe/Berlin` or `2026-12-01T23:59+01:00`; `zone` is of one without."""
    *words, last = text.split() or [""]
    named = _zone_of(last) if words and last[:1].isalpha() else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # dateutil only warns of a time zone that it does not know, and drops it
            when = parser.parse(" ".join(words) if named else text)
            return in_utc(when if when.tzinfo else when.replace(tzinfo=named or zone))
    except (ValueError, OverflowError, Warning):
        raise GradingError(
            f"{text!r} is no date: write it as 2026-12-01 23:59 +0100, or with a time zone, as 2026-12-01 23:59 Europe/Berlin."
        ) from None


def in_utc(when: datetime) -> datetime:
    """A date with a time zone, in UTC and without one."""
    return when.astimezone(UTC).replace(tzinfo=None)
