"""Grades in the forms that learning platforms take: Moodle and Canvas."""

from __future__ import annotations

import csv
import io
import re
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from instructor.course import Course
from instructor.grading.class_.gradebook import as_csv, harmless_cell
from instructor.grading.class_.report import Student, class_of, class_rows
from instructor.grading.submission.harmless import for_terminal
from instructor.grading.submission.plan import question_title
from instructor.points import counted, number_text
from utils.files import write_whole

FORMS = ("questions", "moodle", "canvas")


def export_class(course: Course, lab: str, form: str, to: Path) -> list[str]:
    """Write the grades of a class in one of the `FORMS`; returns what to know before they are uploaded."""
    students = class_of(course, lab)
    rows = {"questions": class_rows, "moodle": moodle_rows, "canvas": lambda s: canvas_rows(s, lab)}[form](students)
    write_whole(to, as_csv(rows))
    return platform_notes(students, form)


def export_gradebook(course: Course, to: Path) -> list[str]:
    """Write all labs' scores as nbgrader's exporter does; returns what to know before it is uploaded."""
    with course.gradebook() as gradebook, tempfile.TemporaryDirectory() as folder:
        from nbgrader.plugins import CsvExportPlugin

        exporter = CsvExportPlugin(to=f"{folder}/grades.csv")
        exporter.log.setLevel("ERROR")
        exporter.export(gradebook)
        waiting = sorted({s.student.id for a in gradebook.assignments for s in a.submissions if s.needs_manual_grade})
        with open(exporter.to, encoding="utf-8", newline="") as file:
            rows = [[harmless_cell(cell) for cell in row] for row in csv.reader(file)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_whole(to, text.getvalue())
    return [_waiting_note(waiting)] if waiting else []


def _waiting_note(students: list[str]) -> str:
    return f"answers of {_some(students)} wait for a person; they count 0 in it"


def platform_notes(students: list[Student], form: str) -> list[str]:
    """What a platform would leave out without a word, and which points are not there yet."""
    waiting = [student.id for student in students if student.waiting]
    notes = [_waiting_note(waiting)] if waiting else []
    if form != "moodle":
        return notes
    if above := [s.id for s in students if _score(s) > s.possible(False)]:
        enough = number_text(max(s.possible(False) + s.possible(True) for s in students))
        notes.append(
            f"Moodle leaves out a grade above the assignment's maximum, and with the bonus {_some(above)} would have one: "
            f"set the assignment's maximum grade to {enough} before you upload"
        )
    if nameless := [s.id for s in students if not _number(s)]:
        notes.append(
            f"Moodle finds a student by the number that its zip puts behind the name, and {_some(nameless)} came without one: "
            "their rows will be left out"
        )
    return notes


def _some(names: list[str]) -> str:
    shown = ", ".join(map(for_terminal, names[:10]))
    return f"{counted(len(names), 'student')} ({shown}{', ...' if len(names) > 10 else ''})"


def _score(student: Student) -> float:
    return max(0.0, round(student.total(False) + student.total(True) - student.penalty, 2))


def _number(student: Student) -> str:
    """The platform's number of a student, which its zip puts behind the name."""
    found = re.search(r"_(\d+)$", student.id)
    return found[1] if found else ""


def _name(student: Student) -> str:
    return (student.person.name if student.person else "") or re.sub(r"_\d+$", "", student.id)


def moodle_rows(students: list[Student]) -> list[dict]:
    """Rows of Moodle's grading worksheet: the assignment's menu, Upload grading worksheet.

    Moodle takes no worksheet without the three columns for who, the grade, and when the grade was last changed. The time is
    that of the export: a grade that somebody gives in Moodle later is not overwritten.
    """
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S +0000}"
    return [
        {
            "Identifier": f"Participant {_number(student)}" if _number(student) else student.id,
            "Full name": _name(student),
            "Email address": student.person.email if student.person else "",
            "Grade": _score(student),
            "Maximum Grade": student.possible(False),
            "Last modified (grade)": now,
            "Feedback comments": _words(student),
        }
        for student in students
    ]


def canvas_rows(students: list[Student], lab: str) -> list[dict]:
    """Rows of Canvas's gradebook: Grades, Import. The second line holds the points that are possible."""
    most = max(student.possible(False) for student in students)
    empty = {"ID": "", "SIS User ID": "", "SIS Login ID": "", "Section": ""}
    rows = [{"Student": "    Points Possible", **empty, lab: most}]
    for student in students:
        person = student.person
        name = f"{person.last_name}, {person.first_name}" if person and person.last_name else _name(student)
        login = person.email or person.id if person else ""
        rows.append({"Student": name, **empty, "ID": _number(student), "SIS Login ID": login, lab: _score(student)})
    return rows


def _words(student: Student) -> str:
    said = {question_title(q): m.splitlines()[0] for q, m in student.messages.items() if m}
    parts = [m if m.startswith(title) else f"{title}: {m}" for title, m in said.items()]
    if student.waiting:
        parts.append(f"{counted(len(student.waiting), 'answer')} not graded yet.")
    if student.penalty:
        parts.append(f"{student.penalty:g} points were taken for lateness.")
    return " ".join(parts)[:2000]
