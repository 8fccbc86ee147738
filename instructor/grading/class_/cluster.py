"""Grade a class by Dask's workers: threads of this process by default, or a cluster at an address.

In both cases `dask.distributed` gives submissions to workers, and each worker keeps a warm process for the lab
(`engine`). When a worker dies, another one grades its submission again, three times at most; then the submission is flagged.
One process, this one, writes the results.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from instructor.build import Built
from instructor.course import Course
from instructor.grading.class_ import gradebook
from instructor.grading.class_.intake import Submission
from instructor.grading.sandbox.walls import Limits
from instructor.grading.submission.engine import calibrate, calibration_path, close_all, fingerprint, grade_notebook
from instructor.grading.submission.plan import not_graded
from instructor.grading.submission.results import GradingError, SubmissionResult

Progress = Callable[[str, int, int], None]  # (student, how many are done, of how many)

RETRIES = 3  # of a submission whose checker failed; Dask's default for one whose worker died (allowed-failures)
ARRIVE = 10.0  # seconds that workers have to register with a scheduler
ABSENT = 60.0  # seconds without any worker after which a run ends
SCATTER = 50  # submissions from which on the lab is sent to each worker once, and not with every submission


# ---- what runs in a worker ---------------------------------------------------------------------------------------


def grade_one(
    built: Built, data: bytes, student: str, timeout: float, limits: Limits, devices: Sequence[str]
) -> SubmissionResult:
    """Grade one submission, on the worker's own one of the GPUs `devices` if there are any."""
    return grade_notebook(built, data, timeout=timeout, student=student, limits=_on_own_gpu(limits, devices))


def calibrate_one(built: Built, limits: Limits, devices: Sequence[str]) -> None:
    """Find out how the lab is graded on the worker's kind of machine."""
    if limits.gpu:
        gpus()
    calibrate(built, _on_own_gpu(limits, devices))


def _on_own_gpu(limits: Limits, devices: Sequence[str]) -> Limits:
    from distributed import get_worker

    return replace(limits, device=devices[int(get_worker().name)]) if devices else limits


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


@contextmanager
def connect(scheduler: str | None, jobs: int, built: Built, gpu: bool = False) -> Iterator:
    """Connect to the Dask cluster at an address, or start `jobs` workers in this process; yields a client.

    A worker hands submissions to its warm process and waits: what runs a student's code is behind the walls in any case. So
    the workers here are threads, to whom no other program can send work. `GradingError` if the cluster does not answer, or has no workers that
    can grade this lab.
    """
    from distributed import Client, LocalCluster

    warnings.filterwarnings("ignore", "Sending large graph")  # a notebook of 10 MB
    if scheduler is not None:
        try:
            client = Client(scheduler, timeout="10s", set_as_default=False)
        except (OSError, ValueError, TimeoutError) as error:
            raise GradingError(f"no Dask scheduler answers at {scheduler}: {error}") from None
        with client:
            _expect_workers(client, scheduler, built, gpu)
            yield client
        return
    cluster = LocalCluster(
        processes=False,
        n_workers=jobs,
        threads_per_worker=1,
        dashboard_address="127.0.0.1:0",
        worker_dashboard_address="127.0.0.1:0",
        memory_limit=None,
        resources={"GPU": 1} if gpu else None,
        silence_logs=50,
    )
    with cluster, Client(cluster, set_as_default=False) as client:
        try:
            yield client
        finally:
            close_all()  # ends what the threads wait for
            # Dask sends with a timer. Probably one that fires in the loop's last round leaves a TimeoutError to nobody.
            cluster.loop.asyncio_loop.set_exception_handler(lambda loop, context: None)


def _suitable_workers(client, gpu: bool) -> dict[str, dict]:
    """{address: what the scheduler knows of it} of the workers that a submission can go to."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return {name: worker for name, worker in workers.items() if not gpu or worker["resources"].get("GPU", 0) >= 1}


def _expect_workers(client, scheduler: str, built: Built, gpu: bool) -> None:
    """`GradingError` if a cluster's workers cannot grade this lab: Dask would wait for others without end."""
    began = time.monotonic()
    while not (workers := _suitable_workers(client, gpu)):
        if time.monotonic() - began > ARRIVE:
            others = len(_suitable_workers(client, False))
            lack = f"none of the {others} workers at {scheduler} has the resource GPU" if others else ""
            raise GradingError(
                f"{lack or f'the scheduler at {scheduler} has no workers'}: start some with `dask worker {scheduler} --nworkers "
                f"{'1' if gpu else '4'} --nthreads 1{' --resources GPU=1`, one for each GPU' if gpu else '`'}."
            )
        time.sleep(0.1)
    own = fingerprint(built)
    for name, answer in client.run(fingerprint, built, workers=list(workers), on_error="return").items():
        if (threads := workers[name]["nthreads"]) != 1:
            why = f"has {threads} threads, and keeps one warm process: start workers with --nthreads 1, more by --nworkers"
        elif isinstance(answer, Exception):
            why = f"cannot grade ({type(answer).__name__}: {answer}): it needs this folder at the same path, and this environment"
        elif answer != own:
            why = "has another version of the course than this machine: bring its folder up to date, and start it again"
        else:
            continue
        raise GradingError(f"the worker {name} {why}.")


def _in_order_of_end(client, futures: Iterable, gpu: bool) -> Iterator:
    """Yield futures as they end; `GradingError` if there was no suitable worker for `ABSENT` seconds."""
    kept = "What was graded is in the gradebook: start it, and run the same command again to go on."
    waiting, last_seen = set(futures), time.monotonic()
    while waiting:
        ended = {future for future in waiting if future.status != "pending"}
        if any(future.cancelled() for future in ended):  # Dask does, when a connection is lost, and nothing else
            raise GradingError(f"the connection to the scheduler is lost. {kept}")
        yield from ended
        waiting -= ended
        if ended or _suitable_workers(client, gpu):
            last_seen = time.monotonic()
        elif time.monotonic() - last_seen > ABSENT:
            raise GradingError(f"there is no worker since {ABSENT:.0f} s. {kept}")
        time.sleep(0.2)


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
    progress: Progress = lambda student, done, total: None,
) -> ClassRun:
    """Grade submissions and merge the results into the course's gradebook.

    `jobs` workers grade here, or those of a Dask scheduler at `tcp://...`; a cell may take `timeout` seconds; `again` is for
    what was graded before from the same files, too; `progress` is called after each submission.
    """
    began, limits = time.perf_counter(), limits or Limits()
    run = ClassRun(course, built, timeout, limits, progress, len(submissions))
    gradebook.prepare(course, built)
    run.resume(submissions, again)
    if run.waiting:
        if not calibration_path(built, limits).is_file():
            progress("the model answers first, once for each version of the lab", len(run.graded), run.total)
        devices = gpus() if limits.gpu and scheduler is None else []
        jobs = min(jobs, len(run.waiting), len(devices) or jobs)
        with connect(scheduler, jobs, built, limits.gpu) as client:
            run.dispatch(client, devices)
    run.seconds = time.perf_counter() - began
    return run


@dataclass
class ClassRun:
    """One run over a class: what waits to be graded, and what was graded so far."""

    course: Course
    built: Built
    timeout: float
    limits: Limits
    progress: Progress
    total: int  # submissions
    waiting: dict[str, tuple[bytes, str]] = field(default_factory=dict)  # student -> (the file, the key of its record)
    graded: list[SubmissionResult] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)  # graded before from the same files
    failed: dict[str, str] = field(default_factory=dict)  # student -> why there is no grade
    seconds: float = 0.0

    @property
    def flagged(self) -> list[SubmissionResult]:
        """The results that a person should look at."""
        return [result for result in self.graded if result.flags]

    def resume(self, submissions: Sequence[Submission], again: bool) -> None:
        """Take over what was graded before from the same files; the other submissions wait."""
        basis = f"{fingerprint(self.built)} {self.timeout} {self.limits}".encode()
        for submission in submissions:
            student, data = submission.student, submission.path.read_bytes()
            key = hashlib.sha256(basis + b"\0" + data).hexdigest()
            record = gradebook.load_record(self.course, self.built.name, student, key)
            if record is None or again:
                self.waiting[student] = (data, key)
            else:
                self.graded.append(record)
                self.resumed.append(student)
        gradebook.merge(self.course, self.graded)  # which may be another one than before
        if self.resumed:
            self.progress(self.resumed[-1], len(self.graded), self.total)

    def dispatch(self, client, devices: Sequence[str]) -> None:
        """Have the workers of a Dask client grade what waits, and keep the results as they come."""
        gpu = self.limits.gpu
        options = {"pure": False, "resources": {"GPU": 1} if gpu else None}
        lab = replace(self.built, questions=[])  # workers need the notebooks alone
        calibration = client.submit(calibrate_one, lab, self.limits, devices, **options)
        next(_in_order_of_end(client, [calibration], gpu)).result()
        shared = client.scatter(lab, broadcast=False, hash=False) if len(self.waiting) > SCATTER else lab
        futures = {}
        for student, (data, key) in self.waiting.items():
            name = f"grade-{student}-{key[:12]}-{time.time_ns()}"
            arguments = (shared, data, student, self.timeout, self.limits, devices)
            futures[client.submit(grade_one, *arguments, key=name, retries=RETRIES, **options)] = student
        try:
            for future in _in_order_of_end(client, futures, gpu):
                self._keep(futures[future], future)
                future.release()
        finally:
            client.cancel(list(futures))  # after an interrupt nothing is tried again

    def _keep(self, student: str, future) -> None:
        """Keep the result of a submission, or why there is none."""
        try:
            result = future.result()
        except Exception as error:  # whatever happened to this submission, the others go on
            why = f"not graded after {RETRIES + 1} attempts: {str(error).strip()[:500]}"
            self.failed[student] = why
            self.graded.append(not_graded(self.built, student, "not graded", why))
        else:
            gradebook.merge(self.course, [result])  # first: what has a record counts as graded
            gradebook.save_record(self.course, result, self.waiting[student][1])
            self.graded.append(result)
        self.progress(student, len(self.graded), self.total)
