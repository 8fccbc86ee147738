"""The author of code that runs: a student, Python, a library, or the course. And the student's line of an event."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

import torch

from utils.files import ROOT

# The course's own code. This is a constant: in a list, a submission could register its own folder, too.
_COURSE = tuple(str(ROOT / folder) + os.sep for folder in ("utils", "instructor"))


def _library_folders(search_path: list[str]) -> tuple[str, ...]:
    """Return the folders of Python and of installed libraries, also of libraries that a .pth file adds to the path."""
    folders = [sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [p for p in search_path if os.path.isabs(p) and {"site-packages", "dist-packages"} & {*Path(p).parts}]
    return tuple(dict.fromkeys(os.path.realpath(folder) + os.sep for folder in folders))


_LIBRARIES = _library_folders(sys.path)  # before a student's code can change the path

# Folders of torch and of the course with attention in Python: a student who calls it has not written attention.
_PACKAGES = os.path.dirname(os.path.realpath(os.path.dirname(torch.__file__))) + os.sep
_FORMULAS = (
    os.path.join(_PACKAGES, "torch", "nn", "attention", ""),
    *(os.path.join(ROOT, "utils", part, "") for part in ("attention", "kernels", "model", "bench")),
)
# Masks and score modifiers, which the labs hand out.
_HANDED_OUT = tuple(str(ROOT / "utils/attention/masks" / name) for name in ("mask_mods.py", "score_mods.py"))


@functools.cache  # every operator asks for several files
def _owner(file: str) -> str:
    """Return "student", the name of a file with formulas of torch or of the course, or "" for all other code."""
    path = os.path.realpath(file) if os.path.isabs(file) else file  # a name such as <cell 3> stays
    if path.startswith(_FORMULAS) and path not in _HANDED_OUT:
        return path.removeprefix(_PACKAGES).removeprefix(os.path.join(ROOT, ""))
    fileless = file.startswith(("<frozen", "<__array", "<eval_with_key", "<tests of "))  # <tests of: graded test cells
    return "" if fileless or path.startswith((*_COURSE, *_LIBRARIES)) else "student"


def is_students(code: types.CodeType) -> bool:
    """Return whether a student wrote the code, and not Python, a library, the course, or a graded test cell."""
    return _owner(code.co_filename) == "student"


def lender() -> str:
    """Return file and function of a library's formula that runs an operator now for a student; "" if there is none."""
    for frame, _ in traceback.walk_stack(sys._getframe(2)):
        if owner := _owner(frame.f_code.co_filename):
            return "" if owner == "student" else f"{owner}, {frame.f_code.co_name}"
    return ""


@dataclass(frozen=True)
class StudentLine:
    """The line of a student's code at which an event happened."""

    function: str
    number: int
    text: str

    def __str__(self) -> str:
        place = "at the top of the cell" if self.function == "<module>" else f"in {self.function}"
        return f"{place}, line {self.number}" + (f": {self.text}" if self.text else "")


def _line(code: types.CodeType, number: int) -> StudentLine:
    return StudentLine(code.co_name, number, linecache.getline(code.co_filename, number).strip())


def lines_of_error(error: BaseException, skip: types.CodeType | None = None) -> list[StudentLine]:
    """Return the student's lines in the traceback of an exception, outermost first.

    Args:
        error: the exception. If it comes from another process, it has these lines as `student_lines`.
        skip: the code of a check; its frames do not count, nor do the frames of functions that it defines.
    """
    skipped = _all_code(skip) if skip is not None else set()
    steps = [(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    lines = [_line(code, number) for code, number in steps if code not in skipped and is_students(code)]
    return lines + getattr(error, "student_lines", [])


def _all_code(code: types.CodeType) -> set[types.CodeType]:
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return {code}.union(*map(_all_code, inner))


def line_of_stack() -> StudentLine | None:
    """Return the innermost of the student's lines that run now."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(2)) if is_students(frame.f_code))
    return next((_line(frame.f_code, frame.f_lineno) for frame in frames), None)
