"""Due dates and late days, by nbgrader's own columns and its plugin for late submissions."""

from __future__ import annotations

import math
import warnings
from datetime import datetime

from nbgrader.plugins import LateSubmissionPlugin
from traitlets import Float

from instructor.course import Course
from instructor.grading.submission.results import GradingError

DAY = 86_400


class LateDays(LateSubmissionPlugin):
    """Takes a share of the points for each day that has begun, after some days that cost nothing.

    In the course's `nbgrader_config.py`:

        c.AssignLatePenalties.plugin_class = "instructor.grading.class_.late.LateDays"
        c.LateDays.free_days = 1
        c.LateDays.percent_a_day = 10
    """

    free_days = Float(0.0, help="Days after the due date that cost nothing.").tag(config=True)
    percent_a_day = Float(10.0, help="Percent of the points that each further day costs.").tag(config=True)

    def late_submission_penalty(self, student_id: str, score: float, total_seconds_late: float) -> float:
        """Points that a late submission loses: at most all of them."""
        days = math.ceil(max(0.0, total_seconds_late - self.free_days * DAY) / DAY)
        return min(score, score * days * self.percent_a_day / 100)


def set_due_date(course: Course, lab: str, due: str) -> datetime:
    """Store a lab's due date in the gradebook; returns it in UTC."""
    from nbgrader.api import Gradebook
    from nbgrader.utils import parse_utc

    try:
        when = parse_utc(due)
    except (ValueError, OverflowError):
        raise GradingError(
            f"{due!r} is no date: write it as 2026-12-01 23:59 +0100; without an offset it is in UTC."
        ) from None
    with warnings.catch_warnings(), Gradebook(course.database, course.course_id) as gradebook:
        warnings.simplefilter("ignore")  # SQLAlchemy's warnings about nbgrader
        gradebook.update_or_create_assignment(lab, duedate=when)
    return when


def apply_penalties(course: Course, lab: str) -> dict[str, float]:
    """Have nbgrader's plugin set the penalty of each late submission; returns {student: points} of those that lose some.

    A penalty is a share of the points, so it is set again when a person has given more of them.
    """
    from nbformat.v4 import new_notebook
    from nbgrader.api import Gradebook
    from nbgrader.preprocessors import AssignLatePenalties
    from traitlets.config.loader import PyFileConfigLoader

    config = PyFileConfigLoader("nbgrader_config.py", path=str(course.root)).load_config()
    late, found = [], {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Gradebook(course.database, course.course_id) as gradebook:
            for submission in gradebook.assignment_submissions(lab):
                if submission.total_seconds_late > 0 or submission.late_submission_penalty:
                    late.append(submission.student.id)
        for student in late:
            where = {"notebook": lab, "assignment": lab, "student": student, "db_url": course.database}
            AssignLatePenalties(config=config, log_level="ERROR").preprocess(new_notebook(), {"nbgrader": where})
        with Gradebook(course.database, course.course_id) as gradebook:
            for submission in gradebook.assignment_submissions(lab):
                if submission.late_submission_penalty:
                    found[submission.student.id] = float(submission.late_submission_penalty)
    return found
