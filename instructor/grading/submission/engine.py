"""Grade one submission after the other on this machine, each in forks of a warm process.

`grade_notebook` is the whole interface; `instructor.grading.class_.cluster` calls it in many worker processes.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path

import nbformat

from instructor.build import ROOT, Built
from instructor.course import answered_notebook
from instructor.grading.sandbox import walls
from instructor.grading.submission.plan import not_graded
from instructor.grading.submission.results import GradingError, Job, SubmissionResult, WarmUp, how_it_ended
from instructor.grading.wire.channel import Channel, Closed, TooLate
from utils.files import write_whole

# The variables that a student's process inherits from the grader's environment. None holds a token or a key.
KEPT = (
    *("LANG", "LC_ALL", "TZ", "PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "XPU_DEVICE"),
    *("TRITON_PTXAS_PATH", "PYTHONDONTWRITEBYTECODE"),
)
# What decides a grade, beside the lab and its hidden checks.
FOLDERS = ("utils", "instructor/grading/sandbox", "instructor/grading/submission", "instructor/grading/wire")
LIBRARIES = ("torch", "triton", "transformers", "numpy", "pandas", "nbformat", "ipython")
WARM_SECONDS = 600.0  # limit for the start of a warm process
CALIBRATION_SECONDS = 3600.0  # limit for grading the model answers once
CALIBRATION_CELL = 300.0  # limit for one cell of them, or the tests of one question
MIN_TOTAL = 120.0  # seconds that every submission may take in all
GRACE = 120.0  # seconds in addition, for starting, reading and writing


# ---- warm processes ----------------------------------------------------------------------------------------------


class Zygote:
    """A warm process for one lab: it has imported the libraries and run the lab's setup."""

    def __init__(self, built: Built, limits: walls.Limits):
        ours, theirs = socket.socketpair()
        self.folder = tempfile.TemporaryDirectory(prefix="grading-")
        # Behind the walls no symbolic link can be followed, and a library's file needs the same name on both sides.
        # So Python is called by the real path of its folder.
        python = str(Path(sys.executable).parent.resolve() / Path(sys.executable).name)
        # A file, since a pipe that nobody reads would block whoever writes.
        self.stderr = Path(self.folder.name, "stderr")
        self.process = subprocess.Popen(
            [python, "-m", "instructor.grading.submission.zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=self._environment(limits),
            cwd=self.folder.name,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.stderr.open("wb"),
            start_new_session=True,
        )
        theirs.close()
        self.channel = Channel(ours)
        try:
            self.channel.send({"op": "warm up"}, [pickle.dumps(WarmUp(built.name, setup_cells(built), limits))])
            self.channel.receive(time.monotonic() + WARM_SECONDS)
        except (Closed, TooLate):
            words = self._last_words()
            self.close()
            raise GradingError(f"the warm process for {built.name} did not start:\n{words}") from None

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
        }
        if limits.device:
            environment["CUDA_VISIBLE_DEVICES"] = limits.device
        if limits.gpu:
            environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch looks for a GPU without starting CUDA
        else:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        return environment

    def grade(self, job: Job, seconds: float) -> SubmissionResult:
        """Grade one submission in forks of the warm process."""
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        try:
            socket.send_fds(self.channel.sock, [b"g"], [theirs.fileno()])
            theirs.close()
            deadline = time.monotonic() + seconds
            channel.send({"op": "grade"}, [pickle.dumps(job)], deadline)
            answer, blobs = channel.receive(deadline)
        except TooLate:
            why = f"the submission took longer than the {seconds:.0f} s that it may take in all"
            return not_graded(job.built, job.student, "not graded", why)  # it would take as long a second time
        except (OSError, Closed):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            code = self.process.poll()
            why = f"the warm process for it {'lives, and closed the channel' if code is None else how_it_ended(code)}"
            raise GradingError(f"{job.student} was not graded: {why}.\n{self._last_words()}") from None
        finally:
            channel.close()
        if answer["op"] != "graded":
            raise GradingError(f"{job.student} was not graded: {answer.get('why', '')}.\n{self._last_words()}")
        return SubmissionResult.from_json(json.loads(blobs[0]))

    def _last_words(self) -> str:
        """What the warm process and its forks wrote last, such as where a library crashed."""
        return self.stderr.read_text(errors="replace")[-2000:]

    def close(self) -> None:
        """End the warm process and everything below it."""
        self.channel.close()
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


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


def zygote(built: Built, limits: walls.Limits) -> Zygote:
    """This thread's warm process for a lab, started on first use."""
    key = f"{built.name} {hashlib.sha256(built.instructor.encode()).hexdigest()} {limits} {threading.get_ident()}"
    running = _zygotes.get(key)
    if running is None or running.process.poll() is not None:
        running = _zygotes[key] = Zygote(built, limits)
    return running


@atexit.register
def close_all() -> None:
    """End all warm processes of this process."""
    while _zygotes:
        _zygotes.popitem()[1].close()


# ---- calibration -------------------------------------------------------------------------------------------------


def calibrate(built: Built, limits: walls.Limits | None = None) -> SubmissionResult:
    """Grade the model answers: they have to get every point, and tell how long a submission takes.

    `GradingError` names the ones that do not. The result is kept in `build/grading`, and holds until something changes
    that decides a grade (`fingerprint`).
    """
    limits = limits or walls.Limits()
    if (path := calibration_path(built, limits)).is_file():
        return SubmissionResult.from_json(json.loads(path.read_text(encoding="utf-8")))
    answers = answered_notebook(built).encode()
    job = Job(built, "model answers", answers, CALIBRATION_CELL, CALIBRATION_SECONDS)
    result = zygote(built, limits).grade(job, CALIBRATION_SECONDS)
    wrong = {name: cell for name, cell in result.cells.items() if cell.status not in ("passed", "by_hand")}
    if wrong:
        words = "\n".join(f"  {name}: {cell.message}" for name, cell in wrong.items())
        raise GradingError(f"the model answers of {built.name} do not pass on this machine:\n{words}")
    write_whole(path, json.dumps(asdict(result), indent=1))
    return result


def calibration_path(built: Built, limits: walls.Limits) -> Path:
    """Where the result of a lab's model answers is kept, once they were graded."""
    kind = "-gpu" if limits.gpu else ""
    return ROOT / "build" / "grading" / f"{built.name}-{fingerprint(built)}{kind}.json"


def fingerprint(built: Built) -> str:
    """A hash of all that decides a grade of a lab: the lab, its hidden checks, the course's package, the checker, and the libraries.

    The whole package counts and not only what the lab imports: a run more after a change costs a minute, and a grade by
    checks of before costs trust. What only a submission imports is not part of it.
    """
    return hashlib.sha256(f"{_sources(built.name)}{built.instructor}".encode()).hexdigest()[:16]


@functools.cache
def _sources(lab: str) -> str:
    """A hash of the files and versions that this process was started with."""
    checks = ROOT / "instructor" / "checks"
    files = [*checks.glob("*.py"), *(checks / lab).rglob("*.py")]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    versions = [found.version for name in LIBRARIES for found in distributions(name=name)]
    digest = hashlib.sha256(f"{sys.version} {versions}".encode())
    for path in sorted(files):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


# ---- grading -----------------------------------------------------------------------------------------------------


def grade_notebook(
    built: Built,
    notebook: str | bytes,
    *,
    timeout: float = 60,
    student: str = "student",
    limits: walls.Limits | None = None,
) -> SubmissionResult:
    """Grade one submission, isolated; `timeout` is in seconds for one cell, and for the tests of one question."""
    limits = limits or walls.Limits()
    calibration = calibrate(built, limits)
    data = notebook.encode("utf-8", errors="surrogatepass") if isinstance(notebook, str) else notebook
    total = total_seconds(calibration.seconds, timeout)
    job = Job(built, student, data, timeout, total)
    return zygote(built, limits).grade(job, total + GRACE)


def total_seconds(model_seconds: float, timeout: float) -> float:
    """Seconds that one submission may take in all: ten times the model answers, and some cells that run into the limit."""
    return max(MIN_TOTAL, 10 * model_seconds) + 4 * timeout
