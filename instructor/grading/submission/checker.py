"""Grade one submission: run its cells in a student's process, and the tests here, out of its reach.

This runs in a process of its own, forked for one submission. When a cell hangs or ends the student's process, a new one
runs the cells before it again and goes on with the cells after it.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import numpy as np
import torch

from instructor.checks.common import draw_for
from instructor.grading.submission.exceptions import explain
from instructor.grading.submission.library import put_behind_walls
from instructor.grading.submission.outputs import MAX_NOTEBOOK, clean_outputs, error_output, output_size
from instructor.grading.submission.plan import Step, Unreadable, make_plan, not_graded, python_of, question_title
from instructor.grading.submission.remote import CannotTravel, Gone, Remote
from instructor.grading.submission.results import CellResult, Flag, Job, SubmissionResult

MAX_RESTARTS = 12
MAX_SHOWN = 20_000  # characters of what a test prints
_WHY_GONE = {
    "timeout": "ran longer than the {timeout:g} s that it may take, and was ended. Look for a loop that never ends, "
    "and for work that could be smaller.",
    "killed": "ended its process (a crash, os._exit, or more memory than it may use).",
    "protocol": "disturbed the process that runs it.",
}


class Checker:
    """Grades one submission.

    `base` has the notebook's names after the setup; `start` starts a student's process, with `clean=True` one for no cell of theirs.
    """

    def __init__(self, job: Job, base: dict, start: Callable[..., Remote]):
        self.job, self.base, self.start = job, base, start
        self.ends = time.monotonic() + job.total
        self.walls: dict[str, str] = {}
        self.cells: dict[str, CellResult] = {}
        self.room = MAX_NOTEBOOK  # characters that cells may still show
        self.flags: dict[str, Flag] = {}  # question -> how it broke the protocol
        self.fates: dict[str, tuple[str, str]] = {}  # question -> (status, message) of a cell that hung or died
        self.ran: list[Step] = []
        self.restarts = 0
        self.remote: Remote | None = None  # None once there were too many restarts
        self.clean: Remote | None = None  # of the test cell

    def grade(self) -> SubmissionResult:
        """Run and test every cell of the submission."""
        began, job = time.perf_counter(), self.job
        try:
            plan = make_plan(job.built, job.submission)
        except Unreadable as error:
            return not_graded(job.built, job.student, "unreadable", str(error))
        if plan.foreign:
            self.flags[""] = Flag("", "another lab", f"none of the tests of {job.built.name} is in it")
        # In the warm process's folder, which is removed whatever becomes of this process.
        with tempfile.TemporaryDirectory(prefix="checker-", dir=os.getcwd()) as self.folder:
            self._prepare()
            for name, text in plan.files.items():
                Path(self.folder, name).write_text(text, encoding="utf-8")
            self.remote = self.start()
            self.walls = self.remote.walls
            stages = {"student": self._run, "tests": self._test, "skipped": self._show_as_submitted}
            for step in plan.steps:
                if step.kind in stages:
                    stages[step.kind](step)
                if step.by_hand:
                    self._wait_for_person(step)
            self._stop_student()
        return SubmissionResult(
            student=job.student,
            lab=job.built.name,
            cells=self.cells,
            flags=tuple(self.flags.values()),
            walls=self.walls,
            notebook=nbformat.writes(plan.notebook, version=4),
            seconds=time.perf_counter() - began,
        )

    def _left(self) -> float:
        """Seconds that a cell, or the tests of a question, may take now."""
        return max(0.0, min(self.job.timeout, self.ends - time.monotonic()))

    @property
    def _stopped(self) -> tuple[str, str]:
        """(status, reason) if nothing more of this submission runs; else ("", "")."""
        if time.monotonic() >= self.ends:
            return "timeout", f"the submission has used the {self.job.total:.0f} s that it may take in all"
        return ("killed", "too many cells before it hung or died") if self.remote is None else ("", "")

    # ---- the student's process -------------------------------------------------------------------------------

    def _stop_student(self) -> None:
        if self.remote is not None:
            self.remote.close()
            self.remote = None

    def _restart(self) -> None:
        """Start again after a cell that hung or died: run the cells before it, without it, in a new process."""
        while True:
            self.restarts += 1
            self._stop_student()
            if self.restarts > MAX_RESTARTS or time.monotonic() >= self.ends:
                return
            self.remote = self.start()
            try:
                for step in self.ran:
                    self._run_there(step)
                return
            except Gone:  # the cell went well before and does not now, so it is left out
                self.ran.remove(step)

    def _run_there(self, step: Step) -> dict:
        """Run a cell in the student's process; returns its answer."""
        if self.remote is None:
            raise Gone("killed")
        self.remote.within(self._left())
        return self.remote.ask({"op": "run", "source": step.source})[0]

    def _run(self, step: Step) -> None:
        """Run a cell of the student's and keep what it shows."""
        if reason := self._stopped[1]:
            step.cell.outputs = [error_output("NotRun", f"not run: {reason}")]
            return
        try:
            reply = self._run_there(step)
            outputs = clean_outputs(reply.get("outputs"), self.room)
            self.room -= output_size(outputs)
            if resource := reply.get("exhausted"):
                message = f"The cell {step.name} leaves too little for those after it: {str(resource)[:100]}."
                self.fates.setdefault(step.question, ("killed", message))
                outputs.append(error_output("UsedUp", message))
                self._restart()
            else:
                self.ran.append(step)
        except Gone as gone:
            why = self._why_gone(gone, step)
            message = f"The cell {step.name} of {question_title(step.question)} {why}"
            late = gone.kind == "timeout"
            self.fates.setdefault(step.question, ("timeout" if late else "killed", message))
            outputs = [error_output("Timeout" if late else "DeadKernel", message)]
            self._restart()
        step.cell.outputs = [nbformat.from_dict(output) for output in outputs]

    def _why_gone(self, gone: Gone, step: Step) -> str:
        """Say why the student's process is gone; a broken protocol is flagged."""
        if gone.kind == "protocol":
            self.flags.setdefault(step.question, Flag(step.question, "protocol", gone.detail))
        if gone.kind == self._stopped[0] == "timeout":
            return f"was ended: {self._stopped[1]}."
        return _WHY_GONE[gone.kind].format(timeout=self.job.timeout)

    # ---- tests -----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Get this process ready for hidden checks: runners of student's text stay behind the walls."""
        put_behind_walls(self.base, self._run_elsewhere)
        draw_for(self.job.submission)
        seed = int.from_bytes(os.urandom(6), "little")  # the student's process has the state of the setup cell
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        os.chdir(self.folder)

    def _run_elsewhere(self, module: str, name: str, args: tuple, kwargs: dict):
        """Run a function of the course, which takes a student's text, in a process where no cell of theirs has run."""
        self.clean = self.clean or self.start(clean=True)
        self.clean.within(max(self.remote.deadline - time.monotonic(), 1.0) if self.remote else self.job.timeout)
        return self.clean.call(["ref", module, name], args, kwargs)

    def _test(self, step: Step) -> None:
        """Run a test cell and give its points."""
        status, message, shown = self._verdict(step)
        self._make_room()
        if status != "passed" and step.question in self.fates:
            status, message = self.fates[step.question]
        self.cells[step.name] = CellResult(step.points if status == "passed" else 0.0, status, message)
        outputs = [nbformat.v4.new_output("stream", name="stdout", text=shown)] if shown else []
        if status != "passed":
            kind = {"failed": "WrongAnswer", "timeout": "Timeout", "killed": "DeadKernel"}.get(status, "Error")
            outputs.append(error_output(kind, message))
        step.cell.outputs = [nbformat.from_dict(output) for output in outputs]

    def _make_room(self) -> None:
        """Restart if the student's functions filled the memory as they were tested: later questions need it."""
        if self.remote is None:
            return
        try:
            self.remote.within(self._left())
            full = bool(self.remote.ask({"op": "run", "source": ""})[0].get("exhausted"))
        except Gone:
            full = True
        if full:
            self._restart()

    def _verdict(self, step: Step) -> tuple[str, str, str]:
        """(status, message, what is shown) of a test cell."""
        status, reason = self._stopped
        if self.remote is None or status:
            return status, f"Not graded: {reason}.", ""
        title = question_title(step.question)
        try:
            self.remote.within(self._left())
            return self._test_at_distance(self.remote, step)
        except CannotTravel as reason:
            return "error", f"the check of {title} cannot run on this answer: {reason}", ""
        except Gone as gone:
            why = self._why_gone(gone, step)
            self._restart()
            return "timeout" if gone.kind == "timeout" else "killed", f"{title}: your code {why}", ""

    def _test_at_distance(self, remote: Remote, step: Step) -> tuple[str, str, str]:
        """Run a check in this process, on proxies of the student's functions."""
        names = {**self.base, "__name__": "__main__"}
        names.update(remote.values(step.needs.names, new=True))
        for name in step.needs.files:  # answers that are files
            Path(self.folder, Path(name).name).unlink(missing_ok=True)  # another question's test may have left one
            remote.fetch(name)
        shown, verdict = io.StringIO(), ("passed", "")
        try:
            with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(io.StringIO()):
                exec(compile(python_of(step.source) or "", f"<tests of {step.name}>", "exec"), names)
        except (Gone, CannotTravel):
            raise
        except BaseException as error:
            verdict = explain(error)
        finally:
            if self.clean is not None:
                self.clean.close()
                self.clean = None
        return (*verdict, "".join(remote.shown)[:MAX_SHOWN] + shown.getvalue()[:MAX_SHOWN])

    def _show_as_submitted(self, step: Step) -> None:
        """Keep the tables and plots that came along, for whoever grades the answers in words; and say so."""
        shown = clean_outputs(step.submitted, self.room)
        self.room -= output_size(shown)
        if shown:
            note = {"output_type": "stream", "name": "stdout", "text": "[not run when graded; as submitted]\n"}
            step.cell.outputs = [nbformat.from_dict(output) for output in (note, *shown[:50])]

    # ---- by hand ---------------------------------------------------------------------------------------------

    def _wait_for_person(self, step: Step) -> None:
        empty = step.untouched and step.answer
        self.cells[step.name] = CellResult(0.0, *(("missing", "The answer is empty.") if empty else ("by_hand", "")))
