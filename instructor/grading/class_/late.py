"""Due dates and late days, by nbgrader's own columns and its plugin for late submissions."""

from __future__ import annotations

import math
from datetime import datetime

from nbgrader.plugins import LateSubmissionPlugin
from traitlets import Float
from traitlets.config.loader import PyFileConfigLoader
from traitlets.utils.importstring import import_item

from instructor.course import Course, CourseError
from utils.validation import first_line

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


def apply_penalties(course: Course, lab: str) -> dict[str, float]:
    """Set the penalty of each late submission by the course's plugin; returns {student: points} of all late ones.

    As nbgrader's `AssignLatePenalties` does when it grades. A penalty is a share of the points, so it is set again when a
    person has given more of them.
    """
    try:
        config = PyFileConfigLoader("nbgrader_config.py", path=str(course.root)).load_config()
        chosen = config.AssignLatePenalties.get("plugin_class", LateSubmissionPlugin)
        plugin = (import_item(chosen) if isinstance(chosen, str) else chosen)(config=config)
    except Exception as error:  # whatever is written there
        raise CourseError(f"{course.root}/nbgrader_config.py cannot be used: {first_line(error)}.") from None
    found = {}
    with course.gradebook() as gradebook:
        for submission in gradebook.assignment_submissions(lab):
            student, late = submission.student.id, submission.total_seconds_late
            if late > 0:
                found[student] = 0.0
            for notebook in submission.notebooks:
                points = plugin.late_submission_penalty(student, notebook.score, late) if late > 0 else None
                notebook.late_submission_penalty = None if points is None else min(max(points, 0.0), notebook.score)
                if points is not None:
                    found[student] += notebook.late_submission_penalty
        gradebook.db.commit()
    return found
