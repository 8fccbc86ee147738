"""The sources that decide a grade: the lab, its hidden checks, the course's package, the checker, and the libraries."""

from __future__ import annotations

import functools
import hashlib
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from instructor.build import ROOT, Built

FOLDERS = ("utils", "instructor/grading/sandbox", "instructor/grading/submission", "instructor/grading/wire")
LIBRARIES = ("torch", "triton", "transformers", "numpy", "pandas", "nbformat", "ipython")


def fingerprint(built: Built) -> str:
    """A hash of all that decides a grade of a lab.

    The whole package counts and not only what the lab imports: a run more after a change costs a minute, and a grade by
    checks of before costs trust. What only a submission imports is not part of it.
    """
    digest = hashlib.sha256(built.instructor.encode())
    digest.update(sys.version.encode() + repr([_version(library) for library in LIBRARIES]).encode())
    for path in source_files(built.name):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + _text(path, path.stat().st_mtime_ns))
    return digest.hexdigest()[:16]


def source_files(lab: str) -> list[Path]:
    """The course's files that decide a grade of a lab, in order."""
    checks = ROOT / "instructor" / "checks"
    found = [*checks.glob("*.py"), *(checks / lab).rglob("*.py")]
    found += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted(found)


@functools.lru_cache(maxsize=2000)
def _text(path: Path, changed: int) -> bytes:
    """A file's bytes, read once for each time that it was changed."""
    return path.read_bytes()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
