"""The track: a process that runs compiled kernels between two events, and judges what each call wrote.

No Python of a student's runs here: a kernel comes as machine code, which reaches no memory but the four tensors of its call.
The process is one of its own because a kernel that fails takes its CUDA context with it.

Each call is made in this order, all of it queued on one stream: fresh inputs; NaN in the output, so that what is not written
shows; L2 lines that were kept on purpose are released; the L2 is overwritten (cold) or the inputs are read (warm); a spin,
while the rest is queued; an event, the kernel, an event. Then the inputs are drawn again, and rows are drawn and compared.
"""

from __future__ import annotations

import ctypes
import os
import random
import secrets
import signal
import statistics
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from instructor.grading.race.compiling import Kernel, Refused, race_launch, signature
from instructor.grading.race.problem import TAIL, TILE_ROWS, TIMED, Shape, draw_inputs, reference_rows, rows_to_read
from instructor.grading.sandbox.walls import die_with_parent
from utils.benchmark.intervals import speedup, speedup_interval
from utils.checking.kernel_exercises import descriptor
from utils.config import GPU_SPECS
from utils.kernels.handle import Handle
from utils.machine import device

SPIN_CYCLES = 1_000_000  # about half a millisecond: the launch behind it is queued before it ends
CALL_SECONDS = 6  # of one call; a kernel that waits for itself never ends
TRIES = 4  # of a call whose launch was not queued in time
REFERENCE, ENTRY = "reference", "entry"
# A row's error is |got - right| / |right|. On an H200, of 216 calls of eight honest kernels the largest mean was 0.23%, and the
# largest row 0.33%. P in 8 bits had a mean of 1.1%; the tail without its mask 4%.
MEAN_ERROR, ROW_ERROR = 0.005, 0.01


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

    student: str = ""  # whose
    times: list[Time] = field(default_factory=list)  # of the shapes in order, each with a cold L2 first
    refused: str = ""  # why it does not count; "" if it does
    calls: int = 0  # calls whose rows were compared


class Track:
    """Runs kernels on this machine's GPU, and judges each call."""

    shapes, tail = TIMED, TAIL  # those that are timed, and the one that has to be right before

    def __init__(self, reference: Kernel) -> None:
        from triton.runtime import driver

        from utils.benchmark.cpu_timer import flush_buffer

        name = device.detect_gpu()
        if name is None or name not in GPU_SPECS:
            raise Refused(f"{torch.cuda.get_device_name()} has no row in utils/config.py: its roof is not known.")
        self.roof = float(GPU_SPECS[name]["bf16_tflops"]) * 1e9  # FLOPs a ms, dense
        self.driver, self.device = driver.active.utils, torch.device("cuda", torch.cuda.current_device())
        self.flush = flush_buffer(self.device)
        self.calls: Counter[str] = Counter()
        self.kernels: dict[str, SimpleNamespace] = {}
        self.reference = reference
        self.load(REFERENCE, reference)
        for shape in (self.tail, *self.shapes):  # whoever runs first pays for what the libraries load
            self.call(REFERENCE, shape)

    def load(self, name: str, kernel: Kernel) -> None:
        """Load a kernel's machine code. How it is launched is the reference's: its file's words count for nothing."""
        if kernel.descriptors != self.reference.descriptors:
            raise Refused("the kernel was compiled for other descriptors than the question's.")
        metadata = SimpleNamespace(
            name=kernel.name,
            num_warps=kernel.num_warps,
            shared=kernel.shared,
            tensordesc_meta=self.reference.descriptors,
            global_scratch_size=0,
            profile_scratch_size=0,
            launch_pdl=False,
        )
        _, function, *_ = self.driver.load_binary(kernel.name, kernel.cubin, kernel.shared, self.device.index)
        self.kernels[name] = SimpleNamespace(
            metadata=metadata,
            asm={"ptx": self.reference.ptx},
            src=SimpleNamespace(signature=signature(race_launch(TAIL))),
            run=None,
            function=function,
        )

    def launch(self, name: str, shape: Shape, inputs: tuple, cold: bool) -> tuple[torch.Tensor, float, bool]:
        """Launch a kernel; return its output, the ms between the events, and whether all was queued before the device was there."""
        q, k, v = inputs
        out = torch.full_like(q, float("nan"))
        blocks = (TILE_ROWS, shape.block, shape.block, TILE_ROWS)
        tiles = [descriptor(x, [1, 1, rows, shape.head_dim]) for x, rows in zip((q, k, v, out), blocks, strict=True)]
        numbers = (shape.queries, shape.keys, shape.heads, shape.scale, shape.stages)
        start = Handle(self.kernels[name], shape.grid, tiles, numbers, self.device.index)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache()
        if cold:
            self.flush.zero_()
        else:
            for x in inputs:
                x.view(torch.int64).sum()
        torch.cuda._sleep(SPIN_CYCLES)
        begin.record()
        start(q, k, v, out)
        end.record()
        ahead = not begin.query()
        signal.alarm(CALL_SECONDS)  # ends this process
        torch.cuda.synchronize()
        signal.alarm(0)
        return out, begin.elapsed_time(end), ahead

    def call(self, name: str, shape: Shape, *, cold: bool = True) -> float:
        """Make one call, judge it, and return its ms; a launch that was not queued in time is repeated."""
        for _ in range(TRIES):
            seed = secrets.randbits(48)
            inputs = draw_inputs(shape, seed, self.device)
            out, ms, ahead = self.launch(name, shape, inputs, cold)
            drawn = draw_inputs(shape, seed, self.device)
            heads, rows = rows_to_read(shape, seed, secrets.randbits(48))
            expect_right(shape, out[0, heads, rows].double(), reference_rows(shape, drawn, heads, rows))
            if not all(map(torch.equal, inputs, drawn)):
                raise Refused(f"{shape.name}: the kernel wrote into its inputs.")
            if ms < (least := shape.flops / self.roof):
                raise Refused(
                    f"{shape.name}: {ms:.4g} is faster than the roof, {least:.4g}: nothing on this machine computes so fast."
                )
            self.calls[name] += 1
            if ahead:
                return ms
        raise Refused("the host was too slow to queue the launches: is something else running?")

    def time(self, shape: Shape, cold: bool, pairs: int) -> Time:
        """Time the entry and the reference in turns."""
        ms: dict[str, list[float]] = {ENTRY: [], REFERENCE: []}
        for _ in range(pairs):
            for name in random.sample(list(ms), 2):
                ms[name].append(self.call(name, shape, cold=cold))
        return Time(shape.name, "cold" if cold else "warm", shape.flops, ms[ENTRY], ms[REFERENCE])

    def run(self, kernel: Kernel, pairs: int) -> Result:
        """Let one entry run: first untimed, then timed in turns with the reference."""
        self.calls.clear()
        times, refused = [], ""
        try:
            self.load(ENTRY, kernel)
            for shape in (self.tail, *self.shapes):
                self.call(ENTRY, shape)
            times = [self.time(shape, cold, pairs) for shape in self.shapes for cold in (True, False)]
        except Refused as error:
            refused = str(error)
        return Result("", times, refused, self.calls[ENTRY])


def expect_right(shape: Shape, rows: torch.Tensor, right: torch.Tensor) -> None:
    """Raise Refused unless rows of a call's output, (rows, D) in float64, are what they should be."""
    unwritten = int((~rows.isfinite()).any(-1).sum())
    if unwritten:
        raise Refused(
            f"{shape.name}: {unwritten} of {len(rows)} rows of the output are not finite, or were not written."
        )
    errors = (rows - right).norm(dim=-1) / right.norm(dim=-1)
    mean, largest = float(errors.mean()), float(errors.max())
    if mean > MEAN_ERROR or largest > ROW_ERROR:
        wrong = int((errors > ROW_ERROR).sum())
        raise Refused(
            f"{shape.name}: rows differ from float64 by {mean:.2%} on average (limit {MEAN_ERROR:.1%}), and {wrong} of "
            f"{len(rows)} by more than {ROW_ERROR:.0%}, the worst by {largest:.0%}: is precision lowered, or work left out?"
        )


# ---- the process -------------------------------------------------------------------------------------------------------

_track: list[Track] = []


def start(reference: Kernel) -> None:
    """Make this process the track's."""
    die_with_parent()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing that a kernel prints reaches a terminal
    _track.append(Track(reference))


def run(kernel: Kernel, pairs: int) -> Result:
    """Let an entry run on this process's track."""
    return _track[0].run(kernel, pairs)
