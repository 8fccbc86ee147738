"""Due dates and late days, by nbgrader's own columns and its plugin for late submissions."""

from __future__ import annotations

import math
import warnings
from datetime import datetime

from nbgrader.plugins import LateSubmissionPlugin
from traitlets import Float

from instructor.course import Course

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


def set_due_date(course: Course, lab: str, when: datetime) -> None:
    """Store a lab's due date, in UTC and without an offset, in the gradebook."""
    with course.gradebook() as gradebook:
        gradebook.update_or_create_assignment(lab, duedate=when)


def late_students(course: Course, lab: str) -> set[str]:
    """The students whose submission came after the due date."""
    with course.gradebook() as gradebook:
        return {s.student.id for s in gradebook.assignment_submissions(lab) if s.total_seconds_late > 0}


def apply_penalties(course: Course, lab: str) -> dict[str, float]:
    """Have nbgrader's plugin set the penalty of each late submission; returns {student: points} of those that lose some.

    A penalty is a share of the points, so it is set again when a person has given more of them.
    """
    from nbformat.v4 import new_notebook
    from nbgrader.preprocessors import AssignLatePenalties
    from traitlets.config.loader import PyFileConfigLoader

    config = PyFileConfigLoader("nbgrader_config.py", path=str(course.root)).load_config()
    with course.gradebook() as gradebook:
        submissions = gradebook.assignment_submissions(lab)
        late = [s.student.id for s in submissions if s.total_seconds_late > 0 or s.late_submission_penalty]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for student in late:
            where = {"notebook": lab, "assignment": lab, "student": student, "db_url": course.database}
            AssignLatePenalties(config=config, log_level="ERROR").preprocess(new_notebook(), {"nbgrader": where})
    with course.gradebook() as gradebook:
        submissions = gradebook.assignment_submissions(lab)
        return {s.student.id: float(s.late_submission_penalty) for s in submissions if s.late_submission_penalty}
