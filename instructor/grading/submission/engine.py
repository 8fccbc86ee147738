"""Grade one submission after the other on this machine, each in forks of a warm process.

`grade_notebook` is the whole interface; `instructor.grading.class_.cluster` calls it in many worker processes.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import nbformat

from instructor.build import ROOT, Built
from instructor.grading.sandbox import walls
from instructor.grading.submission.library import ANSWERS
from instructor.grading.submission.plan import plan_tests, question_of
from instructor.grading.submission.records import Calibration, Job, Report, WarmUp
from instructor.grading.submission.results import CellResult, Flag, GradingError, SubmissionResult
from instructor.grading.submission.sources import fingerprint
from instructor.grading.wire.channel import Channel, Closed, TooLate
from utils.files import write_whole

# The variables that a student's process inherits from the grader's environment. None holds a token or a key.
KEPT = (
    *("LANG", "LC_ALL", "TZ", "PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "XPU_DEVICE"),
    *("TRITON_PTXAS_PATH", "PYTHONDONTWRITEBYTECODE"),
)
COURSE = ("assets",)  # folders that students have next to their notebook
WARM_SECONDS = 600.0  # limit for the start of a warm process
CALIBRATION_SECONDS = 3600.0  # limit for grading the model answers once
CALIBRATION_ROUNDS = 4  # limit: each round finds checks that accept corrupted answers, or that no proof satisfies
TRIED = "tried"  # a proof is asked for, and it is not known yet how far it goes
MAX_FILE = 64 << 20  # bytes of a submission
MIN_TOTAL = 120.0  # seconds that every submission may take in all
GRACE = 120.0  # seconds in addition, for starting, reading and writing


# ---- warm processes ----------------------------------------------------------------------------------------------


class OutOfTime(GradingError):
    """A submission used up its time; to try it again would take as long."""


class Zygote:
    """A warm process for one lab: it has imported the libraries and run the lab's setup."""

    def __init__(self, built: Built, limits: walls.Limits):
        ours, theirs = socket.socketpair()
        self.folder = tempfile.TemporaryDirectory(prefix="grading-")
        # Behind the walls no symbolic link can be followed, and a library's file needs the same name on both sides.
        # So Python is called by the real path of its folder.
        python = str(Path(sys.executable).parent.resolve() / Path(sys.executable).name)
        self.process = subprocess.Popen(
            [python, "-m", "instructor.grading.submission.zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=self._environment(limits),
            cwd=self.folder.name,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        theirs.close()
        self.channel = Channel(ours)
        course = {name: str(ROOT / name) for name in COURSE if (ROOT / name).exists()}
        visible = [*walls.visible_paths(), str(ROOT / "utils"), *(str(ROOT / name) for name in COURSE)]
        answers = dict(ANSWERS.get(built.name, {}))
        warm_up = WarmUp(setup_cells(built), self.folder.name, visible, course, hidden_paths(), limits, answers)
        try:
            self.channel.send(warm_up.as_json())
            ready, _ = self.channel.receive(time.monotonic() + WARM_SECONDS)
        except (Closed, TooLate):
            self.process.kill()
            _, stderr = self.process.communicate()
            words = stderr.decode(errors="replace")[-2000:]
            raise GradingError(f"the warm process for {built.name} did not start:\n{words}") from None
        if ready["problems"]:
            self.close()
            raise GradingError(f"{built.name} cannot be graded: " + "; ".join(ready["problems"]))

    def _environment(self, limits: walls.Limits) -> dict[str, str]:
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        environment |= {
            # One thread, whatever the grader's environment says: a fork has none of its parent's, and waits for them for ever.
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONSAFEPATH": "1",
            "PYTHONHASHSEED": "0",
            "HOME": self.folder.name,
            "MPLBACKEND": "Agg",
            "HF_HUB_OFFLINE": "1",
            "LABS_COMPILE_CACHE": "off",  # a student's process could write a false result
        }
        if limits.gpu:
            environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch looks for a GPU without starting CUDA
        else:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        return environment

    def grade(self, job: Job, seconds: float) -> Report:
        """Grade one submission in forks of the warm process."""
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        try:
            socket.send_fds(self.channel.sock, [b"g"], [theirs.fileno()])
            theirs.close()
            deadline = time.monotonic() + seconds
            channel.send(*job.as_frame(), deadline=deadline)
            answer, blobs = channel.receive(deadline)
        except TooLate:
            raise OutOfTime(f"the submission took longer than the {seconds:.0f} s that it may take in all") from None
        except (OSError, Closed) as error:
            why = type(error).__name__
            raise GradingError(f"the checker of {job.student} ended without a result ({why})") from None
        finally:
            channel.close()
        if answer["op"] != "graded":
            raise GradingError(f"the checker of {job.student} failed:\n{answer.get('why', '')}")
        return Report.from_json(json.loads(blobs[0]))

    def close(self) -> None:
        """End the warm process and everything below it."""
        self.channel.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        self.folder.cleanup()


def hidden_paths() -> list[str]:
    """Paths that no student's process may see although a visible folder contains them.

    These are the instructor's files, and each copy of them that is installed next to the libraries.
    """
    paths = [ROOT / name for name in ("instructor", "tests", "build", "submitted")]
    libraries = [Path(entry) for entry in sys.path if entry]
    for prefix in map(Path, dict.fromkeys((sys.prefix, sys.base_prefix, sys.exec_prefix, "/usr", "/usr/local"))):
        libraries += [*prefix.glob("lib*/python3*/site-packages"), *prefix.glob("lib/python3*/dist-packages")]
    paths += [folder / "instructor" for folder in libraries if (folder / "instructor").is_dir()]
    return list(dict.fromkeys(name for path in paths for name in (str(path), os.path.realpath(path))))


def setup_cells(built: Built) -> list[tuple[str, str]]:
    """(id, source) of the code cells before the first answer, which are the same for every submission."""
    cells = []
    for cell in nbformat.reads(built.student, as_version=4).cells:
        if cell.metadata.get("nbgrader", {}).get("solution"):
            break
        if cell.cell_type == "code":
            cells.append((cell.id, cell.source))
    return cells


_zygotes: dict[str, Zygote] = {}


def _key(built: Built, limits: walls.Limits) -> str:
    return f"{built.name} {hashlib.sha256(built.instructor.encode()).hexdigest()} {limits}"


def is_warm(built: Built, limits: walls.Limits) -> bool:
    """True if this process has a warm process for the lab."""
    return _key(built, limits) in _zygotes


def zygote(built: Built, limits: walls.Limits) -> Zygote:
    """This process's warm process for a lab, started on first use."""
    key = _key(built, limits)
    running = _zygotes.get(key)
    if running is None or running.process.poll() is not None:
        running = _zygotes[key] = Zygote(built, limits)
    return running


@atexit.register
def close_all() -> None:
    """End all warm processes of this process."""
    while _zygotes:
        _zygotes.popitem()[1].close()


# ---- where each check can run ------------------------------------------------------------------------------------


_calibrations: dict[Path, Calibration] = {}


def calibrate(built: Built, limits: walls.Limits | None = None, timeout: float = 300) -> Calibration:
    """Grade the model answers, and so find out for each question where its check can run.

    The model answers have to get every point: `GradingError` names those that do not. The calibration is kept in
    `build/grading`, and holds until something changes that decides a grade (`sources.fingerprint`).

    Args:
        built: the lab.
        limits: what a submission may use.
        timeout: seconds that one cell, or the tests of one question, may take.
    """
    limits = limits or walls.Limits()
    known = known_calibration(built, limits)
    if known is None:
        path = _calibration_path(built, limits)
        known = _calibrations[path] = _calibrate(built, limits, timeout)
        write_whole(path, json.dumps(known.as_json(), indent=1))
    return known


def known_calibration(built: Built, limits: walls.Limits) -> Calibration | None:
    """The calibration of a lab if there is one; nothing is graded."""
    path = _calibration_path(built, limits)
    if path not in _calibrations and path.is_file():
        _calibrations[path] = Calibration.from_json(json.loads(path.read_text(encoding="utf-8")))
    return _calibrations.get(path)


def _calibration_path(built: Built, limits: walls.Limits) -> Path:
    kind = ("-gpu" if limits.gpu else "") + ("-proved" if limits.prove else "")
    return ROOT / "build" / "grading" / f"{built.name}-{fingerprint(built)}{kind}.json"


def _calibrate(built: Built, limits: walls.Limits, timeout: float) -> Calibration:
    from instructor.course import answered_notebook

    job = _job(built, answered_notebook(built).encode(), "model answers", timeout, limits.gpu)
    warm = zygote(built, limits)
    first = warm.grade(job, CALIBRATION_SECONDS)
    modes, why = _first_modes(first)
    watching = first.watching
    no_control: list[str] = []
    proving = dict.fromkeys(watching if limits.prove else [], TRIED)
    # A first try whose checks all ran at a distance and unwatched was a grading like any other: no second one is needed.
    report = None if watching or proving or "inside" in modes.values() else first
    for _ in range(CALIBRATION_ROUNDS):
        known = replace(job, modes=modes, no_control=no_control, watching=watching, proving=proving)
        report = report or warm.grade(known, CALIBRATION_SECONDS)
        wrong = {n: c for n, c in report.result.cells.items() if c.status not in ("passed", "by_hand")}
        # A proof that a right answer does not pass, or that takes long, is no use: the records have to do there.
        slow = {n for n in proving if report.result.cells[n].seconds > 4 * first.result.cells[n].seconds + 5}
        if not wrong and not slow:
            return Calibration(report.result, modes, why, watching, report.proving, no_control)
        lost = {n for n in proving if n in wrong or n in slow or question_of(n) in map(question_of, wrong)}
        proving = {name: how for name, how in proving.items() if name not in lost}
        # A right answer is flagged where the check accepts corrupted answers as well: there the control says nothing.
        no_control += [n for n, cell in wrong.items() if modes[n] == "inside" and cell.status == "flagged"]
        report = None
    # A check that runs inside cannot load the lab's hidden checks; why it had to run there says more.
    words = "\n".join(f"  {name}: {why.get(name) or cell.message}" for name, cell in wrong.items())
    raise GradingError(f"the model answers of {built.name} do not pass on this machine:\n{words}")


def _first_modes(report: Report) -> tuple[dict[str, str], dict[str, str]]:
    """(modes, why) after a first try: a check that fails on a model answer at a distance has to run inside."""
    cells = {name: cell for name, cell in report.result.cells.items() if cell.status != "by_hand"}
    modes, why = {name: report.modes.get(name, "distance") for name in cells}, dict(report.why)
    for name, cell in cells.items():
        if cell.status not in ("passed", "flagged") and modes[name] == "distance":
            modes[name], why[name] = "inside", cell.message
    return modes, why


# ---- grading -----------------------------------------------------------------------------------------------------

_plan_tests = functools.cache(plan_tests)


def _job(built: Built, submission: bytes, student: str, timeout: float, gpu: bool) -> Job:
    """A job whose checks try out where they can run."""
    return Job(
        lab=built.name,
        student=student,
        instructor_notebook=built.instructor,
        student_notebook=built.student,
        submission=submission,
        timeout=timeout,
        total=CALIBRATION_SECONDS,
        tests=_plan_tests(built.instructor),
        modes={},
        no_control=[],
        watching=[],
        proving={},
        gpu=gpu,
    )


def grade_notebook(
    built: Built,
    notebook: str | bytes | Path,
    *,
    timeout: float = 60,
    student: str = "student",
    limits: walls.Limits | None = None,
) -> SubmissionResult:
    """Grade one submission, isolated.

    Args:
        built: the lab.
        notebook: the submission, as text or as the bytes of its file, or the path of the file.
        timeout: seconds that one cell, or the tests of one question, may take.
        student: who handed it in.
        limits: what the submission may use.
    """
    if timeout <= 0:
        raise ValueError(f"timeout is {timeout} s; it should be more than 0.")
    limits = limits or walls.Limits()
    calibration = calibrate(built, limits)
    if isinstance(notebook, str):
        data = notebook.encode("utf-8", errors="surrogatepass")
    else:
        data = notebook.read_bytes() if isinstance(notebook, Path) else notebook
    if len(data) > MAX_FILE:
        why = f"The submitted file has {len(data) >> 20} MB; at most {MAX_FILE >> 20} are read."
        return replace(unreadable(built, why, student), flags=(Flag("", "unreadable", why),))
    job = _job(built, data, student, timeout, limits.gpu)
    job = replace(job, modes=calibration.modes, no_control=calibration.no_control, watching=calibration.watching)
    job = replace(job, proving=calibration.proving)
    total = total_seconds(calibration.result.cell_seconds, timeout)
    try:
        return zygote(built, limits).grade(replace(job, total=total), total + GRACE).result
    except OutOfTime as late:  # it would take as long a second time
        return replace(unreadable(built, str(late), student), flags=(Flag("", "not graded", str(late)),))


def total_seconds(model_seconds: float, timeout: float) -> float:
    """Seconds that one submission may take in all: ten times the model answers, and some cells that run into the limit."""
    return max(MIN_TOTAL, 10 * model_seconds) + 4 * timeout


def unreadable(built: Built, why: str, student: str) -> SubmissionResult:
    """The result of a submission that cannot be graded at all: no points, for the reason given."""
    cells = {}
    for cell in nbformat.reads(built.student, as_version=4).cells:
        metadata = cell.metadata.get("nbgrader", {})
        if "points" in metadata:
            cells[metadata["grade_id"]] = CellResult(0.0, float(metadata["points"]), "missing", why, 0.0)
    return SubmissionResult(student, built.name, cells, (), {}, built.student)
