"""Grade a class in worker processes: on this machine by default, or on a Dask cluster at an address.

In both cases `dask.distributed` gives submissions to workers, and each worker keeps a warm process for the lab
(`engine`). When a worker dies, another one grades its submission again, twice at most; then the submission is flagged.
Results come back as JSON text. They are checked, and one process, this one, writes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from instructor.build import Built
from instructor.course import Course
from instructor.grading.class_ import gradebook
from instructor.grading.class_.intake import Submission
from instructor.grading.sandbox.walls import Limits
from instructor.grading.submission import sources
from instructor.grading.submission.engine import (
    calibrate,
    close_all,
    grade_notebook,
    is_warm,
    known_calibration,
    unreadable,
    zygote,
)
from instructor.grading.submission.plan import question_of
from instructor.grading.submission.results import Flag, GradingError, SubmissionResult
from instructor.grading.submission.sources import fingerprint

Progress = Callable[[str, int, int], None]  # (student, how many are done, of how many)

RETRIES = 2  # of a submission whose worker died, or whose checker failed
BATCH = 8  # results merged into the gradebook at a time
ARRIVE = 10.0  # seconds that workers have to register with a scheduler
ABSENT = 60.0  # seconds without any worker after which a run ends
SCATTER = 50  # submissions from which on the lab is sent to each worker once, and not with every submission


@dataclass
class Summary:
    """What a run of `labs grade` did."""

    graded: list[SubmissionResult] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)  # graded before from the same files
    failed: dict[str, str] = field(default_factory=dict)  # student -> why there is no grade
    seconds: float = 0.0

    @property
    def flagged(self) -> list[SubmissionResult]:
        """The results that a person should look at."""
        return [result for result in self.graded if result.flags]


# ---- what runs in a worker ---------------------------------------------------------------------------------------


def grade_one(built: Built, data: bytes, student: str, timeout: float, limits: Limits) -> str:
    """Grade one submission; returns the result as JSON."""
    return json.dumps(grade_notebook(built, data, timeout=timeout, student=student, limits=limits).as_json())


def calibrate_one(built: Built, limits: Limits) -> None:
    """Find out how the lab is graded on the worker's kind of machine."""
    if limits.gpu:
        gpus()
    calibrate(built, limits)


def warm_one(built: Built, limits: Limits) -> None:
    """Start the worker's warm process."""
    zygote(built, limits)


def sources_of(built: Built) -> str:
    """The fingerprint of the sources that the worker has."""
    return sources.fingerprint(built)


# ---- workers -----------------------------------------------------------------------------------------------------


def gpus() -> list[str]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them; `GradingError` if there is none."""
    import torch

    from utils.machine.device import cuda_support

    support = cuda_support()
    if not support:
        raise GradingError(
            f"--gpu needs an NVIDIA GPU, and on {platform.node()} {support.reason} Leave --gpu out to grade on the "
            "CPU, or name a scheduler whose workers have GPUs: --scheduler tcp://host:8786."
        )
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named or [str(index) for index in range(torch.cuda.device_count())]


def one_gpu_each(client, devices: Sequence[str]) -> None:
    """Give each worker of this machine the GPU of its number; a worker that replaces another gets the same GPU."""
    from distributed import WorkerPlugin

    class OneGPU(WorkerPlugin):
        def setup(self, worker) -> None:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(worker.name)]

    client.register_plugin(OneGPU())


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT while workers start, so that only this process gets Ctrl-C and can end the others in good order.

    A terminal sends Ctrl-C to all processes of a command. A Ctrl-C during that time is delivered afterwards.
    """
    from multiprocessing import resource_tracker

    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # first, since it unblocks SIGINT when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def connect(scheduler: str | None, jobs: int, built: Built, gpu: bool = False) -> Iterator:
    """Connect to the Dask cluster at an address, or start `jobs` worker processes here; yields a client.

    `GradingError` if that cluster does not answer, or has no workers that can grade this lab.
    """
    import dask
    from distributed import Client, LocalCluster

    if scheduler is not None:
        try:
            client = Client(scheduler, timeout="10s", set_as_default=False)
        except (OSError, ValueError, TimeoutError) as error:
            raise GradingError(f"no Dask scheduler answers at {scheduler}: {error}") from None
        with client:
            _expect_workers(client, scheduler, built, gpu)
            _limit_failures(client)
            yield client
        return
    settings = {
        "distributed.scheduler.allowed-failures": RETRIES,
        "distributed.worker.daemon": False,
        "distributed.logging.distributed": "error",
        "distributed.worker.memory.terminate": False,
    }
    with dask.config.set(settings), tempfile.TemporaryDirectory(prefix="labs-grade-") as folder:
        security = private_security(Path(folder))
        with _without_interrupts():
            cluster = LocalCluster(
                protocol="tls://",
                security=security,
                n_workers=jobs,
                threads_per_worker=1,
                processes=True,
                dashboard_address=None,
                memory_limit=None,
                resources={"GPU": 1} if gpu else None,
                silence_logs=50,
            )
        with cluster, Client(cluster, set_as_default=False) as client:
            yield client


def private_security(folder: Path):
    """Certificates, made for one run, by which the workers of this machine know each other and nobody else.

    A scheduler runs what it is sent, and a port of this machine is open to every user of it.
    """
    from distributed.security import Security

    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=labs-grade"]
    try:
        folder.chmod(0o700)
        subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
        key.chmod(0o600)
    except (OSError, subprocess.CalledProcessError) as error:
        raise GradingError(
            f"no certificate could be made for the workers of this machine ({error}): grading needs the command openssl, "
            "so that no other user of this machine can send work to them."
        ) from None
    pairs = {
        f"tls_{role}_{part}": str(path)
        for role in ("client", "worker", "scheduler")
        for part, path in (("cert", certificate), ("key", key))
    }
    return Security(tls_ca_file=str(certificate), require_encryption=True, **pairs)


def _suitable_workers(client, gpu: bool) -> dict[str, dict]:
    """{address: what the scheduler knows of it} of the workers that a submission can go to."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return {name: worker for name, worker in workers.items() if not gpu or worker["resources"].get("GPU", 0) >= 1}


def _expect_workers(client, scheduler: str, built: Built, gpu: bool) -> None:
    """`GradingError` if a cluster's workers cannot grade this lab: Dask would wait for others without end."""
    began = time.monotonic()
    while not (workers := _suitable_workers(client, gpu)):
        if time.monotonic() - began > ARRIVE:
            without_gpu = len(_suitable_workers(client, False))
            if gpu and without_gpu:
                raise GradingError(
                    f"--gpu needs workers with the resource GPU, and none of the {without_gpu} at {scheduler} has it: "
                    f"start one for each GPU with `dask worker {scheduler} --nworkers 1 --nthreads 1 --resources GPU=1`."
                )
            raise GradingError(
                f"the scheduler at {scheduler} has no workers: start some with `dask worker {scheduler} --nworkers 4 "
                "--nthreads 1`, or wait until they are there."
            )
        time.sleep(0.1)
    threads = {name: worker["nthreads"] for name, worker in workers.items() if worker["nthreads"] != 1}
    if threads:
        name, count = next(iter(threads.items()))
        raise GradingError(
            f"the worker {name} has {count} threads; each may have one, as it keeps one warm process: start workers "
            "with --nthreads 1, and more of them with --nworkers."
        )
    own = sources_of(built)
    for name, answer in client.run(sources_of, built, workers=list(workers), on_error="return").items():
        if isinstance(answer, Exception):
            raise GradingError(
                f"the worker {name} cannot grade ({type(answer).__name__}: {answer}): workers need this folder at "
                "the same path, and the same environment."
            )
        if answer != own:
            raise GradingError(
                f"the worker {name} has another version of the course than this machine: bring its folder up to date "
                "and start it again."
            )


def _limit_failures(client) -> None:
    """Have the scheduler give a submission up after `RETRIES` + 1 dead workers; its default is one more."""

    def limit(dask_scheduler) -> None:  # a local function: Dask sends its code, and the scheduler needs no module
        dask_scheduler.allowed_failures = retries

    retries = RETRIES
    client.run_on_scheduler(limit)


def _in_order_of_end(client, futures: Iterable, gpu: bool) -> Iterator:
    """Yield futures as they end; `GradingError` if there was no suitable worker for `ABSENT` seconds."""
    from queue import Empty, SimpleQueue

    ended: SimpleQueue = SimpleQueue()
    for future in futures:
        future.add_done_callback(ended.put)
    last_seen = time.monotonic()
    for _ in futures:
        while True:
            try:
                future = ended.get(timeout=min(5.0, ABSENT))
            except Empty:
                if _suitable_workers(client, gpu):
                    last_seen = time.monotonic()
                elif time.monotonic() - last_seen > ABSENT:
                    raise GradingError(
                        f"no worker is left since {ABSENT:.0f} s. What was graded is in the gradebook: start workers "
                        "and run the same command again to go on."
                    ) from None
                continue
            if future.cancelled():  # Dask cancels futures when a connection is lost, and nothing else does
                raise GradingError(
                    "the connection to the scheduler is lost. What was graded is in the gradebook: start it again, "
                    "and run the same command again to go on."
                )
            yield future
            last_seen = time.monotonic()
            break


# ---- a class -----------------------------------------------------------------------------------------------------


def grade_class(
    course: Course,
    built: Built,
    submissions: Sequence[Submission],
    *,
    jobs: int = 2,
    scheduler: str | None = None,
    timeout: float = 60,
    limits: Limits | None = None,
    again: bool = False,
    question: str | None = None,
    progress: Progress = lambda student, done, total: None,
) -> Summary:
    """Grade submissions and merge the results into the course's gradebook.

    Args:
        course: where the gradebook and the folders are.
        built: the lab.
        submissions: what to grade.
        jobs: worker processes here, if there is no scheduler.
        scheduler: the address of a Dask scheduler, `tcp://...`.
        timeout: seconds that a cell may take.
        limits: what a submission may use.
        again: grade also what was graded before from the same files.
        question: keep only this question's new result, `1.1` or `bonus 1.4`; the others stay as they were graded before.
        progress: is called with (student, done, total) after each submission.
    """
    began, limits = time.perf_counter(), limits or Limits()
    run = _ClassRun(course, built, timeout, limits, question, progress, len(submissions))
    gradebook.prepare(course, built)
    run.resume(submissions, again)
    try:
        if run.waiting:
            if known_calibration(built, limits) is None:
                progress("the model answers first, once for each version of the lab", run.done, run.total)
            with _calibrated_workers(built, limits, min(jobs, len(run.waiting)), scheduler) as workers:
                run.dispatch(workers, calibrate_there=limits.gpu or scheduler is None)
    finally:
        run.merge()  # also when interrupted: what is graded is kept
        run.summary.seconds = time.perf_counter() - began
    return run.summary


@contextmanager
def _calibrated_workers(built: Built, limits: Limits, jobs: int, scheduler: str | None):
    """Yield a Dask client whose workers can grade the lab, or whose first task has to be to calibrate it.

    Args:
        built: the lab.
        limits: what a submission may use.
        jobs: most worker processes here, if there is no scheduler.
        scheduler: the address of a Dask scheduler.
    """
    devices = gpus() if limits.gpu and scheduler is None else []
    with connect(scheduler, min(jobs, len(devices) or jobs), built, limits.gpu) as client:
        if devices:
            one_gpu_each(client, devices)
        if scheduler is not None and not limits.gpu:  # with a cluster's GPUs, this machine may have none
            _calibrate_here(built, limits)
        # On this machine one of the workers calibrates, and all of them warm up meanwhile.
        warming = _warm(client, built, limits) if scheduler is None else []
        try:
            yield client
        finally:
            warming.clear()


def _warm(client, built: Built, limits: Limits) -> list:
    """Have each worker start its warm process now; returns the futures, which Dask forgets when nobody holds them.

    A worker whose warm process does not start says so when it is asked to calibrate or to grade.
    """
    lab = replace(built, questions=[])
    workers = list(client.scheduler_info(n_workers=-1)["workers"])
    return [client.submit(warm_one, lab, limits, workers=[worker], pure=False) for worker in workers]


def _calibrate_here(built: Built, limits: Limits) -> None:
    """Calibrate here for the workers of a cluster, and learn early whether the lab itself is broken."""
    was_warm = is_warm(built, limits)
    calibrate(built, limits)
    if not was_warm:
        close_all()  # each worker starts a warm process of its own


@dataclass
class _ClassRun:
    """One run over a class: what waits to be graded, and what was graded so far."""

    course: Course
    built: Built
    timeout: float
    limits: Limits
    question: str | None
    progress: Progress
    total: int  # submissions
    done: int = 0
    waiting: dict[str, tuple[bytes, str]] = field(default_factory=dict)  # student -> (the file, the key of its record)
    unmerged: dict[str, SubmissionResult] = field(default_factory=dict)  # student -> a result to merge
    summary: Summary = field(default_factory=Summary)

    def resume(self, submissions: Sequence[Submission], again: bool) -> None:
        """Take over what was graded before from the same files; the other submissions wait."""
        basis = f"{fingerprint(self.built)} {self.timeout} {self.limits}".encode()
        for submission in submissions:
            student, data = submission.student, submission.path.read_bytes()
            key = hashlib.sha256(basis + b"\0" + data).hexdigest()
            record = gradebook.load_record(self.course, self.built.name, student, key)
            if record is None or again or self.question is not None:
                self.waiting[student] = (data, key)
            else:
                self.summary.graded.append(record)
                self.summary.resumed.append(student)
                self.unmerged[student] = record  # the gradebook may not have it after an interruption
        self.merge()
        self.done = len(self.summary.resumed)
        if self.done:
            self.progress(self.summary.resumed[-1], self.done, self.total)

    def dispatch(self, client, calibrate_there: bool) -> None:
        """Have the workers of a Dask client grade what waits, and keep the results as they come."""
        gpu = self.limits.gpu
        options = {"pure": False, "resources": {"GPU": 1} if gpu else None}
        lab = replace(self.built, questions=[])  # workers need the notebooks alone
        if calibrate_there:
            calibration = client.submit(calibrate_one, lab, self.limits, **options)
            next(_in_order_of_end(client, [calibration], gpu)).result()
        shared = client.scatter(lab, broadcast=False, hash=False) if len(self.waiting) > SCATTER else lab
        futures = {}
        for student, (data, key) in self.waiting.items():
            name = f"grade-{student}-{key[:12]}-{time.time_ns()}"
            arguments = (shared, data, student, self.timeout, self.limits)
            futures[client.submit(grade_one, *arguments, key=name, retries=RETRIES, **options)] = student
        for future in _in_order_of_end(client, futures, gpu):
            student = futures[future]
            try:
                result = SubmissionResult.from_json(json.loads(future.result()))
            except Exception as error:  # whatever happened to this submission, the others go on
                self._fail(student, f"not graded after {RETRIES + 1} attempts: {str(error).strip()[:500]}")
            else:
                self._keep(student, result)
            self.done += 1
            future.release()
            self.progress(student, self.done, self.total)

    def _keep(self, student: str, result: SubmissionResult) -> None:
        key = self.waiting[student][1]
        if self.question is not None:
            # Whatever changed since, the timeout, a check or the file: the other questions keep what they have.
            old = gradebook.load_record(self.course, self.built.name, student, None)
            result = _replace_question(self.question, result, old)
            if old is not None:
                key = gradebook.key_of_record(self.course, self.built.name, student) or key
        gradebook.save_record(self.course, result, key)
        self.summary.graded.append(result)
        self.unmerged[student] = result
        if len(self.unmerged) >= BATCH:
            self.merge()

    def _fail(self, student: str, why: str) -> None:
        self.summary.failed[student] = why
        result = replace(unreadable(self.built, why, student), flags=(Flag("", "not graded", why),))
        self.summary.graded.append(result)

    def merge(self) -> None:
        """Write the results that the gradebook does not have yet."""
        gradebook.merge(self.course, self.unmerged)
        self.unmerged = {}


def _replace_question(question: str, new: SubmissionResult, old: SubmissionResult | None) -> SubmissionResult:
    """The old result with one question's cells and flags from the new one."""
    if old is None:
        return new
    key = question_id(question)
    chosen = {**old.cells, **new.cells}  # a cell of another version of the lab may be in one of them only
    cells = {name: cell if question_of(name) == key else old.cells.get(name, cell) for name, cell in chosen.items()}
    flags = [f for f in old.flags if f.question != key] + [f for f in new.flags if f.question == key]
    return replace(new, cells=cells, flags=tuple(flags))


def question_id(question: str) -> str:
    """The id of a question that is written as `1.1`, `bonus 1.4` or `q1_1`."""
    text = question.strip().lower().replace(".", "_")
    if text.startswith("bonus"):
        return "bonus_" + text.removeprefix("bonus").strip(" _")
    return text if text.startswith("q") else f"q{text}"
