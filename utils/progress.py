"""How far a student is: which visible checks of a lab have passed, and the points of their questions.

The saved notebook is the memory: a check cell that ran without an error has passed. So the state survives a restart of
the kernel, and nothing else has to be kept.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.files import ROOT, write_whole

OUT = ROOT / "out"
PASSED, FAILED, NOT_RUN, BY_HAND = "passed", "not passed", "not run", "graded by hand"
_ID = re.compile(r"(q|bonus_)(\d+)_(\d+)(?:_\w+)?")
_HEADING = re.compile(r"^#+ (Bonus )?Question (\d+\.\d+): (.*?)(?: \([\d.]+ (?:bonus )?points?\))?$", re.MULTILINE)


class ProgressError(Exception):
    """A problem that the user can solve; its text is one line."""


@dataclass(frozen=True)
class Part:
    """One graded cell of a lab.

    Attributes:
        question: number of its question, such as "1.1".
        title: title of the question.
        points: what the cell is worth.
        bonus: whether these are bonus points.
        state: PASSED, FAILED, NOT_RUN or BY_HAND.
        message: first line of what the check said, "" if it said nothing.
    """

    question: str
    title: str
    points: float
    bonus: bool
    state: str
    message: str


def read_notebook(path: Path) -> dict[str, Any]:
    """Read a notebook; raise ProgressError if it is none."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        notebook["cells"][0]["metadata"]
    except OSError as error:
        raise ProgressError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise ProgressError(
            f"{path} is no notebook: it may have been saved in part. `labs reset` starts it again."
        ) from None
    return notebook


def parts(notebook: dict[str, Any]) -> list[Part]:
    """Return the graded cells of a lab's notebook with the state of their checks."""
    titles, found = dict[tuple[bool, str], str](), list[Part]()
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            titles.update({(bool(bonus), number): title for bonus, number, title in _HEADING.findall(source)})
        meta = cell["metadata"].get("nbgrader", {})
        match = _ID.fullmatch(meta.get("grade_id", ""))
        if match is None or not (meta.get("grade") or meta.get("task")):
            continue
        number, bonus = f"{match[2]}.{match[3]}", match[1] == "bonus_"
        by_hand = bool(meta.get("solution") or meta.get("task"))
        state, message = (BY_HAND, "") if by_hand else _state(cell)
        found.append(Part(number, titles.get((bonus, number), ""), meta.get("points", 0), bonus, state, message))
    return found


def _state(cell: dict[str, Any]) -> tuple[str, str]:
    outputs = cell.get("outputs", [])
    for output in outputs:
        if output["output_type"] == "error":
            return FAILED, str(output.get("evalue", "")).partition("\n")[0]
    if cell.get("execution_count") is None:
        return NOT_RUN, ""
    return PASSED, "".join("".join(output.get("text", "")) for output in outputs).partition("\n")[0]


def points(found: Sequence[Part], states: Sequence[str], bonus: bool) -> float:
    """Return the sum of the points of the parts in one of these states."""
    return sum(part.points for part in found if part.bonus == bonus and part.state in states)


def summary(found: Sequence[Part]) -> str:
    """Return one line: points of passed checks, of all checks, and what is graded by hand."""
    checks = (PASSED, FAILED, NOT_RUN)
    text = f"{points(found, [PASSED], False):g} of {points(found, checks, False):g} points by visible checks"
    if bonus := points(found, checks, True):
        text += f", {points(found, [PASSED], True):g} of {bonus:g} bonus"
    if by_hand := points(found, [BY_HAND], False) + points(found, [BY_HAND], True):
        text += f"; {by_hand:g} points are graded by hand"
    return text + "."


def run_checks(path: Path, timeout: int, step: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Run a copy of a lab from top to bottom without a browser; the notebook itself stays as it is.

    Args:
        path: the notebook.
        timeout: seconds that one cell may take.
        step: called with the number of cells that have run, and of all cells.

    Returns:
        The executed notebook.
    """
    import nbformat
    import zmq
    from nbclient import NotebookClient
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from traitlets.config import Config

    read_notebook(path)
    notebook = nbformat.read(path, as_version=4)
    total = len(notebook.cells)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        allow_errors=True,
        resources={"metadata": {"path": str(path.parent)}},
        # An encrypted connection to the kernel, where it can be had: without it each kernel warns on the terminal.
        config=Config({"KernelManager": {"transport_encryption": "auto"}} if zmq.has("curve") else {}),
        on_cell_complete=lambda cell, cell_index: step(cell_index + 1, total),
    )
    try:
        client.execute()
    except CellTimeoutError:
        raise ProgressError(
            f"a cell of {path.name} took longer than {timeout} s: run it in JupyterLab, or use --timeout."
        ) from None
    except DeadKernelError:
        raise ProgressError(
            f"the kernel died while {path.name} ran; `labs doctor` says what this machine can run."
        ) from None
    executed = OUT / f"{path.stem}_checked.ipynb"
    write_whole(executed, nbformat.writes(notebook))
    return read_notebook(executed)


def is_untouched(notebook: dict[str, Any]) -> bool:
    """Whether no cell of a notebook has run and every answer is still its stub."""
    for cell in notebook["cells"]:
        if cell.get("execution_count") is not None or cell.get("outputs"):
            return False
        if cell["metadata"].get("nbgrader", {}).get("solution"):
            source = "".join(cell["source"])
            if "YOUR CODE HERE" not in source and "YOUR ANSWER HERE" not in source:
                return False
    return True


def keep_original(path: Path) -> None:
    """Keep a copy of a lab that nobody has worked on yet, so that `labs reset` finds it."""
    original = OUT / "original" / path.name
    if is_untouched(read_notebook(path)):
        content = path.read_bytes()
        if not original.exists() or original.read_bytes() != content:
            write_whole(original, content)


def reset(path: Path) -> Path:
    """Start a lab again; return the path of the copy of the old work.

    The untouched lab comes from the copy that `labs open` keeps, or from git.
    """
    content = _original(path)
    if content is None:
        raise ProgressError(
            f"no untouched {path.name} was found, neither in {OUT / 'original'} nor in git: unpack the lab anew beside this "
            "folder and copy it from there."
        )
    backup = OUT / "backup" / f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}.ipynb"
    backup.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while backup.exists():  # two resets within a second
        number += 1
        backup = backup.with_name(f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}-{number}.ipynb")
    if path.exists():
        shutil.copy2(path, backup)
    write_whole(path, content)
    return backup


def _original(path: Path) -> bytes | None:
    kept = OUT / "original" / path.name
    candidates = [kept.read_bytes()] if kept.exists() else []
    if shutil.which("git"):
        shown = subprocess.run(
            ["git", "show", f"HEAD:./{path.name}"], cwd=path.parent, capture_output=True, check=False
        )
        if shown.returncode == 0:
            candidates.insert(0, shown.stdout)  # git's is the newest that was given out
    for content in candidates:
        try:
            notebook = json.loads(content)
        except ValueError:
            continue
        if is_untouched(notebook):
            return content
    return None
