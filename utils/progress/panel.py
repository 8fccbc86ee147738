"""The panel of points in a lab: it stands below the setup cell and follows the checks as they run.

`import utils` installs it, and only in the kernel of a notebook that a Jupyter server opened: neither the Validate button
nor a grader ever has it. It is plain HTML, with text for a reader without a browser. What the checks said is kept in
`out/progress/LAB.json`, so that after a restart of the kernel the setup cell shows it again. A check that passed adds a
line with the points so far below its own output, since the panel itself may be far up.
"""

from __future__ import annotations

import html
import os
import sys
import time
from pathlib import Path
from typing import Any

from utils.progress import record
from utils.progress.record import BY_HAND, CHANGED, CHECKED, FAILED, NOT_RUN, OPEN, PASSED, Outcome, Part, ProgressError

DISPLAY_ID = "labs-progress"
_INSTALLED = "LABS_PROGRESS_PANEL"  # the kernel that has the panel; programs that it starts inherit the variable
# A sign beside each colour, so that a state can be told without it. JupyterLab's colours fit its light and its dark theme.
_LOOK = {
    PASSED: ("✓", "var(--jp-success-color1, #1a7f37)"),
    FAILED: ("✗", "var(--jp-error-color1, #cf222e)"),
    CHANGED: ("↻", "var(--jp-warn-color1, #b35900)"),
    OPEN: ("…", "var(--jp-warn-color1, #b35900)"),
    NOT_RUN: ("○", "var(--jp-ui-font-color2, #767676)"),
    BY_HAND: ("✎", "var(--jp-ui-font-color2, #767676)"),
}


def install() -> None:
    """Follow the checks of the notebook that this kernel belongs to; do nothing if this is no such kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if (
        shell is None
        or not hasattr(shell, "kernel")
        or os.environ.get(_INSTALLED, str(os.getpid())) != str(os.getpid())
    ):
        return
    path = Path.cwd() / os.environ["JPY_SESSION_NAME"]
    if not path.is_file():  # some servers give the path from their own folder; the kernel runs beside its notebook
        path = Path.cwd() / path.name
    try:
        panel = Panel(path)
    except ProgressError:
        return  # a console, or a source that is opened as a notebook
    if panel.found:
        os.environ[_INSTALLED] = str(os.getpid())
        shell.events.register("post_run_cell", panel.after_cell)


class Panel:
    """The panel of one notebook.

    Attributes:
        found: the graded cells with their states, as of the last look.
    """

    def __init__(self, path: Path):
        self._path = path
        self._read = 0.0  # when the file that was read had been saved, in seconds since the epoch
        self._ran: dict[str, tuple[float, str]] = {}  # answers that ran in this kernel: id -> (when, source)
        self._home: str | None = None  # the cell below which the panel stands
        self._look()

    def _look(self) -> None:
        """Read the notebook if it was saved again, then the record, and find the state of each check."""
        try:
            saved = self._path.stat().st_mtime
        except OSError as error:
            raise ProgressError(f"{self._path}: {error.strerror}") from None
        if saved != self._read:
            self._notebook, self._read = record.read_notebook(self._path), saved
            self._names = {
                cell.get("id"): cell["metadata"].get("nbgrader", {}).get("grade_id", "")
                for cell in self._notebook["cells"]
            }
        newer = {name: source for name, (ran, source) in self._ran.items() if ran > saved}
        self.found = record.parts(self._notebook, record.read_record(self._path), newer)

    def after_cell(self, result: Any) -> None:
        """Note what a cell did that has run, and show it. IPython calls this after each cell."""
        cell = result.info.cell_id
        if cell is None:  # not a cell of the notebook
            return
        try:
            name = self._names.get(cell, "")
            self._note(name, result)
            if self._home in (None, cell):
                self._home = cell
                self._look()
                _display(self.page(), self.text(), first=True)
            elif record.question_of(name):
                self._look()
                _display(self.page(), self.text(), first=False)
                if any(part.name == name and part.state == PASSED for part in self.found):
                    _display(f'<div style="max-width: 46rem">{self._bar()}</div>', record.summary(self.found))
        except (ProgressError, OSError):
            return  # the notebook was renamed, or the disk is full: no reason to disturb the lab

    def _note(self, name: str, result: Any) -> None:
        """Keep the source of an answer that ran, or the outcome of a check."""
        question = record.question_of(name)
        checks = {part.name for part in self.found if part.state != BY_HAND}
        if question is None:
            return
        if name not in checks:
            self._ran[name] = (time.time(), result.info.raw_cell)
            return
        # The check saw the answers that ran here, even if the file has a later edit of them that did not run.
        answer = record.answer_hashes(self._notebook, {key: source for key, (_, source) in self._ran.items()})
        error = result.error_before_exec or result.error_in_exec
        message = str(error).partition("\n")[0] if error else ""
        outcome = Outcome(PASSED if result.success else FAILED, message, answer.get(question, ""))
        record.keep_outcomes(self._path, {name: outcome})

    def text(self) -> str:
        """Return the panel as lines of text."""
        lines = [f"Progress: {record.summary(self.found)}"]
        for state in (*CHECKED, BY_HAND):
            questions = [_number(part) for part in self.found if part.state == state]
            if questions:
                lines.append(f"{_LOOK[state][0]} {state}: {', '.join(dict.fromkeys(questions))}")
        return "\n".join(lines)

    def page(self) -> str:
        """Return the panel as HTML."""
        chips = "".join(_chip(part) for part in self.found)
        legend = " &nbsp; ".join(f"{sign} {state}" for state, (sign, _) in _LOOK.items())
        return (
            '<div style="max-width: 46rem; padding: 8px 12px; border: 1px solid var(--jp-border-color1, #bdbdbd); '
            f'border-radius: 6px">{self._bar()}<div style="display: flex; flex-wrap: wrap; gap: 4px; margin: 8px 0">'
            f'{chips}</div><div style="font-size: 85%; color: var(--jp-ui-font-color2, #616161)">{legend}</div></div>'
        )

    def _bar(self) -> str:
        got, total = (record.points(self.found, states, False) for states in ([PASSED], CHECKED))
        share = f"{100 * got / total:.0f}%" if total else "0%"
        return (
            f"<div><b>Progress:</b> {html.escape(record.summary(self.found))}</div>"
            '<div style="height: 6px; margin-top: 6px; border-radius: 3px; background: var(--jp-border-color2, #e0e0e0)">'
            f'<div style="width: {share}; height: 6px; border-radius: 3px; background: {_LOOK[PASSED][1]}"></div></div>'
        )


def _number(part: Part) -> str:
    return f"{part.question} (bonus)" if part.bonus else part.question


def _chip(part: Part) -> str:
    sign, colour = _LOOK[part.state]
    said = f": {part.message}" if part.state == FAILED and part.message else ""
    hover = html.escape(f"{part.title}, {part.points:g} points: {part.state}{said}")
    return (
        f'<span title="{hover}" style="padding: 1px 7px; border: 1px solid {colour}; border-radius: 9px; color: {colour}; '
        f'white-space: nowrap">{_number(part)} {sign}</span>'
    )


def _display(page: str, text: str, first: bool | None = None) -> None:
    """Show HTML with its text; `first` opens the panel or, if False, brings the one that is shown up to date."""
    from IPython.display import display

    panel = {} if first is None else {"display_id": DISPLAY_ID, "update": not first}
    display({"text/html": page, "text/plain": text}, raw=True, **panel)
