"""How far a student is: which visible checks of a lab have passed, and the points of their questions.

There are two sources. The saved notebook: a check cell that ran without an error has passed. And the record
`out/progress/LAB.json`, which the panel in JupyterLab (`utils.progress.panel`) and `labs check` write: what each check
said, and the hash of the answer it was run on. The record is newer than the last save, and it knows when an answer was
edited afterwards. Both survive a restart of the kernel.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from utils.files import ROOT, write_whole
from utils.validation import UserError, first_line

OUT = ROOT / "out"
PASSED, FAILED, NOT_RUN, BY_HAND = "passed", "not passed", "not run", "graded by hand"
CHANGED, OPEN = "changed since its check ran", "waits for an answer"
CHECKED = (PASSED, FAILED, CHANGED, OPEN, NOT_RUN)  # the states of a visible check
# How `utils.checking` says that an answer is missing: the one that is tested, or an earlier one that it needs.
_MISSING = ("not answered yet", "answer it first")
_ID = re.compile(r"(q|bonus_)(\d+)_(\d+)(?:_\w+)?")
_HEADING = re.compile(r"^#+ (Bonus )?Question (\d+\.\d+): (.*?)(?: \([\d.]+ (?:bonus )?points?\))?$", re.MULTILINE)


class ProgressError(UserError):
    """A lab or its record cannot be used."""


@dataclass(frozen=True)
class Part:
    """One graded cell of a lab."""

    name: str  # its id in the notebook, such as "q1_1_tests"
    question: str  # number of its question, such as "1.1"
    title: str  # of the question, and which part of it where it has several checks
    points: float  # what the cell is worth
    bonus: bool  # whether these are bonus points
    state: str  # one of CHECKED, or BY_HAND
    message: str  # first line of what the check said, "" if it said nothing


@dataclass(frozen=True)
class Outcome:
    """What a check said when it ran last: PASSED or FAILED, its first line, and the hash of the answer it was run on."""

    state: str
    message: str
    answer: str


def read_notebook(path: Path) -> dict[str, Any]:
    """Read a notebook; raise ProgressError if it is none."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            "".join(cell["source"]), cell["metadata"].get, cell["cell_type"]
        notebook["cells"][0]
    except OSError as error:
        raise ProgressError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise ProgressError(
            f"{path} is no notebook: it may have been saved in part. `labs reset` starts it again."
        ) from None
    return notebook


def record_path(notebook: Path) -> Path:
    """Return where the outcomes of a lab's checks are kept."""
    return OUT / "progress" / f"{notebook.stem}.json"


def read_record(notebook: Path) -> dict[str, Outcome]:
    """Return the kept outcomes of a lab's checks, {name of the check's cell: outcome}; none if there is no record."""
    try:
        stored = json.loads(record_path(notebook).read_text(encoding="utf-8"))
        return {name: Outcome(**outcome) for name, outcome in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}  # no record, or one of another version: the saved notebook still knows most of it


def keep_outcomes(notebook: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Add outcomes to the record of a lab; newer ones replace older ones."""
    kept = read_record(notebook) | dict(outcomes)
    text = json.dumps({name: vars(outcome) for name, outcome in kept.items()}, indent=1, ensure_ascii=False)
    write_whole(record_path(notebook), text + "\n")


def question_of(name: str) -> tuple[bool, str] | None:
    """Return (bonus, number of the question) for the id of a question's cell; None for other cells."""
    match = _ID.fullmatch(name)
    return (match[1] == "bonus_", f"{match[2]}.{match[3]}") if match else None


def answer_hashes(notebook: dict[str, Any], newer: Mapping[str, str] | None = None) -> dict[tuple[bool, str], str]:
    """Return a hash of the answer to each question that a check tests, {(bonus, number): hash}.

    Args:
        notebook: the notebook.
        newer: sources, {id of a cell: text}, that take the place of those in the notebook.
    """
    texts: dict[tuple[bool, str], str] = {}
    for cell in notebook["cells"]:
        meta = cell["metadata"].get("nbgrader", {})
        question = question_of(meta.get("grade_id", ""))
        if question is not None and meta.get("solution") and not meta.get("grade"):
            source = (newer or {}).get(meta["grade_id"], "".join(cell["source"]))
            texts[question] = texts.get(question, "") + source.strip() + "\n"
    return {question: hashlib.sha256(text.encode()).hexdigest()[:16] for question, text in texts.items()}


def parts(
    notebook: dict[str, Any], record: Mapping[str, Outcome] | None = None, newer: Mapping[str, str] | None = None
) -> list[Part]:
    """Return the graded cells of a lab's notebook with the state of their checks.

    Args:
        notebook: the notebook.
        record: kept outcomes; they count more than the outputs in the notebook.
        newer: sources of answers that are newer than the notebook's, {id of a cell: text}.
    """
    titles, found = dict[tuple[bool, str], str](), list[Part]()
    answers = answer_hashes(notebook, newer)
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            titles.update({(bool(bonus), number): title for bonus, number, title in _HEADING.findall(source)})
        meta = cell["metadata"].get("nbgrader", {})
        name = meta.get("grade_id", "")
        question = question_of(name)
        if question is None or not (meta.get("grade") or meta.get("task")):
            continue
        bonus, number = question
        if meta.get("solution") or meta.get("task"):
            state, message = BY_HAND, ""
        elif (outcome := (record or {}).get(name)) is None:
            state, message = _state(cell)
        elif outcome.answer == answers.get(question, ""):
            state, message = outcome.state, outcome.message
        else:
            state, message = CHANGED, ""
        if state == FAILED and any(text in message for text in _MISSING):
            state = OPEN
        title = " ".join([titles.get(question, ""), *(f"({piece})" for piece in name.split("_")[2 + bonus : -1])])
        found.append(Part(name, number, title, meta.get("points", 0), bonus, state, message))
    return found


def outcomes_of(executed: dict[str, Any]) -> dict[str, Outcome]:
    """Return what the checks of an executed notebook said, and on which answers."""
    answers = answer_hashes(executed)
    return {
        part.name: Outcome(part.state, part.message, answers.get((part.bonus, part.question), ""))
        for part in parts(executed)
        if part.state not in (NOT_RUN, BY_HAND)
    }


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
    text = f"{points(found, [PASSED], False):g} of {points(found, CHECKED, False):g} points by visible checks"
    if bonus := points(found, CHECKED, True):
        text += f", {points(found, [PASSED], True):g} of {bonus:g} bonus"
    if by_hand := points(found, [BY_HAND], False) + points(found, [BY_HAND], True):
        text += f"; {by_hand:g} points are graded by hand"
    if changed := sorted({part.question for part in found if part.state == CHANGED}):
        text += f". Changed since the check ran: {', '.join(changed)}"
    return text + "."


def notebook_client(notebook: Any, folder: Path, timeout: int, **hooks: Any) -> Any:
    """Return what runs a notebook in a folder without a browser, also the cells after one that fails; hooks are nbclient's."""
    import zmq
    from nbclient import NotebookClient
    from traitlets.config import Config

    class Client(NotebookClient):
        def _async_cleanup_kernel(self) -> Any:
            if asyncio.current_task() is None:  # nbclient's handler of Ctrl-C, after which its cells end in errors
                atexit.unregister(self._cleanup_kernel)  # the kernel ends with its parent
                raise KeyboardInterrupt
            return super()._async_cleanup_kernel()

    # An encrypted connection to the kernel, where it can be had: without it each kernel warns on the terminal.
    config = Config({"KernelManager": {"transport_encryption": "auto"}} if zmq.has("curve") else {})
    # This Python's own kernel, whichever the notebook was saved with.
    options: dict = {"kernel_name": "python3", "resources": {"metadata": {"path": str(folder)}}, "config": config}
    return Client(notebook, timeout=timeout, allow_errors=True, **options, **hooks)


def run_checks(path: Path, timeout: int, step: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Run a copy of a lab from top to bottom and return it; the notebook itself stays as it is.

    Args:
        path: the notebook.
        timeout: seconds that one cell may take.
        step: called with the number of cells that have run, and of all cells.
    """
    import nbformat
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    read_notebook(path)
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:  # a newer format, or cells that are none
        raise ProgressError(f"{path} does not run here: {first_line(error)}. Save it in format 4.") from None
    total = len(notebook.cells)
    client = notebook_client(
        notebook, path.parent, timeout, on_cell_complete=lambda cell, cell_index: step(cell_index + 1, total)
    )
    try:
        client.execute()
    except CellTimeoutError:
        begun = [c.source for c in notebook.cells if c.cell_type == "code" and c.source.strip()]
        first = re.sub(r"from utils.*needs\([^)]*\)\n", "", begun[client.code_cells_executed - 1]).partition("\n")[0]
        raise ProgressError(
            f"the cell `{first}` of {path.name} took longer than {timeout} s: does it end? If so, use --timeout."
        ) from None
    except DeadKernelError:
        raise ProgressError(f"the kernel died while {path.name} ran: `labs doctor` says what runs here.") from None
    return json.loads(nbformat.writes(notebook))


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
    backup = OUT / "backup" / f"{path.stem}-{datetime.now():%Y%m%d-%H%M%S-%f}.ipynb"
    backup.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        shutil.copy2(path, backup)
    write_whole(path, content)
    record_path(path).unlink(missing_ok=True)
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
