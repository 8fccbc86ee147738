"""Grade one submission: run its cells in a student's process, and the tests here, where it cannot reach.

This runs in a process of its own, forked for one submission. The student's process can be replaced at any time: when a
cell hangs or dies, a new one runs the cells before it again, and goes on behind it.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import nbformat
import torch

from instructor.grading.submission.plan import Plan, Step, Unreadable, make_plan, question_of
from instructor.grading.submission.remote import CannotTravel, Gone, Remote
from instructor.grading.submission.results import CellResult, Flag
from utils.checking import AnswerNeeded, WrongAnswer

MAX_RESTARTS = 12
# Functions that run a student's text in a process of their own: that process has to stand behind the walls, too.
RUNNERS = {"utils.kernels.interpreter": ("run_interpreted_cases",)}
_SHOWN = ("text/plain", "text/latex", "image/png", "image/jpeg")
_GONE = {
    "timeout": "ran longer than the {timeout:g} s that it may take, and was ended. Look for a loop that never ends, "
    "and for work that could be smaller.",
    "killed": "ended its process (a crash, os._exit, or more memory than it may use).",
    "protocol": "disturbed the process that runs it.",
}


class Checker:
    """Grades one submission.

    Args:
        job: the lab's notebooks, the submission and the limits
        base: the notebook's names after the setup
        start: starts a student's process; returns (channel, its flags' pipe, walls, a function that ends it)
    """

    def __init__(self, job: dict, base: dict, start):
        self.job, self.base, self.start = job, base, start
        self.errors = {n: v for n, v in base.items() if isinstance(v, type) and issubclass(v, Exception)}
        self.timeout = float(job["timeout"])
        self.flags: list[Flag] = []
        self.signs: list[dict] = []
        self.walls: dict[str, str] = {}
        self.cells: dict[str, CellResult] = {}
        self.fates: dict[str, tuple[str, str]] = {}  # question -> (status, message) of a cell that hung or died
        self.ran: list[Step] = []
        self.restarts = 0
        self.remote: Remote | None = None
        self.current = ""  # name of the cell that runs
        self.cell_seconds = 0.0
        self.modes: dict[str, str] = dict(job["modes"])
        self.why: dict[str, str] = {}
        self.student_texts: list[str] = []
        self.testing = False

    def grade(self) -> dict:
        """The result, as JSON."""
        began = time.perf_counter()
        try:
            data, tests = bytes.fromhex(self.job["submission"]), self.job["tests"]
            plan = make_plan(self.job["instructor"], self.job["student"], data, tests)
        except Unreadable as error:
            plan = make_plan(self.job["instructor"], self.job["student"], self.job["student"], tests)
            for step in plan.steps:
                if step.points:
                    self.cells[step.name] = CellResult(0.0, step.points, "missing", str(error), 0.0)
            return self._result(plan, began)
        self.flags += [Flag(s.question, s.kind, s.detail) for s in plan.structure]
        # In the warm process's folder: whatever becomes of this process, that one is removed.
        with tempfile.TemporaryDirectory(prefix="checker-", dir=os.getcwd()) as self.folder:
            self._prepare()
            self._fresh()
            for step in plan.steps:
                if step.kind == "student":
                    self._run(step)
                elif step.kind == "tests":
                    self._test(step)
                elif step.kind == "skipped":
                    self._show_as_submitted(step)
                if step.by_hand:
                    self._wait_for_person(step)
            self._stop()
        self._take_away(plan.steps)
        return self._result(plan, began)

    def _result(self, plan: Plan, began: float) -> dict:
        skipped = [s.name for s in plan.steps if s.kind == "skipped"]
        plan.notebook.metadata["grading"] = {"walls": self.walls, "not_run": skipped}
        return {
            "student": self.job["name"],
            "lab": self.job["lab"],
            "cells": {name: vars(cell) for name, cell in self.cells.items()},
            "flags": [vars(flag) for flag in self.flags],
            "walls": self.walls,
            "notebook": nbformat.writes(plan.notebook, version=4),
            "seconds": time.perf_counter() - began,
            "cell_seconds": self.cell_seconds,
            "skipped": skipped,
            "modes": self.modes,
            "why": self.why,
        }

    # ---- the student's process -------------------------------------------------------------------------------

    def _fresh(self) -> None:
        """A new student's process, without any cell run."""
        channel, self.pipe, self.walls, self.end = self.start()
        self.remote = Remote(channel, self.errors)
        self.buffer = b""

    def _stop(self) -> None:
        self._collect_signs()
        if self.remote is not None:
            self.end()
            self._collect_signs()
            os.close(self.pipe)
            self.remote.channel.close()
            self.remote = None

    def _collect_signs(self) -> None:
        """What the student's process reported of itself; it can add to this and not take away."""
        if self.remote is None:
            return
        with contextlib.suppress(OSError):
            while select.select([self.pipe], [], [], 0)[0] and len(self.buffer) < 1_000_000:
                piece = os.read(self.pipe, 65536)
                if not piece:
                    break
                self.buffer += piece
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines[:1000]:
            try:
                said = json.loads(line)
                sign = {key: str(said[key])[:300] for key in ("cell", "kind", "detail", "during")}
            except (ValueError, KeyError, TypeError, RecursionError):
                sign = {"cell": self.current, "during": self.current, "kind": "protocol", "detail": "unreadable sign"}
            if sign not in self.signs:
                self.signs.append(sign)

    def _restart(self) -> None:
        """Start again behind a cell that hung or died: run what ran before it, without it.

        Cells that tampered with the process are left out as well: they have lost their points, and may have broken it.
        """
        self.restarts += 1
        self._again()

    def _again(self) -> None:
        """Another process for the student's, in which the same cells ran."""
        while True:
            self._stop()
            guilty = {sign["cell"] for sign in self.signs}
            self.ran = [step for step in self.ran if step.name not in guilty]
            if self.restarts > MAX_RESTARTS:
                return
            self._fresh()
            try:
                for step in self.ran:
                    self.remote.within(self.timeout)
                    self.remote.ask({"op": "run", "cell": step.name, "source": step.source})
                return
            except Gone:
                self.ran.remove(step)  # it went well the first time; now it counts as gone
                self.restarts += 1

    def _run(self, step: Step) -> None:
        """Run a cell of the student's and keep what it shows."""
        if self.remote is None:
            step.cell.outputs = [_error_output("NotRun", "not run: too many cells before it hung or died")]
            return
        began, self.current = time.perf_counter(), step.name
        self.remote.within(self.timeout)
        try:
            reply, _ = self.remote.ask({"op": "run", "cell": step.name, "source": step.source})
            outputs = _clean_outputs(reply.get("outputs"))
            if reply.get("used_up"):
                message = f"The cell {step.name} leaves too little for those after it: {str(reply['used_up'])[:100]}."
                self.fates.setdefault(step.question, ("killed", message))
                outputs.append(_error_output("UsedUp", message))
                self._restart()
            else:
                self.ran.append(step)
        except Gone as gone:
            words = _GONE[gone.kind].format(timeout=self.timeout)
            message = f"The cell {step.name} of {_label(step.question)} {words}"
            self.fates.setdefault(step.question, ("killed" if gone.kind != "timeout" else "timeout", message))
            if gone.kind == "protocol":
                self._flag(step.question, "protocol", gone.detail)
            outputs = [_error_output("Timeout" if gone.kind == "timeout" else "DeadKernel", message)]
            self._restart()
        self.cell_seconds += time.perf_counter() - began
        step.cell.outputs = [nbformat.from_dict(o) for o in outputs]

    # ---- tests -----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Load the hidden checks; they see runners of student's text that stay behind the walls."""
        for module, names in RUNNERS.items():
            with contextlib.suppress(ImportError):
                owner = __import__(module, fromlist=["*"])
                for name in names:
                    setattr(owner, name, self._behind_walls(module, name, getattr(owner, name)))
        seed = int.from_bytes(os.urandom(6), "little")  # the student's process has the state of the setup cell
        torch.manual_seed(seed)
        random.seed(seed)
        with contextlib.suppress(ImportError):
            import numpy

            numpy.random.seed(seed % 2**32)
        os.chdir(self.folder)
        sys.addaudithook(self._refuse)

    def _refuse(self, event: str, args: tuple) -> None:
        """The checker runs no text of a student's and starts no process with it; such checks go inside."""
        if not self.testing:
            return
        if event == "compile" and self.student_texts:
            text = args[0].decode(errors="replace") if isinstance(args[0], bytes) else args[0]
            if isinstance(text, str) and any(own in text for own in self.student_texts):
                raise CannotTravel("the check runs a student's text itself")
        elif event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"):
            raise CannotTravel(f"the check starts a process ({event})")

    def _behind_walls(self, module: str, name: str, function):
        def run(*args, **kwargs):
            channel, pipe, _, end = self.start(run_text=True)
            clean, left = Remote(channel), self.remote.deadline - time.monotonic()
            try:
                clean.within(max(left, 1.0))
                reply, _ = clean.ask({"op": "runner", "module": module, "name": name})
                if reply["op"] != "ready":
                    raise Gone("protocol", "no runner")
                return clean.call(1, args, kwargs)
            finally:
                end()
                os.close(pipe)
                channel.close()

        run.__wrapped__ = None
        del run.__wrapped__
        run.__name__ = name
        return run

    def _test(self, step: Step) -> None:
        began, self.current = time.perf_counter(), step.name
        status, message, shown = self._verdict(step)
        self._make_room()
        self._collect_signs()
        seconds = time.perf_counter() - began
        self.cell_seconds += seconds
        if status != "passed" and step.question in self.fates:
            status, message = self.fates[step.question]
        points = step.points if status == "passed" else 0.0
        self.cells[step.name] = CellResult(points, step.points, status, message, seconds)
        outputs = [nbformat.v4.new_output("stream", name="stdout", text=shown)] if shown else []
        if status != "passed":
            kind = {"failed": "WrongAnswer", "timeout": "Timeout", "killed": "DeadKernel"}.get(status, "Error")
            outputs.append(_error_output(kind, message))
        step.cell.outputs = [nbformat.from_dict(o) for o in outputs]

    def _make_room(self) -> None:
        """Start again where the student's functions filled the memory as they were tested: later questions need it."""
        if self.remote is None:
            return
        try:
            self.remote.within(self.timeout)
            reply, _ = self.remote.ask({"op": "room"})
            full = bool(reply.get("used_up"))
        except Gone:
            full = True
        if full:
            self._restart()

    def _verdict(self, step: Step) -> tuple[str, str, str]:
        """(status, message, what is shown) of a test cell."""
        if self.remote is None:
            return "killed", "Not graded: too many cells before it hung or died.", ""
        mode = self.modes.get(step.name, "auto")
        try:
            self.remote.within(self.timeout)
            if mode == "inside":
                return self._inside(step)
            try:
                return self._at_distance(step)
            except CannotTravel as reason:
                if mode == "distance":
                    return "error", f"the check of {_label(step.question)} cannot run on this answer: {reason}", ""
                self.why[step.name] = str(reason)
                return self._inside(step)
        except Gone as gone:
            if gone.kind == "protocol":
                self._flag(step.question, "protocol", gone.detail)
            words = _GONE[gone.kind].format(timeout=self.timeout)
            self._restart()
            status = "timeout" if gone.kind == "timeout" else "killed"
            return status, f"{_label(step.question)}: your code {words}", ""

    def _at_distance(self, step: Step) -> tuple[str, str, str]:
        names = {**self.base, "__name__": "__main__"}
        names.update(self.remote.get(step.name, step.names))
        self._fetch_files(step)
        shown, error = io.StringIO(), None
        self.testing = True
        try:
            with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(io.StringIO()), self._alarm():
                for source, file in self._sources(step):
                    exec(compile(source, file, "exec"), names)
        except (Gone, CannotTravel):
            raise
        except BaseException as raised:
            error = raised
        finally:
            self.testing = False
        text = "".join(self.remote.shown)[:20_000] + shown.getvalue()[:20_000]
        if error is None:
            return "passed", "", text
        return (*_explained(error), text)

    def _sources(self, step: Step) -> list[tuple[str, str]]:
        from instructor.grading.submission.plan import python_of

        pieces = [(text, f"<definitions of {step.name}>") for text in step.definitions]
        return [*pieces, (python_of(step.source), f"<tests of {step.name}>")]

    @contextlib.contextmanager
    def _alarm(self):
        """End a check that takes for ever on this side."""

        def late(number, frame):
            raise Gone("timeout")

        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, self.timeout + 5, 1)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _fetch_files(self, step: Step) -> None:
        """Put the files that are answers beside the test, as data."""
        self.student_texts = []
        for name in step.files:
            reply, blobs = self.remote.ask({"op": "file", "name": name})
            path = Path(self.folder, os.path.basename(name))
            path.unlink(missing_ok=True)
            if reply.get("there") is True and len(blobs) == 1:
                path.write_bytes(blobs[0])
                self.student_texts.append(blobs[0].decode(errors="replace"))
        self.student_texts = [text for text in self.student_texts if text.strip()]

    def _inside(self, step: Step) -> tuple[str, str, str]:
        """A check that works on live objects: in a fork of the student's process, against a control."""
        message = {
            "op": "inside",
            "cell": step.name,
            "names": step.names,
            "files": step.files,
            "sources": self._sources(step),
            "modules": self.job["hidden"],
            "control": step.name not in self.job["no_control"] and bool(step.names or step.files),
            "here": "",
        }
        self.modes[step.name] = "inside"
        try:
            first, *rest = self._verdicts_inside(message)
            if first is None:
                return "killed", f"{_label(step.question)}: your code {_GONE['killed']}", ""
            if first["passed"] is True and rest and (rest[0] or {}).get("passed") is True:
                self._flag(step.question, "patched", "the check accepts answers that were spoilt on purpose")
                return "flagged", f"{_label(step.question)}: the check was tampered with.", ""
            shown = str(first["shown"])[:20_000]
            if first["passed"] is True:
                return "passed", "", shown
            from instructor.grading.submission.remote import error_with_lines

            return (*_explained(error_with_lines(first["error"], self.errors)), shown)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Gone("protocol", str(error)[:300]) from None

    def _verdicts_inside(self, message: dict) -> list:
        """The verdict on the answers, and with a control the one on spoilt answers."""
        if not self.job["gpu"]:
            return self.remote.ask(message)[0]["verdicts"]
        verdicts = []
        for here in ("as they are", "spoilt") if message["control"] else ("as they are",):
            self.remote.within(self.timeout)
            verdicts += self.remote.ask({**message, "here": here})[0]["verdicts"]
            self._again()
            if self.remote is None or (verdicts[0] or {}).get("passed") is not True:
                break
        return verdicts

    def _show_as_submitted(self, step: Step) -> None:
        """Keep the tables and plots that came along, for whoever grades the answers in words; and say so."""
        shown = _clean_outputs(step.submitted)
        if shown:
            note = {"output_type": "stream", "name": "stdout", "text": "[not run when graded; as submitted]\n"}
            step.cell.outputs = [nbformat.from_dict(o) for o in (note, *shown[:50])]

    # ---- by hand, and flags ------------------------------------------------------------------------------------

    def _wait_for_person(self, step: Step) -> None:
        if step.untouched and step.answer:
            self.cells[step.name] = CellResult(0.0, step.points, "missing", "The answer is empty.", 0.0)
        else:
            self.cells[step.name] = CellResult(0.0, step.points, "by_hand", "", 0.0)

    def _flag(self, question: str, kind: str, detail: str) -> None:
        flag = Flag(question, kind, detail)
        if flag not in self.flags:
            self.flags.append(flag)

    def _take_away(self, steps: list[Step]) -> None:
        """Tampering costs the points of the question whose cell did it."""
        owner = {step.name: step.question for step in steps}
        for sign in self.signs:
            question = owner.get(sign["cell"]) or question_of(sign["cell"])
            self._flag(question, sign["kind"], sign["detail"])
            if sign["during"] != sign["cell"] and sign["during"] in self.cells:
                self._flag(question_of(sign["during"]), sign["kind"], f"in code of {question}: {sign['detail']}")
        guilty = {flag.question for flag in self.flags if flag.kind != "structure"}
        for name, cell in self.cells.items():
            if question_of(name) in guilty and cell.status in ("passed", "failed", "error"):
                kinds = sorted({f.kind for f in self.flags if f.question == question_of(name)} - {"structure"})
                message = f"{_label(question_of(name))}: no points, because of what the code does: {', '.join(kinds)}."
                self.cells[name] = CellResult(0.0, cell.max_points, "flagged", message, cell.seconds)


def _label(question: str) -> str:
    """`q1_1` -> `Question 1.1`."""
    kind, _, number = question.partition("_")
    if kind == "bonus":
        return f"Bonus {number.replace('_', '.')}"
    return f"Question {question[1:].replace('_', '.')}" if question[:1] == "q" else "the notebook"


def _explained(error: BaseException) -> tuple[str, str]:
    """(status, message): the words of a verdict, or what went wrong; never a line of a test."""
    linecache.checkcache()
    if isinstance(error, WrongAnswer | AnswerNeeded):
        return "failed", str(error)[:5000]
    words = " ".join(str(error).split())[:1000]
    if isinstance(error, AssertionError):
        return "failed", words or "A test of this question failed."
    return "error", f"{type(error).__name__}: {words}" if words else type(error).__name__


def _error_output(name: str, message: str):
    return nbformat.v4.new_output("error", ename=name, evalue=message, traceback=[message])


def _clean_outputs(outputs) -> list[dict]:
    """The outputs of a cell, rebuilt: only what a notebook may hold."""
    kept = []
    for output in outputs if isinstance(outputs, list) else []:
        if isinstance(output, dict) and isinstance(output.get("text"), list):  # notebooks keep lines
            output = {**output, "text": "".join(map(str, output["text"]))}
        kind = output.get("output_type") if isinstance(output, dict) else None
        if kind == "stream":
            name = "stderr" if output.get("name") == "stderr" else "stdout"
            kept.append({"output_type": "stream", "name": name, "text": str(output.get("text"))})
        elif kind in ("display_data", "execute_result") and isinstance(output.get("data"), dict):
            # No HTML, no SVG, no script: they would run in the browser of whoever grades.
            data = {
                str(k): "".join(map(str, v)) if isinstance(v, list) else str(v)
                for k, v in output["data"].items()
                if k in _SHOWN
            }
            if data:
                kept.append({"output_type": "display_data", "data": data, "metadata": {}})
        elif kind == "error":
            trace = output.get("traceback")
            kept.append(
                {
                    "output_type": "error",
                    "ename": str(output.get("ename")),
                    "evalue": str(output.get("evalue")),
                    "traceback": [str(line) for line in trace] if isinstance(trace, list) else [],
                }
            )
    return kept


def explain_crash(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-4000:]
