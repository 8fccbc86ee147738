"""Make what students get of a lab: the bundle, searched for secret lines, and worked solutions after the deadline."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

import nbformat

from instructor.build import PUBLIC, QUOTE_LENGTH, ROOT, Built, notebook_text, secret_lines
from instructor.course import answered_notebook
from instructor.grading.submission.results import GradingError
from instructor.points import lab_names, lab_path
from instructor.source import Cell, find_regions, read_lab
from utils.files import write_whole

# What students get, beside the notebook and a README of their own; everything else stays here.
BUNDLE = (
    "Makefile",
    "pyproject.toml",
    "constraints.txt",
    "environment.yml",
    "nbgrader_config.py",
    "assets",
    "utils",
    "tools",
    "docs",
    "expectations",
    "LICENSE",
)
STUDENTS_README = """\
# {title}

```bash
make lab LAB={name}     # makes the environment, opens the lab
```

You need Python 3.11, 3.12 or 3.13 and make. A GPU is optional. [Getting started](docs/students.md) covers laptops, campus GPUs,
JupyterHub and SSH, and lists trouble by its symptom. `.venv/bin/labs check {name}` runs the visible checks and prints your
points; hand in `{name}.ipynb`.

[`utils` in one page](docs/utils.md) lists the helper package, and [how we measure](docs/measuring.md) says what a time means.
"""
LEFT_OUT = ("__pycache__", ".ipynb_checkpoints", ".ruff_cache", ".pytest_cache")
FOR_INSTRUCTORS = ("docs/grading.md", "docs/instructors.md", "docs/contributing.md", "docs/points.md")
STRETCH = 3  # lines in a row that are no coincidence; those that any module has (`_SAYS_NOTHING`) do not count
_SAYS_NOTHING = re.compile(r"(from [\w.]+ )?import .*|(try|else|finally):|.{0,3}")
ARCHIVES = (b"PK", b"\x1f\x8b", b"BZh", b"\xfd7zXZ")  # zip, gzip, bzip2, xz
_STAMP = (2024, 1, 1, 0, 0, 0)  # the same bundle has the same bytes


@dataclass(frozen=True)
class Leak:
    """A secret line in the bundle."""

    file: str
    line: str
    origin: str

    def __str__(self) -> str:
        return f"{self.file}: {self.line!r}, from {self.origin}"


def bundle_files(built: Built) -> dict[str, bytes]:
    """{name in the bundle: bytes} of all its files."""
    files = {f"{built.name}.ipynb": built.student.encode()}
    for name in BUNDLE:
        place = ROOT / name
        found = sorted(place.rglob("*")) if place.is_dir() else [place] if place.is_file() else []
        for path in found:
            relative = path.relative_to(ROOT).as_posix()
            hidden = any(part in LEFT_OUT or part.endswith(".pyc") for part in path.parts)
            if path.is_file() and not hidden and relative not in FOR_INSTRUCTORS:
                files[relative] = path.read_bytes()
    title = next(
        line for cell in json.loads(built.student)["cells"] for line in cell["source"] if line.startswith("# ")
    )
    files["README.md"] = STUDENTS_README.format(title=title.removeprefix("# ").strip(), name=built.name).encode()
    return files


@dataclass(frozen=True)
class Secrets:
    """What may not be given out: single lines, and runs of lines."""

    lines: dict[str, str]  # line -> where it comes from
    stretches: dict[tuple[str, ...], str]  # STRETCH lines in a row -> where they come from


@functools.cache
def secrets_of_all_labs() -> Secrets:
    """Solutions, hidden tests and marking schemes of every lab, and the hidden checks."""
    lines: dict[str, str] = {}
    stretches: dict[tuple[str, ...], str] = {}

    def add(origin: str, stretch: list[str]) -> None:
        kept = _rows(stretch)
        for place in range(len(kept) - STRETCH + 1):
            rows = tuple(kept[place : place + STRETCH])
            if "\n".join(rows) not in shown:
                stretches.setdefault(rows, origin)

    labs = [read_lab(lab_path(name)) for name in lab_names()]
    visible = []
    for lab in labs:
        for cell in lab.cells:
            hidden = {n for r in cell.regions for n in range(r.first, r.last + 1)}
            if not (cell.role == "manual" and not cell.has("SOLUTION")):
                visible += [line for n, line in enumerate(cell.source.splitlines()) if n not in hidden]
    for path in sorted((ROOT / "utils" / "checking" / "labs").rglob("*.py")):
        visible += path.read_text(encoding="utf-8").splitlines()
    shown = "\n".join(_rows(visible))  # a hidden check repeats lines of the visible one
    for lab in labs:
        for line, (cell, number) in secret_lines(lab).items():
            if len(line) >= QUOTE_LENGTH:
                lines.setdefault(line, f"{lab.at(cell)}, line {number + 1} of the cell")
        for cell in lab.cells:
            for region in cell.regions:
                add(lab.at(cell), cell.source.splitlines()[region.first + 1 : region.last])
    for path in sorted((ROOT / "instructor" / "checks").rglob("*.py")):
        text = path.read_text(encoding="utf-8").splitlines()
        add(str(path.relative_to(ROOT)), text)
        for number, line in enumerate(text, 1):
            secret = _squeezed(line)
            is_import = re.match(r"(from [\w.]+ )?import ", secret)
            if len(secret) >= QUOTE_LENGTH and not is_import and PUBLIC not in line and secret not in shown:
                lines.setdefault(secret, f"{path.relative_to(ROOT)}, line {number}")
    return Secrets(lines, stretches)


def _rows(lines) -> list[str]:
    """The lines without indents and comment signs; lines that any module has, such as brackets, are left out."""
    return [line for line in map(_squeezed, lines) if not _SAYS_NOTHING.fullmatch(line)]


def _squeezed(line: str) -> str:
    return " ".join(line.lstrip("# \t").split())


def find_leaks(files: dict[str, bytes], secrets: Secrets) -> list[Leak]:
    """Search every file for secrets: as text, and in the strings of JSON (notebooks).

    In notebooks one secret line is a leak. The library, its documents and its figures share single
    lines with solutions (`out = torch.empty_like(q)`); in these only a run of secret lines is a leak.
    """
    leaks = []
    for name, data in files.items():
        for text in _texts(name, data):
            rows = _rows(text.splitlines())
            for start in range(len(rows) - STRETCH + 1):
                if origin := secrets.stretches.get(tuple(rows[start : start + STRETCH])):
                    leaks.append(Leak(name, rows[start], origin))
            if name.endswith(".ipynb"):
                whole = " ".join(map(_squeezed, text.splitlines()))
                leaks += [Leak(name, line, origin) for line, origin in secrets.lines.items() if line in whole]
    return list(dict.fromkeys(leaks))


def _texts(name: str, data: bytes):
    """Yield the text of a file, and the strings of one that is JSON."""
    if data.startswith(ARCHIVES):
        raise GradingError(f"{name} is an archive, which cannot be looked through: leave it out of the bundle.")
    text = data.decode("utf-8", errors="replace")
    yield text
    if text.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            yield "\n".join(_strings(json.loads(text)))


def _strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and all(isinstance(item, str) for item in value):
        yield from ("".join(value), "\n".join(value))  # a notebook keeps a cell as a list of lines
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def release(built: Built, target: Path) -> tuple[Path, int]:
    """Write the bundle of a lab as a zip into `target`; returns its path, and how many files are in it.

    `GradingError` if a line of a solution or hidden test is anywhere in it.
    """
    files = bundle_files(built)
    _expect_none(find_leaks(files, secrets_of_all_labs()), f"the bundle of {built.name}")
    path = target / f"{built.name}.zip"
    write_whole(path, packed(files, built.name))
    return path, len(files)


def _expect_none(leaks: list[Leak], where: str) -> None:
    if leaks:
        shown = "\n".join(f"  {leak}" for leak in leaks[:20])
        raise GradingError(f"{len(leaks)} secret lines are in {where}:\n{shown}")


def worked_solutions(built: Built) -> str:
    """Return a lab's notebook with its answers, and without hidden tests, marking schemes and nbgrader's metadata.

    `GradingError` if a line of a hidden test or a marking scheme of any lab, or of another lab's answer, is in it.
    """
    notebook = nbformat.reads(answered_notebook(built), as_version=4)
    answers: list[str] = []  # the lines that may be given out now
    for cell in notebook.cells:
        if cell.metadata.pop("nbgrader", {}).get("solution"):
            probe = Cell(cell.cell_type, cell.source, 0)
            find_regions(probe)
            schemes = [range(r.first, r.last) for r in probe.regions if r.kind == "MARK SCHEME"]
            left_out = {n for lines in schemes for n in lines} | {n for r in probe.regions for n in (r.first, r.last)}
            kept = [line for n, line in enumerate(cell.source.splitlines()) if n not in left_out]
            cell.source = "\n".join(line.removesuffix("  # public") for line in kept).rstrip()
            answers += kept
    title = nbformat.v4.new_markdown_cell(
        f"# Worked solutions: {built.name}\n\nFor reading after the deadline. Answers in words are one way to say it. "
        "This notebook cannot be handed in.",
        id="worked-solutions",
    )
    notebook.cells.insert(0, title)
    text = notebook_text(notebook)
    own = {_squeezed(line) for line in answers}
    whole = " ".join(own)
    name = f"{built.name}-solutions.ipynb"
    found = find_leaks({name: text.encode()}, secrets_of_all_labs())
    leaks = [leak for leak in found if _squeezed(leak.line) not in own and _squeezed(leak.line) not in whole]
    _expect_none(leaks, f"the worked solutions of {built.name}")
    return text


def release_solutions(built: Built, target: Path) -> Path:
    """Write a lab's worked solutions into `target`; returns the notebook's path."""
    path = target / f"{built.name}-solutions.ipynb"
    write_whole(path, worked_solutions(built))
    return path


def packed(files: dict[str, bytes], folder: str) -> bytes:
    """Zip files into a folder: the same bytes for the same files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(f"{folder}/{name}", _STAMP)
            entry.external_attr = 0o644 << 16  # everyone may read; without it, only the owner
            archive.writestr(entry, files[name], zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
