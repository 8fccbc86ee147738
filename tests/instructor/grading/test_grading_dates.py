"""Dates as instructors write them, and the flags and notes that a person reads."""

import json
import os

import pytest

from instructor.grading.class_.dates import read_date, time_zone
from instructor.grading.formgrader import with_notes
from instructor.grading.submission.exceptions import explain
from instructor.grading.submission.flags import Flags
from instructor.grading.submission.harmless import with_policy
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


@pytest.mark.parametrize("text", ["", "soon", "2026-13-01 10:00", "2026-11-19 23:59 Mars/Olympus"])
def test_what_is_no_date_is_refused(text):
    with pytest.raises(GradingError, match="no date"):
        read_date(text, time_zone("UTC"))


def test_a_zone_that_does_not_exist_is_refused():
    with pytest.raises(GradingError, match="no time zone"):
        time_zone("Mars/Olympus")


def test_many_changes_of_a_notebook_are_one_flag():
    flags = Flags([])
    for number in range(25):
        flags.add(f"q1_{number}", "structure", f"the points of q1_{number}_tests were changed")
    (flag,) = flags.as_tuple()
    assert flag.question == "" and "24 more" in flag.detail


def test_only_attempts_at_the_channel_the_memory_or_the_walls_are_serious():
    flags = Flags([])
    read, write = os.pipe()
    for kind in ("other", "memory", "memory"):
        os.write(write, json.dumps({"cell": "", "kind": kind, "detail": "ctypes.string_at"}).encode() + b"\n")
    flags.read_signs(read, "q1_1_tests")  # the other end is still open, as in a process that a student left behind
    os.close(write)
    assert flags.serious("q1_1") == ["memory"] and flags.serious("q1_2") == []
    assert [(flag.question, flag.kind) for flag in flags.as_tuple()] == [("q1_1", "other"), ("q1_1", "memory")]


def test_sys_exit_is_told_as_a_call_that_ends_a_program():
    status, words = explain(SystemExit(0))
    assert status == "error" and "sys.exit(0)" in words


def test_a_pages_policy_knows_no_script_of_its_cells():
    page = "<html><head><script>own()</script></head><body><script>theirs()</script><script src='https://evil.example/x'></script>"
    policy = with_policy(page).partition("content=")[2].partition(">")[0]
    assert policy.count("sha256-") == 1 and "evil" not in policy


def test_the_reason_for_waiting_stands_above_the_tests():
    page = '<input class="score tabbable" id="q1_1_tests"/><div class="panel-body">assert</div>'
    shown = with_notes(page, "Waits for a person", {"q1_1_tests": "It tried <memory>."})
    assert shown.index("It tried &lt;memory&gt;.") < shown.index("assert")
