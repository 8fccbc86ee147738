"""A class's race: who takes part, the calls of each kernel in turn with the reference's, the verdict on each, and the table."""

from __future__ import annotations

import os
import random
import secrets
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

import torch

from instructor.build import Built
from instructor.course import answered_notebook
from instructor.grading.race.compiling import Kernel, Refused, compile_text
from instructor.grading.race.problem import CELL, FILE, TAIL, TIMED, Shape, reference_rows, rows_to_read
from instructor.grading.race.track import Call, Seen, Track, TrackError
from instructor.grading.submission.plan import Unreadable, make_plan
from utils.benchmark.intervals import speedup, speedup_interval
from utils.config import GPU_SPECS
from utils.machine import device

PAIRS = 15  # timed pairs (one call of the reference, one of the entry) of a shape and a state of the L2
TRIES = 4  # of a call whose launch was not queued in time
REFERENCE = "reference"
# A row's error is |got - right| / |right|. On an H200, of 216 calls of eight honest kernels the largest mean was 0.23%, and the
# largest row 0.33%. P in 8 bits had a mean of 1.1%; the tail without its mask 4%.
MEAN_ERROR, ROW_ERROR = 0.005, 0.01


@dataclass(frozen=True)
class Entry:
    """One student's file: its text, or why there is none."""

    student: str
    source: str | None
    why: str = ""


@dataclass(frozen=True)
class Time:
    """One shape and state of the L2: times of the entry and of the reference, call by call (ms)."""

    shape: str
    l2: str
    flops: float
    ms: list[float]
    reference_ms: list[float]

    @property
    def tflops(self) -> float:
        """TFLOP/s of the median."""
        return self.flops / statistics.median(self.ms) / 1e9

    @property
    def ratio(self) -> float:
        """How many times as fast as the reference: the median over neighbouring calls."""
        return speedup(self.reference_ms, self.ms)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the ratio."""
        return speedup_interval(self.reference_ms, self.ms)


@dataclass
class Result:
    """What became of one entry."""

    student: str  # whose
    times: list[Time] = field(default_factory=list)  # of the shapes in order, each with a cold L2 first
    refused: str = ""  # why it does not count; "" if it does
    calls: int = 0  # calls whose rows were compared


class Race:
    """Runs entries on tracks, and replaces a track that a kernel took with it.

    Args:
        reference: the text of the reference's file, such as the lab's model answer.
        pairs: timed pairs of each shape and state of the L2.
    """

    shapes, tail = TIMED, TAIL  # those that are timed, and the one that has to be right before

    def __init__(self, reference: str, pairs: int = PAIRS) -> None:
        support = device.gluon_support()
        if not support:
            raise Refused(f"a race needs a Hopper GPU: {support.reason}")
        self.pairs, self.device = pairs, torch.device("cuda", torch.cuda.current_device())
        self.roof, self.reference = _roof_flops_a_ms(), compile_text(reference)
        self.track: Track | None = None

    def prepare_all(self, entries: list[Entry]) -> dict[str, Kernel | Refused]:
        """Compile all entries, several at once; a refusal stands in the place of what it refuses."""

        def prepared(entry: Entry) -> Kernel | Refused:
            if entry.source is None:
                return Refused(entry.why)
            try:
                kernel = compile_text(entry.source)
            except Refused as refused:
                return refused
            if kernel.descriptors != self.reference.descriptors:
                return Refused("the kernel was compiled for other descriptors than the question's.")
            return kernel

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return dict(zip([e.student for e in entries], pool.map(prepared, entries), strict=True))

    def run(self, student: str, kernel: Kernel | Refused) -> Result:
        """Let one entry run: first untimed and checked, then timed in turns with the reference, each call checked."""
        result = Result(student)
        if isinstance(kernel, Refused):
            result.refused = str(kernel)
            return result
        try:
            track = self._track()
            track.load("entry", kernel)
            for shape in (self.tail, *self.shapes):
                self._checked("entry", shape, result)
            for shape in self.shapes:
                for cold in (True, False):
                    result.times.append(self._timed(shape, cold, result))
            track.forget("entry")
        except (Refused, TrackError) as refused:
            result.refused, result.times = str(refused), []
            if isinstance(refused, TrackError):
                self.close()
        return result

    def _track(self) -> Track:
        if self.track is None:
            self.track = Track()
            self.track.load(REFERENCE, self.reference)
            for shape in (self.tail, *self.shapes):  # whoever runs first pays for what the libraries load
                self._checked(REFERENCE, shape, Result(REFERENCE))
        return self.track

    def close(self) -> None:
        """End the track; the next entry gets another one."""
        if self.track is not None:
            self.track.close()
            self.track = None

    def _checked(self, kernel: str, shape: Shape, result: Result, *, cold: bool = True) -> float:
        """Make one call, compare what it wrote, and return its time; a launch that was not queued in time is repeated."""
        assert self.track is not None
        for _ in range(TRIES):
            call = new_call(kernel, shape, cold=cold)
            seen = self.track.run(call)
            expect_right(call, seen, self.device, self.roof)
            result.calls += 1
            if seen.ahead:
                return seen.ms
        raise TrackError("the host was too slow to queue the launches: is something else running?")

    def _timed(self, shape: Shape, cold: bool, result: Result) -> Time:
        times: dict[str, list[float]] = {REFERENCE: [], "entry": []}
        for _ in range(self.pairs):
            for kernel in random.sample(list(times), 2):
                own = result if kernel == "entry" else Result(REFERENCE)
                times[kernel].append(self._checked(kernel, shape, own, cold=cold))
        return Time(shape.name, "cold" if cold else "warm", shape.flops, times["entry"], times[REFERENCE])


def _roof_flops_a_ms() -> float:
    """Return the dense bf16 rate of this GPU, in FLOPs a ms, by its data sheet."""
    name = device.detect_gpu()
    if name is None or name not in GPU_SPECS:
        raise Refused(f"{torch.cuda.get_device_name()} has no row in utils/config.py: its roof is not known.")
    return float(GPU_SPECS[name]["bf16_tflops"]) * 1e9


# ---- the verdict on a call -----------------------------------------------------------------------------------------------


def new_call(kernel: str, shape: Shape, *, cold: bool = True) -> Call:
    """Return a call whose inputs and rows nobody can foresee."""
    return Call(kernel, shape, secrets.randbits(48), secrets.randbits(48), cold)


def expect_right(call: Call, seen: Seen, kind: torch.device | str, most_flops_a_ms: float) -> None:
    """Raise Refused unless a call wrote the right rows, in a time that is possible.

    Args:
        call: what was asked for.
        seen: what the track saw.
        kind: the device where the reference is computed: as the track's, since inputs come from a generator there.
        most_flops_a_ms: the roof.
    """
    where = f"{call.shape.name}: "
    heads, rows = rows_to_read(call.shape, call.seed, call.lot)
    right = reference_rows(call.shape, call.seed, heads, rows, kind).cpu()
    unwritten = int((~seen.rows.isfinite()).any(-1).sum())
    if unwritten:
        raise Refused(f"{where}{unwritten} of {len(rows)} rows of the output are not finite, or were not written.")
    errors = (seen.rows - right).norm(dim=-1) / right.norm(dim=-1)
    mean, largest = float(errors.mean()), float(errors.max())
    if mean > MEAN_ERROR or largest > ROW_ERROR:
        wrong = int((errors > ROW_ERROR).sum())
        raise Refused(
            f"{where}rows differ from float64 by {mean:.2%} on average (limit {MEAN_ERROR:.1%}), and {wrong} of {len(rows)} "
            f"by more than {ROW_ERROR:.0%}, the worst by {largest:.0%}: is precision lowered, or work left out?"
        )
    if seen.inputs_changed:
        raise Refused(f"{where}the kernel wrote into its inputs.")
    least = call.shape.flops / most_flops_a_ms
    if seen.ms < least:
        raise Refused(
            f"{where}{seen.ms:.4g} is faster than the roof, {least:.4g}: nothing on this machine computes so fast."
        )


# ---- entries -----------------------------------------------------------------------------------------------------------


def entry_of(built: Built, student: str, submission: bytes) -> Entry:
    """Return the entry of a submission: the text of its cell for Question 5.3."""
    try:
        steps = make_plan(built, submission).steps
    except Unreadable as error:
        return Entry(student, None, str(error))
    first, _, text = next(step.source for step in steps if step.name == CELL).lstrip().partition("\n")
    if first.split() != ["%%writefile", FILE]:
        return Entry(student, None, f"the cell of Question 5.3 does not begin with %%writefile {FILE}.")
    return Entry(student, text + "\n")


def model_answer(built: Built) -> str:
    """Return the lab's own file for Question 5.3."""
    return cast(str, entry_of(built, "the lab", answered_notebook(built).encode()).source)


# ---- the class ---------------------------------------------------------------------------------------------------------


def race_class(
    race: Race, entries: list[Entry], progress: Callable[[Result], object] = lambda result: None
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


def table(results: list[Result]) -> list[dict[str, object]]:
    """Return the rows of the class's table, for results in order.

    A place is shared with everybody before whose interval reaches into the own one: a difference that the measurement
    cannot see decides nothing.
    """
    rows: list[dict[str, object]] = []
    place, lowest = 0, 0.0
    for number, result in enumerate(results, 1):
        row: dict[str, object] = {"place": "", "student": result.student}
        if not result.refused:
            low, high = result.times[0].interval
            if place == 0 or high < lowest:
                place, lowest = number, low
            row["place"] = place
        for time_ in result.times:
            key = f"{time_.shape}, {time_.l2}"
            low, high = time_.interval
            row |= {f"{key}: times the reference": round(time_.ratio, 4), f"{key}: from": round(low, 4)}
            row |= {f"{key}: to": round(high, 4), f"{key}: TFLOP/s": round(time_.tflops, 1)}
        row |= {"calls compared": result.calls, "refused": result.refused}
        rows.append(row)
    return rows


def lines_of(results: list[Result]) -> list[str]:
    """Return the table of results in order as lines to print: the first shape, the fastest first."""
    lines = []
    for row, result in zip(table(results), results, strict=True):
        if result.refused:
            lines.append(f"   -  {result.student}: does not count: {result.refused}")
            continue
        first = result.times[0]
        low, high = first.interval
        lines.append(
            f"{row['place']:>4}  {result.student}: {first.ratio:.3f} times the reference [{low:.3f}, {high:.3f}], "
            f"{first.tflops:.0f} TFLOP/s ({first.shape}, {first.l2} L2; {result.calls} calls compared)"
        )
    return lines
