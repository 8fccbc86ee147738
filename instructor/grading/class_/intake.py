"""Find submissions in nbgrader's folders, or copy them there from a learning platform's zip.

Nobody's upload stops another's: what cannot be used is reported by name, and the others go on.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
import os
import re
import stat
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, tzinfo
from pathlib import Path, PurePosixPath
from typing import Any

from instructor.grading.class_.dates import in_utc, time_zone
from instructor.grading.submission.results import GradingError
from utils.files import write_whole

MAX_FILE = 64 << 20  # bytes of one notebook, unpacked
MAX_MEMBERS = 20_000  # of a zip that are one student's
MAX_NAME = 120  # characters of a student's name
MAX_NAME_BYTES = 180  # of it as UTF-8; a file system allows 255, and names of records and parts are longer
MAX_FOLDER = 200  # bytes of the name of a folder in submitted/
MAX_METADATA = 8 << 20  # bytes of Gradescope's list of names
_UNSAFE = re.compile(
    r"[/\\:*?\"<>|\[\]\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)  # in names of folders


@dataclass(frozen=True)
class Submission:
    """A student's notebook for one lab: whose it is, its path in the course, and what a person should know of it."""

    student: str
    path: Path
    note: str = ""


@dataclass
class Arrival:
    """What a platform's zip says of one student's upload."""

    file: str  # the member of the zip that was taken; "" if none was
    time: str = ""  # when it was handed in, as far as the zip says
    late: bool = False  # marked so by the platform
    note: str = ""  # what a person should know: a renamed file, several notebooks, why nothing was taken


# ---- whose a file is ---------------------------------------------------------------------------------------------


def usable_name(name: str) -> str | None:
    """A student's name as that of a folder, with letters as they are; None if nothing is left of it."""
    name = " ".join(_UNSAFE.sub("_", unicodedata.normalize("NFC", name)).split())[:MAX_NAME]
    name = name.encode(errors="replace")[:MAX_NAME_BYTES].decode(errors="ignore").strip()
    if name.startswith("."):
        name = "_" + name.lstrip(".")
    return name if name.strip("_. ") else None


def _parts(member: str) -> list[str] | None:
    """The folders and the name of a member of a zip; None if it is nobody's."""
    parts = [p for p in PurePosixPath(member.replace("\\", "/")).parts if p not in ("/", ".")]
    if not parts or ".." in parts or parts[0].startswith("__MACOSX") or ".ipynb_checkpoints" in parts:
        return None
    return None if parts[-1].startswith((".", "submission_metadata")) else parts


def _wrapper(places: list[list[str]]) -> tuple[str, ...]:
    """The folders around all students: those that every path of folders begins with."""
    paths = ["/".join(place) for place in places if place]
    return tuple(filter(None, os.path.commonpath(paths).split("/"))) if paths else ()


def _place(
    folders: list[str], file: str, wrapper: tuple[str, ...], names: Mapping[tuple[str, ...], str]
) -> tuple[tuple[str, ...], str, str, bool] | None:
    """(where the student's files are, student, name of the file, marked late) of a member; None if it is nobody's.

    Moodle: `Ada Lovelace_4711_assignsubmission_file_/lab1.ipynb`; Canvas: `lovelaceada_LATE_4711_99_lab1-1.ipynb`;
    Gradescope: `assignment_1_export/submission_4711/lab1.ipynb`; nbgrader: `.../ada/lab1/lab1.ipynb`; otherwise a
    folder for each student. What is deeper in a student's folder has a name of the student's choice, which may be
    that of another student: it says nothing of whose the file is.
    """
    own = tuple(folders[: len(wrapper) + 1])
    for depth in range(1, len(own) + 1):
        if moodle := re.fullmatch(r"(.+?)_(\d+)_assignsubmission_\w*", own[depth - 1]):
            student = f"{moodle[1]}_{moodle[2]}"
            return (*own[: depth - 1], student), student, file, False
        if own[:depth] in names:
            return own[:depth], names[own[:depth]], file, False
    if len(folders) <= len(wrapper) and (canvas := re.fullmatch(r"([^_/]+?)_(LATE_)?(\d+)_\d+_(.+)", file)):
        student = f"{canvas[1]}_{canvas[3]}"
        return (*own, student), student, canvas[4], bool(canvas[2])
    return (own, own[-1], file, False) if own else None


def _fits(file: str, lab: str) -> int:
    """How well a file's name fits a lab: 3 its name, 2 its name and more, 1 another name, 0 no notebook or another lab."""
    from instructor.points import lab_names

    if not file.lower().endswith(".ipynb"):
        return 0
    stem, wanted = file[: -len(".ipynb")].casefold(), lab.casefold()
    if stem == wanted or re.fullmatch(rf"{re.escape(wanted)}(?:[ _-]?\(?\d+\)?)?", stem):
        return 3
    own = wanted.partition("_")[0]  # "lab3" of lab3_gluon
    others = {name.casefold().partition("_")[0] for name in lab_names()} - {own}
    if any(stem.startswith(name) for name in others):
        return 0
    return 2 if stem.startswith(own) else 1


# ---- a zip -------------------------------------------------------------------------------------------------------


def take_in(archive: Path, root: Path, lab: str, zone: tzinfo | None = None) -> dict[str, Arrival]:
    """Copy the notebooks of a zip to `submitted/<student>/<lab>/<lab>.ipynb` in a course; returns what was found of whom.

    The times in a zip are the platform's local ones: `zone` is by default this machine's.
    """
    if not archive.is_file():
        raise GradingError(f"{archive} is no file: name the zip that the learning platform gave you.")
    found: dict[str, Arrival] = {}
    try:
        with zipfile.ZipFile(archive) as file:
            members = [m for m in file.infolist() if not m.is_dir()]
            for student, own in sorted(_by_student(file, members, lab).items()):
                arrival, data = _choose(file, own, lab, zone or time_zone(None))
                found[student] = arrival
                if data is not None:
                    path = root / "submitted" / student / lab / f"{lab}.ipynb"
                    write_whole(path, data)
                    write_whole(path.parent / "timestamp.txt", f"{arrival.time}\n")
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError) as error:
        raise GradingError(f"{archive} cannot be unpacked: {error}") from None
    if not any(arrival.file for arrival in found.values()):
        raise GradingError(
            f"{archive.name} holds no {lab}.ipynb under a student's folder (nbgrader, Moodle, Gradescope), and no "
            f"<name>_<number>_<number>_{lab}.ipynb (Canvas)."
        )
    record = root / "grading" / lab / "intake.json"
    write_whole(record, json.dumps({s: asdict(a) for s, a in (arrivals(root, lab) | found).items()}, indent=1))
    return found


def arrivals(root: Path, lab: str) -> dict[str, Arrival]:
    """{student: what the zips that were taken in said}."""
    record = root / "grading" / lab / "intake.json"
    if not record.is_file():
        return {}
    try:
        return {s: Arrival(**fields) for s, fields in json.loads(record.read_text(encoding="utf-8")).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _gradescope_names(file: zipfile.ZipFile, wrapper: tuple[str, ...]) -> dict[tuple[str, ...], str]:
    """{folder of a submission: the student's name} of Gradescope's `submission_metadata.yml`, if there is one.

    It lies beside the submissions. One that lies in a student's folder is the student's, and is not read.
    """
    for depth in range(len(wrapper) + 1):
        path = "/".join((*wrapper[:depth], "submission_metadata.yml"))
        if path in file.namelist():
            break
    else:
        return {}
    yaml: Any = importlib.import_module("yaml")
    try:
        with file.open(path) as stream:
            fields = yaml.safe_load(stream.read(MAX_METADATA))
        who = {folder: entry[":submitters"][0] for folder, entry in fields.items() if entry.get(":submitters")}
        names = {folder: person.get(":name") or person.get(":email") for folder, person in who.items()}
        return {(*wrapper[:depth], folder): name for folder, name in names.items() if isinstance(name, str)}
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, IndexError):
        return {}


def _by_student(file: zipfile.ZipFile, members: list, lab: str) -> dict[str, list]:
    """{student: [(member, name of the file, marked late)]}."""
    found: list[tuple[Any, list[str], str]] = []
    for member in members:
        if (parts := _parts(member.filename)) is not None:
            folders = parts[:-2] if len(parts) > 2 and parts[-2] == lab else parts[:-1]
            found.append((member, folders, parts[-1]))
    wrapper = _wrapper([folders for _, folders, _ in found])
    names = _gradescope_names(file, wrapper)
    owned: dict[tuple[str, ...], list] = {}
    students: dict[tuple[str, ...], str] = {}
    for member, folders, name in found:
        place = _place(folders, name, wrapper, names)
        student = usable_name(place[1]) if place is not None else None
        if place is not None and student is not None and student != lab:
            owned.setdefault(place[0], []).append((member, place[2], place[3]))
            students[place[0]] = student
    times = Counter(students.values())
    named = {student: owned[where] for where, student in students.items() if times[student] == 1}
    for where, student in students.items():
        if times[student] > 1:  # two people of one name: each is told apart by the number of the folder
            number = re.search(r"\d+$", where[-1])
            mark = hashlib.sha256("/".join(where).encode(errors="replace")).hexdigest()[:8]
            own = f"{student}_{number[0] if number else mark}"
            named[own if own not in named else f"{own}_{mark}"] = owned[where]
    return named


def _choose(file: zipfile.ZipFile, own: list, lab: str, zone: tzinfo) -> tuple[Arrival, bytes | None]:
    """The notebook of one student's files: the one whose name fits best, of several such the newest."""
    late = any(marked for _, _, marked in own)
    if len(own) > MAX_MEMBERS:
        return Arrival("", "", late, f"handed in {len(own):,} files; at most {MAX_MEMBERS:,} are read"), None
    plain = [(name, member) for member, name, _ in own if not stat.S_ISLNK(member.external_attr >> 16)]
    rated = sorted(((_fits(name, lab), m.date_time, name, m.filename, m) for name, m in plain), key=lambda r: r[:4])
    if not rated or rated[-1][0] == 0:
        names = ", ".join(sorted(name for name, _ in plain))[:200] or "no file at all"
        why = "a symbolic link" if len(plain) < len(own) else f"no notebook of {lab}: {names}"
        return Arrival("", "", late, f"handed in {why}"), None
    rating, _, name, path, member = rated[-1]
    note = "" if rating == 3 else f"the file was called {name}"
    if (alike := sum(entry[0] >= rating for entry in rated)) > 1:
        note = f"{alike} notebooks; the newest, {path}, was taken"
    try:
        time = f"{in_utc(datetime(*member.date_time).replace(tzinfo=zone)):%Y-%m-%d %H:%M:%S UTC}"
    except ValueError:
        time = ""
    try:
        with file.open(member) as stream:
            data = stream.read(MAX_FILE + 1)
    except Exception as error:  # each compression has errors of its own
        return Arrival("", time, late, f"{name} cannot be unpacked: {error}"), None
    if len(data) > MAX_FILE:
        return Arrival("", time, late, f"{name} is larger than {MAX_FILE >> 20} MB"), None
    return Arrival(member.filename, time, late, note), data


# ---- the folders -------------------------------------------------------------------------------------------------


def submissions(root: Path, lab: str, only: list[str] | None = None) -> list[Submission]:
    """The submissions for a lab below `submitted/`, by student; one under another name counts if it is the only one."""
    found = list(look_through(root, lab)[0].values())
    folder = root / "submitted"
    if only:
        known = [s.student for s in found]
        unknown = sorted(set(only) - set(known))
        if unknown:
            raise GradingError(
                f"no submission of {', '.join(unknown)} for {lab} in {folder}.{suggestion(unknown, known)}"
            )
        found = [s for s in found if s.student in only]
    if not found:
        raise GradingError(f"no submission for {lab}: expected {folder}/<student>/{lab}/{lab}.ipynb.")
    return found


def look_through(root: Path, lab: str) -> tuple[dict[str, Submission], dict[str, str]]:
    """{student: the submission} and {student: why there is none} of those who have a folder for a lab."""
    found: dict[str, Submission] = {}
    why: dict[str, str] = {}
    folder = root / "submitted"
    for place in sorted(folder.iterdir()) if folder.is_dir() else []:
        own, path = place / lab, place / lab / f"{lab}.ipynb"
        if not own.is_dir():
            continue
        others = sorted(other for other in own.glob("*.ipynb") if other.is_file())
        if reason := _why_unusable(place.name):
            why[place.name.encode(errors="replace").decode()] = reason
        elif path.is_symlink():
            why[place.name] = f"{lab}.ipynb is a symbolic link"
        elif path.is_file():
            found[place.name] = Submission(place.name, path)
        elif len(others) == 1 and not others[0].is_symlink():
            found[place.name] = Submission(place.name, others[0], f"the file was called {others[0].name}")
        else:
            what = f"{len(others)} notebooks, and none is {lab}.ipynb" if others else f"no {lab}.ipynb"
            why[place.name] = f"the folder has {what}"
    return found, why


def suggestion(unknown: list[str], known: list[str]) -> str:
    """A question that names the students whose names hold these or are close to them; nothing if none does."""
    found = [name for name in known if any(part.casefold() in name.casefold() for part in unknown)]
    found = found or [close for name in unknown for close in difflib.get_close_matches(name, known, 3)]
    return f" Did you mean {' or '.join(repr(name) for name in found[:5])}?" if found else ""


def _why_unusable(folder: str) -> str:
    """Why the name of a folder in `submitted/` cannot be a student's; "" if it can."""
    try:
        size = len(folder.encode())
    except UnicodeEncodeError:  # as some programs unpack a zip; neither the gradebook nor a table could hold it
        return "the folder's name is not UTF-8: rename the folder"
    if found := re.search(r"[*?\[\]\x00-\x1f\x7f-\x9f]", folder):  # nbgrader looks for pages by a pattern
        return f"nbgrader cannot use the {found[0]!r} in the folder's name: rename the folder"
    if size > MAX_FOLDER:
        return f"the folder's name has {size} bytes, at most {MAX_FOLDER} can be used: rename the folder"
    return ""


def without_submission(root: Path, lab: str) -> dict[str, str]:
    """{student: why there is nothing to grade} of those who have a folder, or were in a zip, and no usable notebook."""
    found, why = look_through(root, lab)
    return why | {s: arrival.note for s, arrival in arrivals(root, lab).items() if not arrival.file and s not in found}
