"""A class's race: who takes part, a process in which kernels run one after the other, and the table."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from typing import cast

from instructor.build import Built
from instructor.course import answered_notebook
from instructor.grading.race import track
from instructor.grading.race.compiling import Kernel, Refused, compile_text
from instructor.grading.race.problem import CELL, FILE
from instructor.grading.race.track import Result
from instructor.grading.submission.plan import Unreadable, make_plan
from utils.machine import device

PAIRS = 15  # timed pairs (one call of the reference, one of the entry) of a shape and a state of the L2


class Race:
    """Runs entries beside a reference's file on a track, and replaces a track that a kernel took with it."""

    def __init__(self, reference: str, pairs: int = PAIRS) -> None:
        if not (support := device.gluon_support()):
            raise Refused(f"a race needs a Hopper GPU: {support.reason}")
        self.pairs, self.reference = pairs, compile_text(reference)
        self.pool: ProcessPoolExecutor | None = None  # of the track's process

    def prepare_all(self, entries: dict[str, str | Refused]) -> dict[str, Kernel | Refused]:
        """Compile all entries, {student: text of the file}, several at once; a refusal stands in the place of what it refuses."""

        def prepared(entry: str | Refused) -> Kernel | Refused:
            try:
                return entry if isinstance(entry, Refused) else compile_text(entry)
            except Refused as refused:
                return refused

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return dict(zip(entries, pool.map(prepared, entries.values()), strict=True))

    def run(self, student: str, kernel: Kernel | Refused) -> Result:
        """Let one entry run."""
        if isinstance(kernel, Refused):
            return Result(student, refused=str(kernel))
        return replace(self.on_track(kernel), student=student)

    def on_track(self, kernel: Kernel) -> Result:
        """Run a kernel in the track's process."""
        pool = self.pool = self.pool or self._start()
        try:
            return pool.submit(track.run, kernel, self.pairs).result()
        except BrokenProcessPool:
            why = (
                f"its process has ended: does the kernel fail, or wait for itself for more than {track.CALL_SECONDS} s?"
            )
        except Exception as error:  # of CUDA, and its context does not go on
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        self.close()
        return Result(refused=why)

    def _start(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(1, get_context("spawn"), track.start, (self.reference,))
        try:
            pool.submit(len, ()).result()  # after the start of its process
        except BrokenProcessPool:
            raise Refused("the reference does not run on this machine; what was printed says why.") from None
        return pool

    def close(self) -> None:
        """End the track; the next entry gets another one."""
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = None


# ---- entries -----------------------------------------------------------------------------------------------------------


def entry_of(built: Built, submission: bytes) -> str | Refused:
    """Return the text of a submission's cell for Question 5.3, or why there is none."""
    try:
        steps = make_plan(built, submission).steps
    except Unreadable as error:
        return Refused(str(error))
    first, _, text = next(step.source for step in steps if step.name == CELL).lstrip().partition("\n")
    if first.split() != ["%%writefile", FILE]:
        return Refused(f"the cell of Question 5.3 does not begin with %%writefile {FILE}.")
    return text + "\n"


def model_answer(built: Built) -> str:
    """Return the lab's own file for Question 5.3."""
    return cast(str, entry_of(built, answered_notebook(built).encode()))


# ---- the class ---------------------------------------------------------------------------------------------------------


def race_class(
    race: Race, entries: dict[str, str | Refused], progress: Callable[[Result], object] = lambda result: None
) -> list[Result]:
    """Let everybody run, in an order by lot, and return the results in the order of the table."""
    kernels = race.prepare_all(entries)
    results = []
    for student in random.sample(sorted(kernels), len(kernels)):
        results.append(race.run(student, kernels[student]))
        progress(results[-1])
    return in_order(results)


def in_order(results: list[Result]) -> list[Result]:
    """The fastest first, by the first shape; who was refused last, by name."""
    return sorted(results, key=lambda r: (bool(r.refused), -r.times[0].ratio if r.times else 0.0, r.student))


def table(results: list[Result]) -> tuple[list[dict[str, object]], list[str]]:
    """Return the rows of the class's table, and lines to print with the first shape alone, for results in order.

    A place is shared with everybody before whose interval reaches into the own one: a difference that the measurement
    cannot see decides nothing.
    """
    rows, lines = [], []
    place, lowest = 0, 0.0
    for number, result in enumerate(results, 1):
        row: dict[str, object] = {"place": "", "student": result.student}
        if result.refused:
            lines.append(f"   -  {result.student}: does not count: {result.refused}")
        else:
            first = result.times[0]
            low, high = first.interval
            if place == 0 or high < lowest:
                place, lowest = number, low
            row["place"] = place
            lines.append(
                f"{place:>4}  {result.student}: {first.ratio:.3f} times the reference [{low:.3f}, {high:.3f}], "
                f"{first.tflops:.0f} TFLOP/s ({first.shape}, {first.l2} L2; {result.calls} calls compared)"
            )
        for time_ in result.times:
            key = f"{time_.shape}, {time_.l2}"
            low, high = time_.interval
            row |= {f"{key}: times the reference": round(time_.ratio, 4), f"{key}: from": round(low, 4)}
            row |= {f"{key}: to": round(high, 4), f"{key}: TFLOP/s": round(time_.tflops, 1)}
        rows.append(row | {"calls compared": result.calls, "refused": result.refused})
    return rows, lines
