"""Find submissions in nbgrader's folders, or copy them there from a learning platform's zip."""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MAX_FILE = 64 << 20  # bytes of one notebook, unpacked
MAX_MEMBERS = 20_000
STUDENT = re.compile(r"[\w.@+-]+(?: [\w.@+-]+)*", flags=re.UNICODE)


class IntakeError(ValueError):
    """Submissions that cannot be used; the message says what was found and what is expected."""


@dataclass(frozen=True)
class Submission:
    """A student's notebook for one lab: whose it is, and its path in the course."""

    student: str
    path: Path


def submissions(root: Path, lab: str, only: list[str] | None = None) -> list[Submission]:
    """The submissions for a lab below `submitted/`, by student."""
    found = []
    folder = root / "submitted"
    for place in sorted(folder.iterdir()) if folder.is_dir() else []:
        path = place / lab / f"{lab}.ipynb"
        if place.is_dir() and path.is_file() and not path.is_symlink():
            found.append(Submission(place.name, path))
    if only:
        unknown = sorted(set(only) - {s.student for s in found})
        if unknown:
            raise IntakeError(f"no submission of {', '.join(unknown)} for {lab} in {folder}.")
        found = [s for s in found if s.student in only]
    if not found:
        raise IntakeError(f"no submission for {lab}: expected {folder}/<student>/{lab}/{lab}.ipynb.")
    return found


def student_of(member: str, lab: str) -> str | None:
    """The student whose notebook a member of a zip is, or None if it is no notebook of this lab.

    Moodle: `Ada Lovelace_4711_assignsubmission_file_/lab1.ipynb`; Canvas: `lovelaceada_4711_99_lab1.ipynb` (with
    `LATE` and `-1` now and then); nbgrader: `.../ada/lab1/lab1.ipynb`; otherwise a folder for each student.
    """
    parts = [p for p in PurePosixPath(member.replace("\\", "/")).parts if p not in ("/", ".")]
    if not parts or ".." in parts or parts[0].startswith("__MACOSX") or not parts[-1].endswith(".ipynb"):
        return None
    if ".ipynb_checkpoints" in parts:
        return None
    name = parts[-1].removesuffix(".ipynb")
    if len(parts) > 1:
        moodle = re.fullmatch(r"(.+?)_(\d+)_assignsubmission_\w*", parts[-2])
        if moodle:
            return f"{moodle[1]}_{moodle[2]}"
    canvas = re.fullmatch(rf"(.+?)_(?:LATE_)?(\d+)_\d+_{re.escape(lab)}(?:[ _-]?\(?\d+\)?)?", name)
    if canvas:
        return f"{canvas[1]}_{canvas[2]}"
    if name != lab:
        return None
    folders = parts[:-1]
    if folders and folders[-1] == lab:
        folders = folders[:-1]
    return folders[-1] if folders else None


def take_in(archive: Path, root: Path, lab: str) -> list[Submission]:
    """Copy the notebooks of a zip to `submitted/<student>/<lab>/<lab>.ipynb`."""
    taken: dict[str, Path] = {}
    try:
        with zipfile.ZipFile(archive) as file:
            members = file.infolist()
            if len(members) > MAX_MEMBERS:
                raise IntakeError(f"{archive.name} has {len(members):,} members; at most {MAX_MEMBERS:,} are taken.")
            for member in members:
                student = student_of(member.filename, lab)
                if student is None or member.is_dir():
                    continue
                if not STUDENT.fullmatch(student) or student in (".", ".."):
                    raise IntakeError(f"{archive.name}: {member.filename!r} gives no usable name of a student.")
                if student in taken:
                    raise IntakeError(f"{archive.name} has two notebooks of {student} for {lab}: keep one of them.")
                with file.open(member) as stream:
                    data = stream.read(MAX_FILE + 1)
                path = root / "submitted" / student / lab / f"{lab}.ipynb"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data[:MAX_FILE] if len(data) <= MAX_FILE else b"")
                taken[student] = path
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise IntakeError(f"{archive} cannot be unpacked: {error}") from None
    if not taken:
        raise IntakeError(
            f"{archive.name} holds no {lab}.ipynb under a student's folder (nbgrader, Moodle), and no "
            f"<name>_<number>_<number>_{lab}.ipynb (Canvas)."
        )
    return [Submission(student, path) for student, path in sorted(taken.items())]
