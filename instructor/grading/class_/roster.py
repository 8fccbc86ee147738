"""The people of a course: names and addresses from a CSV, found for the folders that platforms make."""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from instructor.course import Course
from instructor.grading.submission.results import GradingError

COLUMNS = ("id", "first_name", "last_name", "email")  # as `nbgrader db student import` has them


@dataclass(frozen=True)
class Person:
    """A student of the course."""

    id: str
    first_name: str = ""
    last_name: str = ""
    email: str = ""

    @property
    def name(self) -> str:
        """First and last name."""
        return f"{self.first_name} {self.last_name}".strip()


def read_roster(path: Path) -> list[Person]:
    """Read a roster; `GradingError` says which line is wrong, and how."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise GradingError(f"the roster {path} cannot be read ({error}): it is a CSV in UTF-8.") from None
    rows = csv.DictReader(text.splitlines())
    if "id" not in (rows.fieldnames or ()):
        raise GradingError(
            f"the roster {path} has no column id; its columns are {', '.join(COLUMNS)}, the first is needed."
        )
    people, seen = [], set()
    for row in rows:
        fields = {name: (row.get(name) or "").strip() for name in COLUMNS}
        if not fields["id"] or fields["id"] in seen:
            raise GradingError(
                f"line {rows.line_num} of the roster {path}: the id is {'there twice' if fields['id'] else 'empty'}."
            )
        seen.add(fields["id"])
        people.append(Person(**fields))
    return people


def find_people(people: Iterable[Person], students: Iterable[str]) -> dict[str, Person]:
    """{student, by the name of the folder: person}.

    A folder has a person's id, or, as Moodle and Canvas name it, the name and a number behind it. A name that two people
    have finds neither of them.
    """
    people = list(people)
    by_id = {_plain(person.id): person for person in people}
    by_name: dict[str, list[Person]] = {}
    for person in people:
        for name in {person.name, f"{person.last_name} {person.first_name}", f"{person.last_name}{person.first_name}"}:
            by_name.setdefault(_plain(name), []).append(person)
    found = {}
    for student in students:
        named = re.fullmatch(r"(.+)_(\d+)", student)
        alike = by_name.get(_plain(named[1] if named else student), [])
        one = by_id.get(_plain(student)) or (by_id.get(named[2]) if named else None)
        one = one or (alike[0] if len(alike) == 1 else None)
        if one is not None:
            found[student] = one
    return found


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def roster_path(course: Course) -> Path:
    """Where a course keeps its roster."""
    return course.root / "roster.csv"


def people_of(course: Course) -> list[Person]:
    """The roster of a course; empty if it has none."""
    path = roster_path(course)
    return read_roster(path) if path.is_file() else []


def put_names(course: Course, students: Iterable[str]) -> None:
    """Put the roster's names into the gradebook."""
    found = find_people(people_of(course), students)
    with course.gradebook() as gradebook:
        for student, person in found.items():
            fields = {"first_name": person.first_name, "last_name": person.last_name, "email": person.email}
            gradebook.update_or_create_student(student, **fields)
