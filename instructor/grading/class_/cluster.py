"""Grade a class in worker processes: on this machine by default, on any Dask cluster by its address.

The code path is the same: `dask.distributed` hands submissions to workers, each of which keeps a warm process for the
lab (`engine`). A worker that dies takes its submission with it; another one tries again, twice at most, and then the
submission is flagged. Results come back as JSON text and are checked before one writer, this process, keeps them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from instructor.build import Built
from instructor.course import Course
from instructor.grading.class_ import gradebook
from instructor.grading.class_.intake import Submission
from instructor.grading.sandbox.walls import Limits
from instructor.grading.submission import engine
from instructor.grading.submission.engine import calibrate, close_all, fingerprint, grade_notebook, is_warm, unreadable
from instructor.grading.submission.results import Flag, GradingError, SubmissionResult

RETRIES = 2  # of a submission whose worker died, or whose checker failed
BATCH = 8  # results merged into the gradebook at a time
ARRIVE = 10.0  # seconds that workers have to register with a scheduler
ABSENT = 60.0  # seconds without any worker after which a run ends


@dataclass
class Summary:
    """What a run of `labs grade` did."""

    graded: list[SubmissionResult] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)  # graded before from the same files
    failed: dict[str, str] = field(default_factory=dict)  # student -> why there is no grade
    seconds: float = 0.0

    @property
    def flagged(self) -> list[SubmissionResult]:
        return [result for result in self.graded if result.flags]


def grade_one(fields: dict, data: bytes, student: str, timeout: float, limits: dict) -> str:
    """Runs in a worker: grade one submission; returns the result as JSON."""
    built = Built(questions=[], **fields)
    return json.dumps(grade_notebook(built, data, timeout=timeout, student=student, limits=Limits(**limits)).as_json())


def calibrate_one(fields: dict, limits: dict) -> None:
    """Runs in a worker: find out how the lab is graded on its kind of machine."""
    if limits["gpu"]:
        gpus()
    calibrate(Built(questions=[], **fields), Limits(**limits))


def sources_of(fields: dict) -> str:
    """Runs in a worker: the fingerprint of the course that it has."""
    return engine.fingerprint(Built(questions=[], **fields))


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
    """Give each worker of this machine, also one that takes another's place, the GPU of its number."""
    from distributed import WorkerPlugin

    class OneGPU(WorkerPlugin):
        def setup(self, worker) -> None:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(worker.name)]

    client.register_plugin(OneGPU())


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes and threads that start meanwhile never see Ctrl-C, which a terminal sends to all of a command's
    processes: this one ends them in good order. One that comes meanwhile arrives here afterwards.
    """
    from multiprocessing import resource_tracker

    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which lets SIGINT through again where it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def connect(scheduler: str | None, jobs: int, fields: dict, gpu: bool = False) -> Iterator:
    """A Dask client: of the cluster at an address, or of `jobs` worker processes here.

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
            _expect_workers(client, scheduler, fields, gpu)
            _limit_failures(client)
            yield client
        return
    settings = {
        "distributed.scheduler.allowed-failures": RETRIES,
        "distributed.worker.daemon": False,
        "distributed.logging.distributed": "error",
        "distributed.worker.memory.terminate": False,
    }
    with dask.config.set(settings):
        with _without_interrupts():
            cluster = LocalCluster(
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


def _able(client, gpu: bool) -> dict[str, dict]:
    """{address: what is known of it} of the workers that a submission can go to."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return {name: said for name, said in workers.items() if not gpu or said["resources"].get("GPU", 0) >= 1}


def _expect_workers(client, scheduler: str, fields: dict, gpu: bool) -> None:
    """`GradingError` if a cluster's workers cannot grade this lab; Dask would wait for others for ever."""
    began = time.monotonic()
    while not (able := _able(client, gpu)):
        if time.monotonic() - began > ARRIVE:
            some = len(_able(client, False))
            if gpu and some:
                raise GradingError(
                    f"--gpu needs workers with the resource GPU, and none of the {some} at {scheduler} has it: start "
                    f"one for each GPU with `dask worker {scheduler} --nworkers 1 --nthreads 1 --resources GPU=1`."
                )
            raise GradingError(
                f"the scheduler at {scheduler} has no workers: start some with `dask worker {scheduler} --nworkers 4 "
                "--nthreads 1`, or wait until they are there."
            )
        time.sleep(0.1)
    threads = {name: said["nthreads"] for name, said in able.items() if said["nthreads"] != 1}
    if threads:
        name, count = next(iter(threads.items()))
        raise GradingError(
            f"the worker {name} has {count} threads; each may have one, as it keeps one warm process: start workers "
            "with --nthreads 1, and more of them with --nworkers."
        )
    here = sources_of(fields)
    for name, there in client.run(sources_of, fields, workers=list(able), on_error="return").items():
        if isinstance(there, Exception):
            raise GradingError(
                f"the worker {name} cannot grade ({type(there).__name__}: {there}): workers need this folder at the "
                "same path, and the same environment."
            )
        if there != here:
            raise GradingError(
                f"the worker {name} has another version of the course than this machine: bring its folder up to date "
                "and start it again."
            )


def _limit_failures(client) -> None:
    """Have the scheduler give a submission up after as many dead workers as here; its default is one more."""

    def limit(dask_scheduler) -> None:  # within a function: Dask sends its code, and no module has to be there
        dask_scheduler.allowed_failures = retries

    retries = RETRIES
    client.run_on_scheduler(limit)


def _as_they_end(client, futures: Iterable, gpu: bool) -> Iterator:
    """Futures as they end; `GradingError` if nobody has been there for `ABSENT` seconds who could go on with them."""
    from queue import Empty, SimpleQueue

    ended: SimpleQueue = SimpleQueue()
    for future in futures:
        future.add_done_callback(ended.put)
    seen = time.monotonic()
    for _ in futures:
        while True:
            try:
                future = ended.get(timeout=min(5.0, ABSENT))
                if future.cancelled():  # nobody here does that: Dask does where a connection is lost
                    raise GradingError(
                        "the connection to the scheduler is lost. What was graded is in the gradebook: start it again, "
                        "and run the same command again to go on."
                    )
                yield future
                seen = time.monotonic()
                break
            except Empty:
                if _able(client, gpu):
                    seen = time.monotonic()
                elif time.monotonic() - seen > ABSENT:
                    raise GradingError(
                        f"no worker is left since {ABSENT:.0f} s. What was graded is in the gradebook: start workers "
                        "and run the same command again to go on."
                    ) from None


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
    progress: Callable[[str, int, int], None] = lambda student, done, total: None,
    client=None,
) -> Summary:
    """Grade submissions and merge the results into the course's gradebook.

    Args:
        course: where the gradebook and the folders are
        built: the lab
        submissions: what to grade
        jobs: worker processes here, if there is no scheduler
        scheduler: the address of a Dask scheduler, `tcp://...`
        timeout: seconds a cell may take
        again: grade also what was graded before from the same files
        question: keep only this question's new result, `1.1` or `bonus 1.4`; the others stay as they were graded before
        progress: is called with (student, done, total) after each submission
        client: a Dask client to use instead of starting one
    """
    began, summary, limits = time.perf_counter(), Summary(), limits or Limits()
    here = scheduler is None and client is None
    devices = gpus() if limits.gpu and here else []
    gradebook.prepare(course, built)
    basis = f"{fingerprint(built)} {timeout} {limits}"
    waiting, batch = {}, {}
    for submission in submissions:
        data = submission.path.read_bytes()
        key = hashlib.sha256(basis.encode() + b"\0" + data).hexdigest()
        known = gradebook.load_record(course, built.name, submission.student, key)
        if known is not None and not again and question is None:
            summary.graded.append(known)
            summary.resumed.append(submission.student)
            batch[submission.student] = known  # an interruption may have come before the gradebook had it
        else:
            waiting[submission.student] = (data, key)
    gradebook.merge(course, batch)
    total, done, batch = len(submissions), len(summary.resumed), {}
    if summary.resumed:
        progress(summary.resumed[-1], done, total)

    def keep(student: str, result: SubmissionResult) -> None:
        nonlocal batch
        if question is not None:
            result = _only(question, result, gradebook.load_record(course, built.name, student, waiting[student][1]))
        gradebook.save_record(course, result, waiting[student][1])
        summary.graded.append(result)
        batch[student] = result
        if len(batch) >= BATCH:
            gradebook.merge(course, batch)
            batch = {}

    fields = {"name": built.name, "instructor": built.instructor, "student": built.student}

    def run(client) -> None:
        nonlocal done
        resources = {"GPU": 1} if limits.gpu else None
        if devices:
            one_gpu_each(client, devices)
        if limits.gpu and not here:  # the machine of this process may have no GPU
            calibrating = client.submit(calibrate_one, fields, limits.as_dict(), pure=False, resources=resources)
            next(_as_they_end(client, [calibrating], gpu=True)).result()
        shared = client.scatter(fields, broadcast=False, hash=False) if len(waiting) > 50 else fields
        futures = {
            client.submit(
                grade_one,
                shared,
                data,
                student,
                timeout,
                limits.as_dict(),
                pure=False,
                retries=RETRIES,
                resources=resources,
                key=f"grade-{student}-{key[:12]}-{time.time_ns()}",
            ): student
            for student, (data, key) in waiting.items()
        }
        for future in _as_they_end(client, futures, limits.gpu):
            student = futures[future]
            try:
                result = SubmissionResult.from_json(json.loads(future.result()))
            except Exception as error:  # whatever happened there, the others go on
                why = f"not graded after {RETRIES + 1} attempts: {str(error).strip()[:500]}"
                flag = Flag("", "not graded", why)
                empty = unreadable(built, why, student)
                summary.failed[student] = why
                summary.graded.append(SubmissionResult(**{**vars(empty), "flags": (flag,)}))
            else:
                keep(student, result)
            done += 1
            future.release()
            progress(student, done, total)

    try:
        with ExitStack() as stack:
            if waiting and scheduler is not None and client is None:  # first, as it may have no workers
                client = stack.enter_context(connect(scheduler, 0, fields, limits.gpu))
            if waiting and (here or not limits.gpu):
                cold = not is_warm(built, limits)
                calibrate(built, limits)  # once, and an early word if the lab itself is broken
                if cold:
                    close_all()  # the workers have their own
            if waiting:
                workers = min(jobs, len(waiting), len(devices) or jobs)
                run(client or stack.enter_context(connect(None, workers, fields, limits.gpu)))
    finally:
        gradebook.merge(course, batch)  # also when interrupted: what is done is done
        summary.seconds = time.perf_counter() - began
    return summary


def _only(question: str, new: SubmissionResult, old: SubmissionResult | None) -> SubmissionResult:
    """The old result with one question replaced."""
    from instructor.grading.submission.plan import question_of

    if old is None:
        return new
    wanted = question_id(question)
    cells = {name: new.cells[name] if question_of(name) == wanted else cell for name, cell in old.cells.items()}
    flags = [f for f in old.flags if f.question != wanted] + [f for f in new.flags if f.question == wanted]
    return SubmissionResult(**{**vars(new), "cells": cells, "flags": tuple(flags)})


def question_id(question: str) -> str:
    """`1.1`, `bonus 1.4` or `q1_1` -> the question's id."""
    text = question.strip().lower().replace(".", "_")
    if text.startswith("bonus"):
        return "bonus_" + text.removeprefix("bonus").strip(" _")
    return text if text.startswith("q") else f"q{text}"
