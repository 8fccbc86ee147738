"""Grade one submission: run its cells in a student's process, and the tests here, out of its reach.

This runs in a process of its own, forked for one submission. When a cell hangs or ends the student's process, a new one
runs the cells before it again and goes on with the cells after it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import nbformat
import torch

from instructor.checks.common import draw_for, to_look_at
from instructor.grading.sandbox.tampering import Sign
from instructor.grading.submission.exceptions import error_with_lines, explain
from instructor.grading.submission.outputs import MAX_NOTEBOOK, clean_outputs, error_output, output_size
from instructor.grading.submission.plan import Plan, Step, Unreadable, make_plan, python_of, question_of, question_title
from instructor.grading.submission.reading import Reading, unusual_file
from instructor.grading.submission.records import Job, Report
from instructor.grading.submission.remote import CannotTravel, Gone, Remote
from instructor.grading.submission.results import CellResult, Flag, SubmissionResult
from instructor.grading.submission.usual_operators import unusual_calls
from instructor.grading.submission.usual_words import (
    MOST_NUMBERS,
    MOST_OPERATORS,
    NARROW_OPERATORS,
    OPERATORS,
    READING_ONE_BY_ONE,
    usual_in,
)
from instructor.grading.wire.channel import Channel

MAX_RESTARTS = 12
UNUSUAL = "unusual"  # a flag: the answer passed, and waits, since it uses what right answers do not need
MAX_ALIKE, MAX_FLAGS = 4, 200  # flags of one kind for one question, and of a submission
# Flags that take no points: a changed structure, and what honest code does now and then and the walls make harmless.
NOTED = (
    *("structure", "inspects frames or objects", "network", "runs at the end", "proved in part"),
    *("unreadable", "not graded", UNUSUAL),
)
READ_SECONDS = 60  # that reading a submission and planning its cells may take
MAX_SHOWN = 20_000  # characters of what a test prints
# Functions that run a student's text in a process of their own: that process has to be behind the walls, too.
RUNNERS = {
    "utils.kernels.interpreter": ("run_interpreted_cases",),
    "utils.checking.kernel_exercises": ("simulate_file", "compile_file", "run_file"),
}
# Functions that work on live objects of the student's, such as compiled masks: they run where these objects are.
BESIDE = {"utils.checking.masks": ("kernels_for",)}
ON_GPU = ("run_file",)  # of these, the ones that need a GPU
INTERPRETED = ("utils.kernels.interpreter",)  # these need a process in which Triton interprets kernels
_WHY_GONE = {
    "timeout": "ran longer than the {timeout:g} s that it may take, and was ended. Look for a loop that never ends, "
    "and for work that could be smaller.",
    "killed": "ended its process (a crash, os._exit, or more memory than it may use).",
    "protocol": "disturbed the process that runs it.",
}


class StudentProcess(NamedTuple):
    """A student's process that has just started behind its walls."""

    channel: Channel
    signs: int  # descriptor of the pipe on which it reports signs of tampering
    walls: dict[str, str]  # wall -> what it stands by
    end: Callable[[], None]


class Checker:
    """Grades one submission.

    Args:
        job: the lab's notebooks, the submission and the limits.
        base: the notebook's names after the setup.
        start: starts a student's process; with `clean=True` one that gets no cell of theirs, and with
            `interpreting=True` one in which Triton's kernels are interpreted.
    """

    def __init__(self, job: Job, base: dict, start: Callable[..., StudentProcess]):
        self.job, self.base, self.start = job, base, start
        self.errors = {n: v for n, v in base.items() if isinstance(v, type) and issubclass(v, Exception)}
        self.timeout = job.timeout
        self.ends = time.monotonic() + job.total
        self.flags: list[Flag] = []
        self.signs: list[Sign] = []
        self.walls: dict[str, str] = {}
        self.cells: dict[str, CellResult] = {}
        self.shown: dict[str, int] = {}  # cell -> characters of what it shows
        self.fates: dict[str, tuple[str, str]] = {}  # question -> (status, message) of a cell that hung or died
        self.ran: list[Step] = []
        self.restarts = 0
        self.process: StudentProcess | None = None  # None once there were too many restarts
        self.remote: Remote | None = None
        self.unread = bytearray()  # the beginning of a sign that has not come as a whole
        self.beat = 0  # the last request after which the watch in the student's process was whole
        self.current = ""  # name of the cell that runs
        self.silent = False  # the watch has fallen silent: no question from there on has points that can be proved
        self.cell_seconds = 0.0
        self.modes = dict(job.modes)
        self.why: dict[str, str] = {}
        self.student_texts: list[str] = []
        self.file_texts: dict[str, str] = {}  # the same by the names of the files
        self.clean: dict[bool, tuple[StudentProcess, Remote]] = {}  # of the test cell: interpreting Triton, or not
        self.testing = False
        self.watching = set(job.watching)  # test cells that record what runs in the student's functions
        self.gpu_work = 0  # tests' requests to run a kernel on a GPU
        self.proving: dict[str, str] = {}  # of these, the ones whose records compute the results: "whole" or "in part"
        self.usual = usual_in(job.lab, job.instructor_notebook, base)
        self.reading: Reading | None = None  # the code of the submission
        self.forbidding: set[str] = set()  # test cells that forbid something
        self.unusual: dict[str, list[str]] = {}  # test cell -> what its answer does beside what right answers need

    def grade(self) -> Report:
        """Run and test every cell of the submission."""
        began = time.perf_counter()
        job = self.job
        try:
            with self._alarm(READ_SECONDS):
                plan = make_plan(job.instructor_notebook, job.student_notebook, job.submission, job.tests)
        except (Unreadable, Gone) as error:
            why = f"The submitted notebook takes more than {READ_SECONDS} s to be read."
            why = str(error) if isinstance(error, Unreadable) else why
            self._flag("", "unreadable", why)
            plan = make_plan(job.instructor_notebook, job.student_notebook, job.student_notebook, job.tests)
            for step in plan.steps:
                if step.points:
                    self.cells[step.name] = CellResult(0.0, step.points, "missing", why, 0.0)
            return self._report(plan, began)
        for change in plan.structure:
            self._flag(change.question, change.kind, change.detail)
        # In the warm process's folder, which is removed whatever becomes of this process.
        with tempfile.TemporaryDirectory(prefix="checker-", dir=os.getcwd()) as self.folder:
            self.reading = Reading(plan.steps, self.usual)
            self._prepare()
            for name, text in plan.files.items():
                Path(self.folder, name).write_text(text, encoding="utf-8")
            self._start_student()
            stages = {"student": self._run, "tests": self._test, "skipped": self._show_as_submitted}
            for step in plan.steps:
                if step.kind in stages:
                    stages[step.kind](step)
                if step.by_hand:
                    self._wait_for_person(step)
            self._stop_student()
        self._flag_signs(plan.steps)
        self._take_points_of_flagged()
        self._let_unusual_wait(plan.steps)
        return self._report(plan, began)

    def _report(self, plan: Plan, began: float) -> Report:
        skipped = [s.name for s in plan.steps if s.kind == "skipped"]
        plan.notebook.metadata["grading"] = {"walls": self.walls, "not_run": skipped}
        result = SubmissionResult(
            student=self.job.student,
            lab=self.job.lab,
            cells=self.cells,
            flags=tuple(self.flags),
            walls=self.walls,
            notebook=nbformat.writes(plan.notebook, version=4),
            seconds=time.perf_counter() - began,
            cell_seconds=self.cell_seconds,
            skipped=tuple(skipped),
        )
        return Report(result, self.modes, self.why, sorted(self.watching), self.proving)

    def _left(self) -> float:
        """Seconds that a cell, or the tests of a question, may take now."""
        return max(0.0, min(self.timeout, self.ends - time.monotonic()))

    @property
    def _out_of_time(self) -> bool:
        return time.monotonic() >= self.ends

    # ---- the student's process -------------------------------------------------------------------------------

    def _start_student(self) -> None:
        """Start a student's process in which no cell has run."""
        self.process = self.start()
        self.walls = self.process.walls
        self.remote = Remote(self.process.channel, self.errors)
        self.remote.beats = self._wait_for_beat
        self.silent = False
        self.unread, self.beat = bytearray(), 0

    def _stop_student(self) -> None:
        self._collect_signs()
        if self.process is not None:
            self.process.end()
            self._collect_signs()  # those that it reported until its end
            os.close(self.process.signs)
            self.process.channel.close()
            self.process = self.remote = None

    def _collect_signs(self) -> None:
        """Read what the student's process reported of itself; it can add to this and not take away."""
        if self.process is not None:
            self._read_signs(self.process.signs, self.unread)

    def _wait_for_beat(self, number: int) -> None:
        """Wait for the watch in the student's process to say that it was whole when a request was answered.

        It wrote so before it answered, so it is here already, unless somebody closed the pipe or took its place.
        """
        self._collect_signs()
        if self.beat < number and not self.silent:
            self.silent = True
            detail = "the watch over its process fell silent: its pipe was closed, or something took its place"
            self.signs.append(Sign(self.current, "watch ended", detail, self.current))

    def _read_signs(self, descriptor: int, unread: bytearray) -> None:
        with contextlib.suppress(OSError):
            while select.select([descriptor], [], [], 0)[0] and len(unread) < 1_000_000:
                piece = os.read(descriptor, 65536)
                if not piece:
                    break
                unread += piece
        *lines, rest = bytes(unread).split(b"\n")
        unread[:] = rest
        for line in lines[:5000]:
            try:
                fields = json.loads(line)
                if "beat" in fields:
                    self.beat = fields["beat"] if type(fields["beat"]) is int else self.beat
                    continue
                sign = Sign(*(str(fields[name])[:300] for name in Sign._fields))
            except (ValueError, KeyError, TypeError, RecursionError):
                sign = Sign(self.current, "protocol", "unreadable sign", self.current)
            if not sign.cell:  # of a process that ran a text for this cell's tests
                sign = sign._replace(cell=self.current, during=self.current)
            if sign not in self.signs:
                self.signs.append(sign)

    def _restart(self) -> None:
        """Start again after a cell that hung or died: run the cells before it, without it."""
        self.restarts += 1
        self._replay()

    def _replay(self) -> None:
        """Run the same cells in a new student's process.

        Cells that tampered with the process are left out: they have lost their points, and may have broken it.
        """
        while True:
            self._stop_student()
            guilty = {sign.cell for sign in self.signs}
            self.ran = [step for step in self.ran if step.name not in guilty]
            if self.restarts > MAX_RESTARTS or self._out_of_time:
                return
            self._start_student()
            try:
                for step in self.ran:
                    self._run_there(step)
                return
            except Gone:
                # The cell went well before. It does not now, so it is left out and counts as a restart.
                self.ran.remove(step)
                self.restarts += 1

    def _run_there(self, step: Step) -> dict:
        """Run a cell in the student's process; returns its answer."""
        if self.remote is None:
            raise Gone("killed")
        self.remote.within(self._left())
        return self.remote.ask({"op": "run", "cell": step.name, "source": step.source})[0]

    def _run(self, step: Step) -> None:
        """Run a cell of the student's and keep what it shows."""
        if self._out_of_time:
            message = f"not run: the submission has used the {self.job.total:.0f} s that it may take in all"
            step.cell.outputs = [error_output("NotRun", message)]
            return
        if self.remote is None:
            step.cell.outputs = [error_output("NotRun", "not run: too many cells before it hung or died")]
            return
        began, self.current = time.perf_counter(), step.name
        try:
            reply = self._run_there(step)
            self.shown.pop(step.name, None)  # a cell that runs again shows its outputs in place of the old ones
            outputs = clean_outputs(reply.get("outputs"), MAX_NOTEBOOK - sum(self.shown.values()))
            self.shown[step.name] = output_size(outputs)
            if self.silent:
                self._restart()
            elif resource := reply.get("exhausted"):
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
        self.cell_seconds += time.perf_counter() - began
        step.cell.outputs = [nbformat.from_dict(output) for output in outputs]

    def _why_gone(self, gone: Gone, step: Step) -> str:
        """Say why the student's process is gone; a broken protocol is flagged."""
        if gone.kind == "protocol":
            self._flag(step.question, "protocol", gone.detail)
        if gone.kind == "timeout" and self._out_of_time:
            return f"was ended: the submission has used the {self.job.total:.0f} s that it may take in all."
        return _WHY_GONE[gone.kind].format(timeout=self.timeout)

    # ---- tests -----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Get this process ready for hidden checks: runners of student's text stay behind the walls."""
        for table, make in ((RUNNERS, self._runner_behind_walls), (BESIDE, self._beside_answers)):
            for module, names in table.items():
                with contextlib.suppress(ImportError):
                    owner = __import__(module, fromlist=["*"])
                    for name in names:
                        before, after = getattr(owner, name), make(module, name)
                        setattr(owner, name, after)
                        self.base.update({key: after for key, value in self.base.items() if value is before})
        draw_for(self.job.submission)
        seed = int.from_bytes(os.urandom(6), "little")  # the student's process has the state of the setup cell
        torch.manual_seed(seed)
        random.seed(seed)
        with contextlib.suppress(ImportError):
            import numpy

            numpy.random.seed(seed % 2**32)
        os.chdir(self.folder)
        sys.addaudithook(self._refuse)

    def _refuse(self, event: str, args: tuple) -> None:
        """Refuse to run a student's text here, or to start a process with it; such a check goes inside."""
        if not self.testing:
            return
        if event == "compile" and self.student_texts and args[1] != "<unknown>":  # ast.parse, which runs nothing
            text = args[0].decode(errors="replace") if isinstance(args[0], bytes) else args[0]
            if isinstance(text, str) and any(own in text for own in self.student_texts):
                raise CannotTravel("the check runs a student's text itself")
        elif event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"):
            raise CannotTravel(f"the check starts a process ({event})")

    def _runner_behind_walls(self, module: str, name: str) -> Callable:
        """A function that runs one of the `RUNNERS` in a student's process where no cell of theirs has run.

        Each test cell gets a process of its own for that.
        """

        def run(*args, **kwargs):
            clean = self._clean_remote(module)
            self.gpu_work += name in ON_GPU
            clean.within(max(self.remote.deadline - time.monotonic(), 1.0) if self.remote else self.timeout)
            reply, _ = clean.ask({"op": "runner", "module": module, "name": name})
            if reply["op"] != "ready":
                raise Gone("protocol", "no runner")
            return clean.call(reply["target"], args, kwargs)

        run.__name__ = name
        return run

    def _beside_answers(self, module: str, name: str) -> Callable:
        """A function of `BESIDE`, run in the student's process."""
        function = getattr(sys.modules[module], name)

        def run(*args):
            if self.remote is None:
                raise Gone("killed")
            return self.remote.run(function, *args)

        run.__name__ = name
        return run

    def _clean_remote(self, module: str) -> Remote:
        interpreted = module in INTERPRETED
        if interpreted not in self.clean:
            process = self.start(clean=True, interpreting=interpreted)
            self.clean[interpreted] = process, Remote(process.channel)
        return self.clean[interpreted][1]

    def _end_clean(self) -> None:
        """End the processes that ran a student's text for a test cell, and keep the signs that they reported."""
        while self.clean:
            process, _ = self.clean.popitem()[1]
            process.end()
            self._read_signs(process.signs, bytearray())
            os.close(process.signs)
            process.channel.close()

    def _test(self, step: Step) -> None:
        """Run a test cell and give its points."""
        began, self.current, self.file_texts = time.perf_counter(), step.name, {}
        work = self._gpu_work()
        to_look_at()  # of the test before, which did not pass
        status, message, shown = self._verdict(step)
        on_gpu = self._gpu_work() > work
        self._make_room()
        self._collect_signs()
        seconds = time.perf_counter() - began
        self.cell_seconds += seconds
        if status != "passed" and step.question in self.fates:
            status, message = self.fates[step.question]
        if status == "passed":
            self._read_answer(step)
        points = step.points if status == "passed" else 0.0
        self.cells[step.name] = CellResult(points, step.points, status, message, seconds, on_gpu)
        outputs = [nbformat.v4.new_output("stream", name="stdout", text=shown)] if shown else []
        if status != "passed":
            kind = {"failed": "WrongAnswer", "timeout": "Timeout", "killed": "DeadKernel"}.get(status, "Error")
            outputs.append(error_output(kind, message))
        step.cell.outputs = [nbformat.from_dict(output) for output in outputs]

    def _gpu_work(self) -> int:
        """A number that grows when a test's tensors are on a GPU, or when it has a kernel run there."""
        allocated = torch.cuda.memory_stats() if torch.cuda.is_initialized() else {}
        return self.gpu_work + allocated.get("allocation.all.allocated", 0)

    def _make_room(self) -> None:
        """Restart if the student's functions filled the memory as they were tested: later questions need it."""
        if self.remote is None:
            return
        try:
            self.remote.within(self._left())
            full = bool(self.remote.ask({"op": "room"})[0].get("exhausted")) or self.silent
        except Gone:
            full = True
        if full:
            self._restart()

    def _verdict(self, step: Step) -> tuple[str, str, str]:
        """(status, message, what is shown) of a test cell."""
        if self.remote is None:
            return "killed", "Not graded: too many cells before it hung or died.", ""
        if self._out_of_time:
            return (
                "timeout",
                f"Not graded: the submission has used the {self.job.total:.0f} s that it may take in all.",
                "",
            )
        mode = self.modes.get(step.name, "auto")
        title = question_title(step.question)
        try:
            self.remote.within(self._left())
            if mode == "inside":
                return self._test_inside(self.remote, step)
            try:
                return self._test_at_distance(self.remote, step)
            except CannotTravel as reason:
                if mode == "distance":
                    return "error", f"the check of {title} cannot run on this answer: {reason}", ""
                self.why[step.name] = str(reason)
                return self._test_inside(self.remote, step)
        except Gone as gone:
            why = self._why_gone(gone, step)
            self._restart()
            return "timeout" if gone.kind == "timeout" else "killed", f"{title}: your code {why}", ""

    def _test_at_distance(self, remote: Remote, step: Step) -> tuple[str, str, str]:
        """Run a check in this process, on proxies of the student's functions."""
        names = {**self.base, "__name__": "__main__"}
        names.update(remote.get(step.name, step.needs.names))
        self._fetch_files(remote, step)
        shown, error = io.StringIO(), None
        self.testing = True
        remote.watch_all, remote.prove = step.name in self.job.watching, step.name in self.job.proving
        try:
            with (
                contextlib.redirect_stdout(shown),
                contextlib.redirect_stderr(io.StringIO()),
                self._alarm(self._left() + 5),
            ):
                for source, file in self._sources(step):
                    exec(compile(source, file, "exec"), names)
            if remote.watch_all:
                _for_question(step, remote.expect_rules_kept)
            if remote.prove:
                _for_question(step, lambda: self._prove(remote, step))
        except (Gone, CannotTravel):
            raise
        except BaseException as raised:
            error = raised
        finally:
            self.testing = remote.watch_all = remote.prove = False
            self._end_clean()
            if remote.ledger:
                self.watching.add(step.name)
            if why := remote.contradiction():
                self._flag(step.question, "switches off the watch", why)
        text = "".join(remote.shown)[:MAX_SHOWN] + shown.getvalue()[:MAX_SHOWN]
        if error is None:
            if remote.ledger and any(watch.rules for _, watch in remote.watches):
                self.forbidding.add(step.name)
                self._read_record(step, remote)
            return "passed", "", text
        return (*explain(error), text)

    def _prove(self, remote: Remote, step: Step) -> None:
        """Have the records of calls run again, in a process in which no cell of the student's has run."""

        def clean() -> Remote:
            found = self._clean_remote("")
            found.within(max(remote.deadline - time.monotonic(), 1.0))
            return found

        refuted, partly = remote.expect_proved(clean)
        known = self.job.proving[step.name]  # how far the model answer's record could be proved
        if refuted:
            self._flag(step.question, "not proved", refuted)
        else:
            self.proving[step.name] = "in part" if partly else "whole"
        if partly and known == "whole":
            self._flag(step.question, "proved in part", partly)

    def _sources(self, step: Step) -> list[tuple[str, str]]:
        """[(source, file name)] of a test cell, and before it the definitions that it needs."""
        pieces = [(text, f"<definitions of {step.name}>") for text in step.needs.definitions]
        return [*pieces, (python_of(step.source) or "", f"<tests of {step.name}>")]

    @contextlib.contextmanager
    def _alarm(self, seconds: float) -> Iterator[None]:
        """End what never returns on this side."""

        def late(number, frame):
            raise Gone("timeout")

        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, seconds, 1)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _fetch_files(self, remote: Remote, step: Step) -> None:
        """Put files that are answers into the folder of the test, as data."""
        self.student_texts = []
        self.file_texts = {}
        for name in step.needs.files:
            reply, blobs = remote.ask({"op": "file", "name": name})
            path = Path(self.folder, os.path.basename(name))
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            if reply.get("exists") is True and len(blobs) == 1:
                path.write_bytes(blobs[0])
                self.file_texts[name] = blobs[0].decode(errors="replace")
                self.student_texts.append(self.file_texts[name])
        self.student_texts = [text for text in self.student_texts if text.strip()]

    def _test_inside(self, remote: Remote, step: Step) -> tuple[str, str, str]:
        """Run a check of live objects in a fork of the student's process, and again on corrupted answers.

        Only the cell's own source goes there: no module of hidden checks can be imported.
        """
        control = step.name not in self.job.no_control and bool(step.needs.names or step.needs.files)
        message = {
            "op": "inside",
            "cell": step.name,
            "names": step.needs.names,
            "files": step.needs.files,
            "sources": self._sources(step),
            "corrupt": [False, True] if control else [False],
            "fork": not self.job.gpu,
        }
        self.modes[step.name] = "inside"
        title = question_title(step.question)
        try:
            verdict, *controls = self._verdicts_inside(remote, message)
            if verdict is None:
                return "killed", f"{title}: your code {_WHY_GONE['killed']}", ""
            passed, shown = verdict["passed"] is True, str(verdict["shown"])[:MAX_SHOWN]
            if not passed:
                return (*explain(error_with_lines(verdict["error"], self.errors)), shown)
            if controls and (controls[0] or {}).get("passed") is True:
                self._flag(step.question, "patched", "the check accepts answers that were corrupted on purpose")
                return "flagged", f"{title}: the check was tampered with.", ""
            return "passed", "", shown
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Gone("protocol", str(error)[:300]) from None

    def _verdicts_inside(self, remote: Remote, message: dict) -> list:
        """The verdict on the answers, and with a control the one on corrupted answers.

        With a GPU, whose state a fork does not have, each verdict is made in the student's process itself, and that
        process is replaced after it.
        """
        if message["fork"]:
            return remote.ask(message)[0]["verdicts"]
        verdicts: list = []
        for corrupt in message["corrupt"]:
            remote.within(self._left())
            verdicts += remote.ask({**message, "corrupt": [corrupt]})[0]["verdicts"]
            self._replay()
            if self.remote is None or (verdicts[0] or {}).get("passed") is not True:
                break
            remote = self.remote
        return verdicts

    def _show_as_submitted(self, step: Step) -> None:
        """Keep the tables and plots that came along, for whoever grades the answers in words; and say so."""
        shown = clean_outputs(step.submitted, MAX_NOTEBOOK - sum(self.shown.values()))
        self.shown[step.name] = output_size(shown)
        if shown:
            note = {"output_type": "stream", "name": "stdout", "text": "[not run when graded; as submitted]\n"}
            step.cell.outputs = [nbformat.from_dict(output) for output in (note, *shown[:50])]

    # ---- by hand, and flags ------------------------------------------------------------------------------------

    def _wait_for_person(self, step: Step) -> None:
        empty = step.untouched and step.answer
        status, message = ("missing", "The answer is empty.") if empty else ("by_hand", "")
        self.cells[step.name] = CellResult(0.0, step.points, status, message, 0.0)

    def _flag(self, question: str, kind: str, detail: str) -> None:
        flag, alike = Flag(question, kind, detail), sum(f.question == question and f.kind == kind for f in self.flags)
        if flag in self.flags or alike > MAX_ALIKE or len(self.flags) > MAX_FLAGS:
            return
        self.flags.append(flag if alike < MAX_ALIKE else Flag(question, kind, "and more of the same kind"))

    def _flag_signs(self, steps: list[Step]) -> None:
        """Flag the question whose code tampered, and the one that was tested meanwhile."""
        owner = {step.name: step.question for step in steps}
        of_lab = {step.name for step in steps if step.untouched and not step.answer}
        for sign in self.signs:
            if sign.kind == "hides its code" and sign.cell in of_lab:
                continue  # torch.compile makes code objects in a cell that the lab wrote: lab 2, 5.3
            question = owner.get(sign.cell) or question_of(sign.cell)
            self._flag(question, sign.kind, sign.detail)
            if sign.during != sign.cell and sign.during in self.cells:
                self._flag(question_of(sign.during), sign.kind, f"in code of {question}: {sign.detail}")

    def _take_points_of_flagged(self) -> None:
        """Tampering costs the points of its question; a changed structure alone costs none."""
        guilty = {flag.question for flag in self.flags if flag.kind not in NOTED}
        for name, cell in self.cells.items():
            question = question_of(name)
            if question in guilty and cell.status in ("passed", "failed", "error"):
                kinds = sorted({flag.kind for flag in self.flags if flag.question == question} - set(NOTED))
                message = f"{question_title(question)}: no points, because of what the code does: {', '.join(kinds)}."
                self.cells[name] = CellResult(0.0, cell.max_points, "flagged", message, cell.seconds, cell.on_gpu)

    # ---- what is unusual --------------------------------------------------------------------------------------

    def _read_record(self, step: Step, remote: Remote) -> None:
        """Note operators that right answers to a question that forbids something do not run."""
        more = OPERATORS.get(self.job.lab, {})
        known = {*more.get("", "").split(), *more.get(step.name, "").split()}
        most = MOST_OPERATORS.get(self.job.lab, {}).get(step.name)
        numbers = None if step.name in READING_ONE_BY_ONE.get(self.job.lab, ()) else MOST_NUMBERS
        watches = (watch for _, watch in remote.ledger)
        narrow = NARROW_OPERATORS.get(self.job.lab, {}).get(step.name)
        self.unusual.setdefault(step.name, []).extend(unusual_calls(watches, known, most, numbers, narrow))

    def _read_answer(self, step: Step) -> None:
        """Note what the text of an answer that passed reaches for, beside what right answers need."""
        found = self.unusual.setdefault(step.name, [])
        found += to_look_at()
        if self.reading is not None:
            found += self.reading.unusual(step, strict=step.name in self.forbidding)
        for name, text in self.file_texts.items():
            found += unusual_file(text, self.usual, step.question) if name.endswith(".py") else []

    def _let_unusual_wait(self, steps: list[Step]) -> None:
        """Let a person look at an answer that passed in an unusual way, before it gets its points."""
        for step in steps:
            found, cell = self.unusual.get(step.name), self.cells.get(step.name)
            if found and cell is not None and cell.status == "passed":
                words = "; it ".join(dict.fromkeys(found))
                self._flag(
                    step.question,
                    UNUSUAL,
                    f"{step.name}: the values are right, and the way is unusual: it {words}. Please look.",
                )
                message = (
                    f"{question_title(step.question)}: the values are right. The way is unusual, so a person looks at it before "
                    f"it gets its points: it {words}."
                )
                self.cells[step.name] = CellResult(0.0, cell.max_points, "flagged", message, cell.seconds, cell.on_gpu)
                step.cell.outputs.append(nbformat.v4.new_output("stream", name="stdout", text=message))


def _for_question(step: Step, expect: Callable[[], None]) -> None:
    """Call a function that asserts something; its words then name the question, as those of a check do."""
    try:
        expect()
    except AssertionError as error:
        raise AssertionError(f"{question_title(step.question)}: {error}") from None
