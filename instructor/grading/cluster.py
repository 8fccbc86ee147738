"""Grade a class in worker processes: on this machine by default, on any Dask cluster by its address.

The code path is the same: `dask.distributed` hands submissions to workers, each of which keeps a warm process for the
lab (`engine`). A worker that dies takes its submission with it; another one tries again, twice at most, and then the
submission is flagged. Results come back as JSON text and are checked before one writer, this process, keeps them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from instructor.build import Built
from instructor.course import Course
from instructor.grading import gradebook
from instructor.grading.engine import calibrate, close_all, fingerprint, grade_notebook, is_warm, unreadable
from instructor.grading.intake import Submission
from instructor.grading.results import Flag, GradingError, SubmissionResult
from instructor.grading.walls import Limits

RETRIES = 2  # of a submission whose worker died, or whose checker failed
BATCH = 8  # results merged into the gradebook at a time


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


@contextmanager
def connect(scheduler: str | None, jobs: int, gpu: bool) -> Iterator:
    """A Dask client: of the cluster at an address, or of `jobs` worker processes here."""
    import dask
    from distributed import Client, LocalCluster

    if scheduler is not None:
        try:
            client = Client(scheduler, timeout="10s", set_as_default=False)
        except (OSError, ValueError, TimeoutError) as error:
            raise GradingError(f"no Dask scheduler answers at {scheduler}: {error}") from None
        with client:
            yield client
        return
    settings = {
        "distributed.scheduler.allowed-failures": RETRIES,
        "distributed.worker.daemon": False,
        "distributed.logging.distributed": "error",
        "distributed.worker.memory.terminate": False,
    }
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=jobs, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=None,
            resources={"GPU": 1} if gpu else None, silence_logs=50,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):  # fmt: skip
        yield client


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
    from distributed import as_completed

    began, summary, limits = time.perf_counter(), Summary(), limits or Limits()
    gradebook.prepare(course, built)
    cold = not is_warm(built, limits)
    calibrate(built, limits)  # once, and an early word if the lab itself is broken
    if cold:
        close_all()  # the workers have their own
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
        shared = client.scatter(fields, broadcast=False, hash=False) if len(waiting) > 50 else fields
        futures = {
            client.submit(
                grade_one, shared, data, student, timeout, limits.as_dict(), pure=False, retries=RETRIES,
                resources=resources, key=f"grade-{student}-{key[:12]}-{time.time_ns()}",
            ): student
            for student, (data, key) in waiting.items()
        }  # fmt: skip
        for future in as_completed(futures, loop=client.loop):
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
        if waiting and client is not None:
            run(client)
        elif waiting:
            with connect(scheduler, min(jobs, len(waiting)), limits.gpu) as own:
                run(own)
    finally:
        gradebook.merge(course, batch)  # also when interrupted: what is done is done
        summary.seconds = time.perf_counter() - began
    return summary


def _only(question: str, new: SubmissionResult, old: SubmissionResult | None) -> SubmissionResult:
    """The old result with one question replaced."""
    from instructor.grading.plan import question_of

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
