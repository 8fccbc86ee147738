"""A class at a glance: a table with a column for each question, statistics, and a picture."""

from __future__ import annotations

import collections
import html
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from instructor.course import Course
from instructor.grading.class_ import gradebook
from instructor.grading.class_.gradebook import as_csv
from instructor.grading.class_.intake import arrivals, look_through, without_submission
from instructor.grading.class_.roster import Person, find_people, people_of
from instructor.grading.submission.plan import question_of, question_title
from instructor.grading.submission.results import GradingError, SubmissionResult
from instructor.points import counted, number_text
from utils.files import write_whole

WAITS = "waits"
_UNANSWERED = re.compile(r"(?!calls ).{0,60}not answered yet")  # what a check says of an answer cell as it was released
WORDS = {"full": "all points", "part": "some", "none": "none", "missing": "no answer", WAITS: "waits for a person"}
FILLS = {"full": "#2f7d5b", "part": "#8cc5a5", "none": "#d9705f", "missing": "#c9c9c9", WAITS: "#e6c34a"}


@dataclass
class Student:
    """One student's points: by question, as the gradebook has them now, a person's grades included; none without a notebook."""

    id: str
    person: Person | None
    points: dict[str, float] = field(default_factory=dict)  # question -> points
    most: dict[str, float] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)  # questions that wait for a person
    missing: set[str] = field(default_factory=set)  # questions without any answer
    messages: dict[str, str] = field(default_factory=dict)  # question -> what the first check that failed said
    penalty: float = 0.0
    flags: int = 0
    late: bool = False
    outcome: str = "graded"  # or unreadable, not graded, no notebook
    note: str = ""  # what a person should know: a renamed file, why there is no grade

    def total(self, bonus: bool) -> float:
        """The sum of the regular points, or of the bonus points."""
        return sum(p for question, p in self.points.items() if question.startswith("bonus") == bonus)

    def possible(self, bonus: bool) -> float:
        """The points that there are, the regular ones or the bonus."""
        return sum(p for question, p in self.most.items() if question.startswith("bonus") == bonus)

    def state(self, question: str) -> str:
        """full, part, none, missing or waits."""
        if question in self.waiting:
            return WAITS
        if question in self.missing:
            return "missing"
        got, most = self.points.get(question, 0.0), self.most.get(question, 0.0)
        return "full" if got >= most else "part" if got > 0 else "none"


def class_of(course: Course, lab: str) -> list[Student]:
    """Everybody whose submission has been graded, by name; `GradingError` if there is nobody."""
    found = _graded(course, lab)
    if not found:
        raise GradingError(
            f"nothing of {lab} has been graded in {course.root}: run `labs grade {lab} --course {course.root}`."
        )
    return _in_order(found)


def everybody(course: Course, lab: str, failed: Mapping[str, str]) -> list[Student]:
    """The class, and everybody who has no grade, with the reason; the roster names those who handed in nothing.

    `failed` says of students why the last run gave them no grade.
    """
    people, came = people_of(course), arrivals(course.root, lab)
    why = without_submission(course.root, lab)
    known = find_people(people, {*why, *look_through(course.root, lab)[0]})
    why |= {p.id: f"{p.name}: handed in nothing" for p in people if p not in known.values()}
    known |= {p.id: p for p in people if p.id in why}
    absent = [
        Student(name, known.get(name), late=name in came and came[name].late, outcome=outcome, note=note)
        for outcome, notes in (("no notebook", why), ("not graded", failed))
        for name, note in notes.items()
    ]
    return _in_order([s for s in _graded(course, lab) if s.id not in {*why, *failed}] + absent)


def _graded(course: Course, lab: str) -> list[Student]:
    results = _records(course, lab)
    if not results:
        return []
    scores = course.scores(lab)
    from instructor.grading.class_ import late  # loads nbgrader, and a single result needs none

    penalties = late.apply_penalties(course, lab)
    people, came = find_people(people_of(course), scores), arrivals(course.root, lab)
    files = look_through(course.root, lab)[0]
    found = []
    for name, cells in scores.items():
        student = Student(name, people.get(name), penalty=penalties.get(name, 0.0))
        record = results.get(name)
        student.flags = len(record.flags) if record else 0
        student.late = name in penalties or (name in came and came[name].late)
        broken = [flag for flag in record.flags if flag.kind in ("unreadable", "not graded")] if record else []
        student.outcome = broken[0].kind if broken else "graded"
        known = came.get(name) or files.get(name)
        notes = [flag.detail for flag in broken] + [getattr(known, "note", "")]
        student.note = "; ".join(filter(None, notes))
        for cell, score in cells.items():
            question = question_of(cell)
            got = score.manual if score.manual is not None else score.auto or 0.0
            student.points[question] = student.points.get(question, 0.0) + got
            student.most[question] = student.most.get(question, 0.0) + score.points
            if score.needs_manual_grade and score.manual is None:
                student.waiting.add(question)
        _take_messages(student, record)
        found.append(student)
    return found


def _in_order(students: Iterable[Student]) -> list[Student]:
    """Students by last name, and by id where there is no name."""
    return sorted(students, key=lambda s: ((s.person.last_name if s.person else s.id).casefold(), s.id))


def _take_messages(student: Student, record: SubmissionResult | None) -> None:
    """Note what was not answered, and what the first check of each question said that failed."""
    answered: set[str] = set()
    for cell, result in record.cells.items() if record else ():
        question = question_of(cell)
        without = result.status == "missing" or _UNANSWERED.match(kind_of_mistake(result.message))
        (student.missing if without else answered).add(question)
        if result.status not in ("passed", "by_hand", "missing"):
            student.messages.setdefault(question, result.message)
    student.missing -= answered


def _records(course: Course, lab: str) -> dict[str, SubmissionResult]:
    folder = gradebook.record_path(course, lab, "x").parent
    names = [path.stem for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    records = {name: gradebook.load_record(course, lab, name, None) for name in names}
    return {name: record for name, record in records.items() if record is not None}


def questions_of(students: Iterable[Student]) -> list[str]:
    """The questions, regular ones first, in the order of the lab."""
    names = {question for student in students for question in student.most}
    return sorted(names, key=lambda q: (q.startswith("bonus"), [int(n) for n in re.findall(r"\d+", q)]))


def in_words(student: Student) -> str:
    """One student's points, and all that a person should know, as a line."""
    got, bonus = student.total(False), student.total(True)
    parts = [
        f"{number_text(got)} of {number_text(student.possible(False))}" if student.most else "-",
        f"{number_text(bonus)} bonus" if bonus else "",
        f"{len(student.waiting)} wait" if student.waiting else "",
        counted(student.flags, "flag") if student.flags else "",
        "late" if student.late else "",
        f"{number_text(round(student.penalty, 2))} taken for lateness" if student.penalty else "",
        "" if student.outcome == "graded" else student.outcome,
        student.note,
    ]
    return ", ".join(filter(None, parts))


# ---- tables ------------------------------------------------------------------------------------------------------


def class_rows(students: list[Student]) -> list[dict]:
    """A row for each student: who, the sums, why there is no grade, and a column for each question; "waits" where a person has to grade."""
    questions = questions_of(students)
    rows = []
    for student in students:
        person = student.person or Person(student.id)
        row: dict[str, object] = {"student": student.id, "last_name": person.last_name, "first_name": person.first_name}
        row |= {"points": student.total(False), "of": student.possible(False), "bonus": student.total(True)}
        row |= {"waiting": len(student.waiting), "penalty": round(student.penalty, 2), "flags": student.flags}
        if not student.most:
            row |= dict.fromkeys(("points", "of", "bonus", "waiting", "penalty", "flags"), "")
        row |= {"late": "late" if student.late else "", "state": student.outcome, "note": student.note}
        for question in questions if student.most else ():
            row[question_title(question)] = WAITS if question in student.waiting else student.points.get(question, 0.0)
        rows.append(row)
    return rows


def kind_of_mistake(message: str) -> str:
    """A check's message without the numbers of one student's answer, so that the same mistake is counted as one."""
    first = next((line for line in message.splitlines() if line.strip()), "")
    first = re.sub(r"^\W*(?:Question|Bonus)(?: Question)? [\d.]+:? ?", "", first)
    return re.sub(r"-?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?", "#", first)[:160].strip() or "no words"


def statistics_rows(students: list[Student]) -> list[dict]:
    """A row for each question: how many got what, and the commonest mistake by the words of the check."""
    rows = []
    for question in questions_of(students):
        states = collections.Counter(student.state(question) for student in students)
        graded = [s.points[question] for s in students if question in s.points and question not in s.waiting]
        mistakes = collections.Counter(
            kind_of_mistake(s.messages[question])
            for s in students
            if question in s.messages and s.state(question) in ("part", "none")
        )
        common, count = mistakes.most_common(1)[0] if mistakes else ("", 0)
        rows.append(
            {
                "question": question_title(question),
                "of": max((s.most.get(question, 0.0) for s in students), default=0.0),
                "mean": round(statistics.fmean(graded), 2) if graded else "",
                **{state: states.get(state, 0) for state in FILLS},
                "commonest mistake": common,
                "times": count,
            }
        )
    return rows


def write_summary(course: Course, lab: str, students: list[Student]) -> Path:
    """Write a row for each student to `grading/<lab>/summary.csv`; returns its path."""
    path = course.root / "grading" / lab / "summary.csv"
    write_whole(path, as_csv(class_rows(students)))
    return path


# ---- a picture ---------------------------------------------------------------------------------------------------

_BARS, _ROW, _TOP = 500, 20, 40  # pixels: the bar of the whole class, a question's row, what stands above the rows


def class_picture(students: list[Student], lab: str) -> str:
    """An SVG: for each question how many students got what, and beside it how many students have how many points.

    It is written by hand: to load a library for plots would take as long as everything else that `labs stats` does.
    """
    rows, count = statistics_rows(students), len(students)
    bottom, parts = _TOP + _ROW * len(rows), []

    def text(x: float, y: float, words: str, anchor: str = "start") -> None:
        parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(words)}</text>')

    def box(x: float, y: float, width: float, height: float, color: str) -> None:
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{color}" stroke="white"/>')

    text(70, 24, f"{lab}: who got what, of {counted(count, 'student')}")
    for y, row in zip(range(_TOP, bottom, _ROW), rows, strict=True):
        text(64, y + 14, row["question"].removeprefix("Question "), "end")
        x = 70.0
        for state, color in FILLS.items():
            box(x, y, _BARS * row[state] / count, _ROW - 2, color)
            x += _BARS * row[state] / count
    for x, (state, color) in zip(range(70, 70 + _BARS, _BARS // len(FILLS)), FILLS.items(), strict=True):
        box(x, bottom + 16, 12, 12, color)
        text(x + 16, bottom + 26, WORDS[state])
    totals = [student.total(False) - student.penalty for student in students]
    most = max(student.possible(False) for student in students) or 1.0
    bins = collections.Counter(min(9, max(0, int(10 * total / most))) for total in totals)
    left, middle, height = 70 + _BARS + 60, statistics.median(totals), bottom - _TOP
    for place, number in bins.items():
        tall = height * number / max(bins.values())
        box(left + 24 * place, bottom - tall, 24, tall, "#4f7fae")
        text(left + 24 * place + 12, bottom - tall - 4, str(number), "middle")
    parts.append(f'<path d="M{left + 240 * middle / most:g} {_TOP}V{bottom}" stroke="#333333"/>')
    waits = "; what waits counts 0" if any(student.waiting for student in students) else ""
    text(left, 14, f"students by points, median {middle:g}{waits}")
    text(left, bottom + 14, "0", "middle")
    text(left + 240, bottom + 14, f"{most:g} without bonus", "middle")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="960" height="{bottom + 40}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"])
